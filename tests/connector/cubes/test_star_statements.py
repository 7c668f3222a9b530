"""Tests that star joins over a cube with attributes of dimension tables return the rows of the original statements.

There is no server: DuckDB runs both statements, one over the rows of all files, the other over groups and the rows of
some files.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import sqlglot

from seamark.connector.cubes import stars
from seamark.connector.cubes.attributes import replace_tables
from seamark.connector.cubes.dialects import DUCKDB, NotFromCube
from seamark.connector.cubes.stars import Star, StarTable
from seamark.connector.cubes.statements import CubeStatement, CubeTable, translate_statement
from seamark.formats.iceberg.types.schema import Field, Schema
from seamark.formats.index.definitions import define_index
from seamark.formats.index.keys.lookups import parse_lookup
from seamark.formats.index.kinds.cube import group_rows
from tests.seeds import examples, first_seed


def make_schema(**columns: str) -> Schema:
    return Schema(tuple(Field(number, name, False, kind) for number, (name, kind) in enumerate(columns.items(), 1)))


SCHEMAS = {
    "facts": make_schema(shop_id="int", item_id="long", discount="int", amount="long"),
    "shops": make_schema(shop_id="int", city="string", region="string"),
    "items": make_schema(item_id="long", brand="string", weight="int", Amount="int"),
}
KEYS = {"shops": "shop_id", "items": "item_id"}
SNAPSHOTS = {"facts": 9, "shops": 7, "items": 8}
ATTRIBUTES = [("shops", 0), ("shops", 2), ("shops", 3), ("items", 0), ("items", 2), ("items", 3)]
"""The attributes of the cube, as tables and field ids. The field 0 states whether a dimension has the key."""
MEASURES = ["sum(amount)", "count(amount)", "min(amount)"]
GROUPINGS = ["region", "s.city", "i.brand", "weight", "discount", "region, s.city", "brand, discount"]
AGGREGATES = ["sum(f.amount)", "count(*)", "avg(f.amount)", "min(f.amount)", "count(DISTINCT s.region)", "max(brand)"]
CONDITIONS = ["region = 'north'", "city IN ('a', 'b')", "brand IS NULL", "weight > 1", "discount < 2", "f.amount > -9"]
FROM_CLAUSES = [
    "facts f, shops s, items i WHERE f.shop_id = s.shop_id AND i.item_id = f.item_id",
    "facts f JOIN shops s ON s.shop_id = f.shop_id INNER JOIN items i ON (f.item_id = i.item_id AND TRUE) WHERE TRUE",
    "items i CROSS JOIN facts f JOIN shops s ON s.shop_id = f.shop_id WHERE f.item_id = i.item_id",
]
REFUSED_STATEMENTS = {
    "SELECT region, sum(f.amount) FROM facts f LEFT JOIN shops s ON f.shop_id = s.shop_id GROUP BY 1": "inner join",
    "SELECT region, sum(f.amount) FROM facts f NATURAL JOIN shops s GROUP BY 1": "inner join",
    "SELECT region, sum(f.amount) FROM facts f JOIN shops s USING (shop_id) GROUP BY 1": "inner join",
    "SELECT shop_id, sum(f.amount) FROM facts f, shops s WHERE f.shop_id = s.shop_id GROUP BY 1": "ambiguous",
    "SELECT s.shop_id, sum(f.amount) FROM facts f, shops s WHERE f.shop_id = s.shop_id GROUP BY 1": "attributes",
    "SELECT region, sum(f.amount) FROM facts f, shops s WHERE f.discount = s.shop_id GROUP BY 1": "attributes",
    "SELECT region, sum(f.amount) FROM facts f, shops s WHERE f.shop_id = s.shop_id OR TRUE GROUP BY 1": "attributes",
    "SELECT region, sum(weight) FROM facts f, shops s, items i "
    "WHERE f.shop_id = s.shop_id AND f.item_id = i.item_id GROUP BY 1": "not a measure",
    "SELECT region, sum(i.amount) FROM facts f, shops s, items i "
    "WHERE f.shop_id = s.shop_id AND f.item_id = i.item_id GROUP BY 1": r"attributes of shop\.items",
}


def list_terms() -> list[str]:
    terms = ["discount"]
    for table, field_id in ATTRIBUTES:
        kind = "boolean" if field_id == 0 else SCHEMAS[table].fields[field_id - 1].type
        terms.append(f"lookup[shop.{table}@{SNAPSHOTS[table]}:1:{field_id}:{kind}]({KEYS[table]})")
    return terms


CUBE = define_index("cube", "cube", list_terms(), SCHEMAS["facts"], measures=MEASURES)


def read_star(text: str, snapshots: dict[str, int] = SNAPSHOTS) -> tuple[sqlglot.Expr, Star]:
    """Return the syntax tree of a statement, and its tables in the order of FROM, as a star around `facts`."""
    tree = sqlglot.parse_one(text, dialect="duckdb")
    names = [node.name for node in tree.find_all(sqlglot.exp.Table)]
    order = sorted(names, key=text.index)
    tables = [StarTable(("shop", name), snapshots[name], SCHEMAS[name], name) for name in order]
    return tree, Star(tables, order.index("facts"))


def translate_to_cube(text: str, snapshots: dict[str, int] = SNAPSHOTS) -> CubeStatement:
    tree, star = read_star(text, snapshots)
    return translate_statement(tree, CubeTable(SCHEMAS["facts"], (CUBE,)), DUCKDB, star=star)


def draw_file(rng: random.Random) -> pa.Table:
    def draw(values: list[int]) -> int | None:
        return None if rng.random() < 0.1 else rng.choice(values)

    count = rng.choice((0, 1, 30))
    columns = {"shop_id": [0, 1, 2, 3, 9], "item_id": [0, 1, 2, 9], "discount": [0, 1, 2, 3], "amount": [-5, 0, 7, 9]}
    kinds = {"shop_id": pa.int32(), "item_id": pa.int64(), "discount": pa.int32(), "amount": pa.int64()}
    return pa.table(
        {name: pa.array([draw(values) for _ in range(count)], kinds[name]) for name, values in columns.items()}
    )


def draw_dimensions(rng: random.Random) -> dict[str, list[tuple[object, ...]]]:
    """Return the rows of the dimension tables. Some attributes are null, and one key is null."""
    shops = [(key, rng.choice("abc"), rng.choice(("north", "south", None))) for key in (0, 1, 2, 3, None)]
    items = [(key, rng.choice(("x", "y", None)), rng.randrange(4), rng.randrange(4)) for key in (0, 1, 2, None)]
    return {"shops": list(shops), "items": list(items)}


def build_entry(file: pa.Table, dimensions: dict[str, list[tuple[object, ...]]]) -> pa.RecordBatch:
    """Return the groups of a file of facts, by attributes of the dimension rows to which its keys refer."""
    attributes = {}
    for term in CUBE.terms:
        lookup = parse_lookup(term.transform)
        if lookup is None:
            continue
        table = lookup.source.table[-1]
        rows = {row[0]: row for row in dimensions[table] if row[0] is not None}
        partners = [rows.get(key) for key in file[KEYS[table]].to_pylist()]
        column = lookup.attribute_id - 1  # The attribute 0 states whether the key has a dimension row.
        values = [row is not None if column < 0 else None if row is None else row[column] for row in partners]
        kind = {"boolean": pa.bool_(), "int": pa.int32(), "string": pa.string()}[lookup.type]
        attributes[term] = pa.chunked_array([pa.array(values, kind)])
    columns = {field.id: file[field.name] for field in SCHEMAS["facts"].fields}
    return group_rows(CUBE.terms, CUBE.measures, columns, attributes)


def draw_statement(rng: random.Random) -> str:
    group_columns = rng.choice(GROUPINGS)
    aggregates = rng.sample(AGGREGATES, rng.randint(1, 3))
    text = f"SELECT {group_columns}, {', '.join(aggregates)} FROM {rng.choice(FROM_CLAUSES)}"
    text += "".join(f" AND {condition}" for condition in rng.sample(CONDITIONS, rng.randrange(3)))
    groups = rng.choice((f"({group_columns})", group_columns, f"ROLLUP ({group_columns})"))
    having = rng.choice(("", "", " HAVING sum(f.amount) > 0 OR count(*) > 1"))
    return f"{text} GROUP BY {groups}{having} ORDER BY {group_columns}"


@pytest.fixture(scope="module")
def con() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"threads": 1}) as con:
        con.execute("CREATE TABLE shops (shop_id INTEGER, city VARCHAR, region VARCHAR)")
        con.execute("CREATE TABLE items (item_id BIGINT, brand VARCHAR, weight INTEGER, Amount INTEGER)")
        yield con


def test_star_joins_return_the_same_rows_from_groups_as_from_rows(con: duckdb.DuckDBPyConnection) -> None:
    outcomes = Counter[str]()
    for seed in range(first_seed(), first_seed() + examples(2000, 20)):
        rng = random.Random(seed)
        dimensions = draw_dimensions(rng)
        for table, rows in dimensions.items():
            con.execute(f"DELETE FROM {table}")
            con.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)
        files = [draw_file(rng) for _ in range(3)]
        con.register("facts", pa.concat_tables(files))
        for _ in range(3):
            text = draw_statement(rng)
            try:
                statement = translate_to_cube(text)
            except NotFromCube:
                outcomes["rows"] += 1
                continue
            # Only rows can decide a condition on a column outside the cube, so all files are read.
            covered_count = 0 if statement.row_condition else rng.randint(1, 3)
            entries = [build_entry(file, dimensions) for file in files[:covered_count]]
            empty_entry = build_entry(files[0].slice(0, 0), dimensions)
            con.register("groups", pa.Table.from_batches([empty_entry, *entries]).select(list(statement.columns)))
            con.register("rest", pa.concat_tables([files[0].slice(0, 0), *files[covered_count:]]))
            expected = con.sql(text)
            actual = con.sql(statement.write("groups", "rest", expected.columns))
            assert (actual.columns, actual.types) == (expected.columns, expected.types), text
            assert Counter(map(repr, actual.fetchall())) == Counter(map(repr, expected.fetchall())), (seed, text)
            outcomes["cube" if covered_count else "row condition"] += 1
    assert outcomes["cube"] > outcomes.total() / 2, f"too few statements read groups: {outcomes}"


@pytest.mark.parametrize("text", REFUSED_STATEMENTS)
def test_statement_that_is_no_inner_star_join_uses_no_cube(text: str) -> None:
    with pytest.raises(NotFromCube, match=REFUSED_STATEMENTS[text]):
        translate_to_cube(text)


def test_dimension_table_that_changed_after_the_cube_is_not_replaced() -> None:
    text = "SELECT region, sum(f.amount) FROM facts f, shops s WHERE f.shop_id = s.shop_id GROUP BY 1"
    translate_to_cube(text)
    with pytest.raises(NotFromCube, match=r"attributes of shop\.shops"):
        translate_to_cube(text, {**SNAPSHOTS, "shops": 70})


def test_no_new_node_gets_the_id_of_a_column_of_a_removed_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """The translation knows columns by `id`. Python may give the `id` of a freed node to a new node."""
    reused_ids = []

    def replace_and_reuse_memory(tree: sqlglot.Expr, *arguments: Any) -> Any:
        ids = {id(node) for node in tree.find_all(sqlglot.exp.Column)}
        replaced_tables = replace_tables(tree, *arguments)
        gc.collect()
        # A thousand new nodes reuse the memory of most freed nodes.
        new_nodes = [sqlglot.exp.column("region") for _ in range(1000)]
        reused_ids.extend(ids & {id(node) for node in new_nodes})
        return replaced_tables

    monkeypatch.setattr(stars, "replace_tables", replace_and_reuse_memory)
    translate_to_cube(f"SELECT region, i.brand, sum(f.amount) FROM {FROM_CLAUSES[0]} GROUP BY 1, 2")
    assert reused_ids == []
