"""An object store in S3 or a compatible store, which uses obstore.

After a store has answered a conditional PUT with 501, the process uses a HEAD and a PUT without a condition. Two
concurrent writers of a name could then both succeed, but every name that the catalog writes contains a new UUID.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore import exceptions
from obstore.store import S3Store

from seamark.formats.runtime.clock import Clock
from seamark.formats.storage.locations import Location
from seamark.metaserver.objects import s3_uploads
from seamark.metaserver.objects.clouds.cloud_objects import MISSING, CloudObjects, build_client_options, read_status
from seamark.metaserver.objects.port import Upload
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from obstore.store import S3Config, S3Credential

_NOT_IMPLEMENTED = 501
WRITE_ID = "seamark-write"
"""The metadata key (in HTTP, `x-amz-meta-seamark-write`) of the id that `create` stores with its object."""


class S3Objects(CloudObjects[S3Store]):
    """An ObjectStore for `s3://` locations."""

    scheme = "s3"
    service = "S3"
    write_id = WRITE_ID

    def __init__(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> None:
        super().__init__(roots, settings, clock)
        self._buckets_without_conditional_writes: set[str] = set()

    def open_bucket(self, bucket: str) -> S3Store:
        return open_bucket(bucket, self._settings)

    async def list_uploads(self, prefix: str) -> AsyncIterator[Upload]:
        _, parsed_location = self._open(prefix, whole_bucket=True)
        async for upload in s3_uploads.list_uploads(parsed_location, self._settings):
            yield upload

    async def abort_uploads(self, uploads: Sequence[Upload]) -> int:
        uploads_with_locations = [(upload, self._open(upload.location)[1]) for upload in uploads]
        return await s3_uploads.abort_s3_uploads(uploads_with_locations, self._settings)

    async def _put_if_absent(
        self, store: S3Store, parsed_location: Location, data: bytes, attributes: dict[str, str]
    ) -> None:
        """Create an object if it does not exist, also in stores without conditional writes.

        Raises:
            AlreadyExistsError: The object exists.
        """
        if parsed_location.bucket not in self._buckets_without_conditional_writes:
            try:
                await super()._put_if_absent(store, parsed_location, data, attributes)
            except (exceptions.NotSupportedError, NotImplementedError):
                self._buckets_without_conditional_writes.add(parsed_location.bucket)
            except exceptions.GenericError as error:
                if read_status(error) != _NOT_IMPLEMENTED:
                    raise
                self._buckets_without_conditional_writes.add(parsed_location.bucket)
            else:
                return
        # Another writer could create the object between the check and the write. But the names of new objects contain a
        # random UUID, so two writers do not choose the same name.
        try:
            await obstore.head_async(store, parsed_location.path)
        except MISSING:
            await obstore.put_async(
                store, parsed_location.path, data, mode="overwrite", attributes=attributes, use_multipart=False
            )
        else:
            raise exceptions.AlreadyExistsError(str(parsed_location))


def open_bucket(bucket: str, settings: Settings) -> S3Store:
    """Return an obstore client for one bucket. Without keys in the settings, it uses AWS's default credential chain."""
    config: S3Config = {"region": settings.s3_region, "virtual_hosted_style_request": not settings.s3_path_style}
    # Delete each object with its own request. The request for several objects needs a checksum that some stores do not
    # support.
    config["disable_bulk_delete"] = True
    if settings.s3_endpoint:
        endpoint = get_bucket_endpoint(bucket, settings)
        # Set both names, because AWS_ENDPOINT_URL_S3 in the environment could override the setting.
        config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
    client, retry = build_client_options(settings, settings.s3_endpoint)
    if not settings.s3_access_key_id:
        return S3Store(bucket, config=config, client_options=client, retry_config=retry)

    config["skip_signature"] = False

    # With this provider, an AWS_SESSION_TOKEN in the environment is not combined with keys from the settings.
    def provide_keys() -> S3Credential:
        return {
            "access_key_id": settings.s3_access_key_id,
            "secret_access_key": settings.s3_secret_access_key,
            "token": None,
            "expires_at": None,
        }

    return S3Store(bucket, config=config, client_options=client, retry_config=retry, credential_provider=provide_keys)


def get_bucket_endpoint(bucket: str, settings: Settings) -> str:
    """Return the configured endpoint. In virtual-host style, its host begins with the bucket."""
    endpoint = settings.s3_endpoint.rstrip("/")
    if settings.s3_path_style:
        return endpoint
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{bucket}.{parts.netloc}{parts.path}"
