"""GET /metrics: the metrics of the server, for Prometheus."""

from __future__ import annotations

import prometheus_client as prometheus
from aiohttp import web

from seamark.metaserver.api.http.dispatch import Call, Check, Route


@Route("GET", "/metrics", "metrics", "Metrics in the text exposition format", check=Check.LOGIN)
async def metrics(call: Call) -> web.Response:
    """Return the metrics of the process in the text exposition format."""
    body = call.components.metrics.render()
    return web.Response(body=body, headers={"Content-Type": prometheus.CONTENT_TYPE_LATEST})
