"""Tests that the corpus queries read fewer files in DuckDB with equal rows."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from bench import readme
from bench.corpus.needed import RowsDiffer, TableCopies, count_rows, find_smallest_set
from bench.corpus.run import ALL_FILES, NEEDED_FILES, PEER, list_queries, run
from bench.report import OURS


def test_corpus_has_each_query_once() -> None:
    queries = list_queries()
    assert len({item.title for item in queries}) == len(queries)
    assert any(f"all: {len(queries)} queries" == case for case, _ in readme.CORPUS_CLAIMS["corpus"])


def test_needed_files_are_those_without_which_a_query_returns_other_rows(tmp_path: Path) -> None:
    facts, days = [], []
    with duckdb.connect() as con:
        for number in range(8):
            facts.append(str(tmp_path / f"fact{number}.parquet"))
            con.execute(f"COPY (SELECT {number} AS day, unnest([1, 2, 3]) AS amount) TO '{facts[-1]}'")
        days.append(str(tmp_path / "days.parquet"))
        con.execute(f"COPY (SELECT unnest(range(8)) AS day, unnest(range(8)) % 4 AS kind) TO '{days[-1]}'")
    with closing(TableCopies({("s", "fact"): facts, ("s", "days"): days})) as copies, duckdb.connect() as con:
        con.execute(f"CREATE VIEW fact AS FROM read_parquet({facts})")
        con.execute(f"CREATE VIEW days AS FROM read_parquet({days})")

        def count_needed_files(query: str) -> list[int]:
            return copies.count_needed_files("s", query, count_rows(con, query))

        assert count_needed_files("SELECT sum(amount) FROM fact JOIN days USING (day) WHERE kind = 3") == [2, 1]
        assert count_needed_files("SELECT count(*) FROM fact WHERE day > 20") == [0]
        assert count_needed_files("SELECT max(day) FROM fact") == [1]
        assert count_needed_files(
            "WITH f AS (SELECT * FROM fact f WHERE f.day < 3) FROM f, days d WHERE f.day = d.day"
        ) == [
            3,
            1,
        ]
        assert count_needed_files("SELECT sum(amount) FROM fact") == [8]
        repeated_query = (
            "SELECT (SELECT sum(fact.amount) FROM fact WHERE day = 1), (SELECT count(*) FROM fact WHERE day > 3)"
        )
        assert count_needed_files(repeated_query) == [1, 4]
        with pytest.raises(RowsDiffer):
            copies.count_needed_files("s", "SELECT max(day) FROM fact", count_rows(con, "SELECT 1"))


@pytest.mark.parametrize("expected", [set(), {0}, {39}, {2, 3, 26}, set(range(40)), set(range(5, 33))])
def test_smallest_set_contains_only_needed_files(expected: set[int]) -> None:
    assert find_smallest_set(range(40), lambda file_set: expected <= set(file_set)) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_queries_read_fewer_files_than_duckdb_alone(tmp_path: Path) -> None:
    report = asyncio.run(run(tmp_path, quick=True))  # `run` raises AnswersDiffer if a query returns other rows.
    rows = {(row.case, row.measure): row for row in report.rows}
    assert set(readme.CORPUS_CLAIMS["corpus"]) <= rows.keys()
    for query in list_queries():
        row = rows[query.title, "files"]
        assert row.values[OURS] <= row.values[ALL_FILES], row
        assert row.values[NEEDED_FILES] <= row.values[ALL_FILES], row
    file_counts = rows[f"all: {len(list_queries())} queries", "files read"].values
    assert file_counts[OURS] < file_counts[PEER] < file_counts[ALL_FILES]
    pruned_row = rows[f"all: {len(list_queries())} queries", "read fewer than all files"]
    assert pruned_row.values[OURS] > pruned_row.values[PEER] > 0
