"""Seeded simulation: writers over a store and a storage that fail before or after a call, with or without a reply.

The oracle is the list of answers. Every acknowledged commit is in the table's history exactly once, no rejected commit
is in it, and the history is one chain. The file that the pointer names always exists.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import (
    CommitConflict,
    CommitUnknown,
    NoSuchTable,
    RetryLater,
    SeamarkError,
    StorageError,
)
from seamark.metaserver.store.model import EntryKind
from tests.catalog.rig import CALLER, CatalogRig, FailingObjects, FailingStore, RandomFaults, build_append, open_rig
from tests.seeds import mark_fast

DB = ("db",)


async def _append_rounds(rig: CatalogRig, writer_number: int, rounds: int, outcomes: dict[int, str]) -> None:
    """Append to the last known state, as an engine does, and record the answer to each attempt by snapshot id."""
    for round_number in range(rounds):
        snapshot_id = writer_number * 1000 + round_number + 1
        try:
            metadata = (await rig.catalog.tables.load(DB, "t")).metadata
        except RetryLater:
            continue
        change = build_append(snapshot_id, metadata.current_snapshot_id, metadata.last_sequence_number + 1)
        try:
            await rig.commits.commit_table(CALLER, DB, "t", *change)
        except CommitConflict:
            outcomes[snapshot_id] = "refused"
        except (RetryLater, StorageError):
            outcomes[snapshot_id] = "refused"
        except CommitUnknown:
            outcomes[snapshot_id] = "unknown"
        else:
            outcomes[snapshot_id] = "acknowledged"


async def _run_campaign(home: Path, seed: int, rate: float, writers: int, rounds: int) -> dict[int, str]:
    """Commit from several writers while calls fail at this rate, and check the history after a restart."""
    faults = RandomFaults(seed, rate=0)  # No call fails before the table exists.
    outcomes: dict[int, str] = {}
    async with open_rig(
        home,
        wrap_store=lambda store: FailingStore(store, faults),
        wrap_objects=lambda objects: FailingObjects(objects, faults),
    ) as rig:
        await rig.create_table()
        faults.rate = rate
        await asyncio.gather(*(_append_rounds(rig, number, rounds, outcomes) for number in range(1, writers + 1)))
        faults.rate = 0
        await rig.publisher.close()
    async with open_rig(home) as rig:  # This rig reads the state as a new process does.
        metadata = (await rig.catalog.tables.load(DB, "t")).metadata
        entry = await rig.store.load_entry(EntryKind.TABLE, DB, "t")
        assert entry is not None
        assert {
            entry.metadata_location,
            *(log.metadata_file for log in metadata.metadata_log),
        } <= await rig.list_files()
        _check_history(metadata, outcomes)
    return outcomes


def _check_history(metadata: Any, outcomes: dict[int, str]) -> None:
    history = [snapshot.snapshot_id for snapshot in metadata.snapshots]
    assert len(history) == len(set(history))
    parent = None
    for snapshot in metadata.snapshots:
        assert snapshot.parent_snapshot_id == parent, "the history is not one chain"
        parent = snapshot.snapshot_id
    for snapshot_id, outcome in outcomes.items():
        if outcome == "acknowledged":
            assert snapshot_id in history, f"acknowledged commit {snapshot_id} is lost"
        if outcome == "refused":
            assert snapshot_id not in history, f"refused commit {snapshot_id} is in the history"


@pytest.mark.parametrize("seed", mark_fast(range(6), 1))
async def test_no_acknowledged_commit_is_lost_and_no_rejected_commit_is_applied(tmp_path: Path, seed: int) -> None:
    outcomes = await _run_campaign(tmp_path, seed, rate=0.1, writers=4, rounds=8)
    assert "acknowledged" in outcomes.values(), f"seed {seed} has no acknowledged commit, so it tests nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
async def test_no_acknowledged_commit_is_lost_over_many_seeds_and_more_faults(tmp_path: Path, seed: int) -> None:
    rate = 0.02 + (seed % 10) * 0.04  # Between 2 % and 38 % of the calls fail.
    await _run_campaign(tmp_path, seed, rate=rate, writers=6, rounds=15)


@pytest.mark.parametrize("seed", range(4))
async def test_client_that_repeats_until_it_gets_an_answer_commits_exactly_once(tmp_path: Path, seed: int) -> None:
    faults = RandomFaults(seed, 0)
    async with open_rig(
        tmp_path,
        wrap_store=lambda store: FailingStore(store, faults),
        wrap_objects=lambda objects: FailingObjects(objects, faults),
    ) as rig:
        await rig.create_table()
        faults.rate = 0.25
        parent = None
        for sequence in range(1, 8):
            change = build_append(sequence, parent, sequence)
            for _ in range(200):
                try:
                    await rig.commits.commit_table(CALLER, DB, "t", *change)
                    break
                except SeamarkError:
                    continue
            else:
                pytest.fail(f"seed {seed}: no attempt succeeded")
            parent = sequence
        faults.rate = 0
        metadata = (await rig.catalog.tables.load(DB, "t")).metadata
        assert [snapshot.snapshot_id for snapshot in metadata.snapshots] == list(range(1, 8))


async def test_commit_without_any_answer_keeps_its_file_and_reports_unknown(tmp_path: Path) -> None:
    class SilencedStore:
        """A store that commits, and then never answers again."""

        def __init__(self, store: Any) -> None:
            self._store = store
            self.is_silent = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def transact(self, operations: Any) -> Any:
            if self.is_silent:
                raise RetryLater("injected: the database does not answer")
            result = await self._store.transact(operations)
            if any(type(operation).__name__ == "SwapPointer" for operation in operations):
                self.is_silent = True
                raise CommitUnknown("injected: the reply was lost")
            return result

    async with open_rig(tmp_path / "a", wrap_store=SilencedStore) as rig:
        await rig.create_table()
        with pytest.raises(CommitUnknown):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(1, parent=None, sequence=1))
        await rig.publisher.close()
        metadata = (await rig.catalog.tables.load(DB, "t")).metadata
        assert metadata.current_snapshot_id == 1, "the store had committed, so the file must exist"


async def test_concurrent_drops_and_commits_leave_no_table_behind(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table()
        outcomes: dict[int, str] = {}

        async def drop() -> None:
            await asyncio.sleep(0.02)
            await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)

        answers = await asyncio.gather(
            drop(), *(_append_rounds(rig, number, 30, outcomes) for number in range(1, 4)), return_exceptions=True
        )
        drop_answer, *commit_answers = answers
        assert drop_answer is None
        assert any(isinstance(answer, NoSuchTable) for answer in commit_answers)
        dropped_entries = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items
        metadata = await rig.catalog.documents.table(dropped_entries[0].entry.metadata_location)
        _check_history(metadata, outcomes)
