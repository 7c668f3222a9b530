"""Commits of updates that a route computes from the current metadata of a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from msgspec import structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.api.http.dispatch import Call
from seamark.metaserver.catalog.policies import SETTERS
from seamark.metaserver.catalog.values import LoadedTable

COMMIT_TRIES_MAX = 8


async def commit_updates(
    call: Call,
    compute_updates: Callable[[TableMetadata], list[dict[str, Any]]],
    check_rights: Callable[[], Awaitable[None]] | None = None,
    *,
    reads_schema: bool = True,
    kept_setters: Collection[str] = (),
) -> LoadedTable | None:
    """Compute updates from the current metadata, and commit them. After a conflict, repeat both steps.

    A concurrent change of a property that the updates change is a conflict, so no change is lost.

    Args:
        call: The call.
        compute_updates: A function that returns the updates for the current metadata.
        check_rights: A function that is called after each computation. It checks the rights that the updates need in
            addition to the right of the route.
        reads_schema: Whether the updates depend on the schema. A concurrent change of the schema is then a conflict.
        kept_setters: The properties that keep their setter, which is the recorded principal that set the value.
            `compute_updates` may change the collection.

    Returns:
        The table if it needs no updates, or None after a commit.

    Raises:
        CommitConflict: All attempts conflicted.
    """
    tables = call.components.catalog.tables
    for attempt in range(1, COMMIT_TRIES_MAX + 1):
        loaded_table = await tables.load(call.namespace, call.name)
        metadata = loaded_table.metadata
        updates = compute_updates(metadata)
        if check_rights is not None:
            await check_rights()
        if not updates:
            return loaded_table
        requirements: list[dict[str, Any]] = [{"type": "assert-table-uuid", "uuid": metadata.table_uuid}]
        # The updates depend on the properties that they change. `kept_setters` also depends on the recorded setters.
        names = [*_list_changed_properties(updates), *((SETTERS,) if kept_setters else ())]
        if names:
            properties = {name: metadata.properties.get(name) for name in names}
            requirements.append({"type": "seamark-assert-properties", "properties": properties})
        if reads_schema:
            schema_id = metadata.current_schema_id
            requirements.append({"type": "assert-current-schema-id", "current-schema-id": schema_id})
        caller = structs.replace(call.caller, keeps_setters_of=tuple(kept_setters))
        try:
            await call.components.engine_commits.commit_table(caller, call.namespace, call.name, requirements, updates)
        except CommitConflict:
            if attempt == COMMIT_TRIES_MAX:
                raise
        else:
            return None
    return None


def _list_changed_properties(updates: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the properties that updates set or remove."""
    return [name for update in updates for name in (*update.get("updates", ()), *update.get("removals", ()))]
