"""Writes the SQL with which each engine combines partial aggregates.

Each function returns SQL of the engine. If an engine's result cannot be computed from the partial aggregates, the
function raises `NotFromCube`. For example, NaN is the greatest float in DuckDB and Spark, but a cube stores the
greatest number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sqlglot import exp

from seamark.connector.cubes.sketch_calls import format_count_sql, format_sketch_sql
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import get_decimal_precision, get_decimal_scale
from seamark.formats.index.keys.measures import (
    APPROX_DISTINCT,
    AVG,
    COUNT,
    MAX,
    MIN,
    PRECISION_MAX,
    SUM,
    ColumnOperand,
    Measure,
    NumberOperand,
    Operand,
    Partial,
    get_decimal_digits,
)

_INTEGERS = ("int", "long")
_FLOATS = ("float", "double")


class NotFromCube(Exception):
    """Raised if a cube cannot answer a query. The message is the reason."""


class CubeDialect(ABC):
    """The parts of an engine's SQL that queries over cubes need.

    Attributes:
        name: The name of the dialect in sqlglot.
        quote: The character around names.
        types: The engine's types by Iceberg type, without decimals.
        lowers_names: Whether the engine shows the names of columns in lower case.
        time_literals: Further types that sqlglot gives to the literal `TIMESTAMP '…'`.
        sketch_type: The type of sketches of distinct values.
        sketches_rows: Whether the engine adds rows to sketches. Otherwise, the cube must cover all files.
        checks_written_form: Whether a query must be equal to the query that is parsed from its text.
    """

    name: str
    quote = '"'
    types: Mapping[str, str]
    lowers_names = False
    time_literals: tuple[exp.DType, ...] = ()
    sketch_type: str
    sketches_rows = False
    checks_written_form = True

    def prepare(self, select: exp.Select) -> exp.Select:
        """Replace nodes whose meaning sqlglot would change when it writes them as text, in a copy of the query.

        By default, there are no such nodes, and the query itself is returned.
        """
        return select

    def quote_name(self, name: str) -> str:
        return self.quote + name.replace(self.quote, 2 * self.quote) + self.quote

    def name_type(self, kind: str) -> str:
        """Return the engine's name of an Iceberg type.

        Raises:
            NotFromCube: Values of the type are not used in cubes.
        """
        if get_base_name(kind) == "decimal":
            return f"DECIMAL({get_decimal_precision(kind)}, {get_decimal_scale(kind)})"
        if get_base_name(kind) not in self.types:
            raise NotFromCube(f"the type {kind} is not supported in cubes of {self.name}")
        return self.types[get_base_name(kind)]

    def truncate(self, unit: str, column: str, kind: str) -> str:
        """Return a time truncated to a unit, with the type of the time."""
        return f"CAST(date_trunc('{unit}', {column}) AS {self.name_type(kind)})"

    def find_partial_type(self, partial: Partial) -> str:
        """Return the type that a partial aggregate has in the union of the cube's groups and of rows of other files.

        Sums of floats are doubles. Sums of other numbers have the type of `sum_type`.

        Raises:
            NotFromCube: Values of the type are not used in cubes.
        """
        if partial.function == COUNT or partial.operand is None:
            return self.name_type("long")
        if partial.function == APPROX_DISTINCT:
            return self.sketch_type
        kind = partial.operand.kind
        if partial.function != SUM:
            return self.name_type(kind)
        return self.name_type("double") if kind in _FLOATS else self.sum_type(kind)

    def sum_type(self, kind: str) -> str:
        """Return the type of the partial sums of integers or decimals."""
        return f"DECIMAL({PRECISION_MAX}, {get_decimal_digits(kind)[1]})"

    def adds_floats(self, measure: Measure) -> bool:
        """Return whether the last digits of an aggregate depend on the order of additions.

        This is true for sums of floats, and for averages, which are divisions of doubles.
        """
        is_float = measure.operand is not None and measure.operand.kind in _FLOATS
        return measure.function == AVG or (measure.function == SUM and is_float)

    def combine(self, measure: Measure, columns: Sequence[str], filter_clause: str) -> str:
        """Return an aggregate of rows as an aggregate of partial aggregates.

        Args:
            measure: The aggregate.
            columns: The columns of its partial aggregates.
            filter_clause: An empty text, or FILTER with a condition on groups.

        Raises:
            NotFromCube: This engine cannot compute the aggregate from its partial aggregates.
        """
        first = columns[0]
        if measure.function == COUNT:
            return f"CAST(coalesce(sum({first}){filter_clause}, 0) AS {self.name_type('long')})"
        operand = measure.operand
        assert operand is not None
        if measure.function == APPROX_DISTINCT:
            return self.write_distinct_count(first, filter_clause)
        if measure.function == MIN:
            self.check_extreme(operand)
            return f"min({first}){filter_clause}"
        if measure.function == MAX:
            self.check_extreme(operand)
            return self.combine_maximum(first, operand, filter_clause)
        if measure.function == SUM:
            return self.combine_sum(first, operand, filter_clause)
        assert measure.function == AVG
        return self.combine_average(first, columns[1], operand, filter_clause)

    @abstractmethod
    def write_distinct_count(self, column: str, filter_clause: str) -> str:
        """Return SQL for the number of distinct values that the merged sketches of a column estimate."""

    def sketch_row(self, value: str, kind: str) -> str:
        """Return the sketch of the value of one row, in SQL.

        By default it is null. Engines that do not override this method read no rows beside the groups, because the cube
        must cover all files, so the result is never computed.
        """
        # The CASE is always null. It has the type of sketches, because groups and rows are combined by UNION ALL.
        return f"CASE WHEN {value} IS NULL THEN CAST(NULL AS {self.sketch_type}) END"

    def check_extreme(self, operand: Operand) -> None:
        """Check that the minimum or maximum of the operand has the same type in a cube and in the engine.

        Raises:
            NotFromCube: The type of the operand may differ.
        """
        if not isinstance(operand, ColumnOperand) and get_base_name(operand.kind) == "decimal":
            raise NotFromCube(f"{self.name} may give the minimum or maximum of computed decimals another type")

    def combine_maximum(self, column: str, operand: Operand, filter_clause: str) -> str:
        if operand.kind in _FLOATS:
            raise NotFromCube(f"NaN is the greatest value in {self.name}, and a cube has the greatest number")
        return f"max({column}){filter_clause}"

    @abstractmethod
    def combine_sum(self, column: str, operand: Operand, filter_clause: str) -> str:
        """Return the sum of a column of partial sums, with the type of the engine's sum."""

    def combine_average(self, column: str, count: str, operand: Operand, filter_clause: str) -> str:
        """Return the average as a division of doubles."""
        total, rows = f"CAST(sum({column}){filter_clause} AS DOUBLE)", f"CAST(sum({count}){filter_clause} AS DOUBLE)"
        return f"({total} / nullif({rows}, 0))"

    @abstractmethod
    def count_as_sum(self, row_counts: str, filter_clause: str) -> str:
        """Return SQL with the value and the type of `sum(1)`: the sum of the row counts of the groups.

        Args:
            row_counts: The column with the number of rows of each group.
            filter_clause: The FILTER clause of the aggregate, or an empty text.
        """

    def count_if(self, row_counts: str, condition: str) -> str:
        """Return SQL with the value of `count_if(condition)`. `row_counts` is the column of the groups' row counts."""
        return self.combine(Measure(COUNT, None), [row_counts], f" FILTER (WHERE {condition})")


class DuckDBCubes(CubeDialect):
    """The SQL of DuckDB."""

    name = "duckdb"
    sketch_type = "BLOB"
    sketches_rows = True
    types = MappingProxyType(
        {
            "boolean": "BOOLEAN",
            "int": "INTEGER",
            "long": "BIGINT",
            "float": "FLOAT",
            "double": "DOUBLE",
            "string": "VARCHAR",
            "binary": "BLOB",
            "fixed": "BLOB",
            "date": "DATE",
            "time": "TIME",
            "uuid": "UUID",
            "timestamp": "TIMESTAMP",
            "timestamptz": "TIMESTAMPTZ",
        }
    )

    def write_distinct_count(self, column: str, filter_clause: str) -> str:
        return format_count_sql(column, filter_clause)

    def sketch_row(self, value: str, kind: str) -> str:
        return format_sketch_sql(value, self.types[kind])

    def sum_type(self, kind: str) -> str:
        return "HUGEINT" if kind in _INTEGERS else super().sum_type(kind)

    def combine_sum(self, column: str, operand: Operand, filter_clause: str) -> str:
        return f"sum({column}){filter_clause}"

    def count_as_sum(self, row_counts: str, filter_clause: str) -> str:
        return f"sum(CAST({row_counts} AS HUGEINT)){filter_clause}"

    def count_if(self, row_counts: str, condition: str) -> str:
        """Return SQL with the value of DuckDB's `count_if(condition)`.

        DuckDB returns null instead of 0 if the condition is null for all rows. The CASE has the same result.
        """
        return f"sum(CASE WHEN {condition} THEN {row_counts} WHEN NOT ({condition}) THEN 0 END)"


class TrinoCubes(CubeDialect):
    """The SQL of Trino."""

    name = "trino"
    sketch_type = "HyperLogLog"
    lowers_names = True
    types = MappingProxyType(
        {
            "boolean": "BOOLEAN",
            "int": "INTEGER",
            "long": "BIGINT",
            "float": "REAL",
            "double": "DOUBLE",
            "string": "VARCHAR",
            "binary": "VARBINARY",
            "fixed": "VARBINARY",
            "date": "DATE",
            "time": "TIME(6)",
            "uuid": "UUID",
            "timestamp": "TIMESTAMP(6)",
            "timestamptz": "TIMESTAMP(6) WITH TIME ZONE",
        }
    )

    def prepare(self, select: exp.Select) -> exp.Select:
        """Return the query with `x IS NOT DISTINCT FROM TRUE` for `x IS TRUE`, which sqlglot writes as `x`."""

        def replace_test(node: exp.Expr) -> exp.Expr:
            if isinstance(node, exp.Is) and isinstance(node.expression, exp.Boolean):
                value = node.this.transform(replace_test)  # sqlglot does not visit the nodes below a replaced node.
                value = value if isinstance(value, exp.Column | exp.Paren) else exp.Paren(this=value)
                return exp.NullSafeEQ(this=value, expression=node.expression)
            return node

        if select.find(exp.Is) is None:
            return select
        new_select = select.transform(replace_test)
        assert isinstance(new_select, exp.Select)
        return new_select

    def adds_floats(self, measure: Measure) -> bool:
        is_decimal = measure.operand is not None and get_base_name(measure.operand.kind) == "decimal"
        return super().adds_floats(measure) and not is_decimal

    def write_distinct_count(self, column: str, filter_clause: str) -> str:
        return f"coalesce(cardinality(merge({column}){filter_clause}), 0)"

    def check_extreme(self, operand: Operand) -> None:
        """Accept the minimum or maximum of each operand, because a cube computes it with the type that Trino uses."""

    def combine_maximum(self, column: str, operand: Operand, filter_clause: str) -> str:
        if operand.kind not in _FLOATS:
            return f"max({column}){filter_clause}"
        # NaN is the result only if all values are NaN.
        number = f"CASE WHEN is_nan({column}) THEN NULL ELSE {column} END"
        return f"coalesce(max({number}){filter_clause}, max({column}){filter_clause})"

    def combine_sum(self, column: str, operand: Operand, filter_clause: str) -> str:
        if get_base_name(operand.kind) == "decimal":
            return f"sum({column}){filter_clause}"
        kind = "long" if operand.kind in _INTEGERS else operand.kind
        return f"CAST(sum({column}){filter_clause} AS {self.name_type(kind)})"

    def combine_average(self, column: str, count: str, operand: Operand, filter_clause: str) -> str:
        if get_base_name(operand.kind) == "decimal":
            rows = f"CAST(nullif(sum({count}){filter_clause}, 0) AS DECIMAL(19, 0))"
            return f"CAST(sum({column}){filter_clause} / {rows} AS {self.name_type(operand.kind)})"
        average = super().combine_average(column, count, operand, filter_clause)
        return f"CAST({average} AS REAL)" if operand.kind == "float" else average

    def count_as_sum(self, row_counts: str, filter_clause: str) -> str:
        return f"CAST(sum({row_counts}){filter_clause} AS BIGINT)"


class SparkCubes(CubeDialect):
    """The SQL of Spark in ANSI mode, in which an overflow of a sum is an error."""

    name = "spark"
    quote = "`"
    sketch_type = "BINARY"
    checks_written_form = False  # sqlglot reads back the time literals that it writes with other types.
    time_literals = (exp.DType.TIMESTAMPTZ,)
    types = MappingProxyType(
        {
            "boolean": "BOOLEAN",
            "int": "INT",
            "long": "BIGINT",
            "float": "FLOAT",
            "double": "DOUBLE",
            "string": "STRING",
            "binary": "BINARY",
            "fixed": "BINARY",
            "date": "DATE",
            "timestamp": "TIMESTAMP_NTZ",
            "timestamptz": "TIMESTAMP",
        }
    )

    def write_distinct_count(self, column: str, filter_clause: str) -> str:
        return f"coalesce(hll_sketch_estimate(hll_union_agg({column}){filter_clause}), 0)"

    def combine_sum(self, column: str, operand: Operand, filter_clause: str) -> str:
        if operand.kind in _FLOATS:
            return f"sum({column}){filter_clause}"
        if operand.kind in _INTEGERS:
            return f"CAST(sum({column}){filter_clause} AS BIGINT)"
        precision, scale = _find_spark_digits(operand)
        return f"CAST(sum({column}){filter_clause} AS DECIMAL({min(PRECISION_MAX, precision + 10)}, {scale}))"

    def combine_average(self, column: str, count: str, operand: Operand, filter_clause: str) -> str:
        if get_base_name(operand.kind) == "decimal":
            raise NotFromCube("an average of decimals has more digits in spark than a cube")
        return super().combine_average(column, count, operand, filter_clause)

    def count_as_sum(self, rows: str, filter_clause: str) -> str:
        return f"sum({rows}){filter_clause}"


def _find_spark_digits(operand: Operand) -> tuple[int, int]:
    """Return the precision and the scale that Spark gives to a number, by Spark's rules for decimal arithmetic.

    A product has the digits of both factors and one more. A sum has the larger integer part, the larger scale, and one
    more digit. Spark treats an int as a decimal with 10 digits, and a long as a decimal with 20 digits.

    Raises:
        NotFromCube: Spark would round the number, because it has more than 38 digits.
    """
    match operand:
        case ColumnOperand():
            integers = {"int": 10, "long": 20}
            return (integers[operand.kind], 0) if operand.kind in integers else get_decimal_digits(operand.kind)
        case NumberOperand():
            integer_digits, _, fraction = operand.text.partition(".")
            return max(1, len(integer_digits.lstrip("0")) + len(fraction)), len(fraction)
    (p, s), (q, t) = _find_spark_digits(operand.left), _find_spark_digits(operand.right)
    scale = s + t if operand.sign == "*" else max(s, t)
    digits = p + q + 1 if operand.sign == "*" else max(p - s, q - t) + scale + 1
    if digits > PRECISION_MAX:
        raise NotFromCube("spark rounds a number of the sum")
    return digits, scale


DUCKDB, TRINO, SPARK = DuckDBCubes(), TrinoCubes(), SparkCubes()
