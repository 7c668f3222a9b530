"""Converts sqlglot's tree of a query to blocks (`blocks.py`), and collects the stored tables in it.

A clause that is not listed here makes the whole statement unsupported, because it may change which rows are needed.
Some sources are opaque (functions, samples, tables at an earlier time): no condition is pushed to them, and the names
of WITH in them are read completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.analysis.algebra.blocks import Block
from seamark.connector.analysis.algebra.relations import (
    Columns,
    LiteralRows,
    NamedQuery,
    PushdownBarrier,
    RenamedColumns,
    Scope,
    SetOperation,
    Table,
    UnknownRelation,
    WithClause,
    canonical_name,
)
from seamark.connector.analysis.block_sources import BlockSource
from seamark.connector.analysis.conditions import ConditionReader
from seamark.connector.analysis.joined_sources import JoinedSource, Tree
from seamark.connector.analysis.lexer import UnsupportedStatement

Names: TypeAlias = tuple[str | None, str | None, str]
"""Catalog, schema and table of a reference, in lower case; None: the session's."""
ColumnsOf: TypeAlias = Callable[[Names], Columns | None]
_Visible: TypeAlias = Mapping[str, NamedQuery]

_CUTS = ("order", "limit", "offset")
_BELOW = ("group", "having", "limit", "offset", "distinct", "windows")
_SELECT = frozenset(("with_", "expressions", "from_", "joins", "where", "order", *_BELOW))
_SET = frozenset(("with_", "this", "expression", "distinct", *_CUTS))
_SUBQUERY = frozenset(("with_", "this", "alias", "joins", *_CUTS))
_TABLE = frozenset(("this", "db", "catalog", "alias", "version", "sample", "joins"))
_JOIN = frozenset(("this", "side", "kind", "on", "using"))
_WITHOUT_NULLS = (exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Count)
"""The aggregates that leave out nulls, and have the same value for no row as for rows of nulls."""
_AROUND_FILTERED = (
    *(exp.Alias, exp.Paren, exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Cast, exp.Coalesce, exp.Literal),
)
"""What may be outside of aggregates with FILTER if no other row counts."""
_INNER = frozenset((("", ""), ("", "INNER"), ("", "CROSS")))
_OUTER = {(side, kind): side for side in ("LEFT", "RIGHT", "FULL") for kind in ("", "OUTER")}


class Queries:
    """The queries of one statement. `tables`: references to stored tables, which have their conditions after the
    query's `push_down`."""

    def __init__(
        self, columns_of: ColumnsOf, reader: ConditionReader, relation_names: frozenset[str] = frozenset()
    ) -> None:
        self.tables: list[Table] = []
        self.columns_of = columns_of
        self._reader = reader
        self._relation_names = relation_names

    def read(self, node: exp.Expr, visible: _Visible) -> Scope:
        """Converts a query. Raises UnsupportedStatement."""
        body: Callable[[exp.Expr, _Visible], Scope]
        match node:
            case exp.Select():
                allowed, body = _SELECT, self._block
            case exp.Union() | exp.Except() | exp.Intersect():
                allowed, body = _SET, self._set
            case exp.Subquery():
                allowed, body = _SUBQUERY, self._enclosed
            case exp.Values():
                return self.literal_rows(node) or hidden(node, visible)
            case _:
                raise UnsupportedStatement
        _check(node, allowed)
        clause = node.args.get("with_")
        if clause is None:
            return body(node, visible)
        _check(clause, frozenset(("expressions", "recursive")))
        known, named = dict(visible), []
        for one in clause.expressions:
            _check(one, frozenset(("this", "alias")))
            name, columns = _alias(one)
            if name is None:
                raise UnsupportedStatement
            if clause.args.get("recursive") and _uses(one.this, name):
                # Its rows depend on its other rows, so no condition is pushed to them.
                itself = NamedQuery(UnknownRelation())
                result: Scope = PushdownBarrier(self.read(one.this, {**known, name: itself}))
            else:
                result = self.read(one.this, known)
            named.append(NamedQuery(RenamedColumns(result, columns) if columns else result))
            known[name] = named[-1]
        return WithClause(body(node, known), tuple(named))

    def within(self, expressions: list[exp.Expr], visible: _Visible) -> list[tuple[exp.Expr, Scope]]:
        """The subqueries of expressions."""
        return [(query, self.read(query, visible)) for one in expressions for query in _queries_in(one)]

    def literal_rows(self, node: exp.Expr) -> LiteralRows | None:
        """The rows of VALUES, or of UNNEST of one array, if all are literals."""
        if _given(node, set(node.args) - {"this", "alias", "expressions"}):
            return None
        rows: list[list[exp.Expr]]
        if isinstance(node, exp.Values):
            rows = [one.expressions if isinstance(one, exp.Tuple) else [one] for one in node.expressions]
        else:
            (array,) = node.expressions if len(node.expressions) == 1 else (None,)
            if not isinstance(array, exp.Array):
                return None
            rows = [[one] for one in array.expressions]
        columns = [self._reader.literals(column) for column in zip(*rows, strict=False)]
        there = tuple(column for column in columns if column is not None)
        return (
            LiteralRows(there)
            if there and len({len(row) for row in rows}) == 1 and len(there) == len(columns)
            else None
        )

    def _cut(self, result: Scope, cuts: list[exp.Expr], visible: _Visible) -> Scope:
        return PushdownBarrier(result, tuple(inner for _, inner in self.within(cuts, visible))) if cuts else result

    def _enclosed(self, node: exp.Expr, visible: _Visible) -> Scope:
        return self._cut(self.read(node.this, visible), _given(node, _CUTS), visible)

    def _set(self, node: exp.Expr, visible: _Visible) -> Scope:
        both = SetOperation(self.read(node.this, visible), self.read(node.expression, visible))
        return self._cut(both, _given(node, _CUTS), visible)

    def _block(self, node: exp.Expr, visible: _Visible) -> Scope:
        distinct, where, clause = (node.args.get(one) for one in ("distinct", "where", "from_"))
        if distinct is not None and _given(distinct, distinct.args):
            raise UnsupportedStatement  # DISTINCT ON
        for one in node.expressions:
            star = one.this if type(one) is exp.Column else one
            if isinstance(one, exp.Aliases) or (isinstance(star, exp.Star) and _given(star, star.args)):
                raise UnsupportedStatement
        tables = _From(self, visible)
        if clause is not None:
            _check(clause, frozenset(("this",)))
            tables.tree = tables.joined(tables.relation(clause.this), node.args.get("joins") or [])
        elif node.args.get("joins"):
            raise UnsupportedStatement
        expressions = [*node.expressions, *_given(node, ("where", "order", *_BELOW))]
        passes, windows = _passes(node), tuple(_windows_in([*expressions, *tables.conditions]))
        inner = [(query, result, None) for query, result in self.within(expressions, visible)]
        having = node.args.get("having")
        return Block(
            projections=[_without_brackets(one) for one in node.expressions],
            where=None if where is None else where.this,
            sources=tables.sources,
            tree=tables.tree,
            passes=passes,
            needs_rows=passes
            and not windows
            and not node.args.get("order")
            and all(_is_given(one) for one in node.expressions),
            relation_names=self._relation_names,
            having=None if having is None else having.this,
            is_grouped=node.args.get("group") is not None,
            keys=_grouping_keys(node),
            filters=tuple(_filters(node)),
            windows=windows,
            laterals=tuple(tables.laterals),
            inner=[
                *inner,
                *((query, result, on) for on in tables.conditions for query, result in self.within([on], visible)),
            ],
            reader=self._reader,
        )


class _From:
    """The FROM clause of one block."""

    def __init__(self, queries: Queries, visible: _Visible) -> None:
        self.sources: list[BlockSource] = []
        self.tree: Tree | None = None
        self.conditions: list[exp.Expr] = []
        self.laterals: list[int] = []
        """The positions of LATERAL subqueries among the sources."""
        self._queries = queries
        self._visible = visible

    def joined(self, first: Tree, joins: list[exp.Expr]) -> Tree:
        """Joins bind more tightly than commas: `a, b LEFT JOIN c` is the product of a and of the join of b and c."""
        parts = [first]
        for join in joins:
            _check(join, _JOIN)
            side, kind = str(join.args.get("side") or "").upper(), str(join.args.get("kind") or "").upper()
            on = join.args.get("on")
            using = [canonical_name(one.name) for one in join.args.get("using") or []]
            right = self.relation(join.this)
            if not (side or kind or on or using):
                parts.append(right)
                continue
            outer = _OUTER.get((side, kind))
            if outer is None and (side, kind) not in _INNER:
                raise UnsupportedStatement
            if on is not None:
                self.conditions.append(on)
            left = parts.pop()
            parts.append(
                JoinedSource(left, right, outer in ("LEFT", "FULL"), outer in ("RIGHT", "FULL"), on, tuple(using))
            )
        tree = parts[0]
        for part in parts[1:]:
            tree = JoinedSource(tree, part)
        return tree

    def relation(self, node: exp.Expr) -> Tree:
        joins = node.args.get("joins") or []
        if _is_bracket(node):
            if not _given(node, set(node.args) - {"this", "joins"}):
                return self.joined(self.relation(node.this), joins)
            result: Scope = hidden(node, self._visible)  # a join with an alias
        else:
            result = self._result(node)
        name, columns = _alias(node)
        schema = None
        if name is None and isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
            name, schema = canonical_name(node.name), canonical_name(node.db) if node.db else None
        if isinstance(node, exp.Lateral):
            self.laterals.append(len(self.sources))
        self.sources.append(BlockSource(RenamedColumns(result, columns) if columns else result, name, schema))
        return self.joined(len(self.sources) - 1, joins)

    def _result(self, node: exp.Expr) -> Scope:
        match node:
            case exp.Table():
                return self._table(node)
            case exp.Subquery():
                return self._queries.read(node, self._visible)
            case exp.Lateral() if isinstance(node.this, exp.Subquery) and not _given(
                node, set(node.args) - {"this", "alias"}
            ):
                return self._queries.read(node.this, self._visible)
            case exp.Unnest() | exp.Values():
                return self._queries.literal_rows(node) or hidden(node, self._visible)
            case exp.Lateral():
                return hidden(node, self._visible)
        raise UnsupportedStatement

    def _table(self, node: exp.Table) -> Scope:
        _check(node, _TABLE)
        parts = node.parts
        if not all(isinstance(part, exp.Identifier) for part in parts) or len(parts) > 3:
            return hidden(node, self._visible)
        names = [canonical_name(part.name) for part in parts]
        version, sample = node.args.get("version"), node.args.get("sample")
        named = self._visible.get(names[0]) if len(names) == 1 else None
        if named is not None and version is None and sample is None:
            return named
        past = version is not None and version_of(version) is None
        if named is not None or sample is not None or past or any("$" in one or "@" in one for one in names):
            return hidden(node, self._visible)
        catalog, schema, table = (None, None, *names)[-3:]
        # The columns of the table at an earlier snapshot are unknown.
        columns = None if version is not None else self._queries.columns_of((catalog, schema, str(table)))
        self._queries.tables.append(Table(node, columns))
        return self._queries.tables[-1]


def _passes(node: exp.Expr) -> bool:
    """Whether a condition on an output column can be applied to the source rows.

    This is true for distinct rows, and for keys that all rows of a group share.
    """
    if _given(node, ("limit", "offset", "windows")):
        return False
    if node.args.get("group") is None:
        return node.args.get("having") is None
    return bool(_grouping_keys(node))


def _grouping_keys(node: exp.Expr) -> list[exp.Expr]:
    """The expressions of which all rows of each group have one value: of sets of groups those in every set. Without
    such an expression there may be a group of all rows."""
    group = node.args.get("group")
    if group is None or _given(group, set(group.args) - {"expressions"}):
        return []
    return [key for one in group.expressions for key in _keys_in(one, node.expressions)]


def _keys_in(element: exp.Expr, projections: list[exp.Expr]) -> list[exp.Expr]:
    match element:
        case exp.Literal():  # its number in SELECT
            number = int(element.this) if str(element.this).isdigit() else 0
            if not 0 < number <= len(projections) or any(_is_star(one) for one in projections):
                return []
            return [projections[number - 1].unalias()]
        case exp.GroupingSets():
            sets = [[*one.expressions] if isinstance(one, exp.Tuple) else [one.unnest()] for one in element.expressions]
            columns = [[one for one in each if type(one) is exp.Column] for each in sets]
            return [key for key in columns[0] if all(key in each for each in columns)] if columns else []
    return [element] if type(element) is exp.Column else []


def _filters(node: exp.Expr) -> list[exp.Expr]:
    """The conditions of FILTER, or of CASE within an aggregate, if the block has one group of all rows, and of these
    only rows count that meet one of the conditions."""
    if _given(node, ("group", "having", "order", "windows", "distinct")):
        return []
    found, left = [], list(node.expressions)
    while left:
        one = left.pop()
        if type(one) is exp.Filter and isinstance(one.this, exp.AggFunc):
            found.append(one.expression.this)
        elif branches := _counted(one):
            found += branches
        elif type(one) in _AROUND_FILTERED:
            left += [inner for inner in one.iter_expressions() if not isinstance(inner, exp.DataType | exp.Identifier)]
        else:
            return []
    return found


def _counted(aggregate: exp.Expr) -> list[exp.Expr]:
    """The conditions of `sum(CASE WHEN … THEN … END)`: for other rows CASE is null, which the aggregate leaves out."""
    if type(aggregate) is exp.CountIf:
        return [aggregate.this]
    if type(aggregate) not in _WITHOUT_NULLS or _given(aggregate, set(aggregate.args) - {"this", "big_int"}):
        return []
    value = aggregate.this
    if value is None:  # count()
        return []
    if isinstance(value, exp.Distinct):
        if _given(value, ("on",)) or len(value.expressions) != 1:
            return []
        value = value.expressions[0]
    value = value.unnest()
    if not isinstance(value, exp.Case | exp.If):
        return []
    otherwise = value.args.get("default" if isinstance(value, exp.Case) else "false")
    if otherwise is not None and not isinstance(otherwise, exp.Null):
        return []
    if isinstance(value, exp.If):
        return [value.this]
    when = [branch.this for branch in value.args["ifs"]]
    if value.this is None:
        return when
    if len(when) == 1:
        return [exp.EQ(this=value.this.copy(), expression=when[0].copy())]
    return [exp.In(this=value.this.copy(), expressions=[one.copy() for one in when])]


def _without_brackets(projection: exp.Expr) -> exp.Expr:
    """`(a)` is the column `a`, and has its name."""
    alias = projection if isinstance(projection, exp.Alias) else None
    inner = projection if alias is None else alias.this
    column = inner.unnest()
    if type(column) is not exp.Column or column is inner:
        return projection
    return column if alias is None else exp.Alias(this=column.copy(), alias=alias.args["alias"])


def _is_star(projection: exp.Expr) -> bool:
    return isinstance(projection.this if type(projection) is exp.Column else projection, exp.Star)


def _windows_in(expressions: Iterable[exp.Expr]) -> Iterator[exp.Window]:
    """The window functions of a block, without those of its subqueries."""
    left = list(expressions)
    while left:
        node = left.pop()
        if isinstance(node, exp.Window):
            yield node
        if not isinstance(node, exp.Select | exp.SetOperation | exp.Subquery):
            left.extend(node.iter_expressions())


def _is_given(projection: exp.Expr) -> bool:
    """Whether it is a column, a literal or a star, and not an aggregate."""
    inner = projection.this if isinstance(projection, exp.Alias) else projection
    return type(inner) in (exp.Column, exp.Literal, exp.Star, exp.Null, exp.Boolean)


def version_of(version: exp.Expr) -> int | str | None:
    """FOR VERSION AS OF a snapshot's number, or the name of a branch or tag; None for what is neither."""
    given = version.args.get("expression")
    if not isinstance(given, exp.Literal) or str(version.this).upper() != "VERSION":
        return None
    if version.args.get("kind") != "AS OF":
        return None
    if given.is_string:
        return str(given.this) or None
    return int(given.this) if str(given.this).isdigit() else None


def hidden(node: exp.Expr, visible: _Visible) -> Scope:
    """A source that is not analysed. Names of WITH that it may use are read completely."""
    for one in node.find_all(exp.Identifier):
        used = visible.get(one.name.lower())
        if used is not None:
            used.push_down(None)
    return UnknownRelation()


def _uses(query: exp.Expr, name: str) -> bool:
    """Whether a relation in the query may be this name of WITH."""
    return any(len(one.parts) == 1 and one.name.lower() == name for one in query.find_all(exp.Table))


def _is_bracket(node: exp.Expr) -> bool:
    """Whether it is a bracket around a table or a join, and not around a query."""
    if not isinstance(node, exp.Subquery):
        return False
    inner = node.this
    return isinstance(inner, exp.Table) or (
        isinstance(inner, exp.Subquery) and (_is_bracket(inner) or bool(_given(inner, ("alias", "joins"))))
    )


def _alias(node: exp.Expr) -> tuple[str | None, tuple[str, ...]]:
    """The alias of a relation, and the aliases of its columns. Raises UnsupportedStatement."""
    alias = node.args.get("alias")
    if alias is None:
        return None, ()
    if not isinstance(alias, exp.TableAlias):
        raise UnsupportedStatement
    _check(alias, frozenset(("this", "columns")))
    columns = alias.args.get("columns") or []
    if not all(isinstance(one, exp.Identifier) for one in (alias.this, *columns)):
        raise UnsupportedStatement
    return canonical_name(alias.name), tuple(canonical_name(one.name) for one in columns)


def _queries_in(expression: exp.Expr) -> Iterator[exp.Expr]:
    """The outermost queries. Not recursive, because the depth of a chain of ORs is its length. Raises
    UnsupportedStatement for a table outside of a query."""
    left = [expression]
    while left:
        node = left.pop()
        if isinstance(node, exp.Select | exp.SetOperation | exp.Subquery):
            yield node
        elif isinstance(node, exp.Table):
            raise UnsupportedStatement
        else:
            left.extend(node.iter_expressions())


def _given(node: exp.Expr, names: Iterable[str]) -> list[exp.Expr]:
    found = []
    for name in names:
        value = node.args.get(name)
        found += value if isinstance(value, list) else [value] if value else []
    return found


def _check(node: exp.Expr, allowed: frozenset[str]) -> None:
    """Raises UnsupportedStatement if the node has another argument than those in `allowed`."""
    if _given(node, set(node.args) - allowed):
        raise UnsupportedStatement
