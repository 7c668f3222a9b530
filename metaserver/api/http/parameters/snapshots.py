"""The snapshot of a request (by id, by branch or tag, or as of a time), and the schema for its filter."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.describe import Parameter

_DIGITS_MAX = 19
_LISTED_REFS_MAX = 20
SNAPSHOT = (
    Parameter(
        "snapshot-id", "query", "The snapshot to read. The default is the current snapshot.", {"type": "integer"}
    ),
    Parameter("ref", "query", "A branch or tag, instead of snapshot-id.", {"type": "string"}),
    Parameter(
        "as-of",
        "query",
        "A time in milliseconds since the epoch, instead of snapshot-id. The snapshot that was current at this time is"
        " read, by the table's snapshot log.",
        {"type": "integer"},
    ),
)


def find_requested_snapshot(query: Mapping[str, str], metadata: TableMetadata) -> int | None:
    """Return the id of the snapshot that the query parameters name; see `resolve_snapshot_id`."""
    return resolve_snapshot_id(
        metadata,
        parse_whole_number(query.get("snapshot-id"), "snapshot-id"),
        query.get("ref"),
        parse_whole_number(query.get("as-of"), "as-of"),
    )


def resolve_snapshot_id(
    metadata: TableMetadata, snapshot_id: int | None, ref: str | None, as_of_ms: int | None
) -> int | None:
    """Return the id of the requested snapshot, or None for the current snapshot of a table without snapshots.

    A request names at most one of an id, a branch or tag (`ref`), and a time. Without them, the current snapshot is
    requested.

    Raises:
        BadRequest: The table does not have the requested snapshot, or the request names it in several ways.
    """
    parameters = [
        name for name, value in (("snapshot-id", snapshot_id), ("ref", ref), ("as-of", as_of_ms)) if value is not None
    ]
    if len(parameters) > 1:
        raise BadRequest(f"{' and '.join(parameters)} are both set; set one of them")
    if ref is not None:
        return _find_snapshot_of_ref(metadata, ref)
    if as_of_ms is not None:
        return _find_snapshot_at_time(metadata, as_of_ms)
    if snapshot_id is None:
        return metadata.current_snapshot_id
    if metadata.snapshot(snapshot_id) is None:
        raise BadRequest(f"Cannot find snapshot {snapshot_id}: the table's metadata does not contain it")
    return snapshot_id


def _find_snapshot_of_ref(metadata: TableMetadata, name: str) -> int | None:
    """Return the snapshot id of a branch or tag, or None if the table has no snapshot.

    Raises:
        BadRequest: The table does not have this branch or tag.
    """
    # Old metadata have no entry for the branch main.
    ref = metadata.refs.get(name)
    if ref is not None:
        return ref.snapshot_id
    if name == MAIN:
        return metadata.current_snapshot_id
    references = ", ".join(sorted({MAIN, *metadata.refs})[:_LISTED_REFS_MAX])
    raise BadRequest(f"Cannot find the branch or tag {name[:100]!r}; the table has {references}")


def _find_snapshot_at_time(metadata: TableMetadata, as_of_ms: int) -> int:
    """Return the snapshot that was current on main at a time, like Java's `SnapshotUtil.snapshotIdAsOfTime`.

    Raises:
        BadRequest: There was no snapshot, or it has expired.
    """
    snapshot_id = None
    for entry in metadata.snapshot_log:
        if entry.timestamp_ms <= as_of_ms:
            snapshot_id = entry.snapshot_id
    if snapshot_id is None:
        raise BadRequest(f"The table has no snapshot at as-of={as_of_ms}; use a later time")
    if metadata.snapshot(snapshot_id) is None:
        raise BadRequest(f"The snapshot at as-of={as_of_ms}, {snapshot_id}, has expired; use a later time")
    return snapshot_id


def parse_whole_number(text: str | None, name: str) -> int | None:
    """Parse a whole number, or return None if the text is None.

    Raises:
        BadRequest: The text is not a whole number.
    """
    if text is None:
        return None
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX):
        raise BadRequest(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)


def select_schema(metadata: TableMetadata, schema_id: int) -> TableMetadata:
    """Return the metadata with this schema as the current schema, which resolves names in filters.

    Raises:
        BadRequest: The table no longer has the schema.
    """
    if metadata.current_schema_id == schema_id:
        return metadata
    if metadata.schema(schema_id) is None:
        raise BadRequest(f"The table has no schema {schema_id}, which the filter refers to; load it again")
    return msgspec.structs.replace(metadata, current_schema_id=schema_id)
