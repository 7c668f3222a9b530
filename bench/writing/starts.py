"""The time of a compaction including the start of its process: a Seamark process, or a new JVM with Spark.

A user who schedules maintenance with cron or a workflow pays for the start each time. Spark starts a local session;
`spark-submit` to a cluster is not faster. The tables are those of `upkeep.py`, rolled back to their small files.

    python -m bench.writing.starts URL TABLE FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession

from bench.report import OURS
from bench.writing.session import CATALOG, SPARK
from seamark.connector.spark.session import connect
from tests.services.spark import spark_session

_TIMEOUT_S = 600
REWRITE = "CALL {}.system.rewrite_data_files(table => '{}', options => map('min-input-files', '2'))"


def measure_compaction_processes(
    url: str, spark: SparkSession, tables: Mapping[str, str], snapshot_ids: Mapping[str, int], folder: Path
) -> dict[str, float]:
    """Compact a table in a new process of each engine, and return the milliseconds until the process has ended.

    Args:
        tables: The table of each engine.
        snapshot_ids: The snapshot with the small files, by engine. The tables are first rolled back to it.
    """
    for name, table in tables.items():
        spark.sql(
            f"CALL {CATALOG}.system.rollback_to_snapshot(table => '{table}', snapshot_id => {snapshot_ids[name]})"
        ).collect()
    commands = {
        name: [str(Path(sys.executable).parent / "seamark"), "run", "compact", table, "--url", url]
        if name == OURS
        else [sys.executable, "-m", "bench.writing.starts", url, table, str(folder / "fresh")]
        for name, table in tables.items()
    }
    results = {}
    for name, command in commands.items():
        began_s = time.perf_counter()
        subprocess.run(command, check=True, timeout=_TIMEOUT_S, env=dict(os.environ), stdout=subprocess.DEVNULL)
        results[name] = 1000 * (time.perf_counter() - began_s)
    return results


def main(url: str, table: str, folder: Path) -> None:
    with spark_session(folder, SPARK) as spark:
        connect(spark, CATALOG, url)
        spark.sql(REWRITE.format(CATALOG, table)).collect()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
