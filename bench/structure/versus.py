"""`python -m bench.structure.versus CHECKOUT [NAME …]` compares the speed of this checkout with another checkout.

Servers of both run side by side, and each slice of load goes first to one and then to the other, so that changes of the
machine's speed affect both. For each case, the table has the ratio of this checkout to the other: the median over the
pairs of slices, and the ratio of the minima. A ratio below 1 means less CPU time; CPU time depends less on other
programs than rates do. CHECKOUT needs its own virtual environment in `.venv`, and its compiled kernels.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table as Grid

from bench import bodies, load_table
from bench.commits import append_each, change_each, set_property_of_each
from bench.measure import Sample, Slice, Worker, drive_workers, repeat_request
from bench.planning import tables
from bench.planning.filters import build_small_filter
from bench.planning.served import register_generated_table, request_plan
from bench.targets import LOAD_CORE, SERVER_CORE, BenchTarget, pin_to_core
from bench.wire import Request, build_request
from tests.catalog.appender import EngineAppender
from tests.services.process import choose_free_port
from tests.services.seamark import Seamark

NAMESPACE = "commits"
PARALLEL = (1, 4, 16)
"""The numbers of clients; each client has its own table."""
SECONDS = 1.0
PLANNED_FILES = 10_000
_slice_numbers: Iterator[int] = itertools.count()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.structure.versus", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the root of the other checkout")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run only cases with NAME in their name; default: all")
    parser.add_argument("--rounds", type=int, default=12, help="number of slices of each case on each server")
    parser.add_argument("--folder", type=Path, help="a folder for the servers' data, on the disk to measure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        uvloop.run(print_ratios(Path(folder), arguments.checkout.resolve(), arguments.names, arguments.rounds))


async def print_ratios(folder: Path, checkout: Path, names: Sequence[str], rounds: int) -> None:
    """Print the ratios of this checkout to another checkout for all cases whose name contains one of `names`.

    Each case runs once as a warm-up, and then in `rounds` rounds, in which the servers of both checkouts get the same
    load one after another.
    """
    grid = Grid("case", "CPU, median", "CPU, minimum", "rate, median", "ms of CPU, current and base")
    table = tables.generate_table(PLANNED_FILES)
    with ExitStack() as stack:
        current_server = stack.enter_context(_run_server("current", folder, Path.cwd()))
        base_server = stack.enter_context(_run_server("base", folder, checkout))
        stack.enter_context(pin_to_core(LOAD_CORE))
        pair = (current_server, base_server)
        for target in pair:
            await target.call(bodies.create_namespace((NAMESPACE,)))
            await load_table.register_history(target)
            await register_generated_table(target, table)
        cases = {
            name: run_case
            for name, run_case in _list_cases(table).items()
            if not names or any(n in name for n in names)
        }
        for run_case in cases.values():
            for target in pair:
                await run_case(target)
        for name, run_case in cases.items():
            samples: dict[BenchTarget, list[Sample]] = {target: [] for target in pair}
            for number in range(rounds):
                for target in pair if number % 2 else pair[::-1]:
                    samples[target].append(await run_case(target))
            failures = [text for sample in itertools.chain(*samples.values()) for text in sample.failures]
            if failures:
                raise RuntimeError(f"{name}: {failures[0]}")
            cpu = {target: [_compute_cpu_ms(sample) for sample in samples[target]] for target in pair}
            rates = {target: [sample.rate for sample in samples[target]] for target in pair}
            grid.add_row(
                name,
                f"{_compute_median_ratio(cpu[current_server], cpu[base_server]):.3f}",
                f"{min(cpu[current_server]) / min(cpu[base_server]):.3f}",
                f"{_compute_median_ratio(rates[current_server], rates[base_server]):.3f}",
                f"{statistics.median(cpu[current_server]):.3f} {statistics.median(cpu[base_server]):.3f}",
            )
    Console(width=120).print(grid)


def _compute_median_ratio(current_server: Sequence[float], base_server: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(current_server, base_server, strict=True))


def _compute_cpu_ms(sample: Sample) -> float:
    """Return the server's CPU time in ms per counted answer, including the time of refused requests."""
    return sample.server_cpu_s * 1000 / max(1, len(sample.latencies_ms))


@contextmanager
def _run_server(name: str, folder: Path, checkout: Path) -> Iterator[BenchTarget]:
    """Run the server of `checkout` on the core that all measured servers use."""
    server = Seamark(
        folder / name,
        warehouse=f"file://{folder / name / 'warehouse'}",
        env={"SEAMARK_LOG_LEVEL": "warning", "SEAMARK_ALLOWED_LOCATIONS": f"file://{tables.CACHE}"},
        port=choose_free_port(),
        program=checkout / ".venv" / "bin" / "seamark",
    )
    with pin_to_core(SERVER_CORE):
        server.start()
    try:
        yield BenchTarget(name, server.base_url, (server.pid,), folder / name / "warehouse")
    finally:
        server.terminate()


def _list_cases(table: tables.GeneratedTable) -> dict[str, Slice]:
    filters = (request_plan(table, build_small_filter(table, number)) for number in itertools.count(1))
    path = bodies.build_table_path(load_table.NAMESPACE, "long")
    kinds = {"property": set_property_of_each, "append": append_each, "append of manifests": _append_manifests}
    cases: dict[str, Slice] = {
        f"{kind}, {count} {'table, 1 client' if count == 1 else f'tables, {count} clients'}": partial(
            _drive_commits, make_worker=make, tables=count
        )
        for kind, make in (*kinds.items(), ("change", change_each))
        for count in PARALLEL
    }
    cases["load_table, references"] = partial(
        _drive_worker, worker=lambda: repeat_request(build_request("GET", f"{path}?snapshots=refs"))
    )
    cases["load_table, all snapshots"] = partial(
        _drive_worker, worker=lambda: repeat_request(build_request("GET", path))
    )
    cases["plan, the same filter"] = partial(
        _drive_worker, worker=lambda: repeat_request(request_plan(table, build_small_filter(table)))
    )
    cases["plan, a new filter"] = partial(_drive_worker, worker=lambda: _yield_shared_requests(filters))
    return cases


async def _drive_worker(target: BenchTarget, worker: Callable[[], Worker]) -> Sample:
    return await drive_workers(target, [worker()], seconds=SECONDS)


def _yield_shared_requests(requests: Iterator[Request]) -> Worker:
    """Yield the requests of an iterator that all workers share, so no request is sent twice."""
    while True:  # `yield from` would close the iterator when a worker ends.
        yield next(requests)


async def _drive_commits(target: BenchTarget, make_worker: Callable[[list[str]], Worker], tables: int) -> Sample:
    """Commit to new tables for `SECONDS`, with one client for each table.

    A long history slows commits down, so each run creates its own tables.

    Args:
        make_worker: Returns the requests of a client, given the names of its tables.
    """
    number = next(_slice_numbers)
    names = [f"t{number}_{table}" for table in range(tables)]
    for name in names:
        await target.call(bodies.create_table(NAMESPACE, name))
    return await drive_workers(target, [make_worker([name]) for name in names], seconds=SECONDS)


def _append_manifests(names: list[str]) -> Worker:
    """Append a file to each table in turn, with a manifest and a manifest list as engines write them."""
    (name,) = names
    path = bodies.build_table_path(NAMESPACE, name)
    metadata = (yield build_request("GET", path, counted_statuses=(), tolerated_statuses=(200,))).json()["metadata"]
    for number in itertools.count():
        requirements, updates = EngineAppender(metadata).commit({f"{metadata['location']}/data/{number}.parquet": 1})
        answer = yield build_request("POST", path, {"requirements": requirements, "updates": updates}, label="append")
        metadata = answer.json()["metadata"]


if __name__ == "__main__":
    main()
