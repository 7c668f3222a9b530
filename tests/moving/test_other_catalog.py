"""Tests of the client with which a federated warehouse reads the other catalog."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.catalog.context import CatalogContext
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import EntryKind
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.warehouses.federation import breaker, other_catalog
from seamark.metaserver.warehouses.federation.federated_store import FederatedStore
from seamark.metaserver.warehouses.federation.other_catalog import OtherCatalog, open_other_catalog
from tests.waits import PATIENCE_S


class MovedClock(SystemClock):
    """A clock whose monotonic time a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@dataclass
class FakeCatalog:
    """A catalog that answers with a function, and records the requests that it received.

    Attributes:
        overrides: The settings that the catalog sends to its clients. The client must not follow the internal address.
    """

    make_answer: Callable[[web.Request], Any]
    requests: list[web.Request] = field(default_factory=list)
    overrides: dict[str, str] = field(default_factory=lambda: {"uri": "http://169.254.169.254/", "prefix": "lake"})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        await request.read()
        if request.path == "/v1/config":
            return web.json_response({"overrides": self.overrides})
        answer = self.make_answer(request)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def list_paths(self) -> list[str]:
        return [request.path_qs for request in self.requests]


@asynccontextmanager
async def serve_answers(
    make_answer: Callable[[web.Request], Any], **settings: Any
) -> AsyncIterator[tuple[OtherCatalog, FakeCatalog, MovedClock]]:
    """Serve a catalog that answers by `make_answer`, and yield a client of it, the catalog and the clock of the client.

    `settings` are settings of the client without their prefix `federation_`.
    """
    fake_catalog, clock = FakeCatalog(make_answer), MovedClock()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake_catalog.handle)
    async with TestServer(app) as server:
        uri = str(server.make_url("/")).rstrip("/")
        prefixed_settings = {f"federation_{name}": value for name, value in settings.items()}
        async with open_other_catalog(Settings(federation_uri=uri, **prefixed_settings), clock) as catalog:
            yield catalog, fake_catalog, clock


async def find_orders(catalog: OtherCatalog) -> str | None:
    return await catalog.find_entry(EntryKind.TABLE, ("shop",), "orders")


async def test_answer_is_cached_for_a_time_and_then_checked_by_its_etag() -> None:
    def answer(request: web.Request) -> Any:
        if request.headers.get("If-None-Match") == "v1":
            return web.Response(status=304)
        return web.json_response({"metadata-location": "file:///t/v1.json"}, headers={"ETag": "v1"})

    async with serve_answers(answer, fresh_s=5) as (catalog, fake_catalog, clock):
        for now_s, request_count in ((0, 1), (4, 1), (6, 2), (10, 2), (12, 3)):
            clock.now_s = now_s
            assert await find_orders(catalog) == "file:///t/v1.json"
            assert len(fake_catalog.requests) - 1 == request_count, now_s
        assert fake_catalog.list_paths()[1] == "/v1/lake/namespaces/shop/tables/orders?snapshots=refs"


async def test_concurrent_reads_of_one_name_share_a_request() -> None:
    async with serve_answers(lambda _: {"metadata-location": "file:///t/v1.json"}, fresh_s=0) as (
        catalog,
        fake_catalog,
        _,
    ):
        await catalog.list_namespaces(())
        await asyncio.gather(*(find_orders(catalog) for _ in range(10)))
        # The configuration, the list of namespaces, and the table.
        assert len(fake_catalog.requests) == 3


async def test_redirects_and_the_uri_of_the_configuration_are_not_followed() -> None:
    def answer(request: web.Request) -> Any:
        return web.Response(status=302, headers={"Location": "/secret"})

    async with serve_answers(answer) as (catalog, fake_catalog, _):
        with pytest.raises(RetryLater, match="answers 302"):
            await find_orders(catalog)
        assert "/secret" not in fake_catalog.list_paths()


@pytest.mark.parametrize("prefix", ["../../admin", "lake/%2E%2e/x", "lake\\..", "lake?x", "lake#"])
async def test_prefix_that_leads_to_other_paths_of_the_host_is_refused(prefix: str) -> None:
    async with serve_answers(lambda _: {}) as (catalog, fake_catalog, _clock):
        fake_catalog.overrides = {"prefix": prefix}
        with pytest.raises(RetryLater, match="is not a plain path"):
            await find_orders(catalog)
        assert len(fake_catalog.requests) == 1


async def test_credential_is_exchanged_for_tokens_and_never_shown() -> None:
    issued_tokens: list[str] = []

    def answer(request: web.Request) -> Any:
        if request.path == "/v1/oauth/tokens":
            issued_tokens.append(f"token-{len(issued_tokens)}")
            return {"access_token": issued_tokens[-1], "expires_in": 3600}
        if request.headers.get("Authorization") != "Bearer token-1":
            return web.json_response({"error": {"message": "client:s3cret"}}, status=401)
        return {"metadata-location": "file:///t/v1.json"}

    async with serve_answers(answer, credential="client:s3cret") as (catalog, _, clock):
        # The server refuses the first token, so the client requests a second token.
        assert await find_orders(catalog) == "file:///t/v1.json"
        assert issued_tokens == ["token-0", "token-1"]
        clock.now_s = 4000  # The second token expired after 3,600 seconds.
        with pytest.raises(RetryLater, match="check the login") as refusal:
            await find_orders(catalog)
        assert "s3cret" not in str(refusal.value)
        assert len(issued_tokens) == 4  # The catalog also refused the third and the fourth token.


async def test_listings_are_read_to_their_last_page() -> None:
    def answer(request: web.Request) -> Any:
        token = request.query["pageToken"]
        if request.path.endswith("/namespaces"):
            names = [[*request.query.get("parent", "").split("\x1f"), "b"]] if token else [["a", "z"]]
            return {"namespaces": names, "next-page-token": None if token else "2"}
        names = ["t2"] if token else ["t9", "t1"]
        identifiers = [{"namespace": [], "name": name} for name in names]
        return {"identifiers": identifiers, "next-page-token": None if token else "2"}

    async with serve_answers(answer) as (catalog, _, _clock):
        assert await catalog.list_entries(EntryKind.TABLE, ("a",)) == ["t1", "t2", "t9"]
        assert await catalog.list_namespaces(("a",)) == [("a", "b"), ("a", "z")]


async def test_level_that_contains_the_separator_is_not_a_nested_namespace() -> None:
    def answer(request: web.Request) -> Any:
        if request.path.endswith("/namespaces"):
            return {"namespaces": [["hr"], ["hr.pay"]]}
        if request.path.endswith("/hr.pay/tables"):
            return {"identifiers": [{"namespace": ["hr", "pay"], "name": "salaries"}]}
        return {"metadata-location": "file:///t/v1.json", "properties": {}}

    async with serve_answers(answer) as (catalog, fake_catalog, _):
        fake_catalog.overrides["namespace-separator"] = "%2E"
        for path, is_shown in ((("hr", "pay"), True), (("hr.pay",), False)):
            assert (await catalog.find_namespace(path) is not None) == is_shown
            assert (await catalog.find_entry(EntryKind.TABLE, path, "salaries") is not None) == is_shown
            assert (await catalog.list_entries(EntryKind.TABLE, path) == ["salaries"]) == is_shown
        assert await catalog.list_namespaces(()) == [("hr",)]
        assert await catalog.list_namespaces(("hr.pay",)) == []


async def test_answers_that_are_large_or_invalid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_catalog, "_ANSWER_BYTES_MAX", 100)
    bodies = iter(("x" * 200, "[", '{"metadata-location": null}'))
    async with serve_answers(lambda _: web.Response(text=next(bodies))) as (catalog, _, _clock):
        for reason in ("more than 100 bytes", "not valid", "does not say where the metadata file"):
            with pytest.raises(RetryLater, match=reason):
                await find_orders(catalog)


async def test_error_names_a_catalog_that_does_not_answer() -> None:
    async with open_other_catalog(Settings(federation_uri="http://127.0.0.1:1"), SystemClock()) as catalog:
        with pytest.raises(RetryLater, match=r"http://127\.0\.0\.1:1 of this warehouse does not answer"):
            await find_orders(catalog)


async def test_all_requests_share_a_failed_login_for_some_seconds() -> None:
    logins = 0

    async def answer_login(request: web.Request) -> web.Response:
        nonlocal logins
        logins += 1
        return web.Response(status=500)

    app, clock = web.Application(), MovedClock()
    app.router.add_route("*", "/{path:.*}", answer_login)
    async with TestServer(app) as server:
        uri = str(server.make_url("/")).rstrip("/")
        settings = Settings(federation_uri=uri, federation_credential="id:secret")
        async with open_other_catalog(settings, clock) as catalog:
            for now_s, login_count in ((0.0, 1), (4.0, 1), (6.0, 2)):
                clock.now_s = now_s
                reads = (catalog.find_entry(EntryKind.TABLE, ("db",), f"t{number}") for number in range(20))
                answers = await asyncio.gather(*reads, return_exceptions=True)
                assert all(isinstance(answer, RetryLater) for answer in answers), answers
                assert logins == login_count, now_s


async def test_requests_that_wait_for_the_other_catalog_are_limited_in_number_and_time() -> None:
    is_closing, is_waiting = asyncio.Event(), asyncio.Event()

    async def wait_until_closing(request: web.Request) -> web.Response:
        is_waiting.set()
        await is_closing.wait()
        return web.Response(status=500)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", wait_until_closing)
    async with TestServer(app) as server:
        settings = Settings(
            federation_uri=str(server.make_url("/")).rstrip("/"), federation_requests_limit=3, federation_timeout_s=300
        )
        async with open_federated_store(settings) as store:
            loads = [store.load_entry(EntryKind.TABLE, ("db",), f"t{number}") for number in range(2)]
            running_requests = [asyncio.create_task(work) for work in (*loads, store.list_namespaces((), None, 10))]
            await is_waiting.wait()
            with pytest.raises(RetryLater, match="federation_requests_limit"):
                await store.load_namespace(("db",))
            assert not any(task.done() for task in running_requests)
            async with open_federated_store(replace(settings, federation_timeout_s=0.1)) as other_store:
                with pytest.raises(RetryLater, match=r"did not answer within 0.1 seconds|does not answer"):
                    await other_store.load_namespace(("db",))
            is_closing.set()
            outcomes = await asyncio.gather(*running_requests, return_exceptions=True)
            assert all(isinstance(outcome, RetryLater) and "answers 500" in outcome.message for outcome in outcomes), (
                outcomes
            )


async def test_request_to_a_silent_catalog_ends_long_before_its_time_limit() -> None:
    is_closing = asyncio.Event()

    async def begin_answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/config":
            return web.json_response({})
        response = web.StreamResponse()
        if request.path.endswith("stalled"):
            await response.prepare(request)
            await response.write(b"{")
        await is_closing.wait()
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", begin_answer)
    async with TestServer(app) as server:
        uri = str(server.make_url("/")).rstrip("/")
        settings = Settings(federation_uri=uri, federation_timeout_s=300, federation_read_timeout_s=0.2)
        async with open_federated_store(settings) as store, asyncio.timeout(60):
            for name in ("silent", "stalled"):
                with pytest.raises(RetryLater, match=r"sent nothing for 0\.2 seconds") as error:
                    await store.load_entry(EntryKind.TABLE, ("db",), name)
                assert (error.value.code, error.value.type) == (503, "ServiceUnavailableException")
        is_closing.set()


async def test_clients_do_not_wait_for_a_catalog_that_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog answers, accepts requests without an answer, and answers again."""
    monkeypatch.setattr(breaker, "PAUSE_S", 0.01)
    is_silent, is_closing, paths = False, asyncio.Event(), list[str]()

    async def answer_or_hang(request: web.Request) -> web.StreamResponse:
        paths.append(request.path)
        if is_silent:
            await is_closing.wait()
        return web.json_response({} if request.path == "/v1/config" else {"properties": {}, "namespaces": [["db"]]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer_or_hang)
    async with TestServer(app) as server:
        uri = str(server.make_url("/")).rstrip("/")
        settings = Settings(
            federation_uri=uri, federation_timeout_s=300, federation_read_timeout_s=0.2, federation_fresh_s=0
        )
        async with open_federated_store(settings) as store, asyncio.timeout(PATIENCE_S):
            assert await store.load_namespace(("db",)) is not None
            is_silent = True
            sent_count = -1  # The loop ends when the client sends no more requests.
            while sent_count != (sent_count := sum(path != "/v1/config" for path in paths)):
                with pytest.raises(RetryLater, match="sent nothing"):
                    await store.load_namespace(("db",))
            for _ in range(100):  # These requests do not reach the catalog.
                with pytest.raises(RetryLater, match="sent nothing"):
                    await store.load_namespace(("db",))
            assert sum(path != "/v1/config" for path in paths) == sent_count
            is_silent = False
            while True:
                with suppress(RetryLater):
                    assert await store.load_namespace(("db",)) is not None
                    break
                await asyncio.sleep(0.01)
        is_closing.set()


async def test_slow_object_does_not_refuse_requests_for_other_objects() -> None:
    is_closing = asyncio.Event()

    async def answer_or_hang(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("slow"):
            await is_closing.wait()
        answer = {"properties": {}, "namespaces": [["db"], ["slow"]]}
        return web.json_response({} if request.path == "/v1/config" else answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer_or_hang)
    async with TestServer(app) as server:
        uri = str(server.make_url("/")).rstrip("/")
        settings = Settings(federation_uri=uri, federation_read_timeout_s=2.0, federation_fresh_s=0)
        async with open_federated_store(settings) as store, asyncio.timeout(PATIENCE_S):
            with pytest.raises(RetryLater, match="sent nothing"):
                await store.load_namespace(("slow",))
            for _ in range(5):
                assert await store.load_namespace(("db",)) is not None
        is_closing.set()


async def test_breaker_survives_a_failed_probe_and_begins_no_task_after_its_end() -> None:
    outcomes: list[bool | Exception] = [ValueError("unexpected"), False, True]

    async def is_answering() -> bool:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    catalog_breaker = breaker.CatalogBreaker(is_answering)
    catalog_breaker.report_failure("no answer")
    catalog_breaker.check()
    async with asyncio.timeout(PATIENCE_S):
        while outcomes:
            await asyncio.sleep(0.01)
        with suppress(RetryLater):
            catalog_breaker.check()
    await catalog_breaker.close()
    catalog_breaker.report_failure("no answer")
    await asyncio.sleep(0)
    catalog_breaker.check()
    assert not outcomes


@asynccontextmanager
async def open_federated_store(settings: Settings) -> AsyncIterator[FederatedStore]:
    async with open_other_catalog(settings, SystemClock()) as catalog:
        store = FederatedStore(cast("PointerStore", None), catalog)
        store.connect_catalog(cast("CatalogContext", None))
        yield store


async def test_cached_answers_have_a_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_catalog, "_ANSWERS_BYTES_MAX", 20_000)  # The size of two listings of 100 names.

    def answer(request: web.Request) -> Any:
        return {"identifiers": [{"name": f"{request.path[-20:]}-{number}"} for number in range(100)]}

    async with serve_answers(answer, fresh_s=3600) as (catalog, fake_catalog, _):
        for _ in range(2):
            for number in range(5):
                assert len(await catalog.list_entries(EntryKind.TABLE, (f"n{number}",))) == 100
        # The configuration, and five listings twice.
        assert len(fake_catalog.requests) == 11, "two listings fit, and the oldest is evicted first"
        assert len(await catalog.list_entries(EntryKind.TABLE, ("n4",))) == 100
        assert len(fake_catalog.requests) == 11
