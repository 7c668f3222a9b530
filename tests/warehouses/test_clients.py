"""Tests that PyIceberg uses several warehouses of one server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
from click.testing import CliRunner
from pyiceberg.catalog import Catalog, load_catalog

from seamark.commands.main import cli
from tests.warehouses.world import SCHEMA, run_server_with_warehouses

ROWS = {"": [1], "sales": [2, 3], "stock": [4, 5, 6]}


def use_all_warehouses(url: str) -> dict[str, list[int]]:
    """Create the table `db.t` in each warehouse, and append rows. Return the ids in each table by warehouse."""
    catalogs: dict[str, Catalog] = {}
    for name, values in ROWS.items():
        properties: dict[str, Any] = {"warehouse": name} if name else {}
        catalog = catalogs[name] = load_catalog(f"warehouse {name}", type="rest", uri=url, **properties)
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table("db.t", pa.schema([("id", pa.int64())]))
        table.append(pa.table({"id": values}))
    return {
        name: sorted(catalog.load_table("db.t").scan(row_filter="id > 0").to_arrow()["id"].to_pylist())
        for name, catalog in catalogs.items()
    }


async def test_pyiceberg_reads_in_each_warehouse_the_rows_of_this_warehouse(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales", "stock") as world:
        assert await asyncio.to_thread(use_all_warehouses, world.url) == ROWS
        for name in ("sales", "stock"):
            _, table = await world.send("GET", f"/v1/{name}/namespaces/db/tables/t")
            assert table["metadata"]["location"].startswith(f"file://{world.lake / name}/db/t-")


async def test_url_of_a_warehouse_serves_all_its_routes(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        config = await world.send("GET", "/warehouses/sales/v1/config")
        assert config == await world.send("GET", "/v1/config?warehouse=sales")
        assert config[1]["overrides"] == {"prefix": "sales"}
        await world.create_table("/warehouses/sales/v1", "db", "t")
        assert await world.send("GET", "/v1/sales/namespaces/db/tables") == await world.send(
            "GET", "/warehouses/sales/v1/sales/namespaces/db/tables"
        )
        status, timeline = await world.send("GET", "/warehouses/sales/api/v1/timeline")
        assert (status, [instant["name"] for instant in timeline["instants"]][-1:]) == (200, ["t"])
        _, timeline = await world.send("GET", "/api/v1/timeline")
        assert timeline["instants"] == []
        command = ["sql", "SELECT count(*) AS n FROM db.t", "--warehouse", "sales", "--url", world.url]
        result = await asyncio.to_thread(CliRunner().invoke, cli, command)
        assert result.output.endswith('"n"\n0\n')


async def test_location_outside_a_further_warehouse_is_refused_with_a_fix_that_applies(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        await world.create_table("/v1/sales", "db", "t")
        body = {"name": "u", "schema": SCHEMA, "location": f"file://{tmp_path}/elsewhere/u"}
        status, answer = await world.send("POST", "/v1/sales/namespaces/db/tables", body)
        assert status == 400
        assert "create a warehouse at a folder that contains it" in answer["error"]["message"]
        assert "allowed_locations" not in answer["error"]["message"]
