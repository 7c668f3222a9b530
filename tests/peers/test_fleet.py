"""Tests of several servers over PostgreSQL and S3. Any server answers any request, and restarts cause no error."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.faults.rigs.http import HttpClient, OutcomeUnknown
from tests.peers.fleet import PLAN, Fleet, count_peer_reads, list_replicas, open_fleet, request_plan
from tests.services.command import run_seamark
from tests.services.postgres import Postgres
from tests.services.process import is_http_ok
from tests.services.s3 import S3
from tests.waits import block_until

APPENDS = 8
DELAYED_DRAIN = {"SEAMARK_DRAIN_DELAY_S": "1.5"}
"""Settings for health checks. The test's load balancer checks more often than this delay, even on a busy machine."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, s3: S3) -> Iterator[Fleet]:
    with open_fleet(tmp_path_factory.mktemp("fleet"), postgres, s3, 2, env=DELAYED_DRAIN) as fleet:
        yield fleet


def test_files_are_read_once_for_all_replicas_and_commits_are_visible_at_once(fleet: Fleet) -> None:
    fleet.write(APPENDS)
    clients = fleet.build_clients()
    answers = [request_plan(client) for client in clients]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0] == answers[1]
    assert len(answers[0][1]) == APPENDS
    fleet.write(1)
    assert [len(request_plan(client)[1]) for client in reversed(clients)] == [APPENDS + 1] * 2

    manifests = {path: count for path, count in fleet.count_storage_reads().items() if path.endswith("-m0.avro")}
    assert len(manifests) == APPENDS + 1
    repeated_reads = sum(manifests.values()) - len(manifests)
    # On a busy machine, a replica may seem slow. The other replica then reads a file from the storage again, and counts
    # a hedged read. Replicas publish their counts every second.
    block_until(lambda: repeated_reads <= sum(count_peer_reads(replica, "hedged") for replica in fleet.replicas))
    assert repeated_reads < APPENDS
    block_until(
        lambda: (
            sum(count_peer_reads(replica, "hits") + count_peer_reads(replica, "fetched") for replica in fleet.replicas)
            > 0
        )
    )
    assert (
        sum(count_peer_reads(replica, "damaged") + count_peer_reads(replica, "failed") for replica in fleet.replicas)
        == 0
    )


@pytest.mark.slow
def test_listing_has_all_live_replicas(fleet: Fleet) -> None:
    replicas = list_replicas(fleet.replicas[1])
    assert [replica["address"] for replica in replicas] == sorted(link.address for link in fleet.links)
    assert all(0 < replica["expires-in-ms"] <= 3000 and replica["weight"] == 1 for replica in replicas)
    seamark = run_seamark("replicas", "--url", fleet.replicas[0].base_url)
    assert seamark.returncode == 0, seamark.stderr
    assert all(link.address in seamark.stdout for link in fleet.links)


@dataclass
class BalancedLoad:
    """Clients behind a load balancer. It sends requests to replicas whose last check of /readyz succeeded."""

    fleet: Fleet
    errors: list[str] = field(default_factory=list)
    reads: int = 0
    commits: int = 0
    _ready_addresses: list[str] = field(default_factory=list)
    _stop_event: threading.Event = field(default_factory=threading.Event)

    def record_ready_replicas(self) -> None:
        while not self._stop_event.wait(0.05):
            self._ready_addresses = [
                replica.base_url for replica in self.fleet.replicas if is_http_ok(f"{replica.base_url}/readyz")
            ]

    def send(self, seed: int) -> None:
        """Plan and commit through random ready replicas until the end. A fifth of the requests are commits.

        Record each answer that is neither a success nor a conflict as an error.
        """
        rng = random.Random(seed)
        while not self._stop_event.is_set():
            if not (ready_addresses := list(self._ready_addresses)):
                time.sleep(0.01)
                continue
            client, is_commit = HttpClient(rng.choice(ready_addresses)), rng.random() < 0.2
            try:
                status, body = self._commit(client, rng) if is_commit else client.call("POST", PLAN, {})
            except OutcomeUnknown as unknown_outcome:
                self.errors.append(f"lost: {unknown_outcome}")
                continue
            finally:
                client.close()
            if status == 200:
                self.commits += is_commit
                self.reads += not is_commit
            elif status != 409:  # 409: another client has committed first.
                self.errors.append(f"{status}: {body}")

    def _commit(self, client: HttpClient, rng: random.Random) -> tuple[int, object]:
        update = {"action": "set-properties", "updates": {f"p{rng.randrange(5)}": str(rng.random())}}
        return client.call("POST", PLAN.removesuffix("/plan"), {"requirements": [], "updates": [update]})

    @contextmanager
    def run_clients(self, clients: int) -> Iterator[None]:
        functions = [self.record_ready_replicas, *(partial(self.send, number) for number in range(clients))]
        threads = [threading.Thread(target=function, daemon=True) for function in functions]
        for thread in threads:
            thread.start()
        block_until(lambda: self.reads and self.commits)
        try:
            yield
        finally:
            self._stop_event.set()
            for thread in threads:
                thread.join(60)


def restart_one_by_one(fleet: Fleet, rounds: int, clients: int) -> BalancedLoad:
    """Restart one replica after another under load, `rounds` times each.

    After each restart, wait until more than five reads and a commit have succeeded. Return the load with its counts.
    """
    load = BalancedLoad(fleet)
    with load.run_clients(clients):
        for _ in range(rounds):
            for replica in fleet.replicas:
                reads, commits = load.reads, load.commits
                assert replica.terminate() == 0
                replica.start()
                block_until(
                    lambda reads=reads, commits=commits: load.reads > reads + 5 and load.commits > commits  # type: ignore[misc]
                )
    return load


@pytest.mark.slow
def test_rolling_restart_under_load_fails_no_request(fleet: Fleet) -> None:
    fleet.write(1)
    load = restart_one_by_one(fleet, rounds=1, clients=2)
    assert load.errors == []
    fleet.wait_for_replicas()


@pytest.mark.slow
def test_repeated_rolling_restarts_of_three_replicas_fail_no_request(
    tmp_path: Path, postgres: Postgres, s3: S3
) -> None:
    with open_fleet(tmp_path, postgres, s3, count=3, env=DELAYED_DRAIN) as fleet:
        fleet.write(4)
        load = restart_one_by_one(fleet, rounds=3, clients=6)
        assert load.errors == []
        assert load.commits > 20  # With fewer commits, the test would have tested little.
