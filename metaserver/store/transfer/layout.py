"""The tables of each schema version, and their columns, as the migrations create them.

SQLite and PostgreSQL have the same tables with the same columns. The layout is derived from the migrations, so this
module needs no change for a new migration.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import NamedTuple

from seamark.metaserver.store.sql.migrations import create_schema
from seamark.metaserver.store.sql.sqlite import run_steps_in_sqlite
from seamark.metaserver.store.sql.statement import SQLITE

VERSION_TABLE = "schema_version"
CONTENT_TABLES = ("namespaces", "entries", "dropped", "instants", "tokens", "grants")
"""The tables that are all empty if the database contains no catalog. Every schema version has them."""


class TableLayout(NamedTuple):
    """A table with its columns.

    Attributes:
        key: The columns by which rows are sorted: those of the primary key, or all columns without a primary key.
    """

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def select(self) -> str:
        return f"SELECT {', '.join(self.columns)} FROM {self.name} ORDER BY {', '.join(self.key)}"  # noqa: S608


def read_layout(version: int) -> tuple[TableLayout, ...]:
    """Return the tables of a schema version, except the table that contains the version."""
    with closing(sqlite3.connect(":memory:")) as connection:
        run_steps_in_sqlite(connection, create_schema(version, SQLITE))
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return tuple(_describe_table(connection, name) for name in sorted(names) if name != VERSION_TABLE)


def _describe_table(connection: sqlite3.Connection, name: str) -> TableLayout:
    rows = connection.execute(f"PRAGMA table_info({name})").fetchall()
    columns = tuple(column for _, column, *_ in rows)
    # The last value of a row is the position of the column in the primary key, from 1, or 0 for other columns.
    key = tuple(column for _, column, *_, key_position in sorted(rows, key=lambda row: row[-1]) if key_position)
    return TableLayout(name, columns, key or columns)
