"""Load the plugins. Shared fixtures are in `tests/services/fixtures.py`, next to the services that they start."""

import os
import sys

# Containers often disable bytecode. Then every run, and every server that a test starts, compiles all of our modules
# again, which is half of the cost of either.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from tests.seeds import IS_EXPLORING, configure_hypothesis, first_seed  # noqa: E402 - after the settings above

configure_hypothesis()

pytest_plugins = [
    "tests.services.fixtures",
    "tests.tiers.bytecode",
    "tests.tiers.durations",
    "tests.tiers.garbage",
    "tests.tiers.marks",
    "tests.tiers.grids",  # pytest must call it before `marks`, which sets the time limit of slow tests.
    "tests.tiers.spread",
]


def pytest_report_header() -> list[str]:
    return [f"TEST_SEED={first_seed()}"] if IS_EXPLORING else []
