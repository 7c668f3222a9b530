"""Trino answers aggregate queries from cubes through the proxy, with the rows and the rights that it has without it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import pytest
import trino.exceptions
from pyiceberg.catalog import load_catalog

from seamark.connector.client.indexes import IndexClient
from seamark.connector.index.builds import InProcessWorkers, build
from seamark.connector.index.lookups import pin_attributes
from seamark.formats.index.keys.distinct_sketches import STANDARD_ERROR
from tests.connector.cubes.test_wide_queries import define_cube, quote_terms
from tests.connector.cubes.wide_queries import SCHEMA as WIDE_SCHEMA
from tests.connector.cubes.wide_queries import TRINO, WideQueries
from tests.connector.cubes.wide_queries import draw_rows as draw_wide_rows
from tests.connector.sql.comparing import to_comparable_value
from tests.connector.sql.random_queries import SCHEMA
from tests.connector.sql.test_cubes import RandomAggregates, draw_rows_with_exact_sums
from tests.deploy.shop import post_statement, query_rows, wait_for_result
from tests.seeds import examples, first_seed
from tests.services.needs import NEEDS_TRINO
from tests.services.seamark import Seamark
from tests.services.trino import Trino
from tests.services.trino_lake import TrinoLake
from tests.services.trino_proxy import TrinoProxy, run_trino_proxy

pytestmark = [*NEEDS_TRINO, pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass
class CubeRig:
    seamark: Seamark
    trino: Trino
    proxy: TrinoProxy

    def read(self, sql: str, port: int, user: str = "anna") -> Counter[str] | str:
        """Return how often each row occurs in the result, by the text of the row, or Trino's error message."""
        try:
            rows = query_rows(port, sql, user=user, schema="cubed")
        except trino.exceptions.TrinoQueryError as error:
            return f"{error.error_name}: {error.message}"
        return Counter(repr([to_comparable_value(value) for value in row]) for row in rows)

    def compare(self, sql: str, user: str = "anna") -> Counter[str] | str:
        """Check that the proxy returns what Trino returns without it."""
        direct_answer = self.read(sql, self.trino.port, user)
        assert self.read(sql, self.proxy.port, user) == direct_answer, f"{user}: {sql}"
        return direct_answer

    def read_outcome(self, sql: str, user: str = "anna") -> str:
        """Return the outcome in the proxy's header.

        A reason with "recently" or "slow" is temporary, for example after a failure, so the statement is sent again.
        """

        def read_final_outcome() -> str:
            headers = {"X-Trino-User": user, "X-Trino-Schema": "cubed"}
            outcome, _ = post_statement(self.proxy.port, sql, **headers)
            return "" if "recently" in outcome or "slow" in outcome else outcome.partition("; ms=")[0]

        return str(wait_for_result(read_final_outcome))


@pytest.fixture(scope="module")
def rig(trino_lake: TrinoLake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CubeRig]:
    seamark, coordinator = trino_lake.seamark, trino_lake.trino
    folder = tmp_path_factory.mktemp("cubes")
    flags = ("--budget-ms", "10000", "--hold", "20", "--plan-header", "--cubes", "on")
    with run_trino_proxy(folder, "--trino", coordinator.base_url, *flags, seamark=seamark.base_url) as proxy:
        catalog = load_catalog("seamark", type="rest", uri=seamark.base_url)
        catalog.create_namespace_if_not_exists("cubed")
        catalog.close()
        yield CubeRig(seamark, coordinator, proxy)


def create_table_with_cube(
    rig: CubeRig, name: str, schema: pa.Schema, parts: list[pa.Table], cube: tuple[list[str], list[str]]
) -> None:
    """Create a table with a file for each part, and build a cube of all files except the last.

    `cube` has the dimensions and the measures.
    """
    dimensions, measures = cube
    catalog = load_catalog("seamark", type="rest", uri=rig.seamark.base_url)
    table = catalog.create_table(f"cubed.{name}", schema=schema)
    with closing(IndexClient(rig.seamark.base_url)) as client, closing(InProcessWorkers()) as workers:
        # With shrink=1, the server builds the cube even if it has as many groups as the table has rows.
        client.put_index(f"cubed.{name}", "cube", kind="cube", columns=dimensions, measures=measures, shrink=1)
        for part in parts[:-1]:
            table.append(part)
        build(client, f"cubed.{name}", "cube", workers)
        table.append(parts[-1])
    catalog.close()


def test_random_queries_return_the_same_rows_from_cubes(rig: CubeRig) -> None:
    outcomes = Counter[str]()
    for seed in range(first_seed(), first_seed() + examples(20, 3)):
        rng = random.Random(seed)
        aggregates = RandomAggregates(rng)
        dimensions, measures = aggregates.draw_cube()
        create_table_with_cube(
            rig, f"random{seed}", SCHEMA, [draw_rows_with_exact_sums(rng, 30) for _ in range(3)], (dimensions, measures)
        )
        versions = query_rows(
            rig.trino.port, f'SELECT snapshot_id FROM "random{seed}$snapshots"', user="anna", schema="cubed"
        )
        for _ in range(20):
            source = f"random{seed}"
            (snapshot_id,) = rng.choice(versions)
            source += f" FOR VERSION AS OF {snapshot_id}" if rng.random() < 0.2 else ""
            sql = aggregates.query(dimensions, measures, source)
            if rng.random() < 0.2 and " WHERE " not in sql:
                condition = rng.choice(("id < 100", "k BETWEEN -3 AND 7", "name <> 'q'"))
                sql = sql.replace(f" FROM {source} a", f" FROM {source} a WHERE {condition}")
            rig.compare(sql)
            outcomes["cube" if "; cube=" in rig.read_outcome(sql) else "rows"] += 1
    assert outcomes["cube"] > outcomes.total() / 5, outcomes


def test_random_queries_of_many_forms_return_the_same_rows_from_cubes(rig: CubeRig) -> None:
    outcomes = Counter[str]()
    for seed in range(first_seed(), first_seed() + examples(12, 2)):
        rng = random.Random(seed)
        wide_queries = WideQueries(rng, TRINO)
        dimensions, measures = wide_queries.draw_cube()
        _, measures = define_cube(dimensions, measures)
        parts = [draw_wide_rows(rng, 30, overflows=rng.random() < 0.1) for _ in range(3)]
        cube = (quote_terms(dimensions), quote_terms(measures))
        create_table_with_cube(rig, f"wide{seed}", WIDE_SCHEMA, parts, cube)
        for _ in range(25):
            sql = wide_queries.draw_query(dimensions, measures, f"wide{seed}")
            direct_answer, answer = (rig.read(sql, port) for port in (rig.trino.port, rig.proxy.port))
            if isinstance(direct_answer, str):  # The message may contain a part of the rewritten statement.
                assert isinstance(answer, str), f"{direct_answer}: {sql}"
                outcomes["refused"] += 1
                continue
            assert answer == direct_answer, f"seed {seed}: {sql}"
            outcomes["cube" if "; cube=" in rig.read_outcome(sql) else "rows"] += 1
    assert outcomes["cube"] > outcomes.total() / 10, outcomes  # Most forms of queries cannot use a cube.


def test_subtotals_and_constants_follow_from_a_cube(rig: CubeRig) -> None:
    schema = pa.schema([("ts", pa.timestamp("us")), ("country", pa.string()), ("n", pa.int32())])
    create_table_with_cube(
        rig, "facts", schema, [build_facts(part) for part in range(3)], (["day(ts)", "country"], ["avg(n)"])
    )
    for sql in (
        "SELECT country, grouping(country), count(1), sum(1), count(country), avg(n), min(country) "
        "FROM facts GROUP BY GROUPING SETS ((country), ())",
        "SELECT COUNTRY, sum(n) AS total FROM facts GROUP BY 1 HAVING sum(n) > 2 ORDER BY total DESC LIMIT 1",
        "SELECT f.country, sum(n) FILTER (WHERE year(f.ts) = 1970) FROM facts f GROUP BY ROLLUP (f.country)",
    ):
        assert isinstance(rig.compare(sql), Counter), sql
        assert "; cube=cube:2" in rig.read_outcome(sql), sql
        assert "cubed.facts=1/3" in rig.read_outcome(sql)
    grouped = "SELECT COUNTRY, count(*) FROM facts GROUP BY 1"
    direct_rows = query_rows(rig.trino.port, grouped, user="anna", schema="cubed")
    proxied_rows = query_rows(rig.proxy.port, grouped, user="anna", schema="cubed")
    assert sorted(direct_rows, key=repr) == sorted(proxied_rows, key=repr)
    assert "no-cube=cube: " in rig.read_outcome("SELECT n, count(*) FROM facts WHERE n > 0 GROUP BY n")


def build_facts(part: int) -> pa.Table:
    times = pa.array([number * 43_200_000_000 for number in range(-10, 10)], pa.int64()).cast(pa.timestamp("us"))
    rows = {"ts": times, "country": ["FR", None] * 10, "n": pa.array([part] * 20, pa.int32())}
    return pa.table(rows)


def test_distinct_values_are_estimated_from_sketches(rig: CubeRig) -> None:
    """Trino merges the sketches of all groups. If a file has no entry, the original statement runs."""
    schema = pa.schema([("country", pa.string()), ("id", pa.int64()), ("day", pa.date32())])
    countries = ["FR", "DE", None, "IT"] * 10_000
    parts = [
        pa.table({"country": countries, "id": [part * 20_000 + number for number in range(40_000)],
                  "day": pa.array([number % 700 for number in range(40_000)], pa.int32()).cast(pa.date32())}, schema)
        for part in range(2)
    ]  # fmt: skip
    cube = (["country"], ["approx_distinct(id)", "approx_distinct(day)"])
    create_table_with_cube(rig, "visitors", schema, [*parts, parts[0].slice(0, 0)], cube)
    text = "SELECT country, approx_distinct(id), approx_distinct(day) FROM visitors GROUP BY ROLLUP (country)"
    assert "; cube=cube:2" in rig.read_outcome(text)
    estimated_rows = query_rows(rig.proxy.port, text, user="anna", schema="cubed")
    exact_text = re.sub(r"approx_distinct\((\w+)\)", r"count(DISTINCT \1)", text)
    exact_rows = query_rows(rig.proxy.port, exact_text, user="anna", schema="cubed")
    assert "; cube=" not in rig.read_outcome(exact_text)
    for estimated_row, exact_row in zip(sorted(estimated_rows, key=repr), sorted(exact_rows, key=repr), strict=True):
        assert estimated_row[0] == exact_row[0]
        for estimate, count in zip(estimated_row[1:], exact_row[1:], strict=True):
            # An error of more than five standard errors is practically impossible.
            assert abs(estimate - count) <= 5 * STANDARD_ERROR * count, (estimated_row, exact_row)
    empty_query = "SELECT approx_distinct(id), approx_distinct(id) FILTER (WHERE country = 'XX') FROM visitors"
    assert query_rows(rig.proxy.port, f"{empty_query} WHERE country = 'YY'", user="anna", schema="cubed") == [[0, 0]]
    with closing(load_catalog("seamark", type="rest", uri=rig.seamark.base_url)) as catalog:
        catalog.load_table("cubed.visitors").append(parts[0].slice(0, 5))
    rig.compare(text)
    assert "; cube=" not in rig.read_outcome(text), "rows cannot be added to sketches in Trino"


def test_row_filters_and_masks_of_a_table_with_a_cube_stay_in_force(rig: CubeRig) -> None:
    """With a row filter, or with a mask on a used column, Trino runs the original statement.

    Rita has a row filter and a mask on `card`. Dan may not read `card`, and Sue may not read the table.
    """
    schema = pa.schema([("id", pa.int64()), ("country", pa.string()), ("card", pa.string())])
    parts = [
        pa.table({"id": range(9), "country": ["FR", "DE", "IT"] * 3, "card": [f"c{part}"] * 9}, schema=schema)
        for part in range(3)
    ]
    create_table_with_cube(rig, "orders", schema, parts, (["country", "card"], ["sum(id)"]))
    query_by_country = "SELECT country, sum(id) FROM orders GROUP BY country"
    query_by_card = "SELECT card, count(*) FROM orders GROUP BY card"
    assert "; cube=cube:2" in rig.read_outcome(query_by_country)
    for sql in (query_by_country, query_by_card):
        rig.compare(sql)
        rig.compare(sql, "rita")
    assert rig.compare(query_by_country, "rita") == Counter(["['FR', 27]"])
    assert rig.compare(query_by_card, "rita") == Counter(["['XXXX', 9]"])
    rig.compare(query_by_country, "dan")
    assert "Access Denied" in rig.compare(query_by_card, "dan")
    assert "Access Denied" in rig.compare(query_by_country, "sue")
    assert "cube" not in rig.read_outcome(query_by_country, "sue")
    texts = query_rows(rig.trino.port, 'SELECT "user", query FROM system.runtime.queries', user="anna", schema="cubed")
    grouped_queries = {(user, "card" in text) for user, text in texts if "seamark_groups" in text and "orders" in text}
    # Trino has never run a statement that reads the cube's groups for a user who may not read these groups.
    assert grouped_queries == {("anna", True), ("anna", False), ("dan", False)}


def test_star_joins_are_answered_from_attributes(rig: CubeRig) -> None:
    """The cube groups by attributes, which are columns of dimension tables that the facts join by a key.

    A row filter, a mask or a missing privilege on a dimension table has the same effect as without the cube. On
    `areas`, Rita has a row filter and a mask on `card`. Dan may not read `card`, and Sue may not read the table. The
    outcome "cube=cube:2" means that the cube answers for two files.
    """
    schema = pa.schema([("area_id", pa.int32()), ("kind_id", pa.int64()), ("amount", pa.int64())])
    keys = {"area_id": [1, 2, 3, 9, None] * 4, "kind_id": [1, 2] * 10}
    parts = [pa.table({**keys, "amount": range(part, part + 20)}, schema=schema) for part in range(3)]
    dimensions = {
        "areas": pa.table({"id": pa.array([1, 2, 3], pa.int32()), "country": ["FR", "DE", None], "card": ["c"] * 3}),
        "kinds": pa.table({"kind_id": pa.array([1, 2], pa.int64()), "label": ["a", "b"]}),
    }
    with closing(load_catalog("seamark", type="rest", uri=rig.seamark.base_url)) as catalog:
        for name, rows in dimensions.items():
            catalog.create_table(f"cubed.{name}", schema=rows.schema).append(rows)
    attributes = ["areas.country via area_id = id", "areas.card via area_id = id", "kinds.label via kind_id = kind_id"]
    with closing(IndexClient(rig.seamark.base_url)) as client:
        columns = pin_attributes(client, [f"cubed.{attribute}" for attribute in attributes])
    create_table_with_cube(rig, "sales", schema, parts, (columns, ["sum(amount)", "count(*)"]))
    join = "FROM sales s, areas a, kinds k WHERE s.area_id = a.id AND k.kind_id = s.kind_id"
    query_by_country = f"SELECT country, k.label, sum(s.amount) AS total, count(*) {join} GROUP BY country, k.label"
    query_by_label = f"SELECT label, sum(s.amount) {join} AND country = 'FR' GROUP BY ROLLUP (label) ORDER BY label"
    query_by_card = f"SELECT card, count(*) {join} GROUP BY card"
    for sql in (query_by_country, query_by_label, query_by_card):
        for user in ("anna", "rita", "dan", "sue"):
            rig.compare(sql, user)
        assert "; cube=cube:2" in rig.read_outcome(sql), sql
        assert "cubed.sales=1/3" in rig.read_outcome(sql)
        assert "cube=" not in rig.read_outcome(sql, "rita")
    assert "; cube=cube:2" in rig.read_outcome(query_by_country, "dan")
    assert "Access Denied" in rig.compare(query_by_card, "dan")
    assert "Access Denied" in rig.compare(query_by_country, "sue")
    with closing(load_catalog("seamark", type="rest", uri=rig.seamark.base_url)) as catalog:
        new_kind = pa.table({"kind_id": pa.array([3], pa.int64()), "label": ["c"]})
        catalog.load_table("cubed.kinds").append(new_kind)
    rig.compare(query_by_country)
    assert "; cube=" not in rig.read_outcome(query_by_country), (
        "the cube contains the attributes of an earlier snapshot"
    )


def test_facts_are_pruned_by_an_index_on_an_attribute(rig: CubeRig) -> None:
    """The index stores an attribute for each fact: a column of the dimension table row with the fact's key.

    Users who may not read all rows of the dimension table get the rows that they get without the index.
    """
    schema = pa.schema([("id", pa.int64()), ("area_id", pa.int32())])
    areas = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "country": ["FR", "DE", None], "card": ["c"] * 3})
    with closing(load_catalog("seamark", type="rest", uri=rig.seamark.base_url)) as catalog:
        catalog.create_table("cubed.regions", schema=areas.schema).append(areas)
        table = catalog.create_table("cubed.visits", schema=schema)
        for area in (1, 2, 3):  # The key 9 is in no row of regions, and so the bounds of the key leave out no file.
            table.append(pa.table({"id": [area, area + 10, area + 20], "area_id": [0, area, 9]}, schema=schema))
    with closing(IndexClient(rig.seamark.base_url)) as client, closing(InProcessWorkers()) as workers:
        columns = pin_attributes(client, ["cubed.regions.country via area_id = id"], add_partners=False)
        client.put_index("cubed.visits", "country", kind="bitmap", columns=columns)
        build(client, "cubed.visits", "country", workers)
    sql = "SELECT v.id, r.card FROM visits v JOIN regions r ON v.area_id = r.id WHERE r.country = 'DE'"
    for user in ("anna", "rita", "dan", "sue"):
        rig.compare(sql, user)
    outcome = rig.read_outcome(sql)
    assert "cubed.visits=1/3" in outcome
    assert "joins=cubed.visits.area_id:attributes" in outcome
    with closing(load_catalog("seamark", type="rest", uri=rig.seamark.base_url)) as catalog:
        new_area = pa.table({"id": pa.array([9], pa.int32()), "country": ["DE"], "card": ["d"]})
        catalog.load_table("cubed.regions").append(new_area)
    rig.compare(sql)
    assert "attributes" not in rig.read_outcome(sql), "the index has the attributes of an earlier snapshot"
