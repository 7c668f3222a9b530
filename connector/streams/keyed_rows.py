"""Selects the latest row of each key of a keyed stream table, and encodes the deletes of the rows that it replaces.

A new row may replace rows in two places. Rows in the table's files are located as an upsert locates them
(`write/row_locations.py`), in the snapshot that the change is based on. Rows in earlier fresh files are found by the
hashes of their keys, which are in memory until the flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.arrow.arrays import Longs, Mask
from seamark.connector.arrow.casting import Unwritable, get_arrow_type
from seamark.connector.read.deleted_rows import Deletes, union_positions
from seamark.connector.read.tables import OpenTable, plan
from seamark.connector.streams.packed_rows import RowKey, UnpackedRows, find_column
from seamark.connector.streams.stored_files import MemoryStorage, ServedStorage, ServerFiles, StoredRowsPort
from seamark.connector.write.delete_files import BY_FILE, GRANULARITY, DeletedRows, write_deletes
from seamark.connector.write.latest_rows import Rank, read_column, select_latest
from seamark.connector.write.row_locations import (
    RANGES_MAX,
    SCAN,
    BatchKeys,
    MatchedRows,
    find_key_fields,
    hash_key_columns,
    locate,
    scan_files,
)
from seamark.connector.write.target import create_target
from seamark.connector.write.upserts import read_scope
from seamark.formats.iceberg.expressions.arrow import build_arrow_array
from seamark.formats.iceberg.expressions.expression import TRUE, Expression, join_by_or
from seamark.formats.iceberg.expressions.expression_json import encode_expression
from seamark.formats.iceberg.expressions.residuals import add_nan
from seamark.formats.iceberg.files.parquet import UnfitColumn
from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.schema import Field, Schema, Type
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import decode_json, get_decimal_precision
from seamark.formats.index.keys.hashing import Hashes
from seamark.formats.index.keys.keys import get_family, has_keys
from seamark.formats.runtime.errors import BadRequest

DELETE = 2
"""The kind of a row that deletes the row with its key (`RowKind` in the log)."""
_PROMOTIONS = ("int", "long", "date", "timestamp", "timestamp_ns")
"""The types of key columns that are promoted, in the order of promotion: a type can be promoted to later types."""
_FILES_BY_FILE_MAX = 64
"""The maximum number of data files with a separate position delete file each. Plans list it only for its data file."""


_Version = tuple[int | None, int, int]
"""The ids of the snapshot, the schema and the partition spec on which scan tasks depend."""


class UnfitKey(Unwritable):
    """Raised if a date of a key column is outside the range of the type to which the column was promoted."""


class KeyHashes(NamedTuple):
    """The 128-bit hashes of keys, as two halves: uint64[keys] each."""

    high: Hashes
    low: Hashes

    def take(self, rows: Longs) -> KeyHashes:
        return KeyHashes(self.high[rows], self.low[rows])


class KeyedFile:
    """A written file, and the keys of its rows. Each key occurs once. `find` never returns rows without a key."""

    def __init__(self, content: dict[str, Any], hashes: KeyHashes, is_complete: Mask) -> None:
        """Sort the keys of a file.

        Args:
            content: The ContentFile.
            hashes: The hash of the key of each row, in the order of the file.
            is_complete: Whether each row has a key, as bool[rows].
        """
        self.content = content
        complete_rows = np.flatnonzero(is_complete)
        key_hashes = hashes.take(complete_rows)
        order = np.lexsort((key_hashes.low, key_hashes.high))
        self._positions: Longs = complete_rows[order]
        self._sorted_hashes = key_hashes.take(order)
        _, runs = np.unique(self._sorted_hashes.high, return_counts=True)
        self._longest_run = int(runs.max(initial=0))

    def find(self, keys: KeyHashes) -> Longs:
        """Return the positions of the rows with one of the keys, as int64[rows], in any order."""
        positions = []
        start = np.searchsorted(self._sorted_hashes.high, keys.high)
        # More than one step is needed only if several hashes have equal high halves.
        for step in range(self._longest_run):
            places = np.minimum(start + step, len(self._positions) - 1)
            is_same = (self._sorted_hashes.high[places] == keys.high) & (self._sorted_hashes.low[places] == keys.low)
            positions.append(self._positions[places[is_same]])
        return np.unique(np.concatenate(positions)) if positions else np.zeros(0, dtype=np.int64)


@dataclass(eq=False)
class KeyedRows:
    """Consecutive rows of a keyed stream: their keys, and the files with the latest row of each key.

    Attributes:
        keys: The distinct keys of the rows, including deleted rows. If the table's key columns have changed, there is
            an item for each set of key columns.
        hashes: The hashes of these keys, for the last set of key columns.
        files: The files.
        located: A version of the table, and the rows in its files that have one of the keys.
        replaced: A cache of the results of `find_replaced`, by the later part. An entry is dropped when Python frees
            the later part.
    """

    keys: tuple[BatchKeys, ...]
    hashes: KeyHashes
    files: tuple[KeyedFile, ...]
    located: tuple[_Version, tuple[MatchedRows, ...]] | None = None
    replaced: WeakKeyDictionary[KeyedRows, list[Longs]] = field(default_factory=WeakKeyDictionary)

    def find_replaced(self, later: KeyedRows) -> list[Longs]:
        """Return the positions of the rows that a later part replaces, for each file."""
        positions = self.replaced.get(later)
        if positions is None:
            positions = self.replaced[later] = [file.find(later.hashes) for file in self.files]
        return positions


class EncodedRowDeletes(NamedTuple):
    """The encoded deletes of the rows that keyed rows replace.

    Attributes:
        files: The locations and data of the files to store.
        content_files: The ContentFiles of the delete files as JSON. One stored file may contain several delete files.
        removed: The delete files and data files that the deletes replace: their location and, for a deletion vector,
            its offset.
        scope: The filter of the rows that were read, as JSON. It is empty if no rows were read.
    """

    files: list[tuple[str, bytes]]
    content_files: list[bytes]
    removed: list[tuple[str, int | None]]
    scope: bytes


def read_key_columns(fields: Sequence[Field], rows: pa.RecordBatch | pa.Table, schema: Schema) -> list[pa.Array]:
    """Return the key columns of rows, with the types of the fields.

    If the rows' schema does not have a key column, its values are its initial default.

    Raises:
        Unwritable: The values of a column do not fit the type of its field.
    """
    columns = {field.id for field in schema.fields}
    arrays = []
    for key_field in fields:
        column = find_column(rows, key_field.id) if key_field.id in columns else _repeat_default(key_field, len(rows))
        if column is None:
            raise Unwritable(f"the rows have no column with the field id {key_field.id}, which is a key column")
        arrays.append(_cast_key(column, key_field))
    return arrays


def _read_columns_of_earlier_rows(fields: Sequence[Field], rows: UnpackedRows) -> list[pa.Array]:
    """Return key columns of earlier rows, with null for each value that does not fit the type of the later keys.

    Later rows cannot have such a value in their keys, so they replace no row with this value.
    """
    try:
        return read_key_columns(fields, rows.rows, rows.schema)
    except Unwritable:
        columns = []
        for key_field in fields:
            column = find_column(rows.rows, key_field.id)
            if column is not None:
                columns.append(_cast_fitting(column, key_field))
            else:
                columns += read_key_columns([key_field], rows.rows, rows.schema)
        return columns


def _cast_fitting(column: pa.Array, key_field: Field) -> pa.Array:
    """Return a key column like `_cast_key`, but with null for each date or time outside the range of the type."""
    target = get_arrow_type(str(key_field.type), key_field.name)
    if _is_date_or_time(target) and _is_date_or_time(column.type) and column.type != target:
        # The cast of a value outside the range overflows, so casting it back gives a different value.
        cast = column.cast(target, safe=False)
        return pc.if_else(pc.equal(cast.cast(column.type, safe=False), column), cast, pa.scalar(None, target))
    return _cast_key(column, key_field)


def _is_date_or_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _repeat_default(key_field: Field, rows: int) -> pa.Array:
    kind = str(key_field.type)
    if key_field.initial_default is None:
        return pa.nulls(rows)
    return pa.repeat(build_arrow_array(kind, [decode_json(kind, key_field.initial_default)])[0], rows)


def _cast_key(column: pa.Array | pa.ChunkedArray, key_field: Field) -> pa.Array:
    """Return a key column with the type that its field has in data files. The type may be a promotion of a date.

    Raises:
        UnfitKey: A date does not fit the type.
        Unwritable: A value does not fit the type.
    """
    target = get_arrow_type(str(key_field.type), key_field.name)
    if pa.types.is_date(column.type) and pa.types.is_timestamp(target):
        try:
            column = column.cast(target)
        except pa.ArrowInvalid as error:
            raise UnfitKey(f"column {key_field.name} is {key_field.type}: {error}") from None
    return read_column(pa.table({key_field.name: column}), key_field)


def hash_keys(fields: Sequence[Field], columns: Sequence[pa.Array]) -> KeyHashes:
    return KeyHashes(*hash_key_columns(fields, columns))


def are_complete(columns: Sequence[pa.Array]) -> Mask:
    """Return whether each row has a value in all key columns, as bool[rows]."""
    is_complete = np.ones(len(columns[0]), dtype=np.bool_)
    for column in columns:
        is_complete &= column.is_valid().to_numpy(zero_copy_only=False)
    return is_complete


class LatestRows(NamedTuple):
    """The rows of a stream that remain after later rows have replaced earlier rows.

    Attributes:
        keys: The distinct keys of all rows. If the table's key columns have changed, there is an item for each set of
            key columns.
        fields: The last set of key columns, with the types whose values are hashed.
        hashes: The hashes of the distinct keys of the last set of key columns.
        stays: Whether each row is written to a file, as bool[rows].
    """

    keys: tuple[BatchKeys, ...]
    fields: tuple[Field, ...]
    hashes: KeyHashes
    stays: Mask


def select_rows(groups: Sequence[Sequence[UnpackedRows]], metadata: TableMetadata) -> LatestRows:
    """Return the rows that no later row replaces.

    A row replaces the earlier rows with its key, including rows that were written before the table had these key
    columns. A row without a complete key stays, unless a later row replaces it by a different set of key columns. A
    delete also replaces earlier rows, but never stays itself.

    Args:
        groups: The rows, grouped by their key columns (`group_by_key`).
        metadata: The table's metadata.

    Raises:
        Unwritable: A key column is missing, or its type has changed to a type of a different family.
    """
    rows = [unpacked for group in groups for unpacked in group]
    stays = np.zeros(sum(unpacked.rows.num_rows for unpacked in rows), dtype=np.bool_)
    keys: list[BatchKeys] = []
    fields: tuple[Field, ...] = ()
    hashes = KeyHashes(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64))
    start = rows_before = 0
    for group in groups:
        end = start + sum(unpacked.rows.num_rows for unpacked in group)
        kinds = np.frombuffer(b"".join(unpacked.kinds for unpacked in group), dtype=np.uint8)
        stays[start:end] = kinds != DELETE
        if group[0].key:
            fields, columns = _read_group_keys(group, rows[: rows_before + len(group)], metadata)
            is_complete = are_complete(columns)
            keyed_rows = np.flatnonzero(is_complete)
            keyed_columns = [column.take(pa.array(keyed_rows)) for column in columns]
            all_hashes = hash_keys(fields, keyed_columns)
            latest = select_latest(all_hashes, Rank.from_column(None, None, len(keyed_rows)))
            is_replaced = is_complete.copy()
            is_replaced[keyed_rows[latest]] = False
            stays[start:end] &= ~is_replaced
            latest_rows = pa.array(latest)
            distinct = BatchKeys(fields, [column.take(latest_rows) for column in keyed_columns])
            hashes = all_hashes.take(latest)
            if start:
                earlier = _concatenate(
                    _read_columns_of_earlier_rows(fields, unpacked) for unpacked in rows[:rows_before]
                )
                stays[:start] &= ~((distinct.match(earlier) >= 0) & are_complete(earlier))
            keys.append(distinct)
        start, rows_before = end, rows_before + len(group)
    return LatestRows(tuple(keys), fields, hashes, stays)


def _read_group_keys(
    group: Sequence[UnpackedRows], rows: Sequence[UnpackedRows], metadata: TableMetadata
) -> tuple[tuple[Field, ...], list[pa.Array]]:
    """Return the fields of the key columns of a group, and the values of these columns in the group.

    If possible, the types of the fields can represent the values of all rows. This fails if a date of the group is
    outside the range of `timestamp_ns`, a type that the column has in other rows. The fields then have types that
    represent only the values of the group.

    Args:
        group: Rows with the same key columns.
        rows: The rows of the group and of earlier groups.
        metadata: The table's metadata.
    """
    try:
        fields = _choose_key_fields(group[0].key, rows, metadata)
        return fields, _concatenate(read_key_columns(fields, unpacked.rows, unpacked.schema) for unpacked in group)
    except Unwritable:
        fields = _choose_key_fields(group[0].key, group, metadata)
        return fields, _concatenate(read_key_columns(fields, unpacked.rows, unpacked.schema) for unpacked in group)


def _concatenate(batches: Iterable[Sequence[pa.Array]]) -> list[pa.Array]:
    return [pa.concat_arrays(column) for column in zip(*batches, strict=True)]


def _choose_key_fields(key: RowKey, rows: Sequence[UnpackedRows], metadata: TableMetadata) -> tuple[Field, ...]:
    """Return the fields of key columns, with types that can represent the values of all rows.

    Types whose equal values have equal hashes form a family, for example int and long. A column has its current type if
    this type is wider and belongs to the same family.
    """
    fields: dict[int, Field] = {}
    for schema in {unpacked.schema.id: unpacked.schema for unpacked in rows}.values():
        for column in schema.fields:
            if column.id not in fields or _rank_type(str(column.type)) > _rank_type(str(fields[column.id].type)):
                fields[column.id] = column
    for current in metadata.current_schema.fields:
        if current.id in fields and _is_at_least_as_wide(current, fields[current.id]):
            fields[current.id] = current
    return tuple(msgspec.structs.replace(fields[column_id], required=False) for column_id, _ in key)


def _is_at_least_as_wide(field: Field, other: Field) -> bool:
    """Return whether the types of the fields belong to the same family, and the type of `field` is not narrower."""
    types = (field.type, other.type)
    kinds = [kind for kind in types if isinstance(kind, str) and has_keys(kind)]
    return (
        len(kinds) == 2
        and get_family(kinds[0]) == get_family(kinds[1])
        and _rank_type(kinds[0]) >= _rank_type(kinds[1])
    )


def _rank_type(kind: str) -> int:
    """Return the position of a type in the order in which Iceberg can promote types, from 0. Other types have 0, too.

    The position of a decimal is its precision. Callers compare only types of the same column.
    """
    name = get_base_name(kind)
    if name == "decimal":
        return get_decimal_precision(kind)
    return _PROMOTIONS.index(name) if name in _PROMOTIONS else 0


def encode_deletes(
    parts: Sequence[KeyedRows], metadata: TableMetadata, stored_rows: StoredRowsPort, folder: str | None
) -> EncodedRowDeletes:
    """Return delete files for the rows that new rows with the same keys replace.

    The replaced rows are in the current snapshot, and in the files of earlier parts.

    Args:
        parts: The new rows, in order. The rows of a part replace the rows of earlier parts.
        metadata: The table's metadata.
        stored_rows: The interface of the server that finds rows in the current snapshot.
        folder: None if the deletes are for a commit. The commit also removes data files without remaining rows.
            Otherwise, the deletes are for readers of the stream, before the commit, and this is the folder of the
            files that only these readers use.

    Raises:
        Unwritable: The table does not support deletes.
        Unreadable: A file of the table cannot be read.
    """
    server = ServerFiles(stored_rows)
    storage = ServedStorage({}, "", stored_rows, server.sizes_bytes)
    # The server's plans and lookups are of one table, so its name is not used.
    source_table = OpenTable("db.t", metadata, metadata.current_schema, metadata.current_snapshot_id, storage, ())
    deleted_rows = [
        *_find_replaced_in_stored_files(parts, source_table, server, removes_empty_files=folder is None),
        *_find_replaced_in_new_files(parts),
    ]
    target = replace(create_target(metadata, memory := MemoryStorage()), indexes=())
    # Plans list the delete file of a single data file only for this data file. But each data file then needs its own
    # delete file, so their number is limited. A commit uses the property of the table.
    if folder is not None and len(deleted_rows) <= _FILES_BY_FILE_MAX:
        target = replace(target, properties={**target.properties, GRANULARITY: BY_FILE})
    delete_files = write_deletes(target, deleted_rows, Deletes(storage, metadata))
    rename_path: Callable[[str], str] = (
        (lambda path: path) if folder is None else (lambda path: _replace_folder(path, folder))
    )
    return EncodedRowDeletes(
        [(rename_path(location), memory.read_data(location)) for location in memory.written],
        [msgspec.json.encode({**file, "file-path": rename_path(file["file-path"])}) for file in delete_files.files],
        [(file["file-path"], file.get("content-offset")) for file in delete_files.removed],
        _encode_scope(parts[0].keys, source_table) if folder is None else b"",
    )


def _encode_scope(keys: Iterable[BatchKeys], source_table: OpenTable) -> bytes:
    """Return a filter that is true for every row with one of the keys, as JSON, or b"" without keys.

    It describes the rows that a commit with these keys has read. With `add_nan`, `>` and `>=` on floats also match NaN,
    because a row with NaN may have one of the keys.
    """
    scopes = [_find_scope(batch_keys, source_table) for batch_keys in keys if batch_keys.count]
    return msgspec.json.encode(encode_expression(add_nan(join_by_or(*scopes)))) if scopes else b""


def _find_scope(keys: BatchKeys, source_table: OpenTable) -> Expression:
    """Return a filter of the rows with the keys, or TRUE if the current types cannot represent all keys."""
    try:
        return read_scope(_resolve_keys(keys, source_table.metadata).keys, source_table)
    except UnfitKey:
        return TRUE


def _replace_folder(path: str, folder: str) -> str:
    return f"{folder}/{path.rpartition('/')[2]}"


def _find_replaced_in_stored_files(
    parts: Iterable[KeyedRows], source_table: OpenTable, server: ServerFiles, *, removes_empty_files: bool
) -> list[DeletedRows]:
    """Return the rows in the table's files that have one of the keys of the new rows.

    The rows for a part (consecutive new rows) are located once for each version of the table, and then taken from
    `part.located`.

    Args:
        parts: The new rows.
        source_table: The table at its current snapshot.
        server: The interface for plans and lookups.
        removes_empty_files: Whether the deletes may remove a data file without remaining rows.
    """
    by_path: dict[str, tuple[MatchedRows, list[Longs]]] = {}
    metadata = source_table.metadata
    version = source_table.snapshot_id, metadata.current_schema_id, metadata.default_spec_id
    for part in parts:
        # A different thread may replace `part.located` at any time by the rows of a different version.
        located = part.located
        if located is None or located[0] != version:
            files = [rows for keys in part.keys for rows in _locate(server, source_table, keys)]
            located = part.located = version, tuple(files)
        _, matched_files = located
        for rows in matched_files:
            server.add_sizes([rows.task.file, *rows.task.deletes])
            _, positions_of_file = by_path.setdefault(rows.task.path, (rows, []))
            positions_of_file.append(rows.positions)
    return [
        DeletedRows(
            path,
            rows.task.spec_id,
            rows.task.file.get("partition") or (),
            union_positions(*positions),
            rows.task.deletes,
            rows.task.records if removes_empty_files else None,
        )
        for path, (rows, positions) in by_path.items()
    ]


class _ReadableKeys(NamedTuple):
    """Keys with the column names and types of a schema of the table."""

    keys: BatchKeys
    schema: Schema


class _DroppedKeys(BatchKeys):
    """Keys for which plans have no filter, because the current schema may lack their columns or types."""

    def filter_expression(
        self, values_max: int, specs: Sequence[PartitionSpec] = (), ranges_max: int = RANGES_MAX
    ) -> Expression:
        return TRUE


def _resolve_keys(keys: BatchKeys, metadata: TableMetadata) -> _ReadableKeys:
    """Return the keys with the names and types of the current schema, which may have renamed or promoted columns.

    If a column was dropped while rows waited for a flush, the newest schema with all columns is used.

    Raises:
        Unwritable: No schema has all columns, or its types cannot represent the keys.
    """
    ids = {field.id for field in keys.fields}
    complete_schemas = [schema for schema in metadata.schemas if ids <= {field.id for field in schema.fields}]
    if not complete_schemas:
        raise Unwritable(f"the table no longer has a schema with the key columns {sorted(ids)} of the rows")
    schema = max(
        complete_schemas,
        key=lambda schema: (_can_represent(schema, keys), schema.id == metadata.current_schema_id, schema.id),
    )
    by_id = {field.id: field for field in schema.fields}
    fields = [by_id[field.id] for field in keys.fields]
    is_current = schema.id == metadata.current_schema_id
    if is_current and all(
        (field.name, field.type) == (key_field.name, key_field.type)
        for field, key_field in zip(fields, keys.fields, strict=True)
    ):
        return _ReadableKeys(keys, schema)
    columns = [
        column if field.type == key_field.type else _cast_key(column, msgspec.structs.replace(field, required=False))
        for column, field, key_field in zip(keys.columns, fields, keys.fields, strict=True)
    ]
    return _ReadableKeys((BatchKeys if is_current else _DroppedKeys)(fields, columns), schema)


def _can_represent(schema: Schema, keys: BatchKeys) -> bool:
    """Return whether the types of a schema can represent all values of the keys."""
    by_id = {field.id: field for field in schema.fields}
    return all(_rank_type(str(by_id[field.id].type)) >= _rank_type(str(field.type)) for field in keys.fields)


def _locate(server: ServerFiles, source_table: OpenTable, keys: BatchKeys) -> tuple[MatchedRows, ...]:
    """Return the rows in the table's files that have one of the keys.

    If the keys have a column that was dropped, the files are scanned with an earlier schema. If a type cannot represent
    a key or a stored value, each file is read with types that fit it.
    """
    try:
        readable_keys, schema = _resolve_keys(keys, source_table.metadata)
        if schema.id == source_table.schema.id:
            return locate(server, source_table, readable_keys).files
        return locate(server, replace(source_table, schema=schema), readable_keys, SCAN).files
    except (UnfitKey, UnfitColumn):
        return _locate_by_file(server, source_table, keys)


def _locate_by_file(server: ServerFiles, source_table: OpenTable, keys: BatchKeys) -> tuple[MatchedRows, ...]:
    """Return the rows in the table's files that have one of the keys, if the current types cannot represent all keys.

    A column of dates may be promoted to `timestamp_ns` although a row has a date outside its range. Each file is read
    with the widest types that can represent all values of the file. Keys outside the range of these types are in no
    row of the file.
    """
    readers = [
        (replace(source_table, schema=schema), _keep_representable_keys(keys, schema))
        for schema in _list_key_schemas(keys, source_table.metadata)
    ]
    matched_files = []
    for task in plan(server, source_table):
        for number, (table, fitting_keys) in enumerate(readers, 1):
            try:
                matched_files += [MatchedRows(*rows) for rows in scan_files(table, fitting_keys, [task])]
                break
            except UnfitColumn:
                if number == len(readers):
                    raise
    return tuple(matched_files)


def _list_key_schemas(keys: BatchKeys, metadata: TableMetadata) -> list[Schema]:
    """Return a schema of the table for each combination of types of the key columns. The widest types are first."""
    ids = [field.id for field in keys.fields]
    by_types: dict[tuple[Type, ...], Schema] = {}
    for schema in (*metadata.schemas, metadata.current_schema):
        types = {field.id: field.type for field in schema.fields}
        if all(column_id in types for column_id in ids):
            by_types[tuple(types[column_id] for column_id in ids)] = schema
    return [
        by_types[types]
        for types in sorted(by_types, key=lambda types: [_rank_type(str(kind)) for kind in types], reverse=True)
    ]


def _keep_representable_keys(keys: BatchKeys, schema: Schema) -> BatchKeys:
    """Return the keys that the types of a schema can represent.

    Plans cannot filter by the returned keys, because the current schema may lack their columns or types.
    """
    by_id = {field.id: msgspec.structs.replace(field, required=False) for field in schema.fields}
    fields = [by_id[field.id] for field in keys.fields]
    columns = [_cast_fitting(column, field) for column, field in zip(keys.columns, fields, strict=True)]
    is_complete = pa.array(are_complete(columns))
    return _DroppedKeys(fields, [column.filter(is_complete) for column in columns])


def _find_replaced_in_new_files(parts: Sequence[KeyedRows]) -> list[DeletedRows]:
    """Return the rows that a later part replaces, in the files of earlier parts. These files are not yet committed."""
    deleted_rows = []
    for number, part in enumerate(parts[:-1]):
        by_part = [part.find_replaced(later) for later in parts[number + 1 :]]
        for file, positions in zip(part.files, zip(*by_part, strict=True), strict=True):
            replaced_positions = union_positions(*positions)
            if len(replaced_positions):
                content = file.content
                deleted_rows.append(
                    DeletedRows(
                        content["file-path"],
                        content.get("spec-id", 0),
                        content.get("partition") or (),
                        replaced_positions,
                    )
                )
    return deleted_rows


def check_key(metadata: TableMetadata, key: Sequence[str]) -> tuple[Field, ...]:
    """Return the fields of a key.

    Raises:
        BadRequest: A column cannot be a key column.
    """
    try:
        return tuple(find_key_fields(metadata.current_schema, key))
    except Unwritable as error:
        raise BadRequest(f"The key of the stream table is not valid: {error}") from None
