"""Writes mirrors of the tables of another catalog, which add properties of Seamark to the metadata.

A mirror of a table is a metadata file in the folder `_seamark` of the federated warehouse. It equals the metadata of
the other catalog, except for the properties of Seamark, such as definitions of indexes. So nothing is written to the
folders of the other catalog's tables. The pointer in the database refers to the mirror. A view needs no mirror.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID

from msgspec import structs

from seamark.formats.iceberg.metadata.metadata import TableMetadata, add_previous_file
from seamark.formats.iceberg.metadata.properties import METADATA_PATH
from seamark.formats.iceberg.metadata.table_json import encode_table
from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    Corrupt,
    Forbidden,
    NoSuchTable,
    NoSuchView,
    NotFound,
    RetryLater,
    SeamarkError,
)
from seamark.formats.storage.locations import parse_location
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.catalog.documents import compress_document
from seamark.metaserver.catalog.imports import check_table_locations, check_view_locations
from seamark.metaserver.catalog.ownership.claims import make_claim
from seamark.metaserver.catalog.ownership.owners import borrows_rights
from seamark.metaserver.catalog.pointers import build_pointer_swap, create_metadata_location, make_entry, table_uuid
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.operations import (
    CreateEntry,
    CreateNamespace,
    DropEntry,
    DropNamespace,
    Operation,
    ReleaseLocations,
    RenameEntry,
)
from seamark.metaserver.store.port import PointerStore

_FOLDER = "_seamark"
_OWN_PREFIX = "seamark."
_SOURCE = "seamark.federated-from"
"""The property of a mirror that names the metadata file of the other catalog."""
_KEPT_FILES_MAX = 5
"""The number of earlier mirrors of a table that are not deleted, because running requests may read them."""
_CALLER = Caller(principal_name="federation", request_id="federation")
_MIRROR_TRIES_MAX = 3
Locator = Callable[[EntryKind, NamespacePath, str], Awaitable[str | None]]
"""A function that returns the metadata file of a name in the other catalog, or None if there is no such name."""
_ENTRIES_PER_PAGE = 1000


class Mirrors:
    """The mirrors of one federated warehouse.

    Args:
        context: The services of the catalog.
        store: The database of the warehouse, without the names of the other catalog.
        locate: Returns the metadata file of a name in the other catalog, or None if the other catalog does not list it.
    """

    def __init__(self, context: CatalogContext, store: PointerStore, locate: Locator) -> None:
        self._context = context
        self._store = store
        self._locate = locate

    async def remove(self, kind: EntryKind, namespace: NamespacePath, name: str) -> None:
        """Remove a name that the other catalog does not have from the database."""
        entry = await self._store.load_entry(kind, namespace, name)
        if entry is not None:
            with suppress(CommitConflict, NotFound):  # Another request has removed or changed the entry.
                await self._store.transact(_make_removals(entry))

    async def find(self, kind: EntryKind, namespace: NamespacePath, name: str, location: str | None) -> Entry | None:
        """Return the entry of a name if it refers to the mirror of the metadata file `location`, otherwise None.

        The mirror of a table is a copy of its metadata in the federated catalog, to which this server's entry refers.

        Args:
            location: The metadata file of the federated catalog, or None if that catalog does not have the name.
        """
        entry = None if location is None else await self._store.load_entry(kind, namespace, name)
        return entry if entry is not None and await self._find_source(entry) == location else None

    async def update(self, kind: EntryKind, namespace: NamespacePath, name: str, location: str) -> Entry:
        """Update the mirror of a table or view of the federated catalog, and return the entry of its name.

        The mirror of a table is a copy of its metadata, which this server writes and to which the entry refers.

        Args:
            location: The metadata file to which the name refers in the federated catalog.

        Raises:
            Forbidden: The metadata are damaged or refused, for example because they name files outside the warehouse,
                outside the table, or in another table.
            RetryLater: The name changed in each attempt.
        """
        for _ in range(_MIRROR_TRIES_MAX):
            current_entry = await self.find(kind, namespace, name, location)
            if current_entry is not None:
                return current_entry
            entry = await self._store.load_entry(kind, namespace, name)
            try:
                await self._point_name_at(kind, namespace, name, location, entry)
            except (CommitConflict, AlreadyExists, NoSuchTable, NoSuchView):
                continue  # Another request has written the mirror, or has changed a definition of an index.
            except (BadRequest, Corrupt) as error:
                raise Forbidden(
                    f"{format_path(namespace, name)} of the other catalog cannot be shown: {error.message}"
                ) from None
            written_entry = await self._store.load_entry(kind, namespace, name)
            if written_entry is not None:
                return written_entry
        raise RetryLater(f"{format_path(namespace, name)} changes in the other catalog at the same time; try again")

    async def _find_source(self, entry: Entry) -> str:
        """Return the metadata file of the other catalog that the entry mirrors, or "" if the mirror was deleted."""
        if entry.kind is EntryKind.VIEW:
            return entry.metadata_location
        try:
            mirror = await self._context.documents.table(entry.metadata_location)
        except NotFound:  # The mirror was deleted.
            return ""
        return mirror.properties.get(_SOURCE, "")

    async def _point_name_at(
        self, kind: EntryKind, namespace: NamespacePath, name: str, location: str, entry: Entry | None
    ) -> None:
        """Let a name of this server refer to a table or view of the federated catalog.

        The name of a view refers to the metadata file itself, and the name of a table to a new copy of the file.

        Args:
            kind: The kind of the entry.
            namespace: The namespace of the name, which is created if it does not exist.
            name: The name.
            location: The metadata file.
            entry: The entry that has the name now, or None.
        """
        self._context.warehouse.check(location, "The metadata file")
        for depth in range(1, len(namespace) + 1):
            if await self._store.load_namespace(namespace[:depth]) is None:
                with suppress(AlreadyExists):
                    await self._store.transact([CreateNamespace(path=namespace[:depth], properties={})])
        if kind is EntryKind.VIEW:
            await self._write_view(namespace, name, location, entry)
        else:
            await self._write_table(namespace, name, location, entry)

    async def _write_view(self, namespace: NamespacePath, name: str, location: str, entry: Entry | None) -> None:
        """Let a name refer to the metadata file of a view. `entry` is the entry that has the name now.

        Raises:
            BadRequest: The view runs with the rights of a user of the other catalog, or its locations are refused.
        """
        view = await self._context.documents.view(location)
        check_view_locations(self._context.warehouse, view, location)
        if borrows_rights(view):
            raise BadRequest("the view runs with the rights of a user of the other catalog")
        new_entry = make_entry(namespace, name, view.view_uuid, location, self._context.clock.now_ms(), EntryKind.VIEW)
        former_entry = await self._find_former(new_entry, entry)
        claim = await make_claim(self._context, _CALLER, view, new_entry, may_restore=former_entry is None)
        await self._context.transact(
            [*_drop_replaced(new_entry, entry), *_make_pointer_change(new_entry, former_entry), claim]
        )

    async def _write_table(self, namespace: NamespacePath, name: str, location: str, entry: Entry | None) -> None:
        """Copy the metadata of a table of the federated catalog, and let its name refer to the copy (the mirror).

        Args:
            namespace: The namespace of the name.
            name: The name.
            location: The metadata file in the other catalog.
            entry: The entry that has the name now, or None.

        Raises:
            BadRequest: The table is in the folder of the mirrors.
        """
        metadata = await self._context.documents.peek(location)
        await asyncio.to_thread(check_table_locations, self._context.warehouse, metadata, location)
        mirrors_root = parse_location(f"{self._context.warehouse.uri}/{_FOLDER}")
        if mirrors_root.holds(parse_location(metadata.location)):
            raise BadRequest(f"the table is in the folder {str(mirrors_root)!r} of this server")
        new_entry = make_entry(namespace, name, _check_uuid(table_uuid(metadata)), "", self._context.clock.now_ms())
        former_entry = await self._find_former(new_entry, entry)
        former_mirror = None
        if former_entry is not None:
            with suppress(NotFound):  # The mirror was deleted.
                former_mirror = await self._context.documents.table(former_entry.metadata_location)
        mirror, unused_files = self._make_mirror(metadata, location, new_entry.uuid, former_entry, former_mirror)
        document, suffix = compress_document("none", encode_table(mirror))
        previous = None if former_entry is None else former_entry.metadata_location
        file = create_metadata_location(self._context, mirror.location, mirror.properties, previous, suffix)
        new_entry = structs.replace(new_entry, metadata_location=file)
        claim = await make_claim(self._context, _CALLER, mirror, new_entry, may_restore=former_entry is None)
        operations = [*_drop_replaced(new_entry, entry), *_make_pointer_change(new_entry, former_entry), claim]
        await self._context.create_and_transact(file, document, operations)
        for unused_file in unused_files:
            with suppress(SeamarkError):  # The file is small, and nothing reads it.
                await self._context.objects.delete(unused_file)

    def _make_mirror(
        self,
        metadata: TableMetadata,
        location: str,
        uuid: str,
        former_entry: Entry | None,
        former_metadata: TableMetadata | None,
    ) -> tuple[TableMetadata, list[str]]:
        """Return a tuple (mirror, unused_files), in which `unused_files` are the earlier mirrors to delete.

        Args:
            metadata: The metadata of the other catalog.
            location: The file of this metadata.
            uuid: The UUID of the table.
            former_entry: The entry of the last mirror.
            former_metadata: The last mirror. The new mirror has the same properties of Seamark.
        """
        own_properties = {
            name: value
            for name, value in ({} if former_metadata is None else former_metadata.properties).items()
            if name.startswith(_OWN_PREFIX)
        }
        properties = {name: value for name, value in metadata.properties.items() if not name.startswith(_OWN_PREFIX)}
        folder = f"{self._context.warehouse.uri}/{_FOLDER}/{uuid}"
        properties |= {**own_properties, METADATA_PATH: folder, _SOURCE: location}
        # The log of the mirror lists earlier mirrors, so that no file of the other catalog is deleted as unused.
        mirror = structs.replace(metadata, table_uuid=uuid, properties=properties, metadata_log=())
        if former_metadata is None or former_entry is None:
            return mirror, []
        mirror = structs.replace(mirror, metadata_log=former_metadata.metadata_log)
        return add_previous_file(
            mirror, former_entry.metadata_location, former_metadata.last_updated_ms, _KEPT_FILES_MAX
        )

    async def _find_former(self, new: Entry, entry: Entry | None) -> Entry | None:
        """Return the entry of the same table or view, which may have had a different name in the other catalog.

        The result is None if this server has no such entry.

        Raises:
            BadRequest: The other catalog has the table or view under two names. A rename of the entry would apply the
                grants on the first name to the second name.
        """
        if entry is not None and entry.uuid == new.uuid:
            return entry
        entries = await self._store.list_entries_by_uuid(new.uuid)
        former_entry = next((other for other in entries if other.kind is new.kind), None)
        if former_entry is not None:
            location = await self._locate(former_entry.kind, former_entry.namespace, former_entry.name)
            if location is not None and await self._read_uuid(former_entry.kind, location) == new.uuid:
                raise BadRequest(
                    f"the other catalog lists it as {format_path(former_entry.namespace, former_entry.name)}, too. "
                    "Remove one of the names there, or change the UUID: rights apply to one name"
                )
        return former_entry

    async def _read_uuid(self, kind: EntryKind, location: str) -> str:
        """Return the UUID in a metadata file of the other catalog."""
        self._context.warehouse.check(location, "The metadata file")
        if kind is EntryKind.VIEW:
            return (await self._context.documents.view(location)).view_uuid
        return table_uuid(await self._context.documents.peek(location))


def _check_uuid(uuid: str) -> str:
    """Return the UUID of a table if it can be a part of the path of the copies of the table's metadata (mirrors).

    Raises:
        BadRequest: The text is not a UUID in the usual form.
    """
    with suppress(ValueError):
        if str(UUID(uuid)) == uuid.lower():
            return uuid
    raise BadRequest(f"{uuid[:80]!r} is not a UUID")


async def remove_mirrors(store: PointerStore) -> None:
    """Remove all names from the database of a federated warehouse.

    The names of its tables refer to mirrors: copies of the metadata in the federated catalog. The files of the mirrors
    are not deleted.
    """
    paths: list[NamespacePath] = []
    parents: list[NamespacePath] = [()]
    while parents:
        parent = parents.pop()
        after = None
        while children := await store.list_namespaces(parent, after, _ENTRIES_PER_PAGE):
            paths += children
            parents += children
            after = children[-1][-1]
    for path in reversed(paths):
        for kind in (EntryKind.TABLE, EntryKind.VIEW):
            while entries := await store.list_entries(kind, path, None, _ENTRIES_PER_PAGE):
                for entry in entries:
                    await store.transact(_make_removals(entry))
        await store.transact([DropNamespace(path=path)])


def _make_removals(entry: Entry) -> list[Operation]:
    """Return the operations that remove a name and its claims. The files belong to the other catalog."""
    drop = DropEntry(
        kind=entry.kind,
        namespace=entry.namespace,
        name=entry.name,
        expected_location=entry.metadata_location,
        uuid=entry.uuid,
    )
    return [drop, ReleaseLocations(uuid=entry.uuid)]


def _drop_replaced(new: Entry, entry: Entry | None) -> list[Operation]:
    """Return the operations that remove the table or view that had the name before, if it is not the new entry."""
    return [] if entry is None or entry.uuid == new.uuid else _make_removals(entry)


def _make_pointer_change(new: Entry, former_entry: Entry | None) -> list[Operation]:
    """Return the operations that create the new entry, or rename the former entry and move its pointer."""
    if former_entry is None:
        return [CreateEntry(entry=new)]
    renamed_entry = structs.replace(former_entry, namespace=new.namespace, name=new.name)
    operations: list[Operation] = [build_pointer_swap(renamed_entry, new.metadata_location, new.updated_ms)]
    if (former_entry.namespace, former_entry.name) != (new.namespace, new.name):
        rename = RenameEntry(
            kind=former_entry.kind,
            namespace=former_entry.namespace,
            name=former_entry.name,
            to_namespace=new.namespace,
            to_name=new.name,
            uuid=former_entry.uuid,
        )
        operations.insert(0, rename)
    return operations
