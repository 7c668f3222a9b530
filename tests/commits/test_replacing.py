"""Tests of overwrites. No replaced row stays, and no row is lost that another writer added at the same time."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.client import Api
from tests.commits.claims import ClaimedTable, build_struct


async def test_partitions_of_both_zeros_are_replaced_when_both_are_written(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "double"}, [("x", "identity")])
    await table.commit(add=[table.build_data_file("old+", 0.0), table.build_data_file("old-", -0.0)])
    await table.commit(
        add=[table.build_data_file("new+", 0.0), table.build_data_file("new-", -0.0)], replace={"partitions": "written"}
    )
    assert await table.list_live_files() == ["new+", "new-"]
    await table.commit(add=[table.build_data_file("newer-", -0.0)], replace={"partitions": "written"})
    assert await table.list_live_files() == ["new+", "newer-"]


async def test_scope_of_a_partition_outside_doubles_is_rejected(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "double"}, [("x", "identity")])
    scope = {"partitions": [{"spec-id": 0, "values": [10**400]}]}
    response = await table.send(read_snapshot_id=None, add=[table.build_data_file("a", 1.0)], scope=scope)
    assert response.error[:2] == (400, "BadRequestException")
    assert "outside the range of double" in response.error[2]


async def test_equality_deletes_of_both_zeros_are_compared_with_files_of_another_spec(api: Api) -> None:
    table = await ClaimedTable.create(api, {"x": "double"}, [("x", "identity")])
    read_snapshot = (await table.commit(add=[table.build_data_file("a", 1.0)]))["snapshot-id"]
    fields = [{"name": "p", "transform": "identity", "source-id": 1, "field-id": 1000}]
    fields.append({"name": "q", "transform": "void", "source-id": 1, "field-id": 1001})
    await table.update(
        {"action": "add-spec", "spec": {"fields": fields}}, {"action": "set-default-spec", "spec-id": -1}
    )
    await table.commit(add=[table.build_data_file("theirs", -0.0, None, spec_id=1)])
    equality = {"content": "equality-deletes", "equality-ids": [1]}
    for zeros in ([-0.0], [0.0, -0.0]):
        deletes = [table.build_data_file(f"deletes{zero}", zero, **equality) for zero in zeros]
        response = await table.send(read_snapshot_id=read_snapshot, add=deletes)
        assert response.error[:2] == (409, "CommitFailedException"), zeros


def _build_metrics_of_value(value: int) -> dict[str, Any]:
    """Return the metrics of a file with one row, whose column 1 of type long has this value."""
    counts = {"value-counts": 1, "null-value-counts": 0}
    value_hex = value.to_bytes(8, "little", signed=True).hex()
    return {name: {"keys": [1], "values": [count]} for name, count in counts.items()} | {
        name: {"keys": [1], "values": [value_hex]} for name in ("lower-bounds", "upper-bounds")
    }


@pytest.mark.parametrize("operation", [None, "replace"])
@pytest.mark.parametrize("is_scoped", [True, False])
async def test_overwrite_conflicts_with_concurrent_changes_of_the_replaced_rows(
    api: Api, operation: str | None, is_scoped: bool
) -> None:
    table = await ClaimedTable.create(api, {"x": "long", "p": "int"}, [("p", "identity")])
    own_file = table.build_data_file("base", 1, **_build_metrics_of_value(5))
    base_id = (await table.commit(add=[own_file, table.build_data_file("other", 2)]))["snapshot-id"]
    await table.commit(add=[table.build_data_file("theirs", 1, **_build_metrics_of_value(100))])
    body: dict[str, Any] = {
        "read_snapshot_id": base_id,
        "replace": {"partitions": "written"},
        "add": [table.build_data_file("mine", 1, rows=2)],
    }
    if is_scoped:
        body["scope"] = {"filter": {"type": "eq", "term": "x", "value": 5}}
    if operation is not None:
        body |= {"operation": operation, "remove": [{"file-path": own_file["file-path"]}]}
    response = await table.send(**body)
    assert response.error[:2] == (409, "CommitFailedException")
    assert "theirs" in response.error[2]
    await table.commit(**body, isolation="snapshot")
    assert await table.list_live_files() == ["mine", "other"]


async def test_filter_uses_the_columns_of_its_schema_after_they_have_swapped_names(api: Api) -> None:
    """A filter of a change replaces whole files, so all rows of a file must match it.

    Column 1, with three nulls in five rows, is named `a` in schema 0 and `b` in schema 1. Column 2 has no null.
    """
    table = await ClaimedTable.create(api, {"a": "long", "b": "long"})
    ten = (10).to_bytes(8, "little").hex()
    metrics = {
        "value-counts": [5, 5],
        "null-value-counts": [3, 0],
        "lower-bounds": [ten] * 2,
        "upper-bounds": [ten] * 2,
    }
    column_metrics = {name: {"keys": [1, 2], "values": values} for name, values in metrics.items()}
    read_snapshot = (await table.commit(add=[table.build_data_file("partly", rows=5, **column_metrics)]))["snapshot-id"]

    def build_body(name: str, schema_id: int) -> dict[str, Any]:
        filter = {"type": "gt", "term": name, "value": 5}
        return {
            "read_snapshot_id": read_snapshot,
            "schema_id": schema_id,
            "replace": {"filter": filter},
            "add": [table.build_data_file(f"new-{schema_id}")],
        }

    assert (await table.send(**build_body("a", 0))).status == 400  # Three rows of the file do not match.
    swapped_struct = build_struct({1: ("b", "long"), 2: ("a", "long")}, 1)
    await table.update(
        {"action": "add-schema", "schema": swapped_struct}, {"action": "set-current-schema", "schema-id": -1}
    )
    for name, schema_id in (("a", 0), ("b", 1)):
        assert (await table.send(**build_body(name, schema_id))).status == 400
    assert await table.list_live_files() == ["partly"]
    assert (await table.send(**build_body("b", 0))).status == 200, "column 2 has no null"
    assert await table.list_live_files() == ["new-0"]
