"""Control of a `dying_server` for tests: start it, choose the step at which it dies, and restart it afterwards."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.rigs.dying_server import KILL_FILE
from tests.faults.rigs.http import HttpClient, OutcomeUnknown
from tests.services.process import ManagedProcess, choose_free_port, is_http_ok

_REPO = Path(__file__).parents[3]


class KillableServer:
    """A server over `home` that a test can kill at a step.

    `env` has `SEAMARK_…` variables. By default the server uses SQLite and a local warehouse.
    """

    def __init__(self, home: Path, env: Mapping[str, str] | None = None) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        port = choose_free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        settings = {"SEAMARK_HOME": str(home), "SEAMARK_PORT": str(port), "PYTHONPATH": str(_REPO), **(env or {})}
        argv = [sys.executable, "-m", "tests.faults.rigs.dying_server"]
        self._process = ManagedProcess(argv, log=home / "dying.log", env=settings, cwd=home, forked=True)

    def start(self) -> HttpClient:
        """Start or restart the server, without a step at which it dies."""
        self._process.stop()
        (self.home / KILL_FILE).unlink(missing_ok=True)
        self._process.start(lambda: is_http_ok(f"{self.base_url}/readyz"), timeout_s=60)
        return HttpClient(self.base_url)

    def run_until_death(self, step: str, nth: int, send_request: Any) -> None:
        """Send a request, during which the server must die when it reaches `step` for the `nth` time."""
        (self.home / KILL_FILE).write_text(f"{step} {nth}")
        try:
            answer = send_request()
        except OutcomeUnknown:
            assert self._process.wait(60) == -signal.SIGKILL
            return
        raise AssertionError(f"the server did not die at time {nth} of {step}, but answered {answer}")

    def __enter__(self) -> KillableServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
