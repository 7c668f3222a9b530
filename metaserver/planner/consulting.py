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
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import structlog

from metaserver.clock import Clock
from metaserver.errors import SeamarkError
from metaserver.iceberg.expressions import Bound, predicates_of
from metaserver.iceberg.metadata import TableMetadata
from metaserver.index.cold import KEYS_MAX as COLD_KEYS_MAX
from metaserver.index.definitions import PREFIX, Definitions, IndexDefinition, read_definitions
from metaserver.index.index_file import FilesTable
from metaserver.index.indexes import Indexes, OpenIndex
from metaserver.index.registry import IndexFiles
from metaserver.index.usage import Usage
from metaserver.planner.coverage import file_ids_of
from metaserver.planner.indexed import Coverage, Described, Flags, Probe, Projected, bloom_hashes, project
from metaserver.planner.request import Question
from metaserver.planner.view import TableView
from metaserver.store.port import Entry, IndexFile

T = TypeVar("T")

_DEFINITIONS_KEPT = 1000

_DISK_S = 0.02
"""How long a large index file may take to come from the local disk before it is asked from afar."""

log = structlog.get_logger()


class _Asked(NamedTuple):
    """An index file that is not here, and what it said of predicates, uint8[files] each."""

    location: str
    files: FilesTable
    hits: tuple[tuple[Bound, Flags], ...]


def _result(task: asyncio.Task[T | None]) -> T | None:
    """None of a task that is not done. An error is nobody's damage but a fault of ours, and none of the plan's."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is not None:
        log.error("index file not used", exc_info=error)
        return None
    return task.result()


class Consulting:
    """Belongs to one event loop. `wait_s`: how long a plan waits for index files that have to be fetched."""

    def __init__(self, indexes: Indexes, usage: Usage, clock: Clock, *, wait_s: float) -> None:
        self._indexes = indexes
        self._usage = usage
        self._clock = clock
        self._wait_s = wait_s
        self._definitions: OrderedDict[tuple[object, ...], tuple[object, Definitions]] = OrderedDict()
        """With the schemas that they were read by: tables that were registered from one metadata file have one uuid,
        and may have gone different ways since."""
        self._coverage: WeakKeyDictionary[TableView, dict[str, tuple[tuple[str, ...], Coverage]]] = WeakKeyDictionary()
        self._fetching: dict[str, asyncio.Task[OpenIndex | None]] = {}
        """By location."""
        self._suspected: dict[str, asyncio.Task[None]] = {}
        """By location: looked at behind the plans that found them damaged."""

    def definitions(self, metadata: TableMetadata, entry: Entry | None) -> tuple[IndexDefinition, ...]:
        """Those that plans of the table may use: enabled, where there is any index file at all."""
        if entry is None or entry.index_version == 0:
            return ()
        # Not by the metadata file's location: thousands of commits change nothing about definitions.
        texts = tuple(item for item in metadata.properties.items() if item[0].startswith(PREFIX))
        if not texts:
            return ()
        key = (metadata.table_uuid, metadata.current_schema_id, texts)
        kept = self._definitions.get(key)
        if kept is None or kept[0] != metadata.schemas:
            kept = self._definitions[key] = (metadata.schemas, read_definitions(metadata))
            if len(self._definitions) > _DEFINITIONS_KEPT:
                self._definitions.popitem(last=False)
        return kept[1].enabled

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
        opened, asked = await self._opened(projected, files)
        coverage = await self._covered(view, wanted, {**asked, **opened})
        answers = {(location, predicate): hits for location, one in asked.items() for predicate, hits in one.hits}
        there = opened.keys() | asked.keys()
        late = any(file.location not in there and not self._indexes.is_beyond_us(file) for file in files)
        return Probe(view, projected, coverage, opened, answers, late)

    def settle(self, probe: Probe, entry: Entry) -> None:
        """After a plan: counts what indexes were good for, and has those looked at that broke, behind its back."""
        now_ms = self._clock.now_ms()
        for definition_id, (asked, removed) in probe.asked.items():
            self._usage.note(entry.uuid, definition_id, files_in=asked, files_removed=removed, now_ms=now_ms)
        for location, reason in probe.damaged.items():
            if location not in self._suspected:
                task = asyncio.create_task(self._suspect(entry, location, reason), name="suspect")
                self._suspected[location] = task
                task.add_done_callback(partial(self._looked_at, location))

    def _looked_at(self, location: str, _: asyncio.Task[None]) -> None:
        del self._suspected[location]

    async def _suspect(self, entry: Entry, location: str, reason: str) -> None:
        listed = await self._listed(entry)
        files = () if listed is None else listed.files
        await self._indexes.suspect([file for file in files if file.location == location], reason)

    async def close(self) -> None:
        tasks = [*self._fetching.values(), *self._suspected.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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

    async def _opened(
        self, projected: Projected, files: Sequence[IndexFile]
    ) -> tuple[dict[str, OpenIndex], dict[str, _Asked]]:
        """By location, those that are there in time, and those that were asked from afar; the others are on their
        way."""
        opened: dict[str, OpenIndex] = {}
        absent: list[IndexFile] = []
        for file in files:
            held = self._indexes.held(file)
            if held is None:
                absent.append(file)
            else:
                opened[file.location] = held
        if not absent:
            return opened, {}
        until_s = self._clock.monotonic() + self._wait_s
        large = [file for file in absent if self._indexes.has_cold_door(file)]
        fresh = any(file.location not in self._fetching for file in large)
        tasks = {file.location: self._fetch(file) for file in absent}
        if fresh:  # the local disk may have them, which takes no time
            await asyncio.wait(tasks.values(), timeout=min(_DISK_S, self._wait_s))
        asking = {
            file.location: asyncio.create_task(self._ask(projected, file), name="ask-index")
            for file in large
            if not tasks[file.location].done()
        }
        awaited = [task for location, task in tasks.items() if location not in asking]
        await asyncio.wait([*awaited, *asking.values()], timeout=max(0.0, until_s - self._clock.monotonic()))
        asked = {location: said for location, task in asking.items() if (said := _result(task)) is not None}
        for task in asking.values():
            task.cancel()
        opened |= {location: found for location, task in tasks.items() if (found := _result(task)) is not None}
        return opened, {location: one for location, one in asked.items() if location not in opened}

    async def _ask(self, projected: Projected, file: IndexFile) -> _Asked | None:
        """What a large bloom index says of all that it is asked in this plan; None where not all is said."""
        questions = [
            (predicate, definition)
            for predicate in dict.fromkeys(predicates_of(projected.expression))
            if (definition := projected.by_field[predicate.column_id]).id == file.definition
        ]
        if sum(len(predicate.values) for predicate, _ in questions) > COLD_KEYS_MAX:
            return None
        cold = await self._indexes.open_cold(file)
        if cold is None:
            return None
        hits: list[tuple[Bound, Flags]] = []
        for predicate, definition in questions:
            hashes = bloom_hashes(predicate, definition)
            if hashes is None:
                continue
            found = await self._indexes.probe_cold(cold, hashes)
            if found is None:
                return None
            hits.append((predicate, found))
        return _Asked(cold.location, cold.files, tuple(hits))

    def _fetch(self, file: IndexFile) -> asyncio.Task[OpenIndex | None]:
        """One at a time of each, whoever waits for it, and for however long."""
        task = self._fetching.get(file.location)
        if task is None:
            task = self._fetching[file.location] = asyncio.create_task(self._indexes.open(file), name="index")
            task.add_done_callback(lambda _: self._fetching.pop(file.location))
        return task

    async def _covered(
        self, view: TableView, wanted: Mapping[str, Sequence[IndexFile]], opened: Mapping[str, Described]
    ) -> dict[str, Coverage]:
        kept = self._coverage.setdefault(view, {})
        found: dict[str, Coverage] = {}
        stale: dict[str, tuple[Described, ...]] = {}
        for definition_id, files in wanted.items():
            usable = tuple(opened[file.location] for file in files if file.location in opened)
            known = kept.get(definition_id)
            if known is not None and known[0] == tuple(one.location for one in usable):
                found[definition_id] = known[1]
            else:
                stale[definition_id] = usable
        if stale:

            def cover() -> dict[str, Coverage]:
                ids = file_ids_of(view)
                return {definition_id: Coverage(ids, files) for definition_id, files in stale.items()}

            for definition_id, coverage in (await asyncio.to_thread(cover)).items():
                found[definition_id] = coverage
                kept[definition_id] = (tuple(one.location for one in stale[definition_id]), coverage)
        return found

    def added_bytes(self, view: TableView) -> int:
        """What is kept beside the view."""
        kept = self._coverage.get(view)
        if not kept:
            return 0
        return file_ids_of(view).size_bytes + sum(coverage.size_bytes for _, coverage in kept.values())
