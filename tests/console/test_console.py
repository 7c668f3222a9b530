"""Tests of the console in a browser: it shows the server's data to users with rights, and sends no requests to other
hosts.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from seamark.commands.terminal import show_size
from tests.console.browser import RecordedPage, open_browser, open_page
from tests.console.world import (
    SCHEMA,
    build_content_file,
    commit_change,
    create_many_tables,
    create_table,
    create_tokens,
    make_large,
    make_orders,
    send_request,
)
from tests.server.rig import RunningServer, run_server
from tests.warehouses.world import run_server_with_warehouses

TABLE = "#/table/db/orders"
WHERE_PARAMETER = "where=customer_id+%3D+4711+AND+country+LIKE+%27%25A%27"
QUERY = quote(
    "SELECT sum(a.amount) FROM db.orders a JOIN db.orders b ON a.id = b.id "
    "WHERE a.customer_id BETWEEN 1000 AND 90000 AND a.day >= DATE '2024-01-01'",
    safe="",
)
PAGES = {
    "#/tables": "db.orders",
    TABLE: "Snapshots and branches",
    f"{TABLE}/layout": "Ranges of the files",
    f"{TABLE}/explain?{WHERE_PARAMETER}": "Terms by themselves",
    f"#/query?sql={QUERY}": "Tables",
    f"{TABLE}/explain?where={QUERY}": "34 (7.1 %)",
    f"{TABLE}/indexes": "bloom(customer_id, fpp=0.01)",
    f"{TABLE}/history": "Statements by shape",
    f"{TABLE}/advisor": "There is no proposal",
    f"{TABLE}/timeline": "added data files: 480",
    f"{TABLE}/health": "unclustered files",
    "#/timeline": "deleted data files: 600",
    "#/services": "Runs of table services",
    "#/streams": "No stream table that you may see",
    "#/sql?sql=SELECT+1": "Ctrl+Enter runs",
    "#/admin": "commitChange",
}
"""A text that the page must show, by address."""


def _build_reads(mebibytes: int) -> dict[str, float]:
    return {"files": mebibytes, "bytes": mebibytes << 20, "seconds": 0.1}


_PROPOSAL = {
    **{
        "id": "a1",
        "kind": "cluster",
        "title": "Cluster by id",
        "commands": [],
        "change": {},
        "before": _build_reads(4),
    },
    **{"predicted": _build_reads(1), "cost-bytes": 8 << 20, "cost-seconds": 1, "saved-bytes-per-day": 1},
    "pays-after-days": 0.5,
}
_TRIAL = {"number": 1, "state": "kept", "reason": "90 statements since the change read 75% fewer bytes than before"}
ADVICE = {
    **{"statements": 90, "days": 30, "before": _build_reads(2), "proposals": [_PROPOSAL], "reason": ""},
    "applied": [{"proposal": _PROPOSAL, "applied-ms": 1, "measured": None, "recorded": None, "trial": _TRIAL}],
}
"""An answer of `adviseTable`, for pages that show it."""


async def wait_for_text(recorded_page: RecordedPage, text: str) -> None:
    await recorded_page.page.get_by_text(text).first.wait_for()


def check_no_errors_and_hosts(recorded_page: RecordedPage, server: RunningServer) -> None:
    assert recorded_page.errors == []
    assert recorded_page.hosts == {server.url.removeprefix("http://")}


async def test_every_page_shows_its_data_and_updates_with_changes(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        snapshot_before, snapshot_after = await make_orders(server)
        for address, text in PAGES.items():
            await recorded_page.open(address)
            await wait_for_text(recorded_page, text)
            assert await recorded_page.find_violations() == [], address
        module = "new URL('format.js', document.querySelector('script[type=module]').src)"
        sizes = [0, 999, 1023, 1024, 1280, 30_000, 104_806, 10**6, 512 << 20, 999_999_999, 1 << 40]
        output = await recorded_page.run(f"import({module}).then((format) => {sizes}.map(format.size))")
        assert output == [show_size(size) for size in sizes], "the console shows sizes as the command line does"
        texts = ["0", "249,998", "499,998", "749,998", "999,998"]
        axis_marks = [{"position": index / 4, "text": text} for index, text in enumerate(texts)]
        arguments = f"{json.dumps(axis_marks)}, {[index / 4 for index in range(len(texts))]}"
        charts = f"import({module.replace('format', 'charts')})"
        output = await recorded_page.run(
            f"{charts}.then((one) => [270, 420].map((width) => one.labelsOf({arguments}, width)))"
        )
        assert output == [["0", "", "", "", "999,998"], texts], "labels overlap in a narrow window"
        late_search = "address.change(address.parseAddress('#/tables'), {search: 'ord'})"
        output = await recorded_page.run(
            f"import({module.replace('format', 'address')})"
            f".then((address) => {{ location.hash = '#/streams'; {late_search}; return location.hash; }})"
        )
        assert output == "#/streams", "a search ends after the user has opened another page"
        await recorded_page.open("#/tables")
        await recorded_page.page.get_by_label("Search").fill("ord")
        await recorded_page.page.get_by_role("link", name="db.orders").click()
        await recorded_page.page.get_by_role("link", name="Layout").click()
        await recorded_page.page.get_by_role("button", name="Before and after the last rewrite").click()
        await wait_for_text(recorded_page, "Ranges of the files: before")
        assert f"snapshot={snapshot_after}" in recorded_page.page.url
        assert f"before={snapshot_before}" in recorded_page.page.url
        await recorded_page.page.get_by_role("link", name="Explain").click()
        predicate_box = recorded_page.page.get_by_label("Predicate or query in SQL")
        await predicate_box.fill("customer_id = 4711")
        await recorded_page.page.keyboard.press("Control+Enter")
        await wait_for_text(recorded_page, "of 480: 8.3 %")
        text = await recorded_page.page.inner_text("main")
        assert "Layouts that would help" not in text, "each of the 40 partitions has a file for the value"
        await predicate_box.fill("country LIKE '%A'")
        await recorded_page.page.keyboard.press("Control+Enter")
        await wait_for_text(recorded_page, "Only the parts that cannot prune")
        await predicate_box.fill("amount BETWEEN 5 AND 9")
        await recorded_page.page.keyboard.press("Control+Enter")
        await wait_for_text(recorded_page, "Clustered by customer_id, amount")
        await wait_for_text(recorded_page, "seamark table set db.orders seamark.clustering.columns=customer_id,amount")
        await recorded_page.page.get_by_role("link", name="Timeline").last.click()
        await recorded_page.page.get_by_text("live", exact=True).wait_for()
        location = await create_table(server, "other")
        await commit_change(
            server, "orders", [build_content_file(f"{location}/x", {"id": (1, 2)}, rows=31_337, day=20_000)]
        )
        await wait_for_text(recorded_page, "31,337")  # The page updates without a reload.
        await recorded_page.page.get_by_role("link", name="Health").click()
        await recorded_page.page.get_by_role("button", name="Expire snapshots: dry run").click()
        await wait_for_text(recorded_page, "Would remove 0 snapshots")
        check_no_errors_and_hosts(recorded_page, server)


async def sign_in(recorded_page: RecordedPage, token: str) -> None:
    await recorded_page.page.get_by_label("Token").fill(token)
    await recorded_page.page.get_by_role("button", name="Sign in").click()


async def test_user_signs_in_and_sees_what_its_grants_allow(tmp_path: Path) -> None:
    secrets = await create_tokens(tmp_path)
    admin, reader = secrets["admin"], secrets["rita"]
    async with run_server(tmp_path, auth="token") as server, open_browser() as browser:
        await send_request(server, "POST", "/v1/namespaces", {"namespace": ["secret"]}, admin)
        for namespace in ("db", "secret"):
            body = {"name": f"t_{namespace}", "schema": SCHEMA}
            await send_request(server, "POST", f"/v1/namespaces/{namespace}/tables", body, admin)

        async with open_page(browser, server.url) as recorded_page:
            await recorded_page.page.goto(f"{server.url}/#/tables")
            await sign_in(recorded_page, "wrong")
            await wait_for_text(recorded_page, "The server does not accept this token.")
            await sign_in(recorded_page, reader)
            await wait_for_text(recorded_page, "db.t_db")
            assert "secret" not in await recorded_page.page.inner_text("main")
            assert reader not in await recorded_page.run("JSON.stringify(localStorage) + document.cookie + location")
            for address, refused_operation in (("#/admin", "listAudit"), ("#/timeline", "listTimeline")):
                await recorded_page.open(address)
                await wait_for_text(recorded_page, f"rita may not {refused_operation}")
            await recorded_page.open("#/table/secret/t_secret")
            await wait_for_text(recorded_page, "rita may not loadTable in secret")
            await recorded_page.open("#/table/db/t_db/health")
            await recorded_page.page.get_by_role("button", name="Expire snapshots: dry run").click()
            await wait_for_text(recorded_page, "rita may not expireSnapshots in db")
            await recorded_page.page.route("**/advice?*", lambda route: route.fulfill(json=ADVICE))
            await recorded_page.open("#/table/db/t_db/advisor")
            await recorded_page.page.get_by_role("button", name="Apply: Cluster by id").click()
            await wait_for_text(recorded_page, "rita may not applyAdvice in db")
            await send_request(server, "DELETE", "/api/v1/tokens/rita", token=admin)
            await recorded_page.page.get_by_role("link", name="Indexes").click()
            # The page asks for a token, because the token is revoked.
            await recorded_page.page.get_by_label("Token").wait_for()
            assert all("(Unauthorized)" in error or "(Forbidden)" in error for error in recorded_page.errors)
            await sign_in(recorded_page, admin)
            await recorded_page.page.get_by_role("button", name="Sign out").wait_for()  # Here the page is loaded again.
            await recorded_page.open("#/admin")
            await wait_for_text(recorded_page, "rita")
            await recorded_page.page.get_by_role("button", name="Sign out").click()
            await recorded_page.page.get_by_label("Token").wait_for()
            assert await recorded_page.run("sessionStorage.length") == 0


async def test_names_and_texts_of_other_users_are_shown_as_text(tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)>"
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await send_request(server, "POST", "/v1/namespaces", {"namespace": [markup], "properties": {}})
        schema = {"type": "struct", "fields": [{"id": 1, "name": markup, "type": "long", "required": False}]}
        body = {"name": markup, "schema": schema, "properties": {markup: f"</code>{markup}"}}
        await send_request(server, "POST", f"/v1/namespaces/{quote(markup, safe='')}/tables", body)
        await server.record(name=markup, summary={"operation": markup, "javascript:alert(1)": markup})
        table_address = f"#/table/{quote(markup, safe='')}/{quote(markup, safe='')}"
        predicate = quote(f"`{markup}` = 1 OR {markup}", safe="")
        for address in (
            "#/tables",
            table_address,
            f"{table_address}/layout",
            f"{table_address}/explain?where={predicate}",
            "#/timeline",
        ):
            await recorded_page.open(address)
            await recorded_page.page.wait_for_function("text => document.body.innerText.includes(text)", arg=markup)
            assert await recorded_page.run("document.images.length") == 0
        assert all("400 (Bad Request)" in error for error in recorded_page.errors)
        assert recorded_page.hosts == {server.url.removeprefix("http://")}


@pytest.mark.slow
async def test_advisor_page_shows_proposals_and_a_chart_of_applied_proposals(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await create_table(server, "t")
        await recorded_page.page.route("**/advice?*", lambda route: route.fulfill(json=ADVICE))
        await recorded_page.open("#/table/db/t/advisor")
        await wait_for_text(
            recorded_page, "Applied automatically: 90 statements since the change read 75% fewer bytes than before."
        )
        picture = recorded_page.page.get_by_role("img", name="Bytes that an average statement reads")
        assert "before 4 MiB, predicted 1 MiB, measured 2 MiB" in str(await picture.get_attribute("aria-label"))
        widths = [float(str(await bar.get_attribute("width"))) for bar in await picture.locator("rect").all()]
        assert widths == [300, 75, 150]
        assert await recorded_page.find_violations() == []
        # The server rejects the change: the history of this table has no statements, so there is no proposal.
        await recorded_page.page.get_by_role("button", name="Apply: Cluster by id").click()
        await wait_for_text(recorded_page, "The advisor does not make the proposal 'a1' now")


@pytest.mark.slow
async def test_running_jobs_are_shown_with_their_progress(tmp_path: Path) -> None:
    progress = {"files-done": 30, "files-total": 120, "bytes-done": 1 << 20, "bytes-total": 4 << 20}
    job = {"service": "compaction", "namespace": ["db"], "table": "t", "uuid": "u", "launcher": "process"}
    jobs = [
        job | {"started-ms": 1, "progress": progress},
        job | {"started-ms": 2, "progress": dict.fromkeys(progress, 0)},
    ]
    waiting_job = {"service": "indexing", "namespace": ["db"], "table": "u", "uuid": "u", "asked-ms": 1, "failures": 2}
    waiting_jobs = [waiting_job | {"due-ms": 2}, waiting_job | {"table": "v", "due-ms": 4_102_444_800_000}]
    state = {"jobs": jobs, "waiting": waiting_jobs, "complete": False}
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await recorded_page.page.route("**/api/v1/jobs", lambda route: route.fulfill(json=state))
        await recorded_page.open("#/services")
        await wait_for_text(recorded_page, "30 of 120 files, 1 MiB of 4 MiB")
        await wait_for_text(recorded_page, "reads no data files, or has just begun")
        await wait_for_text(recorded_page, "in its turn")
        await wait_for_text(recorded_page, "not before 2100-01-01 00:00:00 UTC")
        await wait_for_text(recorded_page, "The first 2; more jobs wait.")
        assert await recorded_page.find_violations() == []
        jobs.clear()
        await wait_for_text(recorded_page, "No job is running.")  # The page updates without a reload.
        check_no_errors_and_hosts(recorded_page, server)


@pytest.mark.slow
async def test_the_streams_page_shows_offsets_pauses_and_rates_without_a_reload(tmp_path: Path) -> None:
    shards = [{"shard": 0, "flushed": 1000, "durable": 1500}, {"shard": 1, "flushed": 200, "durable": 200}]
    listing = {
        **{"namespace": ["db"], "table": "t", "shards": shards, "waiting-rows": 500, "waiting-bytes": 1 << 20},
        **{"oldest-ms": 1, "fresh-files": 3, "paused": None, "flush-error": None},
    }
    paused_stream = listing | {"table": "u", "paused": "a move of the table"}
    failing_stream = listing | {"table": "v", "flush-error": "the rows do not fit the table"}
    state = {"streams": [listing, paused_stream, failing_stream], "next-page-token": None}
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await recorded_page.page.route("**/api/v1/streams*", lambda route: route.fulfill(json=state))
        await recorded_page.open("#/streams")
        await wait_for_text(recorded_page, "a move of the table")
        await wait_for_text(recorded_page, "the rows do not fit the table")
        await wait_for_text(recorded_page, "1,200")
        await wait_for_text(recorded_page, "1,700")
        await wait_for_text(recorded_page, "1 MiB")
        assert await recorded_page.find_violations() == []
        shards[1]["durable"] = 1_000_200
        await wait_for_text(recorded_page, "1,001,700")
        rates = await recorded_page.page.locator("tbody tr:first-child td:nth-child(3)").all_inner_texts()
        assert float(rates[0].replace(",", "")) > 0
        check_no_errors_and_hosts(recorded_page, server)


@pytest.mark.slow
async def test_keyboard_reaches_the_content_first(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await recorded_page.open("#/tables")
        await wait_for_text(recorded_page, "seamark connect pyiceberg")
        await create_table(server, "first")
        await recorded_page.page.reload()
        await wait_for_text(recorded_page, "1 of 1 table")
        await recorded_page.page.keyboard.press("Tab")
        assert await recorded_page.run("document.activeElement.textContent") == "Skip to the content"
        await recorded_page.page.keyboard.press("Enter")
        assert await recorded_page.run("document.activeElement.id") == "main"
        for _ in range(20):
            await recorded_page.page.keyboard.press("Tab")
            if await recorded_page.run("document.activeElement.hash") == "#/table/db/first":
                break
        else:
            raise AssertionError("the keyboard reaches no table")
        await recorded_page.page.keyboard.press("Enter")
        await recorded_page.page.get_by_role("heading", name="first").wait_for()
        # A screen reader continues at this element.
        assert await recorded_page.run("document.activeElement.id") == "main"


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 420])
async def test_axe_finds_nothing_serious_on_any_page(theme: str, width: int, tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url, theme) as recorded_page,
    ):
        await recorded_page.page.set_viewport_size({"width": width, "height": 900})
        snapshot_before, snapshot_after = await make_orders(server)
        comparison_url = f"{TABLE}/layout?column=customer_id&snapshot={snapshot_after}&before={snapshot_before}"
        for address in (*PAGES, comparison_url, f"{TABLE}/explain", "#/table/db/nothing"):
            await recorded_page.open(address)
            assert await recorded_page.find_violations() == [], address
            assert await recorded_page.run("document.documentElement.scrollWidth <= innerWidth"), (
                f"{address} is too wide"
            )
            for summary in await recorded_page.page.locator("summary").all():
                await summary.click()
            assert await recorded_page.find_violations() == [], address
        await recorded_page.run("document.querySelector('h1').insertAdjacentElement('afterend', new Image())")
        assert await recorded_page.find_violations() != [], "axe found no violation in a page that has one"


@pytest.mark.slow
async def test_console_shows_ten_thousand_tables_and_a_hundred_thousand_files(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path) as server,
        open_browser() as browser,
        open_page(browser, server.url) as recorded_page,
    ):
        await create_many_tables(server, 10_000)
        await make_large(server, 100_000)
        await recorded_page.open("#/tables")
        await wait_for_text(recorded_page, "10,002 of 10,002 tables in all namespaces")
        assert await recorded_page.page.locator(".long li").count() < 100
        await recorded_page.page.get_by_label("Search").fill("events 07777")
        await recorded_page.page.get_by_role("link", name="many.events_07777").wait_for()
        await recorded_page.open("#/table/db/large/layout?column=customer_id")
        await wait_for_text(recorded_page, "about 100 files")
        assert await recorded_page.page.locator(".ranges rect.solid").count() == 1000
        await recorded_page.open(f"#/table/db/large/explain?{WHERE_PARAMETER}")
        await wait_for_text(recorded_page, "of 100,000:")
        assert recorded_page.errors == []


@pytest.mark.slow
async def test_console_of_a_warehouse_shows_only_its_tables(tmp_path: Path) -> None:
    async with run_server_with_warehouses(tmp_path, "sales") as rig, open_browser() as browser:
        await rig.create_table("/v1/sales", "db", "sold")
        await rig.create_table("/v1", "db", "own")
        async with open_page(browser, rig.url) as recorded_page:
            await recorded_page.open("#/admin")
            await recorded_page.page.get_by_role("link", name="sales").click()
            await wait_for_text(recorded_page, "db.sold")
            assert "db.own" not in await recorded_page.page.inner_text("main")
            check_no_errors_and_hosts(recorded_page, rig.server)
