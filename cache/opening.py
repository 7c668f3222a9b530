"""Open a cache stack with its dependencies: a folder that the processes of a machine share, claims, and threads.

All are closed together: first the stack, which still writes to the disk, and then its threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from seamark.cache.claims import Claims
from seamark.cache.disk import DiskTier
from seamark.cache.memory import MemoryCache
from seamark.cache.stack import Stack

V = TypeVar("V")


@asynccontextmanager
async def open_stack(
    memory: MemoryCache[str, V],
    *,
    weigh: Callable[[V], int],
    weigh_mapped: Callable[[V], int] | None = None,
    pending_bytes_max: int,
    folder: Path,
    disk_bytes: int,
    threads: int,
    name: str,
    check_mapped: bool = True,
    on_mapped: Callable[[V], None] | None = None,
) -> AsyncIterator[Stack[V]]:
    """Open a stack of a memory tier and a disk tier, and close it at the end of the context.

    Processes that share `folder` coordinate their fetches by claims, so that only one process fetches a key at a time.
    The file of the claims is next to `folder`. The disk tier keeps no mapped files, so only values in the memory tier
    or in use have mappings, and the memory tier accounts for all memory.

    Args:
        memory: The memory tier.
        weigh: Returns the size of a value in bytes.
        weigh_mapped: Returns the size of a value whose bytes are a mapped file. If it is None, `weigh` is used.
        pending_bytes_max, on_mapped: See `Stack`.
        folder: The folder of the disk tier.
        disk_bytes: The maximum size of the values in `folder`. With 0, there is no disk tier.
        threads: The number of threads that work on the disk.
        name: The name of these threads.
        check_mapped: See `DiskTier`.
    """
    executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
    disk = claims = None
    if disk_bytes:
        disk = await asyncio.to_thread(DiskTier, folder, disk_bytes, mapped_max=0, check_mapped=check_mapped)
        claims = Claims(folder.with_name(folder.name + ".claims"))
    stack = Stack(
        memory,
        disk,
        weigh=weigh,
        weigh_mapped=weigh_mapped,
        pending_bytes_max=pending_bytes_max,
        claims=claims,
        on_mapped=on_mapped,
        executor=executor,
    )
    try:
        yield stack
    finally:
        await stack.close()
        executor.shutdown(wait=True, cancel_futures=True)
