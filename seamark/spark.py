"""Seamark for PySpark: sessions, readers, writers and jobs.

A module is imported when one of its names is first used, because each of Spark's Python workers imports this module,
and few of them write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.formats.runtime.lazy_module import make_lazy_getattr

if TYPE_CHECKING:
    from seamark.connector.spark.frames.clustering import cluster
    from seamark.connector.spark.frames.writes import write
    from seamark.connector.spark.query.queries import rewrite_query
    from seamark.connector.spark.session import connect, iceberg_jars, read, session_conf
    from seamark.connector.spark.source.source import register
    from seamark.connector.spark.sql import sql
    from seamark.connector.spark.statements.execution import execute, explain
    from seamark.connector.write.clustering import JoinedTable

__all__ = [
    "JoinedTable",
    "cluster",
    "connect",
    "execute",
    "explain",
    "iceberg_jars",
    "read",
    "register",
    "rewrite_query",
    "session_conf",
    "sql",
    "write",
]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "seamark.connector.spark.frames.clustering": ("cluster",),
        "seamark.connector.spark.frames.writes": ("write",),
        "seamark.connector.spark.query.queries": ("rewrite_query",),
        "seamark.connector.spark.session": ("connect", "iceberg_jars", "read", "session_conf"),
        "seamark.connector.spark.source.source": ("register",),
        "seamark.connector.spark.sql": ("sql",),
        "seamark.connector.spark.statements.execution": ("execute", "explain"),
        "seamark.connector.write.clustering": ("JoinedTable",),
    },
    extra="spark",
)


def __dir__() -> list[str]:
    """Return the names that an interactive interpreter completes, including names that are not imported yet."""
    return __all__
