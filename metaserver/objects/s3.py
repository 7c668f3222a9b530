"""S3 and compatible stores as object storage, through obstore.

`create` never overwrites, and never reports its own write as a conflict. A PUT is conditional (`If-None-
Match: *`) and stores an id in the object's metadata. If the reply is lost, or a retry inside obstore
finds the object of its first attempt, the object is read back: if it has the id of this call, the write
succeeded; with another id, it conflicts.

If a store answers a conditional PUT with 501, the process uses a HEAD and a plain PUT from then on. Two
concurrent writers could then both succeed, but every name that the catalog writes contains a new UUID.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store

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
from seamark.metaserver.objects import s3_uploads
from seamark.metaserver.objects.port import ObjectInfo, Upload, check_range
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config, S3Credential

WRITE_ID = "seamark-write"
"""The metadata key (in HTTP, `x-amz-meta-seamark-write`) of the id that `create` stores with its object."""

_LIST_PAGE = 1000
_BACKOFF_MAX_S = 2.0
# obstore also raises Python's FileNotFoundError, NotImplementedError and ValueError.
_MISSING = (FileNotFoundError, exceptions.NotFoundError)
_FAILED = (exceptions.BaseError, OSError, NotImplementedError, ValueError)

_STATUS = re.compile(r"status(?: code)?:? (\d{3})\b")
_RANGE_NOT_SATISFIABLE = 416
_RETRYABLE_STATUS = frozenset((408, 409, 425, 429, 500, 502, 503, 504))


class S3Objects:
    """An ObjectStore for `s3://` locations.

    The client of a bucket is created on first use. `ping` checks the buckets of `roots`.
    """

    def __init__(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> None:
        self._roots = tuple(roots)
        self._settings = settings
        self._clock = clock
        self._buckets: dict[str, S3Store] = {}
        self._unconditional: set[str] = set()

    async def read(self, location: str, *, limit_bytes: int | None = None) -> bytes:
        store, at = self._open(location)
        try:
            result = await obstore.get_async(store, at.path)
            size = result.meta["size"]
            if limit_bytes is not None and size > limit_bytes:
                raise TooLarge(f"{location!r} has {size} bytes; at most {limit_bytes} are read")
            return bytes(await result.bytes_async())
        except _FAILED as error:
            raise _explain(error, location) from error

    async def read_range(self, location: str, start: int, length: int) -> bytes:
        check_range(start, length)
        store, at = self._open(location)
        if length == 0:
            await self.read_range(location, 0, 1)  # S3 has no empty ranges, so check that the object exists.
            return b""
        try:
            return bytes(await obstore.get_range_async(store, at.path, start=start, length=length))
        except _FAILED as error:
            if _read_status(error) == _RANGE_NOT_SATISFIABLE:
                return b""
            raise _explain(error, location) from error

    async def exists(self, location: str) -> bool:
        store, at = self._open(location)
        try:
            await obstore.head_async(store, at.path)
        except _MISSING:
            return False
        except _FAILED as error:
            raise _explain(error, location) from error
        return True

    async def check_links(self, locations: Sequence[str]) -> None:
        """Do nothing, because S3 has no links."""

    async def create(self, location: str, data: bytes) -> None:
        store, at = self._open(location)
        write_id = self._clock.random_bytes(16).hex()
        try:
            await self._put_if_absent(store, at, data, write_id)
        except exceptions.AlreadyExistsError:
            failure: SeamarkError = ObjectExists(f"An object already exists at {location!r}")
        except _FAILED as error:
            failure = _explain(error, location)
            if not isinstance(failure, RetryLater):
                raise failure from error
        else:
            return
        try:
            is_own_write = await self._has_write_id(store, at, data, write_id)
        except _FAILED:
            # If the read-back fails, the first failure is raised: a conflict, or RetryLater for an unknown outcome.
            raise failure from None
        if is_own_write is None:
            raise failure
        if not is_own_write:
            raise ObjectExists(f"An object already exists at {location!r}")

    async def delete(self, location: str) -> None:
        store, at = self._open(location)
        try:
            await obstore.delete_async(store, at.path)
        except _MISSING:
            return
        except _FAILED as error:
            raise _explain(error, location) from error

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        store, at = self._open(prefix, whole_bucket=True)
        try:
            async for page in obstore.list(store, f"{at.path}/" if at.path else None, chunk_size=_LIST_PAGE):
                for meta in page:
                    modified_ms = int(meta["last_modified"].timestamp() * 1000)
                    yield ObjectInfo(f"{at.root()}/{meta['path']}", meta["size"], modified_ms)
        except _FAILED as error:
            raise _explain(error, prefix) from error

    async def uploads(self, prefix: str) -> AsyncIterator[Upload]:
        _, at = self._open(prefix, whole_bucket=True)
        async for upload in s3_uploads.list_uploads(at, self._settings):
            yield upload

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        placed = [(upload, self._open(upload.location)[1]) for upload in uploads]
        return await s3_uploads.abort(placed, self._settings)

    async def ping(self) -> None:
        for root in self._roots:
            # The listing is below a name that does not exist, so the answer is short. A HEAD does not report a missing
            # bucket.
            nothing = Location("s3", root.bucket, f"{root.path}/.seamark-ping".lstrip("/"))
            async for _ in self.list(str(nothing)):
                break

    async def _put_if_absent(self, store: S3Store, at: Location, data: bytes, write_id: str) -> None:
        attributes = {WRITE_ID: write_id}
        if at.bucket not in self._unconditional:
            try:
                await obstore.put_async(store, at.path, data, mode="create", attributes=attributes, use_multipart=False)
            except (exceptions.NotSupportedError, NotImplementedError):
                self._unconditional.add(at.bucket)
            except exceptions.GenericError as error:
                if _read_status(error) != 501:
                    raise
                self._unconditional.add(at.bucket)
            else:
                return
        try:
            await obstore.head_async(store, at.path)
        except _MISSING:
            await obstore.put_async(store, at.path, data, mode="overwrite", attributes=attributes, use_multipart=False)
        else:
            raise exceptions.AlreadyExistsError(str(at))

    async def _has_write_id(self, store: S3Store, at: Location, data: bytes, write_id: str) -> bool | None:
        """Return whether the stored object is from this write, or None if no object is stored."""
        try:
            result = await obstore.get_async(store, at.path)
        except _MISSING:
            return None
        stored_id = result.attributes.get(WRITE_ID)
        if stored_id is not None:
            return stored_id == write_id
        # If a store drops metadata, the bytes are compared. The bytes contain a UUID, so no other writer writes the
        # same bytes.
        return result.meta["size"] == len(data) and bytes(await result.bytes_async()) == data

    def _open(self, location: str, *, whole_bucket: bool = False) -> tuple[S3Store, Location]:
        at = parse_location(location)
        if at.scheme != "s3":
            raise BadRequest(f"{location!r} is not on S3")
        if not at.path and not whole_bucket:
            raise BadRequest(f"{location!r} names a bucket, but no object in it")
        store = self._buckets.get(at.bucket)
        if store is None:
            store = self._buckets[at.bucket] = open_bucket(at.bucket, self._settings)
        return store, at


def open_bucket(bucket: str, settings: Settings) -> S3Store:
    """Return an obstore client for one bucket. Without keys in the settings, it uses AWS's default credential chain."""
    config: S3Config = {"region": settings.s3_region, "virtual_hosted_style_request": not settings.s3_path_style}
    # Each object has its own DELETE, because the bulk call needs a checksum of its body that some stores do not
    # support.
    config["disable_bulk_delete"] = True
    if settings.s3_endpoint:
        endpoint = bucket_endpoint(bucket, settings)
        # Both names are set. Otherwise AWS_ENDPOINT_URL_S3 in the environment would override the setting.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
    timeout = timedelta(seconds=settings.storage_timeout_s)
    client: ClientConfig = {
        "allow_http": settings.s3_endpoint.startswith("http://"),
        "timeout": timeout,
        "connect_timeout": min(timeout, timedelta(seconds=5)),
        "user_agent": "seamark",
    }
    retry: RetryConfig = {
        "max_retries": settings.storage_retries,
        "retry_timeout": timeout,
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=_BACKOFF_MAX_S)},
    }
    if not settings.s3_access_key_id:
        return S3Store(bucket, config=config, client_options=client, retry_config=retry)

    config["skip_signature"] = False

    # With this provider, an AWS_SESSION_TOKEN in the environment is not combined with keys from the settings.
    def keys() -> S3Credential:
        return {
            "access_key_id": settings.s3_access_key_id,
            "secret_access_key": settings.s3_secret_access_key,
            "token": None,
            "expires_at": None,
        }

    return S3Store(bucket, config=config, client_options=client, retry_config=retry, credential_provider=keys)


def bucket_endpoint(bucket: str, settings: Settings) -> str:
    """Return the configured endpoint. In virtual-host style, the bucket is its first label."""
    endpoint = settings.s3_endpoint.rstrip("/")
    if settings.s3_path_style:
        return endpoint
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"


def _read_status(error: Exception) -> int | None:
    """Return the HTTP status of an error, which obstore reports only in the error's message."""
    status = _STATUS.search(str(error))
    return int(status[1]) if status else None


def _explain(error: Exception, location: str) -> SeamarkError:
    # The first line is the cause; the rest is S3's XML and Rust debug output.
    reason = str(error).partition("\n")[0].partition(": <?xml")[0]
    if "NoSuchBucket" in str(error):
        return StorageError(f"The bucket of {location!r} does not exist; create it")
    if isinstance(error, _MISSING):
        return ObjectMissing(f"Nothing is stored at {location!r}")
    status = _read_status(error)
    if status in (401, 403) or isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return StorageError(f"S3 refused access to {location!r}: check the server's keys and the bucket's policy")
    if isinstance(error, exceptions.GenericError) and (status is None or status in _RETRYABLE_STATUS):
        return RetryLater(f"S3 did not answer for {location!r}, try again later: {reason}")
    return StorageError(f"S3 refused {location!r}: {reason}")
