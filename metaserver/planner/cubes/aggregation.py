"""Computation of the answer to an aggregate request from the merged groups of a cube, with Arrow.

A cube can answer a request if the dimensions, the condition and the measures of the request can be computed from the
dimensions and the partial aggregates of the cube. The answer has the types and values of a statement that reads the
rows (`connector/sql/`):

- Sums of integers are bigint, and sums of decimals have 38 digits.
- An average of decimals is rounded half up.
- NaN is a minimum or a maximum only if there is no other value.
- Null is a group.

If the module cannot guarantee this, it raises `NotFromGroups`, and the caller runs the statement. The functions are
pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import TRUE, Bound, Expression, Op, collect_predicates
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types.schema import Schema, StructType, Type
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.distinct_sketches import estimate_sketches
from seamark.formats.index.keys.group_conditions import TIME_UNITS, is_at_boundary
from seamark.formats.index.keys.measures import (
    APPROX_DISTINCT,
    AVG,
    COUNT,
    SUM,
    ColumnOperand,
    Measure,
    Operand,
    list_columns,
    list_partials,
)
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.cube import SumOverflow, combine_groups
from seamark.formats.runtime.errors import BadRequest

_TYPE_NAMES = {
    "boolean": "boolean",
    "int": "integer",
    "long": "bigint",
    "float": "real",
    "double": "double",
    "string": "varchar",
    "binary": "varbinary",
    "date": "date",
    "timestamp": "timestamp",
    "timestamptz": "timestamp with time zone",
}
"""The names of types in the SQL dialect. If a request uses a column of another type, the caller runs the statement."""
_INTEGERS = ("int", "long")
_FLOATS = ("float", "double")
_FINEST_FIRST = (IDENTITY, *reversed(TIME_UNITS))
_NULLITY = (Op.IS_NULL, Op.NOT_NULL)


class NotFromGroups(Exception):
    """Raised if the groups cannot answer the request. The message is the reason."""


@dataclass(frozen=True, slots=True)
class SortKey:
    """A column by which the answer is sorted. `column` is the position of the column in the answer."""

    column: int
    descending: bool


@dataclass(frozen=True, slots=True)
class GroupQuery:
    """A request for aggregates of a table, grouped by dimensions, as an engine sends it.

    Attributes:
        names: The names of the columns of the answer: first the dimensions, then the measures.
        where: A condition in SQL.
        floats: Whether sums of floats, and averages of floats or integers, may be computed from groups.
    """

    schema: Schema
    dimensions: tuple[Term, ...]
    measures: tuple[Measure, ...]
    names: tuple[str, ...]
    where: str | None = None
    sort_keys: tuple[SortKey, ...] = ()
    limit: int | None = None
    floats: bool = True

    def parse_condition(self) -> Expression:
        """Return the condition over the columns of the schema.

        Raises:
            NotFromGroups: The condition is invalid, or is not a plain comparison of columns with literals.
        """
        if self.where is None:
            return TRUE
        if "`" in self.where:  # Trino does not quote names with backticks, and `parse_sql` does.
            raise NotFromGroups("the condition has a backtick")
        try:
            sql_filter = parse_sql(self.where, self.schema, strict=True)
            if not sql_filter.exact:
                raise NotFromGroups("the condition is more than comparisons of columns with literals")
            return bind(sql_filter.expression, self.schema, (), case_sensitive=True)
        except BadRequest as error:
            raise NotFromGroups(error.message) from None


@dataclass(frozen=True, slots=True)
class _GroupedDimension:
    """A dimension of a request.

    Attributes:
        column: The column of the groups from which the dimension is computed.
        unit: The unit of time to which the column is truncated, or None if the column is the dimension itself.
    """

    column: str
    kind: str
    unit: str | None


@dataclass(frozen=True, slots=True)
class CubeAnswerColumns:
    """The columns of a cube from which the answer to a request is computed. A cube has groups of rows by dimensions.

    Attributes:
        condition: The condition of the request, over the columns of `filtered`.
        filtered: The columns of the groups that the condition compares, by the id of the table's column.
        dimensions: The dimensions of the answer.
        partials: For each measure, the columns of the groups with its partial aggregates.
        functions: The function that combines each column of partial aggregates, by the name of the column.
    """

    query: GroupQuery
    condition: Expression
    filtered: Mapping[int, str]
    dimensions: tuple[_GroupedDimension, ...]
    partials: tuple[tuple[str, ...], ...]
    functions: Mapping[str, str]

    @property
    def kept_dimensions(self) -> tuple[str, ...]:
        """The dimensions of the cube that the request compares or groups by, in their order in the cube."""
        used_columns = {*self.filtered.values(), *(dimension.column for dimension in self.dimensions)}
        # The column of a dimension has the name `d` and the number of the dimension.
        return tuple(sorted(used_columns, key=lambda column: int(column[1:])))

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the answer's columns in the SQL dialect."""
        dimensions = [_name_type(dimension.kind) for dimension in self.dimensions]
        return (*dimensions, *(_name_type(_find_result_kind(measure)) for measure in self.query.measures))


def find_cube_answer(query: GroupQuery, condition: Expression, cube: IndexDefinition) -> CubeAnswerColumns:
    """Return the columns of a cube from which the answer to a request is computed.

    Args:
        query: The request.
        condition: The result of `query.parse_condition`.
        cube: The definition of the cube.

    Raises:
        NotFromGroups: The cube cannot answer the request.
    """
    finest = _find_dimensions(query.schema, cube)
    dimensions = tuple(_find_dimension(term, finest) for term in query.dimensions)
    filtered_columns = {}
    for predicate in collect_predicates(condition):
        filtered_columns[predicate.column_id] = _find_filter_column(predicate, finest)
    columns, functions = _find_partials(query.schema, cube)
    for measure in query.measures:
        _check_measure(measure, floats=query.floats)
    try:
        partials = tuple(tuple(columns[partial.text] for partial in measure.partials) for measure in query.measures)
    except KeyError as error:
        raise NotFromGroups(f"{error.args[0]} is not a measure of the cube") from None
    return CubeAnswerColumns(query, condition, filtered_columns, dimensions, partials, functions)


def _find_dimensions(schema: Schema, cube: IndexDefinition) -> dict[int, tuple[str, Term]]:
    """Return the finest dimension of each column, by column id: the name of its column in the groups, and its term.

    A cube may have a column as an hour and as a day. The finer dimension can answer requests for both. Dimensions
    whose column has changed its type, or has a type that groups do not support, are left out.
    """
    kinds = _list_kinds(schema)
    finest: dict[int, tuple[str, Term]] = {}
    for number, term in enumerate(cube.terms):
        if term.transform not in _FINEST_FIRST:
            continue
        if kinds.get(term.column_id) != term.source or get_base_name(term.source) not in (*_TYPE_NAMES, "decimal"):
            continue
        finest_dimension = finest.get(term.column_id)
        if finest_dimension is None or _is_finer(term.transform, finest_dimension[1].transform):
            finest[term.column_id] = f"d{number}", term
    return finest


def _list_kinds(schema: Schema) -> dict[int, Type]:
    """Return the types of columns, and of fields of structs, by id. Elements of lists and maps are left out.

    A row has any number of such elements, so they cannot be dimensions or measures.
    """
    return {
        column.id: column.type
        for column in schema.index.by_id.values()
        if all(isinstance(ancestor.type, StructType) for ancestor in schema.list_ancestors(column))
    }


def _is_finer(transform: str, other: str) -> bool:
    """Return whether a transform keeps more of a value than another transform, as `hour` keeps more than `day`."""
    return _FINEST_FIRST.index(transform) < _FINEST_FIRST.index(other)


def _find_dimension(term: Term, finest: Mapping[int, tuple[str, Term]]) -> _GroupedDimension:
    """Return the dimension of the groups from which a dimension of the request is computed.

    Args:
        term: The dimension of the request: a column, or a function that truncates its values.
        finest: For each column, the column of the groups with the finest dimension, and this dimension.

    Raises:
        NotFromGroups: The cube has no such dimension, or engines truncate the column in another way. They truncate a
            `timestamptz` in their time zone, and do not truncate a `date` to hours.
    """
    column, dimension = finest.get(term.column_id, ("", term))
    if not column or _is_finer(term.transform, dimension.transform):
        raise NotFromGroups(f"{term.text} is not a dimension of the cube")
    name = get_base_name(term.source)
    if (name == "timestamptz" and term.transform != IDENTITY) or (name, term.transform) == ("date", "hour"):
        raise NotFromGroups(f"statements do not truncate a {name} by {term.transform}")
    return _GroupedDimension(column, term.source, None if term.transform == dimension.transform else term.transform)


def _find_filter_column(predicate: Bound, finest: Mapping[int, tuple[str, Term]]) -> str:
    """Return the column of the groups with which a predicate can be evaluated.

    A dimension that is a truncated time decides a comparison with a value only if the value is at the boundary of a
    period, so that all values of a period give the same result. It decides comparisons by the same or a coarser unit.

    Raises:
        NotFromGroups: The predicate cannot be evaluated on the groups.
    """
    column, dimension = finest.get(predicate.column_id, ("", None))
    if dimension is None:
        raise NotFromGroups(f"{predicate.name} is not a dimension of the cube")
    if predicate.op in _NULLITY or dimension.transform == IDENTITY:
        return column
    if predicate.transform == IDENTITY:
        is_decided = is_at_boundary(predicate, dimension)
    else:
        is_decided = predicate.transform in TIME_UNITS and not _is_finer(predicate.transform, dimension.transform)
    if not is_decided:
        raise NotFromGroups(f"the dimension {dimension.text} does not decide the condition on {predicate.name}")
    return column


def _find_partials(schema: Schema, cube: IndexDefinition) -> tuple[dict[str, str], dict[str, str]]:
    """Return the partial aggregates of the cube: a sum and a count for an average, and one value for other measures.

    A partial aggregate of columns that have changed their types is left out, but its column is still combined.

    Returns:
        The columns of the groups, by the text of the partial aggregate, and the combining function of each column.
    """
    kinds = _list_kinds(schema)
    columns, functions = {}, {}
    for number, partial in enumerate(list_partials(cube.measures)):
        functions[f"m{number}"] = partial.function
        if all(kinds.get(column.column_id) == column.kind for column in list_columns(partial.operand)):
            columns[partial.text] = f"m{number}"
    return columns, functions


def _check_measure(measure: Measure, *, floats: bool) -> None:
    """Check that the measure has the same value whether it is computed from groups or from rows.

    Counts always have the same value. Sums of floats depend on the order of the rows.

    Args:
        measure: The measure.
        floats: Whether sums of floats, and averages of floats or integers, are accepted although they may differ.

    Raises:
        NotFromGroups: The value may differ.
    """
    if measure.operand is None or measure.function in (COUNT, APPROX_DISTINCT):
        return
    name = get_base_name(measure.operand.kind)
    if name not in (*_TYPE_NAMES, "decimal"):
        raise NotFromGroups(f"{measure.text} has values of the type {measure.operand.kind}; run the statement")
    if not floats and measure.function in (SUM, AVG) and name in _FLOATS:
        raise NotFromGroups(f"{measure.text} adds floats, which the request excludes")
    if not floats and measure.function == AVG and name in _INTEGERS:
        raise NotFromGroups(f"{measure.text} averages integers as floats, which the request excludes")
    if measure.function != SUM and name == "decimal" and not isinstance(measure.operand, ColumnOperand):
        # The engine may give the expression another precision.
        raise NotFromGroups(f"{measure.text} aggregates an expression of decimals; run the statement")


def _find_result_kind(measure: Measure) -> str:
    """Return the Iceberg type of a measure's values, as Trino defines it: sums are wider than their operands."""
    if measure.function in (COUNT, APPROX_DISTINCT) or measure.operand is None:
        return "long"
    kind = measure.operand.kind
    name = get_base_name(kind)
    if measure.function == SUM:
        return "long" if name in _INTEGERS else f"decimal(38, {get_decimal_scale(kind)})" if name == "decimal" else kind
    return "double" if measure.function == AVG and name in _INTEGERS else kind


def _name_type(kind: str) -> str:
    """Return the name of an Iceberg type in the SQL dialect."""
    if get_base_name(kind) == "decimal":
        return f"decimal({get_decimal_precision(kind)}, {get_decimal_scale(kind)})"
    return _TYPE_NAMES[get_base_name(kind)]


def reduce_groups(groups: pa.Table, answer: CubeAnswerColumns) -> pa.Table:
    """Combine groups that differ only in dimensions that the request does not use.

    Raises:
        NotFromGroups: A sum does not fit its type.
    """
    keys = answer.kept_dimensions
    if not keys or not groups.num_rows:  # `aggregate_groups` combines groups without dimensions.
        return groups
    columns = {name: _unify_zeros(groups[name]) for name in keys}
    columns |= {name: groups[name] for name in answer.functions}
    try:
        return combine_groups(pa.table(columns), answer.functions)
    except (SumOverflow, pa.ArrowException) as error:
        raise NotFromGroups(str(error)) from None


def aggregate_groups(groups: pa.Table, answer: CubeAnswerColumns) -> pa.Table:
    """Compute the rows of the answer.

    Args:
        groups: The result of `reduce_groups`.
        answer: The columns of the groups from which the answer is computed.

    Raises:
        NotFromGroups: A value does not fit its type, or the order of the rows is not certain.
    """
    try:
        grouped_rows = _group_by_dimensions(_filter_groups(groups, answer), answer)
        columns = [grouped_rows[f"k{number}"] for number in range(len(answer.dimensions))]
        results: dict[tuple[str, tuple[str, ...]], pa.ChunkedArray] = {}
        for measure, partials in zip(answer.query.measures, answer.partials, strict=True):
            # A request may contain a measure several times, with different spaces.
            key = (measure.function, partials)
            if key not in results:
                results[key] = _finish_measure(measure, [grouped_rows[name] for name in partials])
            columns.append(results[key])
        numbered_table = pa.table({str(number): column for number, column in enumerate(columns)})
        rows = _sort_rows(numbered_table, answer.query.sort_keys)
    except (SumOverflow, pa.ArrowException) as error:
        raise NotFromGroups(str(error)) from None
    if answer.query.limit is not None:
        rows = rows.slice(0, answer.query.limit)
    return rows.rename_columns(list(answer.query.names))


def _filter_groups(groups: pa.Table, answer: CubeAnswerColumns) -> pa.Table:
    """Return the groups that satisfy the condition of the request.

    Raises:
        NotFromGroups: The condition cannot be evaluated on the groups.
    """
    if answer.condition == TRUE:
        return groups
    columns = {column_id: _to_array(groups[name]) for column_id, name in answer.filtered.items()}
    try:
        return groups.filter(pa.array(evaluate_filter(answer.condition, columns, groups.num_rows)))
    except ValueError as error:
        raise NotFromGroups(str(error)) from None


def _group_by_dimensions(groups: pa.Table, answer: CubeAnswerColumns) -> pa.Table:
    """Return the groups of the request: its dimensions `k0`, `k1`, … and its partial aggregates."""
    partial_names = dict.fromkeys(name for names in answer.partials for name in names)
    columns = {
        f"k{number}": _truncate_dimension(groups, dimension) for number, dimension in enumerate(answer.dimensions)
    }
    columns |= {name: groups[name] for name in partial_names}
    # Without dimensions, the result has exactly one row, even if there are no groups.
    return combine_groups(pa.table(columns), {name: answer.functions[name] for name in partial_names})


def _truncate_dimension(groups: pa.Table, dimension: _GroupedDimension) -> pa.ChunkedArray:
    """Return the column of a dimension, truncated to the unit of the dimension.

    Timestamps are truncated as plain times, without a conversion to a time zone.
    """
    values = groups[dimension.column]
    if dimension.unit is None:
        return _unify_zeros(values)
    local_times = values.cast(pa.timestamp("us")) if pa.types.is_timestamp(values.type) else values
    return pc.floor_temporal(local_times, unit=dimension.unit).cast(values.type)


def _unify_zeros(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Replace -0.0 by 0.0, and each NaN by the same bit pattern, because Arrow groups floats by their bits."""
    if not pa.types.is_floating(values.type):
        return values
    nan = pa.scalar(float("nan"), values.type)
    return pc.if_else(pc.is_nan(values), nan, pc.add(values, pa.scalar(0.0, values.type)))


def _finish_measure(measure: Measure, partials: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """Compute the values of a measure from its combined partial aggregates.

    Raises:
        ArrowInvalid: A value does not fit the type of the measure.
    """
    values = partials[0]
    if measure.function == COUNT or measure.operand is None:
        return pc.fill_null(values, 0)
    if measure.function == APPROX_DISTINCT:
        return pa.chunked_array([estimate_sketches(values)])
    name = get_base_name(measure.operand.kind)
    if measure.function == AVG:  # The partial aggregates of an average are a sum and a count.
        if name == "decimal":
            return _divide_decimals(values, partials[1], pa.decimal128(*_get_precision_and_scale(measure.operand)))
        sums = values if name in _FLOATS else _to_doubles(values)
        counts = pc.fill_null(partials[1], 0)
        # The average of no values is null.
        counts = pc.if_else(pc.equal(counts, 0), pa.scalar(None, counts.type), counts)
        averages = pc.divide(sums, counts.cast(pa.float64(), safe=False))
        return _narrow_to_floats(averages) if name == "float" else averages
    if measure.function == SUM and name in _INTEGERS:
        return values.cast(pa.int64())
    if measure.function == SUM and name == "float":
        return _narrow_to_floats(values)
    return values


def _get_precision_and_scale(operand: Operand) -> tuple[int, int]:
    return get_decimal_precision(operand.kind), get_decimal_scale(operand.kind)


def _to_doubles(sums: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert sums of integers, which are decimals, to doubles. Python rounds each value only once."""
    values = [None if value is None else float(int(value)) for value in sums.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.float64())])


def _narrow_to_floats(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert doubles to floats.

    Raises:
        ArrowInvalid: A finite value is beyond the range of floats.
    """
    floats = values.cast(pa.float32())
    if pc.any(pc.and_(pc.is_inf(floats), pc.is_finite(values))).as_py():
        raise pa.ArrowInvalid("a value is beyond the range of floats")
    return floats


def _divide_decimals(sums: pa.ChunkedArray, counts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return the averages of decimals, rounded half away from zero to the scale of the sums."""
    averages: list[Decimal | None] = []
    for total, count in zip(sums.to_pylist(), counts.to_pylist(), strict=True):
        if total is None or not count:
            averages.append(None)
            continue
        sign, digits, exponent = total.as_tuple()
        unscaled_value = int("".join(map(str, digits)))
        # Round the absolute value half up with integers, because the arithmetic of Decimal would round to 28 digits.
        unscaled_average = (2 * unscaled_value + count) // (2 * count)
        averages.append(Decimal((sign, tuple(map(int, str(unscaled_average))), exponent)))
    return pa.chunked_array([pa.array(averages, kind)])


def _sort_rows(rows: pa.Table, sort_keys: Sequence[SortKey]) -> pa.Table:
    """Sort the rows. Nulls come last, as in Trino.

    Raises:
        NotFromGroups: A sorted column has NaN. Engines sort NaN as the greatest value, but Arrow does not.
        ArrowException: The values are not comparable in Arrow.
    """
    if not sort_keys:
        return rows
    for number in {key.column for key in sort_keys}:
        column = rows[str(number)]
        if pa.types.is_floating(column.type) and pc.any(pc.is_nan(column)).as_py():
            raise NotFromGroups("the rows are sorted by NaN")
    first_keys: dict[int, SortKey] = {}
    for key in sort_keys:  # A second sort key on the same column does not change the order.
        first_keys.setdefault(key.column, key)
    keys = [(str(key.column), "descending" if key.descending else "ascending") for key in first_keys.values()]
    return rows.take(pc.sort_indices(rows, sort_keys=keys))


def _to_array(column: pa.ChunkedArray) -> pa.Array:
    joined_column = column.combine_chunks()
    return joined_column if isinstance(joined_column, pa.Array) else pa.concat_arrays(joined_column.chunks)
