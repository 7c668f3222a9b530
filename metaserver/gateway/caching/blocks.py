"""Caches blocks of objects in memory and on disk.

A block is an aligned piece of fixed size. Its name depends on the content of the object. The memory tier admits blocks
by frequency (`cache/admission.py`). The disk has two folders: one for blocks of pinned objects, and one for all other
blocks, with the same admission. A block on the disk is read as a whole, and each read verifies its checksum. A damaged
block is a miss.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import NamedTuple

from seamark.cache.admission import AdmittingCache
from seamark.cache.disk import DiskTier, make_database_key
from seamark.cache.frequency import FrequencySketch
from seamark.cache.tier import TierStats

_WRITES_MAX = 16
"""The maximum number of blocks that are written to the disk in one batch."""
_NEVER_MAPPED_BYTES = 1 << 62
"""A size above that of any block, so that the disk tier reads blocks instead of mapping them into memory.

Another program could change mapped bytes after the server has verified them.
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a cached block.

    Attributes:
        holder: The principal whose share of the cache the block uses.
        pinned: Whether the block belongs to a pinned table.
    """

    holder: str
    pinned: bool

    @property
    def tag(self) -> str:
        """The name of the principal in the disk cache, which is a hash of the principal's name."""
        return hashlib.blake2b(self.holder.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def open_tier(
    tier_folder: object, budget_bytes: int, sketch: FrequencySketch, holder_bytes: int | None, block_bytes: int
) -> DiskTier:
    """Open a disk tier for blocks. The function blocks the thread.

    If the tier is full, a block replaces another only if `sketch` has counted more requests for it.

    Args:
        tier_folder: The folder of the tier.
        budget_bytes: The maximum size of all blocks in the tier.
        sketch: The approximate numbers of requests for each block.
        holder_bytes: The maximum size of the blocks of one principal, or None for no limit.
        block_bytes: The size of most blocks, whose memory is reused.
    """
    return DiskTier(
        tier_folder,  # type: ignore[arg-type]
        budget_bytes,
        mapped_max=0,
        map_bytes_min=_NEVER_MAPPED_BYTES,
        should_replace=lambda candidate, victim: sketch.estimate(candidate) > sketch.estimate(victim),
        holder_bytes=holder_bytes,
        reused_bytes=block_bytes,
    )


class _WaitingWrite(NamedTuple):
    """A block that waits until it is written to a tier.

    Attributes:
        value: The key, the block and the tag of its owner, as `DiskTier.put_many` takes them.
        future: Is done when the block is written or the write has failed.
    """

    tier: DiskTier
    value: tuple[str, memoryview, str]
    future: asyncio.Future[None]


class ObjectBlocks:
    """The cached blocks in memory and on disk.

    An instance belongs to one event loop. Its methods name a block by the name of the object's content, and by the
    number of the block. Reads and writes of the disk have separate threads, so that a write never delays a read.
    """

    def __init__(
        self,
        memory: AdmittingCache[str, memoryview],
        disk: DiskTier | None,
        pinned_tier: DiskTier | None,
        readers: Executor,
        writer: Executor,
        *,
        block_bytes: int,
        pending_bytes_max: int,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._pinned_tier = pinned_tier
        self._tiers = [tier for tier in (disk, pinned_tier) if tier is not None]
        self._readers = readers
        self._writer = writer
        self.block_bytes = block_bytes
        self._pending_bytes_max = pending_bytes_max
        self._waiting: list[_WaitingWrite] = []
        self._write_task: asyncio.Task[None] | None = None
        self.pending_bytes = 0
        self.dropped = 0

    @property
    def memory(self) -> AdmittingCache[str, memoryview]:
        return self._memory

    def collect_disk_stats(self) -> list[tuple[str, TierStats]]:
        return [
            (name, tier.read_stats()) for name, tier in (("blocks", self._disk), ("pinned", self._pinned_tier)) if tier
        ]

    def find_in_memory(self, name: str, number: int, *, counted: bool = True) -> memoryview | None:
        return self._memory.get(_make_key(name, number), counted=counted)

    def has_in_memory(self, name: str, number: int) -> bool:
        """Return whether the block is in memory, without counting a request for it."""
        return _make_key(name, number) in self._memory

    def may_be_on_disk(self, name: str, number: int) -> bool:
        return any(tier.may_have(_make_key(name, number)) for tier in self._tiers)

    def get_without_waiting(
        self, name: str, number: int, owner: Owner, *, counted: bool
    ) -> tuple[memoryview, str] | None:
        """Return a block that is available without waiting, and its source ("memory" or "disk").

        With `counted`, the request counts for the decision which blocks the cache keeps. If the result is None, no
        request is counted.
        """
        key = _make_key(name, number)
        if key in self._memory:
            block = self._memory.get(key, counted=counted)
            assert block is not None
            return block, "memory"
        for tier in self._tiers:
            block = tier.get_resident(key)
            if block is not None:
                # This call only counts the request, so that the cache may keep the block.
                self._memory.get(key, counted=counted)
                self._memory.put(key, block, len(block), owner.holder, pinned=owner.pinned)
                return block, "disk"
        return None

    async def read_from_disk(self, name: str, numbers: Sequence[int], owner: Owner) -> tuple[memoryview | None, int]:
        """Return the first block if it is on the disk, otherwise the number of blocks to read from the store.

        Returns:
            The first block and 0. If the first block is not on the disk, None and the number of consecutive blocks,
            from the first, that are not on the disk either.
        """
        # Call stat without a thread: it takes a few microseconds for a local file, and a thread switch takes 60 or
        # more.
        for missing_count, number in enumerate(numbers):
            key = _make_key(name, number)
            tiers = [tier for tier in self._tiers if tier.may_have(key)]
            if not tiers:
                continue
            if missing_count:
                return None, missing_count
            block = await asyncio.get_running_loop().run_in_executor(self._readers, _read_block, tiers, key)
            if block is not None:
                self._memory.put(key, block, len(block), owner.holder, pinned=owner.pinned)
                return block, 0
        return None, len(numbers)

    def keep_in_memory(self, name: str, number: int, block: memoryview, owner: Owner) -> None:
        self._memory.put(_make_key(name, number), block, len(block), owner.holder, pinned=owner.pinned)

    async def write(self, name: str, number: int, block: memoryview, owner: Owner) -> None:
        """Write the block to the disk, in a batch with other waiting blocks. If too many bytes are waiting, drop it."""
        tier = self._pinned_tier if owner.pinned and self._pinned_tier is not None else self._disk
        if tier is None:
            return
        # The limit of waiting bytes is twice as high for pinned blocks, so that blocks of a scan do not displace them.
        if self.pending_bytes + len(block) > self._pending_bytes_max * (1 + owner.pinned):
            self.dropped += 1
            return
        self.pending_bytes += len(block)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_WaitingWrite(tier, (_make_key(name, number), block, owner.tag), future))
        if self._write_task is None or self._write_task.done():
            self._write_task = asyncio.get_running_loop().create_task(self._write_all(), name="gateway-cache-writer")
        try:
            await asyncio.shield(future)
        finally:
            self.pending_bytes -= len(block)

    async def _write_all(self) -> None:
        """Write the waiting blocks to the disk in batches, until no block waits."""
        while self._waiting:
            tier = self._waiting[0].tier
            next_writes = self._waiting[:_WRITES_MAX]
            batch = [write for write in next_writes if write.tier is tier]
            self._waiting[:_WRITES_MAX] = [write for write in next_writes if write.tier is not tier]
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._writer, tier.put_many, [write.value for write in batch]
                )
            finally:
                for write in batch:
                    if not write.future.done():
                        write.future.set_result(None)

    def close(self) -> None:
        """Close the disk tiers. All reads and writes must have ended. The method blocks the thread."""
        for tier in self._tiers:
            tier.close()


def _make_key(name: str, number: int) -> str:
    return f"{name}:{number}"


def _read_block(tiers: Sequence[DiskTier], key: str) -> memoryview | None:
    return next((block for tier in tiers if (block := tier.get(key)) is not None), None)


def compute_sketch_key(key: str) -> bytes:
    """Return the key under which the frequency sketch counts the reads of a block.

    The sketch estimates how often each block is read. The caches in memory and on disk share it.
    """
    return make_database_key(key)
