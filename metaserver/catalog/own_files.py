"""Which files a table may name: those in places that it claims, and those where somebody allowed it.

A manifest can name any file, and who reads a table reads what its manifests name, and hears their bounds. So a writer
who may not write the whole catalog adds files that lie in the table's own places, and no others; what it only carries
over from the snapshot before, it may name wherever it lies. Manifest lists and manifests are read for that. As files
may be written over after they were committed, they are looked at again when they are planned
(`planner/plan/location_checks.py`).

A writer of the whole catalog names what it likes. For files of another table to be read, too, it lists their folders,
separated by commas, in the property `seamark.allowed-locations`. That is kept in the database: a table's metadata file
lies where the table's writers may write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from metaserver.catalog.claims import check_unclaimed
from metaserver.catalog.parts import PATH_PROPERTIES, CatalogContext
from metaserver.catalog.values import Caller, TableChange
from metaserver.errors import BadRequest, Corrupt, Forbidden, ObjectMissing
from metaserver.iceberg.manifests.manifest import Spans, decode_manifest, decode_manifest_list
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.objects.locations import location_key, parse_location
from metaserver.store.port import AllowLocations, ClaimedLocation

ALLOWED_LOCATIONS = "seamark.allowed-locations"
_SHOWN = 300


def allowed_locations(properties: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part.strip() for part in properties.get(ALLOWED_LOCATIONS, "").split(",") if part.strip())


async def allow(
    parts: CatalogContext, caller: Caller, uuid: str, properties: Mapping[str, str], before: Mapping[str, str]
) -> list[AllowLocations]:
    """The operation that records a new list of allowed locations. Forbidden unless the caller may write all of it."""
    if properties.get(ALLOWED_LOCATIONS) == before.get(ALLOWED_LOCATIONS):
        return []
    return [await allow_anew(parts, caller, uuid, properties)]


async def allow_anew(parts: CatalogContext, caller: Caller, uuid: str, properties: Mapping[str, str]) -> AllowLocations:
    """As `allow`, whatever was allowed before: what is registered names what it needs, and no more than that."""
    if caller.confined_to is not None:
        raise Forbidden(f"{ALLOWED_LOCATIONS} may be set only by who may write the whole catalog")
    wanted = [parts.warehouse.parse(place, ALLOWED_LOCATIONS, root_ok=True) for place in allowed_locations(properties)]
    keys = await asyncio.to_thread(lambda: [location_key(place) for place in wanted])
    return AllowLocations(uuid=uuid, locations=tuple(ClaimedLocation(key=key) for key in keys))


async def own_places(parts: CatalogContext, uuid: str) -> OwnPlaces:
    """As the database has them, whatever the table's metadata say."""
    return OwnPlaces({found.location for found in await parts.store.claims(uuid)})


async def check_added(
    parts: CatalogContext,
    caller: Caller,
    uuid: str,
    base: TableMetadata | None,
    metadata: TableMetadata,
    change: TableChange,
) -> None:
    """BadRequest where a confined caller's updates name files outside the table's places, or files that cannot be
    read. `metadata` is what the updates make of `base`: places that it has and `base` has not are the table's by this
    very commit, which claims them. That the caller may have them at all has been checked."""
    updates = change.updates
    if caller.confined_to is None:
        return
    lists, manifests, others = _named(updates)
    if not (lists or manifests or others):
        return
    places = {found.location for found in await parts.store.claims(uuid)} if base is not None else set()
    for what, place in _new_places(parts, base, metadata):
        # Before anything there is read: a refusal says which files are named.
        await check_unclaimed(parts, place, what, (change.namespace, change.name), uuid)
        places.add(await asyncio.to_thread(location_key, parse_location(place)))
    own = OwnPlaces(places)
    reader = _Reader(parts, own)
    await asyncio.to_thread(own.check, [*others, *lists], "The file")
    known = await reader.before(base, updates)
    for location in lists:
        manifests += [path for path in await reader.manifest_list(location) if path not in known]
    fresh = [path for path in dict.fromkeys(manifests) if path not in known]
    await asyncio.to_thread(own.check, fresh, "The manifest")
    for manifest in fresh:
        outside = await reader.outside(manifest)
        if outside:
            await _check_carried(reader, known, outside)


def _new_places(
    parts: CatalogContext, base: TableMetadata | None, metadata: TableMetadata
) -> Iterator[tuple[str, str]]:
    """What each is, and where. Those that stand in `base` already count as far as they are claimed: its file may have
    been written over."""
    if base is None or metadata.location != base.location:
        yield "The table's location", metadata.location
    for name in PATH_PROPERTIES:
        path = metadata.properties.get(name)
        if path is not None and (base is None or path != base.properties.get(name)) and parts.warehouse.contains(path):
            yield name, path


async def _check_carried(reader: _Reader, before: Iterable[str], outside: set[str]) -> None:
    """BadRequest unless all of the files are in manifests of the snapshot before."""
    for manifest in before:
        outside -= await reader.files(manifest)
        if not outside:
            return
    raise _outside(min(outside), "The file")


def _outside(path: str, what: str) -> BadRequest:
    return BadRequest(
        f"{what} {path[:_SHOWN]!r} lies outside the table's own folders; write it below the table's location, or have "
        f"who may write the whole catalog add its folder to the table's property {ALLOWED_LOCATIONS}"
    )


def _named(updates: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """Manifest lists, manifests and other files that the updates bring."""
    lists: list[str] = []
    manifests: list[str] = []
    others: list[str] = []
    for update in updates:
        for name in ("statistics", "partition-statistics"):
            found = update.get(name)
            if isinstance(found, Mapping) and isinstance(found.get("statistics-path"), str):
                others.append(found["statistics-path"])
        snapshot = update.get("snapshot")
        if isinstance(snapshot, Mapping):
            if isinstance(snapshot.get("manifest-list"), str):
                lists.append(snapshot["manifest-list"])
            named = snapshot.get("manifests")
            manifests += [path for path in named if isinstance(path, str)] if isinstance(named, list) else []
    return lists, manifests, others


class OwnPlaces:
    """Of one table: those that it claims, and those where it may name files. Keys of locations."""

    def __init__(self, places: set[str]) -> None:
        self._places = places
        self._holds = lru_cache(maxsize=4096)(self._folder_lies_within)

    def holds(self, path: str) -> bool:
        at = parse_location(path, "The file")
        return self._holds(str(at).rpartition("/")[0]) or location_key(at) in self._places

    def check(self, paths: Iterable[str], what: str) -> None:
        for path in paths:
            if not self.holds(path):
                raise _outside(path, what)

    def _folder_lies_within(self, folder: str) -> bool:
        try:
            key = location_key(parse_location(folder))
        except BadRequest:  # the root of a bucket
            return False
        while key not in self._places:
            shorter = key.rpartition("/")[0]
            if shorter == key or not shorter:
                return False
            key = shorter
        return True


class _Reader:
    """Manifest lists and manifests of one commit."""

    def __init__(self, parts: CatalogContext, own: OwnPlaces) -> None:
        self._parts = parts
        self._own = own

    async def before(self, base: TableMetadata | None, updates: Iterable[Mapping[str, Any]]) -> dict[str, None]:
        """Manifests of the current snapshot, and of those that the new ones follow."""
        found: dict[str, None] = {}
        if base is None:
            return found
        added = (update.get("snapshot") for update in updates)
        parents = [one.get("parent-snapshot-id") for one in added if isinstance(one, Mapping)]
        for snapshot_id in {base.current_snapshot_id, *(one for one in parents if isinstance(one, int))}:
            snapshot = None if snapshot_id is None else base.snapshot(snapshot_id)
            if snapshot is None:
                continue
            found |= dict.fromkeys(snapshot.manifests or ())
            if snapshot.manifest_list is not None:
                try:
                    found |= dict.fromkeys(await self.manifest_list(snapshot.manifest_list))
                except BadRequest:  # broken before this commit
                    continue
        return found

    async def manifest_list(self, location: str) -> list[str]:
        data = await self._read(location, "manifest list")
        try:
            found = await asyncio.to_thread(decode_manifest_list, data, location)
        except Corrupt as error:
            raise BadRequest(f"The commit's manifest list cannot be read: {error.message}") from None
        return [manifest.manifest_path for manifest in found]

    async def files(self, manifest: str) -> set[str]:
        """Live files of a manifest that stands."""
        try:
            data = await self._read(manifest, "manifest")
            return {path for path, _ in await asyncio.to_thread(_paths, data, manifest)}
        except (BadRequest, Corrupt):
            return set()

    async def outside(self, manifest: str) -> set[str]:
        """Its files that lie outside the table's places. BadRequest for delete files that refer to such ones."""
        data = await self._read(manifest, "manifest")

        def find() -> set[str]:
            try:
                named = list(_paths(data, manifest))
            except Corrupt as error:
                raise BadRequest(f"A manifest of the commit cannot be read: {error.message}") from None
            self._own.check((about for path, about in named if about and self._own.holds(path)), "The data file")
            return {path for path, _ in named if not self._own.holds(path)}

        return await asyncio.to_thread(find)

    async def _read(self, location: str, what: str) -> bytes:
        try:
            return await self._parts.objects.read(location, limit_bytes=self._parts.settings.plan_manifest_limit_bytes)
        except ObjectMissing:
            raise BadRequest(f"The {what} {location[:_SHOWN]!r} that the commit names is not there") from None


def _paths(data: bytes, location: str) -> Iterator[tuple[str, str | None]]:
    """(path, the data file that it refers to) of each live entry. Corrupt naming the manifest."""
    decoded = decode_manifest(data, location)
    heap = decoded.heap.tobytes()
    paths = _texts(decoded.texts["file_path"], heap)
    return zip((path or "" for path in paths), _texts(decoded.texts["referenced_data_file"], heap), strict=True)


def _texts(spans: Spans, heap: bytes) -> Iterator[str | None]:
    for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True):
        yield None if length < 0 else heap[start : start + length].decode(errors="replace")
