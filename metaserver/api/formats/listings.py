"""Listings of the metadata routes: one page of items with named columns, as Arrow arrays or as lists for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from seamark.formats.iceberg.metadata.metadata import TableMetadata
from seamark.formats.iceberg.types.values import Value, encode_json, promote_value
from seamark.formats.index.packing import MISSING, Form, Longs, decode_value
from seamark.formats.protocol.wire import encode_json as to_json
from seamark.metaserver.api.formats import arrow
from seamark.metaserver.api.formats.arrow_stream import RecordBatchWriter
from seamark.metaserver.planner.lookup.lookup import FoundFiles, FoundStatistics, RequestedColumn, Strings
from seamark.metaserver.planner.lookup.partitions import FilesByPartition, PartitionTuple, group_by_partition
from seamark.metaserver.planner.lookup.prefix import get_field_kind
from seamark.metaserver.planner.scan.scan_plan import ScanPlan

CONTENTS = ("data", "position-deletes", "equality-deletes")
_INTEGER = {"type": ["integer", "null"]}
_PARTITION = {
    "type": "object",
    "description": "The values by the names of partition fields. Requests accept it as `partition`.",
}
FILE_COLUMNS: dict[str, dict[str, Any]] = {
    "content": {"enum": list(CONTENTS)},
    "file-path": {"type": "string"},
    "file-format": {"type": "string"},
    "spec-id": {"type": "integer"},
    "partition": _PARTITION,
    "record-count": {"type": "integer"},
    "file-size-in-bytes": {"type": "integer"},
    "sequence-number": {"type": "integer"},
    "snapshot-id": {"type": ["integer", "null"], "description": "The snapshot that added the file."},
    "delete-files": {
        "type": ["integer", "null"],
        "description": "The number of delete files that apply to the file. It is null for delete files.",
    },
}
STATS_COLUMNS: dict[str, dict[str, Any]] = {
    "file": {
        "type": "integer",
        "description": "The number of the file in its snapshot: the numbers of its manifest and of its manifest entry.",
    },
    "file-path": {"type": "string"},
    "lower-bound": {
        "description": "A value of the column's type (specification: JSON single-value serialization), or null."
    },
    "upper-bound": {"description": "A value in the same form as lower-bound."},
    "value-count": _INTEGER,
    "null-value-count": _INTEGER,
    "nan-value-count": _INTEGER,
    "column-size": _INTEGER,
}
PARTITION_COLUMNS: dict[str, dict[str, Any]] = {
    "spec-id": {"type": "integer"},
    "partition": _PARTITION,
    "record-count": {"type": "integer"},
    "file-count": {"type": "integer"},
    "file-size-in-bytes": {"type": "integer", "description": "The total size of the data files."},
    "position-delete-records": {"type": "integer"},
    "position-delete-files": {"type": "integer", "description": "The number includes deletion vectors."},
    "equality-delete-records": {"type": "integer"},
    "equality-delete-files": {"type": "integer"},
    "last-updated-snapshot-id": _INTEGER,
    "last-updated-ms": _INTEGER,
}


class Listing(Protocol):
    """A list of items, numbered from 0. The order of the items depends only on the snapshot."""

    @property
    def total(self) -> int: ...

    def stream(self, names: Sequence[str], start: int, end: int, metadata: Mapping[str, str]) -> bytes | bytearray:
        """Return an Arrow IPC stream of the items from `start` up to and not including `end`.

        The stream has the named columns. In their names, `-` is replaced by `_`. `metadata` becomes the metadata of the
        schema.
        """

    def list_json_columns(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        """Return the named columns of the items from `start` up to and not including `end`, as lists of JSON values."""


def make_items(listing: Listing, names: Sequence[str], start: int, end: int) -> list[dict[str, Any]]:
    """Return the items of a listing from `start` up to and not including `end`, as JSON objects with these fields."""
    columns = listing.list_json_columns(names, start, end)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


class FileListing:
    """The data files of a snapshot, followed by its delete files.

    `scan` is a plan of the whole snapshot, which determines the delete files of each data file. Without it, the column
    `delete-files` is 0.
    """

    def __init__(self, metadata: TableMetadata, data: FoundFiles, deletes: FoundFiles, scan: ScanPlan | None) -> None:
        self._metadata = metadata
        self._parts = (data, deletes)
        self._scan = scan
        self.total = data.file_count + deletes.file_count

    def stream(self, names: Sequence[str], start: int, end: int, metadata: Mapping[str, str]) -> bytes:
        pages = [_FilesPage(self._metadata, files, scan) for files, scan in self._slice_page(start, end)]
        return arrow.encode_stream(
            {name: pa.concat_arrays([page.build_array(name) for page in pages]) for name in names}, metadata
        )

    def list_json_columns(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        pages = [_FilesPage(self._metadata, files, scan) for files, scan in self._slice_page(start, end)]
        return [[value for page in pages for value in page.list_values(name)] for name in names]

    def _slice_page(self, start: int, end: int) -> list[tuple[FoundFiles, ScanPlan | None]]:
        data, deletes = self._parts
        delete_range = (max(0, start - data.file_count), max(0, end - data.file_count))
        return [(data.slice_files(start, end), self._scan), (deletes.slice_files(*delete_range), None)]


class _FilesPage:
    """A page of data files or of delete files."""

    def __init__(self, metadata: TableMetadata, files: FoundFiles, scan: ScanPlan | None) -> None:
        self._metadata = metadata
        self._files = files
        self._scan = scan
        self._files_by_partition: FilesByPartition | None = None

    def build_array(self, name: str) -> pa.Array:
        """Return a column of the page as an Arrow array."""
        match name:
            case "file-path":
                return arrow.make_text_array(self._files.read_texts("file_path"))
            case "content":
                return _encode_dictionary(self._read_contents(), CONTENTS)
            case "file-format" | "partition":
                numbers, values = self._read_formats() if name == "file-format" else self._read_partitions()
                texts = [value if isinstance(value, str) else to_json(value).decode() for value in values]
                return _encode_dictionary(numbers, texts)
        return arrow.make_integer_array(self._read_longs(name))

    def list_values(self, name: str) -> list[Any]:
        """Return the values of a column for the files of the page."""
        match name:
            case "file-path":
                return _decode_strings(self._files.read_texts("file_path"))
            case "content":
                return [CONTENTS[number] for number in self._read_contents().tolist()]
            case "file-format" | "partition":
                numbers, values = self._read_formats() if name == "file-format" else self._read_partitions()
                return [values[number] for number in numbers.tolist()]
        return _make_nullable(self._read_longs(name))

    def _read_longs(self, name: str) -> Longs:
        """Return an integer column of the page, int64[files]."""
        files = self._files
        match name:
            case "spec-id":
                return files.repeat_by_segment([segment.block.spec_id for segment in files.segments])
            case "sequence-number":
                return files.read_sequence_numbers()
            case "snapshot-id":
                return files.read_snapshot_ids()
            case "delete-files":
                return self._count_delete_files()
        return files.read_longs(name.replace("-", "_"))

    def _read_contents(self) -> Longs:
        """Return the content type of each file.

        Format version 1 has only data files and no field for the type, so a missing (negative) value becomes 0, data.
        """
        return np.clip(self._files.read_longs("content"), 0, len(CONTENTS) - 1)

    def _read_formats(self) -> tuple[Longs, list[str]]:
        """Return the position of each file's format in a list, and the list of formats."""
        number_by_name: dict[str, int] = {}
        format_names = [
            (format_bytes or b"").decode("utf-8", "replace").lower()
            for format_bytes in self._files.read_texts("file_format").list_values()
        ]
        return np.array(
            [number_by_name.setdefault(format_name, len(number_by_name)) for format_name in format_names],
            dtype=np.int64,
        ), list(number_by_name)

    def _read_partitions(self) -> tuple[Longs, list[dict[str, object]]]:
        if self._files_by_partition is None:
            self._files_by_partition = group_by_partition(self._files)
        values = [encode_partition(self._metadata, partition) for partition in self._files_by_partition.partitions]
        return self._files_by_partition.numbers, values

    def _count_delete_files(self) -> Longs:
        """Return the number of delete files of each data file, or MISSING for delete files.

        All files of the page are of one kind, so the first file shows the kind.
        """
        files = self._files.file_count
        if files and self._files.segments[0].block.content != 0:
            return np.full(files, MISSING, dtype=np.int64)
        if self._scan is None:
            return np.zeros(files, dtype=np.int64)
        deletes_by_file = self._scan.find_deletes_by_file(self._files.list_entry_ids())
        return np.array([len(deletes) for deletes in deletes_by_file], dtype=np.int64)


class ColumnStats:
    """The statistics of one column for each file."""

    def __init__(self, files: FoundFiles, column: RequestedColumn) -> None:
        self._files = files
        self._column = column
        self.total = files.file_count

    def stream(self, names: Sequence[str], start: int, end: int, metadata: Mapping[str, str]) -> bytearray:
        """Return the columns as an Arrow IPC stream; see `Listing.stream`."""
        files = self._files.slice_files(start, end)
        stats = files.find_statistics(self._column)
        columns = RecordBatchWriter(files.file_count)
        for name in names:
            column_name = name.replace("-", "_")
            if name == "file-path":
                columns.add(column_name, pa.string(), arrow.make_text_array(files.read_texts("file_path")))
            elif name == "file":
                ids = pa.py_buffer(files.list_entry_ids())
                columns.add(column_name, pa.int64(), pa.Array.from_buffers(pa.int64(), files.file_count, [None, ids]))
            elif side := _SIDES.get(name):
                self._add_bounds(columns, column_name, stats, side)
            else:
                columns.add(column_name, pa.int64(), stats.read_integer_counts(_COUNTS[name]))
        return columns.build_stream(metadata)

    def _add_bounds(self, columns: RecordBatchWriter, name: str, stats: FoundStatistics, side: str) -> None:
        """Add a column with the lower or upper bounds. Bounds that are integers are copied without a conversion.

        Args:
            columns: The writer of the columns.
            name: The name of the new column.
            stats: The statistics of the files.
            side: "lower" or "upper".
        """
        kind = arrow.find_arrow_type(self._column.kind)
        integer_bounds = stats.read_integer_bounds(side) if arrow.is_stored_as_integer(kind) else None
        if integer_bounds is not None:
            columns.add(name, kind, integer_bounds)
        else:
            values = arrow.make_bound_array(stats.read_bounds(side), self._column.kind)
            columns.add(name, values.type, values)

    def list_json_columns(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        """Return the named columns of the files from `start` up to and not including `end`, as lists of JSON values."""
        files = self._files.slice_files(start, end)
        stats = files.find_statistics(self._column)
        columns: list[list[Any]] = []
        for name in names:
            if name == "file-path":
                columns.append(_decode_strings(files.read_texts("file_path")))
            elif side := _SIDES.get(name):
                columns.append(_encode_bounds_json(stats.read_bounds(side), self._column.kind))
            else:
                columns.append(
                    _make_nullable(files.list_entry_ids() if name == "file" else stats.counts(_COUNTS[name]))
                )
        return columns


_SIDES = {"lower-bound": "lower", "upper-bound": "upper"}
_COUNTS = {
    "value-count": "value_counts",
    "null-value-count": "null_value_counts",
    "nan-value-count": "nan_value_counts",
    "column-size": "column_sizes",
}


class PartitionListing:
    """The partitions of a snapshot that have a file, with sums over their files.

    The partitions with data files are first.
    """

    def __init__(self, metadata: TableMetadata, data: FoundFiles, deletes: FoundFiles) -> None:
        self._metadata = metadata
        self._items_by_key: dict[tuple[int, bytes], dict[str, Any]] = {}
        self._add_files(data, ("record-count", "file-count"))
        # The numbers are those of the field `content` in a manifest.
        for content, kind in ((1, "position-delete"), (2, "equality-delete")):
            self._add_files(deletes, (f"{kind}-records", f"{kind}-files"), content=content)
        self._items = list(self._items_by_key.values())

    @property
    def total(self) -> int:
        return len(self._items)

    def stream(self, names: Sequence[str], start: int, end: int, metadata: Mapping[str, str]) -> bytes:
        """Return rows of the listing as an Arrow stream."""
        columns = {}
        for name, values in zip(names, self.list_json_columns(names, start, end), strict=True):
            if name == "partition":
                columns[name] = pa.array([to_json(value).decode() for value in values], pa.string())
            else:
                columns[name] = pa.array(values, pa.int64())
        return arrow.encode_stream(columns, metadata)

    def list_json_columns(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        return [[item[name] for item in self._items[start:end]] for name in names]

    def _add_files(self, listed_files: FoundFiles, column_names: tuple[str, str], content: int | None = None) -> None:
        """Add the numbers of records and files to the two columns in `column_names`, for each partition.

        If `content` is None, also add the sizes of the files to the column `file-size-in-bytes`. Otherwise, count only
        files of this content type. Also update the last snapshot of each partition.
        """
        files_by_partition = group_by_partition(listed_files)
        is_counted = (
            np.ones(listed_files.file_count, dtype=np.int64)
            if content is None
            else (listed_files.read_longs("content") == content).astype(int)
        )
        items = [self._make_item(partition) for partition in files_by_partition.partitions]
        record_counts, file_counts = (
            files_by_partition.sum_values(listed_files.read_longs("record_count") * is_counted),
            files_by_partition.sum_values(is_counted),
        )
        sizes = (
            files_by_partition.sum_values(listed_files.read_longs("file_size_in_bytes"))
            if content is None
            else [0] * len(items)
        )
        for item, *numbers in zip(items, record_counts, file_counts, sizes, strict=True):
            for name, value in zip((*column_names, "file-size-in-bytes"), numbers, strict=True):
                item[name] += value
        self._set_last_snapshots(listed_files, files_by_partition, items)

    def _make_item(self, partition: PartitionTuple) -> dict[str, Any]:
        """Return the item of a partition.

        The key of an item is the JSON of the partition, because two manifests may store equal values with different
        types.
        """
        partition_json = encode_partition(self._metadata, partition)
        item = self._items_by_key.get(key := (partition.spec_id, to_json(partition_json)))
        if item is None:
            item = self._items_by_key[key] = dict.fromkeys(PARTITION_COLUMNS, 0)
            item |= {"spec-id": partition.spec_id, "partition": partition_json}
            item |= {"last-updated-snapshot-id": None, "last-updated-ms": None}
        return item

    def _set_last_snapshots(
        self, files: FoundFiles, files_by_partition: FilesByPartition, items: list[dict[str, Any]]
    ) -> None:
        """Set the latest known snapshot that added a file to each partition.

        Snapshots that have expired are unknown, and have no time. An earlier call may have set the snapshot of the
        partition's other files, so only a later snapshot replaces it.
        """
        ids, id_positions = np.unique(files.read_snapshot_ids(), return_inverse=True)
        snapshots = [self._metadata.snapshot(int(id_)) for id_ in ids]
        times = np.array(
            [MISSING if snapshot is None else snapshot.timestamp_ms for snapshot in snapshots], dtype=np.int64
        )[id_positions]
        latest = np.full(len(items), MISSING, dtype=np.int64)
        np.maximum.at(latest, files_by_partition.numbers, times)
        latest_rows = np.flatnonzero((times == latest[files_by_partition.numbers]) & (times != MISSING))
        item_positions, first_positions = np.unique(files_by_partition.numbers[latest_rows], return_index=True)
        for item_position, file in zip(item_positions.tolist(), latest_rows[first_positions].tolist(), strict=True):
            item, time_ms = items[item_position], int(times[file])
            if item["last-updated-ms"] is None or time_ms > item["last-updated-ms"]:
                item |= {"last-updated-ms": time_ms, "last-updated-snapshot-id": int(ids[id_positions[file]])}


def encode_partition(metadata: TableMetadata, partition: PartitionTuple) -> dict[str, object]:
    """Return the partition values as JSON single values, by field name, in the order of the partition's spec.

    The values have the current types of the fields.
    """
    field_values = {field.field_id: field for field in partition.fields}
    spec = metadata.spec(partition.spec_id)
    json_values: dict[str, object] = {}
    for field in () if spec is None else spec.fields:
        value = field_values.get(field.field_id or 0)
        if value is None or value.value is None:
            json_values[field.name] = None
            continue
        kind = get_field_kind(metadata, field) or value.kind
        json_values[field.name] = encode_bound_json(kind, promote_value(value.kind, kind, value.value))
    return json_values


def encode_bound_json(kind: str, value: Value) -> object:
    """Return a bound as a JSON value.

    Returns:
        None for bytes that are not a value of the type, such as truncated bounds of UUIDs.
    """
    try:
        return encode_json(kind, value)
    except ValueError:
        return None


def _encode_bounds_json(values: Longs | npt.NDArray[np.float64] | Strings, kind: str) -> list[Any]:
    """Return bounds as JSON single values."""
    if isinstance(values, Strings):
        return [
            None if string is None else encode_bound_json(kind, decode_value(Form.STRINGS, kind, string))
            for string in values.list_values()
        ]
    if values.dtype == np.float64:
        return [None if math.isnan(number) else encode_bound_json(kind, number) for number in values.tolist()]
    return [
        None if number == MISSING else encode_bound_json(kind, decode_value(Form.INTEGERS, kind, number))
        for number in values.tolist()
    ]


def _make_nullable(values: Longs) -> list[int | None]:
    return [None if value == MISSING else value for value in values.tolist()]


def _decode_strings(strings: Strings) -> list[str | None]:
    return [None if string is None else string.decode("utf-8", "replace") for string in strings.list_values()]


def _encode_dictionary(numbers: Longs, values: Sequence[str]) -> pa.Array:
    """Return a dictionary-encoded array of few distinct values."""
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), pa.array(values, pa.string()))
