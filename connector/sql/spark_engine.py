"""Runs MERGE, UPDATE and DELETE on Spark, with Seamark as the catalog.

The session is a session of Spark Connect or a session in this process. Some expressions, for example `7 / 2`, have a
different meaning in Spark's SQL. Therefore only statements whose expressions all have the same meaning are sent to
Spark.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sqlglot import Dialect, exp
from sqlglot.errors import ErrorLevel

from seamark.connector.client.engines import EXTENSIONS, NO_HIVE, RUNTIME
from seamark.connector.client.errors import InvalidRequest, ServerFailed, Unreachable
from seamark.connector.spark.java import NO_GATEWAY, find_java_problem
from seamark.connector.sql.scopes import describe
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from pyspark import errors as spark_errors
    from pyspark import sql as spark_sql
else:
    spark_sql, spark_errors = LazyModule("pyspark.sql"), LazyModule("pyspark.errors")

_SPARK = Dialect.get_or_raise("spark")
_SAME_MEANING = frozenset(
    (
        *(exp.Merge, exp.Whens, exp.When, exp.Insert, exp.Update, exp.Delete, exp.Tuple, exp.Var, exp.Star),
        *(exp.Table, exp.TableAlias, exp.Identifier, exp.Column, exp.Alias, exp.Literal, exp.Null, exp.Boolean),
        *(exp.And, exp.Or, exp.Not, exp.Paren, exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE, exp.Is),
        *(exp.Add, exp.Sub, exp.Mul, exp.Neg, exp.Coalesce, exp.Select, exp.From, exp.Where, exp.Subquery),
    )
)
"""The nodes that have the same meaning in Trino's and in Spark's SQL."""


def write_spark_text(tree: exp.Expr, catalog: str, spark_catalog: str, schema: str | None) -> str:
    """Return the statement in Spark's SQL, with the tables in `spark_catalog`.

    Args:
        tree: The statement.
        catalog: The name of the catalog in the statement.
        spark_catalog: The name of the same catalog in Spark.
        schema: The schema of names without a schema. If it is None, such a name stays unchanged.

    Raises:
        InvalidRequest: An expression may have a different meaning in Spark.
    """
    new_tree = tree.copy()
    for node in new_tree.walk():
        if type(node) not in _SAME_MEANING:
            raise InvalidRequest(
                f"The statement runs on Spark, where {describe(node)} may have a different meaning; leave it out"
            )
        if isinstance(node, exp.Table) and (schema is not None or len(node.parts) > 1):
            parts = node.parts
            if len(parts) == 1:
                node.set("db", exp.to_identifier(schema, quoted=True))
            if len(parts) == 3 and parts[0].name.lower() != catalog.lower():
                raise InvalidRequest(f"{describe(node)} is not in the catalog {catalog!r}")
            node.set("catalog", exp.to_identifier(spark_catalog, quoted=True))
    return str(_SPARK.generate(new_tree, unsupported_level=ErrorLevel.RAISE))


def _make_session_conf() -> dict[str, str]:
    """Return settings that load Iceberg's jar from Maven Central, or no settings if Spark is already configured.

    Spark is configured by arguments in the environment, by a file `spark-defaults.conf`, or by a running session.
    """
    spec = importlib.util.find_spec("pyspark")
    home = os.environ.get("SPARK_HOME") or (str(Path(spec.origin).parent) if spec and spec.origin else "")
    folder = os.environ.get("SPARK_CONF_DIR") or os.path.join(home, "conf")
    if "PYSPARK_SUBMIT_ARGS" in os.environ or os.path.exists(os.path.join(folder, "spark-defaults.conf")):
        return {}
    if spark_sql.SparkSession.getActiveSession() is not None:
        return {}
    quiet = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
    own_settings = {"spark.jars.packages": RUNTIME, "spark.sql.extensions": EXTENSIONS}
    return {**own_settings, **quiet, **NO_HIVE}


class SparkStatements:
    """Runs statements in a Spark session."""

    def __init__(self, url: str, catalog: str, catalog_conf: Mapping[str, str]) -> None:
        """Start Spark, or connect to it.

        Args:
            url: The URL of Spark Connect, or a Spark master.
            catalog: The name of the catalog in Spark.
            catalog_conf: The settings of `catalog`, for a session in this process that does not have the catalog yet.

        Raises:
            Unreachable: Spark does not start, or cannot be reached.
        """
        builder = spark_sql.SparkSession.builder
        try:
            if url.startswith("sc://"):
                self._session = builder.remote(url).getOrCreate()
                return
            builder = builder.master(url)
            for key, value in _make_session_conf().items():
                builder = builder.config(key, value)
            self._session = builder.getOrCreate()
            if self._session.conf.get(f"spark.sql.catalog.{catalog}", None) is None:
                for key, value in catalog_conf.items():
                    self._session.conf.set(key, value)
        except (RuntimeError, OSError, spark_errors.PySparkException) as error:
            problem = find_java_problem() if NO_GATEWAY in str(error) else None
            raise Unreachable(f"No Spark at {url}: {problem or error}") from None

    def run(self, text: str) -> None:
        """Run a statement.

        Raises:
            InvalidRequest: Spark refuses the statement.
            ServerFailed: The statement fails.
        """
        try:
            self._session.sql(text).collect()
        except (spark_errors.AnalysisException, spark_errors.ParseException) as error:
            raise InvalidRequest(f"Spark refuses the statement: {_read_first_line(error)}", status=400) from None
        except spark_errors.PySparkException as error:
            raise ServerFailed(f"Spark failed: {_read_first_line(error)}", status=500) from None


def _read_first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:500]
