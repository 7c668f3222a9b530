"""DuckDB's functions for sketches of distinct values (`distinct_sketches.py`), which Python computes.

DuckDB collects the distinct sketches of a group in a list, and one function merges the list. The sketch of a row has
one register, so the list of many rows is short: at most 53 sketches for each of the 4096 registers.
"""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from duckdb.func import FunctionNullHandling, PythonUDFType

from seamark.connector.cubes.sketch_calls import COUNT_SKETCHES, FUNCTION_ENDS, SKETCH_PREFIX
from seamark.formats.index.keys.distinct_sketches import (
    SKETCH,
    estimate_sketches,
    make_value_sketches,
    merge_sketches,
)


def create_functions(con: duckdb.DuckDBPyConnection) -> None:
    """Create the functions in a connection, unless it has them."""
    try:
        for kind, end in FUNCTION_ENDS.items():
            con.create_function(
                SKETCH_PREFIX + end, _make_sketches, [duckdb.type(kind)], "BLOB", type=PythonUDFType.ARROW
            )
        con.create_function(
            COUNT_SKETCHES,
            _count_sketches,
            [con.list_type("BLOB")],
            "BIGINT",
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
        )
    except duckdb.NotImplementedException as error:
        if "already created" not in str(error):
            raise


def _make_sketches(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    return make_value_sketches(_to_array(values)).cast(pa.binary())


def _count_sketches(lists: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the estimate of the sketches of each list. It is 0 for a null."""
    array = _to_array(lists)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    sketches = pa.chunked_array([array.flatten().cast(SKETCH)])
    return estimate_sketches(merge_sketches(sketches, np.repeat(np.arange(len(array)), lengths), len(array)))


def _to_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
