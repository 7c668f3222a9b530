"""The planner. It finds the files that can contain a matching row, from a table's metadata and a filter.

A plan depends only on immutable inputs (manifest list, filter, schema), so plans are cached with the view of their
snapshot and evicted with it. A view references its blocks. When the memory of live blocks, views and plans exceeds the
budget, the least recently used view is evicted. No other object references a block for longer than one request.
Concurrent requests for the same view or plan share one computation.

A plan has a time budget, which is checked between predicates. Files that are not checked in time are kept.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from seamark.cache.memory import MemoryCache
from seamark.cache.opening import open_stack
from seamark.cache.single_flight import SingleFlight
from seamark.cache.stack import Stack
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import NAME_MAPPING
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CacheDamaged
from seamark.metaserver.access.principal import set_principal
from seamark.metaserver.catalog.ownership.own_files import ALLOWED_LOCATIONS
from seamark.metaserver.catalog.pointers import get_uuid, table_uuid
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.blocks import Blocks
from seamark.metaserver.index.blocks.decoding import Decoders
from seamark.metaserver.index.files.indexes import Indexes
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.indexes.index_selection import IndexAccess, IndexSelection
from seamark.metaserver.planner.plan.cached_views import CachedView, CachedViews, PlannedTable, PlannedTables
from seamark.metaserver.planner.plan.location_checks import LocationChecker
from seamark.metaserver.planner.plan.manifest_lists import (
    ManifestLists,
    count_entries,
    count_live_entries,
    list_locations,
)
from seamark.metaserver.planner.plan.stages import run_stages
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest, ViewKey
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry

T = TypeVar("T")

log = structlog.get_logger()

_IN_LOOP_FILES_MAX = 100_000
"""The maximum number of files in a view that is pruned in the event loop. Larger views are pruned in a thread."""
_MANIFESTS_IN_FLIGHT_PER_THREAD = 16
"""The maximum number of manifests that are read or decoded concurrently, for each decoding thread."""
_QUICK_COMPARISONS_MAX = 2_500_000
"""The maximum number of comparisons (rows times literals) of a quick plan.

A comparison takes about a nanosecond.
"""
_PARTIAL_VIEW_MAX_FRACTION = 0.5
"""The maximum share of manifests that a plan loads alone. If it needs more, it loads all, for later plans."""
_LISTS_BUDGET_DIVISOR = 64
"""Manifest lists use at most 1/64 of the planner's memory."""
_DECODED_BYTES_PER_BYTE = 8
"""The expected memory of a decoded manifest, in bytes per byte of the file."""
_PENDING_BYTES_MIN = 256 << 20
"""The minimum of the limit for the bytes of blocks that wait until they are written to the local disk."""
_EXPRESSION_BYTES_PER_CHARACTER = 8
"""The memory of a bound filter and its text, in bytes for each character of the text."""


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """The memory that the planner uses, and the numbers of its plans.

    Attributes:
        live_bytes: The memory of blocks, including mapped files.
        added_bytes: The memory of views and plans, without their blocks.
        lists_bytes: The memory of manifest lists.
        decoded: The number of decoded manifests since the start.
        plans: The number of plans since the start, including plans from the cache.
        plan_hits: The number of plans from the cache.
        prepared: The number of views that were made in advance.
    """

    views: int
    blocks: int
    live_bytes: int
    added_bytes: int
    lists_bytes: int
    budget_bytes: int
    decoded: int
    plans: int
    plan_hits: int
    prepared: int


class Planner:
    """Plans scans, with caches of views and plans.

    An instance belongs to one event loop.
    """

    def __init__(
        self,
        blocks: Blocks,
        clock: Clock,
        *,
        budget_bytes: int,
        time_budget_s: float,
        index_selection: IndexSelection | None = None,
        location_checker: LocationChecker | None = None,
    ) -> None:
        """Create the planner.

        If `index_selection` is None, no index is used. If `location_checker` is None, a table may name any file.
        """
        self._location_checker = location_checker
        self._blocks = blocks
        self._index_selection = index_selection
        self._clock = clock
        self._time_budget_s = time_budget_s
        self._budget_bytes = budget_bytes
        lists_bytes = budget_bytes // _LISTS_BUDGET_DIVISOR
        self._views = CachedViews(blocks, budget_bytes - lists_bytes)
        self._loads: SingleFlight[ViewKey, CachedView] = SingleFlight()
        self._plan_runs: SingleFlight[tuple[object, ...], ScanPlan] = SingleFlight()
        self._lists = ManifestLists(blocks, lists_bytes)
        self.planned = PlannedTables(clock)
        self._plans = self._plan_hits = self._prepared_views = 0

    async def bind_and_plan(
        self, metadata: TableMetadata, request: ScanRequest, entry: Entry | None = None
    ) -> ScanPlan:
        """Bind a request to its snapshot and plan it.

        Args:
            metadata: The metadata of the table.
            request: The request.
            entry: The table's entry in the catalog. If it is None, no index is used.

        Raises:
            BadRequest: The filter or the snapshot id is invalid.
            Corrupt: A file of the table is damaged.
            Forbidden: The snapshot names files in a location that another table claims.
        """
        return await self.plan(BoundScan.bind(metadata, request), entry)

    async def plan(self, bound_scan: BoundScan, entry: Entry | None = None) -> ScanPlan:
        """Plan a bound scan.

        Raises:
            Corrupt: A file of the table is damaged.
            Forbidden: The snapshot names files in a location that another table claims.
        """
        return await self._repeat_if_damaged(partial(self._plan, bound_scan, entry))

    async def _repeat_if_damaged(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `work`. If `work` finds damaged blocks, remove them and run it again."""
        if self._blocks.has_damaged:  # An answer or a lookup has found damage since the last plan.
            await self._remove_damaged()
        try:
            return await work()
        except CacheDamaged as error:
            log.warning("cached_block_damaged", error=error.message)
        if self._blocks.has_damaged:
            await self._remove_damaged()
        return await work()  # A second failure is reported to the client.

    async def _remove_damaged(self) -> None:
        """Remove damaged blocks and the views that contain them.

        All blocks of these views are verified. A disk that has damaged one file has often damaged more files, and each
        of them would make a later plan fail.
        """
        views = self._views.find_containing_views(self._blocks.find_damaged())
        suspects = [block for _, view in views for block in (*view.blocks, *view.delete_blocks)]
        await asyncio.to_thread(_verify_all, suspects)
        for key, _ in self._views.find_containing_views(self._blocks.find_damaged()):
            self._views.evict(key)
        await self._blocks.remove_damaged()

    async def _plan(self, bound_scan: BoundScan, entry: Entry | None) -> ScanPlan:
        """Return the cached plan of a scan, or make a new plan."""
        metadata, options = bound_scan.metadata, bound_scan.options
        cached_view = await self._load_checked_view(bound_scan, entry)
        is_current = bound_scan.snapshot_id == metadata.current_snapshot_id and not options.is_incremental
        if entry is not None and is_current and bound_scan.view_key in self._views:
            self.planned.note(entry.uuid, bound_scan.view_key)
        # The answer formats partitions and columns by the current schema, and data files are read with the scan's
        # name mapping. So both are part of the key.
        schemas = (bound_scan.schema.id, metadata.current_schema_id, metadata.properties.get(NAME_MAPPING))
        index_access = self._open_index_access(bound_scan, entry)
        key: tuple[object, ...] = (
            bound_scan.text,
            *schemas,
            options.start_snapshot_id,
            options.end_snapshot_id,
            options.may_delete_files,
        )
        if index_access is not None:
            key = (
                *key,
                index_access.entry.uuid,
                index_access.entry.index_version,
                *(definition.id for definition in index_access.definitions),
            )
        self._plans += 1
        cached_plan = cached_view.plans.get(key)
        if cached_plan is not None and _has_same_schemas(cached_plan, metadata):
            self._plan_hits += 1
            return cached_plan
        try:
            # A quick plan completes before another request can join it.
            if index_access is None and _is_quick(cached_view.view, bound_scan):
                scan = run_stages(cached_view, bound_scan, self._make_deadline(), self._clock)
            else:
                scan = await self._plan_runs.run(
                    (id(cached_view), *key), lambda: self._make_plan(cached_view, bound_scan, index_access)
                )
            if scan.complete:
                cached_view.plans.put(
                    key, scan, scan.size_bytes + _EXPRESSION_BYTES_PER_CHARACTER * len(bound_scan.text)
                )
            return scan
        finally:
            self._views.charge(cached_view)
            self._views.evict_over_budget(cached_view)

    def _open_index_access(self, bound_scan: BoundScan, entry: Entry | None) -> IndexAccess | None:
        """Return the access to the table's indexes, or None if the table has no index or the plan has no filter."""
        if (
            entry is None
            or self._index_selection is None
            or (bound_scan.bound == bound_scan.attribute_filter == TRUE and not bound_scan.dynamic_filters)
        ):
            return None
        definitions = self._index_selection.list_definitions(bound_scan.metadata, entry)
        return IndexAccess(self._index_selection, definitions, entry) if definitions else None

    async def _make_plan(
        self,
        cached_view: CachedView,
        bound_scan: BoundScan,
        index_access: IndexAccess | None,
        *,
        loaded_us: int | None = None,
    ) -> ScanPlan:
        """Make a new plan.

        Args:
            cached_view: The view, with its cached plans.
            bound_scan: The scan.
            index_access: The indexes that the plan may use.
            loaded_us: The time that loading the manifests took, in microseconds. If it is not None, the stages count
                files and bytes.
        """
        probe = None if index_access is None else await index_access.prepare(cached_view.view, bound_scan)

        def plan() -> ScanPlan:
            return run_stages(
                cached_view, bound_scan, self._make_deadline(), self._clock, probe=probe, loaded_us=loaded_us
            )

        is_quick = _is_quick(cached_view.view, bound_scan) and (probe is None or not probe.can_prune_by_row)
        scan = plan() if is_quick else await asyncio.to_thread(plan)
        if index_access is not None and probe is not None:
            # The first run notes which rows of large bitmap indexes it needs. Load them, and run once more.
            if probe.missing_rows and await index_access.index_selection.load_rows(probe):
                probe.reset_counts()
                scan = await asyncio.to_thread(plan)
            index_access.index_selection.record_and_verify(probe, index_access.entry)
        return scan

    async def covers(
        self, bound_scan: BoundScan, definitions: Sequence[IndexDefinition], entry: Entry | None = None
    ) -> bool:
        """Return whether each of the indexes evaluates the filter for all data files of the scan.

        The result is False if the table has no entry or no index files, or if the indexes take too much time.

        Raises:
            Corrupt: A file of the table is damaged.
            Forbidden: The snapshot names files in a location that another table claims.
        """
        index_selection = self._index_selection
        if index_selection is None or entry is None or entry.index_version == 0:
            return False
        cached_view = await self._repeat_if_damaged(partial(self._load_checked_view, bound_scan, entry))
        self._views.evict_over_budget(cached_view)
        probe = await index_selection.prepare(cached_view.view, bound_scan, definitions, entry)
        return probe is not None and not probe.is_late and all(map(probe.covers_all_files, definitions))

    async def view(self, metadata: TableMetadata, request: ScanRequest) -> TableView:
        """Load the view of a snapshot: all its files, without pruning. The filter of the request is ignored."""
        bound_scan = BoundScan.bind(metadata, request)
        cached_view = await self._repeat_if_damaged(partial(self._load_checked_view, bound_scan, None, whole=True))
        self._views.evict_over_budget(cached_view)
        return cached_view.view

    async def explain(self, bound_scan: BoundScan, entry: Entry | None = None) -> ScanPlan:
        """Plan like `plan`, but without the plan cache, and count files and bytes in each stage."""
        return await self._repeat_if_damaged(partial(self._explain_scan, bound_scan, entry))

    async def _explain_scan(self, bound_scan: BoundScan, entry: Entry | None) -> ScanPlan:
        """Make a plan that is not cached, and count files and bytes in each stage."""
        start_s = self._clock.monotonic()
        # The counts include files of manifests that the filter does not need.
        cached_view = await self._load_checked_view(bound_scan, entry, whole=True)
        loaded_us = int((self._clock.monotonic() - start_s) * 1e6)
        scan = await self._make_plan(
            cached_view, bound_scan, self._open_index_access(bound_scan, entry), loaded_us=loaded_us
        )
        self._views.evict_over_budget(cached_view)
        return scan

    async def prepare(
        self, metadata: TableMetadata, planned_table: PlannedTable, entry: Entry | None = None, *, limit_bytes: int
    ) -> ViewKey | None:
        """Make the view of the current snapshot before a plan needs it. A view is the decoded manifests in memory.

        The view gets the same columns as the view of `planned_table`. If no plan has used the previously prepared view,
        the new view replaces it.

        Returns:
            The key of the view. None if the table has no snapshot, if the view already exists, if the view of
            `planned_table` is no longer in memory, or if the missing manifests have an unknown length, have more than
            `limit_bytes` or do not fit the budget.

        Raises:
            Corrupt: A file of the table is damaged.
            Forbidden: The snapshot names files in a location that another table claims.
        """
        bound_scan = BoundScan.bind(metadata, ScanRequest())
        key, previous = bound_scan.view_key, self._views.peek(planned_table.key)
        if previous is None or bound_scan.snapshot is None or key in self._views:
            return None
        await self.check_paths(metadata, get_uuid(entry, metadata), list_locations(bound_scan))
        missing_manifests = self._blocks.list_missing((await self._lists.read_manifests(bound_scan)).all)
        sizes = [manifest.manifest_length for manifest in missing_manifests]
        # In version 1 metadata, the length of a manifest may be missing.
        if sum(sizes) > limit_bytes or 0 in sizes:
            return None
        if _DECODED_BYTES_PER_BYTE * sum(sizes) + previous.added_bytes > self._views.room_bytes:
            return None

        async def make() -> CachedView:
            cached_view = await self._load_checked_view(bound_scan, entry, whole=True)
            await asyncio.to_thread(cached_view.view.compute_columns_like, previous.view)
            return cached_view

        # The memory of the new view counts towards the limit of the principal whose plan made the previous view.
        with set_principal(previous.holder):
            cached_view = await self._repeat_if_damaged(make)
        self._prepared_views += 1
        if planned_table.prepared:
            self._views.evict(planned_table.key)
        self._views.charge(cached_view)
        self._views.evict_over_budget(cached_view)
        return key

    async def estimate_entries_to_decode(self, bound_scan: BoundScan, entry: Entry | None = None) -> int:
        """Estimate how many manifest entries must be decoded before the plan can begin.

        The number is 0 if all entries are in memory.

        Raises:
            Corrupt: A file of the table is damaged.
            Forbidden: The snapshot names files in a location that another table claims.
        """
        if bound_scan.view_key in self._views:
            return 0
        metadata = bound_scan.metadata
        await self.check_paths(metadata, get_uuid(entry, metadata), list_locations(bound_scan))
        manifests = await self._lists.read_manifests(bound_scan)
        selected_manifests = [
            *manifests.deletes,
            *(manifests.data[number] for number in await manifests.select(bound_scan)),
        ]
        return sum(count_entries(manifest) for manifest in self._blocks.list_missing(selected_manifests))

    def read_stats(self) -> PlannerStats:
        """Return the memory that the planner uses, and the numbers of its plans."""
        return PlannerStats(
            views=len(self._views),
            blocks=self._blocks.live_blocks,
            live_bytes=self._blocks.live_bytes,
            added_bytes=self._views.added_bytes,
            lists_bytes=self._lists.used_bytes,
            budget_bytes=self._budget_bytes,
            decoded=self._blocks.decoded,
            plans=self._plans,
            plan_hits=self._plan_hits,
            prepared=self._prepared_views,
        )

    async def check_paths(self, metadata: TableMetadata, uuid: str, paths: Sequence[str]) -> None:
        """Check the locations of manifests and manifest lists.

        Raises:
            Forbidden: A path is in a location that another table claims.
        """
        if self._location_checker is not None:
            await self._location_checker.check_paths(uuid, metadata, paths)

    async def _load_checked_view(
        self, bound_scan: BoundScan, entry: Entry | None, *, whole: bool = False
    ) -> CachedView:
        """Return the view from the cache or load it, and check the locations of its files.

        Manifest lists and manifests are checked before they are read, and data files afterwards. A view remembers for
        which table and allowed locations it was checked.

        Args:
            bound_scan: The scan whose snapshot the view shows.
            entry: The catalog entry of the table. None if the table has no entry.
            whole: Whether to load all manifests of the snapshot, or only those that the scan's filter needs.

        Raises:
            Forbidden: The snapshot names files in a location that another table claims.
        """
        cached_view = self._views.get(bound_scan.view_key)
        if self._location_checker is None or bound_scan.snapshot is None:
            return await self._load_view(bound_scan, whole=whole) if cached_view is None else cached_view
        metadata, lists = bound_scan.metadata, list_locations(bound_scan)
        uuid = entry.uuid if entry is not None else table_uuid(metadata)
        if cached_view is None:
            check_paths = partial(self._location_checker.check_paths, uuid, metadata)
            await check_paths(lists)
            cached_view = await self._load_view(bound_scan, whole=whole, check_paths=check_paths)
        key = (uuid, metadata.location, metadata.properties.get(ALLOWED_LOCATIONS, ""))
        if key not in cached_view.checked:  # All tables with the same manifest lists share the cached view.
            await self._location_checker.check(uuid, metadata, lists, cached_view.view)
            cached_view.checked.add(key)
        return cached_view

    async def _load_view(
        self,
        bound_scan: BoundScan,
        *,
        whole: bool = False,
        check_paths: Callable[[Iterable[str]], Awaitable[object]] | None = None,
    ) -> CachedView:
        """Load the snapshot's view, which is not in memory.

        Args:
            bound_scan: The scan.
            whole: Whether the view has all manifests. If it is False, the view may have only those the filter needs.
            check_paths: A function that checks the paths of the manifests before they are read. If a manifest in
                another table's location were read first, the error would reveal whether it exists, and its length.
        """
        metadata = bound_scan.metadata
        key = bound_scan.view_key
        manifests = await self._lists.read_manifests(bound_scan)
        data = manifests.data
        ordinals = list(range(len(data)))
        if not whole:
            needed_ordinals = await manifests.select(bound_scan)
            if len(needed_ordinals) <= len(data) * _PARTIAL_VIEW_MAX_FRACTION:
                ordinals = needed_ordinals
                key = (*key, "part", *map(str, ordinals))
        for made_key in (bound_scan.view_key, key):  # Another request may have made the view.
            cached_view = self._views.get(made_key)
            if cached_view is not None:
                return cached_view
        selected_manifests = [data[ordinal] for ordinal in ordinals]
        deletes = manifests.deletes
        if check_paths is not None:
            # Concurrent requests of several tables may share one load, so each request checks the paths for its table.
            await check_paths([manifest.manifest_path for manifest in (*selected_manifests, *deletes)])

        async def load() -> CachedView:
            shared_blocks = self._views.find_shared_blocks(selected_manifests)
            missing_manifests = [
                manifest for manifest, block in zip(selected_manifests, shared_blocks, strict=True) if block is None
            ]
            loaded_blocks = await self._blocks.load([*missing_manifests, *deletes])
            next_blocks = iter(loaded_blocks)
            blocks = [next(next_blocks) if block is None else block for block in shared_blocks]
            delete_blocks = loaded_blocks[len(missing_manifests) :]
            # Verify all delete blocks first, because the delete index reads them.
            if deletes and not await asyncio.to_thread(_verify_all, delete_blocks):
                raise CacheDamaged("The local copy of a delete manifest is damaged; repeat the request")
            base = self._views.find_view_with_shared_edge(blocks)
            view = TableView(selected_manifests, blocks, deletes, delete_blocks, ordinals=ordinals, base=base)
            index = await self._run(view, lambda: DeleteIndex(view, metadata.partition_specs, metadata.schemas))
            omitted_ordinals = set(range(len(data))).difference(ordinals)
            files = view.file_count + sum(count_live_entries(data[ordinal]) for ordinal in omitted_ordinals)
            new_view = CachedView(view, index, files, self._views.plans_bytes)
            self._views.put(key, new_view)
            return new_view

        return await self._loads.run(key, load)

    async def _run(self, view: TableView, work: Callable[[], T]) -> T:
        """Run work on a view in a thread, unless the work is quick because the view is small or has no deletes."""
        if _is_small(view) or not view.delete_file_count:
            return work()
        # Do not use the decoders' pool: loading one table must not delay planning on another table.
        return await asyncio.to_thread(work)

    def _make_deadline(self) -> Callable[[], bool]:
        """Return a function that says whether the time budget of a plan, which begins now, is exhausted."""
        monotonic = self._clock.monotonic
        until_s = monotonic() + self._time_budget_s
        return lambda: monotonic() >= until_s

    def check_invariants(self) -> None:
        """Check, for tests, that the counted memory is correct."""
        self._views.check_invariants()


def _verify_all(blocks: Sequence[Block]) -> bool:
    """Verify each block, and return whether all are valid."""
    are_valid = [block.is_valid() for block in blocks]  # A generator would stop at the first invalid block.
    return all(are_valid)


def _is_small(view: TableView) -> bool:
    return view.file_count + view.delete_file_count <= _IN_LOOP_FILES_MAX


def _is_quick(view: TableView, bound_scan: BoundScan) -> bool:
    """Return whether a plan takes so little time that it is made in the event loop, without a thread."""
    if bound_scan.is_long:
        return False
    comparisons = 0
    for predicate in bound_scan.predicates:
        column = view.find_cheap_stats(predicate.column_id, predicate.kind)
        if column is None and not _is_small(view):
            return False  # The statistics of the column are not assembled yet.
        comparisons += (view.file_count if column is None else column.rows_read) * max(1, len(predicate.values))
    return comparisons <= _QUICK_COMPARISONS_MAX


def _has_same_schemas(cached_plan: ScanPlan, metadata: TableMetadata) -> bool:
    """Return whether a cached plan was made with the same schemas and specs.

    Two tables that were registered from one metadata file share snapshots and cached plans. Their schemas and specs
    may change differently afterwards.
    """
    plan_metadata = cached_plan.metadata
    return plan_metadata.schemas == metadata.schemas and plan_metadata.partition_specs == metadata.partition_specs


@asynccontextmanager
async def open_planner(
    settings: Settings,
    objects: ObjectStore,
    clock: Clock,
    *,
    stored_objects: ObjectStore | None = None,
    indexes: Indexes | None = None,
    usage: Usage | None = None,
    location_checker: LocationChecker | None = None,
) -> AsyncIterator[Planner]:
    """Open the planner with its decoding threads and its folder on the local disk.

    Args:
        settings: The settings.
        objects: The storage, possibly with caches.
        clock: The clock.
        stored_objects: The storage without caches. If it is None, `objects` is used.
        indexes: The indexes. If it is None, the planner uses no index.
        usage: The counts of how plans use indexes.
        location_checker: Checks the files that a table names. If it is None, a table may name any file.
    """
    index_selection = None
    if indexes is not None:
        index_selection = IndexSelection(indexes, usage or Usage(), clock, wait_s=settings.index_wait_s)
    decoders = settings.plan_threads or max(1, len(os.sched_getaffinity(0)))
    executor = ThreadPoolExecutor(decoders, thread_name_prefix="planner")
    decoder_pool = Decoders(executor, decoders)
    folder = Path(settings.plan_disk_folder) if settings.plan_disk_folder else settings.home / "cache" / "blocks"
    opened_stack: AbstractAsyncContextManager[Stack[Block]] = open_stack(
        MemoryCache(0),  # No cache is needed, because views keep blocks alive; see `Blocks`.
        weigh=lambda block: block.size_bytes,
        pending_bytes_max=max(settings.plan_memory_bytes, _PENDING_BYTES_MIN),
        folder=folder,
        disk_bytes=settings.plan_disk_bytes,
        check_mapped=False,  # Blocks verify their columns on use.
        on_mapped=Block.mark_as_mapped,
        threads=decoders,  # The decoders' own threads would wait for disk writes.
        name="planner-disk",
    )
    try:
        async with opened_stack as stack:
            blocks = Blocks(
                objects,
                stack,
                executor,
                decoder_pool,
                stored_objects=stored_objects or objects,
                manifests_in_flight=decoders * _MANIFESTS_IN_FLIGHT_PER_THREAD,
                limit_bytes=settings.plan_manifest_limit_bytes,
            )
            yield Planner(
                blocks,
                clock,
                budget_bytes=settings.plan_memory_bytes,
                time_budget_s=settings.plan_time_budget_s,
                index_selection=index_selection,
                location_checker=location_checker,
            )
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        decoder_pool.close()
