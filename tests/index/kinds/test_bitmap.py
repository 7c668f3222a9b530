"""Tests of the bitmap index against plain Python, row by row: all types, forms of columns and predicates, and
merges.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import KeyRange, KeyRanges, unpack_bits
from seamark.formats.index.kinds import bitmap, postings
from seamark.formats.index.kinds.bitmap import Bitmap, FileBitmap
from seamark.formats.index.kinds.slices import EQUALITY, SLICES, compute_slice_count
from tests.index.kinds.columns import KINDS, LONG_TEXT, Kind, draw_column, draw_predicate, get_type_name
from tests.seeds import mark_fast

ROWS = (0, 1, 2, 63, 64, 65, 127, 200, 700)


def build_file(kind: Kind, values: Sequence[Any]) -> FileBitmap:
    return bitmap.build_bitmap(convert_to_keys(kind.arrow(values), get_type_name(kind)))


def open_bitmap(entries: Sequence[FileBitmap]) -> Bitmap:
    return Bitmap(memoryview(b"".join(bitmap.encode_bitmaps(entries))))


def build_from_longs(values: Sequence[int | None] | np.ndarray[Any, Any]) -> FileBitmap:
    return bitmap.build_bitmap(convert_to_keys(pa.array(values, pa.int64()), "long"))


def encode_long(value: int) -> int:
    return value + (1 << 63)


def build_ranges(*values: int) -> KeyRanges:
    return KeyRanges("long", tuple(KeyRange(key, key) for key in sorted(map(encode_long, set(values)))))


def make_range(low: int | None, high: int | None) -> KeyRanges:
    return KeyRanges(
        "long", (KeyRange(low if low is None else encode_long(low), high if high is None else encode_long(high)),)
    )


def find_rows(index: Bitmap, file: int, ranges: KeyRanges, rows: int) -> list[int]:
    return np.flatnonzero(unpack_bits(index.find_rows(file, ranges), rows)).tolist()


def check_predicates(
    index: Bitmap, kind: Kind, columns: Sequence[Sequence[Any]], rng: random.Random, times: int
) -> None:
    """Compare random predicates with a row-by-row evaluation. An inexact predicate may find additional rows."""
    for _ in range(times):
        predicate = draw_predicate(rng, kind, rng.choice(columns) if columns else [])
        ranges = predicate.build_ranges()
        flags = index.mark_files(ranges).tolist()
        assert len(flags) == len(columns)
        for number, values in enumerate(columns):
            expected = [row for row, value in enumerate(values) if predicate.holds(value)]
            rows = find_rows(index, number, ranges, len(values))
            if index.is_exact_for(ranges):
                assert (rows, flags[number]) == (expected, int(bool(expected)))
            else:
                assert set(expected) <= set(rows)
                assert flags[number] >= bool(rows)


@pytest.fixture(params=["small", "large"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the layout of small indexes, or force that of large indexes by limits which no index meets.

    A small index stores which files have a key. A large index stores only the least and the greatest key of each file.
    """
    if request.param == "large":
        monkeypatch.setattr(postings, "SMALL_INDEX_MAX_BYTES", -1)
        monkeypatch.setattr(postings, "SHARED_MAX_FRACTION", -1)
        monkeypatch.setattr(postings, "UNSHARED_MAX_FRACTION", -1)
    return str(request.param)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", mark_fast(range(6), 1))
def test_bitmap_index_finds_the_rows_of_a_row_by_row_evaluation(kind: Kind, seed: int, layout: str) -> None:
    rng = random.Random(f"{kind.name} {seed}")
    pool = [kind.draw(rng) for _ in range(40)] if seed % 2 else None
    columns = [draw_column(rng, kind, rng.choice(ROWS), pool) for _ in range(rng.choice([1, 3, 9]))]
    index = open_bitmap([build_file(kind, values) for values in columns])
    index.verify()
    check_predicates(index, kind, columns, rng, 12)


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_merge_equals_an_index_built_from_the_kept_files(kind: Kind, layout: str) -> None:
    rng = random.Random(kind.name)
    pool = [kind.draw(rng) for _ in range(30)]
    parts, kept_entries, columns = [], [], []
    for _ in range(3):
        drawn_columns = [draw_column(rng, kind, rng.choice(ROWS), pool) for _ in range(5)]
        entries = [build_file(kind, values) for values in drawn_columns]
        keep = np.array([rng.random() < 0.6 for _ in drawn_columns])
        parts.append((open_bitmap(entries), keep))
        kept_entries += [entry for entry, is_kept in zip(entries, keep, strict=True) if is_kept]
        columns += [column for column, is_kept in zip(drawn_columns, keep, strict=True) if is_kept]
    merged_blob = b"".join(bitmap.merge_bitmaps(parts))
    assert merged_blob == b"".join(bitmap.encode_bitmaps(kept_entries))
    check_predicates(Bitmap(memoryview(merged_blob)), kind, columns, rng, 10)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("files", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("shared", [True, False], ids=["shared values", "own values"])
def test_files_with_matching_rows_are_found_for_any_number_of_files(files: int, shared: bool, layout: str) -> None:
    rng = random.Random(files)
    columns = [
        [rng.randrange(50) if shared else number * 7 + rng.randrange(9) for _ in range(5)] for number in range(files)
    ]
    index = open_bitmap([build_from_longs(values) for values in columns])
    for _ in range(60):
        low = rng.randrange(-5, 7 * files + 60)
        for ranges, expected in (
            (build_ranges(low), lambda v, low=low: v == low),
            (make_range(low, low + 20), lambda v, low=low: low <= v <= low + 20),
            (make_range(None, low), lambda v, low=low: v <= low),
            (build_ranges(low, low + 3, low + 90), lambda v, low=low: v in (low, low + 3, low + 90)),
        ):
            assert index.mark_files(ranges).tolist() == [int(any(map(expected, values))) for values in columns]


def test_shared_keys_are_stored_once_and_other_keys_with_their_file() -> None:
    rng = np.random.default_rng(1)
    shared_keys = [build_from_longs(rng.integers(0, 1000, 20_000)) for _ in range(20)]
    unshared_keys = [build_from_longs(rng.integers(-(1 << 62), 1 << 62, 20_000)) for _ in range(20)]
    sizes = {}
    for name, entries in (("shared", shared_keys), ("alone", unshared_keys)):
        sections = sum(entry.size_bytes for entry in entries)
        sizes[name] = (sum(map(len, bitmap.encode_bitmaps(entries))) - sections) / sections
    assert sizes["shared"] < 0.05
    assert sizes["alone"] < 0.01


def test_file_has_as_many_slices_as_its_ranks_have_bits() -> None:
    """A rank is the position of a row's value among the distinct values.

    A slice is a bitmap with one bit of each rank.
    """
    assert [compute_slice_count(n) for n in (0, 1, 2, 3, 4, 5, 11, 1000, 1 << 20, (1 << 20) + 1)] == [
        0, 0, 1, 2, 2, 3, 4, 10, 20, 21,
    ]  # fmt: skip
    rng = np.random.default_rng(2)
    section = open_bitmap([build_from_longs(rng.integers(0, 1000, 100_000))]).open_section(0)
    assert section.layout == SLICES
    slice_bytes = 8 * -(-100_000 // 64)  # A slice has a word of 8 bytes for 64 rows.
    assert section.bitmaps_bytes <= 10 * slice_bytes  # The ranks of 1,000 values have 10 bits.


def test_rare_values_are_stored_by_value_when_that_is_smaller() -> None:
    rng = np.random.default_rng(3)
    values = np.where(rng.random(300_000) < 0.01, rng.integers(1, 30, 300_000), 0)
    index = open_bitmap([build_from_longs(values)])
    assert index.open_section(0).layout == EQUALITY
    # About 3,000 rows (1 %) have a rare value. The bitmaps of the values need less than 5 bytes for each such row.
    assert index.open_section(0).bitmaps_bytes < 5 * 3000
    for wanted_values in ({3}, {0}, {3, 4}, set(range(1, 29)), set(range(30)) - {7}):
        expected = np.flatnonzero(np.isin(values, list(wanted_values))).tolist()
        assert find_rows(index, 0, build_ranges(*wanted_values), len(values)) == expected


@pytest.mark.parametrize("bounds", [1, 60, 127, 128, 129, 2000])
def test_in_lists_of_any_length_find_the_same_rows(bounds: int) -> None:
    rng = np.random.default_rng(bounds)
    values = rng.integers(0, 5000, 10_007)
    index = open_bitmap([build_from_longs(values)])
    wanted_values = rng.choice(5000, bounds, replace=False)
    expected = np.flatnonzero(np.isin(values, wanted_values)).tolist()
    assert find_rows(index, 0, build_ranges(*wanted_values.tolist()), len(values)) == expected


@pytest.mark.parametrize(
    "values",
    [
        np.arange(70_000),
        np.arange(70_000)[::-1],
        np.arange(70_000) * 1_000_000_007 % (1 << 61),
        np.random.default_rng(4).integers(-(1 << 63), (1 << 63) - 1, 70_000),
        np.random.default_rng(5).integers(0, 100, 70_000) * (1 << 55),
        np.random.default_rng(6).permutation(70_000),
        np.full(70_000, -(1 << 63)),
        np.array([-(1 << 63), (1 << 63) - 1] * 35_000),
    ],
    ids=["ascending", "descending", "spread", "random", "few and far", "dense", "constant", "extremes"],
)
def test_every_method_to_rank_keys_finds_the_same_rows(values: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    index = open_bitmap([build_from_longs(values)])
    distinct_values = np.unique(values)
    assert index.open_section(0).cardinality == len(distinct_values)
    for position in np.random.default_rng(7).integers(0, len(distinct_values), 20):
        value = int(distinct_values[position])
        assert find_rows(index, 0, build_ranges(value), len(values)) == np.flatnonzero(values == value).tolist()
        assert find_rows(index, 0, make_range(None, value), len(values)) == np.flatnonzero(values <= value).tolist()


def test_only_bounds_longer_than_a_kibibyte_are_inexact() -> None:
    stem = LONG_TEXT + "a"  # 1,024 bytes
    values = ["short", stem, stem + "1", stem + "2", LONG_TEXT + "b", None]
    index = open_bitmap([bitmap.build_bitmap(convert_to_keys(pa.array(values), "string"))])
    for text, rows, is_exact in (
        ("short", [0], True),
        (stem, [1], True),
        (LONG_TEXT + "b", [4], True),
        (stem + "1", [2], True),
        (stem + "12", [2], False),
        (stem + "22", [3], False),
        (stem + "33", [], False),
    ):
        ranges = KeyRanges("string", (KeyRange(text.encode(), text.encode()),))
        # Only the first 1,025 bytes of a text are compared. A text of this length may be the start of a longer one.
        assert index.is_exact_for(ranges) is is_exact or len(text) == 1025
        actual_rows = find_rows(index, 0, ranges, len(values))
        assert set(rows) - set(actual_rows) == set() if not is_exact else actual_rows == rows


def test_prefix_predicates_are_ranges() -> None:
    values = ["Customer#1", "Customer#12", "Customer#2", "Supplier#1", None, "Cust"] * 30
    index = open_bitmap([bitmap.build_bitmap(convert_to_keys(pa.array(values), "string"))] * 3)
    ranges = KeyRanges("string", (KeyRange(b"Customer#1", b"Customer#2", False, True),))
    expected = [row for row, value in enumerate(values) if value and value.startswith("Customer#1")]
    assert find_rows(index, 1, ranges, len(values)) == expected
    assert index.mark_files(ranges).tolist() == [1, 1, 1]


def test_index_of_no_files_is_valid() -> None:
    index = open_bitmap([])
    assert index.files == 0
    assert index.mark_files(build_ranges(1)).tolist() == []
    assert b"".join(bitmap.merge_bitmaps([])) == b"".join(bitmap.encode_bitmaps([]))


def test_built_index_can_be_sent_to_another_process() -> None:
    index = build_from_longs([1, None, 3])
    assert pickle.loads(pickle.dumps(index)) == index


def test_probe_with_keys_of_another_form_is_rejected() -> None:
    index = open_bitmap([build_from_longs([1, 2])])
    with pytest.raises(ValueError, match="form codes, so keys of type string cannot be looked up"):
        index.mark_files(KeyRanges("string", (KeyRange(b"1", None),)))
    with pytest.raises(ValueError, match="8 bytes for some files"):
        bitmap.encode_bitmaps([build_from_longs([1]), bitmap.build_bitmap(convert_to_keys(pa.array(["1"]), "string"))])


def test_file_mask_of_another_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="has 2 items, but the index has 1 files"):
        bitmap.merge_bitmaps([(open_bitmap([build_from_longs([1])]), np.array([True, False]))])


def test_section_is_sufficient_for_the_rows_of_a_file() -> None:
    index = open_bitmap([build_from_longs([5, 6, 7]), build_from_longs([7, 8, 9, 9])])
    start, length = index.find_section_range(1)
    changed_index = bytearray(index.memory)
    other_start, other_length = index.find_section_range(0)
    changed_index[other_start : other_start + other_length] = bytes(other_length)
    assert find_rows(Bitmap(memoryview(changed_index)), 1, build_ranges(9), 4) == [2, 3]
    assert start + length == len(index.memory)


def test_bitmap_format_equals_the_documented_format() -> None:
    """The test compares a hash over blobs of every kind.

    If the format changes, change its version and its documentation as well.
    """
    digest = hashlib.sha256()
    for kind in KINDS:
        rng = random.Random(kind.name)
        columns = [draw_column(rng, kind, rows) for rows in (0, 65, 700)]
        # The columns are so small that they are stored uncompressed, because zstd's bytes may differ between versions.
        for part in bitmap.encode_bitmaps([build_file(kind, values) for values in columns]):
            digest.update(part)
    assert digest.hexdigest() == "4fc724126dac58a7231181fabbb3053a32415987931e240c8d663e7e3da384cc"
