"""Pruning by indexes: which files of a view hold no row that matches, as bloom filters, bitmaps and record keys tell.

The rules it keeps. A file leaves only when an index that describes this very file (by its identity, `hashing.file_id`)
proves that no row of it matches, in the meaning of any client (`meaning.py`). Files that no index describes stay; so do
all files where an index is damaged, of another type of keys, or has no time left. Deletes only shrink what matches, so
an index knows nothing of them.

An index on a term is to the planner what a partition field is: the filter is projected onto it (`projection.py`), so
that an index on `day(ts)` serves a range of `ts`, and one on `bucket[16](id)` an equality. `lower` is ours alone.

Within a file, bitmaps are exact by row: a conjunction of predicates that are each true of some row of a file, but never
of the same, leaves the file out. That comes last, file by file, for files that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from metaserver.iceberg.expressions import TRUE, And, Bound, Expression, Op, Or, all_of, any_of, predicates_of
from metaserver.iceberg.partition import PartitionField, PartitionSpec
from metaserver.iceberg.projection import inclusive
from metaserver.iceberg.transforms import IDENTITY
from metaserver.index.bitmap import Bitmap
from metaserver.index.bloom import Bloom
from metaserver.index.definitions import IndexDefinition
from metaserver.index.hashing import Hashes, hash_keys, hash_rows
from metaserver.index.index_file import FilesTable
from metaserver.index.indexes import OpenIndex
from metaserver.index.keys import Bits, Key, KeyRanges, Keys, has_codes
from metaserver.index.packing import Longs
from metaserver.index.record import Record
from metaserver.index.terms import LOWER, Term, lowered
from metaserver.planner.coverage import FileIds
from metaserver.planner.meaning import Meaning, key_ranges
from metaserver.planner.prune import Expired, Selection
from metaserver.planner.scan import IndexUse
from metaserver.planner.view import TableView, comparable

FIRST_FIELD_ID = 1 << 31
"""Fields that stand for indexed terms; no column and no partition field has an id above 2^31 - 1."""
KEYS_MAX = 100_000
"""Keys that one predicate may look for in bloom filters or record indexes; longer lists prove nothing there."""
COMBINATIONS_MAX = 10_000
"""Keys that equalities on the columns of one composite key may stand for."""

Flags = npt.NDArray[np.uint8]
STAGES = ("bloom", "bitmap", "record")
"""Kinds that narrow whole files, in the order of their cost."""


class Part(NamedTuple):
    """`rows` int64[files]: for each data file of an index file its row among all rows of the view, -1 where it has
    none."""

    location: str
    rows: Longs


class Described(Protocol):
    """An index file, here or afar."""

    @property
    def location(self) -> str: ...

    @property
    def files(self) -> FilesTable: ...


class Coverage:
    """Which rows of a view the index files of one definition describe. Immutable."""

    def __init__(self, ids: FileIds, files: Iterable[Described]) -> None:
        self.uncovered: Flags = np.ones(ids.rows, dtype=np.uint8)
        parts: list[Part] = []
        for one in files:
            part = Part(one.location, ids.find(one.files.ids))
            there = part.rows[part.rows >= 0]
            if len(there):
                self.uncovered[there] = 0
                parts.append(part)
        self.parts = tuple(parts)
        self._places: tuple[Longs, Longs] | None = None

    @property
    def size_bytes(self) -> int:
        places = 0 if self._places is None else 2 * self._places[0].nbytes
        return self.uncovered.nbytes + sum(part.rows.nbytes for part in self.parts) + places

    @property
    def files(self) -> int:
        """Rows of the view that are covered."""
        return len(self.uncovered) - int(self.uncovered.sum())

    @property
    def places(self) -> tuple[Longs, Longs]:
        """(number of the part, number of the file in it), each int64[rows of the view], -1 where uncovered."""
        if self._places is None:
            part_of = np.full(len(self.uncovered), -1, dtype=np.int64)
            file_of = np.full(len(self.uncovered), -1, dtype=np.int64)
            for number, part in enumerate(self.parts):
                files = np.flatnonzero(part.rows >= 0)
                part_of[part.rows[files]] = number
                file_of[part.rows[files]] = files
            self._places = part_of, file_of
        return self._places


@dataclass(frozen=True)
class Projected:
    """A filter as it concerns the indexes of a table.

    `expression` has fields in the place of columns, one for each definition of one term, which `by_field` tells;
    `composite` are definitions of several terms, each with the equalities that the filter demands of all of them.
    """

    expression: Expression
    by_field: Mapping[int, IndexDefinition]
    composite: tuple[tuple[IndexDefinition, tuple[Bound, ...]], ...] = ()

    @cached_property
    def definitions(self) -> tuple[IndexDefinition, ...]:
        """Those that can narrow."""
        fields = dict.fromkeys(one.column_id for one in predicates_of(self.expression))
        found = [self.by_field[field_id] for field_id in fields] + [definition for definition, _ in self.composite]
        return tuple(found)


def project(bound: Expression, definitions: Sequence[IndexDefinition]) -> Projected | None:
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
    expression = _useful(_over(bound, fields, by_field), by_field)
    composite = tuple(
        (definition, equalities)
        for definition in definitions
        if len(definition.terms) > 1 and (equalities := _equalities(bound, definition))
    )
    return Projected(expression, by_field, composite) if expression != TRUE or composite else None


def _over(
    expression: Expression, fields: Mapping[int, Sequence[PartitionField]], by_field: Mapping[int, IndexDefinition]
) -> Expression:
    """`fields` by the column that they are of."""
    match expression:
        case And(children):
            return all_of(*(_over(child, fields, by_field) for child in children))
        case Or(children):
            return any_of(*(_over(child, fields, by_field) for child in children))
        case Bound(column_id=column_id):
            mine = [
                one for one in fields.get(column_id, ()) if _is_of(expression, by_field[one.field_id or 0].terms[0])
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
    cold: Mapping[tuple[str, Bound], Flags] = field(default_factory=dict)
    """Answers of index files that are not here, by location and predicate."""
    late: bool = False
    """Whether an index file was not there in time."""
    damaged: dict[str, str] = field(default_factory=dict)
    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By definition id: files that it was asked about, and those that it removed. Without what rows tell."""
    _kept: dict[object, Flags | None] = field(default_factory=dict)
    _ranges: dict[Bound, KeyRanges | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether another plan, made now, would find no more."""
        return not self.late and not self.damaged

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
                find = partial(self._by_keys, definition, equalities, expired)
                self._intersect(selection, definition.id, (definition.id, equalities), find)

    def _narrow(self, selection: Selection, expression: Expression, kinds: frozenset[str], expired: Expired) -> None:
        match expression:
            case And(children):
                for child in children:
                    self._narrow(selection, child, kinds, expired)
            case Or(children):
                if not all(self._says_something(child, kinds) for child in children):
                    return
                union: Selection | None = None
                for child in children:
                    if expired():
                        return
                    part = selection.copy()
                    self._narrow(part, child, kinds, expired)
                    if union is None:
                        union = part
                    else:
                        union.add(part)
                selection.clear()
                if union is not None:
                    selection.add(union)
            case Bound():
                definition = self.projected.by_field[expression.column_id]
                if definition.kind in kinds and not expired():
                    self._intersect(
                        selection, definition.id, expression, partial(self._by_predicate, expression, expired)
                    )

    def _says_something(self, expression: Expression, kinds: frozenset[str]) -> bool:
        return any(self.projected.by_field[one.column_id].kind in kinds for one in predicates_of(expression))

    def _intersect(
        self, selection: Selection, definition_id: str, key: object, find: Callable[[], Flags | None]
    ) -> None:
        first = key not in self._kept
        if first:
            self._kept[key] = find()
        kept = self._kept[key]
        if kept is not None:
            before = selection.count()
            selection.intersect(kept)
            asked, removed = self.asked.get(definition_id, (0, 0))
            # A later stage, of more kinds, applies it once more, and asks nothing.
            self.asked[definition_id] = asked + before * first, removed + before - selection.count()

    def _by_predicate(self, predicate: Bound, expired: Expired) -> Flags | None:
        definition = self.projected.by_field[predicate.column_id]
        ranges = self._ranges_of(predicate, definition)
        if ranges is None:
            return None
        if definition.kind == "bitmap":
            return self._kept_by(definition, lambda index: _bitmap(index).files_with(ranges), expired)
        keys = keys_listed(ranges)
        if keys is None:
            return None
        if definition.kind == "bloom":
            hashes = hash_keys(keys, 0)
            return self._kept_by(definition, lambda index: _bloom(index).probe(hashes), expired, predicate)
        return self._kept_by_hashes(definition, [keys], expired)

    def _by_keys(self, definition: IndexDefinition, equalities: tuple[Bound, ...], expired: Expired) -> Flags | None:
        """By a composite key, of which the filter lists all values of all parts."""
        lists: list[tuple[Key, ...]] = []
        for term, equality in zip(definition.terms, equalities, strict=True):
            ranges = key_ranges(equality, term.kind, Meaning.POSSIBLE)
            if ranges is None or ranges.points is None:
                return None
            lists.append(ranges.points)
        if prod(map(len, lists)) > COMBINATIONS_MAX:  # a zero of floats stands for two
            return None
        rows = list(product(*lists))
        columns = [
            _literal_keys([row[place] for row in rows], term.kind) for place, term in enumerate(definition.terms)
        ]
        return self._kept_by_hashes(definition, columns, expired)

    def _kept_by_hashes(self, definition: IndexDefinition, columns: Sequence[Keys], expired: Expired) -> Flags | None:
        high, low = hash_rows(columns, 0), hash_rows(columns, 1)

        def hits(index: OpenIndex) -> Flags:
            found = np.zeros(len(index.files), dtype=np.uint8)
            found[_record(index).lookup(high, low)[1]] = 1
            return found

        return self._kept_by(definition, hits, expired)

    def _kept_by(
        self,
        definition: IndexDefinition,
        ask: Callable[[OpenIndex], Flags],
        expired: Expired,
        predicate: Bound | None = None,
    ) -> Flags | None:
        """uint8[rows of the view]: 1 where no index describes the file, or one says that it may match, or there was no
        time to ask it."""
        coverage = self.coverage.get(definition.id)
        if coverage is None:
            return None
        kept = coverage.uncovered.copy()
        for part in coverage.parts:
            index = self.opened.get(part.location)
            hits = None if predicate is None else self.cold.get((part.location, predicate))
            if index is not None and part.location not in self.damaged and not expired():
                try:
                    hits = ask(index)
                except ValueError as error:
                    self.damaged[part.location] = str(error)
            rows = part.rows if hits is None else part.rows[np.flatnonzero(hits.view(np.bool_))]
            kept[rows[rows >= 0]] = 1
        return kept

    def _ranges_of(self, predicate: Bound, definition: IndexDefinition) -> KeyRanges | None:
        if predicate not in self._ranges:
            self._ranges[predicate] = key_ranges(predicate, definition.terms[0].kind, Meaning.POSSIBLE)
        return self._ranges[predicate]

    # By row

    @property
    def by_row(self) -> bool:
        """Whether rows can tell more than files: some conjunction asks two bitmaps."""
        return _conjoins(self.projected.expression, self._is_bitmap)

    def _is_bitmap(self, predicate: Bound) -> bool:
        return self.projected.by_field[predicate.column_id].kind == "bitmap"

    def narrow_by_row(self, selection: Selection, expired: Expired) -> None:
        """File by file: leaves out those of which no row is in all bitmaps."""
        kept = np.ones(self.view.rows, dtype=np.uint8)
        for row in selection.places().tolist():
            if expired():
                break
            found = self._rows(self.projected.expression, row)
            if found is not None and not found.any():
                kept[row] = 0
        selection.intersect(kept)

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
        definition = self.projected.by_field[predicate.column_id]
        coverage, ranges = self.coverage.get(definition.id), self._ranges_of(predicate, definition)
        if coverage is None or ranges is None:
            return None
        part_of, file_of = coverage.places
        if part_of[row] < 0:
            return None
        location = coverage.parts[part_of[row]].location
        index = self.opened.get(location)
        if index is None or location in self.damaged:
            return None
        bitmap, file = _bitmap(index), int(file_of[row])
        try:
            if bitmap.section(file).rows != index.files.records[file]:
                raise ValueError(f"file {file} has {index.files.records[file]} rows; its bitmap is of others")
            return bitmap.rows(file, ranges)
        except ValueError as error:
            self.damaged[location] = str(error)
            return None


def _conjoins(expression: Expression, is_bitmap: Callable[[Bound], bool]) -> bool:
    if isinstance(expression, And):
        asked = [child for child in expression.children if any(map(is_bitmap, predicates_of(child)))]
        return len(asked) > 1 or any(_conjoins(child, is_bitmap) for child in asked)
    return isinstance(expression, Or) and any(_conjoins(child, is_bitmap) for child in expression.children)


def bloom_hashes(predicate: Bound, definition: IndexDefinition) -> Hashes | None:
    """What a bloom index is asked for a predicate on its term; None where it knows nothing of it."""
    ranges = key_ranges(predicate, definition.terms[0].kind, Meaning.POSSIBLE)
    keys = None if ranges is None else keys_listed(ranges)
    return None if keys is None else hash_keys(keys, 0)


def keys_listed(ranges: KeyRanges) -> Keys | None:
    """All keys that are asked for, where they are few enough to be listed; neither null nor NaN is a key."""
    points = ranges.points
    if points is None or ranges.nulls or ranges.nans or len(points) > KEYS_MAX:
        return None
    return _literal_keys(points, ranges.kind)


def _literal_keys(keys: Sequence[Key], kind: str) -> Keys:
    """As if they were a column."""
    if has_codes(kind):
        return Keys(kind, len(keys), np.array(keys, dtype=np.uint64), None, None, None, None)
    spelled = [key for key in keys if isinstance(key, bytes)]
    starts = np.zeros(len(spelled) + 1, dtype=np.int64)
    np.cumsum([len(key) for key in spelled], out=starts[1:])
    return Keys(kind, len(spelled), None, starts, np.frombuffer(b"".join(spelled), dtype=np.uint8), None, None)


def _bloom(index: OpenIndex) -> Bloom:
    assert isinstance(index.index, Bloom)
    return index.index


def _bitmap(index: OpenIndex) -> Bitmap:
    assert isinstance(index.index, Bitmap)
    return index.index


def _record(index: OpenIndex) -> Record:
    assert isinstance(index.index, Record)
    return index.index
