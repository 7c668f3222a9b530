"""Tests that `seamark serve` alone keeps indexes up to date, with a real server, its worker, and PyIceberg's tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.catalog.rest import RestCatalog

from seamark.commands.main import cli
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import TimelineInstant
from tests.services.command import run_seamark
from tests.services.process import choose_free_port
from tests.services.seamark import SHARED_KEY, Seamark
from tests.waits import block_until

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
KEY = {"SEAMARK_ENCRYPTION_KEY": SHARED_KEY}
INDEX = {"seamark.index.by_name": "bloom(name)"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Seamark]:
    with Seamark(tmp_path / "home", env={"SEAMARK_SERVICES_WORKERS": "1"}) as server:
        yield server


def append(catalog: RestCatalog, name: str, *numbers: int) -> None:
    for number in numbers:
        catalog.load_table(name).append(pa.table({"id": [number], "name": [f"name {number}"]}, schema=SCHEMA))


def is_covered(client: IndexClient, table: str, file_count: int) -> bool:
    index = client.index(table, "by_name")
    return (index.health, index.files, index.lag_files) == ("ok", file_count, 0)


def read_metric(server: Seamark, name: str) -> float:
    """Return the value of a metric, or -1 if the server does not show it."""
    with urlopen(f"{server.base_url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name} ")), -1.0)


def list_worker_pids(server: Seamark) -> list[int]:
    """Return the ids of the server's worker processes, whose parent in /proc is the server."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                command = (folder / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue
            if parent == server.pid and b"job_worker" in command:
                pids.append(int(folder.name))
    return pids


def test_index_defined_by_a_property_is_built_and_covers_later_commits(server: Seamark) -> None:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    catalog.create_table("db.t", SCHEMA, properties=INDEX)
    append(catalog, "db.t", 1, 2, 3)
    client = IndexClient(server.base_url)
    block_until(lambda: is_covered(client, "db.t", 3))
    (pid,) = list_worker_pids(server)
    append(catalog, "db.t", 4)
    block_until(lambda: is_covered(client, "db.t", 4))
    assert list_worker_pids(server) == [pid]
    explanation = client.explain("db.t", "name = 'name 3'")
    assert explanation.files == 1

    # The server restarts a killed worker for the next change.
    block_until(lambda: read_metric(server, "seamark_service_queue") == 0)
    os.kill(pid, signal.SIGKILL)
    append(catalog, "db.t", 5)
    block_until(lambda: is_covered(client, "db.t", 5))

    # The server also examines tables that exist at its start. The worker ends with the server.
    block_until(lambda: not any(build.state == "inflight" for build in client.timeline("db.t", action="indexing")))
    pids = list_worker_pids(server)
    server.kill9()
    block_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    server.start()
    append(catalog, "db.t", 6)
    block_until(lambda: is_covered(client, "db.t", 6))
    block_until(lambda: read_metric(server, 'seamark_service_jobs_total{outcome="completed",service="indexing"}') >= 1)
    assert server.terminate() == 0


def test_worker_uses_its_own_token_and_has_no_secret_of_the_server(tmp_path: Path) -> None:
    env = {"SEAMARK_SERVICES_WORKERS": "1", "SEAMARK_AUTH": "token", "SEAMARK_WEBHOOK_SECRET": "hunter2"}
    env |= {"PGPASSWORD": "hunter3", "AWS_SECRET_ACCESS_KEY": "hunter4", "MY_TOKEN": "hunter5"}
    server = Seamark(tmp_path / "home", env=env)
    create_output = run_seamark("token", "create", "writer", "--role", "writer", "--home", str(server.home), env=KEY)
    assert create_output.returncode == 0, create_output.stderr
    token = create_output.stdout.split()[-1]
    with server:
        catalog = RestCatalog("s", uri=server.base_url, token=token)
        catalog.create_namespace("db")
        catalog.create_table("db.t", SCHEMA, properties=INDEX)
        append(catalog, "db.t", 1, 2)
        client = IndexClient(server.base_url, token=token)
        block_until(lambda: is_covered(client, "db.t", 2))
        (pid,) = list_worker_pids(server)
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"hunter" not in environment
        assert b"PATH=" in environment
        assert b"SEAMARK_ENCRYPTION_KEY" not in environment
        builds = [instant for instant in client.timeline("db.t") if instant.action == "indexing"]
        assert {instant.principal_name for instant in builds} == {"service:seamark"}


@pytest.mark.slow
def test_table_is_compacted_when_its_policy_enables_it(server: Seamark) -> None:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    for name, properties in (("kept", {}), ("merged", {"seamark.compaction.enabled": "true"})):
        catalog.create_table(f"db.{name}", SCHEMA, properties=properties)
        append(catalog, f"db.{name}", 1, 2, 3, 4, 5, 6)
    client = IndexClient(server.base_url)
    block_until(lambda: client.files("db.merged").num_rows < 6)
    summaries = [
        snapshot.summary for snapshot in catalog.load_table("db.merged").metadata.snapshots if snapshot.summary
    ]
    assert {summary["compacted-by"] for summary in summaries if summary.operation.value == "replace"} == {"seamark"}
    assert sorted(catalog.load_table("db.merged").scan().to_arrow()["id"].to_pylist()) == [1, 2, 3, 4, 5, 6]
    assert client.files("db.kept").num_rows == 6


@pytest.mark.slow
def test_workers_that_cannot_reach_the_server_are_reported_in_every_command(tmp_path: Path) -> None:
    """In this test, the address of the workers has no server.

    The server itself and its queries are not affected.
    """
    env = {"SEAMARK_SERVICES_WORKERS": "1", "SEAMARK_SERVICES_URL": f"http://127.0.0.1:{choose_free_port()}"}
    with Seamark(tmp_path / "home", env=env) as server:
        catalog = RestCatalog("s", uri=server.base_url)
        catalog.create_namespace("db")
        catalog.create_table("db.t", SCHEMA, properties=INDEX)
        append(catalog, "db.t", 1, 2)
        block_until(lambda: read_metric(server, "seamark_services_blocked") == 1)
        reason = "Unreachable: No answer from http://127.0.0.1:"
        result = run_seamark("services", "db.t", "--url", server.base_url)
        assert result.stdout.startswith(f"Table services do not run: {reason}"), result.stdout
        result = run_seamark("health", "db.t", "--url", server.base_url)
        assert "table services are off  Unreachable: No answer" in result.stdout, result.stdout
        result = run_seamark("doctor", "--url", server.base_url)
        assert result.returncode == 1
        assert f"! table services: the services do not run: {reason}" in result.stdout
        client = IndexClient(server.base_url)
        assert client.explain("db.t", "name = 'name 1'").files == 1
        assert client.index("db.t", "by_name").lag_files == 2


@pytest.mark.slow
def test_job_that_omits_files_counts_as_failed_until_a_run_succeeds(server: Seamark) -> None:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    append(catalog, "db.t", 1, 2)
    client = IndexClient(server.base_url)
    (path, _) = (Path(path.removeprefix("file://")) for path in client.files("db.t")["file_path"].to_pylist())
    content = path.read_bytes()
    path.write_bytes(b"no Parquet")
    with table.refresh().transaction() as transaction:
        transaction.set_properties(INDEX)
    block_until(
        lambda: any("1 data files cannot be indexed" in run.summary.get("error", "") for run in list_runs(client))
    )
    block_until(lambda: read_metric(server, 'seamark_service_failing_tables{service="indexing"}') == 1)
    (problem,) = client.health("db.t")["problems"]
    assert problem["problem"] == "failed job"
    assert path.name in problem["detail"]
    assert "1 data files cannot be indexed" in run_seamark("services", "--url", server.base_url).stdout
    result = run_seamark("doctor", "--url", server.base_url)
    assert result.returncode == 1
    assert "! table db.t: the last run of indexing failed" in result.stdout
    path.write_bytes(content)
    append(catalog, "db.t", 3)
    block_until(lambda: client.health("db.t")["problems"] == [])
    assert run_seamark("doctor", "--url", server.base_url).returncode == 0


@pytest.mark.slow  # A faster test also starts a job in a worker because of a policy.
def test_old_snapshots_expire_and_the_runs_are_listed(server: Seamark) -> None:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    table = catalog.create_table("db.t", SCHEMA)
    append(catalog, "db.t", *range(8))
    time.sleep(1.1)  # Then all snapshots are older than the maximum age of the policy.
    policy = {"seamark.expiration.enabled": "true", "history.expire.max-snapshot-age-ms": "1000"}
    with table.refresh().transaction() as transaction:
        transaction.set_properties({"seamark.compaction.enabled": "true", **policy})
    client = IndexClient(server.base_url)
    block_until(lambda: {run.summary["service"] for run in list_runs(client)} == {"compaction", "expiration"})
    table.refresh()
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == list(range(8))
    assert len(table.metadata.snapshots) <= 2, (
        "at most the snapshot of the compaction and a young snapshot before it may remain"
    )
    suffixes = [Path(path.removeprefix("file:")).suffix for path in client.files("db.t")["file_path"].to_pylist()]
    assert suffixes == [".parquet"]

    # If a job fails, the timeline has its error.
    catalog.create_table("db.bad", SCHEMA)
    append(catalog, "db.bad", *range(6))
    (path, *_) = client.files("db.bad")["file_path"].to_pylist()
    Path(path.removeprefix("file://")).unlink()
    with catalog.load_table("db.bad").transaction() as transaction:
        transaction.set_properties({"seamark.compaction.enabled": "true"})
    block_until(lambda: any(run.state == "rolled_back" for run in client.timeline("db.bad", action="maintenance")))

    def run_services(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["services", *arguments], env={"SEAMARK_URL": server.base_url})
        assert result.exit_code == 0, result.output
        return result.output

    services_output = run_services()
    assert "db.t" in services_output
    assert "failed: " in services_output
    table_runs = run_services("db.t")
    assert "db.bad" not in table_runs
    assert "a scan opens 7 fewer" in " ".join(table_runs.split())
    assert {run["service"] for run in json.loads(run_services("db.t", "--json"))} == {"compaction", "expiration"}
    catalog.create_table("db.new", SCHEMA)
    assert "did nothing to db.new yet" in run_services("db.new")


def list_runs(client: IndexClient) -> list[TimelineInstant]:
    return list(client.timeline("db.t", action="maintenance"))


@pytest.mark.slow
def test_worker_has_lower_cpu_and_disk_priority_than_requests(server: Seamark) -> None:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace("db")
    catalog.create_table("db.t", SCHEMA, properties=INDEX)
    append(catalog, "db.t", 1)
    block_until(lambda: list_worker_pids(server))
    (pid,) = list_worker_pids(server)

    def read_io_class() -> str:
        return subprocess.run(["ionice", "-p", str(pid)], capture_output=True, text=True, check=True).stdout.strip()

    block_until(lambda: read_io_class() == "idle")  # The worker sets the I/O class last.
    assert os.sched_getscheduler(pid) == os.SCHED_BATCH
    assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, server.pid)
    # The worker has its own session, because the kernel shares the CPU between sessions.
    assert os.getsid(pid) == pid != os.getsid(server.pid)
    autogroup = Path(f"/proc/{pid}/autogroup")
    if autogroup.exists():  # Only some kernels group processes by session.
        assert autogroup.read_text().split()[-2:] == ["nice", "15"]
