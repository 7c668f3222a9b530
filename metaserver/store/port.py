"""The port to the pointer store, which contains the only mutable state of the catalog.

Every change is a list of operations that are applied in one transaction (`transact`). The transaction is atomic, and is
durable when `transact` returns. Therefore a pointer swap, its instant and its idempotency record become visible
together. A read sees every transaction of any replica that returned before the read began.

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
"""The maximum number of tables in one call of `PointerStore.find_entries`."""
NAMED_NAMESPACES_MAX = 100
"""The maximum number of names in one call of `PointerStore.find_namespaces`."""
GROUPS_MAX = 100
"""The maximum number of groups of a principal whose grants count."""


class IdempotencyTaken(Exception):
    """Raised if another request with the same idempotency key was recorded first. Clients never receive this error."""


class LostRace(CommitConflict):
    """Raised if the pointer has moved since the commit read it. The server tries the commit again.

    Clients never receive this error, but may receive a CommitConflict.
    """


class InstantFilter(msgspec.Struct, frozen=True):
    """A filter for instants. An instant must satisfy all conditions.

    Attributes:
        since: The position of an instant. Only instants after it match.
    """

    since: str | None = None
    uuid: str | None = None
    namespace: NamespacePath | None = None
    name: str | None = None
    action: str | None = None
    state: InstantState | None = None
    newest_first: bool = False
    archived: bool = True
    """Whether to include archived instants."""


class PointerStore(Protocol):
    """The port to the database. The tasks of one event loop share an instance, which `open_store` opens."""

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Apply all operations or none. The changes are durable when the method returns.

        Returns:
            The result of each operation. It is None unless the operation documents a result.

        Raises:
            CommitUnknown: The connection was lost during the commit. The timeline shows whether the change was made.
            RetryLater: The queue is full or the database is unavailable.
        """

    def observe(self, observer: Callable[[Sequence[Operation]], None]) -> None:
        """Call `observer` after each successful transaction, in the context of the transaction's caller."""

    @property
    def transacting(self) -> int:
        """The number of waiting and running transactions of this process, which is a metric."""

    async def ping(self) -> None:
        """Check that the database answers.

        Raises:
            RetryLater: The database does not answer.
        """

    async def load_namespace(self, path: NamespacePath) -> Namespace | None: ...

    async def list_namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[NamespacePath]:
        """Return up to `limit` direct children of `parent` after the name `after`, sorted by code points.

        The method does not read the properties, because each namespace may have a megabyte of them.
        """

    async def find_namespaces(self, parent: NamespacePath, names: Sequence[str]) -> list[NamespacePath]:
        """Return the paths of the direct children of `parent` with one of these names, sorted by code points.

        `names` has at most `NAMED_NAMESPACES_MAX` names.
        """

    async def measure_namespace(self, top: str) -> tuple[int, int]:
        """Return the size of a top-level namespace, including all namespaces below it.

        Returns:
            The number of namespaces and of live and dropped entries together, and the number of characters of the
            namespaces' properties.
        """

    async def load_entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None: ...

    async def list_entries(
        self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int
    ) -> list[Entry]:
        """Return up to `limit` entries of a kind after the name `after`, sorted by the code points of their names."""

    async def list_dropped(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """Return the dropped entries after the id `after`, in the order of their ids."""

    async def find_dropped(self, dropped_id: str) -> DroppedEntry | None:
        """Return the dropped or retained entry with this id, or None."""

    async def list_expired(self, now_ms: int, limit: int) -> list[DroppedEntry]: ...

    async def list_retained(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """Return the retained entries after the id `after`, in the order of their ids."""

    async def list_unchecked(self, before_ms: int, limit: int) -> list[DroppedEntry]:
        """Return the retained entries whose files were last checked before `before_ms`, oldest first."""

    async def count_names(
        self, uuid: str, *, dropped: bool = True, retained: bool = False, namespace: NamespacePath | None = None
    ) -> int:
        """Return the number of names of the table with this UUID. Several names share the table's files.

        Args:
            uuid: The UUID of the table.
            dropped: Whether dropped names count.
            retained: Whether the last name of a retained table counts: a removed table of which files remain.
            namespace: The namespace of the names, or None for all namespaces.
        """

    async def list_entries_by_uuid(self, uuid: str) -> list[Entry]:
        """Return at most two of the live entries of the table with this UUID. Several names may refer to a table."""

    async def find_entries(self, uuids: Sequence[str]) -> list[Entry]:
        """Return the live entries of several tables, in the order of UUID, namespace and name.

        `uuids` contains at most `FOUND_TABLES_MAX` UUIDs.
        """

    async def read_fencing_number(self, lease: str) -> int:
        """Return the fencing number of a lease, or 0 if it never had a holder."""

    async def lease_state(self, lease: str, now_ms: int) -> str:
        """Return the text that the holder of a lease publishes, or an empty text if the lease has no holder now."""

    async def claims(self, uuid: str) -> list[Claim]:
        """Return the claims of the UUID: its current and earlier locations, and its allowed locations."""

    async def find_allowed_overlaps(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Return the allowed locations of UUIDs other than `uuid` that overlap one of `keys`.

        An allowed location is a location of another entry in which files of a table may be. The result contains all
        that contain a key, and the first `limit` of those within each key.
        """

    async def find_overlapping_claims(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Return claims of UUIDs other than `uuid` that overlap one of `keys`.

        The result contains all claims that contain a key, and the first `limit` claims within each key.
        """

    async def may_reuse_location(self, uuid: str, namespace: NamespacePath, name: str) -> bool:
        """Return whether a new entry with this name may use the location of a removed entry with the UUID `uuid`.

        It may use the location if the removed entry was dropped with this name and has no other name, or if it was in
        this namespace and only its files remain.
        """

    async def list_unclaimed(self, after: str, limit: int) -> list[Entry]:
        """Return live and dropped entries without claims, in the order of their UUIDs, after the UUID `after`."""

    async def list_indexed_tables(self, after: str | None, limit: int) -> list[Entry]:
        """Return entries of tables that have, or had, index files, in the order of their UUIDs.

        The result contains all names of up to `limit` tables after the UUID `after`.
        """

    async def list_unused_index_files(self, before_ms: int, limit: int) -> list[RegisteredIndexFile]:
        """Return index files that were superseded or quarantined before `before_ms`, in the order of this time."""

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        """Return the index files of the table in all states, the oldest first."""

    async def load_producer(self, uuid: str, producer: str) -> ProducerState | None:
        """Return the state of a producer, or None if the producer has committed nothing to this table."""

    async def load_plan_table(self, namespace: NamespacePath, name: str) -> StoredPlanTable | None:
        """Return a stored plan by its name, or None. The plan may have expired: its lease may have ended."""

    async def list_plan_snapshots(
        self, namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
    ) -> list[PlanSnapshot]:
        """Return plan snapshots with live leases, in the order of their ids. They show plans as snapshots of a table.

        If there are more than `limit`, the result contains the plan snapshots whose leases end last.

        Args:
            namespace: The namespace of the planned table.
            of_name: The name of the planned table.
            uuid: The UUID of the planned table.
            audience: The value that the clients of these plan snapshots send. Other clients do not see them.
            now_ms: The current time in milliseconds since the epoch.
            limit: The maximum number of plan snapshots.
        """

    async def plan_table_count(self, now_ms: int) -> int:
        """Return the number of plan tables with live leases."""

    async def list_planned_snapshots(self, uuid: str, now_ms: int) -> set[int]:
        """Return the ids of the table's snapshots that are read by plans with a live lease."""

    async def list_retired_plan_tables(self, after: str | None, limit: int) -> list[StoredPlanTable]:
        """Return up to `limit` retired plans, whose names were removed, after the id `after`, sorted by their ids.

        The files of a retired plan are to be deleted.
        """

    async def load_instant(self, instant_id: str) -> Instant | None: ...

    async def find_instant_by_fingerprint(self, uuid: str, fingerprint: str) -> Instant | None:
        """Return the newest completed change of an entry that a request with this fingerprint made, or None.

        A fingerprint is the hash of a request that can be applied only once, because it adds a snapshot.
        """

    async def list_instants(self, where: InstantFilter, limit: int) -> list[Instant]:
        """Return up to `limit` instants in the order of their positions, or the reverse for `where.newest_first`.

        A reader that continues from the last position misses no instant, even if other transactions write
        concurrently.
        """

    async def archive_instants(self, keep: int, limit: int) -> int:
        """Archive finished instants (recorded actions of the timeline) of each table, except its newest `keep`.

        At most `limit` instants are archived.

        Returns:
            The number of archived instants.
        """

    async def find_idempotency_record(self, key: str, now_ms: int) -> IdempotencyRecord | None:
        """Return the unexpired record of an idempotency key, or None."""

    async def list_metrics_reports(self, uuid: str | None, since: str | None, limit: int) -> list[MetricsReport]:
        """Return the reports after the id `since`, in the order of their ids (UUIDv7)."""

    async def find_token_by_digest(self, digest: str) -> AccessToken | None: ...

    async def find_token_by_name(self, name: str) -> AccessToken | None:
        """Return the unrevoked token with this name, or None. The token may have expired."""

    async def list_tokens(self) -> list[AccessToken]: ...

    async def grants(self, principal: str | None) -> list[Grant]:
        """Return the grants of a principal, except those that make it the owner of a table, view or function.

        If `principal` is None, return all grants of all principals, including those of owners.
        """

    async def grants_page(self, principal: str | None, after: Grant | None, limit: int) -> list[Grant]:
        """Return a page of grants, with those of owners, sorted by principal, namespace, name, kind, role and `deny`.

        Args:
            principal: The principal of the grants, or None for all principals.
            after: The last grant of the previous page, or None for the first page.
            limit: The maximum number of grants.
        """

    async def list_grants_of_principals(self, principals: tuple[str, ...]) -> list[Grant]:
        """Return the grants of all these principals. See `grants`. There are at most `GROUPS_MAX` principals."""

    async def list_owned(self, principals: tuple[str, ...], namespace: NamespacePath, name: str | None) -> list[Grant]:
        """Return the grants that make one of these principals the owner of an entry of the namespace.

        Args:
            principals: The principals. Only the first `GROUPS_MAX` count.
            namespace: The namespace of the entries.
            name: The name of the entry, or None for all entries of the namespace.
        """

    async def owns_any(self, principals: tuple[str, ...]) -> bool:
        """Return whether one of these principals owns a table, view or function.

        Only the first `GROUPS_MAX` principals count.
        """

    async def read_audit_records(self, after_id: str | None, limit: int) -> list[AuditRecord]:
        """Return at most `limit` audit records with an id greater than `after_id`, in order of id."""

    async def load_cursor(self, consumer: str) -> str | None: ...

    async def load_secret(self, name: str) -> bytes | None:
        """Return the named secret that all replicas share, in its stored, encrypted form."""

    async def swap_secret(self, name: str, expected: bytes | None, value: bytes) -> bytes:
        """Store `value` if the stored secret is `expected`, or if `expected` is None and no secret is stored.

        Returns:
            The stored secret. If another replica was faster, it is the secret of that replica. It is empty if the
            expected secret no longer exists.
        """

    async def replicas(self) -> list[Replica]:
        """Return the replicas with live leases, sorted by address."""

    async def load_warehouse(self, name: str) -> StoredWarehouse | None:
        """Return the further warehouse with this name, or None. The server's own warehouse is not included."""

    async def list_warehouses(self) -> list[StoredWarehouse]:
        """Return all further warehouses, sorted by name. Their number is limited when they are created."""

    async def load_catalog_id(self) -> str:
        """Return the id of the further warehouse to which this database belongs.

        The text is empty for the database of the server's own warehouse.
        """

    async def list_column_reads(self, uuid: str, since_day: int, limit: int) -> list[ColumnReads]:
        """Return the reads of the table's columns since `since_day`, by column and age of the oldest partition."""

    async def prune_column_reads(self, before_day: int, limit: int) -> int:
        """Remove reads of columns from days before `before_day`, and return the number of removed rows."""

    async def query_shapes(self, uuid: str, since_hour: int, limit: int) -> list[QueryShapeSums]:
        """Return the shapes of the table's query history since `since_hour`, the most frequent first."""

    async def load_query_totals(
        self, since_hour: int, within: Sequence[NamespacePath] | None, limit: int
    ) -> list[QueryTotals]:
        """Return the sums of each table since `since_hour`, for the tables with the most statements first.

        Args:
            since_hour: The first hour, in hours since the epoch.
            within: At most `NAMESPACES_MAX` namespaces that contain the tables, or None for all tables.
            limit: The maximum number of tables.
        """

    async def merge_query_hours(self, before_hour: int, limit: int, period_hours: int) -> int:
        """Merge the sums of hours before `before_hour` into the first hour of their period.

        Args:
            before_hour: The first hour whose sums are not merged. It is the first hour of a period.
            limit: The maximum number of rows to merge.
            period_hours: The length of a period in hours. Periods begin at multiples of it since the epoch.

        Returns:
            The number of merged rows.
        """

    async def prune_queries(self, before_hour: int, limit: int) -> int:
        """Remove sums of hours before `before_hour`, and shapes without sums. Return the number of removed rows."""

    async def list_applied_advice(self, uuid: str, limit: int) -> list[AppliedAdvice]:
        """Return the applied proposals of the table, the newest first."""

    async def prune(self, now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> int:
        """Remove expired idempotency records, and audit records and metrics reports older than the given times.

        At most `limit` rows are removed.

        Returns:
            The number of removed rows.
        """
