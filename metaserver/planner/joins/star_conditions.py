"""Conditions on facts that follow from a join with a dimension table, by indexes on attributes of the dimension table.

An index on an attribute (`formats/index/keys/lookups.py`) has the value of the attribute for each row of the facts, at
one snapshot of the dimension table. The build ensures that the key is unique in this snapshot. If a join reads the
dimension table at this snapshot and by this key, then a row of the facts has a partner that satisfies the filter only
if its own attributes satisfy the filter. So the filter on the dimension table becomes a condition on the facts, and the
plan need not read the dimension table. After a commit to the dimension table, joins read another snapshot, and the
index is not used. This module is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from seamark.formats.iceberg.expressions.expression import (
    TRUE,
    Bound,
    Expression,
    collect_predicates,
    replace_predicates,
)
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.lookups import HAS_PARTNER, DimensionSource, parse_lookup
from seamark.formats.index.kinds.kinds import KINDS


class JoinedKey(NamedTuple):
    """The key by which facts join a dimension table at one snapshot.

    The types are canonical names.
    """

    column_id: int
    name: str
    kind: str
    """The type of the column of the facts."""
    source: DimensionSource
    source_kind: str
    """The type of the key of the dimension table."""


class StarCondition(NamedTuple):
    """A condition that each row of the fact table satisfies if it has a matching row in the dimension table.

    Attributes:
        expression: The condition. Its predicates are on attributes of the dimension table.
        indexes: The definitions of indexes that evaluate the predicates.
        is_whole: Whether the condition has all predicates of the filter, so that the keys of the dimension table leave
            out no further rows.
    """

    expression: Expression
    indexes: tuple[IndexDefinition, ...]
    is_whole: bool


def make_star_condition(
    filter: Expression, keys: Collection[JoinedKey], definitions: Sequence[IndexDefinition]
) -> StarCondition | None:
    """Return the condition that follows from a filter on a dimension table, or None if no index can evaluate it.

    An index of the fact table can contain, for each row, the value of a column of the dimension table. So a predicate
    on this column becomes a predicate on the fact table.

    Args:
        filter: The filter, bound to the columns of the dimension table.
        keys: The keys of the join.
        definitions: The definitions of the enabled indexes of the fact table.
    """
    attributes: dict[int, tuple[JoinedKey, IndexDefinition]] = {}
    for definition in definitions:
        lookup = parse_lookup(definition.terms[0].transform)
        if lookup is None or len(definition.terms) > 1 or KINDS[definition.kind].aggregates:
            continue
        # Such an index does not contain a column. It shows which rows have a matching row in the dimension table.
        if lookup.attribute_id == HAS_PARTNER:
            continue
        for key in keys:
            has_same_types = key.kind == key.source_kind == definition.terms[0].source
            if has_same_types and (key.column_id, key.source) == (definition.terms[0].column_id, lookup.source):
                attributes.setdefault(lookup.attribute_id, (key, definition))
    if not attributes:
        return None
    used_definitions: dict[str, IndexDefinition] = {}

    def move_to_facts(predicate: Bound) -> Expression:
        """Return the predicate on the fact table, and note its index, or return TRUE if no index evaluates it."""
        key, definition = attributes.get(predicate.column_id, (None, None))
        if key is None or definition is None or predicate.transform != IDENTITY:
            return TRUE
        term = definition.terms[0]
        if predicate.kind != term.kind:  # The column of the dimension table was promoted to another type.
            return TRUE
        used_definitions[definition.id] = definition
        return Bound(predicate.op, key.column_id, key.name, key.kind, term.transform, term.kind, predicate.values)

    expression = replace_predicates(filter, move_to_facts)
    if expression == TRUE or not used_definitions:
        return None
    is_whole = all(
        predicate.column_id in attributes and move_to_facts(predicate) != TRUE
        for predicate in collect_predicates(filter)
    )
    return StarCondition(expression, tuple(used_definitions.values()), is_whole)
