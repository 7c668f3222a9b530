"""What does the Trino proxy cost a statement that it cannot make faster?

One client with an open connection runs each statement alternately in Trino alone and through the proxy. The number of
requests for a statement differs from run to run, because Trino decides when it answers.

Memory is measured with Trino, and with a simulated coordinator (`upstream.py`) that is fast enough for a hundred
thousand statements. A tenth of these statements has its own condition, for which the proxy requests a plan. The proxy
limits the state that it keeps for statements, and after half of the statements the limits are reached.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from bench.report import OURS, Report, Row
from bench.targets import LOAD_CORE, SERVER_CORE, BenchTarget, pin_to_core
from bench.trino.clients import StatementMeasurement, build_statement, run_statement_to_end
from bench.trino.points import run_server_with_points
from bench.trino.served import TRINO, run_both_targets, run_proxy
from bench.trino.upstream import run_upstream
from bench.wire import Connection, LoadError
from tests.services.seamark import Seamark

GOAL_MS, GOAL_SHARE = 5.0, 1.03
"""The goals: the additional ms of a statement, and the ratio to Trino alone. Meeting one of them is enough."""
MEMORY_RATIO_MAX = 1.03
"""The maximum memory at the end, relative to the memory after half of the statements."""
FILES, RUNS, CLIENTS = 20, 250, 1000
WARM_REQUESTS = 30
CASES = {
    "SELECT 1": "SELECT 1",
    "a table, no condition": "SELECT count(*), max(price) FROM points",
    "a condition that no index knows": "SELECT count(*), max(price) FROM points WHERE note LIKE '%7%'",
    "a condition that all files hold": "SELECT count(*), max(price) FROM points WHERE in_record >= 0",
}
RESULT_BYTES, PAGE_BYTES = 1 << 30, 16 << 20
PROTOCOL_RUNS, QUICK_PROTOCOL_RUNS = 5000, 200
"""The number of measured statements with the simulated coordinator."""
QUICK_STATEMENTS_MAX = 1000
"""A run with fewer statements is a quick run."""
_PAGE_START_BYTES = 4096
"""The part of a page that contains the URL of the next page."""


async def run(
    folder: Path, *, quick: bool = False, statements: int = 5000, simulated_statements: int = 100_000
) -> Report:
    report = Report("trino_overhead", "What does the adapter cost a statement that it cannot help?", peer="Trino alone")
    runs, clients, size = (5, 20, PAGE_BYTES * 2) if quick else (RUNS, CLIENTS, RESULT_BYTES)
    if quick:
        statements, simulated_statements = 40, 200
    with run_server_with_points(FILES, folder / "seamark") as server:
        with run_both_targets(folder, server) as targets:
            for case, sql in CASES.items():
                await _compare_with_trino(report, case, sql, targets, runs)
            await _measure_many_clients(report, targets, clients)
            await _measure_repeats(report, "Trino", targets[1], statements, clients=8)
        await _measure_protocol(report, folder, server, simulated_statements, size)
    report.notes.append(
        "The adapter is Seamark's Trino proxy. "
        f"{runs} alternating runs of each statement, after {WARM_REQUESTS} as a warm-up, over a table of "
        f"{FILES} files. Coordinator, worker, proxy, Seamark and the client share the machine's cores. CPU is that of "
        "the proxy's process."
    )
    return report


# One client with an open connection


async def _compare_with_trino(report: Report, case: str, sql: str, targets: Sequence[BenchTarget], runs: int) -> None:
    """Measure a statement in Trino alone and through the proxy, in alternating order.

    The rounds with a negative number are a warm-up. The CPU time is that of the proxy, also while Trino alone is
    measured, when the proxy is idle.
    """
    seamark_target = targets[-1]
    connections = {target.name: await Connection.open(target.port) for target in targets}
    results: dict[str, list[StatementMeasurement]] = {target.name: [] for target in targets}
    statement_request, cpu_s = build_statement(sql), 0.0
    for number in range(-min(WARM_REQUESTS, runs), runs):
        for target in targets if number % 2 else reversed(targets):
            before_s = seamark_target.read_cpu_s()
            measurement = await run_statement_to_end(connections[target.name], statement_request)
            if number >= 0:
                cpu_s += seamark_target.read_cpu_s() - before_s
                results[target.name].append(measurement)
    for connection in connections.values():
        connection.close()
    for share in (0.5, 0.9, 0.99):
        values = {name: _compute_quantile([item.ms for item in result], share) for name, result in results.items()}
        goal = max(GOAL_SHARE * values[TRINO], values[TRINO] + GOAL_MS) if share == 0.5 else None
        report.rows.append(Row(case, f"p{share * 100:g}", "ms", values, peer=TRINO, goal=goal))
    pairs = zip(results[OURS], results[TRINO], strict=True)
    report.rows.append(
        Row(case, "additional time, median", "ms", {OURS: statistics.median(a.ms - b.ms for a, b in pairs)})
    )
    requests = {name: statistics.mean(item.requests for item in result) for name, result in results.items()}
    report.rows.append(Row(case, "requests", "", requests, peer=TRINO))
    report.rows.append(Row(case, "adapter's CPU", "ms", {OURS: 1000 * cpu_s / runs}, peer=TRINO))
    report.notes.append(f"{case}: {results[OURS][-1].plan_outcome.partition('; ms=')[0]}.")


def _compute_quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# Many clients and many statements


async def _measure_many_clients(report: Report, targets: Sequence[BenchTarget], clients: int) -> None:
    """Measure many concurrent clients with one connection and three statements each. Trino queues the statements."""
    case = f"{clients:,} clients at once"
    values: dict[str, dict[str, float]] = {}
    proxy_target = targets[-1]  # The other target is Trino alone.
    before_mb = proxy_target.read_rss_mb()
    for target in targets:
        latencies, failures = await _run_together(target, clients, [CASES["SELECT 1"]] * 3)
        values[target.name] = {"p50": _compute_quantile(latencies, 0.5), "p99": _compute_quantile(latencies, 0.99)}
        values[target.name]["failed"] = len(failures)
        if failures:
            report.notes.append(f"{case}: {target.name} failed {len(failures)}, such as {failures[0]}")
    for measure, unit in (("p50", "ms"), ("p99", "ms"), ("failed", "")):
        row = {name: value[measure] for name, value in values.items()}
        report.rows.append(Row(case, measure, unit, row, peer=TRINO, goal=0.0 if measure == "failed" else None))
    report.rows.append(Row(case, "memory of the Trino proxy, before", "MB", {OURS: before_mb}))
    report.rows.append(Row(case, "memory of the Trino proxy, after", "MB", {OURS: proxy_target.read_rss_mb()}))


async def _run_together(target: BenchTarget, clients: int, sqls: Sequence[str]) -> tuple[list[float], list[str]]:
    latencies: list[float] = []
    failures: list[str] = []

    async def client() -> None:
        try:
            connection = await Connection.open(target.port)
            try:
                for sql in sqls:
                    measurement = await run_statement_to_end(connection, build_statement(sql))
                    latencies.append(measurement.ms)
            finally:
                connection.close()
        except (LoadError, OSError) as error:
            failures.append(str(error))

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies or [0.0], failures


async def _measure_repeats(
    report: Report, upstream: str, seamark_target: BenchTarget, statements: int, clients: int
) -> float:
    """Run many statements through the proxy, report its memory, and return the statements per second.

    Args:
        upstream: The coordinator to which the proxy passes the statements, for the report.
    """
    remaining_statements, resident = iter(range(statements)), []
    step = max(1, statements // 10)

    async def client() -> None:
        connection = await Connection.open(seamark_target.port)
        for number in remaining_statements:
            if number % step == 0:
                resident.append(seamark_target.read_rss_mb())
            sql = CASES["SELECT 1"] if number % 10 else f"SELECT price FROM points WHERE note LIKE '%{number}%'"
            await run_statement_to_end(connection, build_statement(sql))
        connection.close()

    started_s = asyncio.get_running_loop().time()
    await asyncio.gather(*(client() for _ in range(clients)))
    took_s = asyncio.get_running_loop().time() - started_s
    case = f"{statements:,} statements, proxy in front of {upstream}"
    half_mb = resident[len(resident) // 2]
    report.rows.append(Row(case, "memory after a tenth", "MB", {OURS: resident[1]}))
    report.rows.append(Row(case, "memory after half", "MB", {OURS: half_mb}))
    report.rows.append(
        Row(case, "memory at the end", "MB", {OURS: seamark_target.read_rss_mb()}, goal=MEMORY_RATIO_MAX * half_mb)
    )
    return statements / took_s


# A simulated coordinator that runs no queries


async def _measure_protocol(report: Report, folder: Path, server: Seamark, statements: int, size: int) -> None:
    """Measure the proxy in front of a simulated coordinator, which only answers.

    The proxy has one core, and all other processes use the other core.
    """
    with ExitStack() as stack:
        with pin_to_core(LOAD_CORE):
            simulated_target = stack.enter_context(run_upstream(folder))
        with pin_to_core(SERVER_CORE):
            # The simulated coordinator has no access rules.
            proxied_target = stack.enter_context(run_proxy(folder, simulated_target, server.base_url, "--no-rules"))
        stack.enter_context(pin_to_core(LOAD_CORE))
        await _report_per_request(
            report,
            (simulated_target, proxied_target),
            runs=QUICK_PROTOCOL_RUNS if statements < QUICK_STATEMENTS_MAX else PROTOCOL_RUNS,
        )
        for pages in (size // PAGE_BYTES, 1):
            await _measure_pages(report, (simulated_target, proxied_target), pages, size // pages)
        rate = await _measure_repeats(report, "a simulated coordinator", proxied_target, statements, clients=8)
    report.notes.append(
        f"With a simulated coordinator, eight clients ran {rate:,.0f} statements per second, a tenth with a condition."
    )


async def _report_per_request(report: Report, targets: Sequence[BenchTarget], runs: int) -> None:
    """Measure the time and the CPU time of a request to the simulated coordinator, and to the proxy in front of it.

    The proxy is the last target.
    """
    case, statement_request = "SELECT 1, simulated coordinator", build_statement("SELECT 1")
    values: dict[str, float] = {}
    cpu_us = 0.0
    for target in targets:
        connection = await Connection.open(target.port)
        for _ in range(runs // 10):
            await run_statement_to_end(connection, statement_request)
        before_s = target.read_cpu_s()
        results = [await run_statement_to_end(connection, statement_request) for _ in range(runs)]
        requests = sum(result.requests for result in results)
        values[target.name] = 1000 * sum(result.ms for result in results) / requests
        cpu_us = 1e6 * (target.read_cpu_s() - before_s) / requests
        connection.close()
    report.rows.append(Row(case, "a request", "µs", values, peer=targets[0].name))
    # `cpu_us` is that of the last target, the proxy.
    report.rows.append(Row(case, "adapter's CPU a request", "µs", {OURS: cpu_us}))


async def _measure_pages(report: Report, targets: Sequence[BenchTarget], pages: int, page_bytes: int) -> None:
    """Measure the bytes per second of a large result, and the growth of the proxy's memory.

    The proxy is the last target.
    """
    case = f"{pages * page_bytes >> 20:,} MB in {pages} page{'s' * (pages > 1)}"
    rates: dict[str, float] = {}
    for target in targets:
        async with _watch_peak_mb(target) as peak_mb:
            seconds, size = await _drain_statement(target, f"{pages} {page_bytes}")
        if size < pages * page_bytes:
            raise LoadError(f"{target.name} gave {size} bytes of {pages * page_bytes}")
        rates[target.name] = size / seconds / 1e6
        memory_growth_mb = peak_mb()
    report.rows.append(Row(case, "throughput", "MB/s", rates, lower_is_better=False, peer=targets[0].name))
    report.rows.append(Row(case, "adapter's memory, more at the peak", "MB", {OURS: memory_growth_mb}, goal=16.0))


async def _drain_statement(target: BenchTarget, sql: str) -> tuple[float, int]:
    """Read all bodies of a statement without keeping them, and return the seconds and the number of bytes."""
    loop = asyncio.get_running_loop()
    started_s, size = loop.time(), 0
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 20)
    raw = build_statement(sql).raw
    while raw:
        writer.write(raw)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        page_start = b""
        async for chunk in _read_chunks(reader, head):
            page_start = page_start or chunk[:_PAGE_START_BYTES]
            size += len(chunk)
        offset = page_start.find(b"/v1/statement/executing/")
        raw = (
            b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % page_start[offset : page_start.index(b'"', offset)]
            if offset >= 0
            else b""
        )
    writer.close()
    return loop.time() - started_s, size


async def _read_chunks(reader: asyncio.StreamReader, head: bytes) -> AsyncIterator[bytes]:
    if b"chunked" not in head:
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        while length:
            chunk = await reader.read(min(length, 1 << 18))
            length -= len(chunk)
            yield chunk
        return
    while length := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(length + 2))[:-2]
    await reader.readexactly(2)


@asynccontextmanager
async def _watch_peak_mb(target: BenchTarget) -> AsyncIterator[Callable[[], float]]:
    """Yield a function that returns the largest growth of the memory in MB."""
    first_mb = peak = target.read_rss_mb()

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, target.read_rss_mb())
            await asyncio.sleep(0.01)

    watch_task = asyncio.create_task(watch())
    try:
        yield lambda: peak - first_mb
    finally:
        watch_task.cancel()
