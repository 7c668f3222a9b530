"""The 13 queries of the Star Schema Benchmark, in the text of its paper, and their answers by an independent engine.

DuckDB reads the Parquet files from which the tables were created. It therefore shares neither the catalog, nor Iceberg,
nor Spark with the answers that it checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import duckdb

from bench.ssb.generate import TABLES, get_table_path

_FLIGHT_1 = """
select sum(lo_extendedprice*lo_discount) as revenue
from lineorder, date
where lo_orderdate = d_datekey
and {}"""

_FLIGHT_2 = """
select sum(lo_revenue), d_year, p_brand1
from lineorder, date, part, supplier
where lo_orderdate = d_datekey
and lo_partkey = p_partkey
and lo_suppkey = s_suppkey
and {}
group by d_year, p_brand1
order by d_year, p_brand1"""

_FLIGHT_3 = """
select {0}, d_year, sum(lo_revenue) as revenue
from customer, lineorder, supplier, date
where lo_custkey = c_custkey
and lo_suppkey = s_suppkey
and lo_orderdate = d_datekey
and {1}
group by {0}, d_year
order by d_year asc, revenue desc"""

_FLIGHT_4 = """
select {0}, sum(lo_revenue - lo_supplycost) as profit
from date, customer, supplier, part, lineorder
where lo_custkey = c_custkey
and lo_suppkey = s_suppkey
and lo_partkey = p_partkey
and lo_orderdate = d_datekey
and {1}
group by {0}
order by {0}"""

_UK_CITIES = (
    "(c_city='UNITED KI1' or c_city='UNITED KI5') and (s_city='UNITED KI1' or s_city='UNITED KI5')"  # as in the paper
)

QUERIES: dict[str, str] = {
    "Q1.1": _FLIGHT_1.format("d_year = 1993 and lo_discount between 1 and 3 and lo_quantity < 25"),
    "Q1.2": _FLIGHT_1.format(
        "d_yearmonthnum = 199401 and lo_discount between 4 and 6 and lo_quantity between 26 and 35"
    ),
    "Q1.3": _FLIGHT_1.format(
        "d_weeknuminyear = 6 and d_year = 1994 and lo_discount between 5 and 7 and lo_quantity between 26 and 35"
    ),
    "Q2.1": _FLIGHT_2.format("p_category = 'MFGR#12' and s_region = 'AMERICA'"),
    "Q2.2": _FLIGHT_2.format("p_brand1 between 'MFGR#2221' and 'MFGR#2228' and s_region = 'ASIA'"),
    "Q2.3": _FLIGHT_2.format("p_brand1 = 'MFGR#2239' and s_region = 'EUROPE'"),
    "Q3.1": _FLIGHT_3.format(
        "c_nation, s_nation", "c_region = 'ASIA' and s_region = 'ASIA' and d_year >= 1992 and d_year <= 1997"
    ),
    "Q3.2": _FLIGHT_3.format(
        "c_city, s_city",
        "c_nation = 'UNITED STATES' and s_nation = 'UNITED STATES' and d_year >= 1992 and d_year <= 1997",
    ),
    "Q3.3": _FLIGHT_3.format("c_city, s_city", f"{_UK_CITIES} and d_year >= 1992 and d_year <= 1997"),
    "Q3.4": _FLIGHT_3.format("c_city, s_city", f"{_UK_CITIES} and d_yearmonth = 'Dec1997'"),
    "Q4.1": _FLIGHT_4.format(
        "d_year, c_nation", "c_region = 'AMERICA' and s_region = 'AMERICA' and (p_mfgr = 'MFGR#1' or p_mfgr = 'MFGR#2')"
    ),
    "Q4.2": _FLIGHT_4.format(
        "d_year, s_nation, p_category",
        "c_region = 'AMERICA' and s_region = 'AMERICA' and (d_year = 1997 or d_year = 1998)"
        " and (p_mfgr = 'MFGR#1' or p_mfgr = 'MFGR#2')",
    ),
    "Q4.3": _FLIGHT_4.format(
        "d_year, s_city, p_brand1",
        "c_region = 'AMERICA' and s_nation = 'UNITED STATES' and (d_year = 1997 or d_year = 1998)"
        " and p_category = 'MFGR#14'",
    ),
}
"""The SQL text of each query, which Spark, Trino and DuckDB accept.

The tables have no namespace, so the session must choose it.
"""


class Oracle:
    """The correct answers, which DuckDB computes from the Parquet files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._db = duckdb.connect()
        self._expected_answers: dict[str, list[tuple[str, ...]]] = {}
        for table in TABLES:
            self._db.execute(f"CREATE VIEW \"{table}\" AS FROM '{get_table_path(folder, table)}'")

    def close(self) -> None:
        self._db.close()

    def read_rows(self, sql: str) -> list[tuple[object, ...]]:
        return self._db.execute(sql).fetchall()

    def prepare(self) -> None:
        """Compute the answers of all queries now, so that `describe_difference` need not compute them later."""
        for sql in QUERIES.values():
            self._get_expected_answer(sql)

    def _get_expected_answer(self, sql: str) -> list[tuple[str, ...]]:
        """Return the comparable rows of DuckDB's answer, and run the query only the first time.

        The files do not change, and a benchmark checks each query many times.
        """
        if sql not in self._expected_answers:
            self._expected_answers[sql] = sorted(map(_to_comparable, self.read_rows(sql)))
        return self._expected_answers[sql]

    def describe_difference(self, sql: str, answer: Iterable[Sequence[object]]) -> str:
        """Return how the rows of `answer`, in any order, differ from the correct rows, or an empty string."""
        expected_answer = self._get_expected_answer(sql)
        actual = sorted(map(_to_comparable, answer))
        if actual == expected_answer:
            return ""
        wrong_rows = [row for row in actual if row not in expected_answer][:3]
        missing_rows = [row for row in expected_answer if row not in actual][:3]
        return f"{len(actual)} rows, {len(expected_answer)} expected; wrong: {wrong_rows}; missing: {missing_rows}"


def _to_comparable(row: Sequence[object]) -> tuple[str, ...]:
    return tuple("NULL" if value is None else str(value) for value in row)
