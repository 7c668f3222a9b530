"""`seamark table` and `seamark undrop`: list, show, create, rename, drop and restore tables through the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click
import msgspec

from seamark.connector.client.catalog import (
    create_table,
    drop_table,
    dropped_entries,
    rename_table,
    restore_dropped,
)
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name, split_name, split_table
from seamark.connector.client.policies import change_table_properties
from seamark.metaserver import errors
from seamark.metaserver.cli.catalog.output import (
    json_option,
    parse_properties,
    print_json,
    print_rows,
    time_text,
)
from seamark.metaserver.cli.index import server_options
from seamark.metaserver.cli.options import CONTEXT
from seamark.metaserver.cli.terminal import say
from seamark.metaserver.iceberg.types.types import canonical_primitive
from seamark.metaserver.index.keys.terms import parse_term

_TOTALS = {"total-records": "rows", "total-data-files": "data files", "total-delete-files": "delete files"}


@click.group(context_settings=CONTEXT)
def table() -> None:
    """Lists, shows, creates, changes, renames and drops tables.

    TABLE is a namespace and a name, joined by dots; a dot within a name is written \\. .
    """


@table.command("list", context_settings=CONTEXT)
@click.argument("namespace", required=False)
@json_option
@server_options
def list_tables(client: IndexClient, namespace: str | None, as_json: bool) -> None:
    """Lists the tables of NAMESPACE, or all tables that you may see."""
    tables = sorted(_tables(client, namespace))
    if as_json:
        print_json([list(name) for name in tables])
        return
    if not tables:
        say("There are no tables." if namespace is None else f"{namespace} has no tables.")
    for name in tables:
        say(join_name(name))


def _tables(client: IndexClient, namespace: str | None) -> Iterator[tuple[str, ...]]:
    for levels in client.namespaces() if namespace is None else [split_name(namespace)]:
        yield from client.tables(levels)


@table.command(context_settings=CONTEXT)
@click.argument("table")
@json_option
@server_options
def show(client: IndexClient, table: str, as_json: bool) -> None:
    """Shows the schema, the partitions, the properties and the size of TABLE."""
    metadata: dict[str, Any] = msgspec.json.decode(client.load_table(table).metadata)
    if as_json:
        print_json(metadata)
        return
    schemas = {schema["schema-id"]: schema for schema in metadata["schemas"]}
    specs = {spec["spec-id"]: spec for spec in metadata["partition-specs"]}
    fields = schemas[metadata["current-schema-id"]]["fields"]
    names = {field["id"]: field["name"] for field in fields}
    parts = [
        field["name"] if field["transform"] == "identity" else f"{field['transform']}({_source(field, names)})"
        for field in specs[metadata["default-spec-id"]]["fields"]
    ]
    current = metadata.get("current-snapshot-id")
    snapshot = next((one for one in metadata.get("snapshots", ()) if one["snapshot-id"] == current), None)
    say(f"{table}: format version {metadata['format-version']}, {metadata['location']}")
    say(f"uuid {metadata['table-uuid']}, partitioned by {', '.join(parts) or 'nothing'}")
    if snapshot is None:
        say("It has no snapshot yet.")
    else:
        summary = snapshot.get("summary", {})
        totals = [f"{int(summary[key]):,} {text}" for key, text in _TOTALS.items() if summary.get(key, "").isdecimal()]
        say(f"snapshot {current} of {time_text(snapshot['timestamp-ms'])}: {', '.join(totals) or 'no totals'}")
    print_rows(
        ("id", "column", "type", "required"),
        ((str(f["id"]), f["name"], _type_text(f["type"]), "yes" if f["required"] else "") for f in fields),
        numbers=("id",),
    )
    if properties := metadata.get("properties"):
        print_rows(("property", "value"), sorted(properties.items()))


def _source(field: dict[str, Any], names: dict[int, str]) -> str:
    return names.get(field.get("source-id", -1), str(field.get("source-id")))


def _type_text(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if kind["type"] == "list":
        return f"list<{_type_text(kind['element'])}>"
    if kind["type"] == "map":
        return f"map<{_type_text(kind['key'])}, {_type_text(kind['value'])}>"
    fields = (f"{field['name']}: {_type_text(field['type'])}" for field in kind["fields"])
    return f"struct<{', '.join(fields)}>"


@table.command(context_settings=CONTEXT)
@click.argument("table")
@click.option(
    "--column",
    "columns",
    metavar="NAME:TYPE",
    multiple=True,
    required=True,
    help="A column with an Iceberg type: id:long, price:decimal(9,2), at:timestamptz. With ! after the type it is "
    "required. Repeatable.",
)
@click.option(
    "--partition", "partition", metavar="TERM", multiple=True, help="c, day(ts), bucket[16](id); repeatable, in order."
)
@click.option("--property", "properties", metavar="NAME=VALUE", multiple=True, help="A property; repeatable.")
@click.option("--location", help="Default: chosen by the server in its warehouse.")
@server_options
def create(
    client: IndexClient,
    table: str,
    columns: tuple[str, ...],
    partition: tuple[str, ...],
    properties: tuple[str, ...],
    location: str | None,
) -> None:
    """Creates TABLE, empty. The namespace must exist."""
    fields = [_field(number, text) for number, text in enumerate(columns, 1)]
    schema = {"type": "struct", "schema-id": 0, "fields": fields}
    given = parse_properties(properties, "--property")
    spec = _spec(partition, fields) if partition else None
    create_table(client, table, schema, partition_spec=spec, location=location, properties=given)
    say(f"Table {table} is created")


def _field(number: int, text: str) -> dict[str, Any]:
    name, colon, kind = text.rpartition(":")
    if not colon or not name:
        raise click.UsageError(f"--column {text!r} has no type; write NAME:TYPE, for example id:long")
    required = kind.endswith("!")
    try:
        canonical = canonical_primitive(kind.rstrip("!").strip())
    except errors.BadRequest as error:
        raise click.UsageError(f"--column {text!r}: {error.message}") from None
    return {"id": number, "name": name, "type": canonical, "required": required}


def _spec(terms: Sequence[str], fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ids = {field["name"]: field["id"] for field in fields}
    parts = []
    for text in terms:
        try:
            transform, column = parse_term(text)
        except errors.BadRequest as error:
            raise click.UsageError(f"--partition {text!r}: {error.message}") from None
        if column not in ids:
            raise click.UsageError(f"--partition {text!r}: there is no column {column}; there are {', '.join(ids)}")
        name = column if transform == "identity" else f"{column}_{transform.partition('[')[0]}"
        parts.append({"source-id": ids[column], "transform": transform, "name": name})
    return {"spec-id": 0, "fields": parts}


@table.command("set", context_settings=CONTEXT)
@click.argument("table")
@click.argument("properties", metavar="PROPERTY=VALUE...", nargs=-1)
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property; repeatable.")
@server_options
def set_properties(client: IndexClient, table: str, properties: tuple[str, ...], removals: tuple[str, ...]) -> None:
    """Changes properties of TABLE."""
    changes = parse_properties(properties, "property")
    if not changes and not removals:
        raise click.UsageError("Give PROPERTY=VALUE or --unset PROPERTY")
    change_table_properties(client, table, changes, removals)
    say(f"Table {table} is changed")


@table.command(context_settings=CONTEXT)
@click.argument("table")
@click.argument("new_name")
@server_options
def rename(client: IndexClient, table: str, new_name: str) -> None:
    """Renames TABLE to NEW_NAME, which has a namespace too. Its files stay where they are."""
    rename_table(client, table, new_name)
    say(f"Table {table} is now {new_name}")


@table.command(context_settings=CONTEXT)
@click.argument("table")
@click.option("--purge", is_flag=True, help="Delete its files after the retention.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@server_options
def drop(client: IndexClient, table: str, purge: bool, yes: bool) -> None:
    """Drops TABLE. `seamark undrop` restores it within the server's retention."""
    client.load_table(table)  # a name with a typing error is no question
    if not yes:
        click.confirm(f"Drop {table}{' and delete its files after the retention' if purge else ''}?", abort=True)
    drop_table(client, table, purge=purge)
    entry = _latest_dropped(client, table)
    until = "" if entry is None else f" until {time_text(entry['expires-ms'])}"
    say(f"Table {table} is dropped; seamark undrop {table} restores it{until}")


@click.command(context_settings=CONTEXT)
@click.argument("table", required=False)
@click.option("--id", "entry_id", help="The id of the dropped entry, if several had the name.")
@click.option("--to", metavar="NAME", help="Restore it under another name, with its namespace.")
@json_option
@server_options
def undrop(client: IndexClient, table: str | None, entry_id: str | None, to: str | None, as_json: bool) -> None:
    """Restores the dropped table or view TABLE; without TABLE, lists what can be restored.

    If several had the name, the latest is restored.
    """
    if table is None and entry_id is None:
        _show_dropped(list(dropped_entries(client)), as_json=as_json)
        return
    if entry_id is None:
        assert table is not None
        entry = _latest_dropped(client, table)
        if entry is None:
            raise click.ClickException(f"No dropped table or view {table} can be restored; seamark undrop lists them")
        entry_id = str(entry["id"])
    restored = restore_dropped(client, entry_id, to)
    if as_json:
        print_json(restored)
        return
    say(f"The {restored['kind']} {join_name((*restored['namespace'], restored['name']))} is restored")


def _latest_dropped(client: IndexClient, table: str) -> dict[str, Any] | None:
    """Of its namespace alone: a user may have no right in the others."""
    levels = split_table(table)
    matches = [entry for entry in dropped_entries(client, levels[:-1]) if entry["name"] == levels[-1]]
    return max(matches, key=lambda entry: int(entry["dropped-ms"]), default=None)


def _show_dropped(entries: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(entries)
    elif not entries:
        say("Nothing was dropped that can be restored.")
    else:
        print_rows(
            ("name", "kind", "dropped", "until", "files", "id"),
            (
                (
                    join_name((*entry["namespace"], entry["name"])),
                    entry["kind"],
                    time_text(entry["dropped-ms"]),
                    time_text(entry["expires-ms"]),
                    "deleted then" if entry["purge"] else "kept",
                    entry["id"],
                )
                for entry in entries
            ),
        )
