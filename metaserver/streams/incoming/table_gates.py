"""Orders appends of all processes, and the commits that change how rows are written, so that they never overlap.

`AppendGates` orders them in one process. With a shared log, another process may append rows between their check and
such a commit. So a shared log has a gate for each table, whose number rises when it is closed or opened. An append
states the number that the gate had before its rows were checked, and the log refuses it if the gate has moved since.

1. A commit takes the lease of the gate in the database, whose fencing number rises with each new holder.
2. It closes the gate, and flushes the table. Until the gate opens, the log stores no rows.
3. It changes the table in a transaction that compares the fencing number.
4. It gives the lease to another holder, so that no transaction of it can still succeed, and opens the gate.

A commit waits only for a short time until its gate is open, and a task goes on.

If the process of a commit stops, its lease expires. Then any process takes the lease, and opens the gate if it has not
moved since. If the first process was only paused, the database refuses its transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import structlog

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import CommitConflict, CommitUnknown, RetryLater, SeamarkError
from seamark.metaserver.log.port import GateMoved, SharedLog
from seamark.metaserver.store.model import STREAM_GATE
from seamark.metaserver.store.operations import CheckFence, TakeLease
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.incoming import append_gates
from seamark.metaserver.streams.incoming.append_gates import AppendGates

GATE_LEASE_S = 15.0
"""The time after which other processes open the gate of a process that has stopped."""
_RENEWALS_PER_LEASE = 3
"""The number of renewals within the duration of a lease, so that a failed renewal does not end it."""
_POLL_S = 0.05
"""The interval between two checks for an open gate or a free lease."""
_MOVES_MAX = 3
"""The maximum number of attempts to close or to open a gate."""
_OPEN_WAIT_S = 1.0
"""The maximum time for which a commit waits until its gate is open."""
_CLOSE_WAIT_S = 5.0
"""The maximum time for which the server waits at its end until gates are open."""
_log = structlog.get_logger("seamark.streams")


class TableGates:
    """The gates of all tables, in this process and in a shared log. An instance belongs to one event loop.

    The gate of a stream table is closed while a commit changes how its rows are written. Then the log refuses appends.
    """

    def __init__(self, store: PointerStore, clock: Clock, *, lease_s: float = GATE_LEASE_S) -> None:
        self._store = store
        self._clock = clock
        self._lease_ms = int(1000 * lease_s)
        self._local_gates = AppendGates()
        self._openings: set[asyncio.Task[None]] = set()
        """The tasks that open gates after a commit."""

    @property
    def changing_uuids(self) -> Collection[str]:
        """The UUIDs of the tables to which a commit of this process blocks appends: their gates are closed."""
        return self._local_gates.changing_uuids

    @asynccontextmanager
    async def hold_commits(
        self, log: SharedLog | None, uuids: Collection[str], arrived_s: float | None = None
    ) -> AsyncIterator[Mapping[str, int]]:
        """Wait until the gates of tables are open. Keep commits of this process away while the context is active.

        A commit closes the gate of a table while it changes how the rows of the table are written.

        Args:
            log: The log of the tables, or None if only this process has the log.
            uuids: The UUIDs of the tables.
            arrived_s: When the rows arrived, by the clock of the event loop. The time since then counts for the maximum
                wait. The default is now.

        Yields:
            The numbers of the gates. Read the metadata of the tables afterwards, and pass the numbers to the log.

        Raises:
            RetryLater: A commit takes too long.
        """
        since_s = asyncio.get_running_loop().time() if arrived_s is None else arrived_s
        async with self._local_gates.hold_commits(uuids, since_s):
            yield {} if log is None else await self._await_open(log, uuids, since_s)

    async def _await_open(self, log: SharedLog, uuids: Collection[str], since_s: float) -> Mapping[str, int]:
        """Wait until no commit blocks appends to the tables (all gates are open), and return the numbers of the gates.

        The number of a gate rises when it is closed or opened. So an append can state the number, and is refused if a
        commit has changed the table meanwhile.

        Raises:
            RetryLater: A commit takes too long. Gates whose processes have stopped are opened first, so that a later
                append succeeds.
        """
        loop = asyncio.get_running_loop()
        while True:
            gates = log.read_gates(uuids)
            closed_numbers = {uuid: gate.number for uuid, gate in gates.items() if gate.is_closed}
            if not closed_numbers:
                return {uuid: gate.number for uuid, gate in gates.items()}
            if loop.time() >= since_s + append_gates.APPEND_WAIT_S:
                await self._open_abandoned(log, closed_numbers)
                raise RetryLater("A commit changes the schema of the stream table; send the rows again")
            await asyncio.sleep(_POLL_S)

    async def _open_abandoned(self, log: SharedLog, closed_numbers: Mapping[str, int]) -> None:
        """Open the gates of processes that have stopped after they closed the gates to block appends.

        If this fails, a later append tries again.

        This process must take the lease of a gate first, which fails while another process holds the lease. With the
        new lease, the transaction of the earlier holder fails, because it checks its fencing number. Only a gate that
        still has its earlier number is opened.

        Args:
            log: The log of the tables.
            closed_numbers: The number of each closed gate, by the UUID of the table, read before this call.
        """
        for uuid, number in closed_numbers.items():
            with suppress(SeamarkError):
                holder = str(self._clock.uuid4())
                try:
                    await self._take_lease(uuid, holder)
                    if log.read_gates([uuid])[uuid].number == number:  # else another append has opened the gate
                        await log.move_gates({uuid: number}, is_closed=False)
                finally:
                    await self._end_lease(uuid, holder)  # Fails if another process has the lease.

    @asynccontextmanager
    async def hold_appends(self, log: SharedLog | None, uuids: Collection[str]) -> AsyncIterator[list[CheckFence]]:
        """Block appends to the tables, in all processes, while the context is active: close their gates.

        First wait until running appends have ended.

        Args:
            log: The log of the tables, or None if only this process has the log.
            uuids: The UUIDs of the tables.

        Yields:
            The operations that the transaction of the commit must contain.

        Raises:
            RetryLater: Running appends or other commits take too long, or the log or the database does not answer.
        """
        async with self._local_gates.hold_appends(uuids), AsyncExitStack() as stack:
            # Close the gates in one order, so that commits of several tables do not wait for each other.
            yield (
                []
                if log is None
                else [await stack.enter_async_context(self._close_gate(log, uuid)) for uuid in sorted(uuids)]
            )

    @asynccontextmanager
    async def _close_gate(self, log: SharedLog, uuid: str) -> AsyncIterator[CheckFence]:
        """Close the gate of a table, so that the log refuses appends to the table, while the context is active.

        A lease in the database, which this process renews, shows other processes that the gate is in use. The commit's
        transaction must contain the yielded operation, which fails if another process has taken the lease. At the end
        of the context, `_begin_opening` opens the gate.

        Raises:
            RetryLater: Another commit takes too long, or the log or the database does not answer.
        """
        holder = str(self._clock.uuid4())
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._begin_opening, log, uuid, holder)
            try:
                fence = await self._await_lease(uuid, holder)
                renewal = asyncio.create_task(self._renew(uuid, holder), name=f"gate {uuid}")
                stack.callback(renewal.cancel)
                await self._close_in_log(log, uuid)
            except CommitUnknown:
                raise RetryLater(
                    "The database or the log did not answer before the commit began; nothing was committed; repeat the "
                    "commit"
                ) from None
            yield CheckFence(f"{STREAM_GATE}{uuid}", fence)

    async def _close_in_log(self, log: SharedLog, uuid: str) -> None:
        """Record in the log that the gate of a table is closed. From then on, the log refuses appends to the table.

        Raises:
            GateMoved: Other processes have moved the gate during each attempt.
        """
        for attempt in range(1, _MOVES_MAX + 1):
            await log.catch_up()  # Read the current number of the gate, which this process may not have yet.
            try:
                await log.move_gates({uuid: log.read_gates([uuid])[uuid].number}, is_closed=True)
                return
            except GateMoved:  # The last holder of the lease has opened the gate meanwhile.
                if attempt == _MOVES_MAX:
                    raise

    async def _begin_opening(self, log: SharedLog, uuid: str, holder: str) -> None:
        """Start a task that opens a gate, so that the log accepts appends again. Wait for it at most `_OPEN_WAIT_S`.

        The wait is short, because the commit is answered only afterwards.
        """
        opening = asyncio.create_task(self._open_gate(log, uuid, holder), name=f"open gate {uuid}")
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        await asyncio.wait([opening], timeout=_OPEN_WAIT_S)

    async def close(self) -> None:
        """Wait at most `_CLOSE_WAIT_S` for the tasks that allow appends again after a commit, by opening gates.

        Other processes open the remaining gates later.
        """
        if not self._openings:
            return
        _, openings = await asyncio.wait(self._openings, timeout=_CLOSE_WAIT_S)
        for opening in openings:
            opening.cancel()
        await asyncio.gather(*openings, return_exceptions=True)

    async def _open_gate(self, log: SharedLog, uuid: str, holder: str) -> None:
        """Allow appends to a table again after a commit: end the lease of its gate, and open the gate in the log.

        If this fails, another process opens the gate later.
        """
        for attempt in range(1, _MOVES_MAX + 1):
            try:
                gate = log.read_gates([uuid])[uuid]
                # The transaction of the commit may still run after a lost connection. Without the lease, it fails.
                await self._end_lease(uuid, holder)
                if gate.is_closed:
                    await log.move_gates({uuid: gate.number}, is_closed=False)
            except (CommitConflict, GateMoved):  # Another process has the lease, or has opened the gate.
                return
            except SeamarkError as error:
                if attempt == _MOVES_MAX:
                    _log.warning("the gate of a stream table was not opened", table=uuid, error=error.message)
            except Exception:  # noqa: BLE001  the task has no caller that would get the error of a bug
                _log.exception("the gate of a stream table was not opened", table=uuid)
                return
            else:
                return

    async def _await_lease(self, uuid: str, holder: str) -> int:
        """Take the lease with which a process may close a table's gate, and return its fencing number.

        A closed gate blocks appends to the table. The method waits while another process has the lease.

        Raises:
            RetryLater: Another process has held the lease for too long.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + append_gates.CHANGE_WAIT_S
        while True:
            with suppress(CommitConflict):
                return await self._take_lease(uuid, holder)
            if loop.time() >= until_s:
                raise RetryLater("Another commit changes the schema of the stream table; repeat the commit later")
            await asyncio.sleep(_POLL_S)

    async def _take_lease(self, uuid: str, holder: str) -> int:
        """Take or renew the lease with which a process may close a table's gate, and return its fencing number.

        A closed gate blocks appends to the table.

        Raises:
            CommitConflict: Another process has the lease.
        """
        now_ms = self._clock.now_ms()
        lease = TakeLease(f"{STREAM_GATE}{uuid}", holder, now_ms, now_ms + self._lease_ms)
        return int((await self._store.transact([lease]))[0])

    async def _end_lease(self, uuid: str, holder: str) -> None:
        """End the lease of a holder, and raise its fencing number.

        Raises:
            CommitConflict: Another process has the lease.
        """
        name, now_ms = f"{STREAM_GATE}{uuid}", self._clock.now_ms()
        next_holder = str(self._clock.uuid4())
        # The first operation makes the lease expire at once. A lease that passes to another holder gets a new fencing
        # number, so the second operation passes it to an unused holder.
        await self._store.transact(
            [TakeLease(name, new_holder, now_ms, now_ms) for new_holder in (holder, next_holder)]
        )

    async def _renew(self, uuid: str, holder: str) -> None:
        """Renew a lease until the task is cancelled, or another process has the lease."""
        while True:
            await asyncio.sleep(self._lease_ms / 1000 / _RENEWALS_PER_LEASE)
            try:
                await self._take_lease(uuid, holder)
            except CommitConflict:
                return
            except SeamarkError:  # The next renewal may succeed.
                continue
