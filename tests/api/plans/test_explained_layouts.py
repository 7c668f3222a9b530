"""Tests of explain's estimates for sorting and clustering. The expected numbers come from tables with these layouts.

The tables have no files, so the estimates use only bounds. `tests/connector/jobs/test_explained_estimates.py` uses
samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from seamark.formats.iceberg.metadata.clustering import HILBERT
from seamark.formats.services.curves import compute_curve_keys
from tests.api.client import Api
from tests.api.plans.planned import append_files
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.lake import DataFile
from tests.planner.lakes.metrics import ColumnMetrics
from tests.seeds import first_seed

FILES, ROWS = 48, 500
T = "/api/v1/tables/db/t"
TARGET = {"write.target-file-size-bytes": "10000"}
"""The property that sets the target size of the files."""
WORDS = 26**3
"""The number of different words that `build_word` makes."""


def draw_overlapping_files(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a table whose files cover overlapping ranges of ids, and the index of the word of each row.

    Both arrays have the shape [files, rows].
    """
    low = rng.integers(0, 40_000, (FILES, 1))
    width = rng.integers(1, 20_000, (FILES, 1))
    ids = low + (rng.random((FILES, ROWS)) * width).astype(np.int64)
    return ids, rng.integers(0, WORDS, (FILES, ROWS))


def build_word(number: int) -> str:
    """Return the word with this number. Words are in the order of their numbers, and differ in their last 3 letters."""
    return "same" + "".join(chr(ord("a") + number // 26**exponent % 26) for exponent in (2, 1, 0))


def build_file(number: int, ids: np.ndarray, word_numbers: np.ndarray) -> DataFile:
    bounds = {
        1: ("long", int(ids.min()), int(ids.max())),
        2: ("string", build_word(word_numbers.min()), build_word(word_numbers.max())),
    }
    metrics = {
        column: ColumnMetrics(len(ids), 0, None, to_bytes(kind, low), to_bytes(kind, high))
        for column, (kind, low, high) in bounds.items()
    }
    return DataFile(f"file:///t/{number}.parquet", 0, "PARQUET", 0, (), len(ids), 10_000, metrics, split_offsets=[4])


def is_close(estimate: int, expected_files: int) -> bool:
    """Return True if an estimate of the kept files differs from their exact count by at most 30%, or by two files.

    The estimate comes from a sample. `expected_files` was counted in a table that has the layout.
    """
    return abs(estimate - expected_files) <= max(2, 0.3 * expected_files)


async def read_layouts(api: Api, where: str) -> dict[tuple[str, ...], int]:
    """Return the estimated number of kept files for each layout that `explain` reports, by the layout's columns."""
    answer = await api("POST", f"{T}/explain", {"where": where})
    assert answer.status == 200, answer.raw
    actual_layouts: list[dict[str, Any]] = answer.json["layouts"]
    assert [layout["files"] for layout in actual_layouts] == sorted(layout["files"] for layout in actual_layouts)
    assert all(layout["files-in"] == FILES and layout["files"] < answer.json["files"] for layout in actual_layouts)
    return {tuple(layout["columns"]): layout["files"] for layout in actual_layouts}


def count_kept_files(keys: np.ndarray, *columns: tuple[np.ndarray, float, float]) -> int:
    """Return the number of files that a filter keeps in a table whose rows are sorted by `keys`.

    A file is kept if its bounds of each column in `columns` overlap the range of the filter: (values, low, high).
    """
    order = np.argsort(keys, kind="stable")
    is_kept = np.ones(FILES, dtype=bool)
    for values, low, high in columns:
        parts = values.ravel()[order].reshape(FILES, -1)
        is_kept &= (parts.min(axis=1) <= high) & (parts.max(axis=1) >= low)
    return int(is_kept.sum())


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("case", range(3))
async def test_estimate_of_a_sort_is_close_to_the_sorted_table(api: Api, case: int) -> None:
    rng = np.random.default_rng(first_seed() + case)
    ids, word_numbers = draw_overlapping_files(rng)
    await api.create_table(properties=TARGET)
    files = [build_file(n, *rows) for n, rows in enumerate(zip(ids, word_numbers, strict=True))]
    await append_files(api, "t", files, snapshot_id=1)
    estimate_count = 0
    for _ in range(12):
        low, span = int(rng.integers(0, 50_000)), int(rng.integers(0, 8_000))
        reported_layouts = await read_layouts(api, f"id >= {low} AND id <= {low + span}")
        if ("id",) in reported_layouts:
            estimate_count += 1
            expected_files = count_kept_files(ids.ravel(), (ids, low, low + span))
            assert is_close(reported_layouts["id",], expected_files), (low, span)
        first_number = int(rng.integers(0, WORDS - 600))
        reported_layouts = await read_layouts(
            api, f"data >= '{build_word(first_number)}' AND data < '{build_word(first_number + 500)}'"
        )
        estimate_count += 1
        expected_files = count_kept_files(word_numbers.ravel(), (word_numbers, first_number, first_number + 499))
        assert is_close(reported_layouts["data",], expected_files), first_number
    assert estimate_count > 15


@pytest.mark.slow
async def test_estimate_of_a_clustering_is_close_to_the_hilbert_layout(api: Api) -> None:
    rng = np.random.default_rng(first_seed() + 7)
    ids, word_numbers = rng.integers(0, 60_000, (FILES, ROWS)), rng.integers(0, WORDS, (FILES, ROWS))
    await api.create_table(properties=TARGET)
    await append_files(api, "t", [build_file(n, ids[n], word_numbers[n]) for n in range(FILES)], snapshot_id=1)
    ranks = np.stack([np.argsort(np.argsort(values.ravel())) for values in (ids, word_numbers)], axis=1).astype(
        np.uint64
    )
    curve = [bytes(key) for key in compute_curve_keys(ranks, 16, HILBERT)]
    keys = np.argsort(np.argsort(np.array(curve)))
    for _ in range(10):
        low, first_number = int(rng.integers(0, 50_000)), int(rng.integers(0, WORDS - 3000))
        reported_layouts = await read_layouts(
            api,
            f"id BETWEEN {low} AND {low + 9000} AND data >= '{build_word(first_number)}' AND data <"
            f" '{build_word(first_number + 2500)}'",
        )
        expected_files = count_kept_files(
            keys, (ids, low, low + 9000), (word_numbers, first_number, first_number + 2499)
        )
        shared_files = next(files for columns, files in reported_layouts.items() if len(columns) == 2)
        assert shared_files < min(reported_layouts["id",], reported_layouts["data",])
        assert expected_files / 2.5 <= shared_files <= 2.5 * expected_files, (low, first_number)


async def test_values_that_a_layout_does_not_group_have_no_estimate(api: Api) -> None:
    await api.create_table(properties=TARGET)
    ids = np.arange(FILES * ROWS).reshape(FILES, ROWS)
    files = [build_file(n, ids[n], np.array([5, 9])) for n in range(FILES)]
    await append_files(api, "t", files, snapshot_id=1)
    assert await read_layouts(api, "id = 700") == {}, "a layout would not improve the plan"
    assert await read_layouts(api, "id >= 0") == {}, "most files match"
    assert await read_layouts(api, "data IS NOT NULL") == {}
    assert await read_layouts(api, "data <> 'x'") == {}
    assert await read_layouts(api, f"data = '{build_word(7)}' AND data > '{build_word(6)}'") == {}, (
        "the frequency of the value is unknown"
    )


async def test_numbers_at_the_limits_of_their_type_are_estimated(api: Api) -> None:
    await api.create_table(properties=TARGET)
    ends = np.array([-(2**63) + 1, 2**63 - 1])
    files = [build_file(n, ends, np.array([5, 9])) for n in range(FILES)]
    await append_files(api, "t", files, snapshot_id=1)
    reported_layouts = await read_layouts(api, "id > 0 AND id < 1000000000000000000")
    assert 2 <= reported_layouts["id",] <= 5
    assert await read_layouts(api, "id IN (1, 2, 3, 9000000000000000000)") == {}, (
        "the frequencies of the values are unknown"
    )


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("low", "high", "bound"),
    [
        (1e10, 1e10, None),
        (5e-324, 5e-324, None),
        (-5e-324, 1e-310, None),
        (-1.7e308, 1.7e308, -1.275e308),
        (0.0, 1.7e308, 2.125e307),
        (-1.0, 1.0, -0.75),
    ],
)
async def test_doubles_of_any_size_are_estimated(api: Api, low: float, high: float, bound: float | None) -> None:
    """Some cases have equal doubles, and others have differences that are too small or too large for a double.

    Args:
        low: The lower bound of the column in every file.
        high: The upper bound of the column in every file.
        bound: An eighth of the values are below this value. None if all values are equal or nearly equal.
    """
    field = {"id": 1, "name": "d", "type": "double", "required": False}
    await api.create_table(schema={"type": "struct", "schema-id": 0, "fields": [field]}, properties=TARGET)
    bounds = ColumnMetrics(ROWS, nulls=0, nans=0, lower=to_bytes("double", low), upper=to_bytes("double", high))
    files = [
        DataFile(
            f"file:///t/{n}.parquet",
            content=0,
            format="PARQUET",
            spec_id=0,
            partition=(),
            record_count=ROWS,
            size=10_000,
            metrics={1: bounds},
            split_offsets=[4],
        )
        for n in range(FILES)
    ]
    await append_files(api, "t", files, snapshot_id=1)
    numbers = (-1.79e308, -1e10, -5e-324, 0.0, 5e-324, 3e-310, 1e-300, 0.5, 1e10, 1.79e308)
    for number in numbers:
        for condition in (f"d = {number!r}", f"d <= {number!r}", f"d > {number!r}", f"d IN (0.25, {number!r})"):
            await read_layouts(api, condition)
    if bound is not None:
        assert await read_layouts(api, f"d < {bound!r}") == {("d",): FILES // 8}
