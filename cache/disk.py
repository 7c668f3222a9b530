"""The disk tier: payloads as files of one folder, memory-mapped when large, shared by all processes of a machine.

The rule: a hit is the complete payload that was put; any damage to the folder is a miss. An envelope in each file
proves that (`envelope.py`), once per mapping. diskcache accounts for the files and evicts them (`ledger.py`).

A mapping outlives its file: an evicted file stays readable while it is in use, and its disk space is freed with the
last view. The disk may therefore contain, in addition to the budget, what the processes' memory tiers use. A file that
another program truncates while it is mapped kills its readers (SIGBUS), as with all mapped files; this module never
truncates a file.

Arrow maps the files, because CPython before 3.13 keeps a descriptor open for each mapping, and there are thousands.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped, unused-ignore]

from seamark.cache.envelope import HEADER_BYTES, Damaged, key_digest, seal, unseal
from seamark.cache.ledger import BUDGET_BYTES_MIN, Ledger, Unavailable, charge, file_name
from seamark.cache.tier import Payload, TierStats, parts_of

MAP_BYTES_MIN = 64 * 1024
"""Smaller files are read: a mapping costs a further system call, and separate pages."""
_TOUCHES_MAX = 1024


class DiskTier:
    """Uses at most `budget_bytes` of disk, including SQLite's file and directories; survives restarts.

    `mapped_max` bounds the mappings that are kept for repeated gets (they use address space but no descriptors).
    Opening the tier audits the folder, about a millisecond per thousand files. ValueError for a budget below 1 MiB.
    """

    def __init__(self, folder: Path, budget_bytes: int, *, mapped_max: int = 4096) -> None:
        if budget_bytes < BUDGET_BYTES_MIN:
            raise ValueError(f"budget_bytes is {budget_bytes}; a cache folder needs at least {BUDGET_BYTES_MIN}")
        if mapped_max < 0:
            raise ValueError(f"mapped_max is {mapped_max}; it must be 0 or more")
        self._folder = folder.absolute()
        self._budget_bytes = budget_bytes
        self._mapped_max = mapped_max
        self._mapped: OrderedDict[str, memoryview] = OrderedDict()
        self._touched: dict[str, None] = {}
        """Keys used since the last update of the account, in order of first use; written in batches, so that a get
        writes nothing."""
        self._lock = threading.Lock()
        """For all state here except the ledger, which has its own lock; never held during a system call."""
        self._hits = self._misses = self._puts = self._refused = self._damaged = self._errors = 0
        self._last_error = ""
        self._closed = False
        self._ledger = Ledger(self._folder, budget_bytes)
        self._record_uses()

    def get(self, key: str) -> memoryview | None:
        with self._lock:
            view = self._mapped.get(key)
            if view is not None:
                self._hits += 1
                self._mapped.move_to_end(key)
                self._touched[key] = None
                return view
            if self._closed:
                self._misses += 1
                return None
        return self._open(key)

    def is_mapped(self, payload: memoryview) -> bool:
        return len(payload) + HEADER_BYTES >= MAP_BYTES_MIN

    def put(self, key: str, payload: Payload) -> bool:
        parts = parts_of(payload)
        digest = key_digest(key)
        header = seal(digest, parts)
        path = self._folder / file_name(digest)
        file_bytes = HEADER_BYTES + sum(len(part) for part in parts)
        with self._lock:
            if self._closed:
                return False
        if _is_stored(path, header, file_bytes):
            self._used(key)
            return True

        def store(cache: Any) -> bool:
            with cache.transact():
                self._ledger.touch(cache, self._take_touched())
                # The row precedes the file, so that a crash leaves no file without an account.
                if not self._ledger.make_room(cache, charge(file_bytes)):
                    return False
                cache.set(digest[:16], charge(file_bytes))
            try:
                _write(path, [memoryview(header), *parts])
            except BaseException:
                cache.delete(digest[:16])
                raise
            return True

        try:
            kept = self._ledger.run(store)
        except Unavailable as error:
            self._failed(error)
            return False
        with self._lock:
            self._mapped.pop(key, None)
            self._puts += kept
            self._refused += not kept
        return kept

    def discard(self, key: str) -> None:
        with self._lock:
            self._mapped.pop(key, None)
            self._touched.pop(key, None)
        name = key_digest(key)[:16]
        try:
            # Before the lock is taken: a busy or full folder must not keep a discarded file.
            (self._folder / file_name(name)).unlink(missing_ok=True)
            self._ledger.run(lambda cache: cache.delete(name))
        except (OSError, Unavailable) as error:
            self._failed(error)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                hits=self._hits,
                misses=self._misses,
                puts=self._puts,
                refused=self._refused,
                evictions=self._ledger.evictions,
                damaged=self._damaged,
                errors=self._errors,
                last_error=self._last_error,
                entries=self._ledger.entries,
                used_bytes=self._ledger.used_bytes,
                budget_bytes=self._budget_bytes,
            )

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._mapped.clear()
        if self._touched:
            self._record_uses()
        self._ledger.close()

    def check_invariants(self) -> None:
        assert len(self._mapped) <= self._mapped_max, f"{len(self._mapped)} mappings kept of {self._mapped_max}"
        assert len(self._touched) <= 2 * _TOUCHES_MAX + len(self._mapped), f"{len(self._touched)} unrecorded uses"
        self._ledger.check_invariants()

    def _open(self, key: str) -> memoryview | None:
        """A get that must read the disk."""
        payload, broken = None, False
        digest = key_digest(key)
        try:
            payload = unseal(digest, _read(self._folder / file_name(digest)))
        except FileNotFoundError:
            pass
        except Damaged:
            broken = True
        except OSError as error:
            self._failed(error)
        if payload is None:
            with self._lock:
                self._misses += 1
                self._damaged += broken
            if broken:
                self.discard(key)
            return None
        with self._lock:
            self._hits += 1
            if self.is_mapped(payload) and not self._closed:
                # Two threads may have mapped it together: one mapping is kept.
                payload = self._mapped.setdefault(key, payload)
                while len(self._mapped) > self._mapped_max:
                    self._mapped.popitem(last=False)
        self._used(key)
        return payload

    def _used(self, key: str) -> None:
        with self._lock:
            self._touched[key] = None
            due = len(self._touched) >= _TOUCHES_MAX
        if due:
            self._record_uses(wait_s=0)

    def _take_touched(self) -> list[bytes]:
        with self._lock:
            keys, self._touched = self._touched, {}
        return [key_digest(key)[:16] for key in keys]

    def _record_uses(self, wait_s: float = 2.0) -> None:
        """Writes the recorded uses to the account; those that cannot be written now are dropped, to bound memory."""
        keys = self._take_touched()

        def update(cache: Any) -> None:
            with cache.transact():
                self._ledger.touch(cache, keys)

        try:
            self._ledger.run(update, wait_s)
        except Unavailable as error:
            if wait_s:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self._errors += 1
            self._last_error = str(error)


def _read(path: Path) -> memoryview:
    """The bytes of the file, read-only: mapped and shared when large, without an open descriptor. OSError."""
    if path.stat().st_size < MAP_BYTES_MIN:
        return memoryview(path.read_bytes())
    with pa.memory_map(str(path), "r") as file:
        return memoryview(file.read_buffer()).cast("B")


def _is_stored(path: Path, header: bytes, file_bytes: int) -> bool:
    """Whether this payload is stored already, by its header: another worker may have been faster."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == file_bytes and file.read(HEADER_BYTES) == header
    except OSError:
        return False


def _write(path: Path, parts: Sequence[memoryview]) -> None:
    """Writes the file atomically. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for part in parts:
                written = 0
                while written < len(part):
                    written += file.write(part[written:])
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
