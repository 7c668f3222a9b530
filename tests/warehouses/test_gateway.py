"""Tests that keys of the objects gateway reach only one table of one warehouse."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from yarl import URL

from seamark.metaserver.server import serve_gateway
from tests.gateway.rig import Keys, read_keys
from tests.services.process import choose_free_port
from tests.waits import PATIENCE_S
from tests.warehouses.world import SCHEMA, WarehouseServer, run_server_with_warehouses

ROOTS = {"": "/v1", "sales": "/v1/sales", "stock": "/v1/stock"}


@asynccontextmanager
async def run_gateway(folder: Path, **settings: Any) -> AsyncIterator[WarehouseServer]:
    """Run a server with a gateway in front of a folder.

    The bucket `lake` has the server's own warehouse, and the warehouses `sales` and `stock`.
    """
    options: dict[str, Any] = {
        "warehouse": "s3://lake/own",
        "warehouse_roots": ("s3://lake/further",),
        "s3_folder": str(folder / "objects"),
        "s3_client_access": "gateway",
        "gateway_port": choose_free_port(),
        **settings,
    }
    async with run_server_with_warehouses(folder, **options) as world, serve_gateway(world.server.components):
        for name in ("sales", "stock"):
            await world.create_warehouse(name, location=f"s3://lake/further/{name}")
        yield world


async def create_keys(world: WarehouseServer, warehouse: str, name: str = "t") -> Keys:
    return read_keys(await world.create_table(ROOTS[warehouse], "db", name))


async def send_and_read_error_code(
    world: WarehouseServer, keys: Keys, target: Keys, method: str = "GET", name: str = "data/o", **headers: str
) -> str:
    """Send a request with `keys` for the object `name` of the table to which the keys `target` belong.

    Return "OK", the code of the error, or an empty text for an error without a code.
    """
    path, signed_headers = replace(keys, prefix=target.prefix).sign(method, name, **headers)
    url, body = URL(f"{keys.endpoint}{path}", encoded=True), b"own" if method == "PUT" and not headers else None
    async with world.server.http.request(method, url, data=body, headers=signed_headers) as answer:
        text = await answer.text()
    matched = re.search("<Code>(.*?)</Code>", text)
    return "OK" if answer.status == 200 else "" if matched is None else matched[1]


def list_forged_keys(keys: Keys, victim: Keys) -> list[Keys]:
    """Return keys with which the holder of `keys` may try to open the table of `victim`.

    They are the own keys, combinations of parts of both keys, and a token of a warehouse that does not exist. A token
    consists of the id of its warehouse, which is missing for the server's own warehouse, and a signed part.
    """
    warehouse_id, _, signed_part = keys.token.rpartition(".")
    victim_id, _, victim_signed_part = victim.token.rpartition(".")
    return [
        keys,
        replace(keys, token=f"{victim_id}.{signed_part}"),
        replace(keys, token=signed_part),
        replace(keys, token=victim.token),
        replace(victim, secret=keys.secret),
        replace(victim, token=f"{warehouse_id}.{victim_signed_part}"),
        replace(victim, token=victim_signed_part)
        if victim_id
        else replace(victim, token=f"{warehouse_id}.{victim_signed_part}"),
        replace(keys, token=f"{'0' * 32}.{signed_part}"),
    ]


async def attack_each_warehouse(world: WarehouseServer, keys_by_warehouse: dict[str, Keys]) -> None:
    for keys in keys_by_warehouse.values():
        assert await send_and_read_error_code(world, keys, keys, "PUT") == "OK"
        assert await send_and_read_error_code(world, keys, keys) == "OK"
    for attacker, victim in itertools.permutations(keys_by_warehouse.values(), 2):
        for forged_keys in list_forged_keys(attacker, victim):
            for method in ("GET", "PUT", "DELETE"):
                assert await send_and_read_error_code(world, forged_keys, victim, method) in (
                    "AccessDenied",
                    "SignatureDoesNotMatch",
                )
        source = f"/{victim.bucket}/{victim.prefix}data/o"
        code = await send_and_read_error_code(world, attacker, attacker, "PUT", "data/copy", x_amz_copy_source=source)
        assert code == "AccessDenied"


async def test_keys_of_one_warehouse_reach_nothing_of_another(tmp_path: Path) -> None:
    async with run_gateway(tmp_path) as world:
        keys_by_warehouse = {name: await create_keys(world, name) for name in ROOTS}
        assert len({keys.endpoint for keys in keys_by_warehouse.values()}) == 1
        await attack_each_warehouse(world, keys_by_warehouse)
        for name in ("sales", "stock"):
            client = keys_by_warehouse[name].make_client()
            address = {"Bucket": "lake", "Key": f"{keys_by_warehouse[name].prefix}data/o"}
            url = client.generate_presigned_url("get_object", address)
            client.close()
            async with world.server.http.get(url) as answer:
                assert (answer.status, await answer.read()) == (200, b"own")


def use_catalogs(url: str) -> dict[str, list[int]]:
    """Write and read the same table in each warehouse through the gateway. Return the rows of each warehouse."""
    rows = {}
    for number, name in enumerate(ROOTS):
        properties: dict[str, Any] = {"warehouse": name} if name else {}
        catalog = load_catalog(f"gateway {name}", type="rest", uri=url, **properties)
        catalog.create_namespace_if_not_exists("db")
        table = catalog.create_table("db.rows", pa.schema([("id", pa.int64())]))
        for value in (number, number + 10):
            table.append(pa.table({"id": [value]}))
        rows[name] = sorted(catalog.load_table("db.rows").scan().to_arrow()["id"].to_pylist())
    return rows


async def test_pyiceberg_reads_and_writes_each_warehouse_through_the_gateway(tmp_path: Path) -> None:
    async with run_gateway(tmp_path) as world:
        rows = await asyncio.to_thread(use_catalogs, world.url)
        assert rows == {"": [0, 10], "sales": [1, 11], "stock": [2, 12]}


async def test_keys_end_with_the_warehouse_or_its_access_through_the_gateway(tmp_path: Path) -> None:
    async with run_gateway(tmp_path) as world:
        sales_keys = await create_keys(world, "sales")
        # A warehouse with a staged table can be dropped, because the table is not in the catalog yet.
        await world.send("POST", "/v1/stock/namespaces", {"namespace": ["db"]})
        staged_request = {"name": "t", "schema": SCHEMA, "stage-create": True}
        stock_keys = read_keys((await world.send("POST", "/v1/stock/namespaces/db/tables", staged_request))[1])
        for keys in (sales_keys, stock_keys):
            assert await send_and_read_error_code(world, keys, keys, "PUT") == "OK"
        # A change of another setting does not end the keys.
        body = {"location": "s3://lake/further/sales", "settings": {"drop_retention_s": 5}}
        assert (await world.send("PUT", "/api/v1/warehouses/sales", body))[0] == 200
        assert await send_and_read_error_code(world, sales_keys, sales_keys) == "OK"
        body["settings"] = {"s3_client_access": "none"}
        assert (await world.send("PUT", "/api/v1/warehouses/sales", body))[0] == 200
        assert await send_and_read_error_code(world, sales_keys, sales_keys) == "AccessDenied"
        assert (await world.send("DELETE", "/v1/stock/namespaces/db"))[0] == 204
        assert (await world.send("DELETE", "/api/v1/warehouses/stock"))[0] == 204
        assert await send_and_read_error_code(world, stock_keys, stock_keys) == "AccessDenied"


async def send_slowly(permissions: list[asyncio.Event]) -> AsyncIterator[bytes]:
    """Yield a byte each time that the next event is set."""
    for permission in permissions:
        await permission.wait()
        yield b"x"


@pytest.mark.parametrize("change", ["change", "end"])
async def test_upload_survives_a_change_of_the_warehouse_but_not_the_end_of_its_keys(
    tmp_path: Path, change: str
) -> None:
    async with run_gateway(tmp_path, rights_recheck_s=0.05, drain_timeout_s=PATIENCE_S) as world:
        keys = await create_keys(world, "sales")
        path, headers = keys.sign("PUT", "data/slow", host=keys.endpoint.removeprefix("http://"))
        may_continue_events = [asyncio.Event(), asyncio.Event()]
        headers = {**headers, "Content-Length": "2"}
        # A task needs a coroutine, so `__aenter__` sends the request. Each event lets the body continue.
        upload = asyncio.create_task(
            world.server.http.put(
                f"{keys.endpoint}{path}", data=send_slowly(may_continue_events), headers=headers
            ).__aenter__()
        )
        may_continue_events[0].set()
        await send_and_read_error_code(world, keys, keys)
        settings = {"s3_client_access": "none"} if change == "end" else {"drop_retention_s": 5}
        body = {"location": "s3://lake/further/sales", "settings": settings}
        assert (await world.send("PUT", "/api/v1/warehouses/sales", body))[0] == 200
        # The catalog does not wait for the upload.
        assert (await world.send("GET", "/v1/sales/namespaces"))[0] == 200
        may_continue_events[1].set()
        answer = await upload
        assert answer.status == (403 if change == "end" else 200), await answer.text()
        answer.release()
