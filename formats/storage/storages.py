"""The storages that Seamark supports.

A new storage is a class derived from `StorageRules`, and an entry of `STORAGES`. The server's part of the storage is
registered in `metaserver/objects/storages.py`, and the clients' part in `connector/client/file_systems.py`.
"""

from __future__ import annotations

import os

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.azure import AzureDataLake
from seamark.formats.storage.hdfs import Hdfs
from seamark.formats.storage.rules import StorageRules

LOCAL = "file"
"""The scheme of files on this machine."""


class LocalFiles(StorageRules):
    """Files on this machine: `file:///path`."""

    scheme = LOCAL
    # A path can contain symbolic links, so the server checks locations for them.
    has_links = True
    # Some file systems treat names as equal that differ only in case, so such names count as the same location.
    ignores_case = True

    @property
    def form(self) -> str:
        return "file:///path"

    def split(self, address: str, subject: str, shown_location: str) -> tuple[str, str]:
        if address.startswith("//"):
            authority, slash, path = address[2:].partition("/")
            if authority:
                raise BadRequest(f"{subject} {shown_location} names the host {authority!r}; write {self.form}")
            address = slash + path
        if not address.startswith("/"):
            raise BadRequest(f"{subject} {shown_location} is not absolute; write {self.form}")
        return "", address.removeprefix("/")

    def resolve(self, path: str) -> str:
        return os.path.realpath("/" + path).strip("/")

    def normalize(self, address: str) -> str:
        return normalize_path(self.scheme, address)

    def list_spellings(self, text: str, address: str) -> list[str]:
        path = "/" + address.lstrip("/")
        return [text, path, f"{self.scheme}:{path}", f"{self.scheme}://{path}"]


class S3(StorageRules):
    """Amazon S3, and stores with the same interface."""

    scheme = "s3"
    aliases = ("s3a", "s3n")
    property_families = ("s3", "s3a", "s3n", "s3tables")


class GoogleCloudStorage(StorageRules):
    """Google Cloud Storage: `gs://bucket/object`."""

    scheme = "gs"
    aliases = ("gcs",)
    property_families = ("gcs",)

    def split(self, address: str, subject: str, shown_location: str) -> tuple[str, str]:
        bucket, key = super().split(address, subject, shown_location)
        if bucket != bucket.lower():
            raise BadRequest(f"{subject} {shown_location} has the invalid bucket {bucket!r}; write lower-case letters")
        return bucket, key


STORAGES: dict[str, StorageRules] = {
    rules.scheme: rules for rules in (LocalFiles(), S3(), GoogleCloudStorage(), AzureDataLake(), Hdfs())
}
"""The storages by the scheme of normalized locations."""


def find_rules(scheme: str) -> StorageRules | None:
    """Return the storage with this scheme or alias, which must be in lower case, or None if the scheme is unknown."""
    storage = STORAGES.get(scheme)
    if storage is not None:
        return storage
    return next((rules for rules in STORAGES.values() if scheme in rules.aliases), None)


def is_remote(location: str) -> bool:
    """Return whether the location has the scheme of a storage other than the files on this machine."""
    rules = find_rules(location.partition(":")[0].lower())
    return rules is not None and rules.scheme != LOCAL


def normalize_path(scheme: str, address: str) -> str:
    """Return `scheme:/path` without empty segments and without `.` segments."""
    return f"{scheme}:/" + "/".join(part for part in address.split("/") if part not in ("", "."))
