"""The pointer store of a federated warehouse.

It reads names from the other catalog, and all other data from the database of the warehouse.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from seamark.formats.protocol.wire import is_plan_name
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind, Namespace, NamespacePath
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.federation.mirror import Mirrors
from seamark.metaserver.warehouses.federation.other_catalog import OtherCatalog, open_other_catalog

_LOCKS_MAX = 10_000
"""With this many locks, the locks that no request holds are removed."""
_LISTING_S = 60.0
"""The time for which a listing shows that the spelling of the name of a table or view with a mirror is right."""
T = TypeVar("T", str, NamespacePath)


class FederatedStore:
    """A pointer store that reads names from the other catalog.

    A read of a table or view by its name updates its mirror first. Methods that this class does not define are those
    of the database.

    A name exists only in the spelling of the other catalog's listings. The other catalog may also answer for other
    spellings, such as `HR` for `hr`, but grants and denials apply to one spelling.

    Args:
        store: The database of the warehouse.
        other: The other catalog.
    """

    def __init__(self, store: PointerStore, other: OtherCatalog) -> None:
        self._store = store
        self._other_catalog = other
        self._mirrors: Mirrors | None = None
        self._locks: dict[tuple[EntryKind, NamespacePath, str], asyncio.Lock] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def connect_catalog(self, context: CatalogContext) -> None:
        """Set the catalog of the warehouse, which opens after this store. Before this call, the store has no names.

        The store needs the catalog to write mirrors: copies of the metadata of the other catalog's tables.
        """
        self._mirrors = Mirrors(context, self._store, self._locate)

    async def load_namespace(self, path: NamespacePath) -> Namespace | None:
        if self._mirrors is None:
            return None
        async with self._other_catalog.limit_request():
            properties = await self._other_catalog.find_namespace(path)
            if properties is None or not await self._is_namespace_listed(path):
                return None
            return Namespace(path=path, properties=properties)

    async def list_namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[NamespacePath]:
        children = await self._list_children(parent)
        return [path for path in children if after is None or path[-1] > after][:limit]

    async def find_namespaces(self, parent: NamespacePath, names: Sequence[str]) -> list[NamespacePath]:
        wanted_names = set(names)
        return [path for path in await self._list_children(parent) if path[-1] in wanted_names]

    async def _list_children(self, parent: NamespacePath) -> list[NamespacePath]:
        """Return the namespaces in `parent`, sorted by name. Before `connect_catalog` is called, there are none.

        Their tables could not be read before, because the store could not write copies of their metadata (mirrors).
        """
        if self._mirrors is None:
            return []
        async with self._other_catalog.limit_request():
            if not await self._is_namespace_listed(parent):
                return []
            return await self._other_catalog.list_namespaces(parent)

    async def load_entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None:
        if self._mirrors is None or kind is EntryKind.FUNCTION or is_plan_name(name):
            return None
        async with self._other_catalog.limit_request():
            return await self._find_entry(self._mirrors, kind, namespace, name)

    async def _find_entry(self, mirrors: Mirrors, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None:
        """Return the entry of a table or view with a current mirror, or None if the federated catalog lacks it.

        The warehouse reads its names from the federated catalog. The mirror of a table is a copy of its metadata, which
        this server writes and to which the entry refers.
        """
        location = await self._other_catalog.find_entry(kind, namespace, name)
        if location is None and await self._store.load_entry(kind, namespace, name) is None:
            return None
        # If the mirror is current, and a listing has the name, no new answer is needed.
        entry = await mirrors.find(kind, namespace, name, location)
        if entry is not None and await self._is_namespace_listed(namespace):
            names = await self._other_catalog.list_entries(kind, namespace, fresh_s=_LISTING_S)
            if _contains_name(names, name):
                return entry
        async with self._get_lock(kind, namespace, name):
            # The answer may be older than the mirror, which another request has written meanwhile. So write a mirror
            # only after a new answer. Otherwise the mirror could go back to an earlier snapshot.
            location = await self._locate(kind, namespace, name)
            if location is None:
                await mirrors.remove(kind, namespace, name)
                return None
            return await mirrors.update(kind, namespace, name, location)

    async def list_entries(
        self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int
    ) -> list[Entry]:
        """Return entries that have only names, without UUIDs and metadata.

        The server copies the metadata of a table (its mirror) when the table is read by its name.
        """
        if self._mirrors is None or kind is EntryKind.FUNCTION:
            return []
        async with self._other_catalog.limit_request():
            if not await self._is_namespace_listed(namespace):
                return []
            names = await self._other_catalog.list_entries(kind, namespace)
        page_names = [name for name in names if after is None or name > after][:limit]
        return [Entry(kind=kind, namespace=namespace, name=name, uuid="", metadata_location="") for name in page_names]

    async def _locate(self, kind: EntryKind, namespace: NamespacePath, name: str) -> str | None:
        """Return the metadata file of a name from a new answer, or None if the other catalog does not list the name."""
        location = await self._other_catalog.find_entry(kind, namespace, name, skip_cache=True)
        if location is None or not await self._is_namespace_listed(namespace):
            return None
        if _contains_name(await self._other_catalog.list_entries(kind, namespace), name):
            return location
        # The name may be newer than the listing.
        names = await self._other_catalog.list_entries(kind, namespace, skip_cache=True)
        return location if _contains_name(names, name) else None

    async def _is_namespace_listed(self, path: NamespacePath) -> bool:
        """Return whether the federated catalog (the source of names) lists each level of the path in this spelling."""
        for depth in range(1, len(path) + 1):
            parent, level = path[: depth - 1], path[:depth]
            if _contains_name(await self._other_catalog.list_namespaces(parent), level):
                continue
            # The name may be newer than the cached listing.
            if not _contains_name(await self._other_catalog.list_namespaces(parent, skip_cache=True), level):
                return False
        return True

    def _get_lock(self, *key: Any) -> asyncio.Lock:
        """Return the lock of a name, which a request of this process takes to write the mirror of the table.

        A mirror is a copy of the metadata of a table in the other catalog.
        """
        if len(self._locks) >= _LOCKS_MAX:
            self._locks = {name_key: lock for name_key, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())


def _contains_name(names: Sequence[T], name: T) -> bool:
    """Return whether a sorted listing contains a name. The binary search is fast in long listings."""
    index = bisect_left(names, name)
    return index < len(names) and names[index] == name


@asynccontextmanager
async def open_warehouse_store(
    settings: Settings, store: PointerStore, clock: Clock
) -> AsyncIterator[tuple[PointerStore, Callable[[CatalogContext], None]]]:
    """Open the pointer store of a further warehouse, which reads names from another catalog if it is federated.

    Args:
        settings: The settings of the warehouse.
        store: The database of the warehouse.
        clock: The clock.

    Yields:
        A tuple (store, connect_catalog): the pointer store of the warehouse, and a function that the caller must call
        with the catalog of the warehouse after it is open.
    """
    if not settings.federation_uri:
        yield store, lambda _: None
        return
    async with open_other_catalog(settings, clock) as other:
        federated_store = FederatedStore(store, other)
        # The store passes calls of the other methods of the port on to the database.
        yield cast("PointerStore", federated_store), federated_store.connect_catalog
