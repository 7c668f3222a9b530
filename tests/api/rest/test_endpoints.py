"""Tests that the server has exactly the routes of the specification, each with its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamark.metaserver.api.http.describe import get_description
from tests.api.client import Api
from tests.api.rest.standard import DRAFTS, PLANNING_OPERATIONS, read_operations
from tests.server.rig import run_server


def test_specification_has_exactly_the_listed_operations() -> None:
    assert len(read_operations()) == 35
    assert {operation.id for operation in read_operations()} >= PLANNING_OPERATIONS


async def test_config_lists_exactly_the_operations_that_are_served(api: Api) -> None:
    endpoints = (await api("GET", "/v1/config")).json["endpoints"]
    assert endpoints == sorted(set(endpoints))
    assert set(endpoints) == {operation.endpoint for operation in (*read_operations(), *DRAFTS)}


async def test_each_operation_is_routed_to_the_handler_with_its_id(tmp_path: Path) -> None:
    from seamark.metaserver.api.app import build_app

    async with run_server(tmp_path) as server:
        routes = {}
        for route in build_app(server.components).router.routes():
            if route.resource is not None:
                path = route.resource.canonical
                routes[f"{route.method} {path}"] = get_description(route.handler).operation
    for operation in (*read_operations(), *DRAFTS):
        path = operation.template.replace("/{prefix}/", "/").replace("plan-id", "plan_id")
        assert routes[f"{operation.method} {path}"] == operation.id


async def test_routes_exist_with_and_without_a_prefix_and_are_listed_once(tmp_path: Path) -> None:
    async with run_server(tmp_path, prefix="lake") as server:
        api = Api(server)
        config = (await api("GET", "/v1/config")).json
        assert config["overrides"] == {"prefix": "lake"}
        assert set(config["endpoints"]) == {operation.endpoint for operation in (*read_operations(), *DRAFTS)}
        for path in ("/v1/lake/namespaces", "/v1/namespaces"):
            assert (await api("GET", path)).json["namespaces"] == [["db"]]
        assert (await api("GET", "/v1/pond/namespaces")).status == 404


async def test_config_reports_the_lifetime_of_idempotency_keys(api: Api) -> None:
    assert (await api("GET", "/v1/config")).json["idempotency-key-lifetime"] == "PT86400S"


@pytest.mark.parametrize(
    ("prefix", "warehouse", "status"),
    [
        ("", "", 200),
        ("", "rck_warehouse", 200),
        ("", "prod", 404),
        ("", "seamark", 404),
        ("", "{ours}", 200),
        ("", "{ours}/", 200),
        ("", "s3://somewhere/else", 404),
        ("", "file:///somewhere/else", 404),
        ("", "nonsense:", 404),
        ("lake", "lake", 200),
        ("lake", "{ours}", 200),
        ("lake", "pond", 404),
        ("lake", "rck_warehouse", 404),
    ],
)
async def test_unknown_warehouse_is_rejected(tmp_path: Path, prefix: str, warehouse: str, status: int) -> None:
    async with run_server(tmp_path, prefix=prefix) as server:
        name = warehouse.format(ours=server.components.settings.make_warehouse_uri())
        answer = await Api(server)("GET", f"/v1/config?warehouse={name}")
        assert answer.status == status
        assert status == 200 or answer.error[1] == "NoSuchWarehouseException"
