"""A random catalog of many tables is rebuilt, copied and imported by commands that are killed at any point.

The result must equal that of commands that were not killed, which the test reads from the database itself.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.recovery.many_tables import write_tables
from tests.recovery.test_kills import kill_command, measure_s
from tests.recovery.test_recovery import delete_database
from tests.recovery.test_transfer import Content, list_columns, read_postgres_content, read_sqlite_content
from tests.recovery.world import RandomCatalog
from tests.seeds import first_seed
from tests.services.command import run_seamark
from tests.services.seamark import SHARED_KEY, Seamark

TABLES = int(os.environ.get("TEST_TABLES", "2000"))
"""The number of written tables. With `TEST_TABLES=10000`, the test takes about five times as long."""
ACTIONS = 150
KILLS = 5
"""The number of times that each command is killed."""
_TIMEOUT_S = 900.0
_CATALOG = {"entries": "*", "claims": "*", "namespaces": "*"}


def _run(*arguments: str, code: int = 0) -> None:
    result = run_seamark(*arguments, env={"SEAMARK_ENCRYPTION_KEY": SHARED_KEY}, timeout_s=_TIMEOUT_S)
    assert result.returncode == code, result.stdout + result.stderr


def _read_catalog(home: Path) -> Content:
    """Return the claims, the namespaces, and the entries without the time of their registration."""
    content = read_sqlite_content(home / "seamark.db", _CATALOG)
    columns = "namespace, name, kind, uuid, metadata_location"
    return {**content, **read_sqlite_content(home / "seamark.db", {"entries": columns})}


def _write_warehouse_without_database(home: Path, seed: int) -> None:
    """Write a warehouse with random tables, views and functions, and with many tables of one to four versions.

    The database is deleted, so only the files remain, as after the loss of the catalog.
    """
    with Seamark(home) as server:
        RandomCatalog(server.base_url, seed).run(ACTIONS)
    delete_database(home)
    rng = random.Random(seed)
    written_count = 0
    while written_count < TABLES:
        count = min(rng.randint(50, 400), TABLES - written_count)
        write_tables(home / "warehouse", count, first=written_count, files=rng.randint(1, 4))
        written_count += count


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_large_catalog_equals_itself_after_commands_that_were_killed(tmp_path: Path, postgres_url: str) -> None:
    home, seed = tmp_path / "home", first_seed()
    rng = random.Random(seed)
    _write_warehouse_without_database(home, seed)
    rebuild = ("rebuild", "--home", str(home))
    uninterrupted_s = measure_s(lambda: _run(*rebuild))
    expected = _read_catalog(home)
    assert len(expected["entries"]) >= TABLES

    delete_database(home)
    for _ in range(KILLS):
        kill_command(tmp_path, rng.uniform(0, uninterrupted_s / 2), *rebuild)
    _run(*rebuild)
    assert _read_catalog(home) == expected

    file, restored_home = tmp_path / "backup", tmp_path / "restored"
    restored_home.mkdir()
    uninterrupted_s = measure_s(lambda: _run("backup", str(file), "--home", str(home)))
    restore = ("restore", str(file), "--home", str(restored_home), "--overwrite", "--warehouse")
    restore = (*restore, (home / "warehouse").as_uri())
    for _ in range(KILLS):
        kill_command(tmp_path, rng.uniform(0, uninterrupted_s), "backup", str(file), "--overwrite", "--home", str(home))
        kill_command(tmp_path, rng.uniform(0, 2 * uninterrupted_s), *restore)
    _run(*restore)
    assert _read_catalog(restored_home) == expected

    moved_home = tmp_path / "moved"
    moved_home.mkdir()
    migrate = ("migrate", "--home", str(home), "--to", f"sqlite://{moved_home / 'seamark.db'}", "--overwrite")
    for _ in range(KILLS):
        kill_command(tmp_path, rng.uniform(0, 2 * uninterrupted_s), *migrate)
    _run(*migrate)
    assert _read_catalog(moved_home) == expected == _read_catalog(home)

    columns = {name: text for name, text in list_columns(home / "seamark.db").items() if name in _CATALOG}
    content_before = read_sqlite_content(home / "seamark.db", columns)
    migrate = ("migrate", "--home", str(home), "--to", postgres_url, "--overwrite")
    for _ in range(KILLS):
        kill_command(tmp_path, rng.uniform(0, 3 * uninterrupted_s), *migrate)
    _run(*migrate)
    assert asyncio.run(read_postgres_content(postgres_url, columns)) == content_before

    env = {"SEAMARK_ALLOWED_LOCATIONS": (home / "warehouse").as_uri()}
    uninterrupted_home, target_home = tmp_path / "twin", tmp_path / "target"
    with Seamark(home) as origin:
        with Seamark(uninterrupted_home, env=env) as uninterrupted_server:
            # Snapshots of the random tables name manifest lists elsewhere, which an import refuses.
            uninterrupted_s = measure_s(
                lambda: _run("import", origin.base_url, "--url", uninterrupted_server.base_url, code=1)
            )
        with Seamark(target_home, env=env) as target:
            command = ("import", origin.base_url, "--url", target.base_url)
            for _ in range(KILLS):
                kill_command(tmp_path, rng.uniform(0, uninterrupted_s / KILLS), *command)
            _run(*command, code=1)
    imported = _read_catalog(target_home)
    assert imported == _read_catalog(uninterrupted_home)
    assert len(imported["entries"]) >= TABLES
