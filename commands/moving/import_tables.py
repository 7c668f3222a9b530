"""`seamark import`: registers the tables and views of another catalog.

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
from seamark.connector.moving.opening import open_source
from seamark.connector.moving.seamark_warehouse import SeamarkDestination
from seamark.connector.moving.source import CatalogRefusal, CatalogUnavailable


@click.command("import")
@click.argument("source")
@moving_options
@click.option("--into", metavar="NAME", help="Namespace under which the namespaces of SOURCE are created.")
@click.option("--keep-owners", is_flag=True, help="Also import views that run with the rights of their owner.")
@click.option("--flat", "is_flat", is_flag=True, help="Do not look for nested namespaces, because SOURCE has none.")
@server_command
def import_tables(
    client: IndexClient,
    source: str,
    into: str | None,
    keep_owners: bool,
    is_flat: bool,
    namespaces: tuple[str, ...],
    tables: tuple[str, ...],
    properties_file: Path | None,
    catalog_token: str | None,
    catalog_warehouse: str | None,
    workers: int,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Register the tables and views of SOURCE. Their files stay where they are.

    SOURCE is the URL of an Iceberg REST catalog, thrift://HOST:PORT of a Hive metastore, or the folder of a Hadoop
    warehouse, such as s3://lake/warehouse. If an import was killed, start it again to continue it. Repeating a finished
    import changes nothing. Stop all writers of SOURCE first, because two catalogs must not commit to one table.
    """
    properties = read_properties(properties_file, catalog_token, catalog_warehouse)
    selection, target_namespace = make_selection(namespaces, tables), parse_name(into) if into else ()
    try:
        with closing(open_source(source, properties, workers, is_flat=is_flat)) as catalog:
            destination = SeamarkDestination(client, keep_owners, dry_run)
            move = Move(catalog, destination, selection, target_namespace, workers)
            show_results(move.run(), as_json=as_json, action="importable" if dry_run else "imported")
    except (CatalogRefusal, CatalogUnavailable) as error:
        raise click.ClickException(escape_for_terminal(str(error))) from None
