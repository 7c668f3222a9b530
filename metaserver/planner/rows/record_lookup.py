"""Record lookup: the data file and the position of each row with one of the keys, and whether it may be deleted.

The result contains each row once. It contains only rows of files that are live in the snapshot, and no rows that are
certainly deleted. Files that the index does not cover may contain more rows. These files are counted and listed, so
that the client can see that the answer is incomplete. A row that may be deleted is returned and marked.

Keys are compared as in the index: null equals null, NaN equals NaN, and -0.0 differs from 0.0. Keys are hashes of 128
bits (`record.py`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.kernels._record import ENTRIES_A_PAGE, stretches
from seamark.formats.index.keys.hashing import Hashes, hash_halves
from seamark.formats.index.keys.keys import Keys, Mask
from seamark.formats.index.kinds.kind import REMOTE_KEYS_MAX
from seamark.formats.index.kinds.record import RecordBlob, RowPositions
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import TooLarge
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.planner.indexes.resolver import IndexResolver, RecordIndex
from seamark.metaserver.planner.lookup.lookup import find_files_by_prefix
from seamark.metaserver.planner.rows.row_deletes import RowDeletes
from seamark.metaserver.planner.scan.scan_plan import ScanPlan
from seamark.metaserver.runtime.gathering import gather
from seamark.metaserver.store.model import Entry

KEYS_MAX = 1_000_000
"""The maximum number of keys of one lookup."""
ROWS_MAX = 4_000_000
"""The maximum number of rows of one lookup, including deleted rows and rows of other snapshots."""
_KEYS_PER_BATCH = 1 << 16
_THREADS = max(1, len(os.sched_getaffinity(0)))
_IN_LOOP_KEYS_MAX = 200
_IN_LOOP_BYTES_MAX = 64 << 10
"""A lookup with at most this many keys and bytes runs on the event loop, because a thread would take longer."""


@dataclass(frozen=True)
class LocatedRows:
    """The located rows in the order of their keys, with arrays of one item per row.

    Attributes:
        query: int64[rows]: the number of the key in the request.
        data_file: int64[rows]: the position of the data file in the view.
        position: int64[rows]: the number of the row in the file.
        undecided: bool[rows]: whether it is unknown if the row is deleted.
        uncovered: int64[files]: the positions of live files that the index does not cover.
    """

    query: Longs
    data_file: Longs
    position: Longs
    undecided: Mask
    uncovered: Longs
    problems: Mapping[str, str]
    """The first reasons why it is unknown whether rows are deleted, by file."""


class Locator:
    """Locates rows by key.

    An instance belongs to one event loop.
    """

    def __init__(self, resolver: IndexResolver, row_deletes: RowDeletes, usage: Usage, clock: Clock) -> None:
        self._resolver = resolver
        self._row_deletes = row_deletes
        self._usage = usage
        self._clock = clock

    async def locate(
        self,
        scan: ScanPlan,
        definition: IndexDefinition,
        columns: Sequence[Keys],
        possible_keys: Mask | None,
        entry: Entry,
    ) -> LocatedRows:
        """Locate the rows with these keys in a scan of a whole snapshot. Deleted rows are left out.

        Args:
            definition: The record index.
            columns: The keys, one column for each term of the record index.
            scan: The plan of all files of the snapshot.
            possible_keys: bool[keys]: whether each key can exist. None if all keys can exist.
        """
        view = scan.view
        keys = _LookupKeys(columns, possible_keys)
        search = _Search(await self._resolver.open_records(view, definition, entry, await keys.get_if_few()), keys)
        evaluator = self._row_deletes.make_evaluator(scan, _find_column_keys(definition, columns))
        parts = [_make_empty_result()]
        # The keys are looked up in batches, so that no step holds the GIL for long.
        for start in range(0, keys.count, _KEYS_PER_BATCH):
            query, data_file, position = (
                search.search_batch(start) if keys.is_quick else await search.search_batch_in_threads(start)
            )
            deletion = await evaluator.evaluate(data_file, position, query)
            is_live = ~deletion.deleted
            parts.append((query[is_live], data_file[is_live], position[is_live], deletion.undecided[is_live]))
        combine = partial(_combine_parts, parts, search.uncovered)
        located_rows, removed_files = combine() if keys.is_quick else await asyncio.to_thread(combine)
        self._usage.note(
            entry.uuid,
            definition.id,
            files_in=view.file_count,
            files_removed=removed_files,
            now_ms=self._clock.now_ms(),
        )
        await self._resolver.schedule_verification(entry, search.damaged)
        uncovered_files = located_rows.uncovered
        if len(uncovered_files):
            uncovered_files = uncovered_files[
                find_files_by_prefix(view).read_longs("record_count")[uncovered_files] != 0
            ]
        return replace(located_rows, uncovered=uncovered_files, problems=evaluator.problems)


def _combine_parts(
    parts: Sequence[tuple[Longs, Longs, Longs, Mask]], uncovered_flags: npt.NDArray[np.uint8]
) -> tuple[LocatedRows, int]:
    """Combine the rows of all batches.

    Args:
        parts: The rows of each batch, as four arrays: the number of the key, the position of the data file in the
            view, the number of the row in the file, and whether it is unknown if the row is deleted.
        uncovered_flags: uint8[files of the view]: 1 for files that the index does not cover.

    Returns:
        The located rows, and the number of files that the index excludes.
    """
    key_numbers, data_file, position, is_undecided = (np.concatenate(column) for column in zip(*parts, strict=True))
    is_kept = uncovered_flags != 0
    is_kept[data_file] = True
    removed_files = len(is_kept) - int(np.count_nonzero(is_kept))
    uncovered_files = np.flatnonzero(uncovered_flags)
    return LocatedRows(key_numbers, data_file, position, is_undecided, uncovered_files, {}), removed_files


def _find_column_keys(definition: IndexDefinition, columns: Sequence[Keys]) -> dict[int, Keys]:
    """Return the keys of the terms that are plain columns, by column id.

    Terms with a function are left out, because their keys are not values of the column.
    """
    terms = zip(definition.terms, columns, strict=True)
    return {term.column_id: keys for term, keys in terms if term.transform == IDENTITY}


def _make_empty_result() -> tuple[Longs, Longs, Longs, Mask]:
    no_values = np.empty(0, dtype=np.int64)
    return no_values, no_values, no_values, np.empty(0, dtype=np.bool_)


_Rows = tuple[Longs, Longs, Longs]
"""For each located row: the number of its key, the position of its data file in the view, and its number in the file.
"""


class _IndexFileRows(NamedTuple):
    """The rows of the keys in the index file with this number, or the reason why the file cannot be searched."""

    number: int
    rows: _Rows | None
    reason: str = ""


class _LookupKeys:
    """The keys of one request, with the hash of each key, in batches.

    The hash has two halves. Keys that no row can have are left out of the batches.
    """

    def __init__(self, columns: Sequence[Keys], possible_keys: Mask | None) -> None:
        self._columns, self._possible_keys = columns, possible_keys
        self._hashes: tuple[Hashes, Hashes] | None = None
        self.count = columns[0].rows
        heap_bytes = sum(len(column.heap) for column in columns if column.heap is not None)
        self.is_quick = self.count <= _IN_LOOP_KEYS_MAX and heap_bytes <= _IN_LOOP_BYTES_MAX

    async def get_if_few(self) -> tuple[Hashes, Hashes] | None:
        """Return the two halves of the hashes of all keys, or None if there are too many keys for remote reads."""
        if self.count > REMOTE_KEYS_MAX:
            return None
        return (self.get_batch(0) if self.is_quick else await asyncio.to_thread(self.get_batch, 0))[1:]

    def get_batch(self, start: int) -> tuple[Longs, Hashes, Hashes]:
        """Return (numbers of the keys, the two halves of their hashes) of the batch that begins at `start`."""
        if self._hashes is None:
            self._hashes = hash_halves(self._columns)
        numbers = np.arange(start, min(start + _KEYS_PER_BATCH, self.count))
        if self._possible_keys is not None:
            numbers = numbers[self._possible_keys[numbers]]
        return numbers, self._hashes[0][numbers], self._hashes[1][numbers]


class _Search:
    """Looks up the keys of one request in all index files, batch by batch.

    `damaged` collects the reasons why index files are damaged, by location. `uncovered`, uint8[files of the view], is 1
    for data files that the index does not cover, and for the data files of damaged index files.
    """

    def __init__(self, index: RecordIndex, keys: _LookupKeys) -> None:
        self._index, self._keys = index, keys
        self._coverage = index.coverage
        self._total, self._count_lock = 0, Lock()
        self.damaged: dict[str, str] = {}
        self.uncovered = index.coverage.uncovered.copy()

    def search_batch(self, start: int) -> _Rows:
        """Look up one batch of keys, and return the located rows, sorted by key.

        Returns:
            The arrays `query`, `data_file` and `position` of `LocatedRows`.
        """
        return self._merge_results([self._search_parts(range(len(self._coverage.parts)), *self._keys.get_batch(start))])

    async def search_batch_in_threads(self, start: int) -> _Rows:
        """Look up one batch of keys as `search_batch` does, but search several index files in parallel.

        A lookup mostly waits for memory, and does not hold the GIL while it waits.
        """
        batch = await asyncio.to_thread(self._keys.get_batch, start)
        index_files = len(self._coverage.parts)
        threads = min(_THREADS, index_files)
        results = await gather(
            [
                partial(asyncio.to_thread, self._search_parts, range(number, index_files, threads), *batch)
                for number in range(threads)
            ]
        )
        return await asyncio.to_thread(self._merge_results, results)

    def _search_parts(self, numbers_of_parts: range, numbers: Longs, high: Hashes, low: Hashes) -> list[_IndexFileRows]:
        """Search a batch of keys in some index files.

        Args:
            numbers_of_parts: The numbers of the index files.
            numbers: The numbers of the keys.
            high: The first halves of the hashes.
            low: The second halves of the hashes.

        Returns:
            The rows in each file. If a file is damaged, its result has the reason instead of rows. Files with damage
            that was found earlier are left out.

        Raises:
            TooLarge: The keys have too many rows.
        """
        results = []
        for number in numbers_of_parts:
            part = self._coverage.parts[number]
            if part.location in self.damaged:
                continue
            try:
                key_numbers, data_file, position = self._search_part(number, high, low)
            except ValueError as error:
                # Results for earlier keys stay valid, because every page is verified before use.
                results.append(_IndexFileRows(number, None, str(error)))
                continue
            results.append(_IndexFileRows(number, (numbers[key_numbers], data_file, position)))
            with self._count_lock:
                self._total += len(key_numbers)
            if self._total > ROWS_MAX:
                raise TooLarge(f"The keys have more than {ROWS_MAX:,} rows; send fewer keys in one request")
        return results

    def _merge_results(self, results: Sequence[Sequence[_IndexFileRows]]) -> _Rows:
        """Merge the rows from all index files, sorted by key. Record the damaged index files.

        The data files of a damaged index file are marked as not covered by the index, so that the client reads them.
        """
        parts = [_make_empty_result()[:3]]  # The rows are not evaluated yet, so the array `undecided` is left out.
        for result in sorted(chain.from_iterable(results), key=lambda result: result.number):
            if result.rows is None:
                self.damaged[self._coverage.parts[result.number].location] = result.reason
                index_file_numbers, _ = self._coverage.by_position  # The number of the index file of each data file.
                self.uncovered[index_file_numbers == result.number] = 1
            else:
                parts.append(result.rows)
        key_numbers, data_file, position = (np.concatenate(column) for column in zip(*parts, strict=True))
        if len(parts) > 2:  # Besides the empty part, there are rows of several index files.
            order = np.argsort(key_numbers, kind="stable")
            key_numbers, data_file, position = key_numbers[order], data_file[order], position[order]
        return key_numbers, data_file, position

    def _search_part(self, number: int, high: Hashes, low: Hashes) -> tuple[Longs, Longs, Longs]:
        """Search a batch of keys in one index file, and locate their rows in the data files that it covers.

        Returns:
            For each row: the number of its key in the batch, the position of its data file in the view, and the number
            of the row in the data file.
        """
        part = self._coverage.parts[number]
        part_numbers, entry_numbers = self._coverage.by_position
        key_numbers, file, position = self._look_up_file(part.location, high, low)
        data_file = part.positions[file]
        is_in_part = data_file >= 0
        # If two index files cover a data file, only the rows from one of them are used.
        is_in_part[is_in_part] = (part_numbers[data_file[is_in_part]] == number) & (
            entry_numbers[data_file[is_in_part]] == file[is_in_part]
        )
        return key_numbers[is_in_part], data_file[is_in_part], position[is_in_part].astype(np.int64)

    def _look_up_file(self, location: str, high: Hashes, low: Hashes) -> RowPositions:
        """Return the rows of the keys in one index file, including rows of data files that are not in the view.

        Raises:
            TooLarge: The keys have too many rows.
        """
        if location in self._index.remote:
            return self._index.remote[location].rows
        record = self._index.open_indexes[location].index
        assert isinstance(record, RecordBlob)
        if record.count > ROWS_MAX:
            _refuse_too_many_rows(record, high)
        return record.lookup(high, low)


def _refuse_too_many_rows(record: RecordBlob, high_halves: Hashes) -> None:
    """Refuse keys with too many rows before their rows are read.

    The index stores the hashes in pages. The number of pages with the hashes of the keys shows about how many rows the
    keys have.

    Args:
        record: The index.
        high_halves: The upper half of the hash of each key.

    Raises:
        TooLarge: The rows of the keys fill more pages than `ROWS_MAX` rows may.
    """
    # Each span is a range of pages that may have the hashes: its first page, and the page after its last page.
    spans = stretches(record.fences.first_hashes, np.sort(high_halves))
    pages = int((spans[:, 1] - spans[:, 0]).sum())
    # The first and the last page of a key may also have rows of other keys, so only the pages between them are counted.
    if (pages - 2 * len(high_halves)) * ENTRIES_A_PAGE > ROWS_MAX:
        raise TooLarge(
            f"The keys have more than {ROWS_MAX:,} rows in one index file; look up fewer keys, or keys with fewer rows"
        )
