"""The dependencies of the routes, as one value that the composition root fills."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from metaserver.access.audit import AuditLog
from metaserver.access.authenticator import Authenticator
from metaserver.access.authorizer import Authorizer
from metaserver.access.keyring import StoredKeyring
from metaserver.api.http.metrics import ServerMetrics
from metaserver.catalog.catalog import Catalog
from metaserver.clock import Clock
from metaserver.commits.group_commit import Commits
from metaserver.index.files.cleaning import Cleaner
from metaserver.index.files.indexes import Indexes
from metaserver.index.files.registry import Registry
from metaserver.index.files.usage import Usage
from metaserver.objects.port import ObjectStore
from metaserver.planner.plan.planner import Planner
from metaserver.settings import Settings
from metaserver.store.port import PointerStore
from metaserver.timeline.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class ServerParts:
    """Everything that the routes use. The composition root opens it, and closes it after the application."""

    settings: Settings
    clock: Clock
    store: PointerStore
    objects: ObjectStore
    catalog: Catalog
    timeline: Timeline
    registry: Registry
    indexes: Indexes
    cleaner: Cleaner
    usage: Usage
    planner: Planner
    commits: Commits
    metrics: ServerMetrics
    authenticator: Authenticator
    authorizer: Authorizer
    keyring: StoredKeyring
    audit: AuditLog
    tracer: Tracer | None
    """None when tracing is off."""
    drain: asyncio.Event
    """Set when the server stops: readiness fails, long-polls return, and connections are closed after the answer."""
