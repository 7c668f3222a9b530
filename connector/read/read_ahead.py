"""Reads small files before a job needs their rows.

Other threads read the next files while the job uses the rows of a file, so it does not wait for the storage. Decoding
does not hold the interpreter's lock. Only files that have no deletes and fit into one batch are read ahead, so at most
a few batches are in memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa

from seamark.connector.client.storage import Storage
from seamark.connector.groups import divide
from seamark.connector.read.read_plan import BATCH_ROWS, ReadPlan
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import ScanTask

_SMALL_FILE_BYTES_MAX = 1 << 20
_READ_FILES_MAX, _READ_BYTES_MAX, _READ_ROWS_MAX = 16, 4 << 20, BATCH_ROWS
"""The maximum number, size and rows of the files that a thread reads in one step.

With one file per step, passing the rows to the job would take as long as reading them.
"""
_THREADS, _THREADS_REMOTE = 2, 8
"""The numbers of threads for local files and for objects.

A thread for a local file mostly decodes it. A thread for an object mostly waits for the object store.
"""

_Read = tuple[ScanTask, Iterable[pa.RecordBatch]]


def read_tasks(read_plan: ReadPlan, storage: Storage, tasks: Iterable[ScanTask]) -> Generator[_Read]:
    """Yield the tasks in their order, each with the batches that `TaskReader.read` returns.

    The batches of a task must be read before the next task is requested. Encrypted files are refused.

    Raises:
        Unreadable: A file cannot be read. The error is raised no later than when the batches of the file are requested.
    """
    own_reader = TaskReader(read_plan, storage, threads=False)
    # Each thread has its own reader, because the caches of a reader are not thread-safe.
    readers = threading.local()

    def read(task_group: Sequence[ScanTask]) -> list[_Read]:
        reader: TaskReader | None = getattr(readers, "reader", None)
        if reader is None:
            reader = readers.reader = TaskReader(read_plan, storage, threads=False)
        return [(task, list(reader.read(task))) for task in task_group]

    pool: ThreadPoolExecutor | None = None
    queue: deque[ScanTask | Future[list[_Read]]] = deque()

    def take_next_reads() -> Iterable[_Read]:
        next_item = queue.popleft()
        return [(next_item, own_reader.read(next_item))] if isinstance(next_item, ScanTask) else next_item.result()

    try:
        for task_group in _divide(tasks):
            if not _is_small(task_group[0]):
                queue += task_group
            else:
                if pool is None:
                    threads = _THREADS if storage.is_local(task_group[0].path) else _THREADS_REMOTE
                    pool = ThreadPoolExecutor(threads, thread_name_prefix="read-ahead")
                queue.append(pool.submit(read, task_group))
            while len(queue) > _THREADS_REMOTE:
                yield from take_next_reads()
        while queue:
            yield from take_next_reads()
    finally:
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _divide(tasks: Iterable[ScanTask]) -> Iterator[list[ScanTask]]:
    """Yield groups of successive small files within the limits. Each other file is in a separate group."""
    # A task with these weights exceeds the limits on its own, so no other task joins its group.
    excess_weights = (_READ_FILES_MAX + 1, 0, 0)
    return divide(
        tasks,
        lambda task: (1, task.size_bytes, task.records) if _is_small(task) else excess_weights,
        (_READ_FILES_MAX, _READ_BYTES_MAX, _READ_ROWS_MAX),
    )


def _is_small(task: ScanTask) -> bool:
    return (
        task.size_bytes <= _SMALL_FILE_BYTES_MAX
        and task.records <= _READ_ROWS_MAX
        and not task.deletes
        and task.removed_by is None
    )
