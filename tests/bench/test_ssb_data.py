"""Tests that the generator follows the Star Schema Benchmark's definition: row counts, keys, domains, calendar."""

from __future__ import annotations

import calendar
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bench.ssb.generate import TABLES, compute_dimension_rows, generate_ssb, get_table_path
from bench.ssb.queries import QUERIES, Oracle

pytestmark = pytest.mark.slow  # Only benches use these rows.
SCALE_FACTOR = 0.02
NATIONS = 25
REGIONS = {"AFRICA", "AMERICA", "ASIA", "EUROPE", "MIDDLE EAST"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_ssb(tmp_path_factory.mktemp("ssb"), SCALE_FACTOR)


class Data:
    """The five tables, with methods for SQL queries on them."""

    def __init__(self, folder: Path) -> None:
        self.db = duckdb.connect()
        for table in TABLES:
            self.db.execute(f"CREATE VIEW \"{table}\" AS FROM '{get_table_path(folder, table)}'")

    def fetch_value(self, sql: str) -> Any:
        row = self.db.execute(sql).fetchone()
        assert row is not None
        return row[0] if len(row) == 1 else row

    def read_column(self, sql: str) -> set[Any]:
        return {row[0] for row in self.db.execute(sql).fetchall()}


@pytest.fixture(scope="module")
def data(folder: Path) -> Iterator[Data]:
    data = Data(folder)
    yield data
    data.db.close()


def test_dimensions_have_the_papers_row_counts(data: Data) -> None:
    rows = {table: data.fetch_value(f'SELECT count(*) FROM "{table}"') for table in TABLES}
    assert rows["customer"] == 600
    assert rows["supplier"] == 40
    assert rows["part"] == 4000
    assert rows["date"] == 7 * 365 + 2
    assert rows["lineorder"] == pytest.approx(6_000_000 * SCALE_FACTOR, rel=0.02)


def test_number_of_parts_grows_with_the_logarithm_of_scales_above_one() -> None:
    assert compute_dimension_rows(1)["parts"] == 200_000
    assert compute_dimension_rows(4)["parts"] == 600_000
    assert compute_dimension_rows(100)["parts"] == 1_400_000


@pytest.mark.parametrize("scale", [0, -1, 0.0001, 5000])
def test_impossible_scale_is_rejected_by_name(scale: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out of range"):
        generate_ssb(tmp_path, scale)


def test_every_key_of_the_fact_table_has_a_dimension_row(data: Data) -> None:
    for key, table, primary in (
        ("lo_custkey", "customer", "c_custkey"),
        ("lo_suppkey", "supplier", "s_suppkey"),
        ("lo_partkey", "part", "p_partkey"),
        ("lo_orderdate", "date", "d_datekey"),
        ("lo_commitdate", "date", "d_datekey"),
    ):
        assert data.fetch_value(f'SELECT count(*) FROM lineorder ANTI JOIN "{table}" ON {key} = {primary}') == 0, key
        assert data.fetch_value(f'SELECT count(*) = count(DISTINCT {primary}) FROM "{table}"'), primary
    assert data.fetch_value("SELECT count(*) = count(DISTINCT (lo_orderkey, lo_linenumber)) FROM lineorder")
    assert data.fetch_value("SELECT count(DISTINCT lo_suppkey) FROM lineorder") == 40
    assert data.fetch_value("SELECT count(DISTINCT lo_partkey) FROM lineorder") == 4000


def test_facts_stay_in_their_domains(data: Data) -> None:
    bounds = {
        "lo_linenumber": (1, 7),
        "lo_quantity": (1, 50),
        "lo_discount": (0, 10),
        "lo_tax": (0, 8),
        "lo_shippriority": (0, 0),
        "lo_orderdate": (19920101, 19980802),
    }
    for column, (low, high) in bounds.items():
        extremes = data.fetch_value(f"SELECT min({column}), max({column}) FROM lineorder")
        assert low <= extremes[0] <= extremes[1] <= high, column
        if high < 100:  # The data is enough for each value of a small range, but not for each date.
            assert extremes == (low, high), column
    assert data.read_column("SELECT DISTINCT lo_orderpriority FROM lineorder") == {
        "1-URGENT", "2-HIGH", "3-MEDIUM", "4-NOT SPECIFIED", "5-LOW",
    }  # fmt: skip
    assert len(data.read_column("SELECT DISTINCT lo_shipmode FROM lineorder")) == 7
    for table in TABLES:
        assert data.fetch_value(f'SELECT count(*) FROM "{table}" WHERE COLUMNS(*) IS NULL') == 0, table


def test_amounts_are_in_cents_and_totals_equal_their_sums(data: Data) -> None:
    sql = "SELECT count(*) FROM lineorder WHERE lo_revenue <> lo_extendedprice * (100 - lo_discount)::BIGINT // 100"
    assert data.fetch_value(sql) == 0
    # The cost is 60 % of the part's price, which is a formula of the part's key (TPC-H specification, 4.2.3), in cents.
    cheapest, dearest = data.fetch_value("SELECT min(lo_supplycost), max(lo_supplycost) FROM lineorder")
    # The price is between 90,000 and 211,000 cents.
    assert 90000 * 0.6 <= cheapest <= dearest <= 211000 * 0.6
    # TPC-H's order total is the sum of the discounted and taxed prices of its lines, truncated at each step.
    sql = """
        SELECT max(abs(total - lines)) FROM (
            SELECT any_value(lo_ordtotalprice) AS total,
                   sum(lo_revenue::BIGINT * (100 + lo_tax) // 100) AS lines
            FROM lineorder GROUP BY lo_orderkey)"""
    assert data.fetch_value(sql) == 0


def test_cities_nations_and_regions_nest(data: Data) -> None:
    for prefix, table in (("c", "customer"), ("s", "supplier")):
        assert data.read_column(f"SELECT DISTINCT {prefix}_region FROM {table}") <= REGIONS
        nesting = f"rpad(substr({prefix}_nation, 1, 9), 9, ' ') = substr({prefix}_city, 1, 9)"
        digit = f"regexp_matches({prefix}_city, '^.{{9}}[0-9]$')"
        assert data.fetch_value(f"SELECT count(*) FROM {table} WHERE NOT ({nesting} AND {digit})") == 0
        assert (
            data.fetch_value(
                f"SELECT max(n) FROM (SELECT count(DISTINCT {prefix}_region) n FROM {table} GROUP BY {prefix}_nation)"
            )
            == 1
        )
    assert len(data.read_column("SELECT DISTINCT c_nation FROM customer")) == NATIONS
    assert data.fetch_value("SELECT count(DISTINCT c_city) FROM customer") > 200  # There are 250 cities in all.


def test_brands_nest_in_categories_and_categories_in_manufacturers(data: Data) -> None:
    assert data.read_column("SELECT DISTINCT p_mfgr FROM part") == {f"MFGR#{m}" for m in range(1, 6)}
    assert data.read_column("SELECT DISTINCT p_category FROM part") == {
        f"MFGR#{m}{c}" for m in range(1, 6) for c in range(1, 6)
    }
    brands = {f"MFGR#{m}{c}{b}" for m in range(1, 6) for c in range(1, 6) for b in range(1, 41)}
    column = data.read_column("SELECT DISTINCT p_brand1 FROM part")
    assert column <= brands
    assert len(column) > 900  # There are 1,000 brands, and 4,000 parts.
    nesting = "starts_with(p_brand1, p_category) AND starts_with(p_category, p_mfgr)"
    assert data.fetch_value(f"SELECT count(*) FROM part WHERE NOT ({nesting})") == 0
    # The benchmark's specification limits names of parts to 22 characters, and colors to 11.
    assert data.fetch_value("SELECT max(length(p_name)), max(length(p_color)) FROM part") <= (22, 11)


def test_date_dimension_is_the_calendar_of_seven_years(data: Data) -> None:
    rows = data.db.execute('SELECT * FROM "date" ORDER BY d_datekey').fetchall()
    names = [column[0] for column in data.db.description or []]
    day = datetime.date(1992, 1, 1)
    for row in rows:
        actual = dict(zip(names, row, strict=True))
        day_of_week = (day.weekday() + 1) % 7
        day_of_year = day.timetuple().tm_yday
        assert actual == {
            "d_datekey": day.year * 10000 + day.month * 100 + day.day,
            "d_date": f"{calendar.month_name[day.month]} {day.day}, {day.year}",
            "d_dayofweek": calendar.day_name[day.weekday()],
            "d_month": calendar.month_name[day.month],
            "d_year": day.year,
            "d_yearmonthnum": day.year * 100 + day.month,
            "d_yearmonth": f"{calendar.month_abbr[day.month]}{day.year}",
            "d_daynuminweek": day_of_week + 1,
            "d_daynuminmonth": day.day,
            "d_daynuminyear": day_of_year,
            "d_monthnuminyear": day.month,
            "d_weeknuminyear": (day_of_year + 6) // 7,
            "d_sellingseason": _find_season(day.month),
            "d_lastdayinweekfl": int(day_of_week == 6),
            "d_lastdayinmonthfl": int((day + datetime.timedelta(1)).month != day.month),
            "d_holidayfl": actual["d_holidayfl"],
            "d_weekdayfl": int(day.weekday() < 5),
        }
        day += datetime.timedelta(1)
    assert day == datetime.date(1999, 1, 1)
    assert data.fetch_value('SELECT sum(d_holidayfl) FROM "date"') == 7 * 10


def _find_season(month: int) -> str:
    seasons = {"Winter": (1, 2, 3), "Spring": (4,), "Summer": (5, 6, 7, 8), "Fall": (9, 10), "Christmas": (11, 12)}
    return next(name for name, months in seasons.items() if month in months)


def test_facts_are_ordered_by_date(data: Data) -> None:
    rows = "SELECT lo_orderdate >= coalesce(lag(lo_orderdate) OVER (), 0) AS ordered FROM lineorder"
    assert data.fetch_value(f"SELECT bool_and(ordered) FROM ({rows})")


@pytest.mark.slow
def test_same_scale_gives_the_same_data_and_is_generated_once(folder: Path, tmp_path: Path) -> None:
    generated_folder = generate_ssb(tmp_path, SCALE_FACTOR)
    for table in TABLES:
        assert get_table_path(generated_folder, table).read_bytes() == get_table_path(folder, table).read_bytes()
    steps: list[str] = []
    assert generate_ssb(tmp_path, SCALE_FACTOR, lambda step, *_: steps.append(step)) == generated_folder
    assert steps == []


@pytest.mark.slow
def test_interrupted_generation_leaves_no_partial_folder(tmp_path: Path) -> None:
    def interrupt(step: str, rows_done: int, total: int) -> None:
        if step == "SSB part":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_ssb(tmp_path, 0.001, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_each_query_selects_the_fraction_of_facts_that_the_paper_states(folder: Path) -> None:
    """The filter factors on the facts (table 3.1 of the paper) vary randomly at a small scale."""
    expected = {"Q1.1": 1.9e-2, "Q1.2": 6.5e-4, "Q2.1": 8.0e-3, "Q2.2": 1.6e-3, "Q3.1": 3.4e-2, "Q4.1": 1.6e-2}
    oracle = Oracle(folder)
    facts = oracle.read_rows("SELECT count(*) FROM lineorder")[0][0]
    for name, factor in expected.items():
        from_clause = QUERIES[name].split("from ", 1)[1].split("group by")[0]
        hits = oracle.read_rows(f"SELECT count(*) FROM {from_clause}")[0][0]
        assert isinstance(hits, int)
        assert isinstance(facts, int)
        # At this small scale, few customers and suppliers exist, so the fractions vary widely.
        assert hits / facts == pytest.approx(factor, rel=0.75), name
    oracle.close()
    assert list(QUERIES) == [
        f"Q{flight}.{n}" for flight, count in ((1, 3), (2, 3), (3, 4), (4, 3)) for n in range(1, count + 1)
    ]


def test_oracle_detects_changed_missing_and_repeated_rows(folder: Path) -> None:
    oracle = Oracle(folder)
    expected_rows = oracle.read_rows(QUERIES["Q4.1"])
    assert oracle.describe_difference(QUERIES["Q4.1"], reversed(expected_rows)) == ""
    changed_rows = [*expected_rows[1:], (*expected_rows[0][:-1], 1)]
    assert str(expected_rows[0][-1]) in oracle.describe_difference(QUERIES["Q4.1"], changed_rows)
    assert oracle.describe_difference(QUERIES["Q4.1"], expected_rows[1:])
    assert oracle.describe_difference(QUERIES["Q4.1"], [*expected_rows, expected_rows[0]])
    oracle.close()
