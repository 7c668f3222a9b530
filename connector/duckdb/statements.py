"""Parses a DuckDB statement: finds the tables that it reads, and translates it for the analysis of Trino's statements.

The analysis (`connector/analysis/`) reads Trino's SQL. In the translated statement, marks replace the names of tables.
A condition is hidden from the analysis if its meaning in DuckDB may be different. A hidden condition prunes no files.
Statements with clauses that Trino does not have are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

from sqlglot import Dialect, TokenType, exp
from sqlglot.errors import ErrorLevel, SqlglotError

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.queries import check_relations
from seamark.connector.duckdb.kinds import (
    NameKinds,
    find_extreme_column,
    find_literal_kind,
    find_projections,
    list_columns,
    replace_node,
    to_constant,
)
from seamark.connector.duckdb.shapes import (
    HIDDEN,
    hide,
    is_same_row_comparison_in_trino,
    is_whole,
    list_results,
    read_listed_elements,
    rewrite_conditions,
    rewrite_qualify_and_unnamed_columns,
    treats_null_as_false,
)
from seamark.connector.plans.splices import Replacement, splice
from seamark.formats.iceberg.expressions.sql_parser import parse_statements

STATEMENT_MAX = 200_000
"""The maximum length of a statement, in characters."""
_DUCKDB = Dialect.get_or_raise("duckdb")
_TRINO = Dialect.get_or_raise("trino")
_UNSUPPORTED_NODES = (exp.Pivot, exp.TableSample, exp.Lateral, exp.Columns, exp.Lambda, exp.Into)
_JOIN_KINDS = ("", "INNER", "CROSS", "OUTER")
_JOIN_ARGS = {"this", "side", "kind", "on", "using"}
_KINDS_WITH_CONSTANT_BOUNDS = frozenset({"integer", "date", "timestamp", "timestamptz"})
"""The kinds of columns that BETWEEN compares with a constant on one side and a column or subquery on the other."""
_ORDERED_KINDS = _KINDS_WITH_CONSTANT_BOUNDS | {"text", "double"}
"""The kinds of columns that `<` compares with columns and subqueries, in addition to decimals of the same type."""
_DATES_AND_TIMESTAMPS = "times"
"""The kind of a comparison of dates with timestamps."""
_ORDERED = (exp.LT, exp.LTE, exp.GT, exp.GTE)
_COMPARISONS = (exp.EQ, exp.NEQ, *_ORDERED, exp.NullSafeEQ, exp.NullSafeNEQ)
_TABLE_ARGS = {"this", "db", "catalog", "alias", "joins", "when"}
_ALIAS = re.compile(r'\s++(?:AS\s++)?+([a-z_]\w*+|"[^"]++")', re.IGNORECASE)
_AT = re.compile(r"\s*+(AT\s*+\(\s*+VERSION\s*+=>\s*+([0-9]{1,19})\s*+\))", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class NamedRelation:
    """The name of a relation in FROM, at the characters [start, end) of the statement."""

    parts: tuple[str, ...]
    start: int
    end: int
    alias_needed: str | None
    """The alias to add after a new name, so that columns can still be qualified by the old name. None if not needed."""
    snapshot_id: int | None = None
    version_span: tuple[int, int] | None = None
    """The characters of `AT (VERSION => …)`, which follows the alias, or None."""


class DuckDBStatement:
    """A parsed query.

    Raises:
        UnsupportedStatement: The statement is not supported.
    """

    def __init__(self, text: str, parameters: Any = None) -> None:
        if len(text) > STATEMENT_MAX:
            raise UnsupportedStatement(f"the statement is longer than {STATEMENT_MAX} characters")
        self.text = text
        self.parameters = parameters
        self._tree = _parse(text)
        _check(self._tree)
        check_relations(self._tree)
        _bind_parameters(text, self._tree, parameters)
        rewrite_qualify_and_unnamed_columns(self._tree)
        relations = list(self._tree.find_all(exp.CTE, exp.Table))
        with_names = {relation.alias.lower() for relation in relations if isinstance(relation, exp.CTE)}
        self._nodes = [
            node
            for node in relations
            if isinstance(node, exp.Table)
            if len(node.parts) > 1 or not isinstance(node.this, exp.Identifier) or node.name.lower() not in with_names
        ]
        self.references = [self._read_reference(node) for node in self._nodes]
        """The relations by the numbers of `mark_name`. A relation without a name, such as a function, is None."""

    def parse_again(self) -> exp.Expr:
        """Return a new tree of the statement in DuckDB's dialect.

        Parameters are replaced by literals where possible.
        """
        tree = _parse(self.text)
        _bind_parameters(self.text, tree, self.parameters)
        return tree

    def to_marked_text(self, tables: Mapping[int, Mapping[str, str]], *, utc: bool) -> str:
        """Return the statement in Trino's SQL. The reference to a table with the number n becomes `mark_name(n)`.

        The text is only analysed and never run. Conditions with another meaning in Trino are hidden, so that they give
        no filter. The tree of the statement is changed.

        Args:
            tables: The columns of the references to tables of the catalog, with their Iceberg types.
            utc: Whether the session's time zone is UTC.

        Raises:
            UnsupportedStatement: Trino's SQL cannot express the statement, or USING may convert the compared values.
        """
        kinds = NameKinds(self._tree, tables.values(), self._find_sure_qualifiers(tables))
        rewrite_conditions(self._tree, kinds)
        for join in self._tree.find_all(exp.Join):
            for name in join.args.get("using") or ():
                if kinds.find_kind(exp.column(name.name)) in (None, "double"):
                    raise UnsupportedStatement(f"USING ({name.name}) may convert the values that it compares")
        for number, node in enumerate(self._nodes):
            alias = node.args.get("alias") or exp.TableAlias(this=exp.to_identifier(node.name or "f", quoted=True))
            mark = exp.Table(this=exp.to_identifier(mark_name(number), quoted=True), alias=alias.copy())
            if joins := node.args.get("joins"):
                mark.set("joins", joins)
            replace_node(node, mark)
        for condition in list(self._tree.find_all(exp.Predicate)):
            _convert_condition(condition, kinds, utc=utc)
        # For NULL and NaN, DuckDB's contains() returns true or false. Trino's contains() returns neither.
        functions_and_columns = list(self._tree.find_all(exp.Contains, exp.ArrayContains, exp.Anonymous, exp.Column))
        for function in functions_and_columns:
            if isinstance(function, exp.Column) or (isinstance(function, exp.Anonymous) and function.name == HIDDEN):
                continue
            for column in list(list_columns(function)):
                _hide(column)
        for leaf in functions_and_columns:
            if isinstance(leaf, exp.Column) and _is_condition(leaf) and kinds.find_kind(leaf) != "boolean":
                _hide(leaf)
        try:
            return str(_TRINO.generate(self._tree, copy=False, unsupported_level=ErrorLevel.IGNORE))
        except (SqlglotError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
            raise UnsupportedStatement("the statement has no counterpart in Trino's SQL") from error

    def _find_sure_qualifiers(self, tables: Mapping[int, Mapping[str, str]]) -> frozenset[str] | None:
        """Return the qualifiers that only refer to tables with known columns.

        The result is None if the columns of all tables are known. A qualifier is left out if it is also the name of a
        table with unknown columns, or of a subquery, because its columns may have other kinds.
        """
        if len(tables) == len(self._nodes):
            return None
        unknown_qualifiers = {
            node.alias_or_name.lower() for number, node in enumerate(self._nodes) if number not in tables
        }
        unknown_qualifiers |= {
            node.alias.lower() for node in self._tree.find_all(exp.CTE, exp.Subquery, exp.Unnest, exp.Values)
        }
        return frozenset(self._nodes[number].alias_or_name.lower() for number in tables) - unknown_qualifiers

    def _read_reference(self, node: exp.Table) -> NamedRelation | None:
        """Return the name of a relation and its position in the text, or None if its name cannot be replaced.

        sqlglot's positions are checked: the text at these positions must be this name, and the version clause must
        follow the name or its alias.
        """
        parts = node.parts
        arguments = {name for name, value in node.args.items() if value}
        if not all(isinstance(part, exp.Identifier) for part in parts) or not arguments <= _TABLE_ARGS:
            return None
        start, last_character = parts[0].meta.get("start"), parts[-1].meta.get("end")
        if start is None or last_character is None:
            return None
        names = tuple(part.name for part in parts)
        reference_text = self.text[start : last_character + 1]
        try:
            is_same_name = tuple(part.name for part in exp.to_table(reference_text, dialect="duckdb").parts) == names
        except (SqlglotError, ValueError):
            is_same_name = False
        if not is_same_name:
            return None
        alias, end = None, last_character + 1
        if node.args.get("alias") is None:
            alias = ' AS "' + names[-1].replace('"', '""') + '"'
        version_clause = node.args.get("when")
        if version_clause is None:
            return NamedRelation(names, start, end, alias)
        alias_at = _ALIAS.match(self.text, end) if alias is None else None
        clause = _AT.match(self.text, end if alias_at is None else alias_at.end())
        if (alias_at is None) != (alias is not None) or clause is None or clause[2] != _read_version(version_clause):
            return None
        return NamedRelation(names, start, end, alias, int(clause[2]), clause.span(1))


def mark_name(number: int) -> str:
    """Return the name that replaces the name of a table in the translated statement."""
    return f"seamark_{number}"


def _parse(text: str) -> exp.Expr:
    try:
        trees = parse_statements(_DUCKDB, text)
    except (SqlglotError, RecursionError):
        raise UnsupportedStatement("the syntax is not supported") from None
    if len(trees) != 1 or not isinstance(trees[0], exp.Select | exp.SetOperation | exp.Subquery):
        raise UnsupportedStatement("the statement is not a single query")
    return trees[0]


def _check(tree: exp.Expr) -> None:
    """Check that Trino's SQL has all constructs of the statement, with the same meaning.

    Raises:
        UnsupportedStatement: Trino's SQL does not have a construct, or the construct has a different meaning there.
    """
    nodes = list(tree.walk())
    names = {node.name for node in nodes if isinstance(node, exp.Identifier) and not node.name.isascii()}
    if len({name.lower() for name in names}) < len({_lower_ascii(name) for name in names}):
        raise UnsupportedStatement("the statement has names that differ in the case of a letter beyond ASCII")
    relations = {node.name.lower() for node in nodes if isinstance(node, exp.Table | exp.TableAlias)}
    for node in nodes:
        match node:
            case exp.Select() if node.args.get("distinct") and node.args["distinct"].args.get("on"):
                raise UnsupportedStatement("the statement contains DISTINCT ON")
            case exp.Group() if any(value for name, value in node.args.items() if name not in ("expressions", "all")):
                raise UnsupportedStatement("the statement groups by expressions that are not columns")
            case exp.SetOperation() if node.args.get("by_name") or not all(
                map(_is_named, (node.this, node.expression))
            ):
                raise UnsupportedStatement("the statement contains a set operation over columns without names")
            case exp.Join() if not _is_plain_join(node):
                raise UnsupportedStatement("the statement contains a kind of join that Trino does not support")
            case exp.Star() if any(node.args.values()):
                raise UnsupportedStatement("the statement excludes columns from *")
            case exp.Table() if node.args.get("version"):
                raise UnsupportedStatement("the statement reads an earlier snapshot")
            case exp.Table() if (version_clause := node.args.get("when")) is not None and _read_version(
                version_clause
            ) is None:
                raise UnsupportedStatement(
                    "the statement selects a snapshot by a clause other than VERSION with a number"
                )
            case exp.Column() if node.args.get("db") and not _is_field(node, relations):
                raise UnsupportedStatement("a column is qualified by its schema")
            case exp.Unnest() | exp.Explode() if not isinstance(node.parent, exp.From | exp.Join):
                query = node.find_ancestor(exp.In)
                if query is None or read_listed_elements(query.args.get("query")) is None:
                    raise UnsupportedStatement("unnest() is among the columns")
        if isinstance(node, _UNSUPPORTED_NODES):
            raise UnsupportedStatement(f"{type(node).__name__} is not supported")


def _is_named(side: exp.Expr) -> bool:
    """Return whether the statement names all columns of one side of a set operation.

    `*` of a table does not name its columns.
    """
    if not isinstance(side, exp.Select):
        return True
    if not any(isinstance(expression, exp.Star) or expression.is_star for expression in side.expressions):
        return True
    columns = find_projections(side)
    return bool(columns) and not any(column.is_star for column in columns)


def _is_field(column: exp.Column, relations: AbstractSet[str]) -> bool:
    """Return whether `a.b.c` or `a.b.c.d` can only be a field of the struct b of the relation a.

    This is the case if a is a relation, and the names between a and the last name are not.
    """
    relation, *inner_names = [part.name.lower() for part in column.parts[:-1]]
    return relation in relations and relations.isdisjoint(inner_names)


def _read_version(version_clause: exp.Expr) -> str | None:
    """Return the snapshot id in `AT (VERSION => …)`, or None for another clause."""
    number = version_clause.args.get("expression")
    if str(version_clause.this).upper() != "AT" or str(version_clause.args.get("kind")).upper() != "VERSION":
        return None
    return str(number.this) if isinstance(number, exp.Literal) and not number.is_string else None


def _lower_ascii(name: str) -> str:
    """Return a name in lower case as DuckDB compares names. É and é are different letters in DuckDB."""
    return "".join(character.lower() if character.isascii() else character for character in name)


def _is_plain_join(node: exp.Join) -> bool:
    arguments = {name for name, value in node.args.items() if value}
    return arguments <= _JOIN_ARGS and (node.kind or "").upper() in _JOIN_KINDS


def _bind_parameters(text: str, tree: exp.Expr, parameters: Any) -> None:
    """Replace the parameters `?`, `$1` and `$name` in the tree by their values.

    A parameter is replaced only if its value can be written as a plain literal.
    """
    if parameters is None or isinstance(parameters, str) or not isinstance(parameters, Mapping | Sequence):
        return
    # Nodes are not in the order of the text. Therefore the text is parsed again with numbers instead of `?`, to
    # find the number of each parameter.
    numbered_tree, placeholder_types = _parse(_number_placeholders(text)), (exp.Placeholder, exp.Parameter)
    for node, numbered_node in zip(
        list(tree.find_all(*placeholder_types)), list(numbered_tree.find_all(*placeholder_types)), strict=True
    ):
        name = numbered_node.name
        try:
            value = parameters[name] if isinstance(parameters, Mapping) else parameters[int(name) - 1]
        except (LookupError, ValueError):
            continue
        literal = _to_literal(value)
        if literal is not None:
            replace_node(node, literal)


def _number_placeholders(text: str) -> str:
    placeholders = [token for token in _DUCKDB.tokenize(text) if token.token_type is TokenType.PLACEHOLDER]
    return splice(
        text,
        (
            Replacement(placeholder.start, placeholder.end + 1, f"${number}")
            for number, placeholder in enumerate(placeholders, 1)
        ),
    )


def _to_literal(value: Any) -> exp.Expr | None:
    match value:
        case bool():
            return exp.Boolean(this=value)
        case int() | Decimal():
            number = exp.Literal.number(format(abs(value), "f" if isinstance(value, Decimal) else "d"))
            return exp.Neg(this=number) if value < 0 else number
        case str():
            return exp.Literal.string(value)
        case datetime() if value.tzinfo is None:
            return exp.cast(exp.Literal.string(value.isoformat(" ")), exp.DataType.Type.TIMESTAMP)
        case date() if not isinstance(value, datetime):
            return exp.cast(exp.Literal.string(value.isoformat()), exp.DataType.Type.DATE)
    return None


def _convert_condition(node: exp.Expr, kinds: NameKinds, *, utc: bool) -> None:
    """Rewrite a condition in Trino's SQL if it has the same meaning there. Otherwise hide its columns.

    The analysis reads no condition on hidden columns.
    """
    replacements = _find_replacements(node, kinds, utc)
    if replacements is None:
        for column in list(list_columns(node)):
            _hide(column)
        return
    for old, new in replacements:
        replace_node(old, new)


def _find_replacements(node: exp.Expr, kinds: NameKinds, utc: bool) -> list[tuple[exp.Expr, exp.Expr]] | None:
    """Return the replacements in a condition, or None if its meaning in Trino may be different."""

    def replace_constants(kind: str | None, values: Sequence[exp.Expr]) -> list[tuple[exp.Expr, exp.Expr]] | None:
        if kind is None or (kind == "double" and not _is_false_for_nan(node)):
            return None
        new = [(value, to_constant(value, kind, utc=utc)) for value in values]
        return (
            None
            if any(constant is None for _, constant in new)
            else [(old, constant) for old, constant in new if constant is not None]
        )

    def replace_in_comparison(term: exp.Expr, values: Sequence[exp.Expr]) -> list[tuple[exp.Expr, exp.Expr]] | None:
        kind, constants_in_term = _find_term_kind(term, kinds)
        return replace_constants(kind, [*constants_in_term, *values])

    match node:
        case exp.Is() if isinstance(node.expression, exp.Null):
            return [] if type(node.this) is exp.Column else None
        case exp.Between() if not node.args.get("symmetric"):
            bounds = [node.args["low"], node.args["high"]]
            compared_bounds = [bound for bound in bounds if isinstance(bound, exp.Column | exp.Subquery)]
            if compared_bounds:
                kind = _find_ordered_kind([node.this, *compared_bounds], kinds)
                constants = [bound for bound in bounds if not isinstance(bound, exp.Column | exp.Subquery)]
                is_converted = bool(constants) and kind not in _KINDS_WITH_CONSTANT_BOUNDS
                if kind is None or is_converted:
                    return None
                return replace_constants(kind, constants) if constants else []
            return replace_in_comparison(node.this, [node.args["low"], node.args["high"]])
        case exp.In() | exp.EQ() if isinstance(node.this, exp.Tuple):
            return [] if is_same_row_comparison_in_trino(node, kinds) else None
        case exp.EQ() if any(isinstance(side, exp.Subquery) for side in (node.this, node.expression)):
            sides = [
                _find_only_column(side) if isinstance(side, exp.Subquery) else side
                for side in (node.this, node.expression)
            ]
            left_kind, right_kind = map(kinds.find_kind, sides)
            return [] if left_kind not in (None, "double") and left_kind == right_kind else None
        case exp.Expr() if type(node) in _ORDERED and any(
            isinstance(side, exp.Subquery | exp.Any) for side in (node.this, node.expression)
        ):
            return None if _find_ordered_kind([node.this, node.expression], kinds) is None else []
        case exp.In() if node.args.get("query") is not None:
            left_kind, right_kind = kinds.find_kind(node.this), kinds.find_kind(_find_only_column(node.args["query"]))
            return [] if left_kind not in (None, "double") and left_kind == right_kind else None
        case exp.In() if any(isinstance(expression, exp.Null) for expression in node.expressions):
            # `IN [1, NULL]` has the same tree as `IN (1, NULL)`, but is false for rows for which the latter predicate
            # is null.
            return None
        case exp.In() if node.expressions and not (node.args.get("field") or node.args.get("unnest")):
            return replace_in_comparison(node.this, node.expressions)
        case exp.Like() | exp.ILike() if type(node) in (exp.Like, exp.ILike):
            return _replace_pattern(node, kinds)
        case exp.Exists():
            return []
    if type(node) not in _COMPARISONS:
        return None
    left, right = node.this, node.expression
    if type(left) is exp.Column and type(right) is exp.Column:
        left_kind, right_kind = kinds.find_kind(left), kinds.find_kind(right)
        is_equal = left_kind not in (None, "double") and left_kind == right_kind
        is_ordered = type(node) in _ORDERED and _find_ordered_kind([left, right], kinds) is not None
        return [] if is_equal or is_ordered else None
    if _is_period(left, right, kinds) or _is_period(right, left, kinds):
        return []
    replacements = replace_in_comparison(left, [right])
    return replace_in_comparison(right, [left]) if replacements is None else replacements


def _find_ordered_kind(operands: Sequence[exp.Expr], kinds: NameKinds) -> str | None:
    """Return the kind of columns and subqueries that DuckDB orders as Trino does, or None for other operands.

    The kind is one of `_ORDERED_KINDS`. For dates that are compared with timestamps it is `_DATES_AND_TIMESTAMPS`,
    because both engines convert the dates to timestamps.
    """
    operand_kinds: set[str | None] = set()
    for operand in operands:
        inner = operand.this if isinstance(operand, exp.Any) else operand
        operand_kinds.add(kinds.find_kind(_find_only_column(inner) if isinstance(inner, exp.Subquery) else inner))
    if operand_kinds == {"date", "timestamp"}:
        return _DATES_AND_TIMESTAMPS
    kind = operand_kinds.pop() if len(operand_kinds) == 1 else None
    return kind if kind is not None and (kind in _ORDERED_KINDS or kind.startswith("decimal(")) else None


def _replace_pattern(node: exp.Expr, kinds: NameKinds) -> list[tuple[exp.Expr, exp.Expr]] | None:
    """Return the replacements in a LIKE condition on a column, or on its lower or upper case.

    Trino has no `ILIKE`, so it becomes a comparison in lower case.

    Returns:
        The replacements. The list is empty if Trino reads the condition without changes. The result is None if the
        condition cannot be translated, for example an ILIKE with other characters than ASCII.
    """
    side, pattern = node.this.unnest(), node.expression
    column = side.this if isinstance(side, exp.Lower | exp.Upper) else side
    if kinds.find_kind(column) != "text" or not isinstance(pattern, exp.Literal) or not pattern.is_string:
        return None
    if type(node) is exp.Like:
        return []
    if type(side) is not exp.Column or not str(pattern.this).isascii():
        return None
    lower_pattern = exp.Literal.string(str(pattern.this).lower())
    negate = node.args.get("negate")  # `negate` is set for NOT ILIKE.
    return [(node, exp.Like(this=exp.Lower(this=side.copy()), expression=lower_pattern, negate=negate))]


def _is_false_for_nan(node: exp.Expr) -> bool:
    """Return whether the comparison of a column with numbers is false in DuckDB if the column is NaN.

    The result is also False if the comparison is negated or is inside another expression.
    """
    match node:
        case exp.EQ() | exp.In() | exp.Between():
            is_false_for_nan = True
        case exp.LT() | exp.LTE():
            is_false_for_nan = isinstance(node.this, exp.Column)
        case exp.GT() | exp.GTE():
            is_false_for_nan = isinstance(node.expression, exp.Column)
        case _:
            is_false_for_nan = False
    return is_false_for_nan and treats_null_as_false(node)


def _find_term_kind(node: exp.Expr | None, kinds: NameKinds) -> tuple[str | None, Sequence[exp.Expr]]:
    """Return the kind of a column or function, and the constants in it, such as the defaults of `coalesce`.

    Functions must have the same values in Trino. For any other function, the kind is None. COALESCE and NULLIF of
    doubles are excluded, because both engines compare NaN differently.
    """
    while isinstance(node, exp.Paren):
        node = node.this
    is_of_time = node is not None and kinds.find_kind(node.this) in ("date", "timestamp")
    match node:
        case exp.Cast() if type(node) is exp.Cast and node.to.this is exp.DataType.Type.DATE:
            return "date" if is_of_time else None, ()
        case exp.Year() | exp.Month():
            return "integer" if is_of_time else None, ()
        case exp.Extract() if node.name.upper() in ("YEAR", "MONTH"):
            return "integer" if kinds.find_kind(node.expression) in ("date", "timestamp") else None, ()
        case exp.TimestampTrunc() | exp.DateTrunc():
            return kinds.find_kind(node.this) if is_of_time else None, ()
        case exp.TimeToStr():
            return "text" if is_of_time else None, ()
        case exp.Substring() | exp.Left() | exp.Lower() | exp.Upper():
            return "text" if kinds.find_kind(node.this) == "text" else None, ()
        case exp.Coalesce():
            kind = kinds.find_kind(node.this)
            return (None if kind == "double" else kind), node.expressions
        case exp.Case() | exp.If():
            return _find_result_kind(list_results(node), kinds)
        case exp.Nullif():
            kind = kinds.find_kind(node.this)
            return (None if kind == "double" else kind), [node.expression]
        case exp.Div() if node.args.get("typed"):  # A typed division has integer operands.
            return "integer", ()
        case exp.Add() | exp.Sub() | exp.Mul() if kinds.find_kind(node.this) == "integer" and is_whole(node.expression):
            return "integer", ()
        case exp.Add() | exp.Sub() if is_of_time and isinstance(node.expression, exp.Interval):
            return kinds.find_kind(node.this), ()
    return kinds.find_kind(node), ()


def _is_period(node: exp.Expr, column: exp.Expr, kinds: NameKinds) -> bool:
    """Return whether an equality compares a day, month or year of a column with another column.

    The result is False for types with which Trino may compare the values in another way.
    """
    if type(column.unnest()) is not exp.Column or not isinstance(node.parent, exp.EQ):
        return False
    kind, other = _find_term_kind(node, kinds)[0], kinds.find_kind(column.unnest())
    match node.unnest():
        case exp.Cast() | exp.Year() | exp.Extract():
            return kind is not None and kind == other
        case exp.TimestampTrunc() | exp.DateTrunc():
            return kind is not None and other in ("date", "timestamp")
    return False


def _find_result_kind(results: Sequence[exp.Expr], kinds: NameKinds) -> tuple[str | None, Sequence[exp.Expr]]:
    """Return the kind of the results of CASE, and the constants among the results.

    The columns determine the kind, because constants are converted to it. If there are no columns, the constants do.
    """
    columns = [result for result in results if type(result) is exp.Column]
    constants = [result for result in results if type(result) is not exp.Column]
    kinds_of_results = {kinds.find_kind(column) for column in columns} or {find_literal_kind(constants)}
    kind = kinds_of_results.pop() if len(kinds_of_results) == 1 else None
    # A double may be NaN, which DuckDB and the statistics of files order differently.
    return (None if kind == "double" else kind), constants


def _find_only_column(query: exp.Expr) -> exp.Expr | None:
    while isinstance(query, exp.Subquery):
        query = query.this
    if not isinstance(query, exp.Select) or len(query.expressions) != 1:
        return None
    column: exp.Expr = query.expressions[0].unalias().unnest()
    return find_extreme_column(column)


def _is_condition(column: exp.Column) -> bool:
    """Return whether the column is a condition, or a result of a CASE that is a condition."""
    node: exp.Expr = column
    while True:
        parent = node.parent
        if isinstance(parent, exp.If | exp.Join) and any(parent.args.get(name) is node for name in ("this", "on")):
            return True
        if isinstance(parent, exp.Case) and parent.this is node:
            return False
        if not isinstance(parent, exp.Paren | exp.If | exp.Case):
            return isinstance(parent, exp.Not | exp.And | exp.Or | exp.Where | exp.Having | exp.Filter)
        node = parent


def _hide(column: exp.Expr) -> None:
    hidden_column = hide([])
    replace_node(column, hidden_column)
    hidden_column.set("expressions", [column])
