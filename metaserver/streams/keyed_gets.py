"""Returns the current rows with the requested keys, including rows that wait for a flush.

The connector's code (`RowFiles.get`) locates and reads the rows. It blocks, so it runs in its own threads, so that
flushes do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import pyarrow as pa

from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.streams.row_files import GetLimits, RowFiles
from seamark.metaserver.streams.stored_rows import RowSearch

LIMITS = GetLimits(rows_max=10_000, bytes_max=64 << 20, files_max=1_000)
_THREADS = 4
"""The maximum number of concurrent gets. Further gets wait."""
_THREADS_PER_PRINCIPAL = 2
"""The maximum number of concurrent gets of one principal, so that they do not delay gets of other principals."""


class KeyedRowsAnswer(NamedTuple):
    """The rows of some keys.

    Attributes:
        rows: The rows, in the order of the keys.
        missing: The indexes of the keys without a row, in ascending order. If a key occurs several times, only its
            first index is listed.
    """

    rows: pa.Table
    missing: list[int]


class KeyedGets:
    """Gets rows by key. An instance belongs to one event loop."""

    def __init__(self, row_files: RowFiles, search: RowSearch) -> None:
        self._row_files = row_files
        self._search = search
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="gets")
        self._semaphore_by_principal: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """For each principal, a semaphore that limits its concurrent gets."""

    async def get(
        self, loaded_table: LoadedTable, keys: pa.RecordBatch, columns: Sequence[str], principal: str | None
    ) -> KeyedRowsAnswer:
        """Return the rows that have one of the keys in the current snapshot of a table.

        The work runs in a thread, because it blocks. Each principal has a limited number of threads, so that others do
        not wait for it.

        Args:
            loaded_table: The table. Its current snapshot may be a fresh snapshot.
            keys: The keys. The names of the columns are those of the key columns.
            columns: The names of the columns to return.
            principal: The principal that sends the request. It is None on a server without logins, which has no limit
                for each principal.

        Raises:
            BadRequest: The keys do not fit the columns, or the rows are encrypted.
            TooLarge: A limit is exceeded.
            Corrupt: A file of the table cannot be read.
        """
        assert loaded_table.entry is not None
        stored_rows = self._search.open(loaded_table.entry, loaded_table.metadata)
        work = partial(self._row_files.get, keys, columns, loaded_table.metadata, stored_rows, LIMITS)
        if principal is None:
            return KeyedRowsAnswer(*await asyncio.wrap_future(self._threads.submit(copy_context().run, work)))
        semaphore = self._semaphore_by_principal.get(principal) or asyncio.Semaphore(_THREADS_PER_PRINCIPAL)
        # The dictionary has weak references. It drops the semaphore when no request of the principal uses it.
        self._semaphore_by_principal[principal] = semaphore
        await semaphore.acquire()
        future = self._threads.submit(copy_context().run, work)
        # Release the semaphore only when the work ends, because a cancelled request still uses its thread.
        future.add_done_callback(partial(_release_semaphore, asyncio.get_running_loop(), semaphore))
        return KeyedRowsAnswer(*await asyncio.wrap_future(future))

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False)


def _release_semaphore(loop: asyncio.AbstractEventLoop, semaphore: asyncio.Semaphore, _: object) -> None:
    """Release a semaphore when a future ends in any thread. The future is the last argument, and is ignored."""
    with suppress(RuntimeError):  # The loop may be closed, because the server has stopped.
        loop.call_soon_threadsafe(semaphore.release)
