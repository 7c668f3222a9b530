"""Tests of the progress that `deploy/python/install.py` shows during an installation."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "python" / "install.py"
LINES = (
    "Collecting numpy==2.4.6 (from -r requirements.demo.lock (line 1))",
    "  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)",
    "Requirement already satisfied: rich==15.0.0 in .venv/lib (from -r requirements.demo.lock (line 9)) (15.0.0)",
    "Collecting pyspark==4.1.4 (from -r requirements.ssb.lock (line 3))",
    "  Building wheel for pyspark (pyproject.toml): started",
    "Installing collected packages: pyspark, numpy",
)


class Terminal(io.StringIO):
    """An output that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_packages_are_counted_once_over_all_locks(script: dict[str, Any], tmp_path: Path) -> None:
    lock, other_lock = tmp_path / "a.lock", tmp_path / "b.lock"
    lock.write_text("numpy==2.4.6 \\\n    --hash=sha256:aa\nrich==15.0.0\n")
    other_lock.write_text("rich==15.0.0\nyarl==1.25.1\n")
    assert script["count_packages"]([lock, other_lock]) == 3


def test_terminal_shows_each_step_of_pip(script: dict[str, Any]) -> None:
    output = Terminal()
    progress = script["ProgressLine"](3, output)
    for line in LINES:
        progress.read(line)
        progress.show(1)
    steps = [line.partition(" s  ")[2] for line in output.getvalue().split("\r\033[K")[1:]]
    assert steps == [
        "numpy 2.4.6",
        "numpy 2.4.6, 16.9 MB",
        "rich 15.0.0",
        "pyspark 4.1.4",
        "building the wheel of pyspark",
        "unpacking",
    ]
    assert "[3/3]" in output.getvalue()
    assert "[1/2]" in output.getvalue()


def test_failed_installation_shows_the_output_of_pip(
    script: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # The script does not find uv.
    lock = tmp_path / "broken.lock"
    lock.write_text("no such requirement\n")
    python_path = tmp_path / "bin" / "python"
    python_path.parent.mkdir()
    python_path.symlink_to(sys.executable)
    assert script["main"](str(python_path), str(lock)) != 0
    output = capfd.readouterr()
    assert "Installing 0 packages" in output.out
    assert "no such requirement" in output.out + output.err
