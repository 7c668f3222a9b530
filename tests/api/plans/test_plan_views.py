"""Tests of plan views over HTTP: what engines load by the name, how long it is valid, and who may make a plan view."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import VIEW_VERSION, Api, build_property_commit
from tests.api.plans.planned import append_files, build_ten_id_files
from tests.api.plans.test_plan_tables import (
    GRACE_S,
    LEASE_S,
    STANDARD_TABLES,
    UNKNOWN_PLAN_NAME,
    PlanApi,
    UserApi,
    list_plan_files,
    open_plan_api,
)
from tests.server.rig import run_server

VIEWS, OWN_VIEWS = "/v1/namespaces/db/views", "/api/v1/views/db"
TEXT = "SELECT id, data FROM t WHERE id > 3 -- 't'"
OWNER_PROPERTIES = {"trino.run-as-owner": "anna", "comment": "a comment"}
TABLE_POSITION = TEXT.index(" t ") + 1


def build_version(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    spark = {"type": "sql", "sql": "SELECT `id` FROM t", "dialect": "spark"}
    trino = {"type": "sql", "sql": text, "dialect": "trino"}
    return {**VIEW_VERSION, "representations": [spark, trino], "default-catalog": "lake", **fields}


async def build_view_request(
    api: Api, name: str = "v", position: int = TABLE_POSITION, **fields: Any
) -> dict[str, Any]:
    """Plan `t`, and return the body of a request for a plan view.

    A plan view is a copy of the view `name` that reads the plan instead of the table `t`.

    Args:
        position: The offset of the name of `t` in the text of the view.
        fields: Fields that replace those of the body.
    """
    loaded_view = (await api("GET", f"{VIEWS}/{name}")).json
    plan_name = (await api("POST", "/api/v1/tables/db/t/plan-tables", {"predicate": "id = 5"})).json["name"]
    table = {"start": position, "end": position + 1, "plan": ["db", plan_name], "alias": True}
    location = loaded_view["metadata-location"]
    return {"metadata-location": location, "predicate": '"id" = 5', "tables": [table], **fields}


async def make_plan_view(api: Api, **options: Any) -> str:
    answer = await api("POST", f"{OWN_VIEWS}/v/plan-views", await build_view_request(api, **options))
    assert answer.status == 200, answer.raw
    return str(answer.json["name"])


def read_text(loaded_view: dict[str, Any]) -> str:
    ((representation,),) = [version["representations"] for version in loaded_view["metadata"]["versions"]]
    assert representation["dialect"] == "trino"
    return str(representation["sql"])


async def test_plan_view_differs_from_the_view_only_in_its_text(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
    body = await build_view_request(plan_api)
    answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body)
    assert answer.status == 200, answer.raw
    name = answer.json["name"]
    assert name.startswith("v~plan~")
    assert name == name.lower()
    assert plan_api.clock.now_ms() < answer.json["expires-at-ms"] <= plan_api.clock.now_ms() + LEASE_S * 1000
    loaded_view, view = (await plan_api("GET", f"{VIEWS}/{name}")).json, (await plan_api("GET", f"{VIEWS}/v")).json
    plan_name = body["tables"][0]["plan"][1]
    inner_text = TEXT.replace(" t ", f' "{plan_name}" AS "t" ')
    assert read_text(loaded_view) == f'SELECT * FROM (\n{inner_text}\n) AS "v" WHERE "id" = 5'
    equal_fields = ("view-uuid", "properties", "schemas", "current-version-id", "location", "format-version")
    assert all(loaded_view["metadata"][key] == view["metadata"][key] for key in equal_fields)
    (view_version,) = loaded_view["metadata"]["versions"]
    (stored_version,) = view["metadata"]["versions"]
    del view_version["representations"], stored_version["representations"]
    assert view_version == stored_version
    assert (await plan_api("HEAD", f"{VIEWS}/{name}")).status == 204
    assert (await plan_api("GET", f"{STANDARD_TABLES}/{name}")).status == 404, "the name of a plan view is not a table"


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("reference", "default_namespace", "replacement"),
    [
        ("t", ["db"], '"{plan_name}"'),
        ('"T"', ["db"], '"{plan_name}"'),
        ("DB.t", ["elsewhere"], 'DB."{plan_name}"'),
        ('lake."db"."t"', [], 'lake."db"."{plan_name}"'),
    ],
)
async def test_table_reference_may_have_any_form(
    plan_api: PlanApi, reference: str, default_namespace: list[str], replacement: str
) -> None:
    text = f"SELECT x.id, x.data FROM {reference} x"
    await plan_api.view(**{"view-version": build_version(text, **{"default-namespace": default_namespace})})
    body = await build_view_request(plan_api)
    start = text.index(f" {reference} ") + 1
    body["tables"][0] |= {"start": start, "end": start + len(reference), "alias": False}
    answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body)
    assert answer.status == 200, answer.raw
    plan_name = body["tables"][0]["plan"][1]
    loaded_view = (await plan_api("GET", f"{VIEWS}/{answer.json['name']}")).json
    assert f"FROM {replacement.format(plan_name=plan_name)} x" in read_text(loaded_view)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        (TEXT, TABLE_POSITION, TABLE_POSITION + 2),
        (TEXT, TABLE_POSITION - 1, TABLE_POSITION + 1),
        (TEXT, 0, 6),
        (TEXT, -1, 1),
        (TEXT, TABLE_POSITION, len(TEXT) + 5),
        ("SELECT * FROM u, t", 14, 15),
        ("SELECT * FROM other.t", 14, 21),
        ("SELECT 't' FROM t", 7, 10),
        ("SELECT 't' FROM t", 8, 9),
        ("SELECT data FROM t", 9, 10),
        ("SELECT t.id FROM t", 7, 8),
        ("SELECT * FROM t; DROP", 14, 21),
    ],
)
async def test_only_the_name_of_the_planned_table_is_replaced(
    plan_api: PlanApi, text: str, start: int, end: int
) -> None:
    await plan_api.view(**{"view-version": build_version(text)})
    body = await build_view_request(plan_api)
    body["tables"][0] |= {"start": start, "end": end}
    answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", body)
    assert answer.error[:2] == (400, "BadRequestException")
    assert "are not the name of db.t" in answer.error[2]


async def test_invalid_requests_for_plan_views_are_rejected(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()})
    cases: list[tuple[dict[str, Any], int]] = [
        ({"predicate": "nothing = 5"}, 400),
        ({"predicate": "id = 5) UNION SELECT * FROM (u"}, 400),
        ({"predicate": ""}, 400),
        ({"tables": []}, 400),
        ({"lease-s": 0}, 400),
        ({"metadata-location": "file:///old"}, 404),
        ({"tables": [{"start": TABLE_POSITION, "end": TABLE_POSITION + 1, "plan": ["db", "t"]}]}, 404),
        ({"tables": [{"start": TABLE_POSITION, "end": TABLE_POSITION + 1, "plan": ["t"]}]}, 400),
        ({"tables": [{"start": TABLE_POSITION, "end": TABLE_POSITION + 1, "plan": ["db", UNKNOWN_PLAN_NAME]}]}, 404),
    ]
    for changes, status in cases:
        answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", {**await build_view_request(plan_api), **changes})
        assert answer.status == status, (changes, answer.raw)


async def test_overlapping_places_and_views_without_trino_text_are_rejected(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()})
    body = await build_view_request(plan_api)
    answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", {**body, "tables": body["tables"] * 2})
    assert answer.error[:2] == (400, "BadRequestException")
    await plan_api.view("w")
    assert (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", await build_view_request(plan_api, "w"))).status == 400
    assert (await plan_api("POST", f"{OWN_VIEWS}/none/plan-views", body)).status == 404


async def test_plan_view_name_is_invalid_after_the_view_changed(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
    name = await make_plan_view(plan_api)
    assert (await plan_api("POST", f"{VIEWS}/v", build_property_commit(**{"trino.run-as-owner": "bert"}))).status == 200
    assert (await plan_api("GET", f"{VIEWS}/{name}")).status == 404, (
        "the plan view would run with the rights of the former owner"
    )
    other_plan = await make_plan_view(plan_api)
    assert other_plan != name
    assert (await plan_api("GET", f"{VIEWS}/{other_plan}")).json["metadata"]["properties"][
        "trino.run-as-owner"
    ] == "bert"
    assert (await plan_api("DELETE", f"{VIEWS}/v")).status == 204
    for view_name in (name, other_plan):
        assert (await plan_api("GET", f"{VIEWS}/{view_name}")).status == 404
    await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
    assert (await plan_api("GET", f"{VIEWS}/{other_plan}")).status == 404, (
        "the new view has the same name but another UUID"
    )


OUTER_VIEW_TEXT = "SELECT id FROM db.\"V\" WHERE data <> 'x' "


async def build_outer_view_request(api: Api, inner_name: str) -> dict[str, Any]:
    """Return the body of a request for a plan view of `w`, a view of `v`.

    A plan view is a copy of a view that reads stored plans instead of tables. The plan view of `w` reads the plan view
    `inner_name` of `v`.
    """
    await api.view("w", **{"view-version": build_version(OUTER_VIEW_TEXT)})
    location = (await api("GET", f"{VIEWS}/w")).json["metadata-location"]
    position = OUTER_VIEW_TEXT.index("db.")
    table = {"start": position, "end": position + len('db."V"'), "plan": ["db", inner_name], "alias": True}
    return {"metadata-location": location, "predicate": "id > 4", "tables": [table]}


async def test_plan_view_of_an_outer_view_may_use_the_plan_view_of_its_inner_view(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
    inner_name = await make_plan_view(plan_api)
    body = await build_outer_view_request(plan_api, inner_name)
    answer = await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)
    assert answer.status == 200, answer.raw
    loaded_view = (await plan_api("GET", f"{VIEWS}/{answer.json['name']}")).json
    text = OUTER_VIEW_TEXT.replace('db."V"', f'db."{inner_name}" AS "V"')
    assert read_text(loaded_view) == f'SELECT * FROM (\n{text}\n) AS "w" WHERE id > 4'
    assert loaded_view["metadata"]["properties"] == {}, "the plan view of w does not get the owner of v"


async def test_plan_view_can_replace_only_the_view_that_it_was_created_for(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()})
    inner_name = await make_plan_view(plan_api)
    body = await build_outer_view_request(plan_api, inner_name)
    (table,) = body["tables"]
    plan_table_name = (await plan_api("POST", "/api/v1/tables/db/t/plan-tables", {"predicate": "id = 5"})).json["name"]
    outer_name = (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)).json["name"]
    for other_name in (plan_table_name, outer_name):
        answer = await plan_api(
            "POST", f"{OWN_VIEWS}/w/plan-views", {**body, "tables": [{**table, "plan": ["db", other_name]}]}
        )
        assert answer.error[:2] == (400, "BadRequestException")
        assert "are not the name of db." in answer.error[2]
    for other_name in ("v", "t", f"v~plan~{'0' * 32}"):
        answer = await plan_api(
            "POST", f"{OWN_VIEWS}/w/plan-views", {**body, "tables": [{**table, "plan": ["db", other_name]}]}
        )
        assert answer.status == 404, f"{other_name} is not a plan view"
    assert (await plan_api("DELETE", f"{VIEWS}/v")).status == 204
    assert (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)).status == 404


@pytest.mark.slow
async def test_change_of_a_view_removes_its_plan_view_but_not_outer_plan_views(plan_api: PlanApi) -> None:
    """A plan view is a copy of a view that reads stored plans.

    Here the outer plan view, the copy of `w`, reads the inner plan view, the copy of `v`.

    After the change, the outer plan view names a missing view: Trino fails, and the proxy runs the statement without
    plans.
    """
    await plan_api.view(**{"view-version": build_version()}, properties=OWNER_PROPERTIES)
    inner_name = await make_plan_view(plan_api)
    body = await build_outer_view_request(plan_api, inner_name)
    outer_name = (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)).json["name"]
    assert (await plan_api("POST", f"{VIEWS}/v", build_property_commit(comment="another"))).status == 200
    assert (await plan_api("GET", f"{VIEWS}/{inner_name}")).status == 404
    assert (await plan_api("GET", f"{VIEWS}/{outer_name}")).status == 200
    assert (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)).status == 404
    second_inner_name = await make_plan_view(plan_api)
    body["tables"][0]["plan"] = ["db", second_inner_name]
    assert (await plan_api("POST", f"{OWN_VIEWS}/w/plan-views", body)).json["name"] not in (None, outer_name)
    plan_api.advance_leases(0.9)
    for name in (second_inner_name, outer_name):
        assert (await plan_api("POST", f"/api/v1/tables/db/{name}/lease", {})).status == 200
    plan_api.advance_leases(0.9)
    for name, status in ((second_inner_name, 200), (outer_name, 200), (inner_name, 404)):
        assert (await plan_api("GET", f"{VIEWS}/{name}")).status == status, "each plan view has a separate lease"


@pytest.mark.slow
async def test_plan_views_have_the_same_leases_and_files_as_plan_tables(plan_api: PlanApi, tmp_path: Path) -> None:
    await plan_api.view(**{"view-version": build_version()})
    name = await make_plan_view(plan_api)
    plan_file_count_before = len(list_plan_files(tmp_path))
    assert await make_plan_view(plan_api) == name, "an equal request shares the plan view"
    assert len(list_plan_files(tmp_path)) == plan_file_count_before
    plan_api.advance_leases(0.9)
    answer = await plan_api("POST", f"/api/v1/tables/db/{name}/lease", {})
    assert answer.status == 200, answer.raw
    plan_api.advance_leases(0.9)
    assert (await plan_api("GET", f"{VIEWS}/{name}")).status == 200
    plan_api.advance_leases(0.2)
    assert (await plan_api("GET", f"{VIEWS}/{name}")).status == 404
    plan_api.clock.ahead_ms += GRACE_S * 1000
    await plan_api.server.components.housekeeping.run_round()
    assert list_plan_files(tmp_path) == []
    assert (await plan_api("GET", f"{VIEWS}/{await make_plan_view(plan_api)}")).status == 200


async def test_plan_view_is_never_listed_and_cannot_be_changed(plan_api: PlanApi) -> None:
    await plan_api.view(**{"view-version": build_version()})
    name = await make_plan_view(plan_api)
    identifiers = (await plan_api("GET", VIEWS)).json["identifiers"]
    assert [identifier["name"] for identifier in identifiers] == ["v"]
    assert (await plan_api("POST", f"{VIEWS}/{name}", build_property_commit(a="b"))).status == 400
    assert (await plan_api("DELETE", f"{VIEWS}/{name}")).status == 400
    rename_body = {
        "source": {"namespace": ["db"], "name": name},
        "destination": {"namespace": ["db"], "name": "mine"},
    }
    assert (await plan_api("POST", "/v1/views/rename", rename_body)).status in (400, 404)
    body = await build_view_request(plan_api)
    assert (await plan_api("POST", f"{OWN_VIEWS}/{name}/plan-views", body)).status == 404
    assert (await plan_api("POST", f"/api/v1/tables/db/{name}/plan-tables", {})).status == 404
    assert (await plan_api("GET", f"{VIEWS}/{name}")).status == 200


async def test_number_of_plan_views_is_limited_by_the_setting(tmp_path: Path) -> None:
    async with open_plan_api(tmp_path, plan_tables_limit=1) as plan_api:
        await plan_api.view(**{"view-version": build_version()})
        answer = await plan_api("POST", f"{OWN_VIEWS}/v/plan-views", await build_view_request(plan_api))
        assert answer.json == {"name": None, "expires-at-ms": None}


async def test_making_a_plan_view_requires_rights_to_change_the_view_and_read_its_tables(tmp_path: Path) -> None:
    secrets, clock = {}, SystemClock()
    grants = {
        "root": [Grant("root", "admin")],
        "reader": [Grant("reader", "reader", ("db",))],
        "writer": [Grant("writer", "writer", ("db",))],
        "views": [Grant("views", "writer", ("views",))],
        "both": [Grant("both", "writer", ("views",)), Grant("both", "reader", ("db",))],
        "nobody": [],
    }
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, grant in grants.items():
            secrets[name] = await create_token(store, clock, name, None, grant)
    async with run_server(tmp_path, auth="token") as server:
        apis = {name: UserApi(server, secret) for name, secret in secrets.items()}
        root = apis["root"]
        await root.create_table()
        await append_files(root, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        await root.view(**{"view-version": build_version()})
        body = await build_view_request(root)
        assert (await apis["reader"]("POST", f"{OWN_VIEWS}/v/plan-views", body)).status == 403
        assert (await apis["nobody"]("POST", f"{OWN_VIEWS}/v/plan-views", body)).status == 403
        answer = await apis["writer"]("POST", f"{OWN_VIEWS}/v/plan-views", body)
        assert answer.status == 200, answer.raw
        name = answer.json["name"]
        assert (await apis["reader"]("GET", f"{VIEWS}/{name}")).status == 200, (
            "a reader of the view may also read its plan view"
        )
        error_for_plan_view = (await apis["nobody"]("GET", f"{VIEWS}/{name}")).error
        assert error_for_plan_view == (await apis["nobody"]("GET", f"{VIEWS}/v")).error
        assert (await apis["nobody"]("HEAD", f"{VIEWS}/{name}")).status == 403

        assert (await root("POST", "/v1/namespaces", {"namespace": ["views"]})).status == 200
        create_request = {"name": "v", "schema": (await root("GET", f"{VIEWS}/v")).json["metadata"]["schemas"][0]}
        create_request |= {"view-version": build_version(), "properties": {}}
        loaded_view = (await root("POST", "/v1/namespaces/views/views", create_request)).json
        body["metadata-location"] = loaded_view["metadata-location"]
        assert (await apis["views"]("POST", "/api/v1/views/views/v/plan-views", body)).status == 403
        assert (await apis["both"]("POST", "/api/v1/views/views/v/plan-views", body)).status == 200

        outer_text = "SELECT id, data FROM db.v"
        outer_request = create_request | {"name": "w", "view-version": build_version(outer_text)}
        loaded_view = (await root("POST", "/v1/namespaces/views/views", outer_request)).json
        (table,) = body["tables"]
        table |= {"start": outer_text.index("db.v"), "end": len(outer_text), "plan": ["db", name]}
        body["metadata-location"] = loaded_view["metadata-location"]
        for user, status in (("views", 403), ("reader", 403), ("both", 200)):
            answer = await apis[user]("POST", "/api/v1/views/views/w/plan-views", body)
            assert answer.status == status, f"{user}: the right to read the views in its text is also required"


async def test_no_user_can_add_a_condition_that_runs_with_another_users_rights(tmp_path: Path) -> None:
    secrets, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, grant in {"root": Grant("root", "admin"), "wendy": Grant("wendy", "writer", ("db",))}.items():
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=[grant])
    async with run_server(tmp_path, auth="token") as server:
        root, wendy = (UserApi(server, secrets[name]) for name in ("root", "wendy"))
        await root.create_table()
        await append_files(root, "t", build_ten_id_files(30), snapshot_id=1, manifests=3)
        subquery = '"id" = 5 OR id IN (SELECT id FROM theirs.secret)'
        for owner, may_write in (("anna", False), ("wendy", True), (None, True)):
            properties = {} if owner is None else {"trino.run-as-owner": owner}
            await root.view(**{"view-version": build_version(), "properties": properties})
            body = await build_view_request(root)
            assert (await root("POST", f"{OWN_VIEWS}/v/plan-views", body)).status == 200
            assert (await wendy("POST", f"{OWN_VIEWS}/v/plan-views", body)).status == (200 if may_write else 403)
            # A view without an owner runs with the rights of its reader.
            answer = await root("POST", f"{OWN_VIEWS}/v/plan-views", {**body, "predicate": subquery})
            assert answer.status == (200 if owner is None else 400), answer.raw
            for predicate, status in (
                ("lower(data) = 'a' AND (NOT (id IN (1, 2)))", 200),
                ("id = CAST('1' AS DECIMAL(3, 0)) OR data = 'evil.f('", 200),
                ("evil.lower(data) = 'a'", 400),
                ("evil(data) = 'a'", 400),
                # For these conditions, the filter has Iceberg transforms.
                ("evil.bucket(4, id) = 1", 400),
                ("id = 1 AND NOT evil . truncate(data, 4) = 'a'", 400),
                ("bucket(id, 4) = 1", 400),
                ('evil."bucket" (4, id) = 1', 400),
                # For these conditions, the filter matches no row.
                ("evil.f(id) = NULL", 400),
                ("(SELECT id FROM theirs.secret) = NULL", 400),
            ):
                answer = await root("POST", f"{OWN_VIEWS}/v/plan-views", {**body, "predicate": predicate})
                assert answer.status == (200 if owner is None else status), (predicate, answer.raw)
            assert (await root("DELETE", f"{VIEWS}/v")).status == 204
