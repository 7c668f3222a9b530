"""Finds the tables for which services may propose jobs: those that changed, and in turn all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from seamark.metaserver.catalog.policies import Policies, add_policies, load_policies, with_policies
from seamark.metaserver.clock import Clock
from seamark.metaserver.errors import SeamarkError
from seamark.metaserver.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.instants import INDEXING, MAINTENANCE
from seamark.metaserver.timeline.timeline import Timeline

SWEEP_S = 3600.0
"""Time between two looks at all tables."""
_PAGE = 100
_BATCH = 500
_CPU_SHARE = 0.02
"""Of the time that a look at all tables may keep the event loop busy, so that requests do not wait."""
_FREE_TABLES = 500
"""Tables of a sweep that are looked at without pauses."""
_WORK = (INDEXING, MAINTENANCE)
"""Actions of jobs themselves, which must not lead to the next job."""
_log = structlog.get_logger("seamark.services")

Look = Callable[[Entry, TableMetadata], None]
Load = Callable[[str], Awaitable[TableMetadata]]


class TableWatch:
    """Calls `look` with the current metadata of tables, with the policies of their namespaces. `load` reads a metadata
    file."""

    def __init__(self, store: PointerStore, timeline: Timeline, load: Load, clock: Clock) -> None:
        self._store = store
        self._timeline = timeline
        self._load = load
        self._clock = clock

    async def follow(self, look: Look, since: str | None) -> None:
        """Until cancelled: looks at each table soon after it changed. `since`: the position on the timeline."""
        async with self._timeline.watching(InstantFilter(since=since), counted=False) as watcher:
            while True:
                instants = await self._timeline.next(watcher, _BATCH)
                changed = {
                    (instant.namespace, instant.name)
                    for instant in instants
                    if instant.kind is EntryKind.TABLE and instant.action not in _WORK and instant.name
                }
                for namespace, name in changed:
                    entry = await self._store.entry(EntryKind.TABLE, namespace, name)
                    if entry is not None:
                        await self._look_at(entry, await load_policies(self._store, namespace), look)

    async def sweep(self, look: Look) -> int:
        """Looks at all tables once, without keeping the event loop busy for long. Returns their number."""
        seen = 0
        async for entries, policies in self._pages((), {}):
            began_s = self._clock.monotonic()
            for entry in entries:
                await self._look_at(entry, policies, look)
            seen += len(entries)
            if seen > _FREE_TABLES:
                await asyncio.sleep((self._clock.monotonic() - began_s) / _CPU_SHARE)
        return seen

    async def find(self, namespace: NamespacePath, name: str) -> tuple[Entry, TableMetadata] | None:
        """The table's current state; None if there is no such table, or its metadata cannot be read."""
        entry = await self._store.entry(EntryKind.TABLE, namespace, name)
        if entry is None:
            return None
        try:
            metadata = await self._load(entry.metadata_location)
            return entry, with_policies(metadata, await load_policies(self._store, namespace))
        except SeamarkError as error:
            _log.warning("table not examined", namespace=namespace, table=name, reason=error.message)
            return None

    async def _look_at(self, entry: Entry, policies: Policies, look: Look) -> None:
        try:
            look(entry, with_policies(await self._load(entry.metadata_location), policies))
        except SeamarkError as error:
            _log.warning("table not examined", namespace=entry.namespace, table=entry.name, reason=error.message)

    async def _pages(self, parent: NamespacePath, above: Policies) -> AsyncIterator[tuple[list[Entry], Policies]]:
        """The tables of all namespaces below `parent`, in pages, with the policies that they inherit. `above`: those
        of `parent`."""
        after: str | None = None
        while namespaces := await self._store.namespaces(parent, after, _PAGE):
            for namespace in namespaces:
                policies = add_policies(above, namespace.path, namespace.properties)
                last: str | None = None
                while entries := await self._store.entries(EntryKind.TABLE, namespace.path, last, _PAGE):
                    yield entries, policies
                    last = entries[-1].name
                async for page in self._pages(namespace.path, policies):
                    yield page
            after = namespaces[-1].path[-1]
