"""Pruning by indexes: which files of a view hold no row that matches, as bloom filters, bitmaps and record keys tell.

The rules it keeps. A file leaves only when an index that describes this very file (by its identity, `hashing.file_ids`)
proves that no row of it matches, in the meaning of any client (`meaning.py`). Files that no index describes stay; so do
all files where an index is damaged, of another type of keys, or has no time left. Deletes only shrink what matches, so
an index knows nothing of them. What is asked of an index is told by `projected.py`.

Within a file, bitmaps are exact by row: a conjunction of predicates that are each true of some row of a file, but never
of the same, leaves the file out. That comes last, file by file, for files that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from metaserver.iceberg.expressions.expression import And, Bound, Expression, Or, all_of, predicates_of
from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.files.indexes import OpenIndex
from metaserver.index.files.remote import ColdIndex
from metaserver.index.keys.key_set import KeySet, KeySpan, WantedKeys
from metaserver.index.keys.keys import Bits, has_codes
from metaserver.index.keys.ranks import Distinct
from metaserver.index.kinds.bitmap import Bitmap, BitmapQuestion
from metaserver.index.kinds.kinds import KINDS
from metaserver.index.kinds.questions import Flags, Question
from metaserver.planner.indexes.coverage import Coverage
from metaserver.planner.indexes.index_predicates import IndexPredicate, IndexProjection, KeySetPredicate
from metaserver.planner.indexes.row_intersection import Conjunct, has_row
from metaserver.planner.scan.scan import IndexUse
from metaserver.planner.view.selection import Expired, Selection, narrow_to_any
from metaserver.planner.view.view import TableView
from metaserver.store.port import RegisteredIndexFile


@dataclass
class Probe:
    """What one plan asks of indexes. `coverage` by definition id, `opened` by location.

    An index file that is not in `opened` is as if it were not there. `damaged` gains those that a question broke on.
    """

    view: TableView
    projected: IndexProjection
    coverage: Mapping[str, Coverage]
    opened: Mapping[str, OpenIndex]
    cold: Mapping[object, Mapping[str, Flags]] = field(default_factory=dict)
    """Answers of index files that are not here, by what was asked (`IndexPredicate.key`) and location."""
    afar: Mapping[str, ColdIndex] = field(default_factory=dict)
    """These index files, by location."""
    listed: Sequence[RegisteredIndexFile] = ()
    """All index files that the plan might use."""
    until_s: float = 0.0
    """So long, in monotonic time, the plan may wait for index files."""
    late: bool = False
    """Whether an index file was not there in time."""
    damaged: dict[str, str] = field(default_factory=dict)
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By definition id: files that it was asked about, and those that it removed. Without what rows tell."""
    wanted: dict[str, set[int]] = field(default_factory=dict)
    """By location, numbers of data files whose rows a bitmap index that is not here could have told."""
    _counted: set[object] = field(default_factory=set)
    _kept: dict[object, Flags | None] = field(default_factory=dict)
    _questions: dict[object, Question | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether another plan, made now, would find no more."""
        return not self.late and not self.damaged and not self.wanted

    def again(self) -> None:
        """Before the plan is made once more, of what is known by now."""
        self.asked.clear()
        self.wanted.clear()
        self._counted.clear()

    def steps(self, expired: Expired) -> Iterator[tuple[str, Callable[[Selection], None]]]:
        """What narrows a selection, by name, the cheapest first."""
        used = {definition.kind for definition in self.projected.definitions}
        kinds: frozenset[str] = frozenset()
        for kind in KINDS:
            if kind in used:
                kinds |= {kind}
                yield kind, partial(self.narrow, kinds=kinds, expired=expired)
        if self.by_row:
            yield "bitmap_rows", partial(self.narrow_by_row, expired=expired)

    @property
    def used(self) -> tuple[IndexUse, ...]:
        """So far, one for each index that was asked."""
        by_id = {definition.id: definition for definition in self.projected.definitions}
        return tuple(
            IndexUse(by_id[one].name, by_id[one].kind, asked, removed) for one, (asked, removed) in self.asked.items()
        )

    def narrow(self, selection: Selection, kinds: frozenset[str], expired: Expired) -> None:
        """By all indexes of these kinds: of those that went before, too, because either side of an `or` may need
        another."""
        self._narrow(selection, self.projected.expression, kinds, expired)
        for definition, equalities in self.projected.composite:
            if definition.kind in kinds and not expired():
                self._intersect(selection, IndexPredicate(definition, equalities), expired)
        for demand in self.projected.demands:
            if demand.definition.kind in kinds and not expired():
                self._intersect(selection, demand, expired)

    def _narrow(self, selection: Selection, expression: Expression, kinds: frozenset[str], expired: Expired) -> None:
        match expression:
            case And(children):
                for child in children:
                    self._narrow(selection, child, kinds, expired)
            case Or(children):
                if not all(self._says_something(child, kinds) for child in children):
                    return
                ways = (partial(self._narrow, expression=child, kinds=kinds, expired=expired) for child in children)
                narrow_to_any(selection, ways, expired)
            case Bound():
                definition = self.projected.by_field[expression.column_id]
                if definition.kind in kinds and not expired():
                    self._intersect(selection, IndexPredicate(definition, (expression,)), expired)

    def _says_something(self, expression: Expression, kinds: frozenset[str]) -> bool:
        return any(self.projected.by_field[one.column_id].kind in kinds for one in predicates_of(expression))

    def _intersect(self, selection: Selection, asked: IndexPredicate | KeySetPredicate, expired: Expired) -> None:
        definition_id, key = asked.definition.id, asked.key
        if key not in self._kept:
            self._kept[key] = self._kept_by(asked, expired)
        kept = self._kept[key]
        first = key not in self._counted
        self._counted.add(key)
        if kept is not None:
            before = selection.count()
            selection.intersect(kept)
            files, removed = self.asked.get(definition_id, (0, 0))
            # A later stage, of more kinds, applies it once more, and asks nothing.
            self.asked[definition_id] = files + before * first, removed + before - selection.count()

    def _kept_by(self, asked: IndexPredicate | KeySetPredicate, expired: Expired) -> Flags | None:
        """uint8[rows of the view]: 1 where no index describes the file, or one says that it may match, or there was no
        time to ask it."""
        coverage, question = self.coverage.get(asked.definition.id), self._question(asked)
        if coverage is None or question is None:
            return None
        kept = coverage.uncovered.copy()
        answers = self.cold.get(asked.key, {})
        for part in coverage.parts:
            index = self.opened.get(part.location)
            hits = answers.get(part.location)
            if index is not None and part.location not in self.damaged and not expired():
                try:
                    hits = question.of(index.index)
                except ValueError as error:
                    self.damaged[part.location] = str(error)
            rows = part.rows if hits is None else part.rows[np.flatnonzero(hits.view(np.bool_))]
            kept[rows[rows >= 0]] = 1
        return kept

    def _question(self, asked: IndexPredicate | KeySetPredicate) -> Question | None:
        if asked.key not in self._questions:
            self._questions[asked.key] = asked.question()
        return self._questions[asked.key]

    # By row

    @property
    def by_row(self) -> bool:
        """Whether rows can tell more than files: some conjunction asks two bitmaps."""
        asked = any(map(self._is_bitmap, predicates_of(self.projected.expression)))
        return asked + len(self._by_key) > 1 or _conjoins(self.projected.expression, self._is_bitmap)

    @property
    def _by_key(self) -> list[KeySetPredicate]:
        return [one for one in self.projected.demands if KINDS[one.definition.kind].answers_rows]

    def _is_bitmap(self, predicate: Bound) -> bool:
        return KINDS[self.projected.by_field[predicate.column_id].kind].answers_rows

    def narrow_by_row(self, selection: Selection, expired: Expired) -> None:
        """File by file: leaves out those of which no row is in all bitmaps."""
        kept = np.ones(self.view.rows, dtype=np.uint8)
        conjuncts, rest = self._conjuncts()
        for row in selection.places().tolist():
            if expired():
                break
            if not has_row(conjuncts, row, partial(self._rows, rest, row)):
                kept[row] = 0
        selection.intersect(kept)

    def _conjuncts(self) -> tuple[list[Conjunct], Expression]:
        """What is asked of bitmaps that are here as keys that are wanted, the narrowest first; and what else."""
        expression = self.projected.expression
        children = expression.children if isinstance(expression, And) else (expression,)
        wanted: list[tuple[IndexDefinition, WantedKeys]] = []
        rest: list[Expression] = []
        for child in children:
            keys = self._wanted_keys(child) if isinstance(child, Bound) and self._is_bitmap(child) else None
            if keys is None or not isinstance(child, Bound):
                rest.append(child)
            else:
                wanted.append((self.projected.by_field[child.column_id], keys))
                if not self._is_here(wanted[-1][0]):  # of those afar, `_rows` knows which to fetch
                    rest.append(child)
        wanted += [(demand.definition, demand.dynamic_filters.keys) for demand in self._by_key]
        found = [
            Conjunct(keys, self.coverage[definition.id], self.opened, self.damaged)
            for definition, keys in wanted
            if definition.id in self.coverage
        ]
        return sorted((one for one in found if one.tells), key=lambda one: one.share), all_of(*rest)

    def _is_here(self, definition: IndexDefinition) -> bool:
        coverage = self.coverage.get(definition.id)
        return coverage is not None and all(part.location in self.opened for part in coverage.parts)

    def _wanted_keys(self, predicate: Bound) -> WantedKeys | None:
        """Codes that a predicate asks for, where it asks for nothing else."""
        question = self._question(IndexPredicate(self.projected.by_field[predicate.column_id], (predicate,)))
        if not isinstance(question, BitmapQuestion):
            return None
        ranges = question.ranges
        if ranges.nulls or ranges.nans or not has_codes(ranges.kind) or not ranges.closed:
            return None
        low, high = ranges.closed[0].low, ranges.closed[0].high
        if len(ranges.closed) == 1 and isinstance(low, int) and isinstance(high, int):
            return KeySpan(ranges.kind, low, high)
        points = ranges.points
        return None if points is None else KeySet(ranges.kind, Distinct(np.array(points, dtype=np.uint64)))

    def _rows(self, expression: Expression, row: int) -> Bits | None:
        """Rows of the file that may match; None: any."""
        match expression:
            case And(children):
                narrowest: Bits | None = None
                for child in children:
                    found = self._rows(child, row)
                    if found is not None:
                        narrowest = found if narrowest is None else narrowest & found
                        if not narrowest.any():
                            break
                return narrowest
            case Or(children):
                widest: Bits | None = None
                for child in children:
                    found = self._rows(child, row)
                    if found is None:
                        return None
                    widest = found if widest is None else widest | found
                return widest
            case Bound():
                return self._rows_of(expression, row) if self._is_bitmap(expression) else None
        return None

    def _rows_of(self, predicate: Bound, row: int) -> Bits | None:
        asked = IndexPredicate(self.projected.by_field[predicate.column_id], (predicate,))
        question = self._question(asked)
        if not isinstance(question, BitmapQuestion):
            return None
        found = self._place(asked, row)
        if found is None:
            return None
        location, file, bitmap = found
        try:
            return bitmap.rows(file, question.ranges)
        except ValueError as error:
            self.damaged[location] = str(error)
            return None

    def _place(self, asked: IndexPredicate, row: int) -> tuple[str, int, Bitmap] | None:
        """The index file that describes a file, its number there, and the bitmaps, which are of as many rows."""
        coverage = self.coverage.get(asked.definition.id)
        found = None if coverage is None else coverage.file_at(row)
        bitmap = None if found is None else self._bitmap_of(*found)
        if found is None or bitmap is None:
            return None
        location, file = found
        records = (self.opened.get(location) or self.afar[location]).files.records[file]
        try:
            if bitmap.section(file).rows != records:
                raise ValueError(f"file {file} has {records} rows; its bitmap is of others")
        except ValueError as error:
            self.damaged[location] = str(error)
            return None
        return location, file, bitmap

    def _bitmap_of(self, location: str, file: int) -> Bitmap | None:
        """One that can be asked for the rows of this file of it."""
        index, afar = self.opened.get(location), self.afar.get(location)
        if location in self.damaged:
            return None
        if index is not None:
            assert isinstance(index.index, Bitmap)
            return index.index
        if afar is None:
            return None
        if afar.bitmap.has_rows(file):
            return afar.bitmap.bitmap
        self.wanted.setdefault(location, set()).add(file)
        return None


def _conjoins(expression: Expression, is_bitmap: Callable[[Bound], bool]) -> bool:
    if isinstance(expression, And):
        asked = [child for child in expression.children if any(map(is_bitmap, predicates_of(child)))]
        return len(asked) > 1 or any(_conjoins(child, is_bitmap) for child in asked)
    return isinstance(expression, Or) and any(_conjoins(child, is_bitmap) for child in expression.children)
