"""Joins on ranges of time and joins with alternatives, compared with DuckDB's joins of the rows.

A plan keeps each file with a row that the join returns. Files have one to three rows, so that bounds prune most of
the other files.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from seamark.metaserver.planner.joins import periods, ranges
from tests.api.client import Api
from tests.planner.lakes.indexing import build_array
from tests.planner.lakes.kinds import FLOATS
from tests.planner.lakes.manifests import PartitionField
from tests.planner.lakes.stars import Col, Row, StarTable
from tests.seeds import first_seed
from tests.server.rig import run_server

DAY_US = 86_400_000_000
DAYS = [-400, -1, 0, 1, 30, 31, 59, 365, 366, 18_262, 18_292, 18_293, 18_322, 18_628]
"""Days since 1970 near the beginnings of months and years, also before 1970."""
FACT = {"ts": "timestamp", "tz": "timestamptz", "d": "date", "f1": "int", "f2": "long", "c": "int"}
KEY_COLUMNS = {
    "amount": "decimal(9, 2)",
    "wide": "decimal(30, 4)",
    "text": "string",
    "real": "float",
    "double": "double",
}
"""Further columns of the fact table, which are compared in the order of their keys."""
DIMENSIONS = {
    "days": {"day": "date", "start": "timestamp", "year": "int", "x": "int", "last": "date", "end": "timestamp"},
    "one": {"k": "int", "x": "int", "until": "int"},
    "two": {"k": "long", "x": "int", "until": "long"},
    "limits": {
        "x": "int",
        **{"amount_start": "decimal(9, 2)", "amount_end": "decimal(12, 2)", "wide_start": "decimal(38, 4)"},
        **{"wide_end": "decimal(30, 4)", "text_start": "string", "text_end": "string", "real_start": "double"},
        **{"real_end": "float", "double_start": "float", "double_end": "double"},
    },
}
PERIODS = [
    *((column, "day", "day", f"CAST({column} AS DATE)") for column in ("ts", "tz")),
    *((column, unit, "day", f"date_trunc('{unit}', {column})") for column in ("ts", "d") for unit in ("month", "year")),
    *(("ts", unit, "start", f"date_trunc('{unit}', ts)") for unit in ("hour", "day", "month", "year")),
    *((column, "year", "year", f"year({column})") for column in ("ts", "tz", "d")),
]
"""Column, transform, the other table's column, and the expression in DuckDB."""
EQUAL_CONDITIONS = [
    *(("d", "days", other) for other in ("day", "start")),
    *(("ts", "days", other) for other in ("day", "start")),
    *((column, dimension, "k") for column in ("f1", "f2", "c") for dimension in ("one", "two")),
]
"""Column, and the other table with a column that it is compared with."""
RANGE_CONDITIONS = [
    *EQUAL_CONDITIONS,
    *((column, "limits", f"{column}_start") for column in KEY_COLUMNS for _ in range(3)),
]
ENDS = {"days": ["last", "end"], "one": ["until"], "two": ["until"]}
"""Columns that end a range."""
OPERATORS = ["<", "<=", ">", ">="]
FILTERS = {
    "lt": "x < {}",
    "gt-eq": "x >= {}",
    "eq": "x = {}",
    "not-eq": "x IS DISTINCT FROM {}",
}
"""Filters as Iceberg and DuckDB have them."""


def draw_value(rng: random.Random, kind: str) -> int | float | str | None:
    if rng.random() < 0.1:
        return None
    day = rng.choice(DAYS)
    if kind == "date":
        return day
    if kind.startswith("timestamp"):
        return day * DAY_US + rng.choice([0, 0, 1, 3_600_000_000, DAY_US - 1])
    if kind == "string":
        # All values have a common prefix, and some values are prefixes of others.
        return "täg-" + "".join(rng.choice("ab😀z") for _ in range(rng.randint(0, 3)))
    if kind in FLOATS:
        return rng.choice([-math.inf, -1.5, -0.0, 0.0, 0.1, 0.1, 1.5, 1e30, math.inf, math.nan])
    if kind.startswith("decimal"):
        unit = 10**20 if kind in ("decimal(30, 4)", "decimal(38, 4)") else 1
        return rng.randint(-6, 6) * unit + rng.randint(0, 1)
    return rng.randint(0, 6)


def draw_row(rng: random.Random, columns: dict[str, str]) -> Row:
    row = {name: draw_value(rng, kind) for name, kind in columns.items()}
    if "year" in row and row["year"] is not None:
        row["year"] = 1969 + rng.choice([0, 1, 2, 50, 51, 52])
    return row


async def create_table(rng: random.Random, api: Api, name: str, columns: dict[str, str], files: int) -> StarTable:
    cols = [Col(number, column, kind) for number, (column, kind) in enumerate(columns.items(), 1)]
    parts = [PartitionField(1000, "p", 3, "identity")] if "d" in columns and rng.random() < 0.3 else []
    table = await StarTable.create(api, name, cols, parts=parts)
    made_files = []
    for _ in range(files):
        rows = [draw_row(rng, columns) for _ in range(rng.randint(1, 3))]
        for row in rows if parts else ():  # All rows of a file are in one partition.
            row["d"] = rows[0]["d"]
        made_files.append(table.write_file(rows))
    await table.commit(made_files)
    for file in made_files if rng.random() < 0.3 else ():
        numbers = [number for number in range(len(table.rows[file.path])) if rng.random() < 0.5]
        if numbers:
            await table.commit(deletes=[table.write_position_deletes(file, numbers)])
    return table


def store_in_duckdb(con: duckdb.DuckDBPyConnection, name: str, table: StarTable) -> None:
    rows = [
        (number, row)
        for number, file in enumerate(table.data)
        for position, row in enumerate(table.rows[file.path])
        if position not in table.deleted_positions.get(file.path, ())
    ]
    columns = {"file": pa.array([number for number, _ in rows], pa.int64())}
    for column in table.columns:
        columns[column.name] = build_array(column.kind, [row[column.name] for _, row in rows])
    con.register("arrow", pa.table(columns))
    con.execute(f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM arrow")


def draw_join(rng: random.Random, names: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Return a random join as JSON of a plan request, and as a condition in DuckDB."""
    request: dict[str, Any]
    draw = rng.random()
    if draw < 0.25:
        return draw_extreme_join(rng, names)
    if draw < 0.5:
        return draw_range_join(rng, names)
    if rng.random() < 0.5:
        column, transform, period_column, expression = rng.choice(PERIODS)
        dimension, condition = "days", f"{expression} = o.{period_column}"
        request = {"on": {column: period_column}, "transform": transform}
    else:
        dimension = rng.choice(["one", "two"])
        column = rng.choice(["f1", "f2", "c"])
        request, condition = {"on": {column: "k"}}, f"{column} = o.k"
    if rng.random() < 0.7:
        request["predicate"] = f"x {rng.choice(['=', '<', '>='])} {rng.randint(0, 6)}"
        condition += f" AND o.{request['predicate']}"
    sql_condition = f"EXISTS (SELECT 1 FROM {dimension} o WHERE {condition})"
    if rng.random() < 0.3:
        number = rng.randint(0, 6)
        request["unless"] = {"type": "eq", "term": "c", "value": number}
        sql_condition = f"({sql_condition} OR c = {number})"
    return {**request, "table": ["db", names[dimension]]}, sql_condition


def draw_extreme_join(rng: random.Random, names: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Return a comparison with the minimum or maximum of a dimension's column, of all rows or of filtered rows.

    Returns:
        The comparison as JSON of a plan request, and as a condition with a subquery in DuckDB. If the request is not
        `exact`, its filter selects more rows than the subquery.
    """
    column, dimension, dimension_column = rng.choice(EQUAL_CONDITIONS)
    extreme, op = rng.choice(["min", "max"]), rng.choice(["=", *OPERATORS])
    is_exact = rng.random() < 0.7
    request: dict[str, Any] = {
        "on": {column: dimension_column},
        "transform": extreme,
        "operator": op,
        "exact": is_exact,
    }
    rows = dimension
    if rng.random() < 0.7:
        kind, value = rng.choice(list(FILTERS)), rng.randint(0, 6)
        request["filter"] = {"type": kind, "term": "x", "value": value}
        rows += f" WHERE {FILTERS[kind].format(value)}"
    if not is_exact:
        rows = f"(SELECT * FROM {rows}) WHERE x >= {rng.randint(0, 4)}"
    request["table"] = ["db", names[dimension]]
    return request, f"{column} {op} (SELECT {extreme}({dimension_column}) FROM {rows})"


def draw_range_join(rng: random.Random, names: dict[str, str]) -> tuple[dict[str, Any], str]:
    column, dimension, start_column = rng.choice(RANGE_CONDITIONS)
    op = rng.choice(OPERATORS)
    request: dict[str, Any] = {"on": {column: start_column}, "transform": "range", "operator": op}
    condition = f"{column} {op} o.{start_column}"
    if op in (">", ">=") and rng.random() < 0.7:
        end_column, end_op = rng.choice(ENDS.get(dimension, [f"{column}_end"])), rng.choice(["<", "<="])
        request |= {"end": end_column, "end-operator": end_op}
        condition += f' AND {column} {end_op} o."{end_column}"'
    if rng.random() < 0.7:
        request["predicate"] = f"x {rng.choice(['=', '<', '>='])} {rng.randint(0, 6)}"
        condition += f" AND o.{request['predicate']}"
    request["table"] = ["db", names[dimension]]
    return request, f"EXISTS (SELECT 1 FROM {dimension} o WHERE {condition})"


def draw_joins(rng: random.Random, names: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    requests, conditions = [], []
    for number in range(rng.randint(1, 2)):
        alternatives = [draw_join(rng, names) for _ in range(rng.choice([1, 1, 2, 3]))]
        if len(alternatives) > 1:
            requests += [{**join, "any-of": number} for join, _ in alternatives]
        else:
            requests += [join for join, _ in alternatives]
        conditions.append("(" + " OR ".join(condition for _, condition in alternatives) + ")")
    return requests, " AND ".join(conditions)


async def check_star(seed: str, api: Api, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    """Compare the files that plans with random joins keep with the files of the rows that DuckDB joins.

    Plans must keep the files with joined rows. `counts` gets the number of plans, of files with joined rows (matching),
    of kept files and of all files, and how often each kind of join was used.
    """
    rng = random.Random(seed)
    # With a small limit, the planner merges the ranges of the joined values, so that it keeps more files.
    monkeypatch.setattr(periods, "RANGES_MAX", rng.choice([1, 2, 200]))
    monkeypatch.setattr(ranges, "RANGES_MAX", rng.choice([1, 2, 200]))
    table_names = {name: f"{name}_{seed.replace('/', '_')}" for name in ("fact", *DIMENSIONS)}
    fact = await create_table(rng, api, table_names["fact"], {**FACT, **KEY_COLUMNS}, 30)
    con = duckdb.connect()
    con.execute("SET TimeZone = 'UTC'")
    store_in_duckdb(con, "fact", fact)
    for name, columns in DIMENSIONS.items():
        store_in_duckdb(con, name, await create_table(rng, api, table_names[name], columns, rng.choice([0, 1, 2, 5])))
    numbers_by_path = {file.path: number for number, file in enumerate(fact.data)}
    for _ in range(24):
        requests, condition = draw_joins(rng, table_names)
        answer = await api(
            "POST", f"/api/v1/tables/db/{table_names['fact']}/explain", {"joins": requests, "files": True}
        )
        assert answer.status == 200, (seed, answer.raw, requests)
        used_transforms = {
            join_request.get("transform", "equal")
            for join_request, outcome in zip(requests, answer.json["joins"], strict=True)
            if outcome["used"]
        }
        # A join with the least or greatest value of a column is not used if there is no such value.
        has_extremes = any(item.get("transform") in ("min", "max") for item in requests)
        assert has_extremes or all(join["used"] for join in answer.json["joins"]), (
            seed,
            answer.json["joins"],
            requests,
        )
        counts += Counter(used_transforms)
        counts += Counter(next(iter(item["on"])) for item in requests if item.get("transform") == "range")
        kept_numbers = {numbers_by_path[item["file-path"]] for item in answer.json["kept"]}
        expected = {file for (file,) in con.execute(f"SELECT DISTINCT file FROM fact WHERE {condition}").fetchall()}
        assert expected <= kept_numbers, f"{seed}: {expected - kept_numbers} are lost\n{requests}\n{condition}"
        counts += Counter(plans=1, matching=len(expected), kept=len(kept_numbers), files=len(numbers_by_path))


async def run_campaign(seed: int, stars: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    async with run_server(folder) as server:
        for number in range(stars):
            await check_star(f"{seed}/{number}", Api(server), monkeypatch, counts)
    assert counts["matching"] > 0
    assert all(counts[transform] > 0 for transform in ("min", "max", "range", "day", "equal")), counts
    assert sum(counts[column] for column in KEY_COLUMNS) > 5 * stars, counts
    assert counts["kept"] < 0.9 * counts["files"], counts


async def test_plan_keeps_the_rows_that_duckdb_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await run_campaign(first_seed(), 2, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_plans_keep_the_rows_that_duckdb_joins_in_many_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_campaign(first_seed() + 1, 60, tmp_path, monkeypatch)


async def test_extreme_of_some_rows_is_bounded_by_files_in_which_all_rows_match(tmp_path: Path) -> None:
    """The planner compares bounds of files. The files of the dimension have `k` 4 and 5, 7 and 8, and 2.

    All rows of the first and third file have x = 3, so the maximum of `k` with x = 3 is at least 5. The second file has
    x from 1 to 6, so the maximum can be 8. If the filter is not exact, the first and third file prove nothing.
    """
    async with run_server(tmp_path) as server:
        api = Api(server)
        facts = [{**dict.fromkeys(FACT), "c": number} for number in range(10)]
        fact = await StarTable.create(
            api, "fact", [Col(number, *column) for number, column in enumerate(FACT.items(), 1)]
        )
        await fact.commit([fact.write_file([item]) for item in facts])
        dimension = await StarTable.create(
            api, "one", [Col(number, *column) for number, column in enumerate(DIMENSIONS["one"].items(), 1)]
        )
        rows = [[(4, 3), (5, 3)], [(7, 1), (8, 6)], [(2, 3)]]
        files = [dimension.write_file([{"k": k, "x": x, "until": None} for k, x in row]) for row in rows]
        await dimension.commit(files)

        async def plan_files(op: str, extreme: str, value: int, *, exact: bool = True) -> list[int]:
            request = {
                "table": ["db", "one"],
                "on": {"c": "k"},
                "transform": extreme,
                "operator": op,
                "filter": {"type": "eq", "term": "x", "value": value},
                "exact": exact,
            }
            answer = await api("POST", "/api/v1/tables/db/fact/explain", {"joins": [request], "files": True})
            paths = [file.path for file in fact.data]
            return sorted(paths.index(item["file-path"]) for item in answer.json["kept"])

        assert await plan_files("=", "max", 3) == [4, 5, 6, 7, 8]
        assert await plan_files(">", "max", 3) == [5, 6, 7, 8, 9]
        assert await plan_files("<=", "max", 3) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert await plan_files("=", "min", 3) == [2]
        assert await plan_files("=", "max", 3, exact=False) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
        assert await plan_files(">", "max", 3, exact=False) == [*range(10)]
        assert await plan_files("<", "max", 9) == []  # The maximum of no rows is null.
        # Deletes remove the rows of the first file, so it proves nothing. The third file proves that the maximum is at
        # least 2.
        await dimension.commit(deletes=[dimension.write_position_deletes(files[0], [0, 1])])
        assert await plan_files("=", "max", 3) == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("join", "message"),
    [
        ({"on": {"ts": "x"}, "transform": "day"}, "the day of timestamp cannot be compared with int"),
        ({"on": {"tz": "start"}, "transform": "month"}, "the month of timestamptz cannot be compared with timestamp"),
        ({"on": {"d": "start"}, "transform": "hour"}, "the hour of date cannot be compared with timestamp"),
        ({"on": {"c": "day"}, "transform": "day"}, "the day of int cannot be compared with date"),
        ({"on": {"ts": "day", "d": "day"}, "transform": "day"}, "one pair of"),
        ({"on": {"d": "x"}, "transform": "max"}, "the max of int cannot limit date"),
        ({"on": {"d": "day", "ts": "start"}, "transform": "min"}, "one pair of"),
        ({"on": {"d": "year"}, "transform": "range", "operator": "<"}, "the range of int cannot limit date"),
        (
            {"on": {"tz": "start"}, "transform": "range", "operator": "<"},
            "the range of timestamp cannot limit timestamptz",
        ),
        ({"on": {"ts": "start"}, "transform": "range"}, "range without an operator"),
        ({"on": {"ts": "start"}, "transform": "range", "operator": "<", "end": "end"}, "the operator > or >="),
        ({"on": {"ts": "start"}, "operator": "<"}, "not the transform min, max or range"),
        ({"on": {"ts": "day"}, "transform": "bucket"}, "bucket"),
        ({"on": {"c": "x"}, "unless": {"type": "eq", "term": "none", "value": 1}}, "none"),
    ],
)
async def test_invalid_join_is_rejected(tmp_path: Path, join: dict[str, Any], message: str) -> None:
    async with run_server(tmp_path) as server:
        api, rng = Api(server), random.Random(1)
        await create_table(rng, api, "fact", FACT, 2)
        await create_table(rng, api, "days", DIMENSIONS["days"], 1)
        answer = await api("POST", "/api/v1/tables/db/fact/explain", {"joins": [{"table": ["db", "days"], **join}]})
        assert answer.status == 400, answer.raw
        assert message in str(answer.json)


async def test_unreadable_join_alternative_disables_pruning_by_the_other_alternatives(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api, rng = Api(server), random.Random(2)
        fact = await create_table(rng, api, "fact", FACT, 5)
        days = await create_table(rng, api, "days", DIMENSIONS["days"], 1)
        # The server reads this table with DuckDB, which reads the day 2**31 - 1 as infinity. The server uses only times
        # in the years 1 to 9999, so it does not use the table.
        far_day = days.write_file([{**dict.fromkeys(DIMENSIONS["days"]), "day": 2**31 - 1, "x": 0}])
        await days.commit([far_day])
        queries = [
            {"table": ["db", "days"], "on": {"ts": "day"}, "transform": "day", "any-of": 1},
            {"table": ["db", "days"], "on": {"f1": "x"}, "predicate": "x = 100", "any-of": 1},
        ]
        answer = await api("POST", "/api/v1/tables/db/fact/explain", {"joins": queries, "files": True})
        assert [join["used"] for join in answer.json["joins"]] == [False, False]
        assert "not in the years" in answer.json["joins"][0]["reason"]
        assert len(answer.json["kept"]) == len(fact.data)


async def test_join_on_years_beyond_four_digits_prunes_no_file(tmp_path: Path) -> None:
    """Timestamps reach the year 294247, and every engine computes this year.

    If a year of the dimension is beyond 1 to 9999, the join is skipped, because engines store infinity there.
    """
    async with run_server(tmp_path) as server:
        api, rng = Api(server), random.Random(3)
        fact = await create_table(rng, api, "fact", FACT, 5)
        days = await create_table(rng, api, "days", DIMENSIONS["days"], 0)
        await days.commit([days.write_file([{**dict.fromkeys(DIMENSIONS["days"]), "year": 10_000, "x": 0}])])
        joins = [{"table": ["db", "days"], "on": {"ts": "year"}, "transform": "year"}]
        answer = await api("POST", "/api/v1/tables/db/fact/explain", {"joins": joins, "files": True})
        assert not answer.json["joins"][0]["used"]
        assert len(answer.json["kept"]) == len(fact.data)
