"""Whether anything was committed to the database since the last look, for less than reading it takes.

SQLite keeps a number per connection that changes whenever another connection, of this process or any other, has
committed (`PRAGMA data_version`, https://sqlite.org/pragma.html#pragma_data_version). So what was read while the number
stood still is what would be read now, also by the strictest reader: the number is asked for each time.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import unquote, urlsplit

_BUSY_TIMEOUT_S = 0.1
"""Readers wait only while another process recovers the log."""


class Changes:
    """Belongs to one event loop. Holds a connection of its own, which commits nothing."""

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._cursor = self._connection.cursor()

    def number(self) -> int | None:
        """Another one than the last time if anybody has committed since; None where the database does not say."""
        try:
            (number,) = self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.Error:
            return None
        return int(number)

    def close(self) -> None:
        self._connection.close()


def watch(url: str) -> Changes | None:
    """For the database that `open_store` opened under `url`; None where it has no such number: PostgreSQL."""
    if not url.lower().startswith("sqlite:"):
        return None
    return Changes(Path("/" + unquote(urlsplit(url).path).lstrip("/")))
