"""Tests of `seamark import` from a Hadoop warehouse."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from seamark.connector.client.catalog import create_namespace, create_table
from seamark.connector.client.indexes import IndexClient
from seamark.connector.read.scans import scan
from seamark.connector.write.appends import append
from tests.moving.hadoop import write_hadoop_table
from tests.moving.test_import import COLUMNS, append_ids, import_all, run_import


@pytest.fixture
def warehouse(origin: IndexClient, lake: Path) -> Path:
    """Return the folder of a Hadoop warehouse with `shop.orders` and `shop.eu.orders`, both with two rows."""
    folder = lake / "hadoop"
    create_namespace(origin, "shop", {})
    for number, name in enumerate(("orders", "eu/orders")):
        create_table(origin, ("shop", f"t{number}"), COLUMNS, properties={})
        append_ids(origin, f"shop.t{number}", 1, 2)
        write_hadoop_table(origin, f"shop.t{number}", folder / "shop" / name)
    return folder


def read_ids(client: IndexClient, table: str) -> list[int]:
    return sorted(scan(client, table).to_arrow().column("id").to_pylist())


def test_import_finds_the_tables_of_a_folder_tree(warehouse: Path, target: IndexClient) -> None:
    outcomes = import_all(target, str(warehouse))
    assert outcomes == dict.fromkeys(("shop", "shop.eu", "shop.orders", "shop.eu.orders"), "imported")
    assert read_ids(target, "shop.eu.orders") == [1, 2]
    assert import_all(target, warehouse.as_uri()) == dict.fromkeys(outcomes, "unchanged")


def test_tables_without_schemes_are_read_planned_and_written(
    origin: IndexClient, warehouse: Path, target: IndexClient
) -> None:
    write_hadoop_table(origin, "shop.t0", warehouse / "old" / "plain", has_scheme=False)
    assert '"location": "/' in (warehouse / "old" / "plain" / "metadata" / "v1.metadata.json").read_text()
    # Two copies of a table have the same UUID, so only one of them can be live.
    assert import_all(target, str(warehouse), "--namespace", "old")["old.plain"] == "imported"
    assert read_ids(target, "old.plain") == [1, 2]
    append(target, "old.plain", pa.table({"id": pa.array([3], pa.int64())}))
    assert read_ids(target, "old.plain") == [1, 2, 3]
    assert target.load_table("old.plain").location == (warehouse / "old" / "plain").as_uri()
    assert target.explain("old.plain", "id = 3").files == 1
    assert import_all(target, str(warehouse), "--namespace", "shop")["shop.orders"] == "refused"


def test_import_takes_the_version_after_the_hint(origin: IndexClient, warehouse: Path, target: IndexClient) -> None:
    append_ids(origin, "shop.t0", 3)
    write_hadoop_table(origin, "shop.t0", warehouse / "shop" / "orders", version=2)
    # The Hadoop catalog writes the hint after the commit, so a killed writer leaves an older hint.
    (warehouse / "shop" / "orders" / "metadata" / "version-hint.text").write_text("1")
    import_all(target, str(warehouse))
    assert read_ids(target, "shop.orders") == [1, 2, 3]


def test_import_refuses_folders_whose_current_version_is_uncertain(warehouse: Path, target: IndexClient) -> None:
    metadata = warehouse / "shop" / "orders" / "metadata"
    current_path = metadata / "v1.metadata.json"
    hint = metadata / "version-hint.text"
    other_file = metadata / "00001-a.metadata.json"
    for hint_text, has_other_file, reason in (
        ("9", False, "The version 9 of version-hint.text has no metadata file"),
        ("one", False, "instead of a version number"),
        ("1", True, "of a Hadoop catalog and of another catalog"),
    ):
        hint.write_text(hint_text)
        if has_other_file:
            other_file.write_bytes(current_path.read_bytes())
        result = run_import(target, str(warehouse), "--table", "shop.orders")
        assert (result.exit_code, reason in result.output) == (1, True), result.output
    hint.unlink()
    current_path.unlink()
    (metadata / "00001-b.metadata.json").write_text("{}")
    assert "Several metadata files may be the newest" in run_import(target, str(warehouse)).output
