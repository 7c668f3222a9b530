"""Tests of single values in bytes and JSON, compared with PyIceberg and with the specification's examples."""

from __future__ import annotations

import struct
from datetime import date
from decimal import Decimal
from math import isnan
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg import conversions
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FixedType,
    FloatType,
    IntegerType,
    LongType,
    PrimitiveType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from seamark.formats.iceberg.types.values import (
    Value,
    decode_json,
    decode_single_value,
    encode_json,
    encode_single_value,
)

INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
MICROS = st.integers(-62_135_596_800_000_000, 253_402_300_799_999_999)
"""Times in the years from 1 to 9999, which PyIceberg can write."""

KINDS: dict[str, tuple[PrimitiveType, st.SearchStrategy[Any]]] = {
    "boolean": (BooleanType(), st.booleans()),
    "int": (IntegerType(), INTS),
    "long": (LongType(), LONGS),
    "float": (FloatType(), st.floats(width=32)),
    "double": (DoubleType(), st.floats()),
    "decimal(9, 2)": (DecimalType(9, 2), st.integers(-(10**9) + 1, 10**9 - 1)),
    "decimal(38, 0)": (DecimalType(38, 0), st.integers(-(10**38) + 1, 10**38 - 1)),
    "decimal(38, 38)": (DecimalType(38, 38), st.integers(-(10**38) + 1, 10**38 - 1)),
    "date": (DateType(), st.integers(-719_162, 2_932_896)),
    "time": (TimeType(), st.integers(0, 86_399_999_999)),
    "timestamp": (TimestampType(), MICROS),
    "timestamptz": (TimestamptzType(), MICROS),
    "timestamp_ns": (TimestampNanoType(), LONGS),
    "timestamptz_ns": (TimestamptzNanoType(), LONGS),
    "string": (StringType(), st.text()),
    "uuid": (UUIDType(), st.binary(min_size=16, max_size=16)),
    "fixed[5]": (FixedType(5), st.binary(min_size=5, max_size=5)),
    "binary": (BinaryType(), st.binary()),
}

values = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), KINDS[kind][1]))


def are_same(value: object, other_value: object) -> bool:
    """Return whether two values have the same type and are equal. NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(value, float) and isinstance(other_value, float):
        return struct.pack("<d", value) == struct.pack("<d", other_value) or (isnan(value) and isnan(other_value))
    return type(value) is type(other_value) and value == other_value


def to_pyiceberg(kind: str, value: Value) -> Any:
    """Return the value in PyIceberg's form."""
    if kind.startswith("decimal") and isinstance(value, int):
        scale = int(kind[:-1].split(",")[1])
        return Decimal((int(value < 0), tuple(map(int, str(abs(value)))), -scale))
    return UUID(bytes=value) if kind == "uuid" and isinstance(value, bytes) else value


@given(values)
def test_bytes_of_values_equal_the_bytes_that_pyiceberg_writes_and_reads(case: tuple[str, Value]) -> None:
    kind, value = case
    data = encode_single_value(kind, value)
    assert data == conversions.to_bytes(KINDS[kind][0], to_pyiceberg(kind, value))
    assert are_same(decode_single_value(kind, data), value)


@given(values)
def test_value_is_equal_after_a_json_round_trip(case: tuple[str, Value]) -> None:
    kind, value = case
    assert are_same(decode_json(kind, encode_json(kind, value)), value)


@given(values.filter(lambda case: not case[0].endswith("_ns") and case[0] not in ("float", "double")))
def test_json_of_values_equals_the_json_of_pyiceberg(case: tuple[str, Value]) -> None:
    kind, value = case
    actual_json, expected = encode_json(kind, value), conversions.to_json(KINDS[kind][0], to_pyiceberg(kind, value))
    if kind.startswith("decimal"):
        assert isinstance(actual_json, str)
        assert "E" not in actual_json
        assert (Decimal(actual_json), Decimal(actual_json).as_tuple().exponent) == (
            Decimal(expected),
            Decimal(expected).as_tuple().exponent,
        )
    elif kind in ("binary", "fixed[5]"):
        # PyIceberg writes lower-case letters, but Java and the REST specification use upper-case letters.
        assert actual_json == expected.upper()
    else:
        assert actual_json == expected


@pytest.mark.parametrize(
    ("kind", "value", "json"),
    [
        ("decimal(9, 2)", -5, "-0.05"),
        ("decimal(9, 0)", 2, "2"),
        ("date", -719_163, "0000-12-31"),
        ("date", 2_932_897, "+10000-01-01"),
        ("date", -1_000_000, "-0768-02-04"),
        ("timestamp", 1, "1970-01-01T00:00:00.000001"),
        ("timestamptz", -1, "1969-12-31T23:59:59.999999+00:00"),
        ("timestamp", -62_135_596_800_000_000, "0001-01-01T00:00:00"),
        ("timestamp", -62_135_596_800_000_001, "0000-12-31T23:59:59.999999"),
        ("timestamptz", 253_402_300_799_999_999, "9999-12-31T23:59:59.999999+00:00"),
        ("timestamptz", 253_402_300_800_000_000, "+10000-01-01T00:00:00+00:00"),
        ("timestamp_ns", 1_510_871_468_123_456_789, "2017-11-16T22:31:08.123456789"),
        ("timestamptz_ns", 1_510_871_468_123_456_789, "2017-11-16T22:31:08.123456789+00:00"),
        ("timestamp_ns", 1_510_871_468_000_001_000, "2017-11-16T22:31:08.000001"),
        ("fixed[3]", b"xyz", "78797A"),
        ("float", float("nan"), "NaN"),
        ("double", float("-inf"), "-Infinity"),
        ("long", None, None),
    ],
)
def test_json_of_values_has_javas_form(kind: str, value: Value | None, json: object) -> None:
    assert encode_json(kind, value) == json
    assert are_same(decode_json(kind, json), value)


@given(st.integers(-(2**31), 2**31 - 1))
def test_days_of_any_year_follow_the_calendar(days: int) -> None:
    text = encode_json("date", days)
    assert decode_json("date", text) == days
    # The calendar repeats every 400 years, which have 146097 days.
    cycles = days // 146_097
    year, month, day = str(text).lstrip("+").rsplit("-", 2)
    assert date(int(year) - 400 * cycles, int(month), int(day)) == date.fromordinal(719_163 + days - cycles * 146_097)


def test_bounds_from_before_a_promotion_are_read_by_their_length() -> None:
    assert decode_single_value("long", struct.pack("<i", -7)) == -7
    assert decode_single_value("double", struct.pack("<f", 0.5)) == 0.5
    assert decode_single_value("timestamp", struct.pack("<i", -1)) == -86_400_000_000
    assert decode_single_value("timestamp_ns", struct.pack("<i", 1)) == 86_400_000_000_000
    assert decode_single_value("decimal(38, 2)", b"\x80") == -128
    assert decode_single_value("decimal(38, 2)", b"\x00\x00\x80") == 128


def test_bounds_of_fixed_columns_may_be_truncated() -> None:
    assert decode_single_value("fixed[20]", b"abc") == b"abc"


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("boolean", b""),
        ("boolean", b"\x00\x01"),
        ("int", b"\x00" * 8),
        ("date", b"\x00" * 3),
        ("long", b"\x00" * 7),
        ("time", b"\x00" * 4),
        ("timestamptz", b"\x00" * 4),
        # A promoted date outside the range of timestamps (spec: "must result in a runtime failure")
        ("timestamp", struct.pack("<i", 2**31 - 1)),
        ("timestamp_ns", struct.pack("<i", -(2**31))),
        ("float", b"\x00" * 8),
        ("double", b""),
        ("decimal(9, 2)", b""),
        ("decimal(38, 2)", b"\x00" * 17),
        ("string", b"\xff"),
        ("uuid", b"\x00" * 15),
        ("fixed[2]", b"abc"),
        ("struct", b""),
        ("geometry", b"\x00" * 16),
    ],
)
def test_bytes_that_no_writer_makes_are_rejected(kind: str, data: bytes) -> None:
    with pytest.raises(ValueError, match=r"value of type|range of type|codec can't decode"):
        decode_single_value(kind, data)


@given(st.sampled_from([*sorted(KINDS), "variant", "list"]), st.binary(max_size=20))
def test_any_bytes_are_read_as_a_value_or_rejected(kind: str, data: bytes) -> None:
    try:
        value = decode_single_value(kind, data)
    except ValueError:
        return
    assert are_same(decode_single_value(kind, encode_single_value(kind, value)), value)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("int", 2**31), ("long", "5"), ("date", 0.5), ("uuid", 5), ("string", b"x"), ("decimal(9, 2)", 1.5), ("map", 1)],
)
def test_value_of_a_different_type_is_not_written(kind: str, value: Value) -> None:
    with pytest.raises(ValueError, match="cannot be written"):
        encode_single_value(kind, value)


@pytest.mark.parametrize(
    ("kind", "json"),
    [
        ("int", 2**31),
        ("int", True),
        ("long", 5.0),
        ("boolean", 1),
        ("float", 1e39),
        ("float", 10**400),
        ("double", -(10**400)),
        ("decimal(9, 2)", "1.255"),
        ("decimal(9, 2)", "1E+99999999999999999999"),
        ("date", "2024-02-30"),
        ("date", "20240101"),
        ("time", "24:00:00"),
        ("time", "23:59:59.1234567"),
        ("timestamp", "2024-01-01T00:00:00+00:00"),
        ("timestamptz", "2024-01-01T00:00:00"),
        ("timestamptz", "2024-01-01T00:00:00+02:00"),
        ("timestamptz", "2024-01-01T00:00:00+00:99"),
        ("uuid", "f79c3e09677c4bbda4793f349cb785e7"),
        ("fixed[2]", "ABCDEF"),
        ("binary", "ABC"),
        ("string", 5),
        ("struct", {}),
    ],
)
def test_json_of_a_different_type_is_rejected(kind: str, json: object) -> None:
    with pytest.raises(ValueError):
        decode_json(kind, json)


@pytest.mark.parametrize(("kind", "value"), [("struct", 1), ("string", 5), ("int", "5"), ("uuid", "x")])
def test_value_without_a_json_form_is_rejected(kind: str, value: Value) -> None:
    with pytest.raises(ValueError, match="as JSON"):
        encode_json(kind, value)
