"""How much memory does a server need with 10,000 tables?

The benchmark measures the resident memory of the whole server at three moments: after the start, after the creation of
10,000 tables (10 columns, 10 properties), and after a load of each table.
"""

from __future__ import annotations

from pathlib import Path

from bench import bodies
from bench.measure import drive_workers
from bench.report import Report, Row
from bench.targets import BenchTarget, start_targets
from bench.wire import Request, build_request

NAMESPACE = "many"
CLIENTS = 8


async def run(folder: Path, *, quick: bool = False) -> Report:
    count = 200 if quick else 10_000
    report = Report("memory", f"How much memory does a server hold with {count:,} tables?")
    moments = ("started", f"{count:,} tables created", "each loaded once")
    results: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    with start_targets(("seamark", "fixture"), folder) as targets:
        for target in targets:
            results[target.name], seconds[target.name] = await _fill_server(target, count)
    for number, moment in enumerate(moments):
        report.rows.append(Row(moment, "resident", "MB", {name: values[number] for name, values in results.items()}))
    report.notes.append(
        "Seconds to create them, by eight clients: "
        + ", ".join(f"{name} {took:.0f}" for name, took in seconds.items())
        + ". The fixture runs with -Xmx1g, and a JVM returns little of what it once took; Seamark's caches have a"
        " budget (setting metadata_cache_bytes)."
    )
    return report


async def _fill_server(target: BenchTarget, count: int) -> tuple[list[float], float]:
    """Create and load `count` tables.

    Returns:
        The resident memory in MB before the tables, after their creation and after their loads, and the seconds that
            the creation took.
    """
    await target.call(bodies.create_namespace((NAMESPACE,)))
    resident_mb = [target.read_rss_mb()]
    names = [f"t{n}" for n in range(count)]
    creation_s = await _drive_eight_clients(target, [bodies.create_table(NAMESPACE, name) for name in names])
    resident_mb.append(target.read_rss_mb())
    await _drive_eight_clients(
        target, [build_request("GET", bodies.build_table_path(NAMESPACE, name)) for name in names]
    )
    resident_mb.append(target.read_rss_mb())
    return resident_mb, creation_s


async def _drive_eight_clients(target: BenchTarget, requests: list[Request]) -> float:
    sample = await drive_workers(target, [(request for request in requests[n::CLIENTS]) for n in range(CLIENTS)])
    if sample.failed:
        raise RuntimeError(f"{target.name} failed {sample.failed} of {len(requests)} requests: {sample.failures[0]}")
    return sample.elapsed_s
