"""Tests of the layout of a column.

Loops over the files compute the expected layout, for random tables with all kinds of bounds.
"""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from seamark.formats.iceberg.types.values import decode_json, encode_single_value
from seamark.formats.index.packing import Form
from seamark.metaserver.planner.lookup.layout import read_layouts
from seamark.metaserver.planner.lookup.lookup import FoundFiles, RequestedColumn
from tests.console.world import IDS, build_content_file, commit_change, create_table, send_request
from tests.seeds import first_seed
from tests.server.rig import RunningServer, run_server

COLUMNS = ("id", "customer_id", "country", "amount", "day")
Range = tuple[Any, Any]


def draw_value(column: str, rng: random.Random) -> Any:
    match column:
        case "id":
            return rng.choice((rng.randrange(20), rng.randrange(-(2**62), 2**62), -(2**63) + 1, 2**63 - 1))
        case "customer_id":
            return rng.randrange(50)
        case "country":
            return "".join(rng.choice("ab\0é") for _ in range(rng.randrange(4)))
        case "amount":
            return rng.choice((rng.uniform(-1e9, 1e9), float(rng.randrange(5)), -0.0, 1.7e308, -1.7e308))
        case _:
            return rng.randrange(-700_000, 700_000) if rng.random() < 0.2 else rng.randrange(19_000, 19_030)


def sort_values(values: tuple[Any, Any]) -> Range:
    low, high = sorted(values, key=lambda value: value.encode() if isinstance(value, str) else value)
    return low, high


def draw_files(location: str, count: int, rng: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Range]]]:
    """Return random data files, and the bounds of the columns of each file. A file may lack bounds of a column."""
    bounds = []
    for _ in range(count):
        file_bounds = {}
        for column in COLUMNS:
            if rng.random() < 0.9:
                value = draw_value(column, rng)
                other_value = value if rng.random() < 0.2 else draw_value(column, rng)
                file_bounds[column] = sort_values((value, other_value))
        bounds.append(file_bounds)
    sizes = [rng.choice((0, 1, 2, 1023, 1024, rng.randrange(1 << 34))) for _ in bounds]
    content_files = [
        build_content_file(f"{location}/data/{rng.getrandbits(64):x}.parquet", file_bounds, size=size)
        for file_bounds, size in zip(bounds, sizes, strict=True)
    ]
    return content_files, bounds


class ExpectedLayout:
    """The layout of a column, computed by loops over the ranges of its files in each snapshot.

    The layout shows how many files have a range that contains a value (the depth at the value), for each value on an
    axis. A position is the place of a value on the axis, from 0 to 1: by value, or by its rank among all bounds.
    """

    def __init__(self, column: str, snapshots: list[list[Range]], by_rank: bool) -> None:
        """Compute the positions of all bounds.

        Args:
            column: The name of the column. The text column `country` can only have the scale of ranks.
            snapshots: The range of each file, for each snapshot.
            by_rank: Whether the request asks for the scale of ranks.
        """

        def encode_text(value: Any) -> Any:
            return value.encode() if isinstance(value, str) else value

        values = {encode_text(value) for ranges in snapshots for value_range in ranges for value in value_range}
        self.values = sorted(values)
        self.snapshots = [[(encode_text(low), encode_text(high)) for low, high in ranges] for ranges in snapshots]
        self.by_value = not by_rank and column != "country" and len(self.values) > 1
        rank_max = len(self.values) - 1
        if self.by_value:
            least_value, greatest_value = float(self.values[0]), float(self.values[-1])
            # The halves avoid an overflow of the difference.
            self.position = {
                value: (float(value) / 2 - least_value / 2) / (greatest_value / 2 - least_value / 2)
                for value in self.values
            }
        else:
            self.position = {value: number / rank_max if rank_max else 0.0 for number, value in enumerate(self.values)}

    def count_overlaps(self, number: int, value: Any) -> int:
        return sum(low <= value <= high for low, high in self.snapshots[number])

    def compute_mean_depth(self, number: int) -> float | None:
        """Return the mean depth of a snapshot: how many files overlap, on average, in the range of a file.

        Within a range, the depth between two neighbouring values counts in proportion to their distance on the axis.
        """
        ranges = self.snapshots[number]
        depth_sum = 0.0
        for low, high in ranges:
            width = self.position[high] - self.position[low]
            if width <= 0:
                depth_sum += self.count_overlaps(number, low)
                continue
            values_inside = [value for value in self.values if low <= value <= high]
            for start, end in pairwise(values_inside):
                depth = sum(range_low <= start and range_high >= end for range_low, range_high in ranges)
                depth_sum += depth * (self.position[end] - self.position[start]) / width
        return depth_sum / len(ranges) if ranges else None

    def list_values_at(self, position: float) -> list[Any]:
        return [value for value, value_position in self.position.items() if abs(value_position - position) < 1e-12]


def check_layout(
    answer: dict[str, Any], column: str, expected: ExpectedLayout, files: list[int], bars: int, points: int
) -> None:
    """Check an answer of the layout route.

    It has the scale of the axis, marks with a label on the axis, and the depths of each snapshot: the number of files
    whose range contains a value. A snapshot has at most `bars` bars and `points` depths.
    """
    assert answer["scale"] == ("value" if expected.by_value else "rank")
    for mark in answer["marks"]:
        assert expected.list_values_at(mark["position"]), mark
    if expected.values:
        column_type = {"id": "long", "customer_id": "long", "country": "string", "amount": "double", "day": "date"}[
            column
        ]
        first_mark, *_, last_mark = answer["marks"]
        edge_values = [first_mark["value"], last_mark["value"]]
        decoded_values = [encode_single_value(column_type, decode_json(column_type, value)) for value in edge_values]
        expected_edges = [
            value.decode() if isinstance(value, bytes) else value for value in (expected.values[0], expected.values[-1])
        ]
        assert decoded_values == [encode_single_value(column_type, value) for value in expected_edges]
    for number, layout in enumerate(answer["snapshots"]):
        ranges = expected.snapshots[number]
        assert (layout["files"], layout["bounded-files"]) == (files[number], len(ranges))
        depths = [expected.count_overlaps(number, low) for low, _ in ranges]
        assert layout["depth-max"] == max(depths, default=0)
        if ranges:
            assert layout["depth-mean"] == pytest.approx(expected.compute_mean_depth(number), rel=1e-6)
        else:
            assert layout["depth-mean"] is None
        assert len(layout["depth"]) <= points
        for point in layout["depth"]:
            assert point["files"] in {
                expected.count_overlaps(number, value) for value in expected.list_values_at(point["position"])
            }
        check_bars(layout["bars"], expected, ranges, bars)


def check_bars(actual_bars: list[dict[str, Any]], expected: ExpectedLayout, ranges: list[Range], bars: int) -> None:
    """Check bars that each stand for files with neighbouring lowest values, at most `bars` of them."""
    assert len(actual_bars) == min(bars, len(ranges))
    assert sum(bar["files"] for bar in actual_bars) == len(ranges)
    remaining_ranges = sorted(ranges)
    for bar in actual_bars:
        bar_ranges, remaining_ranges = remaining_ranges[: bar["files"]], remaining_ranges[bar["files"] :]
        assert abs(bar["files"] - len(ranges) / len(actual_bars)) < 1
        highest_values = sorted(high for _, high in bar_ranges)
        lowest_value, _ = bar_ranges[0]
        median = highest_values[(len(highest_values) - 1) // 2]
        positions = [expected.position[value] for value in (lowest_value, median, highest_values[-1])]
        assert [bar["low"], bar["median"], bar["high"]] == pytest.approx(positions, abs=1e-12)


def check_sizes(layout: dict[str, Any], files: list[dict[str, Any]]) -> None:
    """Check the histogram of the files' sizes, whose limits are powers of two."""
    sizes = [file["file-size-in-bytes"] for file in files]
    sizes_by_limit: dict[int, list[int]] = {}
    for size in sizes:
        sizes_by_limit.setdefault(1 << (size.bit_length() - 1) if size else 0, []).append(size)
    assert layout["sizes"] == [
        {"size-in-bytes": lower_limit, "files": len(file_sizes), "total-bytes": sum(file_sizes)}
        for lower_limit, file_sizes in sorted(sizes_by_limit.items())
    ]


async def check_table(server: RunningServer, name: str, rng: random.Random) -> None:
    """Create a table with two commits, and check the layout of each column at both snapshots.

    The layout of a column shows which ranges of its values the files have, and how many files overlap at a value.
    """
    location = await create_table(server, name)
    empty_layout = (await send_request(server, "GET", f"/api/v1/tables/db/{name}/layout/id"))["snapshots"][0]
    assert (empty_layout["snapshot-id"], empty_layout["files"], empty_layout["depth-mean"], empty_layout["bars"]) == (
        None,
        0,
        None,
        [],
    )
    first_files, first_bounds = draw_files(location, rng.randrange(1, 40), rng)
    second_files, second_bounds = draw_files(location, rng.randrange(1, 40), rng)
    earlier_id = await commit_change(server, name, first_files)
    later_id = await commit_change(server, name, second_files)
    for column in COLUMNS:
        bars, points, by_rank = rng.choice((1, 3, 500)), rng.choice((1, 4, 400)), rng.random() < 0.3
        later_bounds, earlier_bounds = [*first_bounds, *second_bounds], first_bounds
        ranges = [
            [file_bounds[column] for file_bounds in bounds if column in file_bounds]
            for bounds in (later_bounds, earlier_bounds)
        ]
        has_comparison = rng.random() < 0.6
        query = f"bars={bars}&points={points}&scale={'rank' if by_rank else 'value'}"
        if has_comparison:
            query += f"&snapshot-id={later_id}&compare-to={earlier_id}"
        answer = await send_request(server, "GET", f"/api/v1/tables/db/{name}/layout/{column}?{query}")
        expected = ExpectedLayout(column, ranges if has_comparison else ranges[:1], by_rank)
        files = [len(later_bounds), len(earlier_bounds)]
        check_layout(answer, column, expected, files, bars, points)
        check_sizes(answer["snapshots"][0], [*first_files, *second_files])
        assert [snapshot["snapshot-id"] for snapshot in answer["snapshots"]] == (
            [later_id, earlier_id] if has_comparison else [later_id]
        )


@pytest.mark.parametrize("tables", [8, pytest.param(150, marks=pytest.mark.slow)])
async def test_layout_equals_that_of_a_loop_over_the_files(tables: int, tmp_path: Path) -> None:
    seed = first_seed()
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with run_server(tmp_path) as server:
        for number in range(tables):
            await check_table(server, f"t{number}", rng)


async def test_invalid_layout_requests_are_rejected_and_a_column_without_bounds_has_no_marks(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        location = await create_table(server, "t")
        await commit_change(server, "t", [build_content_file(f"{location}/data/a", {"id": (1, 2)})])
        for path, message in (
            ("nothing", "Cannot find column 'nothing'"),
            ("id?scale=log", "it must be value or rank"),
            ("id?bars=0", "at least 1"),
            ("id?compare-to=7", "Cannot find snapshot 7"),
            ("id?compare-to=x", "must be a whole number"),
        ):
            status, answer = await server.get(f"/api/v1/tables/db/t/layout/{path}")
            assert (status, answer["error"]["type"]) == (400, "BadRequestException"), path
            assert message in answer["error"]["message"]
        status, answer = await server.get("/api/v1/tables/db/t/layout/country")
        assert status == 200
        assert (answer["marks"], answer["snapshots"][0]["bounded-files"]) == ([], 0)
        assert IDS["country"] == 3


class _Bounds:
    """The statistics of files with numbers as bounds, without a table."""

    form = Form.INTEGERS

    def __init__(self, files: int) -> None:
        self.file_count = files

    def find_statistics(self, column: object) -> _Bounds:
        return self

    def read_bounds(self, side: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.arange(self.file_count, dtype=np.int64) * 1000 + (500 if side == "upper" else 0)


def test_numeric_bounds_are_not_converted_to_objects() -> None:
    files = 100_000
    tracemalloc.start()
    try:
        axis, ranges = read_layouts(
            [cast(FoundFiles, _Bounds(files))], RequestedColumn(id=1, kind="long"), by_rank=False
        )
        memory_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A bound takes a key, a position and a rank of 8 bytes each. As a Python number it would take 40 bytes more.
    assert memory_bytes < 2 * files * 32, "each of the two bounds of a file takes less than 32 bytes"
    assert [axis.get_key(rank) for rank in (0, 1, 2 * files - 1)] == [0, 500, (files - 1) * 1000 + 500]
    assert len(ranges[0].lower) == files
