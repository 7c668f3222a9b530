"""`seamark policy`: shows and changes what the table services do with a table, or with the tables of a namespace.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import split_name
from seamark.connector.client.policies import change_namespace_properties, change_table_properties, load_policy
from seamark.metaserver.catalog.policies import PREFIXES
from seamark.metaserver.cli.catalog.properties import checked_properties
from seamark.metaserver.cli.connecting import server_options
from seamark.metaserver.cli.options import CONTEXT, json_option, parse_properties
from seamark.metaserver.cli.terminal import print_json, print_result, print_rows, say
from seamark.metaserver.iceberg.metadata.clustering import COLUMNS as CLUSTERING_COLUMNS
from seamark.metaserver.iceberg.metadata.clustering import JOINS as CLUSTERING_JOINS
from seamark.metaserver.iceberg.metadata.column_ttl import COLUMNS as TTL_COLUMNS
from seamark.metaserver.iceberg.metadata.column_ttl import TIME_COLUMN
from seamark.metaserver.iceberg.metadata.statistics import COLUMNS as STATISTICS_COLUMNS
from seamark.metaserver.services.budgets import WINDOW
from seamark.metaserver.services.policy import check_policy, is_policy_property, similar_properties

_EMPTY = {
    CLUSTERING_COLUMNS: "none",
    CLUSTERING_JOINS: "none",
    TTL_COLUMNS: "none",
    TIME_COLUMN: "none",
    STATISTICS_COLUMNS: "all",
    WINDOW: "any time",
}
"""What an empty value of a property means, where it is not "no limit"."""


@click.command(context_settings=CONTEXT)
@click.argument("name")
@click.option("--set", "updates", metavar="PROPERTY=VALUE", multiple=True, help="Set a property; repeatable.")
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property; repeatable.")
@click.option("--namespace", "of_namespace", is_flag=True, help="NAME is a namespace: change it for all its tables.")
@json_option
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
        text = f"The tables of {name} follow the new policy within an hour, or after their next commit."
        print_result(
            {"namespace": list(split_name(name)), "set": changes, "unset": list(removals)}, text, as_json=as_json
        )
        return
    if updates or removals:
        change_table_properties(client, name, changes, removals)
    found = load_policy(client, name)
    if as_json:
        print_json(found)
        return
    print_rows(("property", "value", "set by"), map(_row, found["properties"]))
    if not found["runs"]:
        say("The server runs no table services (services_workers = 0); `seamark run` follows this policy.")


def _checked(updates: Sequence[str], removals: Sequence[str]) -> dict[str, str]:
    changes = parse_properties(updates, "--set")
    for name in (*changes, *removals):
        if not is_policy_property(name):
            near = "" if name.startswith(PREFIXES) else similar_properties(name)
            other = "seamark table set and seamark namespace set change other properties"
            raise click.UsageError(f"{name!r} is no property of a policy; {f'did you mean {near}?' if near else other}")
        if name in changes and name in removals:
            raise click.UsageError(f"{name!r} is both set and removed; choose one")
    return checked_properties(changes)


def _row(entry: dict[str, Any]) -> tuple[str, ...]:
    source = entry["source"]
    if source == "namespace":
        source = f"namespace {'.'.join(entry['namespace'])}"
    value = entry["value"] or _EMPTY.get(entry["name"], "no limit")
    if entry.get("ignored"):
        value += f" (ignored: {entry['ignored']})"
    elif (
        entry["source"] in ("table", "namespace")
        and (wrong := check_policy({entry["name"]: entry["value"]})) is not None
    ):
        value += f" ({wrong.partition('; ')[2] or wrong})"  # engines write any value
    return entry["name"], value, source
