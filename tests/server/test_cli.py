"""Tests of the command line: help, settings as flags, and errors with exit code 2."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from seamark.commands.main import cli
from seamark.metaserver.settings.settings import FIELDS, make_flag_name, make_variable_name
from tests.docs.commands import list_subcommands
from tests.services.command import SEAMARK, run_seamark
from tests.services.process import choose_free_port, is_http_ok
from tests.services.seamark import Seamark


def run_command(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run `seamark` with these arguments in this process. Return (exit code, all output)."""
    result = CliRunner().invoke(cli, arguments, env=env, prog_name="seamark")
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_help_lists_the_commands_and_shows_how_to_start() -> None:
    code, text = run_command("--help")
    assert code == 0
    assert "seamark serve --home" in text
    for command in ("serve", "version"):
        assert re.search(rf"^  {command} +\w", text, re.MULTILINE)


def test_every_setting_is_a_flag_with_its_description_and_variable() -> None:
    _, text = run_command("serve", "--help")
    text_on_one_line = re.sub(r"\s+", " ", text)
    for name, field in FIELDS.items():
        assert make_flag_name(name) in text
        assert f"[{make_variable_name(name)}]" in text_on_one_line
        assert field.metadata["description"].split(".")[0] in text_on_one_line


def test_help_shows_no_secret_default_and_no_environment_value() -> None:
    _, text = run_command("serve", "--help", env={"SEAMARK_WEBHOOK_SECRET": "hunter2"})
    assert "hunter2" not in text


def test_printed_version_equals_the_version_of_the_distribution() -> None:
    code, text = run_command("version")
    assert code == 0
    match = re.fullmatch(r"seamark (\d+\.\d+\.\d+) \(Python (3\.\d+\S*)\)\n", text)
    assert match is not None, text
    code, text = run_command("version", "--json")
    assert (code, json.loads(text)) == (0, {"seamark": match[1], "python": match[2]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "x"], "from the flag --port, must be a whole number"),
        (["--workers", "0"], "from 1 to 256"),
        (["--config", "/does/not/exist.toml"], "Cannot read the configuration file"),
        (["--host", "no.such.host.invalid"], "Cannot resolve the host"),
        (["--database", "sqlite://"], "SQLite database URL"),
        (["--auth", "oidc"], "oidc_issuer"),
        (["--warehouse", "s3://"], "warehouse"),
        (
            ["--warehouse", "file:///proc/nope/lake"],
            "Cannot create the folder /proc/nope/lake: No such file or directory; choose another warehouse",
        ),
        (["--warehouse", "file:///proc/version"], "Cannot create the folder /proc/version: Not a directory"),
    ],
)
def test_wrong_settings_stop_the_start_with_code_2_and_no_traceback(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run_seamark("serve", "--home", str(tmp_path), "--port", "0", *arguments)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_error_names_the_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run_seamark("serve", "--home", str(tmp_path), "--port", str(port))
    assert result.returncode == 2
    assert f"Cannot bind 127.0.0.1:{port}" in result.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_error_of_a_public_address_without_authentication_names_a_command_that_corrects_it(
    tmp_path: Path, host: str
) -> None:
    result = run_seamark("serve", "--home", str(tmp_path), "--port", "0", "--host", host)
    assert result.returncode == 2, result.stderr
    assert "seamark token create" in result.stderr
    assert not (tmp_path / "server.json").exists()


def test_port_0_prints_the_chosen_port(tmp_path: Path) -> None:
    argv = [SEAMARK, "serve", "--home", str(tmp_path), "--port", "0", "--log-level", "error"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            report = json.loads((tmp_path / "server.json").read_text())
            assert report["pid"] == server.pid
            assert line.startswith(f"Seamark is ready at {report['url']}, warehouse file://")
            assert "database sqlite:///" in line
            assert is_http_ok(report["url"] + "/readyz")
        finally:
            server.terminate()
            assert server.wait(60) == 0
    assert not (tmp_path / "server.json").exists()


def test_settings_of_flags_variables_and_files_reach_the_server(
    start_seamark: Callable[..., Seamark], tmp_path: Path
) -> None:
    config = tmp_path / "seamark.toml"
    port = choose_free_port()
    config.write_text("page_limit = 7\nrequests_limit = 7\nlog_level = 'info'\n")
    server = Seamark(
        tmp_path / "s",
        env={"SEAMARK_CONFIG": str(config), "SEAMARK_REQUESTS_LIMIT": "8"},
        flags=("--timeline-keep", "9"),
        port=port,
    )
    with server:
        events = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    settings = next(event["settings"] for event in events if event["event"] == "serving")
    assert (settings["page_limit"], settings["requests_limit"], settings["timeline_keep"]) == (7, 8, 9)
    assert settings["port"] == port


def test_misspelled_command_gets_a_suggestion() -> None:
    for words, expected in (
        (("tabel",), "No such command 'tabel'. Did you mean table?"),
        (("index", "bild"), "Did you mean build?"),
        (("zzz",), "No such command 'zzz'.\n"),
    ):
        code, text = run_command(*words)
        assert code == 2
        assert expected in text


LISTING_COMMANDS = ("list", "show", "explain", "health", "services", "timeline", "buckets", "doctor", "undrop")


ENDLESS_COMMANDS = ("serve", "indexer", "trino-proxy", "demo")
TEXT_COMMANDS = ("completion", "connect", "sql", "version")


def test_every_command_can_print_json() -> None:
    """Commands that run until they are stopped, and commands that print text, are excluded."""
    for path, command in list_commands("", cli):
        if not path.startswith(tuple(f" {name}" for name in (*ENDLESS_COMMANDS, *TEXT_COMMANDS))):
            assert any("--json" in option.opts for option in command.params), path


def test_every_command_that_lists_or_shows_can_print_json() -> None:
    listing = {path: command for path, command in list_commands("", cli) if path.split()[-1] in LISTING_COMMANDS}
    assert len(listing) > len(LISTING_COMMANDS)
    for path, command in listing.items():
        assert any("--json" in option.opts for option in command.params), path


def list_commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield (words, command) of all commands below a group that are not groups. Words are, for example, `index build`.

    Args:
        path: The words of the group.
        command: The group.
    """
    for name, subcommand in list_subcommands(command).items():
        if isinstance(subcommand, click.Group):
            yield from list_commands(f"{path} {name}", subcommand)
        else:
            yield f"{path} {name}", subcommand


def test_tokens_and_grants_are_listed_as_json(tmp_path: Path) -> None:
    home = ("--home", str(tmp_path / "home"))
    assert run_command("token", "create", "ann", "--role", "reader", *home)[0] == 0
    (token,) = json.loads(run_command("token", "list", "--json", *home)[1])
    assert (token["name"], token["state"], token["expires"]) == ("ann", "live", "never")
    assert json.loads(run_command("grant", "list", "--json", *home)[1]) == [
        {"principal": "ann", "role": "reader", "namespace": "(the whole catalog)"}
    ]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1"])
def test_server_that_does_not_answer_is_reported_in_one_line(url: str) -> None:
    code, text = run_command("table", "list", "--url", url)
    fix = "start the server, or set --url to the address that it printed"
    assert (code, text) == (1, f"Error: No answer from {url}: Connection refused; {fix}\n")
