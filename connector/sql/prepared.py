"""Caches the translated queries of a session, so that a repeated statement is not parsed and translated again.

A translation depends on the text, on the state of the tables, and on the date. A dashboard repeats its statements, and
translating a statement takes longer than answering it from a cube. Each run opens its tables again, and the server
reports which of them have changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from seamark.connector.sql.cubes.plans import CubeChoice, choose_cube
from seamark.connector.sql.cubes.queries import NotFromCube
from seamark.connector.sql.queries import DuckDBQuery, translate
from seamark.connector.sql.reads import AnalyzedReference, StatementTables, find_scans
from seamark.connector.sql.statement import SqlStatement

_QUERIES_MAX = 128
"""The maximum number of cached queries."""
_TEXT_CHARACTERS_MAX = 20_000
"""The maximum length of the text of a cached query, in characters."""


@dataclass(frozen=True)
class PreparedQuery:
    """A query that DuckDB can run.

    Attributes:
        scans: The conditions on each reference to a table.
        cube: The cube that answers the query, or the reason why none can, or None if its tables have no cubes.
        prepared_at: The time at which the query was translated.
    """

    statement: SqlStatement
    tables: StatementTables
    query: DuckDBQuery
    scans: Sequence[AnalyzedReference]
    cube: CubeChoice | NotFromCube | None
    prepared_at: datetime


def prepare(statement: SqlStatement, tables: StatementTables, now: datetime, cubes: str) -> PreparedQuery:
    """Translate a query.

    Args:
        statement: The query.
        tables: The tables of the query. The function opens them.
        now: The time at which the statement runs.
        cubes: One of `CUBE_USES`.

    Raises:
        InvalidRequest: The query is invalid.
        UnsupportedInDuckDB: The query is not translated.
    """
    query = translate(statement.tree, tables.find_columns, now)
    scans = find_scans(statement.query, query.tables, tables, now.date())
    named_tables = [tables.of_node[id(table.node)] for table in query.tables]
    cube = choose_cube(statement.tree, query, named_tables, now, cubes)
    return PreparedQuery(statement, tables, query, scans, cube, now)


class PreparedQueries:
    """The queries of one session, by their text."""

    def __init__(self) -> None:
        self._by_text: OrderedDict[str, PreparedQuery] = OrderedDict()

    def put(self, text: str, query: PreparedQuery) -> None:
        if len(text) > _TEXT_CHARACTERS_MAX:
            return
        self._by_text[text] = query
        if len(self._by_text) > _QUERIES_MAX:
            self._by_text.popitem(last=False)

    def find(self, text: str, now: datetime) -> PreparedQuery | None:
        """Return the cached query of a text, or None if the text has to be translated.

        The tables of the query are opened again. If a table has changed, the result is None. It is also None if the
        query was translated on another day, because the translation depends on the date.
        """
        query = self._by_text.get(text)
        if query is None:
            return None
        if query.prepared_at.date() != now.date() or not query.tables.are_unchanged():
            del self._by_text[text]
            return None
        self._by_text.move_to_end(text)
        return query
