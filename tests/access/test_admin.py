"""Tests of administration over HTTP: tokens, grants and the audit log, and who may use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.api.client import Answer, Api
from tests.api.plans.planned import append_files, build_data_file
from tests.server.rig import RunningServer, build_settings, run_server


class AdminServer:
    def __init__(self, server: RunningServer, secrets: dict[str, str]) -> None:
        self.server = server
        self.secrets = secrets

    async def call(self, principal: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a request, and return (status, JSON or None).

        Args:
            principal: A name in `secrets`, whose token is sent, or a token itself.
        """
        secret = self.secrets.get(principal, principal)
        async with self.server.http.request(
            method, self.server.url + path, json=body, headers={"Authorization": f"Bearer {secret}"}
        ) as answer:
            return answer.status, await answer.json() if await answer.read() else None


@pytest.fixture
async def admin_server(tmp_path: Path) -> AsyncIterator[AdminServer]:
    """Open a server with three principals.

    The principal root is an admin of the catalog, ns an admin of namespace `a`, and bob a writer of the catalog.
    """
    clock, secrets = SystemClock(), {}
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        for name, grant in (("root", Grant("root", "admin")), ("ns", Grant("ns", "admin", ("a",)))):
            secrets[name] = await create_token(store, clock, name, ttl_s=None, grants=[grant])
        secrets["bob"] = await create_token(store, clock, "bob", ttl_s=None, grants=[Grant("bob", "writer")])
    async with run_server(tmp_path, auth="token", page_limit=100) as server:
        yield AdminServer(server, secrets)


async def test_token_is_created_used_listed_and_revoked(admin_server: AdminServer) -> None:
    body = {"name": "new", "expires-in-s": 60, "grants": [{"role": "reader", "namespace": ["db"]}]}
    status, answer = await admin_server.call("root", "POST", "/api/v1/tokens", body)
    assert status == 201
    assert answer["name"] == "new"
    assert (await admin_server.call(answer["token"], "GET", "/v1/namespaces/db"))[0] == 200
    _, listing = await admin_server.call("root", "GET", "/api/v1/tokens")
    [shown_token] = [token for token in listing["tokens"] if token["name"] == "new"]
    assert shown_token["live"] is True
    assert shown_token["expires-ms"] == shown_token["created-ms"] + 60_000
    assert set(shown_token) == {"id", "name", "live", "created-ms", "expires-ms", "revoked-ms"}
    assert (await admin_server.call("root", "POST", "/api/v1/tokens", body))[0] == 409
    assert (await admin_server.call("root", "DELETE", "/api/v1/tokens/new"))[0] == 204
    assert (await admin_server.call(answer["token"], "GET", "/v1/namespaces/db"))[0] == 401
    assert (await admin_server.call("root", "DELETE", "/api/v1/tokens/new"))[0] == 404
    _, listing = await admin_server.call("root", "GET", "/api/v1/tokens")
    [shown_token] = [token for token in listing["tokens"] if token["name"] == "new"]
    assert shown_token["live"] is False


async def test_pages_of_listings_have_every_item_once(admin_server: AdminServer) -> None:
    for number in range(4):
        await admin_server.call(
            "root", "POST", "/api/v1/tokens", {"name": f"t{number}", "grants": [{"role": "reader"}]}
        )
    await admin_server.server.components.audit.flush()
    # The fixture has created three of the tokens and grants, without records in the audit log.
    for path, field, expected in (("tokens", "tokens", 7), ("grants", "grants", 7), ("audit", "records", 4)):
        listed_items: list[Any] = []
        token: str | None = ""
        while token is not None:
            status, page = await admin_server.call("root", "GET", f"/api/v1/{path}?pageSize=3&pageToken={token}")
            assert status == 200
            assert len(page[field]) <= 3
            listed_items += page[field]
            token = page["next-page-token"]
        assert len(listed_items) == expected
        assert len({str(item) for item in listed_items}) == expected


async def test_grants_take_effect_with_the_next_request(admin_server: AdminServer) -> None:
    grant = {"principal": "bob", "role": "admin", "namespace": ["db", "x.y"]}
    for _ in range(2):
        assert (await admin_server.call("root", "PUT", "/api/v1/grants", grant))[0] == 204
    _, listing = await admin_server.call("bob", "GET", "/api/v1/grants?principal=bob")
    assert listing["grants"] == [{"principal": "bob", "role": "writer", "namespace": []}, grant]
    query = "principal=bob&role=admin&namespace=db%1Fx.y"
    assert (await admin_server.call("bob", "DELETE", f"/api/v1/grants?{query}"))[0] == 204
    assert (await admin_server.call("bob", "DELETE", f"/api/v1/grants?{query}"))[0] == 403
    assert (await admin_server.call("root", "DELETE", f"/api/v1/grants?{query}"))[0] == 404
    assert (await admin_server.call("bob", "GET", "/v1/namespaces/db"))[0] == 200
    assert (await admin_server.call("root", "DELETE", "/api/v1/grants?principal=bob&role=writer"))[0] == 204
    assert (await admin_server.call("bob", "GET", "/v1/namespaces/db"))[0] == 403


async def test_admin_of_a_namespace_adds_and_lists_grants_only_in_the_namespace(
    admin_server: AdminServer,
) -> None:
    async def put(namespace: list[str]) -> int:
        grant = {"principal": "oidc:eve", "role": "admin", "namespace": namespace}
        return (await admin_server.call("ns", "PUT", "/api/v1/grants", grant))[0]

    assert [await put(path) for path in (["a"], ["a", "b"], ["b"], [])] == [204, 204, 403, 403]
    _, listing = await admin_server.call("ns", "GET", "/api/v1/grants")
    assert [(grant["principal"], grant["namespace"]) for grant in listing["grants"]] == [
        ("ns", ["a"]),
        ("oidc:eve", ["a"]),
        ("oidc:eve", ["a", "b"]),
    ]
    _, listing = await admin_server.call("bob", "GET", "/api/v1/grants")
    assert [grant["principal"] for grant in listing["grants"]] == ["bob"]


@pytest.mark.parametrize("principal", ["ns", "bob"])
async def test_only_admins_of_the_catalog_use_tokens_and_the_audit_log(
    admin_server: AdminServer, principal: str
) -> None:
    for method, path in (
        ("GET", "/api/v1/tokens"),
        ("POST", "/api/v1/tokens"),
        ("DELETE", "/api/v1/tokens/root"),
        ("GET", "/api/v1/audit"),
    ):
        status, body = await admin_server.call(principal, method, path)
        assert (status, body["error"]["type"]) == (403, "ForbiddenException")
        assert f"{principal} may not" in body["error"]["message"]


async def test_audit_log_records_who_did_what(admin_server: AdminServer) -> None:
    await admin_server.call("bob", "GET", "/api/v1/tokens")
    await admin_server.call("root", "PUT", "/api/v1/grants", {"principal": "x", "role": "reader"})
    await admin_server.server.components.audit.flush()
    _, listing = await admin_server.call("root", "GET", "/api/v1/audit")
    assert [
        (record["who"], record["action"], record["outcome"], record["resource"]) for record in listing["records"]
    ] == [
        ("bob", "listTokens", "denied", "/api/v1/tokens"),
        ("root", "addGrant", "allowed", "/api/v1/grants"),
    ]


async def test_invalid_request_is_a_400_with_the_reason(admin_server: AdminServer) -> None:
    cases: list[tuple[str, str, Any]] = [
        ("POST", "/api/v1/tokens", None),
        ("POST", "/api/v1/tokens", []),
        ("POST", "/api/v1/tokens", {}),
        ("POST", "/api/v1/tokens", {"name": 7}),
        ("POST", "/api/v1/tokens", {"name": "a:b"}),
        ("POST", "/api/v1/tokens", {"name": "anonymous"}),
        ("POST", "/api/v1/tokens", {"name": "t", "expires-in-s": 0}),
        ("POST", "/api/v1/tokens", {"name": "t", "expires-in-s": 10**30}),
        ("POST", "/api/v1/tokens", {"name": "t", "expires-in-s": "1d"}),
        ("POST", "/api/v1/tokens", {"name": "t", "grants": [{"role": "root"}]}),
        ("POST", "/api/v1/tokens", {"name": "t", "grants": [{"role": "reader", "namespace": ["a"]}] * 1001}),
        ("POST", "/api/v1/tokens", {"name": "t", "grants": [{"role": "reader", "namespace": [""]}]}),
        ("POST", "/api/v1/tokens", {"name": "t", "grants": [{"role": "reader", "namespace": "a"}]}),
        ("POST", "/api/v1/tokens", {"name": "t", "grant": []}),
        ("PUT", "/api/v1/grants", None),
        ("PUT", "/api/v1/grants", {"principal": "A:b", "role": "reader"}),
        ("PUT", "/api/v1/grants", {"principal": "oidc:", "role": "reader"}),
        ("PUT", "/api/v1/grants", {"principal": "x", "role": "Reader"}),
        ("PUT", "/api/v1/grants", {"principal": "x", "role": "reader", "namespace": ["\x00"]}),
        ("DELETE", "/api/v1/grants", None),
        ("DELETE", "/api/v1/grants?principal=x", None),
        ("DELETE", "/api/v1/grants?principal=x&role=root", None),
        ("DELETE", "/api/v1/grants?principal=x&role=reader&namespace=%1F", None),
        ("GET", "/api/v1/grants?principal=%00", None),
        ("GET", "/api/v1/grants?pageSize=0", None),
        ("GET", "/api/v1/tokens?pageToken=!", None),
        ("GET", "/api/v1/audit?pageSize=-1", None),
        ("GET", "/api/v1/audit?pageToken=AA", None),
        ("DELETE", "/api/v1/tokens/%00", None),
    ]
    for method, path, body in cases:
        status, answer = await admin_server.call("root", method, path, body)
        assert status == 400, (path, body, answer)
        assert answer["error"]["message"], path


class AdminUserApi(Api):
    def __init__(self, admin_server: AdminServer, principal: str) -> None:
        super().__init__(admin_server.server)
        self.login = {"Authorization": f"Bearer {admin_server.secrets[principal]}"}

    async def __call__(self, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        headers = {**(options.pop("headers", None) or {}), **self.login}
        return await super().__call__(method, path, body, headers=headers, **options)


async def test_cached_view_counts_for_the_principal_that_first_requests_it(admin_server: AdminServer) -> None:
    """A view is the planner's decoded list of the files of a snapshot.

    The planner evicts the views of a principal that has more than half of the cache. Bob requests the view first.
    """
    root, bob = AdminUserApi(admin_server, "root"), AdminUserApi(admin_server, "bob")
    await root.create_table()
    await append_files(root, "t", [build_data_file("file:///t/data/0.parquet", low=0, high=9)], snapshot_id=1)
    for api in (bob, root):
        assert (await api("POST", "/v1/namespaces/db/tables/t/plan", {})).status == 200
    [view] = admin_server.server.components.planner._views._views.values()
    assert view.holder == "bob"
