"""Stores the objects of `s3://` locations in Google Cloud Storage or Azure.

Each bucket of an `s3://` location is a bucket of Google Cloud Storage or a container of Azure. Engines read and write
the tables through the objects gateway (`metaserver/gateway/`), with keys for one table. So the engines need no library
of the cloud.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.formats.storage.azure import normalize_host
from seamark.formats.storage.locations import Location, parse_location, parse_object
from seamark.metaserver.objects.clouds.azure import AzureObjects
from seamark.metaserver.objects.clouds.cloud_objects import CloudObjects
from seamark.metaserver.objects.clouds.gcs import GoogleObjects
from seamark.metaserver.objects.forwarding import ForwardingObjects
from seamark.metaserver.objects.port import ObjectInfo
from seamark.metaserver.settings.settings import Settings

CLOUDS = ("gs", "abfss")
"""The schemes of the clouds that `s3_backend` can name."""
UPLOADS = ".seamark-uploads"
"""The folder of unfinished uploads in each bucket."""


class Backing:
    """The cloud that the setting `s3_backend` names.

    Args:
        backend: The value of the setting.

    Raises:
        ConfigError: The setting names neither Google Cloud Storage nor an Azure account.
    """

    def __init__(self, backend: str) -> None:
        scheme, _, host = backend.partition("://")
        host = host.rstrip("/")
        self._scheme = scheme
        self._host = ""
        if scheme == "abfss":
            self._host = normalize_host(host) or ""
        is_google, is_azure = scheme == "gs", scheme == "abfss"
        # Google Cloud Storage has no host, and an account of Azure has one.
        if is_google == bool(host) or is_azure != bool(self._host):
            raise ConfigError(f"s3_backend must be gs:// or abfss://account.dfs.core.windows.net; {backend!r} is not")

    def map_bucket(self, bucket: str) -> str:
        """Return the bucket of locations in the cloud for a bucket of `s3://` locations.

        On Azure, locations name the container and the account: `container@account.dfs.core.windows.net`.
        """
        return f"{bucket}@{self._host}" if self._host else bucket

    def map_to_cloud(self, location: Location) -> Location:
        """Return the location in the cloud that stores the object of an `s3://` location.

        Raises:
            BadRequest: The name of the bucket or the key is not valid in the cloud.
        """
        return parse_object(f"{self._scheme}://{self.map_bucket(location.bucket)}/{location.path}", "The location")

    def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> CloudObjects[Any]:
        objects = GoogleObjects if self._scheme == "gs" else AzureObjects
        return objects([self.map_to_cloud(root) for root in roots], settings, clock)


def check_roots(roots: Sequence[Location]) -> None:
    """Check that no warehouse contains the folder of unfinished uploads.

    Raises:
        ConfigError: A warehouse is a whole bucket, or is in the folder of unfinished uploads.
    """
    for root in roots:
        if not root.path or root.path.partition("/")[0] == UPLOADS:
            raise ConfigError(
                f"With s3_backend, a warehouse is a folder of a bucket: write {root.root()}/warehouse instead of {root}"
            )


class BackedObjects(ForwardingObjects):
    """An ObjectStore for `s3://` locations that stores the objects in a cloud."""

    def __init__(self, cloud_objects: CloudObjects[Any], backing: Backing) -> None:
        super().__init__(cloud_objects)
        self._backing = backing

    def _map_location(self, location: str) -> str:
        parsed_location = parse_location(location)
        if parsed_location.scheme != "s3":
            raise BadRequest(f"{location!r} is not on S3")
        return str(self._backing.map_to_cloud(parsed_location))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        parsed_location = parse_location(prefix)
        root = self._backing.map_to_cloud(Location(parsed_location.scheme, parsed_location.bucket, "")).root()
        async for info in self._stored_objects.list(self._map_location(prefix)):
            location = f"{parsed_location.root()}{info.location.removeprefix(root)}"
            yield ObjectInfo(location, info.size_bytes, info.modified_ms)
