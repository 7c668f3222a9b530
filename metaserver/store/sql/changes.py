"""Detects commits to the database since the last check, for less than the cost of a read.

SQLite keeps a number per connection that changes when another connection, of any process, has committed (`PRAGMA
data_version`, https://sqlite.org/pragma.html#pragma_data_version). While the number is unchanged, a cached read equals
a new read at any isolation level. The number is read for each request.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BUSY_TIMEOUT_S = 0.1
"""Readers wait only while another process recovers the log."""


class CommitCounter:
    """Reports whether any connection has committed to a SQLite database.

    It owns a connection that commits nothing, and belongs to one event loop.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._cursor = self._connection.cursor()

    def read_number(self) -> int | None:
        """Return a number that changes when any connection has committed, or None if SQLite does not return it."""
        try:
            (number,) = self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(number)

    def close(self) -> None:
        self._connection.close()


def watch(url: str) -> CommitCounter | None:
    """Return a counter for the database of `open_store(url)`, or None for PostgreSQL, which has no such number."""
    if not url.lower().startswith("sqlite:"):
        return None
    return CommitCounter(Path("/" + unquote(urlsplit(url).path).lstrip("/")))
