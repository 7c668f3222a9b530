"""The pointer store port, implemented with three ways to run a generator, which each database driver provides.

- `_change`: in one durable transaction.
- `_point`: a look-up by key that reads few pages.
- `_list`: a read that may be large.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import Corrupt
from seamark.metaserver.store.model import (
    AuditRecord,
    Claim,
    ColumnReads,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    IdempotencyRecord,
    Instant,
    MetricsReport,
    Namespace,
    NamespacePath,
    PlanTable,
    ProducerState,
    RegisteredIndexFile,
    Replica,
    ShownPlan,
    Token,
)
from seamark.metaserver.store.operations import Operation
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.store.sql import claims, column_reads, instants, queries, records, replicas
from seamark.metaserver.store.sql.dispatch import transaction
from seamark.metaserver.store.sql.statement import Steps
from seamark.metaserver.store.stale_reads import StaleReads, entry_key

T = TypeVar("T")


class GeneratorStore(ABC):
    """See `PointerStore` for the contract of each method."""

    def __init__(self, clock: Clock, stale_reads: StaleReads | None) -> None:
        self._clock = clock
        self._stale_reads = stale_reads
        self._transacting = 0

    @property
    def transacting(self) -> int:
        return self._transacting

    @abstractmethod
    async def _change(self, make_steps: Callable[[], Steps[T]]) -> T:
        """`make_steps` starts the generator again for each attempt."""

    @abstractmethod
    async def _point(self, make_steps: Callable[[], Steps[T]]) -> T: ...

    @abstractmethod
    async def _list(self, make_steps: Callable[[], Steps[T]]) -> T: ...

    async def _kept(self, key: tuple[object, ...], make_steps: Callable[[], Steps[T]]) -> T:
        """`_point`, whose last result may be used for a request that allows stale answers."""
        if self._stale_reads is None:
            return await self._point(make_steps)
        return await self._stale_reads.read(key, lambda: self._point(make_steps))

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        now_ms = self._clock.now_ms()
        self._transacting += 1
        try:
            return await self._change(lambda: transaction(operations, now_ms))
        finally:
            if self._stale_reads is not None:
                self._stale_reads.forget(operations)
            self._transacting -= 1

    async def ping(self) -> None:
        await self._point(queries.ping)

    async def namespace(self, path: NamespacePath) -> Namespace | None:
        return await self._kept(("namespace", path), lambda: queries.namespace(path))

    async def namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[NamespacePath]:
        return await self._list(lambda: queries.namespaces(parent, after, limit))

    async def entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None:
        return await self._kept(entry_key(kind, namespace, name), lambda: queries.entry(kind, namespace, name))

    async def entries(self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int) -> list[Entry]:
        return await self._list(lambda: queries.entries(kind, namespace, after, limit))

    async def dropped(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        return await self._list(lambda: queries.dropped(namespace, after, limit))

    async def dropped_entry(self, dropped_id: str) -> DroppedEntry | None:
        return await self._point(lambda: queries.dropped_entry(dropped_id))

    async def dropped_expired(self, now_ms: int, limit: int) -> list[DroppedEntry]:
        return await self._list(lambda: queries.dropped_expired(now_ms, limit))

    async def names_of(self, uuid: str, *, dropped: bool = True, namespace: NamespacePath | None = None) -> int:
        return await self._point(lambda: queries.names_of(uuid, dropped, namespace))

    async def fence(self, lease: str) -> int:
        return await self._point(lambda: records.fence_of(lease))

    async def lease_state(self, lease: str, now_ms: int) -> str:
        return await self._point(lambda: records.lease_state(lease, now_ms))

    async def claims(self, uuid: str) -> list[Claim]:
        return await self._point(lambda: claims.of(uuid))

    async def allowed_overlapping(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        return await self._list(lambda: claims.allowed_overlapping([*keys], uuid, limit))

    async def claims_overlapping(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        return await self._list(lambda: claims.overlapping([*keys], uuid, limit))

    async def released_name(self, uuid: str, namespace: NamespacePath, name: str) -> bool:
        return await self._point(lambda: claims.released_name(uuid, namespace, name))

    async def unclaimed(self, after: str, limit: int) -> list[Entry]:
        return await self._list(lambda: queries.unclaimed(after, limit))

    async def indexed_tables(self, after: str | None, limit: int) -> list[Entry]:
        return await self._list(lambda: queries.indexed_tables(after, limit))

    async def index_files_unused(self, before_ms: int, limit: int) -> list[RegisteredIndexFile]:
        return await self._list(lambda: queries.index_files_unused(before_ms, limit))

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        return await self._list(lambda: queries.index_files(uuid))

    async def producer(self, uuid: str, producer: str) -> ProducerState | None:
        return await self._point(lambda: queries.producer(uuid, producer))

    async def plan_table(self, namespace: NamespacePath, name: str) -> PlanTable | None:
        return await self._point(lambda: queries.plan_table(namespace, name))

    async def plan_snapshots(
        self, namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
    ) -> list[ShownPlan]:
        return await self._list(lambda: queries.plan_snapshots(namespace, of_name, uuid, audience, now_ms, limit))

    async def plan_table_count(self, now_ms: int) -> int:
        return await self._list(lambda: queries.plan_table_count(now_ms))

    async def planned_snapshots(self, uuid: str, now_ms: int) -> set[int]:
        return await self._list(lambda: queries.planned_snapshots(uuid, now_ms))

    async def plan_tables_retired(self, after: str | None, limit: int) -> list[PlanTable]:
        return await self._list(lambda: queries.plan_tables_retired(after, limit))

    async def instant(self, instant_id: str) -> Instant | None:
        return await self._point(lambda: queries.instant(instant_id))

    async def instant_by_fingerprint(self, uuid: str, fingerprint: str) -> Instant | None:
        return await self._point(lambda: queries.instant_by_fingerprint(uuid, fingerprint))

    async def instants(self, where: InstantFilter, limit: int) -> list[Instant]:
        return await self._list(lambda: queries.instants(where, limit))

    async def archive_instants(self, keep: int, limit: int) -> int:
        # Searched outside the transaction: it reads a whole index, and writers must not wait for that.
        ids = await self._list(lambda: queries.archivable(keep, limit))
        return await self._change(lambda: instants.archive(ids)) if ids else 0

    async def idempotency(self, key: str, now_ms: int) -> IdempotencyRecord | None:
        return await self._point(lambda: queries.idempotency(key, now_ms))

    async def metrics_reports(self, uuid: str | None, since: str | None, limit: int) -> list[MetricsReport]:
        return await self._list(lambda: queries.metrics_reports(uuid, since, limit))

    async def token_by_digest(self, digest: str) -> Token | None:
        return await self._kept(("token", digest), lambda: queries.token_by_digest(digest))

    async def token_named(self, name: str) -> Token | None:
        return await self._point(lambda: queries.token_named(name))

    async def tokens(self) -> list[Token]:
        return await self._list(queries.tokens)

    async def grants(self, principal: str | None) -> list[Grant]:
        if principal is None:
            return await self._list(lambda: queries.grants(None))
        return await self._kept(("grants", principal), lambda: queries.grants(principal))

    async def audit(self, since: str | None, limit: int) -> list[AuditRecord]:
        return await self._list(lambda: queries.audit(since, limit))

    async def cursor(self, consumer: str) -> str | None:
        return await self._point(lambda: queries.cursor(consumer))

    async def secret(self, name: str) -> bytes | None:
        return await self._point(lambda: queries.secret(name))

    async def swap_secret(self, name: str, expected: bytes | None, value: bytes) -> bytes:
        return await self._change(lambda: records.swap_secret(name, expected, value))

    async def replicas(self) -> list[Replica]:
        return await self._point(replicas.live)

    async def column_reads(self, uuid: str, since_day: int, limit: int) -> list[ColumnReads]:
        return await self._list(lambda: column_reads.of_table(uuid, since_day, limit))

    async def prune_column_reads(self, before_day: int, limit: int) -> int:
        return await self._change(lambda: column_reads.prune(before_day, limit))

    async def prune(self, now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> int:
        return await self._change(lambda: records.prune(now_ms, audit_before_ms, metrics_before_ms, limit))

    async def close_reads(self) -> None:
        """Ends reads that no request waits for. The driver calls it before it closes."""
        if self._stale_reads is not None:
            await self._stale_reads.close()

    async def check_invariants(self) -> None:
        """Corrupt lists every violation of the store's invariants."""
        if violations := await self._list(queries.violations):
            raise Corrupt("The pointer store violates its invariants:\n" + "\n".join(violations))
