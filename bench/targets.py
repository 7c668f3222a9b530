"""The measured servers, each a process on one core; the load generator runs on another core.

- `seamark`: `seamark serve` with its default settings (SQLite in WAL mode; every commit and metadata file is synced).
- `seamark-pg`: Seamark with a PostgreSQL server, which shares the core and syncs as well.
- `fixture`: Iceberg's own Java REST server as the test kit starts it: JdbcCatalog over SQLite **in memory**. Commits
  that it acknowledges are lost when it ends, and it never syncs a metadata file.
- `fixture-file`: the same server with SQLite in a file, which is its most durable form.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil

from bench.wire import Connection, LoadError, Request, Response
from tests.services.java import run_java_fixture
from tests.services.postgres import postgres_server
from tests.services.seamark import Seamark

SERVER_CORE, LOAD_CORE = 0, (os.cpu_count() or 1) - 1


@dataclass(frozen=True)
class BenchTarget:
    """A running server.

    Attributes:
        pids: The process ids of the server.
        warehouse: A folder from which the server may read tables.
        separator: The text between the levels of a namespace in URLs. The standard's separator is %1F; the fixture's
            HTTP server refuses it, and its configuration names another separator.
    """

    name: str
    base_url: str
    pids: tuple[int, ...]
    warehouse: Path
    separator: str = "%1F"

    def make_namespace_path(self, namespace: tuple[str, ...]) -> str:
        """Return the namespace as it appears in this server's URLs."""
        return self.separator.join(quote(level, safe="") for level in namespace)

    @property
    def port(self) -> int:
        port = urlsplit(self.base_url).port
        assert port is not None
        return port

    def list_processes(self) -> list[psutil.Process]:
        """Return the server's processes and their children."""
        results = []
        for pid in self.pids:
            parent = psutil.Process(pid)
            results += [parent, *parent.children(recursive=True)]
        return results

    def read_cpu_s(self) -> float:
        """Return the CPU seconds that the running threads of the server have used, by the scheduler's counters."""
        cpu_ns = 0
        for process in self.list_processes():
            for account in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # The thread has just ended.
                    cpu_ns += int(account.read_text().split()[0])
        return cpu_ns / 1e9

    def read_rss_mb(self) -> float:
        return sum(process.memory_info().rss for process in self.list_processes()) / 2**20

    async def connect(self, count: int = 1) -> list[Connection]:
        return [await Connection.open(self.port) for _ in range(count)]

    async def call(self, request: Request) -> Response:
        """Send one request on its own connection, and return the answer.

        Raises:
            LoadError: The status is not one that `request` counts. The message contains the body of the answer.
        """
        connection = await Connection.open(self.port)
        try:
            answer = await connection.ask(request)
        finally:
            connection.close()
        if answer.status not in request.counted_statuses:
            line = request.raw.split(b"\r\n", 1)[0].decode()
            raise LoadError(
                f"{self.name}: {line} answered {answer.status}: {answer.body[:500].decode(errors='replace')}"
            )
        return answer


@contextlib.contextmanager
def pin_to_core(core: int) -> Iterator[None]:
    """Pin processes that start inside the block to `core`."""
    old_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, old_cores)


@contextlib.contextmanager
def _change_environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block."""
    old_values = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in old_values.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextlib.contextmanager
def run_seamark(folder: Path, env: dict[str, str] | None = None) -> Iterator[BenchTarget]:
    home = folder / "seamark"
    with contextlib.ExitStack() as stack:
        with pin_to_core(SERVER_CORE):
            server = stack.enter_context(Seamark(home, env={"SEAMARK_LOG_LEVEL": "warning", **(env or {})}))
        yield BenchTarget("seamark", server.base_url, (server.pid,), home / "warehouse")


@contextlib.contextmanager
def run_seamark_pg(folder: Path) -> Iterator[BenchTarget]:
    home = folder / "seamark-pg"
    with contextlib.ExitStack() as stack:
        with pin_to_core(SERVER_CORE):
            postgres = stack.enter_context(postgres_server())
            url = postgres.create_database()
            env = {"SEAMARK_LOG_LEVEL": "warning"}
            server = stack.enter_context(Seamark(home, database=url, env=env))
        yield BenchTarget("seamark-pg", server.base_url, (server.pid, postgres.process.pid), home / "warehouse")


@contextlib.contextmanager
def _run_fixture(name: str, folder: Path, jdbc: str) -> Iterator[BenchTarget]:
    """Run Iceberg's Java REST catalog server over the JDBC database `jdbc`, and yield it as a target.

    This server separates the levels of a namespace in URLs by a period (`%2E`).
    """
    warehouse = folder / name
    warehouse.mkdir(parents=True)
    # There is one JDBC client: a second client would open another database in memory, or find the file locked.
    with contextlib.ExitStack() as stack:
        old_pids = {child.pid for child in psutil.Process().children()}
        with pin_to_core(SERVER_CORE), _change_environment({"CATALOG_URI": jdbc, "CATALOG_CLIENTS": "1"}):
            base_url = stack.enter_context(run_java_fixture(warehouse, log=folder / f"{name}.log"))
        # `run_java_fixture` yields only the URL. The process id of the server is that of the new child process.
        (pid,) = {child.pid for child in psutil.Process().children()} - old_pids
        yield BenchTarget(name, base_url, (pid,), warehouse, separator="%2E")


def run_fixture(folder: Path) -> contextlib.AbstractContextManager[BenchTarget]:
    return _run_fixture("fixture", folder, "jdbc:sqlite::memory:")


def run_fixture_file(folder: Path) -> contextlib.AbstractContextManager[BenchTarget]:
    return _run_fixture("fixture-file", folder, f"jdbc:sqlite:{folder / 'fixture.db'}")


STARTERS = {
    "seamark": run_seamark,
    "seamark-pg": run_seamark_pg,
    "fixture": run_fixture,
    "fixture-file": run_fixture_file,
}


@contextlib.contextmanager
def start_targets(names: Sequence[str], folder: Path) -> Iterator[list[BenchTarget]]:
    """Start the named servers side by side, with this process on another core."""
    with contextlib.ExitStack() as stack:
        targets = [stack.enter_context(STARTERS[name](folder)) for name in names]
        stack.enter_context(pin_to_core(LOAD_CORE))
        yield targets


@contextlib.asynccontextmanager
async def open_connections(target: BenchTarget, count: int) -> AsyncIterator[list[Connection]]:
    connections = await target.connect(count)
    try:
        yield connections
    finally:
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)  # In the next step of the loop, the transports close their sockets.
