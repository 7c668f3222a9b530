"""Converts rows to the port's values and back, with the column lists of both directions.

The rule: a column list has the order of the struct's fields, so that decoding is positional. A namespace is one TEXT,
its levels joined by U+001F, which no level may contain: comparing the text compares the levels.
"""

from __future__ import annotations

from typing import Any

import msgspec

from seamark.metaserver.errors import Corrupt
from seamark.metaserver.store.model import (
    AuditRecord,
    DroppedEntry,
    Entry,
    EntryKind,
    IdempotencyRecord,
    IndexFileState,
    Instant,
    InstantState,
    MetricsReport,
    Namespace,
    NamespacePath,
    PlanTable,
    ProducerState,
    RegisteredIndexFile,
    Token,
)
from seamark.metaserver.store.sql.statement import Row
from seamark.metaserver.wire import NAMESPACE_SEPARATOR

ENTRY = "kind, namespace, name, uuid, metadata_location, previous_location, version, created_ms, updated_ms"
NAMED = f"{ENTRY}, coalesce((SELECT version FROM index_versions WHERE uuid = entries.uuid), 0)"  # noqa: S608
"""The columns of entries in reads: with the index version, in the same statement."""
DROPPED = f"id, {ENTRY}, purge, dropped_ms, expires_ms, who"
INSTANT = (
    "id, action, state, kind, namespace, name, uuid, requested_ms, completed_ms, who, snapshot_id, "
    "metadata_location, fingerprint, summary, position"
)
IDEMPOTENCY = "key, scope, request_hash, status, body, metadata_location, expires_ms"
METRICS = "id, uuid, namespace, name, report_type, snapshot_id, received_ms, who, report"
TOKEN = "id, name, digest, created_ms, expires_ms, revoked_ms"  # noqa: S105  column names
INDEX_FILE = (
    "uuid, location, definition, kind, level, file_count, row_count, size_bytes, snapshot_id, created_ms, state, "
    "changed_ms, reason"
)
PRODUCER = "sequence, snapshot_id, changed_ms"
PLAN_TABLE = (
    "id, namespace, name, of_name, uuid, location, files, snapshot_id, file_count, size_bytes, considered_count, "
    "considered_bytes, expires_ms, audience, shown_id, shown"
)
AUDIT = "id, at_ms, who, action, resource, outcome, status, request_id, remote"

_KINDS = {kind.value: kind for kind in EntryKind}
_STATES = {state.value: state for state in InstantState}
_INDEX_FILE_STATES = {state.value: state for state in IndexFileState}


def pack(path: NamespacePath) -> str:
    return NAMESPACE_SEPARATOR.join(path)


def unpack(text: str) -> NamespacePath:
    return tuple(text.split(NAMESPACE_SEPARATOR)) if text else ()


def pack_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def unpack_json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Corrupt(f"The database's {what} is not JSON: {error}") from None


def space_of(kind: EntryKind) -> str:
    """The scope in which a name is unique: tables and views share one."""
    return "function" if kind is EntryKind.FUNCTION else "relation"


def _kind(text: str) -> EntryKind:
    try:
        return _KINDS[text]
    except KeyError:
        raise Corrupt(f"The database contains an entry of unknown kind {text!r}") from None


def _state(text: str) -> InstantState:
    try:
        return _STATES[text]
    except KeyError:
        raise Corrupt(f"The database contains an instant in unknown state {text!r}") from None


def to_namespace(row: Row) -> Namespace:
    """From path, properties, version."""
    return Namespace(unpack(row[0]), unpack_json(row[1], "namespace properties"), row[2])


def to_entry(row: Row) -> Entry:
    """From the columns of ENTRY or of NAMED."""
    return Entry(_kind(row[0]), unpack(row[1]), *row[2:])


def from_entry(entry: Entry) -> tuple[Any, ...]:
    return (
        entry.kind.value,
        pack(entry.namespace),
        entry.name,
        entry.uuid,
        entry.metadata_location,
        entry.previous_location,
        entry.version,
        entry.created_ms,
        entry.updated_ms,
    )


def to_dropped(row: Row) -> DroppedEntry:
    return DroppedEntry(row[0], to_entry(row[1:10]), bool(row[10]), row[11], row[12], row[13])


def to_instant(row: Row) -> Instant:
    return Instant(
        id=row[0],
        action=row[1],
        state=_state(row[2]),
        kind=_kind(row[3]),
        namespace=unpack(row[4]),
        name=row[5],
        uuid=row[6],
        requested_ms=row[7],
        completed_ms=row[8],
        who=row[9],
        snapshot_id=row[10],
        metadata_location=row[11],
        fingerprint=row[12],
        summary=unpack_json(row[13], "instant summary"),
        position=row[14],
    )


def from_instant(instant: Instant) -> tuple[Any, ...]:
    """All columns except the position, which the database sets."""
    return (
        instant.id,
        instant.action,
        instant.state.value,
        instant.kind.value,
        pack(instant.namespace),
        instant.name,
        instant.uuid,
        instant.requested_ms,
        instant.completed_ms,
        instant.who,
        instant.snapshot_id,
        instant.metadata_location,
        instant.fingerprint,
        pack_json(instant.summary),
    )


def to_idempotency(row: Row) -> IdempotencyRecord:
    return IdempotencyRecord(*row)


def to_metrics(row: Row) -> MetricsReport:
    return MetricsReport(
        row[0], row[1], unpack(row[2]), row[3], row[4], row[5], row[6], row[7], unpack_json(row[8], "metrics report")
    )


def to_token(row: Row) -> Token:
    return Token(*row)


def to_audit(row: Row) -> AuditRecord:
    return AuditRecord(*row)


def to_producer(row: Row) -> ProducerState:
    return ProducerState(*row)


def to_index_file(row: Row) -> RegisteredIndexFile:
    state = _INDEX_FILE_STATES.get(row[10])
    if state is None:
        raise Corrupt(f"The database contains an index file in unknown state {row[10]!r}")
    return RegisteredIndexFile(
        uuid=row[0],
        location=row[1],
        definition=row[2],
        kind=row[3],
        level=row[4],
        files=row[5],
        rows=row[6],
        size_bytes=row[7],
        snapshot_id=row[8],
        created_ms=row[9],
        state=state,
        changed_ms=row[11],
        reason=row[12],
    )


def from_index_file(file: RegisteredIndexFile) -> tuple[Any, ...]:
    return (
        file.uuid,
        file.location,
        file.definition,
        file.kind,
        file.level,
        file.files,
        file.rows,
        file.size_bytes,
        file.snapshot_id,
        file.created_ms,
        file.state.value,
        file.changed_ms,
        file.reason,
    )


def to_plan_table(row: Row) -> PlanTable:
    return PlanTable(
        id=row[0],
        namespace=unpack(row[1]),
        name=row[2],
        of_name=row[3],
        uuid=row[4],
        location=row[5],
        files=tuple(unpack_json(row[6], "files of a plan table")),
        snapshot_id=row[7],
        file_count=row[8],
        size_bytes=row[9],
        considered_count=row[10],
        considered_bytes=row[11],
        expires_ms=row[12],
        audience=row[13],
        shown_id=row[14],
        shown=row[15],
    )


def from_plan_table(plan: PlanTable) -> tuple[Any, ...]:
    return (
        plan.id,
        pack(plan.namespace),
        plan.name,
        plan.of_name,
        plan.uuid,
        plan.location,
        pack_json(plan.files),
        plan.snapshot_id,
        plan.file_count,
        plan.size_bytes,
        plan.considered_count,
        plan.considered_bytes,
        plan.expires_ms,
        plan.audience,
        plan.shown_id,
        plan.shown,
    )
