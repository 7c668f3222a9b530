"""The reads of the port, each as a generator. A single statement reads all rows, so that every read is consistent.

Limits and order are part of the statement. The driver only decides where the statement runs. `PointerStore` documents
the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from seamark.formats.protocol.wire import NAMESPACE_SEPARATOR
from seamark.metaserver.store.model import (
    AccessToken,
    AuditRecord,
    DroppedEntry,
    Entry,
    EntryKind,
    Grant,
    IdempotencyRecord,
    Instant,
    InstantState,
    MetricsReport,
    Namespace,
    NamespacePath,
    PlanSnapshot,
    ProducerState,
    RegisteredIndexFile,
    StoredPlanTable,
)
from seamark.metaserver.store.port import FOUND_TABLES_MAX, GROUPS_MAX, NAMED_NAMESPACES_MAX, InstantFilter
from seamark.metaserver.store.sql.records import NO_OWNERSHIP
from seamark.metaserver.store.sql.rows import (
    AUDIT,
    DROPPED,
    ENTRY,
    GRANT,
    IDEMPOTENCY,
    INDEX_FILE,
    INSTANT,
    JOINED_TABLES,
    METRICS,
    NAMED,
    NAMESPACE,
    PLAN_TABLE,
    PRODUCER,
    TOKEN,
    decode_dropped,
    decode_retained,
    get_name_space,
    make_range_end,
    pack,
    unpack,
)
from seamark.metaserver.store.sql.statement import Row, Steps, StoreStatement, format_placeholders

T = TypeVar("T")

_UNFINISHED = (InstantState.REQUESTED, InstantState.INFLIGHT)


def _read_first(decode: Callable[[Row], T], sql: str, *params: Any) -> Steps[T | None]:
    rows = yield StoreStatement(sql, params)
    return decode(rows[0]) if rows else None


def _read_all(decode: Callable[[Row], T], sql: str, *params: Any) -> Steps[list[T]]:
    rows = yield StoreStatement(sql, params)
    return [decode(row) for row in rows]


def _read_count(sql: str, *params: Any) -> Steps[int]:
    rows = yield StoreStatement(sql, params)
    return int(rows[0][0])


def ping() -> Steps[None]:
    yield StoreStatement("SELECT version FROM schema_version")


def load_namespace(path: NamespacePath) -> Steps[Namespace | None]:
    return _read_first(NAMESPACE.decode, f"SELECT {NAMESPACE} FROM namespaces WHERE path = $1", pack(path))  # noqa: S608


def list_namespaces(parent: NamespacePath, after: str | None, limit: int) -> Steps[list[NamespacePath]]:
    prefix = pack(parent) + NAMESPACE_SEPARATOR if parent else ""
    sql = "SELECT path FROM namespaces WHERE parent = $1 AND path > $2 ORDER BY path LIMIT $3"
    return _read_all(lambda row: unpack(row[0]), sql, pack(parent), prefix + (after or ""), limit)


def find_namespaces(parent: NamespacePath, names: Sequence[str]) -> Steps[list[NamespacePath]]:
    if not names:
        return []
    # The text is the same for any number of names, so that the databases prepare the statement once.
    paths = [pack((*parent, name)) for name in names]
    paths += paths[-1:] * (NAMED_NAMESPACES_MAX - len(paths))
    sql = f"SELECT path FROM namespaces WHERE path IN ({format_placeholders(NAMED_NAMESPACES_MAX)}) ORDER BY path"  # noqa: S608
    existing_paths = yield from _read_all(lambda row: unpack(row[0]), sql, *paths)
    return existing_paths


def measure_namespace(top: str) -> Steps[tuple[int, int]]:
    """Return the size of a top-level namespace, including all namespaces below it.

    Returns:
        The number of namespaces, live entries and dropped entries together, and the number of characters of the
        namespaces' properties.
    """
    range_condition = "BETWEEN $1 AND $2"
    params = (top, make_range_end(top))
    rows = yield StoreStatement(
        f"SELECT (SELECT COUNT(*) FROM namespaces WHERE path {range_condition}) "  # noqa: S608
        f"+ (SELECT COUNT(*) FROM entries WHERE namespace {range_condition}) "
        f"+ (SELECT COUNT(*) FROM dropped WHERE namespace {range_condition}), "
        f"(SELECT COALESCE(SUM(LENGTH(properties)), 0) FROM namespaces WHERE path {range_condition})",
        params,
    )
    count, characters = rows[0]
    return int(count), int(characters)


def load_entry(kind: EntryKind, namespace: NamespacePath, name: str) -> Steps[Entry | None]:
    sql = f"SELECT {NAMED} FROM entries WHERE namespace = $1 AND space = $2 AND name = $3 AND kind = $4"  # noqa: S608
    return _read_first(NAMED.decode, sql, pack(namespace), get_name_space(kind), name, kind.value)


def list_entries(kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int) -> Steps[list[Entry]]:
    sql = f"SELECT {NAMED} FROM entries WHERE namespace = $1 AND kind = $2 AND name > $3 ORDER BY name LIMIT $4"  # noqa: S608
    return _read_all(NAMED.decode, sql, pack(namespace), kind.value, after or "", limit)


def list_entries_with_uuid(uuid: str) -> Steps[list[Entry]]:
    sql = f"SELECT {NAMED} FROM entries WHERE uuid = $1 ORDER BY namespace, name LIMIT 2"  # noqa: S608
    return _read_all(NAMED.decode, sql, uuid)


def find_entries(uuids: Sequence[str]) -> Steps[list[Entry]]:
    if not uuids:
        return []
    # The text is the same for any number of tables, so that the databases prepare the statement once.
    padded_uuids = [*uuids, *(uuids[-1] for _ in range(FOUND_TABLES_MAX - len(uuids)))]
    sql = (
        f"SELECT {NAMED} FROM entries WHERE uuid IN ({format_placeholders(FOUND_TABLES_MAX)}) "  # noqa: S608
        "ORDER BY uuid, namespace, name"
    )
    entries = yield from _read_all(NAMED.decode, sql, *padded_uuids)
    return entries


def list_dropped(namespace: NamespacePath | None, after: str | None, limit: int) -> Steps[list[DroppedEntry]]:
    if namespace is None:
        sql = f"SELECT {DROPPED} FROM dropped WHERE id > $1 ORDER BY id LIMIT $2"  # noqa: S608
        return _read_all(decode_dropped, sql, after or "", limit)
    sql = f"SELECT {DROPPED} FROM dropped WHERE namespace = $1 AND id > $2 ORDER BY id LIMIT $3"  # noqa: S608
    return _read_all(decode_dropped, sql, pack(namespace), after or "", limit)


def find_dropped(dropped_id: str) -> Steps[DroppedEntry | None]:
    entry = yield from _read_first(decode_dropped, f"SELECT {DROPPED} FROM dropped WHERE id = $1", dropped_id)  # noqa: S608
    if entry is None:
        sql = f"SELECT {DROPPED} FROM retained WHERE id = $1"  # noqa: S608
        entry = yield from _read_first(decode_retained, sql, dropped_id)
    return entry


def list_retained(namespace: NamespacePath | None, after: str | None, limit: int) -> Steps[list[DroppedEntry]]:
    if namespace is None:
        sql = f"SELECT {DROPPED} FROM retained WHERE id > $1 ORDER BY id LIMIT $2"  # noqa: S608
        return _read_all(decode_retained, sql, after or "", limit)
    sql = f"SELECT {DROPPED} FROM retained WHERE namespace = $1 AND id > $2 ORDER BY id LIMIT $3"  # noqa: S608
    return _read_all(decode_retained, sql, pack(namespace), after or "", limit)


def list_unchecked(before_ms: int, limit: int) -> Steps[list[DroppedEntry]]:
    sql = f"SELECT {DROPPED} FROM retained WHERE checked_ms < $1 ORDER BY checked_ms, uuid LIMIT $2"  # noqa: S608
    return _read_all(decode_retained, sql, before_ms, limit)


def list_expired(now_ms: int, limit: int) -> Steps[list[DroppedEntry]]:
    sql = f"SELECT {DROPPED} FROM dropped WHERE expires_ms <= $1 ORDER BY expires_ms, id LIMIT $2"  # noqa: S608
    return _read_all(decode_dropped, sql, now_ms, limit)


def list_indexed_tables(after: str | None, limit: int) -> Steps[list[Entry]]:
    """Return all names of the next `limit` tables that have or had index files, in the order of their UUIDs.

    Such a table has an index version, which increases when its index files change. It stays if no index files remain.
    """
    sql = (
        f"SELECT {NAMED} FROM entries WHERE uuid IN "  # noqa: S608
        "(SELECT uuid FROM index_versions WHERE uuid > $1 ORDER BY uuid LIMIT $2) ORDER BY uuid, namespace, name"
    )
    return _read_all(NAMED.decode, sql, after or "", limit)


def list_unused_index_files(before_ms: int, limit: int) -> Steps[list[RegisteredIndexFile]]:
    sql = (
        f"SELECT {INDEX_FILE} FROM index_files WHERE state <> 'live' AND changed_ms < $1 "  # noqa: S608
        "ORDER BY changed_ms, location LIMIT $2"
    )
    return _read_all(INDEX_FILE.decode, sql, before_ms, limit)


def list_index_files(uuid: str) -> Steps[list[RegisteredIndexFile]]:
    sql = f"SELECT {INDEX_FILE} FROM index_files WHERE uuid = $1 ORDER BY created_ms, location"  # noqa: S608
    return _read_all(INDEX_FILE.decode, sql, uuid)


def load_producer(uuid: str, name: str) -> Steps[ProducerState | None]:
    sql = f"SELECT {PRODUCER} FROM producers WHERE uuid = $1 AND producer = $2"  # noqa: S608
    return _read_first(PRODUCER.decode, sql, uuid, name)


def find_plan_table(namespace: NamespacePath, name: str) -> Steps[StoredPlanTable | None]:
    sql = f"SELECT {PLAN_TABLE} FROM plan_tables WHERE namespace = $1 AND name = $2"  # noqa: S608
    return _read_first(PLAN_TABLE.decode, sql, pack(namespace), name)


def list_plan_snapshots(
    namespace: NamespacePath, of_name: str, uuid: str, audience: str, now_ms: int, limit: int
) -> Steps[list[PlanSnapshot]]:
    rows = yield StoreStatement(
        "SELECT shown_id, shown, joined FROM plan_tables WHERE namespace = $1 AND of_name = $2 AND audience = $3 "
        "AND uuid = $4 AND expires_ms > $5 AND audience IS NOT NULL AND name IS NOT NULL AND shown IS NOT NULL "
        "ORDER BY expires_ms DESC LIMIT $6",
        (pack(namespace), of_name, audience, uuid, now_ms, limit),
    )
    plans = (PlanSnapshot(int(id), str(snapshot), JOINED_TABLES.decode(joined)) for id, snapshot, joined in rows)
    return sorted(plans, key=lambda plan: plan.id)


def count_plan_tables(now_ms: int) -> Steps[int]:
    return _read_count("SELECT count(*) FROM plan_tables WHERE name IS NOT NULL AND expires_ms > $1", now_ms)


def list_planned_snapshots(uuid: str, now_ms: int) -> Steps[set[int]]:
    rows = yield StoreStatement(
        "SELECT DISTINCT snapshot_id FROM plan_tables WHERE expires_ms > $2 AND name IS NOT NULL AND uuid = $1",
        (uuid, now_ms),
    )
    return {int(row[0]) for row in rows}


def list_retired_plan_tables(after: str | None, limit: int) -> Steps[list[StoredPlanTable]]:
    sql = f"SELECT {PLAN_TABLE} FROM plan_tables WHERE name IS NULL AND id > $1 ORDER BY id LIMIT $2"  # noqa: S608
    return _read_all(PLAN_TABLE.decode, sql, after or "", limit)


def load_instant(instant_id: str) -> Steps[Instant | None]:
    sql = (
        f"SELECT {INSTANT} FROM instants WHERE id = $1 "  # noqa: S608
        f"UNION ALL SELECT {INSTANT} FROM instants_archive WHERE id = $1"
    )
    return _read_first(INSTANT.decode, sql, instant_id)


def count_names(
    uuid: str, *, dropped: bool = True, retained: bool = False, namespace: NamespacePath | None = None
) -> Steps[int]:
    tables = ("entries", *(("dropped",) if dropped else ()), *(("retained",) if retained else ()))
    namespace_condition = "" if namespace is None else " AND namespace = $2"
    counts = (f"(SELECT count(*) FROM {table} WHERE uuid = $1{namespace_condition})" for table in tables)  # noqa: S608
    return _read_count(f"SELECT {' + '.join(counts)}", uuid, *(() if namespace is None else (pack(namespace),)))


def list_unclaimed(after: str, limit: int) -> Steps[list[Entry]]:
    """Return live and dropped entries whose locations are not recorded, in the order of their UUIDs, after `after`.

    Old server versions have created them. Newer versions record the location of each entry (claim).
    """
    sources = " UNION ALL ".join(
        f"SELECT {ENTRY} FROM {table} WHERE uuid > $1 "  # noqa: S608
        f"AND NOT EXISTS (SELECT 1 FROM claims WHERE uuid = {table}.uuid)"
        for table in ("entries", "dropped")
    )
    return _read_all(ENTRY.decode, f"{sources} ORDER BY uuid LIMIT $2", after, limit)


def find_instant_by_fingerprint(uuid: str, fingerprint: str) -> Steps[Instant | None]:
    # With "IS NOT NULL" in the text, SQLite and PostgreSQL can use the partial index.
    condition = "uuid = $1 AND fingerprint = $2 AND fingerprint IS NOT NULL AND state = 'completed'"
    sql = (
        f"SELECT {INSTANT} FROM instants WHERE {condition} UNION ALL "  # noqa: S608
        f"SELECT {INSTANT} FROM instants_archive WHERE {condition} ORDER BY position DESC LIMIT 1"
    )
    return _read_first(INSTANT.decode, sql, uuid, fingerprint)


def list_instants(where: InstantFilter, limit: int) -> Steps[list[Instant]]:
    """Return live and archived instants.

    One statement reads both tables, so that an instant that is archived concurrently is seen exactly once. An earlier
    statement reads the watermark. Instants of transactions that are in progress at that time are above the watermark,
    and instants of earlier transactions are visible to the next statement.
    """
    watermark = yield StoreStatement("SELECT {watermark}")
    terms, params = ["position < $1"], [watermark[0][0]]

    def add_term(sql: str, value: object) -> None:
        params.append(value)
        terms.append(f"{sql} ${len(params)}")

    if where.since is not None:
        add_term("position <" if where.newest_first else "position >", where.since)
    if where.uuid is not None:
        add_term("uuid =", where.uuid)
    if where.namespace is not None:
        add_term("namespace =", pack(where.namespace))
    if where.name is not None:
        add_term("name =", where.name)
    if where.action is not None:
        add_term("action =", where.action)
    if where.state is not None:
        add_term("state =", where.state.value)
        if where.state in _UNFINISHED:
            # This is the condition of a partial index, which the databases use only if the statement contains it.
            terms.append("state IN ('requested', 'inflight')")
    params.append(limit)
    conditions = " AND ".join(terms)
    order_and_limit = f"ORDER BY position {'DESC' if where.newest_first else 'ASC'} LIMIT ${len(params)}"
    sql = f"SELECT {INSTANT} FROM instants WHERE {conditions} {order_and_limit}"  # noqa: S608
    if where.archived and where.state not in _UNFINISHED:
        archive = f"SELECT {INSTANT} FROM instants_archive WHERE {conditions} {order_and_limit}"  # noqa: S608
        sql = f"SELECT * FROM ({sql}) AS live UNION ALL SELECT * FROM ({archive}) AS archive {order_and_limit}"  # noqa: S608
    return (yield from _read_all(INSTANT.decode, sql, *params))


def list_archivable(keep: int, limit: int) -> Steps[list[str]]:
    """Return the ids of finished instants, except each table's newest `keep` instants, the oldest first."""
    rows = yield StoreStatement(
        "SELECT id FROM (SELECT id, position, row_number() OVER (PARTITION BY uuid ORDER BY position DESC) AS number "
        "FROM instants WHERE state IN ('completed', 'rolled_back')) AS ranked "
        "WHERE number > $1 ORDER BY position LIMIT $2",
        (keep, limit),
    )
    return [row[0] for row in rows]


def find_idempotency_record(key: str, now_ms: int) -> Steps[IdempotencyRecord | None]:
    sql = f"SELECT {IDEMPOTENCY} FROM idempotency WHERE key = $1 AND expires_ms > $2"  # noqa: S608
    return _read_first(IDEMPOTENCY.decode, sql, key, now_ms)


def list_metrics_reports(uuid: str | None, since: str | None, limit: int) -> Steps[list[MetricsReport]]:
    if uuid is None:
        sql = f"SELECT {METRICS} FROM metrics WHERE id > $1 ORDER BY id LIMIT $2"  # noqa: S608
        return _read_all(METRICS.decode, sql, since or "", limit)
    sql = f"SELECT {METRICS} FROM metrics WHERE uuid = $1 AND id > $2 ORDER BY id LIMIT $3"  # noqa: S608
    return _read_all(METRICS.decode, sql, uuid, since or "", limit)


def find_token_by_digest(digest: str) -> Steps[AccessToken | None]:
    """Return the token with this digest, even if it has expired or was revoked. The caller checks its validity."""
    return _read_first(TOKEN.decode, f"SELECT {TOKEN} FROM tokens WHERE digest = $1", digest)  # noqa: S608


def find_token_by_name(name: str) -> Steps[AccessToken | None]:
    return _read_first(TOKEN.decode, f"SELECT {TOKEN} FROM tokens WHERE name = $1 AND revoked_ms IS NULL", name)  # noqa: S608


def list_tokens() -> Steps[list[AccessToken]]:
    return _read_all(TOKEN.decode, f"SELECT {TOKEN} FROM tokens ORDER BY name, id")  # noqa: S608


def read_grants(principal: str | None) -> Steps[list[Grant]]:
    if principal is None:
        return _read_all(GRANT.decode, f"SELECT {GRANT} FROM grants ORDER BY principal, namespace, name, role")  # noqa: S608
    sql = f"SELECT {GRANT} FROM grants WHERE principal = $1 AND {NO_OWNERSHIP} ORDER BY namespace, name, role"  # noqa: S608
    return _read_all(GRANT.decode, sql, principal)


def read_grants_page(principal: str | None, after: Grant | None, limit: int) -> Steps[list[Grant]]:
    """Return a page of grants, including those of owners, in the order of their primary key."""
    terms: list[str] = []
    params: list[Any] = []
    if principal is not None:
        params.append(principal)
        terms.append("principal = $1")
    if after is not None:
        # The row comparison has the six columns of the primary key.
        placeholders = format_placeholders(6, len(params) + 1)
        terms.append(f"(principal, namespace, name, kind, role, deny) > ({placeholders})")
        params += [after.principal, pack(after.namespace), after.name, after.kind, after.role, int(after.deny)]
    where_clause = f"WHERE {' AND '.join(terms)} " if terms else ""
    order = f"ORDER BY principal, namespace, name, kind, role, deny LIMIT ${len(params) + 1}"
    return _read_all(GRANT.decode, f"SELECT {GRANT} FROM grants {where_clause}{order}", *params, limit)  # noqa: S608


def _pad_principals(principals: tuple[str, ...]) -> tuple[str, ...]:
    """Repeat the last principal until there are `GROUPS_MAX` principals.

    The text of the statement is then the same for any number of principals, so that the databases prepare it once.
    """
    return principals + principals[-1:] * (GROUPS_MAX - len(principals))


def list_owned(principals: tuple[str, ...], namespace: NamespacePath, name: str | None) -> Steps[list[Grant]]:
    """Return the grants that make one of the principals the owner of an entry of the namespace.

    If `name` is not None, return only the grants on the entry with this name. Only the first `GROUPS_MAX` principals
    count.
    """
    padded_principals = _pad_principals(principals[:GROUPS_MAX])
    condition = f"principal IN ({format_placeholders(GROUPS_MAX)}) AND role = 'owner' AND namespace = ${GROUPS_MAX + 1}"
    params = (*padded_principals, pack(namespace))
    if name is None:
        return _read_all(GRANT.decode, f"SELECT {GRANT} FROM grants WHERE {condition} AND name <> ''", *params)  # noqa: S608
    sql = f"SELECT {GRANT} FROM grants WHERE {condition} AND name = ${GROUPS_MAX + 2} AND name <> ''"  # noqa: S608
    return _read_all(GRANT.decode, sql, *params, name)


def owns_any(principals: tuple[str, ...]) -> Steps[bool]:
    """Return whether one of the principals owns a table, view or function."""
    rows = yield StoreStatement(
        f"SELECT 1 FROM grants WHERE principal IN ({format_placeholders(GROUPS_MAX)}) AND role = 'owner' "  # noqa: S608
        "AND name <> '' LIMIT 1",
        _pad_principals(principals[:GROUPS_MAX]),
    )
    return bool(rows)


def read_grants_of_any(principals: tuple[str, ...]) -> Steps[list[Grant]]:
    """Return the grants of several principals, except those that make a principal the owner of an entry."""
    if not principals:
        return []
    condition = f"principal IN ({format_placeholders(GROUPS_MAX)})"
    sql = (
        f"SELECT {GRANT} FROM grants WHERE {condition} AND {NO_OWNERSHIP} "  # noqa: S608
        "ORDER BY principal, namespace, name, role"
    )
    grants = yield from _read_all(GRANT.decode, sql, *_pad_principals(principals))
    return grants


def read_audit_records(after_id: str | None, limit: int) -> Steps[list[AuditRecord]]:
    """Return at most `limit` audit records with an id greater than `after_id`, in order of id."""
    sql = f"SELECT {AUDIT} FROM audit WHERE id > $1 ORDER BY id LIMIT $2"  # noqa: S608
    return _read_all(AUDIT.decode, sql, after_id or "", limit)


def load_secret(name: str) -> Steps[bytes | None]:
    return _read_first(lambda row: bytes(row[0]), "SELECT value FROM secrets WHERE name = $1", name)


def load_cursor(consumer: str) -> Steps[str | None]:
    return _read_first(lambda row: str(row[0]), "SELECT position FROM cursors WHERE consumer = $1", consumer)


def find_violations() -> Steps[list[str]]:
    """Return a text for each violation of the store's invariants."""
    lines = []
    for invariant, sql in _INVARIANTS:
        rows = yield StoreStatement(sql)
        lines += [f"{invariant}: {row[0]!r}" for row in rows]
    return lines


_INVARIANTS = (
    (
        "namespace without its parent",
        "SELECT path FROM namespaces AS child WHERE parent <> '' "
        "AND NOT EXISTS (SELECT 1 FROM namespaces AS up WHERE up.path = child.parent)",
    ),
    (
        "namespace whose path does not start with its parent",
        "SELECT path FROM namespaces WHERE parent <> '' AND substr(path, 1, length(parent) + 1) <> parent || '\x1f'",
    ),
    (
        "entry without its namespace",
        "SELECT uuid FROM entries WHERE NOT EXISTS (SELECT 1 FROM namespaces WHERE path = entries.namespace)",
    ),
    (
        "entry in the wrong space of names",
        "SELECT uuid FROM entries WHERE (space = 'function') <> (kind = 'function')",
    ),
    (
        "entry with an impossible version",
        "SELECT uuid FROM entries WHERE version < 1",
    ),
    (
        "instant both live and archived",
        "SELECT id FROM instants WHERE id IN (SELECT id FROM instants_archive) "
        "OR position IN (SELECT position FROM instants_archive)",
    ),
    (
        "index file of a table without a name",
        "SELECT location FROM index_files WHERE uuid NOT IN (SELECT uuid FROM entries) "
        "AND uuid NOT IN (SELECT uuid FROM dropped)",
    ),
    (
        "retained entry with a name",
        "SELECT uuid FROM retained WHERE uuid IN (SELECT uuid FROM entries) OR uuid IN (SELECT uuid FROM dropped)",
    ),
    (
        "retained entry without claims",
        "SELECT uuid FROM retained WHERE uuid NOT IN (SELECT uuid FROM claims)",
    ),
    (
        "index file without its table's index version",
        "SELECT location FROM index_files WHERE uuid NOT IN (SELECT uuid FROM index_versions)",
    ),
    (
        "flushed offset of a table without a name",
        "SELECT uuid FROM stream_offsets WHERE uuid NOT IN (SELECT uuid FROM entries) "
        "AND uuid NOT IN (SELECT uuid FROM dropped) AND uuid NOT IN (SELECT uuid FROM retained)",
    ),
    (
        "removal flush of a table without a name",
        "SELECT uuid FROM removal_flushes WHERE uuid NOT IN (SELECT uuid FROM entries) "
        "AND uuid NOT IN (SELECT uuid FROM dropped)",
    ),
    (
        "producer of a table without a name",
        "SELECT producer FROM producers WHERE uuid NOT IN (SELECT uuid FROM entries) "
        "AND uuid NOT IN (SELECT uuid FROM dropped)",
    ),
    (
        "unfinished instant in the archive",
        "SELECT id FROM instants_archive WHERE state IN ('requested', 'inflight')",
    ),
)
