"""Tests of literals in the forms of both clients, by column type; a value outside the type gets its exact place."""

from __future__ import annotations

import ctypes
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seamark.formats.iceberg.expressions.binding import Above, Below, Between, parse_literal
from seamark.formats.iceberg.expressions.typed_literals import AmbiguousRounding, TypedLiteral, convert_literal
from seamark.formats.runtime.errors import BadRequest

DAY = (date(2024, 1, 2) - date(1970, 1, 1)).days
MICROS = int(datetime(2024, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()) * 1_000_000
ID = UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7")


@pytest.mark.parametrize(
    ("kind", "json", "value"),
    [
        ("boolean", True, True),
        ("boolean", "False", False),
        ("int", -5, -5),
        ("int", "5", 5),
        ("int", "5.0", 5),
        ("long", 2**62, 2**62),
        ("long", 1e3, 1000),
        ("float", 5, 5.0),
        ("double", "-0.5", -0.5),
        ("double", "1e3", 1000.0),
        ("decimal(9, 2)", "1.2", 120),
        ("decimal(9, 2)", 7, 700),
        ("decimal(9, 2)", "-1.250", -125),
        ("decimal(38, 10)", "1234567890123456789012345678.0123456789", 12345678901234567890123456780123456789),
        ("date", DAY, DAY),
        ("date", "2024-01-02", DAY),
        ("date", "2024-01-02T00:00:00", DAY),
        ("time", 3_723_000_004, 3_723_000_004),
        ("time", "01:02:03.000004", 3_723_000_004),
        ("time", "01:02", 3_720_000_000),
        ("timestamp", MICROS, MICROS),
        ("timestamp", "2024-01-02T03:04:05", MICROS),
        ("timestamp", "2024-01-02T03:04:05.000006", MICROS + 6),
        ("timestamp", "2024-01-02", DAY * 86_400_000_000),
        ("timestamptz", "2024-01-02T03:04:05", MICROS),
        ("timestamptz", "2024-01-02T03:04:05Z", MICROS),
        ("timestamptz", "2024-01-02T05:34:05.5+02:30", MICROS + 500_000),
        ("timestamptz", "2024-01-01T22:04:05-05:00", MICROS),
        # Even for nanosecond columns, a number is in microseconds, as in Java's LongLiteral.
        ("timestamp_ns", MICROS, MICROS * 1000),
        ("timestamp_ns", "2024-01-02T03:04:05.000000007", MICROS * 1000 + 7),
        ("timestamptz_ns", "2024-01-02T03:04:05+00:00", MICROS * 1000),
        ("string", "2024-01-02", "2024-01-02"),
        ("string", "NaN", "NaN"),
        ("string", "", ""),
        ("uuid", str(ID), ID.bytes),
        ("uuid", ID.hex.upper(), ID.bytes),
        ("fixed[2]", "01ff", b"\x01\xff"),
        ("binary", "01FF", b"\x01\xff"),
        ("binary", "", b""),
    ],
)
def test_literals_of_both_forms_are_read_by_column_type(kind: str, json: object, value: object) -> None:
    literal = parse_literal(kind, json)
    assert literal == value
    assert type(literal) is type(value)


@pytest.mark.parametrize(
    ("kind", "json", "bound"),
    [
        ("int", 2**31, Above()),
        ("int", -(2**31) - 1, Below()),
        ("int", 2**31 - 0.5, Above()),
        ("int", -(2**31) - 0.5, Below()),
        ("int", "5.5", Between(5, 6)),
        ("int", -5.5, Between(-6, -5)),
        ("int", "1e999999999", Above()),
        ("long", 2**63, Above()),
        ("long", f"-{'9' * 400}", Below()),
        ("long", "-1e-999999", Between(-1, 0)),
        ("float", 1e39, Above()),
        ("float", "-1e39", Below()),
        ("float", 10**400, Above()),
        ("double", "1e400", Above()),
        ("double", -(10**400), Below()),
        ("double", "Infinity", Above(infinite=True)),
        ("float", "-Infinity", Below(infinite=True)),
        ("double", float("inf"), Above(infinite=True)),
        ("decimal(9, 1)", "1.25", Between(12, 13)),
        ("decimal(9, 1)", "-1.25", Between(-13, -12)),
        ("decimal(3, 1)", "100", Above()),
        ("decimal(3, 1)", "99.95", Above()),
        ("decimal(3, 1)", -100, Below()),
        ("date", 2**31, Above()),
        ("date", "-9999999-01-01", Below()),
        ("date", "2024-01-02T00:00:00.000001", Between(DAY, DAY + 1)),
        ("time", 2**63, Above()),
        ("time", "01:02:03.000004001", Between(3_723_000_004, 3_723_000_005)),
        ("timestamp", "2024-01-02T03:04:05.000000001", Between(MICROS, MICROS + 1)),
        ("timestamp_ns", 2**62, Above()),
        ("timestamp_ns", "0001-01-01T00:00:00", Below()),
        ("timestamp", "+300000-01-01T00:00:00", Above()),
    ],
)
def test_literal_outside_the_type_is_ordered_exactly_among_its_values(kind: str, json: object, bound: object) -> None:
    assert parse_literal(kind, json) == bound


@pytest.mark.parametrize(
    ("kind", "json"),
    [
        ("boolean", 1),
        ("boolean", "yes"),
        ("int", True),
        ("int", "five"),
        ("int", "1_000"),
        ("int", ""),
        ("double", True),
        ("double", "inf"),
        ("decimal(9, 2)", "1,5"),
        ("decimal(9, 2)", "NaN"),
        ("decimal(9, 2)", False),
        ("date", "2024-13-01"),
        ("date", 5.5),
        ("time", "25:00:00"),
        ("timestamp", "2024-01-02T03:04:05+00:00"),
        ("timestamp", 5.5),
        ("timestamptz", "yesterday"),
        ("string", 5),
        ("string", "\ud800"),
        ("uuid", "f79c3e09"),
        ("uuid", "z" * 32),
        ("fixed[2]", "01"),
        ("binary", "0"),
        ("binary", "01 ff"),
        ("binary", "é0"),
        ("struct", "x"),
        ("list", 5),
        ("variant", 5),
        ("unknown", 5),
        ("geometry", "POINT (30 10)"),
        ("of_version_9", 5),
    ],
)
def test_literal_unsuitable_for_the_type_is_a_bad_request(kind: str, json: object) -> None:
    with pytest.raises(BadRequest):
        parse_literal(kind, json)


@pytest.mark.parametrize(("kind", "json"), [("double", float("nan")), ("float", "NaN"), ("int", float("nan"))])
def test_nan_literal_is_rejected(kind: str, json: object) -> None:
    with pytest.raises(BadRequest, match="from NaN"):
        parse_literal(kind, json)


def test_long_literal_is_truncated_in_the_message() -> None:
    with pytest.raises(BadRequest) as error:
        parse_literal("date", "x" * 100_000)
    assert len(error.value.message) < 500


def test_literal_keeps_the_sign_of_zero() -> None:
    for kind in ("float", "double"):
        assert struct.pack("<d", float(str(parse_literal(kind, -0.0)))) == struct.pack("<d", -0.0)
        assert struct.pack("<d", float(str(parse_literal(kind, "0.0")))) == struct.pack("<d", 0.0)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float_in_javas_shortest_digits_is_read_exactly(value: float) -> None:
    shortest = next(
        text for digits in range(1, 10) if ctypes.c_float(float(text := f"{value:.{digits}g}")).value == value
    )
    assert parse_literal("float", float(shortest)) == value
    assert parse_literal("float", shortest) == value


@given(st.floats(min_value=-1e6, max_value=1e6))
@example(1.25)
@example(-1.25)
@example(0.15)
def test_number_for_a_decimal_column_is_rounded_half_up_as_in_java(number: float) -> None:
    tenths = Decimal(repr(number)) * 10
    expected = int(abs(tenths) + Decimal("0.5")) * (-1 if number < 0 else 1)
    assert parse_literal("decimal(38, 1)", number) == expected


LIMITS = {
    "int": (0, -(2**31), 2**31 - 1),
    "long": (0, -(2**63), 2**63 - 1),
    "decimal(5, 2)": (2, -99_999, 99_999),
    "decimal(38, 38)": (38, -(10**38) + 1, 10**38 - 1),
}
"""The scale, the minimum and the maximum of each type."""

texts = st.builds(
    lambda digits, point, sign: f"{sign}{digits[:point] or '0'}.{digits[point:] or '0'}",
    st.text("0123456789", max_size=45),
    st.integers(0, 45),
    st.sampled_from(["", "-", "+"]),
)


@given(st.sampled_from(sorted(LIMITS)), texts, st.integers(-6, 30))
def test_decimal_string_is_compared_in_exact_arithmetic(kind: str, text: str, exponent: int) -> None:
    scale, low, high = LIMITS[kind]
    exact_value = Fraction(text) * Fraction(10) ** (exponent + scale)
    match parse_literal(kind, f"{text}e{exponent}"):
        case Above():
            assert exact_value > high
        case Below():
            assert exact_value < low
        case Between(lower, upper):
            assert low <= lower < exact_value < upper <= high
            assert upper == lower + 1
        case value:
            assert value == exact_value


@given(
    st.sampled_from(
        ["boolean", "int", "float", "decimal(9, 2)", "date", "time", "timestamptz", "timestamp_ns", "uuid"]
    ),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.from_regex(r"[+-]?\d{4,9}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?([+-]\d\d:\d\d)?)?", fullmatch=True),
        st.lists(st.integers(), max_size=2),
    ),
)
def test_any_json_is_read_as_a_literal_or_is_a_bad_request(kind: str, json: object) -> None:
    try:
        literal = parse_literal(kind, json)
    except BadRequest:
        return
    assert isinstance(literal, bool | int | float | bytes | Above | Below | Between)


def _round_to_single(value: float) -> float:
    return ctypes.c_float(value).value


@given(st.integers(1, 10**18 - 1), st.integers(1, 18), st.booleans())
@example(841710691, 9, True)
@example(8336435499535531, 9, False)
def test_decimal_for_a_float_column_has_trinos_value(unscaled: int, scale: int, single: bool) -> None:
    """Trino divides a short decimal's digits by a power of ten, both rounded to the type (DecimalConversions)."""
    text = format(Decimal(unscaled).scaleb(-scale), "f")
    kind = "float" if single else "double"
    try:
        values = [str(convert_literal(TypedLiteral("number", text), kind)[0])]
    except AmbiguousRounding as ambiguity:
        values = list(ambiguity.values)
    trino_value = (
        _round_to_single(_round_to_single(unscaled) / _round_to_single(10**scale))
        if single
        else float(unscaled) / float(10**scale)
    )
    assert trino_value in [_round_to_single(float(value)) if single else float(value) for value in values]
