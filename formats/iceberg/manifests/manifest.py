"""Decode manifests and manifest lists (Iceberg spec: "Manifests", "Manifest Lists") into columns.

Format versions 1, 2 and 3 differ in their fields, but not in the meaning of a field. Therefore one request serves all
versions: fields that a version does not have are MISSING. The values are those of the file: sequence numbers are not
inherited, and row ids are not assigned. If any part of a file is damaged, the whole file is Corrupt. A file that is
truncated exactly between two blocks looks like a shorter file, so callers compare its length with the manifest list.

Decoding releases the GIL, so threads decode in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from seamark.formats.iceberg.manifests._manifest import MISSING, execute
from seamark.formats.iceberg.manifests.avro import Container, read_container
from seamark.formats.iceberg.manifests.avro_schema import (
    ByColumn,
    Compiled,
    Long,
    PartitionFieldColumn,
    PartitionRecord,
    RecordReader,
    Text,
    compile_schema,
)
from seamark.formats.iceberg.manifests.avro_schema import Elements as ElementsOf
from seamark.formats.runtime.decoding import convert_json
from seamark.formats.runtime.errors import Corrupt
from seamark.formats.storage.locations import add_scheme

CountsByColumn: TypeAlias = dict[int, tuple[NDArray[np.int32], NDArray[np.int64]]]
BoundsByColumn: TypeAlias = dict[int, tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]]
_Elements: TypeAlias = list[tuple[NDArray[np.int64], NDArray[np.int32]]]

_INFLATED_BYTES_MIN, _INFLATION_RATIO_MAX = 64 << 20, 64
"""The inflated size in bytes that every file may have, and the maximum ratio of inflated to compressed size above it.

Entries usually compress two to ten times.
"""
INFLATED_LIMIT_BYTES = 1 << 29
"""The maximum inflated size of a file in bytes.

512 MiB are some hundred thousand entries, and writers start a new manifest at 8 MB.
"""


@dataclass(frozen=True, slots=True)
class Spans:
    """One text for each row, as positions in the heap, which is an array with the bytes of all texts.

    If the Avro type is string, the texts are valid UTF-8.
    """

    starts: NDArray[np.int64]
    lengths: NDArray[np.int32]
    """The length of each text in bytes. For null, it is -1, and the start is undefined."""


@dataclass(frozen=True, slots=True)
class PartitionFieldValues:
    """The values of a partition field, one for each row.

    Numbers are in `longs` or `doubles`, with `valid`. Other values are in `spans`.
    """

    field_id: int
    name: str
    type: str
    """The Avro type: boolean, int, long, float, double, bytes, string or fixed; or null if the field never has a value.
    """
    logical: str | None
    """The Avro logicalType, such as date, timestamp-micros, decimal or uuid."""
    longs: NDArray[np.int64] | None = None
    """The values of the types boolean (as 0 and 1), int, long and null."""
    doubles: NDArray[np.float64] | None = None
    valid: NDArray[np.uint8] | None = None
    """0 if the long or double is null, otherwise 1. MISSING cannot represent null here, because a field can contain any
    long.
    """
    spans: Spans | None = None
    """The values of the types bytes, string and fixed.

    A decimal has the bytes of its unscaled value as a big-endian two's complement.
    """


@dataclass(frozen=True, slots=True)
class DecodedManifest:
    """The live entries of a manifest, in the order of the file."""

    location: str
    rows: int
    metadata: dict[str, str]
    """The Avro header: schema, partition-spec, partition-spec-id, format-version, content, avro.schema, avro.codec."""
    longs: dict[str, NDArray[np.int64]]
    """The values of each name in LONGS. Null and absent values are MISSING."""
    texts: dict[str, Spans]
    """The values of each name in TEXTS."""
    lists: dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]]
    """The lists split_offsets and equality_ids, each as (counts, values).

    `counts` has the length of each row's list, or -1 for null. `values` are the concatenated lists of all rows.
    """
    partition: tuple[PartitionFieldValues, ...]
    """The partition fields, in the order of the manifest's partition struct."""
    counts: dict[str, CountsByColumn]
    """column_sizes, value_counts, null_value_counts and nan_value_counts: (ascending rows, values) by column id."""
    bounds: dict[str, BoundsByColumn]
    """lower_bounds and upper_bounds: (ascending rows, starts, lengths) by column id. The bounds are spans of the heap.
    """
    heap: NDArray[np.uint8]


class FieldSummary(msgspec.Struct, frozen=True, gc=False):
    """The summary of a partition field over all entries of a manifest.

    Bounds are in single-value serialization.
    """

    contains_null: bool | None
    contains_nan: bool | None
    lower: bytes | None
    upper: bytes | None


class ManifestFile(msgspec.Struct, frozen=True, gc=False):
    """A manifest, as its manifest list describes it."""

    manifest_path: str
    manifest_length: int
    partition_spec_id: int
    content: int
    """The content type: 0 for data, 1 for deletes. In version 1, it is always 0."""
    sequence_number: int
    """The sequence number. In version 1, this and the minimum sequence number are 0."""
    min_sequence_number: int
    added_snapshot_id: int | None = None
    added_files_count: int | None = None
    existing_files_count: int | None = None
    deleted_files_count: int | None = None
    added_rows_count: int | None = None
    existing_rows_count: int | None = None
    deleted_rows_count: int | None = None
    partitions: tuple[FieldSummary, ...] | None = None
    """The summaries of the partition fields, in the order of the partition spec."""
    key_metadata: bytes | None = None
    first_row_id: int | None = None


# The names and field ids of the Iceberg spec. Counts and bounds have the ids of their keys and values, too.
_ENTRY_LONGS = {0: "status", 1: "snapshot_id", 3: "sequence_number", 4: "file_sequence_number"}
_FILE_LONGS = {
    134: "content",
    103: "record_count",
    104: "file_size_in_bytes",
    140: "sort_order_id",
    142: "first_row_id",
    144: "content_offset",
    145: "content_size_in_bytes",
}
_FILE_TEXTS = {100: "file_path", 101: "file_format", 131: "key_metadata", 143: "referenced_data_file"}
_FILE_LISTS = {132: "split_offsets", 135: "equality_ids"}
_FILE_COUNTS = {
    108: ("column_sizes", 117, 118),
    109: ("value_counts", 119, 120),
    110: ("null_value_counts", 121, 122),
    137: ("nan_value_counts", 138, 139),
}
_FILE_BOUNDS = {125: ("lower_bounds", 126, 127), 128: ("upper_bounds", 129, 130)}

LONGS = (*_ENTRY_LONGS.values(), *_FILE_LONGS.values())
TEXTS = tuple(_FILE_TEXTS.values())

_DATA_FILE = RecordReader(
    {
        102: ("partition", PartitionRecord()),
        **{field_id: (name, Long(name)) for field_id, name in _FILE_LONGS.items()},
        **{field_id: (name, Text(name)) for field_id, name in _FILE_TEXTS.items()},
        **{
            field_id: (
                name,
                ElementsOf(name, ((0, "element", Long(f"{name}.element", in_group=True)),), of_records=False),
            )
            for field_id, name in _FILE_LISTS.items()
        },
        **{
            field_id: (name, ByColumn(name, key_id, value_id, Long(f"{name}.value", in_group=True)))
            for field_id, (name, key_id, value_id) in _FILE_COUNTS.items()
        },
        **{
            field_id: (name, ByColumn(name, key_id, value_id, Text(f"{name}.value", in_group=True)))
            for field_id, (name, key_id, value_id) in _FILE_BOUNDS.items()
        },
    },
    required=(100, 103, 104),
)
_ENTRY = RecordReader(
    {2: ("data_file", _DATA_FILE), **{field_id: (name, Long(name)) for field_id, name in _ENTRY_LONGS.items()}},
    required=(0, 2),
    status="status",
)
_ANY_ENTRY = replace(_ENTRY, status=None)

_LIST_LONGS = {
    501: "manifest_length",
    502: "partition_spec_id",
    517: "content",
    515: "sequence_number",
    516: "min_sequence_number",
    503: "added_snapshot_id",
    504: "added_files_count",
    505: "existing_files_count",
    506: "deleted_files_count",
    512: "added_rows_count",
    513: "existing_rows_count",
    514: "deleted_rows_count",
    520: "first_row_id",
}
_LIST = RecordReader(
    {
        500: ("manifest_path", Text("manifest_path")),
        519: ("key_metadata", Text("key_metadata")),
        **{field_id: (name, Long(name)) for field_id, name in _LIST_LONGS.items()},
        507: (
            "partitions",
            ElementsOf(
                "partitions",
                (
                    (509, "contains_null", Long("contains_null", in_group=True)),
                    (518, "contains_nan", Long("contains_nan", in_group=True)),
                    (510, "lower_bound", Text("lower_bound", in_group=True)),
                    (511, "upper_bound", Text("upper_bound", in_group=True)),
                ),
                of_records=True,
            ),
        ),
    },
    required=(500, 501, 502),
)


def decode_manifest(
    data: bytes | memoryview,
    location: str,
    *,
    inflated_limit_bytes: int = INFLATED_LIMIT_BYTES,
    with_deleted: bool = False,
) -> DecodedManifest:
    """Return the live entries of a manifest.

    Args:
        data: The bytes of the file.
        location: The location of the file, for errors.
        inflated_limit_bytes: The maximum inflated size.
        with_deleted: Whether entries with status DELETED are also returned.

    Raises:
        Corrupt: The manifest is damaged. The message names `location`.
    """
    rows = _decode_rows(data, location, _ANY_ENTRY if with_deleted else _ENTRY, inflated_limit_bytes)
    longs = {name: rows.read_long(name) for name in LONGS}
    texts = {name: rows.read_text(name) for name in TEXTS}
    for name in ("record_count", "file_size_in_bytes"):
        if (longs[name] == MISSING).any():
            raise Corrupt(f"{location}: an entry has no {name}")
    if ((longs["status"] < 0) | (longs["status"] > 1 + with_deleted)).any():
        raise Corrupt(f"{location}: the status of an entry is none of existing, added and deleted")
    if (texts["file_path"].lengths < 0).any():
        raise Corrupt(f"{location}: an entry has no file_path")
    return DecodedManifest(
        location=location,
        rows=rows.count,
        metadata=rows.container.metadata,
        longs=longs,
        texts=texts,
        lists={
            name: (rows.read_element_counts(name), rows.read_elements(name, 1)[0][0]) for name in _FILE_LISTS.values()
        },
        partition=rows.read_partition(),
        counts={name: rows.read_group(name, {}) for name, _, _ in _FILE_COUNTS.values()},
        bounds={name: rows.read_group(name, {}) for name, _, _ in _FILE_BOUNDS.values()},
        heap=rows.container.heap,
    )


@dataclass(frozen=True, slots=True)
class DecodedList:
    """A manifest list, with the data to compare it with the list of a neighbouring snapshot.

    Attributes:
        schema: The Avro schema of the file, as JSON.
        heap: The inflated bytes of all rows.
    """

    manifests: tuple[ManifestFile, ...]
    """The manifests in the order of the file."""
    schema: str
    heap: bytes
    paths: Spans
    """The paths of the manifests, as spans of the heap."""


def decode_manifest_list(
    data: bytes | memoryview, location: str, *, inflated_limit_bytes: int = INFLATED_LIMIT_BYTES
) -> tuple[ManifestFile, ...]:
    """Return the manifests of a snapshot, in the order of the file.

    Raises:
        Corrupt: The manifest list is damaged. The message names `location`.
    """
    return decode_list(data, location, None, inflated_limit_bytes=inflated_limit_bytes).manifests


def decode_list(
    data: bytes | memoryview,
    location: str,
    neighbour: DecodedList | None,
    *,
    inflated_limit_bytes: int = INFLATED_LIMIT_BYTES,
) -> DecodedList:
    """Decode a manifest list.

    Args:
        data: The bytes of the file.
        location: The location of the file, for errors.
        neighbour: The list of a neighbouring snapshot. Manifests that have the same bytes in both lists, at the
            beginning or at the end of the file, are taken from this list instead of decoded. None if there is no such
            list.
        inflated_limit_bytes: The maximum inflated size.

    Raises:
        Corrupt: The manifest list is damaged. The message names `location`.
    """
    rows = _decode_rows(data, location, _LIST, inflated_limit_bytes)
    paths = rows.read_text("manifest_path")
    is_missing = (rows.read_long(name) == MISSING for name in ("manifest_length", "partition_spec_id"))
    if (paths.lengths < 0).any() or any(missing_rows.any() for missing_rows in is_missing):
        raise Corrupt(f"{location}: an entry has no manifest_path, manifest_length or partition_spec_id")
    # Copy the columns, because they are parts of larger arrays, which would stay in memory.
    paths = Spans(paths.starts.copy(), paths.lengths.copy())
    manifest_list = DecodedList((), rows.container.metadata["avro.schema"], rows.container.heap.tobytes(), paths)
    leading, trailing = (0, 0) if neighbour is None else _count_common_rows(manifest_list, neighbour)
    manifests = tuple(_decode_manifests(rows, leading, rows.count - trailing))
    if neighbour is not None:
        trailing_start = len(neighbour.manifests) - trailing
        manifests = (*neighbour.manifests[:leading], *manifests, *neighbour.manifests[trailing_start:])
    return DecodedList(manifests, manifest_list.schema, manifest_list.heap, paths)


def _count_common_rows(new: DecodedList, neighbour: DecodedList) -> tuple[int, int]:
    """Return the number of equal rows at the beginning of two lists, and the number of equal rows at their end.

    Only the positions of the paths in the rows are known, and a row can begin before its path. So rows are compared
    from path to path. At the beginning, a row is equal if all bytes up to the path of the next row are equal. At the
    end, all rows after a path are equal if all bytes from this path to the end of the file are equal. This is why both
    counts are reduced by 1. No row is counted twice.
    """
    if new.schema != neighbour.schema:
        return 0, 0
    rows = min(len(new.paths.starts), len(neighbour.paths.starts))
    size = min(len(new.heap), len(neighbour.heap))
    if not rows:
        return 0, 0
    heap, neighbour_heap = (np.frombuffer(decoded.heap, dtype=np.uint8) for decoded in (new, neighbour))
    equal_bytes = _count_leading(heap[:size] == neighbour_heap[:size])
    starts = new.paths.starts[:rows]
    leading = max(0, _count_leading((starts <= equal_bytes) & (starts == neighbour.paths.starts[:rows])) - 1)
    equal_bytes = _count_leading(heap[len(heap) - size :][::-1] == neighbour_heap[len(neighbour_heap) - size :][::-1])
    ends = len(new.heap) - new.paths.starts[len(new.paths.starts) - rows :][::-1]
    neighbour_ends = len(neighbour.heap) - neighbour.paths.starts[len(neighbour.paths.starts) - rows :][::-1]
    lengths = new.paths.lengths[len(new.paths.lengths) - rows :][::-1]
    neighbour_lengths = neighbour.paths.lengths[len(neighbour.paths.lengths) - rows :][::-1]
    is_equal = (ends <= equal_bytes) & (ends == neighbour_ends) & (lengths == neighbour_lengths)
    trailing = max(0, _count_leading(is_equal) - 1)
    return leading, min(trailing, rows - leading)


def _count_leading(truths: NDArray[np.bool_]) -> int:
    """Return the number of true values before the first false value."""
    return len(truths) if truths.all() else int(np.argmin(truths))


def _decode_manifests(rows: _DecodedRows, first: int, end: int) -> Iterator[ManifestFile]:
    """Yield the manifests of the rows from `first` to `end` (exclusive) of a list.

    In format version 1, the content and the sequence numbers are absent, which means 0.
    """
    longs = {name: rows.read_numbers(name, first, end) for name in _LIST_LONGS.values()}
    for name in ("content", "sequence_number", "min_sequence_number"):
        longs[name] = [value or 0 for value in longs[name]]
    columns = [longs[name] for name in _LIST_LONGS.values() if name != "first_row_id"]
    raw_paths = rows.read_raw(rows.read_text("manifest_path"), first, end)
    paths = [add_scheme(value.decode()) for value in raw_paths if value is not None]
    key_metadata = rows.read_raw(rows.read_text("key_metadata"), first, end)
    for fields in zip(
        paths, *columns, _decode_summaries(rows, first, end), key_metadata, longs["first_row_id"], strict=True
    ):
        yield ManifestFile(*fields)


def _decode_summaries(rows: _DecodedRows, first: int, end: int) -> Iterator[tuple[FieldSummary, ...] | None]:
    """Yield the partition summaries of the manifests from `first` to `end` (exclusive) of a list.

    The summaries of all manifests are in common arrays, so the counts of the rows give the part of each manifest.
    """
    nulls, nans, lowers, uppers = rows.read_elements("partitions", 4)
    flags = {0: False, 1: True}
    counts = rows.read_element_counts("partitions")
    summaries_start = int(np.maximum(counts[:first], 0).sum())
    summaries_end = summaries_start + int(np.maximum(counts[first:end], 0).sum())
    summaries = [
        FieldSummary(flags.get(null), flags.get(nan), lower, upper)
        for null, nan, lower, upper in zip(
            nulls[0][summaries_start:summaries_end].tolist(),
            nans[0][summaries_start:summaries_end].tolist(),
            rows.read_raw(Spans(*lowers), summaries_start, summaries_end),
            rows.read_raw(Spans(*uppers), summaries_start, summaries_end),
            strict=True,
        )
    ]
    start = 0
    for count in counts[first:end].tolist():
        yield None if count < 0 else tuple(summaries[start : start + count])
        start += max(count, 0)


def _decode_rows(
    data: bytes | memoryview, location: str, reader: RecordReader, inflated_limit_bytes: int
) -> _DecodedRows:
    """Decode the requested fields of a file's rows.

    The inflated size is limited in proportion to the size of the file, but a small file may also inflate to
    `_INFLATED_BYTES_MIN`. The compiled schemas of most files are cached, because few schemas occur.
    """
    limit_bytes = min(inflated_limit_bytes, _INFLATED_BYTES_MIN + _INFLATION_RATIO_MAX * len(data))
    container = read_container(data, location, inflated_limit_bytes=limit_bytes)
    try:
        schema = container.metadata["avro.schema"]
        compiled = (_compile_cached if len(schema) <= _CACHED_SCHEMA_MAX else compile_schema)(schema, reader)
    except Corrupt as error:
        raise Corrupt(f"{location}: {error.message}") from error
    count, columns, groups = execute(compiled.program, container.heap, container.edges, container.counts, location)
    return _DecodedRows(location, container, compiled, count, columns, groups)


_CACHED_SCHEMA_MAX = 1 << 17
"""The maximum number of characters of a cached schema.

The schemas of tables with a thousand columns are shorter, because a manifest's schema does not list columns.
"""


# All manifests of a table have a few different schema texts, and compiling one takes as long as decoding 200 entries.
_compile_cached = lru_cache(maxsize=128)(compile_schema)


@dataclass(frozen=True, slots=True)
class _DecodedRows:
    """The columns that a run of the program has decoded, by name.

    A field that the writer's schema does not have is null in every row.
    """

    location: str
    container: Container
    compiled: Compiled
    count: int
    columns: list[tuple[NDArray[np.int64] | None, NDArray[np.int32] | None]]
    groups: list[Any]

    def read_long(self, name: str) -> NDArray[np.int64]:
        column = self.compiled.columns.get(name)
        values = None if column is None else self.columns[column][0]
        return np.full(self.count, MISSING, np.int64) if values is None else values

    def read_text(self, name: str) -> Spans:
        column = self.compiled.columns.get(name)
        starts, lengths = (None, None) if column is None else self.columns[column]
        if starts is None or lengths is None:
            return Spans(np.zeros(self.count, np.int64), np.full(self.count, -1, np.int32))
        return Spans(starts, lengths)

    def read_element_counts(self, name: str) -> NDArray[np.int32]:
        column = self.compiled.columns.get(name)
        counts = None if column is None else self.columns[column][1]
        return np.full(self.count, -1, np.int32) if counts is None else counts

    def read_group(self, name: str, default: Any) -> Any:
        group = self.compiled.groups.get(name)
        return default if group is None else self.groups[group]

    def read_elements(self, name: str, width: int) -> _Elements:
        return cast(_Elements, self.read_group(name, [(np.empty(0, np.int64), np.empty(0, np.int32))] * width))

    def read_partition(self) -> tuple[PartitionFieldValues, ...]:
        """Return the values of the partition fields.

        Some writers omit the field ids from the Avro schema. The ids are then read from the partition spec in the
        header.
        """
        fields = self.compiled.partition
        ids = [field.field_id for field in fields]
        if None in ids:
            ids = self._read_declared_ids(len(fields))
        return tuple(self._read_partition_values(field, cast(int, id_)) for field, id_ in zip(fields, ids, strict=True))

    def _read_partition_values(self, field: PartitionFieldColumn, field_id: int) -> PartitionFieldValues:
        field_description = (field_id, field.name, field.type, field.logical)
        values, lengths = (None, None) if field.column is None else self.columns[field.column]
        if values is None:
            valid = np.zeros(self.count, np.uint8)
            return PartitionFieldValues(*field_description, longs=np.full(self.count, MISSING, np.int64), valid=valid)
        assert lengths is not None
        valid = (lengths >= 0).astype(np.uint8)
        if field.type in ("boolean", "int", "long"):
            return PartitionFieldValues(*field_description, longs=values, valid=valid)
        if field.type in ("float", "double"):
            return PartitionFieldValues(*field_description, doubles=values.view(np.float64), valid=valid)
        return PartitionFieldValues(*field_description, spans=Spans(values, lengths))

    def _read_declared_ids(self, width: int) -> list[int | None]:
        """Return the field ids of the partition spec in the header, for a writer that omitted them from the schema.

        Fields without ids have consecutive ids, as in format version 1. `width` is the number of fields in the schema.
        """
        try:
            declared_fields = convert_json(self.container.metadata.get("partition-spec", ""), list[_DeclaredField])
        except msgspec.DecodeError:
            declared_fields = []
        if len(declared_fields) != width:
            raise Corrupt(f"{self.location}: its partition fields have ids neither in the schema nor in a spec")
        return [
            _FIRST_PARTITION_FIELD_ID + index if field.field_id is None else field.field_id
            for index, field in enumerate(declared_fields)
        ]

    def read_numbers(self, name: str, first: int, end: int) -> list[int | None]:
        return [None if value == MISSING else value for value in self.read_long(name)[first:end].tolist()]

    def read_raw(self, spans: Spans, first: int, end: int) -> list[bytes | None]:
        """Return the bytes of the rows from `first` to `end` (exclusive), or None for null.

        `spans` has the positions and the lengths of the texts of all rows.
        """
        heap = self.container.heap.data
        return [
            None if length < 0 else bytes(heap[start : start + length])
            for start, length in zip(spans.starts[first:end].tolist(), spans.lengths[first:end].tolist(), strict=True)
        ]


class _DeclaredField(msgspec.Struct):
    """A partition field in the header of a manifest."""

    field_id: int | None = msgspec.field(name="field-id", default=None)


_FIRST_PARTITION_FIELD_ID = 1000
"""The first partition field id of a version 1 spec without ids (spec: "Partitioning")."""
