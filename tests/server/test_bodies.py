"""Tests of the cost of request bodies: size limits by operation, decompression, time, and fair shares."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import io
import json
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import ANY

import pytest
import structlog
from aiohttp import web

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater, TooManyRequests
from seamark.formats.runtime.fair_lock import FairLock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.api.http.bodies import get_body_limit
from seamark.metaserver.api.http.describe import Description, get_description
from seamark.metaserver.api.http.slots import HolderLimit, RequestSlot, WorkerLimits
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.server.rig import RunningServer, run_server
from tests.server.test_connections import RawConnection
from tests.waits import until

ROLES = {"rita": "reader", "ron": "reader", "wendy": "writer", "root": "admin", "nobody": ""}
TABLE = "/v1/namespaces/db/tables/t"


def build_head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", "")).encode()


def encode_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class BodyLogins:
    """A server, and the secrets of its users by name.

    The users are rita and ron (readers of `db`), wendy (a writer), root (an admin) and nobody (without any right).
    """

    def __init__(self, server: RunningServer, secrets: dict[str, str]) -> None:
        self.server = server
        self.secrets = secrets

    def build_header(self, name: str) -> str:
        return f"Authorization: Bearer {self.secrets[name]}"


@pytest.fixture
async def logins(tmp_path: Path) -> AsyncIterator[BodyLogins]:
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", requests_limit=8, body_timeout_s=120) as server:
        yield BodyLogins(server, secrets)


@pytest.fixture
async def short_timeout_logins(tmp_path: Path) -> AsyncIterator[BodyLogins]:
    """Yield the logins of a server that waits at most 3 seconds for a body."""
    secrets = await make_tokens(tmp_path)
    async with run_server(tmp_path, auth="token", requests_limit=8, body_timeout_s=3) as server:
        yield BodyLogins(server, secrets)


async def make_tokens(home: Path) -> dict[str, str]:
    clock, secrets = SystemClock(), {}
    async with open_store(f"sqlite:///{home}/seamark.db", clock=clock, queue_limit=10) as store:
        for name, role in (
            ("rita", "reader"),
            ("ron", "reader"),
            ("wendy", "writer"),
            ("root", "admin"),
            ("nobody", ""),
        ):
            grants = [Grant(name, role, () if role == "admin" else ("db",))] if role else []
            secrets[name] = await create_token(store, clock, name, None, grants)
    return secrets


@pytest.mark.parametrize("coding", ["identity", "gzip", "deflate"])
async def test_login_reads_only_a_small_body_of_an_unknown_client(logins: BodyLogins, coding: str) -> None:
    """The body is chunked, so that no header states its size. It is compressed, so that few bytes expand to many."""
    body = b"grant_type=client_credentials&client_secret=" + b"x" * (4 << 20)  # Far more than a login needs
    packed_body = {"identity": body, "gzip": gzip.compress(body), "deflate": zlib.compress(body)}[coding]
    headers = ["Content-Type: application/x-www-form-urlencoded", "Transfer-Encoding: chunked"]
    if coding != "identity":
        headers.append(f"Content-Encoding: {coding}")
    async with await RawConnection.open(logins.server) as raw_connection:
        await raw_connection.send(build_head("POST", "/v1/oauth/tokens", *headers))
        # The body never ends, so a server that waits for its end does not answer.
        raw_connection.writer.write(
            b"".join(encode_chunk(packed_body[start : start + 4096]) for start in range(0, len(packed_body), 4096))
        )
        status, answer = await raw_connection.read_answer()
        assert status == 400
        assert "too large" in json.loads(answer)["error_description"]


@pytest.mark.parametrize("has_length", [True, False])
async def test_body_limit_depends_on_the_operation(tmp_path: Path, has_length: bool) -> None:
    async with run_server(
        tmp_path, small_body_limit_bytes=2000, medium_body_limit_bytes=50_000, body_limit_bytes=100_000
    ) as server:
        for path, size, status in (
            ("/v1/namespaces", 3000, 413),
            (f"{TABLE}/metrics", 3000, 413),
            (f"{TABLE}/sign", 3000, 413),
            (f"{TABLE}/plan", 3000, 404),
            ("/v1/namespaces/db/tables", 3000, 400),
            ("/v1/namespaces/db/tables", 60_000, 413),
            ("/api/v1/tables/db/t/commit", 60_000, 400),
            ("/api/v1/tables/db/t/commit", 200_000, 413),
        ):
            # A status other than 413 means that the server has accepted the size.
            body = b'{"x":"' + b"y" * size + b'"}'
            async with await RawConnection.open(server) as raw_connection:
                if has_length:
                    await raw_connection.send(build_head("POST", path, f"Content-Length: {len(body)}"))
                    raw_connection.writer.write(body)
                else:
                    await raw_connection.send(build_head("POST", path, "Transfer-Encoding: chunked"))
                    raw_connection.writer.write(encode_chunk(body) + b"0\r\n\r\n")
                assert (path, (await raw_connection.read_answer())[0]) == (path, status)


MEDIUM_BODY_OPERATIONS = {
    *(
        "createTable",
        "updateTable",
        "commitTransaction",
        "createView",
        "replaceView",
        "putTable",
        "putView",
        "planTableScan",
    ),
    *(
        "explain",
        "explainQuery",
        "makeCubePlan",
        "makePlanTable",
        "makePlanView",
        "selectRows",
        "registerIndexFiles",
        "finishIndexBuild",
    ),
    *("recordIndexAudit", "quarantineIndexFile", "rebuildIndexRegistry", "listUnheldFiles"),
}
LARGE_BODY_OPERATIONS = {"appendRows", "appendRowsToTables", "commitChange", "lookupKeys", "readCubeGroups"}


def test_only_listed_operations_accept_more_than_a_mebibyte() -> None:
    settings = Settings()
    limits = {route.operation: get_body_limit(route.body_size, settings) for _, _, route in list_descriptions()}
    assert {operation for operation, limit in limits.items() if limit > 4 << 20} == LARGE_BODY_OPERATIONS
    assert {
        operation for operation, limit in limits.items() if limit > 1 << 20
    } == LARGE_BODY_OPERATIONS | MEDIUM_BODY_OPERATIONS
    assert limits["getToken"] == 16 << 10


@pytest.mark.parametrize(
    ("element", "unit"), [(b"[]", b"objects and arrays"), (b"{}", b"objects and arrays"), (b"1", b"values")]
)
async def test_body_with_very_many_short_values_is_rejected_before_it_is_parsed(
    tmp_path: Path, element: bytes, unit: bytes
) -> None:
    async with run_server(tmp_path) as server:
        for count, status in ((90_000, 400), (700_000, 413)):
            body = b'{"name":"t","schema":[' + (element + b",") * count + element + b"]}"
            async with server.http.post(server.url + "/v1/namespaces/db/tables", data=io.BytesIO(body)) as answer:
                assert (answer.status, unit in await answer.read()) == (status, status == 413)


async def test_principal_with_many_large_bodies_does_not_delay_other_principals() -> None:
    lock, served_holders = FairLock(), []

    async def take_turn(holder: str) -> None:
        async with lock.hold(holder):
            served_holders.append(holder)
            await asyncio.sleep(0)

    hostile_tasks = [asyncio.create_task(take_turn("eve")) for _ in range(50)]
    await asyncio.sleep(0)
    await asyncio.gather(take_turn("ann"), take_turn("bob"), *hostile_tasks)
    # The lock alternates between the holders, so ann and bob wait for at most two of eve's tasks.
    assert sorted(served_holders[:4]) == ["ann", "bob", "eve", "eve"]
    assert len(served_holders) == 52


async def test_cancelled_request_keeps_its_slot_until_its_thread_ends() -> None:
    """If it released the slot earlier, a client that sends and disconnects repeatedly would occupy all threads."""
    lock, has_started, may_end = FairLock(), threading.Event(), threading.Event()
    running_count = running_max = 0

    def wait_and_return_one() -> int:
        nonlocal running_count, running_max
        running_count += 1
        running_max = max(running_max, running_count)
        has_started.set()
        assert may_end.wait(60)
        running_count -= 1
        return 1

    cancelled_tasks = [asyncio.create_task(lock.run("eve", wait_and_return_one)) for _ in range(3)]
    assert await asyncio.to_thread(has_started.wait, 60)
    other_task = asyncio.create_task(lock.run("ann", wait_and_return_one))
    await asyncio.sleep(0)
    for task in cancelled_tasks:
        task.cancel()
    assert await asyncio.gather(*cancelled_tasks, return_exceptions=True) == [ANY] * 3
    assert all(task.cancelled() for task in cancelled_tasks)
    assert not other_task.done()
    assert not lock.is_free
    may_end.set()
    assert await other_task == 1
    assert (running_count, running_max) == (0, 1)
    assert lock.is_free
    with pytest.raises(ZeroDivisionError):
        await lock.run("eve", lambda: 1 // 0)
    assert lock.is_free


async def test_decompression_bomb_is_rejected_at_the_limit(tmp_path: Path) -> None:
    async with (
        run_server(tmp_path, body_limit_bytes=1 << 20) as server,
        await RawConnection.open(server) as raw_connection,
    ):
        bomb = gzip.compress(b" " * (64 << 20))
        await raw_connection.send(
            build_head("POST", "/v1/namespaces", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}") + bomb
        )
        assert (await raw_connection.read_answer())[0] == 413


async def test_body_that_expands_hundreds_of_times_is_rejected_early(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server, await RawConnection.open(server) as raw_connection:
        bomb = gzip.compress(b" " * (60 << 20))
        await raw_connection.send(
            build_head("POST", "/v1/namespaces/db/tables", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}")
        )
        await raw_connection.send(bomb)
        status, answer = await raw_connection.read_answer()
        assert (status, "200 times" in answer.decode()) == (413, True)


async def test_slow_clients_take_no_slots_and_are_disconnected(short_timeout_logins: BodyLogins) -> None:
    logins = short_timeout_logins
    async with AsyncExitStack() as stack:
        slow_connections = []
        for _ in range(4):
            raw_connection = await stack.enter_async_context(await RawConnection.open(logins.server))
            await raw_connection.send(
                build_head("POST", "/v1/namespaces/db/tables", logins.build_header("wendy"), "Content-Length: 1000")
                + b"{"
            )
            slow_connections.append(raw_connection)
        await asyncio.sleep(0.2)
        good_connection = await stack.enter_async_context(await RawConnection.open(logins.server))
        for _ in range(5):
            await good_connection.send(build_head("GET", "/v1/namespaces/db/tables", logins.build_header("rita")))
            assert (await good_connection.read_answer())[0] == 200
        body = b'{"namespace":["db","n"]}'
        await good_connection.send(
            build_head("POST", "/v1/namespaces", logins.build_header("root"), f"Content-Length: {len(body)}")
        )
        await good_connection.send(body[:5])
        await asyncio.sleep(0.1)
        await good_connection.send(body[5:])
        assert (await good_connection.read_answer())[0] == 200
        for raw_connection in slow_connections:
            status, answer = await raw_connection.read_answer()
            assert status == 408
            assert json.loads(answer)["error"]["type"] == "RequestTimeoutException"


async def test_one_principal_cannot_use_the_whole_limit_of_body_bytes(logins: BodyLogins) -> None:
    existing_limits = _list_instances(WorkerLimits)
    async with AsyncExitStack() as stack:
        statuses = []
        for number in range(8):
            raw_connection = await stack.enter_async_context(await RawConnection.open(logins.server))
            head = build_head("POST", "/v1/namespaces/db/tables", logins.build_header("wendy"), "Content-Length: 1000")
            await raw_connection.send(head + b"{")
            if number >= 4:  # A principal may have half of the 8 requests of the server.
                statuses.append((await raw_connection.read_answer())[0])
            else:
                await until(
                    lambda taken_slots=number + 1: (
                        sum(limits.reading.taken for limits in existing_limits) == taken_slots
                    )
                )
        assert statuses == [429] * 4


async def test_one_principal_cannot_use_all_slots(logins: BodyLogins, monkeypatch: pytest.MonkeyPatch) -> None:
    may_list = asyncio.Event()
    tables = type(logins.server.components.catalog.tables)
    list_tables = tables.list

    async def wait_and_list(self: object, namespace: tuple[str, ...], *args: object) -> object:
        if not may_list.is_set():
            await may_list.wait()
        return await list_tables(self, namespace, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(tables, "list", wait_and_list)

    async def send_request(name: str, path: str) -> int:
        headers = {"Authorization": f"Bearer {logins.secrets[name]}"}
        async with logins.server.http.get(logins.server.url + path, headers=headers) as answer:
            assert (answer.status == 429) is ("Retry-After" in answer.headers)
            return answer.status

    held_tasks = [asyncio.create_task(send_request("rita", "/v1/namespaces/db/tables")) for _ in range(10)]
    await until(lambda: sum(task.done() for task in held_tasks) == 6)  # The other 4 are half of the server's 8 slots.
    assert await send_request("ron", "/v1/namespaces/db") == 200
    may_list.set()
    assert sorted(await asyncio.gather(*held_tasks)) == [200] * 4 + [429] * 6


async def test_server_without_logins_has_no_share_for_each_principal(tmp_path: Path) -> None:
    limits = WorkerLimits(requests=4, watchers=4, body_bytes=100)
    slots = [RequestSlot(limits, None, "working") for _ in range(4)]
    with pytest.raises(RetryLater) as error:
        RequestSlot(limits, None, "working")
    assert error.value.code == 503
    for slot in slots:
        slot.leave()
    limits.check_invariants()


def test_slots_and_bytes_are_released_after_any_outcome() -> None:
    limits = WorkerLimits(requests=4, watchers=4, body_bytes=100)
    slot = RequestSlot(limits, "ann", "working")
    slot.begin_reading()
    assert (limits.working.taken, limits.reading.taken) == (0, 1)
    slot.reserve_memory(50)  # A principal may keep half of the bytes.
    with pytest.raises(TooManyRequests):
        slot.reserve_memory(1)
    other_slots = [RequestSlot(limits, name, "working") for name in ("bob", "bob", "eve", "eve")]
    other_slots[0].reserve_memory(0)  # An empty body needs no bytes of the limit.
    with pytest.raises(RetryLater):  # The four other requests have all slots.
        slot.end_reading()
    limits.check_invariants()
    for request_slot in (slot, *other_slots):
        request_slot.leave()
        request_slot.leave()  # A second call has no effect.
    limits.check_invariants()
    assert {bound.taken for bound in vars(limits).values() if isinstance(bound, HolderLimit)} == {0}


async def test_client_that_disconnects_before_its_body_causes_no_server_error(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as events:
        async with run_server(tmp_path) as server:
            async with await RawConnection.open(server) as raw_connection:
                await raw_connection.send(build_head("POST", "/v1/namespaces", "Content-Length: 1000") + b"{")
                await asyncio.sleep(0.1)
            async with asyncio.timeout(60):
                while b'operation="createNamespace",status="499"' not in server.components.metrics.render():
                    await asyncio.sleep(0.02)
    assert not [event for event in events if event["event"] == "unexpected error"]
    assert [event["status"] for event in events if event.get("operation") == "createNamespace"] == [499]


def list_descriptions() -> list[tuple[str, str, Description]]:
    """Return (method, template, description) of every route."""
    app = web.Application()
    add_routes(app, EXTENSIONS)
    return [
        (route.method, route.resource.canonical, get_description(route.handler))
        for route in app.router.routes()
        if route.resource is not None and route.method != "*"
    ]


def list_routes() -> list[tuple[str, str, str]]:
    """Return (method, template, operation) of every route that requires a login."""
    return [
        (method, template, description.operation)
        for method, template, description in list_descriptions()
        if not description.public
    ]


WITHOUT_NAMESPACE = {
    "getConfig",
    "listNamespaces",
    "listQueryHistory",
    "listStreams",
    "metrics",
    "listGrants",
    "loadSqlState",
}
"""Routes that every login may use, because they need no right on a namespace."""
NAMESPACE_IN_QUERY = {"removeGrant"}
"""Routes whose namespace is in the query. A request without it is invalid."""


@pytest.mark.parametrize("principal", ["nobody", "stranger"])
async def test_every_route_checks_rights_before_it_reads_the_body(logins: BodyLogins, principal: str) -> None:
    """The body is announced but never sent, so a server that waits for it does not answer in time.

    The principal `nobody` has a login without rights, and `stranger` sends no login.
    """
    listed_routes = list_routes()
    assert len(listed_routes) > 60  # The list has the routes of the specification and those of Seamark.
    checked_operations = set()
    for method, template, operation in listed_routes:
        path = template
        for variable, value in (("namespace", "db"), ("table", "t"), ("view", "v"), ("function", "f")):
            path = path.replace(f"{{{variable}}}", value)
        path = "/".join("x" if part.startswith("{") else part for part in path.split("/"))
        # Every login may use the routes without a namespace. A request without its query is invalid for every login.
        if principal == "nobody" and operation in WITHOUT_NAMESPACE | NAMESPACE_IN_QUERY:
            continue
        headers = ["Content-Length: 1000"] if method not in ("GET", "HEAD") else []
        if principal == "nobody":
            headers.append(logins.build_header("nobody"))
        async with await RawConnection.open(logins.server) as raw_connection:
            await raw_connection.send(build_head(method, path, *headers))
            async with asyncio.timeout(60):
                status = int((await raw_connection.reader.readuntil(b"\r\n\r\n")).split()[1])
        checked_operations.add(operation)
        allowed_statuses = {401} if principal == "stranger" else {403, 404}
        assert status in allowed_statuses, (method, path, operation, status)
    assert {"commitTransaction", "renameTable", "createNamespace", "addGrant", "undrop"} <= checked_operations


async def test_rights_for_changes_are_checked_before_the_body(logins: BodyLogins) -> None:
    """Rita may only read, so the server rejects her changes with 403 before their bodies arrive."""
    for path in (
        "/v1/namespaces",
        "/v1/namespaces/db/tables",
        TABLE,
        "/v1/tables/rename",
        "/v1/views/rename",
        "/v1/transactions/commit",
        "/api/v1/dropped/x/undrop",
    ):
        async with await RawConnection.open(logins.server) as raw_connection:
            await raw_connection.send(build_head("POST", path, logins.build_header("rita"), "Content-Length: 1000"))
            async with asyncio.timeout(60):
                assert (await raw_connection.read_answer())[0] == 403


async def test_all_slots_are_released_after_the_other_tests(logins: BodyLogins) -> None:
    for path in ("/v1/namespaces/db/tables", TABLE, "/nowhere"):
        for name in ("rita", "nobody"):
            headers = {"Authorization": f"Bearer {logins.secrets[name]}"}
            await logins.server.http.post(logins.server.url + path, headers=headers, data=b"{}")
    existing_limits = _list_instances(WorkerLimits)
    assert existing_limits
    for limits in existing_limits:
        limits.check_invariants()
        assert (limits.working.taken, limits.reading.taken, limits.bodies.taken) == (0, 0, 0)


def _list_instances(kind: type[WorkerLimits]) -> list[WorkerLimits]:
    return [instance for instance in gc.get_objects() if isinstance(instance, kind)]


@pytest.mark.parametrize("path", [TABLE, "/nowhere"])
async def test_flood_of_unknown_clients_fills_neither_the_log_nor_the_audit_log(logins: BodyLogins, path: str) -> None:
    with structlog.testing.capture_logs() as events:
        for _ in range(200):
            async with logins.server.http.get(logins.server.url + path) as answer:
                assert answer.status == 401
    # The server limits the rate of these log lines and records, so it writes at most a quarter of the 200 refusals.
    assert 10 <= sum(event["event"] == "request" for event in events) <= 50
    await logins.server.components.audit.flush()
    records = await logins.server.components.store.read_audit_records(after_id=None, limit=1000)
    assert len(records) <= 50


async def test_bytes_after_a_rejected_request_are_not_read(logins: BodyLogins) -> None:
    """The buffers of the operating system fill, because the server does not read the rest of the body."""
    async with await RawConnection.open(logins.server) as raw_connection:
        await raw_connection.send(build_head("POST", f"{TABLE}/sign", "Content-Length: 1000000000"))
        assert (await raw_connection.read_answer())[0] == 401
        sent_bytes = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(60):
                while sent_bytes < 100 << 20:
                    await raw_connection.send(b" " * 65536)
                    sent_bytes += 65536
        assert sent_bytes < 32 << 20  # The buffers of the operating system are smaller than 32 MiB.
