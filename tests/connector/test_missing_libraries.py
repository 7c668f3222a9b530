"""Tests that the module of an engine without its library says in one sentence what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKING_SCRIPT = """
import sys
sys.modules[{library!r}] = None
for name in [name for name in sys.modules if name.startswith({library!r} + ".")]:
    del sys.modules[name]
{statement}
"""


@pytest.mark.parametrize(
    ("library", "statement", "message"),
    [
        (
            "pyspark",
            "from seamark.spark import sql",
            "seamark.spark needs the library pyspark: pip install 'seamark[spark]'",
        ),
        ("duckdb", "import seamark.duckdb; seamark.duckdb.connect", "pip install 'seamark[duckdb]'"),
    ],
)
def test_error_of_a_missing_library_names_the_install_command(library: str, statement: str, message: str) -> None:
    code = BLOCKING_SCRIPT.format(library=library, statement=statement)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ModuleNotFoundError: ")
    assert message in last_line
