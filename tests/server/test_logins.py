"""Tests of logins in the middleware: which users get access, and what is recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace
from tests.server.rig import RunningServer, build_settings, run_server


@pytest.fixture
async def secrets(tmp_path: Path) -> dict[str, str]:
    """Return the token secrets of three users by name.

    The users are an admin of the catalog, a reader of `db`, and a user without any grant.
    """
    clock = SystemClock()
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        await store.transact([CreateNamespace(path=("db",), properties={})])
        return {
            "admin": await create_token(store, clock, "admin", ttl_s=None, grants=[Grant("admin", "admin")]),
            "reader": await create_token(
                store, clock, "reader", ttl_s=None, grants=[Grant("reader", "reader", ("db",))]
            ),
            "nobody": await create_token(store, clock, "nobody", ttl_s=None, grants=[]),
        }


@pytest.fixture
async def server(tmp_path: Path, secrets: dict[str, str]) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path, auth="token") as running_server:
        yield running_server


def build_bearer_header(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/api/v1/openapi.json"])
async def test_probes_and_the_openapi_document_need_no_login(server: RunningServer, path: str) -> None:
    status, _ = await server.get(path)
    assert status == 200


async def test_all_routes_except_probes_and_the_openapi_document_need_a_login(
    server: RunningServer, secrets: dict[str, str]
) -> None:
    cases: list[str] = ["/v1/config", "/v1/namespaces", "/api/v1/timeline", "/api/v1/dropped", "/metrics", "/x"]
    for path in cases:
        for headers in ({}, build_bearer_header("smk_wrong"), {"Authorization": "Basic eDp5"}):
            async with server.http.get(server.url + path, headers=headers) as answer:
                assert answer.status == 401, path
                assert answer.headers["WWW-Authenticate"].startswith("Bearer"), path
                assert (await answer.json())["error"]["type"] == "NotAuthorizedException", path
        async with server.http.get(server.url + path, headers=build_bearer_header(secrets["admin"])) as answer:
            assert answer.status == (404 if path == "/x" else 200), path


async def test_routes_outside_the_standard_require_a_role(server: RunningServer, secrets: dict[str, str]) -> None:
    await server.record("t")
    cases: list[tuple[str, str, str, int]] = [
        ("reader", "GET", "/v1/config", 200),
        ("reader", "GET", "/metrics", 200),
        ("reader", "GET", "/api/v1/tables/db/t/timeline", 200),
        ("reader", "GET", "/api/v1/dropped?namespace=db", 200),
        ("reader", "GET", "/api/v1/timeline", 403),
        ("reader", "GET", "/api/v1/dropped", 403),
        ("reader", "GET", "/api/v1/dropped?namespace=other", 403),
        ("reader", "GET", "/api/v1/tables/other/t/timeline", 403),
        ("reader", "GET", "/api/v1/tables/other/t/metrics", 403),
        ("nobody", "GET", "/api/v1/tables/db/t/timeline", 403),
        ("admin", "GET", "/api/v1/timeline", 200),
    ]
    for principal, method, path, status in cases:
        async with server.http.request(
            method, server.url + path, headers=build_bearer_header(secrets[principal])
        ) as answer:
            assert answer.status == status, await answer.text()


async def test_changes_and_refused_requests_are_audited_with_their_principal(
    server: RunningServer, secrets: dict[str, str]
) -> None:
    async def post(user: str) -> aiohttp.ClientResponse:
        body = {"namespace": ["made"], "properties": {}}
        headers = {**build_bearer_header(secrets[user]), "X-Request-Id": f"by-{user}"}
        return await server.http.post(f"{server.url}/v1/namespaces", json=body, headers=headers)

    for principal in ("reader", "admin"):
        (await post(principal)).close()
    await server.get("/v1/namespaces", headers=build_bearer_header(secrets["admin"]))  # A read is not audited.
    await server.get("/v1/namespaces")  # A refused request is audited.
    await server.get("/nothing/here")
    await server.components.audit.flush()
    records = await server.components.store.read_audit_records(after_id=None, limit=100)
    assert [(record.principal_name, record.action, record.outcome, record.status) for record in records] == [
        ("reader", "createNamespace", "denied", 403),
        ("admin", "createNamespace", "allowed", 200),
        ("anonymous", "listNamespaces", "denied", 401),
    ]
    assert [record.request_id for record in records[:2]] == ["by-reader", "by-admin"]
    assert records[0].resource == "/v1/namespaces"
    assert records[0].remote == "127.0.0.1"


async def test_foreign_web_page_cannot_use_a_server_without_logins(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            status, _ = await server.get("/v1/namespaces", headers=headers)
            assert status == 403
        status, _ = await server.get("/v1/namespaces", headers={"Origin": server.url})
        assert status == 200


async def test_server_that_requires_tokens_does_not_start_without_any(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seamark token create"):
        async with run_server(tmp_path, auth="token"):
            raise AssertionError("the server started without a token")
