"""How much memory a function takes, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

_SCRIPT = """
import importlib, sys
run = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
before = peak()
told = run(*sys.argv[3:])
print(peak() - before, told)
"""


def peak_of(function: Callable[..., object], *arguments: str | Path) -> tuple[int, str]:
    """(bytes that the process has grown by at its peak, what the function returned as text). The function is one of a
    module, and takes text."""
    command = [sys.executable, "-c", _SCRIPT, function.__module__, function.__name__, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    size, _, told = done.stdout.strip().partition(" ")
    return int(size), told
