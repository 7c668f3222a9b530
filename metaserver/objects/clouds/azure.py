"""An object store in Azure Data Lake Storage, which uses obstore and the Blob service.

A conditional PUT has the header `If-None-Match: *`. Azure lists the folders of a hierarchical namespace as empty
objects, which the listings of this store omit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import AzureStore

from seamark.formats.storage.azure import split_bucket
from seamark.metaserver.objects.clouds.cloud_objects import CloudObjects, build_client_options
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from obstore.store import AzureConfig


class AzureObjects(CloudObjects[AzureStore]):
    """An ObjectStore for `abfss://` locations."""

    scheme = "abfss"
    service = "Azure"
    bucket_noun = "container"
    missing_bucket = "ContainerNotFound"
    keys_advice = "check the server's credentials and its role on the container (Storage Blob Data Contributor)"
    write_id = "seamark_write"
    """The metadata key of the id that `create` stores with its object. Azure's keys are identifiers, without dashes."""

    def open_bucket(self, bucket: str) -> AzureStore:
        return open_container(bucket, self._settings)


def open_container(bucket: str, settings: Settings) -> AzureStore:
    """Return an obstore client for the container of a location.

    Without credentials in the settings, obstore uses Azure's environment variables, a workload identity or a managed
    identity.
    """
    container, account, _ = split_bucket(bucket)
    config: AzureConfig = {"account_name": account, "endpoint": get_blob_endpoint(bucket, settings)}
    if settings.azure_account_key:
        config["account_key"] = settings.azure_account_key
    elif settings.azure_client_id:
        config["client_id"] = settings.azure_client_id
        config["client_secret"] = settings.azure_client_secret
        config["tenant_id"] = settings.azure_tenant_id
    client, retry = build_client_options(settings, config["endpoint"])
    return AzureStore(container, config=config, client_options=client, retry_config=retry)


def get_blob_endpoint(bucket: str, settings: Settings) -> str:
    """Return the URL of the Blob service: `azure_endpoint` if it is set, otherwise that of the location's account."""
    _, _, host = split_bucket(bucket)
    return (settings.azure_endpoint or f"https://{host.replace('.dfs.', '.blob.', 1)}").rstrip("/")
