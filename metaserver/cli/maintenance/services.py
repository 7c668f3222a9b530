"""`seamark services`: lists the latest runs of table services, from the timeline of the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

import click
from rich.table import Table

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.values import Instant
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT
from seamark.metaserver.cli.terminal import open_console, say
from seamark.metaserver.timeline.instants import MAINTENANCE

_DEFAULT_LIMIT = 20


@click.command(context_settings=CONTEXT)
@click.argument("table", required=False)
@click.option("--limit", type=click.IntRange(min=1), default=_DEFAULT_LIMIT, show_default=True, help="Number of runs.")
@click.option("--json", "as_json", is_flag=True, help="Print the instants as JSON.")
@server_options
def services(client: IndexClient, table: str | None, limit: int, as_json: bool) -> None:
    """Lists the latest runs of table services on TABLE, or on all tables that you may read, newest first.

    A job that found nothing to do is not listed.
    """
    runs = list(client.timeline(table, action=MAINTENANCE, newest_first=True, limit=limit))
    if as_json:
        listed = [
            {"namespace": run.namespace, "table": run.name, "requested-ms": run.requested_ms, "state": run.state}
            | run.summary
            for run in runs
        ]
        click.echo(json.dumps(listed, indent=2))
    elif not runs:
        say("Table services have done nothing yet." if table is None else f"Table services did nothing to {table} yet.")
    else:
        open_console().print(_listed(runs))


def _listed(runs: list[Instant]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("started", "table", "service", "seconds", "result"):
        shown.add_column(head, justify="right" if head == "seconds" else "left", overflow="fold")
    for run in runs:
        started = datetime.fromtimestamp(run.requested_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        summary = run.summary
        totals = summary.get("totals") or {}
        result = ", ".join(f"{str(name).replace('_', ' ')} {count:,}" for name, count in totals.items())
        if "error" in summary:
            result = f"failed: {summary['error']}"
        name = ".".join((*run.namespace, run.name))
        shown.add_row(started, name, str(summary.get("service")), f"{summary.get('seconds', 0):,.1f}", result)
    return shown
