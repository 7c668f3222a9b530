"""Checks that a table names only files in its claimed locations, and in locations that an admin allows.

A manifest can name any file, and the readers of a table read the named files and see their column bounds. Therefore a
writer without write access to the whole catalog may add only files in the table's locations. Files of the parent
snapshot may be anywhere. The check reads the manifest lists and manifests of the commit. Because they can be
overwritten after the commit, planning checks them again (`planner/plan/location_checks.py`).

A writer with write access to the whole catalog may name any file. Readers can read files of another table only if the
property `seamark.allowed-locations` lists their folders, separated by commas. The database stores the list, because the
table's writers can overwrite its metadata file.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial

from seamark.formats.iceberg.manifests.manifest import Spans, decode_manifest, decode_manifest_list
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.snapshot import SnapshotInput
from seamark.formats.runtime.errors import BadRequest, Corrupt, Forbidden, ObjectMissing
from seamark.formats.storage.locations import parse_location, parse_stored_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES, CatalogContext
from seamark.metaserver.catalog.ownership.claims import check_unclaimed, list_keys_above
from seamark.metaserver.catalog.values import Caller, TableCommit
from seamark.metaserver.objects.port import ObjectReader
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.model import ClaimedLocation
from seamark.metaserver.store.operations import AllowLocations

ALLOWED_LOCATIONS = "seamark.allowed-locations"
_SHOWN_CHARACTERS_MAX = 300
_PATHS_IN_LOOP_MAX = 16


def read_allowed_locations(properties: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(part.strip() for part in properties.get(ALLOWED_LOCATIONS, "").split(",") if part.strip())


async def make_allow_operations(
    context: CatalogContext, caller: Caller, uuid: str, properties: Mapping[str, str], old_properties: Mapping[str, str]
) -> list[AllowLocations]:
    """Return the operation that records the list of allowed locations, if the list changes.

    Raises:
        Forbidden: The caller may not write the whole catalog.
    """
    if properties.get(ALLOWED_LOCATIONS) == old_properties.get(ALLOWED_LOCATIONS):
        return []
    _check_may_allow(caller)
    return [await replace_allowed_locations(context, caller, uuid, properties)]


async def replace_allowed_locations(
    context: CatalogContext, caller: Caller, uuid: str, properties: Mapping[str, str]
) -> AllowLocations:
    """Return the operation that replaces the allowed locations of a registered table by the list in its properties.

    Raises:
        Forbidden: The list is not empty, and the caller may not write the whole catalog.
    """
    locations = read_allowed_locations(properties)
    if locations:
        _check_may_allow(caller)
    allowed_locations = [context.warehouse.parse(location, ALLOWED_LOCATIONS, root_ok=True) for location in locations]
    return AllowLocations(
        uuid=uuid,
        locations=tuple(ClaimedLocation(key=context.warehouse.make_key(location)) for location in allowed_locations),
    )


def _check_may_allow(caller: Caller) -> None:
    if caller.confined_to is not None:
        raise Forbidden(f"only a principal that may write the whole catalog may set {ALLOWED_LOCATIONS}")


async def list_own_locations(context: CatalogContext, uuid: str) -> OwnLocations:
    """Return the locations that the database records for the table, independently of the table's metadata."""
    claims = await context.store.claims(uuid)
    return OwnLocations(context.warehouse, {claim.location for claim in claims})


async def find_foreign_paths(context: CatalogContext, uuid: str, paths: Iterable[str]) -> set[str]:
    """Return the paths that are in locations of other tables, but in no claimed or allowed location of this table.

    The server does not read these paths for this table.
    """
    locations = {claimed_location.location for claimed_location in await context.store.claims(uuid)}
    foreign_paths: set[str] = set()
    paths = list(paths)
    # Group many paths in a thread, so that the event loop can serve other requests. For a few paths, starting a thread
    # would take longer than grouping them.
    is_quick = len(paths) <= _PATHS_IN_LOOP_MAX
    group = partial(_group_by_folder, context.warehouse, paths)
    for key, paths_in_folder in (group() if is_quick else await asyncio.to_thread(group)).items():
        keys_above = set(list_keys_above(key))
        if locations.isdisjoint(keys_above):
            # With the limit 0, the result contains only the claims that contain the folder.
            claims = await context.store.find_overlapping_claims([key], uuid, 0)
            foreign_paths |= paths_in_folder if any(claim.location in keys_above for claim in claims) else set()
    return foreign_paths


def _group_by_folder(warehouse: Warehouse, paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the paths, grouped by the key of their folder. Leave out paths that the server cannot read."""
    paths_by_folder: dict[str, set[str]] = {}
    for path in paths:
        paths_by_folder.setdefault(path.rpartition("/")[0], set()).add(path)
    paths_by_folder_key: dict[str, set[str]] = {}
    for folder, paths_in_folder in paths_by_folder.items():
        with contextlib.suppress(BadRequest):
            paths_by_folder_key.setdefault(warehouse.make_key(parse_stored_location(folder)), set()).update(
                paths_in_folder
            )
    return paths_by_folder_key


async def check_added(
    context: CatalogContext,
    caller: Caller,
    uuid: str,
    base: TableMetadata | None,
    metadata: TableMetadata,
    commit: TableCommit,
    files: ObjectReader,
) -> None:
    """Check that a caller with limited rights adds only files in the locations of the table.

    Files of the parent snapshot may be anywhere, so new manifests may list them again.

    Args:
        caller: The principal that commits.
        uuid: The table's UUID.
        base: The table's metadata before the commit. None for a new table.
        metadata: The metadata after the commit. The commit claims its new locations, and the caller's right to them
            has been checked.
        commit: The updates.
        files: Reads the manifest lists and manifests.

    Raises:
        BadRequest: A file is behind a symbolic link. Or the caller is confined to some namespaces, and a file is
            unreadable or outside the table's locations.
    """
    lists = [snapshot.manifest_list for snapshot in commit.added_snapshots if snapshot.manifest_list is not None]
    manifests = [path for snapshot in commit.added_snapshots for path in snapshot.manifests or ()]
    statistics_paths = commit.statistics_paths
    if not (lists or manifests or statistics_paths):
        return
    warehouse = context.warehouse
    await context.objects.check_links(
        [path for path in (*lists, *manifests, *statistics_paths) if warehouse.contains(path)]
    )
    if caller.confined_to is None:
        return
    locations = (
        {claimed_location.location for claimed_location in await context.store.claims(uuid)}
        if base is not None
        else set()
    )
    for description, location in _list_new_locations(context, base, metadata):
        # Check the locations before reading any file in them, because error messages contain file names.
        await check_unclaimed(context, caller, location, description, (commit.namespace, commit.name), uuid)
        locations.add(context.warehouse.make_key(parse_location(location)))
    own_locations = OwnLocations(warehouse, locations)
    reader = _ManifestReader(context, own_locations, files)
    await asyncio.to_thread(own_locations.check, [*statistics_paths, *lists], "The file")
    inherited_manifests = await reader.list_manifests_before(base, commit.added_snapshots)
    # Do not trust the manifest lists of earlier snapshots, which may have been overwritten.
    for path in await find_foreign_paths(context, uuid, inherited_manifests):
        del inherited_manifests[path]
    for location in lists:
        manifests += [path for path in await reader.read_manifest_list(location) if path not in inherited_manifests]
    new_manifests = [path for path in dict.fromkeys(manifests) if path not in inherited_manifests]
    await asyncio.to_thread(own_locations.check, new_manifests, "The manifest")
    for manifest in new_manifests:
        outside_files = await reader.list_outside_files(manifest)
        if outside_files:
            await _check_in_parent(reader, inherited_manifests, outside_files)


def _list_new_locations(
    context: CatalogContext, base: TableMetadata | None, metadata: TableMetadata
) -> Iterator[tuple[str, str]]:
    """Yield a description and the path of each new location.

    A location is new if `base` does not have it. Without `base`, all locations are new. The locations are that of the
    table, and those in the properties PATH_PROPERTIES. A property with a location outside the warehouse is left out.
    """
    if base is None or metadata.location != base.location:
        yield "The table's location", metadata.location
    for name in PATH_PROPERTIES:
        path = metadata.properties.get(name)
        if (
            path is not None
            and (base is None or path != base.properties.get(name))
            and context.warehouse.contains(path)
        ):
            yield name, path


async def _check_in_parent(reader: _ManifestReader, parent_manifests: Iterable[str], outside_paths: set[str]) -> None:
    """Check that the parent snapshot already has all of the files that are outside of the table's locations.

    Args:
        reader: Reads the manifests.
        parent_manifests: The manifests of the parent snapshot.
        outside_paths: The paths of the files.

    Raises:
        BadRequest: A file is not in these manifests.
    """
    missing_paths = set(outside_paths)
    for manifest in parent_manifests:
        missing_paths -= await reader.list_files(manifest)
        if not missing_paths:
            return
    raise _make_outside_error(min(missing_paths), "The file")


def _make_outside_error(path: str, description: str) -> BadRequest:
    return BadRequest(
        f"{description} {path[:_SHOWN_CHARACTERS_MAX]!r} is outside the table's folders; write it below the "
        f"table's location, or ask an admin of the catalog to add its folder to the table property {ALLOWED_LOCATIONS}"
    )


class OwnLocations:
    """The locations whose files may be in a table: its own locations, and locations that an admin allows in addition.

    The database records both, by the canonical form of each location (its key).
    """

    def __init__(self, warehouse: Warehouse, locations: set[str]) -> None:
        self._warehouse = warehouse
        self._locations = locations
        self._holds = lru_cache(maxsize=4096)(self._is_folder_within)

    def holds(self, path: str) -> bool:
        """Return whether the file at `path` is in one of the locations."""
        location = parse_location(path, "The file")
        # The result is cached by folder, because a manifest names many files of a folder. A location may also be a
        # single file, such as a metadata file.
        return self._holds(str(location).rpartition("/")[0]) or self._warehouse.make_key(location) in self._locations

    def check(self, paths: Iterable[str], description: str) -> None:
        for path in paths:
            if not self.holds(path):
                raise _make_outside_error(path, description)

    def _is_folder_within(self, folder: str) -> bool:
        try:
            key = self._warehouse.make_key(parse_location(folder))
        except BadRequest:
            # A location without a folder is the root of a bucket.
            return False
        while key not in self._locations:
            parent_key = key.rpartition("/")[0]
            if parent_key == key or not parent_key:
                return False
            key = parent_key
        return True


class _ManifestReader:
    """Reads the manifest lists and manifests that a commit names."""

    def __init__(self, context: CatalogContext, own_locations: OwnLocations, files: ObjectReader) -> None:
        self._context = context
        self._own = own_locations
        self._files = files

    async def list_manifests_before(
        self, base: TableMetadata | None, new_snapshots: Iterable[SnapshotInput]
    ) -> dict[str, None]:
        """Return the manifests of the current snapshot and of the parents of the new snapshots.

        The result has them as keys. Without `base`, the table is new, and the result is empty.
        """
        manifests: dict[str, None] = {}
        if base is None:
            return manifests
        parent_ids = (snapshot.parent_snapshot_id for snapshot in new_snapshots)
        for snapshot_id in {base.current_snapshot_id, *parent_ids}:
            snapshot = None if snapshot_id is None else base.snapshot(snapshot_id)
            if snapshot is None:
                continue
            manifests |= dict.fromkeys(snapshot.manifests or ())
            if snapshot.manifest_list is not None:
                try:
                    manifests |= dict.fromkeys(await self.read_manifest_list(snapshot.manifest_list))
                except BadRequest:
                    # The list was damaged before this commit. Without it, the snapshot has no known files, so the
                    # commit may only name files in the table's locations.
                    continue
        return manifests

    async def read_manifest_list(self, location: str) -> list[str]:
        data = await self._read(location, "manifest list")
        try:
            manifests = await asyncio.to_thread(decode_manifest_list, data, location)
        except Corrupt as error:
            raise BadRequest(f"The commit's manifest list is unreadable: {error.message}") from None
        return [manifest.manifest_path for manifest in manifests]

    async def list_files(self, manifest: str) -> set[str]:
        """Return the live files of a manifest of the parent snapshot. A manifest that cannot be read has none.

        The caller then refuses the files that it does not find in other manifests.
        """
        try:
            data = await self._read(manifest, "manifest")
            return {path for path, _ in await asyncio.to_thread(_list_paths, data, manifest)}
        except (BadRequest, Corrupt):
            return set()

    async def list_outside_files(self, manifest: str) -> set[str]:
        """Return the live files of a manifest that are outside the table's locations.

        Raises:
            BadRequest: A delete file refers to a data file outside these locations, or a file is behind a symbolic
                link.
        """
        data = await self._read(manifest, "manifest")

        def find() -> tuple[list[str], set[str]]:
            try:
                entries = list(_list_paths(data, manifest))
            except Corrupt as error:
                raise BadRequest(f"A manifest of the commit is unreadable: {error.message}") from None
            self._own.check(
                (data_file for path, data_file in entries if data_file and self._own.holds(path)), "The data file"
            )
            outside_paths = {path for path, _ in entries if not self._own.holds(path)}
            return [path for path, _ in entries if path not in outside_paths], outside_paths

        own_paths, outside_paths = await asyncio.to_thread(find)
        await self._context.objects.check_links(own_paths)
        return outside_paths

    async def _read(self, location: str, description: str) -> bytes:
        try:
            limit_bytes = self._context.settings.plan_manifest_limit_bytes
            return await self._files.read(location, limit_bytes=limit_bytes)
        except ObjectMissing:
            raise BadRequest(
                f"The commit names the {description} {location[:_SHOWN_CHARACTERS_MAX]!r}, which does not exist"
            ) from None


def _list_paths(data: bytes, location: str) -> Iterator[tuple[str, str | None]]:
    """Yield the path of each live entry, and the path of the data file to which a delete file refers, or None.

    Raises:
        Corrupt: The manifest is damaged. The message contains its location.
    """
    manifest = decode_manifest(data, location)
    heap = manifest.heap.tobytes()
    paths = _decode_texts(manifest.texts["file_path"], heap)
    return zip((path or "" for path in paths), _decode_texts(manifest.texts["referenced_data_file"], heap), strict=True)


def _decode_texts(spans: Spans, heap: bytes) -> Iterator[str | None]:
    for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True):
        yield None if length < 0 else heap[start : start + length].decode(errors="replace")
