"""Tests of engine commits that a table service overtook: none is rejected, and no row is added, lost or changed.

Between any snapshot and its parent, the server may rewrite manifests, or replace files by others with the same rows. An
append is rebased onto these changes. A commit that deletes rows undoes the replacements.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from seamark.formats.iceberg.metadata.compaction import REPLACEMENTS_UNDONE
from seamark.formats.iceberg.metadata.manifest_policy import REWRITTEN_BY_MARK
from seamark.formats.runtime.errors import CommitConflict
from seamark.metaserver.commit.rewriting.manifest_rewrite import RewriteManifestsRequest
from tests.catalog.appender import Commit, EngineAppender, LiveFile, Row, read_list, read_manifest, read_snapshot
from tests.catalog.appends import DB, find_head_snapshot, get_added_snapshot
from tests.catalog.rig import CALLER
from tests.seeds import first_seed, mark_fast
from tests.server.rig import RunningServer, run_server


class ServedTable:
    """A table of a running server, changed through the server's components."""

    def __init__(self, server: RunningServer) -> None:
        self.server, self.components = server, server.components

    async def create(self, version: int) -> None:
        schema = {"type": "struct", "fields": [{"id": 1, "name": "id", "required": True, "type": "long"}]}
        properties = {"format-version": str(version), "seamark.manifests.min-count": "2"}
        body = {"name": "t", "schema": schema, "properties": properties}
        async with self.server.http.post(f"{self.server.url}/v1/namespaces/db/tables", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def load(self) -> Row:
        _, loaded_table = await self.server.get("/v1/namespaces/db/tables/t?snapshots=all")
        metadata: Row = loaded_table["metadata"]
        return metadata

    async def commit(self, commit: Commit) -> None:
        await self.components.engine_commits.commit_table(CALLER, DB, "t", *commit)

    async def rewrite(self) -> bool:
        rewrite = await self.components.manifest_rewrite.rewrite(CALLER, DB, "t", RewriteManifestsRequest())
        return rewrite.snapshot_id is not None


@asynccontextmanager
async def open_services_table(folder: Path, version: int) -> AsyncIterator[ServedTable]:
    async with run_server(folder, services_workers=0) as server:
        table = ServedTable(server)
        await table.create(version)
        yield table


@dataclass
class PendingCommit:
    """A commit that an engine has prepared. `rows_version` is the version of the rows that it read."""

    client: EngineAppender
    request: Commit
    files: dict[str, int]
    removed_files: list[str]
    deletes: list[str]
    rows_version: int
    files_before: dict[str, int]


@dataclass
class ServiceHistory:
    """Engines that load, wait and commit late.

    A commit is rejected only if another commit has changed rows since the engine loaded the table.
    """

    table: ServedTable
    rng: random.Random
    files: dict[str, int] = field(default_factory=dict)
    """The record counts of the live data files, by path."""
    deletes: set[str] = field(default_factory=set)
    numbers: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    row_ids: dict[str, int | None] = field(default_factory=dict)
    count = rows_version = late_commits = undone = 0

    async def begin(self, merge: int | None = None) -> PendingCommit:
        """Build a random commit on the current snapshot, without sending it.

        The commit writes the entries of `merge` old manifests into its own manifest, or those of a random number of
        manifests by default. In three commits of ten, these entries are in a separate manifest.
        """
        rng, files = self.rng, self.files
        added_files: dict[str, int] = {}
        for _ in range(rng.randint(1, 3)):
            self.count += 1
            added_files[f"file-{self.count}"] = rng.randint(1, 9)
        removed_files = rng.sample(sorted(files), min(len(files), rng.choice([0, 0, 1, 2])))
        removed_files += rng.sample(sorted(self.deletes), min(len(self.deletes), rng.choice([0, 0, 1])))
        deletes = [f"deletes-{self.count}-{number}" for number in range(rng.choice([0, 0, 1, 2]))]
        if merge is None:
            merge = rng.choice([0, 0, 1, 2, 9])
        client = EngineAppender(await self.table.load(), merge=merge, writes_merged_entries_apart=rng.random() < 0.3)
        return PendingCommit(
            client,
            client.commit(added_files, removed_files, deletes),
            added_files,
            removed_files,
            deletes,
            self.rows_version,
            dict(files),
        )

    async def finish(self, pending_commit: PendingCommit) -> None:
        """Send a pending commit, and check its outcome against the commits that were made after `begin`."""
        if pending_commit.rows_version != self.rows_version:
            with pytest.raises(CommitConflict):
                await self.table.commit(pending_commit.request)
            return
        head_id = (await self.table.load()).get("current-snapshot-id")
        await self.table.commit(pending_commit.request)
        metadata = await self.table.load()
        snapshot = find_head_snapshot(metadata)
        assert snapshot["snapshot-id"] == pending_commit.client.snapshot_id
        if (
            pending_commit.client.expected_snapshot_id is not None
            and head_id != pending_commit.client.expected_snapshot_id
        ):
            self.late_commits += 1
            is_undo = bool(snapshot["summary"].get(REPLACEMENTS_UNDONE))
            assert snapshot["parent-snapshot-id"] == (
                pending_commit.client.expected_snapshot_id if is_undo else head_id
            )
            # The server may write the manifests of an append again if the append merged old manifests.
            if pending_commit.removed_files or pending_commit.deletes:
                manifest_paths = {row["manifest_path"] for row in read_list(snapshot)}
                assert set(pending_commit.client.manifests) <= manifest_paths
        if pending_commit.removed_files or pending_commit.deletes or snapshot["summary"].get(REPLACEMENTS_UNDONE):
            self.undone += self.files != pending_commit.files_before
            self.files = dict(pending_commit.files_before)
        self.files.update(pending_commit.files)
        for path in pending_commit.removed_files:
            self.files.pop(path, None)
        self.deletes = (self.deletes | set(pending_commit.deletes)) - set(pending_commit.removed_files)
        self.rows_version += 1
        self.check(metadata, f"version {self.rows_version}")

    async def replace(self) -> None:
        """Compact up to four files into one file with the same number of rows."""
        metadata = await self.table.load()
        removed_files = self.rng.sample(sorted(self.files), min(len(self.files), self.rng.randint(1, 4)))
        self.count += 1
        path = f"{metadata['location']}/data/merged-{self.count}.parquet"
        records = sum(self.files[removed] for removed in removed_files)
        file = {"content": "data", "file-path": path, "file-format": "parquet", "spec-id": 0, "partition": []}
        body = {
            "operation": "replace",
            "read-snapshot-id": metadata["current-snapshot-id"],
            "add": [{**file, "file-size-in-bytes": 100, "record-count": records}],
            "remove": [{"file-path": removed} for removed in removed_files],
        }
        url = f"{self.table.server.url}/api/v1/tables/db/t/commit"
        async with self.table.server.http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
        for removed in removed_files:
            del self.files[removed]
        self.files[path] = records
        self.check(await self.table.load(), "replaced")

    async def run(self, rounds: int) -> None:
        for _ in range(rounds):
            for _ in range(self.rng.randint(2, 4)):
                await self.finish(await self.begin(merge=0))
            pending_commits = [await self.begin() for _ in range(self.rng.choice([1, 1, 2]))]
            for _ in range(self.rng.choice([1, 1, 2])):
                if self.rng.random() < 0.5:
                    await self.replace()
                elif await self.table.rewrite():
                    self.check(await self.table.load(), "rewritten")
            self.rng.shuffle(pending_commits)
            for commit in pending_commits:
                await self.finish(commit)

    def check(self, metadata: Row, label: str) -> None:
        """Check that the live files are those of the engines, with their original sequence numbers and row ids."""
        snapshot = find_head_snapshot(metadata)
        live_files: dict[int, dict[str, LiveFile]] = {0: {}, 1: {}}
        for row in read_list(snapshot):
            for file in read_manifest(row):
                assert file.path not in live_files[row["content"]], f"{label}: {file.path} occurs twice"
                live_files[row["content"]][file.path] = file
        assert {path: file.records for path, file in live_files[0].items()} == self.files, label
        assert live_files[1].keys() == self.deletes, label
        totals = [int(snapshot["summary"][f"total-{counter}"]) for counter in ("data-files", "records")]
        assert totals == [len(self.files), sum(self.files.values())], label
        for path, file in (live_files[0] | live_files[1]).items():
            numbers = file.snapshot_id, file.sequence_number, file.file_sequence_number
            assert self.numbers.setdefault(path, numbers) == numbers, f"{label}: {path} was renumbered"
        if metadata["format-version"] > 2:
            first_row_ids = {path: file.first_row_id for path, file in live_files[0].items()}
            for path, first_row_id in first_row_ids.items():
                assert self.row_ids.setdefault(path, first_row_id) == first_row_id, (
                    f"{label}: the rows of {path} were renumbered"
                )
            spans = sorted(
                (first_row_id, first_row_id + self.files[path])
                for path, first_row_id in first_row_ids.items()
                if first_row_id is not None
            )
            assert len(spans) == len(first_row_ids), label
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), label
            assert all(end <= metadata["next-row-id"] for _, end in spans), label


@pytest.mark.parametrize("version", mark_fast([3, 2], 1))
async def test_commit_is_not_rejected_because_of_rewritten_manifests_or_files(tmp_path: Path, version: int) -> None:
    late_commits = undone = 0
    for case in range(3):
        async with open_services_table(tmp_path / str(case), version) as table:
            print(f"seed {first_seed()}, version {version}, case {case}")
            history = ServiceHistory(table, random.Random(f"{first_seed()} {version} {case}"))
            await history.run(8)
            late_commits += history.late_commits
            undone += history.undone
    # Only commits that are based on an old snapshot test the rule: a rewrite of manifests or files is no conflict.
    assert late_commits > 15
    assert undone > 3


async def test_undone_replacement_is_removed_from_the_history(tmp_path: Path) -> None:
    """A commit that removes a replaced file undoes the replacement: the other old files are live again.

    The replacement leaves the history, because Iceberg's expiration deletes the files that a snapshot of the history
    removed, also if they are live. A commit that names the new file must be rejected.
    """
    async with open_services_table(tmp_path, version=2) as table:
        await table.commit(EngineAppender(await table.load()).commit({"a": 1, "b": 2, "c": 3}))
        table_before = await table.load()
        pending_append = EngineAppender(table_before).commit({}, ["a"])
        history = ServiceHistory(table, random.Random(1), files={"a": 1, "b": 2, "c": 3})
        await history.replace()
        replaced_table = await table.load()
        (new_path,) = set(read_snapshot(find_head_snapshot(replaced_table))) - {"a", "b", "c"}
        await table.commit(pending_append)
        undone_table = await table.load()
        assert find_head_snapshot(undone_table)["summary"][REPLACEMENTS_UNDONE] == str(
            replaced_table["current-snapshot-id"]
        )
        assert find_head_snapshot(undone_table)["parent-snapshot-id"] == table_before["current-snapshot-id"]
        deletes = {
            "content": "position-deletes",
            "file-path": f"{table_before['location']}/data/d.parquet",
            "spec-id": 0,
        }
        deletes |= {"file-format": "parquet", "partition": [], "file-size-in-bytes": 9, "record-count": 1}
        body = {
            "operation": "delete",
            "read-snapshot-id": replaced_table["current-snapshot-id"],
            "add": [{**deletes, "referenced-data-file": new_path}],
        }
        url = f"{table.server.url}/api/v1/tables/db/t/commit"
        async with table.server.http.post(url, json=body) as answer:
            assert answer.status == 409, await answer.text()


async def test_undone_replacement_stays_in_the_history_for_an_earlier_expiration(tmp_path: Path) -> None:
    """A commit undoes two replacements of files, and an expiration that began before it removes their snapshots.

    The server keeps these snapshots. Otherwise Iceberg's incremental clean-up would delete the files that the
    replacements had removed and that are live again.
    """
    async with open_services_table(tmp_path, version=2) as table:
        await table.commit(EngineAppender(await table.load()).commit({"a": 1, "b": 2, "c": 3}))
        pending_commit = EngineAppender(await table.load()).commit({}, ["a"])
        history = ServiceHistory(table, random.Random(1), files={"a": 1, "b": 2, "c": 3})
        for _ in range(2):
            await history.replace()
        snapshot_ids = [snapshot["snapshot-id"] for snapshot in (await table.load())["snapshots"]]
        await table.commit(pending_commit)
        undone_ids = snapshot_ids[1:]
        assert find_head_snapshot(await table.load())["summary"][REPLACEMENTS_UNDONE] == ",".join(
            map(str, reversed(undone_ids))
        )
        await table.commit(([], [{"action": "remove-snapshots", "snapshot-ids": snapshot_ids}]))
        assert {snapshot["snapshot-id"] for snapshot in (await table.load())["snapshots"]} > set(undone_ids)
        assert snapshot_ids[0] not in {snapshot["snapshot-id"] for snapshot in (await table.load())["snapshots"]}


async def test_snapshot_with_a_false_mark_of_rewritten_manifests_is_not_trusted(tmp_path: Path) -> None:
    """The server marks the snapshots in which it changed only manifests, because they conflict with no commit.

    Any client can write this mark into the summary of a snapshot that removes a file.
    """
    async with open_services_table(tmp_path, version=2) as table:
        await table.commit(EngineAppender(await table.load()).commit({"a": 1, "b": 2}))
        pending_commit = EngineAppender(await table.load()).commit({}, ["a"])
        name, value = REWRITTEN_BY_MARK
        forged_summary = {"operation": "replace", name: value}
        request = EngineAppender(await table.load()).commit({}, ["b"])
        get_added_snapshot(request)["summary"] = forged_summary
        await table.commit(request)
        with pytest.raises(CommitConflict):
            await table.commit(pending_commit)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("operation", "merge"), [("replace", 0), ("replace", 9), ("overwrite", 0), ("delete", 0)])
async def test_append_is_rebased_over_replaced_files_but_rejected_after_changed_rows(
    tmp_path: Path, operation: str, merge: int
) -> None:
    """The table does not have the property that rebases all appends.

    With `merge=9`, the append has also written the entries of all three old manifests into its own manifest.
    """
    async with open_services_table(tmp_path, version=2) as table:
        for path in "abc":
            await table.commit(EngineAppender(await table.load()).commit({path: 1}))
        pending_commit = EngineAppender(await table.load(), merge=merge).commit({"late": 5})
        compaction = EngineAppender(await table.load()).commit({"abc": 3}, ["a", "b", "c"])
        get_added_snapshot(compaction)["summary"]["operation"] = operation
        await table.commit(compaction)
        if operation == "replace":
            await table.commit(pending_commit)
            assert read_snapshot(find_head_snapshot(await table.load())).keys() == {"abc", "late"}
        else:
            with pytest.raises(CommitConflict):
                await table.commit(pending_commit)


async def test_append_is_not_rebased_over_a_replacement_that_adds_rows(tmp_path: Path) -> None:
    """The server accepts a snapshot with the operation `replace` that adds rows, and reports it as a problem.

    It counts as a change of rows, so an append that is based on the snapshot before it is rejected.
    """
    async with open_services_table(tmp_path, version=2) as table:
        await table.commit(EngineAppender(await table.load()).commit({"a": 1}))
        table_before = await table.load()
        pending_commit = EngineAppender(table_before).commit({"late": 5})
        wrong_replacement = EngineAppender(await table.load()).commit({"b": 3}, ["a"])
        get_added_snapshot(wrong_replacement)["summary"]["operation"] = "replace"
        await table.commit(wrong_replacement)
        with pytest.raises(CommitConflict):
            await table.commit(pending_commit)
        file = {"content": "data", "file-path": f"{table_before['location']}/data/c.parquet", "file-format": "parquet"}
        request = {  # The committing client has read all rows.
            "read-snapshot-id": table_before["current-snapshot-id"],
            "scope": {"filter": True},
            "add": [{**file, "spec-id": 0, "partition": [], "file-size-in-bytes": 100, "record-count": 1}],
        }
        async with table.server.http.post(f"{table.server.url}/api/v1/tables/db/t/commit", json=request) as answer:
            assert answer.status == 409, await answer.text()
        results = {}
        for route in ("health", "timeline"):
            async with table.server.http.get(f"{table.server.url}/api/v1/tables/db/t/{route}") as answer:
                assert answer.status == 200, await answer.text()
                results[route] = await answer.json()
    assert "replacement with other rows" in {problem["problem"] for problem in results["health"]["problems"]}
    (other_row,) = [
        instant["summary"]["other-rows"]
        for instant in results["timeline"]["instants"]
        if "other-rows" in instant["summary"]
    ]
    assert other_row == "the commit adds 3 rows and removes 1"
