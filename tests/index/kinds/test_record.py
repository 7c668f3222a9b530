"""Tests of the record index against a plain dict of keys: random files of every type, collisions, merges, damage."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import random
import struct
import threading
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.kernels._record import row_hash, sorted_run
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import compute_checksum, hash_rows
from seamark.formats.index.keys.keys import Keys, make_key
from seamark.formats.index.kinds.record import (
    Fences,
    FileRecords,
    RecordBlob,
    build_records,
    encode_record_entries,
    merge_records,
)
from tests.seeds import mark_fast

PAGE_BYTES = 4096
Rows = list[tuple[Any, ...]]
DRAWS: dict[str, tuple[pa.DataType, Callable[[random.Random], Any]]] = {
    "boolean": (pa.bool_(), lambda rng: rng.random() < 0.5),
    "int": (pa.int32(), lambda rng: rng.choice((-(2**31), 2**31 - 1, rng.randrange(-9, 9)))),
    "long": (pa.int64(), lambda rng: rng.choice((-(2**63), 2**63 - 1, rng.randrange(-9, 9)))),
    "float": (pa.float32(), lambda rng: rng.choice((0.0, -0.0, float("nan"), float("inf"), 1.5))),
    "double": (pa.float64(), lambda rng: rng.choice((0.0, -0.0, float("nan"), -float("inf"), 0.1))),
    "date": (pa.date32(), lambda rng: date(1969, 12, 28) + timedelta(rng.randrange(9))),
    "time": (pa.time64("us"), lambda rng: time(rng.randrange(24), 59, 1)),
    "timestamp": (pa.timestamp("us"), lambda rng: datetime(1969, 12, 31, 23) + timedelta(hours=rng.randrange(9))),
    "decimal(9, 2)": (pa.decimal128(9, 2), lambda rng: Decimal(rng.randrange(-9, 9)) / 100),
    "decimal(38, 0)": (pa.decimal128(38, 0), lambda rng: Decimal(rng.randrange(-9, 9) * 10**30)),
    "string": (pa.string(), lambda rng: rng.choice(("", "a", "ab", "é", "😀", "\0", "x" * 5000))),
    "binary": (pa.binary(), lambda rng: rng.choice((b"", b"\0", b"\0\0", b"ab"))),
    "fixed[3]": (pa.binary(3), lambda rng: bytes(rng.choices((0, 255), k=3))),
}


def to_comparable(value: Any) -> Any:
    """Return a value as a key of the expected results: NaN is one value, and the zeros are two."""
    return repr(value) if isinstance(value, float) else value


class KeyFiles:
    """Random files with one key, and a dict of their keys."""

    def __init__(self, rng: random.Random, files: int) -> None:
        self.kinds = rng.sample(sorted(DRAWS), rng.randrange(1, 4))
        null_share = rng.choice((0.0, 0.3, 1.0))

        def draw_value(kind: str) -> Any:
            return None if rng.random() < null_share else DRAWS[kind][1](rng)

        def draw_rows(n: int) -> Rows:
            return [tuple(map(draw_value, self.kinds)) for _ in range(n)]

        self.files = [draw_rows(rng.choice((0, 1, 30, 400))) for _ in range(files)]
        self.absent_keys = draw_rows(50)

    def convert_rows(self, rows: Rows) -> list[Keys]:
        columns = [[row[index] for row in rows] for index in range(len(self.kinds))]
        return [
            convert_to_keys(pa.array(column, DRAWS[kind][0]), kind)
            for kind, column in zip(self.kinds, columns, strict=True)
        ]

    def record(self, files: Iterable[int]) -> RecordBlob:
        return open_record(
            encode_record_entries([build_records(self.convert_rows(self.files[number])) for number in files])
        )

    def check(self, record: RecordBlob, numbers: Sequence[int]) -> None:
        """Check that the record index has exactly these files, in this order."""
        positions_by_key = defaultdict(list)
        for file_position, number in enumerate(numbers):
            for position, row in enumerate(self.files[number]):
                positions_by_key[tuple(map(to_comparable, row))].append((file_position, position))
        all_keys = [*itertools.chain.from_iterable(self.files), *self.absent_keys]
        columns = self.convert_rows(all_keys)
        hi, lo = hash_rows(columns, 0), hash_rows(columns, 1)
        expected = [
            (query, *location)
            for query, row in enumerate(all_keys)
            for location in positions_by_key[tuple(map(to_comparable, row))]
        ]
        assert list_positions(record.lookup(hi, lo)) == expected
        assert list_positions(look_up_remotely(record, hi, lo)) == expected
        for key_number in range(0, len(all_keys), 17):
            assert (
                record.find(int(hi[key_number]), int(lo[key_number]))
                == positions_by_key[tuple(map(to_comparable, all_keys[key_number]))]
            )
        assert record.count == sum(len(self.files[number]) for number in numbers)
        assert record.counts.tolist() == [len(self.files[number]) for number in numbers]
        record.verify()


def open_record(parts: Iterable[Any]) -> RecordBlob:
    return RecordBlob(memoryview(b"".join(parts)))


def encode_blob(record: RecordBlob) -> bytes:
    return b"".join(merge_records([(record, np.ones(record.files, bool))]))


def list_positions(positions: tuple[Any, Any, Any]) -> list[tuple[int, int, int]]:
    assert [array.dtype for array in positions] == [np.int64, np.int32, np.int64]
    return list(zip(*(array.tolist() for array in positions), strict=True))


def look_up_remotely(record: RecordBlob, hi: Any, lo: Any) -> tuple[Any, Any, Any]:
    """Look up hashes like a reader that has only the end of the file, and reads pages by range.

    The directory at the end of the file has the first hash of each page.

    Args:
        record: The record index.
        hi: The high 64 bits of the hashes.
        lo: The low 64 bits of the hashes.
    """
    blob = encode_blob(record)
    trailer = blob[-64:]  # The last bytes contain the size of the directory.
    tail = blob[-Fences.compute_directory_bytes(trailer, len(blob)) :]
    fences = Fences(tail, len(blob))
    pages = [blob[offset : offset + length] for offset, length in fences.list_page_ranges(hi, lo)]
    return fences.look_up_in_pages(hi, lo, pages)


def build_hashes(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.uint64)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("seed", mark_fast(range(40), 3))
def test_lookups_equal_a_dict_before_and_after_merges(seed: int) -> None:
    rng = random.Random(seed)
    lake = KeyFiles(rng, rng.randrange(0, 7))
    numbers = list(range(len(lake.files)))
    lake.check(lake.record(numbers), numbers)
    edge = rng.randrange(len(numbers) + 1)
    parts, kept_numbers = [], []
    for half in (numbers[:edge], numbers[edge:]):
        keep = np.array([rng.random() < 0.7 for _ in half], bool)
        parts.append((lake.record(half), keep))
        kept_numbers += [number for number, is_kept in zip(half, keep, strict=True) if is_kept]
    merged_record = open_record(merge_records(parts))
    lake.check(merged_record, kept_numbers)
    assert encode_blob(merged_record) == b"".join(
        encode_record_entries([build_records(lake.convert_rows(lake.files[number])) for number in kept_numbers])
    )
    second_kept = np.array([rng.random() < 0.7 for _ in kept_numbers], bool)
    lake.check(
        open_record(merge_records([(merged_record, second_kept)])),
        [number for number, is_kept in zip(kept_numbers, second_kept, strict=True) if is_kept],
    )


@pytest.mark.parametrize("seed", mark_fast(range(20), 3))
def test_hash_of_a_single_key_equals_the_hash_of_its_row(seed: int) -> None:
    rng = random.Random(seed)
    lake = KeyFiles(rng, 1)
    columns = lake.convert_rows(lake.absent_keys)
    row_hashes = zip(hash_rows(columns, 0).tolist(), hash_rows(columns, 1).tolist(), strict=True)
    for row_number, (row, expected) in enumerate(zip(lake.absent_keys, row_hashes, strict=True)):
        parts = [read_part(keys, row_number, value) for keys, value in zip(columns, row, strict=True)]
        assert row_hash(parts) == expected


def read_part(keys: Keys, row: int, value: Any) -> Any:
    if value is None or value != value:
        return value
    if keys.codes is not None:
        return int(keys.codes[row])
    assert keys.starts is not None
    assert keys.heap is not None
    return bytes(keys.heap[keys.starts[row] : keys.starts[row + 1]])


def test_value_that_is_not_a_key_has_no_hash() -> None:
    for part in ("text", 1.5, [b"a"]):
        with pytest.raises(ValueError, match="is no part of a key"):
            row_hash([part])  # type: ignore[list-item]
    for code in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            row_hash([code])


@pytest.mark.parametrize("seed", mark_fast(range(30), 4))
def test_equal_and_extreme_hashes_are_distinguished_where_possible(seed: int) -> None:
    """Hashes are drawn from a few values, so that halves are equal on whole pages. Positions identify the entries."""
    rng = random.Random(seed)
    # A page has up to 170 entries.
    halves = [0, 1, (1 << 64) - 1, (1 << 64) - 2, *(rng.getrandbits(64) for _ in range(rng.choice((0, 1, 30))))]
    positions_by_key: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    entries = []
    for file in range(rng.randrange(1, 6)):
        rows = [(rng.choice(halves), rng.choice(halves)) for _ in range(rng.choice((1, 170, 171, 2000)))]
        entries.append(
            FileRecords(sorted_run(build_hashes([hi for hi, _ in rows]), build_hashes([lo for _, lo in rows])))
        )
        for position, pair in enumerate(rows):
            positions_by_key[pair].append((file, position))
    record = open_record(encode_record_entries(entries))
    record.verify()
    pairs = [*itertools.product(halves, halves), (5, 5)]
    rng.shuffle(pairs)
    hi, lo = build_hashes([hi for hi, _ in pairs]), build_hashes([lo for _, lo in pairs])
    expected = [(query, *place) for query, pair in enumerate(pairs) for place in positions_by_key[pair]]
    assert list_positions(record.lookup(hi, lo)) == expected
    assert list_positions(look_up_remotely(record, hi, lo)) == expected
    assert [record.find(*pair) for pair in pairs] == [positions_by_key[pair] for pair in pairs]
    for index in range(len(pairs)):
        assert [
            match[1:]
            for match in list_positions(look_up_remotely(record, hi[index : index + 1], lo[index : index + 1]))
        ] == positions_by_key[pairs[index]]


def draw_uniform_hashes(rows: int, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(0, 1 << 64, rows, dtype=np.uint64) for _ in range(2))


def test_remote_lookup_reads_one_or_two_pages() -> None:
    hi, lo = draw_uniform_hashes(100_000)
    record = open_record(encode_record_entries([FileRecords(sorted_run(hi, lo))]))
    reads = [
        record.fences.list_page_ranges(hi[start : start + 1], lo[start : start + 1]) for start in range(0, len(hi), 50)
    ]
    assert {len(page_reads) for page_reads in reads} == {1}
    assert {page_reads[0][1] for page_reads in reads} == {PAGE_BYTES, 2 * PAGE_BYTES}
    assert sum(page_reads[0][1] for page_reads in reads) < 1.02 * PAGE_BYTES * len(reads)
    absent_hashes, _ = draw_uniform_hashes(1000, seed=1)
    assert {len(record.fences.list_page_ranges(item, item)) for item in absent_hashes.reshape(-1, 1)} == {1}
    all_ranges = record.fences.list_page_ranges(hi, lo)
    assert all_ranges == [(0, len(record.memory))]


def test_entry_takes_little_more_than_24_bytes() -> None:
    assert (
        len(b"".join(encode_record_entries([FileRecords(sorted_run(*draw_uniform_hashes(100_000)))]))) / 100_000 < 24.2
    )


def test_index_without_entries_finds_no_file() -> None:
    for record in (
        open_record(encode_record_entries([])),
        open_record(encode_record_entries([build_records([convert_to_keys(pa.array([], pa.int64()), "long")])] * 3)),
    ):
        assert (record.count, record.find(1, 2), list_positions(record.lookup(*draw_uniform_hashes(5)))) == (0, [], [])
        assert list_positions(look_up_remotely(record, *draw_uniform_hashes(5))) == []
        record.verify()


def test_batch_larger_than_all_limits_is_answered_in_order() -> None:
    """One lookup processes fewer hashes at once than there are. Each hash that occurs is in three files.

    `hi` and `lo` are the high and the low 64 bits of the hashes of a record index.
    """
    hi, lo = draw_uniform_hashes(2000)
    record = open_record(encode_record_entries([FileRecords(sorted_run(hi, lo))] * 3))
    queries = np.random.default_rng(2).integers(0, 4000, 300_000)
    absent_hi, absent_lo = draw_uniform_hashes(2000, seed=1)
    query, file, position = record.lookup(
        np.concatenate([hi, absent_hi])[queries], np.concatenate([lo, absent_lo])[queries]
    )
    found_positions = np.flatnonzero(queries < 2000)
    assert np.array_equal(query, np.repeat(found_positions, 3))
    assert np.array_equal(file, np.tile([0, 1, 2], len(found_positions)))
    assert np.array_equal(position, np.repeat(queries[found_positions], 3))


def test_concurrent_lookups_return_the_same_rows() -> None:
    hi, lo = draw_uniform_hashes(50_000)
    record = open_record(encode_record_entries([FileRecords(sorted_run(hi, lo))]))
    answers: list[list[int]] = []

    def look_up_repeatedly() -> None:
        answers.append(record.lookup(hi, lo)[2].tolist())

    threads = [threading.Thread(target=look_up_repeatedly) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [list(range(50_000))] * 4


def test_files_with_too_many_rows_are_rejected() -> None:
    keys = Keys("long", 1 << 32, np.empty(0, np.uint64), None, None, None, None)
    with pytest.raises(ValueError, match="a data file of 4294967296 rows cannot have a record index"):
        build_records([keys])


def test_memory_of_a_merge_does_not_depend_on_its_output(tmp_path: Path) -> None:
    """The sorted inputs of a merge are memory-mapped files, so the allocated memory does not depend on their size."""
    mapped_pages = [
        write_and_open_record(
            tmp_path / str(number),
            encode_record_entries([FileRecords(sorted_run(*draw_uniform_hashes(500_000, number)))]),
        )
        for number in (1, 2)
    ]
    tracemalloc.start()
    written_count = 0
    for part in merge_records([(record, np.ones(1, bool)) for record in mapped_pages]):
        written_count += len(part)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written_count > 24_000_000, "a million entries of 24 bytes are written"
    assert peak < 4 << 20, "the merge allocates less than 4 MiB"


def write_and_open_record(path: Path, parts: Iterable[Any]) -> RecordBlob:
    with path.open("wb") as out:
        out.writelines(parts)
    with path.open("rb") as file:
        return RecordBlob(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))


@pytest.mark.slow
def test_index_of_50_million_keys_has_an_entry_for_each_key(tmp_path: Path) -> None:
    """The keys are inserted and merged in two rounds, and half of the files are dropped, with limited memory."""
    tracemalloc.start()
    first_round_records = []
    for group in range(10):
        entries = [FileRecords(sorted_run(*draw_uniform_hashes(1_000_000, 10 * group + number))) for number in range(5)]
        first_round_records.append(write_and_open_record(tmp_path / str(group), encode_record_entries(entries)))
        del entries
    tracemalloc.reset_peak()
    merged_record = write_and_open_record(
        tmp_path / "whole", merge_records([(record, np.ones(5, bool)) for record in first_round_records])
    )
    merged_record.verify()
    half_file = write_and_open_record(tmp_path / "half", merge_records([(merged_record, np.arange(50) % 2 == 0)]))
    half_file.verify()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20, "the merges must allocate less than 32 MiB, although the entries need 1.2 GB"
    assert (merged_record.count, merged_record.files, half_file.count, half_file.files) == (
        50_000_000,
        50,
        25_000_000,
        25,
    )
    for seed in range(0, 100, 11):  # Some of these seeds belong to files of the index, and others do not.
        # The seeds of group g are 10 g to 10 g + 4, and its files have the numbers 5 g to 5 g + 4.
        file = seed // 10 * 5 + seed % 10 if seed % 10 < 5 else None
        hi, lo = (part[:1000] for part in draw_uniform_hashes(1_000_000, seed))
        expected_positions = [] if file is None else [(file, position) for position in range(1000)]
        assert [location for _, *location in list_positions(merged_record.lookup(hi, lo))] == list(
            map(list, expected_positions)
        )


def test_damage_at_any_byte_is_detected() -> None:
    hi, lo = draw_uniform_hashes(400)
    blob = b"".join(
        encode_record_entries(
            [FileRecords(sorted_run(hi[:200], lo[:200])), FileRecords(sorted_run(hi[200:], lo[200:]))]
        )
    )
    expected, rng = list_positions(RecordBlob(memoryview(blob)).lookup(hi, lo)), random.Random(3)
    assert len(expected) == 400
    for offset in range(0, len(blob), 1):
        damaged_bytes = bytearray(blob)
        damaged_bytes[offset] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError):
            RecordBlob(memoryview(damaged_bytes)).verify()
        try:
            assert list_positions(RecordBlob(memoryview(damaged_bytes)).lookup(hi[:40], lo[:40])) == expected[:40]
        except ValueError:
            continue
    for size in range(0, len(blob), 97):
        with pytest.raises(ValueError):
            RecordBlob(memoryview(blob[:size]))


def test_damaged_page_affects_only_its_lookups_and_is_never_merged() -> None:
    hi, lo = draw_uniform_hashes(1000)
    blob = bytearray(b"".join(encode_record_entries([FileRecords(sorted_run(hi, lo))])))
    blob[2 * PAGE_BYTES + 100] ^= 1
    record = RecordBlob(memoryview(blob))
    is_before_damage = hi < record.fences.first_hashes[2]
    assert len(record.lookup(hi[is_before_damage], lo[is_before_damage])[0]) == np.count_nonzero(is_before_damage)
    damaged_row = int(np.flatnonzero((hi > record.fences.first_hashes[2]) & (hi < record.fences.first_hashes[3]))[0])
    for _ in range(2):
        with pytest.raises(ValueError, match="page 2 does not match its checksum"):
            record.find(int(hi[damaged_row]), int(lo[damaged_row]))
    with pytest.raises(ValueError, match="page 2 does not match its checksum"):
        b"".join(merge_records([(record, np.ones(1, bool))]))
    spans = [bytes(blob[start : start + size]) for start, size in record.fences.list_page_ranges(hi, lo)]
    with pytest.raises(ValueError, match="page 2 does not match"):
        record.fences.look_up_in_pages(hi, lo, spans)


def change_page(blob: bytes, page: int, change: Callable[[bytearray], None]) -> memoryview:
    """Return the blob with a changed page and matching checksums."""
    changed_blob = bytearray(blob)
    page_bytes = changed_blob[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
    change(page_bytes)
    struct.pack_into("<Q", page_bytes, 0, compute_checksum(bytes(page_bytes[8:]), page))
    changed_blob[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = page_bytes
    return memoryview(changed_blob)


@pytest.mark.parametrize("entries", [0, 171, 255, 0xFFFFFFFF])
def test_page_with_impossible_counts_is_rejected(entries: int) -> None:
    hi, lo = draw_uniform_hashes(400)
    blob = b"".join(encode_record_entries([FileRecords(sorted_run(hi, lo))]))
    record = RecordBlob(change_page(blob, 1, lambda page: struct.pack_into("<I", page, 8, entries)))
    for read in (
        lambda: record.lookup(hi, lo),
        record.verify,
        lambda: b"".join(merge_records([(record, np.ones(1, bool))])),
    ):
        with pytest.raises(ValueError, match=f"page 1 claims {entries} entries"):
            read()


def test_entry_of_a_missing_file_is_rejected() -> None:
    hi, lo = draw_uniform_hashes(100)
    blob = b"".join(encode_record_entries([FileRecords(sorted_run(hi, lo))]))
    # The page header has 16 bytes. The number of the file follows the two hashes of the first entry, 16 bytes.
    record = RecordBlob(change_page(blob, 0, lambda page: struct.pack_into("<I", page, 16 + 16, 7)))
    for read in (
        lambda: record.lookup(hi, lo),
        record.verify,
        lambda: b"".join(merge_records([(record, np.ones(1, bool))])),
    ):
        with pytest.raises(ValueError, match="of file 7"):
            read()


def test_pages_in_wrong_positions_are_rejected() -> None:
    hi, lo = draw_uniform_hashes(400)
    blob = b"".join(encode_record_entries([FileRecords(sorted_run(hi, lo))]))
    swapped_blob = memoryview(blob[PAGE_BYTES : 2 * PAGE_BYTES] + blob[:PAGE_BYTES] + blob[2 * PAGE_BYTES :])
    with pytest.raises(ValueError, match="does not match its checksum"):
        RecordBlob(swapped_blob).verify()


def test_reader_of_the_documented_format_finds_every_entry() -> None:
    """The reader follows `docs/reference/index-format.md` with `struct` alone."""
    rows = [draw_uniform_hashes(500, seed) for seed in range(3)]
    blob = b"".join(encode_record_entries([FileRecords(sorted_run(*row)) for row in rows]))
    magic, entries, pages, files, page_bytes, directory_sum = struct.unpack_from("<8sQQIIQ", blob, len(blob) - 64)
    assert (magic, entries, pages, files, page_bytes) == (b"SMRECORD", 1500, 9, 3, 4096)
    assert struct.unpack_from("<Q", blob, len(blob) - 8) == (compute_checksum(blob[-64:-8]),)
    directory = blob[4096 * pages : -64]
    assert compute_checksum(directory) == directory_sum
    fences, counts = struct.unpack_from("<9Q", directory), struct.unpack_from("<3Q", directory, 72)
    assert (len(directory), counts) == (96, (500, 500, 500))
    found_entries = []
    for number in range(pages):
        page = blob[4096 * number : 4096 * (number + 1)]
        page_sum, entry_count, zero = struct.unpack_from("<QII", page)
        assert (page_sum, zero) == (compute_checksum(page[8:], number), 0)
        # A page of 4,096 bytes has a header of 16 bytes and up to 170 entries of 24 bytes.
        assert entry_count == (170 if number < 8 else 1500 - 8 * 170)
        assert not any(page[16 + 24 * entry_count :])
        page_entries = [struct.unpack_from("<QQII", page, 16 + 24 * index) for index in range(entry_count)]
        assert page_entries[0][0] == fences[number]
        found_entries += page_entries
    pairs = [zip(hi.tolist(), lo.tolist(), strict=True) for hi, lo in rows]
    assert found_entries == sorted(
        (*pair, file, index) for file, file_pairs in enumerate(pairs) for index, pair in enumerate(file_pairs)
    )


def test_bytes_of_a_record_blob_never_change() -> None:
    """Index files are still in use after upgrades of the server that wrote them.

    If this test fails, increase the version of the format. Do not adapt the test.
    """
    texts = [f"key {number % 300}" if number % 7 else None for number in range(1000)]
    columns = [convert_to_keys(pa.array(range(1000), pa.int64()), "long"), convert_to_keys(pa.array(texts), "string")]
    other_keys = [convert_to_keys(pa.array([5], pa.int64()), "long"), convert_to_keys(pa.array(["key 5"]), "string")]
    blob = b"".join(encode_record_entries([build_records(columns), build_records(other_keys)]))
    record = RecordBlob(memoryview(blob))
    assert record.find(*row_hash([make_key(5, "long"), b"key 5"])) == [(0, 5), (1, 0)]
    assert hashlib.sha256(blob).hexdigest() == "33368500a56fbe0fe7148d3228b69d579b4846c96f0ac980121e0ea71f96b701"
