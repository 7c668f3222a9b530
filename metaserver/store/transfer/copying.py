"""Copies the rows of one database to another, and compares the written rows with the rows of the source.

The databases have different positions of the timeline: a position of PostgreSQL contains a transaction id, and a
position of SQLite is a number. Positions are compared as texts. PostgreSQL can continue above any position
(`renew_epoch`), but SQLite only above a number. So a copy to SQLite gives the instants new numbers, above every
position that a reader may have. A reader that continues may see some instants twice, but misses no instant.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from seamark.formats.runtime.errors import ConfigError, Corrupt
from seamark.metaserver.store.sql.statement import SQLITE, Row
from seamark.metaserver.store.transfer.database import DatabaseReader, DatabaseWriter
from seamark.metaserver.store.transfer.layout import TableLayout, read_layout

_INSTANTS = ("instants", "instants_archive")
_POSITIONED = (*_INSTANTS, "cursors")
_POSITION = "position"
_SQLITE_DIGITS = 20
_PREFIX_DIGITS = 4
_NUMBERS_PER_PREFIX = 10 ** (_SQLITE_DIGITS - _PREFIX_DIGITS)
_PREFIX_MAX = 921
"""The maximum of the first four digits of a position, so that its twenty digits are a number of 64 bits."""


class TableDigest(msgspec.Struct, frozen=True):
    """The number of rows of a table, and the SHA-256 of all rows in the order of the key."""

    rows: int
    sha256: str


class _Digester:
    def __init__(self) -> None:
        self._rows = 0
        self._hash = hashlib.sha256()

    def add(self, rows: Sequence[Row]) -> None:
        self._rows += len(rows)
        self._hash.update(b"".join(msgspec.msgpack.encode(tuple(row)) for row in rows))

    def finish(self) -> TableDigest:
        return TableDigest(self._rows, self._hash.hexdigest())


async def digest_rows(batches: AsyncIterator[Sequence[Row]]) -> TableDigest:
    digester = _Digester()
    async for rows in batches:
        digester.add(rows)
    return digester.finish()


async def copy_database(
    reader: DatabaseReader,
    writer: DatabaseWriter,
    *,
    expected: Mapping[str, TableDigest] | None = None,
    is_for_server: bool = True,
) -> dict[str, TableDigest]:
    """Copy all rows, compare the copy with the source, and return the digest of each table.

    Args:
        reader: The source.
        writer: The target. The caller commits it.
        expected: The digests that the tables of the source must have, or None if they are unknown.
        is_for_server: Whether a server will use the target. If it is false, the target has exactly the rows of the
            source. If it is true, the schema of the target is migrated, and in a SQLite target, numbers replace the
            positions of events in the timeline. Positions of PostgreSQL are not numbers, but SQLite continues the
            timeline with the next number.

    Raises:
        Corrupt: The source does not have the expected digests, or the copy differs from the source.
    """
    layout = read_layout(reader.version)
    positions = await _read_positions(reader, layout) if is_for_server and writer.dialect is SQLITE else None
    await writer.recreate_schema(reader.version)
    digests: dict[str, TableDigest] = {}
    for table in layout:
        read_digester, write_digester = _Digester(), _Digester()
        async for rows in reader.read_rows(table):
            read_digester.add(rows)
            rows = rows if positions is None else positions.replace_in(table, rows)
            write_digester.add(rows)
            await writer.insert(table, rows)
        digests[table.name] = read_digester.finish()
        if expected is not None and expected.get(table.name) != digests[table.name]:
            raise Corrupt(f"The table {table.name} of the backup does not match its checksum; use another backup")
        if await digest_rows(writer.read_rows(table)) != write_digester.finish():
            raise Corrupt(f"The copied table {table.name} differs from its source; nothing was changed")
    if is_for_server:
        await writer.migrate()
    return digests


class _PositionNumbers:
    """The numbers that replace positions of PostgreSQL in SQLite.

    Args:
        positions: The sorted positions of all instants.

    Raises:
        ConfigError: The positions are too high for numbers.
    """

    def __init__(self, positions: Sequence[str]) -> None:
        self._positions = positions
        # Clients may continue reading the timeline from an old position, after which every new position must sort. So
        # the first digits of SQLite's numbers are greater than those of the last old position.
        last_prefix = positions[-1][:_PREFIX_DIGITS]
        higher_prefixes = (prefix for prefix in range(_PREFIX_MAX + 1) if f"{prefix:0{_PREFIX_DIGITS}d}" > last_prefix)
        prefix = next(higher_prefixes, None)
        if prefix is None:
            raise ConfigError(f"The position {positions[-1]} of the timeline is too high for SQLite")
        self._first = prefix * _NUMBERS_PER_PREFIX

    def replace_in(self, table: TableLayout, rows: Sequence[Row]) -> Sequence[Row]:
        if table.name not in _POSITIONED:
            return rows
        column_index = table.columns.index(_POSITION)
        return [(*row[:column_index], self._format_number(row[column_index]), *row[column_index + 1 :]) for row in rows]

    def _format_number(self, position: str) -> str:
        """Return the number that replaces a position, as text of 20 digits.

        The position of a reader (cursor) may be between two instants. It gets the number of the instant before it.
        """
        return f"{self._first + bisect_right(self._positions, position):020d}"


async def _read_positions(reader: DatabaseReader, layout: Sequence[TableLayout]) -> _PositionNumbers | None:
    """Return the numbers that replace the positions of the events in the timeline.

    The result is None if all positions are already numbers, as in a SQLite database.
    """
    positions: list[str] = []
    for table in layout:
        if table.name in _INSTANTS:
            column_index = table.columns.index(_POSITION)
            positions += [row[column_index] async for rows in reader.read_rows(table) for row in rows]
    if all(len(position) == _SQLITE_DIGITS for position in positions):
        return None
    return _PositionNumbers(sorted(positions))
