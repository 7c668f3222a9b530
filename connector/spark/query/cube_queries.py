"""Runs an aggregate query in Spark on groups of a cube, which become a temporary view.

The result has the names and types of the original query. If the types of the new query differ from those of the
original query, the original query runs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.connector.cubes.dialects import SPARK, NotFromCube
from seamark.connector.cubes.plans import find_cube_table
from seamark.connector.cubes.sketches import convert_sketches, encode_for_spark
from seamark.connector.cubes.star_scans import StarScan, translate_star
from seamark.connector.cubes.statements import CubeStatement, translate_statement
from seamark.connector.plans.quotes import backquote
from seamark.connector.plans.zones import is_utc
from seamark.formats.iceberg.expressions.sql_parser import parse_statements

_SPARK = Dialect.get_or_raise("spark")
_UNCLEAR = re.compile(r"\\|\btry_|\bdiv\b|\$\{|:", re.IGNORECASE)
"""Matches texts that sqlglot and Spark may read differently: escapes, TRY_CAST, integer division and parameters."""


def translate_text(
    spark: SparkSession, text: str, scans: Sequence[StarScan], *, floats: bool
) -> tuple[int, CubeStatement]:
    """Translate a query to a statement over a cube. The cube is of the only table, or of a table of a star join.

    Args:
        spark: The session. Its settings must be those under which cubes give the same results as Spark.
        text: The query.
        scans: The reads of the query's tables, with their conditions.
        floats: Whether sums of floats, and averages that are floats, may be used. Their last digits depend on the order
            of the additions.

    Returns:
        The index in `scans` of the scan whose table has the cube, and the translation.

    Raises:
        NotFromCube: The query cannot be computed from a cube.
    """
    if not is_utc(str(spark.conf.get("spark.sql.session.timeZone"))):
        raise NotFromCube("the time zone of the session is not UTC")
    if str(spark.conf.get("spark.sql.ansi.enabled")).lower() != "true":
        raise NotFromCube("spark.sql.ansi.enabled is not true")
    if _UNCLEAR.search(text):
        raise NotFromCube("the query has an escape, a parameter or a TRY function")
    try:
        trees = parse_statements(_SPARK, text)
    except (SqlglotError, RecursionError):
        raise NotFromCube("the syntax is not supported") from None
    if len(trees) != 1 or trees[0] is None:
        raise NotFromCube("the statement is not a single query")
    if len(scans) > 1:
        return translate_star(trees[0], scans, _find_start, SPARK, floats=floats)
    cubes = find_cube_table(scans[0].table, truncates_in_utc=True)
    if cubes is None:
        raise NotFromCube("the table has no cube")
    return 0, translate_statement(trees[0], cubes, SPARK, floats=floats)


def _find_start(node: exp.Table) -> int:
    return int(node.parts[0].meta["start"])


@dataclass(frozen=True)
class QueryOverCube:
    """A query over a cube.

    Attributes:
        text: The original query.
        statement: Its translation.
        groups: The groups of the covered files.
        rows: The plan table with the other files, or None if the cube covers all files.
    """

    text: str
    statement: CubeStatement
    groups: pa.Table
    rows: tuple[str, ...] | None

    def run(self, spark: SparkSession) -> DataFrame:
        """Return the DataFrame of the query.

        The groups are a temporary view while Spark analyses the query. The names of the result are those of the
        original query, which is analysed but not run.

        Raises:
            NotFromCube: The types of the result differ from those of the original query.
            PySparkException: Spark does not accept the query.
        """
        original = spark.sql(self.text)
        view = f"seamark_groups_{uuid.uuid4().hex}"
        groups = convert_sketches(self.groups, self.statement, encode_for_spark)
        spark.createDataFrame(_format_zoneless_times(groups)).createTempView(view)
        try:
            frame = spark.sql(
                self.statement.write(view, None if self.rows is None else ".".join(map(backquote, self.rows)))
            )
        finally:
            spark.catalog.dropTempView(view)
        types = [[field.dataType for field in result.schema.fields] for result in (original, frame)]
        if types[0] != types[1]:
            raise NotFromCube(f"the result has types {types[0]}, but the original query has types {types[1]}")
        return frame.toDF(*original.columns)


def _format_zoneless_times(groups: pa.Table) -> pa.Table:
    """Return the groups, with times without a zone as text. Spark reads this text without regard to time zones.

    Raises:
        NotFromCube: A time is not in the years from 1 to 9999.
    """
    for number, field in enumerate(groups.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is None:
            years = pc.min_max(pc.year(groups[field.name])).as_py()
            if not ((years["min"] or 1) >= 1 and (years["max"] or 1) <= 9999):
                raise NotFromCube("a time is not in the years from 1 to 9999")
            groups = groups.set_column(number, field.name, groups[field.name].cast(pa.string()))
    return groups
