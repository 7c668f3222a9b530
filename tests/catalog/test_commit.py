"""Tests of commits: all or nothing, one winner, and the first answer for a repeat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.iceberg.metadata.updates import apply_updates, read_updates
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import (
    AlreadyExists,
    BadRequest,
    CommitConflict,
    CommitUnknown,
    NoSuchNamespace,
    NoSuchTable,
    RetryLater,
)
from seamark.metaserver.catalog.values import (
    Caller,
    CreateTable,
    IdempotencyKey,
    LoadedTable,
    TableChange,
    TableIdentifier,
)
from seamark.metaserver.commit.publication import CommitEvent
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.operations import AdvanceProducer
from seamark.metaserver.store.port import IdempotencyTaken, InstantFilter
from tests.catalog.rig import CALLER, SCHEMA, CatalogRig, build_append, open_racing_rigs, open_rig
from tests.support.wrapper_capture import WrapperCapture

DB = ("db",)


def build_property_update(**values: str) -> list[dict[str, Any]]:
    return [{"action": "set-properties", "updates": values}]


async def test_commit_moves_the_pointer_and_adds_an_instant(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        requirements, updates = build_append(7, parent=None, sequence=1)
        table = await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        entry = await rig.store.load_entry(EntryKind.TABLE, DB, "t")
        assert entry is not None
        assert table.entry is not None
        assert entry.metadata_location == table.entry.metadata_location
        assert (await rig.catalog.tables.load(*(DB, "t"))).metadata.current_snapshot_id == 7
        assert [log.metadata_file for log in table.metadata.metadata_log] == [entry.previous_location]
        instants = await rig.store.list_instants(InstantFilter(uuid=entry.uuid), limit=10)
        assert [(instant.action, instant.snapshot_id, instant.principal_name) for instant in instants] == [
            ("create", None, "tester"),
            ("commit", 7, "tester"),
        ]
        assert instants[-1].summary["added-records"] == "1"


async def test_repeated_commit_gets_the_first_answer(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        first_answer = await rig.commits.commit_table(CALLER, DB, "t", *build_append(7, parent=None, sequence=1))
        await rig.commits.commit_table(CALLER, DB, "t", *build_append(8, 7, 2))
        table = await rig.commits.commit_table(CALLER, DB, "t", *build_append(7, parent=None, sequence=1))
        assert table.entry is not None
        assert first_answer.entry is not None
        assert table.entry.metadata_location == first_answer.entry.metadata_location
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 8


def _require_uuid(uuid: str, snapshot_id: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    requirements, updates = build_append(snapshot_id, None, 1)
    return [*requirements, {"type": "assert-table-uuid", "uuid": uuid}], updates


@pytest.mark.parametrize("change_case", [str.lower, str.upper])
@pytest.mark.parametrize("change", ["renamed", "dropped", "replaced"])
async def test_repeat_never_reports_failure_after_its_table_has_lost_the_name(
    tmp_path: Path, change: str, change_case: Callable[[str], str]
) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        loaded_table = await rig.catalog.tables.load(DB, "t")
        requirements, updates = _require_uuid(change_case(str(loaded_table.metadata.table_uuid)), 7)
        requirements[-1]["type"] = change_case(requirements[-1]["type"])
        await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        if change == "renamed":
            await rig.catalog.tables.rename(CALLER, TableIdentifier(DB, "t"), TableIdentifier(DB, "other"))
        else:
            await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
            if change == "replaced":
                await rig.create_table()
        with pytest.raises(CommitUnknown, match="succeeded"):
            await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        with pytest.raises((CommitConflict, NoSuchTable)):
            await rig.commits.commit_table(CALLER, DB, "t", *_require_uuid(str(loaded_table.metadata.table_uuid), 8))


async def test_repeated_transaction_gets_the_first_answer_but_a_changed_transaction_does_not(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        changes = []
        for number, name in enumerate(("a", "b"), 1):
            await rig.create_table(name)
            requirements, updates = build_append(number, None, 1)
            changes.append(TableChange(namespace=DB, name=name, requirements=requirements, updates=updates))
        await rig.commits.commit_transaction(CALLER, changes)
        entries = [await rig.catalog.tables.load_entry(DB, name) for name in ("a", "b")]
        await rig.commits.commit_transaction(CALLER, list(reversed(changes)))
        assert [await rig.catalog.tables.load_entry(DB, name) for name in ("a", "b")] == entries
        other_change = TableChange(namespace=DB, name="b", requirements=[], updates=build_property_update(x="1"))
        for invalid_changes in ([changes[0]], [changes[0], other_change]):
            with pytest.raises(CommitConflict):
                await rig.commits.commit_transaction(CALLER, invalid_changes)


async def test_commit_on_an_old_base_is_a_conflict_and_leaves_no_file(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        await rig.commits.commit_table(CALLER, DB, "t", *build_append(7, parent=None, sequence=1))
        files_before = await rig.list_files()
        with pytest.raises(CommitConflict, match="branch main"):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(9, parent=None, sequence=1))
        assert await rig.list_files() == files_before


async def test_lost_swap_is_repeated_while_its_requirements_hold(tmp_path: Path) -> None:
    async with open_racing_rigs(tmp_path / "a") as (rig, other_rig, racing_store):
        await rig.create_table()

        async def commit_first() -> None:
            await other_rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(theirs="1"))

        racing_store.run_before_swap = commit_first
        table = await rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(ours="1"))
        assert {"ours", "theirs"} <= set(table.metadata.properties)
        await rig.publisher.close()
        log = {entry.metadata_file for entry in table.metadata.metadata_log}
        assert table.entry is not None
        assert await rig.list_files() == log | {table.entry.metadata_location}, (
            "the file of the lost attempt must be deleted"
        )


async def test_lost_swap_whose_requirement_no_longer_holds_is_a_conflict(tmp_path: Path) -> None:
    async with open_racing_rigs(tmp_path / "a") as (rig, other_rig, racing_store):
        await rig.create_table()

        async def commit_first() -> None:
            await other_rig.commits.commit_table(CALLER, DB, "t", *build_append(1, parent=None, sequence=1))

        racing_store.run_before_swap = commit_first
        with pytest.raises(CommitConflict):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(2, parent=None, sequence=1))
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 1


async def test_transaction_moves_all_pointers_or_none(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table("a")
        await rig.create_table("b")
        good_change = TableChange(namespace=DB, name="a", requirements=[], updates=build_property_update(x="1"))
        bad_change = TableChange(
            namespace=DB,
            name="b",
            requirements=[{"type": "assert-current-schema-id", "current-schema-id": 9}],
            updates=[],
        )
        files_before = await rig.list_files()
        with pytest.raises(CommitConflict):
            await rig.commits.commit_transaction(CALLER, [good_change, bad_change])
        await rig.publisher.close()
        assert await rig.list_files() == files_before
        assert "x" not in (await rig.catalog.tables.load(DB, "a")).metadata.properties
        valid_change = TableChange(namespace=DB, name="b", requirements=[], updates=build_property_update(y="1"))
        await rig.commits.commit_transaction(CALLER, [good_change, valid_change])
        assert (await rig.catalog.tables.load(DB, "a")).metadata.properties["x"] == "1"
        assert (await rig.catalog.tables.load(DB, "b")).metadata.properties["y"] == "1"


async def test_transaction_that_names_a_table_twice_is_rejected(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        change = TableChange(namespace=DB, name="t", requirements=[], updates=build_property_update(x="1"))
        with pytest.raises(BadRequest, match="two changes"):
            await rig.commits.commit_transaction(CALLER, [change, change])


async def test_commit_without_changes_writes_nothing(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        files_before = await rig.list_files()
        loaded_table = await rig.catalog.tables.load(DB, "t")
        unchanged_location = [{"action": "set-location", "location": loaded_table.metadata.location}]
        table = await rig.commits.commit_table(CALLER, DB, "t", [], unchanged_location)
        assert table.entry == loaded_table.entry
        assert await rig.list_files() == files_before


async def test_idempotency_key_is_recorded_with_the_commit_and_only_once(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        caller_with_key = Caller(
            principal_name="w", request_id="r", idempotency=IdempotencyKey(key="k", scope="s", request_hash="h")
        )
        table = await rig.commits.commit_table(caller_with_key, DB, "t", [], build_property_update(x="1"))
        record = await rig.store.find_idempotency_record("k", 0)
        assert record is not None
        assert table.entry is not None
        assert (record.status, record.metadata_location) == (200, table.entry.metadata_location)
        files_before = await rig.list_files()
        with pytest.raises(IdempotencyTaken):
            await rig.commits.commit_table(caller_with_key, DB, "t", [], build_property_update(x="2"))
        await rig.publisher.close()
        assert await rig.list_files() == files_before
        assert (await rig.catalog.tables.load(DB, "t")).metadata.properties["x"] == "1"


async def test_staged_table_is_created_by_its_first_commit(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, DB, {})
        staged_table = await rig.catalog.tables.stage(CALLER, DB, CreateTable(name="t", schema=SCHEMA))
        assert staged_table.entry is None
        assert not await rig.catalog.tables.exists(DB, "t")
        assert await rig.list_files() == set()
        create = [
            {"action": "assign-uuid", "uuid": staged_table.metadata.table_uuid},
            {"action": "upgrade-format-version", "format-version": 2},
            {"action": "add-schema", "schema": {**SCHEMA, "schema-id": 0}},
            {"action": "set-current-schema", "schema-id": -1},
            {"action": "add-spec", "spec": {"spec-id": 0, "fields": []}},
            {"action": "set-default-spec", "spec-id": -1},
            {"action": "add-sort-order", "sort-order": {"order-id": 0, "fields": []}},
            {"action": "set-default-sort-order", "sort-order-id": -1},
            {"action": "set-location", "location": staged_table.metadata.location},
        ]
        requirements = [{"type": "assert-create"}]
        _, append_updates = build_append(5, parent=None, sequence=1)
        updates = [*create, *append_updates]
        table = await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        assert table.metadata.table_uuid == staged_table.metadata.table_uuid
        assert table.metadata.metadata_log == ()
        second_table = await rig.commits.commit_table(CALLER, DB, "t", requirements, updates)
        assert second_table.entry is not None
        assert table.entry is not None
        assert second_table.entry.metadata_location == table.entry.metadata_location, (
            "a repeated creation gets the same answer"
        )
        create[0]["uuid"] = "5b0c6e1a-8f2e-4a57-9a64-0d1c5f3b7e21"
        with pytest.raises(CommitConflict, match="table already exists"):
            await rig.commits.commit_table(CALLER, DB, "t", requirements, create)


async def test_fifty_concurrent_creates_have_one_winner_and_leave_one_file(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, DB, {})
        request = CreateTable(name="t", schema=SCHEMA)
        outcomes = await asyncio.gather(
            *(rig.catalog.tables.create(CALLER, DB, request) for _ in range(50)), return_exceptions=True
        )
        winners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert len(winners) == 1
        assert all(isinstance(outcome, AlreadyExists) for outcome in outcomes if isinstance(outcome, BaseException))
        entry = await rig.store.load_entry(EntryKind.TABLE, DB, "t")
        assert entry is not None
        assert await rig.list_files() == {entry.metadata_location}


async def test_missing_objects_are_named_in_the_error(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.catalog.namespaces.create(CALLER, DB, {})
        with pytest.raises(NoSuchTable, match=r"Table does not exist: db\.none"):
            await rig.commits.commit_table(CALLER, DB, "none", [], build_property_update(x="1"))
        with pytest.raises(NoSuchNamespace, match="Namespace does not exist: none"):
            await rig.catalog.tables.create(CALLER, ("none",), CreateTable(name="t", schema=SCHEMA))
        with pytest.raises(BadRequest, match="outside the warehouse"):
            await rig.catalog.tables.create(CALLER, DB, CreateTable(name="t", schema=SCHEMA, location="file:///etc/t"))


async def test_old_metadata_files_are_deleted_according_to_the_properties(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        properties = {"write.metadata.previous-versions-max": "2", "write.metadata.delete-after-commit.enabled": "true"}
        await rig.create_table(properties=properties)
        for value in range(6):
            table = await rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(x=str(value)))
        await rig.publisher.close()
        assert table.entry is not None
        metadata_files = {log.metadata_file for log in table.metadata.metadata_log}
        assert len(metadata_files) == 2
        assert await rig.list_files() == metadata_files | {table.entry.metadata_location}


async def test_copied_table_never_deletes_the_metadata_files_of_its_source(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        properties = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}
        await rig.create_table(properties=properties)
        await rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(x="1"))
        await rig.publisher.close()
        entry, files = await rig.catalog.tables.load_entry(DB, "t"), await rig.list_files()
        copied_metadata = json.loads(await rig.objects.read(entry.metadata_location))
        old_location = copied_metadata["location"]
        copied_metadata |= {"location": f"{old_location}-copy", "table-uuid": "7b1a4f4e-0c4b-4cf0-9b1c-6f1d4f4f6a11"}
        copied_metadata["metadata-log"].append({"timestamp-ms": 1, "metadata-file": entry.metadata_location})
        copied_location = f"{old_location}-copy/metadata/00000-copy.metadata.json"
        await rig.objects.create(copied_location, json.dumps(copied_metadata).encode())
        await rig.catalog.tables.register(CALLER, DB, "copy", copied_location, overwrite=False)
        for value in range(3):
            await rig.commits.commit_table(CALLER, DB, "copy", [], build_property_update(y=str(value)))
        await rig.publisher.close()
        assert files <= await rig.list_files()
        assert copied_location not in await rig.list_files()


async def test_compressed_metadata_is_written_and_read(tmp_path: Path) -> None:
    async with open_rig(tmp_path / "a") as rig:
        await rig.create_table(properties={"write.metadata.compression-codec": "gzip"})
        table = await rig.commits.commit_table(CALLER, DB, "t", *build_append(7, parent=None, sequence=1))
        assert table.entry is not None
        assert table.entry.metadata_location.endswith(".gz.metadata.json")
    async with open_rig(tmp_path / "a") as rig:
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 7
        # The cache counts decoded metadata with more than twice the size of its JSON, not with that of the file.
        cost = rig.catalog.documents.cache.read_stats().used_bytes
        assert cost > 2 * len(await rig.catalog.documents.render_document(table.entry.metadata_location, "all"))


async def test_metadata_file_numbers_continue_after_register(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        for value in range(3):
            table = await rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(x=str(value)))
        assert table.entry is not None
        await rig.catalog.tables.unregister(CALLER, DB, "t")
        await rig.catalog.tables.register(CALLER, DB, "u", table.entry.metadata_location, overwrite=False)
        second_table = await rig.commits.commit_table(CALLER, DB, "u", [], build_property_update(x="again"))
        assert second_table.entry is not None
        name_prefixes = [entry.metadata_location.rpartition("/")[2][:6] for entry in (table.entry, second_table.entry)]
        assert name_prefixes == ["00003-", "00004-"]


WRITERS = [Caller(principal_name=name, request_id=f"request-of-{name}") for name in ("ann", "bob")]


async def publish_appends(
    rig: CatalogRig, loaded_table: LoadedTable, *snapshots: int, sequence: int = 1
) -> LoadedTable:
    """Publish consecutive appends, alternately by ann and by bob. The producer of ann advances to `sequence`."""
    assert loaded_table.entry is not None
    updates, events = [], []
    parent, last_sequence = loaded_table.metadata.current_snapshot_id, loaded_table.metadata.last_sequence_number
    for number, snapshot_id in enumerate(snapshots):
        _, append_updates = build_append(snapshot_id, parent, last_sequence + 1 + number)
        updates += append_updates
        events.append(
            CommitEvent(
                WRITERS[number % 2],
                requested_ms=5,
                snapshot_id=snapshot_id,
                summary=append_updates[0]["snapshot"]["summary"],
            )
        )
        parent = snapshot_id
    now_ms = SystemClock().now_ms()
    return await rig.publisher.publish(
        CALLER,
        loaded_table.entry,
        loaded_table.metadata,
        apply_updates(loaded_table.metadata, read_updates(updates), now_ms=now_ms),
        events=events,
        operations=[AdvanceProducer(loaded_table.entry.uuid, "ann", sequence, snapshots[0], now_ms)],
    )


async def test_publication_changes_the_table_with_an_instant_for_each_snapshot(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        loaded_table = await rig.catalog.tables.load(DB, "t")
        assert loaded_table.entry is not None
        publication = await publish_appends(rig, loaded_table, 7, 8, 9)
        current_table = await rig.catalog.tables.load(DB, "t")
        assert publication.entry is not None
        assert current_table.entry is not None
        assert (current_table.entry.metadata_location, current_table.entry.version) == (
            publication.entry.metadata_location,
            2,
        )
        assert [log.metadata_file for log in current_table.metadata.metadata_log] == [
            loaded_table.entry.metadata_location
        ]
        assert [snapshot.parent_snapshot_id for snapshot in current_table.metadata.snapshots] == [None, 7, 8]
        assert await rig.list_files() == {loaded_table.entry.metadata_location, publication.entry.metadata_location}
        instants = (await rig.store.list_instants(InstantFilter(uuid=current_table.entry.uuid), limit=10))[1:]
        assert [(instant.action, instant.snapshot_id, instant.principal_name) for instant in instants] == [
            ("commit", 7, "ann"),
            ("commit", 8, "bob"),
            ("commit", 9, "ann"),
        ]
        assert {instant.metadata_location for instant in instants} == {publication.entry.metadata_location}
        assert instants[0].summary == {
            "request-id": "request-of-ann",
            "updates": ["add-snapshot", "set-snapshot-ref"],
            "operation": "append",
            "added-records": "1",
        }
        state = await rig.store.load_producer(current_table.entry.uuid, "ann")
        assert state is not None
        assert (state.sequence, state.snapshot_id) == (1, 7)


async def test_commit_that_cannot_be_published_leaves_no_trace(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        loaded_table = await rig.catalog.tables.load(DB, "t")
        await rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(x="1"))
        current_table, files_before = await rig.catalog.tables.load(DB, "t"), await rig.list_files()
        assert current_table.entry is not None
        with pytest.raises(CommitConflict, match="changed by another commit"):
            await publish_appends(rig, loaded_table, 7)
        assert await rig.store.load_producer(current_table.entry.uuid, "ann") is None
        with pytest.raises(ValueError, match="metadata is unchanged"):
            await rig.publisher.publish(
                CALLER, current_table.entry, current_table.metadata, current_table.metadata, events=[], operations=[]
            )
        await publish_appends(rig, current_table, 8, sequence=4)
        current_table, files_before = await rig.catalog.tables.load(DB, "t"), await rig.list_files()
        with pytest.raises(CommitConflict, match="has already committed sequence 4"):
            await publish_appends(rig, current_table, 9, sequence=4)
        await rig.publisher.close()
        assert await rig.list_files() == files_before
        assert await rig.catalog.tables.load(DB, "t") == current_table


class LostReplyStore:
    """A store that loses the request or the reply of one transaction.

    `lost_message` is "request", "reply", or "" if nothing is lost. With `stops_answering`, all later transactions fail.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.lost_message = ""
        self.stops_answering = self.is_silent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Any) -> list[Any]:
        if self.is_silent:
            raise RetryLater("injected: no answer")
        if not self.lost_message:
            return await self._store.transact(operations)  # type: ignore[no-any-return]
        lost_message, self.lost_message, self.is_silent = self.lost_message, "", self.stops_answering
        if lost_message == "reply":
            await self._store.transact(operations)
        raise CommitUnknown(f"injected: the {lost_message} was lost")


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("lost_message", ["request", "reply"])
async def test_publication_with_a_lost_outcome_is_resolved_or_reported_as_unknown(
    tmp_path: Path, lost_message: str, is_silent: bool
) -> None:
    capture = WrapperCapture(LostReplyStore)
    async with open_rig(tmp_path, wrap_store=capture) as rig:
        await rig.create_table()
        loaded_table, files_before = await rig.catalog.tables.load(DB, "t"), await rig.list_files()
        assert loaded_table.entry is not None
        capture.wrapper.lost_message, capture.wrapper.stops_answering = lost_message, is_silent
        try:
            await publish_appends(rig, loaded_table, 7, 8)
            outcome = "published"
        except (CommitConflict, CommitUnknown) as error:
            outcome = error.kind
        await rig.publisher.close()
        expected_outcome = {"request": "commit_conflict", "reply": "published"}[lost_message]
        assert outcome == ("commit_unknown" if is_silent else expected_outcome)
        assert len(await rig.list_files() - files_before) == (0 if outcome == "commit_conflict" else 1)
        state = await rig.store.load_producer(loaded_table.entry.uuid, "ann")
        assert (state is not None) == (lost_message == "reply")


async def test_publications_and_commits_of_one_process_run_one_after_another(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        async with rig.publisher.lock(DB, "t"):
            loaded_table = await rig.catalog.tables.load(DB, "t")
            waiting_task = asyncio.create_task(
                rig.commits.commit_table(CALLER, DB, "t", [], build_property_update(x="1"))
            )
            for _ in range(20):
                await asyncio.sleep(0.001)
            publication = await publish_appends(rig, loaded_table, 7)
        answer = await waiting_task
        await rig.publisher.close()
        assert answer.metadata.current_snapshot_id == 7
        assert answer.entry is not None
        assert publication.entry is not None
        assert answer.entry.previous_location == publication.entry.metadata_location
        assert len(await rig.list_files()) == 3, "no attempt has written an unused file"
