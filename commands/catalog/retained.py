"""`seamark retained`: lists and releases the locations of dropped tables and views.

The commands use the running server. Exit codes: 0 on success, 1 if the server refuses or cannot be reached, 2 for
invalid arguments.
"""

from __future__ import annotations

from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import format_local_time, print_json, print_result, print_rows, say
from seamark.connector.client.catalog import list_retained_entries, purge_dropped, release_dropped_location
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name, split_table

_ID = click.option("--id", "entry_id", help="Id of the entry, if several dropped entries had the name.")
_YES = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


@click.group()
def retained() -> None:
    """List and release dropped tables and views whose locations are still reserved.

    These entries can no longer be restored, but their locations still contain files. Only the namespace that an entry
    was in may use its location. TABLE is the name that the table or view had.
    """


@retained.command("list")
@click.argument("namespace", required=False)
@server_command
def list_command(client: IndexClient, namespace: str | None, as_json: bool) -> None:
    """List the dropped entries of NAMESPACE, or of the whole catalog, that still reserve their locations."""
    entries = list(list_retained_entries(client, None if namespace is None else split_name(namespace)))
    if as_json:
        print_json(entries)
    elif not entries:
        say("No dropped table or view still reserves its location.")
    else:
        print_rows(
            ("name", "kind", "dropped", "id"),
            (
                (
                    join_name((*entry["namespace"], entry["name"])),
                    entry["kind"],
                    format_local_time(entry["dropped-ms"]),
                    entry["id"],
                )
                for entry in entries
            ),
        )


@retained.command()
@click.argument("table")
@_ID
@_YES
@server_command
def release(client: IndexClient, table: str, entry_id: str | None, yes: bool, as_json: bool) -> None:
    """Release the location of TABLE, so that other namespaces can use it. The files are not deleted."""
    entry = _find_retained_entry(client, table, entry_id)
    if not yes:
        click.confirm(f"Let other namespaces use the location of {table} and the files in it?", abort=True, err=as_json)
    release_dropped_location(client, entry["id"])
    print_result({"released": entry}, f"The location of {table} is released; its files stay", as_json=as_json)


@retained.command()
@click.argument("table")
@_ID
@_YES
@server_command
def purge(client: IndexClient, table: str, entry_id: str | None, yes: bool, as_json: bool) -> None:
    """Delete the files that the metadata of TABLE references, and release its location if it is then empty.

    For a view, no files are deleted, and the location is released.
    """
    entry = _find_retained_entry(client, table, entry_id)
    if not yes:
        click.confirm(f"Delete the files of {table}?", abort=True, err=as_json)
    purge_dropped(client, entry["id"])
    has_files_left = any(
        retained_entry["id"] == entry["id"] for retained_entry in list_retained_entries(client, split_table(table)[:-1])
    )
    text = f"{table} is purged"
    if has_files_left:
        text += f"; other files are left in its location: seamark retained release {table} releases it"
    print_result({"purged": entry, "retained": has_files_left}, text, as_json=as_json)


def _find_retained_entry(client: IndexClient, table: str, entry_id: str | None) -> dict[str, Any]:
    """Return the entry of a dropped table or view with this name whose location is still reserved.

    Args:
        client: A client of the server.
        table: The name that the table or view had.
        entry_id: The id of the entry, or None if the name is enough.

    Raises:
        click.ClickException: No entry or several entries match.
    """
    levels = split_table(table)
    entries = [
        retained_entry
        for retained_entry in list_retained_entries(client, levels[:-1])
        if retained_entry["name"] == levels[-1]
    ]
    matches = [entry for entry in entries if entry_id in (None, entry["id"])]
    if not matches:
        subject = f"{table} with the id {entry_id}" if entry_id is not None else table
        raise click.ClickException(
            f"No dropped table or view {subject} reserves its location; seamark retained list shows those that do"
        )
    if len(matches) > 1:
        ids = ", ".join(str(match["id"]) for match in matches)
        raise click.ClickException(
            f"{len(matches)} dropped entries had the name {table}: choose one of them with --id: {ids}"
        )
    return matches[0]
