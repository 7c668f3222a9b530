"""Tests of statements that name views.

The proxy plans the tables of a view with the conditions on the view. If this is not safe, the view stays unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from seamark.connector.analysis.views import DEPTH_MAX, VIEWS_MAX
from seamark.connector.client.errors import AccessDenied, NoSuchResource
from seamark.connector.plans.async_client import KnownTable, Name, TablePlanRequest, View
from seamark.connector.trino.protocol.sessions import Session
from seamark.connector.trino.rewrite_results import RewriteResult
from tests.connector.trino.played import COLUMNS as COLUMNS_OF
from tests.connector.trino.played import READER, NumberedPlans, open_rewriter, parse_filter

SESSION = Session(catalog="other", schema="elsewhere", user=READER)
COLUMNS = {"k": "long", "x": "int", "twice": "long"}


def build_access_check(names: str, columns: Iterable[str] = COLUMNS) -> str:
    """Return the WITH clause that precedes a statement in which plan views replace the views in `names`.

    The clause contains these views, whose names are separated by spaces, and reads none of their rows. So Trino checks
    that the user may read them, although the rest of the statement does not contain them.
    """
    text = ", ".join(f'"{column}"' for column in columns)
    queries = [f'"~{number}" AS (SELECT {text} FROM {name} WHERE FALSE)' for number, name in enumerate(names.split())]
    return f"WITH {', '.join(queries)} "


def build_view(text: str, catalog: str | None = "lake", **columns: str) -> View:
    return View(f"file:///{hash(text)}", text, columns or COLUMNS, catalog, "db")


PLAIN_VIEW = build_view("SELECT id AS k, x, id * 2 AS twice FROM t WHERE x > 5")


async def run_rewrite(statement: str, **server_options: Any) -> tuple[RewriteResult, NumberedPlans]:
    server = NumberedPlans(**server_options)
    async with open_rewriter(server) as rewriter:
        return await rewriter.rewrite(statement, SESSION), server


async def test_view_is_read_over_the_plans_of_its_tables() -> None:
    rewrite, server = await run_rewrite("SELECT * FROM lake.db.v WHERE k = 4 AND twice = 8", views={"v": PLAIN_VIEW})
    assert (
        rewrite.statement
        == build_access_check("lake.db.v") + 'SELECT * FROM lake.db."v~plan~0" AS "v" WHERE k = 4 AND twice = 8'
    )
    ((name, _, predicate, (reference,)),) = server.view_requests
    assert (name, predicate) == (("db", "v"), '"k" = 4')
    assert PLAIN_VIEW.text[reference.start : reference.end] == "t"
    assert (reference.table, reference.plan_snapshot_id) == (("db", "t"), 101)
    (expected,) = [request for request in server.requests if request.table == ("db", "t")]
    assert expected.filter == parse_filter("x > 5 AND id = 4")


async def test_summary_names_the_view_but_not_its_tables_and_all_plans_are_renewed() -> None:
    rewrite, _ = await run_rewrite("SELECT * FROM lake.db.v WHERE k = 4", views={"v": PLAIN_VIEW})
    assert rewrite.summary.startswith("rewritten; scans=1; files=0/0; views=db.v; ms=")
    assert (rewrite.files, rewrite.considered_files) == (1, 100), "the operator sees the counts, but clients do not"
    assert rewrite.plans == [(("db", "t"), 101), (("db", "v"), 200)]


async def test_names_in_a_view_resolve_in_the_view() -> None:
    text = 'SELECT a.id AS k, a.x FROM t a JOIN lake."s.p".u AS b ON a.id = b.uid'
    rewrite, server = await run_rewrite(
        "WITH t AS (SELECT 1 AS id, 2 AS x) SELECT * FROM t, lake.db.v WHERE v.k = 4", views={"v": build_view(text)}
    )
    assert rewrite.statement is not None
    assert {request.table for request in server.requests} == {("db", "v"), ("db", "t"), ("s", "p", "u")}
    ((_, _, _, references),) = server.view_requests
    assert [text[reference.start : reference.end] for reference in references] == ["t", 'lake."s.p".u']
    assert [reference.table for reference in references] == [("db", "t"), ("s", "p", "u")]


@pytest.mark.parametrize(
    ("statement", "input_view"),
    [
        # The view converts the column: `t` stores `id` as a long.
        ("SELECT * FROM lake.db.v WHERE x = 4", build_view("SELECT id AS x FROM t", x="int")),
        # The condition is on a computed column.
        ("SELECT * FROM lake.db.v WHERE n = 4", build_view("SELECT id * 2 AS n FROM t", n="long")),
        # The statement has no condition.
        ("SELECT * FROM lake.db.v", PLAIN_VIEW),
        # A condition on the rows of `t` would change the aggregate and the limited rows.
        ("SELECT count(*) FROM lake.db.v WHERE n = 4", build_view("SELECT count(*) AS n FROM t", n="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", build_view("SELECT id AS k FROM t ORDER BY id LIMIT 3", k="long")),
        # The catalog of `t` is unknown, or is not a catalog of the server.
        ("SELECT * FROM lake.db.v WHERE k = 4", build_view("SELECT id AS k FROM t", catalog=None, k="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", build_view("SELECT id AS k FROM t", catalog="hive", k="long")),
        # The view reads an earlier snapshot.
        ("SELECT * FROM lake.db.v WHERE k = 4", build_view("SELECT id AS k FROM t FOR VERSION AS OF 7", k="long")),
        # The text of the view cannot be parsed.
        ("SELECT * FROM lake.db.v WHERE k = 4", build_view("not understood", k="long")),
        # The statement reads an earlier version of the view.
        ("SELECT * FROM lake.db.v FOR VERSION AS OF 8 WHERE k = 4", PLAIN_VIEW),
    ],
)
async def test_view_that_cannot_be_analysed_stays_unchanged(statement: str, input_view: View) -> None:
    rewrite, server = await run_rewrite(statement, views={"v": input_view})
    assert rewrite.statement is None
    assert server.view_requests == []


async def test_conditions_of_a_view_itself_leave_files_out() -> None:
    rewrite, server = await run_rewrite("SELECT * FROM lake.db.v WHERE twice = 4", views={"v": PLAIN_VIEW})
    assert (
        rewrite.statement == build_access_check("lake.db.v") + 'SELECT * FROM lake.db."v~plan~0" AS "v" WHERE twice = 4'
    )
    assert [view_request.predicate for view_request in server.view_requests] == ["TRUE"]
    assert server.requests[-1].filter == parse_filter("x > 5")


async def test_table_and_a_view_of_it_are_read_at_one_snapshot() -> None:
    count_view = build_view("SELECT count(*) AS n FROM t", n="long")
    statement = "SELECT * FROM lake.db.v, lake.db.t WHERE id = 4"
    rewrite, _ = await run_rewrite(statement, views={"v": count_view})
    expected_query = 'SELECT * FROM lake.db."v~plan~0" AS "v", lake.db.t FOR VERSION AS OF 101 WHERE id = 4'
    assert rewrite.statement == build_access_check("lake.db.v", ["n"]) + expected_query
    rewrite, _ = await run_rewrite(statement, views={"v": count_view}, answer=lambda _: None)
    assert rewrite.statement is None


NESTED_VIEWS = {
    "top": build_view('SELECT m.k, upper(u.y) AS y FROM "Mid" AS m JOIN u ON u.uid = m.k', k="long", y="int"),
    "mid": build_view("SELECT v.k, x FROM v WHERE x < 9", k="long", x="int"),
    "v": PLAIN_VIEW,
}


async def test_condition_on_a_view_reaches_the_tables_of_nested_views() -> None:
    rewrite, server = await run_rewrite("SELECT * FROM lake.db.top WHERE k = 4 AND y = 3", views=NESTED_VIEWS)
    expected_query = 'SELECT * FROM lake.db."top~plan~2" AS "top" WHERE k = 4 AND y = 3'
    assert rewrite.statement == build_access_check("lake.db.top", ["k", "y"]) + expected_query
    assert [(name[-1], predicate) for name, _, predicate, _ in server.view_requests] == [
        ("v", '("x" < 9 AND "k" = 4)'),
        ("mid", '"k" = 4'),
        ("top", '"k" = 4'),
    ]
    expected = {request.table[-1]: request.filter for request in server.requests if request.table[-1] in ("t", "u")}
    assert expected == {"t": parse_filter("x > 5 AND x < 9 AND id = 4"), "u": parse_filter("uid = 4")}
    columns = [
        [
            (view.text[reference.start : reference.end], reference.table, reference.plan, reference.alias)
            for reference in references
        ]
        for _, view, _, references in server.view_requests
    ]
    assert columns == [
        [("t", ("db", "t"), (), False)],
        [("v", (), ("db", "v~plan~0"), True)],
        [("u", ("db", "u"), (), False), ('"Mid"', (), ("db", "mid~plan~1"), False)],
    ]


async def test_summary_names_only_the_outermost_view_and_all_plans_are_renewed() -> None:
    rewrite, _ = await run_rewrite("SELECT * FROM lake.db.top WHERE k = 4", views=NESTED_VIEWS)
    assert rewrite.summary.startswith("rewritten; scans=1; files=0/0; views=db.top; ms=")
    views = {(("db", "top"), 202), (("db", "mid"), 201), (("db", "v"), 200)}
    assert views < set(rewrite.plans)
    assert {table for table, _ in set(rewrite.plans) - views} == {("db", "t"), ("db", "u")}
    assert len(rewrite.plans) == 5


async def test_names_in_a_nested_view_resolve_in_that_view() -> None:
    """The view `v` of the schema `db` and the view `v` of the schema `there` read different tables."""
    other_view = View("file:///there", "SELECT id AS k, x FROM t", {"k": "long", "x": "int"}, "lake", "there")
    inner = View("file:///inner", "SELECT uid AS k FROM u", {"k": "long"}, "lake", "db")
    outer = build_view("SELECT a.k FROM v a JOIN there.v b ON a.k = b.k WHERE b.x = 6", k="long")
    server = NumberedPlans(views={"top": outer})
    server.views |= {("db", "v"): inner, ("there", "v"): other_view}
    async with open_rewriter(server) as rewriter:
        rewrite = await rewriter.rewrite("SELECT * FROM lake.db.top WHERE k = 4", SESSION)
    assert rewrite.statement is not None
    assert {(name, view.location, predicate) for name, view, predicate, _ in server.view_requests} == {
        (("db", "v"), "file:///inner", '"k" = 4'),
        (("there", "v"), "file:///there", '("x" = 6 AND "k" = 4)'),
        (("db", "top"), outer.location, '"k" = 4'),
    }
    assert {request.table for request in server.requests} >= {("db", "u"), ("there", "t")}


async def test_condition_on_a_computed_or_converted_column_of_a_nested_view_is_not_pushed_down() -> None:
    """The inner view computes `n`, and converts `x` to another type."""
    inner = build_view("SELECT id AS k, x + 1 AS n, id AS x FROM t", k="long", n="int", x="int")
    outer = build_view("SELECT k, n, x FROM v", k="long", n="int", x="int")
    statement = "SELECT * FROM lake.db.top WHERE k = 4 AND n = 5 AND x = 6"
    rewrite, server = await run_rewrite(statement, views={"top": outer, "v": inner})
    assert rewrite.statement is not None
    assert [view_request.predicate for view_request in server.view_requests] == ['"k" = 4'] * 2
    assert server.requests[-1].filter == parse_filter("id = 4")


async def test_known_nested_views_are_requested_without_asking_for_tables() -> None:
    server = NumberedPlans(views=dict(NESTED_VIEWS))
    async with open_rewriter(server) as rewriter:
        await rewriter.rewrite("SELECT * FROM lake.db.top WHERE k = 4", SESSION)
        request_count, read_count = len(server.requests), len(server.read_views)
        rewrite = await rewriter.rewrite("SELECT * FROM lake.db.top WHERE k = 5", SESSION)
    assert rewrite.statement is not None
    assert [request.table[-1] for request in server.requests[request_count:]] == ["u", "t"], (
        "no view is requested as a table"
    )
    assert sorted(server.read_views[read_count:]) == [("db", "mid"), ("db", "top"), ("db", "v")]


async def test_views_keep_their_plans_if_a_nested_view_has_none() -> None:
    for refused_view, other_views in (("v", ["mid", "top"]), ("mid", ["v", "top"]), ("top", ["v", "mid"])):
        server = NumberedPlans(views=dict(NESTED_VIEWS), answer=name_all_but(refused_view))
        async with open_rewriter(server) as rewriter:
            rewrite = await rewriter.rewrite("SELECT * FROM lake.db.top WHERE k = 4", SESSION)
        assert (rewrite.statement is None) == (refused_view == "top")
        request = [name[-1] for name, *_ in server.view_requests if name[-1] != refused_view]
        assert request == [view for view in other_views if (refused_view, view) != ("v", "mid")], (
            "mid reads v, so without a plan of v, mid needs none"
        )
        if refused_view != "top":
            ((_, _, _, references),) = [
                view_request for view_request in server.view_requests if view_request.name[-1] == "top"
            ]
            assert [(reference.table, reference.plan) for reference in references] == [(("db", "u"), ())]
            assert {table for table, _ in rewrite.plans} == {("db", "top"), ("db", "u")}, (
                "plans of views that the statement does not read are not kept"
            )


def name_all_but(refused_view: str) -> Callable[[Name], str | None]:
    def answer(name: Name) -> str | None:
        return None if name[-1] == refused_view else f"{name[-1]}~plan~named"

    return answer


async def test_table_in_nested_views_is_read_at_one_snapshot() -> None:
    """`t` is in the outer view and in the inner view. If the inner view has no plan, `t` has none in either view."""
    outer = build_view("SELECT t.id AS k, u.y FROM v JOIN t ON t.id = v.k JOIN u ON u.uid = t.id", k="long", y="int")
    views = {"top": outer, "v": PLAIN_VIEW}
    statement = "SELECT * FROM lake.db.top WHERE k = 4"
    rewrite, server = await run_rewrite(statement, views=views)
    assert rewrite.statement is not None
    # The first letter of a table or of a plan view identifies it.
    assert sorted((reference.table or reference.plan)[1][0] for reference in server.view_requests[-1].references) == [
        "t",
        "u",
        "v",
    ]
    rewrite, server = await run_rewrite(statement, views=views, answer=name_all_but("v"))
    assert rewrite.statement is not None
    assert [reference.table[1] for reference in server.view_requests[-1].references] == ["u"]
    rewrite, server = await run_rewrite(
        f"{statement} AND k IN (SELECT id FROM lake.db.t)", views=views, answer=name_all_but("v")
    )
    assert rewrite.statement is not None
    assert rewrite.statement.endswith("(SELECT id FROM lake.db.t)"), "the table beside the view has no plan either"

    def answer_by_filter(request: TablePlanRequest) -> dict[str, Any]:
        return {"snapshot_id": 1 if "'x'" in repr(request.filter) else 2}

    rewrite, server = await run_rewrite(statement, views=views, plan=answer_by_filter)
    assert [reference.table[1] for reference in server.view_requests[-1].references] == ["u"]


async def test_view_that_reads_itself_is_analysed_in_bounded_work() -> None:
    """Trino cannot create a recursive view, and fails a statement that reads a recursive view of another engine."""
    views = {
        "v": build_view("SELECT w.k FROM w JOIN t ON t.id = w.k", k="long"),
        "w": build_view("SELECT a.k FROM v a JOIN v b ON a.k = b.k JOIN w c ON c.k = b.k", k="long"),
    }
    rewrite, server = await run_rewrite("SELECT * FROM lake.db.v WHERE k = 4", views=views)
    assert rewrite.summary.startswith(("rewritten; ", "unchanged; "))
    assert len(server.view_requests) <= VIEWS_MAX


async def test_nested_views_are_analysed_to_a_maximum_depth_and_number() -> None:
    chain = {f"v{number}": build_view(f"SELECT k FROM v{number + 1}", k="long") for number in range(12)}
    for depth, is_analysed in ((DEPTH_MAX, True), (DEPTH_MAX + 1, False)):
        views = {**chain, f"v{depth - 1}": build_view("SELECT id AS k FROM t", k="long")}
        rewrite, server = await run_rewrite("SELECT * FROM lake.db.v0 WHERE k = 4", views=views)
        assert (rewrite.statement is not None) == is_analysed
        assert len(server.view_requests) == (depth if is_analysed else 0)
    doubling_chain = {
        f"v{number}": build_view(f"SELECT a.k FROM v{number + 1} a, v{number + 1} b", k="long") for number in range(7)
    }
    doubling_chain["v7"] = build_view("SELECT id AS k FROM t", k="long")
    rewrite, server = await run_rewrite("SELECT * FROM lake.db.v0 WHERE k = 4", views=doubling_chain)
    assert rewrite.statement is None, "the statement would need 255 plan views"
    assert server.view_requests == []


async def test_changed_nested_view_is_read_again() -> None:
    server = NumberedPlans(views=dict(NESTED_VIEWS))
    async with open_rewriter(server) as rewriter:
        statement = "SELECT * FROM lake.db.top WHERE k = 4"
        assert (await rewriter.rewrite(statement, SESSION)).statement is not None
        server.views["v"] = build_view("SELECT uid AS k, y AS x FROM u", k="long", x="int")
        assert (await rewriter.rewrite(statement, SESSION)).statement is not None
        assert server.view_requests[-3].view is server.views["v"]
        server.views["mid"] = build_view("SELECT k FROM new", k="long")
        server.views["new"] = build_view("SELECT id AS k FROM t", k="long")
        assert (await rewriter.rewrite(statement, SESSION)).statement is not None
        assert [view_request.name[-1] for view_request in server.view_requests[-3:]] == ["new", "mid", "top"]
        del server.views["new"]
        count_before = len(server.view_requests)
        assert (await rewriter.rewrite(statement, SESSION)).statement is None, (
            "the column of the deleted view is unknown"
        )
        assert len(server.view_requests) == count_before


async def test_name_belongs_to_a_view_after_the_view_gets_a_column_of_this_name() -> None:
    """The name `x` in the subquery belongs to the outer table until the view has a column `x`."""
    statement = "SELECT * FROM lake.db.t WHERE EXISTS (SELECT 1 FROM lake.db.u, lake.db.v WHERE uid = x AND y = 3)"
    # A join with `u` is requested only if `u` is much smaller than `t`.
    tables = {
        "t": KnownTable("1", COLUMNS_OF["t"], snapshot_id=7, size_bytes=1 << 30, files=100),
        "u": KnownTable("1", COLUMNS_OF["u"], snapshot_id=7, size_bytes=100, files=2),
    }
    server = NumberedPlans(views={"v": build_view("SELECT id AS k FROM t", k="long")}, tables=tables)
    async with open_rewriter(server) as rewriter:
        await rewriter.rewrite(statement, SESSION)
        assert [request.table[-1] for request in server.requests if request.joins] == ["t"]
        server.views["v"] = build_view("SELECT id AS x FROM t", x="long")
        server.requests.clear()
        await rewriter.rewrite(statement, SESSION)
        assert [request.table[-1] for request in server.requests if request.joins] == []
        assert "u" in [request.table[-1] for request in server.requests]


def refuse_with(error: Exception) -> Callable[[Name], str | None]:
    def answer(name: Name) -> str | None:
        raise error

    return answer


async def test_user_without_the_right_to_plan_views_sends_one_request_for_many_statements() -> None:
    server = NumberedPlans(
        views={"v": PLAIN_VIEW}, answer=refuse_with(AccessDenied("no", status=403, kind="ForbiddenException"))
    )
    async with open_rewriter(server) as rewriter:
        for _ in range(3):
            rewrite = await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)
            assert rewrite.statement is None
    assert len(server.view_requests) == 1
    assert len(server.read_views) == 2, "one request reads the view, one checks whether it has changed"


async def test_changed_view_is_read_again() -> None:
    server = NumberedPlans(views={"v": PLAIN_VIEW})
    async with open_rewriter(server) as rewriter:
        assert (await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is not None
        server.views["v"] = build_view("SELECT uid AS k FROM u", k="long")
        server.answer = refuse_with(NoSuchResource("gone", status=404, kind="NoSuchViewException"))
        assert (await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is None
        server.answer = None
        assert (await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is not None
    assert [view_request.view.text for view_request in server.view_requests][-1] == "SELECT uid AS k FROM u"


async def test_known_view_is_not_requested_as_a_table() -> None:
    server = NumberedPlans(views={"v": PLAIN_VIEW})
    async with open_rewriter(server) as rewriter:
        for _ in range(4):
            await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)
    assert len(server.read_views) == 1 + 4, "each statement checks whether the view has changed"
    assert [request.table[-1] for request in server.requests] == ["v", *["t"] * 4]


async def test_table_in_a_view_and_in_the_statement_is_read_at_one_snapshot() -> None:
    statement = "SELECT * FROM lake.db.v JOIN lake.db.t ON t.x = v.x WHERE k = 4 AND t.id = 3"
    rewrite, _ = await run_rewrite(statement, views={"v": PLAIN_VIEW})
    assert rewrite.statement is not None
    assert (rewrite.statement.count("~plan~"), rewrite.statement.count("FOR VERSION AS OF")) == (1, 1)

    def answer_by_filter(request: TablePlanRequest) -> dict[str, Any]:
        return {"snapshot_id": 1 if "'x'" in repr(request.filter) else 2}

    rewrite, _ = await run_rewrite(statement, views={"v": PLAIN_VIEW}, plan=answer_by_filter)
    assert rewrite.statement is None
    rewrite, _ = await run_rewrite(statement, views={"v": PLAIN_VIEW}, answer=lambda _: None)
    assert rewrite.statement is None, "the view reads the current table, so the statement must read it everywhere"


async def test_view_in_two_places_has_a_plan_for_each() -> None:
    statement = "SELECT * FROM lake.db.v a, lake.db.v b WHERE a.k = 4 AND b.k = 5"
    rewrite, server = await run_rewrite(statement, views={"v": PLAIN_VIEW})
    assert [view_request.predicate for view_request in server.view_requests] == ['"k" = 4', '"k" = 5']
    expected_query = 'SELECT * FROM lake.db."v~plan~0" a, lake.db."v~plan~1" b WHERE a.k = 4 AND b.k = 5'
    assert rewrite.statement == build_access_check("lake.db.v") + expected_query


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        (
            "WITH q AS (SELECT 1) SELECT k FROM lake.db.v WHERE k = 4",
            'WITH {} q AS (SELECT 1) SELECT k FROM lake.db."v~plan~0" AS "v" WHERE k = 4',
        ),
        (
            "EXPLAIN ANALYZE /* why */ SELECT k FROM lake.db.v WHERE k = 4",
            'EXPLAIN ANALYZE /* why */ WITH {} SELECT k FROM lake.db."v~plan~0" AS "v" WHERE k = 4',
        ),
        (
            "EXECUTE IMMEDIATE 'SELECT k FROM lake.db.v WHERE k = ?' USING 4",
            'EXECUTE IMMEDIATE \'WITH {} SELECT k FROM lake.db."v~plan~0" AS "v" WHERE k = ?\' USING 4',
        ),
        (
            "(SELECT k FROM lake.db.v WHERE k = 4) UNION ALL SELECT k FROM lake.db.v w WHERE k = 5",
            'WITH {} (SELECT k FROM lake.db."v~plan~0" AS "v" WHERE k = 4) UNION ALL '
            'SELECT k FROM lake.db."v~plan~1" w WHERE k = 5',
        ),
    ],
)
async def test_rewritten_statement_names_the_view_so_that_trino_checks_its_rules(statement: str, expected: str) -> None:
    rewrite, _ = await run_rewrite(statement, views={"v": PLAIN_VIEW})
    query_text = build_access_check("lake.db.v").removeprefix("WITH ").rstrip()
    assert rewrite.statement == expected.format(f"{query_text}," if "WITH {} q" in expected else query_text)
    assert rewrite.used.views == {("lake", "db", "v")}
    assert set(rewrite.used.columns) == {("lake", "db", "t")}


async def test_views_stay_unchanged_for_a_session_without_a_user() -> None:
    """A plan view is a copy of a view that reads stored plans, and belongs to one user."""
    server = NumberedPlans(views={"v": PLAIN_VIEW})
    async with open_rewriter(server) as rewriter:
        rewrite = await rewriter.rewrite("SELECT * FROM lake.db.v WHERE k = 4", replace(SESSION, user=""))
    assert (rewrite.statement, server.view_requests) == (None, [])
