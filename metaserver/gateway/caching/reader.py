"""Reads a part of an object through the tiers of the cache: memory, a running fetch, the disk, and finally the store.

Adjacent missing blocks are read with one request. While a reader receives the blocks of a fetch, the next fetch is
already running, so that a long read waits for the store's latency only once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.gateway.caching.blocks import ObjectBlocks, Owner
from seamark.metaserver.gateway.caching.fetches import (
    Fetch,
    Fetches,
    RefusedRead,
    check_part,
    split_bucket_and_key,
)
from seamark.metaserver.gateway.caching.records import ObjectRecord
from seamark.metaserver.gateway.caching.sending import STEP_BYTES, AnswerBudget
from seamark.metaserver.gateway.caching.store import Store

_READ_ATTEMPTS_MAX = 3
"""The maximum number of attempts to read the next byte from the store. When bytes arrive, the count starts again."""
_PAUSE_S = 0.1
"""The pause before the second attempt. The pause before the third attempt is twice as long."""


class RangeReader:
    """Reads ranges of objects through the cache. An instance belongs to one event loop.

    Attributes:
        served_bytes: The number of bytes by source: memory, disk, fetch, or direct (without the cache).
    """

    def __init__(self, store: Store, blocks: ObjectBlocks, fetches: Fetches) -> None:
        self._store = store
        self._blocks = blocks
        self._fetches = fetches
        self.served_bytes: Counter[str] = Counter()

    async def read(
        self,
        record: ObjectRecord,
        start: int,
        end: int,
        owner: Owner,
        unsent: AnswerBudget,
        *,
        is_counted: bool = True,
        started: bool = False,
    ) -> AsyncGenerator[memoryview]:
        """Yield the bytes of an object from `start` to `end`.

        Args:
            record: The record of the object.
            start: The offset of the first byte.
            end: The offset after the last byte, which is at most the object's size.
            owner: The owner of the cached blocks.
            unsent: Counts the memory that is kept while the caller sends a piece.
            is_counted: Whether to count a use of the first block. False if the caller has counted it already, so that
                one request does not count twice. The cache prefers to keep blocks that are used often.
            started: Whether the client has received bytes of the answer.

        Raises:
            ChangedObject, RefusedRead, RetryLater: The store does not send the bytes. Any piece may raise the error.
        """
        block_bytes, attempts = self._blocks.block_bytes, _ReadAttempts(started)
        while start < end:
            number, offset = divmod(start, block_bytes)
            stop = min(end, (number + 1) * block_bytes)
            block, source = self._blocks.get_without_waiting(record.name, number, owner, counted=is_counted) or (
                None,
                "",
            )
            if block is None:
                # This call also counts the request.
                block = self._blocks.find_in_memory(record.name, number, counted=is_counted)
            is_counted = True
            if block is None:
                fetch = self._fetches.find(record.name, number)
                if fetch is None:
                    last = (end - 1) // block_bytes
                    block, fetch = await self._load(record, number, last, owner)
                    source = "disk"
                if block is None:
                    if fetch is None:
                        async with aclosing(
                            self._read_directly(record, start, end, unsent, started=attempts.started)
                        ) as pieces:
                            async for piece in pieces:
                                yield piece
                        return
                    try:
                        async with aclosing(self._read_pieces(fetch, start, end, owner)) as pieces:
                            async for piece in pieces:
                                self.served_bytes["fetch"] += len(piece)
                                start += len(piece)
                                attempts.note_progress()
                                yield piece
                    except (RetryLater, RefusedRead) as error:
                        await attempts.wait_after(error)
                    continue
            memory_limit_bytes = unsent.next_bytes
            if memory_limit_bytes < block_bytes:
                stop = min(stop, start + memory_limit_bytes)
            piece, size_bytes = keep_part(block, offset, offset + stop - start, memory_limit_bytes)
            # Drop the reference, because otherwise a slow client would keep the block in memory.
            del block
            self.served_bytes[source] += len(piece)
            start = stop
            attempts.note_progress()
            unsent.set_charge(size_bytes)
            try:
                yield piece
            finally:
                unsent.set_charge(0)

    def read_at_once(
        self, record: ObjectRecord, start: int, end: int, owner: Owner, *, is_counted: bool
    ) -> list[memoryview]:
        """Return the bytes from `start` up to `end` that are available without waiting.

        The result is empty if the first block is not available. If a later block is not available, the result ends
        before it.

        Args:
            record: The record of the object.
            start: The offset of the first byte.
            end: The offset after the last byte.
            owner: The owner of the cached blocks.
            is_counted: Whether to count a use of the first block. Uses of the other blocks are always counted.
        """
        block_bytes, pieces = self._blocks.block_bytes, []
        while start < end:
            number, offset = divmod(start, block_bytes)
            block_and_source = self._blocks.get_without_waiting(record.name, number, owner, counted=is_counted)
            if block_and_source is None:
                break
            is_counted, (block, source) = True, block_and_source
            piece = block[offset : offset + end - start]
            self.served_bytes[source] += len(piece)
            start += len(piece)
            pieces.append(piece)
        return pieces

    def read_ahead(self, record: ObjectRecord, start: int, end: int, owner: Owner) -> None:
        """Start reading blocks before a client requests them, if much of the budget is free.

        The method may read blocks that are on the disk, because its check is not exact.
        """
        if start < end and not self._fetches.is_half_used:
            first, last = start // self._blocks.block_bytes, (end - 1) // self._blocks.block_bytes
            self._start_next_fetch(record, first, last, owner)

    async def _load(
        self, record: ObjectRecord, number: int, last: int, owner: Owner
    ) -> tuple[memoryview | None, Fetch | None]:
        """Return a block from the disk, or the fetch that reads it. Both are None if the budget is exhausted.

        A new fetch also reads the missing blocks after the block, with the same request.

        Args:
            record: The record of the object.
            number: The number of the block in the object.
            last: The number of the last block that the caller needs.
            owner: The owner of the cached blocks.
        """
        last = min(last, number + self._fetches.compute_blocks_max() - 1)
        # `missing_count` is the number of blocks from `number` on that are not on the disk.
        block, missing_count = await self._blocks.read_from_disk(record.name, range(number, last + 1), owner)
        if block is not None:
            return block, None
        # Check again, because another reader may have started a fetch meanwhile.
        running_fetch = self._fetches.find(record.name, number)
        if running_fetch is not None:
            return None, running_fetch
        return None, self._fetches.start(
            record, number, self._find_gap_end(record, number, number + missing_count - 1), owner
        )

    def _find_gap_end(self, record: ObjectRecord, number: int, last: int) -> int:
        """Return the last of the blocks from `number` to `last` before a block in memory or in a running fetch."""
        for next_number in range(number + 1, last + 1):
            if self._blocks.has_in_memory(record.name, next_number) or self._fetches.find(record.name, next_number):
                return next_number - 1
        return last

    async def _read_pieces(self, fetch: Fetch, start: int, end: int, owner: Owner) -> AsyncGenerator[memoryview]:
        """Yield the bytes of the fetch. When its first bytes arrive, start the fetch of the next blocks."""
        block_bytes, is_first = self._blocks.block_bytes, True
        self._fetches.hold(fetch)
        try:
            async for piece in fetch.iter_pieces(start, min(end, fetch.end)):
                if is_first and fetch.end < end:
                    self._start_next_fetch(fetch.record, fetch.last + 1, (end - 1) // block_bytes, owner)
                is_first = False
                yield piece
        finally:
            self._fetches.release(fetch)

    def _start_next_fetch(self, record: ObjectRecord, first: int, last: int, owner: Owner) -> None:
        """Start a fetch of the next blocks that are not in the cache.

        The fetch starts with the first block that is neither in memory, nor in a running fetch, nor probably on the
        disk. It ends before the next block that is in memory or in a running fetch.

        Args:
            record: The record of the object.
            first: The number of the first block that a client may need next.
            last: The number of the last such block. A fetch has a maximum number of blocks, so it may end earlier.
            owner: The owner of the cached blocks.
        """
        last = min(last, first + self._fetches.compute_blocks_max() - 1)
        while first <= last and (
            self._blocks.has_in_memory(record.name, first)
            or self._fetches.find(record.name, first)
            or self._blocks.may_be_on_disk(record.name, first)
        ):
            first += 1
        if first <= last:
            self._fetches.start(record, first, self._find_gap_end(record, first, last), owner)

    async def _read_directly(
        self, record: ObjectRecord, start: int, end: int, unsent: AnswerBudget, *, started: bool
    ) -> AsyncGenerator[memoryview]:
        """Read from the store, without the cache.

        If an answer of the store ends early, the missing bytes are read with If-Match, so that they belong to the same
        object.

        If little memory is left for answers, a short part is read completely, and the request to the store ends before
        the caller receives the part. So a slow client occupies neither a connection to the store nor its buffers.

        Args:
            started: Whether the client has received bytes of the answer.

        Raises:
            ChangedObject: The object in the store differs from the record.
            RefusedRead: The store refuses the read.
            RetryLater: The store does not send the bytes, even after repeated reads.
        """
        attempts = _ReadAttempts(started)
        while start < end:
            memory_limit_bytes = unsent.next_bytes
            # The budget allows a full step only if much of it is free.
            is_streamed = memory_limit_bytes == STEP_BYTES
            unsent.set_charge(memory_limit_bytes)
            stop = end if is_streamed else min(end, start + memory_limit_bytes)
            try:
                if is_streamed:
                    async with aclosing(self._read_from_store(record, start, stop)) as pieces:
                        async for piece in pieces:
                            start += len(piece)
                            attempts.note_progress()
                            yield piece
                else:
                    async with aclosing(self._read_from_store(record, start, stop)) as pieces:
                        data = b"".join([piece async for piece in pieces])
                    start = stop
                    attempts.note_progress()
                    yield memoryview(data)
            except (RetryLater, RefusedRead) as error:
                await attempts.wait_after(error)
            finally:
                unsent.set_charge(0)

    async def _read_from_store(self, record: ObjectRecord, start: int, end: int) -> AsyncGenerator[memoryview]:
        """Yield the bytes of one request to the store.

        Raises:
            ChangedObject: The object in the store differs from the record.
            RefusedRead: The store refuses the read.
            RetryLater: The answer ends early.
        """
        bucket, key = split_bucket_and_key(record.location)
        headers = {"range": f"bytes={start}-{end - 1}", "if-match": record.etag}
        async with self._store.request("GET", bucket, key, headers) as answer:
            check_part(answer, record, start, end)
            async for data in answer.pieces:
                piece = memoryview(data)[: end - start]  # The store may send more bytes than it announced.
                self.served_bytes["direct"] += len(piece)
                start += len(piece)
                yield piece
        if start != end:
            raise RetryLater("The store's answer ended early; try again")


def keep_part(block: memoryview, start: int, end: int, memory_limit_bytes: int) -> tuple[memoryview, int]:
    """Return the bytes `start` to `end` of a block, and the number of bytes of memory that they keep.

    The bytes are a view of the block, which keeps the whole block in memory. If the block is larger than
    `memory_limit_bytes`, they are a copy.
    """
    if memory_limit_bytes < len(block):
        return memoryview(bytes(block[start:end])), end - start
    return block[start:end], len(block)


class _ReadAttempts:
    """Counts the failed reads from the store for one answer.

    `started` says whether the client has received bytes. If so, even a read that the store refuses is repeated, because
    only a successful read can complete the answer. Otherwise the client receives the refusal.
    """

    def __init__(self, started: bool) -> None:
        self.started = started
        self._failures = 0

    def note_progress(self) -> None:
        self.started, self._failures = True, 0

    async def wait_after(self, error: RetryLater | RefusedRead) -> None:
        """Wait before the next attempt, or raise the error if there is no further attempt.

        There is none after `_READ_ATTEMPTS_MAX` failures without progress. There is also none if the store refuses the
        read before the client has received bytes, because the client can then receive the refusal.
        """
        self._failures += 1
        if self._failures == _READ_ATTEMPTS_MAX or (isinstance(error, RefusedRead) and not self.started):
            raise error
        await asyncio.sleep(_PAUSE_S * self._failures)
