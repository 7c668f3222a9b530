"""The declaration of a storage that server and clients share: its schemes, and how its locations are read.

The server declares what it does with a storage in `metaserver/objects/storage.py`, and clients in
`connector/client/file_systems.py`. Both register it under the same scheme.
"""

from __future__ import annotations

import re

from seamark.formats.runtime.errors import BadRequest

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class StorageRules:
    """Rules of a storage whose locations are `scheme://bucket/key`; other storages override the methods.

    Checks that hold for every storage, such as those of segments and control characters, are in `parse_location`.
    """

    scheme: str
    """The scheme of normalised locations."""
    aliases: tuple[str, ...] = ()
    """Other schemes that engines write for the same locations."""
    has_links: bool = False
    """Whether a location can be, or can be behind, a symbolic link."""
    ignores_case: bool = False
    """Whether the storage may take names that differ only in case, or in the composition of letters, as one."""
    property_families: tuple[str, ...] = ()
    """First segments of the properties that configure a client's access; no table may have such properties."""

    @property
    def form(self) -> str:
        """How a location looks, for error messages."""
        return f"{self.scheme}://bucket/path"

    @property
    def schemes(self) -> tuple[str, ...]:
        return (self.scheme, *self.aliases)

    def split(self, address: str, subject: str, shown: str) -> tuple[str, str]:
        """Return the bucket and the path of a location.

        Args:
            address: The location after the colon of its scheme.
            subject: What the location is, for error messages.
            shown: The location, shortened for error messages.

        Raises:
            BadRequest: The location does not have the form of this storage.
        """
        if not address.startswith("//"):
            raise BadRequest(f"{subject} {shown} has no bucket; write {self.form}")
        bucket, _, key = address[2:].partition("/")
        if "@" in bucket:
            raise BadRequest(f"{subject} carries user information before '@'; write {self.form}")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise BadRequest(f"{subject} {shown} has the invalid bucket {bucket!r}; correct its name")
        return bucket, key

    def resolve(self, path: str) -> str:
        """Return the path without symbolic links.

        This may read the storage.
        """
        return path

    def normalize(self, address: str) -> str:
        """Return a text that is equal for all spellings that a reader may take as one location.

        Args:
            address: The location after the colon of its scheme, with percent escapes decoded.
        """
        return f"{self.scheme}:{address}"

    def spellings(self, text: str, address: str) -> list[str]:
        """Return the location as given, and as other writers usually spell it."""
        return [text, *(f"{scheme}:{address}" for scheme in sorted(self.schemes))]
