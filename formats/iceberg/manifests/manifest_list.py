"""Convert the rows of a decoded manifest to content files with current partition types (spec: "Data File Fields").

The partition values in a manifest have the types that the partition fields had when it was written. Since then, columns
may have been promoted or dropped. A value that is invalid for the current type is Corrupt, because a guess could assign
files of different partitions, and their deletes, to the same partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from uuid import UUID

from seamark.formats.iceberg.manifests._manifest import MISSING
from seamark.formats.iceberg.manifests.content_file import DATA, UNKNOWN, ContentFile
from seamark.formats.iceberg.manifests.manifest import DecodedManifest, PartitionFieldValues, Spans
from seamark.formats.iceberg.metadata.partition import PartitionSpec
from seamark.formats.iceberg.types.types import get_base_name
from seamark.formats.iceberg.types.values import (
    FLOATS,
    INTS,
    LONG_MAX,
    LONG_MIN,
    LONGS,
    MICROS_PER_DAY,
    NANOS_PER_DAY,
    Value,
)
from seamark.formats.runtime.errors import Corrupt


def decode_content_files(manifest: DecodedManifest, spec: PartitionSpec, types: Sequence[str]) -> Iterator[ContentFile]:
    """Yield a content file for each row, in order.

    Args:
        manifest: The manifest.
        spec: The partition spec of the manifest.
        types: The current types of the spec's fields.

    Raises:
        Corrupt: A value is invalid. The message names the manifest's path.
    """
    rows = manifest.rows
    heap = manifest.heap.tobytes()
    by_column = {name: _group_values_by_row(rows, columns, None) for name, columns in manifest.counts.items()}
    by_column |= {name: _group_values_by_row(rows, columns, heap) for name, columns in manifest.bounds.items()}
    columns: dict[str, Iterable[Any]] = {
        "file_path": _decode_texts(manifest, "file_path", heap),
        "file_format": [(name or "").upper() for name in _decode_texts(manifest, "file_format", heap)],
        "partition": _decode_partitions(manifest, spec, types, heap),
        "referenced_data_file": _decode_texts(manifest, "referenced_data_file", heap),
        "key_metadata": _read_spans(manifest.texts["key_metadata"], heap),
        "content": read_numbers(manifest, "content", DATA),
        **{name: read_numbers(manifest, name) for name in _FILE_NUMBERS},
        **{name: _split_lists(*manifest.lists[name]) for name in ("split_offsets", "equality_ids")},
        **by_column,
    }
    names = tuple(columns)
    for values in zip(*columns.values(), strict=True):
        yield ContentFile(spec_id=spec.spec_id, **dict(zip(names, values, strict=True)))


_FILE_NUMBERS = (
    "record_count",
    "file_size_in_bytes",
    "sort_order_id",
    "first_row_id",
    "content_offset",
    "content_size_in_bytes",
)


def _read_spans(spans: Spans, heap: bytes) -> list[bytes | None]:
    return [
        None if length < 0 else heap[start : start + length]
        for start, length in zip(spans.starts.tolist(), spans.lengths.tolist(), strict=True)
    ]


def _decode_texts(manifest: DecodedManifest, name: str, heap: bytes) -> list[str | None]:
    try:
        return [None if text is None else text.decode() for text in _read_spans(manifest.texts[name], heap)]
    except UnicodeDecodeError:  # The Avro type of the field is bytes.
        raise Corrupt(f"{manifest.location}: {name} of an entry is not UTF-8 text") from None


def _split_lists(counts: Any, values: Any) -> Iterator[tuple[int, ...] | None]:
    elements, start = values.tolist(), 0
    for count in counts.tolist():
        yield tuple(elements[start : start + count]) if count > 0 else None
        start += max(count, 0)


def _group_values_by_row(rows: int, columns: dict[int, Any], heap: bytes | None) -> list[dict[int, Any] | None]:
    """Return the values of each row by column id, or None for a row without values.

    Args:
        rows: The number of rows.
        columns: For each column id, the numbers of the rows with a value, and the values. Bounds are given by their
            starts and lengths in `heap`.
        heap: The bytes of all bounds, or None if the values are counts.
    """
    by_row: list[dict[int, Any] | None] = [None] * rows
    for column in sorted(columns):
        row_numbers, *spans = columns[column]
        values = spans[0].tolist() if heap is None else _read_spans(Spans(*spans), heap)
        for row, value in zip(row_numbers.tolist(), values, strict=True):
            row_values = by_row[row]
            if row_values is None:
                by_row[row] = {column: value}
            else:
                row_values[column] = value
    return by_row


def _decode_partitions(
    manifest: DecodedManifest, spec: PartitionSpec, types: Sequence[str], heap: bytes
) -> Iterable[tuple[Value | None, ...]]:
    if not spec.fields:
        return [()] * manifest.rows
    values_by_field_id = {values.field_id: values for values in manifest.partition}
    columns: list[list[Value | None]] = []
    for field, kind in zip(spec.fields, types, strict=True):
        values = values_by_field_id.get(field.field_id or 0)
        try:
            columns.append([None] * manifest.rows if values is None else _decode_partition_column(values, kind, heap))
        except ValueError as error:
            raise Corrupt(f"{manifest.location}: partition field {field.name}: {error}") from None
    return zip(*columns, strict=True)


def _decode_partition_column(values: PartitionFieldValues, kind: str, heap: bytes) -> list[Value | None]:
    """Return the values of a partition field, converted to its current type (spec: "Schema Evolution").

    A column without values is not converted, because its stored type need not fit the current type.

    Args:
        values: The stored values.
        kind: The current type.
        heap: The bytes of stored texts and bytes.
    """
    name = get_base_name(kind)
    if values.spans is not None:
        stored_values: list[Any] = _read_spans(values.spans, heap)
        read_value = _make_bytes_reader(values, kind)
    else:
        numbers = values.doubles if values.doubles is not None else values.longs
        assert numbers is not None
        assert values.valid is not None
        valid = values.valid.tolist()
        stored_values = [value if is_valid else None for value, is_valid in zip(numbers.tolist(), valid, strict=True)]
        if not any(valid):
            return stored_values
        read_value = _make_number_reader(values, name)
    return [None if value is None else read_value(value) for value in stored_values]


def _make_bytes_reader(values: PartitionFieldValues, kind: str) -> Callable[[Any], Value]:
    """Return the function that converts a stored value of the type bytes, string or fixed to the current type."""
    name = get_base_name(kind)
    if name == "decimal" and values.logical == "decimal":
        return lambda data: int.from_bytes(data, "big", signed=True)
    if name == "uuid" and values.type == "string":
        return lambda data: UUID(data.decode()).bytes
    if name == "string" and values.type == "string":
        return lambda data: str(data, "utf-8")
    if name in ("uuid", "fixed", "binary") and values.type in ("fixed", "bytes"):
        return lambda data: cast(Value, data)
    return _make_refusal(values, kind)


def _make_number_reader(values: PartitionFieldValues, name: str) -> Callable[[Any], Value]:
    """Return the function that converts a stored number to the current type, whose base name is `name`.

    The type of a column can change from date to timestamp. Older manifests then have days, which become times.
    """
    if name in FLOATS and values.doubles is not None:
        return float
    if name == "boolean" and values.type == "boolean":
        return bool
    if values.type == "int" and values.logical == "date" and name in _UNITS_PER_DAY:
        return lambda days: _promote_date(name, days)
    if values.doubles is None and values.type != "boolean" and name in (INTS | LONGS):
        return int
    return _make_refusal(values, name)


_UNITS_PER_DAY = {"timestamp": MICROS_PER_DAY, "timestamp_ns": NANOS_PER_DAY}
"""The number of units in a day, by the types to which a date can be promoted."""


def _promote_date(name: str, days: int) -> int:
    units = days * _UNITS_PER_DAY[name]
    if not LONG_MIN <= units <= LONG_MAX:
        raise ValueError(f"the date {days} is outside the range of {name}")
    return units


def _make_refusal(values: PartitionFieldValues, kind: str) -> Callable[[Any], Value]:
    """Return a function that raises ValueError for each value, because its stored type does not fit."""

    def refuse(value: Any) -> Value:
        if kind == UNKNOWN:
            raise ValueError("the field has values, but no schema of the table has its source column")
        raise ValueError(f"the stored type {values.type} ({values.logical}) cannot be converted to {kind}")

    return refuse


def read_numbers(manifest: DecodedManifest, name: str, absent: int | None = None) -> list[int | None]:
    """Return a field of `LONGS` for each row, with `absent` instead of null."""
    return [absent if value == MISSING else value for value in manifest.longs[name].tolist()]
