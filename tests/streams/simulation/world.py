"""A simulated world: servers that crash, writers that repeat, readers that check, and one catalog.

A run has one of two forms. *Embedded*: one server with a log in segment files on its disk. A crash can be a power cut.
*Fleet*: several servers over one log in Kafka. The owner of a table flushes it. Sometimes another server also flushes
it, so that two flushes compete. A server can lose its lease, so a table can have two owners for some time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import cast

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import (
    Corrupt,
    LogUnavailable,
    NoSuchTable,
    ObjectMissing,
    OffsetOutOfRange,
    RetryLater,
    SeamarkError,
    StreamRemoved,
)
from seamark.metaserver.log.kafka.kafka_log import KafkaLimits, KafkaLog, open_log_over
from seamark.metaserver.log.port import Batch, StreamLog, StreamProducer
from seamark.metaserver.log.segments import SegmentLimits, open_segments
from seamark.metaserver.peers.membership import Membership
from seamark.metaserver.store.model import STREAM_OWNER_PROTOCOL, Replica
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.incoming.table_gates import TableGates
from seamark.metaserver.streams.owners import StreamOwners
from seamark.metaserver.streams.stream_table import FlushedBefore, FreshRows, StreamLimits, StreamTable
from tests.log.disk import Crash, SimulatedDisk, copy_disk
from tests.streams.simulation.ports import (
    Cluster,
    FaultProbabilities,
    Leases,
    LineFiles,
    NoAnswer,
    RemoteBroker,
    RemoteLeases,
    RemoteTables,
    SimulatedCatalog,
    SimulatedNetwork,
    SimulatedStorage,
    SimulatedTable,
    jump_clock,
)

SHARDS = 2
LIMITS = StreamLimits(fresh_interval_s=0.05, fresh_retention_s=5)
SMALL_PARTS = LIMITS._replace(part_bytes_max=1)
"""Limits with which each batch of the log becomes a separate fresh file."""
LOG_LIMITS = SegmentLimits(segment_bytes=1500, trim_interval_s=0.2, retention_bytes=4000)
KAFKA_LIMITS = KafkaLimits(
    batches_max=12, head_groups=15, trim_interval_s=0.2, answer_timeout_s=5, open_timeout_s=20, groups_max=3
)
LEASE_S = 1.0


class InvariantBroken(AssertionError):
    """Raised if an invariant does not hold."""


@dataclass
class Append:
    """An append of a writer: its rows by shard, and the outcome that the writer knows."""

    producer: str
    sequence: int
    uuid: str
    rows: dict[int, list[bytes]]
    is_acknowledged: bool = False

    @property
    def lines(self) -> list[bytes]:
        return [line for lines in self.rows.values() for line in lines]


@dataclass
class Process:
    """A server process with its tasks, from its start to its end."""

    name: str
    number: int
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    log: StreamLog | None = None
    tables: dict[str, StreamTable] = field(default_factory=dict)
    owners: StreamOwners = field(default_factory=lambda: StreamOwners(None))
    gates: TableGates | None = None
    paused_until_s: float = 0.0
    is_alive: bool = True


class DelayedRunner:
    """Runs operations of a disk after a delay. The process can crash during an operation."""

    def __init__(self, world: SimulationWorld, process: Process) -> None:
        self._world = world
        self._process = process
        self._write_lock = asyncio.Lock()

    async def write(self, work):
        async with self._write_lock:
            return await self._run(work)

    async def read(self, work):
        return await self._run(work)

    async def _run(self, work):
        await self._wait()
        try:
            result = work()
        except Crash:
            self._world.crash(self._process)
            raise asyncio.CancelledError from None
        await self._wait()
        return result

    async def _wait(self) -> None:
        await self._world.network.delay()
        await self._world.wait_while_paused(self._process)
        if not self._process.is_alive:
            raise asyncio.CancelledError


class SimulationWorld:
    """The state and the actors of a run."""

    def __init__(
        self, seed: int, *, appends: int = 12, fleet: bool | None = None, has_small_parts: bool | None = None
    ) -> None:
        """Create a world.

        Args:
            seed: The seed of all random choices.
            appends: The number of appends of each writer.
            fleet: If True, several servers share a log in Kafka. By default the seed decides.
            has_small_parts: If True, each batch becomes a separate fresh file, which has rows that are not flushed yet.
                By default the seed decides.
        """
        self.rng = random.Random(seed)
        if has_small_parts is None:
            has_small_parts = seed % 5 in (0, 4)  # This holds for two of five worlds.
        self.limits = SMALL_PARTS if has_small_parts else LIMITS
        self.clock = SimulatedClock(seed)
        scale = self.rng.choice((0.0, 0.3, 1.0))
        # One third of the worlds has no random faults, and one third has few. `power_cut` is not scaled, because it is
        # the fraction of crashes that are power cuts.
        self.faults = FaultProbabilities(
            lost_reply=0.06 * scale,
            repetition=0.2 * scale,
            refusal=0.3 * scale,
            crash=0.01 * scale,
            power_cut=0.5,
            pause=0.1 * scale,
            clock_jump=0.2 * scale,
        )
        self.is_fleet = self.rng.random() < 0.4 if fleet is None else fleet
        self.network = SimulatedNetwork(self.rng, self.faults)
        self.catalog = SimulatedCatalog()
        self.storage = SimulatedStorage(self.network)
        self.files = LineFiles()
        self.disk = SimulatedDisk()
        self.disk.on_operation = self._crash_sometimes
        self.cluster = Cluster()
        self.leases = Leases(self.clock)
        self.states: dict[int, bytes] = {}
        """The state of the log by the number of applied journal records. It comes from the first server that
        applied them.
        """
        self.servers: dict[str, Process] = {}
        self.started_count = 0
        self.uuid = ""
        self.appends_max = appends
        self.log_limits, self.kafka_limits = LOG_LIMITS, KAFKA_LIMITS
        self.appends: list[Append] = []
        self.reads = self.flushes = self.crashes = self.flushed_rows = 0
        self.durable_checks = 0
        self.is_ending = False
        self.trace: list[str] = []

    # -- faults ------------------------------------------------------------------------------------------------------

    def _crash_sometimes(self, operation: str) -> None:
        if not self.is_ending and self.rng.random() < self.faults.crash:
            raise Crash

    async def wait_while_paused(self, process: Process) -> None:
        """Wait while a process is paused."""
        while (pause_s := process.paused_until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(pause_s + 0.001)  # The additional millisecond avoids many short sleeps due to rounding.

    def crash(self, process: Process) -> None:
        """End a process at any point of its work. Messages that it has sent still arrive.

        In some cases, the disk loses power at the same time. The servers of a fleet never lose power.
        """
        if not process.is_alive:
            return
        process.is_alive = False
        self.crashes += 1
        self.trace.append(f"crash {process.name}")
        for task in process.tasks:
            task.cancel()
        if not self.is_fleet and self.rng.random() < self.faults.power_cut:
            self.disk.cut_power(self.rng)

    # -- servers -----------------------------------------------------------------------------------------------------

    async def run_server(self, name: str) -> None:
        """Run servers with this name, one after another. Each replaces the server that crashed."""
        while True:
            self.started_count += 1
            process = self.servers[name] = Process(name, self.started_count)
            task = asyncio.create_task(self._serve(process))
            process.tasks.append(task)
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
            self.crash(process)
            await asyncio.sleep(self.rng.choice((0.01, 0.2)))

    async def _serve(self, process: Process) -> None:
        if self.is_fleet:
            await self._keep_kafka_log_open(process)
            return
        with suppress(LogUnavailable):
            try:
                async with open_segments(self.disk, DelayedRunner(self, process), self.clock, self.log_limits) as log:
                    process.log = log
                    await self._flush_all(process)
            except Corrupt as error:  # No fault of the simulated disk damages synced bytes.
                raise InvariantBroken(f"acknowledged rows are damaged: {error.message}") from error

    async def _keep_kafka_log_open(self, process: Process) -> None:
        """Open the log in Kafka, and open it again after each failure. Take part in the choice of owners of tables."""
        address = f"{process.name}/{process.number}"
        replica = Replica(address, weight=1, version="", protocol=STREAM_OWNER_PROTOCOL, started_ms=0)
        store = cast("PointerStore", RemoteLeases(self.network, self.leases))
        membership = Membership(store, self.clock, replica, lease_s=LEASE_S)
        process.owners = StreamOwners(membership, lease_s=LEASE_S)
        process.gates = TableGates(store, self.clock, lease_s=LEASE_S)
        process.tasks.append(asyncio.create_task(self._renew(process, membership)))

        async def run(work):
            await self.network.delay()
            await self.wait_while_paused(process)
            return work()

        while True:
            broker = RemoteBroker(self.network, self.cluster, self.rng, partial(self.wait_while_paused, process))
            try:
                async with open_log_over(broker, self.clock, self.kafka_limits, run_in_thread=run) as log:
                    process.log = log
                    await self._flush_all(process)
            except LogUnavailable:  # The network lost messages while the log opened.
                await asyncio.sleep(0.1)
            finally:
                if broker.follow_task is not None:
                    broker.follow_task.cancel()

    async def _renew(self, process: Process, membership: Membership) -> None:
        while True:
            await self.wait_while_paused(process)
            await membership.renew()
            await asyncio.sleep(LEASE_S / 3)

    async def _flush_all(self, process: Process) -> None:
        """Flush the tables of a process at random times, as the server's own loop does."""
        while True:
            await asyncio.sleep(self.rng.choice((0.02, 0.1, 0.4)))
            await self.wait_while_paused(process)
            for table in list(process.tables.values()):
                with suppress(SeamarkError):
                    is_owner = process.owners.is_owner(table.uuid)
                    table.keeps_rows = is_owner
                    if not is_owner:
                        await table.drop_flushed_rows()
                    is_allowed = process.owners.may_flush(table.uuid, table.flushed, self.clock.now_ms())
                    # Some flushes run without permission, like those of a server that has just lost its lease.
                    rows = await table.flush() if is_allowed or self.rng.random() < 0.1 else 0
                    self.flushes += rows > 0
                    self.flushed_rows += rows
                with suppress(SeamarkError):
                    await table.clean()
                table.check_invariants()
            if isinstance(process.log, KafkaLog):
                self._check_state(process.log)

    def _check_state(self, log: KafkaLog) -> None:
        """Check that all servers that have applied the same records of the journal have the same state."""
        try:
            log.check_invariants()
        except AssertionError as error:
            raise InvariantBroken(f"an invariant of the log does not hold: {error}") from error
        applied_offset, state = log.take_snapshot()
        if self.states.setdefault(applied_offset, state) != state:
            raise InvariantBroken(f"two servers have different states after record {applied_offset} of the journal")

    async def table(self, process: Process, uuid: str) -> StreamTable:
        """Return the table of a process. It is opened at its first use.

        Raises:
            RetryLater: The process has no log yet, or has ended.
        """
        if process.log is None or not process.is_alive:
            raise RetryLater("the server is starting or has ended")
        if uuid not in process.tables:
            tables = self.make_tables()
            entry, _ = await tables.load(uuid)

            async def run(work):
                await self.network.delay()
                await self.wait_while_paused(process)
                return work()

            process.tables.setdefault(
                uuid,
                StreamTable(
                    entry,
                    process.log,
                    tables,
                    self.files,
                    self.storage,
                    self.clock,
                    self.limits,
                    fresh_folder=f"fresh/{process.number}",
                    run_in_thread=run,
                ),
            )
        return process.tables[uuid]

    async def call(self, process: Process, work):
        """Run a request in a process, and return its answer. If the process ends, the caller gets no answer."""

        async def receive():
            if not process.is_alive:
                raise NoAnswer
            task = asyncio.get_running_loop().create_task(work())
            process.tasks.append(task)
            try:
                await asyncio.wait([task])
            finally:
                if task in process.tasks:
                    process.tasks.remove(task)
            if task.cancelled() or not process.is_alive:
                raise NoAnswer
            return task.result()

        return await self.network.send(receive)

    # -- tables ------------------------------------------------------------------------------------------------------

    def create_or_replace_table(self) -> None:
        """Create the table, or drop it and create another table with its name."""
        if self.uuid:
            self.catalog.tables[self.uuid].is_dropped = True
        self.uuid = f"table-{len(self.catalog.tables)}"
        self.catalog.tables[self.uuid] = SimulatedTable(self.uuid, dict.fromkeys(range(SHARDS), 0))

    def list_live_processes(self) -> list[Process]:
        return [process for process in self.servers.values() if process.is_alive]

    # -- writers -----------------------------------------------------------------------------------------------------

    async def run_writer(self, name: str) -> None:
        """Append all rows of a writer.

        Several appends run concurrently, and each is repeated until it is acknowledged.
        """
        append_count = 0
        session = 0
        while append_count < self.appends_max:
            uuid = self.uuid
            count = min(self.rng.choice((1, 3, 5)), self.appends_max - append_count)
            producer = f"{name}.{session}"
            appends = [self._make_append(producer, uuid, number) for number in range(count)]
            self.appends += appends
            outcomes = await asyncio.gather(*(self._send(append) for append in appends))
            append_count += count
            session += 1
            if not all(outcomes):  # The table was dropped, so the writer starts again.
                continue
            await asyncio.sleep(self.rng.choice((0, 0.05)))

    def _make_append(self, producer: str, uuid: str, sequence: int) -> Append:
        new_shards = self.rng.sample(range(SHARDS), self.rng.choice((1, 1, SHARDS)))
        return Append(
            producer,
            sequence,
            uuid,
            {
                shard: [f"{producer}/{sequence}/{shard}/{row}".encode() for row in range(self.rng.choice((1, 3)))]
                for shard in new_shards
            },
        )

    def _to_batch(self, rows: list[bytes]) -> Batch:
        return Batch(len(rows), b"\n".join(rows))

    def make_tables(self) -> RemoteTables:
        """Return a server's view of the tables in the catalog."""
        return RemoteTables(self.network, self.catalog, self.rng)

    async def _send(self, append: Append) -> bool:
        """Repeat an append until it is acknowledged. Return False if its table was dropped."""
        while True:
            if append.uuid != self.uuid:
                return False
            if live_processes := self.list_live_processes():
                process = self.rng.choice(live_processes)

                async def work(process=process) -> None:
                    await self.wait_while_paused(process)
                    table = await self.table(process, append.uuid)
                    await self._append(process, table, append)
                    table.check_invariants()

                try:
                    await self.call(process, work)
                except (NoSuchTable, StreamRemoved):
                    return False
                except (SeamarkError, NoAnswer):
                    pass
                else:
                    append.is_acknowledged = True
                    return True
            await asyncio.sleep(self.rng.choice((0.01, 0.05)))

    async def _append(self, process: Process, table: StreamTable, append: Append) -> None:
        batches = {shard: self._to_batch(rows) for shard, rows in append.rows.items()}
        await table.append(batches, StreamProducer(append.producer, append.sequence))

    # -- readers -----------------------------------------------------------------------------------------------------

    async def run_reader(self) -> None:
        """Read the table repeatedly, and check each answer."""
        previous_lines: Counter[bytes] = Counter()
        last_write: tuple[int, str] = (0, "")
        while True:
            await asyncio.sleep(self.rng.choice((0.01, 0.05, 0.2)))
            live_processes = self.list_live_processes()
            if not live_processes:
                continue
            process, uuid = self.rng.choice(live_processes), self.uuid
            required_appends = [append for append in self.appends if append.is_acknowledged and append.uuid == uuid]
            try:
                lines = await self._read(process, uuid)
            except OffsetOutOfRange as error:
                raise InvariantBroken(f"acknowledged rows are lost: {error.message}") from None
            except (SeamarkError, NoAnswer):
                continue
            if uuid != self.uuid:
                continue
            self.reads += 1
            self.check_read(lines, uuid, required_appends)
            if last_write == (process.number, uuid) and previous_lines - lines:
                raise InvariantBroken(
                    f"a reader went back to an earlier state: it lost the rows {sorted(previous_lines - lines)[:5]}"
                )
            previous_lines, last_write = lines, (process.number, uuid)

    async def _read(self, process: Process, uuid: str) -> Counter[bytes]:
        """Return the rows of the table's files and its fresh rows, as a plan of the server does."""
        tables = self.make_tables()

        async def plan() -> tuple[tuple[str, ...], FreshRows]:
            await self.wait_while_paused(process)
            for _ in range(5):
                table = await self.table(process, uuid)
                entry, files = await tables.load(uuid)
                with suppress(FlushedBefore):
                    return files, await table.get_fresh_rows(entry.parse_flushed_offsets())
            raise RetryLater("another flush interrupted each attempt to read the table")

        files, fresh_rows = await self.call(process, plan)
        await self._check_durable(uuid, fresh_rows.offsets)
        locations = [*files, *(file.location for part in fresh_rows.parts for file in part.files)]
        lines: Counter[bytes] = Counter()
        for location in locations:
            try:
                lines.update((await self.storage.read(location)).split(b"\n"))
            except ObjectMissing:
                raise InvariantBroken(f"a plan names {location}, which has been deleted") from None
        return lines

    async def _check_durable(self, uuid: str, offsets) -> None:
        """Check that a power cut at this moment would not lose a row of the plan."""
        # A fleet has no log on a disk. The check reads the whole log, so only half of the reads make it.
        if self.is_fleet or self.rng.random() < 0.5:
            return
        self.durable_checks += 1
        disk = copy_disk(self.disk, durable=True)
        async with open_segments(disk, InstantRunner(), self.clock, LOG_LIMITS) as log:
            for shard, state in log.list_shards(uuid).items():
                if offsets.get(shard.number, 0) > state.watermark:
                    raise InvariantBroken(f"a reader sees row {offsets[shard.number]} beyond the watermark of {shard}")

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_read(self, lines: Counter[bytes], uuid: str, required_appends: list[Append]) -> None:
        """Check the rows of one read.

        Args:
            lines: The rows, and how often each of them was read.
            uuid: The table that was read.
            required_appends: The appends whose rows must be among the rows.

        Raises:
            InvariantBroken: A row occurs twice or is missing, only a part of an append was read, or a row belongs to
                another table.
        """
        if repeated_lines := [line for line, count in lines.items() if count > 1]:
            raise InvariantBroken(f"rows occur twice: {repeated_lines[:5]}")
        for append in self.appends:
            is_read = [line in lines for line in append.lines]
            if any(is_read) and not all(is_read):
                raise InvariantBroken(f"only a part of an append is visible: {append.lines}")
            if any(is_read) and append.uuid != uuid:
                raise InvariantBroken(f"rows of another table are visible: {append.lines}")
        for append in required_appends:
            if missing_lines := [line for line in append.lines if line not in lines]:
                raise InvariantBroken(f"acknowledged rows are lost: {missing_lines[:5]}")

    async def check_table(self, table: SimulatedTable, acknowledged_appends: list[Append]) -> None:
        """Check the table's files after the last flush."""
        lines: Counter[bytes] = Counter()
        for location in table.files:
            lines.update(self.storage.objects[location].split(b"\n"))
        self.check_read(lines, self.uuid, acknowledged_appends)

    async def check_order(self, log: StreamLog) -> None:
        """Check that each shard has the appends of each producer in the order of their numbers."""
        for shard, state in log.list_shards().items():
            offset, last_values = state.start, {}
            while offset < state.watermark:
                for record in await log.read(shard, offset, limit_bytes=1 << 20):
                    if record.sequence <= last_values.get(record.producer, -1):
                        raise InvariantBroken(
                            f"append {record.sequence} of {record.producer} is out of order in {shard}"
                        )
                    last_values[record.producer] = record.sequence
                    offset = record.end

    # -- a run -------------------------------------------------------------------------------------------------------

    async def cause_faults(self) -> None:
        """Cause a random fault or change at random times until the task is cancelled.

        It pauses or crashes a server, changes the clock, replaces the table, or commits another change to the
        table. A table is replaced by a drop and the creation of another table with its name.
        """
        while True:
            await asyncio.sleep(self.rng.choice((0.05, 0.3)))
            draw = self.rng.random()
            # A pause and a crash are equally likely. A replacement of the table is much less likely.
            crash_end = 2 * self.faults.pause
            clock_jump_end = crash_end + self.faults.clock_jump
            replacement_start = 1 - self.faults.pause / 4
            if draw < self.faults.pause and (live_processes := self.list_live_processes()):
                process = self.rng.choice(live_processes)
                process.paused_until_s = asyncio.get_running_loop().time() + self.rng.choice((0.3, 3))
            elif draw < crash_end and (live_processes := self.list_live_processes()):
                self.crash(self.rng.choice(live_processes))
            elif draw < clock_jump_end:
                jump_clock(self.clock, self.rng)
            elif draw < 0.5 and self.faults.lost_reply:  # In a world without faults, nothing else changes the table.
                self.commit_other_change()
            elif draw > replacement_start:
                self.create_or_replace_table()

    def commit_other_change(self) -> None:
        """Commit another change to the table, such as new properties. It changes neither rows nor offsets."""
        self.catalog.tables[self.uuid].version += 1

    def create_change_actors(self) -> Sequence[Coroutine[None, None, None]]:
        """Return coroutines that change tables until the writers have finished."""
        return ()

    async def run(self) -> None:
        """Run until all writers have finished, then stop all faults and check the contents.

        Only a fleet, whose log is in Kafka, has several servers.
        """
        self.create_or_replace_table()
        names = ("a", "b", "c") if self.is_fleet else ("a",)
        servers = [asyncio.create_task(self.run_server(name)) for name in names]
        readers = [asyncio.create_task(self.run_reader()) for _ in range(2)]
        fault_task = asyncio.create_task(self.cause_faults())
        writers = [asyncio.create_task(self.run_writer(f"w{number}")) for number in range(3)]
        changers = [asyncio.create_task(work) for work in self.create_change_actors()]
        background = [*servers, *readers, fault_task, *changers]
        await self._wait_for(writers, background)
        self.is_ending = True
        for task in (fault_task, *changers):
            task.cancel()
        for fault in fields(self.faults):
            setattr(self.faults, fault.name, 0.0)
        await self._wait_for([asyncio.create_task(self._flush_and_check())], [*servers, *readers])

    async def _wait_for(self, awaited_tasks: list[asyncio.Task[None]], background: list[asyncio.Task[None]]) -> None:
        """Wait for tasks. A failure of any task ends the run."""
        waiting_tasks = set(awaited_tasks)
        while waiting_tasks:
            finished_tasks, _ = await asyncio.wait([*waiting_tasks, *background], return_when=asyncio.FIRST_COMPLETED)
            for task in finished_tasks:
                task.result()
            if self.network.failures:
                raise self.network.failures[0]
            waiting_tasks -= finished_tasks

    async def _flush(self, process: Process) -> int:
        return await (await self.table(process, self.uuid)).flush()

    async def _flush_until_empty(self) -> Process:
        """Flush the table until a server has no more rows to flush. Return this server."""
        while True:
            await asyncio.sleep(0.5)
            for process in self.list_live_processes():
                with suppress(SeamarkError, NoAnswer):
                    if await self.call(process, partial(self._flush, process)) == 0:
                        return process

    async def _flush_and_check(self) -> None:
        """Flush all rows, and check the table and the log."""
        table = self.catalog.tables[self.uuid]
        process = await self._flush_until_empty()
        acknowledged_appends = [
            append for append in self.appends if append.is_acknowledged and append.uuid == self.uuid
        ]
        await self.check_table(table, acknowledged_appends)
        log = process.log  # Other servers may still open their log.
        assert log is not None
        with suppress(OffsetOutOfRange):  # Retention may remove rows during the read.
            await self.check_order(log)


class InstantRunner:
    """Runs operations of a disk at once."""

    async def write(self, work):
        return work()

    async def read(self, work):
        return work()
