"""Implements the pointer store's port with generators, which each database driver can run in three ways:

- `_run_change`: in one durable transaction.
- `_read_point`: a look-up by key that reads few pages.
- `_read_list`: a read that may be large.

Most methods run a generator of `sql/` in one of these ways, and have the parameters of the generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import Corrupt
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.operations import Operation
from seamark.metaserver.store.sql import claims as claim_steps
from seamark.metaserver.store.sql import instants, queries, records
from seamark.metaserver.store.sql import recorded_reads as read_steps
from seamark.metaserver.store.sql import replicas as replica_steps
from seamark.metaserver.store.sql.dispatch import apply_operations
from seamark.metaserver.store.sql.statement import Steps
from seamark.metaserver.store.stale_reads import StaleReads

T = TypeVar("T")
P = ParamSpec("P")
Method = Callable[Concatenate["GeneratorStore", P], Coroutine[Any, Any, T]]


def _make_point_read(query: Callable[P, Steps[T]]) -> Method[P, T]:
    """Make a method that runs the query as a look-up by key."""

    def method(store: GeneratorStore, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return store._read_point(partial(query, *args, **options))

    return method


def _make_stale_point_read(kind: str, query: Callable[P, Steps[T]]) -> Method[P, T]:
    """Make a method that looks up a row. If a request allows stale answers, the method may return an earlier result."""

    def method(store: GeneratorStore, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        make_steps = partial(query, *args, **options)
        if store._stale_reads is None:
            return store._read_point(make_steps)
        key = (kind, *args, *options.values())
        return store._stale_reads.read(key, lambda: store._read_point(make_steps))

    return method


def _make_list_read(query: Callable[P, Steps[T]]) -> Method[P, T]:
    """Make a method that runs a query with a result of many rows.

    With SQLite, such a query runs in a thread, so that it does not block the event loop. A lookup of a row
    (`_make_point_read`) runs on the event loop.
    """

    def method(store: GeneratorStore, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return store._read_list(partial(query, *args, **options))

    return method


def _make_transaction(query: Callable[P, Steps[T]]) -> Method[P, T]:
    """Make a method that runs the query in a durable transaction."""

    def method(store: GeneratorStore, /, *args: P.args, **options: P.kwargs) -> Coroutine[Any, Any, T]:
        return store._run_change(partial(query, *args, **options))

    return method


class GeneratorStore(ABC):
    """An implementation of `PointerStore`, which documents the methods."""

    def __init__(self, clock: Clock, stale_reads: StaleReads | None) -> None:
        self._clock = clock
        self._stale_reads = stale_reads
        self._transacting = 0
        self._observers: list[Callable[[Sequence[Operation]], None]] = []

    def observe(self, observer: Callable[[Sequence[Operation]], None]) -> None:
        """Call `observer` after each successful transaction, in the context of the transaction's caller."""
        self._observers.append(observer)

    @property
    def transacting(self) -> int:
        return self._transacting

    @abstractmethod
    async def _run_change(self, make_steps: Callable[[], Steps[T]]) -> T:
        """Run a change in one durable transaction. `make_steps` makes a new generator for each attempt."""

    @abstractmethod
    async def _read_point(self, make_steps: Callable[[], Steps[T]]) -> T: ...

    @abstractmethod
    async def _read_list(self, make_steps: Callable[[], Steps[T]]) -> T: ...

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        now_ms = self._clock.now_ms()
        self._transacting += 1
        try:
            results = await self._run_change(lambda: apply_operations(operations, now_ms))
            for observe in self._observers:
                observe(operations)
            return results
        finally:
            if self._stale_reads is not None:
                self._stale_reads.forget(operations)
            self._transacting -= 1

    ping = _make_point_read(queries.ping)
    load_namespace = _make_stale_point_read("namespace", queries.load_namespace)
    load_entry = _make_stale_point_read("entry", queries.load_entry)
    find_token_by_digest = _make_stale_point_read("token", queries.find_token_by_digest)
    _grants_of = _make_stale_point_read("grants", queries.read_grants)
    list_grants_of_principals = _make_stale_point_read("grants of any", queries.read_grants_of_any)
    list_namespaces = _make_list_read(queries.list_namespaces)
    find_namespaces = _make_list_read(queries.find_namespaces)
    measure_namespace = _make_list_read(queries.measure_namespace)
    list_entries = _make_list_read(queries.list_entries)
    list_dropped = _make_list_read(queries.list_dropped)
    find_dropped = _make_point_read(queries.find_dropped)
    list_expired = _make_list_read(queries.list_expired)
    list_retained = _make_list_read(queries.list_retained)
    list_unchecked = _make_list_read(queries.list_unchecked)
    list_entries_by_uuid = _make_point_read(queries.list_entries_with_uuid)
    find_entries = _make_list_read(queries.find_entries)
    count_names = _make_point_read(queries.count_names)
    read_fencing_number = _make_point_read(records.read_fence)
    lease_state = _make_point_read(records.read_lease_state)
    claims = _make_point_read(claim_steps.list_claims)
    find_allowed_overlaps = _make_list_read(claim_steps.find_allowed_overlaps)
    find_overlapping_claims = _make_list_read(claim_steps.find_overlapping)
    may_reuse_location = _make_point_read(claim_steps.may_reuse_location)
    list_unclaimed = _make_list_read(queries.list_unclaimed)
    list_indexed_tables = _make_list_read(queries.list_indexed_tables)
    list_unused_index_files = _make_list_read(queries.list_unused_index_files)
    index_files = _make_list_read(queries.list_index_files)
    load_producer = _make_point_read(queries.load_producer)
    load_plan_table = _make_point_read(queries.find_plan_table)
    list_plan_snapshots = _make_list_read(queries.list_plan_snapshots)
    plan_table_count = _make_list_read(queries.count_plan_tables)
    list_planned_snapshots = _make_list_read(queries.list_planned_snapshots)
    list_retired_plan_tables = _make_list_read(queries.list_retired_plan_tables)
    load_instant = _make_point_read(queries.load_instant)
    find_instant_by_fingerprint = _make_point_read(queries.find_instant_by_fingerprint)
    list_instants = _make_list_read(queries.list_instants)
    find_idempotency_record = _make_point_read(queries.find_idempotency_record)
    list_metrics_reports = _make_list_read(queries.list_metrics_reports)
    find_token_by_name = _make_point_read(queries.find_token_by_name)
    list_tokens = _make_list_read(queries.list_tokens)
    grants_page = _make_list_read(queries.read_grants_page)
    list_owned = _make_point_read(queries.list_owned)
    owns_any = _make_point_read(queries.owns_any)
    read_audit_records = _make_list_read(queries.read_audit_records)
    load_cursor = _make_point_read(queries.load_cursor)
    load_secret = _make_point_read(queries.load_secret)
    swap_secret = _make_transaction(records.swap_secret)
    replicas = _make_point_read(replica_steps.list_live_replicas)
    load_warehouse = _make_point_read(records.find_warehouse)
    list_warehouses = _make_list_read(records.list_warehouses)
    load_catalog_id = _make_point_read(records.load_catalog_id)
    list_column_reads = _make_list_read(read_steps.list_reads_of_table)
    prune_column_reads = _make_transaction(read_steps.delete_old_column_reads)
    query_shapes = _make_list_read(read_steps.query_shapes)
    load_query_totals = _make_list_read(read_steps.load_query_totals)
    merge_query_hours = _make_transaction(read_steps.merge_query_hours)
    prune_queries = _make_transaction(read_steps.prune_queries)
    list_applied_advice = _make_list_read(read_steps.list_applied_advice)
    prune = _make_transaction(records.prune_records)

    async def grants(self, principal: str | None) -> list[Grant]:
        if principal is None:
            return await self._read_list(lambda: queries.read_grants(None))
        return await self._grants_of(principal)

    async def archive_instants(self, keep: int, limit: int) -> int:
        """Move finished instants (recorded actions of the timeline) to the archive, and return their number.

        Args:
            keep: The number of the newest instants of each table that stay.
            limit: The maximum number of instants to move.
        """
        # Search outside the transaction, because the search reads a whole index, and writers must not wait for it.
        ids = await self._read_list(lambda: queries.list_archivable(keep, limit))
        return await self._run_change(lambda: instants.move_to_archive(ids)) if ids else 0

    async def close_reads(self) -> None:
        """Cancel reads for which no request is waiting. The driver calls this method before it closes."""
        if self._stale_reads is not None:
            await self._stale_reads.close()

    async def check_invariants(self) -> None:
        """Check the store's invariants.

        Raises:
            Corrupt: An invariant is violated. The message lists all violations.
        """
        if violations := await self._read_list(queries.find_violations):
            raise Corrupt("The pointer store violates its invariants:\n" + "\n".join(violations))
