"""Merged groups equal the sum of the entries of their files, with any segments in the cache."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from seamark.cache.memory import MemoryCache
from seamark.cache.opening import open_stack
from seamark.formats.iceberg.expressions.expression import TRUE
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.keys.measures import parse_measure
from seamark.formats.index.keys.terms import resolve_term
from seamark.formats.index.kinds.cube import CUBE, build_entry_schema
from seamark.metaserver.planner.cubes import segments as segments_module
from seamark.metaserver.planner.cubes.file_tree import FileGroup, FileTree
from seamark.metaserver.planner.cubes.segments import Segments, SegmentTooLarge
from tests.seeds import examples, first_seed

COLUMNS = Schema((Field(1, "country", False, "string"), Field(2, "n", False, "long")))
DEFINITION = IndexDefinition(
    "c", "cube", (resolve_term("country", COLUMNS),), measures=(parse_measure("sum(n)", COLUMNS),)
)
ENTRY: Any = SimpleNamespace(uuid="table", index_version=1)


def build_file_id(number: int) -> tuple[int, int]:
    """Return the identity of a data file, which is random for each number."""
    rng = random.Random(number)
    return rng.getrandbits(64), rng.getrandbits(64)


def hash_file_ids(numbers: Iterable[int]) -> Any:
    return np.array([build_file_id(number) for number in numbers], dtype=np.uint64).reshape(-1, 2)


def build_groups(number: int, *, factor: int = 1) -> dict[str, int]:
    """Return the sum of `n` for each country in data file `number`, multiplied by `factor`."""
    rng = random.Random(-1 - number)
    return {country: rng.randint(-9, 9) * factor for country in rng.sample("abcdefg", rng.randint(0, 5))}


class CubeIndexFiles:
    """Index files of one cube, with the interface of the registry and of the cache of index files."""

    def __init__(self) -> None:
        self.version = 0
        self.files: list[Any] = []
        self._open_files: dict[str, Any] = {}
        self.reported_files: set[str] = set()

    def add(self, location: str, numbers: Sequence[int], *, factor: int = 1, damaged: bool = False) -> None:
        """Register an index file with the entries of data files.

        Args:
            numbers: The numbers of the data files.
            factor: A factor of the sums, by which a test distinguishes versions of an entry.
            damaged: Whether a column of the entries has a wrong name.
        """
        schema = build_entry_schema(DEFINITION.terms, DEFINITION.measures)
        batches = []
        for number in numbers:
            sums = build_groups(number, factor=factor)
            columns = [list(sums), [1] * len(sums), list(sums.values())]
            arrays = [pa.array(values).cast(field.type) for values, field in zip(columns, schema, strict=True)]
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema))
        if damaged:
            batches = [batch.rename_columns(["d0", "m0", "other"]) for batch in batches]
        index = CUBE.open(memoryview(b"".join(map(bytes, CUBE.encode(batches)))))
        self._open_files[location] = SimpleNamespace(
            location=location, files=SimpleNamespace(ids=hash_file_ids(numbers)), index=index
        )
        self.files.append(SimpleNamespace(location=location))
        self.version += 1

    def remove(self, location: str) -> None:
        self.files = [file for file in self.files if file.location != location]
        self.version += 1

    async def open(self, file: Any) -> Any:
        return self._open_files[file.location]

    def schedule_verification(self, files: Sequence[Any], _: str) -> None:
        self.reported_files |= {file.location for file in files}

    async def load_files(self, _: object) -> Any:
        live_files = tuple(self.files)
        return SimpleNamespace(version=self.version, list_live_files=lambda _: live_files)


@asynccontextmanager
async def open_segments(
    index_files: CubeIndexFiles, folder: Path, *, memory_bytes: int = 1 << 20
) -> AsyncIterator[Segments]:
    """Open a reader of the merged groups of cubes, which stores them in a memory cache and a disk cache of 1 MiB."""
    async with open_stack(
        MemoryCache[str, pa.Table](memory_bytes),
        weigh=lambda table: int(table.nbytes),
        pending_bytes_max=1 << 20,
        folder=folder / "cubes",
        disk_bytes=1 << 20,
        threads=1,
        name="test",
    ) as stack:
        indexes: Any = index_files
        registry: Any = SimpleNamespace(load_files=index_files.load_files)
        yield Segments(indexes, registry, stack)


def sum_groups(table: pa.Table) -> Counter[tuple[str, int]]:
    """Return, for each country, the number of rows with the key (country, 0), and the sum with the key (country, 1)."""
    sums: Counter[tuple[str, int]] = Counter()
    for row in table.to_pylist():
        sums[row["d0"], 0] += row["m0"]
        sums[row["d0"], 1] += int(row["m1"])
    return sums


async def read_parts(segments: Segments, numbers: Sequence[int]) -> tuple[list[int], Counter[tuple[str, int]]]:
    """Return the data files in all parts, and the sums of the groups in these parts.

    A part has the groups of some of the requested data files. `numbers` are the numbers of the requested files.
    """
    files, sums = list[int](), Counter[tuple[str, int]]()
    async for part in segments.read_parts(ENTRY, DEFINITION, hash_file_ids(numbers)):
        files += [numbers[file] for file in part.files.tolist()]
        sums.update(sum_groups(part.groups.select(TRUE, part.groups.schema.names)))
    return sorted(files), sums


def compute_expected_sums(numbers: Iterable[int], *, factor: int = 1) -> Counter[tuple[str, int]]:
    sums: Counter[tuple[str, int]] = Counter()
    for number in numbers:
        for country, value in build_groups(number, factor=factor).items():
            sums[country, 0] += 1
            sums[country, 1] += value
    return sums


def check_tree(tree: FileTree, group: FileGroup) -> None:
    """Check that the subgroups of each group cover all its files, without a gap or an overlap."""
    members = tree.list_subgroups(group)
    if members:
        assert (members[0].first, members[-1].end) == (group.first, group.end)
        assert all(left.end == right.first for left, right in pairwise(members))
    for member in members:
        check_tree(tree, member)


def test_groups_of_a_tree_depend_on_their_files_alone() -> None:
    numbers = list(range(3000))
    ids, sources = hash_file_ids(numbers), np.zeros(3000, dtype=np.uint64)

    def read_digests(numbers: list[int]) -> set[str]:
        tree = FileTree(ids[numbers], sources[numbers])
        check_tree(tree, tree.root)
        pending_nodes, keys = [tree.root], set[str]()
        while pending_nodes:
            group = pending_nodes.pop()
            keys.add(tree.digest(group))
            pending_nodes += tree.list_subgroups(group)
        return keys

    whole_digests = read_digests(numbers)
    assert 60 < len(whole_digests) < 200
    digests_without_file = read_digests([number for number in numbers if number != 1500])
    assert len(digests_without_file - whole_digests) <= 3, "only one group of each level may have a different digest"
    assert len(read_digests([*numbers[1000:], *numbers[:1000]]) - whole_digests) <= 9, (
        "most groups must keep their digests when the files have another order"
    )
    moved_tree = FileTree(ids, sources + 1)
    assert moved_tree.digest(moved_tree.root) not in whole_digests, (
        "entries in different index files must have different segments"
    )


async def _run_case(seed: int, folder: Path) -> None:
    """Change index files and snapshots at random, and compare the merged groups with the entries."""
    rng = random.Random(seed)
    index_files, snapshots, next_number = CubeIndexFiles(), [list[int]()], 0
    numbers_by_segment: dict[str, list[int]] = {}
    for restart in range(2):
        async with open_segments(index_files, folder, memory_bytes=rng.choice((2_000, 1 << 20))) as segments:
            for step in range(6):
                added_numbers = list(range(next_number, next_number + rng.choice((1, 20, 80))))
                next_number += len(added_numbers)
                parent = rng.choice(snapshots[-3:])  # A branch, a rollback, or an append to the newest snapshot.
                removed_numbers = set(rng.sample(parent, min(len(parent), rng.choice((0, 0, 1, 20)))))
                snapshots.append([number for number in parent if number not in removed_numbers] + added_numbers)
                if rng.random() < 0.8:
                    numbers_by_segment[f"{restart}-{step}"] = added_numbers
                    index_files.add(f"{restart}-{step}", added_numbers)
                if len(numbers_by_segment) > 2 and rng.random() < 0.3:  # A merge of index files.
                    location, other_location = rng.sample(sorted(numbers_by_segment), 2)
                    merged_numbers = numbers_by_segment.pop(location) + numbers_by_segment.pop(other_location)
                    index_files.remove(location)
                    index_files.remove(other_location)
                    merged_location = f"{location}+{other_location}"[-60:]  # The name must not grow with each merge.
                    index_files.add(merged_location, merged_numbers)
                    numbers_by_segment[merged_location] = merged_numbers
                if rng.random() < 0.2:
                    for path in (folder / "cubes").rglob("*"):  # Simulate a damaged disk.
                        if path.is_file() and rng.random() < 0.3 and path.suffix != ".db":
                            data = bytearray(path.read_bytes())
                            if data:
                                data[rng.randrange(len(data))] ^= 1
                                path.write_bytes(data)
                for snapshot in rng.sample(snapshots, min(3, len(snapshots))):
                    covered_numbers = {number for numbers in numbers_by_segment.values() for number in numbers}
                    queried_numbers = snapshot[rng.randint(0, len(snapshot) // 2) :] if rng.random() < 0.3 else snapshot
                    merged_groups = await segments.read(
                        ENTRY, DEFINITION, hash_file_ids(queried_numbers), stores_all=rng.random() < 0.7
                    )
                    assert merged_groups.covered.tolist() == [
                        number in covered_numbers for number in queried_numbers
                    ], seed
                    expected = compute_expected_sums(number for number in queried_numbers if number in covered_numbers)
                    assert sum_groups(merged_groups.table) == expected, seed
                    assert await read_parts(segments, queried_numbers) == (
                        sorted(covered_numbers & set(queried_numbers)),
                        expected,
                    ), seed


@pytest.mark.slow
async def test_merged_groups_equal_the_entries_after_random_changes(tmp_path: Path) -> None:
    for seed in range(first_seed(), first_seed() + examples(40, 1)):
        await _run_case(seed, tmp_path / str(seed))


@pytest.mark.slow
async def test_commit_of_one_file_reads_few_entries(tmp_path: Path) -> None:
    index_files, numbers = CubeIndexFiles(), list(range(500))
    index_files.add("first", numbers)
    async with open_segments(index_files, tmp_path) as segments:
        await segments.read(ENTRY, DEFINITION, hash_file_ids(numbers))
        assert segments.stats.entries_read == 500
        index_files.add("second", [500])
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids([*numbers, 500]))
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(501))
        assert segments.stats.entries_read < 700
    async with open_segments(index_files, tmp_path) as segments:
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids([*numbers, 500]))
        assert segments.stats.entries_read == 0, "after a restart, segments must come from the disk"
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(501))


async def test_segment_is_not_read_after_its_index_file_was_quarantined(tmp_path: Path) -> None:
    index_files = CubeIndexFiles()
    index_files.add("wrong", range(50), factor=2)
    async with open_segments(index_files, tmp_path) as segments:
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids(range(50)))
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(50), factor=2)
        index_files.remove("wrong")
        assert not (await segments.read(ENTRY, DEFINITION, hash_file_ids(range(50)))).covered.any()
        index_files.add("right", range(50))
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids(range(50)))
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(50))


async def test_damaged_index_file_is_reported_and_covers_no_file(tmp_path: Path) -> None:
    index_files = CubeIndexFiles()
    index_files.add("damaged", range(20), damaged=True)
    index_files.add("whole", range(20, 40))
    async with open_segments(index_files, tmp_path) as segments:
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids(range(40)))
        assert merged_segments.covered.tolist() == [False] * 20 + [True] * 20
        assert index_files.reported_files == {"damaged"}
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(20, 40))
        index_files.reported_files.clear()
        assert await read_parts(segments, range(40)) == (list(range(20, 40)), compute_expected_sums(range(20, 40)))
        assert index_files.reported_files == {"damaged"}


async def test_groups_above_a_limit_are_read_once_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "GROUPS_MAX", 3)
    monkeypatch.setattr(segments_module, "_UNCOMBINED_GROUPS_MAX", 5)
    index_files = CubeIndexFiles()
    index_files.add("first", range(100))
    async with open_segments(index_files, tmp_path) as segments:
        with pytest.raises(SegmentTooLarge, match="exceed 3 groups"):
            await segments.read(ENTRY, DEFINITION, hash_file_ids(range(100)))
        entries_read = segments.stats.entries_read
        for stores_all in (True, False):
            with pytest.raises(SegmentTooLarge, match="exceed 3 groups"):
                await segments.read(ENTRY, DEFINITION, hash_file_ids(range(100)), stores_all=stores_all)
        assert segments.stats.entries_read == entries_read > 0, "the groups are not merged again"
        merged_segments = await segments.read(ENTRY, DEFINITION, hash_file_ids(range(2)))
        assert sum_groups(merged_segments.table) == compute_expected_sums(range(2)), (
            "two files have fewer groups than the limit"
        )
        assert await read_parts(segments, range(100)) == (list(range(100)), compute_expected_sums(range(100)))
        assert segments.stats.merged > 0
