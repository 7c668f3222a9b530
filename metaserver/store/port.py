"""The pointer store port: the only mutable state of the catalog, and the plain values that cross it.

Every change is a list of operations applied in ONE transaction (`transact`): all or nothing, durable when it returns.
So a pointer swap, its instant and its idempotency record can never be seen apart. Reads see every transaction
that returned before they began, from whichever replica it came.

Failures are errors of `metaserver.errors`; a transaction that raised anything but `CommitUnknown` changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec

NamespacePath = tuple[str, ...]
POSITION = re.compile(r"[0-9]{20}|[0-9a-f]{36}")
"""The whole of a timeline position, as SQLite or PostgreSQL writes it: one that was cut off would sort wrongly."""


class EntryKind(StrEnum):
    """What a name can stand for. Tables and views share one space of names; functions have their own."""

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
    """Rises by one with each change of the properties; what `ReplaceNamespaceProperties` compares."""


class Entry(msgspec.Struct, frozen=True):
    """A name and where it points. `metadata_location` is the table pointer itself."""

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
    """Rises with each change of the table's registered index files. Filled in where names are read; 0: there is none,
    or the entry was not read by its name."""


class DroppedEntry(msgspec.Struct, frozen=True):
    """A soft-deleted table or view: restorable until `expires_ms`, then purged (files too where `purge`)."""

    id: str
    entry: Entry
    purge: bool
    dropped_ms: int
    expires_ms: int
    who: str


class Instant(msgspec.Struct, frozen=True, omit_defaults=False):
    """One thing that happened, or is happening, to a table, view or namespace."""

    id: str
    """UUIDv7, chosen by the writer before the transaction: reading it back settles a lost reply."""
    action: str
    """create, commit, replace, drop, undrop, purge, rename, register, unregister, … (field's words, kebab-case)."""
    state: InstantState
    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    """UUID of the table or view; stays the same over renames."""
    requested_ms: int
    completed_ms: int | None = None
    who: str = "anonymous"
    snapshot_id: int | None = None
    metadata_location: str | None = None
    fingerprint: str | None = None
    """Hash of the request, where the request is one that can only happen once (it adds a snapshot)."""
    summary: dict[str, Any] = {}
    position: str = ""
    """Opaque, set by the store: where a reader continues (`instants(since=…)`). Sorts as the readers see it.
    It changes when the state does."""


class IndexFileState(StrEnum):
    LIVE = "live"
    SUPERSEDED = "superseded"
    """Replaced by others; kept until nobody reads it any more."""
    QUARANTINED = "quarantined"
    """Found damaged; kept for whoever wants to know why."""


class RegisteredIndexFile(msgspec.Struct, frozen=True):
    """A registered index file. The file says all this itself: the registry can be made anew from storage."""

    uuid: str
    """The table's."""
    location: str
    definition: str
    """The definition's id (`metaserver.index.files.definitions`)."""
    kind: str
    level: int
    files: int
    """Data files it describes."""
    rows: int
    size_bytes: int
    snapshot_id: int | None
    """The snapshot whose files it was built for; None where that is not known (one merged from others)."""
    created_ms: int
    state: IndexFileState = IndexFileState.LIVE
    changed_ms: int = 0
    reason: str | None = None
    """Why it is quarantined."""


class ProducerState(msgspec.Struct, frozen=True):
    """How far a producer came with a table: its last sequence, and the snapshot that it led to."""

    sequence: int
    snapshot_id: int | None
    changed_ms: int


class PlanTable(msgspec.Struct, frozen=True):
    """A name under which a table is to be read as one plan left it, and the files that were written for that."""

    id: str
    namespace: NamespacePath
    name: str | None
    """None once it is retired: the name is gone, the files are to go."""
    of_name: str
    """The table's name."""
    uuid: str
    """The table's."""
    location: str
    """Of the metadata file."""
    files: tuple[str, ...]
    """All that was written for it, the metadata file last."""
    snapshot_id: int
    file_count: int
    """Data files that the plan kept, and their bytes."""
    size_bytes: int
    considered_count: int
    """Data files that it chose from, and their bytes; None where not all manifests were read."""
    considered_bytes: int | None
    expires_ms: int
    audience: str | None = None
    """Value of `X-Seamark-Plans` under which the plan was made: only requests with the same value reach the plan. None:
    a plan that has a name for every reader of the table."""
    shown_id: int | None = None
    """Id of the snapshot that shows the plan to the audience; None for a plan view."""
    shown: str | None = None
    """That snapshot, as JSON."""


class ShownPlan(msgspec.Struct, frozen=True):
    """A plan snapshot that loadTable adds to its answer."""

    shown_id: int
    snapshot: str
    """JSON."""


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The first answer to a request that carried an idempotency key."""

    key: str
    scope: str
    """Principal, method and path: a key reused elsewhere is another client's mistake."""
    request_hash: str
    status: int
    body: bytes | None = None
    """The answer itself, where it is small …"""
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
    """A bearer token's public half.

    `digest` is SHA-256 of the secret (256 random bits, so no salt or stretching is owed)."""

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
    """In one spelling for each place, so that text that differs is another place."""
    shared: bool = False
    """Others may claim it as shared, too: a folder for files that several tables name."""
    shown: str = ""
    """As the client wrote it, and what it is; for messages."""
    what: str = "The location"


class Claim(msgspec.Struct, frozen=True):
    """`uuid` stands for a table, view or function that has files at `location` (a key) or below."""

    location: str
    uuid: str
    shared: bool
    allowed: bool = False
    """It claims nothing there, but may name others' files."""


# Operations of a transaction -----------------------------------------------------------------------------------------


class CreateNamespace(msgspec.Struct, frozen=True):
    """AlreadyExists if it does; NoSuchNamespace if its parent does not exist."""

    path: NamespacePath
    properties: dict[str, str]


class ReplaceNamespaceProperties(msgspec.Struct, frozen=True):
    """CommitConflict unless the stored version is `expected_version`; NoSuchNamespace if it is gone."""

    path: NamespacePath
    expected_version: int
    properties: dict[str, str]


class DropNamespace(msgspec.Struct, frozen=True):
    """NamespaceNotEmpty while it has entries or child namespaces; NoSuchNamespace if it is gone."""

    path: NamespacePath


class CreateEntry(msgspec.Struct, frozen=True):
    """AlreadyExists (message says whether a table or a view has the name); NoSuchNamespace without its namespace."""

    entry: Entry


class SwapPointer(msgspec.Struct, frozen=True):
    """CommitConflict unless the entry exists with this uuid and points at `expected_location`.

    NoSuchTable / NoSuchView if the name is gone."""

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
    """If given: CommitConflict when the name has become another's meanwhile."""


class DropEntry(msgspec.Struct, frozen=True):
    """Removes the name; index files and producers go with the last that leads to the table, live or dropped.

    With `keep`, remembers it there as a DroppedEntry (its `entry` is filled in by the store from the row).
    CommitConflict if `expected_location` is given and is not where it points."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    expected_location: str | None = None
    keep: DroppedEntry | None = None
    uuid: str | None = None
    """If given: CommitConflict when the name has become another's meanwhile."""


class RestoreEntry(msgspec.Struct, frozen=True):
    """Brings a dropped entry back under (namespace, name).

    NotFound if expired or unknown; AlreadyExists / NoSuchNamespace as for CreateEntry; CommitConflict where something
    else lies in its place by now."""

    dropped_id: str
    namespace: NamespacePath
    name: str


class ForgetDropped(msgspec.Struct, frozen=True):
    """Removes a dropped entry for good (before its purge). NotFound if it is gone: another replica was first.
    With `unshared`, CommitConflict while another entry, live or dropped, has its uuid: it has the same files."""

    dropped_id: str
    unshared: bool = False


class ClaimLocations(msgspec.Struct, frozen=True):
    """What the UUID stands for lies at these locations, besides those where it lay. BadRequest for one that overlaps
    (is, holds, or lies in) another's: live, dropped, or being purged."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]
    fresh: bool = False
    """If set: BadRequest where the UUID has claims already."""
    namespace: NamespacePath = ()
    """Its name, if given: it may lie just where something lies that was dropped by this name."""
    name: str = ""
    checked: bool = True
    """If not: no matter whom they overlap; for what existed before claims did."""
    returns: bool = False
    """If set: what was dropped may come back by it. CommitConflict where something live lies just where it lies."""


class AllowLocations(msgspec.Struct, frozen=True):
    """The table may name files at these locations, whosever they are, and at no others that were allowed before."""

    uuid: str
    locations: tuple[ClaimedLocation, ...]


class ReleaseLocations(msgspec.Struct, frozen=True):
    """Removes the claims of what no name, live or dropped, leads to any more."""

    uuid: str


class ReplaceIndexFiles(msgspec.Struct, frozen=True):
    """Adds live index files of one definition and supersedes others. CommitConflict unless all of `remove` are live.

    One whose `add` is there already, in whatever state, was done before: nothing changes. NoSuchTable if no live name
    leads to the table. The result of this and of the next two is the new index version."""

    uuid: str
    definition: str
    add: tuple[RegisteredIndexFile, ...]
    remove: tuple[str, ...]
    """Locations."""
    now_ms: int


class QuarantineIndexFile(msgspec.Struct, frozen=True):
    """A live one is used no more; any other stays what it is. NotFound if it is not registered."""

    uuid: str
    location: str
    reason: str
    now_ms: int


class ForgetIndexFile(msgspec.Struct, frozen=True):
    """Removes the row of one that is not live (its file is gone, or about to go). CommitConflict if it is live."""

    uuid: str
    location: str
    now_ms: int


class AdvanceProducer(msgspec.Struct, frozen=True):
    """The producer has committed `sequence`. CommitConflict unless that is above its last; any will do as its first.

    NoSuchTable if no live name leads to the table. Rows stay until the table's last name goes. None is forgotten for
    its age: a repeat that comes late would be taken for something new, and its rows be there twice. There are never
    more of them than commits, each of which leaves a longer row in the timeline."""

    uuid: str
    """The table's."""
    producer: str
    sequence: int
    snapshot_id: int | None
    """None: it led to no snapshot, since there was nothing to change."""
    now_ms: int


class KeepPlanTable(msgspec.Struct, frozen=True):
    """The plan has its name, unless another has it: that one's lease lasts as long as this one's then, at least.

    The result is the PlanTable that has the name."""

    plan: PlanTable


class RenewPlanTable(msgspec.Struct, frozen=True):
    """Its lease lasts until then, at least. The result is a bool: False where it is retired or forgotten."""

    id: str
    expires_ms: int


class LeasePlanSnapshots(msgspec.Struct, frozen=True):
    """Sets the leases of an audience's plan snapshots of one table: no lease becomes shorter, except that `withdraw`
    ends them at `expires_ms`. The result is the number of plans that were found."""

    namespace: NamespacePath
    of_name: str
    audience: str
    shown_ids: tuple[int, ...]
    expires_ms: int
    withdraw: bool = False


class DropPlanSnapshots(msgspec.Struct, frozen=True):
    """Retires the plan snapshots of a table with these ids, whoever made them. The result is their number."""

    namespace: NamespacePath
    of_name: str
    shown_ids: tuple[int, ...]


class RetirePlanTables(msgspec.Struct, frozen=True):
    """Takes their names from those whose lease ended before then, the oldest first. The result is how many."""

    before_ms: int
    limit: int


class ForgetPlanTable(msgspec.Struct, frozen=True):
    """Removes the row of one that is retired, whose files are gone. One that has its name stays."""

    id: str


class RecordInstant(msgspec.Struct, frozen=True):
    instant: Instant


class MoveInstant(msgspec.Struct, frozen=True):
    """Changes state and what goes with it.

    CommitConflict unless the stored state is `expected`; it gets a new position."""

    id: str
    expected: InstantState
    state: InstantState
    now_ms: int
    snapshot_id: int | None = None
    summary: dict[str, Any] | None = None


class SaveIdempotency(msgspec.Struct, frozen=True):
    """Raises IdempotencyTaken if the key is taken.

    The whole transaction is undone then and the first answer is what counts."""

    record: IdempotencyRecord


class SaveMetricsReport(msgspec.Struct, frozen=True):
    """Of the table's reports, the newest `keep` stay; None keeps all."""

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
    """NotFound if there is none."""

    grant: Grant


class SaveAudit(msgspec.Struct, frozen=True):
    records: tuple[AuditRecord, ...]


class SaveCursor(msgspec.Struct, frozen=True):
    """Remembers how far a named consumer of the timeline (a webhook) came.

    CommitConflict unless the stored position is `expected` (None: no row yet), so that two replicas cannot both
    deliver on."""

    consumer: str
    expected: str | None
    position: str


class TakeLease(msgspec.Struct, frozen=True):
    """`holder` gets or renews the named lease until `until_ms`.

    CommitConflict while another holder's has not ended at `now_ms`.
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
    """Another request with the same key was recorded first: an outcome to branch on, never shown to a client."""


class InstantFilter(msgspec.Struct, frozen=True):
    """All given conditions must hold. `since` is an exclusive position, as found in an Instant."""

    since: str | None = None
    uuid: str | None = None
    namespace: NamespacePath | None = None
    name: str | None = None
    action: str | None = None
    state: InstantState | None = None
    newest_first: bool = False
    archived: bool = True
    """Also look in the archive."""


class PointerStore(Protocol):
    """Opened and closed by its factory (an async context manager); safe for use by many tasks of one event loop."""

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        """Applies all or none; durable on return. One result per operation (None unless the operation says otherwise).

        CommitUnknown: the connection was lost while committing; read the instant back.
        RetryLater: queue full or database away."""

    @property
    def transacting(self) -> int:
        """Transactions waiting or under way in this process; for metrics."""

    async def ping(self) -> None:
        """RetryLater when the database does not answer."""

    async def namespace(self, path: NamespacePath) -> Namespace | None: ...

    async def namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[Namespace]:
        """Direct children of `parent` in code-point order of their last level, those greater than `after`."""

    async def entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None: ...

    async def entries(self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int) -> list[Entry]:
        """In code-point order of name, those greater than `after`."""

    async def dropped(self, namespace: NamespacePath | None, after: str | None, limit: int) -> list[DroppedEntry]:
        """In order of id, those greater than `after`."""

    async def dropped_entry(self, dropped_id: str) -> DroppedEntry | None: ...

    async def dropped_expired(self, now_ms: int, limit: int) -> list[DroppedEntry]: ...

    async def names_of(self, uuid: str) -> int:
        """How many names, live and dropped, lead to the table with this uuid: more than one share its files."""

    async def claims(self, uuid: str) -> list[Claim]:
        """Where it lies, and lay."""

    async def claims_overlapping(self, keys: Sequence[str], uuid: str, limit: int) -> list[Claim]:
        """Those of others than `uuid` that overlap one of `keys`: of those that hold it, all; of those within, the
        first `limit`."""

    async def gave_up(self, uuid: str, namespace: NamespacePath, name: str) -> bool:
        """Whether it is dropped, by this name, and nothing live has its UUID: what is made anew by that name may lie
        where it lies."""

    async def unclaimed(self, after: str, limit: int) -> list[Entry]:
        """Live and dropped names of what has claimed nothing, in order of uuid, those greater than `after`."""

    async def indexed_tables(self, after: str | None, limit: int) -> list[Entry]:
        """Entries of tables that have, or had, index files, in order of uuid: all names of up to `limit` tables whose
        uuids are greater than `after`."""

    async def index_files_unused(self, before_ms: int, limit: int) -> list[RegisteredIndexFile]:
        """Superseded and quarantined ones that became so before then, the oldest change first."""

    async def index_files(self, uuid: str) -> list[RegisteredIndexFile]:
        """The table's, in every state, oldest first."""

    async def producer(self, uuid: str, producer: str) -> ProducerState | None:
        """None: it has committed nothing to this table."""

    async def plan_table(self, namespace: NamespacePath, name: str) -> PlanTable | None:
        """By its own name, whether or not its lease has ended."""

    async def plan_snapshots(
        self, namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
    ) -> list[ShownPlan]:
        """Of the table, those of the audience whose lease has not ended: in order of id, the `limit` of them whose
        leases end last."""

    async def plan_table_count(self, now_ms: int) -> int:
        """Those whose leases have not ended."""

    async def plan_tables_retired(self, after: str | None, limit: int) -> list[PlanTable]:
        """In order of id, those greater than `after`."""

    async def instant(self, instant_id: str) -> Instant | None: ...

    async def instant_by_fingerprint(self, uuid: str, fingerprint: str) -> Instant | None:
        """The newest completed one."""

    async def instants(self, where: InstantFilter, limit: int) -> list[Instant]:
        """In order of position. A reader that continues from the last position it saw misses nothing,
        however writers interleave."""

    async def archive_instants(self, keep: int, limit: int) -> int:
        """Moves all but each table's newest `keep` finished instants to the archive, at most `limit` a call.

        Returns how many moved."""

    async def idempotency(self, key: str, now_ms: int) -> IdempotencyRecord | None:
        """None once expired."""

    async def metrics_reports(self, uuid: str | None, since: str | None, limit: int) -> list[MetricsReport]:
        """In order of id (UUIDv7), those greater than `since`."""

    async def token_by_digest(self, digest: str) -> Token | None: ...

    async def tokens(self) -> list[Token]: ...

    async def grants(self, principal: str | None) -> list[Grant]: ...

    async def audit(self, since: str | None, limit: int) -> list[AuditRecord]:
        """In order of id, those greater than `since`."""

    async def cursor(self, consumer: str) -> str | None: ...

    async def secret(self, name: str) -> bytes | None:
        """The named secret that all replicas share, as it was stored: encrypted."""

    async def swap_secret(self, name: str, expected: bytes | None, value: bytes) -> bytes:
        """Stores `value` if the secret is `expected` (None: there is none). Returns what is stored afterwards: another
        replica's where that was first, empty where the expected one is gone."""

    async def prune(self, now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> int:
        """Removes expired idempotency records and audit records and metrics reports older than the given times.

        Returns how many."""
