"""Tests that random queries give the same rows if each table has only the rows that the analysis requires.

DuckDB runs the original statement and the changed statement. The tables of the changed statement contain the rows
that match the predicates and have matching rows in joined tables, and sometimes other rows, as files do. DuckDB shares
no code with the analysis.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import duckdb
import msgspec
import pytest

from seamark.connector.analysis.scans import find_scans, read_from_view
from seamark.connector.plans.conditions import Like, write_sql
from seamark.connector.plans.quotes import quote_text
from seamark.connector.plans.scan import Join, Scan
from seamark.connector.plans.splices import splice
from seamark.formats.iceberg.expressions.binding import bind
from seamark.formats.iceberg.expressions.comparisons import resolve_literals
from seamark.formats.iceberg.expressions.expression_json import encode_expression, parse_expression
from seamark.formats.iceberg.expressions.sql import parse_sql
from seamark.formats.iceberg.types import schema as seamark_schema
from tests.connector.analysis.comparisons import MACROS, ZONE, ScopeColumn, StoredRelation, quote
from tests.connector.analysis.statements import RandomStatements
from tests.planner.lakes.schemas import Field, Schema
from tests.seeds import examples, mark_fast

QUERIES_PER_LAKE = 40
PATH_LENGTH_MAX = 3
"""The largest number of scans that a chain of joins connects."""


def draw_lakes(
    seed: int, lake_count: int
) -> Iterator[tuple[random.Random, RandomStatements, duckdb.DuckDBPyConnection]]:
    """Yield `lake_count` DuckDB databases with random tables, each with its generators of numbers and of statements."""
    for number in range(lake_count):
        rng = random.Random(f"{seed}/{number}")
        statements = RandomStatements(rng)
        # With one thread, rows with equal keys keep their order.
        with duckdb.connect(config={"threads": 1}) as connection:
            connection.execute(f"SET TimeZone = '{ZONE}'")
            for text in (*MACROS, *statements.make_tables()):
                connection.execute(text)
            yield rng, statements, connection


def count_rows(connection: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    return Counter(map(repr, connection.execute(text).fetchall()))


class KnownColumns:
    """The columns of each table that the analysis knows: all, some, or none."""

    def __init__(self, rng: random.Random, tables: list[StoredRelation]) -> None:
        # In three of five cases the analysis knows all tables, because it can do little without columns.
        known_tables = rng.choice([tables, tables, tables, [], [table for table in tables if rng.random() < 0.5]])
        self._columns = {
            known_table.name.lower(): {name.lower(): kind for name, kind in known_table.columns.items()}
            for known_table in known_tables
        }

    def __call__(self, names: tuple[str | None, str | None, str]) -> dict[str, str] | None:
        return self._columns.get(names[2])


def store_plan_tables(
    rng: random.Random, connection: duckdb.DuckDBPyConnection, text: str, scans: tuple[Scan, ...]
) -> tuple[str, list[str], int]:
    """Store the rows that each scan requires as a plan table.

    Some of the plans use no joins, and some contain additional rows.

    Returns:
        The statement over plan tables, the names of the plan tables, and the number of rows that only joins leave out.
    """
    replacements, plan_tables, omitted_count = [], [], 0
    has_extra_rows, has_join = rng.random() < 0.3, rng.random() < 0.8
    for number, scan in enumerate(scans):
        name = f"{scan.table}~plan~{number}"
        condition = "TRUE" if scan.predicate is None else f"({scan.predicate})"
        join_conditions = "".join(draw_join_conditions(rng, scans, (number,))) if has_join else ""
        # A third of the other rows. Files of a plan also contain rows that the statement does not need.
        extra_rows_condition = f" OR (rowid * 7 + {rng.randint(0, 9)}) % 3 = 0" if has_extra_rows else ""
        rows = f"FROM {quote(scan.table)} AS j1 WHERE"
        connection.execute(
            f"CREATE TABLE {quote(name)} AS SELECT * {rows} ({condition}{join_conditions}){extra_rows_condition}"
        )
        if join_conditions:
            omitted_count += connection.execute(
                f"SELECT count(*) {rows} {condition} AND NOT (TRUE{join_conditions})"
            ).fetchall()[0][0]
        replacements.append(read_from_view(scan, name))
        plan_tables.append(name)
    return splice(text, replacements), plan_tables, omitted_count


def draw_join_conditions(rng: random.Random, scans: tuple[Scan, ...], path: tuple[int, ...]) -> Iterator[str]:
    """Yield SQL conditions on the last scan of `path`, for some of its joins with scans outside the path.

    A condition compares a column with a maximum or minimum of the other scan, or is an EXISTS. The EXISTS contains
    conditions for the joins of the other scan.
    """

    def format_join(join: Join) -> str:
        other_scan = scans[join.scan]
        if join.is_extreme:
            return format_extreme(join, len(path), quote(other_scan.table))
        parts = [
            "TRUE",
            *([other_scan.predicate] if other_scan.predicate else []),
            *map(format_likes, other_scan.likes),
        ]
        parts += [] if join.where is None else [write_sql(join.where)]
        rows = f"SELECT * FROM {quote(other_scan.table)} WHERE {' AND '.join(parts)}"
        join_conditions = "".join(draw_join_conditions(rng, scans, (*path, join.scan)))
        return (
            f"EXISTS (SELECT 1 FROM ({rows}) AS j{len(path) + 1} WHERE"
            f" {format_equality(join, len(path))}{join_conditions})"
        )

    yield from format_joins(rng, scans[path[-1]].joins, path, format_join)


def format_joins(
    rng: random.Random, joins: tuple[Join, ...], path: tuple[int, ...], format_join: Callable[[Join], str]
) -> Iterator[str]:
    """Yield SQL conditions for some of the joins.

    Joins with the same `any_of` are alternatives. A row needs a match of one of them, unless it meets the exempt
    condition. Such a group becomes one condition with OR.

    Args:
        rng: It chooses the joins.
        joins: The joins of a scan.
        path: The scans that lead to this scan through joins. Joins with them are left out, to avoid cycles.
        format_join: Returns the condition of one join.
    """
    if len(path) > PATH_LENGTH_MAX:
        return
    for group_number in dict.fromkeys(join.any_of for join in joins):
        alternatives = [join for join in joins if join.any_of == group_number]
        if group_number is None:
            yield from (
                f" AND {format_join(join)}" for join in alternatives if join.scan not in path and rng.random() < 0.8
            )
        elif rng.random() < 0.8 and not any(join.scan in path for join in alternatives):
            exempt_conditions = (
                [] if alternatives[0].exempt_condition is None else [write_sql(alternatives[0].exempt_condition)]
            )
            yield f" AND ({' OR '.join([*map(format_join, alternatives), *exempt_conditions])})"


def format_extreme(join: Join, depth: int, table: str) -> str:
    """Return the condition that compares a row of `j{depth}` with a maximum or minimum.

    A join is exact if the statement computes this value from exactly the rows that meet `join.where`. If it uses only
    some of them, the value of all these rows limits the row on one side only.
    """
    ((own_column, other_column),) = join.on
    (op,) = join.ops
    rows = table if join.where is None else f"{table} WHERE {write_sql(join.where)}"
    extreme = f"(SELECT {join.transform}({quote(other_column)}) FROM {rows})"
    if op == "=" and not join.exact:
        op = "<=" if join.transform == "max" else ">="
    assert join.exact or op[0] == ("<" if join.transform == "max" else ">")
    return f"j{depth}.{quote(own_column)} {op} {extreme}"


def format_equality(join: Join, depth: int) -> str:
    """Return the condition that a row of the table `j{depth}` matches a row of `j{depth + 1}`."""
    pairs = [
        (f"j{depth}.{quote(left_column)}", f"j{depth + 1}.{quote(right_column)}")
        for left_column, right_column in join.on
    ]
    if join.transform in ("identity", "range"):
        ops = join.ops or ["="] * len(pairs)
        return " AND ".join(
            f"{own_column} {op} {other_column}" for (own_column, other_column), op in zip(pairs, ops, strict=True)
        )
    ((own_column, other_column),) = pairs
    # The cast through a text makes null of each value that is no timestamp, whatever the type of the column. A column
    # that is joined with a year can also contain the number of the year.
    start_of_period_condition = (
        f"date_trunc('{join.transform}', {own_column}) = TRY_CAST({other_column}::VARCHAR AS TIMESTAMP)"
    )
    year_condition = f"year({own_column}) = TRY_CAST({other_column}::VARCHAR AS BIGINT)"
    return (
        f"({start_of_period_condition} OR {year_condition})" if join.transform == "year" else start_of_period_condition
    )


def format_likes(alternatives: tuple[Like, ...]) -> str:
    texts = []
    for like in alternatives:
        column = quote(like.column[1])
        term = column if like.function is None else f"{like.function}({column})"
        escape = "" if like.escape is None else f" ESCAPE {quote_text(like.escape)}"
        texts.append(f"{term} {'NOT ' if like.negated else ''}LIKE {quote_text(like.pattern)}{escape}")
    return f"({' OR '.join(texts)})"


def check_binding(statements: RandomStatements, scan: Scan) -> None:
    """Check that the catalog uses the whole predicate, and binds its SQL and its expression to the same filter."""
    stored_table = next(table for table in statements.tables if table.name.lower() == scan.table)
    fields = [Field(number, name, False, kind) for number, (name, kind) in enumerate(stored_table.columns.items(), 1)]
    schema = msgspec.convert(Schema(0, tuple(fields)).build_json(), type=seamark_schema.Schema)
    bound_text = parse_sql(str(scan.predicate), schema, functions=True)
    if bound_text.unused:  # A double is not compared with a column whose values doubles cannot represent.
        assert all("e0" in part or "1e300" in part for part in bound_text.unused), (scan.predicate, bound_text.unused)
        return
    assert scan.filter is not None
    sent_filter = json.loads(json.dumps(encode_expression(scan.filter)))
    resolved_filter = resolve_literals(parse_expression(sent_filter, typed=True, functions=True), schema, ())
    bound_filters = [
        bind(expression, schema, (), case_sensitive=False) for expression in (resolved_filter, bound_text.expression)
    ]
    assert bound_filters[0] == bound_filters[1], (scan.predicate, sent_filter)


def run_campaign(seed: int, lake_count: int) -> Counter[str]:
    """Check random queries, and return the numbers of queries, scans and joins by their properties."""
    counts: Counter[str] = Counter()
    for rng, statements, connection in draw_lakes(seed, lake_count):
        for _ in range(QUERIES_PER_LAKE):
            text = statements.draw_query(depth=rng.choice([1, 1, 2, 2, 3]))
            try:
                expected = count_rows(connection, text)
            except duckdb.Error:
                counts["invalid"] += 1
                continue
            scans = find_scans(text, find_columns=KnownColumns(rng, statements.tables), today=datetime.now(UTC).date())
            counts["queries"] += 1
            counts["with rows"] += bool(expected)
            counts["understood"] += bool(scans)
            counts["scans"] += len(scans)
            counts["predicates"] += sum(scan.predicate is not None for scan in scans)
            counts["likes"] += sum(len(scan.likes) for scan in scans)
            counts["joins"] += sum(len(scan.joins) for scan in scans)
            counts += Counter(join.transform for scan in scans for join in scan.joins)
            counts["exact"] += sum(join.exact and join.where is not None for scan in scans for join in scan.joins)
            counts["alternatives"] += sum(join.any_of is not None for scan in scans for join in scan.joins)
            counts["rows left out by joins"] += check_same_rows(rng, connection, text, scans, expected, f"seed {seed}")
            for scan in scans:
                if scan.predicate is not None:
                    check_binding(statements, scan)
    return counts


def check_same_rows(
    rng: random.Random,
    connection: duckdb.DuckDBPyConnection,
    text: str,
    scans: tuple[Scan, ...],
    expected: Counter[str],
    seed: str,
) -> int:
    """Check that the statement over plan tables returns the expected rows.

    Returns:
        The number of rows that only joins leave out.
    """
    replaced_text, plan_tables, omitted_count = store_plan_tables(rng, connection, text, scans)
    scan_texts = "\n".join(f"{scan.table} [{scan.start}, {scan.end}): {scan.predicate} {scan.joins}" for scan in scans)
    note = f"{seed}\n{text}\n-- became\n{replaced_text}\n-- by\n{scan_texts}"
    try:
        rows = count_rows(connection, replaced_text)
    except duckdb.Error as error:
        raise AssertionError(f"{error}\n{note}") from error
    assert rows == expected, note
    for name in plan_tables:
        connection.execute(f"DROP TABLE {quote(name)}")
    return omitted_count


def check_campaign_is_effective(counts: Counter[str]) -> None:
    """Check that the campaign was effective.

    Most queries must be valid and analysed. Results with rows, predicates, joins and rows that joins leave out must
    occur often enough for the comparison to find errors.
    """
    assert counts["invalid"] < 0.15 * counts["queries"], counts
    assert counts["understood"] > 0.8 * counts["queries"], counts
    assert counts["with rows"] > 0.3 * counts["queries"], counts
    assert counts["predicates"] > 0.2 * counts["scans"], counts
    assert counts["joins"] > 0.05 * counts["scans"], counts
    assert counts["rows left out by joins"] > 0.2 * counts["queries"], counts


def draw_extreme_query(rng: random.Random, statements: RandomStatements) -> str | None:
    """Return a query that compares a random column with the maximum or minimum of rows, or None.

    The result is None if the column is not a long, date or timestamp, or if no comparison with it can be made.
    """
    table = rng.choice(statements.tables)
    name, kind = rng.choice(list(table.columns.items()))
    condition = statements.draw_extreme_comparison(ScopeColumn(name, kind, "o"), f"o.{quote(name)}", [])
    if condition is None or kind not in ("long", "date", "timestamp"):
        return None
    return f"SELECT * FROM {quote(table.name)} AS o WHERE {condition}"


def compare_extremes(seed: int, lake_count: int, *, is_in_with_clause: bool) -> Counter[str]:
    """Run queries that only compare columns with maximums or minimums. The analysis supports some of them exactly.

    Args:
        lake_count: The number of lakes.
        is_in_with_clause: Whether the maximums and minimums are columns of queries in a WITH clause.

    Returns:
        The number of joins with a maximum or minimum: `exact` if the query computes it from exactly the rows of the
        join, and `fewer` if the query uses only some of them.
    """
    counts: Counter[str] = Counter()
    for rng, statements, connection in draw_lakes(seed, lake_count):
        for _ in range(QUERIES_PER_LAKE):
            text = statements.draw_named_extreme_query() if is_in_with_clause else draw_extreme_query(rng, statements)
            if text is None:
                continue
            try:
                expected = count_rows(connection, text)
            except duckdb.Error:
                continue
            scans = find_scans(text, find_columns=KnownColumns(rng, statements.tables), today=datetime.now(UTC).date())
            joins = [join for scan in scans for join in scan.joins if join.is_extreme]
            counts += Counter("exact" if join.exact else "fewer" for join in joins)
            check_same_rows(rng, connection, text, scans, expected, f"seed {seed}")
    return counts


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("is_in_with_clause", [False, True])
@pytest.mark.parametrize("lake_count", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_plans_with_extremes_leave_out_no_row_of_the_answer(lake_count: int, is_in_with_clause: bool) -> None:
    counts = compare_extremes(14, lake_count, is_in_with_clause=is_in_with_clause)
    assert counts["exact"] > 0, counts
    assert counts["fewer"] > 0, counts


def test_statement_within_execute_immediate_is_analysed_like_a_plain_statement() -> None:
    for rng, statements, _ in draw_lakes(13, 3):
        known_columns = KnownColumns(rng, statements.tables)
        for _ in range(20):
            text = statements.draw_query(rng.choice([1, 2]))
            text_scans, inner_statement = find_scans(text, find_columns=known_columns), wrap_in_immediate(text)
            scans = find_scans(inner_statement, find_columns=known_columns)
            assert [scan.predicate for scan in scans] == [text_scan.predicate for text_scan in text_scans], text
            expected = wrap_in_immediate(
                splice(text, [read_from_view(scan, f"it's {scan.table}") for scan in text_scans])
            )
            assert splice(inner_statement, [read_from_view(scan, f"it's {scan.table}") for scan in scans]) == expected


def test_on_condition_resolves_names_of_its_join_and_of_outer_queries() -> None:
    """`d` in the innermost subquery is the outer `d`, because the inner `d` is joined later."""
    columns = {"t": {"k": "long"}, "u": {"k": "long"}}
    inner = "SELECT 1 FROM u AS a JOIN u AS b ON EXISTS (SELECT 1 FROM u AS c WHERE c.k = d.k) JOIN t AS d ON d.k = 2"
    text = f"SELECT k FROM t AS d WHERE EXISTS ({inner})"
    scans = find_scans(text, find_columns=lambda names: columns[names[2]])
    assert [scan.predicate for scan in scans] == [None, None, None, None, '"k" = 2']
    with duckdb.connect() as connection:
        for name in columns:
            connection.execute(f"CREATE TABLE {name} AS FROM (VALUES (1), (2), (3)) AS r (k)")
        expected = count_rows(connection, text)
        assert sum(expected.values()) == 3
        for seed in range(6):  # Each seed uses other joins and adds other rows.
            check_same_rows(random.Random(seed), connection, text, scans, expected, f"seed {seed}")


def test_lateral_subquery_resolves_names_of_the_left_side() -> None:
    """A join binds its tables more tightly than a comma.

    So engines differ in whether LATERAL sees `a` in `a, b CROSS JOIN LATERAL …`. The analysis finds no join there.
    """
    lateral = "LATERAL (SELECT c.k FROM u AS c WHERE c.k = a.k) AS q"

    def count_joins(sources: str) -> int:
        text = f"SELECT q.k FROM {sources} WHERE a.k = 2"
        return len(find_scans(text, find_columns=lambda _: {"k": "long"})[-1].joins)

    assert count_joins(f"t AS a CROSS JOIN {lateral}") == 1
    assert count_joins(f"t AS a JOIN t AS b ON a.k = b.k LEFT JOIN {lateral} ON TRUE") == 1
    assert count_joins(f"t AS a, {lateral}") == 1
    assert count_joins(f"t AS a, t AS b CROSS JOIN {lateral}") == 0


def wrap_in_immediate(text: str) -> str:
    return "EXECUTE IMMEDIATE '" + text.replace("'", "''") + "'"


@pytest.mark.parametrize("seed", mark_fast([11, 12], 1))
def test_random_queries_keep_their_rows_over_pruned_tables(seed: int) -> None:
    check_campaign_is_effective(run_campaign(seed, examples(4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 113))
def test_thousands_of_random_queries_keep_their_rows(seed: int) -> None:
    counts = run_campaign(seed, 40)
    check_campaign_is_effective(counts)
    assert all(counts[join_kind] > 0 for join_kind in ("likes", "range", "min", "max", "exact")), counts
