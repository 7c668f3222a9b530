"""Tables of Parquet files that PyIceberg writes, for tests of index builds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

SCHEMA = pa.schema([("id", pa.int64()), ("country", pa.string()), ("discount", pa.int64())])


@contextmanager
def open_catalog(url: str) -> Iterator[RestCatalog]:
    """Yield a PyIceberg catalog without its warnings about sockets that PyIceberg leaves open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with RestCatalog("sea", uri=url) as catalog:
            yield catalog


def create_lake_table(url: str, name: str = "db.t") -> None:
    """Create an empty table, and its namespace if it is missing."""
    with open_catalog(url) as catalog:
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        catalog.create_table(name, schema=SCHEMA)


def append_parts(url: str, name: str, parts: Sequence[Sequence[int]]) -> None:
    """Append one data file for each part.

    A part has the ids of the rows. The bounds of the other columns are the same in all files with enough rows.
    """
    with open_catalog(url) as catalog:
        table = catalog.load_table(name)
        for ids in parts:
            table.append(pa.table(build_columns(ids), schema=SCHEMA))


def build_columns(ids: Sequence[int]) -> dict[str, list[Any]]:
    return {"id": list(ids), "country": [f"c{id_ % 7}" for id_ in ids], "discount": [id_ % 11 for id_ in ids]}


def spread_ids(parts: int, rows_each: int = 20) -> list[list[int]]:
    """Return the ids of `parts` parts; each part spans the range of all ids."""
    return [[part + parts * number for number in range(rows_each)] for part in range(parts)]
