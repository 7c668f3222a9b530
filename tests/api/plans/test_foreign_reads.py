"""No outcome of a commit tells what the files of another table contain."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.api.client import Answer
from tests.api.plans import test_foreign_files
from tests.api.plans.planned import file_of
from tests.api.plans.test_foreign_files import SECRET, Lake, manifest, manifest_list
from tests.planner.lakes.lake import DataFile

lake = test_foreign_files.lake


def _written(path: Path) -> DataFile:
    """A file with the text SECRET, and no bounds."""
    fields = [
        pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})
        for number, (name, kind) in enumerate((("id", pa.int64()), ("data", pa.string())), 1)
    ]
    out = io.BytesIO()
    pq.write_table(pa.table([pa.array([1]), pa.array([SECRET])], schema=pa.schema(fields)), out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())
    return DataFile(f"file://{path}", 0, "PARQUET", 0, (), 1, len(out.getvalue()), {}, split_offsets=[4])


async def _ask(lake: Lake, value: str, **body: Any) -> Answer:
    """Whether a row with this text was added since the table was empty."""
    mine = await lake.folder("mine")
    added = {"spec-id": 0, "content": "data", "file-path": f"file://{mine}/data/x{value}.parquet", "partition": []}
    added |= {"file-format": "parquet", "file-size-in-bytes": 100, "record-count": 1}
    scope = {"filter": {"type": "eq", "term": "data", "value": value}}
    body = {"add": [added], "read-snapshot-id": None, "scope": scope, **body}
    return await lake("wendy", "POST", "/api/v1/tables/mine/t/commit", body)


async def test_a_change_is_not_held_against_rows_of_another_table(lake: Lake) -> None:
    mine, theirs = await lake.folder("mine"), await lake.folder("theirs")
    secret = _written(theirs / "data" / "victim.parquet")
    own = manifest(mine / "metadata" / "own.avro", [file_of(f"file://{mine}/data/a.parquet", 1, 9)], 7)
    made = manifest_list(mine / "metadata" / "l.avro", [own])
    assert (await lake.commit("wendy", "mine", 7, made)).status == 200
    # Both are written over after the commit.
    manifest_list(mine / "metadata" / "l.avro", [manifest(mine / "metadata" / "own.avro", [secret], 7)])
    for value in (SECRET, "another"):
        assert (await _ask(lake, value)).error[:2] == (403, "ForbiddenException"), value


async def test_own_rows_are_still_compared(lake: Lake) -> None:
    mine = await lake.folder("mine")
    own = manifest(mine / "metadata" / "own.avro", [_written(mine / "data" / "a.parquet")], 7)
    made = manifest_list(mine / "metadata" / "l.avro", [own])
    assert (await lake.commit("wendy", "mine", 7, made)).status == 200
    assert (await _ask(lake, SECRET)).error[0] == 409
    assert (await _ask(lake, "another")).status == 200


async def test_a_change_reads_no_list_or_manifest_of_another_table(lake: Lake) -> None:
    mine, theirs = await lake.folder("mine"), await lake.folder("theirs")
    own = manifest(mine / "metadata" / "own.avro", [file_of(f"file://{mine}/data/a.parquet", 1, 9)], 7)
    second = manifest_list(mine / "metadata" / "l8.avro", [own])
    assert (await lake.commit("wendy", "mine", 7, manifest_list(mine / "metadata" / "l7.avro", [own]))).status == 200
    assert (await lake.commit("wendy", "mine", 8, second, **{"parent-snapshot-id": 7})).status == 200
    foreign = manifest(theirs / "metadata" / "m.avro", [file_of(f"file://{theirs}/x", 1, 9)], 7, write=False)
    manifest_list(mine / "metadata" / "l7.avro", [foreign])  # the list of an earlier snapshot
    remove = {"add": [], "scope": None, "remove": [{"file-path": f"file://{mine}/data/a.parquet"}]}
    for body in ({}, remove):
        answer = await _ask(lake, "another", **body)
        assert answer.error[0] == 403, answer.raw
        assert SECRET not in answer.raw.decode()
