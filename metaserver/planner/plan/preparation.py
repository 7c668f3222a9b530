"""Preparation of the view of a new snapshot before the next plan.

A plan after a commit then does not wait until the manifests of the commit are read and decoded. The timeline shows the
commits of this server and of other servers. It is followed only while tables are planned. The rules are:

- A view is made only for the current snapshot of a recently planned table, and only while the view that the table's
  last plan used is in memory.
- The new manifests of the commit must be small and fit into the free part of the budget, so that no view is evicted.
- One table is prepared at a time, for its newest commit.
- A prepared view that no plan has used is replaced by the next prepared view. If commits to a table are more frequent
  than plans, preparing the table takes at most a tenth of the time.

A plan that arrives during a preparation waits for its result. If a preparation fails, the next plan repeats the work
and reports the error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import structlog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.planner.plan.cached_views import RECENTLY_PLANNED_S
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.store.model import EntryKind, InstantState, NamespacePath
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.timeline import Timeline

_BATCH_INSTANTS_MAX = 500
"""The maximum number of instants that are read from the timeline at once."""
_PAUSE_FACTOR = 9
"""The pause before the next preparation of a table, divided by the duration of the previous preparation.

The pause applies only if no plan has used the prepared view.
"""
_log = structlog.get_logger("seamark.planner")


class Preparation:
    """Follows commits, and makes views in advance.

    An instance belongs to one event loop. `load` reads a metadata file. `limit_bytes` is the maximum size of the new
    manifests of a commit.
    """

    def __init__(
        self,
        planner: Planner,
        store: PointerStore,
        timeline: Timeline,
        load: Callable[[str], Awaitable[TableMetadata]],
        clock: Clock,
        *,
        limit_bytes: int,
    ) -> None:
        self._planner = planner
        self._planned_tables = planner.planned
        self._store = store
        self._timeline = timeline
        self._load = load
        self._clock = clock
        self._limit_bytes = limit_bytes
        self._waiting: OrderedDict[str, tuple[NamespacePath, str]] = OrderedDict()
        """The names of recently planned tables that have changed since, by UUID."""
        self._commit_recorded = asyncio.Event()

    async def follow(self) -> None:
        """Follow the timeline until the task is cancelled, and record the commits to recently planned tables.

        While no table was planned recently, the method waits for the next plan instead of reading the timeline. The
        timeout makes it check this again even if there are no commits.
        """
        while True:
            await self._planned_tables.noted.wait()
            self._planned_tables.noted.clear()
            since = InstantFilter(since=await self._timeline.load_head())
            async with self._timeline.watch_instants(since, counted=False) as watcher:
                while not self._planned_tables.is_empty:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RECENTLY_PLANNED_S):
                            for instant in await self._timeline.read_next(watcher, _BATCH_INSTANTS_MAX):
                                if instant.kind is EntryKind.TABLE and instant.state is InstantState.COMPLETED:
                                    self._record_commit(instant.uuid, instant.namespace, instant.name)

    def _record_commit(self, uuid: str, namespace: NamespacePath, name: str) -> None:
        """Record a commit to a table, if the table was planned recently."""
        if self._planned_tables.get(uuid) is None:
            return
        self._waiting[uuid] = namespace, name
        self._commit_recorded.set()

    async def work(self) -> None:
        """Decode the manifests of tables with new commits into memory, one table after another.

        So the next plan of such a table need not read them. The method runs until its task is cancelled.
        """
        while True:
            uuid, wait_s = self._choose_next_table()
            if uuid is not None and wait_s <= 0:
                await self._prepare(uuid, *self._waiting.pop(uuid))
                continue
            self._commit_recorded.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if uuid is None else wait_s):
                    await self._commit_recorded.wait()

    def _choose_next_table(self) -> tuple[str | None, float]:
        """Return the UUID of the table whose preparation is due first, and the seconds until it is due.

        If several tables are due, the table that has waited longest is returned.
        """
        now_s, next_uuid, shortest_wait_s = self._clock.monotonic(), None, 0.0
        for uuid in list(self._waiting):
            planned_table = self._planned_tables.get(uuid)
            if planned_table is None:  # The table has not been planned recently.
                del self._waiting[uuid]
                continue
            wait_s = max(0.0, planned_table.due_s - now_s)
            if next_uuid is None or wait_s < shortest_wait_s:
                next_uuid, shortest_wait_s = uuid, wait_s
        return next_uuid, shortest_wait_s

    async def _prepare(self, uuid: str, namespace: NamespacePath, name: str) -> None:
        """Make the view of a table's current snapshot, unless the table was replaced or dropped.

        The next view of the table is made after a pause that is proportional to the time that this view took. An error
        is only logged.
        """
        planned_table, start_s = self._planned_tables.get(uuid), self._clock.monotonic()
        if planned_table is None:
            return
        try:
            entry = await self._store.load_entry(EntryKind.TABLE, namespace, name)
            if entry is None or entry.uuid != uuid:  # The table was dropped, renamed or replaced.
                return
            metadata = await self._load(entry.metadata_location)
            key = await self._planner.prepare(metadata, planned_table, entry, limit_bytes=self._limit_bytes)
        except SeamarkError as error:
            _log.debug("snapshot not prepared", namespace=namespace, table=name, reason=error.message)
            return
        if key is not None:
            now_s = self._clock.monotonic()
            self._planned_tables.note_prepared(uuid, planned_table, key, now_s + _PAUSE_FACTOR * (now_s - start_s))
