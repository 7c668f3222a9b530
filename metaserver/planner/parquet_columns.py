"""Columns of data files by Iceberg field id, of some of their rows, by range.

The rule it keeps: a column is found by the ids that the file carries, or not at all (`Unreadable`). What a file
costs is bounded: only the chunks of the columns asked for are fetched, of the row groups that hold one of the rows, and
all that one request fetches is charged to one `Allowance`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from metaserver.errors import BadRequest, StorageError
from metaserver.iceberg.parquet import InDoubt, Unreadable, column_of, dotted, has_ids, places_of, refuse_large
from metaserver.index.packing import Longs
from metaserver.objects.port import ObjectStore

T = TypeVar("T")

_WAIT_S = 120.0
"""For one range; storage gives up before."""


class Allowance:
    """Bytes that may still be fetched."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = self._left = limit_bytes

    def take(self, size_bytes: int, path: str) -> None:
        """Unreadable where it is used up."""
        if size_bytes > self._left:
            raise Unreadable(
                path, f"to look at its rows takes more than the {self._limit_bytes:,} bytes of one request"
            )
        self._left -= size_bytes


class _Ranges:
    """An object as a file that pyarrow reads from a thread, while the event loop that owns the store goes on."""

    closed = False

    def __init__(
        self, objects: ObjectStore, loop: asyncio.AbstractEventLoop, path: str, size: int, allowance: Allowance
    ) -> None:
        self._objects, self._loop, self._path, self._size = objects, loop, path, size
        self._allowance = allowance
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        length = self._size - self._at if size < 0 else max(0, min(size, self._size - self._at))
        if not length:
            return b""
        self._allowance.take(length, self._path)
        asked = asyncio.run_coroutine_threadsafe(self._objects.read_range(self._path, self._at, length), self._loop)
        data = asked.result(_WAIT_S)
        self._at += len(data)
        return data

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

    def __init__(self, objects: ObjectStore, loop: asyncio.AbstractEventLoop, limit_bytes: int) -> None:
        self._objects, self._loop = objects, loop
        self._allowance = Allowance(limit_bytes)

    def read(
        self, path: str, size: int, records: int, column_ids: Sequence[int], rows: Longs
    ) -> dict[int, pa.ChunkedArray]:
        """Each column at these rows of the file, int64[n] ascending. Unreadable where the file is not what the manifest
        says, lacks a column, or takes more bytes than there are left."""

        def read(file: pq.ParquetFile) -> dict[int, pa.ChunkedArray]:
            places = places_of(file.schema_arrow, column_ids)
            absent = [one for one in column_ids if one not in places]
            if absent:
                raise Unreadable(path, f"it has no column of id {absent[0]}")
            table = pa.concat_tables(list(_parts(file, dotted(places.values()), rows)))
            return {one: column_of(table, places[one]) for one in column_ids}

        return self._read(path, size, records, read)

    def read_all(self, path: str, size: int, records: int, column_ids: Sequence[int]) -> dict[int, pa.ChunkedArray]:
        """As `read`, of all rows, without the columns that the file lacks. Unreadable where it has no ids at all."""

        def read(file: pq.ParquetFile) -> dict[int, pa.ChunkedArray]:
            if not has_ids(file.schema_arrow):
                raise Unreadable(path, "its columns have no field ids")
            refuse_large(file.metadata, path)
            places = places_of(file.schema_arrow, column_ids)
            table = file.read(columns=dotted(places.values()), use_threads=False) if places else pa.table({})
            return {one: column_of(table, place) for one, place in places.items()}

        return self._read(path, size, records, read)

    def _read(self, path: str, size: int, records: int, read: Callable[[pq.ParquetFile], T]) -> T:
        source = _Ranges(self._objects, self._loop, path, size, self._allowance)
        try:
            with pq.ParquetFile(pa.PythonFile(source, mode="r"), pre_buffer=False) as file:
                if file.metadata.num_rows != records:
                    raise Unreadable(path, f"it has {file.metadata.num_rows} rows; its manifest says {records}")
                return read(file)
        except InDoubt as error:
            raise Unreadable(path, str(error)) from None
        except (BadRequest, StorageError) as error:  # outside of the warehouse, gone, not allowed
            raise Unreadable(path, error.message) from None
        except (pa.ArrowException, OSError) as error:
            raise Unreadable(path, f"it cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from None


def _parts(file: pq.ParquetFile, names: list[str], rows: Longs) -> Iterable[pa.Table]:
    start = at = 0
    for number in range(file.metadata.num_row_groups):
        end = start + file.metadata.row_group(number).num_rows
        until = int(np.searchsorted(rows, end))
        if until > at:
            yield file.read_row_group(number, columns=names, use_threads=False).take(rows[at:until] - start)
        start, at = end, until
