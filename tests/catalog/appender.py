"""An engine's append by the specification and fastavro, and a reader of the result.

The appender writes manifests and a manifest list for the metadata that it has loaded, merges manifests on request, and
returns the commit that an engine would send. It shares no code with the server. Metadata files are local. Data files
have names but do not exist.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastavro

from tests.iceberg.manifests.manifest_files import build_manifest_schema

ADDED, EXISTING, DELETED = 1, 0, 2
Row = dict[str, Any]
Commit = tuple[list[Row], list[Row]]
"""Requirements and updates of a commit."""

_COUNTS = ("added_files_count", "existing_files_count", "deleted_files_count")
_ROW_COUNTS = ("added_rows_count", "existing_rows_count", "deleted_rows_count")
_CONTENTS = ("data", "deletes")
_NUMBERS = itertools.count(1)


def build_list_schema(version: int) -> Row:
    """Return the Avro schema of a manifest list of this format version, with the field ids of the specification."""
    fields: list[tuple[str, int, Any]] = [
        ("manifest_path", 500, "string"),
        ("manifest_length", 501, "long"),
        ("partition_spec_id", 502, "int"),
        ("content", 517, "int"),
        ("sequence_number", 515, "long"),
        ("min_sequence_number", 516, "long"),
        ("added_snapshot_id", 503, "long"),
        *((name, number, "int") for name, number in zip(_COUNTS, (504, 505, 506), strict=True)),
        *((name, number, "long") for name, number in zip(_ROW_COUNTS, (512, 513, 514), strict=True)),
        ("key_metadata", 519, ["null", "bytes"]),
    ]
    fields += [("first_row_id", 520, ["null", "long"])] * (version > 2)
    return {
        "type": "record",
        "name": "manifest_file",
        "fields": [{"name": name, "field-id": number, "type": kind} for name, number, kind in fields],
    }


def to_local_path(location: str) -> Path:
    """Return the local path of a location in an engine's form: file:///a or file:/a."""
    return Path("/" + location.removeprefix("file:").lstrip("/"))


def _write(location: str, schema: Row, rows: Iterable[Row], header: dict[str, str]) -> int:
    sink = io.BytesIO()
    fastavro.writer(sink, schema, rows, codec="deflate", metadata=header)
    path = to_local_path(location)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sink.getvalue())
    return len(sink.getvalue())


def _read_rows(location: str) -> list[Row]:
    with to_local_path(location).open("rb") as file:
        return list(fastavro.reader(file))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LiveFile:
    """A live data file of a snapshot, with inherited values."""

    path: str
    records: int
    status: int
    snapshot_id: int
    sequence_number: int
    file_sequence_number: int
    first_row_id: int | None


def read_manifest(listed_row: Row) -> list[LiveFile]:
    """Return the live data files of a manifest, with the values that they inherit by the specification.

    Also check the counts and the lowest sequence number that the manifest list has for the manifest.
    """
    live_files, next_row_id = [], listed_row.get("first_row_id")
    rows = _read_rows(listed_row["manifest_path"])
    listed_counts = [listed_row[name] for name in _COUNTS]
    assert listed_counts == [sum(row["status"] == status for row in rows) for status in (ADDED, EXISTING, DELETED)]
    for row in rows:
        file, status = row["data_file"], row["status"]
        if status == DELETED:
            continue
        first_row_id = file.get("first_row_id")
        if first_row_id is None and next_row_id is not None:
            first_row_id, next_row_id = next_row_id, next_row_id + file["record_count"]
        inherited_sequence = listed_row["sequence_number"] if status == ADDED else None
        sequence_numbers = [row[name] for name in ("sequence_number", "file_sequence_number")]
        numbers = [inherited_sequence if number is None else number for number in sequence_numbers]
        snapshot_id = listed_row["added_snapshot_id"] if row["snapshot_id"] is None else row["snapshot_id"]
        live_files.append(
            LiveFile(file["file_path"], file["record_count"], status, snapshot_id, *numbers, first_row_id)  # type: ignore[call-arg]
        )
    assert (
        listed_row["min_sequence_number"] == min((file.sequence_number for file in live_files), default=0)
        or not live_files
    )
    return live_files


def read_list(snapshot: Row) -> list[Row]:
    return _read_rows(snapshot["manifest-list"])


def read_snapshot(snapshot: Row) -> dict[str, LiveFile]:
    """Return the live data files by path, and check that each path occurs once."""
    files = [file for listing in read_list(snapshot) for file in read_manifest(listing)]
    files_by_path = {file.path: file for file in files}
    assert len(files_by_path) == len(files), "a data file occurs twice"
    return files_by_path


@dataclass
class EngineAppender:
    """An engine's append to the metadata that it loaded, as JSON. The options make it behave like different engines."""

    metadata: Row
    branch: str = "main"
    merge: int = 0
    """The number of the parent's manifests that the appender merges with its own manifest."""
    writes_merged_entries_apart: bool = False
    """If True, merged entries are in a separate manifest."""
    retention: Row = field(default_factory=dict)
    """Fields with the retention of the branch."""
    entry: Row = field(default_factory=dict)
    """Fields that replace those of the new manifest entries."""
    file: Row = field(default_factory=dict)
    """Fields of the new data files."""
    manifest_row: Row = field(default_factory=dict)
    """Fields that replace those of the new manifest in the manifest list."""
    snapshot: Row = field(default_factory=dict)
    """Fields that replace those of the snapshot."""
    omitted_path: str = ""
    """The path of a file that the appender omits in a merge, as a faulty engine would."""
    more_entries: Sequence[Row] = ()
    """Additional manifest entries."""
    manifests: list[str] = field(default_factory=list)
    """The locations of the manifests that the appender wrote."""
    manifest_list: str = ""

    def __post_init__(self) -> None:
        self.version = self.metadata["format-version"]
        self.snapshot_id = 10_000 + next(_NUMBERS)
        self.sequence = self.metadata["last-sequence-number"] + 1
        ref = self.metadata.get("refs", {}).get(self.branch)
        self.expected_snapshot_id = None if ref is None else ref["snapshot-id"]
        parent_id = self.expected_snapshot_id if ref is not None else self.metadata.get("current-snapshot-id")
        self.parent = next(
            (snapshot for snapshot in self.metadata.get("snapshots", []) if snapshot["snapshot-id"] == parent_id), None
        )
        self.folder = f"{self.metadata['location']}/metadata"

    def commit(
        self, files: dict[str, int], removed_files: Collection[str] = (), deletes: Collection[str] = ()
    ) -> Commit:
        """Return a commit that appends these files, or deletes `removed_files`.

        Args:
            files: Record counts by path.
            removed_files: The paths of the files to delete.
            deletes: Position delete files to add.
        """
        parent_manifests = [] if self.parent is None else read_list(self.parent)
        parent_manifests = [row for row in parent_manifests if row["added_files_count"] + row["existing_files_count"]]
        merged_entries = [
            row
            for number, row in enumerate(parent_manifests)
            if number < self.merge or any(file.path in removed_files for file in read_manifest(row))
        ]
        kept_rows = [row for row in parent_manifests if row not in merged_entries]
        entries = [
            self._build_entry(ADDED, self._make_file_row(path, records), None) for path, records in files.items()
        ]
        for row in merged_entries:
            for old_entry in read_manifest(row):
                data = {
                    "file_path": old_entry.path,
                    "record_count": old_entry.records,
                    "first_row_id": old_entry.first_row_id,
                }
                data["content"] = row["content"]
                if old_entry.path != self.omitted_path:
                    entries.append(
                        self._build_entry(DELETED if old_entry.path in removed_files else EXISTING, data, old_entry)
                    )
        entries += [self._build_entry(ADDED, self._make_file_row(path, 1) | {"content": 1}, None) for path in deletes]
        groups = [[entry for entry in entries if entry["data_file"]["content"] == content] for content in (0, 1)]
        if self.writes_merged_entries_apart:
            is_new_choices = (True, False)
            groups = [
                [listed for listed in group if (listed["status"] == ADDED) is is_new]
                for group in groups
                for is_new in is_new_choices
            ]
        manifests = [self.write_manifest(group) for group in groups if group]
        next_row_id = self.metadata.get("next-row-id", 0)
        rows = [dict(row) for row in [*manifests, *kept_rows]]
        if self.version > 2:
            for row in rows:
                if row.get("first_row_id") is None and row["content"] == 0:
                    row["first_row_id"] = next_row_id
                    next_row_id += row["added_rows_count"] + row["existing_rows_count"]
        self.manifest_list = f"{self.folder}/snap-{self.snapshot_id}-client.avro"
        _write(self.manifest_list, build_list_schema(self.version), rows, {"snapshot-id": str(self.snapshot_id)})
        removed_record_counts = [
            file.records
            for row in merged_entries
            if not row["content"]
            for file in read_manifest(row)
            if file.path in removed_files
        ]
        added_rows = next_row_id - self.metadata.get("next-row-id", 0)
        return self.build_commit(
            files, removed_record_counts, added_rows, is_append=not removed_record_counts and not deletes
        )

    def _make_file_row(self, path: str, records: int) -> Row:
        return {"file_path": path, "record_count": records, **self.file}

    def _build_entry(self, status: int, data: Row, old_entry: LiveFile | None) -> Row:
        plain_fields = {"content": 0, "file_format": "PARQUET", "partition": {}, "file_size_in_bytes": 100}
        entry = {
            "status": status,
            "snapshot_id": old_entry.snapshot_id if old_entry is not None and status == EXISTING else self.snapshot_id,
            "sequence_number": None if old_entry is None else old_entry.sequence_number,
            "file_sequence_number": None if old_entry is None else old_entry.file_sequence_number,
            "data_file": plain_fields | data,
        }
        return entry | (self.entry if old_entry is None else {})

    def write_manifest(self, entries: list[Row]) -> Row:
        """Write a manifest with these entries and `more_entries`, and return its row of the manifest list.

        The fields of `manifest_row` replace those that follow from the entries, as in a faulty engine.
        """
        location = f"{self.folder}/{self.snapshot_id}-m{len(self.manifests)}.avro"
        entries = [*entries, *self.more_entries]
        self.manifests.append(location)
        schema = json.dumps(self.metadata["schemas"][-1])
        header = {
            "schema": schema,
            "partition-spec": "[]",
            "partition-spec-id": "0",
            "format-version": str(self.version),
        }
        content = entries[0]["data_file"]["content"]
        size = _write(
            location, build_manifest_schema(self.version, []), entries, header | {"content": _CONTENTS[content]}
        )
        live_sequences = [entry["sequence_number"] for entry in entries if entry["status"] != DELETED]
        written_sequences = [number for number in live_sequences if number is not None]
        row = {
            "manifest_path": location,
            "manifest_length": size,
            "partition_spec_id": 0,
            "content": content,
            "sequence_number": self.sequence,
            "min_sequence_number": min([self.sequence, *written_sequences]),
            "added_snapshot_id": self.snapshot_id,
        }
        for status, files, rows in zip((ADDED, EXISTING, DELETED), _COUNTS, _ROW_COUNTS, strict=True):
            record_counts = [entry["data_file"]["record_count"] for entry in entries if entry["status"] == status]
            row[files], row[rows] = len(record_counts), sum(record_counts)
        return row | self.manifest_row

    def build_commit(
        self, files: dict[str, int], removed_counts: list[int], added_rows: int, *, is_append: bool
    ) -> Commit:
        """Return the commit of the manifest list, with the summary and requirements of an engine."""
        parent_summary = {} if self.parent is None else self.parent["summary"]
        counts = {"data-files": len(files), "records": sum(files.values()), "files-size": 100 * len(files)}
        removed_totals = {
            "data-files": len(removed_counts),
            "records": sum(removed_counts),
            "files-size": 100 * len(removed_counts),
        }
        summary = {"operation": "append" if is_append else "delete", "engine-name": "appender"}
        for kind, count in counts.items():
            summary[f"added-{kind}"] = str(count)
            if removed_totals[kind]:
                summary[f"{'removed' if kind == 'files-size' else 'deleted'}-{kind}"] = str(removed_totals[kind])
            summary[f"total-{kind}"] = str(int(parent_summary.get(f"total-{kind}", 0)) + count - removed_totals[kind])
        snapshot = {
            "snapshot-id": self.snapshot_id,
            "sequence-number": self.sequence,
            "timestamp-ms": self.metadata["last-updated-ms"],
            "manifest-list": self.manifest_list,
            "summary": summary,
            "schema-id": self.metadata["current-schema-id"],
        }
        if self.parent is not None:
            snapshot["parent-snapshot-id"] = self.parent["snapshot-id"]
        if self.version > 2:
            snapshot |= {"first-row-id": self.metadata["next-row-id"], "added-rows": added_rows}
        requirements = [
            {"type": "assert-table-uuid", "uuid": self.metadata["table-uuid"]},
            {"type": "assert-ref-snapshot-id", "ref": self.branch, "snapshot-id": self.expected_snapshot_id},
        ]
        updates = [
            {"action": "add-snapshot", "snapshot": snapshot | self.snapshot},
            {
                "action": "set-snapshot-ref",
                "ref-name": self.branch,
                "type": "branch",
                "snapshot-id": self.snapshot_id,
                **self.retention,
            },
        ]
        # The copy shares no objects with the appender, as if the commit was sent over the network.
        commit: Commit = json.loads(json.dumps((requirements, updates)))
        return commit[0], commit[1]
