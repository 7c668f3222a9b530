"""Conversion of an SQL predicate to an Iceberg expression that is true for at least the same rows.

SQL and Iceberg differ in the meaning of "not". In SQL, a comparison with null is neither true nor false, so `NOT (a =
1)` is true if `a` is not null and not 1. Iceberg's `not-eq` matches null. Negation is therefore pushed down to the
comparisons, and a comparison that must be *false* becomes its opposite and `not-null`.

If an Iceberg expression cannot represent a part of the predicate (comparisons between columns, functions, subqueries,
other LIKE patterns), the part becomes `true`, negated or not, and the result lists it as unused. The same applies to
comparisons whose result depends on the engine, such as a number with a string.

The parser accepts the syntax of Trino and Spark: `"x"` and `` `x` `` are names, `'x'` is a string, and names are
case-insensitive. The session time zone is UTC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from sqlglot import TokenType, exp, tokens
from sqlglot.dialects.dialect import Dialect
from sqlglot.errors import ParseError, SqlglotError

from seamark.formats.iceberg.expressions.comparisons import NESTED, OPPOSITE, UNITS, ComparedTerm, Comparisons
from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    Expression,
    Op,
    Unbound,
    join_by_and,
    join_by_or,
)
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern, split_pattern
from seamark.formats.iceberg.expressions.sql_literals import parse_literal
from seamark.formats.iceberg.expressions.sql_parser import parse_into, tokenize_sql
from seamark.formats.iceberg.expressions.sql_reasons import explain_misfit, explain_unsupported
from seamark.formats.iceberg.expressions.typed_literals import AmbiguousRounding, Inconvertible, TypedLiteral
from seamark.formats.iceberg.types.functions import LOWER, UPPER
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.iceberg.types.transforms import IDENTITY, canonicalize_transform
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import FLOATS
from seamark.formats.runtime.errors import BadRequest

TEXT_MAX = 100_000
_SHOWN_MAX, _NEAR_CHARS_MAX = 200, 40
"""The maximum number of characters of a part of the predicate in a message, and of the text near an error."""
_EXACT_DIGITS_MAX, _DIGITS_SHOWN_MAX = 15, 40
"""The maximum number of digits of a number that each engine converts to the same double, and of digits in a message."""
_COMPARISON_OPS: dict[type[exp.Expr], Op] = {
    exp.EQ: Op.EQ,
    exp.NEQ: Op.NOT_EQ,
    exp.LT: Op.LT,
    exp.LTE: Op.LT_EQ,
    exp.GT: Op.GT,
    exp.GTE: Op.GT_EQ,
}
_SWAPPED = {Op.LT: Op.GT, Op.LT_EQ: Op.GT_EQ, Op.GT: Op.LT, Op.GT_EQ: Op.LT_EQ}
_LITERAL_COMPARISONS = {Op.EQ: eq, Op.NOT_EQ: ne, Op.LT: lt, Op.LT_EQ: le, Op.GT: gt, Op.GT_EQ: ge}
_STRICT_KINDS = {
    "boolean": ("boolean",),
    "int": ("number",),
    "long": ("number",),
    "decimal": ("number",),
    "string": ("text",),
    "date": ("date",),
    "timestamp": ("timestamp", "date"),
    "timestamptz": ("timestamptz",),
}
"""The kinds of the literals with which Trino compares a column of each type without a conversion that may round."""
_FIRST_YEAR = 1970
"""The year that Iceberg's transform `year` maps to 0."""
_PLURALS = {"years": "year", "months": "month", "days": "day", "hours": "hour"}
_NO_CLAUSES_HINT = "Send the predicate alone, without SELECT or WHERE"
_ARGUMENTS = frozenset({"this", "expression", "expressions", "low", "high", "decimals", "to", "negate"})
"""The arguments of sqlglot's nodes that this module supports. Other arguments, such as BETWEEN SYMMETRIC, change the
meaning.
"""
_BUILT_IN_WORDS = frozenset(
    {"AND", "OR", "NOT", "IN", "BETWEEN", "LIKE", "ESCAPE", "FROM"} | {"CAST", "DATE", "YEAR", "LOWER", "UPPER"}
)
"""The words before an opening parenthesis that are not functions of a schema: keywords and functions of all engines."""
_QUERY_WORDS = frozenset({"SELECT", "TABLE", "VALUES"})


class _Sql(Dialect):
    """sqlglot's default dialect, in which names can have both kinds of quotes."""

    class Tokenizer(tokens.Tokenizer):
        IDENTIFIERS = ['"', "`"]  # noqa: RUF012  as sqlglot declares it
        HEX_STRINGS = [("x'", "'"), ("X'", "'")]  # noqa: RUF012


_SQL = Dialect.get_or_raise(_Sql)


@dataclass(frozen=True)
class SqlFilter:
    """The result of converting an SQL predicate.

    Attributes:
        expression: The unbound expression. It is true for every row for which the SQL is true.
        unused: The parts of the predicate that are not used.
        reasons: The reason for each part of `unused`, in the same order.
        exact: Whether no other row satisfies the expression, except rows with NaN in a compared column, about which
            engines differ.
    """

    expression: Expression
    unused: tuple[str, ...]
    exact: bool = False
    reasons: tuple[str, ...] = ()


def parse_sql(
    text: str,
    schema: Schema,
    schemas: Iterable[Schema] = (),
    *,
    nan_above: bool = False,
    functions: bool = False,
    strict: bool = False,
) -> SqlFilter:
    """Convert the predicate of a WHERE clause.

    Args:
        text: The predicate.
        schema: The schema in which names are looked up first.
        schemas: Further schemas for names, in any order. The schema with the highest id is searched first.
        nan_above: Whether NaN is greater than all numbers, as in Spark. If True, the expression is exact about NaN.
        functions: Whether the expression can have functions of columns (`types/functions.py`). An expression with
            functions is not exact.
        strict: Whether to use only predicates that Trino accepts and evaluates like Iceberg: a literal has the kind of
            its column, and no number is a float. With this, a predicate that is an error in the engine is not used.

    Raises:
        BadRequest: The SQL is invalid, is too long or is nested too deeply, or a column is unknown. For a syntax
            error, the message states the position.
    """
    if len(text) > TEXT_MAX:
        raise BadRequest(f"The predicate has {len(text)} characters; the limit is {TEXT_MAX} characters")
    other_schemas = sorted(
        (other for other in schemas if other is not schema), key=lambda other: other.id, reverse=True
    )
    try:
        tree = parse_into(_SQL, text, exp.Condition)
        reader = (_StrictReader if strict else _Reader)((schema, *other_schemas), nan_above, functions)
        expression = reader.read(tree, negated=False)
        exact = reader.exact and not reader.unused
        return SqlFilter(expression, tuple(reader.unused), exact, tuple(reader.unused.values()))
    except ParseError as error:
        hint = f". {_NO_CLAUSES_HINT}" if text.lstrip()[:6].lower() in ("select", "where ") else ""
        raise BadRequest(describe_syntax_error(error, "The predicate") + hint) from None
    except SqlglotError as error:
        raise BadRequest(f"The predicate is not valid SQL: {' '.join(str(error).split())[:_SHOWN_MAX]}") from None
    except RecursionError:
        raise BadRequest("The predicate is nested too deeply") from None


def find_definer_rights_call(text: str) -> str | None:
    """Return the first part of a valid predicate that may be a function of a schema or a subquery, or None.

    If the predicate is added to a view, this part runs with the rights of the view's owner. A call is a name before a
    parenthesis. It is harmless if the name is a type in a cast, or a built-in function that is neither quoted nor
    qualified by a schema.
    """
    words = tokenize_sql(_SQL, text)
    for index, word in enumerate(words):
        name = str(word.text).upper()
        is_quoted = word.token_type is TokenType.IDENTIFIER
        if name in _QUERY_WORDS and not is_quoted and word.token_type is not TokenType.STRING:
            return name
        is_called = index + 1 < len(words) and words[index + 1].token_type is TokenType.L_PAREN
        if not is_called or not (is_quoted or name[:1].isalpha() or name[:1] == "_"):
            continue
        previous_word = words[index - 1] if index else None
        is_type = previous_word is not None and previous_word.token_type is TokenType.ALIAS
        is_of_schema = previous_word is not None and previous_word.token_type is TokenType.DOT
        if is_quoted or is_of_schema or not (is_type or name in _BUILT_IN_WORDS):
            return text[word.start : words[index + 1].end + 1]
    return None


def describe_syntax_error(error: ParseError, subject: str) -> str:
    """Return a message that describes a syntax error and its position.

    Args:
        error: The error.
        subject: The subject of the message, such as "The predicate".
    """
    for detail in error.errors:
        if detail.get("line") is not None:
            text = detail.get("highlight") or "the end"
            position = f"line {detail['line']}, column {detail['col']}"
            reason = str(detail.get("description", "")).partition(" for <class")[0]
            return f"{subject} is not valid SQL: {reason} at {position}, near {text[:_NEAR_CHARS_MAX]!r}"
    return f"{subject} is not valid SQL: {error if error.errors else 'it is empty'}"[:_SHOWN_MAX]


class _Reader(Comparisons):
    """The conversion of a parsed SQL predicate to an expression."""

    def __init__(self, schemas: tuple[Schema, ...], nan_above: bool, functions: bool) -> None:
        super().__init__(schemas, nan_above)
        self._functions = functions
        self._lower_names: set[str] | None = None
        self.unused: dict[str, str] = {}
        """The reason for each part of the predicate that is not used."""

    def read(self, node: exp.Expr, *, negated: bool) -> Expression:
        """Return the condition under which `node` is true, or false if `negated` is True.

        A part that an expression cannot represent becomes TRUE, which keeps all rows, and is listed as unused. A
        negation is moved to the predicates.

        Raises:
            BadRequest: The text contains a query, or a column is unknown.
        """
        match node:
            case exp.Paren():
                return self.read(node.this, negated=negated)
            case exp.Not():
                return self.read(node.this, negated=not negated)
            case exp.And() | exp.Or():
                children = [self.read(child, negated=negated) for child in node.flatten()]
                return join_by_and(*children) if isinstance(node, exp.And) != negated else join_by_or(*children)
            case exp.Select() | exp.Subquery():
                raise BadRequest(_NO_CLAUSES_HINT)
        try:
            leaf = self._parse_leaf(node, negated)
        except Inconvertible as error:
            leaf, reason = None, str(error)
        else:
            reason = explain_unsupported(node, self._is_column) if leaf is None else ""
        if leaf is None:
            self._leave_out(node, reason)
            return TRUE
        return leaf

    def _leave_out(self, node: exp.Expr, reason: str) -> None:
        """List a part of the predicate as unused."""
        self.unused.setdefault(node.sql(dialect=_Sql)[:_SHOWN_MAX], reason)

    def fit_literal(self, literal: TypedLiteral, term: ComparedTerm) -> tuple[object, bool]:
        """Convert a literal to a value for a term. Also return whether the value is exact.

        Raises:
            Inconvertible: Engines compare the literal with the term in different ways. The message is the reason for
                the user.
        """
        try:
            return super().fit_literal(literal, term)
        except AmbiguousRounding:  # The caller needs the possible values, which this error contains.
            raise
        except Inconvertible:
            raise Inconvertible(explain_misfit(literal, term.name, term.kind)) from None

    def _is_column(self, name: str) -> bool:
        if self._lower_names is None:
            self._lower_names = {full_name.lower() for schema in self._schemas for full_name in schema.index.by_name}
        return name.lower() in self._lower_names

    def _parse_leaf(self, node: exp.Expr, negated: bool) -> Expression | None:
        """Return the predicate of a node, or None if an expression cannot represent the node.

        If `negated` is True, the predicate is true where the node is false. A null is neither true nor false, so it
        gives FALSE in both cases.

        Raises:
            Inconvertible: Engines compare a literal with the column in different ways.
        """
        if not _is_plain(node):
            return None
        negated ^= bool(node.args.get("negate"))  # NOT LIKE is a single node.
        match node:
            case exp.NullSafeEQ() | exp.NullSafeNEQ():
                return self._compare_null_safe(node, negated == isinstance(node, exp.NullSafeEQ))
            case exp.Boolean():
                return Always(bool(node.this) != negated)
            case exp.Null():
                return FALSE
            case exp.Between():
                value, *bounds = self._unify_number_types([node.this, node.args["low"], node.args["high"]])
                low, high = (
                    self._compare_sides(op, value, bound, negated)
                    for op, bound in zip((Op.GT_EQ, Op.LT_EQ), bounds, strict=True)
                )
                return None if low is None or high is None else (join_by_or if negated else join_by_and)(low, high)
            case exp.In():
                return self._parse_in(node, negated)
            case exp.Is():
                return self._parse_is(node, negated)
            case exp.Like() | exp.Escape() | exp.StartsWith():
                return self._parse_like(node, negated)
            case exp.IsNan():
                term = self._parse_term(node.this)
                if term is None or term.kind not in FLOATS:
                    return None
                return term.make_predicate(Op.NOT_NAN if negated else Op.IS_NAN)
        if type(node) in _COMPARISON_OPS:
            return self._compare_sides(_COMPARISON_OPS[type(node)], node.this, node.expression, negated)
        term = self._parse_term(node)
        if term is not None and term.kind == "boolean":
            return term.make_predicate(Op.EQ, not negated)
        return None

    def _compare_sides(self, op: Op, left: exp.Expr, right: exp.Expr, negated: bool) -> Expression | None:
        """Return the condition under which a comparison is true, or false if `negated` is True.

        If only the left side is a literal, the sides are swapped. A comparison with null is never true or false. The
        result is None if no side is a literal, or if the other side is not a column or a transform.

        Raises:
            Inconvertible: Engines compare the sides in different ways.
        """
        literal = parse_literal(right)
        if literal is None:
            literal = parse_literal(left)
            if literal is None:
                return None
            left, op = right, _SWAPPED.get(op, op)
        if literal.kind == "null":
            return FALSE
        if negated:
            op = OPPOSITE[op]
        other = parse_literal(left)
        if other is not None:
            return _compare_literals(op, other, literal)
        term = self._parse_term(left)
        return None if term is None else self.make_comparison(op, term, literal, negated)

    def _unify_number_types(self, operands: Sequence[exp.Expr]) -> Sequence[exp.Expr]:
        """Return the operands of a predicate. If one number is a double, all numbers become doubles.

        Engines convert the operands to one type before they compare them.

        Raises:
            Inconvertible: Engines may round a number to different doubles.
        """
        literals = [parse_literal(literal) for literal in operands]
        kinds = {literal.kind for literal in literals if literal is not None}
        if not {"number", "double"} <= kinds:
            return operands
        if any(literal is None and self._is_double(node) for literal, node in zip(literals, operands, strict=True)):
            return operands  # A double column is compared with each number as a double anyway.
        return [
            node if literal is None or literal.kind != "number" else _convert_to_double(literal)
            for literal, node in zip(literals, operands, strict=True)
        ]

    def _is_double(self, node: exp.Expr) -> bool:
        term = self._parse_term(node)
        return term is not None and term.kind == "double"

    def _compare_null_safe(self, node: exp.Expr, is_distinct: bool) -> Expression | None:
        """Return the predicate of IS [NOT] DISTINCT FROM, or None if an expression cannot represent it.

        SQL treats null as a value here, as Iceberg's `eq` and `not-eq` do. One side must be a literal. If the literal
        is no value of the column's type, every row is distinct from it.
        """
        sides = [node.this, node.expression]
        literals = [parse_literal(side) for side in sides]
        for literal, side in zip(literals, reversed(sides), strict=True):
            term = self._parse_term(side) if literal is not None else None
            if literal is None or term is None:
                continue
            if literal.kind == "null":
                return term.make_predicate(Op.NOT_NULL if is_distinct else Op.IS_NULL)
            if not is_distinct:
                return self.make_equality(term, (literal,))
            exact_values = self.list_exact_values(term, (literal,))
            return term.make_predicate(Op.NOT_EQ, *exact_values) if exact_values else TRUE
        return None

    def _parse_in(self, node: exp.In, negated: bool) -> Expression | None:
        """Return the predicate of IN or NOT IN, or None if an expression cannot represent it.

        NOT IN is never true for null, unlike Iceberg's `not-in`, so a test for null is added. Literals that are no
        values of the column's type are omitted from NOT IN. A null in the list of IN is omitted, because a comparison
        with null is never true.
        """
        term = self._parse_term(node.this)
        if term is None or not node.expressions or node.args.get("query") is not None:
            return None
        literals = [parse_literal(item) for item in self._unify_number_types([node.this, *node.expressions])[1:]]
        if any(literal is None for literal in literals):
            return None
        values = [literal for literal in literals if literal is not None and literal.kind != "null"]
        if negated and len(values) < len(literals):  # NOT IN with a null in the list is never true.
            return FALSE
        if not negated:
            return self.make_equality(term, values)
        exact_values = self.list_exact_values(term, values)
        if not exact_values:
            return term.not_null
        return join_by_and(term.not_null, term.make_predicate(Op.NOT_IN, *exact_values))

    def _parse_is(self, node: exp.Is, negated: bool) -> Expression | None:
        """Return the predicate of IS NULL, IS TRUE or IS FALSE, or None if an expression cannot represent it.

        IS TRUE is the same condition as the operand, and IS FALSE is its negation.
        """
        if isinstance(node.expression, exp.Null):
            term = self._parse_term(node.this, any_type=True)
            if term is None:
                return None
            return Unbound(Op.NOT_NULL if negated else Op.IS_NULL, term.name, IDENTITY, ())
        if not isinstance(node.expression, exp.Boolean):
            return None
        expected = bool(node.expression.this)
        if not negated:
            return self.read(node.this, negated=not expected)
        term = self._parse_term(node.this)
        if term is None or term.kind != "boolean":
            return None
        # Null also matches, because IS NOT TRUE and IS NOT FALSE are true for null.
        return term.make_predicate(Op.NOT_EQ, expected)

    def _parse_like(self, node: exp.Expr, negated: bool) -> Expression | None:
        """Return the predicate for the prefix of a LIKE pattern, or None if an expression cannot represent it.

        A pattern without wildcards is an equality. If only `%` follows the prefix, once or several times, the pattern
        is a test for the prefix. A pattern of `%` alone matches each value that is not null. For other patterns, only
        the prefix before the first wildcard is used, which a negation does not allow.
        """
        escape = None
        if isinstance(node, exp.Escape):
            escape, node = parse_literal(node.expression), node.this
            if escape is None or len(escape.text) != 1 or not isinstance(node, exp.Like):
                return None
            if not _is_plain(node):
                return None
            negated ^= bool(node.args.get("negate"))
        term, pattern = self._parse_term(node.this), parse_literal(node.expression)
        if term is None or term.kind != "string" or pattern is None:
            return None
        if pattern.kind == "null":
            return FALSE
        if pattern.kind != "text":
            return None
        if isinstance(node, exp.StartsWith):
            prefix, tail = pattern.text, "%"
        else:
            escape_text = None if escape is None else escape.text
            if not is_valid_pattern(pattern.text, escape_text):
                return None
            prefix, tail = split_pattern(pattern.text, escape_text)
        if tail == "":
            return self.make_comparison(Op.NOT_EQ if negated else Op.EQ, term, TypedLiteral("text", prefix), negated)
        if tail.strip("%") == "":
            if not prefix:
                return FALSE if negated else term.not_null
            if negated:
                return join_by_and(term.not_null, term.make_predicate(Op.NOT_STARTS_WITH, prefix))
            return term.make_predicate(Op.STARTS_WITH, prefix)
        if negated or not prefix:
            return None
        # Only the prefix is used, so list the rest of the pattern as unused.
        self._leave_out(node, explain_unsupported(node, self._is_column))
        return term.make_predicate(Op.STARTS_WITH, prefix)

    def _parse_term(self, node: exp.Expr, *, any_type: bool = False) -> ComparedTerm | None:
        """Return a column or a transform of a column, or None if the node is something else.

        Args:
            node: The node.
            any_type: Whether structs, lists and maps are accepted.
        """
        while isinstance(node, exp.Paren):
            node = node.this
        if not _is_plain(node) and not isinstance(node, exp.Column):
            return None
        name = _read_name(node)
        if name is not None:
            column, kind = self._find_column(name)
            return ComparedTerm(column, kind) if any_type or kind not in NESTED else None
        if isinstance(node, exp.Dot):
            return self._parse_transform(node.expression, qualified=True)
        return self._parse_transform(node, qualified=False)

    def _parse_transform(self, node: exp.Expr, *, qualified: bool) -> ComparedTerm | None:
        """Return a transform of a column, or None if the node is not a transform.

        Args:
            node: The node.
            qualified: Whether the function has a schema, like Spark's `system.bucket(…)`. Then it is a transform, even
                if the name has another meaning in SQL.
        """
        if isinstance(node, exp.Cast) and type(node) is exp.Cast:
            return self._apply_transform("day", node.this) if node.to.this is exp.DataType.Type.DATE else None
        if isinstance(node, exp.Date | exp.TsOrDsToDate) and len(list(node.iter_expressions())) == 1:
            return self._apply_transform("day", node.this)
        if isinstance(node, exp.Lower | exp.Upper):
            if qualified:  # The name is a function of a schema, not the built-in function.
                return None
            return self._parse_function(LOWER if isinstance(node, exp.Lower) else UPPER, node.this)
        if isinstance(node, exp.Trunc):
            return self._parse_sized_transform("truncate", [node.this, node.args.get("decimals")], qualified)
        if isinstance(node, exp.Year | exp.Month | exp.Day | exp.Hour):
            unit = type(node).__name__.lower()
            if qualified:
                return self._apply_transform(unit, node.this)
            # YEAR(x) of SQL is the calendar year, but Iceberg's transform counts years since 1970. The built-in
            # functions MONTH, DAY and HOUR have no transform: MONTH(x) is 1 to 12, but Iceberg counts months since
            # 1970.
            term = self._apply_transform(unit, node.this) if unit == "year" else None
            return None if term is None else term._replace(origin=_FIRST_YEAR)
        if not isinstance(node, exp.Anonymous):
            return None
        function = str(node.this).lower()
        if function in ("bucket", "truncate"):
            return self._parse_sized_transform(function, node.expressions, qualified)
        unit = _PLURALS.get(function) or (function if qualified and function in UNITS else "")
        return self._apply_transform(unit, node.expressions[0]) if unit and len(node.expressions) == 1 else None

    def _parse_function(self, function: str, node: exp.Expr) -> ComparedTerm | None:
        """Return a function of a column, or None if functions are not allowed or `node` is no usable column.

        Functions select only files. Other rows in these files may not match, so the filter is then not exact.
        """
        term = self._apply_transform(function, node) if self._functions else None
        self.exact &= term is None
        return term

    def _parse_sized_transform(self, function: str, arguments: list[Any], qualified: bool) -> ComparedTerm | None:
        """Return the transform of `bucket(4, id)` (Spark) or `bucket(id, 4)` (Trino), or None for other arguments.

        Args:
            function: `bucket` or `truncate`.
            arguments: The arguments: a column and a width, in any order.
            qualified: Whether the function has a schema, like Spark's `system.truncate(…)`.
        """
        if len(arguments) != 2 or None in arguments:
            return None
        widths = [parse_literal(argument) for argument in arguments]
        for width, other in zip(widths, reversed(arguments), strict=True):
            # The argument with a positive whole number is the width, and the other argument is the column.
            if width is not None and width.kind == "number" and width.text.isdigit() and width.text.strip("0"):
                term = self._apply_transform(canonicalize_transform(f"{function}[{width.text}]"), other)
                if (
                    function == "truncate"
                    and not qualified
                    and term is not None
                    and term.kind not in ("string", "binary")
                ):
                    return None  # In SQL, TRUNCATE of a number removes digits.
                return term
        return None

    def _apply_transform(self, transform: str, node: exp.Expr) -> ComparedTerm | None:
        name = _read_name(node)
        return None if name is None else self.make_term(name, transform)


class _StrictReader(_Reader):
    """A reader that does not use predicates that Trino refuses, or evaluates differently from Iceberg."""

    def fit_literal(self, literal: TypedLiteral, term: ComparedTerm) -> tuple[object, bool]:
        if literal.kind not in _STRICT_KINDS.get(get_base_name(term.kind), ()):
            raise Inconvertible(f"a literal of the kind {literal.kind} is compared with a {term.kind}")
        return super().fit_literal(literal, term)

    def _parse_leaf(self, node: exp.Expr, negated: bool) -> Expression | None:
        """Convert a predicate, or return None if Trino refuses it or may evaluate it differently."""
        if isinstance(node, exp.IsNan | exp.NullSafeEQ | exp.NullSafeNEQ | exp.StartsWith | exp.Null):
            return None
        has_null = any(isinstance(child, exp.Null) for child in node.iter_expressions())
        # `x IS NULL` is used, but not `x IS TRUE`, and no comparison with a null, because the type of the null is
        # unknown.
        if has_null != isinstance(node, exp.Is):
            return None
        if (
            type(node) in _COMPARISON_OPS
            and parse_literal(node.this) is not None
            and parse_literal(node.expression) is not None
        ):
            return None  # There is no column whose type could be checked.
        return super()._parse_leaf(node, negated)

    def _parse_transform(self, node: exp.Expr, *, qualified: bool) -> ComparedTerm | None:
        """Return the year or the day of a column, or None. Other transforms have no function in Trino.

        A cast to DATE is the day. A qualified function, such as Spark's `system.days(…)`, does not exist in Trino.
        """
        if qualified or not (isinstance(node, exp.Year) or type(node) is exp.Cast):
            return None
        return super()._parse_transform(node, qualified=False)


def _compare_literals(op: Op, left: TypedLiteral, right: TypedLiteral) -> Expression | None:
    """Return the result of comparing two literals, such as `1 = 1`.

    A comparison with null on the left is never true, so the result is FALSE. The result is None if the literals have
    different kinds, or a kind whose comparison depends on the engine.
    """
    if left.kind == "null":
        return FALSE
    if left.kind != right.kind or left.kind not in ("number", "text", "boolean"):
        return None
    values = [literal.parse_number() if literal.kind == "number" else literal.text for literal in (left, right)]
    return Always(_LITERAL_COMPARISONS[op](*values))


def _convert_to_double(number: TypedLiteral) -> exp.Expr:
    """Convert a number to a double, by adding an exponent to its text.

    Raises:
        Inconvertible: Engines may round the number to different doubles.
    """
    digits = number.text.strip().lstrip("+-")
    if len(digits.replace(".", "").lstrip("0")) > _EXACT_DIGITS_MAX:
        raise Inconvertible(
            f"{digits[:_DIGITS_SHOWN_MAX]} is compared as a double, because another number "
            "in the predicate is a double; write it with an exponent"
        )
    literal = exp.Literal.number(f"{digits}e0")
    return exp.Neg(this=literal) if "-" in number.text else literal


def _is_plain(node: exp.Expr) -> bool:
    """Return whether a node has only arguments that this module supports."""
    return all(name in _ARGUMENTS for name, value in node.args.items() if value)


def _read_name(node: exp.Expr) -> str | None:
    """Return the full name of a column, such as `a.b.c` for a field inside structs, or None."""
    if isinstance(node, exp.Dot):
        inner = _read_name(node.this)
        field_name = node.expression.name if isinstance(node.expression, exp.Identifier) else None
        return None if inner is None or field_name is None else f"{inner}.{field_name}"
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier):
        return ".".join(part.name for part in node.parts)
    return None
