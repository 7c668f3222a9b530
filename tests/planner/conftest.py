"""The fixture that runs Iceberg Java's planner in one JVM for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.services.java_planner import JavaPlanner, run_java_planner


@pytest.fixture(scope="session")
def java(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JavaPlanner]:
    with run_java_planner(tmp_path_factory.mktemp("java-planner") / "java.log") as planner:
        yield planner
