"""Derives the name of a table, view or function from its location.

Metadata files contain no names, and a property with the name would not be safe, because any writer of the table could
set it. The server derives the location of a new table from its name and the location of its namespace, so the name can
be derived from the location. This is safe, because a writer cannot write to the folders of another namespace.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from seamark.formats.protocol.wire import check_name, check_namespace
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.access.principal import parse_path, show_path
from seamark.metaserver.objects.warehouse import Warehouse
from seamark.metaserver.store.model import NamespacePath

_REPLACED_NAME = re.compile(r"-[0-9a-f]{16}\Z")
"""Matches the end of a folder in which the server replaced characters of the name by a hash."""
_HEX_DIGITS = 32


class FoundName(NamedTuple):
    """A namespace and a name for a table that is found in storage after the loss of the database.

    Attributes:
        note: The reason why the name may differ from the name in the lost database. It is empty if both names are
            probably equal.
    """

    namespace: NamespacePath
    name: str
    note: str = ""

    def __str__(self) -> str:
        return show_path((*self.namespace, self.name))


def has_own_folder(location: str, uuid: str) -> bool:
    """Return whether the name of the folder ends with the UUID, as in locations that the server chooses.

    Only writers of the table with this UUID have ever had access to the folder.
    """
    digits = uuid.replace("-", "").lower()
    return len(digits) == _HEX_DIGITS and location.rstrip("/").endswith(f"-{digits}")


def find_name_of_location(warehouse: Warehouse, location: str, uuid: str) -> FoundName:
    """Return the name for which the server chooses this location.

    Raises:
        BadRequest: The location is directly in the warehouse, or contains no valid name.
    """
    parsed_location = warehouse.parse(location)
    root = next(root for root in warehouse.roots if root.holds(parsed_location) and root != parsed_location)
    *levels, folder = parsed_location.path.removeprefix(root.path).strip("/").split("/")
    if not levels:
        raise BadRequest(f"The location {location!r} has no folder of a namespace")
    namespace = check_namespace(tuple(levels))
    if not has_own_folder(location, uuid):
        return FoundName(namespace, check_name(folder, "name"), "the folder has no UUID, so its name may be another")
    name = check_name(folder[: -_HEX_DIGITS - 1], "name")  # Cut the hyphen and the UUID.
    if any(_REPLACED_NAME.search(text) for text in (*namespace, name)):
        return FoundName(namespace, name, "the folder replaces characters of the name")
    return FoundName(namespace, name)


def parse_found_name(text: str) -> FoundName:
    r"""Parse a name such as `shop.orders`. A dot within a level is written as `\.`.

    Raises:
        BadRequest: The text is not a namespace and a name.
    """
    path = parse_path(text)
    if len(path) == 1:
        raise BadRequest(f"{text!r} has no namespace; write namespace.name")
    return FoundName(path[:-1], path[-1])
