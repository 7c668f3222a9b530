"""Tests of client certificates with a server process, and with Seamark's commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from tests.services.authority import Authority
from tests.services.command import SEAMARK
from tests.services.process import ManagedProcess, choose_free_port
from tests.waits import PATIENCE_S


def test_commands_log_in_with_a_certificate_until_its_authority_is_removed(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, log, bundle = choose_free_port(), tmp_path / "log", tmp_path / "clients.pem"
    bundle.write_text(authority.pem)
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\ncn = "{name}"\nprincipal = "{name}"\nroles = ["admin"]\n')
    files = authority.issue_client("operator", common_name="operator")
    argv = [SEAMARK, "serve", "--home", str(tmp_path / "home"), "--port", str(port), "--auth", "cert"]
    argv += ["--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)]
    argv += ["--tls-client-ca", str(bundle), "--tls-client-auth", "required", "--tls-client-rules-file", str(rules)]
    url = f"https://127.0.0.1:{port}"

    def run_command() -> str:
        return CliRunner().invoke(cli, ["connect", "duckdb", "--url", url]).output

    with ManagedProcess(argv, log=log, forked=True) as process:
        process.start(lambda: b"Seamark is ready" in log.read_bytes(), timeout_s=90)
        monkeypatch.setenv("SEAMARK_CA", str(authority.file))
        assert "requires a client certificate" in run_command() or "requires a login" in run_command()
        monkeypatch.setenv("SEAMARK_CLIENT_CERT", str(files.certificate))
        monkeypatch.setenv("SEAMARK_CLIENT_KEY", str(files.key))
        assert "ATTACH" in run_command(), log.read_text()
        bundle.write_text(Authority(tmp_path, file="other.pem").pem)
        deadline_s = time.monotonic() + PATIENCE_S
        while "ATTACH" in run_command():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.2)
        assert process.running()
