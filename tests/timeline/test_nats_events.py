"""Tests of events in a stream of NATS JetStream. Each instant arrives in order, despite failures of the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats as nats_client
import pytest
from nats.js.client import JetStreamContext

from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.timeline import delivery
from seamark.metaserver.timeline.addresses import parse_subject
from tests.server.rig import run_server
from tests.services.nats import Nats, run_nats
from tests.timeline.test_webhooks import record_names
from tests.waits import until


@pytest.fixture(autouse=True)
def _quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the leases to 3 seconds, so that a server soon takes over the delivery from a stopped server."""
    monkeypatch.setattr(delivery, "LEASE_S", 3.0)


@pytest.fixture
async def stream(nats: Nats, request: pytest.FixtureRequest) -> AsyncIterator[EventStream]:
    """Yield an empty stream with its own subject."""
    client = await nats_client.connect(nats.address)
    subject = f"s{abs(hash(request.node.nodeid))}"
    yield EventStream(client.jetstream(), nats, subject)
    await client.close()


class EventStream:
    """A stream with the events of a server."""

    def __init__(self, context: JetStreamContext, nats: Nats, subject: str) -> None:
        self._context = context
        self.subject = subject
        self.setting = f"{nats.address}/{subject}"

    async def create(self) -> None:
        await self._context.add_stream(name=self.subject, subjects=[f"{self.subject}.>"])

    async def count(self) -> int:
        """Return the number of messages."""
        return (await self._context.stream_info(self.subject)).state.messages

    async def read(self, count: int) -> list[dict[str, Any]]:
        """Wait for `count` messages. Return all messages, with subject, headers and event."""
        async with asyncio.timeout(60):
            while await self.count() < count:
                await asyncio.sleep(0.02)
        messages = [await self._context.get_msg(self.subject, seq) for seq in range(1, await self.count() + 1)]
        return [
            {"subject": message.subject, "headers": message.headers, "event": json.loads(message.data or b"")}
            for message in messages
        ]


def list_names(messages: list[dict[str, Any]]) -> list[str]:
    return [message["event"]["data"]["name"] for message in messages]


async def test_stream_receives_each_instant_in_order_as_a_cloud_event(tmp_path: Path, stream: EventStream) -> None:
    await stream.create()
    async with run_server(tmp_path, event_nats=stream.setting) as server:
        await record_names(server, "ab")
        await server.record("v", action="create")
        messages = await stream.read(3)
    assert list_names(messages) == ["a", "b", "v"]
    first_message, last_message = messages[0], messages[-1]
    assert first_message["subject"] == f"{stream.subject}.table.commit"
    assert last_message["subject"] == f"{stream.subject}.table.create"
    assert first_message["event"]["specversion"] == "1.0"
    assert first_message["event"]["type"] == "io.seamark.table.commit.completed"
    assert first_message["headers"]["Content-Type"].startswith("application/cloudevents+json")
    assert first_message["headers"]["Nats-Msg-Id"] == first_message["event"]["id"]


async def test_events_wait_until_a_stream_has_their_subject(tmp_path: Path, stream: EventStream) -> None:
    async with run_server(tmp_path, event_nats=stream.setting) as server:
        await record_names(server, "ab")
        metrics = server.components.metrics
        await until(lambda: b'seamark_event_failures_total{target="nats"}' in metrics.render())
        await stream.create()
        assert list_names(await stream.read(2)) == ["a", "b"]


async def test_stream_has_each_event_once_after_the_nats_server_was_killed(
    tmp_path: Path, stream: EventStream, nats: Nats
) -> None:
    await stream.create()
    async with run_server(tmp_path, event_nats=stream.setting) as server:
        await record_names(server, "ab")
        await stream.read(2)
        nats.kill()
        await record_names(server, "cd")
        nats.start()
        client = await nats_client.connect(nats.address)
        other_stream = EventStream(client.jetstream(), nats, stream.subject)
        assert list_names(await other_stream.read(4)) == ["a", "b", "c", "d"]
        await client.close()


async def test_restarted_server_continues_after_the_last_confirmed_event(tmp_path: Path, stream: EventStream) -> None:
    await stream.create()
    async with run_server(tmp_path, event_nats=stream.setting) as server:
        await record_names(server, "ab")
        await stream.read(2)
    async with run_server(tmp_path) as server:
        await record_names(server, "cd")
    async with run_server(tmp_path, event_nats=stream.setting) as server:
        await record_names(server, "e")
        assert list_names(await stream.read(5)) == list("abcde")


async def test_user_and_password_of_the_address_are_used(tmp_path: Path) -> None:
    folder = tmp_path / "nats"
    folder.mkdir()
    with run_nats(folder, "--user", "ann", "--pass", "secret") as server:
        address = server.address.replace("nats://", "nats://ann:secret@")
        client = await nats_client.connect(address)
        context = client.jetstream()
        await context.add_stream(name="lake", subjects=["lake.>"])
        async with run_server(tmp_path / "home", event_nats=f"{address}/lake") as running_server:
            await record_names(running_server, "a")
            async with asyncio.timeout(60):
                while not (await context.stream_info("lake")).state.messages:
                    await asyncio.sleep(0.02)
        await client.close()


@pytest.mark.parametrize(
    "text", ["nats://host/seamark", "nats://host:4222", "http://host:1/a", "nats://host:4222/a.*", "nats://host:x/a"]
)
def test_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="event_nats"):
        parse_subject(text)


def test_errors_and_logs_do_not_show_the_password() -> None:
    with pytest.raises(ConfigError) as error:
        parse_subject("nats://ann:secret@host/seamark")
    assert "secret" not in error.value.message
    address = parse_subject("nats://ann:secret@host:4222,ann:secret@other:4222/lake.events")
    assert address.servers == ("nats://ann:secret@host:4222", "nats://ann:secret@other:4222")
    assert address.shown == "nats://ann:***@host:4222,nats://ann:***@other:4222/lake.events"
    assert "secret" not in repr(address)
