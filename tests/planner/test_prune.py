"""Pruning in cases that plans of whole tables do not reach: list columns, orders of UUIDs, and timeouts in branches."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op, Or
from seamark.formats.iceberg.manifests.manifest import ManifestFile, decode_manifest
from seamark.metaserver.index.blocks.block import Block
from seamark.metaserver.index.blocks.encoding import encode_block
from seamark.metaserver.planner.pruning.file_pruning import IN_VALUES_MAX, narrow_by_stats
from seamark.metaserver.planner.view.selection import FileSelection
from seamark.metaserver.planner.view.view import ColumnStatistics, PartitionValues, TableView
from tests.api.plans.planned import STYLE, build_data_file
from tests.planner.lakes.kinds import compute_java_uuid_order
from tests.planner.lakes.manifests import ADDED, Entry, build_manifest_bytes
from tests.planner.lakes.metrics import ColumnMetrics
from tests.planner.test_manifests import build_manifest

ELEMENT_ID = 4
UUID_ORDERS: tuple[Callable[[bytes], Any], ...] = (bytes, compute_java_uuid_order)


def build_schema(element: str) -> dict[str, Any]:
    tags = {"type": "list", "element-id": ELEMENT_ID, "element": element, "element-required": False}
    return {
        "type": "struct",
        "schema-id": 0,
        "fields": [
            {"id": 1, "name": "id", "type": "long", "required": False},
            {"id": 2, "name": "data", "type": "string", "required": False},
            {"id": 3, "name": "tags", "type": tags, "required": False},
        ],
    }


def build_view(*elements: ColumnMetrics, kind: str = "string") -> TableView:
    """Return a planner's view of a table: a file for each item of `elements`.

    File n has the ids from 10 n to 10 n + 9.

    Args:
        elements: The metrics of the elements of a list column, one item for each file.
        kind: The type of the list's elements.
    """
    files = [build_data_file(f"file:///t/{n}.parquet", 10 * n, 10 * n + 9) for n in range(len(elements))]
    for file, metrics in zip(files, elements, strict=True):
        file.metrics[ELEMENT_ID] = metrics
    data = build_manifest_bytes(
        [Entry(ADDED, snapshot_id=1, sequence=None, file_sequence=None, file=file) for file in files],
        version=2,
        content=0,
        style=STYLE,
        spec_id=0,
        fields=(),
        kinds={1: "long", 2: "string", ELEMENT_ID: kind},
        schema=build_schema(kind),
    )
    manifest_file: ManifestFile = build_manifest(None, spec_id=0)
    return TableView([manifest_file], [Block(b"".join(encode_block(decode_manifest(data, "file:///t/m.avro"))))])


def find_remaining_files(view: TableView, expression: Expression) -> list[int]:
    selection = FileSelection.select_all(view)
    narrow_by_stats(selection, expression, lambda: False)
    selection.check_invariants()
    return selection.list_entry_ids().tolist()


@pytest.mark.parametrize("op", [Op.IS_NULL, Op.NOT_NULL, Op.EQ, Op.NOT_EQ])
def test_statistics_of_list_elements_prune_nothing(op: Op) -> None:
    """The statistics count the elements of all lists, not rows.

    So they decide no predicate on a row. For example, a list can be null although no element is null.
    """
    column_metrics = [ColumnMetrics(values=7, nulls=0, lower=b"a", upper=b"a"), ColumnMetrics(values=7, nulls=7)]
    values = () if op in (Op.IS_NULL, Op.NOT_NULL) else ("a",)
    assert find_remaining_files(
        build_view(*column_metrics), Bound(op, ELEMENT_ID, "tags.element", "list", "identity", "string", values)
    ) == [
        0,
        1,
    ]


class UuidFiles:
    """Files of random UUIDs, and a planner's view of them.

    The bounds of a file are in Java's order, which compares two signed halves, or in the order of bytes.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        # Java compares UUIDs by their halves of 8 bytes. There are few, so that files and literals have equal halves.
        self.halves = [
            bytes([first_byte]) + rng.randbytes(7) for first_byte in (0x00, 0x04, 0x05, 0x7F, 0x80, 0x81, 0xFF)
        ]
        # A file with one value has equal bounds. 300 files cover most pairs of halves.
        self.values_by_file = [[self.draw_uuid() for _ in range(rng.choice([1, 2, 5]))] for _ in range(300)]
        metrics = []
        for values in self.values_by_file:
            order = rng.choice(UUID_ORDERS)
            # A writer may omit a bound, so 5 % of the bounds are missing.
            lower = min(values, key=order) if rng.random() < 0.95 else None
            upper = max(values, key=order) if rng.random() < 0.95 else None
            metrics.append(ColumnMetrics(values=len(values), nulls=0, lower=lower, upper=upper))
        self.view = build_view(*metrics, kind="uuid")

    def draw_uuid(self) -> bytes:
        return self.rng.choice(self.halves) + self.rng.choice(self.halves)

    def find_remaining(self, op: Op, *values: bytes) -> set[int]:
        return set(find_remaining_files(self.view, Bound(op, ELEMENT_ID, "u", "uuid", "identity", "uuid", values)))


@pytest.mark.parametrize("length", [3, IN_VALUES_MAX + 1])
def test_uuid_bounds_in_either_order_keep_files_with_members_of_a_list(length: int) -> None:
    files = UuidFiles(random.Random(length))
    rng = files.rng
    for _ in range(40):
        random_values = (rng.choice(files.halves) + rng.randbytes(8) for _ in range(length - 1))
        literals = sorted([rng.choice(rng.choice(files.values_by_file)), *random_values])
        matching_numbers = {number for number, values in enumerate(files.values_by_file) if set(values) & set(literals)}
        assert matching_numbers <= files.find_remaining(Op.IN, *literals), literals
    uuids_near_zero = tuple(number.to_bytes(16, "big") for number in range(length))
    assert len(files.find_remaining(Op.IN, *uuids_near_zero)) < len(files.values_by_file)


@pytest.mark.parametrize(("op", "comparison"), [(Op.LT, lt), (Op.LT_EQ, le), (Op.GT, gt), (Op.GT_EQ, ge)])
def test_uuid_bounds_in_either_order_keep_files_for_readers_of_the_other_order(
    op: Op, comparison: Callable[[Any, Any], bool]
) -> None:
    files = UuidFiles(random.Random(op.value))
    dropped_count = 0
    for _ in range(40):
        literal = files.draw_uuid()
        remaining_files = files.find_remaining(op, literal)
        for order in UUID_ORDERS:
            matching_numbers = {
                number
                for number, values in enumerate(files.values_by_file)
                if any(comparison(order(item), order(literal)) for item in values)
            }
            assert matching_numbers <= remaining_files, (literal, order)
        dropped_count += len(files.values_by_file) - len(remaining_files)
    assert dropped_count > 100


def test_branches_reached_after_the_time_limit_prune_nothing_at_no_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time limit, the planner evaluates no further branch of an OR, and copies no selection of files.

    A copy for each of thousands of branches over a million files would take far longer than the time limit.
    """
    view = build_view(*[ColumnMetrics(values=1, nulls=0)] * 20)
    branches = Or(tuple(Bound(Op.EQ, 1, "id", "long", "identity", "long", (n,)) for n in range(5_000, 15_000)))
    assert find_remaining_files(view, branches) == []
    copy_count = check_count = 0
    copy = FileSelection.copy

    def count_copies(self: FileSelection) -> FileSelection:
        nonlocal copy_count
        copy_count += 1
        return copy(self)

    def count_time_checks() -> bool:
        nonlocal check_count
        check_count += 1
        return check_count > 10  # The time limit ends after ten checks, when most branches remain.

    monkeypatch.setattr(FileSelection, "copy", count_copies)
    selection = FileSelection.select_all(view)
    narrow_by_stats(selection, branches, count_time_checks)
    assert selection.list_entry_ids().tolist() == list(range(20))
    assert copy_count < 10, "the 10,000 branches must share the selection after the time limit"


def test_view_size_can_be_read_while_threads_add_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop sums the sizes of tables in memory while planning threads decode further columns of the tables.

    The test adds a column each time the size of a column is read.
    """
    view = build_view(ColumnMetrics())
    new_ids = iter(range(100, 200))
    for column_class in (ColumnStatistics, PartitionValues):
        size = column_class.size_bytes.fget

        def grow_size(self: object, size: Callable[[object], int] = size) -> int:
            view.find_statistics(next(new_ids), "long")
            view.partition(next(new_ids), "long")
            return size(self)

        monkeypatch.setattr(column_class, "size_bytes", property(grow_size))
    view.find_statistics(1, "long")
    view.find_statistics(2, "string")
    view.partition(1000, "long")
    assert view.size_bytes > 0
