"""Readers and writers of a whole SQLite database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.store.sql.migrations import apply_migrations, create_schema
from seamark.metaserver.store.sql.sqlite import (
    BUSY_TIMEOUT_S,
    create_private_database,
    open_sqlite_connection,
    run_steps_in_sqlite,
    switch_to_wal,
)
from seamark.metaserver.store.sql.statement import SQLITE, Row
from seamark.metaserver.store.transfer.database import BATCH_ROWS, check_version, make_not_empty_error
from seamark.metaserver.store.transfer.layout import CONTENT_TABLES, VERSION_TABLE, TableLayout, read_layout


class SqliteReader:
    """An implementation of `DatabaseReader` on a connection with an open transaction."""

    dialect = SQLITE

    def __init__(self, connection: sqlite3.Connection, version: int) -> None:
        self.connection = connection
        self.version = version

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        return _read_batches(self.connection, table)


class SqliteWriter:
    """An implementation of `DatabaseWriter` on a connection with an open transaction."""

    dialect = SQLITE

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    async def recreate_schema(self, version: int) -> None:
        """Drop all tables of the database, and create the empty tables of this version of the schema."""
        for name in _list_tables(self.connection):
            self.connection.execute(f'DROP TABLE "{name}"')
        run_steps_in_sqlite(self.connection, create_schema(version, SQLITE))
        # The schema inserts the rows of a new database. Delete them, because the caller inserts the rows of the source.
        for table in read_layout(version):
            self.connection.execute(f"DELETE FROM {table.name}")  # noqa: S608

    async def insert(self, table: TableLayout, rows: Sequence[Row]) -> None:
        columns, values = ", ".join(table.columns), ", ".join("?" * len(table.columns))
        self.connection.executemany(f"INSERT INTO {table.name} ({columns}) VALUES ({values})", rows)  # noqa: S608

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        return _read_batches(self.connection, table)

    async def migrate(self) -> None:
        run_steps_in_sqlite(self.connection, apply_migrations(SQLITE))


async def _read_batches(connection: sqlite3.Connection, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
    cursor = connection.execute(table.select)
    while batch := cursor.fetchmany(BATCH_ROWS):
        yield batch


@asynccontextmanager
async def read_sqlite(path: Path, *, is_writer_excluded: bool = False) -> AsyncIterator[SqliteReader]:
    """Read one consistent state of a database file, while servers may write to it.

    Args:
        is_writer_excluded: Whether to lock the database, so that no server can write while the context is active.

    Raises:
        ConfigError: The file is missing or cannot be read, is not a database of Seamark, or has a schema version that
            this program does not support.
    """
    _check_exists(path)
    with _explain_errors(path):
        connection = open_sqlite_connection(path, read_only=not is_writer_excluded, busy_timeout_s=BUSY_TIMEOUT_S)
        try:
            connection.execute("BEGIN IMMEDIATE" if is_writer_excluded else "BEGIN")
            tables = _list_tables(connection)
            if VERSION_TABLE not in tables:
                raise ConfigError(f"{path} is not a database of Seamark; name another file")
            version = connection.execute(f"SELECT version FROM {VERSION_TABLE}").fetchone()[0]  # noqa: S608
            yield SqliteReader(connection, check_version(version, f"The database {path}"))
        finally:
            connection.close()


@asynccontextmanager
async def write_sqlite(path: Path, *, overwrite: bool, is_log_used: bool = True) -> AsyncIterator[SqliteWriter]:
    """Replace the content of a database file in one transaction.

    If the process is killed before the transaction commits, the database keeps its previous content.

    Args:
        overwrite: Whether to replace an existing catalog.
        is_log_used: Whether to use a write-ahead log, as a server does. Otherwise the database is a single file.

    Raises:
        ConfigError: The database contains a catalog, or belongs to another program.
    """
    with _explain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        create_private_database(path)
        connection = open_sqlite_connection(path, read_only=False, busy_timeout_s=BUSY_TIMEOUT_S)
        try:
            if is_log_used:
                switch_to_wal(connection, path)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN EXCLUSIVE")
            _check_replaceable(connection, path, overwrite=overwrite)
            yield SqliteWriter(connection)
            connection.execute("COMMIT")
        finally:
            # Closing the connection also rolls back an open transaction.
            connection.close()


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"There is no database {path}; name another file")


def _check_replaceable(connection: sqlite3.Connection, path: Path, *, overwrite: bool) -> None:
    tables = _list_tables(connection)
    if tables and VERSION_TABLE not in tables:
        raise ConfigError(f"The database {path} belongs to another application; name another file")
    if not overwrite:
        for name in tables & set(CONTENT_TABLES):
            if connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone():  # noqa: S608
                raise make_not_empty_error(f"The database {path}")


def _list_tables(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    return {row[0] for row in rows}


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise ConfigError(f"The database {path} cannot be used: {error}") from None
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise ConfigError(f"The database {path} cannot be used: {reason}") from None
