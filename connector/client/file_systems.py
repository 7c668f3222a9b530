"""Opens objects in remote storages for readers, writers and jobs.

Each storage has a class in this module and an entry in `CLIENT_STORAGES`. `formats/storage/storages.py` defines its
schemes and the form of its locations. `connector/client/storage.py` opens local files without following symbolic links.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from pyarrow import fs

from seamark.formats.runtime.tls import find_authorities_file
from seamark.formats.storage.storages import find_rules

_TOKEN_LIFETIME_S = 3600
"""The assumed lifetime in seconds of a Google token whose expiry is unknown."""


class ClientStorage(ABC):
    """A kind of remote storage, such as S3."""

    @abstractmethod
    def create_file_system(self, properties: Mapping[str, str], lent_keys: Mapping[str, str]) -> fs.FileSystem:
        """Return the file system with the objects, on which `make_path` returns paths.

        Args:
            properties: The address and the keys for a table, in the form of a LoadTableResult.
            lent_keys: The keys that are used if `properties` has no keys.
        """

    def make_path(self, address: str) -> str:
        """Return the path on the file system for a location. `address` is the text of the location after `://`."""
        return address

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        """Return whether the properties contain keys with which a process without its own keys can read the objects."""
        return True

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        """Return the URLs to which a confined process may connect in addition to the URLs of the server."""
        return []

    def list_configuration_files(self) -> list[str]:
        """Return the files outside of tables that a confined process may read."""
        return []


class S3Client(ClientStorage):
    """S3 with pyarrow. The keys come from the catalog, from `lent_keys`, or from AWS's default credential chain."""

    def create_file_system(self, properties: Mapping[str, str], lent_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if properties.get("s3.access-key-id") else {**properties, **lent_keys}
        endpoint = urlsplit(properties["s3.endpoint"]) if properties.get("s3.endpoint") else None
        return fs.S3FileSystem(
            access_key=keys.get("s3.access-key-id"),
            secret_key=keys.get("s3.secret-access-key"),
            session_token=keys.get("s3.session-token"),
            region=properties.get("s3.region") or properties.get("client.region"),
            scheme=endpoint.scheme if endpoint else "https",
            endpoint_override=endpoint.netloc if endpoint else None,
            force_virtual_addressing=properties.get("s3.path-style-access", "true").lower() == "false",
            tls_ca_file_path=find_authorities_file(),
        )

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return "s3.access-key-id" in properties

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        aws = [value for name, value in os.environ.items() if name.startswith("AWS_") and "://" in value]
        # Machines of AWS provide their keys over plain HTTP.
        return [*properties.get("s3.endpoint", "").split(), "https://", "http://", *aws]

    def list_configuration_files(self) -> list[str]:
        aws = [value for name, value in os.environ.items() if name.startswith("AWS_") and os.path.isabs(value)]
        return [*aws, os.path.expanduser("~/.aws")]


class AzureClient(ClientStorage):
    """Azure storage with pyarrow.

    The key, SAS or application comes from the catalog, from `lent_keys`, or from Azure's environment variables and
    identities.
    """

    def create_file_system(self, properties: Mapping[str, str], lent_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if self.has_keys(properties) else {**properties, **lent_keys}
        names = {
            "account_name": "adls.account-name",
            "account_key": "adls.account-key",
            "sas_token": "adls.sas-token",
            "tenant_id": "adls.tenant-id",
            "client_id": "adls.client-id",
            "client_secret": "adls.client-secret",
            "blob_storage_authority": "adls.blob-storage-authority",
            "blob_storage_scheme": "adls.blob-storage-scheme",
            "dfs_storage_authority": "adls.dfs-storage-authority",
            "dfs_storage_scheme": "adls.dfs-storage-scheme",
        }
        return fs.AzureFileSystem(**{name: keys[key] for name, key in names.items() if keys.get(key)})

    def make_path(self, address: str) -> str:
        authority, slash, key = address.partition("/")
        return authority.partition("@")[0] + slash + key

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return any(properties.get(name) for name in ("adls.sas-token", "adls.account-key", "adls.client-secret"))

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        scheme = properties.get("adls.blob-storage-scheme", "https")
        authority = properties.get("adls.blob-storage-authority", "")
        # Machines of Azure provide their tokens over plain HTTP.
        return [*([f"{scheme}://{authority}"] if authority else []), "https://", "http://"]

    def list_configuration_files(self) -> list[str]:
        files = [value for name, value in os.environ.items() if name.startswith("AZURE_") and os.path.isabs(value)]
        return [*files, os.path.expanduser("~/.azure")]


class GoogleClient(ClientStorage):
    """Google Cloud Storage with pyarrow.

    The token comes from the catalog, from `lent_keys`, or from Google's application default credentials.
    """

    def create_file_system(self, properties: Mapping[str, str], lent_keys: Mapping[str, str]) -> fs.FileSystem:
        keys = properties if self.has_keys(properties) else {**properties, **lent_keys}
        endpoint = urlsplit(properties.get("gcs.service.host", ""))
        options: dict[str, Any] = {}
        if endpoint.netloc:
            options |= {"scheme": endpoint.scheme, "endpoint_override": endpoint.netloc}
        if keys.get("gcs.oauth2.token"):
            # pyarrow requires an expiry, and refuses to use the token after it.
            expires_s = int(keys.get("gcs.oauth2.token-expires-at", "0")) / 1000 or time.time() + _TOKEN_LIFETIME_S
            options["access_token"] = keys["gcs.oauth2.token"]
            options["credential_token_expiration"] = datetime.fromtimestamp(expires_s, UTC)
        elif properties.get("gcs.no-auth") == "true":
            options["anonymous"] = True
        return fs.GcsFileSystem(**options)

    def has_keys(self, properties: Mapping[str, str]) -> bool:
        return "gcs.oauth2.token" in properties or properties.get("gcs.no-auth") == "true"

    def list_urls(self, properties: Mapping[str, str]) -> list[str]:
        # Machines of Google provide their tokens over plain HTTP.
        return [*properties.get("gcs.service.host", "").split(), "https://", "http://"]

    def list_configuration_files(self) -> list[str]:
        files = [value for name, value in os.environ.items() if name.startswith("GOOGLE_") and os.path.isabs(value)]
        return [*files, os.path.expanduser("~/.config/gcloud")]


CLIENT_STORAGES: dict[str, ClientStorage] = {"s3": S3Client(), "gs": GoogleClient(), "abfss": AzureClient()}
"""The storages by the scheme of normalised locations."""


def find_client_storage(location: str) -> ClientStorage | None:
    """Return the storage of a location, or None for a local file and for an unknown scheme."""
    rules = find_rules(location.partition(":")[0])
    return None if rules is None else CLIENT_STORAGES.get(rules.scheme)


def list_schemes() -> list[str]:
    """Return the schemes of all remote storages, and their aliases."""
    rules = [find_rules(scheme) for scheme in CLIENT_STORAGES]
    return [scheme for rule in rules if rule is not None for scheme in rule.schemes]
