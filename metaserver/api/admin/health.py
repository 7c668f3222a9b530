"""GET /healthz: the process is alive. GET /readyz: the process can serve requests, and write to store and storage.

The routes are separate because an orchestrator acts differently on them: it restarts an unhealthy process, and sends no
traffic to a process that is not ready. An unavailable database must not make an orchestrator restart all replicas.
Neither route needs a login, and both return only the state and its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.api.admin.readiness import Readiness
from seamark.metaserver.api.http.components import COMPONENTS
from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Route, make_json_answer

PING_TIMEOUT_S = 2.0
"""The time limit of a ping, in seconds."""

_log = structlog.get_logger("seamark.health")

READINESS: web.AppKey[Readiness] = web.AppKey("readiness", Readiness)

_HEALTH = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
_READY = {
    "type": "object",
    "required": ["status", "checks"],
    "properties": {
        "status": {"type": "string", "enum": ["ready", "not ready"]},
        "checks": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@Route(
    method="GET",
    path="/healthz",
    operation="healthz",
    summary="Liveness: the process runs",
    tags=("operation",),
    answers=(ResponseSpec(200, "Alive", _HEALTH),),
    public=True,
).takes_request
async def healthz(request: web.Request) -> web.Response:
    """Answer that the process is alive."""
    return _make_json_response(200, {"status": "alive"})


@Route(
    method="GET",
    path="/readyz",
    operation="readyz",
    summary="Readiness: database and storage answer and accept writes, and the server is not draining",
    tags=("operation",),
    answers=(ResponseSpec(200, "Ready", _READY), ResponseSpec(503, "Not ready, with the failed checks", _READY)),
    public=True,
).takes_request
async def readyz(request: web.Request) -> web.Response:
    """Answer whether the server can serve requests."""
    components = request.app[COMPONENTS]
    store, objects, write_states = await asyncio.gather(
        _check_component("store", components.store.ping),
        _check_component("objects", components.objects.ping),
        request.app[READINESS].check(),
    )
    drain = "draining" if components.drain.is_set() else "ok"
    checks = {"store": store, "objects": objects, **write_states, "drain": drain}
    is_ready = all(state == "ok" for state in checks.values())
    return _make_json_response(
        200 if is_ready else 503, {"status": "ready" if is_ready else "not ready", "checks": checks}
    )


async def _check_component(part: str, ping: Callable[[], Awaitable[None]]) -> str:
    """Return the state of one component, which `ping` checks."""
    try:
        await asyncio.wait_for(ping(), PING_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {PING_TIMEOUT_S:g} s"
    except (SeamarkError, OSError) as error:
        # Do not return the message: it may contain hosts and paths, and the probe is not authenticated.
        _log.warning("not ready", part=part, error=str(error))
        return "failing"
    return "ok"


def _make_json_response(status: int, value: object) -> web.Response:
    response = make_json_answer(value, status)
    response.headers["Cache-Control"] = "no-store"
    return response


def add_components(app: web.Application) -> None:
    components = app[COMPONENTS]
    app[READINESS] = Readiness(components.settings, components.store, components.clock)
