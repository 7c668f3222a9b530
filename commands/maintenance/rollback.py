"""`seamark rollback-job`: undoes the commit of a job that replaced files or manifests.

Exit codes: 0 on success, 1 if the job cannot be undone or the server refuses, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import print_result, show_count
from seamark.connector.client.indexes import IndexClient
from seamark.connector.jobs.rollback import undo_job
from seamark.formats.iceberg.metadata.snapshot import MAIN
from seamark.formats.runtime.errors import SeamarkError


@click.command("rollback-job")
@click.argument("table")
@click.option(
    "--snapshot",
    "snapshot_id",
    type=int,
    help="Snapshot that the job committed. Default: the snapshot of the latest job.",
)
@click.option("--branch", default=MAIN, show_default=True, help="Branch that the job changed.")
@server_command
def rollback_job(client: IndexClient, table: str, snapshot_id: int | None, branch: str, as_json: bool) -> None:
    """Restore the files or manifests of TABLE that a job replaced, in a new snapshot.

    The job is a compaction, a clustering, a split of buckets or a rewrite of manifests. Later changes of rows and
    deletes are kept. If they changed the files of the job, or if the snapshot before the job has expired, the command
    fails and nothing changes.
    """
    try:
        rollback = undo_job(client, table, snapshot_id, branch=branch)
    except SeamarkError as error:
        raise click.ClickException(f"The job on {table} was not rolled back: {error}") from None
    files = f"{show_count(rollback.files_restored, 'file')} restored, {rollback.files_removed:,} removed"
    if not rollback.files_restored and not rollback.files_removed:
        files = "the earlier manifests list the files again"
    print_result(
        rollback,
        f"Snapshot {rollback.snapshot_id} of {table} undoes {rollback.undone_id}: {files}. The table's policy may "
        f"start the job again; see seamark policy show {table}.",
        as_json=as_json,
    )
