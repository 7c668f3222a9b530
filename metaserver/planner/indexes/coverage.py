"""Which files of a view an index describes: the identities of the view's files, looked up in those of index files.

The rule: an identity is of path, size and record count (`hashing.file_ids`), so an entry is right for every snapshot
that holds the file. Identities are computed once for each block, which snapshots share, and put in order once for each
view; they go with the block and the view. So does what index files cover of a view, which plans and lookups share. Of
files that a view lists twice, one is found.

A file whose size or record count nobody knows (Spark writes -1 for Avro files that it imports) has no identity, and
nothing describes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from metaserver.index.blocks.block import Block
from metaserver.index.blocks.packing import Longs
from metaserver.index.files.index_file import FilesTable
from metaserver.index.kernels import _hash
from metaserver.index.kinds.questions import Flags
from metaserver.planner.lookup.lookup import lookup
from metaserver.planner.lookup.prefix import EVERYTHING
from metaserver.planner.view.view import TableView

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
    def ids(self) -> Words:
        """uint64[n, 2]: all of them, in ascending order."""
        return self._ids

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


class CoveredFiles(NamedTuple):
    """`rows` int64[files]: for each data file of an index file its row among all rows of the view, -1 where it has
    none."""

    location: str
    rows: Longs


class IndexFileRef(Protocol):
    """An index file, here or afar."""

    @property
    def location(self) -> str: ...

    @property
    def files(self) -> FilesTable: ...


class Coverage:
    """Which rows of a view the index files of one definition describe. Immutable."""

    def __init__(self, ids: FileIds, files: Iterable[IndexFileRef]) -> None:
        self.uncovered: Flags = np.ones(ids.rows, dtype=np.uint8)
        parts: list[CoveredFiles] = []
        for one in files:
            part = CoveredFiles(one.location, ids.find(one.files.ids))
            there = part.rows[part.rows >= 0]
            if len(there):
                self.uncovered[there] = 0
                parts.append(part)
        self.parts = tuple(parts)
        self._places: tuple[Longs, Longs] | None = None

    @property
    def size_bytes(self) -> int:
        places = 0 if self._places is None else 2 * self._places[0].nbytes
        return self.uncovered.nbytes + sum(part.rows.nbytes for part in self.parts) + places

    @property
    def files(self) -> int:
        """Rows of the view that are covered."""
        return len(self.uncovered) - int(self.uncovered.sum())

    @property
    def places(self) -> tuple[Longs, Longs]:
        """(number of the part, number of the file in it), each int64[rows of the view], -1 where uncovered."""
        if self._places is None:
            part_of = np.full(len(self.uncovered), -1, dtype=np.int64)
            file_of = np.full(len(self.uncovered), -1, dtype=np.int64)
            for number, part in enumerate(self.parts):
                files = np.flatnonzero(part.rows >= 0)
                part_of[part.rows[files]] = number
                file_of[part.rows[files]] = files
            self._places = part_of, file_of
        return self._places

    def file_at(self, row: int) -> tuple[str, int] | None:
        """(location of an index file, number of the data file in it) of a row of the view; None where uncovered."""
        part_of, file_of = self.places
        return None if part_of[row] < 0 else (self.parts[part_of[row]].location, int(file_of[row]))


async def coverages(view: TableView, wanted: Mapping[str, Sequence[IndexFileRef]]) -> dict[str, Coverage]:
    """By definition id, what these index files of it cover. The last of each is kept as long as the view."""
    kept = _covered.setdefault(view, {})
    locations = {definition_id: tuple(one.location for one in files) for definition_id, files in wanted.items()}
    stale = [one for one in wanted if one not in kept or kept[one][0] != locations[one]]
    found = {one: kept[one][1] for one in wanted if one not in stale}
    if stale:

        def cover() -> dict[str, Coverage]:
            ids = file_ids_of(view)
            return {one: Coverage(ids, wanted[one]) for one in stale}

        made = await asyncio.to_thread(cover)
        kept.update({one: (locations[one], coverage) for one, coverage in made.items()})
        found |= made
    return found


def coverages_bytes(view: TableView) -> int:
    """What is kept of them beside the view."""
    kept = _covered.get(view)
    if not kept:
        return 0
    return file_ids_of(view).size_bytes + sum(coverage.size_bytes for _, coverage in kept.values())


_of_views: WeakKeyDictionary[TableView, FileIds] = WeakKeyDictionary()
_covered: WeakKeyDictionary[TableView, dict[str, tuple[tuple[str, ...], Coverage]]] = WeakKeyDictionary()
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
