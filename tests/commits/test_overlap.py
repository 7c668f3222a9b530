"""Tests of partitions of different specs, and of the residual of a filter, compared with rows.

If two partitions are proved to be disjoint, contained or complementary, the rows must agree.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.metadata.sort_order import UNSORTED
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.iceberg.types.transforms import compute_transform
from seamark.metaserver.commit.conflicts import overlap
from seamark.metaserver.commit.conflicts.overlap import PartitionOverlap, Targets
from seamark.metaserver.commit.conflicts.overwrite import negate_bound_expression
from tests.seeds import first_seed

TYPES = {1: "long", 2: "string", 3: "date", 4: "double", 5: "int"}
"""The types of the columns, by id. TRANSFORMS and VALUES_BY_SOURCE are for the first three columns."""
TRANSFORMS = {
    1: ("identity", "bucket[4]", "bucket[8]", "bucket[6]", "truncate[10]", "void"),
    2: ("identity", "bucket[8]", "truncate[1]", "truncate[2]"),
    3: ("identity", "day", "month", "year", "bucket[4]"),
}
VALUES_BY_SOURCE: dict[int, list[Any]] = {
    1: [None, -1, 0, 1, 5, 9, 10, 11, 99, 2**40],
    2: [None, "", "a", "ab", "abc", "b"],
    3: [None, -400, -1, 0, 30, 31, 365, 400],
}


ROUNDS_MIN = 60
PROOFS_MIN = 500


def _build_table(specs: list[PartitionSpec]) -> TableMetadata:
    """Return the metadata of a table with these partition specs, and with one column of each tested type."""
    fields = tuple(Field(column_id, f"c{column_id}", False, column_type) for column_id, column_type in TYPES.items())
    return TableMetadata(
        format_version=2,
        table_uuid="00000000-0000-4000-8000-000000000000",
        location="file:///t",
        last_updated_ms=0,
        last_column_id=5,
        schemas=(Schema(fields, 0),),
        current_schema_id=0,
        partition_specs=tuple(specs),
        default_spec_id=0,
        last_partition_id=2000,
        sort_orders=(UNSORTED,),
        default_sort_order_id=0,
    )


def _draw_spec(rng: random.Random, spec_id: int) -> PartitionSpec:
    field_ids = itertools.count(1000 + 100 * spec_id)
    sources_and_transforms = [
        (source, rng.choice(TRANSFORMS[source])) for source in rng.sample([1, 2, 3], rng.randint(0, 2))
    ]
    fields = (
        PartitionField(f"f{index}", transform, source, (), next(field_ids))
        for index, (source, transform) in enumerate(sources_and_transforms)
    )
    return PartitionSpec(spec_id, tuple(fields))


def _compute_partition(spec: PartitionSpec, row: dict[int, Any]) -> tuple[Any, ...]:
    source_ids = [field.source_id or 0 for field in spec.fields]  # Each field of these specs has a source column.
    return tuple(
        compute_transform(field.transform, TYPES[source_id], row[source_id])
        for field, source_id in zip(spec.fields, source_ids, strict=True)
    )


def test_partitions_beyond_the_comparison_limit_count_as_overlapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overlap, "COMPARISONS_MAX", 50)
    specs = [
        PartitionSpec(number, (PartitionField("f", transform, 1, (), 1000 + number),))
        for number, transform in enumerate(("bucket[4]", "bucket[8]"))
    ]
    partitions = PartitionOverlap(_build_table(specs))
    targets = Targets(partitions, [(0, (3,))] * 2 + [(1, (5,))])
    other_partition, contained_partition = partitions.make_partition(1, (2,)), partitions.make_partition(1, (7,))
    assert targets.contain(contained_partition)
    assert not any(targets.overlap(other_partition) for _ in range(49))
    assert targets.overlap(other_partition)
    assert not targets.contain(contained_partition)
    assert targets.contain(partitions.make_partition(1, (5,))), "a partition of the same spec is found by its value"


def test_proved_relations_of_two_partitions_are_true_for_every_row() -> None:
    seed = first_seed()
    print(f"overlap: seed {seed}")
    rng = random.Random(seed)
    proved_count = 0
    rows = [
        dict(zip(VALUES_BY_SOURCE, values, strict=True)) for values in itertools.product(*VALUES_BY_SOURCE.values())
    ]
    for round_number in itertools.count():
        # Some random cases prove little, so the test runs until it has a minimum number of proofs in total.
        if round_number >= ROUNDS_MIN and proved_count > PROOFS_MIN:
            break
        assert round_number < 10 * ROUNDS_MIN, (seed, proved_count)
        spec, other_spec = _draw_spec(rng, 0), _draw_spec(rng, 1)
        partitions = PartitionOverlap(_build_table([spec, other_spec]))
        partitions_of_rows = [(_compute_partition(spec, row), _compute_partition(other_spec, row)) for row in rows]
        occurring_pairs = set(partitions_of_rows)
        left_partitions, right_partitions = (
            sorted({left for left, _ in partitions_of_rows}, key=repr),
            sorted({right for _, right in partitions_of_rows}, key=repr),
        )
        for left, right in itertools.product(
            rng.sample(left_partitions, min(8, len(left_partitions))), right_partitions[:12]
        ):
            partition, target = partitions.make_partition(0, left), Targets(partitions, [(1, right)])
            is_shared = (left, right) in occurring_pairs
            if not target.overlap(partition):
                proved_count += 1
                assert not is_shared, (seed, spec, left, other_spec, right)
                assert not Targets(partitions, [(0, left)]).overlap(partitions.make_partition(1, right))
            if target.contain(partition):
                proved_count += 1
                assert all(
                    right_value == right for left_value, right_value in partitions_of_rows if left_value == left
                ), (
                    seed,
                    spec,
                    left,
                    other_spec,
                    right,
                )


def test_partitions_of_the_same_spec_are_found_by_value_and_other_partitions_by_comparison() -> None:
    """Targets are partitions that a change reads or replaces.

    Many targets together must overlap or contain a partition exactly if one of them alone does.
    """
    seed = first_seed()
    print(f"many: seed {seed}")
    rng = random.Random(seed)
    rows = [
        dict(zip(VALUES_BY_SOURCE, values, strict=True)) for values in itertools.product(*VALUES_BY_SOURCE.values())
    ]
    for _ in range(60):
        specs = [_draw_spec(rng, 0), _draw_spec(rng, 1)]
        partitions = PartitionOverlap(_build_table(specs))
        target_partitions = [
            (spec_id, _compute_partition(specs[spec_id], rng.choice(rows)))
            for spec_id in (rng.randint(0, 1) for _ in range(rng.randint(1, 6)))
        ]
        targets = Targets(partitions, target_partitions)
        for row in rng.sample(rows, 20):
            values = _compute_partition(specs[0], row)
            tested_partition = partitions.make_partition(0, values)
            single_targets = [Targets(partitions, [target]) for target in target_partitions]
            assert targets.overlap(tested_partition) == any(
                target.overlap(tested_partition) for target in single_targets
            ), (
                seed,
                specs,
                target_partitions,
                values,
            )
            assert targets.contain(tested_partition) == any(
                target.contain(tested_partition) for target in single_targets
            ), (
                seed,
                specs,
                target_partitions,
                values,
            )
            assert targets.overlap(tested_partition) or not any(
                _compute_partition(specs[spec_id], row) == partition for spec_id, partition in target_partitions
            )
            assert targets.contain(tested_partition) or (0, values) not in target_partitions


def test_comparing_a_thousand_partitions_with_a_thousand_needs_three_lookups_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partitions = PartitionOverlap(_build_table([PartitionSpec(0, (PartitionField("f", "identity", 1, (), 1000),))]))
    lookup_count = 0
    original_method = PartitionOverlap.list_constraints

    def count_lookups(self: PartitionOverlap, partition: Any) -> Any:
        nonlocal lookup_count
        lookup_count += 1
        return original_method(self, partition)

    monkeypatch.setattr(PartitionOverlap, "list_constraints", count_lookups)
    monkeypatch.setattr(overlap, "_are_disjoint", None)  # A comparison of two partitions would raise an error.
    monkeypatch.setattr(overlap, "_implies", None)
    targets = Targets(partitions, [(0, (number,)) for number in range(1000)])
    for number in range(500, 1500):
        tested_partition = partitions.make_partition(0, (number,))
        assert targets.overlap(tested_partition) == targets.contain(tested_partition) == (number < 1000)
    assert lookup_count == 3000  # One for each target, and two for each of the 1,000 tested partitions


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_zeros_are_distinct_and_nan_equals_nan(zeros: tuple[float, float]) -> None:
    partitions = PartitionOverlap(_build_table([PartitionSpec(0, (PartitionField("f", "identity", 4, (), 1000),))]))
    zero, other_zero = zeros
    targets = Targets(partitions, [(0, (zero,)), (0, (math.nan,))])
    assert targets.contain(partitions.make_partition(0, (zero,)))
    assert not targets.overlap(partitions.make_partition(0, (other_zero,)))
    assert targets.contain(partitions.make_partition(0, (-math.nan,)))


def _build_two_partitions(
    first_partition: tuple[str, Any], second_partition: tuple[str, Any], source_id: int = 1
) -> tuple[PartitionOverlap, Any, Any]:
    """Create a table with two partition specs of one field. Return (its partitions, first partition, second partition).

    `first_partition` and `second_partition` are (transform, value). Each partition has its own spec of one field.
    """
    (first_transform, first_value), (second_transform, second_value) = first_partition, second_partition
    specs = [
        PartitionSpec(number, (PartitionField("f", transform, source_id, (), 1000 + number),))
        for number, transform in enumerate((first_transform, second_transform))
    ]
    partitions = PartitionOverlap(_build_table(specs))
    return partitions, (0, (first_value,)), (1, (second_value,))


@pytest.mark.parametrize(
    ("first_partition", "second_partition", "are_disjoint"),
    [
        (("bucket[8]", 3), ("bucket[16]", 11), False),
        (("bucket[8]", 3), ("bucket[16]", 4), True),
        (("bucket[8]", 3), ("bucket[12]", 7), False),
        (("bucket[8]", 3), ("bucket[12]", 6), True),
        (("identity", 34), ("truncate[10]", 30), False),
        (("identity", 34), ("truncate[10]", 40), True),
        (("identity", -(2**31)), ("truncate[10]", -(2**31) - 2), False),
        # When the column was an int, the truncated value -(2**31) - 2 overflowed its 32 bits.
        (("identity", -(2**31)), ("truncate[10]", 2**31 - 2), False),
        (("identity", -(2**31) + 8), ("truncate[10]", 2**31 - 2), True),
        (("identity", None), ("bucket[4]", 0), True),
        (("void", None), ("bucket[4]", 0), False),
    ],
)
def test_partitions_of_different_specs_are_disjoint_if_no_row_can_be_in_both(
    first_partition: Any, second_partition: Any, are_disjoint: bool
) -> None:
    partitions, partition, other_partition = _build_two_partitions(first_partition, second_partition)
    assert Targets(partitions, [other_partition]).overlap(partitions.make_partition(*partition)) is not are_disjoint


def test_bucket_is_contained_in_a_bucket_of_half_as_many_buckets() -> None:
    partitions, large_bucket, small_bucket = _build_two_partitions(("bucket[8]", 3), ("bucket[16]", 11))
    assert Targets(partitions, [large_bucket]).contain(partitions.make_partition(*small_bucket))
    assert not Targets(partitions, [small_bucket]).contain(partitions.make_partition(*large_bucket))


@pytest.mark.parametrize(
    ("transform", "stored_value", "value", "are_disjoint"),
    [
        ("month", -1, -1, False),
        ("month", 0, -1, False),
        ("month", 1, -1, True),
        ("month", -2, -1, True),
        ("year", 0, -1, False),
        ("month", 1, 0, True),
        ("month", 0, 0, False),
        ("day", 0, -1, True),
    ],
)
def test_months_and_years_before_1970_may_be_one_too_high_as_in_old_java_versions(
    transform: str, stored_value: int, value: int, are_disjoint: bool
) -> None:
    partitions, stored_partition, partition = _build_two_partitions(
        (transform, stored_value), ("identity", value), source_id=3
    )
    assert Targets(partitions, [partition]).overlap(partitions.make_partition(*stored_partition)) is not are_disjoint
    assert Targets(partitions, [stored_partition]).overlap(partitions.make_partition(*partition)) is not are_disjoint


@pytest.mark.parametrize(("width", "is_proved"), [(1 << 30, True), ((1 << 30) + 1, False)])
def test_int_truncations_that_writers_compute_differently_prove_nothing(width: int, is_proved: bool) -> None:
    partitions, truncated_partition, partition = _build_two_partitions(
        (f"truncate[{width}]", 0), ("identity", -5), source_id=5
    )
    assert Targets(partitions, [partition]).overlap(partitions.make_partition(*truncated_partition)) is not is_proved
    partitions, truncated_partition, partition = _build_two_partitions(
        (f"truncate[{width}]", 0), ("identity", 5), source_id=5
    )
    assert Targets(partitions, [truncated_partition]).contain(partitions.make_partition(*partition)) is is_proved


def _matches(expression: Expression, value: Any) -> bool:
    """Return True if the value matches a filter on one column.

    Comparisons match neither null nor NaN, and negated comparisons match both.
    """
    match expression:
        case Always(matches_all):
            return matches_all
        case And(children):
            return all(_matches(child, value) for child in children)
        case Or(children):
            return any(_matches(child, value) for child in children)
        case Bound(op=op, values=literals):
            is_nan = isinstance(value, float) and math.isnan(value)
            if op in (Op.IS_NULL, Op.NOT_NULL):
                return (value is None) == (op is Op.IS_NULL)
            if op in (Op.IS_NAN, Op.NOT_NAN):
                return is_nan == (op is Op.IS_NAN)
            if op in (Op.NOT_EQ, Op.NOT_IN):
                return value is None or is_nan or value not in literals
            if value is None or is_nan:
                return False
            compare_by_op = {
                Op.LT: lambda: value < literals[0],
                Op.LT_EQ: lambda: value <= literals[0],
                Op.GT: lambda: value > literals[0],
                Op.GT_EQ: lambda: value >= literals[0],
                Op.EQ: lambda: value == literals[0],
                Op.IN: lambda: value in literals,
            }
            return bool(compare_by_op[op]())
    raise AssertionError(expression)


def _draw_filter(rng: random.Random, depth: int = 0) -> Any:
    if depth < 2 and rng.random() < 0.5:
        left, right = _draw_filter(rng, depth + 1), _draw_filter(rng, depth + 1)
        return {"type": rng.choice(["and", "or"]), "left": left, "right": right}
    op = rng.choice(["lt", "lt-eq", "gt", "gt-eq", "eq", "not-eq", "in", "not-in", "is-null", "not-null", "is-nan"])
    filter_json: dict[str, Any] = {"type": op, "term": "c4"}
    if op in ("in", "not-in"):
        filter_json["values"] = rng.sample([0.5, 1.5, 2.5], 2)
    elif not op.startswith(("is", "not-n")) or op == "not-eq":
        filter_json["value"] = rng.choice([0.5, 1.5, 2.5])
    return filter_json


def test_filter_and_its_negation_match_each_row_and_exclude_each_other_for_numbers() -> None:
    """Null and NaN match at least one of the two, and may match both."""
    seed = first_seed()
    print(f"residual: seed {seed}")
    rng = random.Random(seed)
    table = _build_table([PartitionSpec(0, ())])
    for _ in range(400):
        filter_json = _draw_filter(rng)
        condition = bind(parse_expression(filter_json), table.current_schema, table.schemas, case_sensitive=True)
        negation = negate_bound_expression(condition, table)
        for value in (None, math.nan, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
            assert _matches(condition, value) or _matches(negation, value), (seed, filter_json, value)
            is_number = value is not None and not math.isnan(value)
            assert not (is_number and _matches(condition, value) and _matches(negation, value)), (
                seed,
                filter_json,
                value,
            )
