"""Tests of rows over HTTP. Unmodified PyIceberg reads each acknowledged row once, before and after its flush."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BinaryType, DateType, DecimalType, LongType, NestedField, StringType, TimestampType

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams.writer import StreamClosed
from seamark.formats.protocol.wire import FRESH_FOLDER
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, TooManyRequests
from seamark.metaserver.log.segments import SegmentLog
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.streams.catalog_tables import CatalogTables
from seamark.metaserver.streams.incoming import body_room
from seamark.metaserver.streams.incoming.body_room import BodyReservations
from seamark.metaserver.streams.stream_counts import StreamCounts
from seamark.metaserver.streams.stream_properties import ENABLED
from tests.seeds import examples, first_seed
from tests.server.rig import RunningServer, run_server
from tests.waits import PATIENCE_S, until

NEVER_MS = 3_600_000
"""An interval between flushes that is longer than any test."""
SCHEMA = Schema(
    NestedField(1, "id", LongType(), required=True),
    NestedField(2, "name", StringType()),
    NestedField(3, "day", DateType()),
)
BY_NAME = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "name"))
ARROW, LINES = "application/vnd.apache.arrow.stream", "application/x-ndjson"


class StreamServer:
    """A server with the stream table `db.t`, and an unmodified PyIceberg catalog."""

    def __init__(self, server: RunningServer, catalog: Catalog) -> None:
        self.server, self.catalog = server, catalog

    async def send(
        self, body: bytes | AsyncIterator[bytes], content_type: str = "application/json", query: str = ""
    ) -> tuple[int, Any]:
        url = f"{self.server.url}/api/v1/tables/db/t/rows{query}"
        async with self.server.http.post(url, data=body, headers={"Content-Type": content_type}) as answer:
            return answer.status, await answer.json()

    async def post(self, *rows: dict[str, Any], query: str = "") -> Any:
        status, answer = await self.send(json.dumps(rows).encode(), query=query)
        assert status == 200, answer
        return answer

    async def send_and_read_error(
        self, body: bytes | AsyncIterator[bytes], content_type: str = "application/json", query: str = ""
    ) -> tuple[int, str]:
        """Send a request that the server refuses. Return the status and the message of the error."""
        status, answer = await self.send(body, content_type, query)
        return status, answer["error"]["message"]

    async def ids(self, where: str | None = None) -> list[int]:
        """Return the ids that unmodified PyIceberg reads, in ascending order."""

        def read() -> list[int]:
            scan = self.catalog.load_table("db.t").scan(**({"row_filter": where} if where else {}))
            return sorted(scan.to_arrow().column("id").to_pylist())

        return await asyncio.to_thread(read)

    async def flush(self) -> int:
        """Flush the table, and return the number of flushed rows."""
        (uuid,) = self.server.components.streams.tables
        return await self.server.components.streams.flush(uuid)

    async def count_snapshots(self) -> int:
        table = await asyncio.to_thread(self.catalog.load_table, "db.t")
        return len(table.metadata.snapshots)


async def yield_body(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body. The request does not announce its size.

    So the server receives it at once. A large body with an announced size waits until the server has memory for it.
    """
    yield body


@asynccontextmanager
async def open_stream_server(home: Path, **settings: Any) -> AsyncIterator[StreamServer]:
    async with run_server(home, **{"stream_flush_interval_ms": NEVER_MS, **settings}) as server:
        catalog = await asyncio.to_thread(
            lambda: RestCatalog("streams", uri=server.url, **{"rest-scan-planning-enabled": "true"})
        )
        yield StreamServer(server, catalog)


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        yield stream


async def create_stream_table(stream: StreamServer, schema: Schema = SCHEMA, **options: Any) -> None:
    properties = {ENABLED: "true", **options.pop("properties", {})}
    await asyncio.to_thread(stream.catalog.create_table, "db.t", schema, properties=properties, **options)


def encode_arrow(**columns: Any) -> bytes:
    table, sink = pa.table(columns), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


async def test_rows_of_every_format_are_visible_before_any_commit(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a", "day": "2026-01-31"}, {"id": 2})
    assert (await stream.send(b'{"id": 3, "name": "c"}\n{"id": 4}\n', LINES))[0] == 200
    assert (await stream.send(encode_arrow(id=[5, 6], name=["e", None]), ARROW))[0] == 200
    assert (await stream.send(b'{"rows": [{"id": 7}]}'))[0] == 200
    assert await stream.ids() == [1, 2, 3, 4, 5, 6, 7]
    assert await stream.ids("id >= 3 and id < 6") == [3, 4, 5]
    assert await stream.ids("name = 'e'") == [5]
    assert await stream.ids("name is null and id > 2") == [4, 6, 7]
    assert await stream.ids("day = '2026-01-31'") == [1]


async def test_the_first_rows_of_an_empty_table_are_committed_without_a_delay(stream: StreamServer) -> None:
    """Spark plans no scan of a table without a snapshot, so it would read no rows."""
    await stream.post({"id": 1})
    async with asyncio.timeout(PATIENCE_S):
        while not await stream.count_snapshots():
            await asyncio.sleep(0.02)
    await stream.post({"id": 2})
    await asyncio.sleep(0.3)  # A flush without a delay would end in this time.
    assert await stream.count_snapshots() == 1
    assert await stream.ids() == [1, 2]


@pytest.mark.slow
async def test_first_flush_is_repeated_only_after_a_failure(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, attempts, is_released = CatalogTables.commit, [], asyncio.Event()

    async def commit_second_attempt(self: CatalogTables, *args: Any, **options: Any) -> Any:
        attempts.append(args)
        if len(attempts) == 1:
            raise CommitConflict("another commit was faster")
        await is_released.wait()
        return await commit(self, *args, **options)

    monkeypatch.setattr(CatalogTables, "commit", commit_second_attempt)
    await stream.post({"id": 1})
    await until(lambda: len(attempts) == 2)
    await stream.post({"id": 2})
    is_released.set()
    async with asyncio.timeout(PATIENCE_S):
        while not await stream.count_snapshots():
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert len(attempts) == 2
    assert await stream.ids() == [1, 2]


async def test_rows_are_read_once_after_their_flush(stream: StreamServer) -> None:
    await stream.post({"id": 1}, {"id": 2})
    await stream.flush()
    await stream.post({"id": 3})
    assert await stream.ids() == [1, 2, 3]
    assert await stream.flush() == 1
    assert await stream.ids() == [1, 2, 3]
    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    paths = [task.file.file_path for task in await asyncio.to_thread(lambda: list(table.scan().plan_files()))]
    assert not [path for path in paths if FRESH_FOLDER in path]
    summary = table.metadata.snapshots[-1].summary
    assert summary is not None
    assert summary["total-records"] == "3"


async def test_read_of_a_snapshot_id_has_no_fresh_rows(stream: StreamServer) -> None:
    await stream.post({"id": 1})
    await stream.flush()
    await stream.post({"id": 2})
    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    head = table.metadata.current_snapshot_id
    rows = await asyncio.to_thread(lambda: table.scan(snapshot_id=head).to_arrow())
    assert rows.column("id").to_pylist() == [1]


async def test_rows_of_a_partitioned_table_are_pruned_by_partition(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, partition_spec=BY_NAME)
        await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"}, {"id": 3, "name": "a"})
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        tasks = await asyncio.to_thread(lambda: list(table.scan(row_filter="name = 'a'").plan_files()))
        assert [task.file.record_count for task in tasks] == [2]
        assert await stream.ids("name = 'b'") == [2]
        await stream.flush()
        assert await stream.ids("name = 'a'") == [1, 3]


async def test_a_repeated_request_of_a_producer_adds_no_row(stream: StreamServer) -> None:
    first_answer = await stream.post({"id": 1}, query="?producer=p&sequence=0")
    second_answer = await stream.post({"id": 1}, query="?producer=p&sequence=0")
    assert not first_answer["duplicate"]
    assert second_answer["duplicate"]
    await stream.post({"id": 2}, query="?producer=p&sequence=1")
    await stream.post({"id": 3}, query="?producer=other&sequence=0")
    status, message = await stream.send_and_read_error(b'[{"id": 9}]', query="?producer=p&sequence=7")
    assert (status, "send append 2 first" in message) == (409, True)
    assert await stream.ids() == [1, 2, 3]


async def test_error_of_an_unknown_outcome_states_whether_a_repeat_is_safe(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*arguments: Any) -> Any:
        raise CommitUnknown("Kafka did not answer. Repeat the request with the same sequence number")

    monkeypatch.setattr(SegmentLog, "append", fail)
    advice = {"": "may store them twice", "?producer=p&sequence=0": "with the same sequence number"}
    for query, text in advice.items():
        status, answer = await stream.send(b'[{"id": 1}]', query=query)
        assert (status, answer["error"]["type"]) == (500, "CommitStateUnknownException")
        assert text in answer["error"]["message"]


async def test_error_of_an_invalid_row_names_row_column_and_value(stream: StreamServer) -> None:
    async def read_reason(*rows: Any) -> str:
        status, message = await stream.send_and_read_error(json.dumps(rows).encode())
        assert status == 400
        return message

    assert 'Row 1, column id: the value "x" is not a valid long' in await read_reason({"id": 1}, {"id": "x"})
    assert "Row 0, column id: the value 1.5" in await read_reason({"id": 1.5})
    assert "Row 0, column id: the value true" in await read_reason({"id": True})
    assert f"column id: the value {1 << 64}" in await read_reason({"id": 1 << 64})
    assert "Row 1 has the column 'town', which the table does not have" in await read_reason(
        {"id": 1}, {"id": 2, "town": 1}
    )
    assert "Row 0, column day: the value" in await read_reason({"id": 1, "day": "31.1.2026"})
    assert "column id is required" in await read_reason({"name": "a"}, {"id": 1})
    assert "Row 0 is 7" in await read_reason(7)
    assert (await stream.send_and_read_error(b"[{"))[0] == 400
    assert (await stream.send_and_read_error(b"id\n1\n", "text/csv"))[0] == 415
    assert "Row 1 is not valid JSON" in (await stream.send_and_read_error(b'{"id": 1}\n{"id": \n', LINES))[1]
    assert (await stream.send_and_read_error(b"nothing", ARROW))[0] == 400
    status, message = await stream.send_and_read_error(encode_arrow(id=["x"]), ARROW)
    assert (status, "column id" in message) == (400, True)
    assert (await stream.send_and_read_error(b"[]", query="?producer=p"))[0] == 400
    assert (await stream.send_and_read_error(b"[]", query="?producer=p&sequence=-1"))[0] == 400
    assert await stream.ids() == []


_LONG_TEXT = pa.array(["x" * 500_000])
_ROWS = 20_000


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "names",
    [
        pa.DictionaryArray.from_arrays(pa.array([0] * _ROWS, pa.int8()), _LONG_TEXT),
        pa.RunEndEncodedArray.from_arrays(pa.array([_ROWS], pa.int32()), _LONG_TEXT),
        pa.Array.from_buffers(
            pa.string_view(),
            _ROWS,
            # Each view has the length of its text, a prefix, the number of a buffer, and the position in this buffer.
            # The last buffer has the characters.
            [None, pa.py_buffer(struct.pack("<i4sii", 500_000, b"xxxx", 0, 0) * _ROWS), _LONG_TEXT.buffers()[2]],
        ),
        pa.FixedSizeListArray.from_arrays(pa.nulls(_ROWS * 1000), 1000),
    ],
    ids=["dictionary", "runs", "views", "lists of nulls"],
)
async def test_small_body_that_decodes_to_too_many_bytes_is_refused(stream: StreamServer, names: pa.Array) -> None:
    body = encode_arrow(id=pa.array(range(_ROWS), pa.int64()), name=names)
    assert len(body) < 1_000_000
    status, message = await stream.send_and_read_error(body, ARROW)
    assert (status, "decoded rows have more than" in message) == (413, True)
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a"]))
    assert (await stream.send(encode_arrow(id=pa.array([1, 2]), name=dictionary), ARROW))[0] == 200


async def test_table_with_encrypted_files_refuses_rows(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={"format-version": "3", "encryption.key-id": "k"})
        status, message = await stream.send_and_read_error(b'[{"id": 1}]')
        assert (status, "encrypted" in message) == (400, True)


async def test_table_that_is_not_a_stream_table_refuses_rows(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={ENABLED: "false"})
        status, message = await stream.send_and_read_error(b'[{"id": 1}]')
        assert (status, f"set its property {ENABLED} to true" in message) == (400, True)
        await asyncio.to_thread(stream.catalog.drop_table, "db.t")
        assert (await stream.send_and_read_error(b'[{"id": 1}]'))[0] == 404
        await create_stream_table(stream, properties={"format-version": "1"})
        assert "needs version 2 or 3" in (await stream.send_and_read_error(b'[{"id": 1}]'))[1]


async def test_values_of_all_types_are_kept(tmp_path: Path) -> None:
    schema = Schema(
        NestedField(1, "id", LongType(), required=True),
        NestedField(2, "price", DecimalType(9, 2)),
        NestedField(3, "at", TimestampType()),
        NestedField(4, "raw", BinaryType()),
    )
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, schema)
        await stream.post(
            {"id": "9223372036854775807", "price": "12.30", "at": "2026-01-31T12:00:00.000001", "raw": "00ff"},
            {"id": 1, "price": 5, "at": "2026-01-31 12:00:00"},
        )
        rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
        assert [str(row["price"]) for row in rows] == ["12.30", "5.00"]
        assert [row["id"] for row in rows] == [2**63 - 1, 1]
        assert rows[0]["raw"] == b"\x00\xff"
        assert str(rows[0]["at"]) == "2026-01-31 12:00:00.000001"


async def test_rows_survive_a_restart_and_are_flushed_once(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2}, query="?producer=p&sequence=0")
    async with open_stream_server(tmp_path) as stream:
        assert await stream.ids() == [1, 2]
        assert (await stream.post({"id": 2}, query="?producer=p&sequence=0"))["duplicate"]
        await stream.post({"id": 3})
        assert await stream.ids() == [1, 2, 3]
        await stream.flush()
        assert await stream.ids() == [1, 2, 3]


@pytest.mark.slow
async def test_server_flushes_rows_of_an_earlier_process_after_a_full_interval(tmp_path: Path) -> None:
    """A new process does not know the age of the rows, so the interval starts again.

    If it flushed them at once, each restart of a busy server would commit small files.
    """
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2})
        snapshots = await stream.count_snapshots()
    async with open_stream_server(tmp_path) as stream:
        await asyncio.sleep(2)  # A flush without a delay would end in this time.
        assert await stream.count_snapshots() == snapshots
        assert await stream.ids() == [1, 2]
    async with open_stream_server(tmp_path, stream_flush_interval_ms=100) as stream:
        async with asyncio.timeout(PATIENCE_S):
            while await stream.count_snapshots() == snapshots:
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_new_column_appears_while_rows_of_the_old_schema_wait(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a"})

    def add_column() -> None:
        with stream.catalog.load_table("db.t").update_schema() as update:
            update.add_column("more", StringType())
            update.rename_column("name", "title")

    await asyncio.to_thread(add_column)
    await stream.post({"id": 2, "title": "b", "more": "m"})
    for _ in range(2):
        rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
        actual_rows = sorted((row["id"], row["title"], row["more"]) for row in rows)
        assert actual_rows == [(1, "a", None), (2, "b", "m")]
        await stream.flush()


async def test_rows_are_refused_at_the_limit_of_memory_until_a_flush(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path, stream_memory_bytes=1 << 20) as stream:
        await create_stream_table(stream)
        row = {"id": 1, "name": "x" * 300_000}
        for _ in range(40):  # Four rows fill the memory of 1 MiB, unless a flush frees it meanwhile.
            url = f"{stream.server.url}/api/v1/tables/db/t/rows"
            async with stream.server.http.post(url, json=[row]) as answer:
                if answer.status == 429:
                    assert answer.headers["Retry-After"] == "1"
                    break
        else:
            # A flush ran while the writer was writing.
            assert await stream.count_snapshots() > 1
        (table,) = stream.server.components.streams.tables.values()
        await until(lambda: table.size_bytes == 0)
        await stream.post({"id": 2})


async def test_large_bodies_wait_for_memory_instead_of_being_refused(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = stream.server.components.streams
    await stream.post({"id": 0})
    (table,) = streams.tables.values()
    await until(lambda: table.size_bytes == 0)
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    table.appending_bytes = streams._context.settings.stream_memory_bytes // 2  # This is the state during a slow flush.
    body = json.dumps([{"id": 1, "name": "x" * 300_000}]).encode()
    # The first three bodies announce their length, and the server reads them only when there is memory. The others
    # do not, so the server reads them first.
    tasks = [asyncio.create_task(stream.send(body)) for _ in range(3)]
    tasks += [asyncio.create_task(stream.send(yield_body(body))) for _ in range(2)]
    await until(lambda: (streams.body_room.unreceived_body_count, streams.body_room.waiter_count) == (3, 2))
    # A small body is refused, because the client can easily send it again.
    assert (await stream.send_and_read_error(b'[{"id": 2}]'))[0] == 429
    table.appending_bytes = 0
    assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 5
    assert (table.arriving_bytes, table.reserved_bytes, streams.body_room.waiter_count) == (0, 0, 0)
    assert await stream.ids() == [0, *[1] * 5]
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", 0.0)
    table.appending_bytes = streams._context.settings.stream_memory_bytes // 2
    assert (await stream.send(body))[0] == 429
    assert table.reserved_bytes == 0
    table.appending_bytes = 0


async def test_bodies_wait_at_most_a_limited_time_for_an_announced_body(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", 0.01)
    await stream.post({"id": 0})
    components = stream.server.components
    # `room` makes large bodies of rows wait for memory.
    room, half_bytes = components.streams.body_room, components.settings.stream_memory_bytes // 2
    (table,) = components.streams.tables.values()
    loaded_table = await components.catalog.tables.load(("db",), "t")
    async with asyncio.timeout(PATIENCE_S), room.await_arrival(loaded_table, half_bytes, "ann"):
        async with room.await_arrival(loaded_table, half_bytes, "bob"):
            assert table.arriving_bytes == 2 * half_bytes
        async with room.reserve([(loaded_table, half_bytes // 2)], "bob"):  # The body of Ann reserves nothing.
            pass
    assert (table.arriving_bytes, room.unreceived_body_count) == (0, 0)


async def test_body_that_has_no_room_beside_earlier_bodies_is_refused_after_a_limited_time(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body reserves memory (`room`) before it is decoded. Bodies without memory wait in the order of the requests."""
    await stream.post({"id": 0})
    components = stream.server.components
    room, half_bytes = components.streams.body_room, components.settings.stream_memory_bytes // 2
    (table,) = components.streams.tables.values()
    await until(lambda: table.size_bytes == 0)
    loaded_table = await components.catalog.tables.load(("db",), "t")

    async def reserve(size_bytes: int) -> int:
        async with asyncio.timeout(2 * PATIENCE_S), room.reserve([(loaded_table, size_bytes)], "bob"):
            return table.reserved_bytes

    # The number of waiting bodies has no limit in this test.
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room._WAITING_SHARE", 1e9)
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    table.appending_bytes = half_bytes // 2
    earlier_task = asyncio.create_task(reserve(half_bytes))  # There is no memory for this body.
    await until(lambda: room.waiter_count == 1)
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", 0.01)
    with pytest.raises(TooManyRequests):
        await reserve(half_bytes)
    assert await reserve(half_bytes // 8) == half_bytes // 8
    table.appending_bytes = 0
    assert await earlier_task == half_bytes
    assert (table.reserved_bytes, room.waiter_count) == (0, 0)


@pytest.mark.slow
async def test_unflushed_table_cannot_use_the_memory_of_other_tables(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path, stream_memory_bytes=1 << 20) as stream:
        await create_stream_table(stream)
        await asyncio.to_thread(
            stream.catalog.create_table, "db.other", SCHEMA, properties={ENABLED: "true", "format-version": "2"}
        )
        await stream.post({"id": 0})
        streams = stream.server.components.streams
        (uuid,) = streams.tables
        await until(lambda: streams.tables[uuid].size_bytes == 0)
        streams._flushes[uuid].not_before_s = float("inf")  # This is the state after several failed flushes.
        row = json.dumps([{"id": 1, "name": "x" * 100_000}]).encode()
        statuses = [(await stream.send(row))[0] for _ in range(8)]
        assert (statuses[0], statuses[-1]) == (200, 429), statuses
        url = f"{stream.server.url}/api/v1/tables/db/other/rows"
        for _ in range(8):
            async with stream.server.http.post(url, data=row, headers={"Content-Type": "application/json"}) as answer:
                assert answer.status == 200, await answer.text()
            (other_uuid,) = streams.tables.keys() - {uuid}
            await streams.flush(other_uuid)


async def test_bodies_are_refused_if_they_are_too_large_or_the_table_is_paused_or_the_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoded size of rows decides whether they are too large.

    Bodies are refused at once during a pause or if the queue is full.
    """
    module = "seamark.metaserver.streams.incoming.body_room"
    monkeypatch.setattr(f"{module}.WAIT_S", PATIENCE_S)
    async with open_stream_server(tmp_path, stream_memory_bytes=1 << 20, bodies_memory_bytes=4 << 20) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 0})
        streams = stream.server.components.streams
        (table,) = streams.tables.values()
        await until(lambda: table.size_bytes == 0)
        large_body = json.dumps([{"id": 1, "name": "x" * 600_000}]).encode()
        assert (await stream.send(large_body))[0] == 413
        assert (await stream.send(b"[" + b" " * 600_000 + b'{"id": 1}]'))[0] == 200
        await stream.flush()
        table.appending_bytes = 1 << 19  # This is the state during a slow flush.
        body = json.dumps([{"id": 1, "name": "x" * 300_000}]).encode()
        refused_sends = [asyncio.create_task(stream.send_and_read_error(yield_body(body))) for _ in range(3)]
        refused_sends.append(asyncio.create_task(stream.send_and_read_error(body)))
        # Now the server has not yet received one body, and three bodies wait for memory.
        await until(lambda: (streams.body_room.unreceived_body_count, streams.body_room.waiter_count) == (1, 3))
        # Waiting bodies may use a quarter of `bodies_memory_bytes`, and a further body would exceed this size.
        status, message = await stream.send_and_read_error(yield_body(body))
        assert (status, "(stream_memory_bytes)" in message) == (429, True), message
        async with stream.server.http.post(
            f"{stream.server.url}/api/v1/tables/db/t/stream/pause", json={"reason": "move"}
        ) as answer:
            assert answer.status == 200, await answer.text()
        assert [status for status, _ in await asyncio.gather(*refused_sends)] == [503] * 4
        status, message = await stream.send_and_read_error(body)
        assert (status, "move" in message) == (503, True), message
        assert (table.reserved_bytes, streams.body_room.waiter_count) == (0, 0)
        table.appending_bytes = 0


async def test_large_bodies_of_one_principal_cannot_use_all_places(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamark.metaserver.streams.incoming.body_room.WAIT_S", PATIENCE_S)
    await stream.post({"id": 0})
    components = stream.server.components
    streams = components.streams
    (table,) = streams.tables.values()
    await until(lambda: table.size_bytes == 0)
    loaded_table = await components.catalog.tables.load(("db",), "t")
    room = BodyReservations(
        Settings(auth="token"), components.clock, streams.tables, streams._check_memory, streams.pauses, StreamCounts()
    )

    async def reserve(principal_name: str) -> None:
        async with room.reserve([(loaded_table, 1)], principal_name):
            pass

    table.appending_bytes = components.settings.stream_memory_bytes // 2  # This is the state during a slow flush.
    principal_limit = body_room._PRINCIPAL_WAITERS_MAX  # The limit of waiting bodies of one principal
    waiting_tasks = [asyncio.create_task(reserve("ann")) for _ in range(principal_limit)]
    await until(lambda: room.waiter_count == principal_limit)
    with pytest.raises(TooManyRequests):
        await reserve("ann")
    waiting_tasks.append(asyncio.create_task(reserve("bob")))
    await until(lambda: room.waiter_count == principal_limit + 1)
    table.appending_bytes = 0
    await asyncio.gather(*waiting_tasks)
    assert (room.waiter_count, table.reserved_bytes) == (0, 0)


async def test_drop_hides_unflushed_rows_and_undrop_restores_them(stream: StreamServer) -> None:
    await stream.post({"id": 1})
    await stream.flush()
    await stream.post({"id": 2})
    await asyncio.to_thread(stream.catalog.drop_table, "db.t")
    streams = stream.server.components.streams
    await until(lambda: _mark_flushes_as_due(stream) and not streams.tables)
    _, dropped_tables = await stream.server.get("/api/v1/dropped")
    async with stream.server.http.post(
        f"{stream.server.url}/api/v1/dropped/{dropped_tables['dropped'][0]['id']}/undrop"
    ) as answer:
        assert answer.status == 200, await answer.text()
    assert await stream.ids() == [1, 2]


def _mark_flushes_as_due(stream: StreamServer) -> bool:
    """Make each table due for a flush. Always return True, so that a condition of `until` can call this each time."""
    for state in stream.server.components.streams._flushes.values():
        state.is_due = True
    return True


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + examples(6, number_in_ordinary_runs=1)))
async def test_readers_get_each_row_once_during_random_writes_flushes_and_restarts(tmp_path: Path, seed: int) -> None:
    """Stream writers, batch appends, flushes and restarts change a table concurrently.

    Every reader gets each row that was acknowledged before its read, exactly once.
    """
    import random

    rng, acknowledged_numbers = random.Random(seed), Counter[int]()
    sequences, sent_count = Counter[str](), 0

    async def write(stream: StreamServer, producer: str) -> None:
        nonlocal sent_count
        for _ in range(rng.randint(1, 8)):
            numbers = [sent_count := sent_count + 1 for _ in range(rng.randint(1, 20))]
            rows = [{"id": number, "name": rng.choice("abc")} for number in numbers]
            for _ in range(rng.choice([1, 1, 2])):  # The client may repeat the request, as after a lost answer.
                await stream.post(*rows, query=f"?producer={producer}&sequence={sequences[producer]}")
            sequences[producer] += 1
            acknowledged_numbers.update(numbers)
            await asyncio.sleep(rng.random() / 50)

    async def append(stream: StreamServer) -> None:
        nonlocal sent_count
        number = sent_count = sent_count + 1

        def commit() -> bool:
            arrow = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string())])
            table = stream.catalog.load_table("db.t")
            try:
                table.append(pa.table({"id": [number], "name": ["z"]}, schema=arrow))
            except CommitFailedException:
                return False
            return True

        if await asyncio.to_thread(commit):
            acknowledged_numbers[number] += 1

    async def read(stream: StreamServer) -> None:
        for _ in range(rng.randint(1, 4)):
            numbers_before = dict(acknowledged_numbers)
            rows = Counter(await stream.ids())
            assert not [number for number, times in rows.items() if times > 1], "a row is repeated"
            assert not numbers_before.keys() - rows.keys(), "an acknowledged row is missing"
            assert rows.keys() <= set(range(1, sent_count + 1))

    async def flush(stream: StreamServer) -> None:
        await asyncio.sleep(rng.random() / 10)
        if stream.server.components.streams.tables:
            await stream.flush()

    schema = Schema(*SCHEMA.fields[:2])
    for run_number in range(2):
        async with open_stream_server(tmp_path) as stream:
            if run_number == 0:
                shards = {"seamark.stream.shards": str(rng.choice([1, 3]))}
                await create_stream_table(
                    stream, schema, partition_spec=rng.choice([BY_NAME, PartitionSpec()]), properties=shards
                )
            for _ in range(2):
                await asyncio.gather(
                    write(stream, "p"), write(stream, "q"), append(stream), read(stream), read(stream), flush(stream)
                )
            assert await stream.ids() == sorted(acknowledged_numbers)
    async with open_stream_server(tmp_path) as stream:
        assert await stream.ids() == sorted(acknowledged_numbers)
        await stream.flush()
        assert await stream.ids() == sorted(acknowledged_numbers)


@pytest.mark.slow
async def test_fresh_files_are_deleted_after_their_retention(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path, stream_fresh_retention_s=1) as stream:
        await create_stream_table(stream)
        for number in range(4):
            await stream.post({"id": number})
            await stream.ids()
        await stream.flush()
        folders = list(tmp_path.rglob(FRESH_FOLDER))
        assert any(os.listdir(folder) for folder in folders)
        (table,) = stream.server.components.streams.tables.values()
        deadline_s = time.monotonic() + PATIENCE_S
        while any(os.listdir(folder) for folder in folders):
            assert time.monotonic() < deadline_s
            await table.clean()
            await asyncio.sleep(0.1)
        assert await stream.ids() == [0, 1, 2, 3]


async def test_the_writer_of_the_client_sends_rows_in_order_and_once(stream: StreamServer) -> None:
    def write() -> int:
        with seamark.stream_writer(SeamarkClient(stream.server.url), ("db", "t"), request_rows=7) as writer:
            for number in range(50):
                writer.write({"id": number})
            writer.write([{"id": 50}, {"id": 51, "name": "x"}])
            writer.write(pa.table({"id": list(range(52, 70))}))
            writer.flush()
            return writer.rows

    assert await asyncio.to_thread(write) == 70
    assert await stream.ids() == list(range(70))


async def test_writer_raises_for_a_refused_row_and_accepts_no_more_rows(stream: StreamServer) -> None:
    def write() -> str:
        writer = seamark.stream_writer(SeamarkClient(stream.server.url), ("db", "t"))
        writer.write({"id": "x"})
        with pytest.raises(StreamClosed) as error:
            writer.flush()
        with pytest.raises(StreamClosed):
            writer.write({"id": 1})
        with pytest.raises(StreamClosed):
            writer.close()
        return str(error.value)

    assert 'the value "x" is not a valid long' in await asyncio.to_thread(write)
    assert await stream.ids() == []


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("version", ["2", "3"])
async def test_header_lets_an_engine_that_plans_itself_read_fresh_rows(tmp_path: Path, version: str) -> None:
    async with open_stream_server(tmp_path, scan_planning_mode="client") as stream:
        await create_stream_table(stream, properties={"format-version": version})
        await stream.post({"id": 1, "name": "a"})
        await stream.flush()
        await stream.post({"id": 2, "name": "b"}, {"id": 3})

        def read() -> tuple[list[int], list[int], int]:
            with (
                RestCatalog("fresh", uri=stream.server.url, **{"header.X-Seamark-Fresh": "true"}) as fresh_catalog,
                RestCatalog("plain", uri=stream.server.url) as plain_catalog,
            ):
                table = fresh_catalog.load_table("db.t")
                actual_ids = sorted(table.scan().to_arrow().column("id").to_pylist())
                filtered_ids = table.scan(row_filter="id >= 3").to_arrow().column("id").to_pylist()
                return actual_ids, filtered_ids, plain_catalog.load_table("db.t").scan().count()

        assert await asyncio.to_thread(read) == ([1, 2, 3], [3], 1)
        await stream.flush()
        assert await asyncio.to_thread(read) == ([1, 2, 3], [3], 3)


async def test_a_commit_that_removes_rows_conflicts_with_rows_that_it_has_not_read(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a"}, {"id": 2, "name": "b"})
    await stream.flush()
    await stream.post({"id": 3, "name": "a"})
    assert await stream.ids() == [1, 2, 3]

    def delete() -> None:
        stream.catalog.load_table("db.t").delete("name = 'a'")

    with pytest.raises(ValidationException, match="matching the filter"):
        await asyncio.to_thread(delete)
    await stream.post({"id": 4, "name": "b"})
    await asyncio.to_thread(delete)
    assert await stream.ids() == [2, 4]
    await stream.post({"id": 5, "name": "b"})
    client = SeamarkClient(stream.server.url)
    await asyncio.to_thread(partial(seamark.delete, client, ("db", "t"), where="name = 'b'"))
    assert await stream.ids() == []


async def test_replaced_table_has_no_earlier_rows(stream: StreamServer) -> None:
    await stream.post({"id": 1})
    url = f"{stream.server.url}/v1/namespaces/db/tables/t"
    replace = {"requirements": [], "updates": [{"action": "remove-snapshot-ref", "ref-name": "main"}]}
    async with stream.server.http.post(url, json=replace) as answer:
        assert answer.status == 200, await answer.text()
    await stream.post({"id": 2})
    await stream.flush()
    assert await stream.ids() == [2]


async def test_table_without_its_log_stays_readable_and_loses_no_new_rows(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1}, {"id": 2})
        await stream.flush()
    shutil.rmtree(tmp_path / "streams")
    async with open_stream_server(tmp_path) as stream:
        status, message = await stream.send_and_read_error(b'[{"id": 3}]')
        assert (status, "restore it" in message) == (503, True)
        assert await stream.ids() == [1, 2]


@pytest.mark.slow
async def test_second_log_refuses_rows_while_the_first_has_unflushed_rows(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
    (tmp_path / "streams").rename(tmp_path / "first")
    async with open_stream_server(tmp_path) as stream:
        status, message = await stream.send_and_read_error(b'[{"id": 2}]')
        assert (status, "write to the server that has that log" in message) == (503, True)
    shutil.rmtree(tmp_path / "streams")
    (tmp_path / "first").rename(tmp_path / "streams")
    async with open_stream_server(tmp_path) as stream:
        assert await stream.ids() == [1]


async def test_a_plan_in_pages_keeps_each_fresh_file_after_a_flush(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path, plan_inline_limit=2, plan_page_size=2) as stream:
        await create_stream_table(stream, partition_spec=BY_NAME)
        await stream.post(*({"id": number, "name": str(number)} for number in range(9)))
        assert await stream.ids() == list(range(9))
        path = f"{stream.server.url}/v1/namespaces/db/tables/t"
        async with stream.server.http.post(f"{path}/plan", json={}) as answer:
            plan_tasks = (await answer.json())["plan-tasks"]
        await stream.flush()
        await stream.post({"id": 9, "name": "9"})
        rows = 0
        for task in plan_tasks:
            async with stream.server.http.post(f"{path}/tasks", json={"plan-task": task}) as answer:
                page = await answer.json()
            rows += sum(scan_task["data-file"]["record-count"] for scan_task in page["file-scan-tasks"])
        assert rows == 9
        assert await stream.ids() == list(range(10))


async def test_state_of_a_stream_reports_its_unflushed_rows(stream: StreamServer) -> None:
    path = "/api/v1/tables/db/t/stream"
    assert (await stream.server.get(path))[0] == 400  # The table has no stream before its first row.
    await stream.post({"id": 1}, {"id": 2})
    await stream.flush()
    await stream.post({"id": 3})
    await stream.ids()  # A read writes the unflushed row to a fresh file.
    status, state = await stream.server.get(path)
    assert (status, state["shards"]) == (200, [{"shard": 0, "flushed": 2, "durable": 3}])
    assert (state["waiting-rows"], state["fresh-files"], state["waiting-bytes"] > 0) == (1, 1, True)
    url = f"{stream.server.url}/api/v1/tables/db/t/flush"
    async with stream.server.http.post(url) as answer:
        assert await answer.json() == {"rows": 1}
    assert (await stream.server.get(path))[1]["waiting-rows"] == 0


async def test_row_without_columns_is_a_row_of_nulls(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(
            stream, Schema(NestedField(1, "id", LongType()), NestedField(2, "name", StringType()))
        )
        assert (await stream.post({}))["rows"] == 1
        rows = await asyncio.to_thread(lambda: stream.catalog.load_table("db.t").scan().to_arrow().to_pylist())
        assert rows == [{"id": None, "name": None}]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("fields", [[1], [{"id": [1]}], {"a": 1}])
async def test_invalid_schema_of_a_stream_table_is_refused(stream: StreamServer, fields: Any) -> None:
    await stream.post({"id": 1})
    update = {"action": "add-schema", "schema": {"type": "struct", "fields": fields}}
    body = {"requirements": [], "updates": [update]}
    async with stream.server.http.post(f"{stream.server.url}/v1/namespaces/db/tables/t", json=body) as answer:
        assert answer.status == 400, await answer.text()
