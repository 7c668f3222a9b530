"""Reads chosen rows of several data files, with one thread for each file.

Several files are read at the same time, because one file does not keep all cores busy: pyarrow decodes each column with
one thread, and the columns differ in size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from seamark.connector.arrow.arrays import Longs
from seamark.connector.client.storage import Storage
from seamark.connector.parquet.encryption.keys import ParquetKeys
from seamark.connector.read.read_plan import ReadPlan
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import ScanTask

_THREADS_MAX, _THREADS_REMOTE = 4, 8
"""The maximum numbers of threads for local files and for objects.

A thread for a local file mostly decodes it. A thread for an object mostly waits for the object store.
"""


def read_chosen(
    read_plan: ReadPlan,
    storage: Storage,
    files: Sequence[tuple[ScanTask, Longs]],
    keys: ParquetKeys | None = None,
) -> list[list[pa.RecordBatch]]:
    """Return the rows at the given positions of each file. All rows are in memory at the same time.

    The rows of a file are the batches that `TaskReader.read` returns.

    Raises:
        Unreadable: A file cannot be read.
    """
    is_local = not files or storage.is_local(files[0][0].path)
    threads_max = min(_THREADS_MAX, os.cpu_count() or 1) if is_local else _THREADS_REMOTE
    if min(threads_max, len(files)) < 2:
        reader = TaskReader(read_plan, storage, keys=keys)
        return [list(reader.read(task, positions)) for task, positions in files]
    # Each thread has its own reader, because the caches of a reader are not thread-safe.
    readers = threading.local()

    def read(file: tuple[ScanTask, Longs]) -> list[pa.RecordBatch]:
        reader: TaskReader | None = getattr(readers, "reader", None)
        if reader is None:
            reader = readers.reader = TaskReader(read_plan, storage, threads=False, keys=keys)
        return list(reader.read(*file))

    with ThreadPoolExecutor(min(threads_max, len(files)), thread_name_prefix="chosen-rows") as pool:
        try:
            return list(pool.map(read, files))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
