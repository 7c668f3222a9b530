"""How long does a warm plan take, if the metadata of the table is already decoded and the filter is new?

Seamark is timed in the process that has the metadata, from the filter's JSON to the rows that are kept; Java and
PyIceberg are timed from the filter to the last task. Every planner gets the same filters alternately, and must keep the
same files. The literals of a filter change a little from round to round, so that no planner can use a cached plan.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from bench.planning import java_peer, pyiceberg_peer
from bench.planning.filters import FILTERS, ORDERED_COLUMN, RANGES, Filter
from bench.planning.java_peer import TimedJavaPlanner, run_java_planner
from bench.planning.limits import Bandwidth, measure_bandwidth
from bench.planning.ours import OurPlanner, open_our_planner
from bench.planning.pyiceberg_peer import PyIcebergPlanner
from bench.planning.tables import GeneratedTable, generate_table
from bench.report import OURS, Report, Row

JAVA, PYICEBERG = "iceberg-java", "pyiceberg"
GOALS_MS = {100_000: 0.2, 1_000_000: 2.0}
"""The goals in ms for one range of a column in random order, by the number of files."""
ORDERED_GOAL_MS = {1_000_000: 0.1}
"""The goal in ms for one range of an ordered column, by the number of files."""
GROWTH_GOAL = 2.0
"""The largest factor by which the time may grow from 100,000 to 1,000,000 files, for an ordered column."""
PLANS_PER_TURN = 40
UNUSED_ROUND_NUMBER = 5000
"""Larger than the numbers of all earlier plans, so that no cached plan answers."""
LARGE_TABLE_FILES = 1_000_000
"""The number of files from which Java plans a table in fewer rounds, because each plan takes seconds."""
PYICEBERG_FILES_MAX = 100_000
"""The largest table that PyIceberg plans. It needs more than a minute for a million files."""
MEMORY_FILES_MIN = 100_000
"""The smallest table whose scan is compared with the memory. Smaller tables fit into the caches of the core."""
QUICK_PROBE_BYTES = 1 << 26
"""The bytes that a quick run reads to measure the speed of the memory."""
SIZES = (10_000, 100_000, 1_000_000)
MASK_BYTES_PER_FILE = 1


async def run(folder: Path, *, quick: bool = False, sizes: tuple[int, ...] = SIZES) -> Report:
    """Plan tables of several sizes with each filter, and compare Seamark's times with those of other planners."""
    report = Report("planning_warm", "How long is a warm plan?", peer=f"Iceberg Java {java_peer.read_version()}, warm")
    memory = measure_bandwidth(QUICK_PROBE_BYTES) if quick else measure_bandwidth()
    report.bounds = {"memory of this machine, one core": memory.write_text()}
    ordered_ms_by_size: dict[int, dict[str, float]] = {}
    for files in (2_000,) if quick else sizes:
        generated_table = generate_table(files)
        async with open_our_planner(folder / f"home-{files}", generated_table) as seamark_planner:
            with run_java_planner(generated_table.metadata_location, files, folder / "java.log") as java_planner:
                rounds = 1 if quick else 2 if files >= LARGE_TABLE_FILES else 5
                for _ in range(1 if files >= LARGE_TABLE_FILES else 3):  # The JVM compiles while it runs.
                    java_planner.plan(True)
                for filter_case in FILTERS.values():
                    median_ms_by_planner = await _measure_filter(
                        report, generated_table, filter_case, seamark_planner, java_planner, rounds
                    )
                    if filter_case.name == ORDERED_COLUMN:
                        ordered_ms_by_size[files] = median_ms_by_planner
            if files <= PYICEBERG_FILES_MAX:
                _add_pyiceberg_plan(report, generated_table)
            if quick or files >= MEMORY_FILES_MIN:
                await _compare_with_memory(report, generated_table, seamark_planner, memory)
    _report_growth(report, ordered_ms_by_size)
    report.notes += [f"{item.name}: {item.description}." for item in FILTERS.values()]
    report.notes.append(
        f"Java {java_peer.read_version()} and PyIceberg {pyiceberg_peer.get_version()} decode the"
        f" manifests for every plan, from"
        " the page cache, on both cores; the files kept are the same by every planner, or this bench fails."
    )
    return report


async def _measure_filter(
    report: Report,
    table: GeneratedTable,
    query_filter: Filter,
    seamark_planner: OurPlanner,
    java_planner: TimedJavaPlanner,
    rounds: int,
) -> dict[str, float]:
    """Measure a filter with each planner. Add a row to the report, and return the median times in ms by planner."""
    # The first plan of a column takes longer, and is reported in a note: the planner prepares the column's bounds.
    first = await seamark_planner.plan(query_filter.build_expression(table))
    seamark_ms, java_ms = [], []
    first_literal = 100  # Larger than every `round_number`, so that no plan repeats a filter that both planners had.
    for round_number in range(1, rounds + 1):
        plan = java_planner.plan(query_filter.build_expression(table, round_number))
        java_ms.append(plan.ms)
        plan.check_same(
            await seamark_planner.plan(query_filter.build_expression(table, round_number)), query_filter.name
        )
        for number in range(PLANS_PER_TURN):
            elapsed_ms, _ = await seamark_planner.scan(
                query_filter.build_expression(table, first_literal + round_number * PLANS_PER_TURN + number)
            )
            seamark_ms.append(elapsed_ms)
    results = {OURS: statistics.median(seamark_ms), JAVA: statistics.median(java_ms)}
    goals = ORDERED_GOAL_MS if query_filter.name == ORDERED_COLUMN else GOALS_MS if query_filter.name in RANGES else {}
    report.rows.append(
        Row(_format_case(table, query_filter.name), "plan", "ms", results, peer=JAVA, goal=goals.get(table.files))
    )
    report.notes.append(
        f"{_format_case(table, query_filter.name)}: {first.file_count:,} files kept; ours p99"
        f" {_compute_p99(seamark_ms):.3f} ms, "
        f"the first on these columns {first.ms:.1f} ms."
    )
    return results


def _format_case(table: GeneratedTable, name: str) -> str:
    return f"{table.files:,} files, {name}"


def _compute_p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


def _add_pyiceberg_plan(report: Report, table: GeneratedTable) -> None:
    """Add one plan by PyIceberg to the row of the first range.

    PyIceberg takes seconds for a plan, and its time hardly depends on the filter.
    """
    name = RANGES[0]
    plan = PyIcebergPlanner(table.metadata_location).plan(FILTERS[name].build_expression(table))
    row = next(row for row in report.rows if row.case == _format_case(table, name))
    row.values[PYICEBERG] = plan.ms


async def _compare_with_memory(
    report: Report, table: GeneratedTable, seamark_planner: OurPlanner, memory: Bandwidth
) -> None:
    """Add the ratio of the time to compare bounds to the time to read their bytes from memory."""
    schema = seamark_planner.metadata.current_schema
    for name in RANGES:
        filter_case = FILTERS[name]
        durations_ms = []
        for round_number in range(PLANS_PER_TURN):
            _, scan = await seamark_planner.scan(
                filter_case.build_expression(table, UNUSED_ROUND_NUMBER + round_number)
            )
            durations_ms.append(
                next(stage.microseconds for stage in scan.stages if stage.name == "column_stats") / 1000
            )
        touched_bytes = table.files * MASK_BYTES_PER_FILE
        for column_name, side in filter_case.columns:
            column = schema.column(schema.index.by_name[column_name])
            assert column is not None
            assert isinstance(column.type, str)
            stats = scan.view.find_statistics(column.id, column.type)
            for packed_column in getattr(stats, side)[0].packed:
                touched_bytes += packed_column.width * table.files // len(scan.view.blocks)
        elapsed_ms, floor_ms = statistics.median(durations_ms), memory.compute_floor_ms(touched_bytes)
        report.bounds[f"{_format_case(table, name)}: {touched_bytes / 1e6:.1f} MB of bounds"] = (
            f"{floor_ms:.3f} ms at that speed; the scan took {elapsed_ms:.3f} ms, "
            f"{elapsed_ms / floor_ms:.1f} times as long"
        )


def _report_growth(report: Report, figures_by_size: dict[int, dict[str, float]]) -> None:
    if not {100_000, 1_000_000} <= figures_by_size.keys():
        return
    small_results, large_results = figures_by_size[100_000], figures_by_size[1_000_000]
    values = {name: large_results[name] / small_results[name] for name in (OURS, JAVA)}
    case = "1,000,000 over 100,000 files, ordered column"
    report.rows.append(Row(case, "growth", "×", values, peer=JAVA, goal=GROWTH_GOAL))
