"""Tests of `deploy/trino/run.sh`: the command that it runs, and its messages about missing programs."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.services.process import DEPLOY
from tests.services.trino import ETC


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with the launcher, with files named like Trino's jars, and with a program `java`.

    The program prints its arguments.
    """
    shutil.copytree(DEPLOY / "trino", tmp_path / "deploy" / "trino")
    for jar in ("lib/trino-main-1.jar", "plugin/iceberg/trino-iceberg-1.jar"):
        path = tmp_path / ".cache" / "trino" / jar
        path.parent.mkdir(parents=True)
        path.touch()
    java_path = tmp_path / "jdk" / "bin" / "java"
    java_path.parent.mkdir(parents=True)
    java_path.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "SEAMARK_URI=$SEAMARK_URI" "TRINO_PORT=$TRINO_PORT"\n')
    java_path.chmod(0o755)
    return tmp_path


def run_launcher(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "deploy" / "trino" / "run.sh"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "JAVA25": str(checkout / "jdk"), **environment},
    )


def test_launcher_runs_trino_with_the_files_of_the_checkout(checkout: Path) -> None:
    result = run_launcher(checkout, TRINO_PORT="8090")
    assert result.returncode == 0, result.stderr
    output_lines = result.stdout.splitlines()
    etc = checkout / "deploy" / "trino" / "etc"
    assert f"-Dconfig={etc / 'config.properties'}" in output_lines
    assert f"-Dcatalog.config-dir={etc / 'catalog'}" in output_lines
    assert {"SEAMARK_URI=http://127.0.0.1:8181", "TRINO_PORT=8090"} <= set(output_lines)
    node = [line for line in (ETC / "node.properties").read_text().splitlines() if line and not line.startswith("#")]
    assert {f"-D{line}" for line in node} <= set(output_lines)
    plugin = checkout / ".cache" / "trino-data" / "plugin" / "iceberg"
    assert (plugin / "trino-iceberg-1.jar").exists()
    with zipfile.ZipFile(plugin / "seamark-service-entry.jar") as entry:
        assert b"IcebergPlugin" in entry.read("META-INF/services/io.trino.spi.Plugin")


def test_missing_program_is_reported_in_one_line_with_the_command(checkout: Path) -> None:
    result = run_launcher(checkout, JAVA25=str(checkout / "none"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "Trino needs a JDK 25: install one below /usr/lib/jvm, or set JAVA25 to its home\n"
    # The launcher searches the JDKs below /usr/lib/jvm with grep. This grep always fails, so the launcher finds none.
    # /bin/java may be an older one.
    failing_grep = checkout / "bin" / "grep"
    failing_grep.parent.mkdir()
    failing_grep.write_text("#!/bin/sh\nexit 1\n")
    failing_grep.chmod(0o755)
    assert run_launcher(checkout, JAVA25="", PATH=f"{failing_grep.parent}:/usr/bin:/bin").stderr == result.stderr
    (checkout / "jdk" / "release").write_text('IMPLEMENTOR="Debian"\nJAVA_VERSION="17.0.15"\n')
    result = run_launcher(checkout)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Trino needs a JDK 25, and JAVA25={checkout / 'jdk'} is version 17")
    assert result.stderr.count("\n") == 1
    (checkout / "jdk" / "release").write_text('JAVA_VERSION="25"\n')
    assert run_launcher(checkout).returncode == 0
    shutil.rmtree(checkout / ".cache" / "trino" / "lib")
    result = run_launcher(checkout)
    assert result.returncode == 1
    assert "run make trino" in result.stderr
