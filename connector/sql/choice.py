"""Chooses the engine of a statement.

The choice depends on the kind of the statement, on the bytes that it reads, and on whether DuckDB's results are those
that the dialect defines.

DuckDB runs in this process and needs no time to start. Trino has more machines, but needs more time to plan. Therefore
small queries run on DuckDB, and large queries run on Trino if it is configured. MERGE runs on Spark, and all other
writing statements run on DuckDB. The functions of this module are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.sql.statement import Kind

AUTO, DUCKDB, TRINO, SPARK = "auto", "duckdb", "trino", "spark"
ENGINES = (DUCKDB, TRINO, SPARK)
LARGE_BYTES = 1 << 30
"""The minimum size of the data files that a large query reads. DuckDB reads data of this size in a few seconds."""


@dataclass(frozen=True)
class StatementProfile:
    """The properties of a statement that determine its engine."""

    kind: Kind
    bytes: int = 0
    """The size of the data files in the plan of the statement."""
    not_in_duckdb: str = ""
    """The reason why DuckDB cannot run the statement, or "" if it can."""


@dataclass(frozen=True)
class Choice:
    """The chosen engine, and the reason for the choice."""

    engine: str
    why: str


def choose(
    profile: StatementProfile, engine: str, available_engines: frozenset[str], *, large_bytes: int = LARGE_BYTES
) -> Choice:
    """Return the engine that runs a statement.

    Args:
        profile: The properties of the statement.
        engine: The engine that the user has chosen, or `AUTO`.
        available_engines: The engines that are configured.
        large_bytes: The minimum size of the data files that a large query reads.

    Raises:
        InvalidRequest: No engine can run the statement. The message has the reason.
    """
    if engine != AUTO:
        return _choose_forced(profile, engine, available_engines)
    if profile.kind is Kind.QUERY:
        return _choose_for_query(profile, available_engines, large_bytes)
    if profile.kind is Kind.MERGE:
        if SPARK not in available_engines:
            raise InvalidRequest("MERGE runs on Spark; set --spark to sc://host:port or to a master such as local[2]")
        return Choice(SPARK, "MERGE runs on Spark, because DuckDB has no MERGE for Iceberg tables")
    if profile.kind is Kind.OTHER:
        raise InvalidRequest("The statement is not a query, INSERT, UPDATE, DELETE, MERGE, CREATE, ALTER or DROP")
    return Choice(DUCKDB, f"{profile.kind.value} commits through the catalog from this process")


def _choose_for_query(profile: StatementProfile, available_engines: frozenset[str], large_bytes: int) -> Choice:
    size = f"the statement reads {profile.bytes:,} bytes of data files"
    if profile.not_in_duckdb:
        if TRINO in available_engines:
            return Choice(TRINO, f"DuckDB does not run it: {profile.not_in_duckdb}")
        raise InvalidRequest(f"DuckDB does not run this statement, and no Trino is configured: {profile.not_in_duckdb}")
    if profile.bytes < large_bytes:
        return Choice(DUCKDB, f"{size}, less than {large_bytes:,}")
    if TRINO in available_engines:
        return Choice(TRINO, f"{size}, at least {large_bytes:,}")
    return Choice(DUCKDB, f"{size}, and no Trino is configured")


def _choose_forced(profile: StatementProfile, engine: str, available_engines: frozenset[str]) -> Choice:
    if engine not in ENGINES:
        raise InvalidRequest(f"The engine is {engine!r}; it must be one of {AUTO}, {', '.join(ENGINES)}")
    if engine not in available_engines:
        raise InvalidRequest(f"The engine {engine} is not configured; set --{engine} to its URL")
    if engine == DUCKDB and profile.not_in_duckdb:
        raise InvalidRequest(f"DuckDB does not run this statement: {profile.not_in_duckdb}")
    if engine == SPARK and profile.kind is Kind.QUERY:
        raise InvalidRequest("Spark runs only statements that write; choose duckdb or trino for a query")
    return Choice(engine, "the user has chosen it")
