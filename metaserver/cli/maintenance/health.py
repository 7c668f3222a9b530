"""`seamark health`: shows what is wrong with a table, what it costs queries, and what corrects it.

Exit codes: 0 on success, also when there are problems, 1 when the server refuses or cannot be reached, 2 for invalid
arguments.
"""

from __future__ import annotations

import json
from typing import Any

import click
from rich.table import Table

from seamark.connector.client.indexes import Index, IndexClient
from seamark.metaserver.cli.explain import show_size
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT
from seamark.metaserver.cli.terminal import open_console, say

_COMMANDS = {"compaction": "compact", "expiration": "expire", "indexing": "index"}
"""The subcommand of `seamark run` for each table service."""


@click.command(context_settings=CONTEXT)
@click.argument("table")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def health(client: IndexClient, table: str, as_json: bool) -> None:
    """Shows what is wrong with TABLE, what it costs queries, and which table service corrects it."""
    found = client.health(table)
    problems = [*found["problems"], *(_of_index(index) for index in client.indexes(table) if _lags(index))]
    if as_json:
        click.echo(json.dumps({**found, "problems": problems}, indent=2))
        return
    say(
        f"{table}: {found['files']:,} data files ({show_size(found['size-in-bytes'])}), {found['records']:,} rows, "
        f"{found['delete-files']:,} delete files, {found['manifests']:,} manifests, {found['snapshots']:,} snapshots, "
        f"format version {found['format-version']}"
    )
    if problems:
        open_console().print(_listed(table, problems))
    else:
        say("No problems found.")


def _lags(index: Index) -> bool:
    return index.state == "enabled" and index.kind != "bucket" and index.health != "ok"


def _of_index(index: Index) -> dict[str, Any]:
    if index.health == "broken":
        return {
            "problem": f"index {index.name}",
            "detail": index.json.get("problem") or "the index cannot be used",
            "cost": "no query uses it; drop it",
        }
    return {
        "problem": f"index {index.name}",
        "detail": f"{index.lag_files:,} data files are not indexed",
        "cost": "queries read those of them that column statistics do not prune",
        "service": "indexing",
        "enabled": True,
    }


def _listed(table: str, problems: list[dict[str, Any]]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for head in ("problem", "detail", "cost", "remedy"):
        shown.add_column(head, overflow="fold")
    for problem in problems:
        shown.add_row(problem["problem"], problem["detail"], problem["cost"], _remedy(table, problem))
    return shown


def _remedy(table: str, problem: dict[str, Any]) -> str:
    service = problem.get("service")
    if service is None:
        return ""
    command = f"seamark run {_COMMANDS[service]} {table}"
    if problem.get("enabled"):
        return f"the server does it after the next commit, or: {command}"
    return f"{command}, or set seamark.{service}.enabled"
