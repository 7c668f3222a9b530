"""`seamark history`: shows the recorded statements that read a table.

Exit codes: 0 on success (even if there are no statements), 1 if the server refuses or cannot be reached, 2 for invalid
arguments.
"""

from __future__ import annotations

from typing import Any

import click

from seamark.commands.connecting import server_command
from seamark.commands.terminal import print_json, print_rows, say, show_count, show_size
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.policies import list_read_tables, load_history

_NUMBER_HEADERS = ("statements", "files", "bytes", "planning", "time")


@click.command()
@click.argument("table", required=False)
@click.option("--days", type=click.IntRange(1, 3650), default=30, show_default=True, help="Number of days to add up.")
@click.option(
    "--limit", type=click.IntRange(1, 2000), default=20, show_default=True, help="Maximum number of rows to show."
)
@server_command
def history(client: IndexClient, table: str | None, days: int, limit: int, as_json: bool) -> None:
    """Show the shapes of the statements that read TABLE, the most frequent first.

    Statements that differ only in the values that they compare have the same shape. Files and bytes are averages over
    the statements, before and after pruning. Without TABLE, list the tables that are read most often.
    """
    if table is None:
        _list_tables(client, days, limit, as_json=as_json)
        return
    answer = load_history(client, table, days=days, limit=limit)
    if as_json:
        print_json(answer)
        return
    if not answer["shapes"]:
        say(f"{table}: {answer['reason']}.")
        return
    print_rows(
        ("conditions", "joins", "groups by", "engine", *_NUMBER_HEADERS),
        (
            (
                ", ".join(shape["conditions"]) or ("all rows" if shape["fingerprint"] else "(further shapes)"),
                ", ".join(shape["joins"]),
                ", ".join([*shape["grouping"], *shape["aggregates"]]),
                shape["engine"],
                *_format_sums(shape["sums"]),
            )
            for shape in answer["shapes"]
        ),
        right_aligned_headers=_NUMBER_HEADERS,
    )


def _list_tables(client: IndexClient, days: int, limit: int, *, as_json: bool) -> None:
    """Print the tables that are read most often."""
    answer = list_read_tables(client, days=days)
    if as_json:
        print_json(answer)
        return
    if not answer["tables"]:
        say(
            f"In the last {show_count(days, 'day')}, the server has recorded no statement on a table that you have "
            "rights to read."
        )
        return
    print_rows(
        ("table", "shapes", *_NUMBER_HEADERS),
        (
            (".".join([*table["namespace"], table["table"]]), f"{table['shapes']:,}", *_format_sums(table["sums"]))
            for table in answer["tables"][:limit]
        ),
        right_aligned_headers=("shapes", *_NUMBER_HEADERS),
    )


def _format_sums(sums: dict[str, Any]) -> tuple[str, ...]:
    statements, sized_statements = sums["statements"], sums["sized-statements"]
    files = f"{sums['files-before'] / statements:,.0f} → {sums['files-after'] / statements:,.0f}"
    sizes = "unknown"
    if sized_statements:
        before, after = (show_size(sums[f"bytes-{name}"] // sized_statements) for name in ("before", "after"))
        sizes = f"{before} → {after}"
    planning_text = f"{sums['planning-us'] / statements / 1000:,.1f} ms"
    timed_statements = sums["timed-statements"]
    return (
        f"{statements:,}",
        files,
        sizes,
        planning_text,
        f"{sums['run-us'] / timed_statements / 1e6:,.2f} s" if timed_statements else "unknown",
    )
