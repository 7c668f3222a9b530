"""Tests of changes that wait for one table.

They are committed together, each with its own snapshot, answer, instant and conflict.
"""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamark.formats.runtime.errors import StorageError
from seamark.metaserver.api.commits import commits
from seamark.metaserver.commit.change_requests.change import Change
from seamark.metaserver.commit.changes import change_application, group_commit
from seamark.metaserver.commit.snapshots.snapshot_producer import ProducedSnapshot, produce_snapshot
from seamark.metaserver.commit.snapshots.snapshot_writer import SnapshotWriter
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.store.model import EntryKind, RegisteredIndexFile
from seamark.metaserver.store.port import InstantFilter
from tests.api.client import Api, create_key
from tests.commits.lake import CommitTable
from tests.commits.reader import check_snapshots, find_snapshot, read_manifests, read_snapshot_ids, read_snapshot_rows
from tests.server.rig import run_server
from tests.waits import until

WRITERS, APPENDS_PER_WRITER = 16, 6


async def append_repeatedly(lake: CommitTable, writer: int) -> list[Any]:
    return [await lake.append([(writer * 100 + number, 0, "a")]) for number in range(APPENDS_PER_WRITER)]


def _read_counter(api: Api, name: str) -> float:
    sample_value = api.server.components.metrics.registry.get_sample_value(name)
    assert sample_value is not None
    return sample_value


async def test_concurrent_appends_never_fail_and_share_transactions(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        api = Api(server)
        lake = await CommitTable.create(api, version=3)
        answers_by_writer = await asyncio.gather(*(append_repeatedly(lake, writer) for writer in range(WRITERS)))
        answers = [answer for answers_of_writer in answers_by_writer for answer in answers_of_writer]
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        expected = sorted(writer * 100 + number for writer in range(WRITERS) for number in range(APPENDS_PER_WRITER))
        assert read_snapshot_ids(find_snapshot(metadata)) == expected
        assert _read_counter(api, "seamark_commit_changes_total") == WRITERS * APPENDS_PER_WRITER
        assert _read_counter(api, "seamark_commit_groups_total") < WRITERS * APPENDS_PER_WRITER / 2
        chained_snapshots = sorted(metadata["snapshots"], key=lambda snapshot: snapshot["sequence-number"])
        assert [snapshot.get("parent-snapshot-id") for snapshot in chained_snapshots[1:]] == [
            snapshot["snapshot-id"] for snapshot in chained_snapshots[:-1]
        ]
        assert {snapshot["snapshot-id"] for snapshot in chained_snapshots} == {
            answer["snapshot-id"] for answer in answers
        }
        instants = await server.components.store.list_instants(
            InstantFilter(uuid=metadata["table-uuid"], action="commit"), 1000
        )
        assert {instant.snapshot_id for instant in instants} == {answer["snapshot-id"] for answer in answers}


async def test_racing_replicas_lose_no_append(tmp_path: Path, postgres_url: str) -> None:
    warehouse = (tmp_path / "lake").as_uri()
    async with (
        run_server(tmp_path / "a", database=postgres_url, warehouse=warehouse) as first_server,
        run_server(tmp_path / "b", database=postgres_url, warehouse=warehouse) as second_server,
    ):
        lake = await CommitTable.create(Api(first_server))
        other_table = CommitTable(
            Api(second_server), lake.folder, lake.name, lake.version, lake.spec, _file_numbers=lake._file_numbers
        )
        await asyncio.gather(*(append_repeatedly(lake if writer % 2 else other_table, writer) for writer in range(8)))
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        expected = sorted(writer * 100 + number for writer in range(8) for number in range(APPENDS_PER_WRITER))
        assert read_snapshot_ids(find_snapshot(metadata)) == expected


@pytest.mark.slow
async def test_replica_that_loses_every_race_commits_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage of this replica is slow: whenever it has read the table, the other replica has committed again."""
    shared_settings: dict[str, Any] = {
        "database": f"sqlite:///{tmp_path}/shared.db",
        "warehouse": (tmp_path / "lake").as_uri(),
    }
    async with (
        run_server(tmp_path / "a", **shared_settings) as fast_server,
        run_server(tmp_path / "b", **shared_settings) as slow_server,
    ):
        lake = await CommitTable.create(Api(fast_server))
        slow_lake = CommitTable(
            Api(slow_server), lake.folder, lake.name, lake.version, lake.spec, _file_numbers=lake._file_numbers
        )
        await slow_lake.append([(0, 0, "warm")])
        prepare, is_over = slow_server.components.engine_commits.publisher.prepare, False
        prepared_count = 0

        async def read_pointer() -> Any:
            return await fast_server.components.store.load_entry(EntryKind.TABLE, ("db",), "t")

        async def prepare_slowly(*args: Any, **kwargs: Any) -> Any:
            nonlocal prepared_count
            preparation = await prepare(*args, **kwargs)
            pointer_before = await read_pointer()
            prepared_count += 1
            with suppress(TimeoutError):  # The other replica commits first, unless the test prevents it.
                async with asyncio.timeout(0.5):
                    while await read_pointer() == pointer_before:
                        await asyncio.sleep(0.005)
            return preparation

        monkeypatch.setattr(slow_server.components.engine_commits.publisher, "prepare", prepare_slowly)

        async def append_until_over() -> None:
            number = 100
            while not is_over:
                await lake.append([(number, 0, "f")])
                number += 1

        tasks = [asyncio.create_task(append_until_over()) for _ in range(2)]
        answers = [await slow_lake.send({"add": [slow_lake.write_data_file([(row_id, 0, "s")])]}) for row_id in (1, 2)]
        attempt_count, name = prepared_count, "seamark.test.late"
        set_property = {"action": "set-properties", "updates": {name: "yes"}}
        engine_answer = await slow_lake.api(
            "POST", "/v1/namespaces/db/tables/t", {"requirements": [], "updates": [set_property]}
        )
        is_over = True
        await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [200, 200]
        assert attempt_count > 2
        assert engine_answer.status == 200
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        assert metadata["properties"][name] == "yes"
        assert {0, 1, 2} <= {row[0] for row in read_snapshot_rows(find_snapshot(metadata))}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("ending", ["-m1.avro", ".avro", "snap-"])
async def test_no_pointer_moves_before_all_files_of_a_change_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """The files of a change are written concurrently. The test delays the file whose path contains `ending`.

    For the first change, the delayed write fails, so the change is not committed. For the second change, it succeeds,
    and the table changes only after it.
    """
    create = LocalObjects.create
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        await lake.append([(0, 0, "a")])
        snapshot_id_before = (await lake.read_metadata())["current-snapshot-id"]
        paths = sorted(tmp_path.rglob("*.avro"))
        late_locations: list[str] = []

        async def create_late(self: LocalObjects, location: str, data: bytes, **options: bool) -> None:
            if ending in location and len(late_locations) < 2:
                late_locations.append(location)
                is_first = len(late_locations) == 1
                await asyncio.sleep(0.1)
                assert (await lake.read_metadata())["current-snapshot-id"] == snapshot_id_before
                if is_first:
                    raise StorageError("the disk is gone")
            await create(self, location, data, **options)

        monkeypatch.setattr(LocalObjects, "create", create_late)
        assert (await lake.send({"add": [lake.write_data_file([(1, 0, "b")])]})).status == 500
        assert (await lake.read_metadata())["current-snapshot-id"] == snapshot_id_before
        await until(lambda: sorted(tmp_path.rglob("*.avro")) == paths)
        await lake.append([(2, 0, "c")])
        assert late_locations
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        assert read_snapshot_ids(find_snapshot(metadata)) == [0, 2]


async def test_rejected_change_does_not_block_other_changes(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        removed_file = lake.write_data_file([(0, 0, "v")])
        base = await lake.commit({"add": [removed_file]})
        remove = {"remove": [{"file-path": removed_file["file-path"]}], "read-snapshot-id": base["snapshot-id"]}
        removals = [lake.send(remove) for _ in range(3)]
        appends = [lake.send({"add": [lake.write_data_file([(row_id, 0, "a")])]}) for row_id in (1, 2)]
        answers = await asyncio.gather(*removals, *appends)
        removal_answers, append_answers = answers[:3], answers[3:]
        # If the appends are committed first, none of the three removals is allowed.
        assert [answer.status for answer in append_answers] == [200, 200]
        assert sum(answer.status == 200 for answer in removal_answers) <= 1
        assert all(answer.error[1] == "CommitFailedException" for answer in removal_answers if answer.status != 200)
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        assert {row[0] for row in read_snapshot_rows(find_snapshot(metadata))} >= {1, 2}


async def test_bug_triggered_by_one_change_fails_only_that_change_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_overwrites(writer: SnapshotWriter, change: Change, *args: Any, **kwargs: Any) -> ProducedSnapshot:
        if change.operation == "overwrite":
            raise OverflowError("a bug")
        return await produce_snapshot(writer, change, *args, **kwargs)

    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        monkeypatch.setattr(change_application, "produce_snapshot", fail_overwrites)
        async with server.components.engine_commits.publisher.lock(("db",), "t"):
            # The first change is a group by itself. All changes that arrive while it waits form a second group.
            bodies = [{"add": [lake.write_data_file([(row_id, 0, "a")])]} for row_id in range(4)]
            bodies[2]["operation"] = "overwrite"
            tasks = []
            for count, body in enumerate(bodies, 1):
                tasks.append(asyncio.create_task(lake.send(body)))
                await lake.wait_for_changes(count)
        answers = await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [200, 200, 500, 200]
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        head = find_snapshot(metadata)
        assert head is not None
        assert read_snapshot_ids(head) == [0, 1, 3]
        assert _read_counter(lake.api, "seamark_commit_groups_total") == 2
        await server.components.commits.close()
        manifest_paths = {manifest["manifest_path"] for manifest in read_manifests(head)}
    stored_manifests = {path.as_uri() for path in (lake.folder / "metadata").glob("*-m*.avro")}
    assert stored_manifests == manifest_paths


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("registration_moment", ["before", "by the group"])
async def test_index_file_of_another_index_fails_only_its_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registration_moment: str
) -> None:
    definitions = iter(["a", "b"])  # The file was overwritten between two changes.

    async def read(_: Any, location: str, size_bytes: int, *, table_uuid: str, **__: Any) -> RegisteredIndexFile:
        return RegisteredIndexFile(
            uuid=table_uuid,
            location=location,
            definition=next(definitions),
            kind="bloom",
            level=0,
            files=1,
            rows=1,
            size_bytes=size_bytes,
            snapshot_id=None,
            created_ms=0,
        )

    monkeypatch.setattr(commits, "read_index_file", read)
    monkeypatch.setattr(commits, "parse_definition", lambda *_: None)
    async with run_server(tmp_path, commit_retries=1) as server:
        lake = await CommitTable.create(Api(server))
        bodies: list[dict[str, Any]] = [{"add": [lake.write_data_file([(row_id, 0, "a")])]} for row_id in range(4)]
        for body in bodies[1:3]:
            body["index-files"] = [{"location": "file:///index", "size-in-bytes": 10}]
        body_numbers, answers = [0, 1, 2, 3], []
        if registration_moment == "before":  # The change with the first index file is committed alone.
            body_numbers, answers = [0, 2, 3], [await lake.send(bodies[1])]
        async with server.components.engine_commits.publisher.lock(("db",), "t"):
            # The first change is a group by itself. All changes that arrive while it waits form a second group.
            tasks = []
            for number in body_numbers:
                tasks.append(asyncio.create_task(lake.send(bodies[number])))
                await lake.wait_for_changes(len(tasks))
        answers += await asyncio.gather(*tasks)
        assert [answer.status for answer in answers] == [200, 200, 409, 200]
        assert "another index" in answers[2].error[2]
        assert read_snapshot_ids(find_snapshot(await lake.read_metadata())) == [0, 1, 3]


async def test_idempotency_key_in_use_fails_only_its_change_in_a_group(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        body, key = {"add": [lake.write_data_file([(1, 0, "a")])]}, create_key()
        appends = [lake.append([(row_id, 0, "b")]) for row_id in (2, 3, 4)]
        answer, other_answer, *_ = await asyncio.gather(lake.send(body, key=key), lake.send(body, key=key), *appends)
        assert min(answer.status, other_answer.status) == 200
        assert read_snapshot_ids(find_snapshot(await lake.read_metadata())) == [1, 2, 3, 4]


async def test_two_changes_with_one_idempotency_key_in_a_group_get_the_same_answer(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        key = create_key()
        body = {"add": [lake.write_data_file([(1, 0, "a")])]}
        other_changes = [{"add": [lake.write_data_file([(number, 0, "b")])]} for number in (2, 3, 4)]
        async with server.components.engine_commits.publisher.lock(("db",), "t"):
            # The first change is a group by itself. All changes that arrive while it waits form a second group.
            first_commit = asyncio.create_task(lake.send(other_changes[0]))
            await lake.wait_for_changes(1)
            tasks = [asyncio.create_task(lake.send(body, key=key)) for _ in range(2)]
            await lake.wait_for_changes(3)  # The order in which two changes are sent does not determine which is first.
            later_requests = (lake.send(other_changes[1], key=key), lake.send(other_changes[2]))
            tasks += [asyncio.create_task(request) for request in later_requests]
            await lake.wait_for_changes(5)
        answer, repeated_answer, rejection, last_answer = await asyncio.gather(*tasks)
        assert {(await first_commit).status, answer.status, repeated_answer.status, last_answer.status} == {200}
        assert answer.json["snapshot-id"] == repeated_answer.json["snapshot-id"]
        assert (answer.json["duplicate"], repeated_answer.json["duplicate"]) == (False, False)
        assert rejection.error[:2] == (422, "UnprocessableEntityException")
        metadata = await lake.read_metadata()
        check_snapshots(metadata)
        assert read_snapshot_ids(find_snapshot(metadata)) == [1, 2, 4]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("action", ["committed", "refused", "repeated"])
async def test_group_deletes_its_unused_files_and_keeps_its_used_files(tmp_path: Path, action: str) -> None:
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        body = {"add": [lake.write_data_file([(1, 0, "a")])], "producer": {"id": "p", "sequence": 1}}
        await lake.commit(body)
        if action == "committed":
            await asyncio.gather(*(append_repeatedly(lake, writer) for writer in range(4)))
        elif action == "refused":
            response = await lake.send({"remove": [{"file-path": "file:///x"}], "read-snapshot-id": 1})
            assert response.status == 409
        else:
            assert (await lake.commit(body))["duplicate"]
        await server.components.commits.close()
        metadata = await lake.read_metadata()
        manifest_lists = {snapshot["manifest-list"] for snapshot in metadata["snapshots"]}
        for snapshot in metadata["snapshots"]:
            check_snapshots(metadata, snapshot["snapshot-id"])
    stored_lists = {path.as_uri() for path in (lake.folder / "metadata").glob("snap-*.avro")}
    assert stored_lists == manifest_lists


@pytest.mark.slow
@pytest.mark.parametrize("failing_method", ["_attempt", "_add"])
async def test_failed_change_is_answered_even_if_the_log_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_method: str
) -> None:
    """A bug fails the change, and a full disk then fails the server's log line about it.

    If the server did not answer, the client would wait without an end.
    """

    async def raise_zero_division(*_: object) -> None:
        raise ZeroDivisionError

    def raise_disk_full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        body = {"add": [lake.write_data_file([(1, 1, "a")])]}
        with monkeypatch.context() as patches:
            patches.setattr(server.components.commits, failing_method, raise_zero_division)
            patches.setattr(group_commit, "_log", SimpleNamespace(error=raise_disk_full))
            assert (await lake.send(body)).status == 500
        await lake.commit(body)
    gc.collect()  # asyncio reports the failed task here, and not during another test.
