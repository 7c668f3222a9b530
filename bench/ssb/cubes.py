"""`python -m bench.index.run ssb_cubes` runs the Star Schema Benchmark with and without cubes of the facts.

How much faster are the 13 queries through `seamark sql` and through the Trino proxy, what do the cubes cost, and are
answers exact after new rows? DuckDB also reads the Parquet files of the facts directly, without a catalog. All answers
must be equal. Trino is left out if it is not installed (`make trino`), or with `BENCH_SSB_TRINO=0`.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
from pyiceberg.catalog.rest import RestCatalog

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.ssb.bounds import list_data_paths, open_facts
from bench.ssb.cube_definitions import CUBES, define_cubes
from bench.ssb.generate import TABLES, generate_ssb, get_table_path
from bench.ssb.queries import QUERIES, Oracle
from bench.targets import run_seamark
from bench.trino.asking import TrinoConnection
from seamark.commands.installation.java import find_java_25_home
from seamark.connector.client.indexes import IndexClient
from seamark.connector.cubes.summaries import ON
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.sql.cubes.plans import OFF
from seamark.connector.sql.session import SqlSession
from tests.services.process import CACHE
from tests.services.trino import JARS, trino_server
from tests.services.trino_proxy import run_trino_proxy

NAMESPACE, FACT = "ssb", "lineorder"
SCALE, QUICK_SCALE = float(os.environ.get("BENCH_SSB_SCALE", "1")), 0.01
"""The scale factor; 1 is 6 million facts."""
FACT_FILES = 6
WITHOUT, DUCKDB = "without cubes", "DuckDB on Parquet"
SPEEDUP_GOAL, SHARE_GOAL_PERCENT, REFRESH_GOAL_PERCENT = 20, 2.0, 3.0
_REPEATS = int(os.environ.get("BENCH_SSB_REPEATS", "2"))
_GROUP_REPEATS = 7
"""The number of runs of a query that is answered from a cube; these runs are short."""
_REFRESHES = 3
_BUDGET_MS = "5000"
"""The time limit in ms for the plans of a statement in the proxy."""
_CUBE_IN_HEADER = re.compile(r"; cube=([^:;]+):")


async def run(folder: Path, *, quick: bool = False) -> Report:
    scale, repeats = (QUICK_SCALE, 1) if quick else (SCALE, _REPEATS)
    report = Report(
        "ssb_cubes", "What do cubes save in the Star Schema Benchmark, and what do they cost?", peer=WITHOUT
    )
    data = generate_ssb(CACHE / "ssb", scale)
    with (
        run_seamark(folder, {"SEAMARK_SERVICES_WORKERS": "0"}) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        rows = _append_tables(server.base_url, data)
        define_cubes(client, (NAMESPACE, FACT), NAMESPACE)
        full_s = _build_cubes(client)
        report.rows += _compare_queries(client, data, repeats)
        if _has_trino():
            report.rows += _compare_in_trino(server.base_url, folder, data, repeats)
        cube_bytes, fact_bytes = _measure_sizes(client)
        percent = 100 * cube_bytes / fact_bytes
        report.rows.append(Row("size", "all cubes of the facts", "%", {OURS: percent}, goal=SHARE_GOAL_PERCENT))
        refreshes_s = []
        for number in range(1 if quick else _REFRESHES):
            _append_rows(server.base_url, data, rows, rows // 100)
            if number == 0:
                report.rows += _compare_queries(client, data, repeats, case=" after 1 % new rows")
            refreshes_s.append(_build_cubes(client))
        percent = 100 * statistics.median(refreshes_s) / full_s
        report.rows.append(
            Row("1 % new rows", "refresh of a full build", "%", {OURS: percent}, goal=REFRESH_GOAL_PERCENT)
        )
    report.notes.append(
        f"Scale factor {scale:g}: {rows:,} facts in {FACT_FILES} files, in the page cache; medians of {repeats} runs, "
        f"of {_GROUP_REPEATS} with a cube, and of {len(refreshes_s)} refreshes. "
        f"The full build of {len(CUBES)} cubes took {full_s:.1f} s, a refresh {statistics.median(refreshes_s):.2f} s. "
        f"The cubes have {cube_bytes / 1e6:.1f} MB, the files of the facts {fact_bytes / 1e6:.1f} MB."
    )
    return report


def _append_tables(url: str, data: Path) -> int:
    """Append the rows of all tables, and return the number of facts.

    The facts are in several files, ordered by date.
    """
    with RestCatalog("sea", uri=url) as catalog:
        catalog.create_namespace(NAMESPACE)
        for name in TABLES:
            rows = pq.read_table(get_table_path(data, name))
            table = catalog.create_table(f"{NAMESPACE}.{name}", schema=rows.schema)
            parts = FACT_FILES if name == FACT else 1
            size = -(-rows.num_rows // parts)
            for start in range(0, rows.num_rows, size):
                table.append(rows.slice(start, size))
        return int(rows.num_rows)  # The facts are the last of the tables.


def _append_rows(url: str, data: Path, rows: int, appended_rows: int) -> None:
    """Append `appended_rows` rows of the source file to the fact table again.

    The rows begin in the middle of the file, which has `rows` rows. The file is in the order of dates.
    """
    facts = pq.read_table(get_table_path(data, FACT))
    with RestCatalog("sea", uri=url) as catalog:
        catalog.load_table(f"{NAMESPACE}.{FACT}").append(facts.slice(rows // 2, appended_rows))


def _build_cubes(client: IndexClient) -> float:
    begun_s = time.perf_counter()
    with closing(InProcessWorkers()) as workers:
        for name in CUBES:
            build(client, (NAMESPACE, FACT), name, workers)
    return time.perf_counter() - begun_s


def _compare_queries(client: IndexClient, data: Path, repeats: int, case: str = "") -> list[Row]:
    """Run each query with cubes, without cubes and in DuckDB, and return the rows of the report.

    Raises:
        AnswersDiffer: An engine returns another answer.
    """
    rows = []
    first_runs_ms, plain_runs_ms = list[float](), list[float]()
    paths = list_data_paths(client, (NAMESPACE, FACT))
    with (
        SqlSession(client.url, schema=NAMESPACE) as session,
        SqlSession(client.url, schema=NAMESPACE) as explaining_session,
        SqlSession(client.url, schema=NAMESPACE, cubes=OFF) as plain_session,
        closing(open_facts(paths, data)) as db,
    ):
        for name, text in QUERIES.items():
            used_cube = explaining_session.explain(text).cube
            cube = used_cube.index if used_cube is not None else None
            engines: dict[str, Callable[[str], list[Any]]] = {
                OURS: lambda sql: _read_rows(session, sql),
                WITHOUT: lambda sql: _read_rows(plain_session, sql),
                DUCKDB: lambda sql: _read_duckdb_rows(db, sql),
            }
            times_ms: dict[str, list[float]] = {engine: [] for engine in engines}
            answers = []
            runs = dict.fromkeys(engines, repeats)
            runs[OURS] = _GROUP_REPEATS if cube is not None else repeats
            for engine, run_query in engines.items():
                for round_number in range(runs[engine] + 1):
                    begun_s = time.perf_counter()
                    answer = run_query(text)
                    wall_ms = 1000 * (time.perf_counter() - begun_s)
                    if round_number:  # The first run fills caches.
                        times_ms[engine].append(wall_ms)
                    elif engine == OURS and cube is not None:
                        first_runs_ms.append(wall_ms)
                    answers.append(answer)
            if any(answer != answers[0] for answer in answers):
                raise AnswersDiffer(f"{name}: {answers[0][:3]}, {answers[-1][:3]}")
            medians = {engine: statistics.median(times) for engine, times in times_ms.items()}
            goal = medians[WITHOUT] / SPEEDUP_GOAL
            rows.append(Row(f"{name}{case}", cube or "no cube", "ms", medians, peer=WITHOUT, goal=goal))
            if cube is not None:
                plain_runs_ms.append(medians[WITHOUT])
    sums_ms = {OURS: sum(first_runs_ms), WITHOUT: sum(plain_runs_ms)}
    rows.append(Row(f"queries with a cube{case}", "the first run of each", "ms", sums_ms, peer=WITHOUT))
    return rows


def _read_rows(session: SqlSession, text: str) -> list[Any]:
    table = session.sql(text).to_arrow()
    return sorted(map(str, zip(*(column.to_pylist() for column in table.columns), strict=True)))


def _read_duckdb_rows(db: duckdb.DuckDBPyConnection, text: str) -> list[Any]:
    return sorted(map(str, db.execute(text).fetchall()))


def _has_trino() -> bool:
    is_installed = find_java_25_home() is not None and any(JARS.glob("lib/trino-main-*.jar"))
    return is_installed and os.environ.get("BENCH_SSB_TRINO", "1") != "0"


def _compare_in_trino(url: str, folder: Path, data: Path, repeats: int) -> list[Row]:
    """Run each query through two proxies of one Trino, one with cubes and one without them."""
    rows, oracle = [], Oracle(data)
    with ExitStack() as stack:
        stack.callback(oracle.close)
        trino = stack.enter_context(trino_server(folder / "trino", uri=url, jvm=()))
        connections = {}
        for label, use in ((OURS, ON), (WITHOUT, OFF)):
            flags = ("--trino", trino.base_url, "--budget-ms", _BUDGET_MS, "--cubes", use)
            proxy = stack.enter_context(run_trino_proxy(folder / f"proxy-{use}", *flags, seamark=url))
            connections[label] = stack.enter_context(closing(TrinoConnection(proxy.url, trino.base_url)))
        for name, text in QUERIES.items():
            wall_ms: dict[str, list[float]] = {label: [] for label in connections}
            cube = "no cube"
            for label, connection in connections.items():
                runs = repeats
                while len(wall_ms[label]) <= runs:
                    answer = connection.ask(text, NAMESPACE)
                    if difference := oracle.describe_difference(text, answer.rows):
                        raise AnswersDiffer(f"{name} in Trino, {label}: {difference}")
                    wall_ms[label].append(answer.wall_ms)
                    if cube_match := _CUBE_IN_HEADER.search(answer.proxy_plan):
                        cube, runs = cube_match[1], _GROUP_REPEATS
                del wall_ms[label][0]  # The first run fills caches.
            medians = {label: statistics.median(times) for label, times in wall_ms.items()}
            goal = medians[WITHOUT] / SPEEDUP_GOAL
            rows.append(Row(f"{name} in Trino", cube, "ms", medians, peer=WITHOUT, goal=goal))
    return rows


def _measure_sizes(client: IndexClient) -> tuple[int, int]:
    """Return the bytes of all cubes, and the bytes of the facts."""
    with RestCatalog("sea", uri=client.url) as catalog:
        sizes = catalog.load_table(f"{NAMESPACE}.{FACT}").inspect.files()["file_size_in_bytes"]
    return sum(client.index((NAMESPACE, FACT), name).size_bytes for name in CUBES), sum(sizes.to_pylist())
