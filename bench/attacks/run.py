"""Measure what attacks cost a good client, and how much memory they cost the server.

Run `python -m bench.attacks.run [--attack NAME …]`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import psutil

from bench.attacks.attackers import ATTACKS
from bench.report import Report, Row
from bench.run import build_parser, choose_benchmarks, run_benches
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import Api, build_property_commit
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.server.rig import RunningServer
from tests.services.seamark import Seamark

TIMES_SLOWER_MAX = 10.0
BUDGETS = (
    "metadata_cache_bytes",
    "plan_memory_bytes",
    "plan_answers_bytes",
    "plan_table_memory_bytes",
    "join_memory_bytes",
    "index_memory_bytes",
    "commit_memory_bytes",
    "bodies_memory_bytes",
)
MEMORY_MAX_BYTES = int(1.5 * sum(getattr(Settings(), name) for name in BUDGETS))
_PAUSE_S = 0.02
_PATIENCE_S = 30.0


@dataclass
class AttackMeasurements:
    """The measurements of the good client during one attack, or without an attack."""

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    lost_requests: list[str] = field(default_factory=list)
    """Requests without a response: the path and the error."""
    memory_bytes: int = 0

    @property
    def p99_ms(self) -> float:
        sorted_latencies_ms = sorted(self.latencies_ms)
        return sorted_latencies_ms[min(len(sorted_latencies_ms) - 1, int(0.99 * len(sorted_latencies_ms)))]

    @property
    def failed(self) -> int:
        return len(self.lost_requests) + sum(count for status, count in self.statuses.items() if status >= 500)


@dataclass
class AttackedServer:
    """A server with a table of 1,000 files, a good client that can write, and the token of a malicious reader."""

    server: Seamark
    good_session: aiohttp.ClientSession
    hostile_token: str

    async def measure(self, seconds: float) -> AttackMeasurements:
        """Measure the good client's plans, loads and commits for `seconds`."""
        measurements, process = AttackMeasurements(), psutil.Process(self.server.pid)
        table, until = "/v1/namespaces/db/tables/t", time.monotonic() + seconds
        number = 0
        while time.monotonic() < until:
            number += 1
            equal = {"filter": {"type": "eq", "term": "id", "value": number % 10_000}}
            for method, path, body in (
                ("POST", f"{table}/plan", equal),
                ("GET", table, None),
                ("POST", "/v1/namespaces/db/tables/mine", build_property_commit(n=str(number))),
            ):
                began_s = time.perf_counter()
                try:
                    async with self.good_session.request(method, self.server.base_url + path, json=body) as answer:
                        await answer.read()
                        measurements.statuses[answer.status] += 1
                except (aiohttp.ClientError, TimeoutError) as error:
                    measurements.lost_requests.append(f"{path}: {error!r}")
                measurements.latencies_ms.append((time.perf_counter() - began_s) * 1000)
            family = [process, *process.children(recursive=True)]
            measurements.memory_bytes = max(measurements.memory_bytes, sum(item.memory_info().rss for item in family))
            await asyncio.sleep(_PAUSE_S)
        return measurements

    async def measure_attack(self, attack: str, seconds: float) -> AttackMeasurements:
        """Measure the good client while `attack` runs.

        Raises:
            RuntimeError: The process of the attack failed, so there was no attack.
        """
        argv = (self.server.base_url, self.hostile_token, attack, str(seconds + 1))
        hostile_process = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.attacks.attackers", *argv)
        try:
            await asyncio.sleep(1)
            measurements = await self.measure(seconds)
            if hostile_process.returncode:
                raise RuntimeError(f"the attack {attack} failed with exit code {hostile_process.returncode}")
            return measurements
        finally:
            if hostile_process.returncode is None:
                hostile_process.kill()
            await hostile_process.wait()


@asynccontextmanager
async def run_attacked_server(home: Path) -> AsyncIterator[AttackedServer]:
    """Run a server with the default settings, except that clients have to log in."""
    home.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    async with open_store(f"sqlite:///{home}/seamark.db", clock=clock, queue_limit=10) as store:
        good_token = await create_token(store, clock, "good", None, [Grant("good", "admin")])
        hostile_token = await create_token(store, clock, "hostile", None, [Grant("hostile", "reader", ("db",))])
    with Seamark(home, flags=("--auth", "token")) as server:
        timeout = aiohttp.ClientTimeout(_PATIENCE_S)
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {good_token}"}, timeout=timeout) as http:
            api = Api(cast(RunningServer, SimpleNamespace(url=server.base_url, http=http)))
            await api("POST", "/v1/namespaces", {"namespace": ["db"]})
            for name in ("t", "mine"):
                await api.create_table(name)
            await append_files(api, "t", build_ten_id_files(1000), snapshot_id=1, manifests=10)
            yield AttackedServer(server, http, hostile_token)


async def run(
    folder: Path, *, quick: bool = False, attacks: Iterable[str] = ATTACKS, seconds: float | None = None
) -> Report:
    if seconds is None:
        seconds = 3.0 if quick else 60.0
    report = Report("attacks", "What does an attack on resources cost a good client?")
    report.peer = "itself without an attack"
    async with run_attacked_server(folder / "home") as attacked_server:
        await attacked_server.measure(2)
        unattacked = await attacked_server.measure(seconds)
        report.bounds = {
            "p99 of the good client without an attack": f"{unattacked.p99_ms:.1f} ms",
            "memory allowed: 1.5 times the sum of the budgets": f"{MEMORY_MAX_BYTES / 2**20:,.0f} MiB",
        }
        for attack in attacks:
            measurements = await attacked_server.measure_attack(attack, seconds)
            rows: list[tuple[str, str, float, float]] = [
                (
                    "p99 divided by the p99 without an attack",
                    "times",
                    measurements.p99_ms / unattacked.p99_ms,
                    TIMES_SLOWER_MAX,
                ),
                ("memory", "MiB", measurements.memory_bytes / 2**20, MEMORY_MAX_BYTES / 2**20),
                ("failed requests", "", float(measurements.failed), 0.0),
            ]
            for measure, unit, value, goal in rows:
                report.rows.append(Row(attack, measure, unit, {"seamark": value}, goal=goal))
            if measurements.failed:
                report.notes.append(f"{attack}: {dict(measurements.statuses)}, {measurements.lost_requests[:2]}")
    return report


def main() -> None:
    benches: dict[str, Callable[..., Any]] = {"attacks": run}
    parser: argparse.ArgumentParser = build_parser("bench.attacks.run", __doc__, benches)
    parser.add_argument("--attack", action="append", choices=ATTACKS, help="run only this attack; can be repeated")
    parser.add_argument("--seconds", type=float, help="seconds of each attack (default: 60, or 3 with --quick)")
    arguments = parser.parse_args()
    options = {"attacks": arguments.attack or ATTACKS, "seconds": arguments.seconds}
    run_benches(
        benches, choose_benchmarks(parser, arguments, benches), quick=arguments.quick, options=lambda _: options
    )


if __name__ == "__main__":
    main()
