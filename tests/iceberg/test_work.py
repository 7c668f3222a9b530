"""Tests of the limits on comparisons between the updates of one commit, which ordinary commits never reach."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from seamark.formats.iceberg.metadata import builder
from seamark.formats.iceberg.types import schema as schemas
from seamark.formats.iceberg.types.schema import normalize_schema
from seamark.formats.iceberg.views.view_updates import apply_view_updates
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import (
    EVENTS,
    NOW_MS,
    UUID,
    Json,
    add_snapshot,
    apply_json_updates,
    build_field,
    build_order,
    build_schema,
    build_spec,
    build_table,
    set_ref,
)
from tests.iceberg.test_schema import build_struct, parse_schema
from tests.iceberg.test_view import build_version, build_view

GROWING_UPDATES: dict[str, Callable[[int], list[Json]]] = {
    "schemas": lambda n: [{"action": "add-schema", "schema": build_schema(*EVENTS["fields"], build_field(9, f"c{n}"))}],
    "specs": lambda n: [{"action": "add-spec", "spec": build_spec((1, f"bucket[{n + 2}]", f"b{n}"))}],
    "orders": lambda n: [{"action": "add-sort-order", "sort-order": build_order((1, f"bucket[{n + 2}]"))}],
    "snapshots that come and go": lambda n: [
        add_snapshot(2 * n + 1, 2 * n + 1),
        add_snapshot(2 * n + 2, 2 * n + 2),
        {"action": "remove-snapshots", "snapshot-ids": [2 * n + 1]},
    ],
    "current schemas": lambda n: [
        {"action": "add-schema", "schema": build_schema(*EVENTS["fields"], build_field(9, f"c{n % 2}"))},
        {"action": "set-current-schema", "schema-id": -1},
        {"action": "add-spec", "spec": build_spec((1, f"bucket[{n + 2}]", f"b{n}"))},
    ],
}


@pytest.mark.parametrize("name", GROWING_UPDATES)
def test_comparisons_between_updates_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "COMPARISONS_MAX", 2_000)
    metadata = build_table()
    commits = add_snapshot(10**6, 1), set_ref(10**6)
    apply_json_updates(
        metadata, *commits, *(update for number in range(10) for update in GROWING_UPDATES[name](number + 3))
    )
    with pytest.raises(BadRequest, match="commit fewer of them together"):
        apply_json_updates(
            metadata, *commits, *(update for number in range(1_000) for update in GROWING_UPDATES[name](number + 3))
        )


def test_hundred_schemas_can_be_added_to_a_table_with_a_thousand() -> None:
    metadata = build_table()
    for start in range(0, 1_000, 250):
        metadata = apply_json_updates(
            metadata, *(update for number in range(start, start + 250) for update in GROWING_UPDATES["schemas"](number))
        )
    extended_metadata = apply_json_updates(
        metadata, *(update for number in range(1_000, 1_100) for update in GROWING_UPDATES["schemas"](number))
    )
    assert len(extended_metadata.schemas) == len(metadata.schemas) + 100
    reverted_metadata = apply_json_updates(
        extended_metadata, *GROWING_UPDATES["schemas"](500), {"action": "set-current-schema", "schema-id": -1}
    )
    assert (
        reverted_metadata.current_schema == metadata.schemas[metadata.schemas.index(reverted_metadata.current_schema)]
    )


def test_each_snapshot_is_removed_by_its_own_update_with_its_references() -> None:
    metadata = build_table()
    for number in range(300):
        metadata = apply_json_updates(
            metadata,
            add_snapshot(number + 1, number + 1, number or None),
            set_ref(number + 1),
            set_ref(number + 1, f"tag{number}", "tag"),
        )
    moves = set_ref(300, "tag0", "tag"), {"action": "remove-snapshot-ref", "ref-name": "tag5"}
    removals = [{"action": "remove-snapshots", "snapshot-ids": [number + 1]} for number in range(299)]
    # A tag survives if its snapshot does: `tag0` moves to snapshot 300, but `late` is on snapshot 1, which is removed
    # afterwards. Snapshot 101 is removed first, so its second removal must change nothing.
    result = apply_json_updates(metadata, removals[100], *moves, set_ref(1, "late", "tag"), *removals)
    assert sorted(result.refs) == ["main", "tag0", "tag299"]
    assert [snapshot.snapshot_id for snapshot in result.snapshots] == [300]


def test_number_of_view_versions_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "COMPARISONS_MAX", 2_000)

    def build_updates(count: int) -> list[Json]:
        return [
            {
                "action": "add-view-version",
                "view-version": build_version(f"SELECT {number}", **{"version-id": number + 2}),
            }
            for number in range(count)
        ]

    apply_view_updates(build_view(), build_updates(40), now_ms=NOW_MS + 1, new_uuid=UUID)
    with pytest.raises(BadRequest, match="commit fewer of them together"):
        apply_view_updates(build_view(), build_updates(80), now_ms=NOW_MS + 1, new_uuid=UUID)


def test_wide_spec_with_known_fields_is_numbered_like_a_small_one() -> None:
    fields = [(1, f"bucket[{number + 2}]", f"b{number}") for number in range(50)]
    metadata = apply_json_updates(build_table(), {"action": "add-spec", "spec": build_spec(*fields)})
    extended_metadata = apply_json_updates(
        metadata, {"action": "add-spec", "spec": build_spec((1, "bucket[2]", "again"), (1, "bucket[2]", "twice"))}
    )
    reused_field, new_field = extended_metadata.partition_specs[-1].fields
    assert reused_field.field_id == metadata.partition_specs[-1].fields[0].field_id
    assert new_field.field_id == metadata.last_partition_id + 1


def test_long_name_is_not_repeated_for_each_nested_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "NAMES_MAX", 10_000)
    nested_fields = [build_field(number + 2, f"f{number}") for number in range(100)]
    assert normalize_schema(parse_schema(build_field(1, "x" * 80, build_struct(*nested_fields))))
    with pytest.raises(BadRequest, match=re.escape("more than 10,000 characters")):
        normalize_schema(parse_schema(build_field(1, "x" * 100, build_struct(*nested_fields))))
