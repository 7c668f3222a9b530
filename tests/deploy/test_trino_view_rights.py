"""Tests of views with rights: a reader through the proxy gets exactly the rows that Trino permits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trino.exceptions

from tests.deploy.shop import Shop, await_final_outcome, post_statement, query_rows, wait_for_result
from tests.services.needs import NEEDS_TRINO
from tests.services.trino_proxy import run_trino_proxy

pytestmark = NEEDS_TRINO
VISIBLE_VIEW = "SELECT id, note FROM shop.orders WHERE country <> 'IT'"
HIDING_VIEW = "SELECT id FROM shop.orders EXCEPT SELECT id FROM shop.orders WHERE country = 'IT'"
VIEWS = (
    ("definer", "DEFINER", VISIBLE_VIEW),
    ("invoker", "INVOKER", VISIBLE_VIEW),
    ("hiding", "DEFINER", HIDING_VIEW),
    ("summary", "DEFINER", "SELECT id, min(note) AS note FROM shop.orders GROUP BY id"),
    ("lending", "DEFINER", "SELECT id, note FROM guarded.invoker"),
    ("keeping", "INVOKER", "SELECT id, note FROM guarded.invoker"),
    ("opening", "INVOKER", "SELECT id, note FROM guarded.definer"),
)


@pytest.fixture(scope="module")
def guarded_shop(shop: Shop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """Open a shop with access control. anna owns the views; other users may read some views and no table."""
    coordinator, folder = shop.trino, tmp_path_factory.mktemp("guarded")
    with run_trino_proxy(
        folder, "--trino", coordinator.base_url, "--budget-ms", "30000", seamark=shop.planner.base_url
    ) as proxy:
        shop_with_proxy = replace(shop, proxy=proxy)
        owner_options = {"user": "anna"}
        query_rows(coordinator.port, "CREATE SCHEMA seamark.guarded", **owner_options)
        for name, security, text in VIEWS:
            query_rows(coordinator.port, f"CREATE VIEW guarded.{name} SECURITY {security} AS {text}", **owner_options)
        yield shop_with_proxy
        for name, _, _ in VIEWS:
            query_rows(coordinator.port, f"DROP VIEW guarded.{name}", **owner_options)


def read_both_answers(shop: Shop, sql: str, user: str) -> tuple[list[list[Any]] | str, list[list[Any]] | str]:
    """Return the rows or the error of a statement without the proxy, and the rows or the error through the proxy."""
    rows: list[list[list[Any]] | str] = []
    for port in (shop.trino.port, shop.proxy.port):
        try:
            rows.append(query_rows(port, sql, user=user, schema="guarded"))
        except trino.exceptions.TrinoUserError as error:
            rows.append(f"{error.error_name}: {error.message}")
    return rows[0], rows[1]


def read_outcome(shop: Shop, sql: str, user: str) -> str:
    return await_final_outcome(shop, sql, **{"X-Trino-User": user, "X-Trino-Schema": "guarded"})


def test_definer_view_runs_with_the_privileges_of_its_owner(guarded_shop: Shop) -> None:
    sql = "SELECT * FROM definer WHERE id IN (4711, 4712, 4713)"
    direct_answer, proxied_answer = read_both_answers(guarded_shop, f"{sql} ORDER BY 1", "rita")
    assert direct_answer == proxied_answer == [[4711, "n4711"], [4713, "n4713"]]
    assert read_outcome(guarded_shop, sql, "rita").endswith("; views=guarded.definer")


def test_invoker_view_is_refused_with_the_same_message(guarded_shop: Shop) -> None:
    sql, count_before = "SELECT * FROM invoker WHERE id = 4711", guarded_shop.proxy.count_statements("original")
    direct_answer, proxied_answer = read_both_answers(guarded_shop, sql, "rita")
    assert direct_answer == proxied_answer
    assert "Access Denied" in direct_answer
    assert guarded_shop.proxy.count_statements("original") == count_before + 1
    direct_answer, proxied_answer = read_both_answers(guarded_shop, sql, "anna")
    assert direct_answer == proxied_answer == [[4711, "n4711"]]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("view", "is_allowed"), [("lending", True), ("keeping", False), ("opening", True)])
def test_nested_views_run_with_the_same_privileges_as_without_the_proxy(
    guarded_shop: Shop, view: str, is_allowed: bool
) -> None:
    """An INVOKER view in a DEFINER view is read with the privileges of the owner of the DEFINER view.

    `lending` is a DEFINER view over an INVOKER view, `keeping` is an INVOKER view over an INVOKER view, and `opening`
    is an INVOKER view over a DEFINER view. Rita may not read the table. For a plan, the view becomes a plan view with
    `~plan~` in its name.
    """
    sql = f"SELECT * FROM {view} WHERE id IN (4711, 4712, 4713) ORDER BY 1"
    count_before = guarded_shop.proxy.count_statements("original")
    direct_answer, proxied_answer = read_both_answers(guarded_shop, sql, "rita")
    assert direct_answer == proxied_answer
    if is_allowed:
        assert proxied_answer == [[4711, "n4711"], [4713, "n4713"]]
        assert read_outcome(guarded_shop, sql, "rita").endswith(f"; views=guarded.{view}")
        assert "~plan~" in read_plan_view_name(guarded_shop, sql)
    else:
        assert "Access Denied" in proxied_answer
        assert guarded_shop.proxy.count_statements("original") == count_before + 1


def test_statement_runs_unchanged_when_no_rule_covers_plan_views(guarded_shop: Shop) -> None:
    sql, count_before = "SELECT * FROM definer WHERE id = 4711", guarded_shop.proxy.count_statements("original")
    direct_answer, proxied_answer = read_both_answers(guarded_shop, sql, "rolf")
    assert direct_answer == proxied_answer == [[4711, "n4711"]]
    assert guarded_shop.proxy.count_statements("original") == count_before + 1


def test_row_filter_on_a_view_applies_to_its_plans(guarded_shop: Shop) -> None:
    sql = "SELECT * FROM definer WHERE id IN (4710, 4711, 4713) ORDER BY 1"
    direct_answer, proxied_answer = read_both_answers(guarded_shop, sql, "filip")
    assert direct_answer == proxied_answer == [[4713, "n4713"]]
    outcome, _ = post_statement(guarded_shop.proxy.port, sql, **{"X-Trino-User": "filip", "X-Trino-Schema": "guarded"})
    assert outcome == "planned"


@pytest.mark.slow
def test_name_of_a_plan_view_soon_expires(guarded_shop: Shop) -> None:
    """The name expires even for the user for whom the plan view was made, whatever the access rules are."""
    for view in ("hiding", "summary"):
        sql = f"SELECT id FROM {view} WHERE id = 4711"
        assert read_outcome(guarded_shop, sql, "rita").endswith(f"; views=guarded.{view}")
        name = read_plan_view_name(guarded_shop, sql)

        def is_gone(name: str = name) -> bool:
            try:
                rows = query_rows(guarded_shop.trino.port, f'SELECT id FROM "{name}"', user="rita", schema="guarded")
            except trino.exceptions.TrinoUserError as error:
                return bool(error.error_name == "TABLE_NOT_FOUND")
            assert rows == [[4711]], "until the name expires, the plan view has the rows of the view"
            return False

        wait_for_result(is_gone)
    direct_answer, proxied_answer = read_both_answers(guarded_shop, "SELECT * FROM shop.orders WHERE id = 4711", "rita")
    assert direct_answer == proxied_answer
    assert "Access Denied" in direct_answer


def read_plan_view_name(shop: Shop, sql: str) -> str:
    """Run a statement as rita, and return the name of the plan view that its rewritten text reads.

    A plan view is a copy of a view that reads only the files of a plan.
    """
    query_rows(shop.proxy.port, sql, user="rita", schema="guarded")
    statement = """SELECT query FROM system.runtime.queries WHERE "user" = 'rita' AND query LIKE '%~plan~%'"""
    rows = query_rows(shop.trino.port, statement, user="anna")
    view_match = re.search(r"FROM (\w+)", sql)
    assert view_match is not None
    names = {match for (text,) in rows for match in re.findall(rf'"({view_match[1]}~plan~[0-9a-f]{{32}})"', text)}
    assert len(names) == 1
    return names.pop()
