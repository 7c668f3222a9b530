"""Prepares stream tables for the commits of engines, for the rows that wait for a flush.

Before a commit that removes rows, the stream is flushed, so that the commit conflicts with rows that it has not read.
An engine whose catalog sends `X-Seamark-Fresh` may base a snapshot on a fresh snapshot. If the snapshot only appends,
it is moved onto the current snapshot of the table. If it removes rows, it is refused, because it may remove rows of
fresh files, which the table does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import FRESH_HEADER, format_path
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.api.http.parameters.fresh import reads_fresh
from seamark.metaserver.api.indexes.dimension_rights import check_index_properties
from seamark.metaserver.api.rest.stream_changes import lower_action, requires_flush
from seamark.metaserver.catalog.values import TableChange
from seamark.metaserver.store.model import TABLE, Entry, EntryKind, NamespacePath
from seamark.metaserver.streams.incoming.dead_letters import parse_dead_letter_table
from seamark.metaserver.streams.log_opening import LogElsewhere

_REMOVING_OPERATIONS = ("delete", "overwrite")
"""The operations of snapshots that may remove rows."""


async def prepare_stream_table(
    call: Call,
    namespace: NamespacePath,
    name: str,
    requirements: Sequence[dict[str, Any]],
    updates: Sequence[dict[str, Any]],
) -> Snapshot | None:
    """Flush a stream table before a commit that removes rows.

    A fresh snapshot also has appended rows that are not in files of the table yet, and exists for a limited time. A
    commit may be based on a fresh snapshot that has expired. Such a commit may repeat an earlier commit that succeeded.
    So this function accepts the commit if the commit requires the parent of its snapshot. If the commit is no
    repetition, this requirement fails later.

    Returns:
        The fresh snapshot on which the only snapshot of the commit is based, or None for every other commit.

    Raises:
        BadRequest: The commit is based on a fresh snapshot, and is not a single append. Or it may be based on an
            expired fresh snapshot, and does not require its parent.
    """
    updates = list(map(lower_action, updates))
    snapshots = [update.get("snapshot") for update in updates if update.get("action") == "add-snapshot"]
    removes_schemas_or_rows = any(requires_flush(update) for update in updates)
    removes_rows = any(
        isinstance(snapshot, dict) and _read_operation(snapshot) in _REMOVING_OPERATIONS for snapshot in snapshots
    )
    if not snapshots or not (removes_rows or call.components.streams.has_log):
        return None
    entry = await call.components.store.load_entry(EntryKind.TABLE, namespace, name)
    if entry is None or not entry.flushed:
        return None
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    fresh_snapshot = None
    for snapshot in snapshots:
        if not isinstance(snapshot, dict):  # The commit refuses it.
            continue
        fresh_snapshot = await _find_fresh_parent(call, entry, metadata, snapshot)
        if fresh_snapshot is None and reads_fresh(call.headers):
            await _check_asserts_parent(call, entry, snapshot, requirements)
        if fresh_snapshot is not None and (
            len(snapshots) > 1 or removes_schemas_or_rows or _read_operation(snapshot) != "append"
        ):
            with suppress(LogElsewhere):
                await call.components.streams.flush(entry.uuid)
            raise BadRequest(
                f"{format_path(namespace, name)} is a stream table, and the statement has read rows that waited for a "
                "flush. In this case, only appends can be committed through this catalog. The rows are flushed now: "
                f"run the statement again, or run it through a catalog without the header {FRESH_HEADER}"
            )
        snapshot_id = snapshot.get("snapshot-id")
        is_repeated = isinstance(snapshot_id, int) and metadata.snapshot(snapshot_id) is not None
        # A repeated commit gets its first answer. After an error, the client would delete live files.
        if fresh_snapshot is None and not is_repeated and _read_operation(snapshot) in _REMOVING_OPERATIONS:
            parent_id = snapshot.get("parent-snapshot-id")
            await call.components.streams.flush_for_removal(entry, parent_id if isinstance(parent_id, int) else None)
    return fresh_snapshot


async def check_not_based_on_fresh(
    call: Call, namespace: NamespacePath, name: str, updates: Sequence[dict[str, Any]]
) -> None:
    """Check that no snapshot of a transaction is based on a fresh snapshot, which has rows that are not in files yet.

    Raises:
        BadRequest: A snapshot is based on a fresh snapshot.
    """
    lowered_updates = map(lower_action, updates)
    snapshots = [update.get("snapshot") for update in lowered_updates if update.get("action") == "add-snapshot"]
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
                f"a flush; commit it through a catalog without the header {FRESH_HEADER}"
            )


async def _find_fresh_parent(
    call: Call, entry: Entry, metadata: TableMetadata, snapshot: dict[str, Any]
) -> Snapshot | None:
    """Return the fresh snapshot on which a new snapshot is based, or None if there is none.

    A fresh snapshot also has appended rows that are not in files of the table yet. The table's metadata do not have it.
    """
    parent_id = snapshot.get("parent-snapshot-id")
    if not isinstance(parent_id, int) or metadata.snapshot(parent_id) is not None:
        return None
    return await call.components.streams.find_fresh_snapshot(entry, metadata, parent_id)


async def _check_asserts_parent(
    call: Call, entry: Entry, snapshot: dict[str, Any], requirements: Sequence[dict[str, Any]]
) -> None:
    """Refuse a commit that is based on a snapshot that the table lacks.

    A commit with a requirement on the branch is not refused here, because the requirement makes it fail later.

    Raises:
        BadRequest: The table lacks the snapshot, and the commit has no requirement on the branch.
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
    dead_letter_table = parse_dead_letter_table(properties)
    if dead_letter_table is not None:
        namespace, name = dead_letter_table
        await call.components.authorizer.require(call.principal, "appendRows", Securable(namespace, TABLE, name))


async def check_named_tables(call: Call, properties: Mapping[str, Any]) -> None:
    """Check the caller's rights on other tables that the properties of a table name.

    Raises:
        Forbidden: The caller may not append rows to a dead-letter table, or may not read a dimension table of an index.
        BadRequest: The name of the table is invalid.
    """
    await check_index_properties(call, properties)
    await check_dead_letter_table(call, properties)


async def check_new_properties(call: Call, changes: Sequence[TableChange]) -> None:
    """Check the caller's rights on other tables that updates name in properties, before any work for a commit.

    Raises:
        Forbidden: The caller may not append rows to a dead-letter table, or may not read a dimension table of an index.
        BadRequest: The name of the table is invalid.
    """
    for update in (lower_action(update) for change in changes for update in change.updates):
        properties = update.get("updates")
        if update.get("action") == "set-properties" and isinstance(properties, dict):
            await check_named_tables(call, properties)
