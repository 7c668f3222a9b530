"""The interface of object storages, whose objects have a URI and are written once.

An object is complete and durable when it becomes visible, and is never overwritten. So readers need no
locks and caches need no invalidation. The interface has no rename and no append, because S3 has neither.

Locations are not decoded: `%20` in a location is three characters of a file name, not a space. Hadoop's Path,
Iceberg's S3FileIO and PyIceberg do not decode locations either, so all of them find the same object.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    `modified_ms` is the time of the last change, in milliseconds since the Unix epoch, by the storage's clock.
    """

    location: str
    size_bytes: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was started, but neither completed nor aborted.

    Its parts use space, but listings of objects do not show them. The storage has chosen the `id` of the upload.
    `begun_ms` is the time at which the upload was started, by the storage's clock.
    """

    location: str
    id: str
    begun_ms: int


class ObjectReader(Protocol):
    """Reads whole objects of a storage. See `ObjectStore.read`."""

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes: ...


class ObjectStore(Protocol):
    """The interface of a storage.

    Every method may raise these errors besides the errors that it documents:

    - BadRequest: The location is malformed or outside the roots of this store.
    - RetryLater: The storage is unavailable, overloaded, full or slow. The condition may be temporary.
    - StorageError: The storage rejected the request, and a retry does not help (permissions, a missing bucket).
    """

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        """Return the whole object.

        Raises:
            ObjectMissing: The object does not exist.
            TooLarge: The object exceeds `limit_bytes`. It is not read.
        """

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        """Return bytes `start` to `start + length`, or fewer bytes at the end of the object.

        Raises:
            ObjectMissing: The object does not exist.
            ValueError: The start or the length is negative.
        """

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        """Create the object if it does not exist.

        When the method returns, the object is complete and survives a power cut. With `durable=False`, a power cut may
        damage or remove the object, so use this only for objects that are not needed afterwards. After RetryLater or
        StorageError, the object may exist, so use a new name or delete the object.

        Raises:
            ObjectExists: Another writer has created the object, which is unchanged. If this call has created the object
                and only the reply was lost, this error is not raised.
        """

    async def exists(self, location: str) -> bool:
        """Return whether an object exists. The method is cheap on local files, so it may be called often."""

    async def check_links(self, locations: Sequence[str]) -> None:
        """Check that none of the locations is a symbolic link or behind a link. On S3, the check does nothing.

        Another program may create such a link after this check, so all other methods also refuse a location behind a
        link.

        Raises:
            BadRequest: A location is a symbolic link or behind a link.
        """

    async def delete(self, location: str) -> None:
        """Delete the object if it exists."""

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield all objects below the folder `prefix` or its subfolders, in any order. A missing folder is empty."""

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        """Yield all unfinished uploads of objects below the folder `prefix`, in any order.

        A storage that does not support uploads yields nothing.
        """

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        """Delete the parts of unfinished uploads, and return the number of uploads that no longer exist.

        If the storage does not abort an upload, call the method again later.
        """

    async def ping(self) -> None:
        """Check that the storage answers. Readiness checks call this method."""


async def yield_no_uploads() -> AsyncIterator[Upload]:
    """Yield nothing, for a storage that does not support uploads."""
    no_uploads: tuple[Upload, ...] = ()
    for upload in no_uploads:
        yield upload


def check_range(start: int, length: int) -> None:
    """Check a range.

    Raises:
        ValueError: The start or the length is negative.
    """
    if start < 0 or length < 0:
        raise ValueError(f"invalid range: start {start}, {length} bytes")
