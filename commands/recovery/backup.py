"""`seamark backup`: copies the database to a file while servers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from seamark.commands.options import json_option, settings_flags
from seamark.commands.recovery.running import read_program_version, run_offline, warehouse_name_option
from seamark.commands.terminal import print_json, say, show_count
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.transfer.backups import BackupInfo, write_backup
from seamark.metaserver.store.transfer.open import read_database


@click.command("backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
@warehouse_name_option
@json_option
@settings_flags(("home", "database", "warehouse"))
def backup(file: Path, overwrite: bool, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Copy the database to FILE while servers run. `seamark restore` restores it.

    FILE contains one consistent state of the SQLite or PostgreSQL database: names, grants, digests of tokens, and
    encrypted keys. It contains no table data and no encryption key. Only its owner can read it. Each further warehouse
    has its own database: back it up with --warehouse-name.
    """

    async def work(settings: Settings) -> BackupInfo:
        async with read_database(settings.make_database_url()) as reader:
            return await write_backup(
                reader,
                file,
                created_ms=SystemClock().now_ms(),
                program_version=read_program_version(),
                warehouse=settings.make_warehouse_uri(),
                overwrite=overwrite,
            )

    info = run_offline(work, flags, config, is_locked=False)
    if as_json:
        print_json(
            {
                "file": str(file),
                "created-ms": info.created_ms,
                "schema-version": info.schema_version,
                "database": info.database,
                "rows": {name: table.rows for name, table in info.tables.items()},
            }
        )
        return
    names = show_count(info.tables["entries"].rows, "name")
    rows = show_count(info.count_rows(), "row")
    say(f"{file} has {rows} of {info.database}, with {names} of tables, views and functions")
    warehouses = info.tables.get("warehouses")
    if warehouses is not None and warehouses.rows:
        count = show_count(warehouses.rows, "further warehouse")
        say(f"Not included: the databases of {count}; back up each of them with --warehouse-name NAME", err=True)
