"""Dead-letter tables: stream tables that store the rows that do not fit another stream table, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from seamark.formats.protocol.wire import check_name, format_path
from seamark.formats.runtime.errors import BadRequest, NoSuchTable
from seamark.metaserver.catalog.catalog import Catalog
from seamark.metaserver.catalog.values import LoadedTable
from seamark.metaserver.log.port import Batch
from seamark.metaserver.store.model import NamespacePath
from seamark.metaserver.streams.incoming.rows import RejectedRow
from seamark.metaserver.streams.keys import find_key_columns
from seamark.metaserver.streams.row_files import RowFiles
from seamark.metaserver.streams.stream_properties import check_stream_table

DEAD_LETTER_TABLE = "seamark.stream.dead-letter-table"
_COLUMNS = {
    "raw": frozenset({"string"}),
    "reason": frozenset({"string"}),
    "time": frozenset({"timestamp", "timestamptz"}),
    "producer": frozenset({"string"}),
    "table": frozenset({"string"}),
}
"""The columns of a dead-letter table, with their possible types. Only `raw` and `reason` are required."""


class DeadLetter(NamedTuple):
    """A rejected row, and the name of the stream table that it does not fit."""

    table: str
    row: RejectedRow


class DeadLetters(NamedTuple):
    """The dead-letter table of a stream table, to which rejected rows are added.

    Attributes:
        loaded: The dead-letter table.
        stream_table_name: The name of the stream table.
    """

    loaded: LoadedTable
    stream_table_name: str

    @property
    def uuid(self) -> str:
        assert self.loaded.entry is not None
        return self.loaded.entry.uuid

    @property
    def name(self) -> str:
        assert self.loaded.entry is not None
        return format_path(self.loaded.entry.namespace, self.loaded.entry.name)


def pack_letters(
    dead_letters: DeadLetters,
    letters: Sequence[DeadLetter],
    row_files: RowFiles,
    *,
    now_ms: int,
    producer: str | None,
) -> Batch:
    """Convert rejected rows to a batch of the dead-letter table.

    Columns that the dead-letter table does not have are left out. Its column `time` may have a time zone or none.

    Args:
        dead_letters: The dead-letter table.
        letters: The rejected rows, at least one.
        row_files: Packs the rows.
        now_ms: The time for the column `time`.
        producer: The name of the producer of the rows, or None.

    Raises:
        BadRequest: The dead-letter table has a required column that these rows do not have.
    """
    metadata = dead_letters.loaded.metadata
    kinds = {field.name: field.type for field in metadata.current_schema.fields}
    zone = "UTC" if kinds.get("time") == "timestamptz" else None
    times = pa.array([1000 * now_ms] * len(letters), pa.int64()).cast(pa.timestamp("us", zone))
    columns = {
        "raw": pa.array([letter.row.raw for letter in letters], pa.string()),
        "reason": pa.array([letter.row.reason for letter in letters], pa.string()),
        "time": times,
        "producer": pa.array([producer] * len(letters), pa.string()),
        "table": pa.array([letter.table for letter in letters], pa.string()),
    }
    batch = pa.record_batch({name: column for name, column in columns.items() if name in kinds})
    try:
        conformed_batch = row_files.conform(batch, metadata)
    except BadRequest as error:
        reason, name = letters[0].row.reason, dead_letters.name
        raise BadRequest(f"A row does not fit ({reason}), and {name} does not take it: {error.message}") from None
    return Batch(conformed_batch.num_rows, row_files.pack(conformed_batch, metadata))


def parse_dead_letter_table(properties: Mapping[str, Any]) -> tuple[NamespacePath, str] | None:
    """Return the namespace and the name of the dead-letter table in the properties, or None.

    Raises:
        BadRequest: The name has no namespace, or is invalid.
    """
    text = properties.get(DEAD_LETTER_TABLE, "")
    if not text or not isinstance(text, str):
        return None
    *namespace, name = text.split(".")
    if not namespace:
        raise BadRequest(f"{DEAD_LETTER_TABLE} is {text[:200]!r}; name a table with its namespace, such as db.t_errors")
    for part in (*namespace, name):
        check_name(part, DEAD_LETTER_TABLE)
    return tuple(namespace), name


async def find_dead_letters(catalog: Catalog, loaded_table: LoadedTable) -> DeadLetters | None:
    """Return the dead-letter table of a stream table, or None if it has no dead-letter table.

    The table must differ from the stream table, must have no key, and must have the columns `raw` and `reason`. All
    other columns are optional.

    Raises:
        BadRequest: The dead-letter table is missing, or its columns do not fit.
    """
    namespace_and_name = parse_dead_letter_table(loaded_table.metadata.properties)
    if namespace_and_name is None:
        return None
    namespace, name = namespace_and_name
    assert loaded_table.entry is not None
    subject = f"The dead-letter table {format_path(namespace, name)}"
    try:
        entry = await catalog.tables.load_entry(namespace, name)
    except NoSuchTable:
        raise BadRequest(f"{subject} does not exist; create it, or remove the property {DEAD_LETTER_TABLE}") from None
    metadata = await catalog.documents.table(entry.metadata_location)
    check_stream_table(metadata, subject)
    if entry.uuid == loaded_table.entry.uuid:
        raise BadRequest(f"{subject} is the stream table itself; use another table")
    if key := find_key_columns(metadata):
        raise BadRequest(f"{subject} has the key {', '.join(key)}; use a table without a key")
    kinds = {field.name: field.type for field in metadata.current_schema.fields}
    for column, types in _COLUMNS.items():
        if column in kinds and kinds[column] not in types:
            raise BadRequest(f"{subject} has the column {column} of another type than {' or '.join(sorted(types))}")
        if column not in kinds and column in ("raw", "reason"):
            raise BadRequest(f"{subject} has no column {column} of type string; add it")
    return DeadLetters(LoadedTable(entry, metadata), format_path(loaded_table.entry.namespace, loaded_table.entry.name))
