"""Tests of `seamark export` to another Iceberg REST catalog."""

from __future__ import annotations

import json

from click.testing import CliRunner, Result

from seamark.commands.main import cli
from seamark.connector.client.catalog import drop_table
from seamark.connector.client.indexes import IndexClient
from tests.moving.random_names import fill_with_odd_names, list_catalog
from tests.moving.test_import import append_ids, shop  # noqa: F401  a fixture


def run_export(client: IndexClient, target: str, *options: str) -> Result:
    return CliRunner().invoke(cli, ["export", target, *options, "--url", client.url])


def export_all(client: IndexClient, target: str, *options: str) -> dict[str, str]:
    result = run_export(client, target, *options, "--json")
    results = json.JSONDecoder().raw_decode(result.output[result.output.index("[\n") :])[0]
    return {".".join(entry["name"]): entry["outcome"] for entry in results}


def test_exported_catalog_equals_its_origin_and_a_repeat_changes_nothing(
    origin: IndexClient, target: IndexClient
) -> None:
    fill_with_odd_names(origin, 3, namespaces=8, entries=20)
    result = run_export(origin, target.url)
    assert result.exit_code == 0, result.output
    assert list_catalog(target) == list_catalog(origin)
    assert set(export_all(origin, target.url).values()) == {"unchanged"}


def test_export_selects_names_and_refuses_tables_that_have_changed(
    shop: IndexClient,  # noqa: F811
    target: IndexClient,
) -> None:
    options = ("--table", "shop.orders", "--into", "copy")
    assert export_all(shop, target.url, *options, "--dry-run")["copy.shop.orders"] == "exportable"
    assert ("copy",) not in set(target.namespaces())
    assert export_all(shop, target.url, *options)["copy.shop.orders"] == "exported"
    append_ids(shop, "shop.orders", 3)
    assert export_all(shop, target.url, *options)["copy.shop.orders"] == "refused"
    drop_table(target, "copy.shop.orders")
    assert export_all(shop, target.url, *options)["copy.shop.orders"] == "exported"
