"""Tests of problems that users of other streaming systems have reported. Each test names the report.

Tests in other modules cover these reports:
- duckdb/ducklake#650, a flush during inserts duplicates rows: the random writers of `test_rows_over_http`, and the
  mutation `flush_without_comparing` of `test_simulation`.
- apache/fluss#4372, a table that is not flushed takes the memory of all tables: `test_rows_over_http`.
- risingwavelabs/risingwave#21376, the state of an exactly-once writer grows without end: the tests of the retention in
  `tests/log/test_segments.py`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import At
from seamark.connector.write.compaction import CompactionPolicy, compact
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.store.model import Entry
from seamark.metaserver.streams.catalog_tables import CatalogTables
from seamark.metaserver.streams.stream_properties import ENABLED, FLUSH_INTERVAL, SHARDS
from seamark.metaserver.streams.stream_table import StreamTable
from seamark.metaserver.streams.streams import Streams
from tests.streams import test_keyed_tables
from tests.streams.test_read_stream import append_batch, list_ids, read_batches
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, create_stream_table, open_stream_server
from tests.waits import until


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        yield stream


COMPACTION = CompactionPolicy(target_bytes=1 << 20, min_files=2)
"""A policy with which two small files suffice for a compaction."""


async def flush_first_row(stream: StreamServer) -> None:
    """Append a row, and wait until it is flushed.

    The server flushes the first row of an empty table in the background at once.
    """
    await stream.post({"id": 0})
    await stream.flush()
    await until(lambda: not any(state.task for state in stream.server.components.streams._flushes.values()))


async def post_to(stream: StreamServer, name: str, *rows: dict[str, Any]) -> None:
    async with stream.server.http.post(f"{stream.server.url}/api/v1/tables/db/{name}/rows", json=rows) as answer:
        assert answer.status == 200, await answer.text()


async def create_table(stream: StreamServer, name: str, **properties: str) -> None:
    await asyncio.to_thread(
        stream.catalog.create_table, f"db.{name}", SCHEMA, properties={ENABLED: "true", **properties}
    )


async def wait_for_snapshots(stream: StreamServer, name: str, count: int) -> None:
    """Wait until a table has at least `count` snapshots."""
    async with asyncio.timeout(60):
        while len((await asyncio.to_thread(stream.catalog.load_table, f"db.{name}")).metadata.snapshots) < count:
            await asyncio.sleep(0.02)


async def test_rows_are_visible_at_once_and_a_flush_makes_one_file_of_all(stream: StreamServer) -> None:
    """risingwavelabs/risingwave#21376: one setting determines both file size and visibility.

    risingwavelabs/risingwave#26372: rows are invisible until a checkpoint, which may be minutes later. In this test the
    interval of flushes is an hour.
    """
    await flush_first_row(stream)
    for number in range(1, 9):
        await stream.post({"id": number})
        assert await stream.ids() == list(range(number + 1))
    assert await stream.flush() == 8
    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    files = await asyncio.to_thread(lambda: table.inspect.data_files().to_pylist())
    assert sorted(file["record_count"] for file in files) == [1, 8]


async def test_first_rows_of_an_ended_server_are_committed_after_its_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """risingwavelabs/risingwave#26372: rows are invisible until a checkpoint, which may be minutes later.

    Engines plan no scan of a table without a snapshot, so the first rows need a flush.
    """

    async def refuse(*_: Any, **__: Any) -> None:
        raise CommitConflict("another commit was faster")

    with monkeypatch.context() as patch:
        patch.setattr(CatalogTables, "commit", refuse)
        async with open_stream_server(tmp_path) as stream:
            await create_stream_table(stream)
            await stream.post({"id": 1})
            assert await stream.count_snapshots() == 0
    async with open_stream_server(tmp_path) as stream:
        await wait_for_snapshots(stream, "t", count=1)
        assert await stream.ids() == [1]


@pytest.mark.slow
async def test_waiting_rows_use_no_space_in_the_database(stream: StreamServer, tmp_path: Path) -> None:
    """sipcapture/homer#765: small rows that are never flushed fill the catalog's database."""

    def count_bytes() -> int:
        """Return the size of all values in the database."""
        (path,) = tmp_path.rglob("seamark.db")
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return sum(
                len(str(value))
                for name in names
                for row in database.execute(f'SELECT * FROM "{name}"')
                for value in row
            )

    await flush_first_row(stream)
    bytes_before = await asyncio.to_thread(count_bytes)
    for number in range(20):
        await stream.post({"id": number, "name": "x" * 1_000})
    (table,) = stream.server.components.streams.tables.values()
    assert table.unflushed_rows == 20
    assert await asyncio.to_thread(count_bytes) - bytes_before < 1_000


async def test_last_rows_of_a_writer_are_flushed_without_further_writes(stream: StreamServer) -> None:
    """sipcapture/homer#765: the last small rows are never flushed."""
    await create_table(stream, "u", **{FLUSH_INTERVAL: "100"})
    await post_to(stream, "u", {"id": 1})
    await wait_for_snapshots(stream, "u", count=1)
    await post_to(stream, "u", {"id": 2})
    await wait_for_snapshots(stream, "u", count=2)


@pytest.mark.slow
async def test_idle_shards_delay_neither_flushes_nor_readers(tmp_path: Path) -> None:
    """In apache/iceberg#17811, idle tasks delayed every commit. Here, empty shards are the idle parts."""
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={SHARDS: "8"})
        for number in range(3):
            await stream.post({"id": number}, query=f"?producer=p&sequence={number}")
            assert await stream.ids() == list(range(number + 1))
            assert await stream.flush() + await stream.flush() <= 1  # The server itself may have flushed the row.
            assert sorted(list_ids(await read_batches(stream))) == list(range(number + 1))
        (table,) = stream.server.components.streams.tables.values()
        assert sorted(table.flushed.values()) == [0] * 7 + [3]  # All rows of a producer are in one shard.


async def test_first_flush_keeps_existing_rows_of_the_table(tmp_path: Path) -> None:
    """In apache/iceberg#13536, the first commit ignored rows that the table already had."""
    async with open_stream_server(tmp_path) as stream:
        await asyncio.to_thread(stream.catalog.create_table, "db.t", SCHEMA)
        await append_batch(stream, 1, 2)
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        change = table.transaction().set_properties({ENABLED: "true"})
        await asyncio.to_thread(change.commit_transaction)
        await stream.post({"id": 3})
        await append_batch(stream, 4)
        for _ in range(2):
            assert await stream.ids() == [1, 2, 3, 4]
            assert sorted(list_ids(await read_batches(stream))) == [1, 2, 3, 4]
            await stream.flush()  # The second read comes after the flush.


async def test_flush_begins_when_the_oldest_row_reaches_the_interval(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apache/iceberg#11796: commits are late at random. Later rows do not move the time of a flush."""
    await flush_first_row(stream)
    streams = stream.server.components.streams
    (table,), (state,) = streams.tables.values(), streams._flushes.values()
    state.interval_ms = 1_000_000  # No flush is due until the test moves the clock.
    await stream.post({"id": 1})
    oldest_ms = table.oldest_ms
    assert oldest_ms is not None
    await stream.post({"id": 2})
    assert table.oldest_ms == oldest_ms
    state.interval_ms = 1_000_000
    clock = stream.server.components.clock
    # One millisecond before the end of the interval, no flush is due.
    monkeypatch.setattr(type(clock), "now_ms", lambda _: oldest_ms + 999_999)
    await streams.start_due_flushes()
    assert state.task is None
    monkeypatch.setattr(type(clock), "now_ms", lambda _: oldest_ms + 1_000_000)
    await streams.start_due_flushes()
    assert state.task is not None
    await state.task
    assert table.unflushed_rows == 0


@pytest.mark.slow
async def test_tables_whose_storage_hangs_delay_no_other_table(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In apache/fluss#3259 and apache/fluss#4372, one slow table blocked all others."""
    slow_uuids, is_released, waiting_uuids = set[str](), asyncio.Event(), set[str]()
    store = StreamTable._create

    async def hang(table: StreamTable, files: Any, *, durable: bool) -> None:
        if table.uuid in slow_uuids and not is_released.is_set():
            waiting_uuids.add(table.uuid)
            await is_released.wait()
        await store(table, files, durable=durable)

    monkeypatch.setattr(StreamTable, "_create", hang)
    names = [f"slow{number}" for number in range(10)]
    for name in names:
        await create_table(stream, name, **{FLUSH_INTERVAL: "100"})
        table = await asyncio.to_thread(stream.catalog.load_table, f"db.{name}")
        slow_uuids.add(str(table.metadata.table_uuid))
        await post_to(stream, name, {"id": 1})
    await until(lambda: waiting_uuids == slow_uuids)
    await stream.post({"id": 1})
    await wait_for_snapshots(stream, "t", count=1)
    await stream.post({"id": 2})
    assert await stream.ids() == [1, 2]
    (other_uuid,) = stream.server.components.streams.tables.keys() - slow_uuids
    assert await stream.server.components.streams.flush(other_uuid) == 1
    is_released.set()
    await wait_for_snapshots(stream, names[-1], count=1)


@pytest.mark.slow
async def test_table_that_opens_slowly_after_a_restart_delays_no_other_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apache/fluss#1360: after a restart, it takes long until all tables work again."""
    async with open_stream_server(tmp_path) as stream:
        uuids = {}
        for name in ("t", "u"):
            await create_table(stream, name)
            await post_to(stream, name, {"id": 1})
            await wait_for_snapshots(stream, name, count=1)
            await post_to(stream, name, {"id": 2})
            table = await asyncio.to_thread(stream.catalog.load_table, f"db.{name}")
            uuids[str(table.metadata.table_uuid)] = name
    slow_uuid = min(uuids)  # The server opens tables in the order of their UUIDs.
    make, is_released, is_waiting = Streams._make_table, asyncio.Event(), asyncio.Event()

    async def make_after_release(streams: Streams, entry: Entry, metadata: TableMetadata) -> StreamTable:
        if entry.uuid == slow_uuid:
            is_waiting.set()
            await is_released.wait()
        return await make(streams, entry, metadata)

    monkeypatch.setattr(Streams, "_make_table", make_after_release)
    async with open_stream_server(tmp_path, stream_flush_interval_ms=100) as stream:
        async with asyncio.timeout(60):
            await is_waiting.wait()
        await wait_for_snapshots(stream, uuids[max(uuids)], 2)
        assert slow_uuid not in stream.server.components.streams.tables
        is_released.set()
        await wait_for_snapshots(stream, uuids[slow_uuid], count=2)


@pytest.mark.slow
async def test_updates_of_the_same_keys_do_not_let_the_table_grow(tmp_path: Path) -> None:
    """risingwavelabs/risingwave#21376: an exactly-once table grows without end.

    Flushes and compactions run at the same time, and both succeed.
    """
    async with open_stream_server(tmp_path) as stream:
        properties = {"format-version": "3", "write.merge.mode": "merge-on-read"}
        await create_stream_table(stream, test_keyed_tables.SCHEMA, properties=properties)
        client = SeamarkClient(stream.server.url)
        for number in range(6):
            await stream.post(
                *({"id": key, "name": f"n{number}"} for key in range(5)), query=f"?producer=p&sequence={number}"
            )
            await asyncio.gather(
                stream.flush(), *([asyncio.to_thread(compact, client, "db.t", policy=COMPACTION)] if number else [])
            )
            assert await test_keyed_tables.read_names(stream) == dict.fromkeys(range(5), f"n{number}")
        await asyncio.to_thread(compact, client, "db.t", policy=COMPACTION)
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        files = await asyncio.to_thread(lambda: table.inspect.data_files().to_pylist())
        assert sum(file["record_count"] for file in files) == 5
        log = await stream.server.components.streams.open_log(
            await stream.server.components.catalog.tables.load_entry(("db",), "t"),
            await stream.server.components.catalog.documents.table(table.metadata_location),
        )
        # The log keeps no row, because all rows are flushed: the released offset is the end of each shard.
        assert all(state.released == state.watermark for state in log.list_shards().values())


async def test_deletion_vectors_that_a_flush_replaces_stay_for_earlier_snapshots(tmp_path: Path) -> None:
    """A flush replaces the deletion vector of a file. The new vector includes the deletes of the old vector."""
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, test_keyed_tables.SCHEMA, properties={"format-version": "3"})
        expected: list[dict[int, str]] = []
        snapshot_ids: list[int] = []
        model: dict[int, str] = {}
        for changed_rows in (range(6), (0, 1), (1, 2), (3,)):
            model |= {key: f"n{len(expected)}" for key in changed_rows}
            await stream.post(*({"id": key, "name": model[key]} for key in changed_rows))
            assert await stream.flush() in (0, len(changed_rows))
            table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
            snapshot_ids.append(table.metadata.current_snapshot_id or 0)
            expected.append(dict(model))
            assert await test_keyed_tables.read_names(stream) == model
        client = SeamarkClient(stream.server.url)
        for snapshot_id, rows in zip(snapshot_ids, expected, strict=True):
            scan = await asyncio.to_thread(seamark.scan, client, "db.t", at=At(snapshot_id=snapshot_id))
            actual_rows = (await asyncio.to_thread(scan.to_arrow)).to_pylist()
            assert sorted((row["id"], row["name"]) for row in actual_rows) == sorted(rows.items())


async def test_flush_overtaken_by_a_compaction_is_repeated_on_the_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction commits after the flush has searched for replaced rows, and before the flush commits."""
    async with open_stream_server(tmp_path) as stream:
        properties = {"format-version": "3", "write.merge.mode": "merge-on-read"}
        await create_stream_table(stream, test_keyed_tables.SCHEMA, properties=properties)
        for number in range(3):
            await stream.post({"id": number, "name": "a"}, {"id": 9, "name": f"n{number}"})
            await stream.flush()
        commit, attempts = CatalogTables.commit, []

        async def commit_after_a_compaction(tables: CatalogTables, *args: Any, **options: Any) -> None:
            attempts.append(args)
            if len(attempts) == 1:
                await asyncio.to_thread(compact, SeamarkClient(stream.server.url), "db.t", policy=COMPACTION)
            await commit(tables, *args, **options)

        monkeypatch.setattr(CatalogTables, "commit", commit_after_a_compaction)
        await stream.post({"id": 9, "name": "last"})
        assert await stream.flush() == 1
        table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
        operations = [snapshot.summary.operation.value for snapshot in table.metadata.snapshots if snapshot.summary]
        assert "replace" in operations, operations
        assert await test_keyed_tables.read_names(stream) == {0: "a", 1: "a", 2: "a", 9: "last"}
