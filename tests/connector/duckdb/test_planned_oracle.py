"""Random statements on a served catalog: `seamark.duckdb.sql` returns the rows that DuckDB returns for a copy.

Tables have several files, deleted and updated rows, NaN, partitions by all transforms, times before 1970, texts that
are longer than their bounds, and added, renamed and dropped columns.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    Transform,
    TruncateTransform,
    YearTransform,
)

import seamark.duckdb
from tests.connector.analysis.comparisons import TABLE_NAMES, quote
from tests.connector.duckdb.loose_statements import LooseStatements
from tests.seeds import examples, first_seed
from tests.services.seamark import Seamark


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("duckdb")) as server:
        yield server


EDGE_VALUES = {
    "date": ["DATE '1969-12-31'", "DATE '1950-02-28'", "DATE '0033-01-01'"],
    "timestamp": ["TIMESTAMP '1969-12-31 12:00:00'", "TIMESTAMP '1969-12-01'", "TIMESTAMP '1950-02-28 23:59:59'"],
    "string": ["'El cliente llamó por teléfono'", "'ééééééééééééééé'", "'El cliente llam'", "'日本日本日本日本'"],
    "long": ["-1", "-7", "-2020"],
}
TRANSFORMS: dict[str, list[Transform[Any, Any]]] = {
    "long": [TruncateTransform(10), BucketTransform(3), IdentityTransform()],
    "decimal(9, 2)": [BucketTransform(3), IdentityTransform()],
    "string": [TruncateTransform(3), TruncateTransform(12), BucketTransform(3), IdentityTransform()],
    "date": [YearTransform(), MonthTransform(), DayTransform(), IdentityTransform()],
    "timestamp": [YearTransform(), MonthTransform(), DayTransform(), HourTransform(), IdentityTransform()],
    "boolean": [IdentityTransform()],
}
"""Transforms of partition fields, by column type.

Truncated decimals are excluded: DuckDB 1.5.5 invalidates its database when it changes rows with a negative one.
"""


class PlannedStatements(LooseStatements):
    """Draws statements on tables in a schema of the catalog; each INSERT writes its own file.

    Names of tables keep their case, because DuckDB does not always find a table whose name is written in another case.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.partitioned_tables: set[str] = set()

    def spell(self, name: str) -> str:
        return quote(name) if name in TABLE_NAMES else super().spell(name)

    def draw_value(self, kind: str) -> str:
        return (
            self.rng.choice(EDGE_VALUES[kind])
            if kind in EDGE_VALUES and self.draw_chance(0.25)
            else super().draw_value(kind)
        )

    def draw_partition_field(self, name: str) -> tuple[str, Transform[Any, Any]] | None:
        """Return a random column of the table `name` and a transform for its partition field, or None."""
        (table,) = (table for table in self.tables if table.name == name)
        columns = [(column, kind) for column, kind in table.columns.items() if kind in TRANSFORMS and column != "added"]
        if not columns or self.draw_chance(0.3):
            return None
        column, kind = self.rng.choice(columns)
        return column, self.rng.choice(TRANSFORMS[kind])

    def make_tables(self) -> list[str]:
        statements = super().make_tables()
        for table in self.tables:
            name = quote(table.name)
            if self.draw_chance(0.5):
                table.columns["added"] = "long"
                statements.append(f"ALTER TABLE {name} ADD COLUMN added BIGINT")
                statements.append(f"INSERT INTO {name} (added) VALUES (1), (3)")
            for _ in range(self.rng.choice([0, 1])):
                column, kind = self.rng.choice(list(table.columns.items()))
                condition = f"{quote(column)} = {self.draw_value(kind)}"
                value = "NULL" if self.draw_chance(0.3) else self.draw_value(kind)
                change = f"UPDATE {name} SET {quote(column)} = {value} WHERE"
                statements.append(f"{self.rng.choice([f'DELETE FROM {name} WHERE', change])} {condition}")
        return statements


def run_campaign(server: Seamark, seed: int, lakes: int, queries: int) -> Counter[str]:
    """Check random statements on random tables, and return the counts of their outcomes.

    Args:
        server: The server.
        seed: The seed of the tables and statements.
        lakes: The number of schemas with random tables.
        queries: The number of statements on the tables of each schema.
    """
    counts: Counter[str] = Counter()
    for number in range(lakes):
        rng = random.Random(f"{seed}/{number}")
        statements = PlannedStatements(rng)
        schema = f"s{seed}_{number}"
        with closing(seamark.duckdb.connect(server.base_url)) as con, closing(duckdb.connect()) as copy:
            con.execute(f"CREATE SCHEMA sea.{schema}")
            con.execute(f"USE sea.{schema}")
            for text in statements.make_tables():
                con.execute(text)
                if text.startswith("CREATE TABLE"):
                    counts["partitioned"] += partition_randomly(server, schema, statements)
            copy.execute(f"CREATE SCHEMA {schema}")
            copy.execute(f"USE {schema}")
            for table in statements.tables:
                rows = con.sql(f"FROM {quote(table.name)}").to_arrow_table()
                copy.register("rows", rows)
                copy.execute(f"CREATE TABLE {quote(table.name)} AS FROM rows")
                copy.unregister("rows")
            for _ in range(queries):
                # Drawn statements can name DuckDB's schema `main`, but the tables are in another schema.
                text = statements.draw_query(rng.choice([1, 1, 1, 2])).replace("main", schema)
                check_planned_rows(con, text, counts, f"seed {seed}/{number}", copy)
    return counts


def partition_randomly(server: Seamark, schema: str, statements: PlannedStatements) -> bool:
    """Partition the first new table for which a partition field is drawn. Return True if there is one."""
    with RestCatalog("sea", uri=server.base_url) as catalog:
        names = {name for _, name in catalog.list_tables(schema)}
        for table in statements.tables:
            if table.name in names and table.name not in statements.partitioned_tables:
                statements.partitioned_tables.add(table.name)
                transform = statements.draw_partition_field(table.name)
                if transform is not None:
                    with catalog.load_table((schema, table.name)).update_spec() as update:
                        update.add_field(*transform, "random_partition")
                    return True
    return False


def check_planned_rows(
    con: duckdb.DuckDBPyConnection,
    text: str,
    counts: Counter[str],
    seed: str,
    copy: duckdb.DuckDBPyConnection | None = None,
) -> None:
    """Check that the statement returns the same rows without plans and over plans.

    Args:
        copy: A database with the same tables in memory, where DuckDB cannot leave files out.
    """
    try:
        expected = Counter(map(repr, (copy or con).sql(text).fetchall()))
    except duckdb.Error:
        counts["invalid"] += 1
        return
    rewrite = seamark.duckdb.rewrite_query(con, text)
    counts["queries"] += 1
    counts[rewrite.summary.partition("=")[0] if rewrite.statement is None else "rewritten"] += 1
    counts["files left out"] += rewrite.considered_files - rewrite.files
    if rewrite.statement is not None:
        try:
            rows = Counter(map(repr, con.sql(rewrite.statement).fetchall()))
        except duckdb.InternalException:  # DuckDB's optimizer has a fault, and the statement returns no rows.
            counts["internal errors"] += 1
            return
        assert rows == expected, f"{seed}\n{text}\n-- became\n{rewrite.statement}\n{rewrite.summary}"


def check_campaign_counts(counts: Counter[str]) -> None:
    """Check that the campaign was effective.

    On average, one statement in nine is rewritten. With sixty statements, it can be one in twenty by chance, so the
    limit is below that. The plans of all statements leave out more files than a tenth of the number of statements.
    Faults of DuckDB's optimizer affect at most 2 % of the statements.
    """
    assert counts["rewritten"] > 0.04 * counts["queries"], counts
    assert counts["files left out"] > 0.1 * counts["queries"], counts
    assert counts["partitioned"], counts
    assert counts["internal errors"] <= 0.02 * counts["queries"], counts


def test_random_statements_return_the_same_rows_with_and_without_plans(server: Seamark) -> None:
    check_campaign_counts(run_campaign(server, first_seed(), examples(2, 1), examples(30, 9)))


@pytest.mark.slow
def test_many_random_statements_return_the_same_rows_with_and_without_plans(server: Seamark) -> None:
    check_campaign_counts(run_campaign(server, first_seed() + 1, 25, 40))


FIELDS = {"id": "i", "info.zone": "i", "info.tag": "t", "info.more.n": "i", "info.day": "d", "zone": "i", "tag": "t"}


def create_tables_with_structs(con: duckdb.DuckDBPyConnection, rng: random.Random) -> None:
    """Create tables with structs; each INSERT writes its own file, and some structs and fields are null.

    The column `zone` has the name of a field. The table `info` has the name of the struct, and its columns have the
    names of fields but other types. Two columns have exchanged their names.
    """
    extra_type = "STRUCT(n BIGINT, other VARCHAR)"
    con.execute(
        f"CREATE TABLE facts (id BIGINT, info STRUCT(zone INTEGER, tag VARCHAR, day DATE, more "
        f"{extra_type}), zone INTEGER)"
    )
    con.execute("CREATE TABLE info (zone VARCHAR, tag INTEGER)")
    con.execute("INSERT INTO info VALUES ('3', 3), ('4', NULL)")

    def replace_with_null(text: str, share: float = 0.15) -> str:
        return "NULL" if rng.random() < share else text

    for number in range(8):
        rows = []
        for _ in range(rng.randint(1, 3)):
            day = replace_with_null(f"DATE '2026-01-{number + 1:02}'")
            nested_struct = replace_with_null(f"{{'n': {replace_with_null(str(number * 10))}, 'other': 'x'}}")
            struct = (
                f"{{'zone': {replace_with_null(str(number))}, 'tag': {replace_with_null(repr(f'a{number}'))}, "
                f"'day': {day}, 'more': {nested_struct}}}"
            )
            rows.append(f"({number}, {replace_with_null(struct)}, {rng.randint(0, 7)})")
        con.execute(f"INSERT INTO facts (id, info, zone) VALUES {', '.join(rows)}")
        for names in ("id TO other", "zone TO id", "other TO zone") if number == 2 else ():
            con.execute(f"ALTER TABLE facts RENAME COLUMN {names}")


def draw_field_condition(rng: random.Random, alias: str) -> str:
    name, kind = rng.choice([(name, kind) for name, kind in FIELDS.items() if name != "tag"])
    field = rng.choice([f"{alias}.{name}" if alias and name != "info.more.n" else name, name])
    op = rng.choice(["=", "=", "<", ">=", "<>", "IS DISTINCT FROM"])
    number = rng.randint(0, 8)
    literals = {
        "i": str(number * (10 if name.endswith("n") else 1)),
        "t": f"'a{number}'",
        "d": f"DATE '2026-01-0{number + 1}'",
    }
    literal = literals[kind]
    result = rng.choice(
        [
            *[f"{field} {op} {literal}"] * 4,
            f"{field} IN ({literal}, {literal})",
            f"{field} IS {rng.choice(['', 'NOT '])}NULL",
            f"coalesce({field}, {literal}) = {literal}",
            f"{field} BETWEEN {literal} AND {literal}",
            f"CASE WHEN {field} < {literal} THEN 1 ELSE 2 END = 1",
        ]
    )
    return f"NOT ({result})" if rng.random() < 0.15 else result


@pytest.mark.slow
def test_conditions_on_fields_of_structs_leave_files_out_but_no_rows(server: Seamark) -> None:
    rng, counts = random.Random(first_seed() + 2), Counter[str]()
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA sea.structs")
        con.execute("USE sea.structs")
        create_tables_with_structs(con, rng)
        with RestCatalog("sea", uri=server.base_url) as catalog:
            version_clauses = [
                f" AT (VERSION => {snapshot.snapshot_id})"
                for snapshot in catalog.load_table("structs.facts").snapshots()
            ]
        for _ in range(examples(150)):
            alias = rng.choice(["", "f", "info"])
            parts = [draw_field_condition(rng, alias) for _ in range(rng.choice([1, 1, 2]))]
            where = f" {rng.choice(['AND', 'OR'])} ".join(parts)
            version_clause = rng.choice(version_clauses) if rng.random() < 0.5 else ""
            facts = f"facts {alias}{version_clause}"
            text = rng.choice(
                [
                    *[f"SELECT * FROM {facts} WHERE {where}"] * 4,
                    f"SELECT count(*), sum(id) FILTER (WHERE {where}) FROM {facts}",
                    f"SELECT id FROM {facts} LEFT JOIN (SELECT 3 AS k) ON k = id WHERE {where}",
                    f"SELECT x.tag FROM info x WHERE EXISTS (SELECT 1 FROM {facts} WHERE {where})",
                    f"SELECT id FROM (SELECT * FROM {facts}) {alias or 'q'} WHERE {where}",
                    f"SELECT y.id FROM facts y WHERE EXISTS (SELECT 1 FROM {facts} WHERE id = y.zone AND {where})",
                ]
            )
            count_before = counts["rewritten"]
            check_planned_rows(con, text, counts, f"seed {first_seed() + 2}")
            counts["rewritten in the past"] += bool(version_clause) and counts["rewritten"] > count_before
    assert counts["invalid"] < 0.3 * counts["queries"], counts
    assert counts["rewritten"] > 0.1 * counts["queries"], counts
    assert counts["rewritten in the past"] > 0, counts


@pytest.mark.slow
def test_comparison_with_the_extreme_of_a_whole_table_leaves_files_out(server: Seamark) -> None:
    """The minimum or maximum comes from the days that still have rows, not from the deleted days."""
    counts = Counter[str]()
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA sea.extremes")
        con.execute("USE sea.extremes")
        con.execute("CREATE TABLE facts (id BIGINT, day DATE)")
        con.execute("CREATE TABLE other (day DATE)")
        con.execute("INSERT INTO other VALUES (NULL)")
        for number in range(8):
            con.execute(f"INSERT INTO facts SELECT {number}, DATE '2026-01-01' + {number} FROM range(3)")
        last_query = "SELECT * FROM facts WHERE day = (SELECT max(day) FROM facts)"
        for text in (
            last_query,
            "SELECT count(*) FROM facts WHERE (SELECT min(f.id) FROM facts f) = id",
            "SELECT * FROM facts x JOIN facts y ON x.id = y.id WHERE x.day IN (SELECT max(day) FROM facts)",
        ):
            check_planned_rows(con, text, counts, text)
            rewrite = seamark.duckdb.rewrite_query(con, text)
            assert "extremes.facts=1/8" in rewrite.summary, (text, rewrite)
        planned_query = seamark.duckdb.rewrite_query(con, last_query).statement
        assert planned_query is not None
        con.execute("INSERT INTO facts VALUES (9, DATE '2026-02-01')")
        # Both tables are read at the snapshot of the plan.
        assert con.sql(planned_query).fetchall() == [(7, date(2026, 1, 8))] * 3
        con.execute("DELETE FROM facts WHERE id IN (7, 9)")
        check_planned_rows(con, last_query, counts, "after a delete")
        assert seamark.duckdb.sql(con, last_query).fetchall() == [(6, date(2026, 1, 7))] * 3
        # A table without values has no minimum and no maximum.
        check_planned_rows(con, "SELECT * FROM facts WHERE day = (SELECT max(day) FROM other)", counts, "no value")
    assert counts["queries"] == 5, counts


def test_comparisons_with_extremes_and_ranges_leave_files_out(server: Seamark) -> None:
    counts = Counter[str]()
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA sea.ranges")
        con.execute("USE sea.ranges")
        con.execute("CREATE TABLE facts (id BIGINT, day DATE, region VARCHAR)")
        con.execute("CREATE TABLE periods (name VARCHAR, start DATE, stop TIMESTAMP)")
        for number in range(8):
            region = "north" if number < 5 else "south"
            con.execute(f"INSERT INTO facts SELECT {number}, DATE '2026-01-01' + {number}, '{region}' FROM range(3)")
        con.execute("INSERT INTO periods VALUES ('a', '2026-01-02', '2026-01-03 12:00:00'), ('b', '2026-01-07', NULL)")
        con.execute("INSERT INTO periods VALUES ('a', '2026-01-08', '2026-01-09'), ('c', '2026-01-05', '2026-01-01')")
        for text, files in (
            ("SELECT * FROM facts WHERE day >= (SELECT max(day) FROM facts WHERE region = 'north')", 4),
            ("SELECT * FROM facts WHERE day > (SELECT max(day) FROM facts WHERE region = 'north')", 3),
            ("SELECT * FROM facts WHERE day = (SELECT max(day) FROM facts WHERE region = 'north')", 1),
            ("SELECT * FROM facts WHERE (SELECT min(id) FROM facts WHERE region = 'south') > id", 5),
            ("SELECT * FROM facts WHERE day = (SELECT max(day) FROM facts WHERE region = 'east')", 0),
            ("SELECT * FROM facts f JOIN periods p ON f.day BETWEEN p.start AND p.stop WHERE p.name = 'a'", 3),
            ("SELECT * FROM periods p LEFT JOIN facts f ON f.day >= p.start AND f.day < p.stop WHERE p.name = 'c'", 0),
            ("SELECT * FROM facts WHERE day < (SELECT start FROM periods WHERE name = 'c')", 4),
        ):
            check_planned_rows(con, text, counts, text)
            summary = seamark.duckdb.rewrite_query(con, text).summary
            assert f"ranges.facts={files}/8" in summary, (text, summary)
        text = "SELECT * FROM facts f LEFT JOIN periods p ON f.day BETWEEN p.start AND p.stop AND p.name = 'a'"
        check_planned_rows(con, text, counts, text)
        assert len(seamark.duckdb.sql(con, text).fetchall()) == 24
    assert counts["queries"] == 9, counts


@pytest.mark.slow
def test_ranges_of_decimals_texts_and_floats_leave_files_out(server: Seamark) -> None:
    counts = Counter[str]()
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA sea.kinds")
        con.execute("USE sea.kinds")
        con.execute("CREATE TABLE facts (id BIGINT, amount DECIMAL(9, 2), wide DECIMAL(30, 4), code VARCHAR, x DOUBLE)")
        con.execute(
            "CREATE TABLE spans (name VARCHAR, low DECIMAL(9, 2), high DECIMAL(9, 2), wide_low DECIMAL(30, 4), "
            "code_low VARCHAR, code_high VARCHAR, x_low DOUBLE, x_high DOUBLE)"
        )
        for number in range(8):
            x = "'NaN'::DOUBLE" if number == 7 else f"{number}.5"
            con.execute(
                f"INSERT INTO facts SELECT {number}, {number}.25, 1e20 * {number}, 'k{number}', {x} FROM range(3)"
            )
        con.execute("INSERT INTO spans VALUES ('a', 2.25, 3.24, 5e20, 'k3', 'k5x', 2.5, 4)")
        con.execute("INSERT INTO spans VALUES ('b', 6, NULL, NULL, 'k', '', 'NaN', 'NaN')")
        for text, files in (
            ("SELECT * FROM facts JOIN spans ON amount BETWEEN low AND high WHERE name = 'a'", 1),
            ("SELECT * FROM facts JOIN spans ON amount >= low WHERE name = 'b'", 2),
            (
                "SELECT * FROM facts JOIN spans ON wide > wide_low WHERE name = 'a'",
                3,
            ),  # The range includes its bound.
            ("SELECT * FROM facts JOIN spans ON code >= code_low AND code < code_high WHERE name = 'a'", 3),
            ("SELECT * FROM facts JOIN spans ON code BETWEEN code_low AND code_high WHERE name = 'b'", 0),
            ("SELECT * FROM facts JOIN spans ON x BETWEEN x_low AND x_high WHERE name = 'a'", 3),  # Bounds ignore NaN.
            ("SELECT * FROM facts JOIN spans ON x < x_high WHERE name = 'a'", 5),
            # NaN is the greatest number, and the files that DuckDB writes have no NaN counts.
            ("SELECT * FROM facts JOIN spans ON x > x_high WHERE name = 'a'", 8),
            ("SELECT * FROM facts JOIN spans ON x BETWEEN x_low AND x_high WHERE name = 'b'", 8),
            ("SELECT * FROM facts WHERE code > (SELECT code_high FROM spans WHERE name = 'a')", 2),
        ):
            check_planned_rows(con, text, counts, text)
            summary = seamark.duckdb.rewrite_query(con, text).summary
            assert f"kinds.facts={files}/8" in summary, (text, summary)
    assert counts["queries"] == 10, counts


@pytest.mark.slow
def test_extremes_of_names_in_with_leave_files_out(server: Seamark) -> None:
    counts = Counter[str]()
    with closing(seamark.duckdb.connect(server.base_url)) as con:
        con.execute("CREATE SCHEMA sea.named")
        con.execute("USE sea.named")
        con.execute("CREATE TABLE facts (id BIGINT, day DATE, region VARCHAR)")
        for number in range(8):
            region = "north" if number < 5 else "south"
            con.execute(f"INSERT INTO facts SELECT {number}, DATE '2026-01-01' + {number}, '{region}' FROM range(3)")
        latest_days, north_rows = (
            "m AS (SELECT max(day) AS d FROM facts)",
            "r AS (SELECT * FROM facts WHERE region = 'north')",
        )
        for text, files in (
            (f"WITH {latest_days} SELECT f.* FROM facts f, m WHERE f.day = m.d", 1),
            (f"WITH {latest_days} SELECT f.* FROM m LEFT JOIN facts f ON f.day = m.d", 1),
            (f"WITH {latest_days} SELECT * FROM facts WHERE day = (SELECT d FROM m)", 1),
            (f"WITH {latest_days} SELECT * FROM facts WHERE day < (SELECT d FROM m) AND id > 4", 2),
            (
                f"WITH {north_rows}, m AS (SELECT max(day) AS d FROM r) SELECT f.* FROM facts f JOIN m ON f.day > m.d",
                3,
            ),
            ("SELECT f.* FROM facts f JOIN (SELECT min(id) AS low FROM facts WHERE id > 5) m ON m.low <= f.id", 2),
        ):
            check_planned_rows(con, text, counts, text)
            summary = seamark.duckdb.rewrite_query(con, text).summary
            assert f"named.facts={files}/8" in summary, (text, summary)
    assert counts["queries"] == 6, counts
