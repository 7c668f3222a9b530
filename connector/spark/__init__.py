"""Seamark from PySpark: sessions, readers, writers and jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.connector.spark.archives import keep_contents
from seamark.metaserver.deferred import Deferred

if TYPE_CHECKING:
    from seamark.connector.spark.frames.clustering import Through, cluster
    from seamark.connector.spark.frames.writes import write
    from seamark.connector.spark.query.queries import sql

__all__ = ["Through", "cluster", "sql", "write"]

_clustering = Deferred("seamark.connector.spark.frames.clustering")
keep_contents()  # the first that a Python worker of Spark has of ours is this package

_writing = Deferred("seamark.connector.spark.frames.writes")
_querying = Deferred("seamark.connector.spark.query.queries")
_ROOMS = {"write": _writing, "sql": _querying}


def __getattr__(name: str) -> object:
    """Imported when it is asked for: each of Spark's Python workers imports this package, and few of them write."""
    if name in __all__:
        return getattr(_ROOMS.get(name, _clustering), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
