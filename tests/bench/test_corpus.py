"""The queries of the corpus read fewer files in DuckDB, and give the same rows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench import readme
from bench.corpus.run import EVERY, PEER, queries, run
from bench.report import OURS


def test_the_corpus_has_each_query_once() -> None:
    asked = queries()
    assert len({one.title for one in asked}) == len(asked)
    assert any(f"all: {len(asked)} queries" == case for case, _ in readme.CORPUS_CLAIMS["corpus"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_queries_read_fewer_files_than_by_duckdb_alone(tmp_path: Path) -> None:
    report = asyncio.run(run(tmp_path, quick=True))  # raises AnswersDiffer
    rows = {(row.case, row.measure): row for row in report.rows}
    assert set(readme.CORPUS_CLAIMS["corpus"]) <= rows.keys()
    for one in queries():
        row = rows[one.title, "files"]
        assert row.values[OURS] <= row.values[EVERY], row
    every = rows[f"all: {len(queries())} queries", "files read"].values
    assert every[OURS] < every[PEER] < every[EVERY]
    pruned = rows[f"all: {len(queries())} queries", "read fewer than all files"]
    assert pruned.values[OURS] > pruned.values[PEER] > 0
