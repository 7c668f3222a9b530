"""Filters on dimension tables become conditions on facts only by indexes on the same attribute."""

from __future__ import annotations

from seamark.formats.iceberg.expressions.expression import Bound, Op
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.lookups import DimensionSource, Lookup
from seamark.formats.index.keys.terms import Term
from seamark.metaserver.planner.joins.star_conditions import JoinedKey, make_star_condition

SOURCE = DimensionSource(("n", "shops"), 5, 1)
KEY = JoinedKey(1, "shop", "int", SOURCE, "int")


def make_definition(attribute_id: int) -> IndexDefinition:
    term = Term(1, "shop", Lookup(SOURCE, attribute_id, "boolean").transform, "int", "boolean")
    return IndexDefinition("active", "bitmap", (term,))


def make_filter(column_id: int) -> Bound:
    return Bound(Op.EQ, column_id, "active", "boolean", "identity", "boolean", (False,))


def test_condition_on_a_column_with_the_field_id_of_the_existence_flag_is_not_used() -> None:
    """An index on attributes of a dimension table uses the field id 0 for the flag that a key has a dimension row.

    So a condition on a column with the field id 0 must not use the index.
    """
    assert make_star_condition(make_filter(2), [KEY], [make_definition(2)]) is not None
    assert make_star_condition(make_filter(0), [KEY], [make_definition(0)]) is None
