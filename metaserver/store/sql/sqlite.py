"""The pointer store on SQLite: WAL mode, one writer thread, and fsync before any answer.

- Writes wait in a bounded queue for the writer thread. If the queue is full, RetryLater is raised. All waiting
  transactions share one COMMIT, so that each does not need its own fsync. Each transaction has a savepoint, so that a
  failure rolls back only this transaction. No caller gets an answer before COMMIT has returned.
- Look-ups by key run on the event loop. With the page cache, they take microseconds, which is less than a thread
  switch. Listings run in reader threads.
- Several processes may share the file. BEGIN IMMEDIATE with a busy timeout serialises their writers.
"""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    BadRequest,
    CommitUnknown,
    ConfigError,
    Corrupt,
    RetryLater,
    SeamarkError,
    StorageError,
    StorageFull,
)
from seamark.metaserver.store.port import IdempotencyTaken, PointerStore
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.migrations import apply_migrations
from seamark.metaserver.store.sql.statement import SQLITE, Rows, Steps, StoreStatement

T = TypeVar("T")

BUSY_TIMEOUT_S = 5.0
"""The time for which a writer waits for the writer of another process."""
INLINE_BUSY_TIMEOUT_S = 0.1
"""The time for which a look-up on the event loop waits while another process recovers the log."""
GROUP_TRANSACTIONS_MAX = 64
"""The maximum number of transactions in one commit. It limits the wait of the first transaction."""
READER_THREADS = 2

_WAL_PAUSE_S = 0.01
_CACHED_STATEMENTS_MAX = 512
_IDLE_LOG_BYTES_MAX = 64 << 20
"""The size to which SQLite truncates the log after its content is written to the database."""
_ROOM_BYTES = 1 << 20
"""The disk counts as full if the database cannot be opened, and less than this number of bytes is free."""
_translate = SQLITE.make_translator()


@asynccontextmanager
async def open_sqlite(path: Path | str, *, clock: Clock, queue_limit: int = 1024) -> AsyncIterator[PointerStore]:
    """Open the store. If necessary, create the file, and migrate the schema.

    On exit, the queued transactions are finished first.

    Raises:
        ConfigError: The file is unsuitable.
    """
    file = Path(path)
    writer = _Writer(file, asyncio.get_running_loop(), queue_limit)
    await writer.start()
    try:
        store = _SqliteStore(file, clock, writer)
        try:
            yield store
        finally:
            await store.close()
    finally:
        await writer.close()


def open_sqlite_connection(path: Path, *, read_only: bool, busy_timeout_s: float) -> sqlite3.Connection:
    mode = "ro" if read_only else "rwc"
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        timeout=busy_timeout_s,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_CACHED_STATEMENTS_MAX,
    )


def run_steps_in_sqlite(connection: sqlite3.Connection, steps: Steps[T]) -> T:
    """Execute the statements that a generator yields on this connection, and return the generator's result.

    A statement that only takes a lock is left out, because the writers of SQLite run one after another.
    """
    try:
        statement: StoreStatement = next(steps)
        while True:
            rows: Rows = ()
            if not statement.only_locks:
                rows = connection.execute(_translate(statement.sql, statement.lock), statement.params).fetchall()
            statement = steps.send(rows)
    except StopIteration as end:
        result: T = end.value
        return result


def _get_primary_code(error: Exception) -> int:
    """Return the primary result code of an SQLite error, which is the low byte of the extended code, or else 0."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _convert_error(error: Exception) -> SeamarkError:
    """Return the error for the caller after a failure of SQLite that changed nothing."""
    if isinstance(error, (OverflowError, UnicodeEncodeError)):
        return BadRequest("A value does not fit the database: integers have 64 bits, text is valid Unicode")
    code = _get_primary_code(error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return RetryLater("The database is busy with another process; retry")
    if code == sqlite3.SQLITE_FULL:
        return StorageFull("The disk of the database is full; nothing was changed: free space")
    if code == sqlite3.SQLITE_IOERR:
        return RetryLater(f"The database could not be read or written: {error}", retry_after_s=10)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Corrupt(f"The database file is damaged: {error}")
    return StorageError(f"The database failed: {error}")


@dataclass(slots=True, eq=False)
class _QueuedTransaction:
    make_steps: Callable[[], Steps[Any]]
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class _Writer:
    """The thread that owns the writing connection. Only the event loop calls `submit`."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, queue_limit: int) -> None:
        self._path = path
        self._loop = loop
        self._queue_limit = queue_limit
        # `_pending_count` enforces the limit, so that the stop marker always fits into the queue.
        self._queue: queue.SimpleQueue[_QueuedTransaction | None] = queue.SimpleQueue()
        self._pending_count = 0
        self._closed = False
        self._open_future: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="seamark-sqlite-writer", daemon=True)

    async def start(self) -> None:
        self._thread.start()
        try:
            await self._open_future
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def submit(self, make_steps: Callable[[], Steps[T]]) -> asyncio.Future[T]:
        if self._closed:
            raise RetryLater("The server is shutting down")
        if self._pending_count >= self._queue_limit:
            raise RetryLater(f"{self._pending_count} transactions already wait for the database; retry")
        self._pending_count += 1
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put(_QueuedTransaction(make_steps, future))
        return future

    def _publish_outcomes(self, group: list[_QueuedTransaction]) -> None:
        self._pending_count -= len(group)
        for transaction in group:
            if transaction.future.done():
                continue
            if transaction.error is not None:
                transaction.future.set_exception(transaction.error)
            else:
                transaction.future.set_result(transaction.result)

    def _report_opened(self, error: Exception | None) -> None:
        if self._open_future.done():
            return
        if error is not None:
            self._open_future.set_exception(error)
        else:
            self._open_future.set_result(None)

    # The following methods run in the thread.

    def _run(self) -> None:
        try:
            connection = _open_for_writing(self._path)
        except Exception as error:  # noqa: BLE001  raised by `start`
            self._loop.call_soon_threadsafe(self._report_opened, error)
            return
        self._loop.call_soon_threadsafe(self._report_opened, None)
        try:
            while group := self._take_group():
                _commit_group(connection, group)
                self._loop.call_soon_threadsafe(self._publish_outcomes, group)
        finally:
            connection.close()

    def _take_group(self) -> list[_QueuedTransaction]:
        """Wait for a transaction, and return it together with the other queued transactions.

        The result has at most `GROUP_TRANSACTIONS_MAX` transactions. It is empty when the writer must stop.
        """
        first = self._queue.get()
        if first is None:
            return []
        group = [first]
        while len(group) < GROUP_TRANSACTIONS_MAX:
            try:
                transaction = self._queue.get_nowait()
            except queue.Empty:
                break
            if transaction is None:
                # Put the stop marker back, so that the next call finds it after this group is committed.
                self._queue.put(None)
                break
            group.append(transaction)
        return group


def _open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the database for writing in WAL mode, migrate its schema, and return the connection.

    Raises:
        ConfigError: The file cannot be used as a database, belongs to another application, or its disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_private_database(path)
        connection = open_sqlite_connection(path, read_only=False, busy_timeout_s=BUSY_TIMEOUT_S)
    except (sqlite3.Error, OSError) as error:
        if _is_disk_full(path.parent):
            raise ConfigError(f"The disk of the database {path} is full: free space, then start again") from None
        raise ConfigError(f"The database {path} cannot be opened: {error}") from None
    try:
        switch_to_wal(connection, path)
        # With FULL, each commit survives a power cut. The size limit shrinks the log after a large transaction.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_IDLE_LOG_BYTES_MAX}")
        connection.execute("BEGIN EXCLUSIVE")
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "schema_version" not in tables:
            raise ConfigError(f"The database {path} belongs to another application; name another file")
        run_steps_in_sqlite(connection, apply_migrations(SQLITE))
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        if _is_disk_full(path.parent):  # SQLite may raise an I/O error if the disk is full.
            raise ConfigError(f"The disk of the database {path} is full: free space, then start again") from None
        raise ConfigError(f"The database {path} cannot be used: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _is_disk_full(folder: Path) -> bool:
    """Return whether the file system of `folder` has no space for a log, or False if this is unknown."""
    try:
        return shutil.disk_usage(folder).free < _ROOM_BYTES
    except OSError:
        return False


def create_private_database(path: Path) -> None:
    """Create an empty file that only its owner may read, unless the file exists.

    SQLite would create a file that all users may read. The log of SQLite gets the mode of the database file.

    Raises:
        ConfigError: The path is a symbolic link, which other users may be able to replace.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if path.is_symlink():
        raise ConfigError(f"The database file {path} is a symbolic link; use its target {os.path.realpath(path)}")


def switch_to_wal(connection: sqlite3.Connection, path: Path) -> None:
    # Try again: if several processes switch concurrently, SQLite refuses all but one without calling the busy handler.
    tries = int(BUSY_TIMEOUT_S / _WAL_PAUSE_S)
    while True:
        try:
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            break
        except sqlite3.OperationalError as error:
            if _get_primary_code(error) != sqlite3.SQLITE_BUSY or tries <= 0:
                raise
            tries -= 1
            time.sleep(_WAL_PAUSE_S)
    if mode != "wal":
        raise ConfigError(f"The file system of {path} does not support SQLite in WAL mode; use a local disk")


def _commit_group(connection: sqlite3.Connection, group: list[_QueuedTransaction]) -> None:
    """Run the transactions of a group, commit them, and set the result or the error of each transaction.

    Afterwards, the connection has no open transaction.
    """
    has_begun_commit = False
    try:
        connection.execute("BEGIN IMMEDIATE")
        for transaction in group:
            _apply_transaction(connection, transaction)
        has_begun_commit = True
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001  the tasks of all transactions receive it
        if connection.in_transaction:
            # Ignore errors, because an error would end the thread, and all callers would wait forever.
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        # After a failed fsync, it is unknown which data are on the disk.
        is_outcome_unknown = has_begun_commit and _get_primary_code(error) == sqlite3.SQLITE_IOERR
        for transaction in group:
            # Replace refusals as well: they may depend on earlier transactions of this group, which are now rolled
            # back.
            if is_outcome_unknown and transaction.error is None:
                transaction.error = CommitUnknown(f"The database failed while committing: {error}")
            else:
                transaction.error = _convert_error(error)


def _apply_transaction(connection: sqlite3.Connection, transaction: _QueuedTransaction) -> None:
    """Run one transaction in its savepoint. The function raises only errors that fail the whole group."""
    connection.execute("SAVEPOINT one_transaction")
    try:
        transaction.result = run_steps_in_sqlite(connection, transaction.make_steps())
    except (SeamarkError, IdempotencyTaken) as error:
        transaction.error = error
    except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
        # After some failures, such as a full disk, SQLite has rolled back the whole transaction.
        if not connection.in_transaction:
            raise
        transaction.error = _convert_error(error)
    except Exception as error:  # noqa: BLE001  an error of one transaction must not fail the others
        transaction.error = error
    if transaction.error is not None:
        connection.execute("ROLLBACK TO one_transaction")
    connection.execute("RELEASE one_transaction")


class _SqliteStore(GeneratorStore):
    def __init__(self, path: Path, clock: Clock, writer: _Writer) -> None:
        # Results are not kept for later requests, because SQLite is a local file and always answers.
        super().__init__(clock, stale_reads=None)
        self._path = path
        self._writer = writer
        # The event loop itself runs short reads on this connection. Threads run the others.
        self._loop_connection = open_sqlite_connection(path, read_only=True, busy_timeout_s=INLINE_BUSY_TIMEOUT_S)
        self._thread_local = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._threads = ThreadPoolExecutor(READER_THREADS, "seamark-sqlite-reader", initializer=self._open_reader)

    def _open_reader(self) -> None:
        self._thread_local.connection = open_sqlite_connection(
            self._path, read_only=True, busy_timeout_s=BUSY_TIMEOUT_S
        )
        self._readers.append(self._thread_local.connection)

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        for connection in self._readers:
            connection.close()
        self._loop_connection.close()

    async def _run_change(self, make_steps: Callable[[], Steps[T]]) -> T:
        return await self._writer.submit(make_steps)

    async def _read_point(self, make_steps: Callable[[], Steps[T]]) -> T:
        return _run_read(self._loop_connection, make_steps)

    async def _read_list(self, make_steps: Callable[[], Steps[T]]) -> T:
        def read() -> T:
            return _run_read(self._thread_local.connection, make_steps)

        return await asyncio.get_running_loop().run_in_executor(self._threads, read)


def _run_read(connection: sqlite3.Connection, make_steps: Callable[[], Steps[T]]) -> T:
    try:
        return run_steps_in_sqlite(connection, make_steps())
    except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
        raise _convert_error(error) from error
