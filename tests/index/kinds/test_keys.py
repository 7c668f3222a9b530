"""Tests that keys represent a column's values in every Arrow layout, and that ranges contain the right keys."""

from __future__ import annotations

import datetime
import math
import struct
from decimal import Decimal
from itertools import product
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import (
    CODE_MAX,
    Key,
    KeyRange,
    KeyRanges,
    Keys,
    has_codes,
    make_key,
    pack_mask,
    unpack_bits,
)
from tests.seeds import examples

LONGS = st.integers(-(2**63), 2**63 - 1)
INT = st.integers(-(2**31), 2**31 - 1)

COLUMNS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "boolean": (pa.bool_(), st.booleans()),
    "int": (pa.int32(), INT),
    "long": (pa.int64(), LONGS),
    "float": (pa.float32(), st.floats(width=32)),
    "double": (pa.float64(), st.floats()),
    "date": (pa.date32(), INT),
    "time": (pa.time64("us"), st.integers(0, 86_399_999_999)),
    "timestamp": (pa.timestamp("us"), LONGS),
    "timestamptz": (pa.timestamp("us", "UTC"), LONGS),
    "timestamp_ns": (pa.timestamp("ns"), LONGS),
    "timestamptz_ns": (pa.timestamp("ns", "UTC"), LONGS),
    "decimal(9, 2)": (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1)),
    "decimal(18, 0)": (pa.decimal128(18, 0), st.integers(-(10**18) + 1, 10**18 - 1)),
    "decimal(38, 10)": (pa.decimal128(38, 10), st.integers(-(10**38) + 1, 10**38 - 1)),
    "string": (pa.string(), st.text(max_size=20)),
    "binary": (pa.binary(), st.binary(max_size=20)),
    "uuid": (pa.binary(16), st.binary(min_size=16, max_size=16)),
    "fixed[3]": (pa.binary(3), st.binary(min_size=3, max_size=3)),
}
"""By Iceberg type: the Arrow type of a Parquet reader, and values as in `expressions.py`"""


def build_array(kind: str, values: list[Any]) -> pa.Array:
    arrow, _ = COLUMNS[kind]
    if kind.startswith("decimal"):
        scale = arrow.scale
        values = [None if value is None else Decimal(f"{value}e-{scale}") for value in values]
        return pa.array(values, arrow)
    if kind.startswith(("date", "time")):
        return pa.array(values, pa.int32() if kind == "date" else pa.int64()).view(arrow)
    return pa.array(values, arrow, from_pandas=False)


def compute_documented_key(kind: str, value: Any) -> Key:
    """Return the key according to the design document, computed in plain Python."""
    if kind == "boolean":
        return 1 if value else 0
    if kind in ("float", "double"):
        bits = int.from_bytes(struct.pack(">d", value), "big")
        return bits ^ 0xFFFFFFFFFFFFFFFF if bits >> 63 else bits | 1 << 63
    if kind == "decimal(38, 10)":
        return int(value + 2**127).to_bytes(16, "big")
    if isinstance(value, int):
        return value + 2**63
    return value.encode() if isinstance(value, str) else value


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def check_keys(keys: Keys, kind: str, values: list[Any]) -> None:
    """Check the keys of these values, and the attributes of `Keys` about nulls and NaNs."""
    rows = len(values)
    assert (keys.kind, keys.rows) == (kind, rows)
    validity = [True] * rows if keys.valid is None else unpack_bits(keys.valid, rows).tolist()
    nan = [False] * rows if keys.nan is None else unpack_bits(keys.nan, rows).tolist()
    assert validity == [value is not None for value in values]
    assert nan == [is_nan(value) for value in values]
    for bits in (keys.valid, keys.nan):
        if bits is not None:
            assert len(bits) == math.ceil(rows / 64)
            assert not int.from_bytes(bits.tobytes(), "little") >> rows
    assert (keys.valid is None) == all(validity)
    assert (keys.nan is None) == (not any(nan))
    present_mask = keys.present
    assert ([True] * rows if present_mask is None else present_mask.tolist()) == [
        value is not None and not is_nan(value) for value in values
    ]
    if has_codes(kind):
        assert keys.codes is not None
        assert keys.codes.dtype == np.uint64
        assert keys.starts is None
        codes: list[Any] = keys.codes.tolist()
        empty_key: Key = 0
    else:
        assert keys.codes is None
        assert keys.starts is not None
        assert keys.heap is not None
        assert keys.starts.tolist()[0] == 0
        assert keys.starts.tolist()[-1] == len(keys.heap)
        codes = [keys.heap[a:b].tobytes() for a, b in zip(keys.starts[:-1], keys.starts[1:], strict=True)]
        empty_key = b""
    assert codes == [
        empty_key if value is None or is_nan(value) else compute_documented_key(kind, value) for value in values
    ]


def list_layouts(array: pa.Array) -> dict[str, Any]:
    """Return the same rows in several Arrow layouts, by name."""
    doubled_array = pa.concat_arrays([array, array])
    middle = len(array) // 2
    layouts = {
        "plain": array,
        "sliced": doubled_array.slice(len(array)),
        "chunks": pa.chunked_array([array.slice(0, middle), array.slice(0, 0), array.slice(middle)]),
        "dictionary": array.dictionary_encode(),
        "dictionary, sliced": doubled_array.dictionary_encode().slice(len(array)),
    }
    if pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        layouts["view"] = doubled_array.cast(
            pa.string_view() if pa.types.is_string(array.type) else pa.binary_view()
        ).slice(len(array))
        layouts["large"] = array.cast(pa.large_binary())
    if pa.types.is_decimal(array.type):
        layouts["wide"] = doubled_array.cast(pa.decimal256(array.type.precision, array.type.scale)).slice(len(array))
    return layouts


@pytest.mark.parametrize("kind", COLUMNS)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_keys_equal_the_values_of_each_row_in_every_layout(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.one_of(st.none(), COLUMNS[kind][1]), max_size=150))
    for name, array in list_layouts(build_array(kind, values)).items():
        try:
            check_keys(convert_to_keys(array, kind), kind, values)
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("kind", COLUMNS)
@given(data=st.data())
@settings(max_examples=examples(60))
def test_literal_has_the_key_of_the_column_value_and_keeps_its_order(kind: str, data: st.DataObject) -> None:
    values = COLUMNS[kind][1].filter(lambda value: not is_nan(value))
    first, other = data.draw(values), data.draw(values)
    keys: list[Any] = [make_key(first, kind), make_key(other, kind)]
    assert keys == [compute_documented_key(kind, first), compute_documented_key(kind, other)]
    if first != other:
        # Code points of strings have the order of their UTF-8.
        assert (first < other) == (keys[0] < keys[1])


def test_zeros_of_both_signs_have_adjacent_keys() -> None:
    minus, plus = make_key(-0.0, "double"), make_key(0.0, "float")
    assert isinstance(minus, int)
    assert plus == minus + 1
    assert KeyRanges("double", (KeyRange(minus, plus),)).points == (minus, plus)


def test_bytes_under_a_null_are_ignored() -> None:
    # In Arrow, the bytes of a null are arbitrary. The validity bits 0x05 make the second of three values null.
    offsets, heap = pa.py_buffer(np.array([0, 2, 4, 6], dtype=np.int32)), pa.py_buffer(b"aabbcc")
    array = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(b"\x05"), offsets, heap])
    check_keys(convert_to_keys(array, "string"), "string", ["aa", None, "cc"])
    numbers = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), pa.py_buffer(np.arange(5, 8))])
    check_keys(convert_to_keys(numbers, "long"), "long", [5, None, 7])
    fixed_array = pa.Array.from_buffers(pa.binary(2), 3, [pa.py_buffer(b"\x05"), heap])
    check_keys(convert_to_keys(fixed_array, "fixed[2]"), "fixed[2]", [b"aa", None, b"cc"])


@pytest.mark.parametrize("kind", [*COLUMNS, "unknown"])
def test_column_of_only_nulls_is_accepted_for_every_type(kind: str) -> None:
    check_keys(convert_to_keys(pa.nulls(70), kind), kind, [None] * 70)
    check_keys(convert_to_keys(pa.chunked_array([], pa.null()), kind), kind, [])


def test_values_from_before_a_promotion_have_the_keys_of_the_wider_type() -> None:
    check_keys(convert_to_keys(pa.array([-5, 7], pa.int32()), "long"), "long", [-5, 7])
    check_keys(
        convert_to_keys(pa.array([0.1, math.nan], pa.float32()), "double"), "double", [float(np.float32(0.1)), math.nan]
    )
    check_keys(
        convert_to_keys(pa.array([Decimal("-1.50")], pa.decimal32(5, 2)), "decimal(9, 2)"), "decimal(9, 2)", [-150]
    )
    check_keys(
        convert_to_keys(pa.array([Decimal("1e-10")], pa.decimal64(15, 10)), "decimal(38, 10)"), "decimal(38, 10)", [1]
    )
    days = pa.array([datetime.date(1969, 12, 31)])
    check_keys(convert_to_keys(days, "timestamp"), "timestamp", [-86_400_000_000])
    check_keys(convert_to_keys(days.cast(pa.date64()), "date"), "date", [-1])


@pytest.mark.parametrize(("unit", "factor"), [("s", 1_000_000), ("ms", 1_000), ("us", 1), ("ns", 0.001)])
def test_timestamps_of_any_unit_are_converted_to_the_unit_of_the_column(unit: str, factor: float) -> None:
    array = pa.array([-1_000, None, 5_000], pa.int64()).view(pa.timestamp(unit, "Europe/Paris"))
    counts = [-1_000 * factor, None, 5_000 * factor]
    integer_counts = [None if count is None else int(count) for count in counts]
    check_keys(convert_to_keys(array, "timestamptz"), "timestamptz", integer_counts)
    if unit == "ns":
        check_keys(convert_to_keys(array, "timestamptz_ns"), "timestamptz_ns", [-1_000, None, 5_000])
        return
    with pytest.raises(ValueError, match="does not have values of type timestamptz_ns"):
        convert_to_keys(array, "timestamptz_ns")


def test_uuids_of_the_extension_type_are_their_bytes() -> None:
    uuid = UUID(int=2**100 + 7)
    check_keys(convert_to_keys(pa.array([uuid.bytes, None], pa.uuid()), "uuid"), "uuid", [uuid.bytes, None])


def test_huge_strings_and_runs_are_read() -> None:
    values = ["x" * 3_000_000, "", "é" * 100_000]
    check_keys(convert_to_keys(pa.array(values), "string"), "string", values)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([3, 5], pa.int32()), pa.array([7, 8], pa.int64()))
    check_keys(convert_to_keys(runs, "long"), "long", [7, 7, 7, 8, 8])


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array([1]), "string"),
        (pa.array(["1"]), "int"),
        (pa.array([1.5]), "long"),
        (pa.array([1]), "double"),
        (pa.array([True]), "int"),
        (pa.array([1e300], pa.float64()), "float"),
        (pa.array([0.5, 0.1], pa.float64()), "float"),  # A reader of floats would read a different number than 0.1.
        (pa.array([1]), "timestamp"),
        (pa.array([2**63], pa.uint64()), "long"),
        (
            pa.array([2**31], pa.uint32()),
            "long",
        ),  # The number is negative in Java, which reads the four bytes as signed.
        (pa.array([1_001], pa.timestamp("ns")), "timestamp"),
        (pa.array([1], pa.time64("ns")), "time"),
        (pa.array([2**62], pa.timestamp("s")), "timestamp"),
        (pa.array([2**31 - 1], pa.int32()).view(pa.date32()), "timestamp_ns"),
        (pa.array([Decimal("1.5")], pa.decimal128(9, 1)), "decimal(9, 2)"),
        (pa.array([Decimal(10**30)], pa.decimal128(38, 0)), "decimal(18, 0)"),
        (pa.array([Decimal(10**50)], pa.decimal256(60, 0)), "decimal(38, 0)"),
        (pa.array([b"12345678"]), "decimal(38, 0)"),
        (pa.array([[1]]), "long"),
        (pa.array([1]), "variant"),
        (pa.array([b""]), "geometry"),
    ],
)
def test_column_with_values_of_another_type_is_rejected(array: pa.Array, kind: str) -> None:
    with pytest.raises(ValueError, match="type"):
        convert_to_keys(array, kind)


def test_invalid_bytes_under_a_null_are_accepted() -> None:
    wide_array = pa.Array.from_buffers(pa.float64(), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0.1, 0.5]))])
    check_keys(convert_to_keys(wide_array, "float"), "float", [None, 0.5])
    array = pa.Array.from_buffers(
        pa.timestamp("ns"), 2, [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([1_001, 5_000], dtype=np.int64))]
    )
    check_keys(convert_to_keys(array, "timestamp"), "timestamp", [None, 5])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (math.nan, "double"),
        (2**63, "long"),
        (1, "string"),
        ("1", "int"),
        (True, "int"),
        (1, "boolean"),
        (b"x", "string"),
        (b"x", "long"),
        (2**127, "decimal(38, 0)"),
        (1, "binary"),
    ],
)
def test_literal_without_a_key_is_rejected(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=r"NaN has no key|is not a value of type"):
        make_key(value, kind)


def test_bit_and_mask_conversions_are_inverse() -> None:
    for rows in (0, 1, 63, 64, 65, 1000):
        mask = np.random.default_rng(rows).random(rows) < 0.5
        bits = pack_mask(mask)
        assert len(bits) == math.ceil(rows / 64)
        assert [bool(int(bits[row // 64]) >> (row % 64) & 1) for row in range(rows)] == mask.tolist()
        assert unpack_bits(bits, rows).tolist() == mask.tolist()


SMALL_CODES = st.one_of(st.integers(0, 12), st.integers(CODE_MAX - 3, CODE_MAX))
SMALL_BYTES = st.text("\0a", max_size=3).map(str.encode)


@st.composite
def draw_ascending_ranges(draw: st.DrawFn, keys: st.SearchStrategy[Any]) -> list[KeyRange]:
    """Return ascending ranges for a `KeyRanges`, some of them empty."""
    bounds = sorted(draw(st.lists(keys, unique=True, max_size=8)))
    bounds = [None, *bounds] if draw(st.booleans()) else bounds
    bounds = [*bounds, None] if draw(st.booleans()) or len(bounds) % 2 else bounds
    pairs = zip(bounds[::2], bounds[1::2], strict=False)
    key_ranges = [KeyRange(low, high, draw(st.booleans()), draw(st.booleans())) for low, high in pairs]
    # Some ranges are single keys.
    return [
        key_range if key_range.low is None or draw(st.booleans()) else key_range._replace(high=key_range.low)
        for key_range in key_ranges
    ]


def is_within(key: Any, key_range: KeyRange) -> bool:
    low: Any = key_range.low
    high: Any = key_range.high
    if low is not None and (key < low or (key_range.low_open and key == low)):
        return False
    return not (high is not None and (key > high or (key_range.high_open and key == high)))


@pytest.mark.parametrize("kind", ["long", "string"])
@given(data=st.data())
@settings(max_examples=examples(200))
def test_ranges_contain_the_keys_between_their_bounds_in_every_lookup(kind: str, data: st.DataObject) -> None:
    keys: st.SearchStrategy[Any] = SMALL_CODES if kind == "long" else SMALL_BYTES
    key_ranges = data.draw(draw_ascending_ranges(keys))
    ranges = KeyRanges(kind, tuple(key_ranges))
    probed_keys: list[Any] = [*range(14), *range(CODE_MAX - 5, CODE_MAX + 1)]
    if kind == "string":
        probed_keys = [bytes(text) for length in range(5) for text in product(b"\0ab", repeat=length)]
    for key in probed_keys:
        expected = any(is_within(key, given_range) for given_range in key_ranges)
        assert ranges.contains(key) == expected
        assert any(is_within(key, item) for item in ranges.closed) == expected
        if ranges.points is not None:
            assert (key in ranges.points) == expected
    if kind == "long":
        assert all(item.low is not None and item.high is not None for item in ranges.closed)
        assert not any(item.low_open or item.high_open for item in ranges.closed)


def test_points_of_ranges_are_all_of_their_keys_or_none() -> None:
    assert KeyRanges("string", (KeyRange(b"a", b"a"), KeyRange(b"b", b"b")), nulls=True).points == (b"a", b"b")
    assert KeyRanges("long", ()).points == ()
    assert KeyRanges("long", (KeyRange(3, 6, True, True),)).points == (4, 5)
    assert KeyRanges("string", (KeyRange(b"a", b"a\0", False, True),)).points == (b"a",)
    assert KeyRanges("string", (KeyRange(b"a", b"b"),)).points is None
    assert KeyRanges("long", (KeyRange(None, 5),)).points == (0, 1, 2, 3, 4, 5)
    assert KeyRanges("long", (KeyRange(5, None),)).points is None
    evens = tuple(KeyRange(key, key) for key in range(0, 10_000, 2))
    assert KeyRanges("long", evens).points == tuple(range(0, 10_000, 2))


def test_overlapping_or_unordered_ranges_are_rejected() -> None:
    for first, other in (
        (KeyRange(1, 3), KeyRange(3, 5)),
        (KeyRange(4, 5), KeyRange(1, 2)),
        (KeyRange(None, None), KeyRange(1, 2)),
    ):
        with pytest.raises(ValueError, match="overlap"):
            KeyRanges("long", (first, other))
    KeyRanges("long", (KeyRange(1, 3, False, True), KeyRange(3, 5)))
