"""Tests of decimals with more digits than a double. Engines round them differently, and a predicate keeps the rows
that match in any engine.
"""

from __future__ import annotations

import math
from decimal import Decimal

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from seamark.connector.arrow.predicates import bind_exactly
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.evaluation import may_match, must_match
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types.schema import Schema

DOUBLES = msgspec.convert(
    {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "d", "required": False, "type": "double"}]},
    type=Schema,
)


@given(
    st.integers(-(10**20), 10**20),
    st.integers(1, 30),
    st.integers(-6, 6),
    st.sampled_from(["<", "<=", "=", ">", ">=", "<>", "IN", "NOT IN", "IS DISTINCT FROM", "IS NOT DISTINCT FROM"]),
    st.booleans(),
    st.booleans(),
)
@example(5850275438018707, 16, -1, ">", False, False)
def test_long_decimal_matches_the_double_of_each_engine(
    unscaled: int, scale: int, steps: int, op: str, negated: bool, has_second_value: bool
) -> None:
    number = Decimal(unscaled).scaleb(-scale)
    text = format(number, "f")
    literals = f"({text}{', 7' if has_second_value else ''})" if op.endswith("IN") else text
    column_value = float(number)
    for _ in range(abs(steps)):
        column_value = math.nextafter(column_value, math.copysign(math.inf, steps))
    sql = f"{'NOT ' * negated}(d {op} {literals})"
    parsed_predicate = bind(parse_sql(sql, DOUBLES).expression, DOUBLES, (), case_sensitive=True)
    engine_values = {float(unscaled) / float(10**scale), float(number)}
    comparisons = {
        "<": column_value.__lt__,
        "<=": column_value.__le__,
        ">": column_value.__gt__,
        ">=": column_value.__ge__,
        "<>": column_value.__ne__,
        "NOT IN": lambda literal: column_value not in (literal, 7.0) if has_second_value else column_value != literal,
        "IN": lambda literal: column_value in (literal, 7.0) if has_second_value else column_value == literal,
        "IS DISTINCT FROM": column_value.__ne__,
    }.get(op, column_value.__eq__)
    assert may_match(parsed_predicate, {1: column_value}) or not any(
        comparisons(engine_value) != negated for engine_value in engine_values
    )
    exact_predicate = bind_exactly(sql, DOUBLES)
    assert must_match(exact_predicate, {1: column_value}) == (comparisons(float(number)) != negated)


def test_many_long_decimals_in_a_list_become_one_range() -> None:
    texts = [f"0.{number}" for number in range(10**16, 10**16 + 1001)]
    parsed_predicate = parse_sql(f"d IN ({', '.join(texts)}, 7)", DOUBLES)
    assert not parsed_predicate.unused
    bound = bind(parsed_predicate.expression, DOUBLES, (), case_sensitive=True)
    assert all(may_match(bound, {1: float(text)}) for text in (*texts, "7"))
    assert not may_match(bound, {1: 0.2})
