"""Tests that translated queries of DuckDB return the same rows over groups as the original queries over rows.

There is no server: some Arrow tables represent the files of a table, and some of them are replaced by groups.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest

from seamark.connector.cubes.dialects import DUCKDB, NotFromCube
from seamark.connector.cubes.sketch_calls import format_count_sql, format_sketch_sql
from seamark.connector.cubes.statements import CubeTable
from seamark.connector.duckdb.cube_queries import GROUPS, DuckDBCubeQuery
from seamark.connector.duckdb.sketch_functions import create_functions
from seamark.connector.duckdb.statements import DuckDBStatement
from seamark.formats.iceberg.types.schema import Field, Schema, StructType
from seamark.formats.index.definitions import IndexDefinition, define_index
from seamark.formats.index.kinds.cube import group_rows
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.test_cubes import RandomAggregates, draw_rows_with_exact_sums
from tests.seeds import first_seed

TYPES = {
    "id": "long",
    "k": "int",
    "name": "string",
    "price": "decimal(12, 2)",
    "rate": "decimal(5, 4)",
    "x": "double",
    "y": "float",
    "d": "date",
    "ts": "timestamp",
    "tz": "timestamptz",
    "ok": "boolean",
    "big": "long",
    "fine": "decimal(20, 18)",
    "s": StructType(
        (
            Field(15, "f", required=False, type="long"),
            Field(16, "Über", required=False, type="string"),
            Field(17, "k", required=False, type="int"),
        )
    ),
}
SCHEMA = Schema(
    tuple(Field(number, name, required=False, type=kind) for number, (name, kind) in enumerate(TYPES.items(), 1))
)
SUBTOTALS = ("ROLLUP ({})", "CUBE ({})", "GROUPING SETS (({}), ())")
GROUP_BY = re.compile(r" GROUP BY (.*?)(?= HAVING| ORDER BY|$)")
ROW_CONDITIONS = ("id < 100", "k BETWEEN -3 AND 7", "big <> 3", "ts < TIMESTAMP '1980-01-01 00:00:01'", "name <> 'q'")
FURTHER_AGGREGATES = (
    "count(1)",
    "sum(1)",
    "count(k)",
    "count(s.f)",
    "max(s.f)",
    "avg(a.s.f)",
    "sum(DISTINCT k)",
    "count(name)",
)


def draw_file(rng: random.Random) -> pa.Table:
    table = draw_rows_with_exact_sums(rng, rng.choice((0, 1, 20, 40)))
    rows = [
        None
        if rng.random() < 0.1
        else {"f": rng.choice((1, 2, None)), "Über": rng.choice("ab"), "k": rng.choice((None, 3, 4))}
        for _ in range(len(table))
    ]
    return table.append_column(
        "s", pa.array(rows, pa.struct([("f", pa.int64()), ("Über", pa.string()), ("k", pa.int32())]))
    )


def index_columns_by_id(table: pa.Table) -> dict[int, pa.ChunkedArray]:
    """Return the columns of a file, and the fields of its struct, by field id."""
    columns = {field.id: table[field.name] for field in SCHEMA.fields}
    kinds = [field.type for field in table.schema.field("s").type]
    fields = table["s"].combine_chunks().flatten() if len(table) else [pa.array([], kind) for kind in kinds]
    # The fields of the struct have the ids from 15 on.
    return columns | {number: pa.chunked_array([values]) for number, values in enumerate(fields, 15)}


class RandomDuckDBAggregates(RandomAggregates):
    """Draws aggregate queries with subtotals, fields of structs, and aggregates of constants and dimensions."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, has_sketches=True)

    def draw_cube(self) -> tuple[list[str], list[str]]:
        dimensions, measures = super().draw_cube()
        if self._rng.random() < 0.3:
            dimensions.append("s.f")
        if self._rng.random() < 0.3:
            dimensions.append("s.k")
        if self._rng.random() < 0.2:
            measures += ["avg(s.f)", "max(s.f)"]
        return dimensions, measures

    def query(self, dimensions: list[str], measures: list[str], source: str) -> str:
        """Return a random query: the query of the base class, with random additions in DuckDB's spelling."""
        measures = [measure.replace("approx_distinct", "approx_count_distinct") for measure in measures]
        plain_dimensions = [dimension for dimension in dimensions if not dimension.startswith("s.")]
        if "s.k" in dimensions and self._rng.random() < 0.3:
            return self._order_by_field_k(dimensions, measures, source)
        text, table = super().query(plain_dimensions, measures, source), f" FROM {source} a"
        if "s.f" in dimensions and self._rng.random() < 0.5:
            text = text.replace(table, f", {self._rng.choice(('min(s.f)', 'count(DISTINCT a.s.f)'))}{table}")
        if self._rng.random() < 0.2:
            text = text.replace(table, f", {self._rng.choice(FURTHER_AGGREGATES)}{table}")
        if self._rng.random() < 0.2:
            condition = self._rng.choice(ROW_CONDITIONS)
            # "(WHERE" begins the FILTER of an aggregate, not the condition of the query.
            clause_start = " WHERE " if " WHERE " in text.replace("(WHERE", "") else f" FROM {source} a"
            text = text.replace(
                clause_start,
                f"{clause_start}{condition} AND " if clause_start == " WHERE " else f"{clause_start} WHERE {condition}",
                1,
            )
        # With subtotals, rows can have equal keys, so a LIMIT could keep other rows.
        if " LIMIT " not in text and self._rng.random() < 0.3:
            return GROUP_BY.sub(lambda keys: f" GROUP BY {self._rng.choice(SUBTOTALS).format(keys[1])}", text)
        return text

    def _order_by_field_k(self, dimensions: list[str], measures: list[str], source: str) -> str:
        """Return a query that is ordered by `k` or by its first column.

        `k` can be the name of a column, of a field of the struct `s`, and of an output column.
        """
        rng = self._rng
        output = rng.choice(("s.k", "a.s.k", "(s.k)", "s.k AS k", "s.k + 0 AS k", "s.k AS total"))
        keys = ["s.k", "a.k"] if "k" in dimensions else ["s.k"]
        order = rng.choice(("k", "1 DESC"))
        text = f"SELECT {output}, {rng.choice(measures)} FROM {source} a GROUP BY {', '.join(keys)}"
        return f"{text} ORDER BY {order}, 1, 2 LIMIT {rng.randint(1, 4)}"


def draw_entry(rng: random.Random, cube: IndexDefinition, file: pa.Table) -> pa.RecordBatch | None:
    """Return the groups of a file, or None as for a file without groups, whose rows are read.

    The result is None in 3 cases of 10, and if a value does not fit into its type.
    """
    try:
        return group_rows(cube.terms, cube.measures, index_columns_by_id(file)) if rng.random() < 0.7 else None
    except ValueError:  # A value does not fit into its type.
        return None


def store_rows(con: duckdb.DuckDBPyConnection, name: str, rows: pa.Table) -> None:
    """Store rows in a table of DuckDB, because DuckDB compares NaN differently in an Arrow table than in its tables."""
    con.register("arrow", rows)
    con.execute(f"CREATE OR REPLACE TEMP TABLE {name} AS SELECT * FROM arrow")


def do_all_rows_match(con: duckdb.DuckDBPyConnection, file: pa.Table, query: DuckDBCubeQuery) -> bool:
    """Return whether all rows of a file meet the condition, so that groups can replace the file.

    Also check that `negated_row_condition` is true for each row that does not meet it.
    """
    condition, negated_condition = query.translated.row_condition, query.translated.negated_row_condition
    if not condition:
        return True
    store_rows(con, "f", file)
    counts = con.sql(
        f"SELECT count(*), count(*) FILTER (WHERE ({negated_condition}) IS NOT TRUE) "
        f"FROM f a WHERE ({condition}) IS NOT TRUE"
    ).fetchone()
    assert counts is not None
    assert counts[1] == 0, f"{condition}: {negated_condition}"
    return bool(counts[0] == 0)


def replace_approximate_counts(text: str) -> str:
    """Return the query with calls that build the sketches of cubes from all rows, in place of `approx_count_distinct`.

    DuckDB's sketches differ from those of cubes.
    """

    def replace_call(call: re.Match[str]) -> str:
        return format_count_sql(format_sketch_sql(call[1], DUCKDB.types[str(TYPES[call[1]])]), call[2] or "")

    return re.sub(r"approx_count_distinct\((\w+)\)( FILTER \(WHERE (?:[^()]|\([^()]*\))*\))?", replace_call, text)


def count_rows(relation: duckdb.DuckDBPyRelation) -> Counter[str]:
    return Counter(repr([to_comparable_value(value) for value in row]) for row in relation.fetchall())


def run_case(con: duckdb.DuckDBPyConnection, seed: int, queries: int) -> Counter[str]:
    """Compare random queries of one random table with and without one cube.

    Returns:
        The number of queries by outcome: "no: " and the reason for which the cube cannot answer, "rows" if no file has
        usable groups, "cube", or "cube and condition" if files must also be checked for a condition.
    """
    rng = random.Random(seed)
    aggregates, counts = RandomDuckDBAggregates(rng), Counter[str]()
    dimensions, measures = aggregates.draw_cube()
    cube = define_index("cube", "cube", dimensions, SCHEMA, measures=measures)
    files = [draw_file(rng) for _ in range(rng.randint(1, 4))]
    entries = [draw_entry(rng, cube, file) for file in files]
    store_rows(con, "t", pa.concat_tables(files))
    for _ in range(queries):
        text = aggregates.query(dimensions, measures, "t")
        statement = DuckDBStatement(text)
        (reference,) = statement.references
        assert reference is not None
        try:
            query = DuckDBCubeQuery(con, statement, reference, CubeTable(SCHEMA, (cube,)), floats=True)
        except NotFromCube as refusal:
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
        rows = [file for file, entry in zip(files, covered_entries, strict=True) if entry is None]
        # The rewritten query reads the groups of the cube and the rows of the other files.
        con.register(GROUPS, pa.Table.from_batches(groups))
        store_rows(con, "rest", pa.concat_tables(rows or [files[0].slice(0, 0)]))
        expected, expected_with_sketches = con.sql(text), con.sql(replace_approximate_counts(text))
        actual = con.sql(query.write("rest" if rows else None))
        message = f"seed {seed}: {text}\n{query.write('rest')}"
        assert (actual.columns, actual.types) == (expected.columns, expected.types), message
        assert count_rows(actual) == count_rows(expected_with_sketches), message
        counts["cube and condition" if query.translated.row_condition else "cube"] += 1
    return counts


@pytest.fixture(scope="module")
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": 1}) as con:
        con.execute("SET TimeZone = 'UTC'")
        create_functions(con)
        yield con


def run_cases(con: duckdb.DuckDBPyConnection, first: int, queries: int) -> None:
    """Compare `queries` random queries, five for each random table. The seeds start with `first`."""
    counts = Counter[str]()
    for seed in range(first, first + queries // 5):
        counts += run_case(con, seed, 5)
    # With fewer queries from cubes, or from cubes and a condition on rows, the test would prove little.
    assert counts["cube"] > counts.total() / 4, counts.most_common(20)
    assert counts["cube and condition"] > counts.total() / 100, counts.most_common(20)


@pytest.mark.slow
def test_groups_return_the_same_rows_as_the_files(con: duckdb.DuckDBPyConnection) -> None:
    run_cases(con, first_seed(), 200)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_groups_return_the_same_rows_as_the_files_in_thousands_of_cases(con: duckdb.DuckDBPyConnection) -> None:
    run_cases(con, first_seed() + 10_000, 20_000)
