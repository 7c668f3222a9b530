"""Where copied bytes go: a local file, to which the kernel copies, or an object, which is written in parts."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from pyarrow import fs

from seamark.connector.client.storage import Storage, sync_to_disk

_COPY_BYTES = 8 << 20
_NO_COPY = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""The file systems do not support a copy in the kernel."""


class Sink(Protocol):
    """A new file that is written once, from its begin to its end."""

    @property
    def at(self) -> int:
        """Bytes written so far."""

    def write(self, data: bytes) -> None: ...

    def copy(self, fd: int, begin: int, size: int) -> None:
        """Copies bytes of a local file. ValueError if it ends before."""

    def close(self) -> None:
        """Makes the file durable."""

    def abort(self) -> None:
        """Deletes the file. Never raises."""


def open_sink(location: str, storage: Storage) -> Sink:
    filesystem, path = storage.open(location)
    if isinstance(filesystem, fs.LocalFileSystem):
        return _LocalSink(path)
    return _StreamSink(filesystem.open_output_stream(path), location, storage)


class _LocalSink:
    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.at = 0

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view.nbytes:
            count = os.write(self._fd, view)
            view = view[count:]
            self.at += count

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
                self.at += count
            if not count:
                raise ValueError("the file became shorter while it was copied")
            begin += count

    def close(self) -> None:
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        sync_to_disk(os.path.dirname(self._path))

    def abort(self) -> None:
        with suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
        with suppress(OSError):
            os.unlink(self._path)


class _StreamSink:
    def __init__(self, stream: Any, location: str, storage: Storage) -> None:
        self._stream, self._location, self._storage = stream, location, storage
        self.at = 0

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self.at += len(data)

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
