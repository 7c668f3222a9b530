"""`seamark advise`: what could be done with a table, by what the server has seen of its use.

Exit codes: 0 on success, also without advice, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from seamark.commands.connecting import server_options
from seamark.commands.terminal import open_console, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import advise_ttl
from seamark.formats.iceberg.metadata.column_ttl import COLUMNS


@click.group()
def advise() -> None:
    """Advises by how a table is used."""


@advise.command("ttl")
@click.argument("table")
@click.option(
    "--unread-days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Advise columns that no query has read for this number of days.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def ttl_command(client: IndexClient, table: str, unread_days: int, as_json: bool) -> None:
    """Lists columns of TABLE that no query reads in old partitions, and how to drop them there."""
    found = advise_ttl(client, table, unread_days)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    say(
        f"{table}: {show_count(found['reads'], 'read')} in {show_count(found['days'], 'day')}; "
        f"{found['confidence']:.0%} of them name their columns"
    )
    if found["reason"]:
        say(f"No advice: {found['reason']}.")
    elif not found["advice"]:
        say("Every column is read in all partitions that are old, or cannot be dropped.")
    else:
        open_console().print(_listed(found["advice"]))
        for one in found["advice"]:
            say(f"{one['statement']};")
        policy = ", ".join(one["policy"] for one in found["advice"])
        say(f"Or as a policy: seamark policy set {table} '{COLUMNS}={policy}'")


def _listed(advice: list[dict[str, Any]]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("column", "partitions", "older than", "unread", "files", "size"):
        shown.add_column(head, justify="left" if head == "column" else "right", overflow="fold")
    for one in advice:
        shown.add_row(
            one["column"],
            f"{one['partitions']:,}",
            show_count(one["older-than-days"], "day"),
            show_count(one["days-unread"], "day"),
            f"{one['files']:,}",
            show_size(one["size-in-bytes"]),
        )
    return shown
