"""Tests of sets of many keys: their comparison with dictionaries, and the files and rows that bitmap indexes find.

Python's own sets over the values of each row are the oracle.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.kernels._rows import any_row
from seamark.formats.index.keys import key_set
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.key_set import KeySet, KeySpan
from seamark.formats.index.keys.keys import unpack_bits
from seamark.formats.index.keys.ranks import Distinct, rank_keys
from seamark.formats.index.kinds import bitmap
from tests.seeds import mark_fast


def build_key_set(values: list[Any], kind: str, arrow: pa.DataType) -> KeySet:
    return KeySet(kind, rank_keys(convert_to_keys(pa.array(values, arrow), kind))[0])


def open_bitmap(files: list[list[Any]], kind: str, arrow: pa.DataType) -> bitmap.Bitmap:
    entries = [bitmap.build_bitmap(convert_to_keys(pa.array(values, arrow), kind)) for values in files]
    return bitmap.Bitmap(memoryview(b"".join(bytes(part) for part in bitmap.encode_bitmaps(entries))))


def draw_values(rng: random.Random, text: bool, span: int, rows: int) -> list[Any]:
    null_share = rng.choice([0, 0, 0.1])
    values = [None if rng.random() < null_share else rng.randrange(span) - span // 2 for _ in range(rows)]
    return [None if value is None else f"v{value}" for value in values] if text else values


@pytest.mark.parametrize("seed", mark_fast(range(60), 6))
def test_bitmap_index_finds_files_and_rows_by_many_keys(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    # The set of keys has no bitmap, or a bitmap over a wide range.
    monkeypatch.setattr(key_set, "_TABLE_BITS_PER_KEY", rng.choice([0, 1 << 12]))
    is_text, span = rng.random() < 0.3, rng.choice([2, 40, 700, 10**9])
    kind, arrow = ("string", pa.string()) if is_text else ("long", pa.int64())
    files = [draw_values(rng, is_text, span, rng.choice([0, 1, 64, 500])) for _ in range(rng.choice([1, 9, 70]))]
    index = open_bitmap(files, kind, arrow)
    pool = [value for values in files for value in values if value is not None] + draw_values(rng, is_text, span, 5)
    wanted_keys = set(rng.sample(pool, rng.randint(0, min(len(pool), rng.choice([3, 60, 5000]))))) - {None}
    keys = build_key_set(sorted(wanted_keys), kind, arrow)
    assert index.mark_files_with_keys(keys).tolist() == [
        int(any(value in wanted_keys for value in values)) for values in files
    ]
    assert not index.has_only(keys) or all(value in wanted_keys for values in files for value in values)
    for number, values in enumerate(files):
        row_mask = unpack_bits(index.find_rows_with_keys(number, keys), len(values)).tolist()
        assert row_mask == [value in wanted_keys for value in values]
        presence = rng.choices([True, False], k=len(values))
        bits = convert_to_keys(pa.array([1 if item else None for item in presence], pa.int64()), "long").valid
        if bits is not None:
            row_mask = unpack_bits(index.find_rows_with_keys(number, keys, bits), len(values)).tolist()
            assert row_mask == [
                value in wanted_keys and is_present for value, is_present in zip(values, presence, strict=True)
            ]


@pytest.mark.few_cases(40)
@pytest.mark.parametrize("seed", range(150))
def test_row_with_a_key_in_every_column_is_found(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 63, 64, 65, 300, 3000])
    columns, matching_rows = [], [True] * rows
    # Each column is compared with a range of keys or with a set of keys.
    for _ in range(rng.choice([1, 2, 4])):
        span = rng.choice([70, 300, 2000])
        values = draw_values(rng, False, span, rows)
        index = open_bitmap([values], "long", pa.int64())
        if rng.random() < 0.4:
            low, width = rng.randrange(span) - span // 2, rng.choice([1, 5, span // 3])
            wanted_keys: set[int] = set(range(low, low + width))
            # The keys of longs are unsigned, so they are greater than the values by 2**63.
            keys: KeySet | KeySpan = KeySpan("long", low + (1 << 63), low + width - 1 + (1 << 63))
        else:
            wanted_keys = {rng.randrange(span) - span // 2 for _ in range(rng.choice([1, 8, span // 4, span // 2]))}
            keys = build_key_set(sorted(wanted_keys), "long", pa.int64())
        assert keys.bit_table is not None
        column = index.find_column(0, keys.bit_table)
        if column is None:  # Columns with few values have a bitmap for each value.
            continue
        columns.append(column)
        matching_rows = [
            is_match and value in wanted_keys for is_match, value in zip(matching_rows, values, strict=True)
        ]
    if not columns:
        return
    assert any_row(columns, rows, None) == any(matching_rows)
    candidate_rows = np.zeros(-(-rows // 64), dtype=np.uint64)
    assert not any_row(columns, rows, candidate_rows)
    for row in rng.sample(range(rows), min(rows, 20)):  # The only candidate is a random row.
        candidate_rows[:] = 0
        candidate_rows[row // 64] = np.uint64(1 << row % 64)
        assert any_row(columns, rows, candidate_rows) == matching_rows[row]


def test_incompatible_arguments_of_any_row_are_rejected() -> None:
    """In each case, one argument of the compiled function does not fit the others.

    For example, a mask is too short for 100 rows. A column is a tuple: its dictionary, the bitmaps of the rows' codes,
    the rows without a value, and the requested codes as a bitmap of `span` bits that begins at the code `low`.
    """
    index = open_bitmap([list(range(100))], "long", pa.int64())
    keys = build_key_set(list(range(0, 100, 3)), "long", pa.int64())
    assert keys.bit_table is not None
    column = index.find_column(0, keys.bit_table)
    assert column is not None
    dictionary, slices, absent, table, low, span = column
    assert table is not None
    for invalid_column, rows, candidate_rows in (
        (column, 99, None),
        (column, 100, np.zeros(1, dtype=np.uint64)),
        ((dictionary, slices, np.zeros(1, dtype=np.uint64), table, low, span), 100, None),
        ((dictionary, slices, absent, table[:0], low, span), 100, None),
        ((dictionary, slices, absent, table, low, 1000), 100, None),
    ):
        with pytest.raises(ValueError, match=r"words|rows|span"):
            any_row([invalid_column], rows, candidate_rows)
    with pytest.raises(ValueError, match="too many"):
        any_row([column] * 33, 100, None)  # The maximum is 32 columns.


def test_keys_converted_to_another_type_represent_the_same_values() -> None:
    """A conversion to a narrower type leaves out the values that the type cannot represent."""
    longs = build_key_set([-(2**40), -5, 7, 2**31 - 1, 2**31], "long", pa.int64())
    ints = longs.convert_to_kind("int")
    assert [ints.get_key(number) - (1 << 63) for number in range(len(ints))] == [-5, 7, 2**31 - 1]  # type: ignore[operator]
    assert ints.convert_to_kind("long").digest == build_key_set([-5, 7, 2**31 - 1], "long", pa.int64()).digest
    short_set = build_key_set([-3, 0, 12], "decimal(9, 2)", pa.decimal128(9, 2))
    wide_set = short_set.convert_to_kind("decimal(30, 2)")
    assert wide_set.digest == build_key_set([-3, 0, 12], "decimal(30, 2)", pa.decimal128(30, 2)).digest
    assert wide_set.convert_to_kind("decimal(9, 2)").digest == short_set.digest
    large_set = build_key_set([10**25, 4], "decimal(30, 2)", pa.decimal128(30, 2)).convert_to_kind("decimal(9, 2)")
    assert len(large_set) == 1
    assert (
        wide_set.convert_to_kind("decimal(20, 2)").digest
        == build_key_set([-3, 0, 12], "decimal(20, 2)", pa.decimal128(20, 2)).digest
    )


def test_digests_differ_by_type_and_by_every_key() -> None:
    keys = build_key_set([1, 2, 300], "long", pa.int64())
    assert keys.digest == build_key_set([300, 2, 1, 1], "long", pa.int64()).digest
    assert len({keys.digest, keys.convert_to_kind("int").digest, build_key_set([1, 2], "long", pa.int64()).digest}) == 3


def test_keys_too_long_to_be_distinguished_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot be distinguished"):
        KeySet("string", Distinct(None, np.array([0, 1025]), np.zeros(1025, dtype=np.uint8)))
