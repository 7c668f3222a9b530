"""Tests that an engine that does not answer or start is reported in one line, which says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.commands.maintenance import launching
from seamark.connector.client.engines import RUNTIME, build_catalog_conf
from seamark.connector.client.errors import Unreachable
from seamark.connector.spark.java import NO_GATEWAY, find_java_problem
from seamark.connector.sql import duckdb_engine, spark_engine
from seamark.connector.sql.trino_engine import TrinoAddress, TrinoRows
from seamark.metaserver.services.job import JobFailed
from tests.services.process import choose_free_port

JDK_ADVICE = "install a JDK 17 or newer"


def test_error_of_an_unreachable_trino_names_its_address() -> None:
    port = choose_free_port()
    with pytest.raises(Unreachable) as error:
        TrinoRows(TrinoAddress.parse(f"http://127.0.0.1:{port}"), "SELECT 1")
    assert error.value.message == f"Trino does not answer at 127.0.0.1:{port}: Connection refused"


@pytest.mark.parametrize("is_nested", [False, True])
def test_error_of_a_write_shows_the_whole_message_of_the_catalog(*, is_nested: bool) -> None:
    """The test builds the error texts as DuckDB's Iceberg extension does, with and without a second level of JSON."""
    message = f'bob may not do "x" in {"shop" * 200}. An admin grants it with: seamark grant add bob write'
    request = "Request to 'http://localhost/v1/namespaces/shop/tables' returned a non-200 status code"
    body = json.dumps({"error": {"message": message, "type": "ForbiddenException", "code": 403}})
    text = f"{request} (Forbidden_403), with reason: Forbidden, body: {body}"
    if is_nested:
        body = json.dumps({"exception_type": "Invalid Configuration", "exception_message": text})
        text = f"{request} body: {body}"
    error = duckdb_engine._to_client_error(duckdb.Error(text), ())
    assert error.message == f"The statement fails: {message}"


def test_failure_of_duckdb_is_reported_although_its_views_cannot_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailedConnection:
        """DuckDB fails only because of its own bugs, so no statement makes it fail."""

        def register(self, *_: object) -> None: ...

        def unregister(self, *_: object) -> None: ...

        def execute(self, text: str) -> None:
            if text.startswith("DROP"):
                raise duckdb.FatalException("the database has been invalidated")

    stream: Any = SimpleNamespace(has_uuids=True, write_columns=lambda: "c0")
    connection: Any = FailedConnection()
    monkeypatch.setattr(duckdb_engine, "TableStream", lambda _: stream)
    with pytest.raises(duckdb_engine.DuckDBFailed), duckdb_engine.register_stream(connection, "t", stream):
        raise duckdb_engine.DuckDBFailed("DuckDB failed", status=500)


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAVA_HOME", "SPARK_HOME", "SPARK_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_java")
def test_missing_java_is_reported_differently_from_missing_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["run", "compact", "shop.orders", "--on", "local", "--url", "http://127.0.0.1:1"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2
    assert JDK_ADVICE in result.output
    assert "pip install" not in result.output
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert f"JAVA_HOME is {tmp_path}, which has no bin/java" in (find_java_problem() or "")


@pytest.mark.usefixtures("no_java")
def test_java_outside_the_path_is_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Java comes from JAVA_HOME or from Spark's spark-env.sh, which only spark-submit reads."""

    class RecordingSubmit:
        def __init__(self, *_: object) -> None: ...

        async def run(self, *_: object) -> None:
            raise JobFailed("spark-submit was started")

    monkeypatch.setattr(launching, "SparkSubmit", RecordingSubmit)
    for path in ("jdk/bin/java", "spark/bin/spark-submit", "spark/conf/spark-env.sh"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch(0o755)
    for name, home in (("JAVA_HOME", "jdk"), ("SPARK_HOME", "spark")):
        with monkeypatch.context() as context:
            context.setenv(name, str(tmp_path / home))
            command = ["run", "compact", "shop.orders", "--on", "local", "--url", "http://127.0.0.1:1"]
            assert "spark-submit was started" in CliRunner().invoke(cli, command).output, name


class FakeSparkSession:
    """A replacement for PySpark's builder and settings that starts no JVM."""

    def __init__(self, conf: dict[str, str], error: str = "") -> None:
        self.builder = self.conf = self
        self.settings, self.started_settings, self.error = conf, dict[str, str](), error

    def master(self, url: str) -> FakeSparkSession:
        if self.error:
            raise RuntimeError(self.error)
        return self

    def config(self, key: str, value: str) -> FakeSparkSession:
        self.started_settings[key] = value
        return self

    def getOrCreate(self) -> FakeSparkSession:  # noqa: N802
        return self

    def getActiveSession(self) -> None:  # noqa: N802
        return None

    def get(self, key: str, default: str | None) -> str | None:
        return self.settings.get(key, default)

    def set(self, key: str, value: str) -> None:
        self.settings[key] = value


@pytest.fixture
def spark_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("PYSPARK_SUBMIT_ARGS", raising=False)
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    return tmp_path


def start_spark(session: FakeSparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_engine, "spark_sql", SimpleNamespace(SparkSession=session))
    spark_engine.SparkStatements("local[2]", "sea", build_catalog_conf("sea", "http://127.0.0.1:8181"))


@pytest.mark.usefixtures("no_java", "spark_home")
def test_error_of_spark_without_java_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FakeSparkSession({}, f"[{NO_GATEWAY}] Java gateway process exited before sending its port number.")
    with pytest.raises(Unreachable, match=f"No Spark at local.2.: there is no Java: {JDK_ADVICE}"):
        start_spark(session, monkeypatch)


def test_spark_without_settings_gets_icebergs_jar_and_the_catalog(
    spark_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSparkSession({})
    start_spark(session, monkeypatch)
    assert session.started_settings["spark.jars.packages"] == RUNTIME
    assert session.settings["spark.sql.catalog.sea.uri"] == "http://127.0.0.1:8181"

    named_session = FakeSparkSession({"spark.sql.catalog.sea": "theirs"})
    (spark_home / "conf").mkdir()
    (spark_home / "conf" / "spark-defaults.conf").touch()
    start_spark(named_session, monkeypatch)
    assert (named_session.started_settings, named_session.settings) == ({}, {"spark.sql.catalog.sea": "theirs"})
