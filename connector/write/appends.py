"""Arrow batches → data files of a table, by partition, sorted, of the target size, with index files; and one commit.

`TableWriter` is plain Python over Arrow: whoever has batches can run it, a Spark task or this process. It holds rows
by partition until they fill a row group, within a bound for all together; what it has written is told when it is
closed. Nothing of it is visible before a commit names it: a writer that dies leaves files that nobody knows.

    append(client, "db.t", rows)                     rows are added
    overwrite(client, "db.t", rows, where="d = …")   what the filter holds goes, rows come in its place
    overwrite_partitions(client, "db.t", rows)       the partitions that rows are of go
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from seamark.connector.arrow.casting import Unwritable, conform
from seamark.connector.arrow.partitions import Partition, column_at, places_of
from seamark.connector.arrow.predicates import exactly
from seamark.connector.client.client import Name, SeamarkClient
from seamark.connector.client.commits import CommitClient, Producer, producer_named
from seamark.connector.client.errors import Refused
from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile, IndexTask, built, keys_of_file, keys_of_term, write_index_file
from seamark.connector.write.data_files import (
    ROW_GROUP_BYTES,
    ROW_GROUP_BYTES_DEFAULT,
    FileWriter,
    data_file,
    data_file_writer,
    writer_options,
)
from seamark.connector.write.target import WriteTarget, target_of
from seamark.metaserver.errors import Corrupt
from seamark.metaserver.iceberg.expressions.expression_json import expression_json
from seamark.metaserver.iceberg.files.parquet import Unreadable
from seamark.metaserver.iceberg.metadata.properties import as_int
from seamark.metaserver.iceberg.metadata.snapshot import MAIN
from seamark.metaserver.iceberg.metadata.table_json import decode_table
from seamark.metaserver.wire import INDEX_FILES_MAX

TARGET_BYTES = "write.target-file-size-bytes"
TARGET_BYTES_DEFAULT = 512 << 20
WRITE_ID = "write-id"
"""In a snapshot's summary: which attempt to write its files are of."""
_LIVE_ALREADY = "AlreadyExistsException"
"""A snapshot has one of the files."""
_SLICE_MIN_BYTES, _SLICE_MAX_BYTES = 64 << 10, 16 << 20
"""Of a batch, so much is taken at a time."""
_SAMPLE_BYTES = 4 << 20
_BATCH_BYTES = 4 << 10
"""What a batch takes beside its values."""
_INDEX_ROWS = 8_000_000
"""Of data files in one index file."""

Rows: TypeAlias = "pa.Table | pa.RecordBatch | pa.RecordBatchReader | Iterable[pa.RecordBatch | pa.Table] | Any"
"""Also whatever speaks Arrow's stream interface, as a Polars frame or a DuckDB relation does."""


@dataclass(frozen=True)
class WriteLimits:
    """Of one writer. `buffered_bytes` are of Arrow data, not yet in files; `open_files` are begun and not ended;
    `index_bytes` are of their indexed columns, of which some are read again where they have more."""

    buffered_bytes: int = 512 << 20
    open_files: int = 64
    index_bytes: int = 128 << 20


DEFAULT_LIMITS = WriteLimits()


@dataclass(frozen=True)
class WrittenFiles:
    """What a commit names: `files` are ContentFiles, `index_files` have `location` and `size-in-bytes`. `skipped`:
    (path, why) of data files that an index could not be built of on the way; an indexer will try again."""

    files: tuple[dict[str, Any], ...] = ()
    index_files: tuple[dict[str, Any], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> int:
        return sum(one["record-count"] for one in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(one["file-size-in-bytes"] for one in self.files)

    @staticmethod
    def joined(parts: Iterable[WrittenFiles]) -> WrittenFiles:
        """What several tasks have written, for one commit."""
        given = list(parts)
        return WrittenFiles(
            tuple(file for part in given for file in part.files),
            tuple(file for part in given for file in part.index_files),
            tuple(one for part in given for one in part.skipped),
        )

    def with_allowed_indexes(self, storage: Storage) -> WrittenFiles:
        """With no more index files than one commit may bring, as no index fails a write; the others are deleted, and
        an indexer will build them."""
        WrittenFiles(index_files=self.index_files[INDEX_FILES_MAX:]).discard(storage)
        return replace(self, index_files=self.index_files[:INDEX_FILES_MAX])

    def discard(self, storage: Storage) -> None:
        """Deletes all of it, as far as storage lets it: for files that no commit has named, nor ever will."""
        for location in [*(one["file-path"] for one in self.files), *(one["location"] for one in self.index_files)]:
            with suppress(OSError):
                storage.delete(location)


def write_batches(
    target: WriteTarget, batches: Iterable[pa.RecordBatch], *, limits: WriteLimits = DEFAULT_LIMITS
) -> WrittenFiles:
    """Data files of these rows, and index files, all durable. Whatever goes wrong, what was written is deleted.

    Unwritable where rows do not fit the table.
    """
    with TableWriter(target, limits) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.close()


@dataclass
class _Part:
    """One partition: rows that wait, and the file that is being written."""

    partition: Partition
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_bytes: int = 0
    file: FileWriter | None = None
    indexed: list[dict[int, pa.ChunkedArray]] | None = field(default_factory=list)
    """The indexed columns of each row group of the file; None where they are too many."""
    indexed_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Of memory, about: many small batches are more than their values."""
        return self.waiting_bytes + len(self.waiting) * _BATCH_BYTES

    @property
    def written_bytes(self) -> int:
        return self.file.size_bytes if self.file is not None else 0


class TableWriter:
    """Writes batches of any partitions in any order. Within `with`, an exception deletes what was written."""

    def __init__(self, target: WriteTarget, limits: WriteLimits = DEFAULT_LIMITS) -> None:
        self._target, self._limits = target, limits
        self._file_bytes = max(1, as_int(target.properties, TARGET_BYTES, TARGET_BYTES_DEFAULT))
        row_group = max(1, as_int(target.properties, ROW_GROUP_BYTES, ROW_GROUP_BYTES_DEFAULT))
        self._row_group_bytes = min(row_group, self._file_bytes)
        self._parts: dict[str, _Part] = {}
        """By the partition's text: 0.0 and -0.0 are two, and all NaN are one."""
        self._open: dict[str, _Part] = {}
        """Those that have a file."""
        self._held_bytes = self._indexed_bytes = 0
        self._ratio: float | None = None
        """Bytes in a file for each byte of Arrow data; None before it is known."""
        self._files: list[dict[str, Any]] = []
        self._indexes = _Indexes(target.indexes)
        places = {term.column_id for task in target.indexes for term in task.definition.terms}
        self._indexed = {one: places_of(one, target.schema) for one in places}

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()

    def write(self, batch: pa.RecordBatch) -> None:
        """Unwritable where rows do not fit the table."""
        if not batch.num_rows:
            return
        bytes_at_once = min(max(self._file_bytes // 4, _SLICE_MIN_BYTES), _SLICE_MAX_BYTES)
        rows = max(1, batch.num_rows * bytes_at_once // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, rows):
            part = conform(batch.slice(start, rows), self._target.schema, self._target.arrow)
            for partition, chosen in self._target.partitioner.split(part):
                self._add(partition, part if chosen is None else part.take(pa.array(chosen)))
            if self._held_bytes > self._limits.buffered_bytes:
                self._make_room()

    def _add(self, partition: Partition, rows: pa.RecordBatch) -> None:
        key = repr(partition)
        part = self._parts.setdefault(key, _Part(partition))
        self._held_bytes -= part.held_bytes
        part.waiting.append(rows)
        part.waiting_bytes += rows.nbytes
        self._held_bytes += part.held_bytes
        if self._is_due(part):
            self._flush(key, part)

    def _make_room(self) -> None:
        """Half of what is held goes into files, the partitions that hold most first."""
        for key, part in sorted(self._parts.items(), key=lambda one: one[1].held_bytes, reverse=True):
            if self._held_bytes <= self._limits.buffered_bytes // 2:
                return
            self._flush(key, part)

    def _is_due(self, part: _Part) -> bool:
        """Whether what waits fills a row group, or the rest of the file."""
        room = self._file_bytes - part.written_bytes
        if self._target.ordering is None:  # else the rows of a file are sorted together
            room = min(room, self._row_group_bytes)
        if part.waiting_bytes * (self._ratio or 1.0) < room:
            return False
        if self._ratio is None:
            self._ratio = self._measured(part.waiting)
        return part.waiting_bytes * self._ratio >= room

    def _measured(self, batches: Sequence[pa.RecordBatch]) -> float:
        """How much smaller rows are in a file, by writing some into memory."""
        sample, size = [], 0
        for batch in batches:
            sample.append(batch)
            size += batch.nbytes
            if size >= _SAMPLE_BYTES:
                break
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, self._target.arrow, **writer_options(self._target.properties)) as writer:
            writer.write_table(pa.Table.from_batches(sample))
        return max(0.001, float(sink.tell()) / max(1, size))

    def _flush(self, key: str, part: _Part) -> None:
        """What waits goes into the partition's file, which ends where it is full."""
        if not part.waiting:
            return
        rows = pa.Table.from_batches(part.waiting, self._target.arrow)
        self._held_bytes -= part.held_bytes
        part.waiting, part.waiting_bytes = [], 0
        if self._target.ordering is not None:
            rows = self._target.ordering.sorted(rows)
        if part.file is None:
            if len(self._open) >= self._limits.open_files:
                self._end(*max(self._open.items(), key=lambda one: one[1].written_bytes))
            part.file = data_file_writer(self._target, self._target.new_location(part.partition))
            self._open[key] = part
        self._write(part, part.file, rows)
        if self._target.ordering is not None or part.written_bytes >= self._file_bytes:
            self._end(key, part)

    def _write(self, part: _Part, file: FileWriter, rows: pa.Table) -> None:
        before = file.size_bytes
        # A sorted file comes at once, in row groups of the usual size.
        groups = 1
        if self._ratio is not None:
            groups = max(1, round(rows.nbytes * self._ratio / self._row_group_bytes))
        step = max(1, -(-rows.num_rows // groups))
        for start in range(0, rows.num_rows, step):
            file.write(rows.slice(start, step))
        if rows.nbytes >= _SAMPLE_BYTES:
            self._ratio = (file.size_bytes - before) / rows.nbytes
        if part.indexed is not None and self._indexed:
            columns = {one: column_at(rows, places) for one, places in self._indexed.items()}
            size = sum(column.nbytes for column in columns.values())
            part.indexed.append(columns)
            part.indexed_bytes += size
            self._indexed_bytes += size
            if self._indexed_bytes > self._limits.index_bytes:
                self._indexed_bytes -= part.indexed_bytes
                part.indexed, part.indexed_bytes = None, 0

    def _end(self, key: str, part: _Part) -> None:
        """The partition's file ends; what waits is of the next."""
        assert part.file is not None
        file = data_file(part.file, self._target, part.partition)
        self._files.append(file)
        del self._open[key]
        indexed = part.indexed
        self._indexed_bytes -= part.indexed_bytes
        part.file, part.indexed, part.indexed_bytes = None, [], 0
        if not part.waiting:
            del self._parts[key]
        self._indexes.add(file, indexed)

    def cut(self) -> None:
        """Ends all files: rows that come are of others."""
        while self._parts:
            key, part = next(iter(self._parts.items()))
            self._flush(key, part)
            if key in self._open:
                self._end(key, part)

    def close(self) -> WrittenFiles:
        """Ends all files; what was written."""
        self.cut()
        index_files, skipped = self._indexes.close()
        return WrittenFiles(tuple(self._files), index_files, skipped)

    def abort(self) -> None:
        """Deletes what was written, as far as storage lets it. Never raises."""
        for part in self._open.values():
            if part.file is not None:
                part.file.abort()
        self._parts.clear()
        self._open.clear()
        WrittenFiles(tuple(self._files), tuple(self._indexes.written)).discard(self._target.storage)


class _Indexes:
    """Index files of what a writer writes: one for each definition, or a few where there are many rows.

    An index that cannot be built fails no write: the file is told as skipped, and is without it for the time being.
    """

    def __init__(self, tasks: Sequence[IndexTask]) -> None:
        self._tasks = tasks
        self._files: list[list[DataFile]] = [[] for _ in tasks]
        self._builts: list[list[Any]] = [[] for _ in tasks]
        self._skipped: list[tuple[str, str]] = []
        self.written: list[dict[str, Any]] = []

    def add(self, file: Mapping[str, Any], columns: Sequence[Mapping[int, pa.ChunkedArray]] | None) -> None:
        """A data file; `columns` of its row groups, by id, or None where they are to be read from it."""
        described = DataFile(file["file-path"], file["file-size-in-bytes"], file["record-count"])
        for number, task in enumerate(self._tasks):
            try:
                if columns is None:
                    keys = keys_of_file(task, described)
                else:
                    keys = [
                        keys_of_term(term, _joined([group[term.column_id] for group in columns]))
                        for term in task.definition.terms
                    ]
                self._builts[number].append(built(task.definition, keys))
            except (Unreadable, ValueError, Corrupt) as error:
                self._skipped.append((described.path, f"{task.definition.text}: {error}"))
                continue
            self._files[number].append(described)
            if sum(one.records for one in self._files[number]) >= _INDEX_ROWS:
                self._write(number)

    def _write(self, number: int) -> None:
        written = write_index_file(self._tasks[number], self._files[number], self._builts[number])
        self._files[number], self._builts[number] = [], []
        if written.location is not None:
            self.written.append({"location": written.location, "size-in-bytes": written.size_bytes})

    def close(self) -> tuple[tuple[dict[str, Any], ...], tuple[tuple[str, str], ...]]:
        for number in range(len(self._tasks)):
            self._write(number)
        return tuple(self.written), tuple(self._skipped)


def _joined(groups: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    return pa.chunked_array([chunk for group in groups for chunk in group.chunks], groups[0].type)


# With a commit


@dataclass(frozen=True)
class Destination:
    """Where rows go, and what becomes of those that are there: the table as it stood when a write began.

    `target` is picklable, for whoever writes files; `change` is what the commit says besides those.
    """

    table: Name
    target: WriteTarget
    branch: str
    change: Mapping[str, Any]

    def commit(
        self,
        client: SeamarkClient,
        written: WrittenFiles,
        *,
        producer: Producer | None = None,
        summary: Mapping[str, str] | None = None,
    ) -> dict[str, Any] | None:
        """The commit's answer; None where there is nothing to do, nor a producer whose number is to be recorded. See
        `commit`."""
        named = producer_named(producer)
        is_empty = not written.files and "filter" not in self.change.get("replace", {})
        if is_empty and named is None:
            return None
        written = written.with_allowed_indexes(self.target.storage)
        change = {"operation": "append"} if is_empty else self.change
        body: dict[str, Any] = {**change, "branch": self.branch, "summary": dict(summary or {})}
        body |= {"table-uuid": self.target.table_uuid or None, "add": list(written.files)}
        body |= {"index-files": list(written.index_files)}
        if named is not None:
            body["producer"] = named
        return commit(client, self.table, body, partial(written.discard, self.target.storage))


APPEND, OVERWRITE, OVERWRITE_PARTITIONS = "append", "overwrite", "overwrite_partitions"
WRITE_MODES = (APPEND, OVERWRITE, OVERWRITE_PARTITIONS)


def destination(
    client: SeamarkClient,
    table: Name,
    mode: str = APPEND,
    *,
    where: str | Mapping[str, Any] | bool = True,
    branch: str = MAIN,
) -> Destination:
    """Of a write by `append`, `overwrite` (of what `where` holds) or `overwrite_partitions`.

    ValueError for another mode; Unwritable for a table of a version that has no such mode; BadRequest for a predicate
    that no expression says exactly.
    """
    if mode not in WRITE_MODES:
        raise ValueError(f"there is no mode {mode!r}: there are {', '.join(WRITE_MODES)}")
    loaded = client.load_table(table)
    metadata = decode_table(loaded.metadata, loaded.location)
    change: dict[str, Any] = {"operation": "append"}
    if mode != APPEND and metadata.format_version == 1:
        raise Unwritable("A table of version 1 takes appends only, no overwrites; upgrade it to version 2 or later")
    if mode != APPEND:
        head = metadata.refs.get(branch)
        if isinstance(where, str):
            where = expression_json(exactly(where, metadata.current_schema))
        change = {"replace": {"filter": where} if mode == OVERWRITE else {"partitions": "written"}}
        change["schema-id"] = metadata.current_schema_id
        change["read-snapshot-id"] = None if head is None else head.snapshot_id
    return Destination(table, target_of(metadata, Storage(loaded.storage)), branch, change)


def append(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Adds rows, with one commit, whose answer it is (docs/reference/openapi.json); None where there are no rows and no
    producer.

    `producer` is an id and a sequence number: what was committed under them before is not committed again, and without
    rows the number is recorded by a snapshot that changes nothing. Unwritable
    where rows do not fit the table. Whatever goes wrong, nothing is visible; where the commit's outcome is not known
    (Unreachable, ServerFailed), files stay, as they may be visible.
    """
    return _written(client, rows, destination(client, table, branch=branch), producer, summary)


def overwrite(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    where: str | Mapping[str, Any] | bool = True,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Puts rows in the place of those that a predicate holds, in SQL or as an Iceberg expression in JSON; of all by
    default. BadRequest where the predicate holds only some rows of a file. Otherwise as `append`."""
    return _written(client, rows, destination(client, table, OVERWRITE, where=where, branch=branch), producer, summary)


def overwrite_partitions(
    client: SeamarkClient,
    table: Name,
    rows: Rows,
    *,
    branch: str = MAIN,
    producer: Producer | None = None,
    summary: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Puts rows in the place of all rows of the partitions that they are of. Otherwise as `append`."""
    return _written(client, rows, destination(client, table, OVERWRITE_PARTITIONS, branch=branch), producer, summary)


def _written(
    client: SeamarkClient,
    rows: Rows,
    into: Destination,
    producer: Producer | None,
    summary: Mapping[str, str] | None,
) -> dict[str, Any] | None:
    producer_named(producer)
    written = write_batches(into.target, batches_of(rows))
    return into.commit(client, written, producer=producer, summary=summary)


def commit(client: SeamarkClient, table: Name, body: dict[str, Any], discard: Callable[[], None]) -> dict[str, Any]:
    """The commit's answer. What was written is discarded where it certainly is in no snapshot, nor ever will be.

    That is when the change was sent once and refused, for another reason than that a snapshot has one of its files; or
    when the snapshot that its producer committed before is another write's. A mark in the snapshot's summary tells: an
    answer of "committed before" may be about this very change, whose first answer was lost.
    """
    mark = str(uuid.uuid4())
    body = {**body, "summary": {**body.get("summary", {}), WRITE_ID: mark}}
    try:
        answer = CommitClient(client).commit(table, body)
    except Refused as error:
        if not error.left_open and error.kind != _LIVE_ALREADY:
            discard()
        raise
    if answer["duplicate"] and (answer["summary"] or {}).get(WRITE_ID, mark) != mark:
        discard()
    return answer


def batches_of(rows: Rows) -> Iterator[pa.RecordBatch]:
    """Whatever rows are given as. Unwritable for what are none."""
    if isinstance(rows, pa.RecordBatch):
        yield rows
    elif isinstance(rows, pa.Table):
        yield from rows.to_batches()
    elif isinstance(rows, pa.RecordBatchReader):
        yield from rows
    elif hasattr(rows, "__arrow_c_stream__"):
        yield from pa.RecordBatchReader.from_stream(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        for one in rows:
            yield from batches_of(one)
    else:
        raise Unwritable(f"rows are Arrow tables or batches, or a stream of them, not {type(rows).__name__}")
