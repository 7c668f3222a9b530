"""A cache of the views of snapshots with their plans, within a memory budget, and a list of recently planned tables.

When a commit adds a snapshot to a recently planned table, the server makes the view of the new snapshot before the next
plan (`preparation.py`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from seamark.cache.memory import MemoryCache
from seamark.cache.sizes import measure_object_bytes
from seamark.formats.iceberg.manifests.manifest import ManifestFile
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.access.principal import get_current_principal
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.blocks import Blocks
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.scan.request import ViewKey
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView

_PLANS_BUDGET_DIVISOR = 64
"""The cached plans of one view use at most 1/64 of the budget."""
_VIEW_BYTES = 4000
"""The memory of a view without manifests."""
_DELETE_BYTES = 300
"""The memory that the delete index needs for one delete file: path, position and bounds."""
_HOLDER_BUDGET_DIVISOR = 2
"""If a principal's views use more than the budget divided by this number, they are evicted first."""
_EVICTED = -1
"""The value of `CachedView.charged_bytes` after the view was evicted."""
_COMPARED_VIEWS_MAX = 16
"""The maximum number of recent views in which blocks of a new view are searched."""


class CachedView:
    """A view, with its delete index and its cached plans."""

    __slots__ = ("_manifests_bytes", "charged_bytes", "checked", "deletes", "files", "holder", "plans", "view")

    def __init__(self, view: TableView, deletes: DeleteIndex, files: int, plans_bytes: int) -> None:
        """Create a cached view without plans.

        Args:
            view: The view.
            deletes: The delete files of the view's data files.
            files: The number of live files of the snapshot, including files of manifests that the view leaves out.
            plans_bytes: The budget for the view's cached plans.
        """
        self.view = view
        self.deletes = deletes
        self.files = files
        self.plans: MemoryCache[tuple[object, ...], ScanPlan] = MemoryCache(plans_bytes)
        self.checked: set[tuple[str, ...]] = set()
        """The keys of the tables for which `LocationChecker` has accepted the view, with their allowed locations."""
        self.holder = get_current_principal()
        """The principal whose request made the view. It is empty if the server made the view for itself."""
        self._manifests_bytes = measure_object_bytes((view.manifests, view.delete_manifests))
        self.charged_bytes = 0
        """The part of `added_bytes` that the total of `CachedViews` includes; `_EVICTED` after eviction."""

    @property
    def all_blocks(self) -> Iterator[Block]:
        return chain(self.view.blocks, self.view.delete_blocks)

    @property
    def added_bytes(self) -> int:
        """The memory of the view without the blocks, which other views of the table may share."""
        own_bytes = self.view.size_bytes + self._manifests_bytes + _DELETE_BYTES * self.view.delete_file_count
        return _VIEW_BYTES + own_bytes + self.plans.used_bytes


@dataclass(slots=True)
class _CountedBlock:
    """The use of a block by the views of one principal."""

    views: int = 0
    """The number of views that contain the block."""
    size_bytes: int = 0
    """The size of the block when it was last counted."""


class _PrincipalMemory:
    """The memory of one principal's views.

    A block that several views share counts only once, with the size that it had at the last use of one of the views.
    """

    __slots__ = ("_blocks", "size_bytes", "views")

    def __init__(self) -> None:
        self.views: OrderedDict[ViewKey, CachedView] = OrderedDict()
        """The views, with the least recently used first."""
        self.size_bytes = 0
        """The bytes of the blocks, plus the bytes that the views add to them."""
        self._blocks: dict[Block, _CountedBlock] = {}

    def put(self, key: ViewKey, cached_view: CachedView) -> None:
        """Add a view, the decoded files of a snapshot, to the views that the principal has requested.

        Several views may share a block of files. A shared block counts once, and the number of its
        views is kept with its size.
        """
        self.views[key] = cached_view
        for block in cached_view.all_blocks:
            counted_block = self._blocks.setdefault(block, _CountedBlock())
            counted_block.views += 1
            self._update_block_size(block, counted_block)

    def refresh(self, cached_view: CachedView) -> None:
        """Update the counted sizes of the view's blocks, which grow while plans use them."""
        for block in cached_view.all_blocks:
            self._update_block_size(block, self._blocks[block])

    def _update_block_size(self, block: Block, counted_block: _CountedBlock) -> None:
        """Update the counted size of a block, and the total of the principal."""
        current_bytes = block.size_bytes
        self.size_bytes += current_bytes - counted_block.size_bytes
        counted_block.size_bytes = current_bytes

    def remove(self, key: ViewKey) -> None:
        """Remove a view whose added bytes are no longer charged to the principal.

        Blocks that no other view of the principal contains are removed too, and their sizes are subtracted.
        """
        for block in self.views.pop(key).all_blocks:
            counted_block = self._blocks[block]
            counted_block.views -= 1
            if not counted_block.views:
                self.size_bytes -= counted_block.size_bytes
                del self._blocks[block]

    def check_invariants(self) -> None:
        """Check, for tests, that the counted memory matches the views and their blocks."""
        charged_bytes = sum(cached_view.charged_bytes for cached_view in self.views.values())
        assert self.size_bytes == charged_bytes + sum(block.size_bytes for block in self._blocks.values())
        assert self._blocks.keys() == {block for cached_view in self.views.values() for block in cached_view.all_blocks}


class CachedViews:
    """The cached views. A view references its blocks.

    When the memory of live blocks, views and plans exceeds the budget, the least recently used view is evicted. Data
    that plans and lookups derive from a view are counted when the next plan uses the view.

    A principal that plans many tables does not evict all views of other principals. While the views of a principal
    use more than half of the budget, the principal's least recently used view is evicted first. The principal's last
    view stays, because it may be the view of one large table.
    """

    def __init__(self, blocks: Blocks, budget_bytes: int) -> None:
        self._blocks = blocks
        self.budget_bytes = budget_bytes
        self.plans_bytes = budget_bytes // _PLANS_BUDGET_DIVISOR
        self.added_bytes = 0
        """The added bytes of all views, updated after each new plan."""
        self._views: OrderedDict[ViewKey, CachedView] = OrderedDict()
        self._memory_by_principal: dict[str, _PrincipalMemory] = {}
        """The memory of each principal's views.

        It is updated with each view instead of being computed at an eviction. A reader can have tens of thousands of
        views of parts of one table, and then each further plan evicts a view.
        """
        self._large_holders: set[str] = set()
        """The principals whose views use more than their share of the budget."""

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, key: ViewKey) -> bool:
        return key in self._views

    def get(self, key: ViewKey) -> CachedView | None:
        """Return the view and make it the most recently used view, or return None if it is not cached."""
        cached_view = self._views.get(key)
        if cached_view is not None:
            self._views.move_to_end(key)
            self._memory_by_principal[cached_view.holder].views.move_to_end(key)
        return cached_view

    def peek(self, key: ViewKey) -> CachedView | None:
        """Return the view, or None if it is not cached, without changing the order of use."""
        return self._views.get(key)

    @property
    def room_bytes(self) -> int:
        """The unused part of the budget. It is negative if the views exceed the budget."""
        return self.budget_bytes - self._blocks.live_bytes - self.added_bytes

    def put(self, key: ViewKey, cached_view: CachedView) -> None:
        self.evict(key)  # A concurrent request may have loaded the same view.
        self._views[key] = cached_view
        self._memory_by_principal.setdefault(cached_view.holder, _PrincipalMemory()).put(key, cached_view)
        self.charge(cached_view)

    def charge(self, cached_view: CachedView) -> None:
        """Add the growth of the view to the total, unless the view has been evicted."""
        if cached_view.charged_bytes != _EVICTED:
            added_bytes = cached_view.added_bytes
            self._add(cached_view, added_bytes - cached_view.charged_bytes)
            cached_view.charged_bytes = added_bytes

    def _add(self, cached_view: CachedView, size_bytes: int) -> None:
        """Add bytes to the total and to the memory of the view's principal."""
        holder_memory = self._memory_by_principal[cached_view.holder]
        self.added_bytes += size_bytes
        holder_memory.size_bytes += size_bytes
        self._update_large_principals(cached_view.holder, holder_memory)

    def _update_large_principals(self, holder: str, holder_memory: _PrincipalMemory) -> None:
        """Record whether the principal's views use more than their share of the budget.

        The empty principal, for views that the server makes for itself, has no limit.
        """
        if holder and holder_memory.size_bytes > self.budget_bytes // _HOLDER_BUDGET_DIVISOR:
            self._large_holders.add(holder)
        else:
            self._large_holders.discard(holder)

    def find_containing_views(self, blocks: set[Block]) -> list[tuple[ViewKey, TableView]]:
        """Return the views, with their keys, that contain one of the blocks."""
        return [
            (key, cached_view.view)
            for key, cached_view in self._views.items()
            if not blocks.isdisjoint(cached_view.all_blocks)
        ]

    def find_view_with_shared_edge(self, blocks: Sequence[Block]) -> TableView | None:
        """Return a recently used view whose first or last block is the first or last of `blocks`, or None.

        Such a view is probably of a neighbouring snapshot, so a new view can reuse what was computed for it.
        """
        edges = {*blocks[:1], *blocks[-1:]}
        return next((view for view in self._list_recent() if not edges.isdisjoint(view.edges)), None)

    def find_shared_blocks(self, manifests: Sequence[ManifestFile]) -> list[Block | None]:
        """Return the block of each manifest, from a recent view with the same first or last manifest.

        Neighbouring snapshots share most manifests, usually including the first or the last. Manifests are compared by
        identity, because decoded manifest lists share the objects of equal manifests.

        Returns:
            None for each manifest that the view does not have, and for all manifests if there is no such view.
        """
        edges = {*map(id, manifests[:1]), *map(id, manifests[-1:])}
        for view in self._list_recent():
            if not edges.isdisjoint(map(id, (*view.manifests[:1], *view.manifests[-1:]))):
                return view.find_blocks(manifests)
        return [None] * len(manifests)

    def _list_recent(self) -> Iterator[TableView]:
        return (cached_view.view for cached_view in islice(reversed(self._views.values()), _COMPARED_VIEWS_MAX))

    def evict(self, key: ViewKey) -> None:
        if key in self._views:
            self._evict_view(key)

    def evict_over_budget(self, used_view: CachedView) -> None:
        """Evict the least recently used views until the total fits the budget.

        The caller still references `used_view`, so its eviction frees no memory yet. If `used_view` alone exceeds the
        budget, it is evicted and the other views stay.
        """
        if self._blocks.live_bytes + self.added_bytes <= self.budget_bytes:
            return
        blocks_bytes = sum(block.size_bytes for block in used_view.all_blocks)
        leaving_bytes = 0
        if blocks_bytes + used_view.added_bytes > self.budget_bytes:
            for key in [key for key, cached_view in self._views.items() if cached_view is used_view]:
                self._evict_view(key)
            leaving_bytes = blocks_bytes  # These blocks will be freed after the call, so they do not count.
        elif used_view.charged_bytes != _EVICTED:  # Count what the plan has added to the blocks of the cached view.
            holder_memory = self._memory_by_principal[used_view.holder]
            holder_memory.refresh(used_view)
            self._update_large_principals(used_view.holder, holder_memory)
        while self._views and self._blocks.live_bytes - leaving_bytes + self.added_bytes > self.budget_bytes:
            self._evict_view(self._choose_evicted_key())

    def _choose_evicted_key(self) -> ViewKey:
        """Return the key of the view to evict next.

        It is the least recently used view of a principal that uses more than its share, if other principals also have
        views. A principal keeps its last view. Otherwise, it is the least recently used view of all.
        """
        if len(self._memory_by_principal) > 1:
            for holder in self._large_holders:
                views = self._memory_by_principal[holder].views
                if len(views) > 1:
                    return next(iter(views))
        return next(iter(self._views))

    def _evict_view(self, key: ViewKey) -> None:
        """Remove a view from the cache."""
        evicted_view = self._views.pop(key)
        holder_memory = self._memory_by_principal[evicted_view.holder]
        self._add(evicted_view, -evicted_view.charged_bytes)
        holder_memory.remove(key)
        self._update_large_principals(evicted_view.holder, holder_memory)
        # A plan may still use the view. With this marker, its further growth is not added to the total.
        evicted_view.charged_bytes = _EVICTED
        if not holder_memory.views:
            del self._memory_by_principal[evicted_view.holder]

    def check_invariants(self) -> None:
        """Check, for tests, that the total matches the cached views and their blocks."""
        assert self.added_bytes == sum(cached_view.charged_bytes for cached_view in self._views.values())
        live_blocks = {id(block): block for cached_view in self._views.values() for block in cached_view.view.blocks}
        assert sum(block.size_bytes for block in live_blocks.values()) <= self._blocks.live_bytes
        for holder, holder_memory in self._memory_by_principal.items():
            holder_memory.check_invariants()
            holder_keys = [key for key, cached_view in self._views.items() if cached_view.holder == holder]
            assert list(holder_memory.views) == holder_keys
            assert (holder in self._large_holders) == (
                bool(holder) and holder_memory.size_bytes > self.budget_bytes // _HOLDER_BUDGET_DIVISOR
            )
        assert sum(len(holder_memory.views) for holder_memory in self._memory_by_principal.values()) == len(self._views)


RECENTLY_PLANNED_S = 300.0
"""The time after a plan during which commits to its table make views in advance, in seconds."""
_PLANNED_TABLES_MAX = 1024
"""The maximum number of tables that are recorded as recently planned."""


class PlannedTable(msgspec.Struct, frozen=True):
    """A table that was planned recently.

    Attributes:
        key: The key of the table's newest view.
        planned_s: The time of the last plan, in monotonic seconds.
        prepared: Whether the view was made in advance, and no plan has used it.
        due_s: The earliest time at which the next view may be prepared, in monotonic seconds.
    """

    key: ViewKey
    planned_s: float
    prepared: bool = False
    due_s: float = 0.0


class PlannedTables:
    """The tables that were planned recently, by UUID. The server makes the views of their next snapshots in advance.

    An instance belongs to one event loop.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tables: OrderedDict[str, PlannedTable] = OrderedDict()
        self.noted = asyncio.Event()
        """An event that each plan of a table's current snapshot sets."""

    def note(self, uuid: str, key: ViewKey) -> None:
        """Record that a plan used the view of the table's current snapshot, and set `noted`.

        If there are too many tables, remove the table whose last plan is the oldest.
        """
        self._tables[uuid] = PlannedTable(key, self._clock.monotonic())
        self._tables.move_to_end(uuid)
        if len(self._tables) > _PLANNED_TABLES_MAX:
            self._tables.popitem(last=False)
        self.noted.set()

    def get(self, uuid: str) -> PlannedTable | None:
        """Return the table, or None if the table was not planned recently."""
        table = self._tables.get(uuid)
        return table if table is not None and self._is_recent(table) else None

    def note_prepared(self, uuid: str, old_table: PlannedTable, key: ViewKey, due_s: float) -> None:
        """Record that a view was made in advance from the view of `old_table`.

        Nothing is recorded if a plan has used the table since `old_table`.

        Args:
            uuid: The UUID of the table.
            old_table: The record of the table before.
            key: The key of the new view.
            due_s: The earliest time at which the next view of the table may be made in advance, in monotonic seconds.
        """
        if self._tables.get(uuid) is old_table:
            self._tables[uuid] = PlannedTable(key, old_table.planned_s, prepared=True, due_s=due_s)

    @property
    def is_empty(self) -> bool:
        """Whether no table was planned recently."""
        return not any(self._is_recent(table) for table in reversed(self._tables.values()))

    def _is_recent(self, table: PlannedTable) -> bool:
        return self._clock.monotonic() - table.planned_s < RECENTLY_PLANNED_S
