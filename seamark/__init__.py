"""Seamark: an Iceberg REST catalog whose clients open only the files that matter.

This package is the client's interface; `seamark.spark` is that of PySpark. Both import a module when one of its names
is first used. `metaserver`, `connector` and `cache` are links to the folders of the repository; a wheel holds them as
packages below this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.metaserver.deferred import exports

if TYPE_CHECKING:
    from seamark.connector.client import At, SeamarkClient
    from seamark.connector.errors import Conflict, Refused
    from seamark.connector.reading import scan
    from seamark.connector.upserts import delete, upsert
    from seamark.connector.writing import append, overwrite, overwrite_partitions

__all__ = [
    "At",
    "Conflict",
    "Refused",
    "SeamarkClient",
    "append",
    "delete",
    "overwrite",
    "overwrite_partitions",
    "scan",
    "upsert",
]

__getattr__ = exports(
    __name__,
    {
        "seamark.connector.client": ("At", "SeamarkClient"),
        "seamark.connector.errors": ("Conflict", "Refused"),
        "seamark.connector.reading": ("scan",),
        "seamark.connector.upserts": ("delete", "upsert"),
        "seamark.connector.writing": ("append", "overwrite", "overwrite_partitions"),
    },
)
