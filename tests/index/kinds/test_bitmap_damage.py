"""Tests that a damaged bitmap index gives an error or the right answer, after flips, cuts and swaps."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyroaring
import pytest

from seamark.formats.index.kernels import _ordered
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.keys import KeyRange, KeyRanges
from seamark.formats.index.keys.ranks import ROWS_MAX
from seamark.formats.index.kinds import bitmap, bits, postings, slices
from seamark.formats.index.kinds.bitmap import Bitmap
from seamark.formats.index.kinds.bits import Coding
from seamark.formats.index.kinds.dictionary import BYTES, CODES, Bounds
from seamark.formats.index.kinds.pieces import Piece, PiecesHeader, write_pieces
from seamark.formats.index.kinds.postings import EDGES, LISTS, MATRIX, Postings
from seamark.formats.index.kinds.slices import SLICES, Section

Answers = list[tuple[list[int], list[list[int]]]]


def draw_longs(rng: np.random.Generator) -> list[pa.Array]:
    columns = [
        rng.integers(0, 9, 200),
        np.sort(rng.integers(0, 300, 900)),
        np.where(rng.random(2000) < 0.01, 1, 0),
        np.full(70, 5),
    ]
    return [pa.array(values, pa.int64(), mask=rng.random(len(values)) < 0.1) for values in columns]


def draw_strings(rng: np.random.Generator) -> list[pa.Array]:
    return [pa.array([f"name {number % 97}" for number in rng.integers(0, 500, rows)]) for rows in (40, 300, 0)]


def build_ranges(kind: str) -> list[KeyRanges]:
    keys: Sequence[Any] = (
        [value + (1 << 63) for value in (0, 1, 5, 150, 400)]
        if kind == "long"
        else [b"name 1", b"name 3", b"name 50", b"name 77", b"z"]
    )
    points = tuple(KeyRange(key, key) for key in keys)
    return [
        KeyRanges(kind, points[1:2]),
        KeyRanges(kind, points, nulls=True),
        KeyRanges(kind, (KeyRange(keys[1], keys[3], True, True),)),
        KeyRanges(kind, (KeyRange(None, None),)),
    ]


def list_answers(blob: bytes | bytearray, kind: str) -> Answers:
    index = Bitmap(memoryview(blob))
    return [
        (index.mark_files(ranges).tolist(), [index.find_rows(file, ranges).tolist() for file in range(index.files)])
        for ranges in build_ranges(kind)
    ]


@pytest.fixture(params=["long", "string", "long large", "string large"])
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, str]:
    """Return an index and its key type.

    `large` forces the layout of large indexes by limits that no index meets. This layout has the least and the greatest
    key of each file, and not the files of each key.
    """
    kind, _, size = str(request.param).partition(" ")
    if size == "large":
        monkeypatch.setattr(postings, "SMALL_INDEX_MAX_BYTES", -1)
        monkeypatch.setattr(postings, "SHARED_MAX_FRACTION", -1)
        monkeypatch.setattr(postings, "UNSHARED_MAX_FRACTION", -1)
    rng = np.random.default_rng(11)
    arrays = draw_longs(rng) if kind == "long" else draw_strings(rng)
    return b"".join(
        bitmap.encode_bitmaps([bitmap.build_bitmap(convert_to_keys(array, kind)) for array in arrays])
    ), kind


@pytest.mark.few_cases(1)
def test_flipped_byte_is_detected_or_harmless(case: tuple[bytes, str]) -> None:
    blob, kind = case
    expected_answers = list_answers(blob, kind)
    detected_count = 0
    for offset in range(len(blob)):
        damaged_bytes = bytearray(blob)
        damaged_bytes[offset] ^= 1 << (offset * 7 % 8)
        try:
            assert list_answers(damaged_bytes, kind) == expected_answers, f"byte {offset} of {len(blob)}"
        except ValueError:
            detected_count += 1
    assert detected_count > 0.9 * len(blob)


@pytest.mark.few_cases(1)
def test_verify_detects_every_flipped_byte_outside_padding(case: tuple[bytes, str]) -> None:
    blob, _ = case
    missed_count = 0
    for offset in range(len(blob)):
        damaged_bytes = bytearray(blob)
        damaged_bytes[offset] ^= 0x10
        try:
            Bitmap(memoryview(damaged_bytes)).verify()
            missed_count += 1
        except ValueError:
            pass
    # The parts of a section are padded to multiples of 8 bytes. It has less padding than 8 bytes for each value and for
    # four more parts.
    padded_bytes_max = sum(Bitmap(memoryview(blob)).open_section(file).cardinality + 4 for file in range(2)) * 8
    assert missed_count < padded_bytes_max


@pytest.mark.few_cases(3)
def test_truncated_blob_is_rejected(case: tuple[bytes, str]) -> None:
    blob, _ = case
    for end in range(len(blob)):
        with pytest.raises(ValueError, match=r"."):
            Bitmap(memoryview(blob[:end]))
    with pytest.raises(ValueError, match=r"a bitmap index has .* bytes instead of"):
        Bitmap(memoryview(blob + b"\0" * 8))


@pytest.mark.few_cases(3)
def test_overwritten_random_bytes_are_detected_or_harmless(case: tuple[bytes, str]) -> None:
    blob, kind = case
    expected_answers = list_answers(blob, kind)
    for seed in range(30):
        rng = random.Random(seed)
        damaged_bytes = bytearray(blob)
        start = rng.randrange(len(blob))
        length = rng.randrange(1, 200)
        damaged_bytes[start : start + length] = rng.choice([bytes(length), rng.randbytes(length)])[: len(blob) - start]
        with contextlib.suppress(ValueError):
            assert list_answers(damaged_bytes[: len(blob)], kind) == expected_answers, f"seed {seed}"


def test_swapped_sections_are_rejected() -> None:
    entries = [
        bitmap.build_bitmap(convert_to_keys(pa.array([1, 2, 3 + extra_rows], pa.int64()), "long"))
        for extra_rows in (0, 7)
    ]
    longer_bitmap = bitmap.build_bitmap(convert_to_keys(pa.array([1, 2, 3, 3], pa.int64()), "long"))
    assert len(longer_bitmap.section) == len(entries[0].section)
    head, directory, files, first_section, _ = bitmap.encode_bitmaps([entries[0], longer_bitmap])
    index = Bitmap(memoryview(b"".join((head, directory, files, longer_bitmap.section, first_section))))
    with pytest.raises(ValueError, match="section 0 of a bitmap index belongs to another file"):
        index.find_rows(0, build_ranges("long")[0])


def test_damaged_section_is_not_merged() -> None:
    blob = bytearray(
        b"".join(
            bitmap.encode_bitmaps([bitmap.build_bitmap(convert_to_keys(pa.array(range(999), pa.int64()), "long"))])
        )
    )
    start, length = Bitmap(memoryview(blob)).find_section_range(0)
    blob[start + length - 20] ^= 1
    with pytest.raises(ValueError, match="does not match its checksum"):
        bitmap.merge_bitmaps([(Bitmap(memoryview(blob)), np.array([True]))])


@pytest.mark.parametrize("keys", [2**32 - 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("form", [CODES, BYTES])
def test_too_many_keys_for_ranks_are_rejected_before_anything_is_read(keys: int, form: int) -> None:
    """A header with more keys than a file can have is rejected first, before the pieces of the file are read.

    A rank, which is the position of a key among the distinct keys, has at most 32 bits.
    """
    pieces = [Piece(Coding.FLAT, bytes(64))] * 4
    with pytest.raises(ValueError, match="keys"):
        Postings(memoryview(write_pieces(PiecesHeader(keys, 1, form, MATRIX, 0), pieces)), form, files=1, pairs=2**64)


@pytest.mark.parametrize("layout", [MATRIX, LISTS, EDGES])
def test_piece_that_would_inflate_past_its_limit_is_not_inflated(layout: int) -> None:
    """A few bytes of a malicious file can claim to be a gigabyte. The decoder refuses them by the claimed size.

    An index has three layouts: a bitmap of files for each key (MATRIX), a list of files for each key (LISTS), or the
    least and the greatest key of each file (EDGES).
    """
    huge_piece = Piece(Coding.ZSTD, (1 << 30).to_bytes(8, "little") + pa.compress(bytes(1 << 20), "zstd", asbytes=True))
    key = np.array([7], dtype=np.uint64)
    starts = _ordered.pack_numbers(np.array([0, 1], dtype=np.uint64))
    pieces = [Piece(Coding.FLAT, _ordered.pack_numbers(key).data), huge_piece, huge_piece, huge_piece]
    if layout == LISTS:
        pieces.append(Piece(Coding.FLAT, starts.data))
    if layout == EDGES:
        pieces = [huge_piece, huge_piece]
    written_pieces = write_pieces(PiecesHeader(0 if layout == EDGES else 1, 3, CODES, layout, 0), pieces)
    postings = Postings(memoryview(written_pieces), CODES, files=3, pairs=3)
    is_present = np.ones(3, dtype=np.bool_)
    wide_range = KeyRanges("long", (KeyRange(0, 9),))
    with pytest.raises(ValueError, match="bytes after decompression"):
        postings.mark_files(Bounds(wide_range, CODES), is_present, lambda _: pytest.fail("a section was requested"))


def test_lists_with_more_files_than_keys_are_rejected() -> None:
    key, starts = (_ordered.pack_numbers(np.array(item, dtype=np.uint64)) for item in ([7], [0, 1 << 40]))
    parts = (key.tobytes(), bytes(12), bytes(12), bytes(3), starts.tobytes())
    pieces = write_pieces(PiecesHeader(1, 3, CODES, LISTS, 0), [Piece(Coding.FLAT, part) for part in parts])
    postings = Postings(memoryview(pieces), CODES, 3, 3)
    bounds = Bounds(KeyRanges("long", (KeyRange(7, 7),)), CODES)
    with pytest.raises(ValueError, match="pairs of a key and a file"):
        postings.mark_files(bounds, np.ones(3, dtype=np.bool_), lambda _: pytest.fail("a section was requested"))


def _build_run_bitmap(containers: int) -> bytes:
    """Return a roaring bitmap of all rows of `containers` containers, with 14 bytes for each 65,536 rows."""
    flags = np.packbits(np.ones(containers, dtype=np.uint8), bitorder="little").tobytes()
    keys = np.array([(key, 65535) for key in range(containers)], dtype="<u2").tobytes()
    # The cookie 12347 means that the bitmap has run containers. A container has one run, from row 0 to row 65,535.
    cookie = np.array([12347 | (containers - 1) << 16], dtype="<u4").tobytes() + flags + keys
    starts = len(cookie) + 4 * containers + 6 * np.arange(containers)
    return cookie + starts.astype("<u4").tobytes() + np.array([1, 0, 65535] * containers, dtype="<u2").tobytes()


def _measure_peak_bytes(read: Callable[[], object]) -> int:
    """Return the peak memory in bytes that NumPy and Python allocate while `read` runs."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_runs_with_more_rows_than_the_file_are_not_expanded() -> None:
    def read() -> None:
        with pytest.raises(ValueError, match="beyond the 100"):
            bits.decode_bits(Piece(Coding.ROARING, _build_run_bitmap(256)), 100)

    assert _measure_peak_bytes(read) < 1 << 20


def test_runs_of_many_rows_are_expanded_in_steps() -> None:
    rows = 160 << 16  # A container has 65,536 rows. The bits of all rows have 1.25 MiB, and their numbers 40 MiB.
    expanded_parts: list[Any] = []
    assert (
        _measure_peak_bytes(
            lambda: expanded_parts.append(bits.decode_bits(Piece(Coding.ROARING, _build_run_bitmap(160)), rows))
        )
        < 12 << 20
    )
    assert bits.count_set_bits(expanded_parts[0]) == rows
    row_numbers = np.unique(np.random.default_rng(5).integers(0, rows, 1 << 19))
    bit_map = pyroaring.BitMap(row_numbers.astype(np.uint32))
    decoded_bits = bits.decode_bits(Piece(Coding.ROARING, bit_map.serialize()), rows)
    assert not isinstance(decoded_bits, bool)
    assert np.array_equal(bits.list_positions(decoded_bits), row_numbers)


def test_small_section_is_not_decoded_to_gigabytes() -> None:
    rows = ROWS_MAX
    words = pa.Codec("zstd", 1).compress(bytes(8 * bits.count_words(rows)), asbytes=True)
    numbers = Piece(Coding.FLAT, _ordered.pack_numbers(np.arange(1 << 12, dtype=np.uint64)).data)
    empty_piece = Piece(Coding.ZEROS, b"")
    pieces = [numbers, empty_piece, empty_piece, *[Piece(Coding.ZSTD, words)] * 12]
    section = Section(memoryview(write_pieces(PiecesHeader(rows, 1 << 12, CODES, SLICES, 0), pieces)))
    with pytest.raises(ValueError, match="the limit is 268,435,456 bytes"):
        section.decode_slices()
    with pytest.raises(ValueError, match="a section cannot have"):
        Section(
            memoryview(write_pieces(PiecesHeader(rows + 1, 1, CODES, SLICES, 0), [numbers, empty_piece, empty_piece]))
        )


def test_slices_too_large_to_read_compressed_are_stored_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    values = pa.array(np.arange(70_000) // 30, pa.int64())
    packed_bitmap = bitmap.build_bitmap(convert_to_keys(values, "long"))
    monkeypatch.setattr(slices, "DECODED_MAX_BYTES", 10_000)
    with pytest.raises(ValueError, match="the limit is 10,000"):
        Section(memoryview(packed_bitmap.section)).decode_slices()
    flat_bitmap = bitmap.build_bitmap(convert_to_keys(values, "long"))
    blobs = [b"".join(bitmap.encode_bitmaps([item])) for item in (packed_bitmap, flat_bitmap)]
    assert list_answers(blobs[1], "long")
    monkeypatch.undo()
    assert list_answers(blobs[0], "long") == list_answers(blobs[1], "long")
