"""The worker process of table services: runs the jobs that arrive on standard input (`services/worker_process.py`).

python -m seamark.metaserver.cli.job_worker <memory limit in bytes> <umask of table files, octal>
"""

from __future__ import annotations

import os
import queue
import resource
import signal
import sys
import threading

import msgspec
import structlog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.storage import confine
from seamark.connector.jobs.jobs import JOBS
from seamark.metaserver.api.http.logs import configure_logging
from seamark.metaserver.services.worker_process import JobAnswer, JobRequest
from seamark.metaserver.settings import Settings

_NICE = 10
_MESSAGE_MAX = 1000
_log = structlog.get_logger("seamark.jobs")


def main() -> None:
    """Until the end of the input. Prints of libraries go to standard error, so that they cannot damage an answer."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process
    limit = int(sys.argv[1])
    os.umask(int(sys.argv[2], 8))
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
    while True:
        answers.write(msgspec.json.encode(run(msgspec.json.decode(requests.get(), type=JobRequest))) + b"\n")
        answers.flush()


def _read(requests: queue.SimpleQueue[bytes]) -> None:
    """The input ends when the server stops or dies: then the process ends, even in the middle of a job."""
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def run(request: JobRequest) -> JobAnswer:
    """Runs a job. An error of any kind is an answer, because the next job may succeed."""
    confine(request.folders)
    client = IndexClient(request.url, token=request.token)
    try:
        return JobAnswer(totals=JOBS[request.service](client, (*request.namespace, request.table)))
    except Exception as error:  # noqa: BLE001
        _log.debug("job failed", exc_info=True)
        return JobAnswer(error=" ".join(f"{type(error).__name__}: {error}".split())[:_MESSAGE_MAX])
    finally:
        client.close()


if __name__ == "__main__":
    main()
