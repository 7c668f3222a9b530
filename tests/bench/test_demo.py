"""Tests of `make demo` on a small scale: it ends with its table, keeps the server on request, and reports mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from rich.console import Console

from bench import connect
from bench.demo.options import DemoFailed, Options, provide_home
from bench.demo.queries import CONFIGURATIONS, CUBED, Comparison, DemoMeasurement, DemoQuery
from bench.demo.screen import print_result
from bench.ssb.queries import QUERIES
from seamark.commands.demo.demo import DemoLookup, DemoResult
from seamark.commands.demo.demo import show_demo_result as show_lookup
from seamark.connector.client.engines import build_catalog_conf
from tests.services.java import SHORT_LIVED
from tests.services.process import REPO, is_http_ok


def run_demo(**env: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with little data and without Trino in a separate process. `env` has other environment variables."""
    argv = [sys.executable, "-m", "bench.demo"]
    java_env = {"JDK_JAVA_OPTIONS": " ".join(SHORT_LIVED)}
    small_environment = {"SCALE": "0.01", "FILES": "30", "ROUNDS": "1", "TRINO": "0", "COLUMNS": "100"}
    environment = {**os.environ, **java_env, **small_environment, **env}
    return subprocess.run(argv, env=environment, cwd=REPO, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "env", [{"SCALE": "big"}, {"SCALE": "0"}, {"SCALE": "-1"}, {"FILES": "0"}, {"FILES": "1.5"}, {"SCALE": "nan"}]
)
def test_invalid_setting_is_rejected_with_its_name(env: dict[str, str]) -> None:
    with pytest.raises(DemoFailed, match=next(iter(env))):
        Options.read(env)


def test_empty_settings_use_their_defaults() -> None:
    """`make demo` passes SCALE and KEEP as empty texts if they are not set."""
    assert Options.read({"SCALE": "", "KEEP": "", "FILES": ""}) == Options()
    assert Options.read({"KEEP": "1"}).keep
    assert not Options.read({"KEEP": "0"}).keep
    assert Options.read({"TRINO": ""}).trino
    assert not Options.read({"TRINO": "0"}).trino


def test_folder_with_foreign_files_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(DemoFailed, match="DEMO_HOME"), provide_home(Options(keep=True, home=tmp_path)):
        pass
    assert (tmp_path / "precious").exists()


def test_spark_command_has_the_settings_of_the_tests() -> None:
    text = connect.format_spark("http://127.0.0.1:1", [Path("/jars/iceberg.jar")], "ssb.lineorder")
    for key, value in build_catalog_conf(connect.CATALOG, "http://127.0.0.1:1").items():
        assert f"--conf {key}={value}" in text
    assert "--jars /jars/iceberg.jar" in text


HEAD = ["alone", "plans", "layout", "bound", *("alone", "plans", "layout") * 2, "cube"]


def _render_screens(width: int, scale: float) -> str:
    """Return the screens of both parts of the demo, `width` characters wide, with invented figures.

    The figures have the size of those of a run. With a large `scale`, they need wider columns.
    """
    console = Console(width=width, file=io.StringIO())
    queries = [DemoQuery(name, int(388 * scale)) for name in QUERIES]
    for query in queries:
        for column in CONFIGURATIONS:
            files = 0 if column == CUBED else int(400 * scale)
            query.measurements[column].append(DemoMeasurement(files, int(106_400_000 * scale), 0.97 * scale))
    print_result([Comparison("Spark", queries), Comparison("Trino", queries)], 0.5, console)
    rows = pa.table({"id": range(9)})
    lookup_before = DemoLookup(files=2000, seconds=1.551, rows=rows)
    lookup_after = DemoLookup(files=9, seconds=0.025, rows=rows)
    show_lookup(DemoResult(2000, 9, lookup_before, lookup_after, build_s=1.1), console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scale", [0.01, 1, 2.5])
def test_screens_are_not_wider_than_a_terminal(width: int, scale: float) -> None:
    lines = _render_screens(width, scale).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert any(line.split() == HEAD for line in lines)
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 4 + 3, "the screens have 4 bars for queries and 3 for lookups"
    assert all(re.fullmatch(r"  \S.* █+ +[\d,]+( +[\d.]+ s)?", line) for line in bars), "each bar must be on one line"


def test_figures_of_a_large_scale_are_not_truncated() -> None:
    screen_text = _render_screens(80, 2500)
    assert "…" not in screen_text
    assert "1,000,000" in screen_text


@pytest.mark.slow  # It needs more than 100 s of CPU time; test_first_act.py tests `seamark demo`.
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_demo_gives_right_answers_from_fewer_files_and_prints_working_snippets(
    tmp_path: Path,
) -> None:
    kept_home = tmp_path / "kept"
    result = run_demo(KEEP="1", DEMO_HOME=str(kept_home), DEMO_REPORT=str(tmp_path / "demo.html"))
    assert result.returncode == 0, result.stdout + result.stderr
    running_demo = json.loads((kept_home / "kept.json").read_text())
    try:
        check_demo_output(result.stdout)
        check_report((tmp_path / "demo.html").read_text())
        assert f"kill {running_demo['pid']}" in result.stdout
        assert f"{running_demo['url']}/" in result.stdout.partition("The console")[2]
        for engine in ("Spark", "PyIceberg", "Trino", "DuckDB"):
            assert engine in result.stdout
        second_demo = run_demo(KEEP="1", DEMO_HOME=str(kept_home))
        assert second_demo.returncode == 1
        assert f"kill {running_demo['pid']}" in second_demo.stdout
        snippet = connect.format_pyiceberg(running_demo["url"], "ssb.lineorder")
        process = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        assert process.stdout.count("'lo_orderkey':") == 5
    finally:
        os.kill(running_demo["pid"], signal.SIGTERM)
        deadline = time.monotonic() + 40
        while is_http_ok(f"{running_demo['url']}/healthz") and time.monotonic() < deadline:
            time.sleep(0.1)
    assert not is_http_ok(f"{running_demo['url']}/healthz")


def check_demo_output(output: str) -> None:
    """Check the output of the demo.

    A table in the output has the numbers of files that each query opens, in three cases: with Iceberg's planner, with
    the files as PyIceberg wrote them, and with Seamark's layout. A text states how many queries cubes answer.
    """
    matches = re.findall(r"^ ?(Q\d\.\d)" + r" +(\d+)" * 4 + r" +[\d.]+" * 7 + r" *$", output, re.MULTILINE)
    rows = {name: tuple(map(int, counts)) for name, *counts in matches}
    assert list(rows) == list(QUERIES), output
    for name, (iceberg, untouched_files, clustered_files, fewest_files) in rows.items():
        assert iceberg == 30 >= untouched_files, name
        # The layout needs at most 5 % more files than any layout of the files needs.
        assert fewest_files <= clustered_files <= 1.05 * max(1, fewest_files), name
    total_iceberg, total_untouched, total_clustered, _ = map(sum, zip(*rows.values(), strict=True))
    assert total_untouched < 0.8 * total_iceberg, "plans must prune the files by the dates of joins"
    assert total_clustered < 0.8 * total_untouched, "the layout must prune more files"
    assert "…" not in output.partition("Files opened by the 13 queries")[0], "no head of a column may be truncated"
    text = " ".join(output.split())
    from_cubes = re.findall(r"Cubes answer (\d+) of 13 queries without reading the facts: [\d.]+× sooner", text)
    assert from_cubes
    assert all(int(count) >= 1 for count in from_cubes), (
        "at this scale, at least one query must be answered from a cube"
    )
    assert "DuckDB confirmed every answer" in text


def check_report(page: str) -> None:
    """Check that the page loads no other file, and that it has a chart and all pictures of layouts."""
    assert not re.search(r"(src|href)=|url\(|@import|<script", page)
    body = page.partition("<body>")[2].partition("</body>")[0]
    root = ElementTree.fromstring(f"<body>{body}</body>")
    pictures = root.findall(".//{http://www.w3.org/2000/svg}svg")
    assert len(pictures) == 1 + 2 * 4, "one chart, and pictures of the two layouts by each of four attributes"
    assert all(len(picture) >= 30 for picture in pictures), "no picture may lack its shapes"
