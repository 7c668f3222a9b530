"""Tests of the authorizer over recorded answers of Open Policy Agent, and of its failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import Forbidden, NoSuchTable, RetryLater
from seamark.metaserver.access.authorizer import Authorizer, GrantAuthorizer
from seamark.metaserver.access.policies.opening import open_authorizer
from seamark.metaserver.access.policies.policy import REQUESTS_MAX, PolicySlots
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.access.opa.recorded import ALLOW_PATH, BATCH_PATH, RECORDED_REQUESTS, UNDEFINED_PATH
from tests.api.client import SCHEMA, Api
from tests.api.rest.test_permissions import UsersApi
from tests.seeds import examples, first_seed
from tests.server.rig import run_server

ANN = Principal("oidc:ann", (Grant("oidc:ann", "writer"),), "oidc", ("oidc-group:shop",))
ORDERS, SALARIES, STAFF = (
    Securable((namespace,), "table", name)
    for namespace, name in (("shop", "orders"), ("shop", "salaries"), ("staff", "orders"))
)


class PolicyServer:
    """A server that returns recorded answers of Open Policy Agent, or the answer that a test sets."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.answer: web.Response | None = None
        """The answer to every request. If it is None, the server returns the recorded answers."""
        self.hangs = False
        self.closing = asyncio.Event()
        self.allowed_operations: frozenset[str] | None = None
        """The only operations that are allowed. If it is None, the server returns the recorded answers."""

    async def handle(self, request: web.Request) -> web.Response:
        question = (await request.json())["input"]
        self.requests.append((request.path, question))
        if self.hangs:
            await self.closing.wait()
        if self.answer is not None:
            return self.answer
        if self.allowed_operations is not None:
            is_allowed = question["operation"] in self.allowed_operations
            objects = question.get("objects", ())
            # The user may use each table except `salaries`.
            positions = [
                position
                for position, securable in enumerate(objects)
                if is_allowed and securable.get("name") != "salaries"
            ]
            return web.json_response({"result": positions if objects else is_allowed})
        for path, recorded_question, answer in RECORDED_REQUESTS:
            if (path, recorded_question) == (request.path, question):
                return web.json_response(answer)
        raise AssertionError(f"no answer is recorded for {question}")


@asynccontextmanager
async def run_policy_server(server: PolicyServer | None = None) -> AsyncIterator[PolicyServer]:
    server = server or PolicyServer()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.closing.set()
        await runner.cleanup()


@asynccontextmanager
async def open_authorizer_over(
    server: PolicyServer, clock: SimulatedClock | None = None, path: str = ALLOW_PATH, **settings: Any
) -> AsyncIterator[Authorizer]:
    options = {"opa_url": server.url + path, "opa_batch_url": server.url + BATCH_PATH, **settings}
    async with open_authorizer(
        Settings(**options), clock or SimulatedClock(1), GrantAuthorizer(None), ""
    ) as authorizer:
        yield authorizer


async def test_policy_restricts_what_the_grants_allow() -> None:
    async with run_policy_server() as server, open_authorizer_over(server) as authorizer:
        assert await authorizer.allows(ANN, "planTableScan", ORDERS)
        assert not await authorizer.allows(ANN, "planTableScan", SALARIES)
        assert not await authorizer.allows(ANN, "loadCredentials", STAFF)
        assert not await authorizer.allows(ANN, "dropTable", ORDERS)
        assert await authorizer.allows(ANN, "listTimeline", Securable())
        assert await authorizer.sees(ANN, [("shop",)]) == [True]
        assert await authorizer.allows_each(ANN, "tableExists", [SALARIES, ORDERS, STAFF]) == [False, True, False]
        with pytest.raises(Forbidden, match="the policy of Open Policy Agent does not allow it"):
            await authorizer.require(ANN, "dropTable", Securable(("shop",), "table", "orders"))
        assert authorizer.list_writable_namespaces(ANN) == ()


async def test_policy_gives_no_right_without_a_grant() -> None:
    async with run_policy_server() as server, open_authorizer_over(server) as authorizer:
        server.answer = web.json_response({"result": True})
        reader = Principal("oidc:ann", (Grant("oidc:ann", "read", ("shop",)),))
        assert not await authorizer.allows(reader, "updateTable", ORDERS)
        assert not await authorizer.allows(reader, "planTableScan", STAFF)
        assert await authorizer.sees(reader, [("staff",)]) == [False]
        assert server.requests == []
        with pytest.raises(Forbidden, match="seamark grant add oidc:ann plan"):
            await authorizer.require(reader, "planTableScan", STAFF)


@pytest.mark.parametrize("result", [False, None, "true", 1, {}, [], [True]])
async def test_only_true_allows_an_operation(result: Any) -> None:
    async with run_policy_server() as server, open_authorizer_over(server) as authorizer:
        server.answer = web.json_response({"result": result})
        assert not await authorizer.allows(ANN, "planTableScan", ORDERS)


async def test_undefined_rule_refuses_the_operation() -> None:
    async with run_policy_server() as server, open_authorizer_over(server, path=UNDEFINED_PATH) as authorizer:
        assert not await authorizer.allows(ANN, "planTableScan", ORDERS)


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500),
        web.Response(status=302, headers={"Location": "/"}),
        web.Response(text="{", content_type="application/json"),
        web.json_response({"result": [3]}),
        web.json_response({"result": [True]}),
        web.json_response({"result": {"0": True}}),
        web.json_response({"result": list(range(400_000))}),
    ],
)
async def test_invalid_answer_refuses_every_object_of_a_listing(answer: web.Response) -> None:
    async with run_policy_server() as server, open_authorizer_over(server) as authorizer:
        server.answer = answer
        with pytest.raises(RetryLater, match="The policy server gave no decision"):
            await authorizer.allows_each(ANN, "tableExists", [SALARIES, ORDERS, STAFF])


async def test_unreachable_policy_server_refuses_the_operation() -> None:
    async with run_policy_server() as server, open_authorizer_over(server, opa_timeout_s=0.05) as authorizer:
        server.hangs = True
        with pytest.raises(RetryLater):
            await authorizer.allows(ANN, "planTableScan", ORDERS)
    async with open_authorizer_over(server) as authorizer:  # Its port is closed.
        with pytest.raises(RetryLater):
            await authorizer.require(ANN, "planTableScan", ORDERS)


async def test_cached_decision_expires_and_applies_to_one_question() -> None:
    clock = SimulatedClock(1)
    async with run_policy_server() as server, open_authorizer_over(server, clock, opa_cache_entries=2) as authorizer:
        for _ in range(3):
            assert await authorizer.allows(ANN, "planTableScan", ORDERS)
            assert not await authorizer.allows(ANN, "planTableScan", SALARIES)
        assert len(server.requests) == 2
        clock.advance(5_001)  # One millisecond more than the 5 seconds for which a decision is cached by default
        assert await authorizer.allows(ANN, "planTableScan", ORDERS)
        assert len(server.requests) == 3
        assert not await authorizer.allows(ANN, "dropTable", ORDERS)
        assert not await authorizer.allows(ANN, "planTableScan", SALARIES)
        assert await authorizer.allows(ANN, "planTableScan", ORDERS)
        # The cache has two entries, so each of the last three questions evicted the oldest answer and is sent.
        assert len(server.requests) == 6
        server.answer = web.json_response({"result": False})
        other_principal = Principal("oidc:ann", ANN.grants, "oidc", ("oidc-group:other",))
        assert not await authorizer.allows(other_principal, "planTableScan", ORDERS)


async def test_listing_without_a_rule_for_lists_asks_about_each_object() -> None:
    async with run_policy_server() as server, open_authorizer_over(server, opa_batch_url="") as authorizer:
        server.allowed_operations = frozenset({"tableExists"})
        objects = [Securable(("shop",), "table", f"t{number}") for number in range(40)]
        assert await authorizer.allows_each(ANN, "tableExists", objects) == [True] * 40
        assert len(server.requests) == 40


async def test_server_asks_the_policy_about_requests_and_listings(tmp_path: Path) -> None:
    clock = SystemClock()
    async with open_store(f"sqlite:///{tmp_path}/seamark.db", clock=clock, queue_limit=10) as store:
        secrets = {"root": await create_token(store, clock, "root", None, [Grant("root", "admin")])}
    async with run_policy_server() as policy:
        policy.allowed_operations = frozenset({"createTable", "listTables", "tableExists", "namespaceExists"})
        settings: dict[str, Any] = {"opa_url": policy.url + ALLOW_PATH, "opa_batch_url": policy.url + BATCH_PATH}
        async with run_server(tmp_path, auth="token", opa_cache_s=0, **settings) as server:
            users_api = UsersApi(Api(server), secrets)
            for name in ("orders", "salaries"):
                body = {"name": name, "schema": SCHEMA}
                assert (await users_api("root", "POST", "/v1/namespaces/db/tables", body)).status == 200
            listing = await users_api("root", "GET", "/v1/namespaces/db/tables")
            assert [identifier["name"] for identifier in listing.json["identifiers"]] == ["orders"]
            assert (await users_api("root", "DELETE", "/v1/namespaces/db/tables/orders")).status == 403
            policy.answer = web.Response(status=500)
            answer = await users_api("root", "GET", "/v1/namespaces/db/tables/orders")
            assert answer.error[:2] == (503, "ServiceUnavailableException")
            assert int(answer.headers["Retry-After"]) >= 1


async def test_hidden_table_is_not_found() -> None:
    async with run_policy_server() as server, open_authorizer_over(server) as authorizer:
        server.allowed_operations = frozenset({"listTables"})
        with pytest.raises(NoSuchTable):
            await authorizer.require(ANN, "planTableScan", SALARIES)


class SlowPolicy(PolicyServer):
    """A policy that allows everything, but answers questions about ann only after `closing` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting_questions = 0

    async def handle(self, request: web.Request) -> web.Response:
        question = (await request.json())["input"]
        if question["principal"]["name"] == ANN.name:
            self.waiting_questions += 1
            await self.closing.wait()
        return web.json_response({"result": True})


async def test_listing_of_one_principal_does_not_delay_requests_of_other_principals() -> None:
    bob = Principal("oidc:bob", (Grant("oidc:bob", "reader"),))
    policy = SlowPolicy()
    async with (
        run_policy_server(policy),
        open_authorizer_over(policy, SimulatedClock(1), opa_batch_url="", opa_timeout_s=300) as authorizer,
    ):
        objects = [Securable(("shop",), "table", f"t{number}") for number in range(100)]
        listing = asyncio.create_task(authorizer.allows_each(ANN, "tableExists", objects))
        # One principal has at most half of the requests, so the other half is free for other principals.
        while policy.waiting_questions < REQUESTS_MAX // 2:
            await asyncio.sleep(0.01)
        for number in range(3):
            assert await authorizer.allows(bob, "planTableScan", Securable(("shop",), "table", f"t{number}"))
        assert policy.waiting_questions == REQUESTS_MAX // 2
        assert not listing.done()
        policy.closing.set()
        assert await listing == [True] * 100


async def test_policy_slots_are_shared_and_none_is_lost() -> None:
    rng, slots = random.Random(first_seed()), PolicySlots(4)
    served_holders: list[tuple[str, bool]] = []

    async def hold_slot(holder: str, *, is_listing: bool) -> None:
        with suppress(TimeoutError):
            async with slots.take(holder, is_listing=is_listing, wait_s=rng.choice((0.0, 300.0))):
                served_holders.append((holder, is_listing))
                slots.check_invariants()
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                slots.check_invariants()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(examples(5000, 300)):
        tasks.append(asyncio.create_task(hold_slot(rng.choice("abc"), is_listing=rng.random() < 0.5)))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
            slots.check_invariants()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert slots.is_free
    assert {holder for holder, _ in served_holders} == set("abc")


async def test_free_slot_goes_first_to_single_decisions_then_to_the_principal_with_the_fewest_slots() -> None:
    slots, may_end = PolicySlots(2), asyncio.Event()
    served_holders: list[tuple[str, bool]] = []

    async def hold_slot(holder: str, *, is_listing: bool) -> None:
        async with slots.take(holder, is_listing=is_listing, wait_s=300):
            served_holders.append((holder, is_listing))
            await may_end.wait()

    async with asyncio.TaskGroup() as group:
        for holder, is_listing in (("a", True), ("b", True), ("a", True), ("b", True), ("c", True), ("b", False)):
            group.create_task(hold_slot(holder, is_listing=is_listing))
            await asyncio.sleep(0)
        may_end.set()
    assert served_holders[:2] == [("a", True), ("b", True)]
    assert served_holders.index(("b", False)) < served_holders.index(("c", True))
    assert slots.is_free
