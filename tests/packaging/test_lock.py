"""Tests that the lock files have the same pins, with hashes for pip, and that the demo's locks have its imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.test_imports import IMPORT_ALL, list_project_libraries, list_top_modules

REPO = Path(__file__).resolve().parents[2]


def read_pins(lock: str) -> dict[str, str]:
    """Return the pin of each package, with its hashes if the lock has them."""
    lines = re.sub(r"\\\n\s+", "", (REPO / lock).read_text()).splitlines()
    return {line.partition("==")[0]: line.strip() for line in lines if line.strip()}


def test_lock_with_hashes_has_the_same_pins_as_the_lock() -> None:
    """`make hashes` writes the lock with hashes."""
    hashed_pins = read_pins("requirements.hashed.lock")
    pins = {name: entry.partition("--hash=")[0].strip() for name, entry in hashed_pins.items()}
    assert pins == read_pins("requirements.lock")
    for entry in hashed_pins.values():
        assert re.search(r"--hash=sha256:[0-9a-f]{64}(?=\s|-|$)", entry), entry


@pytest.mark.parametrize("lock", ["requirements.demo.lock", "requirements.ssb.lock"])
def test_locks_of_the_demo_are_parts_of_the_hashed_lock(lock: str) -> None:
    pins = read_pins(lock)
    assert pins
    assert pins.items() <= read_pins("requirements.hashed.lock").items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("locks", "modules"),
    [
        (["requirements.demo.lock"], ["seamark.commands.demo.demo", "seamark.commands.serving.serve", "Cython.Build"]),
        (
            ["requirements.demo.lock", "requirements.ssb.lock"],
            ["bench.demo.__main__", "seamark.commands.serving.serve"],
        ),
    ],
    ids=["first act", "all acts"],
)
def test_locks_of_the_demo_have_its_imports(locks: list[str], modules: list[str]) -> None:
    installed_names = {name for lock in locks for name in read_pins(lock)}
    hidden_modules = list_top_modules(list_project_libraries()) - list_top_modules(installed_names)
    assert "pytest" in hidden_modules
    script = f"HIDDEN = {sorted(hidden_modules)!r}\nNAMES = {modules!r}\n{IMPORT_ALL}"
    result = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
