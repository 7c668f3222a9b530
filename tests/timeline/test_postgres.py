"""Tests of the timeline with PostgreSQL, where commits of replicas become visible out of order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from seamark.metaserver.store.operations import CreateNamespace
from tests.server.rig import build_settings, run_server
from tests.timeline.test_watch import Replica, open_replica
from tests.timeline.test_webhooks import run_receiver
from tests.waits import until


async def test_watchers_of_two_replicas_see_every_instant_once_and_in_the_same_order(
    tmp_path: Path, postgres_url: str
) -> None:
    count = 40
    async with AsyncExitStack() as stack:
        settings = build_settings(tmp_path, database=postgres_url)
        first_replica, second_replica = await open_replica(stack, settings), await open_replica(stack, settings)
        await first_replica.store.transact([CreateNamespace(path=("db",), properties={})])

        async def write(replica: Replica) -> list[str]:
            return [await replica.record() for _ in range(count)]

        async with asyncio.timeout(60):
            *ids_of_writers, first_replica_ids, second_replica_ids = await asyncio.gather(
                write(first_replica),
                write(second_replica),
                write(first_replica),
                write(second_replica),
                first_replica.watch_ids(4 * count),
                second_replica.watch_ids(4 * count),
            )
    assert first_replica_ids == second_replica_ids
    assert sorted(first_replica_ids) == sorted(instant_id for ids in ids_of_writers for instant_id in ids)


async def test_webhooks_and_long_polls_work_across_replicas(tmp_path: Path, postgres_url: str) -> None:
    async with (
        run_receiver() as receiver,
        run_server(tmp_path / "a", database=postgres_url, webhook_urls=(receiver.url,)) as first_server,
        run_server(tmp_path / "b", database=postgres_url, webhook_urls=(receiver.url,)) as second_server,
    ):
        poll = asyncio.create_task(second_server.get("/api/v1/timeline?wait=60"))
        await until(lambda: second_server.components.timeline.watchers == 1)
        instant = await first_server.record("x")
        async with asyncio.timeout(60):
            status, page = await poll
        assert (status, [instant["id"] for instant in page["instants"]]) == (200, [instant.id])
        await second_server.record("y")
        assert await receiver.wait_for_events(2) == ["x", "y"]
        await asyncio.sleep(0.3)  # A second delivery would arrive in this time.
        assert len(receiver.events) == 2
