"""Tests of theta sketches against DataSketches' C++ library, and of hashes against PyIceberg's serialisation."""

from __future__ import annotations

import random
import struct
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import datasketches
import mmh3
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg import conversions
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from seamark.connector.arrow.casting import get_arrow_type
from seamark.connector.arrow.distinct_values import add_values
from seamark.formats.index.kernels import _murmur
from seamark.formats.index.keys.theta import NOMINAL_ENTRIES, SEED, SketchBuilder, ThetaSketch
from seamark.formats.runtime.errors import Corrupt
from tests.seeds import first_seed


def build_sketch(texts: list[str]) -> ThetaSketch:
    builder = SketchBuilder()
    for start in range(0, len(texts), 1000):
        add_values(builder, pa.array(texts[start : start + 1000], pa.string()), "string")
    return builder.build()


def build_datasketches_sketch(texts: list[str]) -> Any:
    sketch = datasketches.update_theta_sketch(12)  # The binary logarithm of the number of entries.
    for text in texts:
        sketch.update(text)
    return sketch


def read_with_datasketches(sketch: ThetaSketch) -> Any:
    return datasketches.compact_theta_sketch.deserialize(sketch.encode())


def test_compiled_hashes_equal_mmh3() -> None:
    rng = random.Random(first_seed())
    rows = [rng.randbytes(size) for size in range(70)] + [rng.randbytes(rng.randrange(200)) for _ in range(200)]
    starts = np.cumsum([0] + [len(row) for row in rows])
    actual_hashes = _murmur.hash_spans(np.frombuffer(b"".join(rows), np.uint8), starts, SEED, 64)
    assert actual_hashes.tolist() == [mmh3.hash64(row, SEED, True, signed=False)[0] for row in rows]
    with pytest.raises(ValueError, match="outside"):
        _murmur.hash_spans(np.zeros(3, np.uint8), np.array([0, 4]), SEED, 64)
    with pytest.raises(ValueError, match="whole number"):
        _murmur.hash_fixed(np.zeros(3, np.uint8), 2, SEED, 64)


@pytest.mark.parametrize("count", [0, 1, 2, 100, NOMINAL_ENTRIES])
def test_sketch_of_few_values_equals_the_sketch_of_datasketches(count: int) -> None:
    texts = [f"v{number}" for number in range(count)]
    assert build_sketch(texts + texts).encode() == build_datasketches_sketch(texts).compact().serialize()


@pytest.mark.parametrize("count", [NOMINAL_ENTRIES + 1, 50_000, 300_000])
def test_datasketches_reads_a_sketch_of_many_values_within_its_error(count: int) -> None:
    texts = [f"v{number}" for number in range(count)]
    seamark_sketch, datasketches_sketch = build_sketch(texts), build_datasketches_sketch(texts)
    assert len(seamark_sketch.hashes) == NOMINAL_ENTRIES
    # The true count is within three standard deviations of the estimate.
    assert read_with_datasketches(seamark_sketch).get_estimate() == pytest.approx(seamark_sketch.estimate)
    assert (
        read_with_datasketches(seamark_sketch).get_lower_bound(3)
        <= count
        <= read_with_datasketches(seamark_sketch).get_upper_bound(3)
    )
    # A sketch of DataSketches, which keeps more hashes, becomes the same sketch.
    assert ThetaSketch.decode(datasketches_sketch.compact().serialize()).encode() == seamark_sketch.encode()


def test_union_equals_the_sketch_of_all_values() -> None:
    rng = random.Random(first_seed())
    for _ in range(20):
        parts = [
            [f"v{rng.randrange(30_000)}" for _ in range(rng.choice((0, 1, 50, 5000, 20_000)))]
            for _ in range(rng.randint(1, 4))
        ]
        sketches = [ThetaSketch.decode(build_sketch(part).encode()) for part in parts]
        assert ThetaSketch.union(sketches).encode() == build_sketch([text for part in parts for text in part]).encode()
    assert ThetaSketch.union([]).estimate == 0


VALUES: list[tuple[str, PrimitiveType, list[Any]]] = [
    ("boolean", BooleanType(), [True, False]),
    ("int", IntegerType(), [0, -1, 7, 2**31 - 1, -(2**31)]),
    ("long", LongType(), [0, -1, 7, 2**63 - 1]),
    ("float", FloatType(), [0.0, -1.5, 2.25]),
    ("double", DoubleType(), [0.0, -0.0, 1e300]),
    ("date", DateType(), [date(1970, 1, 1), date(1960, 2, 3), date(2026, 1, 1)]),
    ("time", TimeType(), [time(0, 0), time(23, 59, 59, 999999)]),
    ("timestamp", TimestampType(), [datetime(1970, 1, 1), datetime(1950, 3, 4, 5, 6, 7, 8)]),
    ("timestamptz", TimestamptzType(), [datetime(2020, 1, 1, tzinfo=UTC)]),
    ("string", StringType(), ["a", "ä", "x" * 100]),
    ("binary", BinaryType(), [b"\0", b"abc"]),
    ("fixed[3]", FixedType(3), [b"abc", b"\0\0\0"]),
    ("uuid", UUIDType(), [uuid.UUID(int=5), uuid.UUID(int=1 << 127)]),
    (
        "decimal(38, 2)",
        DecimalType(38, 2),
        [Decimal(n).scaleb(-2) for n in (0, 1, -1, 127, 128, -128, -129, 255, 256, 32767, 32768, -32769)]
        + [Decimal(f"{'9' * 36}.99")],
    ),
]


@pytest.mark.parametrize(("kind", "peer", "values"), VALUES, ids=[kind for kind, _, _ in VALUES])
def test_values_are_hashed_in_icebergs_serialisation(kind: str, peer: PrimitiveType, values: list[Any]) -> None:
    stored_bytes = [value.bytes if isinstance(value, uuid.UUID) else value for value in values]
    array = pa.array([None, *stored_bytes, *stored_bytes], get_arrow_type(kind))
    builder = SketchBuilder()
    add_values(builder, array.slice(1), kind)
    add_values(builder, array, kind)
    expected = {mmh3.hash64(conversions.to_bytes(peer, value), SEED, True, signed=False)[0] >> 1 for value in values}
    assert set(builder.build().hashes.tolist()) == expected


def test_empty_bytes_are_not_a_value_as_in_datasketches() -> None:
    builder = SketchBuilder()
    add_values(builder, pa.array(["", None, "a"]), "string")
    assert builder.build().encode() == build_datasketches_sketch(["", "a"]).compact().serialize()


def test_bytes_that_are_not_a_sketch_are_rejected() -> None:
    rng = random.Random(first_seed())
    whole_sketch = build_sketch([f"v{number}" for number in range(9000)]).encode()
    for data in (
        b"",
        whole_sketch[:7],
        whole_sketch[:-8],
        whole_sketch + b"\0" * 8,
        # A header with the length, the version, the family 2 (not compact), two unused bytes, the flags and the seed.
        struct.pack("<BBBBBBH", 1, 3, 2, 0, 0, 8, 0x93CC),
    ):
        with pytest.raises(Corrupt):
            ThetaSketch.decode(data)
    with pytest.raises(Corrupt, match="seed"):
        # The bytes 6 and 7 are the hash of the seed.
        ThetaSketch.decode(whole_sketch[:6] + b"\1\1" + whole_sketch[8:])
    for _ in range(500):
        damaged_bytes = bytearray(whole_sketch)
        damaged_bytes[rng.randrange(32)] = rng.randrange(256)
        try:
            assert len(ThetaSketch.decode(bytes(damaged_bytes)).hashes) <= NOMINAL_ENTRIES
        except Corrupt:
            continue
