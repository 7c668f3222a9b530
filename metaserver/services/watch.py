"""Finds the tables that the table services must examine: changed tables at once, and all tables from time to time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.catalog.policies import (
    Policies,
    add_policies,
    find_effective_setters,
    load_policies,
    with_policies,
)
from seamark.metaserver.runtime.background import log_safely
from seamark.metaserver.store.model import Entry, EntryKind, NamespacePath
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.instants import INDEXING, MAINTENANCE
from seamark.metaserver.timeline.timeline import Timeline

SWEEP_S = 3600.0
"""The time between two examinations of all tables."""
_TABLES_PER_PAGE = 100
_INSTANTS_PER_BATCH = 500
_CPU_MAX_FRACTION = 0.015
"""The maximum share of time in which a sweep uses the event loop, so that requests do not wait."""
_TABLES_WITHOUT_PAUSE = 200
"""The number of tables that a sweep examines without pauses."""
_REMEMBERED_TABLES_MAX = 1_000_000
"""The maximum number of tables for which the next examination is stored. Each takes about 100 bytes."""
_JOB_ACTIONS = (INDEXING, MAINTENANCE)
"""The actions of the records of jobs, which change no table. A commit of a job has another action.

If these records led to new jobs, a job that fails would cause itself.
"""
_log = structlog.get_logger("seamark.services")

Examine = Callable[[Entry, TableMetadata], float]
"""A function that examines a table.

It returns the seconds after which the table must be examined again even if it does not change, or infinity.
"""
Load = Callable[[str], Awaitable[TableMetadata]]


class TableWatch:
    """Calls `examine` with the current metadata of tables, including the policies of their namespaces.

    `load` reads a metadata file. A sweep examines tables that have changed, or whose services are due. Of the other
    tables, it reads only the names, in pages of a hundred.
    """

    def __init__(self, store: PointerStore, timeline: Timeline, load: Load, clock: Clock) -> None:
        self._store = store
        self._timeline = timeline
        self._load = load
        self._clock = clock
        self._due_by_state: dict[int, float] = {}
        """The monotonic time at which a table must be examined again, by a hash of its state.

        If two tables have the same hash by chance, one of them is examined only after its next change.
        """

    async def follow(self, examine: Examine, since: str | None) -> None:
        """Pass each table to `examine` soon after it changes, until the task is cancelled.

        Args:
            examine: Receives the entry and the metadata of a table that has changed.
            since: The position on the timeline after which changes count, or None for all changes on the timeline.
        """
        async with self._timeline.watch_instants(InstantFilter(since=since), counted=False) as watcher:
            while True:
                instants = await self._timeline.read_next(watcher, _INSTANTS_PER_BATCH)
                changed_names = {
                    (instant.namespace, instant.name)
                    for instant in instants
                    if instant.kind is EntryKind.TABLE and instant.action not in _JOB_ACTIONS and instant.name
                }
                for namespace, name in changed_names:
                    entry = await self._store.load_entry(EntryKind.TABLE, namespace, name)
                    if entry is not None:
                        await self._examine_table(entry, await load_policies(self._store, namespace), examine)

    async def examine_all(
        self, examine: Examine, *, pause: bool = True, on_table: Callable[[str], None] = lambda _: None
    ) -> int:
        """Pass all tables that have changed or are due to `examine`, and return their number.

        Args:
            examine: Examines a table, and returns the seconds after which the table is due again if it is unchanged.
            pause: Whether pauses limit the time for which the method keeps the event loop busy.
            on_table: Receives the UUID of each table, even if the table is not examined.
        """
        examined_count = 0
        previous_due_by_state, self._due_by_state = self._due_by_state, {}
        async for entries, policies in self._list_pages():
            began_s = self._clock.monotonic()
            policies_hash = hash(frozenset(policies.items()))
            for entry in entries:
                on_table(entry.uuid)
                state_hash = hash((entry.uuid, entry.namespace, entry.name, entry.metadata_location, policies_hash))
                due_s = previous_due_by_state.get(state_hash, 0.0)
                if due_s <= began_s:
                    due_s = began_s + await self._examine_table(entry, policies, examine)
                    examined_count += 1
                if len(self._due_by_state) < _REMEMBERED_TABLES_MAX:
                    self._due_by_state[state_hash] = due_s
            if pause and examined_count > _TABLES_WITHOUT_PAUSE:
                await asyncio.sleep((self._clock.monotonic() - began_s) / _CPU_MAX_FRACTION)
        return examined_count

    def forget_due_times(self) -> None:
        """Forget when each table is due, so that the next call of `examine_all` examines all tables."""
        self._due_by_state = {}

    async def find(self, namespace: NamespacePath, name: str) -> tuple[Entry, TableMetadata] | None:
        """Return the entry and the metadata of a table, or None if it does not exist or cannot be read."""
        entry = await self._store.load_entry(EntryKind.TABLE, namespace, name)
        if entry is None:
            return None
        try:
            metadata = await self._load(entry.metadata_location)
            return entry, with_policies(metadata, await load_policies(self._store, namespace))
        except SeamarkError as error:
            log_safely(_log.warning, "table not examined", namespace=namespace, table=name, reason=error.message)
            return None

    async def list_setters(self, entry: Entry) -> dict[str, str]:
        """Return the principals that set the properties of the table's policy, by property.

        The result is empty if the table's metadata cannot be read.
        """
        try:
            metadata = await self._load(entry.metadata_location)
            return find_effective_setters(metadata, await load_policies(self._store, entry.namespace))
        except SeamarkError:
            return {}

    async def _examine_table(self, entry: Entry, policies: Policies, examine: Examine) -> float:
        """Load a table with its policies, pass it to `examine`, and return the result of `examine`.

        The result is the number of seconds after which the table is passed again if it is unchanged. It is 0 after an
        error, so that the next sweep passes the table again.
        """
        log_fields = {"namespace": entry.namespace, "table": entry.name}
        try:
            return examine(entry, with_policies(await self._load(entry.metadata_location), policies))
        except SeamarkError as error:
            log_safely(_log.warning, "table not examined", **log_fields, reason=error.message)
        except Exception:  # noqa: BLE001  an error of one table must not end the services of other tables
            log_safely(_log.exception, "table not examined", **log_fields)
        return 0.0

    async def _list_pages(self) -> AsyncIterator[tuple[list[Entry], Policies]]:
        """Yield the tables of all namespaces in pages, with the policies that they inherit.

        The method is not recursive, because a namespace may have a thousand levels. It has the properties of only one
        namespace in memory at a time.
        """
        parents: list[_Parent] = [_Parent((), {})]
        while parents:
            path = await parents[-1].read_next(self._store)
            if path is None:
                parents.pop()
                continue
            namespace = await self._store.load_namespace(path)
            if namespace is None:  # The namespace was dropped meanwhile.
                continue
            policies = add_policies(parents[-1].policies, path, namespace.properties)
            last_name: str | None = None
            while entries := await self._store.list_entries(EntryKind.TABLE, path, last_name, _TABLES_PER_PAGE):
                yield entries, policies
                last_name = entries[-1].name
            parents.append(_Parent(path, policies))


class _Parent:
    """A namespace whose children are visited one by one."""

    def __init__(self, path: NamespacePath, policies: Policies) -> None:
        self._path = path
        self.policies = policies
        self._children: deque[NamespacePath] = deque()
        self._last: str | None = None

    async def read_next(self, store: PointerStore) -> NamespacePath | None:
        """Return the next child namespace, or None after the last child."""
        if not self._children:
            self._children += await store.list_namespaces(self._path, self._last, _TABLES_PER_PAGE)
        if not self._children:
            return None
        child = self._children.popleft()
        self._last = child[-1]
        return child
