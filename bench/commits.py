"""How many commits per second can a server make, on one table and on 100 tables, with one client and with
eight?

A property commit has no requirements. An append adds a snapshot and moves `main`, with the requirements that engines
send. A client that gets a conflict (409) loads the current snapshot and tries again; only successful commits count. A
change (Seamark's own route) adds a file. Each table has one client for changes, because the server writes the manifest
and the manifest list. Each round uses new tables, so the history of an earlier round costs nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from bench import bodies, bounds
from bench.measure import Sample, Slice, Worker, drive_workers, run_alternately, warm_up
from bench.report import Report
from bench.targets import BenchTarget, start_targets
from bench.wire import build_request

SERVERS = ("seamark", "seamark-pg", "fixture", "fixture-file")
OUR_STORES = ("seamark", "seamark-pg")
CHANGED_TABLES = (1, 4, 16)
PARALLEL_TABLES = (4, 16)
"""The number of tables that receive commits at the same time, each from its own client."""
CLIENTS = 8
TABLES = 100
NAMESPACE = "commits"
_snapshot_ids: Iterator[int] = itertools.count(4_000_000_000_000_000_001)


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("commits", "How many commits a second, on one table and on a hundred, by one client and by eight?")
    rounds, seconds = (1, 0.5) if quick else (4, 3.0)
    numbers = itertools.count()
    with start_targets(SERVERS, folder) as targets:
        for target in targets:
            await target.call(bodies.create_namespace((NAMESPACE,)))

        async def drive_commits(target: BenchTarget, tables: int, clients: int, kind: str) -> Sample:
            names = [f"t{next(numbers)}" for _ in range(tables)]
            for name in names:
                await target.call(bodies.create_table(NAMESPACE, name))
            make_worker = {"append": append_each, "change": change_each}.get(kind, set_property_of_each)
            workers = [make_worker(names[n::clients] if tables > 1 else names) for n in range(clients)]
            return await drive_workers(target, workers, seconds=seconds)

        common_slices: dict[str, Slice] = {
            f"{kind}, {_format_count(tables, 'table')}, {_format_count(clients, 'client')}": partial(
                drive_commits, tables=tables, clients=clients, kind=kind
            )
            for tables, clients in ((1, 1), (1, CLIENTS), (TABLES, CLIENTS))
            for kind in ("property", "append")
        }
        parallel_slices: dict[str, Slice] = {
            f"{kind}, {tables} tables, a client each": partial(drive_commits, tables=tables, clients=tables, kind=kind)
            for kind in ("property", "append")
            for tables in PARALLEL_TABLES
        }
        seamark_targets = [target for target in targets if target.name in OUR_STORES]
        changes: dict[str, Slice] = {
            f"change, {_format_count(tables, 'table')}, a client each": partial(
                drive_commits, tables=tables, clients=tables, kind="change"
            )
            for tables in CHANGED_TABLES
        }
        await warm_up(targets, common_slices.values(), 1)
        await warm_up(seamark_targets, [*parallel_slices.values(), *changes.values()], 1)
        for case, slice_ in (*common_slices.items(), *parallel_slices.items(), *changes.items()):
            samples = await run_alternately(targets if case in common_slices else seamark_targets, rounds, slice_)
            report.add(case, "commits", "/s", samples, lambda s: s.rate, lower_is_better=False)
            report.add(case, "p99", "ms", samples, lambda s: s.compute_quantile(0.99))
            report.add_failures(case, samples)
            report.note_generator_limit(case, samples)
            if case not in common_slices:
                report.add(case, "server CPU for a commit", "ms", samples, lambda s: s.server_cpu_us / 1000)
                report.add(case, "server's core in use", "%", samples, lambda s: 100 * s.server_cpu_s / s.elapsed_s)
        report.bounds = {
            "one fdatasync of a grown file": f"{bounds.measure_sync_ms(folder):.2f} ms",
            "a new durable file (write, fsync, fsync of the folder)": f"{bounds.measure_new_file_ms(folder):.2f} ms",
        }
    report.notes += [
        "seamark and seamark-pg are durable when they answer: a metadata file and a transaction, both synced.",
        "fixture keeps its SQLite in memory and syncs nothing; fixture-file syncs SQLite, not the metadata files.",
        "The ratio compares durable Seamark with the fixture in memory.",
        "A server has one core. Where all of it is in use, more tables cannot add commits: the bound is 1,000 ms "
        "divided by the server's CPU time for a commit.",
    ]
    return report


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number > 1 else "")


def set_property_of_each(names: list[str]) -> Worker:
    """Return a worker that sets a property of each table in turn."""
    for number, name in enumerate(itertools.cycle(names)):
        yield bodies.set_property(NAMESPACE, name, "bench.touched", str(number))


def change_each(names: list[str]) -> Worker:
    """Return a worker that adds a file to each table in turn, through Seamark's own route. Nothing reads the file."""
    locations: dict[str, str] = {}
    for number, name in enumerate(itertools.cycle(names)):
        if name not in locations:
            lookup = build_request(
                "GET",
                f"{bodies.build_table_path(NAMESPACE, name)}?snapshots=refs",
                counted_statuses=(),
                tolerated_statuses=(200,),
            )
            locations[name] = (yield lookup).json()["metadata"]["location"]
        file = {
            "content": "data",
            "file-path": f"{locations[name]}/data/{number}.parquet",
            "file-format": "parquet",
            "spec-id": 0,
            "partition": [],
            "record-count": 1,
            "file-size-in-bytes": 100,
        }
        yield build_request("POST", f"/api/v1/tables/{NAMESPACE}/{name}/commit", {"add": [file]}, label="change")


def append_each(names: list[str]) -> Worker:
    """Return a worker that appends to each table in turn.

    Each append starts from the last snapshot that the worker knows.
    """
    heads: dict[str, tuple[str, str, int | None, int, int]] = {}
    for name in itertools.cycle(names):
        if name not in heads:
            lookup = build_request(
                "GET",
                f"{bodies.build_table_path(NAMESPACE, name)}?snapshots=refs",
                counted_statuses=(),
                tolerated_statuses=(200,),
            )
            metadata = (yield lookup).json()["metadata"]
            parent = metadata.get("current-snapshot-id")
            heads[name] = (
                metadata["table-uuid"],
                metadata["location"],
                None if parent in (None, -1) else parent,
                metadata["last-sequence-number"],
                metadata["last-updated-ms"],
            )
        uuid, location, parent, sequence, at_ms = heads[name]
        snapshot_id = next(_snapshot_ids)
        answer = yield bodies.build_append(
            NAMESPACE, name, uuid, location, parent, snapshot_id, sequence + 1, at_ms + 1
        )
        if answer.status == 200:
            heads[name] = (uuid, location, snapshot_id, sequence + 1, at_ms + 1)
        else:
            del heads[name]
