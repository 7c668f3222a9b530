"""Tests that queries of many forms return the same rows over groups as over rows, in DuckDB and without a server.

Some Arrow tables represent the files of a table, and groups replace some of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import duckdb
import pyarrow as pa
import pytest

from seamark.connector.analysis.lexer import UnsupportedStatement
from seamark.connector.analysis.scans import parse_query
from seamark.connector.cubes.dialects import TRINO, NotFromCube
from seamark.connector.cubes.statements import CubeTable, translate_statement
from seamark.connector.duckdb.cube_queries import GROUPS, DuckDBCubeQuery
from seamark.connector.duckdb.statements import DuckDBStatement
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import IndexDefinition, define_index
from seamark.formats.index.keys.measures import parse_measure
from seamark.formats.index.kinds.cube import group_rows
from seamark.formats.runtime.errors import BadRequest
from tests.connector.cubes.test_duckdb_statements import count_rows, do_all_rows_match, store_rows
from tests.connector.cubes.wide_queries import COLUMNS, DUCKDB, WideQueries, draw_rows
from tests.seeds import first_seed

_TYPES = {
    pa.int32(): "int",
    pa.int64(): "long",
    pa.float32(): "float",
    pa.float64(): "double",
    pa.string(): "string",
    pa.date32(): "date",
    pa.timestamp("us"): "timestamp",
    pa.timestamp("us", "UTC"): "timestamptz",
    pa.bool_(): "boolean",
}
SCHEMA = Schema(
    tuple(
        Field(number, name, required=False, type=_TYPES.get(kind) or f"decimal({kind.precision}, {kind.scale})")
        for number, (name, kind) in enumerate(COLUMNS.items(), 1)
    )
)


def quote_terms(terms: Sequence[str]) -> list[str]:
    """Return dimensions or measures with backticks instead of double quotes, as an index definition writes them.

    A term with a space and without parentheses is the name of a column, so it gets backticks.
    """
    return [f"`{term}`" if " " in term and "(" not in term else term.replace('"', "`") for term in terms]


def define_cube(dimensions: list[str], measures: list[str]) -> tuple[IndexDefinition, list[str]]:
    """Return the definition of a cube, and the measures that a cube can have."""
    possible_measures = []
    for measure in measures:
        try:
            parse_measure(quote_terms([measure])[0], SCHEMA)
        except BadRequest:
            continue
        possible_measures.append(measure)
    terms, quoted_measures = quote_terms(dimensions), quote_terms(possible_measures)
    return define_index("cube", "cube", terms, SCHEMA, measures=quoted_measures), possible_measures


def build_entry(rng: random.Random, cube: IndexDefinition, file: pa.Table) -> pa.RecordBatch | None:
    """Return the groups of a file, or None. For a file without groups, a query reads the rows.

    The result is None in three of ten cases, and if a value does not fit its type.
    """
    columns = {field.id: file[field.name] for field in SCHEMA.fields}
    try:
        return group_rows(cube.terms, cube.measures, columns) if rng.random() < 0.7 else None
    except ValueError:  # A value does not fit into its type.
        return None


def run_case(con: duckdb.DuckDBPyConnection, seed: int, queries: int) -> Counter[str]:
    """Compare random queries of one random table with and without one cube.

    Returns:
        The number of queries by outcome: "invalid: " and DuckDB's error, "no: " and the reason for which the cube
        cannot answer, "rows" if no file has usable groups, "overflow", "cube", or "cube and condition" if files must
        also be checked for a condition.
    """
    rng = random.Random(seed)
    wide_queries, counts = WideQueries(rng, DUCKDB), Counter[str]()
    dimensions, measures = wide_queries.draw_cube()
    cube, measures = define_cube(dimensions, measures)
    overflows = rng.random() < 0.2
    files = [draw_rows(rng, rng.choice((0, 1, 20, 40)), overflows=overflows) for _ in range(rng.randint(1, 4))]
    entries = [build_entry(rng, cube, file) for file in files]
    store_rows(con, "t", pa.concat_tables(files))
    for _ in range(queries):
        text = wide_queries.draw_query(dimensions, measures, "t")
        failure: duckdb.Error | None = None
        rows = Counter[str]()
        try:
            expected = con.sql(text)
            rows = count_rows(expected)
        except duckdb.Error as error:
            failure = error
            counts[f"invalid: {error} {text}"[:200]] += 1
        try:
            statement = DuckDBStatement(text)
            (reference,) = statement.references
            assert reference is not None
            query = DuckDBCubeQuery(con, statement, reference, CubeTable(SCHEMA, (cube,)), floats=True)
        except (NotFromCube, UnsupportedStatement, duckdb.Error, ValueError) as refusal:
            counts[f"no: {refusal}"[:60]] += 1
            continue
        covered_entries = [
            entry if entry is not None and do_all_rows_match(con, file, query) else None
            for file, entry in zip(files, entries, strict=True)
        ]
        groups = [entry.select(list(query.translated.columns)) for entry in covered_entries if entry is not None]
        if not groups:
            counts["rows"] += 1
            continue
        row_files = [file for file, entry in zip(files, covered_entries, strict=True) if entry is None]
        # The rewritten query reads the groups of the cube and the rows of the other files.
        con.register(GROUPS, pa.Table.from_batches(groups))
        store_rows(con, "rest", pa.concat_tables(row_files or [files[0].slice(0, 0)]))
        message = f"seed {seed}: {text}\n{query.write('rest')}"
        actual = con.sql(query.write("rest" if row_files else None))
        if isinstance(failure, duckdb.OutOfRangeException):
            # Whether an intermediate sum overflows depends on the order of the rows.
            counts["overflow"] += 1
            continue
        if failure is not None:
            with pytest.raises(duckdb.Error):
                count_rows(actual)
            continue
        assert (actual.columns, actual.types) == (expected.columns, expected.types), message
        assert count_rows(actual) == rows, message
        counts["cube and condition" if query.translated.row_condition else "cube"] += 1
    return counts


@pytest.fixture(scope="module")
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": 1}) as con:
        con.execute("SET TimeZone = 'UTC'")
        yield con


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_queries_return_the_same_rows_over_groups(con: duckdb.DuckDBPyConnection) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + 1_000):
        counts += run_case(con, seed, 8)
    assert counts["cube"] > counts.total() / 4, counts.most_common(20)
    assert counts["cube and condition"] > counts.total() / 100, counts.most_common(20)


def test_grouping_sets_that_name_a_column_in_two_ways_are_not_answered_from_a_cube(
    con: duckdb.DuckDBPyConnection,
) -> None:
    """DuckDB returns null for `k` in a grouping set that has only `a.k`.

    A query over the groups of a cube cannot distinguish these two names of one column.
    """
    cube = define_index("cube", "cube", ["k"], SCHEMA, measures=["count(*)"])
    store_rows(con, "t", draw_rows(random.Random(1), 5))
    for text, is_refused in (
        ("SELECT k, -k, a.k FROM t a GROUP BY k, ROLLUP (-k, a.k)", True),
        ("SELECT k, a.K FROM t a GROUP BY CUBE (k, a.k)", True),
        ("SELECT k, -k FROM t a GROUP BY k, ROLLUP (-k, K)", False),
        ("SELECT k, -k FROM t a GROUP BY k, -a.k", False),
    ):
        statement = DuckDBStatement(text)
        (reference,) = statement.references
        assert reference is not None
        expectation: AbstractContextManager[object] = (
            pytest.raises(NotFromCube, match="in two ways") if is_refused else nullcontext()
        )
        with expectation:
            DuckDBCubeQuery(con, statement, reference, CubeTable(SCHEMA, (cube,)), floats=True)


def test_query_that_sqlglot_writes_with_another_meaning_is_not_answered_from_a_cube(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Trino's SQL, sqlglot writes `x IS NOT TRUE` as `NOT x`. For a null x, these are true and null."""
    table = CubeTable(SCHEMA, (define_index("cube", "cube", ["k", "ok"], SCHEMA, measures=["count(*)"]),))
    tree = parse_query("SELECT count(*) FILTER (WHERE ok IS FALSE) FROM t WHERE ((k = 1) IS NOT TRUE) IS TRUE").tree
    text = translate_statement(tree, table, TRINO).write("g", None)
    assert '(NOT ("t"."k" = 1) IS NOT DISTINCT FROM TRUE) IS NOT DISTINCT FROM TRUE' in text
    assert '"t"."ok" IS NOT DISTINCT FROM FALSE' in text
    # Without the step that replaces these comparisons before the query is written, the query must be refused.
    monkeypatch.setattr(type(TRINO), "prepare", lambda dialect, select: select)
    with pytest.raises(NotFromCube, match="written in another form"):
        translate_statement(tree, table, TRINO)
