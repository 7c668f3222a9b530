"""Runs DuckDB in this process on record batches from Seamark's reader, without extensions, files or network access.

The reader (`connector/read/`) reads the files of a plan, applies deletes, and selects rows and columns. DuckDB joins,
groups and sorts. The text that DuckDB runs is created by the translation (`queries.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from seamark.connector.client.errors import ClientError, InvalidRequest, ServerFailed
from seamark.connector.cubes.sketch_calls import COUNT_SKETCHES
from seamark.connector.duckdb.sketch_functions import create_functions
from seamark.connector.read.read_plan import ReadPlan
from seamark.connector.read.scans import TaskReader
from seamark.connector.sql.reads import PlannedTableRead, extract_row_filter
from seamark.connector.sql.types import UUID, SqlType
from seamark.formats.iceberg.files.parquet import EncryptedFile, Unreadable

BATCH_ROWS = 16_384
POSITION_BITS = 40
"""The number of low bits of a place, which contain the row's position in its file.

The higher bits contain the index of the file in the plan.
"""
_BODY = re.compile(r"body: (?=\{)")
"""The text before the body of a catalog's response in an error of DuckDB's Iceberg extension."""
_MESSAGE_START = re.compile(r'endpoint returned response code \S+ with message "')
"""The text before the message of a catalog, which ends with a quote at the end of the error."""
_NO_COLUMNS = pa.schema([("nothing", pa.bool_())])
"""The schema of a stream of which no column is used. Its column of nulls carries the number of rows."""
_CONFIG = {
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "allow_community_extensions": "false",
    "python_enable_replacements": "false",
    "temp_directory": "",
    "integer_division": "false",
    "default_null_order": "nulls_last",
    # With this setting, DuckDB streams the rows of a query with LIMIT (`queries.py`).
    "preserve_insertion_order": "false",
}


class DuckDBFailed(ServerFailed):
    """Raised if DuckDB failed because of a bug in DuckDB. Its database can no longer be used."""


@dataclass(frozen=True)
class DuckDBLimits:
    """The limits of a DuckDB database."""

    memory_bytes: int = 2 << 30
    threads: int = 0
    """The number of threads. 0 means one for each core."""


def open_connection(limits: DuckDBLimits) -> duckdb.DuckDBPyConnection:
    """Open a DuckDB database that cannot open files or network connections. Statements cannot change its settings.

    The settings are locked last, because the lock also applies to this function.
    """
    config: dict[str, Any] = {**_CONFIG, "memory_limit": f"{limits.memory_bytes}B"}
    if limits.threads:
        config["threads"] = limits.threads
    con = duckdb.connect(":memory:", config=config)
    con.execute("SET TimeZone = 'UTC'")
    con.execute("SET enable_external_access = false")
    con.execute("SET lock_configuration = true")
    return con


class TableStream:
    """A stream of a table's rows for DuckDB. Each scan of the stream reads the files again."""

    def __init__(self, table_read: PlannedTableRead) -> None:
        self._read = table_read
        table = table_read.table
        self._names = [name for name in table.columns if name in table.used]
        numbers = {name: number for number, name in enumerate(table.columns)}
        self._new_names = [f"c{numbers[name]}" for name in self._names]
        stored_names = tuple(name for name in self._names if name != table.place)
        self._has_places = len(stored_names) < len(self._names)
        row_filter = extract_row_filter(table_read.where)
        self._plan = ReadPlan(
            table_read.open_table.metadata,
            table_read.open_table.schema,
            stored_names,
            row_filter,
            positions=self._has_places,
        )
        self._types = [
            _with_uuid_types(field.type, table.columns[name])
            for name, field in zip(self._names, self._plan.arrow, strict=True)
        ]
        self._uuids = [number for number, name in enumerate(self._names) if table.columns[name] == UUID]
        self.failure: Exception | None = None

    @property
    def has_uuids(self) -> bool:
        return bool(self._uuids)

    def write_columns(self) -> str:
        """Return the columns for a SELECT that reads the stream.

        DuckDB pushes the keys of joins and scalar subqueries into an Arrow scan, and fails if they are UUIDs. It pushes
        only keys that are plain columns.
        """
        return ", ".join(
            f"coalesce({name}, NULL) AS {name}" if number in self._uuids else name
            for number, name in enumerate(self._new_names)
        )

    @property
    def schema(self) -> pa.Schema:
        if not self._names:
            return _NO_COLUMNS
        return pa.schema(list(zip(self._new_names, self._types, strict=True)))

    def __arrow_c_schema__(self) -> object:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return pa.RecordBatchReader.from_batches(self.schema, self._read_batches()).__arrow_c_stream__(requested_schema)

    def _read_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the scan tasks. An error is stored in `failure`, from which the caller raises it again."""
        reader = TaskReader(self._plan, self._read.open_table.storage)
        schema = self.schema
        try:
            for number, task in enumerate(self._read.tasks):
                for batch in reader.read(task):
                    yield self._convert(batch, schema, number)
        except Exception as error:
            self.failure = error  # DuckDB reports an error of a stream only as text.
            raise

    def _convert(self, batch: pa.RecordBatch, schema: pa.Schema, number: int) -> pa.RecordBatch:
        """Return a batch of rows with the columns of the relation.

        A relation without columns gets a column of nulls, because DuckDB needs one to count rows. The column of places
        combines the index of the scan task, in the high bits, with the position of the row in its file.

        Args:
            batch: The rows that the reader has returned.
            schema: The schema of the relation.
            number: The index of the scan task in the plan.
        """
        if not self._names:
            return pa.RecordBatch.from_arrays([pa.nulls(batch.num_rows, pa.bool_())], schema=schema)
        columns = [
            column if column.type == kind else column.cast(kind)
            for column, kind in zip(batch.columns, self._types, strict=True)
        ]
        if self._has_places:
            columns[-1] = pa.array(columns[-1].to_numpy() + (number << POSITION_BITS))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _with_uuid_types(arrow: pa.DataType, kind: SqlType) -> pa.DataType:
    """Return an Arrow type with Arrow's type for UUIDs instead of 16 bytes, also within structs, lists and maps.

    Args:
        arrow: The type that the reader returns, which has UUIDs as 16 bytes.
        kind: The same type in the dialect.
    """
    if kind == UUID:
        return pa.uuid()
    if pa.types.is_struct(arrow) and len(kind.fields) == arrow.num_fields:
        return pa.struct(
            [
                field.with_type(_with_uuid_types(field.type, field_kind))
                for field, (_, field_kind) in zip(arrow, kind.fields, strict=True)
            ]
        )
    if pa.types.is_map(arrow) and kind.key is not None and kind.element is not None:
        key, item = arrow.key_field, arrow.item_field
        return pa.map_(
            key.with_type(_with_uuid_types(key.type, kind.key)),
            item.with_type(_with_uuid_types(item.type, kind.element)),
        )
    if pa.types.is_list(arrow) and kind.element is not None:
        return pa.list_(arrow.value_field.with_type(_with_uuid_types(arrow.value_type, kind.element)))
    return arrow


@contextmanager
def register_tables(con: duckdb.DuckDBPyConnection, reads: Sequence[PlannedTableRead]) -> Iterator[list[TableStream]]:
    """Register the tables in DuckDB under their names in the translation."""
    with ExitStack() as stack:
        yield [stack.enter_context(register_stream(con, table_read.table.name, table_read)) for table_read in reads]


@contextmanager
def register_stream(con: duckdb.DuckDBPyConnection, name: str, table_read: PlannedTableRead) -> Iterator[TableStream]:
    """Register the rows of a read in DuckDB under this name, which replaces the name of its table.

    If the rows have UUIDs, the name is that of a view over the rows, because DuckDB pushes the keys of joins into an
    Arrow scan, and fails if they are UUIDs. It pushes only keys that are plain columns, and the view computes its UUIDs
    by a call.
    """
    stream = TableStream(table_read)
    with ExitStack() as stack:
        registered_name = f"{name}_rows" if stream.has_uuids else name
        con.register(registered_name, stream)
        stack.callback(con.unregister, registered_name)
        if stream.has_uuids:
            columns = stream.write_columns()
            con.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS SELECT {columns} FROM {registered_name}")  # noqa: S608
            stack.callback(_drop_view, con, name)
        yield stream


def _drop_view(con: duckdb.DuckDBPyConnection, name: str) -> None:
    with suppress(duckdb.Error):  # After a fatal error, the database accepts no statements, and the caller replaces it.
        con.execute(f"DROP VIEW IF EXISTS {name}")


def execute(
    con: duckdb.DuckDBPyConnection, text: str, names: Sequence[str] | None, streams: Sequence[TableStream]
) -> pa.RecordBatchReader:
    """Run a statement, and return its rows as a stream.

    The functions for sketches are created only if the statement uses them.

    Args:
        con: The connection to DuckDB.
        text: The statement.
        names: The names of the result's columns, or None to keep DuckDB's names.
        streams: The streams that the statement reads.

    Raises:
        InvalidRequest: DuckDB refuses the statement, or the statement fails for some rows.
        ServerFailed: A file cannot be read.
    """
    try:
        if COUNT_SKETCHES in text:
            create_functions(con)
        rows = con.execute(text).to_arrow_reader(BATCH_ROWS)
    except duckdb.Error as error:
        raise _to_client_error(error, streams) from None
    column_names = rows.schema.names if names is None else names
    schema = pa.schema([field.with_name(name) for field, name in zip(rows.schema, column_names, strict=True)])
    return pa.RecordBatchReader.from_batches(schema, _rename_columns(rows, schema, streams))


def _rename_columns(
    batches: pa.RecordBatchReader, schema: pa.Schema, streams: Sequence[TableStream]
) -> Iterator[pa.RecordBatch]:
    try:
        for batch in batches:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise _to_client_error(error, streams) from None


def _to_client_error(error: Exception, streams: Sequence[TableStream]) -> ClientError:
    failure = next((stream.failure for stream in streams if stream.failure is not None), None)
    if isinstance(failure, ClientError):
        return failure
    if isinstance(failure, EncryptedFile):
        return InvalidRequest(f"SQL cannot read encrypted files: {failure}", status=400)
    if isinstance(failure, Unreadable):
        return ServerFailed(f"A file of a table cannot be read: {failure}", status=500)
    if failure is not None:
        return ServerFailed(f"A table cannot be read: {type(failure).__name__}: {failure}", status=500)
    server_message = _find_server_message(str(error))
    if server_message is not None:
        return InvalidRequest(f"The statement fails: {server_message}", status=400)
    reason = " ".join(str(error).partition("Stack Trace:")[0].split())[:500]
    if isinstance(error, duckdb.FatalException | duckdb.InternalException):
        return DuckDBFailed(f"DuckDB failed: {reason}", status=500)
    return InvalidRequest(f"The statement fails: {reason}", status=400)


def _find_server_message(text: str) -> str | None:
    """Return the message of the catalog in an error of DuckDB's Iceberg extension, or None if there is none.

    The message is after a fixed text, or in a JSON body. The extension puts the body of the response into its own
    error, which can again be the body of another error.
    """
    if (match := _MESSAGE_START.search(text)) and (message := text[match.end() :].rstrip()).endswith('"'):
        return message[:-1]
    for start in (match.end() for match in _BODY.finditer(text)):
        try:
            document, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        match document:
            case {"error": {"message": str(message)}}:
                return message
            case {"exception_message": str(inner_text)} if len(inner_text) < len(text):
                return _find_server_message(inner_text)
    return None
