"""`seamark policy`: lists, shows and changes the policies that table services follow.

A policy belongs to a table, or to a namespace and its tables. Exit codes: 0 on success, 1 if the server refuses or
cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import click

from seamark.commands.catalog.properties import check_properties
from seamark.commands.connecting import server_command
from seamark.commands.options import parse_properties
from seamark.commands.terminal import print_json, print_result, print_rows, say
from seamark.connector.client.catalog import load_namespace_properties
from seamark.connector.client.errors import NoSuchResource
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.policies import change_namespace_properties, change_table_properties, load_policy
from seamark.metaserver.catalog.policies import PREFIXES
from seamark.metaserver.services.policy import PROPERTIES, check_policy, find_similar_properties, is_policy_property

_SET_BY_NAMESPACE = click.option(
    "--namespace", "is_namespace", is_flag=True, help="Change the policy of all tables in the namespace NAME."
)


class _PolicyGroup(click.Group):
    """A command group that also accepts `policy NAME [--set …] [--unset …]`, the syntax of earlier versions."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [_change.name or "", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_PolicyGroup)
def policy() -> None:
    """List, show, set and drop policies, which say what table services do with a table.

    A policy is a set of properties of a table. A table inherits properties from its namespaces.
    """


@policy.command("list")
@click.argument("namespace", required=False)
@server_command
def list_policies(client: IndexClient, namespace: str | None, as_json: bool) -> None:
    """List the policies of the tables in NAMESPACE, or of all tables that you have rights to see.

    Tables that only follow the server's defaults are not listed. The command makes one request for each table.
    """
    namespaces = client.namespaces() if namespace is None else [split_name(namespace)]
    policies = []
    for name in sorted(name for levels in namespaces for name in client.tables(levels)):
        with contextlib.suppress(NoSuchResource):  # The table was dropped after it was listed.
            properties = load_policy(client, name)["properties"]
            if own_entries := [entry for entry in properties if entry["source"] in ("table", "namespace")]:
                policies.append((name, own_entries))
    if as_json:
        print_json([{"table": list(name), "properties": entries} for name, entries in policies])
    elif not policies:
        tables = "No table" if namespace is None else f"No table of {namespace}"
        say(f"{tables} has its own policy or inherits one.")
    else:
        rows = [(join_name(name), *_make_entry_row(entry)) for name, entries in policies for entry in entries]
        print_rows(("table", "property", "value", "set by"), rows)


@policy.command()
@click.argument("table")
@server_command
def show(client: IndexClient, table: str, as_json: bool) -> None:
    """Show the policy of TABLE, and where each value is set."""
    _print_policy(client, table, as_json)


@policy.command("set")
@click.argument("name")
@click.argument("updates", metavar="PROPERTY=VALUE...", nargs=-1, required=True)
@_SET_BY_NAMESPACE
@server_command
def set_properties(client: IndexClient, name: str, updates: Sequence[str], is_namespace: bool, as_json: bool) -> None:
    """Set properties in the policy of the table NAME, or of the namespace NAME with --namespace."""
    _apply_changes(client, name, _check_changes(updates, (), "PROPERTY=VALUE"), (), is_namespace, as_json)


@policy.command("drop")
@click.argument("name")
@click.argument("removals", metavar="[PROPERTY]...", nargs=-1)
@_SET_BY_NAMESPACE
@server_command
def drop_properties(client: IndexClient, name: str, removals: Sequence[str], is_namespace: bool, as_json: bool) -> None:
    """Drop properties from the policy of the table NAME, or of the namespace NAME with --namespace.

    Without PROPERTY, drop all properties. The table then inherits these properties, or follows the server's defaults.
    """
    _check_changes((), removals, "PROPERTY=VALUE")
    _apply_changes(
        client, name, {}, removals or _list_own_properties(client, name, is_namespace), is_namespace, as_json
    )


@policy.command("change", hidden=True)
@click.argument("name")
@click.option("--set", "updates", metavar="PROPERTY=VALUE", multiple=True, help="Set a property. Repeatable.")
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property. Repeatable.")
@_SET_BY_NAMESPACE
@server_command
def _change(
    client: IndexClient,
    name: str,
    updates: Sequence[str],
    removals: Sequence[str],
    is_namespace: bool,
    as_json: bool,
) -> None:
    """Show the policy of the table NAME. With --set or --unset, change it first."""
    changes = _check_changes(updates, removals, "--set")
    if updates or removals:
        _apply_changes(client, name, changes, removals, is_namespace, as_json)
    elif is_namespace:
        raise click.UsageError(
            "--namespace changes the policy of a namespace: add --set or --unset, or name a table instead"
        )
    else:
        _print_policy(client, name, as_json)


def _apply_changes(
    client: IndexClient,
    name: str,
    updates: dict[str, str],
    removals: Sequence[str],
    is_namespace: bool,
    as_json: bool,
) -> None:
    """Change the policy of a table or a namespace.

    For a table, print its policy. For a namespace, print when its tables follow the change, or the change as JSON.
    """
    if not is_namespace:
        if updates or removals:
            change_table_properties(client, name, updates, removals)
        _print_policy(client, name, as_json)
        return
    if updates or removals:
        change_namespace_properties(client, name, updates, removals)
    text = f"The tables of {name} follow the new policy within an hour, or after their next commit."
    print_result({"namespace": list(split_name(name)), "set": updates, "unset": list(removals)}, text, as_json=as_json)


def _list_own_properties(client: IndexClient, name: str, is_namespace: bool) -> list[str]:
    """Return the policy properties that are set on the table or the namespace itself."""
    if is_namespace:
        return [key for key in load_namespace_properties(client, name) if is_policy_property(key)]
    return [entry["name"] for entry in load_policy(client, name)["properties"] if entry["source"] == "table"]


def _print_policy(client: IndexClient, table: str, as_json: bool) -> None:
    current = load_policy(client, table)
    if as_json:
        print_json(current)
        return
    print_rows(("property", "value", "set by"), map(_make_entry_row, current["properties"]))
    if not current["runs"]:
        say("The server runs no table services (services_workers = 0); `seamark run` follows this policy.")


def _check_changes(updates: Sequence[str], removals: Sequence[str], option: str) -> dict[str, str]:
    changes = parse_properties(updates, option)
    for name in (*changes, *removals):
        if not is_policy_property(name):
            similar_names = "" if name.startswith(PREFIXES) else find_similar_properties(name)
            other = "seamark table set and seamark namespace set change other properties"
            raise click.UsageError(
                f"A policy has no property {name!r}; {f'did you mean {similar_names}?' if similar_names else other}"
            )
        if name in changes and name in removals:
            raise click.UsageError(f"{name!r} is both set and removed; choose one of the two")
    return check_properties(changes)


def _make_entry_row(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return a property of a policy as the name, the value with its problems, and the source of the value."""
    source = entry["source"]
    if source == "namespace":
        source = f"namespace {'.'.join(entry['namespace'])}"
    value = entry["value"] or _describe_empty(entry["name"])
    if entry.get("ignored"):
        value += f" (ignored: {entry['ignored']})"
    elif (
        entry["source"] in ("table", "namespace")
        and (problem := check_policy({entry["name"]: entry["value"]})) is not None
    ):
        # Engines can write invalid values. The first part of the problem repeats the property and its value.
        value += f" ({problem.partition('; ')[2] or problem})"
    return entry["name"], value, source


def _describe_empty(name: str) -> str:
    """Return the meaning of an empty value of a property.

    The property may be unknown to this client, because the server is newer.
    """
    return PROPERTIES[name].empty if name in PROPERTIES else "no limit"
