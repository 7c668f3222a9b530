"""The pointer store port: the only mutable state of the catalog, and its plain values.

Every change is a list of operations that are applied in ONE transaction (`transact`). The transaction is atomic, and
durable when `transact` returns. A pointer swap, its instant and its idempotency record are therefore visible together.
A read sees every transaction that returned before the read began, from any replica.

Failures are errors of `seamark.formats.runtime.errors`. If a transaction raises an error other than `CommitUnknown`, it
has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.store.model import (
    AccessToken,
    AppliedAdvice,
    AuditRecord,
    Claim,
    ColumnReads,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    IdempotencyRecord,
    Instant,
    InstantState,
    MetricsReport,
    Namespace,
    NamespacePath,
    PlanSnapshot,
    ProducerState,
    QueryShapeSums,
    QueryTotals,
    RegisteredIndexFile,
    Replica,
    StoredPlanTable,
    StoredWarehouse,
)
from seamark.metaserver.store.operations import Operation

FOUND_TABLES_MAX = 100
"""The maximum number of tables whose entries one request to the store finds."""
NAMED_NAMESPACES_MAX = 100
"""The maximum number of names in one look-up of namespaces."""
GROUPS_MAX = 100
"""The maximum number of groups of a principal whose grants count."""


class IdempotencyTaken(Exception):
    """Another request with the same key was recorded first.

    The error is internal. Clients never receive it.
    """


class LostRace(CommitConflict):
    """The pointer moved between the read and the swap of this commit. Nothing else is wrong.

    Clients receive a CommitConflict instead.
    """


class InstantFilter(msgspec.Struct, frozen=True):
    """A filter for instants. An instant must satisfy all conditions.

    `since` is an exclusive position from an Instant.
    """

    since: str | None = None
    uuid: str | None = None
    namespace: NamespacePath | None = None
    name: str | None = None
    action: str | None = None
    state: InstantState | None = None
    newest_first: bool = False
    archived: bool = True
    """Whether to include the archive."""


class PointerStore(Protocol):
    """The port to the database. A factory (an async context manager) opens and closes it.

    Safe for use by many tasks of one event loop.
    """

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Apply all operations or none. The changes are durable when the method returns.

        Returns:
            The result of each operation. It is None unless the operation documents a result.

        Raises:
            CommitUnknown: The connection was lost during the commit. To learn the outcome, read the instant.
            RetryLater: The queue is full or the database is unavailable.
        """

    def observe(self, observer: Callable[[Sequence[Operation]], None]) -> None:
        """Call `observer` after each transaction that succeeds, in the context of its caller."""

    @property
    def transacting(self) -> int:
        """Return the number of transactions that wait or run in this process, for metrics."""

    async def ping(self) -> None:
        """Check that the database answers.

        Raises:
            RetryLater: The database does not answer.
        """

    async def load_namespace(self, path: NamespacePath) -> Namespace | None: ...

    async def list_namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[NamespacePath]:
        """Return the paths of the direct children of `parent` that come after `after`.

        The paths are in code-point order of their last level. The properties are not read, because each namespace may
        have a megabyte of them.
        """

    async def find_namespaces(self, parent: NamespacePath, names: Sequence[str]) -> list[NamespacePath]:
        """Return the paths of the direct children of `parent` that exist and have one of these names.

        The paths are in code-point order of their last level. `names` has at most `NAMED_NAMESPACES_MAX` names.
        """

    async def measure_namespace(self, top: str) -> tuple[int, int]:
        """Return the size of a namespace of the first level, including all namespaces below it.

        Returns:
            (the number of namespaces and of live and dropped entries, the number of characters of the namespaces'
            properties)
        """

    async def load_entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None: ...

    async def list_entries(
        self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int
    ) -> list[Entry]:
        """Return the entries after `after`, in code-point order of name."""

    async def list_dropped(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """Return the dropped entries after `after`, in order of id."""

    async def find_dropped(self, dropped_id: str) -> DroppedEntry | None:
        """Return a dropped or a retained entry."""

    async def list_expired(self, now_ms: int, limit: int) -> list[DroppedEntry]: ...

    async def list_retained(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """Return the entries after `after` that have no name but keep their locations, in order of id."""

    async def list_unchecked(self, before_ms: int, limit: int) -> list[DroppedEntry]:
        """Return the retained entries whose files were last checked before `before_ms`, oldest first."""

    async def count_names(self, uuid: str, *, dropped: bool = True, namespace: NamespacePath | None = None) -> int:
        """Return the number of names of the table with this UUID, in all namespaces or in one namespace.

        Dropped names count if `dropped` is set. If there are several names, they share the table's files.
        """

    async def list_entries_by_uuid(self, uuid: str) -> list[Entry]:
        """Return the live entries of the table with this UUID.

        There are several if several names refer to the table.
        """

    async def find_entries(self, uuids: Sequence[str]) -> list[Entry]:
        """Return the live entries of several tables, in order of UUID, namespace and name.

        `uuids` has at most `FOUND_TABLES_MAX` UUIDs.
        """

    async def fence(self, lease: str) -> int:
        """Return the fencing number of a lease; 0 if no holder has ever taken it."""

    async def lease_state(self, lease: str, now_ms: int) -> str:
        """Return the text that the holder of a lease publishes; empty if the lease has no holder now."""

    async def claims(self, uuid: str) -> list[Claim]:
        """Return the current and earlier locations of the UUID."""

    async def find_allowed_overlaps(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Return the overlapping locations in which other UUIDs are allowed to name files.

        See `find_overlapping_claims`.
        """

    async def find_overlapping_claims(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Return claims of other UUIDs that overlap one of `keys`.

        These are all claims that contain a key, and the first `limit` claims within a key.
        """

    async def is_name_released(self, uuid: str, namespace: NamespacePath, name: str) -> bool:
        """Return whether a new entry with this name may use the location of the UUID, which has no live name.

        The entry may use the location if the UUID was dropped with this name, or is retained for this namespace.
        """

    async def list_unclaimed(self, after: str, limit: int) -> list[Entry]:
        """Return live and dropped entries without claims, in order of UUID, with UUIDs after `after`."""

    async def list_indexed_tables(self, after: str | None, limit: int) -> list[Entry]:
        """Return entries of tables with current or earlier index files, in order of UUID.

        The result has all names of up to `limit` tables with UUIDs after `after`.
        """

    async def index_files_unused(self, before_ms: int, limit: int) -> list[RegisteredIndexFile]:
        """Return index files that were superseded or quarantined before `before_ms`, in the order of this change."""

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        """Return the index files of the table in every state, oldest first."""

    async def load_producer(self, uuid: str, producer: str) -> ProducerState | None:
        """Return the state of a producer, or None if the producer has committed nothing to this table."""

    async def plan_table(self, namespace: NamespacePath, name: str) -> StoredPlanTable | None:
        """Return a plan by its name, even if its lease has ended."""

    async def plan_snapshots(
        self, namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
    ) -> list[PlanSnapshot]:
        """Return the plan snapshots of the table with live leases for the audience, in order of id.

        If there are more than `limit`, the result has the plan snapshots with the leases that end last.
        """

    async def plan_table_count(self, now_ms: int) -> int:
        """Return the number of plan tables with live leases."""

    async def list_planned_snapshots(self, uuid: str, now_ms: int) -> set[int]:
        """Return the snapshots of the table that plans with live leases read."""

    async def list_retired_plan_tables(self, after: str | None, limit: int) -> list[StoredPlanTable]:
        """Return the retired plans after `after`, in order of id."""

    async def load_instant(self, instant_id: str) -> Instant | None: ...

    async def find_instant_by_fingerprint(self, uuid: str, fingerprint: str) -> Instant | None:
        """Return the newest completed instant with this fingerprint."""

    async def list_instants(self, where: InstantFilter, limit: int) -> list[Instant]:
        """Return instants in order of position.

        A reader that continues from the last position misses no instant, even if other transactions write
        concurrently.
        """

    async def archive_instants(self, keep: int, limit: int) -> int:
        """Archive the finished instants of each table except its newest `keep`, at most `limit` per call.

        Returns:
            The number of archived instants.
        """

    async def find_idempotency_record(self, key: str, now_ms: int) -> IdempotencyRecord | None:
        """Return the record of an idempotency key, or None if no unexpired record exists."""

    async def list_metrics_reports(self, uuid: str | None, since: str | None, limit: int) -> list[MetricsReport]:
        """Return the reports after `since`, in order of id (UUIDv7)."""

    async def find_token_by_digest(self, digest: str) -> AccessToken | None: ...

    async def find_token_by_name(self, name: str) -> AccessToken | None:
        """Return the token of this name that is not revoked; it may have expired."""

    async def list_tokens(self) -> list[AccessToken]: ...

    async def grants(self, principal: str | None) -> list[Grant]:
        """Return the grants of a principal without those that make it the owner of a table, view or function.

        If `principal` is None, return all grants.
        """

    async def grants_page(self, principal: str | None, after: Grant | None, limit: int) -> list[Grant]:
        """Return at most `limit` grants, also those of owners, in order of principal, namespace, name, kind and role.

        Args:
            principal: The principal of the grants. None: all principals.
            after: The grant before the first grant of the result. None: the result begins with the first grant.
            limit: The maximum number of grants.
        """

    async def grants_of_any(self, principals: tuple[str, ...]) -> list[Grant]:
        """Return the grants of all these principals, as `grants` does. There are at most `GROUPS_MAX` principals."""

    async def list_owned(self, principals: tuple[str, ...], namespace: NamespacePath, name: str | None) -> list[Grant]:
        """Return the grants that make one of these principals the owner of an entry of the namespace.

        Args:
            principals: The principals. Only the first `GROUPS_MAX` count.
            namespace: The namespace of the entries.
            name: The name of the entry. None: all entries of the namespace.
        """

    async def owns_any(self, principals: tuple[str, ...]) -> bool:
        """Return whether one of these principals owns a table, view or function.

        Only the first `GROUPS_MAX` principals count.
        """

    async def read_audit_records(self, after_id: str | None, limit: int) -> list[AuditRecord]:
        """Return at most `limit` audit records with an id greater than `after_id`, in order of id."""

    async def load_cursor(self, consumer: str) -> str | None: ...

    async def load_secret(self, name: str) -> bytes | None:
        """Return the named secret that all replicas share, encrypted as stored."""

    async def swap_secret(self, name: str, expected: bytes | None, value: bytes) -> bytes:
        """Store `value` if the stored secret is `expected` (None: there is no secret).

        Returns:
            The stored secret. If another replica was faster, it is the secret of that replica. Empty if the expected
            secret no longer exists.
        """

    async def replicas(self) -> list[Replica]:
        """Return the replicas with live leases, by address."""

    async def load_warehouse(self, name: str) -> StoredWarehouse | None:
        """Return the further warehouse with this name."""

    async def list_warehouses(self) -> list[StoredWarehouse]:
        """Return all further warehouses, by name. Their number is limited when they are created."""

    async def load_catalog_id(self) -> str:
        """Return the id of the warehouse to which this database belongs; empty for the database of a server."""

    async def list_column_reads(self, uuid: str, since_day: int, limit: int) -> list[ColumnReads]:
        """Return the reads of the table's columns since `since_day`, by column and age of the oldest partition."""

    async def prune_column_reads(self, before_day: int, limit: int) -> int:
        """Remove reads of columns from days before `before_day`; return the number of removed rows."""

    async def query_shapes(self, uuid: str, since_hour: int, limit: int) -> list[QueryShapeSums]:
        """Return the shapes of the table's query history since `since_hour`, the most frequent first."""

    async def query_totals(
        self, since_hour: int, within: Sequence[NamespacePath] | None, limit: int
    ) -> list[QueryTotals]:
        """Return the sums of each table since `since_hour`, for the tables with the most statements first.

        Args:
            since_hour: The first hour.
            within: The tables are in these namespaces, at most `NAMESPACES_MAX`, or below. None: all tables.
            limit: The maximum number of tables.
        """

    async def merge_query_hours(self, before_hour: int, limit: int, period_hours: int) -> int:
        """Add sums before `before_hour` to the sums of the first hour of their period.

        Args:
            before_hour: The first hour whose sums are not merged; the first hour of a period.
            limit: The maximum number of rows that are merged.
            period_hours: The length of a period. Periods begin at multiples of it, in hours since the epoch.

        Returns:
            The number of merged rows.
        """

    async def prune_queries(self, before_hour: int, limit: int) -> int:
        """Remove the sums of hours before `before_hour`, and shapes without sums; return the number of removed rows."""

    async def list_applied_advice(self, uuid: str, limit: int) -> list[AppliedAdvice]:
        """Return the applied proposals of the table, newest first."""

    async def prune(self, now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> int:
        """Remove expired idempotency records, and audit records and metrics reports older than the given times.

        Returns:
            The number of removed rows.
        """
