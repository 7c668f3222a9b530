"""`seamark serve` as a separate process that tests can kill, drain and restart."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.services.process import ManagedProcess, choose_free_port, is_http_ok

SHARED_KEY = base64.b64encode(b"a key that is known to all tests").decode()


class Seamark:
    """A server over `home`, by default with SQLite and a local warehouse.

    The port stays the same after a restart.

    Args:
        env: `SEAMARK_…` variables.
        flags: Additional arguments of `seamark serve`.
        base_url: The URL at which tests reach the server, if it is not at 127.0.0.1.
        prefix: A command that runs the server, for example in another network namespace.
        program: The `seamark` of another checkout.
    """

    def __init__(
        self,
        home: Path,
        *,
        warehouse: str = "",
        database: str = "",
        env: Mapping[str, str] | None = None,
        flags: tuple[str, ...] = (),
        port: int = 0,
        base_url: str = "",
        prefix: tuple[str, ...] = (),
        program: Path | None = None,
    ) -> None:
        self.home = home
        self.port = port or choose_free_port()
        self.base_url = base_url or f"http://127.0.0.1:{self.port}"
        self.warehouse = warehouse or f"file://{home / 'warehouse'}"
        home.mkdir(parents=True, exist_ok=True)
        argv = [
            str(program or Path(sys.executable).parent / "seamark"),
            "serve",
            "--home",
            str(home),
            "--host",
            "127.0.0.1",
        ]
        argv += ["--port", str(self.port), "--warehouse", self.warehouse]
        argv += ["--database", database] if database else []
        # Replicas of one database need the same key, even with different homes.
        # Table services are off, so that only the test causes the work that it observes.
        # A plan waits for index files and for pruning, so the machine's speed does not determine which files it has.
        settings = {"SEAMARK_ENCRYPTION_KEY": SHARED_KEY, "SEAMARK_SERVICES_WORKERS": "0"}
        settings |= {"SEAMARK_INDEX_WAIT_S": "60", "SEAMARK_PLAN_TIME_BUDGET_S": "60", **(env or {})}
        log = home / "seamark.log"
        self._process = ManagedProcess(
            [*prefix, *argv, *flags], log=log, env=settings, cwd=home, forked=not (prefix or program)
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> Path:
        return self._process.log

    def running(self) -> bool:
        return self._process.running()

    def start(self, timeout_s: float = 90.0) -> Seamark:
        """Start the server, and wait until it answers requests and has logged that it serves."""
        self._process.start(self._is_ready, timeout_s=timeout_s)
        return self

    def _is_ready(self) -> bool:
        """Return True if the server is ready.

        The server writes `server.json` last. /readyz answers before the gateway listens and before the log line.
        """
        with contextlib.suppress(OSError):
            document = json.loads((self.home / "server.json").read_bytes())
            return document["pid"] == self.pid and is_http_ok(f"{self.base_url}/readyz")
        return False

    def kill9(self) -> None:
        """Kill the whole process group at once, as a power failure would."""
        self._process.stop(first=signal.SIGKILL)

    def terminate(self, timeout_s: float = 40.0) -> int:
        """Drain the server, and return its exit code."""
        self._process.send(signal.SIGTERM)
        return self._process.wait(timeout_s)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Return the exit code of a server that ends by itself, for example with an injected fault."""
        return self._process.wait(timeout_s)

    def leave_running(self) -> None:
        """Let the server outlive this interpreter. The caller removes its log and home."""
        self._process.leave_running()

    def restart(self, timeout_s: float = 90.0) -> Seamark:
        """End the running server and start it again on the same port, home and database."""
        self._process.stop()
        return self.start(timeout_s)

    def __enter__(self) -> Seamark:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
