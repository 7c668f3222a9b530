"""What does a small request cost, in CPU microseconds of the server and in milliseconds at the client?

The lower bound is an asyncio server that only sends prepared bytes, measured by the same client in one process.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from bench import bodies, bounds
from bench.measure import Sample, Slice, drive_workers, repeat_request, run_alternately, warm_up
from bench.report import Report
from bench.targets import BenchTarget, start_targets
from bench.wire import build_request

NAMESPACE = "small"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("small_request", "What does a small request cost?")
    rounds, seconds = (1, 0.5) if quick else (6, 2.0)
    with start_targets(("seamark", "seamark-pg", "fixture"), folder) as targets:
        for target in targets:
            await target.call(bodies.create_namespace((NAMESPACE,)))
            await target.call(bodies.create_table(NAMESPACE, "one"))
        path = bodies.build_table_path(NAMESPACE, "one")
        etags = {t.name: (await t.call(build_request("GET", path))).get_field("ETag") for t in targets}

        async def send_requests(target: BenchTarget, kind: str, clients: int) -> Sample:
            if kind == "HEAD table":
                expected = build_request("HEAD", path)
            elif kind == "loadTable":
                expected = build_request("GET", path)
            else:
                headers = {"If-None-Match": etags[target.name]}
                expected = build_request("GET", path, headers=headers, counted_statuses=(200, 304))
            return await drive_workers(target, [repeat_request(expected) for _ in range(clients)], seconds=seconds)

        pieces: dict[str, Slice] = {
            f"{kind}, {clients} {'client' if clients == 1 else 'clients'}": partial(
                send_requests, kind=kind, clients=clients
            )
            for kind, clients in (
                ("loadTable", 8),
                ("loadTable", 1),
                ("loadTable, ETag in hand", 1),
                ("HEAD table", 1),
            )
        }
        await warm_up(targets, pieces.values(), 3)
        for title, piece in pieces.items():
            samples = await run_alternately(targets, rounds, piece)
            report.add(title, "server CPU", "µs", samples, lambda s: s.server_cpu_us)
            report.add(title, "p50", "ms", samples, lambda s: s.compute_quantile(0.5))
            report.add(title, "p99", "ms", samples, lambda s: s.compute_quantile(0.99))
            report.add(title, "requests", "/s", samples, lambda s: s.rate, lower_is_better=False)
            report.add_failures(title, samples)
            report.note_generator_limit(title, samples)
        body = (await targets[0].call(build_request("GET", path))).body
        floor = await bounds.measure_transfer_ms(body, 2000)
        report.bounds = {
            f"{len(body):,} bytes from a bare asyncio server to this client, one process": f"{floor:.3f} ms"
        }
    return report
