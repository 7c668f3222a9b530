"""`seamark rollback`: moves a table, or all tables of a namespace, back to their snapshots at a time.

Exit codes: 0 on success, 1 if a table cannot be moved back or the server refuses, 2 for invalid arguments.
"""

from __future__ import annotations

import click

from seamark.commands.connecting import server_command
from seamark.commands.options import parse_time_ms
from seamark.commands.terminal import escape_for_terminal, print_json, print_rows, say, show_count
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name
from seamark.connector.client.rollbacks import find_snapshot_at, list_tables_below, move_back

_SHOWN_PROBLEMS_MAX = 20
"""The maximum number of tables in an error message."""


@click.command("rollback")
@click.argument("table", required=False)
@click.option(
    "--namespace",
    metavar="A.B",
    help="Namespace whose tables, including those in namespaces below it, are moved back in one transaction.",
)
@click.option(
    "--to",
    "time",
    required=True,
    metavar="TIME",
    help="Time to move back to, such as 2026-01-31T12:00, or milliseconds since the epoch.",
)
@click.option(
    "--skip",
    is_flag=True,
    help="Leave out tables of --namespace that cannot be moved back. Default: change nothing if there is one.",
)
@click.option("--dry-run", is_flag=True, help="Show the snapshots, but change nothing.")
@server_command
def rollback(
    client: IndexClient,
    table: str | None,
    namespace: str | None,
    time: str,
    skip: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Set the current snapshot of TABLE to the snapshot that was current at the time of --to.

    The later snapshots stay until they expire, so you can undo a rollback. Schema, properties, branches and names do
    not change. If the table had no snapshot at that time, or if the snapshot has expired, nothing changes.
    """
    if (table is None) == (namespace is None):
        raise click.UsageError("Name a TABLE, or set --namespace")
    time_ms = parse_time_ms(time, "--to")
    tables = [table] if table is not None else list(list_tables_below(client, split_name(namespace or "")))
    targets = [find_snapshot_at(client, name, time_ms) for name in tables]
    problems = [target for target in targets if target.problem]
    if problems and not skip:
        problem_text = "; ".join(
            f"{join_name(target.table)}: {target.problem}" for target in problems[:_SHOWN_PROBLEMS_MAX]
        )
        raise click.ClickException(escape_for_terminal(f"Nothing was changed. {problem_text}"))
    changes = [target for target in targets if target.is_change]
    if changes and not dry_run:
        move_back(client, changes)
    rows = [
        {"table": join_name(target.table), "from": target.current_id, "to": target.snapshot_id} for target in changes
    ]
    if as_json:
        print_json(rows)
        return
    if rows:
        print_rows(("TABLE", "FROM", "TO"), ([str(value) for value in row.values()] for row in rows))
    action = "would be moved back" if dry_run else "moved back"
    for target in problems:
        say(f"{join_name(target.table)} stays as it is: {target.problem}")
    unchanged_count = len(targets) - len(rows) - len(problems)
    say(f"{show_count(len(rows), 'table')} {action}, {unchanged_count:,} had this snapshot already")
