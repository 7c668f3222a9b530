"""Opens a whole database by its URL. `metaserver/store/open.py` accepts the same URLs."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.store.open import SQLITE_SCHEME, parse_scheme, parse_sqlite_path
from seamark.metaserver.store.transfer.database import DatabaseReader, DatabaseWriter
from seamark.metaserver.store.transfer.sqlite_database import read_sqlite, write_sqlite

if TYPE_CHECKING:
    from seamark.metaserver.store.transfer import postgres_database
else:
    postgres_database = LazyModule("seamark.metaserver.store.transfer.postgres_database")


def read_database(url: str, *, is_writer_excluded: bool = False) -> AbstractAsyncContextManager[DatabaseReader]:
    """Return a context that reads one consistent state of the database.

    Args:
        is_writer_excluded: Whether to prevent servers from writing to the database.

    Raises:
        ConfigError: The scheme of the URL is unknown, or the URL names no database of Seamark that can be read.
    """
    if parse_scheme(url) == SQLITE_SCHEME:
        return read_sqlite(parse_sqlite_path(url), is_writer_excluded=is_writer_excluded)
    return postgres_database.read_postgres(url, is_writer_excluded=is_writer_excluded)


def write_database(url: str, *, overwrite: bool) -> AbstractAsyncContextManager[DatabaseWriter]:
    """Return a context that replaces the content of the database in one transaction.

    Raises:
        ConfigError: The scheme of the URL is unknown, or the database contains a catalog and `overwrite` is false.
    """
    if parse_scheme(url) == SQLITE_SCHEME:
        return write_sqlite(parse_sqlite_path(url), overwrite=overwrite)
    return postgres_database.write_postgres(url, overwrite=overwrite)
