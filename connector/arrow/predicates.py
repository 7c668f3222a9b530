"""Predicates as callers give them, bound to a table's columns: what they say exactly, or an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seamark.connector.client.errors import BadRequest
from seamark.metaserver.deferred import Deferred
from seamark.metaserver.errors import RequestError
from seamark.metaserver.iceberg.expressions.binding import bind
from seamark.metaserver.iceberg.expressions.expression import Expression
from seamark.metaserver.iceberg.expressions.expression_json import parse_expression
from seamark.metaserver.iceberg.types.schema import Schema

if TYPE_CHECKING:
    from seamark.metaserver.iceberg.expressions import sql
else:
    sql = Deferred(
        "seamark.metaserver.iceberg.expressions.sql"
    )  # every worker of Spark imports this module, and few parse SQL


def exactly(where: str | Any, schema: Schema) -> Expression:
    """Of SQL text, or of an Iceberg expression in JSON. BadRequest for what is none, and for SQL whose meaning an
    expression cannot have exactly: rows that a wider one holds are not to be taken for those that were meant."""
    try:
        if not isinstance(where, str):
            return bind(parse_expression(where), schema, (), case_sensitive=True)
        read = sql.parse_sql(where, schema, nan_above=True)
        if not read.exact:
            told = f": {'; '.join(read.unused)}" if read.unused else ", for a literal that its column cannot hold"
            raise BadRequest(f"Rows cannot be chosen by all of this predicate exactly{told}")
        return bind(read.expression, schema, (), case_sensitive=True)
    except RequestError as error:
        raise BadRequest(error.message) from None
