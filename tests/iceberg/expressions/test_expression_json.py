"""Tests of expressions in JSON: all forms are read, the common form is written, and errors name the place."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg import expressions as iceberg
from pyiceberg.schema import Schema as PyIcebergSchema
from pyiceberg.types import NestedField, PrimitiveType

from seamark.formats.iceberg.expressions.expression import FALSE, TRUE, And, Bound, Expression, Not, Op, Or, Unbound
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.types.values import Value
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.test_values import KINDS, to_pyiceberg

A = Unbound(Op.IS_NULL, "a", "identity", ())
B = Unbound(Op.EQ, "b", "identity", (5,))
A_JSON = {"type": "is-null", "term": "a"}
B_JSON = {"type": "eq", "term": "b", "value": 5}


@pytest.mark.parametrize(
    ("given_json", "expected"),
    [
        (True, TRUE),
        (False, FALSE),
        ({"type": "true"}, TRUE),
        ({"type": "false"}, FALSE),
        ({"type": "literal", "value": True}, TRUE),
        ({"type": "and", "left": A_JSON, "right": B_JSON}, And((A, B))),
        ({"type": "or", "left": A_JSON, "right": B_JSON}, Or((A, B))),
        ({"type": "not", "child": A_JSON}, Not(A)),
        ({"type": "and", "left": True, "right": A_JSON}, A),
        ({"type": "and", "left": False, "right": A_JSON}, FALSE),
        ({"type": "NOT_EQ", "term": "a", "value": "x"}, Unbound(Op.NOT_EQ, "a", "identity", ("x",))),
        ({"type": "in", "term": "a", "values": []}, Unbound(Op.IN, "a", "identity", ())),
        ({"type": "not-in", "term": "a.b", "values": [1, "x"]}, Unbound(Op.NOT_IN, "a.b", "identity", (1, "x"))),
        ({"type": "is-nan", "term": {"type": "reference", "term": "a"}}, Unbound(Op.IS_NAN, "a", "identity", ())),
        (
            {"type": "lt", "term": {"type": "transform", "transform": "BUCKET[4]", "term": "a"}, "value": 3},
            Unbound(Op.LT, "a", "bucket[4]", (3,)),
        ),
        (
            {
                "type": "lt",
                "term": {"type": "transform", "transform": "day", "term": {"type": "reference", "name": "a"}},
                "value": {"type": "literal", "value": "2024-01-02", "data-type": "date"},
            },
            Unbound(Op.LT, "a", "day", ("2024-01-02",)),
        ),
        # The form that the specification recommends now
        ({"type": "is-null", "child": {"type": "reference", "name": "a"}}, A),
        ({"type": "eq", "left": {"type": "reference", "name": "b"}, "right": 5}, B),
        (
            {
                "type": "in",
                "child": {"type": "reference", "name": "a"},
                "values": {"type": "literals", "values": [1, 2], "data-type": "int"},
            },
            Unbound(Op.IN, "a", "identity", (1, 2)),
        ),
    ],
)
def test_all_json_forms_of_an_expression_are_read(given_json: Any, expected: Expression) -> None:
    assert parse_expression(given_json) == expected


@pytest.mark.parametrize(
    ("given_json", "message"),
    [
        (None, "at filter: expected an object or a boolean"),
        ([], "at filter: expected an object or a boolean"),
        ({}, "at filter: missing field 'type'"),
        ({"type": 5}, "at filter.type: expected a name"),
        ({"type": "like", "term": "a", "value": "x"}, "at filter: unknown type of expression: 'like'"),
        ({"type": "literal", "value": 5}, "at filter: unknown type of expression: 'literal'"),
        ({"type": "and", "left": A_JSON}, "at filter: missing field 'right'"),
        (
            {"type": "or", "left": A_JSON, "right": {"type": "or", "left": {"type": "x"}, "right": A_JSON}},
            "at filter.right.left: unknown type of expression: 'x'",
        ),
        ({"type": "not", "child": {"type": "not"}}, "at filter.child: missing field 'child'"),
        ({"type": "eq", "value": 5}, "at filter: eq needs a term"),
        ({"type": "eq", "term": "a"}, "at filter: missing field 'value'"),
        ({"type": "eq", "term": "a", "values": [1]}, "at filter: eq has no field 'values'"),
        ({"type": "is-null", "term": "a", "value": 5}, "at filter: is-null has no field 'value'"),
        ({"type": "in", "term": "a", "value": 5}, "at filter: in has no field 'value'"),
        ({"type": "in", "term": "a", "values": 5}, "at filter.values: expected an array"),
        ({"type": "in", "term": "a", "values": [1, None]}, "at filter.values[1]: null is not a literal"),
        ({"type": "eq", "term": "a", "value": {"x": 1}}, "at filter.value: expected a literal"),
        ({"type": "eq", "term": 5, "value": 5}, "at filter.term: expected a column's name"),
        ({"type": "eq", "term": {"type": "apply"}, "value": 5}, "at filter.term: expected a reference or a transform"),
        ({"type": "eq", "term": {"type": "reference", "id": 5}, "value": 5}, "at filter.term: missing field 'term'"),
        (
            {
                "type": "eq",
                "term": {"type": "transform", "transform": "day", "term": {"type": "transform"}},
                "value": 5,
            },
            "at filter.term.term: expected a column",
        ),
        (
            {"type": "eq", "term": {"type": "transform", "transform": "bucket[0]", "term": "a"}, "value": 5},
            "Invalid transform bucket[0]",
        ),
    ],
)
def test_broken_expression_is_a_bad_request_that_names_the_place(given_json: Any, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse_expression(given_json)
    assert message in error.value.message


def nest_expression(levels: int) -> Any:
    """Return alternating AND and OR with this depth."""
    nested_json: Any = A_JSON
    for level in range(levels):
        nested_json = {"type": "and" if level % 2 else "or", "left": B_JSON, "right": nested_json}
    return nested_json


def build_chain(links: int, side: str) -> Any:
    """Return nested ORs. The left or the right side of each is the next OR."""
    nested_json: Any = A_JSON
    other_side = "left" if side == "right" else "right"
    for _ in range(links):
        nested_json = {"type": "or", side: nested_json, other_side: B_JSON}
    return nested_json


def test_expression_nesting_is_limited() -> None:
    parse_expression(nest_expression(100))
    with pytest.raises(BadRequest, match="deeper than 100 levels"):
        parse_expression(nest_expression(101))
    with pytest.raises(BadRequest, match="deeper than 3 levels"):
        parse_expression({"type": "not", "child": nest_expression(3)}, depth_max=3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_chain_of_thousands_of_conditions_is_flattened_in_order(side: str) -> None:
    parsed_expression = parse_expression(build_chain(50_000, side))
    assert isinstance(parsed_expression, Or)
    assert parsed_expression.children == ((A, *[B] * 50_000) if side == "left" else (*[B] * 50_000, A))
    with pytest.raises(BadRequest) as error:
        parse_expression({"type": "or", "left": build_chain(50_000, "right"), "right": {"type": "x"}})
    assert len(error.value.message) < 400


def test_nodes_and_literals_of_an_expression_share_one_limit() -> None:
    filter_json = {"type": "in", "term": "a", "values": list(range(99))}
    parse_expression(filter_json, nodes_max=100)
    with pytest.raises(BadRequest, match="more than 99"):
        parse_expression(filter_json, nodes_max=99)
    with pytest.raises(BadRequest, match="more than 50"):
        parse_expression(build_chain(50, "left"), nodes_max=50)


def test_long_chain_is_written_as_a_shallow_tree() -> None:
    written_expression_json = encode_expression(Or((A,) * 5000))
    depth, level = 0, [written_expression_json]
    while level:
        depth, level = depth + 1, [side for node in level if "left" in node for side in (node["left"], node["right"])]
    assert depth == 14  # 5,000 leaves need 13 levels of nodes above them.
    assert parse_expression(written_expression_json) == Or((A,) * 5000)


names = st.sampled_from(["a", "b.c", "ö"])
plain = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())


def draw_nodes(kind: Any, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[iceberg.BooleanExpression]:
    return st.tuples(*parts).map(lambda drawn_parts: kind(*drawn_parts))


COMPARISONS = (
    iceberg.EqualTo,
    iceberg.NotEqualTo,
    iceberg.LessThan,
    iceberg.GreaterThanOrEqual,
)
sets = st.one_of(st.sets(st.integers(), min_size=2), st.sets(st.text(), min_size=2))
predicates = st.one_of(
    *(
        draw_nodes(op, names)
        for op in (
            iceberg.IsNull,
            iceberg.NotNull,
            iceberg.IsNaN,
            iceberg.NotNaN,
        )
    ),
    *(draw_nodes(op, names, plain) for op in COMPARISONS),
    *(draw_nodes(op, names, st.text()) for op in (iceberg.StartsWith, iceberg.NotStartsWith)),
    *(draw_nodes(op, names, sets) for op in (iceberg.In, iceberg.NotIn)),
)
trees = st.recursive(
    predicates,
    lambda inner: st.one_of(
        draw_nodes(iceberg.And, inner, inner),
        draw_nodes(iceberg.Or, inner, inner),
        inner.map(iceberg.Not),
    ),
    max_leaves=6,
)


def sort_in_lists(value: Any) -> Any:
    """Return the expression with sorted IN lists, because PyIceberg keeps them as sets."""
    if isinstance(value, list):
        return [sort_in_lists(item) for item in value]
    if isinstance(value, dict):
        return {
            name: sorted(inner, key=repr) if name == "values" else sort_in_lists(inner) for name, inner in value.items()
        }
    return value


@given(trees)
def test_pyiceberg_expressions_are_unchanged_after_a_round_trip(tree: iceberg.BooleanExpression) -> None:
    sent_json = json.loads(tree.model_dump_json(by_alias=True))
    reparsed_expression = iceberg.BooleanExpression.model_validate(encode_expression(parse_expression(sent_json)))
    # A flattened chain is written as a balanced tree, with the same predicates in the same order.
    second_expression = parse_expression(json.loads(reparsed_expression.model_dump_json(by_alias=True)))
    assert sort_in_lists(encode_expression(second_expression)) == sort_in_lists(
        encode_expression(parse_expression(sent_json))
    )
    if not isinstance(tree, iceberg.And | iceberg.Or | iceberg.Not):
        assert reparsed_expression == tree


PYICEBERG_CANNOT_BIND = {"timestamp_ns", "timestamptz_ns", "binary", "fixed[5]"}
"""Types for which PyIceberg cannot convert string literals; it reads these residuals but never binds them."""


@given(
    st.sampled_from(sorted(KINDS)).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(KINDS[kind][1], min_size=2, max_size=5, unique=True))
    )
)
def test_residuals_have_the_same_values_in_pyiceberg(case: tuple[str, list[Value]]) -> None:
    kind, values = case
    # No bound predicate has NaN or an infinity.
    finite_values = [value for value in values if not isinstance(value, float) or isfinite(value)]
    for value in finite_values:
        residual = encode_expression(Bound(Op.LT_EQ, 1, "c", kind, "identity", kind, (value,)))
        parsed_residual = iceberg.BooleanExpression.model_validate(json.loads(json.dumps(residual)))
        if kind not in PYICEBERG_CANNOT_BIND:
            # PyIceberg keeps UUIDs as bytes in literals, and other values in the types that `to_pyiceberg` returns.
            assert read_bound_value(parsed_residual, KINDS[kind][0]) == (
                value if kind == "uuid" else to_pyiceberg(kind, value)
            )
    residual = encode_expression(Bound(Op.NOT_IN, 1, "c", kind, "identity", kind, tuple(finite_values)))
    parsed_residual = iceberg.BooleanExpression.model_validate(residual)
    if len(set(finite_values)) > 1:
        assert isinstance(parsed_residual, iceberg.NotIn)
        assert len(parsed_residual.literals) == len(set(finite_values))


def read_bound_value(expression: iceberg.BooleanExpression, kind: PrimitiveType) -> Any:
    assert isinstance(expression, iceberg.LessThanOrEqual)
    bound = expression.bind(PyIcebergSchema(NestedField(1, "c", kind)))
    assert isinstance(bound, iceberg.BoundLessThanOrEqual)
    return bound.literal.value


@pytest.mark.parametrize(
    ("bound", "written_json"),
    [
        (Bound(Op.NOT_NULL, 1, "a.b", "long", "identity", "long", ()), {"type": "not-null", "term": "a.b"}),
        (
            Bound(Op.EQ, 1, "ts", "timestamptz", "day", "date", (19_000,)),
            {
                "type": "eq",
                "term": {"type": "transform", "transform": "day", "term": "ts"},
                "value": "2022-01-08",
            },
        ),
        (
            Bound(Op.IN, 1, "d", "decimal(9, 2)", "identity", "decimal(9, 2)", (-5, 100)),
            {"type": "in", "term": "d", "values": ["-0.05", "1.00"]},
        ),
        (TRUE, True),
        (FALSE, False),
        (Not(A), {"type": "not", "child": A_JSON}),
    ],
)
def test_bound_predicates_are_written_with_typed_values(bound: Expression, written_json: Any) -> None:
    assert encode_expression(bound) == written_json


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["type", "term", "value", "values", "left", "right", "child", "transform", "name"]),
                st.one_of(
                    inner, st.sampled_from(["and", "or", "not", "eq", "in", "is-null", "reference", "transform"])
                ),
            ),
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_as_an_expression_or_is_a_bad_request(given_json: Any) -> None:
    try:
        parsed_expression = parse_expression(given_json)
    except BadRequest:
        return
    assert parse_expression(encode_expression(parsed_expression)) == parsed_expression
