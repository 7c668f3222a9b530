"""Tests that the router finds the same routes as aiohttp."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from seamark.metaserver.api.http import dispatch
from seamark.metaserver.api.http.dispatch import PATH_CHARACTERS_MAX, Router

_PATHS = (
    "/v1/config",
    "/v1/namespaces",
    "/v1/namespaces/a",
    "/v1/namespaces/a%1Fb/tables/t",
    "/v1/namespaces/a/tables/%74",
    "/v1/namespaces/a/tables/t%2Fu",
    "/v1/namespaces/a/tables/t/plan",
    "/v1/namespaces/a/tables/t/plan?x=1",
    "/v1/namespaces/a/tables/",
    "/v1/namespaces/a/tables/t/",
    "/v1//namespaces",
    "/nowhere",
    "/",
)
_METHODS = ("GET", "HEAD", "POST", "DELETE", "BREW")


async def _answer(request: web.Request) -> web.Response:
    return web.Response()


def _add_routes(dispatcher: web.UrlDispatcher) -> web.UrlDispatcher:
    for method, path in (
        ("GET", "/v1/config"),
        ("GET", "/v1/namespaces"),
        ("POST", "/v1/namespaces"),
        ("GET", "/v1/namespaces/{namespace:[^/]+}"),
        ("GET", "/v1/namespaces/{namespace:[^/]+}/tables/{table:[^/]+}"),
        ("HEAD", "/v1/namespaces/{namespace:[^/]+}/tables/{table:[^/]+}"),
        ("POST", "/v1/namespaces/{namespace:[^/]+}/tables/{table:[^/]+}/plan"),
    ):
        dispatcher.add_route(method, path, _answer)
    return dispatcher


async def _resolve(dispatcher: web.UrlDispatcher, method: str, path: str) -> tuple[Any, ...]:
    result = await dispatcher.resolve(make_mocked_request(method, path))
    error = result.http_exception
    refusal = () if error is None else (error.status, error.headers.get("Allow"))
    resource = result.route.resource
    return dict(result), None if resource is None else resource.canonical, refusal


async def test_each_path_has_the_route_that_aiohttp_finds() -> None:
    seamark_routes, aiohttp_routes = _add_routes(Router()), _add_routes(web.UrlDispatcher())
    for _, method, path in itertools.product(range(2), _METHODS, _PATHS):
        assert await _resolve(seamark_routes, method, path) == await _resolve(aiohttp_routes, method, path), (
            method,
            path,
        )


async def test_only_short_paths_with_a_route_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router()
    _add_routes(router)
    monkeypatch.setattr(dispatch, "PATHS_MAX", 3)
    for path in ("/nowhere", "/v1/namespaces/" + "x" * PATH_CHARACTERS_MAX):
        await _resolve(router, "GET", path)
    await _resolve(router, "DELETE", "/v1/namespaces")
    assert len(router._routes_by_path) == 0
    for number in range(10):
        route = await _resolve(router, "GET", f"/v1/namespaces/n{number}")
        assert route == ({"namespace": f"n{number}"}, "/v1/namespaces/{namespace}", ())
        assert 1 <= len(router._routes_by_path) <= 3


async def test_two_requests_share_no_path_variables() -> None:
    router = Router()
    _add_routes(router)
    first_match, second_match, third_match = [
        await router.resolve(make_mocked_request("GET", "/v1/namespaces/a")) for _ in range(3)
    ]
    first_match["namespace"] = second_match["namespace"] = "b"
    assert dict(third_match) == {"namespace": "a"}
    assert dict(await router.resolve(make_mocked_request("GET", "/v1/namespaces/a"))) == {"namespace": "a"}
