"""`python -m bench.index.run ssb_cubes`: the Star Schema Benchmark with and without cubes of the facts.

How much faster are the 13 queries through `seamark sql`, what do the cubes cost, and are answers exact after new rows?
DuckDB also reads the Parquet files of the facts directly, without a catalog. All answers must be equal.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
from pyiceberg.catalog.rest import RestCatalog

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.ssb.bounds import list_data_paths, open_facts
from bench.ssb.generate import TABLES, generate, get_table_path
from bench.ssb.queries import QUERIES
from bench.targets import run_seamark
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.lookups import pin_attributes
from seamark.connector.sql.cubes.plans import OFF
from seamark.connector.sql.session import SqlSession
from tests.services.process import CACHE

NAMESPACE, FACT = "ssb", "lineorder"
SCALE, QUICK_SCALE = float(os.environ.get("BENCH_SSB_SCALE", "1")), 0.01
"""The scale factor; 1 is 6 million facts."""
FACT_FILES = 6
WITHOUT, DUCKDB = "without cubes", "DuckDB on Parquet"
SPEEDUP_GOAL, SHARE_GOAL_PERCENT, REFRESH_GOAL_PERCENT = 20, 2.0, 3.0
_REPEATS = int(os.environ.get("BENCH_SSB_REPEATS", "2"))
_GROUP_REPEATS = 7
"""The number of runs of a query that is answered from a cube, which take little time."""
_KEYS = {
    "d": ("date", "lo_orderdate = d_datekey"),
    "c": ("customer", "lo_custkey = c_custkey"),
    "s": ("supplier", "lo_suppkey = s_suppkey"),
    "p": ("part", "lo_partkey = p_partkey"),
}
"""The dimension tables and the conditions of their joins, by the first letter of their columns."""
CUBES: dict[str, tuple[Sequence[str], str]] = {
    "discount_by_year": (("d_year", "lo_discount", "lo_quantity"), "sum(lo_extendedprice * lo_discount)"),
    "discount_by_month": (("d_yearmonthnum", "lo_discount", "lo_quantity"), "sum(lo_extendedprice * lo_discount)"),
    "discount_by_week": (
        ("d_year", "d_weeknuminyear", "lo_discount", "lo_quantity"),
        "sum(lo_extendedprice * lo_discount)",
    ),
    "by_brand": (("d_year", "p_category", "p_brand1", "s_region"), "sum(lo_revenue)"),
    "by_nation": (("d_year", "c_region", "c_nation", "s_region", "s_nation"), "sum(lo_revenue)"),
    "by_city": (("d_year", "c_nation", "c_city", "s_nation", "s_city"), "sum(lo_revenue)"),
    "by_maker": (("d_year", "c_region", "c_nation", "s_region", "p_mfgr"), "sum(lo_revenue - lo_supplycost)"),
    "by_category": (
        ("d_year", "c_region", "s_region", "s_nation", "p_mfgr", "p_category"),
        "sum(lo_revenue - lo_supplycost)",
    ),
}
"""The dimensions and the measure of each cube."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    scale, repeats = (QUICK_SCALE, 1) if quick else (SCALE, _REPEATS)
    report = Report(
        "ssb_cubes", "What do cubes save in the Star Schema Benchmark, and what do they cost?", peer=WITHOUT
    )
    data = generate(CACHE / "ssb", scale)
    with (
        run_seamark(folder, {"SEAMARK_SERVICES_WORKERS": "0"}) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        rows = _load(server.base_url, data)
        _define(client)
        full_s = _build(client)
        report.rows += _compare(client, data, repeats)
        report.rows.append(_measure_share(client))
        _append_rows(server.base_url, data, rows, rows // 100)
        report.rows += _compare(client, data, repeats, case=" after 1 % new rows")
        percent = 100 * _build(client) / full_s
        report.rows.append(
            Row("1 % new rows", "refresh of a full build", "%", {OURS: percent}, goal=REFRESH_GOAL_PERCENT)
        )
    report.notes.append(
        f"Scale factor {scale:g}: {rows:,} facts in {FACT_FILES} files, in the page cache; medians of {repeats} runs. "
        f"The full build of {len(CUBES)} cubes took {full_s:.1f} s."
    )
    return report


def _load(url: str, data: Path) -> int:
    """Append the tables, the facts by date into several files, and return the number of facts."""
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


def _append_rows(url: str, data: Path, rows: int, count: int) -> None:
    """Append some of the facts again."""
    facts = pq.read_table(get_table_path(data, FACT))
    with RestCatalog("sea", uri=url) as catalog:
        catalog.load_table(f"{NAMESPACE}.{FACT}").append(facts.slice(rows // 2, count))


def _define(client: IndexClient) -> None:
    for name, (columns, measure) in CUBES.items():
        terms = [
            column
            if column.startswith("lo_")
            else f"{NAMESPACE}.{_KEYS[column[0]][0]}.{column} via {_KEYS[column[0]][1]}"
            for column in columns
        ]
        pinned = pin_attributes(client, terms)
        client.put_index((NAMESPACE, FACT), name, kind="cube", columns=pinned, measures=[measure], shrink=5)


def _build(client: IndexClient) -> float:
    begun_s = time.perf_counter()
    for name in CUBES:
        build(client, (NAMESPACE, FACT), name, InProcessWorkers())
    return time.perf_counter() - begun_s


def _compare(client: IndexClient, data: Path, repeats: int, case: str = "") -> list[Row]:
    rows = []
    paths = list_data_paths(client, (NAMESPACE, FACT))
    with (
        SqlSession(client.url, schema=NAMESPACE) as session,
        SqlSession(client.url, schema=NAMESPACE, cubes=OFF) as plain_session,
        closing(open_facts(paths, data)) as db,
    ):
        for name, text in QUERIES.items():
            used = session.explain(text).cube
            cube = used.index if used is not None else None
            engines: dict[str, Callable[[str], list[Any]]] = {
                OURS: lambda sql: _read_rows(session, sql),
                WITHOUT: lambda sql: _read_rows(plain_session, sql),
                DUCKDB: lambda sql: _read_duckdb_rows(db, sql),
            }
            took: dict[str, list[float]] = {engine: [] for engine in engines}
            answers = []
            runs = dict.fromkeys(engines, repeats)
            runs[OURS] = _GROUP_REPEATS if cube is not None else repeats
            for engine, ask in engines.items():
                for round_number in range(runs[engine] + 1):
                    begun_s = time.perf_counter()
                    answer = ask(text)
                    if round_number:  # The first run fills caches.
                        took[engine].append(1000 * (time.perf_counter() - begun_s))
                    answers.append(answer)
            if any(answer != answers[0] for answer in answers):
                raise AnswersDiffer(f"{name}: {answers[0][:3]}, {answers[-1][:3]}")
            medians = {engine: statistics.median(times) for engine, times in took.items()}
            goal = medians[WITHOUT] / SPEEDUP_GOAL
            rows.append(Row(f"{name}{case}", cube or "no cube", "ms", medians, peer=WITHOUT, goal=goal))
    return rows


def _read_rows(session: SqlSession, text: str) -> list[Any]:
    table = session.sql(text).to_arrow()
    return sorted(map(str, zip(*(column.to_pylist() for column in table.columns), strict=True)))


def _read_duckdb_rows(db: duckdb.DuckDBPyConnection, text: str) -> list[Any]:
    return sorted(map(str, db.execute(text).fetchall()))


def _measure_share(client: IndexClient) -> Row:
    with RestCatalog("sea", uri=client.url) as catalog:
        sizes = catalog.load_table(f"{NAMESPACE}.{FACT}").inspect.files()["file_size_in_bytes"]
    stored_bytes = sum(client.index((NAMESPACE, FACT), name).size_bytes for name in CUBES)
    percent = 100 * stored_bytes / sum(sizes.to_pylist())
    return Row("size", "all cubes of the facts", "%", {OURS: percent}, goal=SHARE_GOAL_PERCENT)
