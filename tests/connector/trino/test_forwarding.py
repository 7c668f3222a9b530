"""Tests that the proxy forwards requests and answers unchanged, also if they are large, slow or broken."""

from __future__ import annotations

import asyncio
import gzip
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from seamark.formats.runtime.tls import create_server_tls
from tests.connector.trino.rig import FakeServer, reserve_dead_address, run_fake_server, run_proxy, serve_requests
from tests.waits import until

MIB = 1 << 20


async def echo(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
    return web.Response(body=body or b"nothing", headers={"X-Fake": fake_server.url})


def list_lower_case_names(headers: object) -> set[str]:
    return {str(name).lower() for name in headers}  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "PATCH", "DELETE"])
async def test_requests_are_forwarded_unchanged(method: str) -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url) as rig:
        target = "/v1/query/a%2Fb%20c/%7E;x?q=%26+1&empty=&%C3%A9"
        request_headers = {
            "X-Trino-User": "müller".encode().decode("latin-1"),
            "Authorization": "Negotiate abc==",
            "Cookie": "a=b; c=d",
        }
        status, _, body = await rig.ask(method, target, data=b"\x00\xff", headers=request_headers)
        assert (status, body) == (200, b"\x00\xff")
        seen_method, seen_target, headers, seen_body = trino.requests[0]
        assert (seen_method, seen_target, seen_body) == (method, target, b"\x00\xff")
        assert {name: headers[name] for name in request_headers} == request_headers


async def test_repeated_headers_stay_separate_and_in_order() -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        cookies = [("Set-Cookie", "a=1; Path=/ui; HttpOnly"), ("X-Trino-Set-Session", "x=1"), ("Set-Cookie", "b=2")]
        return web.Response(headers=cookies, text="x")

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        request_headers = [
            ("X-Trino-Session", "a=1"),
            ("X-Trino-Prepared-Statement", "p=q"),
            ("X-Trino-Session", "b=2"),
        ]
        _, headers, _ = await rig.ask("GET", "/v1/info", headers=request_headers)
        assert headers.getall("Set-Cookie") == ["a=1; Path=/ui; HttpOnly", "b=2"]
        assert headers["X-Trino-Set-Session"] == "x=1"
        assert trino.requests[0].headers.getall("X-Trino-Session") == ["a=1", "b=2"]
        await rig.ask("GET", "/v1/info")
        assert "Cookie" not in trino.requests[1].headers  # Cookies belong to clients, so the proxy stores none.


async def test_connection_headers_are_not_forwarded() -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(text="x", headers={"Connection": "X-Mine", "X-Mine": "1", "Keep-Alive": "timeout=5"})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        request_headers = {
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "TE": "trailers",
            "Proxy-Authorization": "Basic x",
        }
        _, headers, _ = await rig.ask("GET", "/v1/info", headers={**request_headers, "X-Seamark": "off"})
        assert (
            list_lower_case_names(trino.requests[0].headers) & {"x-hop", "te", "proxy-authorization", "x-seamark"}
            == set()
        )
        assert trino.requests[0].headers["Via"] == "1.1 seamark"
        assert list_lower_case_names(headers) & {"x-mine", "keep-alive"} == set()


async def test_forwarded_headers_describe_the_client_and_replace_forged_headers() -> None:
    forged_headers = {
        **{"Forwarded": "proto=https", "X-Forwarded-For": "1.1.1.1", "X-Forwarded-Proto": "https"},
        **{"X-Forwarded-Host": "evil", "X-Forwarded-Port": "1", "X-Forwarded-Prefix": "/x", "X-Proxied-Https": "on"},
        **{"X-Forwarded-Server": "x", "Proxy-Ssl-Id": "x", "Proxy-Auth-Cert": "x"},
    }
    async with run_fake_server(echo) as trino, run_proxy(trino.url) as rig:
        await rig.ask("GET", "/v1/info", headers={**forged_headers, "Host": "trino.example:8443"})
        received_headers = {
            name: value
            for name, value in trino.requests[0].headers.items()
            if name.lower() in {header.lower() for header in forged_headers}
        }
        assert received_headers == {
            "X-Forwarded-For": "127.0.0.1",
            "X-Forwarded-Proto": "http",
            "X-Forwarded-Host": "trino.example:8443",
            "X-Forwarded-Port": "8443",
        }
        await rig.ask("GET", "/v1/info", headers={"Host": "trino.example"})
        assert trino.requests[1].headers["X-Forwarded-Port"] == "80"
        assert trino.requests[1].headers["Host"] == trino.url.removeprefix("http://")


async def test_forwarded_headers_are_trusted_if_a_setting_enables_it() -> None:
    request_headers = {"X-Forwarded-For": "10.1.1.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": "trino.example"}
    async with run_fake_server(echo) as trino, run_proxy(trino.url, trust_forwarded=True) as rig:
        await rig.ask("GET", "/v1/info", headers={**request_headers, "X-Forwarded-Prefix": "/lake/"})
        received_headers = trino.requests[0].headers
        assert received_headers["X-Forwarded-For"] == "10.1.1.1, 127.0.0.1"
        assert (received_headers["X-Forwarded-Proto"], received_headers["X-Forwarded-Host"]) == (
            "https",
            "trino.example",
        )
        assert (received_headers["X-Forwarded-Port"], received_headers["X-Forwarded-Prefix"]) == ("443", "/lake")


async def test_compressed_bodies_are_forwarded_unchanged() -> None:
    packed_body = gzip.compress(b"x" * 100_000)

    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(body=packed_body, headers={"Content-Encoding": "gzip", "Content-Type": "application/json"})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        request_headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip, zstd"}
        for target in ("/v1/spooled/download/1", "/v1/statement"):
            _, headers, body = await rig.ask("POST", target, data=packed_body, headers=request_headers)
            assert (body, headers["Content-Encoding"]) == (packed_body, "gzip")
            assert headers["Content-Length"] == str(len(packed_body))
            assert trino.requests[-1].body == packed_body
            assert trino.requests[-1].headers["Accept-Encoding"] == "gzip, zstd"


async def test_proxy_adds_only_forwarding_headers() -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url) as rig:
        host, port = rig.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/info HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(b"nothing")
        writer.close()
        added_headers = {"host", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-forwarded-proto"}
        assert list_lower_case_names(trino.requests[0].headers) == added_headers


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("DELETE", 204), ("GET", 304), ("GET", 200)])
async def test_answers_without_a_body_stay_without_one(method: str, status: int) -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=status, headers={"ETag": '"1"'})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        for _ in range(2):  # The connection still works for the second request.
            actual_status, headers, body = await rig.ask(method, "/v1/statement/executing/x")
            assert (actual_status, body, headers["ETag"]) == (status, b"", '"1"')


async def test_redirects_are_passed_to_the_client() -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(status=303, headers={"Location": "http://storage.example/segment"})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        status, headers, _ = await rig.ask("GET", "/v1/spooled/download/1")
        assert (status, headers["Location"]) == (303, "http://storage.example/segment")


async def test_long_headers_of_prepared_statements_are_forwarded() -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(text="x", headers={"X-Trino-Added-Prepare": request.headers["X-Trino-Prepared-Statement"]})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        long_query = "p=" + "x" * 300_000
        _, headers, _ = await rig.ask("GET", "/v1/statement/x", headers={"X-Trino-Prepared-Statement": long_query})
        assert headers["X-Trino-Added-Prepare"] == long_query


# Size and time


async def test_large_answer_is_fetched_at_the_speed_of_the_client() -> None:
    sent_bytes = 0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent_bytes
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(256):
            await response.write(b"x" * MIB)
            sent_bytes += MIB
        await response.write_eof()
        return response

    async with (
        serve_requests(answer) as trino,
        run_proxy(trino) as rig,
        rig.http.get(rig.make_url("/v1/spooled/1")) as result,
    ):
        await result.content.readexactly(MIB)
        await asyncio.sleep(0.5)  # A proxy that does not wait for the client would fetch hundreds of MiB in this time.
        unread_bytes = sent_bytes - MIB
        # Up to 24 MiB may be in the buffers of the sockets and of the proxy. The answer has 256 MiB.
        assert unread_bytes < 24 * MIB, unread_bytes
        size = MIB
        async for chunk in result.content.iter_any():
            size += len(chunk)
        assert size == 256 * MIB


async def test_too_long_statement_is_streamed_without_analysis() -> None:
    text = b"SELECT 1 FROM t WHERE x = 1 "
    arrived_bytes = 0
    may_continue = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        nonlocal arrived_bytes
        async for chunk in request.content.iter_any():
            arrived_bytes += len(chunk)
        return web.Response(text=str(arrived_bytes))

    async def send_long_body() -> AsyncIterator[bytes]:
        yield text + b" " * MIB
        await may_continue.wait()
        yield b" " * MIB

    async with serve_requests(answer) as trino, run_proxy(trino, statement_bytes=1000) as rig:
        task = asyncio.create_task(rig.ask("POST", "/v1/statement", data=send_long_body()))
        # The coordinator receives the body before the client has sent all of it.
        await until(lambda: arrived_bytes >= MIB)
        may_continue.set()
        _, headers, body = await task
        assert body == str(len(text) + 2 * MIB).encode()
        assert headers["X-Seamark-Plan"] == "unchanged; the statement is longer than 1000 bytes"


@pytest.mark.parametrize("pause_s", [0.0, 0.02])
@pytest.mark.parametrize("sizes", [(1,), (700, 1), (16_384, 16_385), (1, 300_000, 1), (1, 1, 1, 1)])
async def test_answer_in_pieces_arrives_completely(sizes: tuple[int, ...], pause_s: float) -> None:
    # Each piece consists of another byte, so that a wrong order changes the answer.
    pieces = [bytes([number + 1]) * size for number, size in enumerate(sizes)]

    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(pause_s)
        await response.write_eof()
        return response

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        for _ in range(3):  # All requests use one connection.
            status, _, body = await rig.ask("GET", "/v1/info")
            assert (status, body) == (200, b"".join(pieces))


async def test_announced_content_length_is_kept() -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url, statement_bytes=1000) as rig:
        for size in (10, 100_000):
            await rig.ask("POST", "/v1/statement", data=b" " * size)
            headers = trino.requests[-1].headers
            assert headers["Content-Length"] == str(size)
            assert "Transfer-Encoding" not in headers


async def test_client_that_disconnects_cancels_its_request_to_trino() -> None:
    has_started, has_ended = asyncio.Event(), asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        has_started.set()
        try:
            await asyncio.sleep(60)
        finally:
            has_ended.set()
        return web.Response()

    async with serve_requests(answer) as trino, run_proxy(trino) as rig:
        task = asyncio.create_task(rig.ask("GET", "/v1/statement/executing/1"))
        await asyncio.wait_for(has_started.wait(), 60)
        task.cancel()
        await asyncio.wait_for(has_ended.wait(), 60)


@pytest.mark.parametrize("has_content_length", [True, False])
async def test_answer_that_trino_interrupts_is_interrupted_for_the_client(has_content_length: bool) -> None:
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000000"} if has_content_length else {})
        await response.prepare(request)
        await response.write(b"[1, 2, 3" * 1000)
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serve_requests(answer) as trino, run_proxy(trino) as rig:
        with pytest.raises(aiohttp.ClientPayloadError):
            await rig.ask("GET", "/v1/statement/executing/1")
        status, _, _ = await rig.ask("GET", "/seamark/healthz")
        assert status == 200


async def test_proxy_finishes_running_requests_before_it_stops() -> None:
    has_started = asyncio.Event()

    async def answer(request: web.BaseRequest) -> web.Response:
        has_started.set()
        await asyncio.sleep(0.3)
        return web.Response(text="done")

    async with serve_requests(answer) as trino, aiohttp.ClientSession() as http:
        async with run_proxy(trino, drain_s=60.0) as rig:
            task = asyncio.create_task(http.get(rig.make_url("/v1/statement/executing/1")))
            await asyncio.wait_for(has_started.wait(), 60)
        async with await task as response:
            assert await response.text() == "done"


# Coordinators


async def test_error_of_an_unreachable_coordinator_names_the_coordinator() -> None:
    dead_url = reserve_dead_address()
    async with run_proxy(dead_url) as rig:
        for method, target in (("POST", "/v1/statement"), ("GET", "/v1/info")):
            status, _, body = await rig.ask(method, target, data=b"SELECT 1" if method == "POST" else None)
            assert status == 502
            assert dead_url.removeprefix("http://") in body.decode()


async def test_disconnecting_coordinator_gives_a_502() -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with serve_requests(answer) as trino, run_proxy(trino) as rig:
        status, _, _ = await rig.ask("POST", "/v1/statement", data=b"INSERT INTO t VALUES 1")
        assert status == 502


async def test_statements_rotate_over_coordinators_and_each_stays_at_its_coordinator() -> None:
    async with run_fake_server(echo) as first, run_fake_server(echo) as second, run_proxy(first.url, second.url) as rig:
        for _ in range(4):
            await rig.ask("POST", "/v1/statement", data=b"SELECT 1")
        assert (len(first.requests), len(second.requests)) == (2, 2)
        prefixes = {
            fake_server.url: fake_server.requests[0].headers["X-Forwarded-Prefix"] for fake_server in (first, second)
        }
        assert len(set(prefixes.values())) == 2
        for fake_server in (first, second, second, first):
            _, headers, _ = await rig.ask("GET", f"{prefixes[fake_server.url]}/v1/statement/queued/1?maxWait=1s")
            assert headers["X-Fake"] == fake_server.url
            assert fake_server.requests[-1].target == "/v1/statement/queued/1?maxWait=1s"
            page_headers = {"Referer": f"http://proxy{prefixes[fake_server.url]}/ui/"}
            _, headers, _ = await rig.ask("GET", "/ui/api/stats", headers=page_headers)
            assert headers["X-Fake"] == fake_server.url
        async with run_proxy(first.url, reserve_dead_address()) as other_proxy:
            status, _, body = await other_proxy.ask("GET", f"{prefixes[second.url]}/v1/statement/queued/1")
            assert (status, b"No coordinator" in body) == (404, True)
            assert (await other_proxy.ask("GET", f"{prefixes[first.url]}/v1/statement/queued/1"))[0] == 200


async def test_single_coordinator_gets_no_prefix() -> None:
    async with run_fake_server(echo) as trino, run_proxy(trino.url) as rig:
        await rig.ask("POST", "/v1/statement", data=b"SELECT 1")
        assert "X-Forwarded-Prefix" not in trino.requests[0].headers


async def test_statements_skip_an_unreachable_coordinator() -> None:
    async with run_fake_server(echo) as live_trino, run_proxy(reserve_dead_address(), live_trino.url) as rig:
        for number in range(4):
            body = b"x" * (300_000 if number % 2 else 10)
            status, _, _ = await rig.ask("POST", "/v1/statement", data=body)
            assert status == 200
        assert [len(request.body) for request in live_trino.requests] == [10, 300_000, 10, 300_000]
        assert (await rig.ask("GET", "/v1/info"))[0] == 200


# The proxy's own endpoints


async def test_health_and_metrics_are_answered_without_trino() -> None:
    async with run_proxy(reserve_dead_address()) as rig:
        status, _, body = await rig.ask("GET", "/seamark/healthz")
        assert (status, b'"draining":false' in body) == (200, True)
        await rig.ask("GET", "/v1/info")
        _, _, body = await rig.ask("GET", "/seamark/metrics")
        assert 'seamark_trino_requests_total{status="5xx"} 1.0' in body.decode()
        assert (await rig.ask("GET", "/seamark/nothing"))[0] == 404
        assert (await rig.ask("POST", "/seamark/healthz"))[0] == 405


async def test_answers_of_the_proxy_contain_no_address_behind_it() -> None:
    hidden_address = reserve_dead_address()
    async with run_proxy(hidden_address) as rig:
        for path in ("/seamark/healthz", "/seamark/metrics", "/seamark/nothing"):
            _, headers, body = await rig.ask("GET", path)
            assert hidden_address not in body.decode() + str(dict(headers)), path


@pytest.mark.parametrize("has_several_coordinators", [False, True])
async def test_logs_do_not_contain_the_secrets_of_query_results(
    has_several_coordinators: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        run_fake_server(echo) as trino,
        run_proxy(trino.url, *[reserve_dead_address()] * has_several_coordinators) as rig,
    ):
        prefix = rig.proxy._coordinators.all[0].prefix
        for path in ("statement/queued/q1/SECRET/1", "statement/executing/q2/SECRET/1", "spooled/download/SECRET"):
            assert (await rig.ask("GET", f"{prefix}/v1/{path}"))[0] == 200
        await asyncio.sleep(0)
    log_text = capsys.readouterr().out
    assert "q1" in log_text
    assert "q2" in log_text
    assert "SECRET" not in log_text


async def test_proxy_serves_https_and_verifies_coordinators(tmp_path: Path) -> None:
    key_options = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    request_options = [
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    subprocess.run(["openssl", "req", "-x509", *request_options, *key_options], check=True, capture_output=True)
    tls = create_server_tls(tmp_path / "cert.pem", tmp_path / "key.pem")
    async with run_fake_server(echo) as trino, run_proxy(trino.url, tls=tls) as rig:
        assert (await rig.ask("GET", "/v1/info"))[0] == 200
        assert trino.requests[0].headers["X-Forwarded-Proto"] == "https"
        with pytest.raises(ssl.SSLError):  # The first file contains no certificate.
            create_server_tls(tmp_path / "key.pem", tmp_path / "key.pem")
        # The proxy verifies the certificate of a coordinator with https, and no known authority has signed this one.
        async with run_proxy(rig.url) as outer_rig:
            status, _, body = await outer_rig.ask("GET", "/v1/info")
            assert (status, b"certificate" in body.lower()) == (502, True)
