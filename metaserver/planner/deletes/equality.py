"""Finds equality deletes that can match rows of a data file, according to the statistics of both files.

An equality delete applies to older data files in its scope. The scope is the delete's partition, or all files if
its spec is unpartitioned (Iceberg spec, "Scan Planning"). The delete is omitted only if one of its columns proves
that no key equals a row: the ranges are disjoint, and the two files cannot both have nulls or both have NaNs. Unknown
or incomparable statistics prove nothing.

Java's DeleteFileIndex does the same, but has three faults that this module avoids:

- It ignores that bounds exclude NaN.
- It ignores that a required column is null in a null struct.
- It compares UUIDs in one order, but writers order them as signed or as unsigned numbers. This module compares only the
  upper halves of UUIDs on which both orders agree.

Bounds are compared as ranks among the delete files' bounds, so the same comparison works for all types. The delete
files of a scope, sorted by their first column, are the leaves of a tree of summaries. All data files descend the tree
together. The time depends on the number of pairs that match, not on the number of all pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.index.packing import MISSING, Form, Longs, decode_value
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.strings import read_strings

_CHILDREN_PER_NODE_BITS = 3
_CHILDREN_PER_NODE = 1 << _CHILDREN_PER_NODE_BITS
"""The number of children of a node in the tree."""
_PAIRS_MAX = 1 << 21
"""The maximum number of pairs (data file, node) in memory, of about 60 bytes each.

The pairs of a single data file may exceed the limit.
"""
_NULL, _NAN = 1, 2
"""Flags: whether a file may contain nulls, or NaNs."""
_UNBOUNDED = 1 << 62
"""A rank that is higher than all ranks of bounds."""
_UUID_HALF_BYTES = 8
"""The number of bytes of a UUID that are compared."""

Piece = tuple[Block, Longs, Longs]
"""(block, positions among the requested data files, rows of the block)."""
Values = npt.NDArray[Any]


class EqualityDelete(NamedTuple):
    """An equality delete of a view.

    The block and the row are positions in the view's delete blocks.
    """

    delete: int
    """The position of the delete file among the view's delete rows."""
    block: int
    row: int
    """The row of the delete file in its block."""
    scope: int
    """The id of the partition to which the delete applies, or 0 for all partitions."""
    sequence: int
    """The highest data sequence number to which the delete applies."""
    ids: tuple[int, ...]
    """The ids of the equality columns."""


class EqualityDeletes:
    """The equality deletes of a view. An instance is immutable.

    Deletes with the same equality columns are searched together.

    Args:
        blocks: The view's blocks of delete files.
        deletes: The equality deletes.
        schemas: All schemas of the table.
    """

    def __init__(self, blocks: Sequence[Block], deletes: Iterable[EqualityDelete], schemas: Sequence[Schema]) -> None:
        deletes_by_columns: dict[tuple[int, ...], list[EqualityDelete]] = {}
        for delete in deletes:
            deletes_by_columns.setdefault(tuple(sorted(set(delete.ids))), []).append(delete)
        self._column_groups = [
            _ColumnGroup(blocks, ids, members, schemas) for ids, members in deletes_by_columns.items()
        ]

    def iter_applicable_pairs(
        self, pieces: Sequence[Piece], sequences: Longs, scopes: Sequence[Longs]
    ) -> Iterator[tuple[Longs, Longs]]:
        """Yield the pairs of a data file and a delete file that applies to it, unordered, in batches of limited size.

        A batch has two arrays: the positions of the data files, and the positions of the delete files in the view.

        Args:
            pieces: The requested data files, as rows of blocks.
            sequences: int64[n]: the sequence number of each data file.
            scopes: Arrays of int64[n]. Each array has, for each data file, the id of a scope in which deletes apply
                to it: its partition, or the whole table.
        """
        for column_group in self._column_groups:
            yield from column_group.iter_applicable_pairs(pieces, sequences, scopes)


class _Level(NamedTuple):
    """One level of the search tree: the maximum or minimum over the leaves below each node. A leaf is a delete file.

    Attributes:
        sequence: The highest sequence number to which a leaf applies.
        upper: The maximum rank of the upper bounds, for each column.
        flags: Whether a leaf may contain nulls or NaNs, for each column.
    """

    sequence: Longs
    lower: tuple[Longs, ...]
    """The minimum rank of the lower bounds, for each column."""
    upper: tuple[Longs, ...]
    flags: tuple[npt.NDArray[np.uint8], ...]


class _DataFiles(NamedTuple):
    """The requested data files, one row each.

    A leaf of the search tree is a delete file. The scope of a data file is its partition, or the whole table.

    Attributes:
        sequence: The sequence number of each data file.
        end: The position after the last leaf in the data file's scope.
        flags: Whether the data file may contain nulls or NaNs, for each column.
    """

    sequence: Longs
    first: Longs
    """The position of the first leaf in the data file's scope."""
    end: Longs
    above: tuple[Longs, ...]
    """For each column, the number of delete files whose upper bound is below the data file's lower bound."""
    below: tuple[Longs, ...]
    """For each column, the number of delete files whose lower bound is not above the data file's upper bound."""
    flags: tuple[npt.NDArray[np.uint8], ...]


class _ColumnGroup:
    """Equality deletes with the same columns."""

    def __init__(
        self,
        blocks: Sequence[Block],
        ids: tuple[int, ...],
        members: list[EqualityDelete],
        schemas: Sequence[Schema],
    ) -> None:
        """Build the search tree of the deletes.

        Args:
            blocks: The view's blocks of delete files.
            ids: The ids of the equality columns.
            members: The deletes.
            schemas: All schemas of the table.
        """
        pieces = [
            (blocks[number], np.array([delete.row for delete in rows], dtype=np.int64))
            for number, rows in groupby(members, key=lambda delete: delete.block)
        ]
        columns = [_EqualityColumn.from_pieces(column_id, pieces, schemas) for column_id in ids]
        self._columns = [pair[0] for pair in columns if pair is not None]
        ranks = [pair[1] for pair in columns if pair is not None]
        scopes = np.array([delete.scope for delete in members], dtype=np.int64)
        deletes = np.array([delete.delete for delete in members], dtype=np.int64)
        sequence = np.array([delete.sequence for delete in members], dtype=np.int64)
        order = np.lexsort((deletes, ranks[0][0] if ranks else sequence, scopes))
        self._deletes: Longs = deletes[order]
        self._scopes, firsts = np.unique(scopes[order], return_index=True)
        self._firsts: Longs = np.append(firsts, len(order))
        self._newest: Longs = np.maximum.reduceat(sequence[order], firsts)
        # The delete files are the leaves of a tree. A node has the limits of all delete files below it, so a search
        # skips the nodes whose delete files cannot apply to a data file.
        leaves = _Level(
            sequence[order],
            tuple(lower[order] for lower, _, _ in ranks),
            tuple(upper[order] for _, upper, _ in ranks),
            tuple(flags[order] for _, _, flags in ranks),
        )
        self._levels = [leaves]
        while len(self._levels[-1].sequence) > _CHILDREN_PER_NODE:
            self._levels.append(_summarize_level(self._levels[-1]))

    def iter_applicable_pairs(
        self, pieces: Sequence[Piece], sequences: Longs, scopes: Sequence[Longs]
    ) -> Iterator[tuple[Longs, Longs]]:
        """Yield (positions of data files, delete files) of the applicable pairs, in batches of limited size.

        If a search finds too many pairs, it is repeated for each half of the data files.
        """
        spans = [self._find_span(scope, sequences) for scope in scopes]
        in_scope = np.logical_or.reduce([first < last for first, last in spans])
        if not in_scope.any():
            return
        above, below, flags = self._rank_values(pieces, in_scope)
        for first, last in spans:
            data_files = _DataFiles(sequences, first, last, above, below, flags)
            pending = [np.flatnonzero(first < last)]
            while pending:
                rows = pending.pop()
                pairs = self._find_pairs(data_files, rows)
                if pairs is None:
                    pending += [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
                elif len(pairs[0]):
                    yield pairs[0], self._deletes[pairs[1]]

    def _find_span(self, scopes: Longs, sequences: Longs) -> tuple[Longs, Longs]:
        """Return the first leaf (delete file) of each data file's scope, and the end of its leaves.

        Both numbers are equal if the scope is empty or if all of its deletes are too old.
        """
        positions = np.minimum(np.searchsorted(self._scopes, scopes), len(self._scopes) - 1)
        is_applicable = (self._scopes[positions] == scopes) & (self._newest[positions] >= sequences)
        return (
            np.where(is_applicable, self._firsts[positions], 0),
            np.where(is_applicable, self._firsts[positions + 1], 0),
        )

    def _rank_values(
        self, pieces: Sequence[Piece], in_scope: npt.NDArray[np.bool_]
    ) -> tuple[tuple[Longs, ...], tuple[Longs, ...], tuple[npt.NDArray[np.uint8], ...]]:
        """Return the bounds of data files as ranks among the bounds of delete files.

        Files outside of all scopes need no ranks, so they have zeros.

        Returns:
            Three tuples with an array for each column. The first has the number of delete files whose upper bound is
            below the data file's lower bound. The second has the number of delete files whose lower bound is not above
            the data file's upper bound. The third has flags: whether the data file may contain nulls or NaNs.
        """
        ranks_above = tuple(np.zeros(len(in_scope), dtype=np.int64) for _ in self._columns)
        ranks_below = tuple(np.zeros(len(in_scope), dtype=np.int64) for _ in self._columns)
        flags = tuple(np.zeros(len(in_scope), dtype=np.uint8) for _ in self._columns)
        for block, positions, rows in pieces:
            rows_in_scope = in_scope[positions]
            if rows_in_scope.any():
                positions, rows = positions[rows_in_scope], rows[rows_in_scope]
                for number, column in enumerate(self._columns):
                    ranks_above[number][positions], ranks_below[number][positions], flags[number][positions] = (
                        column.compute_data_bounds(block, rows)
                    )
        return ranks_above, ranks_below, flags

    def _find_pairs(self, data_files: _DataFiles, rows: Longs) -> tuple[Longs, Longs] | None:
        """Return (row, leaf) of all pairs of a data file and a delete file that may match.

        The search goes down the tree. Of each node that may match, it takes the children, and keeps those that are in
        the scope of the data file and may match.

        Returns:
            None if there are more pairs than `_PAIRS_MAX` and `rows` can be split.
        """
        first, end = data_files.first[rows], data_files.end[rows]
        # Each data file starts at the level of the tree where about `_CHILDREN_PER_NODE` nodes cover its scope. For
        # example, with 8 children per node, a scope of 8 leaves starts at the leaves, and a scope of 64 leaves a level
        # above them.
        start_level = np.searchsorted(_CHILDREN_PER_NODE ** np.arange(1, len(self._levels)), end - first)
        row = node = np.empty(0, dtype=np.int64)
        for depth in reversed(range(len(self._levels))):
            shift = _CHILDREN_PER_NODE_BITS * depth
            new_rows = np.flatnonzero(start_level == depth)
            ranges, nodes = _spread_ranges(first[new_rows] >> shift, ((end[new_rows] - 1) >> shift) + 1)
            row, node = np.concatenate([row, rows[new_rows][ranges]]), np.concatenate([node, nodes])
            is_kept = (node << shift < data_files.end[row]) & ((node + 1) << shift > data_files.first[row])
            is_kept &= _may_match(self._levels[depth], node, data_files, row)
            row, node = row[is_kept], node[is_kept]
            if depth:
                # Each pair is replaced by a pair for each child of its node, so the limit is lower by this factor.
                if len(row) > _PAIRS_MAX >> _CHILDREN_PER_NODE_BITS and len(rows) > 1:
                    return None
                children = node << _CHILDREN_PER_NODE_BITS
                ranges, node = _spread_ranges(
                    children, np.minimum(children + _CHILDREN_PER_NODE, len(self._levels[depth - 1].sequence))
                )
                row = row[ranges]
        return row, node


def _may_match(level: _Level, node: Longs, data_files: _DataFiles, row: Longs) -> npt.NDArray[np.bool_]:
    """Return bool[pairs]: whether a delete file below a node of the tree may match rows of a data file.

    A node summarises the bounds of the delete files below it. The ranges of both must overlap in each column, or both
    must have a null or a NaN in it. A delete removes rows with equal values, and a null equals a null.

    Args:
        level: The summaries of the nodes on one level of the tree.
        node: The node of each pair.
        data_files: The data files. Their bounds are ranks among the bounds of the delete files.
        row: The data file of each pair.
    """
    may_match = level.sequence[node] >= data_files.sequence[row]
    for lower, upper, delete_flags, above, below, data_flags in zip(
        level.lower, level.upper, level.flags, data_files.above, data_files.below, data_files.flags, strict=True
    ):
        overlaps = (upper[node] >= above[row]) & (lower[node] < below[row])
        may_match &= overlaps | (delete_flags[node] & data_flags[row] != 0)
    return may_match


def _summarize_level(level: _Level) -> _Level:
    """Return the level above a level of the tree. Each of its nodes summarises `_CHILDREN_PER_NODE` nodes."""
    starts = np.arange(0, len(level.sequence), _CHILDREN_PER_NODE)
    return _Level(
        np.maximum.reduceat(level.sequence, starts),
        tuple(np.minimum.reduceat(lower, starts) for lower in level.lower),
        tuple(np.maximum.reduceat(upper, starts) for upper in level.upper),
        tuple(np.bitwise_or.reduceat(flags, starts) for flags in level.flags),
    )


def _spread_ranges(first: Longs, last: Longs) -> tuple[Longs, Longs]:
    """Return all numbers of the ranges [first, last), after the index of the range of each number.

    For example, the ranges [3, 5) and [7, 8) give the indexes 0, 0, 1 and the numbers 3, 4, 7.
    """
    counts = np.maximum(last - first, 0)
    ranges = np.repeat(np.arange(len(first)), counts)
    starts = np.cumsum(counts) - counts
    return ranges, np.arange(len(ranges)) - np.repeat(starts - first, counts)


class _EqualityColumn:
    """One equality column: the bounds of the delete files, from which ranks are computed, and the order of its type."""

    def __init__(self, column_id: int, order: str, required: bool, lowers: Values, uppers: Values) -> None:
        self._column_id = column_id
        self._order = order
        self._required = required
        self._lowers = lowers
        """The distinct lower bounds of the delete files, ascending."""
        self._uppers = uppers
        """The distinct upper bounds of the delete files, ascending."""

    @staticmethod
    def from_pieces(
        column_id: int, pieces: Sequence[tuple[Block, Longs]], schemas: Sequence[Schema]
    ) -> tuple[_EqualityColumn, tuple[Longs, Longs, npt.NDArray[np.uint8]]] | None:
        """Create the column, and return it with the ranks and flags of each delete file.

        Returns:
            None if no delete file has statistics of the column.
        """
        kind = next((kind for block, _ in pieces if (kind := block.find_kind(column_id)) is not None), None)
        if kind is None:
            return None
        order, required = _name_order(kind), _is_required(column_id, schemas)
        stats = [_read_statistics(block, column_id, rows, order, required) for block, rows in pieces]
        lowers = _find_distinct([part.lower[part.lower_known] for part in stats if part.lower is not None])
        uppers = _find_distinct([part.upper[part.upper_known] for part in stats if part.upper is not None])
        column = _EqualityColumn(column_id, order, required, lowers, uppers)
        # A delete file without a bound may match all data files, so its range has no limit on this side. A file without
        # values matches no data file, so its range is empty.
        ranks = [
            (
                _compute_ranks(
                    lowers,
                    part.lower,
                    part.lower_known,
                    "left",
                    unknown_rank=-1,
                    is_empty=part.empty,
                    empty_rank=_UNBOUNDED,
                ),
                _compute_ranks(
                    uppers,
                    part.upper,
                    part.upper_known,
                    "left",
                    unknown_rank=_UNBOUNDED,
                    is_empty=part.empty,
                    empty_rank=-1,
                ),
                part.flags,
            )
            for part in stats
        ]
        lower, upper, flags = (np.concatenate(parts) for parts in zip(*ranks, strict=True))
        return column, (lower, upper, flags)

    def compute_data_bounds(self, block: Block, rows: Longs) -> tuple[Longs, Longs, npt.NDArray[np.uint8]]:
        """Return the bounds of data files as ranks among the bounds of the delete files, and the flags.

        A file without a bound may match all delete files, and a file without values matches none.

        Returns:
            The number of delete files whose upper bound is below the data file's lower bound, the number of delete
            files whose lower bound is not above the data file's upper bound, and whether the data file may contain
            nulls or NaNs.
        """
        statistics = _read_statistics(block, self._column_id, rows, self._order, self._required)
        rank_above = _compute_ranks(
            self._uppers,
            statistics.lower,
            statistics.lower_known,
            "left",
            unknown_rank=0,
            is_empty=statistics.empty,
            empty_rank=_UNBOUNDED,
        )
        rank_below = _compute_ranks(
            self._lowers,
            statistics.upper,
            statistics.upper_known,
            "right",
            unknown_rank=_UNBOUNDED,
            is_empty=statistics.empty,
            empty_rank=-1,
        )
        return rank_above, rank_below, statistics.flags


class _ColumnStatistics(NamedTuple):
    """The statistics of one column in the files of a block."""

    lower: Values | None
    """The lower bounds, or None if the block has no comparable bounds."""
    lower_known: npt.NDArray[np.bool_]
    upper: Values | None
    upper_known: npt.NDArray[np.bool_]
    flags: npt.NDArray[np.uint8]
    """The flags `_NULL` and `_NAN`: whether each file may contain nulls or NaNs. Bounds exclude both."""
    empty: npt.NDArray[np.bool_]
    """Whether all values of each file are null."""


def _read_statistics(block: Block, column_id: int, rows: Longs, order: str, required: bool) -> _ColumnStatistics:
    """Read the statistics of a column for some rows of a block.

    Args:
        block: The block with the statistics.
        column_id: The field id of the column.
        rows: The rows of the block.
        order: The name of the type's comparison order. Bounds with another order are not used.
        required: Whether the column has a value in every row.
    """
    nulls = block.count("null_value_counts", column_id)[rows]
    is_known = nulls != MISSING
    is_empty = is_known & (nulls == block.count("value_counts", column_id)[rows])
    flags = np.where(is_known, nulls > 0, not required).astype(np.uint8)
    if order == "float":
        flags[(block.count("nan_value_counts", column_id)[rows] != 0) & ~is_empty] |= _NAN
    lower, is_lower_known = _read_bounds(block, "lower", column_id, rows, order)
    upper, is_upper_known = _read_bounds(block, "upper", column_id, rows, order)
    # Some writers order UUIDs in another way. Use their bounds only if both are known and in this order.
    if order == "uuid" and lower is not None and upper is not None:
        is_lower_known = is_upper_known = is_lower_known & is_upper_known & (lower <= upper)
    elif order == "uuid":
        lower = upper = None
    return _ColumnStatistics(lower, is_lower_known, upper, is_upper_known, flags, is_empty)


def _read_bounds(
    block: Block, side: str, column_id: int, rows: Longs, order: str
) -> tuple[Values | None, npt.NDArray[np.bool_]]:
    """Return the bounds, and bool[rows], whether each bound is known.

    The bounds are int64, float64 or comparable objects, or None if the block has no comparable bounds.

    Args:
        block: The block.
        side: The bounds: `lower` or `upper`.
        column_id: The column.
        rows: The rows of the block.
        order: The name of the comparison order of the delete files' bounds. Bounds of another order are not comparable.
    """
    column, kind = block.get_bound_column(side, column_id), block.find_kind(column_id)
    if column is None or kind is None or _name_order(kind) != order:
        return None, np.zeros(len(rows), dtype=np.bool_)
    is_known = column.present()[rows]
    if column.packed.form == Form.INTEGERS:
        return column.read_longs()[rows], is_known
    if column.packed.form == Form.FLOATS:
        return column.doubles()[rows], is_known
    decode = _choose_decoder(kind)
    values = np.empty(len(rows), dtype=object)
    values[:] = [decode(text or b"") for text in read_strings(column, rows)]
    return values, is_known


def _choose_decoder(kind: str) -> Callable[[bytes], object]:
    """Return the function that decodes a bound of a type to a comparable object.

    Only the first half of a UUID is compared. Writers order UUIDs as signed or as unsigned numbers, and this module
    uses only first halves on which both orders agree.
    """
    if kind == "uuid":
        return lambda text: text[:_UUID_HALF_BYTES]
    if kind.startswith("decimal"):
        return lambda text: decode_value(Form.STRINGS, kind, text)
    return lambda text: text


def _name_order(kind: str) -> str:
    """Return a name for the comparison order of a type.

    Types that Iceberg promotes to each other without changing the meaning of values have the same order.
    """
    if kind.startswith("decimal"):
        return "decimal " + kind.rpartition(",")[2]
    return {"long": "int", "double": "float"}.get(kind, kind.partition("[")[0])


def _compute_ranks(
    sorted_values: Values,
    values: Values | None,
    is_known: npt.NDArray[np.bool_],
    side: Literal["left", "right"],
    unknown_rank: int,
    is_empty: npt.NDArray[np.bool_],
    empty_rank: int,
) -> Longs:
    """Return the rank of each value: the number of items of `sorted_values` that precede the value.

    Args:
        sorted_values: The values among which to rank, ascending.
        values: The values to rank, or None if none of them is known.
        is_known: Whether each value is known.
        side: "left" to count smaller items, "right" to count smaller and equal items.
        unknown_rank: The rank of unknown values.
        is_empty: Whether each file has no values.
        empty_rank: The rank of files without values.
    """
    ranks = np.full(len(is_known), unknown_rank, dtype=np.int64)
    if values is not None and len(sorted_values):
        ranks[is_known] = np.searchsorted(sorted_values, values[is_known], side=side)
    ranks[is_empty] = empty_rank
    return ranks


def _find_distinct(parts: list[Values]) -> Values:
    """Return the distinct values of all arrays, ascending."""
    return np.unique(np.concatenate(parts)) if parts else np.empty(0)


def _is_required(column_id: int, schemas: Sequence[Schema]) -> bool:
    """Return whether the column has a value in every row, in every schema that contains the column.

    All structs that contain the column must be required too, because a required field of a null struct is null.
    """
    paths = [path for schema in schemas if (path := _read_required_flags(schema, column_id))]
    return bool(paths) and all(all(path) for path in paths)


def _read_required_flags(schema: Schema, column_id: int) -> list[bool]:
    """Return whether the column and each enclosing struct are required; empty if the schema lacks the column."""
    column = schema.column(column_id)
    return [] if column is None else [field.required for field in (column, *schema.list_ancestors(column))]
