"""`seamark`: the entry point.

Each command loads the same settings; what is wrong with them is told in one paragraph, with exit code 2.
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import click

from metaserver.api.logs import configure_logging
from metaserver.cli.access import grant, token
from metaserver.cli.buckets import buckets
from metaserver.cli.build import build_command
from metaserver.cli.explain import explain
from metaserver.cli.index import index
from metaserver.cli.index_verify import rebuild_registry_command, verify_command
from metaserver.cli.indexer import indexer
from metaserver.cli.options import CONTEXT, load_settings, refuse, settings_flags
from metaserver.cli.workers import supervise
from metaserver.errors import ConfigError, SeamarkError
from metaserver.server import bind, prepare_home, run, url_of, write_server_file
from metaserver.settings import Settings, redact_url


@click.group(context_settings=CONTEXT)
@click.version_option(package_name="seamark", prog_name="seamark")
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


@cli.command(context_settings=CONTEXT)
def version() -> None:
    """Prints the versions of Seamark and of Python."""
    click.echo(f"seamark {importlib.metadata.version('seamark')} (Python {platform.python_version()})")


cli.add_command(token)
cli.add_command(grant)
cli.add_command(explain)
cli.add_command(buckets)
cli.add_command(index)
index.add_command(build_command)
cli.add_command(indexer)
index.add_command(verify_command)
index.add_command(rebuild_registry_command)


def main() -> None:
    cli(prog_name="seamark")


if __name__ == "__main__":
    main()
