"""Merged index files give the answers of their parts. Levels, sizes and ages alone select the files to merge."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.connector.client.storage import Storage
from seamark.connector.index.files import DataFile, encode_index_file
from seamark.connector.index.merges import RegisteredFile, merge_index_files, select_merge
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import IndexDefinition, define_index
from seamark.formats.index.index_file import open_index_file
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.hashing import hash_keys, hash_rows
from seamark.formats.index.keys.keys import KeyRange, KeyRanges, Keys, make_key
from seamark.formats.index.kinds import bitmap, bloom, record
from seamark.formats.index.kinds.bits import list_positions
from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER
from seamark.formats.runtime.errors import Corrupt
from tests.support.index_versions import change_version

SCHEMA = Schema((Field(1, "id", True, "long"),))


def build_keys(values: list[int]) -> Keys:
    return convert_to_keys(pa.array(values, pa.int64()), "long")


def build_blob(definition: IndexDefinition, values: list[int]) -> Any:
    match definition.kind:
        case "bloom":
            return bloom.build_filter(build_keys(values), 0.001)
        case "bitmap":
            return bitmap.build_bitmap(build_keys(values))
    return record.build_records([build_keys(values)])


class IndexWriter:
    """Writes index files, and keeps the rows of each data file by path."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.definition = define_index("i", kind, ["id"], SCHEMA)
        self.rows: dict[str, list[int]] = {}
        self.locations: list[str] = []

    def add(self, files: dict[str, list[int]]) -> str:
        self.rows |= files
        location = f"{self.folder.as_uri()}/{len(self.locations)}.puffin"
        data_files = [DataFile(path, 1000, len(values)) for path, values in files.items()]
        entries = [build_blob(self.definition, values) for values in files.values()]
        Storage().write(location, encode_index_file("table", self.definition, data_files, entries))
        self.locations.append(location)
        return location

    def check(self, location: str | None, expected: set[str]) -> None:
        """Check that the index file describes exactly the expected data files, each with its rows."""
        assert location is not None
        index_file = open_index_file(Storage().read(location), location)
        assert sorted(index_file.files.paths) == sorted(expected)
        all_values = sorted({value for values in self.rows.values() for value in values})
        for number, path in enumerate(index_file.files.paths):
            stored_values = self.rows[path]
            for value in all_values:
                positions = [row for row, stored_value in enumerate(stored_values) if stored_value == value]
                if self.definition.kind == "bitmap":
                    key = make_key(value, "long")
                    rows_found = bitmap.Bitmap(index_file.blob).find_rows(
                        number, KeyRanges("long", (KeyRange(key, key),))
                    )
                    assert list_positions(rows_found).tolist() == positions
                elif self.definition.kind == "bloom":
                    is_hit = bloom.Bloom(index_file.blob).probe(hash_keys(build_keys([value]), 0))[number]
                    assert is_hit or not positions
                else:
                    hashes = [hash_rows([build_keys([value])], seed) for seed in (0, 1)]
                    _, files, rows = record.RecordBlob(index_file.blob).lookup(hashes[0], hashes[1])
                    assert sorted(rows[files == number].tolist()) == positions
        if self.definition.kind == "record":
            assert record.RecordBlob(index_file.blob).count == sum(len(self.rows[path]) for path in expected)


@pytest.fixture(params=["bloom", "bitmap", "record"])
def index_writer(tmp_path: Path, request: pytest.FixtureRequest) -> IndexWriter:
    return IndexWriter(tmp_path, request.param)


def test_merged_index_file_gives_the_answers_of_its_parts(index_writer: IndexWriter) -> None:
    rng = random.Random(7)
    for part in range(4):
        index_writer.add(
            {f"f{part}-{n}": [rng.randrange(40) for _ in range(rng.choice([0, 1, 9, 70]))] for n in range(part + 1)}
        )
    merged_files = merge_index_files(index_writer.locations, index_writer.folder.as_uri(), Storage())
    assert (merged_files.files, merged_files.rows) == (10, sum(map(len, index_writer.rows.values())))
    index_writer.check(merged_files.location, set(index_writer.rows))
    assert open_index_file(Storage().read(merged_files.location or ""), "").header.level == 1


def test_merge_drops_entries_without_a_snapshot_and_keeps_duplicates_once(index_writer: IndexWriter) -> None:
    first_location = index_writer.add({"a": [1, 2], "b": [3], "gone": [4]})
    second_location = index_writer.add({"b": [3], "c": [5, 5]})
    merged_files = merge_index_files(
        [first_location, second_location],
        index_writer.folder.as_uri(),
        Storage(),
        dropped_entries={first_location: [2]},
    )
    index_writer.check(merged_files.location, {"a", "b", "c"})


def test_merge_without_remaining_entries_writes_no_file(index_writer: IndexWriter) -> None:
    location = index_writer.add({"a": [1]})
    merged_files = merge_index_files(
        [location], f"{index_writer.folder.as_uri()}/new", Storage(), dropped_entries={location: [0]}
    )
    assert merged_files.location is None
    assert not (index_writer.folder / "new").exists()


def test_merge_leaves_out_files_of_an_unknown_version(index_writer: IndexWriter) -> None:
    locations = [index_writer.add({name: [number, 7]}) for number, name in enumerate("abc")]
    path = Path(locations[1].removeprefix("file://"))
    path.write_bytes(change_version(path.read_bytes(), index_writer.definition.kind))
    folder = index_writer.folder.as_uri()
    merged_files = merge_index_files(locations, folder, Storage(), dropped_entries={locations[1]: [], locations[2]: []})
    assert merged_files.unsupported == (locations[1],)
    index_writer.check(merged_files.location, {"a", "c"})
    merge_of_unknown = merge_index_files(locations[1:2], folder, Storage())
    assert (merge_of_unknown.location, merge_of_unknown.unsupported) == (None, (locations[1],))


def test_merge_with_a_damaged_part_writes_no_file(index_writer: IndexWriter) -> None:
    first_location, second_location = index_writer.add({"a": [1, 2, 3]}), index_writer.add({"b": [3]})
    path = Path(first_location.removeprefix("file://"))
    data = bytearray(path.read_bytes())
    new_folder = index_writer.folder / "new"
    for offset in np.random.default_rng(3).integers(0, len(data), 40).tolist():
        damaged_bytes = data.copy()
        damaged_bytes[offset] ^= 0x40
        path.write_bytes(damaged_bytes)
        files_before = set(new_folder.glob("*"))
        try:
            merged_files = merge_index_files([first_location, second_location], new_folder.as_uri(), Storage())
        except (Corrupt, ValueError):
            assert set(new_folder.glob("*")) == files_before
            continue
        index_writer.check(merged_files.location, {"a", "b"})  # The changed byte belongs to no part that readers use.


def register_files(*levels_and_sizes: tuple[int, int]) -> list[RegisteredFile]:
    return [RegisteredFile(f"f{number}", level, size, number) for number, (level, size) in enumerate(levels_and_sizes)]


def test_lowest_full_level_is_merged_first() -> None:
    partly_full_levels = register_files(*[(0, 10)] * 3, *[(1, 100)] * 3)
    assert select_merge(partly_full_levels, fanout=4) == []
    full_levels = register_files(*[(1, 100)] * 4, *[(0, 10)] * 5)
    assert [file.level for file in select_merge(full_levels, fanout=4)] == [0] * 5


def test_merge_has_a_maximum_size_and_skips_large_files() -> None:
    files = register_files(*[(0, 30)] * 6)
    assert len(select_merge(files, fanout=4, size_max_bytes=100)) == 3
    assert select_merge(register_files(*[(2, 60)] * 9), fanout=4, size_max_bytes=100) == []


def test_files_in_the_former_folder_are_merged_if_no_level_is_full() -> None:
    former_files = [RegisteredFile(f"/t/{FORMER_INDEX_FOLDER}/{n}.puffin", 3, 60, n) for n in range(2)]
    files = [*register_files((0, 10), (0, 10)), *former_files]
    assert select_merge(files, fanout=4, size_max_bytes=200) == former_files
    assert select_merge(files, fanout=4, size_max_bytes=100) == former_files[:1]
    assert len(select_merge([*files, *register_files((0, 10), (0, 10))], fanout=4, size_max_bytes=100)) == 4


def test_number_of_index_files_stays_small_after_many_builds() -> None:
    files: list[RegisteredFile] = []
    copied_bytes = 0
    for number in range(4000):
        files.append(RegisteredFile(f"n{number}", 0, 10, number))
        while merged_files := select_merge(files, fanout=8, size_max_bytes=10**6):
            size = sum(file.size_bytes for file in merged_files)
            copied_bytes += size
            files = [file for file in files if file not in merged_files]
            files.append(RegisteredFile(f"m{number}-{len(files)}", merged_files[0].level + 1, size, number))
    # 8**4 is more than 4,000, so there are at most 5 levels of fewer than 8 files. The 10 bytes of each file are copied
    # once for each level.
    assert len(files) < 8 * 5
    assert copied_bytes < 4000 * 10 * 5
