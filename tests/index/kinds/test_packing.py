"""Tests of packed columns: values survive, take fewer bytes, and codes keep the order of the values."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.manifests.manifest import Spans
from seamark.formats.iceberg.types.values import Value, encode_single_value
from seamark.formats.index.kernels._pack import Packer
from seamark.formats.index.packing import (
    LONG_MAX,
    MISSING,
    NONE,
    Form,
    Longs,
    Packed,
    PackedColumn,
    decode_value,
    encode_key,
    get_form,
    get_packer_type_code,
)
from tests.seeds import examples

INT = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63) + 1, 2**63 - 1)
"""All longs except the least, which represents an absent value."""
VALUES: dict[str, st.SearchStrategy[Value]] = {
    "boolean": st.booleans(),
    "int": INT,
    "long": st.one_of(LONG, st.sampled_from([-(2**63) + 1, 2**63 - 1, 0]), st.integers(1_000_000, 1_000_300)),
    "date": INT,
    "time": st.integers(0, 86_399_999_999),
    "timestamp": LONG,
    "timestamptz_ns": LONG,
    "float": st.floats(width=32, allow_nan=False),
    "double": st.floats(allow_nan=False),
    "decimal(9, 2)": st.integers(-(10**9) + 1, 10**9 - 1),
    "decimal(18, 0)": st.integers(-(10**18) + 1, 10**18 - 1),
    "decimal(38, 10)": st.integers(-(10**38) + 1, 10**38 - 1),
    "string": st.one_of(st.text(max_size=30), st.text(max_size=4).map(lambda text: "https://example.org/" + text)),
    "binary": st.binary(max_size=300),
    "uuid": st.binary(min_size=16, max_size=16),
    "fixed[3]": st.binary(min_size=3, max_size=3),
}


def append_spans(kind: str, values: list[Value | None], heap: bytearray) -> Spans:
    """Append the values as Iceberg's single-value binaries to `heap`, and return their spans.

    A null has the length -1.
    """
    starts, lengths = [], []
    for value in values:
        data = None if value is None else encode_single_value(kind, value)
        starts.append(len(heap))
        lengths.append(-1 if data is None else len(data))
        heap += data or b""
    return Spans(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int32))


def to_byte_array(heap: bytes | bytearray) -> npt.NDArray[np.uint8]:
    return np.frombuffer(bytes(heap), dtype=np.uint8)


def pack_spans(
    kind: str, heap: bytes | bytearray, spans: Spans, *, absent_low: bool
) -> tuple[PackedColumn, Packed] | None:
    """Pack the bounds that `spans` locate in the bytes `heap`, or return None if no bound can be packed.

    With `absent_low`, a missing bound is ordered before all bounds, otherwise after them.

    Returns:
        The packed column, and the description of its form and position.
    """
    packer = Packer(to_byte_array(heap), len(spans.starts))
    number = packer.bounds(get_packer_type_code(kind), spans.starts, spans.lengths, absent_low=absent_low)
    memory = np.frombuffer(packer.pack(), dtype=np.uint8)
    packed_span = packer.packed(number)
    if packed_span is None:
        return None
    return PackedColumn(memory, Packed(*packed_span), len(spans.starts)), Packed(*packed_span)


def pack_bounds(
    kind: str, values: list[Value | None], *, absent_low: bool
) -> tuple[PackedColumn | None, Packed | None]:
    heap = bytearray(b"x")
    spans = append_spans(kind, values, heap)
    return pack_spans(kind, heap, spans, absent_low=absent_low) or (None, None)


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_every_value_and_null_is_unchanged_after_packing(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.one_of(st.none(), VALUES[kind]), min_size=1, max_size=40))
    column, packed_span = pack_bounds(kind, values, absent_low=data.draw(st.booleans()))
    if column is None or packed_span is None:
        assert all(value is None for value in values)
        return
    form = get_form(kind)
    assert form is not None
    for row, value in enumerate(values):
        key = column.read_key(row)
        decoded_value = None if key is None else decode_value(form, kind, key)
        assert decoded_value == value
        if isinstance(value, float) and isinstance(decoded_value, float):
            assert math.copysign(1, decoded_value) == math.copysign(1, value)
    assert column.present().tolist() == [value is not None for value in values]


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_keys_have_the_order_of_their_values(kind: str, data: st.DataObject) -> None:
    first, other = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    form = get_form(kind)
    assert form is not None
    left, right = encode_key(form, kind, first), encode_key(form, kind, other)
    if kind == "string":
        assert isinstance(first, str)
        assert isinstance(other, str)
        assert (left < right) == (list(map(ord, first)) < list(map(ord, other)))  # type: ignore[operator]
    else:
        assert (left < right) == (first < other)  # type: ignore[operator]


def test_narrow_range_takes_one_byte_for_each_row() -> None:
    _, packed_span = pack_bounds("long", [10**15 + number for number in range(200)], absent_low=True)
    assert packed_span is not None
    assert packed_span.width == 1


def test_equal_values_take_no_bytes() -> None:
    _, packed_span = pack_bounds("long", [7] * 100, absent_low=True)
    assert packed_span is not None
    assert (packed_span.width, packed_span.base) == (0, 7)
    _, text = pack_bounds("string", ["the same"] * 100, absent_low=True)
    assert text is not None
    assert (text.width, text.common) == (0, b"the same")


def test_doubles_that_are_floats_take_four_bytes() -> None:
    _, packed_span = pack_bounds("double", [0.5, 1.25, -3.0], absent_low=True)
    assert packed_span is not None
    assert packed_span.width == 4
    _, wide_span = pack_bounds("double", [0.1, 1.25], absent_low=True)
    assert wide_span is not None
    assert wide_span.width == 8


def unpack_keys(kind: str, heap: bytes, starts: list[int], lengths: list[int]) -> list[Any]:
    spans = Spans(np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int32))
    packed_spans = pack_spans(kind, heap, spans, absent_low=True)
    assert packed_spans is not None
    column, _ = packed_spans
    return [column.read_key(row) for row in range(len(starts))]


def test_bounds_of_impossible_lengths_are_dropped() -> None:
    number = int.from_bytes(b"abcdefgh", "little")
    assert unpack_keys("long", b"abcdefgh" * 4, [0, 8, 16], [3, 8, 7]) == [None, number, None]


@pytest.mark.parametrize(
    ("kind", "heap", "first"),
    [
        ("int", b"\x01\0\0\0", 1),
        ("timestamp", struct.pack("<q", 7), 7),
        ("float", struct.pack("<f", 0.5), 0.5),
        ("decimal(9, 2)", b"\x01\x02", 258),
        ("decimal(38, 2)", b"\x01\x02", (2**127 + 258).to_bytes(16, "big")),
        ("string", b"four", b"four"),
    ],
)
def test_span_outside_the_heap_is_dropped(kind: str, heap: bytes, first: Any) -> None:
    size = len(heap)
    starts = [0, size - 1, -1, size + 1, 2**62, -(2**62)]
    assert unpack_keys(kind, heap, starts, [size] * len(starts)) == [first] + [None] * (len(starts) - 1)


def test_least_long_is_dropped_as_a_lower_bound_and_rounded_up_as_an_upper_bound() -> None:
    lower, _ = pack_bounds("long", [-(2**63), 3], absent_low=True)
    upper, _ = pack_bounds("long", [-(2**63), 3], absent_low=False)
    assert lower is not None
    assert upper is not None
    assert [lower.read_key(0), lower.read_key(1)] == [None, 3]
    assert [upper.read_key(0), upper.read_key(1)] == [-(2**63) + 1, 3]


def test_days_of_a_promoted_date_are_not_used_as_timestamp_bounds() -> None:
    heap = struct.pack("<iq", 19_000, 5)
    for kind, first in (("timestamp", None), ("timestamptz_ns", None), ("long", 19_000)):
        assert unpack_keys(kind, heap, [0, 4], [4, 8]) == [first, 5]


def test_nan_is_not_used_as_a_bound() -> None:
    assert unpack_keys("double", struct.pack("<dd", float("nan"), 2.0), [0, 8], [8, 8]) == [None, 2.0]


def test_types_without_an_order_have_no_packed_form() -> None:
    assert [get_form(kind) for kind in ("variant", "geometry", "geography", "unknown", "struct")] == [None] * 5


def test_decimal_too_long_for_its_type_is_dropped() -> None:
    data = (10**30).to_bytes(16, "big", signed=True)
    assert unpack_keys("decimal(9, 2)", data + b"\x05", [0, 16], [16, 1]) == [None, 5]


def test_decimal_may_repeat_its_sign_bytes() -> None:
    heap = (-300).to_bytes(40, "big", signed=True) + (1).to_bytes(17, "big") + b"\x01" + bytes(16)
    assert unpack_keys("decimal(18, 0)", heap, [0, 40, 57], [40, 17, 17]) == [-300, 1, None]


@pytest.mark.parametrize("literal", [10**44, -(10**44), 2**127, -(2**127) - 1])
def test_literal_beyond_the_precision_is_outside_all_packed_decimals(literal: int) -> None:
    """A truncation can produce a decimal beyond its precision, so predicates may have literals beyond it."""
    kind = "decimal(38, 0)"
    edges = [encode_key(Form.STRINGS, kind, edge) for edge in (-(10**38) + 1, 10**38 - 1)]
    key = encode_key(Form.STRINGS, kind, literal)
    assert isinstance(key, bytes)
    assert len(key) == 16
    assert all((key > edge) == (literal > 0) and key != edge for edge in edges)  # type: ignore[operator]


def test_presence_mask_marks_the_values_that_exist() -> None:
    longs = np.array([MISSING, 5, 9, LONG_MAX], dtype=np.int64)
    doubles = np.array([math.nan, 0.1, -math.inf, 7.0])
    presence = np.array([1, 0, 1, 0], dtype=np.uint8)
    packer = Packer(to_byte_array(b""), 4)
    column_numbers = [
        packer.longs(longs, presence, absent_low=True),
        packer.doubles(doubles, presence, absent_low=False),
    ]
    memory = np.frombuffer(packer.pack(), dtype=np.uint8)
    packed_columns = []
    for number in column_numbers:
        packed_span = packer.packed(number)
        assert packed_span is not None
        packed_columns.append(PackedColumn(memory, Packed(*packed_span), 4))
    assert [packed_columns[0].read_key(row) for row in range(4)] == [MISSING, None, 9, None]
    assert str([packed_columns[1].read_key(row) for row in range(4)]) == "[nan, None, -inf, None]"
    assert (packed_columns[1].packed.low, packed_columns[1].packed.high) == (-math.inf, math.inf)


SPREADS = [
    0,
    1,
    2**7,
    2**8 - 2,
    2**8 - 1,
    2**8,
    2**16 - 2,
    2**16 - 1,
    2**16,
    2**32 - 2,
    2**32 - 1,
    2**32,
    2**63,
    2**64 - 2,
]


@pytest.mark.each_pair
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("absent_low", [True, False])
@pytest.mark.parametrize("has_absent_value", [True, False])
def test_codes_keep_the_order_of_values_and_absent_values_are_first_or_last(
    spread: int, absent_low: bool, has_absent_value: bool
) -> None:
    """The values are at the limits of each width, where the code for absent values determines the width."""
    low = -(2**63) + 1
    values = [low, low + spread // 2, low + spread] + ([MISSING] if has_absent_value else [])
    packer = Packer(to_byte_array(b""), len(values))
    number = packer.longs(np.array(values, dtype=np.int64), absent_low=absent_low)
    memory = np.frombuffer(packer.pack(), dtype=np.uint8)
    fields = packer.packed(number)
    assert fields is not None
    packed_span = Packed(*fields)
    assert PackedColumn(memory, packed_span, len(values)).read_longs().tolist() == values
    assert (packed_span.presence == NONE) == (not has_absent_value)
    if not has_absent_value and spread == 0:
        assert packed_span.width == 0
        return
    assert packed_span.width == next(
        width for width in (1, 2, 4, 8) if spread + has_absent_value < 1 << 8 * width or width == 8
    )
    codes = np.frombuffer(memory, f"<u{packed_span.width}", len(values), packed_span.codes).tolist()
    assert codes[0] <= codes[1] <= codes[2]
    if has_absent_value:
        assert codes[3] == (0 if absent_low else 2 ** (8 * packed_span.width) - 1)
        assert (packed_span.low, packed_span.high) == ((MISSING, values[2]) if absent_low else (low, LONG_MAX))
        assert codes[3] <= codes[0] if absent_low else codes[3] >= codes[2]


COUNT = st.one_of(st.none(), st.sampled_from([0, 1, 5, -1, 2**40]))
"""A count that a file states for a column; no count is negative."""


@settings(max_examples=examples(150))
@given(data=st.data())
def test_columns_of_a_manifest_are_unchanged_after_packing(data: st.DataObject) -> None:
    """Columns of all kinds are next to each other, each with missing rows. No column may overlap the next."""
    rows = data.draw(st.integers(0, 20), label="rows")
    kinds = data.draw(st.lists(st.sampled_from([*VALUES, "variant"]), max_size=6), label="kinds")
    records = data.draw(st.lists(st.sampled_from([0, 1, 5]), min_size=rows, max_size=rows), label="records")
    heap = bytearray()
    drawn_columns: list[tuple[list[list[int | None]], list[list[Value | None]]]] = []
    for kind in kinds:
        counts = [data.draw(st.lists(COUNT, min_size=rows, max_size=rows)) for _ in range(4)]
        if data.draw(st.booleans()):
            counts[0] = list(records)
        value = st.one_of(st.none(), VALUES.get(kind, st.none()))
        drawn_columns.append((counts, [data.draw(st.lists(value, min_size=rows, max_size=rows)) for _ in range(2)]))

    def list_present_rows(values: list[Any]) -> npt.NDArray[np.int32]:
        return np.array([row for row, value in enumerate(values) if value is not None], dtype=np.int32)

    packed_counts_arguments, packed_bounds_arguments = [], []
    for kind, (counts, sides) in zip(kinds, drawn_columns, strict=True):
        packed_counts_arguments.append(
            tuple(
                None
                if all(count is None for count in item) and data.draw(st.booleans())
                else (list_present_rows(item), np.array([count for count in item if count is not None], dtype=np.int64))
                for item in counts
            )
        )
        bounds = []
        for side in sides:
            spans = append_spans(kind, [value for value in side if value is not None], heap)
            bounds.append((list_present_rows(side), spans.starts, spans.lengths))
        packed_bounds_arguments.append(bounds)
    packer = Packer(to_byte_array(heap), rows)
    record_count = packer.longs(np.array(records, dtype=np.int64), absent_low=True)
    numbers = [
        packer.column(get_packer_type_code(kind), counts, lower, upper, record_count)  # type: ignore[arg-type]
        for kind, counts, (lower, upper) in zip(kinds, packed_counts_arguments, packed_bounds_arguments, strict=True)
    ]
    memory = np.frombuffer(packer.pack(), dtype=np.uint8)

    for kind, (counts, sides), number in zip(kinds, drawn_columns, numbers, strict=True):
        lower, upper, packed_counts, *count_classes = packer.entry(number)
        for fields, side in zip((lower, upper), sides, strict=True):
            form = get_form(kind)
            if form is None or fields is None:
                assert fields is None
                assert form is None or all(value is None for value in side)
                continue
            column = PackedColumn(memory, Packed(*fields), rows)
            keys = [column.read_key(row) for row in range(rows)]
            assert [None if key is None else decode_value(form, kind, key) for key in keys] == side
        real_counts = [[None if count is not None and count < 0 else count for count in item] for item in counts]
        for fields, packed_count in zip(packed_counts, real_counts, strict=True):
            if fields is None:
                assert all(count is None for count in packed_count)
                continue
            assert read_longs(memory, fields, rows) == packed_count
        values, nulls, nans, _ = real_counts
        if values == records and rows:
            assert packed_counts[0] == packer.packed(record_count)
        pairs = [(nulls, values), (nans, values), (nulls, [0] * rows), (nans, [0] * rows)]
        equal_counts = [
            sum(left is not None and left == other for left, other in zip(*pair, strict=True)) for pair in pairs
        ]
        # 0: the counts are equal in no row, 1: in all rows, 2: in some rows.
        assert count_classes == [0 if count == 0 else 1 if count == rows else 2 for count in equal_counts]


def read_longs(memory: npt.NDArray[np.uint8], fields: tuple[Any, ...], rows: int) -> list[int | None]:
    longs: Longs = PackedColumn(memory, Packed(*fields), rows).read_longs()
    return [None if value == MISSING else value for value in longs.tolist()]


def test_incompatible_columns_are_rejected() -> None:
    heap, values = to_byte_array(b"abc"), np.array([0, 1], dtype=np.int64)
    packer = Packer(heap, 2)
    rows, lengths = np.array([0, 2], dtype=np.int32), np.array([1, 1], dtype=np.int32)
    empty_key = (None, None, None, None)
    with pytest.raises(ValueError, match="beyond"):
        packer.column(0, empty_key, (rows[1:], values[:1], lengths[:1]), None)
    with pytest.raises(ValueError, match="a row of its own"):
        packer.column(0, empty_key, (rows, values[:1], lengths[:1]), None)
    with pytest.raises(ValueError, match="a start and a length"):
        packer.bounds(get_packer_type_code("string"), values, lengths[:1], absent_low=True)
    with pytest.raises(ValueError, match="each row"):
        packer.bounds(get_packer_type_code("string"), values[:1], lengths[:1], absent_low=True)
    with pytest.raises(ValueError, match="each value"):
        packer.longs(values, np.ones(1, dtype=np.uint8), absent_low=True)
    with pytest.raises(ValueError, match="no such job"):
        packer.column(0, empty_key, None, None, 7)
    with pytest.raises(IndexError):
        packer.packed(0)
    packer.pack()
    with pytest.raises(ValueError, match="already"):
        packer.pack()
