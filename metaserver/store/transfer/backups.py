"""Writes, reads and restores backups. A backup is a SQLite database with the tables of the source, and a description.

Backups of SQLite and of PostgreSQL have the same format, so each can be restored to either database. All values are
stored as they were read. Positions of the timeline are replaced only when the backup is restored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import ConfigError, Corrupt
from seamark.metaserver.store.transfer.copying import TableDigest, copy_database
from seamark.metaserver.store.transfer.database import DatabaseReader, DatabaseWriter
from seamark.metaserver.store.transfer.sqlite_database import read_sqlite, write_sqlite

BACKUP_FORMAT_VERSION = 1
_INFO_TABLE = "backup_info"


class BackupInfo(msgspec.Struct, frozen=True, rename="kebab"):
    """The description of a backup.

    Attributes:
        format: The version of the format of the backup.
        created_ms: The time at which the backup began.
        program: The version of Seamark that wrote the backup.
        database: The kind of the source: SQLite or PostgreSQL.
        schema_version: The version of the schema of the source.
        warehouse: The warehouse of the server whose database was copied.
        tables: The digest of each table.
    """

    format: int
    created_ms: int
    program: str
    database: str
    schema_version: int
    warehouse: str
    tables: dict[str, TableDigest]

    def count_rows(self) -> int:
        return sum(table.rows for table in self.tables.values())


async def write_backup(
    reader: DatabaseReader, path: Path, *, created_ms: int, program_version: str, warehouse: str, overwrite: bool
) -> BackupInfo:
    """Write all rows of a database to a new file, which gets its name after it is complete and synced.

    Args:
        reader: The database to copy.
        path: The new file.
        created_ms: The time at which the backup begins.
        program_version: The version of Seamark that writes the backup.
        warehouse: The warehouse of the server that uses the database.
        overwrite: Whether to replace an existing file.

    Raises:
        ConfigError: The file exists, or cannot be written.
        Corrupt: The file differs from the rows that were read.
    """
    _check_free(path, overwrite=overwrite)
    partial = path.with_name(f".{path.name}.partial")
    _remove_partial(partial)
    try:
        # Without a write-ahead log, the backup is a single file.
        async with write_sqlite(partial, overwrite=True, is_log_used=False) as writer:
            digests = await copy_database(reader, writer, is_for_server=False)
            info = BackupInfo(
                BACKUP_FORMAT_VERSION,
                created_ms,
                program_version,
                reader.dialect.name,
                reader.version,
                warehouse,
                digests,
            )
            writer.connection.execute(f"CREATE TABLE {_INFO_TABLE} (info TEXT NOT NULL)")
            text = msgspec.json.encode(info).decode()
            writer.connection.execute(f"INSERT INTO {_INFO_TABLE} (info) VALUES (?)", (text,))  # noqa: S608
        partial.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise ConfigError(f"The file {path} cannot be written: {error.strerror}") from None
    finally:
        _remove_partial(partial)
    return info


@asynccontextmanager
async def read_backup(path: Path) -> AsyncIterator[tuple[BackupInfo, DatabaseReader]]:
    """Open a backup.

    Raises:
        ConfigError: The file is missing, is not a backup, or has another format than this version of Seamark.
        Corrupt: The description of the backup is damaged, or states another schema version than the backup has.
    """
    async with read_sqlite(path) as reader:
        info_tables = reader.connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (_INFO_TABLE,)).fetchall()
        if not info_tables:
            raise ConfigError(f"{path} is not a backup; name a file that seamark backup wrote")
        rows = reader.connection.execute(f"SELECT info FROM {_INFO_TABLE}").fetchall()  # noqa: S608
        try:
            info = convert_json(rows[0][0], BackupInfo)
        except (IndexError, msgspec.MsgspecError) as error:
            raise Corrupt(f"The description of the backup {path} is damaged: {error}; use another backup") from None
        if info.format != BACKUP_FORMAT_VERSION:
            raise ConfigError(
                f"The backup {path} has format {info.format}, this program reads format {BACKUP_FORMAT_VERSION}; "
                "use a newer program"
            )
        if info.schema_version != reader.version:
            raise Corrupt(f"The backup {path} is damaged: its schema version differs from its description")
        yield info, reader


async def restore_backup(info: BackupInfo, reader: DatabaseReader, writer: DatabaseWriter) -> None:
    """Copy a backup to a database, and migrate the database. The caller commits the transaction.

    Raises:
        Corrupt: The rows of the backup do not match the checksums in its description.
    """
    await copy_database(reader, writer, expected=info.tables)


def _check_free(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ConfigError(f"The file {path} exists; name another file, or add --overwrite to replace it")


def _remove_partial(partial: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    with contextlib.suppress(FileNotFoundError):
        partial.with_name(f"{partial.name}-journal").unlink()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
