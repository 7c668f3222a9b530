"""Tests of the errors that clients receive: always an ErrorModel with a request id, and no internal details."""

from __future__ import annotations

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from seamark.formats.runtime.errors import RetryLater, SeamarkError, Unauthenticated
from seamark.metaserver.api.http.errors import from_seamark_error
from tests.server.rig import RunningServer, run_server
from tests.waits import until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path, body_limit_bytes=4096) as running_server:
        yield running_server


def check_model(body: Any, status: int) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "stack"}
    assert body["error"]["code"] == status
    assert body["error"]["stack"] == []
    assert body["error"]["message"]
    return str(body["error"]["type"])


async def test_every_error_has_the_standards_form(server: RunningServer) -> None:
    cases: list[tuple[str, str, int, str]] = [
        ("GET", "/nope", 404, "NotFoundException"),
        ("GET", "/v1/namespaces/none/tables/none", 404, "NoSuchTableException"),
        ("POST", "/healthz", 405, "UnsupportedOperationException"),
        ("PUT", "/v1/namespaces", 405, "UnsupportedOperationException"),
        ("GET", "/api/v1/timeline?limit=x", 400, "BadRequestException"),
        ("POST", "/api/v1/dropped/none/undrop", 404, "NotFoundException"),
        ("DELETE", "/api/v1/dropped/none", 404, "NotFoundException"),
    ]
    for method, path, status, kind in cases:
        async with server.http.request(method, server.url + path) as answer:
            assert answer.status == status, path
            assert answer.content_type == "application/json", path
            assert answer.headers["X-Request-Id"], path
            assert check_model(await answer.json(), status) == kind, path
            assert status != 405 or "GET" in answer.headers["Allow"], path


@pytest.mark.parametrize("path", ["/v1", "/api/catalog"])
@pytest.mark.parametrize(("method", "route"), [("GET", "/v1/config?warehouse=lake"), ("POST", "/v1/oauth/tokens")])
async def test_client_with_a_path_in_its_uri_gets_a_hint(
    server: RunningServer, path: str, method: str, route: str
) -> None:
    async with server.http.request(method, f"{server.url}{path}{route}") as answer:
        assert check_model(body := await answer.json(), 404) == "NotFoundException"
        assert body["error"]["message"].endswith(f"; leave '{path}' out of the URI of the catalog, which has no path")


async def test_error_of_a_head_request_has_no_body(server: RunningServer) -> None:
    for path, status in (("/nope", 404), ("/v1/namespaces/none", 404), ("/api/v1/timeline?limit=x", 400)):
        async with server.http.head(server.url + path) as answer:
            assert answer.status == status
            assert await answer.read() == b""
            assert answer.headers["X-Request-Id"]


async def test_body_over_the_limit_is_rejected_with_413(server: RunningServer) -> None:
    async with server.http.post(f"{server.url}/v1/namespaces", data=b"x" * 5000) as answer:
        assert answer.status == 413
        assert check_model(await answer.json(), 413) == "PayloadTooLargeException"


async def test_compressed_body_is_measured_after_decompression(server: RunningServer) -> None:
    packed_body = gzip.compress(b" " * 1_000_000)
    assert len(packed_body) < 4096
    async with server.http.post(
        f"{server.url}/v1/namespaces", data=packed_body, headers={"Content-Encoding": "gzip"}
    ) as answer:
        assert answer.status == 413


async def test_malformed_paths_cause_no_server_error(server: RunningServer) -> None:
    cases: list[str] = [
        "/v1/namespaces/%",
        "/v1/namespaces/%zz",
        "/v1/namespaces/%ff",
        "/v1/namespaces/%00",
        "/v1/namespaces/a%1F",
        "/v1/namespaces/%ed%a0%80",
        "/v1/namespaces/db/tables/%00",
        "/api/v1/tables/%ff/t/timeline",
        "/api/v1/tables/db/%00/timeline",
        "/api/v1/dropped/%00",
        "/api/v1/dropped/%ff/undrop",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/api/v1/timeline?action=%ff",
        "/api/v1/timeline?action=%ed%a0%80",
        "/api/v1/timeline?since=%c3%28",
        "/api/v1/dropped?namespace=%00",
        "/api/v1/dropped?pageToken=%00",
        "/api/v1/dropped?pageToken=AA",
        "/api/v1/dropped?pageSize=0",
        "/v1/namespaces?pageToken=%ff",
        "//",
        "/api/v1//timeline",
        "/" + "a" * 5000,
    ]
    for path in cases:
        url = URL(server.url + path, encoded=True)
        for method in ("GET", "DELETE", "POST", "HEAD"):
            async with server.http.request(method, url) as answer:
                assert answer.status < 500, (method, path)
                if method != "HEAD" and answer.status >= 400:
                    check_model(await answer.json(), answer.status)


async def test_malformed_requests_cause_no_server_error(server: RunningServer) -> None:
    url = URL(server.url)
    cases: list[bytes] = [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: y\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v1/namespaces HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/namespaces HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/namespaces HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: " + b"a" * 9000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"nonsense\r\n\r\n",
    ]
    for raw in cases:
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(raw)
        writer.write_eof()
        async with asyncio.timeout(60):
            response_bytes = await reader.read()
        writer.close()
        await writer.wait_closed()
        statuses = [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3})", response_bytes)]
        assert all(status < 500 for status in statuses), response_bytes[:300]
        status, _ = await server.get("/healthz")
        assert status == 200, raw


async def test_valid_request_id_is_returned_and_an_invalid_one_is_replaced(server: RunningServer) -> None:
    for request_id, is_kept in (
        ("abc-1:2/3", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("ü", False),
    ):
        async with server.http.get(f"{server.url}/healthz", headers={"X-Request-Id": request_id}) as answer:
            assert (answer.headers["X-Request-Id"] == request_id) is is_kept
    async with server.http.get(f"{server.url}/healthz") as answer:
        assert re.fullmatch(
            r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}", answer.headers["X-Request-Id"]
        )


async def test_bug_is_a_500_that_contains_only_the_request_id(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise KeyError("s3://bucket/very-secret")

    monkeypatch.setattr(server.components.timeline, "read", fail)
    headers = {"X-Request-Id": "find-me"}
    status, body = await server.get("/api/v1/timeline", headers=headers)
    assert status == 500
    check_model(body, 500)
    assert "find-me" in body["error"]["message"]
    assert "secret" not in body["error"]["message"]


async def test_requests_over_the_limit_are_rejected_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, requests_limit=2) as server:
        may_finish, started_count = asyncio.Event(), 0

        async def raise_not_found(*_: object) -> Any:
            nonlocal started_count
            started_count += 1
            await may_finish.wait()
            raise web.HTTPNotFound

        monkeypatch.setattr(server.components.catalog.dropped, "_context", None)
        monkeypatch.setattr(type(server.components.catalog.dropped), "list", raise_not_found)
        held_tasks = [asyncio.create_task(server.get("/api/v1/dropped")) for _ in range(2)]
        await until(lambda: started_count == 2)
        async with server.http.get(f"{server.url}/api/v1/dropped") as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert check_model(await answer.json(), status=503) == "ServiceUnavailableException"
        status, _ = await server.get("/healthz")
        assert status == 200  # The server answers health probes even if the limit is reached.
        may_finish.set()
        assert [status for status, _ in await asyncio.gather(*held_tasks)] == [404, 404]


def list_all_errors(base: type[SeamarkError] = SeamarkError) -> list[type[SeamarkError]]:
    return [base, *(error for child in base.__subclasses__() for error in list_all_errors(child))]


# The workers of pytest-xdist may import the classes in different orders, and must collect the tests in one order.
@pytest.mark.parametrize("kind", sorted(list_all_errors(), key=repr))
def test_every_error_class_has_its_own_code_and_type_in_answers(kind: type[SeamarkError]) -> None:
    answer = from_seamark_error(kind("what to do"))
    assert answer.status == kind.code
    assert isinstance(answer.body, bytes)
    assert kind.type.encode() in answer.body
    assert b"what to do" in answer.body
    assert ("Retry-After" in answer.headers) is issubclass(kind, RetryLater)
    assert ("WWW-Authenticate" in answer.headers) is issubclass(kind, Unauthenticated)
