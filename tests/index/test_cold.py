"""Tests of index files read by range: they answer like whole files, read little, and detect wrong bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.formats.index.index_file import FilesTable, assemble_index_file, open_index_file
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_keys
from seamark.formats.index.keys.keys import KeyRange, KeyRanges, Keys
from seamark.formats.index.kinds import bitmap, bloom, postings, record
from seamark.formats.index.kinds.bitmap import BitmapQuery
from seamark.formats.index.kinds.bloom import BloomQuery
from seamark.formats.index.kinds.kinds import KINDS as OPENED
from seamark.formats.index.kinds.queries import IndexQuery
from seamark.formats.index.kinds.record import RecordQuery
from seamark.formats.index.kinds.sparse import SparseMemory
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.index.files import remote as cold
from seamark.metaserver.index.files.remote import RemoteIndexFile, open_remote
from seamark.metaserver.store.model import RegisteredIndexFile
from tests.index.kinds.columns import KINDS, Kind, draw_column, draw_predicate, get_type_name
from tests.seeds import mark_fast

LOCATION = "file:///t/index.puffin"
ENTRY_BUILDERS: dict[str, Any] = {
    "bloom": lambda keys: bloom.build_filter(keys, 0.01),
    "bitmap": bitmap.build_bitmap,
    "record": lambda keys: record.build_records([keys]),
}


@dataclass
class RecordingStorage:
    """A storage with one file. `read_ranges` has the ranges that were read."""

    data: bytes
    read_ranges: list[tuple[int, int]] = field(default_factory=list)

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        assert location == LOCATION
        self.read_ranges.append((start, length))
        return self.data[start : start + length]


def build_index_file(kind: str, columns: Sequence[Keys]) -> bytes:
    blobs = [ENTRY_BUILDERS[kind](keys) for keys in columns]
    records = [keys.rows for keys in columns]
    paths = [f"file:///t/{number}" for number in range(len(columns))]
    ids = np.arange(2 * len(columns), dtype=np.uint64).reshape(-1, 2)
    files = FilesTable.from_columns(ids, np.array(records, np.uint64), np.ones(len(columns), np.uint64), paths)
    parts = assemble_index_file(
        "d", kind, files, map(memoryview, OPENED[kind].encode(blobs)), table_uuid="u", field_ids=(1,)
    )
    return b"".join(parts)


def build_registered_file(kind: str, size_bytes: int) -> RegisteredIndexFile:
    return RegisteredIndexFile(
        uuid="u", location=LOCATION, definition="d", kind=kind, level=0, files=1, rows=1, size_bytes=size_bytes,
        snapshot_id=None, created_ms=0,
    )  # fmt: skip


async def open_remote_file(kind: str, storage: RecordingStorage) -> RemoteIndexFile:
    store: Any = storage
    return (await open_remote(store, build_registered_file(kind, len(storage.data))))[1]


def draw_keys(rng: random.Random, kind: Kind, columns: Sequence[Sequence[Any]]) -> Keys:
    values = [rng.choice(column) for column in columns if column and rng.random() < 0.5] + [kind.draw(rng)]
    return convert_to_keys(kind.arrow([value for value in values if value is not None]), get_type_name(kind))


def draw_query(rng: random.Random, index: str, kind: Kind, columns: Sequence[Sequence[Any]]) -> IndexQuery:
    if index == "bitmap":
        return BitmapQuery(draw_predicate(rng, kind, rng.choice(columns)).build_ranges())
    keys = draw_keys(rng, kind, columns)
    return BloomQuery(hash_keys(keys, 0)) if index == "bloom" else RecordQuery.from_keys([keys])


@pytest.fixture(params=["small", "large"])
def index_layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the layout of small bitmap indexes, or force the layout of large indexes by limits that no index meets."""
    if request.param == "large":
        for name in ("SMALL_INDEX_MAX_BYTES", "SHARED_MAX_FRACTION", "UNSHARED_MAX_FRACTION"):
            monkeypatch.setattr(postings, name, -1)


@pytest.fixture(params=[64, cold._FIRST_READ_BYTES], ids=["little at first", "much at first"])
def first_read_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size of the first read. The default covers a small file, and 64 bytes a part of its header."""
    monkeypatch.setattr(cold, "_FIRST_READ_BYTES", request.param)


@pytest.mark.each_value
@pytest.mark.parametrize("index", ENTRY_BUILDERS)
@pytest.mark.parametrize("seed", mark_fast(range(8), 2))
async def test_answers_from_range_reads_equal_answers_from_the_whole_file(
    index: str, seed: int, index_layout: None, first_read_size: None
) -> None:
    rng = random.Random(f"{index} {seed}")
    kind = rng.choice(KINDS)
    pool = [kind.draw(rng) for _ in range(60)] if seed % 2 else None
    columns = [draw_column(rng, kind, rng.choice([0, 1, 65, 700]), pool) for _ in range(rng.choice([1, 3, 40]))]
    data = build_index_file(index, [convert_to_keys(kind.arrow(values), get_type_name(kind)) for values in columns])
    whole_index = OPENED[index].open(open_index_file(data, LOCATION).blob)
    remote_file = await open_remote_file(index, RecordingStorage(data))
    for _ in range(12):
        query = draw_query(rng, index, kind, columns)
        probe_result = await remote_file.probe(query)
        assert probe_result is not None
        assert np.array_equal(probe_result, query.mark_files(whole_index)), f"{index} {seed} {kind.name}"
        if isinstance(query, BitmapQuery):
            files = rng.sample(range(len(columns)), min(3, len(columns)))
            assert await remote_file.bitmap.load_rows(files)
            for file in files:
                assert remote_file.bitmap.has_rows(file)
                rows = remote_file.bitmap.bitmap.find_rows(file, query.ranges)
                assert np.array_equal(rows, whole_index.find_rows(file, query.ranges)), f"{seed} {kind.name}"
        if isinstance(query, RecordQuery):
            located_rows = await remote_file.record_index.look_up_rows(query.high, query.low)
            assert located_rows is not None
            expected = whole_index.lookup(query.high, query.low)
            assert all(np.array_equal(*pair) for pair in zip(located_rows, expected, strict=True))


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("index", ENTRY_BUILDERS)
@pytest.mark.parametrize("seed", range(4))
async def test_flipped_bytes_never_cause_a_wrong_answer(index: str, seed: int, index_layout: None) -> None:
    rng = random.Random(f"flipped {index} {seed}")
    kind = rng.choice(KINDS)
    columns = [draw_column(rng, kind, rng.choice([1, 65, 300])) for _ in range(6)]
    data = build_index_file(index, [convert_to_keys(kind.arrow(values), get_type_name(kind)) for values in columns])
    whole_index = OPENED[index].open(open_index_file(data, LOCATION).blob)
    queries = [draw_query(rng, index, kind, columns) for _ in range(4)]
    broken_count = 0
    for _ in range(60):
        damaged_bytes = bytearray(data)
        damaged_bytes[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            remote_file = await open_remote_file(index, RecordingStorage(bytes(damaged_bytes)))
            for query in queries:
                probe_result = await remote_file.probe(query)
                assert probe_result is not None
                assert np.array_equal(probe_result, query.mark_files(whole_index)), f"{seed} {kind.name}"
                if isinstance(query, BitmapQuery):
                    assert await remote_file.bitmap.load_rows(range(6))
                    for file in range(6):
                        rows = remote_file.bitmap.bitmap.find_rows(file, query.ranges)
                        assert np.array_equal(rows, whole_index.find_rows(file, query.ranges))
        except (ValueError, SeamarkError):
            broken_count += 1
    assert broken_count > 10


def build_long_keys(count: int, files: int) -> list[Keys]:
    keys_per_file = count // files
    return [
        convert_to_keys(pa.array(range(n * keys_per_file, (n + 1) * keys_per_file), pa.int64()), "long")
        for n in range(files)
    ]


async def test_lookup_of_a_key_needs_at_most_two_reads_of_a_record_index() -> None:
    storage = RecordingStorage(build_index_file("record", build_long_keys(100_000, 10)))
    remote_file = await open_remote_file("record", storage)
    assert len(storage.read_ranges) <= 5
    rng = random.Random(4)
    for _ in range(50):
        value = rng.randrange(150_000)
        reads_before = len(storage.read_ranges)
        query = RecordQuery.from_keys([convert_to_keys(pa.array([value], pa.int64()), "long")])
        rows = await remote_file.record_index.look_up_rows(query.high, query.low)
        assert rows is not None
        assert [(row.tolist()) for row in rows[1:]] == (
            [[value // 10_000], [value % 10_000]] if value < 100_000 else [[], []]
        )
        assert len(storage.read_ranges) - reads_before <= 2
        assert sum(length for _, length in storage.read_ranges[reads_before:]) <= 2 * 4096


async def test_bitmap_index_reads_the_sections_of_the_predicate_once() -> None:
    rng = np.random.default_rng(6)
    values = [np.sort(rng.integers(n << 40, (n + 1) << 40, 20_000)) for n in range(20)]
    storage = RecordingStorage(
        build_index_file("bitmap", [convert_to_keys(pa.array(value), "long") for value in values])
    )
    remote_file = await open_remote_file("bitmap", storage)
    key = int(values[3][777]) + (1 << 63)  # The keys of longs are unsigned.
    bitmap_query = BitmapQuery(KeyRanges("long", (KeyRange(key, key),)))
    probe_result = await remote_file.probe(bitmap_query)
    assert probe_result is not None
    assert np.flatnonzero(probe_result).tolist() == [3]
    assert await remote_file.bitmap.load_rows([3])
    assert (
        np.flatnonzero(
            np.unpackbits(remote_file.bitmap.bitmap.find_rows(3, bitmap_query.ranges).view(np.uint8), bitorder="little")
        )
        == 777
    )
    # Only the header and the sections of the key are read, not the sections of the other 19 files.
    assert len(storage.read_ranges) < 10
    assert sum(length for _, length in storage.read_ranges) < len(storage.data) / 5
    reads_before = len(storage.read_ranges)
    assert np.array_equal(await remote_file.probe(bitmap_query), probe_result)  # type: ignore[arg-type]
    assert await remote_file.bitmap.load_rows([3])
    assert len(storage.read_ranges) == reads_before
    assert not remote_file.bitmap.has_rows(4)
    with pytest.raises(ValueError, match="header"):
        remote_file.bitmap.bitmap.find_rows(4, bitmap_query.ranges)


async def test_probe_with_too_many_reads_or_bytes_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = RecordingStorage(build_index_file("record", build_long_keys(100_000, 10)))
    remote_file = await open_remote_file("record", storage)
    query = RecordQuery.from_keys([convert_to_keys(pa.array(range(0, 100_000, 500), pa.int64()), "long")])
    reads_before = len(storage.read_ranges)
    monkeypatch.setattr(cold, "RANGES_MAX", 50)
    assert await remote_file.probe(query) is None
    assert len(storage.read_ranges) == reads_before
    storage = RecordingStorage(build_index_file("bitmap", build_long_keys(20_000, 4)))
    monkeypatch.setattr(cold, "_FIRST_READ_BYTES", 64)
    remote_file = await open_remote_file("bitmap", storage)
    monkeypatch.setattr(bitmap, "FILLED_MAX_BYTES", 100)
    assert not await remote_file.bitmap.load_rows([0, 1, 2, 3])


def test_bytes_of_overlapping_reads_are_stored_once() -> None:
    rng = random.Random(8)
    for _ in range(200):
        sparse_memory = SparseMemory(300)
        expected = bytearray(300)
        is_present = [False] * 300
        for round_number in range(1, 12):
            start = rng.randrange(300)
            length = rng.randint(0, 300 - start)
            missing_positions = {
                position
                for offset, size in sparse_memory.list_missing([(start, length)])
                for position in range(offset, offset + size)
            }
            assert missing_positions == {
                position for position in range(start, start + length) if not is_present[position]
            }
            sparse_memory.fill(start, bytes([round_number]) * length)
            for position in missing_positions:
                expected[position], is_present[position] = round_number, True
            assert bytes(sparse_memory.memory) == expected
