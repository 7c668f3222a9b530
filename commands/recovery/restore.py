"""`seamark restore`: replaces the database by a backup, and compares its pointers with the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from seamark.commands.access import find_account_name
from seamark.commands.options import json_option, settings_flags
from seamark.commands.recovery.running import STORAGE_SETTINGS, run_offline, warehouse_name_option
from seamark.commands.terminal import format_local_time, print_json, say, show_count
from seamark.formats.runtime.clock import SystemClock
from seamark.metaserver.catalog.recovery.comparison import PointerComparison, compare_with_storage
from seamark.metaserver.catalog.recovery.opening import open_context
from seamark.metaserver.catalog.values import Caller
from seamark.metaserver.settings.settings import Settings
from seamark.metaserver.store.open import open_store
from seamark.metaserver.store.transfer.backups import BackupInfo, read_backup, restore_backup
from seamark.metaserver.store.transfer.open import write_database


@click.command("restore")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--advance",
    is_flag=True,
    help="Move the pointers of tables with commits after the backup to their newest metadata files in the storage.",
)
@click.option("--overwrite", is_flag=True, help="Replace everything in the database if it contains a catalog.")
@warehouse_name_option
@json_option
@settings_flags(STORAGE_SETTINGS)
def restore(file: Path, advance: bool, overwrite: bool, as_json: bool, config: Path | None, **flags: Any) -> None:
    """Replace the database by the backup FILE. Stop all servers first.

    The command verifies the checksum of each database table, and migrates an older schema. If it fails or is killed,
    the database does not change. Afterwards it compares each pointer with the storage. It lists missing metadata files,
    and tables whose newest file is later than the backup. The next commit to one of these tables would lose the commits
    after the backup, unless --advance has moved its pointer. Run `seamark rebuild` for tables that were created after
    the backup.
    """

    async def work(settings: Settings) -> tuple[BackupInfo, PointerComparison]:
        async with (
            read_backup(file) as (info, reader),
            write_database(settings.make_database_url(), overwrite=overwrite) as writer,
        ):
            await restore_backup(info, reader, writer)
        say(
            f"Restored {show_count(info.count_rows(), 'row')} from the backup of {format_local_time(info.created_ms)}",
            err=True,
        )
        clock = SystemClock()
        caller = Caller(principal_name=f"cli:{find_account_name()}", request_id="restore")
        async with (
            open_store(settings.make_database_url(), clock=clock) as store,
            open_context(settings, store, clock) as context,
        ):
            return info, await compare_with_storage(context, caller, advance=advance)

    info, comparison = run_offline(work, flags, config, is_locked=True, creates=True)
    if as_json:
        print_json({"created-ms": info.created_ms, "rows": info.count_rows(), **msgspec.to_builtins(comparison)})
    else:
        _show_comparison(comparison)
    if comparison.missing:
        raise click.exceptions.Exit(1)


def _show_comparison(comparison: PointerComparison) -> None:
    for finding in (*comparison.missing, *comparison.findings):
        say(f"{finding.name}: {finding.location}: {finding.reason}")
    for outdated_table in comparison.later:
        state = "now points to the newest file" if outdated_table.is_advanced else "has a newer file in storage"
        say(f"{outdated_table.name} {state}: {outdated_table.newest}")
    advanced_count = sum(outdated_table.is_advanced for outdated_table in comparison.later)
    waiting_count = len(comparison.later) - advanced_count
    say(
        f"{show_count(comparison.entries, 'pointer')} compared: {len(comparison.missing):,} without a file, "
        f"{advanced_count:,} advanced, {waiting_count:,} with newer files"
    )
    if waiting_count:
        say("To include the commits after the backup, restore again with --overwrite --advance before servers start.")
