"""Tests of the server's TLS with certificates of a test authority, and of the messages if TLS is missing."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from seamark.commands.installation.doctor import check_server
from seamark.commands.main import cli
from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from tests.services.authority import Authority, encode_key_pem
from tests.services.command import SEAMARK, run_seamark
from tests.services.process import ManagedProcess, choose_free_port


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    new_authority = Authority(tmp_path)
    new_authority.issue("first")
    return new_authority


class TlsServer:
    """A server with TLS, which runs in its own process with `workers` workers, and its log."""

    def __init__(self, port: int, process: ManagedProcess, log: Path, workers: int) -> None:
        self.port, self.process, self.log, self.workers = port, process, log, workers
        self.url = f"https://127.0.0.1:{port}"

    def has_logged(self, text: bytes) -> bool:
        """Return True if the log contains the text at least as often as there are workers."""
        return self.log.read_bytes().count(text) >= self.workers

    def wait_until_logged(self, text: bytes) -> None:
        """Wait until the log contains the text at least as often as there are workers."""
        deadline_s = time.monotonic() + 60  # Enough for a busy machine
        while not self.has_logged(text):
            assert self.process.running(), self.log.read_text()
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.1)


@pytest.fixture
def tls_server(request: pytest.FixtureRequest, tmp_path: Path, authority: Authority) -> Iterator[TlsServer]:
    """Run a server with TLS. The parameter is the number of workers."""
    port, log = choose_free_port(), tmp_path / "log"
    argv = [SEAMARK, "serve", "--home", str(tmp_path / "home"), "--port", str(port), "--workers", request.param]
    argv += ["--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)]
    with ManagedProcess(argv, log=log, forked=True) as process:
        tls_server = TlsServer(port, process, log, int(request.param))
        process.start(
            lambda: tls_server.has_logged(b'"event":"serving"') and b"Seamark is ready" in log.read_bytes(),
            timeout_s=90,
        )
        yield tls_server


def read_presented_name(tls_server: TlsServer, authority: Authority) -> str:
    context = ssl.create_default_context(cafile=authority.file)
    with (
        socket.create_connection(("127.0.0.1", tls_server.port), 60) as plain_socket,
        context.wrap_socket(plain_socket, server_hostname="127.0.0.1") as tls_socket,
    ):
        certificate = tls_socket.getpeercert(binary_form=True)
    assert certificate is not None
    subject = x509.load_der_x509_certificate(certificate).subject
    return str(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def run_doctor(url: str) -> dict[str, str]:
    """Run `seamark doctor`, and return its findings about the server."""
    (finding,) = (item for item in check_server(url, None) if item.subject == "server")
    return dataclasses.asdict(finding)


@pytest.mark.parametrize("tls_server", ["1", pytest.param("2", marks=pytest.mark.slow)], indirect=True)
def test_only_clients_that_trust_the_authority_connect(
    tls_server: TlsServer, authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert f"Seamark is ready at {tls_server.url}" in tls_server.log.read_text()
    assert tls_server.url in (tmp_path / "home" / "server.json").read_text()
    untrusting_client = SeamarkClient(tls_server.url, retries=0)
    with pytest.raises(ClientError, match=r"certificate.*SEAMARK_CA"):
        list(untrusting_client.timeline())
    plain_client = SeamarkClient(tls_server.url.replace("https", "http"), retries=0)
    with pytest.raises(ClientError, match="https:// URL"):
        list(plain_client.timeline())
    assert "in the variable SEAMARK_CA" in run_doctor(tls_server.url)["fix"]
    monkeypatch.setenv("SEAMARK_CA", str(authority.file))
    client = SeamarkClient(tls_server.url, retries=0)
    assert list(client.timeline()) == []
    client.close()
    assert run_doctor(tls_server.url)["text"] == f"{tls_server.url} is ready"
    (tmp_path / "empty.pem").write_text("")
    monkeypatch.setenv("SEAMARK_CA", str(tmp_path / "empty.pem"))
    assert "empty.pem" in run_doctor(tls_server.url)["text"]
    monkeypatch.setenv("SEAMARK_CA", str(authority.file))
    result = CliRunner().invoke(cli, ["explain", "db.t", "--home", str(tmp_path / "home")])
    assert "does not exist" in result.output


@pytest.mark.parametrize("tls_server", ["1", pytest.param("2", marks=pytest.mark.slow)], indirect=True)
def test_old_tls_versions_and_plain_http_are_rejected(tls_server: TlsServer, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.file)
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", tls_server.port), 60) as plain_socket, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain_socket, server_hostname="127.0.0.1")
    with socket.create_connection(("127.0.0.1", tls_server.port), 60) as plain_socket:
        plain_socket.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        plain_socket.settimeout(10)
        assert b"200" not in plain_socket.recv(4096)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("tls_server", "sends_signal"),
    [
        pytest.param("1", True, id="SIGHUP, one worker", marks=pytest.mark.slow),
        pytest.param("2", True, id="SIGHUP, two workers"),
        pytest.param("1", False, id="files watched, one worker"),
        pytest.param("2", False, id="files watched, two workers", marks=pytest.mark.slow),
    ],
    indirect=["tls_server"],
)
def test_renewed_certificate_is_used_without_a_restart(
    tls_server: TlsServer, authority: Authority, sends_signal: bool
) -> None:
    assert read_presented_name(tls_server, authority) == "first"
    authority.issue("second")
    if sends_signal:
        os.kill(tls_server.process.pid, signal.SIGHUP)
    tls_server.wait_until_logged(b"the certificate was loaded again")
    assert {read_presented_name(tls_server, authority) for _ in range(8)} == {"second"}
    # The server does not use a renewal of only one of the two files.
    authority.issue("third", key_too=False)
    os.kill(tls_server.process.pid, signal.SIGHUP)
    tls_server.wait_until_logged(b"the new certificate cannot be used")
    assert {read_presented_name(tls_server, authority) for _ in range(8)} == {"second"}
    assert tls_server.process.running()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("fault", ["missing", "not a certificate", "another key", "passphrase"])
def test_start_fails_with_the_names_of_a_mismatched_certificate_and_key(
    tmp_path: Path, authority: Authority, fault: str
) -> None:
    if fault == "missing":
        authority.certificate.unlink()
    elif fault == "not a certificate":
        authority.certificate.write_text("hello")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        authority.key.write_bytes(encode_key_pem(key, b"secret" if fault == "passphrase" else None))
    arguments = ["--tls-cert", str(authority.certificate), "--tls-key", str(authority.key)]
    result = run_seamark("serve", "--home", str(tmp_path / "home"), "--port", "0", *arguments)
    assert result.returncode == 2
    assert str(authority.key if fault == "passphrase" else authority.certificate) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--trino", "http://trino.example:8080", "--url", "http://127.0.0.1:1"],
        ["--trino", "http://127.0.0.1:1", "--url", "http://seamark.example:8181", "--token", "smk_x"],
        ["--trino", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1", "--host", "0.0.0.0"],
    ],
    ids=["to Trino", "to Seamark", "from clients"],
)
def test_proxy_that_would_send_passwords_or_its_token_unencrypted_does_not_start(arguments: list[str]) -> None:
    result = CliRunner().invoke(cli, ["trino-proxy", "--catalog", "lake", "--port", "0", *arguments])
    assert result.exit_code == 2, result.output
    assert "unencrypted" in result.output
    assert "--allow-plain-http" in result.output


@pytest.mark.slow
def test_proxy_that_may_use_plain_http_logs_a_warning(tmp_path: Path) -> None:
    port = choose_free_port()
    argv = [SEAMARK, "trino-proxy", "--catalog", "lake", "--trino", "http://127.0.0.1:1", "--url", "http://127.0.0.1:1"]
    argv += ["--host", "0.0.0.0", "--port", str(port), "--allow-plain-http", "--home", str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "The proxy listens at http://0.0.0.0" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert "Warning: passwords and tokens are sent unencrypted from clients to 0.0.0.0" in process.stderr.read()
