"""Tests of watchers of the timeline. Commits of this replica wake them at once, and those of other replicas soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.formats.runtime.errors import RetryLater
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.operations import CreateNamespace, RecordInstant
from seamark.metaserver.store.port import InstantFilter, PointerStore
from seamark.metaserver.timeline.timeline import Timeline, open_timeline
from tests.server.rig import build_instant, build_settings
from tests.waits import until

CLOCK = SystemClock()


class Replica:
    """A replica's store and timeline."""

    def __init__(self, store: PointerStore, timeline: Timeline) -> None:
        self.store, self.timeline = store, timeline

    async def record(self, name: str = "t", *, notify: bool = True) -> str:
        instant = build_instant(CLOCK, name)
        await self.store.transact([RecordInstant(instant=instant)])
        if notify:
            self.timeline.notify()
        return instant.id

    async def watch_ids(self, count: int) -> list[str]:
        """Read the timeline in pages of up to 7 until at least `count` instants have arrived, and return their ids."""
        ids: list[str] = []
        since = None
        while len(ids) < count:
            page = await self.timeline.watch(InstantFilter(since=since), limit=7, timeout_s=10)
            ids += [instant.id for instant in page]
            since = page[-1].position if page else since
        return ids


async def open_replica(stack: AsyncExitStack, settings: Settings) -> Replica:
    store = await stack.enter_async_context(open_store(settings.make_database_url(), clock=CLOCK))
    timeline = await stack.enter_async_context(open_timeline(settings, store, CLOCK))
    return Replica(store, timeline)


@pytest.fixture
async def both_replicas(tmp_path: Path) -> AsyncIterator[tuple[Replica, Replica]]:
    """Open two replicas over one database, which has the namespace `db`.

    The first replica polls rarely, so its own notifications arrive before a poll, and it allows only 3 watchers.
    """
    async with AsyncExitStack() as stack:
        first_replica = await open_replica(stack, build_settings(tmp_path, watch_poll_s=0.6, watchers_limit=3))
        second_replica = await open_replica(stack, build_settings(tmp_path, watch_poll_s=0.1))
        await first_replica.store.transact([CreateNamespace(path=("db",), properties={})])
        yield first_replica, second_replica
        first_replica.timeline.check_invariants()
        second_replica.timeline.check_invariants()


async def test_watch_with_an_existing_match_answers_without_waiting(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, _ = both_replicas
    instant_id = await first_replica.record()
    async with asyncio.timeout(60):
        instants = await first_replica.timeline.watch(InstantFilter(), 10, 30)
    assert [instant.id for instant in instants] == [instant_id]


async def test_commit_of_this_replica_wakes_a_watcher_long_before_the_next_poll(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replica = await open_replica(stack, build_settings(tmp_path, watch_poll_s=60))
        await replica.store.transact([CreateNamespace(path=("db",), properties={})])
        watch = asyncio.create_task(replica.timeline.watch(InstantFilter(), 10, 60))
        await until(lambda: replica.timeline.watchers == 1)
        instant_id = await replica.record()
        async with asyncio.timeout(60):
            assert [instant.id for instant in await watch] == [instant_id]


async def test_commit_of_another_replica_wakes_a_watcher_by_the_poll(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, second_replica = both_replicas
    watch = asyncio.create_task(second_replica.timeline.watch(InstantFilter(), 10, 30))
    await until(lambda: second_replica.timeline.watchers == 1)
    instant_id = await first_replica.record()
    async with asyncio.timeout(60):
        assert [instant.id for instant in await watch] == [instant_id]


async def test_watcher_is_not_woken_by_instants_outside_its_filter(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, _ = both_replicas
    async with first_replica.timeline.watch_instants(InstantFilter(name="wanted")) as watcher:
        assert await first_replica.timeline.read_next(watcher, 10) == []
        await first_replica.record("other")
        await asyncio.sleep(0.2)  # A notification would wake the watcher in this time.
        assert not watcher.woken.is_set()
        await first_replica.record("wanted")
        instants = await asyncio.wait_for(first_replica.timeline.read_next(watcher, 10), 60)
        assert [instant.name for instant in instants] == ["wanted"]


async def test_watch_without_new_instants_ends_after_its_time(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, _ = both_replicas
    started_s = CLOCK.monotonic()
    async with asyncio.timeout(60):
        assert await first_replica.timeline.watch(InstantFilter(), 10, 0.3) == []
    assert CLOCK.monotonic() - started_s > 0.25


async def test_unannounced_instant_is_found_when_the_watch_ends(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replica = await open_replica(stack, build_settings(tmp_path, watch_poll_s=600))
        await replica.store.transact([CreateNamespace(path=("db",), properties={})])
        watch = asyncio.create_task(replica.timeline.watch(InstantFilter(), 10, 3))
        await until(lambda: replica.timeline.watchers == 1)
        instant_id = await replica.record(notify=False)
        assert [instant.id for instant in await watch] == [instant_id]


async def test_watchers_over_the_limit_get_a_retry_error(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, _ = both_replicas
    watches = [asyncio.create_task(first_replica.timeline.watch(InstantFilter(), 1, 60)) for _ in range(3)]
    await until(lambda: first_replica.timeline.watchers == 3)
    with pytest.raises(RetryLater, match="3 clients already watch"):
        await first_replica.timeline.watch(InstantFilter(), 1, 30)
    await first_replica.record()
    assert [len(result) for result in await asyncio.gather(*watches)] == [1, 1, 1]
    assert first_replica.timeline.watchers == 0


async def test_drain_answers_every_watcher_at_once_and_accepts_no_new_one(
    both_replicas: tuple[Replica, Replica],
) -> None:
    first_replica, _ = both_replicas
    watch = asyncio.create_task(first_replica.timeline.watch(InstantFilter(), 1, 30))
    await until(lambda: first_replica.timeline.watchers == 1)
    first_replica.timeline.drain()
    async with asyncio.timeout(60):
        assert await watch == []
        assert await first_replica.timeline.watch(InstantFilter(), 1, 30) == []


async def test_store_is_not_polled_without_watchers(both_replicas: tuple[Replica, Replica]) -> None:
    first_replica, _ = both_replicas
    await first_replica.timeline.watch(InstantFilter(), 1, 0.05)
    await until(lambda: "timeline-poller" not in {task.get_name() for task in asyncio.all_tasks()})


async def test_reader_misses_no_instant_while_two_replicas_write(
    both_replicas: tuple[Replica, Replica],
) -> None:
    first_replica, second_replica = both_replicas
    count = 60

    async def write(replica: Replica) -> list[str]:
        return [await replica.record() for _ in range(count)]

    async with asyncio.timeout(60):
        written_a, written_b, *results = await asyncio.gather(
            write(first_replica),
            write(second_replica),
            first_replica.watch_ids(2 * count),
            second_replica.watch_ids(2 * count),
        )
    assert results[0] == results[1]
    assert len(set(results[0])) == 2 * count
    assert [item for item in results[0] if item in set(written_a)] == written_a
    assert [item for item in results[0] if item in set(written_b)] == written_b


async def test_archived_instants_can_still_be_read(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        replica = await open_replica(stack, build_settings(tmp_path, timeline_keep=2))
        await replica.store.transact([CreateNamespace(path=("db",), properties={})])
        ids = [await replica.record() for _ in range(5)]
        assert await replica.timeline.archive() == 3
        assert await replica.timeline.archive() == 0
        assert [instant.id for instant in await replica.timeline.read(InstantFilter(), 10)] == ids
        live_instants = await replica.timeline.read(InstantFilter(archived=False), 10)
        assert [instant.id for instant in live_instants] == ids[-2:]
