"""How much memory and planning time does a table of up to ten million files need on one machine?

The table has 20 columns, and manifests of 10,000 entries, as writers that merge manifests produce them. Two processes
plan the table one after another with the same folder on the local disk. The first process decodes every manifest. The
second process starts like a server after a restart. Each process plans with every filter of `bench.planning.filters` in
turn. Then another manifest is committed. The benchmark plans the new snapshot at once, and again after the server has
prepared it.

Memory is measured in two ways: the growth of the resident memory of the process, without memory that the
allocator has freed, and the value that the planner reports in /metrics.

    python -m bench.fleet.many_files --files 1000000
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import io
import json
import multiprocessing
import shutil
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import fastavro
import psutil

from bench.planning import layout
from bench.planning.filters import FILTERS, ORDERED_COLUMN, RANGES
from bench.planning.ours import OurPlanner, open_our_planner
from bench.planning.tables import GeneratedTable, generate_table
from bench.report import OURS, Report, Row
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.metaserver.planner.plan.cached_views import PlannedTable
from seamark.metaserver.planner.scan.request import BoundScan, ScanRequest

MANIFEST_ENTRIES = 10_000
PLANS_PER_CASE = 30
COMMITS = 5
BUDGET = 400
"""The memory budget of the planner in bytes per file, for the files and the views that ten commits leave behind."""
GOALS = {"bytes": 250.0, "restart": 1000.0, "range": 10.0, "ordered": 0.2, "commit": 5.0}


@dataclass
class ProcessMeasurement:
    """The measurements of one process: times in ms, memory in bytes per file."""

    first_ms: float
    resident: dict[str, float] = field(default_factory=dict)
    """The growth of the resident memory, by the name of the moment."""
    private_bytes: float = 0.0
    """The last value in `resident` without the memory pages that belong to mapped files."""
    reported_bytes: float = 0.0
    """The memory that the planner reports in /metrics."""
    views: int = 0
    """The number of decoded tables (views) that the planner has in memory."""
    plans_ms: dict[str, float] = field(default_factory=dict)
    """The median time of a plan, by the name of the filter."""
    retained_files: dict[str, int] = field(default_factory=dict)
    commit_ms: float = 0.0
    """The extra time of a plan of the next snapshot right after the commit."""
    prepared_ms: float = 0.0
    """The extra time after a commit if the server has prepared the view, as it does for tables that clients plan."""


def measure_process(table: GeneratedTable, home: Path, memory_bytes: int) -> ProcessMeasurement:
    """Measure the plans of a table, and the memory of this process.

    The benchmark calls it in a new process each time, so that the second call starts like a server after a restart.
    """
    return asyncio.run(_measure_plans(table, home, memory_bytes))


async def _measure_plans(table: GeneratedTable, home: Path, memory_bytes: int) -> ProcessMeasurement:
    async with open_our_planner(home, table, disk=True, memory_bytes=memory_bytes) as seamark_planner:
        bytes_before, private_bytes_before = _read_resident_bytes(), _read_resident_bytes(private=True)
        first = await seamark_planner.plan(FILTERS[RANGES[0]].build_expression(table))
        measurement = ProcessMeasurement(first.ms)
        await _wait_until_settled()
        measurement.resident["after one plan"] = (_read_resident_bytes() - bytes_before) / table.files
        for name, expected in FILTERS.items():
            measurement.retained_files[name] = len(
                (await seamark_planner.scan(expected.build_expression(table)))[1].entry_ids
            )
            times = [
                (await seamark_planner.scan(expected.build_expression(table, number)))[0]
                for number in range(1, PLANS_PER_CASE + 1)
            ]
            measurement.plans_ms[name] = statistics.median(times)
        await _wait_until_settled()
        measurement.resident["after ten filters"] = (_read_resident_bytes() - bytes_before) / table.files
        measurement.private_bytes = (_read_resident_bytes(private=True) - private_bytes_before) / table.files
        stats = seamark_planner.planner.read_stats()
        measurement.reported_bytes = (stats.live_bytes + stats.added_bytes + stats.lists_bytes) / table.files
        measurement.views = stats.views
        measurement.commit_ms = await _measure_commits(seamark_planner, table, 0, prepare=False)
        measurement.prepared_ms = await _measure_commits(seamark_planner, table, COMMITS, prepare=True)
    return measurement


async def _wait_until_settled() -> None:
    """Wait until the processor is idle; then the decoded manifests are on the disk."""
    process, previous_s = psutil.Process(), 0.0
    while (cpu_s := sum(process.cpu_times()[:2])) - previous_s > 0.02:
        previous_s = cpu_s
        await asyncio.sleep(0.5)


def _read_resident_bytes(*, private: bool = False) -> int:
    """Return the resident memory in bytes; with `private`, without the pages of files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    memory = psutil.Process().memory_info()
    return int(memory.rss - (memory.shared if private else 0))


async def _measure_commits(seamark_planner: OurPlanner, table: GeneratedTable, first: int, *, prepare: bool) -> float:
    """Return the extra milliseconds of a plan after a commit of one manifest.

    The result is the median over several commits of the plan's time minus the time of a plan of a known snapshot.
    """
    extra_times_ms = []
    filter_case = FILTERS[RANGES[0]]
    for number in range(first, first + COMMITS):
        # Each plan has a new literal, above those of `_measure_plans`, so that no plan is answered from a cache.
        known_snapshot_ms, _ = await seamark_planner.scan(filter_case.build_expression(table, 500 + number))
        metadata = _commit_file(table, seamark_planner.metadata, number)
        parsed_expression = parse_expression(filter_case.build_expression(table, 600 + number))
        if prepare:
            planned_table = PlannedTable(BoundScan.bind(seamark_planner.metadata, ScanRequest()).view_key, 0.0)
            assert await seamark_planner.planner.prepare(metadata, planned_table, limit_bytes=table.metadata_bytes)
        started_s = time.perf_counter()
        await seamark_planner.planner.bind_and_plan(metadata, ScanRequest(filter=parsed_expression))
        extra_times_ms.append((time.perf_counter() - started_s) * 1000 - known_snapshot_ms)
        seamark_planner.metadata = metadata
    return statistics.median(extra_times_ms)


def _commit_file(table: GeneratedTable, metadata: TableMetadata, entry_number: int) -> TableMetadata:
    """Write the files of an append, and return the table's new metadata.

    The new manifest has the first entries of an existing manifest, at most a thousand.

    Args:
        entry_number: The position of the existing manifest in the manifest list.
    """
    folder = table.folder / "commits"
    folder.mkdir(exist_ok=True)
    snapshot = metadata.current_snapshot
    assert snapshot is not None
    assert snapshot.manifest_list is not None
    with Path(snapshot.manifest_list.removeprefix("file://")).open("rb") as file:
        entries = list(fastavro.reader(file))
    source = Path(str(entries[entry_number]["manifest_path"]).removeprefix("file://"))
    with source.open("rb") as file:
        reader = fastavro.reader(file)
        rows = [row for _, row in zip(range(1000), reader, strict=False)]
        header = {key: value for key, value in reader.metadata.items() if not key.startswith("avro.")}
        schema = json.loads(reader.metadata["avro.schema"])
    path = folder / f"{uuid.uuid4()}-m0.avro"
    with path.open("wb") as file:
        fastavro.writer(file, schema, rows, codec="deflate", metadata=header)
    manifest_fields = {
        **entries[entry_number],
        "manifest_path": f"file://{path}",
        "manifest_length": path.stat().st_size,
    }
    manifest_fields |= {"added_files_count": len(rows), "added_snapshot_id": snapshot.snapshot_id + 1}
    list_bytes = io.BytesIO()
    fastavro.writer(list_bytes, layout.build_manifest_file_schema(), [manifest_fields, *entries], codec="deflate")
    list_path = folder / f"snap-{uuid.uuid4()}.avro"
    list_path.write_bytes(list_bytes.getvalue())
    document = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
    new_snapshot = document["snapshots"][0]
    new_snapshot |= {"snapshot-id": snapshot.snapshot_id + 1, "manifest-list": f"file://{list_path}"}
    document["current-snapshot-id"] = document["refs"]["main"]["snapshot-id"] = new_snapshot["snapshot-id"]
    document["snapshot-log"] = []
    return decode_table(json.dumps(document).encode(), table.metadata_location)


def run(sizes: list[int], folder: Path, manifest_entries: int) -> Report:
    report = Report("many_files", "What does a table of many files cost one machine?", peer="the first process")
    spawn = multiprocessing.get_context("spawn")
    for files in sizes:
        generated_table = generate_table(files, manifest_entries=manifest_entries, deflate_level=1)
        results = []
        memory_bytes = BUDGET * files
        for _ in range(2):
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                measurement_future = pool.submit(
                    measure_process, generated_table, folder / f"home-{files}", memory_bytes
                )
                results.append(measurement_future.result())
        shutil.rmtree(folder / f"home-{files}")
        shutil.rmtree(generated_table.folder / "commits")
        _add_rows(report, files, *results)
    report.notes += [
        f"The planner's budget is {BUDGET} bytes a file.",
        f"Manifests of {manifest_entries:,} entries, deflated at level 1, and 20 columns with bounds and counts.",
        f"A median of {PLANS_PER_CASE} plans with new literals, of {COMMITS} commits of a manifest of 1,000 files.",
    ]
    return report


def _add_rows(report: Report, files: int, first_run: ProcessMeasurement, second_run: ProcessMeasurement) -> None:
    """Add the rows of a table of `files` files: the second process compared with the first."""

    def add_row(measure: str, unit: str, seamark_ms: float, first: float, goal: float | None = None) -> None:
        values = {OURS: seamark_ms, "first process": first}
        report.rows.append(Row(f"{files:,} files", measure, unit, values, peer="first process", goal=goal))

    add_row("first plan", "ms", second_run.first_ms, first_run.first_ms, GOALS["restart"])
    for moment in second_run.resident:
        add_row(
            f"resident, {moment}", "B/file", second_run.resident[moment], first_run.resident[moment], GOALS["bytes"]
        )
    add_row("resident, without files", "B/file", second_run.private_bytes, first_run.private_bytes)
    add_row("reported by the planner", "B/file", second_run.reported_bytes, first_run.reported_bytes)
    for name in FILTERS:
        goal = GOALS["ordered"] if name == ORDERED_COLUMN else GOALS["range"] if name in RANGES else None
        add_row(f"plan, {name}", "ms", second_run.plans_ms[name], first_run.plans_ms[name], goal)
    add_row("added by a commit, at once", "ms", second_run.commit_ms, first_run.commit_ms, GOALS["commit"])
    add_row("added by a commit, prepared", "ms", second_run.prepared_ms, first_run.prepared_ms, GOALS["commit"])
    if not first_run.views or not second_run.views:
        report.notes.append(f"{files:,} files: the budget of {BUDGET} B/file is too small, the view was evicted.")
    report.notes.append(
        f"{files:,} files: kept " + ", ".join(f"{name} {n:,}" for name, n in second_run.retained_files.items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, nargs="+", default=[200_000, 1_000_000, 10_000_000])
    parser.add_argument("--manifest-entries", type=int, default=MANIFEST_ENTRIES)
    parser.add_argument("--save", action="store_true", help="write the results to bench/results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seamark-bench-") as text:
        report = run(arguments.files, Path(text), arguments.manifest_entries)
    if arguments.save:
        report.save()
    print(report.format_markdown())


if __name__ == "__main__":
    main()
