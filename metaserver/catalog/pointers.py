"""The pointers of tables: their UUIDs, and the locations of the metadata files that they refer to."""

from __future__ import annotations

import re
from uuid import NAMESPACE_URL, uuid5

from seamark.metaserver.catalog.documents import is_named_by_content
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.errors import AlreadyExists, Forbidden
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.iceberg.metadata.properties import METADATA_PATH, metadata_folder
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.wire import show

_NUMBER = re.compile(r"v?(\d{1,9})[-.]")
"""The version at the start of a metadata file name: 00012-<uuid>.metadata.json, or v12.metadata.json (Hadoop)."""


async def check_name_free(parts: CatalogContext, namespace: NamespacePath, name: str) -> None:
    """AlreadyExists before anything is written. The transaction checks again."""
    await parts.require_namespace(namespace)
    for kind in (EntryKind.TABLE, EntryKind.VIEW):
        if await parts.store.entry(kind, namespace, name) is not None:
            what = "Table already exists" if kind is EntryKind.TABLE else "View with same name already exists"
            raise AlreadyExists(f"{what}: {show(namespace, name)}")


def created_entry(namespace: NamespacePath, name: str, uuid: str, location: str, now_ms: int) -> Entry:
    return Entry(
        kind=EntryKind.TABLE,
        namespace=namespace,
        name=name,
        uuid=uuid,
        metadata_location=location,
        created_ms=now_ms,
        updated_ms=now_ms,
    )


def metadata_location(
    parts: CatalogContext, location: str, properties: dict[str, str], previous: str | None, suffix: str
) -> str:
    """A new location for a metadata file; no location is written twice. BadRequest when write.metadata.path is outside
    the warehouse.

    The number follows that of the previous file, so that the highest number is the newest file.
    """
    folder = checked_folder(parts, location, properties)
    number = _NUMBER.match(previous.rpartition("/")[2]) if previous is not None else None
    version = int(number[1]) + 1 if number is not None else int(previous is not None)
    return f"{folder}/{version:05d}-{parts.clock.uuid4()}{suffix}"


def checked_folder(parts: CatalogContext, location: str, properties: dict[str, str]) -> str:
    """The folder for metadata files. BadRequest when write.metadata.path is outside the warehouse."""
    if METADATA_PATH in properties:
        parts.warehouse.check(properties[METADATA_PATH], METADATA_PATH)
    return metadata_folder(location, properties)


def check_uuid(entry: Entry, metadata: TableMetadata) -> None:
    """Forbidden when the metadata belongs to another table than the entry. The table's writers can overwrite metadata
    files, and the UUID decides which files belong to the table. A table whose UUID was derived may have received
    another one from a commit, whose file is then named by its content."""
    is_own = table_uuid(metadata) == entry.uuid
    if not is_own and not (is_derived(entry.uuid) and is_named_by_content(entry.metadata_location)):
        raise Forbidden(
            f"The metadata file of {show(entry.namespace, entry.name)} was overwritten with that of another table; "
            "register an older metadata file"
        )


def table_uuid(metadata: TableMetadata) -> str:
    """The table's UUID. Version 1 metadata may have none; then it is derived from the location."""
    return metadata.table_uuid or str(uuid5(NAMESPACE_URL, metadata.location))


def uuid_of(entry: Entry | None, metadata: TableMetadata) -> str:
    """The UUID in the database if the table exists: its writers could put another table's UUID into its metadata, and
    the UUID decides which files, locations and instants belong to the table."""
    return table_uuid(metadata) if entry is None else entry.uuid


def is_derived(uuid: str) -> bool:
    """Whether `table_uuid` derived the UUID from a location. The metadata may have received a UUID since."""
    return uuid[14:15] == "5"
