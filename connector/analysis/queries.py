"""Converts sqlglot's tree of a query to relations of the algebra (`algebra/`), and collects the stored tables.

A clause that this module does not list makes the whole statement unsupported, because the clause may change which rows
are needed. Some sources are opaque: functions, samples, and tables at an earlier time. No condition is pushed to an
opaque source, and a name in WITH that it uses is read completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeAlias

from sqlglot import exp

from seamark.connector.analysis.algebra.blocks import InnerQuery, QueryBlock
from seamark.connector.analysis.algebra.relations import (
    Columns,
    LiteralRows,
    NamedQuery,
    PushdownBarrier,
    Relation,
    RenamedColumns,
    SetOperation,
    Table,
    UnknownRelation,
    WithClause,
)
from seamark.connector.analysis.conditions import ConditionReader
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.select_names import (
    NamedSource,
    ParsedJoin,
    ParsedTree,
    SelectNames,
    build_join_tree,
    canonicalize_name,
    iter_joins,
    list_sources,
)
from seamark.connector.analysis.select_predicates import InnerSelect, PredicateReader, find_extremes
from seamark.connector.plans.conditions import ColumnReference, any_of

RELATIONS_MAX = 400
"""The maximum number of tables, subqueries and lists of values in a statement.

The time of the analysis grows with the square of the number of sources of one query.
"""
Names: TypeAlias = tuple[str | None, str | None, str]
"""The catalog, schema and table of a reference in lower case. None means the catalog or schema of the session."""
FindColumns: TypeAlias = Callable[[Names], Columns | None]
_Visible: TypeAlias = Mapping[str, NamedQuery]

_ORDER_CLAUSES = ("order", "limit", "offset")
_LATER_CLAUSES = ("group", "having", "limit", "offset", "distinct", "windows")
_SELECT = frozenset(("with_", "expressions", "from_", "joins", "where", "order", *_LATER_CLAUSES))
_SET = frozenset(("with_", "this", "expression", "distinct", *_ORDER_CLAUSES))
_SUBQUERY = frozenset(("with_", "this", "alias", "joins", *_ORDER_CLAUSES))
_TABLE = frozenset(("this", "db", "catalog", "alias", "version", "sample", "joins"))
_JOIN = frozenset(("this", "side", "kind", "on", "using"))
_WITHOUT_NULLS = (exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Count)
"""The aggregates that ignore nulls, and return the same value for no rows as for rows of nulls."""
_AROUND_FILTERED = (
    *(exp.Alias, exp.Paren, exp.Neg, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.Cast, exp.Coalesce, exp.Literal),
)
"""The expressions that may surround aggregates with FILTER in SELECT without using other rows."""
_INNER = frozenset((("", ""), ("", "INNER"), ("", "CROSS")))
_OUTER = {(side, kind): side for side in ("LEFT", "RIGHT", "FULL") for kind in ("", "OUTER")}


def check_relations(tree: exp.Expr) -> None:
    """Check the number of relations in a statement.

    Raises:
        UnsupportedStatement: The statement has more than `RELATIONS_MAX` relations.
    """
    relations = tree.find_all(exp.Table, exp.Select, exp.Values, exp.Unnest)
    if sum(1 for _ in islice(relations, RELATIONS_MAX + 1)) > RELATIONS_MAX:
        raise UnsupportedStatement(f"the statement has more than {RELATIONS_MAX} tables and subqueries")


class Queries:
    """Reads the queries of one statement.

    Attributes:
        tables: The references to stored tables, with their nodes. After `push_down` of the outermost query, each
            table has the condition on its needed rows.
    """

    def __init__(
        self, find_columns: FindColumns, reader: ConditionReader, relation_names: frozenset[str] = frozenset()
    ) -> None:
        self.tables: dict[Table, exp.Table] = {}
        self.find_columns = find_columns
        self._reader = reader
        self._relation_names = relation_names
        self._selects: dict[int, InnerSelect] = {}

    def read(self, node: exp.Expr, visible: _Visible) -> Relation:
        """Return the rows of a query.

        Args:
            node: The query.
            visible: The names in WITH that the query may use.

        Raises:
            UnsupportedStatement: The query has a clause that is not supported.
        """
        read_body: Callable[[exp.Expr, _Visible], Relation]
        match node:
            case exp.Select():
                allowed_arguments, read_body = _SELECT, self._read_select
            case exp.Union() | exp.Except() | exp.Intersect():
                allowed_arguments, read_body = _SET, self._read_set_operation
            case exp.Subquery():
                allowed_arguments, read_body = _SUBQUERY, self._read_subquery
            case exp.Values():
                return self.read_literal_rows(node) or make_opaque_source(node, visible)
            case _:
                raise UnsupportedStatement
        _check_arguments(node, allowed_arguments)
        clause = node.args.get("with_")
        if clause is None:
            return read_body(node, visible)
        _check_arguments(clause, frozenset(("expressions", "recursive")))
        names, queries = dict(visible), []
        for element in clause.expressions:
            _check_arguments(element, frozenset(("this", "alias")))
            name, columns = _parse_alias(element)
            if name is None:
                raise UnsupportedStatement
            if clause.args.get("recursive") and _uses_name(element.this, name):
                # The rows of a recursive query depend on each other, so no condition is pushed to the query.
                itself = NamedQuery(UnknownRelation())
                rows: Relation = PushdownBarrier(self.read(element.this, {**names, name: itself}))
            else:
                rows = self.read(element.this, names)
            queries.append(NamedQuery(RenamedColumns(rows, columns) if columns else rows))
            names[name] = queries[-1]
        return WithClause(read_body(node, names), tuple(queries))

    def read_subqueries(self, expressions: Iterable[exp.Expr], visible: _Visible) -> list[tuple[exp.Expr, Relation]]:
        """Return the subqueries in these expressions, with their nodes."""
        return [(node, self.read(node, visible)) for expression in expressions for node in _find_queries(expression)]

    def read_literal_rows(self, node: exp.Expr) -> LiteralRows | None:
        """Return the rows of VALUES, or of UNNEST of one array, or None if one of the values is not a literal."""
        if _list_arguments(node, set(node.args) - {"this", "alias", "expressions"}):
            return None
        rows: list[list[exp.Expr]]
        if isinstance(node, exp.Values):
            rows = [row.expressions if isinstance(row, exp.Tuple) else [row] for row in node.expressions]
        else:
            (array,) = node.expressions if len(node.expressions) == 1 else (None,)
            if not isinstance(array, exp.Array):
                return None
            rows = [[element] for element in array.expressions]
        columns = [self._reader.read_literals(column) for column in zip(*rows, strict=False)]
        literals = tuple(column for column in columns if column is not None)
        is_complete = len({len(row) for row in rows}) == 1 and len(literals) == len(columns)
        return LiteralRows(literals) if literals and is_complete else None

    def _add_barrier(self, rows: Relation, clauses: list[exp.Expr], visible: _Visible) -> Relation:
        return (
            PushdownBarrier(rows, tuple(query for _, query in self.read_subqueries(clauses, visible)))
            if clauses
            else rows
        )

    def _read_subquery(self, node: exp.Expr, visible: _Visible) -> Relation:
        return self._add_barrier(self.read(node.this, visible), _list_arguments(node, _ORDER_CLAUSES), visible)

    def _read_set_operation(self, node: exp.Expr, visible: _Visible) -> Relation:
        set_operation = SetOperation(self.read(node.this, visible), self.read(node.expression, visible))
        return self._add_barrier(set_operation, _list_arguments(node, _ORDER_CLAUSES), visible)

    def _read_select(self, node: exp.Expr, visible: _Visible) -> Relation:
        """Read one SELECT: its relations, conditions, subqueries and output columns."""
        distinct, where_clause, clause = (node.args.get(name) for name in ("distinct", "where", "from_"))
        if distinct is not None and _list_arguments(distinct, distinct.args):
            raise UnsupportedStatement  # The statement has DISTINCT ON.
        for projection in node.expressions:
            star = projection.this if type(projection) is exp.Column else projection
            if isinstance(projection, exp.Aliases) or (isinstance(star, exp.Star) and _list_arguments(star, star.args)):
                raise UnsupportedStatement
        tables = _FromClause(self, visible)
        if clause is not None:
            _check_arguments(clause, frozenset(("this",)))
            tables.tree = tables.join(tables.parse_relation(clause.this), node.args.get("joins") or [])
        elif node.args.get("joins"):
            raise UnsupportedStatement
        expressions = [*node.expressions, *_list_arguments(node, ("where", "order", *_LATER_CLAUSES))]
        conditions = [join.on for join in tables.joins if join.on is not None]
        windows = list(_find_windows([*expressions, *conditions]))
        passes = _passes_conditions(node)
        subqueries = self.read_subqueries(expressions, visible)
        on_subqueries = [
            (join, self.read_subqueries([join.on], visible)) for join in tables.joins if join.on is not None
        ]
        names = SelectNames(
            [_remove_brackets(projection) for projection in node.expressions],
            tables.sources,
            tables.tree,
            self._relation_names,
            self._reader.read_literal,
        )
        queries = [*subqueries, *(query for _, join_queries in on_subqueries for query in join_queries)]
        predicates = PredicateReader(names, self._reader, {id(query): rows for query, rows in queries}, self._selects)
        keys = frozenset(
            reference for key in _find_grouping_keys(node) if (reference := names.resolve_node(key)) is not None
        )
        having_clause, filters = node.args.get("having"), _list_filter_conditions(node)
        block = QueryBlock(
            sources=[source.relation for source in tables.sources],
            tree=None if tables.tree is None else build_join_tree(tables.tree, predicates.find_join_predicate),
            outputs=names,
            where=None if where_clause is None else predicates.read_predicate(where_clause.this),
            passes_conditions=passes,
            needs_rows=passes
            and not windows
            and not node.args.get("order")
            and all(_uses_one_row(projection) for projection in node.expressions),
            keys=None if node.args.get("group") is None else keys,
            having=None if having_clause is None else predicates.build_condition_on(having_clause.this, keys),
            aggregate_filter=any_of(map(predicates.read_condition, filters)) if filters else None,
            partitions=[_find_partition_columns(window, names) for window in windows],
            extremes=find_extremes(names),
            inner_queries=[
                *(self._make_inner_query(rows, predicates) for _, rows in subqueries),
                *(
                    self._make_inner_query(rows, predicates, list_sources(join))
                    for join, join_queries in on_subqueries
                    for _, rows in join_queries
                ),
                *(self._make_lateral_query(number, tables, predicates) for number in tables.laterals),
            ],
        )
        self._selects[id(block)] = InnerSelect(block, names, None if where_clause is None else where_clause.this)
        return block

    def _make_inner_query(
        self,
        rows: Relation,
        predicates: PredicateReader,
        visible_sources: frozenset[int] | None = None,
        source: int | None = None,
    ) -> InnerQuery:
        """Return the `InnerQuery` of a subquery.

        Args:
            rows: The rows of the subquery.
            predicates: The predicate reader of the outer SELECT.
            visible_sources: The sources of the outer SELECT to which the subquery can refer, or None for all sources.
                Any other name may belong to a query further out.
            source: The position among the sources of a LATERAL subquery. None for any other subquery.
        """
        query = rows.inner if source is not None and isinstance(rows, RenamedColumns) else rows
        select = self._selects.get(id(query))
        if select is None:
            return InnerQuery(rows, source=source)
        pairs = predicates.find_correlated_pairs(select)
        seen_pairs = tuple(pair for pair in pairs if visible_sources is None or pair[1][0] in visible_sources)
        return InnerQuery(rows, select.block, seen_pairs, source)

    def _make_lateral_query(self, number: int, tables: _FromClause, predicates: PredicateReader) -> InnerQuery:
        """Return the `InnerQuery` of the LATERAL subquery that is the source `number`."""
        # In every engine, a LATERAL subquery can refer to the left side of its join. Only in some engines, it can refer
        # to sources before a comma.
        sides = (list_sources(join.left) for join in iter_joins(tables.tree) if join.right == number)
        return self._make_inner_query(tables.sources[number].relation, predicates, next(sides, frozenset()), number)


class _FromClause:
    """The FROM clause of one SELECT.

    Attributes:
        sources: The relations in the clause.
        tree: The joins of the sources as a tree.
        joins: The joins in the order of the text.
        laterals: The positions of LATERAL subqueries among the sources.
    """

    def __init__(self, queries: Queries, visible: _Visible) -> None:
        self.sources: list[NamedSource] = []
        self.tree: ParsedTree | None = None
        self.joins: list[ParsedJoin] = []
        self.laterals: list[int] = []
        self._queries = queries
        self._visible = visible

    def join(self, first: ParsedTree, joins: list[exp.Expr]) -> ParsedTree:
        """Return the tree of a relation and the joins that follow it.

        Joins bind more tightly than commas: `a, b LEFT JOIN c` is the cross product of a with the join of b and c.

        Raises:
            UnsupportedStatement: The type of a join is not supported.
        """
        parts = [first]
        for join in joins:
            _check_arguments(join, _JOIN)
            side, kind = str(join.args.get("side") or "").upper(), str(join.args.get("kind") or "").upper()
            on = join.args.get("on")
            using_columns = [canonicalize_name(column.name) for column in join.args.get("using") or []]
            right = self.parse_relation(join.this)
            if not (side or kind or on or using_columns):
                parts.append(right)
                continue
            outer = _OUTER.get((side, kind))
            if outer is None and (side, kind) not in _INNER:
                raise UnsupportedStatement
            keeps_left, keeps_right = outer in ("LEFT", "FULL"), outer in ("RIGHT", "FULL")
            self.joins.append(ParsedJoin(parts.pop(), right, keeps_left, keeps_right, on, tuple(using_columns)))
            parts.append(self.joins[-1])
        tree = parts[0]
        for part in parts[1:]:
            tree = ParsedJoin(tree, part)
        return tree

    def parse_relation(self, node: exp.Expr) -> ParsedTree:
        """Add a relation in FROM to the sources, and return its tree with the joins that follow it.

        A join in brackets without an alias is parsed like its relations, because their names stay visible.

        Raises:
            UnsupportedStatement: The relation has a form that is not supported.
        """
        joins = node.args.get("joins") or []
        if _is_bracket(node):
            if not _list_arguments(node, set(node.args) - {"this", "joins"}):
                return self.join(self.parse_relation(node.this), joins)
            # A join in brackets with an alias is not analysed.
            rows: Relation = make_opaque_source(node, self._visible)
        else:
            rows = self._read_rows(node)
        name, columns = _parse_alias(node)
        schema = None
        if name is None and isinstance(node, exp.Table) and isinstance(node.this, exp.Identifier):
            name, schema = canonicalize_name(node.name), canonicalize_name(node.db) if node.db else None
        if isinstance(node, exp.Lateral):
            self.laterals.append(len(self.sources))
        self.sources.append(NamedSource(RenamedColumns(rows, columns) if columns else rows, name, schema))
        return self.join(len(self.sources) - 1, joins)

    def _read_rows(self, node: exp.Expr) -> Relation:
        match node:
            case exp.Table():
                return self._read_table(node)
            case exp.Subquery():
                return self._queries.read(node, self._visible)
            case exp.Lateral() if isinstance(node.this, exp.Subquery) and not _list_arguments(
                node, set(node.args) - {"this", "alias"}
            ):
                return self._queries.read(node.this, self._visible)
            case exp.Unnest() | exp.Values():
                return self._queries.read_literal_rows(node) or make_opaque_source(node, self._visible)
            case exp.Lateral():
                return make_opaque_source(node, self._visible)
        raise UnsupportedStatement

    def _read_table(self, node: exp.Table) -> Relation:
        """Return the relation of a table name: a query of WITH, a stored table, or an opaque source.

        An opaque source gives no conditions. Examples are a sample, a table at an earlier time, and a metadata table
        such as `t$files`.

        Raises:
            UnsupportedStatement: The name has a clause that is not supported.
        """
        _check_arguments(node, _TABLE)
        parts = node.parts
        if not all(isinstance(part, exp.Identifier) for part in parts) or len(parts) > 3:
            return make_opaque_source(node, self._visible)
        names = [canonicalize_name(part.name) for part in parts]
        version, sample = node.args.get("version"), node.args.get("sample")
        query = self._visible.get(names[0]) if len(names) == 1 else None
        if query is not None and version is None and sample is None:
            return query
        is_past = version is not None and parse_version(version) is None
        if query is not None or sample is not None or is_past or any("$" in name or "@" in name for name in names):
            return make_opaque_source(node, self._visible)
        # The name may lack the catalog, or the catalog and the schema.
        catalog, schema, table = (None, None, *names)[-3:]
        # The columns of the table at an earlier snapshot are unknown.
        columns = None if version is not None else self._queries.find_columns((catalog, schema, str(table)))
        rows = Table(columns)
        self._queries.tables[rows] = node
        return rows


def _passes_conditions(node: exp.Expr) -> bool:
    """Return whether a condition on an output column can be applied to the source rows.

    It cannot be applied if SELECT has LIMIT, OFFSET or WINDOW, or HAVING without GROUP BY, or if no grouping key is in
    every grouping set.
    """
    if _list_arguments(node, ("limit", "offset", "windows")):
        return False
    if node.args.get("group") is None:
        return node.args.get("having") is None
    return bool(_find_grouping_keys(node))


def _find_grouping_keys(node: exp.Expr) -> list[exp.Expr]:
    """Return the expressions that have a single value in each group.

    With several grouping sets, these are the expressions in every set. If no expression is in every set, one group may
    contain all rows. With GROUP BY ALL or another modifier, the keys are not read, and the list is empty.
    """
    group = node.args.get("group")
    if group is None or _list_arguments(group, set(group.args) - {"expressions"}):
        return []
    return [key for element in group.expressions for key in _find_keys(element, node.expressions)]


def _find_keys(element: exp.Expr, projections: list[exp.Expr]) -> list[exp.Expr]:
    """Return the grouping keys of one element of GROUP BY. For GROUPING SETS, these are the columns in every set.

    Expressions other than columns and numbers of outputs are left out.

    Args:
        element: The element.
        projections: The outputs of SELECT, to which a number in GROUP BY refers.
    """
    match element:
        case exp.Literal():  # The key is the number of an output in SELECT.
            number = int(element.this) if str(element.this).isdigit() else 0
            if not 0 < number <= len(projections) or any(map(_is_star, projections)):
                return []
            return [projections[number - 1].unalias()]
        case exp.GroupingSets():
            sets = [
                [*group.expressions] if isinstance(group, exp.Tuple) else [group.unnest()]
                for group in element.expressions
            ]
            columns = [[key for key in group if type(key) is exp.Column] for group in sets]
            return [key for key in columns[0] if all(key in set_columns for set_columns in columns)] if columns else []
    return [element] if type(element) is exp.Column else []


def _find_partition_columns(window: exp.Window, names: SelectNames) -> frozenset[ColumnReference]:
    keys = map(names.resolve_node, window.args.get("partition_by") or [])
    return frozenset(reference for reference in keys if reference is not None)


def _list_filter_conditions(node: exp.Expr) -> list[exp.Expr]:
    """Return the conditions of FILTER or of CASE in aggregates such that only rows that meet one of them are needed.

    The list is empty if other rows may be needed, or if the rows of the block are grouped.
    """
    if _list_arguments(node, ("group", "having", "order", "windows", "distinct")):
        return []
    conditions: list[exp.Expr] = []
    pending = list(node.expressions)
    while pending:
        part = pending.pop()
        if type(part) is exp.Filter and isinstance(part.this, exp.AggFunc):
            conditions.append(part.expression.this)
        elif branches := _find_case_conditions(part):
            conditions += branches
        elif type(part) in _AROUND_FILTERED:
            pending += [
                inner for inner in part.iter_expressions() if not isinstance(inner, exp.DataType | exp.Identifier)
            ]
        else:
            return []
    return conditions


def _find_case_conditions(aggregate: exp.Expr) -> list[exp.Expr]:
    """Return the conditions in an aggregate such as `sum(CASE WHEN … THEN … END)`.

    CASE is null for rows that meet none of the conditions, and the aggregate ignores nulls. The list is empty for any
    other expression.
    """
    if type(aggregate) is exp.CountIf:
        return [aggregate.this]
    if type(aggregate) not in _WITHOUT_NULLS or _list_arguments(aggregate, set(aggregate.args) - {"this", "big_int"}):
        return []
    value = aggregate.this
    if value is None:  # The aggregate is count() without an argument.
        return []
    if isinstance(value, exp.Distinct):
        if _list_arguments(value, ("on",)) or len(value.expressions) != 1:
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
    conditions = [branch.this for branch in value.args["ifs"]]
    if value.this is None:
        return conditions
    if len(conditions) == 1:
        return [exp.EQ(this=value.this.copy(), expression=conditions[0].copy())]
    return [exp.In(this=value.this.copy(), expressions=[value.copy() for value in conditions])]


def _remove_brackets(projection: exp.Expr) -> exp.Expr:
    """Return a projection without brackets around a column, because `(a)` has the name of the column `a`."""
    alias = projection if isinstance(projection, exp.Alias) else None
    inner = projection if alias is None else alias.this
    column = inner.unnest()
    if type(column) is not exp.Column or column is inner:
        return projection
    return column if alias is None else exp.Alias(this=column.copy(), alias=alias.args["alias"])


def _is_star(projection: exp.Expr) -> bool:
    return isinstance(projection.this if type(projection) is exp.Column else projection, exp.Star)


def _find_windows(expressions: Iterable[exp.Expr]) -> Iterator[exp.Window]:
    """Yield the window functions of a block, without those of its subqueries."""
    pending = list(expressions)
    while pending:
        node = pending.pop()
        if isinstance(node, exp.Window):
            yield node
        if not isinstance(node, exp.Select | exp.SetOperation | exp.Subquery):
            pending.extend(node.iter_expressions())


def _uses_one_row(projection: exp.Expr) -> bool:
    """Return whether an output is computed from one row: a column, a literal or a star."""
    inner = projection.this if isinstance(projection, exp.Alias) else projection
    return type(inner) in (exp.Column, exp.Literal, exp.Star, exp.Null, exp.Boolean)


def parse_version(version: exp.Expr) -> int | str | None:
    """Return the snapshot id, or the name of the branch or tag, in FOR VERSION AS OF.

    Return None for any other version.
    """
    literal = version.args.get("expression")
    if not isinstance(literal, exp.Literal) or str(version.this).upper() != "VERSION":
        return None
    if version.args.get("kind") != "AS OF":
        return None
    if literal.is_string:
        return str(literal.this) or None
    return int(literal.this) if str(literal.this).isdigit() else None


def make_opaque_source(node: exp.Expr, visible: _Visible) -> Relation:
    """Return a source about which nothing is known. No condition is pushed to the WITH queries that it may use.

    Args:
        node: The relation. Any name in it may be the name of a query in WITH.
        visible: The queries of the WITH clause, by name.
    """
    for identifier in node.find_all(exp.Identifier):
        query = visible.get(identifier.name.lower())
        if query is not None:
            query.push_down(None)
    return UnknownRelation()


def _uses_name(query: exp.Expr, name: str) -> bool:
    """Return whether a relation in the query may refer to this name in WITH."""
    return any(len(table.parts) == 1 and table.name.lower() == name for table in query.find_all(exp.Table))


def _is_bracket(node: exp.Expr) -> bool:
    """Return whether a node is brackets around a table or a join, and not around a query."""
    if not isinstance(node, exp.Subquery):
        return False
    inner = node.this
    return isinstance(inner, exp.Table) or (
        isinstance(inner, exp.Subquery) and (_is_bracket(inner) or bool(_list_arguments(inner, ("alias", "joins"))))
    )


def _parse_alias(node: exp.Expr) -> tuple[str | None, tuple[str, ...]]:
    """Return the alias of a relation, or None, and the aliases of its columns.

    Raises:
        UnsupportedStatement: The alias has an unsupported form.
    """
    alias = node.args.get("alias")
    if alias is None:
        return None, ()
    if not isinstance(alias, exp.TableAlias):
        raise UnsupportedStatement
    _check_arguments(alias, frozenset(("this", "columns")))
    columns = alias.args.get("columns") or []
    if not all(isinstance(name, exp.Identifier) for name in (alias.this, *columns)):
        raise UnsupportedStatement
    return canonicalize_name(alias.name), tuple(canonicalize_name(column.name) for column in columns)


def _find_queries(expression: exp.Expr) -> Iterator[exp.Expr]:
    """Yield the outermost queries in an expression.

    The function is not recursive, because sqlglot parses a long chain of ORs into a tree with as many levels.

    Raises:
        UnsupportedStatement: The expression has a table outside of a query.
    """
    pending = [expression]
    while pending:
        node = pending.pop()
        if isinstance(node, exp.Select | exp.SetOperation | exp.Subquery):
            yield node
        elif isinstance(node, exp.Table):
            raise UnsupportedStatement
        else:
            pending.extend(node.iter_expressions())


def _list_arguments(node: exp.Expr, names: Iterable[str]) -> list[exp.Expr]:
    """Return the values of a node's arguments with these names. Empty values are left out."""
    values = []
    for name in names:
        value = node.args.get(name)
        values += value if isinstance(value, list) else [value] if value else []
    return values


def _check_arguments(node: exp.Expr, allowed_names: frozenset[str]) -> None:
    """Check that a node has only allowed arguments.

    Raises:
        UnsupportedStatement: The node has an argument that is not in `allowed_names`.
    """
    if _list_arguments(node, set(node.args) - allowed_names):
        raise UnsupportedStatement
