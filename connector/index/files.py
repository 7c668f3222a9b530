"""Index files made of data files: the indexed columns read, built and written beside the table, a group at a time.

Pure functions of the files they are given, so that whoever has files can run them: the Spark job in its tasks, the
indexer by itself, a writer on what it has just written. What becomes of the result is the caller's affair: until an
index file is registered with the catalog nobody reads it.

The rule kept: a data file that cannot be read exactly as every reader of the table reads it is left out, and told.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seamark.connector.client.storage import Storage
from seamark.connector.parquet.columns import Projection, read_columns
from seamark.metaserver.iceberg.files.parquet import Unreadable
from seamark.metaserver.iceberg.files.puffin import Part
from seamark.metaserver.iceberg.types.transforms import IDENTITY, function
from seamark.metaserver.iceberg.types.types import base_name
from seamark.metaserver.index.files.definitions import IndexDefinition
from seamark.metaserver.index.files.index_file import FilesTable, assemble
from seamark.metaserver.index.keys.arrow_keys import keys_of
from seamark.metaserver.index.keys.hashing import file_ids
from seamark.metaserver.index.keys.keys import Bits, Key, Keys, bits_of, has_codes, key_of
from seamark.metaserver.index.keys.terms import LOWER, Term
from seamark.metaserver.index.kinds.kinds import KINDS

_CODE_BIAS, _WIDE_BIAS = 1 << 63, 1 << 127
"""What a key of an integer type is above its value: as a code, and as 16 bytes (`keys.py`)."""


@dataclass(frozen=True)
class DataFile:
    """As the manifests have it. `partitioned`: columns that readers may take from the file's partition."""

    path: str
    size_bytes: int
    records: int
    format: str = "parquet"
    partitioned: frozenset[int] = frozenset()


@dataclass(frozen=True)
class IndexTask:
    """What is to be built, for whatever files; picklable. `folder` is where index files go."""

    table_uuid: str
    definition: IndexDefinition
    projection: Projection
    folder: str
    storage: Storage = field(default_factory=Storage)


@dataclass(frozen=True)
class WrittenIndex:
    """`location` is None where no file could be indexed; `skipped` are (path, why)."""

    location: str | None
    files: int
    rows: int
    size_bytes: int
    skipped: tuple[tuple[str, str], ...]


def index_data_files(task: IndexTask, files: Iterable[DataFile]) -> WrittenIndex:
    """One index file of these data files, written and durable."""
    builts: list[Any] = []
    done: list[DataFile] = []
    skipped: list[tuple[str, str]] = []
    for one in files:
        try:
            builts.append(built(task.definition, keys_of_file(task, one)))
            done.append(one)
        except (Unreadable, ValueError) as error:
            skipped.append((one.path, str(error)))
    return write_index_file(task, done, builts, skipped)


def write_index_file(
    task: IndexTask, files: Sequence[DataFile], builts: Sequence[Any], skipped: Iterable[tuple[str, str]] = ()
) -> WrittenIndex:
    """Of what `built` made of each data file; no index file for no data file."""
    if not files:
        return WrittenIndex(None, 0, 0, 0, tuple(skipped))
    location = f"{task.folder}/{uuid.uuid4()}.puffin"
    size_bytes = task.storage.write(location, index_file(task.table_uuid, task.definition, files, builts))
    return WrittenIndex(location, len(files), sum(one.records for one in files), size_bytes, tuple(skipped))


def keys_of_file(task: IndexTask, file: DataFile) -> list[Keys]:
    """The keys of each of the definition's terms. Unreadable, or ValueError, where they are in doubt."""
    if file.format.lower() != "parquet":
        raise Unreadable(file.path, f"files of format {file.format} are not indexed")
    terms = task.definition.terms
    filesystem, path = task.storage.open(file.path)
    columns = read_columns(
        path,
        [term.column_id for term in terms],
        Projection(
            task.projection.schema,
            task.projection.partitioned | file.partitioned,
        ),
        filesystem=filesystem,
        rows=file.records,
    )
    return [keys_of_term(term, columns[term.column_id]) for term in terms]


def index_file(
    table_uuid: str, definition: IndexDefinition, files: Sequence[DataFile], builts: Sequence[Any]
) -> Iterator[Part]:
    """The bytes of an index file of what `built` made of each data file, in this order."""
    paths, sizes, records = zip(*((one.path, one.size_bytes, one.records) for one in files), strict=True)
    listed = FilesTable.of(file_ids(paths, sizes, records), np.array(records), np.array(sizes), paths)
    return assemble(
        definition.id,
        definition.kind,
        listed,
        map(memoryview, KINDS[definition.kind].encode(builts)),
        table_uuid=table_uuid,
        field_ids=[term.column_id for term in definition.terms],
    )


def built(definition: IndexDefinition, columns: list[Keys]) -> Any:
    """What an index knows of one data file, whose keys these are, term by term."""
    return KINDS[definition.kind].build(columns, definition.parameters)


def keys_of_term(term: Term, column: pa.ChunkedArray) -> Keys:
    """The keys of a term's values, of a column as `read_columns` returns it. ValueError for values that have none."""
    if term.transform == IDENTITY:
        return keys_of(column, term.kind)
    if term.transform == LOWER:
        return keys_of(column if pa.types.is_null(column.type) else pc.utf8_lower(_strings(column)), term.kind)
    return _transformed(keys_of(column, term.source), term)


def _strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """As strings, however they are kept: as a dictionary, or as bytes that no annotation calls UTF-8. ValueError."""
    kept = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not any(is_kept(kept) for is_kept in _TEXTS):
        raise ValueError(f"a column of Arrow type {column.type} holds no strings")
    return column.cast(pa.large_string())


_TEXTS = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
)


def _transformed(source: Keys, term: Term) -> Keys:
    """By the very function by which the planner projects filters, once for each distinct value."""
    apply = function(term.transform, term.source)
    present = source.present
    rows = np.arange(source.rows) if present is None else np.flatnonzero(present)
    distinct, places = _distinct(source, rows)
    results = [apply(_value(key, term.source)) for key in distinct]
    there = np.array([result is not None for result in results], dtype=np.bool_)
    valid = np.zeros(source.rows, dtype=np.bool_)
    valid[rows] = there[places] if len(results) else False
    keys = [key_of(result, term.kind) if result is not None else None for result in results]
    bits: Bits | None = None if valid.all() else bits_of(valid)
    if has_codes(term.kind):
        codes = np.zeros(source.rows, dtype=np.uint64)
        if keys:
            codes[rows] = np.array([key or 0 for key in keys], dtype=np.uint64)[places]
        return Keys(term.kind, source.rows, codes, None, None, bits, None)
    spelled = [b""] * source.rows
    for row, place in zip(rows.tolist(), places.tolist(), strict=True):
        key = keys[place]
        spelled[row] = key if isinstance(key, bytes) else b""
    starts = np.zeros(source.rows + 1, dtype=np.int64)
    np.cumsum([len(one) for one in spelled], out=starts[1:])
    return Keys(term.kind, source.rows, None, starts, np.frombuffer(b"".join(spelled), dtype=np.uint8), bits, None)


def _distinct(keys: Keys, rows: Any) -> tuple[list[Key], Any]:
    """The distinct keys of these rows, and for each of the rows the place of its key among them."""
    if keys.codes is not None:
        codes, places = np.unique(keys.codes[rows], return_inverse=True)
        return codes.tolist(), places
    assert keys.starts is not None
    assert keys.heap is not None
    heap, starts = keys.heap.tobytes(), keys.starts.tolist()
    seen: dict[Key, int] = {}
    places = np.array([seen.setdefault(heap[starts[row] : starts[row + 1]], len(seen)) for row in rows], dtype=np.int64)
    return list(seen), places


def _value(key: Key, kind: str) -> Any:
    """The value, in the form of `expressions.py`, of a key of a type that transforms take."""
    name = base_name(kind)
    if isinstance(key, int):
        return key - _CODE_BIAS
    if name == "decimal":
        return int.from_bytes(key, "big") - _WIDE_BIAS
    return key.decode() if name == "string" else key
