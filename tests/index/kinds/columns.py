"""Columns of every key type as Python values and Arrow arrays, and predicates evaluated row by row.

The evaluator compares Python values, without codes, ranks or dictionaries. Values are as in expressions
(`expressions.py`): integers for dates, times and timestamps, unscaled integers for decimals.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from seamark.formats.index.keys.keys import KeyRange, KeyRanges, make_key

NAN = math.nan
LONG_TEXT = "x" * 1023
STRINGS = ["", "a", "ab", "abc", "b", "a\0", "a\0\0", "ä", "ß", "日本語", "😀", "\uffff", "Customer#1", "Customer#10"]
HUGE_TEXTS = [
    LONG_TEXT,
    LONG_TEXT + "a",
    LONG_TEXT + "aa",
    LONG_TEXT + "ab",
    LONG_TEXT + "aab",
    LONG_TEXT + "b" * 3000,
    LONG_TEXT + "é" * 5,
    LONG_TEXT + "c\0",
]
FLOATS = [0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, 5e-324, -5e-324, 1.7e38, -2.25, 3.0, 7.0]


@dataclass(frozen=True)
class Kind:
    """A key type.

    Attributes:
        draw: Draws a value.
        arrow: Builds an Arrow array from values.
        nans: Whether columns of the type can contain NaN.
    """

    name: str
    draw: Callable[[random.Random], Any]
    arrow: Callable[[Sequence[Any]], pa.Array]
    nans: bool = False


def _build_array_builder(
    arrow: pa.DataType, target_type: pa.DataType | None = None
) -> Callable[[Sequence[Any]], pa.Array]:
    return lambda values: (
        pa.array(values, target_type or arrow).cast(arrow) if target_type != arrow else pa.array(values, arrow)
    )


def _build_int_drawer(bits: int) -> Callable[[random.Random], int]:
    def draw(rng: random.Random) -> int:
        return rng.choice([rng.randrange(-5, 5), rng.getrandbits(bits) - (1 << (bits - 1)), -(1 << (bits - 1))])

    return draw


def _build_decimal_builder(digits: int, scale: int) -> Callable[[Sequence[Any]], pa.Array]:
    def build_array(values: Sequence[Any]) -> pa.Array:
        width = 16
        heap = b"".join((value or 0).to_bytes(width, "little", signed=True) for value in values)
        validity = pa.array([value is not None for value in values], pa.bool_()).buffers()[1]
        return pa.Array.from_buffers(pa.decimal128(digits, scale), len(values), [validity, pa.py_buffer(heap)])

    return build_array


def _build_unscaled_drawer(digits: int) -> Callable[[random.Random], int]:
    maximum = 10**digits - 1
    return lambda rng: rng.choice([rng.randrange(-3, 3), rng.randrange(-maximum, maximum + 1), maximum, -maximum])


def _build_text_drawer(huge: bool) -> Callable[[random.Random], str]:
    def draw(rng: random.Random) -> str:
        if huge and rng.random() < 0.5:
            return rng.choice(HUGE_TEXTS)
        text = "".join(rng.choice("abé日\0z") for _ in range(rng.randrange(20)))
        return rng.choice([rng.choice(STRINGS), text])

    return draw


KINDS = [
    Kind("boolean", lambda rng: rng.random() < 0.5, _build_array_builder(pa.bool_())),
    Kind("int", _build_int_drawer(32), _build_array_builder(pa.int32())),
    Kind("long", _build_int_drawer(64), _build_array_builder(pa.int64())),
    Kind("date", _build_int_drawer(20), _build_array_builder(pa.date32(), pa.int32())),
    Kind("time", lambda rng: rng.randrange(86_400_000_000), _build_array_builder(pa.time64("us"), pa.int64())),
    Kind("timestamp", _build_int_drawer(50), _build_array_builder(pa.timestamp("us"), pa.int64())),
    Kind("timestamptz", _build_int_drawer(50), _build_array_builder(pa.timestamp("us", "UTC"), pa.int64())),
    Kind("timestamp_ns", _build_int_drawer(63), _build_array_builder(pa.timestamp("ns"), pa.int64())),
    Kind("float", lambda rng: rng.choice([*FLOATS[:6], 1.25, -7.5]), _build_array_builder(pa.float32()), nans=True),
    Kind("double", lambda rng: rng.choice([*FLOATS, rng.gauss(0, 1e9)]), _build_array_builder(pa.float64()), nans=True),
    Kind("decimal(9, 2)", _build_unscaled_drawer(9), _build_decimal_builder(9, 2)),
    Kind("decimal(18, 0)", _build_unscaled_drawer(18), _build_decimal_builder(18, 0)),
    Kind("decimal(38, 10)", _build_unscaled_drawer(38), _build_decimal_builder(38, 10)),
    Kind("string", _build_text_drawer(False), _build_array_builder(pa.string())),
    Kind("string, huge", _build_text_drawer(True), _build_array_builder(pa.large_string())),
    Kind("binary", lambda rng: rng.randbytes(rng.randrange(6)), _build_array_builder(pa.binary())),
    Kind("fixed[3]", lambda rng: rng.randbytes(3), _build_array_builder(pa.binary(3))),
    Kind("uuid", lambda rng: rng.randbytes(16), _build_array_builder(pa.binary(16))),
]


def get_type_name(kind: Kind) -> str:
    return kind.name.partition(", huge")[0]


def draw_column(rng: random.Random, kind: Kind, rows: int, pool: Sequence[Any] | None = None) -> list[Any]:
    """Return values of one file in a typical form (constant, few distinct, random, or sorted).

    Half of the columns have no nulls, some have a fifth, and some have only nulls.
    """
    pool = pool or [kind.draw(rng) for _ in range(rng.choice([1, 2, 3, 5, 12, 100]))]
    values = [rng.choice(pool) if rng.random() < 0.9 else kind.draw(rng) for _ in range(rows)]
    if rng.random() < 0.3:
        values = [pool[0]] * rows
    if rng.random() < 0.3:
        values.sort(key=compute_order)
    null_share, nan_share = rng.choice([0, 0, 0.2, 1]), rng.choice([0, 0.2]) if kind.nans else 0
    values = [NAN if rng.random() < nan_share else value for value in values]
    return [None if rng.random() < null_share else value for value in values]


def compute_order(value: Any) -> Any:
    """Return a sort key in Iceberg's order, in which -0.0 precedes 0.0, and texts are ordered by their UTF-8 bytes."""
    if isinstance(value, float):
        return (value, math.copysign(1, value) if value == 0 else 0)
    return value.encode() if isinstance(value, str) else value


Range = tuple[Any, Any, bool, bool]


@dataclass(frozen=True)
class Predicate:
    """Ranges of values that match, and whether nulls and NaNs match."""

    kind: str
    ranges: tuple[Range, ...]
    nulls: bool
    nans: bool

    def build_ranges(self) -> KeyRanges:
        ranges = []
        for low, high, low_open, high_open in merge_ranges(self.ranges):
            low_key, high_key = (None if bound is None else make_key(bound, self.kind) for bound in (low, high))
            ranges.append(KeyRange(low_key, high_key, low_open, high_open))
        return KeyRanges(self.kind, tuple(ranges), self.nulls, self.nans)

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.nulls
        if value != value:
            return self.nans
        rank = compute_order(value)
        for low, high, low_open, high_open in self.ranges:
            is_above = low is None or compute_order(low) < rank or (compute_order(low) == rank and not low_open)
            is_below = high is None or rank < compute_order(high) or (compute_order(high) == rank and not high_open)
            if is_above and is_below:
                return True
        return False


def merge_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return ascending and disjoint ranges that contain the same values."""
    actual_ranges: list[Range] = []
    for next_low, next_high, next_low_open, next_high_open in sorted(
        ranges,
        key=lambda bounds: (bounds[0] is not None, compute_order(bounds[0]) if bounds[0] is not None else 0, bounds[2]),
    ):
        if not actual_ranges:
            actual_ranges.append((next_low, next_high, next_low_open, next_high_open))
            continue
        low, high, low_open, high_open = actual_ranges[-1]
        if high is not None and next_low is not None:
            gap = compute_order(next_low) > compute_order(high) or (
                compute_order(next_low) == compute_order(high) and (next_low_open or high_open)
            )
            if gap:
                actual_ranges.append((next_low, next_high, next_low_open, next_high_open))
                continue
        if high is None or next_high is None:
            actual_ranges[-1] = (low, None, low_open, False)
        elif (compute_order(next_high), not next_high_open) > (compute_order(high), not high_open):
            actual_ranges[-1] = (low, next_high, low_open, next_high_open)
    return actual_ranges


def draw_predicate(rng: random.Random, kind: Kind, values: Sequence[Any]) -> Predicate:
    """Return a random predicate, in which 70 % of the literals are values of the column.

    Its form is =, <, BETWEEN, IN with a few or hundreds of values, all values, or no value.
    """
    present_values = [value for value in values if value is not None and value == value]

    def draw_literal() -> Any:
        return rng.choice(present_values) if present_values and rng.random() < 0.7 else kind.draw(rng)

    ranges: list[Range] = []
    for _ in range(rng.choice([0, 1, 1, 1, 2, 5, 300])):
        match rng.randrange(4):
            case 0:
                low = high = draw_literal()
                ranges.append((low, high, False, False))
            case 1:
                low, high = sorted((draw_literal(), draw_literal()), key=compute_order)
                ranges.append((low, high, rng.random() < 0.5, rng.random() < 0.5))
            case 2:
                second_literal = draw_literal()
                ranges.append(
                    (
                        *rng.choice([(None, second_literal), (second_literal, None)]),
                        rng.random() < 0.5,
                        rng.random() < 0.5,
                    )
                )
            case _:
                value = draw_literal()
                ranges.append((value, value, False, False))
    if rng.random() < 0.1:
        ranges.append((None, None, False, False))
    if len(ranges) >= 300 or rng.random() < 0.3:
        ranges = [item for item in ranges if item[0] is not None and item[0] == item[1]]
    return Predicate(get_type_name(kind), tuple(ranges), nulls=rng.random() < 0.3, nans=rng.random() < 0.3)
