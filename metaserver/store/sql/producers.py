"""The operation that records the last sequence number of a producer, so that a repeated commit is recognised."""

from __future__ import annotations

from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.store import operations
from seamark.metaserver.store.sql.by_uuid import hold_table
from seamark.metaserver.store.sql.rows import PRODUCER
from seamark.metaserver.store.sql.statement import Steps, StoreStatement


def advance_producer_sequence(op: operations.AdvanceProducer, now_ms: int) -> Steps[None]:
    """Store the sequence of a producer, which must be greater than the stored sequence.

    Raises:
        CommitConflict: The stored sequence is equal or greater.
        NoSuchTable: The table does not exist.
    """
    yield from hold_table(op.uuid)
    rows = yield StoreStatement(
        f"INSERT INTO producers (uuid, producer, {PRODUCER}) VALUES ($1, $2, $3, $4, $5) "  # noqa: S608
        "ON CONFLICT (uuid, producer) DO UPDATE SET sequence = excluded.sequence, "
        "snapshot_id = excluded.snapshot_id, changed_ms = excluded.changed_ms "
        "WHERE producers.sequence < excluded.sequence RETURNING 1",
        (op.uuid, op.producer, op.sequence, op.snapshot_id, op.now_ms),
    )
    if not rows:
        raise CommitConflict(f"The producer {op.producer} has already committed sequence {op.sequence} or a later one")
