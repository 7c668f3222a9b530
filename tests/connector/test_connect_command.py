"""`seamark connect` prints texts that run and that match the tests and the documentation."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from pyiceberg.catalog import load_catalog

from seamark.commands.main import cli
from seamark.connector.client.engines import (
    ENGINES,
    EXTENSIONS,
    NO_HIVE,
    RUNTIME,
    build_catalog_conf,
    format_connection,
)
from seamark.connector.client.indexes import IndexClient
from tests.connector.server_thread import ServerThread
from tests.docs.pages import REPO, Page
from tests.docs.runner import read_spark_conf

URI = "http://127.0.0.1:8181"


def run_connect(url: str, engine: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["connect", engine, "--url", url, *arguments])


def test_printed_pyiceberg_script_reads_a_table(client: IndexClient, tmp_path: Path) -> None:
    result = run_connect(client.url, "pyiceberg")
    assert result.exit_code == 0, result.output
    script = tmp_path / "script.py"
    script.write_text("\n".join(line for line in result.stdout.splitlines() if "[info" not in line))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "db" in process.stdout


@pytest.mark.parametrize("has_token", [False, True])
def test_python_scripts_compile_and_take_the_token_from_the_environment(has_token: bool) -> None:
    for engine in ("pyspark", "pyiceberg"):
        text = format_connection(engine, "sea", URI, has_token=has_token)
        compile(text, engine, "exec")
        assert ("SEAMARK_TOKEN" in text) == has_token
    conf = dict(
        re.findall(r"\.config\('([^']+)', '([^']+)'\)", format_connection("pyspark", "sea", URI, has_token=False))
    )
    assert conf == {
        "spark.jars.packages": RUNTIME,
        "spark.sql.extensions": EXTENSIONS,
        **build_catalog_conf("sea", URI),
    }


def test_printed_spark_configuration_equals_that_of_the_test_session() -> None:
    text = format_connection("spark", "sea", URI, has_token=False)
    assert text.startswith(f"spark-sql --packages {RUNTIME} ")
    assert read_spark_conf(text) == {**NO_HIVE, "spark.sql.extensions": EXTENSIONS, **build_catalog_conf("sea", URI)}
    text_with_token = format_connection("spark", "sea", URI, has_token=True)
    assert '"spark.sql.catalog.sea.token=$SEAMARK_TOKEN"' in text_with_token
    output = subprocess.run(
        ["sh", "-c", text_with_token.replace("spark-sql", "printf '%s\\n'", 1)],
        capture_output=True,
        text=True,
        env={**os.environ, "SEAMARK_TOKEN": "smk_x"},
        timeout=10,
    )
    assert "spark.sql.catalog.sea.token=smk_x" in output.stdout.splitlines()


def test_printed_trino_configuration_equals_that_of_the_how_to_guide() -> None:
    blocks = [
        block.text for block in Page(REPO / "docs/how-to/connect-trino.md").blocks if block.language == "properties"
    ]
    assert format_connection("trino", "sea", URI, has_token=False).splitlines()[1:] == blocks[0].strip().splitlines()
    s3_lines = format_connection("trino", "sea", URI, has_token=True, on_s3=True).splitlines()[1:]
    # The guide also disables a cache of Trino, which the printed configuration leaves enabled.
    documented_names = {line.partition("=")[0] for line in blocks[1].strip().splitlines()}
    assert {line.partition("=")[0] for line in s3_lines} == documented_names - {"iceberg.metadata-cache.enabled"}


def test_printed_duckdb_configuration_equals_that_of_the_how_to_guide() -> None:
    statement = next(
        line for line in format_connection("duckdb", "sea", URI, has_token=False).splitlines() if "ATTACH" in line
    )
    assert statement in (REPO / "docs/how-to/connect-duckdb.md").read_text()


def test_duckdb_text_takes_the_token_from_the_environment() -> None:
    assert "TOKEN getenv('SEAMARK_TOKEN')" in format_connection("duckdb", "sea", URI, has_token=True)
    assert "TOKEN" not in format_connection("duckdb", "sea", URI, has_token=False)


def test_printed_duckdb_script_reads_a_table(server: ServerThread, tmp_path: Path) -> None:
    """The test copies DuckDB's extensions from PyPI packages to the folder of INSTALL, so INSTALL downloads nothing."""
    version, platform = _read_duckdb_platform()
    folder = tmp_path / "extensions" / version / platform
    folder.mkdir(parents=True)
    for name in ("avro", "httpfs", "iceberg"):
        package = Path(importlib.import_module(f"duckdb_extension_{name}").__path__[0])
        shutil.copy(package / "extensions" / version / f"{name}.duckdb_extension", folder)
    catalog = load_catalog("sea", type="rest", uri=server.url)
    catalog.create_namespace("shop")
    rows = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
    catalog.create_table("shop.orders", schema=rows.schema).append(rows)
    text = "\n".join(line for line in run_connect(server.url, "duckdb").stdout.splitlines() if "[info" not in line)
    config = {"allow_unsigned_extensions": "true", "extension_directory": str(tmp_path / "extensions")}
    with duckdb.connect(config=config) as connection:
        assert ("sea", "shop", "orders") in {row[:3] for row in connection.execute(text).fetchall()}
        assert connection.execute("SELECT sum(id) FROM sea.shop.orders WHERE id > 1").fetchall() == [(5,)]


def _read_duckdb_platform() -> tuple[str, str]:
    with duckdb.connect() as connection:
        (platform,) = connection.execute("PRAGMA platform").fetchone()
    return f"v{duckdb.__version__}", platform


def test_printed_iceberg_runtime_equals_that_of_the_tests() -> None:
    pom = (REPO / "deploy" / "jars" / "pom.xml").read_text()
    version = re.search(r"<iceberg.version>(.*)</", pom)
    assert version is not None
    assert RUNTIME.endswith(f":{version[1]}")


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["spark", "--catalog", "a b"], 2, "is not a name"),
        (["presto"], 2, "presto"),
        (["trino", "--url", "http://127.0.0.1:1"], 1, "No answer from http://127.0.0.1:1"),
    ],
)
def test_connect_command_reports_each_invalid_argument(
    client: IndexClient, arguments: list[str], code: int, message: str
) -> None:
    result = run_connect(client.url, *arguments)
    assert result.exit_code == code
    assert message in result.output


@pytest.mark.parametrize("engine", ENGINES)
def test_connect_command_has_a_text_for_every_engine(client: IndexClient, engine: str) -> None:
    result = run_connect(client.url, engine)
    assert result.exit_code == 0, result.output
    assert client.url in result.output
