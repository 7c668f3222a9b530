"""Passes each request of the gateway's port to the gateway of the warehouse that has issued its keys.

The session token names the warehouse. A wrong name gives no access, because the gateway of a warehouse accepts only
tokens that its own keyring has signed. So this module does not verify anything.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.typedefs import Handler

from seamark.formats.runtime.errors import Forbidden, SeamarkError
from seamark.metaserver.access.gateway_keys import ObjectGrant, find_warehouse_id
from seamark.metaserver.gateway.connection import GatewayConnection
from seamark.metaserver.gateway.gateway import Gateway, StartedRequest
from seamark.metaserver.warehouses.warehouses import Warehouses

_TOKEN_HEADER = "x-amz-security-token"  # noqa: S105  the name of a header
_PRESIGNED = re.compile(r"[?&]X-Amz-Security-Token=([^&.%]+(?:\.|%2E))", re.IGNORECASE)


class GatewayRouter:
    """Chooses the gateway of each request.

    Args:
        own: The gateway of the server's own warehouse. It also refuses requests with keys of unknown warehouses.
        warehouses: The further warehouses.
    """

    def __init__(self, own: Gateway, warehouses: Warehouses) -> None:
        self._own = own
        self._warehouses = warehouses

    def build_app(self) -> web.Application:
        @web.middleware
        async def handle_all(request: web.Request, handler: Handler) -> web.StreamResponse:
            # Ignore the router's handler, because the gateway also answers targets that the router cannot match.
            return await self.handle(request)

        app = web.Application(middlewares=[handle_all])
        app.on_response_prepare.append(_set_server_header)
        app.router.add_route("*", "/{target:.*}", self.handle, expect_handler=_expect_nothing)
        return app

    def begin(self, message: RawRequestMessage, transport: asyncio.Transport) -> StartedRequest | bool:
        """Answer a read of data in memory immediately. See `Gateway.begin`."""
        warehouse_id = _read_warehouse_id(message.path, message.headers)
        if not warehouse_id:
            return self._own.begin(message, transport)
        warehouse = self._warehouses.find_confirmed(warehouse_id)
        gateway = None if warehouse is None else warehouse.gateway
        return gateway.begin(message, transport) if isinstance(gateway, Gateway) else False

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request by the gateway of its warehouse."""
        connection = request.protocol
        started = connection.take_unfinished() if isinstance(connection, GatewayConnection) else None
        if isinstance(started, StartedRequest):  # `begin` has already checked this request.
            return await started.gateway.handle(request, started)
        warehouse_id = _read_warehouse_id(request.raw_path, request.headers)
        if not warehouse_id:
            return await self._own.handle(request)
        try:
            gateway = await find_gateway(self._warehouses, warehouse_id)
        except SeamarkError as error:
            # The server's own gateway sends the refusal, and counts and logs the request.
            return await self._own.handle(request, refusal=error)
        return await gateway.handle(request)


async def find_gateway(warehouses: Warehouses, warehouse_id: str) -> Gateway:
    """Return the gateway of a further warehouse: one that is not the server's own warehouse.

    Raises:
        Forbidden: The warehouse does not exist, or its clients do not use the gateway.
        RetryLater: The warehouse cannot be opened now.
    """
    warehouse = await warehouses.find_by_id(warehouse_id)
    gateway = None if warehouse is None else warehouse.gateway
    if not isinstance(gateway, Gateway):
        raise Forbidden("The keys are for a warehouse that does not use the gateway; load the table again")
    return gateway


async def check_again(warehouses: Warehouses, warehouse_id: str, grant: ObjectGrant) -> None:
    """Check a grant of a further warehouse while it is in use. The warehouse may have been opened again meanwhile.

    Raises:
        Forbidden: The grant is no longer valid, or the warehouse was dropped.
        RetryLater: The warehouse cannot be opened now.
    """
    await (await find_gateway(warehouses, warehouse_id)).check(grant)


def _read_warehouse_id(target: str, headers: Mapping[str, str]) -> str:
    token = headers.get(_TOKEN_HEADER)
    if token is None and "?" in target:
        matched = _PRESIGNED.search(target)
        token = None if matched is None else matched[1].replace("%2E", ".").replace("%2e", ".")
    return "" if token is None else find_warehouse_id(token)


async def _set_server_header(request: web.Request, response: web.StreamResponse) -> None:
    # Set the header, because otherwise aiohttp sends its version and Python's version.
    response.headers["Server"] = "seamark"


async def _expect_nothing(request: web.Request) -> None:
    """Do not answer `Expect: 100-continue`. The handler requests the body after it has authorised the request."""
