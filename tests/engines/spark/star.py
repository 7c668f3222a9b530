"""A small star schema for queries in Spark, and a check that a query returns Spark's own rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import SparkSession

from seamark.connector.spark.query import queries
from seamark.connector.spark.query.queries import RewrittenQuery, rewrite_query
from seamark.spark import sql
from tests.services.seamark import Seamark

MERGE_ON_READ_PROPERTIES = ", ".join(
    f"'write.{operation}.mode'='merge-on-read'" for operation in ("delete", "update", "merge")
)
SALES = (
    "id, IF(id % 17 = 0, NULL, CAST(id DIV 12 AS int)) AS item, IF(id % 13 = 0, NULL, id % 9) AS store, "
    "date_add(DATE'2026-01-01', CAST(id DIV 4 AS int)) AS day, "
    "TIMESTAMP'2026-01-01 00:30:00' + make_interval(0, 0, 0, 0, CAST(id * 7 AS int)) AS at, "
    "IF(id % 11 = 0, NULL, TIMESTAMP_NTZ'2026-01-01 03:00:00' + make_interval(0, 0, 0, CAST(id DIV 3 AS int))) AS nt, "
    "CAST(id AS decimal(9,2)) / 8 AS price, CASE WHEN id % 19 = 0 THEN double('NaN') WHEN id % 7 = 0 THEN NULL "
    "WHEN id % 5 = 0 THEN -0.0D ELSE CAST(id DIV 60 AS double) END AS weight, "
    "IF(id % 10 = 0, NULL, concat('a', id DIV 30)) AS note, id % 3 = 0 AS ok, IF(id % 29 = 0, NULL, named_struct("
    "'code', IF(id % 31 = 0, NULL, CAST(id DIV 20 AS int)), 'tag', concat('a', id DIV 40))) AS info"
)


@dataclass(frozen=True)
class StarRig:
    """A Spark session, and a server whose catalog it uses. `{db}` in a query is the namespace of the star schema."""

    spark: SparkSession
    server: Seamark
    catalog: str

    @property
    def db(self) -> str:
        return f"{self.catalog}.db"

    def run(self, text: str) -> list[str]:
        return collect_rows(self.spark.sql(text.replace("{db}", self.db)))

    def run_with_plans(self, text: str, args: Any = None, **options: Any) -> list[str]:
        return collect_rows(sql(self.spark, text.replace("{db}", self.db), args, **options))

    def rewrite(self, text: str, args: Any = None) -> RewrittenQuery:
        return rewrite_query(self.spark, text.replace("{db}", self.db), args)

    def check_same(self, text: str, args: Any = None, *, min_rows: int = 0) -> RewrittenQuery:
        """Check that the query returns Spark's own rows, and at least `min_rows` rows.

        Returns:
            How the query was rewritten.
        """
        text = text.replace("{db}", self.db)
        expected = collect_rows(self.spark.sql(text, args) if args is not None else self.spark.sql(text))
        assert len(expected) >= min_rows, text
        rewrites: list[RewrittenQuery] = []

        def record_rewrite(*arguments: Any, **options: Any) -> RewrittenQuery:
            rewrites.append(rewrite_query(*arguments, **options))
            return rewrites[-1]

        with pytest.MonkeyPatch.context() as context:
            context.setattr(queries, "rewrite_query", record_rewrite)
            assert self.run_with_plans(text, args) == expected, text
        (only_rewrite,) = rewrites
        return only_rewrite


def collect_rows(frame: Any) -> list[str]:
    return sorted(repr(tuple(row)) for row in frame.collect())


def create_star(rig: StarRig) -> None:
    """Create a star schema in format version 3.

    The facts are in two dozen files of three specs, and some rows changed.
    """
    rig.run(
        "CREATE TABLE {db}.sales (id bigint, item int, store bigint, day date, at timestamp, nt timestamp_ntz, "
        "price decimal(9,2), weight double, note string, ok boolean, info struct<code int, tag string>) USING iceberg "
        f"TBLPROPERTIES ('format-version'='3', 'write.distribution-mode'='none', 'write.spark.fanout.enabled'='true', "
        f"{MERGE_ON_READ_PROPERTIES})"
    )
    for first_id in range(0, 240, 60):
        if first_id == 60:
            rig.run("ALTER TABLE {db}.sales ADD PARTITION FIELD bucket(2, store)")
        if first_id == 120:
            rig.run("ALTER TABLE {db}.sales ADD PARTITION FIELD months(day)")
        rows_sql = f"SELECT {SALES} FROM range({first_id}, {first_id + 60})"
        rig.run(f"INSERT INTO {{db}}.sales SELECT /*+ REPARTITION_BY_RANGE(3, id) */ * FROM ({rows_sql})")
    rig.run("DELETE FROM {db}.sales WHERE id % 23 = 5")
    rig.run("UPDATE {db}.sales SET note = 'red', item = 3 WHERE id IN (8, 44, 131)")
    rig.run(
        "CREATE TABLE {db}.items (i_id bigint, brand int, color string, size int) USING iceberg "
        "TBLPROPERTIES ('write.distribution-mode'='none')"
    )
    rig.run(
        "INSERT INTO {db}.items SELECT /*+ REPARTITION_BY_RANGE(2, i_id) */ * FROM (SELECT id AS i_id, "
        "CAST(id DIV 3 AS int), element_at(array('red', 'blue', 'c5', NULL), CAST(id % 4 AS int) + 1), "
        "CAST(id AS int) FROM range(20))"
    )
    rig.run("CREATE TABLE {db}.brands (b_id int, b_name string) USING iceberg")
    rig.run("INSERT INTO {db}.brands SELECT CAST(id AS int), concat('a', id) FROM range(8)")
    rig.run("CREATE TABLE {db}.stores (s_id bigint, city string, opened date) USING iceberg")
    rig.run(
        "INSERT INTO {db}.stores SELECT id, concat('c', id), date_add(DATE'2026-01-05', CAST(id AS int)) FROM range(8)"
    )


@contextmanager
def change_settings(spark: SparkSession, settings: dict[str, str]) -> Iterator[None]:
    old_settings = {name: spark.conf.get(name) or "" for name in settings}
    try:
        for name, value in settings.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, value in old_settings.items():
            spark.conf.set(name, value)
