"""Snapshots, references, logs, statistics files and encryption keys, as in the JSON of table metadata.

A snapshot's summary stays raw JSON, because summaries are most of the bytes of a long history, and the catalog does not
interpret them. Therefore decoding 10,000 snapshots takes milliseconds.
"""

from __future__ import annotations

import binascii

import msgspec

from seamark.formats.iceberg.types.reading import Int32, Int64
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import BadRequest

MAIN = "main"

_NO_SUMMARY = msgspec.Raw(b"")
_ROW_LINEAGE_MIN_FORMAT_VERSION = 3


class Snapshot(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, rename="kebab"):
    snapshot_id: Int64
    timestamp_ms: Int64
    sequence_number: Int64 = 0
    parent_snapshot_id: Int64 | None = None
    summary: msgspec.Raw = _NO_SUMMARY
    manifest_list: str | None = None
    manifests: tuple[str, ...] | None = None
    """The paths of the manifests. Only version 1 has them, instead of a manifest list."""
    schema_id: Int32 | None = None
    first_row_id: Int64 | None = None
    added_rows: Int64 | None = None
    key_id: str | None = None

    def build_summary_map(self) -> dict[str, str]:
        """Return the summary including `operation`. If the summary is missing or not a map of strings, the result is
        empty.
        """
        try:
            return convert_json(self.summary, dict[str, str])
        except msgspec.DecodeError:
            return {}


class SnapshotInput(msgspec.Struct, frozen=True, rename="kebab"):
    """A snapshot from a client, with a typed summary."""

    snapshot_id: Int64
    timestamp_ms: Int64
    summary: dict[str, str] | None = None
    sequence_number: Int64 | None = None
    parent_snapshot_id: Int64 | None = None
    manifest_list: str | None = None
    manifests: tuple[str, ...] | None = None
    schema_id: Int32 | None = None
    first_row_id: Int64 | None = None
    added_rows: Int64 | None = None
    key_id: str | None = None


class SnapshotRef(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, rename="kebab"):
    snapshot_id: Int64
    type: str
    min_snapshots_to_keep: Int32 | None = None
    max_snapshot_age_ms: Int64 | None = None
    max_ref_age_ms: Int64 | None = None

    @property
    def is_branch(self) -> bool:
        return self.type.lower() == "branch"


class SnapshotLogEntry(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    timestamp_ms: Int64
    snapshot_id: Int64


class MetadataLogEntry(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    timestamp_ms: Int64
    metadata_file: str


class BlobMetadata(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    type: str
    snapshot_id: Int64
    sequence_number: Int64
    fields: tuple[Int32, ...]
    properties: dict[str, str] | None = None


class StatisticsFile(msgspec.Struct, frozen=True, rename="kebab"):
    snapshot_id: Int64
    statistics_path: str
    file_size_in_bytes: Int64
    file_footer_size_in_bytes: Int64
    blob_metadata: tuple[BlobMetadata, ...]


class PartitionStatisticsFile(msgspec.Struct, frozen=True, gc=False, rename="kebab"):
    snapshot_id: Int64
    statistics_path: str
    file_size_in_bytes: Int64


class EncryptedKey(msgspec.Struct, frozen=True, omit_defaults=True, rename="kebab"):
    key_id: str
    encrypted_key_metadata: str
    """The encrypted key metadata, in base64."""
    encrypted_by_id: str | None = None
    properties: dict[str, str] | None = None


def to_snapshot(snapshot: SnapshotInput, format_version: int) -> Snapshot:
    """Convert a client's snapshot to its form in metadata.

    Raises:
        BadRequest: The format version does not allow a field, or requires a field that is missing.
    """
    sequence_number = snapshot.sequence_number or 0
    if format_version == 1 and sequence_number != 0:
        raise BadRequest(f"Sequence number must be 0 in v1: {sequence_number}")
    if sequence_number < 0:
        raise BadRequest(f"Invalid sequence number: {sequence_number} (must not be negative)")
    if snapshot.manifest_list is None and (format_version > 1 or snapshot.manifests is None):
        raise BadRequest(f"Invalid snapshot {snapshot.snapshot_id}: missing required field `manifest-list`")
    if snapshot.first_row_id is not None:
        if snapshot.first_row_id < 0:
            raise BadRequest(f"Invalid first-row-id (cannot be negative): {snapshot.first_row_id}")
        if snapshot.added_rows is None:
            raise BadRequest("Invalid added-rows (required when first-row-id is set): null")
    if snapshot.added_rows is not None and snapshot.added_rows < 0:
        raise BadRequest(f"Invalid added-rows (cannot be negative): {snapshot.added_rows}")
    return Snapshot(
        snapshot.snapshot_id,
        snapshot.timestamp_ms,
        sequence_number,
        snapshot.parent_snapshot_id,
        _encode_summary(snapshot.summary),
        snapshot.manifest_list,
        None if snapshot.manifest_list is not None else snapshot.manifests,
        snapshot.schema_id,
        snapshot.first_row_id if format_version >= _ROW_LINEAGE_MIN_FORMAT_VERSION else None,
        snapshot.added_rows if format_version >= _ROW_LINEAGE_MIN_FORMAT_VERSION else None,
        snapshot.key_id,
    )


def _encode_summary(summary: dict[str, str] | None) -> msgspec.Raw:
    if not summary:
        return _NO_SUMMARY
    if "operation" not in summary:
        raise BadRequest("Invalid snapshot summary: missing required key `operation`")
    return msgspec.Raw(msgspec.json.encode(summary))


def normalize_ref(ref: SnapshotRef) -> SnapshotRef:
    """Return the reference with its type in lower case.

    Raises:
        BadRequest: A value is not valid for the type of the reference.
    """
    kind = ref.type.lower()
    if kind not in ("branch", "tag"):
        raise BadRequest(f"Invalid snapshot ref type: {ref.type} (branch or tag)")
    if kind == "tag" and ref.min_snapshots_to_keep is not None:
        raise BadRequest("Tags do not support setting minSnapshotsToKeep")
    if kind == "tag" and ref.max_snapshot_age_ms is not None:
        raise BadRequest("Tags do not support setting maxSnapshotAgeMs")
    if ref.min_snapshots_to_keep is not None and ref.min_snapshots_to_keep <= 0:
        raise BadRequest("Min snapshots to keep must be greater than 0")
    if ref.max_snapshot_age_ms is not None and ref.max_snapshot_age_ms <= 0:
        raise BadRequest("Max snapshot age must be greater than 0 ms")
    if ref.max_ref_age_ms is not None and ref.max_ref_age_ms <= 0:
        raise BadRequest("Max reference age must be greater than 0")
    return msgspec.structs.replace(ref, type=kind)


def validate_key(key: EncryptedKey) -> EncryptedKey:
    """Check that an encryption key is valid, and return it.

    Raises:
        BadRequest: The key's metadata are not base64.
    """
    try:
        binascii.a2b_base64(key.encrypted_key_metadata.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise BadRequest(f"Invalid encryption key {key.key_id}: `encrypted-key-metadata` is not base64") from None
    return key
