"""`seamark namespace`: lists, shows, creates, changes and drops namespaces through the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.commands.catalog.properties import check_properties
from seamark.commands.connecting import server_command
from seamark.commands.options import parse_properties
from seamark.commands.terminal import print_json, print_result, print_rows, say, show_count
from seamark.connector.client.catalog import create_namespace, drop_namespace, load_namespace_properties
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.policies import change_namespace_properties


@click.group()
def namespace() -> None:
    """List, show, create, change and drop namespaces.

    The levels of a nested namespace are joined by dots; write a dot within a level as \\. .
    """


@namespace.command("list")
@server_command
def list_namespaces(client: IndexClient, as_json: bool) -> None:
    """List all namespaces that you have rights to see."""
    names = sorted(client.namespaces())
    if as_json:
        print_json([list(name) for name in names])
        return
    if not names:
        say("There are no namespaces; create one with: seamark namespace create NAME")
    for name in names:
        say(join_name(name))


@namespace.command()
@click.argument("name")
@server_command
def show(client: IndexClient, name: str, as_json: bool) -> None:
    """Show the properties and the tables of the namespace NAME."""
    properties = load_namespace_properties(client, name)
    tables = sorted(client.tables(split_name(name)))
    if as_json:
        print_json(
            {"namespace": list(split_name(name)), "properties": properties, "tables": [levels[-1] for levels in tables]}
        )
        return
    print_rows(("property", "value"), sorted(properties.items()))
    say(show_count(len(tables), "table"))
    for table in tables:
        say(f"  {join_name(table)}")


@namespace.command()
@click.argument("name")
@click.option("--property", "properties", metavar="NAME=VALUE", multiple=True, help="Set a property. Repeatable.")
@server_command
def create(client: IndexClient, name: str, properties: tuple[str, ...], as_json: bool) -> None:
    """Create the namespace NAME. Its parent namespace must exist."""
    create_namespace(client, name, check_properties(parse_properties(properties, "--property")))
    _print_changed(client, name, f"Namespace {name} is created", as_json=as_json)


@namespace.command("set")
@click.argument("name")
@click.argument("properties", metavar="PROPERTY=VALUE...", nargs=-1)
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property. Repeatable.")
@server_command
def set_properties(
    client: IndexClient, name: str, properties: tuple[str, ...], removals: tuple[str, ...], as_json: bool
) -> None:
    """Change properties of the namespace NAME."""
    changes = check_properties(parse_properties(properties, "property"))
    if not changes and not removals:
        raise click.UsageError("There is nothing to change: write PROPERTY=VALUE, or use --unset PROPERTY")
    change_namespace_properties(client, name, changes, removals)
    _print_changed(client, name, f"Namespace {name} is changed", as_json=as_json)


def _print_changed(client: IndexClient, name: str, text: str, *, as_json: bool) -> None:
    properties = load_namespace_properties(client, name) if as_json else {}
    print_result({"namespace": list(split_name(name)), "properties": properties}, text, as_json=as_json)


@namespace.command()
@click.argument("name")
@server_command
def drop(client: IndexClient, name: str, as_json: bool) -> None:
    """Drop the namespace NAME, which must be empty."""
    drop_namespace(client, name)
    print_result({"dropped": list(split_name(name))}, f"Namespace {name} is dropped", as_json=as_json)
