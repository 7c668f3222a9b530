"""Tests of servers with the role read. They return every row, and change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import RESTError

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.sql.session import SqlSession
from seamark.formats.runtime.errors import ReadOnlyServer
from seamark.metaserver.streams.stream_properties import ENABLED
from tests.services.kafka import Kafka
from tests.services.seamark import Seamark
from tests.streams.test_fleet import make_shared_settings
from tests.streams.test_fresh_reads import TABLE, read_ids_with_own_plan, scan_ids
from tests.streams.test_read_stream import list_ids, read_batches
from tests.streams.test_rows_over_http import NEVER_MS, SCHEMA, create_stream_table, open_stream_server
from tests.streams.test_stream_commands import record_calls
from tests.waits import until

READ_SERVER = {"role": "read", "writer_urls": ("http://writer:8181",)}


async def test_read_server_without_a_log_shows_flushed_rows_and_refuses_changes(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as writer, open_stream_server(tmp_path, **READ_SERVER) as reader:
        await create_stream_table(writer)
        await writer.post({"id": 1, "name": "a"})
        await writer.flush()
        await writer.post({"id": 2, "name": "b"})
        url = reader.server.url
        assert await asyncio.to_thread(scan_ids, url) == [1]
        components = reader.server.components
        assert not components.streams.has_log
        assert not components.services_status.enabled
        refusal = (
            "This server accepts no changes, because its setting role is read: send {} to one of http://writer:8181"
        )
        for method, path, operation in (
            ("POST", "/api/v1/tables/db/t/rows", "appendRows"),
            ("POST", "/api/v1/rows", "appendRowsToTables"),
            ("POST", "/api/v1/tables/db/t/flush", "flushRows"),
            ("POST", "/v1/namespaces/db/tables/t", "updateTable"),
            ("DELETE", "/v1/namespaces/db/tables/t", "dropTable"),
            ("POST", "/v1/namespaces", "createNamespace"),
            ("POST", "/v1/transactions/commit", "commitTransaction"),
        ):
            async with reader.server.http.request(method, url + path, json={}) as answer:
                error = (await answer.json())["error"]
            assert (answer.status, error["type"]) == (406, "UnsupportedOperationException")
            assert error["message"] == refusal.format(operation)
        uuid = (await components.catalog.tables.load_entry(("db",), "t")).uuid
        with pytest.raises(ReadOnlyServer, match="send a statement or request that flushes a stream table to one of"):
            await components.streams.flush(uuid)
        assert await writer.count_snapshots() == 1


@pytest.mark.slow
async def test_read_server_returns_waiting_rows_and_never_flushes_them(
    kafka: Kafka, postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_shared_settings(kafka, postgres_url, tmp_path)
    async with open_stream_server(tmp_path / "b", stream_flush_interval_ms=100, **settings, **READ_SERVER) as reader:
        async with open_stream_server(tmp_path / "a", **settings) as writer:
            await create_stream_table(writer)
            await writer.post({"id": 1})
            await writer.flush()
            token = (await writer.post({"id": 2}))["token"]
            assert await reader.ids() == [1, 2]
            url = reader.server.url
            assert await asyncio.to_thread(lambda: scan_ids(url, after=token)) == [1, 2]
            assert list_ids(await read_batches(reader, from_="earliest")) == [1, 2]
        # The writer has stopped, so the rows stay in the log until a writing server flushes them.
        streams = reader.server.components.streams
        (table,) = streams.tables.values()
        follow_calls: list[str] = []
        drop_flushed_rows = record_calls(table.drop_flushed_rows, "follow", follow_calls)
        monkeypatch.setattr(table, "drop_flushed_rows", drop_flushed_rows)
        await until(lambda: len(follow_calls) > 3)  # The rows were due for a flush in each of these rounds.
        assert (table.flushed, table.unflushed_rows) == ({0: 1}, 1)
        assert streams.counts.flushes == streams.counts.failed_flushes == 0
        assert await reader.ids() == [1, 2]
        async with open_stream_server(tmp_path / "a", stream_flush_interval_ms=100, **settings):
            await until(lambda: table.flushed == {0: 2})
        assert await reader.ids() == [1, 2]


async def test_process_that_reads_follows_a_process_that_writes(
    kafka: Kafka, postgres_url: str, start_seamark: Callable[..., Seamark], tmp_path: Path
) -> None:
    environment = {
        "SEAMARK_STREAM_LOG": f"kafka://{kafka.address}/{kafka.create_prefix()}",
        "SEAMARK_STREAM_FLUSH_INTERVAL_MS": str(NEVER_MS),
    }
    shared_settings = {"database": postgres_url, "warehouse": f"file://{tmp_path / 'warehouse'}"}
    writer = start_seamark("writer", env=environment, **shared_settings)
    flags = ("--role", "read", "--writer-urls", writer.base_url)
    reader = start_seamark("reader", env=environment, flags=flags, **shared_settings)
    with RestCatalog("writer", uri=writer.base_url) as catalog:
        catalog.create_namespace("db")
        catalog.create_table("db.t", SCHEMA, properties={ENABLED: "true"})
    rows_url = f"{writer.base_url}/api/v1/tables/db/t/rows"
    async with aiohttp.ClientSession() as http:
        for number in range(1, 8):
            async with http.post(rows_url, json=[{"id": number}]) as answer:
                assert answer.status == 200, await answer.text()
            expected = list(range(1, number + 1))
            assert await asyncio.to_thread(scan_ids, reader.base_url) == expected
            assert await asyncio.to_thread(read_ids_with_own_plan, reader.base_url) == expected
            if number == 4:
                async with http.post(f"{writer.base_url}/api/v1/tables/db/t/flush") as answer:
                    assert answer.status == 200, await answer.text()

    def use_reader() -> None:
        client = SeamarkClient(reader.base_url)
        assert seamark.get_rows(client, TABLE, [{"id": 7}]).num_rows == 1
        with SqlSession(reader.base_url) as session:
            assert session.sql("SELECT count(*) AS n FROM db.t").to_arrow().to_pylist() == [{"n": 7}]
        with RestCatalog("reader", uri=reader.base_url) as catalog, pytest.raises(RESTError, match=writer.base_url):
            catalog.create_namespace("other")

    await asyncio.to_thread(use_reader)
