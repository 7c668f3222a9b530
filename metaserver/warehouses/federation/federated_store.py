"""The pointer store of a federated warehouse: its names come from the other catalog, and all else from its database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

from seamark.formats.protocol.wire import is_plan_name
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind, Namespace, NamespacePath
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.federation.mirror import Mirrors
from seamark.metaserver.warehouses.federation.other_catalog import OtherCatalog, open_other_catalog

_LOCKS_MAX = 10_000


class FederatedStore:
    """A pointer store that reads names from the other catalog.

    A read of a table or view by its name updates its mirror first. The methods that are not here are those of the
    database.

    Args:
        store: The database of the warehouse.
        other: The other catalog.
    """

    def __init__(self, store: PointerStore, other: OtherCatalog) -> None:
        self._store = store
        self._other = other
        self._mirrors: Mirrors | None = None
        self._locks: dict[tuple[EntryKind, NamespacePath, str], asyncio.Lock] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def show_tables(self, context: CatalogContext) -> None:
        """Read names from the other catalog from now on. Before, the store has no names."""
        self._mirrors = Mirrors(context, self._store)

    async def namespace(self, path: NamespacePath) -> Namespace | None:
        if self._mirrors is None:
            return None
        properties = await self._other.find_namespace(path)
        return None if properties is None else Namespace(path=path, properties=properties)

    async def namespaces(self, parent: NamespacePath, after: str | None, limit: int) -> list[NamespacePath]:
        if self._mirrors is None:
            return []
        children = await self._other.list_namespaces(parent)
        return [path for path in children if after is None or path[-1] > after][:limit]

    async def find_namespaces(self, parent: NamespacePath, names: Sequence[str]) -> list[NamespacePath]:
        if self._mirrors is None:
            return []
        wanted = set(names)
        return [path for path in await self._other.list_namespaces(parent) if path[-1] in wanted]

    async def entry(self, kind: EntryKind, namespace: NamespacePath, name: str) -> Entry | None:
        if self._mirrors is None or kind is EntryKind.FUNCTION or is_plan_name(name):
            return None
        location = await self._other.find_entry(kind, namespace, name)
        async with self._lock(kind, namespace, name):
            if location is None:
                await self._mirrors.remove(kind, namespace, name)
                return None
            return await self._mirrors.update(kind, namespace, name, location)

    async def entries(self, kind: EntryKind, namespace: NamespacePath, after: str | None, limit: int) -> list[Entry]:
        """Return entries with names only. Their mirrors are written when they are read by name."""
        if self._mirrors is None or kind is EntryKind.FUNCTION:
            return []
        names = await self._other.list_entries(kind, namespace)
        later = [name for name in names if after is None or name > after][:limit]
        return [Entry(kind=kind, namespace=namespace, name=name, uuid="", metadata_location="") for name in later]

    def _lock(self, *key: Any) -> asyncio.Lock:
        """Return the lock of a name, so that one request of this process writes its mirror."""
        if len(self._locks) >= _LOCKS_MAX:
            self._locks = {held: lock for held, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())


@asynccontextmanager
async def open_names(
    settings: Settings, store: PointerStore, clock: Clock
) -> AsyncIterator[tuple[PointerStore, Callable[[CatalogContext], None]]]:
    """Open the names of a further warehouse.

    Args:
        settings: The settings of the warehouse.
        store: The database of the warehouse.
        clock: The clock.

    Yields:
        The pointer store of the warehouse, and a function to call with its catalog when it is open.
    """
    if not settings.federation_uri:
        yield store, lambda _: None
        return
    async with open_other_catalog(settings, clock) as other:
        federated = FederatedStore(store, other)
        # The store delegates the other methods of the port to the database.
        yield cast("PointerStore", federated), federated.show_tables
