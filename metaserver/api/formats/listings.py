"""What the metadata routes list: items of named columns, read for one page, as Arrow arrays or as lists for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from metaserver.api.formats import arrow
from metaserver.api.formats.arrow_stream import Columns
from metaserver.iceberg.metadata.metadata import TableMetadata
from metaserver.iceberg.types.values import MICROS_PER_DAY, NANOS_PER_MICRO, Value, encode_json
from metaserver.index.blocks.packing import MISSING, Form, Longs, value_of
from metaserver.planner.lookup.lookup import FoundFiles, FoundStatistics, RequestedColumn, Strings
from metaserver.planner.lookup.partitions import FilesByPartition, PartitionTuple, group_by_partition
from metaserver.planner.lookup.prefix import field_kind
from metaserver.planner.scan.scan import Scan
from metaserver.wire import encode_json as to_json

CONTENTS = ("data", "position-deletes", "equality-deletes")
_INTEGER = {"type": ["integer", "null"]}
_PARTITION = {
    "type": "object",
    "description": "Values by the names of partition fields; may be sent back as `partition`.",
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
        "description": "How many delete files a reader has to apply; null for delete files.",
    },
}
STATS_COLUMNS: dict[str, dict[str, Any]] = {
    "file": {
        "type": "integer",
        "description": "Number of the file in its snapshot: its manifest, and its place in it.",
    },
    "file-path": {"type": "string"},
    "lower-bound": {"description": "A value of the column's type (spec: JSON single-value serialization), or null."},
    "upper-bound": {"description": "As lower-bound."},
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
    "file-size-in-bytes": {"type": "integer", "description": "Of the data files."},
    "position-delete-records": {"type": "integer"},
    "position-delete-files": {"type": "integer", "description": "Deletion vectors included."},
    "equality-delete-records": {"type": "integer"},
    "equality-delete-files": {"type": "integer"},
    "last-updated-snapshot-id": _INTEGER,
    "last-updated-ms": _INTEGER,
}


class Listing(Protocol):
    """Items numbered from 0, in an order that depends on the snapshot alone."""

    @property
    def total(self) -> int: ...

    def stream(self, names: Sequence[str], start: int, end: int, about: Mapping[str, str]) -> bytes | bytearray:
        """An Arrow IPC stream of the items from `start` up to, not including, `end`: the columns of those names, with _
        for -, and `about` as metadata of the schema."""

    def lists(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        """The same columns as values for JSON, one list a name."""


def items(listing: Listing, names: Sequence[str], start: int, end: int) -> list[dict[str, Any]]:
    """The items from number `start` up to, not including, `end`, for JSON."""
    columns = listing.lists(names, start, end)
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


class FileListing:
    """Data files, then delete files. `scan` is of the whole snapshot: who applies which delete files."""

    def __init__(self, metadata: TableMetadata, data: FoundFiles, deletes: FoundFiles, scan: Scan | None) -> None:
        self._metadata = metadata
        self._parts = (data, deletes)
        self._scan = scan
        self.total = data.files + deletes.files

    def stream(self, names: Sequence[str], start: int, end: int, about: Mapping[str, str]) -> bytes:
        pages = [_FilesPage(self._metadata, found, scan) for found, scan in self._page(start, end)]
        return arrow.stream({name: pa.concat_arrays([page.array(name) for page in pages]) for name in names}, about)

    def lists(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        pages = [_FilesPage(self._metadata, found, scan) for found, scan in self._page(start, end)]
        return [[value for page in pages for value in page.values(name)] for name in names]

    def _page(self, start: int, end: int) -> list[tuple[FoundFiles, Scan | None]]:
        data, deletes = self._parts
        rest = (max(0, start - data.files), max(0, end - data.files))
        return [(data.part(start, end), self._scan), (deletes.part(*rest), None)]


class _FilesPage:
    def __init__(self, metadata: TableMetadata, found: FoundFiles, scan: Scan | None) -> None:
        self._metadata = metadata
        self._found = found
        self._scan = scan
        self._grouped: FilesByPartition | None = None

    def array(self, name: str) -> pa.Array:
        match name:
            case "file-path":
                return arrow.texts(self._found.texts("file_path"))
            case "content":
                return _chosen(self._contents(), CONTENTS)
            case "file-format" | "partition":
                numbers, values = self._formats() if name == "file-format" else self._partitions()
                texts = [one if isinstance(one, str) else to_json(one).decode() for one in values]
                return _chosen(numbers, texts)
        return arrow.integers(self._longs(name))

    def values(self, name: str) -> list[Any]:
        match name:
            case "file-path":
                return _decoded(self._found.texts("file_path"))
            case "content":
                return [CONTENTS[number] for number in self._contents().tolist()]
            case "file-format" | "partition":
                numbers, values = self._formats() if name == "file-format" else self._partitions()
                return [values[number] for number in numbers.tolist()]
        return _nullable(self._longs(name))

    def _longs(self, name: str) -> Longs:
        found = self._found
        match name:
            case "spec-id":
                return found.by_segment([segment.block.spec_id for segment in found.segments])
            case "sequence-number":
                return found.sequence_numbers()
            case "snapshot-id":
                return found.snapshot_ids()
            case "delete-files":
                return self._delete_files()
        return found.longs(name.replace("-", "_"))

    def _contents(self) -> Longs:
        """Version 1 does not say."""
        return np.clip(self._found.longs("content"), 0, len(CONTENTS) - 1)

    def _formats(self) -> tuple[Longs, list[str]]:
        known: dict[str, int] = {}
        names = [(text or b"").decode("utf-8", "replace").lower() for text in self._found.texts("file_format").values()]
        return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64), list(known)

    def _partitions(self) -> tuple[Longs, list[dict[str, object]]]:
        if self._grouped is None:
            self._grouped = group_by_partition(self._found)
        values = [partition_json(self._metadata, partition) for partition in self._grouped.partitions]
        return self._grouped.numbers, values

    def _delete_files(self) -> Longs:
        files = self._found.files
        if files and self._found.segments[0].block.content != 0:
            return np.full(files, MISSING, dtype=np.int64)
        if self._scan is None:
            return np.zeros(files, dtype=np.int64)
        applying = self._scan.deletes_of(self._found.rows())
        return np.array([len(deletes) for deletes in applying], dtype=np.int64)


class ColumnStats:
    """One column's statistics, file by file."""

    def __init__(self, found: FoundFiles, column: RequestedColumn) -> None:
        self._found = found
        self._column = column
        self.total = found.files

    def stream(self, names: Sequence[str], start: int, end: int, about: Mapping[str, str]) -> bytearray:
        found = self._found.part(start, end)
        stats = found.stats(self._column)
        columns = Columns(found.files)
        for name in names:
            shown = name.replace("-", "_")
            if name == "file-path":
                columns.add(shown, pa.string(), arrow.texts(found.texts("file_path")))
            elif name == "file":
                rows = pa.py_buffer(found.rows())
                columns.add(shown, pa.int64(), pa.Array.from_buffers(pa.int64(), found.files, [None, rows]))
            elif side := _SIDES.get(name):
                self._add_bounds(columns, shown, stats, side)
            else:
                columns.add(shown, pa.int64(), stats.integer_counts(_COUNTS[name]))
        return columns.stream(about)

    def _add_bounds(self, columns: Columns, name: str, stats: FoundStatistics, side: str) -> None:
        kind = arrow.arrow_type(self._column.kind)
        packed = stats.integer_bounds(side) if arrow.is_integer(kind) else None
        if packed is not None:
            columns.add(name, kind, packed)
        else:
            values = arrow.bounds(stats.bounds(side), self._column.kind)
            columns.add(name, values.type, values)

    def lists(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        found = self._found.part(start, end)
        stats = found.stats(self._column)
        made: list[list[Any]] = []
        for name in names:
            if name == "file-path":
                made.append(_decoded(found.texts("file_path")))
            elif side := _SIDES.get(name):
                made.append(_values(stats.bounds(side), self._column.kind))
            else:
                made.append(_nullable(found.rows() if name == "file" else stats.counts(_COUNTS[name])))
        return made


_SIDES = {"lower-bound": "lower", "upper-bound": "upper"}
_COUNTS = {
    "value-count": "value_counts",
    "null-value-count": "null_value_counts",
    "nan-value-count": "nan_value_counts",
    "column-size": "column_sizes",
}


class PartitionListing:
    """Partitions that hold a file, each with what its files add up to. Those of data files come first."""

    def __init__(self, metadata: TableMetadata, data: FoundFiles, deletes: FoundFiles) -> None:
        self._metadata = metadata
        self._rows: dict[tuple[int, bytes], dict[str, Any]] = {}
        self._add_files(data, ("record-count", "file-count"))
        for number, kind in ((1, "position-delete"), (2, "equality-delete")):
            self._add_files(deletes, (f"{kind}-records", f"{kind}-files"), only=number)
        self._items = list(self._rows.values())

    @property
    def total(self) -> int:
        return len(self._items)

    def stream(self, names: Sequence[str], start: int, end: int, about: Mapping[str, str]) -> bytes:
        made = {}
        for name, values in zip(names, self.lists(names, start, end), strict=True):
            if name == "partition":
                made[name] = pa.array([to_json(value).decode() for value in values], pa.string())
            else:
                made[name] = pa.array(values, pa.int64())
        return arrow.stream(made, about)

    def lists(self, names: Sequence[str], start: int, end: int) -> list[list[Any]]:
        return [[item[name] for item in self._items[start:end]] for name in names]

    def _add_files(self, found: FoundFiles, names: tuple[str, str], only: int | None = None) -> None:
        """Adds the files found, those of one `content` only, to the columns `names`: of records and of files."""
        within = group_by_partition(found)
        counted = np.ones(found.files, dtype=np.int64) if only is None else (found.longs("content") == only).astype(int)
        items = [self._item(partition) for partition in within.partitions]
        records, files = within.sums(found.longs("record_count") * counted), within.sums(counted)
        sizes = within.sums(found.longs("file_size_in_bytes")) if only is None else [0] * len(items)
        for item, *more in zip(items, records, files, sizes, strict=True):
            for name, value in zip((*names, "file-size-in-bytes"), more, strict=True):
                item[name] += value
        self._update(found, within, items)

    def _item(self, partition: PartitionTuple) -> dict[str, Any]:
        """By what its partition looks like: two manifests may hold equal values in different types."""
        shown = partition_json(self._metadata, partition)
        item = self._rows.get(key := (partition.spec_id, to_json(shown)))
        if item is None:
            item = self._rows[key] = dict.fromkeys(PARTITION_COLUMNS, 0)
            item |= {"spec-id": partition.spec_id, "partition": shown}
            item |= {"last-updated-snapshot-id": None, "last-updated-ms": None}
        return item

    def _update(self, found: FoundFiles, within: FilesByPartition, items: list[dict[str, Any]]) -> None:
        """The latest snapshot, of those that are still known, that added one of the files."""
        ids, which = np.unique(found.snapshot_ids(), return_inverse=True)
        snapshots = [self._metadata.snapshot(int(one)) for one in ids]
        times = np.array([MISSING if one is None else one.timestamp_ms for one in snapshots], dtype=np.int64)[which]
        latest = np.full(len(items), MISSING, dtype=np.int64)
        np.maximum.at(latest, within.numbers, times)
        at_latest = np.flatnonzero((times == latest[within.numbers]) & (times != MISSING))
        numbers, firsts = np.unique(within.numbers[at_latest], return_index=True)
        for number, file in zip(numbers.tolist(), at_latest[firsts].tolist(), strict=True):
            item, time_ms = items[number], int(times[file])
            if item["last-updated-ms"] is None or time_ms > item["last-updated-ms"]:
                item |= {"last-updated-ms": time_ms, "last-updated-snapshot-id": int(ids[which[file]])}


def partition_json(metadata: TableMetadata, partition: PartitionTuple) -> dict[str, object]:
    """Values by name in the order of the table's spec, as JSON single values of the types that the fields have now."""
    stored = {field.field_id: field for field in partition.fields}
    spec = metadata.spec(partition.spec_id)
    made: dict[str, object] = {}
    for field in () if spec is None else spec.fields:
        found = stored.get(field.field_id or 0)
        if found is None or found.value is None:
            made[field.name] = None
            continue
        kind = field_kind(metadata, field) or found.kind
        made[field.name] = _json(*_promoted(found.kind, kind, found.value))
    return made


def _promoted(stored: str, kind: str, value: Value) -> tuple[str, Value]:
    """A date of a column that holds times now (spec, "Schema Evolution")."""
    if stored == "date" and kind in ("timestamp", "timestamp_ns"):
        assert isinstance(value, int)
        return kind, value * MICROS_PER_DAY * (NANOS_PER_MICRO if kind == "timestamp_ns" else 1)
    return kind, value


def _json(kind: str, value: Value) -> object:
    """None for bytes that are no value of the type, as truncated bounds of UUIDs."""
    try:
        return encode_json(kind, value)
    except ValueError:
        return None


def _values(found: Longs | npt.NDArray[np.float64] | Strings, kind: str) -> list[Any]:
    """Bounds as JSON single values."""
    if isinstance(found, Strings):
        return [None if one is None else _json(kind, value_of(Form.STRINGS, kind, one)) for one in found.values()]
    if found.dtype == np.float64:
        return [None if math.isnan(one) else _json(kind, one) for one in found.tolist()]
    return [None if one == MISSING else _json(kind, value_of(Form.INTEGERS, kind, one)) for one in found.tolist()]


def _nullable(found: Longs) -> list[int | None]:
    return [None if one == MISSING else one for one in found.tolist()]


def _decoded(found: Strings) -> list[str | None]:
    return [None if one is None else one.decode("utf-8", "replace") for one in found.values()]


def _chosen(numbers: Longs, values: Sequence[str]) -> pa.Array:
    """Few values, each written once."""
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32)), pa.array(values, pa.string()))
