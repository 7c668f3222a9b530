"""Tests of binding: names, types, folding, and equal meaning of the bound and the unbound filter on every row."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import (
    FALSE,
    TRUE,
    Always,
    And,
    Bound,
    Expression,
    Not,
    Op,
    Or,
    Unbound,
)
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.types.reading import convert_json_value
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import BadRequest
from tests.iceberg.samples import build_field, build_schema


def make_schema(*fields: dict[str, Any], schema_id: int = 0) -> Schema:
    return convert_json_value(build_schema(*fields, schema_id=schema_id), Schema, "schema")


def build_struct(*fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": list(fields)}


ADDRESS = build_struct(build_field(11, "street", "string", True), build_field(12, "zip", "int"))
POINTS = {
    "type": "list",
    "element-id": 21,
    "element-required": True,
    "element": build_struct(build_field(22, "x", "double", True)),
}
TAGS = {
    "type": "map",
    "key-id": 31,
    "key": "string",
    "value-id": 32,
    "value-required": True,
    "value": "long",
}
TABLE = make_schema(
    build_field(1, "id", "long", True),
    build_field(2, "small", "int"),
    build_field(3, "Price", "decimal(9,1)"),
    build_field(4, "ts", "timestamptz"),
    build_field(5, "name", "string"),
    build_field(6, "score", "float"),
    build_field(10, "home", ADDRESS, True),
    build_field(13, "work", build_struct(build_field(14, "street", "string", True))),
    build_field(20, "points", POINTS, True),
    build_field(30, "tags", TAGS),
    build_field(40, "nothing", "unknown"),
    build_field(41, "anything", "variant"),
    build_field(42, "future", "interval"),
)


def bind_json(filter_json: Any, *, schemas: tuple[Schema, ...] = (TABLE,), case_sensitive: bool = True) -> Expression:
    return bind(parse_expression(filter_json), schemas[0], schemas, case_sensitive=case_sensitive)


def bind_predicate(op: str, name: str, value: object) -> Expression:
    return bind_json({"type": op, "term": name, "value": value})


def make_bound(op: Op, column_id: int, name: str, kind: str, *values: Any) -> Bound:
    return Bound(op, column_id, name, kind, "identity", kind, values)


def bind_and_get_error(filter_json: Any, **options: Any) -> str:
    with pytest.raises(BadRequest) as error:
        bind_json(filter_json, **options)
    return error.value.message


def test_binding_resolves_a_name_to_an_id_and_converts_the_literal() -> None:
    assert bind_predicate("gt", "ts", "1970-01-01T00:00:01") == make_bound(Op.GT, 4, "ts", "timestamptz", 1_000_000)
    assert bind_predicate("eq", "home.zip", 5) == make_bound(Op.EQ, 12, "home.zip", "int", 5)
    assert bind_predicate("eq", "Price", "1.5") == make_bound(Op.EQ, 3, "Price", "decimal(9, 1)", 15)


def test_binding_ignores_case_only_if_requested() -> None:
    assert bind_json({"type": "eq", "term": "PRICE", "value": 1}, case_sensitive=False) == make_bound(
        Op.EQ, 3, "Price", "decimal(9, 1)", 10
    )
    assert bind_and_get_error({"type": "eq", "term": "PRICE", "value": 1}) == (
        "Cannot find column 'PRICE' in the table's schemas; did you mean Price?"
    )
    two_cases_schema = make_schema(build_field(1, "a"), build_field(2, "A"), build_field(3, "b"))
    message = bind_and_get_error({"type": "is-null", "term": "a"}, schemas=(two_cases_schema,), case_sensitive=False)
    assert "it matches A, a" in message
    assert bind_json({"type": "is-null", "term": "B"}, schemas=(two_cases_schema,), case_sensitive=False) == make_bound(
        Op.IS_NULL, 3, "b", "long"
    )
    assert bind_json({"type": "is-null", "term": "A"}, schemas=(two_cases_schema,)) == make_bound(
        Op.IS_NULL, 2, "A", "long"
    )


def test_name_from_an_older_schema_is_found_newest_first() -> None:
    old_schema = make_schema(build_field(1, "id", "long", True), build_field(2, "old", "int"), schema_id=0)
    middle_schema = make_schema(
        build_field(1, "id", "long", True), build_field(2, "renamed", "int"), build_field(3, "b", "int"), schema_id=1
    )
    current_schema = make_schema(
        build_field(1, "id", "long", True),
        build_field(2, "renamed", "long"),
        build_field(4, "b", "string", True),
        schema_id=2,
    )
    schemas = (old_schema, middle_schema, current_schema)
    assert bind_json({"type": "eq", "term": "renamed", "value": 5}, schemas=schemas) == make_bound(
        Op.EQ, 2, "renamed", "long", 5
    )
    assert bind_json(
        {"type": "eq", "term": "old", "value": 5}, schemas=(current_schema, old_schema, middle_schema)
    ) == make_bound(Op.EQ, 2, "old", "int", 5)
    # The column is required now, but files of the snapshot may be older than the column.
    assert bind_json({"type": "is-null", "term": "b"}, schemas=schemas) == make_bound(Op.IS_NULL, 4, "b", "string")
    assert bind_json({"type": "is-null", "term": "b"}, schemas=(current_schema,)) == FALSE


def test_unknown_column_is_a_bad_request_that_suggests_similar_names() -> None:
    assert bind_and_get_error({"type": "is-null", "term": "home.sip"}).endswith(
        "did you mean home.zip or home or home.street?"
    )
    assert (
        bind_and_get_error({"type": "is-null", "term": "qqqqqq"})
        == "Cannot find column 'qqqqqq' in the table's schemas"
    )
    assert bind_and_get_error({"type": "is-null", "term": ""}) == "Cannot find column '' in the table's schemas"


@pytest.mark.parametrize("negated", [False, True])
def test_null_check_with_a_known_result_becomes_true_or_false(negated: bool) -> None:
    def bind_null_check(name: str) -> Expression:
        null_check = {"type": "is-null", "term": name}
        return bind_json({"type": "not", "child": null_check} if negated else null_check)

    op = Op.NOT_NULL if negated else Op.IS_NULL
    assert bind_null_check("id") == bind_null_check("home") == bind_null_check("home.street") == Always(negated)
    assert bind_null_check("work.street") == make_bound(op, 14, "work.street", "string")
    assert bind_null_check("home.zip") == make_bound(op, 12, "home.zip", "int")
    assert bind_null_check("nothing") == Always(not negated)
    assert bind_null_check("work") == make_bound(op, 13, "work", "struct")
    assert bind_null_check("tags") == make_bound(op, 30, "tags", "map")
    assert bind_null_check("anything") == make_bound(op, 41, "anything", "variant")
    assert bind_null_check("future") == make_bound(op, 42, "future", "interval")


def test_columns_inside_lists_and_maps_are_bound_but_decide_nothing() -> None:
    predicate = bind_json({"type": "lt", "term": "points.x", "value": 5})
    assert predicate == Bound(Op.LT, 22, "points.element.x", "list", "identity", "double", (5.0,))
    # All fields are required, but an empty list has no elements.
    assert bind_json({"type": "is-null", "term": "points.x"}) == Bound(
        Op.IS_NULL, 22, "points.element.x", "list", "identity", "double", ()
    )
    assert bind_json({"type": "eq", "term": "tags.value", "value": "7"}) == Bound(
        Op.EQ, 32, "tags.value", "map", "identity", "long", (7,)
    )


@pytest.mark.parametrize(
    ("filter_json", "message"),
    [
        ({"type": "eq", "term": "home", "value": 5}, "cannot compare a column of type struct with a literal"),
        ({"type": "in", "term": "points", "values": [5]}, "cannot compare a column of type list"),
        ({"type": "lt", "term": "anything", "value": 5}, "cannot compare a column of type variant"),
        ({"type": "lt", "term": "future", "value": 5}, "cannot compare a column of type interval"),
        ({"type": "is-nan", "term": "id"}, "Cannot bind is-nan of id"),
        ({"type": "not-nan", "term": "name"}, "only float and double have NaN, not string"),
        ({"type": "starts-with", "term": "small", "value": "5"}, "the type must be string, but it is int"),
        ({"type": "lt", "term": "small", "value": "x"}, "Cannot bind lt of small: invalid value for conversion"),
        ({"type": "eq", "term": "score", "value": "NaN"}, "from NaN"),
        ({"type": "in", "term": "score", "values": [1, float("nan")]}, "from NaN"),
    ],
)
def test_predicate_that_the_type_forbids_is_a_bad_request_that_names_the_column(filter_json: Any, message: str) -> None:
    assert message in bind_and_get_error(filter_json)


def transform_predicate(op: str, transform: str, name: str, *value: object) -> Any:
    term = {"type": "transform", "transform": transform, "term": name}
    return {"type": op, "term": term, **({"value": value[0]} if value else {})}


def test_literals_of_transform_terms_have_the_result_type() -> None:
    assert bind_json(transform_predicate("eq", "bucket[4]", "id", 3)) == Bound(
        Op.EQ, 1, "id", "long", "bucket[4]", "int", (3,)
    )
    day = Bound(Op.LT, 4, "ts", "timestamptz", "day", "date", (19_000,))
    assert (
        bind_json(transform_predicate("lt", "day", "ts", 19_000))
        == bind_json(transform_predicate("lt", "Day", "ts", "2022-01-08"))
        == day
    )
    assert bind_json(transform_predicate("gt-eq", "hour", "ts", 5)) == Bound(
        Op.GT_EQ, 4, "ts", "timestamptz", "hour", "int", (5,)
    )
    assert bind_json(transform_predicate("starts-with", "truncate[3]", "name", "ab")) == Bound(
        Op.STARTS_WITH, 5, "name", "string", "truncate[3]", "string", ("ab",)
    )
    assert bind_json(transform_predicate("eq", "identity", "id", 3)) == make_bound(Op.EQ, 1, "id", "long", 3)
    assert bind_json(transform_predicate("is-null", "truncate[3]", "id")) == FALSE
    assert bind_json(transform_predicate("is-null", "void", "id")) == Bound(
        Op.IS_NULL, 1, "id", "long", "void", "long", ()
    )


@pytest.mark.parametrize(
    ("transform", "name", "message"),
    [
        ("zorder", "id", "unknown transform zorder"),
        ("year", "id", "year cannot transform the long values of 'id'"),
        ("bucket[4]", "home", "bucket[4] cannot transform the struct values"),
        ("void", "points", "void cannot transform the list values"),
    ],
)
def test_transform_unsuitable_for_the_column_is_a_bad_request(transform: str, name: str, message: str) -> None:
    assert message in bind_and_get_error(transform_predicate("eq", transform, name, 1))


def test_in_lists_are_sorted_deduplicated_and_simplified() -> None:
    def bind_in_list(op: str, name: str, *values: object) -> Expression:
        return bind_json({"type": op, "term": name, "values": list(values)})

    assert bind_in_list("in", "small", 7, "5", 5, 2**40, 6.5) == make_bound(Op.IN, 2, "small", "int", 5, 7)
    assert bind_in_list("in", "small", 5, 5) == make_bound(Op.EQ, 2, "small", "int", 5)
    assert bind_in_list("not-in", "small", 5, -(2**40)) == make_bound(Op.NOT_EQ, 2, "small", "int", 5)
    assert bind_in_list("in", "small") == bind_in_list("in", "small", 2**40) == FALSE
    assert bind_in_list("not-in", "small") == bind_in_list("not-in", "small", 2**40) == TRUE
    zeros = bind_in_list("in", "score", 0.0, -0.0, 0.0)
    assert isinstance(zeros, Bound)
    assert [str(value) for value in zeros.values] == ["-0.0", "0.0"]


def test_bound_predicates_never_contain_an_infinity() -> None:
    largest = (2 - 2**-23) * 2.0**127  # This is the largest finite value of a float with 32 bits.
    assert bind_predicate("lt", "score", "Infinity") == make_bound(Op.LT_EQ, 6, "score", "float", largest)
    assert bind_predicate("gt-eq", "score", 1e39) == make_bound(Op.GT, 6, "score", "float", largest)
    assert bind_predicate("lt-eq", "score", "-Infinity") == make_bound(Op.LT, 6, "score", "float", -largest)
    assert bind_predicate("lt", "score", "-Infinity") == FALSE
    # In Spark, NaN is greater than infinity.
    assert bind_predicate("gt", "score", "Infinity") == make_bound(Op.IS_NAN, 6, "score", "float")


def test_binding_a_bound_expression_again_changes_nothing() -> None:
    predicate = make_bound(Op.EQ, 1, "id", "long", 5)
    assert bind(And((predicate, TRUE)), TABLE, (), case_sensitive=True) == predicate
    with pytest.raises(BadRequest, match="already bound"):
        bind(Not(predicate), TABLE, (), case_sensitive=True)


# Two evaluators: of the filter as a client sends it, in exact arithmetic, and of the bound filter

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SECOND_NS = 1_000_000_000

Exact = Any
"""None, bool, str, bytes, a float's NaN or infinity, or a Fraction; times are in nanoseconds."""


def to_exact(number: float) -> Exact:
    return Fraction(number) if math.isfinite(number) else number


def round_to_float(number: float) -> Exact:
    """Return the value that a double has in a float column, or the double itself if no finite float is near it."""
    single_number = ctypes.c_float(number).value
    return to_exact(single_number) if math.isfinite(single_number) else to_exact(number)


def build_moment(seconds: int, nanos: int, zone: str) -> tuple[object, Exact]:
    """Return the text of a time that a client sends, and the time that it means."""
    text = (EPOCH + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{nanos:09d}{zone}", Fraction(seconds * SECOND_NS + nanos)


small = st.integers(-3, 3)
edges = st.sampled_from([2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1])
halves = st.integers(-7, 7).map(lambda n: n / 2)
tricky = st.sampled_from([0.1, -0.0, 1e39, -1e39, 3.4028235e38, 3.4028234663852886e38, 1e-46, 16_777_217.0])
infinities = st.sampled_from([("Infinity", math.inf), ("-Infinity", -math.inf)])
hundredths = st.integers(-100_050, 100_050).map(lambda n: (f"{n / 1000:.3f}", Fraction(n, 10)))
seconds = st.sampled_from([-86_400, -1, 0, 1, 86_399, 86_400, 5])
fractions = st.sampled_from([0, 1, 500, 999, 1000, 1_000_000, 999_999_999])
numbers = st.one_of(
    st.one_of(small, edges).map(lambda n: (n, Fraction(n))),
    halves.map(lambda n: (n, Fraction(n))),
    st.one_of(small, edges).map(lambda n: (str(n), Fraction(n))),
    halves.map(lambda n: (str(n), Fraction(n))),
)

COLUMNS: dict[str, tuple[int, str, st.SearchStrategy[tuple[object, Exact]], st.SearchStrategy[tuple[Any, Exact]]]] = {
    # name: id, type, literals as (JSON, meaning), values as (bound form, meaning)
    "i": (1, "int", numbers, st.one_of(small, st.sampled_from([2**31 - 1, -(2**31)])).map(lambda n: (n, Fraction(n)))),
    "l": (2, "long", numbers, st.one_of(small, st.sampled_from([2**63 - 1, -(2**63)])).map(lambda n: (n, Fraction(n)))),
    "f": (
        3,
        "float",
        st.one_of(st.one_of(halves, tricky).map(lambda n: (n, round_to_float(n))), infinities),
        st.one_of(halves, tricky, st.sampled_from([math.inf, -math.inf, math.nan])).map(
            lambda n: (ctypes.c_float(n).value, to_exact(ctypes.c_float(n).value))
        ),
    ),
    "d": (
        4,
        "double",
        st.one_of(st.one_of(halves, tricky).map(lambda n: (n, to_exact(n))), infinities),
        st.one_of(halves, tricky, st.sampled_from([math.inf, -math.inf, math.nan])).map(lambda n: (n, to_exact(n))),
    ),
    "n": (
        5,
        "decimal(4, 2)",
        hundredths,
        st.one_of(small, st.integers(-9999, 9999)).map(lambda n: (n, Fraction(n))),
    ),
    "day": (
        6,
        "date",
        st.one_of(
            small.map(lambda n: (n, Fraction(n * 86_400 * SECOND_NS))),
            small.map(lambda n: (str((EPOCH + timedelta(days=n)).date()), Fraction(n * 86_400 * SECOND_NS))),
            st.builds(build_moment, seconds, fractions, st.just("")),
        ),
        small.map(lambda n: (n, Fraction(n * 86_400 * SECOND_NS))),
    ),
    "ts": (
        7,
        "timestamptz",
        st.one_of(
            small.map(lambda n: (n, Fraction(n * 1000))),
            st.builds(build_moment, seconds, fractions, st.sampled_from(["", "Z", "+00:00"])),
        ),
        st.one_of(small, seconds.map(lambda n: n * 1_000_000)).map(lambda n: (n, Fraction(n * 1000))),
    ),
    "ns": (
        8,
        "timestamp_ns",
        st.one_of(
            small.map(lambda n: (n, Fraction(n * 1000))),
            st.builds(build_moment, seconds, fractions, st.just("")),
            st.sampled_from([(2**62, Fraction(2**62 * 1000)), ("0001-01-01", Fraction(-62_135_596_800 * SECOND_NS))]),
        ),
        st.one_of(small, fractions).map(lambda n: (n, Fraction(n))),
    ),
    "s": (
        9,
        "string",
        st.text("aä\U0001f600\uffff", max_size=2).map(lambda t: (t, t)),
        st.text("aä\U0001f600\uffff", max_size=3).map(lambda t: (t, t)),
    ),
    "x": (
        10,
        "fixed[1]",
        st.binary(min_size=1, max_size=1).map(lambda b: (b.hex(), b)),
        st.binary(min_size=1, max_size=1).map(lambda b: (b, b)),
    ),
    "b": (11, "boolean", st.booleans().map(lambda b: (b, b)), st.booleans().map(lambda b: (b, b))),
}
REQUIRED_NAMES = frozenset({"l", "d"})
WIDE = make_schema(
    *(build_field(ident, name, kind, name in REQUIRED_NAMES) for name, (ident, kind, _, _) in COLUMNS.items())
)

Sent = tuple[Any, ...]
"""(op, name, [(JSON, meaning), …]) or ("and" | "or", left, right) or ("not", child) or (True | False,)."""


def draw_predicates(name: str) -> st.SearchStrategy[Sent]:
    _, kind, literals, _ = COLUMNS[name]
    unary = ["is-null", "not-null", *(["is-nan", "not-nan"] if kind in ("float", "double") else [])]
    comparisons = ["lt", "lt-eq", "gt", "gt-eq", "eq", "not-eq"]
    comparisons += ["starts-with", "not-starts-with"] if kind == "string" else []
    return st.one_of(
        st.tuples(st.sampled_from(unary), st.just(name), st.just([])),
        st.tuples(st.sampled_from(comparisons), st.just(name), st.lists(literals, min_size=1, max_size=1)),
        st.tuples(st.sampled_from(["in", "not-in"]), st.just(name), st.lists(literals, max_size=4)),
    )


filters = st.recursive(
    st.one_of(st.sampled_from(sorted(COLUMNS)).flatmap(draw_predicates), st.tuples(st.booleans())),
    lambda inner: st.one_of(st.tuples(st.sampled_from(["and", "or"]), inner, inner), st.tuples(st.just("not"), inner)),
    max_leaves=6,
)
cells = {
    name: values if name in REQUIRED_NAMES else st.one_of(st.just((None, None)), values)
    for name, (_, _, _, values) in COLUMNS.items()
}
rows = st.fixed_dictionaries(cells)


def to_json(sent: Sent) -> Any:
    match sent:
        case (bool(constant),):
            return constant
        case ("not", child):
            return {"type": "not", "child": to_json(child)}
        case ("and" | "or" as kind, left, right):
            return {"type": kind, "left": to_json(left), "right": to_json(right)}
        case ("in" | "not-in" as op, name, literals):
            return {"type": op, "term": name, "values": [json for json, _ in literals]}
        case (op, name, []):
            return {"type": op, "term": name}
        case (op, name, [(json, _)]):
            return {"type": op, "term": name, "value": json}
    raise AssertionError(sent)


def is_match(sent: Sent, row: Mapping[str, tuple[Any, Exact]], *, negated: bool = False) -> bool:
    """Return whether the row matches by Iceberg's rules.

    A negation applies to each predicate. With a null, "less than" and "greater than" are false with and without
    negation. Equality, IN and STARTS WITH are false without negation, and true with it.
    """
    match sent:
        case (bool(constant),):
            return constant != negated
        case ("not", child):
            return is_match(child, row, negated=not negated)
        case ("and" | "or" as kind, left, right):
            sides = is_match(left, row, negated=negated), is_match(right, row, negated=negated)
            return all(sides) if (kind == "and") != negated else any(sides)
    op, name, literals = sent
    _, value = row[name]
    is_nan = isinstance(value, float) and math.isnan(value)
    expected = [meaning for _, meaning in literals]
    if op in ("is-null", "not-null"):
        return ((value is None) == (op == "is-null")) != negated
    if op in ("is-nan", "not-nan"):
        return (is_nan == (op == "is-nan")) != negated
    if op in ("eq", "not-eq", "in", "not-in"):
        is_equal = value is not None and not is_nan and value in expected
        return (is_equal == (op in ("eq", "in"))) != negated
    if op in ("starts-with", "not-starts-with"):
        return ((value is not None and value.startswith(expected[0])) == (op == "starts-with")) != negated
    if value is None:
        return False
    comparison = 1 if is_nan else (value > expected[0]) - (value < expected[0])  # NaN is greater than all values.
    outcomes = {"lt": comparison < 0, "lt-eq": comparison <= 0, "gt": comparison > 0, "gt-eq": comparison >= 0}[op]
    return outcomes != negated


def holds(expression: Expression, row: Mapping[int, Any]) -> bool:
    """Return whether a bound filter matches one row. NaN is greater than all values, as in `is_match`.

    A null matches only the operators IS_NULL, NOT_NAN, NOT_EQ, NOT_IN and NOT_STARTS_WITH.
    """
    match expression:
        case Always(value):
            return value
        case And(children):
            return all(holds(child, row) for child in children)
        case Or(children):
            return any(holds(child, row) for child in children)
    assert isinstance(expression, Bound)
    value, expected = row[expression.column_id], expression.values
    assert all(type(item) is type(expected[0]) for item in expected)
    is_nan = isinstance(value, float) and math.isnan(value)
    match expression.op:
        case Op.IS_NULL | Op.NOT_NULL:
            return (value is None) == (expression.op == Op.IS_NULL)
        case Op.IS_NAN | Op.NOT_NAN:
            return is_nan == (expression.op == Op.IS_NAN)
        case Op.EQ | Op.NOT_EQ | Op.IN | Op.NOT_IN:
            assert len(expected) == 1 if expression.op in (Op.EQ, Op.NOT_EQ) else len(expected) > 1
            return (value in expected) == (expression.op in (Op.EQ, Op.IN))
        case Op.STARTS_WITH | Op.NOT_STARTS_WITH:
            starts = value is not None and value.startswith(expected[0])
            return bool(starts == (expression.op == Op.STARTS_WITH))
    if value is None:
        return False
    comparison = 1 if is_nan else (value > expected[0]) - (value < expected[0])
    return {Op.LT: comparison < 0, Op.LT_EQ: comparison <= 0, Op.GT: comparison > 0, Op.GT_EQ: comparison >= 0}[
        expression.op
    ]


@given(filters, st.lists(rows, min_size=1, max_size=8))
def test_bound_filter_matches_the_same_rows_as_the_clients_filter(
    sent: Sent, table: list[dict[str, tuple[Any, Exact]]]
) -> None:
    expression = bind_json(to_json(sent), schemas=(WIDE,))
    for row in table:
        column_ids = {name: column_id for name, (column_id, *_) in COLUMNS.items()}
        values = {column_ids[name]: bound_value for name, (bound_value, _) in row.items()}
        assert holds(expression, values) == is_match(sent, row), expression


@given(filters)
def test_bound_expressions_contain_no_unbound_predicate_and_no_inner_constant(sent: Sent) -> None:
    def check(expression: Expression, inside: bool) -> None:
        assert not isinstance(expression, Not | Unbound)
        if isinstance(expression, And | Or):
            assert len(expression.children) > 1
            for child in expression.children:
                assert not isinstance(child, type(expression))
                check(child, True)
        assert not (inside and isinstance(expression, Always))
        if isinstance(expression, Bound):
            assert not any(isinstance(value, float) and not math.isfinite(value) for value in expression.values)

    check(bind_json(to_json(sent), schemas=(WIDE,)), False)
