"""What each operation of the port means: one generator each, dispatched by type. The only SQL that changes anything.

The rule: no statement may raise a constraint error, because PostgreSQL would give up the whole transaction with it.
So every insert says `ON CONFLICT` and tells by `RETURNING` whether it happened, every change is conditional in its own
WHERE, and what a missing row means is asked afterwards. Under READ COMMITTED that is race-free: a concurrent writer of
the same row is waited for and the condition is checked again on what it left.

A namespace is locked FOR KEY SHARE by whoever puts something into it and FOR UPDATE by whoever drops it.
Messages are those that Iceberg's own tests compare (CatalogTests, ViewCatalogTests).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from metaserver.errors import (
    AlreadyExists,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    NotFound,
)
from metaserver.store import port
from metaserver.store.port import Entry, EntryKind, InstantState, NamespacePath
from metaserver.store.rows import (
    AUDIT,
    DROPPED,
    ENTRY,
    IDEMPOTENCY,
    INSTANT,
    METRICS,
    TOKEN,
    from_entry,
    from_instant,
    pack,
    pack_json,
    space_of,
    to_dropped,
    to_entry,
    unpack,
)
from metaserver.store.statement import Row, Statement, Steps
from metaserver.wire import show

_FINISHED = (InstantState.COMPLETED, InstantState.ROLLED_BACK)
_TITLES = {EntryKind.TABLE: "Table", EntryKind.VIEW: "View", EntryKind.FUNCTION: "Function"}
_MISSING = {EntryKind.TABLE: NoSuchTable, EntryKind.VIEW: NoSuchView, EntryKind.FUNCTION: NoSuchFunction}


def transaction(operations: Sequence[port.Operation], now_ms: int) -> Steps[list[Any]]:
    """All operations in order; the first that cannot be raises, and the driver undoes the rest."""
    results: list[Any] = []
    for operation in operations:
        result = yield from _APPLY[type(operation)](operation, now_ms)
        results += (result,)
    return results


def _marks(count: int, first: int = 1) -> str:
    return ", ".join(f"${number}" for number in range(first, first + count))


# Namespaces ----------------------------------------------------------------------------------------------------------


def _hold_namespace(path: NamespacePath) -> Steps[None]:
    """Keeps it from being dropped until this transaction ends."""
    rows = yield Statement("SELECT 1 FROM namespaces WHERE path = $1", (pack(path),), lock="KEY SHARE")
    if not rows:
        raise NoSuchNamespace(f"Namespace does not exist: {show(path)}")


def _create_namespace(op: port.CreateNamespace, now_ms: int) -> Steps[None]:
    parent = op.path[:-1]
    if parent:
        yield from _hold_namespace(parent)
    rows = yield Statement(
        "INSERT INTO namespaces (path, parent, properties, version) VALUES ($1, $2, $3, 1) "
        "ON CONFLICT (path) DO NOTHING RETURNING 1",
        (pack(op.path), pack(parent), pack_json(op.properties)),
    )
    if not rows:
        raise AlreadyExists(f"Namespace already exists: {show(op.path)}")


def _replace_namespace_properties(op: port.ReplaceNamespaceProperties, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        "UPDATE namespaces SET properties = $1, version = version + 1 WHERE path = $2 AND version = $3 RETURNING 1",
        (pack_json(op.properties), pack(op.path), op.expected_version),
    )
    if not rows:
        yield from _hold_namespace(op.path)
        raise CommitConflict(f"Namespace {show(op.path)} was changed by another request; read it again and retry")


def _drop_namespace(op: port.DropNamespace, now_ms: int) -> Steps[None]:
    path = pack(op.path)
    rows = yield Statement("SELECT 1 FROM namespaces WHERE path = $1", (path,), lock="UPDATE")
    if not rows:
        raise NoSuchNamespace(f"Namespace does not exist: {show(op.path)}")
    rows = yield Statement(
        "SELECT 1 FROM entries WHERE namespace = $1 UNION ALL SELECT 1 FROM namespaces WHERE parent = $1 LIMIT 1",
        (path,),
    )
    if rows:
        raise NamespaceNotEmpty(
            f"Namespace {show(op.path)} is not empty: drop its tables, views, functions and child namespaces first"
        )
    yield Statement("DELETE FROM namespaces WHERE path = $1", (path,))


# Entries -------------------------------------------------------------------------------------------------------------


def _missing(kind: EntryKind, path: NamespacePath, name: str) -> Exception:
    return _MISSING[kind](f"{_TITLES[kind]} does not exist: {show(path, name)}")


def _taken(wanted: EntryKind, found: EntryKind, path: NamespacePath, name: str) -> Exception:
    same = " with same name" if found is not wanted else ""
    return AlreadyExists(f"{_TITLES[found]}{same} already exists: {show(path, name)}")


def _put_entry(
    entry: Entry, taken: Callable[[EntryKind, EntryKind, NamespacePath, str], Exception] = _taken
) -> Steps[None]:
    """Inserts under its name, or raises what `taken` makes of the kind that has the name."""
    yield from _hold_namespace(entry.namespace)
    space = space_of(entry.kind)
    # The one in the way may be gone by the time it is asked for: then there is room, try again.
    for _ in range(3):
        rows = yield Statement(
            f"INSERT INTO entries (space, {ENTRY}) VALUES ({_marks(10)}) "  # noqa: S608
            "ON CONFLICT (namespace, space, name) DO NOTHING RETURNING 1",
            (space, *from_entry(entry)),
        )
        if rows:
            return
        rows = yield Statement(
            "SELECT kind FROM entries WHERE namespace = $1 AND space = $2 AND name = $3",
            (pack(entry.namespace), space, entry.name),
        )
        if rows:
            raise taken(entry.kind, EntryKind(rows[0][0]), entry.namespace, entry.name)
    raise CommitConflict(f"{show(entry.namespace, entry.name)} is being created and dropped by others; retry")


def _take_entry(
    kind: EntryKind, path: NamespacePath, name: str, uuid: str | None, expected_location: str | None = None
) -> Steps[Entry]:
    """Removes the row, if it is the one expected, and returns it."""
    params = [pack(path), space_of(kind), name, kind.value]
    sql = "DELETE FROM entries WHERE namespace = $1 AND space = $2 AND name = $3 AND kind = $4"
    for column, expected in (("uuid", uuid), ("metadata_location", expected_location)):
        if expected is not None:
            params.append(expected)
            sql += f" AND {column} = ${len(params)}"
    rows = yield Statement(f"{sql} RETURNING {ENTRY}", tuple(params))
    if not rows:
        yield from _require_entry(kind, path, name)
        raise CommitConflict(f"{_TITLES[kind]} {show(path, name)} was changed by another request; read it and retry")
    return to_entry(rows[0])


def _require_entry(kind: EntryKind, path: NamespacePath, name: str) -> Steps[Row]:
    """(uuid, metadata_location) of an entry that must exist."""
    rows = yield Statement(
        "SELECT uuid, metadata_location FROM entries WHERE namespace = $1 AND space = $2 AND name = $3 AND kind = $4",
        (pack(path), space_of(kind), name, kind.value),
    )
    if not rows:
        raise _missing(kind, path, name)
    return rows[0]


def _create_entry(op: port.CreateEntry, now_ms: int) -> Steps[None]:
    yield from _put_entry(op.entry)


def _swap_pointer(op: port.SwapPointer, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        "UPDATE entries SET previous_location = metadata_location, metadata_location = $1, version = version + 1, "
        "updated_ms = $2 WHERE namespace = $3 AND space = $4 AND name = $5 AND kind = $6 AND uuid = $7 "
        "AND metadata_location = $8 RETURNING 1",
        (
            op.new_location,
            op.now_ms,
            pack(op.namespace),
            space_of(op.kind),
            op.name,
            op.kind.value,
            op.uuid,
            op.expected_location,
        ),
    )
    if rows:
        return
    uuid, _ = yield from _require_entry(op.kind, op.namespace, op.name)
    what = f"{_TITLES[op.kind]} {show(op.namespace, op.name)}"
    if uuid != op.uuid:
        raise CommitConflict(f"{what} was dropped and created anew (its uuid is {uuid}, not {op.uuid}); load it again")
    raise CommitConflict(f"{what} was changed by another commit; refresh and retry")


def _rename_entry(op: port.RenameEntry, now_ms: int) -> Steps[None]:
    def taken(wanted: EntryKind, found: EntryKind, path: NamespacePath, name: str) -> Exception:
        return AlreadyExists(
            f"Cannot rename {show(op.namespace, op.name)} to {show(path, name)}. {_TITLES[found]} already exists"
        )

    # Taken out and put in again: an UPDATE of the key could break the primary key, which ends a transaction.
    entry = yield from _take_entry(op.kind, op.namespace, op.name, op.uuid)
    yield from _put_entry(_moved(entry, op.to_namespace, op.to_name), taken)


def _moved(entry: Entry, path: NamespacePath, name: str) -> Entry:
    return Entry(
        kind=entry.kind,
        namespace=path,
        name=name,
        uuid=entry.uuid,
        metadata_location=entry.metadata_location,
        previous_location=entry.previous_location,
        version=entry.version,
        created_ms=entry.created_ms,
        updated_ms=entry.updated_ms,
    )


def _drop_entry(op: port.DropEntry, now_ms: int) -> Steps[None]:
    entry = yield from _take_entry(op.kind, op.namespace, op.name, op.uuid, op.expected_location)
    if op.keep is None:
        return
    rows = yield Statement(
        f"INSERT INTO dropped ({DROPPED}) VALUES ({_marks(14)}) ON CONFLICT (id) DO NOTHING RETURNING 1",  # noqa: S608
        (
            op.keep.id,
            *from_entry(entry),
            int(op.keep.purge),
            op.keep.dropped_ms,
            op.keep.expires_ms,
            op.keep.who,
        ),
    )
    if not rows:
        raise AlreadyExists(f"Dropped entry already exists: {op.keep.id}")


def _restore_entry(op: port.RestoreEntry, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        f"DELETE FROM dropped WHERE id = $1 AND expires_ms > $2 RETURNING {DROPPED}",  # noqa: S608
        (op.dropped_id, now_ms),
    )
    if not rows:
        raise NotFound(f"Dropped entry does not exist or its retention has ended: {op.dropped_id}")
    yield from _put_entry(_moved(to_dropped(rows[0]).entry, op.namespace, op.name))


_NAMED = ("entries", "dropped")


def _forget_dropped(op: port.ForgetDropped, now_ms: int) -> Steps[None]:
    rows = yield Statement("DELETE FROM dropped WHERE id = $1 RETURNING uuid", (op.dropped_id,))
    if not rows:
        raise NotFound(f"Dropped entry does not exist: {op.dropped_id}")
    if op.unshared:
        # In one statement: what is undropped between two would be seen by neither.
        others = " UNION ALL ".join(f"SELECT namespace, name FROM {table} WHERE uuid = $1" for table in _NAMED)  # noqa: S608
        live = yield Statement(f"{others} LIMIT 1", (rows[0][0],))
        if live:
            raise CommitConflict(f"{show(unpack(live[0][0]), live[0][1])} has the same uuid, so its files are in use")


# Timeline ------------------------------------------------------------------------------------------------------------


def _record_instant(op: port.RecordInstant, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        f"INSERT INTO instants ({INSTANT}) VALUES ({_marks(14)}, {{next_position}}) "  # noqa: S608
        "ON CONFLICT (id) DO NOTHING RETURNING 1",
        from_instant(op.instant),
    )
    if not rows:
        raise AlreadyExists(f"Instant already exists: {op.instant.id}")


def _move_instant(op: port.MoveInstant, now_ms: int) -> Steps[None]:
    assignments, params = ["position = {next_position}"], list[Any]()

    def assign(column: str, value: Any) -> None:
        params.append(value)
        assignments.append(f"{column} = ${len(params)}")

    assign("state", op.state.value)
    if op.state in _FINISHED:
        assign("completed_ms", op.now_ms)
    if op.snapshot_id is not None:
        assign("snapshot_id", op.snapshot_id)
    if op.summary is not None:
        assign("summary", pack_json(op.summary))
    params += (op.id, op.expected.value)
    rows = yield Statement(
        f"UPDATE instants SET {', '.join(assignments)} "  # noqa: S608
        f"WHERE id = ${len(params) - 1} AND state = ${len(params)} RETURNING 1",
        tuple(params),
    )
    if rows:
        return
    rows = yield Statement(
        "SELECT state FROM instants WHERE id = $1 UNION ALL SELECT state FROM instants_archive WHERE id = $1", (op.id,)
    )
    if not rows:
        raise NotFound(f"Instant does not exist: {op.id}")
    raise CommitConflict(f"Instant {op.id} is {rows[0][0]}, not {op.expected.value}: another request moved it first")


def archive(ids: Sequence[str]) -> Steps[int]:
    """Moves those of the instants that are still live and finished; returns how many."""
    rows = yield Statement(
        "SELECT id FROM instants WHERE id IN {each_of_1} AND state IN ('completed', 'rolled_back')",
        (pack_json(list(ids)),),
        lock="UPDATE SKIP LOCKED",
    )
    if not rows:
        return 0
    held = (pack_json([row[0] for row in rows]),)
    yield Statement(
        f"INSERT INTO instants_archive ({INSTANT}) SELECT {INSTANT} FROM instants WHERE id IN {{each_of_1}}",  # noqa: S608
        held,
    )
    yield Statement("DELETE FROM instants WHERE id IN {each_of_1}", held)
    return len(rows)


# Everything else -----------------------------------------------------------------------------------------------------


def _save_idempotency(op: port.SaveIdempotency, now_ms: int) -> Steps[None]:
    record = op.record
    rows = yield Statement(
        f"INSERT INTO idempotency ({IDEMPOTENCY}) VALUES ({_marks(7)}) ON CONFLICT (key) DO UPDATE SET "  # noqa: S608
        "scope = excluded.scope, request_hash = excluded.request_hash, status = excluded.status, "
        "body = excluded.body, metadata_location = excluded.metadata_location, expires_ms = excluded.expires_ms "
        "WHERE idempotency.expires_ms <= $8 RETURNING 1",
        (
            record.key,
            record.scope,
            record.request_hash,
            record.status,
            record.body,
            record.metadata_location,
            record.expires_ms,
            now_ms,
        ),
    )
    if not rows:
        raise port.IdempotencyTaken(record.key)


def _save_metrics_report(op: port.SaveMetricsReport, now_ms: int) -> Steps[None]:
    report = op.report
    yield Statement(
        f"INSERT INTO metrics ({METRICS}) VALUES ({_marks(9)}) ON CONFLICT (id) DO NOTHING",  # noqa: S608
        (
            report.id,
            report.uuid,
            pack(report.namespace),
            report.name,
            report.report_type,
            report.snapshot_id,
            report.received_ms,
            report.who,
            pack_json(report.report),
        ),
    )


def _save_token(op: port.SaveToken, now_ms: int) -> Steps[None]:
    token = op.token
    # One that ran out holds its name no longer.
    yield Statement(
        "UPDATE tokens SET revoked_ms = expires_ms WHERE name = $1 AND revoked_ms IS NULL AND expires_ms <= $2",
        (token.name, now_ms),
    )
    rows = yield Statement(
        f"INSERT INTO tokens ({TOKEN}) VALUES ({_marks(6)}) ON CONFLICT DO NOTHING RETURNING 1",  # noqa: S608
        (token.id, token.name, token.digest, token.created_ms, token.expires_ms, token.revoked_ms),
    )
    if not rows:
        raise AlreadyExists(f"Token already exists: {token.name}")


def _revoke_token(op: port.RevokeToken, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        "UPDATE tokens SET revoked_ms = $1 WHERE name = $2 AND revoked_ms IS NULL "
        "AND (expires_ms IS NULL OR expires_ms > $1) RETURNING 1",
        (op.now_ms, op.name),
    )
    if not rows:
        raise NotFound(f"Token does not exist or is no longer valid: {op.name}")


def _save_grant(op: port.SaveGrant, now_ms: int) -> Steps[None]:
    yield Statement(
        "INSERT INTO grants (principal, namespace, role) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        (op.grant.principal, pack(op.grant.namespace), op.grant.role),
    )


def _remove_grant(op: port.RemoveGrant, now_ms: int) -> Steps[None]:
    rows = yield Statement(
        "DELETE FROM grants WHERE principal = $1 AND namespace = $2 AND role = $3 RETURNING 1",
        (op.grant.principal, pack(op.grant.namespace), op.grant.role),
    )
    if not rows:
        where = show(op.grant.namespace) or "the whole catalog"
        raise NotFound(f"Grant does not exist: {op.grant.role} for {op.grant.principal} on {where}")


def _save_audit(op: port.SaveAudit, now_ms: int) -> Steps[None]:
    """A batch whose outcome was unknown may be sent again: ids that are there stay as they are."""
    at = 0
    while at < len(op.records):
        # Few sizes, so that the databases' caches of prepared statements hold them all.
        size = next(size for size in (64, 8, 1) if size <= len(op.records) - at)
        values, params = [], list[Any]()
        for record in op.records[at : at + size]:
            values.append(f"({_marks(9, len(params) + 1)})")
            params += (
                record.id,
                record.at_ms,
                record.who,
                record.action,
                record.resource,
                record.outcome,
                record.status,
                record.request_id,
                record.remote,
            )
        yield Statement(
            f"INSERT INTO audit ({AUDIT}) VALUES {', '.join(values)} ON CONFLICT (id) DO NOTHING",  # noqa: S608
            tuple(params),
        )
        at += size


def _save_cursor(op: port.SaveCursor, now_ms: int) -> Steps[None]:
    if op.expected is None:
        rows = yield Statement(
            "INSERT INTO cursors (consumer, position) VALUES ($1, $2) ON CONFLICT (consumer) DO NOTHING RETURNING 1",
            (op.consumer, op.position),
        )
    else:
        rows = yield Statement(
            "UPDATE cursors SET position = $1 WHERE consumer = $2 AND position = $3 RETURNING 1",
            (op.position, op.consumer, op.expected),
        )
    if not rows:
        raise CommitConflict(f"The cursor of {op.consumer} was moved by another replica; read it again")


def _take_lease(op: port.TakeLease, now_ms: int) -> Steps[int]:
    rows = yield Statement(
        "INSERT INTO leases (name, holder, until_ms, fence) VALUES ($1, $2, $3, 1) ON CONFLICT (name) DO UPDATE SET "
        "holder = excluded.holder, until_ms = excluded.until_ms, "
        "fence = leases.fence + CASE WHEN leases.holder = excluded.holder THEN 0 ELSE 1 END "
        "WHERE leases.holder = excluded.holder OR leases.until_ms <= $4 RETURNING fence",
        (op.name, op.holder, op.until_ms, op.now_ms),
    )
    if not rows:
        raise CommitConflict(f"The lease {op.name} is held by another")
    return int(rows[0][0])


def secret(name: str, candidate: bytes) -> Steps[bytes]:
    yield Statement(
        "INSERT INTO secrets (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING", (name, candidate)
    )
    rows = yield Statement("SELECT value FROM secrets WHERE name = $1", (name,))
    return bytes(rows[0][0])


def prune(now_ms: int, audit_before_ms: int, metrics_before_ms: int, limit: int) -> Steps[int]:
    """At most `limit` rows in all, oldest first."""
    removed = 0
    for table, key, time, before_ms in (
        ("idempotency", "key", "expires_ms", now_ms + 1),
        ("audit", "id", "at_ms", audit_before_ms),
        ("metrics", "id", "received_ms", metrics_before_ms),
    ):
        rows = yield Statement(
            f"DELETE FROM {table} WHERE {key} IN "  # noqa: S608
            f"(SELECT {key} FROM {table} WHERE {time} < $1 ORDER BY {time} LIMIT $2) RETURNING 1",
            (before_ms, limit - removed),
        )
        removed += len(rows)
    return removed


_APPLY: dict[type, Callable[[Any, int], Steps[Any]]] = {
    port.CreateNamespace: _create_namespace,
    port.ReplaceNamespaceProperties: _replace_namespace_properties,
    port.DropNamespace: _drop_namespace,
    port.CreateEntry: _create_entry,
    port.SwapPointer: _swap_pointer,
    port.RenameEntry: _rename_entry,
    port.DropEntry: _drop_entry,
    port.RestoreEntry: _restore_entry,
    port.ForgetDropped: _forget_dropped,
    port.RecordInstant: _record_instant,
    port.MoveInstant: _move_instant,
    port.SaveIdempotency: _save_idempotency,
    port.SaveMetricsReport: _save_metrics_report,
    port.SaveToken: _save_token,
    port.RevokeToken: _revoke_token,
    port.SaveGrant: _save_grant,
    port.RemoveGrant: _remove_grant,
    port.SaveAudit: _save_audit,
    port.SaveCursor: _save_cursor,
    port.TakeLease: _take_lease,
}
