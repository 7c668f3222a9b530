"""What a plan may ask of a table's indexes, made ready before it prunes.

The rule it keeps: a plan never waits for an index longer than it was told to, and never fails for one. Index files that
are not in memory are fetched; those that come too late serve the next plan. What was not there, this plan did not use,
and it says so, so that it is not kept.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import structlog

from metaserver.clock import Clock
from metaserver.errors import SeamarkError
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.index.files.definitions import PREFIX, Definitions, IndexDefinition, read_definitions
from metaserver.index.files.indexes import DISK_S, Indexes, OpenIndex
from metaserver.index.files.registry import IndexFiles
from metaserver.index.files.remote import RANGES_MAX, ColdIndex
from metaserver.index.files.usage import Usage
from metaserver.index.kinds.kinds import KINDS
from metaserver.index.kinds.questions import Flags
from metaserver.planner.indexes.coverage import IndexFileRef, coverages
from metaserver.planner.indexes.index_predicates import IndexProjection, project
from metaserver.planner.indexes.probe import Probe
from metaserver.planner.scan.request import BoundScan
from metaserver.planner.view.view import TableView
from metaserver.store.port import Entry, RegisteredIndexFile

T = TypeVar("T")

_DEFINITIONS_KEPT = 1000

log = structlog.get_logger()


class _Answer(NamedTuple):
    """Of an index file that is not here: what it said, uint8[files], by what was asked."""

    cold: ColdIndex
    hits: dict[object, Flags]


def _result(task: asyncio.Task[T | None]) -> T | None:
    """None of a task that is not done. An error is nobody's damage but a fault of ours, and none of the plan's."""
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is not None:
        log.error("index file not used", exc_info=error)
        return None
    return task.result()


class IndexSelection:
    """Belongs to one event loop. `wait_s`: how long a plan waits for index files that have to be fetched."""

    def __init__(self, indexes: Indexes, usage: Usage, clock: Clock, *, wait_s: float) -> None:
        self._indexes = indexes
        self._usage = usage
        self._clock = clock
        self._wait_s = wait_s
        self._definitions: OrderedDict[tuple[object, ...], tuple[object, Definitions]] = OrderedDict()
        """With the schemas that they were read by: tables that were registered from one metadata file have one uuid,
        and may have gone different ways since."""

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
        self, view: TableView, question: BoundScan, definitions: Sequence[IndexDefinition], entry: Entry
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
        until_s = self._clock.monotonic() + self._wait_s
        opened, asked = await self._opened(projected, files, until_s)
        usable: dict[str, IndexFileRef] = {**{location: one.cold for location, one in asked.items()}, **opened}
        described = {
            definition_id: [usable[file.location] for file in some if file.location in usable]
            for definition_id, some in wanted.items()
        }
        coverage = await coverages(view, described)
        answers: dict[object, dict[str, Flags]] = {}
        for location, one in asked.items():
            for key, hits in one.hits.items():
                answers.setdefault(key, {})[location] = hits
        late = any(file.location not in usable and not self._indexes.is_beyond_us(file) for file in files)
        # Of index files that are asked from afar, none is asked for the keys of joins: once they are here, they are.
        by_keys = {demand.definition.id for demand in projected.demands}
        late = late or any(file.location in asked and file.definition in by_keys for file in files)
        afar = {location: one.cold for location, one in asked.items()}
        return Probe(view, projected, coverage, opened, answers, afar, files, until_s, late)

    def settle(self, probe: Probe, entry: Entry) -> None:
        """After a plan: counts what indexes were good for, and has those looked at that broke, behind its back."""
        now_ms = self._clock.now_ms()
        for definition_id, (asked, removed) in probe.asked.items():
            self._usage.note(entry.uuid, definition_id, files_in=asked, files_removed=removed, now_ms=now_ms)
        for file in probe.listed:
            if file.location in probe.damaged:
                self._indexes.suspect_soon([file], probe.damaged[file.location])

    async def _projected(self, question: BoundScan, definitions: Sequence[IndexDefinition]) -> IndexProjection | None:
        if question.is_long:
            return await asyncio.to_thread(project, question.bound, definitions, question.dynamic_filters)
        return project(question.bound, definitions)

    async def _listed(self, entry: Entry) -> IndexFiles | None:
        try:
            return await self._indexes.registry.files(entry)
        except SeamarkError as error:
            log.warning("index files not listed", table=entry.name, reason=error.message)
            return None

    async def _opened(
        self, projected: IndexProjection, files: Sequence[RegisteredIndexFile], until_s: float
    ) -> tuple[dict[str, OpenIndex], dict[str, _Answer]]:
        """By location, those that are there in time, and those that were asked from afar; the others are on their
        way."""
        opened: dict[str, OpenIndex] = {}
        absent: list[RegisteredIndexFile] = []
        for file in files:
            held = self._indexes.held(file)
            if held is None:
                absent.append(file)
            else:
                opened[file.location] = held
        if not absent:
            return opened, {}
        large = [file for file in absent if self._indexes.has_cold_door(file)]
        fresh = not all(self._indexes.is_coming(file) for file in large)
        tasks = {file.location: self._indexes.fetch(file) for file in absent}
        if fresh:  # the local disk may have them, which takes no time
            await asyncio.wait(tasks.values(), timeout=min(DISK_S, self._wait_s))
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
        if unsaid := [tasks[location] for location in asking if location not in asked]:
            await asyncio.wait(unsaid, timeout=max(0.0, until_s - self._clock.monotonic()))
        opened |= {location: found for location, task in tasks.items() if (found := _result(task)) is not None}
        return opened, {location: one for location, one in asked.items() if location not in opened}

    async def _ask(self, projected: IndexProjection, file: RegisteredIndexFile) -> _Answer | None:
        """What a large index file says of all that it is asked in this plan; None where not all is said."""
        asked = projected.asked_of(file.definition)
        values = sum(len(predicate.values) for one in asked for predicate in one.predicates)
        if values > KINDS[file.kind].remote_values_max:
            return None
        questions = {one.key: question for one in asked if (question := one.question()) is not None}

        async def ask(cold: ColdIndex) -> _Answer | None:
            found = await asyncio.gather(*map(cold.ask, questions.values()))
            hits: dict[object, Flags] = {key: one for key, one in zip(questions, found, strict=True) if one is not None}
            return _Answer(cold, hits) if len(hits) == len(questions) else None

        return await self._indexes.by_range(file, ask)

    async def load_rows(self, probe: Probe) -> bool:
        """Whether there is more to tell now of the rows of files that a plan wanted to know of, in bitmap indexes that
        are not here."""
        wanted = {location: sorted(files) for location, files in probe.wanted.items()}
        if sum(map(len, wanted.values())) > RANGES_MAX:
            return False
        tasks = [
            asyncio.create_task(
                self._indexes.by_range(file, partial(_load_rows, probe.afar[file.location], wanted[file.location]))
            )
            for file in probe.listed
            if file.location in wanted
        ]
        await asyncio.wait(tasks, timeout=max(0.0, probe.until_s - self._clock.monotonic()))
        loaded = [_result(task) for task in tasks]
        for task in tasks:
            task.cancel()
        return any(loaded)


async def _load_rows(afar: ColdIndex, files: Sequence[int], _: ColdIndex) -> bool | None:
    return await afar.bitmap.load_rows(files) or None
