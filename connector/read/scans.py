"""Reads the tasks of a plan as Arrow record batches.

    for batch in scan(client, "db.events", ["id", "ts"], where="country = 'FR' AND ts >= '2026-01-01'"):
        ...

A scan returns the same rows as any other reader of the table. If this is impossible, it raises Unreadable with the path
of the file. Columns are projected to the schema by field id (`parquet/projection.py`), the filter is evaluated on each
row (`formats/iceberg/expressions/arrow_filters.py`), and deletes of all kinds are applied (`deleted_rows.py`).

Row groups are skipped if bitmap indexes, deletes or the footer's statistics leave no row in them. In other row groups,
the columns of the filter and of equality deletes are read first. The other columns are read only if rows remain. If few
rows remain, only the pages that contain these rows are read (`parquet/pages.py`). A scan holds one batch in memory, and
the filter's columns for the matching rows of one row group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pyroaring

from seamark.connector.arrow.arrays import Longs
from seamark.connector.arrow.predicates import bind_exactly
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import CURRENT, At
from seamark.connector.parquet.copy.protection import SourceCheck, check_deletes
from seamark.connector.parquet.copy.source import FOOTER_BYTES_MAX, SourceFile
from seamark.connector.parquet.encryption.keys import ParquetKeys
from seamark.connector.parquet.pages import Pages
from seamark.connector.read.deleted_rows import Deletes
from seamark.connector.read.file_rows import FileRowReader, find_spec, read_partition
from seamark.connector.read.read_plan import BATCH_ROWS, ReadCounts, ReadPlan, plan_read
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan, restrict_to_rows
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Expression
from seamark.formats.iceberg.expressions.residuals import Residuals
from seamark.formats.iceberg.files.footer import END_BYTES
from seamark.formats.iceberg.files.parquet import AmbiguousColumn, UnfitColumn, Unreadable
from seamark.formats.iceberg.files.parquet_reading import check_plain, read_plain_metadata
from seamark.formats.iceberg.metadata.name_mapping import NAME_MAPPING, parse_name_mapping

_HOLE_BYTES_MAX, _HOLE_BYTES_MAX_REMOTE = 16 << 10, 1 << 20
"""The maximum gap between pages that are read in one request, for local and remote files.

Reading a gap of this size takes about as long as another request.
"""


_SMALL_BATCH_ROWS = BATCH_ROWS // 2
"""Batches with fewer rows are concatenated."""
_WHOLE_FILE_BYTES_MAX, _WHOLE_FILE_BYTES_MAX_REMOTE = 256 << 10, 1 << 20
"""The maximum size of a file that is read at once, for local and remote files.

For a small file, several requests would take longer.
"""


def bind_filter(where: str | Any | None, table: OpenTable) -> Expression:
    """Return a filter that is bound to the table's schema, or TRUE if there is no filter.

    Args:
        where: SQL text, Iceberg expression JSON, or None.

    Raises:
        InvalidRequest: `bind_exactly` refuses the filter.
    """
    return TRUE if where is None else bind_exactly(where, table.schema)


class TableScan:
    """A lazy scan of a table. Iterate over its batches, or use `reader()` or `to_arrow()`."""

    def __init__(
        self,
        storage: Storage,
        read_plan: ReadPlan,
        tasks: Callable[[], Iterator[ScanTask]],
        limit: int | None,
        snapshot_id: int | None = None,
        keys: ParquetKeys | None = None,
    ) -> None:
        """Create a scan.

        Args:
            storage: The storage of the table.
            read_plan: The columns and the filter.
            tasks: Plans the scan, and returns its tasks. It is called for each iteration.
            limit: The maximum number of rows, or None.
            snapshot_id: The snapshot that is read.
            keys: The keys of encrypted files. If it is None, encrypted files are refused.
        """
        self.schema: pa.Schema = read_plan.arrow
        self.snapshot_id = snapshot_id
        """The snapshot that is read, or None for a table without snapshots."""
        self.counts = ReadCounts()
        self._storage, self._read_plan, self._tasks, self._limit = storage, read_plan, tasks, limit
        self._keys = keys

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        reader = TaskReader(self._read_plan, self._storage, counts=self.counts, keys=self._keys, is_private=True)
        return limit_batches(reader.read_all(self._tasks()), self._limit)

    def reader(self) -> pa.RecordBatchReader:
        """Return a reader of the batches for Arrow libraries."""
        return pa.RecordBatchReader.from_batches(self.schema, iter(self))

    def to_arrow(self) -> pa.Table:
        """Read all rows into a table in memory."""
        return pa.Table.from_batches(list(self), self.schema)


def scan(
    client: SeamarkClient,
    table: Name,
    columns: Sequence[str] | None = None,
    where: str | Any | None = None,
    *,
    at: At = CURRENT,
    limit: int | None = None,
    bitmaps: bool = True,
    keys: ParquetKeys | None = None,
    after: str = "",
) -> TableScan:
    """Return a scan of the rows for which a predicate is true. It returns at most `limit` rows.

    The scan of a stream table includes rows that are not flushed yet, unless `at` selects a snapshot.

    The server plans the scan with its indexes. If the table has a bitmap index on a column of the predicate, the server
    also selects rows, unless `bitmaps` is False.

    Args:
        where: The predicate, as SQL or as the JSON of an Iceberg expression.
        keys: The keys of encrypted Parquet files, for example from `read_environment_keys()`. If None, reading an
            encrypted file raises Unreadable.
        after: Tokens of rows that the scan has to include (`StreamTableWriter.token`), unless `at` selects a snapshot.
            If the server does not have them in time, the scan raises Unavailable.

    Raises:
        InvalidRequest: A column cannot be read, or the predicate cannot be evaluated exactly.
    """
    if at == CURRENT:
        client = client.with_fresh_rows(after)
    source_table = open_table(client, table, at)
    bound = bind_filter(where, source_table)
    read_plan = plan_read(source_table, columns, bound)

    def tasks() -> Iterator[ScanTask]:
        tasks_of_plan = plan(client, source_table, bound, least_rows=limit, columns=read_plan.names)
        return restrict_to_rows(client, source_table, bound, tasks_of_plan) if bitmaps else tasks_of_plan

    return TableScan(source_table.storage, read_plan, tasks, limit, source_table.snapshot_id, keys)


def limit_batches(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Yield the first `limit` rows, and do not request further batches."""
    rows_left = limit
    while rows_left is None or rows_left > 0:
        batch = next(batches, None)
        if batch is None:
            return
        yield batch if rows_left is None else batch.slice(0, rows_left)
        rows_left = None if rows_left is None else rows_left - batch.num_rows


class TaskReader:
    """Reads the tasks of one table, one after the other.

    If several tasks have the same delete file, its content is cached.
    """

    def __init__(
        self,
        read_plan: ReadPlan,
        storage: Storage,
        *,
        counts: ReadCounts | None = None,
        threads: bool = True,
        keys: ParquetKeys | None = None,
        is_private: bool = False,
        check: SourceCheck | None = None,
    ) -> None:
        """Create a reader.

        Args:
            threads: Whether to decode columns concurrently.
            keys: The keys of encrypted files. If None, encrypted files are refused.
            is_private: Whether only the owner of the keys receives the rows. If not, equality deletes by encrypted
                columns are refused.
            check: A function that is called for each file that is opened with keys.
        """
        self._decryption = None if keys is None else keys.make_decryption_properties()
        self._keys, self._is_private, self._check = keys, is_private, check
        self.counts = counts or ReadCounts()
        self._read_plan, self._storage, self._threads = read_plan, storage, threads
        self._deletes = Deletes(storage, read_plan.metadata)
        self._residuals: dict[int, Residuals] = {}
        text = read_plan.metadata.properties.get(NAME_MAPPING)
        self._mapping = None if text is None else parse_name_mapping(text)

    def read_all(self, tasks: Iterable[ScanTask]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the tasks one after the other, as `read` does."""
        for task in tasks:
            yield from self.read(task)

    def read(self, task: ScanTask, positions: Longs | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one task with the schema `ReadPlan.arrow`.

        Args:
            task: The task.
            positions: The ascending positions of the rows to read, as int64[], or None for all rows.

        Raises:
            Unreadable: The file cannot be read.
        """
        with _add_path_to_errors(task.path):
            residual = self._compute_residual(task)
        selected_positions = _decode_positions(task) if positions is None else positions
        if residual == FALSE or (selected_positions is not None and not len(selected_positions)):
            return
        # The messages of Arrow may quote values of an encrypted file.
        hides_details = self._keys is not None and not self._is_private
        with (
            _add_path_to_errors(task.path, hides_details=hides_details),
            _open_file(task, self._storage, self._decryption, self._check_source) as (file, pages, open_with_codes),
        ):
            self.counts.files += 1
            rows = FileRowReader(
                self._read_plan,
                task,
                residual,
                file,
                pages,
                open_with_codes,
                self._mapping,
                self._deletes,
                self._threads,
            )
            for batch in join_small_batches(rows.read_batches(selected_positions, self.counts)):
                self.counts.rows += batch.num_rows
                yield batch

    def _check_source(self, task: ScanTask, source: pa.NativeFile) -> None:
        """Check that the user of this reader may read the rows of the file.

        There are two checks of encrypted tables. If other users may receive the rows, equality deletes must not compare
        encrypted columns. If the reader was created with another check, it is called with the file.

        Raises:
            Unreadable: The user may not read the rows.
        """
        if self._keys is None or (self._is_private and self._check is None):
            return
        with SourceFile(task.path, source, keys=self._keys) as source_file:
            if not self._is_private:
                for deletes in (task.deletes, task.removed_by or ()):
                    check_deletes(source_file, self._deletes.load(task.path, deletes).column_ids)
            if self._check is not None:
                self._check(task.path, source_file)

    def _compute_residual(self, task: ScanTask) -> Expression:
        """Return the residual of the filter for the file's partition.

        The residuals of the server's plan are not used, because they contain column names, which may belong to a
        different schema.
        """
        read_plan, spec_id = self._read_plan, task.spec_id
        if task.exact or read_plan.where == TRUE:
            return TRUE
        if spec_id not in self._residuals:
            self._residuals[spec_id] = Residuals(read_plan.where, find_spec(read_plan.metadata, task))
        return self._residuals[spec_id](read_partition(read_plan, task))


def _decode_positions(task: ScanTask) -> Longs | None:
    if task.rows is None:
        return None
    return np.asarray(pyroaring.BitMap.deserialize(task.rows).to_array(), dtype=np.uint32).astype(np.int64)


@contextmanager
def _open_file(
    task: ScanTask, storage: Storage, decryption: Any, check: Callable[[ScanTask, pa.NativeFile], None]
) -> Iterator[tuple[pq.ParquetFile, Pages, Callable[[Sequence[str]], pq.ParquetFile]]]:
    """Yield the open file, its pages, and a function that opens it again.

    The function receives the names of string columns, which are then read as dictionary codes. Needed pages are read in
    one request if the gap between them has at most `hole_bytes` bytes.

    Args:
        task: The data file.
        storage: The storage of the table.
        decryption: The decryption properties of pyarrow, or None.
        check: A function that is called before any row is decoded.
    """
    kind = str(task.file.get("file-format", "")).lower()
    if kind != "parquet":
        raise Unreadable(task.path, f"data files of format {kind!r} are not supported; Seamark reads Parquet files")
    if task.file.get("key-metadata"):
        raise Unreadable(task.path, "the file is encrypted by Iceberg's table encryption, which is not supported")
    is_local = storage.is_local(task.path)
    with (
        _buffer_if_small(
            storage.open_input_file(task.path), _WHOLE_FILE_BYTES_MAX if is_local else _WHOLE_FILE_BYTES_MAX_REMOTE
        ) as source,
        ExitStack() as stack,
    ):

        def open_parquet(metadata: pq.FileMetaData | None, coded_names: Sequence[str] = ()) -> pq.ParquetFile:
            return stack.enter_context(
                pq.ParquetFile(
                    source,
                    metadata=metadata,
                    pre_buffer=not isinstance(source, pa.BufferReader),
                    coerce_int96_timestamp_unit="us",
                    decryption_properties=decryption,
                    read_dictionary=list(coded_names),
                )
            )

        checked_footer = b"" if decryption is None else _read_footer(source)
        check(task, source)
        metadata = _read_plain_metadata(source, task.path) if decryption is None else None
        file = open_parquet(metadata)
        if checked_footer and _read_footer(source) != checked_footer:
            raise Unreadable(task.path, "the file was replaced while it was read")
        if file.metadata.num_rows != task.records:
            raise Unreadable(
                task.path, f"the file has {file.metadata.num_rows} rows; the manifest entry says {task.records}"
            )
        hole_bytes = _HOLE_BYTES_MAX if is_local else _HOLE_BYTES_MAX_REMOTE
        pages = Pages(source, file, hole_bytes=hole_bytes, encrypted=decryption is not None)
        yield file, pages, partial(open_parquet, metadata)


def _read_footer(source: pa.NativeFile) -> bytes:
    """Return the bytes from the start of the footer to the end of the file.

    The file states the length of its footer.
    """
    size = source.size()
    end = bytes(source.read_at(min(END_BYTES, size), max(0, size - END_BYTES)))
    # The end of the file is the length of the footer, in 4 bytes, and the magic number.
    length = min(int.from_bytes(end[:4], "little"), FOOTER_BYTES_MAX, size - len(end))
    return bytes(source.read_at(length, size - len(end) - length)) + end


def _read_plain_metadata(source: pa.NativeFile, path: str) -> pq.FileMetaData | None:
    """Check that a file is not encrypted. Return its footer, or None if pyarrow may decode the footer itself."""
    if isinstance(source, pa.BufferReader):
        check_plain(source, path)
        return None
    return read_plain_metadata(source, path)


@contextmanager
def _buffer_if_small(source: pa.NativeFile, max_bytes: int) -> Iterator[pa.NativeFile]:
    """Yield the file. A file of at most `max_bytes` is first read into memory."""
    with source:
        size = source.size()
        yield pa.BufferReader(source.read_at(size, 0)) if size <= max_bytes else source


@contextmanager
def _add_path_to_errors(path: str, *, hides_details: bool = False) -> Iterator[None]:
    """Convert errors of the block to Unreadable with the path of the file.

    Args:
        hides_details: Whether the rows may come from an encrypted file. The messages of Arrow's errors are then left
            out, because they may quote values.
    """
    try:
        yield
    except AmbiguousColumn as error:
        raise UnfitColumn(path, str(error)) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if hides_details:
            raise Unreadable(path, f"the file cannot be read: {type(error).__name__}") from None
        raise Unreadable(path, f"the file cannot be read: {(str(error).splitlines() or [''])[0][:200]}") from error


def join_small_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Concatenate small batches, which selective filters and small files produce."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not pending and batch.num_rows >= _SMALL_BATCH_ROWS:
            yield batch
            continue
        pending.append(batch)
        rows += batch.num_rows
        if rows >= _SMALL_BATCH_ROWS:
            yield pa.concat_batches(pending)
            pending, rows = [], 0
    if pending:
        yield pa.concat_batches(pending)
