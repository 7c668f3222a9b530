"""Runs the rewrites of a compaction or a clustering as Spark tasks, with one task for each batch of files.

A task runs the same function as a worker process, with Arrow, and returns the list of the written files. No row is sent
to the JVM, and no Iceberg jar is needed. The driver commits each batch as soon as its task ends. Executors import this
package. On a cluster, it must be installed for the Python of `PYSPARK_PYTHON`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.util import inheritable_thread_target

from seamark.connector.arrow.casting import Unwritable
from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.storage import confine, use_keys
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.connector.read.tables import ScanTask
from seamark.connector.write.replacements import Batches, BatchRunner, Rewrite, RewrittenFiles
from seamark.formats.iceberg.files.parquet import Unreadable

_GROUP_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
_NO_KEYS: Mapping[str, str] = {}
_Outcome = RewrittenFiles | str | None
"""The result of a batch: the new files, None if they are not worth a commit, or the reason of a failure."""


@contextmanager
def open_session_runner(folders: Sequence[str] | None, umask: int, keys: Mapping[str, str]) -> Iterator[BatchRunner]:
    """Yield a function that runs batches in the session that spark-submit has configured. Stop the session at the end.

    All tasks use `folders` and `umask`. Only tasks on this machine use `keys`, because the executors of a cluster have
    their own keys.

    Args:
        folders: The folders to which tasks are confined, or None (`confine`).
        umask: The umask for the files that tasks write.
        keys: The access keys of the object storage that tasks use (`use_keys`).
    """
    spark = SparkSession.builder.appName("seamark table services").getOrCreate()
    try:
        is_local = str(spark.sparkContext.master).startswith("local")
        yield partial(run_on_spark, spark, folders=folders, umask=umask, keys=keys if is_local else {})
    finally:
        spark.stop()


@contextmanager
def keep_job_group(spark: SparkSession) -> Iterator[None]:
    """Restore the session's job group at the end of the block.

    Without this, later jobs would belong to the group of the rewrite.
    """
    context = spark.sparkContext
    old_properties = {name: context.getLocalProperty(name) for name in _GROUP_PROPERTIES}
    try:
        yield
    finally:
        for name, value in old_properties.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes the property


def run_on_spark(
    spark: SparkSession,
    batches: Batches,
    *,
    folders: Sequence[str] | None = None,
    umask: int | None = None,
    keys: Mapping[str, str] = _NO_KEYS,
) -> Batches:
    """Yield each batch when its task ends, with a function that returns the result without waiting.

    As many tasks run at the same time as there are cores. If the caller stops the iteration, the running tasks are
    cancelled.

    Args:
        spark: The session.
        batches: The scan tasks of each batch, with the function that rewrites them.
        folders: The folders to which tasks are confined, or None (`confine`).
        umask: The umask for the files that tasks write, or None to keep the umask of the process.
        keys: The access keys of the object storage that tasks use (`use_keys`).
    """
    group = f"seamark-rewrite-{uuid.uuid4()}"
    context = spark.sparkContext
    context.setJobGroup(group, "Rewrite data files", interruptOnCancel=True)
    remaining_batches, tasks_by_future = iter(batches), dict[Future[_Outcome], Sequence[ScanTask]]()

    def run(rewrite: Rewrite) -> _Outcome:
        task = partial(_run_in_task, rewrite, folders, umask, keys)
        return context.parallelize([0], 1).map(task).collect()[0]

    slots = max(1, context.defaultParallelism)
    with ThreadPoolExecutor(slots) as pool:
        try:
            while True:
                while len(tasks_by_future) < slots and (batch := next(remaining_batches, None)) is not None:
                    tasks, rewrite = batch
                    tasks_by_future[pool.submit(inheritable_thread_target(spark)(run), rewrite)] = tasks
                if not tasks_by_future:
                    return
                for future in wait(tasks_by_future, return_when=FIRST_COMPLETED).done:
                    tasks = tasks_by_future.pop(future)
                    yield tasks, partial(_read_result, future, tasks)
        finally:
            with suppress(Py4JError):  # The JVM may have ended already.
                context.cancelJobGroup(group)


def _run_in_task(
    rewrite: Rewrite, folders: Sequence[str] | None, umask: int | None, keys: Mapping[str, str], _: int
) -> _Outcome:
    """Rewrite the files of a batch in a task.

    The message of an error of the files is returned as the result, because Spark would repeat a failed task. The last
    argument is the item that Spark passes to the task, and has no meaning.
    """
    if keys:
        use_keys(keys)
    if folders is not None:
        confine(folders)
    if umask is not None:
        os.umask(umask)
    try:
        new = rewrite()
    except (Unreadable, Unwritable, InvalidRequest) as error:
        return str(error)
    # The result does not contain the scan tasks, because the driver has them already.
    return None if new is None else replace(new, tasks=())


def _read_result(future: Future[_Outcome], tasks: Sequence[ScanTask]) -> RewrittenFiles | None:
    """Return the result of a finished task, or raise InvalidRequest with the reason if the task failed.

    `tasks` are the scan tasks of the batch, which the result of the task leaves out. The result is None if the new
    files are not worth a commit.
    """
    try:
        outcome = future.result()
    except (PySparkException, Py4JError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if not lines or has_keys():  # The message may quote a value of an encrypted file.
            lines = [type(error).__name__]
        raise InvalidRequest(f"a Spark task failed: {lines[-1]}") from None
    if isinstance(outcome, str):
        raise InvalidRequest(outcome)
    return None if outcome is None else replace(outcome, tasks=tasks)
