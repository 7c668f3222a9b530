"""Columns of a dimension table's data files in memory, and the search for the rows that may match a filter.

A column consists of its sorted distinct keys and the rank of each row's key, as in a bitmap index. So predicates
have the same semantics as in index pruning (`semantics.py`, POSSIBLE): a row is excluded only if it matches for no
client. A predicate that cannot be evaluated counts as true. The functions have no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from seamark.formats.iceberg.expressions.binding import Above, Below, Between, parse_literal
from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Or, collect_predicates
from seamark.formats.iceberg.expressions.projection import find_source_ranges
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.types.schema import Column, Schema
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.kernels import _ordered
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.key_set import KeySet
from seamark.formats.index.keys.keys import (
    CODE_MAX,
    Bytes,
    Codes,
    KeyRanges,
    Keys,
    Mask,
    has_codes,
    has_keys,
    make_key,
    unpack_bits,
)
from seamark.formats.index.keys.ranks import Distinct, Ranks, rank_keys
from seamark.formats.index.kinds.dictionary import BYTES, CODES, Bounds, open_dictionary, pack_dictionary, read_distinct
from seamark.formats.index.kinds.postings import merge_distinct
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics, compute_key_ranges

_OBJECT_BYTES = 500
"""The estimated memory of a `FileColumn` without its arrays."""


class DimensionColumn(NamedTuple):
    """A reference to a column of a data file, with its current type."""

    column_id: int
    kind: str


class FileColumn:
    """One column of one data file. An instance is immutable."""

    def __init__(
        self, distinct: Distinct, ranks: Ranks, *, codes: bool, is_present: Mask | None, nans: Mask | None = None
    ) -> None:
        """Create the column from its keys.

        Args:
            distinct: The sorted distinct keys.
            ranks: The rank of each row's key; undefined for rows that are null or NaN, where `is_present` is False.
            codes: Whether the keys are codes, which are uint64, instead of bytes.
            is_present: bool[rows]: whether each row has a key. None if all rows have one.
            nans: bool[rows]: whether each row is NaN. None if no row is NaN.
        """
        self._form = CODES if codes else BYTES
        self._packed_keys: Bytes = pack_dictionary(distinct)
        self._count = len(distinct)
        self._ranks = ranks
        self.rows = len(ranks)
        self.clipped = distinct.clipped
        """Whether some keys are truncated values."""
        self._is_present, self._nans = is_present, nans

    @staticmethod
    def from_array(array: pa.ChunkedArray, kind: str) -> FileColumn:
        """Create the column from the values of an array.

        Raises:
            ValueError: The values do not have the type `kind`, or there are too many values.
        """
        if pa.types.is_dictionary(array.type) and array.num_chunks and not pa.types.is_primitive(array.type.value_type):
            return FileColumn._build_from_dictionary(array.unify_dictionaries(), kind)
        return FileColumn._build_from_keys(convert_to_keys(array, kind))

    @staticmethod
    def _build_from_keys(keys: Keys) -> FileColumn:
        distinct, ranks = rank_keys(keys)
        nans = None if keys.nan is None else unpack_bits(keys.nan, keys.rows)
        return FileColumn(distinct, ranks, codes=keys.codes is not None, is_present=keys.present, nans=nans)

    @staticmethod
    def _build_from_dictionary(array: pa.ChunkedArray, kind: str) -> FileColumn:
        """Create a column of strings from an array that stores each value once, in a dictionary.

        Only the values of the dictionary are converted to keys. Some of them may occur in no row.
        """
        keys = convert_to_keys(array.chunk(0).dictionary, kind)
        distinct, ranks = rank_keys(keys)
        indices = pa.chunked_array([chunk.indices for chunk in array.chunks]).combine_chunks()
        indexes = indices.fill_null(0).to_numpy(zero_copy_only=False)
        if not keys.rows:  # The dictionary is empty, so all rows are null.
            return FileColumn(
                distinct,
                np.zeros(len(indexes), np.uint32),
                codes=keys.codes is not None,
                is_present=np.zeros(len(indexes), dtype=np.bool_),
            )
        is_present: Mask | None = None
        if indices.null_count or keys.present is not None:
            is_present = indices.is_valid().to_numpy(zero_copy_only=False)
            is_present = is_present if keys.present is None else is_present & keys.present[indexes]
        return FileColumn(distinct, ranks[indexes], codes=keys.codes is not None, is_present=is_present)

    @staticmethod
    def make_absent(schemas: Sequence[Schema], column_ref: DimensionColumn, rows: int, path: str) -> FileColumn:
        """Create the column of a file that lacks it. Each row has the initial default of the column, or null.

        Args:
            schemas: The schemas, newest first. The newest schema with the column has its default.
            column_ref: The column.
            rows: The number of rows of the file.
            path: The path of the file, for the error message.

        Raises:
            Unreadable: The default is not a valid key, or belongs to a field of a struct, which may itself be null.
        """
        column = next((candidate for schema in schemas if (candidate := schema.column(column_ref.column_id))), None)
        if column is None or column.initial_default is None:
            return FileColumn._build_from_keys(convert_to_keys(pa.nulls(rows), column_ref.kind))
        if column.parent is not None:
            raise Unreadable(
                path, f"the file lacks the column {column.name}, whose default within a struct is not supported"
            )
        return FileColumn._make_constant(_read_default(column, column_ref.kind, path), column_ref.kind, rows)

    @staticmethod
    def _make_constant(key: int | bytes, kind: str, rows: int) -> FileColumn:
        column = FileColumn._build_from_keys(_make_single_key(key, kind))
        column._ranks, column.rows = np.zeros(rows, dtype=np.uint32), rows
        return column

    @property
    def size_bytes(self) -> int:
        masks = (self._is_present, self._nans)
        mask_bytes = sum(mask.nbytes for mask in masks if mask is not None)
        return self._packed_keys.nbytes + self._ranks.nbytes + mask_bytes + _OBJECT_BYTES

    def find_rows_within(self, ranges: KeyRanges) -> Mask:
        """Return whether each row is within the ranges, bool[rows]. The ranges may include null and NaN."""
        is_selected = np.zeros(self._count, dtype=np.bool_)
        for begin, end in zip(
            *(positions.tolist() for positions in Bounds(ranges, self._form).find_intervals(self._opened)), strict=True
        ):
            is_selected[begin:end] = True
        mask = self._find_rows_with_values(is_selected)
        if self._is_present is not None and (ranges.nulls or ranges.nans):
            nans = np.zeros(self.rows, dtype=np.bool_) if self._nans is None else self._nans
            mask |= ranges.nulls & ~self._is_present & ~nans
            mask |= ranges.nans & nans
        return mask

    def mark_rows_with_keys(self, keys: KeySet) -> Mask:
        """Return whether the key of each row is in `keys`, bool[rows]."""
        return self._find_rows_with_values(keys.mark_keys(read_distinct(self._opened)).view(np.bool_))

    def mark_matching_rows(self, match_keys: Callable[[Distinct], Mask]) -> Mask:
        """Return whether each row has a matching key, bool[rows].

        Args:
            match_keys: A function that returns bool[keys]: whether each distinct key matches.
        """
        return self._find_rows_with_values(match_keys(read_distinct(self._opened)))

    def collect_keys(self, rows: Mask | None) -> Distinct:
        """Return the distinct keys of these rows, bool[rows], or of all rows if `rows` is None. Nulls have no key."""
        is_present = self._is_present if rows is None else rows if self._is_present is None else rows & self._is_present
        distinct = read_distinct(self._opened)
        if is_present is None or is_present.all():
            return distinct
        is_selected = np.zeros(self._count, dtype=np.bool_)
        is_selected[self._ranks[is_present]] = True
        return _select_keys(distinct, is_selected)

    @property
    def codes(self) -> tuple[Codes, Mask]:
        """The code of each row's key, uint64[rows], and bool[rows], whether the row has a key or NaN.

        The type of the column must have codes as keys. NaN has the greatest code.
        """
        distinct, ranks, is_present = self.ranked
        assert distinct.codes is not None
        codes = distinct.codes[ranks] if self._count else np.zeros(self.rows, dtype=np.uint64)
        if self._nans is None:
            return codes, is_present
        return np.where(self._nans, np.uint64(CODE_MAX), codes), is_present | self._nans

    @property
    def ranked(self) -> tuple[Distinct, Ranks, Mask]:
        """The distinct keys, the rank of each row's key, and bool[rows], whether each row has a key."""
        if not self._count:
            is_present = np.zeros(self.rows, dtype=np.bool_)
        else:
            is_present = np.ones(self.rows, dtype=np.bool_) if self._is_present is None else self._is_present
        return read_distinct(self._opened), self._ranks, is_present

    @property
    def _opened(self) -> _ordered.Numbers | _ordered.Strings:
        return open_dictionary(self._packed_keys.data, self._count, self._form)

    def _find_rows_with_values(self, is_selected: Mask) -> Mask:
        if not self._count:
            return np.zeros(self.rows, dtype=np.bool_)
        mask: Mask = is_selected[self._ranks]
        return mask if self._is_present is None else mask & self._is_present


Columns = Mapping[DimensionColumn, FileColumn]


def iterate_filtered_columns(bound: Expression, dynamic_filters: Sequence[DynamicFilter]) -> Iterator[DimensionColumn]:
    """Yield the columns that a filter and dynamic filters compare, which `find_rows_where` needs."""
    for predicate in collect_predicates(bound):
        if (plain_condition := _to_plain_condition(predicate)) is not None:
            for plain_predicate in collect_predicates(plain_condition):
                yield DimensionColumn(plain_predicate.column_id, plain_predicate.kind)
    for dynamic_filter in dynamic_filters:
        yield DimensionColumn(dynamic_filter.column_id, dynamic_filter.kind)


def find_rows_where(bound: Expression, dynamic_filters: Sequence[DynamicFilter], columns: Columns) -> Mask | None:
    """Return whether each row may match the expression and every dynamic filter, bool[rows]. None means all rows."""
    mask = _find_matching_rows(bound, columns)
    for dynamic_filter in dynamic_filters:
        is_match = columns[DimensionColumn(dynamic_filter.column_id, dynamic_filter.kind)].mark_rows_with_keys(
            dynamic_filter.keys
        )
        mask = intersect_masks(mask, is_match)
    return mask


def intersect_masks(left: Mask | None, right: Mask | None) -> Mask | None:
    """Return the rows that are in both masks. None represents all rows."""
    return right if left is None else left if right is None else left & right


def _find_matching_rows(expression: Expression, columns: Columns) -> Mask | None:
    """Return whether each row may match the expression, bool[rows], or None for all rows.

    A child that cannot be evaluated gives None. An OR with such a child may match all rows.
    """
    match expression:
        case And(children):
            parts = [part for child in children if (part := _find_matching_rows(child, columns)) is not None]
            return np.logical_and.reduce(parts) if parts else None
        case Or(children):
            branches = [_find_matching_rows(child, columns) for child in children]
            bounded_branches = [branch for branch in branches if branch is not None]
            return np.logical_or.reduce(bounded_branches) if len(bounded_branches) == len(branches) else None
        case Always(value):
            return None if value else np.zeros(next(iter(columns.values())).rows, dtype=np.bool_)
        case Bound():
            return _filter_rows(expression, columns)
    raise TypeError(f"the expression is not bound: {expression}")


def _filter_rows(predicate: Bound, columns: Columns) -> Mask | None:
    """Return whether each row may match the predicate, bool[rows], or None if it cannot be evaluated."""
    condition = _to_plain_condition(predicate)
    if condition is None or not isinstance(condition, Bound):
        return None if condition is None else _find_matching_rows(condition, columns)
    ranges = compute_key_ranges(condition, condition.kind, ComparisonSemantics.POSSIBLE)
    return (
        None
        if ranges is None
        else columns[DimensionColumn(condition.column_id, condition.kind)].find_rows_within(ranges)
    )


def _to_plain_condition(predicate: Bound) -> Expression | None:
    """Return a condition on plain columns that every matching row satisfies, or None if there is no such condition.

    For example, `year(t) = 2024` becomes a range of `t`.
    """
    ranges = find_source_ranges(predicate)
    if any(bound.transform != IDENTITY or not has_keys(bound.kind) for bound in collect_predicates(ranges)):
        return None
    return ranges


def union_keys(parts: Iterable[Distinct], kind: str) -> Distinct:
    """Return the union of the keys of all parts."""
    key_parts = list(parts)
    return key_parts[0] if len(key_parts) == 1 else merge_distinct(key_parts, CODES if has_codes(kind) else BYTES)


def _select_keys(distinct: Distinct, is_selected: Mask) -> Distinct:
    """Return the distinct keys for which `is_selected`, bool[keys], is True."""
    if distinct.codes is not None:
        return Distinct(distinct.codes[is_selected])
    assert distinct.starts is not None
    assert distinct.heap is not None
    lengths = np.diff(distinct.starts)
    starts = np.concatenate([[0], np.cumsum(lengths[is_selected])])
    return Distinct(None, starts, distinct.heap[np.repeat(is_selected, lengths)])


def _read_default(column: Column, kind: str, path: str) -> int | bytes:
    """Return the key of a column's initial default.

    Raises:
        Unreadable: The default is invalid.
    """
    try:
        literal = parse_literal(kind, column.initial_default)
        if isinstance(literal, Above | Below | Between):
            raise ValueError("the value is outside the type's range")
        return make_key(literal, kind)
    except (BadRequest, ValueError) as error:
        raise Unreadable(path, f"the file lacks the column {column.name}, whose default is invalid: {error}") from None


def _make_single_key(key: int | bytes, kind: str) -> Keys:
    if isinstance(key, int):
        return Keys(kind, 1, np.full(1, key, dtype=np.uint64), None, None, None, None)
    return Keys(kind, 1, None, np.array([0, len(key)], np.int64), np.frombuffer(key, dtype=np.uint8), None, None)
