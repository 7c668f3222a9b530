"""Iceberg's Java planner, timed in its own JVM: `table.newScan().filter(f).planFiles()`, read to the end.

`PlanFiles.java` in this folder is run from source on the Spark runtime's jar (`make jars`). A JVM that has planned
before is warm: its code is compiled, and the manifests are in the page cache. It decodes them again for every plan.
`python -m bench.planning.java_peer METADATA FILTER` prints each plan as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.planning.plans import KeptFiles
from tests.services.java import find_java_17, read_rck_classpath
from tests.services.process import CACHE, ServiceFailed

SOURCE = Path(__file__).parent / "PlanFiles.java"
HEAP_RESERVE_PERCENT = 20
"""The further heap of the JVM, in percent of the heap for the files."""
HEAP_BYTES_A_FILE = 6000
"""The bytes of heap per file.

Each scan task, with its statistics, stays in memory until the plan has been read. The value is large, to be fair to the
peer.
"""


def find_runtime_jar() -> Path:
    paths = sorted((CACHE / "jars").glob("iceberg-spark-runtime-*.jar"))
    if not paths:
        raise ServiceFailed("no Iceberg runtime below .cache/jars: run `make jars`")
    return paths[-1]


def read_version() -> str:
    """Return Iceberg's version from the name of its jar."""
    return find_runtime_jar().stem.rpartition("-")[2]


def choose_heap_mb(files: int) -> int:
    """Return the JVM's -Xmx in MB: 1 GB, plus about 7 GB for each million files."""
    return 1024 + files * HEAP_BYTES_A_FILE * (100 + HEAP_RESERVE_PERCENT) // 100 // 2**20


class TimedJavaPlanner:
    """A running JVM that has loaded one table's metadata and plans one filter at a time."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child, self._log = child, log

    def wait_until_loaded(self) -> None:
        """Wait for the first line of the JVM, which it prints when it has loaded the metadata."""
        self._read_answer()

    def plan(self, expression: Any) -> KeptFiles:
        """Send a filter to the JVM, and return its plan.

        Args:
            expression: The filter as JSON values of an Iceberg REST expression. Dates and times are ISO texts.
        """
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(expression) + "\n")
        self._child.stdin.flush()
        answer = self._read_answer()
        return KeptFiles(answer["ms"], answer["files"], answer["bytes"], answer["paths"])

    def _read_answer(self) -> dict[str, Any]:
        """Return the next line of JSON that the JVM prints.

        Raises:
            ServiceFailed: The JVM ended.
        """
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            code = self._child.wait()
            raise ServiceFailed(f"the Java planner ended with {code}\n{self._log.read_text()[-4000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def run_java_planner(metadata_location: str, files: int, log: Path) -> Iterator[TimedJavaPlanner]:
    """Run a JVM for one table, on every core that this process can use.

    The JVM ends with the block.
    """
    # Only the logging library slf4j comes from the jars of Iceberg's REST test kit: the runtime jar has all others.
    logging = [jar for jar in read_rck_classpath().split(os.pathsep) if Path(jar).name.startswith("slf4j-")]
    argv = [find_java_17(), f"-Xmx{choose_heap_mb(files)}m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
    argv += ["-cp", os.pathsep.join([str(find_runtime_jar()), *logging]), str(SOURCE), metadata_location]
    with log.open("wb") as errors:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        planner = TimedJavaPlanner(child, log)
        planner.wait_until_loaded()
        yield planner
    finally:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.java_peer", description=__doc__)
    parser.add_argument("metadata", help="location of the metadata file, file:///…")
    parser.add_argument("filter", nargs="?", default="true", help="a REST expression as JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--files", type=int, default=1_000_000, help="files of the table, for the heap")
    parser.add_argument("--log", type=Path, default=Path("java_planner.log"))
    arguments = parser.parse_args()
    with run_java_planner(arguments.metadata, arguments.files, arguments.log) as planner:
        for _ in range(arguments.rounds):
            print(json.dumps(dataclasses.asdict(planner.plan(json.loads(arguments.filter)))), flush=True)


if __name__ == "__main__":
    main()
