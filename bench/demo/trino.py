"""The same queries in Trino, alone and through `seamark trino-proxy`, where this machine has a JDK 25 and Trino's jars.

Trino opens a file for each split that it reads, because the demo's files are smaller than a split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.demo import lake
from bench.demo.queries import CLUSTERED, CUBED, ICEBERG, UNTOUCHED, DemoMeasurement, RunQuery, replace_facts
from bench.trino.asking import TrinoConnection
from seamark.commands.installation.java import find_java_25_home
from seamark.connector.cubes.summaries import ON
from tests.services.trino import JARS, trino_server
from tests.services.trino_proxy import run_trino_proxy

UNVERIFIED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
"""Options that shorten the start: classes of released jars need no verification."""
BUDGET_MS = "2000"
"""The time limit for the plans of a statement. It is long, because each join runs for the first time."""


def is_installed() -> bool:
    return find_java_25_home() is not None and any(JARS.glob("lib/trino-main-*.jar"))


@contextlib.contextmanager
def open_query_runners(folder: Path, uri: str) -> Iterator[Mapping[str, RunQuery]]:
    """Start Trino and the proxy, and provide a function for each configuration of the demo that runs a query in Trino.

    Trino and the proxy end with the block.
    """
    with contextlib.ExitStack() as stack:
        trino = stack.enter_context(trino_server(folder / "trino", uri=uri, jvm=UNVERIFIED))
        flags = ("--trino", trino.base_url, "--budget-ms", BUDGET_MS, "--cubes", ON)
        proxy = stack.enter_context(run_trino_proxy(folder / "proxy", *flags, seamark=uri))
        direct_connection, proxy_connection = (
            stack.enter_context(contextlib.closing(TrinoConnection(url, trino.base_url)))
            for url in (trino.base_url, proxy.url)
        )
        yield {
            ICEBERG: _build_query_runner(direct_connection),
            UNTOUCHED: _build_query_runner(proxy_connection),
            CLUSTERED: lambda text: _build_query_runner(proxy_connection)(replace_facts(lake.CLUSTERED, text)),
            CUBED: lambda text: _build_query_runner(proxy_connection)(replace_facts(lake.CUBED, text)),
        }


def _build_query_runner(client: TrinoConnection) -> RunQuery:
    def ask(text: str) -> tuple[list[tuple[object, ...]], DemoMeasurement]:
        answer = client.ask(text, lake.NAMESPACE)
        return answer.rows, DemoMeasurement(answer.splits, round(answer.kilobytes * 1000), answer.wall_ms / 1000)

    return ask
