"""The ports of a stream table, over a network and a storage that a simulation controls.

What a message does, it does at one moment between its sending and its answer. It may get lost before, its answer may
get lost, it may arrive twice, and it arrives even if its sender has crashed meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from seamark.formats.runtime.clock import SimulatedClock
from seamark.formats.runtime.errors import (
    CommitConflict,
    CommitUnknown,
    LogUnavailable,
    NoSuchTable,
    ObjectMissing,
    RetryLater,
    SeamarkError,
)
from tests.log.memory import MemoryLog
from seamark.metaserver.log.port import Acknowledgement, Batch, Shard, StreamProducer, StreamProducerState
from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.operations import FlushedRange
from seamark.metaserver.streams.row_files import EncodedFile, RowSlice

T = TypeVar("T")


@dataclass
class Faults:
    """How probable what is, from 0 to 1."""

    lost: float
    repeated: float
    refused: float
    crash: float
    power_cut: float
    pause: float
    clock_jump: float


class Lost(Exception):
    """No answer came."""


class Network:
    """Carries messages. Its tasks belong to no process, so that a message outlives its sender."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self._rng = rng
        self.faults = faults
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.failures: list[Exception] = []
        """Errors that no message may have."""

    async def delay(self) -> None:
        """Wait for the time that a message or a disk takes."""
        await asyncio.sleep(self._rng.choice((0, 0.001, 0.002, 0.005, 0.02)))

    async def send(self, receive: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a message.

        Raises:
            Lost: If the message or its answer was lost.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        copies = 2 if self._rng.random() < self.faults.repeated else 1
        for _ in range(copies):
            task = asyncio.get_running_loop().create_task(self._carry(receive, answer))
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
        try:
            async with asyncio.timeout(1):
                return await answer
        except TimeoutError:
            raise Lost from None

    async def _carry(self, receive: Callable[[], Awaitable[T]], answer: asyncio.Future[T]) -> None:
        await self.delay()
        if self._rng.random() < self.faults.lost:
            return
        try:
            result = await receive()
        except Exception as error:  # noqa: BLE001  the run ends with it
            result = error
            if not isinstance(error, SeamarkError | Lost):
                self.failures.append(error)
        await self.delay()
        if self._rng.random() < self.faults.lost or answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


@dataclass
class Table:
    """A table in the catalog: its files, and the flushed offset of each shard."""

    uuid: str
    flushed: dict[int, int]
    files: tuple[str, ...] = ()
    version: int = 0
    is_dropped: bool = False


class Catalog:
    """Tables by their UUID. A commit is one transaction with compare-and-swap of the flushed offsets."""

    def __init__(self) -> None:
        self.tables: dict[str, Table] = {}
        self.compares = True

    def entry(self, uuid: str) -> tuple[Entry, Any]:
        """Return a table at this moment. The metadata is the tuple of its files."""
        table = self.tables.get(uuid)
        if table is None or table.is_dropped:
            raise NoSuchTable(f"no table {uuid}")
        flushed = ",".join(f"{shard}:{offset}" for shard, offset in table.flushed.items())
        entry = Entry(
            kind=EntryKind.TABLE,
            namespace=("n",),
            name="t",
            uuid=uuid,
            metadata_location=f"v{table.version}",
            flushed=flushed,
        )
        return entry, table.files

    def commit(self, uuid: str, files: Sequence[str], ranges: Sequence[FlushedRange]) -> None:
        """Add files and move offsets, or raise CommitConflict."""
        table = self.tables[uuid]
        if table.is_dropped:
            raise NoSuchTable(f"no table {uuid}")
        if set(files) <= set(table.files):  # the same commit arrived before, and a conflict would be a wrong answer
            return
        if self.compares and any(table.flushed[moved.shard] != moved.start for moved in ranges):
            raise CommitConflict("the offsets have moved")
        for moved in ranges:
            table.flushed[moved.shard] = moved.end
        table.files = (*table.files, *files)
        table.version += 1


class RemoteTables:
    """`StreamTables`, as a server sees the catalog."""

    def __init__(self, network: Network, catalog: Catalog, rng: random.Random) -> None:
        self._network = network
        self._catalog = catalog
        self._rng = rng

    async def load(self, uuid: str) -> tuple[Entry, Any]:
        async def receive() -> tuple[Entry, Any]:
            return self._catalog.entry(uuid)

        try:
            return await self._network.send(receive)
        except Lost:
            raise RetryLater("the database does not answer") from None

    async def commit(
        self, entry: Entry, metadata: Any, files: Sequence[EncodedFile], ranges: Sequence[FlushedRange]
    ) -> Entry:
        is_refused = self._rng.random() < self._network.faults.refused

        async def receive() -> None:
            if is_refused:
                raise CommitConflict("another writer was first")
            self._catalog.commit(entry.uuid, [file.location for file in files], ranges)

        try:
            await self._network.send(receive)
        except Lost:
            raise CommitUnknown("no answer to the commit") from None
        return entry


class Storage:
    """The part of `ObjectStore` that stream tables use."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.objects: dict[str, bytes] = {}

    async def create(self, location: str, data: bytes) -> None:
        async def receive() -> None:
            self.objects[location] = data

        try:
            await self._network.send(receive)
        except Lost:
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
        lines = [line for each in rows for line in each.payload.split(b"\n")[each.first : each.first + each.rows]]
        self._count += 1
        return [EncodedFile(f"{folder or 'data'}/{self._count}", b"\n".join(lines), b"{}", len(lines))]


class RemoteLog:
    """A log that several servers share, as they see it: durable, and at the other end of a network."""

    def __init__(self, network: Network, log: MemoryLog) -> None:
        self._network = network
        self._log = log
        self.watermarks = log.watermarks
        self.shards = log.shards
        self.producer = log.producer

    async def append(self, batches: Mapping[Shard, Batch], producer: StreamProducer | None = None) -> Acknowledgement:
        try:
            return await self._network.send(lambda: self._log.append(batches, producer))
        except Lost:
            raise CommitUnknown("the log does not answer") from None

    async def fence(self, name: str) -> StreamProducerState:
        try:
            return await self._network.send(lambda: self._log.fence(name))
        except Lost:
            raise LogUnavailable("the log does not answer") from None

    async def read(self, shard: Shard, offset: int, *, limit_bytes: int, end: int | None = None):
        await self._network.delay()
        return await self._log.read(shard, offset, limit_bytes=limit_bytes, end=end)

    async def release(self, offsets: Mapping[Shard, int]) -> None:
        await self._network.delay()
        await self._log.release(offsets)
        with suppress(SeamarkError):
            self._log.trim()


@dataclass
class Written:
    """What writers have sent to a table and what was acknowledged: the model."""

    sent: dict[tuple[str, int], Counter[bytes]] = field(default_factory=dict)
    acknowledged: dict[tuple[str, int], float] = field(default_factory=dict)
    """By producer and number, the time of the acknowledgement."""


def random_clock_jump(clock: SimulatedClock, rng: random.Random) -> None:
    """Set the clock of the machine ahead or back."""
    clock.jump(rng.choice((-60_000, -1000, 1000, 60_000)))
