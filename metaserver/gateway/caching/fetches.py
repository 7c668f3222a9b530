"""Fetches consecutive blocks of an object with one request to the store, for all readers that need them.

The readers of a fetch receive bytes as they arrive. Its blocks stay in memory until all readers have received their
bytes, and the blocks are written to the disk. All fetches together have a budget of bytes, and a principal may use a
share of it. If the budget is exhausted, no fetch starts, and the caller passes the store's answer on in pieces.

The blocks are normally written to the disk after the readers have received them, because the threads of the disk share
the interpreter with the event loop. If much of the budget is used, the blocks are written earlier.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

from seamark.cache.buffers import Buffers
from seamark.formats.runtime.errors import RetryLater, SeamarkError
from seamark.metaserver.api.http.slots import HolderLimit
from seamark.metaserver.gateway.caching.blocks import ObjectBlocks, Owner
from seamark.metaserver.gateway.caching.records import ObjectRecord, has_same_content, parse_content_range
from seamark.metaserver.gateway.caching.store import Store, StoreAnswer

_FREE_BUDGET_DIVISOR = 8
"""The divisor of the free budget that gives the maximum size of one fetch."""
_UNUSED_S = 0.2
"""The time for which a finished fetch without a reader keeps its blocks."""


class ChangedObject(Exception):
    """Raised if the object in the store is missing, or differs from the record."""


class RefusedRead(Exception):
    """Raised if the store refuses a read, or its answer cannot be cached. The client receives the store's answer."""


class Fetch:
    """A read of the blocks `first` to `last` of an object.

    Attributes:
        arrived: The offset in the object up to which bytes have arrived.
    """

    def __init__(self, record: ObjectRecord, first: int, last: int, memory: Buffers, owner: Owner) -> None:
        block_bytes = memory.size_bytes
        self.record = record
        self.owner = owner
        self.first = first
        self.last = last
        self._memory = memory
        self._block_bytes = block_bytes
        self.arrived = first * block_bytes
        self.end = min(record.size, (last + 1) * block_bytes)
        self.readers = 0
        self.was_used = False
        self.writes = 0
        self.unwritten: list[int] = []
        """The complete blocks that are not written to the disk yet, because readers still wait for bytes."""
        self.charged = True
        self.done = False
        self.error: Exception | None = None
        self._buffers: dict[int, memoryview] = {}
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """The waiting readers. Each waits for a byte beyond an offset."""

    @property
    def size_bytes(self) -> int:
        return self.end - self.first * self._block_bytes

    def get_block(self, number: int) -> memoryview:
        return self._buffers[number].toreadonly()

    def add(self, data: memoryview) -> list[int]:
        """Add bytes that have arrived, and return the numbers of the blocks that they complete.

        The readers that wait for these bytes continue.

        Raises:
            ValueError: The data exceed the end of the fetch.
        """
        if self.arrived + len(data) > self.end:
            excess_bytes = self.arrived + len(data) - self.end
            raise ValueError(f"The store sent {excess_bytes:,} bytes more than were requested")
        complete_blocks = []
        while data:
            number, offset = divmod(self.arrived, self._block_bytes)
            size = min(self._block_bytes, self.record.size - number * self._block_bytes)
            buffer = self._buffers.get(number)
            if buffer is None:
                buffer = self._buffers[number] = self._memory.take(size)
            part = data[: size - offset]
            buffer[offset : offset + len(part)] = part
            self.arrived += len(part)
            data = data[len(part) :]
            if offset + len(part) == size:
                complete_blocks.append(number)
        self.wake()
        return complete_blocks

    def wake(self) -> None:
        """Wake the readers whose bytes have arrived, or all readers at the end of the fetch."""
        if self._waiting:
            waiters, self._waiting = self._waiting, []
            for offset, future in waiters:
                if offset >= self.arrived and not self.done:
                    self._waiting.append((offset, future))
                elif not future.done():
                    future.set_result(None)

    async def wait_until(self, offset: int) -> None:
        """Wait until a byte beyond `offset` has arrived. If the fetch ends earlier, raise its error."""
        while self.arrived <= offset:
            if self.done:
                raise self.error or RetryLater("The read of the object ended early, try again")
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((offset, future))
            await future

    async def iter_pieces(self, start: int, end: int) -> AsyncGenerator[memoryview]:
        """Yield the bytes of the object from `start` to `end`, both within the fetch, while they arrive.

        The first bytes are yielded immediately. After that, whole blocks are yielded, because each piece takes an
        iteration of the event loop and wakes the client.
        """
        is_first = True
        while start < end:
            number, offset = divmod(start, self._block_bytes)
            block_end = min(end, (number + 1) * self._block_bytes)
            await self.wait_until(start if is_first else block_end - 1)
            is_first = False
            stop = min(self.arrived, block_end)
            yield self.get_block(number)[offset : offset + stop - start]
            start = stop


class Fetches:
    """All fetches of a worker. An instance belongs to one event loop."""

    def __init__(
        self, store: Store, blocks: ObjectBlocks, *, budget_bytes: int, share_bytes: int, request_bytes: int
    ) -> None:
        self._store = store
        self._blocks = blocks
        self._budget = HolderLimit("bytes of reads for the cache", budget_bytes, share_bytes)
        self.request_bytes = max(request_bytes, blocks.block_bytes)
        self._memory = Buffers(blocks.block_bytes, self.request_bytes)
        self._running_fetches: dict[tuple[str, int], Fetch] = {}
        self._reads: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._unused_fetches: dict[Fetch, asyncio.TimerHandle] = {}
        """The fetches that ended before they had a reader."""
        self.requests = 0

    @property
    def used_bytes(self) -> int:
        return self._budget.taken

    @property
    def is_half_used(self) -> bool:
        return self._budget.taken > self._budget.limit // 2

    def find(self, name: str, number: int) -> Fetch | None:
        """Return the fetch that has read the block, or is reading it, or None."""
        return self._running_fetches.get((name, number))

    def hold(self, fetch: Fetch) -> None:
        fetch.readers += 1
        fetch.was_used = True

    def release(self, fetch: Fetch) -> None:
        fetch.readers -= 1
        self._write(fetch)
        self._retire(fetch)

    def compute_blocks_max(self) -> int:
        """Return the maximum number of blocks of one fetch.

        If much of the budget is used, the number is smaller, so that more readers can start a fetch.
        """
        free_bytes = self._budget.limit - self._budget.taken
        return max(1, min(self.request_bytes, free_bytes // _FREE_BUDGET_DIVISOR) // self._blocks.block_bytes)

    def start(self, record: ObjectRecord, first: int, last: int, owner: Owner) -> Fetch | None:
        """Start a fetch of the blocks `first` to `last`, or return None if the budget is exhausted."""
        fetch = Fetch(record, first, last, self._memory, owner)
        if not self._take(fetch.size_bytes, owner):
            return None
        self._register(fetch)
        start = first * self._blocks.block_bytes
        # With If-Match, the store refuses the read if the object has changed since the record was read.
        headers = {"range": f"bytes={start}-{fetch.end - 1}", "if-match": record.etag}

        async def run() -> None:
            bucket, key = split_bucket_and_key(record.location)
            async with self._store.request("GET", bucket, key, headers) as answer:
                check_part(answer, record, start, fetch.end)
                await self._receive(fetch, answer, 0)

        _start_task(self._reads, self._finish(fetch, run()))
        return fetch

    async def open(
        self,
        location: str,
        range_header: str,
        expected_bytes: int,
        make_record: Callable[[StoreAnswer], ObjectRecord | None],
        owner: Owner,
    ) -> ObjectRecord | None:
        """Read a part of an object that has no record yet. The method returns as soon as the store's answer begins.

        Args:
            location: The location of the object.
            range_header: The value of the Range header, which selects the part.
            expected_bytes: The number of bytes to charge to the budget.
            make_record: Returns the record for the store's answer, or None if the object cannot be cached.
            owner: The owner of the cached blocks.

        Returns:
            The record. None if the budget is exhausted, or if the object cannot be cached.

        Raises:
            RefusedRead: The store refuses the read.
            RetryLater: The store cannot answer now.
        """
        if not self._take(expected_bytes, owner):
            return None
        record_future: asyncio.Future[ObjectRecord] = asyncio.get_running_loop().create_future()
        _start_task(self._reads, self._open(location, range_header, expected_bytes, make_record, owner, record_future))
        return await asyncio.shield(record_future)

    async def _open(
        self,
        location: str,
        range_header: str,
        expected_bytes: int,
        make_record: Callable[[StoreAnswer], ObjectRecord | None],
        owner: Owner,
        record_future: asyncio.Future[ObjectRecord],
    ) -> None:
        """Read a part of an object, store its complete blocks in the cache, and set the record of the object.

        Args:
            location: The location of the object.
            range_header: The value of the Range header.
            expected_bytes: The number of bytes that the caller has charged to the budget.
            make_record: Returns the record for the store's answer, or None if the object cannot be cached.
            owner: The owner of the cached blocks.
            record_future: Receives the record, or the error.
        """
        charged_bytes = expected_bytes
        try:
            bucket, key = split_bucket_and_key(location)
            async with self._store.request("GET", bucket, key, {"range": range_header}) as answer:
                part, record = parse_content_range(answer), make_record(answer)
                if answer.status != 206 or part is None or record is None:
                    raise RefusedRead
                start, end, size = part
                block_bytes = self._blocks.block_bytes
                # Select the blocks that the answer contains completely. Only the last block of the object is shorter.
                first = math.ceil(start / block_bytes)
                last = (end - 1) // block_bytes if end == size else end // block_bytes - 1
                if last < first or any(
                    (record.name, number) in self._running_fetches for number in range(first, last + 1)
                ):
                    record_future.set_result(record)
                    return
                fetch = Fetch(record, first, last, self._memory, owner)
                if fetch.size_bytes > charged_bytes:
                    raise RefusedRead
                self._budget.release(owner.holder, charged_bytes - fetch.size_bytes)
                charged_bytes = 0
                self._register(fetch)
                record_future.set_result(record)
                skipped_bytes = first * block_bytes - start
                await self._finish(fetch, self._receive(fetch, answer, skipped_bytes))
        except Exception as error:  # noqa: BLE001  all waiters receive the error
            if not record_future.done():
                record_future.set_exception(error)
                # Mark the error as retrieved, because there may be no waiter.
                record_future.exception()
        finally:
            if charged_bytes:
                self._budget.release(owner.holder, charged_bytes)
            if not record_future.done():
                record_future.cancel()

    async def _receive(self, fetch: Fetch, answer: StoreAnswer, skipped_bytes: int) -> None:
        """Store the bytes of the answer, except the first `skipped_bytes` bytes.

        Raises:
            RetryLater: The answer ends early.
        """
        async for piece in answer.pieces:
            data = memoryview(piece)[skipped_bytes:] if skipped_bytes else memoryview(piece)
            skipped_bytes = max(0, skipped_bytes - len(piece))
            data = data[: fetch.end - fetch.arrived]  # The end of the first read may be within a block.
            for number in fetch.add(data):
                self._keep(fetch, number)
        if fetch.arrived < fetch.end:
            raise RetryLater("The store's answer ended early; try again")

    def _keep(self, fetch: Fetch, number: int) -> None:
        self._blocks.keep_in_memory(fetch.record.name, number, fetch.get_block(number), fetch.owner)
        fetch.unwritten.append(number)
        self._write(fetch)

    def _write(self, fetch: Fetch) -> None:
        """Start writing the complete blocks to the disk.

        While the fetch runs or readers use it, the blocks wait, so that the disk does not delay the readers. If half of
        the budget is used, they are written at once, because a fetch keeps its memory until its blocks are written.
        """
        if (fetch.readers or not fetch.done) and not self.is_half_used:
            return
        numbers, fetch.unwritten = fetch.unwritten, []
        if not numbers:
            return
        fetch.writes += 1

        async def write() -> None:
            try:
                name, owner = fetch.record.name, fetch.owner
                await asyncio.gather(
                    *(self._blocks.write(name, number, fetch.get_block(number), owner) for number in numbers)
                )
            finally:
                fetch.writes -= 1
                self._retire(fetch)

        _start_task(self._writes, write())

    async def _finish(self, fetch: Fetch, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which reads the blocks of the fetch, and end the fetch.

        A fetch that no reader has used yet, such as a fetch that reads ahead, keeps its blocks in memory for
        `_UNUSED_S` seconds. A used fetch writes its blocks to the disk, and releases its memory when its last reader
        has ended.
        """
        self.requests += 1
        try:
            await work
        except Exception as error:  # noqa: BLE001  all readers of the fetch receive the error
            fetch.error = error
        finally:
            fetch.done = True
            fetch.wake()
            if fetch.was_used:
                self._write(fetch)
            if fetch.error is not None:
                # Remove the failed fetch, so that a later reader starts a new fetch.
                self._unregister(fetch)
            if fetch.was_used:
                self._retire(fetch)
            else:
                self._unused_fetches[fetch] = asyncio.get_running_loop().call_later(
                    _UNUSED_S, self._retire_unused, fetch
                )

    def _take(self, size_bytes: int, owner: Owner) -> bool:
        if not size_bytes:
            return False
        try:
            self._budget.take(owner.holder, size_bytes)
        except SeamarkError:
            return False
        return True

    def _register(self, fetch: Fetch) -> None:
        for number in range(fetch.first, fetch.last + 1):
            self._running_fetches[fetch.record.name, number] = fetch

    def _unregister(self, fetch: Fetch) -> None:
        for number in range(fetch.first, fetch.last + 1):
            if self._running_fetches.get((fetch.record.name, number)) is fetch:
                del self._running_fetches[fetch.record.name, number]

    def _retire_unused(self, fetch: Fetch) -> None:
        del self._unused_fetches[fetch]
        self._write(fetch)
        self._retire(fetch)

    def _retire(self, fetch: Fetch) -> None:
        """Release the memory of a fetch if it has ended and its bytes are no longer needed.

        The bytes are needed while a reader uses them, while they are written to the disk, and for some time after a
        fetch that no reader has used yet (`_unused_fetches`). `charged` ensures that the memory is released only once.
        """
        if (
            fetch.done
            and not fetch.readers
            and not fetch.writes
            and fetch.charged
            and fetch not in self._unused_fetches
        ):
            fetch.charged = False
            self._unregister(fetch)
            self._budget.release(fetch.owner.holder, fetch.size_bytes)

    async def close(self) -> None:
        """Cancel the reads, retire the unused fetches, and wait for the writes to the disk."""
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)
        for fetch, timer in tuple(self._unused_fetches.items()):
            timer.cancel()
            self._retire_unused(fetch)
        await asyncio.gather(*self._writes, return_exceptions=True)

    def check_invariants(self) -> None:
        """Check that no ended fetch is charged or listed. Tests call this method while no fetch is running."""
        self._budget.check_invariants()
        assert not self._reads | self._writes, f"{len(self._reads | self._writes)} tasks run"
        assert not self._running_fetches, f"{len(self._running_fetches)} blocks are listed"
        assert self._budget.taken == 0, f"{self._budget.taken} bytes are charged"


def check_part(answer: StoreAnswer, record: ObjectRecord, start: int, end: int) -> None:
    """Check that an answer contains the bytes from `start` to `end` of the record's content.

    Raises:
        ChangedObject: The object in the store differs from the record.
        RefusedRead: The store refuses the read, or returns a different part.
    """
    if answer.status in (404, 412) or (answer.status == 206 and not has_same_content(record, answer.headers)):
        raise ChangedObject
    if answer.status != 206 or parse_content_range(answer) != (start, end, record.size):
        raise RefusedRead


def split_bucket_and_key(location: str) -> tuple[str, str]:
    bucket, _, key = location.removeprefix("s3://").partition("/")
    return bucket, key


def _start_task(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
