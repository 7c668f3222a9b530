"""A child process in its own process group. The parent waits until it is ready, and adds the end of its log to errors.

A test must never hang because a service died, nor leave a service running. So `ManagedProcess` watches the child while
it waits for readiness. At the end it terminates the whole process group, and kills it if necessary. When the
interpreter exits, it kills all remaining processes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.services.fork_server import ForkedProcess, fork

REPO = Path(__file__).resolve().parents[2]
CACHE = REPO / ".cache"
DEPLOY = REPO / "deploy"

_living: set[ManagedProcess] = set()
"""The processes that were started and have not ended, as far as this process knows."""


class ServiceFailed(Exception):
    """A service did not start, died early, or lacks something on this machine. The message says what to do."""


_PORTS = range(20_000, 32_000)
"""The range of ports for servers. It is below the ports that Linux assigns to clients and to requests for any port.

So a chosen port stays free until its use, and while its server is stopped before a restart.
"""


_WORKERS_MAX = 8
"""The number of processes of a test run that never choose the same port."""

_drawn: set[int] = set()
"""Ports that this process has chosen. A test may choose several ports before it uses the first."""


def choose_free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago, and that no other process of this test run chooses.

    This process chooses the port again only after all other ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports_of_worker = _PORTS[worker % _WORKERS_MAX :: _WORKERS_MAX]
    if _drawn.issuperset(ports_of_worker):
        _drawn.clear()
    ports = [port for port in ports_of_worker if port not in _drawn]
    for port in random.sample(ports, len(ports)):
        _drawn.add(port)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise ServiceFailed(f"no port of 127.0.0.1 is free from {_PORTS.start} on")


def is_port_open(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def is_http_ok(url: str, *, contains: str = "") -> bool:
    """Return True if GET `url` answers with a status 2xx and a body that contains `contains`."""
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=10) as answer:
        return contains in answer.read().decode()
    return False


class ManagedProcess:
    """A process that runs `argv`, with both output streams in `log`.

    `env` is added to the environment, and `cwd` is the folder. If `forked`, the fork server starts the process, as for
    Seamark's server in tests.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        forked: bool = False,
    ) -> None:
        """Store the command. It does not start yet.

        Args:
            argv: The command and its arguments.
            log: The file for both output streams.
            env: Variables in addition to those of this process.
            cwd: The folder of the process.
            forked: If True, the fork server starts the process, which is faster for Seamark's server.
        """
        self.argv = list(argv)
        self.log = log
        self._env = {**os.environ, **(env or {})}
        self._cwd = cwd
        self._is_forked = forked
        self._child: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def pid(self) -> int:
        """The process id of the child, which is also the id of its process group."""
        if self._child is None:
            raise ServiceFailed(f"{self.argv[0]} is not running")
        return self._child.pid

    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self, is_ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Start the child, and return when `is_ready()` is True.

        Raises:
            ServiceFailed: The child ended before it was ready, or was not ready in time. The message has the end of its
                log.
        """
        with self.log.open("ab") as log_file:
            self._child = fork(self.argv, self._env, self._cwd, log_file.fileno()) if self._is_forked else None
            self._child = self._child or subprocess.Popen(
                self.argv, env=self._env, cwd=self._cwd, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                start_new_session=True,
            )  # fmt: skip
        _living.add(self)
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            code = self._child.poll()
            if code is not None:
                _living.discard(self)
                raise ServiceFailed(f"{self.argv[0]} ended with {code} before it was ready\n{self.log_tail()}")
            if time.monotonic() > deadline:
                self.stop()
                raise ServiceFailed(f"{self.argv[0]} was not ready after {timeout_s:g} s\n{self.log_tail()}")
            time.sleep(0.05)

    def send(self, signal_number: int) -> None:
        """Send a signal to the whole process group. If the group has already ended, nothing happens."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal_number)

    def wait(self, timeout_s: float) -> int:
        """Wait for the end of the child for at most `timeout_s` seconds, and return its exit code.

        After its end, kill the processes of its group that still run.

        Raises:
            ServiceFailed: The child was never started.
            subprocess.TimeoutExpired: The child still runs. Nothing is killed.
        """
        if self._child is None:
            raise ServiceFailed(f"{self.argv[0]} is not running")
        code = self._child.wait(timeout_s)
        self.send(signal.SIGKILL)  # Workers may have outlived their parent.
        _living.discard(self)
        return code

    def stop(self, *, first: int = signal.SIGTERM, grace_s: float = 15.0) -> int | None:
        """End the process group with the signal `first`, and with SIGKILL if it still exists after `grace_s` seconds.

        Return the exit code, or None if the child was never started.
        """
        if self._child is None:
            return None
        if self not in _living:  # The child has been awaited already, so another process may have its id now.
            return self._child.returncode
        if self._child.poll() is None:
            self.send(first)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(grace_s)
            self.send(signal.SIGKILL)
        return self.wait(grace_s)

    def leave_running(self) -> None:
        """Let the child outlive this interpreter. Afterwards `stop` has no effect."""
        _living.discard(self)

    def log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- end of {self.log}\n" + "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> ManagedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@atexit.register
def end_remaining_processes() -> None:
    for process in list(_living):
        process.send(signal.SIGKILL)
