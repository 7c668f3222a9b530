"""Tests of a warehouse that shows the tables of another catalog."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.catalog import (
    create_namespace,
    create_table,
    drop_table,
    load_namespace_properties,
    load_view,
    rename_table,
)
from seamark.connector.client.errors import AccessDenied, InvalidRequest, NoSuchResource, Refused, Unavailable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.warehouses import (
    change_warehouse,
    create_warehouse,
    drop_warehouse,
    load_warehouse,
    make_warehouse_url,
)
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.read.scans import scan
from seamark.formats.runtime.errors import ReadOnlyServer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.store.model import Grant
from seamark.metaserver.warehouses.federation.federated_authorizer import FederatedAuthorizer
from tests.api.client import SCHEMA, VIEW_VERSION
from tests.connector.server_thread import ServerThread
from tests.moving.http_catalog import serve_catalog
from tests.moving.random_names import fill_with_odd_names
from tests.moving.test_import import COLUMNS, append_ids, import_all


@dataclass
class Federation:
    """Clients of a catalog with tables (`origin`), and of the server that shows these tables in a warehouse.

    `server_client` uses the default warehouse of the server, and `warehouse_client` its federated warehouse.
    """

    origin: IndexClient
    server_client: IndexClient
    warehouse_client: IndexClient


@contextmanager
def serve_federated_catalog(
    folder: Path, uri: str, lake: Path, *further_uris: str
) -> Iterator[tuple[IndexClient, IndexClient]]:
    """Run a server with the federated warehouse `other`, and yield clients of the server and of the warehouse.

    The operator of the server also allows the catalogs in `further_uris`.
    """
    home = folder / "server"
    home.mkdir()
    with ServerThread(
        home,
        warehouse=(home / "warehouse").as_uri(),
        services_workers=0,
        warehouse_roots=(folder.as_uri(),),
        warehouse_endpoints=(uri, *further_uris),
    ) as server:
        client = IndexClient(server.url)
        create_warehouse(client, "other", lake.as_uri(), {"federation_uri": uri, "federation_fresh_s": 0}, {})
        warehouse_client = IndexClient(make_warehouse_url(server.url, "other"))
        yield client, warehouse_client
        warehouse_client.close()
        client.close()


@pytest.fixture
def federation(origin: IndexClient, lake: Path, tmp_path: Path) -> Iterator[Federation]:
    with serve_federated_catalog(tmp_path, origin.url, lake) as (client, warehouse_client):
        create_namespace(origin, "shop", {"owner": "ann"})
        create_table(origin, "shop.orders", COLUMNS, properties={"a": "b"})
        append_ids(origin, "shop.orders", 1, 2)
        yield Federation(origin, client, warehouse_client)


def read_ids(client: IndexClient, table: str = "shop.orders", where: str | None = None) -> list[int]:
    return sorted(scan(client, table, where=where).to_arrow().column("id").to_pylist())


def describe_namespaces(client: IndexClient) -> dict[tuple[str, ...], Any]:
    """Return the table names and the properties of each namespace."""
    return {
        namespace: (sorted(client.tables(namespace)), load_namespace_properties(client, namespace))
        for namespace in client.namespaces()
    }


def list_files(folder: Path) -> set[str]:
    """Return the files below `folder`, except those of the subfolder `_seamark`, in which Seamark may write."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if path.parts[0] != "_seamark"}


def test_federated_warehouse_shows_the_names_and_rows_of_the_other_catalog(federation: Federation) -> None:
    fill_with_odd_names(federation.origin, 5, namespaces=6, entries=12)
    assert describe_namespaces(federation.warehouse_client) == describe_namespaces(federation.origin)
    assert read_ids(federation.warehouse_client) == [1, 2]
    assert federation.warehouse_client.explain("shop.orders", "id > 100").files == 0
    with pytest.raises(NoSuchResource):
        federation.warehouse_client.load_table("shop.none")


def test_each_read_sees_the_commits_renames_and_drops_of_the_other_catalog(federation: Federation) -> None:
    origin, warehouse_client = federation.origin, federation.warehouse_client
    for number in range(3, 10):
        append_ids(origin, "shop.orders", number)
        assert read_ids(warehouse_client) == list(range(1, number + 1))
    rename_table(origin, "shop.orders", "shop.sales")
    assert read_ids(warehouse_client, "shop.sales") == list(range(1, 10))
    with pytest.raises(NoSuchResource):
        warehouse_client.load_table("shop.orders")
    create_table(origin, "shop.orders", COLUMNS, properties={})
    assert read_ids(warehouse_client) == []
    drop_table(origin, "shop.sales")
    with pytest.raises(NoSuchResource):
        warehouse_client.load_table("shop.sales")


def test_views_are_shown_unless_they_run_with_the_rights_of_a_user(federation: Federation) -> None:
    origin, warehouse_client = federation.origin, federation.warehouse_client
    for name, properties in (("plain", {}), ("owned", {"trino.run-as-owner": "ann"})):
        body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": properties}
        origin._request_json("POST", "/v1/namespaces/shop/views", body=body)
    assert load_view(warehouse_client, "shop.plain") == load_view(origin, "shop.plain")
    updates = [{"action": "set-properties", "updates": {"p": "1"}}]
    origin._request_json("POST", "/v1/namespaces/shop/views/plain", body={"requirements": [], "updates": updates})
    assert load_view(warehouse_client, "shop.plain")["properties"]["p"] == "1"
    with pytest.raises(AccessDenied, match="rights of a user"):
        load_view(warehouse_client, "shop.owned")


def test_indexes_follow_commits_and_renames_and_are_not_stored_in_the_lake_of_the_tables(
    federation: Federation, lake: Path
) -> None:
    origin, warehouse_client = federation.origin, federation.warehouse_client
    for number in range(3, 6):
        append_ids(origin, "shop.orders", number)
    files_before, metadata = list_files(lake), origin.load_table("shop.orders", history=True).metadata
    warehouse_client.put_index("shop.orders", "by_id", kind="bloom", columns=["id"])
    build(warehouse_client, "shop.orders", "by_id", InProcessWorkers())
    explanation = warehouse_client.explain("shop.orders", "id = 4")
    assert [index["name"] for index in explanation.indexes] == ["by_id"]
    append_ids(origin, "shop.orders", 6)
    assert read_ids(warehouse_client, where="id = 4") == [4]
    assert read_ids(warehouse_client, where="id = 6") == [6]
    assert [index.name for index in warehouse_client.indexes("shop.orders")] == ["by_id"]
    rename_table(origin, "shop.orders", "shop.sales")
    assert [index.name for index in warehouse_client.indexes("shop.sales")] == ["by_id"]
    index_paths = {path for path in list_files(lake) - files_before if "_seamark" in path}
    assert index_paths == set()
    assert b"by_id" not in metadata + origin.load_table("shop.sales", history=True).metadata


def test_changes_are_refused_with_the_address_of_the_other_catalog(federation: Federation) -> None:
    warehouse_client = federation.warehouse_client
    table = "/v1/namespaces/shop/tables/orders"
    changes: tuple[tuple[str, str, Any], ...] = (
        ("POST", "/v1/namespaces", {"namespace": ["new"]}),
        ("DELETE", "/v1/namespaces/shop", None),
        ("POST", "/v1/namespaces/shop/tables", {"name": "t", "schema": COLUMNS}),
        ("POST", table, {"requirements": [], "updates": []}),
        ("DELETE", f"{table}?purgeRequested=true", None),
        ("POST", "/v1/tables/rename", {"source": {}, "destination": {}}),
        ("POST", "/v1/transactions/commit", {"table-changes": []}),
        ("PUT", "/api/v1/tables/shop/orders/import", {"metadata-location": "file:///x"}),
        ("POST", "/api/v1/tables/shop/orders/rows", [{"id": 1}]),
        ("POST", "/api/v1/tables/shop/orders/expire-snapshots", {"older-than-ms": 1}),
    )
    for method, path, body in changes:
        with pytest.raises(Refused, match=f"{federation.origin.url} and is read-only") as refusal:
            warehouse_client._request(
                method, path, {}, None if body is None else json.dumps(body).encode(), repeatable=False
            )
        assert refusal.value.status == 406, (method, path)
    assert read_ids(warehouse_client) == [1, 2]


def test_error_of_a_federated_warehouse_names_a_catalog_that_does_not_answer(
    federation: Federation, tmp_path: Path
) -> None:
    warehouse_client = IndexClient(federation.warehouse_client.url, retries=0)
    url = federation.origin.url
    request_json = federation.server_client._request_json
    settings = {"federation_uri": url, "federation_fresh_s": 0, "federation_warehouse": "none"}
    request_json("PUT", "/api/v1/warehouses/other", body={"settings": settings})
    with pytest.raises(Unavailable, match=f"The catalog {url} of this warehouse answers"):
        warehouse_client.load_table("shop.orders")
    with pytest.raises(Unavailable, match=f"The catalog {url} of this warehouse answers"):
        list(warehouse_client.namespaces())


def test_other_catalog_must_be_allowed_by_the_operator(federation: Federation, tmp_path: Path) -> None:
    for uri in ("http://127.0.0.1:1", "http://169.254.169.254/latest", f"{federation.origin.url}/v1"):
        with pytest.raises(InvalidRequest, match="warehouse_endpoints"):
            create_warehouse(
                federation.server_client, "evil", (tmp_path / "evil").as_uri(), {"federation_uri": uri}, {}
            )


def test_drop_of_a_federated_warehouse_leaves_the_files_of_the_other_catalog(
    federation: Federation, lake: Path
) -> None:
    server_client = federation.server_client
    assert read_ids(federation.warehouse_client) == [1, 2]
    files_before = list_files(lake)
    with pytest.raises(InvalidRequest, match="cannot begin or cease"):
        change_warehouse(server_client, "other", {}, None)
    drop_warehouse(server_client, "other")
    assert list_files(lake) == files_before
    create_warehouse(server_client, "lake", lake.as_uri(), {}, {})
    lake_client = IndexClient(make_warehouse_url(server_client.url, "lake"))
    assert import_all(lake_client, federation.origin.url)["shop.orders"] == "imported"
    assert read_ids(lake_client) == [1, 2]
    lake_client.close()


def test_token_of_the_other_catalog_is_sent_and_never_shown(federation: Federation, tmp_path: Path) -> None:
    server_client = federation.server_client
    settings = {"federation_uri": federation.origin.url, "federation_fresh_s": 0}
    changed_warehouse = change_warehouse(server_client, "other", settings, {"federation_token": "a-secret-token"})
    assert changed_warehouse["has-credentials"]
    assert "a-secret-token" not in json.dumps(changed_warehouse) + json.dumps(load_warehouse(server_client, "other"))
    database = b"".join(path.read_bytes() for path in (tmp_path / "server").glob("seamark.db*"))
    assert b"a-secret-token" not in database
    # The other server has no logins, so it accepts each token.
    assert read_ids(federation.warehouse_client) == [1, 2]


def test_login_of_a_catalog_is_not_sent_to_another_catalog(tmp_path: Path, lake: Path) -> None:
    def respond(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        return 200, {"namespaces": []}

    with (
        serve_catalog(respond) as first_catalog,
        serve_catalog(respond) as new_catalog,
        serve_federated_catalog(tmp_path, first_catalog.url, lake, new_catalog.url) as (
            server_client,
            warehouse_client,
        ),
    ):
        settings = {"federation_uri": first_catalog.url, "federation_fresh_s": 0}
        change_warehouse(server_client, "other", settings, {"federation_token": "token-of-the-former"})
        with pytest.raises(InvalidRequest, match="send the credentials of the new catalog"):
            change_warehouse(server_client, "other", {**settings, "federation_uri": new_catalog.url}, None)
        change_warehouse(server_client, "other", {**settings, "federation_uri": f"{first_catalog.url}/"}, None)
        change_warehouse(
            server_client, "other", {**settings, "federation_uri": new_catalog.url}, {"federation_token": "new-token"}
        )
        assert list(warehouse_client.namespaces()) == []
        assert {headers["Authorization"] for headers in new_catalog.received_headers} == {"Bearer new-token"}
        change_warehouse(server_client, "other", {**settings, "federation_uri": new_catalog.url}, {})
        change_warehouse(server_client, "other", settings, None)


@pytest.mark.parametrize("operation", ["updateTable", "createTable", "appendRows", "importTable", "makePlanView"])
async def test_admin_of_a_federated_warehouse_has_no_right_to_write(operation: str) -> None:
    """The keys and signatures that a client gets from the server follow the rights of its user.

    So an admin with the right to write would get keys that can write.
    """
    admin, shop = Principal("ann", (Grant("ann", "admin", ()),)), Securable(("shop",))
    authorizer = FederatedAuthorizer(None, "https://other.example", is_local=False)
    assert not await authorizer.allows(admin, operation, shop)
    assert await authorizer.allows_each(admin, operation, [shop, shop]) == [False, False]
    with pytest.raises(ReadOnlyServer, match=r"https://other\.example and is read-only"):
        await authorizer.require(admin, operation, shop)
    for allowed_operation in ("loadTable", "signRequest", "planTableScan", "putIndex", "addGrant"):
        await authorizer.require(admin, allowed_operation, shop)


def find_metadata_file(client: IndexClient, table: str) -> str:
    """Return the metadata file of a table of the namespace `hr`."""
    return str(client._request_json("GET", f"/v1/namespaces/hr/tables/{table}")["metadata-location"])


def respond_ignoring_case(metadata_files: Mapping[str, str], path: str) -> tuple[int, Any]:
    """Return the answer of a catalog that ignores the case of names.

    Args:
        metadata_files: The metadata file of each table of the namespace `hr`, by the name of the table.
        path: The path of the request.
    """
    levels = path.partition("?")[0].lower().split("/")[2:]
    if levels == ["namespaces"]:
        return 200, {"namespaces": [] if "parent" in path else [["hr"]]}
    if levels == ["namespaces", "hr"]:
        return 200, {"namespace": ["hr"], "properties": {}}
    if levels == ["namespaces", "hr", "tables"]:
        return 200, {"identifiers": [{"namespace": ["hr"], "name": name} for name in metadata_files]}
    for name, metadata_file in metadata_files.items():
        if levels == ["namespaces", "hr", "tables", name.lower()]:
            return 200, {"metadata-location": metadata_file, "metadata": {}}
    return 404, {}


def test_name_has_one_spelling_if_the_other_catalog_ignores_case(
    tmp_path: Path, origin: IndexClient, lake: Path
) -> None:
    create_namespace(origin, "hr", {})
    create_table(origin, "hr.salaries", COLUMNS, properties={})
    metadata_files = {"salaries": find_metadata_file(origin, "salaries")}
    with (
        serve_catalog(lambda path, _: respond_ignoring_case(metadata_files, path)) as catalog,
        serve_federated_catalog(tmp_path, catalog.url, lake) as (_, warehouse_client),
    ):
        for _ in range(2):
            for table in ("hr.SALARIES", "HR.salaries", "Hr.Salaries"):
                with pytest.raises(NoSuchResource):
                    warehouse_client.load_table(table)
            assert warehouse_client.load_table("hr.salaries").metadata
        assert list(warehouse_client.tables(("hr",))) == [("hr", "salaries")]
        with pytest.raises(NoSuchResource):
            list(warehouse_client.tables(("HR",)))
        # The other catalog renames the table to the other spelling.
        metadata_files["SALARIES"] = metadata_files.pop("salaries")
        assert warehouse_client.load_table("hr.SALARIES").metadata
        with pytest.raises(NoSuchResource):
            warehouse_client.load_table("hr.salaries")


def test_second_name_of_a_table_is_refused_and_does_not_change_its_rights(
    tmp_path: Path, origin: IndexClient, lake: Path
) -> None:
    create_namespace(origin, "hr", {})
    for table in ("hr.salaries", "hr.other"):
        create_table(origin, table, COLUMNS, properties={})
    metadata_files = {"salaries": find_metadata_file(origin, "salaries")}
    with (
        serve_catalog(lambda path, _: respond_ignoring_case(metadata_files, path)) as catalog,
        serve_federated_catalog(tmp_path, catalog.url, lake) as (_, warehouse_client),
    ):
        assert warehouse_client.load_table("hr.salaries").metadata
        denial = {"principal": "ann", "privilege": "read", "namespace": ["hr"], "table": "salaries", "deny": True}
        warehouse_client._request("PUT", "/api/v1/grants", {}, json.dumps(denial).encode(), repeatable=True)
        grants = warehouse_client._request_json("GET", "/api/v1/grants?principal=ann")["grants"]
        metadata_files["copy"] = metadata_files["salaries"]
        for _ in range(2):
            with pytest.raises(AccessDenied, match=r"the other catalog lists it as hr\.salaries"):
                warehouse_client.load_table("hr.copy")
            assert warehouse_client.load_table("hr.salaries").metadata
        assert warehouse_client._request_json("GET", "/api/v1/grants?principal=ann")["grants"] == grants != []
        # The first name now belongs to another table, so the second name is the only name of the first table.
        metadata_files["salaries"] = find_metadata_file(origin, "other")
        assert warehouse_client.load_table("hr.copy").location != warehouse_client.load_table("hr.salaries").location


def test_table_whose_metadata_names_foreign_locations_is_not_shown(
    tmp_path: Path, origin: IndexClient, lake: Path
) -> None:
    create_namespace(origin, "shop", {})
    create_table(origin, "shop.orders", COLUMNS, properties={})
    metadata = json.loads(origin.load_table("shop.orders").metadata)
    folder, outside_location = lake / "evil", (tmp_path / "server" / "warehouse" / "t").as_uri()
    location = ""

    def write_metadata(number: int, **change: Any) -> str:
        path = folder / "metadata" / f"0000{number}-a.metadata.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        own_fields = {"location": folder.as_uri(), "table-uuid": str(uuid.uuid4()), "metadata-log": []}
        path.write_text(json.dumps(metadata | own_fields | change))
        return path.as_uri()

    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"location": outside_location}, "outside the warehouse"),
        (
            {"metadata-log": [{"timestamp-ms": 1, "metadata-file": f"{outside_location}/v1.metadata.json"}]},
            "earlier metadata",
        ),
        ({"location": lake.as_uri()}, "root of all tables"),
        ({"location": f"{lake.as_uri()}/_seamark/x"}, "outside the table's own location"),
        ({"table-uuid": "../../x"}, "not a UUID"),
        ({"properties": {"write.data.path": outside_location}}, "The property write.data.path"),
    )
    with (
        serve_catalog(lambda path, _: respond_ignoring_case({"orders": location}, path)) as catalog,
        serve_federated_catalog(tmp_path, catalog.url, lake) as (_, warehouse_client),
    ):
        for number, (change, reason) in enumerate(changes):
            location = write_metadata(number, **change)
            with pytest.raises(AccessDenied, match=re.escape(reason)):
                warehouse_client.load_table("hr.orders")
        location = f"{outside_location}/metadata/v1.metadata.json"
        with pytest.raises(AccessDenied, match="outside the warehouse"):
            warehouse_client.load_table("hr.orders")
        location = write_metadata(len(changes))
        assert warehouse_client.load_table("hr.orders").location == folder.as_uri()
