"""Columns of data files in memory, and which of their rows may match: for tables that others are joined with.

A column is its distinct keys in order and each row's rank among them, as a bitmap index has it, so that predicates mean
here what they mean there (`meaning.py`, POSSIBLE): a row is left out only where it matches to no client. What cannot be
told of a predicate is taken as true. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from metaserver.errors import BadRequest
from metaserver.iceberg.expressions.expression import Always, And, Bound, Expression, Or, predicates_of
from metaserver.iceberg.expressions.literals import Above, Below, Between, parse_literal
from metaserver.iceberg.expressions.projection import source_ranges
from metaserver.iceberg.files.parquet import Unreadable
from metaserver.iceberg.types.schema import Column, Schema
from metaserver.iceberg.types.transforms import IDENTITY
from metaserver.index.kernels import _ordered
from metaserver.index.keys.key_set import KeySet
from metaserver.index.keys.keys import Bytes, KeyRanges, Keys, Mask, has_codes, key_of, keys_of, mask_of
from metaserver.index.keys.ranks import Distinct, Ranks, ranked
from metaserver.index.kinds.dictionary import BYTES, CODES, Bounds, distinct_of, opened, pack
from metaserver.index.kinds.postings import union_of
from metaserver.planner.pruning.dynamic_filters import DynamicFilter
from metaserver.planner.pruning.semantics import ComparisonSemantics, key_ranges


class DimensionColumn(NamedTuple):
    """A column of a data file, of the type that it has now."""

    column_id: int
    kind: str


class FileColumn:
    """One column of one file. Immutable."""

    def __init__(
        self, distinct: Distinct, ranks: Ranks, *, codes: bool, there: Mask | None, nans: Mask | None = None
    ) -> None:
        """`ranks` are those of the rows among the distinct keys; anything where a row is not `there`: null or NaN."""
        self._form = CODES if codes else BYTES
        self._packed: Bytes = pack(distinct)
        self._count = len(distinct)
        self._ranks = ranks
        self.rows = len(ranks)
        self.clipped = distinct.clipped
        """Whether some keys stand for longer values."""
        self._there, self._nans = there, nans

    @staticmethod
    def of(array: pa.ChunkedArray, kind: str) -> FileColumn:
        """ValueError where it does not hold values of the type, or more than can be counted."""
        if pa.types.is_dictionary(array.type) and array.num_chunks and not pa.types.is_primitive(array.type.value_type):
            return FileColumn._of_dictionary(array.unify_dictionaries(), kind)
        return FileColumn._of_keys(keys_of(array, kind))

    @staticmethod
    def _of_keys(keys: Keys) -> FileColumn:
        distinct, ranks = ranked(keys)
        nans = None if keys.nan is None else mask_of(keys.nan, keys.rows)
        return FileColumn(distinct, ranks, codes=keys.codes is not None, there=keys.present, nans=nans)

    @staticmethod
    def _of_dictionary(array: pa.ChunkedArray, kind: str) -> FileColumn:
        """Of strings: each value once, however often it is repeated. Its keys may be more than the rows have."""
        keys = keys_of(array.chunk(0).dictionary, kind)
        distinct, ranks = ranked(keys)
        indices = pa.chunked_array([chunk.indices for chunk in array.chunks]).combine_chunks()
        places = indices.fill_null(0).to_numpy(zero_copy_only=False)
        if not keys.rows:
            return FileColumn(
                distinct,
                np.zeros(len(places), np.uint32),
                codes=keys.codes is not None,
                there=np.zeros(len(places), dtype=np.bool_),
            )
        there: Mask | None = None
        if indices.null_count or keys.present is not None:
            there = indices.is_valid().to_numpy(zero_copy_only=False)
            there = there if keys.present is None else there & keys.present[places]
        return FileColumn(distinct, ranks[places], codes=keys.codes is not None, there=there)

    @staticmethod
    def absent(schemas: Sequence[Schema], wanted: DimensionColumn, rows: int, path: str) -> FileColumn:
        """Of a file that was written before there was the column: its initial default, or null. `schemas`: the newest
        first. Unreadable where a default is of a field in a struct, which may be null itself, or is no key."""
        column = next((found for schema in schemas if (found := schema.column(wanted.column_id))), None)
        if column is None or column.initial_default is None:
            return FileColumn._of_keys(keys_of(pa.nulls(rows), wanted.kind))
        if column.parent is not None:
            raise Unreadable(path, f"it lacks {column.name}, which has a default within a struct")
        return FileColumn._constant(_default(column, wanted.kind, path), wanted.kind, rows)

    @staticmethod
    def _constant(key: int | bytes, kind: str, rows: int) -> FileColumn:
        one = FileColumn._of_keys(_keys_of_one(key, kind))
        one._ranks, one.rows = np.zeros(rows, dtype=np.uint32), rows
        return one

    @property
    def size_bytes(self) -> int:
        masks = (self._there, self._nans)
        return self._packed.nbytes + self._ranks.nbytes + sum(one.nbytes for one in masks if one is not None) + 500

    def within(self, ranges: KeyRanges) -> Mask:
        """bool[rows]: the rows in the ranges, and those that are null or NaN if asked for."""
        marks = np.zeros(self._count, dtype=np.bool_)
        for begin, end in zip(
            *(one.tolist() for one in Bounds(ranges, self._form).intervals(self._opened)), strict=True
        ):
            marks[begin:end] = True
        found = self._marked(marks)
        if self._there is not None and (ranges.nulls or ranges.nans):
            nans = np.zeros(self.rows, dtype=np.bool_) if self._nans is None else self._nans
            found |= ranges.nulls & ~self._there & ~nans
            found |= ranges.nans & nans
        return found

    def among(self, keys: KeySet) -> Mask:
        """bool[rows]: the rows that have one of the keys."""
        return self._marked(keys.marks(distinct_of(self._opened)).view(np.bool_))

    def keys_of_rows(self, rows: Mask | None) -> Distinct:
        """The distinct keys of these rows, None for all."""
        there = self._there if rows is None else rows if self._there is None else rows & self._there
        distinct = distinct_of(self._opened)
        if there is None or there.all():
            return distinct
        marks = np.zeros(self._count, dtype=np.bool_)
        marks[self._ranks[there]] = True
        return _taken(distinct, marks)

    @property
    def _opened(self) -> _ordered.Numbers | _ordered.Strings:
        return opened(self._packed.data, self._count, self._form)

    def _marked(self, marks: Mask) -> Mask:
        if not self._count:
            return np.zeros(self.rows, dtype=np.bool_)
        found: Mask = marks[self._ranks]
        return found if self._there is None else found & self._there


Columns = Mapping[DimensionColumn, FileColumn]


def wanted_of(bound: Expression, dynamic_filters: Sequence[DynamicFilter]) -> Iterator[DimensionColumn]:
    """The columns that `rows_where` reads."""
    for predicate in predicates_of(bound):
        if (plain := _plain(predicate)) is not None:
            yield from (DimensionColumn(one.column_id, one.kind) for one in predicates_of(plain))
    yield from (DimensionColumn(one.column_id, one.kind) for one in dynamic_filters)


def rows_where(bound: Expression, dynamic_filters: Sequence[DynamicFilter], columns: Columns) -> Mask | None:
    """bool[rows]: those that may match the expression and have one of the keys of each; None for all."""
    found = _rows(bound, columns)
    for one in dynamic_filters:
        mine = columns[DimensionColumn(one.column_id, one.kind)].among(one.keys)
        found = mine if found is None else found & mine
    return found


def _rows(expression: Expression, columns: Columns) -> Mask | None:
    match expression:
        case And(children):
            parts = [part for child in children if (part := _rows(child, columns)) is not None]
            return np.logical_and.reduce(parts) if parts else None
        case Or(children):
            ways = [_rows(child, columns) for child in children]
            told = [way for way in ways if way is not None]
            return np.logical_or.reduce(told) if len(told) == len(ways) else None
        case Always(value):
            return None if value else np.zeros(next(iter(columns.values())).rows, dtype=np.bool_)
        case Bound():
            return _rows_of(expression, columns)
    raise TypeError(f"not a bound expression: {expression}")


def _rows_of(predicate: Bound, columns: Columns) -> Mask | None:
    plain = _plain(predicate)
    if plain is None or not isinstance(plain, Bound):
        return None if plain is None else _rows(plain, columns)
    ranges = key_ranges(plain, plain.kind, ComparisonSemantics.POSSIBLE)
    return None if ranges is None else columns[DimensionColumn(plain.column_id, plain.kind)].within(ranges)


def _plain(predicate: Bound) -> Expression | None:
    """What every row that matches satisfies, in predicates on columns themselves; None where nothing is known."""
    found = source_ranges(predicate)
    if any(one.transform != IDENTITY or not _has_keys(one.kind) for one in predicates_of(found)):
        return None
    return found


def _has_keys(kind: str) -> bool:
    try:
        has_codes(kind)
    except ValueError:
        return False
    return True


def distinct_keys(parts: Iterable[Distinct], kind: str) -> Distinct:
    """All keys of the parts together."""
    found = list(parts)
    return found[0] if len(found) == 1 else union_of(found, CODES if has_codes(kind) else BYTES)


def _taken(distinct: Distinct, marks: Mask) -> Distinct:
    if distinct.codes is not None:
        return Distinct(distinct.codes[marks])
    assert distinct.starts is not None
    assert distinct.heap is not None
    lengths = np.diff(distinct.starts)
    starts = np.concatenate([[0], np.cumsum(lengths[marks])])
    return Distinct(None, starts, distinct.heap[np.repeat(marks, lengths)])


def _default(column: Column, kind: str, path: str) -> int | bytes:
    try:
        literal = parse_literal(kind, column.initial_default)
        if isinstance(literal, Above | Below | Between):
            raise ValueError("it is none of the type's values")
        return key_of(literal, kind)
    except (BadRequest, ValueError) as error:
        raise Unreadable(path, f"it lacks {column.name}, whose default is not understood: {error}") from None


def _keys_of_one(key: int | bytes, kind: str) -> Keys:
    if isinstance(key, int):
        return Keys(kind, 1, np.full(1, key, dtype=np.uint64), None, None, None, None)
    return Keys(kind, 1, None, np.array([0, len(key)], np.int64), np.frombuffer(key, dtype=np.uint8), None, None)
