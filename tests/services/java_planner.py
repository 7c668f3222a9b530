"""Iceberg Java's scan planner in a separate JVM, for comparison. It makes thousands of plans in seconds.

`JavaPlanner.java` is compiled once into .cache, against the jar that Spark uses. It answers in lines of JSON.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO, Any

import pyspark

from tests.services.java import SHORT_LIVED, compile_java, find_java_17
from tests.services.process import CACHE, ServiceFailed

SOURCE = Path(__file__).with_name("JavaPlanner.java")


@dataclass(frozen=True)
class PlanRequest:
    """A request for one scan.

    Attributes:
        metadata: The URI of the metadata file.
        filter: The filter of the REST API as JSON text.
        snapshot_id: The id of the snapshot, or None for the current snapshot.
        names: The column names that the filter uses: those of the current schema ("current") or of the snapshot's
            schema ("snapshot").
        case_sensitive: Whether the names in the filter are case-sensitive.
    """

    metadata: str
    filter: str
    snapshot_id: int | None = None
    names: str = "current"
    case_sensitive: bool = True

    def encode_line(self) -> bytes:
        document = {
            "metadata": self.metadata,
            "filter": json.loads(self.filter),
            "snapshot-id": self.snapshot_id,
            "names": self.names,
            "case-sensitive": self.case_sensitive,
        }
        return json.dumps(document).encode() + b"\n"


@dataclass(frozen=True)
class PlannedTask:
    """A file of Java's plan.

    A deletion vector is named `location#offset`. The residual is in Java's JSON.
    """

    path: str
    deletes: frozenset[str]
    residual: Any


@dataclass(frozen=True)
class JavaPlan:
    """Java's answer: its tasks by file path, or the text of its exception."""

    tasks: dict[str, PlannedTask]
    error: str | None


class JavaPlanner:
    """A running JVM. `plan` sends any number of scans at once.

    Consecutive scans of the same table are fastest.
    """

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        self._child = child
        self._log = log

    def plan(self, requests: Sequence[PlanRequest]) -> list[JavaPlan]:
        """Return an answer for each request, in order."""
        stdin, stdout = self._child.stdin, self._child.stdout
        if stdin is None or stdout is None:
            raise ServiceFailed("the JVM was started without pipes")
        sender = Thread(target=send_lines, args=(stdin, [request.encode_line() for request in requests]))
        sender.start()
        answers = []
        for _ in requests:
            line = stdout.readline()
            if not line:
                raise ServiceFailed(f"Java's planner ended\n{self._log.read_text(errors='replace')[-4000:]}")
            answers.append(_parse_plan(json.loads(line)))
        sender.join()
        return answers


def send_lines(stdin: IO[bytes], lines: list[bytes]) -> None:
    """Write lines. The caller runs this in a thread, because a write waits for the reader while both pipes are full."""
    for line in lines:
        stdin.write(line)
    stdin.flush()


def _parse_plan(answer: dict[str, Any]) -> JavaPlan:
    if "error" in answer:
        return JavaPlan({}, answer["error"])
    tasks = [PlannedTask(task["path"], frozenset(task["deletes"]), task["residual"]) for task in answer["tasks"]]
    return JavaPlan({task.path: task for task in tasks}, None)


@contextmanager
def run_java_planner(log: Path) -> Iterator[JavaPlanner]:
    """Compile the planner if necessary, start the JVM, and end it by closing its input."""
    classpath = _build_classpath()
    classes = compile_java(SOURCE, classpath)
    argv = [find_java_17(), "-Xmx1g", *SHORT_LIVED, "-Diceberg.worker.num-threads=2"]
    argv += ["-cp", ":".join([str(classes), *classpath]), "JavaPlanner"]
    with log.open("ab") as errors:
        jvm = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    with jvm:
        try:
            yield JavaPlanner(jvm, log)
        finally:
            if jvm.stdin is not None:
                jvm.stdin.close()
            try:
                jvm.wait(60)
            except subprocess.TimeoutExpired:
                jvm.kill()


def _build_classpath() -> list[str]:
    iceberg = sorted((CACHE / "jars").glob("iceberg-spark-runtime-*.jar"))
    if not iceberg:
        raise ServiceFailed(f"no Iceberg runtime in {CACHE / 'jars'}: run `make jars`")
    spark_jars = Path(pyspark.__file__).parent / "jars"
    return [str(iceberg[-1]), *(str(jar) for jar in sorted(spark_jars.glob("slf4j-api-*.jar")))]
