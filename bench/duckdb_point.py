"""How long does DuckDB take to find one row by its key in 10,000 files?

DuckDB's own Iceberg reader and `seamark.duckdb.sql` run the same statement alternately over one connection, each time
for another key. Both must give the same row. The time is that of the caller, from the text to the row.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from pathlib import Path

import numpy as np

import seamark.duckdb
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.trino.points import (
    INDEX_KIND_BY_COLUMN,
    NAMESPACE,
    ORDERED_COLUMN,
    ROWS,
    TABLE,
    compute_key,
    run_server_with_points,
)

FILES, KEYS, WARM = 10_000, 5, 1
"""The number of files, of measured keys for each column, and of keys before the measurement."""
DUCKDB_ALONE = "duckdb"
GOAL = 20
"""The goal: how many times faster than DuckDB alone."""
COLUMNS = {
    **{column: f"by {kind} index" for column, kind in INDEX_KIND_BY_COLUMN.items()},
    ORDERED_COLUMN: "by min and max, in order",
}


async def run(folder: Path, *, quick: bool = False) -> Report:
    files, keys = (40, 2) if quick else (FILES, KEYS)
    report = Report("duckdb_point", f"How long does DuckDB take for one row of {files:,} files?", peer="DuckDB alone")
    with (
        run_server_with_points(files, folder / "seamark") as server,
        closing(seamark.duckdb.connect(server.base_url)) as con,
    ):
        ways = {DUCKDB_ALONE: con.sql, OURS: lambda text: seamark.duckdb.sql(con, text)}
        for column, case in COLUMNS.items():
            durations: dict[str, list[float]] = {name: [] for name in ways}
            numbers = np.random.default_rng([len(case), files]).choice(files * ROWS, WARM + keys, replace=False)
            for round_number, number in enumerate(numbers.tolist()):
                key = compute_key(column, number, files)
                text = f"SELECT {ORDERED_COLUMN}, note FROM sea.{NAMESPACE}.{TABLE} WHERE {column} = {key}"
                for name, run_text in ways.items():
                    begun_s = time.perf_counter()
                    rows = run_text(text).fetchall()
                    if round_number >= WARM:
                        durations[name].append(1000 * (time.perf_counter() - begun_s))
                    if rows != [(number, f"Note about {number}")]:
                        raise AnswersDiffer(f"{text}: {name} gave {rows}")
            medians = {name: statistics.median(each) for name, each in durations.items()}
            report.rows.append(
                Row(case, "a statement", "ms", medians, peer=DUCKDB_ALONE, goal=medians[DUCKDB_ALONE] / GOAL)
            )
    report.notes += [
        f"{files:,} files of {ROWS} rows, in the page cache; medians of {keys} keys, after {WARM} keys that are "
        "not counted.",
        "By min and max, DuckDB alone leaves out the same files. There, Seamark only saves DuckDB the reading of "
        "all manifests.",
    ]
    return report
