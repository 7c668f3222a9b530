"""Writes Arrow batches as data files and index files of a table.

`TableWriter` runs in a Spark task or in this process. It buffers the rows of each partition until they fill
a row group. All partitions share one memory limit. If the table has a sort order, the writer sorts the
rows. `close` returns the files. The files become visible when a commit adds them. A writer that dies leaves
unreferenced files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.casting import conform
from seamark.connector.arrow.partitions import Partition, find_field_positions, get_column_at
from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile, IndexTask, build_entry, build_entry_of_file, write_index_file
from seamark.connector.parquet.copy.protection import (
    PUBLISHES_ORDER,
    PUBLISHES_PARTITIONS,
    FileProtection,
    hide_values,
)
from seamark.connector.write.data_files import (
    ROW_GROUP_BYTES,
    ROW_GROUP_BYTES_DEFAULT,
    FileWriter,
    build_writer_options,
    finish_data_file,
    open_data_file_writer,
)
from seamark.connector.write.row_origins import OriginLog
from seamark.connector.write.target import WriteTarget
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.properties import (
    TARGET_FILE_BYTES,
    TARGET_FILE_BYTES_DEFAULT,
    parse_int,
    parse_long,
)
from seamark.formats.protocol.wire import INDEX_FILES_MAX
from seamark.formats.runtime.errors import Corrupt

_SLICE_MIN_BYTES, _SLICE_MAX_BYTES = 64 << 10, 16 << 20
"""The minimum and maximum size in bytes of the slices of a batch that are partitioned and buffered one by one."""
_SAMPLE_BYTES = 4 << 20
"""The size of the rows from which the ratio of bytes in a file to bytes of Arrow data is measured."""
_BATCH_OVERHEAD_BYTES = 4 << 10
"""The approximate memory that a batch needs in addition to its values."""
_ORIGIN = ""
"""The name of the temporary column with the origins of rows."""
_RATIO_MIN = 0.001
"""The minimum measured ratio of bytes in a file to bytes of Arrow data. It prevents very large row groups."""
_INDEX_FILE_ROWS_MAX = 8_000_000
"""The maximum number of rows that an index file covers."""


@dataclass(frozen=True)
class WriteLimits:
    """The limits of one writer.

    Attributes:
        buffered_bytes: The maximum size of Arrow data that is not yet in files.
        open_files: The maximum number of files that are being written.
        index_bytes: The maximum size of buffered values of indexed columns. Values that exceed it are read again from
            the finished file.
    """

    buffered_bytes: int = 512 << 20
    open_files: int = 64
    index_bytes: int = 128 << 20


DEFAULT_LIMITS = WriteLimits()


@dataclass(frozen=True)
class WrittenFiles:
    """The written files for a commit.

    Attributes:
        files: The ContentFiles of the data files.
        index_files: The location and `size-in-bytes` of each index file.
        skipped: The path of each data file for which an index could not be built, with the reason. An indexer tries
            again later.
    """

    files: tuple[dict[str, Any], ...] = ()
    index_files: tuple[dict[str, Any], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        return sum(file["record-count"] for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file["file-size-in-bytes"] for file in self.files)

    @staticmethod
    def join(parts: Iterable[WrittenFiles]) -> WrittenFiles:
        """Return the files of several tasks, for one commit."""
        results = list(parts)
        return WrittenFiles(
            tuple(file for result in results for file in result.files),
            tuple(file for result in results for file in result.index_files),
            tuple(skip for result in results for skip in result.skipped),
        )

    def limit_indexes(self, storage: Storage) -> WrittenFiles:
        """Delete index files above the maximum number of a commit, so that a write does not fail because of an index.

        An indexer builds the deleted index files later.
        """
        WrittenFiles(index_files=self.index_files[INDEX_FILES_MAX:]).discard(storage)
        return replace(self, index_files=self.index_files[:INDEX_FILES_MAX])

    def discard_unless_complete(self, rows: int, storage: Storage) -> WrittenFiles:
        """Return these files if they have `rows` rows. Otherwise delete them.

        Raises:
            RuntimeError: The number of rows differs.
        """
        if self.rows == rows:
            return self
        self.discard(storage)
        raise RuntimeError(f"{rows:,} rows were read, but {self.rows:,} rows were written; nothing is committed")

    def discard(self, storage: Storage) -> None:
        """Delete all files, and ignore errors of the storage.

        Call this only if no commit has added the files, and no commit can still add them.
        """
        for location in [*(file["file-path"] for file in self.files), *(file["location"] for file in self.index_files)]:
            with suppress(OSError):
                storage.delete(location)


class Written(Protocol):
    """New files that are not yet committed."""

    def discard(self, storage: Storage) -> None: ...


@contextmanager
def discard_on_error(file_groups: Iterable[Written], storage: Storage) -> Iterator[None]:
    """Delete the files if the block raises an exception, including files that the block adds to `file_groups`."""
    try:
        yield
    except BaseException:
        for part in file_groups:
            part.discard(storage)
        raise


def write_batches(
    target: WriteTarget,
    batches: Iterable[pa.RecordBatch],
    *,
    limits: WriteLimits = DEFAULT_LIMITS,
    protection: FileProtection | None = None,
) -> WrittenFiles:
    """Write the rows as durable data files and index files.

    If an error occurs, the written files are deleted.

    Raises:
        Unwritable: The rows do not fit the table.
    """
    with TableWriter(target, limits, protection=protection) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.close()


@dataclass
class _PartitionBuffer:
    """The buffered rows and the open file of one partition."""

    partition: Partition
    batches: list[pa.RecordBatch] = field(default_factory=list)
    batch_bytes: int = 0
    file: FileWriter | None = None
    indexed_columns: list[dict[int, pa.ChunkedArray]] | None = field(default_factory=list)
    """The indexed columns of each row group of the file, or None if they were larger than `index_bytes`."""
    indexed_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the buffered rows. Many small batches take more memory than their values."""
        return self.batch_bytes + len(self.batches) * _BATCH_OVERHEAD_BYTES

    @property
    def written_bytes(self) -> int:
        return self.file.size_bytes if self.file is not None else 0


class TableWriter:
    """Writes batches to data files. Batches may have rows of any partitions in any order.

    As a context manager, it deletes its files on an exception.
    """

    def __init__(
        self,
        target: WriteTarget,
        limits: WriteLimits = DEFAULT_LIMITS,
        *,
        origins: OriginLog | None = None,
        suffix: str = ".parquet",
        protection: FileProtection | None = None,
    ) -> None:
        """Create the writer. A file is opened when its first rows are written.

        Args:
            target: The table.
            limits: The limits of the writer.
            origins: The log that records the origin of each written row: its number among the rows of the old files.
                If it is set, each call of `write` must pass the origins.
            suffix: The suffix of the file names.
            protection: The encryption of the files. Indexes of encrypted columns are not built.

        Raises:
            Unwritable: The partition spec or the sort order has an encrypted column.
        """
        self._target, self._limits, self._origins, self._suffix = target, limits, origins, suffix
        self._protection = protection
        self._file_bytes = max(1, parse_long(target.properties, TARGET_FILE_BYTES, TARGET_FILE_BYTES_DEFAULT))
        row_group = max(1, parse_int(target.properties, ROW_GROUP_BYTES, ROW_GROUP_BYTES_DEFAULT))
        self._row_group_bytes = min(row_group, self._file_bytes)
        self._buffers: dict[str, _PartitionBuffer] = {}
        """The buffers, by the `repr` of the partition, which differs for 0.0 and -0.0 and is the same for all NaN."""
        self._open_buffers: dict[str, _PartitionBuffer] = {}
        """The partitions with an open file."""
        self._held_bytes = self._indexed_bytes = 0
        self._ratio: float | None = None
        """The ratio of bytes in a file to bytes of Arrow data, or None until it is measured."""
        self._files: list[dict[str, Any]] = []
        indexes = target.indexes
        if protection is not None:
            indexes = tuple(task for task in indexes if not protection.secret_ids & list_column_ids(task))
            protection.refuse(target.spec.partition_source_ids, PUBLISHES_PARTITIONS)
            protection.refuse(target.sort_order.column_ids, PUBLISHES_ORDER)
        self._indexes = IndexBuilder(indexes)
        column_ids = {column_id for task in indexes for column_id in list_column_ids(task)}
        self._field_positions = {column_id: find_field_positions(column_id, target.schema) for column_id in column_ids}

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def write(self, batch: pa.RecordBatch, origins: Longs | None = None) -> None:
        """Write the rows of a batch.

        Args:
            batch: The rows.
            origins: The number of each row among the rows of the old files, as int64[rows]. Required if the writer
                has a log of origins.

        Raises:
            Unwritable: The rows do not fit the table.
        """
        if not batch.num_rows:
            return
        # A slice is at most a quarter of a file, so that files do not become much larger than their target size.
        bytes_at_once = min(max(self._file_bytes // 4, _SLICE_MIN_BYTES), _SLICE_MAX_BYTES)
        rows_at_once = max(1, batch.num_rows * bytes_at_once // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows_at_once):
            with hide_values(self._protection):
                conformed_rows = conform(batch.slice(start, rows_at_once), self._target.schema, self._target.arrow)
            if self._origins is not None:
                assert origins is not None
                # The origins become the last column, so that they are partitioned and sorted together with the rows.
                conformed_rows = conformed_rows.append_column(_ORIGIN, pa.array(origins[start : start + rows_at_once]))
            for partition, row_indexes in self._target.partitioner.split(conformed_rows):
                self._add(
                    partition, conformed_rows if row_indexes is None else conformed_rows.take(pa.array(row_indexes))
                )
            if self._held_bytes > self._limits.buffered_bytes:
                self._make_room()

    def _add(self, partition: Partition, rows: pa.RecordBatch) -> None:
        key = repr(partition)
        buffer = self._buffers.setdefault(key, _PartitionBuffer(partition))
        self._held_bytes -= buffer.held_bytes
        buffer.batches.append(rows)
        buffer.batch_bytes += rows.nbytes
        self._held_bytes += buffer.held_bytes
        if self._should_flush(buffer):
            self._flush(key, buffer)

    def _make_room(self) -> None:
        """Flush the partitions with the largest buffers until at most half of the memory limit is used."""
        for key, buffer in sorted(self._buffers.items(), key=lambda item: item[1].held_bytes, reverse=True):
            if self._held_bytes <= self._limits.buffered_bytes // 2:
                return
            self._flush(key, buffer)

    def _should_flush(self, buffer: _PartitionBuffer) -> bool:
        """Return whether the buffered rows fill a row group, or the remaining part of the file.

        Before the compression ratio is known, the rows are assumed not to shrink. When they would fill the space, the
        ratio is measured, and the decision is made again.
        """
        room = self._file_bytes - buffer.written_bytes
        # If the table has an ordering, all rows of a file are sorted together.
        if self._target.ordering is None:
            room = min(room, self._row_group_bytes)
        if buffer.batch_bytes * (self._ratio or 1.0) < room:
            return False
        if self._ratio is None:
            self._ratio = self._measure_ratio(buffer.batches)
        return buffer.batch_bytes * self._ratio >= room

    def _measure_ratio(self, batches: Sequence[pa.RecordBatch]) -> float:
        """Return the ratio of bytes in files to bytes of Arrow data, measured by writing a sample to memory."""
        sample, size = [], 0
        for batch in batches:
            sample.append(batch)
            size += batch.nbytes
            if size >= _SAMPLE_BYTES:
                break
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, self._target.arrow, **build_writer_options(self._target.properties)) as writer:
            writer.write_table(_drop_origins(pa.Table.from_batches(sample), self._target))
        return max(_RATIO_MIN, float(sink.tell()) / max(1, size))

    def _flush(self, key: str, buffer: _PartitionBuffer) -> None:
        """Write the buffered rows to the partition's file.

        Close the file if it is full, or if the table has a sort order. If too many files are open, close the largest
        file first.
        """
        if not buffer.batches:
            return
        rows = pa.Table.from_batches(buffer.batches)
        self._held_bytes -= buffer.held_bytes
        buffer.batches, buffer.batch_bytes = [], 0
        if self._target.ordering is not None:
            rows = self._target.ordering.sort(rows)
        if buffer.file is None:
            if len(self._open_buffers) >= self._limits.open_files:
                self._close_file(*max(self._open_buffers.items(), key=lambda item: item[1].written_bytes))
            buffer.file = open_data_file_writer(
                self._target, self._target.generate_location(buffer.partition, suffix=self._suffix), self._protection
            )
            self._open_buffers[key] = buffer
        if self._origins is not None:
            self._origins.add(buffer.file.location, buffer.file.rows, rows.column(rows.num_columns - 1).to_numpy())
            rows = _drop_origins(rows, self._target)
        self._write(buffer, buffer.file, rows)
        if self._target.ordering is not None or buffer.written_bytes >= self._file_bytes:
            self._close_file(key, buffer)

    def _write(self, buffer: _PartitionBuffer, file: FileWriter, rows: pa.Table) -> None:
        """Write rows to the file of a partition, and keep their indexed columns until the file is closed.

        If the kept columns of all files exceed their limit, the columns of this file are dropped, and are read again
        from the finished file. `_ratio` is the size in the file divided by the size in memory, from the last large
        write.
        """
        size_before = file.size_bytes
        # All rows of a sorted file are written in one call, but its row groups have the usual size.
        groups = 1
        if self._ratio is not None:
            groups = max(1, round(rows.nbytes * self._ratio / self._row_group_bytes))
        step = max(1, -(-rows.num_rows // groups))
        for start in range(0, rows.num_rows, step):
            file.write(rows.slice(start, step))
        if rows.nbytes >= _SAMPLE_BYTES:
            self._ratio = (file.size_bytes - size_before) / rows.nbytes
        if buffer.indexed_columns is not None and self._field_positions:
            columns = {column_id: get_column_at(rows, path) for column_id, path in self._field_positions.items()}
            size = sum(column.nbytes for column in columns.values())
            buffer.indexed_columns.append(columns)
            buffer.indexed_bytes += size
            self._indexed_bytes += size
            if self._indexed_bytes > self._limits.index_bytes:
                self._indexed_bytes -= buffer.indexed_bytes
                buffer.indexed_columns, buffer.indexed_bytes = None, 0

    def _close_file(self, key: str, buffer: _PartitionBuffer) -> None:
        """Close the partition's file. Buffered rows are written to the next file."""
        assert buffer.file is not None
        file = finish_data_file(buffer.file, self._target, buffer.partition)
        self._files.append(file)
        del self._open_buffers[key]
        indexed_columns = buffer.indexed_columns
        self._indexed_bytes -= buffer.indexed_bytes
        buffer.file, buffer.indexed_columns, buffer.indexed_bytes = None, [], 0
        if not buffer.batches:
            del self._buffers[key]
        self._indexes.add(file, indexed_columns)

    def close_files(self) -> None:
        """Write the buffered rows, and close all files. Later rows are written to new files."""
        while self._buffers:
            key, buffer = next(iter(self._buffers.items()))
            self._flush(key, buffer)
            if key in self._open_buffers:
                self._close_file(key, buffer)

    def close(self) -> WrittenFiles:
        """Close all files, and return the written files."""
        self.close_files()
        index_files, skipped_indexes = self._indexes.close()
        return WrittenFiles(tuple(self._files), index_files, skipped_indexes)

    def abort(self) -> None:
        """Delete the written files, and ignore errors of the storage. The method never raises."""
        for buffer in self._open_buffers.values():
            if buffer.file is not None:
                buffer.file.abort()
        self._buffers.clear()
        self._open_buffers.clear()
        WrittenFiles(tuple(self._files), tuple(self._indexes.written)).discard(self._target.storage)


class IndexBuilder:
    """Builds the index files of a writer's data files: one for each definition, or several if there are many rows.

    If an index cannot be built, the write does not fail. The data file is reported as skipped, and no index covers it.
    """

    def __init__(self, tasks: Sequence[IndexTask]) -> None:
        self._tasks = tasks
        self._files: list[list[DataFile]] = [[] for _ in tasks]
        self._entries_by_index: list[list[Any]] = [[] for _ in tasks]
        self._skipped_indexes: list[tuple[str, str]] = []
        self.written: list[dict[str, Any]] = []

    def add(self, file: Mapping[str, Any], columns: Sequence[Mapping[int, pa.ChunkedArray]] | None) -> None:
        """Index a data file. If an index cannot be built for it, the file is left out of this index.

        Args:
            file: The ContentFile of the data file.
            columns: The columns of each row group of the file, by field id. If None, they are read from the file.
        """
        entry = DataFile(file["file-path"], file["file-size-in-bytes"], file["record-count"])
        for number, task in enumerate(self._tasks):
            try:
                if columns is None:
                    entry_result = build_entry_of_file(task, entry)
                else:
                    values_by_column = {
                        column_id: _concatenate([group[column_id] for group in columns])
                        for column_id in task.definition.column_ids
                    }
                    entry_result = build_entry(task.definition, values_by_column)
                self._entries_by_index[number].append(entry_result)
            except (Unreadable, ValueError, Corrupt) as error:
                self._skipped_indexes.append((entry.path, f"{task.definition.text}: {error}"))
                continue
            self._files[number].append(entry)
            if sum(data_file_entry.records for data_file_entry in self._files[number]) >= _INDEX_FILE_ROWS_MAX:
                self._write(number)

    def _write(self, number: int) -> None:
        written_index = write_index_file(self._tasks[number], self._files[number], self._entries_by_index[number])
        self._files[number], self._entries_by_index[number] = [], []
        if written_index.location is not None:
            self.written.append({"location": written_index.location, "size-in-bytes": written_index.size_bytes})

    def close(self) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[str, str], ...]]:
        for number in range(len(self._tasks)):
            self._write(number)
        return tuple(self.written), tuple(self._skipped_indexes)


def list_column_ids(task: IndexTask) -> frozenset[int]:
    return frozenset(task.definition.column_ids)


def _drop_origins(rows: pa.Table, target: WriteTarget) -> pa.Table:
    return rows.select(list(range(len(target.arrow))))


def _concatenate(groups: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    return pa.chunked_array([chunk for group in groups for chunk in group.chunks], groups[0].type)
