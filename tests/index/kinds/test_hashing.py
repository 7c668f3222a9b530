"""Tests that hashes are XXH64 of exactly the bytes of the format, on every path, compared with `xxhash`."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import compute_checksum, compute_file_ids, hash_key, hash_keys, hash_rows
from seamark.formats.index.keys.keys import Keys, make_key
from tests.seeds import examples

SEEDS = st.sampled_from([0, 1, 2**32 - 1, 2**64 - 1])
CODES = st.integers(0, 2**64 - 1)


def test_hashes_equal_the_vectors_of_the_specification() -> None:
    # The sanity check of xxHash: bytes of a generator with a fixed state, lengths on every path, and two seeds.
    prime = 2654435761
    data, state = bytearray(), prime
    for _ in range(222):
        data.append(state >> 56 & 0xFF)
        state = state * 11400714785074694797 % 2**64
    hash_vectors = {
        (0, 0): 0xEF46DB3751D8E999,
        (0, prime): 0xAC75FDA2929B17EF,
        (1, 0): 0xE934A84ADB052768,
        (1, prime): 0x5014607643A9B4C3,
        (4, 0): 0x9136A0DCA57457EE,
        (14, 0): 0x8282DCC4994E35C8,
        (14, prime): 0xC3BD6BF63DEB6DF0,
        (222, 0): 0xB641AE8CB691C174,
        (222, prime): 0x20CB8AB7AE10C14A,
    }
    assert {(n, seed): hash_key(bytes(data[:n]), seed) for n, seed in hash_vectors} == hash_vectors


@given(data=st.binary(max_size=200), seed=SEEDS)
@settings(max_examples=examples(300))
def test_hash_of_bytes_of_any_length_equals_xxhash(data: bytes, seed: int) -> None:
    assert hash_key(data, seed) == xxhash.xxh64_intdigest(data, seed)
    assert compute_checksum(memoryview(data), seed) == xxhash.xxh64_intdigest(data, seed)


@given(codes=st.lists(CODES, max_size=50), seed=SEEDS)
@settings(max_examples=examples(100))
def test_hash_of_a_code_is_the_hash_of_its_eight_bytes(codes: list[int], seed: int) -> None:
    keys = Keys("long", len(codes), np.array(codes, dtype=np.uint64), None, None, None, None)
    expected = [xxhash.xxh64_intdigest(struct.pack("<Q", code), seed) for code in codes]
    assert hash_keys(keys, seed).tolist() == expected
    assert [hash_key(code, seed) for code in codes] == expected


@given(texts=st.lists(st.text(max_size=80), max_size=30), seed=SEEDS, skipped=st.integers(0, 5))
@settings(max_examples=examples(100))
def test_hash_of_a_string_is_that_of_its_bytes_and_of_its_literal(texts: list[str], seed: int, skipped: int) -> None:
    hashes = hash_keys(convert_to_keys(pa.array(texts, pa.string()).slice(skipped), "string"), seed).tolist()
    assert hashes == [xxhash.xxh64_intdigest(text.encode(), seed) for text in texts[skipped:]]
    assert hashes == [hash_key(make_key(text, "string"), seed) for text in texts[skipped:]]


NULL_MARK, NAN_MARK = b"\xff\xff\xff\xff", b"\xfe\xff\xff\xff"
"""The bytes of null and of NaN in a composite key. They replace a length, and no length is as large."""


def encode_row(kinds: list[str], row: tuple[Any, ...]) -> bytes:
    """Return the hashed bytes of a composite key: the length and bytes of each value, or a mark of null or NaN."""
    encoded_row = b""
    for kind, value in zip(kinds, row, strict=True):
        if value is None:
            encoded_row += NULL_MARK
        elif value != value:  # This is NaN.
            encoded_row += NAN_MARK
        else:
            key = make_key(value, kind)
            data = struct.pack("<Q", key) if isinstance(key, int) else key
            encoded_row += struct.pack("<I", len(data)) + data
    return encoded_row


@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(-(2**31), 2**31 - 1)),
            st.one_of(st.none(), st.text(max_size=100)),
            st.one_of(st.none(), st.floats()),
        ),
        max_size=80,
    ),
    columns=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    seed=SEEDS,
)
@settings(max_examples=examples(150))
def test_composite_keys_hash_lengths_and_bytes_alternately(rows: list[Any], columns: list[int], seed: int) -> None:
    kinds, types = ["int", "string", "double"], [pa.int32(), pa.string(), pa.float64()]
    parts = [
        convert_to_keys(pa.array([row[index] for row in rows], types[index], from_pandas=False), kinds[index])
        for index in columns
    ]
    expected = [
        xxhash.xxh64_intdigest(
            encode_row([kinds[index] for index in columns], tuple(row[index] for index in columns)), seed
        )
        for row in rows
    ]
    assert hash_rows(parts, seed).tolist() == expected


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=80), seed=SEEDS)
@settings(max_examples=examples(100))
def test_key_of_one_column_without_nulls_hashes_its_length_and_code(values: list[int], seed: int) -> None:
    expected = [xxhash.xxh64_intdigest(encode_row(["long"], (value,)), seed) for value in values]
    assert hash_rows([convert_to_keys(pa.array(values, pa.int64()), "long")], seed).tolist() == expected


def test_columns_of_a_composite_key_need_the_same_rows() -> None:
    keys, other_keys = convert_to_keys(pa.array([1, 2]), "long"), convert_to_keys(pa.array([1]), "long")
    with pytest.raises(ValueError, match=r"\[1, 2\] rows"):
        hash_rows([keys, other_keys], 0)


def test_keys_with_offsets_outside_their_bytes_are_rejected() -> None:
    heap = np.zeros(4, dtype=np.uint8)
    for starts in ([0, 5], [0, -1], [3, 1], [-2, 1]):
        keys = Keys("string", 1, None, np.array(starts, dtype=np.int64), heap, None, None)
        with pytest.raises(ValueError, match="lie within"):
            hash_keys(keys, 0)
        with pytest.raises(ValueError, match="lie within"):
            hash_rows([keys], 0)


@given(
    files=st.lists(st.tuples(st.text(max_size=60), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=20)
)
@settings(max_examples=examples(100))
def test_file_identity_depends_on_path_size_and_records(files: list[tuple[str, int, int]]) -> None:
    expected = [
        tuple(xxhash.xxh64_intdigest(path.encode() + struct.pack("<QQ", size, records), seed) for seed in (0, 1))
        for path, size, records in files
    ]
    paths, sizes, records = ([file[index] for file in files] for index in range(3))
    ids = compute_file_ids(paths, np.array(sizes, dtype=np.uint64), np.array(records, dtype=np.uint64))
    assert ids.shape == (len(files), 2)
    assert [tuple(row) for row in ids.tolist()] == expected


def test_files_without_a_size_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 paths have 1 sizes"):
        compute_file_ids(["a", "b"], [1], [1, 2])
