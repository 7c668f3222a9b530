"""Tests that the list of waiting jobs reveals nothing about jobs in namespaces that the caller may not read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.access.tokens import create_token
from seamark.metaserver.services.job import Job
from seamark.metaserver.services.job_queue import JobQueue
from seamark.metaserver.services.running import NAMESPACES_LISTED_MAX, WAITING_JOBS_LISTED_MAX, JobsState, RunningJobs
from seamark.metaserver.store.lease import SERVICES, Lease
from seamark.metaserver.store.model import Grant
from seamark.metaserver.store.open import open_store
from tests.catalog.rig import SCHEMA
from tests.server.rig import build_settings, run_server


def build_state(*waiting_jobs: tuple[str, int]) -> str:
    """Return the state that a replica publishes.

    Args:
        waiting_jobs: The namespaces with their numbers of waiting jobs, in the order in which the jobs are queued.
    """
    queue = JobQueue(lambda: 0.0, limit=20_000)
    for namespace, count in waiting_jobs:
        for number in range(count):
            assert queue.put(Job("indexing", (namespace,), f"t{number}", f"{namespace}.t{number}"))
    return RunningJobs().encode(queue, now_ms=0)


@pytest.mark.parametrize(
    ("waiting_jobs", "is_complete_by_namespace"),
    [
        ((("a", 3), ("b", 2)), {"a": True, "b": True}),
        ((("a", WAITING_JOBS_LISTED_MAX), ("b", 2)), {"a": True, "b": False}),
        ((("a", WAITING_JOBS_LISTED_MAX + 1),), {"a": False, "b": True}),
    ],
)
def test_list_of_jobs_is_complete_if_no_readable_job_is_omitted(
    waiting_jobs: tuple[tuple[str, int], ...], is_complete_by_namespace: dict[str, bool]
) -> None:
    state = msgspec.json.decode(build_state(*waiting_jobs), type=JobsState)
    assert {
        name: state.is_complete(lambda path, name=name: path == (name,)) for name in is_complete_by_namespace
    } == is_complete_by_namespace
    assert state.is_complete(lambda _: True) == all(is_complete_by_namespace.values())


def test_list_of_jobs_is_incomplete_if_namespaces_are_not_published() -> None:
    waiting_jobs = [(f"n{number:04}", 1) for number in range(WAITING_JOBS_LISTED_MAX + NAMESPACES_LISTED_MAX)]
    state = msgspec.json.decode(build_state(*waiting_jobs), type=JobsState)
    assert not state.more
    assert state.is_complete(lambda path: path == ("n0000",))
    state = msgspec.json.decode(build_state(*waiting_jobs, ("other", 1)), type=JobsState)
    assert state.more
    assert len(state.unlisted) == NAMESPACES_LISTED_MAX
    assert not state.is_complete(lambda path: path == ("n0000",))


async def test_list_of_a_table_does_not_reveal_waiting_jobs_of_other_namespaces(tmp_path: Path) -> None:
    clock = SystemClock()
    headers = {}
    async with open_store(build_settings(tmp_path).make_database_url(), clock=clock) as store:
        for name, grant in (("admin", Grant("admin", "admin")), ("of-db", Grant("of-db", "reader", ("db",)))):
            headers[name] = {"Authorization": f"Bearer {await create_token(store, clock, name, None, [grant])}"}
    async with run_server(tmp_path, auth="token", services_workers=0) as server:
        body = {"name": "t", "schema": SCHEMA}
        async with server.http.post(
            f"{server.url}/v1/namespaces/db/tables", json=body, headers=headers["admin"]
        ) as response:
            assert response.status == 200, await response.text()
        lease = Lease(server.components.store, clock, SERVICES, "a replica", lasts_s=600)
        await lease.hold(build_state(("a", WAITING_JOBS_LISTED_MAX + 1)))

        async def count_jobs(path: str, principal: str) -> tuple[int, bool]:
            status, answer = await server.get(path, headers=headers[principal])
            assert status == 200, answer
            return len(answer["waiting"]), answer["complete"]

        assert await count_jobs("/api/v1/jobs", "admin") == (WAITING_JOBS_LISTED_MAX, False)
        assert await count_jobs("/api/v1/tables/db/t/jobs", "of-db") == (0, True)
