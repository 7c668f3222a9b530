"""Translates a query of the dialect to DuckDB's SQL. The references to tables become the relations `t0`, `t1` ….

The output columns have the names `c0`, `c1` …. The names of the result's columns are returned separately. In ORDER BY,
nulls are last unless the statement has NULLS FIRST.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.calls.nested import translate_unnest
from seamark.connector.sql.calls.windows import translate_sort_key
from seamark.connector.sql.expressions import Expressions
from seamark.connector.sql.functions import translate_function
from seamark.connector.sql.scopes import (
    NameScope,
    SqlValue,
    StoredTable,
    VisibleColumn,
    WithQuery,
    describe,
    use_column,
)
from seamark.connector.sql.types import (
    UNKNOWN,
    SqlType,
    UnsupportedInDuckDB,
    find_common_type,
    name_duckdb_type,
)
from seamark.connector.sql.values import cast, check_args

Columns = Sequence[tuple[str, SqlType]]
_OUTER_CLAUSES = ("with_", "order", "limit", "offset")
_SELECT = frozenset(("expressions", "from_", "joins", "where", "group", "having", "distinct", *_OUTER_CLAUSES))
_SET = frozenset(("this", "expression", "distinct", *_OUTER_CLAUSES))
_SUBQUERY = frozenset(("this", "alias", *_OUTER_CLAUSES))
_TABLE = frozenset(("this", "db", "catalog", "alias", "version"))
_JOIN = frozenset(("this", "side", "kind", "on", "using"))
_WORDS: dict[type[exp.Expr], str] = {exp.Union: "UNION", exp.Except: "EXCEPT", exp.Intersect: "INTERSECT"}
_ROWS_MAX = 1 << 62
_GROUPING_SETS_MAX = 2048
"""The maximum number of grouping sets of a query, as in Trino."""
WITHOUT_PUSHDOWN = f"(SELECT * FROM {{}} LIMIT {_ROWS_MAX})"  # noqa: S608
"""A subquery with a LIMIT, below which DuckDB pushes no filters.

The reader has already applied the conditions. Some filters, for example on decimals, cannot be pushed into an Arrow
scan. If DuckDB 1.5.5 tries to push such a filter down, it confuses the columns above the scan.
"""
_NO_QUERIES: Mapping[str, WithQuery] = {}
TableColumns = Callable[[exp.Table], Mapping[str, SqlType]]
"""A function that returns the types of a stored table's columns by name, for a reference to the table.

Raises:
    InvalidRequest: The table does not exist.
"""


@dataclass(frozen=True)
class DuckDBQuery:
    """A query in DuckDB's SQL, with its result's columns and its references to tables."""

    text: str
    columns: Columns
    """The names and types of the result's columns."""
    tables: tuple[StoredTable, ...]


def translate(tree: exp.Expr, find_columns: TableColumns, now: datetime) -> DuckDBQuery:
    """Translate a query.

    Raises:
        InvalidRequest: The query is invalid.
        UnsupportedInDuckDB: The query is not translated.
    """
    translation = Translation(find_columns, now)
    try:
        text, columns = translation.translate_query(tree, NameScope((), _NO_QUERIES))
    except RecursionError:
        raise InvalidRequest("The statement is nested too deeply") from None
    return DuckDBQuery(text, columns, tuple(translation.tables))


class Translation:
    """The translation of one statement.

    Attributes:
        tables: The references to stored tables that have been translated so far.
    """

    def __init__(self, find_columns: TableColumns, now: datetime) -> None:
        self._find_columns = find_columns
        self._numbers = count()
        self.expressions = Expressions(self.translate_query, translate_function, now)
        self.tables: list[StoredTable] = []

    def translate_query(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        """Translate a query to its text and its columns. The columns have the names c0, c1 … in the text.

        Args:
            node: The query.
            outer: The scope of the enclosing query, with the names in WITH.
        """
        match node:
            case exp.Select():
                allowed_arguments, body = _SELECT, self._translate_select
            case exp.Union() | exp.Except() | exp.Intersect():
                allowed_arguments, body = _SET, self._translate_set_operation
            case exp.Subquery():
                allowed_arguments, body = _SUBQUERY, self._translate_subquery
            case exp.Values():
                return self._translate_values(node, outer)
            case _:
                raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
        check_args(node, allowed_arguments)
        clause, texts = node.args.get("with_"), []
        if clause is not None:
            check_args(clause, frozenset(("expressions",)))
            for definition in clause.expressions:
                text, outer = self._translate_with_query(definition, outer)
                texts.append(text)
        text, columns = body(node, outer)
        return (f"WITH {', '.join(texts)} {text}" if texts else text), columns

    def _translate_with_query(self, node: exp.Expr, outer: NameScope) -> tuple[str, NameScope]:
        """Translate a query in WITH. Return its text, and a scope in which its name is visible."""
        check_args(node, frozenset(("this", "alias")))
        text, columns = self.translate_query(node.this, outer)
        columns = _rename_columns(columns, node.args["alias"], node)
        relation = f"w{next(self._numbers)}"
        visible = {**outer.named, node.alias.lower(): WithQuery(relation, tuple(columns))}
        return f"{relation} AS ({text})", replace(outer, named=visible)

    # Query bodies

    def _translate_select(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        source, fields = self._translate_from(node, outer)
        scope, expressions = NameScope(fields, outer.named, outer), self.expressions
        outputs = self._translate_outputs(node, scope)
        distinct = node.args.get("distinct")
        if distinct is not None and distinct.args.get("on"):
            raise UnsupportedInDuckDB("DISTINCT ON is not translated")
        if distinct is not None:
            for name, value in outputs:
                if not value.type.is_comparable:
                    raise UnsupportedInDuckDB(f"DISTINCT of {name[:100]!r} is not translated for the type {value.type}")
        texts = ["SELECT DISTINCT" if distinct is not None else "SELECT"]
        texts.append(", ".join(f"{value.sql} AS c{number}" for number, (_, value) in enumerate(outputs)))
        texts += [f"FROM {source}"] if source else []
        if (where_node := node.args.get("where")) is not None:
            texts.append(f"WHERE {expressions.translate_condition(where_node.this, scope)}")
        if (group := node.args.get("group")) is not None:
            texts.append(f"GROUP BY {self._translate_group(group, outputs, scope)}")
        if (having_node := node.args.get("having")) is not None:
            texts.append(f"HAVING {expressions.translate_condition(having_node.this, scope)}")
        if (order := node.args.get("order")) is not None:
            keys = self._translate_order_keys(order, outputs, scope, distinct=distinct is not None)
            texts.append(f"ORDER BY {', '.join(keys)}")
        return " ".join([*texts, *_translate_limits(node)]), [(name, value.type) for name, value in outputs]

    def _translate_outputs(self, node: exp.Expr, scope: NameScope) -> list[tuple[str, SqlValue]]:
        outputs: list[tuple[str, SqlValue]] = []
        for item in node.expressions:
            star = _find_star_qualifiers(item)
            if star is not None:
                for column in scope.expand_star(star):
                    outputs.append((column.name or f"_col{len(outputs)}", use_column(column)))
                continue
            alias = item if isinstance(item, exp.Alias) else None
            value = self.expressions.translate_value(item.this if alias is not None else item, scope)
            name = alias.alias if alias is not None else item.name if isinstance(item, exp.Column) else None
            outputs.append((name or f"_col{len(outputs)}", _to_selectable(value)))
        return outputs

    def _translate_group(self, node: exp.Expr, outputs: Sequence[tuple[str, SqlValue]], scope: NameScope) -> str:
        check_args(node, frozenset(("expressions",)))
        elements = []
        sets = 1
        for element in node.expressions:
            if isinstance(element, exp.Rollup | exp.Cube | exp.GroupingSets):
                text, count_of_sets = self._translate_grouping_sets(element, scope)
                sets *= count_of_sets
                if sets > _GROUPING_SETS_MAX:
                    raise UnsupportedInDuckDB(f"GROUP BY has more than {_GROUPING_SETS_MAX:,} grouping sets")
                elements.append(text)
                continue
            if not isinstance(element, exp.Column | exp.Literal | exp.Func | exp.Binary | exp.Paren | exp.Cast):
                raise UnsupportedInDuckDB(f"GROUP BY {describe(element)} is not translated")
            number = _parse_ordinal(element)
            if number is None:
                value = self.expressions.translate_value(element, scope)
            else:
                value = _find_output(outputs, number, "GROUP BY")
                self.expressions.count_text(value.sql, element)
            elements.append(_check_grouped(value, element).sql)
        return ", ".join(elements)

    def _translate_grouping_sets(self, node: exp.Expr, scope: NameScope) -> tuple[str, int]:
        """Translate ROLLUP, CUBE or GROUPING SETS of columns. Return the text, and the number of grouping sets.

        ROLLUP of n columns has n + 1 grouping sets, and CUBE has 2 to the power of n.
        """
        check_args(node, frozenset(("expressions",)))
        texts = []
        for element in node.expressions:
            columns = element.expressions if isinstance(element, exp.Tuple) else [element.unnest()]
            for column in columns:
                if not isinstance(column, exp.Column):
                    raise UnsupportedInDuckDB(f"{describe(node)}: {describe(column)} is not a column")
            values = [_check_grouped(self.expressions.translate_value(column, scope), column) for column in columns]
            texts.append(f"({', '.join(value.sql for value in values)})")
        match node:
            case exp.Rollup():
                return f"ROLLUP ({', '.join(texts)})", len(texts) + 1
            case exp.Cube():
                return f"CUBE ({', '.join(texts)})", 1 << len(texts)
        return f"GROUPING SETS ({', '.join(texts)})", len(texts)

    def _translate_order_keys(
        self,
        order: exp.Expr,
        outputs: Sequence[tuple[str, SqlValue]],
        scope: NameScope | None,
        *,
        distinct: bool = False,
    ) -> list[str]:
        """Return the keys of ORDER BY. If `scope` is None, only the outputs are visible in the keys."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for number, (name, _) in enumerate(outputs, 1):
            numbers[name.lower()].append(number)
        # A name of SELECT takes precedence over a column of FROM, also inside expressions.
        output_scope = None
        if scope is not None:
            fields = tuple(VisibleColumn(name.lower(), (), value) for name, value in outputs)
            output_scope = NameScope(fields, scope.named, scope)
        return [
            self._translate_order_key(key, outputs, numbers, output_scope, distinct=distinct)
            for key in order.expressions
        ]

    def _translate_order_key(
        self,
        node: exp.Expr,
        outputs: Sequence[tuple[str, SqlValue]],
        numbers: Mapping[str, Sequence[int]],
        scope: NameScope | None,
        *,
        distinct: bool,
    ) -> str:
        """Return a key of ORDER BY.

        Args:
            node: The key in the statement.
            outputs: The names and values of SELECT.
            numbers: The numbers of the outputs, by name in lower case.
            scope: The scope of expressions that are not outputs, or None if only outputs are visible.
            distinct: Whether the query is SELECT DISTINCT.
        """
        key, number = node.this, _parse_ordinal(node.this)
        if number is not None:
            value = _find_output(outputs, number, "ORDER BY")
            return translate_sort_key(SqlValue(str(number), value.type), node)
        if isinstance(key, exp.Column) and len(key.parts) == 1:
            output_numbers = numbers.get(key.name.lower(), ())
            if len(output_numbers) > 1 and len({outputs[number - 1][1].sql for number in output_numbers}) > 1:
                raise InvalidRequest(f"ORDER BY {describe(key)} is ambiguous")
            if output_numbers:
                return translate_sort_key(
                    SqlValue(str(output_numbers[0]), outputs[output_numbers[0] - 1][1].type), node
                )
        if scope is None:
            raise UnsupportedInDuckDB(
                f"ORDER BY {describe(key)}: after a set operation, only its columns are translated"
            )
        value = self.expressions.translate_value(key, scope)
        if distinct:
            equal_outputs = [number for number, (_, output) in enumerate(outputs, 1) if output.sql == value.sql]
            if not equal_outputs:
                raise InvalidRequest(f"ORDER BY {describe(key)} must be in SELECT DISTINCT")
            return translate_sort_key(SqlValue(str(equal_outputs[0]), value.type), node)
        return translate_sort_key(value, node)

    def _translate_set_operation(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        """Translate UNION, INTERSECT or EXCEPT to its text and its columns.

        Raises:
            InvalidRequest: The sides have different numbers of columns, or columns whose types cannot be combined.
            UnsupportedInDuckDB: The operation compares values of a type that is not translated.
        """
        word = _WORDS[type(node)] + ("" if node.args.get("distinct") else " ALL")
        (left, left_columns), (right, right_columns) = (
            self.translate_query(node.args[side], outer) for side in ("this", "expression")
        )
        if len(left_columns) != len(right_columns):
            raise InvalidRequest(
                f"{word} combines queries with {len(left_columns)} and {len(right_columns)} columns; they must have "
                "the same number"
            )
        columns = []
        for (name, left_type), (_, right_type) in zip(left_columns, right_columns, strict=True):
            kind = find_common_type(left_type, right_type)
            if kind is None:
                raise InvalidRequest(
                    f"{word}: the column {name[:100]!r} has the types {left_type} and {right_type}; use CAST"
                )
            if not kind.is_comparable and word != "UNION ALL":
                raise UnsupportedInDuckDB(f"{word} of the type {kind} is not translated")
            columns.append((name, kind))
        texts = [
            f"({_convert_columns(text, query_columns, columns)})"
            for text, query_columns in ((left, left_columns), (right, right_columns))
        ]
        text = f" {word} ".join(texts)
        if (order := node.args.get("order")) is not None:
            outputs = [(name, SqlValue("", kind)) for name, kind in columns]
            keys = self._translate_order_keys(order, outputs, None)
            text += f" ORDER BY {', '.join(keys)}"
        return " ".join([text, *_translate_limits(node)]), columns

    def _translate_subquery(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        """Translate a query in parentheses to its text and its columns.

        The parentheses may be followed by ORDER BY, LIMIT and OFFSET.
        """
        text, columns = self.translate_query(node.this, outer)
        if any(node.args.get(name) for name in ("order", "limit", "offset")):
            texts = [f"SELECT * FROM ({text}) r{next(self._numbers)}"]  # noqa: S608
            if (order := node.args.get("order")) is not None:
                outputs = [(name, SqlValue("", kind)) for name, kind in columns]
                keys = self._translate_order_keys(order, outputs, None)
                texts.append(f"ORDER BY {', '.join(keys)}")
            text = " ".join([*texts, *_translate_limits(node)])
        return text, columns

    def _translate_values(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        check_args(node, frozenset(("expressions", "alias")))
        rows = [
            expression.expressions if isinstance(expression, exp.Tuple) else [expression]
            for expression in node.expressions
        ]
        values = [self.expressions.translate_values(row, outer) for row in rows]
        widths = {len(row) for row in values}
        if len(widths) != 1:
            raise InvalidRequest(
                f"The rows of VALUES have {min(widths)} to {max(widths)} columns; give each row the same number"
            )
        columns: list[tuple[str, SqlType]] = []
        for number, column in enumerate(zip(*values, strict=True)):
            kind = UNKNOWN
            for value in column:
                common = find_common_type(kind, value.type)
                if common is None:
                    raise InvalidRequest(
                        f"Column {number + 1} of VALUES has the types {kind} and {value.type}; use CAST"
                    )
                kind = common
            columns.append((f"_col{number}", kind))
        texts = []
        for row in values:
            cells = (
                f"{_to_selectable(cast(value, kind)).sql} AS c{number}"
                for number, (value, (_, kind)) in enumerate(zip(row, columns, strict=True))
            )
            texts.append(f"SELECT {', '.join(cells)}")
        return " UNION ALL ".join(f"({text})" for text in texts), columns

    # FROM

    def _translate_from(self, node: exp.Expr, outer: NameScope) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate FROM. Return its text and its visible columns, or an empty text if the query has no FROM."""
        clause = node.args.get("from_")
        if clause is None:
            return "", ()
        parts = [self._translate_relation(clause.this, outer)]
        for join in node.args.get("joins") or ():
            if any(join.args.get(name) for name in ("side", "kind", "on", "using", "method")):
                parts.append(self._translate_join(*parts.pop(), join, outer))
            else:
                # A comma begins a new part of FROM. JOIN binds more tightly than a comma, so an outer join is within
                # one part. Only an UNNEST uses columns of other parts. It is not translated beside an outer join.
                check_args(join, _JOIN)
                if isinstance(join.this, exp.Unnest):
                    if any(other.args.get("side") for other in node.args["joins"]):
                        raise UnsupportedInDuckDB(f"FROM {describe(join.this)} beside an outer join is not translated")
                    earlier_fields = tuple(field for _, fields in parts for field in fields)
                    parts.append(self._translate_unnest(join.this, NameScope(earlier_fields, outer.named, outer)))
                    continue
                parts.append(self._translate_relation(join.this, outer))
        text = " CROSS JOIN ".join(text for text, _ in parts)
        return text, tuple(field for _, fields in parts for field in fields)

    def _translate_join(
        self, text: str, fields: tuple[VisibleColumn, ...], node: exp.Expr, outer: NameScope
    ) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate one join with its condition, and return its text and its visible columns.

        Args:
            text: The left side of the join, in DuckDB's SQL.
            fields: The visible columns of the left side.
            node: The join.
            outer: The scope of the enclosing query.
        """
        check_args(node, _JOIN)
        side, kind = node.text("side").upper(), node.text("kind").upper()
        if kind not in ("", "INNER", "CROSS", "OUTER") or side not in ("", "LEFT", "RIGHT", "FULL"):
            raise UnsupportedInDuckDB(f"{side} {kind} JOIN is not translated".strip())
        if isinstance(node.this, exp.Unnest):
            if side or kind not in ("", "CROSS") or node.args.get("on") or node.args.get("using"):
                raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
            right_text, right_fields = self._translate_unnest(node.this, NameScope(fields, outer.named, outer))
            return f"{text} CROSS JOIN {right_text}", (*fields, *right_fields)
        right_text, right_fields = self._translate_relation(node.this, outer)
        word = f"{side} JOIN" if side else "JOIN"
        if using_columns := node.args.get("using"):
            return self._translate_using(
                text, fields, right_text, right_fields, word, [identifier.name.lower() for identifier in using_columns]
            )
        on = node.args.get("on")
        all_fields = (*fields, *right_fields)
        if on is None:
            if side or kind == "INNER":
                raise InvalidRequest(f"{word} requires ON or USING")
            return f"{text} CROSS JOIN {right_text}", all_fields
        if side == "FULL" and on.find(exp.Query) is not None:
            raise UnsupportedInDuckDB(f"A query in ON of a {word} is not translated")
        condition = self.expressions.translate_condition(on, NameScope(all_fields, outer.named, outer))
        return f"({text} {word} {right_text} ON {condition})", all_fields

    def _translate_using(
        self,
        text: str,
        fields: tuple[VisibleColumn, ...],
        right_text: str,
        right_fields: tuple[VisibleColumn, ...],
        word: str,
        names: Sequence[str],
    ) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate a join with USING to its text and its visible columns. They contain each of the named columns once.

        The value of such a column comes from the side of which all rows are kept, because it is not null there.

        Args:
            text: The left side of the join, in DuckDB's SQL.
            fields: The visible columns of the left side.
            right_text: The right side of the join.
            right_fields: The visible columns of the right side.
            word: The join in SQL, such as `LEFT JOIN`.
            names: The column names in USING, in lower case.
        """
        keys, conditions = [], []
        for name in names:
            sides = []
            for side in (fields, right_fields):
                matches = [field for field in side if field.name == name]
                if len(matches) != 1:
                    raise InvalidRequest(
                        f"USING ({name[:100]}): each side of the join must have one column of this name"
                    )
                sides.append(use_column(matches[0]))
            kind = find_common_type(sides[0].type, sides[1].type)
            if kind is None or kind.is_float or not kind.is_comparable:
                raise UnsupportedInDuckDB(
                    f"USING ({name[:100]}) is not translated for {sides[0].type} and {sides[1].type}"
                )
            left, right = (cast(side, kind).sql for side in sides)
            conditions.append(f"{left} = {right}")
            key = {"FULL JOIN": f"coalesce({left}, {right})", "RIGHT JOIN": right}.get(word, left)
            keys.append(VisibleColumn(name, (), SqlValue(key, kind)))
        other_fields = [field for field in (*fields, *right_fields) if field.name not in names]
        return f"({text} {word} {right_text} ON {' AND '.join(conditions)})", (*keys, *other_fields)

    def _translate_relation(self, node: exp.Expr, outer: NameScope) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate a relation in FROM to its text and its visible columns.

        A relation is a table, joins in parentheses, a query, or VALUES.
        """
        alias = node.args.get("alias")
        match node:
            case exp.Table():
                return self._translate_table(node, alias, outer)
            case exp.Subquery() if isinstance(node.this, exp.Table) and alias is None:
                text, fields = self._translate_relation(node.this, outer)
                for join in node.this.args.get("joins") or ():
                    text, fields = self._translate_join(text, fields, join, outer)
                return f"({text})" if node.this.args.get("joins") else text, fields
            case exp.Subquery() | exp.Values():
                if node.args.get("joins"):
                    raise UnsupportedInDuckDB("A join in parentheses of this form is not translated")
                # A query in FROM can use columns of the enclosing query, but not of the other relations in FROM.
                text, columns = self.translate_query(node, replace(outer, fields=()) if outer.parent is None else outer)
                return self._alias_relation(f"({text})", columns, alias, node)
        raise UnsupportedInDuckDB(f"FROM {describe(node)} is not translated")

    def _translate_unnest(self, node: exp.Unnest, scope: NameScope) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate `UNNEST(t.tags) AS u(tag)` after a CROSS JOIN, whose left side is visible in the argument."""
        text, columns = translate_unnest(self.expressions, node, scope)
        alias = node.args.get("alias")
        relation = None if alias is None else exp.TableAlias(this=alias.this)
        return self._alias_relation(f"({text})", columns, relation, node)

    def _translate_table(
        self, node: exp.Table, alias: exp.Expr | None, outer: NameScope
    ) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Translate a reference to a table or to a query of WITH, to its text and its visible columns.

        A name with several parts is always a table.

        The columns of a table have the names c0, c1 … in DuckDB, by their position.
        """
        if not isinstance(node.this, exp.Identifier):
            raise UnsupportedInDuckDB(f"FROM {describe(node)}: table functions are not translated")
        check_args(node, _TABLE | {"joins"})
        with_query = outer.named.get(node.name.lower()) if len(node.parts) == 1 else None
        if with_query is not None:
            return self._alias_relation(
                with_query.relation, with_query.columns, alias or exp.TableAlias(this=node.this), node
            )
        table = StoredTable(len(self.tables), node, self._find_columns(node))
        self.tables.append(table)
        relation = f"r{next(self._numbers)}"
        names = [name for name, _ in _rename_columns(list(table.columns.items()), alias, node)]
        parts = tuple(part.name.lower() for part in node.parts)
        qualifiers = (alias.name.lower(),) if alias is not None and alias.name else parts
        fields = tuple(
            VisibleColumn(shown_as.lower(), qualifiers, SqlValue(f"{relation}.c{number}", kind), (table, column))
            for number, (shown_as, (column, kind)) in enumerate(zip(names, table.columns.items(), strict=True))
        )
        return f"{WITHOUT_PUSHDOWN.format(table.name)} AS {relation}", fields

    def _alias_relation(
        self, text: str, columns: Columns, alias: exp.Expr | None, node: exp.Expr
    ) -> tuple[str, tuple[VisibleColumn, ...]]:
        relation = f"r{next(self._numbers)}"
        qualifiers = (alias.name.lower(),) if alias is not None and alias.name else ()
        fields = tuple(
            VisibleColumn(name.lower(), qualifiers, SqlValue(f"{relation}.c{number}", kind))
            for number, (name, kind) in enumerate(_rename_columns(columns, alias, node))
        )
        names = ", ".join(f"c{number}" for number in range(len(fields)))
        return f"{text} AS {relation}({names})", fields


def _find_star_qualifiers(node: exp.Expr) -> list[str] | None:
    """Return the qualifiers of a star, or None if the node is not a star."""
    star = node.this if isinstance(node, exp.Column) else node
    if not isinstance(star, exp.Star):
        return None
    if any(star.args.values()):
        raise UnsupportedInDuckDB(f"{describe(node)} is not translated")
    return [part.name for part in node.parts[:-1]] if isinstance(node, exp.Column) else []


def _to_selectable(value: SqlValue) -> SqlValue:
    if value.type == UNKNOWN:
        return SqlValue(f"CAST({value.sql} AS INTEGER)", UNKNOWN)
    if value.type.name == "interval":
        raise UnsupportedInDuckDB("A column of intervals is not translated")
    return value


def _convert_columns(text: str, query_columns: Columns, target_columns: Columns) -> str:
    """Return the query with its columns converted to other types.

    Nested types are not converted, because they have no names in DuckDB's SQL. Only equal nested types, or nulls, are
    combined.
    """
    if [kind for _, kind in query_columns] == [kind for _, kind in target_columns]:
        return text
    columns = (
        f"c{number}"
        if kind == query_kind or kind.is_nested
        else f"CAST(c{number} AS {name_duckdb_type(kind)}) AS c{number}"
        for number, ((_, kind), (_, query_kind)) in enumerate(zip(target_columns, query_columns, strict=True))
    )
    return f"SELECT {', '.join(columns)} FROM ({text})"  # noqa: S608


def _rename_columns(columns: Columns, alias: exp.Expr | None, node: exp.Expr) -> list[tuple[str, SqlType]]:
    """Return the columns with the new names in an alias such as `AS t(a, b)`."""
    names = [column.name for column in alias.columns] if isinstance(alias, exp.TableAlias) else []
    if not names:
        return list(columns)
    if len(names) != len(columns):
        raise InvalidRequest(f"{describe(node)}: there are {len(names)} names for {len(columns)} columns")
    return [(name, kind) for name, (_, kind) in zip(names, columns, strict=True)]


def _parse_ordinal(node: exp.Expr) -> int | None:
    if isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdigit():
        return int(str(node.this))
    return None


def _check_grouped(value: SqlValue, node: exp.Expr) -> SqlValue:
    """Return the value, after a check that rows can be grouped by its type."""
    if not value.type.is_comparable:
        raise UnsupportedInDuckDB(f"GROUP BY {describe(node)}: values of the type {value.type} cannot be grouped")
    return value


def _find_output(outputs: Sequence[tuple[str, SqlValue]], number: int, clause: str) -> SqlValue:
    if not 1 <= number <= len(outputs):
        raise InvalidRequest(f"{clause} {number}: the query has {len(outputs)} columns")
    return outputs[number - 1][1]


def _translate_limits(node: exp.Expr) -> list[str]:
    clauses = []
    limit, offset = node.args.get("limit"), node.args.get("offset")
    if isinstance(limit, exp.Fetch):
        options = limit.args.get("limit_options")
        if options is not None and (options.args.get("percent") or options.args.get("with_ties")):
            raise UnsupportedInDuckDB("FETCH … WITH TIES is not translated")
        clauses.append(f"LIMIT {_parse_row_count(limit.args.get('count') or exp.Literal.number(1))}")
    elif limit is not None and not (isinstance(limit.expression, exp.Var) and limit.expression.name.upper() == "ALL"):
        check_args(limit)
        clauses.append(f"LIMIT {_parse_row_count(limit.expression)}")
    if offset is not None:
        clauses.append(f"OFFSET {_parse_row_count(offset.expression)}")
    return clauses


def _parse_row_count(node: exp.Expr) -> int:
    number = _parse_ordinal(node)
    if number is None or number > _ROWS_MAX:
        raise InvalidRequest(
            f"LIMIT and OFFSET need a whole number of at most {_ROWS_MAX:,}; the query has {describe(node)}"
        )
    return number
