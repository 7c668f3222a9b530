"""The tier of each test as a marker.

The tiers are `unit` (no JVM, no server process), `server` (a server, a database, an object store) and `engines` (a JVM:
Spark, Trino, the compliance kit, Iceberg's own Java). A folder gives the least tier of its tests; a test's fixtures and
markers may raise it. `pytest --tier unit` collects no file of a folder above that tier, so that it imports
nothing of an engine. A test of the unit tier fails if it starts a program of another tier.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TIERS = ("unit", "server", "engines")
ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    **dict.fromkeys(("access", "api", "attacks", "bench", "bombs", "commits", "connector"), "server"),
    **dict.fromkeys(("console", "docs", "faults", "kubernetes", "moving", "objects/clouds"), "server"),
    **dict.fromkeys(("peers", "recovery", "server", "streams", "table_services", "timeline", "warehouses"), "server"),
    "connector/trino": "unit",
    **dict.fromkeys(("deploy", "engines", "rck"), "engines"),
    "gateway": "server",
}
"""The tiers of folders; folders that are not listed are in the unit tier."""
FILES = {
    "connector/trino/test_trino_proxy_command.py": "server",
    "bench/test_demo.py": "engines",
    "bench/test_trino_benches.py": "engines",
    "faults/test_spark_tasks.py": "engines",
    "gateway/test_signatures.py": "unit",
    "iceberg/expressions/test_expression_java.py": "engines",
    "iceberg/manifests/test_manifest_peers.py": "engines",
    "iceberg/test_puffin.py": "engines",
    "log/test_cut_connections.py": "engines",
    "objects/test_signing_clients.py": "engines",
    "warehouses/test_key_rotation.py": "server",
    **dict.fromkeys(("packaging/test_imports.py", "packaging/test_lock.py", "packaging/test_wheel.py"), "server"),
    **dict.fromkeys(("planner/test_joins_oracle.py", "planner/test_views.py"), "server"),
    "planner/joins/test_join_conditions_oracle.py": "server",
    "catalog/rebase/test_rebase_over_services.py": "server",
    "index/kinds/test_toy_kind.py": "server",
}
FIXTURES = {
    **dict.fromkeys(("start_seamark", "postgres", "postgres_url", "s3", "s3_bucket", "nats"), "server"),
    **dict.fromkeys(("spark", "spark_catalog", "trino_lake", "java_catalog", "java", "kafka"), "engines"),
}
PROGRAMS = {"chromium", "java", "initdb", "postgres", "seamark", "spark-sql", "spark-submit", "versitygw"}
"""Programs that tests of the unit tier may not start."""

SLOW_TIMEOUT_S = 1800
"""The time limit of a slow test without its own limit: on a busy machine, 400 random queries exceed the usual limit."""

_started_programs: list[str] = []


@cache
def find_tier_of_path(path: Path) -> str:
    """Return the lowest tier of the tests in a file or folder. Other paths have the first tier of `TIERS`."""
    if not path.is_relative_to(ROOT):
        return TIERS[0]
    name = path.relative_to(ROOT).as_posix()
    if name in FILES:
        return FILES[name]
    folders = [item for item in FOLDERS if name == item or name.startswith(f"{item}/")]
    return FOLDERS[max(folders, key=len)] if folders else TIERS[0]


def find_tier(path: Path, fixtures: set[str], markers: set[str]) -> str:
    """Return the highest tier that the test's file, fixtures and markers require."""
    required_tiers = [find_tier_of_path(path), *(FIXTURES[name] for name in fixtures & FIXTURES.keys())]
    if markers & {"spark", "trino"}:
        required_tiers.append("engines")
    return max(required_tiers, key=TIERS.index)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", action="append", choices=TIERS, help="only the tests of this tier; may be repeated")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen_tiers = config.getoption("--tier")
    if not chosen_tiers or collection_path.suffix != ".py":
        return None
    highest = max(map(TIERS.index, chosen_tiers))
    return True if TIERS.index(find_tier_of_path(collection_path)) > highest else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen_tiers = config.getoption("--tier")
    deselected_items: list[pytest.Item] = []
    for item in items:
        markers = {marker.name for marker in item.iter_markers()}
        tier = find_tier(item.path, set(getattr(item, "fixturenames", ())), markers)
        item.add_marker(tier)
        if "slow" in markers and "timeout" not in markers:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))
        if chosen_tiers and tier not in chosen_tiers:
            deselected_items.append(item)
    if deselected_items:
        config.hook.pytest_deselected(items=deselected_items)
        deselected_set = set(deselected_items)
        items[:] = [item for item in items if item not in deselected_set]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    _started_programs.clear()
    yield
    if _started_programs and item.get_closest_marker(TIERS[0]):
        pytest.fail(
            f"a unit test starts {', '.join(_started_programs)}; name its tier in tests/tiers/marks.py", pytrace=False
        )


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        name = os.path.basename(os.fsdecode(arguments[0] or ""))
        if name in PROGRAMS:
            _started_programs.append(name)


sys.addaudithook(_audit)
