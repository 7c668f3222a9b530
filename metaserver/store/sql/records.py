"""Operations on idempotency keys, metrics, tokens, grants, audit, cursors, leases, secrets and further warehouses."""

from __future__ import annotations

from collections.abc import Sequence

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    NamespaceNotEmpty,
    NoSuchWarehouse,
    NotFound,
)
from seamark.metaserver.store import operations, port
from seamark.metaserver.store.model import EntryKind, Grant, GrantLimits, NamespacePath, StoredWarehouse
from seamark.metaserver.store.sql.by_uuid import CLAIMS_LOCK
from seamark.metaserver.store.sql.rows import (
    AUDIT,
    GRANT,
    IDEMPOTENCY,
    METRICS,
    TOKEN,
    WAREHOUSE,
    make_range_end,
    pack,
    pack_json,
)
from seamark.metaserver.store.sql.statement import Row, Steps, StoreStatement, split_batches

NO_OWNERSHIP = "(role <> 'owner' OR name = '')"
"""A condition that excludes grants of owners of tables, views and functions, because a principal may own many."""
_AHEAD_CLOCK_MIN_FACTOR = 4
"""A lease with more than this multiple of the duration of a new lease was taken with a wrong clock, and is ignored."""
_CLOCKS_DIFFER_MS = 600_000
"""The maximum difference between the clocks of replicas in milliseconds."""


def save_idempotency(op: operations.SaveIdempotency, now_ms: int) -> Steps[None]:
    """Insert the record of a key, or replace an expired record. A valid record is kept, and raises IdempotencyTaken."""
    rows = yield StoreStatement(
        f"INSERT INTO idempotency ({IDEMPOTENCY}) VALUES ({IDEMPOTENCY.placeholders}) ON CONFLICT (key) DO UPDATE SET "  # noqa: S608
        "scope = excluded.scope, request_hash = excluded.request_hash, status = excluded.status, "
        "body = excluded.body, metadata_location = excluded.metadata_location, expires_ms = excluded.expires_ms "
        "WHERE idempotency.expires_ms <= $8 RETURNING 1",
        (*IDEMPOTENCY.encode(op.record), now_ms),
    )
    if not rows:
        raise port.IdempotencyTaken(op.record.key)


def save_metrics_report(op: operations.SaveMetricsReport, now_ms: int) -> Steps[None]:
    """Insert a report. If `op.keep` is set, keep only this number of the newest reports of the table.

    The ids of reports sort by time.
    """
    yield StoreStatement(
        f"INSERT INTO metrics ({METRICS}) VALUES ({METRICS.placeholders}) ON CONFLICT (id) DO NOTHING",  # noqa: S608
        METRICS.encode(op.report),
    )
    if op.keep is not None:
        yield StoreStatement(
            "DELETE FROM metrics WHERE uuid = $1 AND id <= "
            "(SELECT id FROM metrics WHERE uuid = $1 ORDER BY id DESC LIMIT 1 OFFSET $2)",
            (op.report.uuid, op.keep),
        )


def save_token(op: operations.SaveToken, now_ms: int) -> Steps[None]:
    token = op.token
    # Free the name of an expired token.
    yield StoreStatement(
        "UPDATE tokens SET revoked_ms = expires_ms WHERE name = $1 AND revoked_ms IS NULL AND expires_ms <= $2",
        (token.name, now_ms),
    )
    rows = yield StoreStatement(
        f"INSERT INTO tokens ({TOKEN}) VALUES ({TOKEN.placeholders}) ON CONFLICT DO NOTHING RETURNING 1",  # noqa: S608
        TOKEN.encode(token),
    )
    if not rows:
        raise AlreadyExists(f"Token already exists: {token.name}")


def revoke_token(op: operations.RevokeToken, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        "UPDATE tokens SET revoked_ms = $1 WHERE name = $2 AND revoked_ms IS NULL "
        "AND (expires_ms IS NULL OR expires_ms > $1) RETURNING 1",
        (op.now_ms, op.name),
    )
    if not rows:
        raise NotFound(f"Token does not exist or is no longer valid: {op.name}")


def save_grant(op: operations.SaveGrant, now_ms: int) -> Steps[None]:
    """Insert a grant, unless it exists. Only a new grant can exceed a limit, which rolls the transaction back."""
    rows = yield StoreStatement(
        f"INSERT INTO grants ({GRANT}) VALUES ({GRANT.placeholders}) ON CONFLICT DO NOTHING RETURNING 1",  # noqa: S608
        GRANT.encode(op.grant),
    )
    if rows and op.limits is not None:
        yield from _check_grant_limits(op.grant, op.limits)


def _check_grant_limits(grant: Grant, limits: GrantLimits) -> Steps[None]:
    """Check that the numbers of grants are within their limits after a grant was added.

    The numbers are limited because each request reads the grants of its principal, and any manager of an object can add
    grants for any principal.

    Raises:
        BadRequest: A number of grants exceeds its limit.
    """
    path, top = pack(grant.namespace), pack(grant.namespace[:1])
    range_condition = f"namespace BETWEEN $4 AND $5 AND {NO_OWNERSHIP}"
    rows = yield StoreStatement(
        f"SELECT (SELECT count(*) FROM grants WHERE namespace = $1 AND name = $2 AND {NO_OWNERSHIP}), "  # noqa: S608
        f"(SELECT count(*) FROM grants WHERE principal = $3 AND {NO_OWNERSHIP}), "
        f"(SELECT count(*) FROM grants WHERE principal = $3 AND {range_condition}), "
        f"(SELECT count(*) FROM grants WHERE {range_condition})",
        (path, grant.name, grant.principal, top, make_range_end(top)),
    )
    place = f"in namespace {format_path(grant.namespace[:1])}"
    counts_and_limits = (
        ("on this object", limits.of_object),
        (f"of {grant.principal}", limits.of_principal),
        (f"of {grant.principal} {place}", limits.of_principal_below),
        (place, limits.below),
    )
    for count, (description, limit) in zip(rows[0], counts_and_limits, strict=True):
        if int(count) > limit:
            raise BadRequest(
                f"There are {limit:,} grants {description}, which is the limit; remove some, or grant the right to a "
                "role or on a namespace above. A principal that manages the grants of the whole catalog has no limit"
            )


def remove_grant(op: operations.RemoveGrant, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        "DELETE FROM grants WHERE principal = $1 AND role = $2 AND namespace = $3 AND kind = $4 AND name = $5 "
        "AND deny = $6 RETURNING 1",
        GRANT.encode(op.grant),
    )
    if not rows:
        raise NotFound(f"Grant does not exist: {op.grant.describe()}")


def remove_grants(op: operations.RemoveGrantsOf, now_ms: int) -> Steps[None]:
    for table in ("grants", "dropped_grants"):
        yield StoreStatement(f"DELETE FROM {table} WHERE principal = $1 AND deny = 0", (op.principal,))  # noqa: S608


def forget_grants_below(path: NamespacePath) -> Steps[None]:
    """Remove the grants on a dropped namespace and everything in it, but keep the denials.

    The grants must not apply to a new namespace of the same name, because managers of the old namespace may have
    granted themselves rights. Denials are kept, so that no principal evades a denial when the name is used again.
    """
    yield StoreStatement(
        "DELETE FROM grants WHERE namespace BETWEEN $1 AND $2 AND deny = 0",
        (pack(path), make_range_end(pack(path))),
    )


def move_grants(
    kind: EntryKind, namespace: NamespacePath, name: str, to_namespace: NamespacePath, to_name: str
) -> Steps[None]:
    """Move the grants on an entry to its new name, and copy the denials. Existing grants on the new name are kept.

    The denials also stay on the old name (`_take_grants`), so that no principal evades them when another entry gets it.
    """
    for row in (yield from _take_grants(kind, namespace, name)):
        yield from _put_grant(row, to_namespace, to_name)


def move_grants_to_dropped(dropped_id: str | None, kind: EntryKind, namespace: NamespacePath, name: str) -> Steps[None]:
    """Move the grants on a dropped entry to the table of dropped grants, or delete them if it cannot be restored.

    So the grants do not apply to a new entry with the same name. Denials are copied, not moved: they also stay on the
    name, and apply to such a new entry.

    Args:
        dropped_id: The id of the dropped entry, by which its grants and denials can be restored. None if the entry
            cannot be restored.
        kind: The kind of the entry.
        namespace: The namespace of the entry.
        name: The name of the entry.
    """
    rows = yield from _take_grants(kind, namespace, name)
    if dropped_id is None:
        return
    for row in rows:
        yield StoreStatement(
            "INSERT INTO dropped_grants (dropped_id, principal, role, kind, deny) VALUES ($1, $2, $3, $4, $5)",
            (dropped_id, *row),
        )


def restore_grants(dropped_id: str, namespace: NamespacePath, name: str) -> Steps[None]:
    """Restore the grants on a restored entry under its new name."""
    rows = yield StoreStatement(
        "DELETE FROM dropped_grants WHERE dropped_id = $1 RETURNING principal, role, kind, deny", (dropped_id,)
    )
    for row in rows:
        yield from _put_grant(row, namespace, name)


def forget_dropped_grants(dropped_id: str) -> Steps[None]:
    """Remove the grants on a dropped entry that can no longer be restored."""
    yield StoreStatement("DELETE FROM dropped_grants WHERE dropped_id = $1", (dropped_id,))


def _take_grants(kind: EntryKind, namespace: NamespacePath, name: str) -> Steps[Sequence[Row]]:
    """Remove the grants on an entry, and return its grants and denials as rows (principal, role, kind, deny).

    Denials are not removed. Otherwise a principal could evade a denial when another entry gets the name, for example
    when renames replace a table. Also, the catalog that a federated warehouse reads could remove denials by a drop.
    """
    on_entry, params = f"namespace = $1 AND name = $2 AND {_SAME_SPACE[kind]}", (pack(namespace), name)
    columns = "principal, role, kind, deny"
    denials = yield StoreStatement(f"SELECT {columns} FROM grants WHERE {on_entry} AND deny = 1", params)  # noqa: S608
    grants = yield StoreStatement(f"DELETE FROM grants WHERE {on_entry} AND deny = 0 RETURNING {columns}", params)  # noqa: S608
    return [*grants, *denials]


def _put_grant(row: Row, namespace: NamespacePath, name: str) -> Steps[None]:
    """Save a row of `_take_grants` as a grant on an entry of this name."""
    principal, role, kind, deny = row
    yield StoreStatement(
        f"INSERT INTO grants ({GRANT}) VALUES ({GRANT.placeholders}) ON CONFLICT DO NOTHING",  # noqa: S608
        GRANT.encode(Grant(principal, role, namespace, kind, name, bool(deny))),
    )


_SAME_SPACE = {
    EntryKind.TABLE: "kind <> 'function'",
    EntryKind.VIEW: "kind <> 'function'",
    EntryKind.FUNCTION: "kind = 'function'",
}
"""By kind, a condition for grants on entries of all kinds that share one set of names with this kind."""


def save_audit(op: operations.SaveAudit, now_ms: int) -> Steps[None]:
    """Store records. A batch with an unknown outcome can be repeated, because records with existing ids are skipped."""
    for values, params in split_batches([AUDIT.encode(record) for record in op.records]):
        yield StoreStatement(f"INSERT INTO audit ({AUDIT}) VALUES {values} ON CONFLICT (id) DO NOTHING", params)  # noqa: S608


def save_cursor(op: operations.SaveCursor, now_ms: int) -> Steps[None]:
    if op.expected is None:
        rows = yield StoreStatement(
            "INSERT INTO cursors (consumer, position) VALUES ($1, $2) ON CONFLICT (consumer) DO NOTHING RETURNING 1",
            (op.consumer, op.position),
        )
    else:
        rows = yield StoreStatement(
            "UPDATE cursors SET position = $1 WHERE consumer = $2 AND position = $3 RETURNING 1",
            (op.position, op.consumer, op.expected),
        )
    if not rows:
        raise CommitConflict(f"The cursor of {op.consumer} was moved by another replica; read it again")


def take_lease(op: operations.TakeLease, now_ms: int) -> Steps[int]:
    """Take, renew or release a lease, and return its fencing number.

    The lease is taken if it has no holder, if `op.holder` has it, if it has ended, or if it ends so late that the clock
    of its holder must be wrong. A release is a lease that ends now.

    Raises:
        CommitConflict: Another holder has the lease.
    """
    # All leases with one name have the same duration. Ignore a lease that ends long after a new lease, because its
    # holder's clock was wrong, and otherwise no other holder could take the lease until then.
    lasts_ms = op.until_ms - op.now_ms
    # A release has no duration, so no end is implausible: a lease of another holder is never ignored.
    plausible_end_ms = 1 << 62
    if lasts_ms > 0:
        plausible_end_ms = op.now_ms + max(_AHEAD_CLOCK_MIN_FACTOR * lasts_ms, _CLOCKS_DIFFER_MS)
    rows = yield StoreStatement(
        "INSERT INTO leases (name, holder, until_ms, fence, state) VALUES ($1, $2, $3, 1, $5) "
        "ON CONFLICT (name) DO UPDATE SET "
        "holder = excluded.holder, until_ms = excluded.until_ms, state = excluded.state, "
        "fence = leases.fence + CASE WHEN leases.holder = excluded.holder THEN 0 ELSE 1 END "
        "WHERE leases.holder = excluded.holder OR leases.until_ms <= $4 OR leases.until_ms > $6 RETURNING fence",
        (op.name, op.holder, op.until_ms, op.now_ms, op.state, plausible_end_ms),
    )
    if not rows:
        raise CommitConflict(f"Another holder has the lease {op.name}; try again later")
    return int(rows[0][0])


def take_priority(op: operations.TakePriority, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        "INSERT INTO leases (name, holder, until_ms, fence, state) VALUES ($1, $2, {clock_ms} + $3, 1, '') "
        "ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until_ms = excluded.until_ms "
        "WHERE leases.holder = excluded.holder OR leases.until_ms <= {clock_ms} "
        "OR leases.until_ms > {clock_ms} + $4 RETURNING 1",
        (f"{operations.PRIORITY}{op.uuid}", op.holder, op.lasts_ms, _AHEAD_CLOCK_MIN_FACTOR * op.lasts_ms),
    )
    if not rows:
        raise CommitConflict("Another process has commit priority for the table; try again")


def end_priority(op: operations.EndPriority, now_ms: int) -> Steps[None]:
    yield StoreStatement(
        "DELETE FROM leases WHERE name = $1 AND holder = $2", (f"{operations.PRIORITY}{op.uuid}", op.holder)
    )


def read_lease_state(lease: str, now_ms: int) -> Steps[str]:
    rows = yield StoreStatement("SELECT state FROM leases WHERE name = $1 AND until_ms > $2", (lease, now_ms))
    return str(rows[0][0] or "") if rows else ""


def read_fence(lease: str) -> Steps[int]:
    rows = yield StoreStatement("SELECT fence FROM leases WHERE name = $1", (lease,))
    return int(rows[0][0]) if rows else 0


def check_fence(op: operations.CheckFence, now_ms: int) -> Steps[None]:
    # With the lock, another holder takes the lease either before this check, or after the transaction.
    rows = yield StoreStatement("SELECT fence FROM leases WHERE name = $1", (op.name,), lock="SHARE")
    fence = int(rows[0][0]) if rows else 0
    if fence != op.fence:
        raise CommitConflict(f"The fencing number of the lease {op.name} is {fence} and no longer {op.fence}")


def swap_secret(name: str, expected: bytes | None, value: bytes) -> Steps[bytes]:
    if expected is None:
        yield StoreStatement(
            "INSERT INTO secrets (name, value) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING", (name, value)
        )
    else:
        yield StoreStatement("UPDATE secrets SET value = $1 WHERE name = $2 AND value = $3", (value, name, expected))
    rows = yield StoreStatement("SELECT value FROM secrets WHERE name = $1", (name,))
    return bytes(rows[0][0]) if rows else b""


def prune_records(now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> Steps[int]:
    """Remove expired idempotency records, audit events and metrics.

    Args:
        now_ms: The time of the call.
        audit_before_ms: The time before which audit events are expired.
        metrics_before_ms: The time before which metrics are expired.
        limit: The maximum number of removed rows of all tables together. The oldest rows of each table are removed
            first.

    Returns:
        The number of removed rows.
    """
    removed_count = 0
    # An idempotency record has also expired if its end is exactly `now_ms`, so its limit is `now_ms + 1`.
    for table, key, time_column, before_ms in (
        ("idempotency", "key", "expires_ms", now_ms + 1),
        ("audit", "id", "at_ms", audit_before_ms),
        ("metrics", "id", "received_ms", metrics_before_ms),
    ):
        rows = yield StoreStatement(
            f"DELETE FROM {table} WHERE {key} IN "  # noqa: S608
            f"(SELECT {key} FROM {table} WHERE {time_column} < $1 ORDER BY {time_column} LIMIT $2) RETURNING 1",
            (before_ms, limit - removed_count),
        )
        removed_count += len(rows)
    return removed_count


# Further warehouses --------------------------------------------------------------------------------------------------
#
# The database of a server contains the records of its warehouses. The database of a warehouse contains its id in
# `catalog_state`, so that a lost or exchanged database is noticed. A transaction that adds a top-level namespace locks
# this row FOR KEY SHARE, and a transaction that drops the warehouse locks it FOR UPDATE. So no namespace is created in
# a dropped warehouse.

_CONTENT = ("namespaces", "entries", "dropped", "retained", "claims")
"""The tables that are empty if nothing in the catalog can own files."""

_SERVER_CONTENT = ("namespaces", "tokens", "warehouses")
"""The tables that are empty in the database of a new warehouse, but not all empty in the database of a used server."""


def create_warehouse(op: operations.CreateWarehouse, now_ms: int) -> Steps[None]:
    """Record a warehouse if its name and its location are free.

    The lock lets only one transaction at a time compare locations. Both the locations and their keys are compared,
    because a key may be the place in another store to which a location is mapped.

    Raises:
        AlreadyExists: Another warehouse has the name.
        BadRequest: The location overlaps the location of another warehouse, or there are too many warehouses.
    """
    yield CLAIMS_LOCK
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses ORDER BY name")  # noqa: S608
    stored_warehouses = [WAREHOUSE.decode(row) for row in rows]
    new_warehouse = op.warehouse
    for other in stored_warehouses:
        if other.name == new_warehouse.name:
            raise AlreadyExists(f"Warehouse already exists: {new_warehouse.name}")
        if _do_overlap(new_warehouse.location_key, other.location_key) or _do_overlap(
            new_warehouse.location, other.location
        ):
            raise BadRequest(
                f"The location {new_warehouse.location!r} overlaps the location {other.location!r} of the warehouse "
                f"{other.name!r}; choose another"
            )
    if len(stored_warehouses) >= op.limit:
        raise BadRequest(
            f"There are {len(stored_warehouses)} further warehouses, as many as the setting warehouses_limit allows; "
            "drop one, or have the operator raise the limit"
        )
    yield StoreStatement(
        f"INSERT INTO warehouses ({WAREHOUSE}) VALUES ({WAREHOUSE.placeholders}) ON CONFLICT DO NOTHING",  # noqa: S608
        WAREHOUSE.encode(new_warehouse),
    )


def _do_overlap(key: str, other: str) -> bool:
    return _is_within(key, other) or _is_within(other, key)


def _is_within(key: str, folder: str) -> bool:
    return key == folder or key.startswith(folder.rstrip("/") + "/")


def change_warehouse(op: operations.ChangeWarehouse, now_ms: int) -> Steps[None]:
    new_warehouse = op.warehouse
    rows = yield StoreStatement(
        "UPDATE warehouses SET settings = $1, credentials = $2, version = $3 WHERE id = $4 AND version = $5 "
        "RETURNING 1",
        (
            pack_json(new_warehouse.settings),
            new_warehouse.credentials,
            new_warehouse.version,
            new_warehouse.id,
            op.expected_version,
        ),
    )
    if not rows:
        raise CommitConflict(
            f"The warehouse {new_warehouse.name} was changed by another request; read it again and retry"
        )


def remove_warehouse(op: operations.RemoveWarehouse, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement("DELETE FROM warehouses WHERE id = $1 RETURNING 1", (op.id,))
    if not rows:
        raise NoSuchWarehouse(f"The warehouse with the id {op.id} does not exist")


def assign_catalog_to_warehouse(op: operations.AssignCatalogToWarehouse, now_ms: int) -> Steps[None]:
    """Record the warehouse to which this database belongs. `now_ms` is a parameter of all operations.

    Raises:
        CommitConflict: The database belongs to another warehouse, or to a server.
    """
    rows = yield StoreStatement("SELECT id FROM catalog_state", lock="UPDATE")
    if rows and rows[0][0] == op.id:
        return
    if not rows or rows[0][0]:
        raise CommitConflict("The database belongs to another warehouse")
    for table in _SERVER_CONTENT:
        if (yield StoreStatement(f"SELECT 1 FROM {table} LIMIT 1")):  # noqa: S608
            raise CommitConflict(
                f"The database has {table}, so it belongs to a server; a further warehouse needs its own database"
            )
    yield StoreStatement("UPDATE catalog_state SET id = $1", (op.id,))


def close_catalog(op: operations.CloseCatalog, now_ms: int) -> Steps[None]:
    """Close an empty catalog, so that nothing can be created in it.

    With the lock, a transaction that creates something (`hold_catalog`) ends before the count, or waits and fails.

    Raises:
        NamespaceNotEmpty: The catalog has namespaces, or dropped entries whose files are left.
    """
    yield StoreStatement("SELECT closed FROM catalog_state", lock="UPDATE")
    counts = ", ".join(f"(SELECT count(*) FROM {table})" for table in _CONTENT)  # noqa: S608
    rows = yield StoreStatement(f"SELECT {counts}")
    namespace_count, *other_counts = rows[0]
    if namespace_count:
        raise NamespaceNotEmpty(
            f"The warehouse has {namespace_count} namespaces: drop its tables, views and namespaces first"
        )
    if any(other_counts):
        raise NamespaceNotEmpty(
            "The warehouse has dropped tables or views whose files are left: purge them with seamark undrop and "
            "seamark retained, or wait until their retention ends"
        )
    yield StoreStatement("UPDATE catalog_state SET closed = 1")


def hold_catalog() -> Steps[None]:
    """Lock the catalog, so that the warehouse of this database cannot be dropped until this transaction ends.

    Raises:
        NoSuchWarehouse: The warehouse is dropped.
    """
    rows = yield StoreStatement("SELECT closed FROM catalog_state", lock="KEY SHARE")
    if rows and rows[0][0]:
        raise NoSuchWarehouse("The warehouse is being dropped, so nothing can be created in it")


def find_warehouse(name: str) -> Steps[StoredWarehouse | None]:
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses WHERE name = $1", (name,))  # noqa: S608
    return WAREHOUSE.decode(rows[0]) if rows else None


def list_warehouses() -> Steps[list[StoredWarehouse]]:
    rows = yield StoreStatement(f"SELECT {WAREHOUSE} FROM warehouses ORDER BY name")  # noqa: S608
    return [WAREHOUSE.decode(row) for row in rows]


def load_catalog_id() -> Steps[str]:
    rows = yield StoreStatement("SELECT id FROM catalog_state")
    return str(rows[0][0]) if rows else ""
