"""Which columns of tables are read, and how old the partitions are: counters by day, for advice on column TTLs.

A read is counted in memory, without I/O, and recorded once a minute. What a killed server has not recorded is lost:
the advice states how much of the traffic it has seen. Jobs of table services are not counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import NamedTuple

import structlog

from seamark.cache.memory import MemoryCache
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.errors import NoSuchTable
from seamark.metaserver.store.model import EVERY_COLUMN, NAMED_COLUMNS, UNKNOWN_COLUMNS, ColumnReads
from seamark.metaserver.store.operations import AddColumnReads

FLUSH_S = 60.0
COLUMNS_MAX = 200
"""A read of more columns counts as a read of every column."""
DAY_MS = 86_400_000
_LISTED_MAX = 200_000
_PRUNED = 1000
_PLANS_BYTES = 1 << 20
_log = structlog.get_logger("seamark.server")


class ColumnRead(NamedTuple):
    """`columns`: ids. `oldest_age_d`: as in `ColumnReads`."""

    uuid: str
    columns: frozenset[int]
    oldest_age_d: int


class ColumnUsage:
    """Belongs to one event loop. `plans`: the end of the oldest partition of recent plan snapshots by their ids, as
    `oldest_end_ms` has it: scan reports name the snapshot that they read."""

    def __init__(self, parts: CatalogContext) -> None:
        self._parts = parts
        self._limit = parts.settings.column_usage_counters
        self._counts: Counter[ColumnRead] = Counter()
        self._is_full = False
        self.plans: MemoryCache[int, int | None] = MemoryCache(_PLANS_BYTES, "column-usage")
        self.days = parts.settings.column_usage_days
        self.is_on = self.days > 0

    def add(self, read: ColumnRead) -> None:
        count = self._counts.get(read)
        if count is not None:
            self._counts[read] = count + 1
        elif len(self._counts) < self._limit:
            self._counts[read] = 1
        elif not self._is_full:
            self._is_full = True
            _log.warning("reads of columns are not recorded", limit=self._limit, setting="column_usage_counters")

    @property
    def today(self) -> int:
        """Days since the epoch."""
        return self._parts.clock.now_ms() // DAY_MS

    async def run(self) -> None:
        """Until cancelled: records what was counted."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Records what was counted. RetryLater, CommitUnknown: the rest is lost."""
        counts, self._counts, self._is_full = self._counts, Counter(), False
        tables: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        for read, count in counts.items():
            columns = set(read.columns) if len(read.columns) <= COLUMNS_MAX else {EVERY_COLUMN}
            if UNKNOWN_COLUMNS not in read.columns:
                columns.add(NAMED_COLUMNS)
            for column in columns:
                age_d, reads = tables[read.uuid].get(column, (0, 0))
                tables[read.uuid][column] = max(age_d, read.oldest_age_d), reads + count
        for uuid, by_column in tables.items():
            rows = tuple((column, *counted) for column, counted in by_column.items())
            try:
                await self._parts.store.transact([AddColumnReads(uuid, self.today, rows)])
            except NoSuchTable:  # it was dropped meanwhile
                continue

    async def of_table(self, uuid: str) -> list[ColumnReads]:
        """With those that this server has not recorded yet."""
        await self.flush()
        return await self._parts.store.column_reads(uuid, self.today - self.days, _LISTED_MAX)

    async def prune(self) -> int:
        """Removes what is older than the setting; returns the number of rows."""
        removed = 0
        while count := await self._parts.store.prune_column_reads(self.today - self.days, _PRUNED):
            removed += count
            if count < _PRUNED:
                break
        return removed
