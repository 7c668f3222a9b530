"""`seamark index`: defines, lists, pauses and drops the indexes of a table through the running server.

The command finds the server in the same way as `seamark explain`. Exit codes: 0 on success, 1 if the server refuses or
cannot be reached, 2 for invalid arguments or an invalid definition.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from seamark.commands.connecting import server_command
from seamark.commands.on_demand import DeferredCommand, DeferredGroup
from seamark.commands.terminal import (
    make_table,
    open_console,
    print_json,
    print_result,
    say,
    show_count,
    show_size,
)
from seamark.connector.client.indexes import Index, IndexClient
from seamark.connector.client.names import split_table
from seamark.formats.index.keys.terms import split_arguments
from seamark.formats.index.kinds.kinds import KINDS, list_kinds_with_parameter, list_parameters
from seamark.formats.runtime import errors
from seamark.formats.runtime.lazy_module import LazyModule

if TYPE_CHECKING:
    from seamark.connector.index import cube_estimates, lookups
else:
    # Only the command that creates a cube reads data files. Without this import, the other commands start faster.
    cube_estimates = LazyModule("seamark.connector.index.cube_estimates")
    lookups = LazyModule("seamark.connector.index.lookups")

_NAME_CHARACTERS_MAX = 128
"""The maximum length of the name of an index."""
_BUILT_NEXT = (
    "Plans keep these files until they are indexed. If the server runs table services, they index them next: see "
    "seamark services. Otherwise: seamark index build {table}"
)
_COMMANDS = {
    "build": DeferredCommand(
        "seamark.commands.build:build_command", "Build the indexes of a table for data files that are not covered."
    ),
    "verify": DeferredCommand(
        "seamark.commands.index_verify:verify_command",
        "Verify the index NAME of TABLE, or all its indexes, against the data.",
    ),
    "rebuild-registry": DeferredCommand(
        "seamark.commands.index_verify:rebuild_registry_command",
        "Register index files in a table's folder that the server does not list.",
    ),
}


@click.group(cls=DeferredGroup, deferred_commands=_COMMANDS)
def index() -> None:
    """Define, build and verify indexes of a table. Plans use indexes and column statistics to leave files out.

    \b
    For instance:
      seamark index create sales.orders --kind bitmap --columns discount
      seamark index list sales.orders
    TABLE is a namespace and a name, joined by dots; write a dot within a name as \\. .
    """


def _add_parameter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option to a command for each parameter of an index kind."""
    for parameter in list_parameters().values():
        kinds = ", ".join(list_kinds_with_parameter(parameter.name))
        help_text = f"Parameter of {kinds}: {parameter.meaning}. Default: {parameter.default:g}."
        command = click.option(f"--{parameter.name}", type=float, help=help_text)(command)
    return command


@index.command()
@click.argument("table")
@click.option("--kind", required=True, type=click.Choice(list(KINDS)))
@click.option(
    "--columns",
    required=True,
    multiple=True,
    metavar="TERM",
    help="A column or a function of a column: c, a.b, lower(c), bucket[16](c), day(ts). A record index accepts "
    "several, separated by commas. A cube, bitmap and bloom also accept attributes of dimension tables: "
    "'shop.suppliers.region via supplier_id = id'.",
)
@click.option(
    "--measures",
    multiple=True,
    metavar="MEASURE",
    help="Aggregate of a cube, such as 'sum(price * (1 - discount))' or 'count(*)'. Separate several aggregates by "
    "commas.",
)
@_add_parameter_options
@click.option("--name", help="Name of the index. Default: derived from columns and kind, or the name of the attribute.")
@server_command
def create(
    client: IndexClient,
    table: str,
    kind: str,
    columns: tuple[str, ...],
    measures: tuple[str, ...],
    name: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Define an index on TABLE.

    Plans use an index file when it is registered.
    """
    try:
        terms = tuple(part.strip() for column in columns for part in split_arguments(column))
        aggregates = tuple(part.strip() for measure in measures for part in split_arguments(measure))
    except errors.BadRequest as error:
        raise click.UsageError(error.message) from None
    index_name = name or _make_index_name(kind, terms)
    if KINDS[kind].takes_attributes:
        terms = tuple(lookups.pin_attributes(client, terms, add_partners=KINDS[kind].aggregates))
    if KINDS[kind].aggregates and (
        problem := cube_estimates.find_cube_problem(client, table, terms, aggregates, options)
    ):
        raise click.ClickException(f"{problem}; to define it nevertheless, set --shrink to a smaller number")
    new_index = client.put_index(table, index_name, kind=kind, columns=terms, measures=aggregates or None, **options)
    if as_json:
        print_json(new_index.json)
        return
    say(f"Index {new_index.name}: {new_index.definition}, {show_count(new_index.lag_files, 'data file')} to index")
    if new_index.lag_files:
        say(_BUILT_NEXT.format(table=table))


@index.command("list")
@click.argument("table")
@server_command
def list_indexes(client: IndexClient, table: str, as_json: bool) -> None:
    """List the indexes of TABLE, and how many files of the current snapshot they cover."""
    indexes = client.indexes(table)
    if as_json:
        print_json([index.json for index in indexes])
    elif not indexes:
        say(f"{table} has no indexes; create one with: seamark index create {table} --kind … --columns …")
    else:
        open_console().print(_render_indexes(indexes))
        if any(index.lag_files for index in indexes):
            say(_BUILT_NEXT.format(table=table))


@index.command()
@click.argument("table")
@click.argument("name")
@server_command
def show(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Show the index NAME of TABLE with its index files."""
    index_details = client.index(table, name)
    if as_json:
        print_json(index_details.json)
        return
    console = open_console()
    console.print(_render_indexes([index_details]))
    if usage := index_details.json.get("used"):
        console.print(
            f"Used by {show_count(usage['plans'], 'plan')} of this worker: {usage['files-removed']:,} of "
            f"{show_count(usage['files-in'], 'file')} left out.",
            highlight=False,
        )
    if index_details.audited_ms is not None:
        console.print(
            f"Audited {datetime.fromtimestamp(index_details.audited_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC.",
            highlight=False,
        )
    if files := index_details.json.get("index-files"):
        console.print(_list_files(files))


@index.command()
@click.argument("table")
@click.argument("name")
@server_command
def pause(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Pause the index NAME of TABLE: plans do not use it, and builds skip it.

    The index files are not deleted.
    """
    paused_index = client.put_index(table, name, state="paused")
    print_result(paused_index.json, f"Index {name} is paused", as_json=as_json)


@index.command()
@click.argument("table")
@click.argument("name")
@server_command
def resume(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Resume the paused index NAME of TABLE, so that plans use it again."""
    resumed_index = client.put_index(table, name, state="enabled")
    text = f"Index {name} is enabled, {show_count(resumed_index.lag_files, 'data file')} to index"
    print_result(resumed_index.json, text, as_json=as_json)


@index.command()
@click.argument("table")
@click.argument("name")
@server_command
def drop(client: IndexClient, table: str, name: str, as_json: bool) -> None:
    """Drop the index NAME of TABLE."""
    client.drop_index(table, name)
    print_result({"table": list(split_table(table)), "dropped": name}, f"Index {name} is dropped", as_json=as_json)


def _make_index_name(kind: str, columns: tuple[str, ...]) -> str:
    """Return a name made of the columns' letters, digits and underscores, and of the kind.

    Filters can name an attribute of a dimension table by its index, so this index has the name of the attribute.
    """
    if len(columns) == 1 and not KINDS[kind].aggregates and (name := lookups.find_attribute_name(columns[0])):
        return name
    words_by_column = [
        "".join(character if character.isalnum() else " " for character in column).split() for column in columns
    ]
    return "_".join([*(word for part in words_by_column for word in part if word.isascii()), kind])[
        :_NAME_CHARACTERS_MAX
    ]


def _render_indexes(indexes: list[Index]) -> Table:
    return make_table(
        ("name", "definition", "health", "files", "to index", "size"),
        (
            (
                index.name,
                index.definition,
                index.health if index.problem is None else f"{index.health}: {index.problem}",
                f"{index.files:,} of {index.files_total:,}",
                f"{index.lag_files:,}",
                show_size(index.size_bytes),
            )
            for index in indexes
        ),
        right_aligned_headers=("files", "to index", "size"),
    )


def _list_files(files: list[dict[str, Any]]) -> Table:
    return make_table(
        ("location", "state", "level", "files", "rows", "size"),
        (
            (
                file["location"],
                file["state"] if file["reason"] is None else f"{file['state']}: {file['reason']}",
                str(file["level"]),
                f"{file['files']:,}",
                f"{file['rows']:,}",
                show_size(file["size-in-bytes"]),
            )
            for file in files
        ),
        right_aligned_headers=("level", "files", "rows", "size"),
        title=show_count(len(files), "index file"),
    )
