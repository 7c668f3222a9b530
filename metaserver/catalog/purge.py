"""Lists the files of a table in the order of deletion: each file comes before the file that refers to it.

Only files in the table's own folders may be deleted. If the property `gc.enabled` is false, no files may
be deleted, because other tables may use them.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from functools import reduce
from typing import TYPE_CHECKING

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import get_metadata_folder, parse_bool
from seamark.formats.protocol.wire import (
    FORMER_INDEX_FOLDER,
    FORMER_PLANS_FOLDER,
    FRESH_FOLDER,
    INDEX_FOLDER,
    PLANS_FOLDER,
    format_path,
)
from seamark.formats.runtime.errors import BadRequest, Corrupt, Forbidden, NotFound, ObjectMissing
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.context import PATH_PROPERTIES, CatalogContext
from seamark.metaserver.catalog.ownership.claims import make_foreign_file_check
from seamark.metaserver.catalog.ownership.own_files import OwnLocations
from seamark.metaserver.store.model import Entry

if TYPE_CHECKING:
    import fastavro
else:
    fastavro = LazyModule("fastavro")

_MANIFEST_LIMIT_BYTES = 1 << 30


def list_own_folders(context: CatalogContext, metadata: TableMetadata) -> list[str]:
    """Return the folders in the warehouse to which writers of the table currently write."""
    folders = [metadata.location, *(metadata.properties[key] for key in PATH_PROPERTIES if key in metadata.properties)]
    return [folder for folder in folders if context.warehouse.contains(folder)]


def make_ownership_check(context: CatalogContext, metadata: TableMetadata) -> Callable[[str], bool]:
    """Return a function that returns whether a file belongs to the table.

    A file belongs to the table if it is in the warehouse, and below the table's location or the folder of a
    `write.*.path` property. Metadata can name any file, and a purge must not delete files of another table.
    """
    roots = [parse_location(folder) for folder in list_own_folders(context, metadata)]

    def owns(location: str) -> bool:
        return context.warehouse.contains(location) and any(root.holds(parse_location(location)) for root in roots)

    return owns


async def make_deletable_check(
    context: CatalogContext,
    uuid: str,
    metadata: TableMetadata,
    *,
    without_claims: bool = False,
    exclusive: bool = False,
) -> Callable[[str], bool]:
    """Return a function that returns whether a file may be deleted with the table.

    The file must belong to the table (`make_ownership_check`), and must not be in a location of another entry. The
    table must also have claimed the location of the file in the database, because the table's writers can overwrite its
    metadata file.

    Args:
        context: The warehouse and the database.
        uuid: The UUID of the table.
        metadata: The metadata of the table.
        without_claims: Whether the metadata alone decide for a table without claims, which an earlier version of the
            server dropped.
        exclusive: Whether files are kept if another table shares their folder, or may refer to files in their folder.

    Raises:
        RetryLater: The storage is unavailable.
    """
    owns = make_ownership_check(context, metadata)
    is_foreign = await make_foreign_file_check(context, uuid, list_own_folders(context, metadata), exclusive=exclusive)
    claimed_keys = {claim.location for claim in await context.store.claims(uuid) if not claim.allowed}
    own_locations = OwnLocations(context.warehouse, claimed_keys)
    is_judged_by_metadata = without_claims and not claimed_keys

    def is_deletable(location: str) -> bool:
        try:
            return (
                owns(location) and (is_judged_by_metadata or own_locations.holds(location)) and not is_foreign(location)
            )
        except BadRequest:  # The server cannot parse the location.
            return False

    return is_deletable


async def check_purgeable(context: CatalogContext, entry: Entry) -> None:
    """Check that the table's properties allow the deletion of its files.

    Raises:
        BadRequest: The properties forbid the deletion.
    """
    try:
        metadata = await context.documents.table(entry.metadata_location)
    except (NotFound, Corrupt, Forbidden):
        return  # The purge deletes no files without readable metadata, but the table can be dropped.
    if not is_collectable(metadata):
        raise BadRequest(
            f"Cannot purge {format_path(entry.namespace, entry.name)}: its gc.enabled is false, so other tables may "
            "use its files; drop it without purge"
        )


def is_collectable(metadata: TableMetadata) -> bool:
    """Return whether files that the table no longer needs may be deleted."""
    return parse_bool(metadata.properties, "gc.enabled", True)


async def list_reachable_files(context: CatalogContext, uuid: str, metadata_location: str) -> AsyncIterator[str]:
    """Yield the locations of all files that the metadata refers to, and finally of the metadata file itself.

    The order is: data and delete files, manifests, index files, files of plan tables, manifest lists, statistics files
    and older metadata files. Files that `make_deletable_check` excludes are left out. If `gc.enabled` is false, there
    are no files. Missing or damaged manifests are skipped.

    Raises:
        RetryLater: The storage is unavailable.
    """
    try:
        metadata = await context.documents.table(metadata_location)
    except NotFound:
        return
    if not is_collectable(metadata):  # The property may have been set after the drop.
        return
    may_delete = await make_deletable_check(context, uuid, metadata, without_claims=True)
    seen_paths: set[str] = set()
    manifests: list[str] = []
    manifest_lists = [snapshot.manifest_list for snapshot in metadata.snapshots if snapshot.manifest_list]
    for location in manifest_lists:
        if may_delete(location):
            manifests += await _read_field(context, location, "manifest_path")
    for snapshot in metadata.snapshots:
        manifests += snapshot.manifests or ()
    for manifest in dict.fromkeys(manifests):
        if not may_delete(manifest):
            continue
        for path in await _read_field(context, manifest, "data_file", "file_path"):
            if may_delete(path) and path not in seen_paths:
                seen_paths.add(path)
                yield path
    for manifest in dict.fromkeys(manifests):
        if may_delete(manifest):
            yield manifest
    base = metadata.location.rstrip("/")
    former_plans = f"{get_metadata_folder(metadata.location, metadata.properties)}/{FORMER_PLANS_FOLDER}"
    own_folder_names = (INDEX_FOLDER, FORMER_INDEX_FOLDER, PLANS_FOLDER, FRESH_FOLDER)
    for folder in (*(f"{base}/{name}" for name in own_folder_names), former_plans):
        if may_delete(folder):
            # Complete the listing before yielding files, because deletions during a listing could make it skip files.
            for location in [item.location async for item in context.objects.list(folder)]:
                if may_delete(location):
                    yield location
    statistics = [entry.statistics_path for entry in metadata.statistics]
    statistics += [entry.statistics_path for entry in metadata.partition_statistics]
    older_metadata_files = [entry.metadata_file for entry in metadata.metadata_log]
    for location in dict.fromkeys([*manifest_lists, *statistics, *older_metadata_files]):
        if may_delete(location):
            yield location
    if may_delete(metadata_location):
        yield metadata_location


async def _read_field(context: CatalogContext, location: str, *fields: str) -> list[str]:
    """Return the values of one field in all records of an Avro file. `fields` is the path of the field's names.

    The result is empty if the file is missing or damaged.
    """
    try:
        data = await context.objects.read(location, limit_bytes=_MANIFEST_LIMIT_BYTES)
    except ObjectMissing:
        return []
    return await asyncio.to_thread(_decode_field, data, fields)


def _decode_field(data: bytes, fields: tuple[str, ...]) -> list[str]:
    try:
        return [
            str(reduce(lambda value, field: value[field], fields, row)) for row in fastavro.reader(io.BytesIO(data))
        ]
    except Exception:  # noqa: BLE001  writers may commit invalid files, and the reader fails in many ways
        return []  # The files of a damaged manifest are unknown. The manifest itself is deleted.
