"""Compares the server's clock with that of the storage, before files are deleted by their age.

The storage says when a file was written, and the server how long ago that is. If their clocks differ, every age is
wrong by the difference.
"""

from __future__ import annotations

from contextlib import suppress

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, SeamarkError, StorageError
from seamark.metaserver.objects.port import ObjectStore

CLOCKS_DIFFER_MS = 10 * 60_000
"""The largest difference between the two clocks. Clocks that are set over a network differ by less than a second."""


async def storage_time_ms(objects: ObjectStore, clock: Clock, folder: str) -> int:
    """Return the storage's time now: that of an object that is written below `folder`, listed and deleted.

    Raises:
        BadRequest: When it is not that of the server, StorageError when the object is not listed.
    """
    probe = f"{folder}/{clock.random_bytes(16).hex()}"
    before_ms = clock.now_ms()
    await objects.create(probe, b"")
    try:
        modified_ms = [info.modified_ms async for info in objects.list(folder) if info.location == probe]
    finally:
        with suppress(SeamarkError):  # an empty object that nothing reads
            await objects.delete(probe)
    if not modified_ms:
        raise StorageError(f"The storage does not list {probe}, which was just written; its clock cannot be read")
    difference_ms = max(before_ms - modified_ms[0], modified_ms[0] - clock.now_ms())
    if difference_ms > CLOCKS_DIFFER_MS:
        raise BadRequest(
            f"The clocks of the server and of the storage of {folder} differ by {difference_ms / 1000:,.0f} s "
            f"({CLOCKS_DIFFER_MS // 1000} s are tolerated), so the age of a file is not known, and no file is deleted "
            "by its age; set the clocks, for example by NTP"
        )
    return modified_ms[0]
