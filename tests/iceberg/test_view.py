"""Tests of views: creation, JSON, every update action, the limit of the history and the dialect rule."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from seamark.formats.iceberg.views.view import ViewMetadata, decode_view, encode_view
from seamark.formats.iceberg.views.view_updates import VIEW_ACTIONS, apply_view_updates, build_view_metadata
from seamark.formats.runtime.errors import BadRequest, Corrupt
from tests.iceberg.samples import EVENTS, NOW_MS, UUID, Json, build_field, build_schema

COMMIT_MS = NOW_MS + 5000
"""The time of a commit to the view, unless a test gives another time."""
OTHER_SCHEMA = build_schema(build_field(1, "n", "int"))


def build_version(sql: str = "SELECT 1", *, dialects: tuple[str, ...] = ("spark",), **fields: Any) -> Json:
    return {
        "version-id": 1,
        "timestamp-ms": NOW_MS,
        "schema-id": 0,
        "summary": {"engine-name": "spark"},
        "representations": [{"type": "sql", "sql": sql, "dialect": dialect} for dialect in dialects],
        "default-namespace": ["db"],
        **fields,
    }


def build_view(**fields: Any) -> ViewMetadata:
    document: Json = {
        "uuid": UUID,
        "location": "s3://lake/v",
        "schema": EVENTS,
        "view_version": build_version(),
        "properties": {},
    }
    return build_view_metadata(**{**document, "now_ms": NOW_MS, **fields})


def apply_updates(base: ViewMetadata | None, *updates: Json, now_ms: int = COMMIT_MS) -> ViewMetadata:
    return apply_view_updates(base, updates, now_ms=now_ms)


def build_replacement(sql: str, **fields: Any) -> list[Json]:
    """Return the updates that replace a view by a statement."""
    return [
        {"action": "add-view-version", "view-version": build_version(sql, **fields)},
        {"action": "set-current-view-version", "view-version-id": -1},
    ]


def test_new_view_has_one_version_and_one_log_entry() -> None:
    view = build_view(
        view_version=build_version(**{"schema-id": 12, "default-catalog": "c"}), schema={**EVENTS, "schema-id": 9}
    )
    assert (view.current_version_id, view.current_version.schema_id, view.schemas[0].id) == (1, 0, 0)
    assert [(entry.version_id, entry.timestamp_ms) for entry in view.version_log] == [(1, NOW_MS)]
    assert view.current_version.default_catalog == "c"


def test_view_is_equal_after_a_round_trip() -> None:
    view = apply_updates(build_view(properties={"a": "b"}), *build_replacement("SELECT 2"))
    assert decode_view(encode_view(view), "f") == view
    assert decode_view(gzip.compress(encode_view(view)), "f") == view
    document = json.loads(encode_view(view))
    assert document.keys() == {
        "view-uuid", "format-version", "location", "properties", "schemas", "current-version-id", "versions",
        "version-log",
    }  # fmt: skip
    assert document["versions"][0]["representations"] == [{"type": "sql", "sql": "SELECT 1", "dialect": "spark"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format-version": 2}, "Unsupported format version: 2"),
        ({"current-version-id": 7}, "Cannot find current version 7"),
        ({"schemas": []}, "Cannot find current schema with id 0"),
        ({"view-uuid": None}, "view-uuid"),
    ],
)
def test_file_that_is_not_a_view_is_corrupt_and_named(change: Json, message: str) -> None:
    data = json.dumps({**json.loads(encode_view(build_view())), **change}).encode()
    with pytest.raises(Corrupt, match=message) as raised_error:
        decode_view(data, "s3://lake/v/meta.json")
    assert "s3://lake/v/meta.json" in raised_error.value.message


def test_replaced_view_has_the_next_version_and_its_schema() -> None:
    view = apply_updates(
        build_view(),
        {"action": "add-schema", "schema": OTHER_SCHEMA},
        *build_replacement("SELECT n", **{"schema-id": -1}),
    )
    assert (view.current_version_id, view.current_version.schema_id, len(view.schemas)) == (2, 1, 2)
    assert [entry.version_id for entry in view.version_log] == [1, 2]


def test_version_equal_to_an_old_version_is_reused() -> None:
    view = apply_updates(build_view(), *build_replacement("SELECT 2"))
    reverted_view = apply_updates(view, *build_replacement("SELECT 1", **{"timestamp-ms": NOW_MS + 9}))
    assert (reverted_view.current_version_id, len(reverted_view.versions)) == (1, 2)
    # The version became current again in this commit, not when it was created.
    assert [(entry.version_id, entry.timestamp_ms) for entry in reverted_view.version_log][-1] == (1, COMMIT_MS)
    assert apply_updates(view, *build_replacement("SELECT 2")) is view


def test_only_the_last_version_set_in_a_commit_is_logged() -> None:
    view = apply_updates(build_view(), *build_replacement("SELECT 2"), *build_replacement("SELECT 3"))
    assert (view.current_version_id, [entry.version_id for entry in view.version_log]) == (3, [1, 3])


def test_properties_location_uuid_and_version_of_a_view_change() -> None:
    view = apply_updates(
        build_view(properties={"x": "1"}),
        {"action": "set-properties", "updates": {"a": "1"}},
        {"action": "remove-properties", "removals": ["x", "y"]},
        {"action": "set-location", "location": "s3://lake/w"},
        {"action": "assign-uuid", "uuid": UUID},
        {"action": "upgrade-format-version", "format-version": 1},
    )
    assert (view.properties, view.location, view.view_uuid) == ({"a": "1"}, "s3://lake/w", UUID)
    assert apply_updates(view) is view


def test_versions_beyond_the_history_size_are_dropped_with_their_log() -> None:
    view = build_view(properties={"version.history.num-entries": "2"})
    for number in range(2, 6):
        view = apply_updates(view, *build_replacement(f"SELECT {number}"))
    assert [version.version_id for version in view.versions] == [5, 4]
    assert [entry.version_id for entry in view.version_log] == [4, 5]


def test_log_entries_before_a_dropped_version_are_dropped() -> None:
    view = apply_updates(build_view(), *build_replacement("SELECT 2"))
    view = apply_updates(view, {"action": "set-current-view-version", "view-version-id": 1}, now_ms=NOW_MS + 6000)
    shrink = {"action": "set-properties", "updates": {"version.history.num-entries": "1"}}
    smaller_view = apply_updates(view, shrink)
    assert [entry.version_id for entry in view.version_log] == [1, 2, 1]
    assert [(entry.version_id, entry.timestamp_ms) for entry in smaller_view.version_log] == [(1, NOW_MS + 6000)]


def test_current_version_and_versions_of_the_commit_are_always_kept() -> None:
    view = build_view(properties={"version.history.num-entries": "1"})
    view = apply_updates(view, {"action": "add-view-version", "view-version": build_version("SELECT 2")})
    assert {version.version_id for version in view.versions} == {1, 2}
    default_view = build_view()
    for number in range(2, 14):
        default_view = apply_updates(default_view, *build_replacement(f"SELECT {number}"))
    assert len(default_view.versions) == 10


@pytest.mark.parametrize("size", ["0", "-1", "many"])
def test_impossible_history_size_is_rejected(size: str) -> None:
    with pytest.raises(BadRequest, match=r"version\.history\.num-entries"):
        apply_updates(build_view(), {"action": "set-properties", "updates": {"version.history.num-entries": size}})


def test_replacement_may_not_drop_a_dialect_unless_allowed() -> None:
    two_dialect_view = build_view(view_version=build_version(dialects=("spark", "Trino")))
    with pytest.raises(BadRequest) as raised_error:
        apply_updates(two_dialect_view, *build_replacement("SELECT 2", dialects=("trino",)))
    assert raised_error.value.message == (
        "Cannot replace view due to loss of view dialects (replace.drop-dialect.allowed=false):\n"
        "Previous dialects: [spark, trino]\nNew dialects: [trino]"
    )
    allow = {"action": "set-properties", "updates": {"replace.drop-dialect.allowed": "TRUE"}}
    assert (
        apply_updates(two_dialect_view, allow, *build_replacement("SELECT 2", dialects=("trino",))).current_version_id
        == 2
    )
    assert (
        apply_updates(
            two_dialect_view, *build_replacement("SELECT 2", dialects=("trino", "spark", "duckdb"))
        ).current_version_id
        == 2
    )


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([{"action": "set-current-view-version", "view-version-id": -1}], "no current version id has been set"),
        ([{"action": "set-current-view-version", "view-version-id": 5}], "unknown version: 5"),
        (build_replacement("x", **{"schema-id": -1}), "no schema has been added"),
        (build_replacement("x", **{"schema-id": 4}), "Cannot add version with unknown schema: 4"),
        (build_replacement("x", dialects=("spark", "SPARK")), "multiple queries for dialect spark"),
        (build_replacement("x", dialects=()), "it has no representations"),
        (build_replacement("x", representations=[{"type": "plan"}]), "unsupported view representations"),
        (build_replacement("x", representations=[{"type": "sql", "sql": "x"}]), "`sql` and `dialect` are required"),
        ([{"action": "assign-uuid", "uuid": UUID.replace("5", "6")}], "Cannot reassign uuid"),
        ([{"action": "upgrade-format-version", "format-version": 2}], "Unsupported format version: 2"),
        ([{"action": "upgrade-format-version", "format-version": 0}], "Cannot downgrade v1 view to v0"),
        ([{"action": "set-location", "location": ""}], "Invalid view location"),
        ([{"action": "add-snapshot"}], "Cannot apply update add-snapshot to a view"),
        ([{"action": "x"}], r"Unknown metadata update action: x \(known: assign-uuid"),
        ([{"action": "add-view-version"}], "add-view-version update: .*`view-version`"),
        ([{"action": "add-view-version", "view-version": {}}], r"\$.view-version"),
    ],
)
def test_impossible_view_update_is_rejected(updates: list[Json], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        apply_updates(build_view(), *updates)


def test_view_can_be_built_from_updates_alone() -> None:
    updates = [
        {"action": "assign-uuid", "uuid": UUID},
        {"action": "set-location", "location": "s3://lake/v"},
        {"action": "add-schema", "schema": EVENTS},
        *build_replacement("SELECT 1", **{"schema-id": -1}),
    ]
    assert apply_view_updates(None, updates, now_ms=NOW_MS) == build_view()
    for removed_index, message in (
        (0, "no uuid"),
        (1, "location"),
        (2, "no schema has been added"),
        (4, "no versions"),
    ):
        with pytest.raises(BadRequest, match=message):
            apply_view_updates(
                None, [update for index, update in enumerate(updates) if index != removed_index], now_ms=NOW_MS
            )


def test_view_actions_equal_the_actions_of_the_specification() -> None:
    assert set(VIEW_ACTIONS) == {
        "assign-uuid", "upgrade-format-version", "add-schema", "set-location", "set-properties", "remove-properties",
        "add-view-version", "set-current-view-version",
    }  # fmt: skip


def test_version_after_the_largest_id_is_rejected() -> None:
    view = apply_updates(build_view(), *build_replacement("SELECT 2", **{"version-id": 2**31 - 1}))
    assert view.current_version_id == 2**31 - 1
    with pytest.raises(BadRequest, match="id of the new version would be 2147483648"):
        apply_updates(view, *build_replacement("SELECT 3"))
