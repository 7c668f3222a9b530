"""Tests of the server's operation: health, readiness, metrics, logs, traces, OpenAPI."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from seamark.commands import reference
from seamark.commands.serving.extensions import EXTENSIONS
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.api.app import add_routes
from seamark.metaserver.store.model import DroppedEntry, Entry, EntryKind
from seamark.metaserver.store.operations import CreateEntry, DropEntry
from tests.api.client import Api
from tests.api.indexes.test_lookups import create_two_files, look_up
from tests.server.rig import RunningServer, run_server
from tests.services.process import choose_free_port, is_http_ok
from tests.services.seamark import Seamark
from tests.waits import until


async def read_metrics(server: RunningServer) -> dict[str, float]:
    """Return the values of /metrics by name and labels, such as `seamark_requests_total{status=200}`."""
    async with server.http.get(f"{server.url}/metrics") as answer:
        assert answer.status == 200
        text = await answer.text()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}"] = sample.value
    return samples


async def test_metrics_count_requests_by_operation_and_status(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await server.get("/v1/namespaces")
        await server.get("/v1/namespaces/none")
        for path in ("/a", "/b", "/c"):  # Unknown paths must not become label values.
            await server.get(path)
        metrics = await read_metrics(server)
    assert metrics["seamark_requests_total{operation=listNamespaces,status=200}"] == 1
    assert metrics["seamark_requests_total{operation=loadNamespaceMetadata,status=404}"] == 1
    assert metrics["seamark_requests_total{operation=unrouted,status=404}"] == 3
    assert metrics["seamark_request_seconds_count{operation=listNamespaces}"] == 1
    # The creation time of each series would double the size of the answer.
    assert not [name for name in metrics if "_created" in name]


async def test_metrics_report_values_of_the_components(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.metaserver.api.sampling.SAMPLE_INTERVAL_S", 0.02)
    async with run_server(tmp_path) as server:
        waiting_request = asyncio.create_task(server.get("/api/v1/timeline?wait=60"))
        async with asyncio.timeout(60):
            while (metrics := await read_metrics(server)).get("seamark_timeline_watchers{}") != 1:
                await asyncio.sleep(0.02)
        for name in (
            "seamark_event_loop_lag_seconds{}", "seamark_store_queue_depth{}", "seamark_metadata_cache_bytes{}",
            "seamark_requests_in_flight{}", "seamark_commits_total{outcome=committed}",
        ):  # fmt: skip
            assert name in metrics
        await server.record()
        await waiting_request


async def test_metric_reports_the_memory_of_opened_indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamark.metaserver.api.sampling.SAMPLE_INTERVAL_S", 0.02)
    async with run_server(tmp_path) as server:
        assert (await read_metrics(server)).get("seamark_index_memory_bytes{}", 0) == 0
        api = Api(server)
        table, files = await create_two_files(api)
        await table.index("keys", "record", ["id"], files)
        assert (await look_up(api, [105], index="keys"))["complete"]
        async with asyncio.timeout(60):
            while (await read_metrics(server)).get("seamark_index_memory_bytes{}", 0) == 0:
                await asyncio.sleep(0.02)
        assert (await read_metrics(server))["seamark_index_evictions{}"] == 0


async def test_commit_is_counted_by_its_outcome(tmp_path: Path) -> None:
    schema = {"type": "struct", "schema-id": 0, "fields": [{"id": 1, "name": "x", "required": False, "type": "long"}]}
    async with run_server(tmp_path) as server:
        table = f"{server.url}/v1/namespaces/db/tables"
        async with server.http.post(table, json={"name": "t", "schema": schema}) as answer:
            assert answer.status == 200
        good_commit = {"requirements": [], "updates": [{"action": "set-properties", "updates": {"a": "b"}}]}
        bad_commit = {
            **good_commit,
            "requirements": [{"type": "assert-table-uuid", "uuid": "0" * 8 + "-0000-0000-0000-" + "0" * 12}],
        }
        async with server.http.post(f"{table}/t", json=good_commit) as answer:
            assert answer.status == 200
        async with server.http.post(f"{table}/t", json=bad_commit) as answer:
            assert answer.status == 409
        metrics = await read_metrics(server)
    assert metrics["seamark_commits_total{outcome=committed}"] == 1
    assert metrics["seamark_commits_total{outcome=conflict}"] == 1
    assert metrics["seamark_commits_total{outcome=unknown}"] == 0


async def test_readiness_but_not_liveness_requires_store_and_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        status, body = await server.get("/readyz")
        assert (status, body["status"]) == (200, "ready")

        async def fail() -> None:
            raise RetryLater("postgresql://db.internal is away")

        async def sleep_long() -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr("seamark.metaserver.api.admin.health.PING_TIMEOUT_S", 0.1)
        monkeypatch.setattr(server.components.store, "ping", fail)
        monkeypatch.setattr(server.components.objects, "ping", sleep_long)
        status, body = await server.get("/readyz")
        assert status == 503
        assert body["checks"]["store"] == "failing"
        assert body["checks"]["objects"].startswith("no answer")
        assert "internal" not in json.dumps(body)  # The answer to anonymous clients contains no host names.
        status, _ = await server.get("/healthz")
        assert status == 200
        server.components.drain.set()
        _, body = await server.get("/readyz")
        assert body["checks"]["drain"] == "draining"


def test_log_lines_of_requests_contain_no_secret(start_seamark: Callable[..., Seamark]) -> None:
    server = start_seamark()
    headers = {
        "Authorization": "Bearer hunter2",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "X-Request-Id": "me",
    }
    with contextlib.suppress(urllib.error.HTTPError):
        request = urllib.request.Request(
            f"{server.base_url}/v1/namespaces/db?token=hunter2", b"hunter2", headers=headers
        )
        urllib.request.urlopen(request, timeout=60)
    request = urllib.request.Request(f"{server.base_url}/v1/namespaces?token=hunter2", headers=headers)
    urllib.request.urlopen(request, timeout=60).close()
    server.terminate()
    log_text = server.log.read_text()
    assert "hunter2" not in log_text
    events = [json.loads(line) for line in log_text.splitlines() if line.startswith("{")]
    line = [event for event in events if event.get("request_id") == "me"][-1]
    assert line["route"] == "/v1/namespaces"
    assert line["method"] == "GET"
    assert line["operation"] == "listNamespaces"
    assert line["status"] == 200
    assert line["bytes"] > 0
    assert line["ms"] >= 0
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert [event["event"] for event in events if event["event"] != "request"] == ["serving", "draining", "stopped"]


@pytest.mark.slow
def test_log_that_cannot_be_written_fails_no_request(tmp_path: Path) -> None:
    port = choose_free_port()
    argv = [str(Path(sys.executable).parent / "seamark"), "serve", "--home", str(tmp_path), "--port", str(port)]
    with open("/dev/full", "wb") as full_device:
        server = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=full_device)
    try:
        deadline = time.monotonic() + 60
        while not is_http_ok(f"http://127.0.0.1:{port}/readyz"):
            assert time.monotonic() < deadline
            assert server.poll() is None
        assert is_http_ok(f"http://127.0.0.1:{port}/v1/namespaces", contains="namespaces")
    finally:
        server.terminate()
        assert server.wait(60) == 0


async def test_trace_reaches_the_collector_under_the_clients_parent(tmp_path: Path) -> None:
    received_requests: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        received_requests.append(ExportTraceServiceRequest.FromString(body))
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with run_server(tmp_path, otel_endpoint=endpoint) as server:
            trace_id = "0af7651916cd43dd8448eb211c80319c"
            await server.get("/v1/namespaces", headers={"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"})
            await server.get("/v1/namespaces/none")
    finally:
        await runner.cleanup()
    spans = [
        span
        for request in received_requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    spans_by_name = {span.name: span for span in spans}
    assert spans_by_name["listNamespaces"].trace_id.hex() == trace_id
    assert spans_by_name["listNamespaces"].parent_span_id.hex() == "b7ad6b7169203331"
    attributes = {attribute.key: attribute.value for attribute in spans_by_name["loadNamespaceMetadata"].attributes}
    assert attributes["http.response.status_code"].int_value == 404
    assert attributes["http.route"].string_value == "/v1/namespaces/{namespace}"


async def test_openapi_document_describes_the_answers_of_the_routes(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await server.record("a")
        await server.components.store.transact(make_drop("gone"))
        _, document = await server.get("/api/v1/openapi.json")
        assert document["openapi"].startswith("3.1")
        for path in ("/api/v1/timeline", "/api/v1/dropped", "/healthz", "/readyz"):
            status, body = await server.get(path)
            response = document["paths"][path]["get"]["responses"][str(status)]
            validate(body, response["content"]["application/json"]["schema"], document)
        _, body = await server.get("/api/v1/timeline?limit=x")
        validate(body, {"$ref": "#/components/schemas/Error"}, document)
    assert list_own_paths() == {path for path in document["paths"] if path.startswith("/api/")}


def list_own_paths() -> set[str]:
    """Return the templates of all routes below /api, whether they are in the OpenAPI document or not."""
    app = web.Application()
    add_routes(app, EXTENSIONS)
    resources = [route.resource for route in app.router.routes()]
    return {
        resource.canonical for resource in resources if resource is not None and resource.canonical.startswith("/api/")
    }


def validate(body: Any, schema: dict[str, Any], document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(body)


def make_drop(name: str) -> list[Any]:
    """Return the operations that create a table and drop it. Its dropped entry has expired, so it can be purged."""
    entry = Entry(kind=EntryKind.TABLE, namespace=("db",), name=name, uuid=name, metadata_location=f"file:///{name}")
    keep = DroppedEntry(id=f"drop-{name}", entry=entry, purge=False, dropped_ms=1, expires_ms=2, principal_name="me")
    drop = DropEntry(kind=EntryKind.TABLE, namespace=("db",), name=name, keep=keep)
    return [CreateEntry(entry=entry), drop]


def test_openapi_file_equals_the_generated_one() -> None:
    committed_text = (reference.REFERENCE / "openapi.json").read_text()
    assert committed_text == reference.render_openapi_document(), "run python -m seamark.commands.reference"


async def test_housekeeping_archives_old_instants_and_deletes_expired_data(tmp_path: Path) -> None:
    async with run_server(tmp_path, timeline_keep=1) as server:
        for _ in range(4):
            await server.record("a")
        await server.components.store.transact(make_drop("gone"))
        report = await server.components.housekeeping.run_round()
        assert report["archived"] == 3
        assert report["purged"] == 1
        status, body = await server.get("/api/v1/dropped")
        assert (status, body["dropped"]) == (200, [])
        _, body = await server.get("/api/v1/timeline")
        assert len(body["instants"]) == 4


@pytest.mark.slow
async def test_twenty_open_and_close_cycles_leak_no_descriptor_thread_or_task(tmp_path: Path) -> None:
    async def cycle(number: int) -> None:
        async with run_server(tmp_path / str(number % 2), webhook_urls=("http://127.0.0.1:9/x",)) as server:
            await server.get("/readyz")
            await server.record("a")
            await server.get("/api/v1/timeline?wait=0.01&since=latest")

    process = psutil.Process(os.getpid())
    for number in range(2):
        await cycle(number)
    gc.collect()
    await asyncio.sleep(0.1)
    descriptors_before, threads_before, tasks_before = (
        process.num_fds(),
        process.num_threads(),
        len(asyncio.all_tasks()),
    )
    for number in range(20):
        await cycle(number)
    gc.collect()
    # A leak would grow by one in each of the 20 cycles. One descriptor may be open at any time, and the thread pool of
    # asyncio.to_thread may still grow by a few threads to its own limit.
    await until(lambda: process.num_fds() <= descriptors_before + 1)
    await until(lambda: process.num_threads() <= threads_before + 8)
    await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
