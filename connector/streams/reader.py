"""Reads a table continuously: first the rows of files, then the rows of the log as they arrive. Each row is read once.

    for batch in read_stream(client, "db.t", from_="earliest"):
        handle(batch.rows)
        save(batch.position)            # a later read_stream(…, from_=position) continues after these rows

The server decides what follows a position: rows of the log, which it returns, or the files of a snapshot, which this
module reads. Files are read in the order of their paths, so a position within a snapshot is a path and a number of
rows. Only one response of the server or one batch of a file is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa

from seamark.connector.client.client import ARROW_STREAM, SeamarkClient
from seamark.connector.client.errors import InvalidRequest, ServerFailed
from seamark.connector.client.names import Name, make_table_path
from seamark.connector.client.values import CURRENT
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TaskReader
from seamark.connector.read.tables import OpenTable, ScanTask, open_table, plan, plan_appends
from seamark.formats.iceberg.expressions.expression import TRUE

EARLIEST, LATEST = "earliest", "latest"
CHANGE_TYPE = "_change_type"
WAIT_S = 20.0
"""The maximum time in seconds for which one request waits for rows."""
_RESPONSE_S = 60.0
"""The timeout in seconds of a response after the time for which the server waits for rows."""
_LIMIT_BYTES = 4 << 20
_PROGRESS = "~"
"""The separator between the server's position and the progress within the files of a snapshot."""


class StreamBatch(NamedTuple):
    """Rows of a continuous read, and the position after them."""

    rows: pa.RecordBatch
    position: str


class FileStep(NamedTuple):
    """The files that a reader reads next.

    Attributes:
        snapshot_id: The snapshot.
        start_id: The snapshot after which the files were added, or None for all files. It is not used with `is_scan`.
        is_scan: Whether all rows of the snapshot are read.
    """

    snapshot_id: int
    start_id: int | None
    is_scan: bool


class StreamStep(NamedTuple):
    """A response of the server: the files or rows that follow a position.

    Attributes:
        position: The position after these files or rows.
        files: The files to read, or None if the response has rows of the log.
        rows: The rows of the log. Their schema has the field ids of the table.
        is_end: Whether no files or rows follow at present, or the position at which the read ends has been reached.
    """

    position: str
    files: FileStep | None
    rows: pa.Table
    is_end: bool


class StreamReads:
    """Requests the rows of one table after a position. Instances can be pickled."""

    def __init__(self, client: SeamarkClient, table: Name, *, changes: bool, skip_changes: bool) -> None:
        """Create a reader of a table.

        Args:
            client: The client.
            table: The table.
            changes: Whether the rows have a column with the kind of change (insert, update or delete).
            skip_changes: Whether snapshots that have removed or replaced rows are skipped instead of causing an error.
        """
        self.client, self.table, self.changes = client, table, changes
        self._query = {"changes": _format_flag(changes), "skip-changes": _format_flag(skip_changes)}

    def locate(self, at: str) -> str:
        """Return the position at `earliest`, `latest`, `snapshot:ID` or `time:MS`."""
        answer = self.client._request_json("GET", f"{make_table_path(self.table)}/stream/position", {"at": at})
        return str(answer["position"])

    def find_start(self, from_: str | int | datetime) -> str:
        """Return the server's position for a start.

        Args:
            from_: A start as for `read_stream`, except a position within the files of a snapshot.

        Raises:
            InvalidRequest: The start is a position within the files of a snapshot, which the server cannot continue.
        """
        position, progress = _parse_start(self, from_)
        if progress is not None:
            raise InvalidRequest("The position is within the files of a snapshot; only read_stream can continue there")
        return position

    def read_step(
        self, after: str, *, until: str | None = None, wait_s: float = 0.0, limit_bytes: int = _LIMIT_BYTES
    ) -> StreamStep:
        """Request the files or rows after a position.

        Args:
            after: A position that the server has returned. The positions of batches within files are not accepted,
                because they also contain the progress of the reader within these files.
            until: The position at which the read ends, or None.
            wait_s: The maximum time in seconds for which the server waits for rows.
            limit_bytes: The maximum number of bytes of rows. With 0, only the position after the rows is returned.

        Raises:
            InvalidRequest: A snapshot after the position has removed rows.
            NoSuchResource: Rows after the position are no longer in the log.
            ServerFailed: The response does not state a position or its kind.
        """
        query = {**self._query, "after": after, "wait": f"{wait_s:.3f}", "limit-bytes": str(limit_bytes)}
        query |= {} if until is None else {"until": until}
        path = f"{make_table_path(self.table)}/rows"
        body = self.client._request("GET", path, query, accept=ARROW_STREAM, timeout_s=wait_s + _RESPONSE_S)
        rows = self.client._decode_table(body)
        metadata = {name.decode(): value.decode() for name, value in (rows.schema.metadata or {}).items()}
        try:
            files = None
            if metadata["step"] == "files":
                start = metadata.get("start-snapshot-id")
                files = FileStep(int(metadata["snapshot-id"]), int(start or 0) or None, start is None)
            return StreamStep(metadata["position"], files, rows, metadata["step"] == "end")
        except (KeyError, ValueError) as error:
            raise ServerFailed(f"The answer with rows has no valid {error}") from None


def read_stream(
    client: SeamarkClient,
    table: Name,
    *,
    from_: str | int | datetime = EARLIEST,
    columns: Sequence[str] | None = None,
    changes: bool = False,
    skip_changes: bool = False,
    follow: bool = True,
) -> Iterator[StreamBatch]:
    """Yield the rows of a table, and then its new rows as writers add them.

    Args:
        client: The client.
        table: Any table. Rows of a stream table are read before their flush.
        from_: The start: "earliest" (the present rows first), "latest" (only later rows), the id of a snapshot
            (the rows after it), a time (the rows that the server received at or after it), or the position of a batch.
        columns: The columns to read, or None for all.
        changes: Whether the batches have the column `_change_type`, with `insert`, `update` or `delete`. If False, a
            stream with updates or deletes is refused.
        skip_changes: Whether to skip snapshots that have removed or replaced rows. If False, they cause an error.
        follow: Whether to wait for new rows. If False, the read ends after the present rows.

    Raises:
        InvalidRequest: A snapshot has removed rows, or `from_` is not in the table's history.
        NoSuchResource: The table does not exist, or rows after the position are no longer in the log.
    """
    reads = StreamReads(client, table, changes=changes, skip_changes=skip_changes)
    for batch in iterate(reads, from_, columns=columns, wait_s=WAIT_S if follow else 0.0):
        if batch is not None:
            yield batch
        elif not follow:
            return


def iterate(
    reads: StreamReads, from_: str | int | datetime, *, columns: Sequence[str] | None, wait_s: float
) -> Iterator[StreamBatch | None]:
    """Yield batches without end. Yield None each time when there are no more rows at present.

    After the first None, each request waits for rows.

    Args:
        reads: The requests for the rows of a table.
        from_: The start, as for `read_stream`.
        columns: The columns to read, or None for all.
        wait_s: The maximum time in seconds to wait for rows before each further None.

    Raises:
        InvalidRequest: The start is not a valid position, or is in files that are not the next files to read.
    """
    position, progress = _parse_start(reads, from_)
    projection = _RowProjection(reads, columns)
    has_read_present_rows = False
    while True:
        step = reads.read_step(position, wait_s=wait_s if has_read_present_rows else 0.0)
        if step.files is not None:
            # The last batch of the files has the server's position. Therefore a batch is yielded after the next batch
            # has been read.
            waiting: tuple[pa.RecordBatch, _Progress] | None = None
            for batch_with_progress in projection.read_files(step.files, progress):
                if waiting is not None:
                    batch, batch_progress = waiting
                    yield StreamBatch(batch, f"{position}{_PROGRESS}{batch_progress}")
                waiting = batch_with_progress
            if waiting is not None:
                yield StreamBatch(waiting[0], step.position)
        elif progress is not None:
            raise InvalidRequest(
                "The position is within files that are not the next files to read; begin at earliest, latest or a time"
            )
        elif step.rows.num_rows:
            yield StreamBatch(projection.project(step.rows), step.position)
        elif step.is_end:
            has_read_present_rows = True
            yield None
        position, progress = step.position, None


class _Progress(NamedTuple):
    """The progress in the files of a snapshot: the files before `path` and `rows` rows of `path` have been read."""

    snapshot_id: int
    path: str
    rows: int

    def __str__(self) -> str:
        return f"{self.snapshot_id}{_PROGRESS}{quote(self.path, safe='')}{_PROGRESS}{self.rows}"


def _parse_start(reads: StreamReads, from_: str | int | datetime) -> tuple[str, _Progress | None]:
    """Return the server's position for a start, and the progress within the files that follow this position.

    A position of a batch within files consists of the server's position and the three values of `_Progress`. Other
    starts have no progress.

    Raises:
        InvalidRequest: The start is not a position that `read_stream` has returned.
    """
    if isinstance(from_, datetime):
        return reads.locate(f"time:{int(from_.timestamp() * 1000)}"), None
    if isinstance(from_, int) or from_.isdecimal():
        return reads.locate(f"snapshot:{from_}"), None
    if from_ in (EARLIEST, LATEST) or from_.startswith(("snapshot:", "time:")):
        return reads.locate(from_), None
    position, *progress = from_.split(_PROGRESS)
    if not progress:
        return position, None
    try:
        snapshot, path, rows = progress
        return position, _Progress(int(snapshot), unquote(path), int(rows))
    except ValueError:
        raise InvalidRequest(f"{from_[:100]!r} is not a position that read_stream has returned") from None


class _RowProjection:
    """Reads rows with the columns of the batches. The schema is updated when the table's schema changes."""

    def __init__(self, reads: StreamReads, columns: Sequence[str] | None) -> None:
        self._reads = reads
        self._columns = columns
        self._changes = reads.changes

    def read_files(self, step: FileStep, progress: _Progress | None) -> Iterator[tuple[pa.RecordBatch, _Progress]]:
        """Yield batches of the rows of files, each with the progress after it.

        Files are read in the order of their paths. Files before the path of `progress`, and the first rows of the file
        with this path, were read before and are skipped.

        Raises:
            InvalidRequest: The progress is in the files of another snapshot.
        """
        if progress is not None and progress.snapshot_id != step.snapshot_id:
            raise InvalidRequest(
                f"The position is within snapshot {progress.snapshot_id}, and snapshot {step.snapshot_id} follows it: "
                "the table was rolled back. Begin at earliest, latest or a snapshot"
            )
        table, tasks = plan_step(self._reads, step)
        reader = TaskReader(plan_read(table, self._columns, TRUE), table.storage)
        for task in tasks:
            if progress is not None and task.path < progress.path:
                continue
            skipped_rows = progress.rows if progress is not None and task.path == progress.path else 0
            read_rows = skipped_rows
            for batch in skip_rows(reader.read(task), skipped_rows):
                read_rows += batch.num_rows
                yield self._add_kind(batch), _Progress(step.snapshot_id, task.path, read_rows)

    def project(self, rows: pa.Table) -> pa.RecordBatch:
        """Return rows of the log with the columns of the batches, and without the metadata of the log's schema.

        Raises:
            InvalidRequest: The rows do not have a requested column.
        """
        if self._columns is not None:
            names = [*self._columns, *((CHANGE_TYPE,) if self._changes else ())]
            unknown = [name for name in names if name not in rows.schema.names]
            if unknown:
                raise InvalidRequest(f"Cannot read {unknown[0]!r}: the columns are {', '.join(rows.schema.names)}")
            rows = rows.select(names)
        plain_schema = pa.schema([field.remove_metadata() for field in rows.schema])
        batch = pa.concat_batches(rows.to_batches())
        return pa.RecordBatch.from_arrays(batch.columns, schema=plain_schema)

    def _add_kind(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._changes:
            return batch
        return batch.append_column(CHANGE_TYPE, pa.array(["insert"] * batch.num_rows, pa.string()))


def plan_step(reads: StreamReads, step: FileStep) -> tuple[OpenTable, list[ScanTask]]:
    """Return the table at the snapshot of a step, with the current schema, and the step's files ordered by path."""
    source_table = open_table(reads.client, reads.table, CURRENT)
    table = replace(source_table, snapshot_id=step.snapshot_id)
    if step.is_scan:
        tasks = plan(reads.client, table, columns=[field.name for field in table.schema.fields])
    else:
        tasks = plan_appends(reads.client, table, step.start_id, step.snapshot_id)
    return table, sorted(tasks, key=lambda task: task.path)


def skip_rows(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the batches without their first `rows` rows."""
    remaining_rows = rows
    for batch in batches:
        if batch.num_rows > remaining_rows:
            yield batch.slice(remaining_rows)
        remaining_rows = max(0, remaining_rows - batch.num_rows)


def _format_flag(flag: bool) -> str:
    return "true" if flag else "false"
