"""Random DuckDB statements give the same rows if each table has only the rows that the analysis requires.

The test resembles `tests/connector/analysis/test_scans_oracle.py`, but the statements pass through Trino's
dialect. A predicate that names a double is false for NaN here, as in the catalog, although DuckDB differs.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import duckdb
import pytest

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import find_scans
from seamark.connector.duckdb.statements import DuckDBStatement, mark_name
from seamark.connector.plans.conditions import write_sql
from seamark.connector.plans.quotes import quote_name
from seamark.connector.plans.scan import Join, Scan
from seamark.connector.plans.splices import Replacement, splice
from tests.connector.analysis.comparisons import StoredRelation
from tests.connector.analysis.test_scans_oracle import format_equality, format_extreme, format_joins, format_likes
from tests.connector.duckdb.loose_statements import LooseStatements
from tests.seeds import first_seed

QUERIES_PER_LAKE = 40


class MarkedTables:
    """The tables of one statement. A mark is the name that replaces a table in the analysed text."""

    def __init__(self, scans: Sequence[Scan], stored_relations: dict[str, StoredRelation]) -> None:
        self.scans = scans
        self._stored_relations = stored_relations

    def is_known(self, number: int) -> bool:
        return self.scans[number].table in self._stored_relations

    def get_quoted_name(self, number: int) -> str:
        return quote_name(self._stored_relations[self.scans[number].table].name)

    def write_condition(self, number: int) -> str:
        scan = self.scans[number]
        text = scan.predicate or "TRUE"
        for name, kind in self._stored_relations[scan.table].columns.items():
            if kind == "double":
                column = quote_name(name.lower())
                number_or_null = f"(CASE WHEN isnan({column}) THEN NULL ELSE {column} END)"
                text = re.sub(f"{re.escape(column)}(?! IS NULL)", lambda _, value=number_or_null: value, text)
        return f"({text})"

    def draw_join_conditions(self, rng: random.Random, path: tuple[int, ...]) -> Iterator[str]:
        """Yield SQL conditions on the last scan of `path`, for some of its joins with scans outside the path.

        A condition is a comparison with a minimum or maximum of the other table, or an EXISTS with the other table.
        """

        def format_join(join: Join) -> str:
            if join.is_extreme:
                return format_extreme(join, len(path), self.get_quoted_name(join.scan))
            join_conditions = "".join(self.draw_join_conditions(rng, (*path, join.scan)))
            parts = [self.write_condition(join.scan), *map(format_likes, self.scans[join.scan].likes)]
            parts += [] if join.where is None else [write_sql(join.where)]
            rows = f"SELECT * FROM {self.get_quoted_name(join.scan)} WHERE {' AND '.join(parts)}"
            return (
                f"EXISTS (SELECT 1 FROM ({rows}) AS j{len(path) + 1} WHERE"
                f" {format_equality(join, len(path))}{join_conditions})"
            )

        joins = self.scans[path[-1]].joins
        # Joins with the same `any_of` are alternatives, so they count only if all their tables are known.
        known_joins = [
            join
            for join in joins
            if all(self.is_known(other.scan) for other in joins if other.any_of == join.any_of is not None)
        ]
        yield from format_joins(rng, tuple(join for join in known_joins if self.is_known(join.scan)), path, format_join)


def find_statement_scans(
    rng: random.Random, statement: DuckDBStatement, tables: list[StoredRelation]
) -> tuple[dict[str, StoredRelation], tuple[Scan, ...]]:
    """Return the stored tables of the statement, and the scans that are found in it.

    The tables are by mark, the name that replaces a table in the analysed text. In some cases, a table is not in the
    catalog, so its columns are unknown.
    """
    if rng.random() < 0.3:
        tables = [table for table in tables if rng.random() < 0.5]
    by_name = {table.name.lower(): table for table in tables}
    stored_relations = {
        number: by_name[reference.parts[-1].lower()]
        for number, reference in enumerate(statement.references)
        if reference is not None and reference.parts[-1].lower() in by_name
    }
    columns = {
        number: {name.lower(): kind for name, kind in relation.columns.items()}
        for number, relation in stored_relations.items()
    }
    marks = {mark_name(number): number for number in stored_relations}
    text = statement.to_marked_text(columns, utc=False)
    today = datetime.now(UTC).date()
    scans = find_scans(text, find_columns=lambda names: columns.get(marks.get(names[2], -1)), today=today)
    tables_by_mark = {mark: stored_relations[number] for mark, number in marks.items()}
    return tables_by_mark, scans


def replace_tables_by_plans(
    rng: random.Random, connection: duckdb.DuckDBPyConnection, statement: DuckDBStatement, tables: MarkedTables
) -> str:
    """Create a pruned copy of each known table. Return the statement, which then reads the copies."""
    replacements = []
    for number, scan in enumerate(tables.scans):
        if not tables.is_known(number):
            continue
        reference = next(
            scan_reference
            for reference_number, scan_reference in enumerate(statement.references)
            if scan_reference is not None and mark_name(reference_number) == scan.table
        )
        join_conditions = "".join(tables.draw_join_conditions(rng, (number,)))
        name = f"plan~{number}"
        condition = f"{tables.write_condition(number)}{join_conditions}"
        connection.execute(
            f"CREATE OR REPLACE TABLE {quote_name(name)} AS"
            f" SELECT * FROM {tables.get_quoted_name(number)} AS j1 WHERE {condition}"
        )
        text = quote_name(name) + (reference.alias_needed or "")
        replacements.append(Replacement(reference.start, reference.end, text))
    return splice(statement.text, replacements)


def run_campaign(seed: int, lakes: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number in range(lakes):
        rng = random.Random(f"{seed}/{number}")
        statements = LooseStatements(rng)
        with duckdb.connect() as connection:
            for text in statements.make_tables():
                connection.execute(text)
            for _ in range(QUERIES_PER_LAKE):
                check_random_query(rng, statements, connection, counts, f"seed {seed}/{number}")
    return counts


def check_random_query(
    rng: random.Random,
    statements: LooseStatements,
    connection: duckdb.DuckDBPyConnection,
    counts: Counter[str],
    seed: str,
) -> None:
    """Check that a random query returns the same rows after its tables are replaced by their needed rows.

    The outcome is added to `counts`. "understood" are queries in which the analysis has found tables, and "periods"
    those with a join of a date with a day, month or year.
    """
    text = statements.draw_query(rng.choice([1, 1, 2, 2, 3]))
    try:
        expected = _count_rows(connection, text)
    except duckdb.Error:
        counts["invalid"] += 1
        return
    counts["queries"] += 1
    try:
        statement = DuckDBStatement(text)
        tables_by_mark, scans = find_statement_scans(rng, statement, statements.tables)
    except UnsupportedStatement as refusal:
        counts[f"unsupported: {refusal}"] += 1
        counts["unsupported"] += 1
        return
    counts["understood"] += bool(scans)
    counts["scans"] += len(scans)
    counts["predicates"] += sum(scan.predicate is not None for scan in scans if scan.table in tables_by_mark)
    counts["joins"] += sum(len(scan.joins) for scan in scans)
    counts["periods"] += any(join.transform != "identity" for scan in scans for join in scan.joins)
    replaced_text = replace_tables_by_plans(rng, connection, statement, MarkedTables(scans, tables_by_mark))
    context = f"{seed}\n{text}\n-- became\n{replaced_text}\n-- by\n" + "\n".join(
        f"{scan.table}: {scan.predicate} {scan.joins}" for scan in scans
    )
    try:
        rows = _count_rows(connection, replaced_text)
    except duckdb.Error as error:
        raise AssertionError(f"{error}\n{context}") from error
    # In 20 runs, DuckDB itself may return different rows for the unchanged statement, for example with LIMIT.
    if rows != expected and any(_count_rows(connection, text) != expected for _ in range(20)):
        counts["unstable"] += 1
        return
    assert rows == expected, context


def _count_rows(connection: duckdb.DuckDBPyConnection, text: str) -> Counter[str]:
    return Counter(map(repr, connection.execute(text).fetchall()))


def check_campaign_counts(counts: Counter[str]) -> None:
    assert counts["understood"] > 0.6 * counts["queries"], counts
    assert counts["predicates"] > 0.07 * counts["scans"], counts
    assert counts["joins"] > 0.03 * counts["scans"], counts


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("WITH q AS (SELECT a FROM t WHERE b = ?) SELECT q.a FROM q WHERE ? = q.a LIMIT ?", ["x", 2, 3]),
        ("WITH q AS (SELECT a FROM t WHERE b = $2) SELECT q.a FROM q WHERE $1 = q.a", [2, "x"]),
        ("WITH q AS (SELECT a FROM t WHERE b = $text) SELECT q.a FROM q WHERE $n = q.a", {"n": 2, "text": "x"}),
    ],
)
def test_parameter_is_replaced_by_the_value_at_its_position(text: str, parameters: Any) -> None:
    columns = {"a": "long", "b": "string"}
    marked_text = DuckDBStatement(text, parameters).to_marked_text({0: columns}, utc=False)
    (scan,) = find_scans(marked_text, find_columns=lambda _: columns)
    assert scan.predicate is not None
    assert set(scan.predicate.strip("()").split(" AND ")) == {"\"b\" = 'x'", '"a" = 2'}


def test_random_duckdb_statements_keep_their_rows_over_pruned_tables() -> None:
    check_campaign_counts(run_campaign(first_seed(), 4))


@pytest.mark.slow
def test_many_random_duckdb_statements_keep_their_rows_over_pruned_tables() -> None:
    counts = run_campaign(first_seed() + 1, 400)
    check_campaign_counts(counts)
    assert counts["unstable"] < counts["queries"] / 500


def test_condition_on_a_list_with_null_is_ignored() -> None:
    """DuckDB evaluates `3 NOT IN [1, NULL]` to true, and `3 NOT IN (1, NULL)` to null."""
    assert duckdb.sql("SELECT 3 NOT IN [1, NULL], 3 NOT IN (1, NULL)").fetchall() == [(True, None)]
    for condition, has_predicate in (("NOT IN [1, NULL]", False), ("NOT IN (1, NULL)", False), ("NOT IN [1, 2]", True)):
        assert _has_predicate(f"SELECT * FROM t WHERE a {condition}") == has_predicate
    for name in ("contains", "list_contains", "array_contains", "list_has"):
        assert not _has_predicate(f"SELECT * FROM t WHERE NOT {name}([1, NULL], a)")


@pytest.mark.parametrize(("condition", "negated"), [("ILIKE", False), ("NOT ILIKE", True), ("NOT LIKE", True)])
def test_negated_pattern_stays_negated(condition: str, negated: bool) -> None:
    columns = {"a": "long", "b": "string"}
    text = f"SELECT t.a FROM t JOIN u ON t.a = u.a WHERE t.b {condition} '%b%'"
    marked_text = DuckDBStatement(text).to_marked_text({0: columns, 1: columns}, utc=True)
    scan = find_scans(marked_text, find_columns=lambda _: columns)[0]
    assert [[like.negated for like in alternatives] for alternatives in scan.likes] == [[negated]]


@pytest.mark.parametrize(
    ("statement", "predicate"),
    [
        ("SELECT * FROM t JOIN (VALUES (1, 'x'), (2, NULL)) AS v (k, l) ON a = v.k", '"a" IN (1, 2)'),
        ("SELECT * FROM t JOIN (VALUES (1), (2)) AS v ON a = col0", '"a" IN (1, 2)'),
        ("WITH v (k) AS (VALUES (1), (2)) SELECT * FROM t JOIN v ON a = k", '"a" IN (1, 2)'),
        ("SELECT * FROM t JOIN (VALUES ('1')) AS v (k) ON a = k", None),
        ("SELECT * FROM t, unnest([1, 2]) AS u (x) WHERE a = x", '"a" IN (1, 2)'),
        ("SELECT * FROM t WHERE a IN (SELECT unnest([1, 2]))", '"a" IN (1, 2)'),
        ("SELECT * FROM t WHERE b IN (SELECT unnest([1, 2]))", None),
        ("SELECT * FROM t WHERE list_contains([1, 2], a)", '"a" IN (1, 2)'),
        (
            "SELECT * FROM t WHERE (a, b) IN ((1, 'x'), (2, 'y'))",
            '(("a" = 1 AND "b" = \'x\') OR ("a" = 2 AND "b" = \'y\'))',
        ),
        ("SELECT * FROM t WHERE (a, b) IN ((1, NULL), (2, 'y'))", None),  # A row value contains null.
        ("SELECT * FROM t WHERE a // 100 = 5", '("a" >= 500 AND "a" <= 599)'),
        ("SELECT * FROM t WHERE a / 100 = 5", None),  # In DuckDB, `/` returns a float.
        ("SELECT * FROM t WHERE a BETWEEN 1200 AND 1200 + 11", '"a" BETWEEN 1200 AND 1211'),
        ("SELECT * FROM t WHERE a IN (1 - (2 + 3), -4 - -6)", '"a" IN (-4, 2)'),
        ("SELECT * FROM t WHERE a = 2147483647 + 1", None),  # The statement must fail, as it does without a plan.
        ("SELECT * FROM t WHERE a = 1 + 0.5", None),
        ("SELECT * FROM t WHERE a = 1 + '2'", None),
        ("SELECT * FROM t WHERE b = 1 + 2", None),
        ("SELECT * FROM t WHERE CASE WHEN a < 5 THEN 'old' ELSE 'new' END = 'old'", '"a" < 5'),
        ("SELECT * FROM t WHERE CASE b WHEN 1 THEN 'old' END = 'old'", None),  # b is a string.
        ("SELECT * FROM t WHERE CASE WHEN b = 'x' THEN a ELSE FALSE END", "\"b\" = 'x'"),
        ("SELECT sum(CASE WHEN a = 1 THEN 2 END), max(CASE b WHEN 'x' THEN a END) FROM t", '("b" = \'x\' OR "a" = 1)'),
        ("SELECT sum(CASE WHEN a = 1 THEN 2 END), count_if(a = 3) FROM t", None),
        ("SELECT count_if(b = 'x') FILTER (a = 3) FROM t", '"a" = 3'),
        ("SELECT count(), sum(CASE WHEN a = 1 THEN 2 END) FROM t WHERE b = 'x'", "\"b\" = 'x'"),
        ("SELECT * FROM t WHERE a = 1 QUALIFY row_number() OVER (PARTITION BY b) = 1", '"a" = 1'),
        ("SELECT * FROM (SELECT * FROM t QUALIFY count(*) OVER (PARTITION BY a) = 1) WHERE a = 1", '"a" = 1'),
        ("SELECT * FROM (SELECT * FROM t QUALIFY count(*) OVER (PARTITION BY b) = 1) WHERE a = 1", None),
        ("SELECT count(a) FILTER (a = 1) FROM t QUALIFY sum(count(*)) OVER () > 5", None),
    ],
)
def test_conditions_in_duckdb_spelling_become_predicates(statement: str, predicate: str | None) -> None:
    """None means that the analysis cannot leave out rows, for example because the operands differ in type."""
    columns = {"a": "long", "b": "string"}
    marked_text = DuckDBStatement(statement).to_marked_text({0: columns}, utc=True)
    (scan,) = find_scans(marked_text, find_columns=lambda _: columns)
    assert scan.predicate == predicate


@pytest.mark.parametrize(
    ("statement", "predicate"),
    [
        (
            "WITH q AS ({0}), r AS ({0}) SELECT * FROM (SELECT * FROM q UNION ALL SELECT * FROM r) WHERE a = 1",
            '"a" = 1',
        ),
        ("WITH q AS ({0}) SELECT * FROM (SELECT * FROM q UNION SELECT * FROM ({0})) WHERE a = 1", '"a" = 1'),
        ("WITH q AS ({0}), r AS (SELECT * FROM q UNION ALL {0}) SELECT * FROM r WHERE a = 1", '"a" = 1'),
        ("WITH q AS ({0}), r AS ({1}) SELECT * FROM (SELECT * FROM q UNION ALL SELECT * FROM r) WHERE a = 1", None),
        ("SELECT * FROM (SELECT * FROM t UNION ALL SELECT * FROM t) WHERE a = 1", "refused"),
        ("WITH q (x, y) AS ({0}) SELECT * FROM (SELECT * FROM q UNION ALL {0}) WHERE a = 1", "refused"),
        ("WITH q AS (SELECT * FROM q) SELECT * FROM (SELECT * FROM q UNION ALL {0}) WHERE a = 1", "refused"),
        ("WITH r AS (SELECT * FROM q UNION ALL {0}), q AS ({0}) SELECT * FROM r WHERE a = 1", "refused"),
        ("WITH q AS ({0}) SELECT * FROM (SELECT * FROM q, t UNION ALL {0}) WHERE a = 1", "refused"),
    ],
)
def test_star_of_a_set_operation_has_the_columns_of_its_queries(statement: str, predicate: str | None) -> None:
    columns = {"a": "long", "b": "string"}
    text = statement.format("SELECT a, b FROM t", "SELECT b, a FROM t")
    if predicate == "refused":
        with pytest.raises(UnsupportedStatement, match="columns without names"):
            DuckDBStatement(text)
        return
    duckdb_statement = DuckDBStatement(text)
    marked_text = duckdb_statement.to_marked_text(
        dict.fromkeys(range(len(duckdb_statement.references)), columns), utc=True
    )
    assert {scan.predicate for scan in find_scans(marked_text, find_columns=lambda _: columns)} == {predicate}


@pytest.mark.parametrize(
    ("statement", "predicate"),
    [
        ("SELECT s.info.zone FROM sea.shop.facts s WHERE s.info.zone = 7", '"info.zone" = 7'),
        ("SELECT * FROM shop.facts WHERE facts.info.zone = 7", '"info.zone" = 7'),
        ("SELECT * FROM shop.facts WHERE shop.facts.a = 7", "refused"),
        ("SELECT * FROM s.info WHERE s.info.zone = 7", "refused"),
        ("SELECT * FROM facts s, info WHERE s.info.zone = 7", "refused"),
        ("SELECT * FROM facts s JOIN t info ON s.info.zone = 7", "refused"),
    ],
)
def test_field_of_a_struct_can_be_qualified_by_its_relation(statement: str, predicate: str) -> None:
    columns = {"a": "long", "info": "nested", "info.zone": "int"}
    if predicate == "refused":
        with pytest.raises(UnsupportedStatement, match="qualified by its schema"):
            DuckDBStatement(statement)
        return
    marked_text = DuckDBStatement(statement).to_marked_text({0: columns}, utc=True)
    (scan,) = find_scans(marked_text, find_columns=lambda _: columns)
    assert scan.predicate == predicate


@pytest.mark.parametrize("total", ["0.06 - 0.01", "1 + 0.50", "-0.5 + 0.25", "0.1 + 0.2 + 0.3", "12345678.9 - 0.0001"])
def test_decimal_sum_has_the_value_that_duckdb_computes(total: str) -> None:
    columns = {"a": "decimal(15, 4)", "f": "double"}
    marked_text = DuckDBStatement(f"SELECT * FROM t WHERE a >= {total} AND f < {total}").to_marked_text(
        {0: columns}, utc=True
    )
    (scan,) = find_scans(marked_text, find_columns=lambda _: columns)
    assert duckdb.sql(f"SELECT {total}").fetchall() == [(Decimal(str(scan.predicate).removeprefix('"a" >= ')),)]


def test_output_of_a_subquery_hides_an_outer_column_of_the_same_name() -> None:
    """DuckDB resolves `q` in the WHERE of the subquery to the output `u.x`."""
    text = "SELECT d.q FROM (SELECT a AS q FROM t) d WHERE EXISTS (SELECT u.x AS {} FROM u WHERE u.k = q)"
    with duckdb.connect() as con:
        con.execute("CREATE TABLE t AS FROM (VALUES (1), (3)) r (a)")
        con.execute("CREATE TABLE u AS FROM (VALUES (1, 1), (2, 7)) r (k, x)")
        rows = [con.execute(text.format(name)).fetchall() for name in ("other", "q")]
    assert rows == [[(1,)], [(1,), (3,)]]
    columns = {0: {"a": "int"}, 1: {"k": "int", "x": "int"}}
    for name, is_joined in (("other", True), ("q", False), ("Q", False)):
        marked_text = DuckDBStatement(text.format(name)).to_marked_text(columns, utc=True)
        scans = find_scans(marked_text, find_columns=lambda names: columns[int(names[2][-1])])
        assert [len(scan.joins) for scan in scans] == [is_joined, is_joined], name


def test_non_ascii_letters_in_names_are_case_sensitive() -> None:
    text = 'SELECT * FROM (SELECT a AS "é", b AS "{}" FROM t) WHERE "é" = 1'
    with duckdb.connect() as con:
        con.execute("CREATE TABLE t AS FROM (VALUES (1, 7)) r (a, b)")
        assert con.execute(text.format("É")).fetchall() == [(1, 7)]
    with pytest.raises(UnsupportedStatement, match="beyond ASCII"):
        DuckDBStatement(text.format("É"))
    for name in ("x", "X"):
        DuckDBStatement(text.format(name) + f" AND {name} = 7")


def test_condition_of_count_if_leaves_no_files_out() -> None:
    """DuckDB's count_if is null without rows, and zero if no row matches, so rows that do not match must be read."""
    rows = "FROM (VALUES (1)) AS t (a)"
    assert duckdb.sql(f"SELECT count_if(a = 2) {rows}").fetchall() == [(0,)]
    assert duckdb.sql(f"SELECT count_if(a = 2) {rows} WHERE a = 2").fetchall() == [(None,)]
    for name in ("count_if", "countif"):
        marked_text = DuckDBStatement(f"SELECT {name}(a = 2) FROM t").to_marked_text({0: {"a": "int"}}, utc=True)
        (scan,) = find_scans(marked_text, find_columns=lambda _: {"a": "int"})
        assert scan.predicate is None


def _has_predicate(statement: str) -> bool:
    marked_text = DuckDBStatement(statement).to_marked_text({0: {"a": "int"}}, utc=True)
    (scan,) = find_scans(marked_text, find_columns=lambda _: {"a": "int"})
    return scan.predicate is not None
