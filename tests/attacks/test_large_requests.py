"""Tests that the server answers other tenants while it checks the largest requests.

In these tests, each check waits until another tenant has received an answer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.commands.serving import explain_query
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.iceberg.types import schema
from seamark.formats.runtime import fair_lock, lazy_module
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.access.principal import set_principal
from seamark.metaserver.api.http import sql_texts
from seamark.metaserver.api.lookups import bitmaps, metadata
from seamark.metaserver.api.plans import explain, plan_tables
from seamark.metaserver.catalog import documents, large_requests, values
from seamark.metaserver.commit.engine_commits import engine_commits
from seamark.metaserver.runtime.large_metadata import LargeMetadata
from seamark.metaserver.store.model import EntryKind
from tests.api.client import VIEW_VERSION, Answer, Api
from tests.attacks.world import SCHEMA
from tests.server.rig import RunningServer, run_server
from tests.server.test_bodies import make_tokens

NAMES = "/v1/namespaces/db"
WIDE_SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": number + 1, "name": f"c{number}", "required": False, "type": "long"} for number in range(2_500)],
}
VIEW = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}}
LONG_TEXT = {**VIEW_VERSION, "representations": [{"type": "sql", "sql": "S" * 200_000, "dialect": "trino"}]}
PROPERTIES = {"action": "set-properties", "updates": {f"k{number}": "v" * 30 for number in range(4_000)}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a table": (f"{NAMES}/tables", {"name": "wide", "schema": WIDE_SCHEMA}),
    "properties": (f"{NAMES}/tables", {"name": "rich", "schema": SCHEMA, "properties": PROPERTIES["updates"]}),
    "a commit": (f"{NAMES}/tables/t", {"requirements": [], "updates": [PROPERTIES]}),
    "a transaction": (
        "/v1/transactions/commit",
        {
            "table-changes": [
                {"identifier": {"namespace": ["db"], "name": "t"}, "requirements": [], "updates": [PROPERTIES]}
            ]
        },
    ),
    "a view": (f"{NAMES}/views", {**VIEW, "name": "long", "view-version": LONG_TEXT}),
    "a view's commit": (
        f"{NAMES}/views/v",
        {"requirements": [], "updates": [{"action": "add-view-version", "view-version": LONG_TEXT}]},
    ),
}

STORED_CASE = "a short commit of a table with many properties"
SHORT_COMMIT = {"requirements": [], "updates": [{"action": "set-properties", "updates": {"k": "v"}}]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path) as server:
        for path, body in (
            (f"{NAMES}/tables", {"name": "t", "schema": SCHEMA}),
            (f"{NAMES}/tables", {"name": "stored", "schema": SCHEMA, "properties": PROPERTIES["updates"]}),
            (f"{NAMES}/views", VIEW),
        ):
            assert (await Api(server)("POST", path, body)).status == 200
        yield server


@pytest.mark.parametrize("name", [*REQUESTS, STORED_CASE])
async def test_other_tenants_are_answered_while_a_large_request_is_checked(
    server: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_started, is_answered = asyncio.Event(), threading.Event()
    loop, to_thread = asyncio.get_running_loop(), asyncio.to_thread

    async def run_after_answer(work: Callable[[], Any]) -> Any:
        def wait_and_work() -> Any:
            loop.call_soon_threadsafe(has_started.set)
            assert is_answered.wait(60)
            return work()

        return await to_thread(wait_and_work)

    monkeypatch.setattr(fair_lock, "_in_thread", run_after_answer)
    path, body = REQUESTS.get(name, (f"{NAMES}/tables/stored", SHORT_COMMIT))
    assert (len(json.dumps(body)) > large_requests.LARGE_BYTES) == (name != STORED_CASE)
    task: asyncio.Task[Answer] = asyncio.create_task(Api(server)("POST", path, body))
    async with asyncio.timeout(60):
        await has_started.wait()
        assert (await server.get(f"{NAMES}/tables/t"))[0] == 200
        assert not task.done()
        is_answered.set()
        assert (await task).status < 300


async def test_updates_of_a_large_commit_are_checked_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may write only one namespace, so the server checks the location of each file in a commit."""
    secrets = await make_tokens(tmp_path)
    thread_ids: dict[str, set[int]] = {}
    for module, name in ((values, "read_updates"), (engine_commits, "check_requirements")):
        function = getattr(module, name)

        def record_thread(*args: Any, name: str = name, original_function: Callable[..., Any] = function) -> Any:
            thread_ids.setdefault(name, set()).add(threading.get_ident())
            return original_function(*args)

        monkeypatch.setattr(module, name, record_thread)
    headers = {"Authorization": f"Bearer {secrets['wendy']}"}
    async with run_server(tmp_path, auth="token") as server:
        api = Api(server)
        assert (await api("POST", f"{NAMES}/tables", {"name": "t", "schema": SCHEMA}, headers=headers)).status == 200
        assert (await api("POST", f"{NAMES}/tables/t", SHORT_COMMIT, headers=headers)).status == 200
        assert set.union(*thread_ids.values()) == {threading.get_ident()}
        snapshot = {"snapshot-id": 1, "sequence-number": 1, "timestamp-ms": 1, "summary": {"operation": "append"}}
        snapshot["manifest-list"] = f"file://{tmp_path}/missing.avro"
        add_snapshot_update = {"action": "add-snapshot", "snapshot": snapshot}
        for updates, status in (([PROPERTIES], 200), ([PROPERTIES, add_snapshot_update], 400)):
            thread_ids.clear()
            body = {"requirements": [], "updates": updates}
            answer = await api("POST", f"{NAMES}/tables/t", body, headers=headers)
            assert answer.status == status, answer.raw
            assert len(thread_ids) == 2, "both functions ran"
            assert threading.get_ident() not in set.union(*thread_ids.values())


async def test_large_metadata_is_read_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first server creates the table. The second server has not cached its metadata.

    It must decode the metadata, and build the index of columns, on another thread, before the plan needs them.
    """
    fields = [{"id": number + 1, "name": f"c{number}", "required": False, "type": "long"} for number in range(3_000)]
    async with run_server(tmp_path) as server:
        wide_table = {"name": "t", "schema": {"type": "struct", "schema-id": 0, "fields": fields}}
        assert (await Api(server)("POST", f"{NAMES}/tables", wide_table)).status == 200
    thread_ids: dict[str, set[int]] = {"decode": set(), "index": set()}
    decode_unpatched, build_index = decode_table, schema._build_index

    def decode_and_record_thread(data: bytes, location: str) -> Any:
        thread_ids["decode"].add(threading.get_ident())
        return decode_unpatched(data, location)

    def index_and_record_thread(table_schema: Any) -> Any:
        if len(table_schema.fields) == len(fields):
            thread_ids["index"].add(threading.get_ident())
        return build_index(table_schema)

    monkeypatch.setattr(documents, "decode_table", decode_and_record_thread)
    monkeypatch.setattr(schema, "_build_index", index_and_record_thread)
    async with run_server(tmp_path) as server:
        body = {"filter": {"type": "eq", "term": "c7", "value": 1}}
        assert (await Api(server)("POST", f"{NAMES}/tables/t/plan", body)).status == 200
    for name, ids in thread_ids.items():
        assert ids, name
        assert threading.get_ident() not in ids, name


async def test_large_metadata_of_one_principal_leave_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        for name in ("one", "two"):
            assert (await Api(server)("POST", f"{NAMES}/tables", {"name": name, "schema": SCHEMA})).status == 200
        entries = [await server.components.store.load_entry(EntryKind.TABLE, ("db",), name) for name in ("one", "two")]
        first_location, second_location = [entry.metadata_location for entry in entries if entry is not None]
        monkeypatch.setattr(documents, "LARGE_METADATA_BYTES", 100)
        cache = documents.Documents(server.components.catalog.context.objects, SystemClock(), budget_bytes=0)
        # The metadata of one table take about 6,000 bytes, so the half of one principal has room for two tables.
        cache._large = LargeMetadata(26_000)
        with set_principal("mallory"):
            held_metadata = [await cache.table(first_location), await cache.table(second_location)]
            with pytest.raises(RetryLater, match="too much memory"):
                await cache.table(first_location)
            refused_request = asyncio.create_task(cache.table(first_location))
            await asyncio.sleep(0)
        with set_principal("viola"):  # viola waits for the read that mallory has begun.
            (error, metadata) = await asyncio.gather(
                refused_request, cache.table(first_location), return_exceptions=True
            )
            assert isinstance(error, RetryLater)
            assert isinstance(metadata, TableMetadata)
            assert metadata.table_uuid == held_metadata[0].table_uuid
            del metadata
        # The server's own work has no principal, and is not limited.
        own_metadata = [await cache.peek(first_location) for _ in range(5)]
        assert len(own_metadata) == 5
        cache._large.check_invariants()
        del held_metadata[0]
        with set_principal("mallory"):
            assert (await cache.table(first_location)).location
            cache._large = LargeMetadata(200)  # This is less than the metadata of one table.
            assert (await cache.table(second_location)).location, "a single table is accepted"
        cache._large.check_invariants()
        assert cache._large.queue.is_free

        cache = documents.Documents(server.components.catalog.context.objects, SystemClock(), budget_bytes=1 << 20)
        cache._large = LargeMetadata(200)
        with set_principal("mallory"):
            for location in (
                first_location,
                second_location,
                first_location,
            ):  # Metadata that only the cache keeps are evicted.
                assert (await cache.table(location)).location

        is_decoding, may_end = threading.Event(), threading.Event()

        def decode(data: bytes, location: str) -> TableMetadata:
            is_decoding.set()
            may_end.wait(60)
            return decode_table(data, location)

        cache.cache.clear()
        monkeypatch.setattr(documents, "LARGE_BYTES", 100)
        monkeypatch.setattr(documents, "decode_table", decode)
        monkeypatch.setattr(documents, "LARGE_METADATA_BYTES", 0)
        request = asyncio.create_task(cache.peek(first_location))
        assert await asyncio.to_thread(is_decoding.wait, 60)
        request.cancel()
        await asyncio.wait((request,))
        assert not cache._large.queue.is_free, "the thread of a cancelled request keeps its place"
        may_end.set()
        while not cache._large.queue.is_free:
            await asyncio.sleep(0.01)


async def test_first_requests_import_modules_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server imports some modules only when a request needs them.

    The imports of a SQL parser, and of pandas, which PyArrow imports if it is installed, take a tenth of a second each.
    """
    thread_ids: dict[str, int] = {}
    import_unpatched, encode_arrow = importlib.import_module, metadata._encode_arrow

    def import_module(name: str, package: str | None = None) -> Any:
        thread_ids.setdefault(name, threading.get_ident())
        return import_unpatched(name, package)

    def encode_and_record_thread(*args: Any) -> Any:
        thread_ids["arrow"] = threading.get_ident()
        return encode_arrow(*args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(metadata, "_encode_arrow", encode_and_record_thread)
    for module in (bitmaps, explain, explain_query, plan_tables, sql_texts):
        for name, value in vars(module).copy().items():
            if isinstance(value, lazy_module.LazyModule):
                monkeypatch.setattr(module, name, lazy_module.LazyModule(value._name))
    async with run_server(tmp_path) as server:
        api = Api(server)
        await api.create_table()
        table_url, query = "/api/v1/tables/db/t", {"query": "SELECT id FROM db.t WHERE id = 5", "dialect": "trino"}
        for path, request_body in (
            ("/api/v1/explain-query", query),
            (f"{table_url}/explain", {"where": "id > 0"}),
            (f"{table_url}/bitmap", {"where": "id > 0"}),
            (f"{table_url}/plan-tables", {"predicate": "id > 0"}),
        ):
            assert (await api("POST", path, request_body)).status == 200, path
        accept = {"Accept": "application/vnd.apache.arrow.stream"}
        assert (await api("GET", f"{table_url}/files", headers=accept)).status == 200
    for name in (
        "arrow",
        "seamark.formats.iceberg.expressions.sql",
        "seamark.commands.serving.query_tables",
        "seamark.commands.serving.query_notes",
    ):
        assert thread_ids[name] != threading.get_ident(), name
