"""How fast is loadTable when the table has 10,000 snapshots?

The table is a generated metadata file (about 8 MB) that each server registers. One connection sends four kinds of
requests: only the snapshots that references name (`snapshots=refs`, which engines request first), all snapshots, all
snapshots compressed (as engines accept them), and all snapshots with the current ETag. The benchmark then measures
commits to this table.
"""

from __future__ import annotations

from pathlib import Path

from bench import bodies, bounds
from bench.measure import Sample, Slice, Worker, drive_workers, repeat_request, run_alternately, warm_up
from bench.report import Report
from bench.targets import BenchTarget, start_targets
from bench.wire import build_request

SNAPSHOTS = 10_000
NAMESPACE = "history"


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("load_table", f"How fast is loadTable when the table has {SNAPSHOTS:,} snapshots?")
    rounds, times = (2, 5) if quick else (6, 50)
    with start_targets(("seamark", "fixture"), folder) as targets:
        for target in targets:
            await register_history(target)
        path = bodies.build_table_path(NAMESPACE, "long")
        size = {t.name: len((await t.call(build_request("GET", path))).body) for t in targets}

        async def load_refs(target: BenchTarget) -> Sample:
            return await drive_workers(target, [repeat_request(build_request("GET", f"{path}?snapshots=refs"), times)])

        async def load_everything(target: BenchTarget) -> Sample:
            return await drive_workers(target, [repeat_request(build_request("GET", path), times // 2 + 1)])

        async def load_gzipped(target: BenchTarget) -> Sample:
            request = build_request("GET", path, headers={"Accept-Encoding": "gzip"})
            return await drive_workers(target, [repeat_request(request, times // 2 + 1)])

        async def load_unchanged(target: BenchTarget) -> Sample:
            etag = (await target.call(build_request("GET", path))).get_field("ETag")
            conditional = build_request("GET", path, headers={"If-None-Match": etag}, counted_statuses=(200, 304))
            return await drive_workers(target, [repeat_request(conditional, times)])

        async def drive_commits(target: BenchTarget) -> Sample:
            return await drive_workers(target, [_request_commits(times // 5)])

        cases: tuple[tuple[str, Slice, float | None], ...] = (
            ("snapshots=refs", load_refs, 5.0),
            ("snapshots=all", load_everything, 20.0),
            ("snapshots=all, gzip accepted", load_gzipped, None),
            ("snapshots=all, If-None-Match", load_unchanged, None),
            ("commit of one property", drive_commits, None),
        )
        await warm_up(targets, [run_case for _, run_case, _ in cases], 1 if quick else 3)
        for case, run_case, goal in cases:
            samples = await run_alternately(targets, rounds, run_case)
            report.add(case, "p50", "ms", samples, lambda s: s.compute_quantile(0.5), goal=goal)
            report.add(case, "p99", "ms", samples, lambda s: s.compute_quantile(0.99))
            report.add(case, "server CPU", "ms", samples, lambda s: s.server_cpu_us / 1000)
            report.add_failures(case, samples)
        body = (await targets[0].call(build_request("GET", path))).body
        report.bounds = {
            f"copying the {len(body) / 1e6:.1f} MB answer once": f"{bounds.measure_copy_ms(body):.2f} ms",
            "the same answer from a bare socket to this client": f"{await bounds.measure_transfer_ms(body):.2f} ms",
            "a new durable file of 8 MB": f"{bounds.measure_new_file_ms(folder, 8 << 20, 10):.1f} ms",
        }
        report.notes.append(
            f"Answer to snapshots=all in bytes: {size}. The fixture reads and parses the file for each answer."
        )
    return report


async def register_history(target: BenchTarget) -> None:
    """Register the metadata file with the long history as a table."""
    await target.call(bodies.create_namespace((NAMESPACE,)))
    location = bodies.write_long_history(target.warehouse / "history" / "long", SNAPSHOTS)
    body = {"name": "long", "metadata-location": location}
    await target.call(build_request("POST", f"/v1/namespaces/{NAMESPACE}/register", body))


def _request_commits(times: int) -> Worker:
    for number in range(times):
        yield bodies.set_property(NAMESPACE, "long", "bench.touched", str(number))
