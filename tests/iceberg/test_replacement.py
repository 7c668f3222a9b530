"""Tests of the snapshots with operation `replace` that are accepted as having the rows of their parent."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from seamark.formats.iceberg.metadata.compaction import UNDONE
from seamark.formats.iceberg.metadata.replacement import find_row_count_mismatch, is_replace
from seamark.formats.iceberg.metadata.snapshot import Snapshot


def _build_snapshot(summary: Mapping[str, str]) -> Snapshot:
    return Snapshot(snapshot_id=1, timestamp_ms=1, summary=msgspec.Raw(msgspec.json.encode(summary)))


def _build_replacement(**counts: int | str) -> Snapshot:
    return _build_snapshot(
        {"operation": "replace"} | {name.replace("_", "-"): str(count) for name, count in counts.items()}
    )


PARENT = _build_snapshot({"total-records": "100", "total-position-deletes": "10", "total-equality-deletes": "0"})


@pytest.mark.parametrize(
    "rewrite",
    [
        pytest.param(
            _build_replacement(added_records=90, deleted_records=100, deleted_data_files=9), id="Spark, Trino: files"
        ),
        pytest.param(_build_replacement(added_records=100, deleted_records=100), id="without deletes"),
        pytest.param(
            _build_replacement(manifests_created=1, manifests_replaced=9, entries_processed=9), id="Spark: manifests"
        ),
        pytest.param(
            _build_replacement(added_position_deletes=5, removed_position_deletes=9), id="Spark: position deletes"
        ),
        pytest.param(
            _build_replacement(added_position_deletes=5, removed_equality_deletes=2), id="Flink: equality deletes"
        ),
        pytest.param(_build_replacement(deleted_records=10, deleted_data_files=1), id="all rows were deleted"),
        pytest.param(_build_replacement(added_records=7, deleted_data_files=2), id="imported Avro files, rows unknown"),
        pytest.param(
            _build_replacement(added_records=7, deleted_data_files=2, deleted_records=-2),
            id="imported Avro files, -1 rows each",
        ),
        pytest.param(
            _build_replacement(added_records=100, deleted_records=90, added_position_deletes=10), id="also adds deletes"
        ),
        pytest.param(
            _build_replacement(added_records=9, deleted_records=8, added_equality_deletes=1), id="deletes by value"
        ),
        pytest.param(_build_snapshot({"operation": "replace"}), id="summary without counts"),
        pytest.param(_build_snapshot({"operation": "replace", "added-records": "many"}), id="a count is not a number"),
        pytest.param(
            _build_snapshot({"operation": "replace", "added-records": "9", "deleted-records": "8", UNDONE: "7"}),
            id="undo",
        ),
    ],
)
def test_consistent_rewrites_are_accepted(rewrite: Snapshot) -> None:
    assert is_replace(rewrite)
    assert find_row_count_mismatch(rewrite, PARENT) is None
    assert find_row_count_mismatch(rewrite, None) is None


@pytest.mark.parametrize(
    "change",
    [
        _build_replacement(added_records=1),
        _build_replacement(added_records=101, deleted_records=100, deleted_data_files=1),
        _build_replacement(added_records=100, deleted_records=90, added_position_deletes=9),
    ],
)
def test_replace_snapshot_with_more_rows_than_its_parent_counts_as_a_change(change: Snapshot) -> None:
    assert not is_replace(change)
    assert "rows and removes" in (find_row_count_mismatch(change, None) or "")


def test_replace_snapshot_with_fewer_rows_is_reported_as_a_possible_error_of_its_parent() -> None:
    """Totals are computed from earlier totals, so one wrong commit makes all later totals wrong."""
    change = _build_replacement(added_records=89, deleted_records=100)
    assert is_replace(change)
    assert "10 rows were deleted before" in (find_row_count_mismatch(change, PARENT) or "")
    parent_with_equality_deletes = _build_snapshot({"total-position-deletes": "10", "total-equality-deletes": "1"})
    for parent in (
        None,
        parent_with_equality_deletes,
        _build_snapshot({}),
        _build_snapshot({"total-position-deletes": "10"}),
    ):
        assert find_row_count_mismatch(change, parent) is None


@pytest.mark.parametrize("operation", ["append", "overwrite", "delete", ""])
def test_snapshot_with_another_operation_is_no_replacement(operation: str) -> None:
    snapshot = _build_snapshot({"operation": operation, "added-records": "5"})
    assert not is_replace(snapshot)
    assert find_row_count_mismatch(snapshot, None) is None
