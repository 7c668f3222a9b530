"""Tests of the demo's second engine: Trino runs the same queries, and its answers are checked too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.test_demo import check_demo_output, run_demo
from tests.services.needs import NEEDS_TRINO

pytestmark = [*NEEDS_TRINO, pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]


def test_demo_runs_the_queries_on_trino(tmp_path: Path) -> None:
    # These options replace those of the environment, which may choose a garbage collector. Trino's jvm.config chooses
    # one too, and a JVM with options for two collectors does not start.
    result = run_demo(TRINO="1", DEMO_REPORT=str(tmp_path / "demo.html"), JDK_JAVA_OPTIONS="-XX:TieredStopAtLevel=1")
    assert result.returncode == 0, result.stdout + result.stderr
    check_demo_output(result.stdout)
    part = result.stdout.partition("The same 13 queries in Trino")[2]
    labels = ("Iceberg alone", "with Seamark, files as written", "with Seamark's layout")
    iceberg, untouched_files, clustered_files = (
        int(re.search(rf"{name} +([\d,]+)", part)[1].replace(",", "")) for name in labels
    )
    assert iceberg > untouched_files > clustered_files
    assert "Files opened in Trino" in (tmp_path / "demo.html").read_text()
