"""Hudi's record index, queried in its own Spark session, which reads lines of JSON and writes an answer for each.

The Python of `.cache/hudi/venv` (`make hudi`) runs this module. It has PySpark 3.5 and no package of this project. The
arguments are the folder for tables, a Parquet file of rows with the key `k`, and the number of data files. The module
writes the table by bulk insert, and builds the record index with `CREATE INDEX`. Then it reads these requests:

    {"way": "sql", "keys": […]}      SELECT k … WHERE k = or IN (…), with data skipping by the record index
    {"way": "index", "keys": […]}    the reader of the metadata table, inside the driver's JVM: no Spark job
    {"way": "opened", "keys": […]}   the same reader, which stays open between requests
    {"way": "job"}                   a SQL query without work, which shows the fixed cost

An answer is {"seconds": …, "found": …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

INDEX_OPTIONS = {"hoodie.metadata.enable": "true", "hoodie.metadata.global.record.level.index.enable": "true"}
NO_STATISTICS = {
    "hoodie.metadata.index.column.stats.enable": "false",
    "hoodie.metadata.index.partition.stats.enable": "false",
}
"""Options that turn statistics off. With statistics, a list of 10,000 keys becomes an equally long OR, which keeps
Spark's optimizer busy for minutes. Statistics are useless for keys without an order.
"""
LOCK_OPTIONS = {"hoodie.write.lock.provider": "org.apache.hudi.client.transaction.lock.InProcessLockProvider"}
"""The options with which Hudi indexes a table that has no other writers."""


class HudiIndexPeer:
    """Hudi's record index in a Spark session. `opened` is a reader of the metadata table that stays open."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._spark = spark
        self._jvm: Any = spark.sparkContext._jvm
        self._location = f"{folder.as_uri()}/t"
        self._keys_path = folder / "keys"

    def create(self, rows: str, files: int) -> dict[str, Any]:
        options = {
            "hoodie.table.name": "t",
            "hoodie.datasource.write.recordkey.field": "k",
            "hoodie.datasource.write.operation": "bulk_insert",
            "hoodie.bulkinsert.shuffle.parallelism": str(files),
            "hoodie.metadata.enable": "true",
            **NO_STATISTICS,
        }
        started_s = time.perf_counter()
        rows_frame = self._spark.read.parquet(rows).repartition(files)
        rows_frame.write.format("hudi").options(**options).mode("overwrite").save(self._location)
        write_s = time.perf_counter() - started_s
        self._spark.sql(f"CREATE TABLE t USING hudi LOCATION '{self._location}'")
        started_s = time.perf_counter()
        self._spark.sql("CREATE INDEX record_index ON t (k)")
        index_s = time.perf_counter() - started_s
        index = Path(self._location.removeprefix("file://")) / ".hoodie" / "metadata" / "record_index"
        paths = [
            path
            for path in index.iterdir()
            if path.suffix == ".hfile" or (".log." in path.name and path.suffix != ".crc")
        ]
        sizes = [path.stat().st_size for path in paths]
        self.opened = self._open_reader()
        return {"seconds": index_s, "write_seconds": write_s, "index_bytes": sum(sizes), "index_files": len(sizes)}

    def answer(self, way: str, keys: list[str]) -> dict[str, Any]:
        """Look up keys, and return the seconds and the number of keys that were found.

        Args:
            way: "job" runs an empty Spark job without keys, "sql" runs a query, and "opened" uses the reader that stays
                open. Any other text opens a new reader.
        """
        if way == "job":
            started_s = time.perf_counter()
            self._spark.sql("SELECT 1").collect()
            return {"seconds": time.perf_counter() - started_s, "found": 0}
        if way == "sql":
            condition = f"= '{keys[0]}'" if len(keys) == 1 else f"IN ({','.join(map(repr, keys))})"
            started_s = time.perf_counter()
            frame = self._spark.sql(f"SELECT _hoodie_file_name, k FROM t WHERE k {condition}")
            rows = frame.collect()
            seconds = time.perf_counter() - started_s
            return {"seconds": seconds, "found": len(rows), "files": self._count_files_read(frame)}
        key_list = self._to_hoodie_list(keys)
        started_s = time.perf_counter()
        reader = self.opened if way == "opened" else self._open_reader()
        row_count = reader.readRecordIndexLocationsWithKeys(key_list).collectAsList().size()
        seconds = time.perf_counter() - started_s
        if way != "opened":
            reader.close()
        return {"seconds": seconds, "found": row_count}

    @staticmethod
    def _count_files_read(frame: Any) -> int:
        """Return the number of data files that the scan of a query still reads after pruning."""
        leaf = frame._jdf.queryExecution().executedPlan().collectLeaves().head()
        return int(leaf.metrics().apply("numFiles").value())

    def _to_hoodie_list(self, keys: list[str]) -> Any:
        """Return the keys as a list of Hudi.

        They are passed in a file, because the gateway would send them one by one.
        """
        self._keys_path.write_text("\n".join(keys))
        strings = self._jvm.java.nio.file.Files.readAllLines(self._jvm.java.io.File(str(self._keys_path)).toPath())
        return self._jvm.org.apache.hudi.common.data.HoodieListData.eager(strings)

    def _open_reader(self) -> Any:
        """Return a new reader of Hudi's metadata table, which contains the record index."""
        hudi = self._jvm.org.apache.hudi
        conf = hudi.storage.hadoop.HadoopStorageConfiguration(
            self._spark._jsc.hadoopConfiguration()  # type: ignore[attr-defined]
        )
        storage = hudi.storage.HoodieStorageUtils.getStorage(self._location, conf)
        properties = self._jvm.java.util.Properties()
        for name, value in INDEX_OPTIONS.items():
            properties.setProperty(name, value)
        config = hudi.common.config.HoodieMetadataConfig.newBuilder().fromProperties(properties).build()
        context = hudi.common.engine.HoodieLocalEngineContext(conf)
        # The last argument, `reuse`, keeps the index's files open between the lookups of this reader.
        return hudi.metadata.HoodieBackedTableMetadata(context, storage, config, self._location, True)


def open_session(folder: Path, jar: str) -> SparkSession:
    settings = {
        "spark.jars": jar,
        "spark.driver.memory": "6g",
        "spark.driver.extraJavaOptions": "-Xss256m",  # Data skipping turns a list into a deeply nested OR.
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
        "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
        "spark.kryo.registrator": "org.apache.spark.HoodieSparkKryoRegistrar",
        "spark.sql.extensions": "org.apache.spark.sql.hudi.HoodieSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.hudi.catalog.HoodieCatalog",
        "spark.sql.shuffle.partitions": "2",
        **{f"spark.hadoop.{name}": value for name, value in INDEX_OPTIONS.items()},
    }
    builder = SparkSession.builder.master("local[2]").appName("hudi")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    for name, value in {
        **INDEX_OPTIONS,
        **NO_STATISTICS,
        **LOCK_OPTIONS,
        "hoodie.enable.data.skipping": "true",
    }.items():
        spark.sql(f"SET {name}={value}")
    return spark


def main() -> None:
    """Write and index the table with Hudi, and then answer each request that arrives on the standard input.

    A request is a line of JSON. Its `way` names how the keys are looked up: by SQL or by Hudi's reader of the index.
    The answers are lines of JSON on the standard output.
    """
    jar, folder, rows, files = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Messages of Spark and Hudi go to the log.
    hudi_index = HudiIndexPeer(open_session(folder, jar), folder)
    print(json.dumps(hudi_index.create(rows, files)), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(hudi_index.answer(request["way"], request.get("keys", []))), file=answers, flush=True)


if __name__ == "__main__":
    main()
