"""Prepares stream tables for the commits of engines, for the rows that wait for a flush.

Before a commit that removes rows, the stream is flushed, so that the commit conflicts with rows that it has not read.
An engine whose catalog sends `X-Seamark-Fresh` may base a snapshot on a fresh snapshot. If the snapshot only appends,
it is moved onto the current snapshot of the table. If it removes rows, it is refused, because it may remove rows of
fresh files, which the table does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import MAIN, Snapshot
from seamark.formats.iceberg.metadata.updates import apply_updates, read_updates
from seamark.formats.protocol.wire import FRESH_HEADER, format_path
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    CommitUnknown,
    ReadOnlyServer,
    RetryLater,
    SeamarkError,
)
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.parameters.fresh import reads_fresh
from seamark.metaserver.api.indexes.dimension_rights import check_index_properties
from seamark.metaserver.store.model import TABLE, Entry, EntryKind, NamespacePath
from seamark.metaserver.streams.incoming.dead_letters import parse_dead_letter_table
from seamark.metaserver.streams.keys import identify_key
from seamark.metaserver.streams.log_opening import LogElsewhere

_log = structlog.get_logger("seamark.streams")


async def prepare_stream_table(
    call: Call,
    namespace: NamespacePath,
    name: str,
    requirements: Sequence[dict[str, Any]],
    updates: Sequence[dict[str, Any]],
) -> Snapshot | None:
    """Flush a stream table before a commit that removes rows, or that changes its key or how its files are written.

    A commit on an expired fresh snapshot is not refused here, because it may repeat a commit that succeeded. If it does
    not, its requirement fails, and the engine loads the table again.

    Returns:
        The fresh snapshot on which the only snapshot of the commit is based, or None for every other commit.

    Raises:
        Forbidden: The commit sets a dead-letter table to which the caller may not append rows, or defines an index with
            attributes of a dimension table that the caller may not read.
        BadRequest: The commit is based on a fresh snapshot and is not one append. Or it may be based on an expired
            fresh snapshot, and has no requirement that would fail.
    """
    updates = list(map(_lower_action, updates))
    snapshots = [update.get("snapshot") for update in updates if update.get("action") == "add-snapshot"]
    is_reset = any(_drops_history(update) for update in updates)
    await _check_new_properties(call, updates)
    may_set_key = any(update.get("action") in _WRITING_ACTIONS for update in updates)
    if not (snapshots or is_reset or may_set_key) or not call.components.streams.has_log:
        return None
    entry = await call.components.store.load_entry(EntryKind.TABLE, namespace, name)
    if entry is None or not entry.flushed:
        return None
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    if is_reset:
        with suppress(LogElsewhere):  # No reader of this process has seen rows that wait on another server.
            await call.components.streams.flush(entry.uuid)
    elif may_set_key and await call.run_in_turn(
        partial(_changes_writing, updates, metadata, call.components.clock.now_ms())
    ):
        await _flush_before_change(call, entry)
    fresh_snapshot = None
    for snapshot in snapshots:
        if not isinstance(snapshot, dict):  # The commit refuses it.
            continue
        fresh_snapshot = await _find_fresh_parent(call, entry, metadata, snapshot)
        if fresh_snapshot is None and reads_fresh(call.headers):
            await _check_asserts_parent(call, entry, snapshot, requirements)
        if fresh_snapshot is not None and (len(snapshots) > 1 or is_reset or _read_operation(snapshot) != "append"):
            with suppress(LogElsewhere):
                await call.components.streams.flush(entry.uuid)
            raise BadRequest(
                f"{format_path(namespace, name)} is a stream table, and the statement has read rows that waited for a "
                f"flush. "
                "In this case, only appends can be committed through this catalog. The rows are flushed now: "
                f"run the "
                f"statement again, or run it through a catalog without the header {FRESH_HEADER}"
            )
        if fresh_snapshot is None and _read_operation(snapshot) in ("delete", "overwrite"):
            parent_id = snapshot.get("parent-snapshot-id")
            await call.components.streams.flush_for_removal(entry, parent_id if isinstance(parent_id, int) else None)
    return fresh_snapshot


async def check_not_based_on_fresh(
    call: Call, namespace: NamespacePath, name: str, updates: Sequence[dict[str, Any]]
) -> None:
    """Check that no snapshot of a transaction is based on a fresh snapshot.

    Raises:
        BadRequest: A snapshot is based on a fresh snapshot.
    """
    lower_updates = map(_lower_action, updates)
    snapshots = [update.get("snapshot") for update in lower_updates if update.get("action") == "add-snapshot"]
    if not snapshots or not call.components.streams.has_log:
        return
    entry = await call.components.store.load_entry(EntryKind.TABLE, namespace, name)
    if entry is None or not entry.flushed:
        return
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    for snapshot in snapshots:
        if isinstance(snapshot, dict) and await _find_fresh_parent(call, entry, metadata, snapshot) is not None:
            raise BadRequest(
                f"{format_path(namespace, name)} is a stream table, and the transaction has read rows that waited for "
                f"a "
                f"flush; commit it through a catalog without the header {FRESH_HEADER}"
            )


async def _find_fresh_parent(
    call: Call, entry: Entry, metadata: TableMetadata, snapshot: dict[str, Any]
) -> Snapshot | None:
    """Return the fresh snapshot on which a new snapshot is based, or None if its parent is a snapshot of the table."""
    parent_id = snapshot.get("parent-snapshot-id")
    if not isinstance(parent_id, int) or metadata.snapshot(parent_id) is not None:
        return None
    return await call.components.streams.find_fresh_snapshot(entry, metadata, parent_id)


async def _check_asserts_parent(
    call: Call, entry: Entry, snapshot: dict[str, Any], requirements: Sequence[dict[str, Any]]
) -> None:
    """Check that a commit on a snapshot that the table does not have will fail by its requirements.

    Raises:
        BadRequest: The commit has no requirement on the branch.
    """
    parent_id = snapshot.get("parent-snapshot-id")
    if parent_id is None or any(requirement.get("type") == "assert-ref-snapshot-id" for requirement in requirements):
        return
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    if not isinstance(parent_id, int) or metadata.snapshot(parent_id) is None:
        raise BadRequest(
            f"The commit is based on snapshot {str(parent_id)[:40]}, which the table does not have, and it has no "
            "requirement assert-ref-snapshot-id; load the table again"
        )


def _read_operation(snapshot: dict[str, Any]) -> object:
    """Return the operation in the summary of a snapshot."""
    summary = snapshot.get("summary")
    return summary.get("operation") if isinstance(summary, dict) else None


async def check_dead_letter_table(call: Call, properties: Mapping[str, Any]) -> None:
    """Check that the caller may append rows to the dead-letter table in the properties.

    Rows of an input topic are appended without a caller, so the right is checked when the property is set.

    Raises:
        Forbidden: The caller has no right to append rows to that table.
        BadRequest: The name of the table is invalid.
    """
    place = parse_dead_letter_table(properties)
    if place is not None:
        await call.components.authorizer.require(call.principal, "appendRows", Securable(place[0], TABLE, place[1]))


async def check_named_tables(call: Call, properties: Mapping[str, Any]) -> None:
    """Check the caller's rights on other tables that the properties of a table name.

    Raises:
        Forbidden: The caller may not append rows to a dead-letter table, or may not read a dimension table of an index.
        BadRequest: The name of the table is invalid.
    """
    await check_index_properties(call, properties)
    await check_dead_letter_table(call, properties)


async def _check_new_properties(call: Call, updates: Sequence[dict[str, Any]]) -> None:
    """Check the caller's rights on other tables that updates name in properties.

    Raises:
        Forbidden: The caller may not append rows to a dead-letter table, or may not read a dimension table of an index.
        BadRequest: The name of the table is invalid.
    """
    for update in updates:
        properties = update.get("updates")
        if update.get("action") == "set-properties" and isinstance(properties, dict):
            await check_named_tables(call, properties)


_WRITING_ACTIONS = frozenset(
    (
        *("add-schema", "set-current-schema", "set-properties", "remove-properties"),
        *("add-spec", "set-default-spec", "add-sort-order", "set-default-sort-order"),
    )
)
"""The actions of updates that may change the key of a stream table, or how its files are written."""
_WRITING_PROPERTIES = ("write.", "encryption.")
"""The prefixes of properties that state how files are written."""


def _changes_writing(updates: Sequence[dict[str, Any]], metadata: TableMetadata, now_ms: int) -> bool:
    """Return whether updates may change the key of a stream table or how its files are written."""
    try:
        # The types of format version 3 need that version.
        actions = (*_WRITING_ACTIONS, "upgrade-format-version")
        relevant = [update for update in updates if update.get("action") in actions]
        new_metadata = apply_updates(metadata, read_updates(relevant), now_ms=now_ms)
    except SeamarkError:  # The commit will probably fail, too.
        return True
    return (
        identify_key(new_metadata) != identify_key(metadata)
        or _describe_writing(new_metadata) != _describe_writing(metadata)
        or _promotes_column(metadata, new_metadata)
    )


def _describe_writing(metadata: TableMetadata) -> tuple[object, ...]:
    """Return the spec, the order and the properties by which files of a table are written."""
    properties = {name: value for name, value in metadata.properties.items() if name.startswith(_WRITING_PROPERTIES)}
    return metadata.default_spec, metadata.default_sort_order_id, properties


def _promotes_column(metadata: TableMetadata, new_metadata: TableMetadata) -> bool:
    """Return whether a column of the current schema gets another type."""
    types = {column.id: column.type for column in metadata.current_schema.fields}
    return any(types.get(column.id, column.type) != column.type for column in new_metadata.current_schema.fields)


async def _flush_before_change(call: Call, entry: Entry) -> None:
    """Flush a stream table before a change, so that rows that wait are written as they were appended.

    The commit does not depend on the flush: rows state their key and their schema, and a later flush orders rows of
    several keys and converts rows. An error that would occur again is therefore ignored, so that an update can correct
    the table.

    Raises:
        SeamarkError: The flush failed, but may succeed if the client repeats the commit.
    """
    try:
        await call.components.streams.flush(entry.uuid)
    except LogElsewhere:  # No reader of this process has seen rows that wait on another server.
        pass
    except (CommitConflict, CommitUnknown, RetryLater, ReadOnlyServer):
        raise
    except Exception:  # noqa: BLE001  a table with a row that cannot be flushed must stay changeable
        _log.warning("rows wait while their table changes", table=entry.uuid, exc_info=True)


def _lower_action(update: dict[str, Any]) -> dict[str, Any]:
    """Return an update with its action in lower case, as the commit reads it."""
    action = update.get("action")
    return {**update, "action": action.lower()} if isinstance(action, str) else update


def _drops_history(update: dict[str, Any]) -> bool:
    """Return whether waiting rows have to be flushed into a snapshot before an update.

    A replaced table loses its branch `main`, and the rows of the branch. Waiting rows have the schema that was current
    when they arrived. This schema and the partition specs of its columns must not be removed before the rows are
    flushed.
    """
    action = update.get("action")
    return action in ("remove-schemas", "remove-partition-specs") or (
        action == "remove-snapshot-ref" and update.get("ref-name") == MAIN
    )
