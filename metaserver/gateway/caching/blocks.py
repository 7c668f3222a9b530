"""Blocks of objects in memory and on disk: aligned pieces of equal size, named by the content of the object.

The memory tier admits blocks by frequency (`cache/admission.py`). The disk has two folders: one for blocks of
pinned objects, and one with the same admission for all other blocks. A block from the disk is read completely, and
its checksum is verified with each read. A damaged block is a miss.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from seamark.cache.admission import AdmittingCache
from seamark.cache.disk import DiskTier, account_key
from seamark.cache.frequency import FrequencySketch
from seamark.cache.tier import TierStats

_WRITES_MAX = 16
"""The maximum number of blocks that are written to the disk in one batch."""
_NEVER_MAPPED_BYTES = 1 << 62
"""Blocks are read, not mapped. Otherwise the server could return bytes that another program changed after the check."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a cached block. `holder` is the principal whose share of the cache the block uses."""

    holder: str
    pinned: bool

    @property
    def tag(self) -> str:
        """The name of the holder in the account of a disk tier."""
        return hashlib.blake2b(self.holder.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def open_tier(
    tier_folder: object, budget_bytes: int, sketch: FrequencySketch, holder_bytes: int | None, block_bytes: int
) -> DiskTier:
    """Return a disk tier for blocks. The function blocks."""
    return DiskTier(
        tier_folder,  # type: ignore[arg-type]
        budget_bytes,
        mapped_max=0,
        map_bytes_min=_NEVER_MAPPED_BYTES,
        should_replace=lambda candidate, victim: sketch.estimate(candidate) > sketch.estimate(victim),
        holder_bytes=holder_bytes,
        reused_bytes=block_bytes,
    )


class ObjectBlocks:
    """The cached blocks, in memory and on disk.

    An instance belongs to one event loop. `readers` and `writer` are the threads of the disk. The threads are separate,
    so that a write never delays a read.
    """

    def __init__(
        self,
        memory: AdmittingCache[str, memoryview],
        disk: DiskTier | None,
        pinned: DiskTier | None,
        readers: Executor,
        writer: Executor,
        *,
        block_bytes: int,
        pending_bytes_max: int,
    ) -> None:
        self._memory = memory
        self._disk = disk
        self._pinned = pinned
        self._tiers = [tier for tier in (disk, pinned) if tier is not None]
        self._readers = readers
        self._writer = writer
        self.block_bytes = block_bytes
        self._pending_bytes_max = pending_bytes_max
        self._waiting: list[tuple[DiskTier, tuple[str, memoryview, str], asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self.pending_bytes = 0
        self.dropped = 0

    @property
    def memory(self) -> AdmittingCache[str, memoryview]:
        return self._memory

    def collect_disk_stats(self) -> list[tuple[str, TierStats]]:
        return [(name, tier.read_stats()) for name, tier in (("blocks", self._disk), ("pinned", self._pinned)) if tier]

    def find_in_memory(self, name: str, number: int, *, counted: bool = True) -> memoryview | None:
        return self._memory.get(_make_key(name, number), counted=counted)

    def has_in_memory(self, name: str, number: int) -> bool:
        """Return whether the block is in memory. The call does not count as a request."""
        return _make_key(name, number) in self._memory

    def may_be_on_disk(self, name: str, number: int) -> bool:
        return any(tier.may_have(_make_key(name, number)) for tier in self._tiers)

    def get_without_waiting(
        self, name: str, number: int, owner: Owner, *, counted: bool
    ) -> tuple[memoryview, str] | None:
        """Return (the block, "memory" or "disk") if the block is available without waiting, otherwise None.

        If the result is None, the call does not count as a request.
        """
        key = _make_key(name, number)
        if key in self._memory:
            block = self._memory.get(key, counted=counted)
            assert block is not None
            return block, "memory"
        for tier in self._tiers:
            block = tier.get_resident(key)
            if block is not None:
                # Call this only to count the request, for admission.
                self._memory.get(key, counted=counted)
                self._memory.put(key, block, len(block), owner.holder, pinned=owner.pinned)
                return block, "disk"
        return None

    async def read_from_disk(self, name: str, numbers: Sequence[int], owner: Owner) -> tuple[memoryview | None, int]:
        """Return (the first of the blocks, 0) if it is on the disk.

        Otherwise return (None, the number of blocks at the beginning of `numbers` that are not on the disk).
        """
        # No thread is used. A stat of a local file takes a few microseconds, and a thread switch takes 60 or more.
        for absent, number in enumerate(numbers):
            key = _make_key(name, number)
            tiers = [tier for tier in self._tiers if tier.may_have(key)]
            if not tiers:
                continue
            if absent:
                return None, absent
            block = await asyncio.get_running_loop().run_in_executor(self._readers, _read, tiers, key)
            if block is not None:
                self._memory.put(key, block, len(block), owner.holder, pinned=owner.pinned)
                return block, 0
        return None, len(numbers)

    def keep_in_memory(self, name: str, number: int, block: memoryview, owner: Owner) -> None:
        self._memory.put(_make_key(name, number), block, len(block), owner.holder, pinned=owner.pinned)

    async def write(self, name: str, number: int, block: memoryview, owner: Owner) -> None:
        """Write the block to the disk together with other waiting blocks. If too many bytes wait, drop the block."""
        tier = self._pinned if owner.pinned and self._pinned is not None else self._disk
        if tier is None:
            return
        # Pinned blocks have a higher limit of waiting bytes, so that blocks of a scan do not displace them.
        if self.pending_bytes + len(block) > self._pending_bytes_max * (1 + owner.pinned):
            self.dropped += 1
            return
        self.pending_bytes += len(block)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tier, (_make_key(name, number), block, owner.tag), written))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_all(), name="gateway-cache-writer")
        try:
            await asyncio.shield(written)
        finally:
            self.pending_bytes -= len(block)

    async def _write_all(self) -> None:
        while self._waiting:
            tier = self._waiting[0][0]
            batch = [one for one in self._waiting[:_WRITES_MAX] if one[0] is tier]
            other_writes = [one for one in self._waiting[:_WRITES_MAX] if one[0] is not tier]
            self._waiting[:_WRITES_MAX] = other_writes
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._writer, tier.put_many, [value for _, value, _ in batch]
                )
            finally:
                for _, _, written in batch:
                    if not written.done():
                        written.set_result(None)

    def close(self) -> None:
        """Close the tiers after the last write. The method blocks."""
        for tier in self._tiers:
            tier.close()


def _make_key(name: str, number: int) -> str:
    return f"{name}:{number}"


def _read(tiers: Sequence[DiskTier], key: str) -> memoryview | None:
    return next((block for tier in tiers if (block := tier.get(key)) is not None), None)


def identify(key: str) -> bytes:
    """Return the name of a block in the account of a disk tier, so that all tiers share one count of requests."""
    return account_key(key)
