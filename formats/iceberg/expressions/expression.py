"""Expressions of the REST protocol: trees of predicates over columns.

The schema is `Expression` of the Iceberg REST specification.

The same classes represent two forms. An *unbound* expression comes from the client: it has names and JSON
literals. A *bound* expression refers to columns by id, has values in the form below, and has no `Not`:
binding moves negation into the predicates (`binding.py`). Null and NaN follow Iceberg, not SQL: `not-eq`
and `not-in` match both.

Nodes are msgspec structs, because every plan creates dozens; `msgspec.structs.replace` copies them.

Values of bound predicates, by Iceberg type:

    boolean                          bool
    int, long                        int
    date                             int, days since 1970-01-01
    time                             int, microseconds since midnight
    timestamp, timestamptz           int, microseconds since the epoch
    timestamp_ns, timestamptz_ns     int, nanoseconds since the epoch
    float, double                    float (a float's literal is rounded to 32 bits first)
    decimal(P, S)                    int, the unscaled value at scale S
    string                           str, ordered by code point, which is the order of its UTF-8 bytes
    uuid, fixed, binary              bytes, ordered as unsigned bytes
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from seamark.formats.iceberg.types.values import Value


class Op(StrEnum):
    """Operators of predicates. The values are their names in the protocol.

    In CPython, each access to `Op.LT` is a call, and the hash of a member is slow. Therefore code that every plan runs
    uses module-level sets.
    """

    IS_NULL = "is-null"
    NOT_NULL = "not-null"
    IS_NAN = "is-nan"
    NOT_NAN = "not-nan"
    LT = "lt"
    LT_EQ = "lt-eq"
    GT = "gt"
    GT_EQ = "gt-eq"
    EQ = "eq"
    NOT_EQ = "not-eq"
    IN = "in"
    NOT_IN = "not-in"
    STARTS_WITH = "starts-with"
    NOT_STARTS_WITH = "not-starts-with"

    __hash__ = str.__hash__
    __repr__ = str.__repr__


class Always(msgspec.Struct, frozen=True, gc=False):
    """The constant expression `true` or `false`."""

    value: bool


ORDERED = frozenset({Op.LT, Op.LT_EQ, Op.GT, Op.GT_EQ})
TRUE = Always(True)
FALSE = Always(False)


class And(msgspec.Struct, frozen=True, gc=False):
    children: tuple[Expression, ...]


class Or(msgspec.Struct, frozen=True, gc=False):
    children: tuple[Expression, ...]


class Not(msgspec.Struct, frozen=True, gc=False):
    child: Expression


class Unbound(msgspec.Struct, frozen=True, gc=False):
    """A predicate from a client.

    Attributes:
        op: The operator.
        name: The name of the column.
        transform: The transform of the column, or "identity".
        literals: JSON values.
    """

    op: Op
    name: str
    transform: str
    literals: tuple[object, ...]


class Bound(msgspec.Struct, frozen=True, gc=False):
    """A predicate on a column.

    Attributes:
        op: The operator.
        column_id: The field id of the column.
        name: The column's full name in the schema that was used for binding.
        kind: The column's type. A nested column has the kind `struct`, `list`, `map`, `variant` or an unknown kind. A
            column of any type inside a list or map has the kind `list` or `map`. Statistics cannot decide predicates on
            these columns.
        transform: The transform of the column, or "identity".
        result: The type of the transformed values. For the identity transform, it is the same as `kind`.
        values: Values of type `result`, never NaN or an infinity. The operators for null and NaN have no value, and
            comparisons and prefixes have one. IN and NOT_IN have two or more values, distinct and sorted.
    """

    op: Op
    column_id: int
    name: str
    kind: str
    transform: str
    result: str
    values: tuple[Value, ...]


Expression: TypeAlias = Always | And | Or | Not | Unbound | Bound


def join_by_and(*children: Expression) -> Expression:
    """Return the conjunction of some expressions, flattened and with constants folded."""
    return _flatten(children, And, identity=TRUE, absorbing_constant=FALSE)


def join_by_or(*children: Expression) -> Expression:
    """Return the disjunction of some expressions, flattened and with constants folded."""
    return _flatten(children, Or, identity=FALSE, absorbing_constant=TRUE)


def replace_predicates(expression: Expression, replace_predicate: Callable[[Bound], Expression]) -> Expression:
    """Replace each predicate of a bound expression by the result of `replace_predicate`, from left to right."""
    match expression:
        case Bound():
            return replace_predicate(expression)
        case And(children):
            return join_by_and(*[replace_predicates(child, replace_predicate) for child in children])
        case Or(children):
            return join_by_or(*[replace_predicates(child, replace_predicate) for child in children])
        case Always():
            return expression
    raise TypeError(f"expected a bound expression, not {expression}")


def collect_predicates(expression: Expression) -> list[Bound]:
    """Return the predicates of a bound expression, from left to right."""
    if isinstance(expression, Bound):
        return [expression]
    predicates: list[Bound] = []
    if isinstance(expression, (And, Or)):
        for child in expression.children:
            if isinstance(child, Bound):
                predicates.append(child)
            else:
                predicates += collect_predicates(child)
    return predicates


def is_longer(expression: Expression, limit: int) -> bool:
    """Return whether an expression has more than `limit` values and parts of junctions.

    The count ends at the limit, so that a very long expression takes no more time.
    """
    remaining, todo = limit, [expression]
    while todo:
        node = todo.pop()
        match node:
            case And() | Or():
                remaining -= len(node.children)
                todo += node.children[: max(0, remaining)]
            case Not():
                todo.append(node.child)
            case Bound():
                remaining -= len(node.values)
            case Unbound():
                remaining -= len(node.literals)
        if remaining < 0:
            return True
    return False


def _flatten(
    children: tuple[Expression, ...], junction: type[And] | type[Or], *, identity: Always, absorbing_constant: Always
) -> Expression:
    """Join expressions to a junction. Nested junctions of the same class are flattened, and constants are folded.

    Args:
        children: The expressions.
        junction: The class of the junction.
        identity: The constant that does not change a junction: TRUE for AND, and FALSE for OR.
        absorbing_constant: The constant that decides a junction: FALSE for AND, and TRUE for OR.
    """
    flat_children: list[Expression] = []
    for child in children:
        if isinstance(child, junction):
            flat_children.extend(child.children)
        elif not isinstance(child, Always):
            flat_children.append(child)
        elif child == absorbing_constant:
            return absorbing_constant
    if len(flat_children) > 1:
        return junction(tuple(flat_children))
    return flat_children[0] if flat_children else identity
