"""Tests of the change number of a database, which shows whether any client has committed."""

from __future__ import annotations

from pathlib import Path

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import SaveGrant
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.store.sql.changes import open_commit_counter


async def _commit_grant(store: PointerStore, name: str) -> None:
    await store.transact([SaveGrant(grant=Grant(name, "reader"))])


async def test_change_number_changes_only_if_a_client_commits(tmp_path: Path) -> None:
    url, clock = f"sqlite:///{tmp_path}/seamark.db", SystemClock()
    async with open_store(url, clock=clock) as first_store, open_store(url, clock=clock) as second_store:
        commit_counter = open_commit_counter(url)
        assert commit_counter is not None
        number = commit_counter.read_number()
        for commit_number, store in enumerate((first_store, second_store, first_store, first_store, second_store)):
            assert commit_counter.read_number() == number, "nothing was committed"
            await store.grants("somebody")
            assert commit_counter.read_number() == number, "a read does not change the number"
            await _commit_grant(store, f"name-{commit_number}")
            assert commit_counter.read_number() != number
            number = commit_counter.read_number()
        commit_counter.close()
        assert commit_counter.read_number() is None, "the number is None if the database cannot be read"


def test_postgres_has_no_change_number() -> None:
    assert open_commit_counter("postgresql://user@host/database") is None
