"""Tests of appends that other commits overtook: their result, when they are rejected, and that each is applied once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import CommitConflict, CommitUnknown
from seamark.metaserver.catalog.values import TableChange
from seamark.metaserver.commit.engine_commits import rebase
from tests.catalog.appender import (
    ADDED,
    DELETED,
    EXISTING,
    Commit,
    EngineAppender,
    read_list,
    read_snapshot,
    to_local_path,
)
from tests.catalog.appends import (
    DB,
    append_files,
    commit_table,
    create_rebasing_table,
    find_head_snapshot,
    get_added_snapshot,
    load_metadata,
)
from tests.catalog.rig import CALLER, RacingStore, open_rig
from tests.support.wrapper_capture import WrapperCapture


@pytest.mark.parametrize("version", [2, 3])
async def test_append_based_on_an_old_snapshot_is_rebased_onto_the_newer_appends(tmp_path: Path, version: int) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version)
        await append_files(rig, {"a": 1})
        appender, late_files = EngineAppender(await load_metadata(rig)), {"late-1": 10, "late-2": 5}
        request = appender.commit(late_files)
        await append_files(rig, {"b": 2})
        last_appender = await append_files(rig, {"c": 3})
        committed_table = await commit_table(rig, request)
        metadata = await load_metadata(rig)
        snapshot = find_head_snapshot(metadata)
        assert committed_table.metadata.current_snapshot_id == snapshot["snapshot-id"] == appender.snapshot_id
        assert snapshot["parent-snapshot-id"] == last_appender.snapshot_id
        assert snapshot["sequence-number"] == metadata["last-sequence-number"] == last_appender.sequence + 1
        files = read_snapshot(snapshot)
        assert {path: file.sequence_number for path, file in files.items()} == {
            "a": 1, "b": 2, "c": 3, "late-1": 4, "late-2": 4
        }  # fmt: skip
        assert snapshot["manifest-list"] != appender.manifest_list
        assert {row["manifest_path"] for row in read_list(snapshot)} >= set(appender.manifests), "its manifests stay"
        assert {key: snapshot["summary"][f"total-{key}"] for key in ("data-files", "records", "files-size")} == {
            "data-files": "5", "records": "21", "files-size": "500"
        }  # fmt: skip
        assert snapshot["summary"]["added-records"] == "15"
        if version == 3:
            # The rows of a, b and c have the ids 0 to 5.
            assert snapshot["first-row-id"] == 6
            assert {path: file.first_row_id for path, file in files.items()} == {
                "a": 0, "b": 1, "c": 3, "late-1": 6, "late-2": 16
            }  # fmt: skip
            assert metadata["next-row-id"] == 21


async def test_manifest_rewritten_after_a_rejection_is_read_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        appender = EngineAppender(await load_metadata(rig))
        request = appender.commit({"old-1": 1, "old-2": 1})
        get_added_snapshot(request)["summary"]["added-data-files"] = "3"
        await append_files(rig, {"b": 2})
        with pytest.raises(CommitConflict):
            await commit_table(rig, request)
        refused_list, refused_manifests = appender.manifest_list, list(appender.manifests)
        appender.manifests.clear()
        await commit_table(rig, appender.commit({"new": 1}))
        assert (appender.manifest_list, appender.manifests) == (refused_list, refused_manifests)
        assert read_snapshot(find_head_snapshot(await load_metadata(rig))).keys() == {"a", "b", "new"}


def _add_property_change(client: EngineAppender, commit: Commit) -> None:
    _, updates = commit
    updates.append({"action": "set-properties", "updates": {"x": "1"}})


def _change_operation(client: EngineAppender, commit: Commit) -> None:
    get_added_snapshot(commit)["summary"]["operation"] = "overwrite"


def _add_second_requirement(client: EngineAppender, commit: Commit) -> None:
    requirements, _ = commit
    requirements.append({"type": "assert-current-schema-id", "current-schema-id": 7})


def _set_other_parent(client: EngineAppender, commit: Commit) -> None:
    (_, branch_requirement), _ = commit
    branch_requirement["snapshot-id"] = 12345


def _name_missing_list(client: EngineAppender, commit: Commit) -> None:
    get_added_snapshot(commit)["manifest-list"] = f"{client.folder}/none.avro"


def _list_outside(client: EngineAppender, commit: Commit) -> None:
    get_added_snapshot(commit)["manifest-list"] = "file:///etc/passwd"


def _truncate_manifest(client: EngineAppender, commit: Commit) -> None:
    path = to_local_path(client.manifests[0])
    path.write_bytes(path.read_bytes()[:-1])


def _change_counts(client: EngineAppender, commit: Commit) -> None:
    get_added_snapshot(commit)["summary"]["added-data-files"] = "2"


REQUEST_CHANGES = [
    _add_property_change, _change_operation, _add_second_requirement, _set_other_parent, _name_missing_list,
    _list_outside, _truncate_manifest, _change_counts,
]  # fmt: skip
OLD_FILE_ROW = {"file_path": "a", "record_count": 1, "content": 0, "file_format": "PARQUET", "partition": {}}
ENTRY = {
    "snapshot_id": 1, "sequence_number": 1, "file_sequence_number": 1,
    "data_file": OLD_FILE_ROW | {"file_size_in_bytes": 100},
}  # fmt: skip
WRONG_OPTIONS: dict[str, dict[str, Any]] = {
    "its entries have sequence numbers": {"entry": {"sequence_number": 2, "file_sequence_number": 2}},
    "its entries have file sequence numbers": {"entry": {"file_sequence_number": 2}},
    "its entries name another snapshot": {"entry": {"snapshot_id": 4}},
    "its files have row ids": {"file": {"first_row_id": 0}},
    "its files are deletes": {"file": {"content": 1}},
    "it deletes a file": {"more_entries": [ENTRY | {"status": DELETED}]},
    "it adds a file with the status EXISTING": {"more_entries": [ENTRY | {"status": EXISTING}]},
    "it omits a file in a merge": {"merge": 1, "omitted_path": "a"},
    "its manifest names another snapshot": {"manifest_row": {"added_snapshot_id": 4}},
    "its manifest lists deletes": {"manifest_row": {"content": 1}},
    "its manifest has another sequence number": {"manifest_row": {"sequence_number": 1}},
    "its manifest has an unknown spec": {"manifest_row": {"partition_spec_id": 3}},
    "its manifest is encrypted": {"manifest_row": {"key_metadata": b"k"}},
    "its snapshot is encrypted": {"snapshot": {"key-id": "k"}},
    "its snapshot has an unknown schema": {"snapshot": {"schema-id": 9}},
    "its parent has expired": {"snapshot": {"parent-snapshot-id": 404}},
}


@pytest.mark.few_cases(8)
@pytest.mark.parametrize(
    "fault", [*REQUEST_CHANGES, *WRONG_OPTIONS], ids=lambda case: case if isinstance(case, str) else case.__name__[1:]
)
async def test_inconsistent_append_is_rejected_and_changes_nothing(
    tmp_path: Path, fault: str | Callable[[EngineAppender, Commit], None]
) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version=3)
        await append_files(rig, {"a": 1})
        client = EngineAppender(await load_metadata(rig), **(WRONG_OPTIONS[fault] if isinstance(fault, str) else {}))
        request = client.commit({"late": 1})
        if not isinstance(fault, str):
            fault(client, request)
        await append_files(rig, {"b": 2})
        metadata, files_before = await load_metadata(rig), await rig.list_files()
        with pytest.raises(CommitConflict):
            await commit_table(rig, request)
        await rig.publisher.close()
        assert await rig.list_files() == files_before
        assert await load_metadata(rig) == metadata
        valid_appender = EngineAppender(metadata | {"refs": {}, "current-snapshot-id": None, "last-sequence-number": 1})
        await commit_table(rig, valid_appender.commit({"late": 1}))
        assert set(read_snapshot(find_head_snapshot(await load_metadata(rig)))) == {"a", "b", "late"}, (
            "a valid append is committed"
        )


async def test_append_to_a_dropped_branch_is_rejected(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        first_append = await append_files(rig, {"a": 1})
        dev = {"ref-name": "dev", "type": "branch", "snapshot-id": first_append.snapshot_id}
        await commit_table(rig, ([], [{"action": "set-snapshot-ref", **dev}]))
        request = EngineAppender(await load_metadata(rig), branch="dev").commit({"late": 1})
        await commit_table(rig, ([], [{"action": "remove-snapshot-ref", "ref-name": "dev"}]))
        with pytest.raises(CommitConflict, match="dev is missing"):
            await commit_table(rig, request)
        await commit_table(rig, ([], [{"action": "set-snapshot-ref", **dev, "type": "tag"}]))
        await append_files(rig, {"b": 1})
        with pytest.raises(CommitConflict):
            await commit_table(rig, request)


async def test_existing_snapshot_id_or_manifest_is_not_added_again(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        metadata = await load_metadata(rig)
        request_with_same_id = EngineAppender(metadata).commit({"other": 1})
        appender_of_same_manifest = EngineAppender(metadata)
        first_append = await append_files(rig, {"b": 1})
        _, updates = request_with_same_id
        updates[0]["snapshot"]["snapshot-id"] = updates[1]["snapshot-id"] = first_append.snapshot_id
        appender_of_same_manifest.manifest_row = {"manifest_path": first_append.manifests[0]}
        loaded_table = await load_metadata(rig)
        for request in (request_with_same_id, appender_of_same_manifest.commit({"b": 1})):
            with pytest.raises(CommitConflict):
                await commit_table(rig, request)
        assert await load_metadata(rig) == loaded_table


async def test_append_that_needs_too_many_manifest_reads_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        appender = EngineAppender(await load_metadata(rig))
        request = appender.commit({"late": 1})
        await append_files(rig, {"b": 1})
        size = to_local_path(appender.manifests[0]).stat().st_size
        monkeypatch.setattr(rebase, "_MANIFESTS_LIMIT_BYTES", size - 1)
        with pytest.raises(CommitConflict):
            await commit_table(rig, request)
        monkeypatch.setattr(rebase, "_MANIFESTS_LIMIT_BYTES", size)
        await commit_table(rig, request)


@pytest.mark.parametrize("value", ["none", "", "true", "overwrite"])
async def test_appends_are_rebased_only_for_tables_that_enable_it(tmp_path: Path, value: str) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties={"seamark.commit.rebase": value})
        request = EngineAppender(await load_metadata(rig)).commit({"late": 1})
        await append_files(rig, {"a": 1})
        with pytest.raises(CommitConflict, match="branch main was created concurrently"):
            await commit_table(rig, request)
        await commit_table(rig, ([], [{"action": "set-properties", "updates": {"seamark.commit.rebase": "Append"}}]))
        await commit_table(rig, request)
        assert set(read_snapshot(find_head_snapshot(await load_metadata(rig)))) == {"a", "late"}


async def test_transaction_of_several_tables_is_not_rebased(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await rig.create_table("u")
        request = EngineAppender(await load_metadata(rig)).commit({"late": 1})
        await append_files(rig, {"a": 1})
        changes = [
            TableChange(DB, "t", *request),
            TableChange(DB, "u", [], [{"action": "set-properties", "updates": {"x": "1"}}]),
        ]
        with pytest.raises(CommitConflict):
            await rig.commits.commit_transaction(CALLER, changes)


@pytest.mark.parametrize("merge", [0, 1])
async def test_version_2_append_is_rebased_onto_a_table_upgraded_to_version_3(tmp_path: Path, merge: int) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        request = EngineAppender(await load_metadata(rig), merge=merge).commit({"late": 10})
        await commit_table(rig, ([], [{"action": "upgrade-format-version", "format-version": 3}]))
        await append_files(rig, {"b": 2})
        await commit_table(rig, request)
        metadata = await load_metadata(rig)
        files = read_snapshot(find_head_snapshot(metadata))
        assert {path: file.first_row_id for path, file in files.items()} == {"a": 2, "b": 0, "late": 3}
        assert (find_head_snapshot(metadata)["first-row-id"], metadata["next-row-id"]) == (3, 13)


async def test_append_is_rebased_some_time_after_a_rollback(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        first_append = await append_files(rig, {"a": 1})
        metadata = await load_metadata(rig)
        # The clock of this engine is ten minutes behind.
        request = EngineAppender(metadata, snapshot={"timestamp-ms": metadata["last-updated-ms"] - 600_000}).commit(
            {"late": 1}
        )
        await append_files(rig, {"b": 2})
        ref = {"ref-name": "main", "type": "branch", "snapshot-id": first_append.snapshot_id}
        await commit_table(rig, ([], [{"action": "set-snapshot-ref", **ref}]))
        await append_files(rig, {"c": 1})
        await commit_table(rig, request)
        metadata = await load_metadata(rig)
        assert set(read_snapshot(find_head_snapshot(metadata))) == {"a", "c", "late"}
        # The rebased snapshot is not older than the snapshot before it.
        assert find_head_snapshot(metadata)["timestamp-ms"] == metadata["snapshot-log"][-2]["timestamp-ms"]


async def test_append_is_rebased_if_another_branch_used_its_sequence_number(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version=3)
        first_append = await append_files(rig, {"a": 1})
        create_dev = {
            "action": "set-snapshot-ref",
            "ref-name": "dev",
            "type": "branch",
            "snapshot-id": first_append.snapshot_id,
        }
        await commit_table(rig, ([], [create_dev]))
        request = EngineAppender(await load_metadata(rig), branch="dev").commit({"late": 1})
        await append_files(rig, {"b": 2})
        await commit_table(rig, request)
        metadata = await load_metadata(rig)
        assert set(read_snapshot(find_head_snapshot(metadata, "dev"))) == {"a", "late"}
        assert set(read_snapshot(find_head_snapshot(metadata))) == {"a", "b"}
        assert find_head_snapshot(metadata, "dev")["sequence-number"] == 3


async def test_rebased_branch_keeps_a_retention_that_another_commit_set(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        first_append = await append_files(rig, {"a": 1})
        request = EngineAppender(await load_metadata(rig), retention={"min-snapshots-to-keep": 3}).commit({"late": 1})
        ref = {"ref-name": "main", "type": "branch", "snapshot-id": first_append.snapshot_id, "max-ref-age-ms": 77}
        await commit_table(rig, ([], [{"action": "set-snapshot-ref", **ref}]))
        await append_files(rig, {"b": 1}, retention={"max-ref-age-ms": 77})
        committed_table = await commit_table(rig, request)
        assert (
            committed_table.metadata.refs["main"].max_ref_age_ms,
            committed_table.metadata.refs["main"].min_snapshots_to_keep,
        ) == (
            77,
            None,
        )


async def test_missing_total_is_omitted_and_timestamps_do_not_go_back(tmp_path: Path) -> None:
    """The server adds the counts of a late append to the totals of the newer snapshot.

    If the newer snapshot lacks a total, the result has none. The number of kept manifests is counted again.
    """
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        first_appender = EngineAppender(
            await load_metadata(rig), snapshot={"timestamp-ms": (await load_metadata(rig))["last-updated-ms"] + 50_000}
        )
        late_request = EngineAppender(await load_metadata(rig)).commit({"late": 3})
        get_added_snapshot(late_request)["summary"] |= {"manifests-kept": "0", "total-equality-deletes": "0"}
        request = first_appender.commit({"a": 1})
        del get_added_snapshot(request)["summary"]["total-records"]
        await commit_table(rig, request)
        await commit_table(rig, late_request)
        snapshot = find_head_snapshot(await load_metadata(rig))
        assert snapshot["timestamp-ms"] == first_appender.metadata["last-updated-ms"] + 50_000
        assert snapshot["summary"] == {
            "operation": "append", "engine-name": "appender", "added-data-files": "1", "added-records": "3",
            "added-files-size": "100", "total-data-files": "2", "total-files-size": "200", "manifests-kept": "1",
        }  # fmt: skip


async def test_repeat_of_a_rebased_append_gets_the_first_answer(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        appender = EngineAppender(await load_metadata(rig))
        request = appender.commit({"late": 1})
        await append_files(rig, {"b": 2})
        committed_table = await commit_table(rig, request)
        await append_files(rig, {"c": 3})
        second_commit = await commit_table(rig, request)
        assert second_commit.metadata == committed_table.metadata
        await commit_table(rig, ([], [{"action": "remove-snapshots", "snapshot-ids": [appender.snapshot_id]}]))
        files_before = await rig.list_files()
        second_commit = await commit_table(rig, request)
        assert committed_table.entry is not None
        assert second_commit.entry is not None
        assert second_commit.entry.metadata_location == committed_table.entry.metadata_location
        assert await rig.list_files() == files_before
        files = read_snapshot(find_head_snapshot(await load_metadata(rig)))
        assert set(files) == {"a", "b", "c", "late"}


@pytest.mark.parametrize("merges", [False, True])
async def test_rebase_is_repeated_if_another_commit_is_first_and_leaves_no_file(tmp_path: Path, merges: bool) -> None:
    """The append is based on an old snapshot. With `merges`, it has also written two old manifests as one."""
    capture = WrapperCapture(RacingStore)
    async with open_rig(tmp_path / "a", wrap_store=capture) as rig, open_rig(tmp_path / "a") as other_rig:
        await create_rebasing_table(rig)
        await append_files(rig, {"a": 1})
        await append_files(rig, {"b": 2})
        appender = EngineAppender(await load_metadata(rig), merge=2 if merges else 0)
        request = appender.commit({"late": 1})
        await append_files(rig, {"c": 3}, merge=1)
        files_before = await rig.list_files()

        async def commit_first() -> None:
            await append_files(other_rig, {"d": 4})

        capture.wrapper.run_before_swap = commit_first
        await commit_table(rig, request)
        await rig.publisher.close()
        metadata = await load_metadata(rig)
        files = read_snapshot(find_head_snapshot(metadata))
        assert {path: file.sequence_number for path, file in files.items()} == {
            "a": 1, "b": 2, "c": 3, "d": 4, "late": 5
        }  # fmt: skip
        # Two metadata files, the manifest and the list of the other server, the rebased list, and a manifest if a
        # merge was undone.
        assert len(await rig.list_files() - files_before) == 2 + 2 + 1 + merges


class LostRepliesStore:
    """A store that loses replies while `loses_replies` is True.

    It executes a transaction of several operations, such as a commit, but not one of a single operation.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.loses_replies = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Any) -> list[Any]:
        answers: list[Any] = (
            [] if self.loses_replies and len(operations) == 1 else await self._store.transact(operations)
        )
        if self.loses_replies:
            raise CommitUnknown("injected: the reply was lost")
        return answers


async def test_rebase_with_an_unknown_outcome_keeps_its_files(tmp_path: Path) -> None:
    capture = WrapperCapture(LostRepliesStore)
    async with open_rig(tmp_path, wrap_store=capture) as rig:
        await create_rebasing_table(rig)
        request = EngineAppender(await load_metadata(rig)).commit({"late": 1})
        await append_files(rig, {"a": 1})
        capture.wrapper.loses_replies = True
        with pytest.raises(CommitUnknown):
            await commit_table(rig, request)
        capture.wrapper.loses_replies = False
        await rig.publisher.close()
        assert set(read_snapshot(find_head_snapshot(await load_metadata(rig)))) == {"a", "late"}
        committed_table = await commit_table(rig, request)
        assert set(read_snapshot(find_head_snapshot(await load_metadata(rig)))) == {"a", "late"}
        assert committed_table.metadata.last_sequence_number == 2


@pytest.mark.parametrize("is_separate", [False, True])
async def test_merge_is_undone_but_its_files_are_added_if_another_merge_is_committed_first(
    tmp_path: Path, is_separate: bool
) -> None:
    """Both appends write the same three old manifests as one. With `is_separate`, new files are in another manifest."""
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig, version=3)
        for name in ("a", "b", "c"):
            await append_files(rig, {name: 1})
        first_appender, second_appender = [
            EngineAppender(await load_metadata(rig), merge=3, writes_merged_entries_apart=is_separate) for _ in range(2)
        ]
        requests = [first_appender.commit({"one": 10}), second_appender.commit({"two": 20})]
        for request in requests:
            await commit_table(rig, request)
        metadata = await load_metadata(rig)
        manifests = read_list(find_head_snapshot(metadata))
        manifest_paths = {row["manifest_path"] for row in manifests}
        assert set(first_appender.manifests) <= manifest_paths
        assert manifest_paths & set(second_appender.manifests) == set(
            second_appender.manifests[:1] if is_separate else []
        ), "the list omits manifests that add no file"
        assert [
            row["added_files_count"] for row in manifests if row["added_snapshot_id"] == second_appender.snapshot_id
        ] == [1]
        files = read_snapshot(find_head_snapshot(metadata))
        assert {path: (file.sequence_number, file.status) for path, file in files.items()} == {
            "a": (1, EXISTING), "b": (2, EXISTING), "c": (3, EXISTING), "one": (4, ADDED), "two": (5, ADDED)
        }  # fmt: skip


async def test_merge_is_kept_after_a_plain_append_overtakes_it(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await create_rebasing_table(rig)
        for name in ("a", "b", "c"):
            await append_files(rig, {name: 1})
        appender = EngineAppender(await load_metadata(rig), merge=3)
        request = appender.commit({"late": 10})
        await append_files(rig, {"d": 1})
        await commit_table(rig, request)
        manifests = read_list(find_head_snapshot(await load_metadata(rig)))
        assert [row["manifest_path"] for row in manifests if row["existing_files_count"]] == appender.manifests
        assert len(manifests) == 2
        assert [row["min_sequence_number"] for row in manifests] == [1, 4]
