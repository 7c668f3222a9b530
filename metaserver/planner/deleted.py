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
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from metaserver.errors import BadRequest
from metaserver.iceberg.metadata import TableMetadata
from metaserver.iceberg.transforms import IDENTITY
from metaserver.index.keys import Keys, keys_of
from metaserver.index.packing import Longs
from metaserver.index.terms import resolve_id
from metaserver.objects.port import ObjectStore
from metaserver.planner.delete_files import (
    EQUALITY,
    Columns,
    Content,
    DeleteFile,
    DeleteFiles,
    Hashes,
    KeySet,
    Mask,
    Positions,
    delete_files_at,
    hashed,
    merge_zeros,
)
from metaserver.planner.parquet_columns import DataRows, Unreadable
from metaserver.planner.scan import Scan
from metaserver.planner.view import TableView

DELETES_LIMIT_BYTES = 1 << 30
"""Of the delete files of one request; those beyond are not read, and rows that they apply to are undecided."""
DATA_LIMIT_BYTES = 256 << 20
"""Of data files, fetched for one request."""
PROBLEMS_MAX = 100

_Pair = tuple[Hashes, Hashes]


@dataclass(frozen=True)
class Known:
    """Values of the rows that are judged: `columns` by column id, where the row of a judged row is `rows`."""

    columns: Mapping[int, Keys]
    rows: Longs


@dataclass
class Fate:
    """`deleted` and `undecided` bool[n]; `problems` are (file, why) of what left rows undecided, the first of them."""

    deleted: Mask
    undecided: Mask
    problems: dict[str, str] = field(default_factory=dict)

    def doubt(self, rows: Longs, problem: Unreadable) -> None:
        self.undecided[rows] = True
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.setdefault(problem.path, problem.reason)


class Deleted:
    """Judges rows. Belongs to one event loop."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._files = DeleteFiles(objects)

    async def judge(self, scan: Scan, places: Longs, positions: Longs, known: Known | None = None) -> Fate:
        """Of rows of data files: the file's place among all files of the scan's view, and the row's position in it,
        int64[n] each."""
        fate = Fate(np.zeros(len(places), dtype=np.bool_), np.zeros(len(places), dtype=np.bool_))
        if not len(places) or not scan.view.delete_rows:
            return fate
        groups, applying = await asyncio.to_thread(_applying, scan, places)
        wanted = {number for deletes in applying for number in deletes}
        if not wanted:
            return fate
        files = delete_files_at(scan.view, sorted(wanted))
        keyed = {number: _columns(scan.metadata, file) for number, file in files.items()}
        contents: dict[int, Content | Unreadable] = {}
        readable: list[tuple[int, DeleteFile, Columns]] = []
        left = DELETES_LIMIT_BYTES
        for number, file in files.items():
            columns = keyed[number]
            left -= max(0, file.read_bytes)
            if isinstance(columns, Unreadable):
                contents[number] = columns
            elif left < 0:
                contents[number] = Unreadable(file.path, "one request reads no more delete files than it has by now")
            else:
                readable.append((number, file, columns))
        contents |= await self._files.read_all(readable)
        rows = DataRows(self._objects, asyncio.get_running_loop(), DATA_LIMIT_BYTES)
        columns_of = {number: found for number, found in keyed.items() if not isinstance(found, Unreadable)}
        judging = _Judging(scan.view, files, contents, columns_of, known, rows, positions, fate)
        await asyncio.to_thread(judging.run, groups, applying)
        return fate


def _applying(scan: Scan, places: Longs) -> tuple[list[tuple[int, Longs]], list[tuple[int, ...]]]:
    """For each data file: its place and which of the rows are its own; and the deletes that apply to it."""
    order = np.argsort(places, kind="stable")
    ends = [*(np.flatnonzero(np.diff(places[order])) + 1).tolist(), len(places)]
    groups = [(int(places[order[start]]), order[start:end]) for start, end in pairwise((0, *ends))]
    names = names_of(scan.view, np.array([place for place, _ in groups], dtype=np.int64))
    return groups, scan.deletes_of(names)


def _columns(metadata: TableMetadata, file: DeleteFile) -> Columns | Unreadable:
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
    """One call of `judge`, in a thread."""

    view: TableView
    files: Mapping[int, DeleteFile]
    contents: Mapping[int, Content | Unreadable]
    columns: Mapping[int, Columns]
    known: Known | None
    data: DataRows
    positions: Longs
    fate: Fate
    _hashes: dict[Columns, tuple[_Pair, _Pair | None]] = field(default_factory=dict)

    def run(self, groups: Sequence[tuple[int, Longs]], applying: Iterable[tuple[int, ...]]) -> None:
        for (place, rows), deletes in zip(groups, applying, strict=True):
            if deletes:
                self._judge(place, rows, deletes)

    def _judge(self, place: int, rows: Longs, deletes: tuple[int, ...]) -> None:
        block, local = self.view.locate(int(names_of(self.view, np.array([place], dtype=np.int64))[0]))
        path = block.text("file_path", local) or ""
        vectors = [number for number in deletes if self.files[number].is_vector]
        if len(vectors) > 1:
            self.fate.doubt(rows, Unreadable(path, "it has several deletion vectors, which readers refuse"))
        keyed: dict[Columns, list[KeySet]] = {}
        for number in deletes:
            content = self.contents[number]
            if isinstance(content, Unreadable):
                self.fate.doubt(rows, content)
            elif isinstance(content, Positions):
                self.fate.deleted[rows] |= _among(self.positions[rows], content.of(path))
            else:
                keyed.setdefault(self.columns[number], []).append(content)
        for columns, sets in keyed.items():
            left = rows[~self.fate.deleted[rows]]
            if len(left):
                counts = block.long("file_size_in_bytes", local) or 0, block.long("record_count", local) or 0
                self._judge_by_keys(path, counts, left, columns, sets)

    def _judge_by_keys(
        self, path: str, counts: tuple[int, int], rows: Longs, columns: Columns, sets: Sequence[KeySet]
    ) -> None:
        try:
            exact, loose = self._hashes_of(path, counts, rows, columns)
        except Unreadable as problem:
            self.fate.doubt(rows, problem)
            return
        for one in sets:
            self.fate.deleted[rows] |= one.exact.has(*exact)
            if one.loose is not None and loose is not None:
                doubtful = rows[one.loose.has(*loose) & ~self.fate.deleted[rows]]
                if len(doubtful):
                    self.fate.doubt(doubtful, Unreadable(path, "whether 0.0 and -0.0 are equal keys is the reader's"))

    def _hashes_of(
        self, path: str, counts: tuple[int, int], rows: Longs, columns: Columns
    ) -> tuple[_Pair, _Pair | None]:
        """Of the values of these columns in these rows, and the same with both zeros as one."""
        known = self.known
        if known is not None and all(column_id in known.columns for column_id, _ in columns):
            if columns not in self._hashes:
                self._hashes[columns] = _hashed([known.columns[column_id] for column_id, _ in columns])
            exact, loose = self._hashes[columns]
            at = known.rows[rows]
            return _taken(exact, at), None if loose is None else _taken(loose, at)
        order = np.argsort(self.positions[rows], kind="stable")
        spots = self.positions[rows[order]]
        found = self.data.read(path, *counts, [column_id for column_id, _ in columns], spots)
        try:
            exact, loose = _hashed([keys_of(found[column_id], kind) for column_id, kind in columns])
        except ValueError as error:
            raise Unreadable(path, str(error)) from None
        back = np.argsort(order, kind="stable")
        return _taken(exact, back), None if loose is None else _taken(loose, back)


def _hashed(columns: list[Keys]) -> tuple[_Pair, _Pair | None]:
    loose = merge_zeros(columns)
    return hashed(columns), None if loose is None else hashed(loose)


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
    names: Longs = (view.ordinals[numbers] << np.int64(32)) + places - starts[numbers]
    return names


def places_at(view: TableView, names: Longs) -> Longs:
    """The reverse."""
    numbers, local = view.split(names)
    places: Longs = np.array(view.starts[:-1], dtype=np.int64)[numbers] + local
    return places
