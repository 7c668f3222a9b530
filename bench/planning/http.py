"""What does a small plan cost over HTTP, and do large plans delay other requests?

A small plan keeps a few of the 10,000 files of a table. The benchmark repeats one request, which the server answers
from its cache. It also sends a new filter each time, which the server parses, binds, plans and writes. The peer is a
bare aiohttp handler on uvloop that only sends the same bytes: no Python framework answers at a lower cost. The peer
also shows how fast the machine is: the goal in microseconds is from a machine on which the peer took 109.

For large plans, a client in another process fetches 100,000 files page by page. Meanwhile a probe on the event loop of
the server measures how late it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import Sample, Worker, compute_median, drive_workers, repeat_request, run_alternately, warm_up
from bench.planning.bare import BARE, run_bare_server
from bench.planning.filters import build_small_filter
from bench.planning.pages import FILE
from bench.planning.served import build_path, register_generated_table, request_plan, run_seamark, run_seamark_here
from bench.planning.tables import CACHE, GeneratedTable, generate_table
from bench.report import OURS, Report, Row
from bench.targets import LOAD_CORE, SERVER_CORE, BenchTarget, pin_to_core
from bench.wire import LoadError, Request

CPU_GOAL_US = 150
P50_GOAL_MS = 0.3
BARE_CPU_US = 109
"""The CPU time of the bare handler on the machine where the goal was set."""
PAUSE_GOAL_MS = 5.0
CONNECTIONS = (1, 16, 64)


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_http", "What does a small plan cost over HTTP?", peer="a bare aiohttp handler on uvloop")
    generated_table = generate_table(2_000 if quick else 10_000)
    for workers in (1, 2):
        await _measure_small_plans(
            report, folder, generated_table, workers, rounds=1 if quick else 4, seconds=0.4 if quick else 0.5
        )
    await _measure_pages(report, folder, generate_table(2_000 if quick else 100_000), rounds=1 if quick else 3)
    report.notes.append(
        "One worker and the load have a core each. Two workers share both cores with the load, so that their rate is"
        " a lower bound. CPU is the server processes' own, by the scheduler's count."
    )
    return report


async def _measure_small_plans(
    report: Report, folder: Path, table: GeneratedTable, workers: int, rounds: int, seconds: float
) -> None:
    plan_result = request_plan(table, build_small_filter(table))
    new_plans = _generate_new_plans(table)
    with ExitStack() as stack:
        seamark_server = stack.enter_context(run_seamark(folder, CACHE, workers=workers))
        await register_generated_table(seamark_server, table)
        body = (await seamark_server.call(plan_result)).body
        bare_server = stack.enter_context(run_bare_server(folder, body, workers=workers))
        if workers == 1:
            stack.enter_context(pin_to_core(LOAD_CORE))
        targets = (seamark_server, bare_server)

        async def repeat_same_plan(target: BenchTarget, clients: int, seconds: float = seconds) -> Sample:
            return await drive_workers(target, [repeat_request(plan_result) for _ in range(clients)], seconds=seconds)

        async def send_new_plans(target: BenchTarget, clients: int, seconds: float = seconds) -> Sample:
            if target is bare_server:  # It returns the same body for every filter, so one request is enough.
                return await repeat_same_plan(target, clients, seconds)
            return await drive_workers(
                target, [_iter_shared_requests(new_plans) for _ in range(clients)], seconds=seconds
            )

        loads = (
            {"the same plan": repeat_same_plan, "a new filter": send_new_plans}
            if workers == 1
            else {"the same plan": repeat_same_plan}
        )
        await warm_up(targets, [functools.partial(run_load, clients=16, seconds=0.5) for run_load in loads.values()], 1)
        for load, run_load in loads.items():
            for clients in CONNECTIONS:
                samples = await run_alternately(targets, rounds, functools.partial(run_load, clients=clients))
                case = f"{load}, {_format_count(clients, 'connection')}, {_format_count(workers, 'worker')}"
                _report_rows(report, case, samples, is_alone=clients == workers == 1)
    if workers == 1:
        report.notes.append(f"A small plan's answer: {body.count(FILE)} files, {len(body):,} bytes.")


def _report_rows(report: Report, case: str, samples: dict[str, list[Sample]], *, is_alone: bool) -> None:
    cpu, p50 = (CPU_GOAL_US, P50_GOAL_MS) if is_alone else (None, None)
    report.add(case, "server CPU", "µs", samples, lambda s: s.server_cpu_us, peer=BARE, goal=cpu)
    report.add(case, "p50", "ms", samples, lambda s: s.compute_quantile(0.5), peer=BARE, goal=p50)
    report.add(case, "p99", "ms", samples, lambda s: s.compute_quantile(0.99), peer=BARE)
    report.add(case, "requests", "/s", samples, lambda s: s.rate, lower_is_better=False, peer=BARE)
    report.add_failures(case, samples)
    report.note_generator_limit(case, samples)
    if is_alone:
        bare_cpu_us = compute_median(samples[BARE], lambda s: s.server_cpu_us)
        scaled_cpu_us = CPU_GOAL_US * bare_cpu_us / BARE_CPU_US
        report.bounds[
            f"{case}: the goal is {CPU_GOAL_US} µs if a bare handler takes {BARE_CPU_US} µs; scaled to this run"
        ] = f"{scaled_cpu_us:.0f} µs"


def _format_count(count: int, unit: str) -> str:
    return f"{count} {unit}" + ("" if count == 1 else "s")


def _generate_new_plans(table: GeneratedTable) -> Iterator[Request]:
    """Yield plan requests without end, each with a new filter."""
    return (request_plan(table, build_small_filter(table, number)) for number in itertools.count(1))


def _iter_shared_requests(requests: Iterator[Request]) -> Worker:
    """Yield the next request of an iterator that several workers share."""
    while True:  # `yield from` would close the shared iterator.
        yield next(requests)


async def _measure_pages(report: Report, folder: Path, table: GeneratedTable, rounds: int) -> None:
    """Measure how fast a client fetches a plan in pages, and how long the server's event loop pauses.

    The server runs in this process on its core; the client is a process on the other core.
    """
    with pin_to_core(SERVER_CORE):
        async with run_seamark_here(folder, CACHE) as target:
            await register_generated_table(target, table)
            await _run_page_client(target, table)  # loads the blocks
            async with _watch_pauses() as idle_pauses:
                await asyncio.sleep(1.0)
            for coding in ("identity", "gzip"):
                page_counts, pauses = [], []
                for _ in range(rounds):
                    async with _watch_pauses() as lag:
                        page_counts.append(
                            await _run_page_client(target, table, *(["--gzip"] if coding == "gzip" else []))
                        )
                    pauses.append(lag)
                if any(item["files"] != table.files for item in page_counts):
                    raise LoadError(f"{table.files} files were asked for, {page_counts[0]['files']} came")
                _report_pages(report, table, coding, page_counts, pauses)
    report.notes.append(
        "A pause is the time by which a timer of 1 ms fires late on the server's loop. The longest pause of an idle"
        f" server was {idle_pauses.late_ms:.1f} ms. A pause includes the time that other processes take from the core."
        " The row of the server's own part excludes that time, because it counts only the CPU time of the server's "
        "threads during the pause."
    )


def _report_pages(
    report: Report, table: GeneratedTable, coding: str, page_rows: list[dict[str, Any]], pauses: list[_Pause]
) -> None:
    """Add the measures of a plan in pages to the report.

    The longest pause of the event loop has two values: the whole delay (`late_ms`), and the CPU time that the server
    used during the delay (`own_ms`). Only these two have a goal.
    """
    case = f"{table.files:,} files in pages, {coding}"
    medians = {
        "longest pause of the loop": statistics.median(pause.late_ms for pause in pauses),
        "the server's own part of it": statistics.median(pause.own_ms for pause in pauses),
        "whole plan": statistics.median(item["ms"] for item in page_rows),
        "slowest page": statistics.median(item["page_ms"] for item in page_rows),
    }
    for number, (measure, value) in enumerate(medians.items()):
        report.rows.append(
            Row(case, measure, "ms", {OURS: value}, peer=BARE, goal=PAUSE_GOAL_MS if number < 2 else None)
        )
    report.notes.append(
        f"{case}: {page_rows[0]['pages']} pages, {page_rows[0]['bytes'] / 1e6:.1f} MB; longest pause by round:"
        f" {', '.join(f'{pause.late_ms:.1f} (own {pause.own_ms:.1f})' for pause in pauses)} ms."
    )


async def _run_page_client(target: BenchTarget, table: GeneratedTable, *flags: str) -> dict[str, Any]:
    """Run the client that fetches all pages of a plan in another process, and return the JSON that it prints.

    Raises:
        LoadError: The client failed.
    """
    argv = [sys.executable, "-m", "bench.planning.pages", str(target.port), build_path(table), *flags]
    with pin_to_core(LOAD_CORE):
        child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        out, _ = await child.communicate()
    finally:
        if child.returncode is None:  # The test was interrupted.
            child.kill()
            await child.wait()
    if child.returncode:
        raise LoadError(f"the client of pages ended with {child.returncode}")
    document: dict[str, Any] = json.loads(out)
    return document


@dataclass
class _Pause:
    """The longest delay of the event loop, and the longest part of a delay in which the server used the CPU."""

    late_ms: float = 0.0
    own_ms: float = 0.0


@asynccontextmanager
async def _watch_pauses() -> AsyncIterator[_Pause]:
    """Record how late the event loop wakes from short sleeps while the block runs.

    A late wake-up has two causes: this process worked in the meantime, or other processes had the core. `own_ms` is at
    most the CPU time that this process used during the sleep, so it measures the first cause.
    """
    pause = _Pause()

    async def measure_pauses() -> None:
        while True:
            started_s, cpu_s_before = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            late_ms = (time.perf_counter() - started_s) * 1000 - 1
            pause.late_ms = max(pause.late_ms, late_ms)
            pause.own_ms = max(pause.own_ms, min(late_ms, (time.process_time() - cpu_s_before) * 1000))

    task = asyncio.create_task(measure_pauses())
    try:
        yield pause
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
