"""The usage database of a folder of cached files: their names, sizes and last uses.

It selects the least recently used files for eviction. diskcache keeps it in the SQLite file `cache.db` of the folder.
Three rules make this safe and cheap:

- All changes of the folder run under one lock file, one process and one thread at a time. Space is freed before a file
  is written, so that the folder is always within its budget, with any number of processes.
- Readers use neither the lock nor SQLite: a file's name is derived from its key, and a header with checksums proves its
  content. A locked, slow or corrupt database costs no hit.
- The database is disposable. It is checked when it is opened, and a corrupt database is deleted with its files. It is
  never synced. It uses a rollback journal instead of a write-ahead log, because a journal is not mapped, so that a
  truncated file causes an error and not a SIGBUS.

diskcache opens a connection per thread, and other threads cannot close it. A tier uses one SQLite connection instead,
because the lock admits only one thread at a time anyway.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from diskcache import EVICTION_POLICY, Cache, Disk, Timeout
from diskcache.core import MODE_BINARY

T = TypeVar("T")

BLOCK_BYTES = 4096
"""The allocation unit of file systems in bytes. The database rounds the size of a file up to whole blocks."""
_DIRECTORY_ENTRY_BYTES = 128
NAME_BYTES = 16
"""The number of bytes of a key from which the name of its file is derived."""
RESERVE_BYTES = 512 * 1024
"""The part of the budget in bytes for directories, SQLite's journal and the pages of one more row."""
BUDGET_BYTES_MIN = 2 * RESERVE_BYTES
LEDGER_SHARDS = 16
SUFFIX = ".block"
LOCK_WAIT_S = 2.0
_LOCK_POLL_S = 0.005
_SQLITE_TIMEOUT_S = 1.0
"""The time in seconds for which SQLite waits for other programs that open the file.

Seamark's processes wait for the lock file instead.
"""
_DATABASE = "cache.db"
_POLICY = "seamark"

EVICTION_POLICY[_POLICY] = {
    "init": EVICTION_POLICY["least-recently-used"]["init"],
    "get": EVICTION_POLICY["least-recently-used"]["get"],
    # diskcache evicts ten entries at a time. If entries are large, this is too much, so evict them one by one.
    "cull": "SELECT {fields} FROM Cache ORDER BY access_time, rowid LIMIT CASE WHEN (SELECT MAX(size) FROM"
    " (SELECT size FROM Cache ORDER BY access_time, rowid LIMIT 10)) < 65536 THEN ? ELSE 1 END",
}

_HOLDER_TRIGGERS_SQL = (
    "CREATE TABLE IF NOT EXISTS Holders (tag TEXT PRIMARY KEY, size INTEGER NOT NULL)",
    "CREATE INDEX IF NOT EXISTS Cache_holder ON Cache (tag, access_time) WHERE tag IS NOT NULL",
    "CREATE TRIGGER IF NOT EXISTS Holders_insert AFTER INSERT ON Cache WHEN NEW.tag IS NOT NULL BEGIN"
    " INSERT INTO Holders VALUES (NEW.tag, NEW.size) ON CONFLICT (tag) DO UPDATE SET size = size + NEW.size; END",
    "CREATE TRIGGER IF NOT EXISTS Holders_delete AFTER DELETE ON Cache WHEN OLD.tag IS NOT NULL BEGIN"
    " UPDATE Holders SET size = size - OLD.size WHERE tag = OLD.tag;"
    " DELETE FROM Holders WHERE tag = OLD.tag AND size <= 0; END",
    "CREATE TRIGGER IF NOT EXISTS Holders_update AFTER UPDATE OF tag, size ON Cache BEGIN"
    " UPDATE Holders SET size = size - OLD.size WHERE tag = OLD.tag;"
    " INSERT INTO Holders SELECT NEW.tag, NEW.size WHERE NEW.tag IS NOT NULL"
    " ON CONFLICT (tag) DO UPDATE SET size = size + NEW.size; END",
    "DELETE FROM Holders",
    "INSERT INTO Holders SELECT tag, SUM(size) FROM Cache WHERE tag IS NOT NULL GROUP BY tag",
)
"""The SQL that counts the bytes of each holder: triggers update the sums, and opening the database computes them."""

_TRANSIENT_ERRORS = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
}
"""The errors of SQLite that do not mean that the file is corrupt."""


class LedgerUnavailable(Exception):
    """The ledger, which is the usage database of a cache folder, cannot be used now. The message names the cause."""


class _Corrupt(Exception):
    """The usage database of a cache folder contradicts itself or the files."""


_FAILURES = (sqlite3.Error, Timeout, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""The exceptions that diskcache raises if its file is busy, truncated, corrupt or missing.

The rows of a corrupt file can contain anything.
"""


class _Files(Disk):  # type: ignore[misc]  # diskcache has no types
    """The files as diskcache sees them.

    Their names are derived from keys. diskcache does not read or write them.
    """

    def store(self, value: int, read: bool, key: bytes = b"") -> tuple[int, int, str, None]:
        """Return the columns of the row of a file in diskcache's table: size, mode, file name and value.

        This overrides `diskcache.Disk.store`, which pickles the value or writes it to a file. Here, `DiskTier` writes
        the file, and the row has no value.

        Args:
            value: The disk space of the file in bytes.
            read: A parameter of diskcache that is not used.
            key: The key from which the name of the file is derived.
        """
        return value, MODE_BINARY, make_file_name(key), None

    def fetch(self, mode: int, filename: str, value: object, read: bool) -> str:
        """Return the name of the file. diskcache does not read it."""
        return filename

    def remove(self, file_path: str) -> None:
        with suppress(OSError):
            os.unlink(os.path.join(self._directory, file_path))


class _UsageDatabase(Cache):  # type: ignore[misc]  # diskcache has no types
    """The database of diskcache for one folder, with one connection for all threads."""

    _connection: sqlite3.Connection | None = None
    _pid = -1

    @property
    def _con(self) -> sqlite3.Connection:
        """The connection of this process, which is opened at the first use and after a fork."""
        if self._pid != os.getpid():
            # A forked child does not inherit SQLite's locks, so it must not inherit the connections either.
            self.close()
            self._pid = os.getpid()
        if self._connection is None:
            path = os.path.join(self.directory, _DATABASE)
            self._connection = sqlite3.connect(
                path, timeout=self.timeout, isolation_level=None, check_same_thread=False
            )
            # The database is disposable, so it is not synced. It is not mapped, so that a truncated file causes an
            # error and not a SIGBUS.
            for pragma in ("journal_mode = truncate", "synchronous = 0", "mmap_size = 0"):
                self._connection.execute(f"PRAGMA {pragma}")
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def make_file_name(key: bytes) -> str:
    """Return the path of a key's file, relative to the folder.

    The key can contain any bytes. A long key is truncated, so two keys with the same beginning share a file. The file's
    header proves to which key its content belongs.
    """
    name = key[:NAME_BYTES].hex()
    return f"{name[0]}/{name}{SUFFIX}"


def compute_disk_bytes(file_bytes: int) -> int:
    """Return the disk space of a file of this length: its blocks and its directory entry."""
    blocks = -(-file_bytes // BLOCK_BYTES)
    return blocks * BLOCK_BYTES + _DIRECTORY_ENTRY_BYTES


class Ledger:
    """The usage database of a cache folder: the names, sizes and last uses of its files.

    The constructor never raises an error: if the folder cannot be used, each `run` tries again.
    """

    def __init__(self, folder: Path, budget_bytes: int, *, holders: bool = False) -> None:
        """Prepare the usage database of a folder. The first `run` opens it.

        Args:
            folder: The folder of the files.
            budget_bytes: The maximum size of the folder.
            holders: Whether the database also counts the bytes of each holder, such as a tenant. The column `tag` of
                a row names the holder.
        """
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._holders = holders
        self._mutex = threading.Lock()
        self._cache: Any = None
        self._inode = -1
        self.entries = 0
        self.used_bytes = 0
        self.evictions = 0

    def run(self, action: Callable[[Any], T], wait_s: float = LOCK_WAIT_S) -> T:
        """Call `action` with diskcache's `Cache` under the lock, and return its result.

        If the database is corrupt, it is replaced by an empty database, and the action runs again.

        Raises:
            LedgerUnavailable: The lock is not free within `wait_s`, or the disk is full, read-only or gone.
        """
        with self._lock(wait_s):
            try:
                return self._run_action(action)
            except (*_FAILURES, _Corrupt) as error:
                if not _is_corruption(error):
                    raise LedgerUnavailable(_describe_error(error)) from error
            try:
                self._rebuild()
                return self._run_action(action)
            except (*_FAILURES, _Corrupt) as error:
                raise LedgerUnavailable(_describe_error(error)) from error

    def make_room(self, cache: Any, need_bytes: int) -> bool:
        """Evict entries until `need_bytes` more bytes fit, and return whether they fit.

        If `need_bytes` can never fit, nothing is evicted: the volume includes the pages of the database, which remain
        when all files (`cache.size`) are evicted.
        """
        size_limit = self._budget_bytes - RESERVE_BYTES - need_bytes
        used_bytes = cache.volume()
        if used_bytes <= size_limit:
            return True
        if used_bytes - cache.size > size_limit:
            return False
        cache.reset("size_limit", size_limit, update=False)
        self.evictions += cache.cull()
        return bool(cache.volume() <= size_limit)

    def fits(self, cache: Any, need_bytes: int) -> bool:
        """Return whether `need_bytes` more bytes fit without an eviction."""
        return bool(cache.volume() <= self._budget_bytes - RESERVE_BYTES - need_bytes)

    def find_oldest(self, cache: Any) -> bytes | None:
        """Return the key that is evicted next, or None if there are no entries."""
        row = cache._sql("SELECT key FROM Cache ORDER BY access_time, rowid LIMIT 1").fetchone()
        return None if row is None else bytes(row[0])

    def make_room_within_share(
        self, cache: Any, holder: str, need_bytes: int, limit_bytes: int, admits: Callable[[bytes], bool]
    ) -> bool:
        """Evict entries of the holder until `need_bytes` more are within its limit, and return whether they fit.

        `admits` receives the key of an entry, and returns whether the entry can be evicted.
        """
        if need_bytes > limit_bytes:
            return False
        while self.get_held_bytes(cache, holder) + need_bytes > limit_bytes:
            rows = cache._sql("SELECT key FROM Cache WHERE tag = ? ORDER BY access_time LIMIT 1", (holder,)).fetchall()
            if not rows:
                raise _Corrupt("the sums of the holders in the usage database do not match the sizes of their files")
            ((oldest_key,),) = rows
            if not admits(bytes(oldest_key)):
                return False
            self.evictions += bool(cache.delete(bytes(oldest_key)))
        return True

    def get_held_bytes(self, cache: Any, holder: str) -> int:
        rows = cache._sql("SELECT size FROM Holders WHERE tag = ?", (holder,)).fetchall()
        return int(rows[0][0]) if rows else 0

    def touch(self, cache: Any, keys: Iterable[bytes]) -> None:
        """Mark some keys as the most recently used, which each `get` of diskcache does.

        The caller must have opened a transaction.
        """
        for key in keys:
            cache.get(key)

    def _run_action(self, action: Callable[[Any], T]) -> T:
        cache = self._open()
        try:
            result = action(cache)
            self.entries, self.used_bytes = len(cache), cache.volume()
            return result
        except BaseException:
            # Closing the connection also ends a transaction that a failed COMMIT left open.
            cache.close()
            raise

    def close(self) -> None:
        """Close SQLite's file. A later `run` opens it again."""
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _open(self) -> Any:
        """Return the usage database that is on the disk now, because another process may have removed or replaced it.

        A newly opened database is checked (`_audit`), and files are evicted if they exceed the budget.
        """
        path = self._folder / _DATABASE
        if self._cache is None or _read_inode(path) != self._inode:
            self._forget()
            with closing(sqlite3.connect(path, timeout=_SQLITE_TIMEOUT_S, isolation_level=None)) as connection:
                # This statement detects another program's lock within a second. The later statements would take a
                # minute.
                connection.execute("BEGIN IMMEDIATE")
            cache = _UsageDatabase(
                str(self._folder),
                timeout=_SQLITE_TIMEOUT_S,
                disk=_Files,
                eviction_policy=_POLICY,
                cull_limit=0,
                size_limit=self._budget_bytes,
                sqlite_journal_mode="truncate",
                sqlite_synchronous=0,
                sqlite_mmap_size=0,
            )
            try:
                self._audit(cache)
                if self._holders:
                    for statement in _HOLDER_TRIGGERS_SQL:
                        cache._sql(statement)
                self.make_room(cache, 0)
            except BaseException:
                cache.close()
                raise
            self._cache, self._inode = cache, _read_inode(path)
        return self._cache

    def _audit(self, cache: Any) -> None:
        """Remove rows of the usage database without files, and files without rows, which a crash can leave.

        The database is corrupt if SQLite's check fails, or if the sum of the rows differs from the totals that
        diskcache stores (`size` and `count`). It is also corrupt if a file name is not derived from its key, or if a
        size is below one block of the disk. A connection without diskcache reads the rows, because diskcache trusts its
        totals.

        Raises:
            _Corrupt: The database is corrupt.
        """
        with closing(sqlite3.connect(self._folder / _DATABASE, timeout=_SQLITE_TIMEOUT_S)) as connection:
            ((verdict,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            rows = connection.execute("SELECT key, size, filename FROM Cache").fetchall()
            ((size, count),) = connection.execute(
                "SELECT MAX(value) FILTER (WHERE key = 'size'), MAX(value) FILTER (WHERE key = 'count') FROM Settings"
            ).fetchall()
        if verdict != "ok" or (size, count) != (sum(charge for _, charge, _ in rows), len(rows)):
            raise _Corrupt("the total size in the usage database differs from the sum of the sizes of the cached files")
        if any(charge < BLOCK_BYTES or name != make_file_name(key) for key, charge, name in rows):
            raise _Corrupt("the usage database contains file names that are not derived from the keys")
        files = set(self._list_files())
        recorded_names = {name for _, _, name in rows}
        for name in files - recorded_names:
            with suppress(OSError):
                os.unlink(self._folder / name)
        for key, _, name in rows:
            if name not in files:
                cache.delete(key)

    def _list_files(self) -> Iterator[str]:
        """Yield all files in the shards, including incomplete files."""
        for shard in range(LEDGER_SHARDS):
            try:
                names = os.listdir(self._folder / f"{shard:x}")
            except OSError:
                continue
            yield from (f"{shard:x}/{name}" for name in names)

    def _rebuild(self) -> None:
        """Delete the usage database and all cached files. The next `run` creates an empty database.

        Files that the database does not list could not be evicted, and the folder would exceed its budget.
        """
        self._forget()
        for name in (_DATABASE, f"{_DATABASE}-journal", f"{_DATABASE}-wal", f"{_DATABASE}-shm"):
            (self._folder / name).unlink(missing_ok=True)
        for name in self._list_files():
            (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _lock(self, wait_s: float) -> Iterator[None]:
        """Hold the lock of the folder, against other threads and other processes, while the context is active.

        Raises:
            LedgerUnavailable: The lock is not free within `wait_s`, or the lock file cannot be opened.
        """
        if not self._mutex.acquire(timeout=wait_s):
            raise LedgerUnavailable("another thread holds the lock of the cache folder for too long; try again later")
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(self._folder / "write.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise LedgerUnavailable(_describe_error(error)) from error
            try:
                for _ in range(int(wait_s / _LOCK_POLL_S) + 1):
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except OSError:
                        time.sleep(_LOCK_POLL_S)
                else:
                    raise LedgerUnavailable(
                        "another process holds the lock of the cache folder for too long; try again later"
                    )
                yield
            finally:
                # Release the lock explicitly, because a forked child may have a copy of this descriptor.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)
        finally:
            self._mutex.release()

    def check_invariants(self) -> None:
        """Check that rows, files and budget match. The time is linear in the number of files, so only tests call this.

        Raises:
            AssertionError: They do not match.
        """

        def check(cache: Any) -> None:
            rows = {make_file_name(key): key for key in cache}
            assert set(self._list_files()) == set(rows), "the database and the folder list different files"
            sizes = {name: compute_disk_bytes((self._folder / name).stat().st_size) for name in rows}
            pages = cache.volume() - cache.size
            assert cache.size == sum(sizes.values()), (
                f"the database counts {cache.size} bytes, and the files have {sum(sizes.values())}"
            )
            assert pages + cache.size + RESERVE_BYTES <= self._budget_bytes, "the files exceed the budget"
            if self._holders:
                query = "SELECT tag, SUM(size) FROM Cache WHERE tag IS NOT NULL GROUP BY tag ORDER BY tag"
                sums = cache._sql("SELECT tag, size FROM Holders ORDER BY tag").fetchall()
                assert sums == cache._sql(query).fetchall(), "the bytes of a holder differ from the sum of its files"

        self.run(check)


def _read_inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _is_corruption(error: BaseException) -> bool:
    """Return whether an error means corruption. If errors of SQLite precede it, the first of them decides.

    On a full disk, diskcache's ROLLBACK also fails, and this later error has no meaning. Errors of the operating system
    and time limits are no corruption. All other errors are, except some errors of SQLite (`_TRANSIENT_ERRORS`).
    """
    cause = _find_cause(error)
    if isinstance(cause, sqlite3.Error):
        # The lowest byte of an extended error code is the error code without details.
        return getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _TRANSIENT_ERRORS
    return not isinstance(cause, OSError | Timeout)


def _find_cause(error: BaseException) -> BaseException:
    while isinstance(error.__context__, sqlite3.Error):
        error = error.__context__
    return error


def _describe_error(error: BaseException) -> str:
    cause = _find_cause(error)
    return f"{type(cause).__name__}: {cause}"
