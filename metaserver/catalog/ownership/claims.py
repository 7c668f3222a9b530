"""Claims: the locations of tables, views and functions, which no other entry may overlap.

Signatures and purges depend on a table's location, so two overlapping tables could read, overwrite and
delete each other's files. An entry claims its locations in the transaction that creates or moves it. These are its
location, the folders of its `write.*.path` properties, and its metadata file if it is outside these folders.

The entry keeps all claims while a live or dropped name refers to it, because older files stay where they were
written. After that, the namespace of its last name keeps the claims until the files are removed.
Otherwise another namespace could get the location, and read the files.

A principal that may create and write every entry of a namespace may create a dropped entry again with the same
name at the same location, because it already has access to the files. For other principals this is refused: the owner
of the new entry could read and write the files of the dropped entry. Afterwards the dropped entry cannot be restored,
and its purge does not delete the new files.

Several tables may share folders of `write.*.path` if a principal with write access to the whole catalog
allows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import unquote

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import get_metadata_folder
from seamark.formats.iceberg.views.view import ViewMetadata
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import BadRequest, Corrupt, Forbidden, NotFound, RetryLater, SeamarkError
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES, CatalogContext, UnclaimedEntries
from seamark.metaserver.catalog.values import Caller, may_reuse_locations
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.model import ClaimedLocation, Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import ClaimLocations

_log = structlog.get_logger("seamark.claims")

_ENTRIES_PER_FILL = 64
_TRIED_EVERY_S = 5.0
_OVERLAPS_MAX = 100_000
"""The maximum number of claims of other entries inside a table's folders.

Only the folders of tables from a version without claims can contain claims of other entries.
"""


async def make_claim(
    context: CatalogContext,
    caller: Caller,
    metadata: TableMetadata | ViewMetadata,
    entry: Entry,
    *,
    is_new_uuid: bool = False,
    may_restore: bool = False,
    requires_only_name: bool = False,
) -> ClaimLocations:
    """Return the operation with which a table or view claims its locations, so that no other entry can use them.

    The function must be called before any file is written to these locations.

    Args:
        metadata: The metadata of the table or view.
        entry: The entry of the table or view.
        is_new_uuid: Whether the UUID must not have any claims yet.
        may_restore: Whether the UUID may belong to a dropped entry, which this entry replaces.
        requires_only_name: Whether the transaction fails if the UUID has another live name. The transaction creates the
            entry before the claim.

    Raises:
        BadRequest: A location overlaps a location of another entry.
    """
    candidates = [ClaimedLocation(key=metadata.location, display_form=metadata.location)]
    may_share = caller.confined_to is None
    for name in PATH_PROPERTIES:
        path = metadata.properties.get(name)
        if path is not None and context.warehouse.contains(path):
            candidates.append(ClaimedLocation(key=path, shared=may_share, display_form=path, subject=name))
    metadata_location = entry.metadata_location
    candidates.append(
        ClaimedLocation(key=metadata_location, shared=True, display_form=metadata_location, subject="metadata-location")
    )
    await context.objects.check_links([candidate.key for candidate in candidates])
    if all(context.warehouse.contains(candidate.key) for candidate in candidates):
        # The keys of these locations need no access to the file system. Starting a thread would take longer.
        locations = _drop_nested_locations(context.warehouse, candidates)
    else:
        locations = await asyncio.to_thread(_drop_nested_locations, context.warehouse, candidates)
    await check_unknown_locations(context, (claimed_location.key for claimed_location in locations), entry.uuid)
    operation = ClaimLocations(
        uuid=entry.uuid,
        locations=locations,
        fresh=is_new_uuid,
        namespace=entry.namespace,
        name=entry.name if may_reuse_locations(caller, entry.namespace) else "",
        returns=may_restore,
        only_name=requires_only_name,
    )
    # If the entry may be restored, no file is written before the transaction, which checks this.
    if not may_restore:
        await _check_free(context, operation)
    return operation


async def _check_free(context: CatalogContext, operation: ClaimLocations) -> None:
    """Check that no other entry has the UUID or one of the locations, before files are written.

    The transaction repeats this check.

    Raises:
        BadRequest: Another entry has the UUID or a location.
    """
    claimed_keys = await _list_own_keys(context, operation.uuid)
    if operation.fresh and claimed_keys:
        raise BadRequest(f"The UUID {operation.uuid} is in use, or its files are being purged; choose another UUID")
    table_name = (operation.namespace, operation.name) if operation.name else None
    for candidate in operation.locations:
        if not claimed_keys.isdisjoint(list_keys_above(candidate.key)):
            continue  # The entry itself has claimed the location or a folder above it.
        for other in await context.store.find_overlapping_claims([candidate.key], operation.uuid, 1):
            if candidate.shared and other.shared:
                continue  # Several entries may use a shared folder.
            if (  # The other entry was dropped with the same name, and may be created again at its location.
                other.location == candidate.key
                and table_name
                and await context.store.may_reuse_location(other.uuid, *table_name)
            ):
                continue
            raise candidate.make_overlap_error()


async def _list_own_keys(context: CatalogContext, uuid: str) -> set[str]:
    """Return the keys of the locations that belong to `uuid` by its claims.

    A claim may also record a location of other entries in which an admin allows this entry to name files. Such a
    location does not belong to the entry.
    """
    return {claim.location for claim in await context.store.claims(uuid) if not claim.allowed}


def may_add_locations(base: TableMetadata | ViewMetadata | None, metadata: TableMetadata | ViewMetadata) -> bool:
    """Return whether `metadata` may have locations that `base` does not have."""
    if base is None or metadata.location != base.location:
        return True
    return any(metadata.properties.get(name) != base.properties.get(name) for name in PATH_PROPERTIES)


async def claim_folder(context: CatalogContext, entry: Entry, folder: str, *, is_new_uuid: bool) -> ClaimLocations:
    """Return the operation with which a function claims its folder, so that no other entry can use it.

    `is_new_uuid` states whether the UUID of the function must not have any claims yet.
    """
    locations = _drop_nested_locations(context.warehouse, [ClaimedLocation(key=folder, display_form=folder)])
    await context.objects.check_links([folder])
    await check_unknown_locations(context, (claimed_location.key for claimed_location in locations), entry.uuid)
    operation = ClaimLocations(uuid=entry.uuid, locations=locations, fresh=is_new_uuid)
    await _check_free(context, operation)
    return operation


async def check_unclaimed(
    context: CatalogContext,
    caller: Caller,
    location: str,
    description: str,
    table_name: tuple[NamespacePath, str],
    uuid: str = "",
) -> None:
    """Check that the location does not overlap a location of an entry other than the entry `uuid`.

    The transaction that adds the claim repeats this check.

    Args:
        context: The context of the catalog.
        caller: The principal that chose the location.
        location: The location to check.
        description: The name of the location for messages.
        table_name: The namespace and name of the table to create, which may use the location of a table that was
            dropped with this name.
        uuid: The entry whose locations are ignored, or empty.

    Raises:
        BadRequest: The location overlaps a location of another entry.
    """
    if await _is_taken(context, caller, location, table_name, uuid):
        raise ClaimedLocation(key="", display_form=location, subject=description).make_overlap_error()


async def _is_taken(
    context: CatalogContext, caller: Caller, location: str, table_name: tuple[NamespacePath, str], uuid: str
) -> bool:
    may_reuse = may_reuse_locations(caller, table_name[0])
    key = context.warehouse.make_key(parse_location(location))
    await check_unknown_locations(context, [key], uuid)
    for claimed_location in await context.store.find_overlapping_claims([key], uuid, 1):
        is_same = may_reuse and claimed_location.location == key
        if not (is_same and await context.store.may_reuse_location(claimed_location.uuid, *table_name)):
            return True
    return False


async def check_outside(context: CatalogContext, location: str, description: str) -> None:
    """Check that the location is outside all locations of tables, views and functions.

    Raises:
        BadRequest: The location is equal to the location of an entry, or inside it.
    """
    keys = [context.warehouse.make_key(parse_location(location))]
    # Other entries may be inside the location. So the query has the limit 0, which is the number of claims inside the
    # location. It returns only claims that contain the location or are equal to it.
    await check_unknown_locations(context, keys, "", include_inside=False)
    if await context.store.find_overlapping_claims(keys, "", 0):
        raise BadRequest(
            f"{description} {location!r} is inside the location of a table, view or function; choose another"
        )


async def _make_keys(context: CatalogContext, locations: Iterable[str]) -> list[str]:
    return await asyncio.to_thread(
        lambda: [context.warehouse.make_key(parse_location(location)) for location in locations]
    )


async def check_staged(
    context: CatalogContext, caller: Caller, location: str, namespace: NamespacePath, name: str
) -> None:
    """Check that no table with another name has claimed the location of a staged table.

    A client that creates a table writes files before the commit. The token that it uses is still valid after the
    commit, and the table may have been renamed or dropped since.

    Raises:
        Forbidden: Another table has claimed the location.
    """
    entry = await context.store.load_entry(EntryKind.TABLE, namespace, name)
    if await _is_taken(context, caller, location, (namespace, name), "" if entry is None else entry.uuid):
        raise Forbidden(
            f"Another table has claimed the location staged for {format_path(namespace, name)}; load the table again"
        )


async def check_claimed_location(context: CatalogContext, uuid: str, location: str) -> None:
    """Check that `uuid` has claimed the location.

    The database decides which files a client may open, because the table's writers can overwrite metadata files.

    Raises:
        Forbidden: `uuid` has not claimed the location.
        RetryLater: The claims are not known yet, because the storage does not answer.
    """
    claimed_keys = await _list_own_keys(context, uuid)
    # A server of a version without claims may be running, and may have created the table.
    if not claimed_keys and await create_missing_claims(context):
        claimed_keys = await _list_own_keys(context, uuid)
    if not claimed_keys and context.unclaimed.unread:
        raise RetryLater("The location of the table is not known yet, because the storage does not answer; try again")
    key = context.warehouse.make_key(parse_location(location))
    if claimed_keys.isdisjoint(list_keys_above(key)):
        raise Forbidden(f"The table's metadata has the location {location!r}, which the table has not claimed")


async def list_claimed(context: CatalogContext, uuid: str, locations: Sequence[str]) -> list[str]:
    """Return the locations of `locations` that `uuid` has claimed in the database."""
    claimed_keys = await _list_own_keys(context, uuid)
    keys = await _make_keys(context, locations)
    return [
        location
        for location, key in zip(locations, keys, strict=True)
        if not claimed_keys.isdisjoint(list_keys_above(key))
    ]


async def check_writable(context: CatalogContext, uuid: str, metadata: TableMetadata | ViewMetadata) -> None:
    """Check that an entry has claimed its metadata folder, and its location if it does not contain that folder.

    The server writes to these two folders and to folders below them. A claim of a folder, which records that it belongs
    to the entry, covers all folders below it.

    Raises:
        Forbidden: The entry has not claimed one of the checked folders.
    """
    folder = get_metadata_folder(metadata.location, metadata.properties)
    await check_claimed_location(context, uuid, folder)
    if not folder.startswith(metadata.location.rstrip("/") + "/"):
        await check_claimed_location(context, uuid, metadata.location)


async def make_foreign_file_check(
    context: CatalogContext, uuid: str, folders: Sequence[str], *, exclusive: bool = False
) -> Callable[[str], bool]:
    """Return a function that returns whether a file is in a location of an entry other than `uuid`.

    The function considers the locations that overlap `folders`. If it returns True for a file, the file must not be
    deleted together with the files of `uuid`.

    Args:
        uuid: The entry whose files are deleted.
        folders: The locations of the folders that contain the files.
        exclusive: Whether all files in shared folders count as files of other entries. The same applies to files in
            locations where an admin allows another entry to name files. A shared folder contains files of several
            entries, and may contain files of `uuid`.

    Raises:
        RetryLater: Some locations are unknown.
    """
    # Some tables of earlier server versions have no recorded locations. `unread` is the number of tables whose metadata
    # could not be read. `lost` has the possible locations of tables whose metadata are missing or damaged.
    if context.unclaimed.unread:
        await create_missing_claims(context)
        if context.unclaimed.unread:
            raise RetryLater("The locations of other tables are not known yet, because the storage does not answer")
    keys = await _make_keys(context, folders)
    foreign_locations = {
        location
        for owner, lost_locations in context.unclaimed.lost.items()
        if owner != uuid
        for location in lost_locations
    }
    claimed_locations = {claimed_location.location for claimed_location in await context.store.claims(uuid)}
    # A folder that both entries have claimed as shared counts as foreign only if `exclusive` is set.
    foreign_locations |= {
        claimed_location.location
        for claimed_location in await context.store.find_overlapping_claims(keys, uuid, _OVERLAPS_MAX)
        if exclusive
        or not claimed_location.shared
        or claimed_location.location not in claimed_locations.intersection(keys)
    }
    if exclusive:
        foreign_locations |= {
            claim.location for claim in await context.store.find_allowed_overlaps(keys, uuid, _OVERLAPS_MAX)
        }
    make_key = context.warehouse.make_key
    return lambda location: (
        bool(foreign_locations)
        and not foreign_locations.isdisjoint(list_keys_above(make_key(parse_location(location))))
    )


async def create_missing_claims(context: CatalogContext) -> int:
    """Create claims for entries of earlier server versions, and return the number of entries that got claims.

    A claim records that a location belongs to an entry. Earlier versions recorded no claims. If the metadata of an
    entry cannot be read, its location is unknown, and it gets no claim: a guessed location could belong to another
    entry. `context.unclaimed` has these entries.
    """
    state = context.unclaimed
    state.tried_s, filled_count, unread_count, after_uuid = context.clock.monotonic(), 0, 0, ""
    lost_locations: dict[str, list[str]] = {}
    # Stop after too many unreadable entries, because the storage probably does not answer.
    while unread_count < _ENTRIES_PER_FILL and (
        entries := await context.store.list_unclaimed(after_uuid, _ENTRIES_PER_FILL)
    ):
        after_uuid = entries[-1].uuid
        # All names of a UUID must be in one batch.
        if len(entries) == _ENTRIES_PER_FILL and entries[0].uuid != after_uuid:
            entries = [entry for entry in entries if entry.uuid != after_uuid]
            after_uuid = entries[-1].uuid
        location_lists = await asyncio.gather(*(_list_locations(context, entry) for entry in entries))
        entries_with_locations = list(zip(entries, location_lists, strict=True))
        unread_uuids = {entry.uuid for entry, locations in entries_with_locations if locations is None}
        unread_count += len(unread_uuids)
        readable_entries = [
            (entry, locations)
            for entry, locations in entries_with_locations
            if locations and entry.uuid not in unread_uuids
        ]
        await context.store.transact(
            [await _make_unchecked_claim(context.warehouse, entry, locations) for entry, locations in readable_entries]
        )
        claimed_uuids = {entry.uuid for entry, _ in readable_entries}
        filled_count += len(claimed_uuids)
        for entry, locations in entries_with_locations:
            if locations is not None and entry.uuid not in claimed_uuids | unread_uuids:
                lost_locations.setdefault(entry.uuid, []).extend(
                    await asyncio.to_thread(_list_possible_keys, context.warehouse, entry)
                )
    if (unread_count, lost_locations.keys()) != (state.unread, state.lost.keys()):
        _log.warning("locations of tables and views are not known", unread=unread_count, lost=len(lost_locations))
    state.unread, state.lost = unread_count, lost_locations
    return filled_count


async def create_remaining_claims(context: CatalogContext) -> int:
    """Try again to record the locations of entries whose metadata could not be read, and return their number.

    A claim records that a location belongs to an entry. Housekeeping calls this function periodically.
    """
    return await create_missing_claims(context) if context.unclaimed.unread or context.unclaimed.lost else 0


async def check_unknown_locations(
    context: CatalogContext, keys: Iterable[str], uuid: str, *, include_inside: bool = True
) -> None:
    """Check that the locations do not overlap the possible location of an entry whose location is unknown.

    Args:
        keys: The keys of locations.
        uuid: An entry to ignore.
        include_inside: Whether to consider entries that may be inside the locations as well.

    Raises:
        RetryLater: An entry with an unknown location may overlap the locations.
    """
    state, location_keys = context.unclaimed, list(keys)
    if not _may_be_taken(state, location_keys, uuid, include_inside=include_inside):
        return
    if context.clock.monotonic() - state.tried_s >= _TRIED_EVERY_S:
        await create_missing_claims(context)
    if not _may_be_taken(state, location_keys, uuid, include_inside=include_inside):
        return
    if state.unread:
        raise RetryLater(
            "The location cannot be checked: locations of older tables are in their metadata files, and the storage "
            "does not answer; try again when it does"
        )
    raise RetryLater(
        "A table, view or function whose metadata file is missing or broken may be in this location; restore that "
        "file, or drop and purge the entry, or choose another location"
    )


def _may_be_taken(state: UnclaimedEntries, keys: Iterable[str], uuid: str, *, include_inside: bool) -> bool:
    """Return whether an entry other than `uuid` may already use one of the locations.

    The locations of an entry are unknown if its metadata could not be read yet (`state.unread`), so any location may be
    taken. If its metadata are missing or damaged (`state.lost`), only its possible locations are known.
    """
    if state.unread:
        return True
    lost_keys = {lost_key for owner, keys_of_owner in state.lost.items() if owner != uuid for lost_key in keys_of_owner}
    return bool(lost_keys) and any(
        not lost_keys.isdisjoint(list_keys_above(key))
        or (include_inside and any(lost_key.startswith(f"{key}/") for lost_key in lost_keys))
        for key in keys
    )


async def _list_locations(context: CatalogContext, entry: Entry) -> list[str] | None:
    """Return the locations of an entry.

    The result is None if the storage does not answer, and empty if the metadata is missing or damaged.
    """
    try:
        if entry.kind is EntryKind.TABLE:
            table = await context.documents.table(entry.metadata_location)
            location, properties = table.location, table.properties
        elif entry.kind is EntryKind.VIEW:
            view = await context.documents.view(entry.metadata_location)
            location, properties = view.location, view.properties
        else:  # The server chose the folder of a function, and its document does not contain the folder.
            return [_guess_folder(entry), entry.metadata_location]
    except (NotFound, Corrupt, BadRequest):
        return []
    except SeamarkError:
        return None
    paths = [properties[name] for name in PATH_PROPERTIES if context.warehouse.contains(properties.get(name, ""))]
    return [location, *paths, entry.metadata_location]


async def has_files(context: CatalogContext, entry: Entry) -> bool:
    """Return whether a claimed location of the entry contains a file.

    The result is also True if the storage fails, or if a location cannot be derived from its claim.

    The locations come from the database, because the table's writers can overwrite its metadata file.
    """
    # Claims of earlier versions contain only a key, from which the location cannot be derived. So compare the key with
    # those of the two probable locations: the folder that the entry's metadata location shows, and the metadata file.
    locations_by_key = {
        _make_key(context.warehouse, location): location for location in (_guess_folder(entry), entry.metadata_location)
    }
    for claimed_location in await context.store.claims(entry.uuid):
        if claimed_location.allowed:
            continue
        location = claimed_location.spelled or locations_by_key.get(claimed_location.location)
        if location is None:
            return True
        try:
            if await context.objects.exists(location):
                return True
            async for _ in context.objects.list(location):
                return True
        except SeamarkError:
            return True
    return False


def _guess_folder(entry: Entry) -> str:
    """Return the probable location of an entry. Its metadata file is usually in the folder `metadata` below it."""
    return entry.metadata_location.rpartition("/")[0].removesuffix("/metadata")


def _list_possible_keys(warehouse: Warehouse, entry: Entry) -> list[str]:
    return [_make_key(warehouse, _guess_folder(entry)), _make_key(warehouse, entry.metadata_location)]


async def _make_unchecked_claim(warehouse: Warehouse, entry: Entry, paths: list[str]) -> ClaimLocations:
    """Return the operation that claims the locations of `_list_locations` without a check for overlaps."""
    # The first location is the entry's own. Other entries may have the other locations, too.
    candidates = [ClaimedLocation(key=path, shared=number > 0, display_form=path) for number, path in enumerate(paths)]
    locations = await asyncio.to_thread(_drop_nested_locations, warehouse, candidates)
    return ClaimLocations(uuid=entry.uuid, locations=locations, checked=False)


def _drop_nested_locations(warehouse: Warehouse, candidates: Iterable[ClaimedLocation]) -> tuple[ClaimedLocation, ...]:
    """Return the locations with their keys, without locations that are inside an earlier location."""
    outermost: list[ClaimedLocation] = []
    for candidate in candidates:
        key = _make_key(warehouse, candidate.key)
        if not any(key == other.key or key.startswith(f"{other.key}/") for other in outermost):
            outermost.append(
                ClaimedLocation(
                    key=key, shared=candidate.shared, display_form=candidate.display_form, subject=candidate.subject
                )
            )
    return tuple(outermost)


def _make_key(warehouse: Warehouse, location: str) -> str:
    try:
        return warehouse.make_key(parse_location(location))
    except BadRequest:  # The entry is from a version without claims, and the server does not write to this location.
        return unquote(location).rstrip("/")


def list_keys_above(key: str) -> list[str]:
    """Return the key of a location, and the keys of the folders that contain it."""
    keys, end = [key], len(key)
    while (end := key.rfind("/", 0, end)) > 0:
        keys.append(key[:end])
    return keys
