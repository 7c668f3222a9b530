"""Seamark from PySpark: sessions, readers, writers and jobs. A module is imported when one of its names is first
used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.metaserver.deferred import exports

if TYPE_CHECKING:
    from seamark.connector.spark.clustering import Through, cluster
    from seamark.connector.spark.querying import rewritten, sql
    from seamark.connector.spark.session import connect, iceberg_jars, read, session_conf
    from seamark.connector.spark.source import register
    from seamark.connector.spark.writing import write

__all__ = [
    "Through",
    "cluster",
    "connect",
    "iceberg_jars",
    "read",
    "register",
    "rewritten",
    "session_conf",
    "sql",
    "write",
]

__getattr__ = exports(
    __name__,
    {
        "seamark.connector.spark.clustering": ("Through", "cluster"),
        "seamark.connector.spark.querying": ("rewritten", "sql"),
        "seamark.connector.spark.session": ("connect", "iceberg_jars", "read", "session_conf"),
        "seamark.connector.spark.source": ("register",),
        "seamark.connector.spark.writing": ("write",),
    },
)
