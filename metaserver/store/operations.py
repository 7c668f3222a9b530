"""The operations of the pointer store's transactions, as values."""

from __future__ import annotations

from typing import Any

import msgspec

from seamark.metaserver.store.model import (
    AccessToken,
    AuditRecord,
    ClaimedLocation,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    IdempotencyRecord,
    Instant,
    InstantState,
    MetricsReport,
    NamespacePath,
    RegisteredIndexFile,
    Replica,
    StoredPlanTable,
)


class Operation(msgspec.Struct, frozen=True):
    """A part of a transaction."""


class CreateNamespace(Operation, frozen=True):
    """AlreadyExists; NoSuchNamespace if its parent does not exist."""

    path: NamespacePath
    properties: dict[str, str]


class ReplaceNamespaceProperties(Operation, frozen=True):
    """Replace the properties of a namespace.

    Raises:
        CommitConflict: Unless the stored version is `expected_version`.
        NoSuchNamespace: If the namespace does not exist.
    """

    path: NamespacePath
    expected_version: int
    properties: dict[str, str]


class DropNamespace(Operation, frozen=True):
    """NamespaceNotEmpty while it has entries or child namespaces; NoSuchNamespace if it does not exist."""

    path: NamespacePath


class CreateEntry(Operation, frozen=True):
    """AlreadyExists (the message names the existing kind); NoSuchNamespace without its namespace."""

    entry: Entry


class SwapPointer(Operation, frozen=True):
    """Point an entry at another location.

    Raises:
        CommitConflict: Unless the entry has this UUID.
        LostRace: Unless the entry points at `expected_location`.
        NoSuchTable: If the name of a table does not exist.
        NoSuchView: If the name of a view does not exist.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    expected_location: str
    new_location: str
    now_ms: int
    holder: str = ""
    """The process that commits. LostRace while another has priority for the table (`TakePriority`)."""


class RenameEntry(Operation, frozen=True):
    """AlreadyExists at the destination, NoSuchNamespace without its namespace.

    NoSuchTable / NoSuchView at the source."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    to_namespace: NamespacePath
    to_name: str
    uuid: str | None = None
    """The expected UUID. If it is set and the name refers to another table, the rename raises CommitConflict."""


class DropEntry(Operation, frozen=True):
    """Removes the name.

    Index files and producers are removed with the last name of the table, live or dropped.

    With `keep`, keeps it as a DroppedEntry (the store sets its `entry` from the row). CommitConflict if
    `expected_location` is set and the pointer differs.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    expected_location: str | None = None
    keep: DroppedEntry | None = None
    uuid: str | None = None
    """The expected UUID. If it is set and the name refers to another table, the drop raises CommitConflict."""


class RestoreEntry(Operation, frozen=True):
    """Restores a dropped entry as (namespace, name).

    NotFound if expired or unknown; AlreadyExists / NoSuchNamespace as for CreateEntry; CommitConflict when another
    entry has claimed its location since."""

    dropped_id: str
    namespace: NamespacePath
    name: str
    is_kept: bool = False
    """Whether the caller knows that the retention has not passed, even if the clock differs."""


class ForgetDropped(Operation, frozen=True):
    """Removes a dropped entry permanently (before its purge).

    NotFound if it is gone: another replica was faster. With `unshared`, CommitConflict while another entry, live or
    dropped, has its UUID: it uses the same files.
    """

    dropped_id: str
    unshared: bool = False


class ClaimLocations(Operation, frozen=True):
    """Adds locations to the claims of the UUID.

    BadRequest for one that overlaps (is equal to, contains, or is within) a claim of another UUID: live, dropped, or
    being purged.
    """

    uuid: str
    locations: tuple[ClaimedLocation, ...]
    fresh: bool = False
    """Whether to raise BadRequest when the UUID has claims already."""
    namespace: NamespacePath = ()
    """The name, if set: its location may be that of an entry that was dropped with this name."""
    name: str = ""
    checked: bool = True
    """Whether to refuse overlaps. Entries that are older than claims may overlap."""
    returns: bool = False
    """Whether this operation may restore the entry. Then a live entry with the same location raises CommitConflict."""


class AllowLocations(Operation, frozen=True):
    """The table may name files at these locations, which others may own; replaces the earlier list."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]


class ReleaseLocations(Operation, frozen=True):
    """Removes the claims of a UUID without any name, live or dropped.

    With `retained`, keeps them for the namespace of this entry instead, because files are left.
    """

    uuid: str
    retained: DroppedEntry | None = None


class CheckRetained(Operation, frozen=True):
    """Records when files of a retained entry were last found."""

    uuid: str
    now_ms: int


class ReplaceIndexFiles(Operation, frozen=True):
    """Adds live index files of one definition and supersedes others.

    CommitConflict unless all of `remove` are live.

    A repeat, whose `add` is registered in any state, changes nothing. NoSuchTable if no live name refers to the table.
    The result of this operation and of the next two is the new index version.
    """

    uuid: str
    definition: str
    add: tuple[RegisteredIndexFile, ...]
    remove: tuple[str, ...]
    """Locations."""
    now_ms: int


class QuarantineIndexFile(Operation, frozen=True):
    """A live file is not used any longer; the state of others does not change.

    NotFound if it is not registered.
    """

    uuid: str
    location: str
    reason: str
    now_ms: int


class ForgetIndexFile(Operation, frozen=True):
    """Removes the row of an index file that is not live (the file is deleted, or will be).

    CommitConflict if live.
    """

    uuid: str
    location: str
    now_ms: int


class AdvanceProducer(Operation, frozen=True):
    """The producer has committed `sequence`.

    CommitConflict unless it is above the last sequence; the first may be any.

    NoSuchTable if no live name refers to the table. Rows stay until the table's last name is removed. They do not
    expire: a late repeat would be applied again, and its rows duplicated. There are at most as many as commits, each of
    which leaves a longer row in the timeline.
    """

    uuid: str
    """The UUID of the table."""
    producer: str
    sequence: int
    snapshot_id: int | None
    """The id is None when the change was empty and created no snapshot."""
    now_ms: int


class OpenStream(Operation, frozen=True):
    """Make a table a stream table: each shard that has no flushed offset gets the offset 0.

    Raises:
        NoSuchTable: If no live name refers to the table.
    """

    uuid: str
    shards: int


class FlushedRange(msgspec.Struct, frozen=True):
    """The rows of a shard that a flush adds to the table: those at `start` and after it, and before `end`."""

    shard: int
    start: int
    end: int


class MoveFlushedOffsets(Operation, frozen=True):
    """Record that the rows of these ranges are in the table's files.

    Raises:
        CommitConflict: Unless each range starts at the flushed offset of its shard. Another flush was faster.
        NoSuchTable: If no live name refers to the table.
    """

    uuid: str
    ranges: tuple[FlushedRange, ...]


class KeepPlanTable(Operation, frozen=True):
    """Stores the plan, unless another has its name: then that plan's lease is extended to the new lease.

    The result is the PlanTable that has the name."""

    plan: StoredPlanTable


class RenewPlanTable(Operation, frozen=True):
    """Extends the lease to at least that time.

    The result is a bool: False when the plan is retired or removed.
    """

    id: str
    expires_ms: int


class LeasePlanSnapshots(Operation, frozen=True):
    """Sets the leases of an audience's plan snapshots of one table.

    Leases become no shorter, except that `withdraw` ends them at `expires_ms`. The result is the number of existing
    plans.
    """

    namespace: NamespacePath
    of_name: str
    audience: str
    shown_ids: tuple[int, ...]
    expires_ms: int
    withdraw: bool = False


class DropPlanSnapshots(Operation, frozen=True):
    """Retires the plan snapshots of a table with these ids, of all audiences.

    The result is their number.
    """

    namespace: NamespacePath
    of_name: str
    shown_ids: tuple[int, ...]


class RetirePlanTables(Operation, frozen=True):
    """Retires plans whose lease ended before that time, oldest first.

    The result is their number.
    """

    before_ms: int
    limit: int


class ForgetPlanTable(Operation, frozen=True):
    """Removes the row of a retired plan whose files are deleted.

    A plan with a name stays.
    """

    id: str


class RecordInstant(Operation, frozen=True):
    instant: Instant


class MoveInstant(Operation, frozen=True):
    """Changes the state and the fields that depend on it.

    CommitConflict unless the stored state is `expected`. The instant gets a new position."""

    id: str
    expected: InstantState
    state: InstantState
    now_ms: int
    snapshot_id: int | None = None
    summary: dict[str, Any] | None = None


class SaveIdempotency(Operation, frozen=True):
    """Raises IdempotencyTaken if the key exists.

    Then the whole transaction is rolled back, and the first answer applies."""

    record: IdempotencyRecord


class SaveMetricsReport(Operation, frozen=True):
    """Keeps the newest `keep` reports of the table; None keeps all."""

    report: MetricsReport
    keep: int | None = None


class AddColumnReads(Operation, frozen=True):
    """Adds reads of columns of the table on one day.

    NoSuchTable if the table has no live name.

    Attributes:
        reads: (column id, age of the oldest partition in days, number of reads), each column once.
    """

    uuid: str
    day: int
    reads: tuple[tuple[int, int, int], ...]


class SaveToken(Operation, frozen=True):
    """AlreadyExists if a live token has this name."""

    token: AccessToken


class RevokeToken(Operation, frozen=True):
    """Revoke the live token with this name.

    Raises:
        NotFound: If there is none.
    """

    name: str
    now_ms: int


class SaveGrant(Operation, frozen=True):
    """Idempotent."""

    grant: Grant


class RemoveGrant(Operation, frozen=True):
    """Remove a grant.

    Raises:
        NotFound: If it does not exist.
    """

    grant: Grant


class SaveAudit(Operation, frozen=True):
    records: tuple[AuditRecord, ...]


class SaveCursor(Operation, frozen=True):
    """Saves the position of a named consumer of the timeline (a webhook).

    CommitConflict unless the stored position is `expected` (None: no row yet), so that two replicas cannot both
    deliver."""

    consumer: str
    expected: str | None
    position: str


REWRITE = "rewrite "
"""Followed by the UUID of a table: the lease of a job that rewrites its files. Its row is removed with the table's."""


class TakeLease(Operation, frozen=True):
    """`holder` gets or renews the named lease until `until_ms`.

    CommitConflict while the lease of another holder is valid at `now_ms`, unless it ends long after the new lease: it
    was taken by a clock that was ahead. The result of this operation is an int: the fencing number, which rises each
    time the holder changes.

    Attributes:
        state: What the holder publishes, until it renews the lease or loses it.
    """

    name: str
    holder: str
    now_ms: int
    until_ms: int
    state: str = ""


PRIORITY = "priority "
"""Followed by the UUID of a table: the lease of a process that has lost several races for the table's pointer. Its row
is removed with the table's."""


class TakePriority(Operation, frozen=True):
    """Let only `holder` move the pointers of the table for `lasts_ms` from now, by the clock of the database.

    Raises:
        CommitConflict: While another process has priority.
    """

    uuid: str
    holder: str
    lasts_ms: int


class EndPriority(Operation, frozen=True):
    """Ends the priority of `holder`; nothing happens when it has none."""

    uuid: str
    holder: str


class CheckFence(Operation, frozen=True):
    """Check that the sender still has the named lease.

    Raises:
        CommitConflict: Unless `fence` is the fencing number of the lease.
    """

    name: str
    fence: int


class RenewReplica(Operation, frozen=True):
    """Adds the replica, or renews its lease, for `lease_ms` from now, by the clock of the database.

    The result is the list of all replicas with live leases. Removes rows that expired long ago."""

    replica: Replica
    lease_ms: int


class RemoveReplica(Operation, frozen=True):
    """Ends the lease of the replica; nothing happens when there is none."""

    address: str
