"""Statements that name views: what is asked of a view is asked of the tables behind it, and every doubt leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from connector.errors import Forbidden, NotFound
from connector.plans.seamark import Name, View, Wanted
from connector.trino.rewriting import Rewriting
from connector.trino.sessions import Session
from tests.connector.trino.played import Seamark, rewriter

SESSION = Session(catalog="other", schema="elsewhere")
COLUMNS = {"k": "long", "x": "int", "twice": "long"}


def view(text: str, catalog: str | None = "lake", **columns: str) -> View:
    return View(f"file:///{hash(text)}", text, columns or COLUMNS, catalog, "db")


PLAIN = view("SELECT id AS k, x, id * 2 AS twice FROM t WHERE x > 5")


async def rewritten(statement: str, **played: Any) -> tuple[Rewriting, Seamark]:
    server = Seamark(**played)
    async with rewriter(server) as made:
        return await made.rewrite(statement, SESSION), server


async def test_a_view_is_read_over_the_plans_of_what_is_behind_it() -> None:
    done, server = await rewritten("SELECT * FROM lake.db.v WHERE k = 4 AND twice = 8", views={"v": PLAIN})
    assert done.statement == 'SELECT * FROM lake.db."v~plan~0" AS "v" WHERE k = 4 AND twice = 8'
    ((name, _, predicate, (reference,)),) = server.views_asked
    assert (name, predicate) == (("db", "v"), '"k" = 4')
    assert PLAIN.text[reference.start : reference.end] == "t"
    assert reference.plan[0] == "db"
    assert reference.plan[1].startswith("t~plan~")
    assert reference.alias
    (wanted,) = [one for one in server.asked if one.table == ("db", "t")]
    assert wanted.predicate == '("x" > 5 AND "id" = 4)'


async def test_the_answer_tells_nothing_of_the_tables_behind_it_and_all_names_are_renewed() -> None:
    done, server = await rewritten("SELECT * FROM lake.db.v WHERE k = 4", views={"v": PLAIN})
    assert done.told.startswith("rewritten; scans=1; files=0/0; views=db.v; ms=")
    assert (done.files, done.considered_files) == (1, 100), "of which the operator is told"
    assert done.plans == sorted([("db", "v~plan~0"), server.views_asked[0][3][0].plan])


async def test_names_in_a_view_are_its_own() -> None:
    text = 'SELECT a.id AS k, a.x FROM t a JOIN lake."s.p".u AS b ON a.id = b.uid'
    done, server = await rewritten(
        "WITH t AS (SELECT 1 AS id, 2 AS x) SELECT * FROM t, lake.db.v WHERE v.k = 4", views={"v": view(text)}
    )
    assert done.statement is not None
    assert {one.table for one in server.asked} == {("db", "v"), ("db", "t"), ("s", "p", "u")}
    ((_, _, _, references),) = server.views_asked
    assert [text[one.start : one.end] for one in references] == ["t", 'lake."s.p".u']
    assert [one.alias for one in references] == [False, False]


@pytest.mark.parametrize(
    ("statement", "given"),
    [
        ("SELECT * FROM lake.db.v WHERE x = 4", view("SELECT id AS x FROM t", x="int")),  # stored as a long
        ("SELECT * FROM lake.db.v WHERE n = 4", view("SELECT id * 2 AS n FROM t", n="long")),
        ("SELECT * FROM lake.db.v", PLAIN),
        ("SELECT count(*) FROM lake.db.v WHERE n = 4", view("SELECT count(*) AS n FROM t", n="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", view("SELECT id AS k FROM t ORDER BY id LIMIT 3", k="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", view("SELECT id AS k FROM t", catalog=None, k="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", view("SELECT id AS k FROM t", catalog="hive", k="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", view("SELECT id AS k FROM t FOR VERSION AS OF 7", k="long")),
        ("SELECT * FROM lake.db.v WHERE k = 4", view("not understood", k="long")),
        ("SELECT * FROM lake.db.v FOR VERSION AS OF 8 WHERE k = 4", PLAIN),
    ],
)
async def test_a_view_that_cannot_be_looked_into_is_left(statement: str, given: View) -> None:
    done, server = await rewritten(statement, views={"v": given})
    assert done.statement is None
    assert server.views_asked == []


async def test_a_views_own_conditions_leave_files_out_too() -> None:
    done, server = await rewritten("SELECT * FROM lake.db.v WHERE twice = 4", views={"v": PLAIN})
    assert done.statement == 'SELECT * FROM lake.db."v~plan~0" AS "v" WHERE twice = 4'
    assert [one[2] for one in server.views_asked] == ["TRUE"]
    assert server.asked[-1].predicate == '"x" > 5'


async def test_a_table_beside_a_view_of_it_is_read_at_one_snapshot_with_it() -> None:
    counted = view("SELECT count(*) AS n FROM t", n="long")
    statement = "SELECT * FROM lake.db.v, lake.db.t WHERE id = 4"
    done, _ = await rewritten(statement, views={"v": counted})
    assert done.statement == 'SELECT * FROM lake.db."v~plan~0" AS "v", lake.db."t~plan~1" AS "t" WHERE id = 4'
    done, _ = await rewritten(statement, views={"v": counted}, answer=lambda _: None)
    assert done.statement is None


async def test_a_view_behind_a_view_is_left_and_the_tables_beside_it_are_not() -> None:
    outer = view("SELECT t.id AS k FROM w JOIN t ON t.id = w.k", k="long")
    done, server = await rewritten("SELECT * FROM lake.db.v WHERE k = 4", views={"v": outer, "w": PLAIN})
    assert done.statement is not None
    ((_, _, _, (reference,)),) = server.views_asked
    assert outer.text[reference.start : reference.end] == "t"


async def test_a_view_behind_a_view_is_not_asked_about_again_and_again() -> None:
    server = Seamark(views={"v": view("SELECT k FROM w", k="long"), "w": PLAIN})
    async with rewriter(server) as made:
        for _ in range(4):
            assert (await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is None
    assert server.views_read == [("db", "v")]
    assert [one.table[-1] for one in server.asked] == ["v"]


def refusing(error: Exception) -> Callable[[Name], str | None]:
    def answer(name: Name) -> str | None:
        raise error

    return answer


async def test_who_may_not_make_plan_views_asks_once_and_not_for_each_statement() -> None:
    server = Seamark(views={"v": PLAIN}, answer=refusing(Forbidden("no", status=403, kind="ForbiddenException")))
    async with rewriter(server) as made:
        for _ in range(3):
            done = await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)
            assert done.statement is None
    assert len(server.views_asked) == 1
    assert len(server.views_read) == 1


async def test_a_view_that_has_changed_is_read_again() -> None:
    server = Seamark(views={"v": PLAIN})
    async with rewriter(server) as made:
        assert (await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is not None
        server.views["v"] = view("SELECT uid AS k FROM u", k="long")
        server.answer = refusing(NotFound("gone", status=404, kind="NoSuchViewException"))
        assert (await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is None
        server.answer = None
        assert (await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)).statement is not None
    assert [one[1].text for one in server.views_asked][-1] == "SELECT uid AS k FROM u"
    assert len(server.views_read) == 2


async def test_a_view_that_is_known_costs_no_question_more() -> None:
    server = Seamark(views={"v": PLAIN})
    async with rewriter(server) as made:
        for _ in range(4):
            await made.rewrite("SELECT * FROM lake.db.v WHERE k = 4", SESSION)
    assert len(server.views_read) == 1
    assert [one.table[-1] for one in server.asked] == ["v", *["t"] * 4]


async def test_a_table_within_and_beside_a_view_is_read_at_one_snapshot() -> None:
    statement = "SELECT * FROM lake.db.v JOIN lake.db.t ON t.x = v.x WHERE k = 4 AND t.id = 3"
    done, _ = await rewritten(statement, views={"v": PLAIN})
    assert done.statement is not None
    assert done.statement.count("~plan~") == 2

    def turning(wanted: Wanted) -> dict[str, Any]:
        return {"snapshot_id": 1 if wanted.predicate and "x" in wanted.predicate else 2}

    done, _ = await rewritten(statement, views={"v": PLAIN}, plan=turning)
    assert done.statement is None
    done, _ = await rewritten(statement, views={"v": PLAIN}, answer=lambda _: None)
    assert done.statement is None, "the view reads the table as it is, so all do"


async def test_one_view_in_two_places_has_a_plan_for_each() -> None:
    statement = "SELECT * FROM lake.db.v a, lake.db.v b WHERE a.k = 4 AND b.k = 5"
    done, server = await rewritten(statement, views={"v": PLAIN})
    assert [one[2] for one in server.views_asked] == ['"k" = 4', '"k" = 5']
    assert done.statement == ('SELECT * FROM lake.db."v~plan~0" a, lake.db."v~plan~1" b WHERE a.k = 4 AND b.k = 5')
