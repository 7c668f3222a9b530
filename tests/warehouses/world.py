"""A server with further warehouses in local folders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.server.rig import RunningServer, run_server

SCHEMA: dict[str, Any] = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "id", "type": "long", "required": False}],
}


@dataclass
class WarehouseServer:
    """A running server, and the folder below which its warehouses are created."""

    server: RunningServer
    lake: Path

    @property
    def url(self) -> str:
        return self.server.url

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Send a request, and return (status, JSON)."""
        async with self.server.http.request(method, self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json() if answer.content_length else None

    async def create_warehouse(self, name: str, **definition: Any) -> dict[str, Any]:
        defaults = {"name": name, "location": f"file://{self.lake / name}"}
        status, answer = await self.send("POST", "/api/v1/warehouses", {**defaults, **definition})
        assert status == 201, answer
        assert isinstance(answer, dict)
        return answer

    async def create_table(self, root: str, namespace: str, name: str) -> dict[str, Any]:
        """Create a table below `root`, such as `/v1/sales`, with its namespace."""
        await self.send("POST", f"{root}/namespaces", {"namespace": [namespace]})
        status, answer = await self.send(
            "POST", f"{root}/namespaces/{namespace}/tables", {"name": name, "schema": SCHEMA}
        )
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer


@asynccontextmanager
async def run_server_with_warehouses(folder: Path, *names: str, **settings: Any) -> AsyncIterator[WarehouseServer]:
    """Run a server in which warehouses with these names are created."""
    lake = folder / "lake"
    lake.mkdir(exist_ok=True)
    options: dict[str, Any] = {"warehouse_roots": (f"file://{lake}",), **settings}
    async with run_server(folder / "home", **options) as server:
        world = WarehouseServer(server, lake)
        for name in names:
            await world.create_warehouse(name)
        yield world
