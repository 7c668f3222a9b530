"""Tests that nothing of one warehouse is visible in another, and that a right in one gives no right in another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.authorizer import RULES, SERVER_OPERATIONS, GrantAuthorizer, Scope, WarehouseAuthorizer
from seamark.metaserver.access.principal import Principal, Role
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.warehouses.definitions import RESERVED_NAMES
from tests.api.client import VIEW_VERSION, create_key
from tests.api.rest.standard import read_operations
from tests.server.rig import build_settings, run_server
from tests.warehouses.world import SCHEMA, WarehouseServer, run_server_with_warehouses

SALES, STOCK = "/v1/sales", "/v1/stock"
SALES_API = "/warehouses/sales/api/v1"
STOCK_API = "/warehouses/stock/api/v1"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[WarehouseServer]:
    """Yield a server with two further warehouses.

    `sales` has the table `db.t`, and `stock` has the namespace `db`.
    """
    async with run_server_with_warehouses(tmp_path, "sales", "stock") as world:
        await world.create_table(SALES, "db", "t")
        await world.send("POST", f"{STOCK}/namespaces", {"namespace": ["db"]})
        yield world


async def test_names_of_one_warehouse_are_unknown_in_another(world: WarehouseServer) -> None:
    rename = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "u"}}
    commit = {"table-changes": [{"identifier": rename["source"], "requirements": [], "updates": []}]}
    for method, path, body in (
        ("GET", "/namespaces/db/tables/t", None),
        ("DELETE", "/namespaces/db/tables/t", None),
        ("POST", "/namespaces/db/tables/t", {"requirements": [], "updates": []}),
        ("POST", "/namespaces/db/tables/t/plan", {}),
        ("GET", "/namespaces/db/tables/t/credentials", None),
        ("POST", "/tables/rename", rename),
        ("POST", "/transactions/commit", commit),
    ):
        for root in (STOCK, "/v1"):
            assert (await world.send(method, root + path, body))[0] == 404, (root, path)
    for path in ("/tables/db/t/indexes", "/tables/db/t/files", "/tables/db/t/health", "/tables/db/t/timeline"):
        assert (await world.send("GET", STOCK_API + path))[0] == 404, path
    for path, field in (("/timeline", "instants"), ("/dropped", "dropped"), ("/streams", "tables")):
        status, listing = await world.send("GET", STOCK_API + path)
        names = [entry.get("name") for entry in listing[field]] if field in listing else []
        assert (status, "t" in names) == (200, False), path
    assert (await world.send("GET", f"{SALES}/namespaces/db/tables/t"))[0] == 200


async def test_dropped_table_is_restored_only_in_its_warehouse(world: WarehouseServer) -> None:
    assert (await world.send("DELETE", f"{SALES}/namespaces/db/tables/t"))[0] == 204
    _, listing = await world.send("GET", f"{SALES_API}/dropped")
    (entry,) = listing["dropped"]
    for path in (f"{STOCK_API}/dropped/{entry['id']}", f"/api/v1/dropped/{entry['id']}"):
        assert (await world.send("POST", f"{path}/undrop"))[0] == 404
        assert (await world.send("DELETE", path))[0] == 404
    assert (await world.send("POST", f"{SALES_API}/dropped/{entry['id']}/undrop"))[0] == 200


async def test_files_of_one_warehouse_cannot_be_named_in_another(world: WarehouseServer) -> None:
    _, table = await world.send("GET", f"{SALES}/namespaces/db/tables/t")
    location, metadata_file = table["metadata"]["location"], table["metadata-location"]
    for root in (STOCK, "/v1"):
        await world.send("POST", f"{root}/namespaces", {"namespace": ["db"]})
        for path, body in (
            ("/namespaces/db/register", {"name": "t", "metadata-location": metadata_file}),
            ("/namespaces/db/tables", {"name": "u", "schema": SCHEMA, "location": location}),
            ("/namespaces/db/tables", {"name": "u", "schema": SCHEMA, "location": f"file://{world.lake}/sales/x"}),
            ("/namespaces", {"namespace": ["x"], "properties": {"location": f"file://{world.lake}/sales/x"}}),
        ):
            assert (await world.send("POST", root + path, body))[0] == 400, (root, path)


async def test_idempotency_key_of_one_warehouse_is_new_in_another(world: WarehouseServer) -> None:
    headers = {"Idempotency-Key": create_key()}
    body = {"name": "made", "schema": SCHEMA}
    uuids = set()
    for root in (SALES, STOCK, SALES):
        status, table = await world.send("POST", f"{root}/namespaces/db/tables", body, headers)
        assert status == 200
        uuids.add((root, table["metadata"]["table-uuid"]))
    assert len(uuids) == 2


async def test_page_token_of_one_warehouse_is_refused_in_another(world: WarehouseServer) -> None:
    await world.create_table(SALES, "other", "t")
    _, page = await world.send("GET", f"{SALES}/namespaces?pageToken=&pageSize=1")
    token = page["next-page-token"]
    assert (await world.send("GET", f"{SALES}/namespaces?pageSize=1&pageToken={token}"))[0] == 200
    for root in (STOCK, "/v1"):
        assert (await world.send("GET", f"{root}/namespaces?pageSize=1&pageToken={token}"))[0] == 400


async def test_warehouse_in_config_must_exist(world: WarehouseServer) -> None:
    for warehouse, prefix in (("sales", "sales"), (f"file://{world.lake}/stock", "stock"), ("", None)):
        status, config = await world.send("GET", f"/v1/config?warehouse={warehouse}")
        assert (status, config["overrides"].get("prefix")) == (200, prefix)
    for path in ("/v1/config?warehouse=none", "/v1/none/namespaces", "/warehouses/none/v1/config", "/warehouses/none/"):
        status, error = await world.send("GET", path)
        assert (status, error["error"]["type"]) == (404, "NoSuchWarehouseException")
    # A warehouse cannot contain other warehouses.
    for path in ("/v1/config?warehouse=stock", "/v1/stock/namespaces", "/warehouses/stock/v1/namespaces"):
        assert (await world.send("GET", f"/warehouses/sales{path}"))[0] == 404


def test_no_warehouse_can_have_the_name_of_a_route() -> None:
    segments = {operation.template.replace("/{prefix}", "").split("/")[2] for operation in read_operations()}
    assert segments <= RESERVED_NAMES


@dataclass
class WarehouseLogins:
    world: WarehouseServer
    tokens: dict[str, str]

    async def send(self, principal: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        return await self.world.send(method, path, body, {"Authorization": f"Bearer {self.tokens[principal]}"})


@pytest.fixture
async def logins(tmp_path: Path) -> AsyncIterator[WarehouseLogins]:
    """Create three logins.

    root is an admin of the server, and creates `sales` and `stock`. ann is a writer of the server's warehouse and an
    admin of `sales`. bob has no grant.
    """
    clock, tokens = SystemClock(), {}
    async with open_store(build_settings(tmp_path / "home").make_database_url(), clock=clock) as store:
        for name, grants in (("root", [Grant("root", "admin")]), ("ann", [Grant("ann", "writer")]), ("bob", [])):
            tokens[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
    async with run_server_with_warehouses(tmp_path, auth="token") as world:
        logins = WarehouseLogins(world, tokens)
        for name in ("sales", "stock"):
            body = {"name": name, "location": f"file://{world.lake}/{name}"}
            assert (await logins.send("root", "POST", "/api/v1/warehouses", body))[0] == 201
            assert (await logins.send("root", "POST", f"/v1/{name}/namespaces", {"namespace": ["db"]}))[0] == 200
        grant = {"principal": "ann", "role": "admin"}
        assert (await logins.send("root", "PUT", f"{SALES_API}/grants", grant))[0] == 204
        yield logins


async def test_grant_is_a_right_only_in_its_warehouse(logins: WarehouseLogins) -> None:
    body = {"namespace": ["new"]}
    for principal, path, expected in (
        ("ann", "/v1/namespaces", 200),
        ("ann", "/v1/sales/namespaces", 200),
        ("ann", "/v1/stock/namespaces", 403),
        ("ann", "/warehouses/stock/v1/namespaces", 403),
        ("bob", "/v1/sales/namespaces", 403),
        ("root", "/v1/stock/namespaces", 200),
    ):
        assert (await logins.send(principal, "POST", path, body))[0] == expected, (principal, path)
    _, listing = await logins.send("ann", "GET", "/v1/stock/namespaces")
    assert listing["namespaces"] == []
    assert (await logins.send("ann", "GET", "/v1/stock/namespaces/db"))[0] == 403
    # An admin of one warehouse has no rights in another warehouse or on the server.
    grant = {"principal": "bob", "role": "admin"}
    for path in ("/api/v1/grants", f"{STOCK_API}/grants"):
        assert (await logins.send("ann", "PUT", path, grant))[0] == 403
    assert (await logins.send("ann", "PUT", f"{SALES_API}/grants", grant))[0] == 204
    _, grant_listing = await logins.send("root", "GET", f"{STOCK_API}/grants")
    assert [grant["principal"] for grant in grant_listing["grants"]] == ["root"]


async def test_admin_of_a_warehouse_has_no_right_on_the_server(logins: WarehouseLogins) -> None:
    for path, body in (
        ("/api/v1/warehouses", {"name": "new", "location": f"file://{logins.world.lake}/new"}),
        (f"{SALES_API}/warehouses", {"name": "new", "location": f"file://{logins.world.lake}/new"}),
        ("/api/v1/tokens", {"name": "new", "grants": [{"role": "admin"}]}),
        (f"{SALES_API}/tokens", {"name": "new", "grants": [{"role": "admin"}]}),
    ):
        assert (await logins.send("ann", "POST", path, body))[0] == 403, path
    for path in ("/warehouses", "/warehouses/stock", "/tokens", "/replicas"):
        for principal in ("ann", "root"):
            assert (await logins.send(principal, "GET", SALES_API + path))[0] == 403, (principal, path)
    assert (await logins.send("ann", "DELETE", "/api/v1/warehouses/stock"))[0] == 403


async def test_writer_of_one_warehouse_cannot_create_a_view_with_the_rights_of_another_user(
    logins: WarehouseLogins,
) -> None:
    """A view may name an owner with whose rights Trino runs it. These are the owner's rights in all warehouses.

    Ann is a writer of one warehouse and an admin of another. Both allow her only views that she owns herself.
    """
    await logins.send("root", "POST", "/v1/namespaces", {"namespace": ["db"]})
    for principal, path, expected in (("ann", "/v1", 403), ("ann", "/v1/sales", 403), ("root", "/v1", 200)):
        for owner in {principal, "root"}:
            view = {"name": f"{principal}_{owner}", "schema": SCHEMA, "view-version": VIEW_VERSION}
            view["properties"] = {"trino.run-as-owner": owner}
            status, answer = await logins.send(principal, "POST", f"{path}/namespaces/db/views", view)
            assert status == (200 if owner == principal else expected), (principal, path, owner, answer)
    # A server without roots for further warehouses still serves those that exist.
    async with run_server(logins.world.server.components.settings.home, auth="token") as server:
        logins.world.server = server
        view |= {"name": "later", "properties": {"trino.run-as-owner": "root"}}
        assert (await logins.send("ann", "POST", "/v1/namespaces/db/views", view))[0] == 403


async def test_client_without_a_login_cannot_find_out_whether_a_warehouse_exists(logins: WarehouseLogins) -> None:
    for path in (
        "/v1/sales/namespaces",
        "/v1/none/namespaces",
        "/warehouses/sales/api/v1/grants",
        "/warehouses/none/x",
    ):
        status, error = await logins.world.send("GET", path)
        assert (status, error["error"]["type"]) == (401, "NotAuthorizedException"), path


async def test_metrics_of_one_warehouse_are_not_shown_in_another(logins: WarehouseLogins) -> None:
    for name in ("sales", "stock"):
        assert (await logins.send("root", "GET", f"/v1/{name}/namespaces"))[0] == 200
    shown_warehouses = {}
    for principal in ("root", "ann", "bob"):
        for path in ("", "/warehouses/sales"):
            headers = {"Authorization": f"Bearer {logins.tokens[principal]}"}
            async with logins.world.server.http.get(f"{logins.world.url}{path}/metrics", headers=headers) as answer:
                text = await answer.text()
            assert "seamark_requests_total" in text
            shown_warehouses[principal, path] = [name for name in ("sales", "stock") if f'warehouse="{name}"' in text]
    # The server's URL shows all warehouses only to callers that may browse its own warehouse. ann is a writer of it,
    # and bob has no grant. The URL of a further warehouse shows its metrics to every login.
    assert shown_warehouses == {
        **{(principal, ""): ["sales", "stock"] for principal in ("root", "ann")},
        ("bob", ""): [],
        **{(principal, "/warehouses/sales"): ["sales"] for principal in ("root", "ann", "bob")},
    }


@pytest.mark.parametrize("role", [None, *Role])
async def test_roles_in_a_warehouse_allow_the_same_operations_except_on_the_server(role: Role | None) -> None:
    """Compare the rights in a warehouse with those on the server, for each role, namespace of the grant and operation.

    Operations on the server itself are never allowed in a warehouse.
    """
    server, warehouse_authorizer = GrantAuthorizer(None), WarehouseAuthorizer(None)
    for path in ((), ("db",), ("db", "x")):
        principal = Principal("ann", () if role is None else (Grant("ann", role.value, path),))
        for operation, rule in RULES.items():
            for namespace in ((), ("db",), ("db", "x"), ("other",)):
                is_allowed = await warehouse_authorizer.allows(principal, operation, Securable(namespace))
                if operation in SERVER_OPERATIONS:
                    assert not is_allowed
                    assert rule.scope is Scope.SERVER
                else:
                    assert is_allowed == await server.allows(principal, operation, Securable(namespace))
