"""Upserts and deletes by key through a real server: what is in the table then, and what had to be read for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from connector.client import CURRENT, At
from connector.indexes import IndexClient
from connector.reading import scan
from connector.upserts import delete, upsert
from connector.writing import append
from tests.connector.served import Served

COLUMNS = ("id", "land", "ts", "note")
FIELDS: list[dict[str, Any]] = [
    {"id": 1, "name": "id", "required": True, "type": "long"},
    {"id": 2, "name": "land", "required": False, "type": "string"},
    {"id": 3, "name": "ts", "required": False, "type": "int"},
    {"id": 4, "name": "note", "required": False, "type": "string"},
]
ARROW = pa.schema([("id", pa.int64()), ("land", pa.string()), ("ts", pa.int32()), ("note", pa.string())])
MODES = ("merge-on-read", "copy-on-write")
BY_ID = {"seamark.index.ids": "record(id)"}


@pytest.fixture
def client(served: Served) -> Iterator[IndexClient]:
    made = IndexClient(served.url)
    yield made
    made.close()


def create(
    client: IndexClient,
    name: str = "t",
    *,
    version: int = 3,
    spec: Sequence[tuple[str, int]] = (),
    properties: Mapping[str, str] | None = None,
    fields: Sequence[dict[str, Any]] = FIELDS,
) -> None:
    """`spec` has (transform, source id)."""
    body: dict[str, Any] = {
        "name": name,
        "schema": {"type": "struct", "fields": list(fields)},
        "properties": {"format-version": str(version), **(properties or {})},
    }
    if spec:
        parts = [
            {"name": f"p{n}", "transform": transform, "source-id": source, "field-id": 1000 + n}
            for n, (transform, source) in enumerate(spec)
        ]
        body["partition-spec"] = {"spec-id": 0, "fields": parts}
    client._request("POST", "/v1/namespaces/db/tables", {}, json.dumps(body).encode())


def rows(*given: tuple[Any, ...]) -> pa.Table:
    """Of (id, land, ts, note), as many as are given."""
    return pa.Table.from_pylist([dict(zip(COLUMNS, one, strict=False)) for one in given], ARROW)


def held(client: IndexClient, name: str = "db.t", at: At = CURRENT) -> list[tuple[Any, ...]]:
    found = scan(client, name, COLUMNS, at=at).to_arrow().sort_by("id").to_pylist()
    return [tuple(one.values()) for one in found]


def files_of(served: Served) -> set[Path]:
    """Data, delete and index files, whether or not somebody names them."""
    return {one for one in served.home.rglob("*") if one.suffix in (".parquet", ".puffin") and "cache" not in one.parts}


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_rows_come_in_the_place_of_those_with_their_keys(
    client: IndexClient, mode: str, version: int, indexed: bool
) -> None:
    create(client, version=version, properties=BY_ID if indexed else {})
    first = upsert(client, "db.t", rows((1, "de", 1), (2, "fr", 1), (3, None, 1)), keys=["id"], mode=mode)
    assert (first.inserted, first.updated, first.files_read, first.files_removed) == (3, 0, 0, 0)
    append(client, "db.t", rows((7, "it", 1)))
    report = upsert(client, "db.t", rows((2, "es", 2), (9, "at", 2)), keys=["id"], mode=mode)
    assert held(client) == [
        (1, "de", 1, None),
        (2, "es", 2, None),
        (3, None, 1, None),
        (7, "it", 1, None),
        (9, "at", 2, None),
    ]
    assert (report.inserted, report.updated, report.deleted, report.stale) == (1, 1, 0, 0)
    again = upsert(client, "db.t", rows((2, "x", 3), (1, "y", 3)), keys=["id"], mode=mode)
    assert held(client)[:2] == [(1, "y", 3, None), (2, "x", 3, None)]
    assert again.updated == 2
    gone = delete(client, "db.t", keys=pa.table({"id": [1, 3, 555]}), mode=mode)
    assert (gone.deleted, gone.attempts) == (2, 1)
    assert [one[0] for one in held(client)] == [2, 7, 9]
    gone = delete(client, "db.t", where="ts = 1", mode=mode)
    assert gone.deleted == 1
    assert [one[0] for one in held(client)] == [2, 9]
