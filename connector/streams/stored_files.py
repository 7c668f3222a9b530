"""Gives the code that locates rows of a keyed stream table access to the table's files inside the server.

The server plans scans and looks up keys in its own process, and reads files with its own object store. Therefore no
request, no token and no key of a storage is needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from seamark.connector.client.errors import Refused
from seamark.connector.client.names import Name
from seamark.connector.client.storage import LocalPath, Storage
from seamark.connector.client.values import At
from seamark.connector.write.row_locations import KeyAnswer
from seamark.formats.runtime.errors import BadRequest, SeamarkError, TooLarge


class StoredRowsPort(Protocol):
    """The part of the server that finds stored rows (`metaserver/streams/stored_rows.py`). It is thread-safe."""

    def plan(self, body: Mapping[str, Any], files_max: int | None = None) -> bytes: ...
    def lookup(self, keys: pa.Table, index: str) -> KeyAnswer: ...
    def read(self, location: str, start: int = 0, length: int | None = None) -> bytes: ...


class ServerFiles:
    """Plans scans and looks up keys of one snapshot like a `SeamarkClient`, but by calls inside the server.

    Args:
        stored_rows: The interface of the server for plans, lookups and files.
        files_max: The maximum number of data files of a plan, or None for no limit.

    Attributes:
        sizes_bytes: The sizes of the files in the plans, by location.
    """

    def __init__(self, stored_rows: StoredRowsPort, files_max: int | None = None) -> None:
        self._stored_rows = stored_rows
        self._files_max = files_max
        self.sizes_bytes: dict[str, int] = {}

    def plan(self, table: Name, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        page = msgspec.json.decode(self._stored_rows.plan(body, self._files_max))
        self.add_sizes([*(task["data-file"] for task in page["file-scan-tasks"]), *page["delete-files"]])
        yield page

    def add_sizes(self, files: Iterable[Mapping[str, Any]]) -> None:
        """Record the sizes of files of an earlier plan, so that they can be read.

        `KeyedRows.located` keeps rows that were found by an earlier plan, and their files are not planned again.
        """
        self.sizes_bytes |= {file["file-path"]: int(file["file-size-in-bytes"]) for file in files}

    def lookup(self, table: Name, keys: pa.Table, *, index: str, at: At) -> KeyAnswer:
        try:
            return self._stored_rows.lookup(keys, index)
        except (BadRequest, TooLarge) as error:  # After Refused, the caller reads the files of the plan instead.
            raise Refused(error.message) from None


@dataclass(frozen=True)
class ServedStorage(Storage):
    """A storage that reads the files of plans with the server's object store.

    Attributes:
        sizes_bytes: The sizes of the files, by location.
    """

    stored: StoredRowsPort | None = None
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)

    def open_input_file(self, location: str) -> pa.NativeFile:
        assert self.stored is not None
        return pa.PythonFile(_ObjectFile(self.stored, location, self.sizes_bytes[location]), mode="r")

    def read(self, location: str) -> memoryview:
        assert self.stored is not None
        with _raise_os_errors(location):
            return memoryview(self.stored.read(location))

    def is_local(self, location: str) -> bool:
        return False

    def find_local_path(self, location: str) -> LocalPath | None:
        return None


@contextmanager
def _raise_os_errors(location: str) -> Iterator[None]:
    """Convert errors of the object store to the OSErrors that file systems raise."""
    try:
        yield
    except SeamarkError as error:
        raise OSError(f"{location}: {error.message}") from error


class _ObjectFile(io.RawIOBase):
    """A file that reads an immutable object at any position. Its size is known from the plan."""

    def __init__(self, stored_rows: StoredRowsPort, location: str, size_bytes: int) -> None:
        super().__init__()
        self._stored_rows = stored_rows
        self._location = location
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        remaining_bytes = max(0, self._size_bytes - self._position)
        length = remaining_bytes if size is None or size < 0 else min(size, remaining_bytes)
        if not length:
            return b""
        with _raise_os_errors(self._location):
            data = self._stored_rows.read(self._location, self._position, length)
        self._position += len(data)
        return data


@dataclass(frozen=True)
class MemoryStorage(Storage):
    """A storage that stores written files in memory.

    Attributes:
        written: The written files, by location.
    """

    written: dict[str, pa.BufferOutputStream] = field(default_factory=dict)

    def open_output_stream(self, location: str) -> pa.NativeFile:
        stream = self.written[location] = pa.BufferOutputStream()
        return stream

    def find_local_path(self, location: str) -> LocalPath | None:
        return None

    def write(self, location: str, parts: Iterable[bytes | bytearray | memoryview]) -> int:
        stream = self.open_output_stream(location)
        return sum(stream.write(part) for part in parts)

    def delete(self, location: str) -> None:
        """Remove a written file from memory."""
        self.written.pop(location, None)

    def read_data(self, location: str) -> bytes:
        """Return the bytes of a written file."""
        return bytes(self.written[location].getvalue())
