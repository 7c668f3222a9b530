"""`seamark replicas`: lists the replicas of the running server.

Replicas share a database, and read files through each other. Exit codes: 0 on success, 1 if the server refuses or
cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import format_local_time, print_json, print_rows, say
from seamark.connector.client.catalog import list_replicas
from seamark.connector.client.indexes import IndexClient


@click.command()
@server_command
def replicas(client: IndexClient, as_json: bool) -> None:
    """List the replicas with live leases: servers with --peer-address that share a database.

    Only an admin of the whole catalog can use this command.
    """
    live_replicas = list_replicas(client)
    if as_json:
        print_json(live_replicas)
    elif not live_replicas:
        say("No server has a peer address; start the servers with --peer-address.")
    else:
        print_rows(
            ("address", "weight", "version", "protocol", "started", "lease"),
            (
                (
                    replica["address"],
                    str(replica["weight"]),
                    replica["version"],
                    str(replica["protocol"]),
                    format_local_time(replica["started-ms"]),
                    f"{replica['expires-in-ms'] / 1000:.0f} s",
                )
                for replica in live_replicas
            ),
            right_aligned_headers=("weight", "protocol", "lease"),
        )
