"""The route that appends rows to several stream tables: all rows, or no rows."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from seamark.formats.protocol.wire import check_changeable, check_namespace, show
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.streams.row_appends import (
    PRODUCER_PARAMETERS,
    AppendedRows,
    RowTarget,
    append_prepared,
    load_target,
    read_producer,
)
from seamark.metaserver.streams.appends import TableRows
from seamark.metaserver.streams.incoming.prepared_rows import PreparedRows, RowPreparation
from seamark.metaserver.streams.incoming.rows import RowFormat, decode_rows
from seamark.metaserver.streams.incoming.sizes import DECODED_BYTES_MAX, check_columns

TABLES_MAX = 100
"""The maximum number of tables of one request."""
_ALL_TABLES = "tables"
"""The scope of producers of this route, in place of the UUID of a table."""


class RowsOfTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    namespace: tuple[str, ...]
    name: str
    rows: Annotated[msgspec.Raw, doc("JSON rows, as for one table.", type="array")]


class RowsOfTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tables: Annotated[list[RowsOfTable], doc(f"At most {TABLES_MAX} tables, each once.")]


class AppendedToTables(msgspec.Struct, frozen=True):
    tables: Annotated[list[AppendedRows], doc("In the order of the request.")]


@Route(
    "POST",
    "/api/v1/rows",
    "appendRowsToTables",
    "Appends JSON rows to several stream tables, all or none; they are durable with the answer",
    check=Check.SOMEWHERE,
    tags=("streams",),
    parameters=PRODUCER_PARAMETERS,
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(200, "The rows of all tables are durable", AppendedToTables),
        ResponseSpec(400, "A table is not a stream table, or a row does not fit; no row was appended"),
        ResponseSpec(403, "The caller may not append rows to one of the tables"),
        ResponseSpec(404, "No such table"),
        ResponseSpec(409, "The sequence does not follow the producer's last sequence; no row was appended"),
        ResponseSpec(413, "Too many rows, or the decoded rows are too large; no row was appended"),
        ResponseSpec(429, "The memory for rows is full; no row was appended"),
    ),
).takes(RowsOfTables)
async def append_rows_to_tables(call: Call, body: RowsOfTables) -> AppendedToTables:
    if not 1 <= len(body.tables) <= TABLES_MAX:
        raise BadRequest(f"tables has {len(body.tables)} tables; name 1 to {TABLES_MAX}")
    names = [(check_namespace(table.namespace), table.name) for table in body.tables]
    call.allow(*dict.fromkeys(namespace for namespace, _ in names))
    producer = read_producer(call.query)
    prepared: list[tuple[RowTarget, PreparedRows]] = []
    size_bytes = 0
    for (namespace, name), table in zip(names, body.tables, strict=True):
        check_changeable(name)
        target = await load_target(call, namespace, name)
        if any(target.uuid == other.uuid for other, _ in prepared):
            raise BadRequest(f"tables names {show(namespace, name)} twice; send all its rows together")
        text = bytes(table.rows)
        prepare = partial(_prepare, text, target.make_preparation(call), call.components.settings.stream_rows_limit)
        rows = prepare() if len(text) <= QUICK_BYTES else await call.in_turn(prepare)
        prepared.append((target, rows))
        size_bytes += 0 if rows.batches is None else TableRows(target.loaded, rows.batches).size_bytes
        if size_bytes > DECODED_BYTES_MAX:
            raise TooLarge(
                f"The decoded rows have more than {DECODED_BYTES_MAX:,} bytes; send them in several requests"
            )
    answers = await append_prepared(call, prepared, producer, scope=_ALL_TABLES)
    return AppendedToTables(answers)


def _prepare(text: bytes, preparation: RowPreparation, rows_max: int) -> PreparedRows:
    rows = decode_rows(text, RowFormat.JSON, rows_max=rows_max)
    check_columns(len(rows), preparation.metadata)
    return preparation.prepare_json(rows)
