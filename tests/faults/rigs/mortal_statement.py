"""A worker process of a statement that is killed before or after one of its writes or requests.

    python -m tests.faults.rigs.mortal_statement NUMBER

It reads the statement from its input, like `seamark.connector.jobs.statement_runs`. The process kills itself at the
event NUMBER. A job with fewer events ends normally.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from seamark.connector.client.client import SeamarkClient
from seamark.connector.jobs import statement_runs
from seamark.connector.jobs.statements import StatementAnswer, StatementJob
from seamark.connector.parquet.copy import sinks
from seamark.connector.write.data_files import FileWriter

NEVER = 0
EVENTS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (sinks._LocalSink, ("write", "copy", "close")),
    (sinks._StreamSink, ("write", "copy", "close")),
    (FileWriter, ("write", "close")),
    (SeamarkClient, ("_request",)),
)


def run_killed_at(number: int, job: StatementJob, env: Mapping[str, str] | None = None) -> StatementAnswer | None:
    """Run a job that is killed at event `number`, which is the start or end of a write or a request.

    Return its answer, or None if it was killed.
    """
    argv = [sys.executable, "-m", "tests.faults.rigs.mortal_statement", str(number)]
    environment = None if env is None else {**os.environ, **env}
    result = subprocess.run(argv, input=msgspec.json.encode(job), stdout=subprocess.PIPE, timeout=240, env=environment)
    if result.returncode == -signal.SIGKILL:
        return None
    assert result.returncode == 0
    return msgspec.json.decode(result.stdout, type=StatementAnswer)


def main(number: int) -> None:
    """Run one SQL statement, and kill this process at the event with this number.

    An event is the start or the end of a call of a method in `EVENTS`.
    """
    events_left = number

    def pass_event() -> None:
        nonlocal events_left
        events_left -= 1
        if events_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_method(method: Callable[..., Any]) -> Callable[..., Any]:
        def call_and_pass(*arguments: Any, **kwargs: Any) -> Any:
            pass_event()
            result = method(*arguments, **kwargs)
            pass_event()
            return result

        return call_and_pass

    for class_, method_names in EVENTS:
        for method_name in method_names:
            setattr(class_, method_name, watch_method(getattr(class_, method_name)))
    statement_runs.main()


if __name__ == "__main__":
    main(int(sys.argv[1]))
