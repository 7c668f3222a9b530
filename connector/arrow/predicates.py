"""Parses and binds predicates, and refuses predicates that cannot be represented exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seamark.connector.client.errors import InvalidRequest
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.expression import Expression
from seamark.formats.iceberg.expressions.expression_json import parse_expression
from seamark.formats.iceberg.types.schema import Schema
from seamark.formats.runtime.errors import RequestError
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.formats.iceberg.expressions import sql
else:
    # The import is delayed, because each Spark worker imports this module, but few workers parse SQL.
    sql = LazyModule("seamark.formats.iceberg.expressions.sql")


def bind_exactly(where: str | Any, schema: Schema) -> Expression:
    """Bind a predicate, as SQL text or as Iceberg expression JSON, to a schema.

    The expression must represent the predicate exactly, because a wider expression would select further rows.

    Raises:
        InvalidRequest: The predicate is invalid, or the SQL cannot be represented exactly by an expression.
    """
    try:
        if not isinstance(where, str):
            return bind(parse_expression(where), schema, (), case_sensitive=True)
        sql_filter = sql.parse_sql(where, schema, nan_above=True)
        if not sql_filter.exact:
            if not sql_filter.unused:
                raise InvalidRequest(
                    "Rows cannot be selected exactly by this predicate, because a column cannot hold its literal"
                )
            reasons = "; ".join(sql_filter.unused)
            raise InvalidRequest(f"Rows cannot be selected exactly by all parts of this predicate: {reasons}")
        return bind(sql_filter.expression, schema, (), case_sensitive=True)
    except RequestError as error:
        raise InvalidRequest(error.message) from None
