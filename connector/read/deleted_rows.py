"""Finds the deleted rows of a data file, from the delete files that its scan task lists.

If a delete file cannot be decoded completely, Unreadable is raised. Otherwise deleted rows would reappear. The server
decides which delete files apply to a data file, by sequence numbers and partitions. Keys of equality
deletes are compared as in Iceberg's Java library: null equals null, NaN equals NaN, and -0.0 does not equal 0.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from seamark.cache.memory import MemoryCache
from seamark.cache.sizes import measure_object_bytes
from seamark.connector.arrow.arrays import Mask
from seamark.connector.client.storage import Storage
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.transforms import IDENTITY
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.delete_files import (
    EQUALITY,
    Columns,
    Content,
    DeletedKeys,
    DeleteFile,
    Positions,
    decode_delete_content,
)
from seamark.formats.index.keys.hashing import hash_halves
from seamark.formats.index.keys.terms import resolve_term_by_id
from seamark.formats.index.packing import MISSING, Longs
from seamark.formats.runtime.errors import BadRequest

CACHED_BYTES_MAX = 256 << 20
"""The maximum size of the cached content of delete files. A delete file may apply to many data files."""
DECODED_BYTES_MAX = 4 << 30
"""The maximum memory of one decoded delete file. A delete file that needs more raises Unreadable."""
_CONTENTS = {"position-deletes": 1, "equality-deletes": EQUALITY}
"""The codes of the Iceberg spec for the contents of delete files."""


@dataclass(frozen=True)
class DeletedRowSet:
    """The deleted rows of one data file.

    They are the rows at the ascending `positions`, and the rows whose keys are in one of the key sets in `keys`.
    """

    positions: Longs
    keys: tuple[tuple[Columns, DeletedKeys], ...]

    @property
    def column_ids(self) -> set[int]:
        """The ids of the columns whose values `mark_deleted_keys` needs."""
        return {column_id for columns, _ in self.keys for column_id, _ in columns}

    def mark_deleted_positions(self, first: int, rows: int) -> Mask | None:
        """Return a mask of the rows that are deleted by position, as bool[rows] from position `first` on.

        The result is None if no row is deleted by position.
        """
        start, end = np.searchsorted(self.positions, (first, first + rows)).tolist()
        if start == end:
            return None
        mask = np.zeros(rows, dtype=np.bool_)
        mask[self.positions[start:end] - first] = True
        return mask

    def mark_deleted_keys(self, columns: Mapping[int, pa.Array], rows: int) -> Mask:
        """Return a mask of the rows that are deleted by key, as bool[rows].

        Keys are compared by hash. The hashes of rows are computed once for each set of columns.

        Args:
            columns: The columns of the rows, by column id.
            rows: The number of rows.

        Raises:
            ValueError: The values of a column have a different type than the keys.
        """
        mask = np.zeros(rows, dtype=np.bool_)
        hashes_by_columns: dict[Columns, Any] = {}
        for columns_of_keys, keys in self.keys:
            if columns_of_keys not in hashes_by_columns:
                hashes_by_columns[columns_of_keys] = hash_halves(
                    [convert_to_keys(columns[column_id], kind) for column_id, kind in columns_of_keys]
                )
            mask |= keys.exact.has(*hashes_by_columns[columns_of_keys])
        return mask


NOTHING = DeletedRowSet(np.zeros(0, dtype=np.int64), ())


def union_positions(*positions: Longs) -> Longs:
    """Return the distinct positions in ascending order.

    The function sorts the positions, because a stable sort is fast for input that is mostly sorted. `numpy.union1d`
    is slower.
    """
    all_positions = np.sort(np.concatenate(positions), kind="stable")
    is_first = np.ones(len(all_positions), dtype=np.bool_)
    is_first[1:] = all_positions[1:] != all_positions[:-1]
    return all_positions[is_first]


class Deletes:
    """Reads and caches the delete files of one table."""

    def __init__(self, storage: Storage, metadata: TableMetadata) -> None:
        self._storage = storage
        self._metadata = metadata
        self._cache: MemoryCache[tuple[object, ...], Content] = MemoryCache(CACHED_BYTES_MAX)

    def load(self, path: str, files: Sequence[Mapping[str, Any]]) -> DeletedRowSet:
        """Return the rows of a data file that the delete files delete.

        Args:
            path: The path of the data file.
            files: The delete files, in the form of the REST specification (schema `DeleteFile`).

        Raises:
            Unreadable: A delete file cannot be read, or there are several deletion vectors.
        """
        if not files:
            return NOTHING
        positions, keys, vectors = [], [], 0
        for json in files:
            file = decode_delete_file(json)
            columns = self._read_columns(file)
            content = self._read_content(file, columns)
            vectors += file.is_vector
            if isinstance(content, Positions):
                positions.append(content.get_positions(path))
            else:
                keys.append((columns, content))
        if vectors > 1:
            raise Unreadable(path, f"the file has {vectors} deletion vectors; a data file can have only one")
        return DeletedRowSet(
            positions[0] if len(positions) == 1 else union_positions(NOTHING.positions, *positions), tuple(keys)
        )

    def _read_columns(self, file: DeleteFile) -> Columns:
        if file.content != EQUALITY:
            return ()
        try:
            terms = [
                resolve_term_by_id(IDENTITY, column_id, self._metadata.current_schema, self._metadata.schemas)
                for column_id in file.columns
            ]
        except BadRequest as error:
            raise Unreadable(file.path, f"the keys have columns that cannot be compared: {error.message}") from None
        if not terms:
            raise Unreadable(file.path, "the manifest entry does not list its key columns")
        return tuple((term.column_id, term.kind) for term in terms)

    def _read_content(self, file: DeleteFile, columns: Columns) -> Content:
        key = (file.path, file.offset, columns)
        content = self._cache.get(key)
        if content is None:
            content = decode_delete_content(self._read_bytes(file), file, columns, limit_bytes=DECODED_BYTES_MAX)
            self._cache.put(key, content, measure_object_bytes(content))
        return content

    def _read_bytes(self, file: DeleteFile) -> memoryview:
        try:
            if not file.is_vector:
                return self._storage.read(file.path)
            with self._storage.open_input_file(file.path) as input_file:
                return memoryview(input_file.read_at(max(0, file.length), max(0, file.offset)))
        except (pa.ArrowException, OSError, ValueError) as error:
            raise Unreadable(
                file.path, f"the file cannot be read: {(str(error).splitlines() or [''])[0][:200]}"
            ) from None


def decode_delete_file(json: Mapping[str, Any]) -> DeleteFile:
    """Decode a delete file from the JSON of the REST specification.

    Raises:
        Unreadable: The kind of the deletes is unknown, or the file is encrypted.
    """
    path, content = str(json.get("file-path")), json.get("content")
    if content not in _CONTENTS:
        raise Unreadable(path, f"the content is {content!r}, which is not a known kind of deletes")
    if json.get("key-metadata"):
        raise Unreadable(path, "the file is encrypted")
    return DeleteFile(
        path=path,
        format=str(json.get("file-format", "")).lower(),
        content=_CONTENTS[content],
        size_bytes=json.get("file-size-in-bytes", MISSING),
        records=json.get("record-count", MISSING),
        referenced=json.get("referenced-data-file"),
        offset=json.get("content-offset", MISSING),
        length=json.get("content-size-in-bytes", MISSING),
        columns=tuple(sorted(set(json.get("equality-ids") or ()))),
    )
