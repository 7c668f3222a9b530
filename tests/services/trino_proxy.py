"""`seamark trino-proxy` as a separate process."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services.process import ManagedProcess, choose_free_port, is_http_ok, is_port_open


@dataclass
class TrinoProxy:
    """The process of Seamark's proxy for Trino."""

    port: int
    process: ManagedProcess

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count_statements(self, outcome: str) -> int:
        """Return the number of statements with this outcome.

        The outcome is "rewritten", "unchanged", or "original" for a statement that was restarted.
        """
        with urllib.request.urlopen(f"{self.url}/seamark/metrics", timeout=60) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith(f'seamark_trino_statements_total{{outcome="{outcome}"}}'):
                    return int(float(line.split()[-1]))
        return 0


@contextmanager
def run_trino_proxy(folder: Path, *flags: str, seamark: str) -> Iterator[TrinoProxy]:
    """Run a proxy for Trino's catalog named seamark. The header X-Seamark-Plan of its answers has numbers of files.

    Args:
        folder: The folder of the log.
        flags: Further arguments of the command, including the addresses of Trino's coordinators.
        seamark: The URL of the Seamark server.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = choose_free_port()
    argv = [
        str(Path(sys.executable).parent / "seamark"),
        "trino-proxy",
        "--port",
        str(port),
        "--catalog",
        "seamark",
        "--plan-header",
    ]
    process = ManagedProcess([*argv, "--url", seamark, *flags], log=folder / "proxy.log", cwd=folder, forked=True)
    with process:
        tls = "--tls-cert" in flags
        health = f"http://127.0.0.1:{port}/seamark/healthz"
        process.start(lambda: is_port_open(port) if tls else is_http_ok(health), timeout_s=60)
        yield TrinoProxy(port, process)
