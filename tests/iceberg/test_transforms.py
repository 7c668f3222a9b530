"""Tests of transforms, compared with the specification's numbers, PyIceberg and the calendar."""

from __future__ import annotations

from datetime import date, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyiceberg.transforms import parse_transform
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    FixedType,
    IcebergType,
    IntegerType,
    LongType,
    StringType,
    TimestampNanoType,
    TimestampType,
    TimestamptzNanoType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from seamark.formats.iceberg.types.transforms import compute_result_type, compute_transform, find_start_of_month
from seamark.formats.runtime.errors import BadRequest
from tests.seeds import examples

# Appendix B of the specification, with its printed hashes
HASHES: list[tuple[str, Any, int]] = [
    ("int", 34, 2017239379),
    ("long", 34, 2017239379),
    ("decimal(4, 2)", 1420, -500754589),
    ("date", 17486, -653330422),
    ("time", 81_068_000_000, -662762989),
    ("timestamp", 1_510_871_468_000_000, -2047944441),
    ("timestamptz", 1_510_871_468_000_001, -1207196810),
    ("timestamp_ns", 1_510_871_468_000_000_000, -2047944441),
    ("timestamptz_ns", 1_510_871_468_000_001_001, -1207196810),
    ("string", "iceberg", 1210000089),
    ("uuid", UUID("f79c3e09-677c-4bbd-a479-3f349cb785e7").bytes, 1488055340),
    ("fixed[4]", b"\0\1\2\3", -188683207),
    ("binary", b"\0\1\2\3", -188683207),
]

BUCKETS_MAX = 2**31 - 1

INTS = st.integers(-(2**31), 2**31 - 1)
LONGS = st.integers(-(2**63), 2**63 - 1)
STRINGS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)

PYICEBERG_TYPES: dict[str, tuple[IcebergType, st.SearchStrategy[Any]]] = {
    "int": (IntegerType(), INTS),
    "long": (LongType(), LONGS),
    "date": (DateType(), INTS),
    "time": (TimeType(), st.integers(0, 86_399_999_999)),
    "timestamp": (TimestampType(), LONGS),
    "timestamptz": (TimestamptzType(), LONGS),
    "timestamp_ns": (TimestampNanoType(), LONGS),
    "timestamptz_ns": (TimestamptzNanoType(), LONGS),
    "decimal(38, 5)": (DecimalType(38, 5), st.integers(-(10**38) + 1, 10**38 - 1)),
    "string": (StringType(), STRINGS),
    "uuid": (UUIDType(), st.binary(min_size=16, max_size=16)),
    "fixed[3]": (FixedType(3), st.binary(min_size=3, max_size=3)),
    "binary": (BinaryType(), st.binary(max_size=12)),
}

TRUNCATED_KINDS = ["int", "long", "decimal(38, 5)", "string", "binary"]


@pytest.mark.parametrize(("kind", "value", "expected_hash"), HASHES)
def test_bucket_hashes_equal_those_in_the_specification(kind: str, value: object, expected_hash: int) -> None:
    # The bucket is the hash without its sign bit, modulo the number of buckets.
    assert compute_transform(f"bucket[{BUCKETS_MAX}]", kind, value) == (expected_hash & 0x7FFFFFFF) % BUCKETS_MAX  # type: ignore[arg-type]


@given(st.sampled_from(sorted(PYICEBERG_TYPES)), st.integers(1, BUCKETS_MAX), st.data())
@settings(max_examples=examples(300))
def test_buckets_equal_the_buckets_of_pyiceberg(kind: str, buckets: int, data: st.DataObject) -> None:
    iceberg_type, values = PYICEBERG_TYPES[kind]
    value = data.draw(values)
    pyiceberg_value: Any = value
    if kind == "uuid":
        pyiceberg_value = UUID(bytes=value)
    elif kind.startswith("decimal"):
        pyiceberg_value = Decimal(f"{value}e-5")
    expected = parse_transform(f"bucket[{buckets}]").transform(iceberg_type)(pyiceberg_value)
    assert compute_transform(f"bucket[{buckets}]", kind, value) == expected


@given(st.sampled_from(TRUNCATED_KINDS), st.integers(1, 1000), st.data())
@settings(max_examples=examples(300))
def test_truncation_equals_that_of_pyiceberg_unless_it_overflows(kind: str, width: int, data: st.DataObject) -> None:
    iceberg_type, values = PYICEBERG_TYPES[kind]
    # PyIceberg computes with 28 digits, and does not overflow where Java's integers do.
    limits = {"int": 2**31, "long": 2**63, "decimal(38, 5)": 10**28}
    value = data.draw(values.filter(lambda v: kind not in limits or abs(v) < limits[kind] - width))
    is_decimal = kind.startswith("decimal")
    expected: Any = parse_transform(f"truncate[{width}]").transform(iceberg_type)(
        Decimal(f"{value}e-5") if is_decimal else value
    )
    assert compute_transform(f"truncate[{width}]", kind, value) == (int(expected.scaleb(5)) if is_decimal else expected)


def test_numbers_are_truncated_downwards() -> None:
    assert compute_transform("truncate[10]", "int", -1) == -10
    assert compute_transform("truncate[50]", "decimal(9, 2)", 1065) == 1050
    assert compute_transform("truncate[10]", "long", 9) == 0


def test_truncation_below_the_smallest_integer_wraps_as_in_java() -> None:
    assert compute_transform("truncate[10]", "int", -(2**31)) == 2147483646


def test_strings_are_truncated_by_code_points_and_binaries_by_bytes() -> None:
    assert compute_transform("truncate[2]", "string", "\U0001f9ca\U0001f3d4!") == "\U0001f9ca\U0001f3d4"
    assert compute_transform("truncate[2]", "binary", b"\xf0\x9f\xa7") == b"\xf0\x9f"


@given(st.dates(), st.integers(0, 86_399_999_999_999))
@example(date(1969, 12, 31), 86_399_999_999_999)
@example(date(1600, 2, 29), 0)
def test_time_transforms_follow_the_calendar_before_and_after_1970(day: date, nanos: int) -> None:
    days = (day - date(1970, 1, 1)).days
    hour = days * 24 + nanos // 3_600_000_000_000
    expected = {"year": day.year - 1970, "month": (day.year - 1970) * 12 + day.month - 1, "day": days, "hour": hour}
    values = {"date": days, "timestamp": days * 86_400_000_000 + nanos // 1000}
    time_ns = days * 86_400_000_000_000 + nanos
    if -(2**63) <= time_ns < 2**63:
        values["timestamptz_ns"] = time_ns
    for kind, value in values.items():
        for transform, result in expected.items():
            if (kind, transform) != ("date", "hour"):
                assert compute_transform(transform, kind, value) == result, (transform, kind)


@given(st.integers(-(10**9), 10**9))
def test_month_begins_on_its_first_day_in_any_year(month: int) -> None:
    first_day = find_start_of_month(month)
    assert compute_transform("month", "date", first_day) == month
    assert compute_transform("month", "date", first_day - 1) == month - 1


def test_calendar_continues_after_the_year_9999() -> None:
    days_after = date(9999, 12, 31) - date(1970, 1, 1) + timedelta(days=1)
    assert compute_transform("year", "date", days_after.days) == 10000 - 1970
    assert compute_transform("year", "timestamp", 2**63 - 1) == 294247 - 1970


def test_hour_outside_the_int_range_wraps_as_in_java() -> None:
    assert compute_transform("hour", "timestamp", 2**63 - 1) == (2**63 - 1) // 3_600_000_000 - 2**32


def test_null_transforms_to_null_and_void_returns_null() -> None:
    for transform in ("identity", "bucket[4]", "truncate[2]", "void", "day"):
        assert compute_transform(transform, "date" if transform == "day" else "string", None) is None
    assert compute_transform("void", "string", "x") is None


@pytest.mark.parametrize(
    ("transform", "kind", "result"),
    [
        ("identity", "decimal(9, 2)", "decimal(9, 2)"),
        ("bucket[4]", "string", "int"),
        ("truncate[4]", "binary", "binary"),
        ("year", "date", "int"),
        ("month", "timestamp", "int"),
        ("day", "timestamptz_ns", "date"),
        ("hour", "timestamp", "int"),
        ("void", "uuid", "uuid"),
        ("zorder", "int", "string"),
    ],
)
def test_result_types_of_transforms_equal_the_types_of_java(transform: str, kind: str, result: str) -> None:
    assert compute_result_type(transform, kind) == result


@pytest.mark.parametrize(
    ("transform", "kind"), [("zorder", "int"), ("hour", "date"), ("truncate[3]", "uuid"), ("bucket[3]", "double")]
)
def test_transform_that_cannot_be_computed_is_rejected_by_name(transform: str, kind: str) -> None:
    with pytest.raises(BadRequest, match=f"transform {transform.split('[')[0]}.*{kind}"):
        compute_transform(transform, kind, 1)
