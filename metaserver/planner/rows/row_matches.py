"""Which rows of a data file satisfy a predicate, as bitmap indexes have it, in the meaning of whoever asks.

The rule it keeps: rows are exact, or they are more than there should be and marked so. A predicate on a term that has
no bitmap for this file, or that key ranges cannot say, may hold for any row; what a conjunction says of the others
still narrows. Predicates that the file's partition decides for every client are taken as decided (`residuals.py`).

SQL engines do not agree on NaN in comparisons. An expression that came of SQL lets NaN through (`sql.py`): in a file
with a NaN in a compared column its rows are not exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from metaserver.iceberg.expressions.expression import ORDERED, Always, And, Bound, Expression, Or
from metaserver.iceberg.types.values import FLOATS
from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.keys.keys import Bits, KeyRanges
from metaserver.index.kinds.bits import none_of
from metaserver.index.kinds.questions import PredicateKey, key_of_predicate
from metaserver.planner.indexes.resolver import BitmapIndex
from metaserver.planner.pruning.semantics import ComparisonSemantics, key_ranges

_ROWS_MAX = 1 << 32
"""Of one file: indexes and answers have positions of 32 bits. A writer may claim more."""


class MatchingRows(NamedTuple):
    """`bits` of the rows that may match, None for any row; where they are `exact`, just these do, and for None all."""

    bits: Bits | None
    exact: bool


@dataclass
class PredicateMatcher:
    """One question, for any number of files. `indexes` by column id and transform of their term.

    `from_sql` says that the expression came of SQL. `damaged` gains index files that a question broke on.
    """

    indexes: Mapping[tuple[int, str], BitmapIndex]
    semantics: ComparisonSemantics
    from_sql: bool
    damaged: dict[str, str] = field(default_factory=dict)
    _ranges: dict[PredicateKey, KeyRanges | None] = field(default_factory=dict)

    def of(self, expression: Expression, place: int, records: int) -> MatchingRows:
        """Of the file at this place among all of the view, which has so many rows; the expression is bound, the
        residual for its partition."""
        if records > _ROWS_MAX:
            return MatchingRows(None, False)
        match expression:
            case Always(value):
                return MatchingRows(None if value else none_of(records), True)
            case And(children):
                return self._all([self.of(child, place, records) for child in children])
            case Or(children):
                return self._any([self.of(child, place, records) for child in children])
            case Bound():
                return self._where(expression, place, records)
        raise TypeError(f"not a bound expression: {expression}")

    @staticmethod
    def _all(marks: list[MatchingRows]) -> MatchingRows:
        narrowest: Bits | None = None
        for one in marks:
            if one.bits is not None:
                narrowest = one.bits if narrowest is None else narrowest & one.bits
        return MatchingRows(
            narrowest, all(one.exact for one in marks) or (narrowest is not None and not narrowest.any())
        )

    @staticmethod
    def _any(marks: list[MatchingRows]) -> MatchingRows:
        widest: Bits | None = None
        for one in marks:
            if one.bits is None:
                return MatchingRows(None, False)
            widest = one.bits if widest is None else widest | one.bits
        return MatchingRows(widest, all(one.exact for one in marks))

    def _where(self, predicate: Bound, place: int, records: int) -> MatchingRows:
        covered = self.indexes.get((predicate.column_id, predicate.transform))
        ranges = None if covered is None else self._ranges_of(predicate, covered.definition)
        if covered is None or ranges is None:
            return MatchingRows(None, False)
        found = covered.coverage.file_at(place)
        if found is None or found[0] in self.damaged:
            return MatchingRows(None, False)
        location, file = found
        bitmap = covered.bitmap(location)
        if bitmap is None:
            return MatchingRows(None, False)
        try:
            if bitmap.section(file).rows != records:
                raise ValueError(f"file {file} has {records} rows; its bitmap is of others")
            exact = bitmap.exact(ranges)
            if (
                self.from_sql
                and predicate.op in ORDERED
                and ranges.kind in FLOATS
                and self.semantics is ComparisonSemantics.SQL
            ):
                exact &= not bitmap.rows(file, KeyRanges(ranges.kind, (), False, True)).any()
            return MatchingRows(bitmap.rows(file, ranges), exact)
        except ValueError as error:
            self.damaged[location] = str(error)
            return MatchingRows(None, False)

    def _ranges_of(self, predicate: Bound, definition: IndexDefinition) -> KeyRanges | None:
        key = key_of_predicate(predicate)
        if key not in self._ranges:
            self._ranges[key] = key_ranges(predicate, definition.terms[0].kind, self.semantics)
        return self._ranges[key]


def without(bits: Bits, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Bits:
    """The bits but for these rows, which are distinct."""
    cleared = bits.copy()
    np.bitwise_and.at(cleared, rows >> 6, ~(np.uint64(1) << (rows & 63).astype(np.uint64)))
    return cleared
