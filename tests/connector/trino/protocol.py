"""A scripted coordinator with Trino's client protocol, and a scripted Seamark that makes plan tables."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from seamark.connector.trino.protocol.accepted_logins import LOGIN_PATH
from tests.connector.trino.rig import FakeServer, run_fake_server

PLAN_ID = 4711471147
"""The id of each plan that the scripted Seamark makes."""
Page = dict[str, Any]
"""A page of an answer. The test gives its content, and the server adds the fields that follow from its position.

The server waits `wait` seconds before it sends the page. If `abort` is true, it closes the connection instead.
"""

ROWS: Page = {"columns": [{"name": "x", "type": "bigint"}], "data": [[1]], "stats": {"state": "RUNNING"}}
END: Page = {"columns": [{"name": "x", "type": "bigint"}], "stats": {"state": "FINISHED"}}
QUEUED_PAGE: Page = {"stats": {"state": "QUEUED"}}
PLANNING_PAGE: Page = {"stats": {"state": "PLANNING"}}


def build_failure_page(name: str, message: str = "", kind: str = "USER_ERROR") -> Page:
    error = {"message": message, "errorName": name, "errorType": kind, "errorCode": 1}
    return {"error": error, "stats": {"state": "FAILED"}}


@dataclass
class ScriptedTrino:
    """A fake Trino coordinator with scripted answers.

    Attributes:
        requests: The texts of the received statements.
        fetched_pages: For each requested page, the number of its statement and the token in its address.
        deleted_pages: The same pair for each page with which a client cancelled a statement.
    """

    server: FakeServer
    requests: list[str] = field(default_factory=list)
    fetched_pages: list[tuple[int, int]] = field(default_factory=list)
    deleted_pages: list[tuple[int, int]] = field(default_factory=list)
    rules_requests: list[str] = field(default_factory=list)
    """The ids of the queries whose rules were requested.

    `rules` is the answer for all; if it is empty, the answer is 410.
    """
    logins: list[str] = field(default_factory=list)
    """The credentials that the proxy has checked. `login_status` is the answer, after `login_wait_s` seconds."""
    login_status: Callable[[str], int] = lambda credentials: 410
    login_wait_s: float = 0.0
    rules: dict[str, Any] = field(default_factory=lambda: build_rules(build_table()))

    @property
    def url(self) -> str:
        return self.server.url


def build_table(
    name: str = "t", *, filters: Sequence[str] = (), masks: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return a table of a statement in the form in which Trino describes it."""
    columns = [{"column": column, "mask": mask} for column, mask in (masks or {}).items()] + [{"column": "x"}]
    return {"catalog": "lake", "schema": "db", "table": name, "filters": list(filters), "columns": columns}


def build_rules(*tables: dict[str, Any], **properties: Any) -> dict[str, Any]:
    return {"referencedTables": tables, "session": {"catalogProperties": {"lake": properties}}}


@asynccontextmanager
async def run_fake_trino(script_statement: Callable[[str], list[Page]]) -> AsyncIterator[ScriptedTrino]:
    """Yield a coordinator.

    `script_statement` returns the pages of each statement. The first page is the answer to the POST. A page may be
    requested several times.
    """
    scripts: dict[int, list[Page]] = {}
    numbers = itertools.count()

    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if path == LOGIN_PATH:
            trino.logins.append(request.headers.get("Authorization", ""))
            await asyncio.sleep(trino.login_wait_s)
            return web.Response(status=trino.login_status(trino.logins[-1]))
        if path.startswith("/v1/query/"):
            trino.rules_requests.append(path.removeprefix("/v1/query/"))
            return web.json_response(trino.rules, status=200 if trino.rules else 410)
        if request.method == "POST" and path == "/v1/statement":
            number, token = next(numbers), 0
            trino.requests.append(body.decode())
            scripts[number] = script_statement(body.decode())
        else:
            number, token = int(path.split("/")[-3]), int(path.split("/")[-1])
            if request.method == "DELETE":
                trino.deleted_pages.append((number, token))
                return web.Response(status=204)
            trino.fetched_pages.append((number, token))
        page = dict(scripts[number][token])
        await asyncio.sleep(page.pop("wait", 0))
        if page.pop("abort", False):
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        prefix = request.headers.get("X-Forwarded-Prefix", "")
        base = f"{request.headers['X-Forwarded-Proto']}://{request.headers['X-Forwarded-Host']}{prefix}"
        page |= {"id": f"q{number}", "infoUri": f"{base}/ui/#q{number}"}
        if token + 1 < len(scripts[number]):
            stage = "queued" if page["stats"]["state"] == "QUEUED" else "executing"
            page["nextUri"] = f"{base}/v1/statement/{stage}/{number}/slug/{token + 1}"
        return web.json_response(page, status=page.pop("status", 200), headers={"Set-Cookie": f"token={token}"})

    async with run_fake_server(answer) as fake_server:
        trino = ScriptedTrino(fake_server)
        yield trino


@dataclass
class ScriptedSeamark:
    """A fake Seamark server with scripted answers.

    Attributes:
        requests: The path and the body of each plan request.
        renewals: The path and the body of each lease request.
    """

    server: FakeServer
    requests: list[tuple[str, Any]] = field(default_factory=list)
    renewals: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.server.url


Plan = dict[str, Any] | int
"""An answer: fields of a plan table that differ from the defaults, or an HTTP status."""


@asynccontextmanager
async def run_fake_seamark(
    plan: Callable[[str, Any], Plan] | None = None, *, wait_s: float = 0
) -> AsyncIterator[ScriptedSeamark]:
    """Yield a fake Seamark server, which answers each plan request after `wait_s` seconds.

    `plan` receives the table (`db/t`) and the body of each request. It returns fields that replace the usual fields of
    the response, or the HTTP status of an error. Without `plan`, all responses have the usual fields.
    """

    async def answer(fake_server: FakeServer, request: web.BaseRequest, body: bytes) -> web.StreamResponse:
        path, _, route = request.rel_url.raw_path.removeprefix("/api/v1/tables/").rpartition("/")
        plan_request = json.loads(body)
        if route == "plan-snapshots":
            seamark.renewals.append((path, plan_request))
            return web.json_response({"found": 1})
        seamark.requests.append((path, plan_request))
        await asyncio.sleep(wait_s)
        new_plan = plan(path, plan_request) if plan is not None else {}
        if isinstance(new_plan, int):
            error = {"message": "no", "type": "NoSuchTableException" if new_plan == 404 else "Fake", "code": new_plan}
            return web.json_response({"error": error}, status=new_plan)
        usual_fields = {"name": None, "plan-snapshot-id": PLAN_ID, "snapshot-id": 7, "expires-at-ms": 1}
        sizes = {"files": 3, "bytes": 30, "considered-files": 100, "considered-bytes": 1000}
        return web.json_response({**usual_fields, **sizes, **new_plan})

    async with run_fake_server(answer) as fake_server:
        seamark = ScriptedSeamark(fake_server)
        yield seamark
