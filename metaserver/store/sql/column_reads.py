"""Operations on the reads of columns. The table has a row for each Iceberg table, day and column."""

from __future__ import annotations

from seamark.metaserver.store import model, operations
from seamark.metaserver.store.sql.by_uuid import hold_table
from seamark.metaserver.store.sql.statement import Steps, StoreStatement, batches


def add(op: operations.AddColumnReads, now_ms: int) -> Steps[None]:
    yield from hold_table(op.uuid)
    # All replicas use the same order of columns, so that two replicas do not wait for each other.
    rows = [(op.uuid, op.day, column_id, age_d, reads) for column_id, age_d, reads in sorted(op.reads)]
    for values, parameters in batches(rows):
        yield StoreStatement(
            f"INSERT INTO column_reads (uuid, day, column_id, oldest_age_d, reads) VALUES {values} "  # noqa: S608
            "ON CONFLICT (uuid, day, column_id) DO UPDATE SET reads = column_reads.reads + excluded.reads, "
            "oldest_age_d = CASE WHEN column_reads.oldest_age_d < excluded.oldest_age_d "
            "THEN excluded.oldest_age_d ELSE column_reads.oldest_age_d END",
            parameters,
        )


def of_table(uuid: str, since_day: int, limit: int) -> Steps[list[model.ColumnReads]]:
    rows = yield StoreStatement(
        "SELECT column_id, oldest_age_d, sum(reads), min(day), max(day) FROM column_reads "
        "WHERE uuid = $1 AND day >= $2 GROUP BY column_id, oldest_age_d ORDER BY column_id, oldest_age_d LIMIT $3",
        (uuid, since_day, limit),
    )
    return [model.ColumnReads(*map(int, row)) for row in rows]


def prune(before_day: int, limit: int) -> Steps[int]:
    rows = yield StoreStatement(
        "DELETE FROM column_reads WHERE (uuid, day, column_id) IN "
        "(SELECT uuid, day, column_id FROM column_reads WHERE day < $1 ORDER BY day LIMIT $2) RETURNING 1",
        (before_day, limit),
    )
    return len(rows)
