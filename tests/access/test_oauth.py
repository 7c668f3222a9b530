"""Tests of the OAuth token endpoint on a real server, with the requests of existing clients."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import ForbiddenError, OAuthError

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token, revoke_token
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.access.issuer import AUDIENCE, get_rsa_key, run_issuer
from tests.server.rig import OffsetClock, RunningServer, build_settings, run_server

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"


@pytest.fixture
async def secrets(tmp_path: Path) -> dict[str, str]:
    clock = SystemClock()
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        return {
            name: await create_token(store, clock, name, None, [Grant(name, role)])
            for name, role in (("ann", "admin"), ("bob", "reader"))
        }


@pytest.fixture
async def server(tmp_path: Path, secrets: dict[str, str]) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path, auth="token", oauth_token_ttl_s=600) as running_server:
        yield running_server


def build_basic_header(credential: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(credential.encode()).decode()}


async def request_token(
    server: RunningServer, form: dict[str, str], headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    async with server.http.post(f"{server.url}/v1/oauth/tokens", data=form, headers=headers) as answer:
        assert answer.headers["Cache-Control"] == "no-store"
        assert (answer.status == 401) is ("WWW-Authenticate" in answer.headers)
        return answer.status, await answer.json()


async def find_principal(server: RunningServer, token: str) -> str | None:
    """Return the name of the principal that a token belongs to, or None if the server rejects the token."""
    headers = {"Authorization": f"Bearer {token}"}
    async with server.http.get(f"{server.url}/v1/config", headers=headers) as answer:
        if answer.status != 200:
            return None
    return (await server.components.authenticator.find_login(token)).principal.name


def make_scoped_exchange(subject: str, **options: str) -> dict[str, str]:
    form = {"grant_type": EXCHANGE, "subject_token": subject, "subject_token_type": ACCESS_TOKEN, "scope": "catalog"}
    return {**form, **options}


@pytest.mark.parametrize("credential_form", ["form", "basic", "secret only", "basic secret only"])
async def test_client_credentials_return_a_token(
    server: RunningServer, secrets: dict[str, str], credential_form: str
) -> None:
    form = {"grant_type": "client_credentials", "scope": "catalog"}
    headers = {}
    if credential_form == "form":
        form |= {"client_id": "ann", "client_secret": secrets["ann"]}
    elif credential_form == "basic":
        headers = build_basic_header(f"ann:{secrets['ann']}")
    elif credential_form == "secret only":
        form |= {"client_secret": secrets["ann"]}
    else:
        headers = build_basic_header(secrets["ann"])
    status, body = await request_token(server, form, headers)
    assert status == 200
    assert (body["token_type"], body["expires_in"], body["issued_token_type"]) == ("bearer", 600, ACCESS_TOKEN)
    assert secrets["ann"] not in body["access_token"]
    assert await find_principal(server, body["access_token"]) == "ann"


async def test_issued_token_expires_with_its_original_token(server: RunningServer, secrets: dict[str, str]) -> None:
    _, body = await request_token(server, {"grant_type": "client_credentials", "client_secret": secrets["bob"]})
    _, refreshed_token = await request_token(server, make_scoped_exchange(body["access_token"]))
    await revoke_token(server.components.store, server.components.clock, "bob")
    assert await find_principal(server, body["access_token"]) is None
    assert await find_principal(server, refreshed_token["access_token"]) is None
    status, refusal = await request_token(server, make_scoped_exchange(refreshed_token["access_token"]))
    assert (status, refusal["error"]) == (400, "invalid_grant")


async def test_java_clients_refresh_by_token_exchange(server: RunningServer, secrets: dict[str, str]) -> None:
    _, first_answer = await request_token(server, {"grant_type": "client_credentials", "client_secret": secrets["ann"]})
    bearer = {"Authorization": f"Bearer {first_answer['access_token']}"}
    status, second_answer = await request_token(server, make_scoped_exchange(first_answer["access_token"]), bearer)
    assert status == 200
    assert second_answer["issued_token_type"] == ACCESS_TOKEN
    assert second_answer["access_token"] != first_answer["access_token"]
    assert await find_principal(server, second_answer["access_token"]) == "ann"
    # A client may also exchange a stored access token, which it has as the option `token`, without a login.
    status, third_answer = await request_token(server, make_scoped_exchange(secrets["ann"]))
    assert await find_principal(server, third_answer["access_token"]) == "ann"


async def test_expired_token_is_refreshed_only_with_its_holders_credentials(
    tmp_path: Path, secrets: dict[str, str]
) -> None:
    async with run_server(tmp_path, auth="token") as server:
        token = (await server.components.authenticator.find_login(secrets["ann"])).token
        issuer = server.components.authenticator.issuer
        issuer._ttl_s = -60  # The next token expired one minute ago.
        expired_token, _ = issuer.issue(token)
        issuer._ttl_s = 600
        assert await find_principal(server, expired_token) is None
        status, body = await request_token(server, make_scoped_exchange(expired_token))
        assert (status, body["error"]) == (400, "invalid_grant")
        status, body = await request_token(
            server, make_scoped_exchange(expired_token), build_basic_header(f"ann:{secrets['ann']}")
        )
        assert status == 200
        assert await find_principal(server, body["access_token"]) == "ann"
        status, body = await request_token(
            server, make_scoped_exchange(expired_token), build_basic_header(f"bob:{secrets['bob']}")
        )
        assert (status, body["error"]) == (400, "invalid_grant")
        status, body = await request_token(
            server, make_scoped_exchange(expired_token), build_basic_header("ann:smk_wrong")
        )
        assert (status, body["error"]) == (401, "invalid_client")


async def test_errors_have_oauths_form(server: RunningServer) -> None:
    cases: list[tuple[dict[str, str], int, str]] = [
        ({}, 400, "unsupported_grant_type"),
        ({"grant_type": "password"}, 400, "unsupported_grant_type"),
        ({"grant_type": "client_credentials"}, 401, "invalid_client"),
        ({"grant_type": "client_credentials", "client_id": "ann"}, 401, "invalid_client"),
        ({"grant_type": "client_credentials", "client_secret": "smk_wrong"}, 401, "invalid_client"),
        ({"grant_type": "client_credentials", "client_secret": "é\x00\n"}, 401, "invalid_client"),
        ({"grant_type": EXCHANGE}, 400, "invalid_request"),
        ({"grant_type": EXCHANGE, "subject_token": "x"}, 400, "invalid_request"),
        (make_scoped_exchange("x", subject_token_type="urn:x"), 400, "invalid_request"),
        (make_scoped_exchange("x", requested_token_type="urn:x"), 400, "invalid_request"),
        (make_scoped_exchange("x"), 400, "invalid_grant"),
        (make_scoped_exchange("smk_wrong"), 400, "invalid_grant"),
        (make_scoped_exchange("a.b.c"), 400, "invalid_grant"),
    ]
    for form, status, error in cases:
        answer_status, body = await request_token(server, form)
        assert (answer_status, body["error"]) == (status, error), form
        assert set(body) == {"error", "error_description"}, form
        assert body["error_description"], form


async def test_secret_under_another_name_is_rejected(server: RunningServer, secrets: dict[str, str]) -> None:
    form = {"grant_type": "client_credentials", "client_id": "bob", "client_secret": secrets["ann"]}
    assert (await request_token(server, form))[0] == 401
    status, body = await request_token(server, form | {"client_id": "ann"}, build_basic_header(f"bob:{secrets['bob']}"))
    assert (status, body["error"]) == (400, "invalid_request")


async def test_bodies_that_are_not_forms_are_rejected(server: RunningServer) -> None:
    cases: list[tuple[bytes, str | None, str]] = [
        (b'{"grant_type": "client_credentials"}', "application/json", "invalid_request"),
        (b"grant_type=client_credentials&grant_type=x", None, "invalid_request"),
        (b"grant_type=%ff", None, "invalid_request"),
        (b"\xff\xfe", None, "invalid_request"),
        (b"no pairs", None, "invalid_request"),
        (b"a=1&" * 40, None, "invalid_request"),
        (b"a=" + b"x" * 70_000, None, "invalid_request"),
        (b"", None, "unsupported_grant_type"),
    ]
    for body, content_type, error in cases:
        headers = {"Content-Type": content_type or "application/x-www-form-urlencoded"}
        async with server.http.post(f"{server.url}/v1/oauth/tokens", data=body, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]) == (400, error), body[:50]


@pytest.mark.parametrize("header", ["Basic", "Basic !!!", "Basic /////w==", "Basic eA"])
async def test_invalid_basic_credentials_are_rejected(server: RunningServer, header: str) -> None:
    status, body = await request_token(server, {"grant_type": "client_credentials"}, {"Authorization": header})
    assert (status, body["error"]) == (401, "invalid_client")


async def test_server_without_logins_issues_a_token_on_request(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        for form in (
            {"grant_type": "client_credentials", "client_id": "any", "client_secret": "thing"},
            {"grant_type": "client_credentials"},
            build_exchange_form("whatever"),
        ):
            status, body = await request_token(server, form)
            assert status == 200
            headers = {"Authorization": f"Bearer {body['access_token']}"}
            assert (await server.get("/v1/config", headers=headers))[0] == 200
        assert (await request_token(server, {"grant_type": "x"}))[0] == 400


async def test_token_of_the_oidc_issuer_is_returned_with_its_remaining_time(tmp_path: Path) -> None:
    async with run_issuer(SystemClock()) as issuer:
        issuer.publish(get_rsa_key())
        options: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
        async with run_server(tmp_path, auth="oidc", **options) as server:
            token = issuer.make_token(get_rsa_key())
            status, body = await request_token(server, build_exchange_form(token))
            assert (status, body["access_token"]) == (200, token)
            assert 200 < body["expires_in"] <= 300
            status, body = await request_token(server, build_exchange_form(issuer.make_token(get_rsa_key(), aud="x")))
            assert (status, body["error"]) == (400, "invalid_grant")


async def test_token_endpoint_is_listed_for_clients(server: RunningServer, secrets: dict[str, str]) -> None:
    _, config = await server.get("/v1/config", headers={"Authorization": f"Bearer {secrets['ann']}"})
    assert "POST /v1/oauth/tokens" in config["endpoints"]


async def test_pyiceberg_logs_in_with_a_credential(server: RunningServer, secrets: dict[str, str]) -> None:
    def use_catalog(credential: str) -> list[Any]:
        with pytest.warns(DeprecationWarning, match="OAuth|oauth"):
            catalog = RestCatalog("c", uri=server.url, credential=credential)
        namespaces: list[Any] = catalog.list_namespaces()
        catalog.create_namespace("made")
        return namespaces

    assert await asyncio.to_thread(use_catalog, f"ann:{secrets['ann']}") == [("db",)]
    with pytest.raises(ForbiddenError, match="bob may not createNamespace"):
        await asyncio.to_thread(use_catalog, f"bob:{secrets['bob']}")
    with pytest.raises(OAuthError, match="invalid_client"):
        await asyncio.to_thread(use_catalog, "ann:wrong")


async def test_access_token_alone_does_not_extend_a_login(tmp_path: Path, secrets: dict[str, str]) -> None:
    clock = OffsetClock()
    async with run_server(tmp_path, clock=clock, auth="token", oauth_token_ttl_s=3600) as server:
        form = {"grant_type": "client_credentials", "client_secret": secrets["ann"]}
        token = (await request_token(server, form))[1]["access_token"]
        # An exchanged token expires with the first token, which is valid for an hour. The checks allow 10 minutes for a
        # slow machine.
        for remaining_s in (2400, 1200):
            clock.ahead_ms += 1_200_000
            status, answer = await request_token(
                server, build_exchange_form(token), {"Authorization": f"Bearer {token}"}
            )
            assert status == 200
            assert remaining_s - 600 < answer["expires_in"] <= remaining_s
            token = answer["access_token"]
        clock.ahead_ms += 1_200_000
        status, answer = await request_token(server, build_exchange_form(token), {"Authorization": f"Bearer {token}"})
        assert (status, answer["error"]) == (400, "invalid_grant")
        # Java clients then also send the secret. With it, the same token is exchanged for a token with a full lifetime.
        status, answer = await request_token(
            server, build_exchange_form(token), build_basic_header(f"ann:{secrets['ann']}")
        )
        assert (status, answer["expires_in"]) == (200, 3600)


async def test_exchanged_bearer_token_is_returned_unchanged(server: RunningServer, secrets: dict[str, str]) -> None:
    status, answer = await request_token(
        server, build_exchange_form(secrets["ann"]), {"Authorization": f"Bearer {secrets['ann']}"}
    )
    assert (status, answer["access_token"], answer["expires_in"]) == (200, secrets["ann"], 600)


async def test_extended_login_ends_with_its_secret(server: RunningServer, secrets: dict[str, str]) -> None:
    form = {"grant_type": "client_credentials", "client_secret": secrets["bob"]}
    token = (await request_token(server, form))[1]["access_token"]
    token = (await request_token(server, build_exchange_form(token)))[1]["access_token"]
    assert await find_principal(server, token) == "bob"
    await revoke_token(server.components.store, server.components.clock, "bob")
    assert await find_principal(server, token) is None


def build_exchange_form(token: str) -> dict[str, str]:
    return {"grant_type": EXCHANGE, "subject_token": token, "subject_token_type": ACCESS_TOKEN}
