"""Opens a stack of tiers with its dependencies: a folder that the processes of a machine share, claims, and threads.

They are closed together: first the stack, which still writes to the disk, then its threads.
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
    """`folder` contains at most `disk_bytes` of values; 0 disables the disk tier.

    The file of the claims is next to it. `threads` threads called `name` do the disk's work. Mappings are kept only by
    the values in use, so that the memory tier accounts for all memory.

    Args:
        check_mapped: See `DiskTier`; `on_mapped`: see `Stack`.
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
