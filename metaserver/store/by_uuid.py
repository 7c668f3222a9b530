"""What belongs to a table by its UUID, whatever its names: it comes while a live name leads there, and goes with the
last one, live or dropped.
"""

from __future__ import annotations

from metaserver.errors import NoSuchTable
from metaserver.store.statement import Statement, Steps

_KEPT = ("index_files", "index_versions", "producers")
_NAMED = ("entries", "dropped")
UNNAMED = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE uuid = $1)" for table in _NAMED)  # noqa: S608
"""No name leads to the table with the UUID in the first parameter."""


def hold_table(uuid: str) -> Steps[None]:
    """Keeps its last name from going until this transaction ends, so that nothing is left without a table."""
    # A rename takes the row out and puts it in again: who waited for it finds it at the second look.
    for _ in range(2):
        rows = yield Statement("SELECT 1 FROM entries WHERE uuid = $1", (uuid,), lock="KEY SHARE")
        if rows:
            return
    raise NoSuchTable(f"No table has the uuid {uuid}")


def forget_unnamed(uuid: str, *, purged: bool = False) -> Steps[None]:
    """Removes what is kept for the table if no name leads to it any more. `purged`: its files are yet to be deleted, so
    its locations stay claimed (`ReleaseLocations`)."""
    for table in (*_KEPT, *(() if purged else ("claims",))):
        yield Statement(f"DELETE FROM {table} WHERE uuid = $1 AND {UNNAMED}", (uuid,))  # noqa: S608
