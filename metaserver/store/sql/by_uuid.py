"""Rows that belong to the UUID of a table, and not to one of its names.

They can be added only while the table has a live name. They are removed together with its last live or dropped name.
The flushed offsets remain while the table is retained, because it can be registered again, and its log still has rows.
"""

from __future__ import annotations

from seamark.formats.runtime.errors import NoSuchTable
from seamark.metaserver.store.model import STREAM_GATE, DroppedEntry
from seamark.metaserver.store.operations import PRIORITY, REWRITE
from seamark.metaserver.store.sql.rows import DROPPED, DROPPED_COLUMN_COUNT, encode_dropped
from seamark.metaserver.store.sql.statement import Steps, StoreStatement, format_placeholders

_TABLES_OF_UUID = (
    "index_files",
    "index_versions",
    "producers",
    "column_reads",
    "removal_flushes",
    "query_shapes",
    "applied_advice",
)
_TABLES_OF_NAMES = ("entries", "dropped")
UNNAMED = " AND ".join(f"NOT EXISTS (SELECT 1 FROM {table} WHERE uuid = $1)" for table in _TABLES_OF_NAMES)  # noqa: S608
"""An SQL condition: no live or dropped name refers to the UUID in the first parameter."""
CLAIMS_LOCK = StoreStatement("SELECT turn FROM claim_turns", lock="UPDATE", only_locks=True)
"""Locks the only row of `claim_turns`, so that transactions that compare locations or names run one at a time."""


def hold_table(uuid: str) -> Steps[None]:
    """Lock the table, so that its last name cannot be removed until this transaction ends.

    Raises:
        NoSuchTable: No name refers to the table.
    """
    # A rename deletes and inserts the row. If the first statement waited for a rename, it finds no row, but the second
    # statement finds the new row.
    for _ in range(2):
        rows = yield StoreStatement("SELECT 1 FROM entries WHERE uuid = $1", (uuid,), lock="KEY SHARE")
        if rows:
            return
    raise NoSuchTable(f"No table has the uuid {uuid}")


def forget_unnamed(dropped_entry: DroppedEntry, *, purged: bool = False) -> Steps[None]:
    """Delete the rows of a table after a drop, unless another name refers to the table.

    The locations of the table stay claimed: no other entry may use them. If the table is purged, they stay claimed
    until its files are deleted, and `ReleaseLocations` runs. Otherwise they stay claimed while the table has files
    (`retain_entry`).
    """
    uuid = dropped_entry.entry.uuid
    if not purged:
        yield from retain_entry(dropped_entry)
    # The sums of the query history have no UUID. They have the number of a shape: statements that differ only in the
    # compared values.
    yield StoreStatement(
        f"DELETE FROM query_sums WHERE number IN (SELECT number FROM query_shapes WHERE uuid = $1) AND {UNNAMED}",  # noqa: S608
        (uuid,),
    )
    for table in _TABLES_OF_UUID:
        yield StoreStatement(f"DELETE FROM {table} WHERE uuid = $1 AND {UNNAMED}", (uuid,))  # noqa: S608
    yield from forget_offsets(uuid)
    for lease in (f"{REWRITE}{uuid}", f"{PRIORITY}{uuid}", f"{STREAM_GATE}{uuid}"):
        yield StoreStatement(f"DELETE FROM leases WHERE name = $2 AND {UNNAMED}", (uuid, lease))  # noqa: S608


def forget_offsets(uuid: str) -> Steps[None]:
    """Delete the flushed offsets of a table that has no name and is not retained."""
    yield StoreStatement(
        f"DELETE FROM stream_offsets WHERE uuid = $1 AND {UNNAMED} "  # noqa: S608
        "AND NOT EXISTS (SELECT 1 FROM retained WHERE uuid = $1)",
        (uuid,),
    )


def retain_entry(dropped_entry: DroppedEntry) -> Steps[None]:
    """Keep the claims of an entry without a name, so that only new entries of its last namespace may use its location.

    A claim is the record that files of an entry are in a location. The claims end only when no files remain. Otherwise,
    a table of another namespace could get the location, and the remaining files in it.
    """
    uuid = dropped_entry.entry.uuid
    # A transaction that registers the entry again waits for this lock.
    yield CLAIMS_LOCK
    # Delete the allowed locations (`shared` is 2), because they are not claimed.
    yield StoreStatement(f"DELETE FROM claims WHERE uuid = $1 AND shared = 2 AND {UNNAMED}", (uuid,))  # noqa: S608
    rows = yield StoreStatement(f"SELECT 1 FROM claims WHERE uuid = $1 AND {UNNAMED} LIMIT 1", (uuid,))  # noqa: S608
    if not rows:
        return
    yield StoreStatement("DELETE FROM retained WHERE uuid = $1", (uuid,))
    yield StoreStatement(
        f"INSERT INTO retained ({DROPPED}, checked_ms) VALUES ({format_placeholders(DROPPED_COLUMN_COUNT + 1)})",  # noqa: S608
        (*encode_dropped(dropped_entry, dropped_entry.entry), 0),
    )
