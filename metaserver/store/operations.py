"""The operations of which the pointer store's transactions consist, as values."""

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
        AlreadyExists: The name is in use. The message names the kind of the existing entry.
        NoSuchNamespace: The namespace does not exist.
    """

    entry: Entry


class SwapPointer(Operation, frozen=True):
    """Move the pointer of an entry to another metadata file.

    Raises:
        CommitConflict: The UUID of the entry is not `uuid`.
        LostRace: The pointer is no longer `expected_location`, or another process has priority (`TakePriority`).
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
    """The name of the process that commits."""


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
    """The expected UUID, or None. If the entry has a different UUID, the rename raises CommitConflict."""


class DropEntry(Operation, frozen=True):
    """Remove a name.

    The rows of index files and producers are removed together with the last live or dropped name of the table.

    Attributes:
        expected_location: The expected pointer, or None for any pointer.
        keep: The dropped entry to keep, or None. The store sets its field `entry`.

    Raises:
        CommitConflict: The pointer is not `expected_location`.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    expected_location: str | None = None
    keep: DroppedEntry | None = None
    uuid: str | None = None
    """The expected UUID, or None. If the entry has a different UUID, the drop raises CommitConflict."""


class RestoreEntry(Operation, frozen=True):
    """Restore a dropped entry under the name `name` in `namespace`.

    Raises:
        NotFound: The retention of the entry has ended, or the entry is unknown.
        AlreadyExists: The name is in use.
        NoSuchNamespace: The namespace does not exist.
        CommitConflict: Another entry has claimed its location since.
    """

    dropped_id: str
    namespace: NamespacePath
    name: str
    is_kept: bool = False
    """Whether the caller has already checked that the retention has not ended, so that the store does not check it."""


class ForgetDropped(Operation, frozen=True):
    """Remove a dropped entry permanently, before its purge.

    Raises:
        NotFound: The entry no longer exists, because another replica has removed it.
        CommitConflict: `unshared` is true, and another live or dropped entry has the same UUID, and so the same files.
    """

    dropped_id: str
    unshared: bool = False


class ClaimLocations(Operation, frozen=True):
    """Record that files of the entry with this UUID are in these locations: the entry claims them.

    Raises:
        BadRequest: A location is equal to, contains, or is within a claim of another UUID, whose entry may be live,
            dropped, or being purged.
        AlreadyExists: `only_name` is true, and the UUID has two live names.
    """

    uuid: str
    locations: tuple[ClaimedLocation, ...]
    fresh: bool = False
    """Whether the UUID must be new. If it is true and the UUID already has claims, BadRequest is raised."""
    namespace: NamespacePath = ()
    """The namespace of `name`."""
    name: str = ""
    """The name of the new entry, or empty.

    If it is set, the location may be the location of an entry that was dropped with this name. The caller sets it only
    if the creator may create and write every entry of the namespace.
    """
    checked: bool = True
    """Whether locations are checked: whether overlaps with other entries are refused. Old versions accepted them."""
    returns: bool = False
    """Whether a dropped entry may return: become live again. A live entry in its location causes CommitConflict."""
    only_name: bool = False
    """Whether the UUID may have only one live name. An earlier operation of the transaction creates the entry."""


class AllowLocations(Operation, frozen=True):
    """Replace the list of locations that belong to other entries, but in which files of this table may be."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]


class ReleaseLocations(Operation, frozen=True):
    """Remove the claims of a table, view or function if its last name was removed, and none of its files remain.

    The caller sets `retained` to None if no files remain. Otherwise `retained` is the removed entry, and its claims are
    kept. Then only new entries of its namespace may use the locations.
    """

    uuid: str
    retained: DroppedEntry | None = None


class RecordRetainedCheck(Operation, frozen=True):
    """Record the time at which the server last found files of a retained entry: a removed entry whose files remain."""

    uuid: str
    now_ms: int


class ReplaceIndexFiles(Operation, frozen=True):
    """Add live index files of one definition, and supersede other index files. The result is the new index version.

    If the files in `add` are already registered in any state, the operation is a repeat, and changes nothing.

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
    """Quarantine a live index file. A file in a different state does not change. The result is the new index version.

    Raises:
        NotFound: The file is not registered.
    """

    uuid: str
    location: str
    reason: str
    now_ms: int


class ForgetIndexFile(Operation, frozen=True):
    """Remove the row of an index file that is not live. The caller deletes the file. The result is the index version.

    Raises:
        CommitConflict: The file is live.
    """

    uuid: str
    location: str
    now_ms: int


class AdvanceProducer(Operation, frozen=True):
    """Record that the producer has committed `sequence`. The first sequence number may be any number.

    The row of a producer stays until the table's last name is removed. It does not expire, because otherwise a late
    repeat would be applied again, and would duplicate rows of the table. Producers take less space than the timeline,
    which has a longer row for each commit.

    Raises:
        CommitConflict: `sequence` is not greater than the last sequence.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    """The UUID of the table."""
    producer: str
    sequence: int
    snapshot_id: int | None
    """The snapshot of the change, or None if the change was empty and created no snapshot."""
    now_ms: int


class OpenStream(Operation, frozen=True):
    """Make a table a stream table: each shard without a flushed offset gets its offset in `starts`, or 0.

    Offsets are valid only for one log, because another log has different rows at the same offsets.

    Raises:
        LogUnavailable: The table already uses another log.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    shards: int
    log: str = ""
    """The identity of the log."""
    starts: dict[int, int] = {}
    """The flushed offsets that the log and the snapshots of the table state, by shard."""


class FlushedRange(msgspec.Struct, frozen=True):
    """The rows of a shard that a flush adds to the table, from offset `start` up to `end` (exclusive)."""

    shard: int
    start: int
    end: int


class MoveFlushedOffsets(Operation, frozen=True):
    """Record that the rows in these ranges are in the table's files.

    Raises:
        CommitConflict: A range does not start at the flushed offset of its shard, because another flush was faster.
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    ranges: tuple[FlushedRange, ...]


class RecordRemovalFlush(Operation, frozen=True):
    """Record the snapshot of a flush that precedes a commit that removes rows. The record replaces an earlier one.

    Raises:
        NoSuchTable: No live name refers to the table.
    """

    uuid: str
    snapshot_id: int


class TakeRemovalFlush(Operation, frozen=True):
    """Remove the record that `RecordRemovalFlush` has made of the snapshot of a flush.

    The result is True if the commit has read this snapshot. Then the commit need not flush again. If two callers remove
    the record, it is True for only one. A record with another snapshot is also removed, and the commit flushes again.
    """

    uuid: str
    snapshot_id: int | None


class KeepPlanTable(Operation, frozen=True):
    """Store a plan, or extend the lease of the existing plan with this name. The result is the stored plan."""

    plan: StoredPlanTable


class RenewPlanTable(Operation, frozen=True):
    """Extend the lease of a plan so that it ends at `expires_ms` or later.

    The result is False if the plan is retired or removed, otherwise True.
    """

    id: str
    expires_ms: int


class LeasePlanSnapshots(Operation, frozen=True):
    """Extend the leases of plan snapshots, or end them. The result is the number of existing plans.

    A plan snapshot shows a plan as a snapshot of the planned table, whose name is `of_name` in `namespace`. Only
    requests with the value `audience`, such as those of one engine's catalog, see it. An extended lease ends at
    `expires_ms` or later. If `withdraw` is true, the leases are shortened or extended to end exactly at `expires_ms`.
    """

    namespace: NamespacePath
    of_name: str
    audience: str
    plan_snapshot_ids: tuple[int, ...]
    expires_ms: int
    withdraw: bool = False


class DropPlanSnapshots(Operation, frozen=True):
    """Retire the plan snapshots with these ids of the planned table `of_name`, for all clients that can see them.

    A retired plan has no name, and its files are deleted later. The result is the number of retired plan snapshots.
    """

    namespace: NamespacePath
    of_name: str
    plan_snapshot_ids: tuple[int, ...]


class RetirePlanTables(Operation, frozen=True):
    """Retire at most `limit` plans whose lease ended before `before_ms`, the oldest first.

    The result is the number of retired plans.
    """

    before_ms: int
    limit: int


class ForgetPlanTable(Operation, frozen=True):
    """Remove the row of a plan if it has no name (it is retired). The caller has deleted the files of the plan."""

    id: str


class RecordInstant(Operation, frozen=True):
    instant: Instant


class MoveInstant(Operation, frozen=True):
    """Change the state of an instant, and its snapshot and summary. The instant gets a new position.

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
        IdempotencyTaken: The key exists. The whole transaction is rolled back, and the recorded answer must be sent.
    """

    record: IdempotencyRecord


class SaveMetricsReport(Operation, frozen=True):
    """Save a report, and delete all but the newest `keep` reports of the table. If `keep` is None, delete no report."""

    report: MetricsReport
    keep: int | None = None


class AddColumnReads(Operation, frozen=True):
    """Add reads of columns of a table on one day.

    Attributes:
        day: The day, in days since the epoch.
        reads: Tuples (column id, age of the oldest partition in days, number of reads), one for each column.

    Raises:
        NoSuchTable: The table has no live name.
    """

    uuid: str
    day: int
    reads: tuple[tuple[int, int, int], ...]


class AddQueryRecords(Operation, frozen=True):
    """Add statements of one hour to the query history of a table.

    Statements with the same shape differ only in the compared values. The table keeps at most `shapes_max` shapes, and
    the first statements of at most `owner_shapes_max` shapes may be from one principal (owner). Further shapes are
    added to the shape `OTHER_SHAPES`, so that no shape displaces another.

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
    """Save an applied proposal, and delete all but the newest `keep` proposals of the table.

    Raises:
        NoSuchTable: The table has no live name.
    """

    advice: AppliedAdvice
    keep: int


class ChangeAppliedAdvice(Operation, frozen=True):
    """Save an applied proposal if no other request has changed it. Delete all but the newest `keep` proposals.

    Attributes:
        expected: The expected stored text. None if the table must not have a proposal with this id.

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
        NotFound: No live token has this name.
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
    """Remove all grants of a principal, including those as owner and those on dropped entries. Denials are kept."""

    principal: str


class SaveAudit(Operation, frozen=True):
    records: tuple[AuditRecord, ...]


class SaveCursor(Operation, frozen=True):
    """Save the position of a named consumer of the timeline, such as a webhook.

    Only one replica can save the next position, so two replicas do not deliver the same event.

    Raises:
        CommitConflict: The stored position is not `expected`. None means that no position is stored.
    """

    consumer: str
    expected: str | None
    position: str


REWRITE = "rewrite "
"""The prefix of the name of the lease that a job holds while it rewrites files of a table. The UUID follows."""


class TakeLease(Operation, frozen=True):
    """Take or renew the named lease for `holder` until `until_ms`.

    The result is the fencing number, an int that rises each time the holder changes.

    Attributes:
        state: A text that the holder publishes, until it renews or loses the lease.

    Raises:
        CommitConflict: Another holder has a lease that is valid at `now_ms`. A lease that ends long after the new
            lease is ignored, because the clock of its holder was wrong.
    """

    name: str
    holder: str
    now_ms: int
    until_ms: int
    state: str = ""


PRIORITY = "priority "
"""The prefix of the name of the lease of a process that has lost several races for a table's pointer. The UUID follows.

The rows of both kinds of leases are removed with the table's rows.
"""


class TakePriority(Operation, frozen=True):
    """Give `holder` priority: for `lasts_ms` by the clock of the database, only it may move the table's pointers.

    Raises:
        CommitConflict: Another process has priority.
    """

    uuid: str
    holder: str
    lasts_ms: int


class EndPriority(Operation, frozen=True):
    """End the priority of a process (`holder`) that commits to a table, if it has priority (`TakePriority`)."""

    uuid: str
    holder: str


class CheckFence(Operation, frozen=True):
    """Check that the named lease still has the fencing number `fence`.

    No other holder can take the lease until this transaction ends.

    Raises:
        CommitConflict: `fence` is not the fencing number of the lease.
    """

    name: str
    fence: int


class RenewReplica(Operation, frozen=True):
    """Add a replica, or renew its lease, for `lease_ms` by the clock of the database.

    The operation also removes replicas whose leases expired long ago. The result lists the replicas with live leases.
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
        BadRequest: The location overlaps the location of another warehouse, or there are already `limit` warehouses.
    """

    warehouse: StoredWarehouse
    limit: int


class ChangeWarehouse(Operation, frozen=True):
    """Replace the settings and the credentials of a warehouse.

    All other fields of the stored warehouse stay the same.

    Raises:
        CommitConflict: The stored version is not `expected_version`, or the warehouse was dropped.
    """

    warehouse: StoredWarehouse
    expected_version: int


class RemoveWarehouse(Operation, frozen=True):
    """Remove the record of a warehouse. Its database is not deleted.

    Raises:
        NoSuchWarehouse: The warehouse does not exist.
    """

    id: str


class AssignCatalogToWarehouse(Operation, frozen=True):
    """Record that this database belongs to the warehouse with this id.

    Raises:
        CommitConflict: The database belongs to another warehouse, or to a server.
    """

    id: str


class CloseCatalog(Operation, frozen=True):
    """Prevent that namespaces are created in this database, because its warehouse is dropped. Repeats change nothing.

    Raises:
        NamespaceNotEmpty: The catalog has namespaces, or dropped entries that keep their locations.
    """
