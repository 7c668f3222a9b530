"""The pointers of tables: their UUIDs, and the locations of the metadata files that the pointers refer to."""

from __future__ import annotations

import re
from uuid import NAMESPACE_URL, uuid5

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.properties import METADATA_PATH, get_metadata_folder
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import AlreadyExists, Forbidden
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import is_named_by_content
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import SwapPointer

_VERSION_PREFIX = re.compile(r"v?(\d{1,9})[-.]")
"""The version at the start of a metadata file name: 00012-<uuid>.metadata.json, or v12.metadata.json (Hadoop)."""


async def check_name_free(
    context: CatalogContext, namespace: NamespacePath, name: str, kind: EntryKind = EntryKind.TABLE
) -> None:
    """Check that the name is free before any file is written. The transaction repeats this check.

    Raises:
        NoSuchNamespace: The namespace does not exist.
        AlreadyExists: The name exists.
    """
    await context.require_namespace(namespace)
    for checked_kind in (kind, EntryKind.VIEW if kind is EntryKind.TABLE else EntryKind.TABLE):
        if await context.store.load_entry(checked_kind, namespace, name) is not None:
            suffix = "" if checked_kind is kind else " with same name"
            raise AlreadyExists(
                f"{checked_kind.value.capitalize()}{suffix} already exists: {format_path(namespace, name)}"
            )


def build_pointer_swap(entry: Entry, location: str, now_ms: int, holder: str = "") -> SwapPointer:
    """Return the operation that moves the pointer of the entry, if no other commit has moved it.

    The pointer is the location of the entry's current metadata file. `holder` is the name of the process that commits.
    """
    return SwapPointer(
        kind=entry.kind,
        namespace=entry.namespace,
        name=entry.name,
        uuid=entry.uuid,
        expected_location=entry.metadata_location,
        new_location=location,
        now_ms=now_ms,
        holder=holder,
    )


def make_entry(
    namespace: NamespacePath, name: str, uuid: str, location: str, now_ms: int, kind: EntryKind = EntryKind.TABLE
) -> Entry:
    return Entry(
        kind=kind,
        namespace=namespace,
        name=name,
        uuid=uuid,
        metadata_location=location,
        created_ms=now_ms,
        updated_ms=now_ms,
    )


def create_metadata_location(
    context: CatalogContext, location: str, properties: dict[str, str], previous: str | None, suffix: str
) -> str:
    """Return a new, unique location for a metadata file.

    The number in the file's name is higher than the number of the previous file, so that the file with the highest
    number is the newest.

    Args:
        location: The location of the table or view.
        properties: The properties of the table or view.
        previous: The location of the previous metadata file, or None for a new table or view.
        suffix: The end of the file name.

    Raises:
        BadRequest: write.metadata.path is outside the warehouse.
    """
    folder = check_metadata_folder(context, location, properties)
    version_match = _VERSION_PREFIX.match(previous.rpartition("/")[2]) if previous is not None else None
    # If the previous file has another form of name, the number is 1. The first file has the number 0.
    version = int(version_match[1]) + 1 if version_match is not None else int(previous is not None)
    return f"{folder}/{version:05d}-{context.clock.uuid4()}{suffix}"


def parse_metadata_version(location: str) -> int:
    """Return the number at the start of the name of a metadata file, or 0 if the name has no number."""
    version_match = _VERSION_PREFIX.match(location.rpartition("/")[2])
    return 0 if version_match is None else int(version_match[1])


def check_metadata_folder(context: CatalogContext, location: str, properties: dict[str, str]) -> str:
    """Return the folder for metadata files, after checking that it is in the warehouse.

    Raises:
        BadRequest: write.metadata.path is outside the warehouse.
    """
    if METADATA_PATH in properties:
        context.warehouse.check(properties[METADATA_PATH], METADATA_PATH)
    return get_metadata_folder(location, properties)


def check_uuid(entry: Entry, metadata: TableMetadata) -> None:
    """Check that the metadata belongs to the table of the entry.

    The table's writers can overwrite metadata files, and the UUID decides which files belong to the table. A UUID that
    was derived from the location is an exception, because a commit may have replaced it. In this case, the name of the
    metadata file must contain the digest of its content, which proves that the server wrote the file.

    Raises:
        Forbidden: The metadata belongs to another table.
    """
    is_own = table_uuid(metadata) == entry.uuid
    if not is_own and not (is_derived(entry.uuid) and is_named_by_content(entry.metadata_location)):
        raise Forbidden(
            f"The metadata file of {format_path(entry.namespace, entry.name)} was overwritten with the metadata of "
            "another table; register an older metadata file"
        )


def get_files_folder(settings: Settings, metadata: TableMetadata) -> str:
    """Return the folder in which Seamark stores its own files of a table: index files, and files of plans.

    It is the location of the table. In a federated warehouse, the location belongs to another catalog. There it is the
    metadata folder of Seamark's copy of the table's metadata (`metaserver/warehouses/federation/mirror.py`).
    """
    if settings.federation_uri:
        return get_metadata_folder(metadata.location, metadata.properties)
    return metadata.location.rstrip("/")


def table_uuid(metadata: TableMetadata) -> str:
    """Return the table's UUID.

    Metadata of format version 1 may have no UUID. Then the UUID is derived from the location.
    """
    return metadata.table_uuid or str(uuid5(NAMESPACE_URL, metadata.location))


def get_uuid(entry: Entry | None, metadata: TableMetadata) -> str:
    """Return the UUID in the database if the table exists, otherwise the UUID in the metadata.

    The table's writers could put another table's UUID into its metadata, and the UUID decides which files,
    locations and recorded actions (instants) belong to the table.
    """
    return table_uuid(metadata) if entry is None else entry.uuid


def is_derived(uuid: str) -> bool:
    """Return whether `table_uuid` derived the UUID from a location. Later metadata may have a different UUID."""
    version_digit = uuid[14:15]
    return version_digit == "5"  # `uuid5` makes UUIDs of version 5.
