"""Operations on rows without a name: idempotency, metrics, tokens, grants, audit, cursors, leases and secrets."""

from __future__ import annotations

from seamark.formats.protocol.wire import show
from seamark.formats.runtime.errors import AlreadyExists, CommitConflict, NotFound
from seamark.metaserver.store import operations, port
from seamark.metaserver.store.sql.rows import AUDIT, GRANT, IDEMPOTENCY, METRICS, TOKEN, pack
from seamark.metaserver.store.sql.statement import Steps, StoreStatement, batches

_LEASES_COMPARED = 4
"""If a lease lasts this many times longer than a new lease with its name, its holder's clock was ahead."""
_CLOCKS_DIFFER_MS = 600_000
"""The maximum difference between the clocks of replicas."""


def save_idempotency(op: operations.SaveIdempotency, now_ms: int) -> Steps[None]:
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
    # An expired token does not reserve its name.
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
    yield StoreStatement(
        f"INSERT INTO grants ({GRANT}) VALUES ({GRANT.placeholders}) ON CONFLICT DO NOTHING",  # noqa: S608
        GRANT.encode(op.grant),
    )


def remove_grant(op: operations.RemoveGrant, now_ms: int) -> Steps[None]:
    rows = yield StoreStatement(
        "DELETE FROM grants WHERE principal = $1 AND namespace = $2 AND role = $3 RETURNING 1",
        (op.grant.principal, pack(op.grant.namespace), op.grant.role),
    )
    if not rows:
        where = show(op.grant.namespace) or "the whole catalog"
        raise NotFound(f"Grant does not exist: {op.grant.role} for {op.grant.principal} on {where}")


def save_audit(op: operations.SaveAudit, now_ms: int) -> Steps[None]:
    """Store records. A batch with an unknown outcome may be sent again, because existing ids are not changed."""
    for values, params in batches([AUDIT.encode(record) for record in op.records]):
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
    # Leases of one name have the same length. If a lease ends long after a lease that begins now, its holder's
    # clock was wrong. No other holder could take the lease until the end of that time.
    lasts_ms = op.until_ms - op.now_ms
    longest_ms = op.now_ms + max(_LEASES_COMPARED * lasts_ms, _CLOCKS_DIFFER_MS) if lasts_ms > 0 else 1 << 62
    rows = yield StoreStatement(
        "INSERT INTO leases (name, holder, until_ms, fence, state) VALUES ($1, $2, $3, 1, $5) "
        "ON CONFLICT (name) DO UPDATE SET "
        "holder = excluded.holder, until_ms = excluded.until_ms, state = excluded.state, "
        "fence = leases.fence + CASE WHEN leases.holder = excluded.holder THEN 0 ELSE 1 END "
        "WHERE leases.holder = excluded.holder OR leases.until_ms <= $4 OR leases.until_ms > $6 RETURNING fence",
        (op.name, op.holder, op.until_ms, op.now_ms, op.state, longest_ms),
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
        (f"{operations.PRIORITY}{op.uuid}", op.holder, op.lasts_ms, _LEASES_COMPARED * op.lasts_ms),
    )
    if not rows:
        raise CommitConflict("Another process has commit priority for the table; try again")


def end_priority(op: operations.EndPriority, now_ms: int) -> Steps[None]:
    yield StoreStatement(
        "DELETE FROM leases WHERE name = $1 AND holder = $2", (f"{operations.PRIORITY}{op.uuid}", op.holder)
    )


def lease_state(lease: str, now_ms: int) -> Steps[str]:
    rows = yield StoreStatement("SELECT state FROM leases WHERE name = $1 AND until_ms > $2", (lease, now_ms))
    return str(rows[0][0] or "") if rows else ""


def fence_of(lease: str) -> Steps[int]:
    rows = yield StoreStatement("SELECT fence FROM leases WHERE name = $1", (lease,))
    return int(rows[0][0]) if rows else 0


def check_fence(op: operations.CheckFence, now_ms: int) -> Steps[None]:
    fence = yield from fence_of(op.name)
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


def prune(now_ms: int, *, audit_before_ms: int, metrics_before_ms: int, limit: int) -> Steps[int]:
    """Remove at most `limit` rows in total, oldest first."""
    removed = 0
    for table, key, time, before_ms in (
        ("idempotency", "key", "expires_ms", now_ms + 1),
        ("audit", "id", "at_ms", audit_before_ms),
        ("metrics", "id", "received_ms", metrics_before_ms),
    ):
        rows = yield StoreStatement(
            f"DELETE FROM {table} WHERE {key} IN "  # noqa: S608
            f"(SELECT {key} FROM {table} WHERE {time} < $1 ORDER BY {time} LIMIT $2) RETURNING 1",
            (before_ms, limit - removed),
        )
        removed += len(rows)
    return removed
