"""DuckDB's functions for sketches of distinct values (`distinct_sketches.py`), which Python computes.

DuckDB collects the distinct sketches of a group in a list, and one function merges the list. The sketch of a row has
one register, so the list of many rows is short: at most 53 sketches for each of the 4096 registers.
"""

from __future__ import annotations

from contextlib import suppress

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

_PREFIX = "seamark_"
_ARGUMENTS = {SKETCH_PREFIX + end: kind for kind, end in FUNCTION_ENDS.items()}
"""The type of the argument of each function that makes sketches, by its name."""


def create_functions(con: duckdb.DuckDBPyConnection) -> bool:
    """Create the functions in the database of a connection, unless it has them.

    They are created outside of the transaction of the connection. Otherwise a rollback would remove them, and the
    connection could not create them again.

    Returns:
        Whether the connection can use the functions. A transaction that began before cannot.
    """
    missing = _list_missing(con)
    if not missing:
        return True
    with con.cursor() as cursor:
        for name in missing:
            # Another connection may create the function at the same time.
            with suppress(duckdb.CatalogException, duckdb.TransactionException):
                _create_function(cursor, name)
    return not _list_missing(con)


def _list_missing(con: duckdb.DuckDBPyConnection) -> list[str]:
    """Return the names of the functions that a connection does not see."""
    rows = con.sql(
        f"SELECT DISTINCT function_name FROM duckdb_functions() WHERE starts_with(function_name, '{_PREFIX}')"  # noqa: S608
    ).fetchall()
    existing_names = {name for (name,) in rows}
    return [name for name in (*_ARGUMENTS, COUNT_SKETCHES) if name not in existing_names]


def _create_function(con: duckdb.DuckDBPyConnection, name: str) -> None:
    if name == COUNT_SKETCHES:
        con.create_function(
            name,
            _count_sketches,
            [con.list_type("BLOB")],
            "BIGINT",
            type=PythonUDFType.ARROW,
            null_handling=FunctionNullHandling.SPECIAL,
        )
    else:
        con.create_function(name, _make_sketches, [duckdb.type(_ARGUMENTS[name])], "BLOB", type=PythonUDFType.ARROW)


def _make_sketches(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    return make_value_sketches(_to_array(values)).cast(pa.binary())


def _count_sketches(lists: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the estimated number of distinct values of each list of sketches. It is 0 for a null.

    The lists are joined to one array of sketches, each with the index of its list, so that all are merged in one call.
    """
    array = _to_array(lists)
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    sketches = pa.chunked_array([array.flatten().cast(SKETCH)])
    return estimate_sketches(merge_sketches(sketches, np.repeat(np.arange(len(array)), lengths), len(array)))


def _to_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)
