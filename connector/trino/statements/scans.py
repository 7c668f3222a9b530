"""The tables that a Trino statement reads, their positions in its text, and conditions on their needed rows.

    for scan in scans(statement, columns_of=…):
        scan.predicate                       SQL over the table's own columns, or None
        version(scan, 4711)                  for splices.splice

A statement that is not fully understood has no scans, and is sent unchanged. Supported are queries, EXPLAIN [ANALYZE]
of a query, EXECUTE IMMEDIATE of a query, and the text of a prepared query with its parameters (`lexer.executed`).
INSERT, CREATE TABLE AS and all other statements that write have no scans, not even in their queries: a plan table must
never be near the name of a table that is written.

Invariant (`scopes.py`, `blocks.py`, `conditions.py`): rows of a scan for which its predicate is not true can be left
out, and the statement's answer stays the same for any data. The same applies to rows without a partner in one of its
`joins`. A partner is a row of the other scan's table for which that scan's predicate and joins are true, and that is
equal and not null in all the columns. The other scan must read that table at that snapshot. If this is uncertain,
predicates are weaker, and there are fewer joins.

A literal without a zone, compared with a column with a zone, is a time in the session's zone, but the catalog reads it
as UTC. So such comparisons are used only if the session's zone is UTC (`utc`) or the column is known to have no zone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.connector.plans.quotes import quoted_name
from seamark.connector.plans.scan import Join, Scan
from seamark.connector.plans.splices import Replacement
from seamark.connector.trino.statements.conditions import (
    All,
    Atom,
    ColumnComparison,
    ConditionReader,
    Match,
    places_of,
    sql_of,
    weaken,
)
from seamark.connector.trino.statements.lexer import QueryText, UnsupportedStatement, extract_query
from seamark.connector.trino.statements.literals import LOCAL, ZONED
from seamark.connector.trino.statements.queries import ColumnsOf, Queries
from seamark.connector.trino.statements.scopes import COMPUTED, Columns, Scope, Table, canonical_name

STATEMENT_MAX = 200_000
PREDICATE_MAX = 100_000
"""The maximum number of characters that the catalog accepts."""
_TRINO = Dialect.get_or_raise("trino")
_BEFORE = frozenset({"FROM", "JOIN", ",", "("})


def find_scans(
    statement: str,
    *,
    columns_of: ColumnsOf = lambda _: None,
    parameters: Sequence[str] = (),
    utc: bool = False,
) -> tuple[Scan, ...]:
    """The scans in the order of the text. Empty if the statement is not fully understood.

    `columns_of` gets (catalog, schema, table) and returns the columns; without it, names without a qualifier give no
    conditions if there are several tables. `parameters`: those of a prepared statement, in their form after USING.
    `utc`: the session's time zone is known to be UTC.
    """
    try:
        inner, queries, result = _read(statement, columns_of, parameters)
        result.push_down(None)
        places = _Places(inner)
        found = [(table, scan) for table in queries.tables if (scan := places.scan(table, utc)) is not None]
    except (UnsupportedStatement, RecursionError):
        return ()
    found.sort(key=lambda one: one[1].start)
    numbers = {table: number for number, (table, _) in enumerate(found)}
    return tuple(replace(scan, joins=_joins(table, numbers)) for table, scan in found)


def result_types(statement: str, columns: Sequence[str], *, columns_of: ColumnsOf) -> dict[str, str]:
    """The Iceberg types of those `columns` of a query's result that are unchanged stored columns."""
    try:
        _, _, result = _read(statement, columns_of, ())
        found = {column: result.kind(column) for column in columns}
    except (UnsupportedStatement, RecursionError):
        return {}
    return {column: kind for column, kind in found.items() if kind is not None}


def read_at_snapshot(scan: Scan, snapshot_id: int) -> Replacement:
    """Makes the scan read this snapshot of its table. The table name and its alias stay."""
    start, end = scan.version_span or (scan.end, scan.end)
    clause = f"FOR VERSION AS OF {snapshot_id}"
    return Replacement(start, end, clause if scan.version_span else f" {clause}")


def read_from_view(scan: Scan, name: str) -> Replacement:
    """Replaces a scan without FOR VERSION by the view `name` of the same schema; an alias may follow it."""
    text = quoted_name(name) + (scan.alias_needed or "")
    return Replacement(scan.name_start, scan.end, text.replace("'", "''") if scan.quoted else text)


def _read(statement: str, columns_of: ColumnsOf, parameters: Sequence[str]) -> tuple[QueryText, Queries, Scope]:
    """Raises Unclear."""
    if len(statement) > STATEMENT_MAX:
        raise UnsupportedStatement
    inner = extract_query(statement, parameters)
    tree = _parsed(inner)
    casts_decimal = any(
        one.word == "AS" and other.word in ("DECIMAL", "DEC", "NUMERIC") for one, other in pairwise(inner.tokens)
    )
    queries = Queries(columns_of, ConditionReader(casts_decimal=casts_decimal))
    return inner, queries, queries.read(tree, {})


def _parsed(inner: QueryText) -> exp.Expr:
    """Raises Unclear, also if sqlglot's tokens of the text differ from Trino's."""
    try:
        words = _TRINO.tokenize(inner.text)
        trees = _TRINO.parser().parse(words, inner.text)
    except (SqlglotError, ValueError, TypeError, AttributeError, LookupError):
        raise UnsupportedStatement from None  # a bug of sqlglot must fail no statement
    starts, ends = {one.start for one in inner.tokens}, {one.end for one in inner.tokens}
    if any(word.start not in starts or word.end + 1 not in ends for word in words):
        raise UnsupportedStatement
    if len(trees) != 1 or trees[0] is None:
        raise UnsupportedStatement
    return trees[0]


class _Places:
    """The positions of table references in the statement."""

    def __init__(self, inner: QueryText) -> None:
        self._inner = inner
        self._number = {token.start: number for number, token in enumerate(inner.tokens)}
        tokens = inner.tokens
        self._schemas = {
            token.text.strip('"').replace('""', '"').lower()
            for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
            if before.word == "." == after.word
        }
        """Names between two dots: tables whose columns may also be qualified by their schemas."""

    def scan(self, table: Table, utc: bool) -> Scan | None:
        """None if the name cannot be replaced."""
        names = [canonical_name(part.name) for part in table.node.parts]
        numbers = [self._number.get(part.meta.get("start", -1)) for part in table.node.parts]
        tokens, places = self._inner.tokens, self._inner.places
        if any(number is None for number in numbers):
            return None
        first, last = int(numbers[0] or 0), int(numbers[-1] or 0)
        if last - first != 2 * (len(names) - 1) or first == 0 or tokens[first - 1].word not in _BEFORE:
            return None
        alias = None
        if table.node.args.get("alias") is None:
            if names[-1] in self._schemas:  # an alias cannot be qualified by a schema
                return None
            alias = f" AS {quoted_name(table.node.name)}"
        version, span, snapshot_id = table.node.args.get("version"), None, None
        if version is not None:
            clause = tokens[last + 1 : last + 6]
            if [one.word for one in clause[:4]] != ["FOR", "VERSION", "AS", "OF"] or clause[4].kind != "number":
                return None
            span, snapshot_id = (places[clause[0].start], places[clause[4].end]), int(clause[4].text)
        catalog, schema, name = (None, None, *names)[-3:]
        predicate, named = _predicate(table, utc)
        return Scan(
            catalog,
            schema,
            str(name),
            start=places[tokens[first].start],
            end=places[tokens[last].end],
            name_start=places[tokens[last].start],
            alias_needed=alias,
            snapshot_id=snapshot_id,
            version_span=span,
            predicate=predicate,
            named=named,
            quoted=self._inner.quoted,
        )


def _predicate(table: Table, utc: bool) -> tuple[str | None, frozenset[str]]:
    """The predicate and the columns in it."""
    columns = table.columns or {}

    def kept(atom: Atom) -> Atom | None:
        if not isinstance(atom, ColumnComparison) or columns.get(atom.place[1]) == COMPUTED:
            return None
        return atom if utc or _zoneless(atom, columns) else None

    condition = weaken(table.predicate, kept)
    text = None if condition is None else sql_of(condition, lambda place: place[1])
    if condition is None or text is None or len(text) > PREDICATE_MAX:
        return None, frozenset()
    return text, frozenset(name for _, name in places_of(condition))


def _joins(table: Table, numbers: Mapping[Table, int]) -> tuple[Join, ...]:
    predicate = table.predicate
    found = dict.fromkeys(
        Join(numbers[part.of], tuple((place[1], column) for place, column in part.pairs))
        for part in (predicate.parts if isinstance(predicate, All) else (predicate,))
        if isinstance(part, Match) and isinstance(part.of, Table) and part.of is not table and part.of in numbers
    )
    return tuple(found)


def _zoneless(leaf: ColumnComparison, columns: Columns) -> bool:
    """Whether the comparison does not depend on the session's zone."""
    if not leaf.zones:
        return True
    kind = columns.get(leaf.place[1])
    if kind is None:
        return False
    return leaf.zones == ({ZONED} if kind.startswith("timestamptz") else {LOCAL})
