"""The storages of the server, by the scheme of normalised locations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from seamark.formats.storage.locations import parse_location
from seamark.metaserver.objects.clouds.azure_storage import AzureStorage
from seamark.metaserver.objects.clouds.gcs_storage import GoogleStorage
from seamark.metaserver.objects.hdfs.hdfs_storage import HdfsStorage
from seamark.metaserver.objects.local_storage import LocalStorage
from seamark.metaserver.objects.s3_storage import S3Storage
from seamark.metaserver.objects.storage import ServerStorage
from seamark.metaserver.settings.settings import Settings

SERVER_STORAGES: dict[str, ServerStorage] = {
    storage.rules.scheme: storage
    for storage in (LocalStorage(), S3Storage(), GoogleStorage(), AzureStorage(), HdfsStorage())
}


def find_storage(location: str, subject: str = "The location") -> ServerStorage:
    """Return the storage of a location.

    Raises:
        BadRequest: The location is malformed, or has an unknown scheme.
    """
    return SERVER_STORAGES[parse_location(location, subject).scheme]


def list_storages(settings: Settings) -> list[ServerStorage]:
    """Return the storages of the warehouse and of the allowed locations, without duplicates."""
    storages = [find_storage(location) for location in (settings.make_warehouse_uri(), *settings.allowed_locations)]
    return list(dict.fromkeys(storages))


def make_job_keys(settings: Settings, storages: Iterable[ServerStorage]) -> Callable[[], dict[str, str]] | None:
    """Return a function that returns the keys of jobs for all these storages, or None if jobs get no keys.

    See `ServerStorage.make_job_keys`.
    """
    sources = [keys for storage in storages if (keys := storage.make_job_keys(settings)) is not None]
    if not sources:
        return None
    return lambda: {name: value for keys in sources for name, value in keys().items()}


def compute_keys_stamp(settings: Settings, now_ms: int) -> str:
    """Return a text that changes when clients must not reuse an answer with keys.

    The text is empty if no storage issues keys that depend on the caller or on the time.
    """
    stamps = [storage.compute_keys_stamp(settings, now_ms) for storage in SERVER_STORAGES.values()]
    return ",".join(str(stamp) for stamp in stamps if stamp is not None)


def compute_access_stamp(settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
    """Return the values that determine the access of clients to all storages, besides the table."""
    return tuple(
        part for storage in SERVER_STORAGES.values() for part in storage.compute_access_stamp(settings, delegation)
    )
