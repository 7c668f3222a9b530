"""What does the query history cost a plan?

Two servers run in one process each: one with the query history, and one with `query_history_days` 0. The load
alternates between them, and the pair is started again several times. One kind of request repeats the same plan, which
is answered with cached bytes. The other kind has a new filter each time, which is parsed, bound, planned and written.
The CPU time of the server is the most reliable figure.
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
PAIRS = 8


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_history", "What does the query history cost a plan?", peer=WITHOUT_HISTORY)
    planned_table = generate_table(2_000 if quick else 10_000)
    samples_by_kind: dict[str, dict[str, list[Sample]]] = {}
    for pair in range(1 if quick else PAIRS):
        samples_of_pair = await _compare_plans(
            folder / f"pair-{pair}", planned_table, rounds=2 if quick else 6, seconds=0.5
        )
        for kind, samples in samples_of_pair.items():
            all_samples = samples_by_kind.setdefault(kind, {})
            for target_name, target_samples in samples.items():
                all_samples.setdefault(target_name, []).extend(target_samples)
    for kind, samples in samples_by_kind.items():
        report.add(kind, "server CPU", "µs", samples, lambda sample: sample.server_cpu_us, peer=WITHOUT_HISTORY)
        report.add(kind, "p50", "ms", samples, lambda sample: sample.compute_quantile(0.5), peer=WITHOUT_HISTORY)
        report.add_failures(kind, samples)
    report.notes.append(f"The goal: the history costs less than {COST_GOAL_PERCENT:g} % of a plan.")
    report.notes.append(f"Medians over {PAIRS} pairs of servers, because two equal processes differ by some percent.")
    return report


async def _compare_plans(
    folder: Path, planned_table: GeneratedTable, rounds: int, seconds: float
) -> dict[str, dict[str, list[Sample]]]:
    """Start a pair of servers, and return the samples of both by kind of request and by name of the server."""
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
            return await drive_workers(target, [_iter_shared_requests(new_plans)], seconds=seconds)

        kinds = {"the same plan": repeat_same_plan, "a new filter": send_new_plans}
        await warm_up(targets, [functools.partial(send_plans, seconds=1.0) for send_plans in kinds.values()], 1)
        return {kind: await run_alternately(targets, rounds, send_plans) for kind, send_plans in kinds.items()}


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


def _iter_shared_requests(requests: Iterator[Request]) -> Worker:
    """Yield the next request of an iterator, which the workers of both servers share."""
    while True:  # `yield from` would close the shared iterator.
        yield next(requests)
