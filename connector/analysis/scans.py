"""The tables that a Trino statement reads, their positions in its text, and conditions on their needed rows.

    for scan in find_scans(statement, columns_of=…):
        scan.condition                       on the table's own columns, or None
        read_at_snapshot(scan, 4711)         for splices.splice

A statement that is not fully understood has no scans, and is sent unchanged. Supported are queries, EXPLAIN [ANALYZE]
of a query, EXECUTE IMMEDIATE of a query, and the text of a prepared query with its parameters (`lexer.parse_execute`).
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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import pairwise

from sqlglot import Dialect, exp
from sqlglot.errors import SqlglotError

from seamark.connector.analysis.conditions import ConditionReader
from seamark.connector.analysis.lexer import QueryText, Token, UnsupportedStatement, extract_query
from seamark.connector.analysis.queries import ColumnsOf, Queries, version_of
from seamark.connector.analysis.scopes import COMPUTED, Columns, Scope, Table, canonical_name, check_relations
from seamark.connector.plans.conditions import (
    All,
    Any,
    Atom,
    ColumnComparison,
    ColumnReference,
    Condition,
    Like,
    SemiJoin,
    all_of,
    any_of,
    comparisons_of,
    likes_of,
    move,
    weaken,
    within_limit,
    without_functions,
)
from seamark.connector.plans.literals import LOCAL, ZONED
from seamark.connector.plans.quotes import quoted_name
from seamark.connector.plans.scan import Join, Scan
from seamark.connector.plans.splices import Replacement
from seamark.formats.iceberg.expressions.like_patterns import is_valid_pattern
from seamark.formats.iceberg.expressions.sql_parser import parse_statements, tokens_in
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.protocol.wire import LIKES_MAX

STATEMENT_MAX = 200_000
_TRINO = Dialect.get_or_raise("trino")
_BEFORE = frozenset({"FROM", "JOIN", ",", "("})


def find_scans(
    statement: str,
    *,
    columns_of: ColumnsOf = lambda _: None,
    parameters: Sequence[str] = (),
    utc: bool = False,
    today: date | None = None,
) -> tuple[Scan, ...]:
    """The scans in the order of the text. Empty if the statement is not fully understood.

    `columns_of` gets (catalog, schema, table) and returns the columns; without it, names without a qualifier give no
    conditions if there are several tables. `parameters`: those of a prepared statement, in their form after USING.
    `utc`: the session's time zone is known to be UTC. `today`: the date in UTC, for conditions with the current time.
    """
    try:
        inner, queries, result = _read(statement, columns_of, parameters, today, utc=utc)
        result.push_down(None)
        positions = _ReferencePositions(inner)
        found = [(table, scan) for table in queries.tables if (scan := positions.scan(table, utc)) is not None]
    except (UnsupportedStatement, RecursionError):
        return ()
    found.sort(key=lambda one: one[1].start)
    numbers = {table: number for number, (table, _) in enumerate(found)}
    return tuple(replace(scan, joins=_joins(table, numbers, utc)) for table, scan in found)


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


def _read(
    statement: str, columns_of: ColumnsOf, parameters: Sequence[str], today: date | None = None, *, utc: bool = False
) -> tuple[QueryText, Queries, Scope]:
    """Raises UnsupportedStatement."""
    if len(statement) > STATEMENT_MAX:
        raise UnsupportedStatement
    inner = extract_query(statement, parameters)
    tree = _parsed(inner)
    check_relations(tree)
    _check_patterns(tree)
    casts_decimal = any(
        one.word == "AS" and other.word in ("DECIMAL", "DEC", "NUMERIC") for one, other in pairwise(inner.tokens)
    )
    names = frozenset(
        one.name.lower() for one in tree.find_all(exp.TableAlias, exp.Table) if isinstance(one.this, exp.Identifier)
    )
    queries = Queries(columns_of, ConditionReader(casts_decimal=casts_decimal, today=today, utc=utc), names)
    return inner, queries, queries.read(tree, {})


def _parsed(inner: QueryText) -> exp.Expr:
    """Raises UnsupportedStatement, also if sqlglot's tokens of the text differ from Trino's."""
    try:
        words = tokens_in(_TRINO, inner.text)
        trees = parse_statements(_TRINO, inner.text, words)
    except SqlglotError:  # also for a fault of sqlglot
        raise UnsupportedStatement from None
    starts, ends = {one.start for one in inner.tokens}, {one.end for one in inner.tokens}
    if any(word.start not in starts or word.end + 1 not in ends for word in words):
        raise UnsupportedStatement
    if len(trees) != 1 or trees[0] is None:
        raise UnsupportedStatement
    return trees[0]


def _check_patterns(tree: exp.Expr) -> None:
    """Raises UnsupportedStatement for a LIKE pattern that the engine refuses, but only where it compares a row."""
    for node in tree.find_all(exp.Escape):
        texts = [node.this.expression, node.expression] if isinstance(node.this, exp.Like | exp.ILike) else []
        if all(isinstance(one, exp.Literal) and one.is_string for one in texts) and texts:
            pattern, escape = (str(one.this) for one in texts)
            if not is_valid_pattern(pattern, escape):
                raise UnsupportedStatement("a LIKE pattern with an invalid escape")


class _ReferencePositions:
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
        tokens, offsets = self._inner.tokens, self._inner.offsets
        if any(number is None for number in numbers):
            return None
        first, last = int(numbers[0] or 0), int(numbers[-1] or 0)
        if last - first != 2 * (len(names) - 1) or first == 0 or tokens[first - 1].word not in _BEFORE:
            return None
        has_alias = table.node.args.get("alias") is not None
        alias = None if has_alias else f" AS {quoted_name(table.node.name)}"
        version, span, at = table.node.args.get("version"), None, None
        if version is not None:
            clause, at = tokens[last + 1 : last + 6], version_of(version)
            if [one.word for one in clause[:4]] != ["FOR", "VERSION", "AS", "OF"] or _given_in(clause[4]) != at:
                return None
            span = offsets[clause[0].start], offsets[clause[4].end]
        catalog, schema, name = (None, None, *names)[-3:]
        return Scan(
            catalog,
            schema,
            str(name),
            start=offsets[tokens[first].start],
            end=offsets[tokens[last].end],
            name_start=offsets[tokens[last].start],
            alias_needed=alias,
            snapshot_id=at if isinstance(at, int) else None,
            version_span=span,
            condition=_condition(table, utc),
            likes=_likes(table),
            quoted=self._inner.quoted,
            renamable=has_alias or names[-1] not in self._schemas,
            ref=at if isinstance(at, str) else None,
        )


def _given_in(token: Token) -> int | str | None:
    """The number or text that the token is."""
    if token.kind == "number" and token.text.isdigit():
        return int(token.text)
    return token.text[1:-1].replace("''", "'") if token.kind == "string" else None


def _condition(table: Table, utc: bool) -> Condition | None:
    """The condition without its joins, and without comparisons that the catalog would evaluate in another way."""
    return _evaluated(table, all_of([table.predicate, *_of_partners(table)]), utc)


def _evaluated(table: Table, condition: Condition | None, utc: bool) -> Condition | None:
    """The part of a condition on the table's columns that the catalog evaluates as Trino does."""
    columns = table.columns or {}

    def kept(atom: Atom) -> Atom | None:
        if not isinstance(atom, ColumnComparison) or columns.get(atom.column[1]) == COMPUTED:
            return None
        if "." in atom.column[1] and not atom.rejects_null:  # not every file format counts a field of a null struct
            return None
        return atom if utc or _zoneless(atom, columns) else None

    return within_limit(weaken(condition, kept))


def _has_field(atom: Atom) -> bool:
    return isinstance(atom, ColumnComparison) and "." in atom.column[1]


def _likes(table: Table) -> tuple[tuple[Like, ...], ...]:
    """Those on columns that are known to be stored strings, as many as a request takes."""
    strings = {name for name, kind in (table.columns or {}).items() if kind == "string" and "." not in name}
    found = [either for either in likes_of(table.predicate) if all(one.column[1] in strings for one in either)]
    while sum(map(len, found)) > LIKES_MAX:
        found.pop()
    return tuple(found)


def _of_partners(table: Table) -> Iterator[Condition | None]:
    """Conditions on the columns of joins: a partner meets its own conditions, and has equal values."""
    for semi_join in _semi_joins(table):
        for reference, column in semi_join.pairs if semi_join.transform == IDENTITY else ():
            partner = semi_join.of.predicate if isinstance(semi_join.of, Table) else None
            alone = comparisons_of(partner)
            yield move(alone, partial(_moved, column, reference))


def _moved(column: str, to: ColumnReference, reference: ColumnReference) -> ColumnReference | None:
    return to if reference[1] == column else None


def _semi_joins(table: Table) -> list[SemiJoin]:
    predicate = table.predicate
    parts = predicate.parts if isinstance(predicate, All) else (predicate,)
    return [part for part in parts if isinstance(part, SemiJoin)]


def _joins(table: Table, numbers: Mapping[Table, int], utc: bool) -> tuple[Join, ...]:
    """Those of the condition's conjuncts that are semi-joins, and of disjunctions with semi-joins the alternatives."""
    predicate = table.predicate
    parts = predicate.parts if isinstance(predicate, All) else (predicate,)
    found: dict[Join, None] = {}
    for number, part in enumerate(parts):
        if isinstance(part, SemiJoin):
            join = _join(part, table, numbers, utc)
            found |= {} if join is None else {join: None}
        elif isinstance(part, Any):
            found |= dict.fromkeys(_alternatives(part, table, numbers, utc, number))
    return tuple(found)


def _join(semi_join: SemiJoin, table: Table, numbers: Mapping[Table, int], utc: bool) -> Join | None:
    if not isinstance(semi_join.of, Table) or semi_join.of is table or semi_join.of not in numbers:
        return None
    on = tuple((reference[1], column) for reference, column in semi_join.pairs)
    return Join(numbers[semi_join.of], on, semi_join.transform, _evaluated(semi_join.of, semi_join.where, utc))


def _alternatives(either: Any, table: Table, numbers: Mapping[Table, int], utc: bool, number: int) -> list[Join]:
    """Of each branch, a condition on the table's own columns or a join; none if a branch has neither."""
    joins: dict[Join, None] = {}
    own: list[Condition | None] = []
    for branch in either.parts:
        # Rows of a dimension are not filtered by fields of structs, nor by functions.
        own_columns = without_functions(weaken(branch, lambda atom: None if _has_field(atom) else atom))
        condition = _evaluated(table, own_columns, utc)
        if condition is not None:
            own.append(condition)
            continue
        semi_joins = [
            one for one in (branch.parts if isinstance(branch, All) else (branch,)) if isinstance(one, SemiJoin)
        ]
        found = next((join for one in semi_joins if (join := _join(one, table, numbers, utc)) is not None), None)
        if found is None:
            return []
        joins[found] = None
    unless = any_of(own) if own else None
    return [replace(one, any_of=number, unless=unless) for one in joins]


def _zoneless(leaf: ColumnComparison, columns: Columns) -> bool:
    """Whether the comparison does not depend on the session's zone."""
    if not leaf.zones:
        return True
    kind = columns.get(leaf.column[1])
    if kind is None:
        return False
    return leaf.zones == ({ZONED} if kind.startswith("timestamptz") else {LOCAL})
