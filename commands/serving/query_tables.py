"""Find the tables of a SQL query, and the conditions and joins of each table.

The names of the tables are read first. The conditions and joins are read when the columns of the tables are known. The
engines' connectors use the same analysis: Trino's queries are analysed directly, and DuckDB's after a conversion. The
analysis is pure and does not use a server.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from sqlglot import Dialect
from sqlglot.errors import ParseError, SqlglotError

from seamark.connector.analysis.algebra.relations import Columns
from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.queries import Names
from seamark.connector.analysis.relative_times import find_today
from seamark.connector.analysis.scans import collect_scans, find_scans, parse_query
from seamark.connector.duckdb.statements import DuckDBStatement, mark_name
from seamark.connector.plans.scan import Scan
from seamark.formats.iceberg.expressions.sql import describe_syntax_error
from seamark.formats.iceberg.expressions.sql_parser import parse_statements
from seamark.formats.runtime.errors import BadRequest

_NOT_READ = (
    "The analysis does not support this statement, because it is not a single query or has an unsupported clause; "
    "engines run it without plans of the server"
)


class QueriedTable(NamedTuple):
    """A reference to a table in a statement.

    Attributes:
        key: The key of the table's name in `Query.names`.
        scan: The table with the conditions on it.
        start: The position of the reference's first character in the statement.
        end: The position after the last character of the reference.
    """

    key: Hashable
    scan: Scan
    start: int
    end: int


class Query(Protocol):
    """A parsed query.

    Attributes:
        names: The parts of each table name, by key, as written or in lower case.
    """

    @property
    def names(self) -> Mapping[Hashable, tuple[str, ...]]: ...

    def list_references(self, columns: Mapping[Hashable, Columns]) -> dict[int, QueriedTable]:
        """Return the references to tables, by the numbers with which joins refer to them.

        Args:
            columns: The columns of each table, by the key of its name.

        Raises:
            BadRequest: The query cannot be analysed.
        """


def read_query(text: str, dialect: str) -> Query:
    """Parse a query.

    Raises:
        BadRequest: The text is not a query, or cannot be analysed.
    """
    try:
        return _DuckDBQuery(text) if dialect == "duckdb" else _TrinoQuery(text)
    except UnsupportedStatement as error:
        raise _make_unsupported_query_error(text, dialect, str(error)) from None


class _TrinoQuery:
    """A query in Trino's SQL."""

    def __init__(self, text: str) -> None:
        """Parse the query.

        Raises:
            UnsupportedStatement: The text is not a supported query, or reads no table.
        """
        self._text = text
        self.names: dict[Hashable, tuple[str, ...]] = {}

        def add_name(names: Names) -> None:
            self.names[names] = tuple(part for part in names if part is not None)

        self._query = parse_query(text)
        # `collect_scans` calls `find_columns` for each table, except tables at an earlier snapshot, which the loop
        # adds. `add_name` records the name and returns no columns.
        for scan in collect_scans(self._query, find_columns=add_name, utc=True):
            add_name((scan.catalog, scan.schema, scan.table))
        if not self.names:
            raise UnsupportedStatement

    def list_references(self, columns: Mapping[Hashable, Columns]) -> dict[int, QueriedTable]:
        scans = collect_scans(self._query, find_columns=columns.get, utc=True, today=find_today(self._text))
        if not scans:
            raise _make_unsupported_query_error(self._text, "trino", "")
        return {
            number: QueriedTable((scan.catalog, scan.schema, scan.table), scan, scan.start, scan.end)
            for number, scan in enumerate(scans)
        }


class _DuckDBQuery:
    """A query in DuckDB's SQL.

    For the analysis, the query is translated to Trino's SQL. In the translation, each table name is replaced by a
    generated name (a mark), because one table may occur several times.
    """

    def __init__(self, text: str) -> None:
        self._statement = DuckDBStatement(text)
        self._references = {
            number: reference for number, reference in enumerate(self._statement.references) if reference is not None
        }
        self.names: dict[Hashable, tuple[str, ...]] = {
            number: queried_table.parts for number, queried_table in self._references.items()
        }
        if not self.names:
            raise UnsupportedStatement

    def list_references(self, columns: Mapping[Hashable, Columns]) -> dict[int, QueriedTable]:
        """Return the references to tables with their conditions, by the number of the scan in the translated query.

        Args:
            columns: The columns of the tables, by the number of the reference.

        Raises:
            BadRequest: The query cannot be analysed.
        """
        known_columns = {number: columns[number] for number in self._references if number in columns}
        marks = {mark_name(number): number for number in known_columns}
        try:
            marked_text = self._statement.to_marked_text(known_columns, utc=True)
        except UnsupportedStatement as error:
            raise _make_unsupported_query_error(self._statement.text, "duckdb", str(error)) from None
        scans = find_scans(
            marked_text,
            find_columns=lambda names: known_columns.get(marks.get(names[2], -1)),
            today=find_today(self._statement.text),
        )
        if not scans:
            raise _make_unsupported_query_error(self._statement.text, "duckdb", "")
        references = {}
        for scan_number, scan in enumerate(scans):
            number = marks.get(scan.table)
            if number is not None:
                reference = self._references[number]
                pinned_scan = replace(scan, snapshot_id=reference.snapshot_id)
                references[scan_number] = QueriedTable(number, pinned_scan, reference.start, reference.end)
        return references


def _make_unsupported_query_error(text: str, dialect: str, reason: str) -> BadRequest:
    """Return the error for a query that cannot be analysed. If the text is not SQL, the error contains the position."""
    try:
        trees = parse_statements(Dialect.get_or_raise(dialect), text)
    except ParseError as error:
        return BadRequest(describe_syntax_error(error, "The query"))
    except (SqlglotError, RecursionError):
        return BadRequest("The query is not valid SQL, or nested too deeply")
    if not any(trees):
        return BadRequest("The query is not valid SQL: it is empty")
    return BadRequest(f"The query cannot be analysed{f' ({reason})' if reason else ''}. {_NOT_READ}")
