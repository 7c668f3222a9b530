"""The storages that Seamark knows.

A new storage is a class with `StorageRules` and an entry of `STORAGES`. The server's part of it is registered in
`metaserver/objects/storages.py`, and the part of clients in `connector/client/file_systems.py`.
"""

from __future__ import annotations

import os

from seamark.formats.runtime.errors import BadRequest
from seamark.formats.storage.rules import StorageRules

LOCAL = "file"
"""The scheme of files of this machine."""


class LocalFiles(StorageRules):
    """Files of this machine: `file:///path`."""

    scheme = LOCAL
    has_links = True
    ignores_case = True

    @property
    def form(self) -> str:
        return "file:///path"

    def split(self, rest: str, what: str, shown: str) -> tuple[str, str]:
        if rest.startswith("//"):
            authority, slash, path = rest[2:].partition("/")
            if authority:
                raise BadRequest(f"{what} {shown} names the host {authority!r}; write {self.form}")
            rest = slash + path
        if not rest.startswith("/"):
            raise BadRequest(f"{what} {shown} is not absolute; write {self.form}")
        return "", rest[1:]

    def resolve(self, path: str) -> str:
        return os.path.realpath("/" + path).strip("/")

    def plain(self, rest: str) -> str:
        return plain_path(self.scheme, rest)

    def spellings(self, text: str, rest: str) -> list[str]:
        path = "/" + rest.lstrip("/")
        return [text, path, f"{self.scheme}:{path}", f"{self.scheme}://{path}"]


class S3(StorageRules):
    """Amazon S3, and stores with its interface."""

    scheme = "s3"
    aliases = ("s3a", "s3n")
    property_families = ("s3", "s3a", "s3n", "s3tables")


STORAGES: dict[str, StorageRules] = {rules.scheme: rules for rules in (LocalFiles(), S3())}
"""By the scheme of normalised locations."""


def rules_of(scheme: str) -> StorageRules | None:
    """Return the storage with this scheme or alias, in lower case; None for a scheme that is not known."""
    known = STORAGES.get(scheme)
    if known is not None:
        return known
    return next((rules for rules in STORAGES.values() if scheme in rules.aliases), None)


def is_remote(location: str) -> bool:
    """Return whether the location has the scheme of a storage that is not this machine's files."""
    rules = rules_of(location.partition(":")[0].lower())
    return rules is not None and rules.scheme != LOCAL


def plain_path(scheme: str, rest: str) -> str:
    """Return `scheme:/path` without empty segments and without the segments `.`."""
    return f"{scheme}:/" + "/".join(part for part in rest.split("/") if part not in ("", "."))
