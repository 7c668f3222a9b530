"""The semantics of the port's operations: one generator each, dispatched by type. The only SQL that writes.

The rule: no statement may raise a constraint error, because PostgreSQL aborts the whole transaction then. Every insert
therefore has `ON CONFLICT` and reports by `RETURNING` whether it happened, every update has its condition in its WHERE,
and the meaning of a missing row is queried afterwards. Under READ COMMITTED that is free of races: PostgreSQL waits for
a concurrent writer of the row and checks the condition again on the new row.

The generators are in `names`, `instants`, `records`, `index_files`, `claims`, `producers` and `plan_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seamark.metaserver.store import claims, index_files, instants, names, plan_tables, port, producers, records
from seamark.metaserver.store.statement import Steps


def transaction(operations: Sequence[port.Operation], now_ms: int) -> Steps[list[Any]]:
    """Applies the operations in order. The first that fails raises, and the driver rolls back."""
    results: list[Any] = []
    for operation in operations:
        result = yield from _APPLY[type(operation)](operation, now_ms)
        results += (result,)
    return results


_APPLY: dict[type, Callable[[Any, int], Steps[Any]]] = {
    port.CreateNamespace: names.create_namespace,
    port.ReplaceNamespaceProperties: names.replace_namespace_properties,
    port.DropNamespace: names.drop_namespace,
    port.CreateEntry: names.create_entry,
    port.SwapPointer: names.swap_pointer,
    port.RenameEntry: names.rename_entry,
    port.DropEntry: names.drop_entry,
    port.RestoreEntry: names.restore_entry,
    port.ForgetDropped: names.forget_dropped,
    port.RecordInstant: instants.record_instant,
    port.MoveInstant: instants.move_instant,
    port.SaveIdempotency: records.save_idempotency,
    port.SaveMetricsReport: records.save_metrics_report,
    port.SaveToken: records.save_token,
    port.RevokeToken: records.revoke_token,
    port.SaveGrant: records.save_grant,
    port.RemoveGrant: records.remove_grant,
    port.SaveAudit: records.save_audit,
    port.SaveCursor: records.save_cursor,
    port.TakeLease: records.take_lease,
    port.ReplaceIndexFiles: index_files.replace,
    port.QuarantineIndexFile: index_files.quarantine,
    port.ForgetIndexFile: index_files.forget,
    port.ClaimLocations: claims.claim,
    port.AllowLocations: claims.allow,
    port.ReleaseLocations: claims.release,
    port.AdvanceProducer: producers.advance,
    port.KeepPlanTable: plan_tables.keep,
    port.RenewPlanTable: plan_tables.renew,
    port.LeasePlanSnapshots: plan_tables.lease,
    port.DropPlanSnapshots: plan_tables.drop,
    port.RetirePlanTables: plan_tables.retire,
    port.ForgetPlanTable: plan_tables.forget,
}
