"""The commands that tables and views share: list, rename and drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import format_local_time, print_json, print_result, print_rows, say
from seamark.connector.client.catalog import list_dropped_entries
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name, split_table


@dataclass(frozen=True)
class NamedEntries:
    """The tables or the views of a catalog, and functions that read and change them.

    Attributes:
        noun: "table" or "view".
        names: Yields the names in some namespaces.
        load: Returns the Iceberg metadata of an entry.
        rename: Gives an entry a new name.
        drop: Drops an entry. It has a parameter `purge` if `is_purgeable`.
    """

    noun: str
    names: Callable[[IndexClient, Sequence[str]], Iterator[tuple[str, ...]]]
    load: Callable[[IndexClient, str], Mapping[str, Any]]
    rename: Callable[[IndexClient, str, str], None]
    drop: Callable[..., None]
    is_purgeable: bool = False


def add_commands(group: click.Group, kind: NamedEntries) -> None:
    """Add the commands `list`, `rename` and `drop` to a group.

    Their argument with the name of the entry is called `table` or `view`.
    """
    noun = kind.noun
    title, plural = noun.capitalize(), f"{noun}s"

    @group.command(
        "list",
        help=f"List the {plural} of NAMESPACE, or all {plural} that you have rights to see.",
    )
    @click.argument("namespace", required=False)
    @server_command
    def list_command(client: IndexClient, namespace: str | None, as_json: bool) -> None:
        namespaces = client.namespaces() if namespace is None else [split_name(namespace)]
        names = sorted(name for levels in namespaces for name in kind.names(client, levels))
        if as_json:
            print_json([list(name) for name in names])
            return
        if not names:
            say(f"There are no {plural}." if namespace is None else f"{namespace} has no {plural}.")
        for name in names:
            say(join_name(name))

    @group.command(
        "rename",
        help=f"Rename {noun.upper()} to NEW_NAME, which includes a namespace. Files are not moved.",
    )
    @click.argument(noun)
    @click.argument("new_name")
    @server_command
    def rename_command(client: IndexClient, new_name: str, as_json: bool, **options: str) -> None:
        kind.rename(client, options[noun], new_name)
        print_changed(client, kind, new_name, f"{title} {options[noun]} is now {new_name}", as_json=as_json)

    def drop_command(client: IndexClient, yes: bool, as_json: bool, purge: bool = False, **arguments: str) -> None:
        name = arguments[noun]
        kind.load(client, name)  # If the name does not exist, fail before asking for confirmation.
        if not yes:
            question = f"Drop {name}{' and delete its files after the retention' if purge else ''}?"
            click.confirm(question, abort=True, err=as_json)
        kind.drop(client, name, **({"purge": purge} if kind.is_purgeable else {}))
        entry = find_latest_dropped(client, name)
        until = "" if entry is None else f" until {format_local_time(entry['expires-ms'])}"
        text = f"{title} {name} is dropped; seamark undrop {name} restores it{until}"
        print_result({"dropped": list(split_table(name)), "entry": entry}, text, as_json=as_json)

    command: Any = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")(
        server_command(drop_command)
    )
    if kind.is_purgeable:
        command = click.option("--purge", is_flag=True, help="Delete its files after the retention time.")(command)
    text = f"Drop {noun.upper()}. `seamark undrop` can restore it until the server's retention time ends."
    group.command("drop", help=text)(click.argument(noun)(command))


def print_changed(client: IndexClient, kind: NamedEntries, name: str, text: str, *, as_json: bool) -> None:
    """Print `text`, or the metadata of the entry if `as_json` is set."""
    print_result(kind.load(client, name) if as_json else None, text, as_json=as_json)


def print_properties(metadata: Mapping[str, Any]) -> None:
    if properties := metadata.get("properties"):
        print_rows(("property", "value"), sorted(properties.items()))


def find_latest_dropped(client: IndexClient, name: str) -> dict[str, Any] | None:
    """Return the latest dropped entry with this name, or None.

    The function searches only the namespace of the name, because a user may have no rights on others.
    """
    levels = split_table(name)
    matches = [entry for entry in list_dropped_entries(client, levels[:-1]) if entry["name"] == levels[-1]]
    return max(matches, key=lambda entry: int(entry["dropped-ms"]), default=None)
