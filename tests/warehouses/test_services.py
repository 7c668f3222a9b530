"""Tests that the server runs table services in each warehouse, and that a job of one warehouse reaches no other."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pyiceberg.catalog import load_catalog

from seamark.connector.client.indexes import IndexClient
from seamark.metaserver.access.keyring import open_keyring
from seamark.metaserver.access.worker_tokens import ServiceTokens
from seamark.metaserver.services.running import JobSlots
from seamark.metaserver.store.open import open_store
from seamark.metaserver.warehouses.warehouses import find_warehouse_settings
from tests.services.seamark import Seamark
from tests.table_services.test_embedded import INDEX, SCHEMA, append, is_covered, list_worker_pids, read_metric
from tests.waits import block_until
from tests.warehouses.test_isolation import WarehouseLogins, logins  # noqa: F401  a fixture

WAREHOUSES = ("sales", "stock")


def send_request(server: Seamark, method: str, path: str, body: Any) -> None:
    request = Request(f"{server.base_url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    request.method = method
    with urlopen(request, timeout=60) as answer:
        assert answer.status < 300


async def test_slot_of_jobs_goes_to_the_warehouse_that_has_waited_longest() -> None:
    """Each of three warehouses has three jobs, and there is one slot."""
    slots, order = JobSlots(1), list[str]()

    async def run_jobs(name: str) -> None:
        for _ in range(3):
            async with slots.hold_slot():
                order.append(name)
                await asyncio.sleep(0)

    await asyncio.gather(*(run_jobs(name) for name in "abc"))
    # Each warehouse has one job in each group of three consecutive jobs.
    assert [sorted(order[start : start + 3]) for start in (0, 3, 6)] == [["a", "b", "c"]] * 3


@pytest.mark.slow
def test_jobs_run_in_each_warehouse_until_its_services_are_off(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    env = {"SEAMARK_SERVICES_WORKERS": "1", "SEAMARK_WAREHOUSE_ROOTS": f"file://{lake}"}
    with Seamark(tmp_path / "home", env=env) as server:
        clients, catalogs = {}, {}
        for name in WAREHOUSES:
            send_request(server, "POST", "/api/v1/warehouses", {"name": name, "location": f"file://{lake}/{name}"})
            catalog = catalogs[name] = load_catalog(name, type="rest", uri=server.base_url, warehouse=name)
            catalog.create_namespace("db")
            catalog.create_table("db.t", SCHEMA, properties=INDEX)
            append(catalog, "db.t", 1, 2)
            clients[name] = IndexClient(f"{server.base_url}/warehouses/{name}")
        for name, client in clients.items():
            block_until(lambda client=client: is_covered(client, "db.t", 2))
            builds = [instant for instant in client.timeline("db.t") if instant.action == "indexing"]
            assert {instant.principal_name for instant in builds} <= {"service:seamark", "anonymous"}
            label = f'outcome="completed",service="indexing",warehouse="{name}"'
            block_until(lambda label=label: read_metric(server, f"seamark_warehouse_jobs_total{{{label}}}") >= 1)
        assert not list(IndexClient(server.base_url).timeline())
        # A change closes the warehouse, with its worker process. Other warehouses are not affected.
        body = {"location": f"file://{lake}/sales", "settings": {"services_workers": 0}}
        send_request(server, "PUT", "/api/v1/warehouses/sales", body)
        for name, catalog in catalogs.items():
            append(catalog, "db.t", 3)
            assert catalog.load_table("db.t").scan().to_arrow().num_rows == 3, name
        block_until(lambda: is_covered(clients["stock"], "db.t", 3))
        assert clients["sales"].index("db.t", "by_name").files == 2
        assert len(list_worker_pids(server)) <= 2  # One worker of the server's own warehouse, and one of `stock`.


async def test_token_of_a_job_is_refused_in_other_warehouses(logins: WarehouseLogins) -> None:  # noqa: F811
    components = logins.world.server.components
    settings = await find_warehouse_settings(components.settings, components.clock, "sales")
    async with (
        open_store(settings.make_database_url(), clock=components.clock, pool_max=1) as store,
        open_keyring(settings, store, components.clock) as keyring,
    ):
        token = ServiceTokens(keyring, components.clock).issue(("db",), 60)
    headers = {"Authorization": f"Bearer {token}"}
    for path, expected in (("/v1/sales", 200), ("/v1/stock", 401), ("/v1", 401), ("/warehouses/stock/v1", 401)):
        assert (await logins.world.send("GET", f"{path}/namespaces/db", headers=headers))[0] == expected, path
