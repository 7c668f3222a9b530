"""Tests of the databases of further warehouses: backups, moves, keys, and PostgreSQL."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import ConfigError
from tests.server.rig import build_settings
from tests.services.seamark import SHARED_KEY
from tests.support.commands import invoke_seamark
from tests.warehouses.world import WarehouseServer, run_server_with_warehouses


async def list_tables(world: WarehouseServer, root: str) -> list[str]:
    status, listing = await world.send("GET", f"{root}/namespaces/db/tables")
    assert status == 200, listing
    return [identifier["name"] for identifier in listing["identifiers"]]


async def run_command(folder: Path, *arguments: str, url: str = "") -> str:
    """Run a `seamark` command on the home of the server, and return its output. The server need not run."""
    env = {"SEAMARK_HOME": str(folder / "home"), "SEAMARK_ENCRYPTION_KEY": SHARED_KEY}
    code, output = await asyncio.to_thread(invoke_seamark, *arguments, url=url, env=env)
    assert code == 0, output
    return output


def delete_database(folder: Path) -> None:
    """Delete the database of the only further warehouse."""
    for file in (folder / "home").glob("seamark-*.db*"):
        file.unlink()


@pytest.mark.parametrize("command", [["backup", "file"], ["restore", "file"], ["rebuild"]])
def test_name_of_a_warehouse_in_the_option_of_its_uri_is_refused_with_the_other_option(
    tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    arguments = [command[0], *(str(tmp_path / name) for name in command[1:]), "--warehouse", "sales"]
    code, output = invoke_seamark(*arguments, env={"SEAMARK_HOME": str(tmp_path / "home")})
    assert code == 2
    assert "--warehouse-name sales" in output


async def test_backup_of_a_warehouse_is_restored(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        await world.create_table("/v1/sales", "db", "t")
        output = await run_command(tmp_path, "backup", str(tmp_path / "server"))
        assert "1 further warehouse" in output
        await run_command(tmp_path, "backup", str(tmp_path / "sales"), "--warehouse-name", "sales")
    delete_database(tmp_path)
    await run_command(tmp_path, "restore", str(tmp_path / "sales"), "--warehouse-name", "sales")
    async with run_server_with_warehouses(tmp_path) as world:
        assert await list_tables(world, "/v1/sales") == ["t"]
        assert (await world.send("GET", "/v1/namespaces/db/tables/t"))[0] == 404


async def test_server_does_not_start_on_the_database_of_a_warehouse(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales"):
        pass
    (database,) = (tmp_path / "home").glob("seamark-*.db")
    with pytest.raises(ConfigError, match="further warehouse"):
        async with run_server_with_warehouses(tmp_path, database=f"sqlite://{database}"):
            pass


@pytest.mark.slow
async def test_lost_database_of_a_warehouse_is_rebuilt_from_its_files(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        await world.create_table("/v1/sales", "db", "t")
        await world.create_table("/v1", "db", "own")
    delete_database(tmp_path)
    await run_command(tmp_path, "rebuild", "--warehouse-name", "sales")
    async with run_server_with_warehouses(tmp_path) as world:
        assert await list_tables(world, "/v1/sales") == ["t"]
        assert await list_tables(world, "/v1") == ["own"]


@pytest.mark.slow
async def test_move_of_a_server_includes_its_warehouses(tmp_path: Path, postgres_url: str) -> None:
    async with run_server_with_warehouses(tmp_path, "sales", "stock") as world:
        await world.create_table("/v1/sales", "db", "t")
        await world.create_table("/v1", "db", "own")
    await run_command(tmp_path, "migrate", "--to", postgres_url)
    shutil.rmtree(tmp_path / "home" / "warehouses")
    async with run_server_with_warehouses(tmp_path, database=postgres_url) as world:
        assert await list_tables(world, "/v1/sales") == ["t"]
        assert await list_tables(world, "/v1") == ["own"]
        # Each warehouse has its own schema, so names of one warehouse are unknown in another.
        await world.create_table("/v1/stock", "db", "t")
        await world.create_warehouse("new")
        await world.create_table("/v1/new", "db", "u")
        assert await list_tables(world, "/v1/stock") == ["t"]
        assert await list_tables(world, "/v1/new") == ["u"]
        for root, name in (("/v1/sales", "u"), ("/v1", "t"), ("/v1/new", "own")):
            assert (await world.send("GET", f"{root}/namespaces/db/tables/{name}"))[0] == 404


async def test_replaced_encryption_key_opens_all_warehouses(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"warehouse_roots": ("s3://lake/warehouses",)}
    keys = {"s3_access_key_id": "AKIA", "s3_secret_access_key": "secret"}
    async with run_server_with_warehouses(tmp_path, **settings) as world:
        body = {"name": "sales", "location": "s3://lake/warehouses/sales", "credentials": keys}
        status, created_warehouse = await world.send("POST", "/api/v1/warehouses", body)
        assert status == 201
    new_key = "A" * 43 + "="  # 32 zero bytes in base64
    settings_with_both_keys = {**settings, "encryption_key": f"{new_key},{build_settings(tmp_path).encryption_key}"}
    async with run_server_with_warehouses(tmp_path, **settings_with_both_keys) as world:
        warehouses = world.server.components.warehouses
        assert warehouses is not None
        await warehouses.synchronize_with_database()
        # The version of the warehouse does not change, so the server does not open it again.
        assert await world.send("GET", "/api/v1/warehouses/sales") == (200, created_warehouse)
    async with run_server_with_warehouses(tmp_path, **settings, encryption_key=new_key) as world:
        assert (await world.send("GET", "/v1/sales/namespaces"))[0] == 200


async def test_commands_work_in_the_warehouse_that_they_name(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path) as world:

        async def run(*arguments: str) -> str:
            return await run_command(tmp_path, *arguments, url=world.url)

        await run(
            "warehouse", "create", "sales", "--location", f"file://{world.lake}/sales", "--set", "timeline_keep=9"
        )
        assert "sales" in await run("warehouse", "list")
        await run("warehouse", "change", "sales", "--set", "drop_retention_s=0", "--unset", "timeline_keep")
        assert "drop_retention_s" in await run("warehouse", "show", "sales")
        await run("namespace", "create", "db", "--warehouse", "sales")
        assert "db" in await run("namespace", "list", "--warehouse", "sales")
        await run("grant", "add", "ann", "reader", "--warehouse", "sales")
        assert "ann" in await run("grant", "list", "--warehouse", "sales")
        assert "ann" not in await run("grant", "list")
        await run("namespace", "drop", "db", "--warehouse", "sales")
        await run("warehouse", "drop", "sales", "--yes")
        assert "no further warehouses" in await run("warehouse", "list")
