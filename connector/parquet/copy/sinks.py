"""Writes copied bytes to a local file, to which the kernel copies, or to an object, which is uploaded in parts."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import Any, Protocol

from seamark.connector.client.storage import LocalPath, Storage

_COPY_BYTES = 8 << 20
_NO_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""The error codes of file systems that do not support copies in the kernel."""


class Sink(Protocol):
    """A new file that is written once, from beginning to end."""

    @property
    def position(self) -> int:
        """The number of bytes written so far."""

    def write(self, data: bytes) -> None: ...

    def copy(self, fd: int, begin: int, size: int) -> None:
        """Copy bytes of a local file.

        Raises:
            ValueError: The file ends before these bytes.
        """

    def close(self) -> None:
        """Make the file durable."""

    def abort(self) -> None:
        """Delete the file.

        The method never raises.
        """


def open_sink(location: str, storage: Storage) -> Sink:
    local = storage.find_local_path(location)
    if local is not None:
        return _LocalSink(local)
    return _StreamSink(storage.open_output_stream(location), location, storage)


class _LocalSink:
    """A new local file."""

    def __init__(self, path: LocalPath) -> None:
        self._path = path
        self._fd = path.create()
        self.position = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view.nbytes:
            count = os.write(self._fd, view)
            view = view[count:]
            self.position += count

    def copy(self, fd: int, begin: int, size: int) -> None:
        end = begin + size
        while begin < end:
            try:
                count = os.copy_file_range(fd, self._fd, end - begin, begin)
            except OSError as error:
                if error.errno not in _NO_COPY:
                    raise
                data = os.pread(fd, min(_COPY_BYTES, end - begin), begin)
                count = len(data)
                self.write(data)
            else:
                self.position += count
            if not count:
                raise ValueError("the file became shorter while it was copied")
            begin += count

    def close(self) -> None:
        os.close(self._fd)
        self._fd = -1
        self._path.sync()

    def abort(self) -> None:
        with suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
        with suppress(OSError):
            self._path.delete()


class _StreamSink:
    """A new object in a remote storage."""

    def __init__(self, stream: Any, location: str, storage: Storage) -> None:
        self._stream, self._location, self._storage = stream, location, storage
        self.position = 0

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self.position += len(data)

    def copy(self, fd: int, begin: int, size: int) -> None:
        end = begin + size
        while begin < end:
            data = os.pread(fd, min(_COPY_BYTES, end - begin), begin)
            if not data:
                raise ValueError("the file became shorter while it was copied")
            self.write(data)
            begin += len(data)

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        with suppress(Exception):
            self._stream.close()
        with suppress(Exception):
            self._storage.delete(self._location)
