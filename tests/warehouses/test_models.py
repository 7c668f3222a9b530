"""Tests that random operations on several warehouses have the results of independent models.

The warehouses share one bucket behind the objects gateway. Old and new keys of all tables are used at random times.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from yarl import URL

from tests.gateway.rig import Keys, read_keys
from tests.seeds import mark_fast
from tests.waits import PATIENCE_S
from tests.warehouses.test_gateway import run_gateway
from tests.warehouses.world import SCHEMA, WarehouseServer

ROOTS = ("/v1", "/v1/sales", "/warehouses/stock/v1")
NAMESPACES = ("a", "b")
NAMES = ("t", "u")


@dataclass(frozen=True)
class TableKeys:
    """The S3 credentials of a table. They are valid while the table is in the namespace."""

    keys: Keys
    namespace: str
    uuid: str


class WarehouseModel:
    """The namespaces of one warehouse, and the UUID of each table.

    A method `expect_…` returns the status that the server must send. It also applies the operation to the model, except
    the creation of a table, because the server chooses its UUID.
    """

    def __init__(self) -> None:
        self.namespaces: dict[str, dict[str, str]] = {}
        self.keys: list[TableKeys] = []

    def has_valid_keys(self, keys: TableKeys) -> bool:
        return keys.uuid in self.namespaces.get(keys.namespace, {}).values()

    def expect_create_namespace(self, namespace: str) -> int:
        if namespace in self.namespaces:
            return 409
        self.namespaces[namespace] = {}
        return 200

    def expect_drop_namespace(self, namespace: str) -> int:
        if namespace not in self.namespaces:
            return 404
        if self.namespaces[namespace]:
            return 409
        del self.namespaces[namespace]
        return 204

    def expect_create_table(self, namespace: str, name: str) -> int:
        if namespace not in self.namespaces:
            return 404
        return 409 if name in self.namespaces[namespace] else 200

    def expect_drop_table(self, namespace: str, name: str) -> int:
        tables = self.namespaces.get(namespace, {})
        return 404 if tables.pop(name, None) is None else 204

    def expect_rename(self, source: tuple[str, str], target: tuple[str, str]) -> int:
        """Rename a table in the model, and return the status that the server must answer.

        `source` and `target` are (namespace, name).
        """
        (source_namespace, source_name), (target_namespace, target_name) = source, target
        tables = self.namespaces.get(source_namespace, {})
        if source_name not in tables or target_namespace not in self.namespaces:
            return 404
        if target_name in self.namespaces[target_namespace] and target != source:
            return 409
        self.namespaces[target_namespace][target_name] = tables.pop(source_name)
        return 204


async def run_random_operation(world: WarehouseServer, root: str, model: WarehouseModel, rng: random.Random) -> None:
    """Carry out a random operation on the server and the model, and compare the outcomes."""
    namespace, name = rng.choice(NAMESPACES), rng.choice(NAMES)
    match rng.randrange(6):
        case 0:
            status, _ = await world.send("POST", f"{root}/namespaces", {"namespace": [namespace]})
            assert status == model.expect_create_namespace(namespace)
        case 1:
            status, _ = await world.send("DELETE", f"{root}/namespaces/{namespace}")
            assert status == model.expect_drop_namespace(namespace)
        case 2 | 3:
            expected = model.expect_create_table(namespace, name)
            body = {"name": name, "schema": SCHEMA}
            status, table = await world.send("POST", f"{root}/namespaces/{namespace}/tables", body)
            assert status == expected
            if status == 200:
                uuid = model.namespaces[namespace][name] = table["metadata"]["table-uuid"]
                model.keys.append(TableKeys(read_keys(table), namespace, uuid))
        case 4:
            status, _ = await world.send("DELETE", f"{root}/namespaces/{namespace}/tables/{name}")
            assert status == model.expect_drop_table(namespace, name)
        case 5:
            source, target = (namespace, name), (rng.choice(NAMESPACES), rng.choice(NAMES))
            identifiers = ({"namespace": [parent], "name": table_name} for parent, table_name in (source, target))
            body = dict(zip(("source", "destination"), identifiers, strict=True))
            status, _ = await world.send("POST", f"{root}/tables/rename", body)
            assert status == model.expect_rename(source, target)


async def send_object(world: WarehouseServer, keys: Keys, path_keys: Keys, method: str, body: str) -> tuple[int, str]:
    """Send a request with `keys` for the object `data/o` of the table to which `path_keys` belong.

    Return (status, text).
    """
    path, headers = replace(keys, prefix=path_keys.prefix).sign(method, "data/o")
    url = URL(f"{keys.endpoint}{path}", encoded=True)
    async with world.server.http.request(method, url, data=body or None, headers=headers) as answer:
        return answer.status, await answer.text()


async def use_keys(
    world: WarehouseServer, root: str, models: dict[str, WarehouseModel], objects: dict[str, str], rng: random.Random
) -> None:
    """Use random keys of the warehouse at `root` for their own table, and for a random table of any warehouse.

    The own table is accessible if the model says that the keys are valid. The other table is never accessible.

    Args:
        objects: The content of the object `data/o` of each table by the prefix of its keys. A write changes it.
    """
    if not models[root].keys:
        return
    used_keys = rng.choice(models[root].keys)
    body = f"{root} {used_keys.uuid} {rng.random()}"
    if models[root].has_valid_keys(used_keys):
        assert (await send_object(world, used_keys.keys, used_keys.keys, "PUT", body))[0] == 200
        assert await send_object(world, used_keys.keys, used_keys.keys, "GET", "") == (200, body)
        objects[used_keys.keys.prefix] = body
    else:
        # The gateway notices the drop or the move when it receives the instant.
        async with asyncio.timeout(PATIENCE_S):
            while (await send_object(world, used_keys.keys, used_keys.keys, "GET", ""))[0] != 403:
                await asyncio.sleep(0.01)
        assert (await send_object(world, used_keys.keys, used_keys.keys, "PUT", body))[0] == 403
    victim = rng.choice([keys for model in models.values() for keys in model.keys])
    if victim.uuid != used_keys.uuid:
        for method in ("GET", "PUT"):
            assert (await send_object(world, used_keys.keys, victim.keys, method, "stolen"))[0] == 403


async def read_catalog(world: WarehouseServer, root: str) -> dict[str, dict[str, str]]:
    """Return the namespaces of a warehouse with the UUIDs of their tables, as the server lists them."""
    catalog: dict[str, dict[str, str]] = {}
    _, page = await world.send("GET", f"{root}/namespaces")
    for (namespace,) in page["namespaces"]:
        tables = catalog[namespace] = {}
        _, listing = await world.send("GET", f"{root}/namespaces/{namespace}/tables")
        for identifier in listing["identifiers"]:
            _, table = await world.send("GET", f"{root}/namespaces/{namespace}/tables/{identifier['name']}")
            tables[identifier["name"]] = table["metadata"]["table-uuid"]
    return catalog


async def run_steps(folder: Path, seed: int, steps: int) -> None:
    """Run random operations and requests with storage credentials (keys), and compare the results with the models."""
    rng = random.Random(seed)
    models = {root: WarehouseModel() for root in ROOTS}
    objects: dict[str, str] = {}
    async with run_gateway(folder) as world:
        await world.send("DELETE", "/v1/namespaces/db")  # The models begin without a namespace.
        for _ in range(steps):
            root = rng.choice(ROOTS)
            await run_random_operation(world, root, models[root], rng)
            if rng.random() < 0.3:
                await use_keys(world, rng.choice(ROOTS), models, objects, rng)
        assert {root: await read_catalog(world, root) for root in ROOTS} == {
            root: model.namespaces for root, model in models.items()
        }
        lake = folder / "objects" / "lake"
        # Objects of dropped tables may already be deleted. Those of tables with valid keys must exist.
        stored_bodies = {f"{path.parent.parent.relative_to(lake)}/": path.read_text() for path in lake.rglob("data/o")}
        assert stored_bodies == {prefix: body for prefix, body in objects.items() if prefix in stored_bodies}
        live_prefixes = {
            table_keys.keys.prefix
            for model in models.values()
            for table_keys in model.keys
            if model.has_valid_keys(table_keys)
        }
        assert live_prefixes & objects.keys() <= stored_bodies.keys()


@pytest.mark.parametrize("seed", mark_fast(range(8), 1))
async def test_each_warehouse_behaves_like_its_own_model(tmp_path: Path, seed: int) -> None:
    await run_steps(tmp_path, seed, 150)
