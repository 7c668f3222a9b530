"""Coverage: the files of a view for which an index has entries.

A file's identity is a hash of path, size and record count (`hashing.compute_file_ids`), so an entry is valid for every
snapshot that contains the file. The identities in index files are matched with the identities of the view's files. The
identities of the view's files are computed once per block, which snapshots share, and sorted once per view. They stay
in memory as long as the block and the view. Plans and lookups share a view's coverage. If a view lists a file twice,
only one of its positions is matched.

A file without a known size or record count (Spark writes -1 for imported Avro files) has no identity, so no index
covers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from seamark.formats.index.index_file import FilesTable
from seamark.formats.index.kernels import _hash
from seamark.formats.index.kinds.queries import Flags
from seamark.formats.index.packing import Longs
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.lookup.prefix import EVERYTHING
from seamark.metaserver.planner.view.view import TableView

Words: TypeAlias = npt.NDArray[np.uint64]
Mask: TypeAlias = npt.NDArray[np.bool_]

_COUNTS_BYTES = 16
"""The number of bytes after the path in the hash input: the size and the record count of the file."""


class FileIds:
    """The identities of the data files of a view, by position in the view."""

    def __init__(self, view: TableView) -> None:
        ids, is_known = list_file_ids(view)
        self.count = len(ids)
        identified_files = np.flatnonzero(is_known)
        self._order: Longs = identified_files[np.lexsort((ids[identified_files, 1], ids[identified_files, 0]))]
        self._ids: Words = ids[self._order]

    @property
    def size_bytes(self) -> int:
        return self._order.nbytes + self._ids.nbytes

    @property
    def ids(self) -> Words:
        """uint64[n, 2]: all identities in ascending order."""
        return self._ids

    @property
    def has_identity(self) -> Mask:
        """bool[count]: whether each file has an identity, by which index files refer to it.

        A file without a known size or record count has none.
        """
        mask = np.zeros(self.count, dtype=np.bool_)
        mask[self._order] = True
        return mask

    def find(self, ids: Words) -> Longs:
        """Return the position in the view of each file in `ids`, int64[n]; -1 if the view does not contain it.

        Args:
            ids: uint64[n, 2]: the identities of the files.
        """
        sorted_positions = find_ids(self._ids, ids)
        positions = np.full(len(ids), -1, dtype=np.int64)
        is_found = sorted_positions >= 0
        positions[is_found] = self._order[sorted_positions[is_found]]
        return positions

    def read_identities(self, positions: Longs) -> tuple[Words, Mask]:
        """Return the identities of the files at these positions in the view, and which files have one.

        Returns:
            uint64[n, 2], with zeros for a file without an identity, and bool[n].
        """
        ranks_of_files = np.full(self.count, -1, dtype=np.int64)
        ranks_of_files[self._order] = np.arange(len(self._order))
        ranks = ranks_of_files[positions]
        has_identity = ranks >= 0
        ids = np.zeros((len(positions), 2), dtype=np.uint64)
        ids[has_identity] = self._ids[ranks[has_identity]]
        return ids, has_identity

    def mark_files_in(self, ids: Words) -> Mask:
        """Return whether the identity of each file of the view is in `ids`, uint64[n, 2], as bool[count].

        If a view lists a file twice, the result is True for both positions.
        """
        mask = np.zeros(self.count, dtype=np.bool_)
        sorted_ids = ids[np.lexsort((ids[:, 1], ids[:, 0]))]
        mask[self._order[find_ids(sorted_ids, self._ids) >= 0]] = True
        return mask


def list_file_ids(view: TableView) -> tuple[Words, Mask]:
    """Return the identities of the view's files in the order of the view.

    Returns:
        uint64[n, 2], the identities, and bool[n], whether each file has an identity.
    """
    parts = [_get_block_ids(view, number) for number in range(len(view.blocks))]
    ids = np.concatenate([ids for ids, _ in parts]) if parts else np.empty((0, 2), dtype=np.uint64)
    is_known = np.concatenate([is_known for _, is_known in parts]) if parts else np.empty(0, dtype=np.bool_)
    return ids, is_known


def compute_view_file_ids(view: TableView) -> FileIds:
    """Return the identities of the view's files, sorted for searches.

    They are computed on first use, possibly in a thread, and cached as long as the view exists.
    """
    return view.derived.get(FileIds) or view.derived.keep(FileIds(view))


class CoveredFiles(NamedTuple):
    """The data files of an index file, and their positions in the view, the files of one snapshot.

    `positions`, int64[files], contains the position of each data file in the view; -1 if it is not in the view.
    """

    location: str
    positions: Longs


class IndexFileRef(Protocol):
    """An index file, in memory or read remotely. `files` lists the data files that it indexes."""

    @property
    def location(self) -> str: ...

    @property
    def files(self) -> FilesTable: ...


class Coverage:
    """The files of a view that the index files of one definition cover. An instance is immutable."""

    def __init__(self, ids: FileIds, files: Iterable[IndexFileRef]) -> None:
        self.uncovered: Flags = np.ones(ids.count, dtype=np.uint8)
        parts: list[CoveredFiles] = []
        for index_file in files:
            part = CoveredFiles(index_file.location, ids.find(index_file.files.ids))
            found_positions = part.positions[part.positions >= 0]
            if len(found_positions):
                self.uncovered[found_positions] = 0
                parts.append(part)
        self.parts = tuple(parts)
        self._by_position: tuple[Longs, Longs] | None = None

    @property
    def size_bytes(self) -> int:
        by_position = 0 if self._by_position is None else 2 * self._by_position[0].nbytes
        return self.uncovered.nbytes + sum(part.positions.nbytes for part in self.parts) + by_position

    @property
    def files(self) -> int:
        """The number of covered files of the view."""
        return len(self.uncovered) - int(self.uncovered.sum())

    @property
    def by_position(self) -> tuple[Longs, Longs]:
        """For each file of the view, the number of its index file, and the number of its entry in the index file.

        Both are int64[files of the view]; -1 for files that are not covered.
        """
        if self._by_position is None:
            part_numbers = np.full(len(self.uncovered), -1, dtype=np.int64)
            entry_numbers = np.full(len(self.uncovered), -1, dtype=np.int64)
            for number, part in enumerate(self.parts):
                entries = np.flatnonzero(part.positions >= 0)
                part_numbers[part.positions[entries]] = number
                entry_numbers[part.positions[entries]] = entries
            self._by_position = part_numbers, entry_numbers
        return self._by_position

    def find_index_file(self, position: int) -> tuple[str, int] | None:
        """Return (location of the index file, number of the entry in it) for the file at a position in the view.

        Returns:
            None if the file is not covered.
        """
        part_numbers, entry_numbers = self.by_position
        return (
            None
            if part_numbers[position] < 0
            else (self.parts[part_numbers[position]].location, int(entry_numbers[position]))
        )


async def compute_coverages(view: TableView, index_files: Mapping[str, Sequence[IndexFileRef]]) -> dict[str, Coverage]:
    """Return the coverage of each definition's index files, by definition id.

    The coverage says which files of the view an index file describes. The latest coverage of each definition is cached
    as long as the view exists, and is computed again if the index files have changed.
    """
    cached_coverages = (view.derived.get(_Coverages) or view.derived.keep(_Coverages())).by_definition
    locations = {definition_id: tuple(file.location for file in files) for definition_id, files in index_files.items()}
    stale_keys = [
        key for key in index_files if key not in cached_coverages or cached_coverages[key][0] != locations[key]
    ]
    coverage_by_key = {key: cached_coverages[key][1] for key in index_files if key not in stale_keys}
    if stale_keys:

        def compute() -> dict[str, Coverage]:
            ids = compute_view_file_ids(view)
            return {key: Coverage(ids, index_files[key]) for key in stale_keys}

        new_coverages = await asyncio.to_thread(compute)
        cached_coverages.update({key: (locations[key], coverage) for key, coverage in new_coverages.items()})
        coverage_by_key |= new_coverages
    return coverage_by_key


class _Coverages:
    """The cached coverages of a view, the files of one snapshot.

    A coverage says which data files of the view have an entry in an index file.
    """

    def __init__(self) -> None:
        self.by_definition: dict[str, tuple[tuple[str, ...], Coverage]] = {}
        """For each index, the locations of its index files, and their coverage."""

    @property
    def size_bytes(self) -> int:
        return sum(coverage.size_bytes for _, coverage in list(self.by_definition.values()))


class _BlockIds(NamedTuple):
    """The identities of a block's files, uint64[files, 2], and bool[files], whether each file has an identity."""

    ids: Words
    is_known: Mask

    @property
    def size_bytes(self) -> int:
        return self.ids.nbytes + self.is_known.nbytes


def find_ids(sorted_items: Words, ids: Words) -> Longs:
    """Return the position in `sorted_items` of each identity in `ids`, int64[n]; -1 if the identity is absent.

    Args:
        sorted_items: uint64[m, 2]: identities in ascending order.
        ids: uint64[n, 2]: the identities to find.
    """
    high, low = np.ascontiguousarray(sorted_items[:, 0]), sorted_items[:, 1]
    positions = np.full(len(ids), -1, dtype=np.int64)
    candidates = np.searchsorted(high, ids[:, 0], side="left")
    ends = np.searchsorted(high, ids[:, 0], side="right")
    remaining = np.flatnonzero(candidates < ends)
    # A second iteration occurs only if two identities share the first word.
    while len(remaining):
        is_same = low[candidates[remaining]] == ids[remaining, 1]
        positions[remaining[is_same]] = candidates[remaining[is_same]]
        remaining = remaining[~is_same]
        candidates[remaining] += 1
        remaining = remaining[candidates[remaining] < ends[remaining]]
    return positions


def _get_block_ids(view: TableView, number: int) -> _BlockIds:
    """Return the identities of the files of a block. They are cached with the block."""
    block = view.blocks[number]
    cached_ids = block.derived.get(_BlockIds)
    return (
        block.keep(_compute_block_ids(TableView((view.manifests[number],), (block,))))
        if cached_ids is None
        else cached_ids
    )


def _compute_block_ids(view: TableView) -> _BlockIds:
    """Compute the identities of a view's files: two hashes of the path, the size and the record count.

    The input of all hashes is built in one buffer: each path, followed by its size and record count. A file without a
    path, a size or a count has no identity.
    """
    files = find_files_by_prefix(view, EVERYTHING)
    paths = files.read_texts("file_path")
    counts = np.stack([files.read_longs("file_size_in_bytes"), files.read_longs("record_count")], axis=1)
    is_known = (counts >= 0).all(axis=1) & (paths.present != 0)
    starts = paths.ends + _COUNTS_BYTES * np.arange(len(paths.ends), dtype=np.int64)
    hash_input = np.empty(int(starts[-1]), dtype=np.uint8)
    count_positions = (starts[1:, None] - _COUNTS_BYTES) + np.arange(_COUNTS_BYTES)
    is_path = np.ones(len(hash_input), dtype=np.bool_)
    is_path[count_positions] = False
    hash_input[is_path] = paths.data
    hash_input[count_positions] = np.ascontiguousarray(counts, dtype="<i8").view(np.uint8).reshape(-1, _COUNTS_BYTES)
    return _BlockIds(np.stack([_hash.hash_spans(hash_input, starts, seed) for seed in (0, 1)], axis=1), is_known)
