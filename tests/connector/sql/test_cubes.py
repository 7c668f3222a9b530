"""Tests that queries return the same rows from cubes as from data files.

Tables, cubes, queries and changes of the tables are random.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import date, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.table import Table
from pyiceberg.types import LongType

from seamark.commands.index import index
from seamark.connector.client.errors import InvalidRequest, NoSuchResource, ServerFailed
from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.sql.cubes import computed_groups, plans
from seamark.connector.sql.cubes.plans import EXACT, OFF, CubeSummary
from seamark.connector.sql.session import SqlSession
from seamark.connector.write.appends import append
from tests.connector.lake import open_catalog
from tests.connector.server_thread import ServerThread
from tests.connector.sql.comparing import count_rows
from tests.connector.sql.random_queries import SCHEMA, draw_rows
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
STRUCT_DIMENSIONS = {
    "n.f": ["n.f", "a.n.f", "n.f + 1"],
    "n.deep.v": ["n.deep.v", "a.n.deep.v"],
    "n.name": ["n.name"],
    "day(n.ts)": ["date_trunc('month', n.ts)", "year(a.n.ts)", "CAST(n.ts AS date)"],
    "month(n.deep.d)": ["date_trunc('month', n.deep.d)", "quarter(a.n.deep.d)"],
}
"""The same for fields of the struct `n`."""
STRUCT_OPERANDS = ["n.f", "n.deep.v", "n.f * 2 + k", "n.deep.v - id"]
STRUCT = pa.struct(
    [
        ("f", pa.int32()),
        ("name", pa.string()),
        ("ts", pa.timestamp("us")),
        ("deep", pa.struct([("v", pa.int64()), ("d", pa.date32())])),
    ]
)
OPERANDS = ["k", "id", "price", "rate", "price * (1 - rate)", "k + id", "k * 3 - id", "fine", "x", "y", "price * 1.5"]
COMPARED_COLUMNS = [*OPERANDS, "name", "d", "ts", "tz"]
SKETCHED = ["k", "id", "name", "d", "ts", "tz"]


def draw_rows_with_exact_sums(rng: random.Random, row_count: int) -> pa.Table:
    """Return random rows, whose floats have exact sums and whose times are before and after 1970."""
    table = draw_rows(rng, row_count)
    for name in ("x", "y"):
        values = [None if rng.random() < 0.1 else rng.choice(EXACT_FLOATS) for _ in range(row_count)]
        column_number = table.column_names.index(name)
        table = table.set_column(column_number, name, pa.array(values, SCHEMA.field(name).type))
    days = [None if rng.random() < 0.1 else rng.randint(-400, 400) for _ in range(row_count)]
    table = table.set_column(table.column_names.index("d"), "d", pa.array(days, pa.int32()).cast(pa.date32()))
    # A time is midnight, the microsecond before it, or an hour and a microsecond after it.
    times = [None if day is None else day * 86_400_000_000 + rng.choice((0, -1, 3_600_000_001)) for day in days]
    for name in ("ts", "tz"):
        column = pa.array(times, pa.int64()).cast(SCHEMA.field(name).type)
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def draw_rows_with_structs(rng: random.Random, row_count: int) -> pa.Table:
    """Return random rows with a struct `n`, which is null itself, or has nulls at each level.

    The structs are drawn from a copy of the generator. So the other columns do not depend on them, and equal those of
    `draw_rows_with_exact_sums`.
    """
    structs_rng = random.Random()
    structs_rng.setstate(rng.getstate())

    def draw_struct() -> dict[str, object] | None:
        deep = {
            "v": structs_rng.choice((None, -1, 2, 3)),
            "d": structs_rng.choice((None, date(1969, 12, 31), date(1970, 3, 4))),
        }
        time = datetime(1969, 12, 30) + timedelta(hours=structs_rng.randint(0, 96))
        values = {
            "f": structs_rng.choice((None, 1, 2)),
            "name": structs_rng.choice((None, "", "a")),
            "ts": structs_rng.choice((None, time)),
        }
        return structs_rng.choice(
            (None, values | {"deep": structs_rng.choice((None, deep, deep))}, values | {"deep": deep})
        )

    structs = pa.array([draw_struct() for _ in range(row_count)], STRUCT)
    return draw_rows_with_exact_sums(rng, row_count).append_column("n", structs)


_GROUPING_PATTERN = re.compile("ROLLUP|CUBE|GROUPING SETS")


def _draw_grouping(keys: list[str], rng: random.Random) -> str:
    """Return the keys of GROUP BY, sometimes in several grouping sets if all of them are columns."""
    names = _list_keys(keys, rng)
    if not all(key.isidentifier() for key in keys) or rng.random() < 0.3:
        return names
    some_names = ", ".join(rng.sample(keys, rng.randint(0, len(keys))))
    return rng.choice((f"ROLLUP ({names})", f"CUBE ({names})", f"GROUPING SETS (({names}), ({some_names}))"))


def _list_keys(keys: list[str], _: random.Random) -> str:
    return ", ".join(keys)


class RandomAggregates:
    """Draws cubes, and queries that mostly follow from them."""

    def __init__(
        self,
        rng: random.Random,
        *,
        has_grouping_sets: bool = False,
        has_sketches: bool = False,
        has_structs: bool = False,
    ) -> None:
        self._rng = rng
        self._dimensions = DIMENSIONS | (STRUCT_DIMENSIONS if has_structs else {})
        self._operands = [*OPERANDS, *(STRUCT_OPERANDS if has_structs else [])]
        self._functions = ["sum", "avg", "count", "min", "max", *(["approx_distinct"] if has_sketches else [])]
        self._draw_grouping = _draw_grouping if has_grouping_sets else _list_keys

    def draw_cube(self) -> tuple[list[str], list[str]]:
        """Return the dimensions and the measures of a cube."""
        rng = self._rng
        dimensions = rng.sample(list(self._dimensions), rng.randint(1, 4))
        measures = {"count(*)"}
        for _ in range(rng.randint(1, 6)):
            function = rng.choice(self._functions)
            # sum and avg do not accept the last columns: a text, a date and timestamps.
            operands = [
                *self._operands,
                *(COMPARED_COLUMNS[len(OPERANDS) :] if function in ("count", "min", "max") else []),
            ]
            operands = SKETCHED if function == "approx_distinct" else operands
            measures.add(f"{function}({rng.choice(operands)})")
        return dimensions, sorted(measures)

    def query(self, dimensions: list[str], measures: list[str], source: str) -> str:
        """Return a random query that a cube with these dimensions and measures can usually answer."""
        rng = self._rng
        expressions = [term for dimension in dimensions for term in self._dimensions[dimension]]
        keys = rng.sample(expressions, rng.randint(0, min(3, len(expressions))))
        aggregates = [self._draw_aggregate(measures, dimensions) for _ in range(rng.randint(0 if keys else 1, 3))]
        outputs = [self._draw_output(value) for value in (*keys, *aggregates)]
        distinct_keyword = "DISTINCT " if rng.random() < 0.1 else ""
        text = f"SELECT {distinct_keyword}{', '.join(outputs)} FROM {source} a"
        if rng.random() < 0.5:
            text += f" WHERE {' AND '.join(self._draw_condition(dimensions) for _ in range(rng.randint(1, 2)))}"
        if keys:
            text += f" GROUP BY {self._draw_grouping(keys, random.Random(text))}"
        if rng.random() < 0.3:
            text += f" HAVING {rng.choice(measures)} IS NOT NULL AND count(*) > {rng.randint(0, 3)}"
        if rng.random() < 0.1:
            text += f" ORDER BY {rng.choice([*measures, *keys])}"
        elif keys and rng.random() < 0.3 and not _GROUPING_PATTERN.search(text):
            # Grouping sets can have rows with equal keys.
            text += f" ORDER BY {', '.join(map(str, range(1, len(keys) + 1)))} LIMIT {rng.choice((0, 1, 5, 1000))}"
        return self._order_by_field(text, dimensions, outputs)

    def _order_by_field(self, text: str, dimensions: list[str], outputs: list[str]) -> str:
        """Return the query, sometimes ordered by a field of a struct that has the name of a column of the table."""
        # With one of these words, ORDER BY cannot be added, or the name in it is not ambiguous.
        excluded_words = " AS ", " ORDER BY ", "DISTINCT ", "ROLLUP", "CUBE", "GROUPING SETS"
        if "n.name" not in outputs or "name" in outputs or any(word in text for word in excluded_words):
            return text
        rng = random.Random(text)
        if "name" in dimensions and rng.random() < 0.7:
            text = text.replace(" GROUP BY ", " GROUP BY name, ")
        return f"{text} ORDER BY name, {', '.join(map(str, range(1, len(outputs) + 1)))} LIMIT {rng.choice((1, 3))}"

    def _draw_output(self, value: str) -> str:
        """Return an output of SELECT, sometimes with the name of a column. In ORDER BY, the name means the output."""
        rng = self._rng
        return f"{value} AS {rng.choice(('k', 'id', 'name', 'ts', 'total'))}" if rng.random() < 0.15 else value

    def _draw_aggregate(self, measures: list[str], dimensions: list[str]) -> str:
        rng = self._rng
        measure = rng.choice(measures)
        random_number = rng.random()
        # Booleans and floats are not aggregated as dimensions.
        plain_dimensions = [
            dimension for dimension in dimensions if "(" not in dimension and dimension not in ("ok", "x", "y")
        ]
        if random_number < 0.15 and plain_dimensions:
            return rng.choice(("min({})", "max({})", "count(DISTINCT {})")).format(rng.choice(plain_dimensions))
        if random_number < 0.3:
            return f"{measure} FILTER (WHERE {self._draw_condition(dimensions)})"
        if random_number < 0.35:
            return f"count_if({self._draw_condition(dimensions)})"
        if random_number < 0.4:
            return "sum(big)"  # Most cubes do not have this measure.
        return measure

    def _draw_condition(self, dimensions: list[str]) -> str:
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
            case "n.f" | "n.deep.v" as name:
                return rng.choice((f"{name} > 1", f"a.{name} IS NULL", f"{name} IN (-1, 2)"))
            case "n.name":
                return "n.name = 'a'"
            case "day(n.ts)":
                return rng.choice(("n.ts >= DATE '1970-01-01'", "n.ts IS NULL", "year(n.ts) = 1969"))
            case "month(n.deep.d)":
                return rng.choice(("n.deep.d >= DATE '1970-01-01'", "n.deep.d < DATE '1970-01-02'"))
            case "day(ts)" | "hour(ts)":
                return rng.choice(("ts >= DATE '1969-12-31'", "ts < TIMESTAMP '1970-02-03 00:00:00'", "ts IS NOT NULL"))
            case _:
                return rng.choice(("year(tz) = 1970", "tz IS NOT NULL"))


class CubeWorld:
    """A table with cubes and tags, and changes of the table."""

    def __init__(self, server: ServerThread, client: IndexClient, rng: random.Random, name: str) -> None:
        self.server, self.client, self.rng, self.name = server, client, rng, name
        self.cubes: list[tuple[list[str], list[str]]] = []
        self.tags: list[str] = []

    @staticmethod
    def for_existing_table(server: ServerThread, client: IndexClient, name: str) -> CubeWorld:
        """Return an object for a table that exists and has the cube `cube0`."""
        cubed_table = CubeWorld(server, client, random.Random(1), name)
        cubed_table.cubes.append(([], []))  # The dimensions and measures are used only to draw queries.
        return cubed_table

    def create_table(self) -> None:
        with open_catalog(self.server.url) as catalog:
            catalog.create_namespace_if_not_exists("db")
            schema = SCHEMA.append(pa.field("n", STRUCT))
            catalog.create_table(self.name, schema=schema, properties={"write.delete.mode": "merge-on-read"})

    def append(self, rows: int = 30) -> None:
        with open_catalog(self.server.url) as catalog:
            catalog.load_table(self.name).append(draw_rows_with_structs(self.rng, rows))

    def add_cube(self, dimensions: list[str], measures: list[str]) -> None:
        name = f"cube{len(self.cubes)}"
        self.client.put_index(self.name, name, kind="cube", columns=dimensions, measures=measures)
        self.cubes.append((dimensions, measures))

    def build(self) -> None:
        for number in range(len(self.cubes)):
            with closing(InProcessWorkers()) as workers:
                build(self.client, self.name, f"cube{number}", workers)

    def delete(self, condition: str) -> None:
        with SqlSession(self.server.url) as session:
            session.sql(f"DELETE FROM {self.name} WHERE {condition}").close()

    def tag(self) -> None:
        with open_catalog(self.server.url) as catalog:
            table = catalog.load_table(self.name)
            snapshot = table.current_snapshot()
            assert snapshot is not None
            tag = f"tag{len(self.tags)}"
            table.manage_snapshots().create_tag(snapshot.snapshot_id, tag).commit()
            self.tags.append(tag)

    def roll_back(self) -> None:
        with open_catalog(self.server.url) as catalog:
            table = catalog.load_table(self.name)
            parent = table.metadata.snapshots[0].snapshot_id
            table.manage_snapshots().set_current_snapshot(parent).commit()

    def damage_index_file(self, *, is_deleted: bool) -> None:
        """Delete a live index file if `is_deleted` is true. Otherwise change one bit of it.

        If there is no live index file, do nothing.
        """
        index_reports = [self.client.index(self.name, f"cube{number}").json for number in range(len(self.cubes))]
        live_locations = [
            file["location"] for index in index_reports for file in index["index-files"] if file["state"] == "live"
        ]
        paths = [path for location in live_locations if (path := Path(location.removeprefix("file://"))).exists()]
        if not paths:
            return
        path = self.rng.choice(paths)
        data = bytearray(path.read_bytes())
        path.unlink()
        if not is_deleted:
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            path.write_bytes(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with ServerThread(tmp_path_factory.mktemp("cubes"), index_wait_s=30) as server:
        yield server


def compare_random_queries(server: ServerThread, seed: int, query_count: int) -> Counter[str]:
    """Change a table with two cubes at random in three rounds, and compare queries with and without cubes.

    Returns:
        The number of queries by the way in which their answers were computed.
    """
    rng = random.Random(seed)
    aggregates = RandomAggregates(rng, has_grouping_sets=True, has_sketches=True, has_structs=True)
    counts: Counter[str] = Counter()
    with (
        closing(IndexClient(server.url)) as client,
        SqlSession(server.url) as session,
        SqlSession(server.url, cubes=OFF) as plain_session,
    ):
        cubed_table = CubeWorld(server, client, rng, f"db.t{seed}")
        cubed_table.create_table()
        cubed_table.append()
        for _ in range(2):
            cubed_table.add_cube(*aggregates.draw_cube())
        for _ in range(3):
            # Appends and builds occur twice, so that most rounds have both files with groups and files without groups.
            steps = ("append", "delete", "build", "tag", "build", "roll back", "append", "damage", "lose")
            for step in rng.sample(steps, 5):
                match step:
                    case "append":
                        cubed_table.append(rng.choice((1, 30)))
                    case "delete":
                        cubed_table.delete(rng.choice(("id = 3", "k = 7", "name = 'a'")))
                    case "build":
                        cubed_table.build()
                    case "tag":
                        cubed_table.tag()
                    case "roll back" if rng.random() < 0.3:
                        cubed_table.roll_back()
                    case "damage" | "lose":
                        cubed_table.damage_index_file(is_deleted=step == "lose")
            for _ in range(query_count):
                source = cubed_table.name
                if cubed_table.tags and rng.random() < 0.2:
                    source += f" FOR VERSION AS OF '{rng.choice(cubed_table.tags)}'"
                text = aggregates.query(*rng.choice(cubed_table.cubes), source)
                counts[_compare_sessions(session, plain_session, text, seed)] += 1
    return counts


def _compare_sessions(session: SqlSession, plain_session: SqlSession, text: str, seed: int) -> str:
    """Compare the answers of both sessions, and return how the session with cubes computed its answer."""
    try:
        expected = plain_session.sql(text)
        rows = count_rows(expected)
    except InvalidRequest as refusal:
        with pytest.raises(InvalidRequest):
            session.sql(text).to_arrow()
        return f"refused: {str(refusal)[:40]}"
    answer = session.sql(text)
    summary = answer.explanation.cube
    assert summary is not None
    assert (answer.types, answer.schema) == (expected.types, expected.schema), f"seed {seed}: {text}"
    assert count_rows(answer) == rows, f"seed {seed}: {text}\n{answer.explanation}"
    if summary.index is None:
        return "rows"
    return "cube and rows" if summary.row_files else "cube"


def test_random_queries_return_the_same_rows_from_cubes(server: ServerThread) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed() + 1, first_seed() + 1 + examples(8, 1)):
        counts += compare_random_queries(server, seed, 8)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 5, counts
    assert counts["cube and rows"] > 0, counts


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_random_queries_return_the_same_rows_from_cubes(server: ServerThread) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first_seed() + 1000, first_seed() + 1100):
        counts += compare_random_queries(server, seed, 15)
    assert counts["cube"] + counts["cube and rows"] > counts.total() / 5, counts


@pytest.fixture
def sales(server: ServerThread, request: pytest.FixtureRequest) -> Iterator[CubeWorld]:
    """Yield a table of one test with 3 files and a built cube by country and day."""
    name = f"db.sales_{sum(map(ord, request.node.name))}"  # Each test has its own table.
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        kinds = {"ts": pa.timestamp("us"), "country": pa.string(), "n": pa.int32(), "x": pa.float64()}
        table = catalog.create_table(name, schema=pa.schema(list(kinds.items())))
        for file_number in range(3):
            # The 20 minutes are on two days, around the start of 1970.
            times = [datetime(1969, 12, 31, 23, 50) + timedelta(minutes=number) for number in range(20)]
            rows = {"ts": times, "country": ["a", "b"] * 10, "n": [file_number] * 20, "x": [0.5] * 20}
            table.append(pa.table(rows, schema=pa.schema(list(kinds.items()))))
    with closing(IndexClient(server.url)) as client:
        client.put_index(name, "cube0", kind="cube", columns=["day(ts)", "country"], measures=["avg(n)", "sum(x)"])
        build(client, name, "cube0", InProcessWorkers())
        yield CubeWorld.for_existing_table(server, client, name)


def query_with_summary(
    server: ServerThread, text: str, cubes: str = "on"
) -> tuple[CubeSummary, list[tuple[object, ...]]]:
    """Run a query in a new session, and return how it used cubes, and its rows."""
    with SqlSession(server.url, cubes=cubes) as session:
        result = session.sql(text)
        assert result.explanation.cube is not None
        rows = result.to_arrow()
        return result.explanation.cube, list(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def test_damaged_cube_is_quarantined_and_the_rows_are_read(server: ServerThread, sales: CubeWorld) -> None:
    text = f"SELECT country, sum(n) FROM {sales.name} GROUP BY country ORDER BY country"
    sales.damage_index_file(is_deleted=False)
    summary, rows = query_with_summary(server, text)
    assert rows == [("a", 30), ("b", 30)]
    assert summary.index is None
    assert "no entry for a file" in (summary.reason or "")
    assert sales.client.index(sales.name, "cube0").health == "damaged"
    build(sales.client, sales.name, "cube0", InProcessWorkers())
    assert query_with_summary(server, text) == (CubeSummary("cube0", 3, 0), rows)


def test_deleted_rows_are_subtracted_from_groups(
    server: ServerThread, sales: CubeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"SELECT country, sum(n), avg(n), count(*) FROM {sales.name} GROUP BY country ORDER BY country"
    sales.delete("n = 1 AND country = 'b'")
    assert query_with_summary(server, text) == (CubeSummary("cube0", 3, 0), [("a", 30, 1.0, 30), ("b", 20, 1.0, 20)])
    one_file = text.replace("GROUP", "WHERE country = 'b' AND ts >= DATE '1970-01-01' GROUP")
    assert query_with_summary(server, one_file) == (CubeSummary("cube0", 3, 0), [("b", 10, 1.0, 10)])
    sales.delete("country = 'b'")
    assert query_with_summary(server, text) == (CubeSummary("cube0", 3, 0), [("a", 30, 1.0, 30)]), "no group is empty"
    summary, rows = query_with_summary(server, f"SELECT country, sum(x) FROM {sales.name} GROUP BY country")
    assert (summary.index, rows) == (None, [("a", 15.0)]), "sums of floats are not corrected"
    monkeypatch.setattr(plans, "CUBE_UNCHECKED_ROWS_MAX", 0)
    monkeypatch.setattr(plans, "CUBE_COST_MAX_FRACTION", 0.5)
    summary, rows = query_with_summary(server, text)
    assert (summary.index, rows) == (None, [("a", 30, 1.0, 30)])
    assert summary.reason is not None
    assert "rows of 0 of 3 files, and 30 rows for deletes, would be read" in summary.reason


@pytest.mark.slow
def test_sum_of_a_group_without_values_is_null_after_a_delete(server: ServerThread, sales: CubeWorld) -> None:
    schema = pa.schema([("ts", pa.timestamp("us")), ("country", pa.string()), ("n", pa.int32()), ("x", pa.float64())])
    times = [datetime(2026, 1, 1), datetime(2026, 1, 1)]
    rows = pa.table({"ts": times, "country": ["c", "c"], "n": [7, None], "x": [0.5, 0.5]}, schema=schema)
    append(sales.client, sales.name, rows)
    text = f"SELECT country, sum(n), count(*) FROM {sales.name} WHERE country = 'c' GROUP BY country"
    assert query_with_summary(server, text)[1] == [("c", 7, 2)]
    sales.delete("country = 'c' AND n = 7")
    summary, answer = query_with_summary(server, text)
    assert answer == [("c", None, 1)]
    assert summary.index == "cube0"


@pytest.mark.slow
def test_renamed_column_keeps_its_cube_and_a_promoted_column_needs_a_new_one(
    server: ServerThread, sales: CubeWorld
) -> None:
    with open_catalog(server.url) as catalog:
        table = catalog.load_table(sales.name)
        with table.update_schema() as update:
            update.rename_column("country", "land")
    text = f"SELECT land, sum(n) FROM {sales.name} GROUP BY land ORDER BY land"
    assert query_with_summary(server, text) == (CubeSummary("cube0", 3, 0), [("a", 30), ("b", 30)])
    with open_catalog(server.url) as catalog:
        table = catalog.load_table(sales.name)
        with table.update_schema() as update:
            update.update_column("n", LongType())
    summary, rows = query_with_summary(server, text)
    assert (summary.index, rows) == (None, [("a", 30), ("b", 30)])
    build(sales.client, sales.name, "cube0", InProcessWorkers())
    assert query_with_summary(server, text) == (CubeSummary("cube0", 3, 0), rows)


def test_appended_files_are_in_the_cube_after_the_commit(server: ServerThread, sales: CubeWorld) -> None:
    schema = pa.schema([("ts", pa.timestamp("us")), ("country", pa.string()), ("n", pa.int32()), ("x", pa.float64())])
    rows = pa.table({"ts": [datetime(2026, 1, 1)], "country": ["c"], "n": [7], "x": [None]}, schema=schema)
    append(sales.client, sales.name, rows)
    text = f"SELECT country, sum(n), sum(x) FROM {sales.name} WHERE ts >= DATE '2026-01-01' GROUP BY country"
    summary, answer = query_with_summary(server, text)
    assert answer == [("c", 7, None)]
    assert summary == CubeSummary("cube0", 1, 0)


def test_session_groups_the_rows_of_a_file_without_an_entry_once(server: ServerThread, sales: CubeWorld) -> None:
    schema = pa.schema([("ts", pa.timestamp("us")), ("country", pa.string()), ("n", pa.int32()), ("x", pa.float64())])
    rows = pa.table({"ts": [datetime(2026, 1, 1)] * 3, "country": ["c", "c", "a"], "n": [7, None, 1], "x": [None] * 3})
    with open_catalog(server.url) as catalog:
        catalog.load_table(sales.name).append(rows.cast(schema))
    text = f"SELECT country, sum(n), count(*) FROM {sales.name} GROUP BY country ORDER BY country"
    with SqlSession(server.url) as session:
        run = partial(_run, session, text)
        expected = [("a", 31, 31), ("b", 30, 30), ("c", 7, 2)]
        assert [run() for _ in range(3)] == [
            (CubeSummary("cube0", 3, 1), expected),
            (CubeSummary("cube0", 4, 0), expected),
            (CubeSummary("cube0", 4, 0), expected),
        ]
        sales.delete("country = 'c' AND n = 7")
        assert run() == (CubeSummary("cube0", 3, 1), [("a", 31, 31), ("b", 30, 30), ("c", None, 1)])


def _run(session: SqlSession, text: str) -> tuple[CubeSummary | None, list[tuple[object, ...]]]:
    result = session.sql(text)
    return result.explanation.cube, list(zip(*result.to_arrow().to_pydict().values(), strict=True))


def _append_countries(table: Table, count: int) -> None:
    """Append a file with one row for each of `count` countries."""
    rows = [{"ts": datetime(2026, 1, 1), "country": f"c{number}", "n": 1, "x": 0.5} for number in range(count)]
    table.append(pa.Table.from_pylist(rows, table.schema().as_arrow()))


def test_groups_in_memory_are_bounded_and_cost_as_much_as_rows(
    server: ServerThread, sales: CubeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"SELECT country, count(*) FROM {sales.name} GROUP BY country ORDER BY country"
    with open_catalog(server.url) as catalog, SqlSession(server.url) as session:
        table = catalog.load_table(sales.name)
        _append_countries(table, 40)
        file = max((task.file for task in table.scan().plan_files()), key=lambda file: file.record_count)
        path = Path(file.file_path.removeprefix("file://"))
        summary, expected = _run(session, text)
        assert summary == CubeSummary("cube0", 3, 1)
        hidden_path = path.rename(path.with_suffix(".hidden"))
        with pytest.raises(ServerFailed):
            _run(session, text)
        hidden_path.rename(path)
        assert _run(session, text) == (CubeSummary("cube0", 4, 0), expected), "the file is readable again"
        _append_countries(table, 10)
        monkeypatch.setattr(plans, "CUBE_UNCHECKED_ROWS_MAX", 0)
        monkeypatch.setattr(plans, "CUBE_COST_MAX_FRACTION", 1)
        summary, _ = _run(session, text)
        assert summary == CubeSummary("cube0", 4, 1), "the groups of the larger file cost 40 rows"
    monkeypatch.undo()
    monkeypatch.setattr(computed_groups, "_KEPT_BYTES_MAX", 3_000)
    with SqlSession(server.url) as session:
        summaries = [_run(session, text)[0] for _ in range(3)]
    assert summaries == [CubeSummary("cube0", 3, 2), CubeSummary("cube0", 4, 1), CubeSummary("cube0", 4, 1)]


@pytest.mark.slow
def test_time_follows_from_a_dimension_only_at_its_boundaries(server: ServerThread, sales: CubeWorld) -> None:
    start = f"SELECT count(*) FROM {sales.name} WHERE ts >= "
    summary, rows = query_with_summary(server, f"{start}TIMESTAMP '1970-01-01 00:00:00'")
    assert (summary.index, rows) == ("cube0", [(30,)])
    summary, rows = query_with_summary(server, f"{start}TIMESTAMP '1970-01-01 00:00:01'")
    assert (summary.index, rows) == (None, [(27,)])
    summary, rows = query_with_summary(server, f"SELECT hour(ts), count(*) FROM {sales.name} GROUP BY 1 ORDER BY 1")
    assert (summary.index, rows) == (None, [(0, 30), (23, 30)])


@pytest.mark.slow
def test_output_name_in_order_by_is_not_mistaken_for_a_measure(server: ServerThread, sales: CubeWorld) -> None:
    text = f"SELECT country AS n, sum(n) AS total FROM {sales.name} GROUP BY country ORDER BY max(n) DESC LIMIT 1"
    summary, rows = query_with_summary(server, text)
    assert (summary.index, rows) == (None, [("b", 30)])
    assert "is the name of an output" in (summary.reason or "")


@pytest.mark.slow
def test_column_that_is_also_a_truncated_dimension_is_not_truncated(server: ServerThread, sales: CubeWorld) -> None:
    sales.client.put_index(sales.name, "cube0", kind="cube", columns=["ts", "day(ts)"], measures=["count(*)"], shrink=1)
    build(sales.client, sales.name, "cube0", InProcessWorkers())
    day = "date_trunc('day', ts)"
    text = f"SELECT {day}, count(*) FROM {sales.name} GROUP BY ts ORDER BY {day}, ts LIMIT 1"
    summary, rows = query_with_summary(server, text)
    assert (summary.index, rows) == ("cube0", [(datetime(1969, 12, 31), 3)])


def test_counts_and_sums_of_constants_are_counts_of_rows(server: ServerThread, sales: CubeWorld) -> None:
    text = f"SELECT country, count(1), count('x'), sum(1) FROM {sales.name} GROUP BY country ORDER BY country"
    summary, rows = query_with_summary(server, text)
    assert (summary.index, rows) == ("cube0", [("a", 30, 30, 30), ("b", 30, 30, 30)])
    summary, rows = query_with_summary(server, f"SELECT count(1), sum(1) FROM {sales.name} HAVING count(*) > 60")
    assert (summary.index, rows) == ("cube0", [])


def test_exact_sessions_do_not_add_floats_from_cubes(server: ServerThread, sales: CubeWorld) -> None:
    text = f"SELECT sum(x), sum(n) FROM {sales.name}"
    assert query_with_summary(server, text)[0].index == "cube0"
    summary, rows = query_with_summary(server, text, EXACT)
    assert (summary.index, rows) == (None, [(30.0, 60)])
    assert "adds floats" in (summary.reason or "")
    assert query_with_summary(server, f"SELECT sum(n) FROM {sales.name}", EXACT)[0].index == "cube0"


@pytest.mark.slow
def test_exact_sessions_do_not_average_integers_from_cubes(server: ServerThread, sales: CubeWorld) -> None:
    text = f"SELECT avg(n) FROM {sales.name}"
    assert query_with_summary(server, text)[0].index == "cube0"
    summary, rows = query_with_summary(server, text, EXACT)
    assert (summary.index, rows) == (None, [(1.0,)])
    assert "averages integers" in (summary.reason or "")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SELECT country FROM {0}", "does not group rows"),
        ("SELECT country, row_number() OVER (ORDER BY country) FROM {0} GROUP BY country", "window"),
        ("SELECT country, count(*) FROM {0} GROUP BY 1 UNION ALL SELECT 'all', count(*) FROM {0}", "one SELECT"),
        ("SELECT count(*) FROM {0} WHERE n IN (SELECT n FROM {0})", "one SELECT"),
        ("SELECT country, sum(n + 1) FROM {0} GROUP BY country", "is not a measure of the cube"),
        ("SELECT count(DISTINCT n) FROM {0}", "does not exist"),
        ("SELECT s.b, count(*) FROM {0} AS s(a, b, c, d) GROUP BY s.b", "renames the columns"),
    ],
)
def test_query_that_a_cube_cannot_answer_reads_rows_and_states_the_reason(
    server: ServerThread, sales: CubeWorld, text: str, reason: str
) -> None:
    summary, _ = query_with_summary(server, text.format(sales.name))
    assert summary.index is None
    assert reason in (summary.reason or "")


def test_create_refuses_a_cube_with_as_many_groups_as_rows(server: ServerThread) -> None:
    schema = pa.schema([("id", pa.int64())])
    with open_catalog(server.url) as catalog:
        catalog.create_namespace_if_not_exists("db")
        catalog.create_table("db.distinct_ids", schema=schema).append(pa.table({"id": range(2000)}, schema=schema))
    arguments = ["create", "db.distinct_ids", "--kind", "cube", "--columns", "id", "--measures", "count(*)"]
    refusal = CliRunner().invoke(index, [*arguments, "--url", server.url])
    assert refusal.exit_code == 1
    assert "2,000 groups for 2,000 rows has 1.0 rows for each group" in refusal.output
    creation = CliRunner().invoke(index, [*arguments, "--shrink", "1", "--url", server.url])
    assert creation.exit_code == 0, creation.output


def test_repeated_statement_reads_the_current_snapshots(server: ServerThread) -> None:
    text = "SELECT * FROM changing.t ORDER BY 1"
    schema = pa.schema([("a", pa.int64())])

    def read_rows(session: SqlSession) -> pa.Table:
        return session.sql(text).to_arrow()

    with open_catalog(server.url) as catalog, SqlSession(server.url) as session:
        catalog.create_namespace("changing")
        table = catalog.create_table("changing.t", schema=schema)
        for value in (1, 2):
            table.append(pa.table({"a": [value]}, schema=schema))
            assert read_rows(session)["a"].to_pylist() == list(range(1, value + 1))
        with table.update_schema() as update:
            update.rename_column("a", "b")
        assert read_rows(session).column_names == ["b"]
        catalog.drop_table("changing.t")
        with pytest.raises(NoSuchResource, match="Table does not exist"):
            read_rows(session)
        catalog.create_table("changing.t", schema=pa.schema([("c", pa.string())]))
        assert (read_rows(session).column_names, read_rows(session).num_rows) == (["c"], 0)
