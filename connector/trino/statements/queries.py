"""sqlglot's tree of a query as blocks (`blocks.py`), and the stored tables in it.

Whatever is not on the lists here is not understood, and then the whole statement is not: a clause that nobody thought
of may stand between a condition and a table. Some sources are known to be opaque (UNNEST, LATERAL, VALUES, functions,
samples, the past by time): nothing is asked of them, and names of WITH within them are read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.trino.statements.blocks import Block, BlockSource, JoinedSource, Tree
from seamark.connector.trino.statements.conditions import ConditionReader
from seamark.connector.trino.statements.lexer import UnsupportedStatement
from seamark.connector.trino.statements.scopes import (
    Columns,
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
_KEYS = (exp.Column, exp.Literal)
"""Of groups: by name, or by their number in SELECT. Sets of groups are other nodes."""
_INNER = frozenset((("", ""), ("", "INNER"), ("", "CROSS")))
_OUTER = {(side, kind): side for side in ("LEFT", "RIGHT", "FULL") for kind in ("", "OUTER")}


class Queries:
    """Those of one statement. `tables`: what is stored; what is asked of each is known after the query's
    `push_down`."""

    def __init__(self, columns_of: ColumnsOf, reader: ConditionReader) -> None:
        self.tables: list[Table] = []
        self.columns_of = columns_of
        self._reader = reader

    def read(self, node: exp.Expr, visible: _Visible) -> Scope:
        """A query. Raises Unclear."""
        body: Callable[[exp.Expr, _Visible], Scope]
        match node:
            case exp.Select():
                allowed, body = _SELECT, self._block
            case exp.Union() | exp.Except() | exp.Intersect():
                allowed, body = _SET, self._set
            case exp.Subquery():
                allowed, body = _SUBQUERY, self._enclosed
            case exp.Values():
                return hidden(node, visible)
            case _:
                raise UnsupportedStatement
        _check(node, allowed)
        clause = node.args.get("with_")
        if clause is None:
            return body(node, visible)
        _check(clause, frozenset(("expressions",)))
        known, named = dict(visible), []
        for one in clause.expressions:
            _check(one, frozenset(("this", "alias")))
            name, columns = _alias(one)
            if name is None:
                raise UnsupportedStatement
            result = self.read(one.this, known)
            named.append(NamedQuery(RenamedColumns(result, columns) if columns else result))
            known[name] = named[-1]
        return WithClause(body(node, known), tuple(named))

    def within(self, expressions: list[exp.Expr], visible: _Visible) -> list[tuple[exp.Expr, Scope]]:
        """The queries that stand in expressions."""
        return [(query, self.read(query, visible)) for one in expressions for query in _queries_in(one)]

    def _cut(self, result: Scope, cuts: list[exp.Expr], visible: _Visible) -> Scope:
        return PushdownBarrier((result, *(inner for _, inner in self.within(cuts, visible)))) if cuts else result

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
        expressions = [*node.expressions, *tables.conditions, *_given(node, ("where", "order", *_BELOW))]
        passes = _passes(node) and not any(one.find(exp.Window) for one in expressions)
        return Block(
            projections=list(node.expressions),
            where=None if where is None else where.this,
            sources=tables.sources,
            tree=tables.tree,
            passes=passes,
            needs_rows=passes and not node.args.get("order") and all(_is_given(one) for one in node.expressions),
            inner=self.within(expressions, visible),
            reader=self._reader,
        )


class _From:
    """The FROM clause of one block."""

    def __init__(self, queries: Queries, visible: _Visible) -> None:
        self.sources: list[BlockSource] = []
        self.tree: Tree | None = None
        self.conditions: list[exp.Expr] = []
        self._queries = queries
        self._visible = visible

    def joined(self, first: Tree, joins: list[exp.Expr]) -> Tree:
        """Joins bind more tightly than commas: `a, b LEFT JOIN c` is a beside what b and c are together."""
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
            result: Scope = hidden(node, self._visible)  # a join with a name
        else:
            result = self._result(node)
        name, columns = _alias(node)
        if name is None and isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
            name = canonical_name(node.name)
        self.sources.append(BlockSource(RenamedColumns(result, columns) if columns else result, name))
        return self.joined(len(self.sources) - 1, joins)

    def _result(self, node: exp.Expr) -> Scope:
        match node:
            case exp.Table():
                return self._table(node)
            case exp.Subquery():
                return self._queries.read(node, self._visible)
            case exp.Unnest() | exp.Lateral() | exp.Values():
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
        past = version is not None and not is_snapshot(version)
        if named is not None or sample is not None or past or any("$" in one or "@" in one for one in names):
            return hidden(node, self._visible)
        catalog, schema, table = (None, None, *names)[-3:]
        # What columns the table had at an earlier snapshot is not known here.
        columns = None if version is not None else self._queries.columns_of((catalog, schema, str(table)))
        self._queries.tables.append(Table(node, columns))
        return self._queries.tables[-1]


def _passes(node: exp.Expr) -> bool:
    """Whether rows without some value of an output column come of source rows without it, and these make no others.

    Groups by plain columns do, and distinct rows: those of one value are made of rows of that value alone. Of sets of
    groups some are made of all rows.
    """
    group = node.args.get("group")
    if _given(node, ("limit", "offset", "windows")) or (group is None and node.args.get("having") is not None):
        return False
    if group is None:
        return True
    keys = group.expressions
    return bool(keys) and not _given(group, set(group.args) - {"expressions"}) and all(type(k) in _KEYS for k in keys)


def _is_given(projection: exp.Expr) -> bool:
    """A column, a literal or a star: nothing that could make one row of all, or of none."""
    inner = projection.this if isinstance(projection, exp.Alias) else projection
    return type(inner) in (exp.Column, exp.Literal, exp.Star, exp.Null, exp.Boolean)


def is_snapshot(version: exp.Expr) -> bool:
    """FOR VERSION AS OF a number; a text is a branch or a tag."""
    number = version.args.get("expression")
    plain = isinstance(number, exp.Literal) and not number.is_string and str(number.this).isdigit()
    return plain and str(version.this).upper() == "VERSION" and version.args.get("kind") == "AS OF"


def hidden(node: exp.Expr, visible: _Visible) -> Scope:
    """What is not looked into. A name of WITH that may be used in it is read whole."""
    for one in node.find_all(exp.Identifier):
        used = visible.get(one.name.lower())
        if used is not None:
            used.push_down(None)
    return UnknownRelation()


def _is_bracket(node: exp.Expr) -> bool:
    """Around a table or a join, and not around a query."""
    if not isinstance(node, exp.Subquery):
        return False
    inner = node.this
    return isinstance(inner, exp.Table) or (
        isinstance(inner, exp.Subquery) and (_is_bracket(inner) or bool(_given(inner, ("alias", "joins"))))
    )


def _alias(node: exp.Expr) -> tuple[str | None, tuple[str, ...]]:
    """The name and the names of columns that it gives. Raises Unclear."""
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
    """The outermost ones. Raises Unclear for a table that stands in none. A chain of ORs is as deep as it is long."""
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
    """Raises Unclear where it has a part that is not `allowed`."""
    if _given(node, set(node.args) - allowed):
        raise UnsupportedStatement
