"""How long does the bitmap index take to find the matching rows?

`python -m bench.index.bitmap [--quick]`

The table has a million rows, and two columns of the same cardinality in random order. Every system returns the
ascending positions of the matching rows, and all results must be equal. Seamark probes an open index. The Parquet
readers have the file in the page cache, read only the needed columns, and use both cores. Roaring has the same slices
of ranks in memory, with optimised runs, and uses the same algorithm. The systems are timed alternately.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyroaring

from bench.report import OURS, AnswersDiffer, Report, Row
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import KeyRange, KeyRanges, Keys
from seamark.formats.index.kinds import bitmap
from seamark.formats.index.kinds.bitmap import Bitmap
from seamark.formats.index.kinds.bits import list_positions
from seamark.formats.index.kinds.slices import compute_slice_count

CARDINALITIES = (11, 1_000, 1_000_000)
AND_GOAL_MS, BUILD_GOAL = 1.0, 10.0
"""The goals: ms per million rows for an AND, and millions of rows per second for the build, on one core."""
GOAL = 15
"""The goal: how many times faster than the best Parquet reader."""
PYARROW, DUCKDB, ROARING = "parquet-pyarrow", "parquet-duckdb", "roaring"
COLUMNS = ("a", "b")
FILES, FILE_ROWS = 1_000, 1_000

Values = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Question:
    """A condition on each of `columns`: values less than `upper_bound`, or values in `among`."""

    name: str
    columns: tuple[str, ...]
    upper_bound: int | None = None
    among: tuple[int, ...] = ()


class RangeAnswerer(Protocol):
    """A system that returns the ascending positions of the rows that match a question."""

    name: str

    def answer(self, question: Question) -> Positions: ...


class SeamarkBitmap:
    name = OURS

    def __init__(self, columns: dict[str, Values]) -> None:
        self._blobs = {
            name: b"".join(bitmap.encode_bitmaps([bitmap.build_bitmap(_build_keys(column))]))
            for name, column in columns.items()
        }
        self.bitmaps = {name: Bitmap(memoryview(blob)) for name, blob in self._blobs.items()}

    def reopen(self) -> None:
        """Open the index again, as if none of its parts had been read or verified."""
        self.bitmaps = {name: Bitmap(memoryview(blob)) for name, blob in self._blobs.items()}

    def compute_bits(self, question: Question) -> npt.NDArray[np.uint64]:
        """Return the bits of the matching rows, 64 rows in each word."""
        if question.upper_bound is not None:
            ranges = KeyRanges("long", (KeyRange(None, _encode_value(question.upper_bound), False, True),))
        else:
            ranges = KeyRanges("long", tuple(KeyRange(key, key) for key in map(_encode_value, question.among)))
        return reduce(np.bitwise_and, (self.bitmaps[name].find_rows(0, ranges) for name in question.columns))

    def answer(self, question: Question) -> Positions:
        return list_positions(self.compute_bits(question))

    @property
    def size_bytes(self) -> int:
        return len(self._blobs["a"])


class PyArrowRanges:
    name = PYARROW

    def __init__(self, path: Path) -> None:
        self._path = path

    def answer(self, question: Question) -> Positions:
        table = pq.read_table(self._path, columns=list(question.columns))
        return np.flatnonzero(
            reduce(np.bitwise_and, (_compute_mask(question, table[name]) for name in question.columns))
        )


def _compute_mask(question: Question, column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    if question.upper_bound is not None:
        mask = pc.less(column, question.upper_bound)
    elif len(question.among) == 1:
        mask = pc.equal(column, question.among[0])
    else:
        mask = pc.is_in(column, pa.array(question.among))
    return mask.to_numpy()


class DuckDBRanges:
    name = DUCKDB

    def __init__(self, path: Path) -> None:
        self._connection = duckdb.connect()
        self._path = path

    def answer(self, question: Question) -> Positions:
        condition = (
            f"< {question.upper_bound}"
            if question.upper_bound is not None
            else f"IN ({', '.join(map(str, question.among))})"
        )
        where = " AND ".join(f"{name} {condition}" for name in question.columns)
        result = self._connection.execute(
            f"SELECT file_row_number FROM read_parquet('{self._path}', file_row_number = true) WHERE {where}"
        ).fetchnumpy()
        return np.sort(result["file_row_number"])


class Roaring:
    """Slices of ranks as roaring bitmaps.

    The ranks of a column are its values, because the values are 0, 1, … .
    """

    name = ROARING

    def __init__(self, columns: dict[str, Values]) -> None:
        self._rows = len(columns["a"])
        self._slices = {name: self.build(column) for name, column in columns.items()}

    @staticmethod
    def build(values: Values) -> list[pyroaring.BitMap]:
        _, ranks = np.unique(values, return_inverse=True)
        slices = [
            pyroaring.BitMap(np.flatnonzero(ranks >> i & 1).astype(np.uint32)) for i in range(_count_bits(values))
        ]
        for item in slices:
            item.run_optimize()
        return slices

    def sum_bytes(self, name: str) -> int:
        """Return the total size in bytes of the bitmaps of a column."""
        return sum(len(item.serialize()) for item in self._slices[name])

    def answer(self, question: Question) -> Positions:
        combined_rows = reduce(
            pyroaring.BitMap.intersection, (self._find_rows(question, self._slices[name]) for name in question.columns)
        )
        return np.asarray(combined_rows.to_array()).astype(np.int64)

    def _find_rows(self, question: Question, slices: list[pyroaring.BitMap]) -> pyroaring.BitMap:
        if question.upper_bound is None:
            return pyroaring.BitMap.union(*(self._find_equal(slices, value) for value in question.among))
        all_rows = pyroaring.BitMap(range(self._rows))
        smaller_rows = pyroaring.BitMap()
        for i, bits in enumerate(slices):
            smaller_rows = (all_rows - bits) | smaller_rows if question.upper_bound >> i & 1 else smaller_rows - bits
        return smaller_rows

    def _find_equal(self, slices: list[pyroaring.BitMap], rank: int) -> pyroaring.BitMap:
        selected_slices = [bits for i, bits in enumerate(slices) if rank >> i & 1]
        outside_slices = [bits for i, bits in enumerate(slices) if not rank >> i & 1]
        result = (
            pyroaring.BitMap.intersection(*selected_slices) if selected_slices else pyroaring.BitMap(range(self._rows))
        )
        return result.difference(*outside_slices) if outside_slices else result


def _count_bits(values: Values) -> int:
    return compute_slice_count(int(values.max()) + 1)


def _encode_value(value: int) -> int:
    return value + (1 << 63)


def _build_keys(values: Values) -> Keys:
    return convert_to_keys(pa.array(values), "long")


async def run(folder: Path, *, quick: bool = False) -> Report:
    report = Report(
        "index_bitmap",
        "How long does the bitmap index take to say which rows match?",
        peer="the faster of pyarrow and DuckDB, reading Parquet",
    )
    rows, rounds = (50_000, 2) if quick else (1_000_000, 15)
    for cardinality in CARDINALITIES:
        _measure_cardinality(report, folder, rows, min(cardinality, rows), rounds)
    _measure_many_files(report, rounds)
    report.notes += [
        f"{rows:,} rows a file, two columns of longs in any order; Parquet as pyarrow writes it, with dictionary and"
        " snappy, in the page cache. Every answer is an array of row positions, and all agree, or this bench fails.",
        f"Roaring ({pyroaring.__version__}) has the same slices in memory. They are built with numpy's sort and "
        "pyroaring.",
        "Below: a < x AND b < x with x at 30 % of the values, 9 % of the rows.",
    ]
    return report


def _measure_cardinality(report: Report, folder: Path, rows: int, cardinality: int, rounds: int) -> None:
    rng = np.random.default_rng(cardinality)
    columns = {name: _draw_column(rng, rows, cardinality) for name in COLUMNS}
    path = folder / f"{cardinality}.parquet"
    pq.write_table(pa.table(columns), path)
    seamark_bitmap, roaring = SeamarkBitmap(columns), Roaring(columns)
    answerers: list[RangeAnswerer] = [seamark_bitmap, PyArrowRanges(path), DuckDBRanges(path), roaring]
    case = f"cardinality {cardinality:,}"
    for question in _list_questions(rng, cardinality):
        durations = _measure_in_turns(answerers, question, rounds)
        best = min((PYARROW, DUCKDB), key=lambda name: durations[name])
        report.rows.append(
            Row(f"{case}, {question.name}", "row positions", "ms", durations, peer=best, goal=durations[best] / GOAL)
        )
    conjunction = Question("AND", COLUMNS, upper_bound=max(1, cardinality * 3 // 10))
    per_million = 1e6 / rows
    bits_ms = (
        statistics.median(_measure_ms(lambda: seamark_bitmap.compute_bits(conjunction)) for _ in range(20 * rounds))
        * per_million
    )
    report.rows.append(Row(f"{case}, two-column AND", "bits", "ms", {OURS: bits_ms}, goal=AND_GOAL_MS))
    first: list[float] = []
    for _ in range(rounds):
        seamark_bitmap.reopen()
        first.append(_measure_ms(lambda: seamark_bitmap.answer(conjunction)))
    report.notes.append(
        f"{case}: the first query of a newly opened index takes {statistics.median(first):.2f} ms for both columns,"
        " including the checks of the checksums."
    )
    _measure_building(report, case, columns["a"], rounds)
    _measure_size(report, case, seamark_bitmap, roaring, path, rows)


def _draw_column(rng: np.random.Generator, rows: int, cardinality: int) -> Values:
    """Return a column in random order that contains every value from 0 to `cardinality` - 1."""
    values = np.concatenate([np.arange(cardinality), rng.integers(0, cardinality, rows - cardinality)])
    return rng.permutation(values)


def _list_questions(rng: np.random.Generator, cardinality: int) -> list[Question]:
    middle, third = cardinality // 2, max(1, cardinality * 3 // 10)
    ten = tuple(sorted(rng.choice(cardinality, 10, replace=False).tolist()))
    return [
        Question("=", ("a",), among=(middle,)),
        Question("<", ("a",), upper_bound=third),
        Question("IN (10)", ("a",), among=ten),
        Question("two-column AND", COLUMNS, upper_bound=third),
    ]


def _measure_in_turns(answerers: list[RangeAnswerer], question: Question, rounds: int) -> dict[str, float]:
    """Return the median ms of each system by name. The first question of each system is not counted."""
    expected = answerers[0].answer(question)
    for answerer in answerers[1:]:
        if not np.array_equal(answerer.answer(question), expected):
            raise AnswersDiffer(f"{answerer.name} and {OURS} find other rows: {question}")
    durations: dict[str, list[float]] = {answerer.name: [] for answerer in answerers}
    for round_number in range(rounds):
        for answerer in answerers if round_number % 2 else reversed(answerers):
            durations[answerer.name].append(_measure_ms(lambda answerer=answerer: answerer.answer(question)))
    return {name: statistics.median(times) for name, times in durations.items()}


def _measure_ms(work: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    work()
    return (time.perf_counter() - started_s) * 1000


def _measure_building(report: Report, case: str, values: Values, rounds: int) -> None:
    """Measure the CPU time from a NumPy array to stored bytes on one thread, the best of several alternating runs."""
    keys = _build_keys(values)
    sorted_keys = _build_keys(np.sort(values))
    operations: dict[str, Callable[[], Any]] = {
        OURS: lambda: bitmap.build_bitmap(keys),
        "sorted": lambda: bitmap.build_bitmap(sorted_keys),
        ROARING: lambda: [item.serialize() for item in Roaring.build(values)],
    }
    durations: dict[str, list[float]] = {name: [] for name in operations}
    # Fewer rounds than for queries, and only two for the peer, limit the time of the benchmark.
    for round_number in range(max(2, rounds // 3)):
        for name, work in operations.items():
            if name == ROARING and round_number > 1:
                continue
            started_s = time.thread_time()
            work()
            durations[name].append(time.thread_time() - started_s)
    rates = {name: len(values) / min(times) / 1e6 for name, times in durations.items()}
    options: dict[str, Any] = {"lower_is_better": False, "peer": ROARING, "goal": BUILD_GOAL}
    rates_by_name = {OURS: rates[OURS], ROARING: rates[ROARING]}
    report.rows.append(Row(f"{case}, build", "any order, one core", "M rows/s", rates_by_name, **options))
    report.rows.append(Row(f"{case}, build", "sorted, one core", "M rows/s", {OURS: rates["sorted"]}, **options))


def _measure_size(
    report: Report, case: str, seamark_bitmap: SeamarkBitmap, roaring: Roaring, path: Path, rows: int
) -> None:
    section = seamark_bitmap.bitmaps["a"].open_section(0)
    bits = compute_slice_count(section.cardinality)
    report.rows.append(Row(f"{case}, stored", "slices", "", {OURS: section.bitmaps}, goal=bits))
    file_metadata = pq.ParquetFile(path).metadata
    column_bytes = sum(
        file_metadata.row_group(i).column(0).total_compressed_size for i in range(file_metadata.num_row_groups)
    )
    sizes = {
        OURS: seamark_bitmap.size_bytes / rows,
        PYARROW: column_bytes / rows,
        ROARING: roaring.sum_bytes("a") / rows,
    }
    report.rows.append(Row(f"{case}, stored", "bytes a row", "B", sizes, peer=PYARROW))
    report.notes.append(
        f"{case}: dictionary {section.dictionary_bytes:,} bytes, slices {section.bitmaps_bytes:,}; the roaring column"
        " is without a dictionary."
    )


def _measure_many_files(report: Report, rounds: int) -> None:
    """Measure how long it takes to find which of a thousand files contain a value.

    One column has keys that the files share, the other has keys that occur in one file only.
    """
    rng = np.random.default_rng(1)
    for name, value_max in (("shared values", 10_000), ("own values", 1 << 60)):
        files = [rng.integers(0, value_max, FILE_ROWS) for _ in range(FILES)]
        entries = [bitmap.build_bitmap(_build_keys(values)) for values in files]
        blob = b"".join(bitmap.encode_bitmaps(entries))
        index = Bitmap(memoryview(blob))
        sorted_values = sorted({int(values[0]) for values in files[:10]})
        ranges = KeyRanges(
            "long", tuple(KeyRange(_encode_value(value), _encode_value(value)) for value in sorted_values)
        )
        expected = [bool(np.isin(values, sorted_values).any()) for values in files]
        if index.mark_files(ranges).astype(bool).tolist() != expected:
            raise AnswersDiffer(f"{name}: the bitmap index marks other files than a search of the values")
        median_ms = statistics.median(
            _measure_ms(lambda i=index, r=ranges: i.mark_files(r)) for _ in range(20 * rounds)
        )
        common_fraction = 1 - sum(entry.size_bytes for entry in entries) / len(blob)
        report.rows.append(Row(f"{FILES:,} files, {name}", "files of IN (10)", "ms", {OURS: median_ms}))
        report.notes.append(
            f"{FILES:,} files of {FILE_ROWS:,} rows, {name}: {len(blob):,} bytes, {common_fraction:.0%} of "
            "them in the part that all files share."
        )
