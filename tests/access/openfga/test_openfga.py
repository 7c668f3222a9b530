"""Tests of the authorizer over OpenFGA: its decisions with a real server, and its failures."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import web
from structlog.testing import capture_logs

from seamark.formats.runtime.clock import SimulatedClock, SystemClock
from seamark.formats.runtime.errors import ConfigError, Forbidden, RetryLater
from seamark.metaserver.access.authorizer import RULES, Authorizer, GrantAuthorizer, Scope, allows_operation
from seamark.metaserver.access.policies.openfga import name_group, name_object, name_user
from seamark.metaserver.access.policies.opening import open_authorizer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.settings.sources import check_consistency
from seamark.metaserver.store.model import Grant
from tests.access.openfga.model import PATH, build_model, name_relation
from tests.access.test_rights_matrix import OBJECTS, PRIVILEGES, Right
from tests.seeds import examples, first_seed
from tests.services.process import CACHE, ManagedProcess, ServiceFailed, choose_free_port, is_http_ok

ORDERS = Securable(("shop",), "table", "orders")
SALARIES = Securable(("shop",), "table", "salaries")
ADMIN = (Grant("p", "admin", (), "server"),)
TUPLES_PER_WRITE = 100


class RelationServer:
    """A server that answers batch checks as OpenFGA does.

    Attributes:
        allowed: The allowed (relation, object) pairs.
        requests: The bodies of the received requests.
        answer: The answer to every request, or None to check the pairs.
        failing: Objects for which a check fails.
        hangs: If True, the server does not answer before `closing` is set.
    """

    def __init__(self) -> None:
        self.url = ""
        self.allowed: set[tuple[str, str]] = set()
        self.requests: list[dict[str, Any]] = []
        self.answer: web.Response | None = None
        self.failing: set[str] = set()
        self.hangs = False
        self.closing = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        assert request.path == "/stores/store1/batch-check"
        assert request.headers.get("Authorization", "Bearer secret") == "Bearer secret"
        assert len(body["checks"]) <= 50  # OpenFGA's default limit of checks in a request
        if self.hangs:
            await self.closing.wait()
        if self.answer is not None:
            return self.answer
        keys = {check["correlation_id"]: check["tuple_key"] for check in body["checks"]}
        decisions = {
            number: {"error": {"message": "resolution depth exceeded"}}
            if key["object"] in self.failing
            else {"allowed": (key["relation"], key["object"]) in self.allowed}
            for number, key in keys.items()
        }
        return web.json_response({"result": decisions})


@asynccontextmanager
async def run_relation_server() -> AsyncIterator[RelationServer]:
    server = RelationServer()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        server.closing.set()
        await runner.cleanup()


@asynccontextmanager
async def open_authorizer_over(
    url: str, store: str = "store1", clock: Any = None, **settings: Any
) -> AsyncIterator[Authorizer]:
    options = {"openfga_url": url, "openfga_store_id": store, "openfga_timeout_s": 60.0, **settings}
    async with open_authorizer(
        Settings(**options), clock or SimulatedClock(1), GrantAuthorizer(None), ""
    ) as authorizer:
        yield authorizer


async def test_operation_needs_the_grants_and_each_relation(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    reader = Principal("oidc:ann", (Grant("oidc:ann", "reader"),), "oidc", ("oidc-group:shop",))
    writer = Principal("oidc:bob", (Grant("oidc:bob", "writer"),))
    async with (
        run_relation_server() as server,
        open_authorizer_over(
            server.url,
            openfga_token_file=str(token),
            openfga_model_id="model1",
            openfga_consistency="higher_consistency",
        ) as authorizer,
    ):
        server.allowed = {
            ("can_plan", "table:_/shop/orders"),
            ("can_write", "table:_/shop/orders"),
            ("can_drop", "table:_/shop/salaries"),
            ("can_list", "namespace:_/shop"),
        }
        assert await authorizer.allows(reader, "planTableScan", ORDERS)
        assert not await authorizer.allows(reader, "planTableScan", SALARIES)
        assert server.requests[0] == {
            "authorization_model_id": "model1",
            "consistency": "HIGHER_CONSISTENCY",
            "checks": [
                {
                    "tuple_key": {"user": "user:oidc%3Aann", "relation": "can_plan", "object": "table:_/shop/orders"},
                    "contextual_tuples": {
                        "tuple_keys": [
                            {"user": "user:oidc%3Aann", "relation": "member", "object": "group:oidc-group%3Ashop"},
                            {"user": "server:_", "relation": "parent", "object": "warehouse:_"},
                            {"user": "warehouse:_", "relation": "parent", "object": "namespace:_/shop"},
                            {"user": "namespace:_/shop", "relation": "parent", "object": "table:_/shop/orders"},
                        ]
                    },
                    "correlation_id": "0",
                }
            ],
        }
        request_count = len(server.requests)
        assert not await authorizer.allows(reader, "updateTable", ORDERS), "the grants do not allow it"
        assert len(server.requests) == request_count
        assert await authorizer.allows(writer, "updateTable", ORDERS)
        assert not await authorizer.allows(writer, "renameTable", SALARIES), "it needs drop and write"
        assert await authorizer.allows_each(reader, "planTableScan", [SALARIES, ORDERS]) == [False, True]
        assert await authorizer.sees(reader, [("shop",), ("staff",)]) == [True, False]
        server.allowed.add(("can_browse", "table:_/shop/orders"))
        with pytest.raises(Forbidden, match="the policy of OpenFGA does not allow it"):
            await authorizer.require(writer, "dropTable", ORDERS)
        tables = [Securable(("shop",), "table", f"t{number}") for number in range(120)]
        server.allowed |= {("can_browse", f"table:_/shop/t{number}") for number in range(0, 120, 7)}
        expected = [number % 7 == 0 for number in range(120)]
        assert await authorizer.allows_each(reader, "tableExists", tables) == expected


@pytest.mark.parametrize(
    "answer",
    [
        web.Response(status=500),
        web.Response(text="{", content_type="application/json"),
        web.json_response([]),
        web.json_response({}),
        web.json_response({"result": {}}),
        web.json_response({"result": {"0": {}}}),
        web.json_response({"result": {"0": {"allowed": "true"}}}),
        web.json_response({"result": {"0": {"allowed": True, "error": {"message": "no model"}}}}),
        web.json_response({"result": [{"allowed": True}]}),
    ],
)
async def test_invalid_answer_refuses_the_operation(answer: web.Response) -> None:
    async with run_relation_server() as server, open_authorizer_over(server.url) as authorizer:
        server.answer = answer
        with pytest.raises(RetryLater, match="The policy server gave no decision"):
            await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)


async def test_silent_server_or_too_many_groups_refuse_the_operation() -> None:
    async with run_relation_server() as server, open_authorizer_over(server.url, openfga_timeout_s=0.05) as authorizer:
        groups = tuple(f"oidc-group:{number}" for number in range(98))
        with pytest.raises(Forbidden, match="98 groups and roles"):
            await authorizer.allows(Principal("p", ADMIN, "oidc", groups), "planTableScan", ORDERS)
        assert server.requests == []
        server.hangs = True
        with pytest.raises(RetryLater):
            await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)


async def test_error_about_one_object_hides_only_this_object_from_a_listing() -> None:
    # OpenFGA accepts at most 100 groups and containers of an object, so the server hides this table without a check.
    deep_table = Securable(tuple("n" for _ in range(100)), "table", "deep")
    reader = Principal("p", ADMIN)
    async with run_relation_server() as server, open_authorizer_over(server.url) as authorizer:
        server.allowed = {("can_plan", "table:_/shop/orders")}
        server.failing = {"table:_/shop/salaries"}
        assert await authorizer.allows_each(reader, "planTableScan", [SALARIES, ORDERS, deep_table]) == [
            False,
            True,
            False,
        ]
        server.failing.add("namespace:_/staff")
        assert await authorizer.sees(reader, [("staff",)]) == [False]
        # The listing has omitted the table, but the cache contains no decision about it.
        with pytest.raises(RetryLater):
            await authorizer.allows(reader, "planTableScan", SALARIES)
        server.failing = set()
        server.allowed.add(("can_plan", "table:_/shop/salaries"))
        assert await authorizer.allows(reader, "planTableScan", SALARIES)
    async with run_relation_server() as server, open_authorizer_over(server.url) as authorizer:
        server.failing = {"table:_/shop/salaries"}
        with pytest.raises(RetryLater):
            await authorizer.allows(reader, "planTableScan", SALARIES)


async def test_large_checks_are_sent_in_several_requests() -> None:
    groups = tuple(f"oidc-group:{number:03}{'=' * 70}" for number in range(90))
    tables = [Securable(("shop",), "table", f"t{number}") for number in range(50)]
    async with run_relation_server() as server, open_authorizer_over(server.url) as authorizer:
        server.allowed = {("can_plan", "table:_/shop/t49")}
        reader = Principal("p", ADMIN, "oidc", groups)
        assert await authorizer.allows_each(reader, "planTableScan", tables) == [False] * 49 + [True]
        assert sum(len(body["checks"]) for body in server.requests) == 50
        assert all(len(json.dumps(body)) < 450_000 for body in server.requests)  # OpenFGA limits the size of a request.


async def test_refusal_of_openfga_is_logged_with_its_message() -> None:
    async with run_relation_server() as server, open_authorizer_over(server.url) as authorizer:
        server.answer = web.Response(status=400, text="message larger than max" + "x" * 1000)
        with capture_logs() as logs, pytest.raises(RetryLater):
            await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)
        assert logs[0]["error"].startswith("OpenFGA answered 400: message larger than max")
        assert len(logs[0]["error"]) < 400


async def test_cached_decision_expires() -> None:
    clock = SimulatedClock(1)
    async with run_relation_server() as server, open_authorizer_over(server.url, clock=clock) as authorizer:
        server.allowed = {("can_plan", "table:_/shop/orders")}
        assert await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)
        server.allowed.clear()
        assert await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)
        clock.advance(5_001)
        assert not await authorizer.allows(Principal("p", ADMIN), "planTableScan", ORDERS)


def test_names_of_different_objects_differ_in_openfga() -> None:
    names = ["a", "a/b", "a%2Fb", "a b", "a:b", "a#b", "*", "ä", "x" * 300, "x" * 301]
    namespaces = [(level, *lower_levels) for level in names for lower_levels in ((), ("b",))]
    objects = {name_object("_", Securable(namespace, "table", name)) for namespace in namespaces for name in names}
    assert len(objects) == 2 * len(names) ** 2
    for name in (*objects, *(name_user(name) for name in names), *(name_group(name) for name in names)):
        identifier = name.partition(":")[2]
        assert len(name) <= 256
        assert not set(identifier) & set(":#* \t\n")
    assert name_object("_", Securable(("a",), "view", "v")) == name_object("_", Securable(("a",), "table", "v"))
    assert name_object("_", Securable(("a",), "function", "v")) == "function:_/a/v"


def test_settings_name_one_policy_server_and_a_store() -> None:
    for settings in ({"opa_url": "http://a", "openfga_url": "http://b"}, {"openfga_url": "http://b"}):
        with pytest.raises(ConfigError, match="openfga_"):
            check_consistency(Settings(**settings))


def test_model_file_has_the_privileges_of_the_documentation() -> None:
    assert json.loads(PATH.read_text()) == build_model(), "run python -m tests.access.openfga.model"


class OpenFga:
    """A real OpenFGA server with a store that has the authorization model of `deploy/openfga/model.json`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.store = str(self._post("/stores", {"name": "tests"})["id"])
        model = self._post(f"/stores/{self.store}/authorization-models", json.loads(PATH.read_text()))
        self.model = str(model["authorization_model_id"])

    def write(self, tuples: list[dict[str, str]]) -> None:
        unique_tuples = [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(item.items())) for item in tuples)]
        for start in range(0, len(unique_tuples), TUPLES_PER_WRITE):
            keys = unique_tuples[start : start + TUPLES_PER_WRITE]
            self._post(f"/stores/{self.store}/write", {"writes": {"tuple_keys": keys}})

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        answer = requests.post(self.url + path, json=body, timeout=60)
        assert answer.ok, answer.text
        document: dict[str, Any] = answer.json()
        return document


@pytest.fixture
def openfga(tmp_path: Path) -> Iterator[OpenFga]:
    program = CACHE / "bin" / "openfga"
    if not program.exists():
        raise ServiceFailed("OpenFGA is not installed; run `make openfga`")
    port = choose_free_port()
    argv = [str(program), "run", "--http-addr", f"127.0.0.1:{port}", "--grpc-addr", f"127.0.0.1:{choose_free_port()}"]
    argv += ["--playground-enabled=false", "--metrics-enabled=false", "--log-level=error"]
    with ManagedProcess(argv, log=tmp_path / "openfga.log", cwd=tmp_path) as process:
        process.start(lambda: is_http_ok(f"http://127.0.0.1:{port}/healthz"), timeout_s=60)
        yield OpenFga(f"http://127.0.0.1:{port}")


def draw_rights(rng: random.Random) -> list[Right]:
    objects = list(OBJECTS)
    rights = []
    for _ in range(rng.randint(1, 5)):
        deny = rng.random() < 0.3
        names = PRIVILEGES if deny else (*PRIVILEGES, "reader", "writer", "admin")
        rights.append(Right(rng.choice(names), rng.choice(objects), deny))
    return rights


@pytest.mark.slow
async def test_decisions_agree_with_the_grants_for_the_same_rights(openfga: OpenFga) -> None:
    rng = random.Random(first_seed())
    operation_by_rule: dict[Any, str] = {}
    for operation, rule in RULES.items():
        operation_by_rule.setdefault((rule.bits, rule.scope), operation)
    outcomes = set()
    async with open_authorizer_over(
        openfga.url, openfga.store, SystemClock(), openfga_model_id=openfga.model, openfga_cache_s=0.0
    ) as authorizer:
        for number in range(examples(15, 5)):
            rights, holder = draw_rights(rng), f"oidc:p {number}"
            groups = (f"role:r{number}",)
            holders = [name_user(holder), f"{name_group(groups[0])}#member"]
            openfga.write(
                [
                    {
                        "user": rng.choice(holders),
                        "relation": f"{'deny_' if right.deny else ''}{name_relation(right.name)}",
                        "object": name_object("_", right.securable),
                    }
                    for right in rights
                ]
            )
            grants = [right.as_grant() for right in rights]
            principal = Principal(holder, ADMIN, "oidc", groups)
            for (_, scope), operation in operation_by_rule.items():
                if scope is Scope.LOGIN:
                    continue
                objects = [item for item in OBJECTS if (item.kind == "server") == (scope is Scope.SERVER)]
                if scope in (Scope.SEEN, Scope.LISTING):
                    objects = [item for item in objects if not item.name]
                decisions = await authorizer.allows_each(principal, operation, objects)
                for securable, decision in zip(objects, decisions, strict=True):
                    expected = allows_operation(grants, operation, securable)
                    outcomes.add((scope, expected, decision))
                    if scope is Scope.CATALOG and any(right.deny for right in rights):
                        # The grants also consider denials on objects inside the namespace.
                        assert decision >= expected, (rights, operation, securable)
                    elif scope in (Scope.SEEN, Scope.LISTING):
                        # The grants also list the container of a visible object, for which OpenFGA has `lister`.
                        assert decision <= expected, (rights, operation, securable)
                    else:
                        assert decision == expected, (rights, operation, securable)
    assert {(scope, value, value) for scope in (Scope.OBJECT, Scope.SERVER) for value in (True, False)} <= outcomes


@pytest.mark.slow
async def test_relations_follow_names_that_the_catalog_has_never_told_openfga(openfga: OpenFga) -> None:
    ann = Principal("oidc:ann", ADMIN, "oidc", ("oidc-group:shop",))
    openfga.write(
        [
            {"user": "group:oidc-group%3Ashop#member", "relation": "reader", "object": "namespace:_/shop"},
            {"user": "user:*", "relation": "deny_read", "object": "table:_/shop/eu/salaries"},
            {"user": "user:oidc%3Aann", "relation": "lister", "object": "namespace:_/staff"},
        ]
    )
    async with open_authorizer_over(openfga.url, openfga.store, SystemClock()) as authorizer:
        orders, salaries = (Securable(("shop", "eu"), "table", name) for name in ("orders", "salaries"))
        assert await authorizer.allows_each(ann, "readRows", [orders, salaries]) == [True, False]
        assert await authorizer.allows(ann, "planTableScan", salaries)
        assert not await authorizer.allows(ann, "updateTable", orders)
        assert not await authorizer.allows(Principal("oidc:bob", ADMIN), "readRows", orders)
        assert await authorizer.sees(ann, [("shop",), ("staff",), ("other",)]) == [True, True, False]
