"""Operations on claims: which folders belong to which table, view or function, by its UUID.

A claim comes with the name and goes with the last name, live or dropped; a purge keeps it until the files are gone. No
two of different UUIDs overlap (are equal, or one inside the other), except folders that were claimed as shared. Two
transactions that each see only their own insert could break that, so who adds claims takes a turn (a row lock).
"""

from __future__ import annotations

import json

from metaserver.errors import BadRequest, CommitConflict
from metaserver.store import port
from metaserver.store.by_uuid import UNNAMED
from metaserver.store.rows import pack
from metaserver.store.statement import Row, Statement, Steps

_OWN, _SHARED, _ALLOWED = range(3)
"""In the column `shared`. What is allowed is nobody's claim: a table may name files there that are others'."""
_AFTER_SLASH = "0"
"""The character behind the slash: what lies below a folder sorts between `folder/` and `folder0`."""


def claim(op: port.ClaimLocations, now_ms: int) -> Steps[None]:
    rows = yield Statement("SELECT location FROM claims WHERE uuid = $1 AND shared <> $2", (op.uuid, _ALLOWED))
    if op.fresh and rows:
        raise BadRequest(f"Something else has the UUID {op.uuid}, or its files are being purged; choose another UUID")
    if op.returns and rows:
        yield from check_restored(op.uuid)
    held = [str(row[0]) for row in rows]
    missing = [each for each in op.locations if not any(_lies_in(each.key, key) for key in held)]
    if not missing:
        return
    yield Statement("SELECT turn FROM claim_turns", lock="UPDATE")
    for each in missing:
        if op.checked:
            yield from _check(op, each)
        yield Statement(
            "INSERT INTO claims (location, uuid, shared) VALUES ($1, $2, $3) "
            "ON CONFLICT (location, uuid) DO UPDATE SET shared = excluded.shared WHERE claims.shared > excluded.shared",
            (each.key, op.uuid, int(each.shared)),
        )


def allow(op: port.AllowLocations, now_ms: int) -> Steps[None]:
    yield Statement("DELETE FROM claims WHERE uuid = $1 AND shared = $2", (op.uuid, _ALLOWED))
    for each in op.locations:
        yield Statement(
            "INSERT INTO claims (location, uuid, shared) VALUES ($1, $2, $3) ON CONFLICT (location, uuid) DO NOTHING",
            (each.key, op.uuid, _ALLOWED),
        )


def release(op: port.ReleaseLocations, now_ms: int) -> Steps[None]:
    yield Statement(f"DELETE FROM claims WHERE uuid = $1 AND {UNNAMED}", (op.uuid,))  # noqa: S608


def overlapping(keys: list[str], uuid: str, limit: int, *, shared: bool = True) -> Steps[list[port.Claim]]:
    """Claims of others than `uuid` that overlap one of `keys`: of those that hold it all, of those in it `limit`."""
    found: dict[tuple[str, str], port.Claim] = {}
    for key in keys:
        above = yield from _above(key, uuid, shared=shared)
        below = yield from _below(key, uuid, limit, shared=shared)
        for one in (*above, *below):
            found[one.location, one.uuid] = one
    return list(found.values())


def of(uuid: str) -> Steps[list[port.Claim]]:
    rows = yield Statement("SELECT location, uuid, shared FROM claims WHERE uuid = $1 ORDER BY location", (uuid,))
    return [_claim(row) for row in rows]


def _check(op: port.ClaimLocations, wanted: port.ClaimedLocation) -> Steps[None]:
    # A folder that its owner shares may lie in another's shared one, but never in a place of its own.
    found = yield from overlapping([wanted.key], op.uuid, 1, shared=not wanted.shared)
    for one in found:
        if one.location == wanted.key and op.name and (yield from gave_up(one.uuid, op.namespace, op.name)):
            continue
        raise BadRequest(
            f"{wanted.what} {wanted.shown!r} overlaps the files of another table, view or function; choose another, or "
            "leave it out, and the server chooses one. What was dropped keeps its location until it is purged or its "
            "retention ends"
        )


def gave_up(uuid: str, namespace: port.NamespacePath, name: str) -> Steps[bool]:
    """See the port. Writers of the namespace could bring it back, so they gain nothing by taking its place."""
    rows = yield Statement(
        "SELECT 1 FROM dropped WHERE uuid = $1 AND namespace = $2 AND name = $3 "
        "AND NOT EXISTS (SELECT 1 FROM entries WHERE uuid = $1) "
        "AND NOT EXISTS (SELECT 1 FROM dropped WHERE uuid = $1 AND (namespace <> $2 OR name <> $3))",
        (uuid, pack(namespace), name),
    )
    return bool(rows)


def check_restored(uuid: str) -> Steps[None]:
    """CommitConflict where something live lies just where this lies, which comes back."""
    yield Statement("SELECT turn FROM claim_turns", lock="UPDATE")
    rows = yield Statement(
        "SELECT 1 FROM claims AS mine JOIN claims AS other ON other.location = mine.location "
        "WHERE mine.uuid = $1 AND other.uuid <> $1 AND mine.shared + other.shared < 2 "
        "AND EXISTS (SELECT 1 FROM entries WHERE uuid = other.uuid) LIMIT 1",
        (uuid,),
    )
    if rows:
        raise CommitConflict(
            "Something else was created in its location since it was dropped; drop and purge that first"
        )


def _above(key: str, uuid: str, *, shared: bool) -> Steps[list[port.Claim]]:
    """Claims on `key` itself and on what it lies in."""
    folders, at = [key], len(key)
    while (at := key.rfind("/", 0, at)) > 0:
        folders.append(key[:at])
    rows = yield Statement(
        "SELECT location, uuid, shared FROM claims WHERE location IN {each_of_1} AND uuid <> $2 AND shared <= $3",
        (json.dumps(folders), uuid, int(shared)),
    )
    return [_claim(row) for row in rows]


def _below(key: str, uuid: str, limit: int, *, shared: bool) -> Steps[list[port.Claim]]:
    rows = yield Statement(
        "SELECT location, uuid, shared FROM claims WHERE location > $1 AND location < $2 AND uuid <> $3 "
        "AND shared <= $4 ORDER BY location LIMIT $5",
        (f"{key}/", f"{key}{_AFTER_SLASH}", uuid, int(shared), limit),
    )
    return [_claim(row) for row in rows]


def _lies_in(key: str, folder: str) -> bool:
    return key == folder or key.startswith(f"{folder}/")


def _claim(row: Row) -> port.Claim:
    return port.Claim(location=str(row[0]), uuid=str(row[1]), shared=row[2] == _SHARED, allowed=row[2] == _ALLOWED)
