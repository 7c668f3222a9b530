"""Counts reads of columns by day and by the age of the oldest partition, for advice on column TTLs.

Reads are counted in memory, without I/O, and the counts are written to the database once a minute. If a server is
killed, its unwritten counts are lost. Therefore the advice says how many reads it is based on. Jobs of table services
are not counted.

The memory is limited, and one principal can use at most half of it. A read beyond the limit counts as a
read of every column of its table, so that a column never seems unread although it is read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import structlog

from seamark.cache.memory import MemoryCache
from seamark.formats.runtime.errors import BadRequest, NoSuchTable
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.store.model import (
    ALL_AGES,
    EVERY_COLUMN,
    NAMED_COLUMNS,
    UNKNOWN_COLUMNS,
    ColumnReads,
)
from seamark.metaserver.store.operations import AddColumnReads
from seamark.metaserver.store.passed_time import read_passed_time

FLUSH_S = 60.0
COLUMNS_MAX = 200
"""A read of more columns than this counts as a read of every column."""
_COLUMNS_PER_COUNTED_READ = 16
"""The number of columns for which a read counts as one more read towards the limit, because it takes more memory."""
DAY_MS = 86_400_000
_LISTED_MAX = 200_000
_PRUNED_ROWS_PER_BATCH = 1000
_PLANS_BYTES = 1 << 20
_log = structlog.get_logger("seamark.server")


class ColumnRead(NamedTuple):
    """A read of columns of a table.

    Attributes:
        columns: The ids of the columns, from `select_columns_of_read`.
        oldest_age_d: The age in whole days of the oldest partition that was read, or `ALL_AGES` for the whole table.
    """

    uuid: str
    columns: frozenset[int]
    oldest_age_d: int


def select_columns_of_read(ids: Iterable[int]) -> frozenset[int]:
    """Return the ids of the columns of a read.

    If there are more than `COLUMNS_MAX`, the read counts as a read of every column.

    The number is limited because clients may name tens of thousands of columns, and each read stays in memory.
    `UNKNOWN_COLUMNS` is kept, because it marks a read for which the client did not name its columns.
    """
    columns = frozenset(ids)
    if len(columns) <= COLUMNS_MAX:
        return columns
    return frozenset((EVERY_COLUMN, UNKNOWN_COLUMNS)) if UNKNOWN_COLUMNS in columns else frozenset((EVERY_COLUMN,))


class ColumnUsage:
    """Counts reads of columns.

    An instance belongs to one event loop. `plans` has the end of the oldest partition of each recent plan
    snapshot (`find_oldest_end_ms`), by snapshot id, because a scan report names only the snapshot that was read.
    """

    def __init__(self, context: CatalogContext) -> None:
        self._context = context
        self._limit = context.settings.column_usage_counters
        self._counts: Counter[ColumnRead] = Counter()
        self._costs_by_principal: Counter[str | None] = Counter()
        """The number of counted reads towards the limit, by principal."""
        self._is_full = False
        self.plans: MemoryCache[int, int | None] = MemoryCache(_PLANS_BYTES, "column-usage")
        self.days = context.settings.column_usage_days
        self.is_on = self.days > 0

    def add(self, column_read: ColumnRead, principal: str | None) -> None:
        """Count a read.

        Different reads need memory, so their number is limited. One principal may use at most half of the limit. A
        read beyond a limit is counted as a read of every column of the table.

        Args:
            principal: The principal that reads. None means that the server has no logins, and reads may use the whole
                limit.
        """
        if column_read not in self._counts:
            cost = 1 + len(column_read.columns) // _COLUMNS_PER_COUNTED_READ
            share = self._limit if principal is None else max(1, self._limit // 2)
            if (
                self._costs_by_principal.total() + cost <= self._limit
                and self._costs_by_principal[principal] + cost <= share
            ):
                self._costs_by_principal[principal] += cost
            else:
                column_read = ColumnRead(column_read.uuid, frozenset((EVERY_COLUMN,)), ALL_AGES)
                if not self._is_full:
                    self._is_full = True
                    _log.warning(
                        "reads are counted as reads of every column",
                        limit=self._limit,
                        setting="column_usage_counters",
                        who=principal,
                    )
        self._counts[column_read] += 1

    @property
    def today(self) -> int:
        """The current day, in days since the epoch."""
        return self._context.clock.now_ms() // DAY_MS

    async def run(self) -> None:
        """Record the counts periodically, until the task is cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Record the counted reads, except those that the database refuses for a table.

        Raises:
            RetryLater, CommitUnknown: The database does not answer. The remaining reads are lost.
        """
        counts, self._counts, self._is_full = self._counts, Counter(), False
        self._costs_by_principal = Counter()
        for uuid, rows in (await asyncio.to_thread(_group_by_table, counts)).items():
            try:
                await self._context.store.transact([AddColumnReads(uuid, self.today, rows)])
            except NoSuchTable:
                # The table was dropped in the meantime.
                continue
            except BadRequest as error:
                _log.warning("reads of columns are not recorded", uuid=uuid, error=error.message)

    async def flush_and_list_table_reads(self, uuid: str) -> list[ColumnReads]:
        """Write the counted reads to the database, and return all reads of the table."""
        await self.flush()
        return await self._context.store.list_column_reads(uuid, self.today - self.days, _LISTED_MAX)

    async def prune(self) -> int:
        """Remove the rows that are older than the setting allows, and return the number of removed rows."""
        removed_count = 0
        before_day = (await read_passed_time(self._context.store, self._context.clock)).find_time_ago(
            self.days * DAY_MS
        ) // DAY_MS
        while count := await self._context.store.prune_column_reads(before_day, _PRUNED_ROWS_PER_BATCH):
            removed_count += count
            if count < _PRUNED_ROWS_PER_BATCH:
                break
        return removed_count


def _group_by_table(counts: Mapping[ColumnRead, int]) -> dict[str, tuple[tuple[int, int, int], ...]]:
    """Return, for each table, tuples of (column id, oldest_age_d, reads).

    A read that named its columns is also counted under `NAMED_COLUMNS`, so that the share of such reads is known.
    """
    tables: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
    for column_read, count in counts.items():
        table_counts = tables[column_read.uuid]
        for column in (
            column_read.columns if UNKNOWN_COLUMNS in column_read.columns else (*column_read.columns, NAMED_COLUMNS)
        ):
            age_d, reads = table_counts.get(column, (0, 0))
            table_counts[column] = max(age_d, column_read.oldest_age_d), reads + count
    return {
        uuid: tuple((column, *age_and_reads) for column, age_and_reads in by_column.items())
        for uuid, by_column in tables.items()
    }
