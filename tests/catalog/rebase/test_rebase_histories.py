"""Tests of random histories of engines with overtaken appends. The files of the table equal plain sets of files."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.catalog.appender import Commit, EngineAppender, Row, read_snapshot
from tests.catalog.appends import commit_table, create_rebasing_table, find_head_snapshot, load_metadata
from tests.catalog.rig import CatalogRig, open_rig
from tests.seeds import mark_fast


@dataclass
class BranchModel:
    """The expected state of the table as plain sets."""

    branches: dict[str, dict[str, int]] = field(default_factory=lambda: {"main": {}})
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    """The sequence number of each file, by (branch, path). It never changes."""
    row_ids: dict[tuple[str, str], int] = field(default_factory=dict)
    """The first row id of each file, by (branch, path). It never changes after it is assigned."""

    def check_and_record(self, metadata: Row, label: str) -> None:
        """Check the files and totals of each branch, and that no sequence number or row id of a file has changed.

        The numbers of new files are recorded for the next check.
        """
        for branch, expected in self.branches.items():
            if branch not in metadata["refs"]:
                assert expected == {}, label
                continue
            snapshot = find_head_snapshot(metadata, branch)
            files = read_snapshot(snapshot)
            assert {path: file.records for path, file in files.items()} == expected, f"{label}: {branch}"
            totals = [int(snapshot["summary"][f"total-{counter}"]) for counter in ("data-files", "records")]
            assert totals == [len(expected), sum(expected.values())], label
            for path, file in files.items():
                original_sequence = self.numbers.setdefault((branch, path), file.sequence_number)
                assert original_sequence == file.sequence_number, f"{label}: {path} was renumbered"
                if file.first_row_id is not None or (branch, path) in self.row_ids:
                    original_row_id = self.row_ids.setdefault((branch, path), file.first_row_id or 0)
                    assert original_row_id == file.first_row_id, f"{label}: the rows of {path} were renumbered"
            if "first-row-id" in snapshot:
                self._check_rows(files, metadata, label)
        numbers = [snapshot["sequence-number"] for snapshot in metadata["snapshots"]]
        assert len(set(numbers)) == len(numbers), label

    def _check_rows(self, files: dict[str, Any], metadata: Row, label: str) -> None:
        spans = sorted((file.first_row_id, file.first_row_id + file.records) for file in files.values())
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert end <= start, f"{label}: two files have the same row ids"
        assert all(end <= metadata["next-row-id"] for _, end in spans), label


@dataclass
class AppendHistory:
    """A random history of engines that load, wait, and commit late. Every append must succeed."""

    rig: CatalogRig
    rng: random.Random
    model: BranchModel = field(default_factory=BranchModel)
    clients: list[tuple[EngineAppender, Commit, dict[str, int]]] = field(default_factory=list)
    file_count: int = 0

    async def begin(self) -> None:
        """Let a client write all its files without committing them."""
        metadata = await load_metadata(self.rig)
        # Most clients write to main, so many commits on one branch are based on the same snapshot. Half of the clients
        # merge no old manifests, and the others one, two or all.
        branch = self.rng.choice(["main", "main", "main", *metadata.get("refs", {})])
        files = {}
        for _ in range(self.rng.randint(1, 3)):
            self.file_count += 1
            files[f"file-{self.file_count}"] = self.rng.randint(1, 9)
        merge, writes_merged_entries_apart = self.rng.choice([0, 0, 0, 1, 2, 9]), self.rng.random() < 0.3
        client = EngineAppender(
            metadata, branch=branch, merge=merge, writes_merged_entries_apart=writes_merged_entries_apart
        )
        self.clients.append((client, client.commit(files), files))

    async def finish(self) -> None:
        if self.clients:
            client, request, files = self.clients.pop(self.rng.randrange(len(self.clients)))
            committed_table = await commit_table(self.rig, request)
            assert committed_table.metadata.refs[client.branch].snapshot_id == client.snapshot_id
            self.model.branches[client.branch].update(files)

    async def delete(self) -> None:
        metadata = await load_metadata(self.rig)
        files = self.model.branches["main"]
        if files:
            removed_files = self.rng.sample(sorted(files), self.rng.randint(1, min(3, len(files))))
            await commit_table(self.rig, EngineAppender(metadata).commit({}, removed_files))
            for path in removed_files:
                del files[path]

    async def create_branch(self) -> None:
        metadata = await load_metadata(self.rig)
        if "main" in metadata.get("refs", {}) and "dev" not in self.model.branches:
            snapshot_id = find_head_snapshot(metadata)["snapshot-id"]
            create = {"action": "set-snapshot-ref", "ref-name": "dev", "type": "branch", "snapshot-id": snapshot_id}
            await commit_table(self.rig, ([], [create]))
            self.model.branches["dev"] = dict(self.model.branches["main"])

    async def upgrade_to_version_3(self) -> None:
        await commit_table(self.rig, ([], [{"action": "upgrade-format-version", "format-version": 3}]))

    async def run(self, steps: int, *, upgrades: bool, label: str) -> None:
        possible_steps: list[Callable[[], Any]] = (
            [self.begin] * 5 + [self.finish] * 4 + [self.delete, self.create_branch]
        )
        for step in range(steps):
            change = self.rng.choice(possible_steps)
            if upgrades and step == steps // 2:
                self.clients.clear()  # Engines that loaded version 2 cannot commit to version 3.
                change = self.upgrade_to_version_3
            await change()
            metadata = await load_metadata(self.rig)
            if metadata.get("refs"):
                self.model.check_and_record(metadata, f"{label}, step {step}, {change.__name__}")
            else:
                assert self.model.branches == {"main": {}}


@pytest.mark.each_value
@pytest.mark.parametrize("seed", mark_fast(range(6), 1))
@pytest.mark.parametrize(("version", "upgrades"), [(2, False), (3, False), (2, True)])
async def test_files_after_random_late_appends_equal_a_plain_set(
    tmp_path: Path, seed: int, version: int, upgrades: bool
) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version)
        await AppendHistory(rig, random.Random(seed)).run(
            40, upgrades=upgrades, label=f"seed {seed}, version {version}"
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "upgrades"), [(2, False), (3, False), (2, True)])
async def test_files_after_long_histories_of_late_appends_equal_a_plain_set(
    tmp_path: Path, version: int, upgrades: bool
) -> None:
    for seed in range(100, 140):
        async with open_rig(tmp_path / str(seed)) as rig:
            await create_rebasing_table(rig, version)
            await AppendHistory(rig, random.Random(seed)).run(
                60, upgrades=upgrades, label=f"seed {seed}, version {version}"
            )
