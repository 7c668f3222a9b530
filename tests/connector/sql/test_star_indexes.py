"""Tests that joins return the same rows if indexes on attributes of dimension tables leave out files of facts."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.rest import RestCatalog

from seamark.connector.client.errors import InvalidRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import Explanation
from seamark.connector.index import entry_copies
from seamark.connector.index.audits import audit_index
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.entry_copies import find_changed_keys
from seamark.connector.index.files import DataFile, IndexTask, WrittenIndex, read_indexed_columns
from seamark.connector.index.lookups import Dimensions, pin_attributes, read_dimensions
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.sql.session import SqlResult, SqlSession
from seamark.formats.index.keys.terms import Term
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows
from tests.seeds import examples, first_seed

FACTS = pa.schema([("id", pa.int64()), ("shop", pa.int32()), ("item", pa.string()), ("day", pa.date32())])
SHOPS = pa.schema([("shop_id", pa.int32()), ("city", pa.string()), ("size", pa.int64()), ("open", pa.bool_())])
ITEMS = pa.schema([("name", pa.string()), ("brand", pa.string()), ("since", pa.date32())])
SCHEMAS = {"facts": FACTS, "shops": SHOPS, "items": ITEMS}
KEYS = {"shops": ("shop", "shop_id"), "items": ("item", "name")}
"""The key of the facts, and of the dimension table, by dimension table."""
ATTRIBUTES = {"shops": ("city", "size", "open"), "items": ("brand", "since")}
CITIES = ("Rome", "Oslo", "rome", "", None)
BRANDS = ("x", "y", "é", None)
SHOPS_MAX = 30
INTEGERS = pa.int32()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("star-indexes"), index_wait_s=30) as server:
        yield server


class CountingWorkers(InProcessWorkers):
    """Workers that count the data files that they read."""

    files = 0

    def run(self, task: IndexTask, groups: Sequence[Sequence[DataFile]]) -> Iterator[WrittenIndex]:
        self.files += sum(map(len, groups))
        return super().run(task, groups)


class IndexedStar:
    """Facts in small files, and two dimension tables, in the namespace `name`.

    `compare` compares answers with the rows that PyIceberg reads.
    """

    def __init__(self, catalog: RestCatalog, client: IndexClient, session: SqlSession, name: str, seed: int) -> None:
        self._catalog, self._client, self._session, self.name = catalog, client, session, name
        self._rng = random.Random(seed)
        self._rows: dict[tuple[str, int], pa.Table] = {}
        """The rows that PyIceberg has read, by table and snapshot."""
        self._fact_count = 0
        self.has_tag = self.is_refused = False
        self.definitions: set[str] = set()

    def create_tables(self) -> None:
        self._catalog.create_namespace(self.name)
        for table, schema in SCHEMAS.items():
            properties = {"write.delete.mode": "merge-on-read"}
            self._catalog.create_table(f"{self.name}.{table}", schema=schema, properties=properties)
        self._append("shops", [self._draw_shop(key) for key in [*range(0, SHOPS_MAX - 4), None]])
        self._append("items", [self._draw_item(f"i{number}") for number in range(6)])

    def append_fact(self, shop: int) -> None:
        self._append("facts", [{"id": 100 + shop, "shop": shop, "item": None, "day": None}])

    def append_facts(self, files: int) -> None:
        """Append `files` data files of one to four facts. Most facts of a file have the key of the same shop."""
        for _ in range(files):
            first_shop, rows = self._rng.randrange(SHOPS_MAX), []
            for _ in range(self._rng.randint(1, 4)):
                shop = self._rng.choice(
                    (first_shop, first_shop + 1, None) if self._rng.random() < 0.2 else (first_shop,)
                )
                item = self._rng.choice((f"i{first_shop % 7}", f"i{first_shop % 7}", None))
                rows.append({"id": self._fact_count, "shop": shop, "item": item, "day": None})
                self._fact_count += 1
            self._append("facts", rows)

    def define(self) -> None:
        """Define indexes on two attributes of each dimension table at its present snapshot."""
        for table, (key, dimension_key) in KEYS.items():
            for attribute in self._rng.sample(ATTRIBUTES[table], 2):
                # Bitmaps are more frequent, because they answer more kinds of conditions than Bloom filters.
                kind = self._rng.choice(("bitmap", "bitmap", "bloom"))
                self._define(
                    f"{table}_{attribute}", kind, f"{self.name}.{table}.{attribute} via {key} = {dimension_key}"
                )

    def define_city(self) -> None:
        self._define("city", "bitmap", f"{self.name}.shops.city via shop = shop_id")

    def _define(self, name: str, kind: str, attribute: str) -> None:
        pinned_names = self.pin(attribute, add_partners=False)
        self._client.put_index((self.name, "facts"), name, kind=kind, columns=pinned_names)
        self.definitions.add(name)

    def pin(self, attribute: str, *, add_partners: bool) -> list[str]:
        return pin_attributes(self._client, [attribute], add_partners=add_partners)

    def register_with_field_id_0(self, table: str, column: str) -> None:
        """Register a table with the data of `shops`, in which `column` has the field id 0.

        Some writers number the fields from 0.
        """
        shops = self._catalog.load_table(f"{self.name}.shops")
        metadata = json.loads(Path(shops.metadata_location.removeprefix("file://")).read_bytes())
        for schema in metadata["schemas"]:
            next(field for field in schema["fields"] if field["name"] == column)["id"] = 0
        root = Path(metadata["location"].removeprefix("file://")).with_name(table)
        metadata |= {"location": f"file://{root}", "table-uuid": str(uuid4())}
        path = root / "metadata" / f"00000-{uuid4()}.metadata.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(metadata))
        self._catalog.register_table(f"{self.name}.{table}", f"file://{path}")

    def set_state(self, name: str, state: str) -> None:
        """Write the property of an index with another state, as any engine may."""
        key = f"seamark.index.{name}"
        facts = self._catalog.load_table(f"{self.name}.facts")
        definition = json.loads(facts.properties[key])
        with facts.transaction() as transaction:
            transaction.set_properties({key: json.dumps({**definition, "state": state})})

    def copy_definition(self, name: str, copy: str) -> None:
        """Define an equal index under another name, by a table property, because `putIndex` refuses an equal index."""
        facts = self._catalog.load_table(f"{self.name}.facts")
        with facts.transaction() as transaction:
            transaction.set_properties({f"seamark.index.{copy}": facts.properties[f"seamark.index.{name}"]})

    def find_snapshot_id(self, table: str) -> int:
        snapshot = self._catalog.load_table(f"{self.name}.{table}").current_snapshot()
        assert snapshot is not None
        return snapshot.snapshot_id

    @contextmanager
    def hide_metadata(self, table: str) -> Iterator[None]:
        """Hide the metadata file of a table until the context ends."""
        path = Path(self._catalog.load_table(f"{self.name}.{table}").metadata_location.removeprefix("file://"))
        hidden_path = path.rename(path.with_name("hidden"))
        try:
            yield
        finally:
            hidden_path.rename(path)

    def drop(self, name: str) -> None:
        self._client.drop_index((self.name, "facts"), name)

    def build(self) -> int:
        """Build the indexes. The build refuses a dimension table in which a key occurs twice.

        Returns:
            The number of entries that were computed, and not copied.
        """
        self.is_refused, computed_count = False, 0
        for name in sorted(self.definitions):
            with closing(CountingWorkers()) as workers:
                try:
                    build(self._client, (self.name, "facts"), name, workers)
                except InvalidRequest as refusal:
                    assert "is not a key" in str(refusal)  # noqa: PT017
                    self.is_refused = True
                computed_count += workers.files
        return computed_count

    def maintain(self) -> None:
        """Run the indexing job. It redefines the indexes whose dimension tables have changed."""
        with suppress(RuntimeError):  # A key of a dimension table has several rows.
            run_indexing(self._client, (self.name, "facts"))

    def audit(self) -> None:
        """Compare the entries of each index for three files with the rows of these files."""
        for name in sorted(self.definitions):
            audit = audit_index(self._client, (self.name, "facts"), name, sample=3)
            assert audit.problems == (), (self.name, audit.problems)

    def change_dimension(self) -> None:
        match self._rng.randrange(6):
            case 0:
                # Most of these keys exist, so the new row usually makes a key occur twice.
                self._append("shops", [self._draw_shop(self._rng.randrange(SHOPS_MAX + 2))])
            case 1:
                self._append("shops", [self._draw_shop(SHOPS_MAX - 3)])
            case 2:
                self.run(f"UPDATE {{0}}.shops SET city = 'Oslo' WHERE shop_id < {self._rng.randrange(SHOPS_MAX)}")
            case 3:
                self.run(f"DELETE FROM {{0}}.shops WHERE shop_id = {self._rng.randrange(SHOPS_MAX)}")
            case 4:
                self.run("UPDATE {0}.items SET brand = 'x', since = DATE '2026-01-02' WHERE name > 'i2'")
            case 5:
                self.run("UPDATE {0}.shops SET size = 10 - size, open = NOT open")

    def delete_facts(self) -> None:
        self.run(f"DELETE FROM {{0}}.facts WHERE id % 3 = {self._rng.randrange(3)} AND shop > 4")

    def tag(self) -> None:
        """Tag the present state of all tables, once."""
        for name in SCHEMAS if not self.has_tag else ():
            table = self._catalog.load_table(f"{self.name}.{name}")
            snapshot = table.current_snapshot()
            assert snapshot is not None
            table.manage_snapshots().create_tag(snapshot.snapshot_id, "old").commit()
        self.has_tag = True

    def draw_query(self) -> str:
        rng = self._rng
        tables = rng.sample(list(KEYS), rng.choice((1, 1, 2)))
        conditions = [self._draw_condition(rng.choice(tables)) for _ in range(rng.choice((1, 1, 2)))]
        if rng.random() < 0.2:
            conditions.append(rng.choice(("facts.id < 20", "facts.shop IS NULL", "facts.item = 'i1'")))
        joined_tables = []
        for table in tables:
            word = rng.choice(("JOIN", "JOIN", "JOIN", "LEFT JOIN", "RIGHT JOIN"))
            key, dimension_key = KEYS[table]
            joined_tables.append(f"{word} {{0}}.{table}{{1}} {table} ON facts.{key} = {table}.{dimension_key}")
        where = f" {rng.choice(('AND', 'AND', 'OR'))} ".join(conditions)
        columns = ", ".join(["facts.id", *(f"{table}.{rng.choice(ATTRIBUTES[table])}" for table in tables)])
        return f"SELECT {columns} FROM {{0}}.facts{{1}} facts {' '.join(joined_tables)} WHERE {where}"

    def compare(self, text: str) -> str:
        """Check that a query returns the same rows with and without plans, and return how its plan used the indexes.

        If the tables have the tag `old`, one query in five reads their tagged snapshots.
        """
        is_past = self.has_tag and self._rng.random() < 0.2
        answer = self._session.sql(text.format(self.name, " FOR VERSION AS OF 'old'" if is_past else ""))
        rows = count_rows(answer)
        assert rows == self._read_truth(text, is_past=is_past), f"{text}\n{answer.explanation}"
        return describe_use(answer)

    def compare_named_attributes(self) -> str:
        """Check that a plan whose filter names indexed attributes keeps the files of all matching rows.

        An attribute is a column of a dimension table that the facts join by a key. An index on an attribute stores its
        value for each fact, and a filter can use the name of the index as the name of a column.
        The condition has one or two comparisons of one attribute, and in most cases a comparison of the ids.

        Returns:
            How the plan used the indexes, for counts of the outcomes.
        """
        name = self._rng.choice(sorted(self.definitions))
        table = name.partition("_")[0]
        columns = {name.replace("_", ".")}
        drawn_conditions = (self._draw_condition(table) for _ in range(5))
        conditions = [text for text in drawn_conditions if set(re.findall(rf"{table}\.\w+", text)) == columns][:2]
        if not conditions:
            return "no condition"
        condition = f" {self._rng.choice(('AND', 'OR'))} ".join(conditions)
        condition += self._rng.choice((" AND id < 20", " OR id < 3", ""))
        explanation = self._client.explain(
            (self.name, "facts"), condition.replace(f"{table}.", f"{table}_"), files=True
        )
        key, dimension_key = KEYS[table]
        truth = self._read_truth(
            f"SELECT id FROM {{0}}.facts LEFT JOIN {{0}}.{table} {table} ON {key} = {dimension_key} WHERE {condition}",
            is_past=False,
        )
        kept_ids = Counter[str]()
        for file in explanation.kept_files or ():
            with pa.OSFile(file["file-path"].removeprefix("file://")) as source:
                ids = pq.read_table(source, columns=["id"])["id"].to_pylist()
                kept_ids.update(repr((number,)) for number in ids)
        assert truth.keys() <= kept_ids.keys(), condition
        return "named, pruned" if explanation.files < explanation.stages[0].files_in else "named, not pruned"

    def explain(self, condition: str) -> Explanation:
        return self._client.explain((self.name, "facts"), condition)

    def run(self, text: str) -> None:
        self._session.sql(text.format(self.name)).close()

    def _read_truth(self, text: str, *, is_past: bool) -> Counter[str]:
        """Return the rows of a query over the rows that PyIceberg reads, without any plan of Seamark."""
        with closing(duckdb.connect()) as connection:
            for name in re.findall(r"[{]0[}]\.(\w+)", text):
                table = self._catalog.load_table(f"{self.name}.{name}")
                snapshot = table.snapshot_by_name("old") if is_past else table.current_snapshot()
                assert snapshot is not None
                key = (name, snapshot.snapshot_id)
                if key not in self._rows:
                    self._rows[key] = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
                connection.register(f"t_{name}", self._rows[key])
            plain_query = text.replace("{0}.", "t_").replace("{1}", "")
            return Counter(map(repr, connection.execute(plain_query).fetchall()))

    def _draw_condition(self, table: str) -> str:
        conditions = {
            "shops": (
                "shops.city = 'Oslo'",
                "shops.city IN ('Rome', '')",
                "shops.city IS NULL",
                "shops.city <> 'Rome'",
                "shops.city LIKE 'R%'",
                "lower(shops.city) = 'rome'",
                "shops.size > 7",
                "shops.size BETWEEN 2 AND 3",
                "shops.size = 5",
                "NOT (shops.size < 3 OR shops.city = 'Oslo')",
                "shops.open",
                "NOT shops.open",
                "shops.shop_id = 3",
            ),
            "items": (
                "items.brand = 'x'",
                "items.brand IN ('é', 'z')",
                "items.brand IS NOT NULL",
                "items.since < DATE '2026-01-03'",
                "items.since = DATE '2026-01-02'",
                "items.brand >= 'y'",
            ),
        }
        return self._rng.choice(conditions[table])

    def _draw_shop(self, key: int | None) -> dict[str, object]:
        size = self._rng.choice((*range(10), None))
        return {
            "shop_id": key,
            "city": self._rng.choice(CITIES),
            "size": size,
            "open": self._rng.choice((True, False, None)),
        }

    def _draw_item(self, name: str) -> dict[str, object]:
        since = self._rng.choice((20454, 20455, 20456, None))  # 2026-01-01 and the days after it
        return {"name": name, "brand": self._rng.choice(BRANDS), "since": since}

    def _append(self, table: str, rows: list[dict[str, object]]) -> None:
        columns = {field.name: [row[field.name] for row in rows] for field in SCHEMAS[table]}
        arrays = [
            pa.array(columns[field.name], INTEGERS if field.type == pa.date32() else field.type).cast(field.type)
            for field in SCHEMAS[table]
        ]
        self._catalog.load_table(f"{self.name}.{table}").append(pa.table(arrays, schema=SCHEMAS[table]))


def describe_use(answer: SqlResult) -> str:
    """Return how the plan of the facts used joins: by attributes, by keys, or not.

    For a join, the text also says whether the plan left out files.
    """
    facts = next((table for table in answer.explanation.tables if table.name[-1] == "facts"), None)
    if facts is None or not facts.joins:
        return "no join"
    # A join by attributes of an index has read no keys of the dimension table.
    pruning = "pruned" if facts.files < facts.considered_files else "not pruned"
    return f"{'attributes' if any(keys is None for _, keys in facts.joins) else 'keys'}, {pruning}"


def compare_random_queries(server: ServerThread, seed: int, query_count: int, round_count: int = 3) -> Counter[str]:
    """Change a star schema at random in `round_count` rounds, and compare the rows of queries with and without plans.

    If there are at least three rounds, the indexes are then defined and built again. Unless a dimension table has a
    duplicate key, they are also audited.
    """
    rng, counts = random.Random(seed), Counter[str]()
    with (
        open_catalog(server.url) as catalog,
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
    ):
        star = IndexedStar(catalog, client, session, f"star{seed}", seed)
        star.create_tables()
        star.append_facts(8)
        star.define()
        star.build()
        counts.update(star.compare_named_attributes() for _ in range(4))
        for _ in range(round_count):
            counts.update(star.compare(star.draw_query()) for _ in range(query_count))
            steps = (star.define, star.maintain, star.tag, star.delete_facts, star.build)
            for change in (star.change_dimension, rng.choice(steps)):
                change()
            star.append_facts(rng.choice((0, 0, 2)))
            counts.update(star.compare_named_attributes() for _ in range(4))
        if round_count < 3:
            return counts
        star.define()
        star.build()
        counts.update(star.compare(star.draw_query()) for _ in range(query_count))
        if not star.is_refused:
            star.audit()
    return counts


def test_random_joins_return_the_same_rows_by_indexes_on_attributes(server: ServerThread) -> None:
    counts = Counter[str]()
    for seed in range(first_seed(), first_seed() + examples(6, 1)):
        counts += compare_random_queries(server, seed, 5, round_count=examples(3, 1))
    assert counts["attributes, pruned"] > 0, counts
    assert counts["named, pruned"] > 0, counts
    assert counts["keys, pruned"] + counts["keys, not pruned"] > 0, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_thousands_of_random_joins_return_the_same_rows_by_indexes_on_attributes(server: ServerThread) -> None:
    counts = Counter[str]()
    for seed in range(first_seed() + 1000, first_seed() + 1060):
        counts += compare_random_queries(server, seed, 12)
    assert counts["attributes, pruned"] > counts.total() / 12, counts
    assert counts["named, pruned"] > counts.total() / 20, counts


@pytest.fixture(scope="module")
def star(server: ServerThread) -> Iterator[IndexedStar]:
    with open_small_star(server) as star:
        yield star


@contextmanager
def open_small_star(server: ServerThread, name: str = "fixed") -> Iterator[IndexedStar]:
    """Yield a star schema with three shops, a file of facts for each shop, and a bitmap index on the city.

    Each file also has a fact with the shop 9, which does not exist.
    """
    with (
        open_catalog(server.url) as catalog,
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
    ):
        catalog.create_namespace(name)
        shops = [{"shop_id": number, "city": city, "size": 1, "open": True} for number, city in enumerate("abc")]
        catalog.create_table(f"{name}.shops", schema=SHOPS).append(pa.Table.from_pylist(shops, SHOPS))
        facts = catalog.create_table(f"{name}.facts", schema=FACTS)
        for shop in range(3):
            facts.append(pa.Table.from_pylist([{"id": shop, "shop": shop}, {"id": 10 + shop, "shop": 9}], FACTS))
        star = IndexedStar(catalog, client, session, name, 1)
        star.define_city()
        star.build()
        yield star


QUERY = "SELECT facts.id FROM {0}.facts{1} facts JOIN {0}.shops{1} shops ON shop = shop_id WHERE shops.city = 'a'"


def test_name_of_an_index_on_an_attribute_is_a_column_of_filters(star: IndexedStar) -> None:
    first_explanation = star.explain("city = 'c'")
    assert (first_explanation.files, first_explanation.stages[0].files_in) == (1, 3)
    # A client cannot evaluate the condition on rows, so the residual is true for all rows.
    assert all(
        "city" not in str(residual) and "lookup" not in str(residual) for residual in first_explanation.residuals
    )
    assert star.explain("city = 'c' OR city = 'a'").files == 2
    assert star.explain("NOT (city = 'c')").files == 2
    assert star.explain("lower(city) = 'c'").files == 3
    # Both the statistics and the index leave out the file of the second shop.
    mixed_explanation = star.explain("city = 'c' OR id < 1")
    assert (mixed_explanation.files, mixed_explanation.stages[-1].name) == (2, "disjunctions")
    assert star.explain("(city = 'c' AND id < 3) OR (id > 11 AND city = 'a') OR shop IS NULL").files == 1
    star.run("INSERT INTO {0}.shops VALUES (4, 'd', 1, true)")
    last_explanation = star.explain("city = 'c'")
    assert (last_explanation.files, last_explanation.unpruned_reasons[-1].partition(";")[0]) == (
        3,
        "the index city has the attributes of an earlier snapshot of fixed.shops",
    )
    star.define_city()
    star.build()
    assert star.explain("CITY = 'c'").files == 1
    with pytest.raises(InvalidRequest, match="town"):
        star.explain("town = 'c'")


def test_index_on_an_attribute_is_used_at_the_snapshot_of_its_dimension_table(star: IndexedStar) -> None:
    """An index on an attribute stores a column of a dimension table, at one snapshot, for each fact.

    A plan uses it ("attributes") if all files have entries for the current snapshot of the dimension table. Otherwise
    the plan reads the matching keys of the dimension table ("keys").
    """
    assert star.compare(QUERY) == "attributes, pruned"
    star.append_fact(1)
    # The new file has no entry, so the keys of the dimension table are read too.
    assert star.compare(QUERY) == "keys, pruned"
    star.build()
    assert star.compare(QUERY) == "attributes, pruned"
    star.run("UPDATE {0}.shops SET city = 'a' WHERE shop_id = 1")
    assert star.compare(QUERY) == "keys, pruned"
    star.define_city()
    assert star.compare(QUERY) == "keys, pruned"
    star.build()
    assert star.compare(QUERY) == "attributes, pruned"


def test_disjunction_of_a_join_and_a_filter_prunes_by_index_and_statistics(star: IndexedStar) -> None:
    star.define_city()
    star.build()
    text = QUERY.replace("shops.city = 'a'", "(shops.city = 'c' OR facts.id < 1)")
    assert star.compare(text) == "keys, pruned"


def test_job_defines_an_index_again_after_a_change_of_its_dimension_table(server: ServerThread) -> None:
    with open_small_star(server, "maintained") as star:
        star.run("UPDATE {0}.shops SET city = 'a' WHERE shop_id = 1")
        assert star.compare(QUERY) == "keys, pruned"
        star.maintain()
        assert star.compare(QUERY) == "attributes, pruned"
        assert [star.explain(f"city = '{city}'").files for city in "abc"] == [2, 0, 1]
        star.run("INSERT INTO {0}.shops VALUES (1, 'z', 1, true)")
        star.maintain()
        assert star.compare(QUERY).startswith("keys"), "a key has two rows, so there is no entry"


def test_filter_on_another_attribute_needs_keys(star: IndexedStar) -> None:
    assert star.compare(f"{QUERY} AND shops.size = 1").startswith("keys")


def test_name_of_a_paused_or_copied_index_is_a_column_of_filters(star: IndexedStar) -> None:
    """A filter can use the name of an index on an attribute as a column. A paused index leaves out no files."""
    star.define_city()
    star.build()
    star.set_state("city", "paused")
    paused_explanation = star.explain("city = 'c'")
    assert (paused_explanation.files, paused_explanation.unpruned_reasons[-1]) == (
        paused_explanation.stages[0].files_in,
        "the index city is paused; resume it",
    )
    star.set_state("city", "enabled")
    assert star.explain("city = 'c'").files < paused_explanation.files
    star.copy_definition("city", "a_copy")  # Its name is before `city`.
    try:
        assert star.explain("city = 'c'").files == star.explain("a_copy = 'c'").files < paused_explanation.files
        star.set_state("a_copy", "paused")
        assert star.explain("city = 'c'").files < star.explain("a_copy = 'c'").files == paused_explanation.files
    finally:
        star.drop("a_copy")


def test_answers_name_the_snapshot_of_the_dimension_table_that_a_filter_uses(
    server: ServerThread, star: IndexedStar
) -> None:
    star.define_city()
    star.build()
    column_filter = {"type": "eq", "term": "city", "value": "c"}
    paths = ("/v1/namespaces/fixed/tables/facts/plan", "/api/v1/tables/fixed/facts/explain")
    used_snapshot_id = star.find_snapshot_id("shops")
    for is_used in (True, False):
        plan, explanation = (server.run(server.api("POST", path, {"filter": column_filter})).json for path in paths)
        named_indexes = [
            {"name": "city", "table": ["fixed", "shops"], "snapshot-id": used_snapshot_id, "used": is_used}
        ]
        assert plan["seamark-attributes"] == explanation["attributes"] == named_indexes
        star.run("UPDATE {0}.shops SET size = 2 WHERE shop_id = 1")
    plan, explanation = (server.run(server.api("POST", path, {})).json for path in paths)
    assert "seamark-attributes" not in plan
    assert "attributes" not in explanation


def test_plan_keeps_all_files_if_the_dimension_table_cannot_be_read(star: IndexedStar) -> None:
    with star.hide_metadata("shops"):
        explanation = star.explain("city = 'c'")
    assert explanation.files == explanation.stages[0].files_in > 0


def test_attribute_with_the_field_id_of_partners_is_refused(star: IndexedStar) -> None:
    star.register_with_field_id_0("zero", "open")
    for add_partners in (False, True):
        with pytest.raises(InvalidRequest, match=r"open of fixed\.zero has the field id 0"):
            star.pin("fixed.zero.open via shop = shop_id", add_partners=add_partners)
    assert len(star.pin("fixed.zero.city via shop = shop_id", add_partners=False)) == 1


@pytest.mark.slow
def test_index_prunes_if_the_dimension_table_has_too_many_rows_for_keys(tmp_path: Path) -> None:
    server = ServerThread(tmp_path, index_wait_s=30, join_rows_limit=1)
    server.start()
    try:
        with open_small_star(server) as star:
            assert star.compare(QUERY) == "attributes, pruned"
            star.append_fact(1)
            # The keys of the new file are not known. The statement still reads the dimension table of the index.
            assert star.compare(QUERY) == "attributes, pruned"
            star.run("UPDATE {0}.shops SET city = 'a' WHERE shop_id = 1")
            # The index is for the old snapshot of the dimension table, which has too many rows to read its keys.
            assert star.compare(QUERY) == "no join"
    finally:
        server.stop()


def test_only_entries_of_files_with_changed_keys_are_built_again(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_paths, read_tables = list[str](), list[Iterable[Term]]()

    def read_and_record_columns(task: IndexTask, file: DataFile, ids: Sequence[int]) -> dict[int, pa.ChunkedArray]:
        read_paths.append(file.path)
        return read_indexed_columns(task, file, ids)

    def read_and_record_dimensions(client: IndexClient, terms: Sequence[Term]) -> Dimensions:
        read_tables.append(terms)
        return read_dimensions(client, terms)

    monkeypatch.setattr(entry_copies, "read_indexed_columns", read_and_record_columns)
    monkeypatch.setattr(entry_copies, "read_dimensions", read_and_record_dimensions)
    with open_small_star(server, "changed") as star:
        changes = {
            "UPDATE {0}.shops SET city = 'z' WHERE shop_id = 1": 1,
            "INSERT INTO {0}.shops VALUES (77, 'd', 1, true)": 0,
            "UPDATE {0}.shops SET size = size + 1 WHERE shop_id = 0": 0,
            "DELETE FROM {0}.shops WHERE shop_id = 2": 1,
            "INSERT INTO {0}.shops VALUES (9, NULL, 1, true)": 3,
            "UPDATE {0}.shops SET city = 'y' WHERE shop_id = 9": 3,
        }
        for change, files in changes.items():
            star.run(change)
            star.define_city()
            read_paths.clear()
            read_tables.clear()
            assert star.build() == files, change
            assert len(read_paths) == len(set(read_paths)), change
            assert len(read_tables) <= (3 if files else 1), change
            star.audit()
        assert [star.explain(f"city = '{city}'").files for city in "abzcy"] == [1, 0, 1, 0, 3]
        star.append_fact(1)
        star.run("UPDATE {0}.shops SET city = 'x' WHERE shop_id = 0")
        star.define_city()
        assert star.build() == 2
        star.audit()
        assert [star.explain(f"city = '{city}'").files for city in "azx"] == [0, 2, 1]


def test_changed_keys_equal_those_of_dictionaries() -> None:
    rng = random.Random(first_seed())
    for kind in (pa.int64(), pa.string()):
        for _ in range(100):
            attributes_by_key = [
                {
                    key * 3: (rng.choice("ab "), rng.choice((True, None)))
                    for key in rng.sample(range(12), rng.randrange(12))
                }
                for _ in range(2)
            ]
            if rng.random() < 0.5:
                attributes_by_key[1] = {**attributes_by_key[0], **dict(list(attributes_by_key[1].items())[:2])}
            tables = [
                pa.table(
                    {
                        "key": pa.array(list(attributes), pa.int64()).cast(kind),
                        "4": pa.array(
                            [letter.strip() or None for letter, _ in attributes.values()], pa.string()
                        ).dictionary_encode(),
                        "7": pa.array([flag for _, flag in attributes.values()], pa.bool_()),
                    }
                )
                for attributes in attributes_by_key
            ]
            old, new = attributes_by_key
            expected_keys = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
            assert {int(key) for key in find_changed_keys(*tables).to_pylist()} == expected_keys
