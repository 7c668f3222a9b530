"""A cache of table pointers that is valid until the next commit.

Any worker, replica or command may move a pointer at any time, and the next request must see it. Each request therefore
queries the database, but only for a number that changes with each commit (`store/sql/changes.py`).
"""

from __future__ import annotations

from seamark.metaserver.catalog.tables import Tables
from seamark.metaserver.store.model import Entry, NamespacePath
from seamark.metaserver.store.sql.changes import Changes

ENTRIES_LIMIT = 10_000


class PointerCache:
    """Belongs to one event loop. With `changes` None, each request reads the pointer."""

    def __init__(self, tables: Tables, changes: Changes | None) -> None:
        self._tables = tables
        self._changes = changes
        self._number: int | None = None
        self._entries: dict[tuple[NamespacePath, str], Entry] = {}

    async def entry(self, namespace: NamespacePath, name: str) -> Entry:
        """See `Tables.entry`."""
        number = None if self._changes is None else self._changes.number()
        if number is None:
            return await self._tables.entry(namespace, name)
        if number != self._number or len(self._entries) >= ENTRIES_LIMIT:
            self._entries.clear()
            self._number = number
        key = (namespace, name)
        known = self._entries.get(key)
        if known is None:
            known = await self._tables.entry(namespace, name)
            if number == self._number:  # the entry was read after the number, so it is at least as new
                self._entries[key] = known
        return known

    def close(self) -> None:
        if self._changes is not None:
            self._changes.close()
