"""Tests of rules of the block algebra that statements rarely need."""

from __future__ import annotations

from dataclasses import replace

from seamark.connector.analysis.algebra.blocks import Extreme, QueryBlock, SourceJoin
from seamark.connector.analysis.algebra.equivalences import Predicate, compute_equivalence_classes
from seamark.connector.analysis.algebra.needed_rows import build_condition, build_joins, intersect_joins
from seamark.connector.analysis.algebra.relations import SetOperation, Table, find_exact_origin
from seamark.connector.plans.conditions import ColumnComparison, all_of, any_of, write_sql
from seamark.connector.plans.literals import Literal
from seamark.connector.plans.scan import Join
from seamark.connector.spark.query.plan_reader import AttributeOutputs
from seamark.formats.protocol.wire import MINIMUM


def build_comparison(column: str, op: str, *values: str) -> ColumnComparison:
    return ColumnComparison((0, column), op, tuple(Literal("integer", value) for value in values))


def build_projection(table: Table, *names: str, nullable: frozenset[str] = frozenset()) -> QueryBlock:
    outputs = AttributeOutputs({name: (0, name) for name in names}, names, nullable)
    return QueryBlock([table], 0, outputs)


def format_predicate(table: Table) -> str | None:
    condition = build_condition(table, utc=True)
    return None if condition is None else write_sql(condition)


def test_alternatives_of_a_join_are_kept_only_if_both_references_have_all_alternatives() -> None:
    """If an alternative were missing, the join would leave out rows that one of the references needs."""
    # Joins with the same `any_of` are alternatives. The number itself can differ between two references.
    first, second, third = (Join(scan, (("a", "b"),), any_of=2) for scan in (1, 2, 3))
    always_join = Join(4, (("a", "b"),))
    assert intersect_joins([(first, second, always_join), (first, third, always_join)]) == (always_join,)
    renumbered_joins = tuple(replace(join, any_of=5) for join in (second, first))
    assert intersect_joins([(first, second, always_join), renumbered_joins]) == (first, second)
    assert intersect_joins([(first,), ()]) == ()
    assert intersect_joins([]) == ()


def test_set_operation_passes_conditions_on_floats_but_no_joins() -> None:
    left, right = (Table({"x": "double", "k": "long"}) for _ in range(2))
    union = SetOperation(build_projection(left, "x", "k"), build_projection(right, "x", "k"))
    union.push_down(build_comparison("x", ">", "3"))
    assert format_predicate(left) == format_predicate(right) == '"x" > 3'
    converted_table = Table({"x": "float", "k": "long"})
    SetOperation(build_projection(left, "x", "k"), build_projection(converted_table, "x", "k")).push_down(
        build_comparison("x", ">", "3")
    )
    assert format_predicate(left) is format_predicate(converted_table) is None
    assert find_exact_origin(left, ["x"]) is None


def test_nullable_output_receives_only_conditions_that_reject_null() -> None:
    table = Table({"a": "long", "b": "long"})
    block = build_projection(table, "a", "b", nullable=frozenset({"a"}))
    block.push_down(
        all_of(
            [
                build_comparison("a", "=", "1"),
                any_of([build_comparison("a", "IS NULL"), build_comparison("b", "=", "2")]),
            ]
        )
    )
    assert format_predicate(table) == '"a" = 1'


def test_two_extremes_in_one_block_have_no_common_origin_row() -> None:
    """An origin is a table whose row has the values of several output columns.

    The minimum and the maximum can come from different rows, so they have no common origin.
    """
    table = Table({"a": "long", "b": "long", "k": "long"})
    outputs = AttributeOutputs({"k": (0, "k")})
    extremes = {name: Extreme((0, column), MINIMUM) for name, column in (("low", "a"), ("high", "b"))}
    block = QueryBlock([table], 0, outputs, keys=frozenset({(0, "k")}), extremes=extremes)
    assert block.find_origin(["k", "low"]) == (table, ("k", "a"))
    assert block.find_origin(["low", "high"]) is None


def test_anti_join_pushes_its_on_condition_to_the_right_side_only() -> None:
    """Conditions on the left side are pushed to both sides, and ON only to the right side."""
    left, right = Table({"a": "long"}), Table({"b": "long"})
    predicate = Predicate(ColumnComparison((1, "b"), ">", (Literal("integer", "3"),)), (((0, "a"), (1, "b")),))
    # An anti-join is handled as an outer join that keeps the left rows. The right side has no outputs.
    block = QueryBlock(
        [left, right], SourceJoin(0, 1, keeps_left=True, on=predicate), AttributeOutputs({"a": (0, "a")})
    )
    block.push_down(build_comparison("a", "<", "9"))
    assert format_predicate(left) == '"a" < 9'
    assert format_predicate(right) == '("b" > 3 AND "b" < 9)'
    scan_numbers = {left: 0, right: 1}
    assert build_joins(left, scan_numbers.get, utc=True) == ()
    assert build_joins(right, scan_numbers.get, utc=True) == (Join(0, (("b", "a"),)),)


def test_equivalence_classes_merge_columns_that_are_equal_to_the_same_column() -> None:
    classes = compute_equivalence_classes([((0, "a"), (1, "b")), ((2, "c"), (1, "b")), ((3, "d"), (4, "e"))])
    assert classes[0, "a"] == classes[2, "c"] == {(0, "a"), (1, "b"), (2, "c")}
    assert classes[3, "d"] == {(3, "d"), (4, "e")}
