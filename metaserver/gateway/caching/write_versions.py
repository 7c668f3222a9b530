"""Versions of objects, by which all workers of a machine notice immediately that one of them writes an object.

A worker changes the version of an object before it passes a write on to the store, and again after the store has
answered. A cached record contains the version that was read before the request to the store. The record is trusted only
while the version stays the same. So data that a worker reads during another worker's write are not trusted after the
write.

The versions are random numbers in a file that all workers map into memory. Several objects share a version, so after a
write of one of them, the records of the others must be read from the store again.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import tempfile
from pathlib import Path

from seamark.formats.runtime.clock import Clock

_SLOT_DIGEST_BYTES = 2
"""The size of the digest of a location, which is the number of its slot in the file."""
_VERSION_BYTES = 8
_FILE_BYTES = (1 << 8 * _SLOT_DIGEST_BYTES) * _VERSION_BYTES


class WriteVersions:
    """The write versions of objects: random numbers that change when a worker of this machine writes an object."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Open the file with the write versions of objects, which all workers of the machine share.

        Raises:
            OSError: The file cannot be created.
        """
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        _create_versions_file(path, clock)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FILE_BYTES)
        self._slots = memoryview(self._map).cast("Q")

    def get_version(self, location: str) -> int:
        return self._slots[_compute_slot(location)]

    def change(self, location: str) -> None:
        self._slots[_compute_slot(location)] = int.from_bytes(self._clock.draw_bytes(_VERSION_BYTES), "little")

    def close(self) -> None:
        self._slots.release()
        self._map.close()


def _compute_slot(location: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(location.encode("utf-8", "surrogatepass"), digest_size=_SLOT_DIGEST_BYTES).digest(), "little"
    )


def _create_versions_file(path: Path, clock: Clock) -> None:
    """Create the file with random write versions of objects, unless it exists.

    A cached record of an object contains its version, and is trusted only while the file has the same version. Because
    the versions are random, records from the time of a lost file are not trusted.

    If several workers call the function at the same time, one of them creates the file.
    """
    with path.with_name(path.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_size == _FILE_BYTES:
            return
        handle, temporary_path = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(clock.draw_bytes(_FILE_BYTES))
        os.replace(temporary_path, path)
