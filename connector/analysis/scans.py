"""Finds the tables that a Trino statement reads, their positions in its text, and conditions on their needed rows.

    for scan in find_scans(statement, find_columns=…):
        scan.condition                       on the table's own columns, or None
        read_at_snapshot(scan, 4711)         for splices.splice

A statement that is not fully supported has no scans, and is sent unchanged. The supported statements are queries,
EXPLAIN [ANALYZE] of a query, EXECUTE IMMEDIATE of a query, and prepared queries with parameters
(`lexer.parse_execute`). All statements that write, such as INSERT and CREATE TABLE AS, have no scans, not even in their
queries, because the name of a table that is written must never be replaced by a plan table.

The block algebra decides which rows are needed (`algebra/needed_rows.py`).

In a comparison with a column with a zone, a literal without a zone is a time in the session's zone, but the catalog
reads it as UTC. Therefore literals without a zone are used only if the session's zone is UTC (`utc`) or the column is
known to have no zone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import Any

from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.connector.analysis.algebra.needed_rows import build_condition, build_joins, list_string_likes
from seamark.connector.analysis.algebra.relations import Relation, Table
from seamark.connector.analysis.conditions import ConditionReader
from seamark.connector.analysis.lexer import QueryText, TrinoToken, UnsupportedStatement, extract_query, tokenize_trino
from seamark.connector.analysis.queries import FindColumns, Queries, check_relations, parse_version
from seamark.connector.analysis.select_names import canonicalize_name
from seamark.connector.analysis.table_uses import find_table_uses
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.scan import Scan
from seamark.connector.plans.splices import Replacement
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern
from seamark.formats.iceberg.expressions.sql_parser import parse_statements, tokenize_sql

STATEMENT_CHARACTERS_MAX = 200_000
_TRINO = Dialect.get_or_raise("trino")
_TOKENS_BEFORE_TABLE = frozenset({"FROM", "JOIN", ",", "("})


@dataclass(frozen=True)
class ParsedQuery:
    """The parsed query of a statement. It can be read any number of times, but only by one thread at a time."""

    text: QueryText
    tree: exp.Expr
    casts_decimal: bool
    """Whether the query may convert a value to a decimal."""
    names: frozenset[str]
    """The names and aliases of the tables in the query, in lower case."""


def parse_query(statement: str, parameters: Sequence[str] = ()) -> ParsedQuery:
    """Parse the query in a statement.

    Args:
        statement: A query, or a statement that contains a query.
        parameters: The texts of the parameters of a prepared statement, as they follow USING in EXECUTE.

    Raises:
        UnsupportedStatement: The statement is not fully supported.
    """
    if len(statement) > STATEMENT_CHARACTERS_MAX:
        raise UnsupportedStatement
    inner = extract_query(statement, parameters)
    try:
        sqlglot_tokens = tokenize_sql(_TRINO, inner.text)
        trees = parse_statements(_TRINO, inner.text, sqlglot_tokens)
    except (SqlglotError, RecursionError):  # sqlglot may raise RecursionError for deeply nested statements.
        raise UnsupportedStatement from None
    if len(trees) != 1 or trees[0] is None:
        raise UnsupportedStatement
    return _check_query(inner, trees[0], sqlglot_tokens)


def use_parsed_query(text: str, tree: exp.Expr, sqlglot_tokens: Sequence[Any]) -> ParsedQuery:
    """Return the result of `parse_query` for a query that sqlglot has already parsed.

    Args:
        text: The query, in Trino's dialect.
        tree: The tree of the query.
        sqlglot_tokens: The tokens into which sqlglot has split the query.

    Raises:
        UnsupportedStatement: The query is not fully supported.
    """
    tokens = tokenize_trino(text)
    if any(token.word == "?" for token in tokens):
        raise UnsupportedStatement
    return _check_query(QueryText(text, tokens, range(len(text) + 1)), tree, sqlglot_tokens)


def _check_query(inner: QueryText, tree: exp.Expr, sqlglot_tokens: Sequence[Any]) -> ParsedQuery:
    """Check that sqlglot and Trino split a query into the same tokens, and return the parsed query.

    A query that both read differently could get a wrong condition. `casts_decimal` is found in the tokens by `AS
    DECIMAL`, which also finds casts in parts of the query that are not read.

    Raises:
        UnsupportedStatement: The tokens differ, or the query is not fully supported.
    """
    starts, ends = {token.start for token in inner.tokens}, {token.end for token in inner.tokens}
    if any(token.start not in starts or token.end + 1 not in ends for token in sqlglot_tokens):
        raise UnsupportedStatement
    try:
        check_relations(tree)
        _check_patterns(tree)
    except RecursionError:
        raise UnsupportedStatement from None
    casts_decimal = any(
        token.word == "AS" and next_token.word in ("DECIMAL", "DEC", "NUMERIC")
        for token, next_token in pairwise(inner.tokens)
    )
    names = frozenset(
        node.name.lower() for node in tree.find_all(exp.TableAlias, exp.Table) if isinstance(node.this, exp.Identifier)
    )
    return ParsedQuery(inner, tree, casts_decimal, names)


def find_scans(
    statement: str,
    *,
    find_columns: FindColumns = lambda _: None,
    parameters: Sequence[str] = (),
    utc: bool = False,
    today: date | None = None,
) -> tuple[Scan, ...]:
    """Parse a statement, and return its scans (`collect_scans`).

    The result is empty if the statement is not fully supported.
    """
    try:
        query = parse_query(statement, parameters)
    except UnsupportedStatement:
        return ()
    return collect_scans(query, find_columns=find_columns, utc=utc, today=today)


def collect_scans(
    query: ParsedQuery, *, find_columns: FindColumns = lambda _: None, utc: bool = False, today: date | None = None
) -> tuple[Scan, ...]:
    """Return the scans of a query in the order of the text.

    The result is empty if the query is not fully supported.

    Args:
        query: The parsed query.
        find_columns: A function that returns the columns of a (catalog, schema, table). Without it, column names
            without a qualifier give no conditions if the query reads several tables.
        utc: Whether the time zone of the session is known to be UTC.
        today: The date in UTC, for conditions with the current time.
    """
    try:
        queries, result = _build_relations(query, find_columns, today, utc=utc)
        result.push_down(None)
        positions = _ReferencePositions(query.text)
        uses = find_table_uses(query.tree)
        scans = [
            (table, scan)
            for table, node in queries.tables.items()
            if (scan := positions.build_scan(table, node, utc=utc)) is not None
        ]
    except (UnsupportedStatement, RecursionError):
        return ()
    scans.sort(key=lambda pair: pair[1].start)
    numbers = {table: number for number, (table, _) in enumerate(scans)}
    return tuple(
        replace(
            scan,
            joins=build_joins(table, numbers.get, utc=utc),
            query_use=uses.get(id(queries.tables[table]), scan.query_use),
        )
        for table, scan in scans
    )


def find_result_types(query: ParsedQuery, columns: Sequence[str], *, find_columns: FindColumns) -> dict[str, str]:
    """Return the Iceberg types of those `columns` of a query's result that are unchanged stored columns.

    A computed column is left out. If the query is not fully supported, the result is empty.
    """
    try:
        _, result = _build_relations(query, find_columns)
        types_by_column = {column: result.find_kind(column) for column in columns}
    except (UnsupportedStatement, RecursionError):
        return {}
    return {column: kind for column, kind in types_by_column.items() if kind is not None}


def read_at_snapshot(scan: Scan, snapshot_id: int) -> Replacement:
    """Return a replacement that makes a scan read this snapshot of its table.

    The name and the alias of the table do not change.
    """
    start, end = scan.version_span or (scan.end, scan.end)
    clause = f"FOR VERSION AS OF {snapshot_id}"
    return Replacement(start, end, clause if scan.version_span else f" {clause}")


def read_from_view(scan: Scan, name: str) -> Replacement:
    """Return a replacement that makes a scan read the view `name` in the schema of its table.

    The scan must have no FOR VERSION. The replacement may include an alias.
    """
    text = quote_name(name) + (scan.alias_needed or "")
    if scan.quoted:  # The query is inside a string literal of the statement, in which a quote is doubled.
        text = text.replace("'", "''")
    return Replacement(scan.name_start, scan.end, text)


def _build_relations(
    query: ParsedQuery, find_columns: FindColumns, today: date | None = None, *, utc: bool = False
) -> tuple[Queries, Relation]:
    """Convert a parsed query to relations.

    Returns:
        The reader with the tables of the query, and the relation of the outermost query.

    Raises:
        UnsupportedStatement: The query is not fully supported.
    """
    reader = ConditionReader(casts_decimal=query.casts_decimal, today=today, utc=utc)
    queries = Queries(find_columns, reader, query.names)
    return queries, queries.read(query.tree, {})


def _check_patterns(tree: exp.Expr) -> None:
    """Check the LIKE patterns of a query.

    An engine refuses an invalid pattern only when it compares a row with the pattern. If rows are left out, the
    statement might succeed instead of failing.

    Raises:
        UnsupportedStatement: A pattern is invalid.
    """
    for node in tree.find_all(exp.Escape):
        texts = [node.this.expression, node.expression] if isinstance(node.this, exp.Like | exp.ILike) else []
        if all(isinstance(text, exp.Literal) and text.is_string for text in texts) and texts:
            pattern, escape = (str(text.this) for text in texts)
            if not is_valid_pattern(pattern, escape):
                raise UnsupportedStatement("the statement has a LIKE pattern with an invalid escape")


class _ReferencePositions:
    """The positions of table references in a statement."""

    def __init__(self, text: QueryText) -> None:
        self._text = text
        self._numbers_by_start = {token.start: number for number, token in enumerate(text.tokens)}
        tokens = text.tokens
        self._schemas = {
            token.text.strip('"').replace('""', '"').lower()
            for previous_token, token, next_token in zip(tokens, tokens[1:], tokens[2:], strict=False)
            if previous_token.word == "." == next_token.word
        }
        """The names between two dots in the text.

        Columns of a table with such a name may be qualified by its schema.
        """

    def build_scan(self, table: Table, node: exp.Table, *, utc: bool) -> Scan | None:
        """Return the scan of a table reference, or None if the name of the table cannot be replaced."""
        names = [canonicalize_name(part.name) for part in node.parts]
        numbers = [self._numbers_by_start.get(part.meta.get("start", -1)) for part in node.parts]
        tokens, offsets = self._text.tokens, self._text.offsets
        if any(number is None for number in numbers):
            return None
        first, last = int(numbers[0] or 0), int(numbers[-1] or 0)
        # Between two parts of the name, there is only a dot. A token such as FROM must precede the name, so the name is
        # not the first token.
        if last - first != 2 * (len(names) - 1) or first == 0 or tokens[first - 1].word not in _TOKENS_BEFORE_TABLE:
            return None
        has_alias = node.args.get("alias") is not None
        alias = None if has_alias else f" AS {quote_name(node.name)}"
        version, span, clause_version = node.args.get("version"), None, None
        if version is not None:
            # The clause is FOR VERSION AS OF and one token with the version.
            clause, clause_version = tokens[last + 1 : last + 6], parse_version(version)
            *clause_words, version_token = clause
            if [token.word for token in clause_words] != ["FOR", "VERSION", "AS", "OF"] or _parse_version(
                version_token
            ) != clause_version:
                return None
            span = offsets[clause[0].start], offsets[version_token.end]
        # The name may lack the catalog, or the catalog and the schema.
        catalog, schema, name = (None, None, *names)[-3:]
        return Scan(
            catalog,
            schema,
            str(name),
            start=offsets[tokens[first].start],
            end=offsets[tokens[last].end],
            name_start=offsets[tokens[last].start],
            alias_needed=alias,
            snapshot_id=clause_version if isinstance(clause_version, int) else None,
            version_span=span,
            condition=build_condition(table, utc=utc),
            likes=list_string_likes([table]),
            quoted=self._text.quoted,
            # Another table name would break columns that are qualified by the schema and the table.
            renamable=has_alias or names[-1] not in self._schemas,
            ref=clause_version if isinstance(clause_version, str) else None,
        )


def _parse_version(token: TrinoToken) -> int | str | None:
    """Return the version of a table from its token: a snapshot id, or the name of a branch or tag.

    The result is None if the token is not a whole number or a string.
    """
    if token.kind == "number" and token.text.isdigit():
        return int(token.text)
    return token.text[1:-1].replace("''", "'") if token.kind == "string" else None
