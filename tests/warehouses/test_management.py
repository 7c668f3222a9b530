"""Tests of the routes that create, list, change and drop further warehouses."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import ConfigError
from tests.warehouses.world import WarehouseServer, run_server_with_warehouses

KEYS = {"s3_access_key_id": "AKIA-SALES", "s3_secret_access_key": "secret-of-sales"}
STORE, SERVER_STORE = "http://127.0.0.1:9", "http://127.0.0.1:10"


async def create_and_read_refusal(world: WarehouseServer, body: dict[str, Any]) -> str:
    """Try to create a warehouse with this definition, and return the message of the server's refusal."""
    status, answer = await world.send("POST", "/api/v1/warehouses", body)
    assert status == 400, answer
    return str(answer["error"]["message"])


async def test_admin_lists_warehouses_and_changes_their_settings(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "stock", "sales") as world:
        _, page = await world.send("GET", "/api/v1/warehouses")
        assert [warehouse["name"] for warehouse in page["warehouses"]] == ["sales", "stock"]
        status, changed_warehouse = await world.send(
            "PUT", "/api/v1/warehouses/sales", {"settings": {"drop_retention_s": 0, "namespace_entries_limit": 2}}
        )
        assert (status, changed_warehouse["settings"]) == (200, {"drop_retention_s": 0, "namespace_entries_limit": 2})
        assert await world.send("GET", "/api/v1/warehouses/sales") == (200, changed_warehouse)

        # The changed quota applies to the next request.
        await world.create_table("/v1/sales", "db", "t")
        status, error = await world.send(
            "POST", "/v1/sales/namespaces/db/tables", {"name": "u", "schema": {"type": "struct", "fields": []}}
        )
        assert (status, error["error"]["type"]) == (403, "ForbiddenException")


async def test_only_an_empty_warehouse_is_dropped(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales", "stock") as world:
        await world.send("POST", "/v1/sales/namespaces", {"namespace": ["db"]})
        status, error = await world.send("DELETE", "/api/v1/warehouses/sales")
        assert (status, error["error"]["type"]) == (409, "NamespaceNotEmptyException")
        await world.send("DELETE", "/v1/sales/namespaces/db")
        assert (await world.send("DELETE", "/api/v1/warehouses/sales"))[0] == 204
        assert (await world.send("GET", "/v1/sales/namespaces"))[0] == 404
        assert (await world.send("GET", "/v1/stock/namespaces"))[0] == 200
        await world.create_warehouse("sales")
        _, listing = await world.send("GET", "/v1/sales/namespaces")
        assert listing["namespaces"] == []


async def test_warehouse_with_dropped_tables_is_not_dropped(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        await world.create_table("/v1/sales", "db", "t")
        await world.send("DELETE", "/v1/sales/namespaces/db/tables/t")
        await world.send("DELETE", "/v1/sales/namespaces/db")
        status, error = await world.send("DELETE", "/api/v1/warehouses/sales")
        assert (status, error["error"]["type"]) == (409, "NamespaceNotEmptyException")
        assert "files are left" in error["error"]["message"]


async def test_put_creates_a_warehouse_and_a_repeat_changes_nothing(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path) as world:
        body = {"location": f"file://{world.lake}/sales", "settings": {"timeline_keep": 7}}
        creation = await world.send("PUT", "/api/v1/warehouses/sales", body)
        repeat = await world.send("PUT", "/api/v1/warehouses/sales", body)
        assert creation[0] == repeat[0] == 200
        assert creation[1] | {"version": 2} == repeat[1]
        same_location = await world.send("PUT", "/api/v1/warehouses/sales", {"location": f"file:{world.lake}/sales/"})
        assert (same_location[0], same_location[1]["version"]) == (200, 3)
        move = await world.send("PUT", "/api/v1/warehouses/sales", {"location": f"file://{world.lake}/other"})
        assert move[0] == 400
        assert (await world.send("PUT", "/api/v1/warehouses/none", {}))[0] == 404


async def test_location_and_endpoint_must_be_allowed_by_the_operator(tmp_path: Path) -> None:
    outside_folder = tmp_path / "outside"
    outside_folder.mkdir()
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        (world.lake / "link").symlink_to(outside_folder)
        home = tmp_path / "home"
        for location in (
            f"file://{outside_folder}",
            f"file://{world.lake}/link",
            f"file://{world.lake}/link/deeper",
            f"file://{tmp_path}",
            f"file://{home}/warehouse",
            f"file://{world.lake}/../outside",
            "file:///etc",
            "s3://bucket/sales",
        ):
            assert await create_and_read_refusal(world, {"name": "new", "location": location})
        for location in (f"file://{world.lake}", f"file://{world.lake}/sales/", f"file://{world.lake}/sales/db"):
            message = await create_and_read_refusal(world, {"name": "new", "location": location})
            assert "overlaps" in message
        assert not (world.lake / "sales" / "db").exists()
        assert not (outside_folder / "deeper").exists()
        definition = {"name": "new", "location": f"file://{world.lake}/new"}
        endpoint = {"settings": {"s3_endpoint": "http://169.254.169.254"}, "credentials": KEYS}
        assert "warehouse_endpoints" in await create_and_read_refusal(world, definition | endpoint)
        region = {"settings": {"s3_region": "x@10.0.0.5:8443/api/x?"}, "credentials": KEYS}
        assert "[a-z0-9-]{1,40}" in await create_and_read_refusal(world, definition | region)
    async with run_server_with_warehouses(tmp_path, s3_endpoint=STORE, azure_endpoint=STORE) as world:
        for name, keys in (("s3_endpoint", KEYS), ("azure_endpoint", {"azure_account_key": "a2V5"})):
            body = definition | {"settings": {name: ""}, "credentials": keys}
            assert "warehouse_endpoints" in await create_and_read_refusal(world, body)
    async with run_server_with_warehouses(tmp_path, warehouse_roots=()) as world:
        assert "--warehouse-roots" in await create_and_read_refusal(world, definition)


async def test_malformed_or_reserved_name_is_refused(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, prefix="own") as world:
        for name in ("", "Sales", "sales/x", "sales.x", "-x", "x" * 64, "namespaces", "config", "default", "own"):
            assert "name" in await create_and_read_refusal(
                world, {"name": name, "location": f"file://{world.lake}/x"}
            ), name


async def test_prefix_of_the_server_cannot_be_the_name_of_a_warehouse(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales"):
        pass
    with pytest.raises(ConfigError, match="prefix"):
        async with run_server_with_warehouses(tmp_path, prefix="sales"):
            pass


async def test_warehouse_can_neither_change_server_settings_nor_use_the_servers_keys(tmp_path: Path) -> None:
    roots = ("s3://lake/warehouses",)
    server_keys = {"s3_endpoint": SERVER_STORE, "s3_access_key_id": "x", "s3_secret_access_key": "x"}
    async with run_server_with_warehouses(
        tmp_path, warehouse_roots=roots, warehouse_endpoints=(STORE, ""), **server_keys
    ) as world:
        definition = {"name": "new", "location": "s3://lake/warehouses/new"}
        for name in ("auth", "home", "database", "s3_folder", "webhook_urls", "s3_secret_access_key", "prefix"):
            assert name in await create_and_read_refusal(world, definition | {"settings": {name: "x"}})
        for endpoint in (STORE, ""):
            assert "credentials" in await create_and_read_refusal(
                world, definition | {"settings": {"s3_endpoint": endpoint}}
            )
        for name, value in (("s3_path_style", False), ("s3_region", "eu-west-1")):
            assert "credentials" in await create_and_read_refusal(world, definition | {"settings": {name: value}})
        assert "static" in await create_and_read_refusal(
            world, definition | {"settings": {"s3_client_access": "static"}}
        )
        assert "gateway" in await create_and_read_refusal(
            world, definition | {"settings": {"s3_client_access": "gateway"}}
        )
        for name in ("s3_access_key_id", "s3_secret_access_key"):
            assert "must be set together" in await create_and_read_refusal(
                world, definition | {"credentials": {name: "x"}}
            )


async def test_credentials_are_encrypted_and_never_shown(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"warehouse_roots": ("s3://lake/warehouses",), "warehouse_endpoints": (STORE,)}
    async with run_server_with_warehouses(tmp_path, **settings) as world:
        location = "s3://lake/warehouses/sales"
        body = {"settings": {"s3_endpoint": STORE, "s3_client_access": "signing"}, "credentials": KEYS}
        creation = await world.send("POST", "/api/v1/warehouses", {"name": "sales", "location": location, **body})
        listing = await world.send("GET", "/api/v1/warehouses")
        # A change without credentials keeps them. A change of the store requires them.
        change = await world.send("PUT", "/api/v1/warehouses/sales", {"settings": {"s3_endpoint": STORE}})
        assert (creation[0], change[0], change[1]["has-credentials"]) == (201, 200, True)
        refusal = await world.send(
            "PUT", "/api/v1/warehouses/sales", {"settings": {"s3_endpoint": STORE}, "credentials": {}}
        )
        assert refusal[0] == 400
        for answer in (creation, listing, change, refusal):
            assert not any(value in str(answer) for value in KEYS.values())
    with closing(sqlite3.connect(tmp_path / "home" / "seamark.db")) as database:
        ((sealed_credentials,),) = database.execute("SELECT credentials FROM warehouses")
    assert sealed_credentials
    for file in (tmp_path / "home").glob("*.db*"):
        assert not any(value.encode() in file.read_bytes() for value in KEYS.values())


async def test_number_of_warehouses_is_limited(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "a", "b", warehouses_limit=2) as world:
        assert "warehouses_limit" in await create_and_read_refusal(
            world, {"name": "c", "location": f"file://{world.lake}/c"}
        )


async def test_warehouses_exist_after_a_restart(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        await world.create_table("/v1/sales", "db", "t")
    async with run_server_with_warehouses(tmp_path) as world:
        status, tables = await world.send("GET", "/v1/sales/namespaces/db/tables")
        assert (status, [table["name"] for table in tables["identifiers"]]) == (200, ["t"])


async def test_warehouse_with_a_lost_database_is_not_served_as_empty(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as world:
        answer = await world.create_table("/v1/sales", "db", "t")
        (warehouse,) = (await world.send("GET", "/api/v1/warehouses"))[1]["warehouses"]
    for file in (tmp_path / "home").glob(f"seamark-{warehouse['id']}.db*"):
        file.unlink()
    async with run_server_with_warehouses(tmp_path) as world:
        assert (await world.send("GET", "/v1/sales/namespaces/db/tables"))[0] == 503
        assert (await world.send("POST", "/v1/sales/namespaces", {"namespace": ["db"]}))[0] == 503
        assert (await world.send("DELETE", "/api/v1/warehouses/sales"))[0] >= 400
    assert Path(answer["metadata-location"].removeprefix("file://")).exists()
