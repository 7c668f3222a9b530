"""Opens the pointer store by its URL: `sqlite:///absolute/path` or `postgresql://user:password@host:port/database`.

Error messages never contain the URL, because it may contain a password.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import ConfigError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.store.sql.sqlite import open_sqlite
from seamark.metaserver.store.stale_reads import StaleReads

if TYPE_CHECKING:
    from seamark.metaserver.store.sql import postgres
else:
    postgres = LazyModule("seamark.metaserver.store.sql.postgres")

SQLITE_SCHEME = "sqlite"
_POSTGRES_SCHEMES = ("postgresql", "postgres")


@asynccontextmanager
async def open_store(
    url: str,
    *,
    clock: Clock,
    queue_limit: int = 1024,
    pool_min: int = 1,
    pool_max: int = 10,
    timeout_s: float = 30.0,
    keeps_reads: bool = False,
) -> AsyncIterator[PointerStore]:
    """Open the store that a URL names.

    Args:
        url: The URL of the database.
        clock: The clock.
        queue_limit: The maximum number of transactions that wait for SQLite's writer.
        pool_min: The minimum number of connections to PostgreSQL.
        pool_max: The maximum number of connections to PostgreSQL.
        timeout_s: The time limit of a statement of PostgreSQL, and of a wait for a connection.
        keeps_reads: Whether to keep results of reads from PostgreSQL, for requests that allow stale answers.

    Raises:
        ConfigError: The scheme of the URL is unknown, the database is unsuitable, or it refuses the credentials.
        RetryLater: The database does not answer.
    """
    if parse_scheme(url) == SQLITE_SCHEME:
        async with open_sqlite(parse_sqlite_path(url), clock=clock, queue_limit=queue_limit) as store:
            yield store
    else:
        async with postgres.open_postgres(
            url,
            clock=clock,
            pool_min=pool_min,
            pool_max=pool_max,
            timeout_s=timeout_s,
            stale_reads=StaleReads(clock) if keeps_reads else None,
        ) as store:
            yield store


def parse_scheme(url: str) -> str:
    """Return the scheme of a database URL.

    Raises:
        ConfigError: The scheme is unknown.
    """
    scheme = url.partition(":")[0].lower()
    if scheme in (SQLITE_SCHEME, *_POSTGRES_SCHEMES):
        return scheme
    url_description = f"scheme {scheme!r}" if "://" in url and scheme.isalnum() else "text without a scheme"
    raise ConfigError(
        f"The database URL is a {url_description}; use sqlite:///absolute/path or postgresql://user@host/database"
    )


def parse_sqlite_path(url: str) -> Path:
    """Return the path of the database file in a URL.

    Raises:
        ConfigError: The URL has a host, or no path.
    """
    parts = urlsplit(url)
    # Accept an absolute path after three or after four slashes.
    path = "/" + unquote(parts.path).lstrip("/")
    if parts.netloc or path == "/":
        raise ConfigError(
            "A SQLite database URL is sqlite:/// and an absolute path, without a host between the slashes"
        )
    return Path(path)
