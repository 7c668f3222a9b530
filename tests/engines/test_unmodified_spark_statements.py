"""Tests of statements of unmodified Spark on tables whose scans the server plans: they lose no row.

Iceberg's library deletes and rewrites files according to the server's plans (`api/plans/scan_requests.py`).
The test keeps the expected rows outside of the tables, and Spark evaluates the conditions on them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from seamark import append
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.spark import sql
from tests.seeds import examples, first_seed
from tests.services.seamark import Seamark
from tests.services.spark import new_catalog

Row = tuple[Any, ...]
COLUMNS = "id bigint, i int, s string, d double, f float, st struct<a: int, x: double>, p int"
SMALL_GROUPS = {
    "write.parquet.row-group-size-bytes": "1",
    "write.parquet.row-group-check-min-record-count": "10",
    "write.parquet.row-group-check-max-record-count": "10",
}
"""Properties for row groups of ten rows.

If a reader skips a row group, the rewritten file lacks its rows.
"""
INDEXES = ("bloom(i)", "bitmap(i)", "record(id)", "bitmap(d)", "bloom(s)", "bitmap(st.a)", "bitmap(st.x)", "bloom(d)")
MODES = ("copy-on-write", "merge-on-read")
SPECS = ("", "p", "bucket(3, id)", "truncate(1, s)")
NAN = math.nan
ICEBERG_NULL_PREFIX_ERROR = 'Cannot invoke "String.startsWith(String)"'
"""The error of Iceberg's library for a DELETE by prefix if a file has a null partition value.

The library evaluates the prefix on the null in `ResidualEvaluator.startsWith`, before the commit and with any catalog.
"""


@dataclass
class ExpectedTable:
    """A table, and the rows that it must contain."""

    spark: SparkSession
    client: IndexClient
    catalog: str
    name: str
    rows: list[Row] = field(default_factory=list)

    def create(self, spec: str = "", **properties: str) -> None:
        property_list = ", ".join(f"'{key}'='{value}'" for key, value in (SMALL_GROUPS | properties).items())
        partition_clause = f"PARTITIONED BY ({spec})" if spec else ""
        self.run(f"CREATE TABLE {{t}} ({COLUMNS}) USING iceberg {partition_clause} TBLPROPERTIES ({property_list})")

    def run(self, statement: str) -> list[Row]:
        return [
            tuple(row) for row in self.spark.sql(statement.replace("{t}", f"{self.catalog}.db.{self.name}")).collect()
        ]

    def insert(self, rows: Sequence[Row]) -> None:
        """Append the rows in one file for each partition."""
        self.spark.createDataFrame(list(rows), COLUMNS).coalesce(1).writeTo(f"{self.catalog}.db.{self.name}").append()
        self.rows += rows

    def index(self, *texts: str) -> None:
        index_properties = ", ".join(f"'seamark.index.x{number}' = '{text}'" for number, text in enumerate(texts))
        self.run(f"ALTER TABLE {{t}} SET TBLPROPERTIES ({index_properties})")
        self.build(len(texts))

    def build(self, count: int) -> None:
        for number in range(count):
            build(self.client, f"db.{self.name}", f"x{number}", InProcessWorkers())

    def find_matching_ids(self, condition: str) -> set[int]:
        """Return the ids of the expected rows for which Spark evaluates the condition to true."""
        frame = self.spark.createDataFrame(self.rows, COLUMNS)
        return {row.id for row in frame.where(condition).select("id").collect()}

    def check(self, message: str) -> None:
        assert sorted(map(repr, self.run("SELECT * FROM {t}"))) == sorted(map(repr, map(_to_spark_types, self.rows))), (
            message
        )

    def check_matching_rows(self, condition: str, message: str) -> None:
        expected = sorted(self.find_matching_ids(condition))
        assert [row[0] for row in self.run(f"SELECT id FROM {{t}} WHERE {condition} ORDER BY id")] == expected, message
        assert sorted(row[0] for row in self.run(f"SELECT * FROM {{t}} WHERE {condition}")) == expected, message
        assert self.run(f"SELECT count(*) FROM {{t}} WHERE {condition}") == [(len(expected),)], message

    def delete(self, condition: str) -> None:
        matching_ids = self.find_matching_ids(condition)
        self.run(f"DELETE FROM {{t}} WHERE {condition}")
        self.rows = [row for row in self.rows if row[0] not in matching_ids]

    def update(self, condition: str) -> None:
        changed_ids = self.find_matching_ids(condition)
        self.run(f"UPDATE {{t}} SET s = 'updated' WHERE {condition}")
        self.rows = [(*row[:2], "updated", *row[3:]) if row[0] in changed_ids else row for row in self.rows]

    def merge(self, condition: str, keys: Sequence[int]) -> None:
        """Merge the keys into the rows that match the condition.

        Rows of even keys are updated, rows of odd keys are deleted, and negative keys without a row are inserted.
        """
        source = ", ".join(f"({key}L)" for key in keys)
        changed_ids = self.find_matching_ids(condition) & set(keys)
        self.run(
            f"MERGE INTO {{t}} USING (SELECT * FROM VALUES {source} AS v(k)) ON id = k AND {condition} "
            "WHEN MATCHED AND k % 2 = 0 THEN UPDATE SET s = 'merged' WHEN MATCHED THEN DELETE "
            "WHEN NOT MATCHED AND k < 0 THEN INSERT (id, s) VALUES (k, 'new')"
        )
        kept_rows = [row for row in self.rows if row[0] not in changed_ids or row[0] % 2 == 0]
        self.rows = [(*row[:2], "merged", *row[3:]) if row[0] in changed_ids else row for row in kept_rows]
        self.rows += [(key, None, "new", None, None, None, None) for key in keys if key < 0 and key not in changed_ids]

    def overwrite(self, condition: str) -> None:
        """Replace all rows by the rows that match the condition."""
        matching_ids = self.find_matching_ids(condition)
        self.run(f"INSERT OVERWRITE TABLE {{t}} SELECT * FROM {{t}} WHERE {condition}")
        self.rows = [row for row in self.rows if row[0] in matching_ids]

    def rewrite(self, condition: str) -> None:
        self.run(
            f"CALL {self.catalog}.system.rewrite_data_files(table => 'db.{self.name}', where => \"{condition}\", "
            "options => map('rewrite-all', 'true'))"
        )


def _to_spark_types(row: Row) -> Row:
    """Return the row with its struct as a row of Spark."""
    from pyspark.sql import Row as SparkRow

    struct = None if row[5] is None else SparkRow(a=row[5][0], x=row[5][1])
    return (*row[:5], struct, row[6])


@dataclass(frozen=True)
class UnmodifiedSpark:
    spark: SparkSession
    client: IndexClient
    catalogs: tuple[str, str]
    """Two catalogs.

    The first catalog sends the header X-Seamark-Residuals, as the documentation recommends. The second catalog sends no
    such header, and gets exact residuals.
    """

    def describe_table(self, name: str, *, exact: bool = False) -> ExpectedTable:
        return ExpectedTable(self.spark, self.client, self.catalogs[exact], name)


@pytest.fixture(scope="module")
def unmodified_spark(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UnmodifiedSpark]:
    """Yield the tables, and two catalogs of one server.

    For the first catalog, plans have short residuals, which are weaker than the remaining filter of a file: for
    example, a range instead of a list. For the second catalog, the residuals are exact. Plans of more than three files
    have pages of two.
    """
    page_settings = {"SEAMARK_PLAN_INLINE_LIMIT": "3", "SEAMARK_PLAN_PAGE_SIZE": "2"}
    with (
        Seamark(tmp_path_factory.mktemp("stock"), env=page_settings) as server,
        closing(IndexClient(server.base_url)) as client,
    ):
        no_cache = {"cache-enabled": "false"}
        short_catalog = new_catalog(spark, server.base_url, extra=no_cache)
        exact_catalog = new_catalog(spark, server.base_url, extra={**no_cache, "header.X-Seamark-Residuals": "exact"})
        spark.sql(f"CREATE NAMESPACE {short_catalog}.db")
        yield UnmodifiedSpark(spark, client, (short_catalog, exact_catalog))


def _build_rows(ids: range, p: int = 0) -> list[Row]:
    """Return rows with these ids and the columns k, i, s, f, d, st and p.

    `i` is 1 or 9, so that bounds do not exclude a number between 1 and 9.
    """
    return [(k, 1 if k % 2 else 9, f"s{k % 2}", float(k), float(k), (k % 2, float(k)), p) for k in ids]


@pytest.mark.parametrize("mode", [MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("index", ["bitmap(i)", pytest.param("bloom(i)", marks=pytest.mark.slow)])
def test_delete_with_an_indexed_condition_deletes_the_matching_rows(
    unmodified_spark: UnmodifiedSpark, index: str, mode: str
) -> None:
    """Before a fix, Iceberg's library failed with "Cannot delete file where some, but not all, rows match"."""
    table = unmodified_spark.describe_table(f"proved_{index[:3]}_{mode[:4]}")
    table.create("p", **{"write.delete.mode": mode})
    table.insert(_build_rows(range(10)) + _build_rows(range(10, 20), 1) + _build_rows(range(20, 30), 2))
    table.index(index)
    # The first condition keeps no file. The second keeps files in which all rows match. The third has a long list,
    # which the library does not compare with bounds. The last matches only some rows of a file.
    many_ids = ", ".join(map(str, range(100, 400)))
    for condition in ("i = 5", "p = 1 OR i = 5", f"i IN ({many_ids})", "i = 9 AND p = 2"):
        table.delete(condition)
    table.check("only rows that match are gone")


@pytest.mark.slow
def test_delete_from_a_branch_of_an_indexed_table_deletes_the_right_rows(unmodified_spark: UnmodifiedSpark) -> None:
    table = unmodified_spark.describe_table("branched")
    table.create()
    table.insert(_build_rows(range(10)))
    table.run("ALTER TABLE {t} CREATE BRANCH dev")
    table.index("bitmap(i)")
    table.run("DELETE FROM {t}.branch_dev WHERE i = 5")
    table.run("DELETE FROM {t}.branch_dev WHERE i = 9")
    assert table.run("SELECT count(*) FROM {t} VERSION AS OF 'dev'") == [(5,)]
    table.check("main has all rows")


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_rewritten_files_contain_the_rows_of_all_row_groups(unmodified_spark: UnmodifiedSpark, exact: bool) -> None:
    """Before a fix, Iceberg's readers skipped row groups by the residual of a plan.

    The rewritten files then lacked the rows of these row groups.
    """
    table = unmodified_spark.describe_table(f"groups_{exact}", exact=exact)
    table.create()
    table.insert(_build_rows(range(100)))
    table.rewrite("id = 55")
    table.check("rewrite_data_files")
    table.update("id = 17")
    table.check("UPDATE")
    table.delete("id = 42")
    table.check("DELETE")
    table.merge("id < 30", [3, 4])
    table.check("MERGE")


@pytest.mark.slow  # tests/iceberg/expressions/test_nans.py has these conditions without a JVM.
def test_nan_is_the_greatest_value_in_spark(unmodified_spark: UnmodifiedSpark) -> None:
    """Row groups with NaN have no bounds if Spark writes them, but other writers can write bounds."""
    table = unmodified_spark.describe_table("nans", exact=True)
    table.create()
    value_lists = ([1.0], [NAN], [5.0], [1.0, NAN, 0.0], [None, NAN], [-1.0, 2.0])
    number = 0
    for values in value_lists * 2:
        rows: list[Row] = []
        for value in values:
            st = None if value is None else (1, value)
            rows.append((number, 1, "s", value, value, st, 0))
            number += 1
        # Spark writes the first half of the rows, and Seamark the second half.
        if number <= sum(map(len, value_lists)):
            table.insert(rows)
            continue
        column_names = ("id", "i", "s", "d", "f", "st", "p")
        row_dicts = [
            dict(zip(column_names, row, strict=True)) | {"st": row[5] and {"a": row[5][0], "x": row[5][1]}}
            for row in rows
        ]
        append(unmodified_spark.client, "db.nans", pa.Table.from_pylist(row_dicts, _build_arrow_schema()))
        table.rows += rows
    conditions = [
        "d > 3",
        "d >= 3",
        "NOT (d < 3)",
        "f > 3",
        "st.x >= 3",
        "d <> 1",
        "d NOT IN (1, 5)",
        "d > 3 AND i = 1",
    ]
    conditions += ["d <= 3", "NOT (d > 3)", "isnan(d)", "d > 3 OR id = 0", "NOT (d <= 3 OR f <= 3)"]
    for condition in conditions[: examples(len(conditions), 5)]:
        expected = table.find_matching_ids(condition)
        assert {row[0] for row in table.run(f"SELECT id FROM {{t}} WHERE {condition}")} == expected, condition
    for condition in ("d > 3", "NOT (f < 3)", "st.x >= 3")[: examples(3, 1)]:
        expected = table.find_matching_ids(condition)
        frame = sql(unmodified_spark.spark, f"SELECT id FROM {table.catalog}.db.nans WHERE {condition}")
        assert {row.id for row in frame.collect()} == expected, f"seamark.spark.sql: {condition}"
    table.index("bitmap(d)", "bloom(f)")
    for condition in ("d > 3", "f > 3", "d > 3 AND f > 3")[: examples(3, 1)]:
        table.check_matching_rows(condition, f"{condition}, with indexes")
    table.delete("d > 3")
    table.check("DELETE of NaN")


def _build_arrow_schema() -> pa.Schema:
    st = pa.struct([("a", pa.int32()), ("x", pa.float64())])
    columns = [("id", pa.int64()), ("i", pa.int32()), ("s", pa.string()), ("d", pa.float64()), ("f", pa.float32())]
    return pa.schema([*columns, ("st", st), ("p", pa.int32())])


class StatementCampaign:
    """Random statements on a random table with random indexes."""

    def __init__(self, unmodified_spark: UnmodifiedSpark, seed: int) -> None:
        self.rng = random.Random(f"stock statements {seed}")
        self.table = unmodified_spark.describe_table(f"random{seed}", exact=seed % 2 == 1)
        self.seed = seed
        self.next_id = 0
        self.outcomes: list[str] = []

    def run_statements(self, count: int) -> int:
        """Run random statements, and return their number."""
        rng, table = self.rng, self.table
        modes = {f"write.{operation}.mode": rng.choice(MODES) for operation in ("delete", "update", "merge")}
        spec = rng.choice(SPECS)
        table.create(spec, **modes)
        self._insert()
        self._insert()
        indexes = rng.sample(INDEXES, rng.randint(1, 3))
        table.index(*indexes)
        self.outcomes.append(f"seed {self.seed}: {modes}, partitioned by {spec!r}, indexes {indexes}")
        for number in range(count):
            if number == count // 2 and rng.random() < 0.5:
                partition_field = "bucket(2, i)" if spec == "p" else "p"
                table.run(f"ALTER TABLE {{t}} ADD PARTITION FIELD {partition_field}")
                self.outcomes.append(f"added partition field {partition_field}")
            if rng.random() < 0.3:
                self._insert()
            if rng.random() < 0.3:
                table.build(len(indexes))
                self.outcomes.append("built")
            self._run_statement()
        return count

    def _run_statement(self) -> None:
        rng, table = self.rng, self.table
        condition = self._draw_condition()
        # An overwrite leaves few rows for later statements, so it is rare.
        weights = {"delete": 6, "update": 4, "merge": 4, "find": 5, "rewrite": 2, "overwrite": 1}
        kind = rng.choices(list(weights), list(weights.values()))[0]
        self.outcomes.append(f"{kind} {condition}")
        history = "\n".join(self.outcomes)
        try:
            if kind == "find":
                table.check_matching_rows(condition, history)
            elif kind == "merge":
                ids = [row[0] for row in table.rows if row[0] >= 0]
                new_key = -1 - len(self.outcomes)
                keys = [*rng.sample(ids, min(len(ids), 6)), new_key]
                table.merge(condition, keys)
            else:
                getattr(table, kind)(condition)
        except Exception as error:
            if kind == "rewrite" and "Cannot translate Spark expression" in str(error):
                return  # Iceberg's procedure supports fewer conditions.
            if kind == "delete" and ICEBERG_NULL_PREFIX_ERROR in str(error):
                table.check(f"{history}\nthe refused statement changed no row")
                return
            raise AssertionError(f"{history}\n{error}") from error
        table.check(history)

    def _insert(self) -> None:
        rng, rows = self.rng, []
        for _ in range(rng.randint(5, 45)):
            double_value = rng.choice((0.0, -0.0, 1.5, -3.0, 7.0, NAN, None))
            st = rng.choice((None, (rng.choice((1, 9)), double_value)))
            int_and_text = (rng.choice((1, 9, None, 40)), rng.choice(("s1", "s9", "t", None)))
            rows.append(
                (self.next_id, *int_and_text, double_value, rng.choice((1.5, NAN, -2.5)), st, rng.choice((0, 1, 2)))
            )
            self.next_id += 1
        self.table.insert(rows)
        self.outcomes.append(f"inserted {len(rows)}")

    def _draw_condition(self) -> str:
        rng = self.rng
        predicates = [self._draw_predicate() for _ in range(rng.choice((1, 1, 2, 3)))]
        condition = predicates[0]
        for predicate in predicates[1:]:
            condition = f"({condition} {rng.choice(('AND', 'OR'))} {predicate})"
        return condition

    def _draw_predicate(self) -> str:
        rng = self.rng
        number, double_text = rng.randint(0, 11), rng.choice(("0.0D", "1.5D", "3.0D", "-3.0D"))
        number_list = ", ".join(map(str, rng.sample(range(12), 3)))
        many_ids = ", ".join(map(str, range(12, 12 + rng.choice((5, 300)), 1)))
        op = rng.choice(("<", "<=", ">", ">="))
        column = rng.choice(("d", "f", "st.x"))
        predicate = rng.choice(
            (
                f"i = {number}",
                f"i = {number}",
                f"i IN ({number_list})",
                f"i IN ({many_ids})",
                f"i <> {number}",
                f"i {op} {number}",
                "i IS NULL",
                f"s = 's{number}'",
                "s LIKE 's1%'",
                f"{column} {op} {double_text}",
                f"{column} {op} {double_text}",
                f"{column} = {double_text}",
                f"{column} <> {double_text}",
                f"isnan({column})",
                f"st.a = {number}",
                f"p = {rng.randint(0, 3)}",
                f"p IN (0, {rng.randint(1, 3)})",
                f"id = {rng.randint(0, max(1, self.next_id))}",
                f"id BETWEEN {number} AND {number + 20}",
            )
        )
        # For `NOT (p = 3)`, Spark also deletes the partition with null. It deletes by metadata, and requests no plan.
        negated = rng.random() < 0.2 and not predicate.startswith("p ")
        return f"NOT ({predicate})" if negated else predicate


@pytest.mark.slow
def test_random_statements_on_indexed_tables_leave_the_expected_rows(unmodified_spark: UnmodifiedSpark) -> None:
    start = first_seed()
    for seed in range(start, start + examples(3, 1)):
        StatementCampaign(unmodified_spark, seed).run_statements(examples(12, 6))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(0, 100, 10))
def test_hundreds_of_random_statements_on_indexed_tables_leave_the_expected_rows(
    unmodified_spark: UnmodifiedSpark, start: int
) -> None:
    first_number = 1000 * first_seed() + start
    statement_count = sum(
        StatementCampaign(unmodified_spark, seed).run_statements(20) for seed in range(first_number, first_number + 10)
    )
    print(f"seeds from {first_number}: {statement_count} statements")
