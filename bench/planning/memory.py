"""How many bytes of memory does a planned table need for each of its files?

The benchmark measures two values: the bytes that the planner reports for its blocks and views, and the growth of the
resident memory of a new process. The planner limits the first value by its budget, so the second must not be much
larger.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.planning.filters import FILTERS
from bench.planning.ours import open_our_planner
from bench.planning.tables import GeneratedTable, generate_table
from bench.report import OURS, Report, Row

GOAL_BYTES = 500
SIZES = (10_000, 100_000, 1_000_000)
MANIFESTS = "manifests"


@dataclass(frozen=True)
class MemoryMeasurement:
    """The bytes that the planner reports, and the bytes by which the process grew."""

    accounted_bytes: int
    growth_bytes: int


async def run(folder: Path, *, quick: bool = False, sizes: tuple[int, ...] = SIZES) -> Report:
    report = Report("planning_memory", "How many bytes a file?", peer="the deflated manifests on disk")
    spawn = multiprocessing.get_context("spawn")
    for files in (2_000,) if quick else sizes:
        generated_table = generate_table(files)
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            result = pool.submit(measure_planner_memory, generated_table, folder / f"home-{files}").result()
        disk_bytes = generated_table.metadata_bytes / files
        for case, size in (
            ("blocks and views", result.accounted_bytes),
            ("growth of a fresh process", result.growth_bytes),
        ):
            values = {OURS: size / files, MANIFESTS: disk_bytes}
            goal = GOAL_BYTES if case == "blocks and views" or files >= 100_000 else None
            report.rows.append(Row(f"{files:,} files", case, "B/file", values, peer=MANIFESTS, goal=goal))
    report.notes += [
        "Measured after plans by every filter of this package, so that the summaries of every column are in memory.",
        "Growth of a process includes memory that the allocator keeps after decoding, and at 10,000 files its threads.",
    ]
    return report


def measure_planner_memory(table: GeneratedTable, home: Path) -> MemoryMeasurement:
    """Load the table in a separate process, plan by every filter, and measure the memory."""
    return asyncio.run(_measure_memory(table, home))


async def _measure_memory(table: GeneratedTable, home: Path) -> MemoryMeasurement:
    process = psutil.Process()
    async with open_our_planner(home, table) as seamark_planner:
        gc.collect()
        bytes_before = process.memory_info().rss
        scans = [(await seamark_planner.scan(expected.build_expression(table)))[1] for expected in FILTERS.values()]
        view = scans[-1].view
        scans.clear()
        gc.collect()
        return MemoryMeasurement(
            seamark_planner.planner.read_stats().live_bytes + view.size_bytes, process.memory_info().rss - bytes_before
        )
