"""Measure what a fleet of replicas costs and saves.

The benchmark compares reads through a peer with reads of the storage. It also measures planning with a storage that is
sometimes very slow, and the pointer store. The storage is a real S3 server behind a proxy that delays each request as a
store in the cloud does: 15 ms in the median, 200 ms at the 99.9th percentile. The two kinds of reads alternate.

    python -m bench.fleet.run
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from bench.report import OURS, Report, Row
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.store.model import EntryKind, Replica
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import RenewReplica
from tests.peers.fault_proxy import FaultProxy
from tests.peers.fleet import PLAN, Fleet, open_fleet
from tests.peers.rig import Node, open_node
from tests.services.postgres import Postgres, postgres_server
from tests.services.s3 import S3, run_s3

MEDIAN_S, TAIL_S, SIGMA = 0.015, 0.2, 0.84
SIZES = (("16 KiB", 16 << 10), ("256 KiB", 256 << 10), ("4 MiB", 4 << 20))
FILES, APPENDS = 40, 20
STORAGE, STEADY = "storage", "steady storage"


def set_heavy_tailed_delay(proxy: FaultProxy, seed: int) -> None:
    """Delay each request by a log-normal time with the median `MEDIAN_S` and the 99.9th percentile `TAIL_S`."""
    rng = random.Random(seed)
    proxy.delay_s = lambda: min(TAIL_S, MEDIAN_S * rng.lognormvariate(0, SIGMA))


def compute_percentile(values: Sequence[float], part: float) -> float:
    sorted_values = sorted(values)
    return sorted_values[min(len(sorted_values) - 1, int(len(sorted_values) * part))]


async def measure_peer(report: Report, fleet: Fleet, database: str, warehouse: str, folder: Path, rounds: int) -> None:
    """Compare reads of files through the peer that owns them with reads from the storage."""
    settings = {
        "database": database,
        "warehouse": warehouse,
        "s3_endpoint": fleet.storage.url,
        "s3_region": fleet.s3.region,
        "s3_access_key_id": fleet.s3.access_key,
        "s3_secret_access_key": fleet.s3.secret_key,
    }
    rng = random.Random(2)
    async with open_node(folder, "reader", **settings) as node:
        for label, size in SIZES:
            locations = await _create_files_of_other(node, warehouse, size, rng)
            for location in locations:
                await node.read(location)  # The owner reads the storage.
            counts_before = node.peers.read_counts()
            seamark_ms, peer_ms = [], []
            for number in range(rounds):
                location = locations[number % len(locations)]
                pair = [(seamark_ms, node.read), (peer_ms, node.stored_objects.read)]
                for times, read in pair if number % 2 else pair[::-1]:
                    times.append(await _measure_read_s(read, location, size))
            counts_after = node.peers.read_counts()
            for name, aggregate in (("median", statistics.median), ("mean", statistics.fmean)):
                values = {OURS: aggregate(seamark_ms) * 1000, STORAGE: aggregate(peer_ms) * 1000}
                report.rows.append(Row(f"read through the cache of a peer, {label}", name, "ms", values, peer=STORAGE))
            tail = {
                OURS: compute_percentile(seamark_ms, 0.99) * 1000,
                STORAGE: compute_percentile(peer_ms, 0.99) * 1000,
            }
            report.rows.append(Row(f"read through the cache of a peer, {label}", "p99", "ms", tail, peer=STORAGE))
            hedged_count, failed_count = (counts_after[name] - counts_before[name] for name in ("hedged", "failed"))
            report.notes.append(
                f"{label}: of {rounds} reads, {hedged_count} were also sent to the storage because the peer was slow,"
                f" and {failed_count} because the peer failed."
            )


async def _create_files_of_other(node: Node, warehouse: str, size: int, rng: random.Random) -> list[str]:
    """Create files of random bytes that another server of the fleet owns, and return their locations.

    The owner keeps a file in its cache for all servers. To know the owners, the node renews its membership first.
    """
    await node.peers.membership.renew()
    locations: list[str] = []
    while len(locations) < FILES:
        location = f"{warehouse}/bench/{UUID(int=rng.getrandbits(128), version=4)}.avro"
        if not node.owns(location):
            await node.stored_objects.create(location, rng.randbytes(size))
            locations.append(location)
    return locations


async def _measure_read_s(read: Callable[[str], Awaitable[bytes]], location: str, size: int) -> float:
    began_s = time.perf_counter()
    content = await read(location)
    elapsed = time.perf_counter() - began_s
    assert len(content) == size
    return elapsed


def read_event_loop_s(pid: int) -> float:
    """Return the CPU seconds of the first thread of a process.

    Other programs on the machine do not change this number.
    """
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure_planning(report: Report, jittery: Fleet, steady: Fleet, seconds: float) -> None:
    """Compare plans and loads with a heavy-tailed and a steady storage.

    Each plan has a new filter: the view of the table is cached, but no answer is.
    """
    times: dict[str, dict[str, list[float]]] = {}
    load_by_server: dict[str, dict[str, list[float]]] = {}
    connections = {}
    for name, fleet in ((OURS, jittery), (STEADY, steady)):
        fleet.write(APPENDS)
        connections[name] = http.client.HTTPConnection(urlsplit(fleet.replicas[0].base_url).netloc, timeout=60)
        times[name] = {"plan": [], "loadTable": []}
        load_by_server[name] = {"plan": [], "loadTable": []}
    pids = {OURS: jittery.replicas[0].pid, STEADY: steady.replicas[0].pid}
    requests_before = jittery.storage.requests.total()
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        for name, connection in connections.items():
            filter_json = {"type": "not-eq", "term": "id", "value": number + 10}
            plan = json.dumps({"filter": filter_json, "stats-fields": []})
            for operation, method, path, body in (
                ("plan", "POST", PLAN, plan),
                ("loadTable", "GET", PLAN.removesuffix("/plan"), None),
            ):
                busy_before = read_event_loop_s(pids[name])
                began_s = time.perf_counter()
                connection.request(method, path, body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                data = answer.read()
                elapsed = time.perf_counter() - began_s
                busy_s = read_event_loop_s(pids[name]) - busy_before
                assert answer.status == 200, data
                if operation == "plan":
                    assert len(json.loads(data)["file-scan-tasks"]) == APPENDS
                if number > 10:
                    times[name][operation].append(elapsed)
                    load_by_server[name][operation].append(busy_s)
        time.sleep(0.004)
    for operation in ("plan", "loadTable"):
        for measure, part in (("median", 0.5), ("p99", 0.99), ("p99.9", 0.999)):
            values = {name: compute_percentile(time[operation], part) * 1000 for name, time in times.items()}
            report.rows.append(Row(f"{operation}, storage with a heavy tail", measure, "ms", values, peer=STEADY))
        ratios = {
            name: compute_percentile(time[operation], 0.999) / compute_percentile(time[operation], 0.5)
            for name, time in times.items()
        }
        case = f"{operation}, storage with a heavy tail"
        report.rows.append(Row(case, "p99.9 / median", "×", ratios, peer=STEADY, goal=3.0))
        ratios = {
            name: compute_percentile(cpu_times[operation], 0.999) / compute_percentile(cpu_times[operation], 0.5)
            for name, cpu_times in load_by_server.items()
        }
        report.rows.append(Row(case, "p99.9 / median, CPU of the event loop", "×", ratios, peer=STEADY, goal=3.0))
    request_count = jittery.storage.requests.total() - requests_before
    report.bounds["requests to the storage during all plans and loads"] = (
        f"{request_count}; all but the first are checks"
    )
    report.notes.append(
        "CPU of the event loop: waits for the storage, for PostgreSQL or for a core of the machine do not add to it."
        " Where its ratio is small and that of the times is large, the tail is not of the server's code."
    )
    report.notes.append(f"planning: {len(times[OURS]['plan']):,} requests of each kind to each server, in turns.")


async def measure_pointers(report: Report, postgres: Postgres, seconds: float) -> None:
    clock = SystemClock()
    async with open_store(postgres.create_database(), clock=clock) as store:
        count, end = 0, time.monotonic() + seconds

        async def read() -> None:
            nonlocal count
            while time.monotonic() < end:
                await store.load_entry(EntryKind.TABLE, ("db",), "t")
                count += 1

        await asyncio.gather(*(read() for _ in range(20)))
        report.bounds["reads of pointers a second, PostgreSQL and one server on this machine"] = (
            f"{count / seconds:,.0f}"
        )
        replicas = [Replica(f"10.0.0.{number}:8183", 1, "1", 1, 0) for number in range(100)]
        times = []
        for replica in replicas * 3:
            began_s = time.perf_counter()
            await store.transact([RenewReplica(replica, 60_000)])
            times.append(time.perf_counter() - began_s)
        median_ms = statistics.median(times[len(replicas) :]) * 1000
        report.bounds["a renewal that lists 100 replicas, median"] = f"{median_ms:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="make a short run that writes no results")
    quick = parser.parse_args().quick
    rounds, seconds = (20, 8.0) if quick else (300, 60.0)
    report = Report(
        "fleet",
        "What does a fleet of replicas cost and save?",
        peer="the storage, or a server whose storage has no delay",
    )
    with tempfile.TemporaryDirectory() as folder_name, ExitStack() as stack:
        folder = Path(folder_name)
        postgres = stack.enter_context(postgres_server())
        s3 = stack.enter_context(run_s3(folder))
        _measure_fleet(report, folder, postgres, s3, rounds, seconds)
    report.notes.append(
        "`storage` is versitygw behind the delaying proxy. The owner is another process of this machine."
    )
    if not quick:
        report.save()
    print(report.format_markdown())


def _measure_fleet(report: Report, folder: Path, postgres: Postgres, s3: S3, rounds: int, seconds: float) -> None:
    """Measure reads through a peer, plans over a storage with random delays, and writes of table pointers."""
    with open_fleet(folder / "peer", postgres, s3, 1, is_linked=False) as fleet:
        set_heavy_tailed_delay(fleet.storage, seed=1)
        (replica,) = fleet.replicas
        work = measure_peer(report, fleet, fleet.database, replica.warehouse, folder, rounds)
        asyncio.run(work)
    with (
        open_fleet(folder / "jittery", postgres, s3, 1, is_linked=False) as jittery,
        open_fleet(folder / "steady", postgres, s3, 1, is_linked=False) as steady,
    ):
        set_heavy_tailed_delay(jittery.storage, seed=3)  # The storage of `steady` has no delay.
        measure_planning(report, jittery, steady, seconds)
    asyncio.run(measure_pointers(report, postgres, min(seconds, 5.0)))


if __name__ == "__main__":
    main()
