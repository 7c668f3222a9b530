"""Locations on Azure Data Lake Storage Gen2, as Hadoop's and Iceberg's clients write them.

A location names a container and an account: `abfss://container@account.dfs.core.windows.net/path`. The schemes `abfs`,
`wasbs` and `wasb`, and the host of the Blob service (`account.blob.core.windows.net`), name the same objects.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.rules import StorageRules

_CONTAINER = re.compile(r"[a-z0-9](?!.*--)[a-z0-9-]{1,61}[a-z0-9]")
_HOST = re.compile(
    r"([a-z0-9]{3,24})\.(?:dfs|blob)\.(core\.(?:windows\.net|chinacloudapi\.cn|usgovcloudapi\.net))", re.IGNORECASE
)


class AzureDataLake(StorageRules):
    """Azure Data Lake Storage Gen2, and containers of accounts without a hierarchical namespace.

    The bucket of a parsed location is `container@account.dfs.core.windows.net`.
    """

    scheme = "abfss"
    aliases = ("abfs", "wasbs", "wasb")
    property_families = ("adls", "azure", "abfs", "abfss", "wasb", "wasbs")

    @property
    def form(self) -> str:
        return "abfss://container@account.dfs.core.windows.net/path"

    def split(self, address: str, subject: str, shown_location: str) -> tuple[str, str]:
        authority, _, path = address.removeprefix("//").partition("/")
        container, at_sign, host = authority.partition("@")
        if not address.startswith("//") or not at_sign:
            raise BadRequest(f"{subject} {shown_location} does not name a container and an account; write {self.form}")
        if not _CONTAINER.fullmatch(container):
            raise BadRequest(f"{subject} {shown_location} has the invalid container {container!r}; correct its name")
        normalized_host = normalize_host(host)
        if normalized_host is None:
            raise BadRequest(
                f"{subject} {shown_location} has the host {host!r}, which is not an Azure account; write {self.form}"
            )
        decoded_path = unquote(path)
        if any(segment.endswith(".") for segment in decoded_path.split("/")):
            # Azure's libraries remove such dots, so two locations would name one object.
            raise BadRequest(f"{subject} {shown_location} has a segment that ends with a dot; remove the dot")
        return f"{container}@{normalized_host}", path

    def normalize(self, address: str) -> str:
        authority, slash, path = address.removeprefix("//").partition("/")
        container, at_sign, host = authority.partition("@")
        return f"{self.scheme}://{container}{at_sign}{normalize_host(host) or host}{slash}{path}"

    def list_spellings(self, text: str, address: str) -> list[str]:
        _, _, data_lake_address = self.normalize(address).partition(":")
        blob_address = data_lake_address.replace(".dfs.core.", ".blob.core.", 1)
        addresses = (data_lake_address, blob_address)
        return [text, *(f"{scheme}:{spelling}" for scheme in sorted(self.schemes) for spelling in addresses)]


def normalize_host(host: str) -> str | None:
    """Return the host of an Azure account in lower case, in the form of its Data Lake service (`dfs`).

    An account has several hosts, such as `blob` and `dfs`, for the same objects. The result is None for other hosts.
    """
    match = _HOST.fullmatch(host)
    return None if match is None else f"{match[1]}.dfs.{match[2]}".lower()


def split_bucket(bucket: str) -> tuple[str, str, str]:
    """Return the container, the account and the host of the bucket of a parsed location."""
    container, _, host = bucket.partition("@")
    account, _, _ = host.partition(".")
    return container, account, host
