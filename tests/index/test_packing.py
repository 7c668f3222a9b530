"""Packed columns: what goes in comes out, in fewer bytes, and codes keep the order of what they stand for."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaserver.iceberg.expressions import Value
from metaserver.iceberg.values import encode
from metaserver.index.packing import Column, Form, Packed, Spans, Writer, form_of, key_of, pack_bounds, value_of

INT = st.integers(-(2**31), 2**31 - 1)
LONG = st.integers(-(2**63) + 1, 2**63 - 1)
"""Without the least one, which stands for absent."""
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


def spans_of(kind: str, values: list[Value | None]) -> Spans:
    heap, starts, lengths = bytearray(b"x"), [], []
    for value in values:
        data = None if value is None else encode(kind, value)
        starts.append(len(heap))
        lengths.append(-1 if data is None else len(data))
        heap += data or b""
    return Spans(
        np.frombuffer(bytes(heap), dtype=np.uint8),
        np.array(starts, dtype=np.int64),
        np.array(lengths, dtype=np.int32),
    )


def packed_bounds(kind: str, values: list[Value | None], *, absent_low: bool) -> tuple[Column | None, Packed | None]:
    writer = Writer()
    packed = pack_bounds(writer, kind, spans_of(kind, values), absent_low=absent_low)
    if packed is None:
        return None, None
    memory = np.frombuffer(b"".join(writer.buffers), dtype=np.uint8)
    assert len(memory) == writer.size_bytes
    return Column(memory, packed, len(values)), packed


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=40)
@given(data=st.data())
def test_every_value_and_every_gap_comes_back(kind: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.one_of(st.none(), VALUES[kind]), min_size=1, max_size=40))
    column, packed = packed_bounds(kind, values, absent_low=data.draw(st.booleans()))
    if column is None or packed is None:
        assert all(value is None for value in values)
        return
    form = form_of(kind)
    assert form is not None
    for row, value in enumerate(values):
        key = column.key(row)
        back = None if key is None else value_of(form, kind, key)
        assert back == value
        if isinstance(value, float) and isinstance(back, float):
            assert math.copysign(1, back) == math.copysign(1, value)
    assert column.present().tolist() == [value is not None for value in values]


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=40)
@given(data=st.data())
def test_keys_order_as_values_do(kind: str, data: st.DataObject) -> None:
    one, other = data.draw(VALUES[kind]), data.draw(VALUES[kind])
    form = form_of(kind)
    assert form is not None
    left, right = key_of(form, kind, one), key_of(form, kind, other)
    if kind == "string":
        assert isinstance(one, str)
        assert isinstance(other, str)
        assert (left < right) == (list(map(ord, one)) < list(map(ord, other)))  # type: ignore[operator]
    else:
        assert (left < right) == (one < other)  # type: ignore[operator]


def test_a_narrow_range_takes_one_byte_a_row() -> None:
    _, packed = packed_bounds("long", [10**15 + number for number in range(200)], absent_low=True)
    assert packed is not None
    assert packed.width == 1


def test_equal_values_take_no_bytes() -> None:
    _, packed = packed_bounds("long", [7] * 100, absent_low=True)
    assert packed is not None
    assert (packed.width, packed.base) == (0, 7)
    _, text = packed_bounds("string", ["the same"] * 100, absent_low=True)
    assert text is not None
    assert (text.width, text.common) == (0, b"the same")


def test_doubles_that_floats_hold_take_four_bytes() -> None:
    _, packed = packed_bounds("double", [0.5, 1.25, -3.0], absent_low=True)
    assert packed is not None
    assert packed.width == 4
    _, exact = packed_bounds("double", [0.1, 1.25], absent_low=True)
    assert exact is not None
    assert exact.width == 8


def test_bounds_of_impossible_lengths_are_left_out() -> None:
    heap = np.frombuffer(b"abcdefgh" * 4, dtype=np.uint8)
    starts, lengths = np.array([0, 8, 16], dtype=np.int64), np.array([3, 8, 7], dtype=np.int32)
    writer = Writer()
    packed = pack_bounds(writer, "long", Spans(heap, starts, lengths), absent_low=True)
    assert packed is not None
    column = Column(np.frombuffer(b"".join(writer.buffers), dtype=np.uint8), packed, 3)
    assert [column.key(row) for row in range(3)] == [None, int.from_bytes(b"abcdefgh", "little"), None]


def test_a_span_outside_the_heap_is_left_out() -> None:
    heap = np.frombuffer(b"\x01\0\0\0", dtype=np.uint8)
    spans = Spans(heap, np.array([0, 2], dtype=np.int64), np.array([4, 4], dtype=np.int32))
    writer = Writer()
    packed = pack_bounds(writer, "int", spans, absent_low=True)
    assert packed is not None
    column = Column(np.frombuffer(b"".join(writer.buffers), dtype=np.uint8), packed, 2)
    assert [column.key(0), column.key(1)] == [1, None]


def test_the_least_long_is_no_lower_bound_and_one_more_is_a_true_upper_one() -> None:
    lower, _ = packed_bounds("long", [-(2**63), 3], absent_low=True)
    upper, _ = packed_bounds("long", [-(2**63), 3], absent_low=False)
    assert lower is not None
    assert upper is not None
    assert [lower.key(0), lower.key(1)] == [None, 3]
    assert [upper.key(0), upper.key(1)] == [-(2**63) + 1, 3]


def test_days_left_by_a_promoted_date_are_no_bounds_of_a_timestamp() -> None:
    heap = np.frombuffer(struct.pack("<iq", 19_000, 5), dtype=np.uint8)
    spans = Spans(heap, np.array([0, 4], dtype=np.int64), np.array([4, 8], dtype=np.int32))
    for kind, first in (("timestamp", None), ("timestamptz_ns", None), ("long", 19_000)):
        writer = Writer()
        packed = pack_bounds(writer, kind, spans, absent_low=True)
        assert packed is not None
        column = Column(np.frombuffer(b"".join(writer.buffers), dtype=np.uint8), packed, 2)
        assert [column.key(0), column.key(1)] == [first, 5]


def test_nan_is_no_bound() -> None:
    heap = np.frombuffer(struct.pack("<dd", float("nan"), 2.0), dtype=np.uint8)
    spans = Spans(heap, np.array([0, 8], dtype=np.int64), np.array([8, 8], dtype=np.int32))
    writer = Writer()
    packed = pack_bounds(writer, "double", spans, absent_low=True)
    assert packed is not None
    column = Column(np.frombuffer(b"".join(writer.buffers), dtype=np.uint8), packed, 2)
    assert [column.key(0), column.key(1)] == [None, 2.0]


def test_types_without_order_have_no_form() -> None:
    assert [form_of(kind) for kind in ("variant", "geometry", "geography", "unknown", "struct")] == [None] * 5


def test_a_decimal_too_long_for_its_type_is_left_out() -> None:
    data = (10**30).to_bytes(16, "big", signed=True)
    heap = np.frombuffer(data + b"\x05", dtype=np.uint8)
    spans = Spans(heap, np.array([0, 16], dtype=np.int64), np.array([16, 1], dtype=np.int32))
    writer = Writer()
    packed = pack_bounds(writer, "decimal(9, 2)", spans, absent_low=True)
    assert packed is not None
    assert packed.form == Form.INTEGERS
    column = Column(np.frombuffer(b"".join(writer.buffers), dtype=np.uint8), packed, 2)
    assert [column.key(0), column.key(1)] == [None, 5]


@pytest.mark.parametrize("literal", [10**44, -(10**44), 2**127, -(2**127) - 1])
def test_a_literal_beyond_every_decimal_lies_beyond_every_decimal(literal: int) -> None:
    """Truncation can take decimals past their precision, so such literals are bound."""
    kind = "decimal(38, 0)"
    edges = [key_of(Form.STRINGS, kind, edge) for edge in (-(10**38) + 1, 10**38 - 1)]
    key = key_of(Form.STRINGS, kind, literal)
    assert isinstance(key, bytes)
    assert len(key) == 16
    assert all((key > edge) == (literal > 0) and key != edge for edge in edges)  # type: ignore[operator]
