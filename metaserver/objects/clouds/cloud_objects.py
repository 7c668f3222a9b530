"""The base class of the object stores that use obstore: S3, Azure and Google Cloud Storage.

`create` never overwrites an object, and never reports its own write as a conflict. The request to the store is
conditional, and stores an id in the object's metadata. If the reply is lost, or a retry inside obstore finds the object
that its first attempt created, the object's id is read. If the id is that of this call, the write has succeeded.
Otherwise another write has created the object.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Generic, TypeVar

import obstore
from obstore import exceptions
from obstore.store import ObjectStore as RemoteStore

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import (
    BadRequest,
    ObjectExists,
    ObjectMissing,
    RetryLater,
    SeamarkError,
    StorageError,
    TooLarge,
)
from seamark.formats.storage.locations import Location, parse_location
from seamark.metaserver.objects.port import ObjectInfo, Upload, check_range, yield_no_uploads
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

_OBJECTS_PER_PAGE = 1000
_BACKOFF_MAX_S = 2.0
# Besides its own errors, obstore raises Python's FileNotFoundError, NotImplementedError and ValueError.
MISSING = (FileNotFoundError, exceptions.NotFoundError)
FAILED = (exceptions.BaseError, OSError, NotImplementedError, ValueError)

_STATUS = re.compile(r"status(?: code)?:? (\d{3})\b")
_RANGE_NOT_SATISFIABLE = 416
_RANGE_BEHIND_END = re.compile(r"Wanted range starting at \d+, but object was only \d+ bytes long")
"""Matches obstore's error for a range behind the end, to which a service has answered with other bytes or no bytes."""
_RETRYABLE_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))

S = TypeVar("S", bound=RemoteStore)


class CloudObjects(ABC, Generic[S]):
    """An ObjectStore for the locations of one scheme.

    The client of a bucket is created at its first use. `ping` checks the buckets of `roots`.

    Attributes:
        scheme: The scheme of normalised locations.
        service: The name of the service in error messages.
        bucket_noun: What the service calls a bucket.
        missing_bucket: The error code with which the service reports a missing bucket.
        keys_advice: What an operator checks after the service has refused access.
        write_id: The metadata key of the id that `create` stores with its object.
    """

    scheme: str
    service: str
    bucket_noun = "bucket"
    missing_bucket = "NoSuchBucket"
    keys_advice = "check the server's keys and the bucket's policy"
    write_id = "seamark-write"

    def __init__(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> None:
        self._roots = tuple(roots)
        self._settings = settings
        self._clock = clock
        self._buckets: dict[str, S] = {}

    @abstractmethod
    def open_bucket(self, bucket: str) -> S:
        """Return an obstore client for one bucket."""

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        store, parsed_location = self._open(location)
        try:
            result = await obstore.get_async(store, parsed_location.path)
            size = result.meta["size"]
            if limit_bytes is not None and size > limit_bytes:
                raise TooLarge(f"{location!r} has {size} bytes; at most {limit_bytes} are read")
            return bytes(await result.bytes_async())
        except FAILED as error:
            raise self.explain(error, location) from error

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        check_range(start, length)
        store, parsed_location = self._open(location)
        if length == 0:
            await self.exists_or_raise(location)  # No store has empty ranges, so check that the object exists.
            return b""
        try:
            return bytes(await obstore.get_range_async(store, parsed_location.path, start=start, length=length))
        except FAILED as error:
            if is_range_behind_end(error):
                return b""
            raise self.explain(error, location) from error

    async def exists(self, location: str) -> bool:
        try:
            await self.exists_or_raise(location)
        except ObjectMissing:
            return False
        return True

    async def exists_or_raise(self, location: str) -> None:
        """Check that an object exists.

        Raises:
            ObjectMissing: The object does not exist.
            StorageError: The store refuses the request.
            RetryLater: The store does not answer.
        """
        store, parsed_location = self._open(location)
        try:
            await obstore.head_async(store, parsed_location.path)
        except FAILED as error:
            raise self.explain(error, location) from error

    async def check_links(self, locations: Sequence[str]) -> None:
        """Do nothing, because object stores have no links."""

    async def create(self, location: str, data: bytes, *, durable: bool = True) -> None:
        store, parsed_location = self._open(location)
        write_id = self._clock.draw_bytes(16).hex()
        try:
            await self._put_if_absent(store, parsed_location, data, {self.write_id: write_id})
        except exceptions.AlreadyExistsError:
            failure: SeamarkError = ObjectExists(f"An object already exists at {location!r}")
        except FAILED as error:
            failure = self.explain(error, location)
            if not isinstance(failure, RetryLater):
                raise failure from error
        else:
            return
        # If a reply was lost, a repeated request may conflict with the object that this call has created. The id in the
        # metadata of the object shows which writer has created it.
        try:
            is_own_write = await self._has_write_id(store, parsed_location, data, write_id)
        except FAILED:
            # If the id cannot be read, raise the first failure: a conflict, or RetryLater for an unknown outcome.
            raise failure from None
        if is_own_write is None:
            raise failure
        if not is_own_write:
            raise ObjectExists(f"An object already exists at {location!r}")

    async def delete(self, location: str) -> None:
        store, parsed_location = self._open(location)
        try:
            await obstore.delete_async(store, parsed_location.path)
        except MISSING:
            return
        except FAILED as error:
            raise self.explain(error, location) from error

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        store, parsed_location = self._open(prefix, whole_bucket=True)
        try:
            async for page in obstore.list(
                store, f"{parsed_location.path}/" if parsed_location.path else None, chunk_size=_OBJECTS_PER_PAGE
            ):
                for meta in page:
                    modified_ms = int(meta["last_modified"].timestamp() * 1000)
                    yield ObjectInfo(f"{parsed_location.root()}/{meta['path']}", meta["size"], modified_ms)
        except FAILED as error:
            raise self.explain(error, prefix) from error

    def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        return yield_no_uploads()

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        return 0

    async def ping(self) -> None:
        for root in self._roots:
            # The listing is below a name that does not exist, so the answer is short. A HEAD does not report a missing
            # bucket.
            missing_folder = Location(self.scheme, root.bucket, f"{root.path}/.seamark-ping".lstrip("/"))
            async for _ in self.list(str(missing_folder)):
                break

    async def _put_if_absent(
        self, store: S, parsed_location: Location, data: bytes, attributes: dict[str, str]
    ) -> None:
        await obstore.put_async(
            store, parsed_location.path, data, mode="create", attributes=attributes, use_multipart=False
        )

    async def _has_write_id(self, store: S, parsed_location: Location, data: bytes, write_id: str) -> bool | None:
        """Return whether this write has created the stored object, or None if no object is stored."""
        try:
            result = await obstore.get_async(store, parsed_location.path)
        except MISSING:
            return None
        stored_id = result.attributes.get(self.write_id)
        if stored_id is not None:
            return stored_id == write_id
        # Some stores discard metadata, so compare the bytes. They contain a UUID, so no other writer writes the same
        # bytes.
        return result.meta["size"] == len(data) and bytes(await result.bytes_async()) == data

    def _open(self, location: str, *, whole_bucket: bool = False) -> tuple[S, Location]:
        parsed_location = parse_location(location)
        if parsed_location.scheme != self.scheme:
            raise BadRequest(f"{location!r} is not on {self.service}")
        if not parsed_location.path and not whole_bucket:
            raise BadRequest(f"{location!r} names a {self.bucket_noun}, but no object in it")
        store = self._buckets.get(parsed_location.bucket)
        if store is None:
            store = self._buckets[parsed_location.bucket] = self.open_bucket(parsed_location.bucket)
        return store, parsed_location

    def explain(self, error: Exception, location: str) -> SeamarkError:
        """Convert an error of the library obstore to the error that the methods of `ObjectStore` raise."""
        # The first line is the cause. The other lines are the service's XML and Rust debug output.
        reason = str(error).partition("\n")[0].partition(": <?xml")[0].partition(": \ufeff<?xml")[0]
        if self.missing_bucket in str(error):
            return StorageError(f"The {self.bucket_noun} of {location!r} does not exist; create it")
        if isinstance(error, MISSING):
            return ObjectMissing(f"Nothing is stored at {location!r}")
        status = read_status(error)
        if status in (401, 403) or isinstance(
            error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError
        ):
            return StorageError(f"{self.service} refused access to {location!r}: {self.keys_advice}")
        if isinstance(error, exceptions.GenericError) and (status is None or status in _RETRYABLE_STATUS):
            return RetryLater(f"{self.service} did not answer for {location!r}, try again later: {reason}")
        return StorageError(f"{self.service} refused {location!r}: {reason}")


def build_client_options(settings: Settings, endpoint: str) -> tuple[ClientConfig, RetryConfig]:
    """Return the options of obstore for connections and for retries.

    Connections without TLS are allowed only if `endpoint` is an `http://` URL.
    """
    timeout = timedelta(seconds=settings.storage_timeout_s)
    client: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "timeout": timeout,
        # An attempt to connect fails earlier than a request that gets no answer.
        "connect_timeout": min(timeout, timedelta(seconds=5)),
        "user_agent": "seamark",
    }
    retry: RetryConfig = {
        "max_retries": settings.storage_retries,
        "retry_timeout": timeout,
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=_BACKOFF_MAX_S)},
    }
    return client, retry


def is_range_behind_end(error: Exception) -> bool:
    """Return whether a read has failed because its range begins at or behind the end of the object."""
    return read_status(error) == _RANGE_NOT_SATISFIABLE or _RANGE_BEHIND_END.search(str(error)) is not None


def read_status(error: Exception) -> int | None:
    """Return the HTTP status of an error, which obstore reports only in the error's message."""
    status = _STATUS.search(str(error))
    return int(status[1]) if status else None
