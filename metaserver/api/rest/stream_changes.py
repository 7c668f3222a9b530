"""Keeps appends to stream tables away from commits that change how their rows are written.

Such a commit changes the key, the type of a column, the partition spec or another way in which files are written, or it
removes schemas or the branch `main`. The rows that wait are flushed first, because the table may not accept them
afterwards. While the commit runs, appends wait, so that the log gets no such rows after the flush.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import check_requirements, read_requirements
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.iceberg.metadata.updates import apply_updates, read_updates
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitConflict,
    CommitUnknown,
    Corrupt,
    NotFound,
    ReadOnlyServer,
    RetryLater,
    SeamarkError,
)
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.values import ExaminedTable, TableChange
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import CheckFence
from seamark.metaserver.streams.keys import identify_key
from seamark.metaserver.streams.log_opening import LogElsewhere, check_has_no_stream
from seamark.metaserver.streams.stream_properties import is_stream_table

_log = structlog.get_logger("seamark.streams")


class StreamCommitChecks(NamedTuple):
    """The checks of a commit that changes how rows of stream tables are written.

    Attributes:
        fences: Checks for the transaction of the commit. This process has a lease for each table, which keeps appends
            away. The checks fail if another process has taken a lease.
        examined: The tables that the commit must find unchanged, by name.
    """

    fences: Sequence[CheckFence]
    examined: Mapping[tuple[NamespacePath, str], ExaminedTable]


class _Effect(Enum):
    """The effect of a commit on a stream table.

    `NONE`: waiting rows are written as before. `CHANGED`: waiting rows must be flushed before the commit. `REFUSED`:
    the commit will fail, so the stream needs no work.
    """

    NONE = auto()
    CHANGED = auto()
    REFUSED = auto()


@asynccontextmanager
async def hold_appends(call: Call, changes: Sequence[TableChange]) -> AsyncIterator[StreamCommitChecks]:
    """Flush the stream tables for which a commit changes how rows are written. Keep appends away in the context.

    The first flush runs beside appends, so that the second flush has few rows and appends wait only for a short time.

    Yields:
        The checks of the commit, and the tables that it must find.

    Raises:
        SeamarkError: A flush failed, but may succeed if the client repeats the commit.
    """
    changed_tables: list[tuple[Entry, bool]] = []
    examined: dict[tuple[NamespacePath, str], ExaminedTable] = {}
    for change in changes:
        updates = list(map(lower_action, change.updates))
        removes_schemas_or_rows = any(requires_flush(update) for update in updates)
        may_change = any(update.get("action") in _WRITING_ACTIONS for update in updates)
        if not (removes_schemas_or_rows or may_change):
            continue
        entry = await call.components.store.load_entry(EntryKind.TABLE, change.namespace, change.name)
        examined[change.namespace, change.name] = ExaminedTable(None if entry is None else entry.uuid)
        if entry is None:
            continue
        metadata = await call.components.catalog.documents.table(entry.metadata_location)
        if not (entry.flushed or is_stream_table(metadata)):
            continue
        now_ms = call.components.clock.now_ms()
        effect = await call.run_in_turn(
            partial(
                _find_effect,
                updates,
                change.requirements,
                metadata,
                now_ms,
                removes_schemas_or_rows=removes_schemas_or_rows,
            )
        )
        if effect is _Effect.REFUSED:
            # The commit may only be refused because of this metadata. If another commit replaces the metadata first,
            # the commit must not succeed either, because the rows of the stream were not flushed for it.
            examined[change.namespace, change.name] = ExaminedTable(entry.uuid, entry.metadata_location)
        elif effect is _Effect.CHANGED:
            changed_tables.append((entry, removes_schemas_or_rows))
    if not changed_tables:
        yield StreamCommitChecks((), examined)
        return
    await _flush_tables(call, changed_tables)
    async with call.components.streams.hold_appends({entry.uuid for entry, _ in changed_tables}) as fences:
        await _flush_tables(call, changed_tables)
        yield StreamCommitChecks(fences, examined)


async def _flush_tables(call: Call, changed_tables: Sequence[tuple[Entry, bool]]) -> None:
    """Flush the stream tables among some tables before a commit.

    The flag of a table is True if the commit removes schemas, partition specs or rows. Then an error of the flush ends
    the commit. Otherwise, only temporary errors do.

    Raises:
        BadRequest: Another server may have rows of a table that wait for a flush.
        SeamarkError: A flush failed, but may succeed if the client repeats the commit.
    """
    for read_entry, removes_schemas_or_rows in changed_tables:
        entry = await call.components.store.load_entry(EntryKind.TABLE, read_entry.namespace, read_entry.name)
        if entry is None or entry.uuid != read_entry.uuid or not entry.flushed:
            continue
        try:
            if removes_schemas_or_rows:
                await call.components.streams.flush(entry.uuid)
            else:
                await _flush_before_change(call, entry)
        except LogElsewhere as error:
            check_has_no_stream(entry, await call.components.catalog.documents.table(entry.metadata_location), error)


async def check_may_overwrite(call: Call, entry: Entry, metadata: TableMetadata) -> None:
    """Check that a registration may replace the metadata of an existing table by other metadata of the same table.

    It may not for a stream table: appended rows that are not in files yet may not fit the other metadata.

    Raises:
        BadRequest: The table is or was a stream table.
    """
    present_metadata = await _try_load_metadata(call, entry)
    if entry.flushed or (present_metadata is not None and is_stream_table(present_metadata)):
        raise BadRequest(
            f"Cannot overwrite {format_path(entry.namespace, entry.name)} with other metadata, because it is a stream "
            "table, and rows that wait may not fit them; roll the branch main back, or send an update instead"
        )


async def check_may_register_again(call: Call, entry: Entry | None, metadata: TableMetadata) -> None:
    """Check that an unregistered table may be registered again with this metadata.

    Rows that were appended before the table was unregistered may not be in its files yet. They must fit the metadata.

    Args:
        call: The call.
        entry: The last entry of the table, or None if the catalog has forgotten it.
        metadata: The metadata with which the table is registered.

    Raises:
        BadRequest: The metadata lack a schema that the table had when it was unregistered, or a schema of rows that
            wait.
        LogUnavailable: The log does not answer.
    """
    if entry is None:
        if not is_stream_table(metadata):
            return
        required_schema_ids: set[int | None] = {*await call.components.streams.openings.list_waiting_schemas(metadata)}
    else:
        last_metadata = await _try_load_metadata(call, entry)
        if last_metadata is None or not is_stream_table(last_metadata):
            return
        required_schema_ids = {schema.schema_id for schema in last_metadata.schemas}
    missing_ids = required_schema_ids - {schema.schema_id for schema in metadata.schemas}
    if missing_ids:
        ids_text = ", ".join(sorted(map(str, missing_ids)))
        raise BadRequest(
            f"Cannot register the stream table {metadata.table_uuid}: the metadata lack its schemas {ids_text}, and "
            "rows with these schemas may wait; register the metadata file that unregisterTable returned"
        )


async def _try_load_metadata(call: Call, entry: Entry) -> TableMetadata | None:
    """Return the metadata of an entry, or None if they cannot be read."""
    try:
        return await call.components.catalog.documents.table(entry.metadata_location)
    except (NotFound, Corrupt):
        return None


_WRITING_ACTIONS = frozenset(
    (
        *("add-schema", "set-current-schema", "set-properties", "remove-properties"),
        *("add-spec", "set-default-spec", "add-sort-order", "set-default-sort-order"),
    )
)
"""The actions of updates that may change the key of a stream table, or how its files are written."""
_WRITING_PROPERTIES = ("write.", "encryption.")
"""The prefixes of properties that state how files are written."""


def _find_effect(
    updates: Sequence[dict[str, Any]],
    requirements: Sequence[dict[str, Any]],
    metadata: TableMetadata,
    now_ms: int,
    *,
    removes_schemas_or_rows: bool,
) -> _Effect:
    """Return the effect of a commit on the key of a stream table, and on how the files of the table are written.

    A commit that removes schemas, partition specs or rows always changes the stream unless it fails. For other commits,
    only the relevant updates are applied, and the results are compared.
    """
    if _fails_requirement(updates, requirements, metadata):
        return _Effect.REFUSED
    if not removes_schemas_or_rows:
        try:
            # The types of format version 3 need that version.
            actions = (*_WRITING_ACTIONS, "upgrade-format-version")
            relevant_updates = [update for update in updates if update.get("action") in actions]
            changed_metadata = apply_updates(metadata, read_updates(relevant_updates), now_ms=now_ms)
        except SeamarkError:
            pass  # The commit will probably fail, too.
        else:
            is_changed = (
                identify_key(changed_metadata) != identify_key(metadata)
                or _describe_writing(changed_metadata) != _describe_writing(metadata)
                or _restricts_column(metadata, changed_metadata)
            )
            return _Effect.CHANGED if is_changed else _Effect.NONE
    return _Effect.REFUSED if _is_refused(updates, metadata, now_ms) else _Effect.CHANGED


def _fails_requirement(
    updates: Sequence[dict[str, Any]], requirements: Sequence[dict[str, Any]], metadata: TableMetadata
) -> bool:
    """Return whether a requirement fails, so that the commit fails without any work on the stream.

    A commit that adds a snapshot may still succeed, because the server can move the snapshot onto the current one.
    """
    if any(update.get("action") == "add-snapshot" for update in updates):
        return False
    try:
        check_requirements(metadata, read_requirements(requirements))
    except (BadRequest, CommitConflict):
        return True
    return False


def _is_refused(updates: Sequence[dict[str, Any]], metadata: TableMetadata, now_ms: int) -> bool:
    """Return whether updates do not fit a table, so that the commit fails without any work on the stream."""
    try:
        apply_updates(metadata, read_updates(updates), now_ms=now_ms)
    except BadRequest:
        return True
    except SeamarkError:  # The updates may fit the table after another commit.
        return False
    return False


def _describe_writing(metadata: TableMetadata) -> tuple[object, ...]:
    """Return the spec, the order and the properties by which files of a table are written."""
    properties = {name: value for name, value in metadata.properties.items() if name.startswith(_WRITING_PROPERTIES)}
    return metadata.default_spec, metadata.default_sort_order_id, properties


def _restricts_column(metadata: TableMetadata, changed_metadata: TableMetadata) -> bool:
    """Return whether a column of the current schema gets another type, or must have a value from now on."""
    columns = {column.id: column for column in metadata.current_schema.fields}
    for column in changed_metadata.current_schema.fields:
        former_column = columns.get(column.id)
        if former_column is not None and former_column.type != column.type:
            return True
        if column.required and (former_column is None or not former_column.required):
            return True
    return False


async def _flush_before_change(call: Call, entry: Entry) -> None:
    """Flush a stream table before a change, so that rows that wait are written as they were appended.

    The commit does not depend on the flush: rows state their key and their schema, and a later flush orders rows of
    several keys and converts rows. An error that would occur again is therefore ignored, so that an update can correct
    the table.

    Raises:
        LogElsewhere: This process does not have the log of the table.
        SeamarkError: The flush failed, but may succeed if the client repeats the commit.
    """
    try:
        await call.components.streams.flush(entry.uuid)
    except (CommitConflict, CommitUnknown, RetryLater, ReadOnlyServer):
        raise
    except Exception:  # noqa: BLE001  a table with a row that cannot be flushed must stay changeable
        _log.warning("rows wait while their table changes", table=entry.uuid, exc_info=True)


def lower_action(update: dict[str, Any]) -> dict[str, Any]:
    """Return an update with its action in lower case, as the commit reads it.

    Raises:
        BadRequest: The action is not a string.
    """
    action = update.get("action")
    if action is None:  # The commit refuses the update.
        return update
    if not isinstance(action, str):
        raise BadRequest("The action of a metadata update is not a string; send the name of an action")
    return {**update, "action": action.lower()}


def requires_flush(update: dict[str, Any]) -> bool:
    """Return whether appended rows must be written to files in a snapshot before an update.

    A replaced table loses its branch `main`, and the rows of the branch. Waiting rows have the schema that was current
    when they arrived. This schema and the partition specs of its columns must not be removed before the rows are
    flushed.
    """
    action = update.get("action")
    return action in ("remove-schemas", "remove-partition-specs") or (
        action == "remove-snapshot-ref" and update.get("ref-name") == MAIN
    )
