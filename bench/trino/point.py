"""How long does Trino take to find one row by its key in 10,000 files?

A client sends the same statement alternately to Trino and to the Trino proxy, each time for a new key; both must give
the same row. The time of a plan table is measured at the server, for a key that was not requested before, and again for
the same key.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import OURS, AnswersDiffer, Report, Row
from bench.targets import BenchTarget
from bench.trino.clients import StatementMeasurement, build_statement, run_statement_to_end
from bench.trino.points import (
    INDEX_KIND_BY_COLUMN,
    NAMESPACE,
    ONE_FILE_TABLE,
    ORDERED_COLUMN,
    ROWS,
    TABLE,
    compute_key,
    run_server_with_points,
)
from bench.trino.served import TRINO, run_both_targets
from bench.wire import Connection, LoadError, build_request

FILES, KEYS, PLANS = 10_000, 12, 200
WARM_QUERIES = 3
GOAL, PLAN_GOAL_MS = 20, 10.0
COLUMNS = {
    **{column: f"by {kind} index" for column, kind in INDEX_KIND_BY_COLUMN.items()},
    ORDERED_COLUMN: "by min and max, in order",
}


async def run(folder: Path, *, quick: bool = False) -> Report:
    files, keys, plans = (40, 2, 3) if quick else (FILES, KEYS, PLANS)
    report = Report("trino_point", f"How long does one row of {files:,} files take?", peer="Trino alone")
    with run_server_with_points(files, folder / "seamark") as server:
        target = BenchTarget(OURS, server.base_url, (server.pid,), folder)
        with run_both_targets(folder, server) as targets:
            for column, case in COLUMNS.items():
                await _measure_lookup(report, case, column, files, targets, keys)
                await _measure_plan(report, case, column, files, target, plans)
            report.bounds["a statement of Trino alone, over a table of one file"] = (
                f"{await _measure_without_proxy(targets[0], keys):.0f} ms"
            )
    report.notes += [
        f"{files:,} files of {ROWS} rows, in the page cache; medians of {keys} keys, after {WARM_QUERIES} keys that "
        "are not counted.",
        "By min and max, Trino alone leaves out the same files. There, Seamark only saves Trino the reading of all "
        "manifests.",
    ]
    return report


async def _measure_lookup(
    report: Report, case: str, column: str, files: int, targets: Sequence[BenchTarget], keys: int
) -> None:
    connections = {target.name: await Connection.open(target.port) for target in targets}
    results: dict[str, list[StatementMeasurement]] = {target.name: [] for target in targets}
    numbers = (
        np.random.default_rng([len(case), files]).choice(files * ROWS, WARM_QUERIES + keys, replace=False).tolist()
    )
    for round_number, number in enumerate(numbers):
        sql = f"SELECT {ORDERED_COLUMN}, note FROM {TABLE} WHERE {column} = {compute_key(column, number, files)}"
        for target in targets if round_number % 2 else reversed(targets):
            measurement = await run_statement_to_end(connections[target.name], build_statement(sql))
            rows = json.loads(measurement.last_page)["data"] if measurement.last_page else []
            if rows != [[number, f"Note about {number}"]]:
                raise AnswersDiffer(f"{target.name}: {sql} gave {rows}")
            if round_number >= WARM_QUERIES:
                results[target.name].append(measurement)
    for connection in connections.values():
        connection.close()
    values = {name: statistics.median(item.ms for item in result) for name, result in results.items()}
    goal = values[TRINO] / GOAL if column != ORDERED_COLUMN else None
    report.rows.append(Row(case, "a statement", "ms", values, peer=TRINO, goal=goal))
    plans = [result.plan_outcome for result in results[OURS] if not result.plan_outcome.startswith("rewritten")]
    if plans:
        report.notes.append(f"{case}: {len(plans)} of {keys} were not rewritten, such as: {plans[0]}")


async def _measure_without_proxy(trino: BenchTarget, keys: int) -> float:
    connection = await Connection.open(trino.port)
    sqls = [
        f"SELECT {ORDERED_COLUMN}, note FROM {ONE_FILE_TABLE} WHERE {ORDERED_COLUMN} = {number}"
        for number in range(WARM_QUERIES + keys)
    ]
    results = [await run_statement_to_end(connection, build_statement(sql)) for sql in sqls]
    connection.close()
    return statistics.median(result.ms for result in results[WARM_QUERIES:])


async def _measure_plan(report: Report, case: str, column: str, files: int, target: BenchTarget, plans: int) -> None:
    """Measure how long the server takes for a plan table of a new key, and for the same plan table again."""
    connection = await Connection.open(target.port)
    path = f"/api/v1/tables/{NAMESPACE}/{TABLE}/plan-tables"
    # No statement uses these keys: they are every second number, counted from the end.
    queries = [
        {"predicate": f"{column} = {compute_key(column, files * ROWS - 1 - 2 * number, files)}"}
        for number in range(plans)
    ]
    for measure, goal in (("a plan table, new", PLAN_GOAL_MS), ("the same plan table again", None)):
        before_s = target.read_cpu_s()
        durations = [await _measure_ms(connection, path, body) for body in queries]
        cpu_ms = 1000 * (target.read_cpu_s() - before_s) / plans
        report.rows.append(Row(case, f"{measure}, p50", "ms", {OURS: statistics.median(durations)}, goal=goal))
        report.rows.append(Row(case, f"{measure}, p90", "ms", {OURS: sorted(durations)[int(0.9 * plans)]}))
        report.rows.append(Row(case, f"{measure}, server CPU", "ms", {OURS: cpu_ms}))
    connection.close()


async def _measure_ms(connection: Connection, path: str, body: dict[str, Any]) -> float:
    started_s = time.perf_counter()
    answer = await connection.ask(build_request("POST", path, body))
    took_ms = 1000 * (time.perf_counter() - started_s)
    if answer.status != 200 or not answer.json()["name"]:
        raise LoadError(f"{body}: {answer.status} {answer.body[:500]!r}")
    return took_ms
