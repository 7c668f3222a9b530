"""The tickets that a replica has accepted, because it accepts each ticket only once.

The tickets are in a file that the workers of a machine share, and that survives a restart. A ticket is kept until it
has ended. The file has a fixed size. If there is no room for a ticket, the ticket is refused, and the other replica
then reads the storage. Tickets that are older than the file are also refused, because it is unknown which tickets the
replica accepted before it had the file.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Protocol

NONCE_BYTES = 16
_GROUPS, _PLACES_PER_GROUP = 8192, 16
"""The number of groups, and of places in a group. They are enough for 131,072 tickets at a time, in about 3 MB.

A nonce, which is random, has its place in one group.
"""
_PLACE = struct.Struct(f">{NONCE_BYTES}sQ")
"""The layout of a place: the nonce, and the end of its ticket in milliseconds, or 0 for a free place."""
_HEAD = struct.Struct(">Q")
_FILE_BYTES = _HEAD.size + _GROUPS * _PLACES_PER_GROUP * _PLACE.size


class TicketRecord(Protocol):
    """The interface of a record of used tickets. A ticket authenticates one request of another replica."""

    def accept(self, nonce: bytes, issued_ms: int, until_ms: int, now_ms: int) -> bool:
        """Record that a ticket is used, and return whether it was unused.

        Args:
            nonce: The nonce of the ticket.
            issued_ms: The time at which the ticket was issued.
            until_ms: The time from which the ticket is refused because of its age.
            now_ms: The current time.
        """


class UsedTickets:
    """A `TicketRecord` in a file.

    An instance belongs to one thread. Processes share the file.
    """

    def __init__(self, path: Path, now_ms: int) -> None:
        """Open the record. A file with another size is replaced by an empty file.

        Raises:
            OSError: The file cannot be opened.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            is_new = os.fstat(self._descriptor).st_size != _FILE_BYTES
            if is_new:
                os.ftruncate(self._descriptor, 0)  # The second call fills the file with zeros.
                os.ftruncate(self._descriptor, _FILE_BYTES)
            self._map = mmap.mmap(self._descriptor, _FILE_BYTES)
            if is_new:
                _HEAD.pack_into(self._map, 0, now_ms)
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        except BaseException:
            os.close(self._descriptor)
            raise
        self._created_ms = int(_HEAD.unpack_from(self._map)[0])

    def accept(self, nonce: bytes, issued_ms: int, until_ms: int, now_ms: int) -> bool:
        if issued_ms < self._created_ms:
            return False  # The ticket may have been used before this record was created.
        group = int.from_bytes(nonce[:4], "big") % _GROUPS  # A nonce is random, so its first bytes suffice.
        group_start = _HEAD.size + group * _PLACES_PER_GROUP * _PLACE.size
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # Another worker holds this lock only for microseconds.
        try:
            free_place = None
            for place in range(group_start, group_start + _PLACES_PER_GROUP * _PLACE.size, _PLACE.size):
                used_nonce, end_ms = _PLACE.unpack_from(self._map, place)
                if end_ms < now_ms:
                    free_place = place if free_place is None else free_place
                elif used_nonce == nonce:
                    return False
            if free_place is None:
                return False  # The use could not be recorded, so the ticket could be used again.
            _PLACE.pack_into(self._map, free_place, nonce, until_ms)
            return True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        with suppress(BufferError):
            self._map.close()
        os.close(self._descriptor)
