"""`seamark index`: defines, lists, pauses and drops a table's indexes through the running server.

The server is found like for `seamark explain`. Exit codes: 0 on success, 1 when the server refuses or cannot be
reached, 2 for invalid arguments or an invalid definition.
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

from seamark.connector.client.errors import NotFound
from seamark.connector.client.indexes import Index, IndexClient
from seamark.metaserver import errors
from seamark.metaserver.cli.connecting import connected, served_at, similar_name
from seamark.metaserver.cli.explain import show_size
from seamark.metaserver.cli.on_demand import DeferredCommand, DeferredGroup
from seamark.metaserver.cli.options import CONTEXT, settings_flags
from seamark.metaserver.cli.terminal import open_console, say
from seamark.metaserver.index.keys.terms import split_arguments
from seamark.metaserver.index.kinds.kinds import KINDS, parameters, takers

_COMMANDS = {
    "build": DeferredCommand(
        "seamark.metaserver.cli.build:build_command", "Builds the index files that a table's indexes lack."
    ),
    "verify": DeferredCommand(
        "seamark.metaserver.cli.index_verify:verify_command", "Checks a table's indexes against its data."
    ),
    "rebuild-registry": DeferredCommand(
        "seamark.metaserver.cli.index_verify:rebuild_registry_command",
        "Registers the index files that the server does not list.",
    ),
}


@click.group(context_settings=CONTEXT, cls=DeferredGroup, deferred=_COMMANDS)
def index() -> None:
    """Defines, builds and verifies indexes of a table, which prune files in addition to column statistics.

    \b
    For instance:
      seamark index create sales.orders --kind bitmap --columns discount
      seamark index list sales.orders
    TABLE is a namespace and a name, joined by dots; a dot within a name is written \\. .
    """


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--url`, `--token`, `--home` and `--config` to a command, and passes it the client as `client`."""

    @settings_flags(("home",))
    @click.option(
        "--url", envvar="SEAMARK_URL", show_envvar=True, help="URL of the server. Default: from --home/server.json."
    )
    @click.option("--token", envvar="SEAMARK_TOKEN", help="A bearer token. [SEAMARK_TOKEN]")
    @wraps(command)
    def run(url: str | None, token: str | None, config: Path | None, home: Any, **given: Any) -> None:
        with connected(lambda: IndexClient(url or served_at(config, {"home": home}), token=token)) as client:
            try:
                command(client=client, **given)
            except NotFound as error:
                similar = similar_name(client, given.get("table"))
                if similar is None:
                    raise
                raise NotFound(f"{error.message.rstrip('.')}. Did you mean {similar}?", status=error.status) from None

    return run


def _parameter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each parameter of an index kind."""
    for one in parameters().values():
        about = f"Of {', '.join(takers(one.name))}: {one.meaning}. Default: {one.default:g}."
        command = click.option(f"--{one.name}", type=float, help=about)(command)
    return command


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.option("--kind", required=True, type=click.Choice(list(KINDS)))
@click.option(
    "--columns",
    required=True,
    multiple=True,
    metavar="TERM",
    help="A column or a function of a column: c, a.b, lower(c), bucket[16](c), day(ts). For a record index "
    "several, separated by commas.",
)
@_parameter_options
@click.option("--name", help="Name of the index. Default: derived from columns and kind.")
@server_options
def create(
    client: IndexClient, table: str, kind: str, columns: tuple[str, ...], name: str | None, **given: Any
) -> None:
    """Defines an index on TABLE. Plans use each index file after it is registered."""
    try:
        terms = tuple(part.strip() for given in columns for part in split_arguments(given))
    except errors.BadRequest as error:
        raise click.UsageError(error.message) from None
    defined = client.put_index(table, name or _name_of(kind, terms), kind=kind, columns=terms, **given)
    say(f"Index {defined.name}: {defined.definition}, {defined.lag_files:,} data files to index")


@index.command("list", context_settings=CONTEXT)
@click.argument("table")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def list_indexes(client: IndexClient, table: str, as_json: bool) -> None:
    """Lists the indexes of TABLE and their coverage of the current snapshot."""
    indexes = client.indexes(table)
    if as_json:
        click.echo(json.dumps([index.json for index in indexes], indent=2))
    elif not indexes:
        say(f"{table} has no indexes; create one with: seamark index create {table} --kind … --columns …")
    else:
        open_console().print(_listed(indexes))


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
@server_options
def show(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Shows the index NAME of TABLE with its index files."""
    shown = client.index(table, name)
    if as_json:
        click.echo(json.dumps(shown.json, indent=2))
        return
    console = open_console()
    console.print(_listed([shown]))
    if used := shown.json.get("used"):
        console.print(
            f"Used by {used['plans']:,} plans of this worker: {used['files-removed']:,} of {used['files-in']:,} files "
            "left out.",
            highlight=False,
        )
    if shown.audited_ms is not None:
        console.print(
            f"Audited {datetime.fromtimestamp(shown.audited_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC.", highlight=False
        )
    if files := shown.json.get("index-files"):
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
    resumed = client.put_index(table, name, state="enabled")
    say(f"Index {name} is enabled, {resumed.lag_files:,} data files to index")


@index.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("name")
@server_options
def drop(client: IndexClient, table: str, name: str) -> None:
    """Drops the index NAME of TABLE."""
    client.drop_index(table, name)
    say(f"Index {name} is dropped")


def _name_of(kind: str, columns: tuple[str, ...]) -> str:
    """The columns' letters, digits and underscores, and the kind."""
    words = ["".join(character if character.isalnum() else " " for character in column).split() for column in columns]
    return "_".join([*(word for part in words for word in part if word.isascii()), kind])[:128]


def _listed(indexes: list[Index]) -> Table:
    listed = Table()
    for name in ("name", "definition", "health"):
        listed.add_column(name, overflow="fold")
    for name in ("files", "to index", "size"):
        listed.add_column(name, justify="right")
    for index in indexes:
        counts = (f"{index.files:,} of {index.files_total:,}", f"{index.lag_files:,}", show_size(index.size_bytes))
        health = index.health if index.problem is None else f"{index.health}: {index.problem}"
        # Not markup: a definition contains brackets.
        listed.add_row(*(_plain(text) for text in (index.name, index.definition, health)), *counts)
    return listed


def _files(files: list[dict[str, Any]]) -> Table:
    listed = Table(title=f"{len(files):,} index files", title_justify="left")
    for name in ("location", "state"):
        listed.add_column(name, overflow="fold")
    for name in ("level", "files", "rows", "size"):
        listed.add_column(name, justify="right")
    for file in files:
        state = file["state"] if file["reason"] is None else f"{file['state']}: {file['reason']}"
        counts = (str(file["level"]), f"{file['files']:,}", f"{file['rows']:,}", show_size(file["size-in-bytes"]))
        listed.add_row(_plain(file["location"]), _plain(state), *counts)
    return listed


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
