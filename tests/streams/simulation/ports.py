"""The ports of a stream table, over a network and a storage that a simulation controls.

A message takes effect at one moment between its sending and its answer. The network can lose the message or its answer,
and can deliver the message twice. A message arrives even if its sender has crashed in the meantime.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import (
    CommitConflict,
    CommitUnknown,
    LogUnavailable,
    NoSuchTable,
    ObjectMissing,
    OffsetOutOfRange,
    RetryLater,
    SeamarkError,
)
from seamark.metaserver.log.kafka.broker import JournalListener, JournalRange, NewRecord
from seamark.metaserver.log.port import Shard
from seamark.metaserver.store.model import Entry, EntryKind, Replica
from seamark.metaserver.store.operations import CheckFence, FlushedRange, RenewReplica, TakeLease
from seamark.metaserver.streams.row_files import EncodedDeletes, EncodedFile, EncodedIndexFile, RowKey, RowSlice

T = TypeVar("T")


@dataclass
class FaultProbabilities:
    """The probability of each fault, from 0 to 1."""

    lost_reply: float
    repetition: float
    refusal: float
    crash: float
    power_cut: float
    pause: float
    clock_jump: float


class NoAnswer(Exception):
    """Raised if no answer to a message arrives in time."""


class SimulatedNetwork:
    """Carries messages. Its tasks belong to no process, so a message outlives its sender."""

    def __init__(self, rng: random.Random, faults: FaultProbabilities) -> None:
        self._rng = rng
        self.faults = faults
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.failures: list[Exception] = []
        """Unexpected errors of messages. They fail the run."""

    async def delay(self) -> None:
        """Wait for a random time, as a message or a disk would take."""
        await asyncio.sleep(self._rng.choice((0, 0.001, 0.002, 0.005, 0.02)))

    async def send(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a message.

        Raises:
            NoAnswer: The message or its answer was lost.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        copies = 2 if self._rng.random() < self.faults.repetition else 1
        for _ in range(copies):
            task = asyncio.get_running_loop().create_task(self._carry(receive, answer))
            self._tasks[task] = None
            task.add_done_callback(lambda finished_task: self._tasks.pop(finished_task, None))
        try:
            async with asyncio.timeout(1):  # Each delay is much shorter, so the message or the answer was lost.
                return await answer
        except TimeoutError:
            raise NoAnswer from None

    async def _carry(self, receive: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> None:
        """Deliver a message and its answer, each with a random delay, and lose some of them."""
        await self.delay()
        if self._rng.random() < self.faults.lost_reply:
            return
        try:
            message = await receive()
        except Exception as error:  # noqa: BLE001  the run ends with it
            message = error
            if not isinstance(error, SeamarkError | NoAnswer):
                self.failures.append(error)
        await self.delay()
        if self._rng.random() < self.faults.lost_reply or answer.done():
            return
        if isinstance(message, Exception):
            answer.set_exception(message)
        else:
            answer.set_result(message)


@dataclass
class SimulatedTable:
    """A table in the catalog: its files, and the flushed offset of each shard."""

    uuid: str
    flushed_offsets: dict[int, int]
    files: tuple[str, ...] = ()
    version: int = 0
    is_dropped: bool = False


class SimulatedCatalog:
    """Tables by their UUID. A commit is one transaction with a compare-and-swap of the flushed offsets."""

    key: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.tables: dict[str, SimulatedTable] = {}
        self.checks_offsets = True
        """Whether a commit is refused if the offsets have moved. A mutation sets this to False."""

    def entry(self, uuid: str) -> tuple[Entry, Any]:
        """Return the entry and the metadata of a table. The metadata is the tuple of its files.

        Raises:
            NoSuchTable: The table was never created, or was dropped.
        """
        table = self.tables.get(uuid)
        if table is None or table.is_dropped:
            raise NoSuchTable(f"no table {uuid}")
        flushed_text = ",".join(f"{shard}:{offset}" for shard, offset in table.flushed_offsets.items())
        entry = Entry(
            kind=EntryKind.TABLE,
            namespace=("n",),
            name="t",
            uuid=uuid,
            metadata_location=f"v{table.version}",
            flushed=flushed_text,
        )
        return entry, table.files

    def commit(self, uuid: str, files: Sequence[str], ranges: Sequence[FlushedRange]) -> None:
        """Add files and move the flushed offsets. A repeated commit has no effect.

        Raises:
            CommitConflict: Another flush has moved the offsets.
            NoSuchTable: The table was dropped.
        """
        table = self.tables[uuid]
        if table.is_dropped:
            raise NoSuchTable(f"no table {uuid}")
        if set(files) <= set(table.files):  # The same commit arrived earlier, so a conflict would be a wrong answer.
            return
        if self.checks_offsets and any(
            table.flushed_offsets[moved_range.shard] != moved_range.start for moved_range in ranges
        ):
            raise CommitConflict("the offsets have moved")
        for moved_range in ranges:
            table.flushed_offsets[moved_range.shard] = moved_range.end
        table.files = (*table.files, *files)
        table.version += 1

    def commit_keyed(
        self, entry: Entry, files: Sequence[str], ranges: Sequence[FlushedRange], deletes: EncodedDeletes
    ) -> None:
        """Add files and deletes, and move offsets. Only catalogs of keyed tables implement this method."""
        raise NotImplementedError


class RemoteTables:
    """The `StreamTables` of a server. It reaches the catalog over the network."""

    def __init__(self, network: SimulatedNetwork, catalog: SimulatedCatalog, rng: random.Random) -> None:
        self._network = network
        self._catalog = catalog
        self._rng = rng

    async def load(self, uuid: str) -> tuple[Entry, Any]:
        async def receive() -> tuple[Entry, Any]:
            return self._catalog.entry(uuid)

        try:
            return await self._network.send(receive)
        except NoAnswer:
            raise RetryLater("the database does not answer") from None

    async def commit(
        self,
        entry: Entry,
        metadata: Any,
        files: Sequence[EncodedFile],
        ranges: Sequence[FlushedRange],
        deletes: EncodedDeletes | None = None,
        index_files: Sequence[EncodedIndexFile] = (),
    ) -> None:
        """Send the commit to the catalog over the network. Some commits are refused.

        Raises:
            CommitConflict: The commit was refused.
            CommitUnknown: No answer arrived.
        """
        is_refused = self._rng.random() < self._network.faults.refusal

        async def receive() -> None:
            if is_refused:
                raise CommitConflict("another writer has created the file")
            locations = [file.location for file in files]
            if deletes is None:
                self._catalog.commit(entry.uuid, locations, ranges)
            else:
                self._catalog.commit_keyed(entry, locations, ranges, deletes)

        try:
            await self._network.send(receive)
        except NoAnswer:
            raise CommitUnknown("no answer to the commit") from None

    def find_key_columns(self, metadata: Any) -> tuple[str, ...]:
        return self._catalog.key

    def open_stored_rows(self, entry: Entry, metadata: Any) -> Any:
        return None  # The simulation's `RowFiles` reads the rows from the metadata.


class SimulatedStorage:
    """The part of `ObjectStore` that stream tables use."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network
        self.objects: dict[str, bytes] = {}

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        async def receive() -> None:
            self.objects[location] = data

        try:
            await self._network.send(receive)
        except NoAnswer:
            raise RetryLater("the storage does not answer") from None

    async def delete(self, location: str) -> None:
        await self._network.delay()
        self.objects.pop(location, None)

    async def read(self, location: str) -> bytes:
        await self._network.delay()
        if location not in self.objects:
            raise ObjectMissing(location)
        return self.objects[location]


class LineFiles:
    """`RowFiles` for rows that are lines."""

    def __init__(self) -> None:
        self._count = 0

    def encode(self, rows: Sequence[RowSlice], metadata: Any, folder: str | None) -> list[EncodedFile]:
        lines: list[bytes] = []
        for row_slice in rows:
            lines += row_slice.payload.split(b"\n")[row_slice.first : row_slice.first + row_slice.rows]
        self._count += 1
        return [EncodedFile(f"{folder or 'data'}/{self._count}", b"\n".join(lines), b"{}", len(lines))]

    def list_keys(self, rows: Sequence[RowSlice], metadata: Any) -> frozenset[RowKey]:
        return frozenset([()])

    def encode_index_files(self, files: Sequence[EncodedFile], metadata: Any) -> list[EncodedIndexFile]:
        return []


class Cluster:
    """A Kafka cluster with the records of one log.

    Attributes:
        partitions: The records with the rows of each shard.
        starts: The offset of the first record of each shard that retention has not removed.
        journal: The records that state which rows were appended, in the order of the appends.
        journal_start: The position of the first record of the journal that was not removed.
    """

    def __init__(self) -> None:
        self.partitions: dict[Shard, list[bytes]] = {}
        self.starts: dict[Shard, int] = {}
        self.journal: list[bytes] = []
        self.journal_start = 0


class RemoteBroker:
    """The `Broker` of one server.

    It reaches the cluster over the network, and a pause of the server stops its reads.
    """

    identity = "kafka/simulated"

    def __init__(
        self,
        network: SimulatedNetwork,
        cluster: Cluster,
        rng: random.Random,
        wait_unpaused: Callable[[], Awaitable[None]],
    ) -> None:
        self._network = network
        self._cluster = cluster
        self._rng = rng
        self._wait_unpaused = wait_unpaused
        self._last_write: asyncio.Future[None] | None = None
        self.follow_task: asyncio.Task[None] | None = None

    async def create_partitions(self, shards: Iterable[Shard]) -> None:
        await self._network.delay()

    async def write(self, records: Sequence[NewRecord]) -> list[int]:
        async def receive() -> list[int]:
            offsets = []
            for record in records:
                partition = self._cluster.partitions.setdefault(record.shard, [])
                offsets.append(len(partition))
                partition.append(record.value)
            return offsets

        try:
            offsets = await self._network.send(receive)
        except NoAnswer:
            raise LogUnavailable("the cluster does not answer") from None
        await self._wait_unpaused()
        return offsets

    def write_journal(self, value: bytes) -> Awaitable[None]:
        """Write a record after all earlier records of this server, as an idempotent producer does."""
        previous_write, loop = self._last_write, asyncio.get_running_loop()
        stored_event: asyncio.Future[None] = loop.create_future()
        self._last_write = stored_event

        async def receive() -> None:
            if previous_write is not None:
                await asyncio.wait([previous_write])
            if not stored_event.done():  # The broker recognises a repeated message.
                self._cluster.journal.append(value)
                stored_event.set_result(None)

        async def send() -> None:
            try:
                await self._network.send(receive)
            except NoAnswer:
                raise CommitUnknown("the cluster does not answer") from None
            finally:
                if not stored_event.done():  # The message was lost, so later messages do not wait for it.
                    stored_event.set_result(None)

        return loop.create_task(send())

    async def read(self, shard: Shard, records: Sequence[int]) -> Mapping[int, bytes]:
        await self._network.delay()
        if min(records) < self._cluster.starts.get(shard, 0):
            raise OffsetOutOfRange("the records are deleted")
        return {record: self._cluster.partitions[shard][record] for record in records}

    async def read_journal_range(self) -> JournalRange:
        await self._network.delay()
        answer = JournalRange(self._cluster.journal_start, len(self._cluster.journal))
        await self._network.delay()
        return answer

    async def delete_records(self, limit_offsets: Mapping[Shard, int]) -> None:
        await self._network.delay()
        for shard, record in limit_offsets.items():
            self._cluster.starts[shard] = max(record, self._cluster.starts.get(shard, 0))

    async def delete_journal(self, offset_before: int) -> None:
        await self._network.delay()
        self._cluster.journal_start = max(offset_before, self._cluster.journal_start)

    async def delete_stream(self, stream: str) -> None:
        await self._network.delay()

    def follow_journal(self, start: int, listener: JournalListener) -> None:
        self.follow_task = asyncio.get_running_loop().create_task(self._follow(start, listener))

    async def _follow(self, position: int, listener: JournalListener) -> None:
        while True:
            await self._network.delay()
            await asyncio.sleep(0.001)
            await self._wait_unpaused()
            if position < self._cluster.journal_start:
                position = self._cluster.journal_start
                listener.restart(position)
            end = min(len(self._cluster.journal), position + self._rng.choice((1, 3, 100)))
            if position < end:
                listener.receive(list(enumerate(self._cluster.journal[position:end], position)))
                position = end


class Leases:
    """The leases of processes in the database."""

    def __init__(self, clock: SimulatedClock) -> None:
        self._clock = clock
        self._until_s: dict[str, tuple[float, Replica]] = {}
        self._named: dict[str, tuple[str, int, int]] = {}
        """The holder, the end and the fencing number of each named lease."""

    def renew(self, operation: RenewReplica) -> list[Replica]:
        """Renew a lease. Return the replicas with live leases."""
        now_s = self._clock.monotonic()
        until_s = now_s + operation.lease_ms / 1000
        self._until_s[operation.replica.address] = (until_s, operation.replica)
        live_replicas = [replica for until_s, replica in self._until_s.values() if until_s > now_s]
        return sorted(live_replicas, key=lambda replica: replica.address)

    def take(self, operations: Sequence[TakeLease]) -> list[int]:
        """Take or renew named leases, all or none. Return their fencing numbers.

        Raises:
            CommitConflict: Another holder has a lease.
        """
        named_leases, fences = dict(self._named), []
        for operation in operations:
            holder, until_ms, fence = named_leases.get(operation.name, (operation.holder, 0, 1))
            if holder != operation.holder:
                if operation.now_ms < until_ms:
                    raise CommitConflict("another holder has the lease")
                fence += 1
            named_leases[operation.name] = (operation.holder, operation.until_ms, fence)
            fences.append(fence)
        self._named = named_leases
        return fences

    def check_fence(self, operation: CheckFence) -> None:
        """Check that the fencing number of a lease is the number in the operation.

        Raises:
            CommitConflict: The lease has another fencing number.
        """
        _, _, fence = self._named[operation.name]
        if fence != operation.fence:
            raise CommitConflict("another holder has had the lease")


class RemoteLeases:
    """The part of `PointerStore` that leases use."""

    def __init__(self, network: SimulatedNetwork, leases: Leases) -> None:
        self._network = network
        self._leases = leases

    async def transact(self, operations: Sequence[RenewReplica] | Sequence[TakeLease]) -> list[Any]:
        async def receive() -> list[Any]:
            if all(isinstance(operation, TakeLease) for operation in operations):
                return self._leases.take([operation for operation in operations if isinstance(operation, TakeLease)])
            return [self._leases.renew(operation) for operation in operations if isinstance(operation, RenewReplica)]

        try:
            return await self._network.send(receive)
        except NoAnswer:
            raise RetryLater("the database does not answer") from None


@dataclass
class SentRows:
    """The model of a table: the rows that writers have sent, and the acknowledged appends."""

    sent_lines: dict[tuple[str, int], Counter[bytes]] = field(default_factory=dict)
    acknowledged_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """The time of each acknowledgement, by (producer, number)."""


def jump_clock(clock: SimulatedClock, rng: random.Random) -> None:
    """Set the clock of the machine forward or back by a random time."""
    clock.jump(rng.choice((-60_000, -1000, 1000, 60_000)))
