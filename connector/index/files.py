"""Builds index files: reads the indexed columns of a group of data files, and writes their index entries.

The result depends only on the files, so the Spark job, the indexer and writers all use these functions. The caller
registers the index file in the catalog. Until then, no planner reads it.

Readers of the table must see the same values as the index. If this is uncertain for a data file, the file is left out
and reported as skipped.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from seamark.connector.client.progress import advance
from seamark.connector.client.storage import Storage
from seamark.connector.index.lookups import NO_DIMENSIONS, Dimensions, look_up_attributes
from seamark.connector.parquet.columns import Projection, read_columns
from seamark.connector.parquet.encryption.keys import EnvironmentKeys
from seamark.formats.iceberg.files.parquet import Unreadable
from seamark.formats.iceberg.files.puffin import Part
from seamark.formats.iceberg.types.transforms import IDENTITY, make_function
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.index.definitions import IndexDefinition
from seamark.formats.index.index_file import FilesTable, assemble_index_file
from seamark.formats.index.keys.arrow_keys import convert_to_keys
from seamark.formats.index.keys.functions import INDEXED_FUNCTIONS
from seamark.formats.index.keys.hashing import compute_file_ids
from seamark.formats.index.keys.keys import Bits, Key, Keys, has_codes, make_key, pack_mask
from seamark.formats.index.keys.terms import Term
from seamark.formats.index.kinds.kinds import KINDS

_CODE_BIAS, _WIDE_BIAS = 1 << 63, 1 << 127
"""The difference between a key of an integer type and its value, for 64-bit codes and for 16-byte keys (`keys.py`)."""


@dataclass(frozen=True)
class DataFile:
    """A data file, described by its manifest entry.

    Attributes:
        partition_value_columns: The ids of the columns whose values readers may take from its partition values.
    """

    path: str
    size_bytes: int
    records: int
    format: str = "parquet"
    partition_value_columns: frozenset[int] = frozenset()


@dataclass(frozen=True)
class IndexTask:
    """The description of an index to build, for any data files. Instances can be pickled.

    Attributes:
        folder: The location of new index files.
        file_keys: The keys of encrypted files.
        dimensions: The dimension tables whose attributes the index uses. If they are missing, no entry can be built.
        decoded_bytes_max: The maximum size of the decoded columns of one file in memory, or None for the limit of
            `read_columns`. A larger file is not indexed.
    """

    table_uuid: str
    definition: IndexDefinition
    projection: Projection
    folder: str
    storage: Storage = field(default_factory=Storage)
    file_keys: EnvironmentKeys = field(default_factory=EnvironmentKeys, compare=False)
    dimensions: Dimensions = field(default_factory=dict, compare=False)
    decoded_bytes_max: int | None = None


@dataclass(frozen=True)
class WrittenIndex:
    """The index file of a group of data files.

    Attributes:
        location: The location of the index file, or None if no data file could be indexed.
        skipped: The path of each data file that was left out, with the reason.
        refused: The paths among them that no build can index, because of their rows.
    """

    location: str | None
    files: int
    rows: int
    size_bytes: int
    skipped: tuple[tuple[str, str], ...]
    refused: tuple[str, ...] = ()


def index_data_files(task: IndexTask, files: Iterable[DataFile]) -> WrittenIndex:
    """Build an index file of these data files, and write it durably.

    Files that cannot be indexed are skipped. After a ValueError, the reason is in the rows of the file, so no later
    build can index it. An unreadable file may be readable later.
    """
    entries: list[Any] = []
    indexed_files: list[DataFile] = []
    skipped_files: list[tuple[str, str]] = []
    refused_paths: list[str] = []
    for file in files:
        try:
            entries.append(build_entry_of_file(task, file))
            indexed_files.append(file)
        except (Unreadable, ValueError) as error:
            skipped_files.append((file.path, str(error)))
            if isinstance(error, ValueError):
                refused_paths.append(file.path)
        advance(1, file.size_bytes)
    written_index = write_index_file(task, indexed_files, entries, skipped_files)
    return replace(written_index, refused=tuple(refused_paths))


def write_index_file(
    task: IndexTask, files: Sequence[DataFile], entries: Sequence[Any], skipped_files: Iterable[tuple[str, str]] = ()
) -> WrittenIndex:
    """Write the results of `build_entry` as an index file. Without data files, no file is written."""
    if not files:
        return WrittenIndex(None, 0, 0, 0, tuple(skipped_files))
    location = f"{task.folder}/{uuid.uuid4()}.puffin"
    size_bytes = task.storage.write(location, encode_index_file(task.table_uuid, task.definition, files, entries))
    return WrittenIndex(location, len(files), sum(file.records for file in files), size_bytes, tuple(skipped_files))


def read_file_keys(task: IndexTask, file: DataFile) -> list[Keys]:
    """Return the keys of a data file for each term of the index definition.

    Raises:
        Unreadable: It is uncertain which values the file has.
        ValueError: A value has no key.
    """
    columns = read_indexed_columns(task, file, task.definition.column_ids)
    return _compute_keys(task.definition, columns, look_up_attributes(task.definition.terms, columns, task.dimensions))


def build_entry_of_file(task: IndexTask, file: DataFile) -> Any:
    """Return the index entry of a data file.

    Raises:
        Unreadable: It is uncertain which values the file has.
        ValueError: The file cannot be indexed.
    """
    return build_entry(task.definition, read_indexed_columns(task, file, task.definition.column_ids), task.dimensions)


def read_indexed_columns(task: IndexTask, file: DataFile, column_ids: Sequence[int]) -> dict[int, pa.ChunkedArray]:
    """Return columns of a data file by field id.

    Raises:
        Unreadable: It is uncertain which values the file has.
    """
    if file.format.lower() != "parquet":
        raise Unreadable(file.path, f"files of format {file.format} cannot be indexed")
    return read_columns(
        file.path,
        column_ids,
        Projection(
            task.projection.schema,
            task.projection.partitioned | file.partition_value_columns,
            task.definition.mapping,
        ),
        filesystem=task.storage,
        rows=file.records,
        keys=task.file_keys,
        decoded_bytes_max=task.decoded_bytes_max,
    )


def encode_index_file(
    table_uuid: str, definition: IndexDefinition, files: Sequence[DataFile], entries: Sequence[Any]
) -> Iterator[Part]:
    """Yield the parts of an index file.

    `entries` has a result of `build_entry` for each data file, in the order of `files`.
    """
    paths, sizes, records = zip(*((file.path, file.size_bytes, file.records) for file in files), strict=True)
    files_table = FilesTable.from_columns(
        compute_file_ids(paths, sizes, records), np.array(records), np.array(sizes), paths
    )
    return assemble_index_file(
        definition.id,
        definition.kind,
        files_table,
        map(memoryview, KINDS[definition.kind].encode(entries)),
        table_uuid=table_uuid,
        field_ids=definition.column_ids,
    )


def build_entry(
    definition: IndexDefinition, columns: Mapping[int, pa.ChunkedArray], dimensions: Dimensions = NO_DIMENSIONS
) -> Any:
    """Return the index entry of one data file, in the form of the index kind.

    Args:
        definition: The definition of the index.
        columns: The columns of the index by field id.
        dimensions: The dimension tables whose attributes the index uses.

    Raises:
        ValueError: The file cannot be indexed.
    """
    kind = KINDS[definition.kind]
    attributes = look_up_attributes(definition.terms, columns, dimensions)
    if kind.aggregates:
        return kind.build_entry_with_aggregates(
            definition.terms, definition.measures, columns, definition.parameters, attributes
        )
    return kind.build(_compute_keys(definition, columns, attributes), definition.parameters)


def _compute_keys(
    definition: IndexDefinition,
    columns: Mapping[int, pa.ChunkedArray],
    attributes: Mapping[Term, pa.ChunkedArray],
) -> list[Keys]:
    """Return the keys of the rows of a data file for each term of the definition.

    Args:
        definition: The definition of the index.
        columns: The columns of the data file by field id.
        attributes: The attributes of dimension tables for the rows of the file.
    """
    return [
        convert_to_keys(attributes[term], term.kind)
        if term in attributes
        else compute_term_keys(term, columns[term.column_id])
        for term in definition.terms
    ]


def compute_term_keys(term: Term, column: pa.ChunkedArray) -> Keys:
    """Return the keys of the values of a term, given a column of `read_columns`.

    Raises:
        ValueError: A value has no key.
    """
    if term.transform == IDENTITY:
        return convert_to_keys(column, term.kind)
    if function := INDEXED_FUNCTIONS.get(term.transform):
        return convert_to_keys(function.values(column), term.kind)
    return _transform_keys(convert_to_keys(column, term.source), term)


def _transform_keys(source: Keys, term: Term) -> Keys:
    """Return the keys of the transformed values.

    The function applies the same transform function as the planner's projection, once to each distinct value. Types
    with codes have 64-bit numbers as keys. Keys of other types are bytes: `starts` has the start of each key in the
    joined bytes.
    """
    transform_value = make_function(term.transform, term.source)
    has_key = source.present
    rows = np.arange(source.rows) if has_key is None else np.flatnonzero(has_key)
    distinct, key_ordinals = _find_distinct(source, rows)
    results = [transform_value(_decode_key(key, term.source)) for key in distinct]
    has_value = np.array([result is not None for result in results], dtype=np.bool_)
    valid = np.zeros(source.rows, dtype=np.bool_)
    valid[rows] = has_value[key_ordinals] if len(results) else False
    keys = [make_key(result, term.kind) if result is not None else None for result in results]
    bits: Bits | None = None if valid.all() else pack_mask(valid)
    if has_codes(term.kind):
        codes = np.zeros(source.rows, dtype=np.uint64)
        if keys:
            codes[rows] = np.array([key or 0 for key in keys], dtype=np.uint64)[key_ordinals]
        return Keys(term.kind, source.rows, codes, None, None, bits, None)
    encoded_keys = [b""] * source.rows
    for row, ordinal in zip(rows.tolist(), key_ordinals.tolist(), strict=True):
        key = keys[ordinal]
        encoded_keys[row] = key if isinstance(key, bytes) else b""
    starts = np.zeros(source.rows + 1, dtype=np.int64)
    np.cumsum([len(key) for key in encoded_keys], out=starts[1:])
    return Keys(term.kind, source.rows, None, starts, np.frombuffer(b"".join(encoded_keys), dtype=np.uint8), bits, None)


def _find_distinct(keys: Keys, rows: Any) -> tuple[list[Key], Any]:
    """Return the distinct keys of these rows, and the ordinal of the key of each row.

    Keys are 64-bit codes or, for other types, slices of the joined bytes `heap`.
    """
    if keys.codes is not None:
        codes, ordinals = np.unique(keys.codes[rows], return_inverse=True)
        return codes.tolist(), ordinals
    assert keys.starts is not None
    assert keys.heap is not None
    heap, starts = keys.heap.tobytes(), keys.starts.tolist()
    ordinals_by_key: dict[Key, int] = {}
    ordinals = np.array(
        [ordinals_by_key.setdefault(heap[starts[row] : starts[row + 1]], len(ordinals_by_key)) for row in rows],
        dtype=np.int64,
    )
    return list(ordinals_by_key), ordinals


def _decode_key(key: Key, kind: str) -> Any:
    """Return the value of a key in the form that transform functions accept.

    Numbers are stored with an added bias, so that unsigned keys have the order of signed values. It is subtracted.
    """
    name = get_base_name(kind)
    if isinstance(key, int):
        return key - _CODE_BIAS
    if name == "decimal":
        return int.from_bytes(key, "big") - _WIDE_BIAS
    return key.decode() if name == "string" else key
