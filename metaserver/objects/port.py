"""The object storage port: whole immutable objects, named by URI, written once and never changed.

The rule it keeps: an object, once visible, is complete and durable, and nobody overwrites it. So a reader never needs a
lock and a cache never needs invalidation. There is no rename and no append because S3 has neither.

Locations are taken as written, character by character: `%20` in a location is three characters of a file name, not a
space. That is how Hadoop's Path, Iceberg's S3FileIO and PyIceberg read them, and all have to find the same object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object. `modified_ms` is in milliseconds since the Unix epoch, by the storage's clock."""

    location: str
    size_bytes: int
    modified_ms: int


class ObjectStore(Protocol):
    """Every method may raise, besides what it names:

    BadRequest: the location is malformed or outside what this store may touch.
    RetryLater: the storage is away, overloaded, full or slow; nothing is known to have gone wrong for good.
    StorageError: the storage refused in a way that a retry does not mend (permissions, a missing bucket).
    """

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        """The whole object. ObjectMissing when there is none; TooLarge, before reading, past `limit_bytes`."""

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        """Bytes `start` to `start + length` of the object, fewer where it ends before. ObjectMissing when there is
        none. ValueError for a negative start or length."""

    async def create(self, location: str, data: bytes) -> None:
        """Put if absent. Once it returns, the object is whole and survives a power cut.

        ObjectExists: somebody else's object is there, untouched; never raised for our own write whose reply was lost.
        After RetryLater or StorageError the object may or may not exist: take a new name, or delete this one.
        """

    async def exists(self, location: str) -> bool:
        """Whether something is stored there; cheap, and asked often on local files."""

    async def delete(self, location: str) -> None:
        """Nothing is stored there afterwards; that nothing was there before is no error."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Every object below the folder `prefix` at any depth, in no particular order; a missing folder is empty."""

    async def ping(self) -> None:
        """Returns when the storage answers; for readiness checks."""


def check_range(start: int, length: int) -> None:
    """ValueError for what is no range."""
    if start < 0 or length < 0:
        raise ValueError(f"a range cannot start at {start} or have {length} bytes")
