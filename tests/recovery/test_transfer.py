"""Tests of backups, restores, moves to another database, and upgrades from each earlier schema.

The rows are generated from the schema. Each table has rows with distinct values, so that the tests detect a column or a
table that a copy leaves out. The oracle reads them with its own statements.
"""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import ConfigError, Corrupt, SeamarkError
from seamark.metaserver.store.model import QuerySums
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, RecordInstant
from seamark.metaserver.store.port import InstantFilter
from seamark.metaserver.store.sql.generator_store import GeneratorStore
from seamark.metaserver.store.sql.migrations import MIGRATIONS
from seamark.metaserver.store.transfer.backups import read_backup, restore_backup, write_backup
from seamark.metaserver.store.transfer.copying import copy_database
from seamark.metaserver.store.transfer.open import read_database, write_database
from tests.store.samples import NS, make_entry, make_instant

Content = dict[str, list[tuple[Any, ...]]]
NEWEST = len(MIGRATIONS)
QUERY_COUNTS_VERSION = 15
"""The last version whose query history has a row for each UUID, fingerprint and hour."""
PLAIN_SECRETS_VERSION = 6
"""The last version whose signing keys were not encrypted. A migration deletes them."""
MOVED_TABLES = {"query_counts"}
"""Tables whose rows a migration moves to another table."""
ROWS = 3


def create_old_database(path: Path, version: int) -> None:
    """Create a database as the program of a version did, with rows in each table."""
    # The words of SQLite for the placeholders of the migrations.
    words_of_sqlite = {"text": "TEXT", "int": "INTEGER", "bytes": "BLOB", "table": "STRICT, WITHOUT ROWID"}
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE schema_version (version INTEGER NOT NULL)")
        for statements_by_dialect in MIGRATIONS[:version]:
            for sql in statements_by_dialect.get("", ()):
                connection.execute(sql.format(**words_of_sqlite))
        connection.execute("INSERT INTO schema_version VALUES (?)", (version,))
        for name in list_tables(connection):
            for number in range(ROWS):
                add_row(connection, name, number)


def add_row(connection: sqlite3.Connection, table: str, number: int) -> None:
    """Insert a row whose values differ from those of rows with other numbers. Its integers need more than 32 bits."""
    values: list[Any] = []
    for _, column, column_type, *_ in connection.execute(f"PRAGMA table_info({table})").fetchall():
        if column == "position":  # The positions of instants follow those of archived instants.
            values.append(f"{100 + number if table == 'instants' else number + 1:020d}")
        elif column_type == "TEXT":
            values.append(f"{column} {number} é\U0001f600 {table}")
        elif column_type == "BLOB":
            values.append(bytes((number, 0, 255)))
        else:
            values.append(number + (1 << 40))
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)


def list_tables(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('schema_version', 'backup_info')"
    )
    return sorted(name for (name,) in rows)


def read_sqlite_content(path: Path, columns: dict[str, str] | None = None) -> Content:
    """Return all rows by table. If `columns` is given, return only these tables and columns."""
    with closing(sqlite3.connect(path)) as connection:
        columns_by_table = columns or dict.fromkeys(list_tables(connection), "*")
        return {
            name: sorted(connection.execute(f"SELECT {column_names} FROM {name}"), key=repr)
            for name, column_names in columns_by_table.items()
        }


def list_columns(path: Path) -> dict[str, str]:
    """Return the names of the columns, as text of a SELECT, by table. MOVED_TABLES are left out."""
    with closing(sqlite3.connect(path)) as connection:
        return {
            name: ", ".join(column for _, column, *_ in connection.execute(f"PRAGMA table_info({name})"))
            for name in list_tables(connection)
            if name not in MOVED_TABLES
        }


async def read_postgres_content(url: str, columns: dict[str, str]) -> Content:
    connection = await asyncpg.connect(url)
    try:
        return {
            name: sorted((tuple(row) for row in await connection.fetch(f"SELECT {column_names} FROM {name}")), key=repr)
            for name, column_names in columns.items()
        }
    finally:
        await connection.close()


async def back_up(url: str, file: Path) -> None:
    async with read_database(url) as reader:
        await write_backup(reader, file, created_ms=1, program_version="test", warehouse="file:///w", overwrite=False)


async def restore_database(file: Path, url: str, *, overwrite: bool = False) -> None:
    async with read_backup(file) as (info, reader), write_database(url, overwrite=overwrite) as writer:
        await restore_backup(info, reader, writer)


async def move_database(source: str, target: str) -> None:
    async with (
        read_database(source, is_writer_excluded=True) as reader,
        write_database(target, overwrite=False) as writer,
    ):
        await copy_database(reader, writer)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("version", range(1, NEWEST + 1))
async def test_database_of_each_version_is_upgraded_with_its_content(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.db"
    create_old_database(path, version)
    columns = list_columns(path)
    content_before = read_sqlite_content(path, columns)
    async with open_store(f"sqlite://{path}", clock=SimulatedClock(seed=1)) as store:
        await store.ping()
    content_after = read_sqlite_content(path, columns)
    if version <= PLAIN_SECRETS_VERSION:
        assert content_before.pop("secrets")
        assert content_after.pop("secrets") == []
    assert content_after == content_before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT version FROM schema_version").fetchall() == [(NEWEST,)]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("version", range(1, NEWEST + 1))
async def test_backup_of_each_version_is_restored_and_upgraded(tmp_path: Path, version: int) -> None:
    path, file, new_path = tmp_path / "old.db", tmp_path / "backup", tmp_path / "new" / "new.db"
    create_old_database(path, version)
    columns, content_before = list_columns(path), read_sqlite_content(path)
    await back_up(f"sqlite://{path}", file)
    assert read_sqlite_content(file) == content_before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    await restore_database(file, f"sqlite://{new_path}")
    content_after = read_sqlite_content(new_path, columns)
    if version <= PLAIN_SECRETS_VERSION:
        content_before["secrets"] = []
    assert content_after == {name: rows for name, rows in content_before.items() if name in columns}


async def test_upgrade_moves_the_sums_of_the_query_history(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    create_old_database(path, QUERY_COUNTS_VERSION)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for uuid in ("u", "v"):
            connection.execute("INSERT INTO query_shapes VALUES (?, 'a', 'me', 'shape', 'samples')", (uuid,))
            for fingerprint in ("a", ""):
                for hour in (5, 6):
                    values = (uuid, fingerprint, hour, *range(1, 8))
                    connection.execute(f"INSERT INTO query_counts VALUES ({', '.join('?' * len(values))})", values)
    async with open_store(f"sqlite://{path}", clock=SimulatedClock(seed=1)) as store:
        for uuid in ("u", "v"):
            other_shape, shape = await store.query_shapes(uuid, 0, 10)
            assert (other_shape.fingerprint, shape.fingerprint, shape.shape, shape.samples) == (
                "",
                "a",
                "shape",
                "samples",
            )
            assert (shape.first_hour, shape.last_hour) == (5, 6)
            assert other_shape.sums == shape.sums == QuerySums(2, 4, 6, 8, 10, 12, 14)


async def test_copy_to_postgres_and_back_keeps_all_rows(tmp_path: Path, postgres_url: str) -> None:
    path, restored_path, file = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "backup"
    create_old_database(path, NEWEST)
    columns, content_before = list_columns(path), read_sqlite_content(path)
    await move_database(f"sqlite://{path}", postgres_url)
    assert await read_postgres_content(postgres_url, columns) == content_before
    assert read_sqlite_content(path) == content_before
    await back_up(postgres_url, file)
    assert read_sqlite_content(file) == content_before
    await move_database(postgres_url, f"sqlite://{restored_path}")
    assert read_sqlite_content(restored_path) == content_before


async def test_upgrade_in_postgres_keeps_the_content_of_the_first_schema(tmp_path: Path, postgres_url: str) -> None:
    path, file = tmp_path / "old.db", tmp_path / "backup"
    create_old_database(path, 1)
    columns, content_before = list_columns(path), read_sqlite_content(path)
    await back_up(f"sqlite://{path}", file)
    await restore_database(file, postgres_url)
    content_before["secrets"] = []
    assert await read_postgres_content(postgres_url, columns) == content_before


async def test_timeline_continues_after_each_move(tmp_path: Path, postgres_url: str) -> None:
    """An instant is an event of the timeline. Its position is greater than those of all earlier instants."""
    clock = SimulatedClock(seed=1)
    first_url, last_url = f"sqlite://{tmp_path / 'a.db'}", f"sqlite://{tmp_path / 'b.db'}"
    ids, positions = [], []
    for number, (url, source) in enumerate(((first_url, None), (postgres_url, first_url), (last_url, postgres_url))):
        if source is not None:
            await move_database(source, url)
        async with open_store(url, clock=clock) as store:
            for instant_number in range(3):
                ids.append(f"{number}-{instant_number}")
                await store.transact([RecordInstant(instant=make_instant(ids[-1]))])
            instants = await store.list_instants(InstantFilter(), limit=100)
            assert [instant.id for instant in instants] == ids
            # A reader that continues from a position in the previous database misses no later instant.
            for position in positions:
                later_instants = await store.list_instants(InstantFilter(since=position), limit=100)
                assert [instant.id for instant in later_instants][-3:] == ids[-3:]
            positions += [instant.position for instant in instants]


async def test_copy_to_postgres_begins_after_all_epochs_of_the_source(tmp_path: Path, postgres_url: str) -> None:
    # In PostgreSQL, the position of an instant begins with its epoch, as four hexadecimal digits. A new epoch begins if
    # stored positions would follow the positions of new instants.
    path, highest_position = tmp_path / "a.db", f"0005{9:032x}"
    create_old_database(path, NEWEST)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE instants SET position = ? WHERE id LIKE 'id 1%'", (highest_position,))
    await move_database(f"sqlite://{path}", postgres_url)
    async with open_store(postgres_url, clock=SimulatedClock(seed=1)) as store:
        await store.transact([RecordInstant(instant=make_instant("later"))])
        later_instants = await store.list_instants(InstantFilter(since=highest_position), limit=100)
        assert [instant.id for instant in later_instants] == ["later"]


async def test_damaged_backup_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path, file, target = tmp_path / "a.db", tmp_path / "backup", tmp_path / "b.db"
    create_old_database(path, NEWEST)
    await back_up(f"sqlite://{path}", file)
    await move_database(f"sqlite://{path}", f"sqlite://{target}")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("UPDATE entries SET metadata_location = 'file:///elsewhere' WHERE name LIKE 'name 1%'")
    content_before = read_sqlite_content(target)
    with pytest.raises(Corrupt, match="entries"):
        await restore_database(file, f"sqlite://{target}", overwrite=True)
    assert read_sqlite_content(target) == content_before


async def test_restore_refuses_a_database_with_a_catalog(tmp_path: Path, postgres_url: str) -> None:
    path, file = tmp_path / "a.db", tmp_path / "backup"
    async with open_store(f"sqlite://{path}", clock=SimulatedClock(seed=1)) as store:
        await store.transact([CreateNamespace(NS, {}), CreateEntry(entry=make_entry("t"))])
    await back_up(f"sqlite://{path}", file)
    await restore_database(file, postgres_url)
    for url in (f"sqlite://{path}", postgres_url):
        with pytest.raises(ConfigError, match="--overwrite"):
            await restore_database(file, url)
        await restore_database(file, url, overwrite=True)
        async with open_store(url, clock=SimulatedClock(seed=1)) as store:
            assert (await store.load_entry(make_entry("t").kind, NS, "t")) is not None
            assert isinstance(store, GeneratorStore)
            await store.check_invariants()


@pytest.mark.parametrize("table", ["grants", "schema_version"])
async def test_database_with_tables_of_another_application_is_never_overwritten(
    tmp_path: Path, postgres_url: str, table: str
) -> None:
    path, file = tmp_path / "a.db", tmp_path / "backup"
    create_old_database(path, NEWEST)
    await back_up(f"sqlite://{path}", file)
    connection = await asyncpg.connect(postgres_url)
    try:
        await connection.execute(f"CREATE TABLE {table} (version INTEGER)")
        await connection.execute(f"INSERT INTO {table} VALUES (7)")
        for overwrite in (False, True):
            with pytest.raises(ConfigError, match=f"a table '{table}' of another application; use an empty database"):
                await restore_database(file, postgres_url, overwrite=overwrite)
        assert await connection.fetchval(f"SELECT version FROM {table}") == 7
    finally:
        await connection.close()


async def test_postgres_database_in_use_is_refused(tmp_path: Path, postgres_url: str) -> None:
    path = tmp_path / "a.db"
    create_old_database(path, NEWEST)
    async with open_store(postgres_url, clock=SimulatedClock(seed=1)):
        with pytest.raises(ConfigError, match="Stop all servers"):
            await move_database(f"sqlite://{path}", postgres_url)
        with pytest.raises(ConfigError, match="Stop all servers"):
            await move_database(postgres_url, f"sqlite://{tmp_path / 'b.db'}")


async def test_backup_of_a_database_in_use_is_consistent(tmp_path: Path) -> None:
    url, file = f"sqlite://{tmp_path / 'a.db'}", tmp_path / "backup"
    async with open_store(url, clock=SimulatedClock(seed=1)) as store:
        await store.transact([CreateNamespace(NS, {})])
        async with read_database(url) as reader:
            await store.transact([CreateEntry(entry=make_entry("late"))])
            await write_backup(
                reader, file, created_ms=1, program_version="test", warehouse="file:///w", overwrite=False
            )
    assert read_sqlite_content(file)["entries"] == []
    assert len(read_sqlite_content(file)["namespaces"]) == 1


@pytest.mark.parametrize("content", [b"", b"no database, but a longer text than a header of SQLite has\n" * 3])
async def test_file_that_is_no_backup_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(SeamarkError):
        await restore_database(file, f"sqlite://{tmp_path / 'a.db'}")


@pytest.mark.slow
async def test_failed_copy_does_not_change_the_target(tmp_path: Path, postgres_url: str) -> None:
    path, target = tmp_path / "a.db", tmp_path / "b.db"
    create_old_database(path, NEWEST)
    create_old_database(target, 3)
    content_before = read_sqlite_content(target)
    for url in (f"sqlite://{target}", postgres_url):
        with suppress(ZeroDivisionError):
            async with read_database(f"sqlite://{path}") as reader, write_database(url, overwrite=True) as writer:
                await copy_database(reader, writer)
                raise ZeroDivisionError
    assert read_sqlite_content(target) == content_before
    with pytest.raises(ConfigError, match="contains no catalog"):
        async with read_database(postgres_url):
            pass
