"""Typed keys for the parts of the application and of a request: `request.app[CATALOG]`, `request[PRINCIPAL]`.

Routes get their dependencies only from here. There is no service locator and no module state, so that two servers can
run in one process, as tests of replicas do.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from seamark.formats.runtime.clock import Clock
from seamark.formats.runtime.tls import Certificate
from seamark.metaserver.access.audit import AuditLog
from seamark.metaserver.access.authenticator import Authenticator
from seamark.metaserver.access.authorizer import Authorizer
from seamark.metaserver.access.gateway_keys import GatewayKeys
from seamark.metaserver.access.keyring import Keyring
from seamark.metaserver.access.page_tokens import PageTokens
from seamark.metaserver.access.principal import Principal
from seamark.metaserver.api.http.slots import WorkerLimits
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.commit.changes.group_commit import Commits
from seamark.metaserver.commit.engine_commits.engine_commits import EngineCommits
from seamark.metaserver.commit.expiration.expiration import Expiration
from seamark.metaserver.commit.expiration.orphan_files import OrphanRemoval
from seamark.metaserver.commit.rewriting.manifest_rewrite import ManifestRewrite
from seamark.metaserver.index.files.indexes import Indexes
from seamark.metaserver.index.files.registry import Registry
from seamark.metaserver.index.files.usage import Usage
from seamark.metaserver.objects.port import ObjectStore
from seamark.metaserver.planner.plan.planner import Planner
from seamark.metaserver.runtime.extensions import Extensions
from seamark.metaserver.runtime.staleness import Staleness
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.port import PointerStore
from seamark.metaserver.timeline.timeline import Timeline

SETTINGS: web.AppKey[Settings] = web.AppKey("settings", Settings)
EXTENSIONS: web.AppKey[Extensions] = web.AppKey("extensions", Extensions)
CLOCK: web.AppKey[Clock] = web.AppKey("clock", Clock)
STORE: web.AppKey[PointerStore] = web.AppKey("store", PointerStore)
OBJECTS: web.AppKey[ObjectStore] = web.AppKey("objects", ObjectStore)
CATALOG: web.AppKey[Catalog] = web.AppKey("catalog", Catalog)
STOCK_COMMITS: web.AppKey[EngineCommits] = web.AppKey("stock-commits", EngineCommits)
COMMITS: web.AppKey[Commits] = web.AppKey("commits", Commits)
MANIFEST_REWRITE: web.AppKey[ManifestRewrite] = web.AppKey("manifest_rewrite", ManifestRewrite)
ORPHAN_REMOVAL: web.AppKey[OrphanRemoval] = web.AppKey("orphan_removal", OrphanRemoval)
EXPIRATION: web.AppKey[Expiration] = web.AppKey("expiration", Expiration)
PLANNER: web.AppKey[Planner] = web.AppKey("planner", Planner)
REGISTRY: web.AppKey[Registry] = web.AppKey("index-registry", Registry)
INDEXES: web.AppKey[Indexes] = web.AppKey("indexes", Indexes)
USAGE: web.AppKey[Usage] = web.AppKey("index-usage", Usage)
TIMELINE: web.AppKey[Timeline] = web.AppKey("timeline", Timeline)
AUTHENTICATOR: web.AppKey[Authenticator] = web.AppKey("authenticator", Authenticator)
AUTHORIZER: web.AppKey[Authorizer] = web.AppKey("authorizer", Authorizer)
GATEWAY_KEYS: web.AppKey[GatewayKeys] = web.AppKey("gateway-keys", GatewayKeys)
KEYRING: web.AppKey[Keyring] = web.AppKey("keyring", Keyring)
PAGES: web.AppKey[PageTokens] = web.AppKey("pages", PageTokens)
AUDIT: web.AppKey[AuditLog] = web.AppKey("audit", AuditLog)
BOUNDS: web.AppKey[WorkerLimits] = web.AppKey("bounds", WorkerLimits)
CERTIFICATE: web.AppKey[Certificate] = web.AppKey("certificate", Certificate)
"""Only of a server with TLS."""
DRAIN: web.AppKey[asyncio.Event] = web.AppKey("drain", asyncio.Event)
"""Set when the server stops."""

PRINCIPAL: web.RequestKey[Principal] = web.RequestKey("principal", Principal)
"""The principal of the request. The middleware sets it before each handler, except on public routes."""
STALENESS: web.RequestKey[Staleness] = web.RequestKey("staleness", Staleness)
"""How old an answer may be; only for requests that allow stale answers."""
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""The client's X-Request-Id if it is valid, otherwise a UUIDv7. Part of the answer, the logs and the audit."""
