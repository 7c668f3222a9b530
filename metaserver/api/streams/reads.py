"""Serves continuous reads: the position at which a reader begins, and the rows after a position.

The server returns rows that are in the log. For rows that are in files, the answer names the snapshot whose files the
client reads itself. A reader that is far behind therefore uses no memory of the server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, TypeVar

import msgspec
import pyarrow as pa
from aiohttp import web

from seamark.formats.protocol.wire import format_path
from seamark.formats.runtime.errors import BadRequest, OffsetOutOfRange
from seamark.metaserver.api.formats.arrow import ARROW_STREAM
from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Route
from seamark.metaserver.api.plans.planning import POINTERS
from seamark.metaserver.log.port import RowKind, Shard, StreamLog
from seamark.metaserver.store.model import Entry
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.streams.log_reads import ReadRows, read_log, read_shard_states
from seamark.metaserver.streams.positions import (
    End,
    FilesStep,
    LogRows,
    ReaderTableState,
    Step,
    choose_next_step,
    find_earliest_position,
    find_latest_position,
    find_position_after_snapshot,
    find_snapshot_at,
    hash_log,
    move_to_time,
    parse_position,
)
from seamark.metaserver.timeline.timeline import Watcher

_LIMIT_BYTES = 4 << 20
_LIMIT_BYTES_MAX = 32 << 20
"""The maximum of the parameter `limit-bytes`. `_LIMIT_BYTES` is its default."""
_INT64_DIGITS_MAX = 19
_LIMIT_DIGITS_MAX = 10
_TRIM_TRIES_MAX = 3
"""The maximum number of attempts to choose a step. An attempt fails if the log has removed the rows of the step."""
_IN_LOOP_SNAPSHOTS_MAX = 200
"""The maximum number of snapshots that are searched on the event loop."""
_FIRST_ROW_S = 0.5
"""The number of seconds between two checks for the first row of a table without a stream."""
_CHANGE_TYPE = "_change_type"
T = TypeVar("T")
_TABLE = "/api/v1/tables/{namespace}/{table}"
_KIND_NAMES = {RowKind.INSERT: "insert", RowKind.UPDATE: "update", RowKind.DELETE: "delete"}


class StreamPosition(msgspec.Struct, frozen=True, rename="kebab"):
    """A position of a continuous read."""

    position: Annotated[
        str,
        doc("The position. A read with this value of `after` returns the rows after the position."),
    ]


@Route(
    "GET",
    f"{_TABLE}/stream/position",
    "loadStreamPosition",
    "Return the position at which a continuous read begins",
    tags=("streams",),
    parameters=(
        Parameter(
            "at",
            "query",
            "The rows that the read returns. `earliest` means the present rows and then all later rows. `latest` means "
            "only later rows. `snapshot:ID` means the rows after a snapshot, where 0 is before the first snapshot. "
            "`time:MS` means the rows that were appended at or after a time in milliseconds since the epoch.",
            {"type": "string"},
        ),
    ),
    answers=(
        ResponseSpec(200, "The position", StreamPosition),
        ResponseSpec(400, "`at` is invalid, or the snapshot is not an ancestor of the current snapshot"),
        ResponseSpec(404, "The table does not exist, or snapshots after the start have expired"),
        ResponseSpec(503, "Another server has the log"),
    ),
)
async def load_stream_position(call: Call) -> StreamPosition:
    """Return the position at which a continuous read begins."""
    entry, table, log = await _load_readable_table(call)
    start = call.query.get("at", "earliest")
    if start == "earliest":
        position = find_earliest_position(entry.uuid, table)
    elif start == "latest":
        position = find_latest_position(entry.uuid, table)
    elif start.startswith("snapshot:"):
        snapshot_id = _parse_whole_number(start, "snapshot") or None
        position = await _run_in_loop_or_thread(
            call, lambda table: find_position_after_snapshot(entry.uuid, table, snapshot_id), table
        )
    elif start.startswith("time:"):
        time_ms = _parse_whole_number(start, "time")
        position = await _run_in_loop_or_thread(
            call, lambda table: find_position_after_snapshot(entry.uuid, table, find_snapshot_at(table, time_ms)), table
        )
        if log is not None:
            offsets = {
                shard_number: await log.find_offset(Shard(entry.uuid, shard_number), time_ms)
                for shard_number in table.shards
            }
            position = move_to_time(position, table.shards, offsets)
    else:
        raise BadRequest(f"at is {start[:60]!r}; it must be earliest, latest, snapshot:ID or time:MS")
    return StreamPosition(position.encode())


def _parse_whole_number(start: str, name: str) -> int:
    """Return the whole number in `start`, a text such as `time:17` with the word `name` before the colon.

    Raises:
        BadRequest: The text after the colon is not a whole number.
    """
    text = start.partition(":")[2]
    if not (text.isascii() and text.isdecimal() and len(text) <= _INT64_DIGITS_MAX):
        raise BadRequest(f"at is {start[:60]!r}; a whole number must follow {name}:")
    return int(text)


@Route(
    "GET",
    f"{_TABLE}/rows",
    "readRows",
    "Return the rows after a position of a continuous read as an Arrow IPC stream, and wait for rows if `wait` is set",
    tags=("streams",),
    parameters=(
        Parameter(
            "after", "query", "The position from loadStreamPosition or from the last answer.", {"type": "string"}
        ),
        Parameter(
            "until", "query", "The position at which the read ends. By default, it does not end.", {"type": "string"}
        ),
        Parameter(
            "wait",
            "query",
            "The maximum number of seconds to wait for rows (long polling). The setting watch_timeout_s limits it.",
            {"type": "number", "minimum": 0},
        ),
        Parameter(
            "limit-bytes",
            "query",
            "The size of the rows in the log after which no more batches are added. If it is 0, the answer has the "
            f"position after the rows, but no rows. The default is {_LIMIT_BYTES}.",
            {"type": "integer", "minimum": 0, "maximum": _LIMIT_BYTES_MAX},
        ),
        Parameter(
            "changes",
            "query",
            f"Whether the answer has the column `{_CHANGE_TYPE}` with insert, update or delete. If it is false, rows "
            "that are not inserts are refused.",
            {"type": "boolean"},
        ),
        Parameter(
            "skip-changes",
            "query",
            "Whether snapshots that have removed or replaced rows are skipped. By default, they are refused.",
            {"type": "boolean"},
        ),
    ),
    answers=(
        ResponseSpec(
            200,
            "An Arrow IPC stream. The metadata of its schema have `step` (`rows`, `files` or `end`) and `position`, "
            "the position after this answer. If the step is `files`, the client reads the rows of the snapshot "
            "`snapshot-id` from the table's files. Without `start-snapshot-id`, it reads all rows. Otherwise, it "
            "reads the rows that were added after that snapshot (0 is before the first snapshot)",
        ),
        ResponseSpec(400, "A parameter is invalid, or a snapshot after the position has removed rows"),
        ResponseSpec(404, "The table does not exist, or rows after the position are no longer kept"),
        ResponseSpec(503, "Another server has the log, or too many clients wait"),
    ),
    waits=True,
    streams=True,
)
async def read_rows(call: Call) -> Answer:
    """Return the rows after a position, and wait for them if the client requests it."""
    query = call.query
    if "after" not in query:
        raise BadRequest("after is missing; send a position, which …/stream/position returns for the first request")
    limit_bytes = _parse_limit(query.get("limit-bytes"))
    wait_s = min(_parse_seconds(query.get("wait", "0")), call.components.settings.watch_timeout_s)
    skips_changes, wants_kinds = _parse_flag(query, "skip-changes"), _parse_flag(query, "changes")
    for attempt in range(_TRIM_TRIES_MAX):
        entry, table, log = await _load_readable_table(call)
        until = parse_position(query["until"], entry.uuid) if "until" in query else None
        position = parse_position(query["after"], entry.uuid)
        choose = partial(choose_next_step, position, until=until, skips_changes=skips_changes)
        step = await _run_in_loop_or_thread(call, choose, table)
        if isinstance(step, End) and wait_s > 0 and until is None:
            step, table, log = await _wait_for_rows(call, entry, step, choose, wait_s)
            await call.recheck(call.securable)
        if not isinstance(step, LogRows):
            return _answer_with_stream(_encode_batches([], _describe_step(step)))
        if limit_bytes == 0:
            next_position = step.position.advance({shard: end for shard, (_, end) in step.ranges.items()})
            return _answer_with_stream(_encode_batches([], {"step": "rows", "position": next_position.encode()}))
        assert log is not None
        try:
            rows = await read_log(
                log, entry.uuid, step.ranges, limit_bytes=limit_bytes, count_bytes=call.reserve_memory
            )
        except OffsetOutOfRange:
            if attempt + 1 == _TRIM_TRIES_MAX:
                raise
            continue
        metadata = {"step": "rows", "position": step.position.advance(rows.offsets).encode()}
        decode = partial(_decode_rows, call, rows, table, metadata, wants_kinds)
        return _answer_with_stream(decode() if rows.size_bytes <= QUICK_BYTES else await call.run_in_turn(decode))
    raise AssertionError("the loop returns or raises")


async def _load_readable_table(
    call: Call, *, uuid: str | None = None
) -> tuple[Entry, ReaderTableState, StreamLog | None]:
    """Return the entry of the table, the table with the present state of its shards, and its log if it has a stream.

    A reader continues at a read position, which an earlier answer has given it. The position belongs to one table.

    If the schema changed while the log was read, the function starts again with the new schema.

    Args:
        call: The call.
        uuid: The UUID in the read position of the request, or None if the request has no read position.

    Raises:
        BadRequest: Another table has replaced the table of the read position.
    """
    entry = await call.app[POINTERS].load_entry(call.namespace, call.name)
    if uuid is not None and entry.uuid != uuid:
        raise BadRequest(
            f"{format_path(call.namespace, call.name)} was replaced by another table; start again at earliest"
        )
    documents = call.components.catalog.documents
    metadata = await documents.table(entry.metadata_location)
    while True:
        flushed_offsets = entry.parse_flushed_offsets()
        if not flushed_offsets:
            return entry, ReaderTableState(metadata, {}, {}), None
        log = await call.components.streams.open_log(entry, metadata)
        await log.catch_up()  # Another server may have acknowledged rows or returned the read position.
        shards = read_shard_states(log, entry.uuid, flushed_offsets)
        # Rows may have arrived with a column that was added after the table was loaded.
        later_entry = await call.app[POINTERS].load_entry(call.namespace, call.name)
        later_metadata = await documents.table(later_entry.metadata_location)
        if later_entry.uuid != entry.uuid or later_metadata.current_schema == metadata.current_schema:
            return entry, ReaderTableState(metadata, flushed_offsets, shards, hash_log(log.identity)), log
        entry, metadata = later_entry, later_metadata


async def _run_in_loop_or_thread(call: Call, choose: Callable[[ReaderTableState], T], table: ReaderTableState) -> T:
    """Call `choose`, and return its result. If the table has many snapshots, call it in a thread.

    `choose` takes some microseconds for each snapshot, and must not block the event loop for long.
    """
    if len(table.metadata.snapshots_by_id) <= _IN_LOOP_SNAPSHOTS_MAX:
        return choose(table)
    return await call.run_in_turn(partial(choose, table))


async def _wait_for_rows(
    call: Call, entry: Entry, step: Step, choose: partial[Step], wait_s: float
) -> tuple[Step, ReaderTableState, StreamLog | None]:
    """Return the first step with rows, or the last step after `wait_s`, each with its table and its log.

    The wait also ends when the server is about to stop.

    Args:
        call: The call.
        entry: The table.
        step: The step that found no rows.
        choose: Chooses the next step. Its first argument is the position after the last step.
        wait_s: The time in seconds to wait.
    """
    clock = call.components.clock
    until_s = clock.monotonic() + wait_s
    async with _watch_table(call, entry.uuid) as watcher:
        while True:
            watcher.woken.clear()
            _, table, log = await _load_readable_table(call, uuid=entry.uuid)
            step = await _run_in_loop_or_thread(call, choose, table)
            choose = partial(choose.func, step.position, **choose.keywords)  # Skipped rows are not read again.
            remaining_s = until_s - clock.monotonic()
            if not isinstance(step, End) or remaining_s <= 0 or call.components.timeline.is_draining:
                return step, table, log
            read_offsets = {
                Shard(entry.uuid, shard_number): step.position.get_offset(shard_number) for shard_number in table.shards
            }
            # The first row of a table opens its log. That is not a commit, so it does not wake the watcher.
            await _wait_for_commit_or_rows(
                watcher, log, read_offsets, min(remaining_s, _FIRST_ROW_S) if log is None else remaining_s
            )


@asynccontextmanager
async def _watch_table(call: Call, uuid: str) -> AsyncIterator[Watcher]:
    """Yield a watcher that wakes for each commit of a table after the context has begun."""
    timeline = call.components.timeline
    async with timeline.watch_instants(InstantFilter(uuid=uuid, since=await timeline.load_head())) as watcher:
        yield watcher


async def _wait_for_commit_or_rows(
    watcher: Watcher, log: StreamLog | None, read_offsets: Mapping[Shard, int], wait_s: float
) -> None:
    """Wait for a commit of the table or rows in the log, for at most `wait_s`."""
    wait_tasks: list[asyncio.Task[bool]] = [asyncio.create_task(watcher.woken.wait(), name="wait for a commit")]
    if log is not None:
        wait_tasks.append(asyncio.create_task(log.wait(read_offsets, wait_s), name="wait for rows"))
    try:
        done_tasks, _ = await asyncio.wait(wait_tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in wait_tasks:
            task.cancel()
        await asyncio.gather(*wait_tasks, return_exceptions=True)
    for task in done_tasks:
        task.result()  # The log may have failed.


def _describe_step(step: FilesStep | End) -> dict[str, str]:
    """Return the metadata of the answer for a step without rows of the log."""
    if isinstance(step, End):
        return {"step": "end", "position": step.position.encode()}
    # The first snapshot of a table has no parent, so its start is 0.
    metadata = {"step": "files", "position": step.position.encode(), "snapshot-id": str(step.snapshot_id)}
    return metadata if step.is_scan else {**metadata, "start-snapshot-id": str(step.parent_id or 0)}


def _decode_rows(
    call: Call, rows: ReadRows, table: ReaderTableState, metadata: Mapping[str, str], wants_kinds: bool
) -> bytes:
    """Return the answer with rows of the log.

    If the reader requests changes (`wants_kinds`), a further column has the kind of each row.

    Raises:
        BadRequest: A row is not an insert, and the reader did not request changes. Or it did, and the table has a
            column with the name of the further column.
    """
    batches = call.components.streams.row_files.decode(rows.slices, table.metadata)
    if wants_kinds and any(field.name == _CHANGE_TYPE for field in table.metadata.current_schema.fields):
        raise BadRequest(
            f"The table has a column with the name {_CHANGE_TYPE}; rename it, or read without changes=true"
        )
    if wants_kinds:
        batches = [_add_kinds(batch, kinds) for batch, kinds in zip(batches, rows.kinds, strict=True)]
    elif any(max(kinds, default=0) != RowKind.INSERT for kinds in rows.kinds):
        raise BadRequest(
            "The stream has updates or deletes; send changes=true, and read the kind of each row from _change_type"
        )
    return _encode_batches(batches, metadata)


def _add_kinds(batch: pa.RecordBatch, kinds: bytes) -> pa.RecordBatch:
    """Return a batch with the kind of each row in an additional column. Without kinds, all rows are inserts."""
    names = [_KIND_NAMES[RowKind(kind)] for kind in kinds] or ["insert"] * batch.num_rows
    return batch.append_column(_CHANGE_TYPE, pa.array(names, pa.string()))


def _encode_batches(batches: Sequence[pa.RecordBatch], metadata: Mapping[str, str]) -> bytes:
    """Return batches as an Arrow stream with metadata."""
    schema = batches[0].schema if batches else pa.schema([])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema.with_metadata(dict(metadata))) as stream:
        if batches:
            stream.write_table(pa.Table.from_batches(batches).combine_chunks())
    return bytes(sink.getvalue())


def _answer_with_stream(body: bytes) -> web.Response:
    """Return the response with an Arrow stream."""
    return web.Response(body=body, content_type=ARROW_STREAM)


def _parse_limit(text: str | None) -> int:
    """Return the size limit of an answer.

    Raises:
        BadRequest: The text is not a number in the allowed range.
    """
    if text is None:
        return _LIMIT_BYTES
    if not (text.isascii() and text.isdecimal() and len(text) <= _LIMIT_DIGITS_MAX and int(text) <= _LIMIT_BYTES_MAX):
        raise BadRequest(f"limit-bytes is {text[:40]!r}; it must be a number from 0 to {_LIMIT_BYTES_MAX}")
    return int(text)


def _parse_seconds(text: str) -> float:
    """Return the time to wait.

    Raises:
        BadRequest: The text is not a number of seconds.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise BadRequest(f"wait is {text[:40]!r}; it must be a number of seconds, 0 or more")
    return seconds


def _parse_flag(query: Mapping[str, str], name: str) -> bool:
    """Return a parameter that is true or false.

    Raises:
        BadRequest: The value is neither true nor false.
    """
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"{name} is {text[:40]!r}; it must be true or false")
    return text == "true"
