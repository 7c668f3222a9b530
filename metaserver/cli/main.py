"""`seamark`: the entry point.

Each command loads the same settings; what is wrong with them is told in one paragraph, with exit code 2.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from metaserver.api.logs import configure_logging
from metaserver.cli.workers import supervise
from metaserver.errors import ConfigError
from metaserver.server import bind, prepare_home, run, url_of, write_server_file
from metaserver.settings import FIELDS, Settings, environment_name, flag_name, load, redact_url

Command = TypeVar("Command", bound=Callable[..., Any])
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def settings_flags(names: tuple[str, ...] | None = None) -> Callable[[Command], Command]:
    """Gives a command `--config` and a flag for each setting (or for `names`), unset unless given."""

    def add(command: Command) -> Command:
        for name in reversed(names or tuple(FIELDS)):
            field = FIELDS[name]
            many, truth = isinstance(field.default, tuple), isinstance(field.default, bool)
            text = f"{field.metadata['description']} [{environment_name(name)}]"
            if not field.metadata["secret"] and field.default not in ("", ()):
                text = f"{text} (default: {str(field.default).lower() if truth else field.default})"
            flag = flag_name(name)
            if truth:
                command = click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)(command)
            else:
                metavar = {int: "N", float: "N", Path: "DIR"}.get(type(field.default), "TEXT")
                option = click.option(
                    flag, name, default=None, multiple=many, metavar=metavar, help=text, callback=_none_if_empty
                )
                command = option(command)
        config = click.option("--config", type=click.Path(path_type=Path), help="TOML file. [SEAMARK_CONFIG]")
        return config(command)

    return add


def _none_if_empty(context: click.Context, option: click.Parameter, value: Any) -> Any:
    return None if value == () else value


def load_settings(flags: Mapping[str, Any], config: Path | None) -> Settings:
    """Settings for a command; exits with code 2 and a clear message when they are wrong."""
    try:
        return load(flags, os.environ, config)
    except ConfigError as error:
        raise refuse(error) from None


class Misconfigured(click.ClickException):
    """What the operator has to mend before anything starts."""

    exit_code = 2


def refuse(error: ConfigError) -> click.ClickException:
    return Misconfigured(error.message)


@click.group(context_settings=CONTEXT)
def cli() -> None:
    """Seamark: an Iceberg REST catalog that knows where the rows are.

    \b
    Try it on this machine, nothing to configure:
      seamark serve --home ./seamark-home
    Over PostgreSQL and S3, several processes:
      seamark serve --workers 4 --warehouse s3://lake/warehouse \\
          --database postgresql://seamark@db/seamark
    Engines connect to the printed URL as to any Iceberg REST catalog.
    """


@cli.command(context_settings=CONTEXT)
@settings_flags()
def serve(config: Path | None, **flags: Any) -> None:
    """Starts the server and stays until SIGTERM or Ctrl-C.

    Every flag is also an environment variable (shown in brackets) and a key of the TOML file. First wins: flag,
    variable, file, default. When ready, one line says where it listens; logs go to standard error.
    """
    settings = load_settings(flags, config)
    try:
        _serve(settings)
    except ConfigError as error:
        raise refuse(error) from None


def _serve(settings: Settings) -> None:
    prepare_home(settings)
    shared = settings.workers > 1
    sock = bind(settings, shared=shared)
    url, port = url_of(settings, sock), sock.getsockname()[1]
    written: list[Path] = []

    def announce() -> None:
        written.append(write_server_file(settings, url, port))
        database = redact_url(settings.database_url())
        click.echo(f"Seamark is ready at {url}, warehouse {settings.warehouse_uri()}, database {database}")

    try:
        if shared:
            supervise(settings, sock, announce)
        else:
            configure_logging(settings)
            run(settings, sock, announce)
    finally:
        sock.close()
        for path in written:
            path.unlink(missing_ok=True)


@cli.command()
def version() -> None:
    """Prints the versions of Seamark and of Python."""
    click.echo(f"seamark {importlib.metadata.version('seamark')} (Python {platform.python_version()})")


def main() -> None:
    cli(prog_name="seamark")


if __name__ == "__main__":
    main()
