"""`seamark index`: defines, lists, pauses and drops a table's indexes, through the running server.

The server is found as `seamark explain` finds it. Exit codes: 0 when it was done, 1 when the server refuses or cannot
be reached, 2 when the command or the definition makes no sense.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from connector.client.indexes import Index, IndexClient
from metaserver import errors
from metaserver.cli.connecting import connected, served_at
from metaserver.cli.explain import show_size
from metaserver.cli.on_demand import OnDemand
from metaserver.cli.options import CONTEXT, settings_flags
from metaserver.cli.terminal import open_console, say
from metaserver.index.keys.terms import split_arguments

_COMMANDS = OnDemand(
    {
        "build": "metaserver.cli.build:build_command",
        "verify": "metaserver.cli.index_verify:verify_command",
        "rebuild-registry": "metaserver.cli.index_verify:rebuild_registry_command",
    }
)


@click.group(context_settings=CONTEXT, commands=_COMMANDS)
def index() -> None:
    """Defines, builds and verifies indexes of a table, which prune files in addition to column statistics.

    \b
    For instance:
      seamark index create sales.orders --kind bitmap --columns discount
      seamark index list sales.orders
    TABLE is a namespace and a name, joined by dots; a dot within a name is written \\. .
    """


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command `--url`, `--token`, `--home` and `--config`, and the client that they lead to as `client`."""

    @settings_flags(("home",))
    @click.option(
        "--url", envvar="SEAMARK_URL", show_envvar=True, help="URL of the server. Default: from --home/server.json."
    )
    @click.option("--token", envvar="SEAMARK_TOKEN", help="A bearer token. [SEAMARK_TOKEN]")
    @wraps(command)
    def run(url: str | None, token: str | None, config: Path | None, home: Any, **given: Any) -> None:
        with connected(lambda: IndexClient(url or served_at(config, {"home": home}), token=token)) as client:
            command(client=client, **given)

    return run


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.option("--kind", required=True, type=click.Choice(["bloom", "bitmap", "record"]))
@click.option(
    "--columns",
    required=True,
    multiple=True,
    metavar="TERM",
    help="A column or a function of a column: c, a.b, lower(c), bucket[16](c), day(ts). For a record index "
    "several, separated by commas.",
)
@click.option("--fpp", type=float, help="False-positive rate of a bloom index. Default: 0.01.")
@click.option("--name", help="Name of the index. Default: derived from columns and kind.")
@server_options
def create(
    client: IndexClient, table: str, kind: str, columns: tuple[str, ...], fpp: float | None, name: str | None
) -> None:
    """Defines an index on TABLE. Plans use each index file after it is registered."""
    try:
        terms = tuple(part.strip() for given in columns for part in split_arguments(given))
    except errors.BadRequest as error:
        raise click.UsageError(error.message) from None
    found = client.put_index(table, name or _name_of(kind, terms), kind=kind, columns=terms, fpp=fpp)
    say(f"Index {found.name}: {found.definition}, {found.lag_files:,} data files to index")


@index.command("list", context_settings=CONTEXT)
@click.argument("table")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def list_indexes(client: IndexClient, table: str, as_json: bool) -> None:
    """Lists the indexes of TABLE and their coverage of the current snapshot."""
    found = client.indexes(table)
    if as_json:
        click.echo(json.dumps([one.json for one in found], indent=2))
    elif not found:
        say(f"{table} has no indexes; make one with: seamark index create {table} --kind … --columns …")
    else:
        open_console().print(_listed(found))


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def show(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Shows the index NAME of TABLE with its index files."""
    found = client.index(table, name)
    if as_json:
        click.echo(json.dumps(found.json, indent=2))
        return
    console = open_console()
    console.print(_listed([found]))
    if used := found.json.get("used"):
        console.print(
            f"Used by {used['plans']:,} plans of this worker: {used['files-removed']:,} of {used['files-in']:,} files "
            "left out.",
            highlight=False,
        )
    if found.audited_ms is not None:
        console.print(
            f"Audited {datetime.fromtimestamp(found.audited_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC.", highlight=False
        )
    if files := found.json.get("index-files"):
        console.print(_files(files))


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@server_options
def pause(client: IndexClient, table: str, name: str) -> None:
    """Pauses the index NAME of TABLE: plans do not use it, and builds skip it. Its index files stay."""
    client.put_index(table, name, state="paused")
    say(f"Index {name} is paused")


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@server_options
def resume(client: IndexClient, table: str, name: str) -> None:
    """Resumes the index NAME of TABLE: plans use it again."""
    found = client.put_index(table, name, state="enabled")
    say(f"Index {name} is enabled, {found.lag_files:,} data files to index")


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@server_options
def drop(client: IndexClient, table: str, name: str) -> None:
    """Drops the index NAME of TABLE."""
    client.drop_index(table, name)
    say(f"Index {name} is dropped")


def _name_of(kind: str, columns: tuple[str, ...]) -> str:
    """Letters, digits and underscores of the columns, and the kind."""
    words = ["".join(character if character.isalnum() else " " for character in one).split() for one in columns]
    return "_".join([*(word for part in words for word in part if word.isascii()), kind])[:128]


def _listed(found: list[Index]) -> Table:
    listed = Table()
    for name in ("name", "definition", "health"):
        listed.add_column(name, overflow="fold")
    for name in ("files", "to index", "size"):
        listed.add_column(name, justify="right")
    for one in found:
        counts = (f"{one.files:,} of {one.files_total:,}", f"{one.lag_files:,}", show_size(one.size_bytes))
        told = one.health if one.problem is None else f"{one.health}: {one.problem}"
        # Not markup: a definition holds brackets.
        listed.add_row(*(_plain(text) for text in (one.name, one.definition, told)), *counts)
    return listed


def _files(files: list[dict[str, Any]]) -> Table:
    listed = Table(title=f"{len(files):,} index files", title_justify="left")
    for name in ("location", "state"):
        listed.add_column(name, overflow="fold")
    for name in ("level", "files", "rows", "size"):
        listed.add_column(name, justify="right")
    for one in files:
        state = one["state"] if one["reason"] is None else f"{one['state']}: {one['reason']}"
        counts = (str(one["level"]), f"{one['files']:,}", f"{one['rows']:,}", show_size(one["size-in-bytes"]))
        listed.add_row(_plain(one["location"]), _plain(state), *counts)
    return listed


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
