"""Tests of a commit whose reply was lost: its outcome is read from the store, and a failed read deletes no file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.errors import CommitUnknown, NotFound, RetryLater, SeamarkError, StorageError
from seamark.metaserver.store.model import EntryKind, InstantState
from seamark.metaserver.store.operations import RecordInstant, SwapPointer
from tests.catalog.rig import CALLER, build_append, open_rig

DB = ("db",)


class LosingStore:
    """A store that, if `error` is set, commits the swap and loses its reply.

    Afterwards `error` occurs when the instant is loaded and, if `fails_rollback` is set, when the rollback is recorded.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self.error: SeamarkError | None = None
        self.fails_rollback = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, operations: Any) -> Any:
        if self.error is not None and self.fails_rollback and isinstance(operations[0], RecordInstant):
            assert operations[0].instant.state is InstantState.ROLLED_BACK
            raise self.error
        result = await self._store.transact(operations)
        if self.error is not None and any(isinstance(operation, SwapPointer) for operation in operations):
            raise CommitUnknown("injected: the reply was lost")
        return result

    async def load_instant(self, instant_id: str) -> Any:
        if self.error is not None:
            raise self.error
        return await self._store.load_instant(instant_id)


@pytest.mark.parametrize(
    "fails_rollback", [True, False], ids=["recording the rollback fails", "loading the instant fails"]
)
@pytest.mark.parametrize("error", [RetryLater("injected: away"), StorageError("injected: broken")], ids=["away", "bad"])
async def test_failed_check_of_a_lost_commit_keeps_its_file(
    tmp_path: Path, error: SeamarkError, fails_rollback: bool
) -> None:
    losing_stores: list[LosingStore] = []

    def wrap_store(store: Any) -> LosingStore:
        losing_stores.append(LosingStore(store))
        return losing_stores[0]

    async with open_rig(tmp_path, wrap_store=wrap_store) as rig:
        await rig.create_table()
        losing_stores[0].error, losing_stores[0].fails_rollback = error, fails_rollback
        with pytest.raises(CommitUnknown):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(1, parent=None, sequence=1))
        losing_stores[0].error = None
        await rig.publisher.close()
        entry = await rig.store.load_entry(EntryKind.TABLE, DB, "t")
        assert entry is not None
        assert entry.metadata_location in await rig.list_files()
        assert (await rig.catalog.tables.load(DB, "t")).metadata.current_snapshot_id == 1


_KEEP_LITTLE = {"write.metadata.previous-versions-max": "1", "write.metadata.delete-after-commit.enabled": "true"}


async def test_commit_deletes_no_metadata_file_that_another_name_points_to(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties=_KEEP_LITTLE)
        await rig.commits.commit_table(CALLER, DB, "t", *build_append(1, parent=None, sequence=1))
        entry = await rig.catalog.tables.load_entry(DB, "t")
        await rig.catalog.tables.register(CALLER, DB, "twin", entry.metadata_location, overwrite=False)
        for sequence in range(2, 6):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(sequence, sequence - 1, sequence))
        await rig.publisher.close()
        assert (await rig.catalog.tables.load(DB, "twin")).metadata.current_snapshot_id == 1


async def test_commit_deletes_no_metadata_file_that_an_undrop_would_need(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties=_KEEP_LITTLE)
        await rig.commits.commit_table(CALLER, DB, "t", *build_append(1, parent=None, sequence=1))
        entry = await rig.catalog.tables.load_entry(DB, "t")
        await rig.catalog.tables.drop(CALLER, DB, "t", purge=False)
        await rig.catalog.tables.register(CALLER, DB, "t", entry.metadata_location, overwrite=False)
        for sequence in range(2, 6):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(sequence, sequence - 1, sequence))
        await rig.publisher.close()
        dropped_entries = (await rig.catalog.dropped.list(DB, page_token=None, page_size=None)).items
        await rig.catalog.dropped.restore(CALLER, dropped_entries[0].id, None, "again")
        assert (await rig.catalog.tables.load(DB, "again")).metadata.current_snapshot_id == 1


async def test_files_removed_from_the_log_are_deleted_once_no_other_name_shares_them(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        await rig.create_table(properties=_KEEP_LITTLE)
        first_location = (await rig.catalog.tables.load_entry(DB, "t")).metadata_location
        for sequence in range(1, 5):
            await rig.commits.commit_table(CALLER, DB, "t", *build_append(sequence, sequence - 1 or None, sequence))
        await rig.publisher.close()
        assert first_location not in await rig.list_files()
        with pytest.raises(NotFound):
            await rig.catalog.documents.read_raw(first_location)
