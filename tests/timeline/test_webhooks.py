"""Tests of webhooks with a real receiver.

Every instant arrives at least once, in order, signed, despite failures and restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.store.lease import Lease
from seamark.metaserver.timeline import delivery
from tests.server.rig import RunningServer, run_server

SECRET = "receiver and server know it"


@dataclass
class Receiver:
    """A receiver of webhooks that records the events which it accepts.

    Attributes:
        answers: The statuses of the first answers. Later answers have the status 204.
        pause_s: The time that the receiver waits before each answer.
    """

    url: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    pause_s: float = 0.0

    async def receive(self, request: web.Request) -> web.Response:
        body = await request.read()
        await asyncio.sleep(self.pause_s)
        status = self.answers.pop(0) if self.answers else 204
        if status < 300:
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.events.append(json.loads(body))
        headers = {"Location": self.url + "/elsewhere"} if 300 <= status < 400 else {}
        return web.Response(status=status, headers=headers)

    async def wait_for_events_count(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.events) < count:
                await asyncio.sleep(0.02)

    async def wait_for_events(self, count: int) -> list[str]:
        """Wait for at least `count` events, and return the table names of all events that have arrived."""
        await self.wait_for_events_count(count)
        return [event["data"]["name"] for event in self.events]


@asynccontextmanager
async def run_receiver() -> AsyncIterator[Receiver]:
    """Serve a receiver of webhooks."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/{path:.*}", receiver.receive)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with run_receiver() as server:
        yield server


@pytest.fixture(autouse=True)
def _quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the leases to 3 seconds, so that a server soon takes over the delivery from a stopped server."""
    monkeypatch.setattr(delivery, "LEASE_S", 3.0)


async def record_names(server: RunningServer, names: str) -> None:
    for name in names:
        await server.record(name)


async def test_every_instant_arrives_once_and_in_order(tmp_path: Path, receiver: Receiver) -> None:
    async with run_server(tmp_path, webhook_urls=(receiver.url,)) as server:
        await record_names(server, "abc")
        assert await receiver.wait_for_events(3) == ["a", "b", "c"]
        await record_names(server, "de")
        assert await receiver.wait_for_events(5) == ["a", "b", "c", "d", "e"]
        await asyncio.sleep(0.3)  # A second delivery would arrive in this time.
        assert len(receiver.events) == 5


async def test_event_is_a_signed_cloud_event(tmp_path: Path, receiver: Receiver) -> None:
    async with run_server(tmp_path, webhook_urls=(receiver.url,), webhook_secret=SECRET) as server:
        instant = await server.record("t")
        await receiver.wait_for_events(1)
    event, headers, body = receiver.events[0], receiver.headers[0], receiver.bodies[0]
    assert headers["Content-Type"].startswith("application/cloudevents+json")
    assert event["specversion"] == "1.0"
    assert event["type"] == "io.seamark.table.commit.completed"
    assert event["subject"] == "db/t"
    assert event["id"] == event["data"]["position"]
    assert event["source"].startswith("file:///")
    assert event["time"].endswith("Z")
    assert event["data"]["id"] == instant.id
    assert "fingerprint" not in event["data"]
    at_s, digest = (part.split("=", 1)[1] for part in headers["Seamark-Signature"].split(","))
    expected = hmac.new(SECRET.encode(), at_s.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert hmac.compare_digest(digest, expected)
    assert abs(int(at_s) - SystemClock().now_ms() // 1000) < 30


async def test_rejected_event_is_sent_again_before_any_later_one(tmp_path: Path, receiver: Receiver) -> None:
    receiver.answers = [500, 302, 429]
    async with run_server(tmp_path, webhook_urls=(receiver.url,)) as server:
        await record_names(server, "ab")
        assert await receiver.wait_for_events(2) == ["a", "b"]
        async with server.http.get(f"{server.url}/metrics") as answer:
            assert "seamark_webhook_failures_total 3.0" in await answer.text()


async def test_restarted_server_continues_after_the_last_delivered_event(tmp_path: Path, receiver: Receiver) -> None:
    async with run_server(tmp_path, webhook_urls=(receiver.url,)) as server:
        await record_names(server, "ab")
        await receiver.wait_for_events(2)
    async with run_server(tmp_path) as server:  # During this time, no replica delivers events.
        await record_names(server, "cd")
    async with run_server(tmp_path, webhook_urls=(receiver.url,)):
        assert await receiver.wait_for_events(4) == ["a", "b", "c", "d"]
        await asyncio.sleep(0.3)  # A second delivery would arrive in this time.
    ids = [event["id"] for event in receiver.events]
    assert ids == sorted(set(ids))


async def test_server_stopped_during_delivery_repeats_at_most_the_current_event(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.pause_s = 0.1
    async with run_server(tmp_path) as server:
        await record_names(server, "abcdef")
    async with run_server(tmp_path, webhook_urls=(receiver.url,)):
        await receiver.wait_for_events(3)
    async with run_server(tmp_path, webhook_urls=(receiver.url,)):
        async with asyncio.timeout(60):
            while not receiver.events or receiver.events[-1]["data"]["name"] != "f":
                await asyncio.sleep(0.05)
    names = [event["data"]["name"] for event in receiver.events]
    assert list(dict.fromkeys(names)) == list("abcdef")
    assert len(names) <= 7


async def test_stopped_server_releases_its_target_at_once(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "LEASE_S", 3600.0)  # The lease must not expire during the test.
    async with run_server(tmp_path, webhook_urls=(receiver.url,)) as server:
        await record_names(server, "a")
        await receiver.wait_for_events(1)
    name = "webhook:" + hashlib.sha256(receiver.url.encode()).hexdigest()[:32]
    async with run_server(tmp_path) as server:
        components = server.components
        # The first server's lease has not expired, so this call fails unless the server has released the lease.
        await Lease(components.store, components.clock, name, "another", lasts_s=delivery.LEASE_S).hold()


async def test_two_replicas_deliver_each_event_once_even_if_one_takes_over(tmp_path: Path, receiver: Receiver) -> None:
    async with run_server(tmp_path, webhook_urls=(receiver.url,)) as first_server:
        async with run_server(tmp_path, webhook_urls=(receiver.url,)) as other_server:
            await record_names(other_server, "ab")
            await record_names(first_server, "cd")
            assert await receiver.wait_for_events(4) == ["a", "b", "c", "d"]
        await record_names(first_server, "ef")
        assert await receiver.wait_for_events(6) == list("abcdef")
        await asyncio.sleep(0.5)  # A second delivery would arrive in this time.
        assert len(receiver.events) == 6


async def test_unavailable_receiver_does_not_delay_events_to_other_receivers(
    tmp_path: Path, receiver: Receiver
) -> None:
    async with run_server(tmp_path, webhook_urls=("http://127.0.0.1:9/away", receiver.url)) as server:
        await record_names(server, "ab")
        assert await receiver.wait_for_events(2) == ["a", "b"]
