"""The disk tier: payloads as files of one folder, which all processes of a machine share. Large files are
memory-mapped.

The rule: a hit returns the complete payload that was put, and any damage to the folder is a miss. An envelope in each
file proves that the payload is complete (`envelope.py`); it is checked once per mapping. diskcache lists the
files in a usage database and evicts them (`ledger.py`).

A mapping outlives its file: an evicted file stays readable while it is in use, and its disk space is freed with the
last view. Therefore the disk can contain more than the budget, because it also contains the evicted files that
processes still use. If another program truncates a file while it is mapped, its readers are killed (SIGBUS), as with
all mapped files. This module never truncates a file.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamark.cache.buffers import Buffers
from seamark.cache.envelope import HEADER_BYTES, Damaged, compute_key_digest, extract_payload, make_header
from seamark.cache.ledger import (
    BUDGET_BYTES_MIN,
    NAME_BYTES,
    Ledger,
    LedgerUnavailable,
    compute_disk_bytes,
    make_file_name,
)
from seamark.cache.region import Region, map_file
from seamark.cache.tier import Payload, TierStats, split_payload

MAP_BYTES_MIN = 64 * 1024
"""The minimum size of a mapped file in bytes.

A smaller file is read, because a mapping needs one more system call, and its own pages.
"""
_TOUCHES_MAX = 1024
"""The number of used keys after which the uses are written to the usage database (`Ledger`)."""
_BUFFER_POOL_BYTES = 8 << 20
"""The size in bytes of the buffers that are kept for the next reads. It is enough for an answer of 32 blocks."""
_NOWAIT_FLAG: int | None = getattr(os, "RWF_NOWAIT", None)
"""The flag of `preadv` on Linux that makes a read fail instead of waiting for the disk."""


class DiskTier:
    """A disk tier that uses at most `budget_bytes` of disk, including SQLite's file and the directories.

    The values survive a restart. The constructor audits the folder, which takes about a millisecond per thousand files.

    Args:
        folder: The folder of the files.
        budget_bytes: The maximum size.
        mapped_max: The maximum number of mappings that are kept for repeated gets. A mapping uses address space but no
            descriptor.
        map_bytes_min: The size from which files are mapped. Smaller files are read.
        should_replace: Decides which values are stored in a full folder: a value is stored only if `should_replace(its
            key, the key of the entry to evict)` is true. The keys are those that `make_database_key` returns. If it is
            None, every value is stored.
        holder_bytes: The budget of each holder of values. At this limit, the holder's own entries are evicted. If it is
            None, holders have no budget.
        check_mapped: Whether the checksum of a mapped payload is compared when its file is opened, which reads the
            whole file. If False, the payload must contain its own checksums.
        reused_bytes: The size of the values whose memory `get_resident` reuses, if most values have the same size.

    Raises:
        ValueError: The budget is less than 1 MiB, or `mapped_max` is negative.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        *,
        mapped_max: int = 4096,
        map_bytes_min: int = MAP_BYTES_MIN,
        should_replace: Callable[[bytes, bytes], bool] | None = None,
        holder_bytes: int | None = None,
        check_mapped: bool = True,
        reused_bytes: int = 0,
    ) -> None:
        """Open the folder if it exists. The class describes the arguments.

        Raises:
            ValueError: `budget_bytes` or `mapped_max` is too small.
        """
        if budget_bytes < BUDGET_BYTES_MIN:
            raise ValueError(f"budget_bytes is {budget_bytes}; a cache folder needs at least {BUDGET_BYTES_MIN}")
        if mapped_max < 0:
            raise ValueError(f"mapped_max is {mapped_max}; it must be 0 or more")
        self._folder = folder.absolute()
        self._folder_text = str(self._folder)
        """The folder as text. Reads of blocks use it, because joining Paths takes longer than a system call."""
        self._budget_bytes = budget_bytes
        self._mapped_max = mapped_max
        self._map_bytes_min = map_bytes_min
        self._should_replace = should_replace
        self._holder_bytes = holder_bytes
        self._check_mapped = check_mapped
        self._buffers = Buffers(HEADER_BYTES + reused_bytes, _BUFFER_POOL_BYTES if reused_bytes else 0)
        self._mapped_values: OrderedDict[str, memoryview] = OrderedDict()
        self._recent_uses: dict[str, None] = {}
        """The keys that were used since the last update of the usage database, in order of first use.

        They are written in batches, so that a get writes nothing.
        """
        self._lock = threading.Lock()
        """The lock for all state except the ledger, which has its own lock. No system call runs under it."""
        self._hits = self._misses = self._puts = self._refusals = self._damaged_files = self._errors = 0
        self._last_error = ""
        self._closed = False
        self._ledger = Ledger(self._folder, budget_bytes, holders=holder_bytes is not None)
        if os.path.lexists(self._folder):
            # This opens the usage database, which evicts files if the budget is lower than before.
            self._record_uses()

    def get(self, key: str) -> memoryview | None:
        with self._lock:
            view = self._mapped_values.get(key)
            if view is not None:
                self._hits += 1
                self._mapped_values.move_to_end(key)
                self._recent_uses[key] = None
                return view
            if self._closed:
                self._misses += 1
                return None
        return self._read_from_disk(key)

    def get_resident(self, key: str) -> memoryview | None:
        """Return the value if the kernel has its pages in memory, so that the read does not wait for the disk.

        Otherwise return None, and count nothing, because the value may be on the disk. Use this method only for values
        that are never mapped.
        """
        if self._closed or _NOWAIT_FLAG is None:
            return None
        digest = compute_key_digest(key)
        try:
            data = _read_resident(f"{self._folder_text}/{make_file_name(digest)}", _NOWAIT_FLAG, self._buffers)
            payload = None if data is None else extract_payload(digest, data)
        except (OSError, Damaged):
            return None  # `get` will count the damage and discard the file.
        if payload is not None:
            with self._lock:
                self._hits += 1
            self._note_use(key)
        return payload

    def is_mapped(self, payload: memoryview) -> bool:
        return len(payload) + HEADER_BYTES >= self._map_bytes_min

    def may_have(self, key: str) -> bool:
        """Return whether a file for the key exists.

        The check is cheap and does not count as a use. The file may still be damaged.
        """
        if self._closed:
            return False
        try:
            os.stat(f"{self._folder_text}/{make_file_name(compute_key_digest(key))}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # `get` will count the error.
        return True

    def put(self, key: str, payload: Payload, holder: str = "") -> bool:
        """Store a value, like `Tier.put`.

        The size counts for `holder`. Every text can be a holder.
        """
        return self.put_many([(key, payload, holder)])[0]

    def put_many(self, values: Sequence[tuple[str, Payload, str]]) -> list[bool]:
        """Store several values (key, payload, holder) with one transaction of the usage database.

        For small values, this takes a third of the time of separate calls.
        """
        files = [_File.from_payload(self._folder, key, payload, holder) for key, payload, holder in values]
        with self._lock:
            if self._closed:
                return [False] * len(files)
        stored_flags = [_is_stored(file.path, file.header, file.size) for file in files]
        for file, is_stored in zip(files, stored_flags, strict=True):
            if is_stored:
                self._note_use(file.key)
        missing = [file for file, is_stored in zip(files, stored_flags, strict=True) if not is_stored]
        if not missing:
            return stored_flags

        def store(cache: Any) -> list[bool]:
            """Record the files in the usage database, and write those that fit. Return whether each is stored."""
            outcomes = []
            with cache.transact():
                self._ledger.touch(cache, self._take_recent_uses())
                for file in missing:
                    has_room = self._make_room(
                        cache, file.key_digest[:NAME_BYTES], compute_disk_bytes(file.size), file.holder
                    )
                    if has_room:
                        # Write the row before the file, so that a crash leaves no file that the database does not list.
                        tag = None if self._holder_bytes is None else file.holder
                        cache.set(file.key_digest[:NAME_BYTES], compute_disk_bytes(file.size), tag=tag)
                    outcomes.append(has_room)
            for number, file in enumerate(missing):
                # A later value of the same call may have evicted an earlier value.
                if outcomes[number] and (number == len(missing) - 1 or file.key_digest[:NAME_BYTES] in cache):
                    try:
                        _write_file(file.path, [memoryview(file.header), *file.parts])
                    except BaseException:
                        for unwritten_file in missing[number:]:
                            cache.delete(unwritten_file.key_digest[:NAME_BYTES])
                        raise
                else:
                    outcomes[number] = False
            return outcomes

        try:
            outcomes = self._ledger.run(store)
        except LedgerUnavailable as error:
            self._note_failure(error)
            return [bool(result) for result in stored_flags]
        with self._lock:
            for file, is_kept in zip(missing, outcomes, strict=True):
                self._mapped_values.pop(file.key, None)
                self._puts += is_kept
                self._refusals += not is_kept
        results = iter(outcomes)
        return [is_stored or next(results) for is_stored in stored_flags]

    def _make_room(self, cache: Any, name: bytes, need_bytes: int, holder: str) -> bool:
        """Evict entries for a new file if the rules of the tier allow it, and return whether the file fits.

        The file must fit into the share of its holder. If the folder is full, the file must be allowed to replace the
        oldest entry (`should_replace`), which represents all entries that are then evicted.
        """

        def admits(victim: bytes) -> bool:
            return self._should_replace is None or self._should_replace(name, victim)

        ledger, limit_bytes = self._ledger, self._holder_bytes
        if limit_bytes is not None and not ledger.make_room_within_share(
            cache, holder, need_bytes, limit_bytes, admits
        ):
            return False
        if self._should_replace is not None and not ledger.fits(cache, need_bytes):
            oldest = ledger.find_oldest(cache)
            if oldest is not None and not admits(oldest):
                return False
        return ledger.make_room(cache, need_bytes)

    def map_over(self, key: str, region: Region) -> bool:
        """Replace the memory of a region, which has the payload of `key`, by the mapped file.

        If the file is too small to be mapped, is gone or is damaged, return False and leave the region unchanged.
        """
        if region.size_bytes < self._map_bytes_min:
            return False
        digest = compute_key_digest(key)
        try:
            with (self._folder / make_file_name(digest)).open("rb", buffering=0) as file:
                data = memoryview(file.read())
                if extract_payload(digest, data) != region.payload:
                    return False
                region.map_over(file.fileno())
        except (OSError, Damaged):
            return False
        return True

    def discard(self, key: str) -> None:
        with self._lock:
            self._mapped_values.pop(key, None)
            self._recent_uses.pop(key, None)
        name = make_database_key(key)
        try:
            # Delete the file before the ledger takes its lock, because a discarded file must be deleted even if the
            # folder is busy or full.
            (self._folder / make_file_name(name)).unlink(missing_ok=True)
            self._ledger.run(lambda cache: cache.delete(name))
        except (OSError, LedgerUnavailable) as error:
            self._note_failure(error)

    def read_stats(self) -> TierStats:
        with self._lock:
            return TierStats(
                hits=self._hits,
                misses=self._misses,
                puts=self._puts,
                refused=self._refusals,
                evictions=self._ledger.evictions,
                damaged=self._damaged_files,
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
            self._mapped_values.clear()
        if self._recent_uses:
            self._record_uses()
        self._ledger.close()

    def check_invariants(self) -> None:
        assert len(self._mapped_values) <= self._mapped_max, (
            f"{len(self._mapped_values)} mappings kept of {self._mapped_max}"
        )
        assert len(self._recent_uses) <= 2 * _TOUCHES_MAX + len(self._mapped_values), (
            f"{len(self._recent_uses)} unrecorded uses"
        )
        self._ledger.check_invariants()

    def _read_from_disk(self, key: str) -> memoryview | None:
        """Return the value from its file, count a hit or a miss, and delete a damaged file.

        The result is None if the file does not exist, is damaged or cannot be read.

        A file that is large enough is mapped, and the mapping is kept for later reads.
        """
        payload, is_damaged = None, False
        digest = compute_key_digest(key)
        try:
            data = _read_file(self._folder / make_file_name(digest), self._map_bytes_min)
            is_mapped = len(data) >= self._map_bytes_min
            payload = extract_payload(digest, data, check_payload=self._check_mapped or not is_mapped)
        except FileNotFoundError:
            pass
        except Damaged:
            is_damaged = True
        except OSError as error:
            self._note_failure(error)
        if payload is None:
            with self._lock:
                self._misses += 1
                self._damaged_files += is_damaged
            if is_damaged:
                self.discard(key)
            return None
        with self._lock:
            self._hits += 1
            if self.is_mapped(payload) and not self._closed:
                # If two threads have mapped the file at the same time, keep only one mapping.
                payload = self._mapped_values.setdefault(key, payload)
                while len(self._mapped_values) > self._mapped_max:
                    self._mapped_values.popitem(last=False)
        self._note_use(key)
        return payload

    def _note_use(self, key: str) -> None:
        with self._lock:
            self._recent_uses[key] = None
            is_due = len(self._recent_uses) >= _TOUCHES_MAX
        if is_due:
            self._record_uses(wait_s=0)

    def _take_recent_uses(self) -> list[bytes]:
        with self._lock:
            keys, self._recent_uses = self._recent_uses, {}
        return list(map(make_database_key, keys))

    def _record_uses(self, wait_s: float = 2.0) -> None:
        """Record in the usage database which files were used since the last call, so that they are evicted later.

        Uses that cannot be written now are dropped, so that they do not fill the memory. With `wait_s` of 0, this is
        not counted as an error, because the caller did not want to wait.
        """
        keys = self._take_recent_uses()

        def update(cache: Any) -> None:
            with cache.transact():
                self._ledger.touch(cache, keys)

        try:
            self._ledger.run(update, wait_s)
        except LedgerUnavailable as error:
            if wait_s:
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        with self._lock:
            self._errors += 1
            self._last_error = str(error)


@dataclass(frozen=True, slots=True)
class _File:
    """A value to store. `size` is the number of bytes of the file, including the header."""

    key: str
    key_digest: bytes
    path: Path
    header: bytes
    parts: list[memoryview]
    size: int
    holder: str

    @classmethod
    def from_payload(cls, folder: Path, key: str, payload: Payload, holder: str) -> _File:
        parts, digest = split_payload(payload), compute_key_digest(key)
        size = HEADER_BYTES + sum(len(part) for part in parts)
        return cls(key, digest, folder / make_file_name(digest), make_header(digest, parts), parts, size, holder)


def make_database_key(key: str) -> bytes:
    """Return the short form of a key in the ledger, which is the usage database of the cache folder.

    `should_replace` receives keys in this form.
    """
    return compute_key_digest(key)[:NAME_BYTES]


def _read_file(path: Path, map_bytes_min: int) -> memoryview:
    """Return a read-only view of the bytes of the file.

    A large file is mapped and shared. No descriptor stays open.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < map_bytes_min:
            return memoryview(file.readall())
        return map_file(file.fileno())


def _read_resident(path: str, flags: int, buffers: Buffers) -> memoryview | None:
    """Return the bytes of the file, or None if some of them are not in the kernel's memory.

    Args:
        path: The path of the file.
        flags: The flags of `preadv` with which it never waits for the disk, and reads fewer bytes instead.
        buffers: The pool from which the memory is taken.

    Raises:
        OSError: The file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = buffers.take(os.fstat(handle).st_size)
        return data.toreadonly() if os.preadv(handle, [data], 0, flags) == len(data) else None
    finally:
        os.close(handle)


def _is_stored(path: Path, header: bytes, file_bytes: int) -> bool:
    """Return whether the file exists with this header and this size.

    Another worker may have stored the payload before.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size == file_bytes and file.read(HEADER_BYTES) == header
    except OSError:
        return False


def _write_file(path: Path, parts: Sequence[memoryview]) -> None:
    """Write the file atomically.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            for part in parts:
                bytes_written = 0
                while bytes_written < len(part):
                    bytes_written += file.write(part[bytes_written:])
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise
