"""Operations on claims: the folders of each table, view and function, by UUID.

A claim is added together with the entry's name. It is removed when no live or dropped name and no files remain: an
entry without a name that still has files is retained. Claims of different UUIDs are not equal, and neither contains the
other, except folders that were claimed as shared. Two concurrent transactions see only their own claims, and could
break this rule, so a transaction that adds claims takes a row lock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec

from seamark.formats.runtime.errors import AlreadyExists, BadRequest, CommitConflict
from seamark.metaserver.store import model, operations
from seamark.metaserver.store.sql.by_uuid import CLAIMS_LOCK, UNNAMED, forget_offsets, retain_entry
from seamark.metaserver.store.sql.rows import pack
from seamark.metaserver.store.sql.statement import Row, Steps, StoreStatement

_OWN, _SHARED, _ALLOWED = range(3)
"""The values of the column `shared`, ascending from exclusive to not exclusive.

0: No other entry may use the location. 1: Other entries may also claim the folder as shared. 2: The location is not
claimed. It belongs to other entries, but files of the table may be there.
"""
_AFTER_SLASH = "0"
"""The character that follows the slash in ASCII. All paths below a folder sort between `folder/` and `folder0`."""


def claim_locations(op: operations.ClaimLocations, now_ms: int) -> Steps[None]:
    """Record that files of an entry are in some locations, unless they overlap locations of other entries.

    Args:
        op: The entry and its locations, with four flags. `only_name`: the UUID may have only one live name. `fresh`:
            the UUID must have no claims yet. `returns`: a dropped entry may become live again. `checked`: overlaps with
            locations of other entries are refused.
        now_ms: A parameter of all operations, which is not used here.

    Raises:
        AlreadyExists: `only_name` is true, and the UUID has another live name.
        BadRequest: The UUID is in use although it must be new, or a location overlaps another entry's location.
        CommitConflict: A live entry has claimed a location of the dropped entry.
    """
    if op.only_name:
        yield from _check_only_name(op.uuid)
    rows = yield StoreStatement("SELECT location FROM claims WHERE uuid = $1 AND shared <> $2", (op.uuid, _ALLOWED))
    if op.fresh and rows:
        raise BadRequest(f"The UUID {op.uuid} is in use, or its files are being purged; choose another UUID")
    if op.returns and rows:
        # The UUID was dropped or retained, and may become live again only if no live entry has its location.
        yield from check_restored(op.uuid)
        yield StoreStatement("DELETE FROM retained WHERE uuid = $1", (op.uuid,))
    # A location inside a claimed location of the same UUID needs no claim.
    claimed_keys = [str(row[0]) for row in rows]
    missing = [location for location in op.locations if not any(_is_within(location.key, key) for key in claimed_keys)]
    if not missing:
        return
    if not op.only_name:  # Otherwise `_check_only_name` has taken this lock.
        yield CLAIMS_LOCK
    for location in missing:
        if op.checked:
            yield from _check_location(op, location)
        # If the UUID already has this location, keep the more exclusive claim, which has the lower value of `shared`.
        yield StoreStatement(
            "INSERT INTO claims (location, uuid, shared, spelled) VALUES ($1, $2, $3, $4) "
            "ON CONFLICT (location, uuid) DO UPDATE SET shared = excluded.shared, spelled = excluded.spelled "
            "WHERE claims.shared > excluded.shared",
            (location.key, op.uuid, int(location.shared), location.display_form),
        )


def _check_only_name(uuid: str) -> Steps[None]:
    """Check that the UUID has one live name at most.

    Raises:
        AlreadyExists: The UUID has another live name.
    """
    # A concurrent transaction may have created another name that is not visible yet, and takes the same lock. So the
    # other transaction has ended when this transaction gets the lock, or it waits for this transaction.
    yield CLAIMS_LOCK
    rows = yield StoreStatement("SELECT namespace, name FROM entries WHERE uuid = $1 LIMIT 2", (uuid,))
    if len(rows) > 1:
        raise AlreadyExists(
            f"The UUID {uuid} is live under another name; import or register each table or view under one name, or "
            "drop the other name first"
        )


def allow_locations(op: operations.AllowLocations, now_ms: int) -> Steps[None]:
    """Replace the allowed locations of a table: locations of other entries in which its files may be.

    `now_ms` is a parameter of all operations.
    """
    yield StoreStatement("DELETE FROM claims WHERE uuid = $1 AND shared = $2", (op.uuid, _ALLOWED))
    for location in op.locations:
        yield StoreStatement(
            "INSERT INTO claims (location, uuid, shared) VALUES ($1, $2, $3) ON CONFLICT (location, uuid) DO NOTHING",
            (location.key, op.uuid, _ALLOWED),
        )


def release_locations(op: operations.ReleaseLocations, now_ms: int) -> Steps[None]:
    if op.retained is not None:
        yield from retain_entry(op.retained)
        return
    for table in ("claims", "retained"):
        yield StoreStatement(f"DELETE FROM {table} WHERE uuid = $1 AND {UNNAMED}", (op.uuid,))  # noqa: S608
    yield from forget_offsets(op.uuid)


def record_retained_check(op: operations.RecordRetainedCheck, now_ms: int) -> Steps[None]:
    yield StoreStatement("UPDATE retained SET checked_ms = $2 WHERE uuid = $1", (op.uuid, op.now_ms))


def find_overlapping(keys: Sequence[str], uuid: str, limit: int, *, shared: bool = True) -> Steps[list[model.Claim]]:
    """Return claims of UUIDs other than `uuid` that overlap one of `keys`. A claim belongs to the entry with its UUID.

    The result contains all claims that contain a key, and the first `limit` claims within each key.

    Args:
        keys: The keys of locations.
        uuid: The UUID of the entry whose own claims are left out.
        limit: The maximum number of claims within each key.
        shared: Whether to include shared claims: folders that several entries may claim.
    """
    return (yield from _find_overlapping(keys, uuid, limit, _OWN, _SHARED if shared else _OWN))


def find_allowed_overlaps(keys: Sequence[str], uuid: str, limit: int) -> Steps[list[model.Claim]]:
    """Return the allowed locations of UUIDs other than `uuid` that overlap one of `keys`."""
    return (yield from _find_overlapping(keys, uuid, limit, _ALLOWED, _ALLOWED))


def _find_overlapping(
    keys: Sequence[str], uuid: str, limit: int, shared_min: int, shared_max: int
) -> Steps[list[model.Claim]]:
    """Return claims of UUIDs other than `uuid` that contain one of `keys`, and at most `limit` claims within each key.

    Args:
        keys: The keys of locations.
        uuid: The UUID of the entry whose own claims are left out.
        limit: The maximum number of claims within each key.
        shared_min: The lowest value of the column `shared` of the returned claims: `_OWN`, `_SHARED` or `_ALLOWED`.
        shared_max: The highest value of the column.
    """
    claims: dict[tuple[str, str], model.Claim] = {}
    for key in keys:
        claims_above = yield from _find_above(key, uuid, shared_min, shared_max)
        claims_below = yield from _find_below(key, uuid, limit, shared_min, shared_max)
        for claim in (*claims_above, *claims_below):
            claims[claim.location, claim.uuid] = claim
    return list(claims.values())


def list_claims(uuid: str) -> Steps[list[model.Claim]]:
    """Return all claims and allowed locations of the entry with this UUID.

    The column `shared` is 0 (exclusive), 1 (a folder that several entries may claim) or 2 (an allowed location, which
    the entry does not claim). `spelled` is the location itself, and null for claims of earlier versions. The column
    `location` is the key by which locations are compared.
    """
    rows = yield StoreStatement(
        "SELECT location, uuid, shared, spelled FROM claims WHERE uuid = $1 ORDER BY location", (uuid,)
    )
    return [
        msgspec.structs.replace(_decode_claim(claim_values), spelled=spelled or "") for *claim_values, spelled in rows
    ]


def _check_location(op: operations.ClaimLocations, location: model.ClaimedLocation) -> Steps[None]:
    """Check that a location to claim does not overlap a location of another entry.

    Raises:
        BadRequest: It overlaps a location.
    """
    # If the location is a shared folder, it may overlap shared folders of other entries, but no other locations.
    overlaps = yield from find_overlapping([location.key], op.uuid, 1, shared=not location.shared)
    for claim in overlaps:
        if (
            claim.location == location.key
            and op.name
            and (yield from may_reuse_location(claim.uuid, op.namespace, op.name))
        ):
            continue  # A new entry may use the location of an entry that was dropped with the same name.
        raise location.make_overlap_error()


def may_reuse_location(uuid: str, namespace: model.NamespacePath, name: str) -> Steps[bool]:
    """Return whether a new entry with this name may use the location of a removed entry with the UUID `uuid`.

    It may use the location in two cases. In the first case, the removed entry was dropped with this name, and has no
    other name. In the second case, the removed entry has no name, its last name was in this namespace, and it is
    retained, which means that its files remain.

    The caller of the API must be allowed to create and write every entry of the namespace. So it already has, or had
    before the drop, access to the files in the location.
    """
    rows = yield StoreStatement(
        "SELECT 1 FROM dropped WHERE uuid = $1 AND namespace = $2 AND name = $3 "
        "AND NOT EXISTS (SELECT 1 FROM entries WHERE uuid = $1) "
        "AND NOT EXISTS (SELECT 1 FROM dropped WHERE uuid = $1 AND (namespace <> $2 OR name <> $3))",
        (uuid, pack(namespace), name),
    )
    if not rows:
        rows = yield StoreStatement(
            f"SELECT 1 FROM retained WHERE uuid = $1 AND namespace = $2 AND {UNNAMED}",  # noqa: S608
            (uuid, pack(namespace)),
        )
    return bool(rows)


def check_restored(uuid: str) -> Steps[None]:
    """Check that no live entry has claimed the location of the entry to restore.

    Raises:
        CommitConflict: A live entry has claimed the location.
    """
    yield CLAIMS_LOCK
    # Two claims conflict if the sum of their `shared` is below 2: 0 is exclusive and 1 is shared, so two shared claims
    # do not conflict. An allowed location (2) conflicts with nothing.
    rows = yield StoreStatement(
        "SELECT 1 FROM claims AS mine JOIN claims AS other ON other.location = mine.location "
        "WHERE mine.uuid = $1 AND other.uuid <> $1 AND mine.shared + other.shared < 2 "
        "AND EXISTS (SELECT 1 FROM entries WHERE uuid = other.uuid) LIMIT 1",
        (uuid,),
    )
    if rows:
        raise CommitConflict(
            "Another entry was created in its location since it was dropped; drop and purge that entry first"
        )


def _find_above(key: str, uuid: str, shared_min: int, shared_max: int) -> Steps[list[model.Claim]]:
    """Return claims of other UUIDs on `key` and on the folders that contain it.

    A claim is the record that a location belongs to the entry with its UUID. `shared_min` and `shared_max` limit its
    column `shared`: 0 (exclusive), 1 (a folder that several entries may claim) or 2 (an allowed location).
    """
    folders, position = [key], len(key)
    while (position := key.rfind("/", 0, position)) > 0:
        folders.append(key[:position])
    rows = yield StoreStatement(
        "SELECT location, uuid, shared FROM claims WHERE location IN {each_of_1} AND uuid <> $2 "
        "AND shared BETWEEN $3 AND $4",
        (json.dumps(folders), uuid, shared_min, shared_max),
    )
    return [_decode_claim(row) for row in rows]


def _find_below(key: str, uuid: str, limit: int, shared_min: int, shared_max: int) -> Steps[list[model.Claim]]:
    """Return the first `limit` claims of other UUIDs on locations inside the folder `key`, but not on `key`.

    `shared_min` and `shared_max` limit the column `shared` of the claims: 0 (exclusive), 1 (a folder that several
    entries may claim) or 2 (an allowed location).
    """
    rows = yield StoreStatement(
        "SELECT location, uuid, shared FROM claims WHERE location > $1 AND location < $2 AND uuid <> $3 "
        "AND shared BETWEEN $4 AND $5 ORDER BY location LIMIT $6",
        (f"{key}/", f"{key}{_AFTER_SLASH}", uuid, shared_min, shared_max, limit),
    )
    return [_decode_claim(row) for row in rows]


def _is_within(key: str, folder: str) -> bool:
    return key == folder or key.startswith(f"{folder}/")


def _decode_claim(row: Row) -> model.Claim:
    location, uuid, shared = row
    return model.Claim(location=str(location), uuid=str(uuid), shared=shared == _SHARED, allowed=shared == _ALLOWED)
