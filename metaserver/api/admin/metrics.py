"""GET /metrics: the metrics of the server, for Prometheus."""

from __future__ import annotations

import prometheus_client as prometheus
from aiohttp import web

from seamark.metaserver.access.rights.decisions import WAREHOUSE
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.http.observability.metrics import select_warehouse


@Route("GET", "/metrics", "metrics", "Metrics in the text exposition format", check=Check.LOGIN)
async def metrics(call: Call) -> web.Response:
    """Return the metrics of the process in the text exposition format.

    A server has its own warehouse, and may have further warehouses. The URL of a further warehouse shows only
    its metrics. The URL of the server shows the metrics of all warehouses if the caller may browse the server's own
    warehouse.
    """
    body, name = call.components.metrics.render(), call.components.warehouse_name
    if name or not await call.may(WAREHOUSE, "loadNamespaceMetadata"):
        body = select_warehouse(body, name)
    return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})
