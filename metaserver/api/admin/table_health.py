"""The route that reports what is wrong with a table."""

from __future__ import annotations

import asyncio
from functools import partial

from seamark.metaserver.api.http.describe import ResponseSpec
from seamark.metaserver.api.http.dispatch import Call, Route
from seamark.metaserver.api.http.keys import CATALOG, CLOCK, SETTINGS
from seamark.metaserver.api.indexes.index_state import view_of
from seamark.metaserver.catalog.policies import load_policies, with_policies
from seamark.metaserver.services.health import TableHealth, health_of


@Route(
    "GET",
    "/api/v1/tables/{namespace}/{table}/health",
    "loadTableHealth",
    "Returns counts and sizes of the current snapshot, and what is wrong with them",
    tags=("metadata",),
    answers=(
        ResponseSpec(200, "What it costs queries, and which table service corrects it", TableHealth),
        ResponseSpec(404, "No such table"),
    ),
)
async def load_table_health(call: Call) -> TableHealth:
    metadata = (await call.app[CATALOG].tables.load(call.namespace, call.name)).metadata
    view = await view_of(call, metadata, metadata.current_snapshot_id)
    policies = await load_policies(call.app[CATALOG].parts.store, call.namespace)
    metadata = with_policies(metadata, policies)
    return await asyncio.to_thread(partial(health_of, metadata, view, call.app[SETTINGS], call.app[CLOCK].now_ms()))
