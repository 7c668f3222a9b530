"""How large is the database of the query history after a million statements?

The code of the server records the statements over two months, with the housekeeping of each day. The workload is
skewed, from a seed: few tables and few shapes have most of the statements, and most shapes are rare. Such a long tail
takes the most space, because the database stores a row for each hour in which a shape is used.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bench.report import Report
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.history.history import HOUR_MS, MERGED_PERIODS, QueryHistory, StatementRead, StatementSample
from seamark.metaserver.history.samples import BOTH, HIGH, LOW, FilterSample, RangeWidth, round_share
from seamark.metaserver.history.shapes import Aggregate, QueryShape, ShapeTerm
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, Operation
from seamark.metaserver.store.port import PointerStore

SIZE_GOAL_MB = 20.0
STATEMENTS, DAYS, TABLES, SHAPES = 1_000_000, 60, 20, 300
"""The size of the workload; `SHAPES` is the number of shapes of each table."""
SEED = 11
_TABLE_SKEW, _SHAPE_SKEW = 1.0, 1.1
"""The exponents of Zipf's law: the table or shape of rank r has a share of r ** -exponent."""
_RANKS = range(1, 1 + max(TABLES, SHAPES))
_COLUMNS = 40
_ENGINES = ("trino", "spark", "seamark", "duckdb")
_OPERATORS = ("eq", "eq", "in", "gt-eq", "lt", "is-null", "starts-with")
_RANGES = ("gt-eq", "lt")
_FUNCTIONS = ("count", "sum", "min", "max", "avg")


class _PassingClock(SystemClock):
    """A clock that the benchmark moves forward."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_history_database", "How large is the database of the query history?", peer="no peer")
    await measure_database(report, folder, STATEMENTS // 20 if quick else STATEMENTS)
    return report


async def measure_database(report: Report, folder: Path, statements: int = STATEMENTS) -> float:
    """Record statements of a skewed workload, and return the size of the database in megabytes."""
    clock, rng = _PassingClock(), random.Random(SEED)
    workload = [(f"uuid-{table:032}", _make_shape(rng)) for table in range(TABLES) for _ in range(SHAPES)]
    weights = [table**-_TABLE_SKEW * rank**-_SHAPE_SKEW for table in _RANKS[:TABLES] for rank in _RANKS[:SHAPES]]
    per_hour = max(1, statements // (DAYS * 24))
    async with _open_store_with_tables(folder / "seamark.db", clock) as store:
        history = QueryHistory(Settings(query_history_waiting=TABLES * SHAPES * 8), store, clock)
        for _ in range(DAYS * 24):
            for uuid, shape in rng.choices(workload, weights, k=per_hour):
                _record(history, uuid, shape, rng)
            await history.flush()
            clock.ahead_ms += HOUR_MS
            if history.hour % 24 == 0:
                await _merge_hours(store, history.hour)
    size_mb = sum(path.stat().st_size for path in folder.glob("seamark.db*")) / 1e6
    case = f"the database with {per_hour * DAYS * 24:,} statements of {DAYS} days, {SHAPES} shapes, {TABLES} tables"
    report.bounds[case] = f"{size_mb:.1f} MB; the goal is {SIZE_GOAL_MB:g} MB"
    return size_mb


def _record(history: QueryHistory, uuid: str, shape: QueryShape, rng: random.Random) -> None:
    files = rng.randrange(1, 1000)
    statement_read = StatementRead(
        uuid,
        shape,
        files_in=1000,
        files_left=files,
        bytes_in=10**10,
        bytes_left=files * 10**7,  # Each file has 10 MB.
        literals=rng.randrange(50),
    )
    samplers = history.add(statement_read, None, 0.001)
    if samplers is not None:
        samplers.append(partial(_sample, shape, rng.random()))


def _make_shape(rng: random.Random) -> QueryShape:
    """Return a random shape of up to nine columns. Three in ten shapes join, and four in ten group their rows."""
    columns = rng.sample(range(1, _COLUMNS + 1), rng.randrange(2, 10))
    conjuncts = tuple(sorted((ShapeTerm(column, rng.choice(_OPERATORS)),) for column in columns[: rng.randrange(1, 5)]))
    is_grouped = rng.random() < 0.4
    aggregates = tuple(sorted({Aggregate(rng.choice(_FUNCTIONS), column) for column in columns[-2:]}))
    return QueryShape(
        engine=rng.choice(_ENGINES),
        columns=tuple(sorted(columns)),
        conjuncts=conjuncts,
        joins=(columns[0],) if rng.random() < 0.3 else (),
        grouping=tuple(sorted(columns[:2])) if is_grouped else (),
        aggregates=aggregates if is_grouped else (),
    )


def _sample(shape: QueryShape, share: float) -> StatementSample:
    range_columns = [term.column_id for (term,) in shape.conjuncts if term.op in _RANGES]
    widths = (RangeWidth(column, (LOW, HIGH, BOTH)[column % 3], round_share(share)) for column in range_columns)
    return StatementSample(FilterSample(tuple(widths)), -1, -1)


async def _merge_hours(store: PointerStore, hour: int) -> None:
    """Merge the rows of earlier hours.

    The benchmark moves the clock forward, and the server's housekeeping does not trust a clock that jumps. So the
    benchmark merges the rows instead.
    """
    for period_hours, age_hours in MERGED_PERIODS:
        hour_limit = (hour - age_hours) // period_hours * period_hours
        while await store.merge_query_hours(hour_limit, limit=1000, period_hours=period_hours):
            pass


@asynccontextmanager
async def _open_store_with_tables(path: Path, clock: SystemClock) -> AsyncIterator[PointerStore]:
    """Open the catalog's database at `path`, and create `TABLES` tables in it."""
    async with open_store(f"sqlite:///{path}", clock=clock, queue_limit=10) as store:
        operations: list[Operation] = [CreateNamespace(("db",), {})]
        operations += [
            CreateEntry(Entry(EntryKind.TABLE, ("db",), f"t{table}", f"uuid-{table:032}", f"file:///t{table}.json"))
            for table in range(TABLES)
        ]
        await store.transact(operations)
        yield store
