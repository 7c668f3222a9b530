"""Columns of data files by Iceberg field id, of some of their rows, by range.

The rule it keeps: a column is found by the ids that the file carries, or not at all (`Unreadable`). What a file
costs is bounded: only the chunks of the columns asked for are fetched, of the row groups that hold one of the rows, and
all that one request fetches, and all that it decodes, is taken from a budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from metaserver.errors import BadRequest, StorageError
from metaserver.iceberg.files.budget import Budget, Part, decoded_budget
from metaserver.iceberg.files.parquet import InDoubt, Unreadable, has_ids, places_of
from metaserver.iceberg.files.parquet_reading import BoundedParquet
from metaserver.index.blocks.packing import Longs
from metaserver.objects.port import ObjectStore

_WAIT_S = 120.0
"""For one range; storage gives up before."""


class _Ranges:
    """An object as a file that pyarrow reads from a thread, while the event loop that owns the store goes on."""

    closed = False

    def __init__(
        self, objects: ObjectStore, loop: asyncio.AbstractEventLoop, path: str, size: int, fetched: Budget
    ) -> None:
        self._objects, self._loop, self._path, self._size = objects, loop, path, size
        self._fetched = fetched
        self._at = 0
        self._once: dict[tuple[int, int], bytes] = {}
        """Ranges that were read to be checked, and that pyarrow reads next."""

    def read(self, size: int = -1) -> bytes:
        length = self._size - self._at if size < 0 else max(0, min(size, self._size - self._at))
        if not length:
            return b""
        data = self._once.pop((self._at, length), None)
        if data is None:
            data = self._fetch(length)
            self._once[self._at, length] = data
        self._at += len(data)
        return data

    def _fetch(self, length: int) -> bytes:
        self._fetched.take(length, self._path)
        asked = asyncio.run_coroutine_threadsafe(self._objects.read_range(self._path, self._at, length), self._loop)
        return asked.result(_WAIT_S)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class DataRows:
    """Columns of rows of data files. `read` is for a thread, not for the event loop."""

    def __init__(
        self, objects: ObjectStore, loop: asyncio.AbstractEventLoop, limit_bytes: int, decoded_bytes: int
    ) -> None:
        """`limit_bytes` is what one request may fetch, `decoded_bytes` what it may hold in memory."""
        self._objects, self._loop = objects, loop
        self._fetched = Budget(limit_bytes, "to look at its rows, one request would fetch")
        self.decoded = decoded_budget(decoded_bytes)

    @contextmanager
    def read(
        self, path: str, size: int, records: int, column_ids: Sequence[int], rows: Longs
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """Each column at these rows of the file, int64[n] ascending. Unreadable where the file is not what the manifest
        says, lacks a column, or takes more bytes than there are left."""

        def read(file: BoundedParquet) -> dict[int, pa.ChunkedArray]:
            places = places_of(file.schema, column_ids)
            absent = [one for one in column_ids if one not in places]
            if absent:
                raise Unreadable(path, f"it has no column of id {absent[0]}")
            return file.columns_at(places, rows)

        with self._read(path, size, records, read) as found:
            yield found

    @contextmanager
    def read_all(
        self, path: str, size: int, records: int, column_ids: Sequence[int]
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """As `read`, of all rows, without the columns that the file lacks. Unreadable where it has no ids at all."""

        def read(file: BoundedParquet) -> dict[int, pa.ChunkedArray]:
            if not has_ids(file.schema):
                raise Unreadable(path, "its columns have no field ids")
            places = places_of(file.schema, column_ids)
            return file.columns(places) if places else {}

        with self._read(path, size, records, read) as found:
            yield found

    @contextmanager
    def _read(
        self, path: str, size: int, records: int, read: Callable[[BoundedParquet], dict[int, pa.ChunkedArray]]
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """What is decoded counts until the caller has made something of it."""
        source = _Ranges(self._objects, self._loop, path, size, self._fetched)
        with Part(self.decoded) as budget:
            yield self._decoded(source, path, records, read, budget)

    def _decoded(
        self,
        source: _Ranges,
        path: str,
        records: int,
        read: Callable[[BoundedParquet], dict[int, pa.ChunkedArray]],
        budget: Budget,
    ) -> dict[int, pa.ChunkedArray]:
        try:
            file = BoundedParquet(pa.PythonFile(source, mode="r"), path, budget)
            if file.rows != records:
                raise Unreadable(path, f"it has {file.rows} rows; its manifest says {records}")
            return read(file)
        except InDoubt as error:
            raise Unreadable(path, str(error)) from None
        except (BadRequest, StorageError) as error:  # outside of the warehouse, gone, not allowed
            raise Unreadable(path, error.message) from None
        except (pa.ArrowException, OSError) as error:
            raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from None
