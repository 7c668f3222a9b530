"""Claims: the locations of tables, views and functions, which no other entry may overlap.

Signatures and purges depend on a table's location, so that two overlapping tables could read, overwrite and delete each
other's files. Each entry claims its location, the folders of its `write.*.path` properties and, if that is elsewhere,
its metadata file, in the transaction that creates or moves it. It keeps all claims while a name, live or dropped,
refers to it, because older files stay where they were written.

A dropped entry may be created again with the same name at the same location: a principal that may do that may also
restore it. It can no longer be restored then, and its purge does not delete the new files.

Folders of `write.*.path` may be shared by several tables if a principal with write access to the whole catalog allows
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote

import structlog

from seamark.metaserver.catalog.parts import PATH_PROPERTIES, CatalogContext, Unclaimed
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.errors import BadRequest, Corrupt, Forbidden, NotFound, RetryLater, SeamarkError
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import metadata_folder
from seamark.metaserver.iceberg.views.view import ViewMetadata
from seamark.metaserver.objects.locations import location_key, parse_location
from seamark.metaserver.store.port import ClaimedLocation, ClaimLocations, Entry, EntryKind, NamespacePath
from seamark.metaserver.wire import show

_log = structlog.get_logger("seamark.claims")

_FILLED_AT_ONCE = 64
_TRIED_EVERY_S = 5.0
_WITHIN_LIMIT = 100_000
"""The limit of claims of others inside a table's folders; only older tables can have such claims."""


async def claim(
    parts: CatalogContext,
    caller: Caller,
    metadata: TableMetadata | ViewMetadata,
    entry: Entry,
    *,
    fresh: bool = False,
    returns: bool = False,
) -> ClaimLocations:
    """The operation by which a table or view with this metadata, as `entry` will name it, claims its locations.

    To be called before any file is written to them. `fresh`: its UUID is new. `returns`: the UUID may be that of a
    dropped entry. BadRequest for a location that overlaps a location of another entry.
    """
    wanted = [ClaimedLocation(key=metadata.location, shown=metadata.location)]
    common = caller.confined_to is None
    for name in PATH_PROPERTIES:
        path = metadata.properties.get(name)
        if path is not None and parts.warehouse.contains(path):
            wanted.append(ClaimedLocation(key=path, shared=common, shown=path, what=name))
    own = entry.metadata_location
    wanted.append(ClaimedLocation(key=own, shared=True, shown=own, what="metadata-location"))
    locations = await asyncio.to_thread(_outermost, wanted)
    await check_known(parts, (each.key for each in locations), entry.uuid)
    operation = ClaimLocations(
        uuid=entry.uuid,
        locations=locations,
        fresh=fresh,
        namespace=entry.namespace,
        name=entry.name,
        returns=returns,
    )
    if not returns:  # nothing is written for what returns
        await _check_free(parts, operation)
    return operation


async def _check_free(parts: CatalogContext, operation: ClaimLocations) -> None:
    """BadRequest for a UUID or a location of another entry, so that no file is written before the transaction, which
    checks again."""
    own = {found.location for found in await parts.store.claims(operation.uuid) if not found.allowed}
    if operation.fresh and own:
        raise BadRequest(f"The UUID {operation.uuid} is in use, or its files are being purged; choose another UUID")
    named = (operation.namespace, operation.name) if operation.name else None
    for each in operation.locations:
        if not own.isdisjoint(with_folders(each.key)):
            continue
        for found in await parts.store.claims_overlapping([each.key], operation.uuid, 1):
            if each.shared and found.shared:
                continue
            if found.location == each.key and named and await parts.store.gave_up(found.uuid, *named):
                continue
            raise _taken(each.what, each.shown)


def _taken(what: str, location: str) -> BadRequest:
    return BadRequest(
        f"{what} {location!r} overlaps the files of another table, view or function; choose another, or omit it, "
        "and the server chooses one. A dropped entry keeps its location until it is purged or its retention ends"
    )


def moves(base: TableMetadata | ViewMetadata | None, metadata: TableMetadata | ViewMetadata) -> bool:
    """Whether `metadata` may have places that `base` has not."""
    if base is None or metadata.location != base.location:
        return True
    return any(metadata.properties.get(name) != base.properties.get(name) for name in PATH_PROPERTIES)


async def claim_folder(parts: CatalogContext, entry: Entry, folder: str, *, fresh: bool) -> ClaimLocations:
    """As `claim`, of a function."""
    locations = await asyncio.to_thread(_outermost, [ClaimedLocation(key=folder, shown=folder)])
    await check_known(parts, (each.key for each in locations), entry.uuid)
    operation = ClaimLocations(uuid=entry.uuid, locations=locations, fresh=fresh)
    await _check_free(parts, operation)
    return operation


async def check_unclaimed(
    parts: CatalogContext, location: str, what: str, named: tuple[NamespacePath, str], uuid: str = ""
) -> None:
    """BadRequest where the location overlaps a place of another than `uuid`. The transaction checks again."""
    if await _is_taken(parts, location, named, uuid):
        raise _taken(what, location)


async def _is_taken(parts: CatalogContext, location: str, named: tuple[NamespacePath, str], uuid: str) -> bool:
    (key,) = await _keys([location])
    await check_known(parts, [key], uuid)
    for found in await parts.store.claims_overlapping([key], uuid, 1):
        if found.location != key or not await parts.store.gave_up(found.uuid, *named):
            return True
    return False


async def check_outside(parts: CatalogContext, location: str, what: str) -> None:
    """BadRequest where the location is, or lies in, a place of a table, view or function. It may hold such places."""
    keys = await _keys([location])
    await check_known(parts, keys, "", around=False)
    if await parts.store.claims_overlapping(keys, "", 0):
        raise BadRequest(f"{what} {location!r} lies in the location of a table, view or function; choose another")


async def _keys(locations: Iterable[str]) -> list[str]:
    places = [parse_location(location) for location in locations]
    if all(place.scheme == "s3" for place in places):  # a pure function, and signing asks for each request
        return [location_key(place) for place in places]
    return await asyncio.to_thread(lambda: [location_key(place) for place in places])


async def check_staged(parts: CatalogContext, location: str, namespace: NamespacePath, name: str) -> None:
    """Forbidden when another table than that of the name has claimed the location of a staged table since: a pass
    outlives the staging, and the table may have been renamed or dropped."""
    entry = await parts.store.entry(EntryKind.TABLE, namespace, name)
    if await _is_taken(parts, location, (namespace, name), "" if entry is None else entry.uuid):
        raise Forbidden(
            f"Another table has claimed the location staged for {show(namespace, name)}; load the table again"
        )


async def check_own(parts: CatalogContext, uuid: str, location: str) -> None:
    """Forbidden when the location is not claimed by `uuid`. The table's writers can overwrite metadata files, so that
    the database decides which files a client may open."""
    claims = {found.location for found in await parts.store.claims(uuid) if not found.allowed}
    if not claims and await fill(parts):  # of a server from before claims, which runs beside this one
        claims = {found.location for found in await parts.store.claims(uuid) if not found.allowed}
    if not claims and parts.unclaimed.unread:
        raise RetryLater("Where the table lies is not known yet, since the storage does not answer; try again")
    (key,) = await _keys([location])
    if claims.isdisjoint(with_folders(key)):
        raise Forbidden(f"The table's metadata has the location {location!r}, which the table has not claimed")


async def claimed(parts: CatalogContext, uuid: str, locations: Sequence[str]) -> list[str]:
    """The locations that `uuid` has claimed, regardless of its metadata."""
    claims = {found.location for found in await parts.store.claims(uuid) if not found.allowed}
    keys = await _keys(locations)
    return [place for place, key in zip(locations, keys, strict=True) if not claims.isdisjoint(with_folders(key))]


async def check_writable(parts: CatalogContext, uuid: str, metadata: TableMetadata | ViewMetadata) -> None:
    """Like `check_own`, for the folder that the server writes metadata, manifests and plans to."""
    await check_own(parts, uuid, metadata_folder(metadata.location, metadata.properties))


async def disowned(parts: CatalogContext, uuid: str, folders: Sequence[str]) -> Callable[[str], bool]:
    """Whether a file lies in a place of another than `uuid`, of those that overlap `folders`, so that it may not be
    deleted as one of `uuid`'s. Folders that several share hold files of all of them. RetryLater while not all places
    are known."""
    if parts.unclaimed.unread:
        await fill(parts)
        if parts.unclaimed.unread:
            raise RetryLater("Where other tables lie is not known yet, since the storage does not answer")
    keys = await _keys(folders)
    others = {place for owner, lost in parts.unclaimed.lost.items() if owner != uuid for place in lost}
    others |= {
        found.location
        for found in await parts.store.claims_overlapping(keys, uuid, _WITHIN_LIMIT)
        if not found.shared or found.location not in keys
    }
    return lambda location: bool(others) and not others.isdisjoint(with_folders(location_key(parse_location(location))))


async def fill(parts: CatalogContext) -> int:
    """Claims for all that was created before claims were kept; returns for how many. What cannot be read stays without
    claims, since a guess could claim another's place, or leave its own to others; `parts.unclaimed` tells then."""
    state = parts.unclaimed
    state.tried_s, filled, unread, after = parts.clock.monotonic(), 0, 0, ""
    lost: dict[str, list[str]] = {}
    while unread < _FILLED_AT_ONCE and (entries := await parts.store.unclaimed(after, _FILLED_AT_ONCE)):
        after = entries[-1].uuid
        if len(entries) == _FILLED_AT_ONCE and entries[0].uuid != after:  # all names of one UUID together
            entries = [entry for entry in entries if entry.uuid != after]
            after = entries[-1].uuid
        places = await asyncio.gather(*(_places(parts, entry) for entry in entries))
        found = list(zip(entries, places, strict=True))
        unknown = {entry.uuid for entry, place in found if place is None}
        unread += len(unknown)
        known = [(entry, place) for entry, place in found if place and entry.uuid not in unknown]
        await parts.store.transact([await _unchecked(entry, place) for entry, place in known])
        claimed = {entry.uuid for entry, _ in known}
        filled += len(claimed)
        for entry, place in found:
            if place is not None and entry.uuid not in claimed | unknown:
                lost.setdefault(entry.uuid, []).extend(await asyncio.to_thread(_possible_keys, entry))
    if (unread, lost.keys()) != (state.unread, state.lost.keys()):
        _log.warning("places of tables and views are not known", unread=unread, lost=len(lost))
    state.unread, state.lost = unread, lost
    return filled


async def fill_rest(parts: CatalogContext) -> int:
    """A round of housekeeping: as `fill`, where there was something left to do."""
    return await fill(parts) if parts.unclaimed.unread or parts.unclaimed.lost else 0


async def check_known(parts: CatalogContext, keys: Iterable[str], uuid: str, *, around: bool = True) -> None:
    """RetryLater while something else than `uuid` may lie there, for all that is known; with `around`, below there."""
    state, wanted = parts.unclaimed, list(keys)
    if not _may_be_taken(state, wanted, uuid, around=around):
        return
    if parts.clock.monotonic() - state.tried_s >= _TRIED_EVERY_S:
        await fill(parts)
    if not _may_be_taken(state, wanted, uuid, around=around):
        return
    if state.unread:
        raise RetryLater(
            "The location cannot be checked: where older tables lie is read from their metadata files, and the storage "
            "does not answer; try again when it does"
        )
    raise RetryLater(
        "A table, view or function whose metadata file is missing or broken may lie in this location; restore that "
        "file, or drop and purge what it belongs to, or choose another location"
    )


def _may_be_taken(state: Unclaimed, keys: Iterable[str], uuid: str, *, around: bool) -> bool:
    if state.unread:
        return True
    places = {place for owner, lost in state.lost.items() if owner != uuid for place in lost}
    return bool(places) and any(
        not places.isdisjoint(with_folders(key)) or (around and any(place.startswith(f"{key}/") for place in places))
        for key in keys
    )


async def _places(parts: CatalogContext, entry: Entry) -> list[str] | None:
    """None while the storage does not answer; none at all where the metadata are missing or broken."""
    try:
        if entry.kind is EntryKind.TABLE:
            table = await parts.documents.table(entry.metadata_location)
            location, properties = table.location, table.properties
        elif entry.kind is EntryKind.VIEW:
            view = await parts.documents.view(entry.metadata_location)
            location, properties = view.location, view.properties
        else:  # the server itself has chosen it, and its document tells no place
            return [_folder(entry), entry.metadata_location]
    except (NotFound, Corrupt, BadRequest):
        return []
    except SeamarkError:
        return None
    paths = [properties[name] for name in PATH_PROPERTIES if parts.warehouse.contains(properties.get(name, ""))]
    return [location, *paths, entry.metadata_location]


def _folder(entry: Entry) -> str:
    """By where metadata files lie as a rule: below `metadata` in the location."""
    return entry.metadata_location.rpartition("/")[0].removesuffix("/metadata")


def _possible_keys(entry: Entry) -> list[str]:
    return [_key(_folder(entry)), _key(entry.metadata_location)]


async def _unchecked(entry: Entry, places: list[str]) -> ClaimLocations:
    wanted = [ClaimedLocation(key=place, shared=number > 0) for number, place in enumerate(places)]
    locations = await asyncio.to_thread(_outermost, wanted)
    return ClaimLocations(uuid=entry.uuid, locations=locations, checked=False)


def _outermost(wanted: Iterable[ClaimedLocation]) -> tuple[ClaimedLocation, ...]:
    """The locations with their keys, without those that are within an earlier one."""
    kept: list[ClaimedLocation] = []
    for each in wanted:
        key = _key(each.key)
        if not any(key == other.key or key.startswith(f"{other.key}/") for other in kept):
            kept.append(ClaimedLocation(key=key, shared=each.shared, shown=each.shown, what=each.what))
    return tuple(kept)


def _key(location: str) -> str:
    try:
        return location_key(parse_location(location))
    except BadRequest:  # of before claims: it leads nowhere that this server writes
        return unquote(location).rstrip("/")


def with_folders(key: str) -> list[str]:
    """The key of a location, and the keys of the folders that contain it."""
    keys, at = [key], len(key)
    while (at := key.rfind("/", 0, at)) > 0:
        keys.append(key[:at])
    return keys
