"""Commands of `seamark` that run inside the process of the test."""

from __future__ import annotations

from collections.abc import Mapping

from click.testing import CliRunner

from seamark.commands.main import cli


def invoke_seamark(*arguments: str, url: str = "", env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run the command against the server at `url`, and return its exit code and its output."""
    environment = {**({"SEAMARK_URL": url} if url else {}), **(env or {})}
    result = CliRunner().invoke(cli, list(arguments), env=environment, prog_name="seamark")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output
