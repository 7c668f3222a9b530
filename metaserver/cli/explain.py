"""`seamark explain`: shows how the server plans a scan, stage by stage.

A client of the running server, explanation by `--url` or in the `--home` of the server. Exit codes: 0 on success, 1
when the server refuses or cannot be reached, 2 for invalid arguments or an invalid predicate.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.values import At, Explanation
from seamark.metaserver.cli.connecting import connected, served_at
from seamark.metaserver.cli.options import CONTEXT, settings_flags
from seamark.metaserver.cli.terminal import open_console

_DEFAULT_LIMIT = 20


@click.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("predicate", required=False)
@click.option(
    "--join",
    "joins",
    type=json.loads,
    multiple=True,
    metavar="JSON",
    help="A join of the table, as in a request for a plan table; repeatable.",
)
@click.option("--files", "files", is_flag=True, help="List the remaining files.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=_DEFAULT_LIMIT,
    show_default=True,
    help="Maximum number of files to list.",
)
@click.option("--ref", help="A branch or tag.")
@click.option("--snapshot-id", type=int, metavar="ID", help="A snapshot. Default: the current snapshot.")
@click.option(
    "--as-of",
    "as_of_ms",
    type=int,
    metavar="MS",
    help="The snapshot that was current at this time, in ms since the epoch.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@click.option(
    "--url", envvar="SEAMARK_URL", show_envvar=True, help="URL of the server. Default: from --home/server.json."
)
@click.option("--token", envvar="SEAMARK_TOKEN", help="A bearer token. [SEAMARK_TOKEN]")
@settings_flags(("home",))
def explain(
    table: str,
    predicate: str | None,
    joins: tuple[Any, ...],
    files: bool,
    limit: int,
    ref: str | None,
    snapshot_id: int | None,
    as_of_ms: int | None,
    as_json: bool,
    url: str | None,
    token: str | None,
    config: Path | None,
    **flags: Any,
) -> None:
    """Shows how a scan of TABLE with the SQL PREDICATE is planned: files and bytes after each stage.

    \b
    For instance:
      seamark explain sales.orders "day >= DATE '2024-01-01' AND customer = 42" --files
      seamark explain sales.orders --join \\
        '{"table": ["sales", "days"], "on": {"day": "date"}, "predicate": "holiday"}'
    TABLE is a namespace and a name, joined by dots; a dot within a name is written \\. .
    """
    with connected(lambda: SeamarkClient(url or served_at(config, flags), token=token)) as client:
        at = At(snapshot_id, ref, as_of_ms)
        explanation = client.explain(table, predicate, at=at, files=files, limit=limit if files else None, joins=joins)
    if as_json:
        click.echo(json.dumps(explanation.json, indent=2))
    else:
        _show(explanation)


def _show(explanation: Explanation) -> None:
    console = open_console()
    stages = Table(title=_title(explanation), title_justify="left")
    stages.add_column("stage")
    for name in ("files in", "removed", "left", "bytes left", "time"):
        stages.add_column(name, justify="right")
    for stage in explanation.stages:
        counts = [f"{count:,}" for count in (stage.files_in, stage.files_removed, stage.files_left)]
        late = "" if stage.complete else " (out of time)"
        stages.add_row(stage.name + late, *counts, show_size(stage.bytes_left), _time(stage.microseconds))
    console.print(stages)
    for index in explanation.indexes:
        left_out = f"{index['files-removed']:,} of {index['files-in']:,} files"
        console.print(f"Index {index['name']} ({index['kind']}) left out {left_out}.", markup=False)
    for join in explanation.joins:
        outcome = f"{join['keys']:,} keys" if join["used"] else f"left out, {join['reason']}"
        console.print(f"Join with {'.'.join(join['table'])}: {outcome}.", highlight=False, markup=False)
    console.print(
        f"To read: {explanation.files:,} files, {show_size(explanation.bytes)}, {explanation.records:,} records; "
        f"{explanation.delete_files:,} delete files apply.",
        highlight=False,
        markup=False,
    )
    if explanation.columns:
        columns = ", ".join(f"{column['name']} ({column['type']})" for column in explanation.columns)
        console.print(f"Compared: {columns}", highlight=False, markup=False)
    for part in explanation.not_used:
        console.print(f"Not used: {part}", highlight=False, markup=False)
    for residual in explanation.residuals:
        left = json.dumps(residual["residual"])
        console.print(f"Left to check in {residual['files']:,} files: {left}", highlight=False, markup=False)
    if not explanation.residuals_complete:
        console.print("… and more in other partitions.")
    if explanation.kept is not None:
        console.print(_files(explanation))


def _title(explanation: Explanation) -> str:
    return "No snapshot" if explanation.snapshot_id is None else f"Snapshot {explanation.snapshot_id}"


def _files(explanation: Explanation) -> Table:
    assert explanation.kept is not None
    files = Table(title=f"The first {len(explanation.kept):,} of {explanation.files:,} files", title_justify="left")
    for name in ("file", "partition"):
        files.add_column(name, overflow="fold")
    for name in ("records", "size", "delete files"):
        files.add_column(name, justify="right")
    for file in explanation.kept:
        partition = ", ".join(f"{name}={value}" for name, value in file["partition"].items())
        counts = (f"{file['record-count']:,}", show_size(file["file-size-in-bytes"]), f"{file['delete-files']:,}")
        # Not markup: a path may contain brackets.
        files.add_row(*(_plain(text) for text in (file["file-path"], partition, *counts)))
    return files


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


def show_size(count: int) -> str:
    """A size in bytes, in a suitable unit."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _time(microseconds: int) -> str:
    return f"{microseconds:,} µs" if microseconds < 10_000 else f"{microseconds / 1000:,.0f} ms"
