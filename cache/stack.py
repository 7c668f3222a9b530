"""The read-through stack: memory, then disk, then `fetch`. A fetched value is stored in memory and on the disk.

The rules: concurrent requests for a key share one fetch in this event loop (single flight) and, with claims, on this
machine. A tier that fails counts as a miss, so that only a fetch or its decoding can fail a `get`. A get never waits
for a put: fetched values are written to the disk in the background, through a queue that drops values when it is full.

The memory tier contains decoded values (V), and the disk tier contains bytes. `decode` converts bytes to values. It
should use the bytes without copying them. Then a V over a mapped file uses no memory of this process, and N workers
share the pages. For the same reason, a fetched value, whose bytes are private, is replaced by a value over the mapped
file when the file is on the disk. If `on_mapped` is set, the value stays, and the file is mapped over its bytes
(`region.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from seamark.cache.claims import Claims
from seamark.cache.memory import CacheStats, MemoryCache
from seamark.cache.region import Region
from seamark.cache.single_flight import SingleFlight
from seamark.cache.tier import Payload, Tier, TierStats, split_payload

T = TypeVar("T")
V = TypeVar("V")

CLAIM_POLL_S = 0.02
_FILES_PER_JOB = 64
"""The number of files that a thread opens in one job."""


@dataclass(frozen=True, slots=True)
class StackStats:
    """Counts since the start.

    Attributes:
        memory: The counts of the memory tier.
        disk: The counts of the disk tier, or None if there is no disk tier.
        fetches: The number of fetches that were started.
        waits: The number of waits for another process that was fetching the same key.
        timed_out_waits: The number of waits that timed out. After such a timeout, this process fetched.
        dropped: The number of values that were not written to the disk because the queue was full.
        unreadable: The number of values from the disk that `decode` refused.
        pending_bytes: The number of bytes that are in the queue now.
    """

    memory: CacheStats
    disk: TierStats | None
    fetches: int
    waits: int
    timed_out_waits: int
    dropped: int
    unreadable: int
    pending_bytes: int


@dataclass(slots=True)
class _Put(Generic[V]):
    key: str
    payload: memoryview
    decode: Callable[[memoryview], V]
    claimed: bool
    value: V
    region: Region | None


class Stack(Generic[V]):
    """A stack of tiers for one event loop. It owns the tiers, and `close` closes them.

    Args:
        memory: The memory tier.
        disk: The disk tier, or None.
        weigh: Returns the size of a value for the memory tier, in bytes.
        weigh_mapped: Returns the size of a value over a mapped file. If it is None, `weigh` is used.
        pending_bytes_max: The maximum size of the queue for the disk.
        claims: The claims on this machine, or None.
        claim_wait_s: The longest wait for another process that fetches the same key.
        on_mapped: Receives the values whose bytes are now a mapped file. It can be called in any thread.
        executor: Runs the work on the disk, and `decode` of its bytes. If it is None, the loop's default executor is
            used.
    """

    def __init__(
        self,
        memory: MemoryCache[str, V],
        disk: Tier | None,
        *,
        weigh: Callable[[V], int],
        weigh_mapped: Callable[[V], int] | None = None,
        pending_bytes_max: int,
        claims: Claims | None = None,
        claim_wait_s: float = 10.0,
        on_mapped: Callable[[V], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._weigh = weigh
        self._weigh_mapped = weigh_mapped or weigh
        self._pending_bytes_max = pending_bytes_max
        self._claims = claims
        self._claim_polls_max = int(claim_wait_s / CLAIM_POLL_S)
        self._on_mapped = on_mapped
        self._executor = executor
        self._running_fetches: SingleFlight[str, V] = SingleFlight()
        self._queue: asyncio.Queue[_Put[V]] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self._pending_bytes = 0
        self._fetches = self._waits = self._timed_out_waits = self._dropped_puts = self._unreadable = 0

    def get_cached(self, key: str) -> V | None:
        """Return the value if it is in memory, otherwise None. Unlike `get`, the method does not await."""
        return self._memory.get(key)

    async def get(self, key: str, fetch: Callable[[], Awaitable[Payload]], decode: Callable[[memoryview], V]) -> V:
        """Return the value of `key` from memory, or call `decode` with the bytes from the disk or from `fetch`.

        `fetch` does the slow work in threads, because `decode` of its result runs in the event loop. If `fetch` or the
        following `decode` fails, all waiters get the error and nothing is stored. If `decode` refuses bytes from the
        disk, for example those of an older program, they are fetched again.
        """
        value = self._memory.get(key)
        if value is not None:
            return value
        return await self._running_fetches.run(key, lambda: self._load(key, fetch, decode))

    async def get_stored_values(self, keys: Sequence[str], decode: Callable[[memoryview], V]) -> list[V | None]:
        """Return the values that are in memory or on the disk, and None for all others. Nothing is fetched.

        A thread opens many files in one job, while `get` starts a job for each key.
        """
        values = [self._memory.get(key) for key in keys]
        if self._disk is None or self._closed:
            return values
        missing_positions = [number for number, value in enumerate(values) if value is None]
        parts = [
            missing_positions[start : start + _FILES_PER_JOB]
            for start in range(0, len(missing_positions), _FILES_PER_JOB)
        ]
        reads = await asyncio.gather(
            *(self._run_in_thread(self._read_many, [keys[number] for number in part], decode) for part in parts)
        )
        for number, value_and_weigh in zip(missing_positions, chain.from_iterable(reads), strict=True):
            if value_and_weigh is not None:
                value, weigh = value_and_weigh
                self._memory.put(keys[number], value, weigh(value))
                values[number] = value
        return values

    def _read_many(
        self, keys: Sequence[str], decode: Callable[[memoryview], V]
    ) -> list[tuple[V, Callable[[V], int]] | None]:
        """Call `_read` for each key that has a file. The method runs in a thread."""
        disk = self._disk
        assert disk is not None
        return [self._read(key, decode) if disk.may_have(key) else None for key in keys]

    def may_have(self, key: str) -> bool:
        """Return whether the value is in memory, or a file on the disk has its key. The file may be damaged."""
        return key in self._memory or (self._disk is not None and not self._closed and self._disk.may_have(key))

    def put(self, key: str, value: V, payload: memoryview, decode: Callable[[memoryview], V]) -> None:
        """Store a value that the caller has computed, in memory and on the disk.

        Args:
            key: The key of the value.
            value: The value.
            payload: The bytes of the value. If the queue for the disk is full, they are not stored.
            decode: Returns the value of these bytes.
        """
        self._memory.put(key, value, self._weigh(value))
        self._enqueue(_Put(key, payload, decode, claimed=False, value=value, region=None))

    def discard(self, key: str) -> None:
        """Remove the value from memory only. The disk and other processes may still have it."""
        self._memory.discard(key)

    async def remove(self, key: str) -> None:
        """Remove a damaged value from memory and disk."""
        self._memory.discard(key)
        if self._disk is not None and not self._closed:
            await self._run_in_thread(self._disk.discard, key)

    async def _load(self, key: str, fetch: Callable[[], Awaitable[Payload]], decode: Callable[[memoryview], V]) -> V:
        """Return the value from the disk, or fetch it, and store it in memory and in the queue for the disk.

        If processes share the disk, the method waits before the fetch for the claim. The claim is the right to fetch
        the value, which only one process has at a time.
        """
        value = await self._read_from_disk(key, decode)
        if value is not None:
            return value
        has_claim = False
        try:
            if self._disk is not None and self._claims is not None:
                has_claim = await self._claim(key)
                # Another process may have stored the value between the miss and the claim.
                value = await self._read_from_disk(key, decode)
                if value is not None:
                    return value
            self._fetches += 1
            payload, region = _to_flat_view(await fetch()), None
            # A payload that the disk tier will map is copied into a region, which the mapped file can replace later
            # without a change of the value.
            if self._on_mapped is not None and self._disk is not None and self._disk.is_mapped(payload):
                region = Region([payload])
                payload = region.payload
            value = decode(payload)
            self._memory.put(key, value, self._weigh(value))
            if self._enqueue(_Put(key, payload, decode, has_claim, value, region)):
                has_claim = False  # The writer releases the claim when other processes can find the value on the disk.
            return value
        finally:
            if has_claim and self._claims is not None:
                self._claims.release(key)

    async def _read_from_disk(self, key: str, decode: Callable[[memoryview], V]) -> V | None:
        if self._disk is None or self._closed:
            return None
        value_and_weigh = await self._run_in_thread(self._read, key, decode)
        if value_and_weigh is None:
            return None
        value, weigh = value_and_weigh
        self._memory.put(key, value, weigh(value))
        return value

    def _read(self, key: str, decode: Callable[[memoryview], V]) -> tuple[V, Callable[[V], int]] | None:
        """Return the value and the function that weighs it, or None.

        The method runs in a thread. It never raises an error, because a failed cache must not fail a query.
        """
        assert self._disk is not None
        payload = self._disk.get(key)
        if payload is None:
            return None
        try:
            value = decode(payload)
            if not self._disk.is_mapped(payload):
                return value, self._weigh
            if self._on_mapped is not None:
                self._on_mapped(value)
            return value, self._weigh_mapped
        except Exception:  # noqa: BLE001  when `decode` refuses old bytes for any reason, they are fetched again
            self._unreadable += 1
            self._disk.discard(key)
            return None

    async def _claim(self, key: str) -> bool:
        """Wait for the claim, and return whether this process has it.

        The claim is the right to fetch the value, which only one process has at a time. After a timeout, the result is
        False, and the caller fetches without the claim.
        """
        assert self._claims is not None
        if self._claims.take(key):
            return True
        self._waits += 1
        for _ in range(self._claim_polls_max):
            await asyncio.sleep(CLAIM_POLL_S)
            if self._claims.take(key):
                return True
        self._timed_out_waits += 1
        return False

    def _enqueue(self, put: _Put[V]) -> bool:
        """Add a value to the queue, and return whether it will be written to the disk."""
        if self._disk is None or self._closed:
            return False
        if self._pending_bytes + len(put.payload) > self._pending_bytes_max:
            self._dropped_puts += 1
            return False
        self._pending_bytes += len(put.payload)
        self._queue.put_nowait(put)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write(), name="cache-stack-writer")
        return True

    async def _write(self) -> None:
        """Write the values in the queue to the disk, until the task is cancelled.

        The memory of a written value is then replaced by the mapped file. If its bytes are in a region (memory that a
        file can replace at the same address), the value stays. Otherwise the value is read again from the disk.
        """
        assert self._disk is not None
        while True:
            put = await self._queue.get()
            try:
                is_stored = await self._run_in_thread(self._disk.put, put.key, put.payload)
                if is_stored and put.region is not None and self._on_mapped is not None:
                    if await self._run_in_thread(self._disk.map_over, put.key, put.region):
                        self._on_mapped(put.value)
                elif is_stored and put.key in self._memory:
                    await self._read_from_disk(put.key, put.decode)
            finally:
                self._pending_bytes -= len(put.payload)
                if put.claimed and self._claims is not None:
                    self._claims.release(put.key)
                self._queue.task_done()
                del put  # The next wait may be long, and must not keep this value alive.

    async def _run_in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def read_stats(self) -> StackStats:
        return StackStats(
            memory=self._memory.read_stats(),
            disk=None if self._disk is None else self._disk.read_stats(),
            fetches=self._fetches,
            waits=self._waits,
            timed_out_waits=self._timed_out_waits,
            dropped=self._dropped_puts,
            unreadable=self._unreadable,
            pending_bytes=self._pending_bytes,
        )

    async def close(self) -> None:
        """Write the queue to the disk, then close the tiers.

        Later calls of `get` still work, from memory or with a fetch.
        """
        self._closed = True
        if self._writer is not None:
            queue_join = asyncio.create_task(self._queue.join())
            # If the writer's executor is gone, the writer ends early, and the queue would never be drained.
            await asyncio.wait([queue_join, self._writer], return_when=asyncio.FIRST_COMPLETED)
            for task in (queue_join, self._writer):
                task.cancel()
            await asyncio.wait([queue_join, self._writer])
            self._writer = None
        if self._claims is not None:
            self._claims.close()
        if self._disk is not None:
            await self._run_in_thread(self._disk.close)

    def check_invariants(self) -> None:
        """Check that the counts match. Only tests call this, while no fetch is running.

        Raises:
            AssertionError: The counts do not match.
        """
        self._memory.check_invariants()
        self._running_fetches.check_invariants()
        assert self._queue.empty() == (self._pending_bytes == 0), (
            f"{self._pending_bytes} bytes are pending, which contradicts the queue"
        )


def _to_flat_view(payload: Payload) -> memoryview:
    """Return a flat read-only view. Several parts are joined into one, which copies them."""
    parts = split_payload(payload)
    view = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
    return view.toreadonly()
