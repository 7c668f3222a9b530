"""Opens the gateway of a worker: its backend, and its server on a bound socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from seamark.formats.runtime.connections import ConnectionLimits, DirectAnswers
from seamark.formats.runtime.errors import SeamarkError
from seamark.metaserver.access.gateway_keys import ObjectGrant
from seamark.metaserver.api.http.components import ServerComponents
from seamark.metaserver.gateway.backend import Backend
from seamark.metaserver.gateway.caching.caching import CachingBackend
from seamark.metaserver.gateway.caching.tiers import open_tiers
from seamark.metaserver.gateway.clouds.cloud_backend import CloudBackend
from seamark.metaserver.gateway.connection import GatewayRunner
from seamark.metaserver.gateway.folder import FolderBackend
from seamark.metaserver.gateway.forwarding import Forwarding
from seamark.metaserver.gateway.gateway import OPERATION, Gateway
from seamark.metaserver.gateway.ownership import GrantChecker
from seamark.metaserver.gateway.preloading import Preloading
from seamark.metaserver.gateway.router import GatewayRouter
from seamark.metaserver.gateway.s3_errors import S3Error, build_error_answer
from seamark.metaserver.runtime.background import run_in_background
from seamark.metaserver.store.passed_time import read_passed_time

_REPORT_S = 1.0
"""The time between two updates of the cache's metrics."""
_CLEANING_S = 600.0


@asynccontextmanager
async def serve_gateway(
    components: ServerComponents, sock: object, limits: ConnectionLimits, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Serve S3 requests on `sock`, a bound socket, while the context is active."""
    settings, warehouses = components.settings, components.warehouses
    assert warehouses is not None, "only the components of the server have a port"
    async with open_gateway(components) as gateway:
        router = GatewayRouter(gateway, warehouses)
        runner = GatewayRunner(
            router.build_app(),
            router.begin,
            settings.gateway_send_bytes,
            limits,
            DirectAnswers(_build_error_response, partial(components.metrics.observe, OPERATION, 400, 0.0, None)),
            tls=tls,
            access_log=None,
            auto_decompress=False,
            handle_signals=False,
            keepalive_timeout=settings.idle_timeout_s,
            shutdown_timeout=settings.drain_timeout_s,
        )
        await runner.setup()
        try:
            await web.SockSite(runner, sock, backlog=1024).start()  # type: ignore[arg-type]
            yield
        finally:
            await runner.cleanup()
            await gateway.end()


@asynccontextmanager
async def open_gateway(
    components: ServerComponents, recheck: Callable[[ObjectGrant], Awaitable[None]] | None = None
) -> AsyncIterator[Gateway]:
    """Open the gateway of one warehouse, and run its background tasks while the context is active.

    The caller must call `Gateway.end`, also after the context has ended, because running requests need the backend.

    Args:
        components: The components of the warehouse.
        recheck: Checks a grant while a body is read. See `Gateway`.
    """
    settings, clock = components.settings, components.clock
    backend = await _open_backend(components)
    grant_checker = GrantChecker(components.store, clock, settings, components.authorizer)
    gateway = Gateway(
        settings,
        clock,
        components.gateway_keys,
        grant_checker,
        backend,
        components.metrics,
        components.worker_limits.gateway_documents,
        components.warehouse_name,
        recheck,
    )
    async with (
        run_in_background("gateway-tables", partial(grant_checker.follow, components.timeline)),
        run_in_background("gateway-backend", partial(_maintain_backend, components, backend)),
        _preload_tables(components, grant_checker, backend),
    ):
        yield gateway


async def _open_backend(components: ServerComponents) -> Backend:
    settings, clock = components.settings, components.clock
    if settings.s3_folder:
        return FolderBackend(settings, clock, components.warehouse_name)
    if settings.s3_backend:
        return CloudBackend(settings, clock, components.worker_limits.gateway_writes)
    forwarding = Forwarding(settings, clock, connections=settings.gateway_requests_limit)
    if not settings.gateway_cache_memory_bytes and not settings.gateway_cache_disk_bytes:
        return forwarding
    return CachingBackend(forwarding, await open_tiers(settings, clock, forwarding), clock)


@asynccontextmanager
async def _preload_tables(
    components: ServerComponents, ownership: GrantChecker, backend: Backend
) -> AsyncIterator[None]:
    """Preload tables while the context is active, if a part of the cache is reserved for preloaded files."""
    settings = components.settings
    # One table may use at most `gateway_cache_holder_percent` of the part for preloaded files, which is
    # `gateway_cache_pinned_percent` of the cache.
    cache_bytes = max(settings.gateway_cache_disk_bytes, settings.gateway_cache_memory_bytes)
    budget_bytes = (
        cache_bytes * settings.gateway_cache_pinned_percent // 100 * settings.gateway_cache_holder_percent // 100
    )
    if not isinstance(backend, CachingBackend) or not budget_bytes:
        yield
        return
    preloading = Preloading(
        components.store,
        components.catalog.documents,
        components.planner,
        ownership,
        backend,
        components.clock,
        budget_bytes=budget_bytes,
    )
    async with (
        run_in_background("gateway-preload-news", partial(preloading.follow, components.timeline)),
        run_in_background("gateway-preload", preloading.work),
    ):
        yield


async def _maintain_backend(components: ServerComponents, backend: Backend) -> None:
    """Maintain the backend in regular intervals, until the task is cancelled.

    If the backend is a cache, update its metrics. If it is a folder or a cloud, delete abandoned uploads.
    """
    while True:
        if isinstance(backend, CachingBackend):
            backend.report(components.metrics.gateway_cache, components.warehouse_name)
        elif isinstance(backend, FolderBackend | CloudBackend):
            # Without an answer of the database or the store, keep all uploads until the next round.
            with contextlib.suppress(SeamarkError):
                await backend.delete_abandoned(await read_passed_time(components.store, components.clock))
        await asyncio.sleep(_REPORT_S if isinstance(backend, CachingBackend) else _CLEANING_S)


def _build_error_response(status: int, kind: str, message: str) -> web.Response:
    """Return the answer to a request that reaches no handler, for example because it is not valid HTTP."""
    code = {408: "RequestTimeout", 429: "SlowDown"}.get(status, "InvalidRequest" if status < 500 else "InternalError")
    return build_error_answer(S3Error(code, message), "", "")
