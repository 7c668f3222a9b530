"""Evaluation of deletes: which of the given rows of a snapshot's data files are deleted.

Every row is live, deleted, or undecided with a reason. If a read fails, a row is undecided, never live. Position
deletes and deletion vectors apply by position. Equality deletes apply by the row's values. If the caller has these
values, as a lookup by key does, they are used. Otherwise, they are read from the data file for these rows, up to a
limit. Clients differ about 0.0 = -0.0. If this equality decides whether a row is deleted, the row is undecided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.files.budget import Budget
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.name_mapping import read_name_mapping
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import (
    EQUALITY,
    Columns,
    Content,
    DeletedKeys,
    DeleteFile,
    Positions,
    merge_zeros,
)
from seamark.formats.index.keys.hashing import Hashes, hash_halves
from seamark.formats.index.keys.keys import Keys, Mask
from seamark.formats.index.keys.terms import resolve_term_by_id
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.deletes.delete_files import DeleteFiles, list_delete_files_at
from seamark.metaserver.planner.rows.data_columns import DataRows
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

DELETES_LIMIT_BYTES = 256 << 20
"""The maximum size of the delete files that one request reads.

If further delete files apply to a row, the row is undecided.
"""
CONTENTS_LIMIT_BYTES = 512 << 20
"""The maximum memory of the decoded delete files of one request."""
DATA_LIMIT_BYTES = 256 << 20
"""The maximum number of bytes of data files that one request fetches."""
PROBLEMS_MAX = 100
"""The maximum number of files for which an answer has the reason why rows are undecided."""
_FILE_SIZE_FIELDS = ("file_size_in_bytes", "record_count")
_IN_LOOP_ROWS_MAX = 200
"""The maximum number of rows that are evaluated in the event loop, because a thread would take longer."""

_Pair = tuple[Hashes, Hashes]
_Groups = list[tuple[int, Longs]]
"""Pairs of the position of a data file in the view, and the indexes of its rows among the evaluated rows."""


class RowDeletion(NamedTuple):
    """Whether each row is deleted, and whether each row is undecided, bool[n] each.

    If both are True, the row is deleted: the deletes that could not be evaluated make no difference.
    """

    deleted: Mask
    undecided: Mask


class RowDeletes:
    """Makes evaluators of deletes, which share a cache of delete files.

    An instance belongs to one event loop.
    """

    def __init__(self, objects: ObjectStore, decoded_bytes_max: int) -> None:
        """Create the cache of delete files.

        Args:
            objects: The storage.
            decoded_bytes_max: The memory limit of one decoded delete file, and of the decoded data files of one
                request.
        """
        self._objects = objects
        self._decoded_bytes_max = decoded_bytes_max
        self._files = DeleteFiles(objects, decoded_bytes_max)

    def make_evaluator(self, scan: ScanPlan, known_keys: Mapping[int, Keys] | None = None) -> DeleteEvaluator:
        """Return an evaluator for one request.

        Args:
            scan: The plan of the snapshot.
            known_keys: The columns whose values the caller has, by column id.
        """
        mapping = read_name_mapping(scan.metadata.properties)
        loop = asyncio.get_running_loop()
        data = DataRows(self._objects, loop, mapping, DATA_LIMIT_BYTES, self._decoded_bytes_max)
        return DeleteEvaluator(scan, self._files, data, known_keys or {})


class DeleteEvaluator:
    """Evaluates the deletes of rows in batches, within the limits of one request.

    `problems` contains the first reasons why rows are undecided, by file.
    """

    def __init__(self, scan: ScanPlan, files: DeleteFiles, data: DataRows, known_keys: Mapping[int, Keys]) -> None:
        self._scan = scan
        self.view = scan.view
        self._reader = files
        self.data = data
        self._known_keys = known_keys
        self.files: dict[int, DeleteFile] = {}
        self.columns: dict[int, Columns] = {}
        self.contents: dict[int, Content | Unreadable] = {}
        self._remaining_bytes = DELETES_LIMIT_BYTES
        self._contents = Budget(CONTENTS_LIMIT_BYTES, "the delete files of one request take")
        self._hashes: dict[Columns, tuple[_Pair, _Pair | None]] = {}
        self.problems: dict[str, str] = {}

    async def evaluate(self, data_files: Longs, positions: Longs, keys: Longs | None = None) -> RowDeletion:
        """Return which rows are deleted, and which are undecided.

        Calls must not overlap.

        Args:
            data_files: The position in the view of each row's data file, int64[n].
            positions: The number of each row in its file, int64[n].
            keys: The index of each row in the known columns, int64[n], or None if no columns are known.
        """
        deletion = RowDeletion(np.zeros(len(data_files), dtype=np.bool_), np.zeros(len(data_files), dtype=np.bool_))
        if not len(data_files) or not self.view.delete_file_count:
            return deletion
        is_quick = len(data_files) <= _IN_LOOP_ROWS_MAX
        delete_parts = (
            self._find_deletes(data_files) if is_quick else await asyncio.to_thread(self._find_deletes, data_files)
        )
        groups, deletes_by_file, unread = delete_parts
        self.contents |= await self._reader.read_all(unread, self._contents)
        evaluation = _Evaluation(self, positions, keys, deletion)
        if is_quick and not any(
            isinstance(self.contents[number], DeletedKeys) for deletes in deletes_by_file for number in deletes
        ):
            evaluation.evaluate_files(groups, deletes_by_file)
        else:
            await asyncio.to_thread(evaluation.evaluate_files, groups, deletes_by_file)  # It may read data files.
        return deletion

    def _find_deletes(
        self, data_files: Longs
    ) -> tuple[_Groups, list[tuple[int, ...]], list[tuple[int, DeleteFile, Columns]]]:
        """Return the rows of each data file, the deletes that apply to each file, and the deletes that are unread.

        A delete file whose key columns are not supported, or that exceeds the limit of the request, is not read.
        `contents` then has the reason in place of the content of the file.
        """
        order = np.argsort(data_files, kind="stable")
        ends = [*(np.flatnonzero(np.diff(data_files[order])) + 1).tolist(), len(data_files)]
        groups = [(int(data_files[order[start]]), order[start:end]) for start, end in pairwise((0, *ends))]
        entry_ids = self.view.find_entry_ids(np.array([data_file for data_file, _ in groups], dtype=np.int64))
        deletes_by_file = self._scan.find_deletes_by_file(entry_ids)
        new_numbers = {number for deletes in deletes_by_file for number in deletes} - self.files.keys()
        unread: list[tuple[int, DeleteFile, Columns]] = []
        for number, file in list_delete_files_at(self.view, sorted(new_numbers)).items():
            self.files[number] = file
            columns = find_key_columns(self._scan.metadata, file)
            self._remaining_bytes -= max(0, file.read_bytes)
            if isinstance(columns, Unreadable):
                self.contents[number] = columns
            elif self._remaining_bytes < 0:
                reason = f"one request reads at most {DELETES_LIMIT_BYTES:,} bytes of delete files"
                self.contents[number] = Unreadable(file.path, reason)
            else:
                self.columns[number] = columns
                unread.append((number, file, columns))
        return groups, deletes_by_file, unread

    def hash_rows(self, columns: Columns, rows: Longs) -> tuple[_Pair, _Pair | None] | None:
        """Return two hashes of the known columns in some rows. In the second hash, 0.0 and -0.0 are equal.

        Args:
            columns: The key columns of an equality delete.
            rows: The indexes of the rows in the known columns.

        Returns:
            The hashes. The second hash is None if no column has floats. The result is None if the values are unknown.
        """
        if not all(column_id in self._known_keys for column_id, _ in columns):
            return None
        if columns not in self._hashes:
            self._hashes[columns] = _hash_keys([self._known_keys[column_id] for column_id, _ in columns])
        exact_hashes, merged_hashes = self._hashes[columns]
        return _select_pair(exact_hashes, rows), None if merged_hashes is None else _select_pair(merged_hashes, rows)

    def add_problem(self, problem: Unreadable) -> None:
        """Record why rows are undecided, unless there are too many problems."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.setdefault(problem.path, problem.reason)


def find_key_columns(metadata: TableMetadata, file: DeleteFile) -> Columns | Unreadable:
    """Return the key columns of an equality delete, with their types, or the reason why they are unknown."""
    if file.content != EQUALITY:
        return ()
    try:
        terms = [
            resolve_term_by_id(IDENTITY, column_id, metadata.current_schema, metadata.schemas)
            for column_id in file.columns
        ]
    except BadRequest as error:
        return Unreadable(file.path, f"the key columns are not supported: {error.message}")
    if not terms:
        return Unreadable(file.path, "the manifest entry has no equality_ids")
    return tuple((term.column_id, term.kind) for term in terms)


@dataclass
class _Evaluation:
    """The state of one call of `DeleteEvaluator.evaluate`."""

    evaluator: DeleteEvaluator
    positions: Longs
    keys: Longs | None
    deletion: RowDeletion

    def evaluate_files(self, groups: _Groups, deletes_by_file: Iterable[tuple[int, ...]]) -> None:
        """Evaluate the deletes that apply to each data file, and mark the deleted and undecided rows in `deletion`.

        Args:
            groups: The position of each data file in the view, and the indexes of its rows among the evaluated rows.
            deletes_by_file: For each data file, the numbers of the delete files that apply to it.
        """
        for (data_file, rows), deletes in zip(groups, deletes_by_file, strict=True):
            if deletes:
                self._evaluate_file(data_file, rows, deletes)

    def _evaluate_file(self, data_file: int, rows: Longs, deletes: tuple[int, ...]) -> None:
        """Evaluate the deletes that apply to some rows of one data file.

        Position deletes are evaluated first. Equality deletes then need the values of the remaining rows only.
        """
        evaluator, view = self.evaluator, self.evaluator.view
        block, local = view.locate(int(view.find_entry_ids(np.array([data_file], dtype=np.int64))[0]))
        path = block.read_text("file_path", local) or ""
        if sum(evaluator.files[number].is_vector for number in deletes) > 1:
            self._mark_undecided(rows, Unreadable(path, "the file has several deletion vectors, which readers reject"))
        deletes_by_columns: dict[Columns, list[DeletedKeys]] = {}
        for number in deletes:
            content = evaluator.contents[number]
            if isinstance(content, Unreadable):
                self._mark_undecided(rows, content)
            elif isinstance(content, Positions):
                self.deletion.deleted[rows] |= _mark_members(self.positions[rows], content.get_positions(path))
            else:
                deletes_by_columns.setdefault(evaluator.columns[number], []).append(content)
        for columns, key_sets in deletes_by_columns.items():
            live_rows = rows[~self.deletion.deleted[rows]]
            if len(live_rows):
                size_bytes, records = (block.read_long(name, local) or 0 for name in _FILE_SIZE_FIELDS)
                self._evaluate_by_keys(path, (size_bytes, records), live_rows, columns, key_sets)

    def _mark_undecided(self, rows: Longs, problem: Unreadable) -> None:
        self.deletion.undecided[rows] = True
        self.evaluator.add_problem(problem)

    def _evaluate_by_keys(
        self,
        path: str,
        size_and_records: tuple[int, int],
        rows: Longs,
        columns: Columns,
        key_sets: Sequence[DeletedKeys],
    ) -> None:
        """Evaluate equality deletes with the same key columns for some rows of one data file.

        A row is deleted if its hash is among the deleted keys. If it is only among them with equal zeros (0.0 and
        -0.0), it is undecided, because readers differ.

        Args:
            path: The path of the data file.
            size_and_records: The size of the file in bytes, and its number of rows.
            rows: The indexes of the rows among the evaluated rows.
            columns: The key columns.
            key_sets: The deleted keys of each delete file.
        """
        try:
            exact_hashes, merged_hashes = self._hash_rows(path, size_and_records, rows, columns)
        except Unreadable as problem:
            self._mark_undecided(rows, problem)
            return
        for deleted_keys in key_sets:
            self.deletion.deleted[rows] |= deleted_keys.exact.has(*exact_hashes)
            if deleted_keys.with_equal_zeros is not None and merged_hashes is not None:
                undecided_rows = rows[deleted_keys.with_equal_zeros.has(*merged_hashes) & ~self.deletion.deleted[rows]]
                if len(undecided_rows):
                    self._mark_undecided(
                        undecided_rows,
                        Unreadable(path, "the row is deleted only if 0.0 equals -0.0, and readers differ about this"),
                    )

    def _hash_rows(
        self, path: str, size_and_records: tuple[int, int], rows: Longs, columns: Columns
    ) -> tuple[_Pair, _Pair | None]:
        """Return the exact hashes of the key columns of some rows, and the hashes in which -0.0 equals 0.0.

        If the values are not known from the request, they are read from the data file in the order of positions. The
        hashes are then brought back into the order of `rows`. The second result is None if no column has floats.

        Raises:
            Unreadable: The values cannot be read from the data file.
        """
        known_hashes = None if self.keys is None else self.evaluator.hash_rows(columns, self.keys[rows])
        if known_hashes is not None:
            return known_hashes
        order = np.argsort(self.positions[rows], kind="stable")
        positions = self.positions[rows[order]]
        column_ids = [column_id for column_id, _ in columns]
        with self.evaluator.data.read(path, *size_and_records, column_ids, positions) as values:
            try:
                exact_hashes, merged_hashes = _hash_keys(
                    [convert_to_keys(values[column_id], kind) for column_id, kind in columns]
                )
            except ValueError as error:
                raise Unreadable(path, str(error)) from None
        inverse = np.argsort(order, kind="stable")
        return (
            _select_pair(exact_hashes, inverse),
            None if merged_hashes is None else _select_pair(merged_hashes, inverse),
        )


def _hash_keys(columns: list[Keys]) -> tuple[_Pair, _Pair | None]:
    """Return the exact hash of each key, and the hash in which -0.0 equals 0.0, or None if no column has floats."""
    columns_with_merged_zeros = merge_zeros(columns)
    return hash_halves(columns), None if columns_with_merged_zeros is None else hash_halves(columns_with_merged_zeros)


def _select_pair(pair: _Pair, indexes: Longs) -> _Pair:
    return pair[0][indexes], pair[1][indexes]


def _mark_members(values: Longs, sorted_values: Longs) -> npt.NDArray[np.bool_]:
    """Return whether each value is in `sorted_values`, as bool[n]."""
    if not len(sorted_values):
        return np.zeros(len(values), dtype=np.bool_)
    positions = np.minimum(np.searchsorted(sorted_values, values), len(sorted_values) - 1)
    mask: Mask = sorted_values[positions] == values
    return mask
