"""A reader of tables that follows only the specification: files, rows, row ids, and invariants of every snapshot.

It shares no code with the server. It uses fastavro for manifests, pyarrow for Parquet, and pyroaring for deletion
vectors.
"""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import fastavro
import pyarrow.parquet as pq
import pyroaring

Row = tuple[Any, ...]
NAMES = ("id", "part", "value")

# Values of the specification, for the content of a file and for the status of an entry.
_DATA, _POSITION_DELETES, _EQUALITY_DELETES = 0, 1, 2
_EXISTING, _ADDED, _DELETED = 0, 1, 2


@dataclass(frozen=True)
class PlannedFile:
    """A data or delete file of a snapshot, with the values that it inherits from its manifest."""

    content: int
    path: str
    partition: tuple[Any, ...]
    spec_id: int
    sequence: int
    records: int
    size: int
    first_row_id: int | None
    referenced_path: str | None
    offset: int | None
    length: int | None
    equality_ids: tuple[int, ...]
    status: int
    snapshot_id: int


def to_local_path(location: str) -> Path:
    """Return the local path of a location. Engines write file:///p and file:/p."""
    return Path("/" + location.removeprefix("file:").lstrip("/"))


def read_avro(location: str) -> list[dict[str, Any]]:
    return list(fastavro.reader(io.BytesIO(to_local_path(location).read_bytes())))  # type: ignore[arg-type]


def find_snapshot(metadata: dict[str, Any], snapshot_id: int | None = None) -> dict[str, Any] | None:
    wanted_id = metadata.get("current-snapshot-id") if snapshot_id is None else snapshot_id
    snapshots = metadata.get("snapshots", [])
    return next((snapshot for snapshot in snapshots if snapshot["snapshot-id"] == wanted_id), None)


def read_manifests(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return read_avro(snapshot["manifest-list"])


def read_entries(manifest: dict[str, Any]) -> list[PlannedFile]:
    """Return all entries of a manifest, also those of deleted files, with the values that they inherit.

    See the spec, "Sequence Number Inheritance" and "First Row ID Inheritance".
    """
    planned_files = []
    next_row_id = manifest.get("first_row_id")
    for entry in read_avro(manifest["manifest_path"]):
        file = entry["data_file"]
        sequence = entry.get("sequence_number")
        if sequence is None:
            assert entry["status"] == _ADDED or "sequence_number" not in entry
            sequence = manifest.get("sequence_number", 0)
        first_row_id = file.get("first_row_id")
        if first_row_id is None and next_row_id is not None and entry["status"] != _DELETED:
            first_row_id, next_row_id = next_row_id, next_row_id + file["record_count"]
        planned_files.append(
            PlannedFile(
                content=file.get("content", 0),
                path=file["file_path"],
                partition=tuple(file["partition"].values()),
                spec_id=manifest["partition_spec_id"],
                sequence=sequence,
                records=file["record_count"],
                size=file["file_size_in_bytes"],
                first_row_id=first_row_id,
                referenced_path=file.get("referenced_data_file"),
                offset=file.get("content_offset"),
                length=file.get("content_size_in_bytes"),
                equality_ids=tuple(file.get("equality_ids") or ()),
                status=entry["status"],
                snapshot_id=entry["snapshot_id"] or manifest["added_snapshot_id"],
            )
        )
    return planned_files


def list_live_files(snapshot: dict[str, Any] | None) -> list[PlannedFile]:
    if snapshot is None:
        return []
    entries = [entry for manifest in read_manifests(snapshot) for entry in read_entries(manifest)]
    return [entry for entry in entries if entry.status != _DELETED]


def read_snapshot_ids(snapshot: dict[str, Any] | None) -> list[Any]:
    """Return the sorted ids of the rows that a reader of the snapshot sees."""
    return sorted(row_id for row_id, *_ in read_snapshot_rows(snapshot))


def read_snapshot_rows(snapshot: dict[str, Any] | None) -> list[Row]:
    """Return the sorted rows that a reader of the snapshot sees, by the Iceberg specification."""
    files = list_live_files(snapshot)
    deletes = [file for file in files if file.content != _DATA]
    rows: list[Row] = []
    for file in files:
        if file.content != _DATA:
            continue
        table = pq.read_table(to_local_path(file.path))
        file_rows = list(zip(*(table.column(name).to_pylist() for name in NAMES), strict=True))
        deleted_positions: set[int] = set()
        vectors = [delete for delete in deletes if delete.offset is not None and delete.referenced_path == file.path]
        assert len(vectors) <= 1, f"{file.path} has {len(vectors)} deletion vectors"
        for delete in deletes:
            deleted_positions |= _find_deleted(delete, file, file_rows, bool(vectors))
        rows += [row for index, row in enumerate(file_rows) if index not in deleted_positions]
    return sorted(rows, key=repr)


def _find_deleted(delete: PlannedFile, file: PlannedFile, file_rows: list[Row], has_vector: bool) -> set[int]:
    """Return the positions of the rows in `file` that the delete file applies to, by the Iceberg specification."""
    has_same_partition = (delete.spec_id, delete.partition) == (file.spec_id, file.partition)
    path = to_local_path(delete.path)
    if delete.offset is not None:
        if delete.referenced_path != file.path or delete.sequence < file.sequence:
            return set()
        assert delete.length is not None
        blob = path.read_bytes()[delete.offset : delete.offset + delete.length]
        bitmap = blob[8:-4]  # Without the length and the magic number before it, and the checksum after it.
        return set(pyroaring.BitMap64.deserialize(bitmap))
    if delete.content == _POSITION_DELETES:
        if not has_same_partition or has_vector or delete.sequence < file.sequence:
            return set()
        table = pq.read_table(path)
        pairs = zip(table.column("file_path").to_pylist(), table.column("pos").to_pylist(), strict=True)
        return {index for name, index in pairs if name == file.path}
    if delete.sequence <= file.sequence or not (has_same_partition or not delete.partition):
        return set()
    keys = set(pq.read_table(path).column("id").to_pylist())
    return {index for index, (row_id, *_) in enumerate(file_rows) if row_id in keys}


def check_snapshots(metadata: dict[str, Any], snapshot_id: int | None = None) -> None:
    """Check that a snapshot of the server is consistent: its manifests, counts, sequence numbers, totals and row ids.

    By default, check the current snapshot.
    """
    snapshot = find_snapshot(metadata, snapshot_id)
    assert snapshot is not None
    manifests = read_manifests(snapshot)
    assert len({manifest["manifest_path"] for manifest in manifests}) == len(manifests)
    manifests_and_entries = [(manifest, read_entries(manifest)) for manifest in manifests]
    for manifest, entries in manifests_and_entries:
        assert to_local_path(manifest["manifest_path"]).stat().st_size == manifest["manifest_length"]
        counts = Counter(entry.status for entry in entries)
        actual = [manifest[f"{name}_files_count"] for name in ("existing", "added", "deleted")]
        assert actual == [counts[_EXISTING], counts[_ADDED], counts[_DELETED]], manifest["manifest_path"]
        assert {entry.content != _DATA for entry in entries} <= {manifest.get("content", 0) != 0}
        live_sequences = [entry.sequence for entry in entries if entry.status != _DELETED]
        assert not live_sequences or manifest.get("min_sequence_number", 0) <= min(live_sequences)
        assert all(entry.snapshot_id == manifest["added_snapshot_id"] for entry in entries if entry.status == _ADDED)
    live_entries = [entry for _, entries in manifests_and_entries for entry in entries if entry.status != _DELETED]
    assert len({(entry.path, entry.offset) for entry in live_entries}) == len(live_entries)
    _check_totals(snapshot["summary"], live_entries)
    if metadata["format-version"] >= 3:
        _check_row_ids(metadata, snapshot, live_entries)


def _check_totals(summary: dict[str, str], live_files: list[PlannedFile]) -> None:
    data_files = [file for file in live_files if file.content == _DATA]
    deletes = [file for file in live_files if file.content != _DATA]
    expected = {
        "total-data-files": len(data_files),
        "total-records": sum(file.records for file in data_files),
        "total-delete-files": len(deletes),
        "total-position-deletes": sum(delete.records for delete in deletes if delete.content == _POSITION_DELETES),
        "total-equality-deletes": sum(delete.records for delete in deletes if delete.content == _EQUALITY_DELETES),
        "total-files-size": sum(file.size if file.length is None else file.length for file in live_files),
    }
    assert {name: summary.get(name) for name in expected} == {name: str(value) for name, value in expected.items()}


def _check_row_ids(metadata: dict[str, Any], snapshot: dict[str, Any], live_files: list[PlannedFile]) -> None:
    id_ranges = []
    for file in live_files:
        if file.content == _DATA:
            assert file.first_row_id is not None, file.path
            id_ranges.append((file.first_row_id, file.first_row_id + file.records))
    id_ranges.sort()
    for (_, previous_end), (start, _) in pairwise(id_ranges):
        assert previous_end <= start, "two rows have the same id"
    assert all(end <= metadata["next-row-id"] for _, end in id_ranges)
    assert snapshot["first-row-id"] + snapshot["added-rows"] <= metadata["next-row-id"]
