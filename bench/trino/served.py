"""Trino over a Seamark server, with and without the Trino proxy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.report import OURS
from bench.targets import BenchTarget
from tests.services.seamark import Seamark
from tests.services.trino import trino_server
from tests.services.trino_proxy import run_trino_proxy

TRINO = "trino"
_QUEUE = {"query.max-concurrent-queries": "16", "query.max-queued-queries": "5000"}
"""The limits of concurrent and queued queries. With few cores, Trino fails some of a thousand concurrent statements."""


@contextmanager
def run_proxy(folder: Path, target: BenchTarget, seamark: str, *flags: str) -> Iterator[BenchTarget]:
    """Run `seamark trino-proxy` in front of `target`, with its default log file."""
    with run_trino_proxy(
        folder / f"proxy-of-{target.name}", "--trino", target.base_url, *flags, seamark=seamark
    ) as proxy:
        yield BenchTarget(OURS, proxy.url, (proxy.process.pid,), folder)


@contextmanager
def run_both_targets(folder: Path, server: Seamark) -> Iterator[tuple[BenchTarget, BenchTarget]]:
    """Run Trino and the Trino proxy, and yield two targets: Trino alone, and Trino through the proxy."""
    with trino_server(folder / "trino", uri=server.base_url, jvm=(), properties=_QUEUE) as trino:
        direct_target = BenchTarget(TRINO, trino.base_url, (trino.process.pid,), folder)
        with run_proxy(folder, direct_target, server.base_url) as proxied_target:
            yield direct_target, proxied_target
