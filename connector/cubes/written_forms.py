"""Checks that a query keeps its meaning when sqlglot writes it again.

The query over a cube is written from the tree of the original query. A generator of sqlglot may write a node in another
form, such as `x IS NOT TRUE` as `NOT x` in Trino's SQL. Such a text is not parsed to the same tree.
"""

from __future__ import annotations

from sqlglot import exp, parse_one
from sqlglot.errors import SqlglotError

from seamark.connector.cubes.dialects import CubeDialect, NotFromCube


def check_written_form(select: exp.Select, dialect: CubeDialect) -> None:
    """Check that the text of a query is parsed to the same query, because sqlglot may write it with another meaning.

    Raises:
        NotFromCube: The text is parsed to another query.
    """
    if not dialect.checks_written_form:
        return
    try:
        is_same = parse_one(select.sql(dialect=dialect.name, comments=False), dialect=dialect.name) == select
    except (SqlglotError, RecursionError):
        is_same = False
    if not is_same:
        raise NotFromCube("a part of the query is written in another form")
