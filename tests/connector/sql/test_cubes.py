"""Queries return the same rows from cubes as from rows: random tables, cubes, queries and changes of the table."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from seamark.connector.client.errors import BadRequest
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.sql.cubes.plans import OFF
from seamark.connector.sql.session import SqlSession
from tests.connector.lake import catalog_at
from tests.connector.served import Served
from tests.connector.sql.comparing import rows_of
from tests.connector.sql.random_queries import SCHEMA, random_rows
from tests.seeds import examples, first_seed

EXACT_FLOATS = (0.0, -0.0, 1.5, -2.25, float("nan"), float("inf"), float("-inf"), 1024.0)
"""Floats whose sums do not depend on the order of the additions."""
DIMENSIONS = {
    "id": ["id"],
    "k": ["k"],
    "name": ["name"],
    "price": ["price"],
    "x": ["x"],
    "y": ["y"],
    "ok": ["ok"],
    "d": ["d"],
    "tz": ["tz", "extract(year FROM tz)"],
    "month(d)": ["date_trunc('month', d)", "year(d)", "month(d)", "quarter(d)"],
    "day(ts)": ["date_trunc('day', ts)", "date_trunc('week', ts)", "CAST(ts AS date)", "day(ts)", "month(ts)"],
    "hour(ts)": ["date_trunc('hour', ts)", "hour(ts)", "date_trunc('quarter', ts)"],
    "day(tz)": ["year(tz)", "extract(month FROM tz)"],
}
"""The expressions of a query that follow from each dimension."""
OPERANDS = ["k", "id", "price", "rate", "price * (1 - rate)", "k + id", "k * 3 - id", "fine", "x", "y", "price * 1.5"]
COMPARED = [*OPERANDS, "name", "d", "ts", "tz"]


def exact_rows(rng: random.Random, rows: int) -> pa.Table:
    """Return random rows, whose floats have exact sums and whose times are before and after 1970."""
    table = random_rows(rng, rows)
    for name in ("x", "y"):
        values = [None if rng.random() < 0.1 else rng.choice(EXACT_FLOATS) for _ in range(rows)]
        number = table.column_names.index(name)
        table = table.set_column(number, name, pa.array(values, SCHEMA.field(name).type))
    days = [None if rng.random() < 0.1 else rng.randint(-400, 400) for _ in range(rows)]
    table = table.set_column(table.column_names.index("d"), "d", pa.array(days, pa.int32()).cast(pa.date32()))
    times = [None if day is None else day * 86_400_000_000 + rng.choice((0, -1, 3_600_000_001)) for day in days]
    for name in ("ts", "tz"):
        column = pa.array(times, pa.int64()).cast(SCHEMA.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


class RandomAggregates:
    """Draws cubes, and queries that mostly follow from them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def cube(self) -> tuple[list[str], list[str]]:
        """Return the dimensions and the measures of a cube."""
        rng = self._rng
        dimensions = rng.sample(list(DIMENSIONS), rng.randint(1, 4))
        measures = {"count(*)"}
        for _ in range(rng.randint(1, 6)):
            function = rng.choice(("sum", "avg", "count", "min", "max"))
            operands = COMPARED if function in ("count", "min", "max") else OPERANDS
            measures.add(f"{function}({rng.choice(operands)})")
        return dimensions, sorted(measures)

    def query(self, dimensions: list[str], measures: list[str], source: str) -> str:
        rng = self._rng
        expressions = [one for dimension in dimensions for one in DIMENSIONS[dimension]]
        keys = rng.sample(expressions, rng.randint(0, min(3, len(expressions))))
        aggregates = [self._aggregate(measures, dimensions) for _ in range(rng.randint(0 if keys else 1, 3))]
        text = f"SELECT {', '.join([*keys, *aggregates])} FROM {source} a"
        if rng.random() < 0.5:
            text += f" WHERE {' AND '.join(self._condition(dimensions) for _ in range(rng.randint(1, 2)))}"
        if keys:
            text += f" GROUP BY {', '.join(keys)}"
        if rng.random() < 0.3:
            text += f" HAVING {rng.choice(measures)} IS NOT NULL AND count(*) > {rng.randint(0, 3)}"
        if keys and rng.random() < 0.3:
            text += f" ORDER BY {', '.join(map(str, range(1, len(keys) + 1)))} LIMIT {rng.choice((0, 1, 5, 1000))}"
        return text

    def _aggregate(self, measures: list[str], dimensions: list[str]) -> str:
        rng = self._rng
        measure = rng.choice(measures)
        draw = rng.random()
        plain = [one for one in dimensions if "(" not in one and one not in ("ok", "x", "y")]
        if draw < 0.15 and plain:
            return rng.choice(("min({})", "max({})", "count(DISTINCT {})")).format(rng.choice(plain))
        if draw < 0.3:
            return f"{measure} FILTER (WHERE {self._condition(dimensions)})"
        if draw < 0.35:
            return f"count_if({self._condition(dimensions)})"
        if draw < 0.4:
            return "sum(big)"  # Most cubes do not have it.
        return measure

    def _condition(self, dimensions: list[str]) -> str:
        rng = self._rng
        match rng.choice(dimensions):
            case "id" | "k" as name:
                return f"{name} {rng.choice(('=', '<', '>=', '<>'))} {rng.randint(-3, 20)}"
            case "name":
                return rng.choice(("name = 'a'", "name LIKE 'b%'", "name IN ('ab', 'A')", "name IS NULL"))
            case "price":
                return f"price > {rng.randint(-300, 300)}.5"
            case "x" | "y" as name:
                return f"{name} {rng.choice(('=', '<', '>'))} {rng.choice(('0', '1.5', '-2.25'))}"
            case "ok":
                return rng.choice(("ok", "NOT ok", "ok IS NULL"))
            case "d":
                return f"d {rng.choice(('<', '>=', '='))} DATE '{rng.choice(('1969-12-31', '1970-01-01'))}'"
            case "month(d)":
                return rng.choice(("d >= DATE '1970-01-01'", "d < DATE '1969-06-01'", "year(d) = 1969"))
            case "day(ts)" | "hour(ts)":
                return rng.choice(("ts >= DATE '1969-12-31'", "ts < TIMESTAMP '1970-02-03 00:00:00'", "ts IS NOT NULL"))
            case _:
                return rng.choice(("year(tz) = 1970", "tz IS NOT NULL"))


class World:
    """A table with cubes, its session with and without cubes, and changes of it."""

    def __init__(self, served: Served, rng: random.Random, name: str) -> None:
        self.served, self.rng, self.name = served, rng, name
        self.client = IndexClient(served.url)
        with catalog_at(served.url) as catalog:
            catalog.create_namespace_if_not_exists("db")
            catalog.create_table(name, schema=SCHEMA, properties={"write.delete.mode": "merge-on-read"})
        self.cubes: list[tuple[list[str], list[str]]] = []
        self.tags: list[str] = []

    def append(self, rows: int = 30) -> None:
        with catalog_at(self.served.url) as catalog:
            catalog.load_table(self.name).append(exact_rows(self.rng, rows))

    def add_cube(self, dimensions: list[str], measures: list[str]) -> None:
        name = f"cube{len(self.cubes)}"
        self.client.put_index(self.name, name, kind="cube", columns=dimensions, measures=measures)
        self.cubes.append((dimensions, measures))

    def build(self) -> None:
        for number in range(len(self.cubes)):
            with closing(InProcessWorkers()) as workers:
                build(self.client, self.name, f"cube{number}", workers)

    def delete(self, condition: str) -> None:
        with SqlSession(self.served.url) as session:
            session.sql(f"DELETE FROM {self.name} WHERE {condition}").close()

    def tag(self) -> None:
        with catalog_at(self.served.url) as catalog:
            table = catalog.load_table(self.name)
            snapshot = table.current_snapshot()
            assert snapshot is not None
            tag = f"tag{len(self.tags)}"
            table.manage_snapshots().create_tag(snapshot.snapshot_id, tag).commit()
            self.tags.append(tag)

    def roll_back(self) -> None:
        with catalog_at(self.served.url) as catalog:
            table = catalog.load_table(self.name)
            parent = table.metadata.snapshots[0].snapshot_id
            table.manage_snapshots().set_current_snapshot(parent).commit()

    def index_files(self) -> list[Path]:
        files = [
            one
            for number in range(len(self.cubes))
            for one in self.client.index(self.name, f"cube{number}").json["index-files"]
        ]
        return [Path(one["location"].removeprefix("file://")) for one in files if one["state"] == "live"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("cubes"), index_wait_s=30)
    served.start()
    yield served
    served.stop()


def run_case(served: Served, seed: int, queries: int) -> Counter[str]:
    """Change a table at random, and compare the answers of queries with and without cubes."""
    rng = random.Random(seed)
    aggregates = RandomAggregates(rng)
    world = World(served, rng, f"db.t{seed}")
    world.append()
    for _ in range(2):
        world.add_cube(*aggregates.cube())
    counts: Counter[str] = Counter()
    with SqlSession(served.url) as session, SqlSession(served.url, cubes=OFF) as plain:
        for _ in range(3):
            for step in rng.sample(("append", "delete", "build", "tag", "build", "roll back", "append"), 4):
                match step:
                    case "append":
                        world.append(rng.choice((1, 30)))
                    case "delete":
                        world.delete(rng.choice(("id = 3", "k = 7", "name = 'a'")))
                    case "build":
                        world.build()
                    case "tag":
                        world.tag()
                    case "roll back" if rng.random() < 0.3:
                        world.roll_back()
            for _ in range(queries):
                source = world.name
                if world.tags and rng.random() < 0.2:
                    source += f" FOR VERSION AS OF '{rng.choice(world.tags)}'"
                text = aggregates.query(*rng.choice(world.cubes), source)
                counts[_compare(session, plain, text, seed)] += 1
    return counts


def _compare(session: SqlSession, plain: SqlSession, text: str, seed: int) -> str:
    """Compare the answers of both sessions, and return how the first one was found."""
    try:
        expected = plain.sql(text)
        rows = rows_of(expected)
    except BadRequest as refused:
        with pytest.raises(BadRequest):
            session.sql(text).to_arrow()
        return f"refused: {str(refused)[:40]}"
    answered = session.sql(text)
    summary = answered.explanation.cube
    assert summary is not None
    assert (answered.types, answered.schema) == (expected.types, expected.schema), f"seed {seed}: {text}"
    assert rows_of(answered) == rows, f"seed {seed}: {text}\n{answered.explanation}"
    if summary.index is None:
        return "rows"
    return "cube and rows" if summary.row_files else "cube"


def test_random_queries_return_the_same_rows_from_cubes(served: Served) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed(), first_seed() + examples(8, 3)):
        counts += run_case(served, seed, 8)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 3, counts
    assert counts["cube and rows"] > 0, counts


@pytest.mark.slow
def test_thousands_of_random_queries_return_the_same_rows_from_cubes(served: Served) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed() + 1000, first_seed() + 1150):
        counts += run_case(served, seed, 15)
    assert counts["cube"] > 1000, counts
