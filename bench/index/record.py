"""How long does it take to find the row of a key among 10 million, and the rows of 100,000 keys?

The peers read the same data from one Parquet file with key, data file and position. The file is sorted by key, has
statistics and a page index, and is in the page cache. The peers use both cores. Seamark uses one core, and its blob is
mapped from the page cache. Its time includes the hashing of the keys. Every key exists and is looked up once, and
every system must return the right row. The systems are timed alternately.

In the cold case, Seamark's pages are first removed from the page cache, and then read by pread, as a server reads
ranges of a blob that it has not loaded.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import datafusion
import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.report import OURS, AnswersDiffer, Report, Row
from seamark.formats.index.kernels._record import row_hash
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_rows
from seamark.formats.index.keys.keys import make_key
from seamark.formats.index.kinds.record import (
    TRAILER_BYTES,
    Fences,
    RecordBlob,
    build_records,
    encode_record_entries,
    merge_records,
)

KEYS, QUICK_KEYS = 10_000_000, 100_000
FILES = 10
BATCH_KEYS = 100_000
ONE_GOAL_US, BATCH_GOAL, READS_GOAL, BYTES_GOAL = 10.0, 1.0, 2, 30
ONE_GOAL, MANY_GOAL = 500, 10
"""The goals: how many times faster than the fastest reader of Parquet, for one key and for many keys."""
SINGLE, SLICES = 20, 20
"""Our single lookups are timed `SINGLE` at once, because a clock is too coarse for one, in `SLICES` slices a round."""

Values = npt.NDArray[np.int64]
Locations = npt.NDArray[np.int64]
"""int64[keys, 2]: the data file and the position of each key."""


class KeyAnswerer(Protocol):
    """A system that finds the data file and the position of keys."""

    name: str

    def look_up_one(self, key: int) -> tuple[int, int]: ...

    def look_up_many(self, keys: pa.Array) -> Locations:
        """Return the data file and the position in it of each key, in the order of the keys."""
        ...


class SeamarkRecordIndex:
    name = OURS

    def __init__(self, record: RecordBlob) -> None:
        self._record = record

    def look_up_one(self, key: int) -> tuple[int, int]:
        ((file, position),) = self._record.find(*row_hash([make_key(key, "long")]))
        return file, position

    def look_up_many(self, keys: pa.Array) -> Locations:
        columns = [convert_to_keys(keys, "long")]
        _, files, positions = self._record.lookup(hash_rows(columns, 0), hash_rows(columns, 1))
        return np.stack([files, positions], axis=1)


class DuckDBKeys:
    name = "parquet-duckdb"

    def __init__(self, path: Path) -> None:
        self._db = duckdb.connect()
        self._db.execute("SET parquet_metadata_cache = true")
        self._db.execute(f"CREATE VIEW entries AS FROM read_parquet('{path}')")

    def look_up_one(self, key: int) -> tuple[int, int]:
        rows = self._db.execute("SELECT file, position FROM entries WHERE k = ?", [key]).fetchall()
        ((file, position),) = rows
        return file, position

    def look_up_many(self, keys: pa.Array) -> Locations:
        table = pa.table({"k": keys, "query": np.arange(len(keys))})
        self._db.register("asked", table)
        result = self._db.execute("SELECT query, file, position FROM entries JOIN asked USING (k)").fetchnumpy()
        return _sort_places(result["query"], result["file"], result["position"])


class DataFusionKeys:
    name = "parquet-datafusion"

    def __init__(self, path: Path) -> None:
        settings = {
            "datafusion.execution.parquet.pushdown_filters": "true",
            "datafusion.execution.parquet.reorder_filters": "true",
        }
        self._context = datafusion.SessionContext(datafusion.SessionConfig(settings))
        self._context.register_parquet("entries", str(path))

    def look_up_one(self, key: int) -> tuple[int, int]:
        result = pa.Table.from_batches(
            self._context.sql(f"SELECT file, position FROM entries WHERE k = {key}").collect()
        )
        return result["file"][0].as_py(), result["position"][0].as_py()

    def look_up_many(self, keys: pa.Array) -> Locations:
        self._context.deregister_table("asked")
        batch = pa.record_batch({"k": keys, "query": np.arange(len(keys))})
        self._context.register_record_batches("asked", [[batch]])
        sql = "SELECT query, file, position FROM entries JOIN asked ON entries.k = asked.k"
        result = pa.Table.from_batches(self._context.sql(sql).collect())
        return _sort_places(*(result[name].to_numpy() for name in ("query", "file", "position")))


class PyArrowKeys:
    name = "parquet-pyarrow"

    def __init__(self, path: Path) -> None:
        self._path = path

    def look_up_one(self, key: int) -> tuple[int, int]:
        table = pq.read_table(self._path, columns=["file", "position"], filters=pc.field("k") == key)
        return table["file"][0].as_py(), table["position"][0].as_py()

    def look_up_many(self, keys: pa.Array) -> Locations:
        """Read the whole file, because pyarrow's filters do not push down a list."""
        table = pq.read_table(self._path)
        positions = np.searchsorted(table["k"].to_numpy(), keys.to_numpy())  # The column is sorted.
        return np.stack([table[name].to_numpy()[positions] for name in ("file", "position")], axis=1)


def _sort_places(query: Any, file: Any, position: Any) -> Locations:
    places = np.empty((len(query), 2), np.int64)
    places[query, 0], places[query, 1] = file, position
    return places


async def run(folder: Path, *, quick: bool = False) -> Report:
    """Build a record index and a sorted Parquet file of the same keys, and compare lookups of one key and of many."""
    report = Report("index_record", "Which row has a key?", peer="the fastest reader of Parquet sorted by key")
    rows, batch, rounds = (QUICK_KEYS, 10_000, 2) if quick else (KEYS, BATCH_KEYS, 20)
    keys = np.unique(np.random.default_rng(7).integers(-(1 << 63), 1 << 63, rows + rows // 100))
    keys = np.random.default_rng(8).permutation(keys)[:rows]
    blob = _measure_and_build_index(report, folder, keys)
    record = _map_record(blob)
    record.verify()  # Load and verify every page, so that the timed lookups do no other work.
    path = _write_parquet(folder / "entries.parquet", keys)
    answerers = [SeamarkRecordIndex(record), DuckDBKeys(path), DataFusionKeys(path), PyArrowKeys(path)]
    _measure_single_keys(report, answerers, keys, rounds)
    _measure_batches(report, answerers, keys, batch, rounds)
    _measure_cold(report, blob, keys, 200 if quick else 2_000)
    size, stored_bytes = blob.stat().st_size, os.path.getsize(path)
    report.rows.append(
        Row("size", "an entry", "B", {OURS: size / rows, "parquet": stored_bytes / rows}, goal=BYTES_GOAL)
    )
    report.notes += [
        f"{rows:,} distinct random longs in {FILES} data files, one run. The sorted Parquet file of the peers has "
        f"{stored_bytes / 1e6:.0f} MB.",
        "Times are medians. Seamark uses one core, and its times include the hashing of keys. Each peer uses both "
        "cores and its fastest interface.",
    ]
    return report


def _measure_and_build_index(report: Report, folder: Path, keys: Values) -> Path:
    """Build the index as an indexer does, report the speed, and return the path of the index's blob.

    The indexer makes a sorted list of entries (a run) for each data file, and merges all runs. The keys are also
    written to `column.parquet`, for the peers that read Parquet.
    """
    columns = [pa.array(part) for part in np.array_split(keys, FILES)]
    started_s = time.thread_time()
    entries = [build_records([convert_to_keys(column, "long")]) for column in columns]
    build_s = time.thread_time() - started_s
    data = folder / "column.parquet"
    pq.write_table(pa.table({"k": keys}), data, use_dictionary=False)
    started_s = time.thread_time()
    with pq.ParquetFile(data) as file:
        file.read(use_threads=False)
    read_s = time.thread_time() - started_s
    rates = {OURS: len(keys) / build_s / 1e6, "parquet-read": len(keys) / read_s / 1e6}
    report.rows.append(Row("build", "from Arrow, one core", "M rows/s", rates, lower_is_better=False))
    parts = []
    for number, entry in enumerate(entries):
        _write_parts(folder / f"{number}.run", encode_record_entries([entry]))
        parts.append(_map_record(folder / f"{number}.run"))
    started_s = time.thread_time()
    _write_parts(folder / "blob", merge_records([(part, np.ones(1, np.bool_)) for part in parts]))
    merge_rate = len(keys) / (time.thread_time() - started_s) / 1e6
    report.rows.append(
        Row(f"merge of {FILES} runs", "one core, written", "M entries/s", {OURS: merge_rate}, lower_is_better=False)
    )
    return folder / "blob"


def _write_parts(path: Path, parts: Iterable[Any]) -> None:
    with path.open("wb") as out:
        out.writelines(parts)


def _map_record(path: Path) -> RecordBlob:
    with path.open("rb") as file:
        return RecordBlob(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


def _write_parquet(path: Path, keys: Values) -> Path:
    """Write the keys to a Parquet file.

    The keys are sorted, so only one row group and one page can contain a key. The file is uncompressed, because readers
    are fastest without compression.
    """
    order = np.argsort(keys)
    sizes = [len(part) for part in np.array_split(keys, FILES)]
    file = np.repeat(np.arange(FILES), sizes)
    position = np.concatenate([np.arange(size) for size in sizes])
    table = pa.table({"k": keys[order], "file": file[order].astype(np.int32), "position": position[order]})
    pq.write_table(
        table,
        path,
        compression="NONE",
        use_dictionary=["file"],
        write_page_index=True,
        row_group_size=1 << 17,
        data_page_size=1 << 15,
        sorting_columns=[pq.SortingColumn(0)],
    )
    return path


def _measure_single_keys(report: Report, answerers: list[KeyAnswerer], keys: Values, rounds: int) -> None:
    """Measure lookups of single keys, and add the median time of each system to the report.

    The report has two goals: `ONE_GOAL_US`, a time in microseconds, and `ONE_GOAL`, which states how many times faster
    than the fastest peer Seamark must be.
    """
    durations: dict[str, list[float]] = {answerer.name: [] for answerer in answerers}
    draw = np.random.default_rng(9)
    for round_number in range(rounds):
        for item in answerers if round_number % 2 else reversed(answerers):
            # A peer's lookup is long enough to be timed alone. Ours is too short for the clock, so `SINGLE` lookups are
            # timed together.
            lookup_count, sample_count = (SINGLE, SLICES) if item.name == OURS else (1, 3)
            for row_numbers in draw.choice(len(keys), (sample_count, lookup_count), replace=False):
                values = keys[row_numbers].tolist()
                started_s = time.perf_counter()
                results = [item.look_up_one(value) for value in values]
                durations[item.name].append((time.perf_counter() - started_s) * 1e6 / lookup_count)
                if results != _compute_expected_places(keys, row_numbers):
                    raise AnswersDiffer(f"{item.name}, one key")
    values_us = {name: statistics.median(times) for name, times in durations.items()}
    best = _find_best(answerers, values_us)
    report.rows += [
        Row("one key", "lookup", "µs", values_us, peer=best, goal=ONE_GOAL_US),
        Row("one key", "against the peer", "µs", values_us, peer=best, goal=values_us[best] / ONE_GOAL),
    ]


def _compute_expected_places(keys: Values, row_numbers: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    ends = np.cumsum([len(part) for part in np.array_split(keys, FILES)])
    files = np.searchsorted(ends, row_numbers, "right")
    starts = ends - np.diff(ends, prepend=0)
    return list(zip(files.tolist(), (row_numbers - starts[files]).tolist(), strict=True))


def _find_best(answerers: list[KeyAnswerer], values: dict[str, float]) -> str:
    return min((answerer.name for answerer in answerers if answerer.name != OURS), key=lambda name: values[name])


def _measure_batches(report: Report, answerers: list[KeyAnswerer], keys: Values, batch: int, rounds: int) -> None:
    durations_ms: dict[str, list[float]] = {answerer.name: [] for answerer in answerers}
    cpu_ms: dict[str, list[float]] = {answerer.name: [] for answerer in answerers}
    draw = np.random.default_rng(10)
    for round_number in range(rounds):
        query = draw.choice(len(keys), batch, replace=False)
        wanted_keys, expected = pa.array(keys[query]), np.array(_compute_expected_places(keys, query))
        for item in answerers if round_number % 2 else reversed(answerers):
            started_s, cpu_s_before = time.perf_counter(), time.process_time()
            result = item.look_up_many(wanted_keys)
            cpu_ms[item.name].append((time.process_time() - cpu_s_before) * 1000)
            durations_ms[item.name].append((time.perf_counter() - started_s) * 1000)
            if not np.array_equal(result, expected):
                raise AnswersDiffer(f"{item.name}, {batch} keys")
    case = f"{batch:,} keys"
    for measure, times in (("lookup", durations_ms), ("lookup, CPU of all cores", cpu_ms)):
        values = {name: statistics.median(time) for name, time in times.items()}
        best = _find_best(answerers, values)
        report.rows.append(Row(case, measure, "ms", values, peer=best, goal=values[best] / MANY_GOAL))
        rates = {name: batch / ms / 1000 for name, ms in values.items()}
        options: dict[str, Any] = {"lower_is_better": False, "peer": best, "goal": BATCH_GOAL}
        report.rows.append(Row(case, measure.replace("lookup", "rate"), "M keys/s", rates, **options))


def _measure_cold(report: Report, blob: Path, keys: Values, times: int) -> None:
    """Measure lookups in an index file whose pages are on the disk.

    The first key of each page (the fences) is in memory and selects the page to read. Before each lookup, the pages are
    removed from the page cache of the operating system.
    """
    descriptor = os.open(blob, os.O_RDONLY)
    size = os.fstat(descriptor).st_size
    trailer = os.pread(descriptor, TRAILER_BYTES, size - TRAILER_BYTES)
    directory_bytes = Fences.compute_directory_bytes(trailer, size)
    fences = Fences(os.pread(descriptor, directory_bytes, size - directory_bytes), size)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_RANDOM)
    durations, reads, pages = [], [], []
    for position in np.random.default_rng(11).choice(len(keys), times, replace=False):
        os.posix_fadvise(descriptor, 0, size, os.POSIX_FADV_DONTNEED)
        started_s = time.perf_counter()
        pair = row_hash([make_key(int(keys[position]), "long")])
        hi, lo = (np.array([half], np.uint64) for half in pair)
        ranges = fences.list_page_ranges(hi, lo)
        found_rows = fences.look_up_in_pages(
            hi, lo, [os.pread(descriptor, length, offset) for offset, length in ranges]
        )
        durations.append((time.perf_counter() - started_s) * 1e6)
        reads.append(len(ranges))
        pages.append(sum(length for _, length in ranges) / 4096)
        if [(int(found_rows[1][0]), int(found_rows[2][0]))] != _compute_expected_places(keys, np.array([position])):
            raise AnswersDiffer(f"a lookup with pages on the disk finds {found_rows}, another row than that of the key")
    os.close(descriptor)
    report.rows.append(Row("one key, cold", "reads, at most", "", {OURS: max(reads)}, goal=READS_GOAL))
    report.rows.append(Row("one key, cold", "lookup", "µs", {OURS: statistics.median(durations)}))
    report.notes.append(
        f"Cold: {statistics.mean(pages):.3f} pages of 4 KiB a key, always in one read; fences take"
        f" {len(fences.first_hashes) * 8 / 1e6:.2f} MB of memory."
    )
