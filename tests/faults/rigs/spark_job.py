"""A Spark job that changes a table batch by batch. Its tasks run in separate executors, as on a cluster.

Besides the driver's JVM there are two executor JVMs, whose tasks and Python workers may be killed or delayed.

    python -m tests.faults.rigs.spark_job URL TABLE CHECKPOINT SEED SCRATCH

`mortal_writer.build_batch` determines the batches. The file CHECKPOINT has the number of finished batches. If the file
CHECKPOINT.last exists, the next batch is the last one. The folder SCRATCH has Spark's event log.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyspark
from pyspark.sql import DataFrame, SparkSession

from seamark.connector.client.client import SeamarkClient
from seamark.connector.spark.frames.writes import write
from seamark.connector.write.equality_upserts import EQUALITY
from tests.faults.rigs.mortal_writer import build_batch
from tests.services.java import SHORT_LIVED
from tests.services.process import REPO

BATCH_PARTITIONS = 6
"""The number of partitions of a batch."""


def open_session(scratch: Path) -> SparkSession:
    """Open a Spark session with several executor processes, retries and speculative tasks."""
    os.environ["SPARK_HOME"] = str(Path(pyspark.__file__).parent)
    os.environ["SPARK_WORKER_DIR"] = str(scratch / "work")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    events = scratch / "events"
    events.mkdir(parents=True)
    conf = {
        "spark.driver.memory": "600m",
        "spark.executor.memory": "512m",
        "spark.driver.extraJavaOptions": " ".join(SHORT_LIVED),
        "spark.executor.extraJavaOptions": " ".join(SHORT_LIVED),
        "spark.executorEnv.PYTHONPATH": str(REPO),
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(scratch / "local"),
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.adaptive.enabled": "false",  # Adaptive execution would make one task of so few rows.
        # The job must survive all faults of a campaign.
        "spark.task.maxFailures": "20",
        "spark.stage.maxConsecutiveAttempts": "20",
        "spark.deploy.maxExecutorRetries": "-1",
        # Spark repeats a slow task after a short time, so that two attempts of a task often run at the same time.
        "spark.speculation": "true",
        "spark.speculation.interval": "50ms",
        "spark.speculation.quantile": "0.3",
        "spark.speculation.multiplier": "1.1",
        "spark.speculation.minTaskRuntime": "50ms",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": events.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
    }
    builder = SparkSession.builder.master("local-cluster[2,1,768]").appName("seamark-faults")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def commit_batch(spark: SparkSession, client: SeamarkClient, table: str, seed: int, number: int) -> None:
    operation, mode, ids = build_batch(seed, number)
    rows: DataFrame = spark.createDataFrame([(row_id, number) for row_id in ids], "id bigint, batch bigint")
    rows = rows.repartition(BATCH_PARTITIONS)
    producer = ("job", number)
    if operation == "append":
        write(rows, table, client=client, producer=producer, distribution="none")
        return
    options = {"strategy": EQUALITY} if len(ids) % 3 == 0 else {"row_mode": mode}
    if operation == "upsert":
        write(rows, table, client=client, mode="upsert", keys=["id"], producer=producer, driver_rows=0, **options)
    else:
        write(rows.select("id"), table, client=client, mode="delete", producer=producer, driver_rows=0, **options)


def main(url: str, table: str, checkpoint: Path, seed: int, scratch: Path) -> None:
    """Commit batches until the file `checkpoint` with the suffix .last exists, and then a last batch.

    After each batch, write the number of the committed batches to `checkpoint`.
    """
    spark, client = open_session(scratch), SeamarkClient(url)
    number, is_last = 0, False
    while not is_last:
        is_last = checkpoint.with_suffix(".last").exists()
        commit_batch(spark, client, table, seed, number)
        number += 1
        new_checkpoint = checkpoint.with_suffix(".part")
        new_checkpoint.write_text(str(number))
        os.replace(new_checkpoint, checkpoint)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
