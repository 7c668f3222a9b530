"""Which of the files that others committed hold, or delete, no row of a scope, though partitions and bounds would allow
it: keys are compared one by one.

An equality delete takes the rows that equal one of its keys, so rows of the scope are safe from it where no key meets
what the scope says of the key's columns, and a data file is safe where no row has one of the keys. The rule kept: what
is not known meets. A file that is too large, of another format or cannot be read meets, and so do columns of floating
point numbers, about whose zeros readers differ.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaserver.commits.history import AddedFiles
from metaserver.errors import SeamarkError
from metaserver.iceberg.expressions.expression import TRUE, Bound, Expression, predicates_of, replaced
from metaserver.iceberg.files.budget import decoded_budget
from metaserver.iceberg.files.parquet import InDoubt, Unreadable, places_of
from metaserver.iceberg.files.parquet_reading import BoundedParquet
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.values import FLOATS
from metaserver.index.blocks.block import Block
from metaserver.index.keys.delete_files import EQUALITY, DeletedKeys, decoded
from metaserver.index.keys.hashing import hash_halves
from metaserver.index.keys.keys import keys_of
from metaserver.objects.port import ObjectStore
from metaserver.planner.deletes.delete_files import delete_files_at
from metaserver.planner.joins.dimension_columns import FileColumn, filtered_columns, rows_where
from metaserver.planner.pruning.file_pruning import narrow_by_stats
from metaserver.planner.rows.row_deletes import columns_of, positions_of
from metaserver.planner.view.selection import Selection, never
from metaserver.planner.view.view import TableView

FILES_MAX = 200
"""Files of one check whose keys are read. Where there are more, all of them meet."""
BYTES_MAX = 16 << 20
"""Of those files together."""
AT_ONCE = 16
DECODED_BYTES_MAX = 64 << 20
"""Of one file; one that would take more memory meets."""


class _File(NamedTuple):
    place: int
    """Among all rows of the view, as masks count them."""
    path: str
    size_bytes: int
    is_parquet: bool
    about: Expression
    """What the scope says of the columns that are known of the file's rows."""


async def spare_deletes(objects: ObjectStore, came: AddedFiles, bound: Expression) -> AddedFiles:
    """Without the equality deletes that take no row for which `bound` is true."""
    selection = came.selection.copy()
    left: list[_File] = []
    for columns, places in _equality_deletes(came).items():
        about = _about(bound, columns)
        if about == TRUE:
            continue
        part = _only(came, places)
        narrow_by_stats(part, about, never)
        met = set(part.positions().tolist())
        _drop(selection, [place for place in places if place not in met])
        left += (_file(came.view, place, about) for place in sorted(met))
    await _drop_apart(objects, selection, left)
    return AddedFiles(came.view, selection)


async def spare_data(objects: ObjectStore, came: AddedFiles, bound: Expression) -> AddedFiles:
    """Without the data files that hold no row for which `bound` is true. Partitions and bounds have been compared."""
    about = _about(bound, None)
    selection = came.selection.copy()
    if about != TRUE:
        files = [_file(came.view, place, about) for place in selection.positions().tolist()]
        await _drop_apart(objects, selection, files)
    return AddedFiles(came.view, selection)


def _about(bound: Expression, columns: Iterable[int] | None) -> Expression:
    """What it says of these columns alone, None for all."""
    known = None if columns is None else frozenset(columns)

    def part(predicate: Bound) -> Expression:
        is_known = known is None or predicate.column_id in known
        return predicate if is_known and predicate.kind not in FLOATS else TRUE

    return replaced(bound, part)


def _equality_deletes(came: AddedFiles) -> dict[tuple[int, ...], list[int]]:
    """The places of those selected, by the columns of their keys."""
    found: dict[tuple[int, ...], list[int]] = {}
    ids: dict[int, list[list[int] | None]] = {}
    for place in came.selection.positions().tolist():
        number, block, row = _located(came.view, place)
        if block.long("content", row) != EQUALITY:
            continue
        if number not in ids:
            ids[number] = block.lists_of("equality_ids")
        found.setdefault(tuple(sorted(set(ids[number][row] or ()))), []).append(place)
    return found


def _located(view: TableView, place: int) -> tuple[int, Block, int]:
    """The number of the block, the block, and the row of it."""
    number = bisect_right(view.starts, place) - 1
    return number, view.blocks[number], place - int(view.starts[number])


def _mask(view: TableView, places: Iterable[int], *, others: bool) -> npt.NDArray[np.uint8]:
    mask = np.full(view.rows, others, dtype=np.uint8)
    mask[list(places)] = not others
    return mask


def _only(came: AddedFiles, places: Iterable[int]) -> Selection:
    selection = came.selection.copy()
    selection.intersect(_mask(came.view, places, others=False))
    return selection


def _drop(selection: Selection, places: Sequence[int]) -> None:
    if places:
        selection.intersect(_mask(selection.view, places, others=True))


def _file(view: TableView, place: int, about: Expression) -> _File:
    _, block, row = _located(view, place)
    size = block.long("file_size_in_bytes", row)
    return _File(
        place,
        block.text("file_path", row) or "",
        -1 if size is None else size,
        (block.text("file_format", row) or "").lower() == "parquet",
        about,
    )


async def first_meeting(
    objects: ObjectStore, view: TableView, metadata: TableMetadata, pairs: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """The first pair, of a data file's row of the view and a delete's, of which the delete may take rows of the file;
    equality deletes by comparing all keys of both files. None where there is no such pair."""
    deletes = delete_files_at(view, {delete for _, delete in pairs})
    files = {row: _file(view, place, TRUE) for row, place in _places(view, {row for row, _ in pairs})}
    keyed = [one for one in deletes.values() if one.content == EQUALITY]
    sizes = {one.path: one.size_bytes for one in files.values()} | {one.path: one.size_bytes for one in keyed}
    if not pairs:
        return None
    if (
        len(keyed) < len(deletes)
        or len(sizes) > FILES_MAX
        or sum(sizes.values()) > BYTES_MAX
        or min(sizes.values()) < 0
    ):
        return pairs[0]
    gate = asyncio.Semaphore(AT_ONCE)

    async def read(path: str) -> bytes | None:
        async with gate:
            try:
                return await objects.read(path, limit_bytes=sizes[path])
            except SeamarkError:
                return None

    bodies = dict(zip(sizes, await asyncio.gather(*map(read, sizes)), strict=True))

    def meets(row: int, delete: int) -> bool:
        file, deleted = files[row], deletes[delete]
        data, keys, columns = bodies[file.path], bodies[deleted.path], columns_of(metadata, deleted)
        if data is None or keys is None or isinstance(columns, Unreadable):
            return True
        if not file.is_parquet or any(kind in FLOATS for _, kind in columns):
            return True
        try:
            wanted = decoded(keys, deleted, columns, limit_bytes=DECODED_BYTES_MAX)
            there = _columns(data, file.path, [column_id for column_id, _ in columns])
            stored = [there[column_id] for column_id, _ in columns]
            hashes = hash_halves([keys_of(one, kind) for one, (_, kind) in zip(stored, columns, strict=True)])
        except (Unreadable, ValueError, KeyError):
            return True
        return not isinstance(wanted, DeletedKeys) or bool(wanted.exact.has(*hashes).any())

    def first() -> tuple[int, int] | None:
        return next((pair for pair in pairs if meets(*pair)), None)

    return await asyncio.to_thread(first)


def _places(view: TableView, rows: Iterable[int]) -> list[tuple[int, int]]:
    found = sorted(rows)
    return list(zip(found, positions_of(view, np.array(found, dtype=np.int64)).tolist(), strict=True))


async def _drop_apart(objects: ObjectStore, selection: Selection, files: Sequence[_File]) -> None:
    readable = [one for one in files if one.is_parquet and one.size_bytes > 0]
    if not readable or len(files) > FILES_MAX or sum(one.size_bytes for one in readable) > BYTES_MAX:
        return
    gate = asyncio.Semaphore(AT_ONCE)

    async def apart(one: _File) -> bool:
        async with gate:
            try:
                data = await objects.read(one.path, limit_bytes=one.size_bytes)
                return await asyncio.to_thread(_is_apart, data, one)
            except (SeamarkError, Unreadable):
                return False

    told = await asyncio.gather(*map(apart, readable))
    _drop(selection, [one.place for one, is_apart in zip(readable, told, strict=True) if is_apart])


def _is_apart(data: bytes, file: _File) -> bool:
    """Whether no row of the file matches. Unreadable."""
    wanted = set(filtered_columns(file.about, ()))
    if not wanted or any(predicate.kind in ("list", "map") for predicate in predicates_of(file.about)):
        return False
    try:
        stored = _columns(data, file.path, {one.column_id for one in wanted})
        if len(stored) < len({one.column_id for one in wanted}):
            return False
        columns = {one: FileColumn.of(stored[one.column_id], one.kind) for one in wanted}
    except ValueError as error:
        raise Unreadable(file.path, str(error)) from None
    if any(column.clipped for column in columns.values()):
        return False
    rows = rows_where(file.about, (), columns)
    return rows is not None and not rows.any()


def _columns(data: bytes, path: str, ids: Iterable[int]) -> dict[int, pa.ChunkedArray]:
    """Those of the columns that a Parquet file has, by id. Unreadable."""
    try:
        opened = BoundedParquet(pa.BufferReader(data), path, decoded_budget(DECODED_BYTES_MAX))
        return opened.plain_columns(places_of(opened.schema, ids))
    except (pa.ArrowException, InDoubt, OSError, KeyError, ValueError) as error:
        raise Unreadable(path, str(error)) from None
