"""The route that returns the layout of a column, for charts of a table. The size of the answer is limited."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec

from seamark.formats.index.packing import Form, decode_value, get_form
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.formats.listings import encode_bound_json
from seamark.metaserver.api.http.describe import Parameter, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.parameters.paging import parse_page_size
from seamark.metaserver.api.http.parameters.snapshots import (
    SNAPSHOT,
    find_requested_snapshot,
    parse_whole_number,
    resolve_snapshot_id,
)
from seamark.metaserver.api.lookups.metadata import find_stats_column
from seamark.metaserver.planner.lookup.layout import Axis, Ranges, build_bars, count_size_classes, read_layouts
from seamark.metaserver.planner.lookup.lookup import FoundFiles, RequestedColumn, find_files_by_prefix
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView

BARS, BARS_MAX = 1000, 2000
"""The default and the maximum of the query parameter `bars`."""
POINTS, POINTS_MAX = 400, 2000
"""The default and the maximum of the query parameter `points`."""
AXIS_MARKS_MAX = 5
STRING_FILES_MAX = 1_000_000
"""The maximum number of files for which the layout of a column of strings is computed.

A bound that is a string takes about 100 bytes of memory, and a bound that is a number takes 8 bytes.
"""
SCALES = ("value", "rank")


class Mark(msgspec.Struct):
    """A value of the column, with its position from 0 to 1 on the axis of a diagram."""

    position: float
    value: Any


class LayoutBar(msgspec.Struct):
    """A group of files with neighbouring ranges.

    Positions are from 0, the lowest bound of all files, to 1, the highest bound.
    """

    files: int
    low: Annotated[float, doc("The position of the lowest lower bound.")]
    median: Annotated[float, doc("The position of the median upper bound.")]
    high: Annotated[float, doc("The position of the highest upper bound.")]


class LayoutPoint(msgspec.Struct):
    """The number of files whose range contains a value."""

    position: float
    files: Annotated[int, doc("The number of files whose range contains the value. A lookup of the value opens them.")]


class LayoutSizes(msgspec.Struct, rename="kebab"):
    """The files of one class of sizes."""

    size_in_bytes: Annotated[
        int, doc("The minimum size of the class, a power of two or 0. The next class begins at twice this size.")
    ]
    files: int
    total_bytes: int


class SnapshotLayout(msgspec.Struct, rename="kebab"):
    """The layout of a column in one snapshot."""

    snapshot_id: int | None
    files: Annotated[int, doc("The number of data files.")]
    bounded_files: Annotated[
        int, doc("The number of data files with both bounds of the column. Other files are in no bar.")
    ]
    depth_mean: Annotated[
        float | None,
        doc("The mean number of files that may contain a random value. The ideal number is 1."),
    ]
    depth_max: Annotated[int, doc("The largest number of files whose ranges have a value in common.")]
    depth: Annotated[
        list[LayoutPoint], doc("The numbers of files whose range contains a value, at about evenly spaced values.")
    ]
    bars: Annotated[
        list[LayoutBar],
        doc("The files, sorted by lower and upper bound, in groups with about the same number of files."),
    ]
    sizes: list[LayoutSizes]


class ColumnLayout(msgspec.Struct, rename="kebab"):
    """The layout of a column. Positions are from 0, the lowest bound of all files, to 1, the highest bound."""

    column: str
    type: str
    scale: Annotated[
        str, doc("`value` if positions are proportional to values, `rank` if they are proportional to ranks of bounds.")
    ]
    marks: Annotated[list[Mark], doc("Some values with their positions, including the lowest and the highest value.")]
    snapshots: Annotated[list[SnapshotLayout], doc("The requested snapshot, and then the snapshot of compare-to.")]


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/layout/{column}",
    "loadColumnLayout",
    "Return how the ranges of a column in the data files overlap, and the sizes of the files, in bins",
    tags=("metadata",),
    parameters=(
        *SNAPSHOT,
        Parameter("compare-to", "query", "The id of a second snapshot, on the same scale.", {"type": "integer"}),
        Parameter(
            "scale",
            "query",
            "The scale: `value`, the default, or `rank`. Strings always have `rank`.",
            {"enum": list(SCALES)},
        ),
        Parameter(
            "bars",
            "query",
            f"The maximum number of bars. The default is {BARS}.",
            {"type": "integer", "minimum": 1},
        ),
        Parameter(
            "points",
            "query",
            f"The maximum number of depths. The default is {POINTS}.",
            {"type": "integer", "minimum": 1},
        ),
    ),
    answers=(
        ResponseSpec(200, "The layout, whose size is limited for any number of files", ColumnLayout),
        ResponseSpec(400, "No such column or snapshot, or the type of the column has no bounds"),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_column_layout(call: Call) -> ColumnLayout:
    """Return how the ranges of a column in the data files overlap, and the sizes of the files, in bins."""
    metadata = (await call.components.catalog.tables.load(call.namespace, call.name)).metadata
    name = call.names[1]
    column = find_stats_column(metadata, name)
    if get_form(column.kind) is None:
        raise BadRequest(f"Column {name} is of the type {column.kind}, which has no bounds")
    scale = call.query.get("scale", "value")
    if scale not in SCALES:
        raise BadRequest(f"scale is {scale[:40]!r}; it must be value or rank")
    bars = parse_page_size(call.query.get("bars", str(BARS)), "bars", BARS_MAX)
    points = parse_page_size(call.query.get("points", str(POINTS)), "points", POINTS_MAX)
    snapshot_ids = [find_requested_snapshot(call.query, metadata)]
    compared_snapshot_id = parse_whole_number(call.query.get("compare-to"), "compare-to")
    if compared_snapshot_id is not None:
        snapshot_ids.append(resolve_snapshot_id(metadata, compared_snapshot_id, None, None))

    views = [
        TableView((), ())
        if snapshot_id is None
        else await call.components.planner.view(metadata, ScanRequest(snapshot_id=snapshot_id))
        for snapshot_id in snapshot_ids
    ]
    file_count = sum(view.file_count for view in views)
    if get_form(column.kind) is Form.STRINGS and file_count > STRING_FILES_MAX:
        raise BadRequest(
            f"Column {name} is of the type {column.kind}, whose layout is computed for at most {STRING_FILES_MAX:,} "
            f"files, not for {file_count:,}; choose a column of numbers or times"
        )
    return await asyncio.to_thread(_compute_layout, name, column, scale == "rank", snapshot_ids, views, bars, points)


def _compute_layout(
    name: str,
    column: RequestedColumn,
    by_rank: bool,
    snapshot_ids: list[int | None],
    views: list[TableView],
    bars: int,
    points: int,
) -> ColumnLayout:
    """Compute the layout of a column in several snapshots, on the same axis.

    Args:
        name: The name of the column.
        column: The column.
        by_rank: Whether positions on the axis are proportional to the ranks of bounds instead of their values.
        snapshot_ids: The ids of the snapshots.
        views: The files of each snapshot.
        bars: The maximum number of groups of files.
        points: The maximum number of values at which the files are counted.
    """
    files_by_snapshot = [find_files_by_prefix(view) for view in views]
    axis, ranges = read_layouts(files_by_snapshot, column, by_rank)
    return ColumnLayout(
        column=name,
        type=column.kind,
        scale="value" if axis.by_value else "rank",
        marks=_place_marks(axis, column.kind),
        snapshots=[
            _make_snapshot_layout(snapshot_id, files, ranges_of_files, axis, bars, points)
            for snapshot_id, files, ranges_of_files in zip(snapshot_ids, files_by_snapshot, ranges, strict=True)
        ],
    )


def _make_snapshot_layout(
    snapshot_id: int | None, files: FoundFiles, ranges: Ranges, axis: Axis, bars: int, points: int
) -> SnapshotLayout:
    """Compute the layout of a column in one snapshot.

    The depth at a value is the number of files whose range contains the value.

    Args:
        snapshot_id: The id of the snapshot.
        files: The data files of the snapshot.
        ranges: The bounds of the column in the files, as ranks on the axis.
        axis: The axis that all compared snapshots share.
        bars: The maximum number of groups of files.
        points: The maximum number of values at which the files are counted.
    """
    ranks = axis.list_ranks(points)
    return SnapshotLayout(
        snapshot_id=snapshot_id,
        files=ranges.files,
        bounded_files=len(ranges.lower),
        depth_mean=ranges.compute_mean_depth(axis),
        depth_max=int(ranges.count_overlaps(ranges.lower).max(initial=0)),
        depth=[
            LayoutPoint(position, depth)
            for position, depth in zip(
                axis.positions[ranks].tolist(), ranges.count_overlaps(ranks).tolist(), strict=True
            )
        ],
        bars=[LayoutBar(*bar) for bar in build_bars(ranges, axis, bars)],
        sizes=[LayoutSizes(*size_class) for size_class in count_size_classes(files)],
    )


def _place_marks(axis: Axis, kind: str) -> list[Mark]:
    """Return marks on the axis with their values."""
    form = get_form(kind)
    assert form is not None
    return [
        Mark(float(axis.positions[rank]), encode_bound_json(kind, decode_value(form, kind, axis.get_key(rank))))
        for rank in axis.list_ranks(AXIS_MARKS_MAX).tolist()
    ]
