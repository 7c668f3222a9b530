"""Tests of eight processes on one table and fifty on one name: a linearisable history, one winner, no loss, no 5xx."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from tests.faults.rigs.http import HttpClient
from tests.faults.rigs.linear import Event, find_violations
from tests.services.postgres import Postgres
from tests.services.seamark import Seamark

# A new process gets all modules from the fork server, because an import takes longer than the work of a process.
_FORKS = multiprocessing.get_context("forkserver")


def _run_client(base_url: str, client_number: int, commits: int) -> tuple[list[Event], Counter[int]]:
    """Append until `commits` commits have succeeded, or until too many answers are neither a success nor a conflict.

    Return (all reads and appends, number of answers to appends by status).
    """
    client = HttpClient(base_url)
    events: list[Event] = []
    statuses: Counter[int] = Counter()
    commit_count = 0
    attempt = 0
    while commit_count < commits:
        began_s = time.monotonic()
        head, sequence = client.read_head()
        events.append(Event("read", began_s, time.monotonic(), "ok", value=head))
        attempt += 1
        snapshot_id = client_number * 1_000_000 + attempt
        began_s = time.monotonic()
        status, _ = client.append(snapshot_id, head, sequence + 1)
        ended_s = time.monotonic()
        statuses[status] += 1
        outcome = {200: "ok", 409: "conflict"}.get(status, "unknown")
        events.append(Event("append", began_s, ended_s, outcome, head, snapshot_id))
        commit_count += status == 200
        if statuses.total() - statuses[200] - statuses[409] > 10:
            break  # After ten unexplained answers, the caller reports them.
    return events, statuses


def _run_race(base_urls: list[str], processes: int, commits: int) -> None:
    """Commit from many processes at once, and check the chain of snapshots for lost or repeated commits."""
    HttpClient(base_urls[0]).create_table()
    _FORKS.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(processes, mp_context=_FORKS) as pool:
        futures = [
            pool.submit(_run_client, base_urls[number % len(base_urls)], number + 1, commits)
            for number in range(processes)
        ]
        histories = [future.result(timeout=1200) for future in futures]
    events = [event for client_events, _ in histories for event in client_events]
    statuses: Counter[int] = sum((client_statuses for _, client_statuses in histories), Counter())
    assert set(statuses) <= {200, 409}, f"unexplained answers: {statuses}"
    assert statuses[200] == processes * commits
    chains = [HttpClient(url).read_chain() for url in base_urls]
    assert all(chain == chains[0] for chain in chains), "replicas disagree"
    assert find_violations(chains[0], events) == []


def test_eight_processes_on_one_table_make_a_linearisable_history(start_seamark: Callable[..., Seamark]) -> None:
    _run_race([start_seamark().base_url], processes=8, commits=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["sqlite", "sqlite, two workers", "postgresql, two replicas"])
def test_eight_processes_of_two_hundred_commits_each_make_a_linearisable_history(
    start_seamark: Callable[..., Seamark], postgres: Postgres, backend: str
) -> None:
    if backend.startswith("sqlite"):
        flags = ("--workers", "2") if "two" in backend else ()
        _run_race([start_seamark(flags=flags).base_url], processes=8, commits=200)
        return
    url = postgres.create_database()
    first_server = start_seamark("a", database=url)
    second_server = start_seamark("b", database=url, warehouse=first_server.warehouse)
    _run_race([first_server.base_url, second_server.base_url], processes=8, commits=200)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_fifty_concurrent_creates_of_one_name_have_one_winner(
    start_seamark: Callable[..., Seamark], postgres: Postgres, backend: str
) -> None:
    database = postgres.create_database() if backend == "postgresql" else ""
    server = start_seamark(database=database)
    HttpClient(server.base_url).call("POST", "/v1/namespaces", {"namespace": ["db"]})
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: HttpClient(server.base_url).create_table(), range(50)))
    assert Counter(status for status, _ in answers) == {200: 1, 409: 49}
    winner = next(body for status, body in answers if status == 200)
    _, loaded_table = HttpClient(server.base_url).call("GET", "/v1/namespaces/db/tables/t")
    assert loaded_table["metadata-location"] == winner["metadata-location"]
