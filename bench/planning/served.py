"""Servers of Seamark over the generated tables, in a separate process or in this process, and requests of planning."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bench.planning.tables import GeneratedTable
from bench.report import OURS
from bench.targets import SERVER_CORE, BenchTarget, pin_to_core
from bench.wire import Request, build_request
from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.api.http.observability.logs import configure_logging
from seamark.metaserver.api.listening import bind_socket
from seamark.metaserver.server import exclude_permanent_objects_from_gc, open_components, serve_requests
from seamark.metaserver.settings.settings import Settings
from tests.services.process import choose_free_port
from tests.services.seamark import Seamark

NAMESPACE = "planned"


def build_name(table: GeneratedTable) -> str:
    return f"files_{table.files}_columns_{table.columns}"


def build_path(table: GeneratedTable) -> str:
    return f"/v1/namespaces/{NAMESPACE}/tables/{build_name(table)}"


def request_plan(table: GeneratedTable, expression: Any) -> Request:
    """Return a plan request for the current snapshot, as engines send it."""
    return build_request("POST", f"{build_path(table)}/plan", {"filter": expression}, label="plan")


def request_task(table: GeneratedTable, plan_task: str, *, gzip: bool = False) -> Request:
    """Return the request that fetches the files of a plan task."""
    headers = {"Accept-Encoding": "gzip"} if gzip else {}
    return build_request("POST", f"{build_path(table)}/tasks", {"plan-task": plan_task}, headers=headers, label="page")


def build_stats_request(table: GeneratedTable, column: str, partition: str, fields: Sequence[str]) -> Request:
    """Return a request for the statistics of a column in the files of a partition, as an Arrow IPC stream."""
    stats_path = f"/api/v1/tables/{NAMESPACE}/{build_name(table)}/stats/{column}"
    query = urlencode({"partition": partition, "fields": ",".join(fields)})
    request = build_request("GET", f"{stats_path}?{query}", label="stats")
    accept = b"Accept: application/vnd.apache.arrow.stream"
    return dataclasses.replace(request, raw=request.raw.replace(b"Accept: application/json", accept))


@contextmanager
def run_seamark(folder: Path, warehouse: Path, *, workers: int = 1) -> Iterator[BenchTarget]:
    """Run `seamark serve`. A single worker runs on the core that all measured servers use, several run on any core."""
    flags = ("--workers", str(workers)) if workers > 1 else ()
    env = {"SEAMARK_LOG_LEVEL": "warning"}
    server = Seamark(folder / f"seamark-{workers}", warehouse=f"file://{warehouse}", env=env, flags=flags)
    try:
        with pin_to_core(SERVER_CORE) if workers == 1 else nullcontext():
            server.start()
        yield BenchTarget(OURS, server.base_url, (server.pid,), warehouse)
    finally:
        server.terminate()


@asynccontextmanager
async def run_seamark_here(folder: Path, warehouse: Path) -> AsyncIterator[BenchTarget]:
    """Run a worker on the event loop of this process, so that the benchmark can measure the loop's pauses."""
    home = folder / "seamark-here"
    settings = Settings(home=home, warehouse=f"file://{warehouse}", port=choose_free_port(), log_level="warning")
    configure_logging(settings)
    sock = bind_socket(settings, shared=False)
    async with open_components(settings, SystemClock(), EXTENSIONS) as components, serve_requests(components, sock):
        exclude_permanent_objects_from_gc()
        yield BenchTarget(OURS, f"http://127.0.0.1:{settings.port}", (), warehouse)


async def register_generated_table(target: BenchTarget, table: GeneratedTable) -> None:
    """Register the table in the server under its name."""
    await target.call(
        build_request(
            "POST", "/v1/namespaces", {"namespace": [NAMESPACE]}, counted_statuses=(200, 409), label="namespace"
        )
    )
    body = {"name": build_name(table), "metadata-location": table.metadata_location}
    await target.call(build_request("POST", f"/v1/namespaces/{NAMESPACE}/register", body, label="register"))
