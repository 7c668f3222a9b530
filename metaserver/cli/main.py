"""`seamark`: the entry point.

All commands load the same settings; invalid settings end the command with one message and exit code 2. Modules of a
command are imported when it runs.
"""

from __future__ import annotations

import importlib.metadata
import platform

import click

from seamark.metaserver.cli.on_demand import OnDemand
from seamark.metaserver.cli.options import CONTEXT

_COMMANDS = OnDemand(
    {
        "serve": "seamark.metaserver.cli.serve:serve",
        "token": "seamark.metaserver.cli.access:token",
        "grant": "seamark.metaserver.cli.access:grant",
        "keys": "seamark.metaserver.cli.keys:keys",
        "explain": "seamark.metaserver.cli.explain:explain",
        "buckets": "seamark.metaserver.cli.buckets:buckets",
        "index": "seamark.metaserver.cli.index:index",
        "indexer": "seamark.metaserver.cli.indexer:indexer",
        "trino-proxy": "seamark.metaserver.cli.trino_proxy:trino_proxy",
    }
)


@click.group(context_settings=CONTEXT, commands=_COMMANDS)
@click.version_option(package_name="seamark", prog_name="seamark")
def cli() -> None:
    """Seamark: an Iceberg REST catalog that knows where the rows are.

    \b
    Try it on this machine without configuration:
      seamark serve --home ./seamark-home
    Over PostgreSQL and S3, several processes:
      seamark serve --workers 4 --warehouse s3://lake/warehouse \\
          --database postgresql://seamark@db/seamark
    Engines connect to the printed URL as to any Iceberg REST catalog.
    """


@cli.command(context_settings=CONTEXT)
def version() -> None:
    """Prints the versions of Seamark and of Python."""
    click.echo(f"seamark {importlib.metadata.version('seamark')} (Python {platform.python_version()})")


def main() -> None:
    cli(prog_name="seamark")


if __name__ == "__main__":
    main()
