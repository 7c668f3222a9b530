"""Tests of `seamark doctor`, which names each fault and its fix, and of the scripts of `seamark completion`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import urllib3
from click.testing import CliRunner

from seamark.commands.installation import doctor, java, packages
from seamark.commands.installation.engine_files import (
    CheckResult,
    SparkSetup,
    check_spark,
    check_trino,
    read_properties,
)
from seamark.commands.main import cli
from seamark.connector.client.engines import RUNTIME, build_catalog_conf, format_connection
from tests.services.process import choose_free_port
from tests.services.seamark import Seamark

URL = "http://127.0.0.1:8181"


def run_doctor(*arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    """Run `seamark doctor`. Return the exit code, and the findings by subject."""
    result = CliRunner().invoke(cli, ["doctor", "--json", *arguments], prog_name="seamark")
    return result.exit_code, {str(finding["subject"]): finding for finding in json.loads(result.output)}


def list_faults(findings: list[CheckResult]) -> list[str]:
    return [finding.fix for finding in findings if finding.is_fault]


def test_doctor_reports_a_stopped_server_with_the_command_that_starts_it(tmp_path: Path) -> None:
    with Seamark(tmp_path / "home") as server:
        code, findings_by_subject = run_doctor("--home", str(server.home))
        assert code == 0
        assert findings_by_subject["server"]["text"] == f"{server.base_url} is ready"
    code, findings_by_subject = run_doctor("--url", f"http://127.0.0.1:{choose_free_port()}")
    assert code == 1
    assert "does not answer" in str(findings_by_subject["server"]["text"])
    assert "seamark serve" in str(findings_by_subject["server"]["fix"])
    code, findings_by_subject = run_doctor("--home", str(tmp_path / "none"))
    assert code == 1
    assert "No server runs" in str(findings_by_subject["server"]["text"])


def test_missing_token_is_a_fault(tmp_path: Path) -> None:
    token_result = CliRunner().invoke(
        cli, ["token", "create", "admin", "--role", "admin", "--home", str(tmp_path / "home")]
    )
    assert token_result.exit_code == 0, token_result.output
    with Seamark(tmp_path / "home", env={"SEAMARK_AUTH": "token"}) as server:
        code, findings_by_subject = run_doctor("--home", str(server.home))
        assert code == 1
        assert findings_by_subject["token"]["text"] == "the server requires one"
        code, findings_by_subject = run_doctor("--home", str(server.home), "--token", "sea_wrong")
        assert findings_by_subject["token"]["text"] == "the server refuses it"


def test_server_that_is_not_seamark_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        status, headers, data = 404, {"Date": "yesterday"}, b"<html>"

    monkeypatch.setattr(urllib3.PoolManager, "request", lambda *_, **__: Answer())
    findings = list(doctor.check_server("http://127.0.0.1:1", None))
    assert "this may not be a Seamark server" in findings[0].text
    assert findings[0].is_fault


def test_doctor_finds_no_fault_in_printed_configurations(tmp_path: Path) -> None:
    spark, trino = tmp_path / "spark-defaults.conf", tmp_path / "sea.properties"
    lines = [f"{key}  {value}" for key, value in build_catalog_conf("sea", URL).items()]
    extensions = "spark.sql.extensions org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    spark.write_text("\n".join(["# by hand", extensions, f"spark.jars.packages {RUNTIME}", *lines]))
    trino.write_text(format_connection("trino", "sea", URL, has_token=False))
    for findings in (check_spark("a", SparkSetup(read_properties(spark)), URL), check_trino(trino, URL)):
        assert [finding.text for finding in findings] == [f"connects to {URL}"]


def test_printed_configurations_trust_a_private_authority() -> None:
    for engine, expected in (
        ("spark", "--conf spark.executor.extraJavaOptions=-Djavax.net.ssl.trustStore=seamark-trust.jks"),
        ("pyspark", ".config('spark.driver.extraJavaOptions', '-Djavax.net.ssl.trustStore=seamark-trust.jks')"),
        ("trino", "# Add to etc/jvm.config, with the path of the file: -Djavax.net.ssl.trustStore=seamark-trust.jks"),
        ("pyiceberg", "ssl={\"cabundle\": '/ca.pem'}"),
    ):
        text = format_connection(engine, "sea", "https://seamark.example", has_token=True, authority="/ca.pem")
        assert expected in text
        assert ("keytool -importcert" in text) is (engine != "pyiceberg")
        assert expected not in format_connection(engine, "sea", "https://seamark.example", has_token=True)
        if engine.startswith("py"):
            compile(text, engine, "exec")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("", "connector.name=iceberg"),
        ("connector.name=hive\n", "connector.name=iceberg"),
        ("connector.name=iceberg\niceberg.catalog.type=hive_metastore\n", "iceberg.catalog.type=rest"),
        ("iceberg.rest-catalog.uri=http://127.0.0.1:8181/v1\n", f"iceberg.rest-catalog.uri={URL}"),
        ("connector.name=iceberg\n", "fs.native-local.enabled=true"),
    ],
)
def test_faulty_trino_catalog_gets_its_fix(tmp_path: Path, text: str, fix: str) -> None:
    (tmp_path / "sea.properties").write_text(text)
    assert any(fix in fault for fault in list_faults(list(check_trino(tmp_path / "sea.properties", URL))))


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [("type", "hive", "sea.type rest"), ("uri", "", f"sea.uri {URL}"), ("uri", f"{URL}/v1", f"sea.uri {URL}")],
)
def test_faulty_spark_catalog_gets_its_fix(key: str, value: str, fix: str) -> None:
    conf = build_catalog_conf("sea", URL) | {f"spark.sql.catalog.sea.{key}": value}
    assert any(fix in fault for fault in list_faults(list(check_spark("a", SparkSetup(conf), URL))))


def test_file_that_is_not_a_properties_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    (tmp_path / "large").write_text("x" * 2_000_000)
    for name in ("binary", "large"):
        code, findings_by_subject = run_doctor("--url", "http://127.0.0.1:1", "--trino", str(tmp_path / name))
        assert code == 1
        assert "cannot be read" in str(findings_by_subject[str(tmp_path / name)]["text"])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_the_shell_accepts(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell], prog_name="seamark")
    assert result.exit_code == 0
    assert "_SEAMARK_COMPLETE" in result.output
    program = shutil.which(shell)
    if program is not None:
        check_result = subprocess.run([program, "-n"], input=result.output, capture_output=True, text=True, timeout=20)
        assert check_result.returncode == 0, check_result.stderr


def test_completion_suggests_commands_and_options() -> None:
    def complete(*words: str) -> str:
        env = {"_SEAMARK_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return CliRunner().invoke(cli, [], env=env, prog_name="seamark").output

    assert "plain,namespace" in complete("seamark", "name")
    assert "plain,trino" in complete("seamark", "connect", "tri")
    assert "plain,--kind" in complete("seamark", "index", "create", "--ki")


@pytest.mark.slow
def test_running_spark_is_checked_by_its_web_interface() -> None:
    conf = build_catalog_conf("sea", f"{URL}/v1") | {"spark.app.name": "x"}
    jars = [["/jars/iceberg-spark-runtime-3.5_2.12-1.12.0.jar", "System Classpath"]]
    with serve_spark_ui(conf, "4.1.1", jars) as url:
        code, findings_by_subject = run_doctor("--url", URL, "--spark", url)
    assert code == 1
    texts = [finding.text for finding in check_spark("a", SparkSetup(conf, "4.1.1", (jars[0][0],)), URL)]
    assert "Spark has the version 4.1, and Iceberg's jar is for Spark 3.5" in texts
    assert str(findings_by_subject[f"Spark, {url}, catalog sea"]["text"]) in texts
    with serve_spark_ui({}, "4.1.1", []) as url:
        code, findings_by_subject = run_doctor("--url", URL, "--spark", url)
    assert code == 1
    assert findings_by_subject[f"Spark, {url}"]["text"] == "MERGE INTO, CALL and branches are not enabled", (
        "the third finding of this subject replaces the others"
    )


def test_address_or_file_that_is_not_spark_is_reported(tmp_path: Path) -> None:
    for spark, reason in (
        (f"http://127.0.0.1:{choose_free_port()}", "does not answer"),
        (str(tmp_path / "nosuch.conf"), "No such file"),
    ):
        code, findings_by_subject = run_doctor("--url", URL, "--spark", spark)
        assert code == 1
        assert reason in str(findings_by_subject[spark]["text"])
    with serve_spark_ui({}, "4.1.1", [], answer=b"[]") as url:
        assert "web interface" in str(run_doctor("--url", URL, "--spark", url)[1][url]["text"])


@contextmanager
def serve_spark_ui(
    conf: dict[str, str], version: str, jars: list[list[str]], answer: bytes | None = None
) -> Iterator[str]:
    """Serve the parts of Spark's REST API that `seamark doctor`, which checks configurations, reads. Yield the URL.

    Args:
        conf: The properties of the Spark application.
        version: The version of Spark.
        jars: The (path, source) pairs of the class path.
        answer: The body of every answer instead of these values, if it is not None.
    """
    application = {"id": "local-1", "name": "x", "attempts": [{"appSparkVersion": version}]}
    environment = {"sparkProperties": [list(pair) for pair in conf.items()], "classpathEntries": jars}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = environment if self.path.endswith("/environment") else [application]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode() if answer is None else answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_warehouse_check_leaves_no_files(tmp_path: Path) -> None:
    home, warehouse = tmp_path / "home", tmp_path / "warehouse"
    _, findings_by_subject = run_doctor("--home", str(home), "--warehouse", f"file://{warehouse}")
    assert findings_by_subject["warehouse"]["text"] == f"file://{warehouse} does not exist; the server creates it"
    assert not warehouse.exists()
    warehouse.mkdir()
    _, findings_by_subject = run_doctor("--home", str(home), "--warehouse", f"file://{warehouse}")
    assert findings_by_subject["warehouse"]["text"] == f"file://{warehouse} can be written and read"
    assert list(warehouse.iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        code, findings_by_subject = run_doctor("--home", str(home), "--warehouse", f"file://{folder}")
        assert code == 1
        assert findings_by_subject["warehouse"]["is_fault"]


def test_unreachable_s3_store_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEAMARK_S3_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("SEAMARK_S3_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("SEAMARK_STORAGE_TIMEOUT_S", "1")
    endpoint = f"http://127.0.0.1:{choose_free_port()}"
    code, findings_by_subject = run_doctor(
        "--home", str(tmp_path), "--warehouse", "s3://lake/warehouse", "--s3-endpoint", endpoint
    )
    assert code == 1
    assert "--s3-endpoint" in str(findings_by_subject["warehouse"]["fix"])


def test_doctor_names_the_java_of_each_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_JVMS", tmp_path)
    monkeypatch.delenv("JAVA25", raising=False)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    findings_by_subject = {finding.subject: finding for finding in java.check_java()}
    assert findings_by_subject["Java for Spark"].is_fault
    assert "JAVA_HOME" in findings_by_subject["Java for Spark"].fix
    assert not findings_by_subject["Java for Trino"].is_fault
    assert "JAVA25" in findings_by_subject["Java for Trino"].fix
    monkeypatch.setenv("JAVA25", str(tmp_path / "none"))
    assert {finding.subject: finding for finding in java.check_java()}["Java for Trino"].is_fault
    monkeypatch.delenv("JAVA25")
    (tmp_path / "jdk-25").mkdir()
    (tmp_path / "jdk-25" / "release").write_text('JAVA_VERSION="25.0.1"\n')
    assert "version 25" in {finding.subject: finding for finding in java.check_java()}["Java for Trino"].text


@pytest.mark.slow
def test_jar_in_the_repository_of_maven_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".m2/repository/org/apache/iceberg/iceberg-spark-runtime-4.1_2.13/1.12.0"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder in set(packages._list_jar_folders())


def test_missing_compiler_is_reported_before_cython_translates_the_compiled_modules(tmp_path: Path) -> None:
    """setup.py states in one sentence which command installs a compiler. `seamark doctor` names the same commands."""
    setup = Path(__file__).parents[2] / "setup.py"
    environment = {"PATH": str(tmp_path), "CC": "no-such-compiler"}
    result = subprocess.run(
        [sys.executable, str(setup), "--version"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"Seamark's kernels need a C compiler and Python's headers. Run: {packages.INSTALLERS['apt-get']}\n"
    )
    assert not list(tmp_path.iterdir())
    assert repr(packages.INSTALLERS["dnf"]).strip("'") in setup.read_text()
