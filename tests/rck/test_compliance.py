"""Iceberg's own compliance kit: no failure of 157, and nothing skipped but what the kit itself disables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rck.kit import DISABLED_BY_THE_KIT, run_kit
from tests.services.java import java_fixture
from tests.services.seamark import Seamark

# The kit creates its tables at file:/tmp/<namespace>/<table>, outside any warehouse. And it wants a report of a scan,
# which Iceberg's client (1.11, 1.12) sends only of those that it plans itself: so it plans here. What the server plans
# is for tests/engines/test_planning.py.
ALLOWED = {"SEAMARK_ALLOWED_LOCATIONS": "file:///tmp", "SEAMARK_SCAN_PLANNING_MODE": "client"}


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def database(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.mark.timeout(900)
def test_the_compliance_kit_passes_on_an_empty_server(
    database: str, start_seamark: Callable[..., Seamark], tmp_path: Path
) -> None:
    server = start_seamark(database=database, env=ALLOWED)
    report = run_kit(server.base_url, tmp_path / "rck")
    assert report.failed == {}
    assert report.tests == 157
    assert report.skipped == DISABLED_BY_THE_KIT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kit_runner_sees_what_the_java_server_fails(tmp_path: Path) -> None:
    """The yardstick itself fails known tests, so that a runner which reports nothing cannot pass for a green one."""
    with java_fixture(tmp_path / "warehouse", log=tmp_path / "java.log") as base_url:
        report = run_kit(base_url, tmp_path / "rck")
    assert report.tests == 157
    assert "Namespace does not exist: non-existing" in report.failed["tableCreationWithoutNamespace()"]
