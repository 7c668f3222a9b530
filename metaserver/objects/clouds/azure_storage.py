"""Azure Data Lake Storage Gen2 as a storage of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.errors import ConfigError, RetryLater
from seamark.formats.storage.azure import split_bucket
from seamark.formats.storage.locations import Location
from seamark.formats.storage.storages import STORAGES
from seamark.metaserver.objects.clouds.azure import AzureObjects
from seamark.metaserver.objects.clouds.azure_access import build_key_properties, build_service_properties
from seamark.metaserver.objects.clouds.azure_sas import SasIssuer, compute_expiry_ms
from seamark.metaserver.objects.clouds.issued_keys import KeyCache, add_issued_keys, lends_keys
from seamark.metaserver.objects.credentials import VendedKeys
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.storage import ClientAccess, ServerStorage
from seamark.metaserver.settings.settings import Settings


class AzureStorage(ServerStorage):
    rules = STORAGES["abfss"]
    variable_prefixes = ("AZURE_", "IDENTITY_", "MSI_")
    public_variables = ("AZURE_AUTHORITY_HOST",)

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._sas = SasIssuer(self._clock)
        self._key_cache = KeyCache(self._clock)

    @asynccontextmanager
    async def open(self, roots: Sequence[Location], settings: Settings, clock: Clock) -> AsyncIterator[ObjectStore]:
        check_accounts(roots, settings)
        with self._key_cache.hold():
            yield AzureObjects(roots, settings, clock)

    def get_endpoint(self, settings: Settings) -> str:
        return settings.azure_endpoint

    def suggest_fix(self, error: Exception, settings: Settings) -> str:
        return suggest_azure_fix(error)

    def has_own_job_keys(self, settings: Settings) -> bool:
        return bool(settings.azure_account_key)

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
        """Return the address of the account's services, and short-lived keys if the client may get them.

        The setting `azure_client_access` and the header `delegation` determine whether the client gets keys. Only other
        storages need `sign_path` and `vend`.
        """
        properties = build_service_properties(settings, table)
        if not lends_keys(settings.azure_client_access, delegation):
            return properties, []
        expiry_stamp = self.compute_keys_stamp(settings, self._clock.now_ms())
        login = settings.azure_tenant_id, settings.azure_client_id, settings.azure_account_key
        return await add_issued_keys(
            self._key_cache,
            partial(self._sas.issue, settings),
            (settings.azure_endpoint, *login, expiry_stamp),
            table,
            properties,
            may_write=may_write,
            refresh=("adls.refresh-credentials-endpoint", refresh_path),
        )

    def compute_access_stamp(self, settings: Settings, delegation: str | None) -> tuple[str | bool, ...]:
        """Return the values that determine how clients access Azure. An answer is reused only for equal values."""
        return (
            settings.azure_client_access,
            lends_keys(settings.azure_client_access, delegation),
            settings.azure_endpoint,
            settings.azure_tenant_id,
            settings.azure_client_id,
            settings.azure_account_key,
        )

    def compute_keys_stamp(self, settings: Settings, now_ms: int) -> int | None:
        return None if settings.azure_client_access == "none" else compute_expiry_ms(settings, now_ms)

    def make_job_keys(self, settings: Settings) -> Callable[[], dict[str, str]] | None:
        return lambda: build_key_properties(settings)

    def make_access_check_arguments(self, root: Location, settings: Settings, name: str) -> dict[str, Any]:
        return {"location": f"{root}/{name}", "storage": build_service_properties(settings, root)}


def suggest_azure_fix(error: Exception) -> str:
    """Return advice for an operator after the access to a container failed with this error."""
    if isinstance(error, RetryLater | TimeoutError):
        return "Check that this machine reaches the account's Blob service, and that --azure-endpoint is correct"
    return (
        "Check that the container exists, and that SEAMARK_AZURE_ACCOUNT_KEY, or the application or identity of the "
        "server, may write it (role Storage Blob Data Contributor)"
    )


def check_accounts(roots: Sequence[Location], settings: Settings) -> None:
    """Check that the credentials of the settings fit the accounts of the roots.

    Raises:
        ConfigError: The roots are in several accounts, but a key or an endpoint is set, which is for one account.
    """
    accounts = sorted({split_bucket(root.bucket)[1] for root in roots})
    name = "azure_account_key" if settings.azure_account_key else "azure_endpoint" if settings.azure_endpoint else ""
    if name and len(accounts) > 1:
        raise ConfigError(
            f"{name} is for one storage account, but the warehouse and allowed_locations are in {', '.join(accounts)}: "
            "use azure_client_id or an identity, which several accounts can accept"
        )
