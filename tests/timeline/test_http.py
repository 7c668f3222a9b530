"""Tests of the timeline over HTTP: pages, filters, long poll and event stream, with two replicas."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from seamark.metaserver.store.model import Entry, EntryKind
from seamark.metaserver.store.operations import CreateEntry, RenameEntry
from tests.server.rig import RunningServer, run_server
from tests.waits import until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RunningServer]:
    async with run_server(tmp_path) as first_server:
        yield first_server


def list_ids(page: dict[str, Any]) -> list[str]:
    return [instant["id"] for instant in page["instants"]]


async def test_pages_are_consecutive_in_both_directions(server: RunningServer) -> None:
    written_ids = [(await server.record(name)).id for name in "abcde"]
    listed_ids: list[str] = []
    path = "/api/v1/timeline?limit=2"
    for _ in range(3):
        _, page = await server.get(path)
        listed_ids += list_ids(page)
        path = f"/api/v1/timeline?limit=2&since={page['next-since']}"
    assert listed_ids == written_ids
    status, page = await server.get(path)
    assert (status, page["instants"]) == (200, [])
    assert path.endswith(page["next-since"])
    newest_first = written_ids[::-1]
    _, newest_page = await server.get("/api/v1/timeline?limit=2&order=desc")
    assert list_ids(newest_page) == newest_first[:2]
    _, older_page = await server.get(f"/api/v1/timeline?order=desc&since={newest_page['next-since']}")
    assert list_ids(older_page) == newest_first[2:]
    _, last_page = await server.get(f"/api/v1/timeline?order=desc&since={older_page['next-since']}")
    assert last_page == {"instants": [], "next-since": None}


async def test_all_conditions_of_a_filter_apply(server: RunningServer) -> None:
    expected = await server.record("a", "drop")
    await server.record("a", "commit")
    await server.record("b", "drop")
    _, page = await server.get("/api/v1/tables/db/a/timeline?action=drop&state=completed")
    assert list_ids(page) == [expected.id]
    _, page = await server.get("/api/v1/timeline?state=requested")
    assert list_ids(page) == []


async def test_history_of_a_table_survives_its_rename(server: RunningServer) -> None:
    store = server.components.store
    entry = Entry(kind=EntryKind.TABLE, namespace=("db",), name="old", uuid="u1", metadata_location="file:///x")
    await store.transact([CreateEntry(entry=entry)])
    instant = await server.record("old", "create", uuid="u1")
    await store.transact(
        [RenameEntry(kind=EntryKind.TABLE, namespace=("db",), name="old", to_namespace=("db",), to_name="new")]
    )
    rename_instant = await server.record("new", "rename", uuid="u1")
    _, page = await server.get("/api/v1/tables/db/new/timeline")
    assert list_ids(page) == [instant.id, rename_instant.id]
    _, page = await server.get("/api/v1/tables/db/old/timeline")
    assert list_ids(page) == [instant.id]
    status, body = await server.get("/api/v1/tables/db/never/timeline")
    assert (status, body["error"]["type"]) == (404, "NoSuchTableException")


async def test_error_names_an_invalid_parameter(server: RunningServer) -> None:
    cases: list[str] = [
        "limit=0",
        "limit=-1",
        "limit=x",
        "limit=1e3",
        "limit=٣",
        "limit=99999999999",
        "state=done",
        "order=up",
        "wait=-1",
        "wait=nan",
        "wait=inf",
        "wait=soon",
        "wait=1&order=desc",
        "since=",
        "since=%00",
        "since=a'b",
        "action=",
        "action=%00",
        f"since={'a' * 65}",
    ]
    for query in cases:
        status, body = await server.get(f"/api/v1/timeline?{query}")
        assert status == 400, query
        # The message for `wait=1&order=desc` may name either parameter.
        assert query.split("=")[0].split("&")[0] in body["error"]["message"].lower() or "order" in query, query


async def test_long_poll_returns_a_commit_of_another_replica(server: RunningServer, tmp_path: Path) -> None:
    async with run_server(tmp_path) as other_server:
        first_instant = await server.record("a")
        _, page = await other_server.get("/api/v1/timeline")
        poll = asyncio.create_task(other_server.get(f"/api/v1/timeline?since={page['next-since']}&wait=60"))
        await until(lambda: other_server.components.timeline.watchers == 1)
        assert not poll.done()
        second_instant = await server.record("b")
        async with asyncio.timeout(60):
            status, page = await poll
        assert (status, list_ids(page)) == (200, [second_instant.id])
        assert first_instant.id != second_instant.id


async def test_long_poll_without_news_ends_with_the_position_to_continue(server: RunningServer) -> None:
    await server.record("a")
    _, page = await server.get("/api/v1/timeline")
    since = page["next-since"]
    status, page = await server.get(f"/api/v1/timeline?since={since}&wait=0.2")
    assert (status, page) == (200, {"instants": [], "next-since": since})


async def read_events(answer: aiohttp.ClientResponse, count: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (event id, data) of the next `count` events."""
    events: list[tuple[str, dict[str, Any]]] = []
    event_id = ""
    async with asyncio.timeout(60):
        while len(events) < count:
            line = (await answer.content.readline()).decode().rstrip("\n")
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                events.append((event_id, json.loads(line[6:])))
    return events


async def test_event_stream_continues_after_the_last_event_of_the_client(server: RunningServer, tmp_path: Path) -> None:
    headers = {"Accept": "text/event-stream"}
    ids = [(await server.record(name)).id for name in "ab"]
    async with run_server(tmp_path) as other_server:
        async with other_server.http.get(f"{other_server.url}/api/v1/timeline", headers=headers) as stream:
            assert stream.status == 200
            assert stream.headers["Content-Type"].startswith("text/event-stream")
            assert "X-Request-Id" in stream.headers
            events = await read_events(stream, 2)
            ids.append((await server.record("c")).id)  # This instant comes from the other replica.
            events += await read_events(stream, 1)
            ids.append((await other_server.record("d")).id)
            events += await read_events(stream, 1)
        assert [data["id"] for _, data in events] == ids
        assert all(event_id == data["position"] for event_id, data in events)
        headers["Last-Event-ID"] = events[1][0]
        async with other_server.http.get(f"{other_server.url}/api/v1/tables/db/c/timeline", headers=headers) as stream:
            ((_, data),) = await read_events(stream, 1)
            assert data["name"] == "c"


async def test_stream_since_latest_has_only_later_events(server: RunningServer) -> None:
    await server.record("a")
    headers = {"Accept": "text/event-stream"}
    async with server.http.get(f"{server.url}/api/v1/timeline?since=latest", headers=headers) as stream:
        await until(lambda: server.components.timeline.watchers == 1)
        later_instant = await server.record("b")
        ((_, data),) = await read_events(stream, 1)
    assert data["id"] == later_instant.id


async def test_streams_over_the_limit_get_503_and_retry_after(tmp_path: Path) -> None:
    headers = {"Accept": "text/event-stream"}
    async with (
        run_server(tmp_path, watchers_limit=1, requests_limit=1) as server,
        server.http.get(f"{server.url}/api/v1/timeline", headers=headers),
    ):
        async with server.http.get(f"{server.url}/api/v1/timeline", headers=headers) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert (await answer.json())["error"]["type"] == "ServiceUnavailableException"
        status, _ = await server.get("/api/v1/dropped")  # Open streams do not count as running requests.
        assert status == 200


async def test_timeline_path_accepts_names_with_special_characters(server: RunningServer) -> None:
    cases: list[str] = ["a.b", "ü", "a b", "100%", "a+b", "a/b"]
    for name in cases:
        instant = await server.record(name, namespace=("db", name))
        namespace = quote(f"db\x1f{name}", safe="")
        path = URL(f"{server.url}/api/v1/tables/{namespace}/{quote(name, safe='')}/timeline", encoded=True)
        async with server.http.get(path) as answer:
            assert list_ids(await answer.json()) == [instant.id], name
