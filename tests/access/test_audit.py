"""Tests of the audit log: what it records, that it loses no record, and its shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import structlog

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import CommitUnknown, RetryLater
from seamark.metaserver.access.audit import REFUSED, AuditLog, classify_outcome, open_audit
from seamark.metaserver.store.model import AuditRecord
from seamark.metaserver.store.operations import Operation, SaveAudit
from seamark.metaserver.store.port import PointerStore


class WaitingStore:
    """A store for audit records only, whose transactions wait for `may_write`.

    Each transaction takes the last item of `failures`. With "before" or "after", the transaction fails before or after
    its execution. With "" or without an item, it succeeds.
    """

    def __init__(self, store: PointerStore) -> None:
        self.store = store
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.failures: list[str] = []
        self.sizes: list[int] = []
        """The number of records in each successful transaction."""

    async def transact(self, operations: Sequence[Operation]) -> list[Any]:
        await self.may_write.wait()
        failure = self.failures.pop() if self.failures else ""
        if failure == "before":
            raise RetryLater("the database cannot be reached")
        results = await self.store.transact(operations)
        if failure == "after":
            raise CommitUnknown("the connection was lost")
        [save] = operations
        assert isinstance(save, SaveAudit)
        self.sizes.append(len(save.records))
        return results


@pytest.fixture
def failing_store(store: PointerStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("seamark.metaserver.access.audit._RETRY_S", 0.01)
    return WaitingStore(store)


async def record_operation(audit: AuditLog, operation: str = "createTable", status: int = 200, **options: Any) -> None:
    fields: dict[str, Any] = {
        "principal_name": "ann",
        "resource": "/v1/x",
        "request_id": "r",
        "remote": "10.0.0.1",
        **options,
    }
    await audit.record(operation=operation, status=status, **fields)


async def list_records(store: PointerStore) -> list[AuditRecord]:
    return await store.read_audit_records(None, 100_000)


async def test_changes_and_refusals_are_recorded_and_reads_are_not(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        await record_operation(audit, "createTable", 200)
        await record_operation(audit, "updateTable", 409, kind="commit_conflict")
        await record_operation(audit, "loadTable", 200)
        await record_operation(audit, "loadTable", 404, kind="no_such_table")
        await record_operation(audit, "loadTable", 403, kind="forbidden")
        await record_operation(audit, "listTables", 401, principal_name="anonymous", remote=None)
        await record_operation(audit, "dropTable", 500)
    assert [
        (
            audit_record.action,
            audit_record.outcome,
            audit_record.status,
            audit_record.principal_name,
            audit_record.remote,
        )
        for audit_record in await list_records(store)
    ] == [
        ("createTable", "allowed", 200, "ann", "10.0.0.1"),
        ("updateTable", "failed:commit_conflict", 409, "ann", "10.0.0.1"),
        ("loadTable", "denied", 403, "ann", "10.0.0.1"),
        ("listTables", "denied", 401, "anonymous", ""),
        ("dropTable", "failed:500", 500, "ann", "10.0.0.1"),
    ]
    assert classify_outcome(304, None) == "allowed"


async def test_reads_are_recorded_if_the_setting_enables_it(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock, reads=True) as audit:
        await record_operation(audit, "loadTable", 200)
    assert [audit_record.action for audit_record in await list_records(store)] == ["loadTable"]


async def test_audit_records_are_written_in_batches(failing_store: Any, clock: SimulatedClock) -> None:
    failing_store.may_write.clear()
    async with open_audit(failing_store, clock, batch=10) as audit:
        for number in range(35):
            await record_operation(audit, request_id=str(number))
        assert audit.waiting == 35
        failing_store.may_write.set()
        await audit.flush()
        assert audit.waiting == 0
    assert len(failing_store.sizes) <= 5
    assert [audit_record.request_id for audit_record in await list_records(failing_store.store)] == [
        str(number) for number in range(35)
    ]


async def test_changes_and_refusals_wait_for_space_and_reads_are_dropped(
    failing_store: Any, clock: SimulatedClock
) -> None:
    failing_store.may_write.clear()
    async with open_audit(failing_store, clock, reads=True, capacity=5, batch=5) as audit:
        waiters = [asyncio.create_task(record_operation(audit, "createTable")) for _ in range(30)]
        waiters += [asyncio.create_task(record_operation(audit, "loadTable", 403)) for _ in range(30)]
        await asyncio.sleep(0.05)
        assert 0 < sum(waiter.done() for waiter in waiters) <= 10
        await asyncio.wait_for(record_operation(audit, "loadTable", 200), 60)
        assert audit.dropped == 1
        failing_store.may_write.set()
        await asyncio.gather(*waiters)
    assert audit.dropped == 1
    assert len(await list_records(failing_store.store)) == 60


async def test_failing_database_loses_and_duplicates_no_audit_record(failing_store: Any, clock: SimulatedClock) -> None:
    failing_store.failures = ["before", "after", "before", "after", "after"]
    async with open_audit(failing_store, clock, batch=3) as audit:
        for number in range(9):
            await record_operation(audit, request_id=str(number))
    assert [audit_record.request_id for audit_record in await list_records(failing_store.store)] == [
        str(number) for number in range(9)
    ]
    assert audit.dropped == 0


async def test_closing_has_a_time_limit_and_reports_lost_records(failing_store: Any, clock: SimulatedClock) -> None:
    failing_store.may_write.clear()
    with structlog.testing.capture_logs() as logs:
        async with open_audit(failing_store, clock, batch=4, close_timeout_s=0.05) as audit:
            for _ in range(7):
                await record_operation(audit)
    assert audit.dropped == 7
    assert [log["records"] for log in logs] == [7]


async def test_any_text_of_a_request_can_be_recorded(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        await record_operation(audit, resource="/v1/\x00\udcff\ud800é" + "x" * 5000, principal_name="\x00")
    [entry] = await list_records(store)
    assert entry.resource.startswith("/v1/\ufffd??é")
    assert len(entry.resource) == 1024


async def test_first_refusals_of_an_unknown_client_are_recorded_and_the_rest_is_counted(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for number in range(5000):
            await record_operation(
                audit, "loadTable", 401, principal_name="anonymous", remote="10.0.0.9", resource=f"/v1/{number:01000}"
            )
        await record_operation(audit, "loadTable", 401, principal_name="anonymous", remote="10.0.0.8")
    records = await list_records(store)
    address_records = [audit_record for audit_record in records if audit_record.remote == "10.0.0.9"]
    full_records = [record for record in address_records if record.action == "loadTable"]
    assert 10 <= len(full_records) <= 50
    assert all(len(record.resource) <= 200 for record in full_records)
    count_records = [record for record in address_records if record.action == REFUSED]
    assert [record.resource for record in count_records] == [f"{5000 - len(full_records)} more requests"]
    assert [audit_record.action for audit_record in records if audit_record.remote == "10.0.0.8"] == ["loadTable"]


async def test_limit_of_recorded_refusals_restarts_each_minute(store: PointerStore, clock: SimulatedClock) -> None:
    async with open_audit(store, clock) as audit:
        for _ in range(3):
            for _ in range(100):
                await record_operation(audit, "loadTable", 401, principal_name="anonymous")
            clock.advance(61_000)
    actions = [audit_record.action for audit_record in await list_records(store)]
    assert (actions.count("loadTable"), actions.count(REFUSED)) == (60, 3)


async def test_unknown_clients_of_a_thousand_addresses_share_a_limit(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for number in range(30_000):
            await record_operation(audit, "loadTable", 401, principal_name="anonymous", remote=f"2001:db8::{number:x}")
    records = await list_records(store)
    assert len(records) < 5000
    counted_refusals = sum(
        int(audit_record.resource.split()[0]) for audit_record in records if audit_record.action == REFUSED
    )
    assert counted_refusals + sum(audit_record.action == "loadTable" for audit_record in records) == 30_000


async def test_actions_of_principals_are_recorded_during_a_flood_of_refusals(
    failing_store: Any, clock: SimulatedClock
) -> None:
    failing_store.may_write.clear()
    async with open_audit(failing_store, clock, capacity=5, batch=5) as audit:
        for number in range(1000):
            await asyncio.wait_for(
                record_operation(audit, "loadTable", 401, principal_name="anonymous", remote=f"10.0.{number}.1"), 60
            )
        tasks = [
            asyncio.create_task(record_operation(audit, "createTable", 200, principal_name="ann")) for _ in range(700)
        ]
        await asyncio.sleep(0)
        failing_store.may_write.set()
        await asyncio.gather(*tasks)
    assert sum(audit_record.principal_name == "ann" for audit_record in await list_records(failing_store.store)) == 700


async def test_refusals_of_a_principal_are_limited_and_the_rest_is_counted(
    store: PointerStore, clock: SimulatedClock
) -> None:
    async with open_audit(store, clock) as audit:
        for _ in range(3000):
            await record_operation(audit, "dropTable", 403, principal_name="rita", kind="forbidden")
            await record_operation(audit, "dropTable", 409, principal_name="rita", kind="commit_conflict")
    records = await list_records(store)
    assert sum(audit_record.status == 409 for audit_record in records) == 3000
    denied_records = [audit_record for audit_record in records if audit_record.status == 403]
    assert len(denied_records) < 1000
    [refusal_count] = [audit_record for audit_record in denied_records if audit_record.action == REFUSED]
    assert int(refusal_count.resource.split()[0]) + len(denied_records) - 1 == 3000
