"""Tests of `seamark import` from another Seamark server."""

from __future__ import annotations

import json
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from seamark.commands.main import cli
from seamark.connector.client.catalog import (
    create_namespace,
    create_table,
    import_table,
    load_namespace_properties,
    load_view,
)
from seamark.connector.client.errors import InvalidRequest, Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.write.appends import append
from tests.api.client import SCHEMA, VIEW_VERSION

COLUMNS = {"type": "struct", "fields": [{"id": 1, "name": "id", "type": "long", "required": False}]}


def run_import(target: IndexClient, source: str, *options: str) -> Result:
    return CliRunner().invoke(cli, ["import", source, *options, "--url", target.url])


def import_all(target: IndexClient, source: str, *options: str) -> dict[str, str]:
    """Import the source, and return the outcome of each entry by its name.

    The namespace `db` is left out, because each test server creates it.
    """
    result = run_import(target, source, *options, "--json")
    start = result.output.index("[\n") if "[\n" in result.output else result.output.index("[]")
    results = json.JSONDecoder().raw_decode(result.output[start:])[0]
    return {".".join(entry["name"]): entry["outcome"] for entry in results if entry["name"] != ["db"]}


def append_ids(client: IndexClient, table: str, *ids: int) -> None:
    append(client, table, pa.table({"id": pa.array(ids, pa.int64())}))


@pytest.fixture
def shop(origin: IndexClient) -> IndexClient:
    """Return a client of the origin server, which has `shop.orders` with rows, and `shop.eu.orders`."""
    create_namespace(origin, "shop", {"owner": "ann"})
    create_namespace(origin, "shop.eu", {})
    create_table(origin, "shop.orders", COLUMNS, properties={"a": "b"})
    create_table(origin, "shop.eu.orders", COLUMNS, properties={})
    append_ids(origin, "shop.orders", 1, 2)
    return origin


def test_import_registers_all_tables_with_their_metadata_files(shop: IndexClient, target: IndexClient) -> None:
    outcomes = import_all(target, shop.url)
    assert outcomes == {
        "shop": "imported",
        "shop.eu": "imported",
        "shop.orders": "imported",
        "shop.eu.orders": "imported",
    }
    assert load_namespace_properties(target, "shop")["owner"] == "ann"
    assert target.load_table("shop.orders").metadata == shop.load_table("shop.orders").metadata


def test_repeated_import_changes_nothing(shop: IndexClient, target: IndexClient) -> None:
    import_all(target, shop.url)
    append_ids(target, "shop.orders", 3)
    instants_before = [instant.id for instant in target.timeline()]
    outcomes = import_all(target, shop.url, "--namespace", "shop.eu")
    assert outcomes == {"shop": "unchanged", "shop.eu": "unchanged", "shop.eu.orders": "unchanged"}
    # The table has a commit on this server, so the import does not take the other catalog's metadata file again.
    assert import_all(target, shop.url, "--table", "shop.orders")["shop.orders"] == "refused"
    assert [instant.id for instant in target.timeline()] == instants_before


@pytest.mark.slow
def test_dry_run_reports_what_an_import_would_do_and_changes_nothing(shop: IndexClient, target: IndexClient) -> None:
    create_table(shop, "db.outside", COLUMNS, location=f"{_find_lake(shop)}/elsewhere", properties={})
    outcomes = import_all(target, shop.url, "--dry-run")
    assert {outcomes[name] for name in ("shop.orders", "shop.eu.orders", "db.outside")} == {"importable"}
    assert ("shop",) not in set(target.namespaces())
    import_all(target, shop.url)
    assert import_all(target, shop.url, "--dry-run")["shop.orders"] == "unchanged"


def test_namespace_whose_location_is_not_allowed_is_reported_as_created(
    origin: IndexClient, target: IndexClient
) -> None:
    create_namespace(target, "crm", {})
    # The first server may not write into the warehouse of the second one.
    result = run_import(origin, target.url, "--namespace", "crm")
    assert "created: namespace crm: Its location is not imported: " in result.output
    assert result.exit_code == 0


def _find_lake(client: IndexClient) -> str:
    location = client.load_table("shop.orders").location
    return location[: location.index("/shop/")]


@pytest.mark.slow
def test_import_takes_selected_names_and_moves_them_below_a_namespace(shop: IndexClient, target: IndexClient) -> None:
    outcomes = import_all(target, shop.url, "--namespace", "shop.eu", "--table", "shop.none", "--into", "old.lake")
    assert outcomes == {
        "old": "imported",
        "old.lake": "imported",
        "old.lake.shop": "imported",
        "old.lake.shop.eu": "imported",
        "old.lake.shop.eu.orders": "imported",
        "shop.none": "gone",
    }


def test_import_takes_views_unless_they_run_with_the_rights_of_a_user(shop: IndexClient, target: IndexClient) -> None:
    for name, properties in (("plain", {}), ("owned", {"trino.run-as-owner": "ann"})):
        body = {"name": name, "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": properties}
        shop._request_json("POST", "/v1/namespaces/shop/views", body=body)
    outcomes = import_all(target, shop.url)
    assert (outcomes["shop.plain"], outcomes["shop.owned"]) == ("imported", "refused")
    assert load_view(target, "shop.plain") == load_view(shop, "shop.plain")
    assert import_all(target, shop.url, "--keep-owners")["shop.owned"] == "imported"


def test_namespace_of_refused_entries_is_not_kept(shop: IndexClient, target: IndexClient) -> None:
    for namespace in ("crm", "crm.eu", "empty"):
        create_namespace(shop, namespace, {})
    body = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {"trino.run-as-owner": "ann"}}
    shop._request_json("POST", "/v1/namespaces/crm%1Feu/views", body=body)
    selection = ("--namespace", "crm", "--namespace", "empty")
    expected = {"crm": "refused", "crm.eu": "refused", "crm.eu.v": "refused"}
    dry_run_outcomes = import_all(target, shop.url, "--dry-run", *selection)
    assert dry_run_outcomes == {**expected, "empty": "importable"}
    assert import_all(target, shop.url, *selection) == {**expected, "empty": "imported"}
    assert ("crm",) not in set(target.namespaces())
    create_namespace(target, "crm", {})
    assert import_all(target, shop.url, *selection)["crm"] == "unchanged"
    assert set(target.namespaces()) >= {("crm",), ("empty",)}


def test_import_error_names_a_catalog_that_does_not_answer(target: IndexClient) -> None:
    result = run_import(target, "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "The other catalog does not answer" in result.output


def _change_metadata(client: IndexClient, table: str, folder: Path, change: Any) -> str:
    """Write a changed copy of a table's metadata file, and return its location."""
    metadata = json.loads(client.load_table(table, history=True).metadata)
    change(metadata)
    path = folder / "metadata" / f"00007-{uuid.uuid4()}.metadata.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metadata))
    return path.as_uri()


def test_import_refuses_metadata_that_names_locations_outside_the_table(
    shop: IndexClient, target: IndexClient, lake: Path
) -> None:
    import_all(target, shop.url)
    create_namespace(target, "evil", {})
    victim_location = target.load_table("shop.orders").location
    folder = lake / "evil"

    def move_to_folder(metadata: dict[str, Any]) -> None:
        metadata |= {"location": folder.as_uri(), "table-uuid": "b4a2ec10-9d3c-4f4b-9e4f-0d3e4e5f6a7b"}
        metadata |= {"metadata-log": [], "snapshots": [], "refs": {}, "snapshot-log": [], "statistics": []}
        metadata.pop("current-snapshot-id", None)

    def name_statistics(metadata: dict[str, Any]) -> None:
        move_to_folder(metadata)
        statistics = {"snapshot-id": 1, "statistics-path": f"{victim_location}/s.puffin", "file-size-in-bytes": 1}
        metadata["statistics"] = [{**statistics, "file-footer-size-in-bytes": 1, "blob-metadata": []}]

    def name_manifest_list(metadata: dict[str, Any]) -> None:
        snapshots = metadata["snapshots"]
        move_to_folder(metadata)
        metadata["snapshots"] = snapshots

    def name_metadata_file(metadata: dict[str, Any]) -> None:
        move_to_folder(metadata)
        metadata["metadata-log"] = [
            {"timestamp-ms": 1, "metadata-file": f"{victim_location}/metadata/v1.metadata.json"}
        ]

    def set_property(name: str, value: str) -> Any:
        def change(metadata: dict[str, Any]) -> None:
            move_to_folder(metadata)
            metadata["properties"] = {name: value}

        return change

    def set_location(location: str) -> Any:
        def change(metadata: dict[str, Any]) -> None:
            move_to_folder(metadata)
            metadata["location"] = location

        return change

    attacks: tuple[tuple[Any, str], ...] = (
        (name_statistics, "The statistics file"),
        (name_manifest_list, "The manifest list"),
        (name_metadata_file, "The earlier metadata file"),
        (set_property("seamark.allowed-locations", victim_location), "seamark.allowed-locations"),
        (set_property("write.data.path", "file:///etc"), "The property write.data.path"),
        (set_property("write.data.path", victim_location), "write.data.path"),
        (set_property("s3.endpoint", "http://evil"), "s3.endpoint"),
        (set_location(victim_location), "The metadata file"),
        (set_location(f"{victim_location}/data"), "The metadata file"),
        (set_location(lake.as_uri()), "is the root of all tables"),
        (set_location("file:///etc/t"), "outside the warehouse"),
    )
    for change, reason in attacks:
        location = _change_metadata(shop, "shop.orders", folder, change)
        for is_dry_run in (True, False):
            with pytest.raises(InvalidRequest, match=re.escape(reason)):
                import_table(target, "evil.t", location, dry_run=is_dry_run)
    victim_folder = Path(victim_location.removeprefix("file://"))
    location = _change_metadata(shop, "shop.orders", victim_folder, set_location(victim_location))
    with pytest.raises(InvalidRequest, match="overlaps"):
        import_table(target, "evil.t", location)
    assert import_table(target, "evil.t", _change_metadata(shop, "shop.orders", folder, move_to_folder))


def test_concurrent_imports_of_one_table_register_it_once(shop: IndexClient, target: IndexClient) -> None:
    location = shop._request_json("GET", "/v1/namespaces/shop/tables/orders")["metadata-location"]
    create_namespace(target, "shop", {})
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: import_table(target, "shop.orders", location), range(8)))
    assert outcomes.count(True) == 1
    with pytest.raises(Refused, match="live under another name"):
        import_table(target, "shop.copy", location)


def test_concurrent_imports_of_one_table_under_several_names_register_one_name(
    shop: IndexClient, target: IndexClient
) -> None:
    location = shop._request_json("GET", "/v1/namespaces/shop/tables/orders")["metadata-location"]
    shop._request_json(
        "POST",
        "/v1/namespaces/shop/views",
        body={"name": "view", "schema": SCHEMA, "view-version": VIEW_VERSION, "properties": {}},
    )
    view_location = shop._request_json("GET", "/v1/namespaces/shop/views/view")["metadata-location"]
    create_namespace(target, "shop", {})

    def import_as(number: int) -> str:
        kind, file = ("tables", location) if number < 8 else ("views", view_location)
        try:
            target._request_json("PUT", f"/api/v1/{kind}/shop/n{number}/import", body={"metadata-location": file})
        except Refused as error:
            return error.message
        return kind

    with ThreadPoolExecutor(16) as pool:
        outcomes = list(pool.map(import_as, range(16)))
    assert sorted(outcome for outcome in outcomes if "live under another name" not in outcome) == ["tables", "views"]
