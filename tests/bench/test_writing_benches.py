"""Tests that each bench of writing runs to its table.

In it, every writer's table is counted, and the readers' answers are compared with each other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bench.writing.run import BENCHES
from bench.writing.tables import Batches, make_uuid_texts
from tests.services.process import REPO


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BENCHES)
def test_bench_of_writing_prints_its_table(name: str) -> None:
    argv = [sys.executable, "-m", "bench.writing.run", "--quick", name]
    result = subprocess.run(argv, env={**os.environ}, cwd=REPO, capture_output=True, text=True, timeout=880)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"writing_{name}:" in result.stdout


def test_expected_table_equals_a_dict_of_its_rows(tmp_path: Path) -> None:
    batches = Batches(1_000, tmp_path, batch_rows=100)
    drawn_batches = [batches.write_next_batch() for _ in range(5)]
    model = dict.fromkeys(make_uuid_texts(np.arange(1_000)).to_pylist(), 0)
    for batch in (drawn_batches[0], drawn_batches[3], drawn_batches[4]):
        rows = pq.read_table(batch.path)
        assert rows.equals(batch.rows)
        keys = rows["k"].to_pylist()
        assert len(set(keys)) == 100
        # A batch draws 90 % of its keys from the base.
        assert sum(key in model for key in keys) >= 90
        model |= dict.fromkeys(keys, batch.batch_number)
    row_counts = {version: list(model.values()).count(version) for version in sorted(set(model.values()))}
    assert batches.count_expected_rows([1, 4, 5]) == row_counts


def test_keys_are_distinct_uuids_as_text() -> None:
    keys = make_uuid_texts(np.arange(10_000)).to_pylist()
    assert len(set(keys)) == 10_000
    assert {len(key) for key in keys} == {36}
    assert all([len(part) for part in key.split("-")] == [8, 4, 4, 4, 12] for key in keys)
