"""The driver of a job on Spark, which `services/launching/` starts. Its argument is the folder of the job."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path

import msgspec

from seamark.commands.job_worker import run
from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.services.job import JobProgress
from seamark.metaserver.services.launching.launchers import JobAnswer, JobRequest
from seamark.metaserver.services.launching.spark_submit import ALIVE, ANSWER, PROGRESS, REQUEST


def main() -> None:
    """Run one job, and write its answer to the folder. If the server ends first, a thread ends this process."""
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_server, args=(folder / ALIVE,), daemon=True).start()
    request = convert_json((folder / REQUEST).read_bytes(), JobRequest)
    (folder / REQUEST).unlink()  # The file contains keys, and the folder is not removed if the server is killed.
    # Import PySpark here, because it is an optional dependency that only this process needs.
    rewrites = importlib.import_module("seamark.connector.spark.rewrites")
    with rewrites.open_session_runner(request.folders, request.umask, request.storage) as runner:
        answer = run(request, lambda progress: _write_value(progress, folder / PROGRESS), runner)
    _write_value(answer, folder / ANSWER)


def _write_value(value: JobAnswer | JobProgress, path: Path) -> None:
    partial_path = path.with_suffix(".part")
    partial_path.write_bytes(msgspec.json.encode(value))
    partial_path.rename(path)


def _end_with_server(pipe: Path) -> None:
    """Wait until the pipe ends, and then end this process, even in the middle of a job.

    The pipe ends when the server stops or is killed. A plain open would wait for a writer, and never return if the
    server was killed while Spark started.
    """
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    while os.read(descriptor, 1):
        pass
    os._exit(1)
