"""`seamark migrate`: copies the database to a new database, and compares the copy with the source."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from seamark.commands.options import json_option, settings_flags
from seamark.commands.recovery.running import run_offline
from seamark.commands.terminal import print_json, say, show_count
from seamark.formats.runtime.errors import ConfigError
from seamark.metaserver.settings.settings import Settings, redact_url
from seamark.metaserver.store.transfer.copying import TableDigest, copy_database
from seamark.metaserver.store.transfer.layout import read_layout
from seamark.metaserver.store.transfer.open import read_database, write_database
from seamark.metaserver.warehouses.definitions import make_database_url


@click.command("migrate")
@click.option(
    "--to",
    "target",
    required=True,
    help="URL of the target: postgresql://… or sqlite:///….",
)
@click.option("--overwrite", is_flag=True, help="Replace everything in the target if it contains a catalog.")
@json_option
@settings_flags(("home", "database"))
def migrate(target: str, overwrite: bool, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Copy the database to another database, for example from SQLite to PostgreSQL.

    Stop all servers first. The command also copies the databases of further warehouses. It reads the copy again and
    compares it with the source, row by row, before it commits the copy. The source does not change. Afterwards, start
    the servers with `--database` set to the target, and with the same home or encryption key.
    """

    async def work(settings: Settings) -> dict[str, TableDigest]:
        source = settings.make_database_url()
        if source == target:
            raise ConfigError("The target is the same database; set --to to another database")
        target_settings = dataclasses.replace(settings, database=target)
        # The server's own database is copied last, so that the copy lists only warehouses whose databases are already
        # copied.
        for warehouse_id in await _list_warehouses(source):
            await copy(make_database_url(settings, warehouse_id), make_database_url(target_settings, warehouse_id))
        return await copy(source, target)

    async def copy(source: str, target: str) -> dict[str, TableDigest]:
        async with (
            read_database(source, is_writer_excluded=True) as reader,
            write_database(target, overwrite=overwrite) as writer,
        ):
            return await copy_database(reader, writer)

    digests = run_offline(work, flags, config, is_locked=True)
    if as_json:
        print_json({name: {"rows": table.rows, "sha256": table.sha256} for name, table in digests.items()})
        return
    rows = sum(table.rows for table in digests.values())
    say(f"{show_count(rows, 'row')} copied and verified. Start the servers with --database {redact_url(target)}")


async def _list_warehouses(source: str) -> list[str]:
    """Return the ids of the further warehouses of a server."""
    ids: list[str] = []
    async with read_database(source, is_writer_excluded=True) as reader:
        for table in read_layout(reader.version):
            if table.name == "warehouses":
                column = table.columns.index("id")
                async for rows in reader.read_rows(table):
                    ids += [str(row[column]) for row in rows]
    return ids
