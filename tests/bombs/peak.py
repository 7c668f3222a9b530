"""Measure the memory of a function in a separate process.

The process is forked from one that has imported the module, because the import takes longer than most functions.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SCRIPT = """
import importlib, json, os, sys
module = importlib.import_module(sys.argv[1])
names = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
# jemalloc goes on without its own thread after a fork.
assert len(names) - names.count("jemalloc_bg_thd\\n") == 1, f"a fork would lack threads: {names}"
def read_peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
for line in sys.stdin:
    function, *arguments = json.loads(line)
    if not (child := os.fork()):
        bytes_before = read_peak_bytes()
        outcome = getattr(module, function)(*arguments)
        print(json.dumps([read_peak_bytes() - bytes_before, str(outcome)]), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""


@cache
def _start_parent(module: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _SCRIPT, module]
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop_parent() -> None:
        process.communicate()

    atexit.register(stop_parent)
    return process


def measure_peak(function: Callable[..., object], *arguments: str | Path) -> tuple[int, str]:
    """Return (bytes by which the process grew at its peak, the function's result as text).

    Args:
        function: A function of a module.
        arguments: Texts or paths. The function receives them as text.
    """
    parent = _start_parent(function.__module__)
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(json.dumps([function.__name__, *map(str, arguments)]) + "\n")
    parent.stdin.flush()
    line = parent.stdout.readline()
    assert line, "the process ended without a result"
    answer = json.loads(line)
    assert answer is not None, f"{function.__name__} failed; see standard error"
    size_bytes, report = answer
    return int(size_bytes), str(report)
