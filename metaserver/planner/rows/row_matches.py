"""Search by bitmap indexes for the rows of a data file that satisfy a predicate. The caller chooses the semantics.

The result is exact, or it is a superset and marked as one. A predicate may match any row if the file has no bitmap
for its term, or if key ranges cannot express it. In this case, the other conjuncts still narrow the result. A
predicate that the file's partition decides for every client is not looked up (`residuals.py`).

SQL engines differ about NaN in comparisons. An expression that was parsed from SQL includes NaN (`sql.py`), so the rows
of a file with a NaN in a compared column are not exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seamark.formats.iceberg.expressions.expression import ORDERED, Always, And, Bound, Expression, Or
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.keys import Bits, KeyRanges
from seamark.formats.index.kinds.bits import make_empty_bits
from seamark.formats.index.kinds.queries import PredicateKey, make_predicate_key
from seamark.metaserver.planner.indexes.resolver import BitmapIndex
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics, compute_key_ranges

_ROWS_MAX = 1 << 32
"""The maximum number of rows of a file. Positions in indexes and answers have 32 bits."""


class MatchingRows(NamedTuple):
    """The rows that may match. `bits` is None if all rows may match.

    If `exact` is True, each of these rows matches.
    """

    bits: Bits | None
    exact: bool


_ALL_ROWS = MatchingRows(None, exact=False)
"""The result if no index can evaluate an expression: each row of the file may match."""


@dataclass
class PredicateMatcher:
    """Evaluates an expression on any number of files.

    Attributes:
        indexes: The bitmap indexes, by the column id and the transform of the index's term.
        from_sql: Whether the expression was parsed from SQL.
        damaged: The reasons why index files are damaged, by location.
    """

    indexes: Mapping[tuple[int, str], BitmapIndex]
    semantics: ComparisonSemantics
    from_sql: bool
    damaged: dict[str, str] = field(default_factory=dict)
    _ranges: dict[PredicateKey, KeyRanges | None] = field(default_factory=dict)

    def match_rows(self, expression: Expression, position: int, records: int) -> MatchingRows:
        """Return the rows of a file that may match an expression.

        Files with very many rows are not evaluated, because their bits would take much memory.

        Args:
            expression: The residual of the filter for the file's partition.
            position: The position of the file in the view.
            records: The number of rows of the file.
        """
        if records > _ROWS_MAX:
            return _ALL_ROWS
        match expression:
            case Always(value):
                return MatchingRows(None if value else make_empty_bits(records), exact=True)
            case And(children):
                return self._intersect_parts([self.match_rows(child, position, records) for child in children])
            case Or(children):
                return self._unite_parts([self.match_rows(child, position, records) for child in children])
            case Bound():
                return self._match_predicate(expression, position, records)
        raise TypeError(f"the expression is not bound: {expression}")

    @staticmethod
    def _intersect_parts(parts: list[MatchingRows]) -> MatchingRows:
        """Return the rows that all parts may match.

        The result is exact if all parts are exact. It is also exact if no row remains.
        """
        narrowest: Bits | None = None
        for part in parts:
            if part.bits is not None:
                narrowest = part.bits if narrowest is None else narrowest & part.bits
        return MatchingRows(
            narrowest, all(part.exact for part in parts) or (narrowest is not None and not narrowest.any())
        )

    @staticmethod
    def _unite_parts(parts: list[MatchingRows]) -> MatchingRows:
        """Return the rows that any part may match. If a part may match all rows, the result has all rows."""
        widest: Bits | None = None
        for part in parts:
            if part.bits is None:
                return MatchingRows(None, False)
            widest = part.bits if widest is None else widest | part.bits
        return MatchingRows(widest, all(part.exact for part in parts))

    def _match_predicate(self, predicate: Bound, position: int, records: int) -> MatchingRows:
        """Return the rows of a file that may match a predicate, or all rows if no index can evaluate it.

        If an index file is damaged, its location is added to `damaged`, and it is not used again.

        SQL engines differ on whether NaN is greater than all numbers. So a comparison by the rules of SQL is not exact
        if the file has a NaN.
        """
        index = self.indexes.get((predicate.column_id, predicate.transform))
        ranges = None if index is None else self._compute_ranges(predicate, index.definition)
        if index is None or ranges is None:
            return _ALL_ROWS
        location_and_file = index.coverage.find_index_file(position)
        if location_and_file is None or location_and_file[0] in self.damaged:
            return _ALL_ROWS
        location, file = location_and_file
        bitmap = index.find_bitmap(location)
        if bitmap is None:
            return _ALL_ROWS
        try:
            if bitmap.open_section(file).rows != records:
                raise ValueError(f"file {file} has {records} rows, but its bitmap has {bitmap.open_section(file).rows}")
            exact = bitmap.is_exact_for(ranges)
            if (
                self.from_sql
                and predicate.op in ORDERED
                and ranges.kind in FLOATS
                and self.semantics is ComparisonSemantics.SQL
            ):
                nan_only = KeyRanges(ranges.kind, ranges=(), nulls=False, nans=True)
                exact &= not bitmap.find_rows(file, nan_only).any()
            return MatchingRows(bitmap.find_rows(file, ranges), exact)
        except ValueError as error:
            self.damaged[location] = str(error)
            return _ALL_ROWS

    def _compute_ranges(self, predicate: Bound, definition: IndexDefinition) -> KeyRanges | None:
        key = make_predicate_key(predicate)
        if key not in self._ranges:
            self._ranges[key] = compute_key_ranges(predicate, definition.terms[0].kind, self.semantics)
        return self._ranges[key]


def clear_rows(bits: Bits, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Bits:
    """Return a copy of the bits without these rows."""
    # The bits are stored in words of 64 bits. `rows >> 6` is the number of a row's word, and `rows & 63` its bit.
    remaining_bits = bits.copy()
    np.bitwise_and.at(remaining_bits, rows >> 6, ~(np.uint64(1) << (rows & 63).astype(np.uint64)))
    return remaining_bits
