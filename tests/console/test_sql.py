"""Tests of the console's SQL page.

It runs, explains and cancels statements, and shows results, errors and that SQL is disabled.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import expect

from tests.connector.lake import append_parts, create_lake_table, spread_ids
from tests.console.browser import RecordedPage, open_browser, open_page
from tests.console.test_console import check_no_errors_and_hosts, wait_for_text
from tests.server.rig import run_server

LONG_STATEMENT = "SELECT count(*) FROM " + ", ".join(f"db.t t{n}" for n in range(12))
"""A join of 12 times the same 60 rows, which runs longer than any test."""


async def enter_statement(recorded_page: RecordedPage, statement: str, keys: str = "Control+Enter") -> None:
    statement_box = recorded_page.page.get_by_label("Statement", exact=True)
    await statement_box.fill(statement)
    await statement_box.press(keys)


@pytest.mark.slow
async def test_statement_is_run_explained_cancelled_and_listed(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await asyncio.to_thread(create_lake_table, server.url)
        await asyncio.to_thread(append_parts, server.url, "db.t", spread_ids(3))
        markup = "<img src=x onerror=alert(1)>"
        await recorded_page.open("#/sql?sql=SELECT+1")
        page = recorded_page.page
        assert await page.get_by_label("Statement", exact=True).input_value() == "SELECT 1"
        assert await page.get_by_role("region", name="Result").count() == 0, "the page runs no statement of a link"

        await page.get_by_label("Namespace of names without one").fill("db")
        await enter_statement(
            recorded_page,
            f"SELECT id, country, CAST(NULL AS bigint) AS n, '{markup}' AS m FROM t WHERE id < 2 ORDER BY id",
        )
        await wait_for_text(recorded_page, "2 rows in")
        rows = page.get_by_role("region", name="Result").locator("tbody tr")
        assert await rows.all_inner_texts() == [f"{number}\tc{number}\tnull\t{markup}" for number in range(2)]
        await wait_for_text(recorded_page, "duckdb, because")
        cells = page.get_by_role("region", name="Tables").locator("tbody td")
        table, files, considered_files, _, columns, joins = await cells.all_inner_texts()
        assert (table, files, considered_files, columns, joins) == ("db.t", "2 (66.7 %)", "3", "2", "")

        await enter_statement(recorded_page, "SELECT * FROM db.t", "Control+Shift+Enter")
        await wait_for_text(recorded_page, "explained")
        assert await page.get_by_role("region", name="Result").count() == 0
        assert "3 (100 %)" in await page.get_by_role("region", name="Tables").inner_text()

        await page.get_by_label("Rows shown").select_option("100")
        await enter_statement(recorded_page, "SELECT a.id FROM db.t a, db.t b")
        await wait_for_text(recorded_page, "100 rows in")
        await wait_for_text(recorded_page, "there are more")
        assert await rows.count() == 100
        assert recorded_page.errors == []

        await enter_statement(recorded_page, "SELECT nope FROM db.t")
        await expect(page.get_by_role("alert")).to_contain_text("nope")
        await enter_statement(recorded_page, LONG_STATEMENT)
        await expect(page.get_by_role("button", name="Run")).to_be_disabled()
        await page.keyboard.press("Escape")
        await wait_for_text(recorded_page, "Cancelled")
        # A cancelled statement gets an answer, unless the connection is closed first.
        assert all("400 (Bad Request)" in error or "404 (Not Found)" in error for error in recorded_page.errors)

        past_statements = page.get_by_role("region", name="Statements of this tab").locator("tbody tr")
        outcomes = [await past_statements.nth(index).locator("td").nth(2).inner_text() for index in range(5)]
        assert outcomes == ["cancelled", "failed", "100 rows", "explained", "2 rows"]
        await recorded_page.open("#/tables")
        await recorded_page.open("#/sql")
        await page.get_by_role("button", name="SELECT nope FROM db.t").click()
        assert await page.get_by_label("Statement", exact=True).input_value() == "SELECT nope FROM db.t"
        assert await recorded_page.find_violations() == []
        assert await recorded_page.run("localStorage.length + sessionStorage.length <= 1")  # Only the theme is stored.
        await page.reload()
        await recorded_page.settle()
        assert await past_statements.count() == 0
        recorded_page.errors.clear()
        check_no_errors_and_hosts(recorded_page, server)


@pytest.mark.slow
async def test_sql_page_of_a_server_without_sql_explains_how_to_enable_sql(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path, sql="off") as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await recorded_page.open("#/sql")
        await wait_for_text(recorded_page, "an operator switches it on with the setting sql = on")
        assert await recorded_page.page.get_by_label("Statement", exact=True).count() == 0
        assert await recorded_page.find_violations() == []
        check_no_errors_and_hosts(recorded_page, server)
