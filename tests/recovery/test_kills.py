"""Tests of `seamark restore`, `migrate` and `rebuild` that are killed at any moment. The old state remains."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from seamark.metaserver.store.transfer.layout import CONTENT_TABLES
from tests.recovery.test_recovery import delete_database, index_by_uuid, run_command, run_rebuild
from tests.recovery.test_transfer import read_sqlite_content
from tests.recovery.world import RandomCatalog, list_catalog
from tests.seeds import examples, first_seed
from tests.services.command import SEAMARK
from tests.services.fork_server import fork
from tests.services.seamark import SHARED_KEY, Seamark

KILLS = examples(12, 1)


def kill_command(folder: Path, delay_s: float, *arguments: str) -> bool:
    """Start the command, and kill it after `delay_s`. Return True if it was killed or failed."""
    environment = {**os.environ, "SEAMARK_ENCRYPTION_KEY": SHARED_KEY}
    with (folder / "killed.log").open("ab") as log:
        process = fork([SEAMARK, *arguments], environment, cwd=None, output=log.fileno(), errors=log.fileno())
        assert process is not None, "the fork server is enabled for tests"
        time.sleep(delay_s)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        return process.wait(30) != 0


def measure_s(action: Callable[[], Any]) -> float:
    start_s = time.monotonic()
    action()
    return time.monotonic() - start_s


@pytest.fixture
def catalog(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    home = tmp_path / "home"
    with Seamark(home) as server:
        RandomCatalog(server.base_url, first_seed()).run(examples(100, 40))
        return home, list_catalog(server.base_url)


def test_killed_rebuild_is_continued_by_the_next_run(catalog: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, _ = catalog
    rng = random.Random(first_seed())
    delete_database(home)
    rebuild_s = measure_s(lambda: run_rebuild(home))
    with Seamark(home) as server:
        expected = index_by_uuid(list_catalog(server.base_url))
    for _ in range(KILLS):
        delete_database(home)
        kill_command(tmp_path, rng.uniform(0, rebuild_s), "rebuild", "--home", str(home))
        kill_command(tmp_path, rng.uniform(0, rebuild_s), "rebuild", "--home", str(home))
        run_rebuild(home)
        with Seamark(home) as server:
            assert index_by_uuid(list_catalog(server.base_url)) == expected


def test_killed_restore_and_migration_leave_the_old_state(catalog: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, listing_before = catalog
    database, file, target = home / "seamark.db", tmp_path / "backup", tmp_path / "target.db"
    rng = random.Random(first_seed())
    backup_s = measure_s(lambda: run_command(home, "backup", str(file)))
    content_before = read_sqlite_content(database)
    for _ in range(KILLS):
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(
                "INSERT OR IGNORE INTO grants VALUES ('after the backup', 'reader', '', 'namespace', '', 0)"
            )
        later_content = read_sqlite_content(database)
        delay_s = rng.uniform(0, 1.5 * backup_s)
        kill_command(tmp_path, delay_s, "restore", str(file), "--home", str(home), "--overwrite")
        content_after = read_sqlite_content(database)
        assert content_after in (later_content, content_before)
        target_before = read_sqlite_content(target) if target.exists() else {}
        kill_command(tmp_path, delay_s, "migrate", "--home", str(home), "--to", f"sqlite://{target}", "--overwrite")
        assert read_sqlite_content(database) == content_after
        if target.exists():
            with closing(sqlite3.connect(target)) as connection:
                assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            target_after = read_sqlite_content(target)
            # Commands of tests begin with a copy of a migrated database without a catalog (migrated_database.py).
            is_without_catalog = not any(target_after.get(name) for name in CONTENT_TABLES)
            assert target_after in (target_before, content_after) or (not target_before and is_without_catalog)
    with Seamark(home) as server:
        assert list_catalog(server.base_url) == listing_before


@pytest.mark.slow
def test_killed_backup_leaves_the_earlier_file(catalog: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    home, _ = catalog
    database, file, restored = home / "seamark.db", tmp_path / "backup", tmp_path / "restored.db"
    rng = random.Random(first_seed())
    backup_s = measure_s(lambda: run_command(home, "backup", str(file)))
    possible_contents = [read_sqlite_content(database)]
    for number in range(KILLS):
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(f"INSERT INTO grants VALUES ('change {number}', 'reader', '', 'namespace', '', 0)")
        possible_contents.append(read_sqlite_content(database))
        # About one of six backups ends before it would be killed.
        kill_command(tmp_path, rng.uniform(0, 1.2 * backup_s), "backup", str(file), "--overwrite", "--home", str(home))
        run_command(home, "restore", str(file), "--database", f"sqlite://{restored}", "--overwrite")
        content = read_sqlite_content(restored)
        assert content in possible_contents
        # Later backups may not have an older content than this one.
        possible_contents = possible_contents[possible_contents.index(content) :]
        assert read_sqlite_content(database) == possible_contents[-1]


@pytest.mark.slow
def test_killed_migration_to_postgres_leaves_the_old_database(
    catalog: tuple[Path, dict[str, Any]], tmp_path: Path, postgres_url: str
) -> None:
    home, listing_before = catalog
    database = home / "seamark.db"
    content = read_sqlite_content(database)
    rng = random.Random(first_seed())
    migrate = ("migrate", "--home", str(home), "--to", postgres_url, "--overwrite")
    backup_s = measure_s(lambda: run_command(home, "backup", str(tmp_path / "backup")))
    for _ in range(KILLS):
        kill_command(tmp_path, rng.uniform(0, 2 * backup_s), *migrate)
        assert read_sqlite_content(database) == content
    run_command(home, "migrate", "--to", postgres_url, "--overwrite")
    with Seamark(home, database=postgres_url) as server:
        assert list_catalog(server.base_url) == listing_before
