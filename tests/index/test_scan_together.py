"""Tests that comparisons made together, block by block, keep the same rows as single ones, also with sketches
of floats.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from seamark.formats.index.kernels import _scan
from tests.index.test_scan import ALL_ROWS, LAYOUT_COLUMNS, LT, OPS, ROWS_OF_MASK, select_rows
from tests.seeds import first_seed, mark_fast

SHAPES = ("spread", "near", "equal", "outlier", "infinite", "absent", "zeros", "tiny", "huge")

FLOAT_SKETCH_HEADER_BYTES = 16
"""A sketch of floats begins with the least value and the scale, two doubles. One byte for each row follows."""


def get_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def draw_floats(shape: str, rows: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    values = rng.uniform(-1000, 1000, rows)
    if shape == "near":
        values = 1e3 + rng.integers(0, 300, rows) / 1024  # Close to each other, and exact in 32-bit floats.
    elif shape == "equal":
        values[:] = 7.5
    elif shape == "outlier":
        values[0] = 1e30
    elif shape == "infinite":
        values[0] = math.inf
    elif shape == "absent":
        values[rng.integers(0, rows)] = math.nan  # NaN is an absent value.
    elif shape == "zeros":
        values = rng.choice([0.0, -0.0, 1.0, -1.0, 0.5], rows)
    elif shape == "tiny":
        values = rng.integers(-200, 200, rows) * 5e-324  # The least positive double.
    elif shape == "huge":
        values = rng.uniform(-1, 1, rows) * 1.7e308
    return values


def is_passing(op: int, value: float, literal: float) -> bool:
    """Return whether the value meets the comparison. NaN, which represents an absent value, always does."""
    return math.isnan(value) or bool(OPS[op](value, literal))


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_comparison_with_a_sketch_of_floats_keeps_matching_values(shape: str, dtype: type[Any]) -> None:
    rng = np.random.default_rng((first_seed(), SHAPES.index(shape)))
    with np.errstate(over="ignore"):
        codes = draw_floats(shape, 1200, rng).astype(dtype)
    built_sketch = _scan.sketch_floats(get_address(codes), codes.itemsize, len(codes))
    are_finite = bool(np.isfinite(codes).all())
    assert built_sketch is not None or shape not in ("spread", "near")
    assert built_sketch is None or are_finite
    if built_sketch is not None:
        sketch_bytes = built_sketch[FLOAT_SKETCH_HEADER_BYTES:].tolist()
        # A sketch is only made if no byte represents more than a 64th of the values.
        assert 64 * max(Counter(sketch_bytes).values()) <= len(codes)
        sketch_bytes_in_order = [
            sketch_byte for _, sketch_byte in sorted(zip(codes.tolist(), sketch_bytes, strict=True))
        ]
        assert sketch_bytes_in_order == sorted(sketch_bytes_in_order)
    numbers = codes[~np.isnan(codes)].astype(np.float64)
    layout = np.zeros((1, LAYOUT_COLUMNS), dtype=np.int64)
    # These columns are the form, the width and the address of the codes, and the row count.
    layout[0, [0, 1, 2, 4]] = 1, codes.itemsize, get_address(codes), len(codes)
    # Column 3 is 0 if no value is absent. Column 13 is the address of the sketch, or 0.
    layout[0, 3] = 0 if len(numbers) == len(codes) else 1
    layout[0, 13] = 0 if built_sketch is None else get_address(built_sketch) + FLOAT_SKETCH_HEADER_BYTES
    summary = np.array([numbers.min()]), np.array([numbers.max()])
    literals = [*rng.choice(numbers, 3).tolist(), 0.0, -0.0, 1e-320, math.inf, -math.inf, float(numbers.max()), 0.3]
    values = codes.astype(np.float64).tolist()
    for literal in literals:
        for op in OPS:
            old_mask = rng.integers(0, 2, len(codes), dtype=np.uint8)
            for state_before in (ALL_ROWS, ROWS_OF_MASK):
                state, mask = np.array([state_before], dtype=np.uint8), old_mask.copy()
                _scan.narrow_all([(layout, *summary, op, float(literal))], layout, state, mask)
                expected = [
                    is_passing(op, value, literal) and (state_before == ALL_ROWS or was_selected == 1)
                    for value, was_selected in zip(values, old_mask.tolist(), strict=True)
                ]
                assert select_rows(state, mask, [values]) == expected, (literal, op, state_before)


def build_sketch(codes: np.ndarray[Any, Any]) -> tuple[int, int, object]:
    """Make a sketch, which has one byte for each row. This byte decides most comparisons without the code of the row.

    The compiled function makes no sketch of some floats. For integers, this function always makes one.

    Returns:
        The address of the bytes, the shift of the codes, and the owner of the memory. For some floats, (0, 0, None).
    """
    if codes.dtype.kind == "f":
        built_sketch = _scan.sketch_floats(get_address(codes), codes.itemsize, len(codes))
        return (
            (0, 0, None)
            if built_sketch is None
            else (get_address(built_sketch) + FLOAT_SKETCH_HEADER_BYTES, 0, built_sketch)
        )
    shift = max(0, int(codes.max(initial=0)).bit_length() - 8)
    sketch = (codes >> np.uint64(shift)).astype(np.uint8)
    return get_address(sketch), shift, sketch


@pytest.mark.parametrize("round_number", mark_fast(range(60), 8))
def test_combined_comparisons_keep_the_rows_that_each_comparison_keeps(round_number: int) -> None:
    """The compiled functions get up to six comparisons at once, and a state for each block.

    The states are 0 (no row), 1 (all rows) and 2 (the rows in the mask).
    """
    rng = np.random.default_rng(first_seed() * 1000 + round_number)
    sizes = rng.integers(0, int(rng.choice([70, 300, 3000])), int(rng.integers(1, 6))).tolist()
    starts = np.concatenate(([0], np.cumsum(sizes)))[:-1]
    extents = np.zeros((len(sizes), LAYOUT_COLUMNS), dtype=np.int64)
    for number, rows in enumerate(sizes):
        # The columns 4 to 6 are the row count, the first row, and the id of the first row.
        extents[number, 4:7] = rows, starts[number], number << 32
    comparisons, referenced_arrays, truths = [], [], []
    for _ in range(int(rng.integers(0, 7))):
        is_real, op = bool(rng.integers(0, 2)), int(rng.integers(0, 4))
        dtype = np.dtype(rng.choice(["f4", "f8"] if is_real else ["u1", "u2", "u4", "u8"]))
        # Many or few codes have the literal's byte in a sketch, and many or few codes equal the literal.
        span = int(rng.choice([100, 100, 200, 10_000] if dtype.itemsize > 1 else [100]))
        base = 0 if is_real else int(rng.integers(-50, 50))
        layout = extents.copy()
        low, high = (np.zeros(len(sizes), dtype=np.float64 if is_real else np.int64) for _ in range(2))
        literal = float(rng.integers(0, span)) if is_real else base + int(rng.integers(0, span))
        for number, rows in enumerate(sizes):
            smallest_code = int(rng.choice([0, 0, 0, 90]))
            codes = (rng.integers(0, span, rows) + smallest_code).astype(dtype)
            has_values = rng.random() < 0.8 and rows > 0
            # The column's layout has no row ids, and its base is the number that is added to the codes.
            layout[number, [0, 1, 2, 6]] = int(is_real) if has_values else -1, dtype.itemsize, get_address(codes), base
            if has_values:
                low[number], high[number] = base + codes.min().item(), base + codes.max().item()
            if has_values and dtype.itemsize > 3 and rng.random() < 0.7:
                # The last two columns are the address and the shift of the sketch.
                *layout[number, 13:15], owner = build_sketch(codes)
                referenced_arrays.append(owner)
            referenced_arrays.append(codes)
            truths += [not has_values or bool(OPS[op](base + code, literal)) for code in codes.tolist()]
        comparisons.append((layout, low, high, op, literal))
    rows = sum(sizes)
    all_match = (
        np.array(truths, dtype=bool).reshape(len(comparisons), rows).all(axis=0) if comparisons else np.ones(rows)
    )
    ids = [(number << 32) + row for number, size in enumerate(sizes) for row in range(size)]
    old_mask = (rng.random(rows) < rng.choice([0.02, 0.5, 1.0])).astype(np.uint8)
    for state_count in (2, 3):  # Without and with blocks whose rows the mask selects.
        block_states = rng.integers(0, state_count, len(sizes)).astype(np.uint8)
        were_kept = [
            block_states[row_id >> 32] == ALL_ROWS or bool(block_states[row_id >> 32] and is_in_mask)
            for row_id, is_in_mask in zip(ids, old_mask, strict=True)
        ]
        expected = [
            row_id
            for row_id, keeps, state_before in zip(ids, all_match.tolist(), were_kept, strict=True)
            if keeps and state_before
        ]
        if state_count == 2:
            assert _scan.collect_all(comparisons, extents, block_states).tolist() == expected
        state, mask = block_states.copy(), old_mask.copy()
        assert _scan.collect_all(comparisons, extents, state, mask).tolist() == expected
        assert (state == block_states).all()
        assert (mask == old_mask).all()
        _scan.narrow_all(comparisons, extents, state, mask)
        assert _scan.collect(extents, state, mask).tolist() == expected
        assert _scan.collect_all([], extents, state, mask).tolist() == expected
        assert _scan.count(extents, state, mask) == len(expected)


def test_list_of_rows_needs_memory_only_for_its_rows() -> None:
    rows = 200_000
    codes = np.arange(rows, dtype=np.uint32)
    layout = np.zeros((1, LAYOUT_COLUMNS), dtype=np.int64)
    # These columns are the form, the width and the address of the codes, and the row count.
    layout[0, [0, 1, 2, 4]] = 0, 4, get_address(codes), rows
    low, high = np.array([0], dtype=np.int64), np.array([rows - 1], dtype=np.int64)
    # The counts are also just below and at the limit of a number of two bytes, 65,536.
    for kept_count in (1, 1000, 65_535, 65_536, 150_000, rows):
        all_results = _scan.collect_all([(layout, low, high, LT, kept_count)], layout, np.ones(1, dtype=np.uint8))
        assert all_results.nbytes == 8 * kept_count
        assert all_results.tolist() == list(range(kept_count))
