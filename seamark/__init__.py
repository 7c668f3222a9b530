"""Seamark: an Iceberg REST catalog whose clients open only the files that a query needs.

This package is the client's interface, and `seamark.spark` is the interface for PySpark. Both import a module when one
of its names is first used. `commands`, `metaserver`, `connector`, `formats` and `cache` are links to the folders of the
repository; a wheel has them as packages below `seamark`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.formats.runtime.lazy_module import make_lazy_getattr

if TYPE_CHECKING:
    from seamark.connector.client.client import SeamarkClient
    from seamark.connector.client.commits import CommitClient
    from seamark.connector.client.errors import Conflict, Refused
    from seamark.connector.client.indexes import IndexClient
    from seamark.connector.client.values import At
    from seamark.connector.read.scans import scan
    from seamark.connector.streams.lookup import get_rows, lookup, lookup_table
    from seamark.connector.streams.reader import read_stream
    from seamark.connector.streams.writer import stream_writer
    from seamark.connector.write.appends import append, overwrite, overwrite_partitions
    from seamark.connector.write.upserts import delete, upsert

__all__ = [
    "At",
    "CommitClient",
    "Conflict",
    "IndexClient",
    "Refused",
    "SeamarkClient",
    "append",
    "delete",
    "get_rows",
    "lookup",
    "lookup_table",
    "overwrite",
    "overwrite_partitions",
    "read_stream",
    "scan",
    "stream_writer",
    "upsert",
]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "seamark.connector.client.client": ("At", "SeamarkClient"),
        "seamark.connector.client.commits": ("CommitClient",),
        "seamark.connector.client.errors": ("Conflict", "Refused"),
        "seamark.connector.client.indexes": ("IndexClient",),
        "seamark.connector.read.scans": ("scan",),
        "seamark.connector.write.appends": ("append", "overwrite", "overwrite_partitions"),
        "seamark.connector.streams.lookup": ("get_rows", "lookup", "lookup_table"),
        "seamark.connector.streams.reader": ("read_stream",),
        "seamark.connector.streams.writer": ("stream_writer",),
        "seamark.connector.write.upserts": ("delete", "upsert"),
    },
)


def __dir__() -> list[str]:
    """Return the names that an interactive interpreter completes, including names that are not imported yet."""
    return __all__
