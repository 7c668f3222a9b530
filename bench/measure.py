"""The measurements of the benchmarks: workers on connections, alternating slices of work, medians of rounds.

A worker is a generator that yields requests and receives their answers. It has no socket, so the same worker can send
requests to any server. Servers are measured alternately (A B, B A, …), so that a change of the machine's speed affects
both.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from bench.targets import BenchTarget, open_connections
from bench.wire import Connection, Request, Response

Worker = Generator[Request, Response, None]


@dataclass
class Sample:
    """The measurements of one slice of load. `latencies_ms` has the latencies of counted answers only."""

    latencies_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    elapsed_s: float = 0.0
    server_cpu_s: float = 0.0
    generator_cpu_s: float = 0.0

    @property
    def rate(self) -> float:
        """The counted answers per second."""
        return len(self.latencies_ms) / self.elapsed_s

    @property
    def server_cpu_us(self) -> float:
        """The server's CPU microseconds per answer of any status."""
        return self.server_cpu_s / max(1, sum(self.statuses.values())) * 1e6

    @property
    def generator_cpu(self) -> float:
        """The fraction of its core that the load generator used; near 1, the generator was the limit."""
        return self.generator_cpu_s / self.elapsed_s

    def compute_quantile(self, q: float) -> float:
        """Return the latency in ms that a fraction `q` of the answers does not exceed."""
        sorted_latencies_ms = sorted(self.latencies_ms)
        return sorted_latencies_ms[min(len(sorted_latencies_ms) - 1, int(q * len(sorted_latencies_ms)))]


async def drive_workers(target: BenchTarget, workers: Sequence[Worker], *, seconds: float = float("inf")) -> Sample:
    """Run each worker on its own connection until it ends or `seconds` are over."""
    sample = Sample()
    async with open_connections(target, len(workers)) as opened_connections:
        cpu, own_cpu_s, started_s = target.read_cpu_s(), time.process_time(), time.perf_counter()
        deadline = started_s + seconds
        pairs = zip(opened_connections, workers, strict=True)
        await asyncio.gather(*(_run_worker(connection, worker, deadline, sample) for connection, worker in pairs))
        sample.elapsed_s = time.perf_counter() - started_s
        sample.generator_cpu_s = time.process_time() - own_cpu_s
        sample.server_cpu_s = target.read_cpu_s() - cpu
    return sample


async def _run_worker(connection: Connection, worker: Worker, deadline: float, sample: Sample) -> None:
    clock = time.perf_counter
    try:
        request = next(worker)
        while (started_s := clock()) < deadline:
            answer = await connection.ask(request)
            elapsed_s = clock() - started_s
            sample.statuses[answer.status] += 1
            if answer.status in request.counted_statuses:
                sample.latencies_ms.append(elapsed_s * 1000)
            elif answer.status not in request.tolerated_statuses:
                sample.failed += 1
                if len(sample.failures) < 5:
                    sample.failures.append(f"{request.label}: {answer.status} {answer.body[:200]!r}")
            request = worker.send(answer)
    except StopIteration:
        pass


def repeat_request(request: Request, times: int | None = None) -> Worker:
    """Yield the same request `times` times, or without end if `times` is None."""
    while times is None or times > 0:
        yield request
        times = times and times - 1


Slice = Callable[[BenchTarget], Awaitable[Sample]]
"""A short measurement: a function that sends requests to a target and returns the sample."""


async def run_alternately(targets: Sequence[BenchTarget], rounds: int, run_slice: Slice) -> dict[str, list[Sample]]:
    """Run a short measurement on each target in `rounds` rounds, in reverse order in every second round.

    Args:
        run_slice: Sends requests to a target and returns the sample. Short slices alternate between the targets, so a
            change of the machine's speed affects all.

    Returns:
        The samples of each target, by its name.
    """
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    for number in range(rounds):
        for target in targets if number % 2 == 0 else reversed(targets):
            samples[target.name].append(await run_slice(target))
    return samples


async def warm_up(targets: Sequence[BenchTarget], slices: Iterable[Slice], rounds: int) -> None:
    """Run each measurement in `rounds` rounds on every target, and discard the results.

    A JVM compiles while it runs. Without the warm-up, the first case would run on a slower server than the last.

    Args:
        targets: The servers to warm up.
        slices: The measurements. Each is a function that sends requests to one target for a short time.
        rounds: The number of times that each measurement runs on each target.
    """
    for run_measurement in slices:
        await run_alternately(targets, rounds, run_measurement)


def compute_median(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    return statistics.median(value(sample) for sample in samples)


def read_cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process and its live children have used."""
    process = psutil.Process(pid)
    return float(sum(sum(item.cpu_times()[:2]) for item in (process, *process.children(recursive=True))))
