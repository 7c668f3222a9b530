"""`seamark serve`: one server, or a supervisor and its workers, until they are stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from metaserver.api.logs import configure_logging
from metaserver.cli.options import CONTEXT, load_settings, refuse, settings_flags
from metaserver.cli.workers import supervise
from metaserver.errors import ConfigError, SeamarkError
from metaserver.server import bind, prepare_home, run, url_of, write_server_file
from metaserver.settings import Settings, redact_url


@click.command(context_settings=CONTEXT)
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
    except SeamarkError as error:
        raise click.ClickException(error.message) from None


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
