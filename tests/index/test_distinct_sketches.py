"""Sketches estimate within their bound, and merges in any order give the same bytes. Damaged sketches are refused."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.keys.distinct_sketches import (
    REGISTERS,
    SKETCH,
    STANDARD_ERROR,
    build_sketches,
    check_sketches,
    estimate_sketches,
    iterate_registers,
    make_value_sketches,
    merge_sketches,
)

COUNTS = (0, 1, 2, 50, 700, 1500, 4000, 20_000, 60_000)
"""Numbers of distinct values: a few, lists of registers, all registers, and numbers between them."""


def build_single_sketch(values: pa.Array) -> pa.Array:
    return build_sketches(pa.chunked_array([values]), np.zeros(len(values), np.int64), 1)


def draw_values(generator: np.random.Generator, count: int) -> pa.Array:
    return pa.array(np.arange(count) * 977 + generator.integers(1 << 40))


def test_estimates_are_within_the_bound() -> None:
    """The largest error is below five standard errors, plus 0.5 for rounding.

    The deviation of all errors is at most a fifth above the standard error, and their mean is near zero.
    """
    generator = np.random.default_rng(1)
    errors = []
    for count in COUNTS:
        for _ in range(6):  # Six sketches of each size and type give a stable deviation.
            values = draw_values(generator, count)
            texts = values.cast(pa.string())
            for column in (values, texts):
                (estimate,) = estimate_sketches(build_single_sketch(column)).to_pylist()
                assert abs(estimate - count) <= 5 * STANDARD_ERROR * count + 0.5, (count, estimate)
                errors.append((estimate - count) / max(1, count))
    assert np.std(errors) < 1.2 * STANDARD_ERROR
    assert abs(np.mean(errors)) < STANDARD_ERROR / 2


def test_merges_in_any_order_give_the_sketch_of_all_values() -> None:
    generator = np.random.default_rng(2)
    for size in (1, 300, 3000):
        values = pa.array(generator.integers(0, 4 * size, 8 * size))
        groups = generator.integers(0, 5, len(values))
        expected = build_sketches(pa.chunked_array([values]), groups, 5)
        parts = [
            build_sketches(pa.chunked_array([values.slice(begin, size)]), groups[begin : begin + size], 5)
            for begin in range(0, len(values), size)
        ]
        for _ in range(5):
            while len(parts) > 1:
                merged_parts = [parts.pop(generator.integers(len(parts))) for _ in range(min(3, len(parts)))]
                parts.append(
                    merge_sketches(pa.chunked_array(merged_parts), np.tile(np.arange(5), len(merged_parts)), 5)
                )
            assert parts[0].equals(expected)
            parts = [expected, parts[0]]
        singles = make_value_sketches(values)
        assert merge_sketches(pa.chunked_array([singles]), groups, 5).equals(expected)


def test_estimate_of_full_registers_fits_into_int64() -> None:
    # 53 is the largest value of a register.
    registers = [bytes([53]) * REGISTERS, bytes([53]) * (REGISTERS - 1) + b"\0", bytes([1]) * REGISTERS]
    estimates = estimate_sketches(pa.array(registers, SKETCH)).to_pylist()
    assert estimates == sorted(estimates, reverse=True)
    assert estimates[-1] > 0


def test_nulls_are_not_counted_and_an_empty_text_is() -> None:
    sketches = make_value_sketches(pa.array(["", None, "a", ""]))
    assert estimate_sketches(sketches).to_pylist() == [1, 0, 1, 1]
    merged = merge_sketches(pa.chunked_array([sketches]), np.zeros(4, np.int64), 2)
    assert estimate_sketches(merged).to_pylist() == [2, 0]


def test_numbers_dates_and_times_have_the_sketch_of_their_integer() -> None:
    longs = make_value_sketches(pa.array([-1, 0, 7], pa.int64()))
    for kind in (pa.int32(), pa.date32(), pa.timestamp("us"), pa.timestamp("us", "UTC")):
        bits = pa.int32() if kind in (pa.int32(), pa.date32()) else pa.int64()
        assert make_value_sketches(pa.array([-1, 0, 7], bits).view(kind)).equals(longs)
    with pytest.raises(ValueError, match="cannot be counted"):
        make_value_sketches(pa.array([1.5]))


def test_many_values_need_at_most_4096_bytes() -> None:
    sketch = build_single_sketch(pa.array(np.arange(100_000)))
    assert [len(value) for value in sketch.to_pylist()] == [REGISTERS]
    (registers,) = iterate_registers(sketch)
    assert registers.tobytes() == sketch[0].as_py()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"abc", "length"),
        (bytes(REGISTERS + 4), "length"),
        (bytes(4), "invalid register"),
        ((54).to_bytes(4, "little"), "invalid register"),
        ((64 * REGISTERS + 1).to_bytes(4, "little"), "invalid register"),
        ((65).to_bytes(4, "little") + (1).to_bytes(4, "little"), "ascending"),
        (bytes([54]) * REGISTERS, "rank"),
    ],
)
def test_damaged_sketch_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_sketches(pa.array([b"", data], SKETCH))
