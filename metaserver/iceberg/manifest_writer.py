"""Manifests and manifest lists written, and entries read back whole, to be written again.

Spec: "Manifests", "Manifest Lists", "Sequence Number Inheritance", "First Row ID Inheritance", "First Row ID
Assignment". What a file cannot know before its commit (its snapshot, its sequence number, its first row id) is null in
the manifest and comes from the manifest list, so that a commit that has to be tried again rewrites only that. Reading
fills it in. Bytes in, bytes out; the same input makes the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import copysign
from typing import Any, cast

import msgspec

from metaserver.errors import Corrupt
from metaserver.iceberg.content_file import DATA, ContentFile, partition_types
from metaserver.iceberg.expressions import Value
from metaserver.iceberg.manifest import DecodedManifest, FieldSummary, ManifestFile, decode_manifest
from metaserver.iceberg.manifest_avro import (
    codec_of,
    decimal_size,
    entry_schema,
    list_schema,
    partition_names,
    write_container,
)
from metaserver.iceberg.manifest_files import content_files, numbers
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.partition import PartitionSpec
from metaserver.iceberg.values import FLOATS, encode

EXISTING, ADDED, DELETED = 0, 1, 2
DATA_MANIFEST, DELETE_MANIFEST = 0, 1

_BLOCK_SIZE_BYTES = 64 << 20
"""What Java's writers say in version 1, where the field is required and means nothing."""

Row = dict[str, Any]


class ManifestEntry(msgspec.Struct, frozen=True, gc=False):
    """One file of a manifest. In an entry that is to be written, None is what the reader inherits."""

    status: int
    """0 existing, 1 added, 2 deleted."""
    snapshot_id: int | None
    """That added the file, or for status deleted: removed it."""
    sequence_number: int | None
    """Of the data: delete files apply to it, or it applies to data files, by this one."""
    file_sequence_number: int | None
    """Of the snapshot that added the file; None in files that were written before the field was there."""
    file: ContentFile

    @property
    def is_live(self) -> bool:
        return self.status != DELETED


@dataclass(frozen=True, slots=True)
class WrittenManifest:
    """A manifest's bytes, and what a manifest list will say of it."""

    data: bytes
    spec_id: int
    content: int
    format_version: int
    files: dict[int, int]
    """By status."""
    rows: dict[int, int]
    partitions: tuple[FieldSummary, ...] | None
    min_sequence_number: int | None
    """Of the live entries that say one."""

    def described(self, path: str, *, snapshot_id: int, sequence_number: int) -> ManifestFile:
        """The manifest list's row for the manifest as a file at `path` that this snapshot adds."""
        known = self.min_sequence_number
        least = sequence_number if known is None else min(known, sequence_number)
        return ManifestFile(
            manifest_path=path,
            manifest_length=len(self.data),
            partition_spec_id=self.spec_id,
            content=self.content,
            sequence_number=sequence_number if self.format_version > 1 else 0,
            min_sequence_number=least if self.format_version > 1 else 0,
            added_snapshot_id=snapshot_id,
            added_files_count=self.files.get(ADDED, 0),
            existing_files_count=self.files.get(EXISTING, 0),
            deleted_files_count=self.files.get(DELETED, 0),
            added_rows_count=self.rows.get(ADDED, 0),
            existing_rows_count=self.rows.get(EXISTING, 0),
            deleted_rows_count=self.rows.get(DELETED, 0),
            partitions=self.partitions,
        )


def write_manifest(
    entries: Iterable[ManifestEntry], *, metadata: TableMetadata, spec_id: int, content: int
) -> WrittenManifest:
    """A manifest of the table's format version, packed as its properties ask for (spec: "Manifests").

    `content` is 0 for data files, 1 for delete files. In version 1 every entry says its snapshot; later, an entry
    that was not added says its sequence number. An added data file's first row id is not written: it is the commit's
    to assign. ValueError for entries that do not belong there, BadRequest for properties that mean nothing.
    """
    spec = metadata.spec(spec_id)
    if spec is None:
        raise ValueError(f"the table has no partition spec {spec_id}")
    version = metadata.format_version
    if content != DATA_MANIFEST and version == 1:
        raise ValueError("a table of format version 1 has no delete files")
    held = tuple(entries)
    for entry in held:
        _check(entry, spec_id, content, version)
    types = partition_types(metadata, spec)
    header = {
        "schema": msgspec.json.encode(metadata.current_schema).decode(),
        "schema-id": str(metadata.current_schema.id),
        "partition-spec": msgspec.json.encode(spec.fields).decode(),
        "partition-spec-id": str(spec_id),
        "format-version": str(version),
    }
    if version > 1:
        header["content"] = "deletes" if content else "data"
    data = write_container(
        entry_schema(version, spec.fields, types),
        _entry_rows(held, version, spec, types),
        header,
        codec_of(metadata.properties),
    )
    files, rows = Counter[int](), Counter[int]()
    for entry in held:
        files[entry.status] += 1
        rows[entry.status] += entry.file.record_count
    numbers = [entry.sequence_number for entry in held if entry.is_live and entry.sequence_number is not None]
    partitions = _summaries([entry.file.partition for entry in held], types)
    return WrittenManifest(data, spec_id, content, version, files, rows, partitions, min(numbers, default=None))


def _check(entry: ManifestEntry, spec_id: int, content: int, version: int) -> None:
    file = entry.file
    if file.spec_id != spec_id or (file.content != DATA) != (content != DATA_MANIFEST):
        raise ValueError(f"{file.file_path} is of another partition spec, or of the other kind of manifest")
    if version == 1:
        if entry.snapshot_id is None:
            raise ValueError(f"{file.file_path}: in format version 1 an entry inherits no snapshot")
    elif entry.status != ADDED and entry.sequence_number is None:
        raise ValueError(f"{file.file_path}: only an added file inherits its sequence number")


def _entry_rows(
    entries: Iterable[ManifestEntry], version: int, spec: PartitionSpec, types: Sequence[str]
) -> Iterator[Row]:
    names = partition_names(spec.fields)
    decimals = [(i, decimal_size(kind)) for i, kind in enumerate(types) if kind.startswith("decimal")]
    for entry in entries:
        file = entry.file
        row = _file_row(file, version)
        row["partition"] = dict(zip(names, _with_bytes(file.partition, decimals), strict=True))
        if version >= 3 and entry.status != ADDED:
            row["first_row_id"] = _maybe("long", file.first_row_id)
        yield {
            "status": entry.status,
            "snapshot_id": entry.snapshot_id if version == 1 else _maybe("long", entry.snapshot_id),
            "sequence_number": _maybe("long", entry.sequence_number),
            "file_sequence_number": _maybe("long", entry.file_sequence_number),
            "data_file": row,
        }


def _with_bytes(partition: tuple[Value | None, ...], decimals: Sequence[tuple[int, int]]) -> Sequence[Value | None]:
    """The tuple with unscaled decimals, at these places, as bytes of these sizes."""
    if not decimals:
        return partition
    made = list(partition)
    for i, size in decimals:
        unscaled = partition[i]
        if unscaled is not None:
            made[i] = cast(int, unscaled).to_bytes(size, "big", signed=True)
    return made


def _file_row(file: ContentFile, version: int) -> Row:
    row: Row = {
        "content": file.content,
        "file_path": file.file_path,
        "file_format": file.file_format,
        "record_count": file.record_count,
        "file_size_in_bytes": file.file_size_in_bytes,
        "column_sizes": _pairs(file.column_sizes),
        "value_counts": _pairs(file.value_counts),
        "null_value_counts": _pairs(file.null_value_counts),
        "nan_value_counts": _pairs(file.nan_value_counts),
        "lower_bounds": _pairs(file.lower_bounds),
        "upper_bounds": _pairs(file.upper_bounds),
        "key_metadata": _maybe("bytes", file.key_metadata),
        "split_offsets": _maybe("array", file.split_offsets),
        "sort_order_id": _maybe("int", file.sort_order_id),
    }
    if version == 1:
        row["block_size_in_bytes"] = _BLOCK_SIZE_BYTES
        return row
    row["equality_ids"] = _maybe("array", file.equality_ids)
    row["referenced_data_file"] = _maybe("string", file.referenced_data_file)
    if version >= 3:
        row["content_offset"] = _maybe("long", file.content_offset)
        row["content_size_in_bytes"] = _maybe("long", file.content_size_in_bytes)
    return row


def _maybe(branch: str, value: object) -> tuple[str, object] | None:
    return None if value is None else (branch, value)


def _pairs(by_column: dict[int, Any] | None) -> tuple[str, list[Row]] | None:
    if by_column is None:
        return None
    return "array", [{"key": column, "value": by_column[column]} for column in sorted(by_column)]


def _summaries(partitions: Sequence[tuple[Value | None, ...]], types: Sequence[str]) -> tuple[FieldSummary, ...] | None:
    """Summaries of each partition field over all entries, deleted ones too, as Java's writers have them.

    None where bounds of uuids depend on whether a reader orders them by bytes, or like Java by two signed halves: it
    would lose files by the other's bounds, and takes a field without bounds for one that is always null.
    """
    columns = zip(*partitions, strict=True) if partitions else ((),) * len(types)
    found = [_summary(kind, column) for kind, column in zip(types, columns, strict=True)]
    summaries = tuple(summary for summary in found if summary is not None)
    return summaries if len(summaries) == len(found) else None


def _summary(kind: str, values: Sequence[Value | None]) -> FieldSummary | None:
    """Spec: "Manifest Lists", `field_summary`: NaN is in no bound, and -0.0 is below 0.0."""
    present: list[Any] = [value for value in values if value is not None]
    numbers = [value for value in present if value == value]
    null, nan = len(present) < len(values), len(numbers) < len(present)
    if not numbers:
        return FieldSummary(null, nan, None, None)
    if kind in FLOATS:
        least, most = (choose(numbers, key=_zeros_apart) for choose in (min, max))
    else:
        least, most = min(numbers), max(numbers)
    if kind == "uuid" and (least, most) != tuple(choose(numbers, key=_signed_halves) for choose in (min, max)):
        return None
    return FieldSummary(null, nan, encode(kind, least), encode(kind, most))


def _zeros_apart(value: float) -> tuple[float, float]:
    return value, copysign(1.0, value)


def _signed_halves(value: bytes) -> tuple[int, int]:
    return int.from_bytes(value[:8], "big", signed=True), int.from_bytes(value[8:], "big", signed=True)


_COUNTS = ("added_files_count", "existing_files_count", "deleted_files_count")
_ROW_COUNTS = ("added_rows_count", "existing_rows_count", "deleted_rows_count")


def write_manifest_list(
    manifests: Sequence[ManifestFile],
    *,
    format_version: int,
    snapshot_id: int,
    parent_snapshot_id: int | None,
    sequence_number: int,
) -> bytes:
    """The manifest list of a snapshot (spec: "Manifest Lists"), deflated as by Java's writers.

    In version 3 data manifests have their first row ids (`assign_first_row_ids`); ValueError where one has none.
    Corrupt for a manifest of which an older list did not say what this version has to.
    """
    header = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_snapshot_id is None else str(parent_snapshot_id),
    }
    if format_version > 1:
        header["sequence-number"] = str(sequence_number)
    header["format-version"] = str(format_version)
    rows = (_list_row(manifest, format_version) for manifest in manifests)
    return write_container(list_schema(format_version), rows, header, codec_of({}))


def _list_row(manifest: ManifestFile, version: int) -> Row:
    path = manifest.manifest_path
    if version == 1 and manifest.content != DATA_MANIFEST:
        raise ValueError(f"{path}: a table of format version 1 has no delete manifests")
    if version >= 3 and manifest.content == DATA_MANIFEST and manifest.first_row_id is None:
        raise ValueError(f"{path}: no first row id was assigned")
    row: Row = {
        name: getattr(manifest, name)
        for name in ("manifest_path", "manifest_length", "partition_spec_id", "content", "added_snapshot_id")
    }
    row["sequence_number"], row["min_sequence_number"] = manifest.sequence_number, manifest.min_sequence_number
    for name in (*_COUNTS, *_ROW_COUNTS):
        row[name] = getattr(manifest, name)
        if row[name] is None and version > 1:
            raise Corrupt(f"{path}: the manifest list it comes from does not say its {name}")
    if manifest.added_snapshot_id is None:
        raise Corrupt(f"{path}: the manifest list it comes from does not say its added_snapshot_id")
    if manifest.partitions is not None:
        row["partitions"] = "array", list(map(_summary_row, manifest.partitions))
    row["key_metadata"] = _maybe("bytes", manifest.key_metadata)
    if version >= 3 and manifest.content == DATA_MANIFEST:
        row["first_row_id"] = _maybe("long", manifest.first_row_id)
    return row


def _summary_row(summary: FieldSummary) -> Row:
    return {
        # unsaid means that there may be some
        "contains_null": summary.contains_null is not False,
        "contains_nan": _maybe("boolean", summary.contains_nan),
        "lower_bound": _maybe("bytes", summary.lower),
        "upper_bound": _maybe("bytes", summary.upper),
    }


def assign_first_row_ids(manifests: Sequence[ManifestFile], next_row_id: int) -> tuple[list[ManifestFile], int]:
    """The manifests of a version 3 snapshot, each data manifest with a first row id, and the table's next row id.

    Spec: "First Row ID Assignment". A manifest keeps the one that it has. One that has none gets as many ids as it has
    live rows, though those of its existing files may have theirs already: only the manifest knows. What the next row
    id moves by is the snapshot's `added-rows`. Corrupt for a manifest without row counts.
    """
    assigned = []
    for manifest in manifests:
        if manifest.content == DATA_MANIFEST and manifest.first_row_id is None:
            added, existing = manifest.added_rows_count, manifest.existing_rows_count
            if added is None or existing is None:
                raise Corrupt(f"{manifest.manifest_path}: the manifest list it comes from does not say its rows")
            manifest = msgspec.structs.replace(manifest, first_row_id=next_row_id)
            next_row_id += added + existing
        assigned.append(manifest)
    return assigned, next_row_id


def read_entries(data: bytes, manifest: ManifestFile, metadata: TableMetadata) -> list[ManifestEntry]:
    """The live entries of a manifest in the order of the file, with all that they inherit from the manifest list.

    Partition values come in the types of `partition_types`, in the order of the table's spec. Corrupt names the
    manifest: for bytes that are none, are cut off, or hold what the manifest list or the table does not know.
    """
    path = manifest.manifest_path
    if len(data) != manifest.manifest_length:
        raise Corrupt(f"{path} has {len(data)} bytes; the manifest list says {manifest.manifest_length}")
    spec = metadata.spec(manifest.partition_spec_id)
    if spec is None:
        raise Corrupt(f"{path} has the partition spec {manifest.partition_spec_id}, the table has not")
    decoded = decode_manifest(data, path)
    files = content_files(decoded, spec, partition_types(metadata, spec))
    status = decoded.longs["status"].tolist()
    snapshots = numbers(decoded, "snapshot_id", manifest.added_snapshot_id)
    data_numbers = _inherited(decoded, "sequence_number", manifest)
    if None in data_numbers:
        raise Corrupt(f"{path}: an existing file has no sequence number, and only added ones inherit it")
    file_numbers = _inherited(decoded, "file_sequence_number", manifest)
    kinds = (DATA,) if manifest.content == DATA_MANIFEST else (1, 2)
    next_row_id = manifest.first_row_id if manifest.content == DATA_MANIFEST else None
    found = []
    for i, file in enumerate(files):
        if file.content not in kinds:
            raise Corrupt(f"{path}: {file.file_path} is of content {file.content}, not of its manifest's")
        if next_row_id is None:
            # spec: without a first row id of the manifest there is none to inherit, and what is left is of no use
            file = msgspec.structs.replace(file, first_row_id=None) if file.first_row_id is not None else file
        elif file.first_row_id is None:
            file = msgspec.structs.replace(file, first_row_id=next_row_id)
            next_row_id += file.record_count
        found.append(ManifestEntry(status[i], snapshots[i], data_numbers[i], file_numbers[i], file))
    return found


def _inherited(decoded: DecodedManifest, name: str, manifest: ManifestFile) -> list[int | None]:
    """Spec: "Sequence Number Inheritance": added files inherit the manifest's; version 1's is 0, for all."""
    own = manifest.sequence_number
    added = (decoded.longs["status"] == ADDED).tolist()
    return [
        (own if own == 0 or inherits else None) if value is None else value
        for value, inherits in zip(numbers(decoded, name), added, strict=True)
    ]
