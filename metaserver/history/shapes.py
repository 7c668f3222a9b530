"""Shapes of statements: the columns, conditions and aggregates of a statement on a table, without the compared values.

Statements that differ only in their literals have the same shape. A shape contains ids of columns, never names, and
names of operators. So a shape contains no text of a client, except the name of the engine, which is one of `ENGINES`.

    shape = QueryShape("spark", columns=(1, 2), conjuncts=conjuncts_of(bound))
    shape.fingerprint
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache

import msgspec

from seamark.formats.iceberg.expressions.expression import And, Bound, Expression, Not, Op, Or, Unbound
from seamark.formats.iceberg.types.functions import is_function
from seamark.formats.runtime.decoding import convert_json

ENGINES = ("spark", "trino", "duckdb", "seamark", "pyiceberg", "java", "other")
AGGREGATE_FUNCTIONS = frozenset(("count", "sum", "min", "max", "avg"))
OTHER_FUNCTION = "other"
"""The name in a shape of an aggregate function that is not one of `AGGREGATE_FUNCTIONS`."""
CONJUNCTS_MAX, TERMS_MAX = 24, 12
"""The maximum numbers of conjuncts in a shape, and of terms in a conjunct. Further conjuncts and terms are omitted."""
COLUMNS_MAX = 64
"""The maximum number of columns in a list of a shape. A list with more columns is stored as an empty list."""
_FINGERPRINT_DIGITS = 16
_OTHER_TRANSFORM = "other"
_TRANSFORMS = frozenset(("identity", "bucket", "truncate", "year", "month", "day", "hour", "void"))
_NEGATIONS = {
    Op.IS_NULL: Op.NOT_NULL,
    Op.IS_NAN: Op.NOT_NAN,
    Op.LT: Op.GT_EQ,
    Op.LT_EQ: Op.GT,
    Op.EQ: Op.NOT_EQ,
    Op.IN: Op.NOT_IN,
    Op.STARTS_WITH: Op.NOT_STARTS_WITH,
}
_NEGATED_OPS = {**_NEGATIONS, **{negated: op for op, negated in _NEGATIONS.items()}}


class ShapeTerm(msgspec.Struct, frozen=True, array_like=True, order=True, cache_hash=True):
    """A comparison of a column. The hash is cached, because all shapes share the instances.

    Attributes:
        column_id: The field id of the column.
        op: The name of the operator.
        transform: The name of the transform or function, without its parameter.
        values: The number of values that the column is compared with, rounded up to a power of ten. So lists of
            similar lengths have the same shape.
    """

    column_id: int
    op: str
    transform: str = "identity"
    values: int = 1


Conjunct = tuple[ShapeTerm, ...]
"""The alternatives of a conjunct. A conjunct without OR has one alternative."""


class Aggregate(msgspec.Struct, frozen=True, array_like=True, order=True):
    """An aggregate function of a column. If the argument is not a column, as in `count(*)`, `column_id` is 0."""

    function: str
    column_id: int = 0


class QueryShape(msgspec.Struct, frozen=True, cache_hash=True):
    """The shape of statements that read a table. The hash is cached, because each plan looks up a shape.

    Attributes:
        engine: One of `ENGINES`.
        columns: The ids of the columns that the statement reads, sorted. It is empty if they are unknown.
        conjuncts: The conditions on the table, sorted.
        joins: The ids of the table's columns that the statement joins, sorted.
        grouping: The ids of the table's columns by which the statement groups, sorted.
        aggregates: The aggregates of the table's columns, sorted.
    """

    engine: str
    columns: tuple[int, ...] = ()
    conjuncts: tuple[Conjunct, ...] = ()
    joins: tuple[int, ...] = ()
    grouping: tuple[int, ...] = ()
    aggregates: tuple[Aggregate, ...] = ()

    @property
    def text(self) -> str:
        """The shape as JSON. Equal shapes have equal texts."""
        return msgspec.json.encode(self).decode()

    @property
    def fingerprint(self) -> str:
        """The digest of the shape, 16 hexadecimal digits."""
        return _digest_shape(self)

    @property
    def compared_columns(self) -> frozenset[int]:
        """The ids of the columns that the conditions compare."""
        return frozenset(term.column_id for conjunct in self.conjuncts for term in conjunct)

    @staticmethod
    def parse(text: str) -> QueryShape | None:
        """Parse a stored shape.

        Returns:
            None if the text is not a valid shape, for example because a different version of the server wrote it.
        """
        try:
            return convert_json(text, QueryShape)
        except msgspec.MsgspecError:
            return None


@lru_cache(maxsize=4096)
def _digest_shape(shape: QueryShape) -> str:
    return hashlib.sha256(shape.text.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def select_shape_columns(ids: Iterable[int]) -> tuple[int, ...]:
    """Return the distinct column ids for a statement's entry in the history, sorted.

    The result is empty if there are more than `COLUMNS_MAX`, because a truncated list would look complete.
    """
    columns = tuple(sorted(set(ids)))
    return columns if len(columns) <= COLUMNS_MAX else ()


def list_conjuncts(
    expression: Expression, find_column: Callable[[str], int | None] | None = None
) -> tuple[Conjunct, ...]:
    """Return the conjuncts of a filter, without the values. A conjunct is a condition that all rows must satisfy.

    Args:
        expression: The filter. It is bound, or its columns are found by `find_column`.
        find_column: A function that returns the id of a column by its name. Terms of columns without an id are omitted.
    """
    conjuncts: set[Conjunct] = set()
    for part in _list_conjuncts(expression):
        predicate, is_negated = part
        if isinstance(predicate, Bound):  # Nearly all conjuncts are bound comparisons, and each plan reads them.
            conjuncts.add((_build_term(predicate.column_id, predicate, len(predicate.values), is_negated),))
        elif terms := tuple(sorted(set(_make_terms(part, find_column)))):
            conjuncts.add(terms)
    return tuple(sorted(conjuncts)) if len(conjuncts) > 1 else tuple(conjuncts)


def _list_conjuncts(expression: Expression) -> list[tuple[Expression, bool]]:
    """Return the first `CONJUNCTS_MAX` conjuncts of an expression, each with a flag that is True if it is negated.

    A negated disjunction, NOT (a OR b), is divided into the conjuncts NOT a and NOT b.
    """
    # Nearly all filters are comparisons or a conjunction of them. They are handled first, because each plan calls this
    # function, and `match` is slow.
    if isinstance(expression, Bound):
        return [(expression, False)]
    if isinstance(expression, And):
        first_children = expression.children[:CONJUNCTS_MAX]
        if set(map(type, first_children)) == {Bound}:
            return [(child, False) for child in first_children]
    conjuncts: list[tuple[Expression, bool]] = []
    pending_parts: list[tuple[Expression, bool]] = [(expression, False)]
    while pending_parts and len(conjuncts) < CONJUNCTS_MAX:
        part, is_negated = pending_parts.pop()
        match part:
            case Not(child):
                pending_parts.append((child, not is_negated))
            case And(children) if not is_negated:
                pending_parts += [(child, False) for child in reversed(children[:CONJUNCTS_MAX])]
            case Or(children) if is_negated:
                pending_parts += [(child, True) for child in reversed(children[:CONJUNCTS_MAX])]
            case _:
                # The server adds `OR x IS NAN` to comparisons for some engines. The statement did not contain it.
                conjuncts.append((drop_nan(part), is_negated))
    return conjuncts


def drop_nan(part: Expression) -> Expression:
    """Return `x > 5` for `x > 5 OR x IS NAN`, and other expressions unchanged.

    The server adds the alternative for engines that order NaN above all numbers. The statement did not contain it.
    """
    if isinstance(part, Or) and len(part.children) == 2:
        first, second = part.children
        for predicate, other in ((first, second), (second, first)):
            if (
                isinstance(predicate, Bound)
                and isinstance(other, Bound)
                and other.op is Op.IS_NAN
                and predicate.column_id == other.column_id
            ):
                return predicate
    return part


def _make_terms(part: tuple[Expression, bool], find_column: Callable[[str], int | None] | None) -> list[ShapeTerm]:
    """Return at most `TERMS_MAX` terms of a conjunct, without its structure of AND, OR and NOT.

    Args:
        part: The conjunct, and whether it is negated.
        find_column: A function that returns the id of a column by its name, for filters that are not bound.
    """
    terms: list[ShapeTerm] = []
    pending_parts = [part]
    while pending_parts and len(terms) < TERMS_MAX:
        expression, is_negated = pending_parts.pop()
        match expression:
            case Not(child):
                pending_parts.append((child, not is_negated))
            case And(children) | Or(children):
                pending_parts += [(child, is_negated) for child in children[:TERMS_MAX]]
            case Bound():
                terms.append(_build_term(expression.column_id, expression, len(expression.values), is_negated))
            case Unbound() if find_column is not None:
                column_id = find_column(expression.name)
                if column_id is not None:
                    terms.append(_build_term(column_id, expression, len(expression.literals), is_negated))
    return terms


def _build_term(column_id: int, predicate: Bound | Unbound, values: int, negated: bool) -> ShapeTerm:
    """Return the term of a predicate. A term has no values of the statement.

    Args:
        column_id: The field id of the column.
        predicate: The predicate.
        values: The number of values that the predicate compares the column with.
        negated: Whether the predicate is inside a NOT. The term then has the opposite operator.
    """
    rounded_count = 1
    while rounded_count < values:
        rounded_count *= 10
    # The parameter of a transform, as in `bucket[16]`, is a value that the client chooses, so the shape omits it.
    transform = predicate.transform.partition("[")[0]
    is_known = transform in _TRANSFORMS or is_function(transform)
    op = _NEGATED_OPS[predicate.op] if negated else predicate.op
    return _make_term(column_id, op, transform if is_known else _OTHER_TRANSFORM, rounded_count)


@lru_cache(maxsize=10_000)
def _make_term(column_id: int, op: Op, transform: str, values: int) -> ShapeTerm:
    return ShapeTerm(column_id, op.value, transform, values)
