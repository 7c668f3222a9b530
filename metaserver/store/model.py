"""The values that the pointer store keeps: names, instants, index files, plan tables, tokens, claims."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from seamark.formats.runtime.errors import BadRequest

NamespacePath = tuple[str, ...]
POSITION = re.compile(r"[0-9]{20}|[0-9a-f]{36}")
"""A complete timeline position of SQLite or PostgreSQL: a truncated position would sort wrongly."""


class EntryKind(StrEnum):
    """The kinds of named entries.

    Tables and views share one set of names; functions have another.
    """

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
    """Increases by one with each change of the properties; `ReplaceNamespaceProperties` compares it."""


class Entry(msgspec.Struct, frozen=True):
    """A name and its metadata file.

    `metadata_location` is the table pointer.
    """

    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    metadata_location: str
    previous_location: str | None = None
    version: int = 1
    """Increases by one with each swap."""
    created_ms: int = 0
    updated_ms: int = 0
    index_version: int = 0
    """The version of the table's registered index files, which increases with each change of them.

    It is 0 if the table has no index files, or if the entry was not read by its name.
    """
    flushed: str = ""
    """The flushed offset of each shard of a stream table, as `shard:offset` separated by commas, in any order.

    One statement reads the offsets and the pointer, so both are from the same state. Empty for other tables.
    """

    def parse_flushed_offsets(self) -> dict[int, int]:
        """Return the flushed offsets by shard."""
        parts = (part.split(":") for part in self.flushed.split(",") if part)
        return {int(shard): int(offset) for shard, offset in parts}


class DroppedEntry(msgspec.Struct, frozen=True):
    """A dropped table or view. It can be restored until `expires_ms`, and is then purged (with its files if `purge`).

    If files of the entry are left after the purge, the entry is retained: it cannot be restored, and keeps its
    locations.
    """

    id: str
    entry: Entry
    purge: bool
    dropped_ms: int
    expires_ms: int
    principal_name: str
    is_retained: bool = False


def make_retained_id(uuid: str) -> str:
    """Return the id of an entry that is retained and was not dropped with an id.

    The id differs from all ids of dropped entries. This matters because clients choose the UUIDs of tables, and see
    the ids of dropped entries.
    """
    return f"retained-{uuid}"


class Instant(msgspec.Struct, frozen=True, omit_defaults=False):
    """An event of a table, view or namespace: past or in progress."""

    id: str
    """A UUIDv7 that the writer chooses before the transaction. After a lost reply, the writer reads the instant with
    this id to learn the outcome.
    """
    action: str
    """The action in kebab-case: create, commit, replace, drop, undrop, purge, rename, register, unregister, …"""
    state: InstantState
    kind: EntryKind
    namespace: NamespacePath
    name: str
    uuid: str
    """The UUID of the table or view. It does not change with renames."""
    requested_ms: int
    completed_ms: int | None = None
    principal_name: str = "anonymous"
    snapshot_id: int | None = None
    metadata_location: str | None = None
    fingerprint: str | None = None
    """Hash of a request that can be applied only once, because it adds a snapshot."""
    summary: dict[str, Any] = {}
    position: str = ""
    """The position from which a reader continues (`instants(since=…)`). The store sets it. Positions are opaque,
    sort in the order of visibility, and change when the state of the instant changes.
    """


class IndexFileState(StrEnum):
    LIVE = "live"
    SUPERSEDED = "superseded"
    """Other index files have replaced the file. It is kept until no plan reads it."""
    QUARANTINED = "quarantined"
    """The file was found damaged. It is kept for analysis."""


class RegisteredIndexFile(msgspec.Struct, frozen=True):
    """A registered index file.

    The file itself contains all of these fields, so the registry can be rebuilt from storage.
    """

    uuid: str
    """The UUID of the table."""
    location: str
    definition: str
    """The id of the definition (`seamark.formats.index.definitions`)."""
    kind: str
    level: int
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
    """The last sequence that a producer committed to a table, and the snapshot of that commit."""

    sequence: int
    snapshot_id: int | None
    changed_ms: int


class StoredPlanTable(msgspec.Struct, frozen=True):
    """A name under which engines read only the files that a plan of a table selected."""

    id: str
    namespace: NamespacePath
    name: str | None
    """The name.

    None after the plan is retired. Then another plan may use the name, and the files are to be deleted.
    """
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
    """The number of data files that the plan kept. The next field is their total size in bytes."""
    size_bytes: int
    considered_count: int
    """The number of data files of the snapshot, and below, their bytes. None if not all manifests were read."""
    considered_bytes: int | None
    expires_ms: int
    audience: str | None = None
    """The value of `X-Seamark-Plans` with which the plan was requested. Only requests with the same value can use
    the plan. If it is None, the plan has a name for all readers of the table.
    """
    plan_snapshot_id: int | None = None
    """The id of the plan snapshot that makes the plan visible to the audience, or None for a plan view."""
    snapshot_or_fingerprint: str | None = None
    """The plan snapshot as JSON. A plan view has a fingerprint of the table's metadata instead."""


class PlanSnapshot(msgspec.Struct, frozen=True):
    """A plan snapshot that loadTable adds to its answer."""

    id: int
    snapshot: str
    """The snapshot as JSON."""


class IdempotencyRecord(msgspec.Struct, frozen=True):
    """The first answer to a request with an idempotency key."""

    key: str
    scope: str
    """The principal, method and path of the request.

    Using the key for another request is an error of the client.
    """
    request_hash: str
    status: int
    body: bytes | None = None
    """The answer, if it is small. Otherwise `metadata_location` is set."""
    metadata_location: str | None = None
    """The metadata file from which the answer is rendered, if `body` is not set."""
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
        oldest_age_d: The age in whole days of the oldest partition that was read; `ALL_AGES` if the whole table was
            read.
    """

    column_id: int
    """The field id of the column, or `EVERY_COLUMN`, `UNKNOWN_COLUMNS` or `NAMED_COLUMNS`."""
    oldest_age_d: int
    reads: int
    first_day: int
    """The day of the first of these reads, in days since the epoch."""
    last_day: int


EVERY_COLUMN, UNKNOWN_COLUMNS, NAMED_COLUMNS = 0, -1, -2
"""Values in place of a column: the read named all or very many columns, did not name them, or named them."""
ALL_AGES = 1 << 30


OTHER_SHAPES = ""
"""The fingerprint of the shape that counts the statements for whose own shapes there is no room."""


class QuerySums(msgspec.Struct, frozen=True):
    """Sums over statements of one shape.

    Attributes:
        statements: The number of statements.
        files_in: The files of the snapshots that the statements read.
        files_left: The files that remained after pruning.
        sized: The number of statements whose bytes are known.
        bytes_in: The bytes of the snapshots that these statements read.
        bytes_left: The bytes that remained after pruning, for these statements.
        plan_us: The duration of planning, in microseconds.
        timed: The number of statements whose engine has reported its time.
        run_us: The time that the engine took for these statements, in microseconds.
        timed_files: The files that remained after pruning, for these statements.
        timed_bytes: The bytes that remained after pruning, for these statements.
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
        owner: A digest of the principal, by which the number of shapes is limited.
        shape: The shape as JSON (`history/shapes.py`). If it is empty, the sums are added only to a stored shape.
        samples: Samples of the compared values as JSON (`history/samples.py`). The store keeps the newest.
    """

    fingerprint: str
    owner: str
    shape: str
    samples: str
    sums: QuerySums


class QueryShapeSums(msgspec.Struct, frozen=True):
    """One shape of a table's query history, with its sums over a time."""

    fingerprint: str
    shape: str
    samples: str
    sums: QuerySums
    first_hour: int
    last_hour: int


NAMESPACES_MAX = 64
"""The namespaces by which `PointerStore.query_totals` filters at most."""


class QueryTotals(msgspec.Struct, frozen=True):
    """The sums of a table's query history over a time, with a name of the table."""

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
    """A further warehouse of the server. It has its own database, which `id` names."""

    name: str
    id: str
    """A UUID in 32 hexadecimal digits. A warehouse with the name of a dropped warehouse gets another id."""
    location: str
    location_key: str
    """The canonical form of the location: locations with different keys that are not nested do not overlap."""
    settings: dict[str, Any]
    """The settings in which the warehouse differs from the server."""
    credentials: bytes | None
    """The settings that are secret, encrypted. None if the warehouse uses the keys of the server."""
    created_ms: int
    principal_name: str
    """The principal that created the warehouse."""
    version: int = 1
    """Increases by one with each change of the settings."""


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
"""The kinds of objects on which principals have grants. A warehouse is the namespace without levels."""


class GrantLimits(msgspec.Struct, frozen=True):
    """The maximum numbers of grants and denials. The ownership of tables, views and functions does not count."""

    of_object: int
    """The number on one object."""
    of_principal: int
    """The number of one principal."""
    of_principal_below: int
    """The number of one principal in one namespace of the first level and everything in it."""
    below: int
    """The number of all principals in one namespace of the first level and everything in it."""


class Grant(msgspec.Struct, frozen=True):
    """A privilege or a role of a principal on an object and on everything in it.

    A principal is a login, a group, or a role of the operator (`role:analysts`). The role of a grant is a privilege
    (`read`), a fixed role (`reader`), or a role of the operator, of which the principal is then a member.
    """

    principal: str
    role: str
    namespace: NamespacePath = ()
    """The namespace, or the namespace of the table, view or function. The empty path is the whole catalog."""
    kind: str = NAMESPACE
    name: str = ""
    """The name of the table, view or function; empty for other kinds."""
    deny: bool = False
    """Whether the privilege is denied. A denial is stronger than all other grants."""

    def describe(self) -> str:
        """Return the grant for messages."""
        if self.kind == SERVER:
            place = "the server"
        elif self.name:
            place = f"{self.kind} {'.'.join((*self.namespace, self.name))}"
        else:
            place = ".".join(self.namespace) or "the whole catalog"
        return f"{'denial of ' if self.deny else ''}{self.role} for {self.principal} on {place}"


STREAM_OWNER_PROTOCOL = 0
"""The protocol of a lease that belongs to a process which may own stream tables. Other replicas cannot reach it."""


class Replica(msgspec.Struct, frozen=True):
    """A server that shares the database with others, and the address at which the other replicas reach it."""

    address: str
    """The host:port at which the replica answers other replicas."""
    weight: int
    """The weight of the replica. Its share of the files that the replicas cache for each other is its weight,
    divided by the sum of all weights.
    """
    version: str
    """The version of the replica's program."""
    protocol: int
    """The version of the protocol that the replica uses with other replicas."""
    started_ms: int
    expires_in_ms: int = 0
    """The remaining time of the replica's lease by the clock of the database.

    It is set when the replica is read.
    """


class AuditRecord(msgspec.Struct, frozen=True, rename="kebab"):
    """An entry of the audit log, as the API returns it."""

    id: str
    at_ms: int
    principal_name: str = msgspec.field(name="who")
    action: Annotated[str, msgspec.Meta(description="Operation id, e.g. commitTable.")]
    resource: Annotated[str, msgspec.Meta(description="Path of the request.")]
    outcome: Annotated[str, msgspec.Meta(description="allowed, denied, or failed:<kind>.")]
    status: int
    request_id: str
    remote: str = ""


class ClaimedLocation(msgspec.Struct, frozen=True):
    key: str
    """The canonical form of the location: different keys are different locations."""
    shared: bool = False
    """Whether other entries may also claim the location as shared: a folder for files of several tables."""
    display_form: str = ""
    """The location as the client wrote it, for messages."""
    subject: str = "The location"
    """The client's word for the location, for messages."""

    def make_overlap_error(self) -> BadRequest:
        """Return the error for a location that overlaps a location of another entry."""
        return BadRequest(
            f"{self.subject} {self.display_form!r} overlaps the files of another table, view or function; choose "
            "another, or "
            "omit it, and the server chooses one. A dropped entry keeps its location until it is purged or its "
            "retention ends"
        )


class Claim(msgspec.Struct, frozen=True):
    """A location (a key) that a table, view or function claims: the entry `uuid` has files at the location or below."""

    location: str
    uuid: str
    shared: bool
    allowed: bool = False
    """Whether the entry does not claim the location, but may name files of other entries there."""
    spelled: str = ""
    """The location in the form in which it was claimed; `location` is its key. Empty for claims of earlier versions."""
