"""Tests of privileges over HTTP: on tables and views, denials, roles from the operator, owners, and plans."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import SaveGrant
from tests.api.client import SCHEMA, VIEW_VERSION, Api, build_property_commit
from tests.api.rest.test_permissions import UsersApi
from tests.server.rig import run_server

GRANTS = (
    Grant("root", "admin"),
    Grant("lister", "browse", ("db",)),
    Grant("planner", "plan", ("db",)),
    Grant("reader", "read", ("db",)),
    Grant("keeper", "maintain", ("db",)),
    Grant("writer", "write", ("db",)),
    Grant("maker", "create", ("db",)),
    Grant("dropper", "drop", ("db",)),
    Grant("steward", "manage-grants", ("db",)),
    Grant("guest", "read", ("db",), "table", "t"),
    Grant("barred", "writer", ("db",)),
    Grant("barred", "browse", ("db",), "table", "t", deny=True),
    Grant("analyst", "role:analysts"),
    Grant("role:analysts", "read", ("db",), "table", "t"),
)
TABLE = "/v1/namespaces/db/tables/t"
OPERATIONS: dict[str, tuple[str, str, Any]] = {
    "load": ("GET", TABLE, None),
    "probe": ("HEAD", TABLE, None),
    "plan": ("POST", f"{TABLE}/plan", {}),
    "credentials": ("GET", f"{TABLE}/credentials", None),
    "policy": ("PUT", "/api/v1/tables/db/t/policy", {"properties": {}}),
    "commit": ("POST", TABLE, build_property_commit(x="1")),
    "create": ("POST", "/v1/namespaces/db/tables", {"name": "t", "schema": SCHEMA}),
    "grant": (
        "PUT",
        "/api/v1/grants",
        {"principal": "nobody", "privilege": "browse", "namespace": ["db"], "table": "t", "deny": True},
    ),
    "drop": ("DELETE", TABLE, None),
}
ALLOWED_OPERATIONS = {
    "lister": {"load", "probe"},
    "planner": {"load", "probe", "plan"},
    "reader": {"load", "probe", "plan", "credentials"},
    "guest": {"load", "probe", "plan", "credentials"},
    "analyst": {"load", "probe", "plan", "credentials"},
    "keeper": {"load", "probe", "plan", "policy"},
    "writer": {"load", "probe", "plan", "credentials", "policy", "commit"},
    "maker": {"load", "probe", "create"},
    "steward": {"load", "probe", "grant"},
    "dropper": {"load", "probe", "drop"},
    "barred": set(),
    "nobody": set(),
}


@pytest.fixture
async def users_api(tmp_path: Path) -> AsyncIterator[UsersApi]:
    secrets, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("root", *ALLOWED_OPERATIONS):
            secrets[name] = await create_token(store, clock, name, None, None)
        await store.transact([SaveGrant(grant) for grant in GRANTS])
    async with run_server(tmp_path, auth="token") as server:
        users_api = UsersApi(Api(server), secrets)
        view = {"name": "v", "schema": SCHEMA, "view-version": VIEW_VERSION}
        assert (await users_api("root", "POST", "/v1/namespaces/db/views", view)).status == 200
        for name in ("t", "u"):
            body = {"name": name, "schema": SCHEMA}
            assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200
        yield users_api


async def list_names(users_api: UsersApi, principal: str, kind: str = "tables") -> list[str]:
    answer = await users_api(principal, "GET", f"/v1/namespaces/db/{kind}")
    assert answer.status == 200, answer.raw
    return [identifier["name"] for identifier in answer.json["identifiers"]]


async def test_each_operation_needs_its_privilege(users_api: UsersApi) -> None:
    for operation, (method, path, body) in OPERATIONS.items():
        # The principals that may use the operation are last, because a drop succeeds only once.
        principals = sorted(ALLOWED_OPERATIONS, key=lambda name: operation in ALLOWED_OPERATIONS[name])
        for principal in principals:
            status = (await users_api(principal, method, path, body)).status
            # A denial hides the table `t` from `barred`. To create a table or grant needs no existing table.
            is_hidden = principal == "barred" and operation not in ("create", "grant")
            refused_status = 404 if is_hidden else 403
            case = (principal, operation, status)
            if operation in ALLOWED_OPERATIONS[principal]:
                assert status in (200, 204, 409), case
            else:
                assert status == refused_status, case


async def test_hidden_table_is_left_out_of_listings_and_is_not_found(users_api: UsersApi) -> None:
    assert await list_names(users_api, "barred") == ["u"]
    assert await list_names(users_api, "guest") == ["t"]
    assert await list_names(users_api, "guest", "views") == []
    assert await list_names(users_api, "lister") == ["t", "u"]
    for name in ("u", "none"):
        answer = await users_api("guest", "GET", f"/v1/namespaces/db/tables/{name}")
        assert answer.error == (404, "NoSuchTableException", f"Table does not exist: db.{name}")
    assert (await users_api("guest", "GET", "/v1/namespaces/db/views/v")).error[:2] == (404, "NoSuchViewException")
    assert (await users_api("guest", "GET", "/v1/namespaces")).json["namespaces"] == [["db"]]
    for path in ("/api/v1/timeline", "/api/v1/tables/db/t/timeline"):
        assert (await users_api("barred", "GET", path)).status in (403, 404)
    await users_api("root", "PUT", "/api/v1/grants", {"principal": "barred", "privilege": "browse"})
    instants = (await users_api("barred", "GET", "/api/v1/timeline")).json["instants"]
    assert {instant["name"] for instant in instants} == {"u", "v"}


async def test_plan_without_the_privilege_to_read_has_neither_keys_nor_signatures(tmp_path: Path) -> None:
    secrets, clock = {}, SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        for name in ("root", "planner", "reader", "lister"):
            grants = [grant for grant in GRANTS if grant.principal == name]
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=grants)
    storage: dict[str, Any] = {"warehouse": "s3://lake/wh", "s3_folder": str(tmp_path / "objects")}
    async with run_server(tmp_path, auth="token", s3_client_access="gateway", gateway_port=1, **storage) as server:
        users_api = UsersApi(Api(server), secrets)
        body = {"name": "t", "schema": SCHEMA}
        assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200
        etags = {}
        for principal, has_keys in (("reader", True), ("planner", False), ("lister", False)):
            loaded_answer = await users_api(principal, "GET", TABLE)
            assert ("s3.secret-access-key" in loaded_answer.json["config"]) is has_keys
            assert ("storage-credentials" in loaded_answer.json) is has_keys
            etags[principal] = loaded_answer.headers["ETag"]
            status = 200 if has_keys else 403
            assert (await users_api(principal, "GET", f"{TABLE}/credentials")).status == status
            sign_request = {"region": "r", "uri": "http://s3/lake/wh/db/t/x", "method": "GET", "headers": {}}
            assert ((await users_api(principal, "POST", f"{TABLE}/sign", sign_request)).status == 403) is not has_keys
        reused_answer = await users_api("planner", "GET", TABLE, headers={"If-None-Match": etags["reader"]})
        assert reused_answer.status == 200
        # A principal never gets the cached answer to another principal's request.
        for principal in ("planner", "reader", "planner"):
            plan = await users_api(principal, "POST", f"{TABLE}/plan", {})
            assert plan.json["status"] == "completed"
            assert "storage-credentials" not in plan.json


async def test_creator_owns_its_table_until_it_is_dropped(users_api: UsersApi) -> None:
    body = {"name": "mine", "schema": SCHEMA}
    assert (await users_api("maker", "POST", "/v1/namespaces/db/tables", body)).status == 200
    own_table = "/v1/namespaces/db/tables/mine"
    assert (await users_api("maker", "POST", own_table, build_property_commit(x="1"))).status == 200
    grant_to_guest = {"principal": "guest", "privilege": "read", "namespace": ["db"], "table": "mine"}
    assert (await users_api("maker", "PUT", "/api/v1/grants", grant_to_guest)).status == 204
    assert await list_names(users_api, "guest") == ["mine", "t"]
    for other_name in ("t", "u"):
        assert (
            await users_api("maker", "POST", f"/v1/namespaces/db/tables/{other_name}", build_property_commit(x="1"))
        ).status == 403
    assert (await users_api("maker", "DELETE", own_table)).status == 204
    assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200
    assert (await users_api("maker", "POST", own_table, build_property_commit(x="2"))).status == 403
    assert (await users_api("guest", "GET", own_table)).status == 404


async def test_commit_that_creates_a_table_needs_the_privilege_to_create(users_api: UsersApi) -> None:
    denial = {"principal": "barred", "privilege": "create", "namespace": ["db"], "deny": True}
    assert (await users_api("root", "PUT", "/api/v1/grants", denial)).status == 204
    commit = {"requirements": [{"type": "assert-create"}], "updates": []}
    change = {"identifier": {"namespace": ["db"], "name": "new"}, **commit}
    routes = (("/v1/namespaces/db/tables/new", commit), ("/v1/transactions/commit", {"table-changes": [change]}))
    for path, body in routes:
        for principal in ("writer", "barred"):
            answer = await users_api(principal, "POST", path, body)
            assert answer.status == 403, answer.raw
            assert "may not createTable" in answer.error[2]
        assert (await users_api("root", "POST", path, body)).status != 403


async def test_creator_without_the_right_to_read_cannot_take_over_the_files_of_a_dropped_table(
    users_api: UsersApi,
) -> None:
    for privilege in ("create", "drop"):
        grant = {"principal": "nobody", "privilege": privilege, "namespace": ["db"]}
        assert (await users_api("root", "PUT", "/api/v1/grants", grant)).status == 204
    for name, principal in (("t", "barred"), ("u", "nobody")):
        table = f"/v1/namespaces/db/tables/{name}"
        location = (await users_api("root", "GET", table)).json["metadata"]["location"]
        drop_request = ("POST", f"{table}/unregister") if name == "u" else ("DELETE", table)
        assert (await users_api("root" if name == "t" else principal, *drop_request)).status in (200, 204)
        body = {"name": name, "schema": SCHEMA, "location": location}
        for is_staged in (False, True):
            # The table has another name, because a grant denies the name t to barred.
            body_of_creator = {**body, "name": f"new_{name}", "stage-create": is_staged}
            answer = await users_api(principal, "POST", "/v1/namespaces/db/tables", body_of_creator)
            assert answer.status == 400, answer.raw
            assert "overlaps" in answer.error[2]
        assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200


async def test_rights_follow_a_table_through_renames_and_undrops(users_api: UsersApi) -> None:
    rename = {"source": {"namespace": ["db"], "name": "t"}, "destination": {"namespace": ["db"], "name": "moved"}}
    for principal in ("dropper", "maker", "guest"):
        assert (await users_api(principal, "POST", "/v1/tables/rename", rename)).status == 403
    assert (await users_api("root", "POST", "/v1/tables/rename", rename)).status == 204
    assert (await users_api("guest", "GET", "/v1/namespaces/db/tables/moved")).status == 200
    assert (await users_api("guest", "GET", TABLE)).status == 404
    assert (await users_api("barred", "GET", "/v1/namespaces/db/tables/moved")).status == 404
    assert (await users_api("root", "DELETE", "/v1/namespaces/db/tables/moved")).status == 204
    stored_grants = await users_api.api.server.components.store.grants(None)
    assert {(grant.principal, grant.name) for grant in stored_grants if grant.name} == {
        ("barred", "t"),
        ("barred", "moved"),
    }
    dropped_id = (await users_api("root", "GET", "/api/v1/dropped?namespace=db")).json["dropped"][0]["id"]
    assert (await users_api("root", "POST", f"/api/v1/dropped/{dropped_id}/undrop", {"name": "back"})).status == 200
    assert (await users_api("guest", "GET", "/v1/namespaces/db/tables/back")).status == 200
    assert (await users_api("barred", "GET", "/v1/namespaces/db/tables/back")).status == 404
    for name in ("t", "moved"):  # A denial also applies to later tables with this name.
        body = {"name": name, "schema": SCHEMA}
        assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200
        assert (await users_api("barred", "GET", f"/v1/namespaces/db/tables/{name}")).status == 404
        assert (await users_api("guest", "GET", f"/v1/namespaces/db/tables/{name}")).status == 404


async def test_only_an_admin_of_the_server_changes_the_members_of_a_role(users_api: UsersApi) -> None:
    membership = {"principal": "guest", "role": "role:analysts"}
    catalog_grant = {"principal": "steward", "privilege": "manage-grants"}
    assert (await users_api("root", "PUT", "/api/v1/grants", catalog_grant)).status == 204
    assert (await users_api("steward", "PUT", "/api/v1/grants", membership)).status == 403
    assert (await users_api("steward", "PUT", "/api/v1/grants", {**catalog_grant, "server": True})).status == 403
    assert (await users_api("root", "PUT", "/api/v1/grants", membership)).status == 204
    assert (await users_api("root", "DELETE", "/api/v1/grants?principal=analyst&role=role:analysts")).status == 204
    assert (await users_api("analyst", "GET", TABLE)).status == 403
    role_membership = {"principal": "role:analysts", "role": "role:everyone"}
    assert (await users_api("root", "PUT", "/api/v1/grants", role_membership)).status == 204
    reverse_membership = {"principal": "role:everyone", "role": "role:analysts"}
    assert (await users_api("root", "PUT", "/api/v1/grants", reverse_membership)).status == 204
    grant_to_everyone = {"principal": "role:everyone", "privilege": "browse", "namespace": ["db"]}
    assert (await users_api("root", "PUT", "/api/v1/grants", grant_to_everyone)).status == 204
    assert await list_names(users_api, "guest") == ["t", "u"]


async def test_manager_of_the_grants_of_the_catalog_cannot_become_an_admin_of_the_server(users_api: UsersApi) -> None:
    catalog_grant = {"principal": "steward", "privilege": "manage-grants"}
    assert (await users_api("root", "PUT", "/api/v1/grants", catalog_grant)).status == 204
    admin_grant = {"principal": "steward", "role": "admin"}
    assert (await users_api("steward", "PUT", "/api/v1/grants", admin_grant)).status == 403
    assert (await users_api("steward", "DELETE", "/api/v1/grants?principal=root&role=admin")).status == 403
    assert (await users_api("steward", "PUT", "/api/v1/grants", {**admin_grant, "namespace": ["db"]})).status == 204
    assert (await users_api("steward", "PUT", "/api/v1/grants", {**admin_grant, "role": "owner"})).status == 204
    token = {"name": "other", "grants": [{"role": "admin"}]}
    assert (await users_api("steward", "POST", "/api/v1/tokens", token)).status == 403
    # A denial on the catalog also applies to an admin of the server.
    for grant in (admin_grant, {**catalog_grant, "deny": True}):
        assert (await users_api("root", "PUT", "/api/v1/grants", grant)).status == 204
    assert (await users_api("steward", "POST", "/api/v1/tokens", token)).status == 403


async def test_manager_of_grants_on_one_object_cannot_remove_rights_of_admins_above_the_object(
    users_api: UsersApi,
) -> None:
    assert (await users_api("maker", "POST", "/v1/namespaces/db/tables", {"name": "m", "schema": SCHEMA})).status == 200
    location = (await users_api("root", "GET", TABLE)).json["metadata-location"]
    assert (await users_api("root", "POST", f"{TABLE}/unregister", {})).status == 200
    denials: list[dict[str, Any]] = [
        {"principal": principal, "privilege": privilege, "namespace": ["db"], "table": "m", "deny": True}
        for principal in ("root", "role:admins", "writer")
        for privilege in ("write", "manage-grants")
    ]
    for denial in denials:
        assert (await users_api("maker", "PUT", "/api/v1/grants", denial)).error[0] == 403, (
            "only the owner of the table may deny a privilege on it"
        )
        assert (await users_api("steward", "PUT", "/api/v1/grants", denial)).status == 204
    own_denial = {"principal": "maker", "privilege": "drop", "namespace": ["db"], "table": "m", "deny": True}
    assert (await users_api("maker", "PUT", "/api/v1/grants", own_denial)).status == 204
    table = "/v1/namespaces/db/tables/m"
    assert (await users_api("root", "POST", table, build_property_commit(x="1"))).status == 403
    assert (await users_api("root", "GET", "/api/v1/audit?pageSize=1")).status == 200
    register_request = {"name": "t", "metadata-location": location}
    assert (await users_api("root", "POST", "/v1/namespaces/db/register", register_request)).status == 200
    listed_grants = (await users_api("root", "GET", "/api/v1/grants?principal=root")).json["grants"]
    assert {grant["privilege"] for grant in listed_grants if grant.get("deny")} == {"write", "manage-grants"}
    for privilege in ("write", "manage-grants"):
        query = f"principal=root&privilege={privilege}&namespace=db&table=m&deny=true"
        assert (await users_api("lister", "DELETE", f"/api/v1/grants?{query}")).status == 403
        assert (await users_api("root", "DELETE", f"/api/v1/grants?{query}")).status == 204
    assert (await users_api("root", "POST", table, build_property_commit(x="1"))).status == 200


async def test_rights_on_a_dropped_namespace_do_not_apply_to_a_new_namespace_with_its_name(users_api: UsersApi) -> None:
    assert (await users_api("maker", "POST", "/v1/namespaces", {"namespace": ["db", "fin"]})).status == 200
    admin = {"principal": "maker", "role": "admin", "namespace": ["db", "fin"]}
    for grant in (admin, {**admin, "principal": "guest"}):
        assert (await users_api("maker", "PUT", "/api/v1/grants", grant)).status == 204
    assert (await users_api("maker", "DELETE", "/v1/namespaces/db%1Ffin")).status == 204
    assert (await users_api("root", "POST", "/v1/namespaces", {"namespace": ["db", "fin"]})).status == 200
    tables = "/v1/namespaces/db%1Ffin/tables"
    assert (await users_api("root", "POST", tables, {"name": "pay", "schema": SCHEMA})).status == 200
    for principal in ("maker", "guest"):
        assert (await users_api(principal, "GET", f"{tables}/pay/credentials")).status in (403, 404)
        assert (await users_api(principal, "DELETE", f"{tables}/pay")).status in (403, 404)


async def test_manager_of_one_namespace_adds_a_limited_number_of_grants_on_existing_objects(
    users_api: UsersApi,
) -> None:
    missing_grant = {"principal": "nobody", "privilege": "browse", "namespace": ["db"], "table": "none"}
    assert (await users_api("steward", "PUT", "/api/v1/grants", missing_grant)).error[:2] == (
        404,
        "NoSuchTableException",
    )
    store = users_api.api.server.components.store
    # The limit is 500 grants of one principal in a namespace, and 1,000 grants on one table.
    await store.transact([SaveGrant(Grant("nobody", "read", ("db",), "table", f"x{n}", deny=True)) for n in range(499)])
    # With 980 grants, the table is below its limit. So only the limit of the principal can refuse a grant.
    await store.transact([SaveGrant(Grant(f"n{n}", "read", ("db",), "table", "t")) for n in range(980)])
    allowed_grant = {"principal": "nobody", "privilege": "read", "namespace": ["db"], "table": "u"}
    for _ in range(2):  # The second request repeats the 500th grant, so it adds none.
        assert (await users_api("steward", "PUT", "/api/v1/grants", allowed_grant)).status == 204
    refusal = await users_api("steward", "PUT", "/api/v1/grants", {**allowed_grant, "privilege": "plan"})
    assert refusal.error[0] == 400
    assert "500 grants of nobody in namespace db" in refusal.error[2]
    assert (await users_api("root", "PUT", "/api/v1/grants", {**allowed_grant, "privilege": "plan"})).status == 204
    assert (await users_api("root", "PUT", "/api/v1/grants", missing_grant)).status == 204
    listed_grants: list[Any] = []
    for principal in ("root", "nobody"):
        listed_grants, token = [], ""
        while token is not None:
            page = (await users_api(principal, "GET", f"/api/v1/grants?pageSize=400&pageToken={token}")).json
            listed_grants += page["grants"]
            token = page["next-page-token"]
            assert len(page["grants"]) <= 400
        stored_grants = [grant for grant in await store.grants(None) if principal in ("root", grant.principal)]
        assert len(listed_grants) == len(stored_grants)
        assert {(grant["principal"], grant.get("table", "")) for grant in listed_grants} == {
            (grant.principal, grant.name if grant.kind == "table" else "") for grant in stored_grants
        }


async def test_name_that_is_denied_cannot_be_given_whether_it_exists_or_not(users_api: UsersApi) -> None:
    assert (await users_api("root", "DELETE", "/v1/namespaces/db/views/v")).status == 204
    dropped_id = (await users_api("root", "GET", "/api/v1/dropped?namespace=db")).json["dropped"][0]["id"]
    location = (await users_api("root", "GET", "/v1/namespaces/db/tables/u")).json["metadata-location"]
    store = users_api.api.server.components.store
    denied_privileges_and_names = (("browse", "none"), ("create", "later"))
    denials = [
        Grant("barred", privilege, ("db",), "table", name, deny=True) for privilege, name in denied_privileges_and_names
    ]
    await store.transact([SaveGrant(Grant("barred", "writer")), *map(SaveGrant, denials)])
    commit = {"requirements": [{"type": "assert-create"}], "updates": []}
    identifiers = {"source": {"namespace": ["db"], "name": "u"}}
    view = {"schema": SCHEMA, "view-version": VIEW_VERSION}
    for name in ("t", "none", "later"):  # Only the table t exists.
        change = {"identifier": {"namespace": ["db"], "name": name}, **commit}
        requests: list[tuple[str, Any]] = [
            ("/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA}),
            ("/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA, "stage-create": True}),
            ("/v1/namespaces/db/views", {"name": name, **view}),
            ("/v1/tables/rename", {**identifiers, "destination": {"namespace": ["db"], "name": name}}),
            ("/v1/namespaces/db/register", {"name": name, "metadata-location": location}),
            ("/v1/namespaces/db/register", {"name": name, "metadata-location": location, "overwrite": True}),
            ("/v1/namespaces/db/register-view", {"name": name, "metadata-location": location}),
            (f"/api/v1/dropped/{dropped_id}/undrop", {"name": name}),
            ("/v1/transactions/commit", {"table-changes": [change]}),
        ]
        for path, body in requests:
            answer = await users_api("barred", "POST", path, body)
            # `barred` may not browse t and none, so a commit does not find them. It may browse later, but not create
            # it.
            if path.endswith("commit") and name != "later":
                assert answer.error[0] == 404, (name, path)
            else:
                assert answer.error[:2] == (403, "ForbiddenException"), (name, path, answer.raw)
                assert "exist" not in answer.error[2], (name, path)
    body = {"name": "free", "schema": SCHEMA}
    assert (await users_api("barred", "POST", "/v1/namespaces/db/tables", body)).status == 200


async def test_registration_over_a_table_needs_the_right_to_drop_it(users_api: UsersApi) -> None:
    store = users_api.api.server.components.store
    metadata_locations = {}
    for name in ("src", "old"):
        created_answer = await users_api("root", "POST", "/v1/namespaces/db/tables", {"name": name, "schema": SCHEMA})
        metadata_locations[name] = created_answer.json["metadata-location"]
    assert (await users_api("root", "POST", "/v1/namespaces/db/tables/src/unregister", {})).status == 200
    grants = [Grant("nobody", privilege) for privilege in ("create", "write")]
    await store.transact([SaveGrant(grant) for grant in grants])
    body = {"name": "old", "metadata-location": metadata_locations["old"], "overwrite": True}
    assert (await users_api("nobody", "POST", "/v1/namespaces/db/register", body)).status == 200
    other_body = {**body, "metadata-location": metadata_locations["src"]}
    answer = await users_api("nobody", "POST", "/v1/namespaces/db/register", other_body)
    assert answer.error[:2] == (403, "ForbiddenException")
    assert "may not dropTable" in answer.error[2]
    await store.transact([SaveGrant(Grant("nobody", "drop", ("db",), "table", "old"))])
    assert (await users_api("nobody", "POST", "/v1/namespaces/db/register", other_body)).status == 200


async def test_denial_in_one_namespace_confines_registrations_in_other_namespaces(users_api: UsersApi) -> None:
    store = users_api.api.server.components.store
    await store.transact([SaveGrant(Grant("writer", "writer"))])
    metadata_locations = {}
    for namespace in ("db", "other"):
        await users_api("root", "POST", "/v1/namespaces", {"namespace": [namespace]})
        tables = f"/v1/namespaces/{namespace}/tables"
        created_answer = await users_api("root", "POST", tables, {"name": "r", "schema": SCHEMA})
        metadata_locations[namespace] = created_answer.json["metadata-location"]
        assert (await users_api("root", "POST", f"{tables}/r/unregister", {})).status == 200
    denial = {"principal": "writer", "privilege": "browse", "namespace": ["db"], "table": "u", "deny": True}
    assert (await users_api("steward", "PUT", "/api/v1/grants", denial)).status == 204
    for namespace, source_namespace, status in (("db", "db", 403), ("other", "db", 403), ("other", "other", 200)):
        register_request = {"name": "r", "metadata-location": metadata_locations[source_namespace]}
        answer = await users_api("writer", "POST", f"/v1/namespaces/{namespace}/register", register_request)
        assert answer.status == status, (namespace, source_namespace, answer.raw)


async def test_contradictory_grant_is_rejected(users_api: UsersApi) -> None:
    grants: list[dict[str, Any]] = [
        {"role": "reader", "privilege": "read"},
        {},
        {"privilege": "reader"},
        {"role": "read"},
        {"role": "reader", "deny": True},
        {"privilege": "read", "table": "t"},
        {"privilege": "read", "namespace": ["db"], "table": "t", "view": "v"},
        {"privilege": "read", "namespace": ["db"], "server": True},
        {"role": "role:", "namespace": []},
        {"role": "role:analysts", "namespace": ["db"]},
        {"role": "role:analysts", "deny": True},
    ]
    for grant in grants:
        answer = await users_api("root", "PUT", "/api/v1/grants", {"principal": "ann", **grant})
        assert answer.error[0] == 400, grant
