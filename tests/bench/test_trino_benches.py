"""Tests that the benches of Trino's adapter run to their tables, with equal rows through the adapter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from bench.trino.run import BENCHES
from tests.services.needs import NEEDS_TRINO
from tests.services.process import REPO

pytestmark = [*NEEDS_TRINO, pytest.mark.slow]


@pytest.mark.parametrize("name", BENCHES)
def test_bench_of_the_trino_proxy_prints_its_table(name: str) -> None:
    argv = [sys.executable, "-m", "bench.trino.run", "--quick", name]
    result = subprocess.run(argv, env={**os.environ}, cwd=REPO, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"trino_{name}:" in result.stdout
