"""Seamark for DuckDB: connections with an attached catalog, and queries that open only the files that they need.

A module is imported when one of its names is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from seamark.formats.runtime.lazy_module import make_lazy_getattr

if TYPE_CHECKING:
    from seamark.connector.duckdb.queries import rewrite_query, sql
    from seamark.connector.duckdb.session import attach, connect

__all__ = ["attach", "connect", "rewrite_query", "sql"]

__getattr__ = make_lazy_getattr(
    __name__,
    {
        "seamark.connector.duckdb.queries": ("rewrite_query", "sql"),
        "seamark.connector.duckdb.session": ("attach", "connect"),
    },
    extra="duckdb",
)


def __dir__() -> list[str]:
    """Return the names that an interactive interpreter completes, including names that are not imported yet."""
    return __all__
