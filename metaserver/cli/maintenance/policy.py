"""`seamark policy`: shows and changes what the table services do with a table, or with the tables of a namespace.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.table import Table

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import change_namespace_properties, change_table_properties, load_policy
from seamark.metaserver.catalog.policies import PREFIXES
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT
from seamark.metaserver.cli.terminal import open_console, say
from seamark.metaserver.iceberg.metadata.clustering import COLUMNS
from seamark.metaserver.services.policy import check_policy


@click.command(context_settings=CONTEXT)
@click.argument("name")
@click.option("--set", "updates", metavar="PROPERTY=VALUE", multiple=True, help="Set a property; repeatable.")
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property; repeatable.")
@click.option("--namespace", "of_namespace", is_flag=True, help="NAME is a namespace: change it for all its tables.")
@click.option("--json", "as_json", is_flag=True, help="Print the policy as JSON.")
@server_options
def policy(
    client: IndexClient,
    name: str,
    updates: Sequence[str],
    removals: Sequence[str],
    of_namespace: bool,
    as_json: bool,
) -> None:
    """Shows what table services do with the table NAME, and where each value is set.

    With --set or --unset, changes the properties of the table, or with --namespace those of a namespace, which its
    tables inherit.
    """
    changes = _checked(updates, removals)
    if of_namespace:
        if not updates and not removals:
            raise click.UsageError("--namespace changes a namespace; add --set or --unset, or name a table")
        change_namespace_properties(client, name, changes, removals)
        say(f"The tables of {name} follow the new policy within an hour, or after their next commit.")
        return
    if updates or removals:
        change_table_properties(client, name, changes, removals)
    found = load_policy(client, name)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    open_console().print(_listed(found))
    if not found["runs"]:
        say("The server runs no table services (services_workers = 0); `seamark run` follows this policy.")


def _checked(updates: Sequence[str], removals: Sequence[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for text in updates:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(f"--set {text!r} has no value; write PROPERTY=VALUE")
        changes[name] = value
    for name in (*changes, *removals):
        if not name.startswith(PREFIXES):
            raise click.UsageError(f"{name!r} is no property of a policy; their names start with {', '.join(PREFIXES)}")
        if name in changes and name in removals:
            raise click.UsageError(f"{name!r} is both set and removed; choose one")
    wrong = check_policy(changes)
    if wrong is not None:
        raise click.UsageError(wrong)
    return changes


def _listed(found: dict[str, Any]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("property", "value", "set by"):
        shown.add_column(head, overflow="fold")
    for entry in found["properties"]:
        source = entry["source"]
        if source == "namespace":
            source = f"namespace {'.'.join(entry['namespace'])}"
        empty = "none" if entry["name"] == COLUMNS else "no limit"
        shown.add_row(entry["name"], entry["value"] or empty, source)
    return shown
