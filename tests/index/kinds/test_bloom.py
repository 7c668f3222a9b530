"""Tests that bloom filters never miss a file that has a key, and that damage is an error or changes no answer."""

from __future__ import annotations

import math
import pickle
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from seamark.formats.index.kernels import _bloom
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_key
from seamark.formats.index.keys.keys import Keys, make_key
from seamark.formats.index.kinds.bloom import (
    FIXED_SIZE,
    Bloom,
    FileBloom,
    build_filter,
    compute_filter_bits,
    compute_hash_count,
    encode_filters,
    merge_filters,
    read_header_size,
)
from tests.index.kinds.test_keys import COLUMNS, build_array, is_nan
from tests.seeds import examples


def encode_blob(entries: list[FileBloom]) -> bytes:
    return b"".join(encode_filters(entries))


def build_long_keys(values: Any) -> Keys:
    return convert_to_keys(pa.array(np.asarray(values, dtype=np.int64)), "long")


def hash_value(value: Any, kind: str = "long") -> Any:
    return np.array([hash_key(make_key(value, kind), 0)], dtype=np.uint64)


def slice_ranges(blob: bytes, ranges: list[tuple[int, int]]) -> list[bytes]:
    return [blob[offset : offset + length] for offset, length in ranges]


def probe_remotely(blob: bytes, hashes: Any) -> Any:
    """Look up hashes with only the header and the byte ranges that the lookup requests."""
    header = blob[: read_header_size(blob[:FIXED_SIZE])]
    bloom = Bloom(header, len(blob))
    return bloom.probe_bytes(hashes, slice_ranges(blob, bloom.list_byte_ranges(hashes)))


def draw_values_of_files(seed: int, sizes: list[int]) -> list[Any]:
    """Return random int64 values for each file. Two files very seldom have a common value."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-(2**62), 2**62, size) for size in sizes]


@pytest.mark.parametrize("kind", COLUMNS)
@given(data=st.data())
@settings(max_examples=examples(40))
def test_file_that_has_a_value_is_never_pruned(kind: str, data: st.DataObject) -> None:
    files = data.draw(st.lists(st.lists(st.one_of(st.none(), COLUMNS[kind][1]), max_size=60), min_size=1, max_size=6))
    blob = encode_blob([build_filter(convert_to_keys(build_array(kind, values), kind)) for values in files])
    bloom = Bloom(blob)
    bloom.verify()
    assert bloom.files == len(files)
    for number, values in enumerate(files):
        for value in values:
            if value is not None and not is_nan(value):
                hashes = hash_value(value, kind)
                assert bloom.probe(hashes)[number] == 1
                assert probe_remotely(blob, hashes)[number] == 1


def test_zeros_of_both_signs_huge_strings_and_files_without_a_key() -> None:
    floats = encode_blob(
        [build_filter(convert_to_keys(pa.array([value]), "double")) for value in (-0.0, 0.0, math.nan, None, math.inf)]
    )
    for value, number in ((-0.0, 0), (0.0, 1), (math.inf, 4)):
        answers = Bloom(floats).probe(hash_value(value, "double"))
        assert answers[number] == 1
        assert answers[2:4].tolist() == [0, 0]
    huge_text, wide_text = "x" * 2_000_000, "𝕏 é\0" * 50_000
    columns = [pa.array([huge_text]), pa.array([wide_text, None]), pa.array([], pa.string()), pa.nulls(3)]
    texts = Bloom(encode_blob([build_filter(convert_to_keys(column, "string")) for column in columns]))
    assert texts.probe(hash_value(huge_text, "string")).tolist() == [1, 0, 0, 0]
    assert texts.probe(hash_value(wide_text, "string")).tolist() == [0, 1, 0, 0]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 129, 500, 1000])
def test_each_of_many_files_is_found_by_its_own_keys(count: int) -> None:
    rng = np.random.default_rng(count)
    files = draw_values_of_files(count, rng.choice([3, 40, 200, 900], count).tolist())
    blob = encode_blob([build_filter(build_long_keys(values)) for values in files])
    bloom = Bloom(blob)
    for number in rng.permutation(count)[:60].tolist():
        for value in files[number][:3].tolist():
            answers = bloom.probe(hash_value(value))
            assert answers[number] == 1
            assert np.array_equal(answers, probe_remotely(blob, hash_value(value)))
    all_hashes = np.concatenate([hash_value(int(values[0])) for values in files])
    assert bloom.probe(all_hashes).all()
    assert np.array_equal(bloom.probe(all_hashes), probe_remotely(blob, all_hashes))


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("fpp", [0.2, 0.05, 0.01, 0.001])
@pytest.mark.parametrize("keys", [20, 25, 300, 1_700, 20_000])
def test_false_positives_are_as_rare_as_requested(fpp: float, keys: int) -> None:
    files = draw_values_of_files(keys, [keys] * max(4, 40_000 // keys))
    bloom = Bloom(encode_blob([build_filter(build_long_keys(values), fpp) for values in files]))
    absent_hashes = np.random.default_rng(7).integers(0, 2**64, 100_000 // len(files) + 400, dtype=np.uint64)
    false_positives = sum(int(bloom.probe(absent_hashes[i : i + 1]).sum()) for i in range(len(absent_hashes)))
    assert false_positives / (len(absent_hashes) * len(files)) <= 1.5 * fpp


def test_repeated_keys_take_no_space() -> None:
    values = np.random.default_rng(1).integers(0, 900, 300_000)
    assert build_filter(build_long_keys(values)).filter_bits == compute_filter_bits(900, 0.01)
    assert build_filter(build_long_keys(np.zeros(500_000))).filter_bits == compute_filter_bits(1, 0.01)


@given(
    hashes=st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 3), st.just(2**64 - 1)), max_size=300),
    again=st.integers(1, 40),
)
@settings(max_examples=examples(100))
def test_repeated_hashes_are_stored_once(hashes: list[int], again: int) -> None:
    distinct_hashes = _bloom.distinct(np.array(hashes * again, dtype=np.uint64)).tolist()
    assert sorted(distinct_hashes) == sorted(set(hashes))


def test_many_distinct_hashes_are_counted_exactly() -> None:
    hashes = np.random.default_rng(3).integers(0, 2**64, 50_000, dtype=np.uint64)
    # All hashes are in one bucket, or spread over buckets.
    for hash_list in (hashes, hashes >> np.uint64(40), hashes << np.uint64(50), np.tile(hashes[:9_000], 5)):
        assert np.array_equal(
            np.sort(_bloom.distinct(hash_list)), np.array(sorted(set(hash_list.tolist())), dtype=np.uint64)
        )


@pytest.mark.parametrize("fpp", [0.5, 0.01, 1e-6])
def test_bloom_filter_wastes_at_most_a_quarter(fpp: float) -> None:
    hash_count = compute_hash_count(fpp)
    for keys in [*range(300, 5_000, 7), 10**6, 9_999_999]:
        # A size has at least 256 bits, and only its three highest bits may be 1. So it exceeds the needed bits by at
        # most a quarter.
        bit_count = keys * -hash_count / math.log(1 - fpp ** (1 / hash_count))
        bits = compute_filter_bits(keys, fpp)
        assert bit_count <= bits < max(bit_count * 1.25 + 64, 257)
        assert bits % 64 == 0
        assert bits.bit_count() <= 3
    assert compute_filter_bits(0, fpp) == compute_filter_bits(1, fpp) == 256
    assert compute_filter_bits(2**40, fpp) == 2**30


def read_bits(blob: bytes) -> list[set[int]]:
    """Return the bits that are set in each file's filter, read in plain Python as the format's page describes."""
    header_size, _, files, groups = struct.unpack_from("<4I", blob)
    entries = [struct.unpack_from("<4Q", blob, 16 + 32 * i) for i in range(groups)]
    numbers = blob[16 + 32 * groups :][:files]
    assert xxhash.xxh64_intdigest(blob[: header_size - 8]) == int.from_bytes(
        blob[header_size - 8 : header_size], "little"
    )
    results: list[set[int]] = [set() for _ in range(files)]
    for group, (bits, count, offset, length) in enumerate(entries):
        members = [file for file in range(files) if numbers[file] == group]
        assert len(members) == count
        # A row of more than 128 bits begins at a whole byte.
        stride = count if count <= 128 else math.ceil(count / 8) * 8
        # A row has a bit for each file of the group. A page has as many rows as fit into 4 KiB.
        rows = 1
        while rows * 2 * stride <= 8 * 4096:
            rows *= 2
        start, end = offset, offset + length
        for first_row in range(0, bits, rows):
            rows_of_layer = min(rows, bits - first_row)
            page = blob[start : start + math.ceil(rows_of_layer * stride / 8)]
            start += len(page)
            checksum = xxhash.xxh64_intdigest(page, start - len(page)) & 0xFFFFFFFF
            assert blob[start : start + 4] == checksum.to_bytes(4, "little")
            start += 4
            number = int.from_bytes(page, "little")
            for row in range(rows_of_layer):
                line = number >> row * stride & (1 << stride) - 1
                assert line >> count == 0
                while line:
                    results[members[(line & -line).bit_length() - 1]].add(first_row + row)
                    line &= line - 1
        assert start == end
    return results


def compute_bits(values: Any, bits: int, hash_count: int) -> set[int]:
    set_bits = set()
    for value in values.tolist():
        hashed_value = xxhash.xxh64_intdigest(struct.pack("<Q", value + 2**63))
        high, step = hashed_value >> 32, hashed_value & 0xFFFFFFFF | 1
        set_bits |= {((high + i * step) % 2**32) * bits >> 32 for i in range(hash_count)}
    return set_bits


@pytest.mark.parametrize(("count", "fpp"), [(1, 0.01), (3, 0.01), (70, 0.2), (131, 0.05)])
def test_reader_of_the_documented_format_finds_the_bits_of_each_file(count: int, fpp: float) -> None:
    files = draw_values_of_files(count, np.random.default_rng(count).choice([0, 10, 45, 80], count).tolist())
    entries = [build_filter(build_long_keys(values), fpp) for values in files]
    expected = [
        compute_bits(values, entry.filter_bits, compute_hash_count(fpp))
        for values, entry in zip(files, entries, strict=True)
    ]
    assert read_bits(encode_blob(entries)) == expected


def test_format_equals_that_of_earlier_versions() -> None:
    texts = [["a", "ß", ""], [], [str(i) for i in range(5_000)], [None, "a"], *[[str(i)] for i in range(200)]]
    blob = encode_blob([build_filter(convert_to_keys(pa.array(text, pa.string()), "string")) for text in texts])
    assert (len(blob), xxhash.xxh64_hexdigest(blob)) == EXPECTED_LENGTH_AND_HASH


EXPECTED_LENGTH_AND_HASH = (13_112, "3f6589d64df3fa3b")


def draw_merges(seed: int) -> Iterator[tuple[list[FileBloom], list[tuple[Bloom, Any]]]]:
    """Yield the filters that a merge keeps, and the parts that contain them."""
    rng = np.random.default_rng(seed)
    for parts in (1, 2, 5, 12):
        counts = rng.choice([1, 2, 7, 64, 65, 130, 300], parts).tolist()
        kept_entries, given_parts = [], []
        for count in counts:
            files = draw_values_of_files(int(rng.integers(2**40)), rng.choice([0, 10, 60, 500], count).tolist())
            entries = [build_filter(build_long_keys(values)) for values in files]
            keep = rng.random(count) < rng.choice([0.0, 0.4, 0.95, 1.0])
            kept_entries += [entry for entry, is_kept in zip(entries, keep.tolist(), strict=True) if is_kept]
            given_parts.append((Bloom(encode_blob(entries)), keep))
        yield kept_entries, given_parts


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("seed", range(4))
def test_merge_equals_a_build_from_the_kept_files_byte_by_byte(seed: int) -> None:
    for kept_entries, parts in draw_merges(seed):
        merged_blob = b"".join(merge_filters(parts))
        Bloom(merged_blob).verify()
        if kept_entries:
            assert merged_blob == encode_blob(kept_entries)
        else:
            assert Bloom(merged_blob).files == 0


def test_merge_in_many_steps_equals_one_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.formats.index.kinds.bloom._WORDS_PER_MERGE", 900)
    for kept_entries, parts in draw_merges(9):
        if kept_entries:
            assert b"".join(merge_filters(parts)) == encode_blob(kept_entries)


def test_merges_of_merges_miss_no_key() -> None:
    files = draw_values_of_files(5, [400] * 90)
    level = [Bloom(encode_blob([build_filter(build_long_keys(values))])) for values in files]
    while len(level) > 1:
        level = [
            Bloom(
                b"".join(merge_filters([(item, np.ones(item.files, dtype=bool)) for item in level[start : start + 4]]))
            )
            for start in range(0, len(level), 4)
        ]
    for number, values in enumerate(files):
        assert level[0].probe(hash_value(int(values[-1])))[number] == 1


def test_empty_blob_covers_no_file() -> None:
    bloom, keep = Bloom(encode_blob([build_filter(build_long_keys([1]))])), np.zeros(1, dtype=bool)
    empty_blob = b"".join(merge_filters([(bloom, keep)]))
    assert Bloom(empty_blob).probe(hash_value(1)).tolist() == []
    assert probe_remotely(empty_blob, hash_value(1)).tolist() == []
    assert b"".join(merge_filters([(Bloom(empty_blob), keep[:0]), (bloom, ~keep)])) == encode_blob(
        [build_filter(build_long_keys([1]))]
    )


def test_list_of_keys_finds_the_files_of_each_key() -> None:
    files = draw_values_of_files(8, [30] * 200)
    blob = encode_blob([build_filter(build_long_keys(values)) for values in files])
    bloom = Bloom(blob)
    hashes = np.concatenate([hash_value(int(files[number][0])) for number in (3, 77, 150)])
    single_probes = [bloom.probe(hashes[i : i + 1]) for i in range(3)]
    assert np.array_equal(bloom.probe(hashes), np.maximum.reduce(single_probes))
    assert not bloom.probe(hashes[:0]).any()
    assert not probe_remotely(blob, hashes[:0]).any()


def test_remote_probe_reads_at_most_a_small_range_for_each_hash_function_and_group() -> None:
    files = draw_values_of_files(2, [1_000] * 300 + [40_000] * 3)
    blob = encode_blob([build_filter(build_long_keys(values)) for values in files])
    bloom = Bloom(blob)
    for value in files[0][:40].tolist():
        ranges_to_read = bloom.list_byte_ranges(hash_value(value))
        # Files of similar size are in one group, so there are two groups. There are 7 hash functions.
        # A page has up to 4 KiB and a checksum of 4 bytes.
        assert len(ranges_to_read) <= 2 * 7
        assert sum(length for _, length in ranges_to_read) <= 2 * 7 * (4096 + 4)
        assert ranges_to_read == sorted(ranges_to_read)


def test_bytes_from_another_position_are_rejected() -> None:
    blob = encode_blob([build_filter(build_long_keys(values)) for values in draw_values_of_files(2, [1_000] * 300)])
    bloom, hashes = Bloom(blob), hash_value(5)
    parts = slice_ranges(blob, bloom.list_byte_ranges(hashes))
    parts[0], parts[1] = parts[1], parts[0]
    with pytest.raises(ValueError, match="checksum"):
        bloom.probe_bytes(hashes, parts)
    with pytest.raises(ValueError, match="bytes were read"):
        bloom.probe_bytes(hashes, [part[:-1] for part in parts])


@pytest.fixture(scope="module")
def undamaged_index() -> tuple[bytes, list[Any], Any]:
    """Return a Bloom index of files with few and many values, the hash of one value of each file, and the answers."""
    files = draw_values_of_files(4, [12] * 150 + [70] * 9 + [400, 5_000])
    blob = encode_blob([build_filter(build_long_keys(values)) for values in files])
    hashes = [hash_value(int(values[0])) for values in files]
    return blob, hashes, [Bloom(blob).probe(item) for item in hashes]


def check_same_or_error(damaged_blob: bytes, hashes: list[Any], answers: Any) -> int:
    """Probe a damaged blob, check that each answer is correct or an error, and return the number of errors."""
    try:
        bloom = Bloom(damaged_blob)
    except ValueError:
        return len(hashes)
    errors = 0
    for single_hash, answer in zip(hashes, answers, strict=True):
        try:
            assert np.array_equal(bloom.probe(single_hash), answer)
            assert np.array_equal(probe_remotely(damaged_blob, single_hash), answer)
        except ValueError:
            errors += 1
    return errors


def test_flipped_bit_is_an_error_or_changes_no_answer(undamaged_index: tuple[bytes, list[Any], Any]) -> None:
    blob, hashes, answers = undamaged_index
    rng = np.random.default_rng(11)
    offsets = [*range(read_header_size(blob) + 8), *rng.integers(0, len(blob), 600).tolist(), len(blob) - 1]
    damage_reports = 0
    for offset in offsets:
        damaged_bytes = bytearray(blob)
        damaged_bytes[offset] ^= 1 << int(rng.integers(8))
        hash_indexes = rng.permutation(len(hashes))[:5].tolist()
        some_hashes, expected = [hashes[i] for i in hash_indexes], [answers[i] for i in hash_indexes]
        damage_reports += check_same_or_error(bytes(damaged_bytes), some_hashes, expected) > 0
        if offset >= read_header_size(blob):
            with pytest.raises(ValueError, match="checksum"):
                Bloom(bytes(damaged_bytes)).verify()
    assert damage_reports > read_header_size(blob)


def test_blob_that_is_too_short_or_too_long_is_rejected(undamaged_index: tuple[bytes, list[Any], Any]) -> None:
    blob, _, _ = undamaged_index
    for length in [*range(200), *range(200, len(blob), 997), len(blob) - 1]:
        with pytest.raises(ValueError, match="bloom blob"):
            Bloom(blob[:length])
    with pytest.raises(ValueError, match="bloom blob"):
        Bloom(blob + b"\0")


def test_merge_of_damaged_bits_is_rejected(undamaged_index: tuple[bytes, list[Any], Any]) -> None:
    blob, _, _ = undamaged_index
    damaged_bytes = bytearray(blob)
    damaged_bytes[-1000] ^= 16
    bloom = Bloom(bytes(damaged_bytes))
    with pytest.raises(ValueError, match="checksum"):
        merge_filters([(bloom, np.ones(bloom.files, dtype=bool))])


def test_wrong_header_with_a_valid_checksum_is_rejected_or_harmless(
    undamaged_index: tuple[bytes, list[Any], Any],
) -> None:
    # A malicious writer can compute valid checksums, so no header may make the C functions read outside their memory.
    blob, hashes, _ = undamaged_index
    head = read_header_size(blob)
    rng = np.random.default_rng(13)
    refused_count = 0
    for _ in range(2_000):
        forged_blob = bytearray(blob)
        offset = int(rng.integers(4, head - 8))
        forged_blob[offset] = int(rng.integers(256))
        forged_blob[head - 8 : head] = xxhash.xxh64_intdigest(bytes(forged_blob[: head - 8])).to_bytes(8, "little")
        try:
            bloom = Bloom(bytes(forged_blob))
            bloom.probe(hashes[0])
            merge_filters([(bloom, np.ones(bloom.files, dtype=bool))])
        except ValueError:
            refused_count += 1
    assert refused_count > 1_000, "most wrong headers are rejected"


def test_filters_can_be_sent_between_processes() -> None:
    filters = build_filter(build_long_keys([1, 2, 3]))
    unpickled_filters = pickle.loads(pickle.dumps(filters))
    assert encode_blob([unpickled_filters]) == encode_blob([filters])


def test_impossible_filter_parameters_are_rejected() -> None:
    default_filter, larger_error_filter = build_filter(build_long_keys([1])), build_filter(build_long_keys([1]), 0.2)
    for fpp in (0.0, 1e-7, 0.6, math.nan):
        with pytest.raises(ValueError, match="false-positive rate"):
            build_filter(build_long_keys([1]), fpp)
    for entries in ([], [default_filter, larger_error_filter]):
        with pytest.raises(ValueError, match="number of bits per key"):
            encode_filters(entries)
    blooms = [(Bloom(encode_blob([entry])), np.ones(1, dtype=bool)) for entry in (default_filter, larger_error_filter)]
    for parts in ([], blooms):
        with pytest.raises(ValueError, match="number of bits per key"):
            merge_filters(parts)
