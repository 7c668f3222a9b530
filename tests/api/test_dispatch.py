"""Tests that the dispatcher rejects declarations and handlers that would skip the check of rights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from seamark.formats.runtime.errors import Forbidden
from seamark.metaserver.access.authorizer import GrantAuthorizer
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.components import COMPONENTS, ServerComponents
from seamark.metaserver.api.http.dispatch import Call, Check, Endpoint, Route
from seamark.metaserver.api.http.keys import PRINCIPAL
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import Grant


class _Body(msgspec.Struct):
    name: str


def _build_route(check: Check) -> Route:
    return Route(method="POST", path="/x", operation="addGrant", summary="", check=check)


def _build_request(*grants: Grant) -> web.Request:
    app = web.Application()
    app[COMPONENTS] = cast(ServerComponents, SimpleNamespace(authorizer=GrantAuthorizer(None), settings=Settings()))
    request = make_mocked_request("POST", "/x", app=app)
    request[PRINCIPAL] = Principal("p", grants)
    return request


def _build_endpoint(check: Check, allowed_namespace: tuple[str, ...] | None) -> Endpoint:
    @_build_route(check)
    async def handler(call: Call) -> web.Response:
        if allowed_namespace is not None:
            await call.allow(Securable(allowed_namespace))
        return web.Response(status=204)

    return handler


def test_body_that_only_the_handler_checks_is_rejected() -> None:
    with pytest.raises(TypeError, match="addGrant has a body"):
        _build_route(Check.HANDLER).takes(_Body)


async def test_handler_without_a_rights_check_returns_no_answer() -> None:
    with pytest.raises(RuntimeError, match="addGrant did not check"):
        await _build_endpoint(Check.HANDLER, None).handle(_build_request(Grant("p", "admin")))


async def test_handler_checks_the_namespace_that_it_names() -> None:
    endpoint, request = _build_endpoint(Check.HANDLER, ("a",)), _build_request(Grant("p", "admin", ("a",)))
    assert (await endpoint.handle(request)).status == 204
    with pytest.raises(Forbidden, match="addGrant"):
        await _build_endpoint(Check.HANDLER, ("b",)).handle(request)


async def test_right_on_the_catalog_is_checked_before_the_handler() -> None:
    with pytest.raises(Forbidden, match="addGrant"):
        await _build_endpoint(Check.CATALOG, None).handle(_build_request(Grant("p", "admin", ("a",))))
    assert (await _build_endpoint(Check.CATALOG, None).handle(_build_request(Grant("p", "admin")))).status == 204
