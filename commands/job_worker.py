"""The worker process of table services, which runs the jobs that it receives on standard input.

The process imports all modules first, and then forks a child for each job. A child restricts itself to the table of its
job, and cannot remove the restriction (`confinement/jobs.py`). When the input ends, the process and its child end. The
server starts it in `services/launching/`:

    python -m seamark.commands.job_worker <memory limit in bytes>
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import platform
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec
import pyarrow as pa
import structlog

from seamark.commands.confinement.jobs import confine_job
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.progress import report_progress
from seamark.connector.client.storage import confine, use_keys
from seamark.connector.jobs.failures import format_error_line
from seamark.connector.jobs.jobs import JOBS
from seamark.connector.parquet.encryption.keys import has_keys
from seamark.connector.write.replacements import BatchRunner
from seamark.formats.runtime.decoding import convert_json
from seamark.metaserver.api.http.observability.logs import configure_logging
from seamark.metaserver.services.job import JobProgress, Report
from seamark.metaserver.services.launching.launchers import JobAnswer, JobRequest
from seamark.metaserver.settings.settings import Settings

_NICE = 15
"""The niceness of the process. On a busy machine, it gets about a thirtieth of the CPU time of a request, so that jobs
still make progress.
"""
_IO_CLASS_IDLE, _IO_CLASS_SHIFT = 3, 13
_IOPRIO_WHO_PROCESS, _THIS_PROCESS = 1, 0
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call ioprio_set, by architecture. The C library has no function for it."""
_SET_PDEATHSIG = 1
_MESSAGE_MAX = 1000
"""The maximum length of an error message in an answer, in characters."""
_log = structlog.get_logger("seamark.jobs")


def main() -> None:
    """Run jobs until the input ends.

    The first argument is the maximum size of this process's data in bytes, or 0 for no limit.

    Libraries print to standard error instead of standard output, so that they cannot damage an answer.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    yield_to_requests()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the server, which then ends this process.
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
    gc.collect()
    gc.freeze()  # With this, children share the memory pages that they do not write.
    for line in _read_lines(sys.stdin.fileno()):
        _run_in_child(convert_json(line, JobRequest), answers)


def _read_lines(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of the input.

    The input is not buffered, so that `_run_in_child` can detect its end.
    """
    with os.fdopen(descriptor, "rb", buffering=0, closefd=False) as source:
        yield from iter(source.readline, b"")


def _run_in_child(request: JobRequest, answers: BinaryIO) -> None:
    """Run a job in a child process, and wait for its end.

    If the child ends without an answer, this process ends with the child's exit code. Then the server marks
    the job as failed and starts another worker.
    """
    with tempfile.TemporaryDirectory(prefix="seamark-job-", ignore_cleanup_errors=True) as scratch:
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _end_with_parent(parent)
            _close_input()
            _answer_request(request, answers, scratch)
        code = _await_end(child)
    if code:
        # The exit code for a signal is 128 + its number, as in shells.
        sys.exit(code if code > 0 else 128 - code)


def _await_end(child: int) -> int:
    """Wait for the child, and return its exit code, which is negative for a signal.

    If the input of this process ends first, kill the child.
    """
    handle = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        # Poll only for the end of the input: the server sends no job before it has the answer. Any event without the
        # child's handle is this end.
        poll.register(sys.stdin.fileno(), 0)
        while not any(descriptor == handle for descriptor, _ in poll.poll()):
            os.kill(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        os.close(handle)


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the parent ends, even if the parent is killed."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _close_input() -> None:
    """Replace the standard input by an empty input. The pipe of the server contains the logins and keys of later jobs.

    A process that the job starts could otherwise read them after the job.
    """
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, sys.stdin.fileno())
    os.close(null_device)


def _answer_request(request: JobRequest, answers: BinaryIO, scratch: str) -> NoReturn:
    """Run the job in this process, and exit with 0 after the answer, or with 1 after an error.

    `os._exit` ends the child without the clean-up of the parent's objects.
    """
    try:

        def send(answer: JobAnswer) -> None:
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()

        send(run(request, lambda progress: send(JobAnswer(progress=progress)), scratch=scratch))
        os._exit(0)
    finally:
        os._exit(1)


def yield_to_requests() -> None:
    """Lower the CPU and disk priority of this process below those of requests, and limit Arrow to one thread.

    With SCHED_BATCH, the process does not interrupt a running process when it wakes up. Settings that the system
    refuses are skipped.

    If Linux groups processes by sessions (sched(7), autogroup), a priority applies only within its session, and
    sessions share the CPU equally. Therefore the worker has its own session with a low priority. In the server's
    session, it would use the CPU time of the server, and requests would wait for other programs.
    """
    os.nice(_NICE)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICE))
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        priority = _IO_CLASS_IDLE << _IO_CLASS_SHIFT
        ctypes.CDLL(None, use_errno=True).syscall(number, _IOPRIO_WHO_PROCESS, _THIS_PROCESS, priority)
    pa.set_cpu_count(1)


def run(
    request: JobRequest, report: Report, runner: BatchRunner | None = None, *, scratch: str | None = None
) -> JobAnswer:
    """Run a job, and return its answer.

    Every error of the job becomes an answer, because the next job may succeed.

    Args:
        request: The job.
        report: Receives the progress from time to time.
        runner: Runs the rewrites. If it is None, this process runs them.
        scratch: A folder for temporary files. If it is set, this process runs only this job, and is restricted to the
            job's table and to this folder.
    """
    os.umask(request.umask)
    if request.folders is not None:
        confine(request.folders)
    use_keys(request.storage)
    client = IndexClient(request.url, token=request.token, fence=request.fence, certificates=request.certificates)
    arguments = request.arguments if runner is None else {**request.arguments, "runner": runner}
    table = (*request.namespace, request.table)
    try:
        if scratch is not None:
            confine_job(client, request, scratch)
        with report_progress(lambda progress: report(JobProgress(**dataclasses.asdict(progress)))):
            return JobAnswer(totals=JOBS[request.service](client, table, **arguments))
    except Exception as error:  # noqa: BLE001
        line = format_error_line(error, _MESSAGE_MAX, with_class=True)
        # A traceback ends with the message of the error, which may quote values of encrypted files.
        _log.debug("job failed", error=line, exc_info=not has_keys())
        return JobAnswer(error=line)
    finally:
        client.close()


if __name__ == "__main__":
    main()
