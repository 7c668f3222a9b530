"""`seamark run`: runs a job of the table services once, in this process, for users who schedule jobs themselves.

Exit codes: 0 if the job is done, 1 if it failed, 2 for invalid arguments, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from seamark.commands.build import handle_sigterm
from seamark.commands.connecting import server_command
from seamark.commands.maintenance.rewriting import handle_failures, quiet_logs, rewriting_command, wait_option
from seamark.commands.options import parse_duration, parse_size
from seamark.commands.terminal import print_result, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import split_table
from seamark.connector.jobs.bucket_splitting import split_buckets
from seamark.connector.jobs.clustering import cluster_incrementally
from seamark.connector.jobs.column_ttl import expire_columns
from seamark.connector.jobs.failures import JobIncomplete
from seamark.connector.jobs.file_merges import drop_columns, merge_files
from seamark.connector.jobs.jobs import JOBS
from seamark.connector.jobs.server_jobs import ExpirationTotals, expire, remove_orphan_files, rewrite_manifests
from seamark.connector.jobs.statement_runs import run_statement
from seamark.connector.jobs.statements import parse_statement
from seamark.connector.jobs.statistics import compute_statistics
from seamark.connector.write.compaction import compact
from seamark.connector.write.replacements import RewriteReport
from seamark.formats.protocol.wire import RECHECK_AFTER
from seamark.formats.runtime.clock import SystemClock
from seamark.formats.services.service import TableService
from seamark.formats.services.services import (
    BUCKET_SPLITTING,
    CLUSTERING,
    COLUMN_TTL,
    COMPACTION,
    EXPIRATION,
    INDEXING,
    MANIFESTS,
    ORPHAN_FILES,
    SERVICES,
    STATISTICS,
)

_WHERE = click.option(
    "--where",
    metavar="SQL",
    help="SQL condition on partitions, such as day < DATE '2026-01-01'. Rewrite only the partitions that it selects.",
)
_TARGET_SIZE = click.option(
    "--target-size",
    "target_bytes",
    metavar="SIZE",
    callback=lambda context, option, text: None if text is None else parse_size(text, "--target-size"),
    help="Size of new files, such as 256MB. Default: the size in the table's properties.",
)
_COLUMNS = click.option(
    "--columns",
    required=True,
    metavar="NAMES",
    callback=lambda context, option, text: [name.strip() for name in text.split(",") if name.strip()],
    help="Names of the columns, separated by commas.",
)
_FULL = click.option("--full", is_flag=True, help="Also rewrite files that are already clustered, by other columns.")


@click.group()
def run() -> None:
    """Run a maintenance job on a table."""


@rewriting_command(run, COMPACTION, refusal="{table} is not compacted", verb="compact")
def compact_command(client: IndexClient, table: str, *, dry_run: bool) -> RewriteReport:
    """Merge small data files of TABLE and apply its delete files.

    The rows stay the same. Writers do not wait. If they change a file during the job, the next run merges it.
    """
    return compact(client, table, dry_run=dry_run)


@rewriting_command(
    run, "merge-files", _WHERE, _TARGET_SIZE, refusal="The files of {table} are not merged", verb="merge"
)
def merge_files_command(
    client: IndexClient, table: str, *, dry_run: bool, where: str | None, target_bytes: int | None
) -> RewriteReport:
    """Merge data files of TABLE, and apply their delete files.

    Large row groups are copied without decoding, and small row groups are encoded together. The rows stay the same.
    """
    return merge_files(client, table, where=where, target_bytes=target_bytes, dry_run=dry_run)


@rewriting_command(run, "drop-columns", _COLUMNS, _WHERE, refusal="The columns of {table} are not dropped", verb="drop")
def drop_columns_command(
    client: IndexClient, table: str, *, dry_run: bool, columns: list[str], where: str | None
) -> RewriteReport:
    """Remove the values of columns from data files of TABLE.

    The schema stays the same; readers see null. The other columns are copied without decoding. Older snapshots keep
    their files until the snapshots expire.
    """
    return drop_columns(client, table, columns, where=where, dry_run=dry_run)


@rewriting_command(
    run,
    COLUMN_TTL,
    refusal="The expired columns of {table} are not dropped",
    verb="drop",
    dry_run_help="Show how many bytes would be freed, but commit nothing.",
)
def column_ttl_command(client: IndexClient, table: str, *, dry_run: bool) -> RewriteReport:
    """Remove the values of expired columns from old partitions of TABLE.

    The table property seamark.column-ttl.columns defines the ages. The schema stays the same; readers see null. The
    other columns are copied without decoding.
    """
    return expire_columns(client, table, dry_run=dry_run)


@run.command("statement")
@click.argument("statement")
@wait_option
@server_command
def statement_command(client: IndexClient, statement: str, wait_s: float, as_json: bool) -> None:
    """Run STATEMENT: ALTER TABLE … MERGE FILES, or ALTER TABLE … PARTITION (…) DROP COLUMNS (…).

    \b
    For instance:
      seamark run statement "ALTER TABLE shop.events PARTITION (day < DATE '2026-01-01') DROP COLUMNS (payload)"
    """
    parsed_statement = parse_statement(statement)
    if parsed_statement is None:
        raise click.UsageError(
            "STATEMENT must be ALTER TABLE … MERGE FILES or ALTER TABLE … PARTITION (…) DROP COLUMNS (…)"
        )
    with handle_failures("The statement was not executed"):
        result = run_statement(client, parsed_statement, utc=True, wait_s=wait_s)
    text = (
        f"{show_count(result.files_before, 'file')} ({show_size(result.bytes_before)}) became {result.files_after:,} "
        f"({show_size(result.bytes_after)}); {show_count(result.row_groups_copied, 'row group', 'were')} copied, "
        f"{result.row_groups_encoded:,} encoded."
    )
    print_result(result, text if result.files_before else "No file needs a change.", as_json=as_json)


@rewriting_command(run, CLUSTERING, _FULL, refusal="{table} is not clustered", verb="cluster")
def cluster_command(client: IndexClient, table: str, *, dry_run: bool, full: bool) -> RewriteReport:
    """Sort new rows of TABLE into files by its clustering columns.

    The table property seamark.clustering.columns defines the columns. The rows stay the same. Writers do not wait. If
    they change a file during the job, the next run sorts it.
    """
    return cluster_incrementally(client, table, full=full, dry_run=dry_run)


@rewriting_command(run, BUCKET_SPLITTING, refusal="The buckets of {table} are not split", verb="split")
def split_buckets_command(client: IndexClient, table: str, *, dry_run: bool) -> RewriteReport:
    """Split data files of TABLE that were written when it had fewer buckets.

    The rows stay the same. Writers do not wait. If they change a file during the job, the next run splits it.
    """
    return split_buckets(client, table, dry_run=dry_run)


@run.command(STATISTICS.command)
@click.argument("table")
@click.option("--full", is_flag=True, help="Read all files, including those that earlier statistics count.")
@click.option("--dry-run", is_flag=True, help="Show how much would be read, but compute nothing.")
@server_command
def statistics_command(client: IndexClient, table: str, full: bool, dry_run: bool, as_json: bool) -> None:
    """Compute the statistics of TABLE: distinct values of its columns, and totals of its partitions.

    The command reads only files that earlier statistics do not count. Engines use the statistics to order joins.
    """
    with handle_failures(f"The statistics of {table} are not computed"):
        report = compute_statistics(client, table, full=full, dry_run=dry_run)
    if report.snapshot_id is None:
        print_result(report, f"{table} has no snapshot.", as_json=as_json)
        return
    verb = "would be read" if dry_run else "was read" if report.files == 1 else "were read"
    partitions = f", {show_count(report.partitions, 'partition')}" if report.partitions else ""
    print_result(
        report,
        f"Statistics of {table}: {show_count(report.columns, 'column')}{partitions}; {report.files:,} of "
        f"{show_count(report.files_total, 'data file')} ({show_count(report.rows, 'row')}) {verb}.",
        as_json=as_json,
    )


@run.command(MANIFESTS.command)
@click.argument("table")
@click.option(
    "--min-count",
    type=click.IntRange(min=2),
    default=2,
    show_default=True,
    help="Minimum number of manifests: the manifests of a partition spec with fewer are not rewritten.",
)
@click.option("--dry-run", is_flag=True, help="Show which manifests would be replaced, but commit nothing.")
@server_command
def manifests_command(client: IndexClient, table: str, min_count: int, dry_run: bool, as_json: bool) -> None:
    """Rewrite the manifests of TABLE: fewer manifests list its files, sorted by partition.

    The data files stay the same. If other commits replace the manifests during the job, nothing changes.
    """
    with handle_failures(f"The manifests of {table} are not rewritten"):
        report = rewrite_manifests(client, table, min_count=min_count, dry_run=dry_run)
    print_result(report, _format_manifests_result(report, table, dry_run=dry_run), as_json=as_json)


def _format_manifests_result(report: Mapping[str, Any], table: str, *, dry_run: bool) -> str:
    lines = []
    if report["conflicts"]:
        lines.append(f"Other commits have replaced manifests of {table} during the job; run it again.")
    elif not report["manifests-before"]:
        lines.append(f"{table} has no manifests to rewrite.")
    if report["manifests-before"]:
        verb = "would become" if dry_run else "became"
        lines.append(
            f"{report['manifests-before']:,} of {show_count(report['manifests'], 'manifest')} of {table} {verb} "
            f"{report['manifests-after']:,}; the files of a partition are in "
            f"{report['partition-manifests-after']:g} of them on average; before, they were "
            f"in {report['partition-manifests-before']:g}."
        )
    if repaired_files := report["files-repaired"]:
        verb = "would be" if dry_run else "were"
        lines.append(
            f"The bounds or counts of {show_count(repaired_files, 'file')} were wrong; "
            f"they {verb} dropped or corrected."
        )
    return "\n".join(lines)


@run.command(EXPIRATION.command)
@click.argument("table")
@click.option(
    "--older-than",
    metavar="DURATION",
    help="Age since a snapshot was replaced, such as 12h or 7d: older snapshots expire. Default: the table property "
    "history.expire.max-snapshot-age-ms, or 5 days.",
)
@click.option(
    "--retain-last",
    type=click.IntRange(min=1),
    help="Number of snapshots of each branch that are kept. Default: the table property "
    "history.expire.min-snapshots-to-keep, or 1.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, but remove nothing.")
@server_command
def expire_command(
    client: IndexClient, table: str, older_than: str | None, retain_last: int | None, dry_run: bool, as_json: bool
) -> None:
    """Remove expired snapshots of TABLE, and the files that no other snapshot needs.

    Snapshots of branches and tags are kept, and snapshots that running plans read. The age of a snapshot is the time
    since the commit that replaced it.
    """
    older_than_ms = _compute_time_before(older_than)
    with handle_failures(f"Snapshots of {table} are not expired"):
        totals = expire(client, table, older_than_ms=older_than_ms, retain_last=retain_last, dry_run=dry_run)
    print_result(totals, _format_expiration_result(totals, table, dry_run=dry_run), as_json=as_json)


def _describe_removal(count: int, *, dry_run: bool) -> str:
    if dry_run:
        return "would be removed"
    return "was removed" if count == 1 else "were removed"


def _format_expiration_result(totals: ExpirationTotals, table: str, *, dry_run: bool) -> str:
    if not totals.snapshots and not totals.refs:
        return f"{table} has no expired snapshots."
    refs = f" and {totals.refs:,} branches and tags" if totals.refs else ""
    files = totals.content_files + totals.manifests + totals.other_files
    snapshots = show_count(totals.snapshots, "snapshot")
    verb = _describe_removal(totals.snapshots + totals.refs, dry_run=dry_run)
    text = (
        f"{snapshots}{refs} of {table} {verb}, with {show_count(files, 'file')} "
        f"({show_size(totals.size_bytes)}), {totals.content_files:,} of them data and delete files."
    )
    if totals.files_failed:
        text += f"\nThe storage did not delete {show_count(totals.files_failed, 'file')}; the server logs this "
        text += "and tries again."
    return text


@run.command(ORPHAN_FILES.command)
@click.argument("table")
@click.option(
    "--older-than",
    metavar="DURATION",
    help="Age since the last modification, such as 36h or 7d, at least a day: older files are removed. Default: the "
    "table property seamark.orphan-files.min-age-ms, or 3 days.",
)
@click.option("--dry-run", is_flag=True, help="List the files that would be removed, but remove nothing.")
@server_command
def orphan_files_command(client: IndexClient, table: str, older_than: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove files in the folders of TABLE that no snapshot references.

    Failed and killed writers leave such files. They also leave unfinished uploads to S3, which the command aborts.
    Files in hidden folders, and files that do not belong to Iceberg, are kept.
    """
    with handle_failures(f"The orphan files of {table} are not removed"):
        totals = remove_orphan_files(client, table, older_than_ms=_compute_time_before(older_than), dry_run=dry_run)
    verb = _describe_removal(totals.files, dry_run=dry_run)
    remainder_text = "" if totals.is_complete else "; there are more"
    text = (
        f"{show_count(totals.files, 'orphan file')} ({show_size(totals.size_bytes)}) of {table} {verb}, of "
        f"{show_count(totals.listed, 'file')} in its folders{remainder_text}."
    )
    if totals.uploads:
        uploads_text = _describe_removal(totals.uploads, dry_run=dry_run).replace("removed", "aborted")
        text += f" {show_count(totals.uploads, 'unfinished upload')} {uploads_text}."
    if totals.files_unconfirmed:
        text += (
            f" {show_count(totals.files_unconfirmed, 'file')} were kept: their age is not certain, because the server "
            "has not run long enough; run the command again later."
        )
    print_result(totals, "\n".join([*(totals.locations if dry_run else ()), text]), as_json=as_json)
    if totals.files_failed:
        raise click.ClickException(
            f"the storage did not delete {show_count(totals.files_failed, 'file')}; run it again"
        )


def _compute_time_before(duration: str | None) -> int | None:
    """Return the time `duration` ago, in milliseconds since the epoch."""
    if duration is None:
        return None
    return max(0, SystemClock().now_ms() - 1000 * parse_duration(duration, "--older-than"))


def _add_job_command(service: TableService, help_text: str, idle_text: str) -> None:
    """Add a command that runs the job of a service in the same way as the server, without further options.

    Args:
        service: The service.
        help_text: The help of the command.
        idle_text: The message of the command if there was nothing to do, with "{table}".
    """

    def run_job(client: IndexClient, table: str, as_json: bool, **arguments: Any) -> None:
        with handle_sigterm(), quiet_logs():
            try:
                totals = JOBS[service.name](client, split_table(table), **arguments)
            except JobIncomplete as error:
                raise click.ClickException(str(error)) from None
        # If another job has the lease of the table, the job only states when to try again.
        if service.rewrites_files and totals.keys() == {RECHECK_AFTER}:
            raise click.ClickException(f"Another job is rewriting files of {table}; try again later")
        if service is INDEXING and RECHECK_AFTER in totals:
            raise click.ClickException(f"Another process is building an index of {table}; try again later")
        text = ", ".join(f"{name} {count}" for name, count in totals.items())
        print_result(totals, text or idle_text.format(table=table), as_json=as_json)

    command: Any = server_command(run_job)
    if service.rewrites_files:
        command = wait_option(command)
    run.command(service.command, help=help_text)(click.argument("table")(command))


_add_job_command(INDEXING, "Build, merge and audit the indexes of TABLE.", "The indexes of {table} are complete.")
for _service in SERVICES.values():
    if _service.command not in run.commands:
        _add_job_command(
            _service,
            f"Run the table service {_service.name} on TABLE once: it {_service.summary}.",
            f"The table service {_service.name} has nothing to do on {{table}}.",
        )
