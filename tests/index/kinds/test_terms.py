"""Tests of terms in text form: they name columns by name, and mean field ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamark.formats.iceberg.types.schema import Field, ListType, MapType, Schema, StructType
from seamark.formats.index.keys.terms import (
    format_term,
    parse_term,
    resolve_term,
    resolve_term_by_id,
    split_arguments,
)
from seamark.formats.runtime.errors import BadRequest

INSIDE = StructType((Field(21, "b", False, "string"), Field(22, "when", False, "timestamptz")))
SCHEMA = Schema(
    (
        Field(1, "id", True, "long"),
        Field(2, "a", False, INSIDE),
        Field(3, "odd, name`", False, "int"),
        Field(4, "tags", False, ListType(41, "string", False)),
        Field(5, "m", False, MapType(51, "string", 52, StructType((Field(53, "x", False, "int"),)), False)),
        Field(6, "price", False, "decimal(9, 2)"),
        Field(7, "v", False, "variant"),
        Field(8, "day(d)", False, "date"),
        Field(9, "Upper", False, "string"),
        Field(10, "u", False, "unknown"),
    ),
    schema_id=2,
)
OLDER = Schema((Field(1, "key", True, "int"), Field(11, "gone", False, "string")), schema_id=0)
BETWEEN = Schema((Field(1, "key", True, "int"), Field(12, "gone", False, "date")), schema_id=1)


@pytest.mark.parametrize(
    ("text", "column_id", "transform", "kind"),
    [
        ("id", 1, "identity", "long"),
        (" identity( id ) ", 1, "identity", "long"),
        ("a.b", 21, "identity", "string"),
        ("lower(a.b)", 21, "lower", "string"),
        ("LOWER(a.b)", 21, "lower", "string"),
        ("upper(a.b)", 21, "upper", "string"),
        ("bucket[16](id)", 1, "bucket[16]", "int"),
        ("Bucket[ 16 ](id)", 1, "bucket[16]", "int"),
        ("truncate[4](a.b)", 21, "truncate[4]", "string"),
        ("day(a.when)", 22, "day", "date"),
        ("hour(a.when)", 22, "hour", "int"),
        ("truncate[10](price)", 6, "truncate[10]", "decimal(9, 2)"),
        ("`odd, name```", 3, "identity", "int"),
        ("bucket[2](`odd, name```)", 3, "bucket[2]", "int"),
        ("`day(d)`", 8, "identity", "date"),
        ("month(`day(d)`)", 8, "month", "int"),
        ("Upper", 9, "identity", "string"),
        ("upper", 9, "identity", "string"),
        ("key", 1, "identity", "long"),
        ("gone", 12, "identity", "date"),
    ],
)
def test_term_names_a_column_and_its_transform(text: str, column_id: int, transform: str, kind: str) -> None:
    term = resolve_term(text, SCHEMA, (OLDER, SCHEMA, BETWEEN))
    assert (term.column_id, term.transform, term.kind) == (column_id, transform, kind)
    if column_id not in (11, 12):  # These columns are only in the older schemas.
        assert resolve_term(term.text, SCHEMA) == term


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idd", "no such column; did you mean id"),
        ("", "is not a column"),
        ("id)", "is not a column"),
        ("f(id)", "Cannot index by 'f'"),
        ("void(id)", "Cannot index by 'void'"),
        ("bucket(id)", "Cannot index by 'bucket'"),
        ("bucket[0](id)", "width must be between"),
        ("lower(id)", "has type long, not string"),
        ("upper(id)", "has type long, not string"),
        ("hour(`day(d)`)", "hour does not accept values of type date"),
        ("year(price)", "year does not accept"),
        ("a", "it is a struct; index one of its fields"),
        ("tags", "it is a list"),
        ("tags.element", "a list has many values"),
        ("m.key", "a map has many values"),
        ("m.value.x", "a map has many values"),
        ("v", "variant"),
        ("u", "of type unknown have no order"),
        ("day(day(a.when))", "is not a column"),
        ("x" * 20_000, "too long"),
    ],
)
def test_invalid_term_is_rejected_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadRequest) as error:
        resolve_term(text, SCHEMA, (OLDER,))
    assert message in error.value.message


def test_name_of_two_columns_that_differ_in_case_is_rejected() -> None:
    schema = Schema((Field(1, "ab", False, "int"), Field(2, "AB", False, "int")))
    assert resolve_term("AB", schema).column_id == 2
    with pytest.raises(BadRequest, match="it matches AB, ab"):
        resolve_term("Ab", schema)


def test_column_id_refers_to_the_newest_schema_that_has_it() -> None:
    assert resolve_term_by_id("identity", 1, SCHEMA, (OLDER,)).name == "id"
    assert resolve_term_by_id("identity", 11, SCHEMA, (BETWEEN, OLDER)).name == "gone"
    with pytest.raises(BadRequest, match="field 99"):
        resolve_term_by_id("identity", 99, SCHEMA, (OLDER,))


@given(st.sampled_from(["identity", "lower", "upper", "bucket[7]"]), st.text(min_size=1, max_size=12))
def test_any_column_name_is_parsed_alone_and_in_a_list(transform: str, name: str) -> None:
    text = format_term(transform, name)
    assert parse_term(text) == (transform, name)
    assert [parse_term(part) for part in split_arguments(f"{text}, {text}")] == [(transform, name)] * 2


@pytest.mark.parametrize("text", ["a, `b", "a, (b", "a)", "`", "(" * 9])
def test_list_without_a_closing_bracket_is_rejected(text: str) -> None:
    with pytest.raises(BadRequest, match="close its backticks and parentheses"):
        list(split_arguments(text))
