"""Compares the server's clock with the clock of the storage, before files are deleted by their age.

The storage states when a file was written, and the server computes the file's age from its own clock. If the
clocks differ, every age is wrong by the difference.
"""

from __future__ import annotations

from contextlib import suppress

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, SeamarkError, StorageError
from seamark.metaserver.objects.port import ObjectStore

CLOCKS_DIFFER_MS = 10 * 60_000
"""The largest accepted difference between the two clocks.

Clocks that are synchronised over a network differ by less than one second.
"""


async def read_storage_time_ms(objects: ObjectStore, clock: Clock, folder: str) -> int:
    """Return the storage's current time.

    The function creates an object below `folder`, reads its time from a listing, and deletes it.

    Raises:
        BadRequest: The time differs too much from the server's time.
        StorageError: The storage does not list the object.
    """
    probe = f"{folder}/{clock.draw_bytes(16).hex()}"
    started_ms = clock.now_ms()
    await objects.create(probe, b"")
    try:
        times_ms = [info.modified_ms async for info in objects.list(folder) if info.location == probe]
    finally:
        # If the deletion fails, only an empty object remains.
        with suppress(SeamarkError):
            await objects.delete(probe)
    if not times_ms:
        raise StorageError(f"The storage does not list {probe}, which was just written; its clock cannot be read")
    storage_ms = times_ms[0]
    difference_ms = max(started_ms - storage_ms, storage_ms - clock.now_ms())
    if difference_ms > CLOCKS_DIFFER_MS:
        raise BadRequest(
            f"The clocks of the server and of the storage of {folder} differ by {difference_ms / 1000:,.0f} s; "
            f"the limit is {CLOCKS_DIFFER_MS // 1000} s. The age of a file is therefore unknown, so no file is deleted "
            "by its age; set the clocks, for example by NTP"
        )
    return storage_ms
