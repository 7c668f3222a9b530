"""Pruning by indexes: which files of a view hold no row that matches, as bloom filters, bitmaps and record keys tell.

The rules it keeps. A file leaves only when an index that describes this very file (by its identity, `hashing.file_ids`)
proves that no row of it matches, in the meaning of any client (`meaning.py`). Files that no index describes stay; so do
all files where an index is damaged, of another type of keys, or has no time left. Deletes only shrink what matches, so
an index knows nothing of them.

An index on a term is to the planner what a partition field is: the filter is projected onto it (`projection.py`), so
that an index on `day(ts)` serves a range of `ts`, and one on `bucket[16](id)` an equality. `lower` is ours alone.

Within a file, bitmaps are exact by row: a conjunction of predicates that are each true of some row of a file, but never
of the same, leaves the file out. That comes last, file by file, for files that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from metaserver.iceberg.expressions import TRUE, And, Bound, Expression, Op, Or, all_of, any_of, predicates_of
from metaserver.iceberg.partition import PartitionField, PartitionSpec
from metaserver.iceberg.projection import inclusive
from metaserver.iceberg.transforms import IDENTITY
from metaserver.index.bitmap import Bitmap
from metaserver.index.cold import ColdIndex
from metaserver.index.definitions import IndexDefinition
from metaserver.index.hashing import hash_keys
from metaserver.index.indexes import OpenIndex
from metaserver.index.key_set import KeySet, KeySpan, WantedKeys
from metaserver.index.keys import Bits, Key, Keys, family, has_codes
from metaserver.index.questions import (
    BitmapQuestion,
    BloomQuestion,
    Flags,
    KeysQuestion,
    PredicateKey,
    Question,
    RecordQuestion,
    key_of_predicate,
)
from metaserver.index.ranks import Distinct
from metaserver.index.terms import LOWER, Term, lowered
from metaserver.planner.coverage import Coverage
from metaserver.planner.joint_rows import Conjunct, has_row
from metaserver.planner.meaning import Meaning, key_ranges
from metaserver.planner.members import Members, narrowest_first
from metaserver.planner.scan import IndexUse
from metaserver.planner.selection import Expired, Selection, narrow_to_any
from metaserver.planner.view import TableView, comparable
from metaserver.store.port import IndexFile

FIRST_FIELD_ID = 1 << 31
"""Fields that stand for indexed terms; no column and no partition field has an id above 2^31 - 1."""
KEYS_MAX = 100_000
"""Keys that one predicate may look for in bloom filters or record indexes; longer lists prove nothing there."""
TRANSFORMED_MAX = 200_000
"""Values to which functions of indexed terms are applied for one plan; an index that would take more is left out."""
HASHED_MAX = 2_000
"""Keys of a join that are looked for in bloom filters: of more, one is found by chance wherever one looks."""
COMBINATIONS_MAX = 10_000
"""Keys that equalities on the columns of one composite key may stand for."""

STAGES = ("bloom", "bitmap", "record")
"""Kinds that narrow whole files, in the order of their cost."""


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """That the values of a term are among the keys of a join, of an index on that very column."""

    definition: IndexDefinition
    members: Members

    @property
    def key(self) -> tuple[str, int]:
        return self.definition.id, id(self.members)

    def question(self) -> Question | None:
        """None where the index would say nothing of so many keys."""
        keys, kind = self.members.keys, self.definition.kind
        if kind == "bitmap":
            return KeysQuestion(keys)
        if len(keys) > (HASHED_MAX if kind == "bloom" else KEYS_MAX):
            return None
        return BloomQuestion(hash_keys(keys.keys, 0)) if kind == "bloom" else RecordQuestion.about([keys.keys])


class Asked(NamedTuple):
    """Predicates that are asked of an index together: one, or one for each term of a composite key."""

    definition: IndexDefinition
    predicates: tuple[Bound, ...]

    @property
    def key(self) -> tuple[str, tuple[PredicateKey, ...]]:
        return self.definition.id, tuple(map(key_of_predicate, self.predicates))

    def question(self) -> Question | None:
        """None where the index knows nothing of them."""
        lists: list[tuple[Key, ...]] = []
        for term, predicate in zip(self.definition.terms, self.predicates, strict=True):
            ranges = key_ranges(predicate, term.kind, Meaning.POSSIBLE)
            if ranges is None:
                return None
            if self.definition.kind == "bitmap":
                return BitmapQuestion(ranges)
            if ranges.points is None or ranges.nulls or ranges.nans:  # neither null nor NaN is a key of a literal
                return None
            lists.append(ranges.points)
        if prod(map(len, lists)) > (KEYS_MAX if len(lists) == 1 else COMBINATIONS_MAX):  # a zero stands for two
            return None
        rows = list(product(*lists)) if len(lists) > 1 else []
        columns = [
            _literal_keys([row[place] for row in rows] if rows else lists[place], term.kind)
            for place, term in enumerate(self.definition.terms)
        ]
        return (
            BloomQuestion(hash_keys(columns[0], 0))
            if self.definition.kind == "bloom"
            else RecordQuestion.about(columns)
        )


@dataclass(frozen=True)
class Projected:
    """A filter as it concerns the indexes of a table.

    `expression` has fields in the place of columns, one for each definition of one term, which `by_field` tells;
    `composite` are definitions of several terms, each with the equalities that the filter demands of all of them.
    """

    expression: Expression
    by_field: Mapping[int, IndexDefinition]
    composite: tuple[tuple[IndexDefinition, tuple[Bound, ...]], ...] = ()
    demands: tuple[Demand, ...] = ()
    """What joins ask, of indexes that can tell; those with the fewest keys first."""

    @cached_property
    def definitions(self) -> tuple[IndexDefinition, ...]:
        """Those that can narrow."""
        fields = dict.fromkeys(one.column_id for one in predicates_of(self.expression))
        found = [self.by_field[field_id] for field_id in fields] + [definition for definition, _ in self.composite]
        found += [one.definition for one in self.demands]
        return tuple({one.id: one for one in found}.values())

    def asked_of(self, definition_id: str) -> list[Asked]:
        """What is asked of the index files of one definition, each once."""
        single = [
            Asked(definition, (predicate,))
            for predicate in {key_of_predicate(one): one for one in predicates_of(self.expression)}.values()
            if (definition := self.by_field[predicate.column_id]).id == definition_id
        ]
        return single + [Asked(*one) for one in self.composite if one[0].id == definition_id]


def project(
    bound: Expression, definitions: Sequence[IndexDefinition], members: Sequence[Members] = ()
) -> Projected | None:
    """None where no definition can narrow anything."""
    by_field = {
        FIRST_FIELD_ID + number: definition
        for number, definition in enumerate(definitions)
        if len(definition.terms) == 1
    }
    fields: dict[int, list[PartitionField]] = {}
    for field_id, definition in by_field.items():
        term = definition.terms[0]
        one = PartitionField(definition.name, term.transform, source_id=term.column_id, field_id=field_id)
        fields.setdefault(term.column_id, []).append(one)
    expression = _useful(_over(bound, fields, by_field, _Budget(TRANSFORMED_MAX)), by_field)
    composite = tuple(
        (definition, equalities)
        for definition in definitions
        if len(definition.terms) > 1 and (equalities := _equalities(bound, definition))
    )
    demands = tuple(
        Demand(definition, one)
        for one in narrowest_first(members)
        for definition in definitions
        if len(definition.terms) == 1 and _has_keys_of(definition.terms[0], one)
    )
    narrows = expression != TRUE or composite or demands
    return Projected(expression, by_field, composite, demands) if narrows else None


def _has_keys_of(term: Term, members: Members) -> bool:
    same_column = (term.column_id, term.transform) == (members.column_id, IDENTITY)
    return same_column and family(term.kind) == family(members.kind)


@dataclass
class _Budget:
    values: int

    def allows(self, predicate: Bound, field: PartitionField) -> bool:
        """Whether the field's function may be applied to the predicate's values; then that is spent."""
        cost = 0 if field.transform == IDENTITY else len(predicate.values)
        if cost > self.values:
            return False
        self.values -= cost
        return True


def _over(
    expression: Expression,
    fields: Mapping[int, Sequence[PartitionField]],
    by_field: Mapping[int, IndexDefinition],
    budget: _Budget,
) -> Expression:
    """`fields` by the column that they are of."""
    match expression:
        case And(children):
            return all_of(*(_over(child, fields, by_field, budget) for child in children))
        case Or(children):
            return any_of(*(_over(child, fields, by_field, budget) for child in children))
        case Bound(column_id=column_id):
            mine = [
                one
                for one in fields.get(column_id, ())
                if _is_of(expression, by_field[one.field_id or 0].terms[0]) and budget.allows(expression, one)
            ]
            plain = PartitionSpec(0, tuple(one for one in mine if one.transform != LOWER))
            by_lower = [_lowered(expression, one) for one in mine if one.transform == LOWER]
            return all_of(inclusive(expression, plain), *by_lower)
    return expression


def _is_of(predicate: Bound, term: Term) -> bool:
    """Whether the predicate's values are the term's. By an older schema the column may be of another type: a date was
    days, where the timestamp that it was promoted to is microseconds; and functions overflow by type."""
    if predicate.kind == term.source:
        return True
    return term.transform == IDENTITY and comparable(predicate.kind, term.source)


def _lowered(predicate: Bound, term: PartitionField) -> Expression:
    """What the lower-case form of every value that matches satisfies."""
    if predicate.op not in (Op.EQ, Op.IN, Op.STARTS_WITH):
        return TRUE
    if (predicate.kind, predicate.transform) != ("string", IDENTITY):  # of other functions, values say nothing
        return TRUE
    values = sorted({lowered(str(value)) for value in predicate.values})
    op = Op.EQ if predicate.op is Op.IN and len(values) == 1 else predicate.op
    return replace(predicate, op=op, column_id=term.field_id or 0, name=term.name, values=tuple(values))


def _useful(expression: Expression, by_field: Mapping[int, IndexDefinition]) -> Expression:
    """Without the predicates about which their index knows nothing."""
    match expression:
        case And(children):
            return all_of(*(_useful(child, by_field) for child in children))
        case Or(children):
            return any_of(*(_useful(child, by_field) for child in children))
        case Bound():
            if by_field[expression.column_id].kind == "bitmap":
                return expression
            points = expression.op in (Op.EQ, Op.IN) and len(expression.values) <= KEYS_MAX
            return expression if points else TRUE
    return expression


def _equalities(bound: Expression, definition: IndexDefinition) -> tuple[Bound, ...] | None:
    """For each term a predicate that every matching row satisfies and that lists its values; None where one lacks."""
    listed = bound.children if isinstance(bound, And) else (bound,)
    found: list[Bound] = []
    combinations = 1
    for term in definition.terms:
        mine = [
            one
            for one in listed
            if isinstance(one, Bound)
            and one.op in (Op.EQ, Op.IN)
            and (one.column_id, one.transform) == (term.column_id, term.transform)
            and _is_of(one, term)
        ]
        if not mine:
            return None
        fewest = min(mine, key=lambda one: len(one.values))
        found.append(fewest)
        combinations *= len(fewest.values)
    return tuple(found) if combinations <= COMBINATIONS_MAX else None


@dataclass
class Probe:
    """What one plan asks of indexes. `coverage` by definition id, `opened` by location.

    An index file that is not in `opened` is as if it were not there. `damaged` gains those that a question broke on.
    """

    view: TableView
    projected: Projected
    coverage: Mapping[str, Coverage]
    opened: Mapping[str, OpenIndex]
    cold: Mapping[object, Mapping[str, Flags]] = field(default_factory=dict)
    """Answers of index files that are not here, by what was asked (`Asked.key`) and location."""
    afar: Mapping[str, ColdIndex] = field(default_factory=dict)
    """These index files, by location."""
    listed: Sequence[IndexFile] = ()
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
        for kind in STAGES:
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
                self._intersect(selection, Asked(definition, equalities), expired)
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
                    self._intersect(selection, Asked(definition, (expression,)), expired)

    def _says_something(self, expression: Expression, kinds: frozenset[str]) -> bool:
        return any(self.projected.by_field[one.column_id].kind in kinds for one in predicates_of(expression))

    def _intersect(self, selection: Selection, asked: Asked | Demand, expired: Expired) -> None:
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

    def _kept_by(self, asked: Asked | Demand, expired: Expired) -> Flags | None:
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

    def _question(self, asked: Asked | Demand) -> Question | None:
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
    def _by_key(self) -> list[Demand]:
        return [one for one in self.projected.demands if one.definition.kind == "bitmap"]

    def _is_bitmap(self, predicate: Bound) -> bool:
        return self.projected.by_field[predicate.column_id].kind == "bitmap"

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
        wanted += [(demand.definition, demand.members.keys) for demand in self._by_key]
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
        question = self._question(Asked(self.projected.by_field[predicate.column_id], (predicate,)))
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
        asked = Asked(self.projected.by_field[predicate.column_id], (predicate,))
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

    def _place(self, asked: Asked, row: int) -> tuple[str, int, Bitmap] | None:
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


def _literal_keys(keys: Sequence[Key], kind: str) -> Keys:
    """As if they were a column."""
    if has_codes(kind):
        return Keys(kind, len(keys), np.array(keys, dtype=np.uint64), None, None, None, None)
    spelled = [key for key in keys if isinstance(key, bytes)]
    starts = np.zeros(len(spelled) + 1, dtype=np.int64)
    np.cumsum([len(key) for key in spelled], out=starts[1:])
    return Keys(kind, len(spelled), None, starts, np.frombuffer(b"".join(spelled), dtype=np.uint8), None, None)
