"""Tests that conditions on the current time prune old files and lose no row, in any time zone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from pyspark.sql import SparkSession

from seamark.connector.spark.query.queries import rewrite_query
from tests.engines.spark.star import StarRig, change_settings, collect_rows
from tests.seeds import first_seed
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

FILES, CONDITIONS_PER_QUERY = 40, 30
NOW_EXPRESSIONS = {
    "date": ("current_date", "current_date()", "curdate()", "CAST(now() AS date)"),
    "timestamp": ("current_timestamp", "now()", "CAST(current_date AS timestamp)"),
    "timestamp_ntz": ("localtimestamp()", "CAST(now() AS timestamp_ntz)"),
}


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StarRig]:
    with Seamark(tmp_path_factory.mktemp("times")) as server:
        new_rig = StarRig(spark, server, new_catalog(spark, server.base_url))
        new_rig.run("CREATE NAMESPACE {db}")
        new_rig.run("CREATE TABLE {db}.t (id bigint, d date, at timestamp, nt timestamp_ntz) USING iceberg")
        # Each file has two rows. Near the present, the times of the files are hours apart. Further away, they are
        # days and months apart.
        hours = f"CAST(pow((id DIV 2) - {FILES // 4}, 3) * 3 + (id % 2) * 2 AS int)"
        times = f"SELECT id, now() - make_dt_interval(0, {hours}) AS at FROM range({2 * FILES})"
        new_rig.run(
            "INSERT INTO {db}.t SELECT /*+ REPARTITION_BY_RANGE(40, id) */ id, CAST(at AS date) AS d, at, "
            f"CAST(at AS timestamp_ntz) AS nt FROM ({times})"
        )
        yield new_rig


def draw_time_expression(rng: random.Random, kind: str) -> str:
    """Return an expression of this type that depends on the current time, such as the start of the last month."""
    expression, units = rng.choice(NOW_EXPRESSIONS[kind]), ["YEAR", "QUARTER", "MONTH", "WEEK"]
    for _ in range(rng.choice([0, 1, 1, 2])):
        count = rng.choice([1, 2, 3, 10, 40])
        choices = [
            f"{expression} - INTERVAL {count} DAYS",
            f"{expression} - INTERVAL '{count}' MONTH",
            f"{expression} + INTERVAL 1 YEAR",
        ]
        if kind == "date":
            choices += [
                f"date_sub({expression}, {count})",
                f"add_months({expression}, -{count})",
                f"{expression} + {count}",
            ]
            choices += [f"trunc({expression}, '{rng.choice(units)}')"]
        else:
            choices += [f"{expression} - INTERVAL {count} HOURS", f"date_trunc('{rng.choice(units)}', {expression})"]
        expression = f"({rng.choice(choices)})"
        if kind == "timestamp_ntz":  # Functions convert the column to instants.
            expression = f"CAST({expression} AS timestamp_ntz)"
    return expression


def draw_condition(rng: random.Random) -> str:
    column, kind = rng.choice([("d", "date"), ("at", "timestamp"), ("nt", "timestamp_ntz")])
    value = draw_time_expression(rng, kind)
    condition = rng.choice(
        [
            *[f"{column} {rng.choice(['<', '<=', '>', '>=', '='])} {value}"] * 3,
            f"{column} BETWEEN {draw_time_expression(rng, kind)} AND {value}",
            f"{column} IN ({value}, {draw_time_expression(rng, kind)})",
            f"CAST({column} AS date) >= {draw_time_expression(rng, 'date')}",
            f"date_trunc('MONTH', {column}) = {value}",
            f"coalesce({column}, {value}) < {draw_time_expression(rng, kind)}",
        ]
    )
    return f"NOT ({condition})" if rng.random() < 0.2 else condition


def check_conditions(rig: StarRig, conditions: Sequence[str], note: str) -> list[tuple[int, int]]:
    """Check each condition, and return the number of files in its plan and in the table.

    Spark evaluates all conditions in one query on all rows, each as a column.
    """
    condition_list = ", ".join(f"({where}) AS w{number}" for number, where in enumerate(conditions))
    select_statement = f"SELECT id, {condition_list} FROM {rig.db}.t ORDER BY id"
    texts = [f"SELECT id FROM {rig.db}.t WHERE {where}" for where in conditions]
    while True:
        expected = rig.spark.sql(select_statement).collect()
        reports, wrong_queries = [], []
        for number, text in enumerate(texts):
            rewrite = rewrite_query(rig.spark, text)
            reports.append(rewrite)
            ids = sorted(repr((row["id"],)) for row in expected if row[f"w{number}"])
            if rewrite.statement is not None and collect_rows(rig.spark.sql(rewrite.statement)) != ids:
                wrong_queries.append(f"{note}: {conditions[number]}\n{rewrite}")
        if not wrong_queries or rig.spark.sql(select_statement).collect() == expected:
            break  # Otherwise the date has changed between the two queries.
    assert wrong_queries == []
    return [(report.files, report.considered_files) for report in reports]


def run_campaign(rig: StarRig, seed: int, condition_count: int, zone: str) -> Counter[str]:
    """Check random conditions, and count under `fewer` how many of them leave files out."""
    rng, counts = random.Random(f"{seed}/{zone}"), Counter[str]()
    with change_settings(rig.spark, {"spark.sql.session.timeZone": zone}):
        for start in range(0, condition_count, CONDITIONS_PER_QUERY):
            conditions = [draw_condition(rng) for _ in range(min(CONDITIONS_PER_QUERY, condition_count - start))]
            for files, file_count in check_conditions(
                rig, conditions, f"seed {seed}, conditions from {start} on in {zone}"
            ):
                counts["fewer"] += files < file_count
    return counts


@pytest.mark.slow
def test_common_conditions_on_the_current_time_leave_old_files_out(rig: StarRig) -> None:
    conditions = (
        *("d >= current_date - INTERVAL 7 DAYS", "d > date_sub(current_date(), 7)", "at > now() - INTERVAL 1 DAY"),
        *("at >= current_timestamp - INTERVAL 2 HOURS", "d >= add_months(current_date, -1)"),
        *("nt >= localtimestamp() - INTERVAL 3 DAYS", "at >= date_trunc('MONTH', now()) - INTERVAL '1' MONTH"),
        *("d >= trunc(current_date, 'YEAR')", "NOT (at < now() - INTERVAL 30 DAYS)", "d = current_date - 1"),
    )
    for zone in ("UTC", "Pacific/Kiritimati"):
        with change_settings(rig.spark, {"spark.sql.session.timeZone": zone}):
            for where, (files, file_count) in zip(conditions, check_conditions(rig, conditions, zone), strict=True):
                assert files < file_count == FILES, (zone, where)


@pytest.mark.slow
def test_random_conditions_on_the_current_time_return_sparks_own_rows(rig: StarRig) -> None:
    assert run_campaign(rig, first_seed(), 12, "America/New_York")["fewer"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Pacific/Kiritimati", "Etc/GMT+12"])
def test_many_random_conditions_on_the_current_time_return_sparks_own_rows(rig: StarRig, zone: str) -> None:
    assert run_campaign(rig, first_seed() + 1, 150, zone)["fewer"] > 30
