"""Tests of several servers over one database and one log in Kafka: each server accepts rows and returns all rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.metaserver.log.port import SharedLog
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.operations import DropEntry, ReleaseLocations
from seamark.metaserver.streams.incoming import append_gates
from seamark.metaserver.streams.incoming.table_gates import TableGates
from seamark.metaserver.streams.stream_properties import ENABLED
from seamark.metaserver.streams.stream_table import StreamTable
from tests.server.rig import RunningServer
from tests.services.kafka import Kafka
from tests.services.seamark import Seamark
from tests.streams.incoming.test_append_gates import commit_table, delay_log, make_schema_updates
from tests.streams.test_read_stream import list_ids, read_batches
from tests.streams.test_rows_over_http import SCHEMA, StreamServer, create_stream_table, open_stream_server
from tests.waits import until

LEASE_S = 1.0


def make_shared_settings(kafka: Kafka, postgres_url: str, folder: Path) -> dict[str, Any]:
    """Return the settings that all servers of a fleet share."""
    return {
        "database": postgres_url,
        "warehouse": f"file://{folder / 'warehouse'}",
        "stream_log": f"kafka://{kafka.address}/{kafka.create_prefix()}",
        "peer_lease_s": LEASE_S,
    }


@asynccontextmanager
async def open_fleet(folder: Path, **settings: Any) -> AsyncIterator[list[StreamServer]]:
    """Run two servers with the table `db.t`."""
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(open_stream_server(folder / name, **settings)) for name in ("a", "b")
        ]
        await create_stream_table(streams[0])
        yield streams


@pytest.fixture
async def fleet(kafka: Kafka, postgres_url: str, tmp_path: Path) -> AsyncIterator[list[StreamServer]]:
    async with open_fleet(tmp_path, **make_shared_settings(kafka, postgres_url, tmp_path)) as streams:
        yield streams


async def _list_tables(fleet: list[StreamServer]) -> list[StreamTable]:
    """Open the table `db.t` on each server, and return the open tables."""
    tables = []
    for stream in fleet:
        entry = await stream.server.components.catalog.tables.load_entry(("db",), "t")
        tables.append(await stream.server.components.streams.open(entry))
    return tables


async def test_rows_acknowledged_by_one_server_are_read_through_another_server(fleet: list[StreamServer]) -> None:
    first_server, second_server = fleet
    await first_server.post({"id": 1})
    assert await second_server.ids() == [1]
    for number in range(2, 8):
        await fleet[number % 2].post({"id": number})
        assert await fleet[(number + 1) % 2].ids() == list(range(1, number + 1))
    await second_server.flush()
    await first_server.post({"id": 8})
    for stream in fleet:
        assert await stream.ids() == list(range(1, 9))


@pytest.mark.slow
async def test_every_server_accepts_rows_of_a_further_warehouse(
    kafka: Kafka, postgres_url: str, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    settings = make_shared_settings(kafka, postgres_url, tmp_path) | {"warehouse_roots": (lake.as_uri(),)}
    async with open_fleet(tmp_path, **settings) as fleet:
        body = {"name": "sales", "location": f"{lake.as_uri()}/sales"}
        async with fleet[0].server.http.post(f"{fleet[0].server.url}/api/v1/warehouses", json=body) as answer:
            assert answer.status == 201, await answer.text()
        for stream in fleet:
            await wait_for_warehouse(stream.server, "sales")
        options = {"warehouse": "sales", "rest-scan-planning-enabled": "true"}
        catalogs = [
            await asyncio.to_thread(lambda url=stream.server.url: RestCatalog("sales", uri=url, **options))
            for stream in fleet
        ]
        await asyncio.to_thread(catalogs[0].create_namespace, "db")
        await asyncio.to_thread(catalogs[0].create_table, "db.t", SCHEMA, properties={ENABLED: "true"})

        async def read_ids(catalog: RestCatalog) -> list[int]:
            table = await asyncio.to_thread(catalog.load_table, "db.t")
            return sorted((await asyncio.to_thread(lambda: table.scan().to_arrow()))["id"].to_pylist())

        await fleet[0].post({"id": 1000})
        for number in range(6):
            url = f"{fleet[number % 2].server.url}/warehouses/sales/api/v1/tables/db/t/rows"
            async with fleet[number % 2].server.http.post(url, json=[{"id": number}]) as answer:
                assert answer.status == 200, await answer.text()
            for catalog in catalogs:
                assert await read_ids(catalog) == list(range(number + 1))
        assert await fleet[1].ids() == [1000]


async def wait_for_warehouse(server: RunningServer, name: str) -> None:
    """Wait until a server knows a new warehouse of another server."""
    while True:
        async with server.http.get(f"{server.url}/v1/config?warehouse={name}") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_continuous_reader_may_change_the_server_at_any_time(fleet: list[StreamServer]) -> None:
    await fleet[0].post({"id": 0})
    tables = await _list_tables(fleet)
    await until(lambda: any(table.flushed[0] for table in tables))  # The first row is flushed at once.
    position = f"1.{tables[0].uuid}.none.0.after"  # The position before the first row in the log.
    read_ids: list[int] = []
    for number in range(1, 13):
        writer, reader = fleet[number % 2], fleet[(number + 1) % 2]
        await writer.post({"id": number})
        if number % 4 == 0:
            await writer.flush()
        batches = await read_batches(reader, from_=position)
        position, read_ids = batches[-1].position, [*read_ids, *list_ids(batches)]
        assert read_ids == list(range(number + 1))


@pytest.mark.slow
async def test_every_server_reports_the_rows_that_wait(fleet: list[StreamServer]) -> None:
    first_server, _ = fleet
    await first_server.post({"id": 1})
    tables = await _list_tables(fleet)
    await until(lambda: any(table.flushed[0] for table in tables))  # The first row is flushed at once.
    for reader in fleet:
        await first_server.post({"id": 2})
        _, streams = await reader.server.get("/api/v1/streams")
        status, stream_state = await reader.server.get("/api/v1/tables/db/t/stream")
        assert (status, stream_state["waiting-rows"], streams["streams"][0]["waiting-rows"]) == (200, 1, 1)
        assert await first_server.flush() == 1


async def test_every_server_returns_the_rows_up_to_a_token_and_obeys_a_pause(fleet: list[StreamServer]) -> None:
    first_server, second_server = fleet
    token = (await first_server.post({"id": 1}))["token"]
    plan = f"{second_server.server.url}/v1/namespaces/db/tables/t/plan"
    async with second_server.server.http.post(plan, json={}, headers={"X-Seamark-After": token}) as answer:
        assert answer.status == 200, await answer.text()
    async with second_server.server.http.post(f"{second_server.server.url}/api/v1/tables/db/t/stream/drain") as answer:
        # The flush succeeds although the other server may flush the first row at the same time.
        assert answer.status == 200, await answer.text()
    status, message = await first_server.send_and_read_error(b'[{"id": 2}]')
    assert (status, "is paused and takes no rows" in message) == (503, True)
    async with first_server.server.http.post(f"{first_server.server.url}/api/v1/tables/db/t/stream/resume") as answer:
        assert answer.status == 200, await answer.text()
    await second_server.post({"id": 2})
    assert await first_server.ids() == [1, 2]


async def test_request_repeated_at_another_server_adds_no_rows(fleet: list[StreamServer]) -> None:
    first_server, second_server = fleet
    answer = await first_server.post({"id": 1}, query="?producer=p&sequence=0")
    repeated_answer = await second_server.post({"id": 1}, query="?producer=p&sequence=0")
    assert repeated_answer == answer | {"duplicate": True}
    await second_server.post({"id": 2}, query="?producer=p&sequence=1")
    status, message = await first_server.send_and_read_error(
        b'{"id": 4}\n', "application/x-ndjson", "?producer=p&sequence=3"
    )
    assert (status, "send append 2 first" in message) == (409, True)
    assert await first_server.ids() == [1, 2]


async def test_append_that_a_server_checked_before_a_commit_of_another_server_is_refused(
    fleet: list[StreamServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit promotes a partition column, and removes the schema of the row. The row could not be flushed."""
    first_server, second_server = fleet
    by_day = [{"source-id": 3, "field-id": 1000, "name": "day", "transform": "identity"}]
    updates = [
        {"action": "upgrade-format-version", "format-version": 3},
        {"action": "add-spec", "spec": {"spec-id": 1, "fields": by_day}},
        {"action": "set-default-spec", "spec-id": -1},
    ]
    assert await commit_table(first_server, updates) == 200
    await first_server.post({"id": 1, "day": "2020-01-01"})
    await first_server.flush()
    is_checked, may_append = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        is_checked.set()
        await may_append.wait()

    row = b'[{"id": 2, "day": "3000-01-01"}]'  # The date is beyond the range of nanoseconds.
    with monkeypatch.context() as patch:
        delay_log(patch, wait)
        append = asyncio.create_task(second_server.send_and_read_error(row))
        await is_checked.wait()
        fields = [(1, "id", "long", True), (2, "name", "string", False), (3, "day", "timestamp_ns", False)]
        assert await commit_table(first_server, make_schema_updates(fields, [0])) == 200
        may_append.set()
        status, message = await append
    assert (status, "send the rows again" in message) == (503, True)
    status, message = await second_server.send_and_read_error(row)
    assert (status, "Row 0, column day" in message) == (400, True)
    await second_server.post({"id": 3, "day": "2020-01-03T00:00:00"})
    assert await first_server.flush() == 1
    for table in await _list_tables(fleet):
        await table.drop_flushed_rows()
        assert not table.unflushed_rows


@pytest.mark.slow
async def test_gate_of_a_server_that_stopped_is_opened_by_another_server(
    fleet: list[StreamServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gate stops appends to a stream while a commit changes how its rows are written."""
    first_server, second_server = fleet
    await first_server.post({"id": 1})
    components = first_server.server.components
    entry = await components.catalog.tables.load_entry(("db",), "t")
    log = cast("SharedLog", await components.streams.open_log(entry, await _load_metadata(first_server)))
    # This is the state after a server that stopped between the closing and the opening of a gate.
    stopped_gates = TableGates(components.store, components.clock, lease_s=1.0)
    monkeypatch.setattr(append_gates, "APPEND_WAIT_S", 0.1)
    await stopped_gates._take_lease(entry.uuid, "stopped")
    await log.move_gates({entry.uuid: 0}, is_closed=True)
    statuses = []
    while not statuses or statuses[-1] != 200:
        statuses.append((await second_server.send(b'[{"id": 2}]'))[0])
    assert set(statuses[:-1]) == {503}
    assert await first_server.ids() == [1, 2]


@pytest.mark.slow
async def test_gate_of_a_purged_table_without_rows_is_removed(fleet: list[StreamServer]) -> None:
    """The log stores a gate for each stream whose table was changed. A gate stops appends during a change."""
    components = fleet[0].server.components
    entry = await components.catalog.tables.load_entry(("db",), "t")
    updates = make_schema_updates([(1, "id", "long", False), (9, "age", "int", True)], [])
    assert await commit_table(fleet[0], updates) == 200
    log = cast("SharedLog", await components.streams._logs.open())
    assert list(log.list_gates()) == [entry.uuid]
    await components.store.transact([DropEntry(EntryKind.TABLE, entry.namespace, entry.name)])
    await components.store.transact([ReleaseLocations(entry.uuid)])

    async def remove_gates() -> bool:
        for stream in fleet:  # The owner of the table removes its stream.
            await stream.server.components.streams.openings._remove_purged()
        return not log.list_gates()

    while not await remove_gates():
        await asyncio.sleep(0.1)


async def _load_metadata(stream: StreamServer) -> TableMetadata:
    components = stream.server.components
    entry = await components.catalog.tables.load_entry(("db",), "t")
    return await components.catalog.documents.table(entry.metadata_location)


@pytest.mark.slow
async def test_concurrent_flushes_of_two_servers_add_the_rows_once(fleet: list[StreamServer]) -> None:
    for number in range(10):
        await fleet[number % 2].post({"id": number})
    tables = await _list_tables(fleet)
    outcomes = await asyncio.gather(*(table.flush() for table in tables), return_exceptions=True)
    await asyncio.gather(*(table.flush() for table in tables))
    assert any(isinstance(outcome, int) for outcome in outcomes), outcomes
    for stream in fleet:
        assert await stream.ids() == list(range(10))


@pytest.mark.slow
async def test_requests_at_two_servers_to_flush_the_same_rows_succeed(fleet: list[StreamServer]) -> None:
    for number in range(5):
        await fleet[number % 2].post({"id": number})
        urls = [f"{stream.server.url}/api/v1/tables/db/t/flush" for stream in fleet]
        answers = await asyncio.gather(*(fleet[0].server.http.post(url) for url in urls))
        assert [answer.status for answer in answers] == [200, 200]
    assert await fleet[0].ids() == list(range(5))


@pytest.mark.slow
async def test_a_removal_that_is_repeated_at_another_server_does_not_flush_again(fleet: list[StreamServer]) -> None:
    first_server, second_server = fleet
    await first_server.post({"id": 1})
    tables = await _list_tables(fleet)
    await until(lambda: any(table.flushed[0] for table in tables))  # The first row is flushed at once.
    entry = await first_server.server.components.catalog.tables.load_entry(("db",), "t")

    async def prepare_removal(server: StreamServer, read_snapshot_id: int | None) -> bool:
        """Prepare a commit that has read a snapshot. Return True if it has flushed the waiting rows."""
        count_before = await server.count_snapshots()
        await server.server.components.streams.flush_for_removal(entry, read_snapshot_id)
        return await server.count_snapshots() > count_before

    table = await asyncio.to_thread(first_server.catalog.load_table, "db.t")
    await second_server.post({"id": 2})
    assert await prepare_removal(first_server, table.metadata.current_snapshot_id)
    flushed_id = (await asyncio.to_thread(first_server.catalog.load_table, "db.t")).metadata.current_snapshot_id
    await first_server.post({"id": 3})
    assert not await prepare_removal(second_server, flushed_id)
    # Only one commit that has read this snapshot may omit the flush, and the second server has prepared it.
    assert await prepare_removal(first_server, flushed_id)
    flushed_id = (await asyncio.to_thread(first_server.catalog.load_table, "db.t")).metadata.current_snapshot_id
    # This is the one commit after the new snapshot that may omit the flush. No row waits now.
    assert not await prepare_removal(first_server, flushed_id)
    await first_server.post({"id": 4})
    assert await prepare_removal(first_server, flushed_id)


@pytest.mark.slow
async def test_only_the_owner_of_a_table_flushes_the_rows_of_all_servers(
    kafka: Kafka, postgres_url: str, tmp_path: Path
) -> None:
    settings = make_shared_settings(kafka, postgres_url, tmp_path) | {"stream_flush_interval_ms": 500}
    async with open_fleet(tmp_path, **settings) as fleet:
        tables = await _list_tables(fleet)
        await until(lambda: [table.keeps_rows for table in tables].count(True) == 1)
        for number in range(8):
            await fleet[number % 2].post({"id": number})
        await until(lambda: not any(table.unflushed_rows for table in tables))
        other_table = next(table for table in tables if not table.keeps_rows)
        assert not other_table.list_fresh_files()
        assert other_table.oldest_ms is None
        for stream in fleet:
            assert await stream.ids() == list(range(8))


async def test_a_table_of_a_server_that_stopped_gets_another_owner(
    kafka: Kafka, postgres_url: str, tmp_path: Path
) -> None:
    settings = make_shared_settings(kafka, postgres_url, tmp_path)
    async with open_stream_server(tmp_path / "a", **settings) as first_server:
        await create_stream_table(first_server)
        await first_server.post({"id": 1})
        await first_server.flush()
        await first_server.post({"id": 2})
    async with open_stream_server(tmp_path / "b", **settings | {"stream_flush_interval_ms": 100}) as second_server:
        uuid = (await second_server.server.components.catalog.tables.load_entry(("db",), "t")).uuid
        tables = second_server.server.components.streams.tables
        await until(lambda: uuid in tables and tables[uuid].flushed == {0: 2})
        assert await second_server.ids() == [1, 2]


@pytest.mark.slow
async def test_all_workers_of_a_server_take_and_show_rows(
    kafka: Kafka, start_seamark: Callable[..., Seamark], tmp_path: Path
) -> None:
    log = f"kafka://{kafka.address}/{kafka.create_prefix()}"
    server = start_seamark(env={"SEAMARK_STREAM_LOG": log}, flags=("--workers", "2"))
    catalog = RestCatalog("workers", uri=server.base_url, **{"rest-scan-planning-enabled": "true"})
    catalog.create_namespace("db")
    catalog.create_table("db.t", SCHEMA, properties={ENABLED: "true"})
    url = f"{server.base_url}/api/v1/tables/db/t/rows"
    for end in (4, 8):
        for number in range(end - 4, end):  # The operating system assigns each connection to one of the workers.
            async with aiohttp.ClientSession() as http, http.post(url, json=[{"id": number}]) as answer:
                assert answer.status == 200, await answer.text()
        scan = await asyncio.to_thread(lambda: catalog.load_table("db.t").scan().to_arrow())
        assert sorted(scan.column("id").to_pylist()) == list(range(end))
