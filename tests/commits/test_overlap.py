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

KINDS = {1: "long", 2: "string", 3: "date", 4: "double", 5: "int"}
TRANSFORMS = {
    1: ("identity", "bucket[4]", "bucket[8]", "bucket[6]", "truncate[10]", "void"),
    2: ("identity", "bucket[8]", "truncate[1]", "truncate[2]"),
    3: ("identity", "day", "month", "year", "bucket[4]"),
}
POOLS: dict[int, list[Any]] = {
    1: [None, -1, 0, 1, 5, 9, 10, 11, 99, 2**40],
    2: [None, "", "a", "ab", "abc", "b"],
    3: [None, -400, -1, 0, 30, 31, 365, 400],
}


def _build_table(specs: list[PartitionSpec]) -> TableMetadata:
    """Return metadata of a table with one column of each tested type."""
    fields = tuple(Field(number, f"c{number}", False, kind) for number, kind in KINDS.items())
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
    ids = itertools.count(1000 + 100 * spec_id)
    sample = [(source, rng.choice(TRANSFORMS[source])) for source in rng.sample([1, 2, 3], rng.randint(0, 2))]
    fields = (PartitionField(f"f{n}", transform, source, (), next(ids)) for n, (source, transform) in enumerate(sample))
    return PartitionSpec(spec_id, tuple(fields))


def _compute_partition(spec: PartitionSpec, row: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(
        compute_transform(field.transform, KINDS[field.source_id or 0], row[field.source_id or 0])
        for field in spec.fields
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
    rows = [dict(zip(POOLS, values, strict=True)) for values in itertools.product(*POOLS.values())]
    for round_number in itertools.count():
        # Some random cases prove little, so the test requires a minimum number of proofs in total.
        if round_number >= 60 and proved_count > 500:
            break
        assert round_number < 600, (seed, proved_count)
        spec, second_spec = _draw_spec(rng, 0), _draw_spec(rng, 1)
        partitions = PartitionOverlap(_build_table([spec, second_spec]))
        pairs = [(_compute_partition(spec, row), _compute_partition(second_spec, row)) for row in rows]
        all_pairs = set(pairs)
        lefts, rights = sorted({left for left, _ in pairs}, key=repr), sorted({right for _, right in pairs}, key=repr)
        for left, right in itertools.product(rng.sample(lefts, min(8, len(lefts))), rights[:12]):
            a, b = partitions.make_partition(0, left), Targets(partitions, [(1, right)])
            meets = (left, right) in all_pairs
            if not b.overlap(a):
                proved_count += 1
                assert not meets, (seed, spec, left, second_spec, right)
                assert not Targets(partitions, [(0, left)]).overlap(partitions.make_partition(1, right))
            if b.contain(a):
                proved_count += 1
                assert all(right_value == right for left_value, right_value in pairs if left_value == left), (
                    seed,
                    spec,
                    left,
                    second_spec,
                    right,
                )
    assert proved_count > 500


def test_partitions_of_the_same_spec_are_found_by_value_and_other_partitions_by_comparison() -> None:
    seed = first_seed()
    print(f"many: seed {seed}")
    rng = random.Random(seed)
    rows = [dict(zip(POOLS, values, strict=True)) for values in itertools.product(*POOLS.values())]
    for _ in range(60):
        specs = [_draw_spec(rng, 0), _draw_spec(rng, 1)]
        partitions = PartitionOverlap(_build_table(specs))
        expected = [
            (n, _compute_partition(specs[n], rng.choice(rows)))
            for n in (rng.randint(0, 1) for _ in range(rng.randint(1, 6)))
        ]
        targets = Targets(partitions, expected)
        for row in rng.sample(rows, 20):
            values = _compute_partition(specs[0], row)
            partition_value = partitions.make_partition(0, values)
            other_targets = [Targets(partitions, [target]) for target in expected]
            assert targets.overlap(partition_value) == any(
                target.overlap(partition_value) for target in other_targets
            ), (
                seed,
                specs,
                expected,
                values,
            )
            assert targets.contain(partition_value) == any(
                target.contain(partition_value) for target in other_targets
            ), (
                seed,
                specs,
                expected,
                values,
            )
            assert targets.overlap(partition_value) or not any(
                _compute_partition(specs[n], row) == partition for n, partition in expected
            )
            assert targets.contain(partition_value) or (0, values) not in expected


def test_comparing_a_thousand_partitions_with_a_thousand_needs_about_one_lookup_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partitions = PartitionOverlap(_build_table([PartitionSpec(0, (PartitionField("f", "identity", 1, (), 1000),))]))
    look_count = 0
    constraints = PartitionOverlap.list_constraints

    def count_lookups(self: PartitionOverlap, partition: Any) -> Any:
        nonlocal look_count
        look_count += 1
        return constraints(self, partition)

    monkeypatch.setattr(PartitionOverlap, "list_constraints", count_lookups)
    monkeypatch.setattr(overlap, "_are_disjoint", None)  # A comparison of two partitions would raise an error.
    monkeypatch.setattr(overlap, "_implies", None)
    targets = Targets(partitions, [(0, (number,)) for number in range(1000)])
    for number in range(500, 1500):
        partition_value = partitions.make_partition(0, (number,))
        assert targets.overlap(partition_value) == targets.contain(partition_value) == (number < 1000)
    assert look_count == 3000


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_zeros_are_distinct_and_nan_equals_nan(zeros: tuple[float, float]) -> None:
    partitions = PartitionOverlap(_build_table([PartitionSpec(0, (PartitionField("f", "identity", 4, (), 1000),))]))
    targets = Targets(partitions, [(0, (zeros[0],)), (0, (math.nan,))])
    assert targets.contain(partitions.make_partition(0, (zeros[0],)))
    assert not targets.overlap(partitions.make_partition(0, (zeros[1],)))
    assert targets.contain(partitions.make_partition(0, (-math.nan,)))


def _build_two_partitions(
    first: tuple[str, Any], second: tuple[str, Any], source: int = 1
) -> tuple[PartitionOverlap, Any, Any]:
    """Return partitions of one column, each with its own spec."""
    specs = [
        PartitionSpec(number, (PartitionField("f", transform, source, (), 1000 + number),))
        for number, (transform, _) in enumerate((first, second))
    ]
    partitions = PartitionOverlap(_build_table(specs))
    return partitions, (0, (first[1],)), (1, (second[1],))


@pytest.mark.parametrize(
    ("first", "second", "are_disjoint"),
    [
        (("bucket[8]", 3), ("bucket[16]", 11), False),
        (("bucket[8]", 3), ("bucket[16]", 4), True),
        (("bucket[8]", 3), ("bucket[12]", 7), False),
        (("bucket[8]", 3), ("bucket[12]", 6), True),
        (("identity", 34), ("truncate[10]", 30), False),
        (("identity", 34), ("truncate[10]", 40), True),
        (("identity", -(2**31)), ("truncate[10]", -(2**31) - 2), False),
        (("identity", -(2**31)), ("truncate[10]", 2**31 - 2), False),  # Stored when the column was an int
        (("identity", -(2**31) + 8), ("truncate[10]", 2**31 - 2), True),
        (("identity", None), ("bucket[4]", 0), True),
        (("void", None), ("bucket[4]", 0), False),
    ],
)
def test_partitions_of_different_specs_are_disjoint_if_no_row_can_be_in_both(
    first: Any, second: Any, are_disjoint: bool
) -> None:
    partitions, a, b = _build_two_partitions(first, second)
    assert Targets(partitions, [b]).overlap(partitions.make_partition(*a)) is not are_disjoint


def test_bucket_is_contained_in_a_bucket_of_half_as_many_buckets() -> None:
    partitions, half, whole_partition = _build_two_partitions(("bucket[8]", 3), ("bucket[16]", 11))
    assert Targets(partitions, [half]).contain(partitions.make_partition(*whole_partition))
    assert not Targets(partitions, [whole_partition]).contain(partitions.make_partition(*half))


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
def test_partition_dates_before_1970_may_be_one_day_too_high_as_in_old_java_versions(
    transform: str, stored_value: int, value: int, are_disjoint: bool
) -> None:
    partitions, a, b = _build_two_partitions((transform, stored_value), ("identity", value), source=3)
    assert Targets(partitions, [b]).overlap(partitions.make_partition(*a)) is not are_disjoint
    assert Targets(partitions, [a]).overlap(partitions.make_partition(*b)) is not are_disjoint


@pytest.mark.parametrize(("width", "apart"), [(1 << 30, True), ((1 << 30) + 1, False)])
def test_int_truncations_that_writers_compute_differently_are_never_disjoint(width: int, apart: bool) -> None:
    partitions, a, b = _build_two_partitions((f"truncate[{width}]", 0), ("identity", -5), source=5)
    assert Targets(partitions, [b]).overlap(partitions.make_partition(*a)) is not apart
    partitions, a, b = _build_two_partitions((f"truncate[{width}]", 0), ("identity", 5), source=5)
    assert Targets(partitions, [a]).contain(partitions.make_partition(*b)) is apart


def _matches(expression: Expression, value: Any) -> bool:
    """Return True if the value matches a filter on one column.

    Comparisons match neither null nor NaN, and negated comparisons match both.
    """
    match expression:
        case Always(partition_of_always):
            return partition_of_always
        case And(children):
            return all(_matches(child, value) for child in children)
        case Or(children):
            return any(_matches(child, value) for child in children)
        case Bound(op=op, values=literals):
            nan = isinstance(value, float) and math.isnan(value)
            if op in (Op.IS_NULL, Op.NOT_NULL):
                return (value is None) == (op is Op.IS_NULL)
            if op in (Op.IS_NAN, Op.NOT_NAN):
                return nan == (op is Op.IS_NAN)
            if op in (Op.NOT_EQ, Op.NOT_IN):
                return value is None or nan or value not in literals
            if value is None or nan:
                return False
            compared_pairs = {
                Op.LT: lambda: value < literals[0],
                Op.LT_EQ: lambda: value <= literals[0],
                Op.GT: lambda: value > literals[0],
                Op.GT_EQ: lambda: value >= literals[0],
                Op.EQ: lambda: value == literals[0],
                Op.IN: lambda: value in literals,
            }
            return bool(compared_pairs[op]())
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


def test_residual_excludes_no_row_that_the_filter_matches() -> None:
    seed = first_seed()
    print(f"rest: seed {seed}")
    rng = random.Random(seed)
    table = _build_table([PartitionSpec(0, ())])
    for _ in range(400):
        json = _draw_filter(rng)
        bound = bind(parse_expression(json), table.current_schema, table.schemas, case_sensitive=True)
        negation = negate_bound_expression(bound, table)
        for value in (None, math.nan, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
            assert _matches(bound, value) or _matches(negation, value), (seed, json, value)
            ordinary = value is not None and not math.isnan(value)
            assert not (ordinary and _matches(bound, value) and _matches(negation, value)), (seed, json, value)
