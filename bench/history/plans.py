"""What does the query history cost a plan?

Two servers run in one process each: one with the query history, and one with `query_history_days` 0. The load
alternates between them. One kind of request repeats the same plan, which is answered with cached bytes. The other kind
has a new filter each time, which is parsed, bound, planned and written. The CPU time of the server is the most reliable
figure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.measure import Sample, Worker, drive_workers, repeat_request, run_alternately, warm_up
from bench.planning.filters import build_small_filter
from bench.planning.served import register_generated_table, request_plan
from bench.planning.tables import CACHE, GeneratedTable, generate_table
from bench.report import OURS, Report
from bench.targets import LOAD_CORE, SERVER_CORE, BenchTarget, pin_to_core
from bench.wire import Request
from tests.services.seamark import Seamark

WITHOUT_HISTORY = "without the history"
COST_GOAL_PERCENT = 2.0


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_history", "What does the query history cost a plan?", peer=WITHOUT_HISTORY)
    await _compare_plans(report, folder, generate_table(2_000 if quick else 10_000), 2 if quick else 12, 0.5)
    return report


async def _compare_plans(
    report: Report, folder: Path, planned_table: GeneratedTable, rounds: int, seconds: float
) -> None:
    same_plan = request_plan(planned_table, build_small_filter(planned_table))
    new_plans = (
        request_plan(planned_table, build_small_filter(planned_table, number)) for number in itertools.count(1)
    )
    with ExitStack() as stack:
        history_server = stack.enter_context(_run_server(folder, OURS, {}))
        plain_server = stack.enter_context(_run_server(folder, WITHOUT_HISTORY, {"SEAMARK_QUERY_HISTORY_DAYS": "0"}))
        targets = (history_server, plain_server)
        for target in targets:
            await register_generated_table(target, planned_table)
        stack.enter_context(pin_to_core(LOAD_CORE))

        async def repeat_same_plan(target: BenchTarget, seconds: float = seconds) -> Sample:
            return await drive_workers(target, [repeat_request(same_plan)], seconds=seconds)

        async def send_new_plans(target: BenchTarget, seconds: float = seconds) -> Sample:
            return await drive_workers(target, [_send_each(new_plans)], seconds=seconds)

        kinds = {"the same plan": repeat_same_plan, "a new filter": send_new_plans}
        await warm_up(targets, [functools.partial(send_plans, seconds=1.0) for send_plans in kinds.values()], 1)
        for case, send_plans in kinds.items():
            samples = await run_alternately(targets, rounds, send_plans)
            report.add(case, "server CPU", "µs", samples, lambda sample: sample.server_cpu_us, peer=WITHOUT_HISTORY)
            report.add(case, "p50", "ms", samples, lambda sample: sample.compute_quantile(0.5), peer=WITHOUT_HISTORY)
            report.add_failures(case, samples)
    report.notes.append(f"The goal: the history costs less than {COST_GOAL_PERCENT:g} % of a plan.")


@contextmanager
def _run_server(folder: Path, name: str, env: dict[str, str]) -> Iterator[BenchTarget]:
    home = folder / name.replace(" ", "-")
    server = Seamark(home, warehouse=f"file://{CACHE}", env={"SEAMARK_LOG_LEVEL": "warning", **env})
    try:
        with pin_to_core(SERVER_CORE):
            server.start()
        yield BenchTarget(name, server.base_url, (server.pid,), CACHE)
    finally:
        server.terminate()


def _send_each(requests: Iterator[Request]) -> Worker:
    """Yield the next request of an iterator, which the workers of both servers share."""
    while True:  # `yield from` would close the shared iterator.
        yield next(requests)
