"""Hudi's bucket index under upserts, in its own Spark session, which reads lines of JSON and writes an answer for each.

The Python of `.cache/hudi/venv` (`make hudi`) runs this module with Hudi's jar and a scratch folder. Its requests:

    {"do": "make", "location": URI, "kind": "COPY_ON_WRITE", "files": […]}       create a table of these Parquet files
    {"do": "upsert", "location": URI, "kind": …, "path": …}                      upsert the rows of a Parquet file
    {"do": "count_rows_by_version", "location": URI}                             count the rows by version

An answer is {"seconds": …, "versions": {…}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.index.hudi_peer import NO_STATISTICS, open_session

BUCKETS = 16
OPTIONS = {
    **NO_STATISTICS,
    "hoodie.table.name": "t",
    "hoodie.datasource.write.recordkey.field": "k",
    "hoodie.datasource.write.precombine.field": "version",
    "hoodie.index.type": "BUCKET",
    "hoodie.index.bucket.engine": "SIMPLE",
    "hoodie.bucket.index.num.buckets": str(BUCKETS),
    "hoodie.bucket.index.hash.field": "k",
    "hoodie.metadata.global.record.level.index.enable": "false",
    "hoodie.metadata.enable": "false",
    "hoodie.parquet.small.file.limit": "0",
    "hoodie.parquet.compression.codec": "zstd",
    "hoodie.compact.inline": "false",
    "hoodie.clean.automatic": "false",
    "hoodie.upsert.shuffle.parallelism": "4",
    "hoodie.bulkinsert.shuffle.parallelism": str(BUCKETS),
}
"""The usual options of Hudi's users.

A batch includes no compaction and no cleaning. There is no metadata table: a bucket index does not read it, and each
commit would write it.
"""


class HudiWriterPeer:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def make(self, request: dict[str, Any]) -> None:
        rows = self._spark.read.parquet(*request["files"])
        self._write(rows, request, "bulk_insert", "overwrite")

    def upsert(self, request: dict[str, Any]) -> None:
        rows = self._spark.read.schema(request["schema"]).parquet(request["path"])
        self._write(rows, request, "upsert", "append")

    def _write(self, rows: Any, request: dict[str, Any], operation: str, mode: str) -> None:
        document = {
            "hoodie.datasource.write.operation": operation,
            "hoodie.datasource.write.table.type": request["kind"],
        }
        rows.write.format("hudi").options(**OPTIONS, **document).mode(mode).save(request["location"])

    def count_rows_by_version(self, request: dict[str, Any]) -> dict[int, int]:
        frame = self._spark.read.format("hudi").option("hoodie.metadata.enable", "false").load(request["location"])
        return {row[0]: row[1] for row in sorted(frame.groupBy("version").count().collect())}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Messages of Spark and Hudi go to the log.
    peer = HudiWriterPeer(open_session(Path(sys.argv[2]), sys.argv[1]))
    for line in sys.stdin:
        document = json.loads(line)
        started_s = time.perf_counter()
        result = getattr(peer, document["do"])(document)
        answer = {"seconds": time.perf_counter() - started_s, "versions": result}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
