"""How much faster are aggregate queries from a cube, and what does the cube cost?

The table is a fact table with the attributes of its dimensions, as in the flat form of the Star Schema Benchmark. Each
query runs alternately with and without the cube, in DuckDB through `seamark sql`, and both answers must be equal.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.targets import run_seamark
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.sql.cubes.plans import OFF
from seamark.connector.sql.session import SqlSession

FILES, ROWS = 10, 1_000_000
QUICK_FILES, QUICK_ROWS = 2, 100_000
NAMESPACE, TABLE = "bench", "sales"
WITHOUT_CUBE = "without the cube"
_ROWS_PER_GROUP_MIN = 5
"""The minimum number of rows for each group of the cube in large data files. The default of Seamark is 20."""
SPEEDUP_GOAL, SHARE_GOAL_PERCENT, REFRESH_GOAL_PERCENT = 20, 2.0, 3.0
P99_GOAL_MS, RATE_GOAL = 50.0, 200.0
_DAYS = 7 * 365
_FROM_CLAUSE = f"FROM {NAMESPACE}.{TABLE}"
QUERIES = {
    "revenue of a year by category": (
        f"SELECT category, sum(revenue) {_FROM_CLAUSE} WHERE year(day) = 1993 GROUP BY category"
    ),
    "profit by month and region": (
        f"SELECT date_trunc('month', day), region, sum(revenue - cost) {_FROM_CLAUSE} GROUP BY 1, 2"
    ),
    "best categories of a region": f"SELECT category, avg(revenue) a, count(*) {_FROM_CLAUSE} WHERE region = 'ASIA' "
    "GROUP BY category HAVING count(*) > 10 ORDER BY a DESC, category LIMIT 5",
    "total": f"SELECT sum(price * discount), count(*) {_FROM_CLAUSE} WHERE day >= DATE '1994-01-01'",
}
_TILE = {
    "namespace": [NAMESPACE],
    "table": TABLE,
    "dimensions": ["region"],
    "measures": ["sum(revenue)", "count(*)"],
    "where": "year(day) = 1995",
}
_REQUESTS, _CLIENTS, _REPEATS, _REFRESHES = 100, 4, 5, 3


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("index_cubes", "What does a cube save, and what does it cost?", peer="reading the rows")
    files, rows = (QUICK_FILES, QUICK_ROWS) if quick else (FILES, ROWS)
    with run_seamark(folder, {"SEAMARK_SQL": "on", "SEAMARK_SERVICES_WORKERS": "0"}) as server:
        url = server.base_url
        _append_files(url, files, rows)
        with closing(IndexClient(url)) as client:
            measures = ["sum(revenue)", "sum(revenue - cost)", "avg(revenue)", "sum(price * discount)"]
            columns = ["month(day)", "region", "category"]
            client.put_index(
                (NAMESPACE, TABLE),
                "by_month",
                kind="cube",
                columns=columns,
                measures=measures,
                shrink=_ROWS_PER_GROUP_MIN,
            )
            full_s = _build_cube(client)
            report.rows += _compare_queries(url, repeats=1 if quick else _REPEATS)
            stored_bytes = client.index((NAMESPACE, TABLE), "by_month").size_bytes
            report.rows.append(_measure_share(url, stored_bytes))
            report.rows += _measure_tiles(url, _CLIENTS if quick else _REQUESTS)
            refreshes_s = []
            for _ in range(1 if quick else _REFRESHES):
                _append_files(url, 1, max(1, files * rows // 100))
                refreshes_s.append(_build_cube(client))
            refresh_s = statistics.median(refreshes_s)
            goal = REFRESH_GOAL_PERCENT
            percent = 100 * refresh_s / full_s
            report.rows.append(
                Row("1 % new rows", "time of a refresh, in percent of a full build", "%", {OURS: percent}, goal=goal)
            )
            report.rows += _compare_queries(url, repeats=1, case=" after 1 % new rows")
    report.notes += [
        f"{files} files of {rows:,} rows, in the page cache; medians of {_REPEATS} runs, {_REFRESHES} refreshes."
    ]
    return report


def _append_files(url: str, files: int, rows: int) -> None:
    rng = np.random.default_rng(rows)
    start = (date(1992, 1, 1) - date(1970, 1, 1)).days
    with RestCatalog("sea", uri=url) as catalog:
        catalog.create_namespace_if_not_exists(NAMESPACE)
        for _ in range(files):
            data = pa.table(
                {
                    "day": pa.array((start + rng.integers(_DAYS, size=rows)).astype(np.int32)).cast(pa.date32()),
                    "region": pa.array(["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"]).take(
                        pa.array(rng.integers(5, size=rows))
                    ),
                    "category": pa.array([f"MFGR#{n}" for n in range(25)]).take(pa.array(rng.integers(25, size=rows))),
                    "customer": pa.array(rng.integers(30_000, size=rows)),
                    "price": pa.array(rng.integers(90_000, 10_000_000, size=rows)),
                    "discount": pa.array(rng.integers(11, size=rows).astype(np.int32)),
                    "revenue": pa.array(rng.integers(80_000, 10_000_000, size=rows)),
                    "cost": pa.array(rng.integers(50_000, 120_000, size=rows)),
                }
            )
            table = catalog.create_table_if_not_exists(f"{NAMESPACE}.{TABLE}", schema=data.schema)
            table.append(data)


def _build_cube(client: IndexClient) -> float:
    begun_s = time.perf_counter()
    build(client, (NAMESPACE, TABLE), "by_month", InProcessWorkers())
    return time.perf_counter() - begun_s


def _compare_queries(url: str, *, repeats: int, case: str = "") -> list[Row]:
    """Measure each query with and without the cube, and compare the answers.

    Args:
        case: A text that is appended to the names of the rows.
    """
    rows = []
    with SqlSession(url) as session, SqlSession(url, cubes=OFF) as plain_session:
        for name, text in QUERIES.items():
            took: dict[str, list[float]] = {OURS: [], WITHOUT_CUBE: []}
            answers = []
            for round_number in range(repeats + 1):  # The first round warms the caches and is not timed.
                for label, cube_session in ((OURS, session), (WITHOUT_CUBE, plain_session)):
                    begun_s = time.perf_counter()
                    result = cube_session.sql(text)
                    answer_rows = sorted(map(str, result.to_arrow().to_pylist()))
                    if round_number:
                        took[label].append(1000 * (time.perf_counter() - begun_s))
                    answers.append(answer_rows)
                    if label == OURS and (result.explanation.cube is None or result.explanation.cube.index is None):
                        raise AnswersDiffer(f"{text}: {result.explanation}")
            if any(other_rows != answers[0] for other_rows in answers):
                raise AnswersDiffer(f"{text}: {answers}")
            medians = {label: statistics.median(times) for label, times in took.items()}
            goal = medians[WITHOUT_CUBE] / SPEEDUP_GOAL
            rows.append(Row(name + case, "a statement", "ms", medians, peer=WITHOUT_CUBE, goal=goal))
    return rows


def _measure_share(url: str, stored_bytes: int) -> Row:
    with RestCatalog("sea", uri=url) as catalog:
        facts = sum(catalog.load_table(f"{NAMESPACE}.{TABLE}").inspect.files()["file_size_in_bytes"].to_pylist())
    return Row("size", "cube of the facts", "%", {OURS: 100 * stored_bytes / facts}, goal=SHARE_GOAL_PERCENT)


def _measure_tiles(url: str, requests: int) -> list[Row]:
    """Measure how long the server takes for a dashboard query (a tile).

    Args:
        requests: The number of requests. One client sends them, and then several clients send as many again.
    """

    def ask(_: int) -> float:
        begun_s = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/api/v1/aggregate", json.dumps(_TILE).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            if not json.load(answer)["cube"]["files"]:
                raise AnswersDiffer("a tile was not answered from the cube")
        return 1000 * (time.perf_counter() - begun_s)

    ask(0)
    times = [ask(number) for number in range(requests)]
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        list(pool.map(ask, range(requests)))
    rate = requests / (time.perf_counter() - begun_s)
    p99 = float(np.quantile(times, 0.99))
    case = "POST /api/v1/aggregate"
    return [
        Row(case, "p50", "ms", {OURS: statistics.median(times)}),
        Row(case, "p99", "ms", {OURS: p99}, goal=P99_GOAL_MS),
        Row(f"{case}, {_CLIENTS} clients", "requests", "/s", {OURS: rate}, lower_is_better=False, goal=RATE_GOAL),
    ]
