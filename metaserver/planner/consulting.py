"""What a plan may ask of a table's indexes, made ready before it prunes.

The rule it keeps: a plan never waits for an index longer than it was told to, and never fails for one. Index files that
are not in memory are fetched; those that come too late serve the next plan. What was not there, this plan did not use,
and it says so, so that it is not kept.

Which rows of a view an index file describes is found once, and kept as long as the view.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import structlog

from metaserver.clock import Clock
from metaserver.errors import SeamarkError
from metaserver.iceberg.metadata import TableMetadata
from metaserver.index.definitions import PREFIX, Definitions, IndexDefinition, read_definitions
from metaserver.index.indexes import Indexes, OpenIndex
from metaserver.index.registry import IndexFiles
from metaserver.index.usage import Usage
from metaserver.planner.coverage import file_ids_of
from metaserver.planner.indexed import Coverage, Probe, Projected, project
from metaserver.planner.request import Question
from metaserver.planner.view import TableView
from metaserver.store.port import Entry, IndexFile

_DEFINITIONS_KEPT = 1000

log = structlog.get_logger()


class Consulting:
    """Belongs to one event loop. `wait_s`: how long a plan waits for index files that have to be fetched."""

    def __init__(self, indexes: Indexes, usage: Usage, clock: Clock, *, wait_s: float) -> None:
        self._indexes = indexes
        self._usage = usage
        self._clock = clock
        self._wait_s = wait_s
        self._definitions: OrderedDict[tuple[object, ...], Definitions] = OrderedDict()
        self._coverage: WeakKeyDictionary[TableView, dict[str, tuple[tuple[str, ...], Coverage]]] = WeakKeyDictionary()
        self._fetching: set[asyncio.Task[OpenIndex | None]] = set()

    def definitions(self, metadata: TableMetadata, entry: Entry | None) -> tuple[IndexDefinition, ...]:
        """Those that plans of the table may use: enabled, where there is any index file at all."""
        if entry is None or entry.index_version == 0:
            return ()
        # Not by the metadata file's location: thousands of commits change nothing about definitions.
        texts = tuple(item for item in metadata.properties.items() if item[0].startswith(PREFIX))
        if not texts:
            return ()
        key = (metadata.table_uuid, metadata.current_schema_id, len(metadata.schemas), texts)
        found = self._definitions.get(key)
        if found is None:
            found = self._definitions[key] = read_definitions(metadata)
            if len(self._definitions) > _DEFINITIONS_KEPT:
                self._definitions.popitem(last=False)
        return found.enabled

    async def prepare(
        self, view: TableView, question: Question, definitions: Sequence[IndexDefinition], entry: Entry
    ) -> Probe | None:
        """None where no index can narrow anything. Never raises."""
        projected = await self._projected(question, definitions)
        if projected is None:
            return None
        listed = await self._listed(entry)
        if listed is None:
            return None
        wanted = {definition.id: listed.live(definition.id) for definition in projected.definitions}
        files = [file for some in wanted.values() for file in some]
        if not files:
            return None
        opened = await self._opened(files)
        coverage = await self._covered(view, wanted, opened)
        return Probe(view, projected, coverage, opened, complete=len(opened) == len(files))

    async def settle(self, probe: Probe, entry: Entry) -> None:
        """After a plan: counts what indexes were good for, and has those looked at that broke. Never raises."""
        now_ms = self._clock.now_ms()
        for definition_id, (asked, removed) in probe.asked.items():
            self._usage.note(entry.uuid, definition_id, files_in=asked, files_removed=removed, now_ms=now_ms)
        if probe.damaged:
            listed = await self._listed(entry)
            broken = [file for file in (listed.files if listed else ()) if file.location in probe.damaged]
            await self._indexes.suspect(broken, "; ".join(probe.damaged.values()))

    async def close(self) -> None:
        for task in self._fetching:
            task.cancel()
        await asyncio.gather(*self._fetching, return_exceptions=True)

    async def _projected(self, question: Question, definitions: Sequence[IndexDefinition]) -> Projected | None:
        if question.is_long:
            return await asyncio.to_thread(project, question.bound, definitions)
        return project(question.bound, definitions)

    async def _listed(self, entry: Entry) -> IndexFiles | None:
        try:
            return await self._indexes.registry.files(entry)
        except SeamarkError as error:
            log.warning("index files not listed", table=entry.name, reason=error.message)
            return None

    async def _opened(self, files: Sequence[IndexFile]) -> dict[str, OpenIndex]:
        """By location, those that are there in time; the others are on their way."""
        opened: dict[str, OpenIndex] = {}
        absent: list[IndexFile] = []
        for file in files:
            held = self._indexes.held(file)
            if held is None:
                absent.append(file)
            else:
                opened[file.location] = held
        if absent:
            tasks = [asyncio.create_task(self._indexes.open(file), name="index") for file in absent]
            self._fetching.update(tasks)
            for task in tasks:
                task.add_done_callback(self._fetching.discard)
            done, _ = await asyncio.wait(tasks, timeout=self._wait_s)
            found = [task.result() for task in done if not task.cancelled()]
            opened |= {one.location: one for one in found if one is not None}
        return opened

    async def _covered(
        self, view: TableView, wanted: Mapping[str, Sequence[IndexFile]], opened: Mapping[str, OpenIndex]
    ) -> dict[str, Coverage]:
        kept = self._coverage.setdefault(view, {})
        stale: dict[str, tuple[OpenIndex, ...]] = {}
        for definition_id, files in wanted.items():
            usable = tuple(opened[file.location] for file in files if file.location in opened)
            known = kept.get(definition_id)
            if known is None or known[0] != tuple(one.location for one in usable):
                stale[definition_id] = usable
        if stale:

            def cover() -> dict[str, Coverage]:
                ids = file_ids_of(view)
                return {definition_id: Coverage(ids, files) for definition_id, files in stale.items()}

            made = await asyncio.to_thread(cover)
            for definition_id, coverage in made.items():
                kept[definition_id] = (tuple(one.location for one in stale[definition_id]), coverage)
        return {definition_id: kept[definition_id][1] for definition_id in wanted}

    def added_bytes(self, view: TableView) -> int:
        """What is kept beside the view."""
        kept = self._coverage.get(view)
        return 0 if not kept else sum(coverage.size_bytes for _, coverage in kept.values())
