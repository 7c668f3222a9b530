"""The operations of the pointer store's transactions, as values."""

from __future__ import annotations

from typing import Any

import msgspec

from seamark.metaserver.store.model import (
    AccessToken,
    AppliedAdvice,
    AuditRecord,
    ClaimedLocation,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    GrantLimits,
    IdempotencyRecord,
    Instant,
    InstantState,
    MetricsReport,
    NamespacePath,
    QueryRecord,
    RegisteredIndexFile,
    Replica,
    StoredPlanTable,
    StoredWarehouse,
)


class Operation(msgspec.Struct, frozen=True):
    """A part of a transaction."""


class CreateNamespace(Operation, frozen=True):
    """Create a namespace.

    Raises:
        AlreadyExists: The namespace exists.
        NoSuchNamespace: Its parent does not exist.
    """

    path: NamespacePath
    properties: dict[str, str]


class ReplaceNamespaceProperties(Operation, frozen=True):
    """Replace the properties of a namespace.

    Raises:
        CommitConflict: The stored version differs from `expected_version`.
        NoSuchNamespace: The namespace does not exist.
    """

    path: NamespacePath
    expected_version: int
    properties: dict[str, str]


class DropNamespace(Operation, frozen=True):
    """Drop a namespace.

    Raises:
        NamespaceNotEmpty: The namespace has entries or child namespaces.
        NoSuchNamespace: The namespace does not exist.
    """

    path: NamespacePath


class CreateEntry(Operation, frozen=True):
    """Create an entry.

    Raises:
        AlreadyExists: The name is in use; the message names the existing kind.
        NoSuchNamespace: The namespace does not exist.
    """

    entry: Entry


class SwapPointer(Operation, frozen=True):
    """Point an entry at another location.

    Raises:
        CommitConflict: The entry has another UUID.
        LostRace: The entry no longer points at `expected_location`.
        NoSuchTable: The name of a table does not exist.
        NoSuchView: The name of a view does not exist.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    expected_location: str
    new_location: str
    now_ms: int
    holder: str = ""
    """The process that commits.

    While another process has priority for the table (`TakePriority`), LostRace is raised.
    """


class RenameEntry(Operation, frozen=True):
    """Rename an entry.

    Raises:
        AlreadyExists: The new name is in use.
        NoSuchNamespace: The new namespace does not exist.
        NoSuchTable: The table to rename does not exist.
        NoSuchView: The view to rename does not exist.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    to_namespace: NamespacePath
    to_name: str
    uuid: str | None = None
    """The expected UUID. If it is set and the name refers to another table, the rename raises CommitConflict."""


class DropEntry(Operation, frozen=True):
    """Remove a name.

    Index files and producers are removed with the last name of the table, live or dropped. If `keep` is set, the
    entry is kept as this DroppedEntry. The store sets the `entry` of the DroppedEntry from the row.

    Raises:
        CommitConflict: `expected_location` is set and the pointer differs from it.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    expected_location: str | None = None
    keep: DroppedEntry | None = None
    uuid: str | None = None
    """The expected UUID. If it is set and the name refers to another table, the drop raises CommitConflict."""


class RestoreEntry(Operation, frozen=True):
    """Restore a dropped entry as (namespace, name).

    Raises:
        NotFound: The entry has expired or is unknown.
        AlreadyExists: The name is in use.
        NoSuchNamespace: The namespace does not exist.
        CommitConflict: Another entry has claimed its location since.
    """

    dropped_id: str
    namespace: NamespacePath
    name: str
    is_kept: bool = False
    """Whether the caller is certain that the retention has not ended, even if the clock says that it has."""


class ForgetDropped(Operation, frozen=True):
    """Remove a dropped entry permanently, before its purge.

    Raises:
        NotFound: The entry no longer exists, because another replica has removed it.
        CommitConflict: `unshared` is set, and another live or dropped entry has the same UUID, so it uses the same
            files.
    """

    dropped_id: str
    unshared: bool = False


class ClaimLocations(Operation, frozen=True):
    """Add locations to the claims of the UUID.

    Raises:
        BadRequest: A location overlaps (is equal to, contains, or is within) a claim of another UUID. The other
            entry may be live, dropped, or being purged.
    """

    uuid: str
    locations: tuple[ClaimedLocation, ...]
    fresh: bool = False
    """Whether to raise BadRequest if the UUID already has claims."""
    namespace: NamespacePath = ()
    """The namespace of the new name, if it is set.

    In this case, the location may be the location of an entry that was dropped with this name. The name is only set
    if the creator may create and write every entry of the namespace.
    """
    name: str = ""
    checked: bool = True
    """Whether to refuse overlaps. Entries that were created before claims existed may overlap."""
    returns: bool = False
    """Whether this operation may restore the entry. A live entry with the same location raises CommitConflict then."""


class AllowLocations(Operation, frozen=True):
    """Let the table name files at these locations, which other entries may claim.

    The list replaces the earlier list.
    """

    uuid: str
    locations: tuple[ClaimedLocation, ...]


class ReleaseLocations(Operation, frozen=True):
    """Remove the claims of a UUID that has no name, live or dropped.

    If `retained` is set, the claims are kept for the namespace of this entry instead, because files are left.
    """

    uuid: str
    retained: DroppedEntry | None = None


class CheckRetained(Operation, frozen=True):
    """Record when the server last found files of a retained entry."""

    uuid: str
    now_ms: int


class ReplaceIndexFiles(Operation, frozen=True):
    """Add live index files of one definition, and supersede others.

    If the files of `add` are registered already, in any state, the operation is a repeat and changes nothing. The
    result of this operation, of `QuarantineIndexFile` and of `ForgetIndexFile` is the new index version.

    Raises:
        CommitConflict: A file of `remove` is not live.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    definition: str
    add: tuple[RegisteredIndexFile, ...]
    remove: tuple[str, ...]
    """The locations of the index files to supersede."""
    now_ms: int


class QuarantineIndexFile(Operation, frozen=True):
    """Stop the use of a live index file. A file in another state does not change.

    Raises:
        NotFound: The file is not registered.
    """

    uuid: str
    location: str
    reason: str
    now_ms: int


class ForgetIndexFile(Operation, frozen=True):
    """Remove the row of an index file that is not live. The file is deleted, or will be deleted.

    Raises:
        CommitConflict: The file is live.
    """

    uuid: str
    location: str
    now_ms: int


class AdvanceProducer(Operation, frozen=True):
    """Record that the producer has committed `sequence`. The first sequence may be any number.

    Rows stay until the table's last name is removed. The rows do not expire: otherwise, a repeat that arrives late
    would be applied again, and its rows would be duplicated. There are at most as many rows as commits, and each
    commit leaves a longer row in the timeline.

    Raises:
        CommitConflict: `sequence` is not greater than the last sequence.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    """The UUID of the table."""
    producer: str
    sequence: int
    snapshot_id: int | None
    """The snapshot of the change. None if the change was empty and created no snapshot."""
    now_ms: int


class OpenStream(Operation, frozen=True):
    """Make a table a stream table: each shard that has no flushed offset gets the offset 0.

    The offsets are positions in one log. Another log has other rows at the same offsets.

    Raises:
        LogUnavailable: The rows of the table are in another log.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    shards: int
    log: str = ""
    """The identity of the log."""


class FlushedRange(msgspec.Struct, frozen=True):
    """The rows of a shard that a flush adds to the table, from offset `start` up to `end`, exclusive."""

    shard: int
    start: int
    end: int


class MoveFlushedOffsets(Operation, frozen=True):
    """Record that the rows of these ranges are in the table's files.

    Raises:
        CommitConflict: A range does not start at the flushed offset of its shard: another flush was faster.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    ranges: tuple[FlushedRange, ...]


class RecordRemovalFlush(Operation, frozen=True):
    """Record the snapshot of a flush that was made before a commit that removes rows. It replaces an earlier record.

    Raises:
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    snapshot_id: int


class TakeRemovalFlush(Operation, frozen=True):
    """Remove the record of a flush. The result is whether it had this snapshot; only one taker gets it.

    A record with another snapshot is also removed: a later commit that reads that snapshot may not have seen all rows.
    """

    uuid: str
    snapshot_id: int | None


class KeepPlanTable(Operation, frozen=True):
    """Store the plan. If another plan has the name already, extend the lease of that plan to the new lease instead.

    The result is the StoredPlanTable that has the name.
    """

    plan: StoredPlanTable


class RenewPlanTable(Operation, frozen=True):
    """Extend the lease so that it ends at `expires_ms` or later.

    The result is a bool: False if the plan is retired or removed.
    """

    id: str
    expires_ms: int


class LeasePlanSnapshots(Operation, frozen=True):
    """Set the leases of an audience's plan snapshots of one table.

    A lease never becomes shorter, unless `withdraw` is set, which ends the leases at `expires_ms`. The result is the
    number of existing plans.
    """

    namespace: NamespacePath
    of_name: str
    audience: str
    plan_snapshot_ids: tuple[int, ...]
    expires_ms: int
    withdraw: bool = False


class DropPlanSnapshots(Operation, frozen=True):
    """Retire the plan snapshots of a table with these ids, for all audiences.

    The result is the number of retired plan snapshots.
    """

    namespace: NamespacePath
    of_name: str
    plan_snapshot_ids: tuple[int, ...]


class RetirePlanTables(Operation, frozen=True):
    """Retire plans whose lease ended before the given time, oldest first.

    The result is the number of retired plans.
    """

    before_ms: int
    limit: int


class ForgetPlanTable(Operation, frozen=True):
    """Remove the row of a retired plan whose files are deleted. The row of a plan that still has a name stays."""

    id: str


class RecordInstant(Operation, frozen=True):
    instant: Instant


class MoveInstant(Operation, frozen=True):
    """Change the state of an instant and the fields that depend on it. The instant gets a new position.

    Raises:
        CommitConflict: The stored state is not `expected`.
    """

    id: str
    expected: InstantState
    state: InstantState
    now_ms: int
    snapshot_id: int | None = None
    summary: dict[str, Any] | None = None


class SaveIdempotency(Operation, frozen=True):
    """Record the answer to a request with an idempotency key.

    Raises:
        IdempotencyTaken: The key exists. The whole transaction is rolled back, and the first answer applies.
    """

    record: IdempotencyRecord


class SaveMetricsReport(Operation, frozen=True):
    """Save a report, and delete older reports than the newest `keep` of the table. If `keep` is None, delete none."""

    report: MetricsReport
    keep: int | None = None


class AddColumnReads(Operation, frozen=True):
    """Add reads of columns of the table on one day.

    Attributes:
        reads: (column id, age of the oldest partition in days, number of reads), each column once.

    Raises:
        NoSuchTable: The table has no live name.
    """

    uuid: str
    day: int
    reads: tuple[tuple[int, int, int], ...]


class AddQueryRecords(Operation, frozen=True):
    """Add statements of one hour to the query history of a table.

    The table keeps at most `shapes_max` shapes. One owner can be the first user of at most `owner_shapes_max` shapes.
    A statement of a further shape is added to the shape `OTHER_SHAPES`, so that no shape displaces another.

    Raises:
        NoSuchTable: The table has no live name.
    """

    uuid: str
    hour: int
    """The hour, in hours since the epoch."""
    records: tuple[QueryRecord, ...]
    shapes_max: int
    owner_shapes_max: int


class SaveAppliedAdvice(Operation, frozen=True):
    """Save an applied proposal, and delete the oldest proposals of the table beyond the newest `keep`.

    Raises:
        NoSuchTable: The table has no live name.
    """

    advice: AppliedAdvice
    keep: int


class ChangeAppliedAdvice(Operation, frozen=True):
    """Save an applied proposal if no other request has changed it, and delete older proposals beyond `keep`.

    Attributes:
        expected: The stored text, or None if the table must not have a proposal with this id.

    Raises:
        CommitConflict: The stored text is not `expected`.
        NoSuchTable: The table has no live name.
    """

    advice: AppliedAdvice
    expected: str | None
    keep: int


class SaveToken(Operation, frozen=True):
    """Save a bearer token.

    Raises:
        AlreadyExists: A live token has this name.
    """

    token: AccessToken


class RevokeToken(Operation, frozen=True):
    """Revoke the live token with this name.

    Raises:
        NotFound: There is no such token.
    """

    name: str
    now_ms: int


class SaveGrant(Operation, frozen=True):
    """Save a grant, unless it exceeds a limit (BadRequest). The operation is idempotent."""

    grant: Grant
    limits: GrantLimits | None = None


class RemoveGrant(Operation, frozen=True):
    """Remove a grant.

    Raises:
        NotFound: The grant does not exist.
    """

    grant: Grant


class RemoveGrantsOf(Operation, frozen=True):
    principal: str
    """The principal that loses all grants, also those as owner and those on dropped entries. Its denials stay."""


class SaveAudit(Operation, frozen=True):
    records: tuple[AuditRecord, ...]


class SaveCursor(Operation, frozen=True):
    """Save the position of a named consumer of the timeline (a webhook).

    Only one of two replicas can save the next position, so an event is not delivered by both.

    Raises:
        CommitConflict: The stored position is not `expected`. None means that no position is stored.
    """

    consumer: str
    expected: str | None
    position: str


REWRITE = "rewrite "
"""The prefix of the name of a lease. The UUID of a table follows.

A job that rewrites files of the table holds the lease. Its row is removed with the table's rows.
"""


class TakeLease(Operation, frozen=True):
    """Take or renew the named lease for `holder` until `until_ms`.

    The result of this operation is an int: the fencing number, which rises each time the holder changes.

    Attributes:
        state: A text that the holder publishes. It is valid until the holder renews or loses the lease.

    Raises:
        CommitConflict: Another holder has a lease that is valid at `now_ms`. A lease that ends long after the new
            lease is ignored: its holder's clock was ahead.
    """

    name: str
    holder: str
    now_ms: int
    until_ms: int
    state: str = ""


PRIORITY = "priority "
"""The prefix of the name of a lease. The UUID of a table follows.

A process that has lost several races for the table's pointer holds the lease. Its row is removed with the table's
rows.
"""


class TakePriority(Operation, frozen=True):
    """Let only `holder` move the pointers of the table for `lasts_ms` from now, by the clock of the database.

    Raises:
        CommitConflict: Another process has priority.
    """

    uuid: str
    holder: str
    lasts_ms: int


class EndPriority(Operation, frozen=True):
    """End the priority of `holder` if it has priority."""

    uuid: str
    holder: str


class CheckFence(Operation, frozen=True):
    """Check that the sender still has the named lease.

    Raises:
        CommitConflict: `fence` is not the fencing number of the lease.
    """

    name: str
    fence: int


class RenewReplica(Operation, frozen=True):
    """Add the replica, or renew its lease, for `lease_ms` from now by the clock of the database.

    The operation also removes rows that expired long ago. The result is the list of all replicas with live leases.
    """

    replica: Replica
    lease_ms: int


class RemoveReplica(Operation, frozen=True):
    """End the lease of the replica, if it has a lease."""

    address: str


class CreateWarehouse(Operation, frozen=True):
    """Record a further warehouse.

    Raises:
        AlreadyExists: A warehouse has this name.
        BadRequest: Its location overlaps the location of another warehouse, or there are `limit` warehouses.
    """

    warehouse: StoredWarehouse
    limit: int


class ChangeWarehouse(Operation, frozen=True):
    """Replace the settings and the credentials of a warehouse.

    The other fields of the stored warehouse do not change.

    Raises:
        CommitConflict: The stored version is not `expected_version`, or the warehouse was dropped.
    """

    warehouse: StoredWarehouse
    expected_version: int


class RemoveWarehouse(Operation, frozen=True):
    """Remove the record of a warehouse. Its database stays.

    Raises:
        NoSuchWarehouse: The warehouse does not exist.
    """

    id: str


class NameCatalog(Operation, frozen=True):
    """Record that this database belongs to the warehouse with this id.

    Raises:
        CommitConflict: The database belongs to another warehouse, or to a server.
    """

    id: str


class CloseCatalog(Operation, frozen=True):
    """Prevent that namespaces are created in this database, because its warehouse is dropped. Idempotent.

    Raises:
        NamespaceNotEmpty: The catalog has namespaces, or dropped entries that keep their locations.
    """
