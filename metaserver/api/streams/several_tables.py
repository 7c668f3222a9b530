"""Serves appends to several stream tables. Either all rows are appended or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from seamark.formats.protocol.wire import check_changeable, check_namespace, format_path
from seamark.formats.runtime.errors import BadRequest, TooLarge
from seamark.metaserver.access.rights.decisions import Securable
from seamark.metaserver.api.http.bodies import QUICK_BYTES
from seamark.metaserver.api.http.describe import BodySize, ResponseSpec, doc
from seamark.metaserver.api.http.dispatch import Call, Check, Route
from seamark.metaserver.api.streams.column_additions import add_columns, widen_target
from seamark.metaserver.api.streams.row_appends import (
    PRODUCER_PARAMETERS,
    UNKNOWN_OUTCOME,
    AppendedRows,
    RowTarget,
    append_prepared,
    load_target,
    read_producer,
)
from seamark.metaserver.store.model import TABLE, NamespacePath
from seamark.metaserver.streams.appends import TableRows
from seamark.metaserver.streams.incoming.new_columns import NO_COLUMNS, find_missing_columns
from seamark.metaserver.streams.incoming.prepared_rows import PreparedRows
from seamark.metaserver.streams.incoming.rows import RowFormat, decode_rows
from seamark.metaserver.streams.incoming.sizes import DECODED_BYTES_MAX, check_columns

TABLES_MAX = 100
"""The maximum number of tables of one request."""
_ALL_TABLES = "tables"
"""The scope of producers of this route, in place of the UUID of a table."""


class RowsOfTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows for one table."""

    namespace: tuple[str, ...]
    name: str
    rows: Annotated[msgspec.Raw, doc("The rows as JSON, in the form of an append to one table.", type="array")]


class RowsOfTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that appends rows to several tables."""

    tables: Annotated[
        list[RowsOfTable],
        doc(f"The tables with their rows. There are at most {TABLES_MAX}, and none is repeated."),
    ]


class AppendedToTables(msgspec.Struct, frozen=True):
    """The result of an append to several tables."""

    tables: Annotated[list[AppendedRows], doc("The result for each table, in the order of the request.")]


@Route(
    "POST",
    "/api/v1/rows",
    "appendRowsToTables",
    "Append JSON rows to several stream tables, all or none, and answer when they are durable",
    check=Check.SOMEWHERE,
    tags=("streams",),
    parameters=PRODUCER_PARAMETERS,
    body_size=BodySize.LARGE,
    answers=(
        ResponseSpec(200, "The rows of all tables are durable", AppendedToTables),
        ResponseSpec(400, "A table is not a stream table, or a row does not fit. No row was appended"),
        ResponseSpec(403, "The caller may not append rows to one of the tables"),
        ResponseSpec(404, "A table does not exist"),
        ResponseSpec(409, "The sequence does not follow the producer's last sequence. No row was appended"),
        ResponseSpec(413, "There are too many rows, or the decoded rows are too large. No row was appended"),
        ResponseSpec(429, "The memory for rows is full. No row was appended"),
        UNKNOWN_OUTCOME,
    ),
).takes(RowsOfTables)
async def append_rows_to_tables(call: Call, body: RowsOfTables) -> AppendedToTables:
    """Append rows to several stream tables, all or none.

    The rows of a large body first wait for room in the memory of their tables.
    """
    if not 1 <= len(body.tables) <= TABLES_MAX:
        raise BadRequest(f"tables has {len(body.tables)} tables; name 1 to {TABLES_MAX}")
    names = [(check_namespace(table.namespace), table.name) for table in body.tables]
    await call.allow(*dict.fromkeys(Securable(namespace, TABLE, name) for namespace, name in names))
    producer = read_producer(call.query)
    for _, name in names:
        check_changeable(name)
    if call.body_bytes <= QUICK_BYTES:
        return await _append_to_named(call, body, names, producer)
    targets = [await load_target(call, namespace, name) for namespace, name in names]
    _check_distinct(names, targets)
    body_parts = [
        (target.loaded, memoryview(table.rows).nbytes) for target, table in zip(targets, body.tables, strict=True)
    ]
    async with call.components.streams.body_room.reserve(body_parts, call.principal.name):
        return await _append_to_named(call, body, names, producer)


def _check_distinct(names: Sequence[tuple[NamespacePath, str]], targets: Sequence[RowTarget]) -> None:
    """Check that a request names no table twice.

    Raises:
        BadRequest: Two names refer to the same table.
    """
    uuids: set[str] = set()
    for (namespace, name), target in zip(names, targets, strict=True):
        if target.uuid in uuids:
            raise BadRequest(f"tables names {format_path(namespace, name)} twice; send all its rows together")
        uuids.add(target.uuid)


async def _append_to_named(
    call: Call,
    body: RowsOfTables,
    names: Sequence[tuple[NamespacePath, str]],
    producer: tuple[str, int] | None,
) -> AppendedToTables:
    """Append the rows of a request to the current state of its tables.

    The rows of all tables are prepared first, so that a row that does not fit changes no table.

    Raises:
        NoSuchTable: A table does not exist.
        BadRequest: A row does not fit, a table is named twice or is not a stream table, or a dead-letter table cannot
            be used.
        Forbidden: The caller may not change a table, or append rows to its dead-letter table.
        CommitUnknown: It is unknown whether the log has the rows.
        TooLarge: The decoded rows have more than `DECODED_BYTES_MAX` bytes.
    """
    requests: list[_TableRequest] = []
    size_bytes = 0
    for (namespace, name), table in zip(names, body.tables, strict=True):
        target = await load_target(call, namespace, name)
        _check_distinct(names[: len(requests) + 1], [*(request.target for request in requests), target])
        request = _TableRequest(call, namespace, name, target, bytes(table.rows))
        await request.prepare()
        requests.append(request)
        size_bytes += request.size_bytes
        if size_bytes > DECODED_BYTES_MAX:
            raise TooLarge(
                f"The decoded rows have more than {DECODED_BYTES_MAX:,} bytes; send them in several requests"
            )
    for request in requests:  # All rows fit now, so a refused request adds no columns.
        await request.add_columns()
    rows_by_target = [(request.target, request.prepared) for request in requests]
    answers = await append_prepared(call, rows_by_target, producer, scope=_ALL_TABLES)
    return AppendedToTables(answers)


class _TableRequest:
    """Prepares the rows of one table of a request."""

    def __init__(self, call: Call, namespace: NamespacePath, name: str, target: RowTarget, rows_json: bytes) -> None:
        self._call = call
        self._namespace = namespace
        self._name = name
        self._rows_json = rows_json
        self._decoded_rows: list[Any] = []
        self._missing = NO_COLUMNS
        self.target = target
        self.prepared = PreparedRows(0, None, [])

    @property
    def size_bytes(self) -> int:
        batches = self.prepared.batches
        return 0 if batches is None else TableRows(self.target.loaded, batches).size_bytes

    async def prepare(self) -> None:
        """Prepare the rows for the table with the columns that it has or gets.

        Raises:
            BadRequest: A row does not fit, or a column cannot be added.
            Forbidden: The table lacks columns, and the caller may not change it.
        """
        await self._run_work(self._decode_and_compare_columns)
        target = self.target
        if self._missing.types:
            securable = Securable(self._namespace, TABLE, self._name)
            target = await widen_target(self._call, target, securable, self._missing.types)
        await self._run_work(partial(self._prepare_for_table, target))

    async def add_columns(self) -> None:
        """Add the columns that the table lacks, and prepare the rows for the changed table."""
        if self._missing.types:
            self.target = await add_columns(self._call, self.target, self._namespace, self._name, self._missing.types)
            await self._run_work(partial(self._prepare_for_table, self.target))

    async def _run_work(self, work: Callable[[], None]) -> None:
        """Run work in a thread if the rows are many."""
        if len(self._rows_json) <= QUICK_BYTES:
            work()
        else:
            await self._call.run_in_turn(work)

    def _decode_and_compare_columns(self) -> None:
        """Decode the rows, and find their columns that the table does not have."""
        rows_max, metadata = self._call.components.settings.stream_rows_limit, self.target.loaded.metadata
        self._decoded_rows = decode_rows(self._rows_json, RowFormat.JSON, rows_max=rows_max)
        self._missing = find_missing_columns(self._decoded_rows, metadata, format_path(self._namespace, self._name))

    def _prepare_for_table(self, target: RowTarget) -> None:
        """Prepare the decoded rows for a table.

        Columns that have no values and that the table does not have are left out. Other missing columns are added to
        the table later. The rows are then prepared a second time, for the table with these columns.
        """
        check_columns(len(self._decoded_rows), target.loaded.metadata)
        self.prepared = target.make_preparation(self._call, left_out=self._missing.empty).prepare_json(
            self._decoded_rows
        )
        if not self._missing.types:
            self._decoded_rows = []  # They take more memory than the prepared rows, and are not needed again.
