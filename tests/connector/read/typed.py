"""Values of every primitive type, in the form of `expressions.py`, and Arrow columns of them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

DAY_US = 86_400_000_000
YEAR_1_US, YEAR_10000_US = -62_135_596_800_000_000, 253_402_300_800_000_000
YEAR_1_DAYS, YEAR_9999_END_DAYS = -719_162, 2_932_896
"""The limits of dates and times, relative to 1970."""
LONG_END = 2**63


def _narrow(number: float) -> float:
    """Return the number as a 32-bit float. Any number beyond the range of such floats becomes +inf."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        return float("inf")


TEXTS = ["", "a", "ab", "Ab", "zz", "é", "straße", "\U0001f600", "\U0010ffff", "long " * 9, "￿" * 20, "~" * 17]
BYTES = [b"", b"\0", b"\x7f", b"\xff", b"\xff" * 17, b"a" * 40, bytes(range(16))]
FLOATS = [0.0, -0.0, 1.5, -1.5, float("nan"), float("inf"), float("-inf"), 1e-3, 3.4e38, 1e300]
TIMES = [0, -1, 1, DAY_US - 1, DAY_US, -DAY_US, 3_600_000_000, 1_700_000_000_123_456, YEAR_1_US]
LONGS = [0, 1, -1, 7, 10**12, LONG_END - 1, -LONG_END]
INTS = [0, 1, -1, 7, -8, 10**6, 2**31 - 1, -(2**31)]

SAMPLES: dict[str, Sequence[Any]] = {
    "boolean": [True, False],
    "int": INTS,
    "long": LONGS,
    "float": [_narrow(number) for number in FLOATS],
    "double": FLOATS,
    "decimal(9, 2)": [0, 1, -1, 999_999_999, -999_999_999, 12_345],
    "decimal(18, 0)": [0, 10**18 - 1, -(10**18) + 1, 42],
    "decimal(38, 10)": [0, 1, -1, 10**38 - 1, -(10**38) + 1, 10**20],
    "date": [0, 1, -1, 19_000, YEAR_1_DAYS, YEAR_9999_END_DAYS],
    "time": [0, 1, DAY_US - 1, 3_600_000_000],
    "timestamp": TIMES,
    "timestamptz": TIMES,
    "timestamp_ns": [0, -1, 999, 1000, -LONG_END, LONG_END - 1, DAY_US * 1000],
    "timestamptz_ns": [0, -1, 999, 1000, -LONG_END, LONG_END - 1, DAY_US * 1000],
    "string": TEXTS,
    "uuid": [bytes(16), b"\xff" * 16, bytes(range(16)), b"\x80" + bytes(15)],
    "fixed[3]": [b"abc", b"\0\0\0", b"\xff\xff\xff"],
    "binary": BYTES,
}
"""The edge values of each type."""


def _draw_integers(minimum: int, maximum: int) -> st.SearchStrategy[int]:
    return st.integers(minimum, maximum)


_STRATEGIES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "int": _draw_integers(-(2**31), 2**31 - 1),
    "long": _draw_integers(-LONG_END, LONG_END - 1),
    "float": st.floats(width=32, allow_subnormal=False),
    "double": st.floats(allow_subnormal=False),
    "decimal(9, 2)": _draw_integers(-(10**9) + 1, 10**9 - 1),
    "decimal(18, 0)": _draw_integers(-(10**18) + 1, 10**18 - 1),
    "decimal(38, 10)": _draw_integers(-(10**38) + 1, 10**38 - 1),
    "date": _draw_integers(YEAR_1_DAYS, YEAR_9999_END_DAYS),
    "time": _draw_integers(0, DAY_US - 1),
    "timestamp": _draw_integers(YEAR_1_US, YEAR_10000_US - 1),
    "timestamptz": _draw_integers(YEAR_1_US, YEAR_10000_US - 1),
    "timestamp_ns": _draw_integers(-LONG_END, LONG_END - 1),
    "timestamptz_ns": _draw_integers(-LONG_END, LONG_END - 1),
    "string": st.text(max_size=24),
    "uuid": st.binary(min_size=16, max_size=16),
    "fixed[3]": st.binary(min_size=3, max_size=3),
    "binary": st.binary(max_size=24),
}


def draw_values(kind: str) -> st.SearchStrategy[Any]:
    """Return a strategy for edge values and ordinary values of the type, without null."""
    return st.sampled_from(SAMPLES[kind]) | _STRATEGIES[kind]


def draw_columns(kind: str, *, size_min: int = 0, size_max: int = 40) -> st.SearchStrategy[list[Any]]:
    """Return a strategy for lists of values and nulls."""
    return st.lists(st.none() | draw_values(kind), min_size=size_min, max_size=size_max)


def draw_column(rng: random.Random, kind: str, rows: int, null_share: float = 0.2) -> list[Any]:
    return [None if rng.random() < null_share else rng.choice(SAMPLES[kind]) for _ in range(rows)]


def _build_viewed_integers(arrow: pa.DataType) -> Callable[[Sequence[Any]], pa.Array]:
    width = pa.int32() if arrow == pa.date32() else pa.int64()
    return lambda values: pa.array(values, width).view(arrow)


def _build_decimals(precision: int, scale: int) -> Callable[[Sequence[Any]], pa.Array]:
    kind = pa.decimal128(precision, scale)

    def build_decimal_array(values: Sequence[Any]) -> pa.Array:
        # Decimals are made from tuples, because decimal's own arithmetic rounds to 28 digits.
        exact_decimals = (
            None if v is None else Decimal((int(v < 0), tuple(map(int, str(abs(v)))), -scale)) for v in values
        )
        return pa.array(list(exact_decimals), kind)

    return build_decimal_array


_ARRAY_BUILDERS: dict[str, Callable[[Sequence[Any]], pa.Array]] = {
    "boolean": lambda values: pa.array(values, pa.bool_()),
    "int": lambda values: pa.array(values, pa.int32()),
    "long": lambda values: pa.array(values, pa.int64()),
    "float": lambda values: pa.array(values, pa.float32()),
    "double": lambda values: pa.array(values, pa.float64()),
    "decimal(9, 2)": _build_decimals(9, 2),
    "decimal(18, 0)": _build_decimals(18, 0),
    "decimal(38, 10)": _build_decimals(38, 10),
    "date": _build_viewed_integers(pa.date32()),
    "time": _build_viewed_integers(pa.time64("us")),
    "timestamp": _build_viewed_integers(pa.timestamp("us")),
    "timestamptz": _build_viewed_integers(pa.timestamp("us", "UTC")),
    "timestamp_ns": _build_viewed_integers(pa.timestamp("ns")),
    "timestamptz_ns": _build_viewed_integers(pa.timestamp("ns", "UTC")),
    "string": lambda values: pa.array(values, pa.string()),
    "uuid": lambda values: pa.array(values, pa.binary(16)),
    "fixed[3]": lambda values: pa.array(values, pa.binary(3)),
    "binary": lambda values: pa.array(values, pa.binary()),
}


def build_array(kind: str, values: Sequence[Any]) -> pa.Array:
    """Return an Arrow column of values and nulls.

    Decimals may have any precision and scale.
    """
    if kind not in _ARRAY_BUILDERS and kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        return _build_decimals(int(precision), int(scale))(values)
    return _ARRAY_BUILDERS[kind](values)


def to_plain(kind: str, column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of an Arrow column: dates and times as integers, decimals as unscaled integers."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in to_plain(kind, chunk)]
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_temporal(column.type):
        return list(column.view(pa.int32() if column.type == pa.date32() else pa.int64()).to_pylist())
    if pa.types.is_decimal(column.type):
        scale = column.type.scale
        return [None if value is None else _unscale(value, scale) for value in column.to_pylist()]
    return list(column.to_pylist())


def _unscale(number: Decimal, scale: int) -> int:
    sign, digits, exponent = number.as_tuple()
    assert exponent == -scale
    return int("".join(map(str, digits))) * (-1 if sign else 1)


def are_same(first: Any, other: Any) -> bool:
    """Return whether two values have the same type and are equal. NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(first, float) and isinstance(other, float):
        return (first != first and other != other) or struct.pack("<d", first) == struct.pack("<d", other)
    return type(first) is type(other) and bool(first == other)


def are_all_same(first: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(first) == len(other) and all(map(are_same, first, other))
