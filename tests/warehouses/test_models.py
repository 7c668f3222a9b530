"""Tests that random operations on several warehouses have the results of independent models."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.seeds import mark_fast
from tests.warehouses.world import SCHEMA, WarehouseServer, run_server_with_warehouses

ROOTS = ("/v1", "/v1/sales", "/warehouses/stock/v1")
NAMESPACES = ("a", "b")
NAMES = ("t", "u")


class WarehouseModel:
    """The namespaces of one warehouse, and the UUID of each table."""

    def __init__(self) -> None:
        self.namespaces: dict[str, dict[str, str]] = {}

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
        tables = self.namespaces.get(source[0], {})
        if source[1] not in tables or target[0] not in self.namespaces:
            return 404
        if target[1] in self.namespaces[target[0]] and target != source:
            return 409
        self.namespaces[target[0]][target[1]] = tables.pop(source[1])
        return 204


async def take_step(world: WarehouseServer, root: str, model: WarehouseModel, rng: random.Random) -> None:
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
                model.namespaces[namespace][name] = table["metadata"]["table-uuid"]
        case 4:
            status, _ = await world.send("DELETE", f"{root}/namespaces/{namespace}/tables/{name}")
            assert status == model.expect_drop_table(namespace, name)
        case 5:
            source, target = (namespace, name), (rng.choice(NAMESPACES), rng.choice(NAMES))
            identifiers = ({"namespace": [place[0]], "name": place[1]} for place in (source, target))
            body = dict(zip(("source", "destination"), identifiers, strict=True))
            status, _ = await world.send("POST", f"{root}/tables/rename", body)
            assert status == model.expect_rename(source, target)


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
    rng = random.Random(seed)
    models: dict[str, Any] = {root: WarehouseModel() for root in ROOTS}
    async with run_server_with_warehouses(folder, "sales", "stock") as world:
        await world.send("DELETE", "/v1/namespaces/db")
        for _ in range(steps):
            root = rng.choice(ROOTS)
            await take_step(world, root, models[root], rng)
        assert {root: await read_catalog(world, root) for root in ROOTS} == {
            root: model.namespaces for root, model in models.items()
        }


@pytest.mark.parametrize("seed", mark_fast(range(8), 1))
async def test_each_warehouse_behaves_like_its_own_model(tmp_path: Path, seed: int) -> None:
    await run_steps(tmp_path, seed, 150)
