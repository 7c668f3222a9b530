"""On a fresh clone, the processes of pytest-xdist compile the modules together instead of each all of them.

Every process imports every module of tests to collect it, all in the same order and at the same pace. Where no bytecode
is kept yet, each would rewrite the assertions of all test modules and compile all that they import: a quarter of a
minute of CPU time a process. So each begins to import at another module, and finds the rest compiled by the others.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.outcomes import OutcomeException

ROOT = Path(__file__).resolve().parents[1]


def rotated(files: Sequence[Path], number: int, processes: int) -> list[Path]:
    """Return all files, from the place on where the share of process `number` begins."""
    start = len(files) * number // processes
    return [*files[start:], *files[:start]]


def is_compiled(file: Path) -> bool:
    """Return whether pytest has kept bytecode of the module, of this version or another."""
    return any(file.parent.glob(f"__pycache__/{file.stem}.*-pytest-*.pyc"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Yield where the whole suite is about to be collected."""
    worker = getattr(session.config, "workerinput", None)
    if worker and [session.config.rootpath / arg for arg in session.config.args] == [ROOT]:
        files = sorted(ROOT.rglob("test_*.py"))
        number = int(worker["workerid"].removeprefix("gw"))
        for file in rotated([file for file in files if not is_compiled(file)], number, worker["workercount"]):
            # pytest reports whatever fails when it comes to the module.
            with suppress(Exception, OutcomeException):
                importlib.import_module(".".join(file.relative_to(ROOT.parent).with_suffix("").parts))
    return (yield)
