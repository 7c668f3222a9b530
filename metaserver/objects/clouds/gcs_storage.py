"""Google Cloud Storage as a storage of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.clouds.gcs import GoogleObjects
from seamark.metaserver.objects.clouds.gcs_access import (
    build_key_properties,
    build_service_properties,
    check_key,
    restrict_token,
)
from seamark.metaserver.objects.clouds.issued_keys import REUSE_MS, KeyCache, add_issued_keys, lends_keys
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.storage import ClientAccess, ServerStorage
from seamark.metaserver.settings.settings import Settings


class GoogleStorage(ServerStorage):
    rules = STORAGES["gs"]
    variable_prefixes = ("GOOGLE_", "CLOUDSDK_", "GCE_")

    def __init__(self, clock: Clock | None = None) -> None:
        self._key_cache = KeyCache(clock or SystemClock())

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        check_key(settings)
        with self._key_cache.hold():
            yield GoogleObjects(roots, settings, clock)

    def get_endpoint(self, settings: Settings) -> str:
        return settings.gcs_endpoint

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        return suggest_google_fix(error)

    async def grant_client_access(
        self,
        settings: Settings,
        table: Location,
        *,
        delegation: str | None,
        sign_path: str,
        refresh_path: str = "",
        vend: Callable[[], VendedKeys] | None = None,
        may_write: Callable[[], bool] | None = None,
    ) -> ClientAccess:
        properties = build_service_properties(settings)
        if not lends_keys(settings.gcs_client_access, delegation):
            return properties, []
        return await add_issued_keys(
            self._key_cache,
            partial(restrict_token, settings),
            (settings.gcs_service_account_key, settings.gcs_service_account_file),
            table,
            properties,
            may_write=may_write,
            refresh=("gcs.oauth2.refresh-credentials-endpoint", refresh_path),
        )

    def compute_access_stamp(self, settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
        return (
            settings.gcs_client_access,
            lends_keys(settings.gcs_client_access, delegation),
            settings.gcs_endpoint,
            settings.gcs_service_account_file,
            settings.gcs_service_account_key,
        )

    def compute_keys_stamp(self, settings: Settings, now_ms: int) -> int | None:
        return None if settings.gcs_client_access == "none" else now_ms // REUSE_MS

    def make_job_keys(self, settings: Settings) -> Callable[[], dict[str, str]] | None:
        return lambda: build_key_properties(settings)

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        return {"location": f"{root}/{name}", "storage": build_service_properties(settings)}


def suggest_google_fix(error: Exception) -> str:
    """Return advice for an operator after the access to a bucket failed with this error."""
    if isinstance(error, RetryLater | TimeoutError):
        return "Check that this machine reaches storage.googleapis.com, or that --gcs-endpoint is correct"
    return (
        "Check that the bucket exists, and that the service account of the server may write it (role Storage Object "
        "User)"
    )
