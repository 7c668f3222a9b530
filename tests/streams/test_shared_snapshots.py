"""Tests of fresh snapshots that one server makes, and that requests to another server name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from pyiceberg.catalog.rest import RestCatalog

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import At
from seamark.connector.read.read_plan import plan_read
from seamark.connector.read.scans import TableScan, bind_filter
from seamark.connector.read.tables import open_table, plan
from seamark.formats.iceberg.manifests.writer import write_manifest_list
from seamark.formats.iceberg.metadata.snapshot import Snapshot
from seamark.formats.protocol.wire import FRESH_FOLDER
from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ObjectMissing
from seamark.metaserver.access.keyring import Keyring, SigningKey
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.streams.fresh_snapshots import make_fresh_location
from seamark.metaserver.streams.keys import KEY
from seamark.metaserver.streams.snapshots.shared_snapshots import SharedSnapshots
from tests.seeds import first_seed, mark_fast
from tests.streams.test_fresh_reads import FRESH, TABLE
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server

UUID = "00000000-0000-4000-8000-000000000001"


@asynccontextmanager
async def open_pair(home: Path, **settings: Any) -> AsyncIterator[tuple[StreamServer, StreamServer]]:
    """Run two servers over one database. The first server has the log, and the second has none."""
    async with (
        open_stream_server(home, **settings) as first_server,
        open_stream_server(home, **settings) as second_server,
    ):
        yield first_server, second_server


def read_opened(opened_table: Any, url: str) -> dict[int, str | None]:
    """Return the names by id of a table that a client has opened. The server at `url` makes the plans."""
    read_plan = plan_read(opened_table, ["id", "name"], bind_filter(where=None, table=opened_table))
    client = SeamarkClient(url).with_fresh_rows()
    scan = TableScan(
        opened_table.storage, read_plan, lambda: plan(client, opened_table, columns=read_plan.names), limit=None
    )
    rows = scan.to_arrow().to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["name"] for row in rows}


async def test_fresh_snapshot_of_one_server_is_planned_at_another(tmp_path: Path) -> None:
    async with open_pair(tmp_path) as (first_server, second_server):
        await create_stream_table(first_server)
        await first_server.post({"id": 1, "name": "a"})
        await first_server.flush()
        await first_server.post({"id": 2, "name": "b"}, {"id": 3, "name": "c"})
        client = SeamarkClient(first_server.server.url).with_fresh_rows()
        opened_table = await asyncio.to_thread(open_table, client, TABLE, At())
        await first_server.post({"id": 4, "name": "d"})
        assert await asyncio.to_thread(read_opened, opened_table, second_server.server.url) == {1: "a", 2: "b", 3: "c"}
        assert await asyncio.to_thread(scan_at_two_servers, first_server.server.url, second_server.server.url) == [
            1,
            2,
            3,
            4,
        ]
        url = f"{second_server.server.url}/v1/namespaces/db/tables/t/plan"
        unknown_snapshot = {"snapshot-id": opened_table.snapshot_id + 1}
        async with second_server.server.http.post(
            url, json=unknown_snapshot, headers={"X-Seamark-Fresh": "true"}
        ) as answer:
            message = (await answer.json())["error"]["message"]
        assert (answer.status, f"Cannot find snapshot {opened_table.snapshot_id + 1}" in message) == (400, True)


async def test_files_of_a_fresh_snapshot_outlive_the_time_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh snapshot is the current snapshot with files of rows that are not flushed yet.

    Other servers read its signed record, which contains an end time. Until this time, a plan at another server may name
    the snapshot. After such a plan, the query may still run for `retention_s`.
    """
    retention_s = 100
    async with open_stream_server(tmp_path, stream_fresh_retention_s=retention_s) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        streams, clock = stream.server.components.streams, stream.server.components.clock
        seal, ends_ms = streams.snapshots._shared_snapshots.seal, []

        def record_end(uuid: str, snapshot: Snapshot, *, until_ms: int) -> Mapping[str, str]:
            ends_ms.append(until_ms)
            return seal(uuid, snapshot, until_ms=until_ms)

        monkeypatch.setattr(streams.snapshots._shared_snapshots, "seal", record_end)
        await stream.post({"id": 2})
        assert await stream.ids() == [1, 2]
        await stream.flush()
        (table,) = streams.tables.values()
        now_ms, now_s = clock.now_ms(), clock.monotonic()
        first_due_s = min(due_s for due_s, _ in table._unneeded_files)
        # The tolerance covers the milliseconds between the two readings of the clock.
        assert first_due_s - now_s >= (ends_ms[-1] - now_ms) / 1000 + retention_s - 0.1
        assert len(table._unneeded_files) >= 3


def scan_at_two_servers(first_url: str, second_url: str) -> list[int]:
    """Load the table at the first server with unmodified PyIceberg.

    Return the ids that PyIceberg plans at the second server.
    """
    options = {**FRESH, "rest-scan-planning-enabled": "true"}
    with (
        RestCatalog("first", uri=first_url, **options) as first_catalog,
        RestCatalog("second", uri=second_url, **options) as second_catalog,
    ):
        table = first_catalog.load_table("db.t")
        table.catalog = second_catalog
        snapshot_id = table.metadata.current_snapshot_id
        return sorted(table.scan(snapshot_id=snapshot_id).to_arrow().column("id").to_pylist())


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 10), 1))
async def test_tables_opened_at_one_server_have_the_rows_of_the_model_at_another(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    properties = {"format-version": rng.choice(["2", "3"])} | ({KEY: "id"} if rng.random() < 0.5 else {})
    async with open_pair(tmp_path) as (first_server, second_server):
        await create_stream_table(first_server, properties=properties)
        client = SeamarkClient(first_server.server.url).with_fresh_rows()
        rows: dict[int, str | None] = {}
        opened_tables: list[tuple[Any, dict[int, str | None]]] = []
        for number in range(25):
            action = rng.choice(["post", "post", "post", "flush", "delete", "open", "read"])
            if action == "post" or not rows:
                row_id = rng.choice([*rows, number]) if KEY in properties else number
                await first_server.post({"id": row_id, "name": f"n{number}"})
                rows[row_id] = f"n{number}"
            elif action == "flush":
                await first_server.flush()
            elif action == "delete":
                deleted_id = rng.choice(list(rows))
                await asyncio.to_thread(seamark.delete, client, TABLE, where=f"id = {deleted_id}")
                del rows[deleted_id]
            elif action == "open":
                opened_tables.append((await asyncio.to_thread(open_table, client, TABLE, At()), dict(rows)))
            elif opened_tables:
                table, expected = rng.choice(opened_tables)
                assert await asyncio.to_thread(read_opened, table, second_server.server.url) == expected
        for table, expected in opened_tables:
            assert await asyncio.to_thread(read_opened, table, second_server.server.url) == expected


class StoredLists(dict[str, bytes]):
    """A storage of manifest lists, as a dictionary by location."""

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        if location not in self:
            raise ObjectMissing(f"{location} does not exist")
        return self[location]


async def test_record_without_a_valid_signature_or_after_its_expiry_is_ignored() -> None:
    """A record has a snapshot with rows that are not flushed yet. Other servers accept it only with a signature.

    The record is in the header of the manifest list of the snapshot.
    """
    clock, objects, folder = SimulatedClock(1), StoredLists(), f"file:///t/{FRESH_FOLDER}"

    def make_process(root: bytes = b"r" * 32) -> SharedSnapshots:
        return SharedSnapshots(
            cast("ObjectStore", objects), Keyring([SigningKey(b"k" * 8, from_ms=0, root=root)], clock), clock
        )

    async def find(process: SharedSnapshots, snapshot_id: int = 7, uuid: str = UUID) -> Snapshot | None:
        return await process.find(uuid, snapshot_id, folder)

    snapshot = Snapshot(7, clock.now_ms(), summary=msgspec.Raw(b'{"operation":"append"}'), manifest_list="file:///l")
    location = make_fresh_location(folder, 7)

    def write_list(entries: Mapping[str, str]) -> bytes:
        return write_manifest_list(
            [], format_version=2, snapshot_id=7, parent_snapshot_id=None, sequence_number=1, extra=entries
        )

    assert await find(make_process()) is None
    sealed_record = make_process().seal(UUID, snapshot, until_ms=clock.now_ms() + 1000)
    objects[location] = write_list(sealed_record)
    reader = make_process()
    assert await find(reader) == snapshot
    assert await find(make_process(), uuid="00000000-0000-4000-8000-000000000002") is None
    assert await find(make_process(b"x" * 32)) is None
    ((name, record),) = sealed_record.items()
    objects[make_fresh_location(folder, 8)] = objects[location]  # This copies the record of another snapshot.
    objects[make_fresh_location(folder, 9)] = write_list({name: record[:-8] + "AAAAAAAA"})  # The signature is changed.
    objects[make_fresh_location(folder, 10)] = write_list({name: "no Base64 \u4e2d"})
    objects[make_fresh_location(folder, 11)] = write_list({})
    objects[make_fresh_location(folder, 12)] = objects[location][:60]  # This file is truncated.
    for snapshot_id in range(8, 13):
        assert await find(make_process(), snapshot_id) is None
    clock.advance(1001)
    assert await find(reader) is None
    assert await find(make_process()) is None
