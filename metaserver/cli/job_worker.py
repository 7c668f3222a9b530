"""The worker process of table services: runs the jobs that arrive on standard input (`services/launching/`).

python -m seamark.metaserver.cli.job_worker <memory limit in bytes>
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import platform
import queue
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pyarrow as pa
import structlog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.progress import reporting
from seamark.connector.client.storage import confine
from seamark.connector.jobs.failures import line_of
from seamark.connector.jobs.jobs import JOBS
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.connector.write.replacements import BatchRunner
from seamark.metaserver.api.http.observability.logs import configure_logging
from seamark.metaserver.decoding import from_json
from seamark.metaserver.services.launching.launchers import JobAnswer, JobRequest
from seamark.metaserver.services.service import JobProgress, Report
from seamark.metaserver.settings import Settings

_NICE = 15
"""About a thirtieth of the CPU that a request gets on a busy machine, so that jobs still end there."""
_IO_CLASS_IDLE, _IO_CLASS_SHIFT = 3, 13
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call ioprio_set, which has no function in the C library."""
_MESSAGE_MAX = 1000
_log = structlog.get_logger("seamark.jobs")


def main() -> None:
    """Until the end of the input. Prints of libraries go to standard error, so that they cannot damage an answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    yield_to_requests()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    limit = int(sys.argv[1])
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    environment = os.environ
    configure_logging(
        Settings(
            log_level=environment.get("SEAMARK_LOG_LEVEL", "info"),
            log_format=environment.get("SEAMARK_LOG_FORMAT", "auto"),
        )
    )
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()

    def answer(answer: JobAnswer) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    while True:
        request = from_json(requests.get(), JobRequest)
        answer(run(request, lambda progress: answer(JobAnswer(progress=progress))))


def yield_to_requests() -> None:
    """Lowers the priority of this process for CPU and disk, and its number of threads: requests come first.

    SCHED_BATCH: the process interrupts no other that runs when it wakes up. What the system refuses is left out.

    Where Linux groups processes by sessions (sched(7), autogroup), a priority counts only within its session, and
    sessions share the CPU equally. So the worker has a separate session with a low priority: in that of the server,
    it would use up the server's share, and requests would wait for other programs.
    """
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE))
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, 1, 0, _IO_CLASS_IDLE << _IO_CLASS_SHIFT)
    pa.set_cpu_count(1)


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    """The input ends when the server stops or dies: then the process ends, even in the middle of a job."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def run(request: JobRequest, report: Report, runner: BatchRunner | None = None) -> JobAnswer:
    """Runs a job, with the rewrites where `runner` runs them. An error of any kind is an answer, because the next job
    may succeed. `report` receives the progress from time to time."""
    os.umask(request.umask)
    if request.folders is not None:
        confine(request.folders)
    client = IndexClient(request.url, token=request.token, fence=request.fence)
    further = request.arguments if runner is None else {**request.arguments, "runner": runner}
    table = (*request.namespace, request.table)
    try:
        with reporting(lambda progress: report(JobProgress(**dataclasses.asdict(progress)))):
            return JobAnswer(totals=JOBS[request.service](client, table, **further))
    except Exception as error:  # noqa: BLE001
        line = line_of(error, _MESSAGE_MAX, named=True)
        _log.debug("job failed", error=line, exc_info=not has_keys())
        return JobAnswer(error=line)
    finally:
        client.close()


if __name__ == "__main__":
    main()
