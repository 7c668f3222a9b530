"""Runs any SQL statement of Spark. Queries read only needed files, and changes read only rows that an index locates.

    from seamark.spark import sql
    sql(spark, "SELECT … FROM sea.db.t JOIN …").show()
    sql(spark, "MERGE INTO sea.db.t USING …")

All other statements are passed to Spark once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.cubes.summaries import OFF
from seamark.connector.plans.rewrites import LEASE_S, MAX_KEPT_FRACTION
from seamark.connector.spark.query import queries
from seamark.connector.spark.query.catalyst import Catalyst
from seamark.connector.spark.source.frame_writer import list_catalogs, make_catalog_hint
from seamark.connector.spark.statements.execution import execute, is_change

_UNKNOWN_NAME = re.compile(r"\[(?:TABLE_OR_VIEW_NOT_FOUND|REQUIRES_SINGLE_PART_NAMESPACE)\][^`]*`([^`]+)`")


def sql(
    spark: SparkSession,
    text: str,
    args: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    lease_s: int = LEASE_S,
    max_kept_fraction: float = MAX_KEPT_FRACTION,
    cubes: str = OFF,
) -> DataFrame:
    """Run a statement, and return the same result as `spark.sql(text, args)`.

    If possible, queries, including those of INSERT, CREATE TABLE AS and MERGE, read fewer files
    (`connector.spark.query.queries.sql`). If possible, MERGE, UPDATE and DELETE change the rows that an index locates,
    and INSERT OVERWRITE builds index files (`connector.spark.statements.execution.execute`).
    """
    try:
        if _is_change(spark, text):
            source_statement = queries.plan_source(
                spark, text, args, lease_s=lease_s, max_kept_fraction=max_kept_fraction
            )
            try:
                return execute(spark, source_statement, args).frame
            except AnalysisException as error:  # If the plan tables are gone, run the original text.
                if source_statement == text or not queries.is_plan_gone(error):
                    raise
            return execute(spark, text, args).frame
        return queries.sql(spark, text, args, lease_s=lease_s, max_kept_fraction=max_kept_fraction, cubes=cubes)
    except AnalysisException as error:
        _add_hint(spark, error)
        raise


def _add_hint(spark: SparkSession, error: AnalysisException) -> None:
    """Add a hint to the error if a table name has an unknown catalog that is similar to a catalog of the session."""
    match, catalog_names = _UNKNOWN_NAME.search(str(error)), list_catalogs(spark)
    if match is not None and match[1] not in catalog_names and catalog_names:
        error.add_note(f"{match[1]!r} is not a catalog of this session: {make_catalog_hint(match[1], catalog_names)}")


def _is_change(spark: SparkSession, text: str) -> bool:
    """Return whether the text is a row change or an INSERT OVERWRITE, which Seamark may run in its own way."""
    catalyst = Catalyst(spark)
    try:
        return is_change(catalyst, catalyst.parse(text))
    except (PySparkException, Py4JError):  # Spark reports this error again when it runs the text.
        return False
