"""Tests of the counts in the bench of SSB on Trino: bounds compared with plain Python over the rows, and outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.report import OURS
from bench.ssb.generate import generate_ssb, get_table_path
from bench.ssb.queries import QUERIES
from bench.trino.asking import TrinoAnswer, _parse_duration_ms
from bench.trino.lake import LAYOUTS
from bench.trino.ssb import DIRECT, LayoutMeasurement, compute_geometric_mean, count_needed_files


class FileListing:
    """A client that can only list the data files of the table `lineorder`, which the computation of bounds needs."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def files(self, table: tuple[str, str]) -> pa.Table:
        assert table == (LAYOUTS[0].name, "lineorder")
        return pa.table({"file_path": [path.as_uri() for path in self._paths]})


@pytest.mark.slow
def test_bound_is_the_number_of_files_with_a_row_of_the_answer(tmp_path: Path) -> None:
    data = generate_ssb(tmp_path / "ssb", 0.002)
    facts = pq.read_table(get_table_path(data, "lineorder"))
    paths = []
    for number in range(0, facts.num_rows, 500):
        paths.append(tmp_path / f"{number}.parquet")
        pq.write_table(facts.slice(number, 500), paths[-1])
    client: Any = FileListing(paths)
    total, bounds = count_needed_files(client, LAYOUTS[0], data)
    assert total == len(paths) > 20
    dimensions = {
        name: {row[key]: row for row in pq.read_table(get_table_path(data, name)).to_pylist()}
        for name, key in (("date", "d_datekey"), ("supplier", "s_suppkey"), ("customer", "c_custkey"))
    }

    def count_files_with_a_row(query: str) -> int:
        count = 0
        for path in paths:
            rows = pq.read_table(path).to_pylist()
            count += any(EXPECTED_FACTS[query](row, dimensions) for row in rows)
        return count

    for query in EXPECTED_FACTS:
        assert bounds[query] == count_files_with_a_row(query), query
    assert 0 < bounds["Q1.2"] < bounds["Q1.1"] < total
    assert bounds.keys() == QUERIES.keys()


EXPECTED_FACTS: dict[str, Any] = {
    "Q1.1": lambda row, rows_by_table: (
        rows_by_table["date"][row["lo_orderdate"]]["d_year"] == 1993
        and 1 <= row["lo_discount"] <= 3
        and row["lo_quantity"] < 25
    ),
    "Q1.2": lambda row, rows_by_table: (
        rows_by_table["date"][row["lo_orderdate"]]["d_yearmonthnum"] == 199401
        and 4 <= row["lo_discount"] <= 6
        and 26 <= row["lo_quantity"] <= 35
    ),
    "Q3.1": lambda row, rows_by_table: (
        rows_by_table["customer"][row["lo_custkey"]]["c_region"] == "ASIA"
        and rows_by_table["supplier"][row["lo_suppkey"]]["s_region"] == "ASIA"
        and 1992 <= rows_by_table["date"][row["lo_orderdate"]]["d_year"] <= 1997
    ),
}


def test_every_query_reads_the_facts_for_its_bound() -> None:
    with duckdb.connect() as db:
        for name, sql in QUERIES.items():
            from_clause = sql.partition("\nfrom ")[2].partition("\ngroup by ")[0]
            assert "lineorder" in from_clause, name
            assert "order by" not in from_clause, name
            assert len(db.extract_statements(f"SELECT 1 FROM {from_clause}")) == 1


def build_answer(wall_ms: float, files: int, splits: int) -> TrinoAnswer:
    return TrinoAnswer([], wall_ms, 1.0, files, splits, 1.0, "")


def test_query_is_slower_only_beyond_the_tolerated_fraction_and_milliseconds() -> None:
    # A query may take 5 % longer than without Seamark, but at least 20 ms: here 1,050 ms, and then 120 ms.
    case = LayoutMeasurement(LAYOUTS[0], "Q1.1", total=100, bound=10)
    case.answers = {
        DIRECT: [build_answer(1000, 100, 80)] * 3,
        OURS: [build_answer(1040, 12, 11), build_answer(990, 11, 10)] * 2,
    }
    assert (case.files, case.over_bound, case.file_reduction) == (12, 1.2, 80 / 10.5)
    assert case.slower_ms == 0
    case.answers[OURS] = [build_answer(1080, 12, 12)]
    assert case.slower_ms == pytest.approx(30)
    case.answers[DIRECT] = [build_answer(100, 100, 100)]
    case.answers[OURS] = [build_answer(121, 100, 100)]
    assert case.slower_ms == pytest.approx(1)


def test_query_that_reads_no_file_counts_as_one_file() -> None:
    case = LayoutMeasurement(LAYOUTS[0], "Q1.1", total=100, bound=0)
    case.answers = {DIRECT: [build_answer(10, 100, 0)], OURS: [build_answer(10, 0, 0)]}
    assert (case.over_bound, case.file_reduction) == (1, 1)


def test_means_are_geometric_and_durations_are_read() -> None:
    assert compute_geometric_mean([1.0, 4.0]) == pytest.approx(2)
    assert [_parse_duration_ms(item) for item in ("343.47ms", "1.77s", "125.07us", "2.50m", "0.00ns")] == pytest.approx(
        [343.47, 1770, 0.12507, 150_000, 0]
    )
    with pytest.raises(ValueError):
        _parse_duration_ms("soon")
