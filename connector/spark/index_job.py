"""Index files built by Spark: one task a group of data files, on this machine or on any cluster.

A task runs `index_data_files`, which reads the indexed columns with pyarrow; nothing of a row crosses to the JVM, and
no Iceberg jar is needed. Workers import this package: in local mode they are this interpreter, on a cluster it is to be
installed for the Python that `PYSPARK_PYTHON` names. A wave's groups are one job, whose index files the driver
registers when it is done (`building.py`):

    build(client, "db.events", "user_id_bloom", SparkWorkers(spark))
"""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from seamark.connector.index.builds import ClusterFailed
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex, index_data_files

LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
_ERROR_LINE = re.compile(r"[A-Za-z_.]*(Error|Exception): (?!An error occurred while calling|Job aborted)")


class SparkWorkers:
    """The executors of a session; with `owned`, it is stopped when the workers are closed."""

    def __init__(self, spark: SparkSession, *, owned: bool = False) -> None:
        self._spark = spark
        self._owned = owned

    @classmethod
    def start(cls, master: str) -> SparkWorkers:
        """By master URL: `local[4]`, `spark://host:7077`, `yarn`, … The rest is as spark-defaults.conf says.

        Joins the session of this process, if it has one.
        """
        running = SparkSession.getActiveSession()
        if running is not None:
            return cls(running)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # PySpark's own choice is any python3 of the PATH
        builder = SparkSession.builder.appName("seamark index build").master(master)
        for key, value in {**QUIET, **(LOOPBACK if master.startswith("local") else {})}.items():
            builder = builder.config(key, value)
        with _telling("Spark does not start"):
            return cls(builder.getOrCreate(), owned=True)

    @property
    def parallelism(self) -> int:
        """Cores of the cluster, as far as its executors have come up."""
        return int(self._spark.sparkContext.defaultParallelism)

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> list[WrittenIndex]:
        context = self._spark.sparkContext
        name = f"seamark-index-{uuid.uuid4()}"
        context.setJobGroup(name, f"Index {task.definition.text}, {len(groups)} groups", interruptOnCancel=True)
        try:
            with _telling("A Spark job failed"):
                return list(context.parallelize(groups, len(groups)).map(partial(index_data_files, task)).collect())
        except BaseException:
            with suppress(Py4JError):  # when the JVM itself is gone
                context.cancelJobGroup(name)  # what nobody waits for any more
            raise

    def close(self) -> None:
        if self._owned:
            self._spark.stop()


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """What Spark and its JVM raise, as one error whose message is a line."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Of a task's error the worker's own traceback says most, and its last line why.
        why = next((line for line in lines if _ERROR_LINE.match(line)), lines[0] if lines else type(error).__name__)
        raise ClusterFailed(f"{what}: {why}") from error
