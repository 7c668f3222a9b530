"""The port to the files of a log, and its implementation on the local disk (`FolderFiles`).

In simulations, the port is a disk that loses or truncates writes. All methods block, and are called from threads.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from seamark.formats.runtime.errors import ConfigError

_TEMPORARY_SUFFIX = ".new"
_PARTS_MAX = 512
"""The maximum number of buffers in one call of pwritev. Linux accepts 1,024."""
_NO_RESERVE_ERRORS = frozenset((errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL))
"""The errors of file systems that cannot reserve space. The log then works without the reservation."""


class LogFile(Protocol):
    """An open file."""

    def write(self, position: int, parts: Sequence[bytes]) -> None:
        """Write the parts one after another. After an OSError, any of the bytes may have been written."""

    def sync(self) -> None:
        """Make all writes durable. After an OSError, it is unknown which writes are durable."""

    def truncate(self, size_bytes: int) -> None:
        """Truncate the file to this size."""

    def reserve(self, size_bytes: int) -> None:
        """Reserve space for this size. The new bytes are zero."""

    def close(self) -> None: ...


class LogFiles(Protocol):
    """The files in one folder. The methods raise OSError if the disk fails."""

    def list_names(self) -> list[str]:
        """Return the names of all complete files."""

    def describe(self, name: str) -> str:
        """Return the path of a file for messages."""

    def create(self, name: str, data: bytes, reserve_bytes: int = 0) -> None:
        """Create a file durably and atomically: it exists with all data, or not at all."""

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file. Even after an OSError, it contains either the old or the new bytes."""

    def open(self, name: str) -> LogFile: ...

    def read(self, name: str, position: int, length: int) -> bytes:
        """Return `length` bytes of a file from `position`, or fewer bytes at its end."""

    def read_whole(self, name: str) -> bytes: ...

    def measure_size(self, name: str) -> int: ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files durably, in the given order. A missing file is not an error."""


class _OpenFile:
    """A `LogFile` on the local disk.

    `write` passes at most `_PARTS_MAX` parts to one system call, because it accepts no more.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)

    def write(self, position: int, parts: Sequence[bytes]) -> None:
        for first in range(0, len(parts), _PARTS_MAX):
            position = _write_all(self._descriptor, position, parts[first : first + _PARTS_MAX])

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def reserve(self, size_bytes: int) -> None:
        _reserve_space(self._descriptor, size_bytes)

    def close(self) -> None:
        os.close(self._descriptor)


class FolderFiles:
    """The files in a folder of the local disk. Only one process at a time can use the folder."""

    def __init__(self, folder: Path) -> None:
        """Create the folder if it does not exist, and lock it.

        Raises:
            ConfigError: Another process uses the folder.
        """
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(folder.parent)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"Another process uses the log in {folder}; stop it first") from None
        # Files with this suffix are incomplete: an earlier process ended before it could rename them.
        for path in folder.glob(f"*{_TEMPORARY_SUFFIX}"):
            path.unlink()

    def close(self) -> None:
        """Release the lock of the folder."""
        os.close(self._lock)

    def list_names(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self.folder) if not name.endswith(_TEMPORARY_SUFFIX) and name != "lock"
        )

    def describe(self, name: str) -> str:
        return str(self.folder / name)

    def create(self, name: str, data: bytes, reserve_bytes: int = 0) -> None:
        try:
            self._write(name, data, reserve_bytes)
            sync_folder(self.folder)
        except OSError:
            (self.folder / name).unlink(missing_ok=True)
            raise

    def replace(self, name: str, data: bytes) -> None:
        self._write(name, data, 0)
        sync_folder(self.folder)

    def _write(self, name: str, data: bytes, reserve_bytes: int) -> None:
        """Write a temporary file, sync it, and rename it. First reserve `reserve_bytes` on the disk for the file."""
        temporary_path = self.folder / (name + _TEMPORARY_SUFFIX)
        descriptor = os.open(temporary_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if reserve_bytes:
                _reserve_space(descriptor, reserve_bytes)
            _write_all(descriptor, 0, (data,))
            os.fsync(descriptor)
            temporary_path.rename(self.folder / name)
        except OSError:
            temporary_path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def open(self, name: str) -> LogFile:
        return _OpenFile(self.folder / name)

    def read(self, name: str, position: int, length: int) -> bytes:
        descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.pread(descriptor, length, position)
        finally:
            os.close(descriptor)

    def read_whole(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def measure_size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        sync_folder(self.folder)


def _write_all(descriptor: int, position: int, parts: Sequence[bytes]) -> int:
    """Write the parts at a position, and return the position after them."""
    size_bytes = sum(map(len, parts))
    written_bytes = os.pwritev(descriptor, parts, position)
    # The disk may be full, a signal may have arrived, or the write is larger than 2 GiB.
    if written_bytes < size_bytes:
        remaining = memoryview(b"".join(parts))
        while written_bytes < size_bytes:
            written_bytes += os.pwrite(descriptor, remaining[written_bytes:], position + written_bytes)
    return position + size_bytes


def _reserve_space(descriptor: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NO_RESERVE_ERRORS:
            raise


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
