"""The declaration of a storage that server and clients share: its schemes, and how its locations are parsed.

The server declares its part of a storage in `metaserver/objects/storage.py`, and clients declare theirs
in `connector/client/file_systems.py`. Both register it under the same scheme.
"""

from __future__ import annotations

import re

from seamark.formats.runtime.errors import BadRequest

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


class StorageRules:
    """The rules of a storage whose locations are `scheme://bucket/key`. Other storages override the methods.

    `parse_location` contains the checks that apply to every storage, such as those of segments and control characters.
    """

    scheme: str
    """The scheme of normalized locations."""
    aliases: tuple[str, ...] = ()
    """Other schemes that engines write for the same locations."""
    has_links: bool = False
    """Whether a location can be, or can be behind, a symbolic link."""
    ignores_case: bool = False
    """Whether the storage may treat names as equal that differ only in case, or in the composition of letters."""
    property_families: tuple[str, ...] = ()
    """The first segments of the properties that configure a client's access. Tables cannot have these properties."""

    @property
    def form(self) -> str:
        """The form of a location, for error messages."""
        return f"{self.scheme}://bucket/path"

    @property
    def schemes(self) -> tuple[str, ...]:
        return (self.scheme, *self.aliases)

    def split(self, address: str, subject: str, shown_location: str) -> tuple[str, str]:
        """Split a location into its bucket and its path.

        Args:
            address: The location after the colon of its scheme.
            subject: The name of the location in error messages.
            shown_location: The location, shortened for error messages.

        Raises:
            BadRequest: The location does not have the form of this storage.
        """
        if not address.startswith("//"):
            raise BadRequest(f"{subject} {shown_location} has no bucket; write {self.form}")
        bucket, _, key = address[2:].partition("/")
        if "@" in bucket:
            raise BadRequest(f"{subject} contains user information before '@'; write {self.form}")
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise BadRequest(f"{subject} {shown_location} has the invalid bucket {bucket!r}; correct its name")
        return bucket, key

    def make_bucket_key(self, bucket: str) -> str:
        """Return a text that is equal for all spellings of a bucket that a reader may treat as the same bucket."""
        return bucket

    def resolve(self, path: str) -> str:
        """Return the path without symbolic links. The method may read the storage."""
        return path

    def normalize(self, address: str) -> str:
        """Return a text that is equal for all spellings that a reader may treat as one location.

        Args:
            address: The location after the colon of its scheme, with percent escapes decoded.
        """
        return f"{self.scheme}:{address}"

    def list_spellings(self, text: str, address: str) -> list[str]:
        """Return the location as given, and in the spellings that other writers usually use."""
        return [text, *(f"{scheme}:{address}" for scheme in sorted(self.schemes))]
