"""Manifests and manifest lists as fastavro reads them, with inherited values filled in by the specification.

See "Sequence Number Inheritance" and "First Row ID Inheritance". Fields are found by their ids, because writers may
name them differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import fastavro

UNITS_PER_DAY = {1, 86_400_000_000, 86_400_000_000_000}
"""Factors that convert a date when its column has become a timestamp."""
Record = dict[str, Any]


def read_avro(path: str) -> tuple[list[Record], Record]:
    """Return the records of an Avro file, and the Avro schema with which it was written."""
    # Numbers and bytes are kept as stored, because a timestamp may be outside the range of Python's types.
    plain_readers = mock.patch.dict(fastavro.read.LOGICAL_READERS, clear=True)
    with plain_readers, Path(path.removeprefix("file://")).open("rb") as file:
        reader = fastavro.reader(file)
        return list(reader), reader.writer_schema  # type: ignore[return-value,arg-type]


def index_by_id(schema: Record, record: Record) -> dict[int, Any]:
    return {field["field-id"]: record[field["name"]] for field in schema["fields"]}


def record_type(kind: Any) -> Record:
    """Return the record type of a field."""
    record: Record = next(item for item in (kind if isinstance(kind, list) else [kind]) if isinstance(item, dict))
    return record


# The numbers in this module are the field ids of the specification.
FILE_FIELDS = {
    134: "content",
    100: "file_path",
    101: "file_format",
    103: "record_count",
    104: "file_size_in_bytes",
    131: "key_metadata",
    132: "split_offsets",
    135: "equality_ids",
    140: "sort_order_id",
    142: "first_row_id",
    143: "referenced_data_file",
    144: "content_offset",
    145: "content_size_in_bytes",
}
MAP_FIELDS = {
    108: "column_sizes",
    109: "value_counts",
    110: "null_value_counts",
    137: "nan_value_counts",
    125: "lower_bounds",
    128: "upper_bounds",
}


def read_entries(path: str) -> Iterator[Record]:
    """Yield the live entries of a manifest by the names of their fields, without inherited values.

    The numbers are the field ids of the specification, which are the same in all versions.
    """
    records, schema = read_avro(path)
    file_schema = record_type(next(field["type"] for field in schema["fields"] if field["field-id"] == 2))
    tuple_schema = record_type(next(field["type"] for field in file_schema["fields"] if field["field-id"] == 102))
    for record in records:
        entry = index_by_id(schema, record)
        if entry[0] == 2:  # The status 2 means that the file is deleted.
            continue
        file = index_by_id(file_schema, entry[2])
        flat_entry = {"status": entry[0], "snapshot_id": entry.get(1), "sequence_number": entry.get(3)}
        flat_entry |= {"file_sequence_number": entry.get(4)}
        flat_entry |= {name: file.get(number) or None for number, name in FILE_FIELDS.items()}
        flat_entry["first_row_id"], flat_entry["record_count"] = file.get(142), file[103]
        for number, name in MAP_FIELDS.items():
            flat_entry[name] = {item["key"]: item["value"] for item in file.get(number) or ()}
        flat_entry["partition"] = index_by_id(tuple_schema, file[102])
        yield flat_entry


def read_manifest_list(path: str) -> list[Record]:
    """Return the rows of a manifest list with short names of the fields.

    The numbers are the field ids of the specification, because the names of some fields differ between versions.
    """
    records, schema = read_avro(path)
    names = {501: "length", 502: "spec_id", 517: "content", 515: "sequence", 503: "snapshot_id", 520: "first_row_id"}
    names |= {500: "path", 504: "added", 505: "existing", 506: "deleted", 512: "added_rows", 513: "existing_rows"}
    rows = [index_by_id(schema, record) for record in records]
    # A field that version 1 does not have is 0 (spec, "Manifest Lists").
    zero = {517: 0, 515: 0}
    return [{name: row.get(number, zero.get(number)) for number, name in names.items()} for row in rows]


def read_data_files(manifests: Sequence[Record], version: int) -> dict[str, Record]:
    """Return the live data files by path, with all inherited values."""
    entries_by_path = {}
    for manifest in manifests:
        if manifest["content"]:
            continue
        next_row_id = manifest["first_row_id"]
        for entry in read_entries(manifest["path"]):
            if entry["snapshot_id"] is None:
                entry["snapshot_id"] = manifest["snapshot_id"]
            # The status 1 means added. Only added files, and files of version 1, inherit a sequence number.
            for name in ("sequence_number", "file_sequence_number"):
                if entry[name] is None and (entry["status"] == 1 or version == 1 or not manifest["sequence"]):
                    entry[name] = manifest["sequence"] or 0
            if next_row_id is None:
                entry["first_row_id"] = None
            elif entry["first_row_id"] is None:
                entry["first_row_id"], next_row_id = next_row_id, next_row_id + entry["record_count"]
            entry["spec_id"] = manifest["spec_id"]
            assert entry["file_path"] not in entries_by_path
            entries_by_path[entry["file_path"]] = entry
    return entries_by_path


def assert_same(record: Record, original_record: Record, context: str) -> None:
    """Check that a rewritten manifest entry has the values of the original entry.

    These differences are allowed: the status EXISTING (0), the case of the file format, a date in the units of the type
    to which its column was promoted, and a decimal with another number of bytes.
    """
    record, original_record = dict(record), dict(original_record)
    partition, original_partition = record.pop("partition"), original_record.pop("partition")
    assert partition.keys() == original_partition.keys(), context
    for key, value in partition.items():
        expected = original_partition[key]
        is_multiple = (
            isinstance(value, int)
            and isinstance(expected, int)
            and value in {expected * item for item in UNITS_PER_DAY}
        )
        is_wider = isinstance(value, bytes) and int.from_bytes(value, "big", signed=True) == int.from_bytes(
            expected or b"", "big", signed=True
        )
        assert is_multiple or is_wider or repr(value) == repr(expected) or value == expected, (
            f"{context}: partition {key}"
        )
    assert record.pop("status") in (0, original_record.pop("status")), context
    record["file_format"], original_record["file_format"] = (
        record["file_format"].upper(),
        original_record["file_format"].upper(),
    )
    assert record == original_record, context
