"""Readers and writers of a whole PostgreSQL database.

The time limit of a statement is very long, because a statement may read or write a whole table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg

from seamark.formats.runtime.errors import ConfigError, RetryLater
from seamark.metaserver.store.sql.migrations import MIGRATIONS, apply_migrations, create_schema, renew_epoch
from seamark.metaserver.store.sql.postgres import (
    CONNECT_TIMEOUT_S,
    LOST,
    MIGRATION_LOCK,
    create_search_path_schema,
    describe_database,
    explain_lost_connection,
    open_pool,
    run_steps_in_postgres,
)
from seamark.metaserver.store.sql.statement import APPLICATION_NAME, POSTGRES, Row
from seamark.metaserver.store.transfer.database import BATCH_ROWS, check_version, make_not_empty_error
from seamark.metaserver.store.transfer.layout import CONTENT_TABLES, VERSION_TABLE, TableLayout, read_layout

_STATEMENT_TIMEOUT_S = 24 * 3600.0
_OWN_TABLES = ("timeline_epoch", VERSION_TABLE)
"""The tables of a catalog in PostgreSQL that `read_layout` leaves out."""


class PostgresReader:
    """An implementation of `DatabaseReader` on a connection with a transaction that sees one consistent state."""

    dialect = POSTGRES

    def __init__(self, connection: Any, version: int) -> None:
        self._connection = connection
        self.version = version

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        return _read_batches(self._connection, table)


class PostgresWriter:
    """An implementation of `DatabaseWriter` on a connection with an open transaction."""

    dialect = POSTGRES

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def recreate_schema(self, version: int) -> None:
        await self._connection.execute(f"DROP TABLE IF EXISTS {', '.join(_list_names())}")
        await self._connection.execute("DROP SEQUENCE IF EXISTS instant_sequence")
        await run_steps_in_postgres(self._connection, create_schema(version, POSTGRES))
        # The schema inserts the rows of a new database. Delete them, because the caller inserts the rows of the source.
        for table in read_layout(version):
            await self._connection.execute(f"DELETE FROM {table.name}")  # noqa: S608

    async def insert(self, table: TableLayout, rows: Sequence[Row]) -> None:
        await self._connection.copy_records_to_table(table.name, records=rows, columns=table.columns)

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        return _read_batches(self._connection, table)

    async def migrate(self) -> None:
        await run_steps_in_postgres(self._connection, apply_migrations(POSTGRES))
        # The copied positions of the timeline may be ahead of this cluster, and new positions must sort after them.
        await run_steps_in_postgres(self._connection, renew_epoch())


def _list_names() -> tuple[str, ...]:
    """Return the names of the tables in which PostgreSQL stores a catalog."""
    return (*_OWN_TABLES, *(table.name for table in read_layout(len(MIGRATIONS))))


async def _read_batches(connection: Any, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
    # Declare the cursor in SQL, because a cursor of asyncpg would stay open until the transaction ends, and prevent
    # changes of the table. Give each table its own cursor name, because asyncpg caches the columns of each statement
    # text.
    cursor = f"rows_of_{table.name}"
    await connection.execute(f"DECLARE {cursor} NO SCROLL CURSOR FOR {table.select}")
    while batch := await connection.fetch(f"FETCH {BATCH_ROWS} FROM {cursor}"):
        yield [tuple(row) for row in batch]
    await connection.execute(f"CLOSE {cursor}")


@asynccontextmanager
async def read_postgres(url: str, *, is_writer_excluded: bool = False) -> AsyncIterator[PostgresReader]:
    """Read one consistent state of a database, while servers may write to it.

    Args:
        is_writer_excluded: Whether to refuse a database to which a server is connected, because it could write.

    Raises:
        ConfigError: The database is unsuitable, or a server is connected.
        RetryLater: The database does not answer.
    """
    subject = describe_database(url)
    async with _open_transaction(url, subject, isolation="repeatable_read", readonly=True) as connection:
        if is_writer_excluded:
            await _check_unused(connection, subject)
        if not await _table_exists(connection, VERSION_TABLE):
            raise ConfigError(f"{subject} contains no catalog of Seamark; name another database")
        version = await connection.fetchval(f"SELECT version FROM {VERSION_TABLE}")  # noqa: S608
        yield PostgresReader(connection, check_version(version, subject))


@asynccontextmanager
async def write_postgres(url: str, *, overwrite: bool) -> AsyncIterator[PostgresWriter]:
    """Replace the content of a database in one transaction.

    If the process is killed before the transaction commits, the database keeps its previous content.

    Raises:
        ConfigError: The database contains a catalog and `overwrite` is false, it contains tables of another
            application, or a server is connected.
        RetryLater: The database does not answer.
    """
    subject = describe_database(url)
    async with _open_transaction(url, subject) as connection:
        await connection.execute("SELECT pg_advisory_xact_lock($1)", MIGRATION_LOCK)
        await create_search_path_schema(connection, url)
        await _check_unused(connection, subject)
        if connection.get_settings().server_encoding != "UTF8":
            raise ConfigError(f"{subject}: the database's encoding is not UTF8; create it with ENCODING 'UTF8'")
        await _check_no_other_application(connection, subject)
        for name in () if overwrite else CONTENT_TABLES:
            if await _table_exists(connection, name) and await connection.fetchval(
                f"SELECT EXISTS (SELECT 1 FROM {name})"  # noqa: S608
            ):
                raise make_not_empty_error(subject)
        yield PostgresWriter(connection)


@asynccontextmanager
async def _open_transaction(url: str, subject: str, **options: Any) -> AsyncIterator[Any]:
    """Open a connection with a transaction, which commits when the context ends without an error."""
    with _explain_errors(subject):
        pool = await open_pool(url, subject, 1, 1, _STATEMENT_TIMEOUT_S)
        try:
            async with pool.acquire() as connection, connection.transaction(**options):
                yield connection
        finally:
            # Wait until the session has ended. Otherwise a later copy from this host could regard it as the session
            # of a running server.
            try:
                await asyncio.wait_for(pool.close(), CONNECT_TIMEOUT_S)
            except TimeoutError:
                pool.terminate()


async def _table_exists(connection: Any, name: str) -> bool:
    return bool(await connection.fetchval("SELECT to_regclass($1) IS NOT NULL", name))


async def _check_no_other_application(connection: Any, subject: str) -> None:
    """Check that no table of another application has the name of a catalog's table, because it would be dropped.

    Raises:
        ConfigError: Another application has a table with such a name.
    """
    names = [name for name in _list_names() if await _table_exists(connection, name)]
    if names and not {VERSION_TABLE, *CONTENT_TABLES} <= set(names):
        raise ConfigError(
            f"{subject} contains no catalog of Seamark, but has a table {min(names)!r} of another application; use an "
            "empty database"
        )


async def _check_unused(connection: Any, subject: str) -> None:
    """Check that no server is connected to the database.

    Raises:
        ConfigError: A server is connected.
    """
    sessions = await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1 "
        "AND pid <> pg_backend_pid()",
        APPLICATION_NAME,
    )
    if sessions:
        raise ConfigError(f"{subject} is in use: servers have {sessions} connections to it. Stop all servers first")


@contextmanager
def _explain_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except asyncpg.PostgresError as error:
        raise ConfigError(f"{subject} cannot be used: {error}") from None
    except LOST as error:
        raise RetryLater(f"{subject} does not answer ({explain_lost_connection(error)})") from None
