"""Tests of the daemon that forks Spark's Python workers: its loaded modules, and reads after a process has died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest import RestCatalog
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from seamark.connector.spark.session import DAEMON
from seamark.connector.spark.source.source import register
from tests.services.process import REPO
from tests.services.seamark import Seamark

ROWS = [{"id": number, "name": f"name {number}"} for number in range(200)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seamark]:
    with Seamark(tmp_path_factory.mktemp("forked")) as server:
        with RestCatalog("sea", uri=server.base_url) as catalog:
            catalog.create_namespace("db")
            written_table = pa.Table.from_pylist(ROWS)
            table = catalog.create_table("db.t", schema=written_table.schema)
            for rows in (written_table.slice(0, 100), written_table.slice(100)):
                table.append(rows)
        yield server


def run_in_worker(spark: SparkSession, function: Callable[[Any], Any]) -> Any:
    """Run `function` in a task, and return its result.

    `function` is a nested function, which Spark serializes for the task.
    """
    return spark.sparkContext.parallelize([0], 1).map(function).collect()[0]


def read_ids(spark: SparkSession, server: Seamark) -> list[int]:
    register(spark)
    reader = spark.read.format("seamark").options(uri=server.base_url, table="db.t", where="id >= 50")
    return sorted(row.id for row in reader.options(**{"split-bytes": 1}).load().collect())


EXPECTED_IDS = list(range(50, 200))


@pytest.mark.slow
def test_workers_start_with_seamarks_modules_loaded(spark: SparkSession) -> None:
    def inspect_worker(_: Any) -> Any:
        import gc
        import os
        import sys
        from pathlib import Path
        from zipimport import zipimporter

        return {
            "loaded": [
                module
                for module in ("seamark.connector.read.scans", "seamark.connector.spark.source.reader")
                if module in sys.modules
            ],
            "parent": Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0"),
            "frozen": gc.get_freeze_count() > 0,
            "paths with a zip importer": [
                path for path, module in sys.path_importer_cache.items() if type(module) is zipimporter
            ],
        }

    modules = run_in_worker(spark, inspect_worker)
    assert modules["loaded"] == ["seamark.connector.read.scans", "seamark.connector.spark.source.reader"]
    assert DAEMON in modules["parent"]
    assert modules["frozen"]
    assert modules["paths with a zip importer"] == []


@pytest.mark.slow
def test_daemon_has_no_other_threads_when_it_forks(spark: SparkSession) -> None:
    """If another thread held a lock during the fork, the lock would stay locked in each worker."""

    def inspect_daemon(_: Any) -> Any:
        import os
        from pathlib import Path

        names = [path.read_text().strip() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]
        links = [os.readlink(path) for path in Path(f"/proc/{os.getppid()}/fd").glob("*")]
        return names, [link for link in links if link.startswith(("socket:", "anon_inode:"))]

    threads, sockets = run_in_worker(spark, inspect_daemon)
    assert len(threads) == 1
    assert len(sockets) == 1  # The daemon listens on this socket.


# The test takes 20 s. Tests of the fast tier check that workers have loaded all modules, and that the daemon holds no
# lock.
@pytest.mark.slow
@pytest.mark.parametrize("killed_process", ["the worker", "the process that it was forked from"])
def test_reads_continue_after_the_death_of_a_python_process(
    killed_process: str, spark: SparkSession, server: Seamark
) -> None:
    is_forked = killed_process != "the worker"

    def kill_process(_: Any) -> Any:
        import os
        import signal

        os.kill(os.getppid() if is_forked else os.getpid(), signal.SIGKILL)
        return 0

    assert read_ids(spark, server) == EXPECTED_IDS
    if is_forked:
        with suppress(PySparkException):  # The worker may live long enough to return an answer.
            run_in_worker(spark, kill_process)
    else:
        with pytest.raises(Exception, match="Python worker exited unexpectedly"):
            run_in_worker(spark, kill_process)
    assert read_ids(spark, server) == EXPECTED_IDS


OWN_DAEMON_MODULE = """
import os, sys
os.environ["OWN_DAEMON"] = "yes"
from pyspark import daemon
if __name__ == "__main__":
    daemon.manager()
"""
SCRIPT = """
import json, sys
from pathlib import Path
from seamark.connector.spark.session import open_session, session_conf
from seamark.connector.spark.source.source import register

uri, module, folder = sys.argv[1:]
conf = {**session_conf([]), "spark.sql.extensions": "", "spark.driver.memory": "1g", "spark.local.dir": folder}
spark = open_session("own", {**conf, "spark.python.daemon.module": module})
register(spark)

def inspect_worker(_):
    import os, sys
    return os.environ.get("OWN_DAEMON"), "seamark.connector.spark.source.reader" in sys.modules

worker_facts = spark.sparkContext.parallelize([0], 1).map(inspect_worker).collect()[0]
rows = spark.read.format("seamark").options(uri=uri, table="db.t", where="id >= 50").load().collect()
print("result:" + json.dumps([*worker_facts, sorted(row.id for row in rows)]))
spark.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["own_daemon", "pyspark.daemon"])
def test_session_with_a_custom_daemon_keeps_the_daemon_and_reads_the_same_rows(
    module: str, server: Seamark, tmp_path: Path
) -> None:
    (tmp_path / "own_daemon.py").write_text(OWN_DAEMON_MODULE)
    (tmp_path / "script.py").write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    argv = [sys.executable, str(tmp_path / "script.py"), server.base_url, module, str(tmp_path / "local")]
    result = subprocess.run(argv, env=env, capture_output=True, text=True)
    line = next(
        (line for line in result.stdout.splitlines() if line.startswith("result:")),
        result.stdout + result.stderr,
    )
    own_variable, has_seamark_modules, actual = json.loads(line.removeprefix("result:"))
    assert own_variable == ("yes" if module == "own_daemon" else None)
    assert not has_seamark_modules
    assert actual == EXPECTED_IDS
