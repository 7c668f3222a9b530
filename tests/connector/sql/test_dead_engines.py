"""An engine that does not answer, or does not start, is reported in one line with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from seamark.connector.client.errors import Unreachable
from seamark.connector.spark.java import NO_GATEWAY, missing_java
from seamark.connector.sql import spark_engine
from seamark.connector.sql.trino_engine import TrinoAddress, TrinoRows
from seamark.metaserver.cli.main import cli
from tests.services.process import free_port

JDK = "install a JDK 17 or newer"


def test_a_dead_trino_is_named_by_its_address() -> None:
    port = free_port()
    with pytest.raises(Unreachable) as caught:
        TrinoRows(TrinoAddress.parse(f"http://127.0.0.1:{port}"), "SELECT 1")
    assert caught.value.message == f"Trino does not answer at 127.0.0.1:{port}: Connection refused"


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_java")
def test_a_missing_java_is_told_apart_from_a_missing_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["run", "compact", "shop.orders", "--on", "local", "--url", "http://127.0.0.1:1"]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 2
    assert JDK in done.output
    assert "pip install" not in done.output
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert f"JAVA_HOME is {tmp_path}, which has no bin/java" in (missing_java() or "")


@pytest.mark.usefixtures("no_java")
def test_a_spark_without_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        def master(self, url: str) -> Builder:
            raise RuntimeError(f"[{NO_GATEWAY}] Java gateway process exited before sending its port number.")

    class Session:
        builder = Builder()

    class Module:
        SparkSession = Session

    monkeypatch.setattr(spark_engine, "spark_sql", Module)
    with pytest.raises(Unreachable, match=f"No Spark at local.2.: there is no Java: {JDK}"):
        spark_engine.SparkStatements("local[2]")
