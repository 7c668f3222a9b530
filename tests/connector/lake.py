"""Tables of real Parquet files, written by PyIceberg, for tests of those who build indexes of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

SCHEMA = pa.schema([("id", pa.int64()), ("country", pa.string()), ("discount", pa.int64())])


@contextmanager
def catalog_at(url: str) -> Iterator[RestCatalog]:
    """PyIceberg leaves sockets to the garbage collector; its warnings are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with RestCatalog("sea", uri=url) as catalog:
            yield catalog


def create(url: str, name: str = "db.t") -> None:
    """Empty."""
    with catalog_at(url) as catalog:
        catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        catalog.create_table(name, schema=SCHEMA)


def append(url: str, name: str, parts: Sequence[Sequence[int]]) -> None:
    """One data file a part, of these ids; all files span the same range of all columns as far as they can."""
    with catalog_at(url) as catalog:
        table = catalog.load_table(name)
        for ids in parts:
            table.append(pa.table(rows(ids), schema=SCHEMA))


def rows(ids: Sequence[int]) -> dict[str, list[Any]]:
    return {"id": list(ids), "country": [f"c{one % 7}" for one in ids], "discount": [one % 11 for one in ids]}


def spread(parts: int, rows_each: int = 20) -> list[list[int]]:
    """Return ids such that each part spans the range of all."""
    return [[part + parts * number for number in range(rows_each)] for part in range(parts)]
