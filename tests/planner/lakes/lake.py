"""A table whose rows are all known: the metadata on disk, and the rows that it describes.

The reading rules here follow the specification alone (sections "Scan Planning", "Column Projection" and "Default
values"), so that they can serve as an oracle for planners. `history.py` makes these tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.planner.lakes.manifests import DELETED, Manifest, PartitionField
from tests.planner.lakes.metrics import ColumnMetrics
from tests.planner.lakes.schemas import LakeColumn, Schema

Row = dict[int, Any]
"""Values by column id. A struct's own id has True if the struct is present and None if it is null."""

DATA, POSITION_DELETES, EQUALITY_DELETES = 0, 1, 2
PATH_ID, POSITION_ID = 2147483546, 2147483545


@dataclass(eq=False)
class ContentFile:
    """The fields that data files and delete files have in common, as in a manifest entry."""

    path: str
    content: int
    format: str
    spec_id: int
    partition: tuple[Any, ...]
    record_count: int
    size: int
    metrics: dict[int, ColumnMetrics]
    split_offsets: list[int] | None = None
    equality_ids: list[int] | None = None
    referenced_path: str | None = None
    content_offset: int | None = None
    content_size: int | None = None
    snapshot_id: int = 0
    sequence: int = 0
    file_sequence: int = 0

    @property
    def partition_key(self) -> tuple[object, ...]:
        """The spec and the partition values in comparable form; NaN equals NaN, and the zeros differ."""
        return (self.spec_id, *(repr(value) for value in self.partition))


@dataclass(eq=False)
class DataFile(ContentFile):
    """A data file.

    Attributes:
        rows: The values as written under the schema `schema_id`, without columns that were added later.
    """

    rows: list[Row] = field(default_factory=list)
    written_columns: frozenset[int] = frozenset()
    schema_id: int = 0
    first_row_id: int | None = None


@dataclass(eq=False)
class DeleteFile(ContentFile):
    """A delete file, with positions in data files or with keys of the columns `equality_ids`."""

    positions: frozenset[tuple[str, int]] = frozenset()
    keys: tuple[tuple[Any, ...], ...] = ()

    @property
    def name(self) -> str:
        """The path. For a deletion vector, the offset follows it, because several vectors can share a file."""
        return self.path if self.content_offset is None else f"{self.path}#{self.content_offset}"

    @property
    def is_vector(self) -> bool:
        return self.content_offset is not None


@dataclass(frozen=True, eq=False)
class LakeSnapshot:
    id: int
    parent: int | None
    sequence: int
    schema_id: int
    manifests: tuple[Manifest, ...]
    json: dict[str, Any]

    @cached_property
    def data_files(self) -> list[DataFile]:
        """The live data files in manifest order."""
        return [file for file in self._list_live_files() if isinstance(file, DataFile)]

    @cached_property
    def delete_files(self) -> list[DeleteFile]:
        return [file for file in self._list_live_files() if isinstance(file, DeleteFile)]

    def _list_live_files(self) -> list[ContentFile]:
        return [entry.file for manifest in self.manifests for entry in manifest.entries if entry.status != DELETED]


@dataclass(frozen=True)
class Lake:
    """One table: its metadata file, and all that the oracles know about it."""

    seed: int
    folder: Path
    version: int
    metadata_location: str
    metadata: dict[str, Any]
    schemas: dict[int, Schema]
    schema: Schema
    specs: dict[int, tuple[PartitionField, ...]]
    snapshots: dict[int, LakeSnapshot]
    current_snapshot: LakeSnapshot
    refs: dict[str, tuple[str, int]]
    pools: dict[int, list[Any]]

    @cached_property
    def all_columns(self) -> dict[int, LakeColumn]:
        """The columns of all schemas, by column id. If several schemas have a column, the highest schema id decides."""
        columns: dict[int, LakeColumn] = {}
        for schema in sorted(self.schemas.values(), key=lambda schema: schema.id):
            columns |= schema.list_columns()
        return columns

    def read_rows(self, file: DataFile) -> list[Row]:
        """Return the rows of the file with all columns of the table.

        A column that was not written has its default or null.
        """
        return [self._complete_row(row, file.written_columns) for row in file.rows]

    def _complete_row(self, row: Row, written_ids: frozenset[int]) -> Row:
        new_row = dict(row)
        for column in sorted(self.all_columns.values(), key=lambda column: len(column.parents)):
            if column.id not in written_ids:
                is_absent = any(new_row.get(parent) is None for parent in column.parents)
                new_row[column.id] = None if is_absent else column.default
        return new_row

    def find_applicable_deletes(self, snapshot: LakeSnapshot, file: DataFile) -> list[DeleteFile]:
        """Return the delete files that apply to a data file, by the rules of the specification.

        A deletion vector replaces all position delete files. Equality deletes always apply beside them.
        """
        deletes = snapshot.delete_files
        positional = [
            delete
            for delete in deletes
            if delete.content == POSITION_DELETES and self._is_position_delete_for(delete, file)
        ]
        vectors = [item for item in positional if item.is_vector]
        equality = [
            delete
            for delete in deletes
            if delete.content == EQUALITY_DELETES and self._is_equality_delete_for(delete, file)
        ]
        return (vectors or positional) + equality

    @staticmethod
    def _is_position_delete_for(delete: DeleteFile, file: DataFile) -> bool:
        return (
            delete.referenced_path in (None, file.path)
            and file.sequence <= delete.sequence
            and file.partition_key == delete.partition_key
        )

    def _is_equality_delete_for(self, delete: DeleteFile, file: DataFile) -> bool:
        is_unpartitioned = all(part.transform == "void" for part in self.specs[delete.spec_id])
        return file.sequence < delete.sequence and (is_unpartitioned or file.partition_key == delete.partition_key)

    def find_removed_positions(self, delete: DeleteFile, file: DataFile) -> set[int]:
        """Return the positions of the rows of `file` that the delete file removes if it applies to the file."""
        if delete.content == POSITION_DELETES:
            return {position for path, position in delete.positions if path == file.path}
        ids = delete.equality_ids or []
        keys = set(delete.keys)
        return {index for index, row in enumerate(self.read_rows(file)) if tuple(row[column] for column in ids) in keys}
