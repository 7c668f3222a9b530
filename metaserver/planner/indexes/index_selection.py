"""Selection and loading of the index files that a plan may use, before the plan prunes.

A plan waits at most `wait_s` for index files, and never fails because of an index. Index files that are not in memory
are fetched. If a file arrives too late, the next plan uses it. A plan that did not get an index file in time is marked
incomplete, so that it is not cached.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import structlog

from seamark.formats.iceberg.expressions.expression import join_by_and
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import NAME_MAPPING
from seamark.formats.index.definitions import PREFIX, Definitions, IndexDefinition, read_definitions
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.queries import Flags
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.index.files.indexes import DISK_S, Indexes, OpenIndex
from seamark.metaserver.index.files.registry import IndexFiles
from seamark.metaserver.index.files.remote import RANGES_MAX, RemoteIndexFile
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.planner.indexes.coverage import IndexFileRef, compute_coverages
from seamark.metaserver.planner.indexes.index_predicates import IndexProjection, project_onto_indexes
from seamark.metaserver.planner.indexes.probe import Probe
from seamark.metaserver.planner.scan.request import BoundScan
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.store.model import Entry, RegisteredIndexFile

T = TypeVar("T")

_CACHED_DEFINITIONS_MAX = 1000
"""The maximum number of tables and schemas whose definitions are cached."""

log = structlog.get_logger()


class _RemoteHits(NamedTuple):
    """The results of an index file that is read remotely: `hits` contains uint8[files], by predicate key."""

    remote: RemoteIndexFile
    hits: dict[object, Flags]


def _take_loaded_result(task: asyncio.Task[T | None]) -> T | None:
    """Return the result of a task that loads an index file, or None if the task is not done or has failed.

    An unexpected error is logged and does not fail the plan, which then does not use the index file.
    """
    if not task.done() or task.cancelled():
        return None
    error = task.exception()
    if error is not None:
        log.error("index file not used", exc_info=error)
        return None
    return task.result()


class IndexSelection:
    """Selects index files for plans.

    An instance belongs to one event loop. `wait_s` is the time that a plan waits for index files, in seconds.
    """

    def __init__(self, indexes: Indexes, usage: Usage, clock: Clock, *, wait_s: float) -> None:
        self._indexes = indexes
        self._usage = usage
        self._clock = clock
        self._wait_s = wait_s
        self._definitions: OrderedDict[tuple[object, ...], tuple[object, Definitions]] = OrderedDict()
        """The definitions, and the schemas from which they were read.

        The schemas are compared, because tables that are registered from the same metadata file share a UUID, but may
        evolve differently.
        """

    def list_definitions(self, metadata: TableMetadata, entry: Entry | None) -> tuple[IndexDefinition, ...]:
        """Return the definitions by which plans of the table may prune.

        These are the enabled definitions, except cubes. If the table has no index file, the result is empty.
        """
        if entry is None or entry.index_version == 0:
            return ()
        # Most commits do not change definitions, so the key contains only what the definitions depend on.
        texts = tuple(item for item in metadata.properties.items() if item[0].startswith(PREFIX))
        if not texts:
            return ()
        key = (metadata.table_uuid, metadata.current_schema_id, texts, metadata.properties.get(NAME_MAPPING))
        schemas_and_definitions = self._definitions.get(key)
        if schemas_and_definitions is None or schemas_and_definitions[0] != metadata.schemas:
            schemas_and_definitions = self._definitions[key] = (metadata.schemas, read_definitions(metadata))
            if len(self._definitions) > _CACHED_DEFINITIONS_MAX:
                self._definitions.popitem(last=False)
        definitions = schemas_and_definitions[1]
        return tuple(definition for definition in definitions.enabled if not KINDS[definition.kind].aggregates)

    async def prepare(
        self, view: TableView, bound_scan: BoundScan, definitions: Sequence[IndexDefinition], entry: Entry
    ) -> Probe | None:
        """Load the index files of a plan, and return its probe, or None if no index can prune.

        The probe leaves out the files in which no row matches the filter according to the indexes. Index files that are
        not loaded in time are not used.

        The method never raises.
        """
        projection = await self._project_filter(bound_scan, definitions)
        if projection is None:
            return None
        registered_files = await self._list_files(entry)
        if registered_files is None:
            return None
        listed_files = {
            definition.id: registered_files.list_live_files(definition.id) for definition in projection.definitions
        }
        files = [file for files_of_definition in listed_files.values() for file in files_of_definition]
        if not files:
            return None
        until_s = self._clock.monotonic() + self._wait_s
        open_indexes, remote_hits = await self._open_files(projection, files, until_s)
        usable: dict[str, IndexFileRef] = {
            **{location: hits.remote for location, hits in remote_hits.items()},
            **open_indexes,
        }
        usable_indexes = {
            definition_id: [usable[file.location] for file in files_of_definition if file.location in usable]
            for definition_id, files_of_definition in listed_files.items()
        }
        coverage = await compute_coverages(view, usable_indexes)
        hits_by_key: dict[object, dict[str, Flags]] = {}
        for location, hits_of_file in remote_hits.items():
            for key, hits in hits_of_file.hits.items():
                hits_by_key.setdefault(key, {})[location] = hits
        needs_more_files = any(file.location not in usable and not self._indexes.is_unsupported(file) for file in files)
        # Index files that are read by range cannot evaluate the keys of joins. A later plan, for which the whole index
        # files are in memory, can use these keys.
        joined_ids = {predicate.definition.id for predicate in projection.key_set_predicates}
        needs_more_files = needs_more_files or any(
            file.location in remote_hits and file.definition in joined_ids for file in files
        )
        remote_indexes = {location: hits.remote for location, hits in remote_hits.items()}
        return Probe(
            view, projection, coverage, open_indexes, hits_by_key, remote_indexes, files, until_s, needs_more_files
        )

    def record_and_verify(self, probe: Probe, entry: Entry) -> None:
        """Record the usage of indexes after a plan, and schedule a check of index files that the plan found damaged.

        Args:
            probe: The object that has left out files by the indexes, with its counts.
            entry: The entry of the table.
        """
        now_ms = self._clock.now_ms()
        for definition_id, (files_in, removed_files) in probe.counts.items():
            self._usage.note(entry.uuid, definition_id, files_in=files_in, files_removed=removed_files, now_ms=now_ms)
        for file in probe.listed_files:
            if file.location in probe.damaged:
                self._indexes.schedule_verification([file], probe.damaged[file.location])

    async def _project_filter(
        self, bound_scan: BoundScan, definitions: Sequence[IndexDefinition]
    ) -> IndexProjection | None:
        """Return the conditions that indexes evaluate, or None if there are none.

        A long scan has a long filter or dynamic filters. Its filters are projected in a thread, so that they do not
        block the event loop.
        """
        filter = join_by_and(bound_scan.bound, bound_scan.attribute_filter)
        if bound_scan.is_long:
            return await asyncio.to_thread(project_onto_indexes, filter, definitions, bound_scan.dynamic_filters)
        return project_onto_indexes(filter, definitions)

    async def _list_files(self, entry: Entry) -> IndexFiles | None:
        """Return the index files of the table, or None if the registry cannot list them."""
        try:
            return await self._indexes.registry.load_files(entry)
        except SeamarkError as error:
            log.warning("index files not listed", table=entry.name, reason=error.message)
            return None

    async def _open_files(
        self, projection: IndexProjection, files: Sequence[RegisteredIndexFile], until_s: float
    ) -> tuple[dict[str, OpenIndex], dict[str, _RemoteHits]]:
        """Return the opened index files, and the results of index files that were read remotely, both by location.

        Index files that do not arrive in time are missing from both results; their fetches continue.
        """
        open_indexes: dict[str, OpenIndex] = {}
        absent_files: list[RegisteredIndexFile] = []
        for file in files:
            opened_index = self._indexes.find_in_memory(file)
            if opened_index is None:
                absent_files.append(file)
            else:
                open_indexes[file.location] = opened_index
        if not absent_files:
            return open_indexes, {}
        large_files = [file for file in absent_files if self._indexes.supports_remote_reads(file)]
        # A large file that is not being fetched may be on the local disk, from which reading takes little time.
        may_be_on_disk = not all(self._indexes.is_being_fetched(file) for file in large_files)
        tasks = {file.location: self._indexes.fetch(file) for file in absent_files}
        if may_be_on_disk:
            await asyncio.wait(tasks.values(), timeout=min(DISK_S, self._wait_s))
        remote_reads = {
            file.location: asyncio.create_task(self._read_remotely(projection, file), name="read-index-remotely")
            for file in large_files
            if not tasks[file.location].done()
        }
        awaited_tasks = [task for location, task in tasks.items() if location not in remote_reads]
        await asyncio.wait(
            [*awaited_tasks, *remote_reads.values()], timeout=max(0.0, until_s - self._clock.monotonic())
        )
        remote_hits = {
            location: hits for location, task in remote_reads.items() if (hits := _take_loaded_result(task)) is not None
        }
        for task in remote_reads.values():
            task.cancel()
        if unanswered_tasks := [tasks[location] for location in remote_reads if location not in remote_hits]:
            await asyncio.wait(unanswered_tasks, timeout=max(0.0, until_s - self._clock.monotonic()))
        open_indexes |= {
            location: index for location, task in tasks.items() if (index := _take_loaded_result(task)) is not None
        }
        return open_indexes, {location: hits for location, hits in remote_hits.items() if location not in open_indexes}

    async def _read_remotely(self, projection: IndexProjection, file: RegisteredIndexFile) -> _RemoteHits | None:
        """Evaluate all predicates of the plan in a large index file, with range reads.

        Returns:
            None if the index file cannot evaluate all of the predicates, if these have too many values, or if the file
            cannot be read by range. The plan then needs the whole file.
        """
        predicates = projection.select_predicates(file.definition)
        values = sum(len(bound.values) for predicate in predicates for bound in predicate.predicates)
        if values > KINDS[file.kind].remote_values_max:
            return None
        queries = {predicate.key: query for predicate in predicates if (query := predicate.query()) is not None}

        async def probe_index(index: RemoteIndexFile) -> _RemoteHits | None:
            results = await asyncio.gather(*map(index.probe, queries.values()))
            hits: dict[object, Flags] = {
                key: result for key, result in zip(queries, results, strict=True) if result is not None
            }
            return _RemoteHits(index, hits) if len(hits) == len(queries) else None

        return await self._indexes.read_remotely(file, probe_index)

    async def load_rows(self, probe: Probe) -> bool:
        """Load the missing parts of bitmap indexes that a plan needs to compare rows, by range reads.

        Args:
            probe: The object that leaves out files by indexes. It knows the missing parts.

        Returns:
            True if some rows were loaded.
        """
        missing_files = {location: sorted(files) for location, files in probe.missing_rows.items()}
        if sum(map(len, missing_files.values())) > RANGES_MAX:
            return False
        tasks = [
            asyncio.create_task(
                self._indexes.read_remotely(
                    file, partial(_load_rows, probe.remote[file.location], missing_files[file.location])
                )
            )
            for file in probe.listed_files
            if file.location in missing_files
        ]
        await asyncio.wait(tasks, timeout=max(0.0, probe.until_s - self._clock.monotonic()))
        load_results = [_take_loaded_result(task) for task in tasks]
        for task in tasks:  # Tasks that are not done in time are no longer needed.
            task.cancel()
        return any(load_results)


async def _load_rows(index: RemoteIndexFile, files: Sequence[int], _: RemoteIndexFile) -> bool | None:
    return await index.bitmap.load_rows(files) or None


class IndexAccess(NamedTuple):
    """The indexes that a plan may use."""

    index_selection: IndexSelection
    definitions: tuple[IndexDefinition, ...]
    entry: Entry

    async def prepare(self, view: TableView, bound_scan: BoundScan) -> Probe | None:
        """Load the index files of the plan, and return the probe, or None if no index can leave out files.

        The probe leaves out the files in which no row matches the filter according to the indexes.
        """
        return await self.index_selection.prepare(view, bound_scan, self.definitions, self.entry)
