"""`seamark warehouse`: creates, lists, shows, changes and drops further warehouses through the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.options import parse_properties
from seamark.commands.terminal import escape_for_terminal, format_local_time, print_json, print_result, print_rows, say
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.warehouses import (
    change_warehouse,
    create_warehouse,
    drop_warehouse,
    list_warehouses,
    load_warehouse,
)

_SETTINGS = click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Set the warehouse setting NAME to VALUE. Repeatable.",
)
_CREDENTIALS = click.option(
    "--credentials",
    "credentials_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the keys of the warehouse, one NAME=VALUE on each line: s3_access_key_id and s3_secret_access_key. "
    "No command prints the keys.",
)


@click.group()
def warehouse() -> None:
    """Create, list, show, change and drop further warehouses.

    Only an admin of the whole catalog can use these commands. Other commands select a further warehouse by --warehouse
    NAME.
    """


@warehouse.command("list")
@server_command
def list_command(client: IndexClient, as_json: bool) -> None:
    """List the warehouses that exist in addition to the server's own warehouse."""
    warehouses = list_warehouses(client)
    if as_json:
        print_json(warehouses)
    elif not warehouses:
        say("There are no further warehouses; create one with: seamark warehouse create NAME --location URI")
    else:
        print_rows(
            ("name", "location", "created"),
            ((entry["name"], entry["location"], format_local_time(entry["created-ms"])) for entry in warehouses),
        )


@warehouse.command()
@click.argument("name")
@server_command
def show(client: IndexClient, name: str, as_json: bool) -> None:
    """Show the location and the settings of the warehouse NAME."""
    details = load_warehouse(client, name)
    if as_json:
        print_json(details)
        return
    keys = "its own" if details["has-credentials"] else "those of the server"
    rows = [("location", details["location"]), ("keys", keys), ("url", f"{client.url}{details['path']}")]
    rows += [("created by", details["created-by"]), ("created", format_local_time(details["created-ms"]))]
    print_rows(("property", "value"), rows)
    print_rows(("setting", "value"), sorted((key, str(value)) for key, value in details["settings"].items()))


@warehouse.command()
@click.argument("name")
@click.option(
    "--location",
    required=True,
    help="URI of the root folder of the warehouse's tables, below one of the server's --warehouse-roots.",
)
@_SETTINGS
@_CREDENTIALS
@server_command
def create(
    client: IndexClient,
    name: str,
    location: str,
    settings: tuple[str, ...],
    credentials_file: Path | None,
    as_json: bool,
) -> None:
    """Create the warehouse NAME. You become its admin."""
    credentials = {} if credentials_file is None else _read_credentials(credentials_file)
    new_warehouse = create_warehouse(client, name, location, parse_properties(settings, "--set"), credentials)
    print_result(new_warehouse, f"Warehouse {name} is created at {new_warehouse['location']}", as_json=as_json)


@warehouse.command()
@click.argument("name")
@_SETTINGS
@click.option("--unset", "removals", metavar="NAME", multiple=True, help="Remove the setting NAME. Repeatable.")
@_CREDENTIALS
@server_command
def change(
    client: IndexClient,
    name: str,
    settings: tuple[str, ...],
    removals: tuple[str, ...],
    credentials_file: Path | None,
    as_json: bool,
) -> None:
    """Change settings or keys of the warehouse NAME."""
    if not settings and not removals and credentials_file is None:
        raise click.UsageError("There is nothing to change: use --set, --unset or --credentials")
    own_settings: dict[str, Any] = {**load_warehouse(client, name)["settings"], **parse_properties(settings, "--set")}
    own_settings = {key: value for key, value in own_settings.items() if key not in removals}
    credentials = None if credentials_file is None else _read_credentials(credentials_file)
    changed_warehouse = change_warehouse(client, name, own_settings, credentials)
    print_result(changed_warehouse, f"Warehouse {name} is changed", as_json=as_json)


@warehouse.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")
@server_command
def drop(client: IndexClient, name: str, yes: bool, as_json: bool) -> None:
    """Drop the warehouse NAME, which must be empty. Its files and its database are not deleted."""
    if not yes:
        click.confirm(escape_for_terminal(f"Drop the warehouse {name}?"), abort=True, err=True)
    drop_warehouse(client, name)
    print_result({"dropped": name}, f"Warehouse {name} is dropped", as_json=as_json)


def _read_credentials(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "the file is not UTF-8 text"
        raise click.ClickException(escape_for_terminal(f"Cannot read the keys in {path}: {reason}")) from None
    return parse_properties([line.strip() for line in lines if line.strip()], f"the line of {path}")
