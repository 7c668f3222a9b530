"""Tests of `seamark stream`, the list of stream tables, and the metrics and the health of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.client import SeamarkClient
from seamark.connector.streams import row_files
from seamark.connector.streams.status import list_streams
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from tests.server.rig import OffsetClock, run_server
from tests.services.command import run_seamark
from tests.streams.test_read_stream import append_batch
from tests.streams.test_rows_over_http import NEVER_MS, SCHEMA, StreamServer, create_stream_table, open_stream_server


async def run_stream_command(url: str, *arguments: str) -> str:
    """Run `seamark stream` with the arguments, and return its output."""

    result = await asyncio.to_thread(run_seamark, "stream", *arguments, "--url", url)
    assert result.returncode == 0, result.stderr
    return result.stdout


async def test_a_stream_is_listed_shown_and_flushed(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        url = stream.server.url
        assert "There is no stream table" in await run_stream_command(url, "list")
        await create_stream_table(stream, properties={"seamark.stream.shards": "2"})
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2}, {"id": 3})
        await stream.post({"id": 4})
        (stream_report,) = json.loads(await run_stream_command(url, "list", "--json"))
        assert (stream_report["namespace"], stream_report["table"], stream_report["waiting-rows"]) == (["db"], "t", 3)
        assert sum(shard["flushed"] for shard in stream_report["shards"]) == 1
        assert sum(shard["durable"] for shard in stream_report["shards"]) == 4
        assert stream_report["oldest-ms"] is not None
        text = await run_stream_command(url, "list")
        assert "db.t" in text
        assert " 3 " in text
        assert json.loads(await run_stream_command(url, "show", "db.t", "--json"))["waiting-rows"] == 3
        assert "3 rows" in await run_stream_command(url, "show", "db.t")
        assert await run_stream_command(url, "flush", "db.t") == "3 rows of db.t were flushed\n"
        (stream_report,) = json.loads(await run_stream_command(url, "list", "--json"))
        assert (stream_report["waiting-rows"], stream_report["oldest-ms"]) == (0, None)
        assert await stream.ids() == [1, 2, 3, 4]


async def test_a_paused_table_refuses_rows_until_it_is_resumed_and_a_drained_table_is_empty(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        url = stream.server.url
        # The server flushes a table without a snapshot at once, so the append creates one.
        await append_batch(stream, 0)
        await stream.post({"id": 1})
        assert await run_stream_command(url, "pause", "db.t", "--reason", "a move") == "db.t is paused: a move\n"
        status, message = await stream.send_and_read_error(b'[{"id": 2}]')
        assert (status, "a move" in message, "seamark stream resume db.t" in message) == (503, True, True)
        assert "paused: a move" in await run_stream_command(url, "show", "db.t")
        assert await stream.flush() == 1
    async with open_stream_server(tmp_path) as stream:
        url = stream.server.url
        assert (await stream.send_and_read_error(b'[{"id": 2}]'))[0] == 503
        assert await run_stream_command(url, "resume", "db.t") == "db.t accepts rows again\n"
        await stream.post({"id": 2}, {"id": 3})
        assert await run_stream_command(url, "drain", "db.t") == "2 rows of db.t were flushed; db.t is paused\n"
        assert (await stream.send_and_read_error(b'[{"id": 4}]'))[0] == 503
        (stream_report,) = json.loads(await run_stream_command(url, "list", "--json"))
        assert (stream_report["waiting-rows"], stream_report["paused"]) == (0, "no reason was given")
        assert await run_stream_command(url, "resume", "db.t") == "db.t accepts rows again\n"
        await stream.post({"id": 4})
        assert await stream.ids() == [0, 1, 2, 3, 4]


@pytest.mark.slow
async def test_drain_of_a_table_that_is_dropped_during_the_drain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await append_batch(stream, 0)
        await stream.post({"id": 1})
        streams = stream.server.components.streams
        (table,) = streams.tables.values()
        flush = streams.flush

        async def flush_and_drop(uuid: str) -> int:
            rows = await flush(uuid)
            await asyncio.to_thread(stream.catalog.drop_table, "db.t")
            streams._close_table(table)  # The next flush in the background does this.
            return rows

        monkeypatch.setattr(streams, "flush", flush_and_drop)
        url = f"{stream.server.url}/api/v1/tables/db/t/stream/drain"
        async with stream.server.http.post(url) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (404, "NoSuchTableException")


def record_calls(method: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    """Return a method that adds its name to `calls` before it runs."""

    def record_and_call(*arguments: Any) -> Any:
        calls.append(name)
        return method(*arguments)

    return record_and_call


@pytest.mark.slow
async def test_the_listing_has_pages_and_survives_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        for name in ("a", "b"):
            await asyncio.to_thread(
                stream.catalog.create_table, f"db.{name}", SCHEMA, properties={"seamark.stream.enabled": "true"}
            )
        for name in ("a", "b", "t"):
            url = f"{stream.server.url}/api/v1/tables/db/{name}/rows"
            async with stream.server.http.post(url, json=[{"id": 1}]) as answer:
                assert answer.status == 200
    async with open_stream_server(tmp_path) as stream:
        requests: list[str] = []
        entry_reads = record_calls(GeneratorStore.find_entries, "find_entries", requests)
        monkeypatch.setattr(GeneratorStore, "find_entries", entry_reads)
        pages: list[Any] = []
        query = "?pageSize=2"
        while True:
            status, page = await stream.server.get(f"/api/v1/streams{query}")
            assert status == 200, page
            pages.append(page["streams"])
            if page["next-page-token"] is None:
                break
            query = f"?pageSize=2&pageToken={page['next-page-token']}"
        assert [len(page) for page in pages] == [2, 1]
        assert requests == ["find_entries"] * 2  # Each page needs one request to the database.
        assert sorted(streams["table"] for page in pages for streams in page) == ["a", "b", "t"]
        status, answer = await stream.server.get("/api/v1/streams?pageToken=x")
        assert (status, "pageToken" in answer["error"]["message"]) == (400, True)
        client = SeamarkClient(stream.server.url)
        streams = await asyncio.to_thread(lambda: list(list_streams(client)))
        assert sorted(table["table"] for table in streams) == ["a", "b", "t"]


@pytest.mark.slow
async def test_metrics_count_waiting_rows_and_report_a_failed_log(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        await stream.flush()
        await stream.post({"id": 2}, {"id": 3})

        async def is_shown(line: str) -> bool:
            async with stream.server.http.get(f"{stream.server.url}/metrics") as answer:
                return line in (await answer.text()).splitlines()

        async with asyncio.timeout(60):
            while not await is_shown("seamark_stream_waiting_rows 2.0"):
                await asyncio.sleep(0.1)
            assert await is_shown("seamark_stream_log_failed 0.0")
            log = await stream.server.components.streams._logs.open()
            log._failure = "The disk failed"  # type: ignore[attr-defined]
            while not await is_shown("seamark_stream_log_failed 1.0"):
                await asyncio.sleep(0.1)


async def test_metrics_count_appends_refusals_and_flushes(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1}, {"id": 2})
        await stream.flush()
        await run_stream_command(stream.server.url, "pause", "db.t")
        assert (await stream.send_and_read_error(b'[{"id": 3}]'))[0] == 503

        async def is_shown(*lines: str) -> bool:
            async with stream.server.http.get(f"{stream.server.url}/metrics") as answer:
                return set(lines) <= set((await answer.text()).splitlines())

        names = [f"seamark_stream_{name}_total" for name in ("appended_rows", "flushed_rows", "refused_appends")]
        async with asyncio.timeout(60):
            while not await is_shown(f"{names[0]} 2.0", f"{names[1]} 2.0", f"{names[2]} 1.0"):
                await asyncio.sleep(0.1)


async def test_permanently_failing_flush_is_shown_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stream_server(tmp_path, stream_flush_interval_ms=1) as stream:
        await create_stream_table(stream)
        url = stream.server.url

        async def list_problems() -> set[str]:
            status, health = await stream.server.get("/api/v1/tables/db/t/health")
            assert status == 200, health
            return {problem["problem"] for problem in health["problems"]}

        with monkeypatch.context() as patch:

            def refuse(*args: object) -> None:
                raise BadRequest("The rows do not fit the table: add the column back")

            patch.setattr(row_files, "encode_rows", refuse)
            await stream.post({"id": 1})
            async with asyncio.timeout(60):
                while "blocked flush" not in await list_problems():
                    await asyncio.sleep(0.02)
            assert "and will be retried: The rows do not fit the table" in await run_stream_command(url, "show", "db.t")
            (listed_stream,) = json.loads(await run_stream_command(url, "list", "--json"))
            assert listed_stream["flush-error"] == "The rows do not fit the table: add the column back"
        assert await run_stream_command(url, "flush", "db.t") == "1 row of db.t was flushed\n"
        assert json.loads(await run_stream_command(url, "show", "db.t", "--json"))["flush-error"] is None
        assert "blocked flush" not in await list_problems()


async def test_errors_of_flushes_are_shown_only_to_principals_that_may_list_files(tmp_path: Path) -> None:
    clock, secret = OffsetClock(), "data/ssn=078-05-1120/a.parquet"
    headers: dict[str, dict[str, str]] = {}
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        # The server flushes a table without a snapshot at once, so the append creates one.
        await append_batch(stream, 1)
        for name, role in (("ann", "reader"), ("bob", "browse"), ("eve", "writer")):
            token = await create_token(
                stream.server.components.store, clock, name, ttl_s=None, grants=[Grant(name, role, ("db",))]
            )
            headers[name] = {"Authorization": f"Bearer {token}"}
    async with run_server(tmp_path, auth="token", clock=clock, stream_flush_interval_ms=NEVER_MS) as server:
        url = f"{server.url}/api/v1/tables/db/t/rows"
        async with server.http.post(url, json=[{"id": 2}], headers=headers["eve"]) as answer:
            assert answer.status == 200, await answer.text()
        clock.ahead_ms = 4 * NEVER_MS
        (state,) = server.components.streams._flushes.values()
        # This is the state after a flush could not read a file of the table.
        state.not_before_s, state.failures, state.error = float("inf"), 1, f"The file {secret} is corrupt"
        for problem, is_blocked in (("late flush", False), ("blocked flush", True)):
            state.is_blocked = is_blocked
            for name, is_shown in (("ann", True), ("bob", False)):
                words_by_path = {
                    "tables/db/t/stream": "flush-error",
                    "streams": "flush-error",
                    "tables/db/t/health": problem,
                }
                for path, word in words_by_path.items():
                    status, document = await server.get(f"/api/v1/{path}", headers=headers[name])
                    text = json.dumps(document)
                    assert (status, word in text, secret in text) == (200, True, is_shown), text


async def test_health_reports_a_pause_a_late_flush_and_full_memory(tmp_path: Path) -> None:
    clock = OffsetClock()
    async with run_server(
        tmp_path, clock=clock, stream_flush_interval_ms=NEVER_MS, stream_memory_bytes=1 << 20
    ) as server:
        catalog = await asyncio.to_thread(RestCatalog, "health", uri=server.url)
        stream = StreamServer(server, catalog)
        await create_stream_table(stream)
        # The server flushes a table without a snapshot at once, so the append creates one.
        await append_batch(stream, 1)
        await stream.post({"id": 2})

        async def list_problems() -> set[str]:
            status, health = await server.get("/api/v1/tables/db/t/health")
            assert status == 200, health
            return {problem["problem"] for problem in health["problems"]}

        alerts = {"paused stream", "late flush", "full stream memory", "waiting topic", "lost messages"}
        assert not await list_problems() & alerts
        await run_stream_command(server.url, "pause", "db.t")
        assert await list_problems() & alerts == {"paused stream"}
        (table,) = server.components.streams.tables.values()
        # This is the state during a hanging flush.
        server.components.streams._flushes[table.uuid].not_before_s = float("inf")
        table.appending_bytes += 600 << 10  # This is more than half of the memory.
        server.components.streams.topic_counts.waiting[table.uuid] = "the log is busy"
        server.components.streams.topic_counts.lost[table.uuid] = 1
        clock.ahead_ms = 4 * NEVER_MS
        assert await list_problems() & alerts == alerts
        table.appending_bytes -= 600 << 10


async def test_reader_without_rights_on_the_namespace_sees_no_stream(tmp_path: Path) -> None:
    async with open_stream_server(tmp_path) as stream:
        await create_stream_table(stream)
        await stream.post({"id": 1})
        store, clock = stream.server.components.store, stream.server.components.clock
        tokens = {
            name: await create_token(
                store, clock, name, None, [Grant(name, "reader", namespace) for namespace in grants]
            )
            for name, grants in (("rita", [("db",)]), ("mallory", [("evil",)]), ("nobody", []))
        }
    async with run_server(tmp_path, auth="token") as server:
        tables_by_principal = {}
        for name, user_token in tokens.items():
            status, page = await server.get("/api/v1/streams", headers={"Authorization": f"Bearer {user_token}"})
            assert status == 200, page
            tables_by_principal[name] = [listed_stream["table"] for listed_stream in page["streams"]]
        assert tables_by_principal == {"rita": ["t"], "mallory": [], "nobody": []}
        assert (await server.get("/api/v1/streams"))[0] == 401
