"""The account of a folder of cached files: which there are, what they weigh, which was used least lately.

diskcache keeps it, in one SQLite file, and evicts by it. Three rules make that safe and cheap here:

- Everything that changes the folder runs under one lock file, one process and one thread at a time. So room is made
  before a file is written, and the folder is within its budget at every instant, however many processes share it.
- Readers ask neither lock nor SQLite: a file's name follows from its key, and its envelope says whether it is good.
  A locked, slow or corrupt account costs no hit.
- The account is not precious. It is audited when it is opened, and one that is corrupt is thrown away with its files.
  It is never synced, and kept in a rollback journal, not a write-ahead log: nothing of it is mapped, so that a file
  cut short by anyone is an error and not a SIGBUS.

A tier has one SQLite connection, not diskcache's one for each thread, which nobody else may close: threads come one at
a time anyway.
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
"""What file systems allot by; a file is charged whole blocks."""
RESERVE_BYTES = 512 * 1024
"""Of the budget, for the directories, SQLite's journal and the pages that one more row may take."""
BUDGET_BYTES_MIN = 2 * RESERVE_BYTES
SHARDS = 16
SUFFIX = ".block"
LOCK_WAIT_S = 2.0
_LOCK_POLL_S = 0.005
_SQLITE_TIMEOUT_S = 1.0
"""Only for strangers who look at the file: ours wait for the lock file."""
_DATABASE = "cache.db"
_POLICY = "seamark"

EVICTION_POLICY[_POLICY] = {
    "init": EVICTION_POLICY["least-recently-used"]["init"],
    "get": EVICTION_POLICY["least-recently-used"]["get"],
    # diskcache evicts ten at a time; ten large ones are more than was asked for, so those go one by one.
    "cull": "SELECT {fields} FROM Cache ORDER BY access_time, rowid LIMIT CASE WHEN (SELECT MAX(size) FROM"
    " (SELECT size FROM Cache ORDER BY access_time, rowid LIMIT 10)) < 65536 THEN ? ELSE 1 END",
}

_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
}
"""Errors of SQLite that say nothing against the file's content."""


class Unavailable(Exception):
    """The account could not be used now; the message says why."""


class _Corrupt(Exception):
    """The account contradicts itself or the files."""


_FAILURES = (sqlite3.Error, Timeout, OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""What diskcache lets through when its file is busy, cut short, flipped or away: rows of it come in any form."""


class _Files(Disk):  # type: ignore[misc]  # diskcache has no types
    """diskcache's view of the files: their names follow from their keys, their content is not its business."""

    def store(self, value: int, read: bool, key: bytes = b"") -> tuple[int, int, str, None]:
        """`value` is what the file is charged; nobody pickles anything."""
        return value, MODE_BINARY, file_name(key), None

    def fetch(self, mode: int, filename: str, value: object, read: bool) -> str:
        return filename

    def remove(self, file_path: str) -> None:
        with suppress(OSError):
            os.unlink(os.path.join(self._directory, file_path))


class _Account(Cache):  # type: ignore[misc]  # diskcache has no types
    """diskcache's `Cache` over one connection, whichever thread calls."""

    _connection: sqlite3.Connection | None = None
    _pid = -1

    @property
    def _con(self) -> sqlite3.Connection:
        if self._pid != os.getpid():
            # SQLite's locks do not pass to a forked child, so its connections must not either.
            self.close()
            self._pid = os.getpid()
        if self._connection is None:
            path = os.path.join(self.directory, _DATABASE)
            self._connection = sqlite3.connect(
                path, timeout=self.timeout, isolation_level=None, check_same_thread=False
            )
            for pragma in ("journal_mode = truncate", "synchronous = 0", "mmap_size = 0"):
                self._connection.execute(f"PRAGMA {pragma}")
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def file_name(key: bytes) -> str:
    """Where the file of a key (any bytes; long ones are cut) lies, relative to the folder."""
    name = key[:16].hex()
    return f"{name[0]}/{name}{SUFFIX}"


def charge(file_bytes: int) -> int:
    """What a file of this length takes from the budget: its blocks, and its line in a directory."""
    return -(-file_bytes // BLOCK_BYTES) * BLOCK_BYTES + 128


class Ledger:
    """Never raises from its constructor: a folder that cannot be used now is tried again at each `run`."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._mutex = threading.Lock()
        self._cache: Any = None
        self._inode = -1
        self.entries = 0
        self.used_bytes = 0
        self.evictions = 0

    def run(self, action: Callable[[Any], T], wait_s: float = LOCK_WAIT_S) -> T:
        """What `action` returns, given diskcache's `Cache`, under the lock.

        A corrupt account is replaced by an empty one and the action tried again. Unavailable when another holds the
        lock for longer than `wait_s`, or when the disk is full, read-only or away.
        """
        with self._locked(wait_s):
            try:
                return self._attempt(action)
            except (*_FAILURES, _Corrupt) as error:
                if not _speaks_of_corruption(error):
                    raise Unavailable(_words(error)) from error
            try:
                self._rebuild()
                return self._attempt(action)
            except (*_FAILURES, _Corrupt) as error:
                raise Unavailable(_words(error)) from error

    def make_room(self, cache: Any, need_bytes: int) -> bool:
        """Evicts until `need_bytes` more fit; whether they do. Displaces nothing for what could never fit."""
        room = self._budget_bytes - RESERVE_BYTES - need_bytes
        used_bytes = cache.volume()
        if used_bytes <= room:
            return True
        if used_bytes - cache.size > room:
            return False
        cache.reset("size_limit", room, update=False)
        self.evictions += cache.cull()
        return bool(cache.volume() <= room)

    def touch(self, cache: Any, keys: Iterable[bytes]) -> None:
        """Makes them the most recently used. To be called in a transaction."""
        for key in keys:
            cache.get(key)

    def _attempt(self, action: Callable[[Any], T]) -> T:
        cache = self._open()
        try:
            result = action(cache)
            self.entries, self.used_bytes = len(cache), cache.volume()
            return result
        except BaseException:
            # With it goes whatever transaction a failed COMMIT left open.
            cache.close()
            raise

    def close(self) -> None:
        """Closes SQLite's file; a later `run` opens it again."""
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def _open(self) -> Any:
        """The account as it lies there now: somebody may have removed or replaced it since."""
        path = self._folder / _DATABASE
        if self._cache is None or _inode(path) != self._inode:
            self._forget()
            with closing(sqlite3.connect(path, timeout=_SQLITE_TIMEOUT_S, isolation_level=None)) as connection:
                # Of a stranger's lock this tells in a second, what follows in a minute.
                connection.execute("BEGIN IMMEDIATE")
            cache = _Account(
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
                self.make_room(cache, 0)
            except BaseException:
                cache.close()
                raise
            self._cache, self._inode = cache, _inode(path)
        return self._cache

    def _audit(self, cache: Any) -> None:
        """Rows without files go, and files without rows, which crashes leave. _Corrupt when the rows do not add up."""
        with closing(sqlite3.connect(self._folder / _DATABASE, timeout=_SQLITE_TIMEOUT_S)) as connection:
            ((verdict,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
            rows = connection.execute("SELECT key, size, filename FROM Cache").fetchall()
            ((size, count),) = connection.execute(
                "SELECT MAX(value) FILTER (WHERE key = 'size'), MAX(value) FILTER (WHERE key = 'count') FROM Settings"
            ).fetchall()
        if verdict != "ok" or (size, count) != (sum(row[1] for row in rows), len(rows)):
            raise _Corrupt("the account of the cached files does not add up")
        if any(row[1] < BLOCK_BYTES or row[2] != file_name(row[0]) for row in rows):
            raise _Corrupt("the account of the cached files names files that are not ours")
        files = set(self._files())
        known = {name for _, _, name in rows}
        for name in files - known:
            with suppress(OSError):
                os.unlink(self._folder / name)
        for key, _, name in rows:
            if name not in files:
                cache.delete(key)

    def _files(self) -> Iterator[str]:
        """Every file in the shards, half-written ones too."""
        for shard in range(SHARDS):
            try:
                names = os.listdir(self._folder / f"{shard:x}")
            except OSError:
                continue
            yield from (f"{shard:x}/{name}" for name in names)

    def _rebuild(self) -> None:
        """Starts anew with nothing: without its account no file can be evicted, and the budget would not hold."""
        self._forget()
        for name in (_DATABASE, f"{_DATABASE}-journal", f"{_DATABASE}-wal", f"{_DATABASE}-shm"):
            (self._folder / name).unlink(missing_ok=True)
        for name in self._files():
            (self._folder / name).unlink(missing_ok=True)

    @contextmanager
    def _locked(self, wait_s: float) -> Iterator[None]:
        if not self._mutex.acquire(timeout=wait_s):
            raise Unavailable("another thread holds the cache folder for too long")
        try:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(self._folder / "write.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise Unavailable(_words(error)) from error
            try:
                for _ in range(int(wait_s / _LOCK_POLL_S) + 1):
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except OSError:
                        time.sleep(_LOCK_POLL_S)
                else:
                    raise Unavailable("another process holds the cache folder for too long")
                yield
            finally:
                # Said aloud: a forked child may hold a copy of this descriptor, which closing ours would not release.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)
        finally:
            self._mutex.release()

    def check_invariants(self) -> None:
        """AssertionError when the rows, the files and the budget do not agree. Linear; for tests."""

        def check(cache: Any) -> None:
            rows = {file_name(key): key for key in cache}
            assert set(self._files()) == set(rows), "files without rows, or rows without files"
            sizes = {name: charge((self._folder / name).stat().st_size) for name in rows}
            pages = cache.volume() - cache.size
            assert cache.size == sum(sizes.values()), f"{cache.size} on the account, {sum(sizes.values())} on the disk"
            assert pages + cache.size + RESERVE_BYTES <= self._budget_bytes, "over the budget"

        self.run(check)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1


def _speaks_of_corruption(error: BaseException) -> bool:
    """By the first of SQLite's errors that led to this one: on a full disk diskcache's ROLLBACK fails too."""
    first = _first(error)
    if isinstance(first, sqlite3.Error):
        return getattr(first, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF not in _PASSING
    return not isinstance(first, OSError | Timeout)


def _first(error: BaseException) -> BaseException:
    while isinstance(error.__context__, sqlite3.Error):
        error = error.__context__
    return error


def _words(error: BaseException) -> str:
    first = _first(error)
    return f"{type(first).__name__}: {first}"
