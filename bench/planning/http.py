"""What does a small plan cost over HTTP, and do large ones hold up the others?

A small plan keeps a handful of a table's 10,000 files. It is asked for again and again, which is answered from the
plan that was kept, and with a filter that is new each time. The peer is a bare aiohttp handler on uvloop which sends
the same bytes and does nothing else: no framework of Python's answers for less.

Large plans are watched from inside: while a client in another process fetches 100,000 files page by page, a probe on
the server's own event loop notes how late it wakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Sample, Worker, drive, in_turns, repeat, warm
from bench.planning.bare import BARE, bare
from bench.planning.filters import small
from bench.planning.pages import FILE
from bench.planning.served import path_of, plan, register, seamark, seamark_here
from bench.planning.tables import CACHE, Table, table
from bench.report import OURS, Report, Row
from bench.targets import LOAD_CORE, SERVER_CORE, Target, on_core
from bench.wire import LoadError, Request

CPU_GOAL_US = 150
P50_GOAL_MS = 0.3
PAUSE_GOAL_MS = 5.0
CONNECTIONS = (1, 16, 64)
FILTERS_NEW = 3000
"""Different filters; each connection begins somewhere else among them. Planned twice, they are in the plan cache."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_http", "What does a small plan cost over HTTP?", peer="a bare aiohttp handler on uvloop")
    made = table(2_000 if quick else 10_000)
    for workers in (1, 2):
        await _small_plans(report, folder, made, workers, rounds=1 if quick else 4, seconds=0.8 if quick else 2.0)
    await _pages(report, folder, table(2_000 if quick else 100_000), rounds=1 if quick else 5)
    report.notes.append(
        "One worker and the load have a core each. Two workers share both cores with the load, so that their rate is"
        " a lower bound. CPU is the server processes' own, by the scheduler's count."
    )
    return report


async def _small_plans(report: Report, folder: Path, made: Table, workers: int, rounds: int, seconds: float) -> None:
    again = plan(made, small(made))
    new = [plan(made, small(made, turn)) for turn in range(1, FILTERS_NEW)]
    with ExitStack() as running:
        ours = running.enter_context(seamark(folder, CACHE, workers=workers))
        await register(ours, made)
        body = (await ours.call(again)).body
        theirs = running.enter_context(bare(folder, body, workers=workers))
        if workers == 1:
            running.enter_context(on_core(LOAD_CORE))
        targets = (ours, theirs)

        async def same(target: Target, clients: int) -> Sample:
            return await drive(target, [repeat(again) for _ in range(clients)], seconds=seconds)

        async def changing(target: Target, clients: int) -> Sample:
            each = [_in_turn(new, client * len(new) // clients) for client in range(clients)]
            return await drive(target, each, seconds=seconds)

        kinds = {"the same plan": same, "a new filter": changing} if workers == 1 else {"the same plan": same}
        for kind, piece in kinds.items():
            await warm(targets, [partial(piece, clients=clients) for clients in CONNECTIONS], 1)
            for clients in CONNECTIONS:
                samples = await in_turns(targets, rounds, partial(piece, clients=clients))
                _rows(
                    report,
                    f"{kind}, {_many(clients, 'connection')}, {_many(workers, 'worker')}",
                    samples,
                    kind,
                    clients,
                )
    if workers == 1:
        report.notes.append(f"A small plan's answer: {body.count(FILE)} files, {len(body):,} bytes.")


def _rows(report: Report, case: str, samples: dict[str, list[Sample]], kind: str, clients: int) -> None:
    alone = clients == 1 and case.endswith("1 worker")
    cpu = CPU_GOAL_US if alone else None
    report.add(case, "server CPU", "µs", samples, lambda s: s.server_cpu_us, peer=BARE, goal=cpu)
    report.add(case, "p50", "ms", samples, lambda s: s.quantile(0.5), peer=BARE, goal=P50_GOAL_MS if alone else None)
    report.add(case, "p99", "ms", samples, lambda s: s.quantile(0.99), peer=BARE)
    report.add(case, "requests", "/s", samples, lambda s: s.rate, lower_is_better=False, peer=BARE)
    report.add_failures(case, samples)
    report.add_generator(case, samples)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _in_turn(wanted: Sequence[Request], start: int) -> Worker:
    """For ever, from `start` on."""
    yield from (wanted[number % len(wanted)] for number in itertools.count(start))


async def _pages(report: Report, folder: Path, made: Table, rounds: int) -> None:
    """The server runs here, on its core; the client is a process on the other."""
    with on_core(SERVER_CORE):
        async with seamark_here(folder, CACHE) as target:
            await register(target, made)
            await _client(target, made)  # loads the blocks
            idle = await _longest_while(asyncio.sleep(1.0))
            for coding in ("identity", "gzip"):
                found, pauses = [], []
                for _ in range(rounds):
                    async with _watched() as lag:
                        found.append(await _client(target, made, *(["--gzip"] if coding == "gzip" else [])))
                    pauses.append(max(lag))
                if any(one["files"] != made.files for one in found):
                    raise LoadError(f"{made.files} files were asked for, {found[0]['files']} came")
                _pages_rows(report, made, coding, found, pauses)
    report.notes.append(
        f"Pauses are how late a timer of 1 ms fires on the server's loop; with nothing to do the longest was {idle:.1f}"
        " ms. What other processes take from the core counts."
    )


def _pages_rows(report: Report, made: Table, coding: str, found: list[dict[str, Any]], pauses: list[float]) -> None:
    case = f"{made.files:,} files in pages, {coding}"
    pause = Row(
        case, "longest pause of the loop", "ms", {OURS: statistics.median(pauses)}, peer=BARE, goal=PAUSE_GOAL_MS
    )
    took = Row(case, "whole plan", "ms", {OURS: statistics.median(one["ms"] for one in found)}, peer=BARE)
    page = Row(case, "slowest page", "ms", {OURS: statistics.median(one["page_ms"] for one in found)}, peer=BARE)
    report.rows += [pause, took, page]
    report.notes.append(
        f"{case}: {found[0]['pages']} pages, {found[0]['bytes'] / 1e6:.1f} MB; longest pause by round:"
        f" {', '.join(f'{one:.1f}' for one in pauses)} ms."
    )


async def _client(target: Target, made: Table, *flags: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "bench.planning.pages", str(target.port), path_of(made), *flags]
    with on_core(LOAD_CORE):
        child = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    if child.returncode:
        raise LoadError(f"the client of pages ended with {child.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


@asynccontextmanager
async def _watched() -> AsyncIterator[list[float]]:
    """Collects how late the event loop wakes, in ms, while the block runs."""
    late: list[float] = [0.0]

    async def probe() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append((time.perf_counter() - before) * 1000 - 1)

    task = asyncio.create_task(probe())
    try:
        yield late
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _longest_while(work: Any) -> float:
    async with _watched() as late:
        await work
    return max(late)
