"""Tests of joins over HTTP: plan tables and explanations with joins, and all errors."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from seamark.connector.client.client import SeamarkClient
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.keyring import SigningKey
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.planner.indexes.row_intersection import COLUMNS_MAX
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace
from tests.api.client import SCHEMA, Answer, Api
from tests.api.indexes.test_cold import delay_whole_files
from tests.api.plans.test_plan_tables import UserApi
from tests.planner.lakes.stars import Col, StarTable
from tests.server.rig import run_server

OWN_ROUTES = "/api/v1/tables/db"
SUPPLIER_COLUMNS = [
    Col(1, "s_key", "int"),
    Col(2, "s_region", "string"),
    Col(3, "s_nation", "long"),
    Col(4, "s_rate", "double"),
]
FACT_COLUMNS = [
    Col(1, "f_key", "long"),
    Col(2, "f_supplier", "long"),
    Col(3, "f_rate", "double"),
    Col(4, "f_name", "string"),
]
REGIONS = ("AFRICA", "AMERICA", "ASIA", "EUROPE")


class Star:
    """A star schema.

    `db.fact` has 20 files, and file n has every fifth supplier from 100 n to 100 n + 95. `db.supplier` has 2,000
    suppliers. Every fourth supplier is of the same region, and suppliers are assigned to the 25 nations of `db.nation`
    in turn.
    """

    fact: StarTable
    supplier: StarTable
    nation: StarTable

    def __init__(self, api: Api) -> None:
        self.server = api.server
        self._api = api

    async def __call__(self, method: str, path: str, body: Any = None) -> Answer:
        return await self._api(method, path, body)

    async def plan(self, *joins: dict[str, Any], **body: Any) -> dict[str, Any]:
        answer = await self("POST", f"{OWN_ROUTES}/fact/plan-tables", {**body, "joins": list(joins)})
        assert answer.status == 200, answer.raw
        answer_body: dict[str, Any] = answer.json
        return answer_body

    async def find_kept_files(self, *joins: dict[str, Any], where: str | None = None) -> list[int]:
        """Return the numbers of the fact files that `explain` keeps.

        Check that a plan table for the same joins and predicate has the same number of files.
        """
        filter_of_explain = {} if where is None else {"where": where}
        filter_of_plan = {} if where is None else {"predicate": where}
        explain_body = {**filter_of_explain, "joins": list(joins), "files": True}
        answer = await self("POST", f"{OWN_ROUTES}/fact/explain", explain_body)
        assert answer.status == 200, answer.raw
        assert (await self.plan(*joins, **filter_of_plan))["files"] == answer.json["files"]
        numbers_by_path = {file.path: number for number, file in enumerate(self.fact.data)}
        return sorted(numbers_by_path[file["file-path"]] for file in answer.json["kept"])


async def create_star(api: Api) -> Star:
    star = Star(api)
    star.fact = await StarTable.create(api, "fact", FACT_COLUMNS)
    files = [
        star.fact.write_file([_build_sale(100 * number + start) for start in range(0, 100, 5)]) for number in range(20)
    ]
    await star.fact.commit(files)
    star.supplier = await StarTable.create(api, "supplier", SUPPLIER_COLUMNS)
    rows = [_build_supplier(number) for number in range(2000)]
    await star.supplier.commit([star.supplier.write_file(rows[:1500]), star.supplier.write_file(rows[1500:])])
    star.nation = await StarTable.create(api, "nation", [Col(1, "n_key", "long"), Col(2, "n_name", "string")])
    nations = [{"n_key": number, "n_name": f"n{number:02d}"} for number in range(25)]
    await star.nation.commit([star.nation.write_file(nations)])
    return star


def _build_sale(supplier: int) -> dict[str, Any]:
    return {"f_key": supplier * 10, "f_supplier": supplier, "f_rate": 0.5, "f_name": f"s{supplier}"}


def _build_supplier(number: int) -> dict[str, Any]:
    return {"s_key": number, "s_region": REGIONS[number % 4], "s_nation": number % 25, "s_rate": 0.5}


def build_supplier_join(predicate: str | None = None, **fields: Any) -> dict[str, Any]:
    options = {} if predicate is None else {"predicate": predicate}
    return {"table": ["db", "supplier"], "on": {"f_supplier": "s_key"}, **options, **fields}


async def test_files_that_may_have_a_row_of_the_joined_table_are_kept(star: Star) -> None:
    assert await star.find_kept_files(build_supplier_join("s_key BETWEEN 250 AND 449")) == [2, 3, 4]
    assert await star.find_kept_files(build_supplier_join("s_key IN (255, 1990)")) == [2, 19]
    assert await star.find_kept_files(build_supplier_join("s_key BETWEEN 250 AND 1449")) == list(range(2, 15))
    assert await star.find_kept_files(build_supplier_join("s_key > 5000")) == []


async def test_outcome_of_each_join_is_reported_parents_first(star: Star) -> None:
    nation_join = {"table": ["db", "nation"], "on": {"s_nation": "n_key"}, "predicate": "n_name = 'n03'"}
    joins = [
        build_supplier_join("s_region = 'ASIA'", joins=[nation_join]),
        build_supplier_join("s_key < 700"),
        build_supplier_join("s_key < 0"),
    ]
    plan = await star.plan(*joins)
    assert plan["joins"] == [
        {"table": ["db", "supplier"], "snapshot-id": 1, "keys": 20, "used": True},
        {"table": ["db", "nation"], "snapshot-id": 1, "keys": 1, "used": True},
        {"table": ["db", "supplier"], "snapshot-id": 1, "keys": 700, "used": True},
        {"table": ["db", "supplier"], "snapshot-id": 1, "keys": 0, "used": True},
    ]
    assert plan["files"] == 0
    assert "joins" not in (await star("POST", f"{OWN_ROUTES}/fact/plan-tables", {})).json


async def test_join_columns_ignore_case_and_all_conditions_apply(star: Star) -> None:
    upper_case_join = {
        "table": ["db", "supplier"],
        "on": {"F_SUPPLIER": "S_Key"},
        "predicate": "S_KEY BETWEEN 100 AND 999",
    }
    assert await star.find_kept_files(
        upper_case_join, build_supplier_join("s_key BETWEEN 500 AND 1999"), where="f_key < 7000"
    ) == [5, 6]


async def test_only_plans_with_the_same_keys_share_a_name(star: Star) -> None:
    first_name = (await star.plan(build_supplier_join("s_key BETWEEN 250 AND 749")))["name"]
    assert (await star.plan(build_supplier_join("s_key >= 250 AND s_key < 750")))["name"] == first_name
    assert (await star.plan(build_supplier_join("s_key BETWEEN 250 AND 748")))["name"] != first_name
    assert (await star.plan(build_supplier_join("s_key BETWEEN 250 AND 749"), predicate="f_key > 0"))[
        "name"
    ] != first_name
    name_of_selective_plan = (await star.plan(build_supplier_join("s_key = 250")))["name"]
    assert name_of_selective_plan not in (first_name, (await star.plan())["name"])
    await star.supplier.commit([star.supplier.write_file([_build_supplier(5000)])])
    plan_after_commit = await star.plan(build_supplier_join("s_key BETWEEN 250 AND 749"))
    assert (plan_after_commit["name"], plan_after_commit["joins"][0]["snapshot-id"]) == (first_name, 2)


async def test_name_of_a_plan_with_joins_depends_on_a_secret_of_the_server(star: Star) -> None:
    """Without the secret, a reader of the fact table could compute the name for each value of the joined table.

    The name that exists would reveal the value, although the reader may not read the joined table.
    """
    join = build_supplier_join("s_region = 'ASIA'")
    names = [(await star.plan(join))["name"], (await star.plan(predicate="f_key < 5"))["name"]]
    assert (await star.plan(join))["name"] == names[0]
    keyring = star.server.components.keyring
    other_secret = SigningKey(b"8 bytes.", from_ms=0, root=bytes(32))
    keyring.replace([*keyring.keys, other_secret])
    assert (await star.plan(join))["name"] != names[0]
    assert (await star.plan(predicate="f_key < 5"))["name"] == names[1]


async def test_joined_table_is_read_at_the_requested_snapshot_and_a_commit_reads_only_new_files(star: Star) -> None:
    assert (await star.plan(build_supplier_join("s_key >= 1900")))["joins"][0]["keys"] == 100
    for file in star.supplier.data:  # The server has the columns of this table in memory.
        Path(file.path.removeprefix("file://")).unlink()
    await star.supplier.commit([star.supplier.write_file([_build_supplier(number) for number in range(1950, 2050)])])
    join_report = (await star.plan(build_supplier_join("s_key >= 1900")))["joins"][0]
    assert (join_report["keys"], join_report["snapshot-id"]) == (150, 2)
    join_report = (await star.plan(build_supplier_join("s_key >= 1950", **{"snapshot-id": 1})))["joins"][0]
    assert (join_report["keys"], join_report["snapshot-id"]) == (50, 1)


async def test_join_that_keys_cannot_decide_is_skipped_with_a_reason(star: Star) -> None:
    join_of_floats = {"table": ["db", "supplier"], "on": {"f_rate": "s_rate"}, "predicate": "s_key = 5"}
    join_of_different_types = {"table": ["db", "supplier"], "on": {"f_supplier": "s_region"}}
    plan = await star.plan(join_of_floats, join_of_different_types, build_supplier_join("s_key = 255"))
    assert [(join["used"], join["keys"]) for join in plan["joins"]] == [(False, None), (False, None), (True, 1)]
    assert "cannot be compared by keys" in plan["joins"][0]["reason"]
    assert plan["files"] == 1
    # If a join has several columns, the server uses only the columns whose values it can compare by keys.
    two_column_join = {
        "table": ["db", "supplier"],
        "on": {"f_rate": "s_rate", "f_supplier": "s_key"},
        "predicate": "s_key = 5",
    }
    assert await star.find_kept_files(two_column_join) == [0]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"join_rows_limit": 1999}, "2,000 rows"),
        ({"join_read_bytes": 100}, "cannot be read"),
        ({"join_wait_s": 0.0}, "still being read"),
    ],
)
async def test_joined_table_over_a_limit_is_skipped(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    async with run_server(tmp_path, **settings) as server:
        star = await create_star(Api(server))
        plan = await star.plan(build_supplier_join("s_region = 'ASIA'"))
        assert [join["used"] for join in plan["joins"]] == [False]
        assert reason in plan["joins"][0]["reason"]
        assert plan["files"] == 20


async def test_missing_data_file_skips_the_join(star: Star) -> None:
    Path(star.supplier.data[0].path.removeprefix("file://")).unlink()
    plan = await star.plan(build_supplier_join("s_key = 255"))
    assert (plan["joins"][0]["used"], plan["files"]) == (False, 20)


def nest_joins(levels: int) -> dict[str, Any]:
    """Return a join of the fact table with the supplier, and of the supplier with itself, on `levels` levels."""
    join: dict[str, Any] = {"table": ["db", "supplier"], "on": {"s_key": "s_key"}}
    for _ in range(levels - 2):  # The innermost and the outermost join are the other two levels.
        join = {**join, "joins": [join]}
    return build_supplier_join(joins=[join])


async def test_invalid_joins_are_rejected_with_the_reason(star: Star) -> None:
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([build_supplier_join("nosuch = 5")], "db.supplier: "),
        ([build_supplier_join("s_key =")], "db.supplier: "),
        ([{"table": ["db", "supplier"], "on": {"nosuch": "s_key"}}], "'nosuch'"),
        ([{"table": ["db", "supplier"], "on": {"f_supplier": "nosuch"}}], "'nosuch'"),
        ([{"table": ["db", "supplier"], "on": {}}], "has 0 columns"),
        ([{"table": ["supplier"], "on": {"f_supplier": "s_key"}}], "needs the levels"),
        ([{"table": ["db", ""], "on": {"f_supplier": "s_key"}}], "is empty"),
        ([{"table": ["db", "supplier"]}], "on"),
        ([{**build_supplier_join(), "where": "true"}], "where"),
        ([build_supplier_join(**{"snapshot-id": 77})], "Cannot find snapshot 77"),
        ([nest_joins(5)], "more than 4 nested levels"),
        ([build_supplier_join()] * 33, "has 33 joins"),
    ]
    for joins, reason in cases:
        for route in ("plan-tables", "explain"):
            code, kind, message = (await star("POST", f"{OWN_ROUTES}/fact/{route}", {"joins": joins})).error
            assert (code, kind) == (400, "BadRequestException"), reason
            assert reason in message, reason
    assert (await star.plan(nest_joins(4)))["joins"][3]["used"]


async def test_missing_joined_table_is_not_found(star: Star) -> None:
    for table in (["db", "nosuch"], ["nosuch", "supplier"]):
        join = {"table": table, "on": {"f_supplier": "s_key"}}
        answer = await star("POST", f"{OWN_ROUTES}/fact/plan-tables", {"joins": [build_supplier_join(), join]})
        assert answer.status == 404
        assert "does not exist" in answer.error[2]


async def test_request_without_the_right_to_read_a_joined_table_is_rejected(tmp_path: Path) -> None:
    secrets, clock = {}, SystemClock()
    grants = {"root": [Grant("root", "admin")], "rita": [Grant("rita", "reader", ("db",))]}
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, grant in grants.items():
            secrets[name] = await create_token(store, clock, name, None, grant)
        await store.transact([CreateNamespace(path=("secret",), properties={})])
    async with run_server(tmp_path, auth="token") as server:
        root, rita = (UserApi(server, secrets[name]) for name in grants)
        await create_star(root)
        created_table = await root("POST", "/v1/namespaces/secret/tables", {"name": "d", "schema": SCHEMA})
        assert created_table.status == 200, created_table.raw
        hidden_join = {"table": ["secret", "d"], "on": {"f_supplier": "id"}}
        nested_hidden_join = build_supplier_join(joins=[{"table": ["secret", "d"], "on": {"s_key": "id"}}])
        missing_join = {"table": ["secret", "nosuch"], "on": {"f_supplier": "id"}}
        for joins, status in (
            ([build_supplier_join()], 200),
            ([hidden_join], 403),
            ([nested_hidden_join], 403),
            ([missing_join], 403),
        ):
            for route in ("plan-tables", "explain"):
                answer = await rita("POST", f"{OWN_ROUTES}/fact/{route}", {"joins": joins})
                assert answer.status == status, answer.raw
                assert (await root("POST", f"{OWN_ROUTES}/fact/{route}", {"joins": joins})).status in (200, 404)


async def test_client_sends_joins_and_reports_their_outcome(star: Star) -> None:
    client = SeamarkClient(star.server.url)
    join = build_supplier_join("s_key BETWEEN 250 AND 449")
    plan = await asyncio.to_thread(client.plan_table, "db.fact", joins=[join])
    explanation = await asyncio.to_thread(client.explain, "db.fact", joins=[join])
    assert plan.files == explanation.files == 3
    assert plan.joins == explanation.joins
    assert plan.joins == ({"table": ["db", "supplier"], "snapshot-id": 1, "keys": 200, "used": True},)
    assert (await asyncio.to_thread(client.plan_table, "db.fact", "f_key < 50")).joins == ()


MISSING_SUPPLIERS = "s_nation IN (1, 6, 11, 16, 21)"
"""400 suppliers that occur in no file, although they are within the bounds of each file."""


async def test_remote_index_prunes_by_keys_only_once_it_is_local(tmp_path: Path) -> None:
    async with run_server(tmp_path, index_whole_bytes=0) as server:
        star = await create_star(Api(server))
        await star.fact.index("i", "bitmap", ["f_supplier"], star.fact.data)
        storage = delay_whole_files(server)
        explanation = (
            await star("POST", f"{OWN_ROUTES}/fact/explain", {"joins": [build_supplier_join(MISSING_SUPPLIERS)]})
        ).json
        assert (explanation["files"], explanation["complete"]) == (20, False)
        storage.resume()
        for _ in range(1000):
            explanation = (
                await star("POST", f"{OWN_ROUTES}/fact/explain", {"joins": [build_supplier_join(MISSING_SUPPLIERS)]})
            ).json
            if explanation["complete"]:
                break
            await asyncio.sleep(0.05)
        assert (explanation["files"], explanation["complete"]) == (0, True)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("first_damaged_offset", range(8))
async def test_damaged_index_never_loses_a_file_of_a_join(tmp_path: Path, first_damaged_offset: int) -> None:
    async with run_server(tmp_path) as server:
        star = await create_star(Api(server))
        for column in ("f_supplier", "f_key"):
            await star.fact.index(f"i_{column}", "bitmap", [column], star.fact.data)
        for path in tmp_path.glob("warehouse/**/*.puffin"):
            data = bytearray(path.read_bytes())
            step = max(8, len(data) // 60)  # About 60 bytes of a long file are damaged.
            for offset in range(first_damaged_offset, len(data), step):
                data[offset] ^= 0x55  # Flip every second bit.
            path.write_bytes(data)
        # Supplier 705 is in fact file 7.
        joins = [build_supplier_join(f"{MISSING_SUPPLIERS} OR s_key = 705")]
        assert 7 in await star.find_kept_files(*joins, where="f_key < 9000 AND f_key <> 3")


async def test_joined_tables_with_the_same_files_use_the_defaults_of_their_own_columns(api: Api) -> None:
    fact = await StarTable.create(api, "fact", [Col(1, "f_key", "int")])
    await fact.commit([fact.write_file([{"f_key": 7}]), fact.write_file([{"f_key": 8}])])
    table = await StarTable.create(api, "one", [Col(1, "id", "int")], version=3)
    await table.commit([table.write_file([{"id": number} for number in range(3)])])
    location = (await api("GET", "/v1/namespaces/db/tables/one")).json["metadata-location"]
    body = {"name": "other", "metadata-location": location}
    assert (await api("POST", "/v1/namespaces/db/register", body)).status == 200
    other_table = dataclasses.replace(table, name="other")
    await table.evolve([Col(1, "id", "int"), Col(2, "x", "int")])
    await other_table.evolve([Col(1, "id", "int"), Col(2, "x", "int", default=7)])
    file_counts = {}
    for name in ("one", "other"):
        joins = [{"table": ["db", name], "on": {"f_key": "x"}}]
        file_counts[name] = (await api("POST", f"{OWN_ROUTES}/fact/plan-tables", {"joins": joins})).json["files"]
    assert file_counts == {"one": 0, "other": 1}


@pytest.mark.slow
async def test_keys_of_a_join_are_used_if_there_are_too_many_other_conditions(star: Star) -> None:
    for name in ("f_key", "f_supplier"):
        assert await star.fact.index(name, "bitmap", [name], star.fact.data)
    # `f_key` is ten times the supplier, so all conditions together require a supplier above 64.
    where = " AND ".join(f"f_key > {number}" for number in range(601, 641))
    assert len(range(601, 641)) > COLUMNS_MAX  # The conditions alone exceed the limit of columns of a scan.
    assert await star.find_kept_files(build_supplier_join("s_key BETWEEN 0 AND 50"), where=where) == []
    assert await star.find_kept_files(build_supplier_join("s_key BETWEEN 0 AND 65"), where=where) == [0]


async def test_joined_table_that_decodes_to_more_than_the_limit_is_skipped(tmp_path: Path) -> None:
    async with run_server(tmp_path, decoded_limit_bytes=1 << 20) as server:
        api = Api(server)
        fact = await StarTable.create(api, "fact", FACT_COLUMNS)
        await fact.commit([fact.write_file([_build_sale(100 * number)]) for number in range(3)])
        wide_table = await StarTable.create(api, "wide", [Col(1, "w_key", "long"), Col(2, "w_text", "string")])
        await wide_table.commit(
            [wide_table.write_file([{"w_key": key, "w_text": f"{key} " * 1000} for key in range(1000)])]
        )
        join = {"table": ["db", "wide"], "on": {"f_supplier": "w_key"}, "predicate": "w_text = '5 5'"}
        answer = await api("POST", f"{OWN_ROUTES}/fact/plan-tables", {"joins": [join]})
        assert answer.status == 200, answer.raw
        (join_report,) = answer.json["joins"]
        assert not join_report["used"]
        assert "decoded it takes more than 1,048,576 bytes" in join_report["reason"]
        assert answer.json["files"] == 3
