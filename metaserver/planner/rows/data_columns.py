"""Reader of the columns of some rows of data files, by Iceberg field id, with range reads.

A column is identified by the field ids in the file. In a file without field ids, it is identified by the table's
name mapping. If there are neither field ids nor a name mapping, the file is `Unreadable`. The costs are limited: only
the column chunks of row groups with a requested row are fetched, and the budgets of a request limit the bytes that are
fetched and decoded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from seamark.formats.iceberg.files.budget import Budget, BudgetShare, create_decoding_budget
from seamark.formats.iceberg.files.parquet import (
    AmbiguousColumn,
    ColumnPath,
    Unreadable,
    apply_name_mapping,
    find_columns,
)
from seamark.formats.iceberg.files.parquet_reading import BoundedParquet
from seamark.formats.iceberg.metadata.name_mapping import NameMapping
from seamark.formats.index.packing import Longs
from seamark.formats.runtime.errors import BadRequest, StorageError
from seamark.metaserver.objects.port import ObjectStore

_WAIT_S = 120.0
"""The timeout of one range read, in seconds. The storage has a shorter timeout, which usually ends the read first."""


_REASON_CHARS_MAX = 200
"""The maximum number of characters of an error text that becomes the reason of `Unreadable`."""


class _StoredFile:
    """An object in storage, as a file that pyarrow reads in a thread. The storage itself runs on the event loop."""

    closed = False

    def __init__(
        self, objects: ObjectStore, loop: asyncio.AbstractEventLoop, path: str, size: int, fetch_budget: Budget
    ) -> None:
        self._objects, self._loop, self._path, self._size = objects, loop, path, size
        self._fetch_budget = fetch_budget
        self._position = 0
        self._checked_ranges: dict[tuple[int, int], bytes] = {}
        """The bytes of ranges that are read once for checks and once by pyarrow, by offset and length."""

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes of the file, or all remaining bytes if `size` is negative.

        The checks of a file and pyarrow read the same ranges. The first read of a range fetches it and keeps it in
        memory. The second read returns it from memory and frees the memory.
        """
        length = self._size - self._position if size < 0 else max(0, min(size, self._size - self._position))
        if not length:
            return b""
        data = self._checked_ranges.pop((self._position, length), None)
        if data is None:
            data = self._fetch(length)
            self._checked_ranges[self._position, length] = data
        self._position += len(data)
        return data

    def _fetch(self, length: int) -> bytes:
        self._fetch_budget.take(length, self._path)
        future = asyncio.run_coroutine_threadsafe(
            self._objects.read_range(self._path, self._position, length), self._loop
        )
        return future.result(_WAIT_S)

    def seek(self, offset: int, whence: int = 0) -> int:
        # `whence` is SEEK_SET (0), SEEK_CUR (1) or SEEK_END (2).
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

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
    """Reads columns of some rows of data files.

    `read` must run in a thread, not on the event loop.
    """

    def __init__(
        self,
        objects: ObjectStore,
        loop: asyncio.AbstractEventLoop,
        mapping: NameMapping | None,
        limit_bytes: int,
        decoded_bytes: int,
    ) -> None:
        """Create a reader for one request.

        Args:
            objects: The storage.
            loop: The event loop of the storage.
            mapping: The name mapping of the table.
            limit_bytes: The maximum number of bytes that the request may fetch.
            decoded_bytes: The maximum memory of the request's decoded columns.
        """
        self._objects, self._loop, self._mapping = objects, loop, mapping
        self._fetch_budget = Budget(limit_bytes, "reading rows of data files, one request would fetch")
        self.decoded = create_decoding_budget(decoded_bytes)

    @contextmanager
    def read(
        self, path: str, size: int, records: int, column_ids: Sequence[int], rows: Longs
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """Read some rows of the requested columns.

        Args:
            path: The path of the file.
            size: The size of the file in bytes.
            records: The number of rows of the file, by its manifest entry.
            column_ids: The field ids of the columns.
            rows: int64[n]: the ascending positions of the rows.

        Raises:
            Unreadable: The file differs from its manifest entry, lacks a column, or exceeds the remaining budget.
        """

        def read(file: BoundedParquet) -> dict[int, pa.ChunkedArray]:
            column_paths = self._find_column_paths(file, column_ids)
            absent_ids = [column_id for column_id in column_ids if column_id not in column_paths]
            if absent_ids:
                raise Unreadable(path, f"the file has no column with field id {absent_ids[0]}")
            return file.read_columns_at(column_paths, rows)

        with self._open_file(path, size, records, read) as columns:
            yield columns

    @contextmanager
    def read_all(
        self, path: str, size: int, records: int, column_ids: Sequence[int]
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """Read all rows of the requested columns that the file has.

        Raises:
            Unreadable: The file differs from its manifest entry, or exceeds the remaining budget.
        """

        def read(file: BoundedParquet) -> dict[int, pa.ChunkedArray]:
            column_paths = self._find_column_paths(file, column_ids)
            return file.read_columns(column_paths) if column_paths else {}

        with self._open_file(path, size, records, read) as columns:
            yield columns

    def _find_column_paths(self, file: BoundedParquet, column_ids: Sequence[int]) -> dict[int, ColumnPath]:
        return find_columns(apply_name_mapping(list(file.schema), self._mapping), column_ids)

    @contextmanager
    def _open_file(
        self, path: str, size: int, records: int, read_columns: Callable[[BoundedParquet], dict[int, pa.ChunkedArray]]
    ) -> Iterator[dict[int, pa.ChunkedArray]]:
        """Open a file, and yield the columns that the function `read_columns` reads from it, by field id.

        The decoded columns count towards the budget until the context ends.
        """
        source = _StoredFile(self._objects, self._loop, path, size, self._fetch_budget)
        with BudgetShare(self.decoded) as budget:
            yield self._decode_file(source, path, records, read_columns, budget)

    def _decode_file(
        self,
        source: _StoredFile,
        path: str,
        records: int,
        read_columns: Callable[[BoundedParquet], dict[int, pa.ChunkedArray]],
        budget: Budget,
    ) -> dict[int, pa.ChunkedArray]:
        """Decode the columns of an opened file with the function `read_columns`.

        Raises:
            Unreadable: The file cannot be read, or its number of rows is not that of its manifest entry.
        """
        try:
            file = BoundedParquet(pa.PythonFile(source, mode="r"), path, budget)
            if file.rows != records:
                raise Unreadable(path, f"the file has {file.rows} rows; its manifest states {records}")
            return read_columns(file)
        except AmbiguousColumn as error:
            raise Unreadable(path, str(error)) from None
        except (BadRequest, StorageError) as error:
            # The file is missing or outside the warehouse, or access is denied.
            raise Unreadable(path, error.message) from None
        except (pa.ArrowException, OSError, ValueError) as error:  # ValueError means that a name is not UTF-8.
            first_line = (str(error).splitlines() or [""])[0]
            raise Unreadable(path, f"the file cannot be read: {first_line[:_REASON_CHARS_MAX]}") from None
