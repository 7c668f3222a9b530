"""Which files of a view an index describes: the identities of the view's files, looked up in those of index files.

The rule: an identity is of path, size and record count (`hashing.file_ids`), so an entry is right for every snapshot
that holds the file. Identities are computed once for each block, which snapshots share, and put in order once for each
view; they go with the block and the view. Of files that a view lists twice, one is found.

A file whose size or record count nobody knows (Spark writes -1 for Avro files that it imports) has no identity, and
nothing describes it.
"""

from __future__ import annotations

from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from metaserver.index import _hash
from metaserver.index.block import Block
from metaserver.index.packing import Longs
from metaserver.planner.lookup import lookup
from metaserver.planner.prefix import EVERYTHING
from metaserver.planner.view import TableView

Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_COUNTS_BYTES = 16
"""Behind a path in what is hashed: size and record count."""


class FileIds:
    """The identities of all rows of a view. A row is its number among all of them, block after block."""

    def __init__(self, view: TableView) -> None:
        parts = [_ids_of(view, number) for number in range(len(view.blocks))]
        ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty((0, 2), dtype=np.uint64)
        known = np.concatenate([known for _, known in parts]) if parts else np.empty(0, dtype=np.bool_)
        self.rows = len(ids)
        identified = np.flatnonzero(known)
        self._order: Longs = identified[np.lexsort((ids[identified, 1], ids[identified, 0]))]
        self._ids: Words = ids[self._order]

    @property
    def size_bytes(self) -> int:
        return self._order.nbytes + self._ids.nbytes

    @property
    def identified(self) -> Mask:
        """bool[rows]: those that have an identity."""
        found = np.zeros(self.rows, dtype=np.bool_)
        found[self._order] = True
        return found

    def find(self, ids: Words) -> Longs:
        """int64[n]: the row of each of these identities, uint64[n, 2]; -1 where the view has no such file."""
        places = _find(self._ids, ids)
        found = np.full(len(ids), -1, dtype=np.int64)
        there = places >= 0
        found[there] = self._order[places[there]]
        return found

    def described(self, ids: Words) -> Mask:
        """bool[rows]: those whose identity is one of `ids`, uint64[n, 2]; of files listed twice, both."""
        found = np.zeros(self.rows, dtype=np.bool_)
        ordered = ids[np.lexsort((ids[:, 1], ids[:, 0]))]
        found[self._order[_find(ordered, self._ids) >= 0]] = True
        return found


def file_ids_of(view: TableView) -> FileIds:
    """Made when first asked for, which may be in a thread; kept as long as the view."""
    found = _of_views.get(view)
    if found is None:
        found = _of_views[view] = FileIds(view)
    return found


_of_views: WeakKeyDictionary[TableView, FileIds] = WeakKeyDictionary()
_of_blocks: WeakKeyDictionary[Block, tuple[Words, Mask]] = WeakKeyDictionary()


def _find(ordered: Words, ids: Words) -> Longs:
    """int64[n]: a place of each of `ids` among those in order, both uint64[n, 2]; -1 where it is not there."""
    high, low = np.ascontiguousarray(ordered[:, 0]), ordered[:, 1]
    found = np.full(len(ids), -1, dtype=np.int64)
    place = np.searchsorted(high, ids[:, 0], side="left")
    end = np.searchsorted(high, ids[:, 0], side="right")
    left = np.flatnonzero(place < end)
    # More than one turn only where different identities begin alike.
    while len(left):
        here = low[place[left]] == ids[left, 1]
        found[left[here]] = place[left[here]]
        left = left[~here]
        place[left] += 1
        left = left[place[left] < end[left]]
    return found


def _ids_of(view: TableView, number: int) -> tuple[Words, Mask]:
    """(uint64[rows, 2], whether there is an identity) of one block of the view."""
    block = view.blocks[number]
    kept = _of_blocks.get(block)
    if kept is None:
        kept = _of_blocks[block] = _identify(TableView((view.manifests[number],), (block,)))
    return kept


def _identify(view: TableView) -> tuple[Words, Mask]:
    """What is hashed is put together for all files at once: each path, and its counts behind it."""
    files = lookup(view, EVERYTHING)
    paths = files.texts("file_path")
    counts = np.stack([files.longs("file_size_in_bytes"), files.longs("record_count")], axis=1)
    known = (counts >= 0).all(axis=1) & (paths.present != 0)
    starts = paths.ends + _COUNTS_BYTES * np.arange(len(paths.ends), dtype=np.int64)
    heap = np.empty(int(starts[-1]), dtype=np.uint8)
    behind = (starts[1:, None] - _COUNTS_BYTES) + np.arange(_COUNTS_BYTES)
    is_path = np.ones(len(heap), dtype=np.bool_)
    is_path[behind] = False
    heap[is_path] = paths.data
    heap[behind] = np.ascontiguousarray(counts, dtype="<i8").view(np.uint8).reshape(-1, _COUNTS_BYTES)
    return np.stack([_hash.hash_spans(heap, starts, seed) for seed in (0, 1)], axis=1), known
