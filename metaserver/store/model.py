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
    """Rises by one with each change of the properties; `ReplaceNamespaceProperties` compares it."""


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
    """Rises by one with each swap."""
    created_ms: int = 0
    updated_ms: int = 0
    index_version: int = 0
    """Rises with each change of the table's registered index files. Set when names are read; 0: there is none, or the
    entry was not read by its name."""
    flushed: str = ""
    """The flushed offset of each shard of a stream table, as `shard:offset` separated by commas, in any order. The
    statement that reads the pointer reads it, so both belong together. Empty for other tables."""

    def parse_flushed_offsets(self) -> dict[int, int]:
        """Return the flushed offsets by shard."""
        parts = (part.split(":") for part in self.flushed.split(",") if part)
        return {int(shard): int(offset) for shard, offset in parts}


class DroppedEntry(msgspec.Struct, frozen=True):
    """A dropped table or view: restorable until `expires_ms`, then purged (with its files if `purge`).

    An entry of which files are left after that is retained: it cannot be restored, and keeps its locations."""

    id: str
    entry: Entry
    purge: bool
    dropped_ms: int
    expires_ms: int
    who: str
    is_retained: bool = False


def make_retained_id(uuid: str) -> str:
    """Return the id of an entry that is retained and was not dropped with an id.

    It is no id of a dropped entry: clients choose the UUIDs of tables, and see those ids.
    """
    return f"retained-{uuid}"


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
    """A registered index file.

    The file contains all of this, so that the registry can be rebuilt from storage.
    """

    uuid: str
    """The UUID of the table."""
    location: str
    definition: str
    """The id of the definition (`seamark.formats.index.definitions`)."""
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


class StoredPlanTable(msgspec.Struct, frozen=True):
    """A name that reads a table as one plan selected it, and the files that were written for it."""

    id: str
    namespace: NamespacePath
    name: str | None
    """The name is None after the plan is retired: the name is free, and the files are to be deleted."""
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
    """The shown snapshot as JSON."""


class PlanSnapshot(msgspec.Struct, frozen=True):
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


class ColumnReads(msgspec.Struct, frozen=True):
    """Reads of one column of a table.

    Attributes:
        oldest_age_d: The age of the oldest partition that they read, in whole days; `ALL_AGES` for the whole table.
    """

    column_id: int
    """Or `EVERY_COLUMN`, `UNKNOWN_COLUMNS`, `NAMED_COLUMNS`."""
    oldest_age_d: int
    reads: int
    first_day: int
    """Days since the epoch, of the first of these reads."""
    last_day: int


EVERY_COLUMN, UNKNOWN_COLUMNS, NAMED_COLUMNS = 0, -1, -2
"""In the place of a column: the read named all columns, or very many; it did not say which; it said which."""
ALL_AGES = 1 << 30


class AccessToken(msgspec.Struct, frozen=True):
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
    """A role (reader, writer, admin) of a principal on a namespace and all namespaces below it.

    The empty path is the whole catalog.
    """

    principal: str
    role: str
    namespace: NamespacePath = ()


class Replica(msgspec.Struct, frozen=True):
    """A server that shares the database, and how other replicas reach it."""

    address: str
    """host:port on which it answers other replicas."""
    weight: int
    """Its share of the files that the replicas cache for each other, in proportion to the weights of all."""
    version: str
    """The version of the program."""
    protocol: int
    """The version of the protocol between replicas."""
    started_ms: int
    expires_in_ms: int = 0
    """The rest of its lease by the clock of the database. Set when it is read."""


class AuditRecord(msgspec.Struct, frozen=True, rename="kebab"):
    """An entry of the audit log, as the API returns it."""

    id: str
    at_ms: int
    who: str
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
    """Others may also claim it as shared: a folder for files of several tables."""
    shown: str = ""
    """The location as the client wrote it, and what it is, for messages."""
    subject: str = "The location"

    def make_overlap_error(self) -> BadRequest:
        """Return the error if it overlaps a location of another entry."""
        return BadRequest(
            f"{self.subject} {self.shown!r} overlaps the files of another table, view or function; choose another, or "
            "omit it, and the server chooses one. A dropped entry keeps its location until it is purged or its "
            "retention ends"
        )


class Claim(msgspec.Struct, frozen=True):
    """The table, view or function `uuid` has files at `location` (a key) or below."""

    location: str
    uuid: str
    shared: bool
    allowed: bool = False
    """It claims nothing there, but may name files of others."""
    spelled: str = ""
    """The location as it was claimed, of which `location` is the key; empty for claims of earlier versions."""
