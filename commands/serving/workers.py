"""Run several workers on one port, with a supervisor that starts them, restarts crashed workers and forwards signals.

Each worker is a new process that binds the same port with SO_REUSEPORT. The process is spawned and not forked, because
threads and event loops do not survive a fork. The supervisor also binds the port, but does not listen. So no other
process can take the port while no worker runs, and with `--port 0` all workers use the same port.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import structlog
from prometheus_client import multiprocess

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.metaserver.api.http.observability.logs import configure_logging
from seamark.metaserver.api.http.observability.metrics import MULTIPROCESS_VARIABLE
from seamark.metaserver.api.listening import bind_socket
from seamark.metaserver.runtime.home import PRIVATE_UMASK
from seamark.metaserver.server import run
from seamark.metaserver.settings.settings import Settings

BACKOFF_S_MAX = 30.0
_FIRST_BACKOFF_S = 0.25
_DOUBLINGS_MAX = 16
"""The maximum number of times that the pause is doubled, so that the power does not overflow a float."""
_EXIT_S = 5
"""The time in seconds in which a worker has to exit after its requests have ended."""
_SIGNALS_BYTES = 4096
"""The number of bytes that are read at once from the socket to which Python writes a byte for each signal."""
STEADY_S = 10.0
"""The minimum run time in seconds after which a crashed worker is restarted immediately.

A shorter run counts as a failed start.
"""
EXIT_CONFIG = 2
EXIT_FAILED = 1

_log = structlog.get_logger("seamark.workers")
_spawn = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class _Worker:
    """The state of a worker in the supervisor."""

    number: int
    process: BaseProcess | None = None
    pipe: Connection | None = None
    """The pipe on which the worker sends one message: that it is ready, or why it could not start."""
    started_s: float = 0.0
    failures: int = 0
    due_s: float = 0.0
    """The monotonic time of the next start in seconds. It is used while `process` is None."""

    @property
    def is_ready(self) -> bool:
        """Whether the worker runs and has sent its message that it is ready, after which its pipe is closed."""
        return self.process is not None and self.pipe is None


def supervise(settings: Settings, sock: socket.socket, on_ready: Callable[[], None]) -> None:
    """Run `settings.workers` processes on the port of `sock` until SIGTERM or SIGINT.

    The metrics of all processes are in files of one folder. Files of an earlier run are removed first.

    Raises:
        ConfigError: The first start fails because of the configuration.
    """
    folder = settings.home.absolute() / "metrics"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ[MULTIPROCESS_VARIABLE] = str(folder)
    fixed_settings = dataclasses.replace(settings, port=sock.getsockname()[1])
    Supervisor(fixed_settings, SystemClock(), str(folder), on_ready).run()


class Supervisor:
    """A loop that handles events: signals, workers that are ready or have ended, and due restarts."""

    def __init__(self, settings: Settings, clock: Clock, metrics_folder: str, on_ready: Callable[[], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._metrics_folder = metrics_folder
        self._on_ready = on_ready
        self._is_announced = False
        self._is_stopping = False
        self._workers = [_Worker(number) for number in range(settings.workers)]
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> None:
        self._wake_write.setblocking(False)
        previous_handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        if self._settings.tls_cert:
            previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._forward_signal)
        previous_wakeup_fd = signal.set_wakeup_fd(self._wake_write.fileno())
        try:
            while not (self._is_stopping and all(worker.process is None for worker in self._workers)):
                self._step()
        finally:
            self._end_all()
            signal.set_wakeup_fd(previous_wakeup_fd)
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)
            self._wake_read.close()
            self._wake_write.close()

    def _forward_signal(self, number: int, frame: object) -> None:
        """Send a signal to the workers that are ready. A worker handles the signal only when it is ready."""
        for worker in self._workers:
            if worker.is_ready and worker.process is not None and worker.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(worker.process.pid, number)

    def _stop(self, number: int, frame: object) -> None:
        self._is_stopping = True

    def _step(self) -> None:
        """Start due workers, stop workers if the supervisor is stopping, then wait for events and handle them.

        Raises:
            ConfigError: The configuration is invalid, and no worker has been ready yet.
        """
        now_s = self._clock.monotonic()
        for worker in self._workers:
            if worker.process is None and not self._is_stopping and worker.due_s <= now_s:
                self._start(worker)
            if worker.process is not None and self._is_stopping and worker.process.is_alive():
                worker.process.terminate()
        sources: list[object] = [self._wake_read]
        for worker in self._workers:
            if worker.process is not None:
                sources.append(worker.process.sentinel)
            if worker.pipe is not None:
                sources.append(worker.pipe)
        waits_s = [worker.due_s - now_s for worker in self._workers if worker.process is None and not self._is_stopping]
        events = wait(sources, timeout=max(0.0, min(waits_s)) if waits_s else None)  # type: ignore[arg-type]
        if self._wake_read in events:
            self._wake_read.recv(_SIGNALS_BYTES)
        for worker in self._workers:
            if worker.pipe is not None and worker.pipe in events:
                self._receive(worker)
            if worker.process is not None and not worker.process.is_alive():
                self._handle_exit(worker)

    def _start(self, worker: _Worker) -> None:
        receiver, sender = _spawn.Pipe(duplex=False)
        worker.process = _spawn.Process(
            target=_run_worker,
            args=(self._settings, worker.number, sender),
            name=f"seamark-{worker.number}",
            daemon=False,
        )
        worker.process.start()
        sender.close()
        worker.pipe, worker.started_s = receiver, self._clock.monotonic()

    def _receive(self, worker: _Worker) -> None:
        """Handle the message of a worker, which is ready or could not start.

        Raises:
            ConfigError: The configuration is invalid, and no worker has been ready yet.
        """
        assert worker.pipe is not None
        try:
            message: str = worker.pipe.recv()
        except EOFError:
            message = ""
        worker.pipe.close()
        worker.pipe = None
        if message.startswith("config:") and not self._is_announced:
            raise ConfigError(message.removeprefix("config:"))
        if message == "ready" and not self._is_announced:
            # One ready worker is enough, because the others share the port and will be ready soon.
            self._is_announced = True
            self._on_ready()

    def _handle_exit(self, worker: _Worker) -> None:
        """Record the end of a worker, and choose the time of its next start.

        A worker that ran for more than `STEADY_S` seconds starts again at once. After repeated failures, each wait is
        twice as long.
        """
        assert worker.process is not None
        process, worker.process = worker.process, None
        process.join()
        if process.pid is not None:
            multiprocess.mark_process_dead(process.pid, self._metrics_folder)  # type: ignore[no-untyped-call]
        now_s = self._clock.monotonic()
        if self._is_stopping:
            return
        worker.failures = 0 if now_s - worker.started_s > STEADY_S else worker.failures + 1
        doublings = min(worker.failures - 1, _DOUBLINGS_MAX)
        pause_s = min(BACKOFF_S_MAX, _FIRST_BACKOFF_S * 2**doublings) if worker.failures else 0.0
        worker.due_s = now_s + pause_s
        _log.error(
            "worker ended, starting another",
            worker=worker.number,
            pid=process.pid,
            code=process.exitcode,
            pause_s=pause_s,
        )

    def _end_all(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.terminate()
                worker.process.join(self._settings.drain_timeout_s + _EXIT_S)
                if worker.process.is_alive():
                    worker.process.kill()
                    worker.process.join()
            if worker.pipe is not None:
                worker.pipe.close()


def _run_worker(settings: Settings, number: int, pipe: Connection) -> None:
    """Run a worker process until it ends.

    When the worker is ready, it sends `ready` to the supervisor. After a ConfigError, it sends the message, because
    only the supervisor reports it.
    """
    os.umask(PRIVATE_UMASK)
    configure_logging(settings, number)
    try:
        sock = bind_socket(settings, shared=True)
        supervisor = multiprocessing.parent_process()
        parent = supervisor.sentinel if supervisor is not None else None
        run(settings, sock, EXTENSIONS, lambda: pipe.send("ready"), parent, is_first=number == 0)
    except ConfigError as error:
        pipe.send(f"config:{error.message}")
        raise SystemExit(EXIT_CONFIG) from None
    except SeamarkError as error:
        _log.error("worker failed", worker=number, error=error.message)
        raise SystemExit(EXIT_FAILED) from None
