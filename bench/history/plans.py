"""What does the query history cost a plan?

Two servers run in one process each: with the query history, and with `query_history_days` 0. The load alternates
between them. A plan is requested again and again, which is answered with cached bytes, and with a filter that is new
each time, which is parsed, bound, planned and written each time. The CPU time of the server is the figure to trust.

The second part records a million statements, as the servers of a busy catalog do in two months, and measures the
database.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from bench.measure import Sample, Worker, drive, repeat, run_alternately, warm_up
from bench.planning.filters import build_small_filter
from bench.planning.served import register, request_plan
from bench.planning.tables import CACHE, Table, generate_table
from bench.report import OURS, Report
from bench.targets import LOAD_CORE, SERVER_CORE, Target, pin_to_core
from bench.wire import Request
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.history.history import HOUR_MS, QueryHistory, StatementRead, StatementSample
from seamark.metaserver.history.samples import HIGH, FilterSample, RangeWidth
from seamark.metaserver.history.shapes import QueryShape, ShapeTerm
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateEntry, CreateNamespace, Operation
from seamark.metaserver.store.port import PointerStore
from tests.services.seamark import Seamark

WITHOUT = "without the history"
COST_GOAL_PERCENT = 2.0
SIZE_GOAL_MB = 20.0
STATEMENTS, DAYS, TABLES, SHAPES = 1_000_000, 60, 10, 40


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_history", "What does the query history cost a plan?", peer=WITHOUT)
    await _compare_plans(report, folder, generate_table(2_000 if quick else 10_000), 2 if quick else 12, 0.5)
    await _measure_database(report, folder, STATEMENTS // 20 if quick else STATEMENTS)
    return report


async def _compare_plans(report: Report, folder: Path, planned_table: Table, rounds: int, seconds: float) -> None:
    same_plan = request_plan(planned_table, build_small_filter(planned_table))
    new_plans = (request_plan(planned_table, build_small_filter(planned_table, turn)) for turn in itertools.count(1))
    with ExitStack() as stack:
        history_server = stack.enter_context(_run_server(folder, OURS, {}))
        plain_server = stack.enter_context(_run_server(folder, WITHOUT, {"SEAMARK_QUERY_HISTORY_DAYS": "0"}))
        targets = (history_server, plain_server)
        for target in targets:
            await register(target, planned_table)
        stack.enter_context(pin_to_core(LOAD_CORE))

        async def repeat_same_plan(target: Target, seconds: float = seconds) -> Sample:
            return await drive(target, [repeat(same_plan)], seconds=seconds)

        async def send_new_plans(target: Target, seconds: float = seconds) -> Sample:
            return await drive(target, [_send_each(new_plans)], seconds=seconds)

        kinds = {"the same plan": repeat_same_plan, "a new filter": send_new_plans}
        await warm_up(targets, [functools.partial(piece, seconds=1.0) for piece in kinds.values()], 1)
        for case, piece in kinds.items():
            samples = await run_alternately(targets, rounds, piece)
            report.add(case, "server CPU", "µs", samples, lambda sample: sample.server_cpu_us, peer=WITHOUT)
            report.add(case, "p50", "ms", samples, lambda sample: sample.compute_quantile(0.5), peer=WITHOUT)
            report.add_failures(case, samples)
    report.notes.append(f"The goal: the history costs less than {COST_GOAL_PERCENT:g} % of a plan.")


@contextmanager
def _run_server(folder: Path, name: str, env: dict[str, str]) -> Iterator[Target]:
    home = folder / name.replace(" ", "-")
    server = Seamark(home, warehouse=f"file://{CACHE}", env={"SEAMARK_LOG_LEVEL": "warning", **env})
    try:
        with pin_to_core(SERVER_CORE):
            server.start()
        yield Target(name, server.base_url, (server.pid,), CACHE)
    finally:
        server.terminate()


def _send_each(requests: Iterator[Request]) -> Worker:
    """Yield the next request of an iterator that both servers share."""
    while True:  # `yield from` would close the shared iterator.
        yield next(requests)


class _PassingClock(SystemClock):
    """A clock that the bench moves."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


async def _measure_database(report: Report, folder: Path, statements: int) -> None:
    """Record statements of some shapes over two months, with the housekeeping of each day, and measure the file."""
    clock, rng = _PassingClock(), random.Random(11)
    async with _open_tables(folder / "seamark.db", clock) as store:
        history = QueryHistory(Settings(), store, clock)
        shapes = [_build_shape(number) for number in range(SHAPES)]
        weights = [1 / (1 + number) for number in range(SHAPES)]
        per_flush = statements // (DAYS * 24)
        for _ in range(DAYS * 24):
            for shape in rng.choices(shapes, weights, k=per_flush):
                statement = StatementRead(
                    f"uuid-{rng.randrange(TABLES)}", shape, 1000, rng.randrange(1000), 10**9, 10**6
                )
                samplers = history.add(statement, None, 0.001)
                if samplers is not None:
                    samplers.append(_build_sample)
            await history.flush()
            clock.ahead_ms += HOUR_MS
            # Housekeeping distrusts a clock that jumps, so its work on older days is done here.
            while await store.merge_query_hours((history.hour - 48) // 24 * 24, 1000):
                pass
    size = sum(path.stat().st_size for path in folder.glob("seamark.db*"))
    case = f"the database with {per_flush * DAYS * 24:,} statements of {DAYS} days, {SHAPES} shapes, {TABLES} tables"
    report.bounds[case] = f"{size / 1e6:.1f} MB; the goal is {SIZE_GOAL_MB:g} MB"


def _build_shape(number: int) -> QueryShape:
    terms = tuple((ShapeTerm(1 + number % 7 + position, "gt-eq"),) for position in range(1 + number % 3))
    return QueryShape("trino", tuple(range(1, 5 + number)), terms)


def _build_sample() -> StatementSample:
    widths = RangeWidth(3, HIGH, 0.03125), RangeWidth(4, HIGH, 0.5)
    return StatementSample(FilterSample(widths), -1, -1)


@asynccontextmanager
async def _open_tables(path: Path, clock: SystemClock) -> AsyncIterator[PointerStore]:
    async with open_store(f"sqlite:///{path}", clock=clock, queue_limit=10) as store:
        operations: list[Operation] = [CreateNamespace(("db",), {})]
        operations += [
            CreateEntry(Entry(EntryKind.TABLE, ("db",), f"t{number}", f"uuid-{number}", f"file:///t{number}.json"))
            for number in range(TABLES)
        ]
        await store.transact(operations)
        yield store
