"""`seamark run`: runs a job of the table services once, in this process, for users who schedule jobs themselves.

Exit codes: 0 when the job is done, 1 when it failed, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.write.compaction import CompactionReport, compact
from seamark.metaserver.cli.build import interruptible
from seamark.metaserver.cli.explain import show_size
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT
from seamark.metaserver.errors import SeamarkError


@click.group(context_settings=CONTEXT)
def run() -> None:
    """Runs a maintenance job on a table."""


@run.command("compact", context_settings=CONTEXT)
@click.argument("table")
@click.option("--dry-run", is_flag=True, help="Show which files would be replaced; commit nothing.")
@server_options
def compact_command(client: IndexClient, table: str, dry_run: bool) -> None:
    """Merges small data files of TABLE and applies its delete files.

    Rows stay the same. Writers do not wait; files that they change meanwhile are left to the next run.
    """
    with interruptible():
        try:
            report = compact(client, table, dry_run=dry_run)
        except (OSError, SeamarkError) as error:
            raise click.ClickException(f"{table} is not compacted: {error}") from None
    click.echo(_text(report, table, dry_run=dry_run))


@run.command("index", context_settings=CONTEXT)
@click.argument("table")
@server_options
def index_command(client: IndexClient, table: str) -> None:
    """Builds, merges and audits the indexes of TABLE."""
    with interruptible():
        try:
            totals = run_indexing(client, tuple(table.split(".")))
        except RuntimeError as error:
            raise click.ClickException(str(error)) from None
    click.echo(", ".join(f"{name} {count}" for name, count in totals.items()))


def _text(report: CompactionReport, table: str, *, dry_run: bool) -> str:
    if not report.files_before and not report.conflicts:
        return f"{table} has nothing to compact."
    verb, about = ("would become", "about ") if dry_run else ("became", "")
    text = (
        f"{report.files_before:,} files ({show_size(report.bytes_before)}) of {table} {verb} "
        f"{about}{report.files_after:,} ({show_size(report.bytes_after)}); {report.deletes_applied:,} delete files "
        "applied."
    )
    if report.conflicts:
        text += f" {report.conflicts:,} batches were given up, because writers changed their files; run it again."
    if report.files_skipped:
        text += f" {report.files_skipped:,} files are not Parquet or are encrypted, and stay."
    return text
