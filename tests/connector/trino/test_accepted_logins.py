"""Tests that the proxy plans only for clients whose login Trino accepts, and checks a login once a minute."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from multidict import CIMultiDict

from seamark.connector.trino.protocol import accepted_logins as module
from seamark.connector.trino.protocol.accepted_logins import LOGINS_MAX, REMEMBERED_S, AcceptedLogins
from seamark.connector.trino.protocol.coordinators import Coordinator
from tests.connector.trino.protocol import END, ROWS, Page, run_fake_seamark, run_fake_trino
from tests.connector.trino.rig import FakeServer, ProxyRig, run_fake_server, run_proxy

STATEMENT = "SELECT x FROM lake.db.t WHERE x = 1"
COORDINATOR = Coordinator("http://trino", "")


async def _request_plan_header(rig: ProxyRig, authorization: str, statement: str = STATEMENT, **headers: str) -> str:
    """Send a statement, and return the header in which the proxy reports what it did."""
    request_headers = {"X-Trino-User": "ann", "Authorization": authorization, **headers}
    _, answer, _ = await rig.ask("POST", "/v1/statement", data=statement.encode(), headers=request_headers)
    return str(answer["X-Seamark-Plan"])


def _answer_with_rows(statement: str) -> list[Page]:
    return [ROWS, END]


async def test_plans_are_made_only_for_accepted_logins_which_are_checked_once() -> None:
    async with (
        run_fake_trino(_answer_with_rows) as trino,
        run_fake_seamark() as seamark,
        run_proxy(trino.url, seamark=seamark.url) as rig,
    ):
        # The proxy asks for a query that does not exist. If Trino accepts the login, it answers 410.
        trino.login_status = lambda credentials: 410 if credentials == "Basic right" else 401
        for _ in range(2):
            assert await _request_plan_header(rig, "Basic wrong") == "unchanged; Trino has not accepted the login"
        assert seamark.requests == seamark.server.requests == []
        assert trino.requests == [STATEMENT, STATEMENT]  # Trino itself refuses these statements.
        for _ in range(3):
            assert await _request_plan_header(rig, "Basic right") in ("rewritten", "planned")
        assert len(seamark.requests) == 3
        assert trino.logins == ["Basic wrong", "Basic wrong", "Basic right"]
        assert await _request_plan_header(rig, "Basic wrong") == "unchanged; Trino has not accepted the login"
        assert (
            await _request_plan_header(rig, "Basic right", "SELECT 1") != "unchanged; Trino has not accepted the login"
        )
        assert (
            await _request_plan_header(rig, "Basic wrong", "SELECT 1") != "unchanged; Trino has not accepted the login"
        )
        assert len(trino.logins) == 4  # A statement without tables needs no check.


@pytest.mark.parametrize("status", [302, 400, 401, 403, 429, 500, 503])
async def test_answer_with_another_status_accepts_no_login(status: int) -> None:
    async with (
        run_fake_trino(_answer_with_rows) as trino,
        run_fake_seamark() as seamark,
        run_proxy(trino.url, seamark=seamark.url) as rig,
    ):
        trino.login_status = lambda credentials: status
        assert await _request_plan_header(rig, "Bearer x") == "unchanged; Trino has not accepted the login"
        assert seamark.server.requests == []


async def test_login_of_single_use_is_not_checked() -> None:
    async with (
        run_fake_trino(_answer_with_rows) as trino,
        run_fake_seamark() as seamark,
        run_proxy(trino.url, seamark=seamark.url) as rig,
    ):
        assert await _request_plan_header(rig, "Negotiate abc==") == "unchanged; Trino has not accepted the login"
        assert (trino.logins, seamark.server.requests, trino.requests) == ([], [], [STATEMENT])


async def test_slow_login_check_delays_a_statement_only_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_S", 0.05)  # A statement waits for this time. The check takes longer.
    async with (
        run_fake_trino(_answer_with_rows) as trino,
        run_fake_seamark() as seamark,
        run_proxy(trino.url, seamark=seamark.url) as rig,
    ):
        trino.login_wait_s = 0.3
        assert await _request_plan_header(rig, "Basic right") == "unchanged; Trino has not accepted the login"
        await asyncio.sleep(0.5)  # The result of the login check arrives after the statement.
        assert await _request_plan_header(rig, "Basic right") in ("rewritten", "planned")
        assert trino.logins == ["Basic right"]


class _Trino:
    """A fake Trino that records the headers of the login checks, and answers each with `status`.

    A check requests a query that does not exist. If Trino accepts the login, it responds with the status 410.
    """

    def __init__(self, status: int = 410) -> None:
        self.requests: list[CIMultiDict[str]] = []
        self.status = status

    async def send(self, method: str, coordinator: Coordinator, target: str, headers: CIMultiDict[str]) -> Any:
        self.requests.append(headers)
        await asyncio.sleep(0)
        return _Response(self.status)


class _Response:
    def __init__(self, status: int) -> None:
        self.status = status

    async def __aenter__(self) -> _Response:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        return None


async def test_login_is_checked_again_after_a_minute_and_for_changed_credentials() -> None:
    trino, now_s = _Trino(), [1000.0]
    logins = AcceptedLogins(trino.send, lambda: now_s[0])
    first_headers = CIMultiDict({"Authorization": "Basic a", "X-Trino-User": "ann", "X-Trino-Source": "x"})
    assert all(await asyncio.gather(*(logins.accepts(COORDINATOR, first_headers) for _ in range(5))))
    assert len(trino.requests) == 1
    header_changes = (
        {"Authorization": "Basic b"},
        {"X-Trino-User": "bob"},
        {"X-Presto-User": "bob"},
        {"X-Trino-Role": "lake=ROLE{admin}"},
        {"X-Trino-Extra-Credential": "k=v"},
        {"Cookie": "token=1"},
        {"X-Forwarded-Proto": "http"},
    )
    for number, changed_headers in enumerate(header_changes):
        assert await logins.accepts(COORDINATOR, CIMultiDict({**first_headers, **changed_headers}))
        assert len(trino.requests) == 2 + number
    assert await logins.accepts(Coordinator("http://other", ""), first_headers)
    check_count = len(trino.requests)
    assert await logins.accepts(
        COORDINATOR, CIMultiDict({**first_headers, "X-Trino-Source": "y", "X-Trino-Session": "a=1"})
    )
    now_s[0] += REMEMBERED_S - 1
    assert await logins.accepts(COORDINATOR, first_headers)
    assert len(trino.requests) == check_count
    now_s[0] += 1
    assert await logins.accepts(COORDINATOR, first_headers)
    assert len(trino.requests) == check_count + 1
    assert not logins._login_checks
    assert not any(b"Basic" in key for key in logins._until_s)


async def test_number_of_remembered_logins_is_bounded() -> None:
    trino = _Trino()
    logins = AcceptedLogins(trino.send)
    for number in range(LOGINS_MAX + 10):
        assert await logins.accepts(COORDINATOR, CIMultiDict({"Authorization": f"Basic {number}"}))
    assert len(logins._until_s) == LOGINS_MAX


async def test_answers_do_not_reveal_the_software_version() -> None:
    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.Response:
        return web.Response(text="x", headers={"Server": "trino"})

    async with run_fake_server(answer) as trino, run_proxy(trino.url) as rig:
        for method, target in (
            ("GET", "/seamark/healthz"),
            ("GET", "/seamark/metrics"),
            ("GET", "/seamark/none"),
            ("POST", "/seamark/healthz"),
            ("GET", "/seamark/c/00000000/v1/info"),
            ("GET", "/seamark/statements/0"),
            ("PUT", "/seamark/statements/0"),
            ("OPTIONS", "*"),
        ):
            _, headers, body = await rig.ask(method, target) if target[0] == "/" else await _request_raw(rig, method)
            assert headers["Server"] == "seamark", (method, target)
            assert b"aiohttp" not in body, (method, target)
        _, headers, _ = await rig.ask("GET", "/v1/info")
        assert headers["Server"] == "trino"


async def _request_raw(rig: ProxyRig, method: str) -> tuple[int, dict[str, str], bytes]:
    """Return the status, headers and body of the answer to a request for `*`, which is not a path."""
    host, port = rig.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return int(lines[0].split()[1]), dict(line.split(": ", 1) for line in lines[1:]), body
