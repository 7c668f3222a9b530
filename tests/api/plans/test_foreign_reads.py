"""Tests that the outcome of a commit reveals nothing about the contents of another table's files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.api.client import SCHEMA, Answer, build_property_commit
from tests.api.plans import test_foreign_files
from tests.api.plans.planned import KINDS, STYLE, build_data_file
from tests.api.plans.test_foreign_files import SECRET, TwoNamespaces, write_manifest, write_manifest_list
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.manifests import ADDED, DELETED, EXISTING, Entry, Manifest, build_manifest_bytes

lake = test_foreign_files.lake


def _write_secret_file(path: Path) -> DataFile:
    """Write a data file with the text SECRET, and return its manifest entry without bounds.

    Without bounds, the server can compare a change with the file only by its rows.
    """
    fields = [
        pa.field(name, kind, metadata={"PARQUET:field_id": str(number)})
        for number, (name, kind) in enumerate((("id", pa.int64()), ("data", pa.string())), 1)
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.table([pa.array([1]), pa.array([SECRET])], schema=pa.schema(fields)), buffer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return DataFile(
        f"file://{path}",
        content=0,
        format="PARQUET",
        spec_id=0,
        partition=(),
        record_count=1,
        size=len(buffer.getvalue()),
        metrics={},
        split_offsets=[4],
    )


async def _send_change(lake: TwoNamespaces, text: str, **body: Any) -> Answer:
    """Send a change that fails if a row with this text was added since the table was empty."""
    own_folder = await lake.find_folder("mine")
    added_file = {
        "spec-id": 0,
        "content": "data",
        "file-path": f"file://{own_folder}/data/x{text}.parquet",
        "partition": [],
    }
    added_file |= {"file-format": "parquet", "file-size-in-bytes": 100, "record-count": 1}
    scope = {"filter": {"type": "eq", "term": "data", "value": text}}
    body = {"add": [added_file], "read-snapshot-id": None, "scope": scope, **body}
    return await lake("wendy", "POST", "/api/v1/tables/mine/t/commit", body)


async def test_change_is_not_compared_with_rows_of_another_table(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    secret_file = _write_secret_file(foreign_folder / "data" / "victim.parquet")
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro",
        [build_data_file(f"file://{own_folder}/data/a.parquet", low=1, high=9)],
        snapshot_id=7,
    )
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [own_manifest])
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 200
    # The test overwrites the manifest and the manifest list after the commit.
    write_manifest_list(
        own_folder / "metadata" / "l.avro",
        [write_manifest(own_folder / "metadata" / "own.avro", [secret_file], snapshot_id=7)],
    )
    for value in (SECRET, "another"):
        assert (await _send_change(lake, value)).error[:2] == (403, "ForbiddenException"), value


async def test_change_is_compared_with_rows_of_its_own_table(lake: TwoNamespaces) -> None:
    own_folder = await lake.find_folder("mine")
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro", [_write_secret_file(own_folder / "data" / "a.parquet")], 7
    )
    list_location = write_manifest_list(own_folder / "metadata" / "l.avro", [own_manifest])
    assert (await lake.commit("wendy", "mine", 7, list_location)).status == 200
    assert (await _send_change(lake, SECRET)).error[0] == 409
    assert (await _send_change(lake, "another")).status == 200


async def test_change_reads_no_manifest_or_list_of_another_table(lake: TwoNamespaces) -> None:
    own_folder, foreign_folder = await lake.find_folder("mine"), await lake.find_folder("theirs")
    own_manifest = write_manifest(
        own_folder / "metadata" / "own.avro",
        [build_data_file(f"file://{own_folder}/data/a.parquet", low=1, high=9)],
        snapshot_id=7,
    )
    second_list = write_manifest_list(own_folder / "metadata" / "l8.avro", [own_manifest])
    assert (
        await lake.commit("wendy", "mine", 7, write_manifest_list(own_folder / "metadata" / "l7.avro", [own_manifest]))
    ).status == 200
    assert (await lake.commit("wendy", "mine", 8, second_list, **{"parent-snapshot-id": 7})).status == 200
    foreign_manifest = write_manifest(
        foreign_folder / "metadata" / "m.avro",
        [build_data_file(f"file://{foreign_folder}/x", low=1, high=9)],
        snapshot_id=7,
        write=False,
    )
    write_manifest_list(
        own_folder / "metadata" / "l7.avro", [foreign_manifest]
    )  # This is the manifest list of the earlier snapshot 7. The test overwrites it after the commit.
    removal = {"add": [], "scope": None, "remove": [{"file-path": f"file://{own_folder}/data/a.parquet"}]}
    for body in ({}, removal):
        answer = await _send_change(lake, "another", **body)
        assert answer.error[0] == 403, answer.raw
        assert SECRET not in answer.raw.decode()


def _write_manifest(
    path: Path,
    entries: list[Entry],
    *,
    snapshot_id: int,
    sequence: int,
    added: int,
    existing: int = 0,
    write: bool = True,
) -> Manifest:
    """Return the row of the manifest list for a manifest with these entries, and write the manifest if `write` is True.

    The row states `added` added files and `existing` existing files of 100 rows. These numbers may be wrong.
    """
    schema = {**SCHEMA, "schema-id": 0}
    data = build_manifest_bytes(
        entries, version=2, content=0, style=STYLE, spec_id=0, fields=(), kinds=KINDS, schema=schema
    )
    if write:
        path.write_bytes(data)
    stated_counts = {ADDED: (added, 100 * added), EXISTING: (existing, 100 * existing), DELETED: (0, 0)}
    return Manifest(
        f"file://{path}", len(data), content=0, spec_id=0, sequence=sequence, min_sequence=sequence,
        snapshot_id=snapshot_id, entries=entries, partitions=None, counts=stated_counts,
    )  # fmt: skip


async def test_rebase_copies_no_manifest_of_another_table(lake: TwoNamespaces) -> None:
    own_metadata_folder, foreign_metadata_folder = [
        await lake.find_folder(name) / "metadata" for name in ("mine", "theirs")
    ]
    own_metadata_folder.mkdir(exist_ok=True)
    file_a, file_b, file_c, file_n = (
        build_data_file(f"file://{own_metadata_folder.parent}/data/{name}.parquet", 1, 9) for name in "abcn"
    )

    async def commit(
        snapshot_id: int,
        branch: str,
        parent: int | None,
        sequence: int,
        manifests: list[Manifest],
        principal: str = "wendy",
    ) -> int:
        snapshot = {
            "snapshot-id": snapshot_id,
            "sequence-number": sequence,
            "timestamp-ms": (await lake.read_metadata("mine"))["last-updated-ms"] + 1,
            "manifest-list": write_manifest_list(own_metadata_folder / f"l{snapshot_id}.avro", manifests),
            "summary": {"operation": "append", "added-data-files": "2"},
            "schema-id": 0,
        }
        snapshot |= {} if parent is None else {"parent-snapshot-id": parent}
        ref = {"action": "set-snapshot-ref", "ref-name": branch, "type": "branch", "snapshot-id": snapshot_id}
        requirement = {"type": "assert-ref-snapshot-id", "ref": branch, "snapshot-id": parent}
        body = {"requirements": [requirement], "updates": [{"action": "add-snapshot", "snapshot": snapshot}, ref]}
        return (await lake(principal, "POST", "/v1/namespaces/mine/tables/t", body)).status

    secret_paths = [f"file://{foreign_metadata_folder}/{SECRET}-{number}.parquet" for number in range(2)]
    secret_entries = [Entry(ADDED, 2, None, None, build_data_file(path, 1, 9)) for path in secret_paths]
    victim_manifest = _write_manifest(
        foreign_metadata_folder / "v.avro", secret_entries, snapshot_id=2, sequence=2, added=2
    )
    reported_manifest = _write_manifest(
        foreign_metadata_folder / "v.avro", secret_entries, snapshot_id=2, sequence=9, added=1, existing=1, write=False
    )
    table = "/v1/namespaces/mine/tables/t"
    assert (
        await lake("wendy", "POST", table, build_property_commit(**{"seamark.commit.rebase": "append"}))
    ).status == 200
    first_manifest = _write_manifest(
        own_metadata_folder / "m1.avro", [Entry(ADDED, 11, None, None, file_a)], snapshot_id=11, sequence=1, added=1
    )
    assert await commit(11, "main", None, 1, [first_manifest]) == 200
    ref = {"action": "set-snapshot-ref", "ref-name": "b", "type": "branch", "snapshot-id": 11}
    assert (await lake("wendy", "POST", table, {"requirements": [], "updates": [ref]})).status == 200
    merged_entries = [Entry(EXISTING, 11, 1, 1, file_a), Entry(ADDED, 12, None, None, file_b)]
    second_manifest = _write_manifest(
        own_metadata_folder / "m2.avro", merged_entries, snapshot_id=12, sequence=2, added=1, existing=1
    )
    assert await commit(12, "b", 11, 2, [second_manifest]) == 200
    third_manifest = _write_manifest(
        own_metadata_folder / "m3.avro", [Entry(ADDED, 13, None, None, file_c)], snapshot_id=13, sequence=3, added=1
    )
    assert await commit(13, "main", 11, 3, [first_manifest, third_manifest]) == 200
    # After the commit, the test overwrites the list of the current snapshot. It then names the other table's manifest.
    write_manifest_list(own_metadata_folder / "l13.avro", [first_manifest, third_manifest, victim_manifest])
    stale_entries = [Entry(EXISTING, 11, 1, 1, file_a), Entry(ADDED, 2, None, None, file_n)]
    own_manifest = _write_manifest(
        own_metadata_folder / "n1.avro", stale_entries, snapshot_id=2, sequence=9, added=1, existing=1
    )
    assert await commit(2, "b", 11, 9, [own_manifest, reported_manifest]) == 400
    assert await commit(2, "b", 11, 9, [own_manifest, reported_manifest], "root") == 409, (
        "a writer of the whole catalog cannot rebase it either"
    )
    assert not list(own_metadata_folder.glob("*-m*.avro")), "the server has written no manifest"
