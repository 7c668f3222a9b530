"""`seamark health`: shows the problems of a table, their costs for queries, and how to correct them.

Exit codes: 0 on success (even if there are problems), 1 if the server refuses or cannot be reached, 2 for invalid
arguments.
"""

from __future__ import annotations

import math
from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import print_json, print_rows, say, show_count, show_size
from seamark.connector.client.indexes import Index, IndexClient
from seamark.formats.services.services import INDEXING, SERVICES


@click.command()
@click.argument("table")
@server_command
def health(client: IndexClient, table: str, as_json: bool) -> None:
    """Show the problems of TABLE, their costs for queries, and the table services that correct them."""
    health_report = client.health(table)
    problems = [
        *health_report["problems"],
        *(_index_to_json(index) for index in client.indexes(table) if _is_lagging(index)),
    ]
    if as_json:
        print_json({**health_report, "problems": problems})
        return
    say(
        f"{table}: {show_count(health_report['files'], 'data file')} ({show_size(health_report['size-in-bytes'])}), "
        f"{show_count(health_report['records'], 'row')}, {show_count(health_report['delete-files'], 'delete file')}, "
        f"{show_count(health_report['manifests'], 'manifest')}, {show_count(health_report['snapshots'], 'snapshot')}, "
        f"format version {health_report['format-version']}"
    )
    if problems:
        print_rows(
            ("problem", "detail", "cost", "remedy"),
            (
                (problem["problem"], problem["detail"], problem["cost"], _suggest_remedy(table, problem))
                for problem in problems
            ),
        )
    else:
        say("No problems found.")


def _is_lagging(index: Index) -> bool:
    return index.state == "enabled" and index.kind != "bucket" and index.health != "ok"


def _index_to_json(index: Index) -> dict[str, Any]:
    if index.health == "broken":
        return {
            "problem": f"index {index.name}",
            "detail": index.json.get("problem") or "the index cannot be used",
            "cost": "no query uses it; drop it",
        }
    return {
        "problem": f"index {index.name}",
        "detail": f"{show_count(index.lag_files, 'data file', 'are')} not indexed",
        "cost": "queries read the files among them that column statistics do not prune",
        "service": INDEXING.name,
        "enabled": True,
    }


def _suggest_remedy(table: str, problem: dict[str, Any]) -> str:
    """Return a text that names the table service or the command that corrects the problem.

    If the service is turned on, the text also states when it runs. Without a service for the problem, the text is
    empty.
    """
    service = SERVICES.get(problem.get("service", ""))
    if service is None:
        return ""
    command = f"seamark run {service.command} {table}"
    if not problem.get("enabled"):
        return command if service.switch is None else f"{command}, or set {service.switch}"
    minutes = math.ceil(problem.get("after_s", 0) / 60)
    time_text = (
        f"in {minutes // 60} h {minutes % 60} min, when its window begins" if minutes else "after the next commit"
    )
    return f"the server does it {time_text}, or: {command}"
