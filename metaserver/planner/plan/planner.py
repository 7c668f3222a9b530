"""The planner: from a table's metadata and a filter to the files that can hold a matching row.

The rules it keeps. A plan depends only on immutable things (a manifest list, a filter, a schema), so plans are kept
with the view of their snapshot and die with it. A view holds its blocks; the least recently used view goes when the
blocks alive, with what views and plans add to them, exceed the budget, and nothing else holds a block for longer than
one request. One view and one plan of a kind are in the making at a time, whoever waits for them.

A plan has a time budget. It is looked at between predicates; when it is over, what was not checked is kept.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from cache.memory import MemoryCache
from cache.opening import open_stack
from cache.single_flight import SingleFlight
from cache.stack import Stack
from metaserver.catalog.commit import table_uuid
from metaserver.catalog.own_files import ALLOWED_LOCATIONS
from metaserver.clock import Clock
from metaserver.errors import NotFound
from metaserver.iceberg.expressions.expression import TRUE
from metaserver.iceberg.manifests.manifest import ManifestFile
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.metadata.snapshot import Snapshot
from metaserver.index.blocks.block import Block
from metaserver.index.blocks.blocks import Blocks
from metaserver.index.blocks.decoding import Decoders
from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.files.indexes import Indexes
from metaserver.index.files.usage import Usage
from metaserver.objects.port import ObjectStore
from metaserver.planner.deletes.delete_index import DeleteIndex
from metaserver.planner.indexes.coverage import coverages_bytes
from metaserver.planner.indexes.index_selection import IndexSelection
from metaserver.planner.indexes.probe import Probe
from metaserver.planner.plan.location_checks import Borders
from metaserver.planner.plan.stages import PruningInput, prune
from metaserver.planner.pruning.manifest_pruning import needed
from metaserver.planner.scan.request import BoundScan, ScanRequest, appended
from metaserver.planner.scan.scan import Scan
from metaserver.planner.view.view import TableView
from metaserver.settings import Settings
from metaserver.store.port import Entry

T = TypeVar("T")

_IN_THREAD_ROWS = 100_000
"""Larger views are pruned in a thread: the kernels need no GIL, and the event loop is not to wait for them."""
_UNDER_WAY = 16
"""Manifests read or decoded at once, for each decoding thread."""
_QUICK_COMPARISONS = 2_500_000
"""Of rows with literals; about a nanosecond each."""
_LISTS_BYTES = 16 << 20
"""Manifest lists kept, for plans that need only some of their manifests."""
_MANIFEST_BYTES = 1000
"""Memory of one entry of a manifest list, rounded up."""
_PART_MAX = 0.5
"""A plan that needs more of a snapshot's manifests than this part loads all of them: the next plan will."""
_PENDING_BYTES_MIN = 256 << 20
"""Blocks that may wait to be written to the local disk, whatever the budget of memory."""
_PLANS_BYTES = 16 << 20
"""Plans kept per view."""
_TREE_BYTES = 8
"""Memory of a bound filter, for each character of its text, the text included; rounded up."""
_VIEW_BYTES = 4000
"""Of a view with no manifest."""
_DELETE_BYTES = 300
"""Of the index, for each delete file: its path, its place, and what proves that it does not apply."""
_LET_GO = -1


@dataclass(slots=True)
class _Held:
    """A view with what was computed from it."""

    view: TableView
    deletes: DeleteIndex
    files: int
    """Live files, those of manifests that the view leaves out included."""
    plans: MemoryCache[tuple[object, ...], Scan]
    checked: set[tuple[str, ...]]
    """For which tables, and states of what they may name, `Borders` has found nothing."""
    charged_bytes: int = 0
    """Of `added_bytes`, what is on the planner's account; `_LET_GO` when the view no longer is."""

    @property
    def subject(self) -> PruningInput:
        return PruningInput(self.view, self.deletes, self.files)

    @property
    def added_bytes(self) -> int:
        """Memory beside the blocks, which other views of the table share."""
        manifests = len(self.view.manifests) + len(self.view.delete_manifests)
        own = self.view.size_bytes + _MANIFEST_BYTES * manifests + _DELETE_BYTES * self.view.delete_rows
        return _VIEW_BYTES + own + self.plans.used_bytes


class _Advice(NamedTuple):
    """Of which indexes a plan may take any."""

    index_selection: IndexSelection
    definitions: tuple[IndexDefinition, ...]
    entry: Entry

    async def prepare(self, view: TableView, bound_scan: BoundScan) -> Probe | None:
        return await self.index_selection.prepare(view, bound_scan, self.definitions, self.entry)


@dataclass(frozen=True, slots=True)
class PlannerStats:
    """`live_bytes` is memory of blocks, mapped files included, `added_bytes` of what views and plans add to it;
    `decoded` counts manifests since the start."""

    views: int
    blocks: int
    live_bytes: int
    added_bytes: int
    budget_bytes: int
    decoded: int
    plans: int
    plan_hits: int


class Planner:
    """Belongs to one event loop."""

    def __init__(
        self,
        blocks: Blocks,
        clock: Clock,
        *,
        budget_bytes: int,
        time_budget_s: float,
        index_selection: IndexSelection | None = None,
        borders: Borders | None = None,
    ) -> None:
        """Without `index_selection` no index is used; without `borders` a table may name any file."""
        self._borders = borders
        self._blocks = blocks
        self._index_selection = index_selection
        self._clock = clock
        self._budget_bytes = budget_bytes
        self._time_budget_s = time_budget_s
        self._views: OrderedDict[tuple[str, ...], _Held] = OrderedDict()
        self._added_bytes = 0
        """Of all views, as of the last new plan on each."""
        self._loading: SingleFlight[tuple[str, ...], _Held] = SingleFlight()
        self._planning: SingleFlight[tuple[object, ...], Scan] = SingleFlight()
        self._lists: MemoryCache[str, tuple[ManifestFile, ...]] = MemoryCache(_LISTS_BYTES)
        self._listing: SingleFlight[str, tuple[ManifestFile, ...]] = SingleFlight()
        self._plans = self._plan_hits = 0

    async def scan(self, metadata: TableMetadata, request: ScanRequest, entry: Entry | None = None) -> Scan:
        """BadRequest for a filter or snapshot that makes no sense; Corrupt naming a file of the table.

        `entry` is the table's, which leads to its indexes; without it none is used.
        """
        return await self.plan(BoundScan.bind(metadata, request), entry)

    async def plan(self, bound_scan: BoundScan, entry: Entry | None = None) -> Scan:
        """As `scan`, of a request whose filter is bound. Corrupt naming a file of the table."""
        metadata, request = bound_scan.metadata, bound_scan.request
        held = await self._allowed(bound_scan, entry)
        # The current schema beside that of the scan: it tells what answers say of partitions and columns.
        schemas = (bound_scan.schema.id, metadata.current_schema_id)
        advice = self._advice(bound_scan, entry)
        key: tuple[object, ...] = (bound_scan.text, *schemas, request.start_snapshot_id, request.end_snapshot_id)
        if advice is not None:
            key = (*key, advice.entry.uuid, advice.entry.index_version, *(one.id for one in advice.definitions))
        self._plans += 1
        kept = held.plans.get(key)
        if kept is not None and _tells_of(kept, metadata):
            self._plan_hits += 1
            return kept
        try:
            if advice is None and _is_quick(held.view, bound_scan):  # done before anybody else could ask for it
                scan = prune(held.subject, bound_scan, self._deadline(), self._clock)
            else:
                scan = await self._planning.run((id(held), *key), lambda: self._make(held, bound_scan, advice))
            if scan.complete:
                held.plans.put(key, scan, scan.size_bytes + _TREE_BYTES * len(bound_scan.text))
            return scan
        finally:
            self._charge(held)
            self._shed(held)

    def _advice(self, bound_scan: BoundScan, entry: Entry | None) -> _Advice | None:
        """None where a plan may use no index."""
        if (
            entry is None
            or self._index_selection is None
            or (bound_scan.bound == TRUE and not bound_scan.dynamic_filters)
        ):
            return None
        definitions = self._index_selection.definitions(bound_scan.metadata, entry)
        return _Advice(self._index_selection, definitions, entry) if definitions else None

    async def _make(
        self, held: _Held, bound_scan: BoundScan, advice: _Advice | None, *, loaded_us: int | None = None
    ) -> Scan:
        """A new plan. With `loaded_us`, how long it took to have the manifests, files and bytes are counted."""
        probe = None if advice is None else await advice.prepare(held.view, bound_scan)

        def plan() -> Scan:
            return prune(held.subject, bound_scan, self._deadline(), self._clock, probe=probe, loaded_us=loaded_us)

        quick = _is_quick(held.view, bound_scan) and (probe is None or not probe.by_row)
        scan = plan() if quick else await asyncio.to_thread(plan)
        if advice is not None and probe is not None:
            if probe.wanted and await advice.index_selection.load_rows(probe):
                probe.again()
                scan = await asyncio.to_thread(plan)
            advice.index_selection.settle(probe, advice.entry)
        return scan

    async def view(self, metadata: TableMetadata, request: ScanRequest) -> TableView:
        """The files of a snapshot, none pruned."""
        held = await self._allowed(BoundScan.bind(metadata, request), None, whole=True)
        self._shed(held)
        return held.view

    async def explain(self, bound_scan: BoundScan, entry: Entry | None = None) -> Scan:
        """As `plan`, planned anew whatever is kept, with files and bytes in its stages."""
        before_s = self._clock.monotonic()
        held = await self._allowed(bound_scan, entry, whole=True)  # what is left out unread cannot be told
        loaded_us = int((self._clock.monotonic() - before_s) * 1e6)
        scan = await self._make(held, bound_scan, self._advice(bound_scan, entry), loaded_us=loaded_us)
        self._shed(held)
        return scan

    async def unread(self, bound_scan: BoundScan) -> int:
        """About how many entries have to be decoded before the plan can begin; 0 when all is in memory."""
        if _view_key(bound_scan) in self._views:
            return 0
        manifests = await self._manifests(bound_scan)
        chosen = [manifests[number] for number in await _needed(manifests, bound_scan)]
        return sum(_entries(manifest) for manifest in self._blocks.missing(chosen))

    def stats(self) -> PlannerStats:
        return PlannerStats(
            views=len(self._views),
            blocks=self._blocks.live_blocks,
            live_bytes=self._blocks.live_bytes,
            added_bytes=self._added_bytes,
            budget_bytes=self._budget_bytes,
            decoded=self._blocks.decoded,
            plans=self._plans,
            plan_hits=self._plan_hits,
        )

    async def check_paths(self, metadata: TableMetadata, uuid: str, paths: Sequence[str]) -> None:
        """Forbidden where one of the manifests, or lists of them, is not the table's to name."""
        if self._borders is not None:
            await self._borders.check_paths(uuid, metadata, paths)

    async def _allowed(self, bound_scan: BoundScan, entry: Entry | None, *, whole: bool = False) -> _Held:
        """As `_held`. Forbidden where the table may not name what the snapshot names."""
        held = await self._held(bound_scan, whole=whole)
        if self._borders is not None and bound_scan.snapshot is not None:
            metadata = bound_scan.metadata
            uuid = entry.uuid if entry is not None else table_uuid(metadata)
            mark = (uuid, metadata.location, metadata.properties.get(ALLOWED_LOCATIONS, ""))
            if mark not in held.checked:
                await self._borders.check(uuid, metadata, _lists(bound_scan), held.view)
                held.checked.add(mark)
        return held

    async def _held(self, bound_scan: BoundScan, *, whole: bool = False) -> _Held:
        """The view of the snapshot; where that is not in memory, and not all is asked for, of those of its manifests
        that the filter needs."""
        metadata = bound_scan.metadata
        key = _view_key(bound_scan)
        held = self._views.get(key)
        if held is None:
            manifests = await self._manifests(bound_scan)
            data = [manifest for manifest in manifests if manifest.content == 0]
            ordinals = list(range(len(data)))
            if not whole:
                chosen_ones = await _needed(data, bound_scan)
                if len(chosen_ones) <= len(data) * _PART_MAX:
                    ordinals = chosen_ones
                    key = (*key, "part", *map(str, ordinals))
                    held = self._views.get(key)
        if held is not None:
            self._views.move_to_end(key)
            return held

        async def load() -> _Held:
            chosen = {ordinal: data[ordinal] for ordinal in ordinals}
            deletes = [manifest for manifest in manifests if manifest.content != 0]
            blocks = await self._blocks.load([*chosen.values(), *deletes])
            count = len(chosen)
            view = TableView(tuple(chosen.values()), blocks[:count], deletes, blocks[count:], ordinals=ordinals)
            index = await self._run(view, lambda: DeleteIndex(view, metadata.partition_specs, metadata.schemas))
            files = view.rows + sum(_live(one) for number, one in enumerate(data) if number not in chosen)
            fresh = self._views[key] = _Held(view, index, files, MemoryCache(_PLANS_BYTES), set())
            self._charge(fresh)
            return fresh

        return await self._loading.run(key, load)

    async def _manifests(self, bound_scan: BoundScan) -> Sequence[ManifestFile]:
        """Those of the snapshot, or the data manifests that the appends of an incremental scan wrote."""
        if not bound_scan.request.incremental:
            return () if bound_scan.snapshot is None else await self._listed(bound_scan.snapshot)
        snapshots = appended(bound_scan.metadata, bound_scan.request)
        ids = {one.snapshot_id for one in snapshots}
        found: dict[str, ManifestFile] = {}
        for one in snapshots:
            for manifest in await self._listed(one):
                if manifest.content == 0 and manifest.added_snapshot_id in ids:
                    found[manifest.manifest_path] = manifest
        return tuple(found.values())

    async def _listed(self, snapshot: Snapshot) -> Sequence[ManifestFile]:
        if snapshot.manifest_list is not None:
            location = snapshot.manifest_list
            kept = self._lists.get(location)
            if kept is None:
                kept = await self._listing.run(location, lambda: self._blocks.manifest_list(location))
                self._lists.put(location, kept, len(kept) * _MANIFEST_BYTES)
            return kept
        if snapshot.manifests is None:
            raise NotFound(f"Snapshot {snapshot.snapshot_id} names neither a manifest list nor manifests")
        return [_unlisted(path, snapshot.snapshot_id) for path in snapshot.manifests]

    async def _run(self, view: TableView, work: Callable[[], T]) -> T:
        if _is_small(view):
            return work()
        return await asyncio.to_thread(work)  # not among the decoders: a cold table is not to hold up a warm one

    def _deadline(self) -> Callable[[], bool]:
        clock, until_s = self._clock, self._clock.monotonic() + self._time_budget_s
        return lambda: clock.monotonic() >= until_s

    def _charge(self, held: _Held) -> None:
        """Puts on the account what the view has grown by; one that was let go is off it already."""
        if held.charged_bytes != _LET_GO:
            added = held.added_bytes + coverages_bytes(held.view)
            self._added_bytes += added - held.charged_bytes
            held.charged_bytes = added

    def _shed(self, used: _Held) -> None:
        """Lets views go, the least recently used first, until all fits the budget.

        `used` is still held by the caller, so that letting it go frees nothing yet: when it alone is larger than the
        budget it goes, and the others are not made to pay for it.
        """
        if self._blocks.live_bytes + self._added_bytes <= self._budget_bytes:
            return
        blocks_bytes = sum(block.size_bytes for block in (*used.view.blocks, *used.view.delete_blocks))
        leaving_bytes = 0
        if blocks_bytes + used.added_bytes > self._budget_bytes:
            for key in [key for key, held in self._views.items() if held is used]:
                self._let_go(key)
            leaving_bytes = blocks_bytes
        while self._views and self._blocks.live_bytes - leaving_bytes + self._added_bytes > self._budget_bytes:
            self._let_go(next(iter(self._views)))

    def _let_go(self, key: tuple[str, ...]) -> None:
        gone = self._views.pop(key)
        self._added_bytes -= gone.charged_bytes
        gone.charged_bytes = _LET_GO

    def check_invariants(self) -> None:
        """AssertionError when a held view or its blocks are not on the account. For tests."""
        assert self._added_bytes == sum(held.charged_bytes for held in self._views.values())
        alive = {id(block): block for held in self._views.values() for block in held.view.blocks}
        assert sum(block.size_bytes for block in alive.values()) <= self._blocks.live_bytes


def _is_small(view: TableView) -> bool:
    return view.rows + view.delete_rows <= _IN_THREAD_ROWS


def _is_quick(view: TableView, bound_scan: BoundScan) -> bool:
    """Whether a plan takes a few milliseconds at most: less than a thread would, and nobody waits for long."""
    if bound_scan.is_long:
        return False
    comparisons = 0
    for one in bound_scan.predicates:
        column = view.known_stats(one.column_id, one.kind)
        if column is None and not _is_small(view):
            return False  # it is put together first
        comparisons += (view.rows if column is None else column.rows_read) * max(1, len(one.values))
    return comparisons <= _QUICK_COMPARISONS


async def _needed(manifests: Sequence[ManifestFile], bound_scan: BoundScan) -> list[int]:
    """Numbers of the manifests that the filter needs."""

    def find() -> list[int]:
        return needed(manifests, bound_scan.demands, bound_scan.metadata.partition_specs)

    return await asyncio.to_thread(find) if bound_scan.is_long else find()


def _view_key(bound_scan: BoundScan) -> tuple[str, ...]:
    if bound_scan.snapshot is None:
        return ("",)
    if bound_scan.request.incremental:
        lists = [_list_name(one) for one in appended(bound_scan.metadata, bound_scan.request)]
        return ("appends", *lists)
    return (_list_name(bound_scan.snapshot),)


def _lists(bound_scan: BoundScan) -> list[str]:
    snapshots = [bound_scan.snapshot] if bound_scan.snapshot is not None else []
    if bound_scan.request.incremental:
        snapshots = [*appended(bound_scan.metadata, bound_scan.request)]
    return [one.manifest_list for one in snapshots if one.manifest_list is not None]


def _tells_of(kept: Scan, metadata: TableMetadata) -> bool:
    """Whether a kept plan was made with the same schemas and specs: tables registered from one metadata file share
    snapshots, and may go different ways afterwards."""
    return kept.metadata.schemas == metadata.schemas and kept.metadata.partition_specs == metadata.partition_specs


def _list_name(snapshot: Snapshot) -> str:
    return snapshot.manifest_list or "\n".join(snapshot.manifests or ())


def _unlisted(path: str, snapshot_id: int) -> ManifestFile:
    """A manifest that version 1 metadata names by its path alone."""
    return ManifestFile(
        manifest_path=path,
        manifest_length=0,
        partition_spec_id=0,
        content=0,
        sequence_number=0,
        min_sequence_number=0,
        added_snapshot_id=snapshot_id,
        added_files_count=None,
        existing_files_count=None,
        deleted_files_count=None,
        added_rows_count=None,
        existing_rows_count=None,
        deleted_rows_count=None,
        partitions=None,
        key_metadata=None,
        first_row_id=None,
    )


def _live(manifest: ManifestFile) -> int:
    """Live entries, as far as the manifest list says."""
    return (manifest.added_files_count or 0) + (manifest.existing_files_count or 0)


def _entries(manifest: ManifestFile) -> int:
    return _live(manifest) + (manifest.deleted_files_count or 0)


@asynccontextmanager
async def open_planner(
    settings: Settings,
    objects: ObjectStore,
    clock: Clock,
    *,
    indexes: Indexes | None = None,
    usage: Usage | None = None,
    borders: Borders | None = None,
) -> AsyncIterator[Planner]:
    """The planner with its decoding threads and its folder on the local disk. Without `indexes` it uses none, without
    `borders` tables may name any file."""
    index_selection = None
    if indexes is not None:
        index_selection = IndexSelection(indexes, usage or Usage(), clock, wait_s=settings.index_wait_s)
    decoders = settings.plan_threads or max(1, len(os.sched_getaffinity(0)))
    executor = ThreadPoolExecutor(decoders, thread_name_prefix="planner")
    decoding = Decoders(executor, decoders)
    folder = Path(settings.plan_disk_folder) if settings.plan_disk_folder else settings.home / "cache" / "blocks"
    blocks_in: AbstractAsyncContextManager[Stack[Block]] = open_stack(
        MemoryCache(0),  # views hold blocks, see Blocks
        weigh=lambda block: block.size_bytes,
        pending_bytes_max=max(settings.plan_memory_bytes, _PENDING_BYTES_MIN),
        folder=folder,
        disk_bytes=settings.plan_disk_bytes,
        threads=decoders,  # apart from the decoders, which would stand still while the disk takes what they made
        name="planner-disk",
    )
    try:
        async with blocks_in as stack:
            blocks = Blocks(
                objects,
                stack,
                executor,
                decoding,
                under_way=decoders * _UNDER_WAY,
                limit_bytes=settings.plan_manifest_limit_bytes,
            )
            yield Planner(
                blocks,
                clock,
                budget_bytes=settings.plan_memory_bytes,
                time_budget_s=settings.plan_time_budget_s,
                index_selection=index_selection,
                borders=borders,
            )
    finally:
        executor.shutdown(wait=True, cancel_futures=True)
        decoding.close()
