"""Applies the port's operations. A generator for each type of operation contains its SQL.

No statement may raise a constraint error, because PostgreSQL would then abort the whole transaction. Therefore every
insert has `ON CONFLICT`, and `RETURNING` shows whether it has inserted a row. Every update has its condition in its
WHERE clause. If no row matches, a later query finds the reason. Under READ COMMITTED, this is free of races: PostgreSQL
waits for a concurrent writer of the row, and checks the condition again on the new row.

The generators are in `names`, `instants`, `records`, `recorded_reads`, `index_files`, `claims`, `producers`,
`plan_tables`, `replicas` and `streams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seamark.metaserver.store import operations
from seamark.metaserver.store.sql import (
    claims,
    index_files,
    instants,
    names,
    plan_tables,
    producers,
    recorded_reads,
    records,
    replicas,
    streams,
)
from seamark.metaserver.store.sql.statement import Steps


def apply_operations(operations: Sequence[operations.Operation], now_ms: int) -> Steps[list[Any]]:
    """Apply the operations in order, and return their results.

    If an operation fails, it raises its error. The code that runs the transaction then rolls it back.
    """
    results: list[Any] = []
    for operation in operations:
        result = yield from _APPLY[type(operation)](operation, now_ms)
        results += (result,)
    return results


_APPLY: dict[type, Callable[[Any, int], Steps[Any]]] = {
    operations.CreateNamespace: names.create_namespace,
    operations.ReplaceNamespaceProperties: names.replace_namespace_properties,
    operations.DropNamespace: names.drop_namespace,
    operations.CreateEntry: names.create_entry,
    operations.SwapPointer: names.swap_pointer,
    operations.RenameEntry: names.rename_entry,
    operations.DropEntry: names.drop_entry,
    operations.RestoreEntry: names.restore_entry,
    operations.ForgetDropped: names.forget_dropped,
    operations.RecordInstant: instants.record_instant,
    operations.MoveInstant: instants.move_instant,
    operations.SaveIdempotency: records.save_idempotency,
    operations.SaveMetricsReport: records.save_metrics_report,
    operations.AddColumnReads: recorded_reads.add_column_reads,
    operations.AddQueryRecords: recorded_reads.add_queries,
    operations.SaveAppliedAdvice: recorded_reads.save_advice,
    operations.ChangeAppliedAdvice: recorded_reads.change_advice,
    operations.SaveToken: records.save_token,
    operations.RevokeToken: records.revoke_token,
    operations.SaveGrant: records.save_grant,
    operations.RemoveGrant: records.remove_grant,
    operations.RemoveGrantsOf: records.remove_grants,
    operations.SaveAudit: records.save_audit,
    operations.SaveCursor: records.save_cursor,
    operations.TakeLease: records.take_lease,
    operations.TakePriority: records.take_priority,
    operations.EndPriority: records.end_priority,
    operations.CheckFence: records.check_fence,
    operations.ReplaceIndexFiles: index_files.replace_index_files,
    operations.QuarantineIndexFile: index_files.record_quarantine,
    operations.ForgetIndexFile: index_files.forget_index_file,
    operations.ClaimLocations: claims.claim_locations,
    operations.AllowLocations: claims.allow_locations,
    operations.ReleaseLocations: claims.release_locations,
    operations.RecordRetainedCheck: claims.record_retained_check,
    operations.AdvanceProducer: producers.advance_producer_sequence,
    operations.OpenStream: streams.open_stream,
    operations.MoveFlushedOffsets: streams.move_flushed_offsets,
    operations.RecordRemovalFlush: streams.record_removal_flush,
    operations.TakeRemovalFlush: streams.take_removal_flush,
    operations.KeepPlanTable: plan_tables.keep_plan_table,
    operations.RenewPlanTable: plan_tables.extend_plan_lease,
    operations.LeasePlanSnapshots: plan_tables.change_plan_leases,
    operations.DropPlanSnapshots: plan_tables.drop_plan_snapshots,
    operations.RetirePlanTables: plan_tables.retire_plan_tables,
    operations.ForgetPlanTable: plan_tables.forget_plan_table,
    operations.RenewReplica: replicas.renew_replica,
    operations.RemoveReplica: replicas.remove_replica,
    operations.CreateWarehouse: records.create_warehouse,
    operations.ChangeWarehouse: records.change_warehouse,
    operations.RemoveWarehouse: records.remove_warehouse,
    operations.AssignCatalogToWarehouse: records.assign_catalog_to_warehouse,
    operations.CloseCatalog: records.close_catalog,
}
