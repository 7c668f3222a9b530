"""`make demo` ends in its table on a small scale, keeps the server when asked, and names what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import duckdb
import pytest

from bench import connect
from bench.demo import DemoFailed, Options, home
from bench.ssb.queries import QUERIES
from seamark.connector.client.engines import catalog_conf
from tests.services.java import SHORT_LIVED
from tests.services.process import REPO, http_ok


def demo(**env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as `make demo` starts it: the tests' JVM is not its."""
    argv = [sys.executable, "-m", "bench.demo"]
    java = {"JDK_JAVA_OPTIONS": " ".join(SHORT_LIVED)}
    environment = {**os.environ, **java, "SCALE": "0.01", "FILES": "30", "COLUMNS": "120", **env}
    return subprocess.run(argv, env=environment, cwd=REPO, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "env", [{"SCALE": "big"}, {"SCALE": "0"}, {"SCALE": "-1"}, {"FILES": "0"}, {"FILES": "1.5"}, {"SCALE": "nan"}]
)
def test_a_senseless_setting_is_refused_with_its_name(env: dict[str, str]) -> None:
    with pytest.raises(DemoFailed, match=next(iter(env))):
        Options.read(env)


def test_settings_left_empty_take_their_defaults() -> None:
    """`make demo` passes SCALE and KEEP through, empty when they are not given."""
    assert Options.read({"SCALE": "", "KEEP": "", "FILES": ""}) == Options()
    assert Options.read({"KEEP": "1"}).keep
    assert not Options.read({"KEEP": "0"}).keep


def test_a_folder_that_is_not_the_demos_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(DemoFailed, match="DEMO_HOME"), home(Options(keep=True, home=tmp_path)):
        pass
    assert (tmp_path / "precious").exists()


def test_the_spark_command_carries_the_settings_that_the_tests_use() -> None:
    text = connect.spark("http://127.0.0.1:1", [Path("/jars/iceberg.jar")], "ssb.lineorder")
    for key, value in catalog_conf(connect.CATALOG, "http://127.0.0.1:1").items():
        assert f"--conf {key}={value}" in text
    assert "--jars /jars/iceberg.jar" in text


@pytest.mark.spark
@pytest.mark.timeout(900)
def test_the_demo_ends_in_right_answers_and_fewer_files_by_each_index_and_a_kept_server_answers_the_printed_snippets(
    tmp_path: Path,
) -> None:
    kept_home = tmp_path / "kept"
    done = demo(KEEP="1", DEMO_HOME=str(kept_home))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((kept_home / "kept.json").read_text())
    try:
        check_table(done.stdout, next(kept_home.glob("**/lineorder*/data")))
        assert f"kill {kept['pid']}" in done.stdout
        for engine in ("Spark", "PyIceberg", "Trino", "DuckDB"):
            assert engine in done.stdout
        again = demo(KEEP="1", DEMO_HOME=str(kept_home))
        assert again.returncode == 1
        assert f"kill {kept['pid']}" in again.stdout
        snippet = connect.pyiceberg(kept["url"], "ssb.lineorder")
        ran = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("'lo_orderkey':") == 5
    finally:
        os.kill(kept["pid"], signal.SIGTERM)
        deadline = time.monotonic() + 40
        while http_ok(f"{kept['url']}/healthz") and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not http_ok(f"{kept['url']}/healthz")


def check_table(printed: str, data: Path) -> None:
    """`data` is the folder of the fact table's files, in which DuckDB counts those that hold a row."""
    cells = r"│ (Q\d\.\d|\w+) +│ +([\d.]+) │" + r" +(\d+) │" * 6 + r" +([\d.]+) │ +(\d+) │"
    rows = {row[0]: row for row in re.findall(cells, printed) if row[0] != "all"}
    assert list(rows) == [*QUERIES, "month", "order", "pair"]
    kept = {name: tuple(map(int, row[2:7])) for name, row in rows.items()}
    for name, (files, min_max, bloom, bitmap, read) in kept.items():
        assert 30 == files >= min_max >= bloom >= bitmap >= 0, name
        assert bitmap <= read <= min_max, name  # what is explained later has its indexes in memory
    assert all(int(row[7]) > 0 for row in rows.values()), "the server planned every query"

    def files_with(where: str) -> int:
        sql = f"SELECT count(DISTINCT filename) FROM read_parquet('{data}/*.parquet', filename = true) WHERE {where}"
        found = duckdb.sql(sql).fetchall()
        return int(found[0][0])

    assert kept["month"][1:] == (kept["month"][1],) * 4
    assert kept["month"][1] < 30
    order = int(3_000_000 * 0.01) // 32 * 32 + 1
    assert kept["order"][1] > 20
    assert files_with(f"lo_orderkey = {order}") <= kept["order"][2] <= 3, "bloom"
    assert files_with("lo_suppkey = 1") == files_with("lo_quantity = 50") == kept["pair"][2] == 30
    assert files_with("lo_suppkey = 1 AND lo_quantity = 50") == kept["pair"][3] == kept["pair"][4] < 30, "bitmap"
    assert "All 16 answers equal DuckDB's" in printed
