"""`seamark run`: runs a job of the table services once, in this process, for users who schedule jobs themselves.

Exit codes: 0 when the job is done, 1 when it failed, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.expiration import expire
from seamark.connector.jobs.jobs import run_indexing
from seamark.connector.jobs.orphan_files import remove_orphan_files
from seamark.connector.write.compaction import compact
from seamark.connector.write.replacements import RewriteReport
from seamark.metaserver.cli.build import interruptible
from seamark.metaserver.cli.explain import show_size
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT, parse_duration
from seamark.metaserver.clock import SystemClock
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
    _show(report, table, "compact", dry_run=dry_run)


@run.command("cluster", context_settings=CONTEXT)
@click.argument("table")
@click.option("--full", is_flag=True, help="Also rewrite files that were clustered by other columns.")
@click.option("--dry-run", is_flag=True, help="Show which files would be replaced; commit nothing.")
@server_options
def cluster_command(client: IndexClient, table: str, full: bool, dry_run: bool) -> None:
    """Sorts new rows of TABLE into files by its clustering columns.

    The columns are those of the table property seamark.clustering.columns. Rows stay the same. Writers do not wait;
    files that they change meanwhile are left to the next run.
    """
    with interruptible():
        try:
            report = cluster_incrementally(client, table, full=full, dry_run=dry_run)
        except (OSError, SeamarkError) as error:
            raise click.ClickException(f"{table} is not clustered: {error}") from None
    _show(report, table, "cluster", dry_run=dry_run)


@run.command("expire", context_settings=CONTEXT)
@click.argument("table")
@click.option(
    "--older-than",
    metavar="DURATION",
    help="Expire snapshots that were replaced longer ago than this, such as 12h or 7d. "
    "Default: the table property history.expire.max-snapshot-age-ms, or 5 days.",
)
@click.option(
    "--retain-last",
    type=click.IntRange(min=1),
    help="Number of snapshots of each branch that stay. Default: the table property "
    "history.expire.min-snapshots-to-keep, or 1.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; remove nothing.")
@server_options
def expire_command(
    client: IndexClient, table: str, older_than: str | None, retain_last: int | None, dry_run: bool
) -> None:
    """Removes expired snapshots of TABLE, and the files that no other snapshot needs.

    Snapshots of branches and tags stay, and those that running plans read. The age of a snapshot counts from the commit
    that replaced it.
    """
    older_than_ms = _time_before(older_than)
    with interruptible():
        try:
            totals = expire(client, table, older_than_ms=older_than_ms, retain_last=retain_last, dry_run=dry_run)
        except SeamarkError as error:
            raise click.ClickException(f"Snapshots of {table} are not expired: {error}") from None
    if not totals.snapshots and not totals.refs:
        click.echo(f"{table} has no expired snapshots.")
        return
    verb = "would be removed" if dry_run else "were removed"
    refs = f" and {totals.refs:,} branches and tags" if totals.refs else ""
    files = totals.content_files + totals.manifests + totals.other_files
    click.echo(
        f"{totals.snapshots:,} snapshots{refs} of {table} {verb}, with {files:,} files "
        f"({show_size(totals.size_bytes)}), {totals.content_files:,} of them data and delete files."
    )
    if totals.files_failed:
        click.echo(f"The storage did not delete {totals.files_failed:,} files; the server logs them and tries again.")


@run.command("orphan-files", context_settings=CONTEXT)
@click.argument("table")
@click.option(
    "--older-than",
    metavar="DURATION",
    help="Remove files that were last modified longer ago than this, such as 36h or 7d; at least a day. "
    "Default: the table property seamark.orphan-files.min-age-ms, or 3 days.",
)
@click.option("--dry-run", is_flag=True, help="List the files that would be removed; remove nothing.")
@server_options
def orphan_files_command(client: IndexClient, table: str, older_than: str | None, dry_run: bool) -> None:
    """Removes files in the folders of TABLE that no snapshot names.

    Failed and killed writers leave such files. Files in hidden folders, and files that are not Iceberg's, stay.
    """
    with interruptible():
        try:
            totals = remove_orphan_files(client, table, older_than_ms=_time_before(older_than), dry_run=dry_run)
        except SeamarkError as error:
            raise click.ClickException(f"The orphan files of {table} are not removed: {error}") from None
    if dry_run:
        for location in totals.locations:
            click.echo(location)
    verb = "would be removed" if dry_run else "were removed"
    more = "" if totals.is_complete else "; there are more"
    click.echo(
        f"{totals.files:,} orphan files ({show_size(totals.size_bytes)}) of {table} {verb}, of {totals.listed:,} files "
        f"in its folders{more}."
    )
    if totals.files_failed:
        raise click.ClickException(f"the storage did not delete {totals.files_failed:,} files; run it again")


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
    text = ", ".join(f"{name} {count}" for name, count in totals.items())
    click.echo(text or f"The indexes of {table} are complete.")


def _time_before(duration: str | None) -> int | None:
    """In milliseconds since the epoch."""
    if duration is None:
        return None
    return max(0, SystemClock().now_ms() - 1000 * parse_duration(duration, "--older-than"))


def _show(report: RewriteReport, table: str, verb: str, *, dry_run: bool) -> None:
    click.echo(_text(report, table, verb, dry_run=dry_run))
    if report.errors:
        raise click.ClickException(f"{len(report.errors):,} parts of {table} are not rewritten: {report.errors[0]}")


def _text(report: RewriteReport, table: str, verb: str, *, dry_run: bool) -> str:
    if not report.files_before and not report.conflicts:
        return f"{table} has nothing to {verb}."
    verb, about = ("would become", "about ") if dry_run else ("became", "")
    text = (
        f"{report.files_before:,} files ({show_size(report.bytes_before)}) of {table} {verb} "
        f"{about}{report.files_after:,} ({show_size(report.bytes_after)}); {report.deletes_applied:,} delete files "
        "applied."
    )
    if report.conflicts:
        text += f" {report.conflicts:,} batches were given up, because writers changed too much of them; run it again."
    if report.files_skipped:
        text += f" {report.files_skipped:,} files are not Parquet or are encrypted, and stay."
    return text
