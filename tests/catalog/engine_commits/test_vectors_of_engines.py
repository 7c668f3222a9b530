"""Tests of engine commits that remove deletion vectors.

The server omits entries with the status DELETED, and changes nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.commit.engine_commits import manifest_corrections
from seamark.metaserver.commit.snapshots import manifests
from tests.catalog.appender import (
    ADDED,
    DELETED,
    EXISTING,
    EngineAppender,
    Row,
    _read_rows,
    _write,
    build_list_schema,
    read_list,
)
from tests.catalog.appends import append_files, commit_table, find_head_snapshot, load_metadata
from tests.catalog.rig import BusyObjects, CatalogRig, open_rig
from tests.support.wrapper_capture import WrapperCapture


def build_entry(snapshot_id: int, status: int, sequence_number: int | None, data: Row) -> Row:
    plain_fields = {"partition": {}, "record_count": 1, "file_size_in_bytes": 100}
    return {
        "status": status,
        "snapshot_id": snapshot_id,
        "sequence_number": sequence_number,
        "file_sequence_number": sequence_number,
        "data_file": plain_fields | data,
    }


def build_vector(path: str, data_path: str, offset: int) -> Row:
    position = {"referenced_data_file": data_path, "content_offset": offset, "content_size_in_bytes": 40}
    return {"content": 1, "file_path": path, "file_format": "PUFFIN", **position}


async def commit_delete_files(
    rig: CatalogRig, client: EngineAppender, entries: list[Row]
) -> dict[str, tuple[Any, ...]]:
    """Commit a snapshot with these delete files.

    Return the status and the sequence numbers of each entry, by its path and offset.
    """
    assert client.parent is not None
    data = [row for row in read_list(client.parent) if row["content"] == 0]
    rows = [client.write_manifest(entries), *data]
    client.manifest_list = f"{client.folder}/snap-{client.snapshot_id}-client.avro"
    _write(client.manifest_list, build_list_schema(3), rows, {"snapshot-id": str(client.snapshot_id)})
    await commit_table(rig, client.build_commit({}, [], 0, is_append=False))
    (listed_row,) = (row for row in read_list(find_head_snapshot(await load_metadata(rig))) if row["content"] == 1)
    assert listed_row["sequence_number"] == client.sequence
    listed_rows = _read_rows(listed_row["manifest_path"])
    numbers = [
        client.sequence if listed["sequence_number"] is None else listed["sequence_number"] for listed in listed_rows
    ]
    assert listed_row["min_sequence_number"] == min(numbers)
    return {
        f"{listed['data_file']['file_path']} {listed['data_file']['content_offset']}": (
            listed["status"],
            listed["snapshot_id"],
            listed["sequence_number"],
            listed["file_sequence_number"],
        )
        for listed in listed_rows
    }


async def test_sequence_numbers_chosen_by_the_engine_are_kept(tmp_path: Path) -> None:
    """With the snapshot's own number, a rewritten equality delete file would delete later rows."""
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties={"format-version": "3"})
        await append_files(rig, {"a": 1, "b": 1})
        first_appender = EngineAppender(await load_metadata(rig))
        puffin, equality = (f"{first_appender.metadata['location']}/data/{name}" for name in ("p.puffin", "eq.parquet"))
        vector_a, vector_b = build_vector(puffin, "a", offset=4), build_vector(puffin, "b", offset=44)
        await commit_delete_files(
            rig,
            first_appender,
            [
                build_entry(first_appender.snapshot_id, ADDED, sequence_number=None, data=vector)
                for vector in (vector_a, vector_b)
            ],
        )
        second_appender = EngineAppender(await load_metadata(rig))
        rewritten_file = {"content": 2, "file_path": equality, "file_format": "PARQUET", "equality_ids": [1]}
        entries = [
            build_entry(second_appender.snapshot_id, DELETED, first_appender.sequence, vector_a),
            build_entry(first_appender.snapshot_id, EXISTING, first_appender.sequence, vector_b),
            build_entry(second_appender.snapshot_id, ADDED, sequence_number=1, data=rewritten_file)
            | {"file_sequence_number": None},
            build_entry(
                second_appender.snapshot_id,
                ADDED,
                sequence_number=None,
                data=build_vector(f"{puffin}-2", "a", offset=4),
            ),
        ]
        assert await commit_delete_files(rig, second_appender, entries) == {
            f"{puffin} 44": (EXISTING, first_appender.snapshot_id, first_appender.sequence, first_appender.sequence),
            f"{equality} None": (ADDED, second_appender.snapshot_id, 1, None),
            f"{puffin}-2 4": (ADDED, second_appender.snapshot_id, None, None),
        }


async def test_removal_of_vectors_is_not_committed_while_the_storage_does_not_answer(tmp_path: Path) -> None:
    """A commit removes a vector and keeps another vector of the same file. The server must read this file.

    Without this check, rows of other data files could come back.
    """
    capture = WrapperCapture(BusyObjects)
    async with open_rig(tmp_path, wrap_objects=capture) as rig:
        await rig.create_table(properties={"format-version": "3"})
        await append_files(rig, {"a": 1, "b": 1})
        appender = EngineAppender(await load_metadata(rig))
        puffin = f"{appender.metadata['location']}/data/p.puffin"
        vectors = [build_vector(puffin, path, offset) for path, offset in (("a", 4), ("b", 44))]
        await commit_delete_files(
            rig,
            appender,
            [build_entry(appender.snapshot_id, ADDED, sequence_number=None, data=vector) for vector in vectors],
        )
        appender = EngineAppender(await load_metadata(rig))
        removed_entry = build_entry(appender.snapshot_id, DELETED, appender.sequence - 1, vectors[0])
        kept_entry = build_entry(appender.snapshot_id, EXISTING, appender.sequence - 1, vectors[1])
        capture.wrapper.is_busy = True
        with pytest.raises(RetryLater):
            await commit_delete_files(rig, appender, [removed_entry, kept_entry])
        capture.wrapper.is_busy = False
        assert list(await commit_delete_files(rig, appender, [removed_entry, kept_entry])) == [f"{puffin} 44"]


async def test_removed_entries_over_the_memory_limit_are_counted_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest of a megabyte may have a million removed entries. Each takes a kilobyte in memory."""

    def refuse(*_: object) -> None:
        raise AssertionError("the removed entries were read")

    monkeypatch.setattr(manifest_corrections, "_MEMORY_BYTES", 5 * manifests._ENTRY_BYTES)
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties={"format-version": "3"})
        await append_files(rig, {"a": 1, "b": 1})
        first_appender = EngineAppender(await load_metadata(rig))
        puffin = f"{first_appender.metadata['location']}/data/p.puffin"
        vectors = [build_vector(puffin, "a", offset) for offset in range(4, 244, 40)]  # Six vectors have 40 bytes each.
        await commit_delete_files(
            rig,
            first_appender,
            [build_entry(first_appender.snapshot_id, ADDED, sequence_number=None, data=vector) for vector in vectors],
        )
        second_appender = EngineAppender(await load_metadata(rig))
        removed_entries = [
            build_entry(second_appender.snapshot_id, DELETED, first_appender.sequence, vector) for vector in vectors[1:]
        ]
        kept_entry = build_entry(first_appender.snapshot_id, EXISTING, first_appender.sequence, vectors[0])
        monkeypatch.setattr(manifests, "list_removals", refuse)
        assert len(await commit_delete_files(rig, second_appender, [*removed_entries, kept_entry])) == 6, (
            "the commit is as the engine wrote it"
        )
