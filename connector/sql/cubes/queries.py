"""Translates an aggregate query so that it reads groups of a cube instead of rows.

A cube can answer a query if the query can be translated. In the translation, only the dimensions are visible as columns
of the table, and an aggregate becomes a combination of partial aggregates. A column or an aggregate that the cube does
not have raises an error. The other tables of a join are unchanged: all rows of a group have the same keys, so the group
has the same partners as each of its rows, and the join repeats its partial aggregates as often as it would repeat the
rows. If the cube has the attributes of a joined table, the table is removed from the query (`dimensions.py`).

The table is replaced by a union of the groups of covered files (`k0`) and the rows of the other files (`t0`), each row
as a group of one row. The columns of the union have the names of the columns of entries. Deleted rows of covered files
(`x0`) are subtracted from the groups if all used partial aggregates are counts and exact sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sqlglot import exp

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.cubes.attributes import ReplacedTable, list_qualifiers, list_sources
from seamark.connector.cubes.dialects import NotFromCube as NotFromCube
from seamark.connector.cubes.sketch_calls import format_count_sql
from seamark.connector.cubes.times import TimeDimension, replace_times
from seamark.connector.read.tables import OpenTable
from seamark.connector.sql.cubes.dimensions import find_field, list_columns_by_id, remove_tables
from seamark.connector.sql.cubes.partial_sql import (
    combine_average,
    combine_extremes,
    combine_sum,
    count_value,
    find_sum_type,
    truncate_time,
)
from seamark.connector.sql.expressions import Expressions
from seamark.connector.sql.functions import sketch_value, translate_function
from seamark.connector.sql.queries import WITHOUT_PUSHDOWN, Translation
from seamark.connector.sql.scopes import (
    NameScope,
    SqlValue,
    StoredTable,
    VisibleColumn,
    describe,
    select_field,
    use_column,
)
from seamark.connector.sql.types import (
    BIGINT,
    BOOLEAN,
    VARBINARY,
    SqlType,
    UnsupportedInDuckDB,
    from_iceberg,
    name_duckdb_type,
)
from seamark.connector.sql.values import check_args
from seamark.formats.iceberg.types.schema import Field, Schema
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
    list_columns,
    list_partials,
    make_operation,
)
from seamark.formats.runtime import errors

GROUPS = "k0"
"""The name of the relation with the groups of covered files."""
DELETED_ROWS = "x0"
"""The name of the relation with the deleted rows of covered files."""
_UNION = "u0"
_SUBTRACTED_PRECISION_MAX = 28
"""The maximum precision of decimals from whose sums deleted rows are subtracted.

The sum of all rows of a group, including deleted rows, then fits 38 digits.
"""
_COUNT_COLUMN = "m0"
"""The column of entries with `count(*)`, which each cube has."""
_FUNCTIONS: dict[type[exp.Expr], str] = {
    **{exp.Count: COUNT, exp.Sum: SUM, exp.Avg: AVG, exp.Min: MIN, exp.Max: MAX},
    exp.ApproxDistinct: APPROX_DISTINCT,
}
_SIGNS: dict[type[exp.Expr], str] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*"}


@dataclass(frozen=True)
class CubeQuery:
    """A query over the groups of a cube and the rows of other files.

    Attributes:
        text: The query in DuckDB's SQL, over the groups and the rows of other files.
        groups_text: The query over the groups alone, for a cube that covers all files.
        corrected: The query over groups with the deleted rows subtracted, or None if they cannot be subtracted.
        tables: The references to tables, with the columns that are read from rows. The keys are their numbers in the
            translation without a cube.
        facts: The number of the reference to the fact table, which is read as groups.
        attributes: The columns of the groups that have attributes of dimension tables: `{1: {"country": "d2"}}` if the
            groups have the column `country` of table 1 as column `d2`. These tables are joined only with the rows of
            files that the cube does not cover.
        columns: The columns of the groups that the query uses, such as `d2` or `m0`, in the order of the cube.
    """

    text: str
    groups_text: str
    corrected: CorrectedQuery | None
    tables: Mapping[int, StoredTable]
    facts: int
    attributes: Mapping[int, Mapping[str, str]]
    columns: tuple[str, ...]

    @property
    def joined_in_groups(self) -> frozenset[int]:
        """The numbers of the dimension tables whose attributes the groups contain, so groups need no join with them."""
        return frozenset(self.attributes)


@dataclass(frozen=True)
class CorrectedQuery:
    """A query that subtracts the deleted rows of files from the groups in which the cube has already counted them.

    Attributes:
        text: The query in DuckDB's SQL, over the groups, the deleted rows and the rows of files without groups.
        columns: The columns of the groups that the query uses: dimensions (`d0` …), and then partial aggregates
            (`m0` …).
    """

    text: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class _UsedPartial:
    """A partial aggregate of the groups that the query uses, such as the sum of `price` in each group.

    Attributes:
        partial: The partial aggregate.
        column: The column of the groups with the partial aggregate, such as `m1`.
        row_sql: The partial aggregate of one row, in DuckDB's SQL. Rows of files without groups become groups of one
            row.
        kind: The type of this column in the union of groups and rows.
        operand_type: The type of the aggregated values.
    """

    partial: Partial
    column: str
    row_sql: str
    kind: SqlType
    operand_type: SqlType


def translate_over_cube(
    tree: exp.Expr,
    tables: Sequence[StoredTable],
    open_tables: Sequence[OpenTable],
    facts: int,
    cube: IndexDefinition,
    now: datetime,
    *,
    floats: bool,
) -> CubeQuery:
    """Translate a query of one table, or of a join of tables.

    Args:
        tree: The query, which can be translated without a cube.
        tables: The references to tables of the translation without a cube.
        open_tables: The tables at the snapshots that the query reads.
        facts: The number of the reference whose groups are read.
        cube: The definition of the cube.
        now: The time at which the statement runs.
        floats: Whether sums of floats and averages of integers may be used. Their last digits depend on the order
            of the additions.

    Raises:
        NotFromCube: The cube cannot answer the query.
    """
    try:
        _check_joins(tree, tables[facts].node)
        _check_measures(tree, open_tables[facts].schema, cube)
        return _CubeTranslation(tables, open_tables, facts, cube, now, floats=floats).run(tree)
    except (UnsupportedInDuckDB, InvalidRequest, errors.BadRequest) as error:
        raise NotFromCube(str(error)) from None


def check_form(tree: exp.Expr) -> None:
    """Check that the query is a single SELECT from tables, groups rows, and has no window function and no `*`.

    Raises:
        NotFromCube: The query does not have this form.
    """
    if (
        not isinstance(tree, exp.Select)
        or tree.args.get("with_")
        or not all(isinstance(source, exp.Table) and not source.args.get("joins") for source in list_sources(tree))
        or sum(1 for _ in tree.find_all(exp.Query)) > 1
    ):
        raise NotFromCube("the query is not a single SELECT from tables")
    if tree.find(exp.Window) is not None:
        raise NotFromCube("the query has a window function")
    if any(isinstance(item.this if isinstance(item, exp.Column) else item, exp.Star) for item in tree.expressions):
        raise NotFromCube("the query selects all columns")
    has_aggregate = any(item.find(exp.AggFunc) is not None for item in tree.expressions)
    if not (tree.args.get("group") or tree.args.get("distinct") or has_aggregate):
        raise NotFromCube("the query does not group rows")


def _check_joins(tree: exp.Expr, facts: exp.Table) -> None:
    """Check that no outer join adds a row without a matching row of the facts, because such a row is in no group.

    A LEFT JOIN adds such rows if the facts are its right side. A RIGHT JOIN adds them if the facts are on its left side
    or are joined later.

    Raises:
        NotFromCube: An outer join may add a row without facts, or the alias of the table renames its columns.
    """
    alias = facts.args.get("alias")
    if alias is not None and alias.columns:
        raise NotFromCube("the query renames the columns of the table")
    number = next(number for number, source in enumerate(list_sources(tree)) if source is facts)
    for position, join in enumerate(tree.args.get("joins") or (), 1):
        side = join.text("side").upper()
        if side == "FULL" or (side == "LEFT" and position == number) or (side == "RIGHT" and position != number):
            raise NotFromCube(f"a {side} JOIN adds rows that the table does not have")


def _check_measures(tree: exp.Expr, schema: Schema, cube: IndexDefinition) -> None:
    """Check that the cube has measures of the columns that the query counts, adds and averages.

    The translation would also find a missing measure. This check takes less time, and most queries fit only one of many
    cubes.

    Raises:
        NotFromCube: The cube does not have such a measure.
    """
    names = {column.id: schema.list_path(column)[-1].lower() for column in schema.index.by_id.values()}
    measured_columns = {
        frozenset(names.get(column.column_id) for column in list_columns(partial.operand))
        for partial in list_partials(cube.measures)
    }
    for node in tree.find_all(exp.Sum, exp.Avg, exp.Count):
        columns = frozenset(column.name.lower() for column in node.find_all(exp.Column))
        if columns and columns not in measured_columns and not isinstance(node.this, exp.Distinct):
            raise NotFromCube(f"{describe(node)} is not a measure of the cube")


@dataclass(frozen=True)
class _Dimension:
    """A dimension of the cube.

    Attributes:
        path: The name of the column, and the names from it to the field of a struct.
        unit: The unit to which a time is truncated, or None.
        is_zoned: Whether a time has a zone.
    """

    path: tuple[str, ...]
    unit: str | None
    is_zoned: bool

    @property
    def time(self) -> TimeDimension | None:
        lowered = tuple(name.lower() for name in self.path)
        return None if self.unit is None else TimeDimension(lowered, self.unit, self.is_zoned)

    @property
    def query_path(self) -> tuple[str, ...]:
        """The path by which the query refers to the dimension, in lower case.

        A dimension may be a truncated time. Calls such as `date_trunc` are then replaced by a hidden name, which no
        statement can contain.
        """
        return tuple(name.lower() for name in self.path) if self.time is None else self.time.hidden_path


class _CubeTranslation(Translation):
    """The translation of one query over one cube."""

    def __init__(
        self,
        tables: Sequence[StoredTable],
        open_tables: Sequence[OpenTable],
        facts_number: int,
        cube: IndexDefinition,
        now: datetime,
        *,
        floats: bool,
    ) -> None:
        super().__init__(lambda node: tables[self._numbers_by_node[id(node)]].columns, now)
        self._tables_without_cube, self._open_tables = tables, open_tables
        self._facts_number, self._cube = facts_number, cube
        self._numbers_by_node: dict[int, int] = {}
        self._tables_by_number: dict[int, StoredTable] = {}
        self._replaced_tables: Sequence[ReplacedTable] = ()
        schema = open_tables[facts_number].schema
        self._row_expressions = Expressions(self.translate_query, translate_function, now)
        self.expressions = Expressions(self.translate_query, self._translate_function, now)
        self._floats = floats
        self._fields_by_name = {field.name.lower(): field for field in schema.fields}
        fields = list_columns_by_id(schema)
        self._dimensions = {
            f"d{number}": _Dimension(
                schema.list_path(fields[term.column_id]),
                None if term.transform == IDENTITY else term.transform,
                term.source == "timestamptz",
            )
            for number, term in enumerate(cube.terms)
            if term.column_id in fields and fields[term.column_id].type == term.source
            if parse_lookup(term.transform) is None
        }
        qualifiers = {part.name.lower() for table in tables for part in list_qualifiers(table.node)}
        self._dimensions = {
            column: dimension
            for column, dimension in self._dimensions.items()
            if len(dimension.path) == 1 or dimension.path[0].lower() not in qualifiers
        }
        """The dimensions by their columns in entries.

        A field is left out if its struct has the name of a table: `s.f` could be a column of the table `s`.
        """
        self._columns_of_partials = {
            partial.text: f"m{number}"
            for number, partial in enumerate(list_partials(cube.measures))
            if all(
                column.column_id in fields and fields[column.column_id].type == column.kind
                for column in list_columns(partial.operand)
            )
        }
        self._used_partials: dict[str, _UsedPartial] = {}
        self._all_stored = NameScope((), {})
        """The stored columns of all tables that were translated."""
        self._row_joins: list[tuple[str, VisibleColumn, VisibleColumn]] = []
        """The dimension tables that rows without groups are joined with, their key columns, and the partner columns."""
        self._row_attributes: dict[str, str | VisibleColumn] = {}
        """The attributes of these dimension tables, by the name of the column in the groups: SQL, or a column."""

    def run(self, tree: exp.Expr) -> CubeQuery:
        """Translate the query to SQL over the groups, and to SQL over the union of the groups and other rows.

        The relation of the union has the columns of the groups that the query uses. `d2` is dimension 2 of the cube,
        and `m1` is its partial aggregate 1.
        """
        # If the column itself is a dimension, its truncations can be computed from it, so the column is visible.
        untruncated_paths = {dimension.path for dimension in self._dimensions.values() if dimension.unit is None}
        times = [
            dimension.time
            for dimension in self._dimensions.values()
            if dimension.time is not None and dimension.path not in untruncated_paths
        ]
        new_tree = replace_times(tree, times)
        numbers = {id(table.node): number for number, table in enumerate(self._tables_without_cube)}
        sources = {
            numbers[id(old)]: new
            for old, new in zip(list_sources(tree), list_sources(new_tree), strict=True)
            if isinstance(new, exp.Table)
        }
        self._numbers_by_node = {id(node): number for number, node in sources.items()}
        self._replaced_tables = remove_tables(
            new_tree, sources, self._tables_without_cube, self._open_tables, self._facts_number, self._cube
        )
        query, _ = self.translate_query(new_tree, NameScope((), {}))
        row_values = {column: self._write_row_dimension(column) for column in self._groups.used}
        row_values |= {column: partial.row_sql for column, partial in self._used_partials.items()}
        # The dimensions d0, d1 … precede the partial aggregates m0, m1 …, as in the cube.
        columns = sorted(row_values, key=lambda column: (column[0], int(column[1:])))
        if not columns:
            raise NotFromCube("the query uses no column")
        kinds = {column: name_duckdb_type(partial.kind) for column, partial in self._used_partials.items()}
        rows = [f"CAST({row_values[name]} AS {kinds[name]})" if name in kinds else row_values[name] for name in columns]
        groups = [f"CAST({name} AS {kinds[name]})" if name in kinds else name for name in columns]
        source = self._source
        for joined_relation, key, partner in self._row_joins:
            source += f" LEFT JOIN {joined_relation} ON {use_column(key).sql} = {use_column(partner).sql}"
        from_groups = f"SELECT {', '.join(groups)} FROM {WITHOUT_PUSHDOWN.format(GROUPS)} AS {GROUPS}"  # noqa: S608
        rows_text = f"SELECT {', '.join(rows)} FROM {source}"  # noqa: S608
        query_start = f"WITH {_UNION}({', '.join(columns)}) AS"
        union_text = f"{query_start} ({from_groups} UNION ALL {rows_text}) {query}"
        groups_text = f"{query_start} ({from_groups}) {query}"  # No file is read if the cube covers all files.
        attributes, names = {table.number: table.attributes for table in self._replaced_tables}, tuple(columns)
        corrected_query = self._subtract_deleted_rows(query_start, query, columns, row_values, rows_text, source)
        return CubeQuery(
            union_text, groups_text, corrected_query, self._tables_by_number, self._facts_number, attributes, names
        )

    def _subtract_deleted_rows(
        self,
        query_start: str,
        query: str,
        columns: Sequence[str],
        row_values: Mapping[str, str],
        rows_text: str,
        source: str,
    ) -> CorrectedQuery | None:
        """Return the query over groups with the deleted rows subtracted, or None if they cannot be subtracted.

        A deleted row is a group of one row whose partial aggregates (columns `m0`, `m1` …) are negative.

        A sum of no values is null, so the number of values of each sum is also subtracted. A group without remaining
        rows is left out.

        Args:
            query_start: The start of the query, up to `AS`: the name and the columns of the union.
            query: The query over the union.
            columns: The columns of the union.
            row_values: The value of each column for one row.
            rows_text: The query that returns the rows of other files as groups.
            source: The relation of the rows of other files, with its joins.
        """
        partials_by_column = dict(self._used_partials)
        partials_by_column[_COUNT_COLUMN] = _UsedPartial(COUNT_ROWS, _COUNT_COLUMN, "1", BIGINT, BIGINT)
        counts: dict[str, str] = {}
        for column, used_partial in self._used_partials.items():
            if used_partial.partial.function == COUNT:
                continue
            count = self._find_count(used_partial)
            if count is None:
                return None
            counts[column] = count.column
            partials_by_column.setdefault(count.column, count)
        keys = [column for column in columns if column not in partials_by_column]
        partials = sorted(partials_by_column, key=lambda column: int(column[1:]))  # The number follows the letter m.
        negated_partials = [
            f"-CAST({partials_by_column[column].row_sql} AS {name_duckdb_type(partials_by_column[column].kind)})"
            for column in partials
        ]
        facts_relation = WITHOUT_PUSHDOWN.format(self._tables_by_number[self._facts_number].name)
        deleted_rows_source = source.replace(facts_relation, WITHOUT_PUSHDOWN.format(DELETED_ROWS), 1)
        kinds = {column: name_duckdb_type(partials_by_column[column].kind) for column in partials}
        groups = [*keys, *(f"CAST({column} AS {kinds[column]}) AS {column}" for column in partials)]
        union_query = (
            f"SELECT {', '.join(groups)} FROM {WITHOUT_PUSHDOWN.format(GROUPS)} AS {GROUPS}"  # noqa: S608
            f" UNION ALL SELECT {', '.join([*(row_values[key] for key in keys), *negated_partials])}"
            f" FROM {deleted_rows_source}"
        )
        values = []
        for column in columns:
            value = column if column in keys else f"CAST(sum({column}) AS {kinds[column]})"
            if column in counts:
                value = f"CASE WHEN sum({counts[column]}) = 0 THEN NULL ELSE {value} END"
            values.append(value)
        grouping = f" GROUP BY {', '.join(keys)}" if keys else ""
        live_groups = f"SELECT {', '.join(values)} FROM ({union_query}){grouping} HAVING sum({_COUNT_COLUMN}) <> 0"  # noqa: S608
        return CorrectedQuery(f"{query_start} ({live_groups} UNION ALL {rows_text}) {query}", (*keys, *partials))

    def _find_count(self, used_partial: _UsedPartial) -> _UsedPartial | None:
        """Return the partial aggregate that counts the values of an exact sum, or None if the cube does not have it.

        The count is needed to subtract deleted rows: a sum of no remaining values is null and not 0. Sums of floats are
        not exact, so rows cannot be subtracted from them.
        """
        kind, operand = used_partial.operand_type, used_partial.partial.operand
        is_exact = kind.is_integer or (kind.name == "decimal" and kind.precision <= _SUBTRACTED_PRECISION_MAX)
        if used_partial.partial.function != SUM or operand is None or not is_exact:
            return None
        partial = Partial(COUNT, operand)
        column = self._columns_of_partials.get(partial.text)
        return (
            None if column is None else _UsedPartial(partial, column, count_value(used_partial.row_sql), BIGINT, kind)
        )

    def _translate_table(
        self, node: exp.Table, alias: exp.Expr | None, outer: NameScope
    ) -> tuple[str, tuple[VisibleColumn, ...]]:
        """Return a relation and its visible columns.

        The fact table becomes the union of the groups and of the rows of files without groups. Only the dimensions of
        the cube are visible as its columns, and also the attributes of dimension tables that the groups contain. A
        dimension that is a field of a struct is visible as a field of a column with the name of the struct. Other
        tables are translated as without a cube.
        """
        number = self._numbers_by_node[id(node)]
        source, fields = super()._translate_table(node, alias, outer)
        self._tables_by_number[number] = self.tables[-1]
        self._all_stored = NameScope((*self._all_stored.fields, *fields), {})
        if number != self._facts_number:
            return source, fields
        self._source = source
        self._stored_names = NameScope(fields, {})
        self._stored_fields = {field.stored[1]: field for field in fields if field.stored is not None}
        kinds = {column: self._read_stored(dimension).type for column, dimension in self._dimensions.items()}
        attributes = [
            attribute for table in self._replaced_tables for attribute in self._join_dimension_table(table, outer)
        ]
        kinds |= {attribute.stored[1]: attribute.value.type for attribute in attributes if attribute.stored is not None}
        self._groups = StoredTable(0, node, kinds)
        visible = []
        structs: dict[str, dict[tuple[str, ...], VisibleColumn]] = {}
        for column, dimension in self._dimensions.items():
            root = self._stored_fields[dimension.path[0]]
            _, *names = dimension.query_path
            shown = names[-1] if names else dimension.query_path[0] if dimension.time is not None else root.name
            value = SqlValue(f"{_UNION}.{column}", kinds[column])
            shown_column = VisibleColumn(shown, root.qualifiers, value, (self._groups, column))
            if names:
                structs.setdefault(dimension.path[0], {})[tuple(names)] = shown_column
            else:
                visible.append(shown_column)
        for name, named_fields in structs.items():
            root = self._stored_fields[name]
            visible.append(VisibleColumn(root.name, root.qualifiers, root.value, None, named_fields))
        visible += [
            replace(attribute, stored=(self._groups, attribute.stored[1]))
            for attribute in attributes
            if attribute.stored is not None
        ]
        return _UNION, tuple(visible)

    def _join_dimension_table(self, table: ReplacedTable, outer: NameScope) -> Iterator[VisibleColumn]:
        """Join a dimension table to the rows of files that the cube does not cover, and yield its attributes.

        The first result is a hidden column: whether a row has a match. The groups already contain all results. The join
        repeats no row, because a cube is only built if the key of the dimension table is unique.
        """
        source, fields = self._translate_table(table.node, table.node.args.get("alias"), outer)
        stored_fields = {field.stored[1]: field for field in fields if field.stored is not None}
        key, partner = self._stored_fields[table.key], stored_fields[table.partner]
        self._row_joins.append((source, key, partner))
        self._row_attributes[table.has_partner] = f"({partner.value.sql} IS NOT NULL)"
        has_partner_value = SqlValue(f"{_UNION}.{table.has_partner}", BOOLEAN)
        yield VisibleColumn(table.hidden_name, (), has_partner_value, (self.tables[-1], table.has_partner))
        for name, column in table.attributes.items():
            field = stored_fields[name]
            self._row_attributes[column] = field
            value = SqlValue(f"{_UNION}.{column}", field.value.type)
            yield VisibleColumn(field.name, field.qualifiers, value, (self.tables[-1], column))

    def _write_row_dimension(self, column: str) -> str:
        """Return the value of a dimension for one row, in DuckDB's SQL."""
        attribute = self._row_attributes.get(column)
        if attribute is not None:
            return attribute if isinstance(attribute, str) else use_column(attribute).sql
        dimension = self._dimensions[column]
        stored = self._read_stored(dimension, is_used=True)
        return stored.sql if dimension.unit is None else truncate_time(dimension.unit, stored)

    def _read_stored(self, dimension: _Dimension, *, is_used: bool = False) -> SqlValue:
        """Return the value of a dimension's column in a row, before it is truncated.

        Args:
            dimension: The dimension.
            is_used: Whether the column is recorded as used, so that it is read from files. False if only the type of
                the value is needed.
        """
        root, *names = dimension.path
        field = self._stored_fields[root]
        value = use_column(field) if is_used else field.value
        for name in names:
            # An error message names at most four levels of the path, because a column of sqlglot has no more.
            value = select_field(value, name, exp.column(*reversed(dimension.path[-4:])))
        return value

    # Aggregates

    def _translate_function(self, expressions: Expressions, node: exp.Expr, scope: NameScope) -> SqlValue:
        # In ORDER BY, the name of an output takes precedence over a column of the table.
        outputs = {field.name for field in scope.fields if field.stored is None}
        is_aggregate = isinstance(node, exp.Filter | exp.CountIf) or type(node) in _FUNCTIONS
        if is_aggregate and any(column.name.lower() in outputs for column in node.find_all(exp.Column)):
            raise NotFromCube(f"{describe(node)} in ORDER BY is the name of an output")
        if isinstance(node, exp.Filter) and type(node.this) in _FUNCTIONS and self._is_measure(node.this):
            return self._combine(node.this, expressions.translate_condition(node.expression.this, scope))
        if isinstance(node, exp.CountIf):
            check_args(node)
            return self._combine(exp.Count(this=exp.Star()), expressions.translate_condition(node.this, scope))
        if type(node) in _FUNCTIONS and self._is_measure(node):
            return self._combine(node)
        if isinstance(node, exp.Sum) and node.this == exp.Literal.number(1):
            check_args(node)
            return SqlValue(f"CAST(sum({_UNION}.{self._use_partial(COUNT_ROWS, None).column}) AS BIGINT)", BIGINT)
        if isinstance(node, exp.Count | exp.Sum | exp.Avg) and not isinstance(node.this, exp.Distinct):
            raise NotFromCube(f"{describe(node)} is not a measure of the cube")
        if isinstance(node, exp.Filter) and not isinstance(node.this, exp.Min | exp.Max):
            raise NotFromCube(f"{describe(node)} is not a measure of the cube")
        # The minimum, the maximum, and the distinct values of dimensions are computed from the groups like from rows.
        return translate_function(expressions, node, scope)

    def _is_measure(self, node: exp.Expr) -> bool:
        measure = self._to_measure(node)
        return measure is not None and all(partial.text in self._columns_of_partials for partial in measure.partials)

    def _to_measure(self, node: exp.Expr) -> Measure | None:
        """Return an aggregate as a measure, or None if it does not have the form of a measure."""
        if isinstance(node, exp.Count) and isinstance(node.this, exp.Star | exp.Literal | exp.Boolean):
            return Measure(COUNT, None)
        if node.args.get("expressions") or isinstance(node.this, exp.Distinct):
            return None
        operand = self._to_operand(node.this)
        return None if operand is None else Measure(_FUNCTIONS[type(node)], operand)

    def _to_operand(self, node: exp.Expr) -> Operand | None:
        match node:
            case exp.Paren():
                return self._to_operand(node.this)
            case exp.Column() if isinstance(node.this, exp.Identifier):
                target = self._all_stored.find_path(node)
                if (
                    target is None
                    or target[0].stored is None
                    or target[0].stored[0] is not self._tables_by_number[self._facts_number]
                ):
                    return None
                visible, names = target
                assert visible.stored is not None
                field: Field | None = self._fields_by_name[visible.stored[1].lower()]
                for name in names:
                    field = find_field(field, name)
                if field is None or not isinstance(field.type, str):
                    return None
                return ColumnOperand(field.id, ".".join((visible.name, *names)), field.type)
            case exp.Literal() if not node.is_string and _is_plain_number(str(node.this)):
                return NumberOperand(str(node.this))
        sign = _SIGNS.get(type(node))
        if sign is None:
            return None
        left, right = (self._to_operand(side) for side in (node.this, node.expression))
        return None if left is None or right is None else make_operation(sign, left, right)

    def _combine(self, node: exp.Expr, condition: str | None = None) -> SqlValue:
        """Return an aggregate of rows as an aggregate of partial aggregates.

        Args:
            node: An aggregate for which `_is_measure` is true.
            condition: The condition of FILTER on groups, in DuckDB's SQL. Partial aggregates of other groups become
                null.
        """
        check_args(node)
        function, argument = _FUNCTIONS[type(node)], node.this
        measure = self._to_measure(node)
        assert measure is not None
        value = (
            None
            if isinstance(argument, exp.Star)
            else self._row_expressions.translate_value(argument, self._stored_names)
        )
        if function == APPROX_DISTINCT:
            assert value is not None
            value = replace(value, sql=sketch_value(value, node))
        used_partials = [self._use_partial(partial, value) for partial in measure.partials]
        partial_columns = [f"{_UNION}.{output.column}" for output in used_partials]
        if condition is not None:
            partial_columns = [f"CASE WHEN {condition} THEN {text} END" for text in partial_columns]
        if function == APPROX_DISTINCT:
            return SqlValue(format_count_sql(partial_columns[0]), BIGINT)
        if function in (MIN, MAX):
            return combine_extremes(function, SqlValue(partial_columns[0], used_partials[0].kind))
        if function == COUNT:
            return SqlValue(f"CAST(coalesce(sum({partial_columns[0]}), 0) AS BIGINT)", BIGINT)
        kind = used_partials[0].operand_type
        if kind.is_float and not self._floats:
            raise NotFromCube(f"{describe(node)} adds floats, which the session excludes")
        if function == AVG and kind.is_integer and not self._floats:
            # The engine adds integers of an average as doubles, whose last digits depend on the order of the additions.
            raise NotFromCube(f"{describe(node)} averages integers as floats, which the session excludes")
        if function == AVG:
            return combine_average(partial_columns[0], partial_columns[1], kind)
        return combine_sum(partial_columns[0], kind)

    def _use_partial(self, partial: Partial, value: SqlValue | None) -> _UsedPartial:
        """Record that the query uses a partial aggregate, and return it.

        Args:
            partial: A partial aggregate of the cube.
            value: The operand for one row, or None for `count(*)`.
        """
        column = self._columns_of_partials[partial.text]
        if partial == COUNT_ROWS or value is None:
            used_partial = _UsedPartial(COUNT_ROWS, column, "1", BIGINT, BIGINT)
        elif partial.function == COUNT:
            used_partial = _UsedPartial(partial, column, count_value(value.sql), BIGINT, value.type)
        else:
            assert partial.operand is not None
            stored_type = from_iceberg(partial.operand.kind)
            if (stored_type.name, stored_type.scale) != (value.type.name, value.type.scale):
                raise NotFromCube(
                    f"the partial aggregate has type {stored_type}, but its operand has type {value.type}"
                )
            kind = value.type if partial.function != SUM else find_sum_type(value.type)
            kind = VARBINARY if partial.function == APPROX_DISTINCT else kind
            used_partial = _UsedPartial(partial, column, value.sql, kind, value.type)
        return self._used_partials.setdefault(column, used_partial)


def _is_plain_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit() and text.isascii() and text[0] != "." and text[-1] != "."
