"""How long does it take to find which of 100,000 data files may contain a key?

`python -m bench.index.bloom [--quick]`

Seamark probes one merged blob, once in memory and once in a file, of which it reads only the ranges that a probe needs.
A reader of Parquet without an index must open every file, because the position of the Bloom filter is in the footer.
The benchmark measures this reader on a sample of real files with the same keys, and multiplies the time by the number
of files per sampled file. Both run alternately with keys that were not probed before, and both must find the file with
the key.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.planning.limits import measure_bandwidth
from bench.report import OURS, Report, Row
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_key
from seamark.formats.index.keys.keys import make_key
from seamark.formats.index.kinds.bloom import (
    FIXED_SIZE,
    Bloom,
    FileBloom,
    build_filter,
    encode_filters,
    merge_filters,
    read_header_size,
)

FILES, QUICK_FILES = 100_000, 2_000
KEYS = 1_000
"""The number of keys of each file.

The keys are drawn from 2^62 values, so the minimum and maximum of a file exclude nothing.
"""
SAMPLE, QUICK_SAMPLE = 500, 50
ROUNDS = 5
PROBES_PER_ROUND = 200
FOOTERS, DUCKDB = "parquet footers", "duckdb"
GOAL_MS, GOAL_READS, GOAL_TIMES, GOAL_BUILD, GOAL_FPP = 0.2, 7, 50, 10, 1.5


def draw_values(file: int) -> Any:
    return np.random.default_rng((20_260_000, file)).integers(0, 2**62, KEYS)


async def run(folder: Path, *, quick: bool = False) -> Report:
    files, sample = (QUICK_FILES, QUICK_SAMPLE) if quick else (FILES, SAMPLE)
    report = Report(
        "index_bloom",
        "Which data files may hold a key?",
        peer=f"reading the footers of {files:,} Parquet files with Bloom filters, DuckDB {duckdb.__version__}",
    )
    report.bounds = {"memory of this machine, one core": measure_bandwidth(*((1 << 24,) if quick else ())).write_text()}
    _measure_building(report, quick=quick)
    entries = [build_filter(convert_to_keys(pa.array(draw_values(file)), "long")) for file in range(files)]
    blob = _measure_assembly(report, entries, folder)
    paths = [_write_parquet(folder / f"{file}.parquet", draw_values(file)) for file in range(sample)]
    _measure_probes(report, blob, folder / "blob", paths, files)
    _measure_absent_keys(report, blob, files)
    bytes_per_file, data = len(blob) / files, sum(os.path.getsize(path) for path in paths) / sample
    report.notes += [
        f"{files:,} files of {KEYS:,} distinct longs, one group: {len(blob) / 1e6:.0f} MB of index,"
        f" {8 * bytes_per_file / KEYS:.1f} bits a key, {bytes_per_file / data:.3f} times the size of "
        f"these Parquet files (two columns).",
        f"Parquet: {sample} real files by DuckDB with Bloom filters at 1 % in the page cache, times {files // sample}."
        f" `{DUCKDB}` is parquet_bloom_probe on both cores; `{FOOTERS}` is pyarrow's read_metadata alone, one core.",
        "Cold: the header is in memory, the rows are read from a file by pread, a range each, from the page cache.",
    ]
    return report


def _measure_building(report: Report, *, quick: bool) -> None:
    """Measure how fast a filter is built from an Arrow column, for one file with many keys."""
    rows = 100_000 if quick else 1_000_000
    longs = pa.array(np.random.default_rng(1).integers(0, 2**62, rows))
    texts = pa.array([f"customer-{value:019d}" for value in longs.to_pylist()])
    for name, kind, column in (("longs", "long", longs), ("strings of 28 bytes", "string", texts)):
        elapsed = _measure_median_ms(
            lambda column=column, kind=kind: build_filter(convert_to_keys(column, kind)), 9, time.thread_time
        )
        rate = rows / elapsed / 1000
        goal = GOAL_BUILD if kind == "long" else None
        case = f"build, {rows:,} distinct {name}"
        report.rows.append(Row(case, "one core", "M keys/s", {OURS: rate}, lower_is_better=False, goal=goal))


def _measure_assembly(report: Report, entries: list[FileBloom], folder: Path) -> bytes:
    """Encode ten parts, merge them into one blob as the indexer does, and return the blob.

    The function also writes the blob to the file that cold probes read.
    """
    tenth = -(-len(entries) // 10)
    started_s = time.thread_time()
    parts = [Bloom(b"".join(encode_filters(entries[start : start + tenth]))) for start in range(0, len(entries), tenth)]
    encode_s = time.thread_time() - started_s
    started_s = time.thread_time()
    blob = b"".join(merge_filters([(part, np.ones(part.files, dtype=np.bool_)) for part in parts]))
    merge_s = time.thread_time() - started_s
    assert blob == b"".join(encode_filters(entries))
    for name, elapsed in (("encode ten blobs", encode_s), ("merge them into one", merge_s)):
        report.rows.append(
            Row(name, "one core", "MB/s", {OURS: len(blob) / elapsed / 1e6}, lower_is_better=False),
        )
    (folder / "blob").write_bytes(blob)
    return blob


def _write_parquet(path: Path, values: Any) -> str:
    """Write one file with DuckDB, with a Bloom filter of each column, and return its path."""
    table = pa.table({"k": values, "v": np.arange(len(values), dtype=np.float64)})
    with duckdb.connect() as connection:
        connection.register("t", table)
        connection.execute(
            f"COPY t TO '{path}' (FORMAT parquet, COMPRESSION zstd, DICTIONARY_SIZE_LIMIT {2 * len(values)},"
            " BLOOM_FILTER_FALSE_POSITIVE_RATIO 0.01)"
        )
    assert pq.read_metadata(path).row_group(0).column(0).bloom_filter_offset is not None
    return str(path)


def _measure_probes(report: Report, blob: bytes, blob_path: Path, paths: list[str], files: int) -> None:
    """Compare probes of the index, in memory and from a file, with reads of the Parquet filters."""
    rng = np.random.default_rng(3)
    warm, header = Bloom(blob), blob[: read_header_size(blob[:FIXED_SIZE])]
    cold = Bloom(header, len(blob))
    descriptor = os.open(blob_path, os.O_RDONLY)
    connection = duckdb.connect()
    connection.execute("SET enable_external_file_cache = false")
    durations: dict[str, list[float]] = {name: [] for name in ("warm", "cold", FOOTERS, DUCKDB)}
    reads = 0

    def ask_cold(hashes: Any) -> Any:
        nonlocal reads
        ranges = cold.list_byte_ranges(hashes)
        reads = max(reads, len(ranges))
        return cold.probe_bytes(hashes, [os.pread(descriptor, length, offset) for offset, length in ranges])

    scale = files / len(paths)  # Only a sample of the files exists. The time for all files is proportional.
    for round_number in range(ROUNDS):
        for _ in range(PROBES_PER_ROUND):
            file = int(rng.integers(files))
            hashes = _compute_hash(int(draw_values(file)[rng.integers(KEYS)]))
            for name, ask in (("warm", warm.probe), ("cold", ask_cold)):
                found_files, elapsed = _measure_ms(lambda ask=ask, hashes=hashes: ask(hashes))
                assert found_files[file] == 1
                durations[name].append(elapsed)
        file = round_number * 7 % len(paths)
        key = int(draw_values(file)[round_number])
        found_files, elapsed = _measure_ms(lambda key=key: _find_with_duckdb(connection, paths, key))
        assert paths[file] in found_files
        durations[DUCKDB].append(elapsed * scale)
        durations[FOOTERS].append(_measure_ms(lambda: [pq.read_metadata(path) for path in paths])[1] * scale)
    os.close(descriptor)
    medians = {name: statistics.median(values) for name, values in durations.items()}
    peers = {FOOTERS: medians[FOOTERS], DUCKDB: medians[DUCKDB]}
    case = f"1 key × {files:,} files"
    report.rows += [
        Row(f"{case}, warm", "probe", "ms", {OURS: medians["warm"], **peers}, peer=DUCKDB, goal=GOAL_MS),
        Row(f"{case}, cold", "probe", "ms", {OURS: medians["cold"], **peers}, peer=DUCKDB),
        Row(f"{case}, cold", "range reads of a group", "reads", {OURS: float(reads)}, goal=GOAL_READS),
    ]
    minimum = min(peers.values()) / medians["cold"]
    values = {OURS: minimum}
    report.rows.append(
        Row(f"{case}, cold", "over the faster peer", "×", values, lower_is_better=False, goal=GOAL_TIMES)
    )
    sorted_durations = sorted(durations["warm"])
    p99 = sorted_durations[len(sorted_durations) * 99 // 100]
    report.notes.append(f"Warm: median of {len(sorted_durations):,} keys, each of one file at least; p99 {p99:.3f} ms.")


def _measure_absent_keys(report: Report, blob: bytes, files: int) -> None:
    """Measure the false positives among keys that no file has, and the time to probe lists of keys."""
    bloom, rng = Bloom(blob), np.random.default_rng(5)
    absent_hashes = [_compute_hash(int(value)) for value in rng.integers(2**62, 2**63, 500)]
    false_positive_share = statistics.mean(float(bloom.probe(hashes).mean()) for hashes in absent_hashes)
    report.rows.append(Row("key of no file", "false positives", "%", {OURS: 100 * false_positive_share}, goal=GOAL_FPP))
    for count in (10, 100):
        lists = [np.concatenate(absent_hashes[start : start + count]) for start in range(0, 500, count)]
        elapsed = statistics.median(_measure_ms(lambda hashes=hashes: bloom.probe(hashes))[1] for hashes in lists)
        report.rows.append(Row(f"{count} keys × {files:,} files, warm", "probe", "ms", {OURS: elapsed}))


def _compute_hash(value: int) -> Any:
    return np.array([hash_key(make_key(value, "long"), 0)], dtype=np.uint64)


def _find_with_duckdb(connection: Any, paths: list[str], key: int) -> set[str]:
    rows = connection.execute(
        f"SELECT file_name FROM parquet_bloom_probe({paths!r}, 'k', {key}) WHERE NOT bloom_filter_excludes"
    ).fetchall()
    return {name for (name,) in rows}


def _measure_ms(act: Callable[[], Any]) -> tuple[Any, float]:
    """Call `act`, and return its result and the milliseconds that it took."""
    started_s = time.perf_counter()
    actual_answer = act()
    return actual_answer, (time.perf_counter() - started_s) * 1000


def _measure_median_ms(act: Callable[[], Any], times: int, clock: Callable[[], float]) -> float:
    durations = []
    for _ in range(times):
        started_s = clock()
        act()
        durations.append((clock() - started_s) * 1000)
    return statistics.median(durations)
