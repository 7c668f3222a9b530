"""The object storage port: immutable objects, named by URI and written once.

An object is complete and durable when it becomes visible, and is never overwritten. So readers need no locks and caches
need no invalidation. There is no rename and no append because S3 has neither.

A location is used character by character: `%20` in a location is three characters of a file name, not a space. Hadoop's
Path, Iceberg's S3FileIO and PyIceberg do the same, and all must find the same object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object.

    `modified_ms` is in milliseconds since the Unix epoch, by the storage's clock.
    """

    location: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was begun, and neither completed nor aborted: its parts take space, and no listing of
    objects has them.

    `id` is the storage's name for it; `begun_ms` is by the storage's clock.
    """

    location: str
    id: str
    begun_ms: int


class ObjectReader(Protocol):
    """The part of `ObjectStore` by which whole objects are read."""

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes: ...


class ObjectStore(Protocol):
    """Every method may raise these errors in addition to its own.

    BadRequest: the location is malformed or outside the roots of this store. RetryLater: the storage is unavailable,
    overloaded, full or slow; the condition may be temporary. StorageError: the storage rejected the request, and a
    retry does not help (permissions, a missing bucket).
    """

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        """Return the whole object.

        Raises:
            ObjectMissing: If it does not exist.
            TooLarge: Before reading, if it exceeds `limit_bytes`.
        """

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        """Return bytes `start` to `start + length`, fewer at the end of the object.

        Raises:
            ObjectMissing: If it does not exist.
            ValueError: For a negative start or length.
        """

    async def create(self, location: str, data: bytes) -> None:
        """Create the object if absent.

        When it returns, the object is complete and survives a power cut.

        ObjectExists: another writer's object exists and is unchanged; never raised for this write if its reply was
        lost. After RetryLater or StorageError the object may or may not exist: use a new name, or delete it.
        """

    async def exists(self, location: str) -> bool:
        """Return whether an object exists; cheap and frequent on local files."""

    async def check_links(self, locations: Sequence[str]) -> None:
        """BadRequest if one of the locations is a symbolic link, or is behind one; nothing is there on S3.

        Another program may make such a link later: every method refuses a location behind a link.
        """

    async def delete(self, location: str) -> None:
        """Delete the object; a missing object is not an error."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Return all objects below the folder `prefix`, recursively and unordered; a missing folder is empty."""

    def uploads(self, prefix: str) -> AsyncIterator[Upload]:
        """Return all unfinished uploads of objects below the folder `prefix`, unordered; none where storage has no
        uploads.
        """

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        """Delete the parts of unfinished uploads; return how many are gone, as a missing one is.

        One that the storage does not abort is left to a later call.
        """

    async def ping(self) -> None:
        """Check that the storage answers; for readiness checks."""


async def no_uploads() -> AsyncIterator[Upload]:
    """Yield the unfinished uploads of storage that has no uploads."""
    none: tuple[Upload, ...] = ()
    for upload in none:
        yield upload


def check_range(start: int, length: int) -> None:
    """ValueError for an invalid range."""
    if start < 0 or length < 0:
        raise ValueError(f"invalid range: start {start}, {length} bytes")
