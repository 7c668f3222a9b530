"""Tests of PostgreSQL failures during commits. No acknowledged commit is lost, and clients are told to retry.

Both replicas recover by themselves when the database is available again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.faults.rigs.http import HttpClient
from tests.faults.rigs.writers import run_writers, wait_for_commits
from tests.services.postgres import Postgres, postgres_server
from tests.services.process import ServiceFailed, is_http_ok
from tests.services.seamark import Seamark
from tests.waits import becomes_true


@dataclass(frozen=True)
class ServerPair:
    """Two replicas that share a PostgreSQL server."""

    postgres: Postgres
    replicas: tuple[Seamark, Seamark]

    @property
    def base_urls(self) -> list[str]:
        return [replica.base_url for replica in self.replicas]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPair]:
    """Start two replicas with a PostgreSQL server that tests may kill."""
    home = tmp_path_factory.mktemp("pair")
    with postgres_server() as postgres:
        url = postgres.create_database()
        warehouse = f"file://{home / 'lake'}"
        with (
            Seamark(home / "a", database=url, warehouse=warehouse) as first_server,
            Seamark(home / "b", database=url, warehouse=warehouse) as second_server,
        ):
            yield ServerPair(postgres, (first_server, second_server))


def _is_answering(postgres: Postgres) -> bool:
    with contextlib.suppress(ServiceFailed):
        return postgres.run_sql("SELECT 1") == "1"
    return False


def _start_postgres(postgres: Postgres) -> None:
    postgres.process.start(lambda: _is_answering(postgres), timeout_s=60)


def _stop_postgres(postgres: Postgres) -> None:
    postgres.process.stop(first=signal.SIGINT)


def _kill_postgres(postgres: Postgres) -> None:
    """Kill all processes of PostgreSQL at once, as in a power failure. Each process has its own process group."""
    main_process = psutil.Process(postgres.process.pid)
    postgres_processes = [main_process, *main_process.children(recursive=True)]
    for process in postgres_processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs(postgres_processes[1:], timeout=60)
    postgres.process.stop()


def _exists(location: str) -> bool:
    return Path(location.removeprefix("file://")).is_file()


@pytest.mark.parametrize(
    "end_postgres",
    [
        pytest.param(_stop_postgres, id="stopped", marks=pytest.mark.slow),
        pytest.param(_kill_postgres, id="killed -9"),
    ],
)
def test_database_outage_loses_no_acknowledged_commit(
    pair: ServerPair, end_postgres: Callable[[Postgres], None]
) -> None:
    name = f"t{end_postgres.__name__}"
    client = HttpClient(pair.base_urls[0])
    assert client.create_table(name)[0] == 200
    with run_writers(pair.base_urls, name, seed=5) as recorded:
        assert wait_for_commits(recorded, 20, 60), recorded
        end_postgres(pair.postgres)
        try:
            for url in pair.base_urls:
                client = HttpClient(url, timeout_s=60)
                status, body = client.append(1, None, 1, name)
                assert status == 503, body
                assert int(client.headers["Retry-After"]) >= 1
                assert client.call("GET", "/readyz")[0] == 503
                assert is_http_ok(f"{url}/healthz"), "a server must stay alive while its database is unavailable"
        finally:
            _start_postgres(pair.postgres)
        assert becomes_true(lambda: all(is_http_ok(f"{url}/readyz") for url in pair.base_urls), 60), (
            "the servers become ready again without a restart"
        )
        assert wait_for_commits(recorded, 20, 60), recorded
    for url in pair.base_urls:
        recorded.check(HttpClient(url), name, _exists, f"{end_postgres.__name__}, {dict(recorded.outcomes)}")


@pytest.mark.slow
def test_connections_cut_during_commits_lose_no_acknowledged_commit(pair: ServerPair) -> None:
    client = HttpClient(pair.base_urls[0])
    assert client.create_table("cut")[0] == 200
    cut_statement = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datid > 0"
    )
    with run_writers(pair.base_urls, "cut", seed=6) as recorded:
        for _ in range(12):
            assert wait_for_commits(recorded, 3, 60), recorded
            pair.postgres.run_sql(cut_statement)
        assert wait_for_commits(recorded, 20, 60), recorded
    for url in pair.base_urls:
        recorded.check(HttpClient(url), "cut", _exists, f"cut, {dict(recorded.outcomes)}")


@pytest.mark.slow
def test_server_answers_during_a_hang_of_the_database_and_keeps_all_commits(pair: ServerPair) -> None:
    """SIGSTOP to all processes of the database keeps connections open without answers, as when its disk hangs."""
    client = HttpClient(pair.base_urls[0])
    assert client.create_table("hung")[0] == 200
    main_process = psutil.Process(pair.postgres.process.pid)
    with run_writers(pair.base_urls, "hung", seed=7) as recorded:
        assert wait_for_commits(recorded, count=20, timeout_s=60), recorded
        postgres_processes = [main_process, *main_process.children(recursive=True)]
        for process in postgres_processes:
            process.suspend()
        try:
            time.sleep(1)  # Requests of the writers now wait for the database.
            for url in pair.base_urls:
                assert is_http_ok(f"{url}/healthz"), "the server must answer while the database hangs"
                assert HttpClient(url).call("GET", "/readyz")[0] == 503
            time.sleep(40)  # This is longer than every time limit of the store.
        finally:
            for process in postgres_processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
        assert wait_for_commits(recorded, count=20, timeout_s=120), recorded
    recorded.check(HttpClient(pair.base_urls[1]), "hung", _exists, f"hung, {dict(recorded.outcomes)}")
