"""Runs statements that maintain the files of a table (`connector/jobs/statements.py`) as Spark jobs.

A statement is run here only if its table is in a catalog of the session whose server is Seamark. Other statements are
passed to Spark, which does not know them. Each batch of files is a Spark task. The job uses the token of the catalog,
so it has the same rights as any commit of the session.
"""

from __future__ import annotations

from functools import partial
from typing import get_type_hints

import msgspec
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import StatementResult, TableStatement
from seamark.connector.plans.quotes import backquote
from seamark.connector.plans.zones import is_utc
from seamark.connector.spark.rewrites import keep_job_group, run_on_spark

_SCHEMA = ", ".join(f"{name} bigint" for name in get_type_hints(StatementResult))


def run_maintenance(spark: SparkSession, statement: TableStatement) -> DataFrame | None:
    """Run a statement that maintains the files of a table, and return the counts of the job in one row.

    Spark then reloads the table, because its cached metadata may have the old files.

    Returns:
        The counts, or None if the table is not in a catalog of Seamark.

    Raises:
        ClientError: The server refuses the job.
        Unreadable: A file cannot be read.
    """
    catalog, levels = _resolve_name(spark, statement.table)
    uri, token = (spark.conf.get(f"spark.sql.catalog.{catalog}.{key}", "") or "" for key in ("uri", "token"))
    if not uri.startswith("http") or len(levels) < 2:
        return None
    client = SeamarkClient(uri, token=token or None)
    utc = is_utc(spark.conf.get("spark.sql.session.timeZone") or "")
    try:
        with keep_job_group(spark):
            result = run_statement(
                client, msgspec.structs.replace(statement, table=levels), utc=utc, runner=partial(run_on_spark, spark)
            )
    finally:
        client.close()
    spark.catalog.refreshTable(".".join(map(backquote, (catalog, *levels))))
    return spark.createDataFrame([msgspec.structs.astuple(result)], _SCHEMA)


def _resolve_name(spark: SparkSession, name: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the catalog, and the levels of the table's name in the catalog, as Spark resolves the name."""
    if len(name) > 1 and spark.conf.get(f"spark.sql.catalog.{name[0]}", None):
        return name[0], name[1:]
    catalog = spark.catalog.currentCatalog()
    if len(name) > 1:
        return catalog, name
    current = spark.sql("SELECT current_schema()").collect()[0][0]
    return catalog, (*str(current).split("."), *name)
