"""Conditions on the groups of a cube that follow from conditions on rows.

A condition on rows implies a condition on the dimensions of the cube. It is true for each group that contains a row for
which the first condition is true. So a server can leave out all other groups. The columns of groups are `d0`, `d1` and
so on; in conditions, `dN` has the id N + 1. This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from seamark.formats.iceberg.expressions.expression import TRUE, Bound, Expression, Op, replace_predicates
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, make_function
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.terms import Term

TIME_UNITS = ("year", "month", "day", "hour")
"""The transforms that a dimension can have, from the coarsest to the finest."""
_BOUNDARIES = {Op.LT: 0, Op.GT_EQ: 0, Op.LT_EQ: 1, Op.GT: 1}
"""The distance from the literal of a comparison to the first value on its other side."""
_NULL_OPS = (Op.IS_NULL, Op.NOT_NULL)


def get_dimension_column_id(number: int) -> int:
    """Return the id that the dimension with this index has in conditions on groups. Field ids begin at 1."""
    return number + 1


def get_group_column_name(column_id: int) -> str:
    """Return the name of the group column that has this id in conditions on groups.

    The column of dimension 0 is `d0` and has the id 1, because field ids begin at 1 (`get_dimension_column_id`).
    """
    return f"d{column_id - 1}"


def get_dimension_kind(term: Term) -> str:
    """Return the Iceberg type of a dimension of a cube.

    An attribute has its own type, because it is a column of another table to which the term's column refers. Any other
    dimension, such as a truncated time, has the type of its column.
    """
    return term.source if parse_lookup(term.transform) is None else term.kind


def make_group_schema(terms: Sequence[Term]) -> Schema:
    """Return the dimensions of a cube as a schema, to which conditions on groups are bound."""
    fields = [
        Field(get_dimension_column_id(number), f"d{number}", False, get_dimension_kind(term))
        for number, term in enumerate(terms)
    ]
    return Schema(tuple(fields))


def to_group_condition(condition: Expression, terms: Sequence[Term]) -> Expression:
    """Return the condition on the groups of a cube that follows from a condition on rows of its table.

    All groups of matching rows satisfy the result. A predicate that the dimensions do not decide becomes TRUE.

    Args:
        condition: A bound condition. Its types are those of the terms.
        terms: The dimensions of the cube.
    """
    return replace_predicates(condition, lambda predicate: _find_condition(predicate, terms))


def translate_dimension_condition(condition: Expression, find_number: Callable[[Bound], int | None]) -> Expression:
    """Return the condition on the groups of a cube that follows from a condition on rows of a dimension table.

    A dimension table is joined to the table of the cube, and the cube groups by some of its columns. A predicate on
    another column becomes TRUE, so the result may be true for more groups.

    Args:
        condition: A bound condition.
        find_number: A function that returns the index of the dimension that has the values of the predicate's column,
            or None if there is none.
    """

    def translate(predicate: Bound) -> Expression:
        number = None if _is_undecided(predicate) else find_number(predicate)
        return TRUE if number is None else _rename_predicate(predicate, number)

    return replace_predicates(condition, translate)


def is_at_boundary(predicate: Bound, term: Term) -> bool:
    """Return whether a comparison has the same result for a time and for its truncation.

    For example, `ts >= v` and `ts < v` have the same result if a unit begins at `v`. `ts <= v` and `ts > v` have the
    same result if a unit begins directly after `v`.
    """
    if get_base_name(term.source) not in ("date", "timestamp") or predicate.op not in _BOUNDARIES:
        return False
    (value,) = predicate.values
    if not isinstance(value, int):
        return False
    first_value = value + _BOUNDARIES[predicate.op]
    truncate = make_function(term.transform, term.source)
    return bool(truncate(first_value) != truncate(first_value - 1))


def _find_condition(predicate: Bound, terms: Sequence[Term]) -> Expression:
    """Return the condition on groups that follows from a predicate, or TRUE if no dimension decides it.

    A dimension of the column itself decides each predicate on it. A dimension of truncated times, such as days,
    decides a test for null, a comparison with the start of a unit, and a predicate on equal or longer units.
    """
    if _is_undecided(predicate):
        return TRUE
    for number, term in enumerate(terms):
        if term.column_id != predicate.column_id or term.source != predicate.kind:
            continue
        if term.transform == IDENTITY:
            return _rename_predicate(predicate, number)
        if term.transform not in TIME_UNITS:
            continue
        if predicate.op in _NULL_OPS or (predicate.transform == IDENTITY and is_at_boundary(predicate, term)):
            return _rename_predicate(predicate, number)
        if predicate.transform in TIME_UNITS and _is_at_least_as_coarse(predicate.transform, term.transform):
            return _rename_predicate(predicate, number)
    return TRUE


def _is_undecided(predicate: Bound) -> bool:
    """Return whether only the engine can evaluate a predicate, because it compares floats or uses a function.

    Engines differ about NaN and about the sign of zero.
    """
    has_floats = get_base_name(predicate.result) in FLOATS or get_base_name(predicate.kind) in FLOATS
    return has_floats or is_function(predicate.transform)


def _is_at_least_as_coarse(transform: str, other: str) -> bool:
    return TIME_UNITS.index(transform) <= TIME_UNITS.index(other)


def _rename_predicate(predicate: Bound, number: int) -> Bound:
    """Return a predicate on the dimension with the index `number`."""
    return msgspec.structs.replace(predicate, column_id=get_dimension_column_id(number), name=f"d{number}")
