"""Operations on plan tables: the names of plans, their leases, and the files to delete.

A row has a name until the plan is retired. After that, a new plan may use the name, and the row only lists the files to
delete, so that they are still known after a crash.
"""

from __future__ import annotations

from seamark.metaserver.store import model, operations
from seamark.metaserver.store.sql.rows import PLAN_TABLE, pack
from seamark.metaserver.store.sql.statement import Steps, StoreStatement


def keep_plan_table(op: operations.KeepPlanTable, now_ms: int) -> Steps[model.StoredPlanTable]:
    """Insert a plan. If its name exists, keep the existing plan, and use the later end of the two leases."""
    rows = yield StoreStatement(
        f"INSERT INTO plan_tables ({PLAN_TABLE}) VALUES ({PLAN_TABLE.placeholders}) "  # noqa: S608
        "ON CONFLICT (namespace, name) DO UPDATE SET expires_ms = "
        "CASE WHEN plan_tables.expires_ms < excluded.expires_ms THEN excluded.expires_ms "
        f"ELSE plan_tables.expires_ms END RETURNING {PLAN_TABLE}",
        PLAN_TABLE.encode(op.plan),
    )
    return PLAN_TABLE.decode(rows[0])


def extend_plan_lease(op: operations.RenewPlanTable, now_ms: int) -> Steps[bool]:
    rows = yield StoreStatement(
        "UPDATE plan_tables SET expires_ms = CASE WHEN expires_ms < $1 THEN $1 ELSE expires_ms END "
        "WHERE id = $2 AND name IS NOT NULL RETURNING 1",
        (op.expires_ms, op.id),
    )
    return bool(rows)


def change_plan_leases(op: operations.LeasePlanSnapshots, now_ms: int) -> Steps[int]:
    """Extend or end the leases of plans that clients see as snapshots of the planned table (`of_name`).

    A plan without a name is retired: its files are deleted later, so its lease does not change. `now_ms` is a parameter
    of all operations. The result is the number of changed plans.
    """
    new_expires_ms = "$1" if op.withdraw else "CASE WHEN expires_ms < $1 THEN $1 ELSE expires_ms END"
    plan_count = 0
    for plan_snapshot_id in op.plan_snapshot_ids:
        rows = yield StoreStatement(
            f"UPDATE plan_tables SET expires_ms = {new_expires_ms} WHERE namespace = $2 AND of_name = $3 "  # noqa: S608
            "AND audience = $4 AND shown_id = $5 AND name IS NOT NULL RETURNING 1",
            (op.expires_ms, pack(op.namespace), op.of_name, op.audience, plan_snapshot_id),
        )
        plan_count += len(rows)
    return plan_count


def drop_plan_snapshots(op: operations.DropPlanSnapshots, now_ms: int) -> Steps[int]:
    dropped_count = 0
    for plan_snapshot_id in op.plan_snapshot_ids:
        rows = yield StoreStatement(
            "UPDATE plan_tables SET name = NULL WHERE namespace = $1 AND of_name = $2 AND shown_id = $3 "
            "AND audience IS NOT NULL AND name IS NOT NULL RETURNING 1",
            (pack(op.namespace), op.of_name, plan_snapshot_id),
        )
        dropped_count += len(rows)
    return dropped_count


def retire_plan_tables(op: operations.RetirePlanTables, now_ms: int) -> Steps[int]:
    """Remove the names of at most `op.limit` plans whose lease ended before `op.before_ms`. Return their number."""
    # Repeat the condition, because under READ COMMITTED, a lease may be renewed between the subquery and the update.
    rows = yield StoreStatement(
        "UPDATE plan_tables SET name = NULL WHERE expires_ms < $1 AND name IS NOT NULL AND id IN "
        "(SELECT id FROM plan_tables WHERE expires_ms < $1 AND name IS NOT NULL ORDER BY expires_ms LIMIT $2) "
        "RETURNING 1",
        (op.before_ms, op.limit),
    )
    return len(rows)


def forget_plan_table(op: operations.ForgetPlanTable, now_ms: int) -> Steps[None]:
    yield StoreStatement("DELETE FROM plan_tables WHERE id = $1 AND name IS NULL", (op.id,))
