"""Builds index files with Spark: one task for each group of data files, on this machine or on a cluster.

A task runs `index_data_files`, which reads the indexed columns with pyarrow. No row is sent to the JVM, and no Iceberg
jar is needed. Workers import this package. In local mode, they run this interpreter. On a cluster, the package must be
installed for the Python of `PYSPARK_PYTHON`. The groups of a wave are one Spark job. The driver registers its index
files when the job is complete (`connector/index/builds.py`):

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
from seamark.connector.spark.java import NO_GATEWAY, find_java_problem

LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
QUIET = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}
_ERROR_LINE = re.compile(r"[A-Za-z_.]*(Error|Exception): (?!An error occurred while calling|Job aborted)")


class SparkWorkers:
    """Index workers that are the executors of a Spark session. `close` stops the session if it is `owned`."""

    def __init__(self, spark: SparkSession, *, owned: bool = False) -> None:
        self._spark = spark
        self._owns_session = owned

    @classmethod
    def start(cls, master: str) -> SparkWorkers:
        """Connect to a master URL, such as `local[4]`, `spark://host:7077` or `yarn`.

        All other settings come from spark-defaults.conf. If this process already has a session, it is used.
        """
        active_session = SparkSession.getActiveSession()
        if active_session is not None:
            return cls(active_session)
        # By default, PySpark would run any python3 in the PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.appName("seamark index build").master(master)
        for key, value in {**QUIET, **(LOOPBACK if master.startswith("local") else {})}.items():
            builder = builder.config(key, value)
        with _raise_cluster_failed("Spark does not start"):
            return cls(builder.getOrCreate(), owned=True)

    @property
    def parallelism(self) -> int:
        """The number of cores of the executors that have started."""
        return int(self._spark.sparkContext.defaultParallelism)

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> list[WrittenIndex]:
        """Build index files for each group of data files in a Spark task. Return the index file of each group."""
        context = self._spark.sparkContext
        name = f"seamark-index-{uuid.uuid4()}"
        context.setJobGroup(name, f"Index {task.definition.text}, {len(groups)} groups", interruptOnCancel=True)
        try:
            with _raise_cluster_failed("A Spark job failed"):
                return list(context.parallelize(groups, len(groups)).map(partial(index_data_files, task)).collect())
        except BaseException:
            with suppress(Py4JError):  # The JVM may have ended already.
                context.cancelJobGroup(name)  # No client waits for the job.
            raise

    def close(self) -> None:
        if self._owns_session:
            self._spark.stop()


@contextmanager
def _raise_cluster_failed(failure: str) -> Iterator[None]:
    """Convert errors of Spark and its JVM to ClusterFailed, with a message of one line.

    If Spark could not start its JVM, the message states what is wrong with Java.
    """
    try:
        yield
    except (PySparkException, Py4JError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # If the error is in a task, the last line of the worker's traceback has the cause.
        reason = next((line for line in lines if _ERROR_LINE.match(line)), lines[0] if lines else type(error).__name__)
        if NO_GATEWAY in reason:
            reason = find_java_problem() or reason
        raise ClusterFailed(f"{failure}: {reason}") from error
