"""An object store in Google Cloud Storage, which uses obstore.

A conditional PUT has the header `x-goog-if-generation-match: 0`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from obstore.store import GCSStore

from seamark.metaserver.objects.clouds.cloud_objects import CloudObjects, build_client_options
from seamark.metaserver.settings.settings import Settings

if TYPE_CHECKING:
    from obstore.store import GCSConfig


class GoogleObjects(CloudObjects[GCSStore]):
    """An ObjectStore for `gs://` locations."""

    scheme = "gs"
    service = "Google Cloud Storage"
    missing_bucket = "The specified bucket does not exist"
    keys_advice = "check the server's service account and its role on the bucket (Storage Object User)"

    def open_bucket(self, bucket: str) -> GCSStore:
        return open_bucket(bucket, self._settings)


def open_bucket(bucket: str, settings: Settings) -> GCSStore:
    """Return an obstore client for one bucket.

    Without a key in the settings, obstore uses Google's application default credentials.
    """
    config: GCSConfig = {}
    if settings.gcs_service_account_key:
        config["service_account_key"] = settings.gcs_service_account_key
    elif settings.gcs_service_account_file:
        config["service_account"] = settings.gcs_service_account_file
    if settings.gcs_endpoint:
        config["base_url"] = settings.gcs_endpoint.rstrip("/")
    client, retry = build_client_options(settings, settings.gcs_endpoint)
    return GCSStore(bucket, config=config, client_options=client, retry_config=retry)
