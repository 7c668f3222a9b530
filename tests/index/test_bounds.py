"""Tests that unusable bounds are recognised in the same way as by Python's codecs and numbers."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from seamark.formats.index.kernels._bounds import ORDERS, unusable_bounds
from tests.seeds import first_seed

TEXTS = [
    b"",
    b"a",
    b"El cliente llam\xc3",
    "llamó".encode(),
    b"\xc3\x28",
    b"\xe0\x80\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
]
TEXTS += [
    b"\xf0\x9f\x98\x80",
    b"\xf0\x9f\x98",
    b"\xff",
    b"\x80",
    b"abcdefgh",
    b"abcdefg\xc3",
    b"abcdefgh\xc3\xb3",
    b"\xc0\xaf",
    b"\0",
]


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def draw_text(rng: random.Random) -> bytes:
    return rng.choice(TEXTS) if rng.random() < 0.6 else rng.randbytes(rng.randint(0, 12))


def draw_number(form: str) -> Callable[[random.Random], bytes]:
    def draw_bytes(rng: random.Random) -> bytes:
        value = rng.choice([0, 1, -1, 7, rng.randint(-(2**31), 2**31 - 1)])
        return struct.pack(form, value)

    return draw_bytes


def draw_decimal(rng: random.Random) -> bytes:
    value = rng.choice([0, -1, 127, 128, -128, -129, rng.randint(-(2**90), 2**90)])
    minimum = ((value if value >= 0 else ~value).bit_length() + 8) // 8
    return value.to_bytes(minimum + rng.choice((0, 0, 3)), "big", signed=True)


def make_bound_reader(form: str) -> Callable[[bytes], Any]:
    return lambda data: struct.unpack(form, data)[0]


KINDS: dict[str, tuple[Callable[[random.Random], bytes], Callable[[bytes], Any]]] = {
    "texts": (draw_text, bytes),
    "bytes": (draw_text, bytes),
    "integers": (draw_number("<q"), make_bound_reader("<q")),
    "reals": (draw_number("<d"), make_bound_reader("<d")),
    "numerals": (draw_decimal, lambda data: int.from_bytes(data, "big", signed=True)),
    "unordered": (draw_text, bytes),
}
Side = dict[int, bytes]


def build_columns(side: Side, heap: bytearray) -> tuple[Any, Any, Any]:
    """Append the bounds of one side to the heap.

    Args:
        side: The lower or the upper bounds of a column by row.
        heap: The bytes of all bounds.

    Returns:
        The rows that have a bound, and the starts and the lengths of these bounds in the heap.
    """
    starts = []
    for data in side.values():
        starts.append(len(heap))
        heap += data + b"\xc3"  # This byte is invalid in UTF-8. A check that reads beyond the end of a bound fails.
    lengths = [len(data) for data in side.values()]
    return np.array(list(side), np.int32), np.array(starts, np.int64), np.array(lengths, np.int32)


def compute_expected_flags(
    name: str, low: Side, high: Side, read: Callable[[bytes], Any]
) -> tuple[list[int], list[int]]:
    """Return 1 for each unusable lower and upper bound, and 0 for each other bound.

    A text that is not UTF-8 is unusable. If the lower bound of a row is above its upper bound, both are unusable,
    except in the kind `unordered`, whose values are not compared.
    """

    def is_wrong(row: int, data: bytes) -> bool:
        if name == "texts" and not is_utf8(data):
            return True
        is_in_both = row in low and row in high and name != "unordered"
        return is_in_both and bool(read(low[row]) > read(high[row]))

    return tuple([int(is_wrong(row, data)) for row, data in side.items()] for side in (low, high))  # type: ignore[return-value]


@pytest.mark.parametrize("name", KINDS)
def test_bounds_that_are_no_valid_range_are_recognised(name: str) -> None:
    rng = random.Random(f"bounds {first_seed()} {name}")
    draw, read_bounds = KINDS[name]
    wrong_count = 0
    for _ in range(400):
        low, high = ({row: draw(rng) for row in range(6) if rng.random() < 0.8} for _ in range(2))
        heap = bytearray(b"\xc3")
        sides: Sequence[Any] = (*build_columns(low, heap), *build_columns(high, heap))
        unusable = unusable_bounds(np.frombuffer(bytes(heap), np.uint8), ORDERS[name], *sides)
        expected_flags = compute_expected_flags(name, low, high, read_bounds)
        if unusable is None:
            assert not any(map(any, expected_flags)), (low, high)
        else:
            wrong_count += 1
            assert tuple(side.tolist() for side in unusable) == expected_flags, (low, high)
    assert (wrong_count > 0) == (name != "unordered")


def test_impossible_spans_are_not_checked() -> None:
    heap, rows = np.frombuffer(b"\xc3\xc3", np.uint8), np.arange(3, dtype=np.int32)
    starts, lengths = np.array([1, -5, 0], np.int64), np.array([9, 1, -1], np.int32)
    no_bounds = (rows[:0], starts[:0], lengths[:0])
    for order in ORDERS.values():
        assert unusable_bounds(heap, order, rows, starts, lengths, rows, starts, lengths) is None
        assert unusable_bounds(heap, order, *no_bounds, *no_bounds) is None
