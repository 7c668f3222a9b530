"""The declaration of the components of a server. The composition root opens them, and the routes use them.

A handler gets a component from its call, as in `call.components.catalog`. There is no service locator and no module
state, so two servers can run in one process, for example in tests of replicas. If only one module of routes uses a
component, this module adds it to the application itself (`add_components`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from opentelemetry.trace import Tracer

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.access.audit import AuditLog
from seamark.metaserver.access.authenticator import Authenticator
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.gateway_keys import GatewayKeys
from seamark.metaserver.access.keyring import StoredKeyring
from seamark.metaserver.api.http.observability.metrics import ServerMetrics
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.database_limits import DatabaseShares
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.commit.engine_commits.engine_commits import EngineCommits
from seamark.metaserver.commit.expiration.expiration import Expiration
from seamark.metaserver.commit.expiration.orphan_files import OrphanRemoval
from seamark.metaserver.commit.rewriting.manifest_rewrite import ManifestRewrite
from seamark.metaserver.history.history import QueryHistory
from seamark.metaserver.index.files.indexes import Indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.cubes.segments import Segments
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.runtime.extensions import Extensions
from seamark.metaserver.services.housekeeping import Housekeeping
from seamark.metaserver.services.running import ServicesStatus, SharedJobs
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.streams.streams import Streams
from seamark.metaserver.timeline.statement_lineage import StatementRuns
from seamark.metaserver.timeline.timeline import Timeline
from seamark.metaserver.warehouses.warehouses import Warehouses

if TYPE_CHECKING:
    from seamark.metaserver.peers.peers import Peers


@dataclass(frozen=True, kw_only=True)
class SharedComponents:
    """The components that all warehouses of a worker share.

    They have no state of a warehouse. They are limits of the worker, or components that identify callers.
    """

    extensions: Extensions
    authenticator: Authenticator
    database_shares: DatabaseShares
    metrics: ServerMetrics
    tracer: Tracer | None
    """The tracer. None if tracing is off."""
    worker_limits: WorkerLimits
    shared_jobs: SharedJobs
    certificate: Certificate | None
    """The certificate of the server. None if the server does not use TLS."""
    drain: asyncio.Event
    """An event that is set when the server stops.

    Then readiness fails, long-polls return, and connections are closed after the answer.
    """


@dataclass(frozen=True, kw_only=True)
class ServerComponents:
    """The components that the routes of one warehouse use.

    The composition root opens the components, and closes them after the application. Each warehouse has its own
    components, except those of `SharedComponents`.
    """

    settings: Settings
    clock: Clock
    extensions: Extensions
    store: PointerStore
    objects: ObjectStore
    catalog: Catalog
    timeline: Timeline
    registry: Registry
    indexes: Indexes
    segments: Segments
    history: QueryHistory
    statement_runs: StatementRuns | None
    """The statements whose OpenLineage events wait for their receiver. None if there is no receiver."""
    housekeeping: Housekeeping
    usage: Usage
    database_shares: DatabaseShares
    planner: Planner
    engine_commits: EngineCommits
    commits: Commits
    streams: Streams
    expiration: Expiration
    orphan_removal: OrphanRemoval
    manifest_rewrite: ManifestRewrite
    metrics: ServerMetrics
    authenticator: Authenticator
    authorizer: Authorizer
    keyring: StoredKeyring
    gateway_keys: GatewayKeys
    peers: Peers | None
    """The other replicas. None if `peer_address` is not set."""
    services_status: ServicesStatus
    shared_jobs: SharedJobs
    audit: AuditLog
    tracer: Tracer | None
    """The tracer. None if tracing is off."""
    worker_limits: WorkerLimits
    certificate: Certificate | None
    """The certificate of the server. None if the server does not use TLS."""
    drain: asyncio.Event
    """An event that is set when the server stops: readiness fails, long-polls return, and connections are closed
    after the answer.
    """
    warehouses: Warehouses | None
    """The further warehouses. None in the components of a further warehouse."""

    @property
    def warehouse_name(self) -> str:
        """The name of this warehouse. It is empty for the server's own warehouse."""
        # Only the server's own warehouse has the list of further warehouses. The name of a further warehouse is
        # the prefix of its paths.
        return "" if self.warehouses is not None else self.settings.prefix

    @property
    def base_path(self) -> str:
        """The path in the URL of this warehouse. It is empty for the server's own warehouse."""
        return make_warehouse_path(self.warehouse_name) if self.warehouse_name else ""


def make_warehouse_path(name: str) -> str:
    """Return the path below which the server serves all routes of a further warehouse."""
    return f"/warehouses/{name}"


COMPONENTS: web.AppKey[ServerComponents] = web.AppKey("components", ServerComponents)
