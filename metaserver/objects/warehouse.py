"""Checks that locations are inside the warehouse of a server, and chooses the locations of new tables and namespaces.

The results of `check`, `make_namespace_location` and `table_location` are below the warehouse or an allowed
location, for any location or name from a client, and for every reader. Some readers decode percent
escapes, replace backslashes or resolve dots. So locations that contain any of these are rejected.

Names become path segments of ASCII letters, digits, `_`, `-` and `.`. Other characters are replaced, and
a hash distinguishes the results. Percent encoding is not used, because engines decode `%2F` in a location in different
ways.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable

from seamark.formats.runtime.errors import BadRequest, ConfigError
from seamark.formats.runtime.root_folder import RootFolder
from seamark.formats.storage.locations import Location, make_canonical_key, make_location_key, parse_location

_PLAIN_SEGMENT = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,98}[A-Za-z0-9_-])?")
_READABLE_CHARACTERS_MAX = 60
"""The maximum number of characters of a replaced name that its segment shows."""
_HASH_DIGITS = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def make_safe_segment(name: str) -> str:
    """Return a path segment for any name.

    If the name has only plain characters, it is the segment. Otherwise, the segment consists of the name's plain
    characters and 64 bits of its hash.
    """
    if _PLAIN_SEGMENT.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    readable = _UNSAFE.sub("_", name)[:_READABLE_CHARACTERS_MAX].strip("_-")
    return f"{readable or 'x'}-{digest}"


def _join_path(parent: str, tail: str) -> str:
    # Only the location file:/// has a trailing slash.
    return parent + tail if parent.endswith("/") else f"{parent}/{tail}"


class Warehouse:
    """The warehouse and the allowed locations, below which tables may be stored.

    Args:
        uri: The location of the warehouse.
        allowed_locations: The allowed locations.
        is_further: Whether the server has created the warehouse besides the warehouse of its settings. Such a warehouse
            can have no allowed locations.

    Raises:
        ConfigError: A URI is invalid.
    """

    def __init__(self, uri: str, allowed_locations: Iterable[str] = (), *, is_further: bool = False) -> None:
        # A further warehouse is one that the server has created besides the warehouse of its settings.
        self._is_further = is_further
        try:
            self._roots = tuple(
                parse_location(text, "A warehouse or allowed location") for text in (uri, *allowed_locations)
            )
        except BadRequest as error:
            raise ConfigError(f"{error.message} (settings warehouse, allowed_locations)") from None
        # Check the longest root first. An allowed location inside the warehouse may be a link that the operator
        # created. A root may be a link, but below the root of the warehouse, the link would be refused.
        folders = sorted({root.file_path for root in self._roots if root.is_local}, key=len, reverse=True)
        self._folders = tuple(RootFolder(folder) for folder in folders)

    @property
    def uri(self) -> str:
        """The normalised location of the warehouse, without a trailing slash."""
        return str(self._roots[0])

    @property
    def roots(self) -> tuple[Location, ...]:
        """The warehouse, followed by the allowed locations."""
        return self._roots

    @property
    def local_folders(self) -> tuple[str, ...]:
        """The local folders in which tables may be stored, with the paths from the settings."""
        return tuple(folder.path for folder in self._folders)

    def make_key(self, location: Location) -> str:
        """Return the key of a location. See `make_location_key`.

        The key of a location below a root is its path, with the links of the root resolved. Links below a root are not
        resolved, because they are never followed and a tenant could create one at any time.
        """
        if location.is_local:
            for root in self._folders:
                path_below = root.find_path_below(location.file_path)
                if path_below is not None:
                    return make_canonical_key(location, f"{root.real_path}/{path_below}".strip("/"))
        return make_location_key(location)

    def contains(self, location: str) -> bool:
        """Return whether `check` accepts the location."""
        try:
            self.check(location)
        except BadRequest:
            return False
        return True

    def check(self, location: str, subject: str = "The location", *, root_ok: bool = False) -> str:
        """Return the normalised location if it is below a root, or if it is a root and `root_ok` is set.

        A root is not a valid location of a table, because the purge of the table would delete all other tables.

        Raises:
            BadRequest: The location is not below a root.
        """
        return str(self.parse(location, subject, root_ok=root_ok))

    def parse(self, location: str, subject: str = "The location", *, root_ok: bool = False) -> Location:
        """Return the parsed location, after the same checks as in `check`.

        Raises:
            BadRequest: The location is not below a root.
        """
        parsed_location = parse_location(location, subject)
        for root in self._roots:
            if root.holds(parsed_location) and (root_ok or root != parsed_location):
                return parsed_location
        if parsed_location in self._roots:
            raise BadRequest(f"{subject} {str(parsed_location)!r} is the root of all tables; choose a path below it")
        remedy = (
            "create a warehouse at a folder that contains it"
            if self._is_further
            else "have the operator add its parent to allowed_locations"
        )
        raise BadRequest(
            f"{subject} {str(parsed_location)!r} is outside the warehouse {self.uri!r}; choose one below it, "
            f"or {remedy}"
        )

    def make_namespace_location(self, path: tuple[str, ...]) -> str:
        """Return the default location of a namespace. No other namespace has the same location."""
        return _join_path(self.uri, "/".join(make_safe_segment(level) for level in path))

    def table_location(self, namespace_location: str, name: str, table_uuid: uuid.UUID | str) -> str:
        """Return a new location for a table.

        The table's UUID distinguishes the location from the location of a dropped table with the same name.

        Raises:
            BadRequest: The namespace's location, a property that clients set, is outside the warehouse.
        """
        parent = self.check(namespace_location, "The location of the namespace", root_ok=True)
        return _join_path(parent, f"{make_safe_segment(name)}-{uuid.UUID(str(table_uuid)).hex}")
