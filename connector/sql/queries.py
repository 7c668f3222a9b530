"""Translates a query of the dialect to DuckDB's SQL over relations `t0`, `t1` …, one for each reference to a table.

Each output column has the name `c0`, `c1` …; the names of the result are listed separately. Nulls are last in ORDER
BY unless the statement says otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import count

from sqlglot import exp

from seamark.connector.client.errors import BadRequest
from seamark.connector.sql.expressions import Expressions
from seamark.connector.sql.functions import ordered, translate_function
from seamark.connector.sql.scopes import (
    Field,
    NameScope,
    StoredTable,
    UnsupportedInDuckDB,
    Value,
    WithQuery,
    read,
    shown,
)
from seamark.connector.sql.types import NESTED, UNKNOWN, SqlType, common_type, duckdb_name
from seamark.connector.sql.values import cast, check_args

Columns = Sequence[tuple[str, SqlType]]
_BELOW = ("with_", "order", "limit", "offset")
_SELECT = frozenset(("expressions", "from_", "joins", "where", "group", "having", "distinct", *_BELOW))
_SET = frozenset(("this", "expression", "distinct", *_BELOW))
_SUBQUERY = frozenset(("this", "alias", *_BELOW))
_TABLE = frozenset(("this", "db", "catalog", "alias", "version"))
_JOIN = frozenset(("this", "side", "kind", "on", "using"))
_WORDS: dict[type[exp.Expr], str] = {exp.Union: "UNION", exp.Except: "EXCEPT", exp.Intersect: "INTERSECT"}
_ROWS_MAX = 1 << 62
_WITHOUT_PUSHDOWN = f"(SELECT * FROM {{}} LIMIT {_ROWS_MAX})"  # noqa: S608
"""DuckDB pushes no filter below LIMIT. It cannot push all filters into an Arrow scan, as those of decimals, and then
version 1.5.5 mixes up the columns above the scan. The reader has applied the conditions already."""
_NOTHING: Mapping[str, WithQuery] = {}
TableColumns = Callable[[exp.Table], Mapping[str, SqlType]]
"""The columns of a stored table, by the reference to it. BadRequest for one that does not exist."""


@dataclass(frozen=True)
class DuckDBQuery:
    text: str
    columns: Columns
    """The names and types of the result."""
    tables: tuple[StoredTable, ...]


def translate(tree: exp.Expr, columns_of: TableColumns, now: datetime) -> DuckDBQuery:
    """Raise BadRequest for an invalid query, UnsupportedInDuckDB for one that is not translated."""
    translation = Translation(columns_of, now)
    try:
        text, columns = translation.query(tree, NameScope((), _NOTHING))
    except RecursionError:
        raise BadRequest("The statement is nested too deeply") from None
    return DuckDBQuery(text, columns, tuple(translation.tables))


class Translation:
    """The translation of one statement.

    `tables`: the references to stored tables so far.
    """

    def __init__(self, columns_of: TableColumns, now: datetime) -> None:
        self._columns_of = columns_of
        self._numbers = count()
        self.expressions = Expressions(self.query, translate_function, now)
        self.tables: list[StoredTable] = []

    def query(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        """`outer`: the scope of the query around, with the names in WITH."""
        match node:
            case exp.Select():
                allowed, body = _SELECT, self._select
            case exp.Union() | exp.Except() | exp.Intersect():
                allowed, body = _SET, self._set
            case exp.Subquery():
                allowed, body = _SUBQUERY, self._enclosed
            case exp.Values():
                return self._values(node, outer)
            case _:
                raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
        check_args(node, allowed)
        clause, texts = node.args.get("with_"), []
        if clause is not None:
            check_args(clause, frozenset(("expressions",)))
            for one in clause.expressions:
                text, outer = self._named(one, outer)
                texts.append(text)
        text, columns = body(node, outer)
        return (f"WITH {', '.join(texts)} {text}" if texts else text), columns

    def _named(self, node: exp.Expr, outer: NameScope) -> tuple[str, NameScope]:
        """Return a name in WITH, and the scope in which it is visible."""
        check_args(node, frozenset(("this", "alias")))
        text, columns = self.query(node.this, outer)
        columns = _renamed(columns, node.args["alias"], node)
        relation = f"w{next(self._numbers)}"
        found = {**outer.named, node.alias.lower(): WithQuery(relation, tuple(columns))}
        return f"{relation} AS ({text})", replace(outer, named=found)

    # Bodies

    def _select(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        source, fields = self._from(node, outer)
        scope, e = NameScope(fields, outer.named, outer), self.expressions
        outputs = self._outputs(node, scope)
        distinct = node.args.get("distinct")
        if distinct is not None and distinct.args.get("on"):
            raise UnsupportedInDuckDB("DISTINCT ON is not translated")
        texts = ["SELECT DISTINCT" if distinct is not None else "SELECT"]
        texts.append(", ".join(f"{value.sql} AS c{n}" for n, (_, value) in enumerate(outputs)))
        texts += [f"FROM {source}"] if source else []
        if (where := node.args.get("where")) is not None:
            texts.append(f"WHERE {e.condition(where.this, scope)}")
        if (group := node.args.get("group")) is not None:
            texts.append(f"GROUP BY {self._group(group, outputs, scope)}")
        if (having := node.args.get("having")) is not None:
            texts.append(f"HAVING {e.condition(having.this, scope)}")
        if (order := node.args.get("order")) is not None:
            keys = self._order_keys(order, outputs, scope, distinct=distinct is not None)
            texts.append(f"ORDER BY {', '.join(keys)}")
        return " ".join([*texts, *_limits(node)]), [(name, value.type) for name, value in outputs]

    def _outputs(self, node: exp.Expr, scope: NameScope) -> list[tuple[str, Value]]:
        found: list[tuple[str, Value]] = []
        for one in node.expressions:
            star = _star(one)
            if star is not None:
                found += [(each.name, read(each)) for each in scope.all_of(star)]
                continue
            alias = one if isinstance(one, exp.Alias) else None
            value = self.expressions.value(one.this if alias is not None else one, scope)
            given = alias.alias if alias is not None else one.name if isinstance(one, exp.Column) else None
            found.append((given or f"_col{len(found)}", _selectable(value)))
        return found

    def _group(self, node: exp.Expr, outputs: Sequence[tuple[str, Value]], scope: NameScope) -> str:
        check_args(node, frozenset(("expressions",)))
        keys = []
        for one in node.expressions:
            if not isinstance(one, exp.Column | exp.Literal | exp.Func | exp.Binary | exp.Paren | exp.Cast):
                raise UnsupportedInDuckDB(f"GROUP BY {shown(one)} is not translated")
            number = _ordinal(one)
            value = self.expressions.value(one, scope) if number is None else _numbered(outputs, number, "GROUP BY")
            if not value.type.is_comparable:
                raise UnsupportedInDuckDB(f"GROUP BY {shown(one)}: the type {value.type} is not grouped")
            keys.append(value.sql)
        return ", ".join(keys)

    def _order_keys(
        self,
        order: exp.Expr,
        outputs: Sequence[tuple[str, Value]],
        scope: NameScope | None,
        *,
        distinct: bool = False,
    ) -> list[str]:
        """`scope` None: only outputs are visible."""
        numbers: defaultdict[str, list[int]] = defaultdict(list)
        for number, (name, _) in enumerate(outputs, 1):
            numbers[name.lower()].append(number)
        # In an expression, too, a name of SELECT comes before a column of FROM.
        named = None
        if scope is not None:
            fields = tuple(Field(name.lower(), (), value) for name, value in outputs)
            named = NameScope(fields, scope.named, scope)
        return [self._order_key(one, outputs, numbers, named, distinct=distinct) for one in order.expressions]

    def _order_key(
        self,
        node: exp.Expr,
        outputs: Sequence[tuple[str, Value]],
        numbers: Mapping[str, Sequence[int]],
        scope: NameScope | None,
        *,
        distinct: bool,
    ) -> str:
        """`numbers`: of the outputs, by name in lower case."""
        key, number = node.this, _ordinal(node.this)
        if number is not None:
            value = _numbered(outputs, number, "ORDER BY")
            return ordered(Value(str(number), value.type), node)
        if isinstance(key, exp.Column) and len(key.parts) == 1:
            found = numbers.get(key.name.lower(), ())
            if len(found) > 1 and len({outputs[n - 1][1].sql for n in found}) > 1:
                raise BadRequest(f"ORDER BY {shown(key)} is ambiguous")
            if found:
                return ordered(Value(str(found[0]), outputs[found[0] - 1][1].type), node)
        if scope is None:
            raise UnsupportedInDuckDB(f"ORDER BY {shown(key)}: after a set operation only columns of it are translated")
        value = self.expressions.value(key, scope)
        if distinct:
            same = [n for n, (_, one) in enumerate(outputs, 1) if one.sql == value.sql]
            if not same:
                raise BadRequest(f"ORDER BY {shown(key)} must be in SELECT DISTINCT")
            return ordered(Value(str(same[0]), value.type), node)
        return ordered(value, node)

    def _set(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        word = _WORDS[type(node)] + ("" if node.args.get("distinct") else " ALL")
        (left, ours), (right, theirs) = (self.query(node.args[side], outer) for side in ("this", "expression"))
        if len(ours) != len(theirs):
            raise BadRequest(f"{word} puts queries of {len(ours)} and {len(theirs)} columns together")
        columns = []
        for (name, one), (_, other) in zip(ours, theirs, strict=True):
            kind = common_type(one, other)
            if kind is None:
                raise BadRequest(f"{word}: the column {name[:100]!r} has the types {one} and {other}: use CAST")
            if not kind.is_comparable and word != "UNION ALL":
                raise UnsupportedInDuckDB(f"{word} of the type {kind} is not translated")
            columns.append((name, kind))
        texts = [f"({_converted(text, given, columns)})" for text, given in ((left, ours), (right, theirs))]
        text = f" {word} ".join(texts)
        if (order := node.args.get("order")) is not None:
            outputs = [(name, Value("", kind)) for name, kind in columns]
            keys = self._order_keys(order, outputs, None)
            text += f" ORDER BY {', '.join(keys)}"
        return " ".join([text, *_limits(node)]), columns

    def _enclosed(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        text, columns = self.query(node.this, outer)
        if any(node.args.get(name) for name in ("order", "limit", "offset")):
            texts = [f"SELECT * FROM ({text}) r{next(self._numbers)}"]  # noqa: S608
            if (order := node.args.get("order")) is not None:
                outputs = [(name, Value("", kind)) for name, kind in columns]
                keys = self._order_keys(order, outputs, None)
                texts.append(f"ORDER BY {', '.join(keys)}")
            text = " ".join([*texts, *_limits(node)])
        return text, columns

    def _values(self, node: exp.Expr, outer: NameScope) -> tuple[str, list[tuple[str, SqlType]]]:
        check_args(node, frozenset(("expressions", "alias")))
        rows = [one.expressions if isinstance(one, exp.Tuple) else [one] for one in node.expressions]
        values = [self.expressions.values(row, outer) for row in rows]
        if len({len(row) for row in values}) != 1:
            raise BadRequest("The rows of VALUES have different numbers of columns")
        columns: list[tuple[str, SqlType]] = []
        for number, column in enumerate(zip(*values, strict=True)):
            kind = UNKNOWN
            for value in column:
                found = common_type(kind, value.type)
                if found is None:
                    raise BadRequest(f"Column {number + 1} of VALUES has the types {kind} and {value.type}: use CAST")
                kind = found
            columns.append((f"_col{number}", kind))
        texts = []
        for row in values:
            cells = (
                f"{_selectable(cast(value, kind)).sql} AS c{n}"
                for n, (value, (_, kind)) in enumerate(zip(row, columns, strict=True))
            )
            texts.append(f"SELECT {', '.join(cells)}")
        return " UNION ALL ".join(f"({text})" for text in texts), columns

    # FROM

    def _from(self, node: exp.Expr, outer: NameScope) -> tuple[str, tuple[Field, ...]]:
        clause = node.args.get("from_")
        if clause is None:
            return "", ()
        parts = [self._relation(clause.this, outer)]
        for join in node.args.get("joins") or ():
            if any(join.args.get(name) for name in ("side", "kind", "on", "using", "method")):
                parts.append(self._join(*parts.pop(), join, outer))
            else:  # a comma, which binds less tightly than JOIN: an outer join keeps rows of its two sides only
                check_args(join, _JOIN)
                parts.append(self._relation(join.this, outer))
        text = " CROSS JOIN ".join(text for text, _ in parts)
        return text, tuple(field for _, fields in parts for field in fields)

    def _join(
        self, text: str, fields: tuple[Field, ...], node: exp.Expr, outer: NameScope
    ) -> tuple[str, tuple[Field, ...]]:
        check_args(node, _JOIN)
        side, kind = node.text("side").upper(), node.text("kind").upper()
        if kind not in ("", "INNER", "CROSS", "OUTER") or side not in ("", "LEFT", "RIGHT", "FULL"):
            raise UnsupportedInDuckDB(f"{side} {kind} JOIN is not translated".strip())
        other, others = self._relation(node.this, outer)
        word = f"{side} JOIN" if side else "JOIN"
        if using := node.args.get("using"):
            return self._using(text, fields, other, others, word, [one.name.lower() for one in using])
        on = node.args.get("on")
        together = (*fields, *others)
        if on is None:
            if side or kind == "INNER":
                raise BadRequest(f"{word} needs ON or USING")
            return f"{text} CROSS JOIN {other}", together
        if side == "FULL" and on.find(exp.Query) is not None:
            raise UnsupportedInDuckDB(f"A query in ON of a {word} is not translated")
        condition = self.expressions.condition(on, NameScope(together, outer.named, outer))
        return f"({text} {word} {other} ON {condition})", together

    def _using(
        self,
        text: str,
        fields: tuple[Field, ...],
        other: str,
        others: tuple[Field, ...],
        word: str,
        names: Sequence[str],
    ) -> tuple[str, tuple[Field, ...]]:
        keys, conditions = [], []
        for name in names:
            sides = []
            for side in (fields, others):
                found = [one for one in side if one.name == name]
                if len(found) != 1:
                    raise BadRequest(f"USING ({name[:100]}): each side of the join needs one column of this name")
                sides.append(read(found[0]))
            kind = common_type(sides[0].type, sides[1].type)
            if kind is None or kind.is_float or not kind.is_comparable:
                raise UnsupportedInDuckDB(
                    f"USING ({name[:100]}) is not translated for {sides[0].type} and {sides[1].type}"
                )
            left, right = (cast(one, kind).sql for one in sides)
            conditions.append(f"{left} = {right}")
            key = {"FULL JOIN": f"coalesce({left}, {right})", "RIGHT JOIN": right}.get(word, left)
            keys.append(Field(name, (), Value(key, kind)))
        rest = [one for one in (*fields, *others) if one.name not in names]
        return f"({text} {word} {other} ON {' AND '.join(conditions)})", (*keys, *rest)

    def _relation(self, node: exp.Expr, outer: NameScope) -> tuple[str, tuple[Field, ...]]:
        alias = node.args.get("alias")
        match node:
            case exp.Table():
                return self._table(node, alias, outer)
            case exp.Subquery() if isinstance(node.this, exp.Table) and alias is None:
                text, fields = self._relation(node.this, outer)
                for join in node.this.args.get("joins") or ():
                    text, fields = self._join(text, fields, join, outer)
                return f"({text})" if node.this.args.get("joins") else text, fields
            case exp.Subquery() | exp.Values():
                if node.args.get("joins"):
                    raise UnsupportedInDuckDB("A join in parentheses of this form is not translated")
                # A query in FROM does not see the other relations, but the query around.
                text, columns = self.query(node, replace(outer, fields=()) if outer.parent is None else outer)
                return self._named_relation(f"({text})", columns, alias, node)
        raise UnsupportedInDuckDB(f"FROM {shown(node)} is not translated")

    def _table(self, node: exp.Table, alias: exp.Expr | None, outer: NameScope) -> tuple[str, tuple[Field, ...]]:
        if not isinstance(node.this, exp.Identifier):
            raise UnsupportedInDuckDB(f"FROM {shown(node)}: table functions are not translated")
        check_args(node, _TABLE | {"joins"})
        named = outer.named.get(node.name.lower()) if len(node.parts) == 1 else None
        if named is not None:
            return self._named_relation(named.relation, named.columns, alias or exp.TableAlias(this=node.this), node)
        table = StoredTable(len(self.tables), node, self._columns_of(node))
        self.tables.append(table)
        relation = f"r{next(self._numbers)}"
        names = [name for name, _ in _renamed(list(table.columns.items()), alias, node)]
        parts = tuple(part.name.lower() for part in node.parts)
        qualifiers = (alias.name.lower(),) if alias is not None and alias.name else parts
        fields = tuple(
            Field(shown_as.lower(), qualifiers, Value(f"{relation}.c{number}", kind), (table, column))
            for number, (shown_as, (column, kind)) in enumerate(zip(names, table.columns.items(), strict=True))
        )
        return f"{_WITHOUT_PUSHDOWN.format(table.name)} AS {relation}", fields

    def _named_relation(
        self, text: str, columns: Columns, alias: exp.Expr | None, node: exp.Expr
    ) -> tuple[str, tuple[Field, ...]]:
        relation = f"r{next(self._numbers)}"
        qualifiers = (alias.name.lower(),) if alias is not None and alias.name else ()
        fields = tuple(
            Field(name.lower(), qualifiers, Value(f"{relation}.c{number}", kind))
            for number, (name, kind) in enumerate(_renamed(columns, alias, node))
        )
        names = ", ".join(f"c{number}" for number in range(len(fields)))
        return f"{text} AS {relation}({names})", fields


def _star(node: exp.Expr) -> list[str] | None:
    """Return the qualifiers of `*`; None for another expression."""
    star = node.this if isinstance(node, exp.Column) else node
    if not isinstance(star, exp.Star):
        return None
    if any(star.args.values()):
        raise UnsupportedInDuckDB(f"{shown(node)} is not translated")
    return [part.name for part in node.parts[:-1]] if isinstance(node, exp.Column) else []


def _selectable(value: Value) -> Value:
    if value.type == UNKNOWN:
        return Value(f"CAST({value.sql} AS INTEGER)", UNKNOWN)
    if value.type.name == "interval":
        raise UnsupportedInDuckDB("A column of intervals is not translated")
    return value


def _converted(text: str, given: Columns, wanted: Columns) -> str:
    """Return the query with its columns in other types."""
    if [kind for _, kind in given] == [kind for _, kind in wanted]:
        return text
    columns = (
        f"c{n}" if kind == old or NESTED in (kind, old) else f"CAST(c{n} AS {duckdb_name(kind)}) AS c{n}"
        for n, ((_, kind), (_, old)) in enumerate(zip(wanted, given, strict=True))
    )
    return f"SELECT {', '.join(columns)} FROM ({text})"  # noqa: S608


def _renamed(columns: Columns, alias: exp.Expr | None, node: exp.Expr) -> list[tuple[str, SqlType]]:
    """With the names of `AS t(a, b)`."""
    names = [one.name for one in alias.columns] if isinstance(alias, exp.TableAlias) else []
    if not names:
        return list(columns)
    if len(names) != len(columns):
        raise BadRequest(f"{shown(node)}: {len(names)} names for {len(columns)} columns")
    return [(name, kind) for name, (_, kind) in zip(names, columns, strict=True)]


def _ordinal(node: exp.Expr) -> int | None:
    if isinstance(node, exp.Literal) and not node.is_string and str(node.this).isdigit():
        return int(str(node.this))
    return None


def _numbered(outputs: Sequence[tuple[str, Value]], number: int, clause: str) -> Value:
    if not 1 <= number <= len(outputs):
        raise BadRequest(f"{clause} {number}: the query has {len(outputs)} columns")
    return outputs[number - 1][1]


def _limits(node: exp.Expr) -> list[str]:
    found = []
    limit, offset = node.args.get("limit"), node.args.get("offset")
    if isinstance(limit, exp.Fetch):
        options = limit.args.get("limit_options")
        if options is not None and (options.args.get("percent") or options.args.get("with_ties")):
            raise UnsupportedInDuckDB("FETCH … WITH TIES is not translated")
        found.append(f"LIMIT {_row_count(limit.args.get('count') or exp.Literal.number(1))}")
    elif limit is not None and not (isinstance(limit.expression, exp.Var) and limit.expression.name.upper() == "ALL"):
        check_args(limit)
        found.append(f"LIMIT {_row_count(limit.expression)}")
    if offset is not None:
        found.append(f"OFFSET {_row_count(offset.expression)}")
    return found


def _row_count(node: exp.Expr) -> int:
    number = _ordinal(node)
    if number is None or number > _ROWS_MAX:
        raise BadRequest(f"{shown(node)} is no number of rows")
    return number
