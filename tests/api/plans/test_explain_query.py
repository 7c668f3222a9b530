"""Tests of explain for a whole query: the files that each table needs, by its conditions and by its joins."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from seamark.commands.serving import explain_query as routes
from seamark.commands.serving import query_notes
from seamark.commands.serving.query_notes import find_unknown_columns
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.api.plans.joins import JoinSpec
from seamark.metaserver.api.plans.unpruned import find_unpruned_reasons
from seamark.metaserver.planner.joins.joins import JoinOutcome
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace
from tests.api.client import SCHEMA, Answer, Api
from tests.api.plans.test_joins import REGIONS, Star, create_star
from tests.api.plans.test_plan_tables import UserApi
from tests.seeds import first_seed
from tests.server.rig import run_server

ROUTE = "/api/v1/explain-query"
JOIN = "FROM {0}.fact f JOIN {0}.supplier s ON f.f_supplier = s.s_key"


async def request_explanation(api: Api | Star, query: str, **body: Any) -> Answer:
    return await api("POST", ROUTE, {"query": query, **body})


async def explain_tables(star: Star, query: str, **body: Any) -> dict[str, dict[str, Any]]:
    """Explain a SQL query, and return the explanation of each of its tables by table name."""
    answer = await request_explanation(star, query, **body)
    assert answer.status == 200, answer.raw
    return {table["table"][-1]: table for table in answer.json["tables"]}


def count_files_with_rows(star: Star, suppliers: set[int]) -> int:
    """Return the number of files of the fact table that have a row of one of these suppliers.

    File n has every fifth supplier from 100 n to 100 n + 95.
    """
    return len({supplier // 100 for supplier in suppliers if supplier % 5 == 0})


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("dialect", ["trino", "duckdb"])
async def test_each_joined_table_is_planned_by_its_conditions_and_by_the_join(star: Star, dialect: str) -> None:
    query = f"SELECT sum(f.f_rate) {JOIN.format('db')} WHERE s.s_region = 'ASIA' AND f.f_key < 9000"
    tables = await explain_tables(star, query, dialect=dialect)
    assert list(tables) == ["fact", "supplier"]
    assert tables["fact"]["predicate"] == '"f_key" < 9000'
    assert tables["supplier"]["predicate"] == "\"s_region\" = 'ASIA'"
    (join,) = tables["fact"]["plan"]["joins"]
    assert (join["table"], join["used"], join["keys"]) == (["db", "supplier"], True, 500)
    stages = tables["fact"]["plan"]["stages"]
    assert stages[0]["files-in"] == 20
    assert stages[-1]["files-left"] == tables["fact"]["plan"]["files"] == 9
    assert tables["supplier"]["plan"]["files"] == 1, "only one file has suppliers of the remaining facts"


async def test_plans_of_random_queries_keep_needed_rows_and_prune_as_far_as_the_join_allows(star: Star) -> None:
    rng = random.Random(first_seed())
    pruned_count = 0
    for _ in range(25):
        region, low, nation = rng.choice(REGIONS), rng.randrange(2000), rng.randrange(25)
        span = rng.choice((3, 40, 400))
        conditions = {
            f"s.s_region = '{region}'": lambda n, region_name=region: REGIONS[n % 4] == region_name,
            f"s.s_key BETWEEN {low} AND {low + span}": lambda n, low=low, span=span: low <= n <= low + span,
            f"s.s_nation = {nation}": lambda n, nation_key=nation: n % 25 == nation_key,
            f"f.f_supplier >= {low}": lambda n, low=low: n >= low,
        }
        chosen_conditions = rng.sample(sorted(conditions), rng.randint(1, 3))
        expected_suppliers = {
            n for n in range(2000) if all(conditions[condition](n) for condition in chosen_conditions)
        }
        query = f"SELECT count(*) {JOIN.format(rng.choice(('db', 'sea.db')))} WHERE {' AND '.join(chosen_conditions)}"
        tables = await explain_tables(star, query, dialect=rng.choice(("trino", "duckdb")))
        assert tables["fact"]["plan"]["files"] >= count_files_with_rows(star, expected_suppliers), query
        if expected_suppliers and not any(condition.startswith("f.") for condition in chosen_conditions):
            assert tables["fact"]["plan"]["files"] <= len({n // 100 for n in expected_suppliers}), query
        pruned_count += tables["fact"]["plan"]["files"] < 20
    assert pruned_count > 10


async def test_table_name_without_a_namespace_uses_the_namespace_of_the_request(star: Star) -> None:
    query = "SELECT 1 FROM fact WHERE f_key = 5"
    answer = await request_explanation(star, query)
    assert answer.status == 400
    assert "The table fact has no namespace; write NAMESPACE.fact" in answer.json["error"]["message"]
    tables = await explain_tables(star, query, namespace=["db"])
    assert tables["fact"]["plan"]["files"] == 1
    assert tables["fact"]["reference"] == "fact"


async def test_each_reference_to_a_table_has_its_own_plan(star: Star) -> None:
    query = "SELECT 1 FROM db.fact a JOIN db.fact b ON a.f_key = b.f_key WHERE a.f_supplier = 3 AND b.f_rate > 0"
    answer = await request_explanation(star, query)
    assert [table["table"] for table in answer.json["tables"]] == [["db", "fact"]] * 2
    assert answer.json["tables"][0]["plan"]["files"] == 1


@pytest.mark.slow
async def test_table_at_an_earlier_snapshot_is_planned_at_that_snapshot(star: Star) -> None:
    loaded_table = await star("GET", "/v1/namespaces/db/tables/fact")
    first_snapshot_id = loaded_table.json["metadata"]["current-snapshot-id"]
    await star.fact.commit([star.fact.write_file([{"f_key": 1, "f_supplier": 1, "f_rate": 0.5, "f_name": "s"}])])
    tag = {"action": "set-snapshot-ref", "ref-name": "v1", "type": "tag", "snapshot-id": first_snapshot_id}
    commit_answer = await star("POST", "/v1/namespaces/db/tables/fact", {"requirements": [], "updates": [tag]})
    assert commit_answer.status == 200
    for version, files in (("", 2), (f" FOR VERSION AS OF {first_snapshot_id}", 1), (" FOR VERSION AS OF 'v1'", 1)):
        tables = await explain_tables(star, f"SELECT 1 FROM db.fact{version} WHERE f_key < 5")
        assert tables["fact"]["plan"]["files"] == files, version
    request = {
        "query": f"SELECT 1 FROM db.fact AS f AT (VERSION => {first_snapshot_id}) WHERE f_key < 5",
        "dialect": "duckdb",
    }
    answer = await star("POST", "/api/v1/explain-query", request)
    assert [table["plan"]["files"] for table in answer.json["tables"]] == [1]


async def test_statements_that_are_not_queries_are_rejected_with_the_reason(star: Star) -> None:
    for query, reason, dialect in (
        ("SELECT FROM WHERE", "The query is not valid SQL: ", "trino"),
        ("", "it is empty", "trino"),
        ("", "it is empty", "duckdb"),
        ("SELECT 1", "cannot be analysed", "trino"),
        ("DELETE FROM db.fact", "cannot be analysed", "trino"),
        ("DELETE FROM db.fact", "not a single query", "duckdb"),
        ("SELECT 1 FROM db.fact USING SAMPLE 10", "TableSample", "duckdb"),
        ("SELECT 1 FROM db.fact; SELECT 2 FROM db.fact", "cannot be analysed", "trino"),
        ("SELECT 1 FROM db.fact WHERE " + "(" * 3000 + "1" + ")" * 3000, "The query is not", "trino"),
        ("SELECT " + "x" * routes.QUERY_MAX, "the limit is", "trino"),
        (f"SELECT 1 FROM {', '.join(f'db.t{n}' for n in range(40))}", "the limit is 32", "trino"),
        ("SELECT 1 FROM db.fact FOR VERSION AS OF 5 WHERE f_key = 1", "db.fact: ", "trino"),
    ):
        answer = await request_explanation(star, query, dialect=dialect)
        assert answer.status == 400, (query[:80], answer.raw)
        assert reason in answer.json["error"]["message"], (query[:80], answer.raw)
    assert (await request_explanation(star, "SELECT 1 FROM db.nosuch")).status == 404
    assert (await request_explanation(star, "SELECT 1 FROM nosuch.t")).status == 404
    assert (await request_explanation(star, "SELECT 1 FROM db.fact", dialect="oracle")).status == 400


async def test_each_table_requires_the_right_to_read_it(tmp_path: Path) -> None:
    clock, secrets = SystemClock(), {}
    async with open_store(f"sqlite:///{tmp_path / 'seamark.db'}", clock=clock) as store:
        for name, role, path in (("root", "admin", ()), ("rita", "reader", ("db",))):
            secrets[name] = await create_token(store, clock, name, None, [Grant(name, role, path)])
        await store.transact([CreateNamespace(path=("secret",), properties={})])
    async with run_server(tmp_path, auth="token") as server:
        root, rita = (UserApi(server, secrets[name]) for name in ("root", "rita"))
        await create_star(root)
        created_table = await root("POST", "/v1/namespaces/secret/tables", {"name": "d", "schema": SCHEMA})
        assert created_table.status == 200, created_table.raw
        assert (await request_explanation(rita, "SELECT 1 FROM db.fact WHERE f_key = 1")).status == 200
        for table in ("secret.d", "secret.nosuch", '"secret"."d"'):
            for query in (f"SELECT 1 FROM {table}", f"SELECT 1 FROM db.fact f JOIN {table} d ON f.f_key = d.id"):
                for dialect in ("trino", "duckdb"):
                    answer = await request_explanation(rita, query, dialect=dialect)
                    assert answer.status == 403, answer.raw


async def test_table_that_is_read_completely_has_reasons(star: Star) -> None:
    cases: list[tuple[str, str, list[str]]] = [
        (
            f"SELECT 1 {JOIN} WHERE s.s_region = 'ASIA'",
            "supplier",
            ["each file may have rows that meet the condition", "the join with db.fact leaves out no files, because "],
        ),
        (f"SELECT 1 {JOIN} WHERE s.s_key < 100", "fact", []),
        (
            "SELECT count(*) FROM {0}.fact",
            "fact",
            ["the query has no condition and no join by which files could be left out"],
        ),
        (
            "SELECT 1 FROM {0}.fact WHERE f_rate >= 0",
            "fact",
            ["each file may have rows that meet the condition, by its partition, its bounds and the indexes"],
        ),
        (
            f"SELECT 1 {JOIN}",
            "fact",
            [
                "the join with db.supplier leaves out no files, because neither it nor a smaller table that it is "
                "joined with has a condition"
            ],
        ),
        (
            f"SELECT 1 {JOIN} WHERE s.s_region = 'ASIA'",
            "fact",
            [
                "each file may have rows that join with db.supplier (500 keys of f_supplier), by its bounds and the "
                "indexes"
            ],
        ),
    ]
    for query, table, reasons in cases:
        answer = await request_explanation(star, query.format("db"))
        plan = next(explanation["plan"] for explanation in answer.json["tables"] if explanation["table"][-1] == table)
        assert len(plan["unpruned-reasons"]) == len(reasons), plan["unpruned-reasons"]
        assert all(map(str.startswith, plan["unpruned-reasons"], reasons)), plan["unpruned-reasons"]
        assert (plan["files"] == plan["stages"][0]["files-in"]) == bool(reasons), query


@pytest.mark.parametrize(
    ("files", "reasons"),
    [
        ((0, 0), ["the table has no files"]),
        ((1, 1), ["the table has one file"]),
        ((100, 96), ["engines usually do not use a plan that keeps more than 95% of the files"]),
        ((100, 95), []),
        ((5, 0), []),
        ((2, 2), ["the query has no condition and no join by which files could be left out", "a time limit ended"]),
    ],
)
def test_plan_of_nearly_all_files_has_a_reason(files: tuple[int, int], reasons: list[str]) -> None:
    unpruned_reasons = find_unpruned_reasons(files, [], [], has_condition=False, complete=False, max_kept_fraction=0.95)
    assert len(unpruned_reasons) == len(reasons), unpruned_reasons
    assert all(map(str.startswith, unpruned_reasons, reasons)), unpruned_reasons


def test_unused_join_has_the_reason_of_its_outcome() -> None:
    def build_outcome(name: str, keys: int | None, reason: str | None = None) -> JoinOutcome:
        return JoinOutcome(("db", name), 1, keys, keys is not None, reason)

    joins = [
        JoinSpec(["db", "a"], {"x": "y"}, joins=[JoinSpec(["db", "b"], {"z": "z"})]),
        JoinSpec(["db", "c"], {"x": "k"}),
    ]
    outcomes = [build_outcome("a", None, "it has 9 rows"), build_outcome("b", 3), build_outcome("c", 1)]
    assert find_unpruned_reasons((2, 2), joins, outcomes, has_condition=False, complete=True) == (
        "the join with db.a is not used: it has 9 rows",
        "each file may have rows that join with db.c (1 key of x), by its bounds and the indexes",
    )


@pytest.mark.slow
async def test_unused_conditions_are_reported_with_the_reason(star: Star) -> None:
    query = f"SELECT sum(f.f_rate) {JOIN.format('db')} WHERE s_regio = 'ASIA' AND f.f_key = 'x' AND s.s_key < 9"
    plans = {name: table["plan"] for name, table in (await explain_tables(star, query)).items()}
    unused_joins = {
        name: list(zip(join["not-used"], join["not-used-reasons"], strict=True)) for name, join in plans.items()
    }
    assert unused_joins["supplier"] == []
    unknown_column, unfit_literal = unused_joins["fact"]
    assert unknown_column == ("s_regio", "no table of the query has this column; did you mean s_region")
    assert unfit_literal[0] == "\"f_key\" = 'x'"
    assert unfit_literal[1].startswith("'x' is not a literal of f_key, which is ")


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("dialect", ["trino", "duckdb"])
@pytest.mark.parametrize(
    "query",
    [
        "SELECT f_key AS x, f.st.a, st.b FROM {} f ORDER BY x",
        "WITH c AS (SELECT f_key AS q FROM {0}), d (w) AS (SELECT q FROM c) SELECT w, d.w FROM d JOIN {0} ON w = f_key",
        "SELECT e FROM {} CROSS JOIN UNNEST(f_list) AS u (e) WHERE e = 1",
        "SELECT filter(f_list, y -> y > 1), current_date, date_part(year, f_day) FROM {} WHERE f_key = year",
        'SELECT "$path", rowid FROM {}',
        "SELECT 1 FROM {} JOIN db.other ON of_other = f_key",
    ],
)
def test_names_defined_by_the_query_are_not_unknown_columns(query: str, dialect: str) -> None:
    columns = {"f_key", "f_list", "f_day", "st"}
    assert find_unknown_columns(query.format("db.fact"), dialect, [("db", "fact")], columns) == {}


def test_only_a_few_unknown_columns_are_compared_with_known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compared_columns: list[str] = []

    def record_compared_name(name: str, known_names: Iterable[str], *, maximum: int) -> list[str]:
        compared_columns.append(name)
        return []

    monkeypatch.setattr(query_notes, "find_near_names", record_compared_name)
    names = [f"z{number}" for number in range(500)]
    query = f"SELECT {', '.join(names + names)} FROM db.fact"
    assert find_unknown_columns(query, "trino", [("db", "fact")], {"k"}) == {}
    assert compared_columns == names[:100]  # The limit is 100 names.
