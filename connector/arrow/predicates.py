"""Parses and binds the predicates of callers; a predicate that cannot be represented exactly is an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seamark.connector.client.errors import BadRequest
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import RequestError
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    # Each Spark worker imports this module, and few parse SQL.
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")


def bind_exactly(where: str | Any, schema: Schema) -> Expression:
    """Bind SQL text or Iceberg expression JSON to a schema.

    Raises:
        BadRequest: For an invalid predicate, and for SQL that no expression represents exactly: a wider expression
            would select other rows.
    """
    try:
        if not isinstance(where, str):
            return bind(parse_expression(where), schema, (), case_sensitive=True)
        parsed = sql.parse_sql(where, schema, nan_above=True)
        if not parsed.exact:
            reason = f": {'; '.join(parsed.unused)}" if parsed.unused else ", for a literal that its column cannot hold"
            raise BadRequest(f"Rows cannot be selected exactly by all parts of this predicate{reason}")
        return bind(parsed.expression, schema, (), case_sensitive=True)
    except RequestError as error:
        raise BadRequest(error.message) from None
