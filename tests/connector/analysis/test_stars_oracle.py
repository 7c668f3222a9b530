"""Tests that random queries on a star schema give the same rows if its tables contain only the required rows.

The queries have forms that queries on random tables seldom have: joins on the day, month or year of a column, joins
within each branch of OR, disjunctions over several dimensions, columns of subqueries. DuckDB runs both
statements, as in `test_scans_oracle.py`. Each query is analysed in Trino's and in DuckDB's dialect.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import duckdb
import pytest

from seamark.connector.analysis.scans import find_scans
from seamark.connector.plans.scan import Scan
from tests.connector.analysis.comparisons import KINDS, VALUES, StoredRelation
from tests.connector.analysis.test_scans_oracle import check_same_rows, count_rows
from tests.connector.duckdb.test_statements_oracle import check_random_query
from tests.seeds import examples, first_seed

TABLES = {
    "fact": {"k1": "long", "k2": "long", "c": "long", "ts": "timestamp", "d": "date", "t": "string"},
    "days": {"day": "date", "start": "timestamp", "yr": "long", "x": "long"},
    "one": {"k": "long", "x": "long", "name": "string"},
    "two": {"k": "long", "y": "long", "name": "string"},
}
ROW_COUNTS = {"fact": 30, "days": 8, "one": 5, "two": 5}
DAY_JOIN_CONDITIONS = [
    "CAST(f.ts AS date) = days.day",
    "date_trunc('day', f.ts) = days.start",
    "date_trunc('month', f.ts) = days.start",
    "date_trunc('month', f.d) = days.day",
    "days.day = date_trunc('year', f.d)",
    "date_trunc('hour', f.ts) = days.start",
    "year(f.ts) = days.yr",
    "days.yr = extract(YEAR FROM f.d)",
    "f.d = days.day",
]
LITERALS_BY_KIND = {
    "long": ["0", "1", "2"],
    "string": ["'a'", "'ab'", "'b'"],
    "date": [*VALUES["date"], "DATE '1969-12-31'"],
    "timestamp": [
        *VALUES["timestamp"],
        "TIMESTAMP '2020-02-01 00:00:00'",
        "TIMESTAMP '1969-12-31 23:59:59.999999'",
        "TIMESTAMP '1969-12-31 23:00:00'",
    ],
}


class Stars:
    """A star schema and random queries on it.

    The class has the interface of `RandomStatements`, which `check_random_query` requires.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tables = [StoredRelation(name, columns) for name, columns in TABLES.items()]
        self.comma_join_conditions: list[str] = []

    def make_tables(self) -> list[str]:
        statements = []
        for name, columns in TABLES.items():
            typed_columns = ", ".join(f"{column} {KINDS[kind]}" for column, kind in columns.items())
            statements.append(f"CREATE TABLE {name} ({typed_columns})")
            for _ in range(self.rng.choice([0, *[ROW_COUNTS[name]] * 9])):
                values = (self.draw_value(column, kind) for column, kind in columns.items())
                statements.append(f"INSERT INTO {name} VALUES ({', '.join(values)})")
        return statements

    def draw_value(self, column: str, kind: str) -> str:
        if self.draw_chance(0.15):
            return "NULL"
        return self.rng.choice(["2020", "2021", "1969"] if column == "yr" else LITERALS_BY_KIND[kind])

    def draw_chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def draw_query(self, _depth: int = 1) -> str:
        """Return a query. `_depth` is ignored: callers pass it, because other generators need it."""
        source, names = self.draw_fact(), ["f"]
        for name, join_condition in self.rng.sample(self.draw_joins(), self.rng.randint(1, 3)):
            kind = self.rng.choice(["JOIN", "JOIN", "JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN", ","])
            extra_condition = (
                f" {self.rng.choice(['AND', 'OR'])} {self.draw_condition([*names, name])}"
                if self.draw_chance(0.15)
                else ""
            )
            relation = self.draw_dimension(name)
            if kind == "," and not extra_condition:
                source += f" CROSS JOIN {relation}"
                names.append(name)
                self.comma_join_conditions.append(join_condition)
                continue
            if self.draw_chance(0.15):
                join_condition = self.repeat_in_branches(join_condition, [*names, name])
            source += f" {kind if kind != ',' else 'JOIN'} {relation} ON {join_condition}{extra_condition}"
            names.append(name)
        where = [
            *(self.repeat_in_branches(join_condition, names) for join_condition in self.comma_join_conditions),
            self.draw_condition(names),
        ]
        if self.draw_chance(0.4):
            where.append(self.draw_condition(names))
        self.comma_join_conditions = []
        projection = self.rng.choice(["count(*), min(f.c)", "f.c, f.ts", "f.*", "DISTINCT f.k1", "f.k1, count(*)"])
        tail = " GROUP BY f.k1" if projection.startswith("f.k1,") else ""
        return f"SELECT {projection} FROM {source} WHERE {' AND '.join(where)}{tail}"

    def draw_fact(self) -> str:
        return self.rng.choice(
            [
                "fact AS f",
                "fact AS f",
                "(SELECT * FROM fact WHERE c < 2) AS f",
                "(SELECT * FROM fact AS a WHERE a.c IN (SELECT y FROM two) OR a.c = 1) AS f",
                "(SELECT k1, k2, c, ts, d, t FROM fact GROUP BY k1, k2, c, ts, d, t) AS f",
            ]
        )

    def draw_dimension(self, name: str) -> str:
        columns = ", ".join(TABLES[name])
        first, *_, last = TABLES[name]
        return self.rng.choice(
            [
                name,
                name,
                name,
                f"(SELECT {columns} FROM {name}) AS {name}",
                f"(SELECT {columns} FROM {name} GROUP BY ROLLUP ({columns})) AS {name}",
                f"(SELECT {columns} FROM {name} ORDER BY {columns} LIMIT 3) AS {name}",
                f"(SELECT {name}.* FROM two AS z LEFT JOIN {name} ON z.k = {name}.{last}) AS {name}"
                if TABLES[name][last] == "long"
                else name,
                f"(SELECT {columns} FROM {name} WHERE {first} IS NOT NULL) AS {name}",
            ]
        )

    def draw_joins(self) -> list[tuple[str, str]]:
        return [("days", self.rng.choice(DAY_JOIN_CONDITIONS)), ("one", "f.k1 = one.k"), ("two", "two.k = f.k2")]

    def repeat_in_branches(self, join_condition: str, names: Sequence[str]) -> str:
        """Return the join condition, in some cases repeated in each branch of an OR.

        In rare cases, one branch lacks the join, and may contain a different join.
        """
        if self.draw_chance(0.4):
            return join_condition
        first, _, other = join_condition.partition(" = ")
        branches = []
        for _ in range(self.rng.choice([2, 2, 3])):
            branch_condition = self.rng.choice(
                [
                    join_condition,
                    join_condition,
                    f"{other} = {first}",
                    f"({join_condition})",
                    f"{join_condition} AND {join_condition}",
                ]
            )
            if self.draw_chance(0.1):
                branch_condition = self.rng.choice(
                    [f"{first} <> {other}", "f.k1 = f.k2", f"{join_condition} OR {self.build_branch(names)}"]
                )
            branches.append(f"({branch_condition} AND {self.build_branch(names)})")
        return f"({' OR '.join(branches)})"

    def draw_condition(self, names: Sequence[str]) -> str:
        branches = [self.build_branch(names) for _ in range(self.rng.choice([1, 1, 2, 2, 3]))]
        text = f"({' OR '.join(branches)})"
        return f"NOT {text}" if self.draw_chance(0.1) else text

    def build_branch(self, names: Sequence[str]) -> str:
        comparisons = [self.draw_comparison(self.rng.choice(names)) for _ in range(self.rng.choice([1, 1, 2]))]
        return comparisons[0] if len(comparisons) == 1 else f"({' AND '.join(comparisons)})"

    def draw_comparison(self, name: str) -> str:
        table = "fact" if name == "f" else name
        column, kind = self.rng.choice(list(TABLES[table].items()))
        reference, literal = f"{name}.{column}", self.draw_value(column, kind)
        return self.rng.choice(
            [
                f"{reference} = {literal}",
                f"{reference} = {literal}",
                f"{reference} IN ({literal}, {self.draw_value(column, kind)})",
                f"{reference} <> {literal}",
                f"{reference} >= {literal}",
                f"{reference} IS NULL",
                f"{reference} IS DISTINCT FROM {literal}",
                f"NOT {reference} = {literal}",
            ]
        )


def run_campaign(seed: int, star_count: int, query_count: int) -> tuple[Counter[str], Counter[str]]:
    """Check random queries, and return counts of their properties in Trino's and in DuckDB's dialect."""
    counts, duckdb_counts = Counter[str](), Counter[str]()
    for number in range(star_count):
        seed_text = f"seed {seed}/{number}"
        rng = random.Random(seed_text)
        statements = Stars(rng)
        # With one thread, rows with equal keys keep their order.
        with duckdb.connect(config={"threads": 1}) as connection:
            for text in statements.make_tables():
                connection.execute(text)
            for _ in range(query_count):
                text = statements.draw_query()
                scans = find_scans(text, find_columns=lambda names: TABLES.get(names[2]))
                counts["rows left out by joins"] += check_same_rows(
                    rng, connection, text, scans, count_rows(connection, text), seed_text
                )
                count_query_forms(counts, scans)
                check_random_query(rng, statements, connection, duckdb_counts, seed_text)  # type: ignore[arg-type]
    return counts, duckdb_counts


def count_query_forms(counts: Counter[str], scans: Sequence[Scan]) -> None:
    joins = [join for scan in scans for join in scan.joins]
    counts["queries"] += 1
    counts["periods"] += any(join.transform != "identity" for join in joins)
    counts["alternatives"] += any(join.any_of is not None for join in joins)
    counts["with exempt condition"] += any(join.exempt_condition is not None for join in joins)


def check_campaign_counts(counts: Counter[str], duckdb_counts: Counter[str]) -> None:
    assert counts["periods"] > 0.2 * counts["queries"], counts
    assert min(counts["alternatives"], counts["with exempt condition"]) > 0.02 * counts["queries"], counts
    assert counts["rows left out by joins"] > counts["queries"], counts
    assert duckdb_counts["understood"] > 0.8 * duckdb_counts["queries"], duckdb_counts
    assert duckdb_counts["periods"] > 0.15 * duckdb_counts["queries"], duckdb_counts
    assert duckdb_counts["joins"] > 0.5 * duckdb_counts["queries"], duckdb_counts


def test_random_queries_on_stars_keep_their_rows() -> None:
    check_campaign_counts(*run_campaign(first_seed(), examples(2, 1), 25))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_queries_on_stars_keep_their_rows() -> None:
    check_campaign_counts(*run_campaign(first_seed() + 1, 60, 100))
