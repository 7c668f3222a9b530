"""Explains the plans of the tables in a whole query."""

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
        reference: The text of the reference in the query.
        predicate: The condition on the table's own columns, in SQL.
    """

    table: tuple[str, ...]
    reference: str
    predicate: str | None
    plan: Explanation


@dataclass(frozen=True, slots=True)
class ExplainedQuery:
    """The plans of the tables in a query."""

    tables: tuple[ExplainedTable, ...]
    json: dict[str, Any]
    """The JSON of the response."""


def explain_query(
    client: SeamarkClient, query: str, *, dialect: str = "trino", namespace: Sequence[str] = ()
) -> ExplainedQuery:
    """Explain the plans of the tables in a query, without running the query.

    Args:
        query: The query.
        dialect: `trino` or `duckdb`.
        namespace: The namespace of table names without a namespace.

    Raises:
        InvalidRequest: The query cannot be parsed.
        NoSuchResource: A table does not exist.
    """
    body = {"query": query, "dialect": dialect, "namespace": list(namespace)}
    answer = client._request_json("POST", "/api/v1/explain-query", {}, body)
    tables = []
    for table in answer["tables"]:
        plan = client._convert({**table["plan"], "json": table["plan"]}, Explanation)
        tables.append(ExplainedTable(tuple(table["table"]), table["reference"], table["predicate"], plan))
    return ExplainedQuery(tuple(tables), answer)
