"""The composition root: opens all components in order, serves requests, and closes the components in reverse order.

A worker is a process with one event loop and its own components. Replicas and workers share only the pointer store
and the object storage. When a worker stops, it accepts no new connections, its readiness check fails, and long polls
return immediately. Running requests have `drain_timeout_s` to finish, and then the components close.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop
from aiohttp import web
from opentelemetry.trace import Tracer

from seamark.formats.protocol.wire import FORMER_INDEX_FOLDER, INDEX_FOLDER
from seamark.formats.runtime.clock import Clock, SystemClock
from seamark.formats.runtime.connections import (
    ConnectionLimits,
    ConnectionRunner,
    DirectAnswers,
    compute_connections_max,
    raise_descriptor_limit,
)
from seamark.formats.runtime.errors import ConfigError, SeamarkError
from seamark.formats.runtime.lazy_module import LazyModule
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.access.audit import open_audit
from seamark.metaserver.access.authenticator import open_authenticator
from seamark.metaserver.access.authorizer import GrantAuthorizer
from seamark.metaserver.access.gateway_keys import GatewayKeys
from seamark.metaserver.access.guard import check_logins, is_loopback
from seamark.metaserver.access.keyring import REFRESH_S, StoredKeyring, open_keyring
from seamark.metaserver.access.policies.opening import open_authorizer
from seamark.metaserver.api.app import build_app
from seamark.metaserver.api.http.components import ServerComponents, SharedComponents
from seamark.metaserver.api.http.errors import make_error_response
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.api.listening import bind_socket, make_server_url
from seamark.metaserver.api.sampling import sample_gauges
from seamark.metaserver.catalog.catalog import Catalog, open_catalog
from seamark.metaserver.catalog.column_usage import ColumnUsage
from seamark.metaserver.catalog.database_limits import DatabaseShares
from seamark.metaserver.catalog.ownership.claims import list_claimed
from seamark.metaserver.catalog.pointers import get_files_folder
from seamark.metaserver.commit.changes.group_commit import open_commits
from seamark.metaserver.commit.engine_commits.engine_commits import EngineCommits
from seamark.metaserver.commit.expiration.expiration import Expiration
from seamark.metaserver.commit.expiration.orphan_files import OrphanRemoval
from seamark.metaserver.commit.publication import open_publisher
from seamark.metaserver.commit.rewriting.manifest_rewrite import open_manifest_rewrite
from seamark.metaserver.history.history import QueryHistory
from seamark.metaserver.index.files.cleaning import Cleaner
from seamark.metaserver.index.files.indexes import open_indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.objects.reachability import wait_until_reachable
from seamark.metaserver.objects.router import open_objects
from seamark.metaserver.planner.cubes.segments import open_segments
from seamark.metaserver.planner.plan.location_checks import LocationChecker
from seamark.metaserver.planner.plan.planner import open_planner
from seamark.metaserver.planner.plan.preparation import Preparation
from seamark.metaserver.runtime.background import run_in_background, run_once
from seamark.metaserver.runtime.extensions import Extensions
from seamark.metaserver.runtime.home import prepare_home
from seamark.metaserver.services.housekeeping import Housekeeping
from seamark.metaserver.services.running import ServicesStatus, SharedJobs
from seamark.metaserver.services.scheduler import Scheduler
from seamark.metaserver.services.services import open_scheduler
from seamark.metaserver.settings.fleet import READ
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.model import StoredWarehouse
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.opening import open_streams
from seamark.metaserver.streams.row_files import ImportedRowFiles
from seamark.metaserver.streams.stored_rows import RowSearch
from seamark.metaserver.timeline.statement_lineage import StatementRuns
from seamark.metaserver.timeline.targets import deliver_statement_events, open_delivery
from seamark.metaserver.timeline.timeline import open_timeline
from seamark.metaserver.warehouses.federation.federated_authorizer import make_warehouse_authorizer
from seamark.metaserver.warehouses.federation.federated_store import open_warehouse_store
from seamark.metaserver.warehouses.warehouses import (
    ServedWarehouse,
    Warehouses,
    check_database,
    check_prefix,
    check_server_database,
    open_warehouses,
)

if TYPE_CHECKING:
    from seamark.metaserver.gateway import router as gateway_router
    from seamark.metaserver.gateway import serving as gateway_serving
    from seamark.metaserver.peers import peers
else:
    # Servers without a gateway or without other replicas do not need these modules.
    gateway_router = LazyModule("seamark.metaserver.gateway.router")
    gateway_serving = LazyModule("seamark.metaserver.gateway.serving")
    peers = LazyModule("seamark.metaserver.peers.peers")

UNREADABLE = "unreadable"
"""The name of the operation under which the metrics count requests that are not valid HTTP."""
HEADER_BYTES_MAX = 1 << 20
"""The maximum size of the request line and all headers together. aiohttp also limits each of them to 8 KiB."""
_REPAIRED_SHOWN = 20
_log = structlog.get_logger("seamark.server")


@asynccontextmanager
async def open_components(
    settings: Settings, clock: Clock, extensions: Extensions, certificate: Certificate | None = None
) -> AsyncIterator[ServerComponents]:
    """Open all components of one worker, and close them in reverse order.

    Raises:
        ConfigError: A setting is invalid. The message names the setting.
    """
    log_repaired(prepare_home(settings))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        store = await enter(_open_pointer_store(settings, clock))
        await check_server_database(store)
        await check_logins(settings, store, clock)
        await check_prefix(settings, store)
        if settings.federation_uri:
            raise ConfigError(
                "federation_uri is a setting of further warehouses: remove it from the settings of the server, and run "
                "seamark warehouse create NAME --location URI --set federation_uri=URI"
            )
        keyring = await enter(open_keyring(settings, store, clock))
        shared = SharedComponents(
            extensions=extensions,
            authenticator=await enter(open_authenticator(settings, store, keyring, clock)),
            database_shares=DatabaseShares(settings, clock),
            metrics=ServerMetrics(),
            tracer=await enter(_open_tracing(settings)),
            worker_limits=WorkerLimits(
                requests=settings.requests_limit,
                watchers=settings.watchers_limit,
                body_bytes=settings.bodies_memory_bytes,
                has_logins=settings.auth != "none",
            ),
            shared_jobs=SharedJobs(settings.services_workers),
            certificate=certificate,
            drain=asyncio.Event(),
        )
        warehouses = await enter(open_warehouses(settings, store, clock, partial(_open_warehouse, shared, clock)))
        components = await enter(_open_catalog_components(settings, clock, shared, store, keyring, warehouses))
        await _start_tasks(components, stack)
        await enter(run_in_background("sampler", lambda: sample_gauges(components)))
        await enter(run_in_background("warehouses", warehouses.run))
        yield components


@asynccontextmanager
async def _open_warehouse(
    server: SharedComponents,
    clock: Clock,
    warehouses: Warehouses,
    settings: Settings,
    stored_warehouse: StoredWarehouse,
) -> AsyncIterator[ServedWarehouse]:
    """Open the components of a warehouse in addition to the server's own, and the application that serves it.

    Args:
        server: The components that all warehouses of the server share.
        clock: The clock.
        warehouses: The warehouses of the server, in which the S3 gateway checks whether the warehouse still exists.
        settings: The settings of the warehouse.
        stored_warehouse: The record of the warehouse in the server's database.
    """
    log_repaired(prepare_home(settings))
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        stack.callback(server.metrics.forget_warehouse, stored_warehouse.name)
        store = await enter(_open_pointer_store(settings, clock))
        await check_database(store, stored_warehouse)
        keyring = await enter(open_keyring(settings, store, clock))
        # A federated warehouse has the names of another catalog, but needs its own catalog, which opens below.
        store, connect_catalog = await enter(open_warehouse_store(settings, store, clock))
        shared = dataclasses.replace(server, authenticator=server.authenticator.copy_for_warehouse(store, keyring))
        components = await enter(
            _open_catalog_components(settings, clock, shared, store, keyring, None, stored_warehouse)
        )
        connect_catalog(components.catalog.context)
        await _start_tasks(components, stack, stored_warehouse.id)
        runner = web.AppRunner(build_app(components), access_log=None)
        stack.push_async_callback(runner.cleanup)
        await runner.setup()
        assert runner.server is not None
        if runs_services(settings):
            await enter(run_in_background("services", partial(_run_services, components)))
        gateway = None
        has_s3_tables = stored_warehouse.location.startswith("s3:")
        if has_s3_tables and settings.gateway_port and settings.s3_client_access == "gateway":
            # The gateway forwards requests of clients to S3, so that clients need no keys of the bucket.
            recheck = partial(gateway_router.check_again, warehouses, stored_warehouse.id)
            gateway = await enter(gateway_serving.open_gateway(components, recheck))
        yield ServedWarehouse(runner.server.request_handler, components.timeline.drain, gateway)


@asynccontextmanager
async def _open_pointer_store(settings: Settings, clock: Clock) -> AsyncIterator[PointerStore]:
    async with open_store(
        settings.make_database_url(),
        clock=clock,
        queue_limit=settings.store_queue_limit,
        pool_max=settings.pg_pool_max,
        keeps_reads=settings.stale_limit_s > 0,
    ) as store:
        yield store


@asynccontextmanager
async def _open_catalog_components(
    settings: Settings,
    clock: Clock,
    shared: SharedComponents,
    store: PointerStore,
    keyring: StoredKeyring,
    warehouses: Warehouses | None,
    stored_warehouse: StoredWarehouse | None = None,
) -> AsyncIterator[ServerComponents]:
    """Open the components of one warehouse over its pointer store.

    Args:
        settings: The settings of the warehouse.
        clock: The clock.
        shared: The components that all warehouses share.
        store: The pointer store of the warehouse.
        keyring: The signing keys of the warehouse.
        warehouses: The further warehouses of the server. None for a further warehouse.
        stored_warehouse: The record of a further warehouse. None for the server's own warehouse.
    """
    warehouse_id, warehouse_name = (
        ("", "") if stored_warehouse is None else (stored_warehouse.id, stored_warehouse.name)
    )
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        metrics, extensions = shared.metrics, shared.extensions
        stored_objects = await enter(open_objects(settings, clock))
        opened_peers = None
        if settings.peer_address:
            opened_peers = await enter(peers.open_peers(settings, stored_objects, store, keyring, clock, metrics))
        objects: ObjectStore = stored_objects if opened_peers is None else opened_peers.objects
        timeline = await enter(open_timeline(settings, store, clock))
        catalog = await enter(
            open_catalog(
                *(settings, store, objects, clock, timeline, keyring),
                stored_objects=stored_objects,
                import_limits=shared.worker_limits.imports,
                is_further=stored_warehouse is not None,
            )
        )
        registry, usage = Registry(store, clock), Usage()
        store.observe(shared.database_shares.charge)
        indexes = await enter(open_indexes(settings, objects, registry, clock, stored_objects=stored_objects))
        # Without authentication there is one tenant, which may read everything.
        location_checker = None if settings.auth == "none" else LocationChecker(store, catalog.context.warehouse)
        planner = await enter(
            open_planner(
                settings,
                objects,
                clock,
                stored_objects=stored_objects,
                indexes=indexes,
                usage=usage,
                location_checker=location_checker,
            )
        )
        publisher = await enter(open_publisher(catalog.context))
        cleaner = _make_cleaner(settings, store, registry, objects, clock, catalog)
        expiration = Expiration(catalog, publisher, planner)
        commits = await enter(open_commits(catalog, publisher, planner, metrics.commits))
        search = RowSearch(planner, objects, indexes, usage, clock, settings.decoded_limit_bytes)
        streams = await enter(
            open_streams(catalog, commits, objects, ImportedRowFiles(extensions.row_files), search, keyring)
        )
        history = QueryHistory(settings, store, clock)
        grants = GrantAuthorizer(store) if warehouses is not None else make_warehouse_authorizer(settings, store)
        yield ServerComponents(
            settings=settings,
            clock=clock,
            extensions=extensions,
            store=store,
            objects=objects,
            catalog=catalog,
            timeline=timeline,
            registry=registry,
            indexes=indexes,
            segments=await enter(open_segments(settings, indexes, registry)),
            history=history,
            statement_runs=StatementRuns(metrics.events) if settings.openlineage_url else None,
            housekeeping=Housekeeping(settings, store, catalog, timeline, cleaner, expiration, history, clock),
            usage=usage,
            database_shares=shared.database_shares,
            planner=planner,
            engine_commits=EngineCommits(catalog, publisher),
            commits=commits,
            streams=streams,
            expiration=expiration,
            orphan_removal=OrphanRemoval(catalog, publisher, planner),
            manifest_rewrite=await enter(open_manifest_rewrite(catalog, publisher, planner)),
            metrics=metrics,
            authenticator=shared.authenticator,
            authorizer=await enter(open_authorizer(settings, clock, grants, warehouse_name)),
            keyring=keyring,
            gateway_keys=GatewayKeys(keyring, clock, lifetime_s=settings.gateway_keys_s, warehouse_id=warehouse_id),
            peers=opened_peers,
            services_status=ServicesStatus(enabled=runs_services(settings)),
            shared_jobs=shared.shared_jobs,
            audit=await enter(open_audit(store, clock, reads=settings.audit_reads)),
            tracer=shared.tracer,
            worker_limits=shared.worker_limits,
            certificate=shared.certificate,
            drain=shared.drain,
            warehouses=warehouses,
        )


async def _start_tasks(components: ServerComponents, stack: AsyncExitStack, warehouse_id: str = "") -> None:
    """Start the background tasks of one warehouse. They end when the stack closes.

    Args:
        components: The components of the warehouse.
        stack: The stack that ends the tasks.
        warehouse_id: The id of the warehouse. It is empty for the server's own warehouse.
    """
    enter = stack.enter_async_context
    settings, store, clock = components.settings, components.store, components.clock
    catalog, timeline, history = components.catalog, components.timeline, components.history
    holder, observer = make_holder_name(clock), components.metrics.observe_events(components.warehouse_name)
    load_metadata = catalog.documents.peek  # A function that reads metadata without storing them in the cache.
    is_reader = settings.role == READ
    if not is_reader:
        await enter(
            open_delivery(
                settings,
                store,
                timeline,
                clock,
                load_metadata=load_metadata,
                holder=holder,
                observer=observer,
                warehouse_id=warehouse_id,
            )
        )
    if components.statement_runs is not None:
        runs = components.statement_runs
        await enter(deliver_statement_events(settings, store, runs, load_metadata=load_metadata))
    if catalog.column_usage.is_on:
        stack.push_async_callback(_flush_counts, catalog.column_usage)
        await enter(run_in_background("column usage", catalog.column_usage.run))
    if history.is_on:
        stack.push_async_callback(_flush_counts, history)
        await enter(run_in_background("query history", history.run))
    if settings.plan_prepare_bytes:
        # After a commit to a table that clients plan often, decode the new manifests before the next plan.
        load_table, limit_bytes = catalog.documents.table, settings.plan_prepare_bytes
        preparation = Preparation(components.planner, store, timeline, load_table, clock, limit_bytes=limit_bytes)
        await enter(run_in_background("planned tables", preparation.follow))
        await enter(run_in_background("preparation", preparation.work))
    if not is_reader:
        await enter(run_in_background("housekeeping", lambda: components.housekeeping.run(holder)))
    await enter(run_in_background("keys", lambda: _refresh_keys(components)))


def runs_services(settings: Settings) -> bool:
    """Return whether this server runs table services."""
    return settings.services_workers > 0 and settings.role != READ


def _make_cleaner(
    settings: Settings, store: PointerStore, registry: Registry, objects: ObjectStore, clock: Clock, catalog: Catalog
) -> Cleaner:
    """Return the cleaner of unused index files."""
    return Cleaner(
        store,
        registry,
        objects,
        clock,
        catalog.documents.table,
        partial(list_claimed, catalog.context),
        folders=(INDEX_FOLDER, FORMER_INDEX_FOLDER),
        find_folder=partial(get_files_folder, settings),
        retention_s=settings.index_retention_s,
    )


def make_holder_name(clock: Clock) -> str:
    """Return the name of this worker among all workers on the pointer store, for leases."""
    return f"{socket.gethostname()}:{os.getpid()}:{clock.uuid4()}"


def _open_scheduler(components: ServerComponents, url: str) -> AbstractAsyncContextManager[Scheduler | None]:
    return open_scheduler(
        components.settings,
        components.store,
        components.timeline,
        components.catalog.documents.peek,
        components.authenticator.service_tokens,
        components.clock,
        components.authorizer,
        holder=make_holder_name(components.clock),
        url=url,
        certificate=components.certificate,
        observer=components.metrics.observe_jobs(components.warehouse_name),
        status=components.services_status,
        extensions=components.extensions,
        base_path=components.base_path,
        # Only further warehouses share slots. The server's own warehouse has a list of them, and no shared slots.
        slots=None if components.warehouses is not None else components.shared_jobs.slots,
    )


async def _run_services(components: ServerComponents) -> None:
    """Run the table services of a warehouse in addition to the server's own, once the server accepts requests."""
    url = await asyncio.shield(components.shared_jobs.url)
    async with _open_scheduler(components, url) as scheduler:
        if scheduler is not None:
            await scheduler.run()


@asynccontextmanager
async def run_table_services(components: ServerComponents, url: str) -> AsyncIterator[None]:
    """Run the table services of the server's own warehouse while the context is active.

    The services of other warehouses of the server wait for `url`, so they start now, too.

    Args:
        components: The components of the server's own warehouse.
        url: The URL of this server, which is already serving. Jobs send their requests to it.
    """
    components.shared_jobs.url.set_result(url)
    if not runs_services(components.settings):
        yield
        return
    async with _open_scheduler(components, url) as scheduler:
        if scheduler is None:
            yield
            return
        async with run_in_background("services", scheduler.run):
            yield


@asynccontextmanager
async def _open_tracing(settings: Settings) -> AsyncIterator[Tracer | None]:
    """Open the tracer. Return None if no endpoint is set.

    Raises:
        ConfigError: The optional SDK is not installed.
    """
    if not settings.otel_endpoint:
        yield None
        return
    try:
        tracing_module = importlib.import_module("seamark.metaserver.api.http.observability.tracing")
    except ModuleNotFoundError as error:
        raise ConfigError(f"otel_endpoint needs the OpenTelemetry SDK ({error}): install seamark[otel]") from None
    async with tracing_module.open_tracing(settings) as tracer:
        yield tracer


def log_repaired(paths: Sequence[Path]) -> None:
    """Log a warning with the files that other accounts could access until the server changed their permissions."""
    if paths:
        shown_paths = [str(path) for path in paths[:_REPAIRED_SHOWN]]
        _log.warning("files were open to other accounts, and are private now", count=len(paths), paths=shown_paths)


def open_certificate(settings: Settings) -> Certificate | None:
    """Return the certificate of tls_cert and tls_key, or None if they are not set.

    Raises:
        ConfigError: A file is unusable. The message names the file.
    """
    if not settings.tls_cert:
        return None
    client_files = [Path(name) if name else None for name in (settings.tls_client_ca, settings.tls_client_crl)]
    return Certificate(Path(settings.tls_cert), Path(settings.tls_key), *client_files)


def warn_of_plain_http(settings: Settings) -> None:
    """Log a warning if tokens can be read in transit.

    This is possible if the server listens beyond loopback, and neither the server nor a proxy has TLS.
    """
    if settings.auth != "none" and not settings.tls_cert and not is_loopback(settings.host):
        _log.warning("tokens travel unencrypted: give tls_cert and tls_key, or end TLS in a proxy", host=settings.host)


def make_connection_limits(settings: Settings) -> ConnectionLimits:
    """Return the limits of connections according to the settings.

    If the settings do not limit the number of connections, the number of files that this process may open limits it.
    """
    limit = compute_connections_max(settings.connections_limit, files_each=1, minimum=settings.requests_limit)
    return ConnectionLimits(
        connections=limit,
        per_address=settings.connections_per_address or max(1, limit // 2),
        header_bytes=HEADER_BYTES_MAX,
        header_timeout_s=settings.header_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )


@asynccontextmanager
async def serve_requests(components: ServerComponents, sock: socket.socket) -> AsyncIterator[None]:
    """Serve requests on `sock` while the context is active. When the context ends, drain the server."""
    # aiohttp's access log is off, because the middleware logs more.
    runner = ConnectionRunner(
        build_app(components),
        make_connection_limits(components.settings),
        DirectAnswers(make_error_response, partial(components.metrics.observe, UNREADABLE, 400, 0.0, None)),
        tls=None if components.certificate is None else components.certificate.login_context,
        access_log=None,
        # `bodies` inflates a body in steps. aiohttp would inflate the whole body before a route can refuse it.
        auto_decompress=False,
        handle_signals=False,
        keepalive_timeout=components.settings.idle_timeout_s,
    )
    await runner.setup()
    try:
        site = web.SockSite(runner, sock, backlog=1024)
        await site.start()
        yield
        await _drain_requests(components, runner, site)
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serve_gateway(components: ServerComponents) -> AsyncIterator[None]:
    """Serve the objects gateway on `gateway_port` while the context is active."""
    settings = components.settings
    with contextlib.closing(bind_socket(settings, shared=settings.workers > 1, port=settings.gateway_port)) as sock:
        limits = make_connection_limits(settings)
        async with gateway_serving.serve_gateway(components, sock, limits, _get_tls_context(components)):
            yield


@asynccontextmanager
async def answer_peers(components: ServerComponents) -> AsyncIterator[None]:
    """Serve other replicas on `peer_address` while the context is active, and list this server among the replicas.

    If `peer_address` is not set, the function does nothing.
    """
    if components.peers is None:
        yield
        return
    async with (
        components.peers.serve(
            make_connection_limits(components.settings), _get_tls_context(components), components.metrics
        ),
        run_in_background("membership", components.peers.membership.run),
    ):
        yield


def _get_tls_context(components: ServerComponents) -> ssl.SSLContext | None:
    return None if components.certificate is None else components.certificate.context


async def _drain_requests(components: ServerComponents, runner: web.AppRunner, site: web.SockSite) -> None:
    """Wait up to `drain_timeout_s` for running requests, and abort those that have not finished.

    Before this wait, the server accepts connections for `drain_delay_s`, so that load balancers notice the drain.

    aiohttp's shutdown first stops reading, so a request with an incomplete body could never finish. Therefore this
    function waits for the handlers. aiohttp has the remaining time to finish sending answers.
    """
    components.drain.set()
    components.timeline.drain()
    if components.warehouses is not None:
        components.warehouses.end_waits()
    await asyncio.sleep(components.settings.drain_delay_s)
    await site.stop()
    deadline_s = components.clock.monotonic() + components.settings.drain_timeout_s
    while components.metrics.requests.answering and components.clock.monotonic() < deadline_s:  # noqa: ASYNC110  an event would cost every request
        await asyncio.sleep(0.02)
    if components.metrics.requests.answering:
        _log.warning("requests are cut off", count=components.metrics.requests.answering)
    if runner.server is not None:
        runner.server.pre_shutdown()
        await runner.server.shutdown(max(1.0, deadline_s - components.clock.monotonic()))


def exclude_permanent_objects_from_gc() -> None:
    """Exclude permanent objects, such as modules, routes and settings, from garbage collection.

    There are about 100,000 of them. Otherwise each collection would block the event loop for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


async def serve(
    settings: Settings,
    sock: socket.socket,
    clock: Clock,
    extensions: Extensions,
    on_ready: Callable[[], None],
    parent: int | None = None,
    *,
    is_first: bool = True,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    A second signal has no effect. SIGKILL stops the process immediately.

    Args:
        settings: The settings.
        sock: The bound socket.
        clock: The clock.
        extensions: The extensions.
        on_ready: Called when the server accepts requests.
        parent: A file descriptor that becomes readable when the supervisor exits, so that a worker stops with it.
        is_first: Whether this worker logs the messages that are the same for all workers.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        loop.add_reader(parent, stop.set)
    certificate = open_certificate(settings)
    async with AsyncExitStack() as stack:
        if certificate is not None:
            loop.add_signal_handler(signal.SIGHUP, certificate.request_reload)
            await stack.enter_async_context(run_in_background("certificate", certificate.watch))
        components = await stack.enter_async_context(open_components(settings, clock, extensions, certificate))
        await stack.enter_async_context(answer_peers(components))
        await stack.enter_async_context(serve_requests(components, sock))
        if settings.gateway_port:
            await stack.enter_async_context(serve_gateway(components))
        await stack.enter_async_context(run_table_services(components, make_server_url(settings, sock)))
        exclude_permanent_objects_from_gc()
        warn_of_plain_http(settings)
        _log.info("serving", url=make_server_url(settings, sock), pid=os.getpid(), settings=settings.list_changed())
        on_ready()
        if is_first:
            await stack.enter_async_context(
                run_once("warehouse", partial(wait_until_reachable, components.objects, settings))
            )
        await stop.wait()
        if parent is not None:
            loop.remove_reader(parent)
        _log.info("draining", timeout_s=settings.drain_timeout_s)
    _log.info("stopped", pid=os.getpid())


def run(
    settings: Settings,
    sock: socket.socket,
    extensions: Extensions,
    on_ready: Callable[[], None],
    parent: int | None = None,
    *,
    is_first: bool = True,
) -> None:
    """Run one worker on its own event loop until it has drained. `serve` describes the parameters."""
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, sock, SystemClock(), extensions, on_ready, parent, is_first=is_first))


async def _flush_counts(counts: ColumnUsage | QueryHistory) -> None:
    """Write the remaining counts to the database when the worker stops. If this fails, log a warning."""
    try:
        await counts.flush()
    except SeamarkError as error:
        _log.warning("the last reads are not recorded", counts=type(counts).__name__, error=error.message)


async def _refresh_keys(components: ServerComponents) -> None:
    """Read the signing keys periodically, because another replica may have added a key."""
    while True:
        await asyncio.sleep(REFRESH_S)
        await components.keyring.refresh()
