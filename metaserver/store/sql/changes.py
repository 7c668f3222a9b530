"""Detects commits to the database since the last check, in less time than a read takes.

SQLite keeps a number for each connection, which changes when another connection of any process has committed (`PRAGMA
data_version`, https://sqlite.org/pragma.html#pragma_data_version). The number is read for each request. While it does
not change, the result of an earlier read is still correct.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BUSY_TIMEOUT_S = 0.1
"""The time limit of a wait, which is necessary only while another process recovers the log."""


class CommitCounter:
    """Detects whether any connection has committed to a SQLite database.

    An instance has its own connection, which commits nothing, and belongs to one event loop.
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
        """Return a number that changes when any connection commits, or None if SQLite cannot return it."""
        try:
            (number,) = self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(number)

    def close(self) -> None:
        self._connection.close()


def open_commit_counter(url: str) -> CommitCounter | None:
    """Return a counter for the database with this URL, or None for PostgreSQL, which has no number of commits."""
    if not url.lower().startswith("sqlite:"):
        return None
    return CommitCounter(Path("/" + unquote(urlsplit(url).path).lstrip("/")))
