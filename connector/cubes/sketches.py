"""Sketches of distinct values (`distinct_sketches.py`) in the SQL and in the formats of engines.

DuckDB calls functions that `connector/duckdb/sketch_functions.py` defines. Trino and Spark have functions that merge
their own sketches, whose registers have the same meaning. So the sketches of groups are written in the formats of these
engines. Trino and Spark hash values differently, so they cannot add rows to these sketches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.connector.cubes.dialects import NotFromCube
from seamark.connector.cubes.statements import CubeStatement
from seamark.formats.index.keys.distinct_sketches import REGISTERS, SKETCH, iterate_registers
from seamark.formats.index.keys.measures import list_partials
from seamark.formats.index.kinds.cube import combine_groups

Registers = npt.NDArray[np.uint8]
_INDEX_BITS = 12
_TRINO_DENSE = 3
"""The tag of Airlift's format of sketches with all registers (`DenseHll`, version 2)."""
_DELTA_MAX = 15
_SPARK_HEAD = struct.Struct("<8Bdddii")
"""The preamble of an `HllSketch` of DataSketches with all registers."""
_SPARK_PREAMBLE_WORDS, _SPARK_VERSION, _SPARK_FAMILY = 10, 1, 7
_SPARK_OUT_OF_ORDER, _SPARK_HLL_8 = 16, 10
_SPARK_LOW_RANK_MAX = 31
"""The largest rank that the first of the two sums in the preamble includes."""


def convert_sketches(groups: pa.Table, statement: CubeStatement, encode: Callable[[Registers], bytes]) -> pa.Table:
    """Return the groups with sketches in the format of an engine. Equal groups are merged before.

    Args:
        groups: The groups, with the columns of the statement.
        statement: The query over the cube.
        encode: `encode_for_trino` or `encode_for_spark`.

    Raises:
        NotFromCube: A sum does not fit its type, or a sketch is damaged.
    """
    if not any(kind == SKETCH for kind in groups.schema.types):
        return groups
    partials = {f"m{number}": each.function for number, each in enumerate(list_partials(statement.cube.measures))}
    functions = {name: partials[name] for name in groups.column_names if name in partials}
    try:
        return _convert(combine_groups(groups, functions).select(groups.column_names), encode)
    except (ValueError, pa.ArrowException) as error:
        raise NotFromCube(f"{statement.cube.name}: {error}") from None


def _convert(merged: pa.Table, encode: Callable[[Registers], bytes]) -> pa.Table:
    for number, field in enumerate(merged.schema):
        if field.type == SKETCH:
            sketches = [encode(registers) for registers in iterate_registers(merged[field.name])]
            merged = merged.set_column(number, field.name, pa.chunked_array([pa.array(sketches, pa.binary())]))
    return merged


def encode_for_trino(registers: Registers) -> bytes:
    """Return registers as a `HyperLogLog` of Trino: the least rank, and distances from it in 4 bits each.

    For a distance of more than 15, 15 is stored, and the rest of the distance is listed at the end.
    """
    baseline = int(registers.min())
    distances = registers.astype(np.int64) - baseline
    nibbles = np.minimum(distances, _DELTA_MAX).astype(np.uint8)
    packed = (nibbles[0::2] << 4) | nibbles[1::2]
    beyond = np.flatnonzero(distances > _DELTA_MAX)
    head = struct.pack("<3B", _TRINO_DENSE, _INDEX_BITS, baseline)
    listed = struct.pack("<H", len(beyond)) + beyond.astype("<u2").tobytes()
    return head + packed.tobytes() + listed + (distances[beyond] - _DELTA_MAX).astype(np.uint8).tobytes()


def encode_for_spark(registers: Registers) -> bytes:
    """Return registers as an `HllSketch` of DataSketches, of the type HLL_8, which has one byte for each register.

    The header contains the sum of 2**-rank over all registers, divided into the low and the high ranks to keep the
    precision of the floats, and the number of registers that are zero.
    """
    counts = np.bincount(registers, minlength=64)
    weights = counts * 2.0 ** -np.arange(len(counts))
    low, high = weights[: _SPARK_LOW_RANK_MAX + 1].sum(), weights[_SPARK_LOW_RANK_MAX + 1 :].sum()
    zeros = int(counts[0])
    head = (_SPARK_PREAMBLE_WORDS, _SPARK_VERSION, _SPARK_FAMILY, _INDEX_BITS, 0, _SPARK_OUT_OF_ORDER, 0, _SPARK_HLL_8)
    assert len(registers) == REGISTERS
    return _SPARK_HEAD.pack(*head, 0.0, float(low), float(high), zeros, 0) + registers.tobytes()
