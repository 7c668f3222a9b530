"""Counters by day of the columns that are read and the age of the partitions, for advice on column TTLs.

A read is counted in memory, without I/O, and recorded once a minute. Reads that a killed server has not recorded are
lost: the advice states how much of the traffic it has seen. Jobs of table services are not counted.

The memory is limited, and one principal can use at most half of it. A read beyond the limit counts as a read of every
column of its table, so that no column that is read looks unread.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from seamark.cache.memory import MemoryCache
from seamark.formats.runtime.errors import BadRequest, NoSuchTable
from seamark.metaserver.catalog.parts import CatalogContext
from seamark.metaserver.store.model import (
    ALL_AGES,
    EVERY_COLUMN,
    NAMED_COLUMNS,
    UNKNOWN_COLUMNS,
    ColumnReads,
)
from seamark.metaserver.store.operations import AddColumnReads
from seamark.metaserver.store.passed_time import look_at_clock

FLUSH_S = 60.0
COLUMNS_MAX = 200
"""A read of more columns counts as a read of every column."""
_COLUMNS_EACH = 16
"""A read of more columns counts as several towards the limit: it takes as much memory."""
DAY_MS = 86_400_000
_LISTED_MAX = 200_000
_PRUNED = 1000
_PLANS_BYTES = 1 << 20
_log = structlog.get_logger("seamark.server")


class ColumnRead(NamedTuple):
    """A read of columns of a table.

    Attributes:
        columns: Ids, made by `columns_of`.
        oldest_age_d: The same as in `ColumnReads`.
    """

    uuid: str
    columns: frozenset[int]
    oldest_age_d: int


def columns_of(ids: Iterable[int]) -> frozenset[int]:
    """Return the columns of a read, of at most `COLUMNS_MAX`: clients may name tens of thousands, and each read is
    kept.
    """
    columns = frozenset(ids)
    if len(columns) <= COLUMNS_MAX:
        return columns
    return frozenset((EVERY_COLUMN, UNKNOWN_COLUMNS)) if UNKNOWN_COLUMNS in columns else frozenset((EVERY_COLUMN,))


class ColumnUsage:
    """Belongs to one event loop.

    `plans`: the end of the oldest partition of recent plan snapshots by their ids, as `find_oldest_end_ms` has it: scan
    reports name the snapshot that they read.
    """

    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._limit = context.settings.column_usage_counters
        self._counts: Counter[ColumnRead] = Counter()
        self._held: Counter[str | None] = Counter()
        """Of the limit, by principal."""
        self._is_full = False
        self.plans: MemoryCache[int, int | None] = MemoryCache(_PLANS_BYTES, "column-usage")
        self.days = context.settings.column_usage_days
        self.is_on = self.days > 0

    def add(self, read: ColumnRead, principal: str | None) -> None:
        """Count a read.

        Args:
            who: The principal that reads. None without logins: then it has the whole limit.
        """
        if read not in self._counts:
            cost = 1 + len(read.columns) // _COLUMNS_EACH
            share = self._limit if principal is None else max(1, self._limit // 2)
            if self._held.total() + cost <= self._limit and self._held[principal] + cost <= share:
                self._held[principal] += cost
            else:
                read = ColumnRead(read.uuid, frozenset((EVERY_COLUMN,)), ALL_AGES)
                if not self._is_full:
                    self._is_full = True
                    _log.warning(
                        "reads are counted as reads of every column",
                        limit=self._limit,
                        setting="column_usage_counters",
                        who=principal,
                    )
        self._counts[read] += 1

    @property
    def today(self) -> int:
        """Days since the epoch."""
        return self._context.clock.now_ms() // DAY_MS

    async def run(self) -> None:
        """Record the counts periodically, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Record what was counted, except what the database refuses for a table.

        RetryLater, CommitUnknown: the rest is lost.
        """
        counts, self._counts, self._is_full = self._counts, Counter(), False
        self._held = Counter()
        for uuid, rows in (await asyncio.to_thread(_by_table, counts)).items():
            try:
                await self._context.store.transact([AddColumnReads(uuid, self.today, rows)])
            except NoSuchTable:  # it was dropped meanwhile
                continue
            except BadRequest as error:
                _log.warning("reads of columns are not recorded", uuid=uuid, error=error.message)

    async def of_table(self, uuid: str) -> list[ColumnReads]:
        """Return the reads of a table, with those that this server has not recorded yet."""
        await self.flush()
        return await self._context.store.column_reads(uuid, self.today - self.days, _LISTED_MAX)

    async def prune(self) -> int:
        """Remove the rows that are older than the setting, and return their number."""
        removed = 0
        before_day = (await look_at_clock(self._context.store, self._context.clock)).ago(self.days * DAY_MS) // DAY_MS
        while count := await self._context.store.prune_column_reads(before_day, _PRUNED):
            removed += count
            if count < _PRUNED:
                break
        return removed


def _by_table(counts: Mapping[ColumnRead, int]) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """Return for each table the columns with (oldest_age_d, reads)."""
    tables: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for read, count in counts.items():
        of_table = tables[read.uuid]
        for column in read.columns if UNKNOWN_COLUMNS in read.columns else (*read.columns, NAMED_COLUMNS):
            age_d, reads = of_table.get(column, (0, 0))
            of_table[column] = max(age_d, read.oldest_age_d), reads + count
    return {
        uuid: tuple((column, *counted) for column, counted in by_column.items()) for uuid, by_column in tables.items()
    }
