"""Tests that plan requests for large tables contain joins with small tables.

The rewritten statement reads each small table at the snapshot of its join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from seamark.connector.client.errors import AccessDenied, ServerFailed
from seamark.connector.plans.async_client import (
    JoinRequest,
    JoinResult,
    KnownTable,
    TablePlanRequest,
    TablePlanResponse,
)
from seamark.connector.plans.joins import SIZE_RATIO_MIN, SMALL_BYTES
from seamark.connector.trino.protocol.sessions import Session
from seamark.connector.trino.rewrite_results import RewriteResult
from seamark.connector.trino.rewriter import RewriteLimits
from tests.connector.trino.played import PATIENT, NumberedPlans, count_planned_tables, open_rewriter, parse_filter

LARGE, SMALL = 100 * SMALL_BYTES, SMALL_BYTES
TABLES = {
    "sales": KnownTable("1", {"item": "long", "day": "date", "ship": "date", "price": "long"}, 10, LARGE, 1000),
    "items": KnownTable("1", {"i_key": "long", "brand": "long", "color": "string"}, 20, SMALL, 3),
    "brands": KnownTable("1", {"b_key": "long", "name": "string"}, 30, SMALL, 1),
    "days": KnownTable("1", {"d_day": "date", "year": "int"}, 40, SMALL, 1),
}
"""Tables with their version, columns, snapshot id, size in bytes and number of files."""
STAR = "SELECT sum(price) FROM sales, items WHERE item = i_key AND color = 'red'"
RED_FILTER = "\"color\" = 'red'"


def answer_with_all_joins(request: TablePlanRequest) -> dict[str, Any]:
    """Return a plan response in which every join is used, at the requested snapshots."""

    def list_results(joins: tuple[JoinRequest, ...]) -> list[JoinResult]:
        results = []
        for join in joins:
            results += [JoinResult(join.snapshot_id, keys=77, used=True), *list_results(join.joins)]
        return results

    return {"joins": tuple(list_results(request.joins))}


async def run_rewrite(
    statement: str,
    plan: Callable[[TablePlanRequest], dict[str, Any]] = answer_with_all_joins,
    limits: RewriteLimits = PATIENT,
    tables: Mapping[str, KnownTable] = TABLES,
) -> tuple[RewriteResult, list[TablePlanRequest]]:
    server = NumberedPlans(plan=plan, tables={**TABLES, **tables})
    async with open_rewriter(server, limits) as rewriter:
        return await rewriter.rewrite(statement, Session("lake", "db")), server.requests


def filter_requests(table: str, requests: list[TablePlanRequest]) -> list[TablePlanRequest]:
    return [request for request in requests if request.table[-1] == table]


async def test_large_table_is_planned_with_its_joins_and_small_table_is_pinned() -> None:
    rewrite, plan_requests = await run_rewrite(STAR)
    assert [request.joins for request in filter_requests("sales", plan_requests)] == [
        (JoinRequest(("db", "items"), (("item", "i_key"),), parse_filter(RED_FILTER), 20),)
    ]
    (items,) = filter_requests("items", plan_requests)
    attributes = (items.filter, items.snapshot_id, items.max_kept_fraction, items.joins)
    assert attributes == (parse_filter(RED_FILTER), 20, 1.0, ())
    assert count_planned_tables(rewrite) == 2
    message = "files=2/200; db.sales=1/100; db.items=1/100; joins=db.sales.item:77; ms="
    assert rewrite.summary.startswith(f"rewritten; scans=2; {message}")
    assert rewrite.depends_on_data


async def test_join_request_has_the_body_that_the_api_defines() -> None:
    nested_request = JoinRequest(
        ("db", "brands"), (("brand", "b_key"),), parse_filter("name = 'x' AND n IN (1, 2)"), 30
    )
    assert JoinRequest(("a", "items"), (("item", "i_key"), ("day", "d")), None, 20, (nested_request,)).build_body() == {
        "table": ["a", "items"],
        "on": {"item": "i_key", "day": "d"},
        "snapshot-id": 20,
        "joins": [
            {
                "table": ["db", "brands"],
                "on": {"brand": "b_key"},
                "snapshot-id": 30,
                "filter": {
                    "type": "and",
                    "left": {
                        "type": "eq",
                        "term": "name",
                        "value": {"type": "literal", "data-type": "string", "value": "x"},
                    },
                    "right": {
                        "type": "in",
                        "term": "n",
                        "values": {"type": "literals", "data-type": "long", "values": ["1", "2"]},
                    },
                },
            }
        ],
    }


async def test_snowflake_is_planned_with_nested_joins_and_all_its_tables_are_pinned() -> None:
    sql = "SELECT 1 FROM sales, items, brands WHERE item = i_key AND brand = b_key AND name = 'x'"
    rewrite, plan_requests = await run_rewrite(sql)
    ((join,),) = [request.joins for request in filter_requests("sales", plan_requests)]
    assert (join.table, join.filter) == (("db", "items"), None)
    assert [(nested_join.table, nested_join.on, nested_join.filter) for nested_join in join.joins] == [
        (("db", "brands"), (("brand", "b_key"),), parse_filter("name = 'x'"))
    ]
    assert [(request.table[-1], request.snapshot_id) for request in plan_requests if request.table[-1] != "sales"] == [
        ("items", 20),
        ("brands", 30),
    ]
    assert count_planned_tables(rewrite) == 3
    assert "joins=db.sales.item:77,db.items.brand:77; " in rewrite.summary


async def test_dimension_with_two_aliases_is_read_at_one_snapshot() -> None:
    """One plan with all rows is used for both aliases.

    The dimension has one file, so a plan could not leave any file out.
    """
    sql = "SELECT 1 FROM sales, days a, days b WHERE day = a.d_day AND ship = b.d_day AND a.year = 1 AND b.year = 2"
    rewrite, plan_requests = await run_rewrite(sql)
    (sales,) = filter_requests("sales", plan_requests)
    assert {(join.on, join.filter) for join in sales.joins} == {
        ((("day", "d_day"),), parse_filter("year = 1")),
        ((("ship", "d_day"),), parse_filter("year = 2")),
    }
    assert [
        (request.filter, request.snapshot_id, request.max_kept_fraction)
        for request in filter_requests("days", plan_requests)
    ] == [(None, 40, 1.0)]
    assert count_planned_tables(rewrite) == 3


@pytest.mark.parametrize(
    ("sql", "tables"),
    [
        ("SELECT 1 FROM sales, items WHERE item = i_key", {}),
        ("SELECT 1 FROM sales, items WHERE item = i_key AND i_key = 5", {}),
        (STAR, {"items": KnownTable("1", TABLES["items"].columns, 20, LARGE // SIZE_RATIO_MIN + 1, 9)}),
        (STAR, {"items": KnownTable("1", TABLES["items"].columns, None, 0, 0)}),
        (STAR, {"items": KnownTable("1", None, 20, SMALL, 1)}),
        (STAR, {"sales": KnownTable("1", TABLES["sales"].columns, 10, LARGE, 1)}),
        (f"{STAR} AND FALSE OR price > 3", {}),
        ("SELECT 1 FROM sales, hive.x.items WHERE item = i_key AND color = 'red' AND price > 3", {}),
        ("SELECT 1 FROM sales s, items FOR VERSION AS OF 5 i WHERE s.item = i.i_key AND i.color = 'red'", {}),
    ],
)
async def test_join_that_is_useless_or_expensive_is_not_requested(sql: str, tables: dict[str, KnownTable]) -> None:
    _, plan_requests = await run_rewrite(sql, tables=tables)
    assert all(request.joins == () for request in filter_requests("sales", plan_requests))


async def test_table_with_joins_as_its_only_conditions_is_planned_once() -> None:
    _, requests = await run_rewrite(STAR)
    assert len(requests) == 2


# The large table is planned without joins if the small table cannot be read at the snapshot of its join.


def respond_with(**changes: Any) -> Callable[[TablePlanRequest], dict[str, Any]]:
    """Return a function that makes plan responses in which the result of every join is changed by `changes`."""

    def plan(request: TablePlanRequest) -> dict[str, Any]:
        joins = answer_with_all_joins(request)["joins"]
        return {"joins": tuple(JoinResult(**{**_list_fields(join), **changes}) for join in joins)}

    return plan


def _list_fields(result: JoinResult) -> dict[str, Any]:
    return {"snapshot_id": result.snapshot_id, "keys": result.keys, "used": result.used}


def respond_without(table: str, error: Exception | None = None) -> Callable[[TablePlanRequest], dict[str, Any]]:
    """Return a function that makes plan responses in which `table` has no plan, or whose request raises `error`."""

    def plan(request: TablePlanRequest) -> dict[str, Any]:
        if request.table[-1] != table:
            return answer_with_all_joins(request)
        if error is not None:
            raise error
        return {"plan_snapshot_id": None}

    return plan


def fail_with_joins(error: Exception) -> Callable[[TablePlanRequest], dict[str, Any]]:
    """Return a function that makes plan responses, and raises `error` for a request with joins."""

    def plan(request: TablePlanRequest) -> dict[str, Any]:
        if request.joins:
            raise error
        return {}

    return plan


@pytest.mark.parametrize(
    "plan",
    [
        respond_with(snapshot_id=21),
        lambda request: {},
        respond_without("items"),
        respond_without("items", AccessDenied("", status=403)),
        lambda request: {
            **answer_with_all_joins(request),
            **({"snapshot_id": 21} if request.table[-1] == "items" else {}),
        },
        fail_with_joins(AccessDenied("", status=403)),
    ],
)
async def test_large_table_is_planned_again_without_joins_if_a_join_is_unsafe(
    plan: Callable[[TablePlanRequest], dict[str, Any]],
) -> None:
    rewrite, plan_requests = await run_rewrite(f"{STAR} AND price > 3", plan)
    assert [bool(request.joins) for request in filter_requests("sales", plan_requests)] == [True, False]
    assert "joins=" not in rewrite.summary
    number = plan_requests.index(filter_requests("sales", plan_requests)[1])
    assert f"sales FOR VERSION AS OF {100 + number}" in (rewrite.statement or "")


async def test_large_table_without_a_predicate_is_not_planned_again() -> None:
    rewrite, plan_requests = await run_rewrite(STAR, fail_with_joins(AccessDenied("", status=403)))
    assert len(filter_requests("sales", plan_requests)) == 1
    assert "sales FOR VERSION" not in (rewrite.statement or "")


async def test_unused_join_pins_no_table() -> None:
    """The statement reads `items` at no fixed snapshot, because the join is not used and its plan keeps all files."""

    def plan(request: TablePlanRequest) -> dict[str, Any]:
        sizes = {"files": 3, "considered_files": 3} if request.table[-1] == "items" else {}
        return {**respond_with(used=False, keys=None)(request), **sizes}

    rewrite, _ = await run_rewrite(f"{STAR} AND price > 3", plan)
    assert "sales FOR VERSION" in (rewrite.statement or "")
    assert "items FOR VERSION" not in (rewrite.statement or "")
    assert "joins=" not in rewrite.summary


async def test_join_is_not_used_if_a_reference_to_the_small_table_has_no_plan() -> None:
    """The small table occurs in two places of the statement, and one of them has no plan."""

    def plan(plan_request: TablePlanRequest) -> dict[str, Any]:
        if plan_request.table[-1] == "items" and plan_request.filter is None:
            raise AccessDenied("", status=403)
        return answer_with_all_joins(plan_request)

    rewrite, plan_requests = await run_rewrite(f"SELECT (SELECT count(*) FROM items) FROM ({STAR})", plan)
    assert filter_requests("sales", plan_requests)[0].joins
    assert rewrite.statement is None


async def test_slow_join_uses_only_its_share_of_the_time_budget() -> None:
    class SlowPlanner(NumberedPlans):
        async def plan_table(self, request: TablePlanRequest) -> TablePlanResponse:
            await asyncio.sleep(600.0 if request.joins else 0.0)
            return await super().plan_table(request)

    server = SlowPlanner(plan=answer_with_all_joins, tables=TABLES)
    async with open_rewriter(server, RewriteLimits(budget_s=3.0)) as rewriter:
        rewrite = await rewriter.rewrite(f"{STAR} AND price > 3", Session("lake", "db"))
        assert "sales FOR VERSION" in (rewrite.statement or "")
        assert rewriter.open_breakers == []
        rewrite = await rewriter.rewrite(STAR, Session("lake", "db"))
        assert "sales FOR VERSION" not in (rewrite.statement or "")


async def test_server_failure_is_not_followed_by_a_second_request() -> None:
    rewrite, _ = await run_rewrite(STAR, fail_with_joins(ServerFailed("")))
    assert "sales FOR VERSION" not in (rewrite.statement or "")


async def test_request_for_many_tables_with_a_common_key_has_at_most_32_joins() -> None:
    tables = {
        f"t{number}": KnownTable("1", {f"k{number}": "long", f"x{number}": "long"}, 1, SMALL, 2) for number in range(30)
    }
    names = ", ".join(tables)
    equalities = " AND ".join(f"k0 = k{number}" for number in range(1, 30))
    _, requests = await run_rewrite(f"SELECT 1 FROM {names} WHERE {equalities} AND x7 = 1", tables=tables)
    assert all(_count_joins(request.joins) <= 32 for request in requests)


def _count_joins(joins: tuple[JoinRequest, ...]) -> int:
    return sum(1 + _count_joins(join.joins) for join in joins)


async def test_disjunction_over_two_small_tables_becomes_alternatives() -> None:
    rewrite, plan_requests = await run_rewrite(
        "SELECT sum(price) FROM sales, items, days WHERE item = i_key AND day = d_day "
        "AND (color = 'red' OR year = 2020 OR price = 3)"
    )
    (expected,) = [request for request in filter_requests("sales", plan_requests) if request.joins]
    join_requests = [
        (join.table[-1], join.on, join.filter, join.any_of is None, join.exempt_condition) for join in expected.joins
    ]
    assert join_requests == [
        ("items", (("item", "i_key"),), parse_filter(RED_FILTER), False, parse_filter('"price" = 3')),
        ("days", (("day", "d_day"),), parse_filter('"year" = 2020'), False, parse_filter('"price" = 3')),
    ]
    assert len({join.any_of for join in expected.joins}) == 1
    assert "joins=db.sales.item:77,db.sales.day:77" in rewrite.summary


async def test_alternative_is_not_requested_if_another_alternative_is_missing() -> None:
    large_table = KnownTable("1", {"d_day": "date", "year": "int"}, 40, LARGE, 1000)
    _, plan_requests = await run_rewrite(
        "SELECT sum(price) FROM sales, items, days WHERE item = i_key AND day = d_day "
        "AND (color = 'red' OR year = 2020)",
        tables={"days": large_table},
    )
    assert not any(request.joins for request in filter_requests("sales", plan_requests))


async def test_join_on_the_day_of_a_timestamp_requests_the_day_transform() -> None:
    tables = {"sales": KnownTable("1", {"at": "timestamp", "price": "long"}, 10, LARGE, 1000)}
    _, plan_requests = await run_rewrite(
        "SELECT sum(price) FROM sales JOIN days ON CAST(at AS date) = d_day WHERE year = 2020", tables=tables
    )
    assert [
        (request.joins[0].on, request.joins[0].transform) for request in filter_requests("sales", plan_requests)
    ] == [((("at", "d_day"),), "day")]


async def test_self_join_is_requested_only_if_a_condition_selects_few_rows() -> None:
    self_join = "SELECT count(*) FROM sales a JOIN sales b ON a.item = b.item WHERE b.price {}"
    for condition, is_joined in (("= 3", True), ("IN (3, 4)", True), ("> 3", False)):
        _, plan_requests = await run_rewrite(self_join.format(condition))
        assert any(request.joins for request in filter_requests("sales", plan_requests)) == is_joined, condition
