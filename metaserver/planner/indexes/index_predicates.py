"""Projection of filters and dynamic filters onto a table's indexes: which index evaluates which predicates.

The planner treats an index on a term like a partition field: the filter is projected onto it (`projection.py`), so that
an index on `day(ts)` serves a range of `ts`, and an index on `bucket[16](id)` an equality. Functions that Iceberg does
not define have their own projections (`formats/index/keys/functions.py`). A predicate on an attribute of a dimension
table (`formats/index/keys/lookups.py`) is evaluated by an index on the same attribute, and by no other index.

A disjunction leaves out files by indexes only if an index evaluates each of its alternatives. If statistics of columns
evaluate the other alternatives, indexes and statistics together leave out files (`_mix_disjunction`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    And,
    Bound,
    Expression,
    Op,
    Or,
    collect_predicates,
    join_by_and,
    replace_predicates,
)
from seamark.formats.iceberg.expressions.projection import project_inclusive
from seamark.formats.iceberg.expressions.residuals import collect_tautologies
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import IDENTITY, is_known
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.keys import KeyRanges, get_family
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.kinds import KINDS
from seamark.formats.index.kinds.queries import COMBINATIONS_MAX, IndexQuery, PredicateKey, make_predicate_key
from seamark.metaserver.planner.pruning.dynamic_filters import DynamicFilter, sort_narrowest_first
from seamark.metaserver.planner.pruning.semantics import ComparisonSemantics, compute_key_ranges
from seamark.metaserver.planner.view.view import are_comparable

FIRST_FIELD_ID = 1 << 31
"""The first id of fields that represent indexed terms. Ids of columns and partition fields are at most 2^31 - 1."""
TRANSFORMED_MAX = 200_000
"""The maximum number of values that a plan transforms for indexed terms.

A predicate whose values exceed the remaining number does not use the index.
"""
MIXED_PREDICATES_MAX = 100
"""The maximum number of predicates of a disjunction that indexes and statistics evaluate together."""


@dataclass(frozen=True, slots=True, eq=False)
class KeySetPredicate:
    """A dynamic filter on an indexed column. It requires that the value of the index's term is one of the keys."""

    definition: IndexDefinition
    dynamic_filter: DynamicFilter

    @property
    def key(self) -> tuple[str, int]:
        return self.definition.id, id(self.dynamic_filter)

    def query(self) -> IndexQuery | None:
        """Return the query for the index, or None if the index prunes nothing for this many keys."""
        return KINDS[self.definition.kind].make_keys_query(self.dynamic_filter.keys)


class IndexPredicate(NamedTuple):
    """Predicates that an index evaluates together: one predicate for each term of the index."""

    definition: IndexDefinition
    predicates: tuple[Bound, ...]

    @property
    def key(self) -> tuple[str, tuple[PredicateKey, ...]]:
        return self.definition.id, tuple(map(make_predicate_key, self.predicates))

    def query(self) -> IndexQuery | None:
        """Return the query for the index, or None if the index does not support the predicates."""
        key_ranges_by_term: list[KeyRanges] = []
        for term, predicate in zip(self.definition.terms, self.predicates, strict=True):
            ranges = compute_key_ranges(predicate, term.kind, ComparisonSemantics.POSSIBLE)
            if ranges is None:
                return None
            key_ranges_by_term.append(replace(ranges, of_function=term.transform in INDEXED_FUNCTIONS))
        return KINDS[self.definition.kind].query(key_ranges_by_term)


@dataclass(frozen=True)
class IndexProjection:
    """A filter projected onto the indexes of a table.

    Attributes:
        expression: The filter with fields instead of columns: one field for each definition with one term.
        by_field: The definition of each field, by field id.
        composite: The definitions with several terms. Each has the equalities on its terms that follow from the filter.
    """

    expression: Expression
    by_field: Mapping[int, IndexDefinition]
    composite: tuple[tuple[IndexDefinition, tuple[Bound, ...]], ...] = ()
    key_set_predicates: tuple[KeySetPredicate, ...] = ()
    """Dynamic filters on indexed columns, in ascending order of their numbers of keys."""
    disjunctions: tuple[Expression, ...] = ()
    """Disjunctions that indexes and statistics evaluate together.

    Their predicates are on fields of `by_field` and on columns of the table.
    """

    @cached_property
    def definitions(self) -> tuple[IndexDefinition, ...]:
        """The definitions of indexes that can prune, alone or together with statistics of columns."""
        mixed_fields = (self.by_field[predicate.column_id] for predicate in self._disjunction_index_predicates)
        return tuple({definition.id: definition for definition in (*self.pruning_definitions, *mixed_fields)}.values())

    @cached_property
    def pruning_definitions(self) -> tuple[IndexDefinition, ...]:
        """The definitions of indexes that can leave out files without the help of column statistics."""
        fields = dict.fromkeys(predicate.column_id for predicate in collect_predicates(self.expression))
        definitions = [self.by_field[field_id] for field_id in fields] + [
            definition for definition, _ in self.composite
        ]
        definitions += [predicate.definition for predicate in self.key_set_predicates]
        return tuple({definition.id: definition for definition in definitions}.values())

    @property
    def _disjunction_index_predicates(self) -> list[Bound]:
        """The predicates of `disjunctions` that indexes evaluate."""
        predicates = [bound for expression in self.disjunctions for bound in collect_predicates(expression)]
        return [predicate for predicate in predicates if predicate.column_id in self.by_field]

    def select_predicates(self, definition_id: str) -> list[IndexPredicate]:
        """Return the distinct predicates that the index files of one definition evaluate."""
        single_predicates = [
            IndexPredicate(definition, (predicate,))
            for predicate in {
                make_predicate_key(bound): bound
                for bound in (*collect_predicates(self.expression), *self._disjunction_index_predicates)
            }.values()
            if (definition := self.by_field[predicate.column_id]).id == definition_id
        ]
        return single_predicates + [
            IndexPredicate(*composite) for composite in self.composite if composite[0].id == definition_id
        ]


def project_onto_indexes(
    bound: Expression, definitions: Sequence[IndexDefinition], dynamic_filters: Sequence[DynamicFilter] = ()
) -> IndexProjection | None:
    """Project the filter onto the indexes.

    The projection has four parts: the filter with predicates on indexed terms, equalities on all terms of an index with
    several terms, dynamic filters on indexed columns, and disjunctions that also need statistics of columns.

    Args:
        bound: The filter, bound to the columns of the table.
        definitions: The indexes that the plan may use.
        dynamic_filters: Sets of keys that a column must be in, from joins.

    Returns:
        The projection, or None if no index can leave out files.
    """
    by_field = {
        FIRST_FIELD_ID + number: definition
        for number, definition in enumerate(definitions)
        if len(definition.terms) == 1
    }
    fields: dict[int, list[PartitionField]] = {}
    for field_id, definition in by_field.items():
        term = definition.terms[0]
        field = PartitionField(definition.name, term.transform, source_id=term.column_id, field_id=field_id)
        fields.setdefault(term.column_id, []).append(field)
    budget = _Budget(TRANSFORMED_MAX)  # Transforming the values of long lists takes time.
    projections: dict[int, Expression] = {}

    def project(predicate: Bound) -> Expression:
        """Return the projection of a predicate, which is computed once."""
        if id(predicate) not in projections:
            projection = _project_predicate(predicate, fields, by_field, budget)
            projections[id(predicate)] = replace_predicates(
                projection, lambda projected: _keep_if_supported(projected, by_field)
            )
        return projections[id(predicate)]

    expression = replace_predicates(bound, project)
    conjuncts = bound.children if isinstance(bound, And) else (bound,)
    disjunctions = tuple(
        mixed
        for conjunct in conjuncts
        if isinstance(conjunct, Or) and (mixed := _mix_disjunction(conjunct, project, by_field)) != TRUE
    )
    composite = tuple(
        (definition, equalities)
        for definition in definitions
        if len(definition.terms) > 1 and (equalities := _find_equalities(bound, definition))
    )
    key_set_predicates = tuple(
        KeySetPredicate(definition, dynamic_filter)
        for dynamic_filter in sort_narrowest_first(dynamic_filters)
        for definition in definitions
        if len(definition.terms) == 1 and _matches_term(definition.terms[0], dynamic_filter)
    )
    can_prune = expression != TRUE or composite or key_set_predicates or disjunctions
    return IndexProjection(expression, by_field, composite, key_set_predicates, disjunctions) if can_prune else None


def _mix_disjunction(
    disjunction: Or, project: Callable[[Bound], Expression], by_field: Mapping[int, IndexDefinition]
) -> Expression:
    """Return the condition that indexes and statistics of columns evaluate together.

    A disjunction leaves out a file only if each of its predicates excludes the file. Some predicates may have an index,
    and others only statistics. So in `a = 1 OR b = 2` with an index on `a`, the first predicate becomes `a = 1 AND`
    the condition of the index, and `b = 2` stays the same.

    Args:
        disjunction: A disjunction of predicates on columns and attributes.
        project: Returns the projection of a predicate onto indexes.
        by_field: The definition of each field.

    Returns:
        TRUE if indexes alone or statistics alone leave out the same files, or if there are too many predicates.
    """
    predicates = collect_predicates(disjunction)
    if len(predicates) > MIXED_PREDICATES_MAX or all(project(predicate) != TRUE for predicate in predicates):
        return TRUE
    if collect_tautologies(disjunction):  # A condition that is always true excludes no file.
        return TRUE

    def mix(predicate: Bound) -> Expression:
        """Return the predicate for statistics, which have no attributes, and its projection for indexes."""
        statistics = predicate if parse_lookup(predicate.transform) is None else TRUE
        return join_by_and(statistics, project(predicate))

    mixed = replace_predicates(disjunction, mix)
    has_index = any(predicate.column_id in by_field for predicate in collect_predicates(mixed))
    return mixed if has_index else TRUE


def _matches_term(term: Term, dynamic_filter: DynamicFilter) -> bool:
    """Return whether the dynamic filter is on the column of the term, with a type of the same family.

    Types of a family, such as int and long, have the same keys. A dynamic filter has the keys of a join.
    """
    same_column = (term.column_id, term.transform) == (dynamic_filter.column_id, IDENTITY)
    return same_column and get_family(term.kind) == get_family(dynamic_filter.kind)


@dataclass
class _Budget:
    """The number of values that a plan may still transform for indexed terms."""

    values: int
    """The number of values that remain."""

    def try_take(self, predicate: Bound, field: PartitionField) -> bool:
        """Take the number of the predicate's values from the budget, if the field has a transform.

        Returns:
            False if the budget is too small. In this case, the budget stays unchanged.
        """
        cost = 0 if field.transform == IDENTITY else len(predicate.values)
        if cost > self.values:
            return False
        self.values -= cost
        return True


def _project_predicate(
    predicate: Bound,
    fields: Mapping[int, Sequence[PartitionField]],
    by_field: Mapping[int, IndexDefinition],
    budget: _Budget,
) -> Expression:
    """Return a condition on the terms of indexes that every matching row satisfies. It is TRUE if no index helps.

    A term is a column, a transform or function of it, or an attribute of a joined table. Each term has a field.

    Args:
        predicate: A predicate on a column or attribute.
        fields: The fields by source column id.
        by_field: The definition of the index of each field.
        budget: The number of values that may still be transformed.
    """
    applicable_fields = [
        field
        for field in fields.get(predicate.column_id, ())
        if _has_valid_values(predicate, by_field[field.field_id or 0].terms[0]) and budget.try_take(predicate, field)
    ]
    plain_spec = PartitionSpec(0, tuple(field for field in applicable_fields if is_known(field.transform)))
    function_predicates = [
        _project_function(predicate, by_field[field.field_id or 0].terms[0], field.field_id or 0, field.name)
        for field in applicable_fields
        if field.transform in INDEXED_FUNCTIONS
    ]
    attribute_predicates = [
        _move_to_field(predicate, field)
        for field in applicable_fields
        if field.transform == predicate.transform and parse_lookup(field.transform) is not None
    ]
    return join_by_and(project_inclusive(predicate, plain_spec), *function_predicates, *attribute_predicates)


def _has_valid_values(predicate: Bound, term: Term) -> bool:
    """Return whether the predicate's values are valid for the term.

    In an older schema, the column may have another type, and its values may mean something else. For example, the
    days of a date are not the microseconds of the timestamp to which the date was promoted. Transforms also overflow
    at different values for different types.
    """
    if predicate.kind == term.source:
        return True
    return term.transform == IDENTITY and are_comparable(predicate.kind, term.source)


def _move_to_field(predicate: Bound, field: PartitionField) -> Bound:
    """Return the predicate on an attribute as a predicate on the field of an index on this attribute.

    An attribute is a column of a joined table. The index contains its values, so the field needs no transform.
    """
    kind = predicate.result
    return Bound(predicate.op, field.field_id or 0, field.name, kind, IDENTITY, kind, predicate.values)


def _project_function(predicate: Bound, term: Term, field_id: int, name: str) -> Expression:
    """Return a condition on the indexed values of a function. Every row that matches the predicate satisfies it.

    Args:
        predicate: A predicate on the column or on the function.
        term: The term of the index, whose transform is the function.
        field_id: The id of the index's field.
        name: The name of the field.
    """
    index_column = Bound(predicate.op, field_id, name, term.kind, IDENTITY, term.kind, ())
    return INDEXED_FUNCTIONS[term.transform].project(predicate, index_column)


def _keep_if_supported(predicate: Bound, by_field: Mapping[int, IndexDefinition]) -> Expression:
    """Return the predicate, or TRUE if the index of its field does not support it."""
    return predicate if KINDS[by_field[predicate.column_id].kind].supports(predicate) else TRUE


def _find_equalities(bound: Expression, definition: IndexDefinition) -> tuple[Bound, ...] | None:
    """Return, for each term of the definition, a predicate that lists values and that every matching row satisfies.

    Returns:
        None if a term has no such predicate, or if there are too many combinations of values.
    """
    predicates = bound.children if isinstance(bound, And) else (bound,)
    equalities: list[Bound] = []
    combinations = 1
    for term in definition.terms:
        candidates = [
            values
            for child in predicates
            if isinstance(child, Bound) and (values := _list_term_values(child, term)) is not None
        ]
        if not candidates:
            return None
        smallest_predicate = min(candidates, key=lambda predicate: len(predicate.values))
        equalities.append(smallest_predicate)
        combinations *= len(smallest_predicate.values)
    return tuple(equalities) if combinations <= COMBINATIONS_MAX else None


def _list_term_values(predicate: Bound, term: Term) -> Bound | None:
    """Return a predicate that lists the term's values in matching rows.

    Returns:
        None if the predicate does not limit the term's values to a list.
    """
    if predicate.column_id != term.column_id or not _has_valid_values(predicate, term):
        return None
    if term.transform in INDEXED_FUNCTIONS:
        if len(predicate.values) > COMBINATIONS_MAX:
            return None
        values = _project_function(predicate, term, term.column_id, term.name)
        return values if isinstance(values, Bound) and values.op in (Op.EQ, Op.IN) else None
    return predicate if predicate.transform == term.transform and predicate.op in (Op.EQ, Op.IN) else None
