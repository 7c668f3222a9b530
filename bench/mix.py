"""How many requests per second can a server answer with the read and write mixes of the Polaris benchmarks?

The dataset and the mix are those of apache/polaris-tools: a tree of namespaces (width 2, depth 4), 5 tables and 3 views
in each leaf, 10 columns and 10 properties each. Nine kinds of reads (list, check, fetch of namespaces, tables, views)
and three kinds of writes (set a property of one of them) are equally frequent. In the original, users arrive at a fixed
rate. Here, a fixed number of connections sends requests as fast as the server answers, which finds the limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench import bodies
from bench.measure import Sample, Slice, Worker, drive_workers, run_alternately, warm_up
from bench.report import Report
from bench.targets import BenchTarget, start_targets
from bench.wire import Request, build_request

WIDTH, DEPTH, TABLES, VIEWS = 2, 4, 5, 3
SERVERS = ("seamark", "seamark-pg", "fixture")
CLIENTS = 8
READ_SHARES = (1.0, 0.9, 0.5, 0.0)


@dataclass(frozen=True)
class Tree:
    """The names of the dataset.

    The children of node n are n·width+1 … n·width+width, as in the Polaris benchmark that this dataset copies.
    """

    namespaces: list[tuple[str, ...]]
    tables: list[tuple[tuple[str, ...], str]]
    views: list[tuple[tuple[str, ...], str]]


def build_tree(root: str, width: int = WIDTH, depth: int = DEPTH, tables: int = TABLES, views: int = VIEWS) -> Tree:
    levels: list[list[tuple[str, ...]]] = [[(root,)]]
    number = 1
    for _ in range(depth - 1):
        level = []
        for parent in levels[-1]:
            for _ in range(width):
                level.append((*parent, f"NS_{number}"))
                number += 1
        levels.append(level)
    leaves = levels[-1]
    return Tree(
        [name for level in levels for name in level],
        [(leaf, f"T_{n * tables + t}") for n, leaf in enumerate(leaves) for t in range(tables)],
        [(leaf, f"V_{n * tables + v}") for n, leaf in enumerate(leaves) for v in range(views)],
    )


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("mix", "How many requests a second on the read and write mixes of the Polaris benchmarks?")
    rounds, seconds = (1, 0.5) if quick else (4, 4.0)
    dataset = build_tree("NS_0")
    seeds = random.Random(42)
    with start_targets(SERVERS, folder) as targets:
        for target in targets:
            await _create_dataset(target, build_tree("warming_up"))
        datasets = {target.name: [await _create_dataset(target, dataset)] for target in targets}
        report.add("create the tree", "requests", "/s", datasets, lambda s: s.rate, lower_is_better=False)
        report.add_failures("create the tree", datasets)

        async def send_mix(target: BenchTarget, share: float) -> Sample:
            workers = [_send_mix(target, dataset, share, random.Random(seeds.random())) for _ in range(CLIENTS)]
            return await drive_workers(target, workers, seconds=seconds)

        run_by_case: dict[str, Slice] = {
            f"{share:.0%} reads, {CLIENTS} clients": partial(send_mix, share=share) for share in READ_SHARES
        }
        await warm_up(targets, run_by_case.values(), 2)
        for case, run_case in run_by_case.items():
            samples = await run_alternately(targets, rounds, run_case)
            report.add(case, "requests", "/s", samples, lambda s: s.rate, lower_is_better=False)
            report.add(case, "p99", "ms", samples, lambda s: s.compute_quantile(0.99))
            report.add(case, "server CPU", "µs", samples, lambda s: s.server_cpu_us)
            report.add_failures(case, samples)
            report.note_generator_limit(case, samples)
    report.notes.append(
        "Only requests that succeed count. The fixture is the test catalog of Iceberg: one JDBC client over SQLite in "
        "memory, without syncs."
    )
    return report


async def _create_dataset(target: BenchTarget, dataset: Tree) -> Sample:
    """Create the dataset as Polaris's `CreateTreeDataset` does.

    Namespaces are created one after another, parents first. Then eight clients create tables and views.
    """
    for namespace in dataset.namespaces:
        await target.call(bodies.create_namespace(namespace))
    create_requests: list[Request] = [
        bodies.create_table(target.make_namespace_path(leaf), name) for leaf, name in dataset.tables
    ]
    create_requests += [bodies.create_view(target.make_namespace_path(leaf), name) for leaf, name in dataset.views]
    return await drive_workers(target, [_iter_requests(create_requests[n::CLIENTS]) for n in range(CLIENTS)])


def _iter_requests(requests: list[Request]) -> Worker:
    """Yield each request once."""
    # The caller sends each answer into this generator. A `yield from` of the list would fail, as a list has no send().
    yield from (request for request in requests)


def _send_mix(target: BenchTarget, dataset: Tree, read_share: float, rng: random.Random) -> Worker:
    reads, writes = _list_reads(target, dataset, rng), _list_writes(target, dataset, rng)
    while True:
        yield rng.choice(reads if rng.random() < read_share else writes)()


def _list_reads(target: BenchTarget, dataset: Tree, rng: random.Random) -> list[Callable[[], Request]]:
    def choose_namespace() -> str:
        return target.make_namespace_path(rng.choice(dataset.namespaces))

    def choose_table() -> str:
        leaf, name = rng.choice(dataset.tables)
        return bodies.build_table_path(target.make_namespace_path(leaf), name)

    def choose_view() -> str:
        leaf, name = rng.choice(dataset.views)
        return bodies.build_view_path(target.make_namespace_path(leaf), name)

    return [
        lambda: build_request("GET", f"/v1/namespaces?parent={choose_namespace()}", label="list namespaces"),
        lambda: build_request("HEAD", f"/v1/namespaces/{choose_namespace()}", label="check namespace"),
        lambda: build_request("GET", f"/v1/namespaces/{choose_namespace()}", label="fetch namespace"),
        lambda: build_request("GET", choose_table().rsplit("/", 1)[0], label="list tables"),
        lambda: build_request("HEAD", choose_table(), label="check table"),
        lambda: build_request("GET", choose_table(), label="fetch table"),
        lambda: build_request("GET", choose_view().rsplit("/", 1)[0], label="list views"),
        lambda: build_request("HEAD", choose_view(), label="check view"),
        lambda: build_request("GET", choose_view(), label="fetch view"),
    ]


def _list_writes(target: BenchTarget, dataset: Tree, rng: random.Random) -> list[Callable[[], Request]]:
    """Return the functions that build a write request: a change of a property of a random namespace, table or view."""

    def draw_change() -> dict[str, str]:
        # The Polaris benchmark sets a new property each time, so tables grow and later rounds are slower than earlier
        # rounds. Ten names keep the size constant.
        return {f"NewAttribute_{rng.randrange(10)}": f"NewValue_{rng.randrange(10**6)}"}

    def build_commit(path: str, label: str) -> Request:
        body = {"requirements": [], "updates": [{"action": "set-properties", "updates": draw_change()}]}
        return build_request("POST", path, body, label=label, tolerated_statuses=(409,))

    def update_namespace() -> Request:
        path = f"/v1/namespaces/{target.make_namespace_path(rng.choice(dataset.namespaces))}/properties"
        return build_request(
            "POST",
            path,
            {"removals": [], "updates": draw_change()},
            label="update namespace",
            tolerated_statuses=(409,),
        )

    def update_table() -> Request:
        leaf, name = rng.choice(dataset.tables)
        return build_commit(bodies.build_table_path(target.make_namespace_path(leaf), name), "update table")

    def update_view() -> Request:
        leaf, name = rng.choice(dataset.views)
        return build_commit(bodies.build_view_path(target.make_namespace_path(leaf), name), "update view")

    return [update_namespace, update_table, update_view]
