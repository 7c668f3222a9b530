"""AWS Glue, as moto emulates it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import requests
from moto.server import ThreadedMotoServer


@contextmanager
def run_glue() -> Iterator[str]:
    """Run Moto, an emulator of AWS Glue, in a thread and without tables. Yield its URL."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # All emulators of a process share their state.
        requests.post(f"{url}/moto-api/reset", timeout=60).raise_for_status()
        yield url
    finally:
        server.stop()
