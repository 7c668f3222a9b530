"""How fast does a dashboard of 20 aggregate tiles load from `POST /api/v1/aggregate`?

The table has one file for each append. The server runs on one core, and the load generator on another. The tiles are
loaded in three ways: unchanged (a second load finds the answers in memory), with values of their conditions that no
earlier request had (every answer is computed), and immediately after a commit. DuckDB reads the same Parquet files
directly on both cores, and its answers must be equal.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterable
from contextlib import closing
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from pyiceberg.catalog.rest import RestCatalog

from bench.measure import Sample, Worker, drive_workers
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.targets import LOAD_CORE, BenchTarget, pin_to_core, run_seamark
from bench.wire import build_request
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build

FILES, ROWS = 100, 1_000_000
QUICK_FILES, QUICK_ROWS = 3, 250_000
NAMESPACE, TABLE = "bench", "events"
P99_GOAL_MS, RATE_GOAL = 50.0, 200.0
DUCKDB = "DuckDB on Parquet"
_CLIENTS, _SECONDS, _LOADS = 4, 10.0, 30
_DUCKDB_TILES, _CONTENTS = 5, 4
_START, _DAYS = date(1992, 1, 1), 7 * 365
REGIONS = ["AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"]
CATEGORIES = [f"MFGR#{number}" for number in range(25)]


def list_tiles(number: int) -> list[dict[str, Any]]:
    """Return 20 dashboard queries (tiles), as requests of `POST /api/v1/aggregate`.

    The values in their conditions and their limits depend on `number`, so another number gives queries that no cache
    has.
    """
    day = _START + timedelta(days=31 * (number % 60))
    year, region, category = 1992 + number % 7, REGIONS[number % 5], CATEGORIES[number % 25]
    since = f"day >= DATE '{date(day.year, day.month, 1)}'"
    revenue, rows, profit = "sum(revenue)", "count(*)", "sum(revenue - cost)"
    shapes: list[tuple[list[str], list[str], str | None]] = [
        ([], [revenue, rows], since),
        ([], ["avg(revenue)"], f"region = '{region}' AND {since}"),
        ([], ["max(revenue)", "min(revenue)"], f"year(day) = {year} AND {since}"),
        ([], [profit], f"category = '{category}' AND {since}"),
        (["region"], [revenue, rows], since),
        (["region"], [profit], f"year(day) = {year} AND {since}"),
        (["region"], ["avg(revenue)"], f"category IN ('{category}', 'MFGR#3') AND {since}"),
        (["region"], ["max(revenue)"], f"category <> '{category}' AND {since}"),
        (["category"], [revenue], since),
        (["category"], [rows], f"region = '{region}' AND {since}"),
        (["category"], [profit, rows], f"region IN ('{region}', 'ASIA') AND {since}"),
        (["category"], ["avg(revenue)"], f"year(day) = {year} AND region = '{region}' AND {since}"),
        (["month(day)"], [revenue], since),
        (["month(day)"], [rows], f"region = '{region}' AND {since}"),
        (["month(day)"], [profit], f"category = '{category}' AND {since}"),
        (["year(day)"], [revenue, profit], since),
        (["year(day)", "region"], [revenue], since),
        (["month(day)", "region"], [revenue], f"year(day) BETWEEN {year} AND {year + 1} AND {since}"),
        (["region", "category"], [revenue, rows], since),
        (["year(day)", "category"], [profit], f"region = '{region}' AND {since}"),
    ]
    return [
        {"namespace": [NAMESPACE], "table": TABLE, "dimensions": dimensions, "measures": measures, "where": where,
         "order": [{"by": measures[0], "descending": True}], "limit": 1000 + number}
        for dimensions, measures, where in shapes
    ]  # fmt: skip


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("index_dashboard", "How fast does a dashboard of 20 tiles load?", peer=DUCKDB)
    files, rows = (QUICK_FILES, QUICK_ROWS) if quick else (FILES, ROWS)
    with run_seamark(folder, {"SEAMARK_SQL": "on", "SEAMARK_SERVICES_WORKERS": "0"}) as server:
        begun_s = time.perf_counter()
        _append_events(server.base_url, files, rows)
        appended_s = time.perf_counter() - begun_s
        with closing(IndexClient(server.base_url)) as client:
            columns, measures = ["month(day)", "region", "category"], ["sum(revenue)", "sum(revenue - cost)"]
            measures += ["avg(revenue)", "max(revenue)", "min(revenue)"]
            client.put_index((NAMESPACE, TABLE), "by_month", kind="cube", columns=columns, measures=measures)
            build_s = _build_cube(client)
            with pin_to_core(LOAD_CORE):
                report.rows += await _measure_loads(server, quick=quick)
                _append_events(server.base_url, 1, rows)
                _build_cube(client)
                report.rows += await _measure_load_after_commit(server)
        report.rows += await _compare_with_duckdb(server, quick=quick)
    report.notes += [
        f"{files} files of {rows:,} rows, in the page cache; appends: {appended_s:.0f} s, cube: {build_s:.0f} s.",
        "A tile is one query of the dashboard.",
        f"Every {_CONTENTS}th file has the same rows. DuckDB uses both cores, and the server uses one core.",
        "New values: each request has a condition that no earlier request had.",
    ]
    return report


def _append_events(url: str, files: int, rows: int) -> None:
    rng = np.random.default_rng(files)
    contents = [_draw_rows(rng, rows) for _ in range(min(files, _CONTENTS))]
    with RestCatalog("sea", uri=url) as catalog:
        catalog.create_namespace_if_not_exists(NAMESPACE)
        table = catalog.create_table_if_not_exists(f"{NAMESPACE}.{TABLE}", schema=contents[0].schema)
        for number in range(files):
            table.append(contents[number % len(contents)])


def _draw_rows(rng: np.random.Generator, rows: int) -> pa.Table:
    start = (_START - date(1970, 1, 1)).days
    columns = {
        "day": pa.array((start + rng.integers(_DAYS, size=rows)).astype(np.int32)).cast(pa.date32()),
        "region": pa.array(REGIONS).take(pa.array(rng.integers(len(REGIONS), size=rows))),
        "category": pa.array(CATEGORIES).take(pa.array(rng.integers(len(CATEGORIES), size=rows))),
        "revenue": pa.array(rng.integers(80_000, 10_000_000, size=rows)),
        "cost": pa.array(rng.integers(50_000, 120_000, size=rows)),
    }
    return pa.table(columns)


def _build_cube(client: IndexClient) -> float:
    begun_s = time.perf_counter()
    build(client, (NAMESPACE, TABLE), "by_month", InProcessWorkers())
    return time.perf_counter() - begun_s


async def _measure_loads(server: BenchTarget, *, quick: bool) -> list[Row]:
    """Measure loads of the dashboard, whose 20 queries are its tiles.

    A number selects the values in the conditions of all queries.
    """
    loads_count, seconds = (2, 1.0) if quick else (_LOADS, _SECONDS)
    first_sample = await _drive_requests(server, [_request_tiles([0])])
    repeated_sample = await _drive_requests(server, [_request_tiles([0] * loads_count)])
    numbers = itertools.count(1)
    new_values_sample = await _drive_requests(server, [_request_tiles(itertools.islice(numbers, loads_count))])
    busy_new_values_sample = await _drive_requests(server, [_request_tiles(numbers) for _ in range(_CLIENTS)], seconds)
    busy_repeated_sample = await _drive_requests(
        server, [_request_tiles(itertools.repeat(0)) for _ in range(_CLIENTS)], seconds
    )
    return [
        Row("first load, groups not merged", "20 tiles", "ms", {OURS: sum(first_sample.latencies_ms)}),
        Row("a tile, loaded again", "p50", "ms", {OURS: repeated_sample.compute_quantile(0.5)}),
        Row("a tile, loaded again", "p99", "ms", {OURS: repeated_sample.compute_quantile(0.99)}, goal=P99_GOAL_MS),
        Row("a tile with new values", "p50", "ms", {OURS: new_values_sample.compute_quantile(0.5)}),
        Row("a tile with new values", "p99", "ms", {OURS: new_values_sample.compute_quantile(0.99)}, goal=P99_GOAL_MS),
        Row("a tile, loaded again", "CPU of the server", "ms", {OURS: busy_repeated_sample.server_cpu_us / 1000}),
        Row("a tile with new values", "CPU of the server", "ms", {OURS: busy_new_values_sample.server_cpu_us / 1000}),
        Row(
            "new values, 4 clients",
            "p99",
            "ms",
            {OURS: busy_new_values_sample.compute_quantile(0.99)},
            goal=P99_GOAL_MS,
        ),
        Row(
            "new values, 4 clients",
            "requests",
            "/s",
            {OURS: busy_new_values_sample.rate},
            lower_is_better=False,
            goal=RATE_GOAL,
        ),
        Row(
            "loaded again, 4 clients",
            "requests",
            "/s",
            {OURS: busy_repeated_sample.rate},
            lower_is_better=False,
            goal=RATE_GOAL,
        ),
    ]


async def _measure_load_after_commit(server: BenchTarget) -> list[Row]:
    """Measure the first load of the dashboard, 20 queries (tiles), after a commit."""
    sample = await _drive_requests(server, [_request_tiles([0])])
    return [
        Row("first load after a commit", "20 tiles", "ms", {OURS: sum(sample.latencies_ms)}),
        Row("first load after a commit", "slowest tile", "ms", {OURS: max(sample.latencies_ms)}),
    ]


async def _drive_requests(server: BenchTarget, workers: list[Worker], seconds: float = float("inf")) -> Sample:
    sample = await drive_workers(server, workers, seconds=seconds)
    if sample.failed:
        raise AnswersDiffer(f"{sample.failed} tiles failed: {sample.failures}")
    return sample


def _request_tiles(numbers: Iterable[int]) -> Worker:
    """Yield requests of the 20 dashboard queries (tiles), and check that the server answers them from the cube.

    Args:
        numbers: For each number, all queries are sent once. Their values depend on the number.
    """
    for number in numbers:
        for tile in list_tiles(number):
            answer = yield build_request("POST", "/api/v1/aggregate", tile)
            if answer.status == 200 and b'"engine":"cube"' not in answer.body:
                raise AnswersDiffer(f"{tile}: {answer.body[:500]!r}")


async def _compare_with_duckdb(server: BenchTarget, *, quick: bool) -> list[Row]:
    """Run some dashboard queries in Seamark and in DuckDB on the Parquet files, and return their times.

    Raises:
        AnswersDiffer: DuckDB returns another number of rows, or another last measure in the first row.
    """
    with RestCatalog("sea", uri=server.base_url) as catalog:
        table = catalog.load_table(f"{NAMESPACE}.{TABLE}")
        paths = [path.removeprefix("file://") for path in table.inspect.files()["file_path"].to_pylist()]
    times_ms: dict[str, list[float]] = {OURS: [], DUCKDB: []}
    with duckdb.connect() as con:
        con.read_parquet(paths).create_view("events")
        # A quick run compares only the first of the 20 queries, and other runs `_DUCKDB_TILES` of them.
        for tile in list_tiles(0)[:: 20 if quick else 20 // _DUCKDB_TILES]:
            begun_s = time.perf_counter()
            answer = (await server.call(build_request("POST", "/api/v1/aggregate", tile))).json()
            times_ms[OURS].append(1000 * (time.perf_counter() - begun_s))
            begun_s = time.perf_counter()
            rows = con.execute(_write_sql(tile)).fetchall()
            times_ms[DUCKDB].append(1000 * (time.perf_counter() - begun_s))
            if len(rows) != len(answer["rows"]) or rows[0][-1] != answer["rows"][0][-1]:
                raise AnswersDiffer(f"{tile}: {answer['rows'][:3]} instead of {rows[:3]}")
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    return [Row("tiles beside DuckDB", "median", "ms", medians, peer=DUCKDB)]


def _write_sql(tile: dict[str, Any]) -> str:
    """Return the query of a dashboard tile, which is an aggregate request, in DuckDB's SQL."""
    dimensions = [
        f"date_trunc('{unit}', day)" if (unit := text.partition("(")[0]) != text else text
        for text in tile["dimensions"]
    ]
    group = f" GROUP BY {', '.join(map(str, range(1, len(dimensions) + 1)))}" if dimensions else ""
    outputs = ", ".join([*dimensions, *tile["measures"]])
    first = len(dimensions) + 1
    return f"SELECT {outputs} FROM events WHERE {tile['where']}{group} ORDER BY {first} DESC LIMIT {tile['limit']}"
