"""Tests of projections: they are correct for every row, and as narrow as Java's and PyIceberg's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.evaluation import may_match, must_match
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Always, And, Bound, Expression, Op, Or
from seamark.formats.iceberg.expressions.projection import (
    RANGES_MAX,
    find_source_ranges,
    project_inclusive,
    project_strict,
)
from seamark.formats.iceberg.metadata.partition import PartitionField, PartitionSpec
from seamark.formats.iceberg.types.transforms import compute_result_type, compute_transform
from seamark.formats.iceberg.types.values import Value
from tests.iceberg.expressions.predicates import (
    COLUMNS,
    DAY,
    TRANSFORMS,
    compute_partition,
    draw_expression,
    draw_predicate,
    draw_spec,
    draw_values_of,
    holds,
    index_by_field,
    matches,
    order_like_java,
    order_like_python,
)
from tests.seeds import examples

EXAMPLES = 200


def build_predicate(op: Op, kind: str, *values: Value, transform: str = "identity") -> Bound:
    return Bound(op, 1, "x", kind, transform, compute_result_type(transform, kind), values)


def build_spec(*transforms: str) -> PartitionSpec:
    return PartitionSpec(
        0,
        tuple(
            PartitionField(f"p{index}", name, source_id=1, field_id=1000 + index)
            for index, name in enumerate(transforms)
        ),
    )


def format_expression(expression: Expression) -> str:
    if isinstance(expression, Always):
        return str(expression.value).lower()
    if isinstance(expression, And | Or):
        return f"({f' {type(expression).__name__.lower()} '.join(map(format_expression, expression.children))})"
    assert isinstance(expression, Bound)
    return " ".join([expression.name, expression.op, *map(repr, expression.values)])


@st.composite
def draw_row(draw: st.DrawFn, columns: dict[int, str]) -> dict[int, Value | None]:
    return {column: draw(st.none() | draw_values_of(kind)) for column, kind in columns.items()}


@given(st.data())
@settings(max_examples=examples(EXAMPLES))
def test_partition_of_a_matching_row_satisfies_the_inclusive_projection(data: st.DataObject) -> None:
    # The filter and the spec may use a second column.
    columns = data.draw(st.sampled_from(sorted(COLUMNS)).map(lambda column: {column: COLUMNS[column], 99: "int"}))
    row, spec = data.draw(draw_row(columns)), data.draw(draw_spec(columns))
    expression = data.draw(draw_expression(columns))
    assume(matches(expression, row, order_like_java) or matches(expression, row, order_like_python))
    # Old versions of Iceberg's Java library stored other partition values, for example for times before 1970.
    partition = compute_partition(spec, columns, row, as_old_java=data.draw(st.booleans()))
    projected_predicate = project_inclusive(expression, spec)
    assert may_match(projected_predicate, index_by_field(spec, partition)), format_expression(projected_predicate)


@given(st.data())
@settings(max_examples=examples(EXAMPLES))
def test_row_matches_when_its_partition_satisfies_the_strict_projection(data: st.DataObject) -> None:
    columns = data.draw(st.sampled_from(sorted(COLUMNS)).map(lambda column: {column: COLUMNS[column]}))
    row, spec, request = (
        data.draw(draw_row(columns)),
        data.draw(draw_spec(columns)),
        data.draw(draw_predicate(columns)),
    )
    # Old versions of Iceberg's Java library stored other partition values, for example for times before 1970.
    partition = compute_partition(spec, columns, row, as_old_java=data.draw(st.booleans()))
    projected_predicate = project_strict(request, spec)
    assume(must_match(projected_predicate, index_by_field(spec, partition)))
    assert matches(request, row, order_like_java), format_expression(projected_predicate)
    assert matches(request, row, order_like_python), format_expression(projected_predicate)


@pytest.mark.parametrize(
    ("transform", "condition", "expected"),
    [
        ("identity", build_predicate(Op.LT, "int", 5), "p0 lt 5"),
        ("identity", build_predicate(Op.NOT_IN, "int", 5, 7), "p0 not-in 5 7"),
        ("identity", build_predicate(Op.IS_NAN, "float"), "p0 is-nan"),
        # The specification gives the hash 2017239379 for 34.
        ("bucket[4]", build_predicate(Op.EQ, "long", 34), f"p0 eq {2017239379 % 4}"),
        ("bucket[4]", build_predicate(Op.LT, "long", 34), "p0 not-null"),
        ("bucket[4]", build_predicate(Op.NOT_EQ, "long", 34), "true"),
        ("bucket[4]", build_predicate(Op.IS_NULL, "long"), "p0 is-null"),
        ("truncate[8]", build_predicate(Op.LT, "int", 16), "p0 lt 9"),
        ("truncate[8]", build_predicate(Op.GT, "int", 15), "p0 gt-eq 16"),
        ("truncate[8]", build_predicate(Op.IN, "int", 1, 2, 17), "p0 in 0 16"),
        ("truncate[8]", build_predicate(Op.NOT_EQ, "int", 1), "true"),
        ("truncate[2]", build_predicate(Op.STARTS_WITH, "string", "a"), "p0 starts-with 'a'"),
        ("truncate[2]", build_predicate(Op.STARTS_WITH, "string", "ab"), "p0 eq 'ab'"),
        ("truncate[2]", build_predicate(Op.STARTS_WITH, "string", "abc"), "p0 eq 'ab'"),
        ("truncate[2]", build_predicate(Op.NOT_STARTS_WITH, "string", "a"), "p0 not-starts-with 'a'"),
        ("truncate[2]", build_predicate(Op.NOT_STARTS_WITH, "string", "ab"), "p0 not-eq 'ab'"),
        ("truncate[2]", build_predicate(Op.NOT_STARTS_WITH, "string", "abc"), "true"),
        ("truncate[2]", build_predicate(Op.LT_EQ, "string", "abc"), "p0 lt-eq 'ab'"),
        ("truncate[2]", build_predicate(Op.LT, "string", "ab"), "p0 lt 'ab'"),
        ("truncate[2]", build_predicate(Op.GT, "string", "abc"), "p0 gt-eq 'ab'"),
        ("day", build_predicate(Op.LT, "timestamp", 2 * DAY), "p0 lt 2"),
        ("day", build_predicate(Op.LT_EQ, "timestamp", 2 * DAY), "p0 lt 3"),
        ("day", build_predicate(Op.EQ, "timestamp", 2 * DAY + 5), "p0 eq 2"),
        ("day", build_predicate(Op.NOT_EQ, "date", 2), "p0 not-eq 2"),
        ("month", build_predicate(Op.GT_EQ, "date", 31), "p0 gt-eq 1"),
        ("void", build_predicate(Op.IS_NULL, "int"), "true"),
        ("zorder", build_predicate(Op.EQ, "int", 1), "true"),
        ("hour", build_predicate(Op.EQ, "timestamp_ns", 19, transform="day"), "(p0 gt-eq 456 and p0 lt 480)"),
        ("identity", build_predicate(Op.EQ, "timestamp", 1, transform="day"), f"(p0 gt-eq {DAY} and p0 lt {2 * DAY})"),
        ("day", build_predicate(Op.EQ, "timestamp", 19, transform="day"), "p0 eq 19"),
        ("bucket[4]", build_predicate(Op.GT, "int", 2, transform="bucket[4]"), "p0 gt 2"),
        ("bucket[4]", build_predicate(Op.EQ, "int", 2, transform="bucket[8]"), "p0 not-null"),
    ],
)
def test_inclusive_projection_gives_the_partition_predicate(transform: str, condition: Bound, expected: str) -> None:
    assert format_expression(project_inclusive(condition, build_spec(transform))) == expected


def test_partition_predicates_have_the_fields_id_name_and_type() -> None:
    assert project_inclusive(build_predicate(Op.EQ, "timestamp", DAY), build_spec("bucket[3]", "day")) == And(
        (
            Bound(Op.EQ, 1000, "p0", "int", "identity", "int", (compute_transform("bucket[3]", "timestamp", DAY),)),  # type: ignore[arg-type]
            Bound(Op.EQ, 1001, "p1", "date", "identity", "date", (1,)),
        )
    )


def test_projection_includes_the_partitions_to_which_old_writers_added_times_before_1970() -> None:
    query_predicate = build_predicate(Op.EQ, "timestamp", -1)
    assert format_expression(project_inclusive(query_predicate, build_spec("day"))) == "p0 in -1 0"
    assert (
        format_expression(project_strict(build_predicate(Op.NOT_EQ, "timestamp", -1), build_spec("day")))
        == "p0 not-in -1 0"
    )
    assert format_expression(project_inclusive(build_predicate(Op.LT, "timestamp", 0), build_spec("day"))) == "p0 lt 1"
    assert format_expression(project_inclusive(build_predicate(Op.EQ, "date", -1), build_spec("day"))) == "p0 eq -1"


def test_excluded_day_is_kept_if_it_may_have_rows_of_the_previous_day() -> None:
    for days, expected in ((-1,), "true"), ((0,), "true"), ((1,), "p0 not-eq 1"):
        query_predicate = build_predicate(Op.NOT_EQ, "timestamp", *days, transform="day")
        assert format_expression(project_inclusive(query_predicate, build_spec("day"))) == expected
    query_predicate = build_predicate(Op.NOT_IN, "timestamp", -3, 0, 2, 5, transform="day")
    assert format_expression(project_inclusive(query_predicate, build_spec("day"))) == "p0 not-in 2 5"


@pytest.mark.parametrize("op", [Op.LT, Op.GT_EQ, Op.EQ])
def test_predicate_on_truncation_to_the_maximum_int_of_java_excludes_only_nulls(op: Op) -> None:
    # For truncate[2147483647](1), Java computes 2 and not 0.
    assert (
        format_expression(project_inclusive(build_predicate(op, "int", 1), build_spec("truncate[2147483647]")))
        == "p0 not-null"
    )
    assert (
        format_expression(find_source_ranges(build_predicate(op, "int", 2, transform="truncate[2147483647]")))
        == "x not-null"
    )


def test_projection_includes_results_that_wrap_around() -> None:
    assert (
        format_expression(project_inclusive(build_predicate(Op.LT, "int", 5), build_spec("truncate[10]")))
        == "(p0 lt 1 or p0 gt-eq 2147483646)"
    )
    assert (
        format_expression(project_inclusive(build_predicate(Op.LT, "int", 5), build_spec("truncate[8]"))) == "p0 lt 1"
    )


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (build_predicate(Op.EQ, "long", -(2**31)), "p0 in -2147483650 2147483646"),
        (build_predicate(Op.IN, "long", -(2**31) + 1, 7), "p0 in -2147483650 0 2147483646"),
        (build_predicate(Op.EQ, "long", -(2**31) + 8), "p0 eq -2147483640"),
        (build_predicate(Op.LT, "long", -(2**31)), "(p0 lt -2147483649 or p0 gt-eq 9223372036854775806)"),
        (build_predicate(Op.LT, "long", 5), "(p0 lt 1 or p0 gt-eq 9223372036854775806 or p0 eq 2147483646)"),
        (build_predicate(Op.GT, "long", 5), "p0 gt-eq 0"),
        (
            build_predicate(Op.LT, "long", -2147483640, transform="truncate[10]"),
            "(p0 lt -2147483640 or p0 eq 2147483646)",
        ),
        (build_predicate(Op.NOT_EQ, "long", 2147483646, transform="truncate[10]"), "true"),
        (build_predicate(Op.NOT_IN, "long", 20, 2147483646, transform="truncate[10]"), "p0 not-eq 20"),
        (build_predicate(Op.EQ, "long", 5, transform="truncate[10]"), "p0 eq 5"),
    ],
)
def test_projection_includes_wrapped_truncations_of_a_long_that_was_an_int(condition: Bound, expected: str) -> None:
    assert format_expression(project_inclusive(condition, build_spec("truncate[10]"))) == expected


def test_truncation_to_more_than_half_of_the_maximum_int_excludes_only_nulls() -> None:
    """The column may have been an int when a file was written, and Java's remainder of an int overflows.

    Java then stores 1,294,967,296 and not 0 for the value 1,100,000,000.
    """
    long_truncation = "truncate[1500000000]"
    assert (
        format_expression(
            project_inclusive(build_predicate(Op.EQ, "long", 0, transform=long_truncation), build_spec(long_truncation))
        )
        == "p0 not-null"
    )
    assert (
        format_expression(
            project_inclusive(
                build_predicate(Op.NOT_EQ, "long", 0, transform=long_truncation), build_spec(long_truncation)
            )
        )
        == "true"
    )
    assert (
        project_strict(build_predicate(Op.LT, "long", 0, transform=long_truncation), build_spec(long_truncation))
        == FALSE
    )


def test_transform_of_several_columns_decides_nothing() -> None:
    two_column_spec = PartitionSpec(0, (PartitionField("p", "bucket[4]", source_ids=(1, 2), field_id=1000),))
    assert project_inclusive(build_predicate(Op.EQ, "int", 1), two_column_spec) == TRUE
    assert project_strict(build_predicate(Op.NOT_EQ, "int", 1), two_column_spec) == FALSE
    assert project_strict(build_predicate(Op.GT, "int", 1), build_spec("bucket[4]")) == FALSE


def test_comparison_that_all_values_satisfy_projects_to_not_null() -> None:
    true_predicate = build_predicate(Op.GT_EQ, "int", -(2**31))
    assert format_expression(project_inclusive(true_predicate, build_spec("truncate[8]"))) == "p0 not-null"
    assert not must_match(project_strict(true_predicate, build_spec("truncate[8]")), {1000: None})


ORDERED_TRANSFORMS = [
    (kind, transform)
    for kind, transforms in TRANSFORMS.items()
    for transform in transforms
    if "bucket" not in transform and transform != "truncate[2147483647]"
]


@given(st.data())
@settings(max_examples=examples(EXAMPLES))
def test_predicate_on_a_transform_is_rewritten_on_its_source(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(TRANSFORMS)))
    query = data.draw(draw_predicate({1: kind}).filter(lambda predicate: predicate.transform != "identity"))
    row = {1: data.draw(st.none() | draw_values_of(kind))}
    ranges = find_source_ranges(query)
    assert all(leaf.transform == "identity" and leaf.result == kind for leaf in list_leaves(ranges))
    expected = matches(query, row, order_like_python)
    if (kind, query.transform) in ORDERED_TRANSFORMS:
        assert matches(ranges, row, order_like_python) == expected, format_expression(ranges)
    else:
        assert matches(ranges, row, order_like_python) or not expected, format_expression(ranges)


def list_leaves(expression: Expression) -> list[Bound]:
    if isinstance(expression, And | Or):
        return [leaf for child in expression.children for leaf in list_leaves(child)]
    return [expression] if isinstance(expression, Bound) else []


@given(st.data())
@settings(max_examples=examples(EXAMPLES))
def test_source_bounds_prune_as_much_as_javas_transformed_bounds(data: st.DataObject) -> None:
    kind, transform = data.draw(st.sampled_from(ORDERED_TRANSFORMS))
    query = data.draw(draw_predicate({1: kind}).filter(lambda predicate: predicate.transform == transform))
    lower, upper = sorted([data.draw(draw_values_of(kind)), data.draw(draw_values_of(kind))])
    lower_result, upper_result = compute_transform(transform, kind, lower), compute_transform(transform, kind, upper)
    assume(lower_result <= upper_result)  # type: ignore[operator]
    assume(not is_wrapping(transform, kind))
    for nulls in (False, True):
        if is_kept_by_bounds(find_source_ranges(query), lower, upper, nulls):
            assert is_kept_by_java(query, lower_result, upper_result, nulls), format_expression(
                find_source_ranges(query)
            )


def is_wrapping(transform: str, kind: str) -> bool:
    """Return True if Java's results for the smallest values of the type wrap around to large values."""
    return (transform == "hour" and kind == "timestamp") or (transform == "truncate[10]" and kind != "decimal(9, 2)")


def is_kept_by_java(bound: Bound, lower: Any, upper: Any, nulls: bool) -> bool:
    """Return whether `InclusiveMetricsEvaluator` keeps a file with these bounds of the column.

    If `nulls` is True, the file also has nulls.
    """
    value: Any = bound.values[0] if bound.values else None
    has_one_value = not nulls and lower == upper
    return {
        Op.IS_NULL: lambda: nulls,
        Op.NOT_NULL: lambda: True,
        Op.LT: lambda: lower < value,
        Op.LT_EQ: lambda: lower <= value,
        Op.GT: lambda: upper > value,
        Op.GT_EQ: lambda: upper >= value,
        Op.EQ: lambda: lower <= value <= upper,
        Op.IN: lambda: any(lower <= literal <= upper for literal in bound.values),
        Op.NOT_EQ: lambda: not (has_one_value and lower == value),
        Op.NOT_IN: lambda: not (has_one_value and lower in bound.values),
        # Java compares the bounds for this operator, too. The test does not check it: any file counts as kept.
        Op.STARTS_WITH: lambda: True,
        Op.NOT_STARTS_WITH: lambda: nulls or not (lower.startswith(value) and upper.startswith(value)),
    }[bound.op]()


def is_kept_by_bounds(expression: Expression, lower: Any, upper: Any, nulls: bool) -> bool:
    if isinstance(expression, Always):
        return expression.value
    if isinstance(expression, And):
        return all(is_kept_by_bounds(child, lower, upper, nulls) for child in expression.children)
    if isinstance(expression, Or):
        return any(is_kept_by_bounds(child, lower, upper, nulls) for child in expression.children)
    assert isinstance(expression, Bound)
    if expression.op == Op.STARTS_WITH:
        width = len(expression.values[0])  # type: ignore[arg-type]
        return bool(lower[:width] <= expression.values[0] <= upper[:width])
    return is_kept_by_java(expression, lower, upper, nulls)


def test_large_value_list_is_projected_to_one_range_or_no_restriction() -> None:
    days = tuple(range(0, 4 * RANGES_MAX, 2))  # No two days are adjacent, so they are too many ranges.
    many_days = find_source_ranges(build_predicate(Op.IN, "timestamp", *days, transform="day"))
    assert format_expression(many_days) == f"(x gt-eq 0 and x lt {(days[-1] + 1) * DAY})"
    assert find_source_ranges(build_predicate(Op.NOT_IN, "timestamp", *days, transform="day")) == TRUE
    merged_ranges = find_source_ranges(build_predicate(Op.IN, "timestamp", *range(1000), transform="day"))
    assert format_expression(merged_ranges) == f"(x gt-eq 0 and x lt {1000 * DAY})"


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (build_predicate(Op.EQ, "string", "ab", transform="truncate[2]"), "(x gt-eq 'ab' and x lt 'ac')"),
        (build_predicate(Op.EQ, "string", "a", transform="truncate[2]"), "x eq 'a'"),
        (build_predicate(Op.EQ, "string", "abc", transform="truncate[2]"), "false"),
        (build_predicate(Op.NOT_EQ, "string", "abc", transform="truncate[2]"), "true"),
        (build_predicate(Op.GT, "string", "ab", transform="truncate[2]"), "x gt-eq 'ac'"),
        (build_predicate(Op.GT, "string", "\U0010ffff", transform="truncate[1]"), "false"),
        (build_predicate(Op.LT_EQ, "binary", b"a\xff", transform="truncate[2]"), "x lt b'b'"),
        (build_predicate(Op.GT, "string", "\ud7ff", transform="truncate[1]"), f"x gt-eq {chr(0xE000)!r}"),
        (build_predicate(Op.NOT_EQ, "int", 3, transform="truncate[4]"), "true"),
        (build_predicate(Op.NOT_EQ, "int", 4, transform="truncate[4]"), "(x is-null or x lt 4 or x gt-eq 8)"),
        (build_predicate(Op.LT, "date", 1, transform="year"), "x lt 365"),
        (build_predicate(Op.IS_NULL, "date", transform="bucket[4]"), "x is-null"),
        (build_predicate(Op.EQ, "date", 1, transform="bucket[4]"), "x not-null"),
        (build_predicate(Op.NOT_EQ, "date", 1, transform="bucket[4]"), "true"),
        (build_predicate(Op.EQ, "int", 1), "x eq 1"),
    ],
)
def test_transformed_predicate_becomes_ranges_of_its_source(condition: Bound, expected: str) -> None:
    assert format_expression(find_source_ranges(condition)) == expected


def test_oracle_treats_null_as_not_equal_and_not_less() -> None:
    assert holds(build_predicate(Op.NOT_EQ, "int", 1), None, order_like_java)
    assert not holds(build_predicate(Op.LT, "int", 1), None, order_like_java)
