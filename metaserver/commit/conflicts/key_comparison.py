"""Compares the keys and rows of files of other commits with a scope, if partitions and bounds cannot exclude the files.

An equality delete removes the rows that equal one of its keys. If no key satisfies the part of the scope on the key
columns, the delete removes no row of the scope. A data file contains no row of the scope if no row of the file
satisfies the scope. If a comparison is not possible, the file counts as a match. This is so for a file that is too
large, is not a Parquet file or cannot be read, and for floating-point columns, because readers disagree on signed
zeros.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    Bound,
    Expression,
    collect_predicates,
    replace_predicates,
)
from seamark.formats.iceberg.files.budget import create_decoding_budget
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, Unreadable, find_columns
from seamark.formats.iceberg.files.parquet_reading import BoundedParquet
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import EQUALITY, DeletedKeys, decode_delete_content
from seamark.formats.index.keys.hashing import hash_halves
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.commit.conflicts.history import SelectedFiles
from seamark.metaserver.commit.snapshots.manifests import CheckPaths
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.deletes.delete_files import list_delete_files_at
from seamark.metaserver.planner.joins.dimension_columns import FileColumn, find_rows_where, iterate_filtered_columns
from seamark.metaserver.planner.pruning.file_pruning import narrow_by_stats
from seamark.metaserver.planner.rows.row_deletes import find_key_columns
from seamark.metaserver.planner.view.selection import FileSelection, never_expires
from seamark.metaserver.planner.view.view import TableView

FILES_MAX = 200
"""The maximum number of files whose keys one check reads. If there are more, all files count as matches."""
BYTES_MAX = 16 << 20
"""The maximum total size of the files whose keys one check reads."""
FILES_CONCURRENT_MAX = 16
DECODED_BYTES_MAX = 64 << 20
"""The memory limit for decoding one file. A file that needs more memory counts as a match."""


class CheckedFiles(NamedTuple):
    """The storage of files, and the check that the table may refer to a file at a location."""

    objects: ObjectStore
    check_paths: CheckPaths


class _File(NamedTuple):
    position: int
    """The position of the file in the view, as in masks."""
    path: str
    size_bytes: int
    is_parquet: bool
    condition: Expression
    """The part of the scope on the columns of the file."""


async def keep_matching_deletes(source: CheckedFiles, added: SelectedFiles, bound: Expression) -> SelectedFiles:
    """Return the deletes, without the equality deletes that remove no row for which `bound` is true.

    Bounds are compared first. Then the values of the key columns in the remaining files are read.

    Args:
        source: The storage of the files.
        added: Delete files.
        bound: A condition on rows of the table.
    """
    selection, compared_files = await asyncio.to_thread(_select_deletes, added, bound)
    await _drop_disjoint(source, selection, compared_files)
    return SelectedFiles(added.view, selection)


def _select_deletes(added: SelectedFiles, bound: Expression) -> tuple[FileSelection, list[_File]]:
    """Select delete files by their bounds.

    Returns:
        Two values. The first is all delete files, except the equality deletes whose bounds exclude all rows for which
        `bound` is true. The second is the remaining equality deletes whose keys must be compared.
    """
    selection = added.selection.copy()
    compared_files: list[_File] = []
    for columns, positions in _group_equality_deletes(added).items():
        condition = _restrict_condition(bound, columns)
        if condition == TRUE:
            continue
        part = _select_files(added, positions)
        narrow_by_stats(part, condition, never_expires)
        kept_positions = set(part.list_positions().tolist())
        _drop_positions(selection, [position for position in positions if position not in kept_positions])
        compared_files += (_describe_file(added.view, position, condition) for position in sorted(kept_positions))
    return selection, compared_files


async def keep_matching_data(source: CheckedFiles, added: SelectedFiles, bound: Expression) -> SelectedFiles:
    """Return the data files that may have a row for which `bound` is true.

    The caller has already compared partitions and bounds, so this function reads the files. With too many files, it
    returns all of them.
    """
    selection = added.selection.copy()
    if selection.count() > FILES_MAX:
        return SelectedFiles(added.view, selection)
    condition = await asyncio.to_thread(_restrict_condition, bound, None)
    if condition != TRUE:
        candidates = [
            _describe_file(added.view, position, condition) for position in selection.list_positions().tolist()
        ]
        await _drop_disjoint(source, selection, candidates)
    return SelectedFiles(added.view, selection)


def _restrict_condition(bound: Expression, columns: Iterable[int] | None) -> Expression:
    """Return a weaker condition that uses only the columns with these ids. None means all columns.

    Predicates on other columns count as true, as do predicates on floating-point columns, because readers disagree on
    signed zeros.
    """
    column_ids = None if columns is None else frozenset(columns)

    def restrict(predicate: Bound) -> Expression:
        has_column = column_ids is None or predicate.column_id in column_ids
        return predicate if has_column and predicate.kind not in FLOATS else TRUE

    return replace_predicates(bound, restrict)


def _group_equality_deletes(files: SelectedFiles) -> dict[tuple[int, ...], list[int]]:
    """Return the positions of the selected equality deletes, grouped by their key columns.

    The key columns are the columns whose values a delete file compares.
    """
    grouped: dict[tuple[int, ...], list[int]] = {}
    ids: dict[int, list[list[int] | None]] = {}
    for position in files.selection.list_positions().tolist():
        number, block, row = _locate_row(files.view, position)
        if block.read_long("content", row) != EQUALITY:
            continue
        if number not in ids:
            ids[number] = block.read_lists("equality_ids")
        grouped.setdefault(tuple(sorted(set(ids[number][row] or ()))), []).append(position)
    return grouped


def _locate_row(view: TableView, position: int) -> tuple[int, Block, int]:
    """Return the index of the block in the view, the block, and the row in the block, for a position in the view."""
    number = bisect_right(view.starts, position) - 1
    return number, view.blocks[number], position - int(view.starts[number])


def _make_position_mask(view: TableView, positions: Iterable[int], *, value: bool) -> npt.NDArray[np.uint8]:
    """Return a mask with this value at the positions, and with the opposite value at all other positions."""
    mask = np.full(view.file_count, not value, dtype=np.uint8)
    mask[list(positions)] = value
    return mask


def _select_files(files: SelectedFiles, positions: Iterable[int]) -> FileSelection:
    selection = files.selection.copy()
    selection.intersect(_make_position_mask(files.view, positions, value=True))
    return selection


def _drop_positions(selection: FileSelection, positions: Sequence[int]) -> None:
    if positions:
        selection.intersect(_make_position_mask(selection.view, positions, value=False))


def _describe_file(view: TableView, position: int, condition: Expression) -> _File:
    _, block, row = _locate_row(view, position)
    size = block.read_long("file_size_in_bytes", row)
    return _File(
        position,
        block.read_text("file_path", row) or "",
        -1 if size is None else size,
        (block.read_text("file_format", row) or "").lower() == "parquet",
        condition,
    )


async def find_first_match(
    source: CheckedFiles, view: TableView, metadata: TableMetadata, pairs: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return the first pair of a data file and a delete file such that the delete may remove rows of the data file.

    All keys of equality deletes are compared. If there are too many files or bytes to compare, the result is the first
    pair. The result is None if no pair matches.

    Args:
        pairs: Pairs of a data file and a delete file, as positions in the view.

    Raises:
        Forbidden: The table may not refer to one of the files.
    """
    if not pairs:
        return None
    if len(pairs) > FILES_MAX * FILES_MAX:  # So many pairs need more than FILES_MAX files.
        return pairs[0]
    data_rows, delete_rows = {row for row, _ in pairs}, {delete for _, delete in pairs}
    if len(data_rows) + len(delete_rows) > FILES_MAX:
        return pairs[0]
    deletes = list_delete_files_at(view, delete_rows)
    files = {row: _describe_file(view, position, TRUE) for row, position in _list_positions(view, data_rows)}
    equality_deletes = [delete for delete in deletes.values() if delete.content == EQUALITY]
    sizes = {file.path: file.size_bytes for file in files.values()} | {
        file.path: file.size_bytes for file in equality_deletes
    }
    if (
        len(equality_deletes) < len(deletes)
        or len(sizes) > FILES_MAX
        or sum(sizes.values()) > BYTES_MAX
        or min(sizes.values()) < 0
    ):
        return pairs[0]
    await source.check_paths(sizes)
    read_slots = asyncio.Semaphore(FILES_CONCURRENT_MAX)

    async def read(path: str) -> bytes | None:
        async with read_slots:
            try:
                return await source.objects.read(path, limit_bytes=sizes[path])
            except SeamarkError:
                return None

    bodies = dict(zip(sizes, await asyncio.gather(*map(read, sizes)), strict=True))

    def matches(row: int, delete: int) -> bool:
        file, delete_file = files[row], deletes[delete]
        data, keys, columns = bodies[file.path], bodies[delete_file.path], find_key_columns(metadata, delete_file)
        if data is None or keys is None or isinstance(columns, Unreadable):
            return True
        if not file.is_parquet or any(kind in FLOATS for _, kind in columns):
            return True
        try:
            deleted_keys = decode_delete_content(keys, delete_file, columns, limit_bytes=DECODED_BYTES_MAX)
            stored_columns = _read_columns(data, file.path, [column_id for column_id, _ in columns])
            hashes = hash_halves([convert_to_keys(stored_columns[column_id], kind) for column_id, kind in columns])
        except (Unreadable, ValueError, KeyError):
            return True
        return not isinstance(deleted_keys, DeletedKeys) or bool(deleted_keys.exact.has(*hashes).any())

    def find_first() -> tuple[int, int] | None:
        return next((pair for pair in pairs if matches(*pair)), None)

    return await asyncio.to_thread(find_first)


def _list_positions(view: TableView, rows: Iterable[int]) -> list[tuple[int, int]]:
    sorted_rows = sorted(rows)
    return list(zip(sorted_rows, view.find_positions(np.array(sorted_rows, dtype=np.int64)).tolist(), strict=True))


async def _drop_disjoint(source: CheckedFiles, selection: FileSelection, files: Sequence[_File]) -> None:
    """Remove the files from the selection in which no row satisfies the condition of the file.

    If there are too many files or bytes to read, no file is removed.
    """
    readable_files = [file for file in files if file.is_parquet and file.size_bytes > 0]
    if not readable_files or len(files) > FILES_MAX or sum(file.size_bytes for file in readable_files) > BYTES_MAX:
        return
    await source.check_paths(file.path for file in readable_files)
    read_slots = asyncio.Semaphore(FILES_CONCURRENT_MAX)

    async def check_disjoint(file: _File) -> bool:
        async with read_slots:
            try:
                data = await source.objects.read(file.path, limit_bytes=file.size_bytes)
                return await asyncio.to_thread(_is_disjoint, data, file)
            except (SeamarkError, Unreadable):
                return False

    results = await asyncio.gather(*map(check_disjoint, readable_files))
    _drop_positions(
        selection, [file.position for file, is_disjoint in zip(readable_files, results, strict=True) if is_disjoint]
    )


def _is_disjoint(data: bytes, file: _File) -> bool:
    """Return whether no row of the file satisfies the condition.

    The result is False if this cannot be shown: without columns to read, for lists and maps, if a column is missing, or
    if its values are shortened.

    Raises:
        Unreadable: The file cannot be read.
    """
    needed_columns = set(iterate_filtered_columns(file.condition, ()))
    if not needed_columns or any(predicate.kind in ("list", "map") for predicate in collect_predicates(file.condition)):
        return False
    try:
        column_ids = {column.column_id for column in needed_columns}
        arrays = _read_columns(data, file.path, column_ids)
        if len(arrays) < len(column_ids):
            return False
        columns = {column: FileColumn.from_array(arrays[column.column_id], column.kind) for column in needed_columns}
    except ValueError as error:
        raise Unreadable(file.path, str(error)) from None
    if any(column.clipped for column in columns.values()):
        return False
    rows = find_rows_where(file.condition, (), columns)
    return rows is not None and not rows.any()


def _read_columns(data: bytes, path: str, ids: Iterable[int]) -> dict[int, pa.ChunkedArray]:
    """Return the columns of a Parquet file, by id. Ids that the file does not have are left out.

    Raises:
        Unreadable: The file cannot be read.
    """
    try:
        open_file = BoundedParquet(pa.BufferReader(data), path, create_decoding_budget(DECODED_BYTES_MAX))
        return open_file.read_plain_columns(find_columns(open_file.schema, ids))
    except (pa.ArrowException, AmbiguousColumn, OSError, KeyError, ValueError) as error:
        raise Unreadable(path, str(error)) from None
