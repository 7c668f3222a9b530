"""Tests with random JSON: the answer is metadata that can be read again, or a rejection, and never another
exception.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.new_table import build_table_metadata
from seamark.formats.iceberg.metadata.requirements import (
    TABLE_REQUIREMENTS,
    check_requirements,
    check_view_requirements,
    read_requirements,
)
from seamark.formats.iceberg.metadata.table_json import decode_table, encode_table
from seamark.formats.iceberg.metadata.updates import TABLE_ACTIONS
from seamark.formats.iceberg.views.view import decode_view, encode_view
from seamark.formats.iceberg.views.view_updates import VIEW_ACTIONS, apply_view_updates, build_view_metadata
from seamark.formats.runtime.errors import BadRequest, CommitConflict, Corrupt
from tests.iceberg.samples import (
    EVENTS,
    NOW_MS,
    UUID,
    add_snapshot,
    add_snapshots,
    apply_json,
    build_creation,
    build_field,
    build_order,
    build_partition_statistics,
    build_spec,
    build_statistics,
    build_table,
    set_ref,
)
from tests.iceberg.test_view import build_replacement, build_version, build_view
from tests.seeds import examples

WORDS = st.sampled_from([
    "id", "ids", "name", "type", "fields", "struct", "list", "map", "element", "key", "value", "schema", "schema-id",
    "required", "transform", "source-id", "field-id", "snapshot-id", "ref", "main", "branch", "tag", "bucket[4]", "day",
    "decimal(9,2)", "long", "double", "unknown", "default-namespace", "sql", "dialect", "initial-default",
])  # fmt: skip
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 5)
    | st.sampled_from([2**31, 2**63, -(2**63), 2**70, 10**400])
    | st.floats()
    | st.text(max_size=6)
    | WORDS
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=5)
)

KEY = {"key-id": "k", "encrypted-key-metadata": "AAEC", "properties": {}}
NESTED_SCHEMA = {
    "type": "struct",
    "schema-id": 1,
    "identifier-field-ids": [1],
    "fields": [
        *EVENTS["fields"],
        build_field(
            4, "m", {"type": "map", "key-id": 5, "key": "string", "value-id": 6, "value": "int", "value-required": True}
        ),
        build_field(7, "l", {"type": "list", "element-id": 8, "element": "date", "element-required": False}),
        build_field(9, "d", "decimal(5,2)", **{"initial-default": "1.25", "doc": "x"}),
    ],
}

VALID_UPDATES: list[dict[str, Any]] = [
    *build_creation(3),
    {"action": "add-schema", "schema": NESTED_SCHEMA, "last-column-id": 9},
    {"action": "add-spec", "spec": build_spec((1, "bucket[3]", "b"), (2, "hour", "h"))},
    {"action": "add-sort-order", "sort-order": build_order((3, "truncate[2]"), (1, "identity"))},
    add_snapshot(9, 9, 2, **{"first-row-id": 900, "added-rows": 1, "key-id": "k"}),
    set_ref(1, "b", **{"min-snapshots-to-keep": 1, "max-snapshot-age-ms": 1, "max-ref-age-ms": 1}),
    {"action": "remove-snapshots", "snapshot-ids": [1]},
    {"action": "remove-snapshot-ref", "ref-name": "main"},
    {"action": "remove-properties", "removals": ["a"]},
    build_statistics(1),
    build_partition_statistics(1),
    {"action": "remove-statistics", "snapshot-id": 1},
    {"action": "remove-partition-statistics", "snapshot-id": 1},
    {"action": "remove-partition-specs", "spec-ids": [1]},
    {"action": "remove-schemas", "schema-ids": [1]},
    {"action": "enable-row-lineage"},
    {"action": "add-encryption-key", "encryption-key": KEY},
    {"action": "remove-encryption-key", "key-id": "k"},
]


@st.composite
def mutate_documents(draw: st.DrawFn, documents: list[dict[str, Any]]) -> Any:
    """Return a valid document in which up to three values are replaced, removed or duplicated.

    Only items of lists are duplicated, and the values of "action" are kept.
    """
    document = json.loads(json.dumps(draw(st.sampled_from(documents))))
    for _ in range(draw(st.integers(1, 3))):
        container, key = document, None
        while isinstance(container, (dict, list)) and len(container) > 0:
            key = (
                draw(st.sampled_from(sorted(container)))
                if isinstance(container, dict)
                else draw(st.integers(0, len(container) - 1))
            )
            if not isinstance(container[key], (dict, list)) or len(container[key]) == 0 or draw(st.booleans()):
                break
            container = container[key]
        if key is None:
            continue
        change = draw(st.sampled_from(["replace", "remove", "double"]))
        if change == "replace" and key != "action":
            container[key] = draw(JSON)
        elif change == "remove" and key != "action":
            del container[key]
        elif change == "double" and isinstance(container, list):
            container.append(container[key])
    return document


FUZZ = settings(max_examples=examples(250), suppress_health_check=list(HealthCheck))
BASES: list[TableMetadata | None] = [None, *(add_snapshots(build_table(number), 1, 2) for number in (1, 2, 3))]
"""No table, and a table of each format version. The index is the format version."""


def check_round_trip(base: TableMetadata | None, updates: list[Any]) -> None:
    try:
        metadata = apply_json(base, updates, now_ms=NOW_MS + 10**6, new_uuid=UUID)
    except (BadRequest, CommitConflict):
        return
    assert decode_table(encode_table(metadata), "f") == metadata


def test_valid_updates_of_the_fuzzer_are_accepted() -> None:
    assert {update["action"] for update in VALID_UPDATES} == TABLE_ACTIONS.keys()
    for update in VALID_UPDATES:
        if update["action"] not in ("set-current-schema", "set-default-spec", "set-default-sort-order"):
            apply_json(BASES[3], [update], now_ms=NOW_MS + 10**6)


@FUZZ
@given(st.sampled_from(BASES), st.lists(mutate_documents(VALID_UPDATES), min_size=1, max_size=4))
def test_mutated_updates_are_applied_or_rejected(base: TableMetadata | None, updates: list[Any]) -> None:
    check_round_trip(base, updates)
    check_round_trip(None, [*build_creation(3), *updates])


@FUZZ
@given(st.sampled_from(BASES), st.lists(JSON, max_size=3))
def test_any_json_as_updates_is_rejected(base: TableMetadata | None, updates: list[Any]) -> None:
    check_round_trip(base, updates)
    try:
        apply_view_updates(build_view(), updates, now_ms=NOW_MS)
    except BadRequest:
        pass


@FUZZ
@given(
    st.sampled_from([*TABLE_ACTIONS, *VIEW_ACTIONS, *TABLE_REQUIREMENTS, "assert-view-uuid"]),
    st.dictionaries(WORDS, JSON, max_size=4),
    JSON,
)
def test_any_fields_of_a_known_action_are_applied_or_rejected(name: str, fields: dict[str, Any], other: Any) -> None:
    update = {**fields, "action": name}
    check_round_trip(
        BASES[3], [update, {"action": name, "schema": other, "spec": other, "snapshot": other, "updates": other}]
    )
    try:
        apply_view_updates(build_view(), [update, {"action": name, "view-version": other}], now_ms=NOW_MS)
    except BadRequest:
        pass
    for base in BASES:
        try:
            check_requirements(base, read_requirements([{**fields, "type": name}, other]))
        except (BadRequest, CommitConflict):
            pass
    try:
        check_view_requirements(UUID, [{**fields, "type": name}, other])
    except (BadRequest, CommitConflict):
        pass


VIEW_UPDATES: list[dict[str, Any]] = [
    *build_replacement("SELECT 2", **{"default-catalog": "c"}),
    {"action": "add-schema", "schema": NESTED_SCHEMA},
    {"action": "set-properties", "updates": {"version.history.num-entries": "1"}},
    {"action": "remove-properties", "removals": ["a"]},
    {"action": "set-location", "location": "s3://x"},
]


@FUZZ
@given(st.lists(mutate_documents(VIEW_UPDATES), min_size=1, max_size=4))
def test_mutated_view_updates_are_applied_or_rejected(updates: list[Any]) -> None:
    try:
        metadata = apply_view_updates(build_view(), updates, now_ms=NOW_MS)
    except BadRequest:
        return
    assert decode_view(encode_view(metadata), "f") == metadata


@FUZZ
@given(
    mutate_documents([EVENTS, NESTED_SCHEMA]),
    mutate_documents([build_spec((1, "bucket[3]", "b"), (2, "hour", "h"), ids=(1, 2))]) | JSON,
    mutate_documents([build_order((3, "truncate[2]"), (1, "identity"))]) | JSON,
    st.sampled_from(["1", "2", "3"]),
    mutate_documents([build_version()]) | JSON,
)
def test_mutated_create_requests_are_served_or_rejected(
    schema: Any, partition: Any, sort: Any, format_version: str, view_version: Any
) -> None:
    try:
        metadata = build_table_metadata(
            uuid=UUID,
            location="s3://x",
            schema=schema,
            partition_spec=partition,
            sort_order=sort,
            properties={"format-version": format_version},
            now_ms=NOW_MS,
        )
    except BadRequest:
        pass
    else:
        assert decode_table(encode_table(metadata), "f") == metadata
    try:
        view_metadata = build_view_metadata(
            uuid=UUID, location="s3://x", schema=schema, view_version=view_version, properties={}, now_ms=NOW_MS
        )
    except BadRequest:
        pass
    else:
        assert decode_view(encode_view(view_metadata), "f") == view_metadata


@FUZZ
@given(mutate_documents([json.loads(encode_table(base)) for base in BASES if base is not None]))
def test_mutated_metadata_files_are_read_or_corrupt(document: Any) -> None:
    try:
        data = json.dumps(document, allow_nan=False).encode()
    except ValueError:
        reject()
    try:
        metadata = decode_table(data, "f")
    except Corrupt:
        return
    assert decode_table(encode_table(metadata), "f") == metadata
    # Readable metadata can also be changed by a commit, or the commit is rejected with a clear error.
    check_round_trip(metadata, VALID_UPDATES[10:12])  # These updates add a schema and a partition spec.
