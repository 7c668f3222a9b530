"""Tests of the gates of a shared log: after any failure, later appends and commits do not wait for a lost holder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import CommitUnknown, RetryLater
from seamark.metaserver.log.port import GateMoved, SharedLog, StreamGate
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.store.sql.sqlite import open_sqlite
from seamark.metaserver.streams.incoming import append_gates, table_gates
from seamark.metaserver.streams.incoming.table_gates import TableGates

UUID = "t"


class FaultyLog:
    """A log that does not answer in time, or whose gate another process moves first.

    A commit closes the gate of a stream, so that the log takes no rows meanwhile. The number of the gate counts how
    often the gate was closed or opened.
    """

    def __init__(self) -> None:
        self.gate = StreamGate(number=0, is_closed=False)
        self.closing_error: Exception | None = None
        self.opening_error: Exception | None = None
        self.may_open = asyncio.Event()
        self.may_open.set()

    async def catch_up(self) -> None:
        await asyncio.sleep(0)

    def read_gates(self, streams: Iterable[str]) -> dict[str, StreamGate]:
        return dict.fromkeys(streams, self.gate)

    async def move_gates(self, numbers: Mapping[str, int], *, is_closed: bool) -> None:
        if not is_closed:
            await self.may_open.wait()
        error = self.closing_error if is_closed else self.opening_error
        if error is not None:
            raise error
        if numbers[UUID] != self.gate.number:
            raise GateMoved("The gate has moved")
        self.gate = StreamGate(self.gate.number + 1, is_closed)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[PointerStore]:
    async with open_sqlite(tmp_path / "db", clock=SystemClock()) as store:
        yield store


def cast_to_log(log: Any) -> SharedLog:
    return cast("SharedLog", log)


async def change(gates: TableGates, log: FaultyLog) -> None:
    async with gates.hold_appends(cast_to_log(log), [UUID]):
        pass


@pytest.mark.parametrize("error", [GateMoved("moved"), CommitUnknown("unknown"), None])
async def test_failed_opening_of_an_abandoned_gate_leaves_no_lease(
    store: PointerStore, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """A process has ended without opening the gate, which stops appends to the stream during a commit.

    A later process takes a lease and tries to open the gate. If it kept its lease after a failure, a later commit would
    wait for the end of the lease, and be refused.
    """
    monkeypatch.setattr(append_gates, "APPEND_WAIT_S", 0)  # A commit that would wait for appends is refused at once.
    log, gates = FaultyLog(), TableGates(store, SystemClock())
    log.gate, log.opening_error = StreamGate(number=1, is_closed=True), error
    with pytest.raises(RetryLater):
        async with gates.hold_commits(cast_to_log(log), [UUID]):
            pass
    log.opening_error = None
    await change(gates, log)  # It is refused after 10 s if another holder has the lease.
    assert not log.gate.is_closed


async def test_commit_whose_gate_cannot_be_closed_reports_that_nothing_was_committed(store: PointerStore) -> None:
    log, gates = FaultyLog(), TableGates(store, SystemClock())
    log.closing_error = CommitUnknown("The rows may be stored or not")
    with pytest.raises(RetryLater, match="nothing was committed"):
        await change(gates, log)
    log.closing_error = None
    await change(gates, log)


async def test_commit_ends_before_a_slow_log_has_opened_the_gate(
    store: PointerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_gates, "_OPEN_WAIT_S", 0.01)
    log, gates = FaultyLog(), TableGates(store, SystemClock())
    log.may_open.clear()
    await change(gates, log)
    assert log.gate.is_closed
    log.may_open.set()
    await gates.close()
    assert not log.gate.is_closed
