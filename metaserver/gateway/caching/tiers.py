"""Opens the tiers of the gateway's cache from the settings, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from seamark.cache.admission import AdmittingCache
from seamark.cache.disk import DiskTier
from seamark.cache.frequency import FrequencySketch
from seamark.cache.ledger import BUDGET_BYTES_MIN
from seamark.formats.runtime.clock import Clock
from seamark.metaserver.gateway.caching.blocks import ObjectBlocks, Owner, compute_sketch_key, open_tier
from seamark.metaserver.gateway.caching.fetches import Fetches
from seamark.metaserver.gateway.caching.hedging import HedgedStore
from seamark.metaserver.gateway.caching.records import ObjectRecord, Records
from seamark.metaserver.gateway.caching.sending import SendBudget
from seamark.metaserver.gateway.caching.store import Store
from seamark.metaserver.gateway.caching.write_versions import WriteVersions
from seamark.metaserver.settings.settings import Settings

READER_THREADS = 4
_WRITER_NICE = 10
_RECORDS_BUDGET_DIVISOR = 16
"""The divisor of the memory budget that gives the memory for records of objects."""
_RECORDS_MIN_BYTES = 256 << 10
"""The minimum memory for records, even without a memory budget. Without a record in memory, a block on the disk takes
two reads."""
_PENDING_BUDGET_DIVISOR = 4
"""The divisor of the fetch budget that gives the limit of blocks that wait for the disk. Pinned blocks may use twice
this limit."""
_SKETCH_KEYS_MIN = 1024


class CacheTiers:
    """The tiers of the gateway's cache. An instance belongs to one event loop, and `open_tiers` opens it."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        store: Store,
        versions: WriteVersions,
        disks: tuple[DiskTier | None, DiskTier | None],
        sketch: FrequencySketch,
    ) -> None:
        """Create the memory tier, and divide the budgets of the settings among the parts of the cache.

        Args:
            settings: The settings, with the budgets.
            clock: The clock.
            store: The store from which missing blocks are read.
            versions: The versions of objects, which change with each write through the gateway.
            disks: The disk tier of all other blocks, and the disk tier of pinned blocks: those of metadata and of
                tables with `seamark.cache.pinned`. A tier is None if its budget is too small.
            sketch: The approximate numbers of requests for each block, by which a full tier selects its blocks.
        """
        self.store = HedgedStore(store, clock, percent=settings.gateway_hedged_percent)
        self.whole_bytes = settings.gateway_cache_whole_bytes
        # One principal may use only this share of each budget. Without logins, all requests have the same principal,
        # which may use the whole cache.
        share_percent = 100 if settings.auth == "none" else settings.gateway_cache_holder_percent
        memory_bytes = settings.gateway_cache_memory_bytes
        records_bytes = max(_RECORDS_MIN_BYTES, memory_bytes // _RECORDS_BUDGET_DIVISOR)
        budget_bytes = max(0, memory_bytes - records_bytes)
        self._versions = versions
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="gateway-cache-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="gateway-cache-write", initializer=_lower_priority)
        memory: AdmittingCache[str, memoryview] = AdmittingCache(
            budget_bytes,
            sketch,
            pinned_bytes=budget_bytes * settings.gateway_cache_pinned_percent // 100,
            holder_bytes=budget_bytes * share_percent // 100,
            identify=compute_sketch_key,
            name="gateway-blocks",
        )
        fetch_bytes = settings.gateway_cache_fetch_bytes
        blocks_disk, pinned_disk = disks
        self.blocks = ObjectBlocks(
            memory,
            blocks_disk,
            pinned_disk,
            self._readers,
            self._writer,
            block_bytes=settings.gateway_cache_block_bytes,
            pending_bytes_max=fetch_bytes // _PENDING_BUDGET_DIVISOR,
        )
        self.fetches = Fetches(
            self.store,
            self.blocks,
            budget_bytes=fetch_bytes,
            share_bytes=fetch_bytes * share_percent // 100,
            request_bytes=settings.gateway_cache_request_bytes,
        )
        send_bytes = settings.gateway_send_bytes
        self.sending = SendBudget(send_bytes, send_bytes * share_percent // 100)
        self.records = Records(
            records_bytes,
            records_bytes * share_percent // 100,
            pinned_disk or blocks_disk,
            versions,
            clock,
            self._readers,
            recheck_s=settings.gateway_cache_recheck_s,
        )
        self._record_tasks: set[asyncio.Task[None]] = set()

    def write_record(self, record: ObjectRecord, owner: Owner) -> None:
        """Write the record to the disk in the background."""
        task = asyncio.get_running_loop().create_task(self.records.store(record, owner.tag, self._writer))
        self._record_tasks.add(task)
        task.add_done_callback(self._record_tasks.discard)

    async def close(self) -> None:
        await self.fetches.close()
        await asyncio.gather(*self._record_tasks, return_exceptions=True)
        for executor in (self._readers, self._writer):
            executor.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(executor.shutdown, wait=True)
        await asyncio.to_thread(self.blocks.close)
        self._versions.close()


def _lower_priority() -> None:
    """Lower the priority of this thread on Linux, so that writes of the cache do not delay answers."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICE)


async def open_tiers(settings: Settings, clock: Clock, store: Store) -> CacheTiers:
    """Open the tiers of the cache.

    Raises:
        OSError: The folder cannot be used.
    """
    folder = Path(settings.gateway_cache_folder or settings.home / "cache" / "objects")
    block_bytes = settings.gateway_cache_block_bytes
    disk_bytes = settings.gateway_cache_disk_bytes
    key_count = max(_SKETCH_KEYS_MIN, (settings.gateway_cache_memory_bytes + disk_bytes) // block_bytes)
    sketch = FrequencySketch(key_count)
    pinned_bytes = disk_bytes * settings.gateway_cache_pinned_percent // 100
    # Without logins, all requests have the same principal, which may use the whole cache.
    share_percent = 100 if settings.auth == "none" else settings.gateway_cache_holder_percent

    def open_all() -> tuple[WriteVersions, tuple[DiskTier | None, DiskTier | None]]:
        folder.mkdir(parents=True, exist_ok=True)
        versions = WriteVersions(folder / "versions", clock)
        tiers = [
            None
            if budget_bytes < BUDGET_BYTES_MIN
            else open_tier(folder / name, budget_bytes, sketch, budget_bytes * share_percent // 100, block_bytes)
            for name, budget_bytes in (("blocks", disk_bytes - pinned_bytes), ("pinned", pinned_bytes))
        ]
        blocks_tier, pinned_tier = tiers
        return versions, (blocks_tier, pinned_tier)

    versions, disks = await asyncio.to_thread(open_all)
    return CacheTiers(settings, clock, store, versions, disks, sketch)
