"""Tests of continuous reads from a server. Each row arrives once, from the files or the log, from every position."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.types import StringType

import seamark
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import InvalidRequest, NoSuchResource
from seamark.connector.read.read_plan import BATCH_ROWS
from seamark.connector.streams import reader
from seamark.connector.streams.reader import StreamBatch, StreamReads
from seamark.metaserver.log.port import Shard
from seamark.metaserver.log.segments import SegmentLog
from tests.seeds import first_seed, mark_fast
from tests.streams.incoming.test_append_gates import commit_table, make_schema_updates
from tests.streams.test_rows_over_http import StreamServer, create_stream_table, open_stream_server

WAIT_S = 55
"""The time, in seconds, for which a reader waits for rows. It is below the server's limit of 60 s."""
SOON_S = 40
"""The time, in seconds, within which rows that arrive must be returned. It ends before the wait does."""


@pytest.fixture
async def stream(tmp_path: Path) -> AsyncIterator[StreamServer]:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream, properties={"seamark.stream.shards": "2"})
        yield stream


async def read_batches(stream: StreamServer, **options: Any) -> list[StreamBatch]:
    """Return the batches up to the last row that exists now."""
    client = SeamarkClient(stream.server.url)
    return await asyncio.to_thread(lambda: list(seamark.read_stream(client, "db.t", follow=False, **options)))


def list_ids(batches: list[StreamBatch]) -> list[int]:
    return [number for batch in batches for number in batch.rows.column("id").to_pylist()]


async def append_batch(stream: StreamServer, *numbers: int) -> None:
    """Append rows with a commit, as a batch writer does."""
    rows = pa.table({"id": list(numbers)})
    client = SeamarkClient(stream.server.url)
    await asyncio.to_thread(seamark.append, client, "db.t", rows)


async def read_current_snapshot_id(stream: StreamServer) -> int:
    table = await asyncio.to_thread(stream.catalog.load_table, "db.t")
    return table.metadata.current_snapshot_id or 0


async def test_a_reader_gets_each_row_once_across_flushes_and_batch_appends(stream: StreamServer) -> None:
    await append_batch(stream, 1, 2)
    await stream.post({"id": 3}, {"id": 4})
    await stream.flush()
    await stream.post({"id": 5})
    await append_batch(stream, 6)
    batches = await read_batches(stream)
    assert sorted(list_ids(batches)) == [1, 2, 3, 4, 5, 6]
    position = batches[-1].position
    await stream.flush()
    assert list_ids(await read_batches(stream, from_=position)) == []
    await stream.post({"id": 7})
    await append_batch(stream, 8)
    await stream.flush()
    await stream.post({"id": 9, "name": "i", "day": "2026-01-31"})
    later_rows = await read_batches(stream, from_=position)
    assert sorted(list_ids(later_rows)) == [7, 8, 9]
    assert later_rows[-1].rows.schema == batches[0].rows.schema
    assert {"id": 9, "name": "i", "day": datetime.date(2026, 1, 31)} in later_rows[-1].rows.to_pylist()


async def test_reader_begins_at_the_requested_snapshot_time_or_position(stream: StreamServer) -> None:
    await append_batch(stream, 1)
    first_snapshot = await read_current_snapshot_id(stream)
    await stream.post({"id": 2})
    await stream.flush()
    await stream.post({"id": 3})
    await asyncio.sleep(0.01)
    moment = datetime.datetime.now(datetime.UTC)
    await asyncio.sleep(0.01)
    await stream.post({"id": 4})
    await stream.flush()
    await append_batch(stream, 5)
    latest_position = await asyncio.to_thread(_locate, stream, "latest")
    await stream.post({"id": 6})
    assert sorted(list_ids(await read_batches(stream, from_="earliest"))) == [1, 2, 3, 4, 5, 6]
    assert sorted(list_ids(await read_batches(stream, from_=first_snapshot))) == [2, 3, 4, 5, 6]
    assert sorted(list_ids(await read_batches(stream, from_=0))) == [1, 2, 3, 4, 5, 6]
    assert sorted(list_ids(await read_batches(stream, from_=moment))) == [4, 5, 6]
    assert sorted(list_ids(await read_batches(stream, from_=latest_position))) == [6]
    assert list_ids(await read_batches(stream, from_="latest")) == []


async def test_row_that_arrives_during_a_read_has_the_value_of_a_new_column(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stream.post({"id": 1})
    await stream.flush()
    position = await asyncio.to_thread(_locate, stream, "latest")
    fields = [(1, "id", "long", True), (2, "name", "string", False), (3, "day", "date", False)]
    updates = make_schema_updates([*fields, (4, "added", "long", False)], [])

    async def append_row(log: SegmentLog) -> None:
        """Add a column and a row with it, after the read has loaded the table.

        The parameter `log` is that of the method that the test replaces.
        """
        patch.undo()
        assert await commit_table(stream, updates) == 200
        await stream.post({"id": 2, "added": 5})

    with monkeypatch.context() as patch:
        patch.setattr(SegmentLog, "catch_up", append_row)
        url = f"{stream.server.url}/api/v1/tables/db/t/rows?after={position}"
        async with stream.server.http.get(url) as answer:
            rows = pa.ipc.open_stream(await answer.read()).read_all().to_pylist()
    assert rows == [{"id": 2, "name": None, "day": None, "added": 5}]


def _locate(stream: StreamServer, position: str) -> str:
    return StreamReads(SeamarkClient(stream.server.url), "db.t", changes=False, skip_changes=False).locate(position)


async def test_a_waiting_reader_gets_rows_and_batch_appends_soon(
    stream: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "WAIT_S", WAIT_S)
    await stream.post({"id": 1})
    client, read_ids, wake_condition = SeamarkClient(stream.server.url), [], threading.Condition()

    def follow() -> None:
        for batch in seamark.read_stream(client, "db.t"):
            with wake_condition:
                read_ids.extend(batch.rows.column("id").to_pylist())
                wake_condition.notify_all()
            if 4 in read_ids:
                return

    task = asyncio.create_task(asyncio.to_thread(follow))
    for number in (2, 3, 4):
        await asyncio.sleep(0.2)  # The reader probably waits for rows again.
        await (append_batch(stream, number) if number == 3 else stream.post({"id": number}))
    async with asyncio.timeout(SOON_S):
        await task
    assert sorted(read_ids) == [1, 2, 3, 4]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("has_snapshot", [False, True])
async def test_a_waiting_reader_gets_the_first_row_that_is_ever_appended(
    stream: StreamServer, has_snapshot: bool
) -> None:
    if has_snapshot:
        await append_batch(stream, 1)
    start = await asyncio.to_thread(_locate, stream, "latest")
    url = f"{stream.server.url}/api/v1/tables/db/t/rows?after={start}&wait={WAIT_S}"
    waiting_task = asyncio.create_task(stream.server.http.get(url))
    await asyncio.sleep(0.2)  # The server probably has the request and waits.
    await stream.post({"id": 2})
    async with asyncio.timeout(SOON_S), await waiting_task as answer:
        assert answer.status == 200, await answer.text()
        assert pa.ipc.open_stream(await answer.read()).read_all().column("id").to_pylist() == [2]


async def test_removals_are_refused_or_skipped(stream: StreamServer) -> None:
    client = SeamarkClient(stream.server.url)
    await append_batch(stream, 1)
    await append_batch(stream, 2)
    start = (await read_batches(stream))[-1].position
    await asyncio.to_thread(lambda: seamark.delete(client, "db.t", where="id = 1"))
    await stream.post({"id": 3})
    with pytest.raises(InvalidRequest, match=r"removed or replaced rows.*skip-changes=true"):
        await read_batches(stream, from_=start)
    assert list_ids(await read_batches(stream, from_=start, skip_changes=True)) == [3]


@pytest.mark.slow
async def test_read_of_change_types_requires_that_the_column_name_is_free(stream: StreamServer) -> None:
    await stream.post({"id": 1})

    def add_column() -> None:
        with stream.catalog.load_table("db.t").update_schema() as change:
            change.add_column("_change_type", StringType())

    await asyncio.to_thread(add_column)
    assert list_ids(await read_batches(stream)) == [1]
    with pytest.raises(InvalidRequest, match="has a column with the name _change_type"):
        await read_batches(stream, from_=0, changes=True)


async def test_position_that_is_invalid_or_of_another_table_is_refused(stream: StreamServer) -> None:
    await stream.post({"id": 1})
    position = (await read_batches(stream))[-1].position
    with pytest.raises(InvalidRequest, match="was not issued by this server"):
        await read_batches(stream, from_="1.x.none..after")
    with pytest.raises(InvalidRequest, match="no snapshot 77"):
        await read_batches(stream, from_=77)
    uuid = position.split(".")[1]
    with pytest.raises(InvalidRequest, match="another log"):
        await read_batches(stream, from_=f"1.{uuid}.none.9-9.after")
    await asyncio.to_thread(stream.catalog.drop_table, "db.t")
    await create_stream_table(stream)
    with pytest.raises(InvalidRequest, match="dropped and created again"):
        await read_batches(stream, from_=position)


async def test_rows_that_the_log_has_removed_are_read_from_the_files_of_their_flush(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1}, {"id": 2})
        await stream.flush()
        first_snapshot_id = await read_current_snapshot_id(stream)
        await stream.post({"id": 3})
        await stream.flush()
        await stream.post({"id": 4})
        (table,) = stream.server.components.streams.tables.values()
        log = await stream.server.components.streams.open_log(*(await table._tables.load(table.uuid)))
        log._state.shards[Shard(table.uuid, 0)].start = 3  # type: ignore[attr-defined]  # The retention removes rows in this way.
        assert sorted(list_ids(await read_batches(stream, from_=0))) == [1, 2, 3, 4]
        assert sorted(list_ids(await read_batches(stream, from_=first_snapshot_id))) == [3, 4]
        with pytest.raises(NoSuchResource, match=f"begin at snapshot:{first_snapshot_id}"):
            await read_batches(stream, from_=f"1.{table.uuid}.none.1.after")


@pytest.mark.slow
async def test_read_from_a_position_within_a_file_continues_with_the_next_row(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        row_count = BATCH_ROWS + 10
        await append_batch(stream, *range(row_count))
        await append_batch(stream, -1)
        first_batch, *_ = await read_batches(stream)
        assert "~" in first_batch.position
        later_rows = await read_batches(stream, from_=first_batch.position)
        assert Counter(list_ids([first_batch, *later_rows])) == Counter([*range(row_count), -1])


async def test_rows_keep_their_values_after_a_schema_change(stream: StreamServer) -> None:
    await stream.post({"id": 1, "name": "a"})

    def change_schema() -> None:
        with stream.catalog.load_table("db.t").update_schema() as update:
            update.rename_column("name", "title")
            update.delete_column("day")

    await asyncio.to_thread(change_schema)
    await stream.post({"id": 2, "title": "b"})
    batches = await read_batches(stream)
    assert [row for batch in batches for row in batch.rows.to_pylist()] in (
        [{"id": 1, "title": "a"}, {"id": 2, "title": "b"}],
        [{"id": 2, "title": "b"}, {"id": 1, "title": "a"}],
    )
    assert batches[0].rows.schema.names == ["id", "title"]


@pytest.mark.parametrize("seed", mark_fast(range(first_seed(), first_seed() + 40), 1))
async def test_readers_of_random_histories_return_the_rows_of_the_model(seed: int, tmp_path: Path) -> None:
    """Readers begin, stop and resume at any position, while writers, flushes, appends and restarts change the table."""
    rng, numbers = Random(seed), itertools.count(1)
    home = tmp_path
    model: list[int] = []
    readers: list[tuple[str, Counter[int], int]] = []
    """The position of each reader, the rows that it has read, and the number of rows of the model at its start."""
    is_created = False
    for _ in range(3):  # Each round starts a new server process.
        async with open_stream_server(home, watch_timeout_s=1) as stream:
            if not is_created:
                await create_stream_table(stream, properties={"seamark.stream.shards": str(rng.choice((1, 3)))})
                is_created = True
            for _ in range(12):
                fresh_ids = [next(numbers) for _ in range(rng.randint(1, 4))]
                match rng.choice(("post", "post", "post", "append", "flush", "start", "read", "read")):
                    case "post":
                        await stream.post(*({"id": number} for number in fresh_ids))
                        model += fresh_ids
                    case "append":
                        await append_batch(stream, *fresh_ids)
                        model += fresh_ids
                    case "flush":
                        await stream.server.http.post(f"{stream.server.url}/api/v1/tables/db/t/flush")
                    case "start":
                        start_position = rng.choice(("earliest", "latest"))
                        position = await asyncio.to_thread(_locate, stream, start_position)
                        readers.append((position, Counter(), 0 if start_position == "earliest" else len(model)))
                    case "read":
                        readers = [await _read_some(stream, rng, *reader) for reader in readers]
            assert sorted(list_ids(await read_batches(stream))) == sorted(model)
    async with open_stream_server(home) as stream:
        for position, read_ids, start in readers:
            later_ids = Counter(list_ids(await read_batches(stream, from_=position)))
            assert read_ids + later_ids == Counter(model[start:]), seed


async def _read_some(
    stream: StreamServer, rng: Random, position: str, read_ids: Counter[int], start: int
) -> tuple[str, Counter[int], int]:
    """Read a random number of batches. Return the reader's new position, its rows, and `start`."""
    batches = await read_batches(stream, from_=position)
    used_batches = batches[: rng.randint(0, len(batches))]
    return (used_batches[-1].position if used_batches else position), read_ids + Counter(list_ids(used_batches)), start
