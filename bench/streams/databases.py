"""How many rows does a server acknowledge with PostgreSQL, compared with SQLite?

Each append reads the table's pointer. With SQLite, the server reads it again only after a commit. PostgreSQL has no
number of commits, so its pointer is read for the appends that arrive together. The log and the writers are the same.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from bench.measure import read_cpu_s
from bench.report import OURS, Report, Row
from bench.streams.appends import measure_requests
from seamark.connector.client.catalog import create_namespace
from seamark.connector.client.client import SeamarkClient
from tests.services.postgres import postgres_server
from tests.services.seamark import Seamark

PEER = "SQLite"
CASES = ((1, 1), (1, 32), (10, 1), (10, 32))
"""The rows of a batch, and the writers."""
ROUNDS, QUICK_ROUNDS = 3, 1
SECONDS, QUICK_SECONDS = 2.0, 0.2


async def run(folder: Path, *, quick: bool = False) -> Report:
    """Measure both databases alternately, and report the best round of each."""
    seconds = QUICK_SECONDS if quick else SECONDS
    report = Report("streams_databases", "How many rows does a server acknowledge with PostgreSQL?", peer=PEER)
    with ExitStack() as stack:
        postgres = stack.enter_context(postgres_server())
        servers = {
            OURS: stack.enter_context(Seamark(folder / "postgres", database=postgres.create_database())),
            PEER: stack.enter_context(Seamark(folder / "sqlite")),
        }
        for server in servers.values():
            create_namespace(SeamarkClient(server.base_url), "bench", {})
        for rows, writers in CASES:
            rates = dict.fromkeys(servers, 0.0)
            medians_ms = dict.fromkeys(servers, float("inf"))
            cpu_us = dict.fromkeys(servers, float("inf"))
            for number in range(QUICK_ROUNDS if quick else ROUNDS):
                for name, server in servers.items():
                    database_cpu_s = read_cpu_s(postgres.process.pid)
                    measured = await measure_requests(server, rows, 100, writers, seconds, suffix=f"_{number}")
                    database_cpu_s = read_cpu_s(postgres.process.pid) - database_cpu_s
                    rates[name] = max(rates[name], measured.rate * rows)
                    medians_ms[name] = min(medians_ms[name], measured.compute_quantile_ms(0.5))
                    spent_s = measured.cpu_s + (database_cpu_s if name == OURS else 0.0)
                    cpu_us[name] = min(cpu_us[name], 1e6 * spent_s / len(measured.latencies_s))
            case = f"{rows:,} rows, {writers} writers"
            report.rows += [
                Row(case, "acknowledged", "rows/s", dict(rates), False, PEER),
                Row(case, "p50", "ms", dict(medians_ms), peer=PEER),
                Row(case, "CPU of a request", "µs", dict(cpu_us), peer=PEER),
            ]
    report.notes += [
        f"{seconds:g} s a case and round, JSON rows of 100 B, the best round of each database. The column of Seamark "
        "is PostgreSQL on the same machine. CPU includes PostgreSQL's.",
    ]
    return report
