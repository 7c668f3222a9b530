"""Tests of the rights to use a plan that depends on rows of other tables, by callers that know its name or token."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.api.indexes.test_cube_rights import create_users
from tests.api.plans.test_joins import create_star
from tests.api.plans.test_plan_tables import UserApi
from tests.server.rig import RunningServer, run_server

FACT = "/v1/namespaces/db/tables/fact"
JOIN = {"table": ["secret", "supplier"], "on": {"f_supplier": "s_key"}, "predicate": "s_key BETWEEN 250 AND 449"}
PLANS_HEADER = {"X-Seamark-Plans": "engines"}
ROLES = {
    "root": [("admin", ())],
    "rita": [("reader", ("db",))],
    "rex": [("reader", ("db",)), ("reader", ("secret",))],
}


async def open_star(server: RunningServer, secrets: dict[str, str]) -> list[UserApi]:
    """Create a fact table, and move its dimension table to the namespace `secret`. Return a client for each user."""
    users = [UserApi(server, secrets[name]) for name in ROLES]
    await create_star(users[0])
    assert (await users[0]("POST", "/v1/namespaces", {"namespace": ["secret"]})).status == 200
    await move_supplier(users[0], "db", "secret")
    return users


async def move_supplier(root: UserApi, source: str, destination: str) -> None:
    names = [{"namespace": [namespace], "name": "supplier"} for namespace in (source, destination)]
    answer = await root("POST", "/v1/tables/rename", {"source": names[0], "destination": names[1]})
    assert answer.status == 204, answer.raw


async def use_plan_table(caller: UserApi, name: str) -> dict[str, int]:
    """Send each request that may name a plan table, with `name` as the table. Return the statuses by request."""
    path_of_table = f"/v1/namespaces/db/tables/{name}"
    report: dict[str, Any] = {"report-type": "scan-report", "table-name": name, "snapshot-id": 1, "filter": True}
    report |= {"schema-id": 0, "projected-field-ids": [1], "projected-field-names": ["f_key"], "metrics": {}}
    requests = {
        "load": ("GET", path_of_table, None),
        "exists": ("HEAD", path_of_table, None),
        "credentials": ("GET", f"{path_of_table}/credentials", None),
        "plan": ("POST", f"{path_of_table}/plan", {}),
        "report": ("POST", f"{path_of_table}/metrics", report),
        "lease": ("POST", f"/api/v1/tables/db/{name}/lease", {}),
    }
    return {
        request_name: (await caller(method, path, body)).status
        for request_name, (method, path, body) in requests.items()
    }


async def test_use_of_a_plan_requires_the_rights_on_its_joined_tables_at_the_time_of_the_use(tmp_path: Path) -> None:
    secrets = await create_users(tmp_path, ROLES)
    async with run_server(tmp_path, auth="token") as server:
        root, rita, rex = await open_star(server, secrets)
        nested_join = {"table": ["db", "nation"], "on": {"f_supplier": "n_key"}}
        nested_join["joins"] = [
            {"table": ["secret", "supplier"], "on": {"n_key": "s_nation"}, "predicate": "s_key < 40"}
        ]
        names = []
        for joins in ([JOIN], [nested_join]):
            plan = await rex("POST", "/api/v1/tables/db/fact/plan-tables", {"joins": joins})
            assert plan.json["files"] < 20, plan.raw
            names.append(plan.json["name"])
        for name in names:
            assert set((await use_plan_table(root, name)).values()) <= {200, 204}
            assert set((await use_plan_table(rex, name)).values()) <= {200, 204}
            assert set((await use_plan_table(rita, name)).values()) == {404}
        # The message does not show that the plan exists.
        unknown_name = names[0][:-1] + ("0" if names[0][-1] != "0" else "1")
        (refused, missing) = [
            (await rita("GET", f"/v1/namespaces/db/tables/{name}")) for name in (names[0], unknown_name)
        ]
        assert refused.error == (*missing.error[:2], missing.error[2].replace(unknown_name, names[0]))
        # If a user may read all tables of a plan, the user may use the plan.
        own_plan = await rita("POST", "/api/v1/tables/db/fact/plan-tables", {"predicate": "f_key < 50"})
        assert set((await use_plan_table(rita, own_plan.json["name"])).values()) <= {200, 204}

        grant = {"principal": "rex", "role": "reader", "namespace": "secret"}
        assert (await root("DELETE", f"/api/v1/grants?{urlencode(grant)}")).status == 204
        assert set((await use_plan_table(rex, names[0])).values()) == {404}
        assert (await root("PUT", "/api/v1/grants", {**grant, "namespace": ["secret"]})).status == 204
        assert (await rex("GET", f"/v1/namespaces/db/tables/{names[0]}")).status == 200
        rename = {"source": {"namespace": ["secret"], "name": "supplier"}}
        rename["destination"] = {"namespace": ["secret"], "name": "former"}
        assert (await root("POST", "/v1/tables/rename", rename)).status == 204
        assert (await rex("GET", f"/v1/namespaces/db/tables/{names[0]}")).status == 404


async def test_plan_snapshots_are_shown_only_with_the_rights_on_their_joined_tables(tmp_path: Path) -> None:
    secrets = await create_users(tmp_path, ROLES)
    async with run_server(tmp_path, auth="token") as server:
        root, rita, rex = await open_star(server, secrets)
        body = {"joins": [JOIN], "holder": "proxy"}
        plan = await rex("POST", "/api/v1/tables/db/fact/plan-tables", body, headers=PLANS_HEADER)
        plan_id = plan.json["plan-snapshot-id"]
        own_plan = await rita(
            "POST", "/api/v1/tables/db/fact/plan-tables", {"predicate": "f_key < 50"}, headers=PLANS_HEADER
        )
        own_plan_id = own_plan.json["plan-snapshot-id"]

        async def list_shown_plans(caller: UserApi) -> set[int]:
            answer = await caller("GET", FACT, headers=PLANS_HEADER)
            return {snapshot["snapshot-id"] for snapshot in answer.json["metadata"]["snapshots"]} - {1}

        assert await list_shown_plans(rex) == await list_shown_plans(root) == {plan_id, own_plan_id}
        assert await list_shown_plans(rita) == {own_plan_id}
        etag = (await rex("GET", FACT, headers=PLANS_HEADER)).headers["ETag"]
        answer = await rita("GET", FACT, headers={**PLANS_HEADER, "If-None-Match": etag})
        assert answer.status == 200


async def test_page_of_a_plan_by_an_attribute_requires_the_right_on_the_dimension_table(tmp_path: Path) -> None:
    secrets = await create_users(tmp_path, ROLES)
    async with run_server(tmp_path, auth="token", plan_inline_limit=2, plan_page_size=4) as server:
        root, rita, rex = await open_star(server, secrets)
        body = {"kind": "bitmap", "columns": ["lookup[secret.supplier@1:1:2:string](f_supplier)"]}
        assert (await root("PUT", "/api/v1/tables/db/fact/indexes/region", body)).status == 200
        filter = {"type": "eq", "term": "region", "value": "ASIA"}
        plan = await rex("POST", f"{FACT}/plan", {"filter": filter})
        token = plan.json["plan-tasks"][0]
        assert (await rex("POST", f"{FACT}/tasks", {"plan-task": token})).status == 200
        assert (await rita("POST", f"{FACT}/tasks", {"plan-task": token})).error[0] == 403
        grant = {"principal": "rex", "role": "reader", "namespace": "secret"}
        assert (await root("DELETE", f"/api/v1/grants?{urlencode(grant)}")).status == 204
        assert (await rex("POST", f"{FACT}/tasks", {"plan-task": token})).error[0] == 403
