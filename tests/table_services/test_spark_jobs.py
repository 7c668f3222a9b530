"""Tests of compaction and clustering on Spark: local, and on a standalone cluster with a real master and worker."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa
import pyspark
import pytest
from click.testing import CliRunner
from pyiceberg.catalog.rest import RestCatalog

from seamark.commands.main import cli
from seamark.connector.client.indexes import IndexClient
from tests.services.java import find_java_17
from tests.services.seamark import Seamark
from tests.waits import block_until

SCHEMA = pa.schema([("id", pa.int64()), ("country", pa.string())])
JVM_S = 300.0
"""The time limit, in seconds, for a JVM with low priority on a busy machine."""
SMALL_JVM = "--driver-memory 512m --executor-memory 512m --conf spark.executor.cores=1"


def create_table(server: Seamark, name: str, file_count: int, **properties: str) -> RestCatalog:
    catalog = RestCatalog("s", uri=server.base_url)
    catalog.create_namespace_if_not_exists("db")
    table = catalog.create_table(f"db.{name}", SCHEMA, properties=properties)
    for number in range(file_count):
        ids = [10 * number + position for position in range(10)]
        table.append(pa.table({"id": ids, "country": [f"c{value % 3}" for value in ids]}, schema=SCHEMA))
    return catalog


def read_ids(catalog: RestCatalog, name: str) -> list[int]:
    return sorted(catalog.load_table(f"db.{name}").scan().to_arrow()["id"].to_pylist())


def count_files(catalog: RestCatalog, name: str) -> int:
    return len(list(catalog.load_table(f"db.{name}").scan().plan_files()))


def run_job(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["run", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@contextmanager
def run_standalone_cluster(folder: Path) -> Iterator[str]:
    """Start a master and a worker on loopback, and yield the URL of the master.

    At the end, check that a Spark application of the table services has registered with the master.
    """
    find_java_17()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    program = Path(pyspark.__file__).parent / "bin" / "spark-class"
    url = f"spark://127.0.0.1:{port}"
    environment = {**os.environ, "SPARK_WORKER_DIR": str(folder / "work"), "SPARK_DAEMON_MEMORY": "256m"}
    common_options = ["--host", "127.0.0.1", "--webui-port", "0"]
    commands = [
        ["org.apache.spark.deploy.master.Master", *common_options, "--port", str(port)],
        ["org.apache.spark.deploy.worker.Worker", *common_options, "--cores", "2", "--memory", "1g", url],
    ]
    running_processes = []
    try:
        for number, command in enumerate(commands):
            log = folder / f"cluster-{number}.log"
            with log.open("wb") as output:
                running_processes.append(
                    subprocess.Popen(
                        [str(program), *command], stdout=output, stderr=output, env=environment, start_new_session=True
                    )
                )
            expected_text = "I have been elected leader" if number == 0 else "Successfully registered with master"
            block_until(lambda log=log, expected_text=expected_text: expected_text in log.read_text())
        yield url
        assert "Registered app seamark table services" in (folder / "cluster-0.log").read_text()
    finally:
        for process in running_processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.slow
def test_standalone_cluster_compacts_and_clusters(tmp_path: Path) -> None:
    with Seamark(tmp_path / "home", env={"SEAMARK_SERVICES_WORKERS": "0"}) as server:
        catalog = create_table(server, "t", 12)
        create_table(server, "c", 12, **{"seamark.clustering.columns": "id,country"})
        ids_before = read_ids(catalog, "t")
        with run_standalone_cluster(tmp_path) as master:
            options = ["--url", server.base_url, "--on", "cluster", "--master", master, "--submit-options", SMALL_JVM]
            assert "12 files" in run_job("compact", "db.t", *options)
            assert "12 files" in run_job("cluster", "db.c", *options)
        assert (count_files(catalog, "t"), count_files(catalog, "c")) == (1, 1)
        assert read_ids(catalog, "t") == read_ids(catalog, "c") == ids_before


def list_driver_pids(home: Path) -> list[int]:
    """Return the ids of the job processes that this server has started. Their scratch folders are below `home`."""
    pids = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{home}/seamark-job-".encode() in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def read_limits(pid: int) -> tuple[int, int]:
    """Return the hard limit of a process's data memory in bytes (RLIMIT_DATA), and the niceness of the process."""
    return resource.prlimit(pid, resource.RLIMIT_DATA)[1], os.getpriority(os.PRIO_PROCESS, pid)


@pytest.mark.slow
def test_server_runs_jobs_on_local_spark_and_its_death_ends_the_driver(tmp_path: Path) -> None:
    """The killed job commits nothing or a complete batch. The next server completes the work."""
    find_java_17()
    env = {"SEAMARK_SERVICES_WORKERS": "1", "TMPDIR": str(tmp_path), "SEAMARK_SERVICES_LAUNCHERS": "worker,local"}
    env["SEAMARK_SERVICES_LOCAL_MEMORY_BYTES"] = str(3 << 30)
    policy = {"seamark.compaction.enabled": "true", "seamark.services.launcher": "local"}
    with Seamark(tmp_path / "home", env=env) as server:
        catalog = create_table(server, "t", file_count=12, **policy)
        ids_before = read_ids(catalog, "t")
        block_until(lambda: list_driver_pids(tmp_path), JVM_S)
        # The task of the job and two further processes share the 3 GiB. They have the niceness 10.
        block_until(lambda: all(read_limits(pid) == (1 << 30, 10) for pid in list_driver_pids(tmp_path)))
        os.kill(server.pid, signal.SIGKILL)
        block_until(lambda: not list_driver_pids(tmp_path), JVM_S)
    with Seamark(tmp_path / "home", env=env) as server:
        catalog = RestCatalog("s", uri=server.base_url)
        assert read_ids(catalog, "t") == ids_before
        block_until(lambda: count_files(catalog, "t") == 1, JVM_S)
        with closing(IndexClient(server.base_url)) as client:
            block_until(lambda: list(client.timeline("db.t", action="maintenance")))
            (instant,) = client.timeline("db.t", action="maintenance")
        assert instant.summary["launcher"] == "local"
        assert read_ids(catalog, "t") == ids_before
