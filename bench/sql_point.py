"""How long does `seamark sql` take to find one row by its key in 10,000 files?

DuckDB's own Iceberg reader and a session of `seamark sql` run the same query alternately, each time for a new key.
Both must return the same row. The time is that of the caller, from the SQL text to the row. The benchmark also measures
the choice of the engine (analysis, translation and decision, without the requests for plans), and the number of files
that a case-insensitive search opens with and without an index on a function of the column.
"""

from __future__ import annotations

import re
import statistics
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from sqlglot import exp

import seamark.duckdb
from bench.duckdb_point import COLUMNS, DUCKDB_ALONE, FILES, KEYS, WARM
from bench.report import OURS, AnswersDiffer, Report, Row
from bench.ssb.queries import QUERIES
from bench.trino.points import NAMESPACE, ORDERED_COLUMN, ROWS, TABLE, compute_key, run_server_with_points
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.sql.choice import AUTO, DUCKDB, TRINO, StatementProfile, choose
from seamark.connector.sql.queries import translate
from seamark.connector.sql.session import SqlSession
from seamark.connector.sql.statement import parse
from seamark.connector.sql.types import BIGINT, VARCHAR, SqlType

RATIO_GOAL = 20
CHOICE_GOAL_MS = 5.0
_REPEATS = 20
_WITHOUT_INDEX = "without an index"
_FPP = 0.001
"""The false positive rate of the index."""


async def run(folder: Path, *, quick: bool = False) -> Report:
    files, keys = (40, 2) if quick else (FILES, KEYS)
    title = f"How long does the SQL entry take for one row of {files:,} files?"
    report = Report("sql_point", title, peer="DuckDB alone")
    with (
        run_server_with_points(files, folder / "seamark") as server,
        closing(seamark.duckdb.connect(server.base_url)) as con,
        SqlSession(server.base_url) as session,
    ):
        for column, case in COLUMNS.items():
            durations: dict[str, list[float]] = {DUCKDB_ALONE: [], OURS: []}
            numbers = np.random.default_rng([len(case), files]).choice(files * ROWS, WARM + keys, replace=False)
            for round_number, number in enumerate(numbers.tolist()):
                text = f"SELECT {ORDERED_COLUMN}, note FROM sea.{NAMESPACE}.{TABLE} WHERE {column} = "
                text += str(compute_key(column, number, files))
                for name in durations:
                    begun_s = time.perf_counter()
                    if name == OURS:
                        rows = [tuple(row.values()) for row in session.sql(text).to_arrow().to_pylist()]
                    else:
                        rows = con.sql(text).fetchall()
                    if round_number >= WARM:
                        durations[name].append(1000 * (time.perf_counter() - begun_s))
                    if rows != [(number, f"Note about {number}")]:
                        raise AnswersDiffer(f"{text}: {name} gave {rows}")
            medians = {name: statistics.median(each) for name, each in durations.items()}
            report.rows.append(
                Row(case, "a statement", "ms", medians, peer=DUCKDB_ALONE, goal=medians[DUCKDB_ALONE] / RATIO_GOAL)
            )
        report.rows.append(_measure_any_case(server.base_url, session, files))
    report.rows.append(_measure_slowest_choice())
    report.notes += [
        f"{files:,} files of {ROWS} rows, in the page cache; medians of {keys} keys, after {WARM} keys that are "
        "not counted.",
        "The choice: parse, translate and decide, for the slowest of the 13 queries of the Star Schema Benchmark.",
    ]
    return report


def _measure_any_case(url: str, session: SqlSession, files: int) -> Row:
    number = files * ROWS // 3
    text = f"SELECT {ORDERED_COLUMN} FROM {NAMESPACE}.{TABLE} WHERE lower(note) = 'note about {number}'"
    opened_files = {}
    for name in (_WITHOUT_INDEX, OURS):
        if name == OURS:
            with closing(IndexClient(url)) as client:
                client.put_index((NAMESPACE, TABLE), "note", kind="bloom", columns=["lower(note)"], fpp=_FPP)
                build(client, (NAMESPACE, TABLE), "note", InProcessWorkers())
        result = session.sql(text)
        opened_files[name] = float(result.explanation.tables[0].files)
        if (rows := result.to_arrow().num_rows) != 1:
            raise AnswersDiffer(f"{text}: {rows} rows")
    return Row(
        "a text in any case", "files opened", "files", opened_files, peer=_WITHOUT_INDEX, goal=1 + 2 * _FPP * files
    )


def _list_columns(node: exp.Table, names: set[str]) -> dict[str, SqlType]:
    prefix = {"lineorder": "lo_"}.get(node.name.lower(), f"{node.name[0].lower()}_")
    texts = {"d_yearmonth"} | {name for name in names if name[:2] in ("c_", "s_", "p_") and not name.endswith("key")}
    return {name: VARCHAR if name in texts else BIGINT for name in sorted(names) if name.startswith(prefix)}


def _measure_slowest_choice() -> Row:
    """Return the row of the slowest query. The time of a query is the median of several runs."""
    names = set(re.findall(r"\b(?:lo|c|s|p|d)_\w+", " ".join(QUERIES.values())))
    slowest = 0.0
    for text in QUERIES.values():
        durations = []
        for _ in range(_REPEATS):
            begun_s = time.perf_counter()
            statement = parse(text)
            translate(statement.tree, lambda node: _list_columns(node, names), datetime.now(UTC))
            choose(StatementProfile(statement.kind, 1), AUTO, frozenset({DUCKDB, TRINO}))
            durations.append(1000 * (time.perf_counter() - begun_s))
        slowest = max(slowest, statistics.median(durations))
    return Row("choice of the engine", "a statement", "ms", {OURS: slowest}, goal=CHOICE_GOAL_MS)
