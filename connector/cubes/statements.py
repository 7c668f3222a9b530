"""Translates an aggregate query of an engine so that it reads groups of a cube instead of rows.

The table is replaced by a union: the groups of the files that the cube covers, and the rows of the other files, each as
a group of one row. In the union, only dimensions and partial aggregates are columns. Each aggregate becomes a
combination of partial aggregates. All other parts of the query stay, so the engine itself evaluates conditions,
groupings, HAVING and ORDER BY.

A cube can answer a query only if each node of the query is in `_SUPPORTED`: an unknown function may be an aggregate.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlglot import exp

from seamark.connector.cubes.attributes import list_qualifiers, list_sources
from seamark.connector.cubes.dialects import CubeDialect, NotFromCube
from seamark.connector.cubes.grouping_sets import check_grouping_sets
from seamark.connector.cubes.stars import Star, StarAttribute, StarJoin, StarNames, flatten_joins
from seamark.connector.cubes.times import TimeDimension, replace_times
from seamark.connector.cubes.written_forms import check_written_form
from seamark.formats.iceberg.types.schema import Column, Schema, StructType, is_primitive
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.keys.measures import (
    APPROX_DISTINCT,
    AVG,
    COUNT,
    COUNT_ROWS,
    MAX,
    MIN,
    SUM,
    ColumnOperand,
    Measure,
    NumberOperand,
    Operand,
    Partial,
    format_operand,
    list_columns,
    list_partials,
    make_operation,
)
from seamark.formats.runtime.errors import BadRequest

PREFIX = "seamark_"
"""The prefix of the union's columns that are not columns of the table."""
_FUNCTIONS: dict[type[exp.Expr], str] = {
    **{exp.Count: COUNT, exp.Sum: SUM, exp.Avg: AVG, exp.Min: MIN, exp.Max: MAX},
    exp.ApproxDistinct: APPROX_DISTINCT,
}
_SIGNS: dict[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*"}
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", re.ASCII)
_TIME = re.compile(rf"{_DATE.pattern}(?: [0-9]{{2}}:[0-9]{{2}}(?::[0-9]{{2}}(?:\.[0-9]{{1,6}})?)?)?", re.ASCII)
_SUPPORTED: tuple[type[exp.Expr], ...] = (
    *(exp.Select, exp.Where, exp.Group, exp.Having, exp.Order, exp.Ordered, exp.Limit, exp.Offset, exp.Fetch),
    *(exp.Distinct, exp.Rollup, exp.Cube, exp.GroupingSets, exp.Grouping, exp.Alias, exp.Identifier, exp.Column),
    *(exp.Paren, exp.Tuple, exp.Literal, exp.Boolean, exp.Null, exp.Var, exp.DataType, exp.DataTypeParam),
    *(exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Is, exp.In, exp.Between),
    *(exp.NullSafeEQ, exp.NullSafeNEQ, exp.Like, exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg),
    *(exp.Case, exp.If, exp.Coalesce, exp.Nullif, exp.Cast, exp.Abs, exp.Lower, exp.Upper, exp.Length, exp.Substring),
    *(exp.Trim, exp.Extract, exp.Year, exp.Quarter, exp.Month, exp.Day, exp.DayOfMonth, exp.DayOfYear, exp.Hour),
    *(exp.TsOrDsToDate, exp.DateTrunc, exp.TimestampTrunc, exp.Interval, exp.CurrentDate, exp.CurrentTimestamp),
    *(exp.Count, exp.CountIf, exp.Sum, exp.Avg, exp.Min, exp.Max, exp.ApproxDistinct, exp.Filter, exp.Star),
)


_TABLE_ARGS = {"this", "db", "catalog", "alias", "version", "when"}
_ROW_CONDITIONS = frozenset(
    {exp.And, exp.Or, exp.Not, exp.Paren, exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.In, exp.Between}
    | {exp.Like, exp.Column, exp.Identifier, exp.Literal, exp.Boolean, exp.Neg, exp.Cast, exp.DataType}
    | {exp.DataTypeParam}
)
"""The nodes of conditions on rows. Each of them is null only if one of its operands is null."""


@dataclass(frozen=True)
class CubeTable:
    """A table with cubes.

    Attributes:
        schema: The schema with which a query reads the table.
        cubes: The cubes that plans use.
        truncates_zoned_times_in_utc: Whether the engine truncates times with a zone in UTC, as cubes do.
    """

    schema: Schema
    cubes: tuple[IndexDefinition, ...]
    truncates_zoned_times_in_utc: bool = True


@dataclass(frozen=True)
class CubeStatement:
    """A query over the groups of a cube and the rows of other files.

    Attributes:
        cube: The cube.
        columns: The columns of entries that the query uses, in the order of the entries.
        row_condition: A condition on rows that cannot be evaluated on groups, or an empty text. A file is answered from
            the cube only if all its rows meet the condition.
        negated_row_condition: A condition that is true for each row for which `row_condition` is false or null.
        alias: The name of the table in the conditions.
        joins: The dimension tables that attributes in the cube replace.
        has_sketches: Whether the query uses sketches of distinct values.
    """

    cube: IndexDefinition
    columns: tuple[str, ...]
    row_condition: str
    negated_row_condition: str
    alias: str
    _tree: exp.Select
    _dialect: CubeDialect
    _outputs: Mapping[str, _Output]
    _condition_ids: frozenset[int]
    joins: tuple[StarJoin, ...] = ()
    has_sketches: bool = False

    @property
    def needs_all_files(self) -> bool:
        """Whether the cube must cover all files, because the engine cannot add rows to sketches."""
        return self.has_sketches and not self._dialect.sketches_rows

    @property
    def used_columns(self) -> frozenset[int]:
        """The field ids of the table's columns that the query reads."""
        measured_ids = (number for column in self.columns for number in self._outputs[column].column_ids)
        return self._condition_ids | frozenset(measured_ids)

    def write(self, groups: str, rows: str | None, names: Sequence[str] = (), *, has_rows: bool = True) -> str:
        """Return the query in the engine's SQL.

        Args:
            groups: The relation with the groups. It has the columns in `columns`.
            rows: The relation with the rows of the other files, or None if the cube covers all files.
            has_rows: Whether there are such rows. If not, the query still refers to `rows` with the condition FALSE,
                and so keeps its names and types, but reads no row.
            names: The names of the result's columns. By default, expressions have the names that the engine gives them.
        """
        union_names = [self._outputs[column].name for column in self.columns]
        quote = self._dialect.quote_name
        from_groups = ", ".join(
            f"{self._outputs[column].write_group(column)} AS {quote(name)}"
            for column, name in zip(self.columns, union_names, strict=True)
        )
        union = f"SELECT {from_groups} FROM {groups}"  # noqa: S608
        if rows is not None:
            values = ", ".join(self._outputs[column].row for column in self.columns)
            union += f" UNION ALL SELECT {values} FROM {rows} AS {quote(self.alias)}"  # noqa: S608
            union += "".join(join.text for join in self.joins)
            conditions = [*([self.row_condition] if self.row_condition else []), *([] if has_rows else ["FALSE"])]
            union += f" WHERE {' AND '.join(conditions)}" if conditions else ""
        tree = self._tree.copy()
        for name, item in zip(names, list(tree.expressions), strict=False):
            if item.alias_or_name != name:
                item.replace(exp.alias_(item.unalias().copy(), name, quoted=True))
        tree.set("from_", exp.From(this=exp.Var(this=f"({union}) AS {quote(self.alias)}")))
        return str(tree.sql(dialect=self._dialect.name, comments=False))


@dataclass(frozen=True)
class _Output:
    """A column of `groups UNION ALL rows`: the groups of the cube and the rows of files that it does not cover.

    Attributes:
        name: The name in the union.
        row: The SQL of the value for one row.
        kind: The type to which the value of a group is cast, or an empty text.
        column_ids: The field ids of the table's columns in `row`.
    """

    name: str
    row: str
    kind: str
    column_ids: frozenset[int]

    def write_group(self, column: str) -> str:
        return f"CAST({column} AS {self.kind})" if self.kind else column


@dataclass(frozen=True)
class _Dimension:
    """A dimension of the cube: the name of its column in the cube's entries, and the column of the table."""

    entry_column: str
    column: Column
    transform: str


def translate_statement(
    tree: exp.Expr, table: CubeTable, dialect: CubeDialect, *, floats: bool = True, star: Star | None = None
) -> CubeStatement:
    """Rewrite a query so that it reads the smallest cube that can answer it.

    The smallest cube is the cube with the fewest dimensions.

    Args:
        tree: The query, in the engine's dialect. It is not changed.
        table: The table on which the cubes are. In a star join, it is the fact table.
        dialect: The engine.
        floats: Whether sums of floats, and averages that are floats, may be used. Their last digits depend on the order
            of the additions.
        star: The tables of a star join. By default, the query reads one table.

    Raises:
        NotFromCube: No cube can answer the query. The message has the reason for each cube.
    """
    if not table.cubes:
        raise NotFromCube("the table has no cube")
    select = dialect.prepare(require_grouping_select(tree, joins=star is not None))
    check_written_form(select, dialect)
    select = select if star is None else flatten_joins(select)
    names = None if star is None else star.bind_names(select)
    reasons = []
    for cube in sorted(table.cubes, key=lambda cube: (len(cube.terms), len(cube.measures), cube.name)):
        try:
            return _Translation(select, table, cube, dialect, star, names, floats=floats).run()
        except (NotFromCube, BadRequest) as error:
            reasons.append(f"{cube.name}: {error}")
        except RecursionError:
            reasons.append(f"{cube.name}: the query is nested too deeply")
    raise NotFromCube("; ".join(reasons)[:1000])


def require_grouping_select(tree: exp.Expr, *, joins: bool = False) -> exp.Select:
    """Return the query if it is one SELECT of tables that groups rows.

    Args:
        tree: The query.
        joins: Whether it may read several tables.

    Raises:
        NotFromCube: The query has another form.
    """
    sources = list_sources(tree)
    if (
        not isinstance(tree, exp.Select)
        or not all(isinstance(source, exp.Table) for source in sources)
        or any(tree.args.get(name) for name in ("with_", "laterals", "sample"))
        or (len(sources) > 1 and not joins)
        or sum(1 for _ in tree.find_all(exp.Query)) > 1
    ):
        raise NotFromCube(
            "the query is not one SELECT of one table" if not joins else "the query is not one SELECT of tables"
        )
    for source in sources:
        assert source is not None
        if {name for name, value in source.args.items() if value} - _TABLE_ARGS:
            raise NotFromCube("the query does not read the whole table")
        alias = source.args.get("alias")
        if alias is not None and alias.columns:
            raise NotFromCube("the query renames the columns of the table")
    if tree.find(exp.Window) is not None:
        raise NotFromCube("the query has a window function")
    if any(isinstance(item.this if isinstance(item, exp.Column) else item, exp.Star) for item in tree.expressions):
        raise NotFromCube("the query selects all columns")
    has_aggregate = any(item.find(exp.AggFunc) is not None for item in tree.expressions)
    if not (tree.args.get("group") or tree.args.get("distinct") or has_aggregate):
        raise NotFromCube("the query does not group rows")
    return tree


def find_source(select: exp.Select) -> exp.Table:
    """Return the table of a query that `require_grouping_select` has accepted."""
    source = select.args["from_"].this
    assert isinstance(source, exp.Table)
    return source


class _Translation:
    """The translation of one query over one cube."""

    def __init__(
        self,
        select: exp.Select,
        table: CubeTable,
        cube: IndexDefinition,
        dialect: CubeDialect,
        star: Star | None,
        star_names: StarNames | None,
        *,
        floats: bool,
    ) -> None:
        self._select, self._cube, self._dialect, self._floats = select, cube, dialect, floats
        schema = table.schema
        self._schema = schema
        columns = list(_list_columns(schema))
        self._columns = dict(columns)
        """The columns and fields of structs, by their path in lower case."""
        self._names = {field.name.lower() for field in schema.fields}
        self._star_names = star_names
        self._alias = find_source(select).alias_or_name
        self._qualifiers = {
            name.name.lower()
            for source in list_sources(select)
            if isinstance(source, exp.Table)
            for name in list_qualifiers(source)
        }
        dimension_columns: frozenset[str] = frozenset()
        if star is not None and star_names is not None:
            self._alias = star_names.aliases[star.facts]
            dimension_columns = star_names.dimension_columns
            self._names |= dimension_columns
        self._attributes: dict[str, StarAttribute] = {}
        self._aliases = {item.alias.lower(): item.this for item in select.expressions if isinstance(item, exp.Alias)}
        if any(name.startswith(PREFIX) for name in self._names) or len(self._columns) < len(columns):
            raise NotFromCube("the table has names that differ only in case, or begin with " + PREFIX)
        by_id = {column.id: column for column in self._columns.values()}
        dimensions = [
            _Dimension(f"d{number}", by_id[term.column_id], term.transform)
            for number, term in enumerate(cube.terms)
            if term.column_id in by_id and by_id[term.column_id].type == term.source
            if parse_lookup(term.transform) is None
        ]
        self._dimensions = {
            dimension.column.name.lower(): dimension for dimension in dimensions if dimension.transform == IDENTITY
        }
        self._times = {
            TimeDimension(
                tuple(time.column.name.lower().split(".")), time.transform, time.column.type == "timestamptz"
            ): time
            for time in dimensions
            if time.transform != IDENTITY
            and time.column.name.lower() not in self._dimensions
            and time.column.name.lower() not in dimension_columns
            and (star is None or "." not in time.column.name)
            and (table.truncates_zoned_times_in_utc or time.column.type != "timestamptz")
        }
        self._partials = {
            partial.text: f"m{number}"
            for number, partial in enumerate(list_partials(cube.measures))
            if all(
                column.column_id in by_id and by_id[column.column_id].type == column.kind
                for column in list_columns(partial.operand)
            )
        }
        self._used_outputs: dict[str, _Output] = {}
        self._has_sketches = False

    def run(self) -> CubeStatement:
        """Translate the query, or raise `NotFromCube` if the cube cannot answer it."""
        values = [item.unnest() for item in self._select.expressions]
        names = [value.name if isinstance(value, exp.Column) else "" for value in values]
        tree = replace_times(self._select, list(self._times))
        assert isinstance(tree, exp.Select)
        joins: list[StarJoin] = []
        if self._star_names is not None:
            joins, self._attributes = self._star_names.replace(tree, self._cube, self._dialect.quote_name, self._name)
        tree.set("from_", None)
        tree.set("joins", None)
        self._check_aliases()
        check_grouping_sets(self._select, self._find_path)
        row_conditions = self._split_condition(tree)
        self._visit(tree)
        for name, item in zip(names, list(tree.expressions), strict=True):
            if name and item.unnest().name != name:
                item.replace(exp.alias_(item.copy(), name, quoted=True))
        if not self._used_outputs:  # The groups must have at least one column, so they get their numbers of rows.
            self._add_partial(COUNT_ROWS)
        columns = sorted(self._used_outputs, key=lambda column: (column[0], int(column[1:])))
        paths = dict.fromkeys(path for row_condition in row_conditions for path in self._list_paths(row_condition))
        condition = " AND ".join(
            f"({row_condition.sql(dialect=self._dialect.name, comments=False)})" for row_condition in row_conditions
        )
        nulls = "".join(f" OR {self._write_path(self._columns[path].name)} IS NULL" for path in paths)
        return CubeStatement(
            self._cube,
            tuple(columns),
            condition,
            f"NOT ({condition}){nulls}" if condition else "",  # True for rows that do not meet the condition.
            self._alias,
            tree,
            self._dialect,
            self._used_outputs,
            frozenset(self._columns[path].id for path in paths),
            tuple(joins),
            self._has_sketches,
        )

    def _split_condition(self, tree: exp.Select) -> list[exp.Expr]:
        """Leave the conditions on groups in WHERE, and return the conditions on rows.

        Raises:
            NotFromCube: A condition is not supported.
        """
        where_clause = tree.args.get("where")
        if where_clause is None:
            return []
        on_groups, on_rows = [], []
        pairs = zip(_split(where_clause.this), _split(self._select.args["where"].this), strict=True)
        for condition, original in pairs:
            used_columns, holder = dict(self._used_outputs), exp.Paren(this=condition.copy())
            try:
                self._visit(holder)
            except NotFromCube as error:
                self._used_outputs = used_columns
                self._check_row_condition(original, error)
                on_rows.append(original)
            else:
                on_groups.append(condition.copy())
        tree.set("where", exp.Where(this=exp.and_(*on_groups, copy=False)) if on_groups else None)
        return on_rows

    def _check_row_condition(self, condition: exp.Expr, error: NotFromCube) -> None:
        """Check that a condition is null only if one of its columns is null.

        Raises:
            NotFromCube: The condition is not supported. The reason is `error`.
        """
        nodes = list(condition.walk())
        if not all(type(node) in _ROW_CONDITIONS and not node.args.get("query") for node in nodes):
            raise error
        for node in nodes:
            if isinstance(node, exp.Cast):
                self._check_literal(node)
        if not all(path in self._columns for path in self._list_paths(condition)):
            raise error

    def _list_paths(self, condition: exp.Expr) -> list[str]:
        """Return the paths of the columns of a condition. An empty path is an unknown column."""
        return [self._find_path(column) or "" for column in condition.find_all(exp.Column)]

    def _check_aliases(self) -> None:
        """Check that no name can refer to both an output and a column, because engines resolve such names differently.

        Without an alias, a column or a field of a struct is an output with the same name.

        Raises:
            NotFromCube: A name is ambiguous.
        """
        ambiguous_names = set[str]()
        for item in self._select.expressions:
            value = item.unalias().unnest()
            if isinstance(item, exp.Alias) or isinstance(value, exp.Column):
                name = (item.alias if isinstance(item, exp.Alias) else value.name).lower()
                if name in self._names and not self._is_column(value, name):
                    ambiguous_names.add(name)
        for column in self._select.find_all(exp.Column):
            if len(column.parts) == 1 and (column.name.lower() in ambiguous_names or self._may_be_cast(column)):
                raise NotFromCube(f"{column.name} may be an output or a column")

    def _may_be_cast(self, column: exp.Column) -> bool:
        """Return whether a name in ORDER BY or HAVING may be a cast in SELECT, to which Spark gives this name."""
        if self._dialect.name != "spark" or column.find_ancestor(exp.Order, exp.Having) is None:
            return False
        values = [item.unnest() for item in self._select.expressions]
        return any(
            isinstance(value, exp.Cast)
            and value != column.parent
            and isinstance(value.this.unnest(), exp.Column)
            and value.this.unnest().name.lower() == column.name.lower()
            for value in values
        )

    def _is_column(self, value: exp.Expr, name: str) -> bool:
        """Return whether a value is the column with this lower-case name, and not a field of a struct."""
        if not isinstance(value, exp.Column):
            return False
        names = [part.name.lower() for part in value.parts]
        return names == [name] or (len(names) == 2 and names[0] in self._qualifiers and names[1] == name)

    # Nodes

    def _visit(self, node: exp.Expr) -> None:
        """Replace the columns and aggregates below a node.

        Raises:
            NotFromCube: The cube cannot answer a part of the query.
        """
        if not isinstance(node, _SUPPORTED) or node.args.get("query"):
            raise NotFromCube(f"{_describe(node)} is not supported over a cube")
        if isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal) and node.this.is_string:
            self._check_literal(node)
        if isinstance(node, exp.Filter | exp.AggFunc) and not isinstance(node, exp.Grouping):
            node.replace(exp.Var(this=self._aggregate(node)))
            return
        if isinstance(node, exp.Column):
            self._replace_column(node)
            return
        for child in list(node.iter_expressions()):
            self._visit(child)

    def _check_literal(self, node: exp.Cast) -> None:
        """Check that a literal with a type is written as it was read.

        sqlglot reads `DECIMAL '1.5'` as a cast, which rounds in Trino. sqlglot also drops the zone of a time.

        Raises:
            NotFromCube: The literal is not a plain date or time.
        """
        kind, text = node.to.this, str(node.this.this) if isinstance(node.this, exp.Literal) else ""
        if kind == exp.DType.DATE and _DATE.fullmatch(text):
            return
        if kind in (exp.DType.TIMESTAMP, exp.DType.TIMESTAMPNTZ, *self._dialect.time_literals) and _TIME.fullmatch(
            text
        ):
            return
        raise NotFromCube(f"{_describe(node)} is not supported over a cube")

    def _replace_column(self, node: exp.Column) -> None:
        dimension = self._find_dimension(node)
        if dimension is None:
            if len(node.parts) == 1 and node.name.lower() in self._aliases and node.name.lower() not in self._names:
                return  # The name of an output, whose expression is checked in SELECT.
            raise NotFromCube(f"{_describe(node)} is not a dimension")
        name = self._use_dimension(dimension)
        node.replace(exp.column(exp.to_identifier(name, quoted=True), exp.to_identifier(self._alias, quoted=True)))

    def _find_dimension(self, node: exp.Column) -> _Dimension | StarAttribute | None:
        path = self._find_path(node)
        if path is None:
            return None
        if path in self._attributes:
            return self._attributes[path]
        hidden = next((one for time, one in self._times.items() if ".".join(time.hidden_path) == path), None)
        return hidden or self._dimensions.get(path)

    def _find_path(self, node: exp.Column) -> str | None:
        """Return the lower-case path of a column or field, or None for other nodes. Refuse an ambiguous path."""
        if not all(isinstance(part, exp.Identifier) for part in node.parts):
            return None
        parts = [part.name.lower() for part in node.parts]
        # A name with "\0" was put into the query by this package. Its dots do not separate the fields of a struct.
        if any("." in part and "\0" not in part for part in parts):
            raise NotFromCube(f"{_describe(node)} has a name with a dot, which may be a field of a struct")
        if parts[0] in self._names and not self._qualifiers.isdisjoint(parts[:-1]):
            raise NotFromCube(f"{parts[0]} is ambiguous: it may be the table or a column")
        if len(parts) > 1 and parts[0] == self._alias.lower():
            parts = parts[1:]
        return ".".join(parts)

    def _use_dimension(self, dimension: _Dimension | StarAttribute) -> str:
        """Add the output column of a dimension to the columns that the query needs, and return its name."""
        if isinstance(dimension, StarAttribute):
            kind = self._dialect.name_type(dimension.kind)
            output = _Output(PREFIX + dimension.entry_column, dimension.row_sql, kind, frozenset({dimension.key_id}))
            return self._used_outputs.setdefault(dimension.entry_column, output).name
        column, kind = dimension.column, str(dimension.column.type)
        is_plain_column = "." not in column.name and dimension.transform == IDENTITY
        name = self._name(column.name) if is_plain_column else PREFIX + dimension.entry_column
        row = self._write_path(column.name)
        if dimension.transform != IDENTITY:
            row = self._dialect.truncate(dimension.transform, row, kind)
        output = _Output(name, row, self._dialect.name_type(kind), frozenset({column.id}))
        return self._used_outputs.setdefault(dimension.entry_column, output).name

    def _name(self, name: str) -> str:
        return name.lower() if self._dialect.lowers_names else name

    def _write_path(self, path: str) -> str:
        names = [self._name(part) for part in path.split(".")]
        if self._star_names is not None:
            names.insert(0, self._alias)
        return ".".join(map(self._dialect.quote_name, names))

    # Aggregates

    def _aggregate(self, node: exp.Expr) -> str:
        """Return an aggregate in the engine's SQL.

        Raises:
            NotFromCube: The aggregate cannot be computed from the cube.
        """
        filter_clause = ""
        aggregate = node
        if isinstance(node, exp.Filter):
            aggregate = node.this
            condition = node.expression.this
            self._visit(condition)
            filter_clause = f" FILTER (WHERE {node.expression.this.sql(dialect=self._dialect.name, comments=False)})"
        if isinstance(aggregate, exp.CountIf):
            if filter_clause:
                raise NotFromCube(f"{_describe(node)} is not supported over a cube")
            self._visit(aggregate.this)
            condition_sql = aggregate.this.sql(dialect=self._dialect.name, comments=False)
            return self._dialect.count_if(self._add_partial(COUNT_ROWS), condition_sql)
        if type(aggregate) not in _FUNCTIONS:
            raise NotFromCube(f"{_describe(node)} is not supported over a cube")
        if {name for name, value in aggregate.args.items() if value} - {"this", "big_int"}:
            # The two smallest values of `min(x, 2)` may be equal, but groups have each value once.
            raise NotFromCube(f"{_describe(aggregate)} is not supported over a cube")
        measure = self._to_measure(aggregate)
        if measure is not None and all(partial.text in self._partials for partial in measure.partials):
            return self._combine(measure, filter_clause)
        if isinstance(aggregate, exp.Sum) and aggregate.this == exp.Literal.number(1):
            return self._dialect.count_as_sum(self._add_partial(COUNT_ROWS), filter_clause)
        if isinstance(aggregate, exp.Count) and (dimension := self._find_counted_dimension(aggregate)) is not None:
            name = f"{self._dialect.quote_name(self._alias)}.{self._dialect.quote_name(self._use_dimension(dimension))}"
            rows = self._add_partial(COUNT_ROWS)
            count_sql = f"CASE WHEN {name} IS NULL THEN 0 ELSE {rows} END"
            return self._dialect.combine(Measure(COUNT, None), [count_sql], filter_clause)
        is_distinct = isinstance(aggregate.this, exp.Distinct)
        if isinstance(aggregate, exp.Count | exp.Sum | exp.Avg) and not is_distinct:
            raise NotFromCube(f"{_describe(aggregate)} is not a measure of the cube")
        # The minimum, the maximum, and the distinct values of dimensions follow from the groups.
        for child in list(aggregate.iter_expressions()):
            self._visit(child)
        return f"{aggregate.sql(dialect=self._dialect.name, comments=False)}{filter_clause}"

    def _find_counted_dimension(self, aggregate: exp.Count) -> _Dimension | StarAttribute | None:
        """Return the dimension of `count(dimension)`, or None for another argument."""
        argument = aggregate.this
        if not isinstance(argument, exp.Column):
            return None
        return self._find_dimension(argument)

    def _to_measure(self, node: exp.Expr) -> Measure | None:
        """Return an aggregate as a measure, or None if it has DISTINCT or an argument that no measure can have."""
        if isinstance(node.this, exp.Distinct):
            return None
        if isinstance(node, exp.Count) and (isinstance(node.this, exp.Star) or _is_constant(node.this)):
            return Measure(COUNT, None)
        operand = self._to_operand(node.this)
        return None if operand is None else Measure(_FUNCTIONS[type(node)], operand)

    def _to_operand(self, node: exp.Expr) -> Operand | None:
        match node:
            case exp.Paren():
                return self._to_operand(node.this)
            case exp.Column():
                path = self._find_path(node)
                column = None if path is None else self._columns.get(path)
                if column is None or not isinstance(column.type, str):
                    return None
                return ColumnOperand(column.id, column.name, column.type)
            case exp.Literal() if not node.is_string and _is_plain_number(str(node.this)):
                return NumberOperand(str(node.this))
        sign = _SIGNS.get(type(node))
        if sign is None:
            return None
        left, right = (self._to_operand(side) for side in (node.this, node.expression))
        return None if left is None or right is None else make_operation(sign, left, right)

    def _combine(self, measure: Measure, filter_clause: str) -> str:
        if not self._floats and self._dialect.adds_floats(measure):
            raise NotFromCube(f"{measure.text} adds floats, which the session excludes")
        if not self._floats and measure.function == APPROX_DISTINCT:
            raise NotFromCube(f"{measure.text} is estimated differently by the engine; the session excludes estimates")
        columns = [self._add_partial(partial) for partial in measure.partials]
        return self._dialect.combine(measure, columns, filter_clause)

    def _add_partial(self, partial: Partial) -> str:
        """Add a partial aggregate to the used columns of the cube, and return its column in the engine's SQL.

        The column is in `groups UNION ALL rows`. For a row that is not in the cube, its value is the partial aggregate
        of the single row. The method also records that the query uses sketches.
        """
        entry_column = self._partials[partial.text]
        kind = self._dialect.find_partial_type(partial)
        ids = frozenset(column.column_id for column in list_columns(partial.operand))
        row_sql = "1"
        if partial.operand is not None:
            row_sql = format_operand(partial.operand, lambda column: self._write_column(column.column_id))
            if partial.function == COUNT:
                row_sql = f"CASE WHEN {row_sql} IS NULL THEN 0 ELSE 1 END"
            if partial.function == APPROX_DISTINCT:
                row_sql, self._has_sketches = self._dialect.sketch_row(row_sql, partial.operand.kind), True
        output = _Output(PREFIX + entry_column, f"CAST({row_sql} AS {kind})", kind, ids)
        name = self._used_outputs.setdefault(entry_column, output).name
        return f"{self._dialect.quote_name(self._alias)}.{self._dialect.quote_name(name)}"

    def _write_column(self, column_id: int) -> str:
        column = self._schema.column(column_id)
        assert column is not None
        return self._write_path(column.name)


def _list_columns(schema: Schema) -> Iterator[tuple[str, Column]]:
    """Yield the primitive columns, and the primitive fields of structs, by their path in lower case."""
    nested_ids = {column.id for column in schema.index.by_id.values() if not is_primitive(column.type)}
    for column in schema.index.by_id.values():
        ancestors = list(schema.list_ancestors(column))
        if column.id in nested_ids or not all(isinstance(ancestor.type, StructType) for ancestor in ancestors):
            continue
        if "." in column.name.replace(".", "", len(ancestors)):
            continue  # A name with a dot is not distinct from a field of a struct.
        yield column.name.lower(), column


def _split(condition: exp.Expr) -> list[exp.Expr]:
    """Return the conditions that a condition joins by AND, or only the condition itself if it has no AND."""
    inner = condition.unnest()
    return list(inner.flatten()) if isinstance(inner, exp.And) else [condition]


def _is_constant(node: exp.Expr) -> bool:
    """Return whether the node is a constant that is not null."""
    return isinstance(node, exp.Literal | exp.Boolean)


def _is_plain_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and text.isascii() and text[0] != "." and text[-1] != "."


def _describe(node: exp.Expr) -> str:
    text = node.sql(comments=False).replace("\0", "")
    return text if len(text) <= 100 else f"{text[:100]}…"
