"""Rows that belong to a table by its UUID, under any name: they need a live name when they are added, and are removed
with the last name, live or dropped.
"""

from __future__ import annotations

from seamark.metaserver.errors import NoSuchTable
from seamark.metaserver.store.operations import PRIORITY, REWRITE
from seamark.metaserver.store.sql.statement import Statement, Steps

_KEPT = ("index_files", "index_versions", "producers", "column_reads")
_NAMED = ("entries", "dropped")
UNNAMED = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE uuid = $1)" for table in _NAMED)  # noqa: S608
"""No name refers to the table with the UUID in the first parameter."""


def hold_table(uuid: str) -> Steps[None]:
    """Keeps the table's last name from being removed until this transaction ends."""
    # A rename deletes and inserts the row: a statement that has waited for it finds it the second time.
    for _ in range(2):
        rows = yield Statement("SELECT 1 FROM entries WHERE uuid = $1", (uuid,), lock="KEY SHARE")
        if rows:
            return
    raise NoSuchTable(f"No table has the uuid {uuid}")


def forget_unnamed(uuid: str, *, purged: bool = False) -> Steps[None]:
    """Removes the rows of the table if no name refers to it. `purged`: its files are not deleted yet, so its locations
    stay claimed (`ReleaseLocations`)."""
    for table in (*_KEPT, *(() if purged else ("claims",))):
        yield Statement(f"DELETE FROM {table} WHERE uuid = $1 AND {UNNAMED}", (uuid,))  # noqa: S608
    for lease in (f"{REWRITE}{uuid}", f"{PRIORITY}{uuid}"):
        yield Statement(f"DELETE FROM leases WHERE name = $2 AND {UNNAMED}", (uuid, lease))  # noqa: S608
