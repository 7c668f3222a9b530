"""Builds the properties of Iceberg's FileIO with which clients and jobs use Azure storage."""

from __future__ import annotations

from urllib.parse import urlsplit

from seamark.formats.storage.azure import split_bucket
from seamark.formats.storage.locations import Location
from seamark.metaserver.settings.settings import Settings


def build_service_properties(settings: Settings, table: Location) -> dict[str, str]:
    """Return the account of a table and the address of the account's services, as properties of a FileIO."""
    _, account, host = split_bucket(table.bucket)
    config = {"adls.account-name": account}
    if settings.azure_endpoint:
        # PyIceberg's names. If the host does not contain the account, as for an emulator, pyarrow appends the account.
        endpoint = urlsplit(settings.azure_endpoint.rstrip("/"))
        for service in ("blob", "dfs"):
            config[f"adls.{service}-storage-authority"] = endpoint.netloc
            config[f"adls.{service}-storage-scheme"] = endpoint.scheme
        # Java's name. The emulator has the account in its path.
        config[f"adls.connection-string.{host}"] = settings.azure_endpoint.rstrip("/")
    return config


def build_key_properties(settings: Settings) -> dict[str, str]:
    """Return the server's credentials as properties of a FileIO, for processes that the server starts.

    Without credentials in the settings, the server and these processes use Azure's environment variables or an
    identity.
    """
    if settings.azure_account_key:
        return {"adls.account-key": settings.azure_account_key}
    if settings.azure_client_id:
        return {
            "adls.tenant-id": settings.azure_tenant_id,
            "adls.client-id": settings.azure_client_id,
            "adls.client-secret": settings.azure_client_secret,
        }
    return {}
