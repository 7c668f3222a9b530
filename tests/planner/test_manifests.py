"""Pruning of whole manifests by random partition summaries in the styles of writers, compared with the values.

A manifest must be kept if the partition of some file satisfies the expression for any client. And for simple types a
manifest must be pruned if no value of its range satisfies the expression.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.expression import Bound, Expression, Op
from seamark.formats.iceberg.manifests.manifest import FieldSummary, ManifestFile
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.packing import Form, encode_key
from seamark.metaserver.planner.pruning import manifest_pruning as manifests
from seamark.metaserver.planner.pruning.manifest_pruning import ManifestSummaries
from tests.iceberg.expressions.predicates import VALUES, draw_expression, matches, order_like_java, order_like_python
from tests.planner.lakes.kinds import to_bytes
from tests.planner.lakes.tables import Table, open_test_planner, plan_file_numbers
from tests.seeds import examples

KINDS = dict(enumerate(VALUES, start=1000))
SPEC = PartitionSpec(
    3, tuple(PartitionField(f"p{field}", "identity", source_id=field - 999, field_id=field) for field in KINDS)
)


def build_manifest(summaries: Sequence[FieldSummary] | None, spec_id: int = 3) -> ManifestFile:
    return ManifestFile(
        manifest_path="file:///t/m.avro",
        manifest_length=1,
        partition_spec_id=spec_id,
        content=0,
        sequence_number=1,
        min_sequence_number=1,
        added_snapshot_id=1,
        added_files_count=1,
        existing_files_count=0,
        deleted_files_count=0,
        added_rows_count=1,
        existing_rows_count=0,
        deleted_rows_count=0,
        partitions=None if summaries is None else tuple(summaries),
        key_metadata=None,
        first_row_id=None,
    )


def compute_summary(kind: str, values: Sequence[Any], *, is_java: bool, is_terse: bool) -> FieldSummary:
    """Return the summary of one field in Java's order or Python's. Bounds do not include NaN and null.

    Args:
        is_terse: Omit optional fields.
    """
    has_nan = any(isinstance(value, float) and math.isnan(value) for value in values)
    order = order_like_java if is_java else order_like_python
    present_values = sorted(
        (value for value in values if value is not None and value == value), key=lambda value: order(kind, value)
    )
    return FieldSummary(
        contains_null=None in values,
        contains_nan=None if is_terse else has_nan,
        lower=to_bytes(kind, present_values[0]) if present_values else None,
        upper=to_bytes(kind, present_values[-1]) if present_values else None,
    )


def is_needed(expression: Expression, *fields: FieldSummary) -> bool:
    """Return whether a manifest is needed if only the summaries of these first fields of the spec are known."""
    return ManifestSummaries([build_manifest(fields)]).find_needed_manifests({3: expression}, [SPEC]) == [0]


PARTITIONS = st.lists(
    st.fixed_dictionaries({field: st.one_of(st.none(), VALUES[kind]) for field, kind in KINDS.items()}),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(600, 30))
@given(
    expression=draw_expression(KINDS, with_transforms=False),
    partitions=PARTITIONS,
    is_java=st.booleans(),
    is_terse=st.booleans(),
)
def test_manifest_with_a_file_that_satisfies_the_expression_is_kept(
    expression: Expression, partitions: list[Mapping[int, Any]], is_java: bool, is_terse: bool
) -> None:
    summaries = [
        compute_summary(kind, [partition[field] for partition in partitions], is_java=is_java, is_terse=is_terse)
        for field, kind in KINDS.items()
    ]
    for order in (order_like_java, order_like_python):
        if any(matches(expression, partition, order) for partition in partitions):
            assert is_needed(expression, *summaries)


@settings(max_examples=examples(400))
@given(data=st.data(), kind=st.sampled_from(sorted(kind for kind in VALUES if kind not in ("float", "double", "uuid"))))
def test_manifest_whose_summary_excludes_the_expression_is_pruned(data: st.DataObject, kind: str) -> None:
    """For each predicate on one field, the manifest is kept exactly if a value of its range matches."""
    field = next(field_id for field_id, item_kind in KINDS.items() if item_kind == kind)
    values = data.draw(st.lists(st.one_of(st.none(), VALUES[kind]), min_size=1, max_size=3))
    literal, other_literal = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    present_values = [value for value in values if value is not None]
    expected_results = {
        Op.LT: lambda: min(present_values) < literal,
        Op.LT_EQ: lambda: min(present_values) <= literal,
        Op.GT: lambda: max(present_values) > literal,
        Op.GT_EQ: lambda: max(present_values) >= literal,
        Op.EQ: lambda: min(present_values) <= literal <= max(present_values),
        Op.IN: lambda: any(min(present_values) <= item <= max(present_values) for item in (literal, other_literal)),
    }
    other_summaries = [FieldSummary(None, None, None, None)] * (field - 1000)
    for op, is_expected in expected_results.items():
        literals = tuple(sorted({literal, other_literal})) if op is Op.IN else (literal,)
        bound = Bound(op, field, f"p{field}", kind, "identity", kind, literals)
        is_kept = is_needed(bound, *other_summaries, compute_summary(kind, values, is_java=True, is_terse=False))
        assert is_kept == (bool(present_values) and is_expected()), op


def make_bound(kind: str, op: Op, *values: Any) -> Bound:
    return Bound(op, 1000, "p", kind, "identity", kind, values)


SPEC_WITH_ONE_FIELD = PartitionSpec(3, (PartitionField("p", "identity", source_id=1, field_id=1000),))
ALL_NULL = FieldSummary(True, None, None, None)


@pytest.mark.parametrize("op", [Op.LT, Op.GT_EQ, Op.EQ, Op.IN, Op.NOT_NULL, Op.STARTS_WITH])
def test_manifest_of_nulls_is_kept_only_if_null_satisfies_the_filter(op: Op) -> None:
    values = {Op.NOT_NULL: (), Op.IN: ("a", "b")}.get(op, ("a",))
    assert not is_needed(make_bound("string", op, *values), ALL_NULL)
    assert is_needed(make_bound("string", Op.IS_NULL), ALL_NULL)
    assert is_needed(make_bound("string", Op.NOT_EQ, "a"), ALL_NULL)
    assert not is_needed(make_bound("string", Op.IS_NULL), FieldSummary(False, None, b"a", b"b"))


@pytest.mark.parametrize(
    ("kind", "op", "values", "lower", "upper"),
    [
        ("int", Op.EQ, (5,), b"\x05\x00", b"\x09\x00"),  # No int has this length.
        ("int", Op.LT, (5,), b"\x01\x00\x00\x00", None),
        ("string", Op.STARTS_WITH, ("a",), b"\xff\xfe", b"\xff\xff"),  # This is not UTF-8.
        ("date", Op.NOT_NULL, (), b"", b""),
    ],
)
def test_unreadable_bounds_prune_nothing(
    kind: str, op: Op, values: tuple[Any, ...], lower: bytes | None, upper: bytes | None
) -> None:
    """Bounds of a wrong length or encoding are ignored, except that any bound means that the field has a value."""
    for contains_null in (True, False, None):
        assert is_needed(make_bound(kind, op, *values), FieldSummary(contains_null, None, lower, upper))


def test_missing_bounds_in_the_manifest_list_prune_nothing() -> None:
    bound = make_bound("string", Op.EQ, "zzz")
    summaries = [FieldSummary(False, None, b"a", b"b")]
    listed_manifests = [
        build_manifest(None),
        build_manifest(()),
        build_manifest(summaries, spec_id=4),
        build_manifest(summaries),
    ]
    assert ManifestSummaries(listed_manifests).find_needed_manifests({3: bound}, [SPEC_WITH_ONE_FIELD]) == [0, 1, 2]


@settings(max_examples=examples(150, 8))
@given(data=st.data())
def test_manifests_are_pruned_together_as_each_alone(data: st.DataObject) -> None:
    """The manifests have several specs.

    Some have no summary or fewer fields, or were decoded for earlier expressions.
    """
    kinds = list(KINDS.items())
    reversed_spec = PartitionSpec(4, tuple(reversed(SPEC.fields)))
    listed_manifests = []
    for _ in range(data.draw(st.integers(0, 12))):
        spec_id = data.draw(st.sampled_from([3, 3, 4, 5]))
        rows = data.draw(PARTITIONS)
        summaries = [
            compute_summary(kind, [row[field] for row in rows], is_java=True, is_terse=False) for field, kind in kinds
        ]
        if spec_id == 4:
            summaries.reverse()
        field_count = data.draw(st.sampled_from([len(kinds), len(kinds), len(kinds) // 2, None]))
        listed_manifests.append(
            build_manifest(None if field_count is None else summaries[:field_count], spec_id=spec_id)
        )
    all_summaries = ManifestSummaries(listed_manifests)
    for _ in range(4):  # Later expressions use the summaries that were decoded for earlier expressions.
        expressions_by_spec = {
            spec_id: data.draw(draw_expression(KINDS, with_transforms=False))
            for spec_id in data.draw(st.sets(st.sampled_from([3, 4])))
        }
        single_manifests = [
            number
            for number, listed_manifest in enumerate(listed_manifests)
            if ManifestSummaries([listed_manifest]).find_needed_manifests(expressions_by_spec, [SPEC, reversed_spec])
        ]
        for _ in range(2):  # The second call uses summaries that the first one decoded.
            assert all_summaries.find_needed_manifests(expressions_by_spec, [SPEC, reversed_spec]) == single_manifests


def test_partition_field_is_found_by_its_position_in_its_own_spec() -> None:
    reversed_spec = PartitionSpec(4, tuple(reversed(SPEC.fields)))
    field = 1000 + list(VALUES).index("string")
    summaries = [FieldSummary(None, None, None, None)] * (len(KINDS) - 1)
    position = len(KINDS) - 1 - (field - 1000)
    summaries.insert(position, FieldSummary(False, None, b"a", b"b"))
    for literal, kept_manifests in (("a", [0]), ("c", [])):
        bound = Bound(Op.EQ, field, "p", "string", "identity", "string", (literal,))
        assert (
            ManifestSummaries([build_manifest(summaries, spec_id=4)]).find_needed_manifests(
                {4: bound}, [SPEC, reversed_spec]
            )
            == kept_manifests
        )


def test_in_list_is_prepared_once_for_all_manifests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparing a hundred thousand values again for each of a thousand manifests would take minutes."""
    call_count = 0

    def count_call(form: Form, kind: str, value: Value) -> Any:
        nonlocal call_count
        call_count += 1
        return encode_key(form, kind, value)

    monkeypatch.setattr(manifests, "encode_key", count_call)
    bounds = [to_bytes("long", value) for value in range(201)]
    listed_manifests = [build_manifest([FieldSummary(False, None, low, high)]) for low, high in pairwise(bounds)]
    query = make_bound("long", Op.IN, *range(1, 1000, 4))
    needed_manifests = ManifestSummaries(listed_manifests).find_needed_manifests({3: query}, [SPEC_WITH_ONE_FIELD])
    assert needed_manifests == [low for low in range(200) if low % 4 in (0, 1)]
    # Each literal is encoded once, and so are the two bounds of each manifest.
    assert call_count == len(query.values) + 2 * len(listed_manifests)


async def test_long_in_list_is_evaluated_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    find_manifests = ManifestSummaries.find_needed_manifests

    def note_thread(*args: Any) -> list[int]:
        threads.append(threading.current_thread())
        return find_manifests(*args)

    monkeypatch.setattr(ManifestSummaries, "find_needed_manifests", note_thread)
    table = Table(tmp_path / "t")
    table.commit(1, [table.write_manifest(f"m{day}", [day], day=day) for day in range(4)])
    async with open_test_planner(tmp_path) as test_planner:
        for days, is_on_loop in ((range(1, 3), True), (range(1, 30_000, 3), False)):
            filter_json = {"type": "in", "term": "day", "values": list(days)}
            assert await plan_file_numbers(test_planner, table.metadata, filter_json) == [
                day for day in range(4) if day in days
            ]
            assert [thread is threading.main_thread() for thread in threads] == [is_on_loop]
            threads.clear()
