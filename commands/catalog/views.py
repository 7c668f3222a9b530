"""`seamark view`: lists, shows, renames and drops views through the running server. Engines create them.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.commands.catalog.entries import NamedEntries, add_commands, print_properties
from seamark.commands.connecting import server_command
from seamark.commands.terminal import print_json, print_rows, say
from seamark.connector.client.catalog import drop_view, list_views, load_view, rename_view
from seamark.connector.client.indexes import IndexClient


@click.group()
def view() -> None:
    """List, show, rename and drop views. Engines create views.

    VIEW is a namespace and a name, joined by dots; write a dot within a name as \\. .
    """


add_commands(view, NamedEntries("view", list_views, load_view, rename_view, drop_view))


@view.command()
@click.argument("view")
@server_command
def show(client: IndexClient, view: str, as_json: bool) -> None:
    """Show the columns, the text in each dialect and the properties of VIEW."""
    metadata = load_view(client, view)
    if as_json:
        print_json(metadata)
        return
    version = next(
        candidate for candidate in metadata["versions"] if candidate["version-id"] == metadata["current-version-id"]
    )
    schema = next(
        candidate for candidate in metadata["schemas"] if candidate.get("schema-id", 0) == version["schema-id"]
    )
    say(f"{view}: version {version['version-id']}, uuid {metadata['view-uuid']}")
    print_rows(("column", "type"), ((field["name"], str(field["type"])) for field in schema["fields"]))
    texts = (
        (representation.get("dialect", ""), representation.get("sql", ""))
        for representation in version["representations"]
    )
    print_rows(("dialect", "text"), texts)
    print_properties(metadata)
