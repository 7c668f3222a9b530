"""Tests of `seamark demo`: lookups return the written rows, the index prunes files, posted rows are visible before a
commit, and no file or process is left.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyiceberg.catalog.rest import RestCatalog
from rich.progress import Progress

from seamark.commands.demo import demo, streaming
from seamark.commands.main import cli
from tests.services.process import REPO, is_http_ok
from tests.services.seamark import Seamark

ARGV = [sys.executable, "-c", "from seamark.commands.main import main; main()", "demo"]


def build_environment(folder: Path) -> dict[str, str]:
    """Return an environment with settings of an unrelated server, which the demo must not use."""
    other_settings = {"SEAMARK_DATABASE": "postgresql://nobody@127.0.0.1:1/none", "SEAMARK_AUTH": "token"}
    return {**os.environ, "TMPDIR": str(folder), "COLUMNS": "120", "http_proxy": "http://127.0.0.1:1", **other_settings}


@pytest.mark.slow  # `make demo` runs the same program.
def test_lookup_opens_fewer_files_with_the_index(tmp_path: Path) -> None:
    result = subprocess.run(
        [*ARGV, "--files", "60"], env=build_environment(tmp_path), cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    files_by_label = {
        name.strip(): int(files.replace(",", ""))
        for name, files in re.findall(r"^  (.+?) +█+ +([\d,]+)", result.stdout, re.M)
    }
    files_before, files_after, minimum = files_by_label.values()
    assert files_before == 60
    assert minimum <= files_after < files_before / 2
    assert re.search(rf"rows: 60 → {files_after} files, [\d,]+× sooner", result.stdout)
    streamed_output = " ".join(result.stdout.split())
    assert re.search(
        r"5,000 rows posted .* each once and after 0 commits. Then one commit added them as 1 file", streamed_output
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_ends_with_its_server(tmp_path: Path) -> None:
    argv = [*ARGV, "--files", "3", "--keep"]
    with subprocess.Popen(
        argv, env=build_environment(tmp_path), cwd=REPO, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = next(matches[0] for line in process.stdout if (matches := re.findall(r"http://127\.0\.0\.1:\d+", line)))
        assert is_http_ok(f"{url}/readyz")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert not is_http_ok(f"{url}/readyz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_wrong_answer_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = demo.write_events

    def write_half(catalog: RestCatalog, events: pa.Table) -> None:
        write(catalog, events.slice(0, len(events) // 2))

    monkeypatch.setattr(demo, "write_events", write_half)
    with (
        Seamark(tmp_path / "home", env={"SEAMARK_SERVICES_WORKERS": "1"}) as server,
        pytest.raises(click.ClickException, match=r"returned \d+ rows"),
    ):
        demo.measure_lookups(server.base_url, 4, Progress(disable=True))


def test_row_that_pyiceberg_does_not_return_fails_the_demo() -> None:
    rows = pa.table({"id": [2, 0, 1]})
    streaming._check_ids(rows, 3)
    for wrong_rows in (rows.slice(1), pa.table({"id": [0, 1, 1, 2]}), pa.table({"id": [0, 1, 3]})):
        with pytest.raises(click.ClickException, match="but 3 were posted"):
            streaming._check_ids(wrong_rows, 3)


@pytest.mark.parametrize("files", ["0", "-1", "20001", "many"])
def test_invalid_number_of_files_is_rejected(files: str) -> None:
    result = CliRunner().invoke(cli, ["demo", "--files", files])
    assert result.exit_code == 2
    assert "--files" in result.output


@pytest.mark.slow
def test_server_that_does_not_start_is_an_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "START_S", 3600.0)  # The demo must not wait for so long.
    (tmp_path / "home").write_text("a file is in the way")
    with pytest.raises(click.ClickException, match="did not start") as failure, demo._run_server(tmp_path):
        pass
    assert "home" in failure.value.message
