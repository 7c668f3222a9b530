"""Options that several commands share.

Each setting of the server can be a flag of a command. Errors in settings all have the same form, and exit code 2.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from seamark.connector.client.values import parse_timestamp
from seamark.connector.jobs.statements import parse_bytes
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.settings.settings import FIELDS, Settings, make_flag_name, make_variable_name
from seamark.metaserver.settings.sources import find_exposed_secrets, resolve_settings

Command = TypeVar("Command", bound=Callable[..., Any])
_DURATION = re.compile(r"([1-9][0-9]{0,9})([smhdwy])\Z")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}

json_option: Callable[[Command], Command] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def address_options(command: Command) -> Command:
    """Add `--url` and `--token` of the server to a command."""
    command = click.option("--token", envvar="SEAMARK_TOKEN", help="Bearer token for the server. [SEAMARK_TOKEN]")(
        command
    )
    return click.option(
        "--url",
        envvar="SEAMARK_URL",
        show_envvar=True,
        help="URL of the server. Default: the URL in the file server.json of --home.",
    )(command)


def settings_flags(names: tuple[str, ...] | None = None) -> Callable[[Command], Command]:
    """Return a decorator that adds `--config` and a flag for each setting, or each setting in `names`, to a command.

    For a flag that is not used, the command receives None.
    """

    def add_options(command: Command) -> Command:
        for name in reversed(names or tuple(FIELDS)):
            field = FIELDS[name]
            is_multiple, is_flag = isinstance(field.default, tuple), isinstance(field.default, bool)
            text = f"{field.metadata['description']} [{make_variable_name(name)}]"
            if not field.metadata["secret"] and field.default not in ("", ()):
                text = f"{text} (default: {str(field.default).lower() if is_flag else field.default})"
            flag = make_flag_name(name)
            if is_flag:
                command = click.option(f"{flag}/--no-{flag.removeprefix('--')}", name, default=None, help=text)(command)
            else:
                metavar = {int: "N", float: "N", Path: "DIR"}.get(type(field.default), "TEXT")
                option = click.option(
                    flag, name, default=None, multiple=is_multiple, metavar=metavar, help=text, callback=_replace_empty
                )
                command = option(command)
        config = click.option(
            "--config", type=click.Path(path_type=Path), help="TOML file with settings. [SEAMARK_CONFIG]"
        )
        return config(command)

    return add_options


def _replace_empty(context: click.Context, option: click.Parameter, value: Any) -> Any:
    return None if value == () else value


def load_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Return the settings of a command.

    If they are invalid, the command ends with exit code 2 and a message. If every account of the machine can read a
    configuration file with secrets, a warning is printed.
    """
    try:
        settings = resolve_settings(flags, os.environ, config)
        exposed_secrets = find_exposed_secrets(os.environ, config)
    except ConfigError as error:
        raise to_settings_error(error) from None
    if exposed_secrets is not None:
        path, names = exposed_secrets
        click.echo(
            f"Warning: every account can read {path}, which contains {', '.join(names)}; run chmod 600 on it", err=True
        )
    return settings


class Misconfigured(click.ClickException):
    """An error in the configuration, which the operator must correct."""

    exit_code = 2


def to_settings_error(error: ConfigError) -> click.ClickException:
    return Misconfigured(error.message)


def parse_duration(text: str, option: str) -> int:
    """Convert a number with a unit of time, such as `12h`, to seconds.

    Raises:
        BadParameter: The text is not a number with a unit. The message names the option.
    """
    match = _DURATION.match(text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is not a duration: write a number and s, m, h, d, w or y", param_hint=option
        )
    return int(match[1]) * _UNITS_S[match[2]]


def parse_time_ms(text: str, option: str) -> int:
    """Convert a text to milliseconds since the epoch, in the same way as `parse_timestamp`.

    Raises:
        BadParameter: The text is not a time. The message names the option.
    """
    try:
        return parse_timestamp(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a time: write 2026-01-31T12:00 or milliseconds since the epoch", param_hint=option
        ) from None


def parse_size(text: str, option: str) -> int:
    """Convert a number with a unit of size, such as `512MB`, to bytes. Units are powers of 1024.

    Raises:
        BadParameter: The text is not a number with a unit. The message names the option.
    """
    size_bytes = parse_bytes(text)
    if size_bytes is None:
        raise click.BadParameter(f"{text!r} is not a size: write a number and KB, MB, GB or TB", param_hint=option)
    return size_bytes


def parse_properties(texts: Sequence[str], option: str) -> dict[str, str]:
    """Convert texts NAME=VALUE to a dictionary.

    Raises:
        UsageError: A text has no `=`, or no name.
    """
    properties: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{option} {text!r} has no value; write NAME=VALUE")
        properties[name] = value
    return properties
