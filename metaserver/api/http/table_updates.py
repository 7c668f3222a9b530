"""Commits of updates that a route computes from the current metadata of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.api.http.dispatch import Call

COMMIT_TRIES = 8


async def commit_updates(call: Call, compute_updates: Callable[[TableMetadata], list[dict[str, Any]]]) -> None:
    """Commit the updates that `compute_updates` computes. After a conflict, compute and commit them again.

    Without updates, nothing is committed.

    Raises:
        CommitConflict: Many attempts conflicted.
    """
    tables = call.components.catalog.tables
    for attempt in range(1, COMMIT_TRIES + 1):
        metadata = (await tables.load(call.namespace, call.name)).metadata
        updates = compute_updates(metadata)
        if not updates:
            return
        requirements: list[dict[str, Any]] = [
            {"type": "assert-table-uuid", "uuid": metadata.table_uuid},
            {"type": "assert-current-schema-id", "current-schema-id": metadata.current_schema_id},
        ]
        try:
            await call.components.engine_commits.commit_table(
                call.caller, call.namespace, call.name, requirements, updates
            )
        except CommitConflict:
            if attempt == COMMIT_TRIES:
                raise
        else:
            return
