"""Serves the current rows with requested keys, including rows that wait for a flush."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from aiohttp import web

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.schema import Field
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.formats.runtime.repetitions import find_repeated
from seamark.metaserver.access.principal import ANONYMOUS
from seamark.metaserver.api.formats.arrow import ARROW_STREAM, wants_arrow
from seamark.metaserver.api.formats.json_rows import write_json_rows
from seamark.metaserver.api.http.describe import ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Answer, Call, Route
from seamark.metaserver.api.http.fresh_reads import check_required_rows, load_fresh
from seamark.metaserver.api.http.parameters.fresh import AFTER
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.streams.incoming.rows import to_batch
from seamark.metaserver.streams.keyed_gets import KeyedRowsAnswer
from seamark.metaserver.streams.keys import find_key_columns

KEYS_MAX = 1_000
"""The maximum number of keys of one request."""
_IN_LOOP_ROWS_MAX = 200
"""The maximum number of rows that are encoded on the event loop."""
_IN_LOOP_VALUES_MAX = 200
"""The maximum number of values of keys that are decoded on the event loop."""


class GetRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for the rows with some keys."""

    keys: Annotated[
        list[Any],
        doc(
            f"The keys, at most {KEYS_MAX:,}. A key is an object with a value for each column, or the value itself if "
            "the key of the table has one column. Values have the form of appended rows.",
            examples=[[17, 18], [{"day": "2026-01-31", "id": 5}]],
        ),
    ]
    select: Annotated[list[str] | None, doc("The columns to return. By default, all columns are returned.")] = None


class RowsOfKeys(msgspec.Struct, frozen=True):
    """The rows with the requested keys."""

    rows: Annotated[
        list[dict[str, Any]],
        doc("The rows in the order of the keys. A row is an object with a value for each column."),
    ]
    missing: Annotated[list[int], doc("The positions, from 0, of the keys that have no row.")]


@Route(
    "POST",
    "/api/v1/tables/{namespace}/{table}/rows/get",
    "getRows",
    "Return the current rows with some keys, including rows that wait for a flush",
    tags=("streams",),
    parameters=(AFTER,),
    answers=(
        ResponseSpec(
            200,
            "The rows. With `Accept: application/vnd.apache.arrow.stream`, they are an Arrow IPC stream with "
            "`missing` in the metadata of its schema",
            RowsOfKeys,
        ),
        ResponseSpec(400, "A key does not fit its columns, a column is unknown, or the rows are encrypted"),
        ResponseSpec(404, "The table does not exist"),
        ResponseSpec(406, "The client accepts neither JSON nor Arrow"),
        ResponseSpec(
            413, "The request has too many keys, or there are too many rows or files, or the rows are too large"
        ),
        ResponseSpec(503, "This server does not have the rows of a token yet"),
    ),
).takes(GetRows)
async def get_rows(call: Call, body: GetRows) -> Answer:
    """Return the current rows with the requested keys."""
    accepts_arrow = wants_arrow(call.headers)
    if len(body.keys) > KEYS_MAX:
        raise TooLarge(f"keys has {len(body.keys):,} keys; the limit is {KEYS_MAX:,}; send several requests")
    loaded_table = await call.components.catalog.tables.load(call.namespace, call.name)
    entry, metadata = loaded_table.entry, loaded_table.metadata
    assert entry is not None
    fields = _select_fields(metadata, body.select)
    read_keys = partial(_read_keys, metadata, body.keys)
    value_count = sum(len(key) if isinstance(key, dict) else 1 for key in body.keys)
    keys = read_keys() if value_count <= _IN_LOOP_VALUES_MAX else await call.run_in_turn(read_keys)
    if entry.flushed:
        loaded_table = (await load_fresh(call, entry, metadata)).loaded
    else:
        check_required_rows(call.headers, entry, {})
    answer = await _get_keyed_rows(call, loaded_table, keys, [field.name for field in fields])
    encode = partial(_encode_arrow if accepts_arrow else _encode_json, answer, fields)
    answer_bytes = encode() if answer.rows.num_rows <= _IN_LOOP_ROWS_MAX else await call.run_in_turn(encode)
    content_type = ARROW_STREAM if accepts_arrow else "application/json"
    return web.Response(body=answer_bytes, content_type=content_type, headers={"Vary": "Accept"})


async def _get_keyed_rows(
    call: Call, loaded_table: LoadedTable, keys: pa.RecordBatch | None, columns: Sequence[str]
) -> KeyedRowsAnswer:
    """Return these columns of the rows with the keys. The rows come from the log and from the files of the table.

    If there are no keys (None), the answer has no rows.
    """
    if keys is None:
        return KeyedRowsAnswer(pa.table({name: pa.nulls(0) for name in columns}), [])
    principal = None if call.principal.name == ANONYMOUS.name else call.principal.name
    return await call.components.streams.gets.get(loaded_table, keys, columns, principal)


def _select_fields(metadata: TableMetadata, names: Sequence[str] | None) -> list[Field]:
    """Return the columns to read.

    Raises:
        BadRequest: A column is unknown or repeated, or the list of columns is empty.
    """
    by_name = {field.name: field for field in metadata.current_schema.fields}
    if names is None:
        return list(by_name.values())
    if not names:
        raise BadRequest("select has no column; name a column, or omit select")
    if len(names) > len(by_name):
        raise BadRequest(
            f"select has {len(names):,} columns, and the table has {len(by_name):,}; name each column of the table at "
            "most once"
        )
    if (repeated_name := find_repeated(names)) is not None:
        raise BadRequest(f"select has the column {repeated_name[:100]} twice; name each column once")
    if unknown_names := [name for name in names if name not in by_name]:
        raise BadRequest(
            f"select has the column {unknown_names[0][:100]!r}, which the table does not have; it has "
            f"{', '.join(by_name)[:500]}"
        )
    return [by_name[name] for name in names]


def _read_keys(metadata: TableMetadata, keys: Sequence[Any]) -> pa.RecordBatch | None:
    """Return keys with their columns, or None if there are no keys.

    Raises:
        BadRequest: A key does not fit, or the keys have different columns.
    """
    if not keys:
        return None
    objects: Sequence[Mapping[str, Any]]
    if isinstance(keys[0], dict):
        objects = keys
    else:
        key_columns = find_key_columns(metadata)
        if len(key_columns) != 1:
            key_text = f"the key has the columns {', '.join(key_columns)}" if key_columns else "the table has no key"
            raise BadRequest(f"keys[0] is not an object, and {key_text}; send each key as an object by column")
        objects = [{key_columns[0]: value} for value in keys]
    for number, key_object in enumerate(objects):
        if not isinstance(key_object, dict) or not key_object:
            raise BadRequest(f"keys[{number}] names no column; send each key as an object by column")
        if key_object.keys() != objects[0].keys():
            raise BadRequest(f"keys[{number}] has other columns than keys[0]; send the same columns in each key")
        if any(value is None for value in key_object.values()):
            raise BadRequest(f"keys[{number}] has a null; a key must not have nulls")
    kinds = {field.name: field.type for field in metadata.current_schema.fields}
    for name in objects[0]:
        if not isinstance(kinds.get(name, ""), str):  # `to_batch` reports unknown columns.
            raise BadRequest(
                f"keys has the column {name[:100]!r}, but a struct, list or map cannot be in a key; leave the column "
                "out"
            )
    try:
        return to_batch(objects, metadata.current_schema)
    except BadRequest as error:
        raise BadRequest(f"keys: {error.message}") from None


def _encode_json(answer: KeyedRowsAnswer, fields: Sequence[Field]) -> bytes:
    """Return the JSON answer."""
    return msgspec.json.encode(RowsOfKeys(write_json_rows(answer.rows, fields), answer.missing))


def _encode_arrow(answer: KeyedRowsAnswer, fields: Sequence[Field]) -> bytes:
    """Return the answer as an Arrow stream."""
    rows = answer.rows.replace_schema_metadata({"missing": msgspec.json.encode(answer.missing)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows.combine_chunks())
    return bytes(sink.getvalue())
