"""Tests of the compiled functions against comparisons in plain Python.

The columns have several blocks with gaps, constants and long strings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seamark.formats.iceberg.types.values import Value
from seamark.formats.index.kernels import _scan
from seamark.formats.index.packing import NONE, Form, Packed, encode_key, get_form
from tests.index.kinds.test_packing import VALUES, pack_bounds
from tests.seeds import examples, first_seed, mark_fast

NO_ROW, ALL_ROWS, ROWS_OF_MASK = range(3)
"""The states of a block in a selection. `ROWS_OF_MASK` selects the rows whose byte in the mask is 1."""
LT_EQ, LT, GT_EQ, GT = range(4)
"""The numbers of the comparison operators."""
OPS = {LT_EQ: lambda a, b: a <= b, LT: lambda a, b: a < b, GT_EQ: lambda a, b: a >= b, GT: lambda a, b: a > b}
LAYOUT_COLUMNS = 15
"""The number of integers that describe a block to the compiled functions.

Columns: 0 form (-1: no values), 1 width of a code, 2 address of the codes, 3 address of the bitmap of present values
(0: all are present), 4 row count, 5 first row, 6 base that is added to the codes, 7 to 12 parts of texts, 13 address of
the sketch (0: none), 14 shift of the sketch. The sketch has one byte for each row, for example the 8 highest bits of
its code. The byte alone decides the comparison of most rows.
"""
Blocks = list[list[Value | None]]


class ScanColumns:
    """The bounds of several blocks in the layout of the compiled functions (`LAYOUT_COLUMNS`).

    With `absent_low`, an absent value is stored below all values, otherwise above them. With `sketched`, columns have
    sketches, one byte for each row, where their type allows it.
    """

    def __init__(self, kind: str, blocks: Blocks, *, absent_low: bool, sketched: bool = False) -> None:
        self.referenced_arrays: list[object] = []
        rows, low, high, first_row = [], [], [], 0
        for values in blocks:
            column, packed_span = pack_bounds(kind, values, absent_low=absent_low)
            if column is None or packed_span is None:
                rows.append((-1,) + (0,) * (LAYOUT_COLUMNS - 1))  # The form -1 means that the block has no values.
                low.append(0)
                high.append(0)
            else:
                memory = column._memory
                self.referenced_arrays.append(memory)
                address = int(memory.__array_interface__["data"][0]) if len(memory) else 0
                row = _encode_span_row(packed_span, address, len(values), first_row)
                if sketched and packed_span.form != Form.FLOATS and packed_span.width >= 4:
                    make = self._make_sketch if packed_span.form == Form.INTEGERS else self._make_string_sketch
                    row = (
                        *row[: LAYOUT_COLUMNS - 2],
                        *make(memory[packed_span.codes :], packed_span.width, len(values)),
                    )
                rows.append(row)
                low.append(packed_span.low)
                high.append(packed_span.high)
            first_row += len(values)
        form = get_form(kind)
        assert form is not None
        dtype = (np.int64, np.float64, np.uint64)[form]
        self.form, self.rows = form, first_row
        self.layout = np.array(rows, dtype=np.int64).reshape(len(blocks), LAYOUT_COLUMNS)
        self.low, self.high = np.array(low, dtype=dtype), np.array(high, dtype=dtype)

    def _make_sketch(self, memory: np.ndarray, width: int, rows: int) -> tuple[int, int]:
        """Return (address, shift) of a sketch, which has the 8 highest bits of each code, relative to the largest code.

        The compiled function `sketch` makes none if too many rows have the same byte. This function always makes one.
        """
        codes = memory[: width * rows].view(f"<u{width}")
        shift = max(0, int(codes.max(initial=0)).bit_length() - 8)
        sketch = (codes >> np.uint64(shift)).astype(np.uint8)
        self.referenced_arrays.append(sketch)
        return int(sketch.__array_interface__["data"][0]), shift

    def _make_string_sketch(self, memory: np.ndarray, width: int, rows: int) -> tuple[int, int]:
        """Make a sketch, in which the byte of a row is the number of bounds that are not greater than its code.

        The 127 bounds are the codes, repeated or cut.

        Returns:
            The address of the bytes, which follow the bounds, and 0, because a sketch of texts has no shift.
        """
        codes = memory[: width * rows].view(f"<u{width}").astype(np.uint64)
        bounds = np.sort(np.resize(codes, 127))
        sketch = np.concatenate((bounds.view(np.uint8), np.searchsorted(bounds, codes, "right").astype(np.uint8)))
        built_sketch = _scan.sketch_strings(int(memory.__array_interface__["data"][0]), width, rows, bounds)
        assert built_sketch is None or built_sketch.tolist() == sketch.tolist()
        self.referenced_arrays.append(sketch)
        return int(sketch.__array_interface__["data"][0]) + bounds.nbytes, 0

    def narrow(self, op: int, key: int | float | bytes, state: np.ndarray, mask: np.ndarray, *, uuid: bool) -> None:
        """Remove rows that cannot match the comparison `op` with `key` from the selection, in place.

        Args:
            op: The number of the operator, a key of OPS.
            key: The literal, as packed columns store it.
            state: The selection of each block: no row, all rows, or the rows of the mask. It is changed.
            mask: 1 for each selected row, where the state of its block refers to the mask. It is changed.
            uuid: Whether the values are UUIDs, which are compared in two orders.
        """
        if self.form is Form.STRINGS:
            assert isinstance(key, bytes)
            if uuid:
                _scan.narrow_uuids(self.layout, self.low, self.high, state, mask, op, key)
            else:
                _scan.narrow_all([(self.layout, self.low, self.high, op, key)], self.layout, state, mask)
        elif self.form is Form.FLOATS:
            _scan.narrow_all([(self.layout, self.low, self.high, op, float(key))], self.layout, state, mask)
        else:
            assert not isinstance(key, bytes)
            _scan.narrow_all([(self.layout, self.low, self.high, op, int(key))], self.layout, state, mask)


def _encode_span_row(packed_span: Packed, address: int, rows: int, first_row: int) -> tuple[int, ...]:
    """Return the layout of a block (`LAYOUT_COLUMNS`). The last two columns are 0: there is no sketch."""

    def to_address(offset: int) -> int:
        return 0 if offset == NONE else address + offset

    return (
        packed_span.form,
        packed_span.width,
        to_address(packed_span.codes),
        to_address(packed_span.presence),
        rows,
        first_row,
        packed_span.base,
        to_address(packed_span.common_at),
        len(packed_span.common),
        to_address(packed_span.lengths),
        to_address(packed_span.ends),
        to_address(packed_span.tails),
        packed_span.lengths_width,
        0,
        0,
    )


def select_rows(state: np.ndarray, mask: np.ndarray, blocks: Sequence[Sequence[object]]) -> list[bool]:
    selected_flags: list[bool] = []
    for number, values in enumerate(blocks):
        first_row = len(selected_flags)
        selected_flags += [
            bool(state[number] == ALL_ROWS or (state[number] == ROWS_OF_MASK and mask[row]))
            for row in range(first_row, first_row + len(values))
        ]
    return selected_flags


def draw_similar_blocks(kind: str) -> st.SearchStrategy[Blocks]:
    """Return blocks whose values are often equal or close, so that equal values and constant blocks are common.

    Some blocks repeat their rows until they have more rows than kernels process at a time.
    """
    pool = st.lists(VALUES[kind], min_size=1, max_size=6)
    times = st.sampled_from([1, 1, 7])
    return pool.flatmap(
        lambda values: st.lists(
            st.builds(
                list.__mul__,
                st.lists(st.one_of(st.none(), st.sampled_from(values), VALUES[kind]), min_size=1, max_size=25),
                times,
            ),
            min_size=1,
            max_size=4,
        )
    )


@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind != "uuid"])
@settings(max_examples=examples(50))
@given(data=st.data())
def test_comparison_keeps_matching_and_absent_values(kind: str, data: st.DataObject) -> None:
    blocks = data.draw(draw_similar_blocks(kind))
    op = data.draw(st.sampled_from(sorted(OPS)))
    flat_values = [value for values in blocks for value in values if value is not None]
    literal = data.draw(st.one_of(VALUES[kind], *([st.sampled_from(flat_values)] if flat_values else [])))
    # Absent values are below all values for `<=` and `<`, and otherwise above them, so each comparison keeps them.
    # Sketches, with one byte for each row, must not change the result.
    sides = ScanColumns(kind, blocks, absent_low=op in (LT_EQ, LT), sketched=data.draw(st.booleans()))
    key = encode_key(sides.form, kind, literal)
    # No value is above the greatest key or below the least, so these comparisons are left out.
    assume((op, key) not in ((GT, 2**63 - 1), (LT, -(2**63))))
    rows = sum(map(len, blocks))
    pattern = data.draw(st.lists(st.booleans(), min_size=1, max_size=100))
    old_mask = np.resize(np.array(pattern, dtype=np.uint8), rows)
    state = np.array(
        data.draw(
            st.lists(st.sampled_from([NO_ROW, ALL_ROWS, ROWS_OF_MASK]), min_size=len(blocks), max_size=len(blocks))
        ),
        np.uint8,
    )
    mask = old_mask.copy()
    rows_before = select_rows(state, mask, blocks)
    sides.narrow(op, key, state, mask, uuid=False)
    expected = [
        state_before and (value is None or OPS[op](encode_key(sides.form, kind, value), key))
        for state_before, value in zip(rows_before, [value for values in blocks for value in values], strict=True)
    ]
    rows_after = select_rows(state, mask, blocks)
    for number, values in enumerate(blocks):
        if all(value is None for value in values):
            first_row = sum(map(len, blocks[:number]))
            assert rows_after[first_row : first_row + len(values)] == rows_before[first_row : first_row + len(values)]
    assert rows_after == expected


@pytest.mark.parametrize("round_number", mark_fast(range(40), 5))
def test_comparison_with_a_sketch_keeps_matching_values(round_number: int) -> None:
    rng = np.random.default_rng(first_seed() * 1000 + round_number)
    dtype = (np.uint32, np.uint64)[round_number % 2]
    rows = int(rng.choice([30, 700, 3000]))
    # A sketch has the 8 highest bits of each code, relative to the largest code. With a small span, the codes are their
    # own sketch. With `greatest`, all other codes of a small span have the byte 0.
    span = 2 ** int(rng.integers(1, 8 * np.dtype(dtype).itemsize))
    greatest = min(np.iinfo(dtype).max, 2**63 - 1)
    codes = rng.integers(0, span, rows, dtype=dtype)
    if rng.random() < 0.5:
        codes[rng.integers(0, rows)] = greatest
    if rng.random() < 0.3:
        codes = np.sort(codes)
    code_sketch = _scan.sketch(int(codes.__array_interface__["data"][0]), codes.itemsize, rows)
    shift = max(0, int(codes.max()).bit_length() - 8)
    largest_group = max(Counter(int(code) >> shift for code in codes.tolist()).values())
    # No sketch is made if more than a 64th of the rows have the same byte, because it would leave the result open for
    # too many rows.
    assert (code_sketch is None) == (64 * largest_group > rows)
    sketch = (codes >> dtype(shift)).astype(np.uint8)
    if code_sketch is not None:
        sketch, shift = code_sketch
    assert sketch.tolist() == [int(code) >> shift for code in codes.tolist()]
    assert int(codes.max()) >> shift < 256
    addresses = [int(array.__array_interface__["data"][0]) for array in (codes, sketch)]
    layout = np.zeros((1, LAYOUT_COLUMNS), dtype=np.int64)
    # These columns are the form, the width and the address of the codes, the rows, the sketch and its shift.
    layout[0, [0, 1, 2, 4, 13, 14]] = 0, codes.itemsize, addresses[0], rows, addresses[1], shift
    summary = codes.min(keepdims=True).astype(np.int64), codes.max(keepdims=True).astype(np.int64)
    literals = [*rng.choice(codes, 4).tolist(), *rng.integers(0, 2**40, 3).tolist(), span - 1, span]
    for literal in {min(int(literal), 2**63 - 1) for literal in literals}:
        for op, passes in OPS.items():
            old_mask = rng.integers(0, 2, rows, dtype=np.uint8)
            for state_before in (ALL_ROWS, ROWS_OF_MASK):
                state, mask = np.array([state_before], dtype=np.uint8), old_mask.copy()
                _scan.narrow_all([(layout, *summary, op, literal)], layout, state, mask)
                expected = [
                    passes(code, literal) and (state_before == ALL_ROWS or was_selected == 1)
                    for code, was_selected in zip(codes.tolist(), old_mask.tolist(), strict=True)
                ]
                assert select_rows(state, mask, [expected]) == expected, (literal, op, state_before)


@settings(max_examples=examples(100))
@given(data=st.data())
def test_uuids_are_kept_when_either_order_allows_them(data: st.DataObject) -> None:
    near_values = st.tuples(
        st.sampled_from([b"\x00", b"\x7f", b"\x80", b"\xff"]), st.binary(min_size=15, max_size=15)
    ).map(b"".join)
    pool = data.draw(st.lists(near_values, min_size=1, max_size=4))
    value = st.one_of(st.sampled_from(pool), near_values, st.sampled_from(pool).map(lambda b: b[:8] + b"\x80" + b[9:]))
    blocks: Blocks = data.draw(
        st.lists(st.lists(st.one_of(st.none(), value), min_size=1, max_size=12), min_size=1, max_size=3)
    )
    op, literal = data.draw(st.sampled_from(sorted(OPS))), data.draw(value)
    sides = ScanColumns("uuid", blocks, absent_low=op in (LT_EQ, LT))
    state = np.ones(len(blocks), dtype=np.uint8)
    mask = np.empty(sides.rows, dtype=np.uint8)
    sides.narrow(op, literal, state, mask, uuid=True)

    def split_halves(data: bytes) -> tuple[int, int]:
        return int.from_bytes(data[:8], "big", signed=True), int.from_bytes(data[8:], "big", signed=True)

    rows_after = select_rows(state, mask, blocks)
    for row, held_value in enumerate(value for values in blocks for value in values):
        if held_value is None:
            assert rows_after[row]
        else:
            assert isinstance(held_value, bytes)
            if OPS[op](held_value, literal) or OPS[op](split_halves(held_value), split_halves(literal)):
                assert rows_after[row]


@settings(max_examples=examples(80))
@given(data=st.data())
def test_row_is_kept_when_a_list_member_is_between_its_bounds(data: st.DataObject) -> None:
    number = st.integers(-50, 50)
    bound = st.one_of(st.none(), number)
    pairs = st.tuples(bound, bound).map(
        lambda pair: pair if None in pair else (min(pair), max(pair))  # type: ignore[type-var]
    )
    blocks = data.draw(st.lists(st.lists(pairs, min_size=1, max_size=20), min_size=1, max_size=4))
    lower = ScanColumns("long", [[low for low, _ in values] for values in blocks], absent_low=True)
    upper = ScanColumns("long", [[high for _, high in values] for values in blocks], absent_low=False)
    members = sorted(set(data.draw(st.lists(number, min_size=1, max_size=8))))
    state, mask = np.ones(len(blocks), dtype=np.uint8), np.empty(lower.rows, dtype=np.uint8)
    _scan.narrow_longs_in(
        lower.layout, upper.layout, lower.low, upper.high, state, mask, np.array(members, dtype=np.int64)
    )
    rows_after = select_rows(state, mask, blocks)
    row = 0
    for block_number, values in enumerate(blocks):
        # A negative form, in column 0, means that the block has no values.
        is_unknown = lower.layout[block_number, 0] < 0 or upper.layout[block_number, 0] < 0
        for low, high in values:
            assert rows_after[row] == (
                is_unknown
                or any((low is None or low <= member) and (high is None or member <= high) for member in members)
            )
            row += 1


ROWS = st.builds(list.__mul__, st.lists(st.booleans(), min_size=1, max_size=30), st.sampled_from([1, 2, 9]))


@given(st.lists(st.tuples(st.sampled_from([NO_ROW, ALL_ROWS, ROWS_OF_MASK]), ROWS), max_size=6))
def test_collected_rows_are_the_selected_rows(blocks: list[tuple[int, list[bool]]]) -> None:
    extents = np.zeros((len(blocks), LAYOUT_COLUMNS), dtype=np.int64)
    first_row = 0
    for number, (_, rows) in enumerate(blocks):
        extents[number, 4:7] = len(rows), first_row, first_row  # The rows, the first row, and the id of the first row.
        first_row += len(rows)
    state = np.array([state for state, _ in blocks], dtype=np.uint8)
    mask = np.array([row for _, rows in blocks for row in rows], dtype=np.uint8)
    expected = [
        row for row, is_selected in enumerate(select_rows(state, mask, [rows for _, rows in blocks])) if is_selected
    ]
    assert _scan.collect(extents, state, mask).tolist() == expected
    assert _scan.count(extents, state, mask) == len(expected)
