"""Conditions on columns of tables, read from a statement of any engine.

A condition is true for each row for which the statement's condition is true, and may be true for more rows. SQL's
logic has three values, and a row is used if its condition is *true*. Therefore an unsupported part is replaced by
"true": in an AND, the part is left out, and an OR that contains the part is left out completely. NOT is applied to
comparisons, and stays part of them, because `NOT (a = 1)` is not true for null and, in some engines, not true for NaN.

The condition None is true for all rows. `NEVER` is true for no row.

`SemiJoin` requires that a column's value is among the values of another table's column, or is less or greater than one
of them. A semi-join is never negated. `Like` is a pattern with which only the rows of a dimension are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from seamark.connector.plans.literals import Literal
from seamark.connector.plans.quotes import quote_name, quote_text
from seamark.formats.iceberg.expressions import expression as iceberg
from seamark.formats.iceberg.expressions.expression import Expression, Not, Op, Unbound
from seamark.formats.iceberg.types.functions import LOWER, UPPER, is_function
from seamark.formats.iceberg.types.transforms import IDENTITY

ColumnReference: TypeAlias = tuple[int, str]
"""A column, as the number of its source in the query block, and its name."""
LEAVES_MAX = 5_000
"""The maximum number of comparisons in a condition.

Without a limit, a chain of queries in WITH, each of which reads the previous query twice, would double the
condition at each step.
"""
TEXT_MAX = 100_000
"""The maximum number of characters of a condition in SQL."""
DAY, MONTH, YEAR, HOUR = "day", "month", "year", "hour"
"""Iceberg's transforms, except that `year` is the number of the year, and not the years since 1970."""
_ORDERED = {"<": Op.LT, "<=": Op.LT_EQ, ">": Op.GT, ">=": Op.GT_EQ}
_EPOCH_YEAR = 1970
_TERMS = {IDENTITY: "{}", DAY: "CAST({} AS DATE)", YEAR: "YEAR({})", LOWER: "lower({})", UPPER: "upper({})"}


@dataclass(frozen=True)
class ColumnComparison:
    """A comparison of a column with literals. A transform or function may be applied to the column.

    Comparisons of functions (`types/functions.py`) only prune files, because the functions have different values in
    different engines. Such comparisons are not exact.

    Attributes:
        op: An operator of SQL: =, <>, <, <=, >, >=, IS [NOT] DISTINCT FROM, IN, BETWEEN, IS NULL. Or `STARTS WITH`, or
            `IS TRUE` for a boolean column alone.
    """

    column: ColumnReference
    op: str
    literals: tuple[Literal, ...] = ()
    transform: str = IDENTITY
    negated: bool = False
    exact: bool = True
    """Whether the comparison is true for the same rows as the statement's condition.

    If not, it may be true for more rows, and it is never negated.
    """
    size: ClassVar[int] = 1

    @property
    def rejects_null(self) -> bool:
        """Whether the comparison is never true for null."""
        is_null_literal = self.literals[0].kind == "null" if self.literals else False
        match self.op:
            case "IS NULL":
                return self.negated
            case "IS NOT DISTINCT FROM":
                return is_null_literal == self.negated
            case "IS DISTINCT FROM":
                return is_null_literal != self.negated
        return True

    @property
    def zones(self) -> frozenset[str]:
        """The time zones of the literals.

        If the column has another kind of time zone than a literal, the comparison depends on the session's zone. The
        day of a timestamp with a zone is the day in UTC.
        """
        return frozenset(
            literal.zone for literal in self.literals if literal.zone is not None and self.transform == IDENTITY
        )

    def move_columns(self, move_reference: Move) -> ColumnComparison | None:
        column = move_reference(self.column)
        return None if column is None else replace(self, column=column)

    def negate(self) -> ColumnComparison | None:
        return replace(self, negated=not self.negated) if self.exact else None


@dataclass(frozen=True)
class Like:
    """`column LIKE pattern` or NOT LIKE, on the column itself or on its lower or upper case.

    The predicate only filters the rows of a small joined table (a dimension). It prunes no files of this table.
    `negated` means NOT LIKE. The condition as a whole is never negated again.
    """

    column: ColumnReference
    pattern: str
    escape: str | None = None
    function: str | None = None
    negated: bool = False
    rejects_null: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def move_columns(self, move_reference: Move) -> Like | None:
        column = move_reference(self.column)
        return None if column is None else replace(self, column=column)


@dataclass(frozen=True)
class SemiJoin:
    """A condition that is true for a row if another table has a needed row with the same values.

    A row of the other table is needed if it meets `where`. Nulls never meet a semi-join.

    Attributes:
        pairs: Pairs of a column and the column of the other table to which it is equal.
        other_reference: An object that identifies the reference to the other table.
        where: A condition that the row of the other table also meets. Its columns are (0, name), because a condition on
            one table has only the source 0.
        transform: With a transform of Iceberg, there is one pair, and the other table's value identifies a period, such
            as the month of the column's value. With `RANGE`, `MINIMUM` or `MAXIMUM`, the column is compared with the
            other table's values by `ops` (`scan.Join`).
        ops: The operators of the pairs.
        exact: Whether a `MINIMUM` or `MAXIMUM` is computed from exactly the rows that meet `where`.
    """

    pairs: tuple[tuple[ColumnReference, str], ...]
    other_reference: object
    where: Condition | None = None
    transform: str = IDENTITY
    ops: tuple[str, ...] = ()
    exact: bool = False
    rejects_null: ClassVar[bool] = True
    size: ClassVar[int] = 1

    def move_columns(self, move_reference: Move) -> SemiJoin | None:
        """Return the semi-join on the columns that `move_reference` returns, or None.

        Pairs without a new column are left out, which makes the semi-join weaker. All pairs of a range have the same
        column, so either all of them are left out, or none.
        """
        pairs = tuple(
            (reference, column) for old, column in self.pairs if (reference := move_reference(old)) is not None
        )
        return replace(self, pairs=pairs) if pairs else None


@dataclass(frozen=True)
class AllOf:
    """A condition that is true if all of its parts are true. `size` is the number of comparisons."""

    parts: tuple[Condition, ...]
    size: int


@dataclass(frozen=True)
class AnyOf:
    """A condition that is true if at least one of its parts is true. `size` is the number of comparisons."""

    parts: tuple[Condition, ...]
    size: int


Atom: TypeAlias = ColumnComparison | Like | SemiJoin
Condition: TypeAlias = Atom | AllOf | AnyOf
Move: TypeAlias = Callable[[ColumnReference], ColumnReference | None]
"""A function that maps a column to a column of another source with the same value, or to None."""
NEVER = AnyOf((), 1)


def all_of(parts: Iterable[Condition | None]) -> Condition | None:
    """Return the AND of the conditions, or None if it is true for all rows.

    Parts beyond a total of `LEAVES_MAX` comparisons are left out, which only makes the condition weaker.
    """
    distinct: dict[Condition, None] = {}
    size = 0
    for condition in parts:
        for part in split_parts(condition):
            if part == NEVER:
                return NEVER
            if part not in distinct and size + part.size <= LEAVES_MAX:
                distinct[part] = None
                size += part.size
    return next(iter(distinct)) if len(distinct) == 1 else AllOf(tuple(distinct), size) if distinct else None


def any_of(parts: Iterable[Condition | None]) -> Condition | None:
    """Return the OR of the conditions, or None if it is true for all rows or has more than `LEAVES_MAX` leaves.

    A part cannot be left out of an OR, because the rest would be a stronger condition.
    """
    distinct: dict[Condition, None] = {}
    for part in parts:
        if part is None:
            return None
        if part != NEVER:
            distinct[part] = None
    size = sum(part.size for part in distinct)
    if size > LEAVES_MAX:
        return None
    return next(iter(distinct)) if len(distinct) == 1 else AnyOf(tuple(distinct), size) if distinct else NEVER


def move(condition: Condition | None, move_reference: Move) -> Condition | None:
    """Return the condition on the columns that `move_reference` returns.

    Parts on columns for which `move_reference` returns None are left out.
    """
    return weaken(condition, lambda atom: atom.move_columns(move_reference))


def weaken(condition: Condition | None, keep: Callable[[Atom], Condition | None]) -> Condition | None:
    """Apply `keep` to each atom (a comparison, LIKE or semi-join) of the condition, and return the new condition.

    If `keep` returns None, "true" replaces the atom. If `keep` returns `NEVER`, "false" replaces the atom.
    """
    match condition:
        case AllOf(parts):
            return all_of(weaken(part, keep) for part in parts)
        case AnyOf(parts):
            return any_of(weaken(part, keep) for part in parts)
        case None:
            return None
    return keep(condition)


def keep_comparisons(condition: Condition | None) -> Condition | None:
    """Return the part of the condition that consists of comparisons of columns."""
    return weaken(condition, lambda atom: atom if isinstance(atom, ColumnComparison) else None)


def drop_functions(condition: Condition | None) -> Condition | None:
    """Return the condition without comparisons of functions, which can prune files, but cannot filter rows."""
    return weaken(condition, lambda atom: None if _compares_function(atom) else atom)


def keep_functions(condition: Condition | None) -> Condition | None:
    """Return the part of the condition that consists of comparisons of functions."""
    return weaken(condition, lambda atom: atom if _compares_function(atom) else None)


def _compares_function(atom: Atom) -> bool:
    return isinstance(atom, ColumnComparison) and is_function(atom.transform)


def rejects_null(condition: Condition | None) -> bool:
    """Return whether the condition is never true for a row in which all columns are null.

    Outer joins add such rows.
    """
    match condition:
        case AllOf(parts):
            return any(rejects_null(part) for part in parts)
        case AnyOf(parts):
            return all(rejects_null(part) for part in parts)
        case None:
            return False
    return condition.rejects_null


def list_likes(condition: Condition | None) -> tuple[tuple[Like, ...], ...]:
    """Return the LIKE predicates that follow from the condition. At least one predicate of each tuple is true."""
    patterns: list[tuple[Like, ...]] = []
    for part in split_parts(condition):
        alternatives = part.parts if isinstance(part, AnyOf) else (part,)
        # `(a AND x LIKE 'b') OR (c AND x LIKE 'd')` implies that x matches one of the patterns.
        likes = [
            next((leaf for leaf in split_parts(branch) if isinstance(leaf, Like)), None) for branch in alternatives
        ]
        known_likes = tuple(like for like in likes if like is not None)
        if known_likes and len(known_likes) == len(likes):
            patterns.append(known_likes)
    return tuple(patterns)


def split_parts(condition: Condition | None) -> tuple[Condition, ...]:
    """Return the parts of an AND, or otherwise the condition itself."""
    if condition is None:
        return ()
    return condition.parts if isinstance(condition, AllOf) else (condition,)


def list_references(condition: Condition) -> frozenset[ColumnReference]:
    """Return the columns of a condition."""
    match condition:
        case ColumnComparison() | Like():
            return frozenset({condition.column})
        case SemiJoin():
            return frozenset(reference for reference, _ in condition.pairs)
    return frozenset[ColumnReference]().union(*(list_references(part) for part in condition.parts))


def limit_text(condition: Condition | None) -> Condition | None:
    """Return the parts of the condition that fit into a total of `TEXT_MAX` characters in SQL.

    A part that does not fit is left out, which makes the condition weaker. The condition must not have semi-joins or
    LIKE predicates, because they cannot be written as SQL.
    """
    parts: list[Condition] = []
    characters_left = TEXT_MAX
    for part in split_parts(condition):
        size = len(write_sql(part)) + len(" AND ")
        if size <= characters_left:
            parts.append(part)
            characters_left -= size
    return all_of(parts)


def write_sql(condition: Condition) -> str:
    """Return the condition in SQL that Trino and Spark can read.

    Raises:
        ValueError: The condition contains a semi-join or LIKE.
    """
    match condition:
        case AllOf(parts):
            return "(" + " AND ".join(write_sql(part) for part in parts) + ")"
        case AnyOf(()):
            return "FALSE"
        case AnyOf(parts):
            return "(" + " OR ".join(write_sql(part) for part in parts) + ")"
        case SemiJoin() | Like():
            raise ValueError("a semi-join or LIKE cannot be written as SQL")
    text = _write_comparison(condition)
    return f"NOT ({text})" if condition.negated else text


def _write_comparison(comparison: ColumnComparison) -> str:
    term = _TERMS[comparison.transform].format(quote_name(comparison.column[1]))
    texts = [literal.sql for literal in comparison.literals]
    match comparison.op:
        case "IS TRUE":
            return term
        case "IS NULL":
            return f"{term} IS NULL"
        case "IN":
            return f"{term} IN ({', '.join(texts)})"
        case "BETWEEN":
            return f"{term} BETWEEN {texts[0]} AND {texts[1]}"
        case "STARTS WITH":
            prefix = comparison.literals[0].value
            escaped_prefix = "".join(f"\\{character}" if character in "%_\\" else character for character in prefix)
            return f"{term} LIKE {quote_text(escaped_prefix + '%')}" + (
                "" if escaped_prefix == prefix else " ESCAPE '\\'"
            )
    return f"{term} {comparison.op} {texts[0]}"


def build_expression(condition: Condition) -> Expression:
    """Return an Iceberg expression with typed literals that is true for the same rows.

    Iceberg's logic has two values, in which `not-eq` is true for null. Therefore a comparison with <> also requires
    `not-null`.

    Raises:
        ValueError: The condition contains a semi-join or LIKE.
    """
    match condition:
        case AllOf(parts):
            return iceberg.join_by_and(*map(build_expression, parts))
        case AnyOf(parts):
            return iceberg.join_by_or(*map(build_expression, parts))
        case SemiJoin() | Like():
            raise ValueError("a semi-join or LIKE cannot be written as an expression")
    return _convert_comparison(condition)


def _convert_comparison(comparison: ColumnComparison) -> Expression:
    """Return the Iceberg expression of one comparison, which is true for the same rows."""
    is_negated, literals = comparison.negated, comparison.literals
    name = comparison.column[1]
    is_null, not_null = Unbound(Op.IS_NULL, name, IDENTITY, ()), Unbound(Op.NOT_NULL, name, IDENTITY, ())
    has_null = any(literal.kind == "null" for literal in literals)

    def make_predicate(op: Op, *literals: Literal) -> Expression:
        values = tuple(_shift_year(literal, comparison.transform).typed for literal in literals)
        return Unbound(op, name, comparison.transform, values)

    def compare(op: Op, literal: Literal) -> Expression:
        if literal.kind == "null":
            return iceberg.FALSE
        return Not(make_predicate(op, literal)) if is_negated else make_predicate(op, literal)

    match comparison.op:
        case "IS NULL":
            return not_null if is_negated else is_null
        case "IS NOT DISTINCT FROM" | "IS DISTINCT FROM" as op:
            is_equality = (op == "IS NOT DISTINCT FROM") != is_negated
            if has_null:
                return is_null if is_equality else not_null
            return make_predicate(Op.EQ if is_equality else Op.NOT_EQ, *literals)
        case "IS TRUE":
            return make_predicate(Op.EQ, Literal("boolean", str(not is_negated)))
        case "=" | "<>" as op:
            if has_null:
                return iceberg.FALSE
            if (op == "=") != is_negated:
                return make_predicate(Op.EQ, *literals)
            return iceberg.join_by_and(not_null, make_predicate(Op.NOT_EQ, *literals))
        case "IN":
            present_literals = [literal for literal in literals if literal.kind != "null"]
            if is_negated:
                return (
                    iceberg.FALSE
                    if has_null
                    else iceberg.join_by_and(not_null, make_predicate(Op.NOT_IN, *present_literals))
                )
            return make_predicate(Op.IN, *present_literals) if present_literals else iceberg.FALSE
        case "BETWEEN":
            bounds = compare(Op.GT_EQ, literals[0]), compare(Op.LT_EQ, literals[1])
            return iceberg.join_by_or(*bounds) if is_negated else iceberg.join_by_and(*bounds)
        case "STARTS WITH":
            if not literals[0].value:
                return iceberg.FALSE if is_negated else not_null
            if is_negated:
                return iceberg.join_by_and(not_null, make_predicate(Op.NOT_STARTS_WITH, *literals))
            return make_predicate(Op.STARTS_WITH, *literals)
    return compare(_ORDERED[comparison.op], literals[0])


def _shift_year(literal: Literal, transform: str) -> Literal:
    return replace(literal, value=str(int(literal.value) - _EPOCH_YEAR)) if transform == YEAR else literal
