"""Chooses the engine of a statement: by what it does, what DuckDB computes as the dialect defines it, and the bytes
that it reads.

DuckDB in this process starts at once, and reads on one machine. Trino has more machines, and takes longer to plan. So
what is small runs on DuckDB, and what is large on Trino, where one is configured. Statements that write run on the
engine that writes best, which is DuckDB for single rows and definitions, and Spark for MERGE. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamark.connector.client.errors import BadRequest
from seamark.connector.sql.statement import Kind

AUTO, DUCKDB, TRINO, SPARK = "auto", "duckdb", "trino", "spark"
ENGINES = (DUCKDB, TRINO, SPARK)
LARGE_BYTES = 1 << 30
"""Bytes of data files from which a query is large; DuckDB reads that in some seconds."""


@dataclass(frozen=True)
class Demand:
    """What a statement asks for."""

    kind: Kind
    bytes: int = 0
    """The size of the data files that its plan leaves."""
    not_in_duckdb: str = ""
    """Why DuckDB does not run it; empty if it does."""


@dataclass(frozen=True)
class Choice:
    engine: str
    why: str


def choose(demand: Demand, wanted: str, available: frozenset[str], *, large_bytes: int = LARGE_BYTES) -> Choice:
    """Return the engine that runs a statement.

    Args:
        wanted: An engine that the user forces, or `AUTO`.

    Raises:
        BadRequest: With the reason, if no engine runs it.
    """
    if wanted != AUTO:
        return _choose_forced(demand, wanted, available)
    if demand.kind is Kind.QUERY:
        return _choose_for_query(demand, available, large_bytes)
    if demand.kind is Kind.MERGE:
        if SPARK not in available:
            raise BadRequest("MERGE runs on Spark: give --spark with sc://host:port or a master such as local[2]")
        return Choice(SPARK, "MERGE runs on Spark, which DuckDB does not have for Iceberg tables")
    if demand.kind is Kind.OTHER:
        raise BadRequest("The statement is not a query, INSERT, UPDATE, DELETE, MERGE, CREATE, ALTER or DROP")
    return Choice(DUCKDB, f"{demand.kind.value} commits through the catalog from this process")


def _choose_for_query(demand: Demand, available: frozenset[str], large_bytes: int) -> Choice:
    size = f"it reads {demand.bytes:,} bytes of data files"
    if demand.not_in_duckdb:
        if TRINO in available:
            return Choice(TRINO, f"DuckDB does not run it: {demand.not_in_duckdb}")
        raise BadRequest(f"DuckDB does not run this statement, and no Trino is configured: {demand.not_in_duckdb}")
    if demand.bytes < large_bytes:
        return Choice(DUCKDB, f"{size}, less than {large_bytes:,}")
    if TRINO in available:
        return Choice(TRINO, f"{size}, at least {large_bytes:,}")
    return Choice(DUCKDB, f"{size}, and no Trino is configured")


def _choose_forced(demand: Demand, wanted: str, available: frozenset[str]) -> Choice:
    if wanted not in ENGINES:
        raise BadRequest(f"The engine is {wanted!r}; it must be {AUTO}, {', '.join(ENGINES)}")
    if wanted not in available:
        raise BadRequest(f"The engine {wanted} is not configured; give --{wanted} with its URL")
    if wanted == DUCKDB and demand.not_in_duckdb:
        raise BadRequest(f"DuckDB does not run this statement: {demand.not_in_duckdb}")
    if wanted == SPARK and demand.kind is Kind.QUERY:
        raise BadRequest("Queries run on DuckDB or Trino here; Spark runs statements that write")
    return Choice(wanted, "it was asked for")
