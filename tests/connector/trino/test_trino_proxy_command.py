"""Tests of `seamark trino-proxy`: the options that it refuses, its start and its end."""

from __future__ import annotations

import signal
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from tests.connector.trino.rig import reserve_dead_address
from tests.services.trino_proxy import run_trino_proxy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--catalog", "lake"], "--trino"),
        (["--trino", "http://t:1"], "--catalog"),
        (["--trino", "t:1", "--catalog", "lake"], "'t:1' is not the URL of a coordinator"),
        (["--trino", "http://t:1/ui", "--catalog", "lake"], "a scheme, a host and a port"),
        (["--trino", "http://t:1", "--trino", "http://t:1/", "--catalog", "lake"], "each of them only once"),
        (["--trino", "http://t:1", "--catalog", "lake", "--url", "s:1"], "'s:1' is not the URL of a server"),
        (["--trino", "http://t:1", "--catalog", "lake", "--tls-cert", __file__], "must be set together"),
        # The file contains no certificate. The text of this error is not checked.
        (["--trino", "http://t:1", "--catalog", "lake", "--tls-cert", __file__, "--tls-key", __file__], ""),
        (["--trino", "http://t:1", "--catalog", "lake", "--kept-max", "2"], "--kept-max"),
    ],
)
def test_invalid_options_end_the_command_with_exit_code_2(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(cli, ["trino-proxy", "--url", "http://s:1", "--port", "0", *arguments])
    assert result.exit_code == 2, result.output
    assert expected in " ".join(result.output.split())


def test_proxy_prints_its_address_and_ends_at_sigterm(tmp_path: Path) -> None:
    with run_trino_proxy(tmp_path, "--trino", reserve_dead_address(), seamark=reserve_dead_address()) as proxy:
        with urllib.request.urlopen(f"{proxy.url}/seamark/healthz", timeout=60) as answer:
            assert answer.status == 200
        proxy.process.send(signal.SIGTERM)
        assert proxy.process.wait(60) == 0
        text = proxy.process.log.read_text()
    assert f"The proxy listens at {proxy.url}, but there is no answer from Trino at http" in text
    assert "and Seamark at http" in text
    assert "ready" not in text


@pytest.mark.slow
def test_proxy_reports_a_server_that_is_not_trino(tmp_path: Path) -> None:
    class HandlerWithoutLog(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(HandlerWithoutLog, directory=str(tmp_path))) as other_server:
        threading.Thread(target=other_server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other_server.server_address[1]}"
        with run_trino_proxy(tmp_path, "--trino", url, seamark=reserve_dead_address()) as proxy:
            text = proxy.process.log.read_text()
        other_server.shutdown()
    assert "there is no answer from Seamark at http" in text
    assert f"and the server at {url} is not Trino" in text


def test_error_of_a_used_port_names_the_address(tmp_path: Path) -> None:
    with run_trino_proxy(tmp_path, "--trino", reserve_dead_address(), seamark=reserve_dead_address()) as proxy:
        arguments = [
            "--trino",
            reserve_dead_address(),
            "--catalog",
            "x",
            "--url",
            reserve_dead_address(),
            "--port",
            str(proxy.port),
        ]
        result = CliRunner().invoke(cli, ["trino-proxy", *arguments])
        assert result.exit_code == 1
        assert f"Cannot listen on 127.0.0.1:{proxy.port}" in result.output
