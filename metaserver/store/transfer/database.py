"""The port to a whole database: a reader of one consistent state, and a writer in one transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.store.sql.migrations import MIGRATIONS
from seamark.metaserver.store.sql.statement import Row, SqlDialect
from seamark.metaserver.store.transfer.layout import TableLayout

BATCH_ROWS = 2000
"""The number of rows that a copy reads into memory at a time."""


class DatabaseReader(Protocol):
    """Reads one consistent state of a database, while other processes may write to it.

    Attributes:
        dialect: The dialect of the database.
        version: The version of its schema.
    """

    dialect: SqlDialect
    version: int

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        """Yield all rows of a table in batches, in the order of its key."""


class DatabaseWriter(Protocol):
    """Replaces the content of a database in one transaction, which commits when its context ends without an error."""

    dialect: SqlDialect

    async def recreate_schema(self, version: int) -> None:
        """Drop all tables of the database, and create the empty tables of this version of the schema."""

    async def insert(self, table: TableLayout, rows: Sequence[Row]) -> None: ...

    def read_rows(self, table: TableLayout) -> AsyncIterator[Sequence[Row]]:
        """Yield all rows of a table in batches, in the order of its key."""

    async def migrate(self) -> None:
        """Apply the migrations that the schema lacks."""


def check_version(version: int, subject: str) -> int:
    """Check that this program can read a schema version, and return the version.

    Raises:
        ConfigError: The version is unknown to this program.
    """
    if not 1 <= version <= len(MIGRATIONS):
        raise ConfigError(
            f"{subject} has schema version {version}, this program supports 1 to {len(MIGRATIONS)}; use the version of "
            "Seamark that wrote it, or a newer one"
        )
    return version


def make_not_empty_error(subject: str) -> ConfigError:
    return ConfigError(f"{subject} contains a catalog; use an empty database, or add --overwrite to replace everything")
