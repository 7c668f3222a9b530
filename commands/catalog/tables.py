"""`seamark table` and `seamark undrop`: list, show, create, rename, drop and restore tables.

The commands use the running server.

Exit codes: 0 on success, 1 when the server refuses or cannot be reached, 2 for invalid arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from seamark.commands.catalog.entries import (
    NamedEntries,
    add_commands,
    find_latest_dropped,
    print_changed,
    print_properties,
)
from seamark.commands.catalog.properties import check_properties
from seamark.commands.connecting import server_command
from seamark.commands.options import parse_properties
from seamark.commands.terminal import format_local_time, print_json, print_rows, say
from seamark.connector.client.catalog import (
    create_table,
    drop_table,
    list_dropped_entries,
    rename_table,
    restore_dropped,
)
from seamark.connector.client.errors import Refused
from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import join_name
from seamark.connector.client.policies import change_table_properties
from seamark.formats.iceberg.types.near_names import find_near_names
from seamark.formats.iceberg.types.types import canonicalize_primitive
from seamark.formats.index.keys.terms import parse_term
from seamark.formats.runtime import errors

_TOTALS = {"total-records": "rows", "total-data-files": "data files", "total-delete-files": "delete files"}
_TYPES = (
    *("boolean", "int", "long", "float", "double", "decimal(9,2)", "date", "time", "timestamp", "timestamptz"),
    *("string", "uuid", "fixed[16]", "binary"),
)
_SQL_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "integer"), "int"),
    **dict.fromkeys(("varchar", "char", "text"), "string"),
    **dict.fromkeys(("varbinary", "blob", "bytes"), "binary"),
    **dict.fromkeys(("decimal", "numeric"), "decimal(9,2)"),
    **{"bigint": "long", "real": "float", "bool": "boolean", "datetime": "timestamp"},
}
"""The name of the Iceberg type by the name of the SQL type."""


@click.group()
def table() -> None:
    """List, show, create, change, rename and drop tables.

    TABLE is a namespace and a name, joined by dots; write a dot within a name as \\. .
    """


def _load_metadata(client: IndexClient, table: str) -> dict[str, Any]:
    metadata: dict[str, Any] = msgspec.json.decode(client.load_table(table).metadata)
    return metadata


_TABLES = NamedEntries("table", IndexClient.tables, _load_metadata, rename_table, drop_table, is_purgeable=True)
add_commands(table, _TABLES)


@table.command()
@click.argument("table")
@server_command
def show(client: IndexClient, table: str, as_json: bool) -> None:
    """Show the schema, the partitions, the properties and the size of TABLE."""
    metadata = _load_metadata(client, table)
    if as_json:
        print_json(metadata)
        return
    schemas = {schema["schema-id"]: schema for schema in metadata["schemas"]}
    specs = {spec["spec-id"]: spec for spec in metadata["partition-specs"]}
    fields = schemas[metadata["current-schema-id"]]["fields"]
    names = {field["id"]: field["name"] for field in fields}
    partition_terms = [
        field["name"] if field["transform"] == "identity" else f"{field['transform']}({_name_source(field, names)})"
        for field in specs[metadata["default-spec-id"]]["fields"]
    ]
    current = metadata.get("current-snapshot-id")
    snapshot = next(
        (candidate for candidate in metadata.get("snapshots", ()) if candidate["snapshot-id"] == current), None
    )
    say(f"{table}: format version {metadata['format-version']}, {metadata['location']}")
    say(f"uuid {metadata['table-uuid']}, partitioned by {', '.join(partition_terms) or 'nothing'}")
    if snapshot is None:
        say("It has no snapshot yet.")
    else:
        summary = snapshot.get("summary", {})
        totals = [f"{int(summary[key]):,} {text}" for key, text in _TOTALS.items() if summary.get(key, "").isdecimal()]
        say(f"snapshot {current} of {format_local_time(snapshot['timestamp-ms'])}: {', '.join(totals) or 'no totals'}")
    print_rows(
        ("id", "column", "type", "required"),
        (
            (str(field["id"]), field["name"], _write_type(field["type"]), "yes" if field["required"] else "")
            for field in fields
        ),
        right_aligned_headers=("id",),
    )
    print_properties(metadata)


def _name_source(field: dict[str, Any], names: dict[int, str]) -> str:
    return names.get(field.get("source-id", -1), str(field.get("source-id")))


def _write_type(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if kind["type"] == "list":
        return f"list<{_write_type(kind['element'])}>"
    if kind["type"] == "map":
        return f"map<{_write_type(kind['key'])}, {_write_type(kind['value'])}>"
    fields = (f"{field['name']}: {_write_type(field['type'])}" for field in kind["fields"])
    return f"struct<{', '.join(fields)}>"


@table.command()
@click.argument("table")
@click.option(
    "--column",
    "columns",
    metavar="NAME:TYPE",
    multiple=True,
    required=True,
    help="Column with an Iceberg type, such as id:long, price:decimal(9,2) or at:timestamptz. A ! after the type makes "
    "the column required. Repeatable.",
)
@click.option(
    "--partition",
    "partition",
    metavar="TERM",
    multiple=True,
    help="Partition field, such as c, day(ts) or bucket[16](id). Repeatable, in the order of the fields.",
)
@click.option("--property", "properties", metavar="NAME=VALUE", multiple=True, help="Set a property. Repeatable.")
@click.option("--location", help="Location of the table. Default: the server chooses a location in its warehouse.")
@server_command
def create(
    client: IndexClient,
    table: str,
    columns: tuple[str, ...],
    partition: tuple[str, ...],
    properties: tuple[str, ...],
    location: str | None,
    as_json: bool,
) -> None:
    """Create the empty table TABLE. Its namespace must exist."""
    fields = [_parse_field(number, text) for number, text in enumerate(columns, 1)]
    schema = {"type": "struct", "schema-id": 0, "fields": fields}
    table_properties = check_properties(parse_properties(properties, "--property"))
    spec = _parse_spec(partition, fields) if partition else None
    create_table(client, table, schema, partition_spec=spec, location=location, properties=table_properties)
    print_changed(client, _TABLES, table, f"Table {table} is created", as_json=as_json)


def _parse_field(number: int, text: str) -> dict[str, Any]:
    """Convert the text NAME:TYPE of an option `--column` to the JSON of a schema field.

    Raises:
        UsageError: The type is missing or unknown.
    """
    name, colon, kind = text.rpartition(":")
    if not colon or not name:
        raise click.UsageError(f"--column {text!r} has no type; write NAME:TYPE, for example id:long")
    required = kind.endswith("!")
    try:
        canonical = canonicalize_primitive(kind.rstrip("!").strip())
    except errors.BadRequest as error:
        name_of_type = kind.rstrip("!").strip().lower()
        iceberg_type = _SQL_TYPES.get(name_of_type) or next(
            iter(find_near_names(name_of_type, _TYPES, maximum=1)), None
        )
        hint = f"write {iceberg_type}" if iceberg_type else f"the types are {', '.join(_TYPES)}"
        raise click.UsageError(f"--column {text!r}: {error.message}; {hint}") from None
    return {"id": number, "name": name, "type": canonical, "required": required}


def _parse_spec(terms: Sequence[str], fields: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert the texts of the options `--partition` to the JSON of a partition spec.

    Raises:
        UsageError: A text is invalid, or names an unknown column.
    """
    ids = {field["name"]: field["id"] for field in fields}
    parts = []
    for text in terms:
        try:
            transform, column = parse_term(text)
        except errors.BadRequest as error:
            raise click.UsageError(f"--partition {text!r}: {error.message}") from None
        if column not in ids:
            raise click.UsageError(
                f"--partition {text!r}: the table has no column {column}; its columns are {', '.join(ids)}"
            )
        name = column if transform == "identity" else f"{column}_{transform.partition('[')[0]}"
        parts.append({"source-id": ids[column], "transform": transform, "name": name})
    return {"spec-id": 0, "fields": parts}


@table.command("set")
@click.argument("table")
@click.argument("properties", metavar="PROPERTY=VALUE...", nargs=-1)
@click.option("--unset", "removals", metavar="PROPERTY", multiple=True, help="Remove a property. Repeatable.")
@server_command
def set_properties(
    client: IndexClient, table: str, properties: tuple[str, ...], removals: tuple[str, ...], as_json: bool
) -> None:
    """Change properties of TABLE."""
    changes = check_properties(parse_properties(properties, "property"))
    if not changes and not removals:
        raise click.UsageError("There is nothing to change: write PROPERTY=VALUE, or use --unset PROPERTY")
    change_table_properties(client, table, changes, removals)
    print_changed(client, _TABLES, table, f"Table {table} is changed", as_json=as_json)


@click.command()
@click.argument("table", required=False)
@click.option("--id", "entry_id", help="Id of the dropped entry, if several dropped entries had the name.")
@click.option(
    "--to", metavar="NAME", help="New name of the restored entry, including its namespace. Default: the old name."
)
@server_command
def undrop(client: IndexClient, table: str | None, entry_id: str | None, to: str | None, as_json: bool) -> None:
    """Restore the dropped table or view TABLE. Without TABLE, list the entries that can be restored.

    If several dropped entries had the name, restore the entry that was dropped last.
    """
    if table is None and entry_id is None:
        _show_dropped(list(list_dropped_entries(client)), as_json=as_json)
        return
    if entry_id is None:
        assert table is not None
        entry = find_latest_dropped(client, table)
        if entry is None:
            raise click.ClickException(
                f"No dropped table or view {table} can be restored; seamark undrop lists the entries"
            )
        entry_id = str(entry["id"])
    try:
        result = restore_dropped(client, entry_id, to)
    except Refused as error:
        if error.kind != "AlreadyExistsException":
            raise
        raise click.ClickException(f"{error.message}; --to NAME restores it under another name") from None
    if as_json:
        print_json(result)
        return
    say(f"The {result['kind']} {join_name((*result['namespace'], result['name']))} is restored")


def _show_dropped(entries: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print_json(entries)
    elif not entries:
        say("There are no dropped tables or views that can be restored.")
    else:
        print_rows(
            ("name", "kind", "dropped", "until", "files", "id"),
            (
                (
                    join_name((*entry["namespace"], entry["name"])),
                    entry["kind"],
                    format_local_time(entry["dropped-ms"]),
                    format_local_time(entry["expires-ms"]),
                    "deleted then" if entry["purge"] else "kept",
                    entry["id"],
                )
                for entry in entries
            ),
        )
