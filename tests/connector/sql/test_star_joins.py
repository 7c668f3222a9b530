"""Tests that joins of facts with dimension tables return the same rows from cubes as from data files.

The tables change between the queries.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, suppress
from datetime import date, timedelta
from decimal import Decimal

import pyarrow as pa
import pytest

from seamark.connector.client.errors import InvalidRequest, Unavailable
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index import lookups
from seamark.connector.index.builds import InProcessWorkers, Workers, build
from seamark.connector.index.indexer import Indexer
from seamark.connector.index.lookups import pin_attributes
from seamark.connector.index.merges import MERGED_FILES_MIN
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.sql.cubes import computed_groups, plans
from seamark.connector.sql.cubes.plans import OFF, CubeSummary
from seamark.connector.sql.session import SqlSession
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows
from tests.seeds import examples, first_seed

FACTS = pa.schema(
    [
        ("shop_id", pa.int32()),
        ("item_id", pa.int64()),
        ("day", pa.date32()),
        ("discount", pa.int32()),
        ("amount", pa.int64()),
        ("price", pa.decimal128(9, 2)),
    ]
)
SHOPS = pa.schema([("shop_id", pa.int32()), ("city", pa.string()), ("region", pa.string()), ("amount", pa.int64())])
ITEMS = pa.schema([("item_id", pa.int64()), ("brand", pa.string()), ("weight", pa.int32())])
DAYS = pa.schema([("day", pa.date32()), ("month", pa.int32()), ("week", pa.int32())])
DIMENSIONS = {"s": ("shops", "shop_id"), "i": ("items", "item_id"), "d": ("days", "day")}
"""The dimension tables and their keys, which have the same name in the facts, by alias."""
ATTRIBUTES = {
    "s": ["s.city", "region", "region", "s.amount"],
    "i": ["brand", "weight"],
    "d": ["month", "week", "d.day"],
}
CONDITIONS = {
    "s": ["region = 'north'", "city LIKE 'a%'", "s.amount > 2", "region IS NULL"],
    "i": ["brand IN ('x', 'y')", "weight BETWEEN 1 AND 3"],
    "d": ["month = 1", "week < 3", "d.day >= DATE '2026-01-10'"],
    "f": ["discount BETWEEN 1 AND 3", "f.day < DATE '2026-01-20'", "f.shop_id <> 3"],
}
MEASURES = ["sum(f.amount)", "count(*)", "sum(f.amount * discount)", "avg(price)", "min(price)", "count(f.amount)"]
CUBES = [
    (
        ["shop_id", "item_id", "day", "discount"],
        ["sum(amount)", "count(amount)", "sum(amount * discount)", "avg(price)", "min(price)"],
    ),
    (["shop_id", "day"], ["sum(amount)", "count(amount)", "count(*)"]),
]
ATTRIBUTE_CUBE = (
    [
        "discount",
        "day",
        "{0}.shops.region via shop_id = shop_id",
        "{0}.shops.amount via shop_id = shop_id",
        "{0}.items.brand via item_id = item_id",
        "{0}.items.weight via item_id = item_id",
        "{0}.days.month via day = day",
        "{0}.days.week via day = day",
    ],
    ["sum(amount)", "count(amount)", "sum(amount * discount)", "min(price)"],
)
"""A cube with attributes of the dimension tables, in the namespace {0}."""
FIRST_DAY = date(2026, 1, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("stars"), index_wait_s=30) as server:
        yield server


class StarSchema:
    """Facts with cubes, and three dimension tables, in the namespace `star<seed>`."""

    def __init__(self, server: ServerThread, client: IndexClient, rng: random.Random, name: str) -> None:
        self._server, self._client, self._rng, self._name = server, client, rng, name
        self.has_tag = False
        with open_catalog(server.url) as catalog:
            catalog.create_namespace(name)
            properties = {"write.delete.mode": "merge-on-read"}
            for table, schema in {"facts": FACTS, "shops": SHOPS, "items": ITEMS, "days": DAYS}.items():
                catalog.create_table(f"{name}.{table}", schema=schema, properties=properties)
        # The cube by all keys is preferred to the cube with attributes, because it has fewer dimensions. Most seeds
        # leave it out, so that queries use the attributes.
        self._cubes = CUBES[1:] if rng.random() < 0.6 else CUBES
        for number, (dimensions, measures) in enumerate(self._cubes):
            client.put_index((name, "facts"), f"c{number}", kind="cube", columns=dimensions, measures=measures)
        # Some keys of the facts are in no dimension, and some keys of the dimensions are null or duplicate.
        self.has_doubled_keys = rng.random() < 0.3
        doubled_keys = [2, 1] if self.has_doubled_keys else []
        self._append("shops", [self._draw_shop(key) for key in [*range(4), None, *doubled_keys[:1]]], SHOPS)
        self._append("items", [self._draw_item(key) for key in [*range(5), None, *doubled_keys[1:]]], ITEMS)
        days = [{"day": FIRST_DAY + timedelta(n), "month": 1 + n // 15, "week": n // 7} for n in range(28)]
        self._append("days", days, DAYS)

    def append_facts(self, rows: int) -> None:
        rng = self._rng

        def draw_fact() -> dict[str, object]:
            values = {
                "shop_id": rng.randrange(6),
                "item_id": rng.randrange(7),
                "day": FIRST_DAY + timedelta(rng.randrange(30)),
                "discount": rng.randrange(5),
                "amount": rng.randint(-5, 50),
                "price": Decimal(rng.randint(-500, 5000)) / 100,
            }
            return {name: None if rng.random() < 0.08 else value for name, value in values.items()}

        self._append("facts", [draw_fact() for _ in range(rows)], FACTS)

    def build(self) -> None:
        for number in range(len(self._cubes)):
            with closing(InProcessWorkers()) as workers:
                build(self._client, (self._name, "facts"), f"c{number}", workers)

    def pin_attributes(self) -> None:
        """Define the cube with attributes of the current dimensions, and build it.

        The build refuses a dimension with a duplicate key.
        """
        columns, measures = ATTRIBUTE_CUBE
        pinned_columns = pin_attributes(self._client, [column.format(self._name) for column in columns])
        facts = (self._name, "facts")
        self._client.put_index(facts, "attributes", kind="cube", columns=pinned_columns, measures=measures)
        with closing(InProcessWorkers()) as workers:
            try:
                build(self._client, facts, "attributes", workers)
            except InvalidRequest as refusal:
                assert "is not a key" in str(refusal)  # noqa: PT017
                self.has_doubled_keys = True

    def maintain(self) -> None:
        """Run the indexing job. It redefines the cube if a dimension table has changed."""
        with suppress(RuntimeError):  # A dimension has a duplicate key.
            run_indexing(self._client, (self._name, "facts"))

    def change_dimension(self) -> None:
        """Add a row with a key that may exist already, or change or remove the rows of a key."""
        match self._rng.randrange(4):
            case 0:
                self._append("shops", [self._draw_shop(self._rng.randrange(8))], SHOPS)
            case 1:
                self._run("UPDATE {}.shops SET region = 'west' WHERE shop_id = 1")
            case 2:
                self._run("DELETE FROM {}.items WHERE item_id = 2")
            case 3:
                self._append("items", [self._draw_item(self._rng.randrange(9))], ITEMS)

    def delete_facts(self) -> None:
        self._run(f"DELETE FROM {{}}.facts WHERE discount = {self._rng.randrange(5)} AND shop_id = 1")

    def tag(self) -> None:
        """Tag the current state of all tables, only in the first call."""
        if self.has_tag:
            return
        with open_catalog(self._server.url) as catalog:
            for name in ("facts", "shops", "items", "days"):
                table = catalog.load_table(f"{self._name}.{name}")
                snapshot = table.current_snapshot()
                assert snapshot is not None
                table.manage_snapshots().create_tag(snapshot.snapshot_id, "old").commit()
        self.has_tag = True

    def draw_query(self) -> str:
        """Return a random query, which a cube can usually answer."""
        rng = self._rng
        # Half of the queries join only one dimension, because most cubes have few dimensions.
        aliases = rng.sample(list(DIMENSIONS), rng.choice((1, 1, 2, 3)))
        keys = [attribute for alias in aliases for attribute in rng.sample(ATTRIBUTES[alias], rng.randint(0, 2))]
        keys += rng.sample(["f.shop_id", "discount", "date_trunc('month', f.day)"], rng.choice((0, 0, 1)))
        aggregates = rng.sample(MEASURES, rng.randint(1, 3))
        if rng.random() < 0.3:
            attribute = rng.choice(ATTRIBUTES[aliases[0]])
            function = rng.choice(("min({})", "count(DISTINCT {})", "max({})", "count({})", "sum(DISTINCT {})"))
            aggregates.append(function.format(attribute))
        if rng.random() < 0.2:
            condition = rng.choice(CONDITIONS[rng.choice(aliases)])
            aggregates.append(f"{rng.choice(MEASURES)} FILTER (WHERE {condition})")
        conditions = [rng.choice(CONDITIONS[alias]) for alias in ("f", *aliases) if rng.random() < 0.4]
        text = f"SELECT {', '.join([*keys, *aggregates])} FROM {self._draw_from_clause(aliases, conditions)}"
        text += f" WHERE {' AND '.join(conditions)}" if conditions else ""
        text += f" GROUP BY {', '.join(keys)}" if keys else ""
        text += " HAVING count(*) > 1" if rng.random() < 0.2 else ""
        if keys and rng.random() < 0.2:
            text += f" ORDER BY {', '.join(map(str, range(1, len(keys) + 1)))} LIMIT 3"
        return text

    def _draw_from_clause(self, aliases: list[str], conditions: list[str]) -> str:
        """Return a random text of FROM. Conditions of the joins may be added to `conditions`."""
        rng = self._rng
        version = " FOR VERSION AS OF 'old'" if self.has_tag and rng.random() < 0.3 else ""
        sources = {alias: f"{self._name}.{DIMENSIONS[alias][0]}{version} {alias}" for alias in aliases}
        facts = f"{self._name}.facts{version} f"
        join_conditions = {alias: f"f.{DIMENSIONS[alias][1]} = {alias}.{DIMENSIONS[alias][1]}" for alias in aliases}
        if rng.random() < 0.4:
            conditions += join_conditions.values()
            all_tables = [facts, *sources.values()]
            rng.shuffle(all_tables)
            return ", ".join(all_tables)
        text = facts
        if rng.random() < 0.3:
            first_alias = aliases[0]
            word = rng.choice(("JOIN", "LEFT JOIN", "RIGHT JOIN"))
            text = f"{sources.pop(first_alias)} {word} {facts} ON {join_conditions[first_alias]}"
        for alias, source in sources.items():
            # Inner and left joins are the usual joins of a star schema, so they are more frequent.
            word = rng.choice(("JOIN", "JOIN", "LEFT JOIN", "LEFT JOIN", "RIGHT JOIN", "FULL JOIN"))
            text += f" {word} {source} ON {join_conditions[alias]}"
            if word == "LEFT JOIN" and rng.random() < 0.3:
                text += f" AND {rng.choice(CONDITIONS[alias])}"
        return text

    def _draw_shop(self, key: int | None) -> dict[str, object]:
        region = self._rng.choice(("north", "south", None))
        return {"shop_id": key, "city": self._rng.choice("ab") * 2, "region": region, "amount": self._rng.randrange(5)}

    def _draw_item(self, key: int | None) -> dict[str, object]:
        return {"item_id": key, "brand": self._rng.choice(("x", "y", "z")), "weight": self._rng.randrange(5)}

    def _append(self, table: str, rows: list[dict[str, object]], schema: pa.Schema) -> None:
        with open_catalog(self._server.url) as catalog:
            catalog.load_table(f"{self._name}.{table}").append(pa.Table.from_pylist(rows, schema))

    def _run(self, text: str) -> None:
        with SqlSession(self._server.url) as session:
            session.sql(text.format(self._name)).close()


def compare_random_queries(server: ServerThread, seed: int, query_count: int) -> Counter[str]:
    """Change a star schema at random, and compare the answers of queries with and without cubes."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with closing(IndexClient(server.url)) as client, SqlSession(server.url) as session:
        star = StarSchema(server, client, rng, f"star{seed}")
        star.append_facts(60)
        star.append_facts(40)
        star.build()
        star.pin_attributes()
        texts: list[str] = []

        def compare_queries() -> None:
            # Three queries of the previous round are repeated. The session translated them before the tables changed.
            texts[:] = [*texts[-3:], *(star.draw_query() for _ in range(query_count))]
            for text in texts:
                counts[_compare_sessions(server, session, text, seed)] += 1

        for _ in range(2):
            compare_queries()
            changes = (
                star.change_dimension,
                star.maintain,
                star.tag,
                star.delete_facts,
                star.build,
                star.pin_attributes,
            )
            star.append_facts(rng.choice((1, 30)))
            for change in rng.sample(changes, 3):
                change()
        compare_queries()
    return counts


def _compare_sessions(server: ServerThread, session: SqlSession, text: str, seed: int) -> str:
    """Compare the answer with that of a new session without cubes, and return how the answer was computed.

    The new session has translated no statement and opened no table before.
    """
    with SqlSession(server.url, cubes=OFF) as plain_session:
        try:
            expected = plain_session.sql(text)
            rows = count_rows(expected)
        except InvalidRequest:
            with pytest.raises(InvalidRequest):
                session.sql(text).to_arrow()
            return "refused"
    answer = session.sql(text)
    summary = answer.explanation.cube
    assert summary is not None
    assert (answer.types, answer.schema) == (expected.types, expected.schema), f"seed {seed}: {text}"
    assert count_rows(answer) == rows, f"seed {seed}: {text}\n{answer.explanation}"
    if summary.index is None:
        return "rows"
    source = "cube and rows" if summary.row_files else "cube"
    return f"{source}, attributes" if summary.index == "attributes" else source


def test_random_star_joins_return_the_same_rows_from_cubes(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed(), first_seed() + examples(5, 2)):
        # For every third seed, compare the costs of groups and rows, although the tables are small.
        monkeypatch.setattr(plans, "CUBE_UNCHECKED_ROWS_MAX", 0 if seed % 3 == 0 else 200_000)
        # Select groups by the conditions, although the cubes have few groups.
        monkeypatch.setattr(plans, "FILTERED_GROUPS_MIN", 0)
        counts += compare_random_queries(server, seed, query_count=6)
    _check_counts(counts)
    assert counts["cube and rows"] > 0, counts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_random_star_joins_return_the_same_rows_from_cubes(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "FILTERED_GROUPS_MIN", 0)
    counts: Counter[str] = Counter()
    for seed in range(first_seed() + 1000, first_seed() + 1080):
        counts += compare_random_queries(server, seed, 15)
    _check_counts(counts)
    assert counts["cube and rows, attributes"] > 0, counts


def _check_counts(counts: Counter[str]) -> None:
    cube_answers = sum(count for source, count in counts.items() if source.startswith("cube"))
    assert cube_answers > counts.total() / 4, counts
    assert counts["cube, attributes"] > 0, counts


@pytest.fixture(scope="module")
def star(server: ServerThread) -> str:
    """Return the namespace of a star schema, whose dimension `shops` has two rows of the key 1."""
    with open_catalog(server.url) as catalog:
        catalog.create_namespace("fixed")
        facts = [{"shop_id": key, "discount": 1, "amount": 10} for key in (0, 1, 1, 2, None)]
        shops = [
            {"shop_id": key, "region": region, "amount": 7}
            for key, region in ((0, "north"), (1, "south"), (1, "north"), (5, "east"))
        ]
        for name, rows, schema in (("facts", facts, FACTS), ("shops", shops, SHOPS)):
            catalog.create_table(f"fixed.{name}", schema=schema).append(pa.Table.from_pylist(rows, schema))
    with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
        client.put_index("fixed.facts", "by_shop", kind="cube", columns=["shop_id"], measures=["sum(amount)"])
        build(client, "fixed.facts", "by_shop", workers)
    return "fixed"


def answer_query(server: ServerThread, text: str) -> tuple[CubeSummary, list[tuple[object, ...]]]:
    """Run a query in a new session, and return how it used cubes, and its rows."""
    with SqlSession(server.url) as session:
        result = session.sql(text)
        assert result.explanation.cube is not None
        rows = result.to_arrow()
        return result.explanation.cube, list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_duplicate_key_of_a_dimension_counts_each_fact_for_each_of_its_rows(server: ServerThread, star: str) -> None:
    text = (
        f"SELECT region, sum(f.amount), count(*) FROM {star}.facts f, {star}.shops s WHERE f.shop_id = s.shop_id "
        "GROUP BY region ORDER BY region"
    )
    summary, rows = answer_query(server, text)
    assert (summary.index, rows) == ("by_shop", [("north", 30, 3), ("south", 20, 2)])


@pytest.mark.slow
def test_left_join_keeps_facts_without_a_dimension_row(server: ServerThread, star: str) -> None:
    text = f"SELECT region, count(*) FROM {star}.facts LEFT JOIN {star}.shops USING (shop_id) GROUP BY 1 ORDER BY 1"
    summary, rows = answer_query(server, text)
    assert (summary.index, rows) == ("by_shop", [("north", 3), ("south", 2), (None, 2)])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("select", "join", "reason"),
    [
        ("sum(s.amount)", "JOIN", "is not a measure"),
        ("count(region)", "JOIN", "is not a measure"),
        ("count(*)", "RIGHT JOIN", "adds rows that the table does not have"),
        ("count(*)", "FULL JOIN", "adds rows that the table does not have"),
        ("sum(discount)", "JOIN", "is not a measure"),
    ],
)
def test_join_that_a_cube_cannot_answer_reads_rows_and_states_the_reason(
    server: ServerThread, star: str, select: str, join: str, reason: str
) -> None:
    text = f"SELECT {select} FROM {star}.facts f {join} {star}.shops s ON f.shop_id = s.shop_id"
    summary, _ = answer_query(server, text)
    assert summary.index is None
    assert reason in (summary.reason or "")


@pytest.fixture
def sales(server: ServerThread, request: pytest.FixtureRequest) -> str:
    """Return the namespace of facts with the cube `by_region`, which has an attribute of the dimension `shops`."""
    name = f"sales{sum(map(ord, request.node.name))}"  # Each test has its own namespace.
    with open_catalog(server.url) as catalog:
        catalog.create_namespace(name)
        facts = [{"shop_id": key, "discount": 1, "amount": 10} for key in (0, 1, 1, 2, None)]
        shops = [
            {"shop_id": key, "region": region, "amount": 7} for key, region in ((0, "north"), (1, None), (5, "east"))
        ]
        for table, rows, schema in (("facts", facts, FACTS), ("shops", shops, SHOPS)):
            catalog.create_table(f"{name}.{table}", schema=schema).append(pa.Table.from_pylist(rows, schema))
    with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
        columns = pin_attributes(client, [f"{name}.shops.region via shop_id = shop_id"])
        client.put_index((name, "facts"), "by_region", kind="cube", columns=columns, measures=["sum(amount)"])
        build(client, (name, "facts"), "by_region", workers)
    return name


REGIONS = (
    "SELECT region, sum(f.amount) FROM {0}.facts f JOIN {0}.shops s ON f.shop_id = s.shop_id GROUP BY 1 ORDER BY 1"
)


def test_attribute_in_the_cube_replaces_its_dimension_table(server: ServerThread, sales: str) -> None:
    with SqlSession(server.url) as session:
        plan = session.explain(REGIONS.format(sales))
    assert [table.files for table in plan.tables] == [0, 0]  # No file of the facts or of the dimension table is read.
    summary, rows = answer_query(server, REGIONS.format(sales))
    # A null region differs from a shop that does not exist.
    assert (summary, rows) == (CubeSummary("by_region", files=1, row_files=0), [("north", 10), (None, 20)])


def test_attribute_of_a_changed_dimension_table_is_not_used_until_the_job_defines_the_cube_again(
    server: ServerThread, sales: str
) -> None:
    shop = {"shop_id": 2, "region": "west", "amount": 7}
    with open_catalog(server.url) as catalog:
        shops = catalog.load_table(f"{sales}.shops")
        snapshot_before = shops.current_snapshot()
        assert snapshot_before is not None
        shops.append(pa.Table.from_pylist([shop], SHOPS))
    summary, rows = answer_query(server, REGIONS.format(sales))
    assert (summary.index, rows) == (None, [("north", 10), ("west", 10), (None, 20)])
    text = REGIONS.format(sales).replace("shops s", f"shops FOR VERSION AS OF {snapshot_before.snapshot_id} s")
    summary, rows = answer_query(server, text)
    assert (summary.index, rows) == ("by_region", [("north", 10), (None, 20)])
    with closing(IndexClient(server.url)) as client:
        # The job of the table service defines the cube again.
        assert run_indexing(client, (sales, "facts"))["redefined"] == 1
        assert "redefined" not in run_indexing(client, (sales, "facts"))
    summary, rows = answer_query(server, REGIONS.format(sales))
    assert (summary.index, rows) == ("by_region", [("north", 10), ("west", 10), (None, 20)])
    with open_catalog(server.url) as catalog:
        with catalog.load_table(f"{sales}.facts").update_schema() as update:
            update.delete_column("shop_id")
        catalog.load_table(f"{sales}.shops").append(pa.Table.from_pylist([shop | {"shop_id": 3}], SHOPS))
    with closing(IndexClient(server.url)) as client:
        assert run_indexing(client, (sales, "facts")) == {}, "a cube with a dropped column stays unchanged"


@pytest.mark.slow
def test_new_facts_are_joined_with_the_dimension_table(server: ServerThread, sales: str) -> None:
    facts = [{"shop_id": key, "discount": 1, "amount": 5} for key in (0, 3, 5)]
    with open_catalog(server.url) as catalog:
        catalog.load_table(f"{sales}.facts").append(pa.Table.from_pylist(facts, FACTS))
    summary, rows = answer_query(server, REGIONS.format(sales))
    assert (summary, rows) == (CubeSummary("by_region", 1, 1), [("east", 5), ("north", 15), (None, 20)])


@pytest.mark.slow
def test_query_requests_a_dimension_table_that_cannot_be_loaded_once(
    server: ServerThread, sales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_catalog(server.url) as catalog:
        for _ in range(3):
            catalog.load_table(f"{sales}.facts").append(pa.Table.from_pylist([{"shop_id": 0, "amount": 5}], FACTS))
    attempts = 0

    def fail(*args: object) -> None:
        nonlocal attempts
        attempts += 1
        raise Unavailable("the server restarts")

    monkeypatch.setattr(computed_groups, "read_dimensions", fail)
    with SqlSession(server.url) as session:
        for _ in range(2):
            answer = session.sql(REGIONS.format(sales))
            assert answer.explanation.cube == CubeSummary("by_region", 1, 3)
            assert answer.to_arrow().column(1).to_pylist() == [25, 20]
    assert attempts == 1, "the second query does not try again to load the dimension table"


def test_dimension_table_with_a_duplicate_key_is_refused(server: ServerThread, star: str) -> None:
    """The cube groups facts by a column of a dimension table, so each key may occur only once in that table."""
    with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
        columns = pin_attributes(client, [f"{star}.shops.region via shop_id = shop_id"])
        client.put_index((star, "facts"), "by_region", kind="cube", columns=columns, measures=["count(*)"])
        with pytest.raises(InvalidRequest, match=r"shop_id of fixed\.shops is not a key"):
            build(client, (star, "facts"), "by_region", workers)
        reason = next(client.timeline((star, "facts"), action="indexing", newest_first=True)).summary["reason"]
        # Readers of the facts can load the reason, so it does not describe the dimension table.
        assert reason == "A dimension table cannot be used; only the builder reports why"
        client.drop_index((star, "facts"), "by_region")


@pytest.mark.slow
def test_record_index_on_an_attribute_of_another_table_is_refused(server: ServerThread, star: str) -> None:
    with closing(IndexClient(server.url)) as client:
        columns = pin_attributes(client, [f"{star}.shops.region via shop_id = shop_id"])
        with pytest.raises(InvalidRequest, match="only bloom, bitmap, cube accept attributes"):
            client.put_index((star, "facts"), "regions", kind="record", columns=columns[:1])


@pytest.mark.slow
def test_indexer_backs_off_from_a_dropped_dimension_table(server: ServerThread, sales: str) -> None:
    facts = (sales, "facts")
    append_fact(server, sales)
    with open_catalog(server.url) as catalog:
        catalog.drop_table(f"{sales}.shops")
    with closing(IndexClient(server.url)) as client:
        indexer = Indexer(client, open_in_process_workers)
        assert indexer.maintain(facts).failed == 1
        build_count = len(list(client.timeline(facts, action="indexing")))
        assert indexer.maintain(facts).failed == 0
        assert len(list(client.timeline(facts, action="indexing"))) == build_count
        with closing(InProcessWorkers()) as workers, pytest.raises(InvalidRequest, match=r"\.shops does not exist"):
            build(client, facts, "by_region", workers)


@pytest.mark.slow
def test_index_files_are_merged_after_their_dimension_table_is_dropped(server: ServerThread, sales: str) -> None:
    facts = (sales, "facts")
    with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
        for _ in range(MERGED_FILES_MIN - 1):
            append_fact(server, sales)
            build(client, facts, "by_region", workers)
        with open_catalog(server.url) as catalog:
            catalog.drop_table(f"{sales}.shops")
        indexing_round = Indexer(client, open_in_process_workers).maintain(facts)
        assert (indexing_round.merges, indexing_round.failed) == (1, 0)


@pytest.mark.slow
def test_dimension_tables_above_the_limit_of_memory_are_refused(
    server: ServerThread, sales: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append_fact(server, sales)
    monkeypatch.setattr(lookups, "DIMENSION_BYTES_MAX", 20)
    with (
        closing(IndexClient(server.url)) as client,
        closing(InProcessWorkers()) as workers,
        pytest.raises(InvalidRequest, match="have more than 20 bytes in memory"),
    ):
        build(client, (sales, "facts"), "by_region", workers)


def append_fact(server: ServerThread, namespace: str) -> None:
    with open_catalog(server.url) as catalog:
        fact = {"shop_id": 1, "discount": 1, "amount": 10}
        catalog.load_table(f"{namespace}.facts").append(pa.Table.from_pylist([fact], FACTS))


def open_in_process_workers() -> AbstractContextManager[Workers]:
    return closing(InProcessWorkers())


@pytest.mark.slow
def test_cube_that_covers_few_rows_is_not_used(server: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the groups and the rows of the other files would cost more than reading the rows of all files."""
    query = "SELECT region, sum(f.amount) FROM few.facts f JOIN few.shops s ON f.shop_id = s.shop_id GROUP BY region"
    facts = pa.Table.from_pylist([{"shop_id": number, "discount": 1, "amount": 10} for number in range(20)], FACTS)
    shops = pa.Table.from_pylist([{"shop_id": number, "region": "north", "amount": 7} for number in range(20)], SHOPS)
    with open_catalog(server.url) as catalog:
        catalog.create_namespace("few")
        catalog.create_table("few.shops", schema=SHOPS).append(shops)
        created_table = catalog.create_table("few.facts", schema=FACTS)
        created_table.append(facts.slice(0, 5))
        with closing(IndexClient(server.url)) as client, closing(InProcessWorkers()) as workers:
            client.put_index("few.facts", "by_shop", kind="cube", columns=["shop_id"], measures=["sum(amount)"])
            build(client, "few.facts", "by_shop", workers)
        created_table.append(facts.slice(5))
    with SqlSession(server.url) as session:
        answer = session.sql(query)
        assert answer.explanation.cube == CubeSummary("by_shop", 1, 1)
        rows = count_rows(answer)
        # Costs are compared only above this number of rows, and the facts have 20 rows.
        monkeypatch.setattr(plans, "CUBE_UNCHECKED_ROWS_MAX", 10)
        answer = session.sql(query)
        summary = answer.explanation.cube
        assert count_rows(answer) == rows
    assert summary is not None
    assert (summary.index, summary.row_files) == (None, 3), "two files of facts, and a file of shops"
    assert summary.reason is not None
    assert summary.reason.startswith(
        "by_shop: rows of 1 of 2 files would be read besides 5 groups; without the cube, 20"
    )
