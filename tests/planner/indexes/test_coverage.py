"""Tests that files of a view are found by their identities, whichever snapshot listed them first."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import ref

import numpy as np
import pytest

from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.metaserver.planner.indexes import coverage
from seamark.metaserver.planner.indexes.coverage import FileIds, Words, compute_view_file_ids
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.planner.scan.request import ScanRequest
from seamark.metaserver.planner.view.view import TableView
from tests.planner.lakes.history import write_random_lake
from tests.planner.lakes.lake import ContentFile
from tests.planner.lakes.tables import Table
from tests.planner.test_lookup import build_views, open_lookup_planner
from tests.seeds import examples


@pytest.fixture
async def planner(tmp_path: Path) -> AsyncIterator[Planner]:
    async with open_lookup_planner(tmp_path) as planner:
        yield planner


def build_ids(files: Sequence[ContentFile]) -> Words:
    """Return the identities of the files, computed by the function that index builders call."""
    actual_file_ids = [compute_file_ids([file.path], [file.size], [file.record_count]) for file in files]
    return np.concatenate([np.empty((0, 2), dtype=np.uint64), *actual_file_ids])


async def test_each_file_of_a_random_table_is_found_by_its_identity(tmp_path: Path) -> None:
    async with open_lookup_planner(tmp_path) as planner:
        searched_count, count = 0, examples(40, 4)
        for seed in range(count):
            lake = write_random_lake(seed, tmp_path / str(seed))
            rng = random.Random(seed)
            for _, snapshot, view in await build_views(lake, planner):
                files, text = list(snapshot.data_files), f"seed {seed}, snapshot {snapshot.id}"
                ids = FileIds(view)
                assert ids.count == len(files), text
                picked_numbers = rng.sample(range(len(files)), len(files) // 2)
                unknown_files = [replace(file, size=file.size + 1) for file in files[:3]]
                query_ids = build_ids([files[row] for row in picked_numbers] + unknown_files)
                rows = ids.find(query_ids)
                assert [files[row].path for row in rows[: len(picked_numbers)]] == [
                    files[row].path for row in picked_numbers
                ], text
                assert (rows[len(picked_numbers) :] == -1).all(), text
                paths = {files[row].path for row in picked_numbers}
                assert ids.mark_files_in(query_ids).tolist() == [file.path in paths for file in files], text
                searched_count += len(files)
        assert searched_count > 10 * count


async def test_file_listed_twice_is_described_at_both_positions(tmp_path: Path, planner: Planner) -> None:
    table = Table(tmp_path / "t")
    table.commit(1, [table.write_manifest("a", [1, 2]), table.write_manifest("b", [2, 3])])
    ids = compute_view_file_ids(await planner.view(table.metadata, ScanRequest()))
    query_ids = build_ids([table.make_file(2, 0), table.make_file(9, 0)])
    assert ids.mark_files_in(query_ids).tolist() == [False, True, True, False]
    assert ids.find(query_ids).tolist() in ([1, -1], [2, -1])


async def test_file_without_a_record_count_has_no_identity(
    tmp_path: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "t")
    uncounted_file = replace(table.make_file(1, 0), record_count=-1)
    monkeypatch.setattr(
        table, "make_file", lambda number, day: uncounted_file if number == 1 else Table.make_file(table, number, day)
    )
    table.commit(1, [table.write_manifest("a", [1, 2])])
    ids = compute_view_file_ids(await planner.view(table.metadata, ScanRequest()))
    assert ids.has_identity.tolist() == [False, True]
    # As an unsigned number, the record count -1 is 2**64 - 1.
    wrapped_ids = compute_file_ids([uncounted_file.path], [uncounted_file.size], np.array([2**64 - 1], dtype=np.uint64))
    assert not ids.mark_files_in(wrapped_ids).any()


async def test_empty_view_has_no_file_identities(planner: Planner) -> None:
    ids = FileIds(TableView((), ()))
    queries = np.array([[1, 2]], dtype=np.uint64)
    assert (ids.count, ids.find(queries).tolist(), ids.mark_files_in(queries).tolist()) == (0, [-1], [])
    assert FileIds(TableView((), ())).find(np.empty((0, 2), dtype=np.uint64)).tolist() == []


def test_identities_with_the_same_first_half_are_distinguished() -> None:
    rng = random.Random(5)
    pairs = sorted({(rng.randrange(3), rng.randrange(50)) for _ in range(100)})
    sorted_pairs = np.array(pairs, dtype=np.uint64)
    queries = [(high, low) for high in range(4) for low in range(50)]
    found_ids = coverage.find_ids(sorted_pairs, np.array(queries, dtype=np.uint64)).tolist()
    assert found_ids == [pairs.index(item) if item in pairs else -1 for item in queries]


async def test_snapshots_share_file_identities_of_common_manifests_until_their_release(
    tmp_path: Path, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified_counts = []
    identify = coverage._compute_block_ids
    monkeypatch.setattr(
        coverage, "_compute_block_ids", lambda view: identified_counts.append(view.file_count) or identify(view)
    )
    table = Table(tmp_path / "t")
    first_manifest = table.write_manifest("a", range(5))
    table.commit(1, [first_manifest])
    table.commit(2, [table.write_manifest("b", range(5, 8), snapshot_id=2), first_manifest])
    view = await planner.view(table.metadata, ScanRequest(snapshot_id=1))
    ids = compute_view_file_ids(view)
    assert compute_view_file_ids(view) is ids
    assert ids.size_bytes == 5 * 24, "an identity has 16 bytes, and its position has 8 bytes"
    compute_view_file_ids(await planner.view(table.metadata, ScanRequest(snapshot_id=2)))
    assert identified_counts == [5, 3]
    plain_view = TableView(view.manifests, view.blocks)
    removed_ref = ref(compute_view_file_ids(plain_view))
    del plain_view
    gc.collect()
    assert removed_ref() is None
