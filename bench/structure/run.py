"""`python -m bench.structure.run` counts the files and functions of Seamark that a warm request runs through.

A server and a Trino proxy run in this process over SQLite and local files; Trino is replaced by a program that only
answers. `sys.setprofile` records each function of Seamark that is entered between a request and its answer, in the
event loop and in its threads. The benchmark counts the functions that run in each of several equal requests with pauses
between them, so background work does not count. Comprehensions and generator expressions are functions in Python 3.11
and are counted; a separate row has their number. Compiled kernels are not counted. `--list` prints the functions in the
order of their first call.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pyarrow as pa
import structlog

from bench.report import Report, Row
from bench.run import Bench, build_parser, choose_benchmarks, run_benches
from bench.trino.upstream import run_upstream
from seamark.connector.client.client import SeamarkClient
from seamark.connector.write.appends import append
from tests.connector.trino.rig import CATALOG, ProxyRig, run_proxy
from tests.server.rig import RunningServer, run_server

REPO = str(Path(__file__).resolve().parents[2])
PACKAGES = tuple(f"{REPO}/{name}/" for name in ("commands", "metaserver", "formats", "connector", "cache"))
PLAN, COMMIT, STATEMENT = "plan of a new filter", "commit of a property", "Trino statement through the proxy"
EXISTS = "a table exists"
GOALS: dict[str, tuple[int, int] | tuple[None, None]] = {
    PLAN: (45, 200),
    COMMIT: (35, 160),
    STATEMENT: (None, None),
    EXISTS: (None, None),
}
"""The goals: files and functions of each flow, from the issue on the project's structure.

The last flow does no work. It shows the share of the HTTP server, of the checks of the caller and of one database read.
"""
ROUNDS = 5
PAUSE_S = 0.3
"""The time in seconds before a measured request, in which the work of earlier requests ends."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
LAYERS = {
    "HTTP, identity and rights": (
        "metaserver/api/http/",
        "metaserver/api/formats/",
        "metaserver/access/",
        "formats/runtime/connections.py",
        "formats/protocol/",
    ),
    "database": ("metaserver/store/",),
    "storage": ("metaserver/objects/", "formats/storage/", "formats/runtime/root_folder.py"),
    "Iceberg's formats": ("formats/iceberg/",),
    "caches, clock, decoding": ("cache/", "formats/"),
    "the flow itself": ("",),
}
"""The path prefixes of each layer; a file belongs to the first layer with a matching prefix."""
SCHEMA = pa.schema([("id", pa.int64()), ("city", pa.string())])


class Function(NamedTuple):
    path: str
    """The path from the root of the checkout."""
    line: int
    name: str

    @property
    def layer(self) -> str:
        return next(layer for layer, beginnings in LAYERS.items() if self.path.startswith(beginnings))


class CallRecorder:
    """Records the functions of Seamark that any thread enters while the recorder is active."""

    def __init__(self) -> None:
        self.active = False
        self.functions: dict[Function, None] = {}
        self._paths: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.active and event == "call":
            code = frame.f_code
            path = self._paths.get(code.co_filename)
            if path is None:
                path = self._paths[code.co_filename] = str(Path(code.co_filename).resolve())
            if path.startswith(PACKAGES):
                self.functions[Function(path.removeprefix(f"{REPO}/"), code.co_firstlineno, code.co_qualname)] = None

    async def record(self, work: Callable[[], Awaitable[None]]) -> list[Function]:
        """Return the functions that run during `work`, in the order of their first call."""
        self.functions = {}
        self.active = True
        try:
            await work()
        finally:
            self.active = False
        return list(self.functions)


async def _post(server: RunningServer, path: str, body: object) -> None:
    async with server.http.post(server.url + path, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{path} was answered by {answer.status}: {await answer.text()}")
        await answer.read()


async def _request_plan(server: RunningServer, number: int) -> None:
    body = {"filter": {"type": "lt", "term": "id", "value": 100 + number}}
    await _post(server, "/v1/namespaces/db/tables/t/plan", body)


async def _commit_property(server: RunningServer, number: int) -> None:
    updates = [{"action": "set-properties", "updates": {"number": str(number)}}]
    await _post(server, "/v1/namespaces/db/tables/t", {"requirements": [], "updates": updates})


async def _check_table_exists(server: RunningServer, number: int) -> None:
    async with server.http.head(f"{server.url}/v1/namespaces/db/tables/t") as answer:
        if answer.status != 204:
            raise RuntimeError(f"the table was answered by {answer.status}")


async def send_statement(proxy: ProxyRig, number: int) -> None:
    """Send a statement with a new condition, which the proxy rewrites."""
    text = f"SELECT city FROM t WHERE id = {number % 4} AND city <> 'none {number}'"
    headers = {"X-Trino-User": "bench", "X-Trino-Catalog": CATALOG, "X-Trino-Schema": "db"}
    status, response_headers, _ = await proxy.ask("POST", "/v1/statement", data=text.encode(), headers=headers)
    if status != 200 or response_headers["X-Seamark-Plan"] != "rewritten":
        raise RuntimeError(f"The proxy answered {status}, {response_headers.get('X-Seamark-Plan')}")


async def count_functions(server: RunningServer, proxy: ProxyRig, recorder: CallRecorder) -> dict[str, list[Function]]:
    """Return the functions that each request of a flow runs, after requests that warm the caches."""
    flows: dict[str, Callable[[int], Awaitable[None]]] = {
        PLAN: partial(_request_plan, server),
        COMMIT: partial(_commit_property, server),
        STATEMENT: partial(send_statement, proxy),
        EXISTS: partial(_check_table_exists, server),
    }
    functions_by_name: dict[str, list[Function]] = {}
    for title, send in flows.items():
        for number in range(ROUNDS):
            await send(number)
        rounds: list[list[Function]] = []
        for number in range(ROUNDS, 2 * ROUNDS):
            await asyncio.sleep(PAUSE_S)
            rounds.append(await recorder.record(partial(send, number)))
        common_functions = set.intersection(*map(set, rounds))
        functions_by_name[title] = [function for function in rounds[-1] if function in common_functions]
    # The server answers the proxy's requests in this process as well.
    functions_by_name[STATEMENT] = [
        function for function in functions_by_name[STATEMENT] if function.path.startswith("connector/")
    ]
    return functions_by_name


def _describe_layers(functions: Sequence[Function]) -> str:
    """Return a text with the number of files and functions of each layer."""
    layers = [(layer, [function for function in functions if function.layer == layer]) for layer in LAYERS]
    return "; ".join(
        f"{layer}: {len({item.path for item in layer_functions})} files, {len(layer_functions)} functions"
        for layer, layer_functions in layers
    )


async def run(folder: Path, *, quick: bool = False, lists: bool = False) -> Report:
    report = Report("structure_flows", "How many files and functions does a warm request run through?", peer="none")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    recorder = CallRecorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(run_server(folder / "home"))
            trino = stack.enter_context(run_upstream(folder))
            proxy = await stack.enter_async_context(run_proxy(trino.base_url, seamark=server.url, rules=False))
            fields = [{"id": 1, "name": "id", "type": "long", "required": False}]
            fields.append({"id": 2, "name": "city", "type": "string", "required": False})
            schema = {"type": "struct", "fields": fields}
            await _post(server, "/v1/namespaces/db/tables", {"name": "t", "schema": schema})
            client = SeamarkClient(server.url)
            for number in range(4):
                rows = pa.table({"id": [number], "city": [f"city {number}"]}, SCHEMA)
                await asyncio.to_thread(append, client, "db.t", rows)
            functions_by_title = await count_functions(server, proxy, recorder)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type] # the documentation allows it
    for title, functions in functions_by_title.items():
        files_goal, functions_goal = GOALS[title]
        files = len({function.path for function in functions})
        inner = sum(function.name.endswith(COMPREHENSIONS) for function in functions)
        report.rows.append(Row(title, "files", "", {"seamark": files}, goal=files_goal))
        report.rows.append(Row(title, "functions", "", {"seamark": len(functions)}, goal=functions_goal))
        report.rows.append(Row(title, "of which comprehensions", "", {"seamark": inner}))
        if title in (PLAN, COMMIT):
            report.notes.append(f"{title}, by layer: {_describe_layers(functions)}.")
        if lists:
            print(
                f"\n{title}",
                *(f"  {function.path}:{function.line} {function.name}" for function in functions),
                sep="\n",
            )
    return report


BENCHES: dict[str, Bench] = {"flows": run}


def main() -> None:
    parser = build_parser("bench.structure.run", __doc__, BENCHES)
    parser.add_argument("--list", action="store_true", help="print the functions in the order of their first call")
    arguments = parser.parse_args()
    names = choose_benchmarks(parser, arguments, BENCHES)
    run_benches(BENCHES, names, quick=arguments.quick, options=lambda _: {"lists": arguments.list})


if __name__ == "__main__":
    main()
