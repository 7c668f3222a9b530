"""A minimal aiohttp server on uvloop: it reads the body of a request and sends prepared bytes, as a lower bound.

`python -m bench.planning.bare PORT BODY [--workers N]` serves the content of the file BODY on every path.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import uvloop
from aiohttp import web

from bench.targets import SERVER_CORE, BenchTarget, pin_to_core
from tests.services.process import ManagedProcess, choose_free_port, is_http_ok

BARE = "bare-aiohttp"


def build_application(body: bytes) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    return app


def serve_bytes(port: int, body: bytes) -> None:
    """Serve until the process is ended."""
    app = build_application(body)
    loop = uvloop.new_event_loop()
    web.run_app(
        app,
        host="127.0.0.1",
        port=port,
        reuse_port=True,
        print=None,
        access_log=None,
        loop=loop,
        shutdown_timeout=0.1,
    )


@contextmanager
def run_bare_server(folder: Path, body: bytes, *, workers: int = 1) -> Iterator[BenchTarget]:
    """Run a minimal HTTP server, which answers every request with `body`, in `workers` separate processes.

    A single worker runs on the core that all measured servers use.
    """
    (folder / "bare-body").write_bytes(body)
    port = choose_free_port()
    argv = [
        sys.executable,
        "-m",
        "bench.planning.bare",
        str(port),
        str(folder / "bare-body"),
        "--workers",
        str(workers),
    ]
    process = ManagedProcess(argv, log=folder / "bare.log")
    with process:
        with pin_to_core(SERVER_CORE) if workers == 1 else nullcontext():
            process.start(lambda: is_http_ok(f"http://127.0.0.1:{port}/"), timeout_s=30)
        yield BenchTarget(BARE, f"http://127.0.0.1:{port}", (process.pid,), folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.planning.bare", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("body", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    body = arguments.body.read_bytes()
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=serve_bytes, args=(arguments.port, body), daemon=True)
        for _ in range(arguments.workers - 1)
    ]
    for child in processes:
        child.start()
    serve_bytes(arguments.port, body)


if __name__ == "__main__":
    main()
