"""Tests of MERGE, UPDATE and DELETE by `seamark.spark.execute` and by `spark.sql`, on two tables with the same rows.

`spark.sql` runs Iceberg's statements. After each statement, the tables are equal, with row ids, or both statements
have failed with the same error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from seamark.commands.main import cli
from seamark.connector.client.errors import Unreachable
from seamark.connector.spark.statements.candidate_rows import StatementLimits
from seamark.connector.spark.statements.execution import (
    ICEBERG,
    INDEXED,
    LOCATED,
    _LocatedStatement,
    execute,
    explain,
)
from seamark.connector.spark.statements.row_changes import ChangedRows, write_changes
from seamark.connector.write.row_changes import Report
from seamark.spark import sql
from tests.engines.tables import SparkTables
from tests.seeds import first_seed

COLUMNS = (
    "id bigint, k int, name string, d double, dec decimal(9,2), day date, at timestamp, ok boolean, "
    "n int NOT NULL, s struct<a: int, b: string>, xs array<int>"
)
ROWS = """
    SELECT IF(id % 13 = 12, NULL, id) AS id, CAST(id % 9 AS int) AS k,
      IF(id % 7 = 6, NULL, concat('n', id DIV 2)) AS name,
      CASE WHEN id % 11 = 3 THEN double('NaN') WHEN id % 11 = 5 THEN -0.0D WHEN id % 11 = 7 THEN NULL
        ELSE CAST(id % 5 AS double) END AS d,
      CAST(id % 6 AS decimal(9,2)) AS dec, date_add(DATE'2026-01-01', CAST(id % 4 AS int)) AS day,
      timestamp_seconds(id * 1000) AS at, IF(id % 5 = 4, NULL, id % 2 = 0) AS ok, CAST(id AS int) AS n,
      named_struct('a', CAST(id AS int), 'b', concat('s', id)) AS s, array(CAST(id AS int), 7) AS xs
    FROM range({start}, {end})"""
COLUMN_NAMES = "id, k, name, d, dec, day, at, ok, n, s, xs"
LAYOUTS = {
    "by id": ("", ("'seamark.index.ids'='record(id)'",)),
    "by name": ("", ("'seamark.index.names'='record(name)'",)),
    "by two": ("PARTITIONED BY (bucket(3, id))", ("'seamark.index.pair'='record(day, k)'",)),
    "by none": ("PARTITIONED BY (day)", ()),
}
OURS, THEIRS = "ours", "theirs"
"""Prefixes of table names: Seamark changes the first table, and Iceberg the second table."""
ROW_ERRORS = {"NOT_NULL_ASSERT_VIOLATION", "CAST_OVERFLOW_IN_TABLE_INSERT"}
"""Errors of single rows. One statement can cause several of them, and Spark reports the error of the row that it reads
first.
"""


class SparkStatementTables(SparkTables):
    """Pairs of equal tables: Seamark changes one of them, and Iceberg the other."""

    def create(self, table: str, layout: str, version: int, mode: str) -> None:
        spec, properties = LAYOUTS[layout]
        modes = [f"'write.{kind}.mode'='{mode}'" for kind in ("merge", "update", "delete")]
        if table.startswith(THEIRS):
            # By bounds, Iceberg leaves out files with -0.0 for `d = 0.0D`, although Spark's comparison is true.
            modes.append("'write.metadata.metrics.column.d'='none'")
        table_properties = ", ".join([f"'format-version'='{version}'", *modes, *properties])
        self.run_sql(f"CREATE TABLE {{db}}.{table} ({COLUMNS}) USING iceberg {spec} TBLPROPERTIES ({table_properties})")
        for start in (0, 20):
            self.run_sql(f"INSERT INTO {{db}}.{table} {ROWS.format(start=start, end=start + 20)}")

    def read_rows(self, table: str, version: int) -> Counter[str]:
        lineage = ", _row_id, _last_updated_sequence_number" if version == 3 else ""
        rows = self.run_sql(f"SELECT *{lineage} FROM {{db}}.{table}")
        if version < 3:
            return Counter(map(repr, rows))
        # The first 40 rows have the row ids 0 to 39. An inserted row may have any new id. For all other rows, the
        # test compares the id and whether the last statement changed the row.
        newest_sequence = max((row[-1] for row in rows), default=0)
        return Counter(
            repr((*row[:-2], row[-2] if row[-2] < 40 else "new", row[-1] == newest_sequence)) for row in rows
        )


@pytest.fixture(scope="module")
def rig(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkStatementTables]:
    with SparkStatementTables.open(spark, tmp_path_factory.mktemp("statements")) as new_rig:
        yield new_rig


class RandomSparkStatements:
    """Draws random statements on a table named `{t}`. Some of them fail."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw_statement(self) -> str:
        return self._rng.choice((self.draw_merge, self.draw_merge, self.draw_update, self.draw_delete))()

    def draw_merge(self) -> str:
        rng = self._rng
        join_condition = " AND ".join(
            [self._draw_equality(), *rng.choices(("t.n < s.n + 5", "t.ok", "s.k <> 3"), k=rng.choice((0, 0, 1)))]
        )
        clauses = [
            f"WHEN MATCHED{self._draw_and_condition()} THEN {self._draw_matched_action()}"
            for _ in range(rng.choice((0, 1, 1, 1, 2)))
        ]
        if len(clauses) == 2 and " AND " not in clauses[0]:
            clauses[0] = clauses[0].replace("MATCHED", "MATCHED AND t.k > 2", 1)
        if not clauses or rng.random() < 0.6:
            clauses.append(f"WHEN NOT MATCHED{rng.choice(('', ' AND s.n % 3 = 0'))} THEN {self._draw_insert_action()}")
        if rng.random() < 0.1:
            clauses.append("WHEN NOT MATCHED BY SOURCE AND t.n > 35 THEN DELETE")
        return f"MERGE INTO {{t}} t USING ({self._draw_source()}) s ON {join_condition} {' '.join(clauses)}"

    def draw_update(self) -> str:
        assignments = ", ".join(self._rng.sample(self._draw_assignments("t"), self._rng.choice((1, 1, 2))))
        return f"UPDATE {{t}} t SET {assignments} WHERE {self._draw_where()}"

    def draw_delete(self) -> str:
        return f"DELETE FROM {{t}} t WHERE {self._draw_where()}"

    def _draw_equality(self) -> str:
        rng = self._rng
        weighted_equalities = ["t.id = s.id"] * 5 + ["t.name = s.name"] * 3 + ["t.day = s.day AND t.k = s.k"] * 2
        rare_equalities = [
            "t.d = s.d",
            "t.id <=> s.id",
            "t.n = s.id",
            "t.dec = s.dec AND t.id = s.id",
            "t.at = s.at",
            "t.id = s.k",
        ]
        return rng.choice(
            [
                *weighted_equalities,
                *rare_equalities,
                "CAST(t.id AS string) = s.name",
                "t.n = s.n AND t.ok = s.ok",
                "t.k > s.k",
            ]
        )

    def _draw_source(self) -> str:
        rng = self._rng
        start = rng.randrange(45)
        rows = ROWS.format(start=start, end=start + rng.choice((1, 3, 12)))
        if rng.random() < 0.2:
            rows = f"SELECT * FROM ({rows}) UNION ALL SELECT * FROM ({rows})"
        if rng.random() < 0.2:
            rows = f"SELECT {COLUMN_NAMES.replace(' n,', ' CAST(NULL AS int) AS n,')} FROM ({rows})"
        elif rng.random() < 0.2:
            wide_names = COLUMN_NAMES.replace(" k,", " CAST(k AS bigint) AS k,")
            rows = f"SELECT {wide_names.replace(' n,', ' CAST(n AS bigint) + 2147483600 AS n,')} FROM ({rows})"
        return rows

    def _draw_and_condition(self) -> str:
        return self._rng.choice(
            ("", "", " AND t.k > 4", " AND s.d > t.d", " AND t.name LIKE 'n1%'", " AND t.s.a = s.k")
        )

    def _draw_matched_action(self) -> str:
        rng = self._rng
        if rng.random() < 0.2:
            return "DELETE"
        if rng.random() < 0.4:
            return "UPDATE SET *"
        return "UPDATE SET " + ", ".join(rng.sample(self._draw_assignments("t", "s"), rng.choice((1, 2))))

    def _draw_insert_action(self) -> str:
        return self._rng.choice(
            (
                "INSERT *",
                "INSERT *",
                "INSERT (id, n) VALUES (s.id, s.k)",
                "INSERT (name, n, k) VALUES (s.name, s.n + 1, s.n)",
            )
        )

    def _draw_assignments(self, stored_alias: str, source: str = "") -> list[str]:
        own_assignments = [
            "k = t.k + 1",
            "name = concat(t.name, 'x')",
            "s.a = t.n",
            "d = -t.d",
            "dec = t.dec + 0.5",
            "id = t.id",
        ]
        own_assignments += [
            "xs = array(t.n)",
            "n = NULL",
            "day = date_add(t.day, 1)",
            "ok = NOT t.ok",
            "k = 7L",
            "name = 5",
        ]
        own_assignments += [
            "k = t.n * 1000000000L",
            "at = '2026-02-01 00:00:00'",
            "id = t.id + 100",
            "dec = t.dec * 10000000",
        ]
        assignments = [
            "k = s.k",
            "name = s.name",
            "n = s.n",
            "s = s.s",
            "d = s.d",
            "id = s.id",
            "s.b = s.name",
            "at = s.at",
        ]
        return (
            own_assignments + [text.replace("= s.", f"= {source}.") for text in assignments] * 2
            if source
            else own_assignments
        )

    def _draw_where(self) -> str:
        rng, number = self._rng, self._rng.randrange(40)
        choices = [
            f"t.id = {number}",
            f"t.id IN ({number}, {number + 3}, {number + 7}, NULL)",
            f"t.id IN (SELECT id FROM range({number}, {number + 4}))",
            f"t.name = 'n{number}' AND t.k < 8",
            f"t.name IN (SELECT concat('n', id) FROM range({number // 2}, {number // 2 + 3})) AND t.n % 2 = 0",
            f"t.day = DATE'2026-01-02' AND t.k IN (1, {number % 9})",
            f"(t.day, t.k) IN (SELECT DATE'2026-01-02', CAST(id AS int) FROM range({number % 9}))",
            f"t.n BETWEEN {number} AND {number + 4}",
            "t.d = double('NaN')",
            "t.d = 0.0D AND t.n < 30",
            "t.ok",
            f"NOT (t.id > {number})",
            f"t.id = '{number}'",
            f"t.at < timestamp_seconds({number * 1000}) OR t.name IS NULL",
            f"EXISTS (SELECT 1 FROM range({number}, {number + 2}) r WHERE r.id = t.id)",
            "t.s.a = 4",
            f"t.id = {number} OR t.id IS NULL",
            f"t.id = (SELECT max(id) FROM range({number + 1}))",
            f"t.dec = {number % 6} AND t.id > {number - 10}",
        ]
        return rng.choice(choices)


STATEMENTS_BY_KEY = [
    f"MERGE INTO {{t}} t USING ({ROWS.format(start=35, end=45)}) s ON t.id = s.id WHEN MATCHED AND s.k > 3 "
    "THEN UPDATE SET * WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT *",
    f"MERGE INTO {{t}} t USING ({ROWS.format(start=3, end=6)} UNION ALL {ROWS.format(start=3, end=5)}) s "
    "ON t.id = s.id WHEN MATCHED THEN UPDATE SET k = s.k",
    f"MERGE INTO {{t}} t USING ({ROWS.format(start=10, end=16)}) s ON s.id = t.id WHEN MATCHED AND t.k < 9 THEN "
    "UPDATE SET name = concat(s.name, t.name), k = t.k + s.n, dec = t.dec + s.dec",
    f"MERGE INTO {{t}} t USING ({ROWS.format(start=37, end=53)}) s ON t.id = s.id WHEN NOT MATCHED THEN INSERT *",
    "UPDATE {t} t SET k = t.k + 1, s.a = t.n WHERE t.id IN (SELECT IF(id = 7, NULL, id) FROM range(5, 9))",
    "DELETE FROM {t} t WHERE t.id IN (1, 2, 2, NULL, 400)",
]
"""Statements whose conditions compare only the key, so that Spark neither joins nor filters.

The second statement fails, because several rows of its source match one stored row.
"""


def run_statements(
    rig: SparkStatementTables,
    layout: str,
    version: int,
    mode: str,
    seed: int,
    steps: int,
    first_statements: Sequence[str] = (),
) -> Counter[str]:
    """Run statements on both tables, and compare the tables after each statement.

    Args:
        first_statements: Statements that run before the random statements.
    Returns:
        The numbers of statements by how they ran: by Seamark, which first locates the changed rows by their file and
        position, by Iceberg, or with a failure. A statement also counts as "by key" if its rows were found by their
        keys, and as "explained …" with the way that `explain` names.
    """
    name = f"{version}_{mode[:2]}_{list(LAYOUTS).index(layout)}_{seed}"
    for table_owner in (OURS, THEIRS):
        rig.create(f"{table_owner}_{name}", layout, version, mode)
    statements, counts = RandomSparkStatements(random.Random(seed)), Counter[str]()
    for step, text in enumerate([*first_statements, *(statements.draw_statement() for _ in range(steps))]):
        note = f"{layout}, version {version}, {mode}, seed {seed}, step {step}: {text}"
        errors: dict[str, str | None] = {OURS: None, THEIRS: None}
        explained_path = explain(rig.spark, text.replace("{t}", f"{rig.db}.{OURS}_{name}")).path
        for table_owner in (OURS, THEIRS):
            statement = text.replace("{t}", f"{rig.db}.{table_owner}_{name}")
            try:
                if table_owner == THEIRS:
                    rig.spark.sql(statement)
                else:
                    with count_statements(counts):
                        counts[execute(rig.spark, statement).path] += 1
            except PySparkException as error:
                errors[table_owner] = error.getCondition() or type(error).__name__
        counts["failed"] += errors[OURS] is not None
        counts[f"explained {explained_path}"] += 1
        assert errors[OURS] == errors[THEIRS] or set(errors.values()) == ROW_ERRORS, (note, errors)
        assert rig.read_rows(f"{OURS}_{name}", version) == rig.read_rows(f"{THEIRS}_{name}", version), note
    return counts


@contextmanager
def count_statements(counts: Counter[str]) -> Iterator[None]:
    """Count the statements of each kind that find their rows by keys, without a condition or join in Spark."""
    change_rows = _LocatedStatement._compute_exact_changes

    def count_by_key(statement: _LocatedStatement, *arguments: Any) -> ChangedRows | None:
        changes = change_rows(statement, *arguments)
        counts[f"{statement._statement.kind} by key"] += changes is not None
        return changes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_LocatedStatement, "_compute_exact_changes", count_by_key)
        yield


@pytest.mark.parametrize(
    ("layout", "version", "mode"),
    [("by id", 3, "merge-on-read"), pytest.param("by two", 2, "copy-on-write", marks=pytest.mark.slow)],
)
def test_statements_have_the_result_of_icebergs_statements(
    rig: SparkStatementTables, layout: str, version: int, mode: str
) -> None:
    first_statements = STATEMENTS_BY_KEY if layout == "by id" else []
    # The six statements of STATEMENTS_BY_KEY replace three of the four random statements. All of them but one succeed.
    counts = run_statements(rig, layout, version, mode, first_seed(), 4 - len(first_statements) // 2, first_statements)
    assert counts[LOCATED] >= max(1, len(first_statements) - 1), counts
    if first_statements:
        minimum_counts = {"MERGE by key": 3, "UPDATE by key": 1, "DELETE by key": 1}
        assert all(counts[kind] >= count for kind, count in minimum_counts.items()), counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["merge-on-read", "copy-on-write"])
@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_statements_have_the_result_of_icebergs_statements(
    rig: SparkStatementTables, layout: str, version: int, mode: str
) -> None:
    seed = first_seed()
    counts = Counter[str]()
    for number in range(3):
        counts += run_statements(rig, layout, version, mode, 1000 * seed + number, 25)
    assert counts[LOCATED] > counts[ICEBERG] / 2, counts
    assert counts["MERGE by key"], counts


@pytest.mark.slow
def test_insert_overwrite_builds_index_files(rig: SparkStatementTables) -> None:
    overwrite_template = "INSERT OVERWRITE {t} SELECT id, CAST(id AS int), IF(id < 5, 'a', 'b') FROM range({n}, {m})"
    for table_owner in (OURS, THEIRS):
        rig.run_sql(
            f"CREATE TABLE {{db}}.{table_owner}_over (id bigint, n int NOT NULL, day string) USING iceberg "
            "PARTITIONED BY (day) TBLPROPERTIES ('seamark.index.ids'='record(id)')"
        )
    steps = [
        ("static", overwrite_template.replace("{n}", "0").replace("{m}", "10")),
        ("static", "INSERT OVERWRITE {t} PARTITION (day = 'a') SELECT id, id FROM range(100, 102)"),
        ("dynamic", overwrite_template.replace("{n}", "7").replace("{m}", "8")),
        ("dynamic", "INSERT OVERWRITE {t} (n, day, id) VALUES (1, 'c', 9)"),
        ("static", "INSERT OVERWRITE {t} SELECT id, NULL, 'a' FROM range(3)"),
        ("static", "INSERT OVERWRITE {t} SELECT id, id + 3000000000, 'a' FROM range(3)"),
        ("static", "INSERT OVERWRITE {t} SELECT id, n, day FROM {t} WHERE id > 8"),
    ]
    paths = []
    for mode, statement_template in steps:
        rig.spark.conf.set("spark.sql.sources.partitionOverwriteMode", mode)
        errors: dict[str, Any] = {}
        for table_owner in (OURS, THEIRS):
            statement = statement_template.replace("{t}", f"{rig.db}.{table_owner}_over")
            try:
                if table_owner == OURS:
                    paths.append(execute(rig.spark, statement).path)
                else:
                    rig.spark.sql(statement)
            except PySparkException as error:
                errors[table_owner] = error.getCondition()
        assert errors.get(OURS) == errors.get(THEIRS), statement_template
        assert rig.read_rows(f"{OURS}_over", 2) == rig.read_rows(f"{THEIRS}_over", 2), statement_template
    rig.spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert paths == [INDEXED] * 4 + [ICEBERG]  # The two statements with invalid rows failed.


def test_statement_that_seamark_cannot_run_is_run_by_iceberg_with_a_reason(rig: SparkStatementTables) -> None:
    rig.create("told", "by id", 3, "merge-on-read")
    table = f"{rig.db}.told"
    merge_clause = "s ON t.id = s.id WHEN"
    reasons = {
        f"DELETE FROM {table}": "DeleteFromTable",
        f"UPDATE {table} SET n = 1 WHERE length(name) = 1": "condition",
        f"MERGE INTO {table} t USING {table} {merge_clause} MATCHED THEN DELETE": "also reads the table",
        f"DELETE FROM {table} WHERE id IN (SELECT max(id) FROM {table})": "also reads the table",
        f"MERGE INTO {table} t USING (SELECT 1L AS id) s ON t.id > s.id WHEN MATCHED THEN DELETE": "equality",
        f"MERGE INTO {table} t USING (SELECT 1L AS id) {merge_clause} NOT MATCHED BY SOURCE THEN DELETE": "SOURCE",
        f"MERGE WITH SCHEMA EVOLUTION INTO {table} t USING (SELECT 1L AS id) {merge_clause} MATCHED THEN DELETE": (
            "schema"
        ),
        f"INSERT INTO {table} SELECT * FROM {table}": "not a MERGE",
    }
    for text, reason in reasons.items():
        explanation = explain(rig.spark, text)
        assert explanation.path == ICEBERG, (text, explanation)
        assert reason in explanation.reason, (text, explanation)
    small_limits = StatementLimits(rows=5, read_rows=10)
    assert (
        "5 stored rows"
        in execute(rig.spark, f"UPDATE {table} SET k = 0 WHERE id IN (0, 1, 2, 3, 4, 5)", limits=small_limits).reason
    )
    explanation = explain(rig.spark, f"DELETE FROM {table} WHERE id IN (1, 2)")
    assert (explanation.path, explanation.keys, explanation.index, explanation.mode) == (
        LOCATED,
        ("id",),
        "ids",
        "merge-on-read",
    )
    assert sql(rig.spark, f"DELETE FROM {table} WHERE id IN (1, 2)").collect() == []
    assert rig.run_sql(f"SELECT count(*) FROM {table} WHERE id IN (1, 2)") == [(0,)]


@pytest.mark.slow
def test_statement_starts_again_after_a_conflict(rig: SparkStatementTables, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.create("raced", "by id", 3, "merge-on-read")
    text = f"UPDATE {rig.db}.raced SET k = k + 1 WHERE id IN (3, 4)"
    original_write, calls = write_changes, list[Any]()

    def write_after_a_competitor(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            rig.spark.sql(text)
        return original_write(*arguments)

    monkeypatch.setattr("seamark.connector.spark.statements.execution.write_changes", write_after_a_competitor)
    report = execute(rig.spark, text).report
    assert isinstance(report, Report)
    assert report.attempts == len(calls) == 2
    assert rig.run_sql("SELECT id, k FROM {db}.raced WHERE id IN (3, 4) ORDER BY id") == [(3, 5), (4, 6)]


def test_statement_with_an_unknown_commit_outcome_is_not_run_by_iceberg(
    rig: SparkStatementTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.create("lost", "by id", 3, "merge-on-read")
    rows_before = rig.read_rows("lost", 3)

    def lose_answer(*_: Any) -> Any:
        raise Unreachable("the answer was lost")

    monkeypatch.setattr("seamark.connector.write.row_changes.commit", lose_answer)
    with pytest.raises(Unreachable):
        execute(rig.spark, f"DELETE FROM {rig.db}.lost WHERE id = 3")
    assert rig.read_rows("lost", 3) == rows_before


@pytest.mark.slow
def test_cached_table_is_read_again_after_a_statement(rig: SparkStatementTables) -> None:
    rig.create("cached", "by id", 3, "merge-on-read")
    table_name = f"{rig.db}.cached"
    rig.spark.catalog.cacheTable(table_name)
    try:
        count = rig.spark.table(table_name).count()
        assert execute(rig.spark, f"DELETE FROM {table_name} WHERE id IN (3, 4)").path == LOCATED
        assert rig.spark.table(table_name).count() == count - 2
    finally:
        rig.spark.catalog.uncacheTable(table_name)


@pytest.mark.slow
def test_statement_on_an_unknown_catalog_gets_a_hint(rig: SparkStatementTables) -> None:
    catalog = rig.db.partition(".")[0]
    rig.spark.catalog.setCurrentCatalog("spark_catalog")  # Earlier tests of this session may have changed it.
    for text in ("SELECT * FROM {t}", "DELETE FROM {t} WHERE id = 3"):
        with pytest.raises(AnalysisException) as error:
            sql(rig.spark, text.replace("{t}", f"{catalog}x.db.told"))
        assert any(f"did you mean '{catalog}'" in note for note in error.value.__notes__)


@pytest.mark.slow
def test_sql_command_merges_updates_and_deletes_in_the_local_spark(rig: SparkStatementTables) -> None:
    """The session of this test is the `local[2]` session of `seamark sql`.

    The same statements run with Iceberg on a second table.
    """
    for table_owner in (OURS, THEIRS):
        rig.run_sql(f"CREATE TABLE {{db}}.{table_owner}_cli (id bigint, name string, price decimal(9,2)) USING iceberg")
        rig.run_sql(f"INSERT INTO {{db}}.{table_owner}_cli SELECT id, concat('n', id), id FROM range(10)")
    rig.run_sql("CREATE TABLE {db}.changes (id bigint, name string, price decimal(9,2), gone boolean) USING iceberg")
    rig.run_sql("INSERT INTO {db}.changes VALUES (1, 'one', 1.25, false), (2, NULL, NULL, true), (20, 'new', 2, false)")
    statements = [
        "MERGE INTO {t} AS t USING {changes} AS c ON t.id = c.id WHEN MATCHED AND c.gone THEN DELETE "
        "WHEN MATCHED THEN UPDATE SET name = c.name, price = t.price + c.price "
        "WHEN NOT MATCHED AND NOT c.gone THEN INSERT (id, name, price) VALUES (c.id, c.name, c.price)",
        "UPDATE {t} SET name = 'many', price = price * 2 WHERE id >= 8 OR name IS NULL",
        "DELETE FROM {t} WHERE id = 5 OR price < 1",
    ]
    catalog = rig.db.partition(".")[0]
    command = ["sql", "--url", rig.client.url, "--spark", "local[2]", "--spark-catalog", catalog, "--engine", "spark"]
    for statement in statements:
        result = CliRunner().invoke(
            cli, [*command, statement.format(t=f"db.{OURS}_cli", changes="sea.db.changes")], catch_exceptions=False
        )
        assert result.exit_code == 0, (statement, result.output)
        rig.spark.sql(statement.format(t=f"{rig.db}.{THEIRS}_cli", changes=f"{rig.db}.changes"))
        rig.run_sql(f"REFRESH TABLE {{db}}.{OURS}_cli")
        assert rig.read_rows(f"{OURS}_cli", 2) == rig.read_rows(f"{THEIRS}_cli", 2), statement
    assert len(rig.read_rows(f"{OURS}_cli", 2)) == 8
    explanation = CliRunner().invoke(
        cli, [*command[:-2], "--explain", statements[0].format(t="db.ours_cli", changes="db.changes")]
    )
    assert "Engine: spark" in explanation.output
    refusal = CliRunner().invoke(cli, [*command, f"UPDATE db.{OURS}_cli SET price = price / 3 WHERE id = 1"])
    assert refusal.exit_code == 2
    assert "may have a different meaning" in refusal.output
