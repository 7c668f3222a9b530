"""Tests that a warehouse sends its events only to its own receivers, which the operator has allowed."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import BadRequest
from seamark.metaserver.api.http.observability.metrics import MULTIPROCESS_VARIABLE, ServerMetrics
from seamark.metaserver.timeline.events import make_event
from seamark.metaserver.timeline.webhooks import compute_signature
from seamark.metaserver.warehouses.definitions import CREDENTIALS, WAREHOUSE_SETTINGS, check_settings
from tests.server.rig import build_instant, build_settings
from tests.timeline.test_webhooks import Receiver, run_receiver
from tests.waits import PATIENCE_S
from tests.warehouses.world import run_server_with_warehouses

ROOTS = {"": "/v1", "sales": "/v1/sales", "stock": "/v1/stock"}


def check_events(receiver: Receiver, source: str, secret: str, expected: list[str]) -> None:
    """Check that a receiver has received exactly the events of the tables `expected`, in this order.

    Each event must be from `source`, and must be signed with `secret`.
    """
    assert [event["data"]["name"] for event in receiver.events] == expected
    assert {event["source"] for event in receiver.events} == {source}
    for headers, body in zip(receiver.headers, receiver.bodies, strict=True):
        signature = headers["Seamark-Signature"]
        timestamp_s = int(signature.removeprefix("t=").partition(",")[0])
        assert signature == compute_signature(secret, timestamp_s, body)


async def test_each_receiver_gets_the_events_of_its_warehouse_with_its_signature(tmp_path: Path) -> None:
    rng = random.Random(5)
    async with AsyncExitStack() as stack:
        receivers = {name: await stack.enter_async_context(run_receiver()) for name in (*ROOTS, "new")}
        world = await stack.enter_async_context(
            run_server_with_warehouses(
                tmp_path,
                webhook_urls=(receivers[""].url,),
                webhook_secret="of the server",
                warehouse_event_targets=tuple(f"{receiver.url}/" for receiver in receivers.values()),
            )
        )
        sources = {"": world.server.components.settings.make_warehouse_uri()}
        for name in ("sales", "stock"):
            credentials = {"webhook_urls": f"{receivers[name].url}/{name}", "webhook_secret": f"of {name}"}
            sources[name] = f"file://{world.lake / name}"
            await world.create_warehouse(name, credentials=credentials)
            answer = await world.send("GET", f"/api/v1/warehouses/{name}")
            assert "of " not in str(answer)
            assert receivers[name].url not in str(answer)
        # The first table of a further warehouse creates the namespace, whose event has no name.
        tables: dict[str, list[str]] = {name: [""] if name else [] for name in ROOTS}
        for number in range(12):
            name = rng.choice(list(ROOTS))
            tables[name].append(f"t{number}")
            await world.create_table(ROOTS[name], "db", f"t{number}")
        for name in ROOTS:
            await receivers[name].wait_for_events_count(len(tables[name]))
        # A change of the receiver ends the deliveries to the former receiver.
        body: dict[str, Any] = {
            "location": sources["sales"],
            "credentials": {"webhook_urls": f"{receivers['new'].url}/n"},
        }
        body["credentials"]["webhook_secret"] = "new"
        assert (await world.send("PUT", "/api/v1/warehouses/sales", body))[0] == 200
        await world.create_table("/v1/sales", "db", "last")
        await receivers["new"].wait_for_events_count(len(tables["sales"]) + 1)
        for name in ROOTS:
            check_events(receivers[name], sources[name], f"of {name or 'the server'}", tables[name])
        check_events(receivers["new"], sources["sales"], "new", [*tables["sales"], "last"])
        # The gauges of a warehouse end with its receivers.
        metrics = world.server.components.metrics
        lag_series = b'seamark_warehouse_event_lag_seconds{target="webhook",warehouse="stock"}'
        async with asyncio.timeout(PATIENCE_S):
            while lag_series not in metrics.render():
                await asyncio.sleep(0.05)
            body = {"location": sources["stock"], "credentials": {}}
            assert (await world.send("PUT", "/api/v1/warehouses/stock", body))[0] == 200
            while lag_series in metrics.render():
                await asyncio.sleep(0.05)


def test_closed_warehouse_is_not_in_the_gauges(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_shared in (False, True):
        metrics = ServerMetrics()
        jobs = {name: metrics.observe_jobs(name) for name in ("sales", "stock")}
        for name, observer in jobs.items():
            observer.set_services_state(leading=False, blocked=True)
            observer.set_queued_jobs(7)
            metrics.gateway_cache.set_values(
                warehouse=name, memory={"blocks": 4}, disk={}, served_bytes={}, events={"fetch": 1}
            )
        if is_shared:  # The metrics library cannot remove a value that several workers share. It becomes 0 instead.
            monkeypatch.setenv(MULTIPROCESS_VARIABLE, "/nonexistent")
        metrics.forget_warehouse("sales")
        monkeypatch.delenv(MULTIPROCESS_VARIABLE, raising=False)
        lines = metrics.render().decode().splitlines()
        shown_lines = [line for line in lines if 'warehouse="sales"' in line]
        names = ("seamark_warehouse_job_queue", "seamark_warehouse_services_blocked") if is_shared else ()
        assert shown_lines == [f'{name}{{warehouse="sales"}} 0.0' for name in names]
        assert 'seamark_warehouse_job_queue{warehouse="stock"} 7.0' in lines
        assert 'seamark_gateway_cache_bytes{tier="blocks"} 4.0' in lines


def test_warehouse_can_name_only_receivers_that_the_operator_allows(tmp_path: Path) -> None:
    allowed = ("http://hooks.example/sales/", "kafka://broker:9092/events", "nats://nats.example:4222/seamark/")
    settings = replace(build_settings(tmp_path), warehouse_event_targets=allowed)
    for name, value in (
        ("webhook_urls", "http://hooks.example/sales/a,http://hooks.example/sales/b/c"),
        ("openlineage_url", "http://hooks.example/sales/lineage"),
    ):
        assert check_settings({name: value}, CREDENTIALS, settings)
    assert check_settings({"event_kafka": allowed[1]}, WAREHOUSE_SETTINGS, settings)
    for name, value in (
        ("webhook_urls", "http://hooks.example/stock/"),
        ("webhook_urls", "http://hooks.example/sales/a,http://127.0.0.1:8181/"),
        ("webhook_urls", "http://hooks.example/sales/../stock"),
        ("webhook_urls", "http://hooks.example/sales/%2e%2e/stock"),
        ("webhook_urls", "http://hooks.example/sales/x/..%2f..%2fstock"),
        ("webhook_urls", "http://hooks.example/sales/..\\stock"),
        ("webhook_urls", "http://hooks.example/sales"),
        ("webhook_urls", "http://hooks.example.evil/sales/"),
        ("webhook_urls", "http://hooks.example/sales/@evil/sales/a?x"),
        ("webhook_urls", "https://hooks.example/sales/a"),
        ("openlineage_url", "http://hooks.example:81/sales/a"),
        ("event_nats", "nats://nats.example:4222,other:4222/seamark"),
        ("event_nats", "nats://nats.example:4222/stock"),
    ):
        with pytest.raises(BadRequest, match=r"warehouse_event_targets|invalid|subject"):
            check_settings({name: value}, CREDENTIALS, settings)
    for value in ("kafka://broker:9092/events2", "kafka://broker:9092,evil:9092/events", "kafka://evil:9092/events"):
        with pytest.raises(BadRequest, match="warehouse_event_targets"):
            check_settings({"event_kafka": value}, WAREHOUSE_SETTINGS, settings)
    with pytest.raises(BadRequest, match="warehouse_event_targets"):
        check_settings({"webhook_urls": "http://hooks.example/"}, CREDENTIALS, build_settings(tmp_path))
    urls = [f"http://hooks.example/sales/{number}" for number in range(17)]
    assert len(check_settings({"webhook_urls": urls[:16]}, CREDENTIALS, settings)["webhook_urls"]) == 16
    with pytest.raises(BadRequest, match="at most 16"):
        check_settings({"webhook_urls": urls}, CREDENTIALS, settings)


def test_address_that_clients_read_differently_is_refused(tmp_path: Path) -> None:
    allowed = (
        *("http://hooks.example/sales", "http://hooks.example/tree/", "nats://nats.example:4222/sales"),
        *("kafka://broker:9092,broker2:9092/topic", "tls://nats.example:4222/"),
    )
    settings = replace(build_settings(tmp_path), warehouse_event_targets=allowed)
    for name, value in (
        ("webhook_urls", "http://ann:word@HOOKS.example:80/sales"),
        ("event_nats", "nats://ann:word@nats.example:4222/sales"),
        ("event_kafka", "kafka://broker2:9092/topic"),
        ("openlineage_url", "http://hooks.example/tree/..a/b"),
    ):
        assert check_settings({name: value}, (*WAREHOUSE_SETTINGS, *CREDENTIALS), settings)
    for name, value in (
        ("webhook_urls", "http://169.254.169.254?admin=1@hooks.example/sales"),
        ("openlineage_url", "http://169.254.169.254#@hooks.example/sales"),
        ("webhook_urls", "http://127.0.0.1:8181\\@hooks.example/sales"),
        ("webhook_urls", "http://a@127.0.0.1@hooks.example/sales"),
        ("webhook_urls", "http://hooks.example/tree/..;x/admin"),
        ("webhook_urls", "http://hooks.example/tree/%252e%252e/admin"),
        ("webhook_urls", "http://hooks.example:81/sales"),
        ("event_nats", "nats://10.0.0.5:6379,u:p@nats.example:4222/sales"),
        ("event_nats", "tls://nats.example:4222,10.0.0.5:6379/sales"),
        ("event_kafka", "kafka://evil:9092,x@broker:9092/topic"),
        ("event_kafka", "kafka://evil:9092@broker:9092/topic"),
    ):
        with pytest.raises(BadRequest, match=r"warehouse_event_targets|invalid"):
            check_settings({name: value}, (*WAREHOUSE_SETTINGS, *CREDENTIALS), settings)


def test_messages_of_two_warehouses_have_different_ids() -> None:
    instant = build_instant(SystemClock(), position="7")
    ids = {make_event(instant, "s3://lake", warehouse_id).message_id for warehouse_id in ("", "a" * 32, "b" * 32)}
    assert ids == {"7", f"{'a' * 32}-7", f"{'b' * 32}-7"}
