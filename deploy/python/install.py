"""Install the packages of lock files into the virtual environment of a Python, and show progress.

    python deploy/python/install.py .venv/bin/python requirements.demo.lock

uv installs where it is on PATH, else pip. All files are compared with the hashes in the lock. Only the standard library
is imported, because nothing else is there yet.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO

REFRESH_S = 0.2
LOG_INTERVAL_S = 10.0
"""Without a terminal a line is printed this often."""
WHEEL_OPTIONS = Path(__file__).with_name("wheels.cfg")
_COLLECTED = re.compile(r"^(?:Collecting|Requirement already satisfied:) (\S+?)(?:==(\S+))?(?: \(| in |$)")
_DOWNLOADED = re.compile(r"^\s*Downloading .*\((\S+ [kM]B)\)")
_BUILT = re.compile(r"^\s*Building wheel for (\S+)")


def count_packages(locks: Sequence[Path]) -> int:
    """Return how many packages the lock files pin."""
    pins = {line.split()[0] for lock in locks for line in lock.read_text().splitlines() if re.match(r"[\w.-]+==", line)}
    return len(pins)


class ProgressLine:
    """One line that changes on a terminal; elsewhere, a line now and then."""

    def __init__(self, total: int, output: IO[str]) -> None:
        self._total = total
        self._output = output
        self._is_terminal = output.isatty()
        self._began_s = self._logged_s = time.monotonic()
        self._collected = 0
        self._step = "starting"
        self._is_installing = False

    @property
    def is_installing(self) -> bool:
        """Whether pip has downloaded all packages and is installing them."""
        return self._is_installing

    def read(self, line: str) -> None:
        """Take the state from a line of pip's output."""
        if match := _COLLECTED.match(line):
            self._collected += 1
            self._step = match[1] if match[2] is None else f"{match[1]} {match[2]}"
        elif match := _DOWNLOADED.match(line):
            self._step = f"{self._step.partition(', ')[0]}, {match[1]}"
        elif match := _BUILT.match(line):
            self._step = f"building the wheel of {match[1]}"
        elif line.startswith("Installing collected packages:"):
            self._is_installing = True
            self._total = line.count(",") + 1

    def show(self, installed: int = 0) -> None:
        """Print the state, if it is time to. `installed` counts the packages that pip has unpacked."""
        now_s = time.monotonic()
        if not self._is_terminal and now_s - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        done, step = (installed, "unpacking") if self._is_installing else (self._collected, self._step)
        text = f"[{min(done, self._total)}/{self._total}] {now_s - self._began_s:.0f} s  {step}"
        self._output.write(f"\r\033[K{text[:100]}" if self._is_terminal else f"{text}\n")
        self._output.flush()

    def close(self) -> None:
        """Replace the progress line by the total time."""
        self._output.write("\r\033[K" if self._is_terminal else "")
        self._output.write(f"Installed in {time.monotonic() - self._began_s:.0f} s\n")
        self._output.flush()


def _iter_lines(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yield the lines that the process prints. Yield None if it prints nothing for `REFRESH_S`, and at the end."""
    queue: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        for line in process.stdout or ():
            queue.put(line)
        queue.put(None)

    reader = Thread(target=read, daemon=True)
    reader.start()
    while reader.is_alive() or not queue.empty():
        try:
            yield queue.get(timeout=REFRESH_S)
        except Empty:
            yield None


def _count_installed(python: str) -> int:
    """Return how many packages are in the environment of `python`."""
    return sum(1 for _ in Path(python).absolute().parents[1].glob("lib/python*/site-packages/*.dist-info"))


def _install_with_pip(python: str, arguments: Sequence[str], environment: dict[str, str], total: int) -> int:
    argv = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", "--no-compile"]
    progress = ProgressLine(total, sys.stdout)
    before = _count_installed(python)
    printed: list[str] = []
    with subprocess.Popen(  # noqa: S603
        [*argv, *arguments], env=environment, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        for line in _iter_lines(process):
            if line is not None:
                printed.append(line)
                progress.read(line)
            progress.show(_count_installed(python) - before if progress.is_installing else 0)
    code = process.returncode
    if code:
        sys.stdout.write("\n" + "".join(printed[-30:]))
    else:
        progress.close()
    return code


def main(python: str, *locks: str) -> int:
    """Install the locked packages; return the exit code of the installer."""
    paths = [Path(lock) for lock in locks]
    total = count_packages(paths)
    environment = {**os.environ, "DIST_EXTRA_CONFIG": str(WHEEL_OPTIONS.absolute()), "PYTHONUNBUFFERED": "1"}
    arguments = ["--require-hashes", *(part for path in paths for part in ("-r", str(path)))]
    uv = shutil.which("uv")
    sys.stdout.write(f"Installing {total} packages into {Path(python).parents[1]} with {'uv' if uv else 'pip'}\n")
    sys.stdout.flush()
    if uv:
        argv = [uv, "pip", "install", "--python", python, *arguments]
        return subprocess.run(argv, env=environment, check=False).returncode  # noqa: S603
    return _install_with_pip(python, arguments, environment, total)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
