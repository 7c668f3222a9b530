"""The values in the pointer store: names, instants, index files, plan tables, tokens, claims and others."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from seamark.formats.runtime.errors import BadRequest

NamespacePath = tuple[str, ...]
POSITION = re.compile(r"[0-9]{20}|[0-9a-f]{36}")
"""Matches a complete timeline position of SQLite or PostgreSQL. A truncated position would sort wrongly."""


class EntryKind(StrEnum):
    """The kinds of named entries, and of the subjects of instants.

    In a namespace, a table and a view cannot have the same name. Functions have their own names. A namespace is not an
    entry, but it has instants.
    """

    TABLE = "table"
    VIEW = "view"
    FUNCTION = "function"
    NAMESPACE = "namespace"


class InstantState(StrEnum):
    REQUESTED = "requested"
    INFLIGHT = "inflight"
    COMPLETED = "completed"
    ROLLED_BACK = "rolled_back"


class Namespace(msgspec.Struct, frozen=True):
    path: NamespacePath
    properties: dict[str, str]
    version: int = 1
    """The version, which increases by one with each change of the properties. Conditional changes compare it."""


class Entry(msgspec.Struct, frozen=True):
    """A name, and the location of its current metadata file: the pointer."""

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    metadata_location: str
    previous_location: str | None = None
    version: int = 1
    """The version, which increases by one with each swap of the pointer."""
    created_ms: int = 0
    updated_ms: int = 0
    index_version: int = 0
    """The version of the table's registered index files, which increases when they change.

    It is 0 if the table has no index files, or if the entry was not read by its name.
    """
    flushed: str = ""
    """The flushed offset of each shard of a stream table, as `shard:offset` separated by commas, in any order.

    The same statement reads the offsets and the pointer, so that both belong to the same state. For tables that are
    not stream tables, it is empty.
    """

    def parse_flushed_offsets(self) -> dict[int, int]:
        """Return the flushed offsets by shard."""
        parts = (part.split(":") for part in self.flushed.split(",") if part)
        return {int(shard): int(offset) for shard, offset in parts}


class DroppedEntry(msgspec.Struct, frozen=True):
    """A dropped table, view or function.

    It can be restored until `expires_ms`. Then it is purged, with its files if `purge` is true. If files of the entry
    remain after the purge, the entry is retained: it cannot be restored, and keeps its locations.
    """

    id: str
    entry: Entry
    purge: bool
    dropped_ms: int
    expires_ms: int
    principal_name: str
    is_retained: bool = False


def make_retained_id(uuid: str) -> str:
    """Return the id of an entry that was removed without being kept as a dropped entry, but whose files remain.

    Such an entry is retained: it cannot be restored, and keeps its locations. A dropped entry has its own id.
    The id differs from the ids of all dropped entries, even if a client chooses such an id as the UUID of a table.
    """
    return f"retained-{uuid}"


class Instant(msgspec.Struct, frozen=True, omit_defaults=False):
    """A past or current event of a table, view, function or namespace."""

    id: str
    """A UUIDv7, which the writer chooses before the transaction.

    If the reply is lost, the writer reads the instant with this id to determine the outcome.
    """
    action: str
    """The action in kebab-case: create, commit, drop, undrop, purge, rename, register, unregister, update, …"""
    state: InstantState
    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    """The UUID of the table or view, which a rename does not change. It is empty for a namespace."""
    requested_ms: int
    completed_ms: int | None = None
    principal_name: str = "anonymous"
    snapshot_id: int | None = None
    metadata_location: str | None = None
    fingerprint: str | None = None
    """The hash of a request that can be applied only once, because it adds a snapshot."""
    summary: dict[str, Any] = {}
    position: str = ""
    """The position in the timeline, from which a reader continues (`InstantFilter.since`). The store sets it.

    Positions are opaque, and sort in the order in which instants become visible. An instant gets a new position when
    its state changes.
    """


class IndexFileState(StrEnum):
    LIVE = "live"
    SUPERSEDED = "superseded"
    """The state of a file that other index files have replaced. The file is kept until no plan reads it."""
    QUARANTINED = "quarantined"
    """The state of a damaged file, which is kept for analysis."""


class RegisteredIndexFile(msgspec.Struct, frozen=True):
    """A registered index file.

    The registry can be rebuilt from storage, because the index file contains the values of the immutable fields.
    """

    uuid: str
    """The UUID of the table."""
    location: str
    definition: str
    """The id of the definition (`seamark.formats.index.definitions`)."""
    kind: str
    level: int
    """The level: 0 for a file that a build wrote. Each merge of files adds 1."""
    files: int
    """The number of data files that the index file describes."""
    rows: int
    size_bytes: int
    snapshot_id: int | None
    """The snapshot for which the file was built, or None if it is unknown, as for a merged file."""
    created_ms: int
    state: IndexFileState = IndexFileState.LIVE
    changed_ms: int = 0
    reason: str | None = None
    """The reason for the quarantine."""


class ProducerState(msgspec.Struct, frozen=True):
    """The last sequence number that a producer has committed to a table, and the snapshot of this commit."""

    sequence: int
    snapshot_id: int | None
    changed_ms: int


class PlanJoin(msgspec.Struct, frozen=True):
    """A table on whose rows the plan of another table depends."""

    table: tuple[str, ...]
    """The levels of the namespace, and the name."""
    uuid: str


class StoredPlanTable(msgspec.Struct, frozen=True):
    """A name under which engines read only the files that a plan of a table selected."""

    id: str
    namespace: NamespacePath
    name: str | None
    """The name, or None for a retired plan, whose files are to be deleted. Another plan may then use the name."""
    of_name: str
    """The name of the planned table."""
    uuid: str
    """The UUID of the table."""
    location: str
    """The location of the metadata file."""
    files: tuple[str, ...]
    """All files that were written for the plan. The metadata file is last."""
    snapshot_id: int
    file_count: int
    """The number of data files in the plan. `size_bytes` is their total size."""
    size_bytes: int
    considered_count: int
    """The number of data files of the snapshot."""
    considered_bytes: int | None
    """The total size of the data files of the snapshot, or None if not all manifests were read."""
    expires_ms: int
    audience: str | None = None
    """The value of `X-Seamark-Plans` with which the plan was requested, or None if all readers may use the plan's name.

    Only requests with the same value can use a plan with an audience.
    """
    plan_snapshot_id: int | None = None
    """The id of the plan snapshot that makes the plan visible to the audience, or None for a plan view."""
    snapshot_or_fingerprint: str | None = None
    """The plan snapshot as JSON. For a plan view, it is a fingerprint of the plan's metadata instead."""
    joined_tables: tuple[PlanJoin, ...] | None = ()
    """The other tables on whose rows the plan depends.

    None means that they are unknown, because an earlier version stored the plan.
    """


class PlanSnapshot(msgspec.Struct, frozen=True):
    """A plan snapshot that loadTable adds to its answer."""

    id: int
    snapshot: str
    """The snapshot as JSON."""
    joined_tables: tuple[PlanJoin, ...] | None = ()
    """The other tables on whose rows the plan depends, as in `StoredPlanTable`."""


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The first answer to a request with an idempotency key."""

    key: str
    scope: str
    """The principal, method and path of the request. A client must not use the key for a different request."""
    request_hash: str
    status: int
    body: bytes | None = None
    """The answer if it is small, otherwise None."""
    metadata_location: str | None = None
    """The metadata file from which the answer is rendered if `body` is None."""
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
    principal_name: str
    report: dict[str, Any]


class ColumnReads(msgspec.Struct, frozen=True):
    """Reads of one column of a table.

    Attributes:
        oldest_age_d: The age in whole days of the oldest partition that was read, or `ALL_AGES` if the whole table was
            read.
    """

    column_id: int
    """The field id of the column, or a constant in place of an id.

    `EVERY_COLUMN`: all or very many columns. `UNKNOWN_COLUMNS`: the reads that named no columns. `NAMED_COLUMNS`: the
    reads that named their columns.
    """
    oldest_age_d: int
    reads: int
    first_day: int
    """The day of the first of these reads, in days since the epoch."""
    last_day: int


EVERY_COLUMN, UNKNOWN_COLUMNS, NAMED_COLUMNS = 0, -1, -2
"""Values in place of a column id.

`EVERY_COLUMN` means that a read named all, or very many, columns. `UNKNOWN_COLUMNS` counts reads that named no columns,
and `NAMED_COLUMNS` counts reads that named their columns.
"""
ALL_AGES = 1 << 30
"""The value of `oldest_age_d` if the whole table was read. It is greater than every age."""


OTHER_SHAPES = ""
"""The fingerprint of the shape that counts all statements whose own shapes exceed a limit."""


class QuerySums(msgspec.Struct, frozen=True):
    """Sums over statements of one shape.

    Attributes:
        statements: The number of statements.
        files_in: The number of files before pruning.
        files_left: The number of files after pruning.
        sized: The number of sized statements, whose bytes are known.
        bytes_in: The bytes of the files before pruning, for sized statements.
        bytes_left: The bytes of the files after pruning, for sized statements.
        plan_us: The duration of planning in microseconds.
        timed: The number of timed statements, whose engine has reported its time.
        run_us: The time of the engine in microseconds, for timed statements.
        timed_files: The number of files after pruning, for timed statements.
        timed_bytes: The bytes of the files after pruning, for timed statements.
    """

    statements: int
    files_in: int
    files_left: int
    sized: int
    bytes_in: int
    bytes_left: int
    plan_us: int
    timed: int = 0
    run_us: int = 0
    timed_files: int = 0
    timed_bytes: int = 0


class QueryRecord(msgspec.Struct, frozen=True):
    """Statements of one shape that a server has seen.

    Attributes:
        fingerprint: The digest of the shape.
        owner: A digest of the principal. The number of shapes of each owner is limited.
        shape: The shape as JSON (`history/shapes.py`). If it is empty, the sums are added only if the shape is stored.
        samples: Samples of the compared values as JSON (`history/samples.py`). The store keeps the newest samples.
    """

    fingerprint: str
    owner: str
    shape: str
    samples: str
    sums: QuerySums


class QueryShapeSums(msgspec.Struct, frozen=True):
    """The sums of all statements of one shape, on one table and in a period.

    Statements have the same shape if they differ only in the compared values.

    Attributes:
        fingerprint: The digest of the shape.
        shape: The shape as JSON (`history/shapes.py`).
        samples: The newest samples of the compared values, as JSON (`history/samples.py`).
        sums: The sums over the statements.
        first_hour: The first hour of the period with such a statement, in hours since the epoch.
        last_hour: The last hour of the period with such a statement.
    """

    fingerprint: str
    shape: str
    samples: str
    sums: QuerySums
    first_hour: int
    last_hour: int


NAMESPACES_MAX = 64
"""The maximum number of namespaces in the filter of `PointerStore.load_query_totals`."""


class QueryTotals(msgspec.Struct, frozen=True):
    """The sums of a table's query history over a period, with a name of the table."""

    uuid: str
    namespace: NamespacePath
    name: str
    shapes: int
    sums: QuerySums


class AppliedAdvice(msgspec.Struct, frozen=True):
    """A proposal of the advisor that was applied.

    Attributes:
        advice: The proposal, its prediction and the measurement, as JSON.
    """

    uuid: str
    id: str
    applied_ms: int
    advice: str


class StoredWarehouse(msgspec.Struct, frozen=True):
    """A further warehouse of the server, besides its own. The name of its database contains `id`."""

    name: str
    id: str
    """A UUID in 32 hexadecimal digits, which is new even if a dropped warehouse had the same name."""
    location: str
    location_key: str
    """The canonical form of the location. Two locations overlap only if their keys are equal or nested."""
    settings: dict[str, Any]
    """The settings with values that differ from those of the server."""
    credentials: bytes | None
    """The encrypted secret settings, or None if the warehouse uses the credentials of the server."""
    created_ms: int
    principal_name: str
    """The principal that created the warehouse."""
    version: int = 1
    """The version, which increases by one with each change of the settings."""


class AccessToken(msgspec.Struct, frozen=True):
    """The public part of a bearer token.

    `digest` is the SHA-256 of the secret. The secret has 256 random bits, so neither salt nor key stretching is
    needed.
    """

    id: str
    name: str
    """The name of the principal."""
    digest: str
    created_ms: int
    expires_ms: int | None = None
    revoked_ms: int | None = None


SERVER, NAMESPACE = "server", "namespace"
TABLE, VIEW, FUNCTION = "table", "view", "function"
"""The kinds of objects on which principals have grants. The namespace without levels means the warehouse."""


class GrantLimits(msgspec.Struct, frozen=True):
    """The maximum numbers of grants and denials. Grants that make a principal the owner of an entry do not count."""

    of_object: int
    """The maximum number of grants on one object."""
    of_principal: int
    """The maximum number of grants of one principal."""
    of_principal_below: int
    """The maximum number of grants of one principal on one top-level namespace and on everything in it."""
    below: int
    """The maximum number of grants of all principals on one top-level namespace and on everything in it."""


class Grant(msgspec.Struct, frozen=True):
    """A privilege or a role of a principal on an object and on everything in it.

    A principal is a login, a group, or a role of the operator (`role:analysts`). The role of a grant is a privilege
    (`read`), a fixed role (`reader`), or a role of the operator, of which the principal is then a member.
    """

    principal: str
    role: str
    namespace: NamespacePath = ()
    """The namespace, or the namespace of the table, view or function. An empty path means the whole catalog."""
    kind: str = NAMESPACE
    name: str = ""
    """The name of the table, view or function, or an empty text for other kinds."""
    deny: bool = False
    """Whether the privilege is denied. A denial overrides all grants."""

    def describe(self) -> str:
        """Return a description of the grant for messages."""
        if self.kind == SERVER:
            place = "the server"
        elif self.name:
            place = f"{self.kind} {'.'.join((*self.namespace, self.name))}"
        else:
            place = ".".join(self.namespace) or "the whole catalog"
        return f"{'denial of ' if self.deny else ''}{self.role} for {self.principal} on {place}"


STREAM_GATE = "stream gate "
"""The prefix of the name of the lease of a process that changes how rows of a stream table are written.

The UUID of the table follows. The row of the lease is removed with the table's rows.
"""
STREAM_OWNER_PROTOCOL = 0
"""The protocol version of a process that may own stream tables, but that other replicas cannot reach."""


class Replica(msgspec.Struct, frozen=True):
    """A server that shares the database with others, and the address at which other replicas reach it."""

    address: str
    """The host:port at which the replica answers other replicas."""
    weight: int
    """The weight of the replica. Its share of the files that the replicas cache for each other is its weight divided by
    the sum of all weights."""
    version: str
    """The version of the replica's program."""
    protocol: int
    """The version of the protocol that the replica uses with other replicas."""
    started_ms: int
    expires_in_ms: int = 0
    """The remaining time of the replica's lease, by the clock of the database. The store sets it in reads."""


class AuditRecord(msgspec.Struct, frozen=True, rename="kebab"):
    """An entry of the audit log, as the API returns it."""

    id: str
    at_ms: int
    principal_name: str = msgspec.field(name="who")
    action: Annotated[str, msgspec.Meta(description="Operation id, such as commitTable.")]
    resource: Annotated[str, msgspec.Meta(description="Path of the request.")]
    outcome: Annotated[str, msgspec.Meta(description="allowed, denied, or failed:<kind>.")]
    status: int
    request_id: str
    remote: str = ""


class ClaimedLocation(msgspec.Struct, frozen=True):
    """A location that an entry claims in a `ClaimLocations`."""

    key: str
    """The canonical form of the location. Different locations have different keys."""
    shared: bool = False
    """Whether the location is a folder for files of several tables, which other entries may also claim as shared."""
    display_form: str = ""
    """The location as the client wrote it, for messages."""
    subject: str = "The location"
    """The name of the location for messages, such as the property that contains it."""

    def make_overlap_error(self) -> BadRequest:
        """Return the error for a location that overlaps a location of another entry."""
        return BadRequest(
            f"{self.subject} {self.display_form!r} overlaps the files of another table, view or function; choose "
            "another, or omit it, and the server chooses one. A dropped entry keeps its location until it is purged "
            "or its retention ends"
        )


class Claim(msgspec.Struct, frozen=True):
    """A stored claim: the record that files of an entry are at a location or below it.

    Attributes:
        location: The key of the location, by which locations are compared. `spelled` is the location itself.
        uuid: The UUID of the entry.
        shared: Whether the claim is shared. Shared claims of several entries may contain each other, or be equal.
    """

    location: str
    uuid: str
    shared: bool
    allowed: bool = False
    """Whether the entry does not claim the location, but may name files of other entries there."""
    spelled: str = ""
    """The claimed location, of which `location` is the key. The text is empty for claims of earlier versions."""
