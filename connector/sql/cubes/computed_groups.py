"""Computes the groups of data files that have no entry yet, and keeps them in the memory of a session.

After an append, a cube does not cover the new files until the next build. A query reads their rows, and the rows of
the dimension tables that the groups of the other files contain. A dashboard repeats its queries, so the session groups
the rows of a small new file once, as a build does, and answers further queries from these groups.

A file never changes, and the id of a definition names the snapshots of its dimension tables. So the groups stay right.
The server checks the rights to the table and to its dimension tables at each query, before the groups are used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from seamark.connector.client.client import SeamarkClient
from seamark.connector.client.errors import ClientError
from seamark.connector.index.builds import list_identity_columns
from seamark.connector.index.files import DataFile, IndexTask, build_entry_of_file
from seamark.connector.index.lookups import (
    CACHED_BYTES_MAX,
    DimensionRefused,
    Dimensions,
    are_dimensions_cached,
    read_dimensions,
)
from seamark.connector.parquet.columns import Projection
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.connector.read.tables import OpenTable, ScanTask
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.kinds.cube import build_entry_schema

COMPUTED_ROWS_MAX = 2_000_000
"""The maximum number of rows that are grouped for one query. The rows of the other files are read."""
_KEPT_BYTES_MAX = 64 << 20
"""The maximum number of bytes of the groups that a session keeps, and that a query uses."""
_READ_FILES_MAX = 10_000
"""The maximum number of files of which a session knows that a query has read their rows."""
_SHRINK_MAX = 2.0
"""The maximum of the smallest number of rows for each group. Groups in memory pay sooner than groups in a file."""
_BATCH_BYTES_MAX = 16 << 20
"""The maximum number of bytes of the groups of one file that a session keeps."""
_DECODED_BYTES_MAX = 512 << 20
"""The maximum number of bytes of the columns of one file in memory. The rows of a larger file are read in batches."""
_REFUSED_CUBES_MAX = 1_000
"""The maximum number of cubes of which a session knows that it cannot use their dimension tables."""
_KEY_BYTES = 500
"""The number of bytes that count for the identity of a file, in addition to those of its groups."""


class _FileKey(NamedTuple):
    """The identity of the groups of a data file, by which they are cached.

    It has the fields of the file and the id of the definition of the cube from which the groups are computed.
    """

    table_uuid: str
    definition_id: str
    path: str
    size_bytes: int
    records: int
    spec_id: int


class ComputedGroups:
    """The groups that a session has computed."""

    def __init__(self) -> None:
        self._groups_by_file: OrderedDict[_FileKey, pa.RecordBatch | None] = OrderedDict()
        """The groups, or None for a file that cannot be grouped. The files that were used last are at the end."""
        self._bytes = 0
        self._read_files: OrderedDict[_FileKey, None] = OrderedDict()
        self._refused_cubes: set[str] = set()
        """The ids of the cubes whose dimension tables are too large, or cannot be used."""

    def find_or_compute(
        self, client: SeamarkClient, table: OpenTable, cube: IndexDefinition, files: Sequence[ScanTask]
    ) -> dict[int, pa.RecordBatch]:
        """Return the groups of files, by their indexes in `files`. The caller must read the rows of all other files.

        The groups of a file are computed if a query of the session has read its rows before. They are computed at the
        first query if the cube has attributes of dimension tables that are in memory, because the rows would have to be
        joined with all of these tables.

        Args:
            client: The client of the catalog.
            table: The facts.
            cube: The definition of the cube.
            files: Tasks for whole files without deletes.
        """
        groups: dict[int, pa.RecordBatch] = {}
        table_uuid = table.metadata.table_uuid
        if table_uuid is None or cube.id in self._refused_cubes:
            return groups
        keys = [_FileKey(table_uuid, cube.id, file.path, file.size_bytes, file.records, file.spec_id) for file in files]
        bytes_left, rows_left = _KEPT_BYTES_MAX, COMPUTED_ROWS_MAX
        for number, key in enumerate(keys):
            if key in self._groups_by_file:
                self._groups_by_file.move_to_end(key)
                batch = self._groups_by_file[key]
                bytes_left -= _count_bytes(batch)
                if batch is not None:
                    groups[number] = batch
        has_dimensions = bool(cube.dimension_tables) and are_dimensions_cached(client, cube.terms)
        dimensions: Dimensions | None = None
        for number, (key, file) in enumerate(zip(keys, files, strict=True)):
            if key in self._groups_by_file:
                continue
            is_wanted = has_dimensions or key in self._read_files
            if not is_wanted or file.records > rows_left or bytes_left <= 0:
                self._note_read(key)
                continue
            rows_left -= file.records
            try:
                if dimensions is None:
                    dimensions = read_dimensions(client, cube.terms, CACHED_BYTES_MAX)
                batch = _compute_groups(table, table_uuid, cube, file, dimensions)
            except DimensionRefused:
                self._refuse(cube.id)
                break
            except ClientError:  # The dimension tables cannot be loaded now.
                break
            except OSError:  # The file may be readable at the next query.
                continue
            if _count_bytes(batch) > bytes_left:
                batch = None
            bytes_left -= _count_bytes(batch)
            self._put(key, batch)
            if batch is not None:
                groups[number] = batch
        self._evict()
        return groups

    def _note_read(self, key: _FileKey) -> None:
        self._read_files[key] = None
        self._read_files.move_to_end(key)
        if len(self._read_files) > _READ_FILES_MAX:
            self._read_files.popitem(last=False)

    def _refuse(self, definition_id: str) -> None:
        if len(self._refused_cubes) >= _REFUSED_CUBES_MAX:
            self._refused_cubes.clear()
        self._refused_cubes.add(definition_id)

    def _put(self, key: _FileKey, batch: pa.RecordBatch | None) -> None:
        self._read_files.pop(key, None)
        self._groups_by_file[key] = batch
        self._bytes += _count_bytes(batch)

    def _evict(self) -> None:
        while self._bytes > _KEPT_BYTES_MAX:
            _, batch = self._groups_by_file.popitem(last=False)
            self._bytes -= _count_bytes(batch)


def _count_bytes(batch: pa.RecordBatch | None) -> int:
    return _KEY_BYTES + (0 if batch is None else batch.nbytes)


def _compute_groups(
    table: OpenTable, table_uuid: str, cube: IndexDefinition, file: ScanTask, dimensions: Dimensions
) -> pa.RecordBatch | None:
    """Return the groups of a data file, or None if they cannot be computed or are not useful.

    They are not useful if they are not much fewer than the rows of the file, or take more than `_BATCH_BYTES_MAX`.

    The groups are computed in the way in which the server builds the cube's entry of a file (its groups in an index
    file). The parameter `shrink` is the minimum number of rows for each group. It is smaller here than in a build,
    because groups in memory need not be written and read.

    Raises:
        OSError: The file cannot be read.
    """
    metadata = table.metadata
    spec = next((spec for spec in metadata.partition_specs if spec.spec_id == file.spec_id), None)
    if spec is None or any(column_id not in metadata.current_schema.index.by_id for column_id in cube.column_ids):
        return None
    shrink = min(cube.parameters.get("shrink", _SHRINK_MAX), _SHRINK_MAX)
    task = IndexTask(
        table_uuid,
        replace(cube, parameters={**cube.parameters, "shrink": shrink}),
        Projection(metadata.current_schema),
        "",
        table.storage,
        EnvironmentKeys(table.name),
        dimensions,
        _DECODED_BYTES_MAX,
    )
    data_file = DataFile(
        file.path,
        file.size_bytes,
        file.records,
        str(file.file.get("file-format", "parquet")),
        list_identity_columns(spec),
    )
    try:
        batch: pa.RecordBatch = build_entry_of_file(task, data_file)
    except (Unreadable, ValueError, pa.ArrowException) as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return None
    is_expected = batch.schema.equals(build_entry_schema(cube.terms, cube.measures))
    return batch if is_expected and batch.nbytes <= _BATCH_BYTES_MAX else None
