"""Tests of the limits on what the server holds in memory and compares for one change."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seamark.formats.iceberg.manifests.content_file import ContentFile
from seamark.formats.runtime import fair_lock
from seamark.formats.runtime.clock import SimulatedClock
from seamark.metaserver.api.commits import commits
from seamark.metaserver.api.http import bodies
from seamark.metaserver.commit.change_requests import change
from seamark.metaserver.commit.change_requests.change_body import Remove
from seamark.metaserver.commit.changes import change_application
from seamark.metaserver.commit.conflicts import conflicts, history, key_comparison, overwrite, row_counts, undo
from seamark.metaserver.commit.snapshots import manifest_filter, manifests, snapshot_writer
from seamark.metaserver.settings.settings import Settings
from tests.api.client import Api
from tests.commits.claims import ClaimedTable
from tests.commits.lake import CommitTable
from tests.commits.reader import find_snapshot, list_live_files
from tests.server.rig import run_server
from tests.waits import until


@pytest.mark.parametrize("missing_part", ["the history", "the files to remove"])
async def test_change_has_at_most_the_limit_of_decoded_manifests_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing_part: str
) -> None:
    async with run_server(tmp_path) as server:
        table = await ClaimedTable.create(Api(server), {"a": "long"})
        first_answer = await table.commit(add=[table.build_data_file("first")])
        for number in range(4):
            await table.commit(add=[table.build_data_file(f"f{number}")])
        scope = {"filter": {"type": "eq", "term": "a", "value": 5}}
        body: dict[str, Any] = {
            "add": [table.build_data_file("new")],
            "read_snapshot_id": first_answer["snapshot-id"],
            "scope": scope,
        }
        if missing_part == "the files to remove":
            removed_files = [{"file-path": table.build_data_file(name)["file-path"]} for name in ("first", "f0")]
            body = {"read_snapshot_id": first_answer["snapshot-id"], "remove": removed_files}
        assert (await table.send(**body)).status == 409
        monkeypatch.setattr(change_application, "DECODED_BYTES_MAX", 1000)
        response = await table.send(**body)
        assert response.error[:2] == (400, "BadRequestException")
        assert "decoded manifests" in response.error[2]


async def test_scope_with_more_partitions_than_the_limit_of_files_is_rejected(tmp_path: Path) -> None:
    async with run_server(tmp_path, commit_files_limit=2) as server:
        table = await ClaimedTable.create(Api(server), {"a": "long"}, [("a", "identity")])
        for count, status in ((2, 200), (3, 400)):
            partitions = [{"spec-id": 0, "values": [number]} for number in range(count)]
            body: dict[str, Any] = {"add": [table.build_data_file(f"f{count}", 9)], "read_snapshot_id": None}
            assert (await table.send(**body, scope={"partitions": partitions})).status == status


async def test_entries_of_large_manifests_are_compared_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compares the entries of a manifest with the files that a change removes.

    A change may remove a hundred thousand files, so the comparison takes long. In this test, every manifest is large.
    """
    threads, make_key = [], manifest_filter.make_file_key

    def record_thread(file: ContentFile) -> Remove:
        threads.append(threading.get_ident())
        return make_key(file)

    monkeypatch.setattr(manifest_filter, "make_file_key", record_thread)
    monkeypatch.setattr(manifests, "_IN_LOOP_ENTRIES_MAX", 0)
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        files = [lake.write_data_file([(number, 0, "a")]) for number in range(3)]
        first_answer = await lake.commit({"add": files})
        body = {"read-snapshot-id": first_answer["snapshot-id"], "remove": [{"file-path": files[1]["file-path"]}]}
        assert (await lake.commit(body))["summary"]["total-data-files"] == "2"
        paths = {live_file.path for live_file in list_live_files(find_snapshot(await lake.read_metadata()))}
        assert paths == {files[0]["file-path"], files[2]["file-path"]}
        assert threads
        assert threading.get_ident() not in threads


_LONG_WORK: tuple[tuple[Any, str], ...] = (
    (change, "read_request"),
    (change_application, "read_change"),
    (change_application, "make_file_key"),
    (manifest_filter, "make_file_key"),
    (undo, "make_file_key"),
    (conflicts, "make_file_key"),
    (conflicts, "find_rows_by_path"),
    (conflicts, "DeleteIndex"),
    (history, "_list_keys"),
    (key_comparison, "_restrict_condition"),
    (manifests, "hash_paths"),
    (manifests, "_intersects"),
    (overwrite, "negate_bound_expression"),
    (overwrite, "_list_paths"),
    (row_counts, "read_strings"),
)
"""Functions whose work grows with the files and values of a change."""


async def test_large_change_is_compared_off_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may have up to two hundred thousand files, and a filter with as many values.

    It may add deletes for files that commits since its read have changed, remove them, or restore them. In this test
    every change counts as large.
    """
    threads: dict[str, set[int]] = {}

    def record_threads_of(module: Any, name: str) -> None:
        run_function, thread_ids = getattr(module, name), threads.setdefault(f"{module.__name__}.{name}", set())

        def record_and_work(*args: Any, **options: Any) -> Any:
            thread_ids.add(threading.get_ident())
            return run_function(*args, **options)

        monkeypatch.setattr(module, name, record_and_work)

    for module, name in _LONG_WORK:
        record_threads_of(module, name)
    monkeypatch.setattr(commits, "read_request", change.read_request)
    monkeypatch.setattr(manifests, "_IN_LOOP_ENTRIES_MAX", -1)
    monkeypatch.setattr(snapshot_writer, "_IN_LOOP_ENTRIES_MAX", 0)
    for module in (commits, change_application):
        monkeypatch.setattr(module, "LARGE_BYTES", 0)
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        files = [lake.write_data_file([(number, 0, "a"), (number, 1, "b")]) for number in range(4)]
        paths = [file["file-path"] for file in files]
        first_snapshot_id = (await lake.commit({"add": files}))["snapshot-id"]
        deletes = [lake.write_position_deletes([(path, 0)], names_data_file=True) for path in paths[:2]]
        second_snapshot_id = (await lake.commit({"add": deletes, "read-snapshot-id": first_snapshot_id}))["snapshot-id"]
        small_file = lake.write_data_file([(0, 1, "b")])
        answer = await lake.commit(
            {
                "add": [small_file],
                "remove": [{"file-path": paths[0]}],
                "operation": "replace",
                "read-snapshot-id": second_snapshot_id,
            }
        )
        await lake.commit({"undo-snapshot-id": answer["snapshot-id"]})
        in_filter = {"type": "in", "term": "id", "values": [0, 1]}
        await lake.commit({"add": [lake.write_equality_deletes([7])], "read-snapshot-id": second_snapshot_id})
        wide_filter = {"type": "lt", "term": "id", "value": 100}
        append_request = {"add": [lake.write_data_file([(5, 5, "c")])]}
        head = (await lake.commit(append_request))["snapshot-id"]
        await lake.commit({"remove": [{"file-path": paths[2]}], "read-snapshot-id": head})
        overlapping_change = {
            "read-snapshot-id": head,
            "add": [lake.write_data_file([(8, 8, "d")])],
            "scope": {"filter": wide_filter},
        }
        for body, status in (
            ({"remove": [{"file-path": paths[3]}], "scope": {"filter": in_filter}}, 409),
            ({"remove": [{"file-path": paths[0]}]}, 409),
            ({"remove": [{"file-path": f"{paths[0]}x"}]}, 409),
            ({"add": [lake.write_position_deletes([(f"{paths[0]}x", 0)], names_data_file=True)]}, 409),
            (append_request | {"replace": {"filter": {"type": "eq", "term": "id", "value": 50}}}, 409),
            ({"add": [lake.write_data_file([(6, 6, "c")])], "replace": {"filter": wide_filter}}, 409),
            ({"add": [lake.write_position_deletes([(path, 1)], names_data_file=True) for path in paths]}, 409),
            (append_request, 409),
            (overlapping_change, 409),
        ):
            answer = await lake.send({"read-snapshot-id": first_snapshot_id, **body})
            assert answer.status == status, (body, answer.raw)
    for name, thread_ids in threads.items():
        assert thread_ids, name
        assert threading.get_ident() not in thread_ids, name


async def test_objects_of_a_large_change_are_freed_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python needs a tenth of a second to free the objects of 200,000 files, which would block the event loop.

    In this test, a list of more than three items counts as large.
    """
    freed_lengths: list[int] = []
    threads: set[int] = set()
    drop_contents = fair_lock._drop_contents

    def record_thread(contents: list[Any]) -> None:
        threads.add(threading.get_ident())
        freed_lengths.extend(map(len, contents))
        drop_contents(contents)
        assert contents == []

    monkeypatch.setattr(fair_lock, "_drop_contents", record_thread)
    monkeypatch.setattr(fair_lock, "FREED_IN_LOOP_MAX", 3)
    monkeypatch.setattr(bodies, "QUICK_BYTES", 10)
    async with run_server(tmp_path) as server:
        lake = await CommitTable.create(Api(server))
        await lake.commit({"add": [lake.write_data_file([(number, 1, "a")]) for number in range(5)]})
        await until(lambda: len(freed_lengths) == 3)
    assert freed_lengths == [5, 5, 5], "three lists are freed: sent files, decoded files, and file names"
    assert threading.get_ident() not in threads


async def test_freed_objects_have_no_other_references(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class FreedRecorder:
        def __del__(self) -> None:
            threads.append(threading.get_ident())

    monkeypatch.setattr(fair_lock, "FREED_IN_LOOP_MAX", 3)
    monkeypatch.setattr(fair_lock, "_FREED_PER_STEP", 2)
    arguments: list[Any] = [
        tuple(FreedRecorder() for _ in range(5)),
        [FreedRecorder() for _ in range(4)],
        (FreedRecorder(),),
    ]
    fair_lock.free_later(*arguments)
    arguments.clear()
    await until(lambda: len(threads) == 10)
    assert threads.count(threading.get_ident()) == 1, "only the object of the short argument is freed at once"


async def test_encoded_bytes_that_wait_for_the_disk_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, a change would hold all its manifests, because encoding continues while the disk writes.

    The limit is set to the size of three manifest lists. Encoded bytes may exceed it by one list.
    """
    waiting_bytes = most_bytes = size_bytes = 0

    class SlowDisk:
        async def create(self, location: str, data: bytes) -> None:
            nonlocal waiting_bytes, most_bytes, size_bytes
            waiting_bytes, size_bytes = waiting_bytes + len(data), len(data)
            most_bytes = max(most_bytes, waiting_bytes)
            await asyncio.sleep(0.001)
            waiting_bytes -= len(data)

    manifests_cache = manifests.Manifests.from_settings(SlowDisk(), Settings(), 4)  # type: ignore[arg-type]
    writer = snapshot_writer.SnapshotWriter(
        SlowDisk(), SimulatedClock(1), manifests_cache, "file:///w", 1, is_deferred=True
    )
    metadata: Any = SimpleNamespace(format_version=2)
    await writer.write_manifest_list((), metadata, None, 1)
    await writer.settle()
    monkeypatch.setattr(snapshot_writer, "_DEFERRED_BYTES_MAX", 3 * size_bytes)
    for number in range(30):
        await writer.write_manifest_list((), metadata, None, number)
    await writer.settle()
    assert waiting_bytes == 0
    assert 2 * size_bytes < most_bytes <= 4 * size_bytes
