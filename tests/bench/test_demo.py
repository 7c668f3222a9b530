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

import pytest

from bench import connect
from bench.demo import DemoFailed, Options, home
from connector.spark.session import catalog_conf
from tests.services.process import REPO, http_ok


def demo(**env: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as `make demo` starts it: the tests' JVM is not its."""
    argv = [sys.executable, "-m", "bench.demo"]
    environment = {**os.environ, "SCALE": "0.01", "FILES": "12", "COLUMNS": "120", **env}
    return subprocess.run(argv, env=environment, cwd=REPO, capture_output=True, text=True, timeout=280)


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
def test_the_demo_ends_in_thirteen_right_answers_and_a_kept_server_answers_the_printed_snippets(tmp_path: Path) -> None:
    kept_home = tmp_path / "kept"
    done = demo(KEEP="1", DEMO_HOME=str(kept_home))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((kept_home / "kept.json").read_text())
    try:
        check_table(done.stdout)
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


def check_table(printed: str) -> None:
    cells = r"│ (Q\d\.\d|month) +│ +([\d.]+) │ +(\d+) │ +(\d+) │ +(\d+) │ +(\d+) of (\d+) │ +([\d.]+) │ +(\d+) │"
    rows = re.findall(cells, printed)
    assert len(rows) == 14
    assert {row[2] for row in rows} == {"12"}
    read = {row[0]: int(row[3]) for row in rows}
    assert max(read.values()) <= 12
    assert all(read[row[0]] > 0 for row in rows if int(row[8]))  # an empty answer may need no file
    assert all(int(row[4]) > 0 for row in rows), "the server planned every query"
    scans, kept, considered = map(int, rows[-1][4:7])
    assert (rows[-1][0], scans) == ("month", 1)
    assert kept == read["month"] < considered == 12
    assert "All 14 answers equal DuckDB's" in printed
