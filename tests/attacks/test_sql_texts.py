"""Tests that the server answers other tenants while it parses SQL: one text at a time, and long texts in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime import fair_lock
from tests.api.client import Answer, Api
from tests.attacks.world import SCHEMA
from tests.server.rig import RunningServer, run_server

TABLE = "/api/v1/tables/db/t"
LONG_CONDITION = " OR ".join(["id = 1"] * 200)
REQUESTS_WITH_SQL: dict[str, tuple[str, dict[str, Any]]] = {
    "a predicate": (f"{TABLE}/explain", {"where": LONG_CONDITION}),
    "a predicate of a join": (
        f"{TABLE}/explain",
        {"joins": [{"table": ["db", "t"], "on": {"id": "id"}, "predicate": LONG_CONDITION}]},
    ),
    "a predicate of rows": (f"{TABLE}/bitmap", {"where": LONG_CONDITION}),
    "a predicate of a plan table": (f"{TABLE}/plan-tables", {"predicate": LONG_CONDITION}),
    "a query": ("/api/v1/explain-query", {"query": f"SELECT 1 FROM db.t WHERE {LONG_CONDITION}"}),
    "a query of DuckDB": (
        "/api/v1/explain-query",
        {"query": f"SELECT 1 FROM db.t WHERE {LONG_CONDITION}", "dialect": "duckdb"},
    ),
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path) as server:
        assert (await Api(server)("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA})).status == 200
        yield server


@pytest.mark.parametrize("name", REQUESTS_WITH_SQL)
async def test_one_text_is_parsed_at_a_time_while_other_requests_are_answered(
    server: RunningServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_started, is_answered = asyncio.Event(), threading.Event()
    loop, original_to_thread = asyncio.get_running_loop(), asyncio.to_thread
    running_count = running_max = 0

    async def to_thread(work: Callable[[], Any]) -> Any:
        nonlocal running_count, running_max
        running_count += 1
        running_max = max(running_max, running_count)

        def wait_and_work() -> Any:
            loop.call_soon_threadsafe(has_started.set)
            assert is_answered.wait(60)
            return work()

        try:
            return await original_to_thread(wait_and_work)
        finally:
            running_count -= 1

    monkeypatch.setattr(fair_lock, "_in_thread", to_thread)
    path, body = REQUESTS_WITH_SQL[name]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Answer]] = [group.create_task(Api(server)("POST", path, body)) for _ in range(3)]
        await has_started.wait()
        assert (await server.get("/v1/namespaces/db/tables/t"))[0] == 200
        assert not any(task.done() for task in tasks)
        is_answered.set()
        for task in tasks:
            answer = await task
            assert answer.status == 200, answer.raw
    assert (running_count, running_max) == (0, 1)


async def test_short_text_is_parsed_without_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def to_thread(*args: object) -> None:
        raise AssertionError("a thread takes longer than the text")

    monkeypatch.setattr(fair_lock, "_in_thread", to_thread)
    assert (await Api(server)("POST", f"{TABLE}/explain", {"where": "id = 1"})).status == 200
