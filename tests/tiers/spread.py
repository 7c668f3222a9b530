"""The spread of tests over the processes of pytest-xdist (`pytest -n 3`).

A file stays in one process, because its fixtures are started once for all its tests. All files that use Iceberg's
planner in Java are one unit: a second JVM costs more than it saves. So are all files that use Spark or Trino, because
some of them use both. Starting a second Spark session takes 35 seconds of CPU time.

The units begin first, each in its own process; then the longest files by the stored durations. So no process is left
with long work at the end. Tests often wait for JVMs, servers and disks, so there are more processes than cores. Without
`-n` nothing of this has an effect.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.tiers.durations import read_durations

UNITS = {
    "Spark and Trino": (
        "tests/engines/spark/",
        "tests/engines/test_",
        "tests/docs/test_spark_pages.py",
        "tests/deploy/test_services.py",
        "tests/deploy/test_trino",
        "tests/deploy/cubes/",
        "tests/deploy/streams/",
        "tests/engines/cubes/",
        "tests/faults/test_lost_replies.py::test_spark_",
        "tests/objects/clouds/test_hdfs_with_spark.py",
        "tests/warehouses/test_cloud_engines.py",
        "tests/gateway/test_engines.py::test_spark_",
        "tests/index/case_folding/test_case_folding.py::test_spark_",
    ),
    "Kafka": (
        "tests/log/test_kafka.py",
        "tests/streams/test_fleet.py",
        "tests/streams/chaos/test_chaos.py",
        "tests/streams/test_read_servers.py",
        "tests/streams/topics/test_topics.py",
        "tests/timeline/test_kafka_events.py",
    ),
    "Java's planner": (
        "tests/planner/test_oracle.py",
        "tests/planner/test_lake.py",
        "tests/planner/test_plan_writer.py",
        "tests/planner/indexes/test_indexed_oracle.py",
    ),
}
SESSION_FIXTURES = {"spark", "trino_lake", "kafka"}
"""Fixtures that start a JVM for the session.

Only tests of the units may use them, because each further process would start its own JVM late.
"""
NEW_S, LONG_S = 1.0, 60.0
"""The assumed time of a file without a stored duration, and of such a file in LONG_UNITS."""
LONG_UNITS = ("tests/bench/test_demo.py", "tests/faults/test_spark_tasks.py", "tests/rck/")


def find_unit(nodeid: str) -> str:
    """Return the unit of a test: the name of a group of files, or the file. All tests of a unit run in one process."""
    for unit, files in UNITS.items():
        if nodeid.startswith(files):
            return unit
    return nodeid.partition("::")[0]


def _guess_s(file: str) -> float:
    return LONG_S if file.startswith(LONG_UNITS) else NEW_S


def compute_order(nodeids: list[str]) -> list[int]:
    """Return the positions of the tests in starting order: units of `UNITS` before single files, the longest first."""
    durations = read_durations()
    wall_s: dict[str, float] = {}
    for file in {nodeid.partition("::")[0] for nodeid in nodeids}:
        unit = find_unit(file)
        wall_s[unit] = wall_s.get(unit, 0.0) + (durations[file].wall_s if file in durations else _guess_s(file))

    def compute_key(position: int) -> tuple[bool, float, str]:
        unit = find_unit(nodeids[position])
        # Durations are stored for files, so a unit with only some tests of a file may have no duration.
        return unit not in UNITS, -wall_s.get(unit, 0.0), unit

    return sorted(range(len(nodeids)), key=compute_key)


class UnitScheduling(LoadFileScheduling):
    """A scheduler that sends all tests of a unit to one process, in the order of `pytest_collection_modifyitems`."""

    def _split_scope(self, nodeid: str) -> str:
        return find_unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling:
    config.option.loadscopereorder = False
    return UnitScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests in the same way in every process of pytest-xdist. Without pytest-xdist, sort nothing.

    Raises:
        UsageError: A test uses a fixture that starts a JVM, and its file is in no unit of `UNITS`. The tests of a unit
            run in one process and share its JVM. This test would start a further one.
    """
    for item in items:
        for fixture in SESSION_FIXTURES & set(getattr(item, "fixturenames", ())):
            if find_unit(item.nodeid) not in UNITS:
                raise pytest.UsageError(f"{item.nodeid} uses {fixture!r}: add its file to tests/tiers/spread.py")
    if hasattr(config, "workerinput"):
        items[:] = [items[position] for position in compute_order([item.nodeid for item in items])]
