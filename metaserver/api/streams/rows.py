"""Serves appends to a stream table, its state and its flushes. An append is answered when its rows are durable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.protocol.wire import check_changeable, format_path
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.api.http.describe import BodySize, Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.plans.planning import POINTERS
from seamark.metaserver.api.streams.column_additions import add_columns, widen_target
from seamark.metaserver.api.streams.row_appends import (
    PRODUCER_PARAMETERS,
    UNKNOWN_OUTCOME,
    AppendedRows,
    RowTarget,
    append_joined,
    append_prepared,
    load_target,
    read_producer,
)
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.store.model import TABLE, Entry
from seamark.metaserver.streams.incoming.arrow_body import read_stream
from seamark.metaserver.streams.incoming.joined_appends import can_join
from seamark.metaserver.streams.incoming.new_columns import NO_COLUMNS, MissingColumns, find_missing_columns
from seamark.metaserver.streams.incoming.prepared_rows import JoinedRows, PreparedRows, RowPreparation
from seamark.metaserver.streams.incoming.rows import RowFormat, decode_rows, parse_format, split_lines
from seamark.metaserver.streams.incoming.sizes import check_columns, check_size
from seamark.metaserver.streams.pauses import read_pause
from seamark.metaserver.streams.stream_counts import FlushReport
from seamark.metaserver.streams.stream_table import StreamTable

_PARAMETERS = (
    *PRODUCER_PARAMETERS,
    Parameter(
        "envelope",
        "query",
        "The form of the rows. `debezium` means that each JSON row is the value of a change event of Debezium, with "
        "`op`, `before` and `after`, and with or without `schema` and `payload`.",
        {"type": "string", "enum": ["none", "debezium"]},
    ),
)


@asynccontextmanager
async def _await_room(call: Call, body_bytes: int) -> AsyncIterator[None]:
    """Wait until the memory of the table has room for a large body, before the body is received."""
    entry = await call.app[POINTERS].load_entry(call.namespace, call.name)
    loaded_table = LoadedTable(entry, await call.components.catalog.documents.table(entry.metadata_location))
    async with call.components.streams.body_room.await_arrival(loaded_table, body_bytes, call.principal.name):
        yield


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rows",
    "appendRows",
    "Append rows to a stream table, as an Arrow IPC stream, JSON rows or JSON lines, and answer when they are durable",
    tags=("streams",),
    parameters=_PARAMETERS,
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(200, "The rows are durable, and every later plan includes them", AppendedRows),
        ResponseSpec(400, "The table is not a stream table, or a row does not fit it. No row was appended"),
        ResponseSpec(404, "The table does not exist"),
        ResponseSpec(409, "The sequence does not follow the producer's last sequence. No row was appended"),
        ResponseSpec(413, "There are too many rows, or the decoded rows are too large. No row was appended"),
        ResponseSpec(415, "The media type of the body is not supported"),
        ResponseSpec(429, "The memory for rows is full. No row was appended"),
        UNKNOWN_OUTCOME,
        ResponseSpec(
            503,
            "The table is paused, its schema changed during the request, or another server has the log. No row was "
            "appended",
        ),
    ),
).takes_bytes(await_room=_await_room)
async def append_rows(call: Call, body: bytes) -> AppendedRows:
    """Append rows to a stream table."""
    check_changeable(call.name)
    row_format, producer = parse_format(call.content_type), read_producer(call.query)
    is_envelope = _read_envelope(call.query)
    target = await load_target(call, call.namespace, call.name)
    if len(body) <= QUICK_BYTES:
        return await _append_body(call, body, row_format, target, producer, is_envelope=is_envelope)
    async with call.components.streams.body_room.reserve([(target.loaded, len(body))], call.principal.name):
        target = await load_target(call, call.namespace, call.name)  # A commit may have changed the table.
        return await _append_body(call, body, row_format, target, producer, is_envelope=is_envelope)


async def _append_body(
    call: Call,
    body: bytes,
    row_format: RowFormat,
    target: RowTarget,
    producer: tuple[str, int] | None,
    *,
    is_envelope: bool,
) -> AppendedRows:
    """Append the rows of a body, and return the answer.

    A small body without a producer is appended together with the bodies of concurrent requests. For this, its rows
    must be one list of JSON rows or one Arrow batch, and `can_join` must accept them.

    Large bodies are decoded and prepared outside of the event loop.
    """
    is_quick = len(body) <= QUICK_BYTES
    decode_body = partial(_read_body, call, body, row_format, target.loaded.metadata, is_envelope=is_envelope)
    decoded_body = decode_body() if is_quick else await call.run_in_turn(decode_body)
    missing_columns = decoded_body.missing
    make_preparation = partial(RowTarget.make_preparation, is_envelope=is_envelope, left_out=missing_columns.empty)
    if missing_columns.types:
        # Prepare the rows for the table with the new columns first, so that a request that is refused adds no columns.
        wider_target = await widen_target(call, target, call.securable, missing_columns.types)
        check_columns(decoded_body.row_count, wider_target.loaded.metadata)
        check_rows = partial(_prepare_rows, decoded_body, make_preparation(wider_target, call))
        if is_quick:
            check_rows()
        else:
            await call.run_in_turn(check_rows)
        target = await add_columns(call, target, call.namespace, call.name, missing_columns.types)
    preparation = make_preparation(target, call)
    if producer is None and is_quick and decoded_body.whole is not None and can_join(preparation, decoded_body.whole):
        return await append_joined(call, target, preparation, decoded_body.whole)
    prepare = partial(_prepare_rows, decoded_body, preparation)
    prepared_rows = prepare() if is_quick else await call.run_in_turn(prepare)
    (answer,) = await append_prepared(call, [(target, prepared_rows)], producer, scope=target.uuid)
    return answer


class ShardStatus(msgspec.Struct, frozen=True, rename="kebab"):
    """The state of a shard of a stream."""

    shard: int
    flushed: Annotated[int, doc("The offset before which all rows are in the table's files.")]
    durable: Annotated[int, doc("The offset after the last acknowledged row.")]


class StreamStatus(msgspec.Struct, frozen=True, rename="kebab"):
    """The state of a stream."""

    shards: list[ShardStatus]
    waiting_rows: Annotated[int, doc("The number of rows that are not flushed.")]
    waiting_bytes: Annotated[int, doc("The memory of these rows on this server, in bytes.")]
    oldest_ms: Annotated[
        int | None, doc("The time of the oldest unflushed row in ms, or null if it is unknown or no row waits.")
    ]
    fresh_files: Annotated[int, doc("The number of files with unflushed rows that the next plan may list.")]
    paused: Annotated[str | None, doc("The reason why the table accepts no rows, or null if it accepts rows.")]
    flush_error: Annotated[
        str | None,
        doc("The error of the last flush of this server, or null if the flush succeeded."),
    ]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/stream",
    "loadStream",
    "Return the number of rows of a stream table that wait for a flush, and the offsets of its shards",
    tags=("streams",),
    answers=(
        ResponseSpec(200, "The state of the stream, from the server that has its log", StreamStatus),
        ResponseSpec(400, "The table never had rows of a stream"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(503, "Another server has the log"),
    ),
)
async def load_stream(call: Call) -> StreamStatus:
    """Return the state of a stream."""
    entry = await call.components.catalog.tables.load_entry(call.namespace, call.name)
    if not entry.flushed:
        raise BadRequest(
            f"{format_path(call.namespace, call.name)} has no stream, because no row was ever appended to it"
        )
    table = await call.components.streams.open(entry)
    durable_offsets, flushed_offsets = await table.load_watermarks(), entry.parse_flushed_offsets()
    metadata = await call.components.catalog.documents.table(entry.metadata_location)
    shards = [
        ShardStatus(shard_number, flushed_offsets[shard_number], max(flushed_offsets[shard_number], durable_offset))
        for shard_number, durable_offset in sorted(durable_offsets.items())
    ]
    flushes = await report_flushes(call, entry)
    return make_stream_status(shards, table, read_pause(metadata), flushes)


async def report_flushes(call: Call, entry: Entry) -> FlushReport | None:
    """Return the state of the flushes of a table, with the errors that the caller may see."""
    report = call.components.streams.report_flushes(entry.uuid)
    may_list_files = await call.may(Securable(entry.namespace, TABLE, entry.name), "listFiles")
    return report if report is None or may_list_files else report.without_error()


def make_stream_status(
    shards: list[ShardStatus], table: StreamTable | None, pause_reason: str | None, flushes: FlushReport | None
) -> StreamStatus:
    """Return the state of a stream.

    Args:
        shards: Its shards.
        table: The open table, or None if none of its rows are in memory.
        pause_reason: The reason for its pause, or None if it accepts rows.
        flushes: The state of its flushes, or None if the table is not open.
    """
    return StreamStatus(
        shards,
        waiting_rows=sum(shard.durable - shard.flushed for shard in shards),
        waiting_bytes=0 if table is None else table.size_bytes,
        oldest_ms=None if table is None else table.oldest_ms,
        fresh_files=0 if table is None else len(table.list_fresh_files()),
        paused=pause_reason,
        flush_error=flushes.error if flushes is not None and flushes.failures else None,
    )


class FlushedRows(msgspec.Struct, frozen=True):
    """The result of a flush."""

    rows: Annotated[int, doc("The number of rows that this flush has added to the table's files.")]


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/flush",
    "flushRows",
    "Flush a stream table now: add the waiting rows to its files",
    tags=("streams",),
    answers=(
        ResponseSpec(200, "Every row that was acknowledged before the request is in the table's files", FlushedRows),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "The flush conflicted with another commit. Try again"),
    ),
)
async def flush_rows(call: Call) -> FlushedRows:
    """Flush a stream table now."""
    entry = await call.components.catalog.tables.load_entry(call.namespace, call.name)
    # Only the entry of a stream table has the offsets of flushed rows. Another table has nothing to flush.
    return FlushedRows(await call.components.streams.flush(entry.uuid) if entry.flushed else 0)


class _DecodedBody(NamedTuple):
    """The rows of a body, which are record batches or JSON rows.

    Attributes:
        batches: The record batches, or None if the body has JSON rows.
        rows: The JSON rows.
        lines: The text of each JSON row, if the rows are lines.
        missing: The columns that the table lacks, and that are added before the rows are appended.
    """

    batches: Sequence[pa.RecordBatch] | None
    rows: list[Any]
    lines: list[bytes] | None
    missing: MissingColumns

    @property
    def whole(self) -> JoinedRows | None:
        """All rows as one list of JSON rows or as one Arrow batch, or None if there are several Arrow batches."""
        if self.batches is None:
            return self.rows
        return self.batches[0] if len(self.batches) == 1 else None

    @property
    def row_count(self) -> int:
        return len(self.rows) if self.batches is None else sum(batch.num_rows for batch in self.batches)


def _read_body(
    call: Call, body: bytes, row_format: RowFormat, metadata: TableMetadata, *, is_envelope: bool
) -> _DecodedBody:
    """Return the decoded rows of a body, and the columns in them that the table lacks.

    Arrow batches whose rows are envelopes have columns of the envelope, so they add no columns to the table.
    """
    rows_max, subject = call.components.settings.stream_rows_limit, format_path(call.namespace, call.name)
    if row_format is RowFormat.ARROW:
        batches = read_stream(body, "The body", rows_max=rows_max).to_batches()
        check_size(batches, metadata)
        missing = NO_COLUMNS if is_envelope else find_missing_columns(batches, metadata, subject)
        return _DecodedBody(batches, [], None, missing)
    rows = decode_rows(body, row_format, rows_max=rows_max)
    check_columns(len(rows), metadata)
    lines = split_lines(body) if row_format is RowFormat.LINES else None
    return _DecodedBody(None, rows, lines, find_missing_columns(rows, metadata, subject, is_envelope=is_envelope))


def _prepare_rows(decoded_body: _DecodedBody, preparation: RowPreparation) -> PreparedRows:
    """Return the rows of a body in the form in which the log stores them."""
    if decoded_body.batches is not None:
        return preparation.prepare_arrow(decoded_body.batches)
    return preparation.prepare_json(decoded_body.rows, decoded_body.lines)


def _read_envelope(query: Mapping[str, str]) -> bool:
    """Return whether the rows are envelopes of Debezium, which contain a row before and after a change.

    Raises:
        BadRequest: The envelope is unknown.
    """
    envelope = query.get("envelope", "none")
    if envelope not in ("none", "debezium"):
        raise BadRequest(f"envelope is {envelope[:40]!r}; it must be 'debezium' or 'none'")
    return envelope == "debezium"
