"""Limits the memory of large table metadata that requests use at the same time.

A principal can write many tables with metadata of hundreds of megabytes, and load them all at once. So large metadata
are read and decoded one after the other. Their memory is counted for the principal that has caused the read, as long as
they exist. Requests that load the same table share its metadata, which are counted once.
"""

from __future__ import annotations

from collections import Counter
from weakref import finalize

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.runtime.errors import RetryLater
from seamark.formats.runtime.fair_lock import FairLock

LARGE_METADATA_BYTES = 16 << 20
"""The maximum size of a metadata file, as JSON, that is not large."""
_MARKER_ATTRIBUTE = "_memory_marker"
"""The attribute of metadata that contains their `_MemoryMarker`."""


class TooMuchMemory(RetryLater):
    """Raised if metadata would take more memory than the principal may use now.

    Attributes:
        principal: The principal.
    """

    def __init__(self, message: str, principal: str = "") -> None:
        super().__init__(message)
        self.principal = principal


class _MemoryMarker:
    """An object whose deletion shows that table metadata are no longer in memory.

    `LargeMetadata.count` stores it in the metadata. Python deletes it together with the metadata, and then
    `LargeMetadata` no longer counts their memory.
    """

    __slots__ = ("__weakref__",)


class LargeMetadata:
    """Counts the memory of large metadata. An instance belongs to one event loop.

    Args:
        limit_bytes: The maximum memory of all large metadata in use. A principal can use half of it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        self._used_bytes_by_principal: Counter[str] = Counter()
        self.queue = FairLock()
        """The queue in which large metadata are read and decoded."""

    def count(self, metadata: TableMetadata, principal: str, size_bytes: int) -> None:
        """Count the memory of metadata until they are freed.

        A principal may use half of the limit. Metadata that are larger count as this half. So the metadata of one table
        are accepted if the principal uses no other large metadata, and other principals leave room.

        Args:
            metadata: The metadata.
            principal: The principal of the request, or an empty text for the server's own work, which is not counted.
            size_bytes: The memory of the metadata.

        Raises:
            TooMuchMemory: The principal, or all principals together, use too much memory.
        """
        if not principal:
            return
        if not self.has_room(principal, size_bytes):
            raise TooMuchMemory(
                "The requests in progress use too much memory for metadata of tables with more than "
                f"{LARGE_METADATA_BYTES:,} bytes; expire snapshots of these tables, or try again",
                principal,
            )
        size_bytes = min(size_bytes, self._limit_bytes // 2)
        self._used_bytes += size_bytes
        self._used_bytes_by_principal[principal] += size_bytes
        marker = metadata.__dict__[_MARKER_ATTRIBUTE] = _MemoryMarker()
        finalize(marker, self._release, principal, size_bytes).atexit = False

    def has_room(self, principal: str, size_bytes: int) -> bool:
        """Return whether `count` accepts metadata of this size. A principal may use half of the limit."""
        if not principal:
            return True
        share_bytes = self._limit_bytes // 2
        size_bytes = min(size_bytes, share_bytes)
        used_bytes = self._used_bytes_by_principal[principal]
        return used_bytes + size_bytes <= share_bytes and self._used_bytes + size_bytes <= self._limit_bytes

    def _release(self, principal: str, size_bytes: int) -> None:
        self._used_bytes -= size_bytes
        self._used_bytes_by_principal[principal] -= size_bytes
        if not self._used_bytes_by_principal[principal]:
            del self._used_bytes_by_principal[principal]

    def check_invariants(self) -> None:
        assert 0 <= self._used_bytes == self._used_bytes_by_principal.total() <= self._limit_bytes
        assert all(0 < used <= self._limit_bytes // 2 for used in self._used_bytes_by_principal.values())
