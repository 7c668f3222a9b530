"""Operations on the timeline, which record instants, change their states, and archive them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seamark.formats.runtime.errors import AlreadyExists, CommitConflict, NotFound
from seamark.metaserver.store import operations
from seamark.metaserver.store.model import InstantState
from seamark.metaserver.store.sql.rows import INSTANT, NEW_INSTANT, pack_json
from seamark.metaserver.store.sql.statement import Steps, StoreStatement

_FINISHED = (InstantState.COMPLETED, InstantState.ROLLED_BACK)


def record_instant(op: operations.RecordInstant, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        f"INSERT INTO instants ({NEW_INSTANT}, position) VALUES ({NEW_INSTANT.placeholders}, {{next_position}}) "  # noqa: S608
        "ON CONFLICT (id) DO NOTHING RETURNING 1",
        NEW_INSTANT.encode(op.instant),
    )
    if not rows:
        raise AlreadyExists(f"Instant already exists: {op.instant.id}")


def move_instant(op: operations.MoveInstant, now_ms: int) -> Steps[None]:
    """Change the state of an instant. If no row changes, a second query finds the reason for the error.

    Raises:
        NotFound: The instant does not exist.
        CommitConflict: The instant does not have the expected state.
    """
    assignments, params = ["position = {next_position}"], list[Any]()

    def assign(column: str, value: Any) -> None:
        params.append(value)
        assignments.append(f"{column} = ${len(params)}")

    assign("state", op.state.value)
    if op.state in _FINISHED:
        assign("completed_ms", op.now_ms)
    if op.snapshot_id is not None:
        assign("snapshot_id", op.snapshot_id)
    if op.summary is not None:
        assign("summary", pack_json(op.summary))
    params += (op.id, op.expected.value)
    rows = yield StoreStatement(
        f"UPDATE instants SET {', '.join(assignments)} "  # noqa: S608
        f"WHERE id = ${len(params) - 1} AND state = ${len(params)} RETURNING 1",
        tuple(params),
    )
    if rows:
        return
    rows = yield StoreStatement(
        "SELECT state FROM instants WHERE id = $1 UNION ALL SELECT state FROM instants_archive WHERE id = $1", (op.id,)
    )
    if not rows:
        raise NotFound(f"Instant does not exist: {op.id}")
    raise CommitConflict(f"Instant {op.id} is {rows[0][0]}, not {op.expected.value}: another request moved it first")


def move_to_archive(ids: Sequence[str]) -> Steps[int]:
    """Archive the finished instants with these ids, and return the number of archived instants."""
    rows = yield StoreStatement(
        "SELECT id FROM instants WHERE id IN {each_of_1} AND state IN ('completed', 'rolled_back')",
        (pack_json(list(ids)),),
        lock="UPDATE SKIP LOCKED",
    )
    if not rows:
        return 0
    finished_ids = (pack_json([row[0] for row in rows]),)
    yield StoreStatement(
        f"INSERT INTO instants_archive ({INSTANT}) SELECT {INSTANT} FROM instants WHERE id IN {{each_of_1}}",  # noqa: S608
        finished_ids,
    )
    yield StoreStatement("DELETE FROM instants WHERE id IN {each_of_1}", finished_ids)
    return len(rows)
