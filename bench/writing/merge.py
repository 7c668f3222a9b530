"""Iceberg's own MERGE INTO, with settings of Spark and Iceberg that make it fast. A run tries each combination.

The catalog is a Hadoop catalog, which sends no request and syncs nothing. A broadcast of the source gains nothing: the
statement inserts rows without a match, so the join keeps all rows of the source, and Spark broadcasts only the other
side of such a join. Spark can make a hash table of the source instead of sorting both sides. If the table has buckets,
Spark exchanges only the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pyspark.sql import SparkSession

from bench.writing.tables import BUCKETED, FLAT, KEY, NAMESPACE, BaseTable, RowBatch, clone_table
from bench.writing.writers import (
    COPY_ON_WRITE,
    MERGE_ON_READ,
    MODES,
    build_frame,
    configure_session,
    count_versions,
    delete_unused_files,
)
from seamark.connector.client.engines import CATALOG_CLASS
from seamark.connector.spark.session import SHUFFLE_FREE, add_catalog

HASH_JOIN = {"spark.sql.join.preferSortMergeJoin": "false"}
NO_GROUP_FILTER = {"spark.sql.optimizer.runtime.rowLevelOperationGroupFilter.enabled": "false"}
CATALOG = "merged"


@dataclass(frozen=True)
class Tuning:
    """Settings of Spark and a layout of the table, with which MERGE INTO runs."""

    name: str
    mode: str
    layout: str
    conf: Mapping[str, str] = field(default_factory=dict)


TUNINGS = (
    Tuning("flat", MERGE_ON_READ, FLAT),
    Tuning("flat, hash join", MERGE_ON_READ, FLAT, HASH_JOIN),
    Tuning("buckets", MERGE_ON_READ, BUCKETED, SHUFFLE_FREE),
    Tuning("buckets, hash join", MERGE_ON_READ, BUCKETED, {**SHUFFLE_FREE, **HASH_JOIN}),
    Tuning("buckets", COPY_ON_WRITE, BUCKETED, SHUFFLE_FREE),
    Tuning("buckets, hash join", COPY_ON_WRITE, BUCKETED, {**SHUFFLE_FREE, **HASH_JOIN}),
    Tuning("buckets, no file filter", COPY_ON_WRITE, BUCKETED, {**SHUFFLE_FREE, **NO_GROUP_FILTER}),
)


class MergeWriter:
    def __init__(self, tuning: Tuning, base: BaseTable, spark: SparkSession, warehouse: Path, name: str) -> None:
        self.name, self.tuning_options = name, tuning
        self.folder = warehouse / NAMESPACE / name
        self._spark = spark
        self._table = f"{CATALOG}.{NAMESPACE}.{name}"
        clone_table(base, self.folder, {**dict.fromkeys(MODES, tuning.mode), "write.merge.distribution-mode": "none"})

    def upsert(self, batch: RowBatch) -> None:
        with configure_session(self._spark, self.tuning_options.conf):
            build_frame(self._spark, batch).createOrReplaceTempView("batch")
            self._spark.sql(
                f"MERGE INTO {self._table} t USING batch s ON t.{KEY} = s.{KEY}"
                " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )

    def count_rows_by_version(self) -> dict[int, int]:
        return count_versions(self._spark.table(self._table))

    def delete_old_files(self) -> None:
        if self.tuning_options.mode == COPY_ON_WRITE:
            live_files = self._spark.sql(f"SELECT file_path FROM {self._table}.files").collect()
            delete_unused_files(self.folder, {row[0] for row in live_files})


def add_hadoop_catalog(spark: SparkSession, warehouse: Path) -> None:
    prefix = f"spark.sql.catalog.{CATALOG}"
    add_catalog(spark, {prefix: CATALOG_CLASS, f"{prefix}.type": "hadoop", f"{prefix}.warehouse": warehouse.as_uri()})
