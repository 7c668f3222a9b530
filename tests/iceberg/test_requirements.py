"""Tests of requirements: each holds or fails with Java's message, and invalid requirements are rejected."""

from __future__ import annotations

from typing import Any

import pytest

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.requirements import check_requirements, check_view_requirements, read_requirements
from seamark.formats.runtime.errors import BadRequest, CommitConflict
from tests.iceberg.samples import UUID, Json, add_snapshots, apply_json_updates, build_spec, build_table, set_ref

METADATA = apply_json_updates(
    add_snapshots(build_table(partition_spec=build_spec((2, "day", "d"))), 1, 2), set_ref(1, "v1", "tag")
)


def check_json(metadata: TableMetadata | None, requirements: list[Any]) -> None:
    check_requirements(metadata, read_requirements(requirements))


@pytest.mark.parametrize(
    "requirement",
    [
        {"type": "assert-table-uuid", "uuid": UUID.upper()},
        {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 2},
        {"type": "assert-ref-snapshot-id", "ref": "none", "snapshot-id": None},
        {"type": "assert-ref-snapshot-id", "ref": "none"},
        {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 3},
        {"type": "assert-current-schema-id", "current-schema-id": 0},
        {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 1000},
        {"type": "assert-default-spec-id", "default-spec-id": 0},
        {"type": "assert-default-sort-order-id", "default-sort-order-id": 0},
    ],
)
def test_satisfied_requirement_raises_no_error(requirement: Json) -> None:
    check_json(METADATA, [requirement])


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ({"type": "assert-create"}, "table already exists"),
        ({"type": "assert-table-uuid", "uuid": "x"}, f"UUID does not match: expected {UUID} != x"),
        (
            {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": 1},
            "branch main has changed: expected id 1 != 2",
        ),
        ({"type": "assert-ref-snapshot-id", "ref": "v1", "snapshot-id": 2}, "tag v1 has changed: expected id 2 != 1"),
        ({"type": "assert-ref-snapshot-id", "ref": "main"}, "branch main was created concurrently"),
        (
            {"type": "assert-ref-snapshot-id", "ref": "b", "snapshot-id": 1},
            "branch or tag b is missing, expected 1",
        ),
        (
            {"type": "assert-last-assigned-field-id", "last-assigned-field-id": 2},
            "last assigned field id changed: expected id 2 != 3",
        ),
        (
            {"type": "assert-current-schema-id", "current-schema-id": 1},
            "current schema changed: expected id 1 != 0",
        ),
        (
            {"type": "assert-last-assigned-partition-id", "last-assigned-partition-id": 999},
            "last assigned partition id changed: expected id 999 != 1000",
        ),
        (
            {"type": "assert-default-spec-id", "default-spec-id": 1},
            "default partition spec changed: expected id 1 != 0",
        ),
        (
            {"type": "assert-default-sort-order-id", "default-sort-order-id": 1},
            "default sort order changed: expected id 1 != 0",
        ),
    ],
)
def test_failed_requirement_is_a_conflict_with_javas_message(requirement: Json, message: str) -> None:
    with pytest.raises(CommitConflict) as raised_error:
        check_json(METADATA, [requirement])
    assert raised_error.value.message == f"Requirement failed: {message}"


def test_only_creation_can_be_required_when_there_is_no_table() -> None:
    check_json(None, [{"type": "assert-create"}])
    check_json(None, [])
    with pytest.raises(CommitConflict, match="table does not exist"):
        check_json(None, [{"type": "assert-table-uuid", "uuid": UUID}])


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ([{"type": "assert-moon"}], r"Unknown update requirement: assert-moon \(known: assert-create, "),
        ([{"type": "assert-view-uuid", "uuid": UUID}], "Cannot validate assert-view-uuid against a table"),
        ([{"type": "assert-table-uuid"}], "assert-table-uuid requirement: .*`uuid`"),
        ([{"type": "assert-default-spec-id", "default-spec-id": "0"}], r"\$.default-spec-id"),
        ([{}], "`type`"),
        ([7], "Expected `object`, got `int`"),
        (
            [{"type": "assert-create"}, {"type": "assert-default-spec-id", "default-spec-id": 0}],
            "Invalid create requirements",
        ),
    ],
)
def test_invalid_requirement_is_named_in_the_error(requirements: list[Any], message: str) -> None:
    for metadata in (METADATA, None):
        with pytest.raises(BadRequest, match=message):
            check_json(metadata, requirements)


def test_view_requirement_compares_the_uuid() -> None:
    check_view_requirements(UUID, [{"type": "assert-view-uuid", "uuid": UUID.upper()}])
    with pytest.raises(CommitConflict, match=f"Requirement failed: view UUID does not match: expected {UUID} != x"):
        check_view_requirements(UUID, [{"type": "assert-view-uuid", "uuid": "x"}])
    with pytest.raises(BadRequest, match="Cannot validate assert-create against a view"):
        check_view_requirements(UUID, [{"type": "assert-create"}])
    with pytest.raises(BadRequest, match="Unknown update requirement: x"):
        check_view_requirements(UUID, [{"type": "x"}])
