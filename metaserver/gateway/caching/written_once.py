"""Decides by an object's name whether it is immutable, and whether it is metadata. The module does no I/O.

Iceberg never changes a file after it was written. All known writers put a UUID into the names of data files, delete
files, manifests, manifest lists, metadata files and index files. So an object counts as written once if its key
contains a UUID, and ends with the extension of one of these files. Other objects, such as `version-hint.text` or files
that were added by `add_files`, are not cached.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["data", "metadata"]

_UUID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}", re.IGNORECASE)
_EXTENSION = re.compile(r"\.(?:parquet|orc|avro|puffin|stats|(?:gz\.)?metadata\.json(?:\.gz)?)\Z")
_METADATA = re.compile(r"/(?:metadata|_seamark)/")


def find_written_once_kind(key: str) -> Kind | None:
    """Return the kind of the object at `key`, or None if its name does not show that it is written once."""
    name = key.rpartition("/")[2]
    if _EXTENSION.search(name) is None or _UUID.search(name) is None:
        return None
    return "metadata" if _METADATA.search(f"/{key}") else "data"
