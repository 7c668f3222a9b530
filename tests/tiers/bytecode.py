"""Compiles modules once for all processes of pytest-xdist on a fresh clone.

Every process imports all test modules to collect them, in the same order and at the same speed. Without bytecode, each
would rewrite the assertions of all test modules and compile all their imports: a quarter of a minute of CPU time for
each process. So each process starts with a different module, and finds the others compiled. The modules of the product
are compiled before the processes start.
"""

from __future__ import annotations

import compileall
import importlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.outcomes import OutcomeException

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cache", "commands", "connector", "formats", "metaserver")


def rotate_files(files: Sequence[Path], number: int, processes: int) -> list[Path]:
    """Return all files in an order that begins with the share of process `number`."""
    start = len(files) * number // processes
    return [*files[start:], *files[:start]]


def is_compiled(file: Path) -> bool:
    """Return whether the module has bytecode that any version of pytest has written."""
    return any(file.parent.glob(f"__pycache__/{file.stem}.*-pytest-*.pyc"))


def pytest_configure(config: pytest.Config) -> None:
    """Compile the product before pytest-xdist starts processes."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        for package in PACKAGES:
            compileall.compile_dir(ROOT.parent / "seamark" / package, quiet=2)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Compile modules before the whole suite is collected.

    The processes of pytest-xdist begin with different files, so that they share the work.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker and [session.config.rootpath / arg for arg in session.config.args] == [ROOT]:
        files = sorted(ROOT.rglob("test_*.py"))
        number = int(worker["workerid"].removeprefix("gw"))
        for file in rotate_files([file for file in files if not is_compiled(file)], number, worker["workercount"]):
            # pytest reports the failure when it collects the module.
            with suppress(Exception, OutcomeException):
                importlib.import_module(".".join(file.relative_to(ROOT.parent).with_suffix("").parts))
    return (yield)
