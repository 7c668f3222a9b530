"""Write manifests and manifest lists, and read entries to rewrite them.

Spec: "Manifests", "Manifest Lists", "Sequence Number Inheritance", "First Row ID Inheritance", "First Row ID
Assignment". Values that are unknown before the commit (snapshot, sequence number, first row id) are null in the
manifest and inherited from the manifest list, so that a retried commit rewrites only the list. Reading fills these
values in. The functions take and return bytes, and equal input gives equal bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import copysign
from types import MappingProxyType
from typing import Any

import msgspec

from seamark.formats.iceberg.manifests.content_file import (
    DATA,
    EQUALITY_DELETES,
    POSITION_DELETES,
    ContentFile,
    list_partition_types,
)
from seamark.formats.iceberg.manifests.entry_avro import (
    build_entry_record,
    build_manifest_file_record,
    get_codec,
    write_container,
)
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, FieldSummary, ManifestFile, decode_manifest
from seamark.formats.iceberg.manifests.manifest_list import decode_content_files, read_numbers
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import FLOATS, Value, encode_single_value
from seamark.formats.runtime.errors import Corrupt

EXISTING, ADDED, DELETED = 0, 1, 2
DATA_MANIFEST, DELETE_MANIFEST = 0, 1


class ManifestEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry of a manifest, which describes a file.

    In an entry to write, None means that readers inherit the value.
    """

    status: int
    """The status: 0 existing, 1 added, 2 deleted."""
    snapshot_id: int | None
    """The snapshot that added the file, or that removed it if the status is deleted."""
    sequence_number: int | None
    """The data sequence number, which determines the delete files that apply to the file."""
    file_sequence_number: int | None
    """The sequence number of the snapshot that added the file, or None if its writer does not support the field."""
    file: ContentFile

    @property
    def is_live(self) -> bool:
        return self.status != DELETED


@dataclass(frozen=True, slots=True)
class WrittenManifest:
    """The bytes of a manifest, and its values in a manifest list."""

    data: bytes
    spec_id: int
    content: int
    format_version: int
    files: dict[int, int]
    """The number of files by status."""
    rows: dict[int, int]
    partitions: tuple[FieldSummary, ...] | None
    min_sequence_number: int | None
    """The minimum sequence number of the live entries that have one."""

    def to_manifest_file(self, path: str, *, snapshot_id: int, sequence_number: int) -> ManifestFile:
        """Return the entry of the manifest list for this manifest.

        Args:
            path: The location of the manifest.
            snapshot_id: The snapshot that adds the manifest.
            sequence_number: The sequence number of the snapshot, which added files inherit.
        """
        oldest = self.min_sequence_number
        min_sequence_number = sequence_number if oldest is None else min(oldest, sequence_number)
        return ManifestFile(
            manifest_path=path,
            manifest_length=len(self.data),
            partition_spec_id=self.spec_id,
            content=self.content,
            sequence_number=sequence_number if self.format_version > 1 else 0,
            min_sequence_number=min_sequence_number if self.format_version > 1 else 0,
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
    """Encode a manifest in the table's format version, compressed as its properties define (spec: "Manifests").

    In version 1, every entry needs its snapshot id. In later versions, an entry that was not added needs its sequence
    number. The first row id of an added data file is not written, because the commit assigns it.

    Args:
        entries: The entries.
        metadata: The metadata of the table.
        spec_id: The partition spec of the files.
        content: 0 for data files, 1 for delete files.

    Raises:
        ValueError: An entry does not belong in the manifest.
        BadRequest: A property is invalid.
    """
    spec = metadata.spec(spec_id)
    if spec is None:
        raise ValueError(f"the table has no partition spec {spec_id}")
    version = metadata.format_version
    if content != DATA_MANIFEST and version == 1:
        raise ValueError("a table of format version 1 has no delete files")
    entry_list = tuple(entries)
    for entry in entry_list:
        _check_entry(entry, spec_id, content, version)
    types = list_partition_types(metadata, spec)
    schema, write = build_entry_record(version, spec.fields, types)
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
        schema, map(write, map(_to_writable_entry, entry_list)), header, get_codec(metadata.properties)
    )
    files, rows = Counter[int](), Counter[int]()
    for entry in entry_list:
        files[entry.status] += 1
        rows[entry.status] += entry.file.record_count
    sequence_numbers = [
        entry.sequence_number for entry in entry_list if entry.is_live and entry.sequence_number is not None
    ]
    partitions = _summarize_partitions([entry.file.partition for entry in entry_list], types)
    oldest = min(sequence_numbers, default=None)
    return WrittenManifest(data, spec_id, content, version, files, rows, partitions, oldest)


def _check_entry(entry: ManifestEntry, spec_id: int, content: int, version: int) -> None:
    """Check that an entry belongs in a manifest. Raise ValueError if it does not.

    In version 1, entries inherit no snapshot id. Later versions let only added files inherit their sequence number.

    Args:
        entry: The entry.
        spec_id: The partition spec of the manifest.
        content: The content type of the manifest: data or deletes.
        version: The format version of the table.
    """
    file = entry.file
    if file.spec_id != spec_id or (file.content != DATA) != (content != DATA_MANIFEST):
        raise ValueError(f"the partition spec or the content of {file.file_path} differs from the manifest")
    if version == 1:
        if entry.snapshot_id is None:
            raise ValueError(f"{file.file_path}: in format version 1, an entry needs a snapshot id")
    elif entry.status != ADDED and entry.sequence_number is None:
        raise ValueError(f"{file.file_path}: only an added file inherits its sequence number")


def _to_writable_entry(entry: ManifestEntry) -> ManifestEntry:
    """Return the entry. If it is added, remove the first row id of its file, because the commit assigns row ids."""
    if entry.status != ADDED or entry.file.first_row_id is None:
        return entry
    file = msgspec.structs.replace(entry.file, first_row_id=None)
    return msgspec.structs.replace(entry, file=file)


def _summarize_partitions(
    partitions: Sequence[tuple[Value | None, ...]], types: Sequence[str]
) -> tuple[FieldSummary, ...] | None:
    """Return the summary of each partition field over all entries, or None.

    Like Java's writers, it includes deleted entries. The result is None if the bounds of UUIDs depend on the reader's
    order: as bytes, or as two signed halves in Java. With bounds in the wrong order, a reader would lose files. Bounds
    cannot be omitted for only one field, because a reader would treat the field as always null.
    """
    columns = zip(*partitions, strict=True) if partitions else ((),) * len(types)
    summaries = tuple(_summarize_field(kind, column) for kind, column in zip(types, columns, strict=True))
    known_summaries = tuple(summary for summary in summaries if summary is not None)
    return known_summaries if len(known_summaries) == len(summaries) else None


def _summarize_field(kind: str, values: Sequence[Value | None]) -> FieldSummary | None:
    """Return the summary of a field, or None if readers would not agree about its bounds.

    Java compares UUIDs as two signed halves, and other readers compare their bytes. If the two orders give different
    bounds, the bounds of each order would be wrong for some readers. Spec: "Manifest Lists", `field_summary`. Bounds
    exclude NaN, and -0.0 is below 0.0.
    """
    non_null_values: list[Any] = [value for value in values if value is not None]
    ordered_values = [value for value in non_null_values if value == value]  # NaN differs from itself.
    contains_null, contains_nan = len(non_null_values) < len(values), len(ordered_values) < len(non_null_values)
    if not ordered_values:
        return FieldSummary(contains_null, contains_nan, None, None)
    if kind in FLOATS:
        minimum, maximum = (choose(ordered_values, key=_separate_zeros) for choose in (min, max))
    else:
        minimum, maximum = min(ordered_values), max(ordered_values)
    if kind == "uuid" and (minimum, maximum) != tuple(
        choose(ordered_values, key=_split_signed_halves) for choose in (min, max)
    ):
        return None
    lower, upper = encode_single_value(kind, minimum), encode_single_value(kind, maximum)
    return FieldSummary(contains_null, contains_nan, lower, upper)


def _separate_zeros(value: float) -> tuple[float, float]:
    """Return a sort key by which -0.0 precedes 0.0."""
    return value, copysign(1.0, value)


def _split_signed_halves(value: bytes) -> tuple[int, int]:
    """Return the sort key of a UUID in Java's order."""
    return int.from_bytes(value[:8], "big", signed=True), int.from_bytes(value[8:], "big", signed=True)


_COUNTS = (
    "added_files_count",
    "existing_files_count",
    "deleted_files_count",
    "added_rows_count",
    "existing_rows_count",
    "deleted_rows_count",
)


def write_manifest_list(
    manifests: Sequence[ManifestFile],
    *,
    format_version: int,
    snapshot_id: int,
    parent_snapshot_id: int | None,
    sequence_number: int,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Encode the manifest list of a snapshot (spec: "Manifest Lists"), compressed with deflate like Java's writers do.

    In version 3, data manifests must have first row ids (`assign_first_row_ids`).

    Args:
        manifests: The manifests.
        format_version: The format version of the table.
        snapshot_id: The snapshot.
        parent_snapshot_id: The parent of the snapshot.
        sequence_number: The sequence number of the snapshot.
        extra: Additional entries for the header of the file. Iceberg's readers ignore them.

    Raises:
        ValueError: A data manifest of version 3 has no first row id, or a table of version 1 has a delete manifest.
        Corrupt: The older list of a manifest lacks a field that this version requires.
    """
    header = {
        "snapshot-id": str(snapshot_id),
        "parent-snapshot-id": "null" if parent_snapshot_id is None else str(parent_snapshot_id),
    }
    if format_version > 1:
        header["sequence-number"] = str(sequence_number)
    header["format-version"] = str(format_version)
    header.update(extra)
    for manifest in manifests:
        _check_listed(manifest, format_version)
    schema, write = build_manifest_file_record(format_version)
    return write_container(schema, map(write, manifests), header, get_codec({}))


def _check_listed(manifest: ManifestFile, version: int) -> None:
    """Check that a manifest has all values that a manifest list of a format version requires.

    From version 2 on, the counts of files and rows are required. Lists of version 1 may lack them.

    Raises:
        ValueError: The manifest is a delete manifest in version 1, or a data manifest without a first row id in
            version 3.
        Corrupt: The list from which the manifest was read lacks a required value.
    """
    path = manifest.manifest_path
    if version == 1 and manifest.content != DATA_MANIFEST:
        raise ValueError(f"{path}: a table of format version 1 has no delete manifests")
    if version >= 3 and manifest.content == DATA_MANIFEST and manifest.first_row_id is None:
        raise ValueError(f"{path}: the data manifest has no first row id")
    for name in ("added_snapshot_id",) if version == 1 else ("added_snapshot_id", *_COUNTS):
        if getattr(manifest, name) is None:
            raise Corrupt(f"{path}: its manifest list has no {name}")


def assign_first_row_ids(manifests: Sequence[ManifestFile], next_row_id: int) -> tuple[list[ManifestFile], int]:
    """Assign first row ids to the manifests of a version 3 snapshot. Also return the next row id of the table.

    Spec: "First Row ID Assignment". A manifest keeps an existing first row id. Otherwise it gets as many ids as it has
    live rows. Some of its existing files may already have ids, but only the manifest file contains this information.
    The `added-rows` of the snapshot is the increase of the next row id.

    Raises:
        Corrupt: A manifest has no row counts.
    """
    new_manifests = []
    for manifest in manifests:
        if manifest.content == DATA_MANIFEST and manifest.first_row_id is None:
            added_rows, existing_rows = manifest.added_rows_count, manifest.existing_rows_count
            if added_rows is None or existing_rows is None:
                raise Corrupt(f"{manifest.manifest_path}: its manifest list has no row counts for it")
            manifest = msgspec.structs.replace(manifest, first_row_id=next_row_id)
            next_row_id += added_rows + existing_rows
        new_manifests.append(manifest)
    return new_manifests, next_row_id


def decode_listed(data: bytes, manifest: ManifestFile, *, with_deleted: bool = False) -> DecodedManifest:
    """Decode a manifest to columns.

    Args:
        data: The bytes of the manifest.
        manifest: The manifest, as its manifest list describes it.
        with_deleted: Whether entries with the status DELETED are kept.

    Raises:
        Corrupt: The manifest is damaged, or its length differs from the manifest list.
    """
    if len(data) != manifest.manifest_length:
        raise Corrupt(
            f"{manifest.manifest_path} has {len(data)} bytes, but the manifest list states {manifest.manifest_length}"
        )
    return decode_manifest(data, manifest.manifest_path, with_deleted=with_deleted)


def list_removals(
    manifest_rows: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata
) -> list[ManifestEntry]:
    """Return the entries with status DELETED, each of which records that a snapshot removed a file.

    The manifest must have been decoded with deleted entries. The result has no row ids, because only live files inherit
    them.
    """
    entries = read_live_entries(manifest_rows, msgspec.structs.replace(manifest, first_row_id=None), metadata)
    return [entry for entry in entries if not entry.is_live]


def read_live_entries(
    manifest_rows: DecodedManifest, manifest: ManifestFile, metadata: TableMetadata
) -> list[ManifestEntry]:
    """Return the live entries of a manifest in the order of the file, with all inherited values.

    Partition values have the types of `list_partition_types`, in the order of the table's spec.

    Raises:
        Corrupt: The manifest contradicts the manifest list or the table. The message names its path.
    """
    path = manifest.manifest_path
    spec = metadata.spec(manifest.partition_spec_id)
    if spec is None:
        raise Corrupt(
            f"{path} has the partition spec {manifest.partition_spec_id}, which the table's metadata do not have"
        )
    files = decode_content_files(manifest_rows, spec, list_partition_types(metadata, spec))
    status = manifest_rows.longs["status"].tolist()
    snapshots = read_numbers(manifest_rows, "snapshot_id", manifest.added_snapshot_id)
    sequence_numbers = _inherit_numbers(manifest_rows, "sequence_number", manifest)
    if None in sequence_numbers:
        raise Corrupt(f"{path}: an existing file has no sequence number; only added files inherit it")
    file_sequence_numbers = _inherit_numbers(manifest_rows, "file_sequence_number", manifest)
    expected_contents = (DATA,) if manifest.content == DATA_MANIFEST else (POSITION_DELETES, EQUALITY_DELETES)
    next_row_id = manifest.first_row_id if manifest.content == DATA_MANIFEST else None
    entries = []
    for row, file in enumerate(files):
        if file.content not in expected_contents:
            raise Corrupt(f"{path}: {file.file_path} has content {file.content}, but its manifest has other content")
        if next_row_id is None:
            # If the manifest has no first row id, its files inherit no ids, and their own ids are ignored (spec).
            file = msgspec.structs.replace(file, first_row_id=None) if file.first_row_id is not None else file
        elif file.first_row_id is None:
            file = msgspec.structs.replace(file, first_row_id=next_row_id)
            next_row_id += file.record_count
        entries.append(
            ManifestEntry(status[row], snapshots[row], sequence_numbers[row], file_sequence_numbers[row], file)
        )
    return entries


def _inherit_numbers(manifest_rows: DecodedManifest, name: str, manifest: ManifestFile) -> list[int | None]:
    """Return a sequence number of each entry. Added files inherit the number of their manifest.

    In version 1, the number is 0 for all entries (spec: "Sequence Number Inheritance"). An existing file without a
    number gets None, because it must not inherit.
    """
    manifest_number = manifest.sequence_number
    is_added = (manifest_rows.longs["status"] == ADDED).tolist()
    return [
        (manifest_number if manifest_number == 0 or added else None) if number is None else number
        for number, added in zip(read_numbers(manifest_rows, name), is_added, strict=True)
    ]
