"""OpenTelemetry traces with one span for each request, sent to `otel_endpoint` over OTLP/HTTP.

The SDK is an optional dependency (`pip install 'seamark[otel]'`). Only this module imports the SDK, and the composition
root loads this module only if an endpoint is set, so a server without tracing needs no memory for it. A span has the
same fields as the log line. The client's W3C `traceparent` becomes the parent of the span.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from seamark.metaserver.settings.settings import Settings

EXPORT_TIMEOUT_S = 5


@asynccontextmanager
async def open_tracing(settings: Settings) -> AsyncIterator[Tracer]:
    """Yield a tracer, whose spans a thread of the SDK sends in batches. The last batch is sent when the context ends.

    `otel_endpoint` is the collector's base URL (http://host:4318) or the full path to /v1/traces.
    """
    endpoint = settings.otel_endpoint.rstrip("/")
    if not endpoint.endswith("/v1/traces"):
        endpoint += "/v1/traces"
    version = importlib.metadata.version("seamark")
    provider = TracerProvider(resource=Resource.create({"service.name": "seamark", "service.version": version}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)))
    try:
        yield provider.get_tracer("seamark", version)
    finally:
        await asyncio.to_thread(provider.shutdown)
