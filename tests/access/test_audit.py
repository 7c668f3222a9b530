"""The audit log: what is kept, what is never lost, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitUnknown, RetryLater
from seamark.metaserver.access.audit import REFUSED, AuditLog, open_audit, outcome_of
from seamark.metaserver.store.model import AuditRecord
from seamark.metaserver.store.operations import Operation, SaveAudit
from seamark.metaserver.store.port import PointerStore


class Moody:
    """A store whose transactions wait for the gate, and fail as often as told, before or after they happen."""

    def __init__(self, store: PointerStore) -> None:
        self.store = store
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[str] = []
        self.sizes: list[int] = []

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        await self.gate.wait()
        failure = self.failures.pop() if self.failures else ""
        if failure == "before":
            raise RetryLater("the database is away")
        done = await self.store.transact(operations)
        if failure == "after":
            raise CommitUnknown("the connection was lost")
        [save] = operations
        assert isinstance(save, SaveAudit)
        self.sizes.append(len(save.records))
        return done


@pytest.fixture
def moody(store: PointerStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("seamark.metaserver.access.audit._RETRY_S", 0.01)
    return Moody(store)


async def record(audit: AuditLog, operation: str = "createTable", status: int = 200, **given: Any) -> None:
    fields: dict[str, Any] = {"who": "ann", "resource": "/v1/x", "request_id": "r", "remote": "10.0.0.1", **given}
    await audit.record(operation=operation, status=status, **fields)


async def kept(store: PointerStore) -> list[AuditRecord]:
    return await store.audit(None, 100_000)


async def test_changes_and_refusals_are_kept_and_reads_are_not(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        await record(audit, "createTable", 200)
        await record(audit, "updateTable", 409, kind="commit_conflict")
        await record(audit, "loadTable", 200)
        await record(audit, "loadTable", 404, kind="no_such_table")
        await record(audit, "loadTable", 403, kind="forbidden")
        await record(audit, "listTables", 401, who="anonymous", remote=None)
        await record(audit, "dropTable", 500)
    assert [(one.action, one.outcome, one.status, one.who, one.remote) for one in await kept(store)] == [
        ("createTable", "allowed", 200, "ann", "10.0.0.1"),
        ("updateTable", "failed:commit_conflict", 409, "ann", "10.0.0.1"),
        ("loadTable", "denied", 403, "ann", "10.0.0.1"),
        ("listTables", "denied", 401, "anonymous", ""),
        ("dropTable", "failed:500", 500, "ann", "10.0.0.1"),
    ]
    assert outcome_of(304, None) == "allowed"


async def test_reads_are_kept_where_that_is_asked_for(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock, reads=True) as audit:
        await record(audit, "loadTable", 200)
    assert [one.action for one in await kept(store)] == ["loadTable"]


async def test_records_are_written_in_batches(moody: Any, clock: SimulatedClock) -> None:
    moody.gate.clear()
    async with open_audit(moody, clock, batch=10) as audit:
        for number in range(35):
            await record(audit, request_id=str(number))
        assert audit.waiting == 35
        moody.gate.set()
        await audit.flush()
        assert audit.waiting == 0
    assert len(moody.sizes) <= 5
    assert [one.request_id for one in await kept(moody.store)] == [str(number) for number in range(35)]


async def test_changes_and_refusals_wait_for_room_and_reads_give_way(moody: Any, clock: SimulatedClock) -> None:
    moody.gate.clear()
    async with open_audit(moody, clock, reads=True, capacity=5, batch=5) as audit:
        waiters = [asyncio.create_task(record(audit, "createTable")) for _ in range(30)]
        waiters += [asyncio.create_task(record(audit, "loadTable", 403)) for _ in range(30)]
        await asyncio.sleep(0.05)
        assert 0 < sum(waiter.done() for waiter in waiters) <= 10
        await asyncio.wait_for(record(audit, "loadTable", 200), 60)
        assert audit.dropped == 1
        moody.gate.set()
        await asyncio.gather(*waiters)
    assert audit.dropped == 1
    assert len(await kept(moody.store)) == 60


async def test_a_database_that_fails_loses_and_doubles_nothing(moody: Any, clock: SimulatedClock) -> None:
    moody.failures = ["before", "after", "before", "after", "after"]
    async with open_audit(moody, clock, batch=3) as audit:
        for number in range(9):
            await record(audit, request_id=str(number))
    assert [one.request_id for one in await kept(moody.store)] == [str(number) for number in range(9)]
    assert audit.dropped == 0


async def test_closing_does_not_wait_for_ever_and_says_what_is_lost(moody: Any, clock: SimulatedClock) -> None:
    moody.gate.clear()
    with structlog.testing.capture_logs() as logs:
        async with open_audit(moody, clock, batch=4, close_timeout_s=0.05) as audit:
            for _ in range(7):
                await record(audit)
    assert audit.dropped == 7
    assert [log["records"] for log in logs] == [7]


async def test_any_text_of_a_request_can_be_kept(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        await record(audit, resource="/v1/\x00\udcff\ud800é" + "x" * 5000, who="\x00")
    [one] = await kept(store)
    assert one.resource.startswith("/v1/\ufffd??é")
    assert len(one.resource) == 1024


async def test_of_a_strangers_refusals_the_first_are_written_and_the_rest_is_counted(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for number in range(5000):
            await record(audit, "loadTable", 401, who="anonymous", remote="10.0.0.9", resource=f"/v1/{number:01000}")
        await record(audit, "loadTable", 401, who="anonymous", remote="10.0.0.8")
    found = await kept(store)
    theirs = [one for one in found if one.remote == "10.0.0.9"]
    written = [one for one in theirs if one.action == "loadTable"]
    assert 10 <= len(written) <= 50
    assert all(len(one.resource) <= 200 for one in written)
    counted = [one for one in theirs if one.action == REFUSED]
    assert [one.resource for one in counted] == [f"{5000 - len(written)} more requests"]
    assert [one.action for one in found if one.remote == "10.0.0.8"] == ["loadTable"]


async def test_a_new_minute_writes_anew(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        for _ in range(3):
            for _ in range(100):
                await record(audit, "loadTable", 401, who="anonymous")
            clock.advance(61_000)
    actions = [one.action for one in await kept(store)]
    assert (actions.count("loadTable"), actions.count(REFUSED)) == (60, 3)


async def test_strangers_of_a_thousand_addresses_are_bounded_together(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for number in range(30_000):
            await record(audit, "loadTable", 401, who="anonymous", remote=f"2001:db8::{number:x}")
    found = await kept(store)
    assert len(found) < 5000
    told = sum(int(one.resource.split()[0]) for one in found if one.action == REFUSED)
    assert told + sum(one.action == "loadTable" for one in found) == 30_000


async def test_what_a_principal_did_is_written_however_many_strangers_are_refused(
    moody: Any, clock: SimulatedClock
) -> None:
    moody.gate.clear()
    async with open_audit(moody, clock, capacity=5, batch=5) as audit:
        for number in range(1000):
            await asyncio.wait_for(record(audit, "loadTable", 401, who="anonymous", remote=f"10.0.{number}.1"), 60)
        acts = [asyncio.create_task(record(audit, "createTable", 200, who="ann")) for _ in range(700)]
        await asyncio.sleep(0)
        moody.gate.set()
        await asyncio.gather(*acts)
    assert sum(one.who == "ann" for one in await kept(moody.store)) == 700


async def test_a_principals_own_refusals_are_bounded_and_none_is_forgotten(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for _ in range(3000):
            await record(audit, "dropTable", 403, who="rita", kind="forbidden")
            await record(audit, "dropTable", 409, who="rita", kind="commit_conflict")
    found = await kept(store)
    assert sum(one.status == 409 for one in found) == 3000
    denied = [one for one in found if one.status == 403]
    assert len(denied) < 1000
    [counted] = [one for one in denied if one.action == REFUSED]
    assert int(counted.resource.split()[0]) + len(denied) - 1 == 3000
