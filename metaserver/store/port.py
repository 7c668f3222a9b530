"""The pointer store port: the only mutable state of the catalog, and its plain values.

Every change is a list of operations that are applied in ONE transaction (`transact`): atomic, and durable when it
returns. A pointer swap, its instant and its idempotency record are therefore visible together. A read sees every
transaction that returned before it began, from any replica.

Failures are errors of `seamark.metaserver.errors`. A transaction that raised another error than `CommitUnknown` changed
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

NamespacePath = tuple[str, ...]
POSITION = re.compile(r"[0-9]{20}|[0-9a-f]{36}")
"""A complete timeline position of SQLite or PostgreSQL: a truncated position would sort wrongly."""


class EntryKind(StrEnum):
    """The kinds of named entries. Tables and views share one set of names; functions have another."""

    TABLE = "table"
    VIEW = "view"
    FUNCTION = "function"


class InstantState(StrEnum):
    REQUESTED = "requested"
    INFLIGHT = "inflight"
    COMPLETED = "completed"
    ROLLED_BACK = "rolled_back"


class Namespace(msgspec.Struct, frozen=True):
    path: NamespacePath
    properties: dict[str, str]
    version: int = 1
    """Rises by one with each change of the properties; `ReplaceNamespaceProperties` compares it."""


class Entry(msgspec.Struct, frozen=True):
    """A name and its metadata file. `metadata_location` is the table pointer."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    metadata_location: str
    previous_location: str | None = None
    version: int = 1
    """Rises by one with each swap."""
    created_ms: int = 0
    updated_ms: int = 0
    index_version: int = 0
    """Rises with each change of the table's registered index files. Set when names are read; 0: there is none, or the
    entry was not read by its name."""


class DroppedEntry(msgspec.Struct, frozen=True):
    """A dropped table or view: restorable until `expires_ms`, then purged (with its files if `purge`)."""

    id: str
    entry: Entry
    purge: bool
    dropped_ms: int
    expires_ms: int
    who: str


class Instant(msgspec.Struct, frozen=True, omit_defaults=False):
    """An event of a table, view or namespace: past or in progress."""

    id: str
    """UUIDv7, chosen by the writer before the transaction: reading it back decides the outcome after a lost reply."""
    action: str
    """create, commit, replace, drop, undrop, purge, rename, register, unregister, … (kebab-case)."""
    state: InstantState
    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    """UUID of the table or view; it does not change with renames."""
    requested_ms: int
    completed_ms: int | None = None
    who: str = "anonymous"
    snapshot_id: int | None = None
    metadata_location: str | None = None
    fingerprint: str | None = None
    """Hash of a request that can be applied only once, because it adds a snapshot."""
    summary: dict[str, Any] = {}
    position: str = ""
    """Opaque, set by the store: the position from which a reader continues (`instants(since=…)`). Sorts in the order of
    visibility. It changes with the state."""


class IndexFileState(StrEnum):
    LIVE = "live"
    SUPERSEDED = "superseded"
    """Replaced by others; kept until no plan reads it."""
    QUARANTINED = "quarantined"
    """Found damaged; kept for analysis."""


class RegisteredIndexFile(msgspec.Struct, frozen=True):
    """A registered index file. The file contains all of this, so that the registry can be rebuilt from storage."""

    uuid: str
    """The UUID of the table."""
    location: str
    definition: str
    """The id of the definition (`seamark.metaserver.index.files.definitions`)."""
    kind: str
    level: int
    files: int
    """The number of data files that it describes."""
    rows: int
    size_bytes: int
    snapshot_id: int | None
    """The snapshot it was built for; None when unknown (for a merged file)."""
    created_ms: int
    state: IndexFileState = IndexFileState.LIVE
    changed_ms: int = 0
    reason: str | None = None
    """The reason for the quarantine."""


class ProducerState(msgspec.Struct, frozen=True):
    """The last sequence of a producer in a table, and its snapshot."""

    sequence: int
    snapshot_id: int | None
    changed_ms: int


class PlanTable(msgspec.Struct, frozen=True):
    """A name that reads a table as one plan selected it, and the files that were written for it."""

    id: str
    namespace: NamespacePath
    name: str | None
    """None after it was retired: the name is free, and the files are to be deleted."""
    of_name: str
    """The table's name."""
    uuid: str
    """The UUID of the table."""
    location: str
    """The location of the metadata file."""
    files: tuple[str, ...]
    """All files that were written for it, the metadata file last."""
    snapshot_id: int
    file_count: int
    """The number of data files that the plan kept, and their bytes."""
    size_bytes: int
    considered_count: int
    """The number of data files of the snapshot, and their bytes; None when not all manifests were read."""
    considered_bytes: int | None
    expires_ms: int
    audience: str | None = None
    """The value of `X-Seamark-Plans` of the plan: only requests with the same value can use it. None: the plan has a
    name for all readers of the table."""
    shown_id: int | None = None
    """The id of the snapshot that makes the plan visible to the audience; None for a plan view."""
    shown: str | None = None
    """That snapshot as JSON."""


class ShownPlan(msgspec.Struct, frozen=True):
    """A plan snapshot that loadTable adds to its answer."""

    shown_id: int
    snapshot: str
    """JSON."""


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The first answer to a request with an idempotency key."""

    key: str
    scope: str
    """Principal, method and path: using a key for another request is a mistake of the client."""
    request_hash: str
    status: int
    body: bytes | None = None
    """The answer, if it is small …"""
    metadata_location: str | None = None
    """… or the metadata file that it is rendered from."""
    expires_ms: int = 0


class MetricsReport(msgspec.Struct, frozen=True):
    id: str
    uuid: str
    namespace: NamespacePath
    name: str
    report_type: str
    """scan-report or commit-report."""
    snapshot_id: int | None
    received_ms: int
    who: str
    report: dict[str, Any]


class Token(msgspec.Struct, frozen=True):
    """The public part of a bearer token.

    `digest` is SHA-256 of the secret (256 random bits, so that salt or stretching is not needed)."""

    id: str
    name: str
    """The principal."""
    digest: str
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None


class Grant(msgspec.Struct, frozen=True):
    """`principal` has `role` (reader, writer, admin) on `namespace` and all below.

    The empty path is the whole catalog."""

    principal: str
    role: str
    namespace: NamespacePath = ()


class AuditRecord(msgspec.Struct, frozen=True):
    id: str
    at_ms: int
    who: str
    action: str
    """Operation name, e.g. commitTable."""
    resource: str
    outcome: str
    """allowed, denied or failed:<kind>."""
    status: int
    request_id: str
    remote: str = ""


class ClaimedLocation(msgspec.Struct, frozen=True):
    key: str
    """The canonical form of the location: different keys are different locations."""
    shared: bool = False
    """Others may also claim it as shared: a folder for files of several tables."""
    shown: str = ""
    """The location as the client wrote it, and what it is, for messages."""
    what: str = "The location"


class Claim(msgspec.Struct, frozen=True):
    """The table, view or function `uuid` has files at `location` (a key) or below."""

    location: str
    uuid: str
    shared: bool
    allowed: bool = False
    """It claims nothing there, but may name files of others."""


# Operations of a transaction -----------------------------------------------------------------------------------------


class CreateNamespace(msgspec.Struct, frozen=True):
    """AlreadyExists; NoSuchNamespace if its parent does not exist."""

    path: NamespacePath
    properties: dict[str, str]


class ReplaceNamespaceProperties(msgspec.Struct, frozen=True):
    """CommitConflict unless the stored version is `expected_version`; NoSuchNamespace if it does not exist."""

    path: NamespacePath
    expected_version: int
    properties: dict[str, str]


class DropNamespace(msgspec.Struct, frozen=True):
    """NamespaceNotEmpty while it has entries or child namespaces; NoSuchNamespace if it does not exist."""

    path: NamespacePath


class CreateEntry(msgspec.Struct, frozen=True):
    """AlreadyExists (the message names the existing kind); NoSuchNamespace without its namespace."""

    entry: Entry


class SwapPointer(msgspec.Struct, frozen=True):
    """CommitConflict unless the entry exists with this uuid and points at `expected_location`.

    NoSuchTable / NoSuchView if the name does not exist."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    expected_location: str
    new_location: str
    now_ms: int


class RenameEntry(msgspec.Struct, frozen=True):
    """AlreadyExists at the destination, NoSuchNamespace without its namespace.

    NoSuchTable / NoSuchView at the source."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    to_namespace: NamespacePath
    to_name: str
    uuid: str | None = None
    """If set: CommitConflict when the name refers to another table."""


class DropEntry(msgspec.Struct, frozen=True):
    """Removes the name. Index files and producers are removed with the last name of the table, live or dropped.

    With `keep`, keeps it as a DroppedEntry (the store sets its `entry` from the row).
    CommitConflict if `expected_location` is set and the pointer differs."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    expected_location: str | None = None
    keep: DroppedEntry | None = None
    uuid: str | None = None
    """If set: CommitConflict when the name refers to another table."""


class RestoreEntry(msgspec.Struct, frozen=True):
    """Restores a dropped entry as (namespace, name).

    NotFound if expired or unknown; AlreadyExists / NoSuchNamespace as for CreateEntry; CommitConflict when another
    entry has claimed its location since."""

    dropped_id: str
    namespace: NamespacePath
    name: str


class ForgetDropped(msgspec.Struct, frozen=True):
    """Removes a dropped entry permanently (before its purge). NotFound if it is gone: another replica was faster.
    With `unshared`, CommitConflict while another entry, live or dropped, has its UUID: it uses the same files."""

    dropped_id: str
    unshared: bool = False


class ClaimLocations(msgspec.Struct, frozen=True):
    """Adds locations to the claims of the UUID. BadRequest for one that overlaps (is equal to, contains, or is within)
    a claim of another UUID: live, dropped, or being purged."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]
    fresh: bool = False
    """If set: BadRequest when the UUID has claims already."""
    namespace: NamespacePath = ()
    """The name, if set: its location may be that of an entry that was dropped with this name."""
    name: str = ""
    checked: bool = True
    """If not set: overlaps are allowed, for entries that are older than claims."""
    returns: bool = False
    """If set: the entry may be restored by this. CommitConflict when a live entry has the same location."""


class AllowLocations(msgspec.Struct, frozen=True):
    """The table may name files at these locations, which others may own; replaces the earlier list."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]


class ReleaseLocations(msgspec.Struct, frozen=True):
    """Removes the claims of a UUID without any name, live or dropped."""

    uuid: str


class ReplaceIndexFiles(msgspec.Struct, frozen=True):
    """Adds live index files of one definition and supersedes others. CommitConflict unless all of `remove` are live.

    A repeat, whose `add` is registered in any state, changes nothing. NoSuchTable if no live name refers to the table.
    The result of this operation and of the next two is the new index version."""

    uuid: str
    definition: str
    add: tuple[RegisteredIndexFile, ...]
    remove: tuple[str, ...]
    """Locations."""
    now_ms: int


class QuarantineIndexFile(msgspec.Struct, frozen=True):
    """A live file is not used any longer; the state of others does not change. NotFound if it is not registered."""

    uuid: str
    location: str
    reason: str
    now_ms: int


class ForgetIndexFile(msgspec.Struct, frozen=True):
    """Removes the row of an index file that is not live (the file is deleted, or will be). CommitConflict if live."""

    uuid: str
    location: str
    now_ms: int


class AdvanceProducer(msgspec.Struct, frozen=True):
    """The producer has committed `sequence`. CommitConflict unless it is above the last one; the first may be any.

    NoSuchTable if no live name refers to the table. Rows stay until the table's last name is removed. They do not
    expire: a late repeat would be applied again, and its rows duplicated. There are at most as many as commits, each of
    which leaves a longer row in the timeline."""

    uuid: str
    """The UUID of the table."""
    producer: str
    sequence: int
    snapshot_id: int | None
    """None: the change was empty and created no snapshot."""
    now_ms: int


class KeepPlanTable(msgspec.Struct, frozen=True):
    """Stores the plan, unless another has its name: then that plan's lease is extended to the new lease.

    The result is the PlanTable that has the name."""

    plan: PlanTable


class RenewPlanTable(msgspec.Struct, frozen=True):
    """Extends the lease to at least that time. The result is a bool: False when the plan is retired or removed."""

    id: str
    expires_ms: int


class LeasePlanSnapshots(msgspec.Struct, frozen=True):
    """Sets the leases of an audience's plan snapshots of one table. Leases become no shorter, except that `withdraw`
    ends them at `expires_ms`. The result is the number of existing plans."""

    namespace: NamespacePath
    of_name: str
    audience: str
    shown_ids: tuple[int, ...]
    expires_ms: int
    withdraw: bool = False


class DropPlanSnapshots(msgspec.Struct, frozen=True):
    """Retires the plan snapshots of a table with these ids, of all audiences. The result is their number."""

    namespace: NamespacePath
    of_name: str
    shown_ids: tuple[int, ...]


class RetirePlanTables(msgspec.Struct, frozen=True):
    """Retires plans whose lease ended before that time, oldest first. The result is their number."""

    before_ms: int
    limit: int


class ForgetPlanTable(msgspec.Struct, frozen=True):
    """Removes the row of a retired plan whose files are deleted. A plan with a name stays."""

    id: str


class RecordInstant(msgspec.Struct, frozen=True):
    instant: Instant


class MoveInstant(msgspec.Struct, frozen=True):
    """Changes the state and the fields that depend on it.

    CommitConflict unless the stored state is `expected`. The instant gets a new position."""

    id: str
    expected: InstantState
    state: InstantState
    now_ms: int
    snapshot_id: int | None = None
    summary: dict[str, Any] | None = None


class SaveIdempotency(msgspec.Struct, frozen=True):
    """Raises IdempotencyTaken if the key exists.

    Then the whole transaction is rolled back, and the first answer applies."""

    record: IdempotencyRecord


class SaveMetricsReport(msgspec.Struct, frozen=True):
    """Keeps the newest `keep` reports of the table; None keeps all."""

    report: MetricsReport
    keep: int | None = None


class SaveToken(msgspec.Struct, frozen=True):
    """AlreadyExists if a live token has this name."""

    token: Token


class RevokeToken(msgspec.Struct, frozen=True):
    """NotFound if no live token has this name."""

    name: str
    now_ms: int


class SaveGrant(msgspec.Struct, frozen=True):
    """Idempotent."""

    grant: Grant


class RemoveGrant(msgspec.Struct, frozen=True):
    """NotFound if it does not exist."""

    grant: Grant


class SaveAudit(msgspec.Struct, frozen=True):
    records: tuple[AuditRecord, ...]


class SaveCursor(msgspec.Struct, frozen=True):
    """Saves the position of a named consumer of the timeline (a webhook).

    CommitConflict unless the stored position is `expected` (None: no row yet), so that two replicas cannot both
    deliver."""

    consumer: str
    expected: str | None
    position: str


class TakeLease(msgspec.Struct, frozen=True):
    """`holder` gets or renews the named lease until `until_ms`.

    CommitConflict while the lease of another holder is valid at `now_ms`.
    The result of this operation is an int: the fencing number, which rises each time the holder changes."""

    name: str
    holder: str
    now_ms: int
    until_ms: int


Operation = (
    CreateNamespace
    | ReplaceNamespaceProperties
    | DropNamespace
    | CreateEntry
    | SwapPointer
    | RenameEntry
    | DropEntry
    | RestoreEntry
    | ForgetDropped
    | ClaimLocations
    | AllowLocations
    | ReleaseLocations
    | ReplaceIndexFiles
    | QuarantineIndexFile
    | ForgetIndexFile
    | AdvanceProducer
    | KeepPlanTable
    | RenewPlanTable
    | LeasePlanSnapshots
    | DropPlanSnapshots
    | RetirePlanTables
    | ForgetPlanTable
    | RecordInstant
    | MoveInstant
    | SaveIdempotency
    | SaveMetricsReport
    | SaveToken
    | RevokeToken
    | SaveGrant
    | RemoveGrant
    | SaveAudit
    | SaveCursor
    | TakeLease
)


class IdempotencyTaken(Exception):
    """Another request with the same key was recorded first. Internal: clients never receive it."""


class InstantFilter(msgspec.Struct, frozen=True):
    """All conditions must hold. `since` is an exclusive position from an Instant."""

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
    """Opened and closed by its factory (an async context manager). Safe for use by many tasks of one event loop."""

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Applies all operations or none; durable on return. One result per operation (None unless documented).

        CommitUnknown: the connection was lost during the commit; read the instant back.
        RetryLater: the queue is full or the database is unavailable."""

    @property
    def transacting(self) -> int:
        """Transactions that wait or run in this process; for metrics."""

    async def ping(self) -> None:
        """RetryLater when the database does not answer."""

    async def namespace(self, path: NamespacePath) -> Namespace | None: ...

    async def namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[Namespace]:
        """Direct children of `parent` after `after`, in code-point order of their last level."""

    async def entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None: ...

    async def entries(self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int) -> list[Entry]:
        """After `after`, in code-point order of name."""

    async def dropped(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """After `after`, in order of id."""

    async def dropped_entry(self, dropped_id: str) -> DroppedEntry | None: ...

    async def dropped_expired(self, now_ms: int, limit: int) -> list[DroppedEntry]: ...

    async def names_of(self, uuid: str) -> int:
        """The number of names, live and dropped, of the table with this UUID: several share its files."""

    async def claims(self, uuid: str) -> list[Claim]:
        """The current and earlier locations of the UUID."""

    async def claims_overlapping(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Claims of other UUIDs that overlap one of `keys`: all that contain it, and the first `limit` within it."""

    async def gave_up(self, uuid: str, namespace: NamespacePath, name: str) -> bool:
        """Whether the UUID was dropped with this name and has no live name: a new entry with that name may use its
        location."""

    async def unclaimed(self, after: str, limit: int) -> list[Entry]:
        """Live and dropped entries without claims, in order of UUID, with UUIDs after `after`."""

    async def indexed_tables(self, after: str | None, limit: int) -> list[Entry]:
        """Entries of tables with current or earlier index files, in order of UUID: all names of up to `limit` tables
        with UUIDs after `after`."""

    async def index_files_unused(self, before_ms: int, limit: int) -> list[RegisteredIndexFile]:
        """Files that were superseded or quarantined before that time, in order of the change."""

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        """The index files of the table in every state, oldest first."""

    async def producer(self, uuid: str, producer: str) -> ProducerState | None:
        """None: it has committed nothing to this table."""

    async def plan_table(self, namespace: NamespacePath, name: str) -> PlanTable | None:
        """By its name, even if its lease has ended."""

    async def plan_snapshots(
        self, namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
    ) -> list[ShownPlan]:
        """The plan snapshots of the table for the audience with live leases, in order of id: the `limit` whose leases
        end last."""

    async def plan_table_count(self, now_ms: int) -> int:
        """The number of plan tables with live leases."""

    async def plan_tables_retired(self, after: str | None, limit: int) -> list[PlanTable]:
        """After `after`, in order of id."""

    async def instant(self, instant_id: str) -> Instant | None: ...

    async def instant_by_fingerprint(self, uuid: str, fingerprint: str) -> Instant | None:
        """The newest completed instant."""

    async def instants(self, where: InstantFilter, limit: int) -> list[Instant]:
        """In order of position. A reader that continues from the last position misses no instant, with concurrent
        writers."""

    async def archive_instants(self, keep: int, limit: int) -> int:
        """Archives the finished instants of each table except its newest `keep`, at most `limit` a call.

        Returns their number."""

    async def idempotency(self, key: str, now_ms: int) -> IdempotencyRecord | None:
        """None after it has expired."""

    async def metrics_reports(self, uuid: str | None, since: str | None, limit: int) -> list[MetricsReport]:
        """After `since`, in order of id (UUIDv7)."""

    async def token_by_digest(self, digest: str) -> Token | None: ...

    async def tokens(self) -> list[Token]: ...

    async def grants(self, principal: str | None) -> list[Grant]: ...

    async def audit(self, since: str | None, limit: int) -> list[AuditRecord]:
        """After `since`, in order of id."""

    async def cursor(self, consumer: str) -> str | None: ...

    async def secret(self, name: str) -> bytes | None:
        """The named secret that all replicas share, encrypted as stored."""

    async def swap_secret(self, name: str, expected: bytes | None, value: bytes) -> bytes:
        """Stores `value` if the secret is `expected` (None: no secret). Returns the stored secret: that of another
        replica which was faster, empty when the expected secret is gone."""

    async def prune(self, now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> int:
        """Removes expired idempotency records, and audit records and metrics reports older than the given times.

        Returns their number."""
