"""Estimates from one data file whether a cube would be useful, before the cube is defined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seamark.connector.client.indexes import IndexClient
from seamark.connector.client.names import Name
from seamark.connector.client.storage import Storage
from seamark.connector.client.values import At
from seamark.connector.index.files import DataFile, IndexTask, build_entry_of_file
from seamark.connector.index.lookups import read_dimensions
from seamark.connector.parquet.columns import Projection
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.table_json import decode_table
from seamark.formats.index.definitions import define_index
from seamark.formats.runtime.errors import BadRequest

SAMPLED_ROWS_MAX = 20_000_000
"""The maximum number of rows of the data file that is read."""


def find_cube_problem(
    client: IndexClient, table: Name, columns: Sequence[str], measures: Sequence[str], parameters: Mapping[str, Any]
) -> str | None:
    """Return the reason why a cube would not be useful or could not be built, or None.

    The entry of the largest of the first data files is built, to find a problem before the cube is defined. Files with
    more than `SAMPLED_ROWS_MAX` rows are not used. The result is None if there is no file to use, if the file cannot be
    read, or if the definition is invalid, because the server checks the definition.

    Raises:
        ClientError: The server refuses a request or cannot be reached.
    """
    engine_table = client.load_table(table)
    metadata = decode_table(engine_table.metadata, engine_table.location)
    try:
        values = {name: value for name, value in parameters.items() if value is not None}
        definition = define_index(
            "estimate", "cube", columns, metadata.current_schema, measures=measures, parameters=values
        )
    except BadRequest:
        return None
    if metadata.current_snapshot_id is None or metadata.table_uuid is None:
        return None
    pages = client.iter_files(table, content="data", at=At(metadata.current_snapshot_id))
    page = next(iter(pages), None)
    file_rows = [] if page is None else page.select(["file_path", "file_size_in_bytes", "record_count"]).to_pylist()
    files = [DataFile(*file.values()) for file in file_rows if 0 <= file["record_count"] <= SAMPLED_ROWS_MAX]
    if not files:
        return None
    task = IndexTask(
        metadata.table_uuid,
        definition,
        Projection(metadata.current_schema),
        "",
        Storage.of_table(engine_table.storage, metadata.location),
        EnvironmentKeys(table),
        read_dimensions(client, definition.terms),
    )
    try:
        build_entry_of_file(task, max(files, key=lambda file: file.records))
    except Unreadable:
        return None
    except ValueError as error:
        return str(error)
    return None
