"""Which rows of a snapshot's data files its delete files took, for rows that somebody found.

The rule it keeps: of every row the answer is live, deleted, or undecided with a reason; never live because something
could not be read. Position deletes and deletion vectors go by position. Equality deletes go by the row's values: those
that the caller knows (who looks rows up by a key knows its columns), else those that are read from the data file, of
these rows alone and within a bound. Clients differ on whether 0.0 equals -0.0: a row that only such an equality would
delete is undecided.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from metaserver.errors import BadRequest
from metaserver.iceberg.files.budget import Budget
from metaserver.iceberg.files.parquet import Unreadable
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.transforms import IDENTITY
from metaserver.index.blocks.packing import Longs
from metaserver.index.keys.delete_files import (
    EQUALITY,
    Columns,
    Content,
    DeletedKeys,
    DeleteFile,
    Positions,
    merge_zeros,
)
from metaserver.index.keys.hashing import Hashes, hash_halves
from metaserver.index.keys.keys import Keys, Mask, keys_of
from metaserver.index.keys.terms import resolve_id
from metaserver.objects.port import ObjectStore
from metaserver.planner.deletes.delete_files import DeleteFiles, delete_files_at
from metaserver.planner.rows.data_columns import DataRows
from metaserver.planner.scan.scan import Scan
from metaserver.planner.view.view import ROW_BITS, TableView

DELETES_LIMIT_BYTES = 256 << 20
"""Of the delete files of one request; those beyond are not read, and rows that they apply to are undecided."""
CONTENTS_LIMIT_BYTES = 512 << 20
"""Of what the delete files of one request say, in memory."""
DATA_LIMIT_BYTES = 256 << 20
"""Of data files, fetched for one request."""
PROBLEMS_MAX = 100
_QUICK_ROWS = 200
"""So many are judged where they came in; a thread would take longer."""

_Pair = tuple[Hashes, Hashes]
_Groups = list[tuple[int, Longs]]
"""Of each data file its place, and which of the rows that are judged are its own."""


class RowDeletion(NamedTuple):
    """bool[n] each. A row may be both, when not all could be read: then it is deleted."""

    deleted: Mask
    undecided: Mask


class RowDeletes:
    """Belongs to one event loop."""

    def __init__(self, objects: ObjectStore, decoded_bytes: int) -> None:
        """`decoded_bytes` is what one delete file, or the rows of data files for one request, may take in memory."""
        self._objects = objects
        self._decoded_bytes = decoded_bytes
        self._files = DeleteFiles(objects, decoded_bytes)

    def evaluator_of(self, scan: Scan, known: Mapping[int, Keys] | None = None) -> DeleteEvaluator:
        """For one request. `known`: columns by id whose values are known of the rows that will be judged."""
        data = DataRows(self._objects, asyncio.get_running_loop(), DATA_LIMIT_BYTES, self._decoded_bytes)
        return DeleteEvaluator(scan, self._files, data, known or {})


class DeleteEvaluator:
    """Judges rows, some after others, within the bounds of one request. `problems` tell by file why rows were left
    undecided, the first of them."""

    def __init__(self, scan: Scan, files: DeleteFiles, data: DataRows, known: Mapping[int, Keys]) -> None:
        self._scan = scan
        self.view = scan.view
        self._reader = files
        self.data = data
        self._known = known
        self.files: dict[int, DeleteFile] = {}
        self.columns: dict[int, Columns] = {}
        self.contents: dict[int, Content | Unreadable] = {}
        self._left_bytes = DELETES_LIMIT_BYTES
        self._contents = Budget(CONTENTS_LIMIT_BYTES, "the delete files of one request take")
        self._hashes: dict[Columns, tuple[_Pair, _Pair | None]] = {}
        self.problems: dict[str, str] = {}

    async def evaluate(self, places: Longs, positions: Longs, keys: Longs | None = None) -> RowDeletion:
        """Of rows of data files: the file's place among all files of the scan's view, the row's position in it, and
        where columns are known the row's place in those, int64[n] each. One call at a time."""
        deletion = RowDeletion(np.zeros(len(places), dtype=np.bool_), np.zeros(len(places), dtype=np.bool_))
        if not len(places) or not self.view.delete_rows:
            return deletion
        quick = len(places) <= _QUICK_ROWS
        found = self._applying(places) if quick else await asyncio.to_thread(self._applying, places)
        groups, applying, unread = found
        self.contents |= await self._reader.read_all(unread, self._contents)
        work = _Judging(self, positions, keys, deletion)
        if quick and not any(isinstance(self.contents[one], DeletedKeys) for many in applying for one in many):
            work.run(groups, applying)
        else:
            await asyncio.to_thread(work.run, groups, applying)  # which may read data files
        return deletion

    def _applying(self, places: Longs) -> tuple[_Groups, list[tuple[int, ...]], list[tuple[int, DeleteFile, Columns]]]:
        """The rows by data file, the deletes that apply to each, and those of them that are still to be read."""
        order = np.argsort(places, kind="stable")
        ends = [*(np.flatnonzero(np.diff(places[order])) + 1).tolist(), len(places)]
        groups = [(int(places[order[start]]), order[start:end]) for start, end in pairwise((0, *ends))]
        names = names_of(self.view, np.array([place for place, _ in groups], dtype=np.int64))
        applying = self._scan.deletes_of(names)
        fresh = {number for deletes in applying for number in deletes} - self.files.keys()
        unread: list[tuple[int, DeleteFile, Columns]] = []
        for number, file in delete_files_at(self.view, sorted(fresh)).items():
            self.files[number] = file
            columns = columns_of(self._scan.metadata, file)
            self._left_bytes -= max(0, file.read_bytes)
            if isinstance(columns, Unreadable):
                self.contents[number] = columns
            elif self._left_bytes < 0:
                most = f"one request reads no more than {DELETES_LIMIT_BYTES:,} bytes of delete files"
                self.contents[number] = Unreadable(file.path, most)
            else:
                self.columns[number] = columns
                unread.append((number, file, columns))
        return groups, applying, unread

    def hashes_of(self, columns: Columns, rows: Longs) -> tuple[_Pair, _Pair | None] | None:
        """Of known values: of these columns in these rows, and the same with both zeros as one. None where they are not
        known."""
        if not all(column_id in self._known for column_id, _ in columns):
            return None
        if columns not in self._hashes:
            self._hashes[columns] = _hashed([self._known[column_id] for column_id, _ in columns])
        exact, loose = self._hashes[columns]
        return _taken(exact, rows), None if loose is None else _taken(loose, rows)

    def doubt(self, problem: Unreadable) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.setdefault(problem.path, problem.reason)


def columns_of(metadata: TableMetadata, file: DeleteFile) -> Columns | Unreadable:
    """Those of an equality delete's keys, with their types."""
    if file.content != EQUALITY:
        return ()
    try:
        terms = [resolve_id(IDENTITY, one, metadata.current_schema, metadata.schemas) for one in file.columns]
    except BadRequest as error:
        return Unreadable(file.path, f"its keys are of columns that are not compared here: {error.message}")
    if not terms:
        return Unreadable(file.path, "its manifest does not say which columns are its key")
    return tuple((term.column_id, term.kind) for term in terms)


@dataclass
class _Judging:
    """One call of `DeleteEvaluator.evaluate`."""

    evaluator: DeleteEvaluator
    positions: Longs
    keys: Longs | None
    deletion: RowDeletion

    def run(self, groups: _Groups, applying: Iterable[tuple[int, ...]]) -> None:
        for (place, rows), deletes in zip(groups, applying, strict=True):
            if deletes:
                self._evaluate(place, rows, deletes)

    def _evaluate(self, place: int, rows: Longs, deletes: tuple[int, ...]) -> None:
        evaluator, view = self.evaluator, self.evaluator.view
        block, local = view.locate(int(names_of(view, np.array([place], dtype=np.int64))[0]))
        path = block.text("file_path", local) or ""
        if sum(evaluator.files[number].is_vector for number in deletes) > 1:
            self._doubt(rows, Unreadable(path, "it has several deletion vectors, which readers refuse"))
        keyed: dict[Columns, list[DeletedKeys]] = {}
        for number in deletes:
            content = evaluator.contents[number]
            if isinstance(content, Unreadable):
                self._doubt(rows, content)
            elif isinstance(content, Positions):
                self.deletion.deleted[rows] |= _among(self.positions[rows], content.of(path))
            else:
                keyed.setdefault(evaluator.columns[number], []).append(content)
        for columns, sets in keyed.items():
            left = rows[~self.deletion.deleted[rows]]
            if len(left):
                counts = block.long("file_size_in_bytes", local) or 0, block.long("record_count", local) or 0
                self._evaluate_by_keys(path, counts, left, columns, sets)

    def _doubt(self, rows: Longs, problem: Unreadable) -> None:
        self.deletion.undecided[rows] = True
        self.evaluator.doubt(problem)

    def _evaluate_by_keys(
        self, path: str, counts: tuple[int, int], rows: Longs, columns: Columns, sets: Sequence[DeletedKeys]
    ) -> None:
        try:
            exact, loose = self._hashes_of(path, counts, rows, columns)
        except Unreadable as problem:
            self._doubt(rows, problem)
            return
        for one in sets:
            self.deletion.deleted[rows] |= one.exact.has(*exact)
            if one.loose is not None and loose is not None:
                doubtful = rows[one.loose.has(*loose) & ~self.deletion.deleted[rows]]
                if len(doubtful):
                    self._doubt(doubtful, Unreadable(path, "whether 0.0 and -0.0 are equal keys is the reader's"))

    def _hashes_of(
        self, path: str, counts: tuple[int, int], rows: Longs, columns: Columns
    ) -> tuple[_Pair, _Pair | None]:
        known = None if self.keys is None else self.evaluator.hashes_of(columns, self.keys[rows])
        if known is not None:
            return known
        order = np.argsort(self.positions[rows], kind="stable")
        spots = self.positions[rows[order]]
        with self.evaluator.data.read(path, *counts, [column_id for column_id, _ in columns], spots) as found:
            try:
                exact, loose = _hashed([keys_of(found[column_id], kind) for column_id, kind in columns])
            except ValueError as error:
                raise Unreadable(path, str(error)) from None
        back = np.argsort(order, kind="stable")
        return _taken(exact, back), None if loose is None else _taken(loose, back)


def _hashed(columns: list[Keys]) -> tuple[_Pair, _Pair | None]:
    loose = merge_zeros(columns)
    return hash_halves(columns), None if loose is None else hash_halves(loose)


def _taken(pair: _Pair, at: Longs) -> _Pair:
    return pair[0][at], pair[1][at]


def _among(values: Longs, ascending: Longs) -> npt.NDArray[np.bool_]:
    """bool[n]: which of the values are among those in order."""
    if not len(ascending):
        return np.zeros(len(values), dtype=np.bool_)
    at = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: Mask = ascending[at] == values
    return found


def names_of(view: TableView, places: Longs) -> Longs:
    """The rows of the view (`view.py`) of data files by their places among all of them, int64[n] each."""
    starts = np.array(view.starts[:-1], dtype=np.int64)
    numbers = np.searchsorted(starts, places, side="right") - 1
    names: Longs = (view.ordinals[numbers] << ROW_BITS) + places - starts[numbers]
    return names


def places_at(view: TableView, names: Longs) -> Longs:
    """The reverse."""
    numbers, local = view.split(names)
    places: Longs = np.array(view.starts[:-1], dtype=np.int64)[numbers] + local
    return places
