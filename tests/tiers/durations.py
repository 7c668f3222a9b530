"""Wall time and CPU time of each test file, stored in `durations.csv`.

`pytest --keep-durations` writes the file (`make durations`). `spread` reads it to start the longest work first, and
readers see which test became slow. CPU time includes processes that a test starts, such as servers and JVMs. The time
of a process that a session shares, such as Spark's JVM, counts for the file that runs meanwhile.
"""

from __future__ import annotations

import contextlib
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

DURATIONS_FILE = Path(__file__).with_name("durations.csv")
SLOW_S = 5.0
"""The least time of a test that has its own row."""


class Duration(NamedTuple):
    """Wall and CPU seconds of a file (`tests/….py`) or of a slow test (its id)."""

    place: str
    tests: int
    wall_s: float
    cpu_s: float


def read_durations(path: Path = DURATIONS_FILE) -> dict[str, Duration]:
    """Return the stored durations by file or test, or an empty dict if the file does not exist."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        durations = [
            Duration(row["place"], int(row["tests"]), float(row["wall_s"]), float(row["cpu_s"])) for row in rows
        ]
    return {duration.place: duration for duration in durations}


def write_durations(durations: list[Duration], path: Path = DURATIONS_FILE) -> None:
    """Write the durations with the longest first, so that a diff of the file shows which tests became slow."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(Duration._fields)
        for place, tests, wall_s, cpu_s in sorted(durations, key=lambda duration: (-duration.wall_s, duration.place)):
            out.writerow([place, tests, f"{wall_s:.1f}", f"{cpu_s:.1f}"])


def _read_tree_cpu_s() -> float:
    """Return the CPU seconds of this process and of all processes that it started, whether they have ended or not."""
    process = psutil.Process()
    cpu_times = process.cpu_times()
    total: float = cpu_times.user + cpu_times.system + cpu_times.children_user + cpu_times.children_system
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class DurationRecorder:
    """A plugin for processes that run tests, which times each test and reads the CPU time at the end of each file."""

    def __init__(self) -> None:
        self._cpu_s = _read_tree_cpu_s()
        self._running_durations: list[Duration] = []
        self.durations: dict[str, Duration] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
        began_s, own_s = time.perf_counter(), time.process_time()
        try:
            return (yield)
        finally:
            test = Duration(item.nodeid, 1, time.perf_counter() - began_s, time.process_time() - own_s)
            self._running_durations.append(test)
            if test.wall_s >= SLOW_S:
                self.durations[test.place] = test
            if nextitem is None or nextitem.path != item.path:
                self._record_file(item.nodeid.partition("::")[0])

    def _record_file(self, place: str) -> None:
        """Add the durations of the tests since the last call to those of the test file `place`."""
        total = self.durations.get(place, Duration(place, tests=0, wall_s=0.0, cpu_s=0.0))
        cpu_s = _read_tree_cpu_s()
        wall_s = total.wall_s + sum(test.wall_s for test in self._running_durations)
        # The CPU time of a child process is lost if nothing waits for the child.
        used_s = total.cpu_s + max(0.0, cpu_s - self._cpu_s)
        self.durations[place] = Duration(place, total.tests + len(self._running_durations), wall_s, used_s)
        self._cpu_s, self._running_durations = cpu_s, []

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["durations"] = [tuple(duration) for duration in self.durations.values()]


class DurationCollector:
    """A plugin for the process that the user started. It collects the durations of all processes.

    At the end, it writes them to `DURATIONS_FILE`. The file keeps the durations of test files that did not run.
    """

    def __init__(self, recorder: DurationRecorder) -> None:
        self._recorder = recorder
        self._durations: list[Duration] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        durations = getattr(node, "workeroutput", {}).get("durations", [])
        self._durations += [Duration(*duration) for duration in durations]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        results = {duration.place: duration for duration in [*self._durations, *self._recorder.durations.values()]}
        if not results:
            return
        ran_files = {place.partition("::")[0] for place in results}
        durations = [
            duration for duration in read_durations().values() if duration.place.partition("::")[0] not in ran_files
        ]
        write_durations([*durations, *results.values()])
        files = [duration for duration in results.values() if "::" not in duration.place]
        wall_s, cpu_s = sum(file.wall_s for file in files), sum(file.cpu_s for file in files)
        terminalreporter.write_line(f"{DURATIONS_FILE.name}: {len(files)} files, {wall_s:.0f} s, {cpu_s:.0f} s of CPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-durations", action="store_true", help=f"write how long tests took to {DURATIONS_FILE.name}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--keep-durations"):
        return
    recorder = DurationRecorder()
    config.pluginmanager.register(recorder, "durations-recorder")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationCollector(recorder), "durations-keeper")
