"""`seamark connect`: prints a configuration with which an engine connects to the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import os

import click

from seamark.commands.connecting import server_options
from seamark.commands.terminal import say
from seamark.connector.client.engines import ENGINES, TOKEN, format_connection
from seamark.connector.client.indexes import IndexClient
from seamark.formats.runtime.tls import CA_VARIABLE


@click.command()
@click.argument("engine", type=click.Choice(ENGINES))
@click.option("--catalog", default="sea", show_default=True, help="Name of the catalog in the engine.")
@click.option("--s3", "on_s3", is_flag=True, help="Use Trino's own S3 keys for the tables, which are in S3.")
@server_options
def connect(client: IndexClient, engine: str, catalog: str, on_s3: bool) -> None:
    """Print a configuration with which ENGINE connects to the server: a command, a script or a file, ready to use.

    If --token or SEAMARK_TOKEN is set, the configuration reads the token from the variable SEAMARK_TOKEN. If SEAMARK_CA
    is set, the configuration makes the engine trust the certificate authority in it.
    """
    if not catalog.isidentifier() or not catalog.isascii():
        raise click.BadParameter(f"{catalog!r} is not a name; write letters, digits and _", param_hint="--catalog")
    # Check the address first, so that the command reports a wrong address, not the engine.
    next(client.namespaces(), None)
    authority = os.environ.get(CA_VARIABLE, "")
    say(format_connection(engine, catalog, client.url, has_token=client.has_token, on_s3=on_s3, authority=authority))
    if client.has_token and TOKEN not in os.environ:
        say(f"Set the variable {TOKEN} before you run the configuration.", err=True)
