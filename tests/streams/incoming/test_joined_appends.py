"""Tests of requests that are appended together. Each gets its own answer, and the same rows as in a separate append."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from seamark.connector.client.catalog import create_table
from seamark.connector.client.client import SeamarkClient
from seamark.formats.runtime.errors import CommitUnknown
from seamark.metaserver.log.port import Acknowledgement, Batch, Shard
from seamark.metaserver.log.segments import SegmentLog
from seamark.metaserver.streams.incoming import append_gates
from seamark.metaserver.streams.incoming.append_gates import AppendGates
from seamark.metaserver.streams.incoming.prepared_rows import JoinedRows, PreparedRows, RowPreparation
from seamark.metaserver.streams.stream_properties import ENABLED
from tests.streams.test_rows_over_http import (
    ARROW,
    LINES,
    StreamServer,
    create_stream_table,
    encode_arrow,
    open_stream_server,
)
from tests.streams.test_rows_over_http import stream as stream
from tests.waits import until

REQUESTS = 40


@pytest.fixture
def held_appends(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Hold each append to the log until the test sets the event, so that later requests wait for the first."""
    may_append = asyncio.Event()
    append = SegmentLog.append

    async def append_later(log: SegmentLog, batches: Mapping[Shard, Batch], producer: Any = None) -> Any:
        await may_append.wait()
        return await append(log, batches, producer)

    monkeypatch.setattr(SegmentLog, "append", append_later)
    return may_append


async def send_together(
    stream: StreamServer, release_event: asyncio.Event, requests: Sequence[Any], waiting_count: int | None = None
) -> list[tuple[int, Any]]:
    """Send requests at the same time, and return their answers.

    Args:
        stream: The server.
        release_event: The event for which appends to the log wait. It is set when `waiting_count` requests wait.
        requests: Functions that send a request.
        waiting_count: The number of requests that wait. By default it is the number of all requests.
    """
    tasks = [asyncio.create_task(request()) for request in requests]
    await wait_for_requests(stream, len(requests) if waiting_count is None else waiting_count)
    release_event.set()
    return list(await asyncio.gather(*tasks))


async def wait_for_requests(stream: StreamServer, count: int) -> None:
    """Wait until `count` append requests, which the server may write together, have no answer yet."""
    joined_appends = stream.server.components.streams.joined_appends
    await until(lambda: joined_appends.request_count == count)


async def read_log(stream: StreamServer) -> list[list[int]]:
    """Return the ids of the rows in the log, as a list for each batch."""
    components = stream.server.components
    entry = await components.catalog.tables.load_entry(("db",), "t")
    metadata = await components.catalog.documents.table(entry.metadata_location)
    log = await components.streams.open_log(entry, metadata)
    records = await log.read(Shard(entry.uuid, 0), 0, limit_bytes=1 << 30)
    payloads = [pa.ipc.open_stream(record.batch.payload).read_all() for record in records]
    return [payload.column("id").to_pylist() for payload in payloads]


async def test_each_of_the_joined_requests_gets_the_offsets_of_its_rows(
    stream: StreamServer, held_appends: asyncio.Event
) -> None:
    rows_of_requests = [[{"id": 100 * number + index} for index in range(number % 5 + 1)] for number in range(REQUESTS)]
    answers = await send_together(
        stream,
        held_appends,
        [partial(stream.send, json.dumps(request_rows).encode()) for request_rows in rows_of_requests],
    )
    batches = await read_log(stream)
    assert len(batches) < REQUESTS / 2
    ids = [row for batch in batches for row in batch]
    for request_rows, (status, answer) in zip(rows_of_requests, answers, strict=True):
        (position,) = answer["positions"]
        assert (status, answer["rows"], answer["duplicate"]) == (200, len(request_rows), False)
        assert ids[position["offset"] : position["end"]] == [row["id"] for row in request_rows]
    assert sorted(ids) == sorted(row["id"] for request_rows in rows_of_requests for row in request_rows)
    assert await stream.ids() == sorted(ids)


async def test_request_with_invalid_rows_is_refused_without_affecting_joined_requests(
    stream: StreamServer, held_appends: asyncio.Event
) -> None:
    bodies = [[{"id": 1}], [{"id": 2}], [{"id": 3}, {"id": "x"}], [{"id": 4}], [{"name": "no id"}], [{"id": 5}]]
    requests = [partial(stream.send, json.dumps(body).encode()) for body in bodies]
    answers = await send_together(stream, held_appends, requests, waiting_count=4)
    assert [status for status, _ in answers] == [200, 200, 400, 200, 400, 200]
    messages = [answer["error"]["message"] for status, answer in answers if status == 400]
    assert 'Row 1, column id: the value "x" is not a valid long' in messages[0]
    assert "column id is required" in messages[1]
    assert await stream.ids() == [1, 2, 4, 5]


@pytest.mark.slow
async def test_error_in_the_preparation_of_rows_fails_only_its_own_request(
    stream: StreamServer, held_appends: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_joined = RowPreparation.prepare_joined

    def fail_for_three(preparation: RowPreparation, requests: Sequence[JoinedRows]) -> PreparedRows:
        if any(row["id"] == 3 for rows in requests for row in rows):
            raise OverflowError("the value is too large")
        return prepare_joined(preparation, requests)

    monkeypatch.setattr(RowPreparation, "prepare_joined", fail_for_three)
    first_task = asyncio.create_task(stream.send(b'[{"id": 0}]'))
    await wait_for_requests(stream, 1)
    requests = [partial(stream.send, json.dumps([{"id": number}]).encode()) for number in range(1, 6)]
    answers = await send_together(stream, held_appends, requests, waiting_count=6)
    assert [status for status, _ in (await first_task, *answers)] == [200, 200, 200, 500, 200, 200]
    assert await stream.ids() == [0, 1, 2, 4, 5]


async def test_json_and_arrow_requests_of_all_forms_share_an_append(
    stream: StreamServer, held_appends: asyncio.Event
) -> None:
    requests = [
        partial(stream.send, b'[{"id": 1, "name": "a"}]'),
        partial(stream.send, b'{"id": 2}\n{"id": 3, "day": "2026-01-31"}\n', LINES),
        partial(stream.send, encode_arrow(id=[4, 5], name=["d", None]), ARROW),
        partial(stream.send, encode_arrow(id=pa.array([6], pa.int32())), ARROW),
        partial(stream.send, encode_arrow(id=[7], name=pa.array(["g"]).dictionary_encode()), ARROW),
        partial(stream.send, encode_arrow(id=[], name=pa.array([], pa.string())), ARROW),
        partial(stream.send, b"[]"),
        partial(stream.send, b'[{"id": 8}]', query="?producer=p&sequence=0"),
    ]
    answers = await send_together(stream, held_appends, requests, waiting_count=4)
    assert [(status, answer["rows"]) for status, answer in answers] == [
        *((200, rows) for rows in (1, 2, 2, 1, 1, 0, 0, 1))
    ]
    assert await stream.ids() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert await stream.ids("name = 'd'") == [4]
    assert await stream.ids("day = '2026-01-31'") == [3]


async def test_column_missing_from_a_request_has_its_default(tmp_path: Path, held_appends: asyncio.Event) -> None:
    """If a request has the column in other rows, the column is null in rows without it."""
    town = {"id": 2, "name": "town", "required": False, "type": "string", "write-default": "Rome"}
    schema = {"type": "struct", "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}, town]}
    properties = {ENABLED: "true", "format-version": "3"}
    async with open_stream_server(tmp_path) as stream:
        client = SeamarkClient(stream.server.url)
        await asyncio.to_thread(create_table, client, ("db", "t"), schema, properties=properties)
        bodies = [[{"id": 1}], [{"id": 2, "town": "Bern"}, {"id": 3}], [{"id": 4}], [{"id": 5, "town": None}]]
        requests = [partial(stream.send, json.dumps(body).encode()) for body in bodies]
        answers = await send_together(stream, held_appends, requests)
        assert [status for status, _ in answers] == [200] * 4
        assert await stream.ids("town = 'Rome'") == [1, 4]
        assert await stream.ids("town is null") == [3, 5]


async def test_rows_of_a_keyed_table_replace_each_other_within_a_batch(
    tmp_path: Path, held_appends: asyncio.Event
) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={"seamark.stream.key": "id"})
        bodies = [[{"id": 1, "name": "a"}], [{"id": 2, "name": "b"}], [{"id": 1, "name": "c"}]]
        for number, body in enumerate(bodies, 1):
            send_task = asyncio.create_task(stream.send(json.dumps(body).encode()))
            await wait_for_requests(stream, number)
        held_appends.set()
        assert (await send_task)[0] == 200
        await stream.send(b'[{"id": 2, "_op": "delete"}]')
        for _ in range(2):
            assert await stream.ids("name = 'c'") == await stream.ids() == [1]
            await stream.flush()


async def test_all_joined_requests_get_the_unknown_outcome_of_their_append(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_fail = asyncio.Event()

    async def fail(*arguments: Any) -> Any:
        await may_fail.wait()
        raise CommitUnknown("The disk failed")

    monkeypatch.setattr(SegmentLog, "append", fail)
    requests = [partial(stream.send, json.dumps([{"id": number}]).encode()) for number in range(5)]
    for status, answer in await send_together(stream, may_fail, requests):
        assert (status, answer["error"]["type"]) == (500, "CommitStateUnknownException")
        assert "may store them twice" in answer["error"]["message"]


async def test_no_request_waits_after_an_unexpected_error_of_a_joined_append(
    stream: StreamServer, held_appends: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SegmentLog.append

    async def forget_positions(log: SegmentLog, batches: Mapping[Shard, Batch], producer: Any = None) -> Any:
        await append(log, batches, producer)
        monkeypatch.setattr(SegmentLog, "append", append)
        return Acknowledgement(())

    monkeypatch.setattr(SegmentLog, "append", forget_positions)
    requests = [partial(stream.send, json.dumps([{"id": number}]).encode()) for number in range(REQUESTS)]
    answers = await send_together(stream, held_appends, requests)
    assert {status for status, _ in answers} <= {500, 503}
    assert await stream.send(b'[{"id": 1000}]')
    assert 1000 in await stream.ids()


async def test_waiting_time_of_a_joined_request_counts_from_its_arrival(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server joins append requests that wait at the same time: it writes their rows as one append."""
    await stream.post({"id": 0})
    (uuid,) = stream.server.components.streams.tables
    wait_limits_s: list[float] = []
    wait = AppendGates._wait

    async def record_wait(gates: AppendGates, is_ready: Any, limit_s: float, message: str) -> None:
        wait_limits_s.append(limit_s)
        await wait(gates, is_ready, limit_s, message)

    monkeypatch.setattr(append_gates, "APPEND_WAIT_S", 0.2)
    rows = json.dumps([{"id": number} for number in range(500)]).encode()
    async with stream.server.components.streams.hold_appends([uuid]):
        monkeypatch.setattr(AppendGates, "_wait", record_wait)
        answers = await asyncio.gather(*(stream.send(rows) for _ in range(REQUESTS)))
    assert {status for status, _ in answers} == {503}
    # A request that arrived during an earlier wait waits only for the rest of the 0.2 s.
    assert min(wait_limits_s) < 0.1
