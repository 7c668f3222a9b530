"""Run `seamark …` commands. If possible, they are forked from a process that has already imported the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.services.fork_server import fork

SEAMARK = str(Path(sys.executable).parent / "seamark")


def run_seamark(
    *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run the command in the current folder, without input.

    `env` is added to the environment of this process.

    Raises:
        subprocess.TimeoutExpired: The command did not end in time and was killed.
    """
    argv = [SEAMARK, *arguments]
    environment = {**os.environ, **(env or {})}
    with tempfile.TemporaryFile("w+b") as output, tempfile.TemporaryFile("w+b") as errors:
        process = fork(argv, environment, cwd=None, output=output.fileno(), errors=errors.fileno())
        if process is None:
            return subprocess.run(
                argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s,
                check=False,
            )  # fmt: skip
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout_s)
            raise
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(argv, exit_code, output.read().decode(), errors.read().decode())
