"""`seamark export`: registers the tables and views of a warehouse in another catalog.

Exit codes: 0 on success, 1 if an entry is refused or a catalog cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from seamark.commands.connecting import server_command
from seamark.commands.moving.other_catalog import (
    make_selection,
    moving_options,
    parse_name,
    read_properties,
    show_results,
)
from seamark.commands.terminal import escape_for_terminal
from seamark.connector.client.indexes import IndexClient
from seamark.connector.moving.moves import Move
from seamark.connector.moving.rest_catalog import RestSource
from seamark.connector.moving.rest_destination import RestDestination
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable


@click.command("export")
@click.argument("target")
@moving_options
@click.option("--into", metavar="NAME", help="Namespace of TARGET under which the exported namespaces are created.")
@server_command
def export_tables(
    client: IndexClient,
    target: str,
    into: str | None,
    namespaces: tuple[str, ...],
    tables: tuple[str, ...],
    properties_file: Path | None,
    catalog_token: str | None,
    catalog_warehouse: str | None,
    workers: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Register the tables and views in TARGET, the URL of an Iceberg REST catalog. Their files stay where they are.

    If an export was killed, start it again to continue it. Repeating a finished export changes nothing. Stop all
    writers of this catalog first, because two catalogs must not commit to one table.
    """
    properties = read_properties(properties_file, catalog_token, catalog_warehouse)
    own_properties = {"uri": client.url, **({} if client.token is None else {"token": client.token})}
    selection, target_namespace = make_selection(namespaces, tables), parse_name(into) if into else ()
    try:
        with (
            closing(RestSource(own_properties, workers)) as source,
            closing(RestDestination({**properties, "uri": target}, workers, dry_run=dry_run)) as destination,
        ):
            move = Move(source, destination, selection, target_namespace, workers)
            show_results(move.run(), as_json=as_json, action="exportable" if dry_run else "exported")
    except (CatalogRefusal, CatalogUnavailable) as error:
        raise click.ClickException(escape_for_terminal(str(error))) from None
