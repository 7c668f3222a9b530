"""Tests of `seamark backup`, `restore`, `migrate` and `rebuild` on random catalogs, checked through the HTTP API."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.many_tables import write_tables
from tests.recovery.world import Listing, RandomCatalog, get_location, get_uuid, list_catalog, list_pointers
from tests.seeds import first_seed
from tests.services.command import run_seamark
from tests.services.s3 import S3
from tests.services.seamark import SHARED_KEY, Seamark

ACTIONS = 60


def run_command(home: Path, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
    environment = {"SEAMARK_ENCRYPTION_KEY": SHARED_KEY, **(env or {})}
    result = run_seamark(*arguments, "--home", str(home), env=environment)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def delete_database(home: Path) -> None:
    for path in home.glob("seamark.db*"):
        path.unlink()


def run_rebuild(home: Path, *arguments: str) -> Any:
    return json.loads(run_command(home, "rebuild", "--json", *arguments))


def drop_locations(listing: Listing) -> Listing:
    return {kind: rows for kind, rows in listing.items() if kind != "location"}


@pytest.fixture
def seed() -> int:
    return first_seed()


def test_restored_backup_of_a_running_server_equals_its_catalog(tmp_path: Path, seed: int) -> None:
    home, file = tmp_path / "home", tmp_path / "backup"
    with Seamark(home) as server:
        catalog = RandomCatalog(server.base_url, seed)
        catalog.run(ACTIONS)
        run_command(home, "backup", str(file))
        listing_before = list_catalog(server.base_url)
        rejected_command = run_seamark("restore", str(file), "--home", str(home))
        assert "Stop it before you run seamark restore" in rejected_command.stderr
        assert "with another --home" not in rejected_command.stderr
        catalog.run(ACTIONS)
    other_warehouse = ("--warehouse", (tmp_path / "elsewhere").as_uri())
    report = run_command(home, "restore", str(file), "--overwrite", *other_warehouse, code=1)
    assert "is outside the warehouse and the allowed locations of this command" in report
    assert "missing in storage" not in report
    rejected_command = run_seamark("restore", str(file), "--home", str(home))
    assert rejected_command.returncode == 2
    assert "--overwrite" in rejected_command.stderr
    run_command(home, "restore", str(file), "--overwrite")
    with Seamark(home) as server:
        assert list_catalog(server.base_url) == listing_before


def test_restore_advances_pointers_and_rebuild_adds_later_tables(tmp_path: Path, seed: int) -> None:
    home, file = tmp_path / "home", tmp_path / "backup"
    with Seamark(home) as server:
        catalog = RandomCatalog(server.base_url, seed)
        catalog.run(ACTIONS)
        run_command(home, "backup", str(file))
        listing_before = list_catalog(server.base_url)
        for _ in range(ACTIONS):
            catalog.commit()
            catalog.create_table()
            catalog.replace_view()
        listing_after = list_catalog(server.base_url)
    changed_names = {
        name
        for kind in ("table", "view")
        for name in listing_before[kind]
        if listing_before[kind][name] != listing_after[kind][name]
    }
    assert changed_names
    report = json.loads(run_command(home, "restore", str(file), "--overwrite", "--json"))
    assert {entry["name"] for entry in report["later"]} == changed_names
    assert not any(entry["is-advanced"] for entry in report["later"])
    with Seamark(home) as server:
        assert list_catalog(server.base_url) == listing_before
    advance_report = json.loads(run_command(home, "restore", str(file), "--overwrite", "--advance", "--json"))
    assert {entry["name"] for entry in advance_report["later"] if entry["is-advanced"]} == changed_names
    assert not advance_report["findings"]
    run_rebuild(home)
    with Seamark(home) as server:
        assert list_catalog(server.base_url) == listing_after


def test_migration_to_postgres_and_back_keeps_the_catalog(tmp_path: Path, seed: int, postgres_url: str) -> None:
    home, restored_url = tmp_path / "home", f"sqlite://{tmp_path / 'back.db'}"
    with Seamark(home) as server:
        RandomCatalog(server.base_url, seed).run(ACTIONS)
        listing_before = list_catalog(server.base_url)
        rejected_command = run_seamark("migrate", "--to", postgres_url, "--home", str(home))
        assert rejected_command.returncode == 2
        assert "A server or another command runs" in rejected_command.stderr
    run_command(home, "migrate", "--to", postgres_url)
    with Seamark(home, database=postgres_url) as server:
        assert list_catalog(server.base_url) == listing_before
    run_command(home, "migrate", "--database", postgres_url, "--to", restored_url)
    with Seamark(home, database=restored_url) as server:
        assert list_catalog(server.base_url) == listing_before
        RandomCatalog(server.base_url, seed + 1)


@pytest.mark.slow
def test_rebuild_restores_the_catalog_from_the_warehouse(tmp_path: Path, seed: int) -> None:
    home = tmp_path / "home"
    with Seamark(home) as server:
        catalog = RandomCatalog(server.base_url, seed)
        catalog.run(3 * ACTIONS)
        listing_before = list_catalog(server.base_url)
    delete_database(home)
    report = run_rebuild(home)
    # A rebuilt table has the name with which it was created. Tables that share this name are not registered.
    counts = Counter(catalog.created_objects.values())
    assert {table["uuid"]: (table["kind"], table["name"]) for table in report["registered"]} == {
        uuid: created_name for uuid, created_name in catalog.created_objects.items() if counts[created_name] == 1
    }
    with Seamark(home) as server:
        listing_after = list_catalog(server.base_url)
    rebuilt = index_by_uuid(listing_after)
    for uuid, content in index_by_uuid(listing_before).items():
        assert rebuilt[uuid] == content
    assert listing_after["namespace"].keys() <= listing_before["namespace"].keys()
    assert run_rebuild(home)["registered"] == []


@pytest.mark.slow
def test_rebuild_with_chosen_names_restores_the_catalog(tmp_path: Path, seed: int) -> None:
    home = tmp_path / "home"
    with Seamark(home) as server:
        catalog = RandomCatalog(server.base_url, seed)
        catalog.run(3 * ACTIONS)
        listing_before = list_catalog(server.base_url)
    names = {
        get_location(kind, content): name
        for kind in ("table", "view")
        for name, content in listing_before[kind].items()
    } | {row["metadata-location"]: None for row in listing_before["dropped"].values()}
    (tmp_path / "names.json").write_text(json.dumps(names))
    delete_database(home)
    dry_report = run_rebuild(home, "--dry-run", "--names", str(tmp_path / "names.json"))
    assert not (home / "seamark.db").exists()
    assert run_rebuild(home, "--names", str(tmp_path / "names.json")) == dry_report
    with Seamark(home) as server:
        listing_after = list_catalog(server.base_url)
    for kind in ("table", "view", "function"):
        assert listing_after[kind] == listing_before[kind]


def index_by_uuid(listing: Listing) -> dict[str, Any]:
    """Return the tables, views and functions of a catalog by their UUIDs."""
    return {
        get_uuid(kind, content): content for kind in ("table", "view", "function") for content in listing[kind].values()
    }


@pytest.mark.slow
def test_rebuild_after_a_lost_home_needs_only_the_warehouse(tmp_path: Path, seed: int) -> None:
    home, warehouse = tmp_path / "home", f"file://{tmp_path / 'lake'}"
    with Seamark(home, warehouse=warehouse) as server:
        RandomCatalog(server.base_url, seed).run(ACTIONS)
        listing_before = index_by_uuid(list_catalog(server.base_url))
    shutil.rmtree(home)
    run_command(home, "rebuild", "--warehouse", warehouse)
    with Seamark(home, warehouse=warehouse) as server:
        listing_after = index_by_uuid(list_catalog(server.base_url))
    assert {uuid: listing_after[uuid] for uuid in listing_before} == listing_before


@pytest.mark.slow
def test_ten_thousand_tables_are_rebuilt_copied_and_restored(tmp_path: Path, postgres_url: str) -> None:
    home, file = tmp_path / "home", tmp_path / "backup"
    expected = write_tables(home / "warehouse", 10_000)
    rebuild_report = run_rebuild(home)
    assert {table["name"]: table["location"] for table in rebuild_report["registered"]} == expected
    assert rebuild_report["findings"] == []
    run_command(home, "migrate", "--to", postgres_url)
    run_command(home, "backup", str(file), "--database", postgres_url)
    delete_database(home)
    assert json.loads(run_command(home, "restore", str(file), "--json"))["later"] == []
    for database in ("", postgres_url):
        with Seamark(home, database=database) as server:
            assert list_pointers(server.base_url) == expected


@pytest.mark.slow
def test_rebuild_restores_the_catalog_from_a_bucket(tmp_path: Path, seed: int, s3: S3, s3_bucket: str) -> None:
    home, warehouse, env = tmp_path / "home", f"s3://{s3_bucket}/lake", s3.build_seamark_env()
    with Seamark(home, warehouse=warehouse, env=env) as server:
        RandomCatalog(server.base_url, seed).run(ACTIONS)
        listing_before = index_by_uuid(list_catalog(server.base_url))
    delete_database(home)
    run_command(home, "rebuild", "--warehouse", warehouse, env=env)
    with Seamark(home, warehouse=warehouse, env=env) as server:
        listing_after = index_by_uuid(list_catalog(server.base_url))
    assert {uuid: listing_after[uuid] for uuid in listing_before} == listing_before
