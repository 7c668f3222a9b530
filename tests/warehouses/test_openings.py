"""Tests of the opening and closing of the warehouses of a process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiohttp import web

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ConfigError, RetryLater
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.warehouses import ServedWarehouse, Warehouses, open_warehouses
from tests.server.rig import build_settings


@dataclass
class Openings:
    """Warehouses of a process, with a list of their openings and closings. They fail to open if `must_fail` is set."""

    warehouses: Warehouses
    store: PointerStore
    clock: SimulatedClock
    lake: Path
    events: list[str] = field(default_factory=list)
    must_fail: bool = False

    @asynccontextmanager
    async def open(self, settings: Settings, stored_warehouse: StoredWarehouse) -> AsyncIterator[ServedWarehouse]:
        self.events.append(f"open {stored_warehouse.version}")
        if self.must_fail:
            raise ConfigError("The database is missing")
        yield ServedWarehouse(_answer, lambda: None)
        await asyncio.sleep(0)
        self.events.append(f"close {stored_warehouse.version}")

    async def create(self, name: str) -> StoredWarehouse:
        return await self.warehouses.create(name, f"file://{self.lake / name}", {}, {}, "ann")

    async def is_served(self, name: str) -> bool:
        async with self.warehouses.use(name) as warehouse:
            return warehouse is not None


async def _answer(request: web.Request) -> web.StreamResponse:
    return web.Response()


@pytest.fixture
async def openings(tmp_path: Path) -> AsyncIterator[Openings]:
    """Yield the warehouses of a process, which open through the recording `Openings.open`."""
    clock, lake = SimulatedClock(1), tmp_path / "lake"
    lake.mkdir()
    settings = build_settings(tmp_path / "home", warehouse_roots=(f"file://{lake}",))
    async with open_store(settings.make_database_url(), clock=clock) as store:

        @asynccontextmanager
        async def open_recorded(
            _: Warehouses, own_settings: Settings, stored_warehouse: StoredWarehouse
        ) -> AsyncIterator[ServedWarehouse]:
            async with recorded_openings.open(own_settings, stored_warehouse) as served_warehouse:
                yield served_warehouse

        async with open_warehouses(settings, store, clock, open_recorded) as warehouses:
            recorded_openings = Openings(warehouses, store, clock, lake)
            yield recorded_openings


async def test_changed_warehouse_opens_after_its_earlier_instance_is_closed(openings: Openings) -> None:
    await openings.create("sales")
    async with openings.warehouses.use("sales"):
        await openings.warehouses.change("sales", {"timeline_keep": 7}, None)
        next_request = asyncio.create_task(openings.is_served("sales"))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(next_request), 0.1)
    assert await next_request
    assert openings.events == ["open 1", "close 1", "open 2"]


async def test_requests_for_unknown_names_cause_one_query_each_second(
    openings: Openings, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries: list[str] = []
    load_one, load_all = openings.store.load_warehouse, openings.store.list_warehouses

    async def record_load(name: str) -> StoredWarehouse | None:
        queries.append(name)
        return await load_one(name)

    async def record_list() -> list[StoredWarehouse]:
        queries.append("all")
        return await load_all()

    monkeypatch.setattr(openings.store, "load_warehouse", record_load)
    monkeypatch.setattr(openings.store, "list_warehouses", record_list)
    for number in range(20):
        assert not await openings.is_served(f"name{number}")
    assert queries == ["all"]
    # The process that creates a warehouse serves it at once. Other processes serve it within a second.
    await openings.create("name1")
    assert await openings.is_served("name1")


async def test_server_retries_to_open_a_failed_warehouse_after_some_seconds(openings: Openings) -> None:
    await openings.create("sales")
    openings.must_fail = True
    for _ in range(5):
        with pytest.raises(RetryLater, match="cannot be opened"):
            await openings.is_served("sales")
    assert openings.events == ["open 1"]
    openings.must_fail = False
    openings.clock.advance(6000)
    assert await openings.is_served("sales")
