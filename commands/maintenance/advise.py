"""`seamark advise`: recommends changes of a table, based on its use that the server has recorded.

Exit codes: 0 on success, also without advice, 1 when the server refuses or cannot be reached, 2 for
invalid arguments.
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
    """Advise by how a table is used."""


@advise.command("ttl")
@click.argument("table")
@click.option(
    "--unread-days",
    type=click.IntRange(1, 3650),
    default=30,
    show_default=True,
    help="Report columns that no query has read for this number of days.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def ttl_command(client: IndexClient, table: str, unread_days: int, as_json: bool) -> None:
    """List columns of TABLE that no query reads in old partitions, and how to drop them there."""
    advice_report = advise_ttl(client, table, unread_days)
    if as_json:
        click.echo(json.dumps(advice_report, indent=2))
        return
    say(
        f"{table}: {show_count(advice_report['reads'], 'read')} in {show_count(advice_report['days'], 'day')}; "
        f"{advice_report['confidence']:.0%} of them name their columns"
    )
    if advice_report["reason"]:
        say(f"No advice: {advice_report['reason']}.")
    elif not advice_report["advice"]:
        say("Every column is read in all partitions that are old, or cannot be dropped.")
    else:
        open_console().print(_render_advice(advice_report["advice"]))
        for entry in advice_report["advice"]:
            say(f"{entry['statement']};")
        policy = ", ".join(entry["policy"] for entry in advice_report["advice"])
        say(f"Or as a policy: seamark policy set {table} '{COLUMNS}={policy}'")


def _render_advice(advice: list[dict[str, Any]]) -> Table:
    advice_table = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("column", "partitions", "older than", "unread", "files", "size"):
        advice_table.add_column(head, justify="left" if head == "column" else "right", overflow="fold")
    for entry in advice:
        advice_table.add_row(
            entry["column"],
            f"{entry['partitions']:,}",
            show_count(entry["older-than-days"], "day"),
            show_count(entry["days-unread"], "day"),
            f"{entry['files']:,}",
            show_size(entry["size-in-bytes"]),
        )
    return advice_table
