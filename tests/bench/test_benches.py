"""Tests that each bench runs to its table against real servers, and that no request of Seamark fails in it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench import readme
from bench.index.run import BENCHES as INDEX
from bench.recovery.run import BENCHES as RECOVERY
from bench.run import BENCHES
from bench.streams.run import BENCHES as STREAMS
from tests.services.process import REPO


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("index", name) for name in INDEX),
        *(("streams", name) for name in STREAMS),
        ("structure", "flows"),
        *(("recovery", name) for name in RECOVERY),
    ],
)
def test_bench_prints_its_table(module: str, name: str) -> None:
    argv = [sys.executable, "-m", f"bench.{module}.run", "--quick", name]
    result = subprocess.run(argv, env={**os.environ}, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{module}_{name}:" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_bench_makes_the_rows_of_the_readme_without_a_failed_request(name: str) -> None:
    argv = [sys.executable, "-m", "bench.run", "--quick", name]
    result = subprocess.run(argv, env={**os.environ}, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "seamark failed" not in result.stdout
    assert "seamark-pg failed" not in result.stdout
    for case, measure in readme.CLAIMS[name]:
        if "10,000 tables" not in case:  # A quick run creates fewer tables, so its cases have different names.
            assert case in result.stdout
            assert measure in result.stdout


@pytest.mark.slow
def test_unknown_bench_is_rejected_with_the_list_of_benches() -> None:
    argv = [sys.executable, "-m", "bench.run", "speed"]
    result = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "no bench speed" in result.stderr
    assert "load_table" in result.stderr
