"""Converts conditions of Trino statements from sqlglot's nodes to conditions of `connector/plans/conditions.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.analysis.comparisons import FLIPPED, OPPOSITE, compare_literals
from seamark.connector.analysis.functions import compare_function, read_case, restrict_to_months
from seamark.connector.analysis.literals import parse_literal
from seamark.connector.analysis.operands import CommonType, OperandClasses, compute_common_type, get_literal_class
from seamark.connector.analysis.relative_times import parse_span
from seamark.connector.analysis.texts import (
    compare_formatted_prefix,
    find_function,
    read_case_list,
    read_case_pattern,
    read_like_predicate,
)
from seamark.connector.plans.conditions import (
    DAY,
    NEVER,
    YEAR,
    ColumnComparison,
    ColumnReference,
    Condition,
    all_of,
    any_of,
    drop_functions,
)
from seamark.connector.plans.literals import Literal
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern, split_pattern
from seamark.formats.iceberg.types.transforms import IDENTITY

Resolve: TypeAlias = Callable[[exp.Column], ColumnReference | None]
GetKind: TypeAlias = Callable[[ColumnReference], str | None]
"""A function that returns the Iceberg type of a column with stored values, or None if the type is unknown."""
COMPARISONS: dict[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}
_NULL_SAFE = {exp.NullSafeEQ: "IS NOT DISTINCT FROM", exp.NullSafeNEQ: "IS DISTINCT FROM"}
_SUPPORTED_ARGUMENTS = frozenset({"this", "expression", "expressions", "low", "high", "to", "negate"})
"""The supported arguments of sqlglot's nodes. A node with any other argument has a different meaning."""


class ConditionReader:
    """Reads the conditions of one statement.

    Args:
        casts_decimal: Whether the statement may convert a value to a decimal (`literals.parse_literal`).
        today: The date in UTC, for conditions with the current time. Without it, these conditions are not read.
        utc: Whether the time zone of the session is UTC.
    """

    def __init__(self, *, casts_decimal: bool, today: date | None = None, utc: bool = False) -> None:
        self._casts_decimal = casts_decimal
        self._today = today
        self.utc = utc

    def read(self, node: exp.Expr, resolve_column: Resolve, find_kind: GetKind) -> Condition | None:
        """Return a condition that is true for each row for which `node` is true, or None if every row may meet it.

        Args:
            node: The SQL expression.
            resolve_column: Returns the source column to which a column in the expression refers, or None.
            find_kind: Returns the Iceberg type of a source column, or None.
        """
        return _BlockConditionReader(self, self._today, resolve_column, find_kind).read(node, negated=False)

    def read_exact_comparison(
        self, node: exp.Expr, resolve_column: Resolve, find_kind: GetKind
    ) -> ColumnComparison | None:
        """Return a comparison of a column that is true for exactly the rows for which `node` is true, or None.

        Args:
            node: The SQL expression.
            resolve_column: Returns the source column to which a column in the expression refers, or None.
            find_kind: Returns the Iceberg type of a source column, or None.
        """
        return _BlockConditionReader(self, self._today, resolve_column, find_kind).read_exact_comparison(node)

    def read_literal(self, node: exp.Expr) -> Literal | None:
        return parse_literal(node, casts_decimal=self._casts_decimal)

    def read_literals(self, nodes: Iterable[exp.Expr]) -> tuple[Literal, ...] | None:
        """Return the literals of the nodes, or None if one of the nodes is not a literal."""
        literals = [self.read_literal(node) for node in nodes]
        known_literals = tuple(literal for literal in literals if literal is not None)
        return known_literals if len(known_literals) == len(literals) else None


@dataclass(frozen=True)
class _BlockConditionReader:
    """Reads the conditions of one query block. The class implements `comparisons.ComparisonReader`."""

    reader: ConditionReader
    today: date | None
    resolve: Resolve
    get_kind: GetKind

    def read(self, node: exp.Expr, *, negated: bool) -> Condition | None:
        """Return a condition that is true for each row for which `node` is true or, with `negated`, false.

        The result is None if every row may meet `node`. NOT is moved to the operands, where it exchanges AND and OR. A
        LIKE whose pattern is not only a prefix gives two conditions: on the prefix and on the whole pattern.
        """
        match node:
            case exp.Paren():
                return self.read(node.this, negated=negated)
            case exp.Not():
                return self.read(node.this, negated=not negated)
            case exp.And() | exp.Or():
                nodes = list(node.flatten())
                parts = [self.read(part, negated=negated) for part in nodes]
                if isinstance(node, exp.And) == negated:
                    return any_of(parts)
                # Together, `year(c) = 2026 AND month(c) = 3` are a range of `c`. Each of them alone is not a range.
                return all_of(
                    [*parts, *(restrict_to_months(self._find_equalities(nodes), self) if not negated else ())]
                )
            case exp.Boolean():
                return NEVER if bool(node.this) == negated else None
            case exp.Case() | exp.If():
                return read_case(node, self, partial(self.read, negated=negated))
        if not negated and isinstance(node, exp.EQ | exp.In) and isinstance(node.this, exp.Tuple):
            return self._compare_rows(node)
        leaf = self._read_leaf(node)
        if isinstance(node, exp.Like | exp.Escape) and (leaf is None or not leaf.exact):
            prefix_condition = leaf if leaf is not None or negated else self._read_times_like(node)
            return all_of([None if negated else prefix_condition, self._read_pattern(node, negated=negated)])
        if leaf is None:
            return self._read_predicate(node, negated=negated)
        return leaf.negate() if negated else leaf

    def read_exact_comparison(self, node: exp.Expr) -> ColumnComparison | None:
        comparison = self._read_leaf(node)
        is_exact = comparison is not None and comparison.exact and comparison.transform == IDENTITY
        return comparison if is_exact else None

    # The methods of `comparisons.ComparisonReader`

    def read_condition(self, node: exp.Expr) -> Condition | None:
        return self.read(node, negated=False)

    def is_null(self, node: exp.Expr) -> Condition | None:
        literal = self.read_literal(node)
        if literal is not None:
            return None if literal.kind == "null" else NEVER
        return self._read_leaf(exp.Is(this=node, expression=exp.Null()))

    def read_literal(self, node: exp.Expr) -> Literal | None:
        return self.reader.read_literal(node)

    def find_kind(self, node: exp.Expr) -> str | None:
        while type(node) is exp.Paren:
            node = node.this
        reference = self.resolve(node) if type(node) is exp.Column else None
        return None if reference is None else self.get_kind(reference)

    def compare_column(self, op: str, side: exp.Expr, literal: Literal) -> ColumnComparison | None:
        term = _parse_term(side, self.resolve)
        return None if term is None else term.compare(op, (literal,))

    def compare(self, op: str, side: exp.Expr, literal: Literal) -> Condition | None:
        while type(side) is exp.Paren:
            side = side.this
        constant = self.read_literal(side)
        if constant is not None:
            return NEVER if compare_literals(op, constant, literal) is False else None
        comparison = self.compare_column(op, side, literal)
        return comparison if comparison is not None else compare_function(op, side, literal, self)

    def build_equality(self, left: exp.Expr, right: exp.Expr, compared_in: CommonType) -> Condition | None:
        return self._compare_sides("=", left, right, compared_in)

    # The common type of operands (`operands.py`)

    @cached_property
    def _classes(self) -> OperandClasses:
        return OperandClasses(self.read_literal, self.find_kind)

    def compute_common_type(self, operands: Iterable[exp.Expr]) -> CommonType:
        return self._classes.compute_common_type(operands, utc=self.reader.utc)

    def _convert_literals(self, side: exp.Expr, nodes: Iterable[exp.Expr]) -> tuple[Literal, ...] | None:
        """Return the literals of `nodes`, converted to the type in which they are compared with `side`.

        Return None if a node is not a literal, or if a literal cannot be converted to the common type.
        """
        literals = self.reader.read_literals(nodes)
        if literals is None:
            return None
        side_class = self._classes.find_class(side)
        common = compute_common_type([side_class, *map(get_literal_class, literals)], utc=self.reader.utc)
        converted_literals = [common.choose_literal(literal, side_class) for literal in literals]
        known_literals = tuple(literal for literal in converted_literals if literal is not None)
        return known_literals if len(known_literals) == len(converted_literals) else None

    # Comparisons

    def _read_predicate(self, node: exp.Expr, *, negated: bool) -> Condition | None:
        """Read a comparison of a function, or a comparison with the current time. Return None for another predicate.

        With `negated`, read the negation. A comparison is never true for null, so its negation is read as the opposite
        comparison.
        """
        if not is_plain(node):
            return None
        match node:
            case exp.StartsWith() if not negated:
                prefix = self.read_literal(node.expression)
                return (
                    self.compare_column("STARTS WITH", node.this, prefix) if prefix and prefix.kind == "text" else None
                )
            case exp.In() if node.expressions and not isinstance(node.this, exp.Tuple):
                is_disjunction, parts = True, [("=", node.this, value) for value in _flatten_values(node.expressions)]
            case exp.Between():
                is_disjunction, parts = (
                    False,
                    [(">=", node.this, node.args["low"]), ("<=", node.this, node.args["high"])],
                )
            case _ if type(node) in COMPARISONS:
                is_disjunction, parts = True, [(COMPARISONS[type(node)], node.this, node.expression)]
            case _:
                return None
        common = self.compute_common_type([node.this, *(right for _, _, right in parts)]) if len(parts) > 1 else None
        if negated != bool(node.args.get("negate")):
            is_disjunction, parts = not is_disjunction, [(OPPOSITE[op], left, right) for op, left, right in parts]
        conditions = (self._compare_sides(op, left, right, common) for op, left, right in parts)
        if is_disjunction and isinstance(node, exp.In):
            return self._compare_list(node.this.unnest(), [right for _, _, right in parts], any_of(conditions), common)
        return any_of(conditions) if is_disjunction else all_of(conditions)

    def _compare_list(
        self, side: exp.Expr, nodes: Sequence[exp.Expr], disjunction: Condition | None, compared_in: CommonType | None
    ) -> Condition | None:
        """Read `side IN (nodes)`.

        If `side` is `lower` or `upper` of a column, it is compared with the whole list at once.

        Args:
            side: The left operand.
            nodes: The values in the list.
            disjunction: The disjunction of the comparisons of `side` with each node. It is the result for other sides.
            compared_in: The common type of `side` and the nodes, or None if it is not needed.
        """
        if not isinstance(side, exp.Lower | exp.Upper):
            return disjunction
        literals = [self.read_literal(node) for node in nodes]
        if compared_in is not None:
            literals = [None if literal is None else compared_in.convert_literal(side, literal) for literal in literals]
        known_literals = [literal for literal in literals if literal is not None]
        list_condition = read_case_list(side, known_literals, self) if len(known_literals) == len(literals) else None
        return disjunction if list_condition is None else all_of([drop_functions(disjunction), list_condition])

    def _compare_sides(
        self, op: str, left: exp.Expr, right: exp.Expr, compared_in: CommonType | None
    ) -> Condition | None:
        """Return a comparison of two operands. A literal or the current time must be among them.

        The current time is known only as a span of dates, so a comparison with it becomes a comparison with an end of
        the span. `<>` then gives no condition.

        Args:
            op: The operator between the operands.
            left: The operand to the left of it.
            right: The operand to the right of it.
            compared_in: The common type of all operands of the predicate, or None if the predicate has only these two
                operands.
        """
        for side, other, oriented_op in _orient_sides(left, right, op):
            literal = self.read_literal(other)
            if literal is not None:  # `_read_leaf` has already read comparisons of columns with null.
                if compared_in is not None:
                    literal = compared_in.convert_literal(side, literal)
                return None if literal is None or literal.kind == "null" else self.compare(oriented_op, side, literal)
            span = parse_span(other, self.today)
            if span is not None:
                ops = (">=", "<=") if oriented_op == "=" else () if oriented_op == "<>" else (oriented_op,)
                return all_of(self.compare(bound, side, span.choose_literal(bound)) for bound in ops)
        return None

    def _read_pattern(self, node: exp.Expr, *, negated: bool) -> Condition | None:
        """Read a LIKE predicate whose pattern is not only a prefix. Return None if the server cannot evaluate it.

        The operand is a column, or `lower` or `upper` of a column, for which an index on the function may help. With
        `negated`, the negation of the predicate is read.
        """
        escape = node.expression if isinstance(node, exp.Escape) else None
        like = node.this if escape is not None else node
        if type(like) is not exp.Like or not is_plain(like) or not is_plain(node):
            return None
        texts = [self.read_literal(node) for node in (like.expression, escape) if node is not None]
        if any(text is None or text.kind != "text" for text in texts):
            return None
        pattern, *escapes = [text.value for text in texts if text is not None]
        side = like.this.unnest()
        function = find_function(side)
        term = _parse_term(side if function is None else side.this, self.resolve)
        if term is None or term.transform != IDENTITY or any(len(character) != 1 for character in escapes):
            return None
        negated = negated != bool(like.args.get("negate"))
        escape_character = escapes[0] if escapes else None
        like_condition = read_like_predicate(term.column, pattern, escape_character, function, negated=negated)
        if negated or not isinstance(side, exp.Lower | exp.Upper) or not is_valid_pattern(pattern, escape_character):
            return like_condition
        return all_of([like_condition, read_case_pattern(side, pattern, escape_character, self)])

    def _read_times_like(self, node: exp.Expr) -> Condition | None:
        """Read LIKE with a prefix of a formatted date, such as `CAST(day AS varchar) LIKE '2026-01-%'`."""
        pattern = node.expression
        if type(node) is not exp.Like or not is_plain(node) or not isinstance(pattern, exp.Literal):
            return None
        if node.args.get("negate") or not pattern.is_string:
            return None
        return compare_formatted_prefix(node.this.unnest(), split_pattern(str(pattern.this), None)[0], self)

    def _find_equalities(self, nodes: Iterable[exp.Expr]) -> list[tuple[exp.Expr, Literal]]:
        equalities = []
        for node in nodes:
            literal = self.read_literal(node.expression) if type(node) is exp.EQ else None
            if literal is not None:
                equalities.append((node.this, literal))
        return equalities

    def _compare_rows(self, node: exp.Expr) -> Condition | None:
        """Read comparisons of rows, such as `(a, b) = (1, 2)` and `(a, b) IN ((1, 2), …)`.

        The result is None if the comparison cannot be read, or if each row on the right contains NULL.
        """
        if not is_plain(node):
            return None
        columns = node.this.expressions
        rows = [node.expression] if isinstance(node, exp.EQ) else node.expressions
        if not rows or any(not isinstance(row, exp.Tuple) or len(row.expressions) != len(columns) for row in rows):
            return None
        fields = [[row.expressions[number] for row in rows] for number in range(len(columns))]
        common = [self.compute_common_type([column, *values]) for column, values in zip(columns, fields, strict=True)]
        # A row that contains NULL is not equal to any row.
        rows_without_null = [
            row for row in rows if not any(isinstance(value.unnest(), exp.Null) for value in row.expressions)
        ]
        if not rows_without_null:
            return None
        return any_of(all_of(map(self.build_equality, columns, row.expressions, common)) for row in rows_without_null)

    def _read_leaf(self, node: exp.Expr) -> ColumnComparison | None:
        """Return a comparison of a column, or of its day or year, with literals. Return None for any other node."""
        if type(node) is exp.Column:
            term = _parse_term(node, self.resolve)
            return None if term is None else term.compare("IS TRUE", ())
        if not is_plain(node):
            return None
        kind = type(node)
        if kind in COMPARISONS:
            return self._read_comparison(node, COMPARISONS[kind])
        if kind in _NULL_SAFE:
            term, literal = _parse_term(node.this, self.resolve), self.read_literal(node.expression)
            return None if term is None or literal is None else term.compare(_NULL_SAFE[kind], (literal,))
        match node:
            case exp.Escape() if type(node.this) is exp.Like and is_plain(node.this):
                escape = node.expression
                if not isinstance(escape, exp.Literal) or not escape.is_string or len(str(escape.this)) != 1:
                    return None
                return self._read_like(node.this, str(escape.this))
            case exp.Like():
                return self._read_like(node, None)
            case exp.Is() if isinstance(node.expression, exp.Null):
                term = _parse_term(node.this, self.resolve)
                comparison = None if term is None else term.compare("IS NULL", ())
                return comparison.negate() if comparison is not None and node.args.get("negate") else comparison
        if node.args.get("negate"):
            return None
        side, op = node.this, "IN"
        match node:
            case exp.Between():
                op, nodes = "BETWEEN", [node.args[bound] for bound in ("low", "high")]
            case exp.In() if node.expressions:
                nodes = _flatten_values(node.expressions)
            case exp.ArrayContains() if isinstance(node.this, exp.Array):
                side, nodes = node.expression, node.this.expressions
            case _:
                return None
        term, literals = _parse_term(side, self.resolve), self._convert_literals(side, nodes)
        return term.compare(op, literals) if term is not None and literals else None

    def _read_comparison(self, node: exp.Expr, op: str) -> ColumnComparison | None:
        for side, other, oriented_op in _orient_sides(node.this, node.expression, op):
            literal = self.read_literal(other)
            if literal is not None:
                return self.compare_column(oriented_op, side, literal)
        return None

    def _read_like(self, node: exp.Expr, escape: str | None) -> ColumnComparison | None:
        term, pattern = _parse_term(node.this, self.resolve), node.expression
        if term is None or not isinstance(pattern, exp.Literal) or not pattern.is_string:
            return None
        prefix, suffix = split_pattern(str(pattern.this), escape)
        if suffix == "":
            comparison = term.compare("=", (Literal("text", prefix),))
        elif prefix or not suffix.strip("%"):
            comparison = term.compare("STARTS WITH", (Literal("text", prefix),), exact=suffix.strip("%") == "")
        else:
            return None
        return comparison.negate() if comparison is not None and node.args.get("negate") else comparison


@dataclass(frozen=True)
class _Term:
    """A column, or a transform of a column."""

    column: ColumnReference
    transform: str = IDENTITY
    kinds: frozenset[str] | None = None
    """The kinds of literals with which the term may be compared, or None for any kind."""

    def compare(self, op: str, literals: Iterable[Literal], *, exact: bool = True) -> ColumnComparison | None:
        literal_tuple = tuple(literals)
        kinds = {literal.kind for literal in literal_tuple} - {"null"}
        if self.kinds is not None and not kinds <= self.kinds:
            return None
        return ColumnComparison(self.column, op, literal_tuple, self.transform, exact=exact)


def _parse_term(node: exp.Expr, resolve: Resolve) -> _Term | None:
    """Return a column, or a supported function or cast of a column. The result is None for another expression.

    The supported expressions are the day of a column, which is compared with dates, and its year, which is compared
    with integers.
    """
    while type(node) is exp.Paren:
        node = node.this
    if type(node) is exp.Column:
        reference = resolve(node)
        return None if reference is None else _Term(reference)
    if not is_plain(node):
        return None
    inner, transform, kind = None, DAY, "date"
    match node:
        case exp.Cast() if type(node) is exp.Cast and node.to.this is exp.DataType.Type.DATE:
            inner = node.this
        case exp.Date() if not node.expressions:
            inner = node.this
        case exp.Year():
            inner, transform, kind = node.this, YEAR, "integer"
        case exp.Extract() if type(node.this) is exp.Var and node.name.upper() == "YEAR":
            inner, transform, kind = node.expression, YEAR, "integer"
    if type(inner) is not exp.Column:
        return None
    reference = resolve(inner)
    return None if reference is None else _Term(reference, transform, frozenset({kind}))


def _orient_sides(left: exp.Expr, right: exp.Expr, op: str) -> tuple[tuple[exp.Expr, exp.Expr, str], ...]:
    """Return a comparison in both orientations: unchanged, and with its sides exchanged."""
    return (left, right, op), (right, left, FLIPPED[op])


def _flatten_values(nodes: list[exp.Expr]) -> list[exp.Expr]:
    """Return the values of an IN list, which may have the form `IN (VALUES 1, 2)`."""
    if len(nodes) != 1 or not isinstance(nodes[0], exp.Values):
        return nodes
    rows = [row.expressions if isinstance(row, exp.Tuple) else [row] for row in nodes[0].expressions]
    return [row[0] for row in rows] if all(len(row) == 1 for row in rows) else nodes


def is_plain(node: exp.Expr) -> bool:
    return all(name in _SUPPORTED_ARGUMENTS for name, value in node.args.items() if value)


def split_conjunction(node: exp.Expr | None) -> Iterator[exp.Expr]:
    for part in node.flatten() if isinstance(node, exp.And) else () if node is None else (node,):
        while isinstance(part, exp.Paren):
            part = part.this
        if isinstance(part, exp.And):
            yield from split_conjunction(part)
        else:
            yield part
