"""Operations on stream tables: the flushed offset of each shard, and the last flush before a removal of rows."""

from __future__ import annotations

from seamark.formats.runtime.errors import CommitConflict, LogUnavailable
from seamark.metaserver.store import operations
from seamark.metaserver.store.sql.by_uuid import hold_table
from seamark.metaserver.store.sql.statement import Steps, StoreStatement


def open_stream(op: operations.OpenStream, now_ms: int) -> Steps[None]:
    yield from hold_table(op.uuid)
    for shard in range(op.shards):
        yield StoreStatement(
            "INSERT INTO stream_offsets (uuid, shard, flushed, log) VALUES ($1, $2, $4, $3) "
            "ON CONFLICT (uuid, shard) DO NOTHING",
            (op.uuid, shard, op.log, op.starts.get(shard, 0)),
        )
    other_logs = yield StoreStatement(
        "SELECT log FROM stream_offsets WHERE uuid = $1 AND log <> $2 LIMIT 1", (op.uuid, op.log)
    )
    if other_logs:
        raise LogUnavailable(
            f"The rows of the table {op.uuid} are in the log {other_logs[0][0]}, and this server has the log {op.log}: "
            "write to the server that has that log. If that log is lost, restore it"
        )


def move_flushed_offsets(op: operations.MoveFlushedOffsets, now_ms: int) -> Steps[None]:
    yield from hold_table(op.uuid)
    # Sort the shards, so that two replicas do not deadlock.
    for flushed_range in sorted(op.ranges, key=lambda flushed_range: flushed_range.shard):
        rows = yield StoreStatement(
            "UPDATE stream_offsets SET flushed = $4 WHERE uuid = $1 AND shard = $2 AND flushed = $3 RETURNING 1",
            (op.uuid, flushed_range.shard, flushed_range.start, flushed_range.end),
        )
        if not rows:
            raise CommitConflict(
                f"Rows of shard {flushed_range.shard} from offset {flushed_range.start} on were flushed before, or "
                "the table has no such shard; nothing was changed"
            )


def record_removal_flush(op: operations.RecordRemovalFlush, now_ms: int) -> Steps[None]:
    """Record the snapshot of a flush that precedes a commit that removes rows. The record replaces an earlier one."""
    yield from hold_table(op.uuid)
    yield StoreStatement(
        "INSERT INTO removal_flushes (uuid, snapshot_id) VALUES ($1, $2) "
        "ON CONFLICT (uuid) DO UPDATE SET snapshot_id = excluded.snapshot_id",
        (op.uuid, op.snapshot_id),
    )


def take_removal_flush(op: operations.TakeRemovalFlush, now_ms: int) -> Steps[bool]:
    rows = yield StoreStatement("DELETE FROM removal_flushes WHERE uuid = $1 RETURNING snapshot_id", (op.uuid,))
    return bool(rows) and rows[0][0] == op.snapshot_id
