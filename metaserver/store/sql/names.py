"""Operations on names: namespaces, and the tables, views and functions in them.

A transaction that adds an entry to a namespace locks the namespace FOR KEY SHARE, and a transaction that drops the
namespace locks it FOR UPDATE. Iceberg's tests (CatalogTests, ViewCatalogTests) compare the error messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchFunction,
    NoSuchNamespace,
    NoSuchTable,
    NoSuchView,
    NotFound,
)
from seamark.metaserver.store import operations
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind, NamespacePath, make_retained_id
from seamark.metaserver.store.operations import PRIORITY
from seamark.metaserver.store.port import LostRace
from seamark.metaserver.store.sql.by_uuid import forget_unnamed
from seamark.metaserver.store.sql.claims import check_restored
from seamark.metaserver.store.sql.records import (
    forget_dropped_grants,
    forget_grants_below,
    hold_catalog,
    move_grants,
    move_grants_to_dropped,
    restore_grants,
)
from seamark.metaserver.store.sql.rows import (
    DROPPED,
    DROPPED_COLUMN_COUNT,
    ENTRY,
    decode_dropped,
    encode_dropped,
    get_name_space,
    pack,
    pack_json,
    unpack,
)
from seamark.metaserver.store.sql.statement import Row, Steps, StoreStatement, format_placeholders

DROPPED_MAX = 100_000
"""The maximum number of dropped and retained entries of a namespace."""

_PRIORITY_MS_MAX = 600_000
"""The maximum remaining time of a priority. If a priority would end later, it is ignored, because a clock was wrong."""
_INSERT_ATTEMPTS_MAX = 3
_TITLES = {EntryKind.TABLE: "Table", EntryKind.VIEW: "View", EntryKind.FUNCTION: "Function"}
_MISSING_ERRORS = {EntryKind.TABLE: NoSuchTable, EntryKind.VIEW: NoSuchView, EntryKind.FUNCTION: NoSuchFunction}

# Namespaces ----------------------------------------------------------------------------------------------------------


def _hold_namespace(path: NamespacePath) -> Steps[None]:
    """Lock the namespace, so that it cannot be dropped until this transaction ends.

    Raises:
        NoSuchNamespace: The namespace does not exist.
    """
    rows = yield StoreStatement("SELECT 1 FROM namespaces WHERE path = $1", (pack(path),), lock="KEY SHARE")
    if not rows:
        raise NoSuchNamespace(f"Namespace does not exist: {format_path(path)}")


def create_namespace(op: operations.CreateNamespace, now_ms: int) -> Steps[None]:
    parent = op.path[:-1]
    if parent:
        yield from _hold_namespace(parent)
    else:
        yield from hold_catalog()
    rows = yield StoreStatement(
        "INSERT INTO namespaces (path, parent, properties, version) VALUES ($1, $2, $3, 1) "
        "ON CONFLICT (path) DO NOTHING RETURNING 1",
        (pack(op.path), pack(parent), pack_json(op.properties)),
    )
    if not rows:
        raise AlreadyExists(f"Namespace already exists: {format_path(op.path)}")


def replace_namespace_properties(op: operations.ReplaceNamespaceProperties, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        "UPDATE namespaces SET properties = $1, version = version + 1 WHERE path = $2 AND version = $3 RETURNING 1",
        (pack_json(op.properties), pack(op.path), op.expected_version),
    )
    if not rows:
        yield from _hold_namespace(op.path)
        raise CommitConflict(
            f"Namespace {format_path(op.path)} was changed by another request; read it again and retry"
        )


def drop_namespace(op: operations.DropNamespace, now_ms: int) -> Steps[None]:
    path = pack(op.path)
    rows = yield StoreStatement("SELECT 1 FROM namespaces WHERE path = $1", (path,), lock="UPDATE")
    if not rows:
        raise NoSuchNamespace(f"Namespace does not exist: {format_path(op.path)}")
    rows = yield StoreStatement(
        "SELECT 1 FROM entries WHERE namespace = $1 UNION ALL SELECT 1 FROM namespaces WHERE parent = $1 LIMIT 1",
        (path,),
    )
    if rows:
        raise NamespaceNotEmpty(
            f"Namespace {format_path(op.path)} is not empty: drop its tables, views, functions and child namespaces "
            f"first"
        )
    yield StoreStatement("DELETE FROM namespaces WHERE path = $1", (path,))
    yield from forget_grants_below(op.path)


# Entries -------------------------------------------------------------------------------------------------------------


def _make_missing_error(kind: EntryKind, path: NamespacePath, name: str) -> Exception:
    return _MISSING_ERRORS[kind](f"{_TITLES[kind]} does not exist: {format_path(path, name)}")


def _make_exists_error(
    requested_kind: EntryKind, existing_kind: EntryKind, path: NamespacePath, name: str
) -> Exception:
    suffix = " with same name" if existing_kind is not requested_kind else ""
    return AlreadyExists(f"{_TITLES[existing_kind]}{suffix} already exists: {format_path(path, name)}")


def _put_entry(
    entry: Entry, make_error: Callable[[EntryKind, EntryKind, NamespacePath, str], Exception] = _make_exists_error
) -> Steps[None]:
    """Insert the entry, or raise the error that `make_error` returns for the existing kind.

    Raises:
        NoSuchNamespace: The namespace does not exist.
        CommitConflict: Other requests create and drop the entry during all attempts.
    """
    yield from _hold_namespace(entry.namespace)
    space = get_name_space(entry.kind)
    # If the existing entry is removed before its kind is read, try the insert again.
    for _ in range(_INSERT_ATTEMPTS_MAX):
        rows = yield StoreStatement(
            f"INSERT INTO entries (space, {ENTRY}) VALUES ({format_placeholders(1 + ENTRY.column_count)}) "  # noqa: S608
            "ON CONFLICT (namespace, space, name) DO NOTHING RETURNING 1",
            (space, *ENTRY.encode(entry)),
        )
        if rows:
            return
        rows = yield StoreStatement(
            "SELECT kind FROM entries WHERE namespace = $1 AND space = $2 AND name = $3",
            (pack(entry.namespace), space, entry.name),
        )
        if rows:
            raise make_error(entry.kind, EntryKind(rows[0][0]), entry.namespace, entry.name)
    raise CommitConflict(
        f"{format_path(entry.namespace, entry.name)} is created and dropped by other requests; try again"
    )


def _remove_entry(
    kind: EntryKind, path: NamespacePath, name: str, uuid: str | None, expected_location: str | None = None
) -> Steps[Entry]:
    """Remove the row of an entry if it has the expected UUID and location, and return it.

    Raises:
        NoSuchTable, NoSuchView, NoSuchFunction: The entry does not exist.
        CommitConflict: The entry has another UUID or location.
    """
    params = [pack(path), get_name_space(kind), name, kind.value]
    sql = "DELETE FROM entries WHERE namespace = $1 AND space = $2 AND name = $3 AND kind = $4"
    for column, expected in (("uuid", uuid), ("metadata_location", expected_location)):
        if expected is not None:
            params.append(expected)
            sql += f" AND {column} = ${len(params)}"
    rows = yield StoreStatement(f"{sql} RETURNING {ENTRY}", tuple(params))
    if not rows:
        yield from _require_entry(kind, path, name)
        raise CommitConflict(
            f"{_TITLES[kind]} {format_path(path, name)} was changed by another request; read it and retry"
        )
    return ENTRY.decode(rows[0])


def _require_entry(kind: EntryKind, path: NamespacePath, name: str) -> Steps[Row]:
    """Return the UUID and the metadata location of an existing entry.

    Raises:
        NoSuchTable, NoSuchView, NoSuchFunction: The entry does not exist.
    """
    rows = yield StoreStatement(
        "SELECT uuid, metadata_location FROM entries WHERE namespace = $1 AND space = $2 AND name = $3 AND kind = $4",
        (pack(path), get_name_space(kind), name, kind.value),
    )
    if not rows:
        raise _make_missing_error(kind, path, name)
    return rows[0]


def create_entry(op: operations.CreateEntry, now_ms: int) -> Steps[None]:
    yield from _put_entry(op.entry)


def swap_pointer(op: operations.SwapPointer, now_ms: int) -> Steps[None]:
    """Replace the metadata location of an entry, if the entry still has the expected location.

    A process that has lost several races for the table takes a lease to get priority. While it has the lease, commits
    of other processes fail as if they had lost a race. A lease that ends too late is ignored (`_PRIORITY_MS_MAX`).

    Raises:
        NoSuchTable, NoSuchView, NoSuchFunction: The entry does not exist.
        CommitConflict: The name refers to another entry.
        LostRace: The entry has another location, or another process has priority.
    """
    rows = yield StoreStatement(
        "UPDATE entries SET previous_location = metadata_location, metadata_location = $1, version = version + 1, "
        "updated_ms = $2 WHERE namespace = $3 AND space = $4 AND name = $5 AND kind = $6 AND uuid = $7 "
        "AND metadata_location = $8 AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = $9 "
        "AND leases.holder <> $10 AND leases.until_ms > {clock_ms} AND leases.until_ms < {clock_ms} + $11) RETURNING 1",
        (
            op.new_location,
            op.now_ms,
            pack(op.namespace),
            get_name_space(op.kind),
            op.name,
            op.kind.value,
            op.uuid,
            op.expected_location,
            f"{PRIORITY}{op.uuid}",
            op.holder,
            _PRIORITY_MS_MAX,
        ),
    )
    if rows:
        return
    uuid, _ = yield from _require_entry(op.kind, op.namespace, op.name)
    description = f"{_TITLES[op.kind]} {format_path(op.namespace, op.name)}"
    if uuid != op.uuid:
        raise CommitConflict(
            f"{description} was dropped and created again (its uuid is {uuid}, not {op.uuid}); load it again"
        )
    raise LostRace(f"{description} was changed by another commit; refresh and retry")


def rename_entry(op: operations.RenameEntry, now_ms: int) -> Steps[None]:
    def make_error(requested_kind: EntryKind, existing_kind: EntryKind, path: NamespacePath, name: str) -> Exception:
        return AlreadyExists(
            f"Cannot rename {format_path(op.namespace, op.name)} to {format_path(path, name)}. "
            f"{_TITLES[existing_kind]} already exists"
        )

    # Delete and insert the row. An UPDATE could violate the primary key, which would abort the transaction.
    entry = yield from _remove_entry(op.kind, op.namespace, op.name, op.uuid)
    yield from _put_entry(msgspec.structs.replace(entry, namespace=op.to_namespace, name=op.to_name), make_error)
    yield from move_grants(op.kind, op.namespace, op.name, op.to_namespace, op.to_name)


def drop_entry(op: operations.DropEntry, now_ms: int) -> Steps[None]:
    """Remove a name, and store the dropped entry if it can be restored (`op.keep`).

    Otherwise, if this is the last name of the table, the database rows that describe the table are deleted. While the
    table has files, no other entry may use its locations: they stay claimed.

    Raises:
        NoSuchTable, NoSuchView, NoSuchFunction: The entry does not exist.
        CommitConflict: The entry has another UUID or location.
        BadRequest: The namespace has too many dropped entries.
        AlreadyExists: A dropped entry has the same id.
    """
    entry = yield from _remove_entry(op.kind, op.namespace, op.name, op.uuid, op.expected_location)
    yield from _check_dropped_count(op.namespace)
    yield from move_grants_to_dropped(None if op.keep is None else op.keep.id, op.kind, op.namespace, op.name)
    if op.keep is None:
        dropped_entry = DroppedEntry(
            make_retained_id(entry.uuid), entry, purge=False, dropped_ms=now_ms, expires_ms=0, principal_name=""
        )
        yield from forget_unnamed(dropped_entry)
        return
    rows = yield StoreStatement(
        f"INSERT INTO dropped ({DROPPED}) VALUES ({format_placeholders(DROPPED_COLUMN_COUNT)}) "  # noqa: S608
        "ON CONFLICT (id) DO NOTHING RETURNING 1",
        encode_dropped(op.keep, entry),
    )
    if not rows:
        raise AlreadyExists(f"Dropped entry already exists: {op.keep.id}")


def _check_dropped_count(path: NamespacePath) -> Steps[None]:
    """Check that the namespace may have one more dropped entry, which keeps its locations.

    Raises:
        BadRequest: Too many entries of the namespace are dropped.
    """
    rows = yield StoreStatement(
        "SELECT (SELECT count(*) FROM dropped WHERE namespace = $1) "
        "+ (SELECT count(*) FROM retained WHERE namespace = $1)",
        (pack(path),),
    )
    if rows[0][0] >= DROPPED_MAX:
        raise BadRequest(
            f"Namespace {format_path(path)} has {DROPPED_MAX:,} dropped entries that keep their locations; have an "
            f"admin "
            "purge or release some with DELETE /api/v1/dropped/{id} first"
        )


def restore_entry(op: operations.RestoreEntry, now_ms: int) -> Steps[None]:
    """Restore a dropped entry under a name.

    `op.is_kept` means that the caller has already checked that the retention of the entry has not ended.

    Raises:
        NotFound: The retention of the entry has ended, or the entry is unknown.
        CommitConflict: A live entry has its location.
        NoSuchNamespace: The namespace of the name does not exist.
        AlreadyExists: Another entry has the name.
    """
    # The condition is true for every row if the caller has checked the retention.
    expires_after_ms = -1 if op.is_kept else now_ms
    rows = yield StoreStatement(
        f"DELETE FROM dropped WHERE id = $1 AND expires_ms > $2 RETURNING {DROPPED}",  # noqa: S608
        (op.dropped_id, expires_after_ms),
    )
    if not rows:
        raise NotFound(f"Dropped entry does not exist or its retention has ended: {op.dropped_id}")
    entry = decode_dropped(rows[0]).entry
    yield from check_restored(entry.uuid)
    yield from _put_entry(msgspec.structs.replace(entry, namespace=op.namespace, name=op.name))
    yield from restore_grants(op.dropped_id, op.namespace, op.name)


_TABLES_OF_NAMES = ("entries", "dropped")


def forget_dropped(op: operations.ForgetDropped, now_ms: int) -> Steps[None]:
    """Remove a dropped entry.

    If `op.unshared` is true, the caller then deletes the files of the entry. So no other name may refer to them.

    Raises:
        NotFound: The entry no longer exists.
        CommitConflict: `op.unshared` is true, and another name refers to the same files.
    """
    # A retained entry, which has no name but still files, can be purged in the same way as a dropped entry.
    rows: Sequence[Row] = ()
    for table in ("dropped", "retained") if op.unshared else ("dropped",):
        rows = yield StoreStatement(f"DELETE FROM {table} WHERE id = $1 RETURNING {DROPPED}", (op.dropped_id,))  # noqa: S608
        if rows:
            break
    else:
        raise NotFound(f"Dropped entry does not exist: {op.dropped_id}")
    dropped_entry = decode_dropped(rows[0])
    yield from forget_dropped_grants(op.dropped_id)
    if op.unshared:
        # Read both tables in one statement, because two statements could miss an entry that is restored between them.
        name_selects = " UNION ALL ".join(
            f"SELECT namespace, name FROM {table} WHERE uuid = $1"  # noqa: S608
            for table in _TABLES_OF_NAMES
        )
        live_names = yield StoreStatement(f"{name_selects} LIMIT 1", (dropped_entry.entry.uuid,))
        if live_names:
            packed_namespace, name = live_names[0]
            raise CommitConflict(
                f"{format_path(unpack(packed_namespace), name)} has the same uuid, so its files are in use"
            )
    yield from forget_unnamed(dropped_entry, purged=op.unshared)
