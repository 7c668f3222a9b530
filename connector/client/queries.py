"""How the tables of a whole query are planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import Explanation


@dataclass(frozen=True, slots=True)
class ExplainedTable:
    """The plan of one reference to a table.

    Attributes:
        reference: Its text in the query; `predicate`: the condition on the table's own columns, in SQL.
    """

    table: tuple[str, ...]
    reference: str
    predicate: str | None
    plan: Explanation


@dataclass(frozen=True, slots=True)
class ExplainedQuery:
    tables: tuple[ExplainedTable, ...]
    json: dict[str, Any]
    """The JSON of the answer."""


def explain_query(
    client: SeamarkClient, query: str, *, dialect: str = "trino", namespace: Sequence[str] = ()
) -> ExplainedQuery:
    """Explain a query by its conditions and joins; nothing is run.

    Args:
        dialect: Trino or duckdb.
        namespace: Of names without one.

    Raises:
        BadRequest: For a query that is not read, NotFound.
    """
    body = {"query": query, "dialect": dialect, "namespace": list(namespace)}
    answer = client._json("POST", "/api/v1/explain-query", {}, body)
    tables = []
    for table in answer["tables"]:
        plan = client._convert({**table["plan"], "json": table["plan"]}, Explanation)
        tables.append(ExplainedTable(tuple(table["table"]), table["reference"], table["predicate"], plan))
    return ExplainedQuery(tuple(tables), answer)
