"""What a filter, and the keys of joins, ask of indexes: which predicates of which index, and as which question.

An index on a term is to the planner what a partition field is: the filter is projected onto it (`projection.py`), so
that an index on `day(ts)` serves a range of `ts`, and one on `bucket[16](id)` an equality. `lower` is ours alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec.structs import replace

from metaserver.iceberg.expressions.expression import TRUE, And, Bound, Expression, Op, all_of, predicates_of, replaced
from metaserver.iceberg.expressions.projection import inclusive
from metaserver.iceberg.metadata.partition import PartitionField, PartitionSpec
from metaserver.iceberg.types.transforms import IDENTITY
from metaserver.index.files.definitions import IndexDefinition
from metaserver.index.keys.keys import KeyRanges, family
from metaserver.index.keys.terms import LOWER, Term, lowered
from metaserver.index.kinds.kinds import KINDS
from metaserver.index.kinds.questions import COMBINATIONS_MAX, PredicateKey, Question, key_of_predicate
from metaserver.planner.pruning.dynamic_filters import DynamicFilter, narrowest_first
from metaserver.planner.pruning.semantics import ComparisonSemantics, key_ranges
from metaserver.planner.view.view import comparable

FIRST_FIELD_ID = 1 << 31
"""Fields that stand for indexed terms; no column and no partition field has an id above 2^31 - 1."""
TRANSFORMED_MAX = 200_000
"""Values to which functions of indexed terms are applied for one plan; an index that would take more is left out."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySetPredicate:
    """That the values of a term are among the keys of a join, of an index on that very column."""

    definition: IndexDefinition
    dynamic_filters: DynamicFilter

    @property
    def key(self) -> tuple[str, int]:
        return self.definition.id, id(self.dynamic_filters)

    def question(self) -> Question | None:
        """None where the index would say nothing of so many keys."""
        return KINDS[self.definition.kind].question_of_keys(self.dynamic_filters.keys)


class IndexPredicate(NamedTuple):
    """Predicates that are asked of an index together: one, or one for each term of a composite key."""

    definition: IndexDefinition
    predicates: tuple[Bound, ...]

    @property
    def key(self) -> tuple[str, tuple[PredicateKey, ...]]:
        return self.definition.id, tuple(map(key_of_predicate, self.predicates))

    def question(self) -> Question | None:
        """None where the index knows nothing of them."""
        asked: list[KeyRanges] = []
        for term, predicate in zip(self.definition.terms, self.predicates, strict=True):
            ranges = key_ranges(predicate, term.kind, ComparisonSemantics.POSSIBLE)
            if ranges is None:
                return None
            asked.append(ranges)
        return KINDS[self.definition.kind].question(asked)


@dataclass(frozen=True)
class IndexProjection:
    """A filter as it concerns the indexes of a table.

    `expression` has fields in the place of columns, one for each definition of one term, which `by_field` tells;
    `composite` are definitions of several terms, each with the equalities that the filter demands of all of them.
    """

    expression: Expression
    by_field: Mapping[int, IndexDefinition]
    composite: tuple[tuple[IndexDefinition, tuple[Bound, ...]], ...] = ()
    demands: tuple[KeySetPredicate, ...] = ()
    """What joins ask, of indexes that can tell; those with the fewest keys first."""

    @cached_property
    def definitions(self) -> tuple[IndexDefinition, ...]:
        """Those that can narrow."""
        fields = dict.fromkeys(one.column_id for one in predicates_of(self.expression))
        found = [self.by_field[field_id] for field_id in fields] + [definition for definition, _ in self.composite]
        found += [one.definition for one in self.demands]
        return tuple({one.id: one for one in found}.values())

    def asked_of(self, definition_id: str) -> list[IndexPredicate]:
        """What is asked of the index files of one definition, each once."""
        single = [
            IndexPredicate(definition, (predicate,))
            for predicate in {key_of_predicate(one): one for one in predicates_of(self.expression)}.values()
            if (definition := self.by_field[predicate.column_id]).id == definition_id
        ]
        return single + [IndexPredicate(*one) for one in self.composite if one[0].id == definition_id]


def project(
    bound: Expression, definitions: Sequence[IndexDefinition], dynamic_filters: Sequence[DynamicFilter] = ()
) -> IndexProjection | None:
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
    budget = _Budget(TRANSFORMED_MAX)
    expression = replaced(bound, lambda one: _over(one, fields, by_field, budget))
    expression = replaced(expression, lambda one: _useful(one, by_field))
    composite = tuple(
        (definition, equalities)
        for definition in definitions
        if len(definition.terms) > 1 and (equalities := _equalities(bound, definition))
    )
    demands = tuple(
        KeySetPredicate(definition, one)
        for one in narrowest_first(dynamic_filters)
        for definition in definitions
        if len(definition.terms) == 1 and _has_keys_of(definition.terms[0], one)
    )
    narrows = expression != TRUE or composite or demands
    return IndexProjection(expression, by_field, composite, demands) if narrows else None


def _has_keys_of(term: Term, dynamic_filters: DynamicFilter) -> bool:
    same_column = (term.column_id, term.transform) == (dynamic_filters.column_id, IDENTITY)
    return same_column and family(term.kind) == family(dynamic_filters.kind)


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
    predicate: Bound,
    fields: Mapping[int, Sequence[PartitionField]],
    by_field: Mapping[int, IndexDefinition],
    budget: _Budget,
) -> Expression:
    """`fields` by the column that they are of."""
    mine = [
        one
        for one in fields.get(predicate.column_id, ())
        if _is_of(predicate, by_field[one.field_id or 0].terms[0]) and budget.allows(predicate, one)
    ]
    plain = PartitionSpec(0, tuple(one for one in mine if one.transform != LOWER))
    by_lower = [_lowered(predicate, one) for one in mine if one.transform == LOWER]
    return all_of(inclusive(predicate, plain), *by_lower)


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


def _useful(predicate: Bound, by_field: Mapping[int, IndexDefinition]) -> Expression:
    """TRUE in place of one about which its index knows nothing."""
    return predicate if KINDS[by_field[predicate.column_id].kind].supports(predicate) else TRUE


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
