"""The storage for `s3://` locations: Amazon S3, a compatible store, a local folder, or another cloud.

The setting `s3_client_access` selects how clients get access: by remote signing, with the server's keys, with keys of
the objects gateway (`metaserver/gateway/`), or with temporary keys of AWS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.errors import RetryLater
from seamark.formats.runtime.lazy_module import LazyModule, load_modules
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.clouds.aws_sts import assume_role
from seamark.metaserver.objects.clouds.azure_storage import suggest_azure_fix
from seamark.metaserver.objects.clouds.backed import BackedObjects, Backing, check_roots
from seamark.metaserver.objects.clouds.gcs_storage import suggest_google_fix
from seamark.metaserver.objects.clouds.issued_keys import REUSE_MS, KeyCache, add_issued_keys
from seamark.metaserver.objects.credentials import VendedKeys, build_key_properties
from seamark.metaserver.objects.folder import FolderObjects
from seamark.metaserver.objects.local import LocalObjects
from seamark.metaserver.objects.local_storage import LOCAL_THREADS
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.s3 import S3Objects
from seamark.metaserver.objects.storage import ClientAccess, ServerStorage
from seamark.metaserver.objects.vending import (
    build_storage_config,
    build_store_address,
    choose_access_mechanism,
    get_gateway_address,
)
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from seamark.metaserver.objects import signing
else:
    signing = LazyModule("seamark.metaserver.objects.signing")


class S3Storage(ServerStorage):
    rules = STORAGES["s3"]
    variable_prefixes = ("AWS_",)
    public_variables = ("AWS_CA_BUNDLE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_EC2_METADATA_DISABLED")

    def __init__(self) -> None:
        self._key_cache = KeyCache()

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        if settings.s3_backend:
            backing = Backing(settings.s3_backend)
            check_roots(roots)
            yield BackedObjects(backing.open(roots, settings, clock), backing)
            return
        if not settings.s3_folder:
            with self._key_cache.hold():
                yield S3Objects(roots, settings, clock)
            return
        files = LocalObjects([settings.s3_folder], clock, threads=LOCAL_THREADS, timeout_s=settings.storage_timeout_s)
        try:
            yield FolderObjects(files, settings.s3_folder)
        finally:
            await files.close()

    def prepare_root(self, root: Location, settings: Settings) -> None:
        if settings.s3_backend:
            check_roots([root])

    def get_endpoint(self, settings: Settings) -> str:
        return settings.s3_backend or settings.s3_endpoint

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        if settings.s3_backend:
            is_google = settings.s3_backend.startswith("gs:")
            return suggest_google_fix(error) if is_google else suggest_azure_fix(error)
        if isinstance(error, RetryLater | TimeoutError):
            return (
                "Set --s3-endpoint to the address of the store, and check that it runs and that this machine reaches it"
            )
        return (
            "Check that the bucket exists, and that SEAMARK_S3_ACCESS_KEY_ID and SEAMARK_S3_SECRET_ACCESS_KEY may "
            "write it"
        )

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
        if settings.s3_client_access == "sts":
            return await self._issue_keys(settings, table, delegation, refresh_path, may_write)
        return build_storage_config(
            settings, table, delegation=delegation, sign_path=sign_path, refresh_path=refresh_path, vend=vend
        )

    async def _issue_keys(
        self,
        settings: Settings,
        table: Location,
        delegation: str | None,
        refresh_path: str,
        may_write: Callable[[], bool] | None,
    ) -> ClientAccess:
        address = build_store_address(settings)
        if choose_access_mechanism(settings, delegation) is None:
            return address, []
        role = settings.s3_sts_endpoint, settings.s3_sts_role, settings.s3_sts_external_id
        return await add_issued_keys(
            self._key_cache,
            partial(assume_role, settings),
            (*role, settings.s3_access_key_id),
            table,
            address,
            may_write=may_write,
            refresh=("client.refresh-credentials-endpoint", refresh_path),
        )

    def compute_keys_stamp(self, settings: Settings, now_ms: int) -> int | None:
        return now_ms // REUSE_MS if settings.s3_client_access == "sts" else None

    def compute_access_stamp(self, settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
        """Return the values that determine how clients access S3, so that an answer is reused only for equal values."""
        return (
            # Use the mechanism instead of the header, which a client could change in each request. The server would
            # then cache a compressed answer for each value of the header.
            choose_access_mechanism(settings, delegation) or "",
            settings.s3_client_access,
            get_gateway_address(settings),
            settings.s3_endpoint,
            settings.s3_region,
            settings.s3_path_style,
            settings.s3_access_key_id,
            settings.s3_secret_access_key,
            settings.s3_sts_role,
            settings.s3_sts_external_id,
            settings.s3_sts_endpoint,
        )

    async def sign(
        self, request: dict[str, Any], table: Location, settings: Settings, *, writable: bool, now_ms: int
    ) -> tuple[dict[str, Any], str]:
        await load_modules(signing)
        work = partial(
            signing.sign_s3_request,
            request,
            table_location=str(table),
            writable=writable,
            settings=settings,
            now_ms=now_ms,
        )
        # Use a thread, because the function may request credentials of AWS's chain over HTTP.
        signed_headers = work() if settings.s3_access_key_id else await asyncio.to_thread(work)
        return signed_headers, signing.choose_cache_control(request)

    def make_job_keys(self, settings: Settings) -> Callable[[], dict[str, str]] | None:
        # With the objects gateway, jobs get keys for one table from the catalog, like all clients. If a folder or
        # another cloud replaces the store, the server has no S3 keys.
        jobs_get_server_keys = (
            settings.s3_client_access != "gateway" and not settings.s3_folder and not settings.s3_backend
        )
        return partial(build_key_properties, settings) if jobs_get_server_keys else None

    def has_own_job_keys(self, settings: Settings) -> bool:
        return bool(settings.s3_access_key_id) or settings.s3_client_access == "gateway"

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        address = build_store_address(settings)
        # The gateway accepts only keys for a table, so a job cannot check the warehouse.
        if settings.s3_client_access == "gateway":
            return {"endpoint": address.get("s3.endpoint", "")}
        return {"location": f"{root}/{name}", "storage": address}
