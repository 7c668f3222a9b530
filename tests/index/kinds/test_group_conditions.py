"""A condition on groups is true for each group with a row for which the condition on rows is true."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from seamark.formats.iceberg.expressions import arrow_filters
from seamark.formats.iceberg.expressions.arrow_filters import evaluate_filter, to_literals
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, Bound, Or, collect_predicates
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.keys.group_conditions import (
    make_group_schema,
    to_group_condition,
    translate_dimension_condition,
)
from seamark.formats.index.keys.measures import parse_measure
from seamark.formats.index.keys.terms import resolve_term
from seamark.formats.index.kinds.cube import group_rows
from seamark.metaserver.planner.cubes.encoded_groups import EncodedGroups
from tests.seeds import examples, first_seed

COLUMNS = Schema(
    (
        Field(1, "ts", False, "timestamp"),
        Field(2, "day", False, "date"),
        Field(3, "name", False, "string"),
        Field(4, "n", False, "int"),
        Field(5, "price", False, "double"),
        Field(6, "z", False, "timestamptz"),
    )
)
DIMENSIONS = ("ts", "year(ts)", "month(ts)", "day(ts)", "hour(ts)", "day", "month(day)", "name", "n", "price", "day(z)")
CONDITIONS = (
    *("ts < TIMESTAMP '2026-02-01 00:00:00'", "ts >= TIMESTAMP '2026-01-31 23:59:59'", "year(ts) = 2026"),
    *("day(ts) > DATE '2026-01-30'", "ts IS NULL", "day <= DATE '2026-01-31'", "day > DATE '2026-02-03'"),
    *("name = 'b'", "name LIKE 'a%'", "name IN ('a', 'ab')", "NOT name = 'a'", "n > 2", "n BETWEEN 1 AND 2"),
    *("price > 1.5", "price <> 0.0", "z < TIMESTAMP '2026-02-01 00:00:00 UTC'", "n IS NOT NULL", "name IS NULL"),
)


def draw_rows(rng: random.Random) -> pa.Table:
    def draw_column(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array([rng.choice([*values, None]) for _ in range(40)], kind)

    starts = [datetime(2026, 1, 31, 23, 59, 59), datetime(2026, 2, 1), datetime(2025, 12, 31), datetime(2026, 2, 3, 7)]
    times = [start + timedelta(microseconds=rng.choice((0, 1, 3_600_000_000))) for start in starts]
    days = [date(2026, 1, 31), date(2026, 2, 1), date(2026, 2, 4)]
    return pa.table(
        {
            "ts": draw_column(times, pa.timestamp("us")),
            "day": draw_column(days, pa.date32()),
            "name": draw_column(["a", "ab", "b", ""], pa.string()),
            "n": draw_column([0, 1, 2, 3], pa.int32()),
            "price": draw_column([0.0, -0.0, 2.0, float("nan")], pa.float64()),
            "z": draw_column([time.replace(tzinfo=UTC) for time in times], pa.timestamp("us", "UTC")),
        }
    )


def draw_condition(rng: random.Random) -> str:
    text = rng.choice(CONDITIONS)
    for _ in range(rng.randrange(3)):
        text = f"({text}) {rng.choice(('AND', 'OR'))} ({rng.choice(CONDITIONS)})"
    return text


def test_groups_with_a_needed_row_meet_the_condition() -> None:
    """The condition on groups, which is made from WHERE, keeps every group with a row that matches WHERE."""
    omitted_count = 0
    for seed in range(first_seed(), first_seed() + examples(1000, 40)):
        rng = random.Random(seed)
        rows, text = draw_rows(rng), draw_condition(rng)
        terms = [resolve_term(dimension, COLUMNS) for dimension in rng.sample(DIMENSIONS, rng.randint(1, 4))]
        where = bind(parse_sql(text, COLUMNS).expression, COLUMNS, (), case_sensitive=True)
        condition = to_group_condition(where, terms)
        # A client sends the condition as JSON.
        expression = parse_expression(encode_expression(condition))
        assert bind(expression, make_group_schema(terms), (), case_sensitive=True) == condition, (seed, text)

        def group_selected(selected_rows: pa.Table, terms: Any = terms) -> pa.Table:
            values = {field.id: selected_rows[field.name] for field in COLUMNS.fields}
            measures = (parse_measure("count(*)", COLUMNS),)
            return pa.Table.from_batches([group_rows(terms, measures, values)])

        columns = {field.id: rows[field.name].combine_chunks() for field in COLUMNS.fields}
        needed_rows = rows.filter(pa.array(evaluate_filter(where, columns, rows.num_rows)))
        keys = [f"d{number}" for number in range(len(terms))]
        groups = group_selected(rows)
        # 256 copies of the groups are long enough that their columns are encoded by dictionaries.
        selected_groups = EncodedGroups(groups).select(condition, groups.column_names)
        repeated_groups = EncodedGroups(pa.concat_tables([groups] * 256)).select(condition, groups.column_names)
        assert repeated_groups.num_rows == 256 * selected_groups.num_rows, (
            "dictionary-encoded columns must give the same result"
        )
        assert str(repeated_groups.slice(0, selected_groups.num_rows).to_pylist()) == str(selected_groups.to_pylist())
        omitted_count += selected_groups.num_rows < groups.num_rows
        missing_groups = {str(row) for row in group_selected(needed_rows).select(keys).to_pylist()}
        missing_groups -= {str(row) for row in selected_groups.select(keys).to_pylist()}
        assert not missing_groups, (seed, text, [term.text for term in terms])
    assert omitted_count > 10, "too few conditions leave out a group, so the test proves little"


def test_condition_on_a_dimension_table_selects_by_its_attributes() -> None:
    where = bind(
        parse_sql("name = 'a' AND (n = 1 OR price > 1.0)", COLUMNS).expression, COLUMNS, (), case_sensitive=True
    )
    condition = translate_dimension_condition(
        where, lambda predicate: {"name": 2, "n": 0, "price": 1}.get(predicate.name)
    )
    assert [(bound.name, bound.column_id) for bound in collect_predicates(condition)] == [("d2", 3)], (
        "only the engine may evaluate the comparison with NaN"
    )
    assert translate_dimension_condition(where, lambda _: None) == TRUE
    assert translate_dimension_condition(FALSE, lambda _: 0) == FALSE
    assert isinstance(condition, Bound)


def test_filter_transforms_the_values_of_a_column_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transformed_values = []

    def record_literals(values: pa.Array, kind: str) -> Any:
        transformed_values.append(kind)
        return to_literals(values, kind)

    monkeypatch.setattr(arrow_filters, "to_literals", record_literals)
    where = bind(
        parse_sql("year(day) = 2026 OR year(day) = 2024", COLUMNS).expression, COLUMNS, (), case_sensitive=True
    )
    days = pa.array([date(2026, 1, 1), date(2025, 1, 1), date(2024, 1, 1)])
    predicates = collect_predicates(where)
    assert {predicate.transform for predicate in predicates} == {"year"}
    assert evaluate_filter(Or(tuple(predicates) * 2), {2: days}, 3).tolist() == [True, False, True]
    assert transformed_values == ["date"]
