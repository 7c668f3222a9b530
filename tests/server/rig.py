"""A server inside the test's own process: real components over SQLite and local files, and a real port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.web_urldispatcher import AbstractResource

from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.metaserver.api import app
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.api.http.dispatch import PREFIX, add_endpoints
from seamark.metaserver.api.listening import bind_socket, make_server_url
from seamark.metaserver.server import open_certificate, open_components, serve_requests
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import EntryKind, Instant, InstantState
from seamark.metaserver.store.operations import CreateNamespace, RecordInstant
from tests.services.seamark import SHARED_KEY

PLAN_WAIT_S = 60.0
"""The time, in seconds, for which a plan waits for index files and for pruning. It suffices on a busy machine."""
_resources: dict[tuple[object, ...], list[AbstractResource]] = {}
"""aiohttp's resources, by the prefix and the modules of a call of `add_endpoints`."""


def _share_endpoints(application: web.Application, *modules: ModuleType) -> None:
    """Add the endpoints of `modules` as resources that all applications of this process share.

    The creation of the resources takes a sixth of the CPU time of a start. A resource refers to no application.
    """
    key = (application[PREFIX], *modules)
    if key not in _resources:
        template = web.Application()
        template[PREFIX] = application[PREFIX]
        add_endpoints(template, *modules)
        _resources[key] = list(template.router.resources())
    for resource in _resources[key]:
        application.router.register_resource(resource)


# Tests start many servers, so `app` calls `_share_endpoints` instead of `add_endpoints`.
vars(app)[add_endpoints.__name__] = _share_endpoints


@dataclass
class RunningServer:
    """A server in this process, with its components."""

    url: str
    components: ServerComponents
    http: aiohttp.ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        """Send a GET request, and return (status, JSON)."""
        async with self.http.get(self.url + path, **options) as answer:
            return answer.status, await answer.json()

    async def record(self, name: str = "t", action: str = "commit", **fields: Any) -> Instant:
        """Record a finished instant for `db.<name>`, as a commit on this replica does."""
        instant = build_instant(self.components.clock, name, action, **fields)
        await self.components.store.transact([RecordInstant(instant=instant)])
        self.components.timeline.notify()
        return instant


class OffsetClock(SystemClock):
    """The system's clock plus an offset that a test sets."""

    ahead_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.ahead_ms


def build_instant(clock: Clock, name: str = "t", action: str = "commit", **fields: Any) -> Instant:
    now_ms = clock.now_ms()
    instant_fields: dict[str, Any] = {
        "id": str(clock.uuid7()),
        "action": action,
        "state": InstantState.COMPLETED,
        "kind": EntryKind.TABLE,
        "namespace": ("db",),
        "name": name,
        "uuid": f"uuid-of-{name}",
        "requested_ms": now_ms,
        "completed_ms": now_ms,
        **fields,
    }
    return Instant(**instant_fields)


def build_settings(home: Path, **arguments: Any) -> Settings:
    # Replicas of one database need the same key, even with different homes. The short poll interval makes tests fast.
    settings: dict[str, Any] = {"home": home, "port": 0, "watch_poll_s": 0.1, "encryption_key": SHARED_KEY}
    # A plan waits for index files and for pruning, so the machine's speed does not determine which files it has.
    return Settings(**{**settings, "index_wait_s": PLAN_WAIT_S, "plan_time_budget_s": PLAN_WAIT_S, **arguments})


@asynccontextmanager
async def run_server(home: Path, *, clock: Clock | None = None, **arguments: Any) -> AsyncIterator[RunningServer]:
    """Run a server with these settings. Create the namespace `db` if it does not exist."""
    settings = build_settings(home, **arguments)
    certificate = open_certificate(settings)
    with closing(bind_socket(settings, shared=False)) as sock:
        async with (
            open_components(settings, clock or SystemClock(), EXTENSIONS, certificate) as components,
            serve_requests(components, sock),
            aiohttp.ClientSession() as http,
        ):
            if await components.store.load_namespace(("db",)) is None:
                await components.store.transact([CreateNamespace(path=("db",), properties={})])
            yield RunningServer(make_server_url(settings, sock), components, http)
