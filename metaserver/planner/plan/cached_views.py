"""The views of snapshots that the planner holds, with their plans, within a budget of memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice

from seamark.cache.memory import MemoryCache
from seamark.cache.sizes import object_bytes
from seamark.metaserver.access.principal import current_principal
from seamark.metaserver.iceberg.manifests.manifest import ManifestFile
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.blocks import Blocks
from seamark.metaserver.planner.deletes.delete_index import DeleteIndex
from seamark.metaserver.planner.plan.stages import PruningInput
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.planner.view.view import TableView

_PLANS_SHARE = 64
"""The part of the budget for the cached plans of one view: 1/64."""
_VIEW_BYTES = 4000
"""Memory of a view without manifests."""
_DELETE_BYTES = 300
"""Memory of the delete index for each delete file: path, position and the bounds that rule it out."""
_HOLDER_SHARE = 2
"""The part of the budget beyond which a principal gives up its own views: 1/2."""
_EVICTED = -1
_RECENT = 16
"""Views that are compared with a new view."""

ViewKey = tuple[str, ...]


class CachedView:
    """A view and what was computed from it."""

    __slots__ = ("_manifests_bytes", "charged_bytes", "checked", "deletes", "files", "holder", "plans", "view")

    def __init__(self, view: TableView, deletes: DeleteIndex, files: int, plans_bytes: int) -> None:
        """`files`: live files of the snapshot, including those of manifests that the view leaves out. `plans_bytes`:
        the budget for its cached plans."""
        self.view = view
        self.deletes = deletes
        self.files = files
        self.plans: MemoryCache[tuple[object, ...], ScanPlan] = MemoryCache(plans_bytes)
        self.checked: set[tuple[str, ...]] = set()
        """The tables, and states of their allowed locations, for which `LocationChecker` has accepted the view."""
        self.holder = current_principal()
        """The principal whose request made it; empty for the server's own work."""
        self._manifests_bytes = object_bytes((view.manifests, view.delete_manifests))
        self.charged_bytes = 0
        """The part of `added_bytes` that the total of `CachedViews` includes; `_EVICTED` after eviction."""

    @property
    def pruning_input(self) -> PruningInput:
        return PruningInput(self.view, self.deletes, self.files)

    @property
    def added_bytes(self) -> int:
        """Memory in addition to the blocks, which other views of the table share."""
        own = self.view.size_bytes + self._manifests_bytes + _DELETE_BYTES * self.view.delete_file_count
        return _VIEW_BYTES + own + self.plans.used_bytes


class CachedViews:
    """A view references its blocks. When the memory of live blocks, views and plans exceeds the budget, the least
    recently used view is evicted. What answers and lookups derive counts from the next plan on.

    A principal that plans many tables does not evict all views of others: while its views have more than half of the
    budget, the least recently used of them is evicted. Its last view is not, as it may be of one large table.
    """

    def __init__(self, blocks: Blocks, budget_bytes: int) -> None:
        self._blocks = blocks
        self.budget_bytes = budget_bytes
        self.plans_bytes = budget_bytes // _PLANS_SHARE
        self.added_bytes = 0
        """Of all views, updated after each new plan."""
        self._views: OrderedDict[ViewKey, CachedView] = OrderedDict()

    def __len__(self) -> int:
        return len(self._views)

    def __contains__(self, key: ViewKey) -> bool:
        return key in self._views

    def get(self, key: ViewKey) -> CachedView | None:
        """The view, which becomes the most recently used."""
        cached = self._views.get(key)
        if cached is not None:
            self._views.move_to_end(key)
        return cached

    def peek(self, key: ViewKey) -> CachedView | None:
        """The view, which is not used by that."""
        return self._views.get(key)

    @property
    def room_bytes(self) -> int:
        """The rest of the budget."""
        return self.budget_bytes - self._blocks.live_bytes - self.added_bytes

    def put(self, key: ViewKey, cached: CachedView) -> None:
        self.evict(key)  # that of a concurrent request which loaded the same; its charge would stay
        self._views[key] = cached
        self.charge(cached)

    def charge(self, cached: CachedView) -> None:
        """Adds the growth of the view to the total; an evicted view is no longer part of it."""
        if cached.charged_bytes != _EVICTED:
            added = cached.added_bytes
            self.added_bytes += added - cached.charged_bytes
            cached.charged_bytes = added

    def containing(self, blocks: set[Block]) -> list[tuple[ViewKey, TableView]]:
        """The views that contain one of `blocks`."""
        return [
            (key, cached.view)
            for key, cached in self._views.items()
            if not blocks.isdisjoint(cached.view.blocks) or not blocks.isdisjoint(cached.view.delete_blocks)
        ]

    def sharing(self, blocks: Sequence[Block]) -> TableView | None:
        """A recently used view with the first or the last of these blocks: that of a snapshot nearby."""
        edges = {*blocks[:1], *blocks[-1:]}
        return next((view for view in self._recent() if not edges.isdisjoint(view.edges)), None)

    def known_blocks(self, manifests: Sequence[ManifestFile]) -> list[Block | None]:
        """The blocks that the view of a snapshot nearby has of these manifests; None for the others."""
        edges = {*map(id, manifests[:1]), *map(id, manifests[-1:])}
        for view in self._recent():
            if not edges.isdisjoint(map(id, (*view.manifests[:1], *view.manifests[-1:]))):
                return view.blocks_of(manifests)
        return [None] * len(manifests)

    def _recent(self) -> Iterator[TableView]:
        return (cached.view for cached in islice(reversed(self._views.values()), _RECENT))

    def evict(self, key: ViewKey) -> None:
        if key in self._views:
            self._evict(key)

    def evict_over_budget(self, used: CachedView) -> None:
        """Evicts views, the least recently used first, until the total fits the budget.

        The caller still references `used`, so evicting it frees nothing yet. If it alone exceeds the budget, it is
        evicted and the other views stay.
        """
        if self._blocks.live_bytes + self.added_bytes <= self.budget_bytes:
            return
        blocks_bytes = sum(block.size_bytes for block in (*used.view.blocks, *used.view.delete_blocks))
        leaving_bytes = 0
        if blocks_bytes + used.added_bytes > self.budget_bytes:
            for key in [key for key, cached in self._views.items() if cached is used]:
                self._evict(key)
            leaving_bytes = blocks_bytes
        while self._views and self._blocks.live_bytes - leaving_bytes + self.added_bytes > self.budget_bytes:
            self._evict(self._next_to_evict())

    def _next_to_evict(self) -> ViewKey:
        views = Counter(cached.holder for cached in self._views.values())
        if len(views) > 1:
            for holder in [holder for holder, count in views.items() if holder and count > 1]:
                keys = [key for key, cached in self._views.items() if cached.holder == holder]
                if self._held_bytes(keys) > self.budget_bytes // _HOLDER_SHARE:
                    return keys[0]
        return next(iter(self._views))

    def _held_bytes(self, keys: Sequence[ViewKey]) -> int:
        """Of views and their blocks; blocks that views share count once."""
        held = [self._views[key] for key in keys]
        blocks = {block for cached in held for block in (*cached.view.blocks, *cached.view.delete_blocks)}
        return sum(block.size_bytes for block in blocks) + sum(cached.charged_bytes for cached in held)

    def _evict(self, key: ViewKey) -> None:
        evicted = self._views.pop(key)
        self.added_bytes -= evicted.charged_bytes
        evicted.charged_bytes = _EVICTED

    def check_invariants(self) -> None:
        """AssertionError if the total does not match the cached views and their blocks. For tests."""
        assert self.added_bytes == sum(cached.charged_bytes for cached in self._views.values())
        alive = {id(block): block for cached in self._views.values() for block in cached.view.blocks}
        assert sum(block.size_bytes for block in alive.values()) <= self._blocks.live_bytes
