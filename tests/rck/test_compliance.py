"""Tests with Iceberg's own compliance kit.

None of its 157 tests fails, and only tests that the kit disables are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rck.kit import DISABLED_BY_THE_KIT, run_kit
from tests.services.java import run_java_fixture
from tests.services.seamark import Seamark

# The kit creates its tables at file:/tmp/<namespace>/<table>, outside any warehouse. It also requires a report of a
# scan. Iceberg's client (1.11, 1.12) sends this report only for scans that it plans itself, so the client plans here.
# tests/engines/test_planning.py tests scans that the server plans.
KIT_SETTINGS = {"SEAMARK_ALLOWED_LOCATIONS": "file:///tmp,file:///dev/shm", "SEAMARK_SCAN_PLANNING_MODE": "client"}


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.mark.timeout(900)
def test_compliance_kit_passes_on_an_empty_server(
    database: str, start_seamark: Callable[..., Seamark], tmp_path: Path
) -> None:
    server = start_seamark(database=database, env=KIT_SETTINGS)
    report = run_kit(server.base_url, tmp_path / "rck")
    assert report.failures == {}
    assert report.tests == 157  # The number of all tests of the kit
    assert report.skipped_tests == DISABLED_BY_THE_KIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kit_runner_reports_the_known_failures_of_the_java_server(tmp_path: Path) -> None:
    """The Java server fails known tests, which shows that the runner reports failures."""
    with run_java_fixture(tmp_path / "warehouse", log=tmp_path / "java.log") as base_url:
        report = run_kit(base_url, tmp_path / "rck")
    assert report.tests == 157  # The number of all tests of the kit
    assert "Namespace does not exist: non-existing" in report.failures["tableCreationWithoutNamespace()"]
