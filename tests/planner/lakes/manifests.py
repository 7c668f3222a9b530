"""Manifests and manifest lists in the styles of several writers, written with fastavro and hand-made schemas.

Fields follow the specification's tables ("Manifests", "Manifest Lists"): their names are those of the reference
implementation, and readers use their ids. Styles differ in the order of fields, the optional fields, the codec and
the header keys.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import fastavro

from tests.planner.lakes.kinds import build_avro_type, to_avro_value
from tests.planner.lakes.metrics import ColumnMetrics
from tests.planner.lakes.partitioning import infer_result_kind

ADDED, EXISTING, DELETED = 1, 0, 2


@dataclass(frozen=True)
class PartitionField:
    """One field of a partition spec."""

    id: int
    name: str
    source: int
    transform: str

    def build_json(self) -> dict[str, Any]:
        return {"source-id": self.source, "field-id": self.id, "name": self.name, "transform": self.transform}


@dataclass(frozen=True)
class Style:
    """The style of one writer, for a whole table or one file.

    Attributes:
        has_shuffled_fields: Whether the fields of records are in random order.
        sparse: Whether most optional fields and header keys are missing.
        codec: The compression codec of Avro.
        old_names: Whether counts of files have their names of the first versions of Iceberg.
        summaries: Whether manifest lists have summaries of partition fields.
        seed: The seed of the random order.
    """

    has_shuffled_fields: bool
    sparse: bool
    codec: str
    old_names: bool
    summaries: bool
    seed: int

    @staticmethod
    def draw_style(rng: random.Random) -> Style:
        return Style(
            has_shuffled_fields=rng.random() < 0.25,
            sparse=rng.random() < 0.3,
            codec=rng.choice(["deflate", "deflate", "null"]),
            old_names=rng.random() < 0.3,
            summaries=rng.random() < 0.9,
            seed=rng.getrandbits(32),
        )


@dataclass
class Entry:
    """One manifest entry.

    Readers inherit sequence numbers and the snapshot id if they are null.
    """

    status: int
    snapshot_id: int | None
    sequence: int | None
    file_sequence: int | None
    file: Any


@dataclass
class Manifest:
    """A written manifest, with its data for a manifest list."""

    path: str
    length: int
    content: int
    spec_id: int
    sequence: int
    min_sequence: int
    snapshot_id: int
    entries: list[Entry]
    partitions: list[dict[str, Any]] | None
    first_row_id: int | None = None
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)


def _build_field(name: str, field_id: int, kind: Any, *, optional: bool = False) -> dict[str, Any]:
    if optional:
        return {"name": name, "type": ["null", kind], "default": None, "field-id": field_id}
    return {"name": name, "type": kind, "field-id": field_id}


def _build_map(key_id: int, value_id: int, value: str) -> dict[str, Any]:
    fields = [_build_field("key", key_id, "int"), _build_field("value", value_id, value)]
    entry_schema = {"type": "record", "name": f"k{key_id}_v{value_id}", "fields": fields}
    return {"type": "array", "items": entry_schema, "logicalType": "map"}


def _build_list(element_id: int, kind: str) -> dict[str, Any]:
    return {"type": "array", "items": kind, "element-id": element_id}


def build_partition_record(
    fields: tuple[PartitionField, ...], kinds: dict[int, str], *, plain_days: bool
) -> dict[str, Any]:
    """Return the Avro record of a spec's partition values.

    Args:
        fields: The fields of the spec.
        kinds: The source types by column id.
        plain_days: The values of the transform `day` have Avro's type int, without its logical type.
    """
    avro_fields = []
    for part in fields:
        kind = build_avro_type(infer_result_kind(part.transform, kinds[part.source]), f"p{part.id}")
        if plain_days and part.transform == "day":
            kind = "int"
        avro_fields.append(
            _build_field(f"p{part.id}", part.id, kind, optional=True) | {"iceberg-field-name": part.name}
        )
    return {"type": "record", "name": "r102", "fields": avro_fields}


def build_entry_schema(version: int, style: Style, content: int, partition: dict[str, Any]) -> dict[str, Any]:
    file_fields = [
        _build_field("file_path", 100, "string"),
        _build_field("file_format", 101, "string"),
        _build_field("partition", 102, partition),
        _build_field("record_count", 103, "long"),
        _build_field("file_size_in_bytes", 104, "long"),
    ]
    if version == 1:
        file_fields.append(_build_field("block_size_in_bytes", 105, "long"))
    else:
        file_fields.insert(0, _build_field("content", 134, "int"))
    maps = [
        _build_field("column_sizes", 108, _build_map(117, 118, "long"), optional=True),
        _build_field("value_counts", 109, _build_map(119, 120, "long"), optional=True),
        _build_field("null_value_counts", 110, _build_map(121, 122, "long"), optional=True),
        _build_field("nan_value_counts", 137, _build_map(138, 139, "long"), optional=True),
        _build_field("lower_bounds", 125, _build_map(126, 127, "bytes"), optional=True),
        _build_field("upper_bounds", 128, _build_map(129, 130, "bytes"), optional=True),
    ]
    other_fields = [
        _build_field("key_metadata", 131, "bytes", optional=True),
        _build_field("split_offsets", 132, _build_list(133, "long"), optional=True),
        _build_field("sort_order_id", 140, "int", optional=True),
    ]
    if style.sparse:
        other_fields = other_fields[1:2]
    if version >= 2 and (content == 1 or not style.sparse):
        other_fields.append(_build_field("equality_ids", 135, _build_list(136, "int"), optional=True))
        other_fields.append(_build_field("referenced_data_file", 143, "string", optional=True))
    if version >= 3:
        other_fields.append(_build_field("first_row_id", 142, "long", optional=True))
        other_fields.append(_build_field("content_offset", 144, "long", optional=True))
        other_fields.append(_build_field("content_size_in_bytes", 145, "long", optional=True))
    file_fields += maps + other_fields
    entry_fields = [_build_field("status", 0, "int"), _build_field("snapshot_id", 1, "long", optional=version > 1)]
    if version > 1:
        entry_fields.append(_build_field("sequence_number", 3, "long", optional=True))
        entry_fields.append(_build_field("file_sequence_number", 4, "long", optional=True))
    if style.has_shuffled_fields:
        random.Random(style.seed).shuffle(file_fields)
    entry_fields.append(_build_field("data_file", 2, {"type": "record", "name": "r2", "fields": file_fields}))
    return {"type": "record", "name": "manifest_entry", "fields": entry_fields}


def _list_by_column(metrics: dict[int, ColumnMetrics], name: str) -> list[dict[str, Any]] | None:
    pairs = [
        {"key": key, "value": getattr(column_metrics, name)}
        for key, column_metrics in metrics.items()
        if getattr(column_metrics, name) is not None
    ]
    return pairs or None


def build_entry_record(entry: Entry, fields: tuple[PartitionField, ...], kinds: dict[int, str]) -> dict[str, Any]:
    """Return an entry as a record for fastavro, which omits fields that the schema does not have."""
    file = entry.file
    metrics = file.metrics
    tuple_kinds = [infer_result_kind(part.transform, kinds[part.source]) for part in fields]
    values = zip(fields, tuple_kinds, file.partition, strict=True)
    return {
        "status": entry.status,
        "snapshot_id": entry.snapshot_id,
        "sequence_number": entry.sequence,
        "file_sequence_number": entry.file_sequence,
        "data_file": {
            "content": file.content,
            "file_path": file.path,
            "file_format": file.format,
            "partition": {f"p{part.id}": to_avro_value(kind, value) for part, kind, value in values},
            "record_count": file.record_count,
            "file_size_in_bytes": file.size,
            "block_size_in_bytes": 67_108_864,
            "column_sizes": [{"key": key, "value": 40 + key} for key in metrics] or None,
            "value_counts": _list_by_column(metrics, "values"),
            "null_value_counts": _list_by_column(metrics, "nulls"),
            "nan_value_counts": _list_by_column(metrics, "nans"),
            "lower_bounds": _list_by_column(metrics, "lower"),
            "upper_bounds": _list_by_column(metrics, "upper"),
            "key_metadata": None,
            "split_offsets": file.split_offsets,
            "equality_ids": file.equality_ids,
            "sort_order_id": 0 if file.content == 0 else None,
            "referenced_data_file": file.referenced_path,
            "content_offset": file.content_offset,
            "content_size_in_bytes": file.content_size,
            "first_row_id": getattr(file, "first_row_id", None),
        },
    }


def build_manifest_bytes(
    entries: list[Entry],
    *,
    version: int,
    content: int,
    style: Style,
    spec_id: int,
    fields: tuple[PartitionField, ...],
    kinds: dict[int, str],
    schema: dict[str, Any],
) -> bytes:
    """Return the bytes of a manifest file."""
    header = {
        "schema": json.dumps(schema),
        "partition-spec": json.dumps([part.build_json() for part in fields]),
        "partition-spec-id": str(spec_id),
        "format-version": str(version),
    }
    if version > 1:
        header["content"] = "deletes" if content else "data"
    if not style.sparse:
        header["schema-id"] = str(schema["schema-id"])
    record = build_partition_record(fields, kinds, plain_days=style.sparse)
    new_schema = fastavro.parse_schema(build_entry_schema(version, style, content, record))
    out = BytesIO()
    records = [build_entry_record(entry, fields, kinds) for entry in entries]
    fastavro.writer(out, new_schema, records, codec=style.codec, metadata=header, sync_interval=2000)
    return out.getvalue()


def build_manifest_list_schema(version: int, style: Style) -> dict[str, Any]:
    summary = [
        _build_field("contains_null", 509, "boolean"),
        _build_field("contains_nan", 518, "boolean", optional=True),
        _build_field("lower_bound", 510, "bytes", optional=True),
        _build_field("upper_bound", 511, "bytes", optional=True),
    ]
    count_suffix = "_data_files_count" if style.old_names else "_files_count"
    fields = [
        _build_field("manifest_path", 500, "string"),
        _build_field("manifest_length", 501, "long"),
        _build_field("partition_spec_id", 502, "int"),
    ]
    if version > 1:
        fields += [_build_field("content", 517, "int"), _build_field("sequence_number", 515, "long")]
        fields += [_build_field("min_sequence_number", 516, "long")]
    fields.append(_build_field("added_snapshot_id", 503, "long"))
    count_fields = [("added", 504, 512), ("existing", 505, 513), ("deleted", 506, 514)]
    fields += [
        _build_field(name + count_suffix, files, "int", optional=version == 1) for name, files, _ in count_fields
    ]
    fields += [
        _build_field(f"{name}_rows_count", rows, "long", optional=version == 1) for name, _, rows in count_fields
    ]
    items = {"type": "record", "name": "r508", "fields": summary}
    partitions = {"type": "array", "items": items, "element-id": 508}
    fields.append(_build_field("partitions", 507, partitions, optional=True))
    if not style.sparse:
        fields.append(_build_field("key_metadata", 519, "bytes", optional=True))
    if version >= 3:
        fields.append(_build_field("first_row_id", 520, "long", optional=True))
    if style.has_shuffled_fields:
        random.Random(style.seed).shuffle(fields)
    return {"type": "record", "name": "manifest_file", "fields": fields}


def encode_manifest_list(
    manifests: list[tuple[Manifest, int | None]], *, version: int, style: Style, header: dict[str, str]
) -> bytes:
    """Return the bytes of a manifest list of these manifests and their first row ids."""
    count_suffix = "_data_files_count" if style.old_names else "_files_count"
    records = []
    for manifest, first_row_id in manifests:
        record: dict[str, Any] = {
            "manifest_path": manifest.path,
            "manifest_length": manifest.length,
            "partition_spec_id": manifest.spec_id,
            "content": manifest.content,
            "sequence_number": manifest.sequence,
            "min_sequence_number": manifest.min_sequence,
            "added_snapshot_id": manifest.snapshot_id,
            "partitions": manifest.partitions,
            "first_row_id": first_row_id,
        }
        for name, status in (("added", ADDED), ("existing", EXISTING), ("deleted", DELETED)):
            files, rows = manifest.counts[status]
            record |= {name + count_suffix: files, f"{name}_rows_count": rows}
        records.append(record)
    out = BytesIO()
    schema = fastavro.parse_schema(build_manifest_list_schema(version, style))
    fastavro.writer(out, schema, records, codec=style.codec, metadata=header)
    return out.getvalue()
