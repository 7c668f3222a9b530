"""How long does a prefix lookup take: the statistics of one column in the files of one partition?

There are 10 million entries (100 columns of 100,000 files), of which 10,000 match. The peers store the same entries in
Parquet, LMDB and Avro, sorted by column and partition (`lookup_peers.py`), and return the result of their fastest
interface. Seamark reads the columns of its blocks. Answers must agree in the numbers of rows, values and nulls.
Successive lookups are of different partitions, and all are warm: the files are in the page cache, and the engines have
read them before. Over HTTP, Seamark answers with an Arrow IPC stream, and is compared with the peers' time without
encoding and network.

Each store is queried in two ways: for bounds and counts with file numbers, and with file names. The values of LMDB
contain all fields in both cases, and are not decoded.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.bounds import measure_transfer_ms
from bench.measure import Worker, drive_workers
from bench.planning.columns import START_DAY, build_columns
from bench.planning.layout import format_day
from bench.planning.lookup_peers import (
    Avro,
    ComparedAnswer,
    DataFusionLookup,
    DuckDBLookup,
    Lmdb,
    LookupPeer,
    create_stores,
)
from bench.planning.ours import OurPlanner, open_our_planner
from bench.planning.plans import PlansDiffer
from bench.planning.served import build_stats_request, register_generated_table, run_seamark
from bench.planning.tables import CACHE, GeneratedTable, generate_table
from bench.report import OURS, Report, Row
from bench.targets import LOAD_CORE, BenchTarget, pin_to_core
from bench.wire import Request
from seamark.metaserver.planner.lookup.lookup import FoundFiles, RequestedColumn, find_files_by_prefix
from seamark.metaserver.planner.lookup.prefix import parse_prefix
from seamark.metaserver.planner.scan.request import ScanRequest

COLUMN = "quantity"
COUNTS = ("value_counts", "null_value_counts", "nan_value_counts")
READ_COLUMNS = (*COUNTS, "lower", "upper")
FIELDS = ("value-count", "null-value-count", "nan-value-count", "lower-bound", "upper-bound")
GOAL, HTTP_GOAL = 100, 20
"""The goals: how many times faster than the best peer, before encoding and over HTTP."""
PLANS_PER_ROUND = 20


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report("planning_lookup", "How long does a prefix lookup take?", peer="the fastest of the other stores")
    generated_table = (
        generate_table(3_200, files_per_day=320)
        if quick
        else generate_table(100_000, column_count=100, files_per_day=10_000)
    )
    object_stores = create_stores(generated_table)
    indexed_peers: list[LookupPeer] = [
        DataFusionLookup(object_stores),
        DuckDBLookup(object_stores),
        Lmdb(object_stores),
    ]
    async with open_our_planner(folder / "home", generated_table) as seamark_planner:
        rounds = 2 if quick else 30
        for with_names in (False, True):
            await _measure_before_encoding(
                report, generated_table, seamark_planner, indexed_peers, names=with_names, rounds=rounds
            )
    with run_seamark(folder, CACHE) as target, pin_to_core(LOAD_CORE):
        await register_generated_table(target, generated_table)
        for row in tuple(report.rows):
            await _measure_over_http(report, generated_table, target, row, seconds=0.3 if quick else 3.0)
    _add_avro_lookup(report, generated_table, Avro(object_stores))
    for peer in indexed_peers:
        peer.close()
    report.notes.append(
        f"{generated_table.files * generated_table.columns:,} entries, {generated_table.files_per_day:,} match; "
        f"the column is {COLUMN}, an int. Best of"
        " Parquet (uncompressed, a row group a column, page index, 64 KB pages), LMDB and Avro (uncompressed)."
    )
    return report


async def _measure_before_encoding(
    report: Report,
    table: GeneratedTable,
    seamark_planner: OurPlanner,
    peers: list[LookupPeer],
    *,
    names: bool,
    rounds: int,
) -> None:
    column_id = _find_column_id(table)
    days = [START_DAY + number for number in range(table.files // table.files_per_day)]
    durations: dict[str, list[float]] = {OURS: [], **{peer.name: [] for peer in peers}}
    view = await seamark_planner.planner.view(seamark_planner.metadata, ScanRequest())
    column = RequestedColumn(column_id, "int")

    def look_up(day: int, slashes: int = 0) -> dict[str, Any]:
        """Return the answer for the prefix of a day. Trailing slashes make each prefix differ."""
        lookup_result = find_files_by_prefix(
            view, parse_prefix(f"day={format_day(day)}" + "/" * slashes, seamark_planner.metadata)
        )
        return _read_statistics(lookup_result, column, with_paths=names)

    repeated_seconds: list[float] = []

    for number in range(rounds):
        day = days[number % len(days)]
        expected = summarize_statistics(look_up(day))
        for second_number in range(PLANS_PER_ROUND):
            second_day = days[(number + second_number) % len(days)]
            question_number = number * PLANS_PER_ROUND + second_number
            durations[OURS].append(
                _measure_ms(partial(look_up, slashes=1 + question_number // len(days)), second_day)[0]
            )
            repeated_seconds.append(_measure_ms(look_up, second_day)[0])
        for peer in peers if number % 2 else reversed(peers):
            ms, answer = _measure_ms(partial(peer.lookup, column_id, names=names), day)
            durations[peer.name].append(ms)
            if peer.summarize_answer(answer) != expected:
                raise PlansDiffer(f"{peer.name} found {peer.summarize_answer(answer)}, ours {expected}")
    values = {name: statistics.median(times) for name, times in durations.items()}
    best = min((peer.name for peer in peers), key=lambda name: values[name])
    case = "statistics and file names" if names else "statistics"
    goal = None if names else values[best] / GOAL
    report.rows.append(Row(case, "before encoding", "ms", values, peer=best, goal=goal))
    report.notes.append(
        f"{case}: the fastest peer is {best}; best single times "
        + _format_best(durations)
        + "; ours of prefixes that were asked"
        f" before {statistics.median(repeated_seconds):.3g} ms, at best {min(repeated_seconds):.3g} ms."
    )


async def _measure_over_http(
    report: Report, table: GeneratedTable, target: BenchTarget, peer_row: Row, seconds: float
) -> None:
    """Add a row for Seamark over HTTP to the report. `peer_row` has the figures of the peers for the same question."""
    fields = ("file-path" if peer_row.case.endswith("names") else "file", *FIELDS)
    days = [START_DAY + number for number in range(table.files // table.files_per_day)]
    requests = [build_stats_request(table, COLUMN, f"day={format_day(day)}", fields) for day in days]
    answer = await target.call(requests[0])
    rows = pa.ipc.open_stream(answer.body).read_all().num_rows
    if rows != table.files_per_day:
        raise PlansDiffer(f"the answer over HTTP has {rows} entries instead of {table.files_per_day}")
    sample = await drive_workers(target, [_repeat_forever(requests)], seconds=seconds)
    values = {**peer_row.values, OURS: sample.compute_quantile(0.5)}
    goal = None if peer_row.goal is None else values[peer_row.peer] / HTTP_GOAL
    report.rows.append(Row(peer_row.case, "Arrow over HTTP, p50", "ms", values, peer=peer_row.peer, goal=goal))
    report.notes.append(
        f"{peer_row.case} over HTTP: {len(answer.body):,} bytes, server CPU {sample.server_cpu_us:.0f} µs,"
        f" p99 {sample.compute_quantile(0.99):.2f} ms; the bytes alone take"
        f" {await measure_transfer_ms(answer.body):.3f} ms from a bare"
        " socket."
    )


def _repeat_forever(requests: Sequence[Request]) -> Worker:
    # The caller sends each answer into this generator. An `itertools.cycle` has no send().
    yield from (item for item in itertools.cycle(requests))


def _read_statistics(found_files: FoundFiles, column: RequestedColumn, *, with_paths: bool) -> dict[str, Any]:
    """Return all statistics of the column in the files found, as arrays by name.

    With `with_paths`, the array `file` has the paths of the files, otherwise their numbers in the planner's memory.
    """
    stats = found_files.find_statistics(column)
    answer: dict[str, Any] = dict(zip(READ_COLUMNS, stats.read(READ_COLUMNS), strict=True))
    answer["file"] = found_files.read_texts("file_path") if with_paths else found_files.list_entry_ids()
    return answer


def summarize_statistics(answer: dict[str, Any]) -> ComparedAnswer:
    """Return the numbers of rows, values and nulls of Seamark's answer, as each peer does for its answer."""
    values, nulls = answer["value_counts"], answer["null_value_counts"]
    return ComparedAnswer(len(values), int(values.sum()), int(nulls.sum()))


def _find_column_id(table: GeneratedTable) -> int:
    return next(column.id for column in build_columns(table.columns) if column.name == COLUMN)


def _measure_ms(work: Callable[[int], Any], day: int) -> tuple[float, Any]:
    started_s = time.perf_counter()
    answer = work(day)
    return (time.perf_counter() - started_s) * 1000, answer


def _format_best(durations: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {min(times):.3g} ms" for name, times in durations.items())


def _add_avro_lookup(report: Report, table: GeneratedTable, peer: Avro) -> None:
    """Add one lookup to the first row; the Avro reader reads the whole file."""
    ms, _ = _measure_ms(partial(peer.lookup, _find_column_id(table), names=True), START_DAY)
    report.rows[0].values[peer.name] = ms
