"""Operations on replicas: the leases of servers that share the database.

The leases are measured by the clock of the database, because the clocks of machines may differ.
"""

from __future__ import annotations

from seamark.metaserver.store import operations
from seamark.metaserver.store.model import Replica
from seamark.metaserver.store.sql.statement import Row, Steps, StoreStatement

_KEPT_MS = 3_600_000
"""The time for which rows of expired leases are kept.

So rows are rarely deleted, and an operator can find the row of a crashed replica.
"""


def renew_replica(op: operations.RenewReplica, now_ms: int) -> Steps[list[Replica]]:
    replica = op.replica
    yield StoreStatement(
        "INSERT INTO replicas (address, weight, version, protocol, started_ms, until_ms) "
        "VALUES ($1, $2, $3, $4, $5, {clock_ms} + $6) ON CONFLICT (address) DO UPDATE SET weight = excluded.weight, "
        "version = excluded.version, protocol = excluded.protocol, started_ms = excluded.started_ms, "
        "until_ms = excluded.until_ms",
        (replica.address, replica.weight, replica.version, replica.protocol, replica.started_ms, op.lease_ms),
    )
    yield StoreStatement("DELETE FROM replicas WHERE until_ms < {clock_ms} - $1", (_KEPT_MS,))
    return (yield from list_live_replicas())


def remove_replica(op: operations.RemoveReplica, now_ms: int) -> Steps[None]:
    yield StoreStatement("DELETE FROM replicas WHERE address = $1", (op.address,))


def list_live_replicas() -> Steps[list[Replica]]:
    rows = yield StoreStatement(
        "SELECT address, weight, version, protocol, started_ms, until_ms - {clock_ms} FROM replicas "
        "WHERE until_ms > {clock_ms} ORDER BY address"
    )
    return [_decode_replica(row) for row in rows]


def _decode_replica(row: Row) -> Replica:
    address, weight, version, protocol, started_ms, expires_in_ms = row
    return Replica(str(address), int(weight), str(version), int(protocol), int(started_ms), int(expires_in_ms))
